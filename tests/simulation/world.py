"""A simulated run: its processes, and the environment between them.

Code of the run finds its own process through its event loop (`here()`), so the world needs no global variable. Everything relevant
is noted as an Event. The invariants (invariants.py) check each event, and faults may wait for one (faults.py).
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
    """An event, with the process in which it happened (name#incarnation)."""

    time: float
    process: str
    kind: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.time:10.4f} {self.process:22} {self.kind:12} {told}"


@dataclass(frozen=True)
class ChannelFaults:
    """Faults of channel messages: a probability of each kind, drawn for each message."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    delay_s: float = 1.0  # the longest delay


@dataclass(frozen=True)
class HTTPFaults:
    """Faults of HTTP requests: the request is lost before it is handled, or its answer is lost."""

    lose: float = 0.0
    lose_answer: float = 0.0
    delay_s: float = 0.1  # time until the client notices that its connection is gone


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
    ledger: Any = None  # a manager's ledger, known from the first request for tickets on
    buffer: Any = None  # a master's buffer, known from the first trajectory on
    main: asyncio.Task[Any] | None = None
    watches: list[Watch | SimWatch] = field(default_factory=list)
    frozen_until: float = 0.0
    dead: bool = False
    ended: bool = False  # it ended by itself
    thawed_at: float = 0.0  # on the monotonic clock
    started_at: float = 0.0
    number: int = 0  # of this incarnation, counted over all processes
    label: str = field(init=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.label, self.kind = f"{self.name}#{self.incarnation}", self.name.partition("/")[0]
        # ProcessLoop implements only the methods of asyncio's loop that need no sockets
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
        self.network = random.Random(f"network {seed}")  # draws delays and faults of messages
        self.chance = random.Random(f"chance {seed}")  # draws ids
        self.latency_s = latency_s
        self.names = NameStore(self)
        self.disk = Disk()
        self.pulls: dict[str, SimPull] = {}
        self.sites: dict[str, Site] = {}
        self.urls: dict[str, str] = {}  # URL of each server, also of closed ones -> the incarnation that listened there
        self.processes: dict[str, Process] = {}  # the newest incarnation of each
        self.graveyard: list[Process] = []
        self.partitions: dict[frozenset[str], float] = {}  # two processes -> end of their partition
        self.partition_loses = False  # True: messages sent meanwhile are lost; False: they arrive afterwards
        self.channel_faults: ChannelFaults | None = None
        self.http_faults: HTTPFaults | None = None
        self.slow_disk: dict[str, float] = {}  # process -> longest duration of a disk operation in seconds
        self.journals: dict[str, dict[str, Any]] = {}  # the last record of each journal
        self.snapshots: dict[str, Any] = {}  # weights that are being written
        self.masters: dict[str, str] = {}  # path of a checkpoint -> the master's state
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
        """Draw the one-way delay of a message: mostly short, sometimes long."""
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
        """Called when an entry of name resolve is put."""
        if "/model_version/" in key:
            self.note(None, "published", version=value)

    def on_journal(self, process: Process, record: dict[str, Any]) -> None:
        """Called for each line of a journal."""

    def prune_checkpoints(self, keep_last: int) -> None:
        """Called in place of checkpoints.prune. SimulatedRun prunes; this class does nothing."""

    def look_at(self, process: Process, board: StatusBoard) -> None:
        """Called about once a second with the board that a process shows to the launcher."""

    def look_at_queue(self, pull: SimPull) -> None:
        """Called when a message has to wait in a socket."""

    # ------------------------------------------------------------------------------------------------------- processes

    def start(self, name: str, config: Any, make: Callable[[Process], Worker]) -> Process:
        """Start a new incarnation of the process with this name."""
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
        """Simulate SIGKILL. Messages that the process has sent on a channel still arrive. Its HTTP requests are dropped, and
        everything else of it is lost."""
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
        """Simulate SIGSTOP until the given time, then SIGCONT."""
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
        """Start a site of this process. Returns its URL."""
        self._num_sites += 1
        base = f"{process.name.replace('/', '-')}:{self._num_sites}"
        self.sites[base] = Site(process, handler)
        self.urls[f"http://{base}"] = process.label
        return f"http://{base}"

    def heal(self, pair: frozenset[str]) -> None:
        """End a partition, unless it was prolonged."""
        if self.partitions.get(pair, 0.0) <= self.now:
            self.partitions.pop(pair, None)

    def calm(self, name: str, faults: ChannelFaults | HTTPFaults) -> None:
        """Remove injected faults, unless newer ones have replaced them."""
        if getattr(self, name) is faults:
            setattr(self, name, None)

    def cut_until(self, one: Process, other: Process) -> float:
        """The time until which no message passes between these two processes."""
        until = self.partitions.get(frozenset((one.name, other.name)), 0.0)
        return max(
            until, self.partitions.get(frozenset((one.name,)), 0.0), self.partitions.get(frozenset((other.name,)), 0.0)
        )

    def tear_down(self) -> None:
        """Forget all processes, and close their coroutines. The `finally` blocks of these run, but cannot reach other processes."""
        for process in [*self.graveyard, *self.processes.values()]:
            process.dead = True
            process.loop.kill()
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            for process in [*self.graveyard, *self.processes.values()]:
                for task in process.loop.tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(RuntimeError):  # the coroutine awaits in a `finally`
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
        """Simulates asyncio.to_thread and run_in_executor. Calls of name resolve see its delays and outages. Calls marked `on_disk`
        are delayed while the process has a slow disk. All other calls return at once, in a later turn of the loop."""
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
        except NameResolveTimeout:  # the function called name resolve on its thread
            await asyncio.sleep(5.0)
            raise
