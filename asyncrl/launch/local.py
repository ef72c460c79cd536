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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol

from asyncrl.config import ExperimentConfig
from asyncrl.launch.children import Child, first_cause
from asyncrl.launch.left_out import LeftOut
from asyncrl.launch.name_service import NameService
from asyncrl.launch.program import plan, run_directory, save_config, server_spec, with_endpoints
from asyncrl.launch.reaper import Reaper
from asyncrl.launch.restarts import ServerRestarts
from asyncrl.launch.rundir import RUN_DIR_ENV, LaunchError, RunLock, RunRecord, begin_attempt, logs_dir, write_record
from asyncrl.launch.scaling import Scaling, make_scaling
from asyncrl.launch.starter import Starter
from asyncrl.messages import WorkerStatus
from asyncrl.runtime.devices import visible_devices
from asyncrl.runtime.disk import explain, nearly_full
from asyncrl.runtime.trace import merge, trace_dir

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
        self._left_out: list[LeftOut] = []  # processes that somebody else starts
        self._selector = selectors.DefaultSelector()
        self._reaper: Reaper | None = None
        self._name_service: NameService | None = None
        self._starter: Starter | None = None
        self._restarts: ServerRestarts | None = None
        self._scaling: Scaling | None = None  # None: the run has no servers of its own
        self._stop_signal: int | None = None
        self._impatient = False
        self._next_publish = 0.0
        self._attempt = 0

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
            except LaunchError as error:
                if hint := nearly_full(self.run_dir):
                    raise LaunchError(f"{error}\n\n{hint}") from error
                raise
            except OSError as error:  # of the launcher's own files and processes; workers report theirs
                explained = explain(Path(error.filename or self.run_dir), error)
                raise LaunchError(f"the launcher failed: {explained or error}") from error
            finally:
                self._stop_everything()
                self._merge_timelines()
                lock.release()

    def _start(self) -> None:
        attempt = self._attempt = begin_attempt(self.run_dir)
        save_config(self.config, self.run_dir / "config.yaml", redacted=True)
        self._reaper = Reaper(f"{RUN_DIR_ENV}={self.run_dir}")
        devices, runtime = visible_devices(), self.config.runtime
        planned = plan(self.config, attempt=attempt, num_prompts=self._num_prompts, devices=devices)
        self._starter = Starter(
            [spec for spec in planned if spec.name not in self.config.debug.leave_out],
            self.run_dir,
            self._selector,
            fork=runtime.fork_server,
            limit_s=runtime.start_timeout_s,
        )
        etcd_log = logs_dir(self.run_dir, attempt) / "etcd.log"
        service = NameService(self.config, self.run_dir, etcd_log, self._view.notice)
        self._name_service = service
        service.open()
        self._restarts = ServerRestarts(
            runtime.max_restarts,
            start=self._starter.start,
            grant_lease_soon=service.grant_lease_soon,
            revoke=service.revoke,
            notice=self._view.notice,
        )
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
        for spec in plan(config, attempt=attempt, num_prompts=self._num_prompts, devices=devices):
            if self._stop_signal is not None:
                return
            if spec.name in config.debug.leave_out:
                left_out = LeftOut(spec, self.run_dir, wait_s=config.debug.wait_s, notice=self._view.notice)
                service.watch_status(spec.name, left_out.observe)
                self._left_out.append(left_out)
                continue
            self._take_in(self._starter.start(spec, service.grant_lease()))
        self._starter.all_asked_for()
        self._scaling = make_scaling(
            config,
            spec_of=partial(
                server_spec, config=config, attempt=attempt, num_prompts=self._num_prompts, devices=devices
            ),
            start=self._starter.start,
            service=service,
            notice=self._view.notice,
        )

    def _take_in(self, child: Child) -> None:
        """A child that was started, or asked for."""
        self._children.append(child)
        if child.process is not None:
            self._begin(child)

    def _begin(self, child: Child) -> None:
        """It has a process now."""
        assert self._reaper is not None
        assert child.process is not None
        self._reaper.add(child.process.pid)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def _merge_timelines(self) -> None:
        """With trace=true: what the processes recorded, in one file. A failure here must not hide how the run ended."""
        folder = trace_dir(self.run_dir, self._attempt)
        if not self.config.trace or not folder.is_dir():
            return
        out = folder.with_suffix(".json")
        try:
            merge(folder, out)
        except OSError as error:
            self._view.notice(f"no timeline: {out} cannot be written: {error}")

    def _watch_over(self) -> int:
        """Turn until the master is done, a process fails or a signal comes."""
        while True:
            self._turn()
            if self._stop_signal is not None:
                return 128 + self._stop_signal
            if any(child.spec.kind == "master" and _is_done(child) for child in self._children):
                return 0
            if any(process.spec.kind == "master" and process.is_done for process in self._left_out):
                return 0
            self._scale()
            self._replace_servers()
            if any(child.failure_time is not None and not self._outlives(child) for child in self._children):
                raise LaunchError(self._first_cause())
            for child in self._children:
                if child.returncode == 0 and child.spec.kind != "rollout_worker":  # those may run out of prompts
                    raise LaunchError(f"{child.name} ended before the run was over; see {child.log}")

    def _replace_servers(self) -> None:
        """Generation servers that have ended are started again. Raises LaunchError for one that ends too often."""
        assert self._restarts is not None
        for child in [child for child in self._children if self._replaces(child)]:
            if child.returncode is not None:
                self._restarts.replace(child)
                self._forget(child)
            elif (
                child.failure_time is not None and time.time() - child.failure_time > self.config.runtime.stop_timeout_s
            ):
                child.kill()  # it has said that it failed, and does not end
        for child in self._restarts.turn():
            self._take_in(child)

    def _scale(self) -> None:
        """Generation servers join and leave, as `asyncrl-launch scale` wishes."""
        if self._scaling is None:
            return
        assert self._restarts is not None
        for name in self._restarts.names():
            if not self._scaling.wants(name):
                self._restarts.cancel(name)
        elsewhere = [*self._restarts.names(), *(process.name for process in self._left_out)]
        joined, gone = self._scaling.turn(self._children, elsewhere)
        for child in gone:
            self._forget(child)
        for child in joined:
            self._take_in(child)

    def _outlives(self, child: Child) -> bool:
        """Whether the run goes on without this child: another takes its place, or none is wanted."""
        return self._replaces(child) or (self._scaling is not None and self._scaling.outlives(child))

    def _replaces(self, child: Child) -> bool:
        """Whether another takes the place of this child."""
        assert self._restarts is not None
        leaves = self._scaling is not None and self._scaling.outlives(child)
        return self._restarts.concerns(child) and not leaves

    def _forget(self, child: Child) -> None:
        """A child that has ended, and is no matter any more."""
        self._children.remove(child)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.pipe)
        os.close(child.pipe)

    def _turn(self) -> None:
        """Take in statuses and ends, and show them. Waits for a pipe, at most _TURN_S; unblocked by statuses and deaths."""
        assert self._name_service is not None
        assert self._reaper is not None
        assert self._starter is not None
        for key, _ in self._selector.select(_TURN_S):
            child: Child | None = key.data  # None: a fork server
            if child is not None and not child.read_status():
                self._selector.unregister(child.pipe)
        for child in self._starter.turn():
            self._begin(child)
        for child in self._children:
            if child.returncode is None and child.poll():
                assert child.process is not None
                self._reaper.gone(child.process.pid)
                self._name_service.revoke(child.lease)
        self._reaper.turn()
        self._name_service.turn()
        alive = [child for child in self._children if child.returncode is None]
        for process in self._left_out:
            process.turn()
        by_hand = [process.visible_status() for process in self._left_out]
        coming = self._restarts.statuses() if self._restarts is not None else {}
        shown = {child.lease.id: self._shown(child) for child in alive}
        self._view.turn([*shown.values(), *by_hand, *coming.values()])
        if time.monotonic() >= self._next_publish:
            self._next_publish = time.monotonic() + _PUBLISH_STATUS_S
            self._note_frozen(alive)
            self._name_service.publish(shown | coming)

    def _shown(self, child: Child) -> WorkerStatus:
        status = child.visible_status(self.config.runtime.frozen_after_s)
        return self._scaling.shown(child, status) if self._scaling is not None else status

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
        return first_cause([child for child in self._children if not self._outlives(child)] or self._children)

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
        for process in self._left_out:
            process.ask_to_stop()
        for child in self._starter.close() if self._starter is not None else ():
            self._children.remove(child)
            os.close(child.pipe)
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
