"""Receivers under a name: the ends of both streams at which messages arrive."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec

from asyncrl.data.codec import CodecError
from asyncrl.protocol.messages import DECODE_ERRORS
from asyncrl.protocol.names import Names
from asyncrl.runtime.channel import ChannelLimits, ChannelReceiver, Delivery, Endpoint
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolver
from asyncrl.runtime.transport import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FencedError(RuntimeError):
    """This process speaks for an attempt of the training side that is over."""


class PublishedReceiver(ABC, Generic[T]):
    """A channel's receiver, published as a stream, that gives what `_read` makes of each message.

    consumes: the stream.  produces: what was read; refusals of what cannot be.
    waits for: a message.  unblocked by: senders; close.
    """

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        stream: str,
        *,
        label: str,
        limits: ChannelLimits,
        host: str,
        ordered: bool = False,
        lease: int | None = None,
        transport: Transport | None = None,
        attempt: int = 1,
        life: int = 0,
    ) -> None:
        self._resolver = resolver
        self._attempt = attempt
        self._life = life
        self._key = names.stream(stream)
        self._label = label  # what it is called in refusals
        self._lease = lease
        self._start_timeout_s = limits.start_timeout_s
        self._receiver = ChannelReceiver(stream, limits=limits, host=host, ordered=ordered, transport=transport)

    async def start(self) -> None:
        """Bind, then publish: whoever finds the name finds a bound socket.

        Raises FencedError where a later attempt, or a later life in this one, has the name.
        """
        await asyncio.to_thread(self._check_name)
        endpoint = msgspec.structs.replace(await self._receiver.start(), attempt=self._attempt, life=self._life)
        value = msgspec.json.encode(endpoint).decode()
        await asyncio.to_thread(
            self._resolver.publish, self._key, value, lease=self._lease, limit_s=self._start_timeout_s
        )

    @property
    def num_queued(self) -> int:
        """Messages that have arrived and wait to be received."""
        return self._receiver.num_queued

    async def close(self) -> None:
        """Verdicts given just before may be lost with the sockets."""
        await self._receiver.close()

    def _check_name(self) -> None:
        try:
            there = msgspec.json.decode(self._resolver.get(self._key), type=Endpoint)
        except (NameEntryNotFound, *DECODE_ERRORS):
            return
        if there.attempt > self._attempt:
            raise FencedError(
                f"{self._label} of attempt {self._attempt} ends: attempt {there.attempt} has begun ({there.incarnation})"
            )
        if there.place > (self._attempt, self._life):
            raise FencedError(
                f"{self._label} in life {self._life} ends: life {there.life} has begun ({there.incarnation})"
            )

    async def _next(self) -> T:
        """The next message that can be read. A cancelled wait changes nothing."""
        while True:
            delivery = await self._receiver.receive()
            try:
                return self._read(delivery)
            except (*DECODE_ERRORS, CodecError) as error:
                logger.warning("%s: refused message %d of %s: %s", self._label, delivery.seq, delivery.sender, error)
                delivery.refuse(f"{self._label} cannot read the {self._what}: {error}")

    _what: str  # what a message is called in refusals

    @abstractmethod
    def _read(self, delivery: Delivery) -> T:
        """What a message holds. Raises one of DECODE_ERRORS or CodecError where it cannot be read."""
