"""The standstill report: the launcher prints it when it is due (watchdog.py decides), and writes stacks into all logs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.launch.rundir import all_logs_dirs
from asyncrl.launch.watchdog import Watchdog
from asyncrl.protocol.messages import WorkerStatus
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.metrics import METRICS_FILE
from asyncrl.runtime.stacks import Stacks, ask_all, is_stopped

_LOOK_EVERY_S = 1.0
_STACKS_LIMIT_S = 5.0


class HangReport:
    """consumes: statuses; the growth of metrics.jsonl, in which each step has a line. produces: notices, stacks in logs.

    waits for: nothing; a thread asks the processes for their stacks, for 5 s at most.
    """

    def __init__(self, run_dir: Path, after_s: float, notice: Callable[[str], None], clock: Clock) -> None:
        self._clock = clock
        self._run_dir = run_dir
        self._notice = notice
        self._watchdog = Watchdog(after_s, self._clock.monotonic())
        self._mark: tuple[int, int] = (0, 0)  # attempt, size of the metrics
        self._moved: dict[str, tuple[tuple[int, int], float]] = {}  # (pid, progress) of each process, and since when
        self._next_look = 0.0
        self._thread: threading.Thread | None = None

    def turn(self, statuses: Sequence[WorkerStatus], attempt: int) -> None:
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        mark = (attempt, self._metrics_bytes())
        if mark != self._mark:
            self._mark = mark
            self._watchdog.stepped(now)
        counts = {status.worker: (status.pid, status.progress) for status in statuses}
        elsewhere = {status.worker for status in statuses if status.host}  # what has this number here is another's
        before = self._moved
        self._moved = {
            name: before[name] if name in before and before[name][0] == count else (count, now)
            for name, count in counts.items()
        }
        still_s = {name: now - since for name, (_, since) in self._moved.items()}
        stopped = {
            name
            for name, (pid, _) in counts.items()
            if pid and name not in elsewhere and still_s[name] > _LOOK_EVERY_S and is_stopped(pid)
        }
        told = self._watchdog.turn(now, statuses, still_s, stopped)
        if told is None:
            return
        self._notice(
            f"{told}\nStacks of all processes are in their logs; `asyncrl-launch status --stacks` shows newer ones"
        )
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=write_stacks,
                args=(self._run_dir, told.partition("\n")[0], self._clock),
                name="stacks for the logs",
                daemon=True,
            )
            self._thread.start()

    def _metrics_bytes(self) -> int:
        try:
            return (self._run_dir / METRICS_FILE).stat().st_size
        except OSError:
            return 0


def write_stacks(run_dir: Path, why: str, clock: Clock) -> None:
    """Ask all processes of the run for their stacks, and write each one's into its log."""
    for stacks in ask_all(all_logs_dirs(run_dir), _STACKS_LIMIT_S):
        log = Path(stacks.file).with_suffix(".log")
        if stacks.state == "gone" or not log.exists():
            continue
        now = clock.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d}"
        entry = f"{stamp} WARNING {stacks.name}: its stacks, because there is {why}\n{stacks_text(stacks)}\n"
        with contextlib.suppress(OSError):  # the disk is full
            fd = os.open(log, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, entry.encode(errors="replace"))
            finally:
                os.close(fd)


def stacks_text(stacks: Stacks) -> str:
    return "\n".join(part for part in (stacks.note, stacks.threads, stacks.tasks) if part)
