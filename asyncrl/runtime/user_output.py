"""Bounds what users' code prints into the logs of a run: the first bytes stay, the rest is dropped and counted.

`limit_streams` bounds Python's stdout and stderr of a worker: for agents, environments, rewards in threads, step functions, MFCs.
The worker's own log lines have the stream from before. `Pump` bounds what other processes write to a pipe, for judges (rewards/).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import TextIO

MAX_BYTES = 20_000_000  # of each stream of a process, and of the judges of a reward function in a worker
_READ_BYTES = 1 << 16
_FIRST_TOLD_BYTES = 1_000_000  # then each time that the dropped bytes have doubled


class Budget:
    """Decides which bytes are written (pure)."""

    def __init__(self, max_bytes: int, what: str) -> None:
        """what: prints the bytes, for the notice."""
        self._max_bytes, self._what = max_bytes, what
        self._left = max_bytes
        self.dropped = 0
        self._tell_at = 1

    def take(self, count: int) -> int:
        """Return how many of the next bytes are to be written."""
        taken = min(count, self._left)
        self._left -= taken
        self.dropped += count - taken
        return taken

    def notice(self) -> str:
        """Return a line that tells how much was dropped; "": there is nothing new to tell."""
        if self.dropped < self._tell_at:
            return ""
        self._tell_at = max(2 * self.dropped, _FIRST_TOLD_BYTES)
        return (
            f"\n({self._what} has printed more than {self._max_bytes // 1_000_000} MB: {self.dropped} further bytes are not in "
            "this log so far)\n"
        )


class LimitedStream(io.TextIOBase):
    """A text stream that passes on only as much as its budget allows."""

    def __init__(self, stream: TextIO, budget: Budget) -> None:
        self._stream, self._budget = stream, budget
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            taken = self._budget.take(len(text))
            self._stream.write(text[:taken] + self._budget.notice())
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def limit_streams(what: str, max_bytes: int = MAX_BYTES) -> None:
    """Bound what this process prints from now on. Loggers that were configured before keep the unbounded stream."""
    sys.stdout = LimitedStream(sys.stdout, Budget(max_bytes, what))
    sys.stderr = LimitedStream(sys.stderr, Budget(max_bytes, what))


class Pump:
    """A pipe whose content goes to a descriptor, within a budget.

    consumes: what processes write to `writer`. produces: its first bytes. waits for: these processes, on its own thread; never for
    long for the descriptor, which is a log. unblocked by: the end of all of them.
    """

    def __init__(self, to: int, what: str, max_bytes: int = MAX_BYTES) -> None:
        self._to, self.budget = os.dup(to), Budget(max_bytes, what)
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"output of {what}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close this process's copy of the pipe's end, when the processes have theirs."""
        os.close(self.writer)

    def join(self, limit_s: float) -> None:
        """Wait until everything is passed on, after the processes have ended."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._reader, _READ_BYTES):
                data = data[: self.budget.take(len(data))] + self.budget.notice().encode()
                with contextlib.suppress(OSError):  # the log's disk is full
                    while data:
                        data = data[os.write(self._to, data) :]
        os.close(self._reader)
        os.close(self._to)
