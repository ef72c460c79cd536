"""The requests of name resolve to an etcd server, each one call within a limit.

A call goes to a server that answers: it is retried, and moves to another server if one is down. watch.py (watches),
leases.py (leases) and resolver.py (the resolver) are built on these calls.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from asyncrl.protocol.errors import ErrorClass, class_of_code
from asyncrl.runtime.names.etcd.access import EtcdAccess, Login
from asyncrl.runtime.names.etcd.api import Api, load_api
from asyncrl.runtime.names.interface import (
    LeaseExists,
    LeaseNotFound,
    NameEntryExists,
    NameResolveError,
    NameResolverClosed,
    NameResolveTimeout,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
KeyRange = tuple[bytes, bytes]

# Not below any name, because names have no control characters. The value is a random id that is created once. A changed
# id means that the server has lost its data.
STORE_ID_KEY = b"asyncrl\0store_id"
STREAM_RETRY_S = 0.1  # pause before a broken stream is reopened
_RETRY_S = 0.05  # pause after every endpoint has failed
_REQUIRE_LEADER = (("hasleader", "true"),)  # on a member cut off from its cluster, streams end instead of going silent
_CHANNEL_OPTIONS = (
    # gRPC's own reconnect back-off grows to two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # despite its name, gRPC uses it as the limit of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 300),
    # Only these pings let an open stream detect a frozen server. etcd allows one every 5 s
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # newer gRPC uses this, not the timeout above; its default is a minute
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a watch may see no change for hours
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # sessions of one process do not share a connection
    ("grpc.enable_http_proxy", 0),
)


def one_key(key: str) -> KeyRange:
    return key.encode(), b""


def below(key: str) -> KeyRange:
    """Return the range of all keys below `key`: from `key/` to `key0`, exclusive ('0' is the character after '/')."""
    return key.encode() + b"/", key.encode() + b"0"


def text(data: bytes) -> str:
    return data.decode(errors="replace")  # our data is UTF-8; foreign data must not end a watch


class Stubs:
    """The channel of one endpoint; it reconnects automatically."""

    def __init__(self, api: Api, endpoint: str, login: Login) -> None:
        self.endpoint = endpoint
        self.channel = login.access.open_channel(api, endpoint, _CHANNEL_OPTIONS)
        with_token = login.wrap(self.channel)
        self.kv = api.rpc.KVStub(with_token)
        self.lease = api.rpc.LeaseStub(with_token)
        self.watch = api.rpc.WatchStub(with_token)


class Connection:
    """Calls the endpoint that answers. Shared by all threads of a session."""

    def __init__(
        self, api: Api, endpoints: Sequence[str], timeout_s: float, closed: threading.Event, access: EtcdAccess
    ) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._closed = closed
        self._lock = threading.Lock()
        self.login = Login(api, access)
        self._stubs = [Stubs(api, endpoint, self.login) for endpoint in endpoints]
        self._current = 0
        self._down = False

    @property
    def stubs(self) -> Stubs:
        return self._stubs[self._current]

    def call(self, what: str, function: Callable[[Stubs, float], T], limit_s: float | None = None) -> tuple[T, bool]:
        """Return the result of function(stubs, limit in seconds) at an endpoint that answers, and whether an earlier
        attempt failed.

        A failed attempt may still have taken effect. Waits for: an answer, from each endpoint in turn. Raises
        NameResolveTimeout after limit_s (default: the session's), and gRPC's error if the server refuses.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        failures: dict[str, str] = {}
        attempt = 0
        while True:
            if self._closed.is_set():
                raise NameResolverClosed(f"name resolver was closed during {what}")
            stubs = self.stubs
            # the endpoints not tried in this round share the remaining time, so that a frozen one leaves time for the
            # others
            share_s = max(deadline - time.monotonic(), 0.001) / (len(self._stubs) - attempt % len(self._stubs))
            token = ""
            try:
                self.login.enter(stubs.channel, share_s)
                token = self.login.token
                result = function(stubs, share_s)
            except self._api.grpc.RpcError as error:
                if class_of_code(error.code().name) is ErrorClass.PERMANENT:
                    # The refused call changed nothing. Even the next token may be outdated before it is used, so repeat
                    # until the deadline
                    if self.login.is_stale(error, token) and time.monotonic() < deadline:
                        continue
                    raise
                failures[stubs.endpoint] = f"{error.code().name}: {error.details()}"
                self.failed(stubs, failures[stubs.endpoint])
            except ValueError as error:  # gRPC raises it if the channel was closed meanwhile
                if not self._closed.is_set():
                    raise
                raise NameResolverClosed(f"name resolver was closed during {what}") from error
            else:
                self._answered(stubs)
                return result, attempt > 0
            attempt += 1
            if time.monotonic() >= deadline:
                seen = "; ".join(f"{endpoint}: {failure}" for endpoint, failure in failures.items())
                raise NameResolveTimeout(f"etcd did not answer {what} within {limit_s:g} s ({seen})")
            if attempt % len(self._stubs) == 0:
                self._closed.wait(min(_RETRY_S, max(deadline - time.monotonic(), 0.0)))

    def failed(self, stubs: Stubs, reason: str) -> None:
        """Record that this endpoint failed, and switch to the next one."""
        with self._lock:
            if stubs is self.stubs:
                self._current = (self._current + 1) % len(self._stubs)
            if not self._down and not self._closed.is_set():
                self._down = True
                logger.warning("etcd at %s does not answer (%s); retrying", stubs.endpoint, reason)

    def _answered(self, stubs: Stubs) -> None:
        if self._down:
            with self._lock:
                self._down = False
            logger.warning("etcd at %s answers again", stubs.endpoint)

    def close(self) -> None:
        for stubs in self._stubs:
            stubs.channel.close()


class WatchStream:
    """A stream of changes to some keys, from a revision on, until the limit, the server or `cancel` ends it.

    waits for: a change (gRPC's keepalive detects a frozen server). unblocked by: a change, an outage, the limit,
    cancel.
    """

    def __init__(self, api: Api, connection: Connection, stubs: Stubs, call: Any, end: float | None) -> None:
        """end: the limit in time.monotonic() terms; None: no limit."""
        self._api, self._connection, self._stubs, self._call, self._end = api, connection, stubs, call, end
        self._prefix_bytes = len(connection.login.access.key_prefix)
        self._cancelled = False
        self.broken = False  # an outage or the server has ended the stream: the caller must read the state again

    def __iter__(self) -> Iterator[Any]:
        try:
            for response in self._call:
                if response.canceled:  # compacted, or without a leader
                    logger.debug("the server ended a watch: %s", response.cancel_reason)
                    break
                if self._prefix_bytes:
                    for event in response.events:
                        event.kv.key = event.kv.key[self._prefix_bytes :]
                yield response
        except self._api.grpc.RpcError as error:
            # At the limit, the stream ends by its deadline; either side may notice first
            if self._cancelled or (self._end is not None and time.monotonic() > self._end - STREAM_RETRY_S):
                return
            if not self._connection.login.is_stale(error, self._connection.login.token):
                self._connection.failed(self._stubs, f"{error.code().name}: {error.details()}")
        self.broken = True

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()


class EtcdStore:
    """The operations on one connection. Every call raises NameResolveTimeout if no server answers in time, and
    NameResolverClosed after close.

    Keys are relative to the prefix of `access`.
    """

    def __init__(self, endpoints: Sequence[str], timeout_s: float, closed: threading.Event, access: EtcdAccess) -> None:
        self._timeout_s = timeout_s
        self._api = load_api()
        self._connection = Connection(self._api, endpoints, timeout_s, closed, access)
        self._prefix = access.key_prefix

    def close(self) -> None:
        self._connection.close()

    # entries

    def put(self, key: str, value: str, lease: int | None) -> None:
        request = self._api.rpc.PutRequest(key=self._raw(key.encode()), value=value.encode(), lease=lease or 0)
        self._call(f"put {key!r}", key, lambda stubs, limit_s: stubs.kv.Put(request, timeout=limit_s), lease=lease)

    def create(self, key: str, value: str, lease: int | None, again: bool = False) -> None:
        """Put the entry unless the key exists. An existing equal entry counts as success if an earlier attempt of this call may
        have put it, or, with `again`, an earlier call.
        """
        put = self._api.rpc.PutRequest(key=self._raw(key.encode()), value=value.encode(), lease=lease or 0)
        response, tried_before = self._create(f"add {key!r}", put, lease)
        if response.succeeded:
            return
        for kv in response.responses[0].response_range.kvs:
            if (again or tried_before) and kv.value == value.encode() and kv.lease == (lease or 0):
                return
        raise NameEntryExists(f"name {key!r} already exists")

    def _create(self, what: str, put: Any, lease: int | None, limit_s: float | None = None) -> tuple[Any, bool]:
        """Put the entry unless the key exists; otherwise read it."""
        rpc = self._api.rpc
        request = rpc.TxnRequest(
            compare=[rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VERSION, key=put.key, version=0)],
            success=[rpc.RequestOp(request_put=put)],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=put.key))],
        )
        return self._call(
            what,
            text(self._name(put.key)),
            lambda stubs, share_s: stubs.kv.Txn(request, timeout=share_s),
            lease=lease,
            limit_s=limit_s,
        )

    def swap(self, key: str, expected: str, value: str) -> bool:
        """Set `value` if the current value is `expected`. The entry keeps its lease."""
        rpc = self._api.rpc
        name, new = self._raw(key.encode()), value.encode()
        request = rpc.TxnRequest(
            compare=[
                rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=name, value=expected.encode())
            ],
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=new, ignore_lease=True))],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=name))],
        )
        response, tried_before = self._call(
            f"compare and swap {key!r}", key, lambda stubs, limit_s: stubs.kv.Txn(request, timeout=limit_s)
        )
        if not response.succeeded and tried_before:  # the earlier attempt, whose answer was lost, may have done it
            return any(kv.value == new for kv in response.responses[0].response_range.kvs)
        return bool(response.succeeded)

    def read(self, keys: KeyRange, what: str, limit_s: float | None = None) -> tuple[dict[str, str], int]:
        """Return the entries, sorted by key, and the store's revision at which they were read."""
        ascending = self._api.rpc.RangeRequest.ASCEND
        first, end = self._raw_range(keys)
        request = self._api.rpc.RangeRequest(key=first, range_end=end, sort_order=ascending)
        response, _ = self._call(
            what, what, lambda stubs, share_s: stubs.kv.Range(request, timeout=share_s), limit_s=limit_s
        )
        return {text(self._name(kv.key)): text(kv.value) for kv in response.kvs}, int(response.header.revision)

    def delete(self, keys: KeyRange, what: str) -> int:
        """Delete the entries and return their number."""
        first, end = self._raw_range(keys)
        request = self._api.rpc.DeleteRangeRequest(key=first, range_end=end)
        response, _ = self._call(what, what, lambda stubs, limit_s: stubs.kv.DeleteRange(request, timeout=limit_s))
        return int(response.deleted)

    def read_store_id(self, limit_s: float | None = None) -> tuple[bytes, int]:
        """Return the store's id, created if missing, and the revision at which it was read."""
        new = secrets.token_hex(8).encode()
        put = self._api.rpc.PutRequest(key=self._raw(STORE_ID_KEY), value=new)
        response, _ = self._create("the first request", put, None, limit_s)
        store_id = new if response.succeeded else response.responses[0].response_range.kvs[0].value
        return store_id, int(response.header.revision)

    # watches

    def open_watch(self, ranges: Sequence[KeyRange], revision: int, timeout_s: float | None = None) -> WatchStream:
        """Open a stream of changes after this revision."""
        rpc, stubs = self._api.rpc, self._connection.stubs
        requests = [
            rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=key, range_end=end, start_revision=revision + 1))
            for key, end in map(self._raw_range, ranges)
        ]
        # Taken before the call: on a busy machine a late call would make its own deadline look like an outage
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            call = stubs.watch.Watch(iter(requests), timeout=timeout_s, metadata=_REQUIRE_LEADER)
        except ValueError as error:  # gRPC raises it if the channel is closed
            raise NameResolverClosed("name resolver was closed during a watch") from error
        return WatchStream(self._api, self._connection, stubs, call, end)

    # leases

    def grant(self, lease_id: int, ttl_s: int, again: bool) -> int:
        """Return the granted time to live, which the server may raise to its minimum. again: the lease may already exist."""
        request = self._api.rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease_id)
        exists = self._api.grpc.StatusCode.FAILED_PRECONDITION
        tried_before = False

        def grant(stubs: Stubs, limit_s: float) -> Any:
            nonlocal tried_before
            try:
                return stubs.lease.LeaseGrant(request, timeout=limit_s)
            except self._api.grpc.RpcError as error:
                if error.code() == exists and (again or tried_before):
                    return None
                if error.code() == exists:
                    raise LeaseExists(f"lease {lease_id:#x} already exists") from error
                tried_before = True
                raise

        response, _ = self._call(f"grant lease {lease_id:#x}", f"lease {lease_id:#x}", grant)
        return ttl_s if response is None else int(response.TTL)

    def refresh(self, lease_ids: Sequence[int]) -> dict[int, int]:
        """Refresh several leases over one stream. Returns the seconds to live of each, 0 for a lost lease (no error is
        raised).
        """
        if not lease_ids:
            return {}
        rpc = self._api.rpc

        def refresh(stubs: Stubs, limit_s: float) -> dict[int, int]:
            requests = iter([rpc.LeaseKeepAliveRequest(ID=lease_id) for lease_id in lease_ids])
            stream = stubs.lease.LeaseKeepAlive(requests, timeout=limit_s, metadata=_REQUIRE_LEADER)
            return {int(response.ID): int(response.TTL) for response in stream}

        ttls, _ = self._call(f"refresh {len(lease_ids)} leases", "refreshing leases", refresh)
        missing = [f"{lease_id:#x}" for lease_id in lease_ids if lease_id not in ttls]
        if missing:
            raise NameResolveError(f"etcd ended the refresh of leases without an answer for {missing}")
        return ttls

    def lease_keys(self, lease_id: int) -> set[bytes] | None:
        """Return the keys attached to a lease; None if it does not exist."""
        request = self._api.rpc.LeaseTimeToLiveRequest(ID=lease_id, keys=True)
        try:
            response, _ = self._call(
                f"time to live of lease {lease_id:#x}",
                f"lease {lease_id:#x}",
                lambda stubs, limit_s: stubs.lease.LeaseTimeToLive(request, timeout=limit_s),
                lease=lease_id,
            )
        except LeaseNotFound:
            return None
        return (
            {self._name(key) for key in response.keys} if response.TTL >= 0 else None
        )  # whole seconds left, rounded down; -1: no such lease

    def revoke(self, lease_id: int) -> None:
        request = self._api.rpc.LeaseRevokeRequest(ID=lease_id)
        with contextlib.suppress(LeaseNotFound):
            self._call(
                f"revoke lease {lease_id:#x}",
                f"lease {lease_id:#x}",
                lambda stubs, limit_s: stubs.lease.LeaseRevoke(request, timeout=limit_s),
                lease=lease_id,
            )

    def revoke_last(self, lease_ids: Sequence[int], limit_s: float) -> None:
        """Revoke leases at the end of a session that is otherwise closed: one attempt each, until one fails."""
        limit_s = min(limit_s, self._timeout_s)
        for lease_id in lease_ids:
            request = self._api.rpc.LeaseRevokeRequest(ID=lease_id)
            try:
                self._connection.stubs.lease.LeaseRevoke(request, timeout=limit_s)
            except self._api.grpc.RpcError as error:
                if error.code() != self._api.grpc.StatusCode.NOT_FOUND:
                    logger.warning("leases were not revoked at close (%s); they expire", error.code().name)
                    return

    def _call(
        self,
        what: str,
        of: str,
        function: Callable[[Stubs, float], T],
        *,
        lease: int | None = None,
        limit_s: float | None = None,
    ) -> tuple[T, bool]:
        """Like Connection.call, but raise a refusal by the server as a name-resolve error about `of`."""
        try:
            return self._connection.call(what, function, limit_s)
        except self._api.grpc.RpcError as error:
            if error.code() == self._api.grpc.StatusCode.NOT_FOUND and lease is not None:
                raise LeaseNotFound(
                    f"lease {lease:#x} of {of!r} does not exist (expired, revoked or never granted)"
                ) from error
            remedy = self._connection.login.remedy(error)
            raise NameResolveError(
                f"etcd refuses {of!r}: {error.code().name}: {error.details()}{remedy and f': {remedy}'}"
            ) from error

    def _raw(self, key: bytes) -> bytes:
        return self._prefix + key

    def _raw_range(self, keys: KeyRange) -> KeyRange:
        return self._prefix + keys[0], self._prefix + keys[1] if keys[1] else b""

    def _name(self, raw: bytes) -> bytes:
        return raw[len(self._prefix) :]
