"""Which model workers form which worker group, and which incarnation a worker group is in. Pure.

A worker group is one torch.distributed world. It ends as a whole: a rank in a collective with a rank that has died gets no further.
So workers that a run cannot go on without, and workers that hold nothing that is not on disk, are in different groups:

    trainer group    models that are trained, further layouts of their roles, and all that shares workers with one of these
    detached groups  each connected set of workers that hold nothing but stateless roles (reference, reward model)

A detached group is started again alone, as its next incarnation, while the trainer group goes on. In its group a worker's rank is
its place among the members. Only mode=async has detached groups: train_only and rollout_only restart no process alone, and with
mode=sync the trainer group generates too. A reference that is refreshed from the actor gets weights through the disk
(master/refresh.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncrl.config.schema import REF, REWARD
from asyncrl.protocol.fence import Fence

if TYPE_CHECKING:
    from asyncrl.dataflow.topology import ModelPlacement

STATELESS_ROLES = (REF, REWARD)  # their models are as on disk
MODES = ("async",)  # that have detached groups


class PlacedNode(Protocol):
    """dataflow.MFCDef, or config.PlacedMFC."""

    @property
    def model(self) -> str: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class WorkerGroups:
    """Of a run: the model workers of each group, in ascending order."""

    trainer: tuple[int, ...]
    detached: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_config(cls, num_workers: int, detached: Sequence[Sequence[int]]) -> WorkerGroups:
        """As the configs of processes hold it."""
        elsewhere = {worker for group in detached for worker in group}
        return cls(tuple(w for w in range(num_workers) if w not in elsewhere), tuple(map(tuple, detached)))

    def of(self, worker: int) -> tuple[int, ...]:
        """The group of a worker."""
        return next((group for group in self.detached if worker in group), self.trainer)

    @property
    def all_detached(self) -> frozenset[int]:
        """The workers that are not in the trainer group."""
        return frozenset(worker for group in self.detached for worker in group)


def worker_groups_of(
    placements: Sequence[ModelPlacement],
    mfcs: Iterable[PlacedNode],
    *,
    num_workers: int,
    mode: str,
) -> WorkerGroups:
    """placements, mfcs: of the run."""
    everyone = tuple(range(num_workers))
    if mode not in MODES:
        return WorkerGroups(everyone)
    moving = {mfc.model for mfc in mfcs if mfc.kind != "inference"}
    together = [set(placement.workers) for placement in placements]
    trainer: set[int] = set(everyone).difference(*together)  # who holds nothing, if anybody does
    for placement in placements:
        if placement.role not in STATELESS_ROLES or placement.name in moving:
            trainer.update(placement.workers)
    while near := [workers for workers in together if workers & trainer and not workers <= trainer]:
        trainer.update(*near)
    detached: list[set[int]] = []
    for workers in together:
        if not workers & trainer:
            joined = [group for group in detached if group & workers]
            detached = [group for group in detached if not group & workers] + [workers.union(*joined)]
    return WorkerGroups(tuple(sorted(trainer)), tuple(sorted(tuple(sorted(group)) for group in detached)))


class GroupIncarnations:
    """Which incarnation a worker group is in, by what its workers report. Its members start again together, and come one by one."""

    def __init__(self, members: Sequence[int]) -> None:
        self._numbers = dict.fromkeys(members, 0)
        self._newest = Fence(0)

    def connected(self, worker: int, number: int) -> bool:
        """A worker is there, in this incarnation. Whether that is the first word of a new one: the one before is over, for all."""
        self._numbers[worker] = max(number, self._numbers[worker])
        return self._newest.adopt(number)

    @property
    def number(self) -> int | None:
        """The incarnation that all members are in. None: the newest has begun, and some members are still to come."""
        return self._newest.newest if set(self._numbers.values()) == {self._newest.newest} else None

    @property
    def missing(self) -> list[int]:
        """Members that are still to come."""
        return [worker for worker, number in self._numbers.items() if self._newest.is_over(number)]
