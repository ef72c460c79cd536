"""Decides every turn what becomes of the processes of a run (pure): which are killed, which start again, when the run ends.

    children, as they are now --> Supervisor.turn --> decisions, which the launcher carries out in their order

policy.py holds the policy: how often, after which pause. Here are the ways that take several turns: a unit that comes back
within its attempt, and the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncrl.launch.supervisor.children import Child, first_cause, first_failed, short_end
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

LAST_WORDS_S = 1.0  # after the first failure: how long the others may report errors of their own
KILL_LIMIT_S = 60.0  # of what was killed: a process inside the kernel (a disk that hangs) ends only when that lets it


@dataclass(frozen=True)
class Notice:
    """A person is told."""

    text: str


@dataclass(frozen=True)
class Kill:
    child: Child
    froze_s: float = 0.0  # so long it has not moved, where that is why (Child.froze_s)


@dataclass(frozen=True)
class Forget:
    """A child that has ended, and does not matter any more."""

    child: Child


@dataclass(frozen=True)
class Cancel:
    """These do not start again as planned: they start with others, later."""

    trainer_only: bool

    def concerns(self, name: str) -> bool:
        return not self.trainer_only or name.partition("/")[0] in TRAINER_KINDS


@dataclass(frozen=True)
class StartLater:
    """A process starts again within its attempt."""

    name: str
    how: str  # its last process ended
    count: int  # of its restarts, this one included
    pause_s: float


@dataclass(frozen=True)
class LookForCheckpoint:
    """The newest one; `checkpoint_found` is called when the search is over."""


@dataclass(frozen=True)
class BeginAttempt:
    """The next attempt, with these processes new."""

    unit: str  # TRAINER_GROUP or EVERYTHING
    how: str  # it came to that

    def concerns(self, kind: str) -> bool:
        return self.unit == EVERYTHING or kind in TRAINER_KINDS


Decision: TypeAlias = Notice | Kill | Forget | Cancel | StartLater | LookForCheckpoint | BeginAttempt | EndRun


@dataclass
class _Renewal:
    """The way to the next attempt: its processes are killed; then the newest checkpoint is looked for; then they are started."""

    next: BeginAttempt
    due: float
    since: float
    looked: bool = False
    found: bool = False

    def concerns(self, child: Child) -> bool:
        return self.next.concerns(child.spec.kind)


@dataclass(frozen=True)
class _Return:
    """A unit on its way back within its attempt: what is left of it is killed, then all of it is started again."""

    names: tuple[str, ...]
    how: str  # it came to that
    due: float
    since: float
    count: int  # of its restarts, this one included


class Supervisor:
    """consumes: the children of every turn, checkpoints that were found.  produces: decisions."""

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
        """frozen_after_s, stop_timeout_s: of the config's runtime. trainer_group: gives the names of its processes, for notices.
        leaves: whether the run goes on without a child and without another in its place."""
        self.policy = policy
        self._freezes = freezes
        self._frozen_after_s, self._stop_timeout_s = frozen_after_s, stop_timeout_s
        self._trainer_group, self._leaves = trainer_group, leaves
        self._renewal: _Renewal | None = None
        self._returning: dict[str, _Return] = {}  # by unit
        self._group_incarnations: dict[str, int] = {}  # by process: restarts of its worker group in this attempt
        self._failing: dict[str, float] = {}  # by unit of several: since when one of it is seen to have failed
        self._told_busy: frozenset[int] = frozenset()
        self._listens_until: float | None = None
        self._children: list[Child] = []  # of this turn
        self._decisions: list[Decision] = []

    @property
    def is_listening(self) -> bool:
        """The run ends, and the first cause is looked for: nothing else is done meanwhile."""
        return self._listens_until is not None

    @property
    def begins_attempt(self) -> bool:
        """The next attempt is on its way."""
        return self._renewal is not None

    @property
    def starts_everything(self) -> bool:
        return self._renewal is not None and self._renewal.next.unit == EVERYTHING

    def group_incarnation_of(self, name: str) -> int:
        """How often the worker group of a process was started again in this attempt."""
        return self._group_incarnations.get(name, 0)

    def checkpoint_found(self) -> None:
        """The search that LookForCheckpoint began is over; there may be none."""
        if self._renewal is not None:
            self._renewal.found = True

    def turn(self, children: Sequence[Child], *, now: float, wall_time: float, hurried: bool = False) -> list[Decision]:
        """now: monotonic seconds; wall_time: unix seconds, for comparisons with the times of failures. hurried: the run is told to
        stop; last words are not waited for."""
        self._children, self._decisions = list(children), []
        if not self.is_listening:
            self._kill_frozen(now)
        if hurried and self._listens_until is not None:
            self._listens_until = now
        if self._see_to_ends(now, wall_time):
            self._bring_back(now)
            self._renew(now)
        return self._decisions

    # ------------------------------------------------------------------------------------------------------------- frozen

    def _kill_frozen(self, now: float) -> None:
        """A process that does not move is as good as dead, and its peers wait for it. A busy one is waited for."""
        alive = {  # by lease: on several hosts processes may have one number
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
                f"{alive[key].name} is busy: its event loop has not turned for {busy[key]:.0f} s, in which it computed. It is "
                f"killed after {limit_s:.0f} s. Its log names what occupies the loop ({alive[key].log}), and "
                "`asyncrl-launch status --stacks` shows it"
            )
        self._told_busy = frozenset(busy)
        for key, still_s in frozen.items():
            child = alive[key]
            is_why = not child.froze_s and not child.in_trouble
            if is_why:
                self._tell(f"{child.name} has not moved for {still_s:.0f} s, and is killed; see {child.log}")
            self._decisions.append(Kill(child, still_s if is_why else 0.0))

    # --------------------------------------------------------------------------------------------------------------- ends

    def _see_to_ends(self, now: float, wall_time: float) -> bool:
        """Processes that failed or ended too early start again, or the run ends. False: nothing else is to be done."""
        if self._listens_until is not None and now < self._listens_until:
            return False
        troubled = self._in_trouble()
        if not self.policy.outlives_all(Trouble(one.name, one.is_fatal, one.was_struck) for one in troubled):
            if (
                self._listens_until is None
            ):  # one may have been killed, which is noticed later than the errors of its peers
                self._listens_until = now + LAST_WORDS_S
            else:
                self._decisions.append(self._end(troubled, now, wall_time))
            return False
        self._listens_until = None
        units: dict[str, list[Child]] = {}
        for child in troubled:
            units.setdefault(self.policy.unit_of(child.name), []).append(child)
        self._failing = {unit: since for unit, since in self._failing.items() if unit in units}
        for unit in sorted(units, key=lambda unit: unit != TRAINER_GROUP):  # which takes others with it
            failed = [child for child in units[unit] if self._matters(child)]  # still
            if failed and not self._see_to_unit(unit, failed, now, wall_time):
                return False
        return True

    def _in_trouble(self) -> list[Child]:
        return [child for child in self._children if child.in_trouble and self._matters(child)]

    def _matters(self, child: Child) -> bool:
        """Something depends on it: it does not leave, and nothing brings it back already."""
        comes_back = any(child.name in returning.names for returning in self._returning.values())
        is_renewed = self._renewal is not None and self._renewal.concerns(child)
        return not comes_back and not is_renewed and not self._leaves(child)

    def _see_to_unit(self, unit: str, failed: Sequence[Child], now: float, wall_time: float) -> bool:
        """False: the run ends."""
        child = failed[0]
        if unit != child.name:
            if self._have_spoken(unit, failed, now):
                return self._decide(first_failed(failed), failed, now, wall_time)
        elif child.returncode is not None:
            return self._decide(child, [child], now, wall_time)
        elif wall_time - (child.failure_time or 0.0) > self._stop_timeout_s:
            self._decisions.append(Kill(child))  # it has said that it failed, and does not end
        return True

    def _have_spoken(self, unit: str, failed: Sequence[Child], now: float) -> bool:
        """Whether it is known which of a unit was the first: others may fail because of that one, and be quicker to say so."""
        since = self._failing.setdefault(unit, now)
        if any(child.was_killed for child in failed):
            return True
        owed = first_failed(failed).waits_for_words_of
        limit_s = LAST_WORDS_S
        if owed and owed not in {child.name for child in failed}:
            limit_s = max(limit_s, self._stop_timeout_s)
        return now - since > limit_s

    def _decide(self, child: Child, failed: Sequence[Child], now: float, wall_time: float) -> bool:
        """What must start again because of this child. failed: it, and those with it. False: the run ends."""
        self._failing.pop(self.policy.unit_of(child.name), None)
        how = short_end(child).splitlines()[0]
        struck = any(one.was_struck for one in failed)  # then the others may only have said so earlier
        end = End(child.name, how, first_cause(failed), child.could_run, child.is_fatal, struck)
        decision = self.policy.decide(end, wall_time, now)
        if isinstance(decision, EndRun):
            self._decisions.append(decision)
            return False
        self._start_again(decision, child, how, now)
        return True

    def _start_again(self, decision: StartAgain, child: Child, how: str, now: float) -> None:
        unit, limit, pause_s = decision.unit, self.policy.limit, decision.pause_s
        when = f"in {pause_s:g} s" if pause_s else "at once"
        again = f"started again {when} ({decision.number} of {limit}); see {child.log}"
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
        """Of a run that cannot go on."""
        first = first_failed(failed)
        decision = self.policy.decide(
            End(first.name, "", first_cause(failed), first.could_run, fatal=True), wall_time, now
        )
        assert isinstance(decision, EndRun), "a fatal end is no reason to start anything again"
        return decision

    # -------------------------------------------------------------------------------------------------------------- starts

    def _bring_back(self, now: float) -> None:
        """Units that start again within their attempt, one step further. Nothing of one lives when it begins anew."""
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
        """The next attempt, one step further. Nothing of the one before lives when it begins."""
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
        """Whether none of them lives; then they are forgotten, else killed."""
        members = list(members)
        alive = [child for child in members if child.returncode is None]
        if alive and now - since > KILL_LIMIT_S:
            names = ", ".join(child.name for child in alive)
            self._decisions.append(EndRun(f"{how}; {names} cannot be started again: killed, and still not gone"))
        self._decisions += [Kill(child) for child in alive] or [Forget(child) for child in members]
        return not alive

    def _tell(self, text: str) -> None:
        self._decisions.append(Notice(text))
