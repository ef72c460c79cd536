"""Keeps a session's leases alive in etcd, and restores leases (under the same id) and entries that a server has lost.

Every session restores the entries that it has put. Entries under its own lease are restored at once. Entries under
another session's lease (the launcher holds the workers' leases) are restored as soon as the lease's holder has restored
the lease. Entries without a lease are restored if the server has lost its data.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from asyncrl.runtime.names.etcd.store import STORE_ID_KEY, STREAM_RETRY_S, EtcdStore, WatchStream
from asyncrl.runtime.names.interface import (
    LeaseNotFound,
    NameEntryExists,
    NameResolverClosed,
    NameResolveTimeout,
    refresh_interval,
)

logger = logging.getLogger(__name__)

_LOST_CHECK_S = 0.5  # between two checks while a lease or its entries are lost
# when another session's lease has been lost for this long, this session forgets it and its own entries under it
_FOREIGN_FORGET_S = 120.0
_JOIN_LIMIT_S = 2.0
_EVENT_DELETE = 1
_NO_LEASE = 0


@dataclass(frozen=True)
class LeaseIntervals:
    """How often a session checks its leases. Shorter intervals detect a loss earlier but cause more requests to etcd."""

    refresh_s: float = 3.0  # between two refreshes of a lease that this session keeps alive; see refresh_interval
    check_s: float = 5.0  # between two checks whether another session's lease with entries of ours was lost


USUAL = LeaseIntervals()


@dataclass
class _HeldLease:
    """A lease that this session keeps alive or that its entries use. Id 0 stands for the entries without a lease."""

    id: int
    ttl_s: int = 0
    kept: bool = False  # True: this session refreshes the lease; False: another session does
    due: float = -math.inf  # time.monotonic(): when to refresh or check it
    lost_since: float | None = None  # since when the server lacks the lease or our entries; None: it has them
    entries: dict[str, str] = field(default_factory=dict)

    def usual_s(self, num_leases: int, intervals: LeaseIntervals) -> float:
        """Return the seconds until it is due again, in a session with this many leases."""
        if self.id == _NO_LEASE:
            return math.inf
        return refresh_interval(self.ttl_s, num_leases, intervals.refresh_s) if self.kept else intervals.check_s


class LeaseKeeper:
    """Keeps leases alive on one thread, started with the first lease or entry. The thread watches the store's id, so it
    detects an outage at once.

    Another session's lease may disappear and come back between two checks, without our entries. Therefore the keeper
    puts a key of its own, the mark, under the lease besides the entries. No other session deletes the mark: if it is
    missing, all entries are put again.
    """

    def __init__(self, store: EtcdStore, closed: threading.Event, store_id: bytes, intervals: LeaseIntervals) -> None:
        """store_id: the first one that the session has read."""
        self._store = store
        self._intervals = intervals
        self._closed = closed
        self._marks = f"asyncrl\0session/{secrets.token_hex(8)}/".encode()
        self._lock = threading.Lock()
        self._leases: dict[int, _HeldLease] = {}
        self._lease_of: dict[str, int] = {}  # key of an entry -> the lease to which the entry belongs
        self._wakes_at = -math.inf  # the thread checks leases at this time at the latest
        self.losses = 0  # number of losses: an entry put while this changes may have to be put again
        self._store_id = store_id
        self._thread: threading.Thread | None = None
        self._stream: WatchStream | None = None
        self._changed = False

    # called from users' threads

    def hold(self, lease_id: int, ttl_s: int) -> None:
        """Keep a lease alive that has just been granted."""
        with self._lock:
            self._give_up(lease_id)
            held = self._leases[lease_id] = _HeldLease(lease_id, ttl_s, kept=True)
            held.due = time.monotonic() + held.usual_s(len(self._leases), self._intervals)
            if held.due < self._wakes_at or self._thread is None:
                self._wake()

    def release(self, lease_id: int) -> None:
        with self._lock:
            self._give_up(lease_id)

    @property
    def kept(self) -> list[int]:
        with self._lock:
            return [lease.id for lease in self._leases.values() if lease.kept]

    def keeps(self, lease_id: int) -> bool:
        with self._lock:
            return lease_id in self._leases and self._leases[lease_id].kept

    def record(self, key: str, value: str, lease_id: int | None, losses: int) -> None:
        """Record an entry that was put. If a loss has occurred since the caller read `losses`, the entry is put again."""
        with self._lock:
            self._drop(key)
            lease_id = lease_id or _NO_LEASE
            is_new = lease_id not in self._leases
            held = self._leases.setdefault(lease_id, _HeldLease(lease_id))
            held.entries[key], self._lease_of[key] = value, lease_id
            if self.losses != losses:
                held.lost_since, held.due = time.monotonic(), -math.inf
            if is_new or self.losses != losses:
                self._wake()

    def swapped(self, key: str, value: str) -> None:
        with self._lock:
            if key in self._lease_of:
                self._leases[self._lease_of[key]].entries[key] = value

    def forget(self, key: str, subtree: bool = False) -> None:
        """Forget an entry, or the entries below it, after a delete."""
        with self._lock:
            for name in [name for name in self._lease_of if name.startswith(key + "/")] if subtree else [key]:
                self._drop(name)

    def _drop(self, key: str) -> None:
        lease_id = self._lease_of.pop(key, None)
        if lease_id is not None:
            del self._leases[lease_id].entries[key]

    def _give_up(self, lease_id: int) -> None:
        held = self._leases.pop(lease_id, None)
        for key in held.entries if held is not None else ():
            del self._lease_of[key]

    def join(self) -> None:
        """Wait a short time for the thread to end, after the session is closed."""
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_LIMIT_S)

    def _wake(self) -> None:
        self._changed = True
        if self._stream is not None:
            self._stream.cancel()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="etcd leases", daemon=True)
            self._thread.start()

    # run by the keeper's thread

    def _run(self) -> None:
        """Consumes nothing; produces refreshed leases and restored entries.

        Waits for: the next due lease, while watching the store's id and the marks; 0.1 s after an outage,
        1.1 s after another failure. Unblocked by: a new lease, an outage, a lost store, a lost mark, close.
        """
        while not self._closed.is_set():
            try:
                revision = self._check_store()
                self._refresh_due()
                self._wait_until_due(revision)
                continue
            except NameResolverClosed:
                return
            except NameResolveTimeout as error:
                logger.debug("leases: %s", error)  # the connection has logged it
            except Exception:
                if not self._closed.is_set():
                    logger.exception("refreshing leases failed; retrying")
                    self._closed.wait(1.0)
            self._closed.wait(STREAM_RETRY_S)

    def _check_store(self) -> int:
        """Mark all leases and entries as lost if the server has lost its data. Returns the revision from which to watch."""
        store_id, revision = self._store.read_store_id()
        with self._lock:
            self._changed = False
            if self._store_id != store_id:
                logger.warning("etcd has lost its data: restoring leases and entries")
                self.losses += 1
                for held in self._leases.values():
                    held.lost_since, held.due = time.monotonic(), -math.inf
            self._store_id = store_id
        return revision

    def _refresh_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [held for held in self._leases.values() if held.due <= now]
        ttls = self._store.refresh([held.id for held in due if held.kept])
        for held in sorted(due, key=lambda held: not held.kept):
            if held.kept and ttls[held.id] <= 0:
                self.restore(held.id)
            elif not held.kept and held.id != _NO_LEASE:
                self._look_at(held, now)
            elif held.lost_since is not None:
                self._put_entries(held)
        with self._lock:
            for held in due:
                usual_s = held.usual_s(len(self._leases), self._intervals)
                held.due = now + (usual_s if held.lost_since is None else _LOST_CHECK_S)

    def restore(self, lease_id: int) -> None:
        """Grant a kept lease again under its id, and put its entries again. Also called from users' threads."""
        with self._lock:
            held = self._leases.get(lease_id)
            if held is None or not held.kept:
                return
            self.losses += 1
            held.lost_since = time.monotonic()
        logger.warning("etcd has lost lease %#x: granting it again", lease_id)
        self._store.grant(lease_id, held.ttl_s, again=True)
        self._put_entries(held)
        if not self.keeps(lease_id):  # revoked meanwhile
            self._store.revoke(lease_id)

    def _look_at(self, held: _HeldLease, now: float) -> None:
        """Check another session's lease. If it was lost and granted again, put our entries again."""
        keys = self._store.lease_keys(held.id)
        if keys is None:
            with self._lock:
                if held.lost_since is None:
                    held.lost_since = now
                if not held.entries or now - held.lost_since > _FOREIGN_FORGET_S:
                    self._give_up(held.id)
        elif held.lost_since is not None or self._mark(held) not in keys:
            self._put_entries(held)

    def _mark(self, held: _HeldLease) -> bytes:
        return self._marks + f"{held.id:x}".encode()

    def _put_entries(self, held: _HeldLease) -> None:
        """Put the missing entries. An entry that another session has put meanwhile stays, and no longer belongs to us."""
        with self._lock:
            held.lost_since = None
            entries = dict(held.entries)
        try:
            # The mark goes first: if the lease is lost and restored in between, the mark disappears with it. Put last,
            # the mark would confirm entries that are lost.
            if not held.kept and held.id != _NO_LEASE:
                self._store.put(self._mark(held).decode(), "", held.id)
            for key, value in entries.items():
                try:
                    self._store.create(key, value, held.id or None, again=True)
                except NameEntryExists:
                    logger.warning("name %r was put by another session; leaving it", key)
                    with self._lock:
                        if held.entries.get(key) == value:
                            self._drop(key)
        except (LeaseNotFound, NameResolveTimeout) as error:
            with self._lock:
                held.lost_since = time.monotonic()
            if isinstance(error, NameResolveTimeout):
                raise

    def _wait_until_due(self, revision: int) -> None:
        with self._lock:
            due = min((held.due for held in self._leases.values()), default=math.inf)
            timeout_s = min(max(due - time.monotonic(), 0.001), 3600.0)
            self._wakes_at = time.monotonic() + timeout_s
            if self._changed or self._closed.is_set():
                return
            marks = (self._marks, self._marks[:-1] + b"0")
            stream = self._stream = self._store.open_watch([(STORE_ID_KEY, b""), marks], revision, timeout_s)
        try:
            for response in stream:
                if any(self._concerns(event) for event in response.events):
                    break
            if stream.broken:
                self._closed.wait(STREAM_RETRY_S)
        finally:
            stream.cancel()
            with self._lock:
                self._stream = None

    def _concerns(self, event: Any) -> bool:
        """Return whether the event means that the store is a new one, or that a lease with our entries has ended."""
        if event.type != _EVENT_DELETE:
            return bool(event.kv.key == STORE_ID_KEY)
        with self._lock:
            for held in self._leases.values():
                if event.kv.key == self._mark(held):
                    held.due = -math.inf
                    return True
        return False
