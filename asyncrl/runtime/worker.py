"""Worker base: what every process but the launcher does from start to end.

starting -> running -> stopping -> done, or stopped if it was told to, or error from anywhere. A worker is an asyncio program on
the main thread; what computes runs on one extra thread. The launcher keeps a lease alive for the worker (so no worker that computes
needs a keepalive thread) and reads its status from a pipe (system.py). A worker started by hand keeps a lease of its own and
publishes its status itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from asyncrl.config.schema import ConfigError, WorkerInfo
from asyncrl.data.prompts import PromptError
from asyncrl.protocol.names import Names, incarnation
from asyncrl.runtime import http_client
from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.disk import StorageError, out_of_files
from asyncrl.runtime.loop_watch import LoopWatch
from asyncrl.runtime.stacks import tell_tasks_of
from asyncrl.runtime.system import System
from asyncrl.runtime.trace import OFF, Tracer, place_of, trace_file

_SAY_AGAIN_S = 60.0
_MAX_ERROR_CHARS = 20_000  # a status line must fit into the pipe to the launcher
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


class Worker:
    """One process of a run. A subclass implements `run`."""

    def __init__(self, info: WorkerInfo, system: System | None = None) -> None:
        """system: what it takes from the machine; None: the machine itself."""
        self.info = info
        self.name = info.name
        self.system = system if system is not None else System()
        unique = f"{self.system.pid}.{self.system.new_id()[:8]}"
        self.incarnation = incarnation(info.name, attempt=info.attempt, start=info.start, unique=unique)
        self.names = Names(info.experiment, info.trial)
        self.logger = logging.getLogger(f"asyncrl.{info.name}")
        self.trace = Tracer(trace_file(info), process=info.name, order=place_of(info)) if info.trace else OFF
        self.board = StatusBoard(info, self.logger, self.trace)
        self.tasks = BackgroundTasks(info.name, self.logger)
        self.stopping = asyncio.Event()
        self._directory: Directory | None = None  # None until name resolve has answered
        self._said_out_of_files = -math.inf

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        """The whole work: open what it needs, every wait with a limit; call `began`; go on until the work is over.

        It is cancelled when the worker is told to stop. What it enters into `opened` is closed after that, and after all tasks
        of `self.tasks` have ended.
        """
        raise NotImplementedError

    def began(self) -> None:
        """Everything is open: the worker runs."""
        self.board.enter("running")
        self.logger.info("running")

    async def main(self) -> None:
        """All that the process does, from start to end. Raises the error that made the worker fail."""
        loop = asyncio.get_running_loop()
        for signum in _STOP_SIGNALS:
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not on the main thread: a test
                loop.add_signal_handler(signum, self.stopping.set)
        loop.set_exception_handler(self._on_loop_error)
        self.logger.info("setting up")  # its imports are done
        reporting = asyncio.create_task(self._report_status(), name=f"{self.name}:status")
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
            reporting.cancel()
            await asyncio.wait({reporting})
            with contextlib.suppress(Exception):  # the last word is a courtesy: the exit code says the same
                await self._show_status()
            self.trace.close()
            if self._directory is not None:
                await asyncio.to_thread(self._directory.resolver.close)

    async def _live(self) -> bool:
        """`run` until it ends, a background task fails, or the worker is told to stop. Whether the work is over."""
        opened = AsyncExitStack()
        stop = asyncio.create_task(self.stopping.wait(), name=f"{self.name}:stop")
        failed = asyncio.create_task(self.tasks.failed.wait(), name=f"{self.name}:failed")
        running = asyncio.create_task(self._open_and_run(opened), name=f"{self.name}:run")
        try:
            ends: set[asyncio.Task[Any]] = {stop, failed, running}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self.board.enter("stopping")
            if self.tasks.failure is not None:
                raise self.tasks.failure
            if running.done():
                running.result()
            return running.done()
        finally:
            await self._shut_down({stop, failed, running, *self.tasks.running}, opened)

    async def _open_and_run(self, opened: AsyncExitStack) -> None:
        http_client.suffer(self.info.runtime.faults, self.name)
        self._directory = await self._open_directory()
        await self.run(self._directory, opened)

    async def _open_directory(self) -> Directory:
        """A launcher that keeps a lease has seen name resolve answer: then an outage is waited for."""
        info = self.info
        lease = self.system.launcher.lease if self.system.launcher is not None else None
        limit_s = info.name_resolve.timeout_s if lease is None else info.runtime.start_timeout_s
        async with self.board.waiting("its first answer", on="name resolve", limit_s=limit_s):
            resolver = await asyncio.to_thread(self.system.open_names, info.name_resolve, limit_s)
            try:
                if lease is None:
                    lease = (await asyncio.to_thread(resolver.grant_lease, info.runtime.lease_ttl_s)).id
            except BaseException:
                await asyncio.to_thread(resolver.close)
                raise
        limit_s = info.runtime.start_timeout_s
        return Directory(resolver, self.names, lease=lease, board=self.board, limit_s=limit_s)

    async def _shut_down(self, tasks: set[asyncio.Task[Any]], opened: AsyncExitStack) -> None:
        limit_s = self.info.runtime.stop_timeout_s
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            self.logger.warning("%s did not stop within %g s", task.get_name(), limit_s)
        try:
            await self.board.bounded(opened.aclose(), what="closing", on=self.name, limit_s=limit_s)
        except Exception as error:
            self.logger.warning("closing failed: %r", error)

    async def _report_status(self) -> None:
        """Show the board twice a second, and whenever its state changes: a run that is told to stop asks for a checkpoint of a
        master of which it knows that it runs."""
        while True:
            self.board.progress()
            self.trace.flush()
            self.board.entered.clear()
            try:
                await self._show_status()
            except Exception as error:
                self.logger.debug("status not sent: %r", error)
            alarm = asyncio.get_running_loop().call_later(self.system.status_interval_s, self.board.entered.set)
            await self.board.entered.wait()
            alarm.cancel()

    async def _show_status(self) -> None:
        """To the launcher; without one to name resolve, under the worker's own lease."""
        if self.system.launcher is not None:
            self.system.launcher.show(self.board)
        elif (directory := self._directory) is not None:
            status = msgspec.json.encode(self.board.snapshot()).decode()
            add, key = directory.resolver.add, self.names.status(self.name)
            await asyncio.to_thread(add, key, status, replace=True, lease=directory.lease)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that no task awaits. Connections that cannot be accepted wait, and the loop tries again every second."""
        explained = out_of_files(context.get("exception"))
        if explained is None:
            loop.default_exception_handler(context)
        elif (now := self.system.clock.monotonic()) - self._said_out_of_files > _SAY_AGAIN_S:
            self._said_out_of_files = now
            self.logger.error("%s; trying again", explained)


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
    launcher = worker.system.launcher
    if launcher is not None and launcher.lease is not None:  # under a debugger the loop stands still
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
