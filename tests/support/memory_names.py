"""Name resolve inside one process, for tests and benchmarks. The endpoint `memory://SPACE` in a config names a space: resolvers of
one process that name the same space share their entries.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.interface import (
    Lease,
    LeaseExists,
    LeaseNotFound,
    NameEntryExists,
    NameResolver,
    Watch,
    WatchCallback,
    WatchEvent,
)
from asyncrl.runtime.system import System

MEMORY = "memory://"
_MAX_PENDING_EVENTS = 4096  # above this, a watch with a slow callback keeps only the newest event of each key


@dataclass
class _Entry:
    value: str
    lease: int | None


@dataclass
class _MemoryLease:
    ttl_s: float
    expires: float  # time.monotonic(); inf while a session keeps it alive
    keys: set[str] = field(default_factory=set)


def covers(watch: Watch, key: str) -> bool:
    """Return whether the watch covers this key, which never ends with a slash."""
    return key.startswith(watch.what) if watch.what.endswith("/") else key == watch.what


class _MemoryWatch(Watch):
    def __init__(self, space: MemoryStore, key: str, subtree: bool, callback: WatchCallback) -> None:
        super().__init__(key, subtree, callback)
        self._space = space
        self._condition = threading.Condition()
        self._pending: deque[WatchEvent] = deque()
        self._delivering = False  # whether a thread runs callbacks now

    def _stop(self) -> None:
        self._space.remove_watch(self)

    def _enqueue(self, events: Sequence[WatchEvent]) -> None:
        """Queue events. The caller must call _deliver afterwards, without holding locks."""
        with self._condition:
            if self.cancelled:
                return
            self._pending.extend(events)
            if len(self._pending) > _MAX_PENDING_EVENTS:
                self._pending = deque({event.key: event for event in self._pending}.values())

    def _deliver(self) -> None:
        """Run callbacks until no event is pending. If another thread is delivering, that thread also handles the queued
        events.
        """
        with self._condition:
            if self._delivering:
                return
            self._delivering = True
        try:
            while (event := self._next_event()) is not None:
                self._tell(event)
        except BaseException:  # such as KeyboardInterrupt: the next caller of _deliver continues
            self._end_delivery()
            raise

    def _next_event(self) -> WatchEvent | None:
        with self._condition:  # one critical section, so that no event queued meanwhile is left behind
            if self._pending and not self.cancelled:
                return self._pending.popleft()
            self._end_delivery()
            return None

    def _end_delivery(self) -> None:
        with self._condition:
            self._delivering = False


class MemoryStore:
    """The state shared by all memory resolvers of one space; the simulation uses a subclass. Callbacks run after the
    lock is released, in the thread that makes the change.
    """

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.leases: dict[int, _MemoryLease] = {}
        self._watches: list[_MemoryWatch] = []
        self._changed: dict[_MemoryWatch, None] = {}  # watches with events of the current change, in order
        self._condition = threading.Condition()
        self._reaper: threading.Thread | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Give exclusive access, after removing expired leases. Afterwards, deliver events to the watches."""
        try:
            with self._condition:
                try:
                    self._expire()
                    yield
                finally:
                    changed, self._changed = self._changed, {}
        finally:
            for watch in changed:
                watch._deliver()

    def put(self, key: str, value: str, lease: int | None) -> None:
        if lease is not None and lease not in self.leases:
            raise LeaseNotFound(f"lease {lease:#x} of name {key!r} does not exist (expired, revoked or never granted)")
        self._detach(key)
        self.entries[key] = _Entry(value, lease)
        if lease is not None:
            self.leases[lease].keys.add(key)
        self._tell(WatchEvent("put", key, value))

    def delete(self, key: str) -> None:
        self._detach(key)
        del self.entries[key]
        self._tell(WatchEvent("delete", key))

    def names(self, key: str, subtree: bool) -> list[str]:
        """Return this key if it exists, or the keys below it, sorted."""
        return sorted(name for name in self.entries if (name.startswith(key + "/") if subtree else name == key))

    def grant(self, lease_id: int, ttl_s: float, expires: float) -> None:
        self.leases[lease_id] = _MemoryLease(ttl_s, expires)
        if expires < math.inf:
            if self._reaper is None:
                self._reaper = threading.Thread(target=self._reap, name="name-resolve-leases", daemon=True)
                self._reaper.start()
            self._condition.notify_all()

    def revoke(self, lease_id: int) -> None:
        lease = self.leases.pop(lease_id, None)
        for key in sorted(lease.keys) if lease else ():
            del self.entries[key]
            self._tell(WatchEvent("delete", key))

    def add_watch(self, watch: _MemoryWatch) -> None:
        state = [
            WatchEvent("put", key, entry.value) for key, entry in sorted(self.entries.items()) if covers(watch, key)
        ]
        watch._enqueue(state)
        self._changed[watch] = None
        self._watches.append(watch)

    def remove_watch(self, watch: _MemoryWatch) -> None:
        with self._condition:
            if watch in self._watches:
                self._watches.remove(watch)

    def _detach(self, key: str) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.lease is not None:
            self.leases[entry.lease].keys.discard(key)

    def _tell(self, event: WatchEvent) -> None:
        for watch in self._watches:
            if covers(watch, event.key):
                watch._enqueue([event])
                self._changed[watch] = None

    def _expire(self) -> None:
        now = time.monotonic()
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease.expires <= now]:
            self.revoke(lease_id)

    def _reap(self) -> None:
        """Consumes nothing; produces the deletes of entries with an expired lease.

        Waits for: the next expiry. Unblocked by: a new lease.
        """
        while True:
            with self.locked():  # removes expired leases
                pass
            with self._condition:
                next_expiry = min((lease.expires for lease in self.leases.values()), default=math.inf)
                if next_expiry == math.inf:
                    self._reaper = None
                    return
                self._condition.wait(max(next_expiry - time.monotonic(), 0.0))


_spaces: dict[str, MemoryStore] = {}
_spaces_lock = threading.Lock()


class MemoryNameResolver(NameResolver):
    """Name resolve inside one process: resolvers of the same space share their entries, like sessions with one etcd."""

    def __init__(self, space: str | MemoryStore = "") -> None:
        """space: its name, or the caller's own store."""
        super().__init__()
        with _spaces_lock:
            self._space = space if isinstance(space, MemoryStore) else _spaces.setdefault(space, MemoryStore())
        self._kept: set[int] = set()

    def _add(self, key: str, value: str, replace: bool, lease: int | None) -> None:
        with self._space.locked():
            if not replace and key in self._space.entries:
                raise NameEntryExists(f"name {key!r} already exists")
            self._space.put(key, value, lease)

    def _read(self, key: str, *, subtree: bool) -> dict[str, str]:
        with self._space.locked():
            return {name: self._space.entries[name].value for name in self._space.names(key, subtree)}

    def _delete(self, key: str, *, subtree: bool) -> int:
        with self._space.locked():
            names = self._space.names(key, subtree)
            for name in names:
                self._space.delete(name)
            return len(names)

    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool:
        with self._space.locked():
            entry = self._space.entries.get(key)
            if (None if entry is None else entry.value) != expected:
                return False
            self._space.put(key, value, None if entry is None else entry.lease)
            return True

    def _adopt(self, key: str, value: str) -> None:
        """Do nothing: this store never loses data."""

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        watch = _MemoryWatch(self._space, key, subtree, callback)
        with self._space.locked():
            self._keep(watch)
            self._space.add_watch(watch)
        return watch

    def _grant_lease(self, ttl_s: float, lease_id: int | None) -> Lease:
        with self._space.locked():
            self._check_open()
            if lease_id is None:
                lease_id = secrets.randbelow(2**63 - 1) + 1
            if lease_id in self._space.leases:
                raise LeaseExists(f"lease {lease_id:#x} already exists")
            self._space.grant(lease_id, ttl_s, math.inf)
            self._kept.add(lease_id)
        return Lease(self, lease_id, ttl_s)

    def _revoke_lease(self, lease_id: int) -> None:
        with self._space.locked():
            self._kept.discard(lease_id)
            self._space.revoke(lease_id)

    def lease_is_there(self, lease_id: int) -> bool:
        with self._space.locked():
            return lease_id in self._space.leases

    def grant_left(self, lease_id: int, ttl_s: float) -> None:
        """Grant a lease that no session refreshes."""
        with self._space.locked():
            self._space.grant(lease_id, ttl_s, time.monotonic() + ttl_s)

    def _close(self) -> None:
        with self._space.locked():
            for lease_id in self._kept:
                self._space.revoke(lease_id)


def open_names(config: NameResolveConfig, limit_s: float = 0.0) -> NameResolver:
    """As open_name_resolver, for a config with an endpoint `memory://SPACE`."""
    assert config.endpoints[0].startswith(MEMORY), config.endpoints
    return MemoryNameResolver(config.endpoints[0].removeprefix(MEMORY))


def memory_system(**services: Any) -> System:
    """The machine's services, with name resolve in memory."""
    return System(open_names=open_names, **services)
