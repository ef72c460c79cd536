"""`asyncrl-launch logs`: the logs of a run's processes as one stream in time order.

A log line begins with `YYYY-mm-dd HH:MM:SS.mmm LEVEL worker: `. Other lines, such as those of a traceback, belong to the entry
before them. Each poll merges the new entries of all files by time, so all entries of the first poll are in order.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from asyncrl.cli.commands.common import RUN_HELP, Commands, add_command, print_json
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.config.engines import SGLANG_PROGRAM, VLLM_PROGRAM
from asyncrl.config.nearest import did_you_mean
from asyncrl.launch.rundir import EXPERIMENT_FILE, LaunchError, configs_dir, is_running, logs_dir
from asyncrl.runtime.clock import SYSTEM_CLOCK

_MAX_UNDATED = 100  # search this many lines at the beginning of a file for the first one with a time
_POLL_S = 0.5

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_DAY, _SECOND = r"(?P<day>\d{4}[-/]\d\d[-/]\d\d)", r"(?P<second>\d\d:\d\d:\d\d)"
_LEVEL = rf"(?P<level>{'|'.join(LEVELS)})"
_HEADERS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        rf"{_DAY} {_SECOND}\.(?P<milli>\d{{3}}) {_LEVEL} +\S+: ?(?P<text>.*)",  # asyncrl
        rf"{_DAY} {_SECOND}[,.](?P<milli>\d{{3}})\d* - (?P<text>\S+ - {_LEVEL} - .*)",  # libraries
        rf"{_DAY} {_SECOND}\.(?P<milli>\d{{3}})\d* (?P<level>[DIWEC]) \| (?P<text>.*)",  # etcd 3.4 and older
        rf"{_LEVEL}: {_DAY} {_SECOND} (?P<text>.*)",  # gRPC in etcd
        # The last pattern is for SGLang, with its rank after the time. Few of its lines have a level; the others count as INFO
        rf"\[{_DAY} {_SECOND}(?: [A-Z0-9 ]+)?\] (?:{_LEVEL}: )?(?P<text>.*)",
    )
)
_LEVEL_OF_LETTER = {level[0]: level for level in LEVELS}
_ETCD_LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR"}  # etcd's other levels: ERROR

# Output that does not come from a logger, with the level that it gets. It begins a new entry, unless the entry before it is a
# warning or worse
_UNANNOUNCED = (
    (
        re.compile(r"Traceback \(most recent call last\):|Fatal Python error|terminate called|Segmentation fault"),
        "ERROR",
    ),
    (re.compile(r"\S+:\d+: \w*Warning: "), "WARNING"),
)
# Escape sequences and other control characters in a log must not reach the terminal
_CONTROL = {number: f"\\x{number:02x}" for number in (*range(9), *range(10, 32), *range(127, 160))} | {0x1B: "␛"}


@dataclass(frozen=True)
class Entry:
    """A log line that has a time, with the lines after it that have none."""

    time: str  # local time as text; sorts by time
    level: str  # one of LEVELS; "": lines before the first one with a time
    worker: str
    text: str  # without time, level and worker; may have several lines

    @property
    def is_error(self) -> bool:
        return self.level in {"ERROR", "CRITICAL"}

    def at_least(self, level: str) -> bool:
        """Whether the entry has this level or a more severe one. An entry without a level counts as a warning."""
        return LEVELS.index(self.level or "WARNING") >= LEVELS.index(level)


class Seen:
    """The errors and the number of entries of each level so far, also of those that are not shown."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(LEVELS, 0)
        self.first_error: Entry | None = None

    def add(self, entry: Entry) -> None:
        if entry.level:
            self.counts[entry.level] += 1
        if self.first_error is None and entry.is_error:
            self.first_error = entry


class LogFile:
    """Reads one worker's log from its beginning, as it grows."""

    def __init__(self, path: Path) -> None:
        self._worker = worker_of(path.stem)
        self._file = path.open("rb")
        headers = (_parse_header(_text(line)) for line in islice(self._file, _MAX_UNDATED))
        changed = time.strftime("%Y-%m-%d %H:%M:%S.000", time.localtime(path.stat().st_mtime))
        self._time = next((header[0] for header in headers if header), changed)  # of the newest entry
        self._level = ""
        self._file.seek(0)

    def new_entries(self, *, ended: bool) -> Iterator[Entry]:
        """The entries appended since the last call, with times that never decrease.

        ended: the log no longer grows, so include a last line without a line end. Lines that belong to an entry of an earlier call
        become a new entry.
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
    """The line as a terminal finally shows it (a progress bar overwrites itself). Bytes that are not UTF-8 are replaced."""
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2].translate(_CONTROL)


def _parse_header(line: str) -> tuple[str, str, str] | None:
    """(time, level, text) of a line that begins an entry; None for any other line."""
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
    """The selected files of logs/attempt_N, as they appear and grow."""

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        """wanted: whether to read the log of the worker with this name."""
        self.folder = folder  # may change to the next attempt's, which links the logs of processes that keep running
        self._wanted = wanted
        self._files: dict[int, LogFile] = {}  # by inode

    def new_entries(self, *, ended: bool) -> Iterator[Entry]:
        """The entries written since the last call, in time order."""
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
    """Yield all entries. If goes_on() is true at the beginning, also yield None once, after the entries that already exist.

    waits for: files to grow. unblocked by: goes_on() being false; then all files are read once more.
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
    """Return the name of the worker to which a log file belongs: rollout_worker_1 -> rollout_worker/1.

    Names without a number, such as etcd, do not change. generation_server_0_sglang, the log of that server's SGLang
    process, becomes generation_server/0/sglang.
    """
    for program in (SGLANG_PROGRAM.package, VLLM_PROGRAM.package):
        if stem.endswith(f"_{program}"):
            return f"{worker_of(stem.removesuffix(f'_{program}'))}/{program}"
    kind, underscore, index = stem.rpartition("_")
    return f"{kind}/{index}" if underscore and index.isdigit() else stem


_WORKER = re.compile(r"(?:etcd|launcher|master|gserver_manager|(?:model|rollout)_worker|generation_server)(?:[/_]\d+)?")


def select_workers(asked: Sequence[str], known: Collection[str]) -> set[str]:
    """The workers named by `rollout_worker` (all of a kind), `rollout_worker/1` or `rollout_worker_1`.

    Raises ValueError, which lists the existing workers, if a name matches none.
    """
    selected: set[str] = set()
    for name in asked:
        matching = {worker for worker in known if name in (worker, worker.replace("/", "_"), worker.partition("/")[0])}
        if not matching:
            kinds = sorted({worker.partition("/")[0] for worker in known})
            hint = did_you_mean(name, [*kinds, *known])
            raise ValueError(f"there is no log of {name!r}: {hint}existing logs: {', '.join(sorted(known)) or 'none'}")
        selected |= matching
    return selected


_DESCRIPTION = """Show the logs of a run's processes as one stream in time order.

The first error is highlighted, and repeated at the end with its traceback, because it is usually the cause of the others.
Lines without a time, such as those of a traceback, stay with the line before them."""

_EPILOG = """examples:
  asyncrl-launch logs runs/sloppy-sorter/t0                       all logs of the newest attempt
  asyncrl-launch logs runs/sloppy-sorter/t0 -f                    also new lines, until the run ends or Ctrl-C
  asyncrl-launch logs runs/sloppy-sorter/t0 master rollout_worker/1 --level WARNING
  asyncrl-launch logs runs/sloppy-sorter/t0 --tail 50 --attempt 2
  asyncrl-launch logs runs/sloppy-sorter/t0 --json | jq -r 'select(.level == "ERROR") | .worker'

WORKER is a kind (rollout_worker: all of them), one worker (rollout_worker/1 or rollout_worker_1), or etcd.
--json prints one object per line: event log (time, level, worker, text, first_error), and end (first_error, counts).

exit codes: 0 the logs were shown; 1 there are no such logs, the existing ones are listed; 130 Ctrl-C."""

_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "logs", logs, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument(
        "words", metavar="WORKER", nargs="*", help="only these workers (after a CONFIG also key=value overrides)"
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="also show new lines, including those of further attempts, until the run ends",
    )
    parser.add_argument(
        "--level", choices=LEVELS, default="DEBUG", type=str.upper, help="only this level and more severe ones"
    )
    parser.add_argument("--attempt", type=_positive, metavar="N", help="number of the attempt (default: the newest)")
    parser.add_argument("--tail", type=_positive, metavar="N", help="of the existing log entries, show only the last N")
    parser.set_defaults(ends_with_reader=True)


def logs(arguments: argparse.Namespace, console: Console) -> int:
    """Show the logs of a run's processes as one stream in time order; the first error is highlighted."""
    if arguments.run and _WORKER.fullmatch(arguments.run) and not Path(arguments.run).exists():
        arguments.run, arguments.words = None, [arguments.run, *arguments.words]  # `logs master` of the only run
    run_dir = run_dir_of(arguments.run, [word for word in arguments.words if "=" in word])
    attempt = arguments.attempt or _newest_attempt(run_dir)
    folder = logs_dir(run_dir, attempt)
    if not folder.is_dir():
        there = ", ".join(map(str, _attempts(run_dir))) or "none"
        raise LaunchError(f"{run_dir}: there are no logs of attempt {attempt}; attempts with logs: {there}")
    known = _known_workers(run_dir, attempt)
    asked = [word for word in arguments.words if "=" not in word]
    try:
        selected = select_workers(asked, known)
    except ValueError as error:
        raise LaunchError(f"attempt {attempt} in {run_dir}: {error}") from None

    files = LogFiles(folder, lambda worker: not asked or worker in selected)
    printer = _JsonPrinter(attempt) if arguments.json else _Printer(console, selected or known)

    def goes_on() -> bool:
        # the folder of the next attempt also links the logs of processes that keep running
        if arguments.follow and not arguments.attempt:
            files.folder = logs_dir(run_dir, _newest_attempt(run_dir))
        return arguments.follow and is_running(run_dir) and files.folder == logs_dir(run_dir, _newest_attempt(run_dir))

    seen = Seen()
    # The newest entries, until the existing logs are read to their end; None: each entry is shown at once
    held: deque[Entry] | None = deque(maxlen=arguments.tail) if arguments.tail else None
    try:
        for entry in chain(stream_logs(files, goes_on=goes_on), [None]):
            if entry is None:
                for last in held or ():
                    printer.show(last, seen)
                held = None
                continue
            seen.add(entry)
            if entry.at_least(arguments.level) and held is None:
                printer.show(entry, seen)
            elif entry.at_least(arguments.level) and held is not None:
                held.append(entry)
    finally:
        printer.close(seen)
        files.close()
    return 0


class _Printer:
    """Prints entries as text."""

    def __init__(self, console: Console, workers: set[str]) -> None:
        names = sorted(workers)
        self._console = console
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._date = ""
        self._shown_after = False  # whether another entry was shown after the first error

    def show(self, entry: Entry, seen: Seen) -> None:
        if entry is seen.first_error:
            self._print(Rule("first error", style="bold red"))
        elif seen.first_error is not None:
            self._shown_after = True
        self._print(self._text(entry))

    def close(self, seen: Seen) -> None:
        if seen.first_error is not None and self._shown_after:
            num_errors = seen.counts["ERROR"] + seen.counts["CRITICAL"]
            others = f" (of {num_errors})" if num_errors > 1 else ""
            self._print(Rule(f"the first error again{others}", style="bold red"))
            self._print(self._text(seen.first_error))

    def _text(self, entry: Entry) -> Text:
        """time LEVEL worker: text, and the further lines below it."""
        date, _, at = entry.time.partition(" ")
        text = Text()
        if date != self._date:
            self._date = date
            text.append(f"{date}\n", style="dim")
        style = _LEVEL_STYLES.get(entry.level, "")
        first, newline, rest = entry.text.partition("\n")
        text.append(f"{at:12} ", style="dim")
        text.append(f"{entry.level or '-':8}", style=style or "dim")
        text.append(f"{entry.worker + ':':{self._width + 2}}", style=self._colours.get(entry.worker, ""))
        text.append(first, style=style)
        if newline:
            text.append(newline)
            text.append(re.sub("^", "    ", rest, flags=re.MULTILINE), style=style)
        return text

    def _print(self, what: Text | Rule) -> None:
        if isinstance(what, Text) and not self._console.is_terminal:  # ten times as fast as through rich
            self._console.file.write(f"{what.plain}\n")
            self._console.file.flush()
        else:
            self._console.print(what, highlight=False, soft_wrap=True)


class _JsonPrinter:
    """Prints entries as JSON."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt

    def show(self, entry: Entry, seen: Seen) -> None:
        print_json({"event": "log", **asdict(entry), "first_error": entry is seen.first_error})

    def close(self, seen: Seen) -> None:
        first = asdict(seen.first_error) if seen.first_error else None
        print_json({"event": "end", "attempt": self._attempt, "first_error": first, "counts": seen.counts})


def _known_workers(run_dir: Path, attempt: int) -> set[str]:
    """Workers that have a log or a config. The config is written first, so this includes workers that have not started yet."""
    files = [*logs_dir(run_dir, attempt).glob("*.log"), *configs_dir(run_dir, attempt).glob("*.yaml")]
    return {worker_of(file.stem) for file in files if file.name != EXPERIMENT_FILE}


def _attempts(run_dir: Path) -> list[int]:
    numbers = (re.fullmatch(r"attempt_(\d+)", path.name) for path in (run_dir / "logs").glob("attempt_*"))
    return sorted(int(match[1]) for match in numbers if match)


def _newest_attempt(run_dir: Path) -> int:
    attempts = _attempts(run_dir)
    if not attempts:
        raise LaunchError(f"{run_dir}: there are no logs here; no run has been started in this folder")
    return attempts[-1]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
