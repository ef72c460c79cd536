"""Batches with a loss or gradient that was not finite. examples/bad_batch/examine.py finds the sequences that caused it.

    <run>/bad_batches/a0001-s00000012/      attempt 1, train step 12, which began from version 11
        step_00000011-group_0000-model_worker_0.safetensors ...       as in trajectories.py, with all keys present at the time
        why.json                                                      time and statistics of the step
        weights/                                                      only with mode=sync: the weights after the step

The run keeps the newest `train.keep_bad_batches`. In a mode that publishes weights, it also keeps the version that each step began
from, in <run>/weights. No torch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.protocol.versions import WeightVersion

FOLDER = "bad_batches"  # of a run
WEIGHTS = "weights"
_NAME = re.compile(r"a(\d{4,})-s(\d{8,})")
_WHY = "why.json"


@dataclass(frozen=True, order=True)
class BadBatch:
    """One kept batch. Batches are ordered by attempt, then by step."""

    attempt: int
    step: int  # numbered as in metrics.jsonl and the launcher's lines
    path: Path

    @property
    def weights(self) -> WeightVersion:
        """The weight version at which the train step of this batch began."""
        return WeightVersion(self.attempt, self.step - 1)


def folder_of(run_dir: Path, attempt: int, step: int) -> Path:
    return run_dir / FOLDER / f"a{attempt:04d}-s{step:08d}"


def write_why(folder: Path, time: float, stats: Mapping[str, float]) -> None:
    """Write why.json: time and statistics of the step."""
    folder.mkdir(parents=True, exist_ok=True)
    # msgspec writes null for values that are not finite
    (folder / _WHY).write_bytes(msgspec.json.encode({"time": time, "stats": dict(stats)}))


def list_bad_batches(run_dir: Path) -> list[BadBatch]:
    """List the kept batches of a run, oldest first."""
    folder = run_dir / FOLDER
    found = [(_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(BadBatch(int(match[1]), int(match[2]), entry) for match, entry in found if match)


def prune_bad_batches(run_dir: Path, keep: int) -> None:
    """Delete all kept batches but the newest `keep`."""
    batches = list_bad_batches(run_dir)
    for batch in batches[: max(0, len(batches) - keep)]:
        shutil.rmtree(batch.path, ignore_errors=True)


def weights_needed(run_dir: Path) -> list[WeightVersion]:
    """The weight versions at which the steps of the kept batches began. The run must keep them."""
    return [batch.weights for batch in list_bad_batches(run_dir)]
