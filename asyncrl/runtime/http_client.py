"""HTTP sessions between processes of a run. Who calls another process gets its session here, so that faults can be put in, and a
simulation can stand in.

A session shows the run's token (security.py) with every request: it is for the run's own processes, and for nobody else. What it
is answered is bounded (BoundedResponse), as what servers are asked is.

suffer(faults, "master/0")    # sessions opened later have the faults of runtime.faults
with replaced(make):          # tests/simulation
    open_session(...)         # is what `make` gives
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

MAX_ANSWER_BYTES = 64 << 20  # as much as a server of ours takes of a request; the largest answers are a few megabytes


class BoundedResponse(aiohttp.ClientResponse):
    """An answer whose body, decompressed, has at most MAX_ANSWER_BYTES. A longer one is a ClientPayloadError: for whoever asked, a
    call that failed."""

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
                self.close()  # the rest must not be taken for the next answer
                raise
            self._body = bytes(body)
        return await super().read()


class HttpFaults:
    """What runtime.faults does to calls, as a middleware of aiohttp's client: each is drawn for, by seed and `who`.

    A call comes late, or is lost: on the way there, or its answer on the way back. TCP doubles nothing and changes no byte, so
    neither does this.
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


def suffer(faults: FaultsConfig, who: str) -> None:
    """Have the sessions that this process opens from now on suffer these faults. A config without faults ends those set before."""
    global _faults
    _faults = HttpFaults(faults, who) if faults.drop or faults.delay else None


class _Connector(aiohttp.TCPConnector):
    """Gives out the connection that was used last, so that those which a moment of many calls has left fall idle and are closed
    (aiohttp: after 15 s). In aiohttp's own order, oldest first, all are kept alive: as many to each server as there ever were."""

    async def _get(self, key: Any, traces: Any) -> Any:
        if free := self._conns.get(key):
            free.rotate(1)
        return await super()._get(key, traces)

    async def _create_connection(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        """Where the run has Unix sockets: as aiohttp.UnixConnector, which knows one path only, and to nothing else."""
        if not unix_sockets.in_use():
            return await super()._create_connection(req, traces, timeout)
        path = unix_sockets.path_of(req.url.host or "")
        if not path:
            raise aiohttp.ClientConnectionError(f"{req.url.origin()} is no socket of this run")
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
    """A session with at most so many connections (0: any number). options: of aiohttp.ClientSession. Call it on the event loop."""
    session: aiohttp.ClientSession = _make(max_connections, options)
    return session


@contextlib.contextmanager
def replaced(make: Maker) -> Iterator[None]:
    """Have sessions made by `make`, of what open_session is given: something with a session's post, get, request and close."""
    global _make
    before, _make = _make, make
    try:
        yield
    finally:
        _make = before
