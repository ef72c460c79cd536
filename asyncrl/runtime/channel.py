"""Channels: acknowledged messages from many senders to one receiver. Both streams are built on this file.

        ChannelSender  -- data, probes (PUSH) -->  (PULL)  ChannelReceiver
              (PULL)  <-- verdicts, what is missing (PUSH) --

A message is a typed header and raw frames, in one multipart message. It is sent again until the receiving application settles
it with a verdict (a few bytes, or a refusal with its reason), and reaches the application of one receiver incarnation once.
The address to answer to is in each message. A receiver publishes its Endpoint under a name; senders follow the name, and send
what is unsettled to whoever appears there next.

Backpressure: a receiver's application that does not receive, or does not settle, leaves the senders without credit; their
`send` then waits. What can be sent again is never more than the credit, and what waits in sockets neither.

Every message begins with a checksum of its first frame, so that damage there is loss and no wrong sequence number; damage
elsewhere shows in the sizes, or when the application decodes it, and is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from asyncrl.config import RuntimeConfig
from asyncrl.messages import DECODE_ERRORS
from asyncrl.runtime.channel_state import InOrder, Outgoing, PeerLedger, SendWindow, Verdict
from asyncrl.runtime.name_resolve import NameResolver, Watch, WatchEvent
from asyncrl.runtime.transport import PullSocket, PushSocket, Transport, ZmqTransport

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

MAX_PEERS = 4096  # senders a receiver remembers; beyond, the one that has been silent longest is forgotten
_QUEUE_SLACK = 64  # room in sockets' queues above the credit, for probes and what is sent again
_ENVELOPE_SLACK = 65536  # bytes that a frame may have besides what counts as the message


class ChannelError(Exception):
    """A message was not settled, and will not be."""


class ChannelRefused(ChannelError):
    """The receiver (or, for an oversized message, the sender itself) refused a message; the text is the reason."""


class ChannelFull(ChannelError):
    """There is no credit left, and the caller would not wait."""


class ChannelClosed(ChannelError):
    """This side has closed the channel."""


class ReceiverRestarted(ChannelError):
    """The receiver is a new incarnation: what became of the message in the old one is not known."""


# ---------------------------------------------------------------------------------------------------------------- the wire


class Endpoint(Struct, frozen=True):
    """What a receiver publishes under its name (as JSON)."""

    address: str
    incarnation: str
    max_message_bytes: int


class _Data(Struct, frozen=True, array_like=True, tag="data"):
    target: str  # incarnation of the receiver it is meant for
    source: str  # incarnation of the sender
    name: str  # what the sender is called
    back: str  # address for answers
    low: int  # everything before is settled
    seq: int
    sizes: list[int]  # of the frames that follow
    header: bytes


class _Probe(Struct, frozen=True, array_like=True, tag="probe"):
    target: str
    source: str
    name: str
    back: str
    low: int
    seqs: list[int]  # have these come?


class _Report(Struct, frozen=True, array_like=True, tag="report"):
    target: str  # incarnation of the sender
    source: str  # incarnation of the receiver
    verdicts: list[tuple[int, bool, bytes]]  # sequence, refused?, body
    missing: list[int]


_encoder = msgspec.msgpack.Encoder()
_decode_forward = msgspec.msgpack.Decoder(_Data | _Probe)
_decode_report = msgspec.msgpack.Decoder(_Report)
_CHECKSUM_BYTES = 4


def _encode(message: _Data | _Probe | _Report) -> bytes:
    body = _encoder.encode(message)
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def _checked(frame: Buffer) -> memoryview:
    view = memoryview(frame)
    body = view[_CHECKSUM_BYTES:]
    if zlib.crc32(body) != int.from_bytes(view[:_CHECKSUM_BYTES], "little"):
        raise msgspec.DecodeError("the checksum does not fit")
    return body


def _incarnation(prefix: str) -> str:
    return f"{prefix}.{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class ChannelLimits:
    """Bounds of one channel."""

    credit_items: int
    credit_bytes: int
    resend_after_s: float
    max_message_bytes: int
    start_timeout_s: float

    @classmethod
    def of(cls, runtime: RuntimeConfig) -> ChannelLimits:
        return cls(
            runtime.push_credit_items,
            runtime.push_credit_bytes,
            runtime.resend_after_s,
            runtime.max_message_bytes,
            runtime.start_timeout_s,
        )


# -------------------------------------------------------------------------------------------------------------- the sender


class _Message:
    """A message in the sender's hands: in the backlog until credit admits it, then in the window until it is settled."""

    __slots__ = ("frames", "future", "header", "nbytes", "read", "sizes")

    def __init__(
        self, header: bytes, frames: Sequence[Buffer], read: Callable[[bytes], Any], future: asyncio.Future[Any]
    ) -> None:
        self.header = header
        self.frames = frames
        self.sizes = [memoryview(frame).nbytes for frame in frames]
        self.nbytes = len(header) + sum(self.sizes)
        self.read = read
        self.future = future

    def settle(self, refused: bool, verdict: bytes) -> None:
        if refused:
            self.fail(ChannelRefused(verdict.decode(errors="replace")))
        elif not self.future.done():
            try:
                self.future.set_result(self.read(verdict))
            except Exception as error:
                self.future.set_exception(error)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class ChannelSender:
    """Sends to whoever holds a name.

    consumes: what `send` and `send_nowait` are given; verdicts from the receiver.
    produces: one verdict a message, or an error.
    waits for: credit (freed by verdicts), a receiver to appear under the name, verdicts. `send` limits all three together.
    unblocked by: the receiving application settling messages; a new receiver; close.

    on_restart says what happens to unsettled messages when the receiver comes back as a new incarnation: `resend` sends them
    again (the application must tell repeated messages by their content), `fail` raises ReceiverRestarted.
    """

    def __init__(
        self,
        name: str,
        peer: str,
        incarnation: str,
        *,
        limits: ChannelLimits,
        host: str,
        on_restart: Literal["resend", "fail"] = "resend",
        transport: Transport | None = None,
    ) -> None:
        self.name = name
        self.peer = peer
        self._incarnation = _incarnation(incarnation)
        self._limits = limits
        self._host = host
        self._on_restart = on_restart
        self._transport = transport or ZmqTransport()
        self._window: SendWindow[_Message] = SendWindow(
            credit_items=limits.credit_items, credit_bytes=limits.credit_bytes, resend_after_s=limits.resend_after_s
        )
        self._backlog: OrderedDict[_Message, None] = OrderedDict()  # callers of send that wait for credit
        self._endpoint: Endpoint | None = None
        self._push: PushSocket | None = None
        self._answered = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watch: Watch | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pull: PullSocket
        self._failure: Exception | None = None  # why nothing more can be sent
        self._closed = False
        self.num_resent = 0

    async def start(self, resolver: NameResolver | None = None, key: str = "") -> None:
        """Bind the way back; follow the receiver published under `key`. Does not wait for it (see wait_answered)."""
        self._loop = asyncio.get_running_loop()
        self._pull = self._transport.bind_pull(
            self._host,
            queue_messages=2 * self._limits.credit_items + _QUEUE_SLACK,
            max_frame_bytes=self._limits.max_message_bytes + _ENVELOPE_SLACK,
            copy=True,
        )
        self._reader = asyncio.create_task(self._read(), name=f"{self.name}:verdicts from {self.peer}")
        if resolver is not None:
            self._watch = await asyncio.to_thread(resolver.watch, key, self._name_changed)

    @property
    def num_pending(self) -> int:
        """Messages not yet settled, those that wait for credit included."""
        return self._window.num_pending + len(self._backlog)

    @property
    def pending_bytes(self) -> int:
        """Bytes sent and not yet settled: at most the credit."""
        return self._window.pending_bytes

    @property
    def endpoint(self) -> Endpoint | None:
        return self._endpoint

    @property
    def answered(self) -> bool:
        """Whether the present incarnation of the receiver has been heard."""
        return self._window.answered

    async def wait_answered(self) -> None:
        """Wait until a receiver has answered. Bounded by the caller."""
        await self._answered.wait()

    async def send(self, header: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float, what: str) -> bytes:
        """Send and wait for the verdict, for at most timeout_s in all. The frames must stay unchanged until then.

        After TimeoutError or cancellation the outcome is not known: a message that had credit is still delivered, and still
        counts against the credit, until it is settled. One that had none is not sent.
        """
        message = self._message(header, frames)
        if self._backlog or not self._window.can_admit(message.nbytes):
            self._backlog[message] = None
        else:
            self._admit(message)
        expiry = self._loop.call_later(timeout_s, self._expire, message, what, timeout_s)
        try:
            verdict: bytes = await message.future
            return verdict
        finally:
            expiry.cancel()
            if message in self._backlog:
                del self._backlog[message]
                self._admit_waiting()

    def can_send(self, nbytes: int, count: int = 1) -> bool:
        """Whether send_nowait would take this now."""
        return not self._backlog and self._window.can_admit(nbytes, count)

    def send_nowait(
        self, header: bytes, frames: Sequence[Buffer] = (), *, read: Callable[[bytes], Any] = bytes
    ) -> asyncio.Future[Any]:
        """Send; the future gets what `read` makes of the verdict, or raises. Raises ChannelFull where there is no credit."""
        message = self._message(header, frames, read)
        if not self.can_send(message.nbytes):
            raise ChannelFull(
                f"{self.peer} has not settled {self.num_pending} messages; that is all the credit of {self.name}"
            )
        self._admit(message)
        return message.future

    def connect(self, endpoint: Endpoint) -> None:
        """Send to this receiver from now on. `start` calls this by itself when it follows a name."""
        if endpoint == self._endpoint or self._closed:
            return
        push = self._transport.connect_push(
            endpoint.address, queue_messages=2 * self._limits.credit_items + _QUEUE_SLACK
        )
        if self._push is not None:
            logger.info("%s: %s is now %s", self.name, self.peer, endpoint.incarnation)
            self._push.close()
        restarted = self._endpoint is not None and self._window.answered
        self._push, self._endpoint = push, endpoint
        self._answered.clear()
        if restarted and self._on_restart == "fail":
            self.fail_all(ReceiverRestarted(f"{self.peer} was restarted before it answered"))
        for out in self._window.new_receiver(self._loop.time()):
            self._transmit(out)
        self._send_probe([])  # asks for a sign of life
        self._start_timer()

    def fail_all(self, error: Exception) -> None:
        """Whatever is unsettled fails with this error, and is not sent again."""
        for message in [*self._window.clear(), *self._backlog]:
            message.fail(error)
            if not message.future.cancelled():
                message.future.exception()  # retrieved: nobody need be waiting
        self._backlog.clear()

    async def close(self) -> None:
        """Everything unsettled fails with ChannelClosed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._failure = ChannelClosed(f"{self.name} has closed its channel to {self.peer}")
        self.fail_all(self._failure)
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
            self._pull.close()
        if self._push is not None:
            self._push.close()
        if self._watch is not None:
            await asyncio.to_thread(self._watch.cancel)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _message(self, header: bytes, frames: Sequence[Buffer], read: Callable[[bytes], Any] = bytes) -> _Message:
        if self._failure is not None:
            raise self._failure
        message = _Message(header, frames, read, self._loop.create_future())
        self._check_size(message, self._limits.max_message_bytes)
        return message

    def _check_size(self, message: _Message, max_bytes: int) -> None:
        if message.nbytes > max_bytes:
            raise ChannelRefused(
                f"a message of {message.nbytes} bytes to {self.peer}: runtime.max_message_bytes is {max_bytes}"
            )

    def _admit(self, message: _Message) -> None:
        out = self._window.admit(message, message.nbytes, self._loop.time())
        if self._push is not None:
            self._transmit(out)
            if self._timer is None:
                self._start_timer()

    def _transmit(self, out: Outgoing[_Message]) -> None:
        assert self._endpoint is not None
        assert self._push is not None
        message = out.item
        if message.nbytes > self._endpoint.max_message_bytes:
            try:
                self._check_size(message, self._endpoint.max_message_bytes)
            except ChannelRefused as error:
                self._window.settle(out.seq, self._loop.time())
                message.fail(error)
            return
        envelope = _Data(
            self._endpoint.incarnation,
            self._incarnation,
            self.name,
            self._pull.address,
            self._window.low,
            out.seq,
            message.sizes,
            message.header,
        )
        # A full socket is no error: the next probe finds the message missing.
        self._push.send_nowait([_encode(envelope), *message.frames])

    def _send_probe(self, seqs: list[int]) -> None:
        assert self._endpoint is not None
        assert self._push is not None
        probe = _Probe(
            self._endpoint.incarnation, self._incarnation, self.name, self._pull.address, self._window.low, seqs
        )
        self._push.send_nowait([_encode(probe)])

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.resend_after_s / 2, self._tick)

    def _tick(self) -> None:
        """The channel's one timer: runs while something is unsettled."""
        self._timer = None
        seqs = self._window.probe(self._loop.time())
        if seqs is not None:
            self._send_probe(seqs)
        if self._window.num_pending or not self._window.answered:
            self._start_timer()

    def _expire(self, message: _Message, what: str, timeout_s: float) -> None:
        if message in self._backlog:
            state = f"still without credit: {self._window.num_pending} messages are unsettled"
        elif self._endpoint is None:
            state = "nobody is published there"
        else:
            state = "it has answered before" if self._window.answered else "it has never answered"
        message.fail(TimeoutError(f"{self.name}: waited {timeout_s:g} s for {self.peer} to settle {what}; {state}"))

    async def _read(self) -> None:
        """Reader of the way back.

        consumes: reports.  produces: results of `send`'s futures, admissions from the backlog.
        waits for: the next report.  unblocked by: the receiver; close.
        """
        try:
            while True:
                self._on_report(await self._pull.recv())
        except Exception as error:
            logger.exception("%s: reading verdicts of %s failed", self.name, self.peer)
            self._failure = ChannelError(f"{self.name} cannot read the verdicts of {self.peer}: {error!r}")
            self.fail_all(self._failure)

    def _on_report(self, frames: Sequence[Buffer]) -> None:
        try:
            report = _decode_report.decode(_checked(frames[0]))
        except DECODE_ERRORS as error:
            logger.warning("%s: unreadable report: %s", self.name, error)
            return
        if report.target != self._incarnation or self._endpoint is None or report.source != self._endpoint.incarnation:
            return  # of an earlier incarnation: what that one settled died with it
        now = self._loop.time()
        if not self._window.answered:
            self._window.heard()
            self._answered.set()
        for seq, refused, body in report.verdicts:
            message = self._window.settle(seq, now)
            if message is not None:
                message.settle(refused, body)
        if report.missing:
            self._on_missing(report.missing, now)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._backlog and self._window.can_admit(next(iter(self._backlog)).nbytes):
            self._admit(self._backlog.popitem(last=False)[0])

    def _on_missing(self, seqs: Sequence[int], now: float) -> None:
        again, lost = self._window.missing(seqs, now)
        for out in again:
            self.num_resent += 1
            self._transmit(out)
        for message in lost:
            message.fail(ChannelRefused(f"{self.peer} never got the message, however often it was sent"))

    def _name_changed(self, event: WatchEvent) -> None:
        """Called on a thread of the resolver."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._follow, event.value)

    def _follow(self, published: str | None) -> None:
        if not published:
            return  # its lease ran out: whoever comes next will be published
        try:
            self.connect(msgspec.json.decode(published, type=Endpoint))
        except (msgspec.DecodeError, ValueError) as error:
            logger.error(
                "%s: what is published for %s is not an endpoint: %r (%s)", self.name, self.peer, published, error
            )


# ------------------------------------------------------------------------------------------------------------ the receiver


class _Peer:
    """A sender, as the receiver knows it."""

    __slots__ = ("back", "ledger", "name", "order", "push", "source")

    def __init__(self, source: str, name: str, back: str, low: int) -> None:
        self.source = source
        self.name = name
        self.back = back
        self.ledger = PeerLedger(low)
        self.order: InOrder[Delivery | None] = InOrder(low)
        self.push: PushSocket | None = None


class Delivery:
    """A message that has arrived. Settle it once, with `ack` or `refuse`, on the event loop's thread."""

    __slots__ = ("_peer", "_receiver", "_settled", "frames", "header", "nbytes", "seq")

    def __init__(
        self, receiver: ChannelReceiver, peer: _Peer, seq: int, header: bytes, frames: Sequence[Buffer], nbytes: int
    ) -> None:
        self._receiver = receiver
        self._peer = peer
        self._settled = False
        self.seq = seq
        self.header = header
        self.frames = frames  # views of received memory: read-only, and perhaps misaligned
        self.nbytes = nbytes

    @property
    def sender(self) -> str:
        return self._peer.name

    def ack(self, verdict: bytes = b"") -> None:
        """The message is safe here: the sender gets the verdict and forgets the message."""
        self._settle(Verdict(False, verdict))

    def refuse(self, reason: str) -> None:
        """The message is no good: the sender's `send` raises ChannelRefused with this reason."""
        self._settle(Verdict(True, reason.encode()))

    def _settle(self, verdict: Verdict) -> None:
        if self._settled:
            raise RuntimeError(f"message {self.seq} of {self.sender} is settled already")
        self._settled = True
        self._receiver._settle(self._peer, self.seq, verdict)


class ChannelReceiver:
    """Receives from any number of senders. A new object is a new incarnation.

    consumes: messages and probes from the socket.
    produces: deliveries, each message once; verdicts, and what is missing, to the senders.
    waits for: room among the deliveries not yet received (queue_items, queue_bytes): meanwhile it reads nothing.
    unblocked by: `receive`.

    ordered: deliveries of one sender come in the order of sending without gaps (its channel must have on_restart="fail").
    copy: frames come as bytes; else as views of the received memory, for large ones.
    """

    def __init__(
        self,
        name: str,
        *,
        limits: ChannelLimits,
        host: str,
        ordered: bool = False,
        copy: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self.name = name
        self._incarnation = _incarnation(name)
        self._limits = limits
        self._host = host
        self._ordered = ordered
        self._copy = copy
        self._transport = transport or ZmqTransport()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by incarnation, the longest silent first
        self._queue: asyncio.Queue[Delivery | None] = asyncio.Queue()  # None: the reader has ended
        self._queue_bytes = 0
        self._room = asyncio.Event()
        self._pull: PullSocket
        self._reader: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.num_malformed = 0  # messages that could not even be answered

    async def start(self) -> Endpoint:
        """Bind. Publish the result under the channel's name."""
        limits = self._limits
        self._pull = self._transport.bind_pull(
            self._host,
            queue_messages=limits.credit_items + _QUEUE_SLACK,
            max_frame_bytes=limits.max_message_bytes + _ENVELOPE_SLACK,
            copy=self._copy,
        )
        self._reader = asyncio.create_task(self._read(), name=f"{self.name}:reader")
        return Endpoint(self._pull.address, self._incarnation, limits.max_message_bytes)

    async def receive(self) -> Delivery:
        """The next delivery. A cancelled receive changes nothing. Raises ChannelClosed after close."""
        if self._failure is not None and self._queue.empty():
            raise self._failure
        delivery = await self._queue.get()
        if delivery is None:
            self._queue.put_nowait(None)  # for whoever else waits
            assert self._failure is not None
            raise self._failure
        self._queue_bytes -= delivery.nbytes
        self._room.set()
        return delivery

    @property
    def num_queued(self) -> int:
        """Deliveries that wait for `receive`."""
        return self._queue.qsize()

    @property
    def num_remembered(self) -> int:
        """Sequence numbers remembered, of all senders: bounded by their windows."""
        return sum(len(peer.ledger) for peer in self._peers.values())

    async def close(self) -> None:
        """Idempotent. Verdicts given just before may be lost with the sockets."""
        if self._failure is None:
            self._end(ChannelClosed(f"{self.name} is closed"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
            self._reader = None
            self._pull.close()
        for peer in self._peers.values():
            self._hang_up(peer)

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _read(self) -> None:
        """The only reader of the socket; see the class for what it waits for."""
        try:
            while True:
                self._arrive(await self._pull.recv())
                while (
                    self._queue.qsize() >= self._limits.credit_items or self._queue_bytes >= self._limits.credit_bytes
                ):
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:
            logger.exception("%s: reading failed", self.name)
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._failure = error
        self._queue.put_nowait(None)

    def _arrive(self, frames: Sequence[Buffer]) -> None:
        try:
            message = _decode_forward.decode(_checked(frames[0]))
            if message.low < 0:
                raise msgspec.DecodeError(f"low is {message.low}")
            if message.target != self._incarnation:
                return  # for an earlier holder of the address: the sender will find the new one
            peer = self._peers.get(message.source) or self._new_peer(message)
        except (msgspec.DecodeError, ValueError) as error:
            self.num_malformed += 1
            if self.num_malformed & (self.num_malformed - 1) == 0:
                logger.warning("%s: unreadable message (number %d): %s", self.name, self.num_malformed, error)
            return
        self._peers.move_to_end(message.source)
        if isinstance(message, _Probe):
            if self._ordered:
                self._enqueue(peer.order.advance(message.low))
            settled, missing = peer.ledger.asked(message.seqs, message.low)
            self._report(peer, settled, missing)
            return
        arrival = peer.ledger.arrive(message.seq, message.low)
        if arrival == "new":
            self._accept(peer, message, frames[1:])
        elif isinstance(arrival, Verdict):
            self._report(peer, [(message.seq, arrival)], [])
        elif arrival == "beyond":
            logger.warning(
                "%s: message %d of %s is too far ahead of %d", self.name, message.seq, peer.name, message.low
            )

    def _accept(self, peer: _Peer, message: _Data, frames: Sequence[Buffer]) -> None:
        nbytes = len(message.header) + sum(message.sizes)
        sizes = [memoryview(frame).nbytes for frame in frames]
        if sizes != message.sizes:
            reason = f"malformed: frames of {sizes} bytes, announced were {message.sizes}"
        elif nbytes > self._limits.max_message_bytes:
            reason = f"{nbytes} bytes: runtime.max_message_bytes is {self._limits.max_message_bytes}"
        else:
            reason = ""
        delivery = None
        if reason:
            self._settle(peer, message.seq, Verdict(True, f"{self.name}: {reason}".encode()))
        else:
            delivery = Delivery(self, peer, message.seq, message.header, frames, nbytes)
        if self._ordered:
            self._enqueue(peer.order.arrive(message.seq, message.low, delivery))
        else:
            self._enqueue((delivery,))

    def _enqueue(self, deliveries: Sequence[Delivery | None]) -> None:
        for delivery in deliveries:
            if delivery is not None:  # else it was refused, and only keeps its place in the order
                self._queue_bytes += delivery.nbytes
                self._queue.put_nowait(delivery)

    def _settle(self, peer: _Peer, seq: int, verdict: Verdict) -> None:
        if peer.ledger.settle(seq, verdict):
            self._report(peer, [(seq, verdict)], [])

    def _report(self, peer: _Peer, settled: Sequence[tuple[int, Verdict]], missing: list[int]) -> None:
        if self._reader is None:
            return  # closed
        if peer.push is None:
            peer.push = self._transport.connect_push(
                peer.back, queue_messages=2 * self._limits.credit_items + _QUEUE_SLACK
            )
        verdicts = [(seq, verdict.refused, verdict.body) for seq, verdict in settled]
        # A full socket is no error: the sender will ask.
        peer.push.send_nowait([_encode(_Report(peer.source, self._incarnation, verdicts, missing))])

    def _new_peer(self, message: _Data | _Probe) -> _Peer:
        peer = _Peer(message.source, message.name, message.back, message.low)
        peer.push = self._transport.connect_push(peer.back, queue_messages=2 * self._limits.credit_items + _QUEUE_SLACK)
        for earlier in self._peers.values():
            if earlier.name == peer.name:
                self._hang_up(earlier)  # that sender is gone; what it sent is still good
        self._peers[peer.source] = peer
        while len(self._peers) > MAX_PEERS:
            silent = next((peer for peer in self._peers.values() if not peer.ledger.num_held), None)
            if silent is None:
                break
            self._hang_up(silent)
            del self._peers[silent.source]
        return peer

    def _hang_up(self, peer: _Peer) -> None:
        if peer.push is not None:
            peer.push.close()
            peer.push = None
