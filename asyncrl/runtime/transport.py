"""Transport: one-way multipart messages from many push sockets to one pull socket.

This is the lowest layer of the streams; only channel.py uses it. Its guarantee is weak: a message arrives whole or not
at all, and may be lost when a peer dies. The channel relies on nothing more. ZmqTransport is ZeroMQ PUSH/PULL.
FaultyTransport drops, duplicates, delays and corrupts messages of a real run. Channels get their transport from
`transport_of`.
"""

from __future__ import annotations

import asyncio
import random
import struct
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from asyncrl.config.schema import FaultsConfig
from asyncrl.runtime import security, unix_sockets

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Frames of at least this size are sent without copying. For smaller frames a copy is cheaper: each frame that is not
# copied wakes pyzmq's garbage collection thread, which needs the GIL.
_ZERO_COPY_BYTES = 1 << 18
# Maximum size of a frame in an encrypted stream; larger frames are split. It is small because ZeroMQ allocates as much for
# a frame of a peer that has not authenticated yet.
PART_BYTES = 1 << 18
_ENCRYPTION_BYTES = 64  # added to a part by CURVE
_LENGTH_BYTES = 8
_MAX_AT_ONCE = 8  # messages received per event-loop turn; recent messages are still in the CPU caches
# Plain integers: combining zmq's enum members costs more than sending a small frame.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class PullSocket(ABC):
    """The receiving end, bound to `address`. Delivers nothing before `listen` and while paused."""

    address: str

    @abstractmethod
    def listen(self, deliver: Callable[[Sequence[Buffer]], None], failed: Callable[[Exception], None]) -> None:
        """Pass each message to `deliver` on the event loop, in the order of arrival.

        The first frame is passed as bytes, the others as views of received memory. An exception from the socket or
        `deliver` is passed to `failed`, and delivery ends.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop delivering: new messages wait in the socket, then at their senders. `deliver` may call this."""

    @abstractmethod
    def resume(self) -> None:
        """Continue delivering."""

    @abstractmethod
    def close(self) -> None:
        """Close the socket and discard undelivered messages. Idempotent."""


class PushSocket(ABC):
    """The sending end, connected to one address."""

    @abstractmethod
    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        """Queue a message without blocking. Returns False if the queue is full; the message is then not sent.

        Large frames are sent without copying, so all frames must stay unchanged until the channel has settled the
        message.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the socket and discard messages that have not been sent yet. Idempotent."""


class Transport(ABC):
    """Creates sockets, and the ids of channel endpoints."""

    def new_id(self) -> str:
        """Return 32 hex digits, unique."""
        return uuid.uuid4().hex

    @abstractmethod
    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        """Return a receiving socket bound to a free port of `host`."""

    @abstractmethod
    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        """Return a sending socket. It connects, and reconnects, in the background."""


# ----------------------------------------------------------------------------------------------------------------- ZeroMQ


class ZmqTransport(Transport):
    """PUSH/PULL over TCP, or over Unix sockets if the run uses them; LINGER 0. Sockets belong to the thread and event
    loop that created them.

    If the process has secrets (security.py), every TCP stream is encrypted and only processes of the run can connect.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._context = context or zmq.Context.instance()

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        if host in ("*", "0.0.0.0", "::", ""):
            raise ValueError(
                f"runtime.host is {host!r}: other hosts cannot connect to it; set an address of this machine"
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
            # ZeroMQ closes the connection of a larger frame before allocating it
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
    """Reads through ZeroMQ's own descriptor, which costs a third of zmq.asyncio's futures.

    The descriptor becomes readable when a message arrives at an empty socket, and then not again until the socket has
    returned EAGAIN. Therefore a reader must continue until EAGAIN, or schedule another call.
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
            self._loop.call_soon(self._drain)  # ZeroMQ does not signal again the messages that have arrived before

    def close(self) -> None:
        self.pause()
        self._socket.close(linger=0)

    def _drain(self) -> None:
        """Deliver the messages that have arrived."""
        try:
            for _ in range(_MAX_AT_ONCE):
                if not self._reading:
                    return
                self._deliver(self._recv())
            self._loop.call_soon(self._drain)  # many messages: let the rest of the process run
        except zmq.Again:
            return
        except Exception as error:
            self.pause()
            self._failed(error)

    def _recv(self) -> Sequence[Buffer]:
        socket = self._socket
        frame = socket.recv(_DONTWAIT, False)
        frames: list[Buffer] = [frame.bytes]  # small: bytes cost less than a view
        while frame.more:  # a message arrives whole, so its rest is here
            frame = socket.recv(_DONTWAIT, False)
            frames.append(frame.buffer)
        return joined(frames) if self._in_parts else frames


class _ZmqPush(PushSocket):
    """A plain, non-blocking socket: sending needs no event, because a full queue is reported to the caller, not waited for."""

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
    """Split a message into parts of at most PART_BYTES, without copying. If any frame is split, the first part contains
    all frame lengths; otherwise it is empty.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    if all(view.nbytes <= PART_BYTES for view in views):
        return [b"", *frames]
    lengths = struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views))
    return [
        lengths,
        *(view[at : at + PART_BYTES] for view in views for at in range(0, max(1, view.nbytes), PART_BYTES)),
    ]


def joined(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """Inverse of `parts_of`; split frames are copied. Invalid parts are returned unchanged, so that the channel refuses them."""
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


# -------------------------------------------------------------------------------------------------------- faults in real runs


def transport_of(faults: FaultsConfig, who: str) -> Transport:
    """Return the transport for a run's channels: ZeroMQ, with the faults of runtime.faults if there are any.

    who: identifies the channel, so that each channel has its own faults, the same ones at each start.
    """
    transport = ZmqTransport()
    if not any((faults.drop, faults.duplicate, faults.corrupt, faults.delay)):
        return transport
    return FaultyTransport(transport, faults, who)


class FaultyTransport(Transport):
    """Wraps a transport and injects faults into messages as they are sent, drawn from a generator seeded with
    `faults.seed` and `who`.

    A message is dropped, delayed (and so reordered), duplicated, or has one byte changed in one of its frames.
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
        """Draw whether this fault affects the next message."""
        share: float = getattr(self._faults, kind)
        struck = self._random.random() < share
        self.num_faults[kind] += struck
        return struck

    def delay_s(self) -> float:
        return self._random.uniform(0.0, self._faults.delay_s)

    def changed(self, frames: Sequence[Buffer]) -> list[Buffer]:
        """Return a copy with one byte changed. All frames are equally likely, whatever their size, so that envelopes
        are affected too.
        """
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
        self._late: set[asyncio.TimerHandle] = set()  # of delayed messages, no more than the sender's window

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        transport = self._transport
        if transport.strikes("drop"):
            return True
        if transport.strikes("corrupt"):
            frames = transport.changed(frames)
        twice = transport.strikes("duplicate")
        if transport.strikes("delay"):
            # Copied: the originals may change once the message is settled
            self._send_later([bytes(frame) for frame in frames])
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
            self._push.send_nowait(frames)  # if the socket is full, the message is lost

        handle = asyncio.get_running_loop().call_later(self._transport.delay_s(), send)
        self._late.add(handle)
