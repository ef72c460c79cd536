"""The model of a run for its readers: what the files of its folder say, read incrementally. `ls`, `status`, `plot`, `inspect`, the
summary and the page (cli/page.py) read a run through this module; it writes nothing and asks no process.

metrics.jsonl has one line per train step and per evaluation. The journals have the beginnings of attempts, the published versions,
the rejected prompts, the injected faults, and the tokens of each server. A run may still be running, its last line may be
incomplete, and values may be missing or not finite: all other values are read.
"""

from __future__ import annotations

import math
import os
import socket
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.data.trajectories import find_recording, list_recording, recording_dir, step_of
from asyncrl.launch.rundir import LOCK_FILE, RUN_FILE, SUMMARY_FILE, LaunchError, is_running, read_record
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S, METRICS_FILE, JsonLinesReader, read_json_lines
from asyncrl.weights.lineage import Lineage, Stretch, attempts_of, lineage_of, lineages_of

NAN = float("nan")
_DEPTH = 2  # levels from fileroot to a run: <experiment>/<trial>
_TAIL_BYTES = 1 << 15  # bytes read from the end of metrics.jsonl; they hold more than REWARD_STEPS records
REWARD_STEPS = 5  # the reward shown is the mean of this many newest train steps
_MOST_BUCKETS = 2000  # of a sum over time
_MOST_EVENTS = 200  # the newest are kept
_NEWEST_TENTHS = 6000  # of a server in which it generated

Record = Mapping[str, object]
Numbers = npt.NDArray[np.float64]


# ------------------------------------------------------------------------------------------------------------- which runs


@dataclass(frozen=True)
class RunEntry:
    """A run as described by its files. 0 and None: unknown."""

    run_dir: str
    name: str  # <experiment>/<trial>
    state: str
    step: int = 0
    total_steps: int = 0
    reward: float | None = None
    started: float = 0.0
    problem: str = ""  # of a damaged run


def find_runs(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Folders of runs: `folder` itself and folders at most `depth` levels below it, if a launcher has written its files there."""
    if (folder / RUN_FILE).exists() or (folder / LOCK_FILE).exists():
        yield folder
    elif depth:
        try:
            below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
        except OSError:  # for example another user's folder
            return
        for path in below:
            yield from find_runs(Path(path), depth - 1)


def read_entry(run_dir: Path) -> RunEntry:
    """Read a run's files. A broken run raises nothing: it gets the state `damaged`."""
    name = f"{run_dir.parent.name}/{run_dir.name}"
    try:
        record, is_complete = read_record(run_dir), (run_dir / SUMMARY_FILE).exists()
        step, reward = newest_step(run_dir / METRICS_FILE)
        if record is not None and record.host not in ("", socket.gethostname()):
            state = "complete" if is_complete else f"on {record.host}"
        elif is_running(run_dir):
            state = "running"
        else:
            state = "complete" if is_complete else "interrupted"
    except (LaunchError, OSError) as error:
        return RunEntry(str(run_dir), name, "damaged", problem=str(error))
    if record is None:
        return RunEntry(str(run_dir), name, state, step, reward=reward)
    return RunEntry(str(run_dir), name, state, step, record.total_steps, reward, record.started)


def newest_step(metrics: Path) -> tuple[int, float | None]:
    """The highest step (0: none), and the mean reward of the last REWARD_STEPS train steps (None: none). Lines that are not
    records are skipped."""
    records, _ = read_records(metrics, _TAIL_BYTES)
    rewards = [reward for record in records if math.isfinite(reward := number(record, "reward/mean"))]
    step = max((int(number(record, "step")) for record in records), default=0)
    return step, fmean(rewards[-REWARD_STEPS:]) if rewards else None


# ---------------------------------------------------------------------------------------------------------------- records


def read_records(path: Path, newest_bytes: int | None = None) -> tuple[list[Record], int]:
    """Read a file of JSON lines. Returns the records that have a step, and the number of other lines.

    newest_bytes: read only the lines that end within this many bytes before the file's end.
    """
    broken: list[str] = []
    found: list[Record] = [*read_json_lines(path, broken.append, newest_bytes)]
    records = [record for record in found if math.isfinite(number(record, "step"))]
    return records, len(broken) + len(found) - len(records)


def number(record: Record, key: str) -> float:
    """The number under this key; NaN if there is none, or if it is not finite."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else NAN


def is_evaluation(record: Record) -> bool:
    """Whether the record is an evaluation's; otherwise it is a train step's."""
    return any(key.startswith("eval/") for key in record)


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """The summary of a complete run. Raises OSError or one of DECODE_ERRORS."""
    return msgspec.json.decode((run_dir / SUMMARY_FILE).read_bytes(), type=dict[str, Any])


def _summary_so_far(run_dir: Path) -> Mapping[str, Any]:
    """The summary of the run's newest attempt; empty while the run is running, or if the file is broken."""
    try:
        return read_summary(run_dir)
    except (OSError, *DECODE_ERRORS):
        return {}


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Name each run by its trial, with as many parent folders as needed to distinguish runs with the same trial."""
    parts = [path.absolute().parts for path in run_dirs]
    names = []
    for own in parts:
        length = next(
            (n for n in range(1, len(own)) if sum(other[-n:] == own[-n:] for other in parts) == 1),
            len(own),
        )
        names.append("/".join(own[-length:]))
    return names


class Columns:
    """The numbers of records by key, so that a curve of all records is a few operations on arrays."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._columns: dict[str, array[float]] = {}
        self._length = 0
        self._rows: npt.NDArray[np.intp] | None = None  # None: all
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        for key in record:
            column = self._columns.setdefault(key, array("d"))
            column.extend([NAN] * (self._length - len(column)))
            column.append(number(record, key))
        self._length += 1

    def __getitem__(self, key: str) -> Numbers:
        """`number` of each record."""
        found = np.full(self._length, NAN)
        column = self._columns.get(key, ())
        found[: len(column)] = column
        return found if self._rows is None else found[self._rows]

    def at(self, rows: npt.NDArray[np.intp]) -> Columns:
        """Those of some records. They may be all; otherwise none are added."""
        if self._rows is None and np.array_equal(rows, np.arange(self._length)):
            return self
        chosen = Columns()
        chosen._columns, chosen._length, chosen._rows = self._columns, self._length, rows
        return chosen

    def __iter__(self) -> Iterator[str]:
        """The keys, in their first order."""
        for key in self._columns:
            if self._rows is None or np.isfinite(self[key]).any():
                yield key


# --------------------------------------------------------------------------------------------------------- sums over time


class Tenths:
    """A set of tenths of a second: unix time in tenths. One integer for each minute, so a week needs about 2 MB."""

    _MINUTE = 600

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}
        self.newest = -1  # -1: the set is empty

    def add(self, tenth: int) -> None:
        minute, bit = divmod(tenth, self._MINUTE)
        self._bits[minute] = self._bits.get(minute, 0) | 1 << bit
        self.newest = max(self.newest, tenth)

    def count(self, first: int, end: int) -> int:
        """The number of tenths from `first` to before `end`."""
        low, high = first // self._MINUTE, (end - 1) // self._MINUTE
        few = high - low < len(self._bits)  # a broken record may have a step of years
        total = 0
        for minute in range(low, high + 1) if few else filter(lambda minute: low <= minute <= high, self._bits):
            bits, start = self._bits.get(minute, 0), minute * self._MINUTE
            if minute == high:
                bits &= (1 << end - start) - 1
            total += (bits >> max(0, first - start)).bit_count()
        return total


class Sums:
    """Sums over time, in buckets of equal width. More than _MOST_BUCKETS are merged in pairs."""

    def __init__(self) -> None:
        self.width_s = 1
        self.buckets: Counter[int] = Counter()  # begin of the bucket, in widths since 1970 -> sum

    def add(self, time: float, value: float) -> None:
        self.buckets[int(time // self.width_s)] += value  # type: ignore[assignment]
        while len(self.buckets) > _MOST_BUCKETS:
            self.width_s *= 2
            merged: Counter[int] = Counter()
            for bucket, total in self.buckets.items():
                merged[bucket // 2] += total
            self.buckets = merged

    def points(self) -> list[tuple[float, float]]:
        """(begin in unix seconds, sum) of each bucket, in the order of time."""
        return [(bucket * self.width_s, self.buckets[bucket]) for bucket in sorted(self.buckets)]


# ----------------------------------------------------------------------------------------------------------------- a run


@dataclass
class Server:
    """A generation server's journal."""

    tokens: Sums = field(default_factory=Sums)
    versions: list[tuple[float, int]] = field(default_factory=list)  # unix seconds of the first token of each version
    newest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_NEWEST_TENTHS))  # (tenth, tokens)


@dataclass(frozen=True)
class Run:
    """The data for the curves of one lineage. A lineage is the chain of attempts, from one that began anew to the newest, that its
    newest weights come from. A run that began anew has several lineages."""

    name: str  # unique among the runs shown
    run_dir: Path
    attempt: int  # the newest of these attempts
    steps: Sequence[Record]  # by step, ascending
    evaluations: Sequence[Record]  # by step, ascending

    # The tenths of a second in which at least one server generated. They are those of the whole run, not only of this lineage
    generating: Tenths = field(default_factory=Tenths)
    ages: Mapping[str, Any] | None = None  # `offpolicyness` of summary.json; None: not written (yet)
    going_on: bool = False
    num_broken_lines: int = 0
    newest_tokens: Sequence[Sequence[tuple[int, float]]] = ()  # of each server: (tenth, tokens) of the newest tenths
    columns: Columns = field(default_factory=Columns)  # of `steps`

    @cached_property
    def evaluated(self) -> Columns:
        """Those of `evaluations`."""
        return Columns(self.evaluations)


class RunFiles:
    """The records of a run's folder. `read` adds those that were written since the last call.

    Memory: the records of steps and evaluations, one version of each server, and sums over time; nothing for each prompt.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._begin()

    def _begin(self) -> None:
        self.steps: list[Record] = []
        self.columns = Columns()  # of `steps`
        self.evaluations: list[Record] = []
        self.published: list[tuple[float, int]] = []  # (unix seconds, version)
        self.rejected: defaultdict[str, Sums] = defaultdict(Sums)  # by reason
        self.events: list[tuple[float, str]] = []  # (unix seconds, text) of attempts, restarts, faults; by time
        self.servers: dict[str, Server] = {}
        self.generating = Tenths()
        self.num_broken_lines = 0
        self._begun: list[Record] = []
        self._recorded: tuple[object, list[Path]] = (None, [])  # and what it was made from: names of files
        self._readers: dict[Path, JsonLinesReader] = {}
        self._inode = self._inode_of_metrics()

    def read(self) -> RunFiles:
        """Read new lines. Blocks for the disk. A run that was begun again in a new folder is read from its beginning."""
        if self._inode not in (None, self._inode_of_metrics()):
            self._begin()
        self._inode = self._inode_of_metrics()
        for record in self._new(self.run_dir / METRICS_FILE):
            if not math.isfinite(number(record, "step")):
                self.num_broken_lines += 1
            elif is_evaluation(record):
                self.evaluations.append(record)
            else:
                self.steps.append(record)
                self.columns.add(record)
        journal = self.run_dir / "journal"
        for event in self._new(journal / "master.jsonl"):
            self._add_event(event)
        for event in self._new(journal / "faults.jsonl"):
            self._note(event, f"fault: {event.get('event')} {event.get('name', '')}")
        for path in sorted(journal.glob("generation_server_*.jsonl")):
            server = self.servers.setdefault(path.stem.replace("server_", "server/"), Server())
            for record in self._new(path):
                self._add_tokens(server, record)
        return self

    @property
    def num_records(self) -> int:
        return len(self.steps) + len(self.evaluations)

    def _inode_of_metrics(self) -> int | None:
        try:
            return (self.run_dir / METRICS_FILE).stat().st_ino
        except OSError:
            return None

    def _new(self, path: Path) -> Iterator[Record]:
        if path not in self._readers:
            self._readers[path] = JsonLinesReader(path, broken=self._count_broken)
        yield from self._readers[path].new_records()

    def _count_broken(self, text: str) -> None:
        self.num_broken_lines += METRICS_FILE in text

    def _add_event(self, event: Record) -> None:
        kind, time = event.get("event"), number(event, "time")
        if kind == "begun":
            self._begun.append(event)
            parent = event.get("from")
            self._note(event, f"attempt {event.get('attempt')} begins {f'from {parent}' if parent else 'anew'}")
        elif kind == "restarted":
            self._note(event, f"restarted: {event.get('workers')}")
        elif kind == "published" and math.isfinite(time):
            self.published.append((time, int(number(event, "version"))))
        elif kind == "rejected" and math.isfinite(time):
            self.rejected[str(event.get("reason"))].add(time, 1)

    def _note(self, event: Record, text: str) -> None:
        if math.isfinite(time := number(event, "time")):
            self.events = sorted([*self.events, (time, text)])[-_MOST_EVENTS:]

    def _add_tokens(self, server: Server, record: Record) -> None:
        time, tokens = number(record, "time"), number(record, "tokens")
        if not (tokens > 0 and math.isfinite(time)):
            return
        self.generating.add(tenth := round(time / JOURNAL_BUCKET_S))
        server.newest.append((tenth, tokens))
        server.tokens.add(time, tokens)
        try:
            version = WeightVersion.parse(str(record.get("version"))).version
        except ValueError:
            return
        if not server.versions or server.versions[-1][1] != version:
            server.versions.append((time, version))

    def lineages(self) -> list[Lineage]:
        """By newest attempt. An attempt that is not in the master's journal is a lineage of its own."""
        known = attempts_of(self._begun)
        written = {*map(int, np.unique(_attempts(self.columns))), *map(_attempt, self.evaluations)}
        others = sorted(written - {attempt.number for attempt in known})
        found = [Lineage(stretches=[Stretch(attempt=number, first=1, last=None)]) for number in others]
        return sorted([*found, *lineages_of(known)], key=lambda lineage: lineage.newest)

    def runs(self, name: str, *, going_on: bool) -> list[Run]:
        """One Run for each lineage that has a step or an evaluation. Steps after a checkpoint from which a later attempt
        continued are void and left out."""
        found = [
            (lineage, _rows(self.columns, lineage), _evaluations(self.evaluations, lineage))
            for lineage in self.lineages()
        ]
        shown = [entry for entry in found if len(entry[1]) or entry[2]]
        summary = _summary_so_far(self.run_dir)
        return [
            Run(
                name=name if len(shown) == 1 else f"{name}, attempt {lineage.newest}",
                run_dir=self.run_dir,
                attempt=lineage.newest,
                steps=[self.steps[row] for row in rows.tolist()],
                evaluations=evaluations,
                columns=self.columns.at(rows),
                generating=self.generating,
                ages=summary.get("offpolicyness") if summary.get("attempt") == lineage.newest else None,
                going_on=going_on and lineage is shown[-1][0],
                num_broken_lines=self.num_broken_lines,
                newest_tokens=[server.newest for server in self.servers.values()],
            )
            for lineage, rows, evaluations in shown
        ]

    def recorded(self) -> list[Path]:
        """The recorded trajectories, oldest first. If the run continued from checkpoints, only those of the attempts and steps that
        its newest weights come from. If the newest of these attempts recorded nothing, those of the newest attempt that did.
        Raises TrajectoryError if there are none."""
        newest = find_recording(self.run_dir)
        lineage = lineage_of(attempts_of(self._begun))
        parts: list[tuple[Path, Stretch | None]] = [(newest, None)]
        if lineage is not None and newest == recording_dir(self.run_dir, lineage.newest):
            parts = [(recording_dir(self.run_dir, stretch.attempt), stretch) for stretch in lineage.stretches]
        mark = [(*part, os.listdir(part[0]) if part[0].is_dir() else []) for part in parts]
        if self._recorded[0] != mark:
            files = [(file, stretch) for folder, stretch in parts for file in list_recording(folder)]
            # A file's number is the weight version from which its train step began, so the step's own number is one higher
            kept = [file for file, stretch in files if stretch is None or stretch.has(step_of(file) + 1)]
            self._recorded = mark, kept
        return self._recorded[1]


def read_runs(run_dirs: Sequence[Path], is_running: Callable[[Path], bool] = lambda _: False) -> list[Run]:
    """Read these runs, in the order given. Equal folders count once. A run that began anew becomes one Run per beginning."""
    folders = list({path.resolve(): path for path in run_dirs}.values())
    runs = []
    for name, run_dir in zip(distinct_names(folders), folders, strict=True):
        going_on = is_running(run_dir)
        runs += RunFiles(run_dir).read().runs(name, going_on=going_on)
    return runs


def _attempt(record: Record) -> int:
    value = record.get("attempt", 1)
    return value if isinstance(value, int) else 1


def _step(record: Record) -> int:
    return int(number(record, "step"))


def _attempts(columns: Columns) -> Numbers:
    """`_attempt` of each record."""
    return np.trunc(np.nan_to_num(columns["attempt"], nan=1))


def _rows(columns: Columns, lineage: Lineage) -> npt.NDArray[np.intp]:
    """The train steps in the lineage, by step."""
    attempts, steps = _attempts(columns), np.trunc(columns["step"])
    shown = np.zeros(len(steps), dtype=bool)
    for stretch in lineage.stretches:
        last = np.inf if stretch.last is None else stretch.last
        shown |= (attempts == stretch.attempt) & (stretch.first <= steps) & (steps <= last)
    rows = np.flatnonzero(shown)
    return rows[np.argsort(steps[rows], kind="stable")]


def _evaluations(records: Iterable[Record], lineage: Lineage) -> list[Record]:
    """Of each step in the lineage, the newest values of its evaluations. A step may have several: of other sets, of the moving
    average, and one that was unfinished at a checkpoint and is repeated."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        if lineage.has_weights(_attempt(record), _step(record)):
            by_step.setdefault(_step(record), {}).update(record)
    return [by_step[step] for step in sorted(by_step)]
