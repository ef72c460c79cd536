"""Name resolve: how processes find each other, and how versions, addresses and status reach whoever waits for them.

A flat store of `key -> text`. Keys are `/`-separated and a subtree is what lies below a `/`, so that clearing `t1` leaves
`t10`. There are two stores behind one interface: etcd (etcd/; between processes and hosts) and memory (memory.py; between
threads of one process, for tests). One test suite runs on both.

Everything is synchronous and thread-safe; code on an event loop calls it through `asyncio.to_thread`. No call waits without
a limit: an operation gives up after the resolver's `timeout_s`, `wait` after its own.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 4096
MAX_VALUE_BYTES = 1_000_000  # etcd refuses requests above 1.5 MB
_CANCEL_LIMIT_S = 5.0  # cancelling a watch waits at most this long for a callback that is running
_MAX_PENDING_EVENTS = 4096  # past it, a watch whose callback lags keeps only the newest event of each key
_PUBLISH_RETRY_S = 0.2  # pause of `publish` between two tries
_MOST_REFRESHES_A_SECOND = 1000.0  # of all leases of a session
_MIN_READ_S = 0.2  # a wait of no time at all may take this long to read what is there
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class NameResolveError(Exception):
    """Base of what name resolve raises, besides ValueError for names and values that cannot be."""


class NameEntryExists(NameResolveError):
    """add without replace met an existing key."""


class NameEntryNotFound(NameResolveError, LookupError):
    """get met no key."""


class LeaseNotFound(NameResolveError, LookupError):
    """The lease has expired, was revoked or never was."""


class LeaseExists(NameResolveError):
    """grant_lease with a lease_id that is taken."""


class NameResolveTimeout(NameResolveError, TimeoutError):
    """A wait reached its limit, or the backend did not answer within its own."""


class NameResolverClosed(NameResolveError):
    """The resolver was closed, before the call or in the middle of it."""


@dataclass(frozen=True)
class WatchEvent:
    """A key got a value, or is gone."""

    kind: Literal["put", "delete"]
    key: str
    value: str = ""  # of a put


WatchCallback = Callable[[WatchEvent], None]


def normalize_name(name: str) -> str:
    """The key a name stands for: superfluous slashes go. Raises ValueError for what cannot be a key."""
    parts = [part for part in name.split("/") if part]
    if not parts:
        raise ValueError(f"name {name!r} is empty; use a path such as 'experiment/trial/key'")
    if any(part in {".", ".."} for part in parts):
        raise ValueError(f"name {name!r} has a part '.' or '..'; paths are not resolved, spell the name out")
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
    """A running watch. Callbacks come one at a time and in order; none starts after `cancel` has returned."""

    def __init__(self, key: str, subtree: bool, callback: WatchCallback) -> None:
        self.what = key + "/" if subtree else key
        self._callback = callback
        self._condition = threading.Condition()
        self._pending: deque[WatchEvent] = deque()
        self._delivering: int | None = None  # the thread that is running callbacks
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def matches(self, key: str) -> bool:
        """Whether the watch is about this key, which never ends with a slash."""
        return key.startswith(self.what) if self.what.endswith("/") else key == self.what

    def cancel(self) -> None:
        """End the watch; waits (5 s at most) for a callback that another thread is running. May be called from a callback."""
        self._cancelled.set()
        self._stop()
        with self._condition:
            self._pending.clear()
            if self._delivering not in (None, threading.get_ident()) and not self._condition.wait_for(
                lambda: self._delivering is None, timeout=_CANCEL_LIMIT_S
            ):
                logger.warning("callback of the watch on %s still runs %g s after cancel", self.what, _CANCEL_LIMIT_S)

    def _stop(self) -> None:
        """What the backend does to end the watch."""

    def _enqueue(self, events: Sequence[WatchEvent]) -> None:
        """Line events up; somebody must call _deliver afterwards, without holding locks."""
        with self._condition:
            if self._cancelled.is_set():
                return
            self._pending.extend(events)
            if len(self._pending) > _MAX_PENDING_EVENTS:
                self._pending = deque({event.key: event for event in self._pending}.values())

    def _deliver(self) -> None:
        """Run callbacks until none is pending. Where another thread is at it, that one will see to what was lined up."""
        with self._condition:
            if self._delivering is not None:
                return
            self._delivering = threading.get_ident()
        try:
            while (event := self._next_event()) is not None:
                try:
                    self._callback(event)
                except Exception:
                    logger.exception("callback of the watch on %s failed at %s", self.what, event)
        except BaseException:  # such as KeyboardInterrupt: whoever comes next goes on
            self._end_delivery()
            raise

    def _next_event(self) -> WatchEvent | None:
        with self._condition:  # one critical section, so that nothing lined up meanwhile is left behind
            if self._pending and not self._cancelled.is_set():
                return self._pending.popleft()
            self._end_delivery()
            return None

    def _end_delivery(self) -> None:
        with self._condition:
            self._delivering = None
            self._condition.notify_all()


def refresh_interval(ttl_s: float, num_leases: int, longest_s: float) -> float:
    """Seconds between two refreshes of a lease: often enough that a long one outlives an outage of nearly its whole time; of very
    many leases less often."""
    return min(ttl_s / 3, max(longest_s, num_leases / _MOST_REFRESHES_A_SECOND))


class Lease:
    """A time to live that entries hang on. Kept leases are refreshed by the resolver that granted them."""

    def __init__(self, resolver: NameResolver, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s  # as granted; a backend may round it up
        self._resolver = resolver

    def refresh(self) -> bool:
        """Begin the time to live anew. False if the lease is gone, and its entries with it."""
        self._resolver._check_open()
        return self._resolver._refresh_lease(self.id)

    def revoke(self) -> None:
        """End the lease and delete its entries. Revoking one that is gone changes nothing."""
        self._resolver._check_open()
        self._resolver._revoke_lease(self.id)

    @property
    def alive(self) -> bool:
        """Whether the store knows the lease now (a round trip)."""
        self._resolver._check_open()
        return self._resolver._lease_alive(self.id)


@dataclass(eq=False)
class _Waiter:
    done: threading.Event = field(default_factory=threading.Event)
    value: str | None = None

    def __call__(self, event: WatchEvent) -> None:
        if event.kind == "put" and not self.done.is_set():
            self.value = event.value
            self.done.set()


class NameResolver(ABC):
    """One process's session with the store. Close it to revoke the leases it keeps and to end its watches."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of those below
        self._waiters: set[_Waiter] = set()
        self._watches: list[Watch] = []

    # ------------------------------------------------------------------------------------------------------- entries

    def add(self, name: str, value: str, *, replace: bool = False, lease: int | None = None) -> None:
        """Put an entry. Without replace an existing key raises NameEntryExists, and of concurrent adds exactly one wins.

        What a backend loses (its data, or a lease in an outage) this session puts again, unless somebody else has, for as long
        as it is open: with its lease, or without one. So an entry should be of one session.

        `lease` may be of another session; it must exist (LeaseNotFound). Contenders should write values that tell them
        apart: an add whose answer was lost in an outage is repeated, and takes an entry equal to its own for its own.
        """
        key = self._key(name)
        _check_value(key, value)
        self._add(key, value, replace, lease)

    def publish(self, name: str, value: str, *, lease: int | None = None, limit_s: float) -> None:
        """`add`, replacing, again while the backend is out, or while it has lost the lease and its holder brings it back.

        Waits for: the backend and the lease. Raises what the last try met after limit_s.
        """
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self.add(name, value, replace=True, lease=lease)
            except (NameResolveTimeout, LeaseNotFound) as error:
                if time.monotonic() >= deadline:
                    raise
                logger.warning("%s; trying again", error)
            self._closed.wait(_PUBLISH_RETRY_S)

    def look_after(self, name: str, value: str) -> None:
        """Take an entry without a lease, which another session has put, for one of this session's: it is put again should
        the backend lose its data."""
        self._look_after(self._key(name), value)

    def add_subentry(self, name: str, value: str, *, lease: int | None = None) -> str:
        """Put an entry under a new unique key below name, and return the key."""
        key = self._key(f"{name}/{uuid.uuid4().hex}")
        self.add(key, value, lease=lease)
        return key

    def get(self, name: str) -> str:
        """The value. Raises NameEntryNotFound."""
        key = self._key(name)
        value = self._get(key)
        if value is None:
            raise NameEntryNotFound(f"name {key!r} does not exist")
        return value

    def get_subtree(self, name: str) -> dict[str, str]:
        """Keys and values of all entries below name, sorted by key; the entry of that very name is not among them."""
        return self._get_subtree(self._key(name))

    def find_subtree(self, name: str) -> list[str]:
        """The keys of get_subtree."""
        return list(self.get_subtree(name))

    def delete(self, name: str) -> bool:
        """Delete one entry. False if there was none."""
        return self._delete(self._key(name))

    def clear_subtree(self, name: str) -> int:
        """Delete all entries below name (not the entry of that very name); how many there were."""
        return self._clear_subtree(self._key(name))

    def compare_and_swap(self, name: str, expected: str | None, value: str) -> bool:
        """Atomically set value if the entry's value is expected (None: if there is no entry). An entry keeps its lease."""
        key = self._key(name)
        _check_value(key, value)
        return self._compare_and_swap(key, expected, value)

    # ------------------------------------------------------------------------------------------------- waits, watches

    def wait(self, name: str, timeout_s: float) -> str:
        """The value, as soon as there is one. Raises NameResolveTimeout (a TimeoutError) at the limit.

        Waits for: a put of the key. Unblocked by: the put, the limit, close. Rides over outages of the backend.
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
        """Tell callback the current state as puts (before this returns), then every change, until cancelled.

        limit_s: how long to try to read the state; default: as any operation. Of an outage of the backend a watch tells
        only how the state after it differs from the one before; deletes some seconds later, so that what the backend lost
        and whoever put it brings back is no news. Callbacks run in threads of the resolver or of whoever changes an entry:
        they must be brief and hand over to their own loop. One that raises is logged; the watch goes on.
        """
        return self._watch(self._key(name), callback, subtree=subtree, limit_s=limit_s)

    # -------------------------------------------------------------------------------------------------------- leases

    def grant_lease(self, ttl_s: float, *, lease_id: int | None = None, keep_alive: bool = True) -> Lease:
        """A new lease, with the given id if it is free (LeaseExists). Entries put under it go when it ends.

        keep_alive: this session refreshes it until it is closed, and after an outage grants it again under the same id
        and puts this session's entries under it again (other sessions do so with theirs). Otherwise somebody calls
        `refresh`, or it expires.
        """
        self._check_open()
        _check_ttl(ttl_s, lease_id)
        return self._grant_lease(ttl_s, lease_id, keep_alive)

    def close(self) -> None:
        """End watches and waits, revoke kept leases. A second close changes nothing."""
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
        """Have a watch cancelled by close."""
        with self._lock:
            self._check_open()
            self._watches = [known for known in self._watches if not known.cancelled] + [watch]

    def _key(self, name: str) -> str:
        self._check_open()
        return normalize_name(name)

    # --------------------------------------------------------------------- what a backend does; keys are normalised here

    @abstractmethod
    def _add(self, key: str, value: str, replace: bool, lease: int | None) -> None: ...

    @abstractmethod
    def _get(self, key: str) -> str | None: ...

    @abstractmethod
    def _get_subtree(self, key: str) -> dict[str, str]: ...

    @abstractmethod
    def _delete(self, key: str) -> bool: ...

    @abstractmethod
    def _clear_subtree(self, key: str) -> int: ...

    @abstractmethod
    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool: ...

    @abstractmethod
    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        """Deliver the current state (reading it takes at most limit_s; None: the resolver's own limit), then changes."""

    @abstractmethod
    def _look_after(self, key: str, value: str) -> None: ...

    @abstractmethod
    def _grant_lease(self, ttl_s: float, lease_id: int | None, keep_alive: bool) -> Lease: ...

    @abstractmethod
    def _refresh_lease(self, lease_id: int) -> bool: ...

    @abstractmethod
    def _revoke_lease(self, lease_id: int) -> None: ...

    @abstractmethod
    def _lease_alive(self, lease_id: int) -> bool: ...

    @abstractmethod
    def _close(self) -> None: ...
