"""Detect the phase of a live run from outside within tens of milliseconds, by its processes' CPU use and the files in its folder.

idle          the target computes nothing
generation    a generation server computes
push          trajectories are in flight: the master, whose verdict they need, is stopped for a moment
train_step    a model worker computes
weight_write  weights or a checkpoint are partly written: a folder with a temporary name exists
update        a new version of the weights has just got its final name: servers are about to load it

Statuses in etcd are up to a second old, which is too old for this. The scheduler's counters show whether a process computes. Time
spent waiting for a core counts as computing, so the result does not depend on the machine's load.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil

from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.testing.faults.processes import RunProcesses
from asyncrl.testing.faults.schedule import Phase

TEMPORARY_SUFFIX = ".writing"  # suffix of folders of weights and checkpoints that are being written

_LOOK_S = 0.02  # a process is observed for this long
_POLL_S = 0.001
_BUSY, _IDLE = 0.6, 0.1  # shares of that time
_HOLD_S = 0.5  # the master is stopped this long before the fault, so that finished groups wait for its verdict


class PhaseWatch:
    """Waits for phases of one run."""

    def __init__(self, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._processes = RunProcesses(run_dir)

    def wait(self, phase: Phase, target: psutil.Process, limit_s: float) -> bool:
        """Return True as soon as the run is in the phase; False after limit_s, or if the target has ended.

        With `push` the master is stopped (SIGSTOP) on return. Continue it with `release` after the fault.
        """
        deadline = self._clock.monotonic() + limit_s
        versions = self._versions()
        while target.is_running():
            if self._is_in(phase, target, versions):
                return True
            if self._clock.monotonic() > deadline:
                return False
            self._clock.sleep(_POLL_S)
        return False

    def release(self, phase: Phase, stopped: psutil.Process | None = None) -> None:
        """Continue the master after the fault, if the phase stopped it. stopped: the process that the fault has stopped; if
        that is the master, it stays stopped."""
        if phase == "push":
            self._signal_master(signal.SIGCONT, but_not=stopped)

    def _is_in(self, phase: Phase, target: psutil.Process, versions: set[str]) -> bool:
        if phase == "idle":
            return busy_share([target], clock=self._clock) < _IDLE
        if phase == "generation":
            return self._computes("generation_server", target)
        if phase == "train_step":
            return self._computes("model_worker", target)
        if phase == "weight_write":
            return self._writes()
        if phase == "update":
            return bool(self._versions() - versions)
        if phase == "push":
            self._signal_master(signal.SIGSTOP)
            self._clock.sleep(_HOLD_S)
        return True

    def _computes(self, kind: str, target: psutil.Process) -> bool:
        """Whether the target computes, if it is of this kind; otherwise whether any process of this kind does.

        If generation servers have engines as processes of their own, any server or engine counts.
        """
        of_kind = self._processes.of(kind)
        engines = self._processes.of("engine") if kind == "generation_server" else {}
        those = {process.pid: process for process in (of_kind | engines).values()}
        if target.pid in {process.pid for process in of_kind.values()} and not engines:
            those = {target.pid: target}
        return any(busy_share([process], clock=self._clock) > _BUSY for process in those.values())

    def _writes(self) -> bool:
        folders = [*self._run_dir.glob("weights/*"), *self._run_dir.glob("checkpoints/*")]
        for folder in folders:
            with contextlib.suppress(OSError):
                if any(entry.name.endswith(TEMPORARY_SUFFIX) for entry in folder.iterdir()):
                    return True
        return False

    def _versions(self) -> set[str]:
        return {str(path) for path in self._run_dir.glob("weights/*/a*-v*") if not path.name.endswith(TEMPORARY_SUFFIX)}

    def _signal_master(self, number: int, but_not: psutil.Process | None = None) -> None:
        for process in self._processes.of("master").values():
            if process != but_not:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)


def busy_share(processes: list[psutil.Process], look_s: float = _LOOK_S, clock: Clock = SYSTEM_CLOCK) -> float:
    """Share of a short time in which the busiest thread of these processes computed or waited for a core (Linux)."""
    before = _counted(processes)
    start = clock.monotonic()
    clock.sleep(look_s)
    after = _counted(processes)
    largest = max((after[thread] - before.get(thread, after[thread]) for thread in after), default=0)
    return largest / 1e9 / (clock.monotonic() - start)


def _counted(processes: list[psutil.Process]) -> dict[str, int]:
    """For each thread, nanoseconds spent on a core or waiting for one."""
    counted: dict[str, int] = {}
    for process in processes:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                on_core, waiting, _ = file.read_text().split()
                counted[file.parent.name] = int(on_core) + int(waiting)
    return counted
