"""Local launcher: starts the processes of a run on this machine, watches over them, and leaves nothing behind.

One thread, one loop, which waits for nothing but its processes' pipes. It holds the workers' leases in name resolve (a lease
lives as long as its process), reads their status from pipes and publishes it, notices a death by the child's exit, and ends
everything by the first cause.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

from asyncrl.config import ExperimentConfig
from asyncrl.launch.children import Child, first_cause, start_child
from asyncrl.launch.name_service import NameService
from asyncrl.launch.preflight import visible_devices
from asyncrl.launch.program import plan, run_directory, save_config, with_endpoints
from asyncrl.launch.reaper import Reaper
from asyncrl.launch.rundir import RUN_DIR_ENV, LaunchError, RunLock, RunRecord, begin_attempt, logs_dir, write_record
from asyncrl.messages import WorkerStatus

_TURN_S = 0.1
_PUBLISH_STATUS_S = 1.0
_LAST_WORDS_S = 1.0  # after the first failure: how long the others may report errors of their own
_ASK_SHARE = 0.6  # of runtime.stop_timeout_s: how long processes may take to stop when asked; then they are killed
_SAY_AFTER_S = 2.0  # whom a stop waits for
_STOP_TURN_S = 0.02
_REAPER_LIMIT_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class View(Protocol):
    """Who shows a person what goes on."""

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        """Called every turn with the newest status of every process that has not ended."""

    def notice(self, text: str) -> None:
        """Something that a person should know at once. May be called from other threads."""


class LocalLauncher:
    """Runs one attempt."""

    def __init__(self, config: ExperimentConfig, num_prompts: int, view: View) -> None:
        self.config = config
        self.run_dir = run_directory(config)
        self._num_prompts = num_prompts
        self._view = view
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._reaper: Reaper | None = None
        self._name_service: NameService | None = None
        self._stop_signal: int | None = None
        self._impatient = False
        self._next_publish = 0.0

    def run(self) -> int:
        """Start everything, wait for the master to be done, stop everything. Returns the exit code.

        0: the run is complete; 128 + N: ended by signal N. Raises LaunchError with the first cause of a failure.
        """
        with _signals(self._on_signal):
            lock = RunLock(self.run_dir)
            lock.acquire()
            try:
                self._start()
                return self._watch_over()
            except OSError as error:  # of the launcher's own files and processes; workers report theirs
                raise LaunchError(f"the launcher failed: {error}") from error
            finally:
                self._stop_everything()
                lock.release()

    def _start(self) -> None:
        attempt = begin_attempt(self.run_dir)
        save_config(self.config, self.run_dir / "config.yaml")
        self._reaper = Reaper(f"{RUN_DIR_ENV}={self.run_dir}")
        etcd_log = logs_dir(self.run_dir, attempt) / "etcd.log"
        service = NameService(self.config, self.run_dir, etcd_log, self._view.notice)
        self._name_service = service
        service.open()
        config = with_endpoints(self.config, service.endpoints)
        record = RunRecord(
            pid=os.getpid(),
            attempt=attempt,
            experiment=config.experiment,
            trial=config.trial,
            endpoints=service.endpoints,
            started=time.time(),
        )
        write_record(self.run_dir, record)
        for spec in plan(config, attempt=attempt, num_prompts=self._num_prompts, devices=visible_devices()):
            if self._stop_signal is not None:
                return
            child = start_child(spec, self.run_dir, service.grant_lease())
            self._reaper.add(child.process.pid)
            self._children.append(child)
            self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def _watch_over(self) -> int:
        """Turn until the master is done, a process fails or a signal comes."""
        while True:
            self._turn()
            if self._stop_signal is not None:
                return 128 + self._stop_signal
            if any(child.spec.kind == "master" and _is_done(child) for child in self._children):
                return 0
            if any(child.failure_time is not None for child in self._children):
                raise LaunchError(self._first_cause())
            for child in self._children:
                if child.returncode == 0 and child.spec.kind != "rollout_worker":  # those may run out of prompts
                    raise LaunchError(f"{child.name} ended before the run was over; see {child.log}")

    def _turn(self) -> None:
        """Take in statuses and ends, and show them. Waits for a pipe, at most _TURN_S; unblocked by statuses and deaths."""
        assert self._name_service is not None
        assert self._reaper is not None
        for key, _ in self._selector.select(_TURN_S):
            child: Child = key.data
            if not child.read_status():
                self._selector.unregister(child.pipe)
        for child in self._children:
            if child.returncode is None and child.poll():
                self._reaper.gone(child.process.pid)
                self._name_service.revoke(child.lease)
        self._reaper.turn()
        self._name_service.turn()
        alive = [child for child in self._children if child.returncode is None]
        import_limit_s = self.config.runtime.frozen_after_s
        self._view.turn([child.visible_status(import_limit_s) for child in alive])
        if time.monotonic() >= self._next_publish:
            self._next_publish = time.monotonic() + _PUBLISH_STATUS_S
            self._note_frozen(alive)
            self._name_service.publish({child.lease.id: child.visible_status(import_limit_s) for child in alive})

    def _note_frozen(self, alive: Sequence[Child]) -> None:
        """That a process does not move is shown, and not acted upon: its lease lives as long as the process."""
        for child in alive:
            still_s = time.monotonic() - child.progress_time
            if still_s > self.config.runtime.frozen_after_s and not child.said_frozen:
                child.said_frozen = True
                self._view.notice(f"{child.name} has not moved for {still_s:.0f} s; see {child.log}")

    def _first_cause(self) -> str:
        """Others may fail because of the first, and be quicker to say so: listen to all for a moment."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline and self._stop_signal is None:
            self._turn()
        return first_cause(self._children)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._impatient = self._stop_signal is not None  # asked twice
        self._stop_signal = number

    def _stop_everything(self) -> None:
        """Ask, then kill. Nothing of the run is alive afterwards."""
        try:
            self._stop_children()
            if self._name_service is not None:
                self._name_service.close()
        finally:
            if self._reaper is not None:
                self._reaper.close(_REAPER_LIMIT_S)

    def _stop_children(self) -> None:
        """Rollout workers first: they have things to report to the others, who then have nothing more to do."""
        limit_s = self.config.runtime.stop_timeout_s * _ASK_SHARE
        rollout_workers = [child for child in self._children if child.spec.kind == "rollout_worker"]
        self._ask_and_wait(rollout_workers, limit_s / 3)
        self._ask_and_wait(self._children, limit_s * 2 / 3)
        while alive := [child for child in self._children if not child.poll()]:
            for child in alive:
                child.kill()
            time.sleep(_STOP_TURN_S)
        for child in self._children:
            os.close(child.pipe)
        self._selector.close()

    def _ask_and_wait(self, children: Sequence[Child], limit_s: float) -> None:
        """Waits for: their exit. Unblocked by: that, the limit, or a second signal."""
        for child in children:
            child.ask_to_stop()
        start = time.monotonic()
        said = False
        while alive := [child for child in children if not child.poll()]:
            waited_s = time.monotonic() - start
            if self._impatient or waited_s > limit_s:
                return
            if waited_s > _SAY_AFTER_S and not said:
                said = True
                names = ", ".join(child.name for child in alive)
                self._view.notice(f"waiting up to {limit_s:g} s for {names} to stop; a second Ctrl-C kills at once")
            time.sleep(_STOP_TURN_S)


def _is_done(master: Child) -> bool:
    """It says so, or it has ended well. Saying so is enough: what holds up its exit holds up nothing else."""
    return master.returncode == 0 or (master.status is not None and master.status.state == "done")


@contextlib.contextmanager
def _signals(handler: signal._HANDLER) -> Iterator[None]:
    """Handle those that ask to stop; but not a hangup that is ignored, as under nohup."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how children ended
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, old in previous.items():
        if number != signal.SIGHUP or old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
