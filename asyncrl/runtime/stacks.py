"""What a process is doing: Python stacks of its threads and its asyncio tasks, on request, however it hangs.

Each process answers two signals by writing into a file of its own, beside its log. SIGUSR1: the stacks of all threads, by
faulthandler, which needs neither the interpreter nor the event loop to turn. SIGUSR2: the tasks, by a handler in Python, which
runs when the main thread's interpreter turns, though the loop may not. Whoever asks (`ask`) looks first whether the process is
there, is that one, and can run: a signal that nobody handles would kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

SUFFIX = ".stacks"
_THREADS, _TASKS = signal.SIGUSR1, signal.SIGUSR2
_HEADER = "asyncrl stacks of"
_THREADS_END = "-- threads end --"
_TASKS_END = "-- tasks end --"
_MAX_FILE_BYTES = 1_000_000  # a larger file begins anew with the next request
_MAX_KINDS = 200  # of tasks, in one answer: those that wait at the same place are one kind
_MAX_FRAMES = 40
_POLL_S = 0.02
_QUIET_S = 0.1  # the threads are told in many small pieces, and without an end
_ASK_AGAIN_S = 1.0
_THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
_ENDED, _STANDS_STILL = {"", "Z", "X"}, {"T", "t"}  # states in /proc

State = Literal["answered", "busy", "stopped", "gone"]


# ------------------------------------------------------------------------------------------------------------- who is asked


def answer_requests(path: Path, name: str) -> None:
    """From now on this process answers. Call on the main thread; of a forked process, after the fork."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(_THREADS, file=fd, all_threads=True, chain=False)  # which keeps the number, not a file

    def write_tasks(_number: int, _frame: FrameType | None) -> None:
        # no logging, no locks: it may have interrupted anything
        try:
            told = "\n".join(["", *task_lines(), _TASKS_END, ""])
        except Exception as error:
            told = f"\nthe tasks cannot be told: {error!r}\n{_TASKS_END}\n"
        with contextlib.suppress(OSError):  # the disk is full
            os.write(fd, f"{_THREADS_END}{told}".encode(errors="replace"))

    signal.signal(_TASKS, write_tasks)
    # last: who finds this line may send signals
    os.write(fd, f"{_HEADER} {name}, process {os.getpid()}, started {_stat_of(os.getpid())[1]}\n".encode())


def task_lines() -> Iterator[str]:
    """The tasks of the loop that runs in this thread: how many wait where, from the outermost coroutine to the innermost."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return
    current = asyncio.current_task()
    kinds: dict[tuple[str, ...], list[str]] = {}
    for task in tasks:
        frames = tuple(_frames(task.get_coro()))
        if task is current:
            frames = (*frames, "  (it is the one that runs)")
        kinds.setdefault(frames, []).append(task.get_name())
    for frames, names in sorted(kinds.items(), key=lambda kind: sorted(kind[1]))[:_MAX_KINDS]:
        names.sort()
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"Task {names[0]}{others} (outermost call first):"
        yield from frames
    if len(kinds) > _MAX_KINDS:
        yield f"... and tasks at {len(kinds) - _MAX_KINDS} other places"


def _frames(awaited: Any) -> Iterator[str]:
    for _ in range(_MAX_FRAMES):
        frame = _attribute(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            break
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        awaited = _attribute(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    if isinstance(awaited, asyncio.Task):
        yield f"  waits for task {awaited.get_name()}"
    elif awaited is not None:
        yield f"  waits for {type(awaited).__name__}"


def _attribute(of: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(of, name, None)) is not None), None)


# ----------------------------------------------------------------------------------------------------------------- who asks


@dataclass(frozen=True)
class Stacks:
    """What a process says that it does, or why it says nothing."""

    name: str
    pid: int
    file: str
    state: State
    note: str = ""  # of one that has not answered in full: why
    threads: str = ""  # as faulthandler writes them: the innermost call first
    tasks: str = ""  # the outermost call first


def ask_all(logs: Sequence[Path], limit_s: float, *, settle: Callable[[float], None] = time.sleep) -> list[Stacks]:
    """The stacks of all processes whose files lie in these folders and that are not long gone, by name.

    Waits for: their answers, at most limit_s for all together; those that cannot answer are not waited for.
    """
    asked = [_Request(path) for folder in logs for path in sorted(folder.glob(f"*{SUFFIX}"))]
    newest: dict[str, _Request] = {}
    for request in asked:  # of those with one name the one that lives, else the newest
        if request.name and (request.name not in newest or not request.is_gone):
            newest[request.name] = request
    requests = [newest[name] for name in sorted(newest)]
    for request in requests:
        request.send()
    deadline = time.monotonic() + limit_s
    while any([request.is_open() for request in requests]) and time.monotonic() < deadline:
        settle(_POLL_S)
    return [request.result(limit_s) for request in requests]


class _Request:
    """One process that is asked, and what it has written since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name, self._pid, started = _read_header(path)
        self._begin = 0
        self._size = 0  # what is known to be written, and since when it has not grown
        self._since = 0.0
        self._sent = False
        self._tasks_asked = -math.inf
        self._stat, found = _stat_of(self._pid) if self.name else ("", 0)
        self.is_gone = found != started or self._stat in _ENDED
        self._is_stopped = self._stat in _STANDS_STILL

    def send(self) -> None:
        if self.is_gone or self._is_stopped:
            return
        with contextlib.suppress(OSError):
            size = self._path.stat().st_size
            if size > _MAX_FILE_BYTES:
                with self._path.open("rb") as file:
                    size = len(file.readline())
                os.truncate(self._path, size)
            self._begin = size
            os.kill(self._pid, _THREADS)
            self._sent = True

    def is_open(self) -> bool:
        """Whether an answer is still to come. Asks for the tasks once the threads are told: two writers would mix."""
        if not self._sent:
            return False
        self._stat, _ = _stat_of(self._pid)
        if self._stat in _ENDED | _STANDS_STILL:
            return False
        written, now = self._written(), time.monotonic()
        if len(written) != self._size:
            self._size, self._since = len(written), now
        if written and now - self._since > _QUIET_S and now - self._tasks_asked > _ASK_AGAIN_S:
            self._tasks_asked = now
            _signal_main_thread(self._pid, _TASKS)
        return self._parsed(written) is None

    def _written(self) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                return file.read(2 * _MAX_FILE_BYTES).decode(errors="replace")
        except OSError:
            return ""

    @staticmethod
    def _parsed(written: str) -> tuple[str, str] | None:
        """Threads and tasks; None: not all is there. A late answer to somebody who asked before may come first."""
        begin = _THREAD.search(written)
        threads, ended, tasks = written[begin.start() if begin else 0 :].partition(_THREADS_END)
        tasks, all_there, _ = tasks.partition(_TASKS_END)
        return (threads.strip(), tasks.strip()) if begin and ended and all_there else None

    def result(self, limit_s: float) -> Stacks:
        def stacks(state: State, note: str, threads: str = "", tasks: str = "") -> Stacks:
            return Stacks(self.name, self._pid, str(self._path), state, note, threads, tasks)

        if self.is_gone:
            return stacks("gone", "it has ended")
        if self._is_stopped:
            return stacks("stopped", _STOPPED)
        written = self._written()
        if parsed := self._parsed(written):
            return stacks("answered", "", *parsed)
        threads = written.partition(_THREADS_END)[0].strip()
        if self._stat in _STANDS_STILL:
            return stacks("stopped", _STOPPED, threads)
        if self._stat in _ENDED:
            return stacks("gone", "it has ended meanwhile", threads)
        if threads:
            inside = "its main thread is inside a call that is not Python's"
            return stacks("busy", f"its tasks were not told within {limit_s:g} s: {inside}", threads)
        where = "waits for the kernel (a disk?)" if self._stat == "D" else f"is in state {self._stat!r}"
        return stacks("busy", f"it did not answer within {limit_s:g} s; it {where}")


def _signal_main_thread(pid: int, number: int) -> None:
    """A signal to the process as a whole may reach another thread, and leave the main thread in the call that it waits in."""
    with contextlib.suppress(OSError):
        try:
            ctypes.CDLL(None).tgkill(pid, pid, int(number))
        except AttributeError:  # glibc before 2.30, and other systems
            os.kill(pid, number)


_STOPPED = "it is stopped (SIGSTOP, or a debugger) and cannot answer; SIGCONT lets it go on"


def _read_header(path: Path) -> tuple[str, int, int]:
    """Name, pid and start of the process that writes there; "" where there is none."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        line = file.readline(4096).decode(errors="replace")
        head, _, started = line.rpartition(", started ")
        head, _, pid = head.rpartition(", process ")
        if head.startswith(f"{_HEADER} ") and line.endswith("\n"):
            return head.removeprefix(f"{_HEADER} "), int(pid), int(started)
    return "", 0, -1


def _stat_of(pid: int) -> tuple[str, int]:
    """A process's state (R, S, D, T, Z, ...) and when it was started (ticks since the boot); "" where there is none (Linux)."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError:
            return "", 0
        return "?", 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return _stat_of(pid)[0] in _STANDS_STILL
