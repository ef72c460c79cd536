"""The logs of a run's processes as one stream in the order of time: what `asyncrl-launch logs` prints.

    LogFiles (reads bytes) -> LogMerger: EntryParser of each file (lines, entries) -> entries in order

A log line begins with `YYYY-mm-dd HH:MM:SS.mmm LEVEL worker: `; lines that do not, such as a traceback's, belong to the entry
before them. An entry is given out as soon as no file can have an earlier one: every other file has been read past it, or it
has been held for `hold_s`, or more than `max_held` are held. So the order is exact for files read from their beginning,
and for files that grow as long as a worker's line is no later in its file than `hold_s`.

All but LogFiles is pure: bytes and the time go in.
"""

from __future__ import annotations

import contextlib
import difflib
import heapq
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

HOLD_S = 0.5  # how long an entry of a growing file waits for earlier ones of other files
MAX_HELD = 20_000  # entries held for the order's sake
MAX_LINE_BYTES = 64 << 10  # of a longer line the rest is left out, and counted
MAX_ENTRY_LINES = 2_000  # a longer entry goes on as a further one
READ_BYTES = 64 << 10
_MAX_UNDATED = 100  # entries without a time that wait for the first line with one
_POLL_S = 0.1

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_DAY, _SECOND = r"(?P<day>\d{4}[-/]\d\d[-/]\d\d)", r"(?P<second>\d\d:\d\d:\d\d)"
_LEVEL = rf"(?P<level>{'|'.join(LEVELS)})"
_HEADERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        rf"{_DAY} {_SECOND}\.(?P<milli>\d{{3}}) {_LEVEL} +\S+: ?(?P<text>.*)",  # ours
        rf"{_DAY} {_SECOND}[,.](?P<milli>\d{{3}})\d* - (?P<text>\S+ - {_LEVEL} - .*)",  # of libraries
        rf"{_DAY} {_SECOND}\.(?P<milli>\d{{3}})\d* (?P<level>[DIWEC]) \| (?P<text>.*)",  # etcd 3.4 and older
        rf"{_LEVEL}: {_DAY} {_SECOND} (?P<text>.*)",  # gRPC in etcd
        rf"\[{_DAY} {_SECOND}(?: [A-Z0-9 ]+)?\] (?:{_LEVEL}: )?(?P<text>.*)",  # SGLang, with its rank; it names few levels
    )
)
_LEVEL_OF_LETTER = {level[0]: level for level in LEVELS}
_ETCD_LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR"}  # others are worse
# What is printed past the logging: it begins an entry of its own, unless the entry before may be what it belongs to
_UNANNOUNCED = (
    (
        re.compile(r"Traceback \(most recent call last\):|Fatal Python error|terminate called|Segmentation fault"),
        "ERROR",
    ),
    (re.compile(r"\S+:\d+: \w*Warning: "), "WARNING"),
)
# Escape sequences and other control characters of a log must not reach the terminal
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(9), *range(10, 32), *range(127, 160))} | {0x1B: "␛"}


@dataclass(frozen=True)
class Entry:
    """One thing that a worker said: a line, and those that belong to it."""

    time: str  # local, as it is written in the log: sorts like the time; "" where nothing is known
    level: str  # one of LEVELS; "" where the line tells none
    worker: str
    text: str  # without time, level and worker; may have several lines
    continued: bool = False  # goes on with an entry that was given out before

    @property
    def is_error(self) -> bool:
        return self.level in {"ERROR", "CRITICAL"}

    def at_least(self, level: str) -> bool:
        """Whether it is as bad as that. What tells no level may be anything, and counts as a warning."""
        return LEVELS.index(self.level or "WARNING") >= LEVELS.index(level)


# ------------------------------------------------------------------------------------------------------------------- lines


class LineSplitter:
    """Bytes in any pieces to lines of text. What is not UTF-8 is replaced, and of a huge line the beginning is kept."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now."""
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            self._append(piece)
            lines.append(self._take())
        self._append(rest)
        return lines

    def end(self) -> list[str]:
        """The last line, if it was cut short."""
        return [self._take()] if self._partial else []

    def _append(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._partial)
        self._partial += piece[:room]
        self._left_out += max(len(piece) - room, 0)

    def _take(self) -> str:
        text = self._partial.decode(errors="replace")
        if self._left_out:
            text += f" ... ({self._left_out} bytes more)"
        self._partial, self._left_out = bytearray(), 0
        # a progress bar writes over itself: what a terminal would show in the end
        return text.rstrip("\r").rpartition("\r")[2].translate(_CONTROL)


class EntryParser:
    """The lines of one worker's log to entries. The newest is open: lines may follow that belong to it."""

    def __init__(self, worker: str, began: str) -> None:
        """began: the time of what stands before the first line that tells one, if no such line comes."""
        self.worker = worker
        self.latest = ""  # time of the newest entry: what comes is no earlier
        self._began = began
        self._splitter = LineSplitter()
        self._undated: list[Entry] = []  # entries before the first time
        self._time = ""
        self._level = ""
        self._lines: list[str] = []
        self._continued = False

    def feed(self, data: bytes) -> list[Entry]:
        """The entries that are whole now."""
        return [entry for line in self._splitter.feed(data) for entry in self._take_line(line)]

    def close(self) -> list[Entry]:
        """The open entry, as it is: lines that still come for it become a further one."""
        if not (self._lines or self._undated):
            return []
        if not self.latest:
            self.latest = self._began
        return self._finish()

    def end(self) -> list[Entry]:
        """The rest, at the file's end."""
        return [*(entry for line in self._splitter.end() for entry in self._take_line(line)), *self.close()]

    def _take_line(self, line: str) -> list[Entry]:
        if header := _parse_header(line):
            return self._begin(*header)
        if not (line.strip() or self._lines):
            return []
        for pattern, level in _UNANNOUNCED:
            if pattern.match(line) and not (self._lines and self._level in LEVELS[2:]):
                return self._begin(self._time, level, line)
        done = self._finish() if len(self._lines) >= MAX_ENTRY_LINES else []
        self._lines.append(line)
        return done

    def _begin(self, at: str, level: str, text: str) -> list[Entry]:
        """A new entry. Times of a file never go back, whatever its clock did: its lines stay in their order."""
        self.latest = max(at, self.latest)
        done = self._finish()
        self._time, self._level, self._lines, self._continued = self.latest, level, [text], False
        return done

    def _finish(self) -> list[Entry]:
        """The open entry and those that waited for a time, if there is one by now."""
        if self._lines:
            self._undated.append(Entry(self._time, self._level, self.worker, "\n".join(self._lines), self._continued))
            self._lines, self._continued = [], True
        if not self.latest and len(self._undated) < _MAX_UNDATED:
            return []
        done, self._undated = self._undated, []
        return [entry if entry.time else replace(entry, time=self.latest or self._began) for entry in done]


def _parse_header(line: str) -> tuple[str, str, str] | None:
    """(time, level, text) of a line that begins an entry."""
    if line.startswith("{") and '"ts"' in line:
        return _parse_etcd(line)
    for header in _HEADERS:
        if match := header.fullmatch(line):
            part = match.groupdict()
            at = f"{part['day'].replace('/', '-')} {part['second']}.{part.get('milli', '000')}"
            return at, _LEVEL_OF_LETTER[(part["level"] or "INFO")[0]], part["text"]
    return None


def _parse_etcd(line: str) -> tuple[str, str, str] | None:
    """A line of etcd's log: {"level":"warn","ts":"2024-01-31T12:00:00.123+0100","caller":...,"msg":...,...}."""
    try:
        fields = json.loads(line)
        level, text = str(fields.pop("level")), str(fields.pop("msg"))
        at = datetime.strptime(fields.pop("ts").replace("Z", "+0000"), "%Y-%m-%dT%H:%M:%S.%f%z").astimezone()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    fields.pop("caller", None)
    rest = " ".join(f"{name}={value}" for name, value in fields.items() if name != "stacktrace")
    shown = at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"
    return shown, _ETCD_LEVELS.get(level, "ERROR"), f"{text}{f'  {rest}' if rest else ''}"


# ------------------------------------------------------------------------------------------------------------------- merging


@dataclass
class _Source:
    parser: EntryParser
    fed: float = math.inf  # when its newest bytes came


@dataclass(order=True)
class _Held:
    time: str
    source: str  # entries of one time are given out in an order that does not depend on how the files were read
    number: int
    since: float = field(compare=False)
    entry: Entry = field(compare=False)


class LogMerger:
    """Logs of several workers, in pieces, to one sequence of entries in the order of time; those of one worker in their own."""

    def __init__(self, hold_s: float = HOLD_S, max_held: int = MAX_HELD) -> None:
        self._hold_s = hold_s
        self._max_held = max_held
        self._sources: dict[str, _Source] = {}
        self._held: list[_Held] = []
        self._number = 0

    def open(self, name: str, worker: str, began: str) -> None:
        """A file that may have something to say. began: the time of what it says without one."""
        self._sources[name] = _Source(EntryParser(worker, began))

    def feed(self, name: str, data: bytes, now: float) -> None:
        source = self._sources[name]
        source.fed = now
        self._hold(name, source.parser.feed(data), now)

    def end(self, name: str, now: float) -> None:
        """Nothing more will come from it."""
        self._hold(name, self._sources.pop(name).parser.end(), now)

    def behind(self, names: Collection[str]) -> str:
        """Of these files the one to read next: the one that has been read least far in time."""
        return min(names, key=lambda name: (self._sources[name].parser.latest, name))

    def ready(self, now: float | None = None) -> Iterator[Entry]:
        """What can be given out. Without `now` nothing is for having waited long: earlier ones are still unread."""
        if now is not None:
            for name, source in self._sources.items():
                if now - source.fed >= self._hold_s:
                    self._hold(name, source.parser.close(), source.fed)
        reached = min((source.parser.latest for source in self._sources.values()), default=None)
        while self._held:
            first = self._held[0]
            nothing_before = reached is None or first.time < reached
            waited = now is not None and now - first.since >= self._hold_s
            if not (nothing_before or waited or len(self._held) > self._max_held):
                return
            yield heapq.heappop(self._held).entry

    def _hold(self, name: str, entries: Iterable[Entry], now: float) -> None:
        for entry in entries:
            self._number += 1
            heapq.heappush(self._held, _Held(entry.time, name, self._number, now, entry))


# ------------------------------------------------------------------------------------------------------------------- reading


@dataclass
class _OpenFile:
    worker: str
    file: BinaryIO
    inode: int
    position: int = 0
    replaced: bool = False  # its name is another file's by now, or nobody's

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


class LogFiles:
    """The files of logs/attempt_N that are wanted, as they come and grow; also those that are cut, replaced or deleted."""

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """wanted: by the name of a worker."""
        self.folder = folder  # may be set anew: files that are in both are read on
        self._wanted = wanted
        self._open: dict[str, _OpenFile] = {}
        self._number = 0

    def scan(self, merger: LogMerger, now: float) -> None:
        """Look for new files, and for those that have lost their name."""
        found: dict[int, tuple[Path, float]] = {}
        for path in sorted(self.folder.glob("*.log")):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found[stat.st_ino] = (path, stat.st_mtime)
        known = {entry.inode for entry in self._open.values()}
        for name, entry in list(self._open.items()):
            entry.replaced = entry.inode not in found
            if entry.replaced and entry.size <= entry.position:
                self.close(name, merger, now)
            elif entry.size < entry.position:  # cut: what it holds now is new
                entry.position = 0
        for inode, (path, changed) in found.items():
            if inode not in known and self._wanted(worker_of(path.stem)):
                with contextlib.suppress(OSError):  # it has gone again
                    self._add(path, inode, changed, merger)

    def unread(self) -> list[str]:
        """Files that hold more than was read."""
        return [name for name, entry in self._open.items() if entry.size > entry.position]

    def read(self, name: str) -> bytes:
        entry = self._open[name]
        data = os.pread(entry.file.fileno(), READ_BYTES, entry.position)
        entry.position += len(data)
        return data

    def close(self, name: str, merger: LogMerger, now: float) -> None:
        self._open.pop(name).file.close()
        merger.end(name, now)

    def close_all(self, merger: LogMerger, now: float) -> None:
        for name in list(self._open):
            self.close(name, merger, now)

    def _add(self, path: Path, inode: int, changed: float, merger: LogMerger) -> None:
        file = path.open("rb", buffering=0)
        self._number += 1
        name, worker = f"{path.stem}#{self._number}", worker_of(path.stem)
        self._open[name] = _OpenFile(worker, file, inode)
        merger.open(name, worker, time.strftime("%Y-%m-%d %H:%M:%S.000", time.localtime(changed)))


def stream_logs(
    files: LogFiles,
    merger: LogMerger,
    *,
    goes_on: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[], None] = lambda: time.sleep(_POLL_S),
) -> Iterator[Entry | None]:
    """All entries in order; None once, when everything that was there at the beginning has been given out.

    waits for: files to grow. unblocked by: that; goes_on() being false, after which everything is read once more.
    """
    caught_up = False
    while True:
        follow = goes_on()  # asked before reading: what was written until then is read
        files.scan(merger, clock())
        while unread := files.unread():
            name = merger.behind(unread)
            data = files.read(name)
            merger.feed(name, data, clock())
            if not follow and name not in files.unread():
                files.close(name, merger, clock())  # nothing waits for a file that has no more to say
            yield from merger.ready()
        if not follow:
            files.close_all(merger, clock())
            yield from merger.ready()
            return
        yield from merger.ready(clock())
        if not caught_up:
            caught_up = True
            yield None
        pause()


def worker_of(stem: str) -> str:
    """rollout_worker_1 (the name of a file) -> rollout_worker/1 (the name of the worker); others, such as etcd, stay.

    generation_server_0_sglang, what that worker's own SGLang server says, is generation_server/0/sglang.
    """
    if stem.endswith("_sglang"):
        return f"{worker_of(stem.removesuffix('_sglang'))}/sglang"
    kind, underscore, index = stem.rpartition("_")
    return f"{kind}/{index}" if underscore and index.isdigit() else stem


def select_workers(asked: Sequence[str], known: Collection[str]) -> set[str]:
    """The workers that are meant by `rollout_worker` (all of a kind), `rollout_worker/1` or `rollout_worker_1`.

    Raises ValueError that names those that exist.
    """
    selected: set[str] = set()
    for name in asked:
        matching = {worker for worker in known if name in (worker, worker.replace("/", "_"), worker.partition("/")[0])}
        if not matching:
            kinds = sorted({worker.partition("/")[0] for worker in known})
            nearest = difflib.get_close_matches(name, [*known, *kinds], n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            raise ValueError(f"there is no log of {name!r}: {hint}there are {', '.join(sorted(known)) or 'none'}")
        selected |= matching
    return selected
