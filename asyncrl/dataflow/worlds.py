"""Which model workers form which torch.distributed world, and which of its lives a world is in. Pure.

A world ends as a whole: who is in a collective with a rank that has died gets no further. So what a run cannot go on without, and
what holds nothing that is not on disk, are not in one world:

    trainer group  models that are trained, further layouts of their roles, and all that shares workers with one of these
    apart          each connected set of workers that hold nothing but stateless roles (reference, reward model): a world of its own

A world that is apart is started again alone, in its next life, while the trainer group goes on. In its world a worker's rank is its
place among the members. mode=async alone has worlds apart: elsewhere nobody starts anything again alone (train_only, rollout_only),
or the trainer group generates, too (sync). A reference that is refreshed from the actor gets weights through the disk
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
MODES = ("async",)  # that have worlds apart


class PlacedNode(Protocol):
    """dataflow.MFCDef, or config.PlacedMFC."""

    @property
    def model(self) -> str: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class Worlds:
    """Of the model workers of a run: workers in ascending order."""

    trainer: tuple[int, ...]
    apart: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_config(cls, num_workers: int, apart: Sequence[Sequence[int]]) -> Worlds:
        """As the configs of processes hold it."""
        elsewhere = {worker for world in apart for worker in world}
        return cls(tuple(w for w in range(num_workers) if w not in elsewhere), tuple(map(tuple, apart)))

    def of(self, worker: int) -> tuple[int, ...]:
        """The world of a worker."""
        return next((world for world in self.apart if worker in world), self.trainer)

    @property
    def all_apart(self) -> frozenset[int]:
        """The workers that are not in the trainer group."""
        return frozenset(worker for world in self.apart for worker in world)


def worlds_of(
    placements: Sequence[ModelPlacement],
    mfcs: Iterable[PlacedNode],
    *,
    num_workers: int,
    mode: str,
) -> Worlds:
    """placements, mfcs: of the run."""
    everyone = tuple(range(num_workers))
    if mode not in MODES:
        return Worlds(everyone)
    moving = {mfc.model for mfc in mfcs if mfc.kind != "inference"}
    together = [set(placement.workers) for placement in placements]
    trainer: set[int] = set(everyone).difference(*together)  # who holds nothing, if anybody does
    for placement in placements:
        if placement.role not in STATELESS_ROLES or placement.name in moving:
            trainer.update(placement.workers)
    while near := [workers for workers in together if workers & trainer and not workers <= trainer]:
        trainer.update(*near)
    apart: list[set[int]] = []
    for workers in together:
        if not workers & trainer:
            joined = [world for world in apart if world & workers]
            apart = [world for world in apart if not world & workers] + [workers.union(*joined)]
    return Worlds(tuple(sorted(trainer)), tuple(sorted(tuple(sorted(world)) for world in apart)))


class WorldLife:
    """In which life a world is, by what its workers say of themselves. Its members start again together, and come one by one."""

    def __init__(self, members: Sequence[int]) -> None:
        self._lives = dict.fromkeys(members, 0)
        self._newest = Fence(0)

    def connected(self, worker: int, life: int) -> bool:
        """A worker is there, in this life. Whether that is the first word of a new life: the one before is over, for all."""
        self._lives[worker] = max(life, self._lives[worker])
        return self._newest.adopt(life)

    @property
    def life(self) -> int | None:
        """In which all members are. None: the newest has begun, and some are still to come."""
        return self._newest.newest if set(self._lives.values()) == {self._newest.newest} else None

    @property
    def missing(self) -> list[int]:
        """Members that are still to come."""
        return [worker for worker, life in self._lives.items() if self._newest.is_over(life)]
