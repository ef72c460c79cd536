"""The protocol of a channel, without sockets: messages on the wire, limits, errors, and the decisions of both ends.

Every ZeroMQ message begins with a checksum of the rest of its first frame: damage there counts as loss and cannot
produce a wrong sequence number. The first frame contains a checksum of the other frames: a message damaged there is
sent again, so no changed number is ever trained.

Both ends decide in plain classes that take events and the time as arguments. SendWindow is the sender's side:
unacknowledged messages, free credit, and when to ask the receiver which messages it lacks. PeerLedger is the receiver's
side, one per sender: which sequence numbers have arrived, and the verdict on each. InOrder restores the order of
sending. channel.py runs these classes over sockets.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Struct

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

QUEUE_SLACK = 64  # room in socket queues above the credit, for resend queries and resent messages
ENVELOPE_SLACK = 65536  # bytes that a frame may have beyond the counted message size
_CHECKSUM_BYTES = 4
_JOINED_BYTES = 1 << 15  # frames up to this size are joined into one: a frame costs as much as copying this size
# Maximum distance between the oldest unacknowledged message and the newest one. It bounds a receiver's memory.
WINDOW_SPAN = 4096
MAX_SENDS = 16  # a message that is still missing after this many sends is given up
MAX_BACKOFF = 8  # the interval of resend queries grows to at most this many times resend_after_s
MAX_QUERY = 1024  # sequence numbers in one resend query


class ChannelError(Exception):
    """Base class of the errors of a message that has failed: the sender will get no verdict that accepts it."""


class ChannelRefused(ChannelError):
    """The receiver refused the message, or it is too large, or it did not arrive in MAX_SENDS sends. The text is the reason."""


class ChannelFull(ChannelError):
    """No credit is left, and the caller did not want to wait."""


class ChannelClosed(ChannelError):
    """This side has closed the channel."""


class ReceiverRestarted(ChannelError):
    """The receiver is a new incarnation; the fate of the message in the old one is unknown."""


# ----------------------------------------------------------------------------------------------------------- typed messages


class Endpoint(Struct, frozen=True):
    """The record (JSON) that a receiver publishes under its name."""

    address: str
    incarnation: str
    max_message_bytes: int
    attempt: int = 1  # attempt of the receiver; senders never return to a lower attempt
    group_incarnation: int = 0  # of a worker group; within an attempt senders never return to a lower one

    @property
    def place(self) -> tuple[int, int]:
        """The place of this receiver for the senders' fence (protocol/fence.py): a later receiver has a greater pair."""
        return self.attempt, self.group_incarnation


class Data(Struct, frozen=True, array_like=True, tag="data"):
    target: str  # incarnation of the intended receiver
    source: str  # incarnation of the sender
    name: str  # the sender's name
    back: str  # address for replies
    low: int  # every message before this sequence number is settled or given up
    seq: int
    sizes: list[int]  # of the message's frames; see `pack`
    header: bytes
    digest: int = 0  # checksum of the frames as sent; see `digest_of`


class ResendQuery(Struct, frozen=True, array_like=True, tag="probe"):
    """Asks which of these messages have arrived; with an empty list, whether the receiver is alive."""

    target: str
    source: str
    name: str
    back: str
    low: int
    seqs: list[int]  # sequence numbers in question


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
    body = frame[_CHECKSUM_BYTES:]  # copying a few hundred bytes costs less than a view
    if zlib.crc32(body) != int.from_bytes(frame[:_CHECKSUM_BYTES], "little"):
        raise msgspec.DecodeError("the checksum does not match")
    return body


# ------------------------------------------------------------------------------------------------------------------- frames


def pack(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer]:
    """Return the frames as sent: the small ones joined, then the others unchanged. `sizes` are the frames' sizes in bytes."""
    small: list[Buffer] = []
    large: list[Buffer] = []
    for frame, size in zip(frames, sizes, strict=True):
        (small if size <= _JOINED_BYTES else large).append(frame)
    return [b"".join(small), *large] if len(small) > 1 else [*small, *large]


def digest_of(packed: Sequence[Buffer]) -> int:
    """Return the checksum (xxh3) of the frames as sent; 0 if there are none."""
    if len(packed) < 2:
        return xxhash.xxh3_64_intdigest(packed[0]) if packed else 0
    digest = xxhash.xxh3_64()
    for frame in packed:
        digest.update(frame)
    return digest.intdigest()


def has_sizes(arrived: Sequence[Buffer], sizes: Sequence[int]) -> bool:
    """Return whether the number of received bytes equals the announced total."""
    return sum(memoryview(frame).nbytes for frame in arrived) == sum(sizes)


def unpack(arrived: Sequence[Buffer], sizes: Sequence[int]) -> list[memoryview]:
    """Inverse of `pack`, as views. Raises ValueError if the announced sizes do not match the received frames."""
    views = [memoryview(frame) for frame in arrived]
    expected = [size for size in sizes if size > _JOINED_BYTES]
    joined = len(expected) < len(sizes)
    if joined:
        expected.insert(0, sum(sizes) - sum(expected))
    found = [view.nbytes for view in views]
    if found != expected or (sizes and min(sizes) < 0):
        raise ValueError(f"malformed: received frames of {found} bytes, announced {list(sizes)}")
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


# ----------------------------------------------------------------------------------------------- decisions of both ends


class Verdict(NamedTuple):
    """The receiver's settlement of a message: a body for the sender, or the reason for a refusal."""

    refused: bool
    body: bytes


@dataclass
class Outgoing(Generic[T]):
    """A message that is not settled."""

    seq: int
    item: T
    nbytes: int
    sent_at: float
    num_sends: int = 1


class SendWindow(Generic[T]):
    """Unsettled messages of one sender, bounded by credit in items and bytes.

    A message stays until the receiver settles it. A resend query asks about messages that were sent more than
    resend_after_s ago. It lists only sequence numbers, so it costs little even while the receiver is frozen or slow.
    Only messages that the receiver then reports missing are sent again. Queries without an answer or effect are
    repeated at growing intervals. A new receiver gets all pending messages again.
    """

    def __init__(self, *, credit_items: int, credit_bytes: int, resend_after_s: float) -> None:
        self._credit_items = min(credit_items, WINDOW_SPAN)
        self._credit_bytes = credit_bytes
        self._resend_after_s = resend_after_s
        self._pending: dict[int, Outgoing[T]] = {}  # by sequence number, oldest first
        self.pending_bytes = 0
        self._next_seq = 0
        self.answered = False  # the current receiver has reported something
        self._query_interval_s = resend_after_s
        self._no_query_before = 0.0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def low(self) -> int:
        """Every message before this sequence number is settled or given up. The receiver may forget those messages."""
        return next(iter(self._pending), self._next_seq)

    def can_admit(self, nbytes: int, count: int = 1) -> bool:
        """Return whether credit allows `count` more messages of nbytes in total. If no message is pending,
        any number of bytes is allowed.
        """
        if self._next_seq + count - self.low > WINDOW_SPAN or len(self._pending) + count > self._credit_items:
            return False
        return not self._pending or self.pending_bytes + nbytes <= self._credit_bytes

    def admit(self, item: T, nbytes: int, now: float) -> Outgoing[T]:
        """Admit a message. The caller must have checked can_admit."""
        out = self._pending[self._next_seq] = Outgoing(self._next_seq, item, nbytes, now)
        self._next_seq += 1
        self.pending_bytes += nbytes
        return out

    def settle(self, seq: int, now: float) -> T | None:
        """Record that the receiver has settled a message. Returns its item; None if it was settled before."""
        out = self._pending.pop(seq, None)
        if out is None:
            return None
        self.pending_bytes -= out.nbytes
        self._progress(now)
        return out.item

    def missing(self, seqs: Sequence[int], now: float) -> tuple[list[Outgoing[T]], list[T]]:
        """Handle messages that the receiver lacks. Returns the messages to send again, and the items to give up, which
        are then no longer pending.
        """
        again: list[Outgoing[T]] = []
        lost: list[T] = []
        for seq in seqs:
            out = self._pending.get(seq)
            if out is None:
                continue
            if out.num_sends >= MAX_SENDS:
                del self._pending[seq]
                self.pending_bytes -= out.nbytes
                lost.append(out.item)
                continue
            out.num_sends += 1
            out.sent_at = now
            again.append(out)
        if again or lost:
            self._progress(now)
        return again, lost

    def new_receiver(self, now: float) -> list[Outgoing[T]]:
        """Start over with a new incarnation of the receiver. Returns all pending messages, in order, to be sent (again)."""
        self.answered = False
        self._query_interval_s = self._resend_after_s
        self._no_query_before = now + self._resend_after_s
        for out in self._pending.values():
            out.sent_at = now
            out.num_sends = 1
        return list(self._pending.values())

    def resend_query(self, now: float) -> list[int] | None:
        """Return the sequence numbers to ask the receiver about now (an empty list asks whether it is alive); None if
        no query is due.
        """
        if now < self._no_query_before:
            return None
        oldest = now - self._resend_after_s
        seqs = [out.seq for out in self._pending.values() if out.sent_at <= oldest][:MAX_QUERY]
        if not seqs and self.answered:
            return None
        self._query_interval_s = min(self._query_interval_s * 2, self._resend_after_s * MAX_BACKOFF)
        self._no_query_before = now + self._query_interval_s
        return seqs

    def clear(self) -> list[T]:
        """Give up all pending messages and return their items."""
        items = [out.item for out in self._pending.values()]
        self._pending.clear()
        self.pending_bytes = 0
        return items

    def _progress(self, now: float) -> None:
        self._query_interval_s = self._resend_after_s
        self._no_query_before = min(self._no_query_before, now + self._resend_after_s)


Arrival = Literal["new", "held", "past", "beyond"]


class PeerLedger:
    """A receiver's record of one sender's messages: those from `low` on that have arrived, and their verdicts if
    settled.

    Each message states that everything before `low` is settled for the sender, so the ledger forgets it. The memory is
    therefore at most WINDOW_SPAN entries. `low` never decreases.
    """

    def __init__(self, low: int) -> None:
        self._low = low
        self._verdicts: dict[int, Verdict | None] = {}  # None: held, not yet settled
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._verdicts)

    def arrive(self, seq: int, low: int) -> Arrival | Verdict:
        """Record the arrival of a message. Returns `new`: deliver it; `held`: it is being processed, ignore it; a
        verdict: repeat that verdict; `past`: the sender knows the verdict or has given the message up; `beyond`: the
        sequence number is higher than a correct sender can have reached.
        """
        self._advance(low)
        if seq < self._low:
            return "past"
        if seq - self._low >= WINDOW_SPAN:
            return "beyond"
        if seq not in self._verdicts:
            self._verdicts[seq] = None
            self.num_held += 1
            return "new"
        return self._verdicts[seq] or "held"

    def settle(self, seq: int, verdict: Verdict) -> bool:
        """Record a verdict. Returns False if the sender has given the message up, so the verdict is not needed."""
        if seq not in self._verdicts:
            return False
        if self._verdicts[seq] is not None:
            raise ValueError(f"message {seq} is already settled")
        self._verdicts[seq] = verdict
        self.num_held -= 1
        return True

    def asked(self, seqs: Sequence[int], low: int) -> tuple[list[tuple[int, Verdict]], list[int]]:
        """Handle a resend query. Returns the verdicts of settled messages and the numbers that have not arrived. The
        others are held, or the sender no longer needs them.
        """
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
                self.num_held -= 1
        self._low = low


class InOrder(Generic[T]):
    """Releases messages in sequence without gaps. Messages that the sender has given up (all before its `low`) are skipped."""

    def __init__(self, low: int) -> None:
        self._next = low
        self._waiting: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def arrive(self, seq: int, low: int, item: T) -> list[T]:
        """Take a message, each only once. Returns the messages that can now be passed on."""
        if seq >= max(self._next, low):
            self._waiting[seq] = item
        return self.advance(low)

    def advance(self, low: int) -> list[T]:
        """Skip to `low`, below which the sender sends no message again. Returns the messages that can now be passed on."""
        if low > self._next:
            self._next = low
            self._waiting = {seq: item for seq, item in self._waiting.items() if seq >= low}
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._next += 1
        return ready
