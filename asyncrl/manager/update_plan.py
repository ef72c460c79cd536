"""Which server loads which weights, and when (pure).

The newest published version is the target. Servers with an older version are updated in waves: at most `update_fraction` of the
live servers (at least one) is out of service at a time, and the rest keep serving. Servers that serve no version are out of
service anyway, so they load at once. A slow server stops counting in its wave, so that others continue, and has until `limit_s`.
A server that fails is retried with backoff, or at once if it answers again after it had not answered. The plan waits for no
particular server.

A server gives up a version after MAX_REFUSALS permanent refusals, after several failures with the same unknown cause, or when its
loads have failed for patience_s. It stays out of service until a newer version is published, or until it is replaced or answers
again after it had not answered. `given_up` tells when every live server has given up the newest version.

The trainer may have a version in memory (`hold`). Then serving servers get it from there, as `Offers` decides, and the others load
the newest version on disk.

If servers share devices with training, they take turns (`take_turn`). In training's turn no server loads, and the servers that
hold devices must sleep. In generation's turn servers load the version that training has reached, not an older one.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.schema import SLOW_BYTES_PER_S
from asyncrl.manager.offers import Offers
from asyncrl.manager.routing import Server, ServerState, ServerTable
from asyncrl.protocol.errors import ErrorClass, Failures
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.versions import WeightVersion

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 30.0
MAX_REFUSALS = 3  # permanent refusals of a version by a server; a newer version may be published between them


@dataclass(frozen=True)
class Update:
    """Interrupt the server, let it load the version, check its echo (the version that it then reports): all within limit_s."""

    server: str
    url: str
    incarnation: int
    version: WeightVersion
    limit_s: float
    bytes_s: float = 0.0  # of limit_s, for the version's bytes
    from_memory: bool = False  # the trainer's; else from disk
    is_new: bool = False  # the server may serve the version already: the previous manager may have loaded it


@dataclass(frozen=True)
class Sleep:
    """Have the server release the devices that it shares with training."""

    server: str
    url: str
    incarnation: int


@dataclass
class _Running:
    incarnation: int
    since: float
    took_from_service: bool  # it was healthy, so it counts in the wave


@dataclass
class _Failed:
    """The failures of a server in a row."""

    causes: Failures
    count: int = 0
    not_before: float = 0.0
    given_up: str = ""  # why the server does not load the newest version again; "": it does


@dataclass(frozen=True)
class GivenUp:
    """No live server loads this version."""

    version: WeightVersion
    reasons: dict[str, str]  # by server


class UpdatePlan:
    """Takes events (published, succeeded, failed, ...) and returns the updates to begin. Changes the states of servers."""

    def __init__(
        self,
        table: ServerTable,
        *,
        update_fraction: float = 1.0,
        update_timeout_s: float = 60.0,
        shares_devices: bool = False,
        patience_s: float = 1860.0,
        offers: Offers | None = None,
    ) -> None:
        """patience_s: time for which loads of a version at a server may fail for passing reasons."""
        self._table = table
        self._fraction = update_fraction
        self._timeout_s = update_timeout_s
        self._num_bytes = 0  # size of the newest published version
        self.target: WeightVersion | None = None  # the newest version, on disk or in memory
        self._on_disk = Fence[WeightVersion | None](None)
        self._offers = offers if offers is not None else Offers()
        self._running: dict[str, _Running] = {}
        self._patience_s = patience_s
        self._failures: dict[str, _Failed] = {}
        self._loaded: dict[str, WeightVersion] = {}  # the newest version that each server has loaded
        self._silent: set[str] = set()  # servers that do not answer, or were replaced
        table.training = shares_devices  # until the master says that generation may use the devices
        self._least: WeightVersion | None = None  # shared devices: servers load no older version

    @property
    def limit_s(self) -> float:
        """Time limit of an update: update_timeout_s plus the time that the version's bytes take at SLOW_BYTES_PER_S."""
        return self._timeout_s + self._bytes_s

    @property
    def _bytes_s(self) -> float:
        return self._num_bytes / SLOW_BYTES_PER_S

    @property
    def slow_after_s(self) -> float:
        """Seconds after which an update no longer counts in its wave."""
        return self.limit_s / 4

    def publish(self, version: WeightVersion, num_bytes: int = 0) -> bool:
        """Record that a version of num_bytes is published and that its files match its manifest.

        Returns False, without effect, if the version is not newer than the last one or if its attempt is over.
        """
        if self._table.attempts.is_over(version.attempt) or not self._on_disk.adopt(version):
            return False
        self._num_bytes = num_bytes
        self._aim_at(version)
        self.replaced()
        return True

    def replaced(self) -> None:
        """The files of the newest version are new: no server has failed with them."""
        self._failures.clear()

    def hold(self, version: WeightVersion) -> bool:
        """The trainer has a version in memory. Returns False as `publish` does."""
        if self._table.attempts.is_over(version.attempt) or not self._offers.adopt(version):
            return False
        self._aim_at(version)
        return True

    def take_turn(self, *, training: bool, version: WeightVersion) -> bool:
        """Shared devices: training or generation may use them now. version: the one that training has reached. Returns whether that
        is news."""
        news = (training, version) != (self._table.training, self._least)
        self._table.training, self._least = training, version
        return news

    def sleepers(self, now: float) -> list[Sleep]:
        """Return the servers that must sleep now: in training's turn, those that may hold shared devices. They are out of service
        from this call on."""
        if not self._table.training:
            return []
        states = (ServerState.STALE, ServerState.HEALTHY, ServerState.SUSPECT)
        found = []
        for name, server in self._table.servers.items():
            failed = self._failures.get(name)
            if server.asleep or name in self._running or server.state not in states:
                continue
            if failed is None or now >= failed.not_before:
                incarnation = self._table.begin_sleep(name)
                self._running[name] = _Running(incarnation, now, False)
                found.append(Sleep(name, server.url, incarnation))
        return found

    def slept(self, sleep: Sleep, now: float) -> None:
        """The server has released its devices."""
        self._end(sleep)
        self._failures.pop(sleep.server, None)
        self._table.slept(sleep.server, sleep.incarnation, now)

    def sleepless(self, sleep: Sleep, now: float) -> float:
        """The server has not released its devices. Returns the seconds until it is asked again."""
        self._end(sleep)
        return self._back_off(sleep.server, now)

    def _aim_at(self, version: WeightVersion) -> None:
        if self.target is None or version > self.target:
            self.target = version
        self._table.begin_attempt(version.attempt)

    def due(self, now: float) -> list[Update]:
        """Return the updates to begin now. Their servers are UPDATING from this call on."""
        if self.target is None or self._table.training or (self._least is not None and self.target < self._least):
            return []
        servers = self._table.servers
        for name in [
            name for name, running in self._running.items() if running.incarnation != servers[name].incarnation
        ]:
            del self._running[name]  # that process is gone; its update ends on its own, and its result is ignored
        away = (ServerState.DEAD, ServerState.DRAINING)
        alive = sum(server.state not in away for server in servers.values())
        room = max(1, int(self._fraction * alive)) - sum(
            running.took_from_service and now < running.since + self.slow_after_s for running in self._running.values()
        )
        updates = []
        for name in sorted(servers, key=self._last_to_trust):
            server = servers[name]
            failed = self._failures.get(name)
            if name in self._running or (failed is not None and (failed.given_up or now < failed.not_before)):
                continue
            serving = server.state is ServerState.HEALTHY and server.version is not None
            if server.state not in (ServerState.STALE, ServerState.HEALTHY) or (serving and room < 1):
                continue
            version, from_memory = self._source(server, self.target)
            if version is None or (server.version is not None and version <= server.version):
                continue
            room -= serving
            is_new = server.is_new
            incarnation = self._table.begin_update(name, version)
            self._running[name] = _Running(incarnation, now, serving)
            update = Update(name, server.url, incarnation, version, self.limit_s, self._bytes_s, from_memory, is_new)
            updates.append(update)
        return updates

    def needs_files(self, server: Server, version: WeightVersion) -> bool:
        """Whether a server neither has a version nor gets it from memory, now or soon."""
        return version not in (server.version, server.loading) and not self._offers.may_get(server, version)

    def _source(self, server: Server, target: WeightVersion) -> tuple[WeightVersion | None, bool]:
        """Return the version that a server can load now, and whether from the trainer's memory."""
        if self._offers.may_get(server, target):
            return target, True
        on_disk, least = self._on_disk.newest, self._offers.least(server.name)
        if least is None:
            least = WeightVersion(self._table.attempt, 0)
        if on_disk is None or on_disk.attempt != self._table.attempt or on_disk < least:
            return None, False  # a suitable version will be published
        return on_disk, False

    def succeeded(self, update: Update, now: float) -> bool:
        """The server has echoed the version. Returns False if the update no longer counts (see ServerTable.loaded)."""
        running = self._running.get(update.server)
        took_s = now - running.since if running is not None else 0.0
        self._end(update)
        self._failures.pop(update.server, None)
        self._loaded[update.server] = update.version
        self._offers.loaded(update.server, from_memory=update.from_memory)
        return self._table.loaded(update.server, update.incarnation, update.version, now, took_s)

    def failed(
        self, update: Update, reason: str, now: float, error_class: ErrorClass = ErrorClass.PASSING
    ) -> float | None:
        """The server has not loaded the version (refused, silent, slow, wrong echo). Returns the seconds until the retry; None if
        the server gives the version up."""
        self._end(update)
        if update.from_memory:
            # It loads files without a retry pause, as soon as this version or a newer one is published
            self._offers.failed(update.server, update.version)
            self._table.load_failed(update.server, update.incarnation, reason)
            return 0.0
        pause: float | None = self._back_off(update.server, now)
        failed = self._failures[update.server]
        if failed.causes.failed(error_class, reason, now) and update.version == self._on_disk.newest:
            failed.given_up, pause = reason, None
        self._table.load_failed(update.server, update.incarnation, reason)
        return pause

    def _back_off(self, server: str, now: float) -> float:
        failed = self._failures.get(server)
        if failed is None:
            causes = Failures(self._patience_s, max_permanent=MAX_REFUSALS)
            failed = self._failures[server] = _Failed(causes)
        failed.count += 1
        pause = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failed.count - 1, 16))
        failed.not_before = now + pause
        return pause

    def silent(self, server: str) -> None:
        """The server did not answer a health probe, or its announcement is gone."""
        self._silent.add(server)

    def answers(self, server: str, now: float) -> bool:
        """The server answers. Returns True if that ends its retry pause: it had been silent, and its loads may have failed for the
        same reason. The backoff is not reset: after another failure the pause is as long as without this answer."""
        if server not in self._silent:
            return False
        self._silent.remove(server)
        failed = self._failures.get(server)
        if failed is None or (failed.not_before <= now and not failed.given_up):
            return False
        failed.not_before, failed.given_up = now, ""
        return True

    def num_failures(self, server: str) -> int:
        """Number of consecutive failures of the server to load from disk, since the newest publication."""
        return self._failures[server].count if server in self._failures else 0

    def given_up(self) -> GivenUp | None:
        """Return the newest version on disk if every live server has given it up. None if there is none, and while a server that
        has loaded it is away: its successor may load it, too."""
        version = self._on_disk.newest
        if version is None or self._table.attempts.is_over(version.attempt):
            return None
        reasons = {}
        for name, server in self._table.servers.items():
            failed = self._failures.get(name)
            if server.state in (ServerState.DEAD, ServerState.DRAINING):
                if self._loaded.get(name) == version and not server.leaving:
                    return None
            elif failed is None or not failed.given_up:
                return None
            else:
                reasons[name] = failed.given_up
        return GivenUp(version, reasons) if reasons else None

    def next_change(self, now: float) -> float | None:
        """Return the time of the next change without an event, after which `due` may return new updates: a retry pause ends, or a
        slow server stops counting in its wave. None: there is none."""
        times = [failed.not_before for failed in self._failures.values() if not failed.given_up]
        times += [running.since + self.slow_after_s for running in self._running.values()]
        return min((at for at in times if at > now), default=None)

    def _end(self, update: Update | Sleep) -> None:
        running = self._running.get(update.server)
        if running is not None and running.incarnation == update.incarnation:
            del self._running[update.server]

    def _last_to_trust(self, name: str) -> tuple[int, str]:
        return (self.num_failures(name), name)
