"""Push-pull streams: trajectories from rollout workers to heads, and their metadata from heads to the master.

    NameResolvingZmqPusher -- TrajectoryMeta + SequenceSample --> NameResolvingZmqPuller      (names.stream("puller<head>"))
    MetaPusher             -- TrajectoryMeta                  --> MetaPuller                  (names.stream("master_meta"))

The verdict returns along the same path: from the master to the head, and from the head to the rollout worker. A
restarted puller receives again the messages that had no verdict, so heads and master recognize repeated trajectories by
their ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from asyncrl.config.schema import RuntimeConfig
from asyncrl.data.sequence import SequenceSample, decode_sample, encode_sample
from asyncrl.protocol.errors import CodecError
from asyncrl.protocol.names import MASTER_META, Names
from asyncrl.protocol.trajectories import StoreVerdict, TrajectoryMeta
from asyncrl.runtime.channel import ChannelSender, Delivery, PublishedReceiver
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.transport import Transport, transport_of


def grouping(num_pushers: int, num_pullers: int) -> dict[int, list[int]]:
    """Return the default assignment of pushers to pullers: puller -> pushers.

    Each puller gets a consecutive range of num_pushers // num_pullers pushers. The remaining pushers go to the first
    pullers, one each: (7, 3) gives {0: [0, 1, 6], 1: [2, 3], 2: [4, 5]}. With fewer pushers than pullers, every puller
    still gets a pusher: puller i gets pusher i % num_pushers, and a pusher feeds its pullers in turn: (1, 2) gives {0:
    [0], 1: [0]}.
    """
    if num_pushers < 1 or num_pullers < 1:
        raise ValueError(f"{num_pushers} pushers and {num_pullers} pullers: there must be at least one of each")
    if num_pushers < num_pullers:
        return {puller: [puller % num_pushers] for puller in range(num_pullers)}
    share, rest = divmod(num_pushers, num_pullers)
    groups = {puller: list(range(puller * share, (puller + 1) * share)) for puller in range(num_pullers)}
    for puller in range(rest):
        groups[puller].append(num_pullers * share + puller)
    return groups


class _TrajectoryHeader(Struct, frozen=True, array_like=True):
    meta: TrajectoryMeta
    sample: bytes  # the sample's header, from encode_sample


_encoder = msgspec.msgpack.Encoder()
_decode_trajectory = msgspec.msgpack.Decoder(_TrajectoryHeader).decode
_decode_meta = msgspec.msgpack.Decoder(TrajectoryMeta).decode
_decode_verdict = msgspec.msgpack.Decoder(StoreVerdict).decode


def _acknowledger(delivery: Delivery) -> Callable[[StoreVerdict], None]:
    return lambda verdict: delivery.ack(_encoder.encode(verdict))


class DecodeSample(Protocol):
    """The signature of data.sequence.decode_sample."""

    def __call__(self, header: bytes, frames: Sequence[Any], *, max_bytes: int) -> SequenceSample: ...


def puller_stream(index: int) -> str:
    """Return the name of a head's stream."""
    return f"puller{index}"


class NameResolvingZmqPusher:
    """Pushes the trajectories of one rollout worker to the heads.

    consumes: push(meta, sample).  produces: the verdict on each.
    waits for: credit of the head, then its verdict; at most timeout_s.  unblocked by: the head, when it stores
    trajectories.
    """

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        pusher_index: int,
        num_pushers: int,
        num_pullers: int,
        runtime: RuntimeConfig,
        incarnation: str,
        transport: Transport | None = None,
        encode: Callable[[SequenceSample], tuple[bytes, Sequence[Any]]] = encode_sample,
    ) -> None:
        if not 0 <= pusher_index < num_pushers:
            raise ValueError(
                f"pusher_index is {pusher_index}; with {num_pushers} pushers it must be in 0..{num_pushers - 1}"
            )
        own = [puller for puller, pushers in grouping(num_pushers, num_pullers).items() if pusher_index in pushers]
        self._turn, self._encode = cycle(own), encode
        self._resolver = resolver
        self._names = names
        self._senders = [
            ChannelSender(
                f"pusher{pusher_index}",
                puller_stream(puller),
                incarnation,
                runtime=runtime,
                transport=transport or transport_of(runtime.faults, f"pusher{pusher_index} to {puller}"),
            )
            for puller in range(num_pullers)
        ]

    async def start(self) -> None:
        """Follow the heads' names. Does not wait for the heads."""
        for sender in self._senders:
            await sender.start(self._resolver, self._names.stream(sender.peer))

    async def push(
        self, meta: TrajectoryMeta, sample: SequenceSample, *, head: int | None = None, timeout_s: float
    ) -> StoreVerdict:
        """Send a trajectory to a head (default: the heads that `grouping` assigns, in turn) and wait for the verdict.

        Do not change the sample's arrays: they are sent without copying. Raises ChannelRefused if the head cannot read
        the message, and TimeoutError, after which the trajectory may still be stored.
        """
        puller = next(self._turn) if head is None else head
        if not 0 <= puller < len(self._senders):
            raise ValueError(f"head is {puller}; there are heads 0..{len(self._senders) - 1}")
        sample_header, frames = self._encode(sample)
        header = _encoder.encode(_TrajectoryHeader(meta, sample_header))
        verdict = await self._senders[puller].send(
            header, frames, timeout_s=timeout_s, what=f"trajectory {meta.ticket_id}"
        )
        return _decode_verdict(verdict)

    @property
    def num_pending(self) -> int:
        """Number of trajectories without a verdict."""
        return sum(sender.num_pending for sender in self._senders)

    @property
    def pending_bytes(self) -> int:
        """Number of bytes sent and without a verdict. For each head: at most the credit, or one larger message."""
        return sum(sender.pending_bytes for sender in self._senders)

    @property
    def num_resent(self) -> int:
        """Number of trajectories sent again because a head did not have them."""
        return sum(sender.num_resent for sender in self._senders)

    async def close(self) -> None:
        for sender in self._senders:
            await sender.close()


@dataclass(frozen=True)
class Pulled:
    """A trajectory that has arrived. Acknowledge it once, on the event loop's thread, when it is stored or rejected."""

    meta: TrajectoryMeta
    sample: SequenceSample
    ack: Callable[[StoreVerdict], None]


class NameResolvingZmqPuller(PublishedReceiver[Pulled]):
    """Receives trajectories at a head.

    consumes: the stream.  produces: Pulled; refusals of unreadable messages.
    waits for: a trajectory.  unblocked by: rollout workers; close.
    Backpressure: unacknowledged trajectories use up the pushers' credit.
    """

    _what = "trajectory"

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        puller_index: int,
        runtime: RuntimeConfig,
        lease: int | None = None,
        transport: Transport | None = None,
        attempt: int = 1,
        decode: DecodeSample = decode_sample,
    ) -> None:
        stream = puller_stream(puller_index)
        super().__init__(
            resolver,
            names,
            stream,
            label=stream,
            runtime=runtime,
            lease=lease,
            transport=transport or transport_of(runtime.faults, stream),
            attempt=attempt,
        )
        self._max_bytes, self._decode = runtime.max_message_bytes, decode

    async def pull(self) -> Pulled:
        """Return the next trajectory, in its own memory. A cancelled pull changes nothing."""
        return await self._next()

    def _read(self, delivery: Delivery) -> Pulled:
        header = _decode_trajectory(delivery.header)
        sample = self._decode(header.sample, delivery.frames, max_bytes=self._max_bytes)
        _check_ids(header.meta, sample)
        return Pulled(header.meta, sample, _acknowledger(delivery))


def _check_ids(meta: TrajectoryMeta, sample: SequenceSample) -> None:
    if sample.ids != (meta.ticket_id,):
        raise CodecError(f"the sample has the ids {sample.ids}, but its ticket is {meta.ticket_id!r}")


class MetaPusher:
    """Pushes the metadata of a head's trajectories to the master. Otherwise like NameResolvingZmqPusher."""

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        head: int,
        runtime: RuntimeConfig,
        incarnation: str,
        transport: Transport | None = None,
    ) -> None:
        self._resolver = resolver
        self._names = names
        self._sender = ChannelSender(
            f"head{head}",
            MASTER_META,
            incarnation,
            runtime=runtime,
            transport=transport or transport_of(runtime.faults, f"head{head}"),
        )

    async def start(self) -> None:
        """Follow the master's name. Does not wait for the master."""
        await self._sender.start(self._resolver, self._names.stream(MASTER_META))

    async def push_meta(self, meta: TrajectoryMeta, *, timeout_s: float) -> StoreVerdict:
        """Report a trajectory to the master and wait for its verdict. Raises TimeoutError."""
        verdict = await self._sender.send(
            _encoder.encode(meta), timeout_s=timeout_s, what=f"metadata of trajectory {meta.ticket_id}"
        )
        return _decode_verdict(verdict)

    @property
    def num_pending(self) -> int:
        return self._sender.num_pending

    async def close(self) -> None:
        await self._sender.close()


class MetaPuller(PublishedReceiver[tuple[TrajectoryMeta, Callable[[StoreVerdict], None]]]):
    """Receives metadata at the master. Otherwise like NameResolvingZmqPuller."""

    _what = "metadata"

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        runtime: RuntimeConfig,
        lease: int | None = None,
        transport: Transport | None = None,
        attempt: int = 1,
    ) -> None:
        super().__init__(
            resolver,
            names,
            MASTER_META,
            label=MASTER_META,
            runtime=runtime,
            lease=lease,
            transport=transport or transport_of(runtime.faults, MASTER_META),
            attempt=attempt,
        )

    async def pull_meta(self) -> tuple[TrajectoryMeta, Callable[[StoreVerdict], None]]:
        """Return the next trajectory's metadata and the function that acknowledges it. A cancelled call changes nothing."""
        return await self._next()

    def _read(self, delivery: Delivery) -> tuple[TrajectoryMeta, Callable[[StoreVerdict], None]]:
        return _decode_meta(delivery.header), _acknowledger(delivery)
