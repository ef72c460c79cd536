"""Writes metrics to metrics.jsonl (one object per line, read by `asyncrl-launch plot`), TensorBoard events and trackers."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import math
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal

import msgspec

from asyncrl.protocol.errors import DECODE_ERRORS, Failures
from asyncrl.runtime.disk import FULL_LIMIT_S, write_when_there_is_room, writing
from asyncrl.runtime.trackers.tracker import Tracker

METRICS_FILE = "metrics.jsonl"
_LAST_WORDS_S = 2.0  # limit for each tracker to finish if the run ends early
_NUM_BUCKETS = 30  # of a histogram
_BLOCK_BYTES = 1 << 16
JOURNAL_BUCKET_S = 0.1  # generation servers record their tokens in buckets of a tenth of a second

logger = logging.getLogger(__name__)


class JsonLinesWriter:
    """Appends one JSON object per line, written immediately: a reader never waits, and a crash loses at most one line.

    At opening, a partial line left by a crash, or NUL bytes left by a power failure, are truncated with a warning, so
    every line of the file is complete. Raises StorageError.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._failures = path, Failures(FULL_LIMIT_S)
        self._file = write_when_there_is_room(path, lambda: _open(path, "a+b"), self._failures)
        with writing(path):
            whole, size = _end_of_lines(self._file.fileno()), path.stat().st_size
            if whole < size:
                logger.warning(
                    "%s ends with %d bytes that are not a complete line; truncating them", path, size - whole
                )
                self._file.truncate(whole)

    def write(self, record: Mapping[str, object]) -> None:
        """Write a record. Waits for a moment while the disk is full."""
        line = msgspec.json.encode(record) + b"\n"
        write_when_there_is_room(self._path, lambda: self.write_lines([line]), self._failures)

    def sync(self) -> None:
        """When this returns, the written lines are on disk and survive a power failure."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def write_lines(self, lines: Sequence[bytes]) -> None:
        """Write encoded lines. If that fails, no part of them remains."""
        _append(self._path, self._file, b"".join(lines))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter:
    """Writes the metrics of train steps and evaluations to metrics.jsonl and, if configured, to TensorBoard and trackers."""

    def __init__(
        self, run_dir: Path, *, attempt: int, tensorboard: bool, trackers: Mapping[str, Tracker] = MappingProxyType({})
    ) -> None:
        self._attempt = attempt
        self._trackers = trackers
        self._lines = JsonLinesWriter(run_dir / METRICS_FILE)
        self._events = None
        if tensorboard:
            self._events = EventFile(run_dir / "tensorboard" / f"attempt_{attempt}")

    def write(
        self,
        step: int,
        metrics: Mapping[str, float | int | str],
        distributions: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        """metrics: by `group/name`. TensorBoard gets the numbers with a group in their name, and the distributions as histograms.
        Trackers get all values of metrics."""
        self._lines.write({"step": step, "attempt": self._attempt, **metrics})
        if self._events is not None:
            numbers = {name: value for name, value in metrics.items() if not isinstance(value, str) and "/" in name}
            self._events.write(step, numbers, distributions)
        for tracker in self._trackers.values():
            tracker.write(step, metrics)

    def close(self) -> None:
        self._lines.close()
        for tracker in self._trackers.values():
            tracker.finish(_LAST_WORDS_S)
        if self._events is not None:
            self._events.close()


class EventFile:
    """Writes TensorBoard events immediately: a full disk raises StorageError here, not unseen in a library's thread."""

    def __init__(self, folder: Path) -> None:
        self._failures = Failures(FULL_LIMIT_S)
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._file = write_when_there_is_room(self._path, lambda: _open(self._path, "ab"), self._failures)
        self._append(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        distributions: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        """Write all scalars and histograms of a step as one event. Raises StorageError."""
        values = [_bytes(1, _TAG.sub("_", name).encode()) + _float(2, value) for name, value in scalars.items()]
        values += [
            _bytes(1, _TAG.sub("_", name).encode()) + _bytes(5, _histogram(finite))
            for name, numbers in distributions.items()
            if (finite := [value for value in numbers if math.isfinite(value)])
        ]
        summary = b"".join(_bytes(1, value) for value in values)
        self._append(_double(1, time.time()) + b"\x10" + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: bytes) -> None:
        """Append a TensorFlow record: length, its checksum, data, its checksum."""
        length = struct.pack("<Q", len(event))
        ends = [struct.pack("<I", _masked_crc32c(part)) for part in (length, event)]
        data = length + ends[0] + event + ends[1]
        write_when_there_is_room(self._path, lambda: _append(self._path, self._file, data), self._failures)


def _open(path: Path, mode: Literal["ab", "a+b"]) -> io.FileIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open(mode, buffering=0)


# An Event is a protocol buffer: wall_time = 1 (double), step = 2, file_version = 3, summary = 5. A summary repeats
# value = 1, with tag = 1 and simple_value = 2 (float) or histo = 5. A histogram has min = 1, max = 2, num = 3, sum = 4,
# sum_squares = 5, bucket_limit = 6 and bucket = 7 (packed doubles). A field begins with 8 * its number + its wire type.

_TAG = re.compile(r"[^-/\w.]")  # characters not allowed in a tag


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([8 * field + 2]) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return bytes([8 * field + 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([8 * field + 5]) + struct.pack(
        "<f", ctypes.c_float(value).value
    )  # inf if the value is too large for a float


def _histogram(values: Sequence[float]) -> bytes:
    """A histogram of finite values. Its buckets have equal widths; each limit belongs to the bucket below it."""
    low, high = min(values), max(values)
    width = (high - low) / _NUM_BUCKETS
    counts = [0.0] * (_NUM_BUCKETS if width > 0 else 1)
    for value in values:
        counts[min(int((value - low) / width), _NUM_BUCKETS - 1) if width > 0 else 0] += 1
    limits = [low + width * (index + 1) for index in range(len(counts) - 1)] + [high]
    totals = (low, high, len(values), sum(values), sum(value * value for value in values))
    about = b"".join(_double(field, total) for field, total in enumerate(totals, 1))
    return about + b"".join(
        _bytes(field, struct.pack(f"<{len(row)}d", *row)) for field, row in ((6, limits), (7, counts))
    )


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRCS = [_crc_of(byte) for byte in range(256)]


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRCS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _end_of_lines(file: int) -> int:
    """Return the end of the file's last complete line. Reads backwards from the end: a journal of weeks may not fit in memory."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _append(path: Path, file: io.FileIO, data: bytes) -> None:
    """Write everything. An almost full disk may accept only a part and refuse the rest at the next write. Then truncate the file to
    its previous size, so that no part of the data remains. Raises StorageError."""
    before = os.fstat(file.fileno()).st_size
    left = memoryview(data)
    try:
        with writing(path):
            while left:
                left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(before)
        raise


class JsonLinesReader:
    """Reads a file of JSON objects, one per line. The file may still grow or not exist yet.

    A last line without a newline is not read: it is still being written, or a crash or power failure cut it short.
    broken: called with a message for each line that is not a JSON object; the line is skipped. Without `broken`, such a
    line raises ValueError.
    newest_bytes: skip lines that end before the last newest_bytes of the file. 0: skip all existing lines.
    """

    def __init__(
        self, path: Path, *, broken: Callable[[str], None] | None = None, newest_bytes: int | None = None
    ) -> None:
        self._path, self._broken = path, broken
        self._position = 0 if newest_bytes is None else _begin_of_line(path, newest_bytes)
        self._counted = (0, 0)  # a position, and the number of lines before it

    def new_records(self) -> Iterator[dict[str, object]]:
        """Return the records of all lines not read before."""
        for line in self._new_lines():
            try:
                yield msgspec.json.decode(line, type=dict[str, object])
            except DECODE_ERRORS as error:
                text = f"{self._path}:{self._count_lines()}: not a JSON object: {error}"
                if self._broken is None:
                    raise ValueError(f"{text}; delete the line") from error
                self._broken(f"{text}; the line is skipped")

    def _new_lines(self) -> Iterator[bytes]:
        try:
            file = self._path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return
        with file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line

    def _count_lines(self) -> int:
        """The number of lines up to the newest one that was read. Only a message needs it."""
        position, lines = self._counted
        with contextlib.suppress(OSError), self._path.open("rb") as file:  # it may have been removed meanwhile
            file.seek(position)
            for left in range(self._position - position, 0, -_BLOCK_BYTES):
                lines += file.read(min(left, _BLOCK_BYTES)).count(b"\n")
        self._counted = self._position, lines
        return lines


def _begin_of_line(path: Path, newest_bytes: int) -> int:
    """The position of the line that contains the first of a file's newest bytes. 0: the file's beginning, or there is no file."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    with file:
        end = max(0, file.seek(0, os.SEEK_END) - newest_bytes)
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            if newline := file.read(end - begin).rfind(b"\n") + 1:
                return begin + newline
            end = begin
    return 0


def read_json_lines(
    path: Path, broken: Callable[[str], None] | None = None, newest_bytes: int | None = None
) -> list[dict[str, object]]:
    """Read the complete lines of a file of JSON objects, as JsonLinesReader does; an empty list if there is no file."""
    return list(JsonLinesReader(path, broken=broken, newest_bytes=newest_bytes).new_records())
