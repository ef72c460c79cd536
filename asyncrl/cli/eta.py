"""Remaining time, and the progress line of scripts that make a model or data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

WINDOW = 20  # newest steps that the remaining time is estimated from
_LINE_EVERY_S = 5.0


def seconds_left(durations: Collection[float], steps_left: int) -> float | None:
    """Mean duration of the newest steps, times the steps that are left; None before the first step has ended."""
    return fmean(durations) * max(steps_left, 0) if durations else None


def step_text(step: int, total: int, durations: Collection[float]) -> str:
    """`120/300, 40 %, 0:08 left`."""
    share = f", {100 * min(step / total, 1.0):.0f} %" if total else ""
    left_s = seconds_left(durations, total - step)
    return f"{step}/{total or '?'}{share}{f', {duration_text(left_s)} left' if left_s else ''}"


def duration_text(seconds: float) -> str:
    """`0:05`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bottom_line(text: str, console: Console) -> Text:
    """One line of the terminal, which a spinner stands before; what is too long for it is cut."""
    line = Text(text)
    if console.is_terminal:
        line.truncate(console.width - 3, overflow="ellipsis")
    return line


class StepProgress:
    """Shows step, percent and remaining time of a script's work, and at the end how long it took.

    On a terminal it is one line that changes, otherwise a line every five seconds:

        with StepProgress("warm start", 300) as progress:
            for _ in range(300):
                ...
                progress.advance(note=f"loss {loss:.3f}")

    Without a total it prints only the begin and the end.
    """

    def __init__(
        self,
        what: str,
        total: int = 0,
        *,
        unit: str = "steps",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._console = console or Console()
        self._clock = clock
        self._began = self._newest = self._printed = clock()
        self._done = 0
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._note = ""
        self._live: Status | None = None

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._live = self._console.status(self._line(), refresh_per_second=8)
            self._live.start()
        elif not self._total:
            self._print(f"{self._what} ...")
        return self

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        """`steps` more steps have ended. note: text to show beside them."""
        now = self._clock()
        self._done += steps
        self._durations.append((now - self._newest) / steps)
        self._newest = now
        self._note = note
        if self._live is not None:
            self._live.update(self._line())
        elif self._done < self._total and now - self._printed >= _LINE_EVERY_S:
            self._printed = now
            self._print(self._line().plain)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if error is None:
            took = duration_text(self._clock() - self._began)
            done = f"{self._done} {self._unit} in {took}" if self._total else took
            self._print(f"{self._what}: {done}{self._noted()}")

    def _line(self) -> Text:
        progress = f": {step_text(self._done, self._total, self._durations)}" if self._total else ""
        return bottom_line(f"{self._what}{progress}{self._noted()}", self._console)

    def _noted(self) -> str:
        return f", {self._note}" if self._note else ""

    def _print(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)
