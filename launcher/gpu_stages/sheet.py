"""Rows of measurements, the files that they are written to, and the table that shows them. No torch."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COLUMNS = 100
NOT_MEASURED = "not measured"
NEEDS_GPU = f"{NOT_MEASURED}: needs a GPU"
FAILED = "failed: "
_NAME, _NUMBER, _UNIT, _RATIO = 42, 12, 8, 6  # widths


@dataclass(frozen=True)
class Row:
    """One figure. planned: what was expected of it: the prediction of a plan, the minimum of a data sheet."""

    name: str
    value: float | str | None = None
    unit: str = ""
    planned: float | None = None
    note: str = ""
    anywhere: bool = False  # whether it also counts when the stage runs on a CPU

    @property
    def failed(self) -> bool:
        return self.note.startswith(FAILED)


class Sheet:
    """The rows of one stage. The file is complete after each row, so a stage that is killed keeps what it has measured."""

    def __init__(self, path: Path, facts: dict[str, Any], *, on_gpu: bool) -> None:
        self._path, self._on_gpu, self._began = path, on_gpu, time.monotonic()
        self._content = {"stage": path.stem, **facts, "seconds": None, "rows": []}
        self.failed = 0
        self._write()

    def add(self, row: Row) -> None:
        """Rows of a CPU that stand for a GPU lose their figures."""
        if not (self._on_gpu or row.anywhere or row.failed):
            row = Row(row.name, unit=row.unit, note=NEEDS_GPU)
        self.failed += row.failed
        entry = asdict(row) | {"at_s": round(time.monotonic() - self._began, 2)}
        del entry["anywhere"]
        self._content["rows"].append(entry)
        self._write()
        print("\n".join(lines_of(row)), flush=True)

    def end(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._began, 2)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self._path)


def table(folder: Path, stages: Sequence[str]) -> tuple[list[str], int]:
    """The lines of all stages' files, and the number of rows and stages that failed."""
    lines, failed = [], 0
    head = f"{'':{_NAME}} {'planned':>{_NUMBER}} {'measured':>{_NUMBER}} {'':{_UNIT}} {'ratio':>{_RATIO}}"
    for stage in stages:
        path = folder / f"{stage}.json"
        if not path.exists():
            lines += ["", f"{stage}: did not run"]
            failed += 1
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        took = f"{content['seconds']} s" if content["seconds"] is not None else "was ended before its end"
        lines += ["", f"{stage}: {took}, {content['card']}, torch {content['torch']}, commit {content['commit'][:12]}"]
        rows = [Row(**{key: value for key, value in entry.items() if key != "at_s"}) for entry in content["rows"]]
        failed += sum(row.failed for row in rows) + (content["seconds"] is None)
        lines += [head, *(line for row in rows for line in lines_of(row))]
    return lines, failed


def lines_of(row: Row) -> Iterator[str]:
    """A row of the table. A long name or note has lines of its own."""
    ratio, measured, note = "", _text(row.value), row.note
    if isinstance(row.value, (int, float)) and row.planned:
        ratio = f"{row.value / row.planned:.2f}"
    if note.startswith(NOT_MEASURED):
        measured, note = NOT_MEASURED, note.removeprefix(NOT_MEASURED).lstrip(": ")
    name = row.name
    if len(name) > _NAME:
        yield name
        name = ""
    line = f"{name:{_NAME}} {_text(row.planned):>{_NUMBER}} {measured:>{_NUMBER}} {row.unit:{_UNIT}} {ratio:>{_RATIO}}"
    if len(line) + 1 + len(note) <= COLUMNS and "\n" not in note:
        yield f"{line} {note}".rstrip()
        return
    yield line.rstrip()
    for part in note.splitlines():
        yield from textwrap.wrap(part, COLUMNS, initial_indent="    ", subsequent_indent="    ")


def _text(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
