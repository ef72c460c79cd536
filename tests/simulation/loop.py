"""Virtual time: an event loop for each simulated process, and one scheduler that runs them all on one thread.

    Scheduler  -- heap of (when, number, loop, handle) --> ProcessLoop.run_ready --> the code of a process

Nothing here waits: when no process has anything to do, the clock jumps to the next timer. Each process has its own event loop, as
in a real run. Its handles run in the order in which it scheduled them. It can be frozen (its handles are kept) or killed (they are
dropped) at any await. Processes affect each other only through the world's test doubles, as timers with delays drawn from the seed.
So the seed determines the order of events.

The order of a set of tasks or futures depends on their hashes. asyncio's hash is an address, which differs between interpreters, so
the classes here use consecutive numbers.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MONOTONIC_START = 10_000.0  # not zero, because no code may rely on a clock that starts at zero
CALENDAR_START = 1_800_000_000.0
_MOST_AT_ONCE = 200_000  # callbacks that may run before the clock advances; more of them mean that a loop never waits


class StuckError(RuntimeError):
    """The simulation cannot go on: no event is left, or the clock does not advance any more."""


_numbers = itertools.count()


class _Future(asyncio.Future):  # type: ignore[type-arg]
    __slots__ = ("_number",)
    _number: int

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            self._number = number = next(_numbers)
            return number


class _Task(asyncio.Task):  # type: ignore[type-arg]
    __slots__ = ("_number",)
    _number: int

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            self._number = number = next(_numbers)
            return number


class Handle(msgspec.Struct, eq=False):
    """Like asyncio's Handle and TimerHandle. A struct for speed: no other object is created so often."""

    callback: Any
    args: tuple[Any, ...]
    context: Context | None = None
    when_at: float = 0.0
    gone: bool = False

    def cancel(self) -> None:
        self.gone = True
        self.callback = _nothing
        self.args = ()

    def cancelled(self) -> bool:
        return self.gone

    def when(self) -> float:
        return self.when_at


def _nothing() -> None:
    pass


class Scheduler:
    """All loops of a simulation, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the simulation began
        self.num_handles = 0
        self._timers: list[tuple[float, int, ProcessLoop | None, Handle]] = []
        self._next_number = itertools.count().__next__
        self._active: deque[ProcessLoop] = deque()
        self.activate = self._active.append
        self.stopped = False
        global _numbers
        _numbers = itertools.count()

    def monotonic(self) -> float:
        return MONOTONIC_START + self.now

    def time(self) -> float:
        return CALENDAR_START + self.now

    def time_ns(self) -> int:
        return int((CALENDAR_START + self.now) * 1e9)

    def sleep(self, seconds: float) -> None:
        """Raise StuckError: no process of a run may block its loop."""
        raise StuckError(f"a process blocks its loop for {seconds:g} s")

    def at(self, when: float, callback: Callable[..., Any], *args: Any, loop: ProcessLoop | None = None) -> Handle:
        """Call the function at the time `when`: in a process's loop or, if loop is None, outside all processes."""
        handle = Handle(callback, args, None, when)
        heapq.heappush(self._timers, (when, self._next_number(), loop, handle))
        return handle

    def add_timer(self, loop: ProcessLoop, handle: Handle) -> None:
        heapq.heappush(self._timers, (handle.when_at, self._next_number(), loop, handle))

    def clear(self) -> None:
        self._timers.clear()
        self._active.clear()

    def run(self, until: float) -> bool:
        """Run until `stopped` is set, or until the given time (then return False). Raises StuckError."""
        try:
            return self._run(until)
        finally:
            events._set_running_loop(None)

    def _run(self, until: float) -> bool:
        active, timers, heappop, set_running = self._active, self._timers, heapq.heappop, events._set_running_loop
        most = self.num_handles + _MOST_AT_ONCE
        current: ProcessLoop | None = None
        while not self.stopped:
            while active:
                loop = active.popleft()
                loop.active = False
                if loop is not current:
                    set_running(loop)
                    current = loop
                ready = loop.ready
                count = 0
                while ready and not loop.halted:  # in the order of scheduling, like asyncio
                    handle = ready.popleft()
                    count += 1
                    try:
                        if handle.context is None:
                            handle.callback(*handle.args)
                        else:
                            handle.context.run(handle.callback, *handle.args)
                    except (SystemExit, KeyboardInterrupt, StopSimulation):
                        raise
                    except BaseException as error:
                        loop.call_exception_handler({"message": "a callback raised", "exception": error})
                    if count > _MOST_AT_ONCE:
                        raise StuckError(f"{loop.name} has run {count} callbacks without waiting for anything")
                self.num_handles += count
                if self.num_handles > most:
                    raise StuckError(f"{_MOST_AT_ONCE} callbacks without the clock moving, the last in {loop.name}")
            if not timers:
                raise StuckError("nothing is left to happen: every process waits, and no timer is set")
            when, _, owner, handle = heappop(timers)
            if handle.gone:
                continue
            if when > self.now:
                if when > until:
                    return False
                self.now = when
                most = self.num_handles + _MOST_AT_ONCE
            if owner is not None:
                owner.add_ready(handle)
                continue
            if current is not None:
                set_running(None)
                current = None
            handle.callback(*handle.args)
        return True


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one incarnation of a simulated process. It has no threads and no sockets; the world simulates them."""

    def __init__(
        self, scheduler: Scheduler, name: str, process: Any, on_error: Callable[[dict[str, Any]], None]
    ) -> None:
        self.scheduler, self.name, self.process = scheduler, name, process
        self.dead = False
        self.halted = False  # frozen or dead: none of its handles run
        self.active = False  # in the scheduler's queue of loops to run
        self.ready: deque[Handle] = deque()
        self._on_error = on_error
        self.tasks: list[
            asyncio.Task[Any]
        ] = []  # keeps tasks of a killed process alive, so that no `finally` of it runs
        self._prune_at = 100

    # ---------------------------------------------------------------------------------------------------------- running

    def add_ready(self, handle: Handle) -> None:
        if self.dead:
            return
        self.ready.append(handle)
        if not self.active and not self.halted:
            self.active = True
            self.scheduler.activate(self)

    def freeze(self) -> None:
        self.halted = True

    def thaw(self) -> None:
        if self.dead:
            return
        self.halted = False
        if self.ready and not self.active:
            self.active = True
            self.scheduler.activate(self)

    def kill(self) -> None:
        self.dead = self.halted = True
        self.ready.clear()

    # ---------------------------------------------------------------------------------------------------------- asyncio's

    def time(self) -> float:
        return MONOTONIC_START + self.scheduler.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, context)
        if not self.dead:
            self.ready.append(handle)
            if not self.active and not self.halted:
                self.active = True
                self.scheduler.activate(self)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        handle = Handle(callback, args, context, self.scheduler.now + (delay if delay > 0 else 0.0))
        self.scheduler.add_timer(self, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = _Task(coro, loop=self, name=name or "task")
        self.tasks.append(task)
        if len(self.tasks) > self._prune_at:
            self.tasks = [task for task in self.tasks if not task.done()]
            self._prune_at = 2 * len(self.tasks) + 100
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run the function on this thread, with the delays that `SimulatedWorld.on_thread` simulates."""
        if isinstance(func, functools.partial) and getattr(func.func, "__self__", None).__class__ is Context:
            # called by asyncio.to_thread, which runs the function in a copy of the context
            return self.create_task(self.process.world.on_thread(self.process, *func.args, **func.keywords))
        return self.create_task(self.process.world.on_thread(self.process, func, *args))

    get_debug = staticmethod(bool)  # returns False; fast, because it is called for each future

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return self.dead

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """Called by asyncio's timers; does nothing here."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._on_error(context)

    def set_exception_handler(self, handler: Any) -> None:
        """Ignored: the world must see every error, and a worker's handler only keeps some out of its log."""

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


class StopSimulation(BaseException):
    """Raised inside a process to stop the simulation, because an invariant is broken."""
