"""Data store of a model worker: groups by id, with the keys stored so far. Bounded in groups.

The event loop of a head (with mode=sync: the compute thread) puts trajectories before the master learns of them, so a call that
names a trajectory always finds it. Copies of other workers' groups, with the keys that MFCs read here, are added by the compute
thread, or by the event loop if they come from another worker group. The compute thread adds the keys that MFCs make. A lock
protects the store. Groups are removed on the master's request. Copies have a separate bound, so they never take room from
trajectories.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from asyncrl.data.sequence import SequenceSample

DUPLICATE = "duplicate"
FULL = "store_full"


class DataStore:
    """Groups by id: at most `capacity` trajectories, and at most `capacity` copies of groups that another worker received."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"store capacity is {capacity}; it must hold at least one group")
        self.capacity = capacity
        self._groups: dict[str, SequenceSample] = {}
        self._copies: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._groups

    def put(self, sample: SequenceSample) -> str:
        """Store all groups of a sample or none. Returns "" or the obstacle: DUPLICATE (an id is already stored) or FULL."""
        groups = sample.unpack()
        with self._lock:
            if any(group_id in self._groups for group_id in sample.ids):
                return DUPLICATE
            if len(self._groups) - len(self._copies) + len(groups) > self.capacity:
                return FULL
            self._groups.update((group.ids[0], group) for group in groups)
        return ""

    def amend(self, sample: SequenceSample) -> None:
        """Add or replace keys of stored groups. An unknown id raises ValueError, and nothing changes."""
        self._merge(sample, copies=False)

    def add_copies(self, sample: SequenceSample) -> None:
        """Add keys of groups from another worker; an unknown id starts a copy. Too many copies raise ValueError. The master has at
        most one batch in transit, which always fits."""
        self._merge(sample, copies=True)

    def _merge(self, sample: SequenceSample, *, copies: bool) -> None:
        groups = {group.ids[0]: group for group in sample.unpack()}
        with self._lock:
            new = [group_id for group_id in groups if group_id not in self._groups]
            if new and not copies:
                raise ValueError(
                    f"keys {sorted(sample.keys)} arrived for the ids {new[:4]}, which are not in the store"
                )
            if len(self._copies) + len(new) > self.capacity:
                raise ValueError(
                    f"{len(new)} copies of groups arrived and {len(self._copies)} are stored; the limit is {self.capacity}"
                )
            merged = {i: self._groups[i].update(group) if i in self._groups else group for i, group in groups.items()}
            self._copies.update(new)
            self._groups.update(merged)

    def select(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample | None:
        """Return these groups, in the given order, with these keys; None for no ids. A missing group or key raises ValueError."""
        with self._lock:
            missing = [group_id for group_id in ids if group_id not in self._groups]
            if missing:
                raise ValueError(
                    f"{len(missing)} of {len(ids)} groups are not in the store, such as {missing[:4]}; master and workers disagree"
                )
            groups = [self._groups[group_id] for group_id in ids]
        for group in groups:
            lacking = [key for key in keys if key not in group.keys]
            if lacking:
                raise ValueError(f"id {group.ids[0]!r} has no {lacking} yet; it has {sorted(group.keys)}")
        if not groups:
            return None
        return SequenceSample.gather([group.select_keys(keys) for group in groups])

    def whole(self, group_id: str) -> SequenceSample:
        """Return a group with all its keys so far."""
        with self._lock:
            return self._groups[group_id]

    def discard(self, ids: Iterable[str]) -> int:
        """Remove these ids with all their keys; unknown ids are ignored. Returns the number removed."""
        with self._lock:
            ids = list(ids)
            groups = [group for group_id in ids if (group := self._groups.pop(group_id, None)) is not None]
            self._copies.difference_update(ids)
        return len(groups)
