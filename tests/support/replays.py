"""What a run has trained, trained again elsewhere: the recording of its lineage, and the weights that its tokens came from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.data.trajectories import Trajectory, list_recording, read_trajectory, recording_dir, step_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, launch
from asyncrl.weights.lineage import audit
from asyncrl.weights.versions import tensor_files, version_dir

LOGPROB_ERROR = 1e-4  # of a float32 engine against a plain forward pass
# A tiny run with responses long enough to be interrupted, and versions that differ
AHEAD = (
    "manager.max_head_offpolicyness=2",
    "rollout.sampling.max_new_tokens=64",
    "rollout.new_tokens_per_chunk=64",
    "train.optimizer.lr=1e-3",
    "train.optimizer.warmup_steps=0",
    "train.batch_size=4",
    "record.trajectories=true",
    "eval.prompts=null",
)


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in tensor_files(run_dir / "checkpoints" / "final") for name, x in load_file(file).items()}


def recording_of_lineage(run_dir: Path, folder: Path) -> list[Trajectory]:
    """Copy the groups of the last weights' lineage into a folder, as if one attempt had recorded all of them."""
    folder.mkdir()
    for stretch in audit(run_dir).lineage:
        for file in list_recording(recording_dir(run_dir, stretch.attempt)):
            if stretch.has(step_of(file) + 1):  # files count steps from 0
                shutil.copy(file, folder)
    return [read_trajectory(file) for file in list_recording(folder)]


def trained_apart(config: Path, recording: Path, *overrides: str) -> RunHandle:
    """Train on a recording, without servers and so on devices of its own. All versions are kept."""
    return launch(
        config,
        "mode=train_only",
        f"replay.path={recording}",
        "trial=apart",
        "train.max_steps=0",
        "weights.keep=1000",
        *overrides,
    )


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items())


def check_versions_of_tokens(recorded: list[Trajectory], apart: Path) -> float:
    """Check that each token's logprob is that under the weights of its version, taken from the run `apart`. Return how far the
    logprobs would be off if each response had been sampled with its oldest version only."""
    models: dict[int, torch.nn.Module] = {}

    def logprobs_T(version: int, ids_T: torch.Tensor) -> np.ndarray:
        if version not in models:
            models[version] = AutoModelForCausalLM.from_pretrained(
                version_dir(apart, "actor", WeightVersion(1, version)), dtype=torch.float32
            )
        with torch.no_grad():
            logits = models[version](ids_T[None]).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids_T[1:, None])[:, 0].numpy()

    worst = 0.0
    for data, lengths in ((trajectory.sample.data, trajectory.header.seqlens) for trajectory in recorded):
        start = 0
        for length in lengths["packed_input_ids"]:
            part = slice(start + 1, start + length)
            start += length
            ids_T = torch.from_numpy(data["packed_input_ids"][part.start - 1 : part.stop])
            sampled_T = data["loss_mask"][part]
            versions_T = np.array(
                [WeightVersion.unpack(max(packed, 0)).version for packed in data["versions"][part].tolist()]
            )
            told_T, oldest = data["packed_logprobs"][part], versions_T[sampled_T].min()
            for version in set(versions_T[sampled_T].tolist()):
                mine_T = sampled_T & (versions_T == version)
                found = np.abs(logprobs_T(version, ids_T) - told_T)[mine_T].max()
                assert found < LOGPROB_ERROR, f"tokens of version {version} are off by {found:.2g}"
            worst = max(worst, float(np.abs(logprobs_T(int(oldest), ids_T) - told_T)[sampled_T].max()))
    return worst
