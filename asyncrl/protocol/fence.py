"""The fence (pure): a receiver remembers the newest place that it has seen, refuses what is earlier, and adopts what is later.

A place is what only grows while a run goes on: the attempt of the trainer group, (attempt, group incarnation) of a receiver, a
WeightVersion, or a process's incarnation. Processes that were frozen or cut off speak after their successors; none of them may take
a receiver back.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from asyncrl.protocol.names import is_earlier

P = TypeVar("P")


class Fence(Generic[P]):
    """`newest` never goes back. None: nothing has been seen yet, and nothing is over.

    A process that belongs to one attempt for good never adopts another one: it takes what `is_current`, and nothing else.
    """

    def __init__(self, newest: P) -> None:
        self._newest = newest

    @property
    def newest(self) -> P:
        return self._newest

    def is_over(self, place: P) -> bool:
        """Refuse it: a later one has been seen."""
        newest: Any = self._newest
        return newest is not None and bool(place < newest)

    def is_current(self, place: P) -> bool:
        return place == self._newest

    def adopt(self, place: P) -> bool:
        """Whether it is news: a later one than all before, the newest from now on. What is over, or known, changes nothing."""
        if self.is_current(place) or self.is_over(place):
            return False
        self._newest = place
        return True


class IncarnationFence(Fence[str]):
    """Of a process's incarnations. Where their names do not say which began first, the one that was heard first did."""

    def __init__(self, newest: str) -> None:
        super().__init__(newest)
        self._replaced: set[str] = set()

    def is_over(self, place: str) -> bool:
        return place in self._replaced or is_earlier(place, self.newest)

    def adopt(self, place: str) -> bool:
        before = self.newest
        if not super().adopt(place):
            return False
        self._replaced.add(before)
        return True
