"""A fault during a weight update, and the check that every trained token still has the logprob of the weights it was sampled with.

run = launch(config, "record.trajectories=true", "weights.keep=1000", env=die_in_update(tmp_path / "fault", server=1, version=8))
...
assert has_struck(tmp_path / "fault")
assert largest_logprob_error(run.run_dir, moved_tickets(run.run_dir)) < 1e-4
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from asyncrl.data.trajectories import list_recording, read_trajectory, recording_dir
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import version_dir

# Runs at the start of every interpreter of the run. The fault strikes once, in the first process that creates the file.
_DIE_IN_UPDATE = """\
import os, signal, sys
def die_in_update(event, arguments):
    if event != "open" or not str(arguments[0]).endswith("model.safetensors"):
        return
    version = os.path.basename(os.path.dirname(str(arguments[0])))
    if not (version.startswith("a0") and version >= "{version}" and sys.argv[-1].endswith("{config}")):
        return
    try:
        os.close(os.open("{struck}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die_in_update)
"""


def die_in_update(folder: Path, *, server: int, version: int) -> dict[str, str]:
    """Environment of a run in which this generation server kills itself once (SIGKILL), when it opens the tensors of this version
    or a later one to load them."""
    folder.mkdir()
    text = _DIE_IN_UPDATE.format(
        version=WeightVersion(1, version), config=f"generation_server_{server}.yaml", struck=folder / "struck"
    )
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def has_struck(folder: Path) -> bool:
    """Whether the fault of this folder has happened."""
    return (folder / "struck").exists()


def moved_tickets(run_dir: Path) -> set[str]:
    """Tickets that lost their server and continued on another one, according to the rollout workers' logs of attempt 1."""
    logs = sorted((run_dir / "logs" / "attempt_1").glob("rollout_worker_*.log"))
    return {
        ticket for log in logs for ticket in re.findall(r"ticket (\S+): lost generation_server/\d", log.read_text())
    }


def largest_logprob_error(run_dir: Path, tickets: Collection[str] | None = None) -> float:
    """The largest difference between a sampled token's logprob and the logprob that the weights of its version give it, at
    temperature 1, over these recorded groups (default: all). Raises ValueError if none of them was recorded.

    A lost or duplicated token would be found here, because all following tokens would have other logprobs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    recorded = [read_trajectory(file).sample for file in list_recording(recording_dir(run_dir, 1))]
    chosen = [sample for sample in recorded if tickets is None or sample.ids[0] in tickets]
    if not chosen:
        raise ValueError(f"none of {len(recorded)} recorded groups belongs to the {len(tickets or ())} given tickets")
    keys = ("packed_input_ids", "packed_logprobs", "versions")
    sequences = [
        sequence for sample in chosen for sequence in zip(*(sample.slices(key)[0] for key in keys), strict=True)
    ]
    largest = 0.0
    for packed in sorted({int(version) for _, _, versions in sequences for version in np.unique(versions)} - {-1}):
        path = version_dir(run_dir, "actor", WeightVersion.unpack(packed))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for ids, logprobs, versions in sequences:
            mine = versions[1:] == packed
            if not mine.any():
                continue
            input_ids = torch.from_numpy(ids)[None]
            with torch.no_grad():
                rows = model(input_ids).logits[0, :-1].log_softmax(-1)
            expected = rows.gather(1, input_ids[0, 1:, None])[:, 0].numpy()
            largest = max(largest, float(np.abs(logprobs[1:] - expected)[mine].max()))
    return largest
