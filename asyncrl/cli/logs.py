"""The logs of a run's processes as one sequence in the order of time, which `asyncrl-launch logs` prints.

A log line begins with `YYYY-mm-dd HH:MM:SS.mmm LEVEL worker: `. Lines that do not, such as a traceback's, belong to the entry
before them. Each poll merges the new entries of all files by time, so everything that is there at the first poll is in order.
"""

from __future__ import annotations

import difflib
import heapq
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from operator import attrgetter
from pathlib import Path

from asyncrl.runtime.clock import SYSTEM_CLOCK

_MAX_UNDATED = 100  # lines at the beginning of a file that may have no time
_POLL_S = 0.5

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
    """A line of a log, and the lines that belong to it."""

    time: str  # local, as the log has it: sorts like the time
    level: str  # one of LEVELS; "" where the line has none
    worker: str
    text: str  # without time, level and worker; may have several lines

    @property
    def is_error(self) -> bool:
        return self.level in {"ERROR", "CRITICAL"}

    def at_least(self, level: str) -> bool:
        """Whether it is as bad as that. What tells no level may be anything, and counts as a warning."""
        return LEVELS.index(self.level or "WARNING") >= LEVELS.index(level)


class LogFile:
    """Reads one worker's log, from its beginning, as it grows."""

    def __init__(self, path: Path) -> None:
        self._worker = worker_of(path.stem)
        self._file = path.open("rb")
        headers = (_parse_header(_text(line)) for line in islice(self._file, _MAX_UNDATED))
        changed = time.strftime("%Y-%m-%d %H:%M:%S.000", time.localtime(path.stat().st_mtime))
        self._time = next((header[0] for header in headers if header), changed)  # of the newest entry
        self._level = ""
        self._file.seek(0)

    def new_entries(self, *, ended: bool) -> Iterator[Entry]:
        """The lines that were appended since the last call. Their times never go back.

        ended: a last line without an end counts too. Lines that belong to an entry of an earlier call are an entry of their own.
        """
        lines: list[str] = []
        for line in self._lines(ended=ended):
            if header := _parse_header(line) or self._unannounced(line):
                if lines:
                    yield self._entry(lines)
                self._time, self._level, lines = max(header[0], self._time), header[1], [header[2]]
            elif line.strip() or lines:
                lines.append(line)
        if lines:
            yield self._entry(lines)

    def close(self) -> None:
        self._file.close()

    def _lines(self, *, ended: bool) -> Iterator[str]:
        while line := self._file.readline():
            if not (ended or line.endswith(b"\n")):
                self._file.seek(-len(line), 1)
                return
            yield _text(line)

    def _unannounced(self, line: str) -> tuple[str, str, str] | None:
        if self._level in LEVELS[2:]:
            return None
        return next(((self._time, level, line) for pattern, level in _UNANNOUNCED if pattern.match(line)), None)

    def _entry(self, lines: list[str]) -> Entry:
        return Entry(self._time, self._level, self._worker, "\n".join(lines))


def _text(line: bytes) -> str:
    """What a terminal would show in the end: a progress bar writes over itself. What is not UTF-8 is replaced."""
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2].translate(_CONTROL)


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


class LogFiles:
    """The files of logs/attempt_N that are wanted, as they come and grow."""

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """wanted: by the name of a worker."""
        self.folder = folder  # may change to the next attempt's, which links the logs of processes that go on
        self._wanted = wanted
        self._files: dict[int, LogFile] = {}  # by inode

    def new_entries(self, *, ended: bool) -> Iterator[Entry]:
        """What was written since the last call, in the order of time."""
        for path in sorted(self.folder.glob("*.log")):
            if path.is_file() and self._wanted(worker_of(path.stem)) and path.stat().st_ino not in self._files:
                self._files[path.stat().st_ino] = LogFile(path)
        return heapq.merge(
            *(file.new_entries(ended=ended) for file in self._files.values()),
            key=attrgetter("time"),
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def stream_logs(
    files: LogFiles,
    *,
    goes_on: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = lambda: SYSTEM_CLOCK.sleep(_POLL_S),
) -> Iterator[Entry | None]:
    """All entries; None once, after those that were there at the beginning.

    waits for: files to grow. unblocked by: goes_on() being false, after which everything is read once more.
    """
    follow, first = goes_on(), True
    while follow:
        yield from files.new_entries(ended=False)
        if first:
            yield None
        first = False
        pause()
        follow = goes_on()
    yield from files.new_entries(ended=True)


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
