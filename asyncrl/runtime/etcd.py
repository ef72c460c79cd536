"""Name resolve over etcd: between processes and hosts.

etcd3==0.12.0 gives the generated stubs; the session layer is ours, because its client does not survive an outage:

- `_Connection` calls a server within a limit, again and elsewhere where that server is down, and says so once.
- `_EtcdWatch` follows a key or a subtree. A broken stream is followed by reading the state again and telling the difference.
- `_LeaseKeeper` refreshes kept leases, and brings leases and entries back that a server lost.

gRPC is loaded when the first resolver is opened, not with this module, and must not be loaded before a fork.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import math
import secrets
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.runtime.name_resolve import (
    Lease,
    LeaseExists,
    LeaseNotFound,
    NameEntryExists,
    NameResolveError,
    NameResolver,
    NameResolverClosed,
    NameResolveTimeout,
    Watch,
    WatchCallback,
    WatchEvent,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Not below any name, since names have no control characters. It holds a random id that is made once: another id means that
# the server has lost its data since.
_STORE_ID_KEY = b"asyncrl\0store_id"
_RETRY_S = 0.05  # pause after every endpoint has failed
_STREAM_RETRY_S = 0.1  # pause before a broken watch is taken up again
_FOREIGN_CHECK_S = 5.0  # how often a session looks whether somebody else's lease that it uses has come back
_LOST_CHECK_S = 0.5  # ... how often while it is gone
_FOREIGN_FORGET_S = 120.0  # ... and until when
_CLOSE_LIMIT_S = 2.0
_EVENT_DELETE = 1
_REQUIRE_LEADER = (("hasleader", "true"),)  # streams end, instead of going silent, on a member cut off from its cluster
_CHANNEL_OPTIONS = (
    # gRPC's own reconnect back-off grows to two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # in truth the limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 300),
    # the only way in which an open stream notices a frozen server; etcd allows a ping every 5 s
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # sessions of one process do not share a connection
    ("grpc.enable_http_proxy", 0),
)


# ---------------------------------------------------------------------------------------------------- loading the stubs


@dataclass(frozen=True)
class _Api:
    grpc: Any
    rpc: Any  # etcd3.etcdrpc: messages and stubs


_load_lock = threading.Lock()


def load_api() -> _Api:
    """gRPC and etcd3's stubs, imported at the first call."""
    with _load_lock:
        return _load_api()


@cache
def _load_api() -> _Api:
    """etcd3's generated modules were made for protobuf 3 and raise in newer ones ("Descriptors cannot be created directly").

    The descriptors inside them are as good as ever: they are read out of the sources, without running them, and the modules
    are built from them in a pool of their own (other packages may bring a kv.proto or rpc.proto too).
    """
    with warnings.catch_warnings():  # etcd3 and what it imports were written for older Pythons
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)
        import grpc
        from google.protobuf import descriptor_pool
        from google.protobuf.internal import builder

        spec = importlib.util.find_spec("etcd3")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                "name_resolve.backend 'etcd' needs the package etcd3; run `pip install etcd3==0.12.0`"
            )
        if "etcd3" not in sys.modules:
            pool = descriptor_pool.DescriptorPool()
            for name in ("kv", "auth", "rpc"):  # rpc imports the others
                module = types.ModuleType(f"etcd3.etcdrpc.{name}_pb2")
                source = Path(spec.origin).with_name("etcdrpc") / f"{name}_pb2.py"
                descriptor = pool.AddSerializedFile(_serialized_descriptor(source))
                vars(module)["DESCRIPTOR"] = descriptor
                builder.BuildMessageAndEnumDescriptors(descriptor, vars(module))
                builder.BuildTopDescriptorsAndMessages(descriptor, module.__name__, vars(module))
                sys.modules[module.__name__] = module
        from etcd3 import etcdrpc
    return _Api(grpc, etcdrpc)


def _serialized_descriptor(source: Path) -> bytes:
    """The bytes of `serialized_pb=_b('...')` in a generated module."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            literal = node.value.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                return literal.value.encode("latin1")
    raise NameResolveError(f"{source} holds no descriptor; asyncrl needs etcd3==0.12.0")


# ----------------------------------------------------------------------------------------------------------- connection


class _Stubs:
    """One endpoint's channel; it reconnects by itself."""

    def __init__(self, api: _Api, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = api.grpc.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        self.kv = api.rpc.KVStub(self.channel)
        self.lease = api.rpc.LeaseStub(self.channel)
        self.watch = api.rpc.WatchStub(self.channel)


class _Connection:
    """Calls whichever endpoint answers. Shared by all threads of a session."""

    def __init__(self, api: _Api, endpoints: Sequence[str], timeout_s: float, closed: threading.Event) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._closed = closed
        self._lock = threading.Lock()
        self._stubs = [_Stubs(api, endpoint) for endpoint in endpoints]
        self._current = 0
        self._down = False
        code = api.grpc.StatusCode
        # CANCELLED and INTERNAL are what a connection that breaks in the middle of an answer may look like, UNKNOWN a
        # deadline that the server sees before we do
        self._outage = {code.UNAVAILABLE, code.DEADLINE_EXCEEDED, code.CANCELLED, code.INTERNAL, code.UNKNOWN}

    @property
    def stubs(self) -> _Stubs:
        return self._stubs[self._current]

    def call(self, what: str, function: Callable[[_Stubs, float], T], limit_s: float | None = None) -> tuple[T, bool]:
        """function(stubs, seconds it may take) of an endpoint that answers, and whether it was tried before in vain.

        What was tried in vain may still have been done. Waits for: an answer, from each endpoint in turn. Raises
        NameResolveTimeout after limit_s (default: the session's), gRPC's error if the server refuses.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        failures: dict[str, str] = {}
        attempt = 0
        while True:
            if self._closed.is_set():
                raise NameResolverClosed(f"name resolver was closed during {what}")
            stubs = self.stubs
            # the endpoints not tried in this round share what is left, so that a frozen one leaves time for the others
            share_s = max(deadline - time.monotonic(), 0.001) / (len(self._stubs) - attempt % len(self._stubs))
            try:
                result = function(stubs, share_s)
            except self._api.grpc.RpcError as error:
                if error.code() not in self._outage:
                    raise
                failures[stubs.endpoint] = f"{error.code().name}: {error.details()}"
                self.failed(stubs, failures[stubs.endpoint])
            except ValueError as error:  # gRPC's way to say that the channel was closed meanwhile
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

    def failed(self, stubs: _Stubs, reason: str) -> None:
        """This endpoint broke: the next one's turn."""
        with self._lock:
            if stubs is self.stubs:
                self._current = (self._current + 1) % len(self._stubs)
            if not self._down and not self._closed.is_set():
                self._down = True
                logger.warning("etcd at %s does not answer (%s); trying again", stubs.endpoint, reason)

    def _answered(self, stubs: _Stubs) -> None:
        if self._down:
            with self._lock:
                self._down = False
            logger.warning("etcd at %s answers", stubs.endpoint)

    def close(self) -> None:
        for stubs in self._stubs:
            stubs.channel.close()


# ---------------------------------------------------------------------------------------------------------------- watch


class _EtcdWatch(Watch):
    """A watch with a stream and a thread of its own."""

    def __init__(self, session: EtcdNameResolver, key: str, subtree: bool, callback: WatchCallback) -> None:
        super().__init__(key + "/" if subtree else key, callback)
        self._session = session
        self._range = _subtree_range(key) if subtree else (key.encode(), b"")
        self._state: dict[str, str] = {}
        self._revision = 0
        self._lock = threading.Lock()
        self._stream: Any = None
        self.thread = threading.Thread(target=self._run, name=f"watch {self.what}", daemon=True)

    def start(self, limit_s: float | None) -> None:
        """Deliver the current state, then go on in the thread."""
        self._reload(limit_s)
        self.thread.start()

    def _run(self) -> None:
        """Consumes the server's stream of changes; produces callbacks.

        Waits for: a change (no limit: gRPC's keepalive notices a frozen server), or 0.1 s before it takes up a broken stream
        again. Unblocked by: a change, an outage, cancel.
        """
        while not self._cancelled.is_set():
            try:
                if self._revision == 0:
                    self._reload(None)
                self._follow()
            except NameResolverClosed:
                return
            except NameResolveTimeout as error:
                logger.debug("watch on %s: %s", self.what, error)  # the connection has said so
            except Exception:
                if not self._cancelled.is_set():
                    logger.exception("watch on %s failed; it is taken up again", self.what)
                    self._cancelled.wait(1.0)
            self._revision = 0
            self._cancelled.wait(_STREAM_RETRY_S)

    def _reload(self, limit_s: float | None) -> None:
        """Read the state and tell how it differs from what was told before."""
        state, self._revision = self._session._read(self._range, f"get {self.what!r}", limit_s)
        events = [WatchEvent("delete", key) for key in self._state if key not in state]
        events += [WatchEvent("put", key, value) for key, value in state.items() if self._state.get(key) != value]
        self._state = state
        self._tell(events)

    def _follow(self) -> None:
        """Tell changes after the revision until the stream ends, however it ends."""
        session = self._session
        stubs = session._connection.stubs
        try:
            with self._lock:
                if self._cancelled.is_set():
                    return
                self._stream = session._open_watch(stubs, self._range, self._revision + 1)
            for response in self._stream:
                if response.canceled:  # compacted, or without a leader: read again
                    logger.debug("watch on %s was ended by the server: %s", self.what, response.cancel_reason)
                    return
                events = []
                for event in response.events:
                    key = _text(event.kv.key)
                    if event.type == _EVENT_DELETE:
                        self._state.pop(key, None)
                        events.append(WatchEvent("delete", key))
                    else:
                        self._state[key] = _text(event.kv.value)
                        events.append(WatchEvent("put", key, self._state[key]))
                self._tell(events)
        except session._api.grpc.RpcError as error:
            if not self._cancelled.is_set():
                session._connection.failed(stubs, f"{error.code().name}: {error.details()}")

    def _tell(self, events: list[WatchEvent]) -> None:
        self._enqueue(events)
        self._deliver()

    def _stop(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()


# --------------------------------------------------------------------------------------------------------------- leases


@dataclass
class _HeldLease:
    """A lease that entries of this session hang on."""

    id: int
    ttl_s: int = 0
    kept: bool = False  # by this session; otherwise somebody else refreshes it
    due: float = -math.inf  # time.monotonic(): when to refresh it, or to look at it
    lost_since: float | None = None  # not known to the server, or not with our entries
    entries: dict[str, str] = field(default_factory=dict)


class _LeaseKeeper:
    """Refreshes the session's kept leases, and restores what a server lost: leases under the same id, then entries.

    The entries put under somebody else's lease are restored as soon as its holder has brought the lease back. One thread,
    started with the first lease or the first entry under one; it watches the store's id, and so notices an outage at once.
    """

    def __init__(self, session: EtcdNameResolver) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._leases: dict[int, _HeldLease] = {}
        self._losses = 0  # how often something was lost: an entry that is put meanwhile may need to be put again
        self._store_id: bytes | None = None
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._changed = False

    # called by users' threads

    def hold(self, lease_id: int, ttl_s: int) -> None:
        """Keep a lease that has just been granted."""
        with self._lock:
            self._leases[lease_id] = _HeldLease(lease_id, ttl_s, kept=True, due=time.monotonic() + ttl_s / 3)
            self._wake()

    def release(self, lease_id: int) -> None:
        with self._lock:
            self._leases.pop(lease_id, None)

    @property
    def kept(self) -> list[int]:
        with self._lock:
            return [lease.id for lease in self._leases.values() if lease.kept]

    @property
    def losses(self) -> int:
        return self._losses

    def keeps(self, lease_id: int) -> bool:
        with self._lock:
            return lease_id in self._leases and self._leases[lease_id].kept

    def record(self, key: str, value: str, lease_id: int | None, losses: int) -> None:
        """An entry was put. If something was lost since `losses` was read, it is put again."""
        with self._lock:
            for held in self._leases.values():
                held.entries.pop(key, None)
            if lease_id is None:
                return
            is_new = lease_id not in self._leases
            held = self._leases.setdefault(lease_id, _HeldLease(lease_id, due=time.monotonic() + _FOREIGN_CHECK_S))
            held.entries[key] = value
            if self._losses != losses:
                held.lost_since, held.due = time.monotonic(), -math.inf
            if is_new or self._losses != losses:
                self._wake()

    def swapped(self, key: str, value: str) -> None:
        with self._lock:
            for held in self._leases.values():
                if key in held.entries:
                    held.entries[key] = value

    def forget(self, key: str, subtree: bool = False) -> None:
        """An entry, or what is below it, was deleted."""
        with self._lock:
            for held in self._leases.values():
                for name in [name for name in held.entries if (name.startswith(key + "/") if subtree else name == key)]:
                    del held.entries[name]

    def join(self) -> None:
        """The session is closed: end the thread."""
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_LIMIT_S)

    def _wake(self) -> None:
        self._changed = True
        if self._stream is not None:
            self._stream.cancel()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="etcd leases", daemon=True)
            self._thread.start()

    # the keeper's thread

    def _run(self) -> None:
        """Consumes nothing; produces refreshed leases and restored entries.

        Waits for: the next lease that is due, watching the store's id; 0.1 s after a failure. Unblocked by: a new lease, an
        outage, a lost store, close.
        """
        closed = self._session._closed
        while not closed.is_set():
            try:
                revision = self._check_store()
                self._refresh_due()
                self._wait_until_due(revision)
                continue
            except NameResolverClosed:
                return
            except NameResolveTimeout as error:
                logger.debug("leases: %s", error)  # the connection has said so
            except Exception:
                if not closed.is_set():
                    logger.exception("refreshing leases failed; trying again")
                    closed.wait(1.0)
            closed.wait(_STREAM_RETRY_S)

    def _check_store(self) -> int:
        """Mark everything lost if the server has lost its data. Returns the revision to watch from."""
        store_id, revision = self._session._read_store_id()
        with self._lock:
            self._changed = False
            if self._store_id not in (None, store_id):
                logger.warning("etcd has lost its data: restoring %d leases and their entries", len(self._leases))
                self._losses += 1
                for held in self._leases.values():
                    held.lost_since, held.due = time.monotonic(), -math.inf
            self._store_id = store_id
        return revision

    def _refresh_due(self) -> None:
        session, now = self._session, time.monotonic()
        with self._lock:
            kept = [held for held in self._leases.values() if held.kept and held.due <= now]
            foreign = [held for held in self._leases.values() if not held.kept and held.due <= now]
        ttls = session._refresh_leases([held.id for held in kept])
        for held in kept:
            if ttls[held.id] <= 0:
                self.restore(held.id)
            elif held.lost_since is not None:
                self._put_entries(held)
        for held in foreign:
            self._look_at(held, now)
        with self._lock:
            for held in [*kept, *foreign]:
                usual_s = held.ttl_s / 3 if held.kept else _FOREIGN_CHECK_S
                held.due = now + (usual_s if held.lost_since is None else _LOST_CHECK_S)

    def restore(self, lease_id: int) -> None:
        """Grant a kept lease again under its id, and put its entries again. Also called by users' threads."""
        with self._lock:
            held = self._leases.get(lease_id)
            if held is None or not held.kept:
                return
            self._losses += 1
            held.lost_since = time.monotonic()
        logger.warning("etcd has lost lease %#x: granting it again", lease_id)
        self._session._grant(lease_id, held.ttl_s, again=True)
        self._put_entries(held)
        if not self.keeps(lease_id):  # revoked meanwhile
            self._session._revoke(lease_id)

    def _look_at(self, held: _HeldLease, now: float) -> None:
        """Somebody else's lease: once it has been gone and is back, our entries need to be put again."""
        if not self._session._lease_alive(held.id):
            with self._lock:
                if held.lost_since is None:
                    held.lost_since = now
                if not held.entries or now - held.lost_since > _FOREIGN_FORGET_S:
                    self._leases.pop(held.id, None)
        elif held.lost_since is not None:
            self._put_entries(held)

    def _put_entries(self, held: _HeldLease) -> None:
        """Put what is missing. An entry that somebody else has put meanwhile stays, and is ours no longer."""
        with self._lock:
            held.lost_since = None
            entries = dict(held.entries)
        for key, value in entries.items():
            try:
                self._session._create(key, value, held.id, again=True)
            except NameEntryExists:
                logger.warning("name %r was put by another session while its lease was lost; leaving it", key)
                with self._lock:
                    if held.entries.get(key) == value:
                        del held.entries[key]
            except LeaseNotFound:
                with self._lock:
                    held.lost_since = time.monotonic()
                return
            except NameResolveTimeout:
                with self._lock:
                    held.lost_since = time.monotonic()
                raise

    def _wait_until_due(self, revision: int) -> None:
        session = self._session
        stubs = session._connection.stubs
        with self._lock:
            due = min((held.due for held in self._leases.values()), default=math.inf)
            timeout_s = min(max(due - time.monotonic(), 0.001), 3600.0)
            end = time.monotonic() + timeout_s
            if self._changed or session._closed.is_set():
                return
            stream = self._stream = session._open_watch(stubs, (_STORE_ID_KEY, b""), revision + 1, timeout_s)
        try:
            for response in stream:
                if response.events or response.canceled:
                    break
            session._closed.wait(_STREAM_RETRY_S)
        except session._api.grpc.RpcError as error:
            # at the end the stream is over by its deadline, which either side may be the first to see
            if error.code() != session._api.grpc.StatusCode.CANCELLED and time.monotonic() < end - _STREAM_RETRY_S:
                session._connection.failed(stubs, f"{error.code().name}: {error.details()}")
                session._closed.wait(_STREAM_RETRY_S)
        finally:
            stream.cancel()
            with self._lock:
                self._stream = None


# -------------------------------------------------------------------------------------------------------------- session


def _subtree_range(key: str) -> tuple[bytes, bytes]:
    """All keys below key: from `key/` up to, without, `key0`, which follows it ('0' is the character after '/')."""
    return key.encode() + b"/", key.encode() + b"0"


def _text(data: bytes) -> str:
    return data.decode(errors="replace")  # ours is UTF-8; what strangers put must not end a watch


class EtcdNameResolver(NameResolver):
    """Name resolve over etcd. Endpoints are `host:port`; the first that answers is used, the next when it fails."""

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 5.0) -> None:
        super().__init__()
        if isinstance(endpoints, str) or not endpoints:
            raise ValueError(f"name_resolve.endpoints is {endpoints!r}; etcd needs a list of host:port")
        for endpoint in endpoints:
            host, _, port = endpoint.rpartition(":")
            if not (host and port.isdecimal()) or "//" in host:
                raise ValueError(f"name_resolve.endpoints has {endpoint!r}; write host:port, such as 127.0.0.1:2379")
        if not timeout_s > 0:
            raise ValueError(f"name_resolve.timeout_s is {timeout_s!r}; it must be positive")
        self._timeout_s = timeout_s
        self._api = load_api()
        self._connection = _Connection(self._api, endpoints, timeout_s, self._closed)
        self._keeper = _LeaseKeeper(self)
        self._watches: list[_EtcdWatch] = []
        self._watches_lock = threading.Lock()
        try:
            self._read_store_id()  # fail here, not at the first use
        except BaseException:
            self.close()
            raise

    # entries

    def _add(self, key: str, value: str, replace: bool, lease: int | None) -> None:
        losses = self._keeper.losses
        put = self._put if replace else self._create
        try:
            put(key, value, lease)
        except LeaseNotFound:
            if lease is None or not self._keeper.keeps(lease):
                raise
            self._keeper.restore(lease)  # a server that lost its data, before the keeper has noticed
            put(key, value, lease)
        self._keeper.record(key, value, lease, losses)

    def _put(self, key: str, value: str, lease: int | None) -> None:
        request = self._api.rpc.PutRequest(key=key.encode(), value=value.encode(), lease=lease or 0)
        try:
            self._connection.call(f"put {key!r}", lambda stubs, limit_s: stubs.kv.Put(request, timeout=limit_s))
        except self._api.grpc.RpcError as error:
            raise self._refusal(error, key, lease) from error

    def _create(self, key: str, value: str, lease: int | None, again: bool = False) -> None:
        """Put unless the key exists. An equal entry, if this or (again) an earlier try may have put it, is as good."""
        rpc = self._api.rpc
        request = rpc.TxnRequest(
            compare=[rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VERSION, key=key.encode(), version=0)],
            success=[
                rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value.encode(), lease=lease or 0))
            ],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))],
        )
        response, tried_before = self._txn(f"add {key!r}", request, key, lease)
        if response.succeeded:
            return
        for kv in response.responses[0].response_range.kvs:
            if (again or tried_before) and kv.value == value.encode() and kv.lease == (lease or 0):
                return
        raise NameEntryExists(f"name {key!r} exists already")

    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool:
        if expected is None:
            try:
                self._create(key, value, None)
            except NameEntryExists:
                return False
            self._keeper.record(key, value, None, 0)
            return True
        rpc = self._api.rpc
        name, new = key.encode(), value.encode()
        request = rpc.TxnRequest(
            compare=[
                rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=name, value=expected.encode())
            ],
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=new, ignore_lease=True))],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=name))],
        )
        response, tried_before = self._txn(f"compare and swap {key!r}", request, key, None)
        swapped = bool(response.succeeded)
        if not swapped and tried_before:  # the try before, whose answer was lost, may have done it
            swapped = any(kv.value == new for kv in response.responses[0].response_range.kvs)
        if swapped:
            self._keeper.swapped(key, value)
        return swapped

    def _txn(self, what: str, request: Any, key: str, lease: int | None) -> tuple[Any, bool]:
        try:
            return self._connection.call(what, lambda stubs, limit_s: stubs.kv.Txn(request, timeout=limit_s))
        except self._api.grpc.RpcError as error:
            raise self._refusal(error, key, lease) from error

    def _get(self, key: str) -> str | None:
        return self._read((key.encode(), b""), f"get {key!r}", None)[0].get(key)

    def _get_subtree(self, key: str) -> dict[str, str]:
        return self._read(_subtree_range(key), f"get_subtree {key!r}", None)[0]

    def _read(self, key_range: tuple[bytes, bytes], what: str, limit_s: float | None) -> tuple[dict[str, str], int]:
        """Entries, sorted by key, and the store's revision they were read at."""
        ascending = self._api.rpc.RangeRequest.ASCEND
        request = self._api.rpc.RangeRequest(key=key_range[0], range_end=key_range[1], sort_order=ascending)
        try:
            response, _ = self._connection.call(
                what, lambda stubs, limit_s: stubs.kv.Range(request, timeout=limit_s), limit_s
            )
        except self._api.grpc.RpcError as error:
            raise self._refusal(error, what, None) from error
        return {_text(kv.key): _text(kv.value) for kv in response.kvs}, int(response.header.revision)

    def _delete(self, key: str) -> bool:
        self._keeper.forget(key)
        return self._delete_range((key.encode(), b""), f"delete {key!r}") > 0

    def _clear_subtree(self, key: str) -> int:
        self._keeper.forget(key, subtree=True)
        return self._delete_range(_subtree_range(key), f"clear_subtree {key!r}")

    def _delete_range(self, key_range: tuple[bytes, bytes], what: str) -> int:
        request = self._api.rpc.DeleteRangeRequest(key=key_range[0], range_end=key_range[1])
        try:
            response, _ = self._connection.call(
                what, lambda stubs, limit_s: stubs.kv.DeleteRange(request, timeout=limit_s)
            )
        except self._api.grpc.RpcError as error:
            raise self._refusal(error, what, None) from error
        return int(response.deleted)

    def _read_store_id(self) -> tuple[bytes, int]:
        """The store's id, made where there is none, and the revision it was read at."""
        rpc = self._api.rpc
        new = secrets.token_hex(8).encode()
        request = rpc.TxnRequest(
            compare=[rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VERSION, key=_STORE_ID_KEY, version=0)],
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=_STORE_ID_KEY, value=new))],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=_STORE_ID_KEY))],
        )
        response, _ = self._txn("the first request", request, "store id", None)
        store_id = new if response.succeeded else response.responses[0].response_range.kvs[0].value
        return store_id, int(response.header.revision)

    def _refusal(self, error: Any, key: str, lease: int | None) -> NameResolveError:
        """What a server that answers says no to."""
        code = self._api.grpc.StatusCode
        if error.code() == code.NOT_FOUND and lease is not None:
            return LeaseNotFound(f"lease {lease:#x} of {key!r} does not exist (expired, revoked or never granted)")
        return NameResolveError(f"etcd refuses {key!r}: {error.code().name}: {error.details()}")

    # watches

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        watch = _EtcdWatch(self, key, subtree, callback)
        with self._watches_lock:
            self._check_open()
            self._watches = [known for known in self._watches if not known._cancelled.is_set()] + [watch]
        try:
            watch.start(limit_s)
        except BaseException:
            watch.cancel()
            raise
        return watch

    def _open_watch(
        self, stubs: _Stubs, key_range: tuple[bytes, bytes], revision: int, timeout_s: float | None = None
    ) -> Any:
        rpc = self._api.rpc
        create = rpc.WatchCreateRequest(key=key_range[0], range_end=key_range[1], start_revision=revision)
        try:
            return stubs.watch.Watch(
                iter([rpc.WatchRequest(create_request=create)]), timeout=timeout_s, metadata=_REQUIRE_LEADER
            )
        except ValueError as error:  # gRPC's way to say that the channel is closed
            raise NameResolverClosed("name resolver was closed during a watch") from error

    # leases

    def _grant_lease(self, ttl_s: float, lease_id: int | None, keep_alive: bool) -> Lease:
        chosen = secrets.randbelow(2**63 - 1) + 1 if lease_id is None else lease_id
        ttl = self._grant(chosen, math.ceil(ttl_s), again=False)
        if keep_alive:
            self._keeper.hold(chosen, ttl)
        return Lease(self, chosen, ttl)

    def _grant(self, lease_id: int, ttl_s: int, again: bool) -> int:
        """The time to live granted: the server has a lower limit. again: it may exist already."""
        request = self._api.rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease_id)
        tried_before = False

        def grant(stubs: _Stubs, limit_s: float) -> Any:
            nonlocal tried_before
            try:
                return stubs.lease.LeaseGrant(request, timeout=limit_s)
            except self._api.grpc.RpcError as error:
                if error.code() == self._api.grpc.StatusCode.FAILED_PRECONDITION and (again or tried_before):
                    return None
                tried_before = True
                raise

        try:
            response, _ = self._connection.call(f"grant lease {lease_id:#x}", grant)
        except self._api.grpc.RpcError as error:
            if error.code() == self._api.grpc.StatusCode.FAILED_PRECONDITION:
                raise LeaseExists(f"lease {lease_id:#x} exists already") from error
            raise self._refusal(error, f"lease {lease_id:#x}", None) from error
        return ttl_s if response is None else int(response.TTL)

    def _refresh_leases(self, lease_ids: Sequence[int]) -> dict[int, int]:
        """Refresh several leases over one stream; seconds to live of each, 0 for those that are gone (it does not raise)."""
        if not lease_ids:
            return {}
        rpc = self._api.rpc

        def refresh(stubs: _Stubs, limit_s: float) -> dict[int, int]:
            requests = iter([rpc.LeaseKeepAliveRequest(ID=lease_id) for lease_id in lease_ids])
            stream = stubs.lease.LeaseKeepAlive(requests, timeout=limit_s, metadata=_REQUIRE_LEADER)
            return {int(response.ID): int(response.TTL) for response in stream}

        try:
            ttls, _ = self._connection.call(f"refresh {len(lease_ids)} leases", refresh)
        except self._api.grpc.RpcError as error:
            raise self._refusal(error, "refreshing leases", None) from error
        missing = [f"{lease_id:#x}" for lease_id in lease_ids if lease_id not in ttls]
        if missing:
            raise NameResolveError(f"etcd ended the refresh of leases without an answer for {missing}")
        return ttls

    def _refresh_lease(self, lease_id: int) -> bool:
        self._check_open()
        return self._refresh_leases([lease_id])[lease_id] > 0

    def _lease_alive(self, lease_id: int) -> bool:
        self._check_open()
        request = self._api.rpc.LeaseTimeToLiveRequest(ID=lease_id)
        try:
            response, _ = self._connection.call(
                f"time to live of lease {lease_id:#x}",
                lambda stubs, limit_s: stubs.lease.LeaseTimeToLive(request, timeout=limit_s),
            )
        except self._api.grpc.RpcError as error:
            if error.code() == self._api.grpc.StatusCode.NOT_FOUND:
                return False
            raise self._refusal(error, f"lease {lease_id:#x}", None) from error
        return int(response.TTL) >= 0  # whole seconds left, rounded down; -1: no such lease

    def _revoke_lease(self, lease_id: int) -> None:
        self._check_open()
        self._keeper.release(lease_id)
        self._revoke(lease_id)

    def _revoke(self, lease_id: int) -> None:
        request = self._api.rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            self._connection.call(
                f"revoke lease {lease_id:#x}",
                lambda stubs, limit_s: stubs.lease.LeaseRevoke(request, timeout=limit_s),
            )
        except self._api.grpc.RpcError as error:
            if error.code() != self._api.grpc.StatusCode.NOT_FOUND:
                raise self._refusal(error, f"lease {lease_id:#x}", None) from error

    def _close(self) -> None:
        with self._watches_lock:
            watches = list(self._watches)
        for watch in watches:
            watch.cancel()
        self._keeper.join()
        limit_s = min(self._timeout_s, _CLOSE_LIMIT_S)
        for lease_id in self._keeper.kept:
            request = self._api.rpc.LeaseRevokeRequest(ID=lease_id)
            try:
                self._connection.stubs.lease.LeaseRevoke(request, timeout=limit_s)
            except self._api.grpc.RpcError as error:
                if error.code() != self._api.grpc.StatusCode.NOT_FOUND:
                    logger.warning("leases were not revoked at close (%s); they expire", error.code().name)
                    break
        self._connection.close()
        for watch in watches:
            if watch.thread.is_alive() and watch.thread is not threading.current_thread():
                watch.thread.join(_CLOSE_LIMIT_S)
