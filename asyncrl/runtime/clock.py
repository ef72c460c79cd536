"""Clocks for the parts of a process. Callers pass them in, so that tests can advance time by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol


class Clock(Protocol):
    """monotonic() for durations and deadlines, time() (seconds since the epoch) for recorded times, sleep() for threads
    without an event loop.
    """

    def monotonic(self) -> float: ...

    def time(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Final = SystemClock()


def wait_until(condition: Callable[[], bool], *, limit_s: float, every_s: float, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Block until a condition is met, checking it every `every_s` seconds. Returns False if it is not met within limit_s."""
    deadline = clock.monotonic() + limit_s
    while not condition():
        if clock.monotonic() > deadline:
            return False
        clock.sleep(every_s)
    return True
