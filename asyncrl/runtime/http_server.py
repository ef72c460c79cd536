"""HTTP servers of a run's processes: where they bind, and which requests they answer (security.py).

If the run authenticates (security.py), a TCP connection belongs to a stranger until a request on it has shown a secret.
A server accepts at most MAX_STRANGERS such connections at a time and closes each after STRANGER_S. This bounds the
resources that strangers hold, and it bounds the time for which they can keep out the run's own processes. Later
connections wait in the kernel's accept queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from aiohttp import web

from asyncrl.runtime import security, unix_sockets

logger = logging.getLogger(__name__)

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_STRANGERS = 512
STRANGER_S = 10.0
_PAUSE_S = 1.0  # pause before accepting again, when the process can open no more files

_strangers: dict[object, asyncio.Future[None]] = {}  # keyed by the protocol object of the connection


async def serve(
    runner: web.BaseRunner,
    host: str,
    port: int = 0,
    *,
    backlog: int = 1024,
    for_others: bool = False,
    open_paths: Collection[str] = (),
) -> str:
    """Bind (port 0: a free one), serve `runner`, and return the URL to publish. The caller must clean up the runner.

    A request from a stranger is refused before the runner's handler is called. A run that uses Unix sockets serves on one of
    them. for_others: for clients outside asyncrl: serve on TCP in any case, and pass every request to the runner, which must
    refuse those of strangers itself. open_paths: strangers may GET these paths, whose answers are the same for every run.
    """
    secured = security.current()
    await runner.setup()
    if not for_others:
        _refuse_strangers(runner.server, open_paths)
        if path := unix_sockets.new_path():
            await web.UnixSite(runner, path, backlog=backlog).start()
            return unix_sockets.url_of(path)
    tls = None
    if secured is None:
        await web.TCPSite(runner, host, port, backlog=backlog).start()
    else:
        tls = secured.serve_others_tls if for_others else secured.serve_tls
        await _GuardedSite(runner, host, port, backlog, tls).start()
    bound = runner.addresses[0][1]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls is not None else 'http'}://{shown}:{bound}"


class Listen(Protocol):
    """`listen_http`, or its replacement in the simulation."""

    def __call__(self, answer: Answer, host: str, *, max_body_bytes: int) -> AbstractAsyncContextManager[str]: ...


@contextlib.asynccontextmanager
async def listen_http(answer: Answer, host: str, *, max_body_bytes: int) -> AsyncIterator[str]:
    """Serve on a free port, call `answer` for every request of the run, and yield the URL to publish.

    This uses aiohttp's low-level server: an Application's routing, middlewares and signals would add a tenth to the
    cost of each request.
    """

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        """Build a request as aiohttp does, but with our own limit on the body."""
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body_bytes)

    server = web.Server(answer, request_factory=make_request, handler_cancellation=True, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    try:
        yield await serve(runner, host, backlog=128)
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def listen_routes(
    *routes: web.RouteDef,
    host: str,
    port: int = 0,
    max_body_bytes: int = 1 << 20,
    cancels: bool = False,
    open_paths: Collection[str] = (),
) -> AsyncIterator[str]:
    """Serve these routes to the run, on `port` (0: a free one), and yield the URL to publish. cancels: cancel the handler of a
    request when its client disconnects. open_paths: see `serve`.
    """
    app = web.Application(client_max_size=max_body_bytes)
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=cancels)
    try:
        yield await serve(runner, host, port, open_paths=open_paths)
    finally:
        await runner.cleanup()


def _refuse_strangers(server: Any, open_paths: Collection[str]) -> None:
    """Make aiohttp's server refuse requests of strangers before it calls its handler, except GET of open_paths."""
    answer: Answer = server.request_handler

    async def answer_the_run(request: web.BaseRequest) -> web.StreamResponse:
        is_open = request.method == "GET" and request.path in open_paths
        return (None if is_open else _refusal_of(request)) or await answer(request)

    server.request_handler = answer_the_run


def _refusal_of(request: web.BaseRequest) -> web.Response | None:
    """Return the refusal for a stranger's request, without reading the request's body. None if the request shows the
    run's token, or if the run does not authenticate.
    """
    secured = security.current()
    if secured is None:
        return None
    if secured.allows(request.headers.get("Authorization", "")):
        no_stranger(request)
        return None
    wording = "this endpoint answers only processes of its run; the token is in <run>/secrets/token\n"
    answer = web.Response(status=401, text=wording, headers={"WWW-Authenticate": "Bearer"})
    answer.force_close()
    return answer


def no_stranger(request: web.BaseRequest) -> None:
    """Record that the request has shown a valid secret, so its connection may stay open."""
    known = _strangers.pop(request.protocol, None)
    if known is not None and not known.done():
        known.set_result(None)


class _GuardedSite(web.BaseSite):
    """A TCP site that bounds the number of strangers' connections and the time that each may stay."""

    __slots__ = ("_address", "_tls")

    def __init__(self, runner: web.BaseRunner, host: str, port: int, backlog: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, backlog=backlog)
        self._address, self._tls = (host, port), tls

    @property
    def name(self) -> str:
        return f"tcp://{self._address[0]}:{self._address[1]}"

    async def start(self) -> None:
        await super().start()
        family = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server(self._address, family=family, backlog=self._backlog)
        self._server = _Acceptor(self._runner.server, listening, self._tls)  # type: ignore[assignment]


class _Acceptor:
    """Accepts the connections of a _GuardedSite. It has only those parts of asyncio's server interface that aiohttp needs.

    waits for: connections; for STRANGER_S, requests on them.  unblocked by: clients; close.
    """

    def __init__(self, make_protocol: Any, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        listening.setblocking(False)
        self.sockets = [listening]
        self._make_protocol, self._tls = make_protocol, tls
        self._room = asyncio.Semaphore(MAX_STRANGERS)
        self._tasks = {asyncio.create_task(self._accept(listening))}

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                await self._room.acquire()
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:
                    logger.warning("cannot accept a connection: %s; trying again soon", error)
                    self._room.release()
                    await asyncio.sleep(_PAUSE_S)
                    continue
                task = asyncio.create_task(self._serve_connection(connection))
                self._tasks.add(task)
                task.add_done_callback(self._end_connection)

    def _end_connection(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()

    async def _serve_connection(self, connection: socket.socket) -> None:
        """Serve the connection. Returns when a request on it has shown a secret; then the connection stays open. Returns also
        when the client disconnects. Otherwise closes the connection, after STRANGER_S or when it cannot be opened.
        """
        loop = asyncio.get_running_loop()
        protocol, shown = self._make_protocol(), loop.create_future()
        _strangers[protocol] = shown
        watched: Any = _Watched(protocol, shown)
        transport: Any = None
        try:
            async with asyncio.timeout(STRANGER_S):
                transport, _ = await loop.connect_accepted_socket(lambda: watched, connection, ssl=self._tls)
                await shown
        except (OSError, TimeoutError):  # the TLS handshake failed, or no request has shown a secret in time
            if transport is not None:
                transport.abort()
        finally:
            _strangers.pop(protocol, None)


class _Watched:
    """aiohttp's protocol of a connection. `ended` is set when the connection ends."""

    def __init__(self, protocol: Any, ended: asyncio.Future[None]) -> None:
        self._protocol, self._ended = protocol, ended
        self.data_received = protocol.data_received  # spares the most frequent call __getattr__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        self._protocol.connection_lost(error)
