"""Time, as the parts of a process see it: passed in, so that tests turn it by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol


class Clock(Protocol):
    """monotonic() for durations and deadlines, time() (seconds since the epoch) for what is written down, sleep() for threads
    that have no event loop."""

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
    """Look every so many seconds whether something holds, on a thread that may wait. False: it did not within limit_s."""
    deadline = clock.monotonic() + limit_s
    while not condition():
        if clock.monotonic() > deadline:
            return False
        clock.sleep(every_s)
    return True
