"""The launcher's record of a child process: its status pipe, its end, and which of several children failed first.

A child either has its own interpreter or is forked by a fork server. In the second case the record exists before the process does.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from asyncrl.launch.program import ProcessSpec, save_config
from asyncrl.launch.rundir import configs_dir, logs_dir
from asyncrl.launch.supervisor.fork_server import ForkServer
from asyncrl.launch.supervisor.oom import OomCounters
from asyncrl.launch.worker_main import PARENT_ENV
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.disk import write_when_there_is_room
from asyncrl.runtime.names.interface import Lease
from asyncrl.runtime.process import python_module, tail_of
from asyncrl.runtime.stacks import cpu_s
from asyncrl.runtime.system import LEASE_ENV, STATUS_FD_ENV

_READ_BYTES = 1 << 16
_MAX_STATUS_LINE_BYTES = 1_000_000

# Longest wait for the end of killed processes. A process blocked inside the kernel (a hanging disk) ends only when its system call
# returns
KILL_LIMIT_S = 60.0

# A killed process counts as failed this long before the launcher noticed that it had ended. Its peers notice that a moment earlier
# than the launcher and report errors at once, but the killed process must count as the first failure
_NOTICED_LATE_S = 0.5
# Matches an error that a process received as the reply to a call and only passes on. Group 1: the process that sent the reply
_PASSED_ON = re.compile(r"\bRemoteCallError: (\S+): ")
_oom = OomCounters()  # made now, because later counts are compared with those at this process's start
_KILLED_BY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class Process(Protocol):
    """subprocess.Popen, or a process that a fork server has forked."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Return the exit code, or minus the number of the signal that killed the process."""


@dataclass(eq=False)
class Child:
    """A process in its own process group, or one that was requested from a fork server and is not forked yet."""

    spec: ProcessSpec
    process: Process | None  # None: not forked yet
    log: Path
    pipe: int
    lease: Lease
    status: WorkerStatus | None = None
    returncode: int | None = None  # None: it has not ended
    ended: float = 0.0  # unix seconds
    started: float = field(default_factory=SYSTEM_CLOCK.time)  # unix seconds
    was_running: bool = False  # it has completed its start
    froze_s: float = 0.0  # seconds without a heartbeat when it was killed for that; 0: it was not killed for it
    restarts: int = 0  # restarts so far, including this start if it is a restart; 0: its first start
    host: str = ""  # its host, if the run has several
    lost: str = ""  # a text that says how it was lost with its host; "": it was not lost
    clock: Clock = SYSTEM_CLOCK
    _partial: bytes = b""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def could_run(self) -> bool:
        """Whether a start of this process can succeed, as far as is known: it has completed its start, or its host was lost, which
        says nothing against the process."""
        return self.was_running or bool(self.lost)

    def read_status(self) -> bool:
        """Read the status lines that have arrived. Returns False once the pipe is closed, else True."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-_MAX_STATUS_LINE_BYTES:]
        for line in lines:
            with contextlib.suppress(*DECODE_ERRORS):  # skip a truncated line; the next status replaces it
                self.status = msgspec.json.decode(line, type=WorkerStatus)
                self.was_running = self.was_running or self.status.state == "running"
        return bool(data)

    def poll(self) -> bool:
        """Whether the process has ended. When this is first seen, kill its whole process group, so that its own children end,
        too."""
        if self.returncode is not None:
            return True
        if self.process is None:
            return False
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.kill()  # before the wait below frees the pid, which the system may then reuse
        self.returncode, self.ended = self.process.wait(), self.clock.time()
        # Bounded, because a child of the process may hold the pipe open
        for _ in range(_MAX_STATUS_LINE_BYTES // _READ_BYTES):
            if not self.read_status():
                break
        return True

    def ask_to_stop(self) -> None:
        if self.process is not None and self.returncode is None:
            os.kill(self.process.pid, signal.SIGTERM)  # Popen.terminate would reap an ended process, which poll must do

    def kill(self, *, froze_s: float = 0.0) -> None:
        """Send SIGKILL to its process group. froze_s: the seconds without a heartbeat, if that is why."""
        self.froze_s = self.froze_s or froze_s
        if self.process is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def failure_time(self) -> float | None:
        """Unix time of its failure, comparable between children. None if it has not failed."""
        if self.status is not None and self.status.error:
            return self.status.time
        if self.returncode:
            return self.ended - (_NOTICED_LATE_S if self.was_killed else 0.0)
        return None

    @property
    def in_trouble(self) -> bool:
        """Whether it failed, or ended before its work was done."""
        if self.status is not None and self.status.error:
            return True
        return self.returncode is not None and not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether it has reported that its work is done. The run then does not wait for its exit."""
        if self.status is not None and self.status.state == "done":
            return True
        # If a master's last status was lost, exit code 0 means that it is done: before the run is complete, a master exits with 0
        # only if it was told to stop
        state = self.status.state if self.status is not None else ""
        return self.spec.kind == "master" and self.returncode == 0 and state != "stopped"

    @property
    def is_fatal(self) -> bool:
        """Whether it reported an error that would recur in a restarted process."""
        return self.status is not None and bool(self.status.error) and self.status.fatal

    @property
    def recurs_as(self) -> str:
        """Name of the failure that it reported, if a restart is likely to repeat it (WorkerStatus.recurs_as)."""
        return self.status.recurs_as if self.status is not None and self.status.error else ""

    @property
    def was_killed(self) -> bool:
        """Whether it ended by a signal such as SIGKILL or SIGSEGV, so its end is not a consequence of another process's error."""
        return self.returncode is not None and -self.returncode in _KILLED_BY

    @property
    def was_struck(self) -> bool:
        """Whether the kernel or a person killed it: it ended by SIGKILL, not because it froze, and had reported no error."""
        has_failed = self.status is not None and bool(self.status.error)
        return self.returncode == -signal.SIGKILL and not self.froze_s and not has_failed

    @property
    def passes_on_error_of(self) -> str:
        """Name of the process whose error this one received as a reply and reported; "" if its error is its own, or it has none."""
        passed_on = _PASSED_ON.search(self.status.error) if self.status is not None else None
        return passed_on[1] if passed_on else ""

    def progress_count(self) -> int | None:
        """Return the heartbeat counter, which grows unless the process stands still. None before its first status."""
        return self.status.progress if self.status is not None else None

    def cpu_s(self) -> float:
        """Return the CPU time that it has used, in seconds; 0.0 where it is not known."""
        return cpu_s(self.process.pid) if self.process is not None else 0.0

    def tail(self) -> str:
        """Return the end of its log."""
        return tail_of(self.log)

    def how_it_ended(self) -> str:
        """Describe the end of a process that reported no error."""
        assert self.returncode is not None
        return how_it_ended(self.returncode, self.log, clock=self.clock)

    def visible_status(self, import_limit_s: float | None) -> WorkerStatus:
        """Return the newest status; before the first one, a status made from what the launcher knows. import_limit_s: limit of
        the imports; None: no limit."""
        if self.status is not None:
            ours = {"restarts": self.restarts, "host": self.host}
            return msgspec.structs.replace(self.status, **ours) if any(ours.values()) else self.status
        importing = Wait(
            what="its imports", on=self.name, since_s=self.clock.time() - self.started, limit_s=import_limit_s
        )
        return WorkerStatus(
            worker=self.name,
            pid=self.process.pid if self.process is not None else 0,
            attempt=self.spec.config.worker.attempt,
            state="starting",
            time=self.started,
            progress=0,
            waits=[importing],
            restarts=self.restarts,
            host=self.host,
        )


def start_child(
    spec: ProcessSpec,
    run_dir: Path,
    lease: Lease,
    run_env: Mapping[str, str],
    fork_server: ForkServer | None = None,
    clock: Clock = SYSTEM_CLOCK,
    *,
    restarts: int = 0,
) -> Child:
    """Write the process's config and start the process, with its output in its own log. run_env: variables that all processes have.

    With a fork server the child has no process yet. ForkServer.forked supplies it, or start_process if the fork server has ended or
    hangs.
    """
    save_config(spec.config, config_file(spec, run_dir))
    log = logs_dir(run_dir, spec.config.worker.attempt) / f"{spec.file_stem}.log"
    child = Child(spec, None, log, -1, lease, started=clock.time(), restarts=restarts, clock=clock)
    start_process(child, run_dir, run_env, fork_server)
    return child


def start_process(child: Child, run_dir: Path, run_env: Mapping[str, str], fork_server: ForkServer | None) -> None:
    """Start the process of a child that has none, or request it from the fork server."""
    spec, config = child.spec, config_file(child.spec, run_dir)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    env = {**spec.env, LEASE_ENV: str(child.lease.id), PARENT_ENV: str(os.getpid()), **run_env}
    try:
        with write_when_there_is_room(child.log, partial(child.log.open, "ab")) as output:
            if fork_server is not None:
                fork_server.ask(config, env, log=output.fileno(), status=writer)
            else:
                child.process = subprocess.Popen(
                    python_module("asyncrl.launch.worker_main", str(config)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env, STATUS_FD_ENV: str(writer)},
                    pass_fds=[writer],
                    start_new_session=True,  # Ctrl-C reaches only the launcher, which stops the processes in order
                )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    child.pipe = reader


def config_file(spec: ProcessSpec, run_dir: Path) -> Path:
    return configs_dir(run_dir, spec.config.worker.attempt) / f"{spec.file_stem}.yaml"


def first_failed(children: Sequence[Child]) -> Child:
    """Return the first child in trouble. At least one of `children` must be in trouble. If the first one only passed on the error
    of another child in trouble, return that other child."""
    failed = _in_order(children)
    by_name = {child.name: child for child in failed}
    return by_name.get(failed[0].passes_on_error_of, failed[0])


def first_cause(children: Sequence[Child]) -> str:
    """Describe the first failure: what happened, the traceback, the path of the log, and which processes failed later."""
    first = first_failed(children)
    others = [child.name for child in _in_order(children) if child is not first]
    also = f"\nFailed after it: {', '.join(others)}" if others else ""
    where = f" on {first.host}" if first.host else ""
    return f"{first.name} {_what_happened(first)}\n\nIts log{where}: {first.log}{also}"


def _in_order(children: Sequence[Child]) -> list[Child]:
    """Return the failed children, sorted by the time of failure; if none failed, those that ended before their work was done,
    sorted by the time of their end."""
    failed = [(time_, child.name, child) for child in children if (time_ := child.failure_time) is not None]
    early = [(child.ended, child.name, child) for child in children if child.in_trouble]
    return [child for _, _, child in sorted(failed or early)]


def _what_happened(child: Child) -> str:
    if child.status is not None and child.status.error:
        return f"failed\n\n{child.status.error.rstrip()}"
    if child.lost:
        return child.lost
    if child.returncode == 0 or child.froze_s:
        return f"{short_end(child)}; its log ends with\n\n{child.tail()}"
    return child.how_it_ended()


def short_end(child: Child) -> str:
    """Describe in one line how a process ended. If it reported an error, the line contains the last line of that error."""
    if child.lost:
        return child.lost
    if child.froze_s:
        return f"froze (it had sent no heartbeat for {child.froze_s:.0f} s) and was killed"
    if child.status is not None and child.status.error:
        lines = child.status.error.rstrip().splitlines()
        return f"failed: {lines[-1]}"
    return "ended before the run was over" if child.returncode == 0 else child.how_it_ended().split(";", 1)[0]


def how_it_ended(code: int, log: Path, oom: OomCounters = _oom, clock: Clock = SYSTEM_CLOCK) -> str:
    """Describe the end of a process that reported no error: exit code or signal, and the end of its log. oom: counters of its
    host."""
    if code >= 0:
        return f"ended with exit code {code}; its log ends with\n\n{tail_of(log)}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = str(-code)
    hint = f" ({_who_killed(oom, clock)})" if -code == signal.SIGKILL else ""
    return f"was killed by signal {name}{hint}; its log ends with\n\n{tail_of(log)}"


def _who_killed(oom: OomCounters, clock: Clock) -> str:
    if kills := oom.kills_lately(clock.monotonic()):
        return (
            f"by the kernel, because memory ran out: {kills}. Use fewer or smaller processes (allocation, rollout.num_workers) "
            "or smaller micro-batches, or raise the limit"
        )
    return "by a person or another process, or because memory ran out: see `dmesg`"
