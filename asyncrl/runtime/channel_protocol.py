"""The protocol of a channel, without sockets: what crosses the wire, limits and errors, and what its two ends decide.

Every ZeroMQ message begins with a checksum of the rest of its first frame, so that damage there is loss and no wrong sequence
number; the first frame has one of the others, so that what was damaged there is sent again and no changed number is ever trained.

The two ends decide in plain classes that take events and the time. SendWindow is the sender's side: what is unacknowledged, how
much more fits, when to ask the receiver what it lacks. PeerLedger is the receiver's side, one for each sender: which sequence
numbers have come, and which verdict each was given. InOrder puts messages back in the order they were sent. channel.py runs them
over sockets.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from asyncrl.config.schema import RuntimeConfig

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

QUEUE_SLACK = 64  # room in sockets' queues above the credit, for resend queries and what is sent again
ENVELOPE_SLACK = 65536  # bytes that a frame may have besides what counts as the message
_CHECKSUM_BYTES = 4
_JOINED_BYTES = 1 << 15  # frames of up to this size travel as one: a frame costs as much as copying this
# The oldest unacknowledged message and the newest one are never further apart: this bounds what a receiver must remember.
WINDOW_SPAN = 4096
MAX_SENDS = 16  # a message that a receiver asks for again and again never will arrive: refuse it
MAX_BACKOFF = 8  # resend queries come at most this many times later than the first
MAX_QUERY = 1024  # sequence numbers in one resend query


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


# ----------------------------------------------------------------------------------------------------------- typed messages


class Endpoint(Struct, frozen=True):
    """What a receiver publishes under its name (as JSON)."""

    address: str
    incarnation: str
    max_message_bytes: int
    attempt: int = 1  # of the training side that it belongs to; senders do not go back to a lower one
    group_incarnation: int = 0  # in that attempt, of a receiver in a detached group: nor to a lower one of these

    @property
    def place(self) -> tuple[int, int]:
        """What only grows."""
        return self.attempt, self.group_incarnation


class Data(Struct, frozen=True, array_like=True, tag="data"):
    target: str  # incarnation of the receiver it is meant for
    source: str  # incarnation of the sender
    name: str  # what the sender is called
    back: str  # address for answers
    low: int  # everything before is settled
    seq: int
    sizes: list[int]  # of the message's frames; see `pack`
    header: bytes
    digest: int = 0  # of the frames as they travel; see `digest_of`


class ResendQuery(Struct, frozen=True, array_like=True, tag="probe"):
    """Asks which of these messages have come; without any, whether the receiver is there."""

    target: str
    source: str
    name: str
    back: str
    low: int
    seqs: list[int]  # have these come?


class Report(Struct, frozen=True, array_like=True, tag="report"):
    target: str  # incarnation of the sender
    source: str  # incarnation of the receiver
    verdicts: list[tuple[int, bool, bytes]]  # sequence, refused?, body
    missing: list[int]


_encoder = msgspec.msgpack.Encoder()
_forward_decoder: msgspec.msgpack.Decoder[Data | ResendQuery] = msgspec.msgpack.Decoder(Data | ResendQuery)
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Data | ResendQuery | Report) -> bytes:
    body = _encoder.encode(message)
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def decode_forward(frame: bytes) -> Data | ResendQuery:
    return _forward_decoder.decode(_checked(frame))


def decode_report(frame: bytes) -> Report:
    return _report_decoder.decode(_checked(frame))


def _checked(frame: bytes) -> bytes:
    body = frame[_CHECKSUM_BYTES:]  # a copy of a few hundred bytes costs less than a view
    if zlib.crc32(body) != int.from_bytes(frame[:_CHECKSUM_BYTES], "little"):
        raise msgspec.DecodeError("the checksum does not fit")
    return body


# ------------------------------------------------------------------------------------------------------------------- frames


def pack(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer]:
    """Frames as they travel: the small ones joined, then the others as they are. `sizes` are their sizes in bytes."""
    small: list[Buffer] = []
    large: list[Buffer] = []
    for frame, size in zip(frames, sizes, strict=True):
        (small if size <= _JOINED_BYTES else large).append(frame)
    return [b"".join(small), *large] if len(small) > 1 else [*small, *large]


def digest_of(packed: Sequence[Buffer]) -> int:
    """Checksum (xxh3) of frames as they travel; 0 of none."""
    if len(packed) < 2:
        return xxhash.xxh3_64_intdigest(packed[0]) if packed else 0
    digest = xxhash.xxh3_64()
    for frame in packed:
        digest.update(frame)
    return digest.intdigest()


def has_sizes(arrived: Sequence[Buffer], sizes: Sequence[int]) -> bool:
    """Whether as many bytes have arrived as were announced."""
    return sum(memoryview(frame).nbytes for frame in arrived) == sum(sizes)


def unpack(arrived: Sequence[Buffer], sizes: Sequence[int]) -> list[memoryview]:
    """What `pack` was given, as views. Raises ValueError where the sizes are not those of what has arrived."""
    views = [memoryview(frame) for frame in arrived]
    expected = [size for size in sizes if size > _JOINED_BYTES]
    joined = len(expected) < len(sizes)
    if joined:
        expected.insert(0, sum(sizes) - sum(expected))
    found = [view.nbytes for view in views]
    if found != expected or (sizes and min(sizes) < 0):
        raise ValueError(f"malformed: frames of {found} bytes, announced were {list(sizes)}")
    if not joined:
        return views
    frames, start, others = [], 0, iter(views[1:])
    for size in sizes:
        if size > _JOINED_BYTES:
            frames.append(next(others))
        else:
            frames.append(views[0][start : start + size])
            start += size
    return frames


# ------------------------------------------------------------------------------------------------- what the ends decide


class Verdict(NamedTuple):
    """How the receiver settled a message: a body for the sender, or the reason why it was refused."""

    refused: bool
    body: bytes


@dataclass
class Outgoing(Generic[T]):
    """A message that has not been settled."""

    seq: int
    item: T
    nbytes: int
    sent_at: float
    num_sends: int = 1


class SendWindow(Generic[T]):
    """Unsettled messages of one sender, bounded by credit in items and bytes.

    A message stays until the receiver settles it. What has waited for resend_after_s is asked about (a resend query lists sequence
    numbers, and costs next to nothing while the receiver is frozen or slow); only what the receiver then says it lacks is sent
    again. Unanswered or fruitless queries come at growing intervals. A new receiver gets everything again.
    """

    def __init__(self, *, credit_items: int, credit_bytes: int, resend_after_s: float) -> None:
        for field, value in (("items", credit_items), ("bytes", credit_bytes), ("resend_after_s", resend_after_s)):
            if value <= 0:
                raise ValueError(
                    f"channel credit: {field} is {value}; it must be positive, or nothing could ever be sent"
                )
        self._credit_items = min(credit_items, WINDOW_SPAN)
        self._credit_bytes = credit_bytes
        self._resend_after_s = resend_after_s
        self._pending: dict[int, Outgoing[T]] = {}  # by sequence, oldest first
        self._pending_bytes = 0
        self._next_seq = 0
        self._answered = False  # the present receiver has said something
        self._query_interval_s = resend_after_s
        self._no_query_before = 0.0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    @property
    def answered(self) -> bool:
        """Whether the present receiver has been heard."""
        return self._answered

    @property
    def low(self) -> int:
        """Every message before this one is settled and will not be sent again: the receiver may forget it."""
        return next(iter(self._pending), self._next_seq)

    def can_admit(self, nbytes: int, count: int = 1) -> bool:
        """Whether credit allows `count` more messages of together nbytes. One that exceeds all credit goes when it is alone."""
        if self._next_seq + count - self.low > WINDOW_SPAN or len(self._pending) + count > self._credit_items:
            return False
        return not self._pending or self._pending_bytes + nbytes <= self._credit_bytes

    def admit(self, item: T, nbytes: int, now: float) -> Outgoing[T]:
        """Take a message in. The caller has asked can_admit."""
        out = self._pending[self._next_seq] = Outgoing(self._next_seq, item, nbytes, now)
        self._next_seq += 1
        self._pending_bytes += nbytes
        return out

    def settle(self, seq: int, now: float) -> T | None:
        """The receiver has settled a message. None: it was settled before."""
        out = self._pending.pop(seq, None)
        if out is None:
            return None
        self._pending_bytes -= out.nbytes
        self._progress(now)
        return out.item

    def missing(self, seqs: Sequence[int], now: float) -> tuple[list[Outgoing[T]], list[T]]:
        """The receiver lacks these: what to send again, and what to give up (it is no longer pending then)."""
        again: list[Outgoing[T]] = []
        lost: list[T] = []
        for seq in seqs:
            out = self._pending.get(seq)
            if out is None:
                continue
            if out.num_sends >= MAX_SENDS:
                del self._pending[seq]
                self._pending_bytes -= out.nbytes
                lost.append(out.item)
                continue
            out.num_sends += 1
            out.sent_at = now
            again.append(out)
        if again or lost:
            self._progress(now)
        return again, lost

    def heard(self) -> None:
        """The present receiver has said something."""
        self._answered = True

    def new_receiver(self, now: float) -> list[Outgoing[T]]:
        """A new incarnation of the receiver: everything pending is to be sent (again), in order."""
        self._answered = False
        self._query_interval_s = self._resend_after_s
        self._no_query_before = now + self._resend_after_s
        for out in self._pending.values():
            out.sent_at = now
            out.num_sends = 1
        return list(self._pending.values())

    def resend_query(self, now: float) -> list[int] | None:
        """Sequence numbers to ask the receiver about now (none, to ask whether it is there at all). None: nothing to ask."""
        if now < self._no_query_before:
            return None
        oldest = now - self._resend_after_s
        seqs = [out.seq for out in self._pending.values() if out.sent_at <= oldest][:MAX_QUERY]
        if not seqs and self._answered:
            return None
        self._query_interval_s = min(self._query_interval_s * 2, self._resend_after_s * MAX_BACKOFF)
        self._no_query_before = now + self._query_interval_s
        return seqs

    def clear(self) -> list[T]:
        """Give everything up."""
        items = [out.item for out in self._pending.values()]
        self._pending.clear()
        self._pending_bytes = 0
        return items

    def _progress(self, now: float) -> None:
        self._query_interval_s = self._resend_after_s
        self._no_query_before = min(self._no_query_before, now + self._resend_after_s)


Arrival = Literal["new", "held", "past", "beyond"]


class PeerLedger:
    """What a receiver knows of one sender's messages: those from `low` on that have come, and their verdicts if settled.

    Everything before `low` is settled as far as the sender is concerned (each message says so), hence forgotten: the memory is
    at most WINDOW_SPAN entries. `low` never goes back.
    """

    def __init__(self, low: int) -> None:
        self._low = low
        self._verdicts: dict[int, Verdict | None] = {}  # None: held, not yet settled
        self._num_held = 0

    def __len__(self) -> int:
        return len(self._verdicts)

    @property
    def num_held(self) -> int:
        return self._num_held

    def arrive(self, seq: int, low: int) -> Arrival | Verdict:
        """A message has come. `new`: deliver it; `held`: it is being worked on, ignore it; a verdict: repeat that;
        `past`: it is settled and the sender knows; `beyond`: no honest sender is that far ahead."""
        self._advance(low)
        if seq < self._low:
            return "past"
        if seq - self._low >= WINDOW_SPAN:
            return "beyond"
        if seq not in self._verdicts:
            self._verdicts[seq] = None
            self._num_held += 1
            return "new"
        return self._verdicts[seq] or "held"

    def settle(self, seq: int, verdict: Verdict) -> bool:
        """Record a verdict. False: the sender has given the message up, nobody waits for it."""
        if seq not in self._verdicts:
            return False
        if self._verdicts[seq] is not None:
            raise ValueError(f"message {seq} is settled already")
        self._verdicts[seq] = verdict
        self._num_held -= 1
        return True

    def asked(self, seqs: Sequence[int], low: int) -> tuple[list[tuple[int, Verdict]], list[int]]:
        """A resend query: the verdicts of those that are settled, and those that have not come. The rest is held."""
        self._advance(low)
        settled: list[tuple[int, Verdict]] = []
        missing: list[int] = []
        for seq in seqs:
            if seq < self._low:
                continue
            if seq not in self._verdicts:
                missing.append(seq)
            elif (verdict := self._verdicts[seq]) is not None:
                settled.append((seq, verdict))
        return settled, missing

    def _advance(self, low: int) -> None:
        if low <= self._low:
            return
        if low - self._low > len(self._verdicts):
            forgotten = [seq for seq in self._verdicts if seq < low]
        else:
            forgotten = [seq for seq in range(self._low, low) if seq in self._verdicts]
        for seq in forgotten:
            if self._verdicts.pop(seq) is None:
                self._num_held -= 1
        self._low = low


class InOrder(Generic[T]):
    """Releases messages in sequence, without gaps. What the sender has given up (everything before its `low`) is skipped."""

    def __init__(self, low: int) -> None:
        self._next = low
        self._waiting: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def arrive(self, seq: int, low: int, item: T) -> list[T]:
        """A message has come (each once): the messages to hand on now."""
        if seq >= max(self._next, low):
            self._waiting[seq] = item
        return self.advance(low)

    def advance(self, low: int) -> list[T]:
        """The sender will send nothing before `low` again: the messages to hand on now."""
        if low > self._next:
            self._next = low
            self._waiting = {seq: item for seq, item in self._waiting.items() if seq >= low}
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._next += 1
        return ready
