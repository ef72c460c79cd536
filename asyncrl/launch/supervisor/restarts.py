"""Processes between their end and their next start: each waits out its pause, and for its new lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.launch.rundir import LaunchError
from asyncrl.protocol.messages import Wait, WorkerStatus
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import Lease

_LEASE_LIMIT_S = 60.0
_LEASE_RETRY_S = 1.0


@dataclass
class _Coming:
    """Its new lease is granted on a thread meanwhile."""

    how: str  # its last process ended
    attempt: int
    count: int  # of its restarts, this one included
    since: float
    due: float
    lease: Future[Lease]


class Restarts:
    """consumes: names of processes that are to be started again. produces: their starts. waits for: nothing; `turn` looks whether
    the pause is over and the lease is there."""

    def __init__(
        self,
        *,
        start: Callable[[str, Lease, int], None],
        grant_lease_soon: Callable[[], Future[Lease]],
        revoke: Callable[[Lease], None],
        clock: Clock,
    ) -> None:
        """start: by name, with a lease and the number of restarts."""
        self._start, self._grant_lease_soon, self._revoke, self._clock = start, grant_lease_soon, revoke, clock
        self._coming: dict[str, _Coming] = {}

    def expect(self, name: str, how: str, *, attempt: int, count: int, pause_s: float = 0.0) -> None:
        """A process that has ended is to be started again."""
        now = self._clock.monotonic()
        self._coming[name] = _Coming(how, attempt, count, now, now + pause_s, self._grant_lease_soon())

    def cancel(self, name: str) -> bool:
        """It is not wanted any more. Whether it was about to be started."""
        coming = self._coming.pop(name, None)
        if coming is not None:
            coming.lease.add_done_callback(self._give_back)  # its status goes with it
        return coming is not None

    def turn(self) -> None:
        """Start those whose pause is over. Raises LaunchError where name resolve gives no lease."""
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
        """What is shown of those that are to come, by the leases they will have."""
        return {
            coming.lease.result().id: self._status(name, coming)
            for name, coming in self._coming.items()
            if coming.lease.done() and not coming.lease.exception()
        }

    def names(self) -> Sequence[str]:
        """Those that are to come."""
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
