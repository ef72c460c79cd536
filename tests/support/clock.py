"""A clock that a test turns by hand."""

from __future__ import annotations


class ManualClock:
    """As runtime.clock.Clock. Both clocks show `now`; a sleep moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
