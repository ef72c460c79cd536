"""Channels: acknowledged messages from many senders to one receiver. push_pull.py and request_reply.py are built on them.

        ChannelSender  -- data, resend queries (PUSH) -->  (PULL)  ChannelReceiver
              (PULL)  <-- verdicts, missing messages (PUSH) --

A message is a typed header and raw frames, in one multipart message. The sender keeps it until the receiving
application settles it with a verdict (bytes, or a refusal with its reason), and sends it again if it was lost on the
way. The application of one receiver incarnation gets each message at most once. Each message contains the address to
which the receiver sends verdicts. A receiver publishes its Endpoint under a name. Senders follow the name. When another
receiver appears there, they send it the unsettled messages, or fail them (`on_restart`).

Backpressure: if the receiving application does not receive or settle messages, the senders run out of credit and their
`send` waits. The credit bounds both the messages that can be sent again and those queued in sockets.

The sender follows a name; PublishedReceiver is a receiver that publishes itself under one. Wire messages and the
decisions of both ends are in channel_protocol.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from asyncrl.config.schema import RuntimeConfig
from asyncrl.protocol.errors import DECODE_ERRORS, CodecError
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.names import Names
from asyncrl.runtime.channel_protocol import (
    ENVELOPE_SLACK,
    QUEUE_SLACK,
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ChannelRefused,
    Data,
    Endpoint,
    InOrder,
    Outgoing,
    PeerLedger,
    ReceiverRestarted,
    Report,
    ResendQuery,
    SendWindow,
    Verdict,
    decode_forward,
    decode_report,
    digest_of,
    encode,
    has_sizes,
    pack,
    unpack,
)
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolver, Watch, WatchEvent
from asyncrl.runtime.transport import PullSocket, PushSocket, Transport, ZmqTransport

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Senders that a receiver remembers. Above this, it forgets the longest silent one of those whose messages are all settled.
MAX_PEERS = 4096
_REPORT_VERDICTS = 8  # maximum verdicts per report, so that the sender can continue while the receiver works


# ------------------------------------------------------------------------------------------------------ the sending end


class _Message:
    """A message at the sender: in the backlog until credit admits it, then in the window until it is settled."""

    __slots__ = ("digest", "frames", "future", "header", "nbytes", "read", "sizes")

    def __init__(
        self, header: bytes, frames: Sequence[Buffer], read: Callable[[bytes], Any], future: asyncio.Future[Any]
    ) -> None:
        self.header = header
        self.frames = frames
        self.sizes = [memoryview(frame).nbytes for frame in frames]
        self.nbytes = len(header) + sum(self.sizes)
        self.read = read
        self.future = future
        self.digest: int | None = None  # checksum of the frames, computed when they are first sent

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


class _Link(NamedTuple):
    """The connection to the current receiver, and the address for replies."""

    endpoint: Endpoint
    push: PushSocket
    back: str


class ChannelSender:
    """Sends to the current receiver under a name.

    consumes: messages from `send` and `send_nowait`; verdicts from the receiver.
    produces: one verdict per message, or an error.
    waits for: credit (freed by verdicts), a receiver to appear under the name, verdicts. `send` limits all three
    together.
    unblocked by: the receiving application settling messages; a new receiver; close.

    on_restart decides about unsettled messages when a new incarnation of the receiver appears: `resend` sends them again
    (the application must recognize repeated messages by their content). `fail` fails them with ReceiverRestarted, unless
    the old incarnation has never answered and both have the same group incarnation; then they are sent again.
    """

    def __init__(
        self,
        name: str,
        peer: str,
        incarnation: str,
        *,
        runtime: RuntimeConfig,
        on_restart: Literal["resend", "fail"] = "resend",
        on_connect: Callable[[Endpoint], None] = lambda endpoint: None,
        transport: Transport | None = None,
    ) -> None:
        """on_connect: called when the sender has followed the name to a receiver, before it sends any message there."""
        self.name = name
        self.peer = peer
        self._runtime = runtime
        self._on_restart = on_restart
        self._on_connect = on_connect
        self._transport = transport or ZmqTransport()
        self._incarnation = f"{incarnation}.{self._transport.new_id()[:12]}"
        self._window: SendWindow[_Message] = SendWindow(
            credit_items=runtime.push_credit_items,
            credit_bytes=runtime.push_credit_bytes,
            resend_after_s=runtime.resend_after_s,
        )
        self._backlog: OrderedDict[_Message, None] = OrderedDict()  # messages of `send` that wait for credit
        self._places = Fence[tuple[int, int] | None](None)  # of receivers under the name; see Endpoint.place
        self._link: _Link | None = None  # None: no receiver has appeared under the name yet
        self._answered = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watch: Watch | None = None
        self._pull: PullSocket | None = None
        self._failure: Exception | None = None  # the reason why no more messages can be sent
        self._closed = False
        self.is_published = False  # whether the name that `start` follows has a receiver now
        self.num_resent = 0
        self.num_malformed = 0

    async def start(self, resolver: NameResolver | None = None, key: str = "") -> None:
        """Bind the socket for replies and follow the receiver published under `key`. Does not wait for a receiver."""
        self._loop = asyncio.get_running_loop()
        self._pull = self._transport.bind_pull(
            self._runtime.host,
            queue_messages=2 * self._runtime.push_credit_items + QUEUE_SLACK,
            max_frame_bytes=self._runtime.max_message_bytes + ENVELOPE_SLACK,
        )
        self._pull.listen(self._on_report, self._reading_failed)
        if resolver is not None:
            self._watch = await asyncio.to_thread(
                resolver.watch, key, self._name_changed, limit_s=self._runtime.start_limit_s
            )

    @property
    def num_pending(self) -> int:
        """Number of unsettled messages, including those that wait for credit."""
        return self._window.num_pending + len(self._backlog)

    @property
    def pending_bytes(self) -> int:
        """Bytes sent and not yet settled: at most the credit, or one larger message."""
        return self._window.pending_bytes

    @property
    def endpoint(self) -> Endpoint | None:
        return self._link.endpoint if self._link is not None else None

    @property
    def answered(self) -> bool:
        """Whether the current incarnation of the receiver has answered."""
        return self._window.answered

    async def wait_answered(self) -> None:
        """Wait until a receiver has answered. The caller bounds the wait."""
        await self._answered.wait()

    async def send(self, header: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float, what: str) -> bytes:
        """Send and wait for the verdict, at most timeout_s in total. The frames must stay unchanged until the message is
        settled.

        After TimeoutError or cancellation, a message that had no credit is never sent. For a message that had credit the
        outcome is unknown: it may still be delivered, and it counts against the credit until it is settled.
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
        """Return whether send_nowait would accept such messages now."""
        return not self._backlog and self._window.can_admit(nbytes, count)

    def send_nowait(
        self, header: bytes, frames: Sequence[Buffer] = (), *, read: Callable[[bytes], Any] = bytes
    ) -> asyncio.Future[Any]:
        """Send without waiting. The future gets `read(verdict)` or an error. Raises ChannelFull if there is no credit."""
        message = self._message(header, frames, read)
        if not self.can_send(message.nbytes):
            raise ChannelFull(
                f"{self.peer} has {self.num_pending} unsettled messages, which use up the credit of {self.name}"
            )
        self._admit(message)
        return message.future

    def connect(self, endpoint: Endpoint) -> None:
        """Send to this receiver from now on, unless a later one is known (Endpoint.place). Also called whenever the name that
        `start` follows gets a new endpoint.
        """
        before = self.endpoint
        if endpoint == before or self._closed or self._pull is None:
            return
        if self._places.is_over(endpoint.place):
            logger.warning(
                "%s: ignoring the old receiver %s of attempt %d, incarnation %d of its worker group",
                self.name,
                endpoint.incarnation,
                *endpoint.place,
            )
            return
        push = self._transport.connect_push(
            endpoint.address, queue_messages=2 * self._runtime.push_credit_items + QUEUE_SLACK
        )
        if self._link is not None:
            logger.info("%s: %s is now %s", self.name, self.peer, endpoint.incarnation)
            self._link.push.close()
        restarted = before is not None and (
            self._window.answered or endpoint.group_incarnation > before.group_incarnation
        )
        self._places.adopt(endpoint.place)
        self._link = link = _Link(endpoint, push, self._pull.address)
        self._answered.clear()
        if restarted and self._on_restart == "fail":
            self.fail_all(ReceiverRestarted(f"{self.peer} was restarted before it answered"))
        self._on_connect(endpoint)
        for out in self._window.new_receiver(self._loop.time()):
            self._transmit(out, link)
        self._send_query([], link)  # asks whether the receiver is alive
        self._start_timer()

    def fail_all(self, error: Exception) -> None:
        """Fail all unsettled messages with this error; they are not sent again."""
        for message in [*self._window.clear(), *self._backlog]:
            message.fail(error)
            if not message.future.cancelled():
                message.future.exception()  # mark as retrieved: possibly no task awaits it
        self._backlog.clear()

    async def close(self) -> None:
        """Close the channel. All unsettled messages fail with ChannelClosed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._failure = ChannelClosed(f"{self.name} has closed its channel to {self.peer}")
        self.fail_all(self._failure)
        if self._timer is not None:
            self._timer.cancel()
        if self._pull is not None:
            self._pull.close()
        if self._link is not None:
            self._link.push.close()
        if self._watch is not None:
            await asyncio.to_thread(self._watch.cancel)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _message(self, header: bytes, frames: Sequence[Buffer], read: Callable[[bytes], Any] = bytes) -> _Message:
        if self._failure is not None:
            raise self._failure
        message = _Message(header, frames, read, self._loop.create_future())
        if message.nbytes > self._runtime.max_message_bytes:
            raise self._too_large(message, self._runtime.max_message_bytes)
        return message

    def _too_large(self, message: _Message, max_bytes: int) -> ChannelRefused:
        return ChannelRefused(
            f"a message of {message.nbytes} bytes to {self.peer}: runtime.max_message_bytes is {max_bytes}"
        )

    def _admit(self, message: _Message) -> None:
        out = self._window.admit(message, message.nbytes, self._loop.time())
        if self._link is not None:
            self._transmit(out, self._link)
            if self._timer is None:
                self._start_timer()

    def _transmit(self, out: Outgoing[_Message], link: _Link) -> None:
        message, endpoint = out.item, link.endpoint
        if message.nbytes > endpoint.max_message_bytes:
            self._window.settle(out.seq, self._loop.time())
            message.fail(self._too_large(message, endpoint.max_message_bytes))
            return
        packed = pack(message.frames, message.sizes)
        if message.digest is None:
            message.digest = digest_of(packed)
        envelope = Data(
            endpoint.incarnation,
            self._incarnation,
            self.name,
            link.back,
            self._window.low,
            out.seq,
            message.sizes,
            message.header,
            message.digest,
        )
        # A full socket is not an error: the next resend query reveals the missing message.
        link.push.send_nowait([encode(envelope), *packed])

    def _send_query(self, seqs: list[int], link: _Link) -> None:
        query = ResendQuery(link.endpoint.incarnation, self._incarnation, self.name, link.back, self._window.low, seqs)
        link.push.send_nowait([encode(query)])

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._runtime.resend_after_s / 2, self._tick)

    def _tick(self) -> None:
        """The channel's only timer. It runs while messages are unsettled or the current receiver has not answered."""
        self._timer = None
        seqs = self._window.resend_query(self._loop.time())
        if seqs is not None and self._link is not None:
            self._send_query(seqs, self._link)
        if self._window.num_pending or not self._window.answered:
            self._start_timer()

    def _expire(self, message: _Message, what: str, timeout_s: float) -> None:
        if message in self._backlog:
            state = f"still without credit: {self._window.num_pending} messages are unsettled"
        elif self._link is None:
            state = "no receiver is published there"
        else:
            state = "it has answered before" if self._window.answered else "it has never answered"
        message.fail(TimeoutError(f"{self.name}: waited {timeout_s:g} s for {self.peer} to settle {what}; {state}"))

    def _reading_failed(self, error: Exception) -> None:
        logger.error("%s: reading verdicts of %s failed", self.name, self.peer, exc_info=error)
        self._failure = ChannelError(f"{self.name} cannot read the verdicts of {self.peer}: {error!r}")
        self.fail_all(self._failure)

    def _on_report(self, frames: Sequence[Buffer]) -> None:
        try:
            report = decode_report(bytes(frames[0]))
        except DECODE_ERRORS as error:
            self.num_malformed += 1
            if self.num_malformed & (self.num_malformed - 1) == 0:
                logger.warning("%s: unreadable report (number %d): %s", self.name, self.num_malformed, error)
            return
        link = self._link
        if report.target != self._incarnation or link is None or report.source != link.endpoint.incarnation:
            return  # for an earlier sender, or from an earlier receiver: the report is ignored
        now = self._loop.time()
        if not self._window.answered:
            self._window.answered = True
            self._answered.set()
        for seq, refused, body in report.verdicts:
            message = self._window.settle(seq, now)
            if message is not None:
                message.settle(refused, body)
        if report.missing:
            self._on_missing(report.missing, link, now)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._backlog and self._window.can_admit(next(iter(self._backlog)).nbytes):
            self._admit(self._backlog.popitem(last=False)[0])

    def _on_missing(self, seqs: Sequence[int], link: _Link, now: float) -> None:
        again, lost = self._window.missing(seqs, now)
        for out in again:
            self.num_resent += 1
            self._transmit(out, link)
        for message in lost:
            message.fail(ChannelRefused(f"{self.peer} did not receive the message despite repeated sends"))

    def _name_changed(self, event: WatchEvent) -> None:
        """Called on a thread of the resolver."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._follow, event.value)

    def _follow(self, published: str | None) -> None:
        self.is_published = bool(published)
        if not published:
            return  # the receiver's lease expired; the next receiver will be published
        try:
            self.connect(msgspec.json.decode(published, type=Endpoint))
        except (*DECODE_ERRORS, ValueError) as error:
            logger.error(
                "%s: the value published for %s is not an endpoint: %r (%s)", self.name, self.peer, published, error
            )


# ---------------------------------------------------------------------------------------------------- the receiving end


class _Peer:
    """The receiver's record of a sender."""

    __slots__ = ("back", "ledger", "name", "order", "push", "source", "unsent")

    def __init__(self, source: str, name: str, back: str, low: int) -> None:
        self.source = source
        self.name = name
        self.back = back
        self.ledger = PeerLedger(low)
        self.order: InOrder[Delivery | None] = InOrder(low)
        self.push: PushSocket | None = None
        self.unsent: list[tuple[int, Verdict]] = []  # verdicts for the next report


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
        self.frames = frames  # views of received memory: read-only, possibly misaligned
        self.nbytes = nbytes

    @property
    def sender(self) -> str:
        return self._peer.name

    def ack(self, verdict: bytes = b"") -> None:
        """Accept the message: the sender gets the verdict and forgets the message. Call this once the message cannot be
        lost here."""
        self._settle(Verdict(False, verdict))

    def refuse(self, reason: str) -> None:
        """Refuse the message. The sender's `send` raises ChannelRefused with this reason."""
        self._settle(Verdict(True, reason.encode()))

    def _settle(self, verdict: Verdict) -> None:
        if self._settled:
            raise RuntimeError(f"message {self.seq} of {self.sender} is already settled")
        self._settled = True
        self._receiver._settle(self._peer, self.seq, verdict)


class ChannelReceiver:
    """Receives from any number of senders. A new object is a new incarnation.

    consumes: messages and resend queries from the socket.
    produces: deliveries, each message once; verdicts and missing numbers, to the senders.
    waits for: room among the queued deliveries (at most credit_items, credit_bytes); without room it reads nothing.
    unblocked by: `receive`.

    ordered: deliveries of one sender come in the order of sending. Only messages that the sender has given up are skipped.
    The sender must have on_restart="fail".
    """

    def __init__(
        self,
        name: str,
        *,
        runtime: RuntimeConfig,
        ordered: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self.name = name
        self._runtime = runtime
        self._ordered = ordered
        self._transport = transport or ZmqTransport()
        self._incarnation = f"{name}.{self._transport.new_id()[:12]}"
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by sender incarnation, the longest silent first
        self._queue: asyncio.Queue[Delivery | Exception] = asyncio.Queue()  # an error: no further messages arrive
        self._queue_bytes = 0
        self._paused = False
        self._pull: PullSocket | None = None
        self._failure: Exception | None = None
        self.num_malformed = 0  # messages too malformed to be answered
        self.num_damaged = 0  # messages with frames that did not match their digest

    async def start(self) -> Endpoint:
        """Bind the socket. The caller publishes the result under the channel's name."""
        runtime = self._runtime
        self._pull = self._transport.bind_pull(
            self._runtime.host,
            queue_messages=runtime.push_credit_items + QUEUE_SLACK,
            max_frame_bytes=runtime.max_message_bytes + ENVELOPE_SLACK,
        )
        self._loop = asyncio.get_running_loop()
        self._pull.listen(self._arrive, self._reading_failed)
        return Endpoint(self._pull.address, self._incarnation, runtime.max_message_bytes)

    async def receive(self) -> Delivery:
        """Return the next delivery. A cancelled receive changes nothing. Raises ChannelClosed, or the error of the socket."""
        if self._failure is not None and self._queue.empty():
            raise self._failure
        delivery = await self._queue.get()
        if isinstance(delivery, Exception):
            self._queue.put_nowait(delivery)  # for other waiting tasks
            raise delivery
        self._queue_bytes -= delivery.nbytes
        if self._paused and not self._full() and self._pull is not None:
            self._paused = False
            self._pull.resume()
        return delivery

    @property
    def num_queued(self) -> int:
        """Number of deliveries that wait for `receive`."""
        return self._queue.qsize()

    @property
    def num_remembered(self) -> int:
        """Number of remembered sequence numbers of all senders; bounded by their windows."""
        return sum(len(peer.ledger) for peer in self._peers.values())

    async def close(self) -> None:
        """Close the sockets. Idempotent. Verdicts given just before may be lost with the sockets."""
        for peer in self._peers.values():
            self._flush(peer)
        if self._failure is None:
            self._end(ChannelClosed(f"{self.name} is closed"))
        if self._pull is not None:
            self._pull.close()
            self._pull = None
        for peer in self._peers.values():
            self._hang_up(peer)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _full(self) -> bool:
        """Return whether to stop reading until `receive` has made room. The credit bounds the messages that then wait
        in sockets.
        """
        return (
            self._queue.qsize() >= self._runtime.push_credit_items
            or self._queue_bytes >= self._runtime.push_credit_bytes
        )

    def _reading_failed(self, error: Exception) -> None:
        logger.error("%s: reading failed", self.name, exc_info=error)
        self._end(error)

    def _end(self, error: Exception) -> None:
        self._failure = error
        self._queue.put_nowait(error)

    def _arrive(self, frames: Sequence[Buffer]) -> None:
        try:
            message = decode_forward(bytes(frames[0]))
            if message.low < 0:
                raise msgspec.DecodeError(f"low is {message.low}")
            if message.target != self._incarnation:
                return  # for an earlier receiver at this address; the sender will find the present one by name
            peer = self._peers.get(message.source) or self._new_peer(message)
        except (*DECODE_ERRORS, ValueError) as error:
            self.num_malformed += 1
            if self.num_malformed & (self.num_malformed - 1) == 0:
                logger.warning("%s: unreadable message (number %d): %s", self.name, self.num_malformed, error)
            return
        self._peers.move_to_end(message.source)
        if isinstance(message, ResendQuery):
            self._answer(peer, message.seqs, message.low)
            return
        # Wrong sizes mean that the message is malformed, not damaged: it is refused below
        if digest_of(frames[1:]) != message.digest and has_sizes(frames[1:], message.sizes):
            self._note_damaged(peer, message.seq)
            self._answer(peer, [message.seq], message.low)  # report the message as missing: the sender sends it again
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

    def _answer(self, peer: _Peer, seqs: Sequence[int], low: int) -> None:
        """Report which of these messages are settled and which have not arrived."""
        if self._ordered:
            self._enqueue(peer.order.advance(low))
        settled, missing = peer.ledger.asked(seqs, low)
        self._report(peer, settled, missing)

    def _note_damaged(self, peer: _Peer, seq: int) -> None:
        self.num_damaged += 1
        if self.num_damaged & (self.num_damaged - 1) == 0:
            logger.warning(
                "%s: message %d of %s was damaged in transit (number %d); requesting it again",
                self.name,
                seq,
                peer.name,
                self.num_damaged,
            )

    def _accept(self, peer: _Peer, message: Data, frames: Sequence[Buffer]) -> None:
        delivery = None
        try:
            views = unpack(frames, message.sizes)
            nbytes = len(message.header) + sum(message.sizes)
            if nbytes > self._runtime.max_message_bytes:
                raise ValueError(f"{nbytes} bytes: runtime.max_message_bytes is {self._runtime.max_message_bytes}")
            delivery = Delivery(self, peer, message.seq, message.header, views, nbytes)
        except ValueError as error:
            self._settle(peer, message.seq, Verdict(True, f"{self.name}: {error}".encode()))
        self._enqueue(peer.order.arrive(message.seq, message.low, delivery) if self._ordered else (delivery,))

    def _enqueue(self, deliveries: Sequence[Delivery | None]) -> None:
        for delivery in deliveries:
            if delivery is not None:  # None: the message was refused, and only keeps its place in the order
                self._queue_bytes += delivery.nbytes
                self._queue.put_nowait(delivery)
        if not self._paused and self._full() and self._pull is not None:
            self._paused = True
            self._pull.pause()

    def _settle(self, peer: _Peer, seq: int, verdict: Verdict) -> None:
        """Record a verdict and send it to the sender. Verdicts from one event-loop turn are batched, up to
        _REPORT_VERDICTS. The last outstanding verdict is sent immediately.
        """
        if not peer.ledger.settle(seq, verdict):
            return
        peer.unsent.append((seq, verdict))
        if not peer.ledger.num_held or len(peer.unsent) >= _REPORT_VERDICTS:
            self._flush(peer)
        elif len(peer.unsent) == 1:
            self._loop.call_soon(self._flush, peer)

    def _flush(self, peer: _Peer) -> None:
        if peer.unsent:
            settled, peer.unsent = peer.unsent, []
            self._report(peer, settled, [])

    def _report(self, peer: _Peer, settled: Sequence[tuple[int, Verdict]], missing: list[int]) -> None:
        if self._pull is None:
            return  # closed
        if peer.push is None:
            peer.push = self._connect(peer.back)
        verdicts = [(seq, verdict.refused, verdict.body) for seq, verdict in settled]
        # A full socket is not an error: the sender will query.
        peer.push.send_nowait([encode(Report(peer.source, self._incarnation, verdicts, missing))])

    def _connect(self, back: str) -> PushSocket:
        return self._transport.connect_push(back, queue_messages=2 * self._runtime.push_credit_items + QUEUE_SLACK)

    def _new_peer(self, message: Data | ResendQuery) -> _Peer:
        peer = _Peer(message.source, message.name, message.back, message.low)
        peer.push = self._connect(peer.back)
        for earlier in self._peers.values():
            if earlier.name == peer.name:
                self._hang_up(earlier)  # that sender is gone; its messages that have arrived remain valid
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


class FencedError(RuntimeError):
    """This process belongs to an attempt of the training side, or to a group incarnation, that a later one has replaced."""


class PublishedReceiver(ABC, Generic[T]):
    """A channel receiver that is published as a stream and returns each message as read by `_read`.

    consumes: the stream.  produces: the messages read; refusals of unreadable ones.
    waits for: a message.  unblocked by: senders; close.
    """

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        stream: str,
        *,
        label: str,
        runtime: RuntimeConfig,
        ordered: bool = False,
        lease: int | None = None,
        transport: Transport | None = None,
        attempt: int = 1,
        group_incarnation: int = 0,
    ) -> None:
        self._resolver = resolver
        self._attempts = Fence(attempt)  # fixed for the life of this receiver
        self._group_incarnation = group_incarnation
        self._key = names.stream(stream)
        self._label = label  # its name in refusals
        self._lease = lease
        self._start_timeout_s = runtime.start_limit_s
        self._receiver = ChannelReceiver(stream, runtime=runtime, ordered=ordered, transport=transport)

    async def start(self) -> None:
        """Bind first, then publish, so that a published name always has a bound socket.

        Raises FencedError if a later attempt, or a later incarnation of the worker group, holds the name.
        """
        await asyncio.to_thread(self._check_name)
        endpoint = msgspec.structs.replace(
            await self._receiver.start(), attempt=self._attempts.newest, group_incarnation=self._group_incarnation
        )
        value = msgspec.json.encode(endpoint).decode()
        await asyncio.to_thread(
            self._resolver.publish, self._key, value, lease=self._lease, limit_s=self._start_timeout_s
        )

    @property
    def num_queued(self) -> int:
        """Number of messages that have arrived and wait to be received."""
        return self._receiver.num_queued

    async def close(self) -> None:
        """Close the receiver. Verdicts given just before may be lost with the sockets."""
        await self._receiver.close()

    def _check_name(self) -> None:
        try:
            there = msgspec.json.decode(self._resolver.get(self._key), type=Endpoint)
        except (NameEntryNotFound, *DECODE_ERRORS):
            return
        attempt = self._attempts.newest
        if not Fence(there.place).is_over((attempt, self._group_incarnation)):
            return
        if there.attempt > attempt:
            raise FencedError(
                f"{self._label} of attempt {attempt} ends: attempt {there.attempt} has begun ({there.incarnation})"
            )
        raise FencedError(
            f"{self._label} in incarnation {self._group_incarnation} ends: incarnation {there.group_incarnation} of its worker"
            f" group has begun ({there.incarnation})"
        )

    async def _next(self) -> T:
        """Return the next readable message. A cancelled wait changes nothing."""
        while True:
            delivery = await self._receiver.receive()
            try:
                return self._read(delivery)
            except (*DECODE_ERRORS, CodecError) as error:
                logger.warning("%s: refused message %d of %s: %s", self._label, delivery.seq, delivery.sender, error)
                delivery.refuse(f"{self._label} cannot read the {self._what}: {error}")

    _what: str  # the word for a message in refusals, such as `call`

    @abstractmethod
    def _read(self, delivery: Delivery) -> T:
        """Decode a message. Raises one of DECODE_ERRORS or CodecError if it is unreadable."""
