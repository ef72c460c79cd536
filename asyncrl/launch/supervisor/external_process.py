"""Processes of a run that the user, not the launcher, starts (debug.leave_out), in another terminal and usually under a debugger.

Such a process keeps its own lease and publishes its status in name resolve, where the launcher watches it. The launcher waits for
each one by name, with a limit. If such a process ends without an error, the launcher reports it. This is not a failure, because the
user may start the process again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from asyncrl.launch.program import ProcessSpec, save_config
from asyncrl.launch.rundir import LaunchError, configs_dir
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock, wait_until
from asyncrl.runtime.names.interface import WatchEvent
from asyncrl.runtime.process import python_module

_LOOK_EVERY_S = 0.05
_MAX_NEWS = 1000  # unread statuses, enough for minutes; if there are more, the oldest are dropped


class ExternalProcess:
    """The launcher's record of one process that the user starts. A thread of name resolve calls `observe`; the launcher's thread
    calls the rest."""

    def __init__(
        self,
        spec: ProcessSpec,
        run_dir: Path,
        *,
        wait_s: float,
        notice: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Writes the process's config and notifies the user of the command that starts it."""
        self.spec = spec
        self.config_path = configs_dir(run_dir, spec.config.worker.attempt) / f"{spec.file_stem}.yaml"
        save_config(spec.config, self.config_path)
        self.command = debug_command(spec, self.config_path)
        self._wait_s = wait_s
        self._notice = notice
        self._clock = clock
        self._news: deque[WorkerStatus | None] = deque(maxlen=_MAX_NEWS)  # None: the process is gone
        self._status: WorkerStatus | None = None
        self._ending: psutil.Process | None = None
        self._since = self._clock.monotonic()  # when the launcher began to wait for its (next) start
        notice(f"{self.name} is left to you: in another terminal, start it within {wait_s:g} s with\n{self.command}")

    @property
    def name(self) -> str:
        return self.spec.name

    def renew(self, spec: ProcessSpec) -> None:
        """Overwrite its config with that of the newest attempt, so that the same command starts it again."""
        self.spec = spec
        save_config(spec.config, self.config_path)

    def observe(self, event: WatchEvent) -> None:
        """Record that its status in name resolve has changed, or was deleted with its lease."""
        with contextlib.suppress(*DECODE_ERRORS):
            self._news.append(msgspec.json.decode(event.value, type=WorkerStatus) if event.kind == "put" else None)

    def turn(self) -> None:
        """Process all observed statuses; a process may start and end between two turns. Raises LaunchError if it failed, or was
        not started in time."""
        for _ in range(len(self._news)):
            self._apply(self._news.popleft())
        if self._status is None and self._clock.monotonic() - self._since > self._wait_s and not self.is_done:
            raise LaunchError(
                f"{self.name} was not started within {self._wait_s:g} s (debug.wait_s). Start it with\n{self.command}"
            )

    def _apply(self, status: WorkerStatus | None) -> None:
        before, self._status = self._status, status
        if status is not None and before is None:
            self._notice(f"{self.name} has started (process {status.pid})")
        if status is not None and status.error:
            raise LaunchError(f"{self.name}, which you started, failed\n\n{status.error.rstrip()}")
        if status is None and before is not None:
            self._since = self._clock.monotonic()
            if before.state != "done":
                self._notice(f"{self.name} has ended; the run waits for it to be started again")

    @property
    def is_done(self) -> bool:
        return self._status is not None and self._status.state == "done"

    def visible_status(self) -> WorkerStatus:
        if self._status is not None:
            return self._status
        waited_s = self._clock.monotonic() - self._since
        by_hand = Wait(what="being started by hand", on="you", since_s=waited_s, limit_s=self._wait_s)
        attempt = self.spec.config.worker.attempt
        return WorkerStatus(
            worker=self.name,
            pid=0,
            attempt=attempt,
            state="starting",
            time=self._clock.time(),
            progress=0,
            waits=[by_hand],
        )

    def ask_to_stop(self) -> None:
        """Send SIGTERM because the run is over. The process is not killed, because its user may be in a debugger."""
        status = self._status
        # If the process has failed, leave it alone, because the user may be inspecting it with pdb
        if status is None or status.state == "error":
            return
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is on another machine
            process = psutil.Process(status.pid)
            if str(self.config_path) in process.cmdline():
                self._ending = process
                if status.state not in ("done", "stopped"):
                    os.kill(status.pid, signal.SIGTERM)

    @property
    def is_gone(self) -> bool:
        """Whether the launcher need not wait for the process: it has ended, or `ask_to_stop` left it alone (it was not started, has
        failed, or is on another machine). Valid after `ask_to_stop`."""
        try:
            return self._ending is None or self._ending.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


class ExternalProcesses:
    """All external processes of a run."""

    def __init__(
        self, run_dir: Path, *, wait_s: float, notice: Callable[[str], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """wait_s: how long to wait for the start of each one (debug.wait_s)."""
        self._run_dir, self._wait_s, self._notice, self._clock = run_dir, wait_s, notice, clock
        self._processes: list[ExternalProcess] = []

    @property
    def names(self) -> list[str]:
        return [process.name for process in self._processes]

    @property
    def master_is_done(self) -> bool:
        return any(process.spec.kind == "master" and process.is_done for process in self._processes)

    def expect(self, spec: ProcessSpec) -> ExternalProcess:
        """Register a process and notify the user to start it. The caller must pass the changes of its status to `observe`."""
        process = ExternalProcess(spec, self._run_dir, wait_s=self._wait_s, notice=self._notice, clock=self._clock)
        self._processes.append(process)
        return process

    def turn(self) -> None:
        """Process all observed statuses. Raises LaunchError if a process failed, or was not started in time."""
        for process in self._processes:
            process.turn()

    def renew(self, specs: Mapping[str, ProcessSpec]) -> None:
        """Overwrite the processes' configs with those of the newest attempt. specs: by name."""
        for process in self._processes:
            process.renew(specs[process.name])

    def visible_statuses(self) -> list[WorkerStatus]:
        return [process.visible_status() for process in self._processes]

    def ask_to_stop(self) -> None:
        """Ask all processes to stop, because the run is over."""
        for process in self._processes:
            process.ask_to_stop()

    def wait_until_gone(self, limit_s: float, impatient: Callable[[], bool]) -> None:
        """Wait until these processes have ended. Called before name resolve closes, because a live process would restore its
        deleted keys.

        Waits for: the end of every process. Unblocked by: their ends, the limit, impatient() (a request to stop at once).
        """
        left: list[str] = []

        def is_over() -> bool:
            left[:] = [process.name for process in self._processes if not process.is_gone]
            return not left or impatient()

        wait_until(is_over, limit_s=limit_s, every_s=_LOOK_EVERY_S, clock=self._clock)
        if left:
            self._notice(
                f"still running: {', '.join(left)}. You started them (debug.leave_out), so the launcher does not kill them and no "
                "longer waits; end them yourself"
            )


def debug_command(spec: ProcessSpec, config_path: Path) -> str:
    """Return the shell command that starts a process as the launcher would: same folder, same environment, same Python."""
    env = [f"{key}={shlex.quote(value)}" for key, value in sorted(spec.env.items())]
    program = python_module("asyncrl.cli.main", "debug", str(config_path), "--pdb")
    return f"cd {shlex.quote(os.getcwd())} && env {' '.join(env)} {shlex.join(program)}"
