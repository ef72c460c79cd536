"""Kills all remaining processes of a run when its launcher ends for any reason: the last guard against orphans.

The launcher holds the write end of a pipe. It writes `add N` when it starts a process group and `gone N` when a group has ended.
When the pipe closes, the reaper kills every remaining group. It also kills every process that has the run's marker in its
environment, such as a process that a reward function started in its own session; such processes first get a SIGTERM. Last, the
reaper removes the folder of the run's sockets.

A reaper may act late, when a new launch of the same run has begun, or when the system has given the number of a group to a process
of another program. So everything has a proof: the marker has a value of this launch alone, a group the start time of its leader,
the folder its owner file.

This file contains both ends of the pipe: `Reaper` runs in the launcher, `main` in the reaper process. The reaper has its own
session, so a Ctrl-C does not reach it. A host daemon has a reaper for the processes on its host, too.
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

# Time between SIGTERM and SIGKILL, in which the nursery processes of reward functions (rewards/judge_main.py) kill their children
_GRACE_S = 1.0
_ROUNDS = 5  # searches for processes to kill: several, because one may start another during a search
_ROUND_S = 0.02
_GONE = "-"


class Reaper:
    """The launcher's end of the pipe. It starts the reaper process and keeps its list of process groups up to date."""

    def __init__(self, marker: str, folder: str = "") -> None:
        """marker: `NAME=value` in the environment of the processes of this launch, and of no others. folder: of the run's sockets;
        removed at the end, with its contents; "": none."""
        self._arguments = (marker, folder, owner_of(folder) if folder else "")
        self._groups: dict[int, str] = {}  # by number: when its leader started
        self._process, self._pipe = self._start()

    def add(self, group: int) -> None:
        """Register a process group, whose leader is not reaped yet. The reaper kills it when this process (the launcher) ends."""
        self._groups[group] = started(group)
        self._send(f"add {group} {self._groups[group]}")

    def gone(self, group: int) -> None:
        """Unregister a process group that has ended, because the system may reuse its number."""
        self._groups.pop(group, None)
        self._send(f"gone {group} -")

    def turn(self) -> None:
        """Start a new reaper process if the present one was killed."""
        if self._process.poll() is not None:
            self._process, self._pipe = self._start()
            for group, start in self._groups.items():
                self._send(f"add {group} {start}")

    def close(self, timeout_s: float) -> None:
        """Make the reaper kill the remaining processes now, and wait for it to end."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """Start the reaper. Returns the process and the write end of its pipe."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the launcher's may be a pipe that has no reader any more
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        return process, process.stdin

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed; `turn` starts a new one
            self._pipe.write(f"{line}\n".encode())
            self._pipe.flush()


def main(marker: str, folder: str, owner: str) -> None:
    """Read until the launcher has ended. Then kill the remaining processes and remove the folder.

    marker: `NAME=value`, in the environment of every process of the launch. owner: content of the folder's owner file.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, str] = {}
    for line in sys.stdin:
        verb, group, start = line.split()
        groups.pop(int(group), None)
        if verb == "add":
            groups[int(group)] = start
    for leader, start in groups.items():
        # While members of the group are left, the system gives its number to no other process. A leader that has started later is
        # therefore the leader of another group
        if started(leader) in (start, _GONE):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
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
    if folder and owner and owner_of(folder) == owner:
        remove(folder)


def remove(folder: str) -> None:
    """Remove the folder. A process that is being killed may still create a socket in it, which lets a first try fail."""
    for _ in range(_ROUNDS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(_ROUND_S)


def started(pid: int) -> str:
    """When a process started, in clock ticks since the system's start; _GONE if there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return _GONE


def owner_of(folder: str) -> str:
    """As asyncrl.runtime.unix_sockets.owner_of; this program imports nothing of asyncrl."""
    try:
        with open(os.path.join(folder, "owner"), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def processes_with(marker: str) -> list[int]:
    """Return this user's live processes that were started with `NAME=value` in their environment (Linux; elsewhere none)."""
    wanted, found = os.fsencode(marker), []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        # OSError: the process has ended, or is another user's
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environment:
            if wanted in environment.read().split(b"\0"):
                found.append(int(entry))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
