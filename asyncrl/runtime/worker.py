"""Worker base: the life of every process but the launcher.

starting (setup) -> running (run) -> stopping (close) -> done, or stopped if it was told to, or error from anywhere. A worker is
an asyncio program on the main thread; what computes runs on one extra thread. The launcher passes two things by environment: the
id of a lease that it keeps alive for the worker (so no worker that computes needs a keepalive thread), and a pipe for status
lines. A worker started by hand has neither: it keeps a lease of its own and publishes its status itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.config.schema import ConfigError, WorkerInfo
from asyncrl.data.prompts import PromptError
from asyncrl.protocol.messages import Wait, WorkerStatus
from asyncrl.protocol.names import Names, incarnation
from asyncrl.runtime import http_client
from asyncrl.runtime.disk import StorageError, out_of_files
from asyncrl.runtime.loop_watch import LoopWatch
from asyncrl.runtime.names.interface import NameResolver, WatchEvent
from asyncrl.runtime.names.open import open_name_resolver
from asyncrl.runtime.stacks import tell_tasks_of
from asyncrl.runtime.trace import OFF, Tracer, place_of, trace_file

T = TypeVar("T")
State = Literal["starting", "running", "stopping", "stopped", "done", "error"]

STATUS_FD_ENV = "ASYNCRL_STATUS_FD"
LEASE_ENV = "ASYNCRL_LEASE"
STATUS_INTERVAL_S = 0.5
LONG_WAIT_S = 20.0  # a wait longer than this is written to the log once, with what and on whom
_SAY_AGAIN_S = 60.0
_MAX_WATCH_EVENTS = 10_000  # that wait for the event loop; past it the newest of each key
_MAX_ERROR_CHARS = 20_000  # a status line must fit into the pipe to the launcher
_CLOCK_SLACK_S = 0.001  # the loop's timers may be early by its clock's resolution
_OWN_LIMIT_SLACK_S = 5.0  # for what is awaited to end itself, with an error that says more, at a limit of its own
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WaitTimeoutError(TimeoutError):
    """A named wait reached its limit."""

    def __init__(self, what: str, on: str, limit_s: float) -> None:
        super().__init__(f"waited {limit_s:g} s for {what} from {on}; giving up")
        self.what, self.on, self.limit_s = what, on, limit_s


class RunEndedError(RuntimeError):
    """The run ends for a reason that lies in no code: the text says what, why and what helps."""


def is_fatal(error: BaseException) -> bool:
    """Whether another process in this one's place would meet the same error: it lies in what the user gave, or in the disk."""
    return isinstance(error, ConfigError | PromptError | StorageError | RunEndedError)


def told(error: BaseException) -> str:
    """An error as the user is told it: with its traceback, unless its text is made to be enough. The log has it anyway."""
    if isinstance(error, ConfigError | StorageError | RunEndedError):
        return str(error)
    return "".join(traceback.format_exception(error))


class StatusBoard:
    """What a worker shows of itself: state, progress, named waits, queue depths."""

    def __init__(self, info: WorkerInfo, logger: logging.Logger, trace: Tracer = OFF) -> None:
        self._info = info
        self._logger = logger
        self._trace = trace
        self._waits: dict[int, tuple[str, str, float, float | None, Callable[[], str]]] = {}
        self._reported: set[int] = set()
        self._next_wait = 0
        self._progress = 0
        self._queues: dict[str, int] = {}
        self.state: State = "starting"
        self.entered = asyncio.Event()  # another state
        self.version = ""
        self.error = ""
        self.fatal = False

    def enter(self, state: State) -> None:
        """Be in this state, and have that told at once."""
        self.state = state
        self.entered.set()

    def progress(self) -> None:
        """Count one turn of the worker's loop."""
        self._progress += 1

    def set_queue(self, name: str, depth: int) -> None:
        self._queues[name] = depth
        self._trace.count(name, depth)

    def waiting(
        self, what: str, *, on: str, limit_s: float, waited_s: float = 0.0, detail: Callable[[], str] = str
    ) -> _BoundedWait:
        """Show what the task waits for in the `async with` block, and end the block at the limit that is shown.

        What is awaited may have the same limit of its own, and then ends with its own error. Where it does not, the block
        is cancelled some seconds after the limit and WaitTimeoutError is raised.
        waited_s: so far, of a wait that goes on. detail: how far it has come, asked for every status and shown
        behind `what`.
        """
        return _BoundedWait(_NamedWait(self, what, on, limit_s, waited_s, detail), _OWN_LIMIT_SLACK_S)

    def showing(
        self, what: str, *, on: str, limit_s: float | None = None, detail: Callable[[], str] = str
    ) -> _NamedWait:
        """Show a wait that this does not bound. limit_s: only where all that is waited for ends itself at this limit."""
        return _NamedWait(self, what, on, limit_s, 0.0, detail)

    async def bounded(
        self, awaitable: Awaitable[T], *, what: str, on: str, limit_s: float, detail: Callable[[], str] = str
    ) -> T:
        """Await something for at most limit_s, visibly. Raises WaitTimeoutError naming what and on whom."""
        start = time.monotonic()
        with self.showing(what, on=on, limit_s=limit_s, detail=detail):
            try:
                async with asyncio.timeout(limit_s):
                    return await awaitable
            except asyncio.TimeoutError:
                if time.monotonic() - start < limit_s - _CLOCK_SLACK_S:  # what was awaited has a limit of its own
                    raise
                raise WaitTimeoutError(what, on, limit_s) from None

    def snapshot(self) -> WorkerStatus:
        now = time.monotonic()
        for key, (what, on, since, limit_s, _) in self._waits.items():
            if now - since > LONG_WAIT_S and key not in self._reported:
                self._reported.add(key)
                limit = "no limit" if limit_s is None else f"limit {limit_s:g} s"
                self._logger.warning("waiting for %s from %s for %.0f s (%s)", what, on, now - since, limit)
        return WorkerStatus(
            worker=self._info.name,
            pid=os.getpid(),
            attempt=self._info.attempt,
            state=self.state,
            time=time.time(),
            progress=self._progress,
            waits=[
                Wait(what=what + detail(), on=on, since_s=now - since, limit_s=limit_s)
                for what, on, since, limit_s, detail in self._waits.values()
            ],
            queues=dict(self._queues),
            version=self.version,
            error=self.error,
            fatal=self.fatal,
        )


class _NamedWait:
    """What StatusBoard.showing gives; for one use. A class: whatever a worker awaits, it awaits in one of these, and a generator's
    context manager takes several times as long."""

    __slots__ = ("_began_us", "_board", "_key", "wait")

    def __init__(
        self,
        board: StatusBoard,
        what: str,
        on: str,
        limit_s: float | None,
        waited_s: float,
        detail: Callable[[], str],
    ) -> None:
        self._board = board
        self.wait = (what, on, time.monotonic() - waited_s, limit_s, detail)

    def __enter__(self) -> None:
        board = self._board
        self._key = board._next_wait
        board._next_wait += 1
        board._waits[self._key] = self.wait
        self._began_us = board._trace.now_us()

    def __exit__(self, *error: object) -> None:
        board = self._board
        board._trace.wait(self.wait[0], self.wait[1], self._began_us)
        del board._waits[self._key]
        board._reported.discard(self._key)


class _BoundedWait:
    """What StatusBoard.waiting gives; for one use."""

    __slots__ = ("_shown", "_slack_s", "_timeout")

    def __init__(self, shown: _NamedWait, slack_s: float) -> None:
        self._shown, self._slack_s = shown, slack_s

    async def __aenter__(self) -> None:
        _, _, since, limit_s, _ = self._shown.wait
        assert limit_s is not None
        self._timeout = asyncio.timeout(since + limit_s + self._slack_s - time.monotonic())
        await self._timeout.__aenter__()
        self._shown.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:  # this limit's: another's is the error that comes in
            what, on, _, limit_s, _ = self._shown.wait
            assert limit_s is not None
            raise WaitTimeoutError(what, on, limit_s) from None


class Worker:
    """One process of a run. Subclasses implement `run`, and `setup` and `close` where they hold something."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.name = info.name
        self.incarnation = incarnation(info.name, attempt=info.attempt, start=info.start)
        self.names = Names(info.experiment, info.trial)
        self.logger = logging.getLogger(f"asyncrl.{info.name}")
        self.trace = Tracer(trace_file(info), process=info.name, order=place_of(info)) if info.trace else OFF
        self.board = StatusBoard(info, self.logger, self.trace)
        self.stopping = asyncio.Event()
        self.resolver: NameResolver  # set before setup()
        self.lease: int | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._said_out_of_files = -math.inf

    async def setup(self) -> None:
        """Bind sockets, load models, publish addresses, meet the others. Every wait in here has a limit."""

    async def run(self) -> None:
        """The work. Returns when it is over; cancelled when the worker is told to stop."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release what setup took. Called after run, however it ended."""

    async def publish(self, key: str, value: str) -> None:
        """Put a key of this worker, replacing an older one; it goes when the worker's lease goes. Rides over outages."""
        limit_s = self.info.runtime.start_timeout_s
        async with self.board.waiting(f"publishing {key}", on="name resolve", limit_s=limit_s):
            await asyncio.to_thread(self.resolver.publish, key, value, lease=self.lease, limit_s=limit_s)

    async def wait_for_key(self, key: str, what: str) -> str:
        """Value of a key, as soon as somebody publishes it."""
        limit_s = self.info.runtime.start_timeout_s
        async with self.board.waiting(what, on=key, limit_s=limit_s):
            try:
                return await asyncio.to_thread(self.resolver.wait, key, limit_s)
            except TimeoutError as error:
                raise WaitTimeoutError(what, key, limit_s) from error

    async def watch(self, key: str, *, subtree: bool = False) -> AsyncGenerator[WatchEvent, None]:
        """Current state of a key (or subtree), then every change. Ends only by being closed."""
        events = _Changes(asyncio.get_running_loop())
        limit_s = self.info.runtime.start_timeout_s
        async with self.board.waiting(f"reading {key}", on="name resolve", limit_s=limit_s):
            watch = await asyncio.to_thread(self.resolver.watch, key, events.put, subtree=subtree, limit_s=limit_s)
        try:
            while True:
                yield await events.get()
        finally:
            await asyncio.to_thread(watch.cancel)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run something beside `run`. If it raises, the worker fails with that error."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}:{name}")
        self._background.add(task)
        task.add_done_callback(self._background_done)
        return task

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(task.exception())  # type: ignore[arg-type]
        else:
            self.logger.error("%s failed too", task.get_name(), exc_info=task.exception())

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody awaits. Connections that cannot be accepted wait, and the loop tries again every second."""
        explained = out_of_files(context.get("exception"))
        if explained is None:
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) - self._said_out_of_files > _SAY_AGAIN_S:
            self._said_out_of_files = now
            self.logger.error("%s; trying again", explained)

    async def main(self) -> None:
        """The whole life. Raises what made the worker fail."""
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        for signum in _STOP_SIGNALS:
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not on the main thread: a test
                loop.add_signal_handler(signum, self.stopping.set)
        loop.set_exception_handler(self._on_loop_error)
        self.logger.info("setting up")  # its imports are done
        reporter = _StatusReporter(self)
        await reporter.start()
        try:
            is_over = await self._live()
            self.board.enter("done" if is_over else "stopped")
        except BaseException as error:
            shown = out_of_files(error) or error
            self.board.enter("error")
            self.board.error = told(shown)[-_MAX_ERROR_CHARS:]
            self.board.fatal = is_fatal(shown)
            raise
        finally:
            await reporter.stop()
            self.trace.close()
            if hasattr(self, "resolver"):
                await asyncio.to_thread(self.resolver.close)

    async def _open_name_resolve(self) -> None:
        """A launcher has seen it answer: then an outage is waited for."""
        info = self.info
        limit_s = info.runtime.start_timeout_s if _is_launched() else info.name_resolve.timeout_s
        async with self.board.waiting("its first answer", on="name resolve", limit_s=limit_s):
            self.resolver = await asyncio.to_thread(open_name_resolver, info.name_resolve, limit_s)
            if self.lease is None:
                granted = await asyncio.to_thread(self.resolver.grant_lease, info.runtime.lease_ttl_s)
                self.lease = granted.id

    async def _live(self) -> bool:
        """setup and run until they end, a background task fails, or the worker is told to stop; then close. Whether the work
        is over."""
        assert self._failure is not None
        stop = asyncio.create_task(self.stopping.wait(), name=f"{self.name}:stop")
        life = asyncio.create_task(self._setup_and_run(), name=f"{self.name}:life")
        try:
            ends: set[asyncio.Future[Any]] = {stop, life, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self.board.enter("stopping")
            if self._failure.done():
                self._failure.result()
            if life.done():
                life.result()
            return life.done()
        finally:
            await self._shut_down({stop, life, *self._background})

    async def _setup_and_run(self) -> None:
        http_client.suffer(self.info.runtime.faults, self.name)
        await self._open_name_resolve()
        await self.setup()
        self.board.enter("running")
        self.logger.info("running")
        await self.run()

    async def _shut_down(self, tasks: set[asyncio.Task[Any]]) -> None:
        limit_s = self.info.runtime.stop_timeout_s
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            self.logger.warning("%s did not stop within %g s", task.get_name(), limit_s)
        try:
            await self.board.bounded(self.close(), what="closing", on=self.name, limit_s=limit_s)
        except Exception as error:
            self.logger.warning("closing failed: %r", error)
        if self._failure is not None and self._failure.done() and not self._failure.cancelled():
            self._failure.exception()  # retrieved: it is raised by _live


class _Changes:
    """What a watch tells on a thread of name resolve, for the event loop. Past _MAX_WATCH_EVENTS, where the loop stands still, only
    the newest change of each key is kept, as in the watch itself: nothing that is still true is lost. (With that many keys, at most
    two changes of each: sorting out costs little a change.)"""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: deque[WatchEvent] = deque()
        self._sort_out_at = _MAX_WATCH_EVENTS
        self._news = asyncio.Event()

    def put(self, event: WatchEvent) -> None:
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) > self._sort_out_at:
                self._waiting = deque({event.key: event for event in self._waiting}.values())
                self._sort_out_at = max(_MAX_WATCH_EVENTS, 2 * len(self._waiting))
            is_first = len(self._waiting) == 1
        if is_first:  # whoever takes it takes what comes meanwhile
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._news.set)

    async def get(self) -> WatchEvent:
        """The oldest one. A cancelled wait changes nothing."""
        while True:
            self._news.clear()
            with self._lock:
                if self._waiting:
                    return self._waiting.popleft()
            await self._news.wait()


class _StatusReporter:
    """Sends the board twice a second, and whenever its state changes: a run that is told to stop asks for a checkpoint of a master
    of which it knows that it runs. To the launcher's pipe, or without a launcher to name resolve under an own lease."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        fd = os.environ.get(STATUS_FD_ENV)
        self._fd = int(fd) if fd else None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        worker = self._worker
        if _is_launched():
            worker.lease = int(os.environ[LEASE_ENV])
        if self._fd is not None:
            os.set_blocking(self._fd, False)
            os.set_inheritable(self._fd, False)  # the pipe ends with this process, whatever that starts
        self._task = asyncio.create_task(self._loop(), name=f"{worker.name}:status")

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        with contextlib.suppress(Exception):  # the last word is a courtesy: the exit code says the same
            await self._send(self._worker.board.snapshot())

    async def _loop(self) -> None:
        board = self._worker.board
        while True:
            board.progress()
            self._worker.trace.flush()
            board.entered.clear()
            try:
                await self._send(board.snapshot())
            except Exception as error:
                self._worker.logger.debug("status not sent: %r", error)
            alarm = asyncio.get_running_loop().call_later(STATUS_INTERVAL_S, board.entered.set)
            await board.entered.wait()
            alarm.cancel()

    async def _send(self, status: WorkerStatus) -> None:
        line = msgspec.json.encode(status)
        if self._fd is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # nobody reads just now: the next line will do
                os.write(self._fd, line + b"\n")
            return
        if not hasattr(self._worker, "resolver"):
            return
        key = self._worker.names.status(self._worker.name)
        await asyncio.to_thread(self._worker.resolver.add, key, line.decode(), replace=True, lease=self._worker.lease)


def _is_launched() -> bool:
    """By a launcher, which keeps our lease; else we keep one of our own."""
    return bool(os.environ.get(LEASE_ENV))


def configure_logging(info: WorkerInfo) -> None:
    """Log lines of a worker: time, level, worker, message; on stderr, which the launcher sends to the worker's file."""
    logging.basicConfig(
        level=info.runtime.log_level,
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s {info.name}: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def run_worker(worker: Worker, on_error: Callable[[BaseException], None] | None = None) -> int:
    """Run a worker to its end in this process; returns its exit code. The error, if any, is logged with its traceback.

    on_error: is shown the error too, while its frames are as they were (a debugger).
    """
    loop = asyncio.new_event_loop()
    tell_tasks_of(loop)
    if _is_launched():  # under a debugger the loop stands still
        LoopWatch(worker.logger).start(loop)
    try:
        loop.run_until_complete(worker.main())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        worker.logger.exception("failed")
        if on_error is not None:
            on_error(error)
        return 1
    finally:
        _end_loop(loop, worker.info.runtime.stop_timeout_s)
    worker.logger.info("done")
    return 0


def _end_loop(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    """What asyncio.run does at its end, but for waiting for threads: one may be importing torch, or in a user's reward."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=limit_s))
    loop.run_until_complete(asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=limit_s))
    # Its handlers go with the loop. Who asks this process to stop now, having not heard yet that it is over, must not kill it: that
    # is held back, and ignored from then on, by whatever threads there are.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    loop.close()
    for signum in _STOP_SIGNALS:
        with contextlib.suppress(ValueError):  # not on the main thread: a test
            signal.signal(signum, signal.SIG_IGN)
