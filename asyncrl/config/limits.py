"""What a config field allows, declared with the field in schema.py: bounds of a number, the words that a text may be, or its form.

config/validation.py rejects other values. config/reference.py and config/shapes.py read the same declarations.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

from asyncrl.config.nearest import did_you_mean

T = TypeVar("T")
_DIGITS = 1e6  # larger numbers are written without an exponent


@dataclass(frozen=True)
class Rule:
    """The values that a field allows.

    remedy: the message about a number, in place of the usual text. note: the message about a number names all bounds, and ends with
    this text.
    """

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    words: tuple[str, ...] = ()
    # What a text names. model: a folder | code: `file.py:name` or a module | data: a file or a dataset | path
    file: str = ""
    form: str = ""  # regular expression of a text
    form_remedy: str = ""
    remedy: str = ""
    note: str = ""

    @property
    def bounds(self) -> list[str]:
        """The bounds of a number, such as `above 0`."""
        named = (
            ("above", self.above),
            ("at least", self.at_least),
            ("at most", self.at_most),
            ("below", self.below),
        )
        return [f"{word} {bound:{',g' if bound < _DIGITS else ',.0f'}}" for word, bound in named if bound is not None]

    def problem(self, value: object) -> str:
        """The remedy for a value of the field, or of an element of its list; "" if it is allowed."""
        if isinstance(value, str):
            if self.words and value not in self.words:
                words = [word for word in self.words if word]
                return f"{did_you_mean(value, words, cutoff=0.3)}one of {', '.join(words)}"
            return "" if not self.form or re.fullmatch(self.form, value, re.DOTALL) else self.form_remedy
        return self._problem_of_number(value) if isinstance(value, int | float) else ""

    def _problem_of_number(self, number: float) -> str:
        is_small = (self.above is not None and number <= self.above) or (
            self.at_least is not None and number < self.at_least
        )
        is_large = (self.below is not None and number >= self.below) or (
            self.at_most is not None and number > self.at_most
        )
        if not (is_small or is_large):
            return ""
        if self.remedy or self.note:
            return self.remedy or f"must be {' and '.join(self.bounds)}{self.note}"
        if self.at_least == 0 and not is_large:
            return "must not be negative; 0 switches it off"
        return f"must be {self.bounds[-1 if is_large else 0]}"


_NO_RULE = Rule()


def limited(
    default: T,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    remedy: str = "",
    note: str = "",
) -> T:
    """A numeric field with bounds.

    at_most: the largest sensible value. A larger one is a typing error, or does not fit into any machine.
    remedy, note: as in Rule.
    """
    return ruled(default, Rule(above, at_least, at_most, below, remedy=remedy, note=note))


def choice(default: str, *allowed: str) -> str:
    """A field that takes one of a few words. Messages leave out the empty word, with which nothing is chosen."""
    return ruled(default, Rule(words=allowed))


def ruled(default: T, rule: Rule) -> T:
    """A field with a rule. The rule of a list applies to its elements."""
    return field(default=default, metadata={"rule": rule})


def rule_of(entry: Field[Any]) -> Rule:
    """The declaration of a field. A field that is declared by its type alone allows any value of it."""
    found: Rule = entry.metadata.get("rule", _NO_RULE)
    return found
