"""Data store of a head: trajectories by id, and the keys that MFCs add to them. Bounded in groups.

The worker's event loop puts what arrives, its compute thread reads and amends; a lock joins the two. A group enters before the
master knows of it, so that a call that names it always finds it, and leaves when the master says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from asyncrl.data.sequence import SequenceSample

DUPLICATE = "duplicate"
FULL = "store_full"


class DataStore:
    """Groups by id, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"store capacity is {capacity}; it must hold at least one group")
        self.capacity = capacity
        self._groups: dict[str, SequenceSample] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._groups

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def ids(self) -> list[str]:
        """In the order of arrival."""
        with self._lock:
            return list(self._groups)

    def put(self, sample: SequenceSample) -> str:
        """Store all groups of a sample or none. Returns "" or why not: DUPLICATE (an id is here already) or FULL."""
        groups = sample.unpack()
        with self._lock:
            if any(group_id in self._groups for group_id in sample.ids):
                return DUPLICATE
            if len(self._groups) + len(groups) > self.capacity:
                return FULL
            for group in groups:
                self._set(group.ids[0], group)
        return ""

    def amend(self, sample: SequenceSample) -> None:
        """Add (or replace) keys of groups that are here. An id that is not here is a ValueError, and nothing changes."""
        groups = sample.unpack()
        with self._lock:
            missing = [group_id for group_id in sample.ids if group_id not in self._groups]
            if missing:
                raise ValueError(
                    f"keys {sorted(sample.keys)} came for the ids {missing[:4]}, which are not in the store"
                )
            merged = [self._groups[group.ids[0]].update(group) for group in groups]
            for group in merged:
                self._set(group.ids[0], group)

    def local_ids(self, ids: Iterable[str]) -> list[str]:
        """Those that are here, in the given order."""
        with self._lock:
            return [group_id for group_id in ids if group_id in self._groups]

    def select(self, ids: Iterable[str], keys: Sequence[str]) -> SequenceSample | None:
        """The groups of `ids` that are here, in the given order, with these keys. None where none is here."""
        with self._lock:
            groups = [self._groups[group_id] for group_id in ids if group_id in self._groups]
        for group in groups:
            missing = [key for key in keys if key not in group.keys]
            if missing:
                raise ValueError(f"id {group.ids[0]!r} has no {missing} yet; it has {sorted(group.keys)}")
        if not groups:
            return None
        return SequenceSample.gather([group.select_keys(keys) for group in groups])

    def whole(self, group_id: str) -> SequenceSample:
        """A group with all the keys it has by now."""
        with self._lock:
            return self._groups[group_id]

    def discard(self, ids: Iterable[str]) -> int:
        """Forget these ids with all their keys; unknown ones are ignored. Returns how many were here."""
        with self._lock:
            groups = [group for group_id in ids if (group := self._groups.pop(group_id, None)) is not None]
            self._num_bytes -= sum(group.num_bytes for group in groups)
        return len(groups)

    def _set(self, group_id: str, group: SequenceSample) -> None:
        old = self._groups.get(group_id)
        self._num_bytes += group.num_bytes - (old.num_bytes if old is not None else 0)
        self._groups[group_id] = group
