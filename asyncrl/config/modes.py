"""The modes of a run: everything that code outside this file needs to know about them (pure).

That code asks for a trait and never compares the name of a mode.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModeTraits:
    """The defaults are the traits of mode=async."""

    trains: bool = True
    forms_batches: bool = True  # the master forms batches; otherwise it only evaluates the initial weights
    has_servers: bool = True  # generation servers, a gserver manager and rollout workers make the trajectories
    workers_generate: bool = False  # an MFC on the model workers makes the trajectories
    replays: bool = False  # the trajectories come from recordings
    has_detached_groups: bool = True  # groups of model workers without trained models may restart alone
    is_recoverable: bool = True  # it writes checkpoints, from which a restarted trainer group resumes

    @property
    def updates_servers(self) -> bool:
        """Whether trained weights are sent to generation servers."""
        return self.trains and self.has_servers


EVAL_ONLY = "eval_only"  # of asyncrl-launch eval
MODES = {
    "async": ModeTraits(),
    "sync": ModeTraits(has_servers=False, workers_generate=True, has_detached_groups=False),
    "rollout_only": ModeTraits(trains=False, has_detached_groups=False, is_recoverable=False),
    EVAL_ONLY: ModeTraits(trains=False, forms_batches=False, has_detached_groups=False, is_recoverable=False),
    "train_only": ModeTraits(has_servers=False, replays=True, has_detached_groups=False, is_recoverable=False),
}


def mode_of(name: str) -> ModeTraits:
    """The traits of a mode. An unknown mode, which another check refuses, has the traits of async."""
    return MODES.get(name, ModeTraits())
