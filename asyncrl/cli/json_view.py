"""What `asyncrl-launch run --json` prints: one JSON object a line for everything that happens, for machines that watch a run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.cli.progress import LongWaits
from asyncrl.launch.redact import redact_urls
from asyncrl.protocol.messages import WorkerStatus
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesReader


class JsonView:
    """Every line has `event` and `time` (unix seconds).

    start (run_dir, processes, sizes); worker (name, state, pid, attempt: a process has changed its state); metrics (a record of
    metrics.jsonl: a train step or an evaluation); notice (text); end (exit_code, and summary or error). Whoever reads may
    go away: the run goes on in silence.
    """

    def __init__(self, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._metrics = JsonLinesReader(run_dir / METRICS_FILE, broken=self.notice, newest_bytes=0)
        self._states: dict[str, str] = {}
        self._long_waits = LongWaits()
        self._lock = threading.Lock()  # notices come from other threads
        self._silent = False

    def emit(self, event: str, **fields: Any) -> None:
        line = msgspec.json.encode({"event": event, "time": round(self._clock.time(), 3), **fields})
        with self._lock:
            if self._silent:
                return
            try:
                sys.stdout.write(line.decode() + "\n")
                sys.stdout.flush()
            except OSError:
                self._fall_silent()

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        for status in statuses:
            if self._states.get(status.worker) != status.state:
                self._states[status.worker] = status.state
                self.emit("worker", name=status.worker, state=status.state, pid=status.pid, attempt=status.attempt)
        for record in self._metrics.new_records():
            self.emit("metrics", **_without_own_names(record))
        for text in self._long_waits.new(statuses):
            self.notice(text)

    def notice(self, text: str) -> None:
        self.emit("notice", text=redact_urls(text))

    def say(self, text: str) -> None:
        self.notice(text)

    def close(self) -> None:
        """Emit what is left."""
        self.turn(())

    def _fall_silent(self) -> None:
        """Also for the interpreter, which flushes stdout at its end."""
        self._silent = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def _without_own_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics are named group/name, but for step, attempt and version: they do not meet ours."""
    return {name: value for name, value in record.items() if name not in {"event", "time"}}
