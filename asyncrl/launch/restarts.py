"""Generation servers that end during a run are started again.

They alone: a server holds nothing that a run needs. The gserver manager takes a dead one from its routing table, rollout workers
go on elsewhere with the tokens they have, or wait; the new process has the old one's name, loads the newest verified weights and
serves. Whatever else ends holds something that is lost with it (optimizer, ledger, batches, trajectories), and ends the run.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.launch.children import Child, short_end
from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.rundir import LaunchError
from asyncrl.messages import Wait, WorkerStatus
from asyncrl.runtime.name_resolve import Lease

WINDOW_S = 3600.0
_FIRST_PAUSE_S = 1.0  # a device's memory may take a moment to be free again
_LONGEST_PAUSE_S = 30.0
_LEASE_LIMIT_S = 60.0
_LEASE_RETRY_S = 1.0


class RestartBudget:
    """How often each server is started again, and after which pause (pure)."""

    def __init__(self, limit: int) -> None:
        """limit: restarts of one server within WINDOW_S."""
        self.limit = limit
        self._ends: defaultdict[str, deque[tuple[float, str]]] = defaultdict(deque)  # (when, how), oldest first
        self._count: defaultdict[str, int] = defaultdict(int)

    def count(self, name: str) -> int:
        """How often it has been started again so far."""
        return self._count[name]

    def recent(self, name: str, now: float) -> list[str]:
        """How it has ended within WINDOW_S, oldest first."""
        ends = self._ends[name]
        while ends and now - ends[0][0] > WINDOW_S:
            ends.popleft()
        return [how for _, how in ends]

    def ended(self, name: str, how: str, now: float) -> float | None:
        """It has ended. The pause before it is started again, in seconds; None where that was too often."""
        before = len(self.recent(name, now))
        self._ends[name].append((now, how))
        if before >= self.limit:
            return None
        self._count[name] += 1
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**before)


@dataclass
class _Coming:
    """A server between its end and its next start. Its new lease is granted on a thread meanwhile."""

    spec: ProcessSpec
    how: str  # its last process ended
    since: float
    due: float
    lease: Future[Lease]


class ServerRestarts:
    """consumes: children that have ended. produces: the children that take their place. waits for: nothing; `turn` looks whether
    the pause is over and the lease is there."""

    def __init__(
        self,
        limit: int,
        *,
        start: Callable[[ProcessSpec, Lease], Child],
        grant_lease_soon: Callable[[], Future[Lease]],
        revoke: Callable[[Lease], None],
        notice: Callable[[str], None],
    ) -> None:
        self.budget = RestartBudget(limit)
        self._start, self._grant_lease_soon, self._revoke, self._notice = start, grant_lease_soon, revoke, notice
        self._coming: dict[str, _Coming] = {}

    def concerns(self, child: Child) -> bool:
        """Whether its end is no end of the run: a generation server that is wanted, once that name has served.

        One that fails at its very start would fail again: a model that cannot be loaded, a port that is taken.
        """
        if child.spec.kind != "generation_server" or not self.budget.limit:
            return False
        return child.was_running or self.budget.count(child.name) > 0

    def replace(self, child: Child) -> None:
        """A child that has ended is to be started again. Raises LaunchError where it has been too often."""
        now = time.monotonic()
        how, before = short_end(child), self.budget.recent(child.name, now)
        pause_s = self.budget.ended(child.name, how, now)
        if pause_s is None:
            earlier = "".join(f"\n  {text}" for text in before)
            raise LaunchError(
                f"{child.name} {how}\n\nIts log: {child.log}\nIt had been started again {self.budget.limit} times within"
                f" {WINDOW_S / 60:.0f} minutes (runtime.max_restarts), after it{earlier}"
            )
        self._coming[child.name] = _Coming(child.spec, how, now, now + pause_s, self._grant_lease_soon())
        number = f"{len(before) + 1} of {self.budget.limit}"
        self._notice(
            f"{child.name} {how.splitlines()[0]}; it is started again in {pause_s:g} s ({number}); see {child.log}"
        )

    def cancel(self, name: str) -> bool:
        """It is not wanted any more. Whether it was about to be started."""
        coming = self._coming.pop(name, None)
        if coming is not None and coming.lease.done() and not coming.lease.exception():
            self._revoke(coming.lease.result())  # its status goes with it
        return coming is not None

    def turn(self) -> list[Child]:
        """Start those whose pause is over. Raises LaunchError where name resolve gives no lease."""
        started: list[Child] = []
        now = time.monotonic()
        for name, coming in list(self._coming.items()):
            if now < coming.due or not coming.lease.done():
                continue
            if error := coming.lease.exception():
                if now - coming.since > _LEASE_LIMIT_S:
                    raise LaunchError(f"{name} {coming.how} and cannot be started again: {error}") from error
                coming.due, coming.lease = now + _LEASE_RETRY_S, self._grant_lease_soon()
                continue
            del self._coming[name]
            child = self._start(coming.spec, coming.lease.result())
            child.restarts = self.budget.count(name)
            started.append(child)
        return started

    def statuses(self) -> dict[int, WorkerStatus]:
        """What is shown of those that are to come, by the leases they will have."""
        return {
            coming.lease.result().id: self._status(coming)
            for coming in self._coming.values()
            if coming.lease.done() and not coming.lease.exception()
        }

    def names(self) -> Sequence[str]:
        """Those that are to come."""
        return list(self._coming)

    def _status(self, coming: _Coming) -> WorkerStatus:
        name, now = coming.spec.name, time.monotonic()
        pause = Wait(
            what=f"its next start: it {coming.how.splitlines()[0]}",
            on="the launcher",
            since_s=now - coming.since,
            limit_s=coming.due - coming.since,
        )
        return WorkerStatus(
            worker=name,
            pid=0,
            attempt=coming.spec.config.worker.attempt,
            state="starting",
            time=time.time(),
            progress=0,
            waits=[pause],
            restarts=self.budget.count(name),
        )
