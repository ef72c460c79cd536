"""Which model worker holds which (id, key). Pure.

Fed by what the master learns or decides: trajectories that arrived, redistributions that it has sent out, keys that MFCs made,
data that was fetched, groups that it has cleared. In the gang a redistribution counts from the moment it is sent: workers execute
calls in the master's order, so that whatever is sent to them later finds the data. Who asks from another world
(dataflow/worlds.py) is in no such order: it asks those that have said that they have it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from asyncrl.dataflow.redistribution import Holders, transfers
from asyncrl.protocol.messages import RedistribStep


class StorageTracker:
    """id -> key -> the workers that have it."""

    def __init__(self, apart: Collection[int] = ()) -> None:
        """apart: workers that are not in the gang's world."""
        self._apart = frozenset(apart)
        self._holders: dict[str, dict[str, set[int]]] = {}
        self._there: dict[str, dict[str, set[int]]] = {}

    def __len__(self) -> int:
        """Number of ids that any worker holds something of."""
        return len(self._holders.keys() | self._there.keys())

    @property
    def holders(self) -> Holders:
        """In the gang, what is on its way to them included."""
        return self._holders

    @property
    def there(self) -> Holders:
        """In all worlds, nothing that is on its way."""
        return self._there

    def add(self, worker: int, ids: Iterable[str], keys: Iterable[str]) -> None:
        """A worker has these keys of these ids, and has said so."""
        ids, keys = list(ids), list(keys)
        _add(self._there, worker, ids, keys)
        if worker not in self._apart:
            _add(self._holders, worker, ids, keys)

    def apply(self, steps: Iterable[RedistribStep]) -> None:
        """These steps have been sent to all workers in them."""
        for step in steps:
            for transfer in transfers(step):
                for target in transfer.targets:
                    _add(self._holders, target, transfer.ids, transfer.keys)

    def num_missing(self, group: str, workers: Iterable[int], keys: Sequence[str]) -> int:
        """How many pairs (worker, key) of an id are not where they would be needed."""
        held = self._holders.get(group, {})
        return sum(worker not in held.get(key, ()) for worker in workers for key in keys)

    def forget(self, workers: Collection[int]) -> None:
        """What these workers, of a world that is apart, held has gone with them."""
        for held in self._there.values():
            for having in held.values():
                having.difference_update(workers)

    def drop(self, ids: Iterable[str]) -> list[int]:
        """Forget ids. Returns the workers that hold something of them, who are to be told."""
        dropped = [held for group in ids for known in (self._holders, self._there) if (held := known.pop(group, None))]
        return sorted({worker for held in dropped for workers in held.values() for worker in workers})


def _add(known: dict[str, dict[str, set[int]]], worker: int, ids: Iterable[str], keys: Sequence[str]) -> None:
    for group in ids:
        held = known.setdefault(group, {})
        for key in keys:
            held.setdefault(key, set()).add(worker)
