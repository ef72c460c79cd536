"""Request-reply: the master's calls to the model workers, and their replies.

    NameResolvingRequestClient (master) -- calls --> NameResolvingReplyServer (one per model worker)
                                        <-- replies --

There is one channel for each worker. A call's sequence number in the channel is its per-worker sequence number. Workers
receive calls in that order without gaps, so all members of a mesh take part in collectives in the same order. The reply
is the channel's verdict. Replies may arrive in any order; each completes a future, without polling. A call is executed
at most once: when a worker comes back as a new incarnation, its unanswered calls fail with ReceiverRestarted. Workers
of a detached group (dataflow/worker_groups.py) come back together, as the group's next incarnation: when the first of
them connects, the calls to all of them fail.

Start-up barrier: the client sends each worker a resend query as soon as that worker's name appears. `start` returns when
all have answered. A name that a dead worker has left behind gets no answer, so it does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import Struct

from asyncrl.config.schema import RuntimeConfig
from asyncrl.dataflow.worker_groups import GroupIncarnations
from asyncrl.protocol.calls import CallBody, CallResult
from asyncrl.protocol.errors import DECODE_ERRORS, CodecError
from asyncrl.protocol.names import Names
from asyncrl.runtime.channel import ChannelSender, Delivery, PublishedReceiver
from asyncrl.runtime.channel_protocol import ChannelFull, Endpoint, ReceiverRestarted
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.transport import Transport, transport_of

CALL_CREDIT_ITEMS = 1024  # unanswered calls per worker
_LAST_WORDS_S = 0.2  # between the answer to a failed call and the end of the worker

Handler = Hashable  # a ModelShardID or a worker's index


class RemoteCallError(Exception):
    """A call failed at the worker. The worker's traceback is part of the text."""

    def __init__(self, worker: str, message: str, remote_traceback: str = "") -> None:
        text = f"{worker}: {message}"
        if remote_traceback:
            text += f"\n\nTraceback at {worker}:\n{remote_traceback}"
        super().__init__(text)
        self.worker = worker
        self.message = message
        self.traceback = remote_traceback


class _CallHeader(Struct, frozen=True, array_like=True):
    global_seq: int
    body: CallBody
    attempt: int = 1


class _Success(Struct, frozen=True, array_like=True, tag="result"):
    result: CallResult


class _Failure(Struct, frozen=True, array_like=True, tag="error"):
    worker: str
    message: str
    traceback: str


_encoder = msgspec.msgpack.Encoder()
_decode_call = msgspec.msgpack.Decoder(_CallHeader).decode
_decode_reply = msgspec.msgpack.Decoder(_Success | _Failure).decode


def request_stream(index: int) -> str:
    """Return the name of a worker's stream of calls."""
    return f"request_reply/{index}"


def _worker_name(index: int) -> str:
    return f"model_worker/{index}"


class NameResolvingRequestClient:
    """Calls workers.

    consumes: call_nowait.  produces: one future per call.
    waits for: in `start` for all workers, at most start_timeout_s; in `wait_for_group_incarnation` for those of a
    group. Calls do not wait; callers must bound the wait for the futures.
    unblocked by: replies; a worker's restart (ReceiverRestarted); fail_all.
    """

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        num_workers: int,
        handler_routing: Mapping[Handler, int],
        runtime: RuntimeConfig,
        incarnation: str,
        transport: Transport | None = None,
        attempt: int = 1,
        groups: Sequence[Sequence[int]] = (),
        on_new_incarnation: Callable[[Sequence[int]], None] = lambda group: None,
    ) -> None:
        """attempt: of the caller; workers of another attempt refuse its calls. groups: worker groups, of which each
        restarts as a whole.
        on_new_incarnation: called with such a group when its next incarnation begins; the data that its workers held is
        lost.
        """
        self._attempt = attempt
        self._incarnations = {tuple(group): GroupIncarnations(group) for group in groups}
        self._group_of = {worker: group for group in self._incarnations for worker in group}
        self._on_new_incarnation = on_new_incarnation
        self._connected = asyncio.Event()  # set when a worker of a group connects, and then replaced
        for handler, index in handler_routing.items():
            if not 0 <= index < num_workers:
                raise ValueError(
                    f"handler_routing sends {handler!r} to worker {index}; there are {num_workers} workers"
                )
        self._resolver = resolver
        self._names = names
        self._routing = dict(handler_routing)
        self._start_timeout_s = runtime.start_limit_s
        self._senders = [
            ChannelSender(
                "request_client",
                _worker_name(index),
                incarnation,
                runtime=replace(runtime, push_credit_items=CALL_CREDIT_ITEMS),
                on_restart="fail",
                on_connect=partial(self._worker_connected, index),
                transport=transport or transport_of(runtime.faults, f"calls of {_worker_name(index)}"),
            )
            for index in range(num_workers)
        ]
        self._next_global_seq = 0
        self._failed: Exception | None = None

    async def start(self) -> None:
        """Find all workers and wait for an answer from each. Raises TimeoutError that names the missing workers."""
        for index, sender in enumerate(self._senders):
            await sender.start(self._resolver, self._names.stream(request_stream(index)))
        barrier = asyncio.gather(*(sender.wait_answered() for sender in self._senders))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await barrier
        except TimeoutError:
            raise TimeoutError(
                f"start-up barrier: after {self._start_timeout_s:g} s (runtime.start_timeout_s) still missing: {self._missing()}"
            ) from None

    def call_nowait(self, handlers: Sequence[Handler], bodies: Sequence[CallBody]) -> list[asyncio.Future[CallResult]]:
        """Send one call to each handler's worker, all or none, without yielding to the event loop in between.

        All calls carry the same global sequence number. Raises ValueError for an unknown handler, ChannelFull if a
        worker has CALL_CREDIT_ITEMS unanswered calls, and, after fail_all, the error given to fail_all.
        """
        if self._failed is not None:
            raise self._failed
        calls = []
        for handler, body in zip(handlers, bodies, strict=True):
            calls.append(
                (self._route(handler), _encoder.encode(_CallHeader(self._next_global_seq, body, self._attempt)))
            )
        self._check_credit(calls)
        self._next_global_seq += 1
        return [self._call(self._senders[index], header) for index, header in calls]

    async def wait_for_group_incarnation(self, group: Sequence[int], *, after: int = -1) -> int:
        """Wait until all workers of a detached group are in an incarnation later than `after`, and return it. The
        caller bounds the wait.
        """
        while (number := self._incarnations[tuple(group)].number) is None or number <= after:
            await self._connected.wait()
        return number

    def group_incarnation_of(self, group: Sequence[int]) -> int | None:
        """Return the incarnation of all workers of a detached group; None while some have not connected yet."""
        return self._incarnations[tuple(group)].number

    def is_down(self, group: Sequence[int]) -> bool:
        """Return whether a worker of a detached group has no published name, or has not connected in the newest
        incarnation."""
        return self._incarnations[tuple(group)].number is None or not all(
            self._senders[worker].is_published for worker in group
        )

    def fail_all(self, error: Exception) -> None:
        """Fail every unanswered call and every later one with this error, because the trainer group has ended."""
        self._failed = error
        for sender in self._senders:
            sender.fail_all(error)

    @property
    def num_pending(self) -> int:
        """Number of calls without a reply."""
        return sum(sender.num_pending for sender in self._senders)

    async def close(self) -> None:
        """Close the channels. Unanswered calls fail with ChannelClosed."""
        for sender in self._senders:
            await sender.close()

    # ------------------------------------------------------------------------------------------------------------- inside

    def _worker_connected(self, index: int, endpoint: Endpoint) -> None:
        group = self._group_of.get(index)
        if group is None:
            return
        if self._incarnations[group].connected(index, endpoint.group_incarnation):
            for worker in group:  # also of live workers: they wait for the worker that ended, and will not answer
                error = ReceiverRestarted(
                    f"{_worker_name(worker)}: its worker group has ended; incarnation {endpoint.group_incarnation} begins"
                )
                self._senders[worker].fail_all(error)
            self._on_new_incarnation(group)
        connected, self._connected = self._connected, asyncio.Event()
        connected.set()

    def _route(self, handler: Handler) -> int:
        index = self._routing.get(handler)
        if index is None and isinstance(handler, int) and 0 <= handler < len(self._senders):
            return handler
        if index is None:
            raise ValueError(f"no worker handles {handler!r}; known handlers: {sorted(map(str, self._routing))}")
        return index

    def _check_credit(self, calls: Sequence[tuple[int, bytes]]) -> None:
        wanted: dict[int, list[int]] = {}
        for index, header in calls:
            wanted.setdefault(index, []).append(len(header))
        for index, sizes in wanted.items():
            sender = self._senders[index]
            if not sender.can_send(sum(sizes), len(sizes)):
                raise ChannelFull(f"{sender.peer} has {sender.num_pending} unanswered calls and accepts no more")

    def _call(self, sender: ChannelSender, header: bytes) -> asyncio.Future[CallResult]:
        return sender.send_nowait(header, read=lambda reply: _read_reply(reply, sender.peer))

    def _missing(self) -> str:
        missing = []
        for sender in self._senders:
            if not sender.answered:
                where = f"published at {sender.endpoint.address}, no answer" if sender.endpoint else "not published"
                missing.append(f"{sender.peer} ({where})")
        return ", ".join(missing)


def _read_reply(reply: bytes, worker: str) -> CallResult:
    try:
        answer: _Success | _Failure = _decode_reply(reply)
    except DECODE_ERRORS as error:
        raise RemoteCallError(worker, f"its reply cannot be read: {error}") from error
    if isinstance(answer, _Failure):
        raise RemoteCallError(answer.worker, answer.message, answer.traceback)
    return answer.result


class Call:
    """A call that has arrived at a worker. Answer it once, with `reply` or `fail`, on the event loop's thread."""

    __slots__ = ("_delivery", "_worker", "body", "global_seq", "worker_seq")

    def __init__(self, delivery: Delivery, header: _CallHeader, worker: str) -> None:
        self._delivery = delivery
        self._worker = worker
        self.global_seq = header.global_seq
        self.worker_seq = delivery.seq
        self.body = header.body

    def reply(self, result: CallResult) -> None:
        self._delivery.ack(_encoder.encode(_Success(result)))

    @contextlib.asynccontextmanager
    async def answering_errors(self) -> AsyncIterator[None]:
        """Answer with the error of the block if it raises one, shortly before the error ends this worker."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            await asyncio.sleep(_LAST_WORDS_S)
            raise

    def fail(self, error: BaseException) -> None:
        """Answer that the call failed. The caller's future raises RemoteCallError with this error and its traceback."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        message = f"{type(error).__name__}: {error}"
        self._delivery.ack(_encoder.encode(_Failure(self._worker, message, text)))


class NameResolvingReplyServer(PublishedReceiver[Call]):
    """Receives calls at a worker, in worker_seq order without gaps.

    consumes: the stream of calls.  produces: Call.  waits for: the next call in order.  unblocked by: the client;
    close.
    """

    _what = "call"

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        index: int,
        runtime: RuntimeConfig,
        lease: int | None = None,
        transport: Transport | None = None,
        worker: str = "",
        attempt: int = 1,
        group_incarnation: int = 0,
    ) -> None:
        """worker: its name in messages to callers; default: the model worker of this index.
        group_incarnation: of its worker group.
        """
        super().__init__(
            resolver,
            names,
            request_stream(index),
            label=worker or _worker_name(index),
            runtime=replace(runtime, push_credit_items=CALL_CREDIT_ITEMS),
            ordered=True,
            lease=lease,
            transport=transport or transport_of(runtime.faults, f"replies of {_worker_name(index)}"),
            attempt=attempt,
            group_incarnation=group_incarnation,
        )

    async def receive(self) -> Call:
        """Return the next call. A cancelled receive changes nothing."""
        return await self._next()

    def _read(self, delivery: Delivery) -> Call:
        header = _decode_call(delivery.header)
        if not self._attempts.is_current(header.attempt):
            raise CodecError(f"the call is of attempt {header.attempt}, this worker of attempt {self._attempts.newest}")
        return Call(delivery, header, self._label)
