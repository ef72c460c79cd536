"""Writes of the launcher to name resolve, on a thread, so that the launcher's loop never waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from asyncrl.launch.hosts.watch_cache import READ_EVERY_S, WatchCache
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import Lease, LeaseNotFound, NameResolveError, NameResolver

_RETRY_S = 0.5  # delay after a failed call before the next one
_STOP_LIMIT_S = 2.0


class NameWriter:
    """Writes the newest value of each key and revokes leases, on its own thread, which also compares watch caches with reads.

    consumes: values from `put`, leases from `revoke`. produces: entries.
    waits for: work, at most READ_EVERY_S; name resolve, which answers or fails within its limit. In an outage it tries again.
    unblocked by: the launcher; `close`; the closing of the resolver.
    """

    def __init__(self, resolver: NameResolver, clock: Clock) -> None:
        self._resolver, self._clock = resolver, clock
        self._condition = threading.Condition()
        self._due: dict[str, tuple[str | None, int | None]] = {}  # by key: its value and its lease
        self._revoked: deque[Lease] = deque()
        self._caches: dict[str, WatchCache] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="name writer", daemon=True)
        self._thread.start()

    def put(self, key: str, value: str | None, lease: int | None = None) -> None:
        """Write a value, instead of one that is not written yet. value: None: delete the key. An entry whose lease has ended
        meanwhile is not written."""
        with self._condition:
            self._due[key] = value, lease
            self._condition.notify()

    def revoke(self, lease: Lease) -> None:
        with self._condition:
            self._revoked.append(lease)
            self._condition.notify()

    def compare(self, key: str, cache: WatchCache) -> None:
        """Compare this cache of a subtree with reads from now on."""
        with self._condition:
            self._caches[key] = cache

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(_STOP_LIMIT_S)

    def _run(self) -> None:
        next_read = self._clock.monotonic() + READ_EVERY_S
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closed or self._due or self._revoked, max(0.0, next_read - self._clock.monotonic())
                )
                if self._closed:
                    return
                due, revoked, caches = dict(self._due), list(self._revoked), dict(self._caches)
            try:
                if self._clock.monotonic() >= next_read:  # first, because an etcd without space answers reads only
                    next_read = self._clock.monotonic() + READ_EVERY_S
                    for key, cache in caches.items():
                        cache.read(self._resolver.get_subtree(key))
                for lease in revoked:
                    lease.revoke()
                    with self._condition:
                        self._revoked.remove(lease)
                for key, (value, lease_id) in due.items():
                    self._write(key, value, lease_id)
            except NameResolveError:
                with self._condition:
                    self._condition.wait_for(lambda: self._closed, timeout=_RETRY_S)

    def _write(self, key: str, value: str | None, lease: int | None) -> None:
        if value is None:
            self._resolver.delete(key)
        else:
            with contextlib.suppress(LeaseNotFound):  # the process has ended since
                self._resolver.add(key, value, replace=True, lease=lease)
        with self._condition:
            if self._due.get(key) == (value, lease):
                del self._due[key]
