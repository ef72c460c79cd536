"""No other process can fill a process's memory: answers over HTTP, streams of SGLang, changes in name resolve are bounded.

docs/design/bounds.md has the list. Most of it is tested beside its code (test_channel.py, test_streams.py, test_journal.py ...).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.generation import server_client
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.protocol.names import Names
from asyncrl.runtime import http_client
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import serve
from asyncrl.runtime.names.interface import WatchEvent
from tests.support.memory_names import MemoryNameResolver

MOST = 100_000
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", MOST)
    monkeypatch.setattr(server_client, "MAX_ANSWER_BYTES", MOST)


@contextlib.asynccontextmanager
async def server(*routes: web.RouteDef) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    try:
        yield await serve(runner, "127.0.0.1")
    finally:
        await runner.cleanup()


async def endless(request: web.Request) -> web.StreamResponse:
    """Send a response without a Content-Length until the client disconnects."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"x" * 10_000)


async def long_of(request: web.Request) -> web.Response:
    body = b"x" * int(request.query["bytes"])
    if "zipped" in request.query:
        return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    return web.Response(body=body)


async def test_an_answer_is_read_up_to_a_limit() -> None:
    routes = web.get("/endless", endless), web.get("/long", long_of)
    async with server(*routes) as url, open_session(max_connections=1) as session:
        for path in ("/endless", f"/long?bytes={MOST + 1}", f"/long?zipped=1&bytes={20 * MOST}"):
            async with session.get(url + path) as answer:
                with pytest.raises(aiohttp.ClientPayloadError, match=f"more than {MOST} bytes"):
                    await asyncio.wait_for(answer.read(), LIMIT_S)
            # the session's only connection is usable again, and an answer of exactly the limit arrives whole
            async with session.get(f"{url}/long?bytes={MOST}") as answer:
                assert await answer.read() == b"x" * MOST


async def test_sglang_is_read_up_to_a_limit_too() -> None:
    params: dict[str, Any] = {"max_new_tokens": 1000}
    routes = web.post("/generate", endless), web.get("/model_info", endless)
    async with server(*routes) as url:
        client = SGLangClient(url)
        try:
            with pytest.raises(ServerError, match=f"more than {MOST} bytes"):
                await client.info(limit_s=LIMIT_S)
            pieces = client.generate("rid", [1], params, idle_limit_s=LIMIT_S)
            with pytest.raises(ServerError, match=f"an event of more than {MOST} bytes: b'xxx"):
                await asyncio.wait_for(anext(pieces), LIMIT_S)
        finally:
            await client.close()


async def test_a_connection_to_sglang_is_not_used_again_near_the_time_when_sglang_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)  # the next request on this connection meets its close
        writer.close()

    monkeypatch.setattr(server_client, "_KEEP_ALIVE_S", 0.1)
    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as listening:
        client = SGLangClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        try:
            assert await client.flush_cache(limit_s=LIMIT_S)
            await asyncio.sleep(0.3)
            assert await client.flush_cache(limit_s=LIMIT_S)
        finally:
            await client.close()


@pytest.fixture
def directory() -> Iterator[Directory]:
    info = WorkerInfo("master", 0, 1, "e", "t", 1, "/nowhere", 1, NameResolveConfig(), RuntimeConfig())
    board = StatusBoard(info, logging.getLogger("test"))
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        yield Directory(resolver, Names("e", "t"), lease=resolver.grant_lease(LIMIT_S).id, board=board, limit_s=LIMIT_S)


async def next_of(changes: AsyncIterator[WatchEvent]) -> WatchEvent:
    return await asyncio.wait_for(anext(changes), LIMIT_S)


async def test_a_loop_that_stands_still_finds_the_newest_of_each_key(directory: Directory) -> None:
    """docs/design/bounds.md: at most 10,000 changes are queued, then only the newest of each key."""
    names, puts = directory.resolver, 25_000
    names.add("server/last", "")
    changes = directory.watch("server", subtree=True)
    await next_of(changes)  # the watch is active
    for value in ("old", "new"):
        names.add("server/early", value, replace=True)
    for n in range(puts):  # the event loop is blocked meanwhile
        names.add(f"server/{n % 4}", str(n), replace=True)
    names.delete("server/2")
    names.add("server/last", "now", replace=True)
    seen: dict[str, tuple[str, str]] = {}
    num_seen = 0
    while seen.get("server/last") is None:
        event = await next_of(changes)
        seen[event.key] = (event.kind, event.value)
        num_seen += 1
    assert seen == {
        "server/0": ("put", str(puts - 4)),
        "server/1": ("put", str(puts - 3)),
        "server/2": ("delete", ""),
        "server/3": ("put", str(puts - 1)),
        "server/early": ("put", "new"),
        "server/last": ("put", "now"),
    }
    assert num_seen <= 10_000
    await changes.aclose()


async def test_changes_wake_who_waits_for_them(directory: Directory) -> None:
    directory.resolver.add("key", "")
    changes = directory.watch("key")
    await next_of(changes)
    for n in range(3):
        waiting = asyncio.ensure_future(next_of(changes))
        await asyncio.sleep(0.01)  # it waits
        assert not waiting.done()
        await asyncio.to_thread(directory.resolver.add, "key", str(n), replace=True)
        assert (await waiting).value == str(n)
    await changes.aclose()
