"""Time, as the decisions of the control plane see it: passed in, so that tests turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """monotonic() for durations and deadlines, time() (seconds since the epoch) for what is written down."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()
