"""Processes of a run that the launcher does not start (debug.leave_out): a person does, in another terminal, under a debugger.

Such a process keeps a lease of its own and publishes its status in name resolve, where the launcher watches for it. It is
waited for, by name and with a limit; that it ends without an error is news and no failure, because it may be started again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from asyncrl.launch.program import ProcessSpec, save_config
from asyncrl.launch.rundir import LaunchError, configs_dir
from asyncrl.protocol.messages import DECODE_ERRORS, Wait, WorkerStatus
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock, wait_until
from asyncrl.runtime.names.interface import WatchEvent

_LOOK_EVERY_S = 0.05
_MAX_NEWS = 1000  # statuses that the launcher has not taken in: minutes of them; past it the oldest go


class ExternalProcess:
    """One of them, as the launcher sees it. `observe` is called by a thread of name resolve, the rest by the launcher's."""

    def __init__(
        self,
        spec: ProcessSpec,
        run_dir: Path,
        *,
        wait_s: float,
        notice: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Writes its config and says how to start it."""
        self.spec = spec
        self.config_path = configs_dir(run_dir, spec.config.worker.attempt) / f"{spec.file_stem}.yaml"
        save_config(spec.config, self.config_path)
        self.command = debug_command(spec, self.config_path)
        self._wait_s = wait_s
        self._notice = notice
        self._clock = clock
        self._news: deque[WorkerStatus | None] = deque(maxlen=_MAX_NEWS)  # None: it is not there
        self._status: WorkerStatus | None = None
        self._ending: psutil.Process | None = None
        self._since = self._clock.monotonic()  # it has been missing
        notice(f"{self.name} is left to you: start it within {wait_s:g} s, in another terminal, with\n{self.command}")

    @property
    def name(self) -> str:
        return self.spec.name

    def renew(self, spec: ProcessSpec) -> None:
        """In the place of its config comes that of the newest attempt: it may be started again by the same command."""
        self.spec = spec
        save_config(spec.config, self.config_path)

    def observe(self, event: WatchEvent) -> None:
        """Its status in name resolve has changed, or is gone with its lease."""
        with contextlib.suppress(*DECODE_ERRORS):
            self._news.append(msgspec.json.decode(event.value, type=WorkerStatus) if event.kind == "put" else None)

    def turn(self) -> None:
        """Take in what was observed, all of it: a process may start and end between two turns. Raises LaunchError where it
        failed, or did not come."""
        for _ in range(len(self._news)):
            self._take_in(self._news.popleft())
        if self._status is None and self._clock.monotonic() - self._since > self._wait_s and not self.is_done:
            raise LaunchError(
                f"{self.name} was not started within {self._wait_s:g} s (debug.wait_s). Start it with\n{self.command}"
            )

    def _take_in(self, status: WorkerStatus | None) -> None:
        before, self._status = self._status, status
        if status is not None and before is None:
            self._notice(f"{self.name} has come (process {status.pid})")
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
        """The run is over. It is asked, not killed: its terminal may be in a debugger."""
        status = self._status
        if status is None or status.state == "error":  # that one may be looked at with pdb
            return
        with contextlib.suppress(psutil.Error, OSError):  # gone already, or on another machine
            process = psutil.Process(status.pid)
            if str(self.config_path) in process.cmdline():
                self._ending = process
                if status.state not in ("done", "stopped"):
                    os.kill(status.pid, signal.SIGTERM)

    @property
    def is_gone(self) -> bool:
        """After `ask_to_stop`: whether there is no process any more."""
        try:
            return self._ending is None or self._ending.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


class ExternalProcesses:
    """All of a run."""

    def __init__(
        self, run_dir: Path, *, wait_s: float, notice: Callable[[str], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """wait_s: for one to be started (debug.wait_s)."""
        self._run_dir, self._wait_s, self._notice, self._clock = run_dir, wait_s, notice, clock
        self._processes: list[ExternalProcess] = []

    @property
    def names(self) -> list[str]:
        return [process.name for process in self._processes]

    @property
    def master_is_done(self) -> bool:
        return any(process.spec.kind == "master" and process.is_done for process in self._processes)

    def expect(self, spec: ProcessSpec) -> ExternalProcess:
        """One that a person is told to start. Its `observe` is to be told of its status."""
        process = ExternalProcess(spec, self._run_dir, wait_s=self._wait_s, notice=self._notice, clock=self._clock)
        self._processes.append(process)
        return process

    def turn(self) -> None:
        """Take in what was observed. Raises LaunchError where one failed, or did not come."""
        for process in self._processes:
            process.turn()

    def renew(self, specs: Mapping[str, ProcessSpec]) -> None:
        """In the place of their configs come those of the newest attempt."""
        for process in self._processes:
            process.renew(specs[process.name])

    def visible_statuses(self) -> list[WorkerStatus]:
        return [process.visible_status() for process in self._processes]

    def ask_to_stop(self) -> None:
        """The run is over."""
        for process in self._processes:
            process.ask_to_stop()

    def wait_until_gone(self, limit_s: float, impatient: Callable[[], bool]) -> None:
        """Before their name resolve is taken away: they would find it emptied, and restore what was theirs.

        Waits for: their ends. Unblocked by: those, the limit, impatience.
        """
        left: list[str] = []

        def is_over() -> bool:
            left[:] = [process.name for process in self._processes if not process.is_gone]
            return not left or impatient()

        wait_until(is_over, limit_s=limit_s, every_s=_LOOK_EVERY_S, clock=self._clock)
        if left:
            self._notice(f"{', '.join(left)}, which you started, still runs")


def debug_command(spec: ProcessSpec, config_path: Path) -> str:
    """What to type to start a process by hand as the launcher would: same folder, same environment, same Python."""
    env = [f"{key}={shlex.quote(value)}" for key, value in sorted(spec.env.items())]
    program = [sys.executable, "-m", "asyncrl.cli.main", "debug", str(config_path), "--pdb"]
    return f"cd {shlex.quote(os.getcwd())} && env {' '.join(env)} {shlex.join(program)}"
