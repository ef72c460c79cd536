"""The schedule of faults (pure). The same seed gives the same faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from asyncrl.config.nearest import did_you_mean

Kind = Literal["kill", "stop", "restart"]
Phase = Literal["", "idle", "generation", "push", "train_step", "weight_write", "update"]

# kill: SIGKILL. stop: SIGSTOP, then SIGCONT after stop_s; the launcher may have killed the process by then. restart: SIGTERM, after
# which a process may take time to end.
KINDS: tuple[Kind, ...] = ("kill", "stop", "restart")
PHASES: tuple[Phase, ...] = ("idle", "generation", "push", "train_step", "weight_write", "update")
# Kinds of processes (a random live one is chosen); a name such as `rollout_worker/1` is a target too. engine: a generation server's
# own engine process (SGLang). nursery: the process that starts a reward function's processes for a worker. launcher: all processes
# end with it.
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
    """One fault: its kind, target and time."""

    number: int
    kind: Kind
    target: str  # one of TARGETS, or the name of one process, e.g. rollout_worker/1
    at: float  # earliest time, in seconds after the schedule's start
    phase: Phase = ""  # wait until the run is in this phase; "": do not wait
    stop_s: float = 20.0  # duration of `stop`
    draw: float = 0.0  # in [0, 1): selects the process if several are alive


def check_target(target: str) -> None:
    """Raise ValueError for an invalid target."""
    kind, slash, index = target.partition("/")
    if kind not in TARGETS or (slash and not index.isdecimal()):
        raise ValueError(
            f"{target!r} is not a target; {did_you_mean(kind, TARGETS)}use one of {', '.join(TARGETS)}, or a name such as "
            "rollout_worker/1"
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
    """Faults during for_s seconds, with `every` = (least, most) seconds between two faults. weights: relative
    frequency of each target (default: 1). stop_s: (least, most) duration of a stop.
    """
    least, most = every
    if not 0 < least <= most:
        raise ValueError(
            f"every is {least:g}-{most:g}; give seconds between two faults, above 0, the smaller number first"
        )
    for name, given, known in (("kinds", kinds, KINDS), ("phases", phases, ("", *PHASES))):
        if unknown := [word for word in given if word not in known]:
            raise ValueError(f"{name}: {unknown[0]!r} is unknown; use {', '.join(filter(None, known))}")
    for name, values in (("kinds", kinds), ("targets", targets), ("phases", phases)):
        if not values:
            raise ValueError(f"{name} is empty, so there would be no faults; name at least one")
    for target in targets:
        check_target(target)
    shares = [(weights or {}).get(target, 1.0) for target in targets]
    if min(shares) < 0 or not sum(shares):
        raise ValueError(f"weights are {shares}; none may be negative, and at least one must be above 0")
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
