"""Transport: multipart messages one way, from many pushing sockets to one pulling socket.

The lowest layer of the streams: channel.py alone uses it. It promises little, and the channel builds on no more: a message
arrives whole or not at all; it may be lost when a peer dies. ZmqTransport is ZeroMQ PUSH/PULL over TCP; MemoryTransport is its
twin inside one process, which loses, doubles, reorders and corrupts messages by a seeded generator.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from typing_extensions import Buffer

# From this size on a frame is sent from where it lies. Below, a copy is cheaper: each frame that is not copied costs a wake-up of
# pyzmq's garbage thread (measured: 128 KiB frames go 1.2x faster copied, 500 kB frames 1.4x faster not copied).
_ZERO_COPY_BYTES = 1 << 18
_MAX_AT_ONCE = 64  # messages received without giving up control
# Plain integers: combining zmq's enum members costs more than sending a small frame.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class PullSocket(ABC):
    """The receiving end, bound to `address`. One task reads it."""

    address: str

    @abstractmethod
    async def recv(self) -> Sequence[Buffer]:
        """The next message. Only the socket's one reader calls this, and cancels it only to close the socket."""

    @abstractmethod
    def close(self) -> None:
        """Forget what has not been read. Idempotent."""


class PushSocket(ABC):
    """The sending end, connected to one address."""

    @abstractmethod
    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        """Queue a message; never blocks. False where the queue is full: then the message is not sent.

        Frames are not copied: they must stay unchanged until the message is settled.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget what has not left yet. Idempotent."""


class Transport(ABC):
    """Makes sockets."""

    @abstractmethod
    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int, copy: bool) -> PullSocket:
        """A receiving socket on a free port of `host`, chosen by binding. copy: frames arrive as bytes, else as views."""

    @abstractmethod
    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        """A sending socket. It connects (again and again) in the background."""


# ----------------------------------------------------------------------------------------------------------------- ZeroMQ


class ZmqTransport(Transport):
    """PUSH/PULL over TCP, LINGER 0. Sockets belong to the thread and the event loop that made them."""

    def __init__(self, context: zmq.asyncio.Context | None = None) -> None:
        self._context = context or zmq.asyncio.Context.instance()
        self._plain_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(self._context)  # the same one

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int, copy: bool) -> PullSocket:
        if host in ("*", "0.0.0.0", "::", ""):
            raise ValueError(
                f"runtime.host is {host!r}: others cannot connect to that; name an address of this machine"
            )
        socket = self._context.socket(zmq.PULL)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, queue_messages)
            socket.setsockopt(
                zmq.MAXMSGSIZE, max_frame_bytes
            )  # a larger frame ends the connection before it is allocated
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            try:
                socket.bind(f"tcp://{host}:*")
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"runtime.host is {host!r}: cannot bind there ({error})") from error
            address = socket.getsockopt(zmq.LAST_ENDPOINT)
        except BaseException:
            socket.close(linger=0)
            raise
        assert isinstance(address, bytes)
        return _ZmqPull(socket, address.decode(), copy)

    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        if not address.startswith("tcp://"):
            raise ValueError(f"{address!r} is not an address such as tcp://127.0.0.1:5555")
        socket = self._plain_context.socket(zmq.PUSH)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, queue_messages)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ValueError(f"cannot connect to {address!r}: {error}") from error
        return _ZmqPush(socket)


class _ZmqPull(PullSocket):
    def __init__(self, socket: zmq.asyncio.Socket, address: str, copy: bool) -> None:
        self._socket = socket
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._copy = copy
        self._num_at_once = 0
        self.address = address

    async def recv(self) -> Sequence[Buffer]:
        self._num_at_once += 1
        if self._num_at_once > _MAX_AT_ONCE:  # a flood: let the rest of the process have its turn
            self._num_at_once = 0
            await asyncio.sleep(0)
        if self._copy:
            try:  # what has arrived already needs no future
                return self._plain.recv_multipart(_DONTWAIT)
            except zmq.Again:
                self._num_at_once = 0
                return await self._socket.recv_multipart()
        try:
            frame = self._plain.recv(_DONTWAIT, False)
        except zmq.Again:
            self._num_at_once = 0
            frame = await self._socket.recv(copy=False)
        frames = [frame.buffer]
        while frame.more:  # a message arrives whole: the rest is there
            frame = self._plain.recv(_DONTWAIT, False)
            frames.append(frame.buffer)
        return frames

    def close(self) -> None:
        self._socket.close(linger=0)


class _ZmqPush(PushSocket):
    """A plain, non-blocking socket: sending needs no event, because a full queue is an answer here and not a wait."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        last = len(frames) - 1
        try:  # only the first frame of a message can find the queue full
            for i, frame in enumerate(frames):
                copy = memoryview(frame).nbytes < _ZERO_COPY_BYTES
                self._socket.send(frame, _DONTWAIT if i == last else _MORE, copy)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


# ----------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Faults:
    """What a MemoryTransport does to messages: the probability of each, drawn per message."""

    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0  # held back until up to 4 later messages of the same socket have passed
    corrupt: float = 0.0  # one bit of the first frame flips


class MemoryTransport(Transport):
    """Sockets inside one process, for tests and simulations. The same seed and the same sends give the same faults."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.random = random.Random(seed)
        self.pulls: dict[str, _MemoryPull] = {}
        self.num_sent = 0
        self._num_bound = 0

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int, copy: bool) -> PullSocket:
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
        self._max_frame_bytes = max_frame_bytes
        self._queue: asyncio.Queue[list[bytes]] = asyncio.Queue(queue_messages)

    async def recv(self) -> Sequence[Buffer]:
        return await self._queue.get()

    def put_nowait(self, frames: list[bytes]) -> bool:
        if any(len(frame) > self._max_frame_bytes for frame in frames):
            return True  # as ZeroMQ: gone
        try:
            self._queue.put_nowait(frames)
        except asyncio.QueueFull:
            return False
        return True

    def close(self) -> None:
        self._transport.pulls.pop(self.address, None)


class _MemoryPush(PushSocket):
    def __init__(self, transport: MemoryTransport, address: str) -> None:
        self._transport = transport
        self._address = address
        self._delayed: list[tuple[int, list[bytes]]] = []  # (later messages still to pass, message)
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
        return True if pull is None else pull.put_nowait(message)  # nobody there: lost, as on a dead connection

    def _flip_a_bit(self, frame: bytes) -> bytes:
        flipped = bytearray(frame)
        position = self._transport.random.randrange(len(flipped) * 8)
        flipped[position // 8] ^= 1 << (position % 8)
        return bytes(flipped)
