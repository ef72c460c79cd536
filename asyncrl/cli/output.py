"""The output of commands: no command fails because its output cannot be written.

A standard stream may be closed, lack a reader, lead to a full disk, or have an encoding that lacks a character (`use_any_streams`).
Output that cannot be written is dropped, and the command continues to its end: its exit code tells its result. Only a command that
does nothing but print without an end (`logs`, `status --watch`) ends with its reader.

Commands that supervise processes (run, resume, host) are not even delayed (`never_waiting`). The reader of a terminal or pipe may
stop: Ctrl-S, a stopped `less`, a frozen ssh. A write would then wait, and with it the loop that supervises the run. So these
commands only queue their text, and a thread writes it. When the queue is full, its oldest text is dropped, because the newest
matters most: at the end it has the first cause. When the reader comes back, it is told how many lines are missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import stat
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import msgspec

from asyncrl.protocol.errors import NO_SPACE
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

_MAX_CHARS, _MAX_TEXTS = 1_000_000, 20_000  # what waits for the reader
_PIECE_BYTES = 4096  # a pipe that accepts writes has room for this much
_FULL_PAUSE_S = 1.0  # before another try, if the output goes to a disk that is full
_STALLED_S = 5.0  # at the end: give up a reader that takes nothing for this long
_END_S = 30.0  # at the end: give up a reader that has not taken everything by then
_PUMP_END_S = 1.0


class QueuedStream(io.TextIOBase):
    """A text stream whose `write` waits for nothing.

    consumes: texts. produces: the same texts in the underlying stream, without those that were dropped.
    waits for: the reader, without a limit, on its own thread; in `close` at most _END_S. unblocked by: the reader; its end, after
    which all text is dropped.
    """

    def __init__(
        self,
        stream: TextIO,
        dropped: Callable[[int], str],
        *,
        stalled_s: float = _STALLED_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """dropped: the text that tells the reader the number of lines that are missing. stalled_s: `close` gives up a reader that
        takes nothing for this long."""
        stream.flush()
        self._fd = os.dup(stream.fileno())
        self._encoding, self._errors = stream.encoding, stream.errors or "replace"
        self._is_terminal, self._stream_fd = stream.isatty(), stream.fileno()
        self._dropped_text, self._stalled_s, self._clock = dropped, stalled_s, clock
        self._texts: deque[str] = deque()
        self._num_chars = self._num_dropped = self._num_written = 0
        self._busy = self._closing = self._broken = False
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._stream_fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._news:
            self._num_chars += len(text)
            if self._texts and "\n" not in self._texts[-1]:  # whole lines are dropped, and no parts of lines
                begun = self._texts.pop()
                if _is_overwritten(begun) and _is_overwritten(text):
                    self._num_chars -= len(begun)
                    begun = ""
                self._texts.append(begun + text)
            else:
                self._texts.append(text)
            while len(self._texts) > 1 and (self._num_chars > _MAX_CHARS or len(self._texts) > _MAX_TEXTS):
                oldest = self._texts.popleft()
                self._num_chars -= len(oldest)
                self._num_dropped += oldest.count("\n")
            self._news.notify_all()
        return len(text)

    def close(self) -> None:
        """Wait until the reader has taken everything, or give it up."""
        deadline = self._clock.monotonic() + _END_S
        with self._news:
            self._closing = True
            self._news.notify_all()
            while self._texts or self._busy:
                before, left_s = self._num_written, deadline - self._clock.monotonic()
                if not self._news.wait_for(
                    lambda before=before: not (self._texts or self._busy) or self._num_written > before,  # type: ignore[misc]
                    timeout=max(0.0, min(self._stalled_s, left_s)),
                ):
                    self._texts.clear()
                    return

    def _run(self) -> None:
        # A process in the background of a terminal with `stty tostop` is otherwise stopped by its own output
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        while True:
            with self._news:
                self._busy = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._texts or self._closing)
                if not self._texts:
                    return
                self._busy = True
                text = self._texts.popleft()
                self._num_chars -= len(text)
                if self._num_dropped:
                    text, self._num_dropped = self._dropped_text(self._num_dropped) + text, 0
            if not self._broken:
                self._put(text.encode(self._encoding, self._errors))

    def _put(self, data: bytes) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while data:
            try:
                poll.poll()
                count = os.write(self._fd, data[:_PIECE_BYTES])
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in NO_SPACE and not self._closing:
                    self._clock.sleep(_FULL_PAUSE_S)
                    continue
                self._broken = True  # the reader has ended: the run goes on without output
                return
            data = data[count:]
            with self._news:
                self._num_written += count
                self._news.notify_all()


def _is_overwritten(text: str) -> bool:
    """Whether the next such text replaces this one on a terminal: it changes the line at the bottom and ends no line."""
    return text.startswith("\r") and "\n" not in text


@contextlib.contextmanager
def never_waiting(*, as_json: bool, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:
    """Inside the `with` block nothing that this process prints waits for a reader: neither Python's stdout and stderr, nor what
    libraries and child processes write to the descriptors 1 and 2. as_json: stdout has one JSON object in each line."""

    def dropped_text(count: int) -> str:
        return f"{_dropped(count)}\n"

    def dropped_event(count: int) -> str:
        event = {"event": "notice", "time": round(clock.time(), 3), "text": _dropped(count)}
        return f"{msgspec.json.encode(event).decode()}\n"

    with contextlib.ExitStack() as closing:
        for name, tell in (("stdout", dropped_event if as_json else dropped_text), ("stderr", dropped_text)):
            before: TextIO = getattr(sys, name)
            try:
                queued = QueuedStream(before, tell, clock=clock)
            except (OSError, ValueError):  # it is closed, or not a file of the system
                continue
            closing.callback(queued.close)
            closing.enter_context(_pumped(before.fileno(), queued))
            setattr(sys, name, queued)
            closing.callback(setattr, sys, name, before)
        try:
            yield
        except Exception:  # the interpreter would print it when it ends, and wait for the reader
            traceback.print_exc()
            sys.exit(1)


def _dropped(count: int) -> str:
    return f"(the reader of this output was too slow: {count} lines are missing)"


@contextlib.contextmanager
def _pumped(fd: int, queued: QueuedStream) -> Iterator[None]:
    """Queue what is written to the descriptor itself, too. A file needs no pump, because its writes wait for no reader."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        yield
        return
    real = os.dup(fd)
    reader, writer = os.pipe()
    os.dup2(writer, fd)
    os.close(writer)

    def pump() -> None:
        with open(reader, errors="replace") as lines:
            for line in lines:
                queued.write(line)

    thread = threading.Thread(target=pump, name="output of libraries", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(real, fd)
        os.close(real)
        thread.join(_PUMP_END_S)  # a child process may still hold the pipe


class LossyFile(io.FileIO):
    """A file that drops what cannot be written."""

    ends_with_reader = False  # raise BrokenPipeError where the reader has ended

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.ends_with_reader and isinstance(error, BrokenPipeError):
                self.ends_with_reader = False  # once: the interpreter writes what is left when it ends
                raise
            return len(data)


def use_any_streams() -> list[LossyFile]:
    """Replace stdout and stderr of this process; return their files. Closed ones (`>&-`) become /dev/null, so that no file that is
    opened later gets their descriptor. A character that the encoding lacks is written as its escape."""
    files = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        encoding = before.encoding if before is not None else "utf-8"
        raw = LossyFile(fd if before is not None else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding,
            errors="backslashreplace",
            line_buffering=name == "stderr" or raw.isatty(),
        )
        setattr(sys, name, wrapped)
        files.append(raw)
    return files
