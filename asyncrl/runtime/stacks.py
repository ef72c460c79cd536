"""Reports on request the Python stacks of a process's threads and its asyncio tasks.

One thread of each process waits for SIGUSR1 with sigwait. For each signal it appends one answer to a file beside the
process's log. It reads the other threads' frames while it holds the GIL. If another thread keeps the GIL (a long
regular expression, C code), the process therefore does not answer; `py-spy dump` can read it from outside. Two
alternatives crash a process with busy threads: faulthandler's signal handler, which reads frames without the GIL, and
sys._current_frames (Python 3.11.7).

The signal is blocked in this thread only and sent to this thread only, so no child process inherits a blocked signal.
`ask_all` first checks that the process exists, is the one that wrote the file, and can run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

SUFFIX = ".stacks"
_REQUEST = signal.SIGUSR1
_HEADER = "asyncrl stacks of"
_BEGIN, _TASKS, _END = "-- threads --\n", "-- tasks --\n", "-- end --\n"
_MAX_FILE_BYTES = 1_000_000  # a larger file is truncated at the next request
_MAX_KINDS = 200  # most kinds of tasks in one answer; tasks that wait at the same place are one kind
_MAX_FRAMES = 40  # of a task
_POLL_S = 0.005
_ENDED, _STANDS_STILL = {"", "Z", "X"}, {"T", "t"}  # states in /proc

State = Literal["answered", "busy", "stopped", "gone"]

_loop: asyncio.AbstractEventLoop | None = None  # of the main thread


# ---------------------------------------------------------------------------------------------------- the process asked


def answer_requests(path: Path, name: str) -> None:
    """Make this process answer requests from now on. Call it on the main thread; in a forked process, after the fork."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    thread = threading.Thread(target=_answer, args=(fd,), name="stacks", daemon=True)

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        # The signal was sent to the whole process: by a person, or because this system has no tgkill.
        if thread.is_alive():  # in a child of os.fork the thread does not exist
            signal.pthread_kill(thread.ident, _REQUEST)  # type: ignore[arg-type]

    signal.signal(_REQUEST, pass_on)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {_REQUEST})  # a thread begins with its starter's mask
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # A process that reads this line may send signals. It is written here, so that the file of a process that ends at once has it.
    process = f"process {os.getpid()}, thread {thread.native_id}, started {_stat_of(os.getpid())[1]}"
    _write(fd, f"{_HEADER} {name}, {process}\n")


def tell_tasks_of(loop: asyncio.AbstractEventLoop) -> None:
    """Include the tasks of this loop, which runs on the main thread, in all further answers."""
    global _loop
    _loop = loop


def _write(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the disk is full
        os.write(fd, text.encode(errors="replace"))


def _answer(fd: int) -> None:
    """waits for: the next request. unblocked by: a signal to this thread."""
    while True:
        signal.sigwait({_REQUEST})
        parts = []
        for mark, read in ((_BEGIN, thread_stacks), (_TASKS, task_lines)):
            try:
                parts += [mark, *(f"{line}\n" for line in read())]
            except Exception as error:  # the thread must survive to answer the next request
                parts += [mark, f"cannot be read: {error!r}\n"]
        _write(fd, "".join([*parts, _END]))


def thread_stacks() -> list[str]:
    """The stacks of all threads but the calling one, the innermost call of each first."""
    with open(os.memfd_create("stacks"), "r+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace").split("\n\n")
    return [stack.strip() for stack in stacks if not stack.startswith("Current thread ")]


def stack_of(thread: int) -> str:
    """Return the stack of another thread, given its `ident`; "" if faulthandler does not list it."""
    return next((stack for stack in thread_stacks() if stack.startswith(f"Thread 0x{thread:016x} ")), "")


def task_lines() -> Iterator[str]:
    """Yield the tasks of the main thread's loop, grouped by the place where they wait, from the outermost coroutine to
    the innermost.
    """
    if _loop is None:
        return
    tasks, current = asyncio.all_tasks(_loop), asyncio.current_task(_loop)
    kinds: dict[tuple[str, ...], list[str]] = {}
    for task in tasks:
        frames = tuple(_frames(task.get_coro()))
        if task is current:
            frames = (*frames, "  (this task is running)")
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
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        awaited = _attribute(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    if isinstance(awaited, asyncio.Task):
        yield f"  waits for task {awaited.get_name()}"
    elif awaited is not None:
        yield f"  waits for {type(awaited).__name__}"


def _attribute(of: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(of, name, None)) is not None), None)


# --------------------------------------------------------------------------------------------------- the asking process


@dataclass(frozen=True)
class Stacks:
    """A process's answer, or the reason why it did not answer."""

    name: str
    pid: int
    file: str
    state: State
    note: str = ""  # the reason why it did not answer
    threads: str = ""  # the innermost call first
    tasks: str = ""  # the outermost call first


def ask_all(logs: Sequence[Path], limit_s: float) -> list[Stacks]:
    """Return the stacks of all processes with a file in these folders, sorted by name. Of several processes with one
    name, only one is included: the live one, if there is one, otherwise that of the last folder.

    Waits for: the answers, at most limit_s for all together. Processes that cannot answer are not waited for.
    """
    asked = [_Request(path) for folder in logs for path in sorted(folder.glob(f"*{SUFFIX}"))]
    newest: dict[str, _Request] = {}
    for request in asked:  # among processes with one name, take the live one, otherwise the last
        there = newest.get(request.name)
        if request.name and (there is None or there.is_gone or not request.is_gone):
            newest[request.name] = request
    requests = [newest[name] for name in sorted(newest)]
    for request in requests:
        request.send()
    deadline = time.monotonic() + limit_s
    while any([request.is_open() for request in requests]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [request.result(limit_s) for request in requests]


class _Request:
    """A request to one process, and its answer so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name, self._pid, self._thread, started = _read_header(path)
        self._begin = 0
        self._sent = False
        self._stat, found = _stat_of(self._pid) if self.name else ("", 0)
        self.is_gone = found != started or self._stat in _ENDED

    def send(self) -> None:
        if self.is_gone or self._stat in _STANDS_STILL:
            return
        with contextlib.suppress(OSError):
            size = self._path.stat().st_size
            if size > _MAX_FILE_BYTES:
                with self._path.open("rb") as file:
                    size = len(file.readline())
                os.truncate(self._path, size)
            self._begin = size
            _signal_thread(self._pid, self._thread)
            self._sent = True

    def is_open(self) -> bool:
        """Return whether an answer may still come."""
        if not self._sent:
            return False
        self._stat, _ = _stat_of(self._pid)
        return self._stat not in _ENDED | _STANDS_STILL and self._answer() is None

    def _answer(self) -> tuple[str, str] | None:
        """Return threads and tasks; None if the answer is not complete yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                written = file.read().decode(errors="replace")
        except OSError:
            return None
        threads, _, rest = written.partition(_BEGIN)[2].partition(_TASKS)
        tasks, all_there, _ = rest.partition(_END)
        return (threads.strip(), tasks.strip()) if all_there else None

    def result(self, limit_s: float) -> Stacks:
        state: State = "busy"
        if self._sent and (answer := self._answer()):
            return Stacks(self.name, self._pid, str(self._path), "answered", "", *answer)
        if self.is_gone:
            state, note = "gone", "it has ended"
        elif self._stat in _STANDS_STILL:
            state, note = "stopped", _STOPPED
        elif self._stat in _ENDED:
            state, note = "gone", "it has ended meanwhile"
        else:
            note = f"it did not answer within {limit_s:g} s: {self._why_busy()}"
        return Stacks(self.name, self._pid, str(self._path), state, note)

    def _why_busy(self) -> str:
        if self._stat == "D":
            return "it waits for the kernel (a disk?)"
        return (
            "one of its threads holds the GIL (a long regular expression, C code), or the machine is busy. If py-spy is "
            f"installed, `py-spy dump --pid {self._pid}` shows the stacks"
        )


def _signal_thread(pid: int, thread: int) -> None:
    try:
        ctypes.CDLL(None).tgkill(pid, thread, int(_REQUEST))
    except AttributeError:  # no tgkill (glibc before 2.30, other systems): a handler passes the signal to the thread
        os.kill(pid, _REQUEST)


_STOPPED = "it is stopped (SIGSTOP, or a debugger) and cannot answer; SIGCONT lets it go on"


def _read_header(path: Path) -> tuple[str, int, int, int]:
    """Return name, pid, thread and start time of the process that writes this file; name "" if the file has no header."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        line = file.readline(4096).decode(errors="replace")
        head, _, started = line.rpartition(", started ")
        head, _, thread = head.rpartition(", thread ")
        head, _, pid = head.rpartition(", process ")
        if head.startswith(f"{_HEADER} ") and line.endswith("\n"):
            return head.removeprefix(f"{_HEADER} "), int(pid), int(thread), int(started)
    return "", 0, 0, -1


def _stat_of(pid: int) -> tuple[str, int]:
    """Return a process's state (R, S, D, T, Z, ...) and start time (ticks since the boot); ("", 0) if it does not exist.

    Elsewhere than on Linux, a live process has the state "?" and the start time 0.
    """
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError:
            return "", 0
        return "?", 0
    try:
        fields = _stat_fields(pid)
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def _stat_fields(pid: int) -> list[bytes]:
    """Return the third (the state) and all later fields of proc_pid_stat(5)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return _stat_of(pid)[0] in _STANDS_STILL


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds; 0.0 if the system does not report it."""
    try:
        fields = _stat_fields(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
