"""The launcher's side of generation servers that join and leave a run (`asyncrl-launch scale`).

The desired number N comes through name resolve; the newest one counts. Missing servers with an index below N are started. Servers
with an index of N or more leave: the gserver manager sends them no new requests and reports when one has drained, and then the
launcher stops it. If a leaving server becomes desired again before it was asked to stop, it stays. If it was already asked to stop,
the launcher waits for its end and then starts a new server of that name.

The end of a joining or leaving server never fails the run. A leaving server counts as gone regardless of how it ends. The launcher
gives up a joining server that cannot start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.topology import Allocation
from asyncrl.launch.name_service import NameService
from asyncrl.launch.program import ProcessSpec, can_scale
from asyncrl.launch.supervisor.children import Child, short_end
from asyncrl.launch.supervisor.pool import NoRoomError
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.scaling import DesiredServers
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import Lease, WatchEvent

KIND = "generation_server"
_LEASE_RETRY_S = 1.0


@dataclass
class _Leaving:
    child: Child
    since: float
    asked: float | None = None  # when the server was asked to stop; None: not asked yet


@dataclass
class _Coming:
    """A server without a process yet. Its lease is requested on a thread."""

    index: int
    due: float
    lease: Future[Lease]


class Scaling:
    """consumes: the desired number of servers, reports of drained servers, the children. produces: children that join, requests to
    stop for those that leave.

    waits for: nothing; the launcher calls `turn` at each of its turns. A drain ends when the manager reports it, or after
    drain_limit_s.
    """

    def __init__(
        self,
        allocated: int,
        *,
        spec_of: Callable[[int], ProcessSpec],
        start: Callable[[ProcessSpec, Lease], object],
        grant_lease_soon: Callable[[], Future[Lease]],
        revoke: Callable[[Lease], None],
        notice: Callable[[str], None],
        drain_limit_s: float,
        stop_limit_s: float,
        clock: Clock,
    ) -> None:
        """allocated: number of servers until `scale` sets another number. start: adds a child to those that the next turn gets, or
        raises NoRoomError."""
        self.desired = allocated
        self._spec_of, self._start, self._grant_lease_soon, self._revoke = spec_of, start, grant_lease_soon, revoke
        self._notice, self._clock = notice, clock
        self._drain_limit_s, self._stop_limit_s = drain_limit_s, stop_limit_s
        self._lock = threading.Lock()
        self._newest: DesiredServers | None = None  # observed

        # Observed: server index -> id of the DesiredServers under which the server has drained
        self._drained: dict[int, str] = {}
        self._request = ""
        self._coming: dict[str, _Coming] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._joined: set[str] = set()  # names of servers started here that have not completed their start
        self._given_up: set[str] = set()  # failed to join under the current request

    # --------------------------------------------------------------------------------- called by threads of name resolve

    def observe_desired(self, event: WatchEvent) -> None:
        if event.kind == "put":
            try:
                desired = msgspec.json.decode(event.value, type=DesiredServers)
            except DECODE_ERRORS as error:
                self._notice(f"ignored an invalid desired number of generation servers: {error}")
                return
            with self._lock:
                self._newest = desired

    def observe_drained(self, event: WatchEvent) -> None:
        index = int(event.key.rpartition("/")[2])
        with self._lock:
            self._drained.pop(index, None)
            if event.kind == "put":
                self._drained[index] = event.value

    # ------------------------------------------------------------------------------------------- called by the launcher

    def outlives(self, child: Child) -> bool:
        """Whether the run continues without a replacement if this child ends: a server that is leaving, or has not joined yet."""
        return child.name in self._leaving or child.name in self._joined

    def includes(self, name: str) -> bool:
        """Whether the server of this name is one of the desired servers."""
        return int(name.rpartition("/")[2]) < self.desired

    def turn(self, children: Sequence[Child], elsewhere: Collection[str]) -> list[Child]:
        """Move towards the desired number of servers. Returns the servers that have ended and are no longer needed. elsewhere:
        names of servers that other components start."""
        now = self._clock.monotonic()
        self._take_desired()
        servers = {child.name: child for child in children if child.spec.kind == KIND}
        self._joined -= {child.name for child in servers.values() if child.was_running}
        gone = self._give_up(servers.values())
        gone += self._advance_leaving([child for child in servers.values() if child not in gone], now)
        held = (servers.keys() - {child.name for child in gone}) | self._given_up | set(elsewhere)
        self._start_missing(held, now)
        return gone

    def shown(self, child: Child, status: WorkerStatus) -> WorkerStatus:
        """Return the child's status. If the child is leaving, add what it waits for."""
        leaving = self._leaving.get(child.name)
        if leaving is None:
            return status
        now = self._clock.monotonic()
        wait = Wait(
            what="its last groups (it leaves the run)", on="rollout workers", since_s=now - leaving.since,
            limit_s=self._drain_limit_s,
        )  # fmt: skip
        if leaving.asked is not None:
            wait = Wait(
                what="its end (it leaves the run)",
                on=child.name,
                since_s=now - leaving.asked,
                limit_s=self._stop_limit_s,
            )
        return msgspec.structs.replace(status, waits=[*status.waits, wait])

    def _take_desired(self) -> None:
        with self._lock:
            desired = self._newest
        if desired is None or desired.id == self._request:
            return
        self._notice(f"generation servers: {self.desired} -> {desired.count}")
        self.desired, self._request = desired.count, desired.id
        self._given_up.clear()

    def _give_up(self, servers: Collection[Child]) -> list[Child]:
        """Return the servers that ended before they could join, and give them up. A new `scale` request tries them again."""
        failed = [child for child in servers if self.outlives(child) and child.name not in self._leaving]
        ended = [child for child in failed if child.returncode is not None]
        for child in ended:
            self._joined.discard(child.name)
            self._given_up.add(child.name)
            self._notice(
                f"{child.name} could not join the run, which continues without it: it {short_end(child)}; see {child.log}"
            )
        for child in failed:
            if child.failure_time is not None and self._clock.time() - child.failure_time > self._stop_limit_s:
                child.kill()  # it reported a failure and did not exit in time
        return ended

    def _advance_leaving(self, servers: Sequence[Child], now: float) -> list[Child]:
        """Advance the leaving servers. Returns those that have left."""
        for child in servers:
            if child.spec.config.worker.index >= self.desired:
                self._leaving.setdefault(child.name, _Leaving(child, now))
            elif child.name in self._leaving and self._leaving[child.name].asked is None:
                del self._leaving[child.name]
        gone: list[Child] = []
        for name, leaving in list(self._leaving.items()):
            child = leaving.child
            if child.returncode is not None:
                del self._leaving[name]
                self._joined.discard(name)
                gone.append(child)
                self._notice(f"{name} has left the run" + (f": it {short_end(child)}" if child.returncode else ""))
            elif leaving.asked is None:
                if self._may_stop(leaving, now):
                    child.ask_to_stop()
                    leaving.asked = now
            elif now - leaving.asked > self._stop_limit_s:
                child.kill()
        return gone

    def _may_stop(self, leaving: _Leaving, now: float) -> bool:
        child = leaving.child
        if child.process is None:
            return False  # its fork is pending
        if not child.was_running:
            return True  # it has not completed its start, so no other process uses it
        with self._lock:
            drained = self._drained.get(child.spec.config.worker.index) == self._request
        if not drained and now - leaving.since > self._drain_limit_s:
            self._notice(f"{child.name} has not drained within {self._drain_limit_s:g} s and is stopped")
            return True
        return drained

    def _start_missing(self, held: Collection[str], now: float) -> None:
        for index in range(self.desired):
            name = f"{KIND}/{index}"
            if name not in held and name not in self._coming:
                self._coming[name] = _Coming(index, now, self._grant_lease_soon())
        for name, coming in list(self._coming.items()):
            if not coming.lease.done() or now < coming.due:
                continue
            if error := coming.lease.exception():
                if coming.index >= self.desired:
                    del self._coming[name]
                    continue
                self._notice(f"{name} cannot be started yet: {error}")
                coming.due, coming.lease = now + _LEASE_RETRY_S, self._grant_lease_soon()
                continue
            del self._coming[name]
            if coming.index >= self.desired:
                self._revoke(coming.lease.result())
                continue
            try:
                self._start(self._spec_of(coming.index), coming.lease.result())
                self._joined.add(name)
            except NoRoomError as error:
                self._revoke(coming.lease.result())
                self._given_up.add(name)
                self._notice(f"{name} could not join the run, which continues without it: {error}")


def make_scaling(
    config: ExperimentConfig,
    *,
    spec_of: Callable[[int], ProcessSpec],
    start: Callable[[ProcessSpec, Lease], object],
    service: NameService,
    notice: Callable[[str], None],
    clock: Clock,
) -> Scaling | None:
    """Return the scaling of a run, which watches name resolve from now on. None if the run starts no servers."""
    if not can_scale(config):
        return None
    scaling = Scaling(
        Allocation.parse(config.allocation).num_servers,
        spec_of=spec_of,
        start=start,
        grant_lease_soon=service.grant_lease_soon,
        revoke=service.revoke,
        notice=notice,
        clock=clock,
        # At drain_timeout_s the manager moves the remaining groups to other servers. Their rollout workers learn of that within
        # manager.lease_s, or lose the tickets
        drain_limit_s=config.manager.drain_timeout_s + config.manager.lease_s,
        stop_limit_s=2 * config.runtime.stop_timeout_s,  # twice the limit within which the server itself must close
    )
    service.watch_scaling(scaling.observe_desired, scaling.observe_drained)
    return scaling
