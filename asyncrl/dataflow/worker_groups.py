"""Which model workers form which worker group, and which incarnation a worker group is in. Pure.

A worker group is one torch.distributed process group. If one worker of a group ends, the whole group must restart, because a rank
blocks in a collective with a dead rank. Therefore workers with state that a run needs, and workers whose state is all on disk, are
in different groups:

    trainer group    models that are trained, further layouts of their roles, and all models that share workers with these
    detached groups  each connected set of workers that hold only stateless roles (reference, reward model, teacher), with
                     train.actor_inf_on_missing further layouts of the actor, or MFCs without a model (`advantages:cpu2`), whose
                     state the master keeps

The launcher restarts a detached group alone, as its next incarnation, while the trainer group continues. A worker's rank in its
group is its position among the members. Only mode=async has detached groups: train_only and rollout_only restart no process
alone, and with mode=sync the trainer group also generates. A reference model that is refreshed from the actor gets its weights
from the trainer's memory (master/refresh.py), and so does a detached layout of the actor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import REF, REWARD, TEACHER, TrainConfig, reward_models
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.names import ACTOR

if TYPE_CHECKING:
    from asyncrl.dataflow.topology import ModelPlacement


def is_stateless(role: str) -> bool:
    """Whether all weights of the role's models are on disk: the reference, the teacher and the reward models."""
    return role in (REF, REWARD, TEACHER) or role.startswith(f"{REWARD}_")


def is_detachable(model: str, role: str, train: TrainConfig) -> bool:
    """Whether the model may be in a detached group. The actor's first model is trained, so only its further ones may."""
    return is_stateless(role) or (bool(train.actor_inf_on_missing) and role == ACTOR and model != role)


class PlacedNode(Protocol):
    """The attributes that dataflow.MFCDef and config.PlacedMFC share."""

    @property
    def model(self) -> str: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class WorkerGroups:
    """The worker groups of a run. Each lists its model workers in ascending order."""

    trainer: tuple[int, ...] = ()
    detached: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_config(cls, groups: Sequence[Sequence[int]], num_workers: int) -> WorkerGroups:
        """Build from the groups in a process config. The first is the trainer group; if there are none, it has all workers."""
        trainer, *detached = map(tuple, groups or [range(num_workers)])
        return cls(trainer, tuple(detached))

    @property
    def all(self) -> tuple[tuple[int, ...], ...]:
        """The trainer group, then the others."""
        return (self.trainer, *self.detached)

    def of(self, worker: int) -> tuple[int, ...]:
        """The group of a worker."""
        return next((group for group in self.detached if worker in group), self.trainer)

    def is_local(self, worker: int) -> bool:
        """Whether the worker is in the trainer group. Without detached groups every worker is."""
        return not any(worker in group for group in self.detached)


ONE_GROUP = WorkerGroups()  # every worker is in the trainer group


def worker_groups_of(
    placements: Sequence[ModelPlacement],
    mfcs: Iterable[PlacedNode],
    train: TrainConfig,
    *,
    num_workers: int,
    mode: str,
) -> WorkerGroups:
    """Return the worker groups for the run's placements and MFCs."""
    everyone = tuple(range(num_workers))
    if not mode_of(mode).has_detached_groups:
        return WorkerGroups(everyone)
    moving = {mfc.model for mfc in mfcs if mfc.kind != "inference"}
    together = [set(placement.workers) for placement in placements]
    trainer: set[int] = set(everyone).difference(*together)  # at first, workers that hold no model, if any
    for placement in placements:
        alone = placement.grid.on_cpu or is_detachable(placement.name, placement.role, train)
        if not alone or placement.name in moving:
            trainer.update(placement.workers)
    while near := [workers for workers in together if workers & trainer and not workers <= trainer]:
        trainer.update(*near)
    detached: list[set[int]] = []
    for workers in together:
        if not workers & trainer:
            joined = [group for group in detached if group & workers]
            detached = [group for group in detached if not group & workers] + [workers.union(*joined)]
    return WorkerGroups(tuple(sorted(trainer)), tuple(sorted(tuple(sorted(group)) for group in detached)))


def gets_kept_weights(model: ModelPlacement, groups: WorkerGroups, train: TrainConfig) -> bool:
    """Whether the actor's ranks keep weights in memory for this model: it is in another worker group, and follows the actor."""
    follows = model.role == ACTOR or (model.role == REF and train.ref.update_interval > 0)
    return follows and not groups.is_local(model.workers[0])


def on_missing(train: TrainConfig, role: str) -> str:
    """What the run does without the detached group of a role: wait | continue | stop."""
    models = reward_models(train)
    if role in models:
        return models[role].on_missing
    return {REF: train.ref.on_missing, ACTOR: train.actor_inf_on_missing}.get(role, "") or "wait"


def dispensable(
    groups: WorkerGroups, placements: Iterable[ModelPlacement], train: TrainConfig
) -> list[tuple[int, ...]]:
    """The detached groups without which the run continues: on_missing=continue for all their models."""
    needed = {worker for model in placements if on_missing(train, model.role) != "continue" for worker in model.workers}
    return [group for group in groups.detached if needed.isdisjoint(group)]


class GroupIncarnations:
    """The incarnation of a worker group, from the reports of its workers. Members restart together but connect one by one.

    At first all members count as connected in incarnation 0.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._numbers = dict.fromkeys(members, 0)
        self._newest = Fence(0)

    def connected(self, worker: int, number: int) -> bool:
        """Record that a worker has connected in this incarnation. Returns True if the worker is the first member that connects in a
        new incarnation. The previous incarnation is then over for all members."""
        self._numbers[worker] = max(number, self._numbers[worker])
        return self._newest.adopt(number)

    @property
    def number(self) -> int | None:
        """The newest incarnation, if all members have connected in it. None: some have not connected yet."""
        return self._newest.newest if set(self._numbers.values()) == {self._newest.newest} else None

    @property
    def missing(self) -> list[int]:
        """Members that have not connected yet in the newest incarnation."""
        return [worker for worker, number in self._numbers.items() if self._newest.is_over(number)]
