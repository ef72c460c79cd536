"""A small model of generation servers around the real server table, update plan and version fence.

The model splits the handling of one server in fleet.py into its calls (ask, pause, load, echo, continue). Any event may
happen between two calls. A manager that was presumed dead may only have been frozen, and may continue its updates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from asyncrl.generation.checks import VersionFence
from asyncrl.generation.engine import WeightsRefused
from asyncrl.manager.routing import Server, ServerState, ServerTable
from asyncrl.manager.update_plan import Update, UpdatePlan
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.versions import WeightVersion

DEAD_AFTER_S = 15.0
SLOW_AFTER_S = 15.0  # a quarter of update_timeout_s


@dataclass(eq=False)
class Process:
    """The process of a generation server."""

    url: str
    loaded: WeightVersion | None = None
    history: list[WeightVersion] = field(default_factory=list)
    fence: VersionFence = field(default_factory=VersionFence)
    paused: bool = False
    alive: bool = True
    frozen: bool = False

    @property
    def answers(self) -> bool:
        return self.alive and not self.frozen

    def load(self, version: WeightVersion) -> None:
        self.fence.check(version)
        assert self.paused, "a server loaded weights while it generated"
        self.loaded = version
        self.fence.loaded(version)
        self.history.append(version)


@dataclass(eq=False)
class Work:
    """An update in progress."""

    update: Update
    process: Process
    table: ServerTable
    plan: UpdatePlan
    stage: str
    since: float
    took_from_service: bool  # the server was healthy, so it counts in the wave

    @property
    def version(self) -> WeightVersion:
        return self.update.version


class Servers:
    """See the module docstring. A name is permanent; its process may be replaced."""

    def __init__(self, count: int, fraction: float) -> None:
        self.now = 0.0
        self.fraction = fraction
        self.names = [f"generation_server/{index}" for index in range(count)]
        self._urls = itertools.count()
        self.processes = {name: Process(f"http://{next(self._urls)}") for name in self.names}
        self.newest = WeightVersion(1, 0)
        self.on_disk: WeightVersion | None = None  # published, with valid checksums
        self.held: WeightVersion | None = None
        self.works: list[Work] = []
        self.zombies: list[Work] = []  # of earlier managers
        self.begin_manager(1)

    # ---------------------------------------------------------------------------------------------------------- managers

    def begin_manager(self, attempt: int) -> None:
        self.zombies = [*self.zombies, *getattr(self, "works", [])][-4:]
        self.works = []
        self.table = ServerTable(dead_after_s=DEAD_AFTER_S, attempts=Fence(attempt))
        self.plan = UpdatePlan(self.table, update_fraction=self.fraction)
        self._served: tuple[int, int] = (attempt, -1)
        for name, process in self.processes.items():
            if process.alive:
                self.table.announce(name, process.url, self.now)

    def hear(self) -> None:
        """Tell the update plan which version is published and which version the trainer holds in memory."""
        if self.on_disk is not None:
            self.plan.publish(self.on_disk)
        if self.held is not None:
            self.plan.hold(self.held)

    def begin_updates(self) -> None:
        was = {name: server.version for name, server in self.table.servers.items()}
        healthy = {name for name, server in self.table.servers.items() if server.state is ServerState.HEALTHY}
        for update in self.plan.due(self.now):
            if (version := was[update.server]) is not None:
                assert update.version > version, "an update would load an older version"
            process = self.processes[update.server]
            assert process.url == update.url
            stage = "ask" if update.is_new else "pause"
            taken = update.server in healthy
            self.works.append(Work(update, process, self.table, self.plan, stage, self.now, taken))

    def go_on(self, work: Work, *, fails: bool = False) -> None:
        """Perform the next call of an update. `fails` makes the update fail after the call has taken effect.

        The update fails without the call if the process is silent or the update's time limit has passed.
        """
        process, update = work.process, work.update
        if not process.answers or self.now - work.since > update.limit_s:
            return self.fail(work)
        if work.stage == "ask":
            serves = process.loaded
            if (
                serves is not None
                and serves.attempt == work.version.attempt
                and serves >= work.version
                and not process.paused
            ):
                work.update = Update(
                    update.server,
                    update.url,
                    update.incarnation,
                    serves,
                    update.limit_s,
                    update.bytes_s,
                    update.from_memory,
                    is_new=True,
                )
                return self.succeed(work)
            work.stage = "pause"
        elif work.stage == "pause":
            process.paused, work.stage = True, "load"
        elif work.stage == "load":
            try:
                process.load(work.version)
            except (WeightsRefused, AssertionError):
                return self.fail(work)
            work.stage = "echo"
        elif work.stage == "echo":
            if process.loaded != work.version:
                return self.fail(work)
            work.stage = "continue"
        else:
            process.paused = False
            return self.fail(work) if fails else self.succeed(work)
        return self.fail(work) if fails else None

    def succeed(self, work: Work) -> None:
        work.plan.succeeded(work.update, self.now)
        self._over(work)

    def fail(self, work: Work) -> None:
        work.plan.failed(work.update, "failed", self.now)
        self._over(work)

    def _over(self, work: Work) -> None:
        for works in (self.works, self.zombies):
            if work in works:
                works.remove(work)

    def probe(self, name: str) -> None:
        """Record an answer or a silence in the server table, as fleet.py does."""
        server, process = self.table.servers.get(name), self.processes[name]
        if server is None or not server.listed or server.state is ServerState.UPDATING:
            return
        if process.answers:
            self.table.answered(name, str(process.loaded or ""), self.now, paused=process.paused)
        else:
            self.table.silent(name, "no answer", self.now)

    # ----------------------------------------------------------------------------------------------------------- servers

    def kill(self, name: str) -> None:
        self.processes[name].alive = False
        self.table.withdraw(name)

    def restart(self, name: str) -> None:
        if not self.processes[name].alive:
            self.processes[name] = Process(f"http://{next(self._urls)}")
            self.table.announce(name, self.processes[name].url, self.now)

    # ----------------------------------------------------------------------------------------------------------- trainer

    def train(self) -> None:
        self.newest = WeightVersion(self.newest.attempt, self.newest.version + 1)

    def hold(self) -> None:
        self.held = self.newest

    def write(self) -> None:
        self.on_disk = max(self.on_disk, self.newest) if self.on_disk is not None else self.newest

    def begin_attempt(self, back: int) -> None:
        """Begin an attempt from a checkpoint `back` versions old. Weights in the previous attempt's memory are lost."""
        self.newest = WeightVersion(self.newest.attempt + 1, max(0, self.newest.version - back))
        self.held = None

    # ---------------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        table = self.table
        for name, server in table.servers.items():
            process = self.processes[name]
            if server.state is ServerState.HEALTHY:
                assert server.version is not None
                assert server.version.attempt == table.attempt, "a healthy server has a version of another attempt"
                if process.alive and process.url == server.url:
                    assert process.loaded is not None, "a server receives traffic before it has loaded weights"
                    assert process.loaded >= server.version, (
                        "a server serves an older version than the manager recorded"
                    )
            assert process.history == sorted(process.history), "a process loaded an older version"
        picked = table.pick(max(0, table.served))
        assert (picked is not None) == table.has(max(0, table.served))
        served = (table.attempt, table.served)
        assert served >= self._served, "the served version decreased"
        self._served = served
        self._check_wave()

    def _check_wave(self) -> None:
        alive = sum(
            server.state not in (ServerState.DEAD, ServerState.DRAINING) for server in self.table.servers.values()
        )
        out = [
            work
            for work in self.works
            if work.took_from_service
            and work.update.incarnation == self.table.servers[work.update.server].incarnation
            and self.now < work.since + SLOW_AFTER_S
        ]
        assert len(out) <= max(1, int(self.fraction * max(alive, len(self.table.servers))))

    def server(self, name: str) -> Server:
        return self.table.servers[name]

    def turn(self) -> None:
        """Advance the clock by 2 s, probe every server, and complete every update that can start."""
        self.now += 2.0
        self.hear()
        for name in self.names:
            self.probe(name)
        self.begin_updates()
        while self.works:
            self.go_on(self.works[0])
        self.check()

    def drain(self) -> None:
        """Take turns without further faults. All servers must then serve the newest weights."""
        self.zombies = []
        for name, process in self.processes.items():
            process.frozen = False
            self.restart(name)
        self.write()
        for _ in range(60):
            self.turn()
        for name in self.names:
            server = self.server(name)
            assert (server.state, server.version) == (ServerState.HEALTHY, self.newest), server
            assert self.processes[name].loaded == self.newest
            assert not self.processes[name].paused
