"""Which fault strikes when: pure. The same seed gives the same faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

Kind = Literal["kill", "stop", "restart"]
Phase = Literal["", "idle", "generation", "push", "train_step", "weight_write", "update"]

# kill: SIGKILL. stop: SIGSTOP, and stop_s later SIGCONT, by when whoever missed it may have killed it. restart: SIGTERM, which a
# process may obey in its own time.
KINDS: tuple[Kind, ...] = ("kill", "stop", "restart")
PHASES: tuple[Phase, ...] = ("idle", "generation", "push", "train_step", "weight_write", "update")
# By kind (one of those that live, by chance) or by name (`rollout_worker/1`). engine: the process that a generation server has for
# itself (SGLang). nursery: the process that starts a reward function's processes for a worker. launcher: everything ends with it.
TARGETS = (
    "master",
    "model_worker",
    "generation_server",
    "engine",
    "gserver_manager",
    "rollout_worker",
    "nursery",
    "etcd",
    "launcher",
)


class Fault(Struct, frozen=True, kw_only=True):
    """One fault: what, to whom, when."""

    number: int
    kind: Kind
    target: str  # of TARGETS, or the name of one worker
    at: float  # seconds after the schedule's start, at the earliest
    phase: Phase = ""  # strike once the run is in it; "": at once
    stop_s: float = 20.0  # of `stop`
    draw: float = 0.0  # in [0, 1): which one, where several live


def check_target(target: str) -> None:
    """Raises ValueError for what cannot be a target."""
    kind, slash, index = target.partition("/")
    if kind not in TARGETS or (slash and not index.isdecimal()):
        raise ValueError(
            f"{target!r} is no target; use one of {', '.join(TARGETS)}, or a name such as rollout_worker/1"
        )


def schedule(
    *,
    seed: int,
    every: tuple[float, float],
    for_s: float,
    kinds: Sequence[Kind] = ("kill", "stop"),
    targets: Sequence[str] = ("rollout_worker", "generation_server", "gserver_manager", "model_worker", "master"),
    phases: Sequence[Phase] = ("",),
    weights: Mapping[str, float] | None = None,
    stop_s: tuple[float, float] = (1.0, 20.0),
) -> list[Fault]:
    """Faults for so many seconds, with `every` = (least, most) seconds between two. weights: of targets (default: 1 each)."""
    least, most = every
    if not 0 < least <= most:
        raise ValueError(f"every is {least:g}-{most:g}; seconds between two faults, the smaller number first, above 0")
    for name, given, known in (("kinds", kinds, KINDS), ("phases", phases, ("", *PHASES))):
        if unknown := [word for word in given if word not in known]:
            raise ValueError(f"{name}: {unknown[0]!r} is none; there are {', '.join(filter(None, known))}")
    for name, values in (("kinds", kinds), ("targets", targets), ("phases", phases)):
        if not values:
            raise ValueError(f"{name} is empty: nothing would ever happen")
    for target in targets:
        check_target(target)
    shares = [(weights or {}).get(target, 1.0) for target in targets]
    if min(shares) < 0 or not sum(shares):
        raise ValueError(f"weights are {shares}; none may be negative, one must be above 0")
    drawn = random.Random(seed)
    faults: list[Fault] = []
    at = drawn.uniform(least, most)
    while at < for_s:
        faults.append(
            Fault(
                number=len(faults),
                kind=drawn.choice(kinds),
                target=drawn.choices(targets, shares)[0],
                at=round(at, 3),
                phase=drawn.choice(phases),
                stop_s=round(drawn.uniform(*stop_s), 3),
                draw=drawn.random(),
            )
        )
        at += drawn.uniform(least, most)
    return faults
