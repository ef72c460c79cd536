"""The manager's state of generation servers, and the choice of the server for a group (pure).

    announced -> STALE -> UPDATING -> HEALTHY <-> SUSPECT -> DEAD -> STALE -> ...
                   any but DEAD -> DRAINING -> DEAD, or STALE if it is desired again

Only a HEALTHY server gets groups: in this attempt it has loaded a version with valid checksums, and has then reported that version
as the one it serves (its echo). A server gets from STALE (and so from DEAD) to HEALTHY only by a load, with one exception: a server
that loaded the version (or a newer one) for the previous manager need not load it again. It reports its version when this manager
first updates it. A SUSPECT server is HEALTHY again if it still echoes what it loaded.
A server that answers health probes late, or whose groups take much longer than those of its peers, is slow. It is shown as
suspect, and gets no groups while others have room. A server that is slow only by its groups still gets one group at a time, which
shows whether it is still slow. Requests on a slow server continue.
A server that leaves the run is DRAINING: it gets no groups and no weights, and finishes its groups. Groups that take too long
are moved to other servers.

The class Members decides which servers belong to the run. `asyncrl-launch scale` sets a desired number N: servers 0 to N - 1 stay,
the others leave. The launcher starts and stops processes by the same number. Only the manager knows when a leaving server has no
work left. It reports that to the launcher, once for each server and each change of N.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from asyncrl.protocol.fence import Fence
from asyncrl.protocol.manager import ServerView
from asyncrl.protocol.scaling import DesiredServers
from asyncrl.protocol.versions import WeightVersion


class ServerState(Enum):
    STALE = "stale"  # present, but without a verified version of this attempt
    HEALTHY = "healthy"
    UPDATING = "updating"  # interrupted, loading weights
    SUSPECT = "suspect"  # was healthy, does not answer now
    DRAINING = "draining"  # leaving the run
    DEAD = "dead"


_ENDS = frozenset({ServerState.DRAINING, ServerState.DEAD})  # every live state may change to these
_NEXT: dict[ServerState, frozenset[ServerState]] = {
    ServerState.STALE: _ENDS | {ServerState.UPDATING},
    ServerState.HEALTHY: _ENDS | {ServerState.UPDATING, ServerState.SUSPECT, ServerState.STALE},
    ServerState.UPDATING: _ENDS | {ServerState.HEALTHY, ServerState.STALE},
    ServerState.SUSPECT: _ENDS | {ServerState.HEALTHY, ServerState.STALE},
    ServerState.DRAINING: frozenset({ServerState.STALE, ServerState.DEAD}),
    ServerState.DEAD: frozenset({ServerState.STALE}),
}

_MAX_DEAD_URLS = 16
_LATE = 6  # an answer to a health probe is late after this part of dead_after_s
# Pace of a server: the minimum number of ended groups; the decay of older groups; the ratio to the median of its peers at which a
# server becomes slow; the ratio below which it is no longer slow.
_LEAST_GROUPS, _PACE_MEMORY, _SLOW, _QUICK_AGAIN = 4, 0.8, 3.0, 2.0
LEAST_COMPANIONS_S, MOST_COMPANIONS_S = 0.1, 5.0  # see awaits_companions


@dataclass
class Pace:
    """How fast a server has generated its recent groups."""

    num_groups: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    seconds_a_token: float | None = None  # None: too few groups
    slow: str = ""

    def add(self, tokens: int, seconds: float) -> None:
        """Count one ended group. tokens must be above 0."""
        self.num_groups += 1
        self.tokens = _PACE_MEMORY * self.tokens + tokens
        self.seconds = _PACE_MEMORY * self.seconds + seconds
        if self.num_groups >= _LEAST_GROUPS:
            self.seconds_a_token = self.seconds / self.tokens


@dataclass
class Server:
    """One generation server. Only ServerTable changes it."""

    name: str  # e.g. generation_server/0
    url: str
    last_answer: float
    state: ServerState = ServerState.STALE
    version: WeightVersion | None = None  # verified and echoed; None while STALE, UPDATING or DEAD
    loading: WeightVersion | None = None  # while UPDATING
    incarnation: int = 0  # grows when it is announced anew, dies or leaves during a load; older outcomes are void
    listed: bool = True  # in name resolve
    reason: str = ""  # why it is in a state other than HEALTHY
    running: int = 0  # assigned groups that have not ended
    used_tokens: int = 0  # KV cache tokens of its requests at the last poll, with an estimate for waiting ones
    num_requests: int | None = None  # running and waiting requests at the last poll; None: not known
    promised_tokens: float = 0.0  # tokens expected of the groups assigned since that poll
    update_s: float = 0.0  # seconds in which successful updates interrupted it
    is_new: bool = True  # its state has not changed yet: the previous manager may have had it load its version
    num_updates: int = 0  # updates that were begun
    failed_load: bool = False  # a load failed: the server stays interrupted until a load succeeds
    late_answer: str = ""  # description of its last answer to a health probe, if that was late
    pace: Pace = field(default_factory=lambda: Pace())
    asleep: bool = False  # STALE, and it has released the devices that it shares with training
    leaving: bool = False  # no longer desired: DRAINING, or DEAD permanently
    drains_since: float = 0.0

    def view(self) -> ServerView:
        version = str(self.version or self.loading or "")
        state = ServerState.SUSPECT if self.state is ServerState.HEALTHY and self.slow else self.state
        return ServerView(
            server=self.name,
            url=self.url,
            state=state.value,
            version=version,
            running=self.running,
            update_s=self.update_s,
        )

    @property
    def slow(self) -> str:
        """Why the server counts as slow; "" if it does not."""
        return self.late_answer or self.pace.slow

    @property
    def is_gone(self) -> bool:
        """Whether the server has left the run for good: it is dead and no longer desired."""
        return self.leaving and self.state is ServerState.DEAD


@dataclass
class ServerTable:
    """All servers; routing and health. `now` is in seconds of any monotonic clock."""

    policy: str = "least_requests"
    dead_after_s: float = 15.0
    max_groups: int = 0  # for each server; 0: no limit
    drain_timeout_s: float = 30.0
    updates_interrupt: bool = True  # a server samples nothing while it is updated
    attempts: Fence[int] = field(default_factory=lambda: Fence(1))
    served: int = -1  # newest version of this attempt that any server has served; never decreases within the attempt
    servers: dict[str, Server] = field(default_factory=dict)
    training: bool = False  # shared devices: it is training's turn, so no server may serve
    _last_picked: str = ""
    _dead_urls: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _told_dead: list[str] | None = None  # cache of dead_urls; None: must be recomputed
    _now_healthy: list[Server] | None = None  # cache of _healthy; None: must be recomputed
    _companions_until: float = float("-inf")

    @property
    def attempt(self) -> int:
        """The newest attempt with published weights."""
        return self.attempts.newest

    # ------------------------------------------------------------------------------------------------- health

    def announce(self, name: str, url: str, now: float) -> None:
        """Name resolve lists the server. Repeating the same URL has no effect unless the server was dead."""
        server = self.servers.get(name)
        if server is None:
            self.servers[name] = Server(name, url, now, reason="new")
            self._told_dead = None
            return
        server.listed = True
        if server.url == url and server.state is not ServerState.DEAD:
            return
        if server.state is not ServerState.STALE:
            if server.state is not ServerState.DEAD:
                self._move(server, ServerState.DEAD, "replaced by a new process")
            self._come_back(server, "announced again", now)
        server.url, server.asleep = url, False
        self._told_dead = None
        server.incarnation += 1
        server.last_answer = now

    def withdraw(self, name: str) -> None:
        """Name resolve no longer lists the server."""
        server = self.servers.get(name)
        if server is None:
            return
        server.listed = False
        if server.state is not ServerState.DEAD:
            self._move(server, ServerState.DEAD, "name resolve no longer lists it")

    def answered(self, name: str, echo: str, now: float, *, paused: bool = False, took_s: float = 0.0) -> None:
        """The server answered a health probe and reports the version `echo`. paused: another client has paused its generation."""
        server = self.servers[name]
        server.last_answer = now
        server.late_answer = (
            f"took {took_s:.1f} s to answer a health probe" if took_s > self.dead_after_s / _LATE else ""
        )
        if server.state is ServerState.DEAD:
            self._come_back(server, "answers again after it counted as dead", now)
        elif server.state in (ServerState.HEALTHY, ServerState.SUSPECT):
            if echo != str(server.version):
                self._move(server, ServerState.STALE, f"serves {echo or 'nothing'} instead of {server.version}")
            elif paused:
                self._move(server, ServerState.STALE, "was paused by another client")
            elif server.state is ServerState.SUSPECT:
                self._move(server, ServerState.HEALTHY, "")

    def silent(self, name: str, reason: str, now: float) -> None:
        """The server did not answer a health probe, or a rollout worker could not reach it."""
        server = self.servers[name]
        if server.state is ServerState.HEALTHY:
            self._move(server, ServerState.SUSPECT, reason)
        waiting_for = (ServerState.SUSPECT, ServerState.STALE, ServerState.DRAINING)
        if server.state in waiting_for and now - server.last_answer > self.dead_after_s:
            self._move(server, ServerState.DEAD, f"silent for {now - server.last_answer:.1f} s: {reason}")

    def dead_urls(self) -> list[str]:
        """URLs that will not answer: those of the most recently dead servers, unless a live server uses the URL again, and those of
        servers that stay interrupted after a failed load."""
        if self._told_dead is None:  # cached, because every heartbeat reads it
            alive = [server for server in self.servers.values() if server.state is not ServerState.DEAD]
            back = {server.url for server in alive}
            self._told_dead = [url for url in self._dead_urls if url not in back]
            self._told_dead += [server.url for server in alive if server.failed_load]
        return self._told_dead

    def load_reported(self, name: str, used_tokens: int, num_requests: int, promised_before: float) -> None:
        """The server reported its load. promised_before: promised_tokens when the report was requested. The report includes those
        groups, so their expected tokens are subtracted."""
        server = self.servers[name]
        server.used_tokens, server.num_requests = used_tokens, num_requests
        server.promised_tokens = max(0.0, server.promised_tokens - promised_before)

    # ----------------------------------------------------------------------------------------------- members that leave

    def leave(self, name: str, now: float) -> None:
        """The server is no longer desired: it gets no new groups and no new weights, and the result of a load in
        progress is ignored."""
        server = self.servers[name]
        if server.leaving:
            return
        server.leaving = True
        if server.state is not ServerState.DEAD:
            self._drain(server, now)

    def stay(self, name: str) -> None:
        """The server is desired again. It serves once it has loaded the current weights."""
        server = self.servers[name]
        server.leaving = False
        if server.state is ServerState.DRAINING:
            self._move(server, ServerState.STALE, "desired again")

    def overdue_leavers(self, now: float) -> list[Server]:
        """Draining servers that still have groups after drain_timeout_s."""
        return [
            server
            for server in self.servers.values()
            if server.state is ServerState.DRAINING
            and server.running
            and now - server.drains_since >= self.drain_timeout_s
        ]

    def handed_over(self, name: str) -> None:
        """Groups of the server were moved to others. Their requests may still run on it, so its load must be polled again."""
        self.servers[name].num_requests = None

    def has_drained(self, name: str) -> bool:
        """Whether the server can stop without loss: it is leaving, has no group and reports no request; or it is dead or
        unknown."""
        server = self.servers.get(name)
        if server is None or server.state is ServerState.DEAD:
            return True
        return server.state is ServerState.DRAINING and not server.running and server.num_requests == 0

    def _drain(self, server: Server, now: float) -> None:
        if server.state is ServerState.UPDATING:
            server.incarnation += 1
            server.version = None
        self._move(server, ServerState.DRAINING, "leaves the run")
        server.drains_since, server.num_requests = now, None

    def _come_back(self, server: Server, reason: str, now: float) -> None:
        """Change a dead server to STALE, or to DRAINING if it is leaving."""
        self._move(server, ServerState.STALE, reason)
        if server.leaving:
            self._drain(server, now)

    # ------------------------------------------------------------------------------------------------- updates

    def begin_update(self, name: str, version: WeightVersion) -> int:
        """Take the server out of service for a load. Returns its incarnation, which the outcome must carry."""
        server = self.servers[name]
        self._move(server, ServerState.UPDATING, f"loads {version}")
        server.loading = version
        server.num_updates += 1
        return server.incarnation

    def loaded(self, name: str, incarnation: int, version: WeightVersion, now: float, took_s: float = 0.0) -> bool:
        """The server has loaded and echoed a verified version, in took_s seconds. Returns False if the load is void: the server has
        died or begun to leave since the load began, or the version's attempt is over."""
        server = self.servers[name]
        if server.incarnation != incarnation or server.state is not ServerState.UPDATING:
            return False
        server.last_answer = now
        if not self.attempts.is_current(version.attempt):
            self._move(server, ServerState.STALE, f"loaded {version}, but attempt {self.attempt} has begun")
            return False
        self._move(server, ServerState.HEALTHY, "")
        server.version = version
        server.update_s += took_s if self.updates_interrupt else 0.0
        if version.version > self.served:
            self.served = version.version
            self._companions_until = now + min(took_s + LEAST_COMPANIONS_S, MOST_COMPANIONS_S)
        return True

    def awaits_companions(self, now: float) -> bool:
        """A new version is served, but some servers are still loading it. Admission waits for them.

        A new version admits many groups at once, and the first server that has it must not get all of them. The wait is bounded by
        the time that the first server's load took plus LEAST_COMPANIONS_S, and by MOST_COMPANIONS_S.
        """
        return now < self._companions_until and any(
            server.state is ServerState.UPDATING
            and server.loading is not None
            and (server.loading.attempt, server.loading.version) == (self.attempt, self.served)
            for server in self.servers.values()
        )

    def companions_wait_s(self, now: float) -> float:
        """How many more seconds awaits_companions may return True."""
        return max(0.0, self._companions_until - now)

    def load_failed(self, name: str, incarnation: int, reason: str) -> bool:
        """A load failed, so the server's weights are unknown: it gets no traffic until a load succeeds. Returns False, without
        effect, if the server has died or begun to leave since the load began."""
        server = self.servers[name]
        if server.incarnation != incarnation or server.state is not ServerState.UPDATING:
            return False
        self._move(server, ServerState.STALE, reason)
        server.failed_load = True
        self._told_dead = None
        return True

    def begin_sleep(self, name: str) -> int:
        """Take the server out of service: it must release its devices. Returns its incarnation, which `slept` must carry."""
        server = self.servers[name]
        if server.state in (ServerState.HEALTHY, ServerState.SUSPECT):
            self._move(server, ServerState.STALE, "releases its devices for training")
        return server.incarnation

    def slept(self, name: str, incarnation: int, now: float) -> None:
        """The server has released its devices. Void if it has died since."""
        server = self.servers[name]
        if server.incarnation == incarnation and server.state is ServerState.STALE:
            server.asleep, server.last_answer = True, now

    @property
    def devices_free(self) -> bool:
        """Whether no server holds a shared device: each sleeps, or its process has left name resolve. A server that has not been
        announced yet holds none, because it starts asleep."""
        return all(server.asleep or not server.listed for server in self.servers.values())

    def begin_attempt(self, attempt: int) -> None:
        """The training side has restarted: every server is stale until it has the new attempt's weights."""
        if not self.attempts.adopt(attempt):
            return
        self.served = -1
        for server in self.servers.values():
            if server.state in (ServerState.HEALTHY, ServerState.SUSPECT):
                self._move(server, ServerState.STALE, f"attempt {attempt} has begun")

    # ------------------------------------------------------------------------------------------------- routing

    def can_serve(self, server: Server, min_version: int) -> bool:
        """Whether the server may get a group whose first tokens must be sampled with min_version or newer."""
        version = server.version  # a version of this attempt if the server is healthy
        return server.state is ServerState.HEALTHY and version is not None and version.version >= min_version

    def has(self, min_version: int) -> bool:
        """Whether any server can serve min_version."""
        return any(self.can_serve(server, min_version) for server in self._healthy())

    def room(self, min_version: int) -> int | None:
        """How many more groups the servers that can serve min_version may get; None: any number."""
        if not self.max_groups:
            return None
        serving = (server for server in self._healthy() if self.can_serve(server, min_version))
        return sum(max(0, self.max_groups - server.running) for server in serving)

    def pick_for_moved(self, min_version: int, *, exclude: str) -> Server | None:
        """Pick a server for a running group that loses its server. Exceeds max_groups if no server has room."""
        return self.pick(min_version, exclude=exclude) or self.pick(min_version, exclude=exclude, max_groups=0)

    def pick(self, min_version: int, *, exclude: str = "", max_groups: int | None = None) -> Server | None:
        """Pick the server for a group that needs min_version or newer. None: no healthy server has the version and room."""
        limit = (self.max_groups if max_groups is None else max_groups) or sys.maxsize
        load_of, healthy = POLICIES[self.policy].load_of, self._healthy()
        # This runs for every ticket, so it makes one pass without sorting. The pass starts after the last picked server: among
        # equal loads (with round robin all are equal) the next server is picked.
        first = bisect.bisect_right(healthy, self._last_picked, key=lambda server: server.name)
        best: Server | None = None
        best_slow, best_load = False, 0.0
        for server in itertools.chain(healthy[first:], healthy[:first]):
            load = load_of(server)
            if best is not None and load >= best_load and not best_slow:  # first, because it is true for nearly all
                continue
            if server.running >= limit or server.name == exclude or not self.can_serve(server, min_version):
                continue
            # A slow server comes last. One that is slow only by its groups gets one group at a time, to show whether it still is.
            slow = server.late_answer != "" or (server.pace.slow != "" and server.running > 0)
            if best is None or (slow, load) < (best_slow, best_load):
                best, best_slow, best_load = server, slow, load
        if best is not None:
            self._last_picked = best.name
        return best

    def granted(self, name: str, expected_tokens: float = 0.0) -> None:
        """A group was assigned to the server."""
        if name in self.servers:
            self.servers[name].running += 1
            self.servers[name].promised_tokens += expected_tokens

    def ended(self, name: str, expected_tokens: float = 0.0) -> None:
        """A group of the server has ended or moved away."""
        if name in self.servers:
            server = self.servers[name]
            assert server.running > 0, f"{name} ended more groups than were assigned to it"
            server.running -= 1
            server.promised_tokens = max(0.0, server.promised_tokens - expected_tokens)

    def group_ended(self, name: str, tokens: int, seconds: float) -> None:
        """Update the server's pace: a group that never ran on another server has ended after `seconds`, with `tokens` tokens."""
        server = self.servers.get(name)
        if server is None or tokens <= 0 or seconds <= 0.0:
            return
        server.pace.add(tokens, seconds)
        own = server.pace.seconds_a_token
        others = [other.pace.seconds_a_token for other in self._healthy() if other is not server]
        known = [pace for pace in others if pace is not None]
        if own is None or not known:
            server.pace.slow = ""
            return
        times = own / statistics.median(known)
        is_slow = times >= (_QUICK_AGAIN if server.pace.slow else _SLOW)
        server.pace.slow = f"its groups take {times:.1f} times as long as those of others" if is_slow else ""

    def views(self) -> list[ServerView]:
        """Views for users and for the master, without servers that have left the run."""
        return [server.view() for _, server in sorted(self.servers.items()) if not server.is_gone]

    def _healthy(self) -> list[Server]:
        """The healthy servers, sorted by name."""
        if self._now_healthy is None:  # cached, because it is read for every ticket
            self._now_healthy = [s for _, s in sorted(self.servers.items()) if s.state is ServerState.HEALTHY]
        return self._now_healthy

    def _move(self, server: Server, state: ServerState, reason: str) -> None:
        assert state in _NEXT[server.state], f"{server.name}: no transition from {server.state.name} to {state.name}"
        if state is ServerState.DEAD:
            server.pace, server.late_answer = Pace(), ""
            server.incarnation += 1
            self._dead_urls[server.url] = None
            self._dead_urls.move_to_end(server.url)
            while len(self._dead_urls) > _MAX_DEAD_URLS:
                self._dead_urls.popitem(last=False)
        if state in (ServerState.STALE, ServerState.UPDATING, ServerState.DEAD):
            server.version = None
        if state in (ServerState.HEALTHY, ServerState.DEAD):
            server.failed_load = False
        server.loading = None
        server.is_new = server.asleep = False
        server.state, server.reason = state, reason
        self._told_dead = self._now_healthy = None


@dataclass(frozen=True)
class Policy:
    """A routing policy: the healthy server with the least load gets the group.

    `ServerTable.pick` asks for the load of each server anew for every ticket, so the load must be cheap to compute and must not
    change anything. Versions, limits and slow servers are the table's, whatever the policy.
    """

    load_of: Callable[[Server], float]
    # The load depends on the servers' reports, for which load.py then polls the healthy ones
    reads_reports: bool = False


# The names are the words of manager.routing (config/schema.py)
POLICIES = {
    "round_robin": Policy(lambda server: 0.0),
    "least_requests": Policy(operator.attrgetter("running")),
    "least_token_usage": Policy(lambda server: server.used_tokens + server.promised_tokens, reads_reports=True),
}


@dataclass
class Members:
    table: ServerTable
    desired: DesiredServers | None = None
    _told: dict[str, str] = field(default_factory=dict)  # server -> DesiredServers.id for which it was last reported

    def set_desired(self, desired: DesiredServers | None, now: float) -> None:
        """Apply the newest desired number of servers to all servers."""
        self.desired = desired
        for name in self.table.servers:
            self.see(name, now)

    def see(self, name: str, now: float) -> None:
        """Mark the server as staying or leaving, according to the desired number."""
        if self._is_desired(name):
            self.table.stay(name)
        else:
            self.table.leave(name, now)

    def drained(self) -> list[tuple[str, str]]:
        """Servers that may be stopped, with the id of the newest DesiredServers. Omits those already reported for that id."""
        if self.desired is None:
            return []
        request = self.desired.id
        return [
            (name, request)
            for name, server in self.table.servers.items()
            if server.leaving and self._told.get(name) != request and self.table.has_drained(name)
        ]

    def drain_reported(self, name: str, request: str) -> None:
        """The launcher has been told that this server has drained."""
        self._told[name] = request

    def _is_desired(self, name: str) -> bool:
        return self.desired is None or int(name.rpartition("/")[2]) < self.desired.count
