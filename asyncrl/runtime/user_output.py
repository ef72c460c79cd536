"""Bounds what users' code prints into the logs of a run: the first bytes stay, the rest is dropped and counted.

`limit_streams` bounds what a worker prints: agents, environments, rewards in threads, step functions, MFCs. Python's stdout and
stderr are streams with a budget. What is written below them, through the descriptors 1 and 2 (os.write, C libraries, processes that
were started), is measured by the growth of the log. The worker's own log lines have a descriptor of their own, and no bound. `Pump`
bounds what other processes write to a pipe, for judges (rewards/).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from asyncrl.runtime.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

MAX_BYTES = 20_000_000  # of each stream of a process, and of the judges of a reward function in a worker
_READ_BYTES = 1 << 16
_LOOK_S = 0.1  # time between two looks at the size of the log
_STANDARD = (1, 2)
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


class _Log(io.FileIO):
    """A descriptor of this process's log, for the streams whose bytes are counted here."""

    written = 0  # by all of them; they write while they hold the lock
    lock = threading.Lock()

    def write(self, data: Buffer, /) -> int:
        with _Log.lock:
            count = super().write(data) or 0
            _Log.written += count
        return count


_log: _Log | None = None  # since `limit_streams`


def limit_streams(what: str, max_bytes: int = MAX_BYTES) -> None:
    """Bound what this process prints from now on. Loggers that were configured before have no bound."""
    global _log
    before = (sys.stdout, sys.stderr)
    streams = []
    for stream in before:
        stream.flush()
        _log = _Log(os.dup(stream.fileno()), "w")
        text = io.TextIOWrapper(io.BufferedWriter(_log), stream.encoding, stream.errors, line_buffering=True)
        streams.append(text)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(text)
    sys.stdout, sys.stderr = (LimitedStream(text, Budget(max_bytes, what)) for text in streams)
    assert _log is not None
    if stat.S_ISREG(os.fstat(_log.fileno()).st_mode):
        with _Log.lock:
            start = os.fstat(_log.fileno()).st_size - _Log.written
        threading.Thread(
            target=_watch_log, args=(_log, start, what, max_bytes), name="size of the log", daemon=True
        ).start()


def _watch_log(log: _Log, start: int, what: str, max_bytes: int) -> None:
    """Close the log for what is written below Python's streams, once it exceeds max_bytes: at most what is written meanwhile is
    added. A process that was started before keeps its descriptor.

    start: the bytes of the log that were not written through `_Log`, when the count began.
    waits for: the growth of the log, at most _LOOK_S.  unblocked by: the end of the process.
    """
    while True:
        with _Log.lock:
            below = os.fstat(log.fileno()).st_size - start - _Log.written
        if below > max_bytes:
            break
        SYSTEM_CLOCK.sleep(_LOOK_S)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in _STANDARD:
        os.dup2(nowhere, standard)
    os.close(nowhere)
    log.write(
        f"\n({what} has written more than {max_bytes // 1_000_000} MB to its output below Python's streams, as C libraries and "
        "processes do that it starts: further bytes are not in this log)\n".encode()
    )


class Pump:
    """A pipe whose content goes to a descriptor, within a budget.

    consumes: what processes write to `writer`. produces: its first bytes. waits for: these processes, on its own thread; never for
    long for the descriptor, which is a log. unblocked by: the end of all of them.
    """

    def __init__(self, to: int | None, what: str, max_bytes: int = MAX_BYTES) -> None:
        """to: None: the log, which is this process's stdout."""
        if to is None:
            to = _log.fileno() if _log is not None else _STANDARD[0]
        self._to, self.budget = _Log(os.dup(to), "w"), Budget(max_bytes, what)
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
                        data = data[self._to.write(data) :]
        os.close(self._reader)
        self._to.close()
