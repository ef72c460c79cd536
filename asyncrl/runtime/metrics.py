"""Where numbers go: metrics.jsonl (one object a line, what docs/reward_curve.py reads) and TensorBoard events."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import msgspec

METRICS_FILE = "metrics.jsonl"


class JsonLinesWriter:
    """Appends one JSON object a line, flushed at once, so that a reader never waits and a crash loses at most one line.

    Half a line that a crash left behind is cut off, so that every line of the file is whole.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < path.stat().st_size:
            self._file.truncate(whole)

    def write(self, record: Mapping[str, object]) -> None:
        self._file.write(msgspec.json.encode(record).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLinesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter:
    """Metrics by train step, to both."""

    def __init__(self, run_dir: Path, *, attempt: int, tensorboard: bool) -> None:
        self._attempt = attempt
        self._lines = JsonLinesWriter(run_dir / METRICS_FILE)
        self._events = None
        if tensorboard:
            self._events = _summary_writer(run_dir / "tensorboard" / f"attempt_{attempt}")

    def write(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """metrics: flat, `group/name`. Numbers also go to TensorBoard, at the train step."""
        self._lines.write({"step": step, "attempt": self._attempt, **metrics})
        if self._events is not None:
            for name, value in metrics.items():
                if not isinstance(value, str) and "/" in name:
                    self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()


def _summary_writer(folder: Path) -> Any:
    """tensorboardX imports torch where there is one, and needs it for no scalar: it is not shown torch."""
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hide:
            del sys.modules["torch"]
    return SummaryWriter(str(folder), flush_secs=10)


def read_json_lines(path: Path) -> list[dict[str, object]]:
    """All complete lines of a file of JSON objects; none where there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [msgspec.json.decode(line, type=dict[str, object]) for line in file if line.endswith(b"\n")]
