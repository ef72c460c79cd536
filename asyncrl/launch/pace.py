"""How far something has come and how long it will still take: what every progress line of asyncrl is made with.

Pace is pure: it is told steps and times. StepProgress shows one, for scripts that make a model or data.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import fmean, median
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

_WINDOW = 20  # newest steps that the pace is taken from
_CUT_SHARE = 0.1  # of them, the fastest and the slowest, that are left out
_FIRST_LINE_S = 2.0
_EVERY_S = 5.0
_LATER_SHARE = 0.05  # of the time that has passed: an hour must not have 720 lines


class Pace:
    """When the last of `total` steps will be done, by the newest ones' mean duration without the extremes.

    Not by their median: where every third step waits for data, as asynchronous training likes to, it knows nothing of the waits.
    """

    def __init__(self, total: int, now: float) -> None:
        """now: when the first step began; any clock in seconds that all calls share."""
        self.total = total
        self.done = 0
        self._began = self._newest = now
        self._durations: deque[float] = deque(maxlen=_WINDOW)

    def advance(self, now: float, *, steps: int = 1, step_s: float | None = None) -> None:
        """So many more steps are done. step_s: how long one took, if not all the time since the step before."""
        if steps > 0:
            self.done += steps
            self._durations.append((now - self._newest) / steps if step_s is None else step_s)
            self._newest = now

    def go_back(self, done: int) -> None:
        """Only so many are done: those after them are done again."""
        self.done = min(self.done, done)

    def left_s(self, now: float) -> float | None:
        """Seconds until the last step is done; None before the first one is."""
        if not self._durations:
            return None
        steps_left = max(self.total - self.done, 0)
        step_s = _typical(self._durations)
        return max(steps_left * step_s - (now - self._newest), (steps_left - 1) * step_s, 0.0)

    def elapsed_s(self, now: float) -> float:
        return now - self._began

    def text(self, now: float) -> str:
        """`120/300, 40 %, 0:05 elapsed, 0:08 left`."""
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        return f"{self.done}/{self.total}, {100 * share:.0f} %, {self.time_text(now)}"

    def time_text(self, now: float) -> str:
        """`0:05 elapsed, 0:08 left`."""
        left_s = self.left_s(now)
        left = "" if left_s is None or self.done >= self.total else f", {duration_text(left_s)} left"
        return f"{duration_text(self.elapsed_s(now))} elapsed{left}"


def _typical(durations: Collection[float]) -> float:
    cut = math.ceil(_CUT_SHARE * len(durations))
    return fmean(sorted(durations)[cut:-cut]) if len(durations) > 2 * cut else median(durations)


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


class LineTimer:
    """Says when another line is due where lines cannot change: after 2 s, then every 5 s, and less often the longer it takes."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._next = now + _FIRST_LINE_S

    def due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + max(_EVERY_S, _LATER_SHARE * (now - self._began))
        return True


class StepProgress:
    """Shows steps, percent and seconds left of what a person waits for, and at its end how long it took.

    On a terminal it is one line that changes, otherwise a line every few seconds:

        with StepProgress("warm start", 300) as progress:
            for _ in range(300):
                ...
                progress.advance(note=f"loss {loss:.3f}")

    What cannot be counted has no total: it is said to have begun, and how long it took.
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
        self._unit = unit
        self._console = console or Console()
        self._clock = clock
        self._pace = Pace(total, clock())
        self._timer = LineTimer(clock())
        self._note = ""
        self._live: Status | None = None

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._live = self._console.status(self._line(), refresh_per_second=8)
            self._live.start()
        elif not self._pace.total:
            self._print(f"{self._what} ...")
        return self

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        """So many more steps are done. note: what to show beside them."""
        now = self._clock()
        self._pace.advance(now, steps=steps)
        self._note = note
        if self._live is not None:
            self._live.update(self._line())
        elif self._pace.done < self._pace.total and self._timer.due(now):
            self._print(self._line().plain)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if error is None:
            took = duration_text(self._pace.elapsed_s(self._clock()))
            done = f"{self._pace.done} {self._unit} in {took}" if self._pace.total else took
            self._print(f"{self._what}: {done}{self._noted()}")

    def _line(self) -> Text:
        progress = f": {self._pace.text(self._clock())}" if self._pace.total else ""
        return bottom_line(f"{self._what}{progress}{self._noted()}", self._console)

    def _noted(self) -> str:
        return f", {self._note}" if self._note else ""

    def _print(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)
