"""Processes that have ended and will be restarted: each waits until its delay is over and its new lease is granted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.launch.rundir import LaunchError
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import Lease

_LEASE_LIMIT_S = 60.0
_LEASE_RETRY_S = 1.0


@dataclass
class _Coming:
    """A pending restart. Another thread requests the lease during the delay."""

    how: str  # how its last process ended
    attempt: int
    count: int  # its restarts, including this one
    since: float
    due: float
    lease: Future[Lease]


class Restarts:
    """consumes: names of processes to restart. produces: calls of `start` for them. waits for: nothing; `turn` checks whether the
    delay is over and the lease is granted."""

    def __init__(
        self,
        *,
        start: Callable[[str, Lease, int], None],
        grant_lease_soon: Callable[[], Future[Lease]],
        revoke: Callable[[Lease], None],
        clock: Clock,
    ) -> None:
        """start: called to start a process, with its name, its lease and its number of restarts."""
        self._start, self._grant_lease_soon, self._revoke, self._clock = start, grant_lease_soon, revoke, clock
        self._coming: dict[str, _Coming] = {}

    def expect(self, name: str, how: str, *, attempt: int, count: int, pause_s: float = 0.0) -> None:
        """Schedule the restart of a process that has ended; it starts after pause_s. how: how it ended. count: number of its
        restarts, including this one."""
        now = self._clock.monotonic()
        self._coming[name] = _Coming(how, attempt, count, now, now + pause_s, self._grant_lease_soon())

    def cancel(self, name: str) -> bool:
        """Cancel a pending restart. Returns whether there was one."""
        coming = self._coming.pop(name, None)
        if coming is not None:
            coming.lease.add_done_callback(self._give_back)  # revoking the lease also deletes the published status
        return coming is not None

    def turn(self) -> None:
        """Start each process when its delay is over and its lease is granted. Raises LaunchError if a request for a lease fails
        more than 60 s after the process ended."""
        now = self._clock.monotonic()
        for name, coming in list(self._coming.items()):
            if now < coming.due or not coming.lease.done():
                continue
            if error := coming.lease.exception():
                if now - coming.since > _LEASE_LIMIT_S:
                    raise LaunchError(f"{name} {coming.how} and cannot be started again: {error}") from error
                coming.due, coming.lease = now + _LEASE_RETRY_S, self._grant_lease_soon()
                continue
            del self._coming[name]
            self._start(name, coming.lease.result(), coming.count)

    def statuses(self) -> dict[int, WorkerStatus]:
        """Return the statuses to show for pending restarts, by the id of the new lease. Restarts without a lease yet are left
        out."""
        return {
            coming.lease.result().id: self._status(name, coming)
            for name, coming in self._coming.items()
            if coming.lease.done() and not coming.lease.exception()
        }

    def names(self) -> Sequence[str]:
        """Return the names of the pending restarts."""
        return list(self._coming)

    def _give_back(self, lease: Future[Lease]) -> None:
        if not lease.exception():
            self._revoke(lease.result())

    def _status(self, name: str, coming: _Coming) -> WorkerStatus:
        pause = Wait(
            what=f"its next start: it {coming.how}",
            on="the launcher",
            since_s=self._clock.monotonic() - coming.since,
            limit_s=coming.due - coming.since,
        )
        return WorkerStatus(
            worker=name,
            pid=0,
            attempt=coming.attempt,
            state="starting",
            time=self._clock.time(),
            progress=0,
            waits=[pause],
            restarts=coming.count,
        )
