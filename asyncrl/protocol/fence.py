"""The fence (pure): a receiver remembers the newest place that it has seen, refuses earlier places, and adopts later
ones.

A place is a value that only grows during a run: the attempt of the trainer group, (attempt, group incarnation) of a
receiver, a WeightVersion, or a process's incarnation. A process that was frozen or cut off may send messages after its
successor has started. The fence keeps such messages from taking a receiver back to an earlier place.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from asyncrl.protocol.names import is_earlier

P = TypeVar("P")


class Fence(Generic[P]):
    """`newest` never decreases. None: no place has been seen yet, and the fence refuses none.

    A process that belongs to one attempt for its whole life never adopts another attempt. It accepts only places for
    which `is_current` is true.
    """

    def __init__(self, newest: P) -> None:
        self._newest = newest

    @property
    def newest(self) -> P:
        return self._newest

    def is_over(self, place: P) -> bool:
        """Return whether the receiver must refuse this place because it has seen a later one."""
        newest: Any = self._newest
        return newest is not None and bool(place < newest)

    def is_current(self, place: P) -> bool:
        return place == self._newest

    def adopt(self, place: P) -> bool:
        """Return whether the place is later than every earlier one, and make it the newest. An old or known place
        changes nothing.
        """
        if self.is_current(place) or self.is_over(place):
            return False
        self._newest = place
        return True


class IncarnationFence(Fence[str]):
    """A fence for the incarnations of a process. If two incarnations do not show which of them is earlier, the one that
    the receiver saw first counts as earlier.
    """

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
