"""A profile of a model worker: torch's events of its compute thread and its GPU, on the clock of the run's timeline."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.config.processes import WorkerInfo
from asyncrl.runtime.trace import header_of_process, place_of, trace_name

MAX_BYTES = 64_000_000  # of a worker's file
_STREAM_TRACKS = 10_000_000  # a GPU's stream N is track _STREAM_TRACKS + N of its process; no thread has such a number

logger = logging.getLogger(__name__)


class Profiler:
    """Records on the compute thread, which calls all methods. An error is logged: a profile never ends a run."""

    def __init__(self, info: WorkerInfo, *, max_bytes: int = MAX_BYTES) -> None:
        self._info, self._max_bytes = info, max_bytes
        self._recording: profile | None = None

    def begin(self) -> None:
        """Begin to record. A recording that is already there is discarded."""
        self.end(None)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            recording = profile(activities=activities, acc_events=True)  # without it torch 2.11 warns of later cycles
            recording.start()
            self._recording = recording
        except Exception as error:
            logger.warning("no profile of this worker: %r", error)

    def end(self, folder: Path | None) -> int:
        """Stop recording, and write the events to a file in the folder; None: discard them. Returns the bytes of the file; 0 if
        there is none."""
        recording, self._recording = self._recording, None
        if recording is None:
            return 0
        try:
            recording.stop()
            return self._write(recording, folder) if folder is not None else 0
        except Exception as error:
            logger.warning("no profile of this worker: %r", error)
            return 0

    def _write(self, recording: profile, folder: Path) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            exported = Path(temporary, "profile.json")
            recording.export_chrome_trace(str(exported))
            found = msgspec.json.decode(exported.read_bytes(), strict=False)
            exported.unlink()
        header = header_of_process(self._info.name, place_of(self._info))
        lines = [msgspec.json.encode(header)]
        # With the longest first, a file that is full lacks the shortest events
        events = sorted(_events(found, header.unix_us), key=lambda event: -event.get("dur", float("inf")))
        size = len(lines[0]) + 1
        for event in events:
            line = msgspec.json.encode(event)
            size += len(line) + 1
            if size > self._max_bytes:
                break
            lines.append(line)
        if left_out := len(events) + 1 - len(lines):
            logger.warning("the profile lacks the %d shortest events: its limit is %d bytes", left_out, self._max_bytes)
        path = folder / trace_name(self._info)
        path.write_bytes(b"\n".join([*lines, b""]))
        return path.stat().st_size


def _events(found: Mapping[str, Any], unix_us: int) -> list[dict[str, Any]]:
    """Return torch's events as events of this process, in microseconds of the monotonic clock. Kernels of a GPU have its number as
    their process."""
    shift_us, own = found.get("baseTimeNanoseconds", 0) / 1000 - unix_us, os.getpid()
    events = []
    for event in found["traceEvents"]:
        process, track = event["pid"], event.get("tid", 0)
        if not isinstance(process, int) or not isinstance(track, int) or event["name"].startswith("process_"):
            continue  # torch's own marks, and names of processes: the header has this one's
        moved = {"pid": own, "tid": track if process == own else _STREAM_TRACKS + track}
        events.append(event | moved | ({"ts": event["ts"] + shift_us} if "ts" in event else {}))
    return events
