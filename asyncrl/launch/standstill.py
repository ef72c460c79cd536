"""The standstill report, made if no train step ends for a long time: what each process waits for, from which process, and for how
long so far.

    no train step for 120 s
      master/0: waits for 3 stragglers from rollout_worker/1 (45 of 3600 s)
      rollout_worker/1: waits for the next piece from generation_server/0 (44 of 600 s) x12
      generation_server/0: has sent no heartbeat for 43 s, is stopped (SIGSTOP, or a debugger), waits for nothing
      model_worker/1: has not entered collective 58 of actor data group 0, in which model_worker/0 waits, ...

The report appears once, again after twice the time, and so on, until a step ends. Watchdog decides when, and makes the text (pure).
The launcher's StandstillReport prints it, and writes the stacks of the processes on its machine into their logs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from asyncrl.launch.rundir import all_logs_dirs
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.metrics import METRICS_FILE
from asyncrl.runtime.stacks import Stacks, ask_all, is_stopped

_LOOK_EVERY_S = 1.0
_STACKS_LIMIT_S = 5.0
# A process whose heartbeat counter has not grown for longer than this is reported as sending no heartbeat. Statuses arrive twice a
# second, and a working process increments its counter for each status
_STILL_S = 5.0
_MAX_WAITS = 4  # the report shows at most so many waits per process, the longest ones


class StandstillReport:
    """consumes: statuses; the size of metrics.jsonl, which grows by a line per step and evaluation. produces: notices, stacks in
    logs.

    waits for: nothing; a thread requests the stacks from the processes and waits at most 5 s.
    """

    def __init__(self, run_dir: Path, after_s: float, notice: Callable[[str], None], clock: Clock) -> None:
        self._clock = clock
        self._run_dir = run_dir
        self._notice = notice
        self._watchdog = Watchdog(after_s, self._clock.monotonic())
        self._mark: tuple[int, int] = (0, 0)  # attempt, size of the metrics

        # By process: (pid, heartbeat counter), and since when both are unchanged
        self._moved: dict[str, tuple[tuple[int, int], float]] = {}
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
        # Processes on other hosts; their pids mean nothing here
        elsewhere = {status.worker for status in statuses if status.host}
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
        message = self._watchdog.turn(now, statuses, still_s, stopped)
        if message is None:
            return
        self._notice(
            f"{message}\nStacks of all processes are in their logs; `asyncrl-launch status --stacks` shows newer ones"
        )
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=write_stacks,
                args=(self._run_dir, message.partition("\n")[0], self._clock),
                name="stacks for the logs",
                daemon=True,
            )
            self._thread.start()

    def _metrics_bytes(self) -> int:
        try:
            return (self._run_dir / METRICS_FILE).stat().st_size
        except OSError:
            return 0


class Watchdog:
    """consumes: statuses, steps. produces: the texts of reports."""

    def __init__(self, after_s: float, now: float) -> None:
        """after_s: time without a step until the first report; 0: never report."""
        self._after_s = after_s
        self._since = now
        self._due_s = after_s

    def stepped(self, now: float) -> None:
        """Record that a train step or an evaluation has ended, or that a new attempt has begun."""
        self._since, self._due_s = now, self._after_s

    def turn(
        self, now: float, statuses: Sequence[WorkerStatus], still_s: Mapping[str, float], stopped: Collection[str]
    ) -> str | None:
        """Return the report, if one is due. still_s: seconds since the heartbeat counter of each process grew. stopped: processes
        that a signal or a debugger has stopped."""
        if not self._after_s or now - self._since < self._due_s:
            return None
        self._due_s = 2 * (now - self._since)
        late = late_ranks(statuses)
        lines = [
            f"  {status.worker}: {_facts(status, still_s, stopped, late)}" for status in sorted(statuses, key=_order)
        ]
        return "\n".join([f"no train step for {now - self._since:.0f} s", *lines])


def late_ranks(statuses: Sequence[WorkerStatus]) -> dict[str, str]:
    """Return the model workers that have not entered a collective in which others wait, each with a text about it.

    A worker that is late in one group because it waits in another one is left out. If that leaves none, each waits for another, and
    all are returned.
    """
    groups: dict[str, dict[str, int]] = {}
    for status in statuses:
        for group, number in status.collectives.items():
            groups.setdefault(group, {})[status.worker] = number
    late: dict[str, str] = {}
    waiting: set[str] = set()
    for group, entered in groups.items():
        newest = max(entered.values())
        there = [worker for worker, number in entered.items() if number == newest]
        if len(there) == len(entered):
            continue
        waiting.update(there)
        others = f" and {len(there) - 1} others wait" if len(there) > 1 else " waits"
        for worker in entered.keys() - set(there):
            late[worker] = f"has not entered collective {newest} of {group}, in which {there[0]}{others}"
    return {worker: text for worker, text in late.items() if worker not in waiting} or late


def wait_texts(waits: Sequence[Wait]) -> list[str]:
    """Return texts such as `the next piece from generation_server/0 (44 of 600 s) x12`. Waits for the same thing from the same
    process are combined; the text shows the longest one."""
    kinds: dict[tuple[str, str], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: -wait.since_s):
        kinds.setdefault((wait.what, wait.on), []).append(wait)
    return [
        f"{what} from {on} ({_age(same[0])}){f' x{len(same)}' if len(same) > 1 else ''}"
        for (what, on), same in kinds.items()
    ]


def _age(wait: Wait) -> str:
    return f"{wait.since_s:.0f} s" if wait.limit_s is None else f"{wait.since_s:.0f} of {wait.limit_s:.0f} s"


def _order(status: WorkerStatus) -> bool:
    """Sort key: the master comes first."""
    return not status.worker.startswith("master/")


def _facts(
    status: WorkerStatus, still_s: Mapping[str, float], stopped: Collection[str], late: Mapping[str, str]
) -> str:
    facts = [f"state {status.state}"] if status.state != "running" else []
    quiet_s, is_stopped = still_s.get(status.worker, 0.0), status.worker in stopped
    if quiet_s > _STILL_S or is_stopped:
        facts.append(f"has sent no heartbeat for {quiet_s:.0f} s")
    if is_stopped:
        facts.append("is stopped (SIGSTOP, or a debugger)")
    if status.worker in late:
        facts.append(late[status.worker])
    waits = wait_texts(status.waits)
    facts += [f"waits for {text}" for text in waits[:_MAX_WAITS]] or ["waits for nothing"]
    if len(waits) > _MAX_WAITS:
        facts.append(f"and {len(waits) - _MAX_WAITS} more waits")
    return ", ".join(facts)


def write_stacks(run_dir: Path, why: str, clock: Clock) -> None:
    """Request the stacks of the run's processes on this machine, and append each process's stacks to its log."""
    for stacks in ask_all(all_logs_dirs(run_dir), _STACKS_LIMIT_S):
        log = Path(stacks.file).with_suffix(".log")
        if stacks.state == "gone" or not log.exists():
            continue
        now = clock.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d}"
        entry = f"{stamp} WARNING {stacks.name}: its stacks, because there is {why}\n{stacks_text(stacks)}\n"
        with contextlib.suppress(OSError):  # e.g. the disk is full
            fd = os.open(log, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, entry.encode(errors="replace"))
            finally:
                os.close(fd)


def stacks_text(stacks: Stacks) -> str:
    return "\n".join(part for part in (stacks.note, stacks.threads, stacks.tasks) if part)
