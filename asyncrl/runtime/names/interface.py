"""Name resolve: how processes find each other and share versions, addresses and status.

It is a flat store of `key -> text`. Keys are `/`-separated, and a subtree is everything below a `/`, so clearing `t1`
does not affect `t10`. etcd implements this interface (etcd/). Tests have a store in memory, and one suite covers both.

All calls are synchronous and thread-safe; code on an event loop makes them through `asyncio.to_thread`. Every call has
a limit: the resolver's `timeout_s`, or an argument of the call (`wait`, `publish`, `watch`).
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 4096
MAX_VALUE_BYTES = 1_000_000  # etcd refuses requests above 1.5 MB
_CANCEL_LIMIT_S = 5.0  # cancelling a watch waits at most this long for a running callback
_PUBLISH_RETRY_S = 0.2  # pause of `publish` between two attempts
_MOST_REFRESHES_A_SECOND = 1000.0  # of all leases of a session
_MIN_READ_S = 0.2  # a wait with timeout 0 may still take this long to read the current value
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class NameResolveError(Exception):
    """Base class of name-resolve errors. Invalid names and values raise ValueError instead."""


class NameEntryExists(NameResolveError):
    """`add` without `replace` found an existing key."""


class NameEntryNotFound(NameResolveError, LookupError):
    """`get` found no such key."""


class LeaseNotFound(NameResolveError, LookupError):
    """The lease has expired, was revoked, or never existed."""


class LeaseExists(NameResolveError):
    """grant_lease was given a lease_id that is in use."""


class NameResolveTimeout(NameResolveError, TimeoutError):
    """A wait reached its limit, or the backend did not answer within its limit."""


class NameResolverClosed(NameResolveError):
    """The resolver was closed before or during the call."""


@dataclass(frozen=True)
class WatchEvent:
    """A key received a value, or was deleted."""

    kind: Literal["put", "delete"]
    key: str
    value: str = ""  # of a put


WatchCallback = Callable[[WatchEvent], None]


def normalize_name(name: str) -> str:
    """Return the key for a name, without superfluous slashes. Raises ValueError for an invalid name."""
    parts = [part for part in name.split("/") if part]
    if not parts:
        raise ValueError(f"name {name!r} is empty; use a path such as 'experiment/trial/key'")
    if any(part in {".", ".."} for part in parts):
        raise ValueError(f"name {name!r} has a part '.' or '..'; paths are not resolved, write the full name")
    if _CONTROL.search(name):
        raise ValueError(f"name {name!r} has a control character; remove it")
    key = "/".join(parts)
    if (size := len(_utf8(key, "name"))) > MAX_NAME_BYTES:
        raise ValueError(f"name {name[:40]!r}... has {size} bytes; at most {MAX_NAME_BYTES} are allowed")
    return key


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} {text[:40]!r} is not valid unicode: {error.reason}") from None


def _check_value(key: str, value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"value of {key!r} is {type(value).__name__}; values are text")
    if (size := len(_utf8(value, f"value of {key!r}:"))) > MAX_VALUE_BYTES:
        raise ValueError(
            f"value of {key!r} has {size} bytes; at most {MAX_VALUE_BYTES} are allowed: publish a path instead"
        )


def _check_ttl(ttl_s: float, lease_id: int | None) -> None:
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise ValueError(f"ttl_s is {ttl_s!r}; it must be a positive number of seconds")
    if lease_id is not None and not 0 < lease_id < 2**63:
        raise ValueError(f"lease_id is {lease_id!r}; it must be between 1 and 2**63 - 1")


class Watch:
    """A running watch. Callbacks run one at a time and in order; none starts after `cancel` has returned."""

    def __init__(self, key: str, subtree: bool, callback: WatchCallback) -> None:
        self.what = key + "/" if subtree else key
        self._callback = callback
        self._calling = threading.RLock()  # held while a callback runs
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the watch. Waits at most 5 s for a callback that another thread is running. May be called from a callback."""
        self._cancelled.set()
        self._stop()
        if self._calling.acquire(timeout=_CANCEL_LIMIT_S):
            self._calling.release()
        else:
            logger.warning("callback of the watch on %s is still running %g s after cancel", self.what, _CANCEL_LIMIT_S)

    def _stop(self) -> None:
        """Hook for the backend to end the watch."""

    def _tell(self, event: WatchEvent) -> None:
        """Call the callback, unless the watch is cancelled."""
        with self._calling:
            if self.cancelled:
                return
            try:
                self._callback(event)
            except Exception:
                logger.exception("callback of the watch on %s failed at %s", self.what, event)


def refresh_interval(ttl_s: float, num_leases: int, longest_s: float) -> float:
    """Return the seconds between two refreshes of a lease. Refreshes are frequent, so that a lease with a long time to
    live survives an outage of nearly that time. With very many leases they are less frequent.
    """
    return min(ttl_s / 3, max(longest_s, num_leases / _MOST_REFRESHES_A_SECOND))


class Lease:
    """A time to live that entries can be attached to. The session that has granted it refreshes it."""

    def __init__(self, resolver: NameResolver, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s  # time to live as granted; the backend may have rounded it up
        self._resolver = resolver

    def revoke(self) -> None:
        """End the lease and delete its entries. Revoking a lease that is gone has no effect."""
        self._resolver._check_open()
        self._resolver._revoke_lease(self.id)


@dataclass(eq=False)
class _Waiter:
    done: threading.Event = field(default_factory=threading.Event)
    value: str | None = None

    def __call__(self, event: WatchEvent) -> None:
        if event.kind == "put" and not self.done.is_set():
            self.value = event.value
            self.done.set()


class NameResolver(ABC):
    """One process's session with the store. Closing it revokes the leases that it keeps alive and ends its watches."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the attributes below
        self._waiters: set[_Waiter] = set()
        self._watches: list[Watch] = []

    # ------------------------------------------------------------------------------------------------------- entries

    def add(self, name: str, value: str, *, replace: bool = False, lease: int | None = None) -> None:
        """Put an entry. Without `replace`, an existing key raises NameEntryExists, and exactly one of several
        concurrent adds succeeds.

        The backend may lose the entry: it loses its data, or a lease expires in an outage. As long as this session is
        open, it then restores the entry, with the same lease if it had one. It does not overwrite an entry that another
        session has put meanwhile. Therefore each entry should belong to one session.

        `lease` may belong to another session; it must exist (LeaseNotFound). Competing sessions should write distinct
        values: an add whose reply was lost in an outage is repeated, and then treats an equal entry as its own.
        """
        key = self._key(name)
        _check_value(key, value)
        self._add(key, value, replace, lease)

    def publish(self, name: str, value: str, *, lease: int | None = None, limit_s: float) -> None:
        """Like `add` with `replace`, but retry during an outage, or until the holder of a lost lease restores it.

        Waits for: the backend and the lease. After limit_s, raises the error of the last attempt.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self.add(name, value, replace=True, lease=lease)
            except (NameResolveTimeout, LeaseNotFound) as error:
                if time.monotonic() >= deadline:
                    raise
                logger.warning("%s; retrying", error)
            self._closed.wait(_PUBLISH_RETRY_S)

    def adopt(self, name: str, value: str) -> None:
        """Adopt an entry without a lease that another session has put: this session restores it if the backend loses its data."""
        self._adopt(self._key(name), value)

    def get(self, name: str) -> str:
        """Return the value. Raises NameEntryNotFound."""
        key = self._key(name)
        entries = self._read(key, subtree=False)
        if key not in entries:
            raise NameEntryNotFound(f"name {key!r} does not exist")
        return entries[key]

    def get_subtree(self, name: str) -> dict[str, str]:
        """Return keys and values of all entries below `name`, sorted by key, without the entry of `name` itself."""
        return self._read(self._key(name), subtree=True)

    def delete(self, name: str) -> bool:
        """Delete one entry. Returns False if it did not exist."""
        return self._delete(self._key(name), subtree=False) > 0

    def clear_subtree(self, name: str) -> int:
        """Delete all entries below `name`, but not the entry of `name` itself. Returns their number."""
        return self._delete(self._key(name), subtree=True)

    def compare_and_swap(self, name: str, expected: str | None, value: str) -> bool:
        """Set `value` atomically if the current value is `expected` (None: if there is no entry). An existing entry
        keeps its lease.
        """
        key = self._key(name)
        _check_value(key, value)
        return self._compare_and_swap(key, expected, value)

    # ------------------------------------------------------------------------------------------------- waits, watches

    def wait(self, name: str, timeout_s: float) -> str:
        """Return the value as soon as the key exists. Raises NameResolveTimeout (a TimeoutError) at the limit.

        Waits for: a put of the key. Unblocked by: the put, the limit, close. Continues through outages of the backend.
        """
        key = self._key(name)
        deadline = time.monotonic() + timeout_s
        waiter = _Waiter()
        with self._lock:
            self._waiters.add(waiter)
        try:
            watch = self._watch(key, waiter, subtree=False, limit_s=max(timeout_s, _MIN_READ_S))
            try:
                waiter.done.wait(max(deadline - time.monotonic(), 0.0))
            finally:
                watch.cancel()
        except NameResolveTimeout as error:
            raise NameResolveTimeout(f"name {key!r} could not be read within {timeout_s:g} s: {error}") from error
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        if waiter.value is not None:
            return waiter.value
        self._check_open()
        raise NameResolveTimeout(f"name {key!r} did not appear within {timeout_s:g} s")

    def watch(
        self, name: str, callback: WatchCallback, *, subtree: bool = False, limit_s: float | None = None
    ) -> Watch:
        """Report the current state to `callback` as puts (before this returns), then every change, until cancelled.

        limit_s: limit for reading the state; default: the limit of operations. After an outage of the backend, a watch
        reports only the differences between the state before and after the outage. It holds deletes back for some
        seconds then, so that entries which the backend lost and their owners restore cause no event. Callbacks run in
        threads of the resolver or of the session that changes an entry. They must be short and pass the event to their
        own loop. An exception in a callback is logged; the watch continues.
        """
        return self._watch(self._key(name), callback, subtree=subtree, limit_s=limit_s)

    # -------------------------------------------------------------------------------------------------------- leases

    def grant_lease(self, ttl_s: float, *, lease_id: int | None = None) -> Lease:
        """Grant a new lease, with the given id if it is unused (LeaseExists). Its entries are deleted when it ends.

        This session refreshes the lease until the session is closed. After an outage it grants the lease again under
        the same id and restores its own entries (other sessions restore theirs).
        """
        self._check_open()
        _check_ttl(ttl_s, lease_id)
        return self._grant_lease(ttl_s, lease_id)

    def close(self) -> None:
        """End watches and waits, and revoke the leases kept alive. A second close has no effect."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for waiter in self._waiters:
                waiter.done.set()
        for watch in self._watches:
            watch.cancel()
        self._close()

    def __enter__(self) -> NameResolver:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise NameResolverClosed("name resolver is closed")

    def _keep(self, watch: Watch) -> None:
        """Register a watch, so that `close` cancels it."""
        with self._lock:
            self._check_open()
            self._watches = [known for known in self._watches if not known.cancelled] + [watch]

    def _key(self, name: str) -> str:
        self._check_open()
        return normalize_name(name)

    # ------------------------------------------------------------------ backend operations; keys are already normalized

    @abstractmethod
    def _add(self, key: str, value: str, replace: bool, lease: int | None) -> None: ...

    @abstractmethod
    def _read(self, key: str, *, subtree: bool) -> dict[str, str]:
        """Return the entries of the key, or of its subtree, sorted by key."""

    @abstractmethod
    def _delete(self, key: str, *, subtree: bool) -> int:
        """Delete the entry of the key, or its subtree. Returns the number of entries."""

    @abstractmethod
    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool: ...

    @abstractmethod
    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        """Deliver the current state (read within limit_s; None: the resolver's own limit), then changes."""

    @abstractmethod
    def _adopt(self, key: str, value: str) -> None: ...

    @abstractmethod
    def _grant_lease(self, ttl_s: float, lease_id: int | None) -> Lease: ...

    @abstractmethod
    def _revoke_lease(self, lease_id: int) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...
