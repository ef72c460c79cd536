"""Processes that end with their parent, and the last log lines of a process that has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_LINES, _TAIL_BYTES = 25, 1 << 16

# Runs in the new process before the program: requests SIGKILL at the parent's death, checks whether the parent has died
# already, and executes the program. (A preexec_fn would run Python between fork and exec, which can hang if the parent
# has threads.)
_EXEC_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has died")
os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux). Call it at the start of the process, on the main thread."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call took effect
        os._exit(1)


def python_module(module: str, *arguments: str) -> list[str]:
    """Return a command that runs a module of asyncrl with this interpreter. Files in the current folder replace no modules of the
    standard library or of installed packages: `-P` keeps that folder out of sys.path, and import_object appends it for users'
    modules. Processes that users' code starts do not inherit the option.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command`. The kernel kills it when this process, or the thread that spawned the command,
    ends (Linux). The program must be given by its path.
    """
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), *command]


def tail_of(log: Path, start: int = 0, *, lines: int = _TAIL_LINES, line_chars: int | None = None) -> str:
    """Return the last lines of a log after byte `start`, each cut to line_chars characters; "(nothing)" if there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
            return "\n".join(line[:line_chars] for line in text.splitlines()[-lines:]) or "(nothing)"
    except OSError as error:
        return f"(the log cannot be read: {error})"


def return_freed_memory() -> None:
    """Return the memory that this process has freed to the system, because glibc keeps most of it. No effect without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
