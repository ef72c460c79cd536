"""The known name that a misspelt one means (pure). One rule for fields, choices, tasks, roles, engines and commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(asked: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The known name that is most like the asked one; None if none is close. Case, hyphens and underscores do not count."""
    best, found = cutoff, None
    for name in known:
        if name and (likeness := _likeness(_plain(asked), _plain(name))) >= best and (found is None or likeness > best):
            best, found = likeness, name
    return found


def did_you_mean(asked: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """`did you mean 'name'? ` for a message; "" if no known name is close."""
    found = nearest(asked, known, cutoff=cutoff)
    return f"did you mean {found!r}? " if found is not None else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _likeness(one: str, other: str) -> float:
    """0 to 1; above 1 if the names differ only in the order of their letters."""
    return difflib.SequenceMatcher(None, one, other).ratio() + (sorted(one) == sorted(other))
