"""Decides at each turn which processes of a run are killed, which restart, and when the run ends (pure).

    the children's present state --> Supervisor.turn --> decisions, which the launcher carries out in their order

policy.py holds the restart policy: how often, and after what delay. This file contains the procedures that take several turns: the
restart of a unit within its attempt, and the start of the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.launch.supervisor.children import KILL_LIMIT_S, Child, first_cause, first_failed, short_end
from asyncrl.launch.supervisor.policy import (
    BUSY_LIMITS,
    EVERYTHING,
    TRAINER_GROUP,
    TRAINER_KINDS,
    WINDOW_S,
    End,
    EndRun,
    FreezeWatch,
    StartAgain,
    Supervision,
    Trouble,
)

LAST_WORDS_S = 1.0  # after the first failure: how long to wait for error reports of other processes


@dataclass(frozen=True)
class Notice:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class Kill:
    child: Child
    froze_s: float = 0.0  # if it is killed because it froze: seconds without a heartbeat (Child.froze_s)


@dataclass(frozen=True)
class Forget:
    """Remove a child that has ended and is no longer needed."""

    child: Child


@dataclass(frozen=True)
class Cancel:
    """Cancel pending restarts: those of the master and the model workers (trainer_only), or all. These processes start with the
    next attempt instead."""

    trainer_only: bool

    def concerns(self, name: str) -> bool:
        return not self.trainer_only or name.partition("/")[0] in TRAINER_KINDS


@dataclass(frozen=True)
class StartLater:
    """Restart a process within its attempt."""

    name: str
    how: str  # how its last process ended
    count: int  # its restarts, including this one
    pause_s: float


@dataclass(frozen=True)
class LookForCheckpoint:
    """Search for the newest checkpoint. The launcher calls `checkpoint_found` when the search is over."""


@dataclass(frozen=True)
class BeginAttempt:
    """Begin the next attempt, with new processes for this unit."""

    unit: str  # TRAINER_GROUP or EVERYTHING
    how: str  # the end that caused it

    def concerns(self, kind: str) -> bool:
        return self.unit == EVERYTHING or kind in TRAINER_KINDS


Decision: TypeAlias = Notice | Kill | Forget | Cancel | StartLater | LookForCheckpoint | BeginAttempt | EndRun


@dataclass
class _Renewal:
    """The transition to the next attempt: kill the processes of `next.unit`, then find the newest checkpoint, then start new
    processes."""

    next: BeginAttempt
    due: float
    since: float
    looked: bool = False
    found: bool = False

    def concerns(self, child: Child) -> bool:
        return self.next.concerns(child.spec.kind)


@dataclass(frozen=True)
class _Return:
    """The restart of a unit within its attempt: kill its remaining processes, then start all of them."""

    names: tuple[str, ...]
    how: str  # the end that caused it
    due: float
    since: float
    count: int  # its restarts, including this one


class Supervisor:
    """consumes: the children at every turn, the news that a checkpoint search is over. produces: decisions."""

    def __init__(
        self,
        policy: Supervision,
        freezes: FreezeWatch,
        *,
        frozen_after_s: float,
        stop_timeout_s: float,
        trainer_group: Callable[[], str],
        leaves: Callable[[Child], bool] = lambda child: False,
    ) -> None:
        """frozen_after_s, stop_timeout_s: from the config's `runtime`. trainer_group: returns the names of the group's processes,
        for notices. leaves: whether the run continues without this child and without a replacement."""
        self.policy = policy
        self._freezes = freezes
        self._frozen_after_s, self._stop_timeout_s = frozen_after_s, stop_timeout_s
        self._trainer_group, self._leaves = trainer_group, leaves
        self._renewal: _Renewal | None = None
        self._returning: dict[str, _Return] = {}  # by unit
        self._group_incarnations: dict[str, int] = {}  # by process: number of restarts of its group in this attempt
        self._failing: dict[str, float] = {}  # by unit (of several processes): when its first failure was seen
        self._told_busy: frozenset[int] = frozenset()
        self._listens_until: float | None = None
        self._children: list[Child] = []  # of this turn
        self._decisions: list[Decision] = []

    @property
    def is_listening(self) -> bool:
        """Whether the supervisor waits for error reports, because processes have failed in a way that the run cannot survive. The
        reports of the other processes can show the first cause, or that the failures are consequences of a killed process, which
        can restart."""
        return self._listens_until is not None

    @property
    def begins_attempt(self) -> bool:
        """Whether the transition to the next attempt is in progress."""
        return self._renewal is not None

    @property
    def starts_everything(self) -> bool:
        return self._renewal is not None and self._renewal.next.unit == EVERYTHING

    def group_incarnation_of(self, name: str) -> int:
        """Return how often the worker group of a process has restarted in this attempt."""
        return self._group_incarnations.get(name, 0)

    def checkpoint_found(self) -> None:
        """Record that the search that LookForCheckpoint began is over, even if it has found no checkpoint."""
        if self._renewal is not None:
            self._renewal.found = True

    def turn(self, children: Sequence[Child], *, now: float, wall_time: float, hurried: bool = False) -> list[Decision]:
        """Return the decisions of this turn. now: monotonic seconds. wall_time: unix seconds, compared with the times of failures.
        hurried: the run was told to stop, so do not wait for further error reports."""
        self._children, self._decisions = list(children), []
        if not self.is_listening:
            self._kill_frozen(now)
        if hurried and self._listens_until is not None:
            self._listens_until = now
        if self._handle_ends(now, wall_time):
            self._advance_restarts(now)
            self._renew(now)
        return self._decisions

    # ------------------------------------------------------------------------------------------------------------- frozen

    def _kill_frozen(self, now: float) -> None:
        """Kill frozen processes, because their peers wait for them. Report busy ones, and let them run up to a longer limit."""
        alive = {  # keyed by lease, because processes on different hosts may have the same pid
            child.lease.id: child
            for child in self._children
            if child.returncode is None and child.process is not None and not child.is_done
        }
        counts = {key: child.progress_count() for key, child in alive.items()}
        cpu_s = {key: child.cpu_s() for key, child in alive.items()}
        frozen = self._freezes.turn(now, counts, cpu_s)
        busy = self._freezes.busy
        for key in busy.keys() - self._told_busy:
            limit_s = BUSY_LIMITS * self._frozen_after_s
            self._tell(
                f"{alive[key].name} is busy: its event loop has not turned for {busy[key]:.0f} s, but it uses CPU. It is killed "
                f"after {limit_s:.0f} s. Its log ({alive[key].log}) and `asyncrl-launch status --stacks` show what occupies the "
                "loop"
            )
        self._told_busy = frozenset(busy)
        for key, still_s in frozen.items():
            child = alive[key]
            is_why = not child.froze_s and not child.in_trouble
            if is_why:
                self._tell(f"{child.name} has sent no heartbeat for {still_s:.0f} s and is killed; see {child.log}")
            self._decisions.append(Kill(child, still_s if is_why else 0.0))

    # --------------------------------------------------------------------------------------------------------------- ends

    def _handle_ends(self, now: float, wall_time: float) -> bool:
        """Decide which processes restart after failures and early ends, or that the run ends. Returns False if pending restarts
        must not advance in this turn: the run ends, or the supervisor waits for error reports."""
        if self._listens_until is not None and now < self._listens_until:
            return False
        troubled = self._in_trouble()
        if not self.policy.outlives_all(Trouble(one.name, one.is_fatal, one.was_struck) for one in troubled):
            # Wait before the run ends: its first cause may be a killed process, whose end is noticed later than its peers' errors
            if self._listens_until is None:
                self._listens_until = now + LAST_WORDS_S
            else:
                self._decisions.append(self._end(troubled, now, wall_time))
            return False
        self._listens_until = None
        units: dict[str, list[Child]] = {}
        for child in troubled:
            units.setdefault(self.policy.unit_of(child.name), []).append(child)
        self._failing = {unit: since for unit, since in self._failing.items() if unit in units}
        # The trainer group comes first, because its restart includes other units
        for unit in sorted(units, key=lambda unit: unit != TRAINER_GROUP):
            failed = [child for child in units[unit] if self._matters(child)]  # checked again after each decision
            if failed and not self._handle_unit(unit, failed, now, wall_time):
                return False
        return True

    def _in_trouble(self) -> list[Child]:
        return [child for child in self._children if child.in_trouble and self._matters(child)]

    def _matters(self, child: Child) -> bool:
        """Whether the end of this child needs a decision: the run needs the child (see `leaves`), and no restart that includes it
        is in progress."""
        comes_back = any(child.name in returning.names for returning in self._returning.values())
        is_renewed = self._renewal is not None and self._renewal.concerns(child)
        return not comes_back and not is_renewed and not self._leaves(child)

    def _handle_unit(self, unit: str, failed: Sequence[Child], now: float, wall_time: float) -> bool:
        """Decide about one unit, once it is known which of its processes failed first. Returns False if the run ends."""
        child = failed[0]
        if unit != child.name:
            if self._is_first_known(unit, failed, now):
                return self._decide(first_failed(failed), failed, now, wall_time)
        elif child.returncode is not None:
            return self._decide(child, [child], now, wall_time)
        elif wall_time - (child.failure_time or 0.0) > self._stop_timeout_s:
            self._decisions.append(Kill(child))  # it reported a failure and did not exit in time
        return True

    def _is_first_known(self, unit: str, failed: Sequence[Child], now: float) -> bool:
        """Whether it is known which process of a unit failed first. A process that failed as a consequence may report its error
        before the first one does, so wait some time for further reports."""
        since = self._failing.setdefault(unit, now)
        if any(child.was_killed for child in failed):
            return True
        owed = first_failed(failed).passes_on_error_of
        limit_s = LAST_WORDS_S
        if owed and owed not in {child.name for child in failed}:
            limit_s = max(limit_s, self._stop_timeout_s)
        return now - since > limit_s

    def _decide(self, child: Child, failed: Sequence[Child], now: float, wall_time: float) -> bool:
        """Decide what restarts because of this child. failed: this child and the other failed children of its unit. Returns False
        if the run ends."""
        self._failing.pop(self.policy.unit_of(child.name), None)
        how = short_end(child).splitlines()[0]
        # If one process was struck, the unit's other failures are consequences of that, even if they were reported earlier
        struck = any(one.was_struck for one in failed)
        recurs_as = next(filter(None, (one.recurs_as for one in failed)), "")
        end = End(child.name, how, first_cause(failed), child.could_run, child.is_fatal, struck, recurs_as)
        decision = self.policy.decide(end, wall_time, now)
        if isinstance(decision, EndRun):
            self._decisions.append(decision)
            return False
        self._start_again(decision, child, how, now)
        return True

    def _start_again(self, decision: StartAgain, child: Child, how: str, now: float) -> None:
        unit, limit, pause_s = decision.unit, self.policy.limit, decision.pause_s
        when = f"in {pause_s:g} s" if pause_s else "at once"
        often = (
            f"{decision.number} of {limit}" if decision.number <= limit else "the run continues without it meanwhile"
        )
        again = f"started again {when} ({often}); see {child.log}"
        if unit not in (TRAINER_GROUP, EVERYTHING):
            members, count = self.policy.members(child.name), self.policy.count(child.name)
            self._returning[unit] = _Return(members, how, now + pause_s, now, count)
            subject = "it is" if unit == child.name else f"its worker group ({unit}) is"
            self._tell(f"{child.name} {how}; {subject} {again}")
            return
        self._returning.clear()
        self._decisions.append(Cancel(trainer_only=unit == TRAINER_GROUP))
        if unit == TRAINER_GROUP:
            self._tell(f"{child.name} {how}; {TRAINER_GROUP} ({self._trainer_group()}) is {again}")
        else:
            self._tell(
                f"{child.name} {how}, after {limit} restarts within {WINDOW_S / 60:.0f} minutes; everything is started again "
                f"{when}, once; see {child.log}"
            )
        self._renewal = _Renewal(BeginAttempt(unit, f"{child.name} {how}"), now + pause_s, now)

    def _end(self, failed: Sequence[Child], now: float, wall_time: float) -> EndRun:
        """Return the decision that ends a run that cannot continue."""
        first = first_failed(failed)
        decision = self.policy.decide(
            End(first.name, "", first_cause(failed), first.could_run, fatal=True), wall_time, now
        )
        assert isinstance(decision, EndRun), "a fatal end must not cause a restart"
        return decision

    # -------------------------------------------------------------------------------------------------------------- starts

    def _advance_restarts(self, now: float) -> None:
        """Advance the restarts of units within their attempt. A unit starts only after all its old processes have ended."""
        for unit, returning in list(self._returning.items()):
            members = [child for child in self._children if child.name in returning.names]
            if not self._are_gone(members, returning.how, returning.since, now):
                continue
            del self._returning[unit]
            pause_s = max(0.0, returning.due - now)
            for name in returning.names:
                self._group_incarnations[name] = self.group_incarnation_of(name) + 1
                self._decisions.append(StartLater(name, returning.how, returning.count, pause_s))

    def _renew(self, now: float) -> None:
        """Advance the transition to the next attempt. The next attempt begins only after all processes of the unit have ended, and
        the search for a checkpoint is over."""
        renewal = self._renewal
        if renewal is None:
            return
        members = [child for child in self._children if renewal.concerns(child)]
        if not self._are_gone(members, renewal.next.how, renewal.since, now):
            return
        if not renewal.looked:
            renewal.looked = True
            self._decisions.append(LookForCheckpoint())
        if renewal.found and now >= renewal.due:
            self._renewal = None
            self._group_incarnations.clear()
            self._decisions.append(renewal.next)

    def _are_gone(self, members: Iterable[Child], how: str, since: float, now: float) -> bool:
        """Whether all members have ended. If so, decide to forget them; otherwise decide to kill the live ones, and to end the run
        if they outlive KILL_LIMIT_S."""
        members = list(members)
        alive = [child for child in members if child.returncode is None]
        if alive and now - since > KILL_LIMIT_S:
            names = ", ".join(child.name for child in alive)
            self._decisions.append(EndRun(f"{how}; {names} cannot be started again: killed, and still not ended"))
        self._decisions += [Kill(child) for child in alive] or [Forget(child) for child in members]
        return not alive

    def _tell(self, text: str) -> None:
        self._decisions.append(Notice(text))
