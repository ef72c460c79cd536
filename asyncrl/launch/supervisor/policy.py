"""Restart policy (pure): which processes restart after one ends, how often, after what delay, and when the run fails.

- A rollout worker, a generation server or the gserver manager restarts alone, because it holds no state that the run needs.
- Model workers of a detached group (dataflow/worker_groups.py) restart together, as the next incarnation of the group. A group
  without which the run continues (on_missing=continue) restarts without limit.
- The master and the other model workers form the trainer group, which holds the run's records and the optimizer. They restart
  together, as the next attempt, from the newest checkpoint. Detached groups restart with them.
- A unit that exceeds its restart limit within an hour causes a restart of everything, once per launch. The run fails instead, and
  reports the first cause, if everything has already restarted, the mode has no checkpoints, or the user starts processes by hand.
- An error that would recur fails the run at once. Such an error is fatal by its status (it lies in the user's input), or the
  process fails by itself before any process of its name has completed its start. A process that is killed from outside during its
  start restarts like any other.
- A failure that a restart is likely to repeat (WorkerStatus.recurs_as: too little memory on a GPU) fails the run when it comes for
  the third time within six hours.
- Other processes (recorder, replayer), and the trainer group in modes without checkpoints, never restart: the first end fails the
  run.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from asyncrl.config.modes import mode_of

WINDOW_S = 3600.0
MOST_ALIKE, ALIKE_WINDOW_S = 3, 6 * 3600.0  # longer than WINDOW_S: a large model may need half an hour to fail again
TRAINER_GROUP = "the trainer group"
EVERYTHING = "everything"
TRAINER_KINDS = frozenset({"master", "model_worker"})
_ALONE_KINDS = frozenset({"rollout_worker", "generation_server", "gserver_manager"})

# Delay if a unit ends within CALM_S of its restart; doubled with each further such end, up to _LONGEST_PAUSE_S. After any other end
# the restart is immediate
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# A unit that ends later than this after its restart probably ended for a new reason, so its delays start again from zero
CALM_S = 60.0
_MAX_TOLD = 20  # most lines about restarts in the report of a failed run
_LONGEST_TURN_S = 1.0
BUSY_LIMITS = 20  # a process that uses CPU may send no heartbeat for this many times runtime.frozen_after_s
_CPU_SHARE = 0.01  # a busy process uses at least this share of a core; threads of a deadlocked one use less


@dataclass(frozen=True)
class End:
    """A process that has ended, or has reported that it failed."""

    name: str  # e.g. rollout_worker/1
    how: str  # one line, e.g. "was killed by signal SIGKILL"
    cause: str  # full report for people: the error with its traceback or the end of the log, and the log's path
    could_run: bool  # Child.could_run
    fatal: bool = False  # WorkerStatus.fatal
    struck: bool = False  # Child.was_struck
    recurs_as: str = ""  # Child.recurs_as, of any process that failed with it


@dataclass(frozen=True)
class Trouble:
    """A process that failed, or ended before its work was done. Its error report may not have arrived yet."""

    name: str
    fatal: bool = False  # WorkerStatus.fatal
    struck: bool = False  # Child.was_struck


@dataclass(frozen=True)
class StartAgain:
    unit: str  # the name of a process or of a detached group, TRAINER_GROUP or EVERYTHING
    pause_s: float
    number: int = 1  # the unit's restarts within WINDOW_S, including this one


@dataclass(frozen=True)
class EndRun:
    """cause: the first cause of the failure. tried: earlier restarts, one line each, oldest first."""

    cause: str
    tried: tuple[str, ...] = ()


Decision: TypeAlias = "StartAgain | EndRun"


class RestartBudget:
    """Counts the restarts of each unit and computes the delay before the next one."""

    def __init__(self, limit: int, *, window_s: float = WINDOW_S) -> None:
        """limit: maximal number of restarts of one unit within window_s."""
        self.limit, self._window_s = limit, window_s
        self._ends: defaultdict[str, deque[tuple[float, str]]] = defaultdict(deque)  # (when, cause), oldest first
        self._count: defaultdict[str, int] = defaultdict(int)
        # Per unit: the number of consecutive ends, up to the latest one, that each came within CALM_S of the restart before it; the
        # time at which the latest delay is over
        self._rows: dict[str, tuple[int, float]] = {}

    def count(self, unit: str) -> int:
        """Return the unit's number of restarts so far."""
        return self._count[unit]

    def recent(self, unit: str, now: float) -> list[str]:
        """Return the causes of the unit's ends within window_s, oldest first."""
        ends = self._ends[unit]
        while ends and now - ends[0][0] > self._window_s:
            ends.popleft()
        return [cause for _, cause in ends]

    def ended(self, unit: str, cause: str, now: float) -> float | None:
        """Record that the unit has ended. Returns the delay before its restart, in seconds; None if it has ended too often."""
        before = len(self.recent(unit, now))
        self._ends[unit].append((now, cause))
        if before >= self.limit:
            return None
        self._count[unit] += 1
        in_a_row, started = self._rows.get(unit, (0, -math.inf))
        in_a_row = in_a_row + 1 if now - started < CALM_S else 0
        pause = pause_s(in_a_row)
        self._rows[unit] = in_a_row, now + pause
        return pause


def pause_s(before: int) -> float:
    """Return the delay between an end and the restart, in seconds. before: the number of consecutive ends, up to this one, that
    each came within CALM_S of the restart before it."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(before - 1, 10)) if before else 0.0


class Supervision:
    """consumes: ends, and names of processes that have completed their start. produces: a decision for each end."""

    def __init__(
        self,
        limit: int,
        *,
        mode: str = "async",
        by_hand: Collection[str] = (),
        groups: Mapping[tuple[str, ...], bool] = MappingProxyType({}),
    ) -> None:
        """limit: runtime.max_restarts. by_hand: processes that the user starts (debug.leave_out); a unit that contains one cannot
        restart. groups: the processes of each detached group, and whether the run continues without it."""
        self.limit = limit
        self._group_of = {name: tuple(sorted(group)) for group in groups for name in group}
        self._dispensable = {group_unit(group) for group, is_dispensable in groups.items() if is_dispensable}
        self._has_trainer_group = mode_of(mode).is_recoverable
        self._by_hand = frozenset(by_hand)
        self._budget = RestartBudget(limit)
        self._alike = RestartBudget(MOST_ALIKE - 1, window_s=ALIKE_WINDOW_S)  # by the name of the failure
        self._ran: set[str] = set()
        self._everything: tuple[float, str] | None = None  # when everything restarted, and the first cause
        self._tried: deque[tuple[float, str]] = deque(maxlen=_MAX_TOLD)

    def runs(self, name: str) -> None:
        """Record that a process of this name has completed its start. Its successor is then likely to complete it, too."""
        self._ran.add(name)

    def unit_of(self, name: str) -> str:
        """Return the unit that restarts when this process ends: the process alone, its detached group, or TRAINER_GROUP. "": no
        restart is possible."""
        kind = _kind(name)
        if (group := self._group_of.get(name)) is not None:
            return "" if self._by_hand.intersection(group) else group_unit(group)
        if kind in TRAINER_KINDS and self._has_trainer_group:
            return "" if any(_kind(other) in TRAINER_KINDS for other in self._by_hand) else TRAINER_GROUP
        return name if kind in _ALONE_KINDS else ""

    def members(self, name: str) -> tuple[str, ...]:
        """Return the processes that restart together with this one, including itself. Do not call it for a member of the trainer
        group."""
        return self._group_of.get(name, (name,))

    def outlives(self, name: str, *, fatal: bool = False, struck: bool = False) -> bool:
        """Whether the run can go on after the end of this process, by a restart; `decide` checks whether restarts are left. If not,
        the run fails."""
        return self.limit > 0 and bool(self.unit_of(name)) and (name in self._ran or struck) and not fatal

    def outlives_all(self, troubled: Iterable[Trouble]) -> bool:
        """Whether the run can continue after all of these. If one process of a unit was struck, the unit's other failures are
        treated as its consequences."""
        troubled = list(troubled)
        struck = {self.unit_of(one.name) for one in troubled if one.struck}
        return all(
            self.outlives(one.name, fatal=one.fatal, struck=self.unit_of(one.name) in struck) for one in troubled
        )

    def count(self, name: str) -> int:
        """Return the number of restarts of this process so far."""
        return self._budget.count(self.unit_of(name)) + (self._everything is not None)

    def decide(self, end: End, wall_time: float, now: float) -> Decision:
        """Decide what follows from an end. now: monotonic seconds. wall_time: unix seconds, used in reports."""
        if end.could_run:
            self._ran.add(end.name)
        if not self.outlives(end.name, fatal=end.fatal, struck=end.struck):
            return EndRun(end.cause, self._recent_restarts(now))
        unit = self.unit_of(end.name)
        counts = bool(end.recurs_as) and unit not in self._dispensable
        if counts and self._alike.ended(end.recurs_as, end.cause, now) is None:
            why = (
                f"{end.recurs_as}, {MOST_ALIKE} times within {ALIKE_WINDOW_S / 3600:.0f} hours: a restart does not help"
            )
            return EndRun(f"{why}\n{end.cause}", self._recent_restarts(now))
        pause = self._budget.ended(unit, end.cause, now)
        if pause is None and unit in self._dispensable:
            pause = _LONGEST_PAUSE_S
        recent = self._budget.recent(unit, now)
        at = time.strftime("%H:%M:%S", time.localtime(wall_time))
        if pause is not None:
            self._tried.append(
                (now, f"{at} {end.name} {end.how}: {unit} started again ({len(recent)} of {self.limit})")
            )
            return StartAgain(unit, pause, len(recent))
        if self._everything is None and self._has_trainer_group and not self._by_hand:
            self._everything = now, recent[0]
            self._tried.append((now, f"{at} {end.name} {end.how}: everything started again"))
            return StartAgain(EVERYTHING, pause_s(self.limit))
        self._tried.append((now, f"{at} {end.name} {end.how}"))
        return EndRun(self._first_cause(recent[0], now), self._recent_restarts(now))

    def _first_cause(self, cause: str, now: float) -> str:
        """Return the cause of the restart of everything, if that happened within WINDOW_S, because all later ends count as its
        consequences. Otherwise return `cause`."""
        if self._everything is not None and now - self._everything[0] <= WINDOW_S:
            return self._everything[1]
        return cause

    def _recent_restarts(self, now: float) -> tuple[str, ...]:
        return tuple(text for when, text in self._tried if now - when <= WINDOW_S)


def group_unit(group: Collection[str]) -> str:
    """Return the name of a detached group, given its processes. A group of one process, the usual case, has that process's name."""
    return ", ".join(sorted(group))


def _kind(name: str) -> str:
    return name.partition("/")[0]


def standstill(still_s: float, idle_s: float, limit_s: float) -> Literal["moves", "busy", "frozen"]:
    """Return the state of a process. still_s: time since its heartbeat counter changed. idle_s: time since it used CPU.

    A process that uses CPU is busy: its event loop is blocked but probably continues later. It counts as frozen only after
    BUSY_LIMITS times limit_s. A process that uses no CPU is stopped or deadlocked.
    """
    if still_s <= limit_s:
        return "moves"
    return "frozen" if idle_s > limit_s or still_s > BUSY_LIMITS * limit_s else "busy"


@dataclass(frozen=True)
class _Seen:
    """A process's latest heartbeat count, and when that count changed last (moved); a CPU time of the process, and when it was
    reached (worked). `moved` and `worked` are times of FreezeWatch, which pass only while the launcher's loop runs."""

    count: int | None
    moved: float
    cpu_s: float
    worked: float


class FreezeWatch:
    """Detects frozen processes. Counts only time in which the launcher's own loop runs, so no process counts as frozen because the
    machine slept."""

    def __init__(self, limit_s: float, start_limit_s: float) -> None:
        """limit_s: longest time between two heartbeats of a process; 0: no limit. start_limit_s: longest time before the first."""
        self._limit_s, self._start_limit_s = limit_s, start_limit_s
        self._awake_s = 0.0
        self._last_turn: float | None = None
        self._seen: dict[int, _Seen] = {}
        self.busy: dict[int, float] = {}  # busy processes of the latest turn: key -> seconds without a heartbeat

    def turn(
        self, now: float, counts: Mapping[int, int | None], cpu_s: Mapping[int, float] = MappingProxyType({})
    ) -> dict[int, float]:
        """Return the frozen processes and their seconds without a heartbeat.

        counts: heartbeat counter of each process; None before its first status. cpu_s: CPU time of the processes for which it is
        known.
        """
        if self._last_turn is not None:
            self._awake_s += min(now - self._last_turn, _LONGEST_TURN_S)
        self._last_turn = now
        if not self._limit_s:
            return {}
        self._seen = {key: self._look(self._seen.get(key), count, cpu_s.get(key, 0.0)) for key, count in counts.items()}
        self.busy, frozen = {}, {}
        for key, seen in self._seen.items():
            still_s, idle_s = self._awake_s - seen.moved, self._awake_s - seen.worked
            if seen.count is None:
                state = "frozen" if still_s > self._start_limit_s else "moves"
            else:
                state = standstill(still_s, idle_s, self._limit_s)
            if state == "frozen":
                frozen[key] = still_s
            elif state == "busy":
                self.busy[key] = still_s
        return frozen

    def _look(self, before: _Seen | None, count: int | None, cpu_s: float) -> _Seen:
        if before is None or before.count != count:
            return _Seen(count, self._awake_s, cpu_s, self._awake_s)
        if cpu_s - before.cpu_s >= _CPU_SHARE * self._limit_s:
            return replace(before, cpu_s=cpu_s, worked=self._awake_s)
        return before
