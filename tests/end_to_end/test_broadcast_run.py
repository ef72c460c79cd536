"""A run that broadcasts its weights: every version reaches every server, and each server's logprobs match the trainer's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.versions import verify_version, version_dir

pytestmark = pytest.mark.timeout(600)

STEPS = 4

# Without this wait, training would go on during the updates, and a delayed server would skip a version. Here each step waits inside
# the trainers until both servers have the previous version. Rollouts continue meanwhile.
_WAITING = """\
import re
import time
from pathlib import Path

from asyncrl.dataflow.mfc import mfc

num_steps = 0

@mfc(input_keys=["packed_input_ids"], output_keys=["waited"])
def wait(engine, sample, train):
    global num_steps
    num_steps += 1
    for server in range(2):
        log = Path("{logs}", f"generation_server_{{server}}.log")
        while len(re.findall("weights .* verified", log.read_text())) < num_steps:
            time.sleep(0.02)
    return sample.derive({{"waited": sample.data["packed_input_ids"]}})
"""


def test_a_run_with_broadcasts(tmp_path: Path) -> None:
    """Two servers and two trainers, one of which sends. verify_logprobs compares each server with the trainer after each update."""
    config = make_tiny_run(tmp_path)
    logs = tmp_path / "runs" / "tiny" / "t0" / "logs" / "latest"
    (tmp_path / "waiting.py").write_text(_WAITING.format(logs=logs))
    overrides = (
        "allocation=transformers.d2+d2",
        f"train.max_steps={STEPS}",
        "weights.transport=broadcast",
        "weights.bucket_bytes=20_000",
        "weights.verify_logprobs=true",
        f"weights.keep={STEPS + 1}",
        "eval.at_end=false",
        f"train.mfcs=[{tmp_path}/waiting.py:wait]",
        "train.extra_train_keys=[waited]",
    )
    with launch(config, *overrides) as run:
        assert run.run_dir / "logs" / "latest" == logs
        assert run.wait(400) == 0, run.output()
    assert len(train_steps(run.run_dir)) == STEPS
    sent = re.findall(r"weights (\S+) broadcast to (.*) \(", (logs / "model_worker_0.log").read_text())
    versions = [str(WeightVersion(1, number)) for number in range(STEPS + 1)]
    # A broadcast may split, so that servers get a version one after the other. The last version arrives during shutdown.
    reached = {(version, server) for version, servers in sent for server in servers.split(", ")}
    for index in range(2):
        assert {(version, f"generation_server/{index}") for version in versions[1:STEPS]} <= reached
        verified = re.findall(r"weights (\S+) verified", (logs / f"generation_server_{index}.log").read_text())
        assert verified[:STEPS] == versions[:STEPS]
    for number in range(STEPS + 1):  # versions are written to disk too
        version = WeightVersion(1, number)
        verify_version(version_dir(run.run_dir, "actor", version), version)
    assert_nothing_left(run.run_dir)
