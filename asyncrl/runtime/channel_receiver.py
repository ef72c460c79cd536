"""The receiving end of a channel; channel.py says how the parts fit together."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncrl.protocol.messages import DECODE_ERRORS
from asyncrl.runtime.channel_state import InOrder, PeerLedger, Verdict
from asyncrl.runtime.channel_wire import (
    ENVELOPE_SLACK,
    QUEUE_SLACK,
    ChannelClosed,
    ChannelLimits,
    Data,
    Endpoint,
    Probe,
    Report,
    decode_forward,
    digest_of,
    encode,
    has_sizes,
    unpack,
)
from asyncrl.runtime.transport import PullSocket, PushSocket, Transport, ZmqTransport

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

MAX_PEERS = 4096  # senders a receiver remembers; beyond, the one that has been silent longest is forgotten
_REPORT_VERDICTS = 8  # travel together at most: the sender is to go on while the receiver does


class _Peer:
    """A sender, as the receiver knows it."""

    __slots__ = ("back", "ledger", "name", "order", "push", "source", "unsent")

    def __init__(self, source: str, name: str, back: str, low: int) -> None:
        self.source = source
        self.name = name
        self.back = back
        self.ledger = PeerLedger(low)
        self.order: InOrder[Delivery | None] = InOrder(low)
        self.push: PushSocket | None = None
        self.unsent: list[tuple[int, Verdict]] = []  # verdicts that go with the next report


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
    """

    def __init__(
        self,
        name: str,
        *,
        limits: ChannelLimits,
        host: str,
        ordered: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self.name = name
        self._limits = limits
        self._host = host
        self._ordered = ordered
        self._transport = transport or ZmqTransport()
        self._incarnation = f"{name}.{self._transport.new_id()[:12]}"
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by incarnation, the longest silent first
        self._queue: asyncio.Queue[Delivery | Exception] = asyncio.Queue()  # an error: the reader has ended
        self._queue_bytes = 0
        self._paused = False
        self._pull: PullSocket | None = None
        self._failure: Exception | None = None
        self.num_malformed = 0  # messages that could not even be answered
        self.num_damaged = 0  # messages whose frames were not what was sent

    async def start(self) -> Endpoint:
        """Bind. Publish the result under the channel's name."""
        limits = self._limits
        self._pull = self._transport.bind_pull(
            self._host,
            queue_messages=limits.credit_items + QUEUE_SLACK,
            max_frame_bytes=limits.max_message_bytes + ENVELOPE_SLACK,
        )
        self._loop = asyncio.get_running_loop()
        self._pull.listen(self._arrive, self._reading_failed)
        return Endpoint(self._pull.address, self._incarnation, limits.max_message_bytes)

    async def receive(self) -> Delivery:
        """The next delivery. A cancelled receive changes nothing. Raises ChannelClosed after close."""
        if self._failure is not None and self._queue.empty():
            raise self._failure
        delivery = await self._queue.get()
        if isinstance(delivery, Exception):
            self._queue.put_nowait(delivery)  # for other tasks that wait
            raise delivery
        self._queue_bytes -= delivery.nbytes
        if self._paused and not self._full() and self._pull is not None:
            self._paused = False
            self._pull.resume()
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
        """Enough waits for `receive`: read no more until it has come. What then waits in sockets is bounded by the credit."""
        return self._queue.qsize() >= self._limits.credit_items or self._queue_bytes >= self._limits.credit_bytes

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
                return  # for an earlier holder of the address: the sender will find the new one
            peer = self._peers.get(message.source) or self._new_peer(message)
        except (*DECODE_ERRORS, ValueError) as error:
            self.num_malformed += 1
            if self.num_malformed & (self.num_malformed - 1) == 0:
                logger.warning("%s: unreadable message (number %d): %s", self.name, self.num_malformed, error)
            return
        self._peers.move_to_end(message.source)
        if isinstance(message, Probe):
            self._answer(peer, message.seqs, message.low)
            return
        if digest_of(frames[1:]) != message.digest and has_sizes(frames[1:], message.sizes):  # else malformed: refused
            self._note_damaged(peer, message.seq)
            self._answer(peer, [message.seq], message.low)  # as if it had been asked for: it is missing, and sent again
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
        """Say of these messages which are settled, and which have not come."""
        if self._ordered:
            self._enqueue(peer.order.advance(low))
        settled, missing = peer.ledger.asked(seqs, low)
        self._report(peer, settled, missing)

    def _note_damaged(self, peer: _Peer, seq: int) -> None:
        self.num_damaged += 1
        if self.num_damaged & (self.num_damaged - 1) == 0:
            logger.warning(
                "%s: message %d of %s was damaged on its way (number %d); it is asked for again",
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
            if nbytes > self._limits.max_message_bytes:
                raise ValueError(f"{nbytes} bytes: runtime.max_message_bytes is {self._limits.max_message_bytes}")
            delivery = Delivery(self, peer, message.seq, message.header, views, nbytes)
        except ValueError as error:
            self._settle(peer, message.seq, Verdict(True, f"{self.name}: {error}".encode()))
        self._enqueue(peer.order.arrive(message.seq, message.low, delivery) if self._ordered else (delivery,))

    def _enqueue(self, deliveries: Sequence[Delivery | None]) -> None:
        for delivery in deliveries:
            if delivery is not None:  # else it was refused, and only keeps its place in the order
                self._queue_bytes += delivery.nbytes
                self._queue.put_nowait(delivery)
        if not self._paused and self._full() and self._pull is not None:
            self._paused = True
            self._pull.pause()

    def _settle(self, peer: _Peer, seq: int, verdict: Verdict) -> None:
        """Verdicts given in one turn of the event loop travel together, up to a few; the last one that can come goes at once."""
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
        # A full socket is no error: the sender will ask.
        peer.push.send_nowait([encode(Report(peer.source, self._incarnation, verdicts, missing))])

    def _connect(self, back: str) -> PushSocket:
        return self._transport.connect_push(back, queue_messages=2 * self._limits.credit_items + QUEUE_SLACK)

    def _new_peer(self, message: Data | Probe) -> _Peer:
        peer = _Peer(message.source, message.name, message.back, message.low)
        peer.push = self._connect(peer.back)
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
