"""Test doubles of the connections between processes: channel sockets and HTTP.

They give the same guarantees as the real ones and no more. Channel (runtime/transport.py): a message arrives whole or not at all.
Messages arrive in order, unless a fault reorders them. Messages in transit to a process that dies are lost. HTTP (aiohttp on both
sides): a connection is refused if no process listens, and reset if the server dies. If the client goes away, the server's handler
is cancelled. An answer may be lost although the request was handled. The handlers are the servers' real ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from asyncrl.runtime.transport import PullSocket, PushSocket, Transport

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tests.simulation.world import Process, SimulatedWorld

_SHORTEST = 1e-6

# ----------------------------------------------------------------------------------------------------------------- channel


class SimTransport(Transport):
    """Sockets of one process."""

    def __init__(self, world: SimulatedWorld, process: Process) -> None:
        self.world, self.process = world, process

    def new_id(self) -> str:
        return f"{self.world.chance.getrandbits(128):032x}"

    def bind_pull(self, host: str, *, queue_messages: int, max_frame_bytes: int) -> PullSocket:
        world = self.world
        world.num_pulls += 1  # never reuse an address
        address = f"sim://{self.process.name}:{world.num_pulls}"
        pull = world.pulls[address] = SimPull(self.process, address, queue_messages)
        return pull

    def connect_push(self, address: str, *, queue_messages: int) -> PushSocket:
        return SimPush(self, address, queue_messages)


class SimPull(PullSocket):
    def __init__(self, process: Process, address: str, queue_messages: int) -> None:
        self.address, self.process, self.queue_messages = address, process, queue_messages
        self.queue: deque[list[bytes]] = deque()
        self.under_way = 0
        self._reading = False
        self.closed = False

    def listen(self, deliver: Callable[[Sequence[Buffer]], None], failed: Callable[[Exception], None]) -> None:
        self._deliver, self._failed = deliver, failed
        self.resume()

    def pause(self) -> None:
        self._reading = False

    def resume(self) -> None:
        self._reading = True
        if self.queue:
            self.process.loop.call_soon(self._drain)

    def close(self) -> None:
        self._reading, self.closed = False, True
        self.queue.clear()

    def arrive(self, message: list[bytes]) -> None:
        self.under_way -= 1
        if self.closed:
            return
        if self._reading and not self.queue:
            try:
                self._deliver(message)
            except Exception as error:
                self._reading = False
                self._failed(error)
            return
        self.queue.append(message)
        self.process.world.look_at_queue(self)

    def _drain(self) -> None:
        try:
            while self._reading and self.queue:
                self._deliver(self.queue.popleft())
        except Exception as error:
            self._reading = False
            self._failed(error)


class SimPush(PushSocket):
    def __init__(self, transport: SimTransport, address: str, queue_messages: int) -> None:
        self._world, self._process, self._address = transport.world, transport.process, address
        self._queue_messages = queue_messages
        self._last_at = 0.0  # on one connection, a message never overtakes an earlier one

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        world, process = self._world, self._process
        pull = world.pulls.get(self._address)
        if pull is None or pull.closed or pull.process.dead or process.dead:
            return True  # no receiver: the message is lost, as on a dead connection
        if pull.under_way + len(pull.queue) >= pull.queue_messages + self._queue_messages:
            return False
        message = [bytes(frame) for frame in frames]
        draw, faults = world.network.random, world.channel_faults
        at = world.now + world.draw_delay()
        if held := world.partitions:
            until = world.cut_until(process, pull.process)
            if until > world.now:
                if until < 0 or (held and world.partition_loses):
                    return True
                at = until + at - world.now
        if faults is not None:
            if draw() < faults.lose:
                return True
            if draw() < faults.corrupt:
                message[0] = _flip(message[0], world.network.getrandbits(30))
            if draw() < faults.double:
                self._put(pull, message, at + draw() * faults.delay_s)
            if draw() < faults.delay:  # later messages overtake it
                self._put(pull, message, at + draw() * faults.delay_s)
                return True
        at = max(at, self._last_at + _SHORTEST)
        self._last_at = at
        self._put(pull, message, at)
        return True

    def _put(self, pull: SimPull, message: list[bytes], at: float) -> None:
        pull.under_way += 1
        self._world.scheduler.at(at, pull.arrive, message, loop=pull.process.loop)

    def close(self) -> None:
        pass


def _flip(frame: bytes, where: int) -> bytes:
    flipped = bytearray(frame)
    position = where % (len(flipped) * 8)
    flipped[position // 8] ^= 1 << (position % 8)
    return bytes(flipped)


# -------------------------------------------------------------------------------------------------------------------- HTTP

Handler = Callable[[Any], Awaitable[web.StreamResponse]]


class SimRequest:
    """The part of a request that handlers read and a StreamResponse writes to."""

    keep_alive = True
    query_string = ""

    def __init__(self, method: str, path: str, body: bytes) -> None:
        self.method, self.path, self._body = method, path, body
        self.written = b""

    @property
    def content(self) -> SimRequest:
        return self

    @property
    def writer(self) -> SimRequest:
        return self

    def is_eof(self) -> bool:
        return True

    def read_nowait(self) -> bytes:
        return self._body

    async def read(self) -> bytes:
        return self._body

    async def write_eof(self, data: bytes) -> None:
        self.written += data


class Site:
    """A listening server: a process and its handler."""

    def __init__(self, process: Process, handler: Handler) -> None:
        self.process, self.handler = process, handler
        self.calls: dict[_Exchange, None] = {}  # requests in progress


class SimResponse:
    """A client's view of an answer."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self._body = status, body

    async def read(self) -> bytes:
        return self._body

    def raise_for_status(self) -> None:
        if self.status >= 400:
            raise aiohttp.ClientPayloadError(f"{self.status}")


class SimSession:
    """Like aiohttp.ClientSession, as far as the clients in asyncrl use it."""

    def __init__(self, world: SimulatedWorld, process: Process, options: dict[str, Any]) -> None:
        self._world, self._process = world, process
        timeout = options.get("timeout")
        self._total_s: float | None = timeout.total if timeout is not None else 300.0
        self.closed = False

    def post(self, url: Any, **options: Any) -> _Exchange:
        return self.request("POST", url, **options)

    def get(self, url: Any, **options: Any) -> _Exchange:
        return self.request("GET", url, **options)

    def request(
        self,
        method: str,
        url: Any,
        *,
        data: bytes | None = None,
        headers: Any = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> _Exchange:
        total_s = self._total_s if timeout is None else timeout.total
        return _Exchange(self._world, self._process, method, str(url), data or b"", total_s)

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> SimSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Exchange:
    """One request and its answer. The client uses it with `async with`."""

    def __init__(
        self, world: SimulatedWorld, client: Process, method: str, url: str, body: bytes, total_s: float | None
    ) -> None:
        self._world, self._client = world, client
        self._method, self._url, self._body, self._total_s = method, url, body, total_s
        self._task: asyncio.Task[Any] | None = None
        self._over = False

    async def __aenter__(self) -> SimResponse:
        world = self._world
        loop = self._client.loop
        self._answer: asyncio.Future[SimResponse] = loop.create_future()
        base, slash, path = self._url.removeprefix("http://").partition("/")
        self._path = slash + path.partition("?")[0]
        self._peer = site = world.sites.get(base)
        if site is not None:
            site.calls[self] = None
        faults = world.http_faults
        if faults is not None and world.network.random() < faults.lose:
            world.scheduler.at(world.now + faults.delay_s, self._broken, loop=loop)
        else:
            self._travel(self._peer, self._arrive)
        timer = loop.call_later(self._total_s, self._expire) if self._total_s is not None else None
        try:
            return await self._answer
        finally:
            self._over = True
            if timer is not None:
                timer.cancel()
            if site is not None and self in site.calls:
                self._hang_up(site)

    async def __aexit__(self, *error: object) -> None:
        pass

    def _travel(self, site: Site | None, then: Callable[[], None]) -> None:
        """Simulate a transfer in one direction, then call `then`: in the site's process or, if site is None, in the client's."""
        world = self._world
        at = world.now + world.draw_delay()
        other = self._peer.process if self._peer is not None else None
        if world.partitions and other is not None:
            until = world.cut_until(self._client, other)
            if until > world.now:
                if world.partition_loses:
                    world.scheduler.at(until, self._broken, loop=self._client.loop)
                    return
                at = until + at - world.now
        if site is not None and not site.process.dead:
            world.scheduler.at(at, then, loop=site.process.loop)
        else:
            world.scheduler.at(at, self._refused if then == self._arrive else then, loop=self._client.loop)

    # ------------------------------------------------------------------------------------------------------ at the server

    def _arrive(self) -> None:
        site = self._peer
        assert site is not None
        if self._over:
            return
        self._task = site.process.loop.create_task(self._handle(site), name=f"answer {self._path}")

    async def _handle(self, site: Site) -> None:
        request = SimRequest(self._method, self._path, self._body)
        try:
            response = await site.handler(request)
            if (body := getattr(response, "body", None)) is not None:
                result = SimResponse(response.status, body if isinstance(body, bytes) else b"")
            else:
                await response.prepare(request)  # type: ignore[arg-type]
                head, _, answer = request.written.partition(b"\r\n\r\n")
                result = SimResponse(int(head[9:12]), answer)
        except asyncio.CancelledError:
            site.calls.pop(self, None)
            return
        except web.HTTPException as error:
            result = SimResponse(error.status, (error.text or "").encode())
        except Exception as error:
            self._world.note(site.process, "http_500", path=self._path, error=repr(error))
            result = SimResponse(500, b"Internal Server Error")
        site.calls.pop(self, None)
        world = self._world
        faults = world.http_faults
        if faults is not None and world.network.random() < faults.lose_answer:
            world.scheduler.at(world.now + faults.delay_s, self._broken, loop=self._client.loop)
            return
        self._travel(None, lambda: self._settle(result))

    def server_died(self) -> None:
        """Reset the connection, because the site's process is gone."""
        world = self._world
        world.scheduler.at(world.now + world.draw_delay(), self._broken, loop=self._client.loop)

    def client_died(self) -> None:
        self._over = True
        if self._peer is not None and self in self._peer.calls:
            self._hang_up(self._peer)

    @property
    def client(self) -> Process:
        return self._client

    def _hang_up(self, site: Site) -> None:
        """The client stops waiting. The server notices this, and cancels the handler."""
        del site.calls[self]
        if self._task is not None and not site.process.dead:
            world = self._world
            world.scheduler.at(world.now + world.draw_delay(), self._task.cancel, loop=site.process.loop)

    # ------------------------------------------------------------------------------------------------------ at the client

    def _settle(self, response: SimResponse) -> None:
        if not self._answer.done():
            self._answer.set_result(response)

    def _broken(self) -> None:
        if not self._answer.done():
            self._answer.set_exception(aiohttp.ServerDisconnectedError())

    def _refused(self) -> None:
        if not self._answer.done():
            key: Any = _ConnectionKey
            self._answer.set_exception(aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "refused")))

    def _expire(self) -> None:
        if not self._answer.done():
            self._answer.set_exception(TimeoutError())


class _ConnectionKey:
    host, port, ssl, is_ssl = "sim", 80, None, False
