"""Transport: multipart messages one way, from many pushing sockets to one pulling socket.

The lowest layer of the streams: channel.py alone uses it. It promises little, and the channel builds on no more: a message
arrives whole or not at all; it may be lost when a peer dies. ZmqTransport is ZeroMQ PUSH/PULL; MemoryTransport is its
twin inside one process, which loses, doubles, reorders and corrupts messages by a seeded generator. FaultyTransport does such
things to any transport, in a real run: `transport_of` is what channels are made with.
"""

from __future__ import annotations

import asyncio
import random
import struct
import uuid
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from asyncrl.config.schema import FaultsConfig
from asyncrl.runtime import security, unix_sockets

if TYPE_CHECKING:
    from typing_extensions import Buffer

# From this size on a frame is sent from where it lies. Below, a copy is cheaper: each frame that is not copied costs a wake-up of
# pyzmq's garbage thread, which needs the interpreter.
_ZERO_COPY_BYTES = 1 << 18
# Of an encrypted stream: ZeroMQ takes that much from a connection before its peer has shown a key.
PART_BYTES = 1 << 18
_ENCRYPTION_BYTES = 64  # that CURVE adds to a part
_LENGTH_BYTES = 8
_MAX_AT_ONCE = 8  # messages received without giving up control: what has just come is still in the processor's caches
# Plain integers: combining zmq's enum members costs more than sending a small frame.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class PullSocket(ABC):
    """The receiving end, bound to `address`. Silent until `listen`, and while it is paused."""

    address: str

    @abstractmethod
    def listen(self, deliver: Callable[[Sequence[Buffer]], None], failed: Callable[[Exception], None]) -> None:
        """Give each message to `deliver`, on the event loop, in the order of arrival.

        The first frame comes as bytes, the others as views of received memory. What the socket or `deliver` raises goes to
        `failed`, and is the end.
        """

    @abstractmethod
    def pause(self) -> None:
        """Deliver nothing more: what arrives waits in the socket, then at its senders. `deliver` may call this."""

    @abstractmethod
    def resume(self) -> None:
        """Deliver again."""

    @abstractmethod
    def close(self) -> None:
        """Forget what has not been delivered. Idempotent."""


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
    """Makes sockets, and the identities of streams' ends."""

    def new_id(self) -> str:
        """32 hex digits, never the same ones again."""
        return uuid.uuid4().hex

    @abstractmethod
    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        """A receiving socket on a free port of `host`, chosen by binding."""

    @abstractmethod
    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        """A sending socket. It connects (again and again) in the background."""


# ----------------------------------------------------------------------------------------------------------------- ZeroMQ


class ZmqTransport(Transport):
    """PUSH/PULL over TCP, or over Unix sockets where the run has them; LINGER 0. Sockets belong to the thread and the event loop
    that made them.

    Where the process has secrets (security.py) every stream on TCP is encrypted, and only processes of the run are at its ends.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._context = context or zmq.Context.instance()

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        if host in ("*", "0.0.0.0", "::", ""):
            raise ValueError(
                f"runtime.host is {host!r}: others cannot connect to that; name an address of this machine"
            )
        socket = self._context.socket(zmq.PULL)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, queue_messages)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            path, secured = unix_sockets.new_path(), security.current()
            guarded = secured is not None and not path
            if secured is not None and guarded:
                security.guard_pull(socket, self._context, secured.secrets)
                max_frame_bytes = PART_BYTES + _ENCRYPTION_BYTES
            # A larger frame ends the connection before it is allocated
            socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
            try:
                socket.bind(f"ipc://{path}" if path else f"tcp://{host}:*")
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"runtime.host is {host!r}: cannot bind there ({error})") from error
            address = socket.getsockopt(zmq.LAST_ENDPOINT)
        except BaseException:
            socket.close(linger=0)
            raise
        assert isinstance(address, bytes)
        return _ZmqPull(socket, address.decode(), in_parts=guarded)

    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        path = address.removeprefix("ipc://")
        if not address.startswith("tcp://") and (path == address or not unix_sockets.holds(path)):
            raise ValueError(f"{address!r} is not an address such as tcp://127.0.0.1:5555, nor a socket of this run")
        socket = self._context.socket(zmq.PUSH)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, queue_messages)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            secured = security.current()
            guarded = secured is not None and path == address
            if secured is not None and guarded:
                security.guard_push(socket, secured.secrets)
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ValueError(f"cannot connect to {address!r}: {error}") from error
        return _ZmqPush(socket, in_parts=guarded)


class _ZmqPull(PullSocket):
    """Read through ZeroMQ's own descriptor, which costs a third of what zmq.asyncio's futures do.

    The descriptor becomes readable when something arrives at a socket that had nothing left, and then not again until the
    socket has said EAGAIN. So whoever begins to read goes on until then, or sees to it that it is called again.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str, *, in_parts: bool) -> None:
        self._socket, self._in_parts = socket, in_parts
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._reading = False
        self.address = address

    def listen(self, deliver: Callable[[Sequence[Buffer]], None], failed: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._failed = failed
        self.resume()

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._drain)
            self._loop.call_soon(self._drain)  # what has arrived already may have been announced already

    def close(self) -> None:
        self.pause()
        self._socket.close(linger=0)

    def _drain(self) -> None:
        """Deliver what has arrived."""
        try:
            for _ in range(_MAX_AT_ONCE):
                if not self._reading:
                    return
                self._deliver(self._recv())
            self._loop.call_soon(self._drain)  # a flood: let the rest of the process have its turn
        except zmq.Again:
            return
        except Exception as error:
            self.pause()
            self._failed(error)

    def _recv(self) -> Sequence[Buffer]:
        socket = self._socket
        frame = socket.recv(_DONTWAIT, False)
        frames: list[Buffer] = [frame.bytes]  # small: bytes cost less than a view
        while frame.more:  # a message arrives whole: the rest is there
            frame = socket.recv(_DONTWAIT, False)
            frames.append(frame.buffer)
        return joined(frames) if self._in_parts else frames


class _ZmqPush(PushSocket):
    """A plain, non-blocking socket: sending needs no event, because a full queue is an answer here and not a wait."""

    def __init__(self, socket: zmq.Socket[bytes], *, in_parts: bool) -> None:
        self._socket, self._in_parts = socket, in_parts

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        if self._in_parts:
            frames = parts_of(frames)
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


def parts_of(frames: Sequence[Buffer]) -> list[Buffer]:
    """A message in parts of at most PART_BYTES. The first says how long the frames are, if any is divided. Nothing is copied."""
    views = [memoryview(frame).cast("B") for frame in frames]
    if all(view.nbytes <= PART_BYTES for view in views):
        return [b"", *frames]
    lengths = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [
        lengths,
        *(view[at : at + PART_BYTES] for view in views for at in range(0, max(1, view.nbytes), PART_BYTES)),
    ]


def joined(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """The inverse; divided frames are copied. Parts that are no such message come back as they are, for the channel to refuse."""
    first, *rest = (memoryview(part) for part in parts)
    if not first.nbytes:
        return parts[1:]
    if first.nbytes % _LENGTH_BYTES:
        return parts
    frames, at = [], 0
    for length in struct.unpack(f"<{first.nbytes // _LENGTH_BYTES}Q", first):
        end = at + max(1, -(-length // PART_BYTES))
        frame = rest[at] if end == at + 1 and end <= len(rest) else b"".join(rest[at:end])
        if len(frame) != length:
            return parts
        frames.append(frame)
        at = end
    return frames if at == len(rest) else parts


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
            return True  # as ZeroMQ: gone
        if len(self._queue) >= self._queue_messages:
            return False
        self._queue.append(frames)
        if self._reading:
            self._loop.call_soon(self._drain)
        return True

    def fail(self, error: Exception) -> None:
        """The socket breaks."""
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


# -------------------------------------------------------------------------------------------------------- faults in real runs


def transport_of(faults: FaultsConfig, who: str) -> Transport:
    """What a run's channels go over: ZeroMQ, and between it and them the faults of runtime.faults, if there are any.

    who: tells the channels of a run apart, so that each has faults of its own, the same with each start.
    """
    transport = ZmqTransport()
    if not any((faults.drop, faults.duplicate, faults.corrupt, faults.delay)):
        return transport
    return FaultyTransport(transport, faults, who)


class FaultyTransport(Transport):
    """Another transport, but for what faults do to some messages as they are sent: each is drawn for, by seed and `who`.

    A message is lost, or comes later (and so out of order), or twice, or with one byte changed, in whichever frame.
    """

    def __init__(self, transport: Transport, faults: FaultsConfig, who: str) -> None:
        self._transport = transport
        self._faults = faults
        self._random = random.Random(zlib.crc32(who.encode()) ^ faults.seed)
        self.num_faults = dict.fromkeys(("drop", "duplicate", "corrupt", "delay"), 0)

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        return self._transport.bind_pull(host, queue_messages=queue_messages, max_frame_bytes=max_frame_bytes)

    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        return _FaultyPush(self, self._transport.connect_push(address, queue_messages=queue_messages))

    def strikes(self, kind: str) -> bool:
        """Whether this fault strikes the next message."""
        share: float = getattr(self._faults, kind)
        struck = self._random.random() < share
        self.num_faults[kind] += struck
        return struck

    def delay_s(self) -> float:
        return self._random.uniform(0.0, self._faults.delay_s)

    def changed(self, frames: Sequence[Buffer]) -> list[Buffer]:
        """A copy with one byte changed: in a small frame as likely as in a large one, so that envelopes are met too."""
        changed = [bytes(frame) for frame in frames]
        number = self._random.choice([number for number, frame in enumerate(changed) if frame])
        damaged = bytearray(changed[number])
        damaged[self._random.randrange(len(damaged))] ^= self._random.randrange(1, 256)
        changed[number] = bytes(damaged)
        return [*changed]


class _FaultyPush(PushSocket):
    def __init__(self, transport: FaultyTransport, push: PushSocket) -> None:
        self._transport = transport
        self._push = push
        self._late: set[asyncio.TimerHandle] = set()  # bounded as the sender's window is: it asks before it sends again

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        transport = self._transport
        if transport.strikes("drop"):
            return True
        if transport.strikes("corrupt"):
            frames = transport.changed(frames)
        twice = transport.strikes("duplicate")
        if transport.strikes("delay"):
            self._send_later([bytes(frame) for frame in frames])  # they may be written to once the message is settled
            return not twice or self._push.send_nowait(frames)
        return self._push.send_nowait(frames) and (not twice or self._push.send_nowait(frames))

    def close(self) -> None:
        for handle in self._late:
            handle.cancel()
        self._late.clear()
        self._push.close()

    def _send_later(self, frames: Sequence[Buffer]) -> None:
        def send() -> None:
            self._late.discard(handle)
            self._push.send_nowait(frames)  # a full socket loses it, as any does

        handle = asyncio.get_running_loop().call_later(self._transport.delay_s(), send)
        self._late.add(handle)
