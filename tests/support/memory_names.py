"""Name resolve inside one process, for tests and benchmarks. The endpoint `memory://SPACE` in a config names a space: resolvers of
one process that name the same space share their entries.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterator
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


@dataclass
class _Entry:
    value: str
    lease: int | None


@dataclass
class _MemoryLease:
    ttl_s: float
    expires: float  # time.monotonic(); inf while a session keeps it alive
    keys: set[str] = field(default_factory=set)


class _MemoryWatch(Watch):
    def __init__(self, space: MemoryStore, key: str, subtree: bool, callback: WatchCallback) -> None:
        super().__init__(key, subtree, callback)
        self._space = space

    def _stop(self) -> None:
        self._space.remove_watch(self)


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
            WatchEvent("put", key, entry.value) for key, entry in sorted(self.entries.items()) if watch.matches(key)
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
            if watch.matches(event.key):
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

    def _get(self, key: str) -> str | None:
        with self._space.locked():
            entry = self._space.entries.get(key)
            return None if entry is None else entry.value

    def _get_subtree(self, key: str) -> dict[str, str]:
        with self._space.locked():
            return {
                name: entry.value for name, entry in sorted(self._space.entries.items()) if name.startswith(key + "/")
            }

    def _delete(self, key: str) -> bool:
        with self._space.locked():
            if key not in self._space.entries:
                return False
            self._space.delete(key)
            return True

    def _clear_subtree(self, key: str) -> int:
        with self._space.locked():
            keys = sorted(name for name in self._space.entries if name.startswith(key + "/"))
            for name in keys:
                self._space.delete(name)
            return len(keys)

    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool:
        with self._space.locked():
            entry = self._space.entries.get(key)
            if (None if entry is None else entry.value) != expected:
                return False
            self._space.put(key, value, None if entry is None else entry.lease)
            return True

    def _look_after(self, key: str, value: str) -> None:
        """Do nothing: this store never loses data."""

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        watch = _MemoryWatch(self._space, key, subtree, callback)
        with self._space.locked():
            self._keep(watch)
            self._space.add_watch(watch)
        return watch

    def _grant_lease(self, ttl_s: float, lease_id: int | None, keep_alive: bool) -> Lease:
        with self._space.locked():
            self._check_open()
            if lease_id is None:
                lease_id = secrets.randbelow(2**63 - 1) + 1
            if lease_id in self._space.leases:
                raise LeaseExists(f"lease {lease_id:#x} already exists")
            self._space.grant(lease_id, ttl_s, math.inf if keep_alive else time.monotonic() + ttl_s)
            if keep_alive:
                self._kept.add(lease_id)
        return Lease(self, lease_id, ttl_s)

    def _refresh_lease(self, lease_id: int) -> bool:
        with self._space.locked():
            lease = self._space.leases.get(lease_id)
            if lease is None:
                return False
            if lease.expires < math.inf:
                lease.expires = time.monotonic() + lease.ttl_s
            return True

    def _revoke_lease(self, lease_id: int) -> None:
        with self._space.locked():
            self._kept.discard(lease_id)
            self._space.revoke(lease_id)

    def _lease_alive(self, lease_id: int) -> bool:
        with self._space.locked():
            return lease_id in self._space.leases

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
