"""What crosses the wire of a channel, its limits and its errors. channel.py says how the parts fit together.

Every ZeroMQ message begins with a checksum of the rest of its first frame, so that damage there is loss and no wrong sequence
number; the first frame has one of the others, so that what was damaged there is sent again and no changed number is ever trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash
from msgspec import Struct

from asyncrl.config.schema import RuntimeConfig

if TYPE_CHECKING:
    from typing_extensions import Buffer

QUEUE_SLACK = 64  # room in sockets' queues above the credit, for probes and what is sent again
ENVELOPE_SLACK = 65536  # bytes that a frame may have besides what counts as the message
_CHECKSUM_BYTES = 4
_JOINED_BYTES = 1 << 15  # frames of up to this size travel as one: a frame costs as much as copying this


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
    life: int = 0  # in that attempt, of a receiver that is started again alone: nor to a lower one of these

    @property
    def place(self) -> tuple[int, int]:
        """What only grows."""
        return self.attempt, self.life


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


class Probe(Struct, frozen=True, array_like=True, tag="probe"):
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
_forward_decoder: msgspec.msgpack.Decoder[Data | Probe] = msgspec.msgpack.Decoder(Data | Probe)
_report_decoder = msgspec.msgpack.Decoder(Report)


def encode(message: Data | Probe | Report) -> bytes:
    body = _encoder.encode(message)
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def decode_forward(frame: bytes) -> Data | Probe:
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
