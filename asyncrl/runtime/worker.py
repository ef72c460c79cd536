"""Worker base class: the life of every process except the launcher.

States: starting -> running -> stopping -> done, or stopped if it was asked to stop, or error from any state. A worker
is an asyncio program on the main thread; computation runs on one extra thread. The launcher keeps a lease alive for the
worker, so a computing worker needs no keepalive thread. The launcher also reads the worker's status from a pipe
(system.py). A worker started by hand keeps its own lease and publishes its own status.
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

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import ConfigError
from asyncrl.protocol.errors import RunEndedError, outlives_restart
from asyncrl.protocol.names import Names, incarnation
from asyncrl.runtime import http_client
from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.disk import StorageError, out_of_files
from asyncrl.runtime.loop_watch import watch_loop
from asyncrl.runtime.services import Services
from asyncrl.runtime.stacks import tell_tasks_of
from asyncrl.runtime.system import System
from asyncrl.runtime.trace import OFF, Tracer, place_of, trace_file

_SAY_AGAIN_S = 60.0
_MAX_ERROR_CHARS = 20_000  # a status line must fit into the pipe to the launcher
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def error_text(error: BaseException) -> str:
    """Format an error for the user: with its traceback, unless its text is complete without one. The log has the
    traceback in any case.
    """
    if isinstance(error, ConfigError | StorageError | RunEndedError):
        return str(error)
    return "".join(traceback.format_exception(error))


class Worker:
    """One process of a run. A subclass implements `run`."""

    def __init__(self, info: WorkerInfo, system: System | None = None) -> None:
        """system: time, ids, name resolve, transport and launcher for this worker; None: the machine's own."""
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
        self.services = Services(self.board, self.trace, self.logger, self.system.clock, self.tasks)
        self.stopping = asyncio.Event()
        self._directory: Directory | None = None  # None until name resolve has answered
        self._said_out_of_files = -math.inf

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        """The worker's whole work: open its resources, with a limit on every wait; call `began`; continue until the
        work is over.

        Stopping the worker cancels this coroutine. Resources entered into `opened` are closed afterwards, when all
        tasks of `self.tasks` have ended or stop_timeout_s is over.
        """
        raise NotImplementedError

    def began(self) -> None:
        """Report that everything is open and the worker runs."""
        self.board.enter("running")
        self.logger.info("running")

    async def main(self) -> None:
        """Run the process from start to end. Raises the error that made the worker fail."""
        loop = asyncio.get_running_loop()
        for signum in _STOP_SIGNALS:
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not the main thread, as in tests
                loop.add_signal_handler(signum, self.stopping.set)
        loop.set_exception_handler(self._on_loop_error)
        self.logger.info("setting up")  # imports are done
        reporting = asyncio.create_task(self._report_status(), name=f"{self.name}:status")
        try:
            is_over = await self._live()
            self.board.enter("done" if is_over else "stopped")
        except BaseException as error:
            shown = out_of_files(error) or error
            self.board.enter("error")
            self.board.error = error_text(shown)[-_MAX_ERROR_CHARS:]
            self.board.fatal = outlives_restart(shown)
            self.board.recurs_as = getattr(shown, "recurs_as", "")
            raise
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})
            with contextlib.suppress(Exception):  # best effort: the exit code reports the same result
                await self._show_status()
            self.trace.close()
            if self._directory is not None:
                await asyncio.to_thread(self._directory.resolver.close)

    async def _live(self) -> bool:
        """Execute `run` until it ends, a background task fails, or the worker is asked to stop. Returns True if
        `run` has ended, False if the worker was asked to stop before.
        """
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
        http_client.inject_faults(self.info.runtime.faults, self.name)
        self._directory = await self._open_directory()
        await self.run(self._directory, opened)

    async def _open_directory(self) -> Directory:
        """Open name resolve. If a launcher keeps the lease, name resolve has already answered the launcher, so wait
        through an outage (start_timeout_s).
        """
        info = self.info
        lease = self.system.launcher.lease if self.system.launcher is not None else None
        limit_s = info.name_resolve.timeout_s if lease is None else info.runtime.start_limit_s
        async with self.board.waiting("its first answer", on="name resolve", limit_s=limit_s):
            resolver = await asyncio.to_thread(self.system.open_names, info.name_resolve, limit_s)
            try:
                if lease is None:
                    lease = (await asyncio.to_thread(resolver.grant_lease, info.runtime.lease_ttl_s)).id
            except BaseException:
                await asyncio.to_thread(resolver.close)
                raise
        limit_s = info.runtime.start_limit_s
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
        """Report the status twice a second and at every change of state. Prompt reports matter: a stopping run asks a
        master for a last checkpoint only if it knows that the master is running.
        """
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
        """Send the status to the launcher; without one, publish it to name resolve under the worker's own lease."""
        if self.system.launcher is not None:
            self.system.launcher.show(self.board)
        elif (directory := self._directory) is not None:
            status = msgspec.json.encode(self.board.snapshot()).decode()
            add, key = directory.resolver.add, self.names.status(self.name)
            await asyncio.to_thread(add, key, status, replace=True, lease=directory.lease)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that no task awaits. If the process is out of file descriptors, asyncio itself tries to
        accept again every second; that is logged at most once in _SAY_AGAIN_S.
        """
        explained = out_of_files(context.get("exception"))
        if explained is None:
            loop.default_exception_handler(context)
        elif (now := self.system.clock.monotonic()) - self._said_out_of_files > _SAY_AGAIN_S:
            self._said_out_of_files = now
            self.logger.error("%s; trying again", explained)


def configure_logging(info: WorkerInfo) -> None:
    """Configure log lines (time, level, worker, message) on stderr, which the launcher redirects to the worker's log file."""
    logging.basicConfig(
        level=info.runtime.log_level,
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s {info.name}: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def run_worker(worker: Worker, on_error: Callable[[BaseException], None] | None = None) -> int:
    """Run a worker to its end in this process and return its exit code. An error is logged with its traceback.

    on_error: called with the error while its frames are intact (for a debugger).
    """
    loop = asyncio.new_event_loop()
    tell_tasks_of(loop)
    launcher = worker.system.launcher
    # Not for a worker started by hand: it may run in a debugger, which stops the loop
    if launcher is not None and launcher.lease is not None:
        watch_loop(loop, worker.logger)
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
    """Do what asyncio.run does at its end, except wait for threads: one may be importing torch or running a user's
    reward function.
    """
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=limit_s))
    loop.run_until_complete(asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=limit_s))
    # Closing the loop removes its signal handlers. A late stop signal must not kill this process, which is already
    # ending. So block the signals first, and then ignore them in all threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    loop.close()
    for signum in _STOP_SIGNALS:
        with contextlib.suppress(ValueError):  # not the main thread, as in tests
            signal.signal(signum, signal.SIG_IGN)
