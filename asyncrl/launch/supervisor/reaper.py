"""Kills what is left of a run when its launcher ends, however that ends: the last line of defence against orphans.

The launcher holds one end of a pipe and writes `add N` for a process group it starts, `gone N` for one that has ended. When
the pipe ends, every group that is left is killed, and every process that has the run's folder in its environment: what a
reward function started, even in a session of its own. The folder of the run's sockets goes last. This file is both ends:
`Reaper` is the launcher's, `main` the process, which has a session of its own, so that a Ctrl-C does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import IO

_GRACE_S = 1.0  # for the nurseries of reward functions: each kills what it has started
_ROUNDS = 5  # of looking for processes: one may be starting another just now
_ROUND_S = 0.02


class Reaper:
    """The launcher's end."""

    def __init__(self, marker: str, folder: str = "") -> None:
        """folder: is removed at the end, with all that is in it. "": none."""
        self._arguments = (marker, folder)
        self._groups: set[int] = set()
        self._process, self._pipe = self._start()

    def add(self, group: int) -> None:
        """A process group to kill when this process ends."""
        self._groups.add(group)
        self._tell(f"add {group}")

    def gone(self, group: int) -> None:
        """The group has ended. Another process may soon have its number."""
        self._groups.discard(group)
        self._tell(f"gone {group}")

    def turn(self) -> None:
        """Start another one if it was killed."""
        if self._process.poll() is not None:
            self._process, self._pipe = self._start()
            for group in self._groups:
                self._tell(f"add {group}")

    def close(self, timeout_s: float) -> None:
        """Have it kill what is left now, and wait for that."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """The process, and the pipe that it reads."""
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        return process, process.stdin

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed: `turn` starts another
            self._pipe.write(f"{line}\n".encode())
            self._pipe.flush()


def main(marker: str, folder: str) -> None:
    """Read until the launcher has ended, then kill, and remove the folder. marker: `NAME=value`, as it stands in the environment of
    the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        verb, group = line.split()
        (groups.add if verb == "add" else groups.discard)(int(group))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE_S
    for pid in processes_with(marker):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(_ROUND_S)
    for _ in range(_ROUNDS):
        marked = processes_with(marker)
        if not marked:
            break
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def processes_with(marker: str) -> list[int]:
    """Live processes of this user that were started with `NAME=value` in their environment (Linux; elsewhere none)."""
    wanted, found = os.fsencode(marker), []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environment:  # gone, or not ours
            if wanted in environment.read().split(b"\0"):
                found.append(int(entry))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
