"""A transport inside one process, for tests: it drops, duplicates, reorders and corrupts messages, driven by a seeded generator."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.runtime.transport import PullSocket, PushSocket, Transport

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class Faults:
    """Fault probabilities of a MemoryTransport, drawn for each message."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0  # delayed until up to 4 later messages of the same socket have passed
    corrupt: float = 0.0  # one bit of the first frame flips


class MemoryTransport(Transport):
    """Sockets inside one process, for tests and simulations. The same seed and the same sends produce the same faults."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.pulls: dict[str, _MemoryPull] = {}
        self.num_sent = 0
        self._num_bound = 0

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        address = f"mem://{host}:{self._num_bound}"
        self._num_bound += 1
        pull = self.pulls[address] = _MemoryPull(self, address, queue_messages, max_frame_bytes)
        return pull

    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        if not address.startswith("mem://"):
            raise ValueError(f"{address!r} is not an address such as mem://host:0")
        return _MemoryPush(self, address)


class _MemoryPull(PullSocket):
    def __init__(self, transport: MemoryTransport, address: str, queue_messages: int, max_frame_bytes: int) -> None:
        self.address = address
        self._transport = transport
        self._queue_messages = queue_messages
        self._max_frame_bytes = max_frame_bytes
        self._queue: deque[list[bytes]] = deque()
        self._reading = False

    def listen(self, deliver: Callable[[Sequence[Buffer]], None], failed: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._failed = failed
        self.resume()

    def pause(self) -> None:
        self._reading = False

    def resume(self) -> None:
        self._reading = True
        self._loop.call_soon(self._drain)

    def put_nowait(self, frames: list[bytes]) -> bool:
        if any(len(frame) > self._max_frame_bytes for frame in frames):
            return True  # dropped, as ZeroMQ does
        if len(self._queue) >= self._queue_messages:
            return False
        self._queue.append(frames)
        if self._reading:
            self._loop.call_soon(self._drain)
        return True

    def fail(self, error: Exception) -> None:
        """Make the socket fail with this error."""
        self._reading = False
        self._failed(error)

    def close(self) -> None:
        self._reading = False
        self._transport.pulls.pop(self.address, None)

    def _drain(self) -> None:
        try:
            while self._reading and self._queue:
                self._deliver(self._queue.popleft())
        except Exception as error:
            self.fail(error)


class _MemoryPush(PushSocket):
    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._transport = transport
        self._address = address
        self._delayed: list[tuple[int, list[bytes]]] = []  # (number of later messages that must pass first, message)
        self._closed = False

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        assert not self._closed, "send on a closed socket"
        transport, faults = self._transport, self._transport.faults
        transport.num_sent += 1
        message = [bytes(frame) for frame in frames]
        draw = transport.random.random
        self._delayed = [(left - 1, delayed) for left, delayed in self._delayed]
        sent = True
        if draw() < faults.corrupt:
            message[0] = self._flip_a_bit(message[0])
        if draw() < faults.delay:
            self._delayed.append((transport.random.randint(1, 4), message))
        elif draw() >= faults.lose:
            sent = self._put(message)
        if draw() < faults.double:
            self._put(message)
        for left, delayed in self._delayed:
            if left <= 0:
                self._put(delayed)
        self._delayed = [(left, delayed) for left, delayed in self._delayed if left > 0]
        return sent

    def close(self) -> None:
        self._closed = True
        self._delayed.clear()

    def _put(self, message: list[bytes]) -> bool:
        pull = self._transport.pulls.get(self._address)
        return True if pull is None else pull.put_nowait(message)  # no receiver: lost, as on a dead connection

    def _flip_a_bit(self, frame: bytes) -> bytes:
        flipped = bytearray(frame)
        position = self._transport.random.randrange(len(flipped) * 8)
        flipped[position // 8] ^= 1 << (position % 8)
        return bytes(flipped)
