"""HTTP connections between processes: a session keeps as many connections as it needs now, not as many as it once needed."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.runtime import unix_sockets
from asyncrl.runtime.http_client import open_session


async def test_sequential_calls_reuse_one_of_many_open_connections() -> None:
    """The other connections become idle, and aiohttp closes them."""
    num_calls, all_there = 0, asyncio.Event()
    ports: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        nonlocal num_calls
        num_calls += 1
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        if num_calls == 20:
            all_there.set()
        await all_there.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server, open_session(max_connections=0) as session:

        async def call() -> None:
            async with session.post(server.make_url("/")) as response:
                await response.read()

        async with asyncio.timeout(30):
            await asyncio.gather(*(call() for _ in range(20)))
            assert len(set(ports)) == 20
            for _ in range(50):
                await call()
    assert len(ports) == 70
    assert len(set(ports[20:])) == 1


async def test_a_run_on_unix_sockets_connects_to_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "in_use", lambda: True)
    async with open_session(max_connections=1) as session:
        with pytest.raises(aiohttp.ClientConnectionError, match="is not a socket of this run"):
            await session.get("http://127.0.0.1:9/")
