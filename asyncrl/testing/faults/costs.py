"""The throughput that faults cost a run: `costs_of` is pure, `read_costs` reads the files of the run.

The time after a fault has up to four parts:
  detection  from the fault until the launcher has started another process; of a stopped rollout worker that continues:
             until the manager has handed out one of the run's prompts again
  frozen     until a stopped process continues; of a rollout worker only the time after the detection
  restart    until the new process runs (master and model workers: until all of them run)
  refill     until the run has trained _REFILL_STEPS more steps
The loss of a part is its duration minus the undisturbed duration of the train steps in it. It is negative if the run trained
faster in this part than undisturbed. If faults overlap, time counts once: for the newest fault, and as refill only if no other
part is active.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from asyncrl.launch.supervisor.policy import TRAINER_KINDS
from asyncrl.protocol.tickets import TicketId
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.testing.faults.injector import FAULTS_JOURNAL
from asyncrl.weights.lineage import audit_of, read_attempts

PARTS = ("frozen", "detection", "restart", "refill")

_REFILL_STEPS = 10
_LEAST_CALM_STEPS = 10  # with fewer undisturbed steps the usual duration of a step is unknown
_RUNNING = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) \w+ +(\S+): running$", re.MULTILINE)

Event: TypeAlias = "Mapping[str, Any]"


class Stage(Struct, frozen=True, kw_only=True):
    """A part of the time after a fault; unix seconds."""

    number: int  # of the fault
    part: str  # of PARTS
    begin: float
    end: float


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of all faults of one kind."""

    what: str  # e.g. stop rollout_worker
    num_faults: int
    lost_s: dict[str, float]  # by part


class Costs(Struct, frozen=True, kw_only=True):
    """The cost of all faults, from the first fault to the end of the last refill."""

    step_s: float  # undisturbed duration of a train step
    time_s: float  # duration of all parts together
    of_faults: list[Cost]
    again_s: float  # seconds lost because steps were trained again from an earlier checkpoint

    @property
    def lost_s(self) -> float:
        return self.again_s + sum(sum(cost.lost_s.values()) for cost in self.of_faults)


def read_costs(run_dir: Path, *, since: float = 0.0) -> Costs | None:
    """The costs of a run. None if it had no faults, or too few undisturbed steps to know its pace.

    since: unix seconds; ignore earlier events.
    """
    journal = run_dir / "journal"
    attempts = read_attempts(run_dir)
    steps = sorted(
        float(event["end"])
        for attempt in attempts
        for event in attempt.events
        if event["event"] == "trained" and event["end"] >= since
    )
    faults = journal / f"{FAULTS_JOURNAL}.jsonl"
    if not steps or not faults.exists():
        return None
    runs = [
        (datetime.strptime(when, "%Y-%m-%d %H:%M:%S.%f").timestamp(), name)
        for log in run_dir.glob("logs/attempt_*/*.log")
        if not log.is_symlink()
        for when, name in _RUNNING.findall(log.read_text(errors="replace"))
    ]
    manager = journal / "gserver_manager.jsonl"
    admitted: Sequence[Event] = read_json_lines(manager) if manager.exists() else ()
    issued = [
        float(event["time"])
        for event in admitted
        if event["event"] == "admitted" and (ticket := TicketId.parse(event["ticket"])) is not None and ticket.issue > 1
    ]
    voided = audit_of(str(run_dir), attempts, [], []).voided_steps
    struck: Sequence[Event] = read_json_lines(faults)
    records = [record for record in struck if record["time"] >= since]
    stages = stages_of(records, runs=runs, issued_again=issued, steps=steps)
    return costs_of(records, stages, steps=steps, voided_steps=voided)


def stages_of(
    records: Iterable[Event],
    *,
    runs: Iterable[tuple[float, str]],
    issued_again: Iterable[float],
    steps: Sequence[float],
) -> list[Stage]:
    """The stages of each fault. records: of the injector. runs: for each process, the time at which it began to run, and its name.

    issued_again: times at which a prompt was handed out again. steps: ends of train steps, in order.
    """
    of_fault: defaultdict[int, dict[str, Event]] = defaultdict(dict)
    for record in records:
        of_fault[record["number"]][record["event"]] = record
    began = sorted(runs)
    stages: list[Stage] = []
    for number, events in sorted(of_fault.items()):
        if (fault := events.get("fault")) is None:
            continue
        struck = noticed = ready = float(fault["time"])
        frozen_until = struck
        if (recovered := events.get("recovered")) is not None:
            noticed = float(recovered["time"])
            ready = _ready(str(fault["name"]), struck, noticed, began)
        elif (went_on := events.get("continued")) is not None:
            ready = frozen_until = noticed = float(went_on["time"])
            if fault["target"].startswith("rollout_worker"):
                noticed = min((at for at in issued_again if struck < at < ready), default=ready)
            else:
                noticed = struck
        after = [at for at in steps if at > ready][:_REFILL_STEPS]
        refilled = after[-1] if after else ready
        bounds = {
            "detection": (struck, noticed),
            "frozen": (noticed, frozen_until),
            "restart": (max(noticed, frozen_until), ready),
            "refill": (ready, refilled),
        }
        stages += [
            Stage(number=number, part=part, begin=begin, end=end)
            for part, (begin, end) in bounds.items()
            if begin < end
        ]
    return stages


def _ready(name: str, struck: float, noticed: float, began: Sequence[tuple[float, str]]) -> float:
    """The time at which the replacement process began to run; for a trainer group: at which all its processes ran."""
    trains = name.partition("/")[0] in TRAINER_KINDS
    names = {other for _, other in began if other.partition("/")[0] in TRAINER_KINDS} if trains else {name}
    first = [min((at for at, other in began if other == member and at > struck), default=noticed) for member in names]
    return max([noticed, *first])


def costs_of(
    records: Iterable[Event], stages: Sequence[Stage], *, steps: Sequence[float], voided_steps: int
) -> Costs | None:
    """The costs by kind of fault and part. None if too few steps are outside all stages.

    steps: ends of all train steps, oldest first. voided_steps: how many of them a later attempt trained again.
    """
    if not stages or not steps:
        return None
    whats = {
        record["number"]: f"{record['kind']} {record['target']}" for record in records if record["event"] == "fault"
    }
    first, last = steps[0], steps[-1]
    ends = {at for stage in stages for at in (stage.begin, stage.end) if first < at < last}
    bounds = sorted({first, last, *ends})
    time_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    num_steps: Counter[tuple[str, str]] = Counter()
    for begin, end in pairwise(bounds):
        open_stages = [stage for stage in stages if stage.begin <= begin and end <= stage.end]
        owner = max(open_stages, key=lambda stage: (stage.part != "refill", stage.number), default=None)
        key = (whats[owner.number], owner.part) if owner is not None else ("", "")
        time_s[key] += end - begin
        num_steps[key] += sum(begin < at <= end for at in steps)
    calm_s, calm_steps = time_s.pop(("", ""), 0.0), num_steps.pop(("", ""), 0)
    if calm_steps < _LEAST_CALM_STEPS:
        return None
    step_s = calm_s / calm_steps
    num_faults = Counter(whats.values())
    of_faults = [
        Cost(
            what=what,
            num_faults=num_faults[what],
            lost_s={part: round(time_s[what, part] - num_steps[what, part] * step_s, 1) for part in PARTS},
        )
        for what in sorted(num_faults)
    ]
    return Costs(
        step_s=step_s,
        time_s=round(sum(time_s.values()), 1),
        of_faults=of_faults,
        again_s=round(voided_steps * step_s, 1),
    )


def cost_lines(costs: Costs) -> list[str]:
    """The costs as a text table."""
    lines = [f"{'seconds lost':<28}{'faults':>8}" + "".join(f"{part:>11}" for part in PARTS)]
    for cost in costs.of_faults:
        lines.append(f"{cost.what:<28}{cost.num_faults:>8}" + "".join(f"{cost.lost_s[part]:>11.1f}" for part in PARTS))
    total = {part: sum(cost.lost_s[part] for cost in costs.of_faults) for part in PARTS}
    lines.append(f"{'all':<36}" + "".join(f"{total[part]:>11.1f}" for part in PARTS))
    lines.append(
        f"{costs.lost_s:.1f} s lost of {costs.time_s:.1f} s affected by faults, {costs.again_s:.1f} s of this loss for steps that "
        f"were trained again; undisturbed, a step takes {costs.step_s:.2f} s"
    )
    return lines
