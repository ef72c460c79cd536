"""Local launcher: starts the processes of a run on this machine, watches over them, and leaves nothing behind.

One thread, one loop. It holds the workers' leases in name resolve (a lease lives as long as its process), reads their
status from pipes and publishes it, notices a death by the child's exit, and ends everything by the first cause.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.config import ExperimentConfig
from asyncrl.launch.program import ProcessSpec, plan, run_directory, save_config, with_endpoints
from asyncrl.launch.rundir import RUN_DIR_ENV, RunLock, RunRecord, begin_attempt, write_record
from asyncrl.launch.worker_main import PARENT_ENV
from asyncrl.messages import WorkerStatus
from asyncrl.names import Names
from asyncrl.runtime.etcd_server import EtcdServer
from asyncrl.runtime.name_resolve import Lease, NameResolveError, NameResolver, open_name_resolver
from asyncrl.runtime.worker import LEASE_ENV, STATUS_FD_ENV

_TURN_S = 0.1
_PUBLISH_STATUS_S = 1.0
_LAST_WORDS_S = 1.0  # after the first death: how long the others may report errors of their own
_MAX_STATUS_LINE_BYTES = 1_000_000


class LaunchError(RuntimeError):
    """The run failed; the message is the first cause, with its traceback and where to look."""


@dataclass
class _Child:
    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    log: Path
    pipe: int
    lease: Lease
    status: WorkerStatus | None = None
    ended: float | None = None
    partial: bytes = b""
    last_progress: int = -1
    progress_time: float = field(default_factory=time.monotonic)
    frozen: bool = False


class LocalLauncher:
    """Runs one attempt. `on_turn` is called every turn, for whoever shows progress."""

    def __init__(self, config: ExperimentConfig, num_prompts: int, on_turn: Callable[[], None] = lambda: None) -> None:
        self.config = config
        self.run_dir = run_directory(config)
        self._num_prompts = num_prompts
        self._on_turn = on_turn
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._names = Names(config.experiment, config.trial)
        self._etcd: EtcdServer | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._resolver: NameResolver | None = None
        self._stop_signal: int | None = None
        self._next_publish = 0.0

    def run(self) -> int:
        """Start everything, wait for the master to be done, stop everything. Returns the exit code.

        0: the run is complete; 128 + N: ended by signal N. Raises LaunchError with the first cause of a failure.
        """
        lock = RunLock(self.run_dir)
        lock.acquire()
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.attempt = begin_attempt(self.run_dir)
            self._start()
            return self._watch_over()
        finally:
            self._stop_everything()
            for number, handler in previous.items():
                signal.signal(number, handler)
            lock.release()

    # -------------------------------------------------------------------------------------------------------------- start

    def _start(self) -> None:
        self._start_reaper()
        config = self._start_name_resolve()
        specs = plan(config, attempt=self.attempt, num_prompts=self._num_prompts)
        save_config(self.config, self.run_dir / "config.yaml")
        record = RunRecord(
            pid=os.getpid(),
            attempt=self.attempt,
            experiment=config.experiment,
            trial=config.trial,
            endpoints=config.name_resolve.endpoints,
            started=time.time(),
        )
        write_record(self.run_dir, record)
        self._resolver = open_name_resolver(config.name_resolve)
        self._resolver.clear_subtree(self._names.root)
        for spec in specs:
            self._spawn(spec)

    def _start_reaper(self) -> None:
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("reaper.py"))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _tell_reaper(self, verb: str, group: int) -> None:
        assert self._reaper is not None
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: parent-death signals remain
            self._reaper.stdin.write(f"{verb} {group}\n".encode())
            self._reaper.stdin.flush()

    def _start_name_resolve(self) -> ExperimentConfig:
        """A private etcd, unless the user names endpoints. Its data is of this attempt only: the attempt number never is in it."""
        if self.config.name_resolve.endpoints:
            return self.config
        data_dir = self.run_dir / "etcd"
        shutil.rmtree(data_dir, ignore_errors=True)
        self._etcd = EtcdServer(
            data_dir, self.run_dir / "logs" / f"attempt_{self.attempt}" / "etcd.log", self.config.name_resolve.binary
        )
        self._etcd.start()
        return with_endpoints(self.config, [self._etcd.endpoint])

    def _spawn(self, spec: ProcessSpec) -> None:
        assert self._resolver is not None
        config_path = self.run_dir / "configs" / f"attempt_{self.attempt}" / f"{spec.file_stem}.yaml"
        save_config(spec.config, config_path)
        log = self.run_dir / "logs" / f"attempt_{self.attempt}" / f"{spec.file_stem}.log"
        lease = self._resolver.grant_lease(self.config.runtime.lease_ttl_s)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        env = {
            **os.environ,
            **spec.env,
            STATUS_FD_ENV: str(writer),
            LEASE_ENV: str(lease.id),
            PARENT_ENV: str(os.getpid()),
            RUN_DIR_ENV: str(self.run_dir),
        }
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "asyncrl.launch.worker_main", str(config_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=[writer],
                    start_new_session=True,  # a Ctrl-C goes to the launcher alone, which stops the others in order
                )
        finally:
            os.close(writer)
        self._tell_reaper("add", process.pid)
        child = _Child(spec, process, log, reader, lease)
        self._children.append(child)
        self._selector.register(reader, selectors.EVENT_READ, child)

    # --------------------------------------------------------------------------------------------------------- watch over

    def _watch_over(self) -> int:
        """Turn until the master is done, a process fails or a signal comes."""
        while True:
            self._turn()
            if self._stop_signal is not None:
                return 128 + self._stop_signal
            ended = [child for child in self._children if child.ended is not None]
            failed = [child for child in ended if child.process.returncode != 0]
            if failed:
                raise LaunchError(self._first_cause(failed[0]))
            master = next(child for child in self._children if child.spec.kind == "master")
            if master.ended is not None:
                return 0
            early = [child for child in ended if child.spec.kind != "rollout_worker"]
            if early:
                raise LaunchError(f"{early[0].spec.name} ended before the run was over; see {early[0].log}")

    def _turn(self) -> None:
        for key, _ in self._selector.select(_TURN_S):
            self._read_status(key.data)
        now = time.monotonic()
        for child in self._children:
            if child.ended is None and child.process.poll() is not None:
                child.ended = now
                _kill_group(child.process.pid)  # grandchildren end with their parent
                self._tell_reaper("gone", child.process.pid)
                with contextlib.suppress(NameResolveError):  # it would end by itself, only later
                    child.lease.revoke()
        self._on_turn()
        if now >= self._next_publish:
            self._next_publish = now + _PUBLISH_STATUS_S
            self._note_frozen()
            self._publish_statuses()

    def _read_status(self, child: _Child) -> None:
        try:
            data = os.read(child.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(child.pipe)
            return
        *lines, child.partial = (child.partial + data).split(b"\n")
        child.partial = child.partial[-_MAX_STATUS_LINE_BYTES:]
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):  # a line that was cut short: the next one will do
                child.status = msgspec.json.decode(line, type=WorkerStatus)
        if child.status is not None and child.status.progress != child.last_progress:
            child.last_progress, child.progress_time, child.frozen = child.status.progress, time.monotonic(), False

    def _note_frozen(self) -> None:
        """That a process does not move is shown, and not acted upon: its lease lives as long as the process."""
        for child in self._children:
            if child.ended is not None:
                continue
            still_s = time.monotonic() - child.progress_time
            if still_s > self.config.runtime.frozen_after_s and not child.frozen:
                child.frozen = True
                print(f"warning: {child.spec.name} has not moved for {still_s:.0f} s; see {child.log}", file=sys.stderr)

    def _publish_statuses(self) -> None:
        assert self._resolver is not None
        for child in self._children:
            if child.status is None or child.ended is not None:
                continue
            key = self._names.status(child.spec.name)
            try:
                self._resolver.add(key, msgspec.json.encode(child.status).decode(), replace=True, lease=child.lease.id)
            except NameResolveError:
                return  # status is a courtesy: an outage must not end the run, nor hold it up once per worker

    def _first_cause(self, first: _Child) -> str:
        """Whose error came first, with its traceback. Others may have failed because of it, and may be quicker to exit."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline:
            self._turn()
        reported = [child for child in self._children if child.status is not None and child.status.error]
        if reported:
            first = min(reported, key=lambda child: child.status.time if child.status else 0.0)
        code = first.process.returncode
        if first.status is not None and first.status.error:
            what, detail = "failed", first.status.error.rstrip()
        elif code is not None and code < 0:
            reason = " (out of memory?)" if code == -signal.SIGKILL else ""
            what, detail = f"was killed by signal {signal.Signals(-code).name}{reason}", _tail(first.log)
        else:
            what, detail = f"ended with exit code {code}", _tail(first.log)
        others = sorted(
            child.spec.name
            for child in self._children
            if child is not first and child.ended is not None and child.process.returncode
        )
        also = f"\nAfterwards failed: {', '.join(others)}" if others else ""
        return f"{first.spec.name} {what}\n\n{detail}\n\nIts log: {first.log}{also}"

    # --------------------------------------------------------------------------------------------------------------- stop

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._stop_signal is not None:  # asked twice: no more patience
            for child in self._children:
                _kill_group(child.process.pid)
        self._stop_signal = number

    def _stop_everything(self) -> None:
        """Ask, then kill. Nothing of the run is alive afterwards."""
        alive = [child for child in self._children if child.process.poll() is None]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        deadline = time.monotonic() + self.config.runtime.stop_timeout_s * 0.8
        for child in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            _kill_group(child.process.pid)
            child.process.wait()
            os.close(child.pipe)
            self._tell_reaper("gone", child.process.pid)
        self._selector.close()
        if self._resolver is not None:
            with contextlib.suppress(NameResolveError):
                self._resolver.clear_subtree(self._names.root)
            self._resolver.close()
        if self._etcd is not None:
            self._etcd.stop()
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.close()
            self._reaper.wait(self.config.runtime.stop_timeout_s)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for a process that could not say what happened."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(its log cannot be read: {error})"
