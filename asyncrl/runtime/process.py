"""Processes that end with the process that started them, and what is known of one that has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_LINES, _TAIL_BYTES = 25, 1 << 16

# Runs before a program in its process: asks for SIGKILL at the parent's death, looks whether the parent has died already, becomes
# the program. (A preexec_fn would run Python between fork and exec, which can hang where the parent has threads.)
_EXEC_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has died")
os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux). Call on the main thread, first thing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command, its program named by a path, as one that is killed when this process ends (Linux)."""
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), *command]


def tail_of(log: Path, start: int = 0, *, lines: int = _TAIL_LINES, line_chars: int | None = None) -> str:
    """The last lines of a log, of what stands behind byte `start`; at most line_chars of each. "(nothing)" where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
            return "\n".join(line[:line_chars] for line in text.splitlines()[-lines:]) or "(nothing)"
    except OSError as error:
        return f"(the log cannot be read: {error})"
