"""Which model worker holds which (id, key). Pure.

Fed by what the master learns or decides: trajectories that arrived, redistributions that it has sent out, keys that MFCs made,
groups that it has cleared. A redistribution counts from the moment it is sent: workers execute calls in the master's order, so
that whatever is sent to them later finds the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.messages import RedistribStep
from asyncrl.redistribution import Holders, transfers


class StorageTracker:
    """id -> key -> the workers that have it."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, set[int]]] = {}

    def __len__(self) -> int:
        """Number of ids that any worker holds something of."""
        return len(self._holders)

    @property
    def holders(self) -> Holders:
        return self._holders

    def add(self, worker: int, ids: Iterable[str], keys: Iterable[str]) -> None:
        """A worker has these keys of these ids."""
        keys = list(keys)
        for group in ids:
            held = self._holders.setdefault(group, {})
            for key in keys:
                held.setdefault(key, set()).add(worker)

    def apply(self, steps: Iterable[RedistribStep]) -> None:
        """These steps have been sent to all workers in them."""
        for step in steps:
            for transfer in transfers(step):
                for target in transfer.targets:
                    self.add(target, transfer.ids, transfer.keys)

    def num_missing(self, group: str, workers: Iterable[int], keys: Sequence[str]) -> int:
        """How many pairs (worker, key) of an id are not where they would be needed."""
        held = self._holders.get(group, {})
        return sum(worker not in held.get(key, ()) for worker in workers for key in keys)

    def drop(self, ids: Iterable[str]) -> list[int]:
        """Forget ids. Returns the workers that hold something of them, who are to be told."""
        dropped = [held for group in ids if (held := self._holders.pop(group, None)) is not None]
        return sorted({worker for held in dropped for workers in held.values() for worker in workers})
