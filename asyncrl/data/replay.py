"""Input of `mode=train_only`: recorded trajectories, in recorded order, cut into batches. Reads and checks; sends nothing.

Order and batches: groups are sorted by step and position in the batch, then cut into batches of train.batch_size. The last batch
may be smaller, as at the end of any run. Batches are counted from 0. Batch k is train step replay.first_step + k, where a step has
the number of the version in training, as in the recorded headers. So replaying the recording of a training run with that run's
batch size repeats its exact batches. A recording of `rollout_only` can be cut into any batches.

Versions: a token keeps the number of the version that sampled it, and gets the attempt of the replaying run. Version v of the
recording and of the replay are the same weights if both start from the same model and train on the same batches. With
first_step = s the learner starts as version s, so model_path must be the weights of that version (<run>/weights/actor/). The
learner's off-policyness is counted and bounded as in any run. The run is refused before it starts if it would train a group before
the version that sampled the group, or more than manager.max_head_offpolicyness versions after it. Version 0 samples everything that
`rollout_only` records, so batch k of such a recording is k versions old.

Keys: only those that the rollout worker sent are replayed. Keys that MFCs of the recorded run added are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.config.schema import ConfigError, ReplayConfig
from asyncrl.data.sequence import Array, SequenceSample
from asyncrl.data.trajectories import (
    Trajectory,
    TrajectoryError,
    TrajectoryHeader,
    find_recording,
    list_recording,
    read_header,
    read_trajectory,
)
from asyncrl.dataflow.graph import TRAJECTORY_KEYS
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion

_VERSION_KEYS = ("versions", "version_start", "version_end")
_ONE_ATTEMPT = WeightVersion(1, 0).pack()


@dataclass(frozen=True)
class Recorded:
    """One file to replay."""

    path: Path
    header: TrajectoryHeader


@dataclass(frozen=True)
class ReplayPlan:
    """The batches of a replay, in order."""

    first_step: int
    batches: list[list[Recorded]]

    @property
    def num_groups(self) -> int:
        return sum(map(len, self.batches))


def plan_replay(replay: ReplayConfig, *, batch_size: int, max_steps: int, max_head_offpolicyness: int) -> ReplayPlan:
    """Assign files to steps. Reads headers only. Raises ConfigError if the recording cannot be replayed as configured."""
    try:
        folder = find_recording(Path(replay.path).expanduser())
        recorded = [Recorded(path, read_header(path)) for path in list_recording(folder)]
    except (TrajectoryError, OSError) as error:
        raise ConfigError(f"replay.path={replay.path!r}: {error}") from error
    recorded = [entry for entry in recorded if entry.header.step >= replay.first_step]
    _check_gaps(replay, folder, recorded)
    batches = [recorded[start : start + batch_size] for start in range(0, len(recorded), batch_size)]
    batches = batches[: max(0, max_steps - replay.first_step)] if max_steps else batches
    if not batches or len(batches[0]) < batch_size:
        raise ConfigError(
            f"train.batch_size={batch_size}: {folder} holds {len(recorded)} trajectories from step {replay.first_step} on, "
            "too few for one batch; record more, or use a smaller batch"
        )
    plan = ReplayPlan(replay.first_step, batches)
    _check_versions(plan, folder, max_head_offpolicyness)
    return plan


def check_replay(plan: ReplayPlan, *, vocab_size: int, tokenizer: str, keys: Sequence[str] = TRAJECTORY_KEYS) -> None:
    """Read every file of the plan and check that it is complete, has a trajectory's keys and fits this model's vocabulary.

    Raises ConfigError. tokenizer: the fingerprint of the run's tokenizer; "" disables the comparison.
    """
    for step, batch in enumerate(plan.batches, start=plan.first_step):
        for entry in batch:
            try:
                problem = _problem(read_trajectory(entry.path), vocab_size, tokenizer, keys)
            except TrajectoryError as error:
                remedy = f"stop before this step with train.max_steps={step}, or record anew" if step else "record anew"
                raise ConfigError(f"replay.path: {error}; {remedy}") from error
            if problem:
                raise ConfigError(f"replay.path: {entry.path} {problem}")


def translate(trajectory: Trajectory, *, attempt: int, head: int, place: int) -> tuple[TrajectoryMeta, SequenceSample]:
    """Convert a recorded group to one of this run: its attempt, its head, and its place in the replay as the prompt's position."""
    header, sample = trajectory.header, trajectory.sample.select_keys(trajectory.header.meta.keys)
    data = {key: _of_attempt(sample.data[key], attempt) for key in _VERSION_KEYS}
    sample = SequenceSample(sample.ids, sample.seqlens, {**sample.data, **data})
    meta = msgspec.structs.replace(
        header.meta,
        attempt=attempt,
        head=head,
        locator=Locator(0, place),
        version_start=data["version_start"].tolist(),
        version_end=data["version_end"].tolist(),
    )
    return meta, sample


def _of_attempt(packed: Array, attempt: int) -> Array:
    """Return the packed versions with the same version numbers but this attempt; -1 (token not sampled) stays -1."""
    return np.where(packed < 0, packed, packed % _ONE_ATTEMPT + attempt * _ONE_ATTEMPT)


def _check_gaps(replay: ReplayConfig, folder: Path, recorded: Sequence[Recorded]) -> None:
    """Check that the recording begins at the replay's first step and has no gaps after it."""
    if not recorded:
        raise ConfigError(f"replay.first_step={replay.first_step}: {folder} ends before that step")
    steps: dict[int, list[Recorded]] = {}
    for entry in recorded:
        steps.setdefault(entry.header.step, []).append(entry)
    whole = [step for step, entries in steps.items() if len(entries) == entries[0].header.batch]
    first = whole[0] if whole else None
    if first != replay.first_step:
        begins = "holds no whole batch" if first is None else f"begins with step {first}; earlier steps were pruned"
        remedy = f"set replay.first_step={first} and model_path to the weights of version {first}, or " if first else ""
        raise ConfigError(
            f"replay.first_step={replay.first_step}: {folder} {begins}; {remedy}record with a larger record.max_bytes"
        )
    for expected, step in enumerate(steps, start=replay.first_step):
        found, needed = len(steps[step]), steps[step][0].header.batch
        if step != expected or found != needed:
            what = f"step {expected} is missing" if step != expected else f"step {step} has {found} of {needed} groups"
            raise ConfigError(
                f"replay.path={replay.path!r}: {folder} has a gap, {what}: record with record.every=1 and room on the disk, "
                f"or stop before that step with train.max_steps={expected}"
            )


def _check_versions(plan: ReplayPlan, folder: Path, eta: int) -> None:
    """Check that no group is trained before the version that sampled it, or later than eta allows."""
    worst = (0, 0, folder)  # (age in versions, -step, file)
    for step, batch in enumerate(plan.batches, start=plan.first_step):
        for entry in batch:
            meta = entry.header.meta
            oldest = WeightVersion.unpack(min(meta.version_start)).version
            newest = WeightVersion.unpack(max(meta.version_end)).version
            if newest > step:
                raise ConfigError(
                    f"train.batch_size: step {step} would train on {entry.path.name}, which version {newest} sampled; "
                    f"use the batch size of the recording ({entry.header.batch})"
                )
            worst = max(worst, (step - oldest, -step, entry.path))
    age, step, path = worst[0], -worst[1], worst[2]
    if age > eta:
        raise ConfigError(
            f"manager.max_head_offpolicyness={eta}: step {step} would train on {path}, which is {age} versions old by then; "
            f"allow this with manager.max_head_offpolicyness={age}, or stop earlier with train.max_steps={step - age + eta + 1}"
        )


def _problem(trajectory: Trajectory, vocab_size: int, tokenizer: str, keys: Sequence[str]) -> str:
    header, sample = trajectory.header, trajectory.sample
    missing = [key for key in keys if key not in sample.keys or key not in header.meta.keys]
    if missing:
        return f"lacks the keys {missing}, which training needs"
    if header.tokenizer and tokenizer and header.tokenizer != tokenizer:
        return "was recorded with another tokenizer than tokenizer_path; use the model that it was recorded with"
    highest = int(sample.data["packed_input_ids"].max(initial=0))
    if highest >= vocab_size:
        return (
            f"has the token id {highest}, but the model at model_path has only {vocab_size} tokens; "
            "use the model that it was recorded with"
        )
    return ""
