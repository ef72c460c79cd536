"""Timeline of each process's activity, in the trace event format of chrome://tracing and ui.perfetto.dev.

    every process of a run with `trace: true` -- Tracer --> trace/attempt_N/<worker>.jsonl -- merge --> trace/attempt_N.json

A Tracer buffers events in memory and writes them on each flush (a worker's status reporter flushes twice a second).
A full buffer drops further events and counts them. If the file exceeds its limit or cannot be opened or written, tracing
ends with a warning. Tracing never fails the run. Times come from the monotonic clock, which all
processes of a machine share. Each file also records the offset of that clock from calendar time. Merging uses the offsets to
align several machines, as accurately as their calendar clocks agree.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from asyncrl.config.processes import WorkerInfo
from asyncrl.runtime.metrics import JsonLinesReader

Value = str | int | float | bool
_SHORTEST_WAIT_US = 500  # shorter waits are not recorded
_KINDS = ("generation_server", "rollout_worker", "gserver_manager", "model_worker", "master")
_encoder = msgspec.json.Encoder()


class TraceHeader(msgspec.Struct, frozen=True):
    """The first line of a process's file."""

    process: str  # e.g. rollout_worker/1
    pid: int
    order: int  # position of the process among the processes in the timeline
    boot: str  # identifies the machine and its boot: processes with the same value share a clock
    unix_us: int  # calendar minus monotonic clock, in microseconds


class Tracer:
    """Records a process's activity. Without a path it records nothing, at almost no cost. Threads may share one Tracer."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        process: str = "",
        order: int = 0,
        max_buffered: int = 100_000,
        max_file_bytes: int = 256_000_000,
    ) -> None:
        """max_buffered: events kept between two flushes; further ones are dropped and counted."""
        self._max_buffered, self._max_file_bytes = max_buffered, max_file_bytes
        self.enabled = path is not None
        self.num_dropped = 0
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards events and tracks; held only briefly
        self._file_lock = threading.Lock()
        self._pid = os.getpid()
        self._file: TextIO | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():  # a previous process with the same name wrote it
                path = path.with_name(f"{path.stem}.{self._pid}{path.suffix}")
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            logging.getLogger(__name__).warning("there is no timeline of this process: %s", error)
            self.enabled = False
            return
        header = header_of_process(process, order)
        self._file.write(_encoder.encode(header).decode() + "\n")

    @contextlib.contextmanager
    def span(self, name: str, *, track: str, **args: Value) -> Iterator[None]:
        """Record the block as an activity. Spans on one track must follow or enclose one another; use `overlapping` for
        others.
        """
        start = _now_us()
        try:
            yield
        finally:
            self.add_span(name, start, track=track, **args)

    @contextlib.contextmanager
    def overlapping(self, name: str, *, kind: str, **args: Value) -> Iterator[None]:
        """Record the block as an activity that may overlap others of its kind. Each gets its own line."""
        start = _now_us()
        try:
            yield
        finally:
            self.add_overlapping(name, start, kind=kind, **args)

    def add_overlapping(self, name: str, start_us: int, *, kind: str, **args: Value) -> None:
        """Record an activity as `overlapping` does, from start_us (`now_us`) to now."""
        if not self.enabled:
            return
        common = {"name": name, "cat": kind, "id2": {"local": hex(next(self._ids))}, "pid": self._pid, "tid": 0}
        self._append({**common, "ph": "b", "ts": start_us, "args": args})
        self._append({**common, "ph": "e", "ts": _now_us()})

    def wait(self, what: str, on: str, start_us: int) -> None:
        """Record a wait that began at start_us and ends now."""
        if self.enabled and _now_us() - start_us >= _SHORTEST_WAIT_US:
            self.add_overlapping(what, start_us, kind="wait", on=on)

    def count(self, name: str, value: float) -> None:
        """Record that a quantity has this value from now on."""
        if self.enabled and self._counters.get(name) != value:
            self._counters[name] = value
            self._append(
                {"ph": "C", "name": name, "ts": _now_us(), "pid": self._pid, "tid": 0, "args": {"value": value}}
            )

    @property
    def num_buffered(self) -> int:
        """Events that the next flush writes."""
        return len(self._events)

    def now_us(self) -> int:
        """The current time, for use as a start_us; 0 if nothing is recorded."""
        return _now_us() if self.enabled else 0

    def flush(self) -> None:
        """Write the recorded events. If the file cannot be written, tracing ends but the run continues."""
        with self._file_lock:
            with self._lock:  # released before writing, because compute threads append
                events, self._events = self._events, []
            if self._file is None:
                return
            try:
                self._file.write("".join(_encoder.encode(event).decode() + "\n" for event in events))
                self._file.flush()
                if self._file.tell() > self._max_file_bytes:
                    self._stop(self._file, f"it has reached {self._max_file_bytes} bytes")
            except OSError as error:
                self._stop(self._file, str(error))

    def close(self) -> None:
        self.flush()
        if self.num_dropped:
            logging.getLogger(__name__).warning("the timeline lacks %d events: the buffer was full", self.num_dropped)
        with self._file_lock:
            self.enabled = False
            if self._file is not None:
                self._file.close()
            self._file = None

    def add_span(self, name: str, start_us: int, *, track: str, **args: Value) -> None:
        """Record an activity as `span` does, from start_us (`now_us`) to now."""
        if not self.enabled:
            return
        tid = self._tracks.get(track)
        if tid is None:
            with self._lock:
                tid = self._tracks.setdefault(track, len(self._tracks) + 1)
            self._append(_metadata("thread_name", self._pid, {"name": track}, tid))
        duration = _now_us() - start_us
        self._append(
            {"ph": "X", "name": name, "ts": start_us, "dur": duration, "pid": self._pid, "tid": tid, "args": args}
        )

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            if len(self._events) < self._max_buffered:
                self._events.append(event)
            else:
                self.num_dropped += 1

    def _stop(self, file: TextIO, why: str) -> None:
        logging.getLogger(__name__).warning("the timeline ends here: %s", why)
        self.enabled = False
        with contextlib.suppress(OSError):
            file.close()
        self._file = None


OFF = Tracer()  # records nothing


def trace_dir(run_dir: Path, attempt: int) -> Path:
    """The folder in which the processes of an attempt write their timelines."""
    return run_dir / "trace" / f"attempt_{attempt}"


def trace_file(info: WorkerInfo) -> Path:
    """The timeline file of one process."""
    return trace_dir(Path(info.run_dir), info.attempt) / trace_name(info)


def trace_name(info: WorkerInfo) -> str:
    """The name of a process's file in the folder of a timeline or of a profile."""
    return f"{info.name.replace('/', '_')}.jsonl"


def header_of_process(name: str, order: int) -> TraceHeader:
    """The header of a file that this process writes."""
    return TraceHeader(name, os.getpid(), order, _boot(), time.time_ns() // 1000 - _now_us())


def place_of(info: WorkerInfo) -> int:
    """The position of a process in the timeline, ordered from generation to training."""
    return _KINDS.index(info.kind) * 1000 + info.index if info.kind in _KINDS else len(_KINDS) * 1000


def merge(
    folder: Path, out: Path, *, timeline: Path | None = None, span: tuple[float, float] = (-math.inf, math.inf)
) -> int:
    """Merge the files of all processes into one timeline. Returns the number of events.

    timeline: a second folder, of whose events only those that begin within `span` are merged (microseconds, as `span_of` returns
    them). Skips broken lines, and files without a header.
    """
    num_events = 0
    temporary = out.with_name(f".{out.name}")
    with temporary.open("w", encoding="utf-8") as target:
        target.write('{"displayTimeUnit": "ms", "traceEvents": [')
        reference: TraceHeader | None = None
        for path in [*sorted(folder.glob("*.jsonl")), *(sorted(timeline.glob("*.jsonl")) if timeline else ())]:
            records = JsonLinesReader(path, broken=lambda _: None).new_records()
            header = _header_of(records)
            if header is None:
                continue
            reference = reference or header
            shift_us = 0 if header.boot == reference.boot else header.unix_us - reference.unix_us
            for event in itertools.chain(_about(header), _shifted(records, shift_us)):
                if path.parent == timeline and event["ph"] != "M" and not span[0] <= event["ts"] <= span[1]:
                    continue
                target.write((",\n" if num_events else "\n") + _encoder.encode(event).decode())
                num_events += 1
        target.write("\n]}\n")
    temporary.rename(out)
    return num_events


def span_of(folder: Path) -> tuple[float, float]:
    """The times of the first and last event in the files of a folder, on the clock of its first file, in microseconds."""
    reference: TraceHeader | None = None
    times: list[float] = []
    for path in sorted(folder.glob("*.jsonl")):
        records = JsonLinesReader(path, broken=lambda _: None).new_records()
        if (header := _header_of(records)) is not None:
            reference = reference or header
            shift_us = 0 if header.boot == reference.boot else header.unix_us - reference.unix_us
            times += [event["ts"] for event in _shifted(records, shift_us) if "ts" in event and event["ph"] != "M"]
    return min(times, default=math.inf), max(times, default=-math.inf)


def _about(header: TraceHeader) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", header.pid, {"name": header.process})
    yield _metadata("process_sort_index", header.pid, {"sort_index": header.order})


def _header_of(records: Iterator[dict[str, Any]]) -> TraceHeader | None:
    """Return the first record of a file; None if it is not a header."""
    try:
        return msgspec.convert(next(records, None), TraceHeader)
    except msgspec.ValidationError:
        return None


def _shifted(events: Iterator[dict[str, Any]], shift_us: int) -> Iterator[dict[str, Any]]:
    for event in events:
        if shift_us and "ts" in event:
            event["ts"] += shift_us
        yield event


def _metadata(name: str, pid: int, args: Mapping[str, Value], tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: use the host name instead
        return os.uname().nodename
