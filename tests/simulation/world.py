"""A simulated run: its processes, and what lies between them.

Code of the run finds its own process through its event loop (`here()`), so the world needs no global name. Whatever matters is
noted as an Event; invariants (invariants.py) look at each, and faults may wait for one (faults.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.runtime.names.interface import NameResolveTimeout, Watch
from tests.simulation.disk import Disk
from tests.simulation.loop import ProcessLoop, Scheduler
from tests.simulation.names import NameStore, SimNameResolver, SimWatch
from tests.simulation.network import SimPull, SimTransport, Site

if TYPE_CHECKING:
    from asyncrl.runtime.board import StatusBoard
    from asyncrl.runtime.worker import Worker
    from tests.simulation.scenario import Scenario


class Event(msgspec.Struct, frozen=True):
    """Something that happened, in whose process (name#incarnation)."""

    time: float
    process: str
    kind: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.time:10.4f} {self.process:22} {self.kind:12} {told}"


@dataclass(frozen=True)
class ChannelFaults:
    """What becomes of messages of channels: probabilities, drawn for each."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 1.0  # at most


@dataclass(frozen=True)
class HTTPFaults:
    """What becomes of requests: lost before they are handled, or their answers."""

    lose: float = 0.0
    lose_answer: float = 0.0
    delay_s: float = 0.1  # until the client sees that its connection is gone


@dataclass
class Process:
    """One incarnation of a process."""

    world: SimulatedWorld
    name: str
    incarnation: int
    loop: ProcessLoop = field(init=False)
    transport: SimTransport = field(init=False)
    resolver: SimNameResolver = field(init=False)
    worker: Worker | None = None
    lease: int | None = None
    config: Any = None
    ledger: Any = None  # of a manager that was asked for tickets
    buffer: Any = None  # of a master that was told of a trajectory
    main: asyncio.Task[Any] | None = None
    watches: list[Watch | SimWatch] = field(default_factory=list)
    frozen_until: float = 0.0
    dead: bool = False
    ended: bool = False  # by itself
    thawed_at: float = 0.0  # on the monotonic clock
    started_at: float = 0.0
    number: int = 0  # of all incarnations of all processes
    label: str = field(init=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.label, self.kind = f"{self.name}#{self.incarnation}", self.name.partition("/")[0]
        # of asyncio's loop only what has no sockets is there
        self.loop = ProcessLoop(self.world.scheduler, self.name, self, self._failed)  # type: ignore[abstract]
        self.transport = SimTransport(self.world, self)
        self.resolver = SimNameResolver(self.world.names, self)

    def _failed(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.world.note(self, "callback_error", error=f"{context.get('message')}: {error!r}")


def here() -> Process:
    """The process whose code is running."""
    process: Process = asyncio.get_running_loop().process  # type: ignore[attr-defined]
    return process


class SimulatedWorld:
    """Everything between processes."""

    scenario: Scenario

    def __init__(self, seed: int, *, latency_s: float = 0.0005) -> None:
        self.scheduler = Scheduler()
        self.network = random.Random(f"network {seed}")  # what a message meets
        self.chance = random.Random(f"chance {seed}")  # identities
        self.latency_s = latency_s
        self.names = NameStore(self)
        self.disk = Disk()
        self.pulls: dict[str, SimPull] = {}
        self.sites: dict[str, Site] = {}
        self.urls: dict[str, str] = {}  # of all sites that ever were -> the incarnation that listened there
        self.processes: dict[str, Process] = {}  # the newest incarnation of each
        self.graveyard: list[Process] = []
        self.partitions: dict[frozenset[str], float] = {}  # two processes -> until when
        self.partition_loses = False  # what is sent meanwhile is lost; else it comes afterwards
        self.channel_faults: ChannelFaults | None = None
        self.http_faults: HTTPFaults | None = None
        self.slow_disk: dict[str, float] = {}  # process -> seconds an operation takes at most
        self.journals: dict[str, dict[str, Any]] = {}  # the last record of each
        self.snapshots: dict[str, Any] = {}  # of weights that are being written
        self.masters: dict[str, str] = {}  # what the master said to a checkpoint
        self.events: list[Event] = []
        self.listeners: list[Callable[[Event], None]] = []
        self.count: Counter[str] = Counter()
        self._num_incarnations: Counter[str] = Counter()
        self._num_sites = 0
        self.num_pulls = 0

    @property
    def now(self) -> float:
        return self.scheduler.now

    def draw_delay(self) -> float:
        """One way of a message: mostly short, sometimes long."""
        drawn = self.network.random()
        return self.latency_s * (0.2 + drawn if drawn < 0.97 else 30.0 * (drawn - 0.96))

    # ---------------------------------------------------------------------------------------------------------- events

    def note(self, process: Process | None, kind: str, **fields: Any) -> None:
        event = Event(self.scheduler.now, process.label if process is not None else "", kind, fields)
        self.count[kind] += 1
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def on_put(self, key: str, value: str) -> None:
        """An entry of name resolve was put."""
        if "/model_version/" in key:
            self.note(None, "published", version=value)

    def on_journal(self, process: Process, record: dict[str, Any]) -> None:
        """A line of a journal."""

    def prune_checkpoints(self, keep_last: int) -> None:
        """As checkpoints.prune."""

    def look_at(self, process: Process, board: StatusBoard) -> None:
        """What the launcher sees of a process, about once a second."""

    def look_at_queue(self, pull: SimPull) -> None:
        """A message waits in a socket."""

    # ------------------------------------------------------------------------------------------------------- processes

    def start(self, name: str, config: Any, make: Callable[[Process], Worker]) -> Process:
        """A new incarnation of this name."""
        self._num_incarnations[name] += 1
        process = Process(self, name, self._num_incarnations[name], config=config, started_at=self.now)
        process.lease = self.names.grant_kept(30.0)
        process.number = sum(self._num_incarnations.values())
        self.processes[name] = process
        self.note(process, "started")
        process.loop.call_soon(self._boot, process, make)
        return process

    def _boot(self, process: Process, make: Callable[[Process], Worker]) -> None:
        try:
            process.worker = make(process)
        except Exception as error:
            self._end(process, error)
            return
        process.main = process.loop.create_task(process.worker.main(), name="main")
        process.main.add_done_callback(lambda task: self._ended(process, task))

    def _ended(self, process: Process, task: asyncio.Task[Any]) -> None:
        if process.dead:
            return
        self._end(process, None if task.cancelled() else task.exception())

    def _end(self, process: Process, error: BaseException | None) -> None:
        process.ended = True
        self._bury(process)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self.note(process, "ended", error=text)

    def kill(self, process: Process) -> None:
        """SIGKILL. What it had sent is on its way; nothing else of it is left."""
        if process.dead:
            return
        self._bury(process)
        self.note(process, "killed")

    def _bury(self, process: Process) -> None:
        process.dead = True
        process.loop.kill()
        self.graveyard.append(process)
        for watch in process.watches:
            watch.cancel()
        for base, site in list(self.sites.items()):
            if site.process is process:
                del self.sites[base]
                for exchange in list(site.calls):
                    exchange.server_died()
                site.calls.clear()
            else:
                for exchange in list(site.calls):
                    if exchange.client is process:
                        exchange.client_died()
        for address in [address for address, pull in self.pulls.items() if pull.process is process]:
            del self.pulls[address]

    def freeze(self, process: Process, until: float) -> None:
        """SIGSTOP."""
        if process.dead:
            return
        process.frozen_until = max(process.frozen_until, until)
        process.loop.freeze()
        self.note(process, "frozen", until=round(until, 3))
        self.scheduler.at(until, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if not process.dead and self.now >= process.frozen_until:
            process.loop.thaw()
            process.thawed_at = self.scheduler.monotonic()
            self.note(process, "thawed")

    def listen(self, process: Process, handler: Any) -> str:
        """A site of this process; returns its URL."""
        self._num_sites += 1
        base = f"{process.name.replace('/', '-')}:{self._num_sites}"
        self.sites[base] = Site(process, handler)
        self.urls[f"http://{base}"] = process.label
        return f"http://{base}"

    def heal(self, pair: frozenset[str]) -> None:
        """A partition is over, unless it was made longer."""
        if self.partitions.get(pair, 0.0) <= self.now:
            self.partitions.pop(pair, None)

    def calm(self, name: str, faults: ChannelFaults | HTTPFaults) -> None:
        """What was put in is taken out, unless something else is there by now."""
        if getattr(self, name) is faults:
            setattr(self, name, None)

    def cut_until(self, one: Process, other: Process) -> float:
        """Until when nothing passes between these two."""
        until = self.partitions.get(frozenset((one.name, other.name)), 0.0)
        return max(
            until, self.partitions.get(frozenset((one.name,)), 0.0), self.partitions.get(frozenset((other.name,)), 0.0)
        )

    def tear_down(self) -> None:
        """Forget all processes. Their coroutines are closed: what those do in their `finally` reaches nobody any more."""
        for process in [*self.graveyard, *self.processes.values()]:
            process.dead = True
            process.loop.kill()
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            for process in [*self.graveyard, *self.processes.values()]:
                for task in process.loop.tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(RuntimeError):  # it awaits something in a `finally`
                        task.get_coro().close()
                process.loop.tasks.clear()
            self.processes.clear()
            self.graveyard.clear()
            self.pulls.clear()
            self.sites.clear()
            self.scheduler.clear()
            gc.collect()
        finally:
            sys.unraisablehook = hook

    # --------------------------------------------------------------------------------------------------------- threads

    async def on_thread(self, process: Process, func: Any, *args: Any, **kwargs: Any) -> Any:
        """asyncio.to_thread and run_in_executor: of name resolve what a thread would see, of all else the result, after what the
        disk takes."""
        owner = getattr(func, "__self__", None)
        if isinstance(owner, SimNameResolver):
            return await owner.on_thread(self, func, args, kwargs)
        slow_s = self.slow_disk.get(process.name)
        called = func.func if isinstance(func, functools.partial) else func
        if slow_s is not None and getattr(called, "on_disk", False):
            await asyncio.sleep(slow_s * self.network.random())
        else:
            await asyncio.sleep(0)
        try:
            return func(*args, **kwargs)
        except NameResolveTimeout:  # it has asked in between, on its thread
            await asyncio.sleep(5.0)
            raise
