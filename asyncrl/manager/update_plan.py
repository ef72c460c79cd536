"""Which server loads which weights, and when (pure).

The newest published version is the target. Servers that serve an older one are updated in waves: at most `update_fraction` of
them (at least one) is out of service at a time, the rest keep serving. Servers that serve nothing cost nothing to take, so
they load at once. One that is slow leaves its wave (others go on) and has until `limit_s`; one that fails is tried
again after a growing pause, or at once where it had not answered and does again. Nothing here waits for any particular server.

Weights may come over the network (`hold`: the trainer has them in memory): then servers that serve get them by broadcast, and
those that serve nothing load the newest version that is on disk. A server that fails in a broadcast loads that version or a newer
one from disk, and the next few versions, too: twice as many each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.manager.routing import Server, ServerState, ServerTable
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.messages import WeightVersion

# Fetching, verifying and loading a version together are slower than this only where something is wrong
SLOW_BYTES_PER_S = 100e6
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 30.0
_MOST_FROM_DISK = 31  # versions that a server loads from disk because broadcasts to it fail


@dataclass(frozen=True)
class Update:
    """Interrupt the server, let it load the version, check its echo: all within limit_s."""

    server: str
    url: str
    incarnation: int
    version: WeightVersion
    limit_s: float
    broadcast: bool = False  # from the trainer's memory, else from disk
    is_new: bool = False  # the server may serve it already, by order of a manager before this one


@dataclass
class _Running:
    incarnation: int
    since: float
    took_from_service: bool  # it was healthy: counts in the wave


@dataclass
class _Failures:
    count: int
    not_before: float


@dataclass
class _Distrust:
    """Of broadcasts to a server."""

    failures: int  # in a row
    from_disk: int  # versions that it is still to load from disk
    not_below: WeightVersion  # what it may have in part: it loads this version or a newer one


class UpdatePlan:
    """Takes what happens (published, begun, ended) and says what to begin next. It moves the servers of the table."""

    def __init__(
        self,
        table: ServerTable,
        *,
        update_fraction: float = 1.0,
        update_timeout_s: float = 60.0,
        slow_after_s: float | None = None,
    ) -> None:
        if not 0.0 < update_fraction <= 1.0:
            raise ValueError(f"manager.update_fraction is {update_fraction}; use a share above 0 and at most 1")
        if update_timeout_s <= 0:
            raise ValueError(f"manager.update_timeout_s is {update_timeout_s}; use a number of seconds above 0")
        self._table = table
        self._fraction = update_fraction
        self._timeout_s = update_timeout_s
        self._slow_after_s = slow_after_s
        self._num_bytes = 0  # of the newest version that was published
        self.target: WeightVersion | None = None  # the newest, wherever it is
        self._on_disk = Fence[WeightVersion | None](None)
        self._in_memory = Fence[WeightVersion | None](None)
        self._distrusted: dict[str, _Distrust] = {}
        self._running: dict[str, _Running] = {}
        self._failures: dict[str, _Failures] = {}
        self._silent: set[str] = set()  # servers that do not answer, or were replaced

    @property
    def limit_s(self) -> float:
        """Of an update: update_timeout_s, and the time that the version's bytes take at SLOW_BYTES_PER_S."""
        return self._timeout_s + self._num_bytes / SLOW_BYTES_PER_S

    @property
    def slow_after_s(self) -> float:
        """After which an update no longer counts in its wave."""
        return self.limit_s / 4 if self._slow_after_s is None else self._slow_after_s

    def publish(self, version: WeightVersion, num_bytes: int = 0) -> bool:
        """A version of num_bytes is published and its manifest holds.

        False (and no effect) unless it is newer than those before and of no attempt that is over.
        """
        if self._table.attempts.is_over(version.attempt) or not self._on_disk.adopt(version):
            return False
        self._num_bytes = num_bytes
        self._aim_at(version)
        self._failures.clear()  # other files: nobody has failed with these
        return True

    def hold(self, version: WeightVersion) -> bool:
        """The trainer has a version in memory, and can broadcast it. False as for `publish`."""
        if self._table.attempts.is_over(version.attempt) or not self._in_memory.adopt(version):
            return False
        self._aim_at(version)
        return True

    def _aim_at(self, version: WeightVersion) -> None:
        if self.target is None or version > self.target:
            self.target = version
        self._table.begin_attempt(version.attempt)

    def due(self, now: float) -> list[Update]:
        """The updates to begin now; the servers are UPDATING from here on."""
        if self.target is None:
            return []
        servers = self._table.servers
        for name in [
            name for name, running in self._running.items() if running.incarnation != servers[name].incarnation
        ]:
            del self._running[name]  # that process is gone; its update ends by itself, and is void
        away = (ServerState.DEAD, ServerState.DRAINING)
        alive = sum(server.state not in away for server in servers.values())
        room = max(1, int(self._fraction * alive)) - sum(
            running.took_from_service and now < running.since + self.slow_after_s for running in self._running.values()
        )
        updates = []
        for name in sorted(servers, key=self._last_to_trust):
            server = servers[name]
            failed = self._failures.get(name)
            if name in self._running or (failed is not None and now < failed.not_before):
                continue
            serving = server.state is ServerState.HEALTHY and server.version is not None
            if server.state not in (ServerState.STALE, ServerState.HEALTHY) or (serving and room < 1):
                continue
            version, broadcast = self._source(server)
            if version is None or (server.version is not None and version <= server.version):
                continue
            room -= serving
            is_new = server.is_new
            incarnation = self._table.begin_update(name, version)
            self._running[name] = _Running(incarnation, now, serving)
            updates.append(Update(name, server.url, incarnation, version, self.limit_s, broadcast, is_new))
        return updates

    def _source(self, server: Server) -> tuple[WeightVersion | None, bool]:
        """What a server can load now, and whether by broadcast. A broadcast needs a server that is known to be sound."""
        serves = server.state is ServerState.HEALTHY and server.version is not None
        distrust = self._distrusted.get(server.name)
        trusted = distrust is None or distrust.from_disk <= 0
        on_disk, in_memory = self._on_disk.newest, self._in_memory.newest
        if serves and trusted and in_memory is not None and in_memory == self.target:
            return in_memory, True
        least = distrust.not_below if distrust is not None else WeightVersion(self._table.attempt, 0)
        if on_disk is None or on_disk.attempt != self._table.attempt or on_disk < least:
            return None, False  # it comes
        return on_disk, False

    def succeeded(self, update: Update, now: float) -> bool:
        """The server has echoed the version. False where that came too late to count."""
        running = self._running.get(update.server)
        took_s = now - running.since if running is not None else 0.0
        self._end(update)
        self._failures.pop(update.server, None)
        if (distrust := self._distrusted.get(update.server)) is not None:
            distrust.from_disk -= 1
            if update.broadcast:
                del self._distrusted[update.server]
        return self._table.loaded(update.server, update.incarnation, update.version, now, took_s)

    def failed(self, update: Update, reason: str, now: float) -> float:
        """It has not (refused, silent, slow, wrong echo). Returns after how many seconds it is tried again."""
        self._end(update)
        if update.broadcast:
            return self._failed_in_broadcast(update, reason)
        count = self._failures[update.server].count + 1 if update.server in self._failures else 1
        pause = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(count - 1, 16))
        self._failures[update.server] = _Failures(count, now + pause)
        self._table.load_failed(update.server, update.incarnation, reason)
        return pause

    def _failed_in_broadcast(self, update: Update, reason: str) -> float:
        """From disk as soon as it is there: there is nothing to wait for."""
        failures = self._distrusted[update.server].failures + 1 if update.server in self._distrusted else 1
        from_disk = min(2 ** min(failures, 16) - 1, _MOST_FROM_DISK)
        self._distrusted[update.server] = _Distrust(failures, from_disk, update.version)
        self._table.load_failed(update.server, update.incarnation, reason)
        return 0.0

    def silent(self, server: str) -> None:
        """It did not answer a health probe, or its announcement is gone."""
        self._silent.add(server)

    def answers(self, server: str, now: float) -> bool:
        """It does. Whether that is news, by which its pause is over: its loads may have failed for the same reason. Another failure
        is followed by a pause as long as if nothing had happened."""
        if server not in self._silent:
            return False
        self._silent.remove(server)
        failed = self._failures.get(server)
        if failed is None or failed.not_before <= now:
            return False
        failed.not_before = now
        return True

    def num_failures(self, server: str) -> int:
        """How often in a row it has failed to load the target."""
        return self._failures[server].count if server in self._failures else 0

    def next_change(self, now: float) -> float | None:
        """When `due` may say something new although nothing happens: a pause ends, or a slow server leaves its wave."""
        times = [failed.not_before for failed in self._failures.values()]
        times += [running.since + self.slow_after_s for running in self._running.values()]
        return min((at for at in times if at > now), default=None)

    def _end(self, update: Update) -> None:
        running = self._running.get(update.server)
        if running is not None and running.incarnation == update.incarnation:
            del self._running[update.server]

    def _last_to_trust(self, name: str) -> tuple[int, str]:
        return (self.num_failures(name), name)
