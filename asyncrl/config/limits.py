"""What a config field allows, declared with the field in schema.py: limits of a number, or the words that a text may be.

config/validation.py rejects other values. config/reference.py and config/shapes.py read the same declarations.
"""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Limits of a numeric field, declared with `limited`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float = math.inf
    remedy: str = ""

    def problem(self, number: float) -> str:
        """The remedy for a number that is too small; "" if it is large enough. `at_most` is checked separately."""
        if self.above is not None and number <= self.above:
            return f"must be above {self.above:g}"
        if self.at_least is None or number >= self.at_least:
            return ""
        usual = (
            "must not be negative; 0 switches it off" if self.at_least == 0 else f"must be at least {self.at_least:g}"
        )
        return self.remedy or usual


_NO_LIMITS = Limits()


def limited(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> T:
    """A numeric field with limits; config/validation.py rejects a value outside them.

    at_most: the largest sensible value. A larger one is a typing error, or does not fit into any machine.
    remedy: replaces the usual text of the message about a value below at_least.
    """
    limits = Limits(at_least, above, math.inf if at_most is None else at_most, remedy)
    return field(default=default, metadata={"limits": limits})


def choice(default: str, *allowed: str) -> str:
    """A field that takes one of a few words. Messages leave out the empty word, with which nothing is chosen."""
    return field(default=default, metadata={"allowed": allowed})


def limits_of(entry: Field[Any]) -> Limits:
    """The limits of a field. A field without `limited` has none."""
    found: Limits = entry.metadata.get("limits", _NO_LIMITS)
    return found


def allowed_in(entry: Field[Any]) -> tuple[str, ...]:
    """The words of a field, or of the elements of a list. Empty: any value of its type."""
    found: tuple[str, ...] = entry.metadata.get("allowed", ())
    return found
