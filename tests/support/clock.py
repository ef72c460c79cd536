"""A manual clock for tests."""

from __future__ import annotations


class ManualClock:
    """Test double of runtime.clock.Clock. monotonic() and time() return `now`, and sleep() advances it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
