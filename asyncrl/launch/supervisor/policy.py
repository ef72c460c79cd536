"""Who is started again when a process of a run has ended, how often and after which pause, and when the run ends (pure).

A rollout worker, a generation server and the gserver manager hold nothing that a run needs, and are started again alone. So are
model workers of a detached group (dataflow/worker_groups.py): those of one group together, as its next incarnation. Master and the
other model workers (the trainer group: the books, the optimizer) are started again together, as the next attempt, from the newest
checkpoint, and detached groups with them. What ends too often within an hour has everything started again, once a launch;
then the run ends, with the first cause on top. What could only end again ends the run at once: a process that fails by itself
before any of its name has come through its start, an error that lies in what the user gave. A process that something else kills in
its start is started again like any other. So does the first end of other processes (recorder, replayer), and of modes that have
them.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

WINDOW_S = 3600.0
TRAINER_GROUP = "the trainer group"
EVERYTHING = "everything"
TRAINER_KINDS = frozenset({"master", "model_worker"})
_ALONE_KINDS = frozenset({"rollout_worker", "generation_server", "gserver_manager"})
_MODES_WITH_TRAINER_GROUP = frozenset({"async", "sync"})  # the others have no checkpoint to go on from
_FIRST_PAUSE_S = 1.0  # of a second end in a row: the first one is started again at once, as one death says nothing
_LONGEST_PAUSE_S = 30.0
CALM_S = 60.0  # who has lived so long since its start died of something else than the one before: a row begins anew
_MAX_TOLD = 20  # lines about what was tried
_LONGEST_TURN_S = 1.0
BUSY_LIMITS = 20  # a process that uses CPU may stand still for so many times runtime.frozen_after_s
_CPU_SHARE = 0.01  # of that time; background threads of a deadlocked process use less


@dataclass(frozen=True)
class End:
    """A process has ended, or has said that it failed."""

    name: str  # e.g. rollout_worker/1
    how: str  # in a line: was killed by signal SIGKILL
    cause: str  # all that a person is told: its error with the traceback, or the end of its log, and where that is
    could_run: bool  # Child.could_run
    fatal: bool = False  # WorkerStatus.fatal
    struck: bool = False  # Child.was_struck


@dataclass(frozen=True)
class Trouble:
    """A process that failed or has ended too early, as far as is known of it so far."""

    name: str
    fatal: bool = False  # WorkerStatus.fatal
    struck: bool = False  # Child.was_struck


@dataclass(frozen=True)
class StartAgain:
    unit: str  # the name of a process, that of a detached group, TRAINER_GROUP or EVERYTHING
    pause_s: float
    number: int = 1  # how many restarts of it there were within WINDOW_S, this one included


@dataclass(frozen=True)
class EndRun:
    """cause: the first one. tried: what was done about it, a line each, oldest first."""

    cause: str
    tried: tuple[str, ...] = ()


Decision: TypeAlias = "StartAgain | EndRun"


class RestartBudget:
    """How often each unit is started again, and after which pause."""

    def __init__(self, limit: int) -> None:
        """limit: restarts of one unit within WINDOW_S."""
        self.limit = limit
        self._ends: defaultdict[str, deque[tuple[float, str]]] = defaultdict(deque)  # (when, cause), oldest first
        self._count: defaultdict[str, int] = defaultdict(int)
        self._rows: dict[str, tuple[int, float]] = {}  # ends in a row before the newest one; when its pause is over

    def count(self, unit: str) -> int:
        """How often it has been started again so far."""
        return self._count[unit]

    def recent(self, unit: str, now: float) -> list[str]:
        """The causes of its ends within WINDOW_S, oldest first."""
        ends = self._ends[unit]
        while ends and now - ends[0][0] > WINDOW_S:
            ends.popleft()
        return [cause for _, cause in ends]

    def ended(self, unit: str, cause: str, now: float) -> float | None:
        """It has ended. The pause before it is started again, in seconds; None where that was too often."""
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
    """Between an end and the next start, after so many in a row, each within CALM_S of its start."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(before - 1, 10)) if before else 0.0


class Supervision:
    """consumes: ends, and who has come through its start. produces: a decision for each end."""

    def __init__(
        self,
        limit: int,
        *,
        mode: str = "async",
        by_hand: Collection[str] = (),
        detached: Iterable[Collection[str]] = (),
    ) -> None:
        """limit: runtime.max_restarts. by_hand: processes that somebody else starts (debug.leave_out): what has them among its
        processes cannot be started again. detached: the processes of each worker group that is started again alone."""
        self.limit = limit
        self._detached = {name: tuple(sorted(group)) for group in detached for name in group}
        self._has_trainer_group = mode in _MODES_WITH_TRAINER_GROUP
        self._by_hand = frozenset(by_hand)
        self._budget = RestartBudget(limit)
        self._ran: set[str] = set()
        self._everything: tuple[float, str] | None = (
            None  # when everything was started again, and the first cause of that
        )
        self._tried: deque[tuple[float, str]] = deque(maxlen=_MAX_TOLD)

    def runs(self, name: str) -> None:
        """A process of this name has come through its start: the next one will too, most likely."""
        self._ran.add(name)

    def unit_of(self, name: str) -> str:
        """Who is started again if a process of this name ends: it alone, its detached group, or TRAINER_GROUP; "" if nobody is."""
        kind = _kind(name)
        if (group := self._detached.get(name)) is not None:
            return "" if self._by_hand.intersection(group) else group_unit(group)
        if kind in TRAINER_KINDS and self._has_trainer_group:
            return "" if any(_kind(other) in TRAINER_KINDS for other in self._by_hand) else TRAINER_GROUP
        return name if kind in _ALONE_KINDS else ""

    def members(self, name: str) -> tuple[str, ...]:
        """The processes that are started again with one of this name, itself included, where it is not of the trainer group."""
        return self._detached.get(name, (name,))

    def outlives(self, name: str, *, fatal: bool = False, struck: bool = False) -> bool:
        """Whether the run may go on after the end of such a process; else nothing is to be waited for."""
        return self.limit > 0 and bool(self.unit_of(name)) and (name in self._ran or struck) and not fatal

    def outlives_all(self, troubled: Iterable[Trouble]) -> bool:
        """Whether the run may go on after all these. Where one of a unit was struck, the others of it fail because of that."""
        troubled = list(troubled)
        struck = {self.unit_of(one.name) for one in troubled if one.struck}
        return all(
            self.outlives(one.name, fatal=one.fatal, struck=self.unit_of(one.name) in struck) for one in troubled
        )

    def count(self, name: str) -> int:
        """How often it has been started again so far."""
        return self._budget.count(self.unit_of(name)) + (self._everything is not None)

    def decide(self, end: End, wall_time: float, now: float) -> Decision:
        """now: monotonic seconds; wall_time: unix seconds, for what is told."""
        if end.could_run:
            self._ran.add(end.name)
        if not self.outlives(end.name, fatal=end.fatal, struck=end.struck):
            return EndRun(end.cause, self._told(now))
        unit = self.unit_of(end.name)
        pause = self._budget.ended(unit, end.cause, now)
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
        return EndRun(self._first_cause(recent[0], now), self._told(now))

    def _first_cause(self, cause: str, now: float) -> str:
        """That of the restart of everything, if that was lately: what has ended since did so after it."""
        if self._everything is not None and now - self._everything[0] <= WINDOW_S:
            return self._everything[1]
        return cause

    def _told(self, now: float) -> tuple[str, ...]:
        return tuple(text for when, text in self._tried if now - when <= WINDOW_S)


def group_unit(group: Collection[str]) -> str:
    """The name of a detached group, given its processes. With one process, the usual case, it is that process's name."""
    return ", ".join(sorted(group))


def _kind(name: str) -> str:
    return name.partition("/")[0]


def standstill(still_s: float, idle_s: float, limit_s: float) -> Literal["moves", "busy", "frozen"]:
    """The state of a process whose progress counter has stood still for still_s, and its CPU time for idle_s.

    A process that uses CPU is busy: its event loop is late, and will turn again. A process that uses none is stopped or deadlocked.
    """
    if still_s <= limit_s:
        return "moves"
    return "frozen" if idle_s > limit_s or still_s > BUSY_LIMITS * limit_s else "busy"


@dataclass(frozen=True)
class _Seen:
    """Of a process: its newest count and when that came; a CPU time and when it was reached."""

    count: int | None
    moved: float
    cpu_s: float
    worked: float


class FreezeWatch:
    """Which processes stand still. Only time in which the launcher itself turned counts: limits restart after a sleep."""

    def __init__(self, limit_s: float, start_limit_s: float) -> None:
        """limit_s: between two counts of a process, 0: no limit. start_limit_s: before the first one."""
        self._limit_s, self._start_limit_s = limit_s, start_limit_s
        self._awake_s = 0.0
        self._last_turn: float | None = None
        self._seen: dict[int, _Seen] = {}
        self.busy: dict[int, float] = {}  # at the latest turn: for how many seconds

    def turn(
        self, now: float, counts: Mapping[int, int | None], cpu_s: Mapping[int, float] = MappingProxyType({})
    ) -> dict[int, float]:
        """Those that are frozen: for how many seconds.

        counts: progress counter of each process, None before its first word. cpu_s: the CPU time of those for which it is known.
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
