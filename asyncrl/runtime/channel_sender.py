"""The sending end of a channel; channel.py says how the parts fit together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from asyncrl.protocol.messages import DECODE_ERRORS
from asyncrl.runtime.channel_state import Outgoing, SendWindow
from asyncrl.runtime.channel_wire import (
    ENVELOPE_SLACK,
    QUEUE_SLACK,
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ChannelLimits,
    ChannelRefused,
    Data,
    Endpoint,
    Probe,
    ReceiverRestarted,
    decode_report,
    digest_of,
    encode,
    pack,
)
from asyncrl.runtime.names.interface import NameResolver, Watch, WatchEvent
from asyncrl.runtime.transport import PullSocket, PushSocket, Transport, ZmqTransport

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)


class _Message:
    """A message in the sender's hands: in the backlog until credit admits it, then in the window until it is settled."""

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
        self.digest: int | None = None  # of the frames as they were when first sent

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
    """The way to the present receiver, and the address of the way back."""

    endpoint: Endpoint
    push: PushSocket
    back: str


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
        on_connect: Callable[[Endpoint], None] = lambda endpoint: None,
        transport: Transport | None = None,
    ) -> None:
        """on_connect: called when it follows the name to a receiver, before anything is sent there."""
        self.name = name
        self.peer = peer
        self._limits = limits
        self._host = host
        self._on_restart = on_restart
        self._on_connect = on_connect
        self._transport = transport or ZmqTransport()
        self._incarnation = f"{incarnation}.{self._transport.new_id()[:12]}"
        self._window: SendWindow[_Message] = SendWindow(
            credit_items=limits.credit_items, credit_bytes=limits.credit_bytes, resend_after_s=limits.resend_after_s
        )
        self._backlog: OrderedDict[_Message, None] = OrderedDict()  # callers of send that wait for credit
        self._link: _Link | None = None  # None: no receiver has appeared under the name yet
        self._answered = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._watch: Watch | None = None
        self._pull: PullSocket | None = None
        self._failure: Exception | None = None  # why nothing more can be sent
        self._closed = False
        self.num_resent = 0
        self.num_malformed = 0

    async def start(self, resolver: NameResolver | None = None, key: str = "") -> None:
        """Bind the way back; follow the receiver published under `key`. Does not wait for it (see wait_answered)."""
        self._loop = asyncio.get_running_loop()
        self._pull = self._transport.bind_pull(
            self._host,
            queue_messages=2 * self._limits.credit_items + QUEUE_SLACK,
            max_frame_bytes=self._limits.max_message_bytes + ENVELOPE_SLACK,
        )
        self._pull.listen(self._on_report, self._reading_failed)
        if resolver is not None:
            self._watch = await asyncio.to_thread(
                resolver.watch, key, self._name_changed, limit_s=self._limits.start_timeout_s
            )

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
        return self._link.endpoint if self._link is not None else None

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
        before = self.endpoint
        if endpoint == before or self._closed or self._pull is None:
            return
        if before is not None and endpoint.place < before.place:
            logger.warning(
                "%s: %s of attempt %d, life %d is ignored: it is over",
                self.name,
                endpoint.incarnation,
                *endpoint.place,
            )
            return
        push = self._transport.connect_push(
            endpoint.address, queue_messages=2 * self._limits.credit_items + QUEUE_SLACK
        )
        if self._link is not None:
            logger.info("%s: %s is now %s", self.name, self.peer, endpoint.incarnation)
            self._link.push.close()
        restarted = before is not None and (self._window.answered or endpoint.life > before.life)
        self._link = link = _Link(endpoint, push, self._pull.address)
        self._answered.clear()
        if restarted and self._on_restart == "fail":
            self.fail_all(ReceiverRestarted(f"{self.peer} was restarted before it answered"))
        self._on_connect(endpoint)
        for out in self._window.new_receiver(self._loop.time()):
            self._transmit(out, link)
        self._send_probe([], link)  # asks for a sign of life
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
        self._check_size(message, self._limits.max_message_bytes)
        return message

    def _check_size(self, message: _Message, max_bytes: int) -> None:
        if message.nbytes > max_bytes:
            raise ChannelRefused(
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
            try:
                self._check_size(message, endpoint.max_message_bytes)
            except ChannelRefused as error:
                self._window.settle(out.seq, self._loop.time())
                message.fail(error)
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
        # A full socket is no error: the next probe finds the message missing.
        link.push.send_nowait([encode(envelope), *packed])

    def _send_probe(self, seqs: list[int], link: _Link) -> None:
        probe = Probe(link.endpoint.incarnation, self._incarnation, self.name, link.back, self._window.low, seqs)
        link.push.send_nowait([encode(probe)])

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.resend_after_s / 2, self._tick)

    def _tick(self) -> None:
        """The channel's one timer: runs while something is unsettled."""
        self._timer = None
        seqs = self._window.probe(self._loop.time())
        if seqs is not None and self._link is not None:
            self._send_probe(seqs, self._link)
        if self._window.num_pending or not self._window.answered:
            self._start_timer()

    def _expire(self, message: _Message, what: str, timeout_s: float) -> None:
        if message in self._backlog:
            state = f"still without credit: {self._window.num_pending} messages are unsettled"
        elif self._link is None:
            state = "nobody is published there"
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
        except (*DECODE_ERRORS, ValueError) as error:
            logger.error(
                "%s: what is published for %s is not an endpoint: %r (%s)", self.name, self.peer, published, error
            )
