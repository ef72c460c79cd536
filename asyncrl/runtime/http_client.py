"""HTTP sessions between processes of a run. All calls to other processes use these sessions, so that faults can be
injected and a simulation can replace them.

A session sends the run's token (security.py) with every request, so use it only for the run's own processes. The size
of replies is bounded (BoundedResponse), as is the size of requests to servers.

    inject_faults(faults, "master/0")    # sessions opened later have the faults of runtime.faults
    with replaced(make):          # tests/simulation
        open_session(...)         # returns the result of `make`
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp

from asyncrl.config.schema import FaultsConfig
from asyncrl.runtime import security, unix_sockets

Maker = Callable[[int, dict[str, Any]], Any]

MAX_ANSWER_BYTES = 64 << 20  # as MAX_BODY_BYTES of generation/http.py; the largest replies are a few megabytes


class BoundedResponse(aiohttp.ClientResponse):
    """A reply whose decompressed body has at most MAX_ANSWER_BYTES. A longer one raises ClientPayloadError, so the call fails."""

    async def read(self) -> bytes:
        if self._body is None:
            body = bytearray()
            try:
                async for some in self.content.iter_any():
                    body += some
                    if len(body) > MAX_ANSWER_BYTES:
                        raise aiohttp.ClientPayloadError(
                            f"{self.url} answers with more than {MAX_ANSWER_BYTES} bytes (runtime/http_client.py: MAX_ANSWER_BYTES)"
                        )
            except BaseException:
                self.close()  # otherwise the rest of this reply would be read as the next one
                raise
            self._body = bytes(body)
        return await super().read()


class HttpFaults:
    """Applies runtime.faults to calls, as a middleware of aiohttp's client. Each fault is drawn from a
    generator seeded with `faults.seed` and `who`.

    A call is delayed or lost; the loss affects the request or the reply. TCP neither duplicates data nor changes bytes,
    so this does neither.
    """

    def __init__(self, faults: FaultsConfig, who: str) -> None:
        self._faults = faults
        self._random = random.Random(zlib.crc32(f"http {who}".encode()) ^ faults.seed)

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        draw = self._random
        if draw.random() < self._faults.delay:
            await asyncio.sleep(draw.uniform(0.0, self._faults.delay_s))
        if draw.random() >= self._faults.drop:
            return await handler(request)
        if draw.random() < 0.5:
            raise aiohttp.ServerDisconnectedError("runtime.faults.drop: the call is lost")
        (await handler(request)).close()
        raise aiohttp.ServerDisconnectedError("runtime.faults.drop: the answer is lost")


_faults: HttpFaults | None = None


def inject_faults(faults: FaultsConfig, who: str) -> None:
    """Apply these faults to all sessions that this process opens later. A config without faults removes them again."""
    global _faults
    _faults = HttpFaults(faults, who) if faults.drop or faults.delay else None


class _Connector(aiohttp.TCPConnector):
    """Reuses the most recently used connection, so that the extra connections of a burst become idle and are closed
    (aiohttp: after 15 s). aiohttp reuses the oldest first, which would keep every connection of the largest burst
    alive.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        if free := self._conns.get(key):
            free.rotate(1)
        return await super()._get(key, traces)

    async def _create_connection(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        """If the run uses Unix sockets, connect only to those. (aiohttp.UnixConnector supports only one path.)"""
        if not unix_sockets.in_use():
            return await super()._create_connection(req, traces, timeout)
        path = unix_sockets.path_of(req.url.host or "")
        if not path:
            raise aiohttp.ClientConnectionError(f"{req.url.origin()} is not a socket of this run")
        try:
            async with asyncio.timeout(timeout.sock_connect):
                _, protocol = await self._loop.create_unix_connection(self._factory, path)
        except TimeoutError:
            raise
        except OSError as error:
            raise aiohttp.client_exceptions.UnixClientConnectorError(path, req.connection_key, error) from error
        return protocol


def _real_session(max_connections: int, options: dict[str, Any]) -> aiohttp.ClientSession:
    secured = security.current()
    tls = secured.ask_tls if secured is not None else None
    connector = _Connector(limit=max_connections, ssl=True if tls is None else tls)
    if secured is not None:
        options = {**options, "headers": {**secured.headers, **options.get("headers", {})}}
    middlewares = (_faults,) if _faults is not None else ()
    return aiohttp.ClientSession(
        connector=connector, middlewares=middlewares, response_class=BoundedResponse, **options
    )


_make: Maker = _real_session


def open_session(*, max_connections: int, **options: Any) -> aiohttp.ClientSession:
    """Return a session with at most max_connections (0: unlimited). options: for aiohttp.ClientSession. Call it on the
    event loop.
    """
    session: aiohttp.ClientSession = _make(max_connections, options)
    return session


@contextlib.contextmanager
def replaced(make: Maker) -> Iterator[None]:
    """Create sessions with `make`, which gets open_session's arguments and returns an object with post, get, request, close."""
    global _make
    before, _make = _make, make
    try:
        yield
    finally:
        _make = before
