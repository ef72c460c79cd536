"""What a process of the planner counts for one rank, and the arithmetic of it. No torch."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Cost(msgspec.Struct):
    """FLOPs and traffic."""

    flops: int = 0
    counts: dict[str, int] = msgspec.field(default_factory=Counter)  # calls of each collective
    bytes: dict[str, int] = msgspec.field(default_factory=Counter)  # their payload


class Moment(msgspec.Struct):
    """The largest number of bytes during one part of a run, such as the forward passes of the first layer."""

    peak: int = 0
    at_peak: dict[str, int] = {}  # kind -> bytes at the peak
    kinds: dict[str, int] = {}  # kind -> its own largest bytes


class StepCounts(msgspec.Struct):
    """One MFC."""

    cost: Cost = msgspec.field(default_factory=Cost)
    moments: dict[str, Moment] = {}


class ShardCounts(msgspec.Struct):
    """One rank of one model."""

    steps: dict[str, StepCounts] = {}  # by MFC
    load_peak: int = 0
    loaded: int = 0
    resident: dict[str, int] = {}
    exported: int = 0  # bytes of the weights of an export, twice: parts, and parts cast to the dtype of exports


def plus(one: Any, other: Any, factor: int = 1) -> Any:
    """Add `factor` times `other`, number by number. The factor may be negative. A key that is missing counts as 0."""
    if isinstance(one, int):
        return one + factor * other
    if isinstance(one, dict):
        zeros = {key: type(value)() for key, value in {**one, **other}.items()}
        return {key: plus(one.get(key, zero), other.get(key, zero), factor) for key, zero in zeros.items()}
    names = one.__struct_fields__
    return type(one)(**{name: plus(getattr(one, name), getattr(other, name), factor) for name in names})


def extrapolated(first: T, second: T, further: int) -> T:
    """Return the value that follows `second` after `further` more steps, each as large as the one from first to second."""
    found: T = plus(second, plus(second, first, -1), further)
    return found
