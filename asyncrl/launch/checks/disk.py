"""The disk space that a run needs, item by item, and the check that it is free."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import AUTO, ConfigError, ExperimentConfig
from asyncrl.launch.checks.checklist import Case
from asyncrl.launch.program import run_directory, writes_checkpoints
from asyncrl.runtime.disk import existing_parent, size_text
from asyncrl.weights.checkpoints import num_kept

_FLOATS_OF_A_PARAMETER = 3  # float32 values per parameter in a checkpoint: itself and two moments
_BLOCK_BYTES = 512  # the unit of st_blocks
_ETCD_BYTES = 130_000_000  # etcd allocates two files of its write-ahead log at its start


@dataclass(frozen=True)
class Item:
    """Files of one kind in the run's folder. The one that is being written counts."""

    what: str  # in the plural
    count: int
    num_bytes: int  # of each
    is_certain: bool = True  # the run writes all of them; else the size is an upper limit

    @property
    def total(self) -> int:
        return self.count * self.num_bytes

    def __str__(self) -> str:
        if not self.is_certain:
            return f"{self.what}: at most {size_text(self.total)}"
        return f"{self.what}: {self.count} x {size_text(self.num_bytes)}"


def items_of(config: ExperimentConfig, num_parameters: int, room: float = math.inf) -> Iterator[Item]:
    """What a run writes (pure). config: resolved. num_parameters: of the actor; the critic and the models of train.roles are
    assumed to be as large. room: bytes of the disk that the run may take; inf: unknown."""
    weights = num_parameters * (2 if config.train.dtype == "bfloat16" else 4)
    num_trained = 1 + (config.train.critic is not None) + len(config.train.roles)
    yield Item("weight versions (weights.keep + 1)", config.weights.keep + 1, weights)
    yield Item("final models", num_trained, weights)
    etcd = 0 if config.name_resolve.endpoints else _ETCD_BYTES
    if writes_checkpoints(config):
        checkpoint = _FLOATS_OF_A_PARAMETER * 4 * num_parameters * num_trained
        keep_last, left = config.checkpoint.keep_last, room - weights * (config.weights.keep + 1 + num_trained) - etcd
        number = num_kept(keep_last, checkpoint, left)
        named = f"={AUTO}: {number}," if keep_last == AUTO else ""
        yield Item(f"checkpoints (checkpoint.keep_last{named} + 1)", number + 1, checkpoint)
    if etcd:
        yield Item("write-ahead logs of etcd", 2, etcd // 2)
    if config.record.trajectories or not mode_of(config.mode).trains:
        yield Item("recorded trajectories (record.max_bytes)", 1, config.record.max_bytes, is_certain=False)


def items_text(items: Sequence[Item]) -> str:
    return "; ".join(str(item) for item in items if item.total)


def check_room(case: Case) -> None:
    """Check that the run's disk has room for the files that the run is certain to write. Raises ConfigError."""
    config = case.config
    run_dir = run_directory(config)
    room, old_bytes = math.inf, 0
    try:
        free = shutil.disk_usage(existing_parent(run_dir)).free
        # Files of earlier attempts count as free space, because the run removes them
        old = [*run_dir.glob("weights/*/*/*"), *run_dir.glob("checkpoints/recover/*/*")]
        if not config.name_resolve.endpoints:
            old += (run_dir / "etcd").rglob("*")
        old_bytes = sum(file.lstat().st_blocks * _BLOCK_BYTES for file in old)
        room = free + old_bytes
    except OSError:
        pass  # the launcher reports the error
    items = list(items_of(case.resolved, case.num_parameters, room))
    needed = sum(item.total for item in items if item.is_certain)
    case.disk_needed, case.disk_items = max(needed - old_bytes, 0), items_text(items)
    if room < needed:
        certain = items_text([item for item in items if item.is_certain])
        may_keep_less = writes_checkpoints(config) and config.checkpoint.keep_last != AUTO  # auto: it is 1 already
        keep_less = "set weights.keep=1" + (" and checkpoint.keep_last=1" if may_keep_less else "")
        raise ConfigError(
            f"fileroot={config.fileroot!r}: {size_text(int(room))} are free there, but the run needs {size_text(needed)} "
            f"({certain}); free space, use a larger disk, or {keep_less}"
        )
