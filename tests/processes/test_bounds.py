"""What other processes send fills nobody's memory: answers over HTTP, streams of SGLang, changes in name resolve.

DESIGN.md, Bounds, has the list; most of it is tested with what it bounds (test_channel.py, test_streams.py, test_journal.py ...).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncrl.generation import sglang_http
from asyncrl.generation.sglang_http import SGLangClient, SGLangError
from asyncrl.runtime import http_client, worker
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import serve
from asyncrl.runtime.names.interface import WatchEvent
from asyncrl.runtime.worker import _Changes

MOST = 100_000
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", MOST)
    monkeypatch.setattr(sglang_http, "MAX_ANSWER_BYTES", MOST)


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
    """Never says how long it will be, and goes on until its reader has gone."""
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
            # the one connection is as good as new, and what is allowed comes whole
            async with session.get(f"{url}/long?bytes={MOST}") as answer:
                assert await answer.read() == b"x" * MOST


async def test_sglang_is_read_up_to_a_limit_too() -> None:
    params: dict[str, Any] = {"max_new_tokens": 1000}
    routes = web.post("/generate", endless), web.get("/model_info", endless)
    async with server(*routes) as url:
        client = SGLangClient(url)
        client.open()
        try:
            with pytest.raises(SGLangError, match=f"more than {MOST} bytes"):
                await client.info(limit_s=LIMIT_S)
            pieces = client.generate("rid", [1], params, idle_limit_s=LIMIT_S)
            with pytest.raises(SGLangError, match=f"an event of more than {MOST} bytes: b'xxx"):
                await asyncio.wait_for(anext(pieces), LIMIT_S)
        finally:
            await client.close()


async def test_a_loop_that_stands_still_finds_the_newest_of_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MAX_WATCH_EVENTS", 10)
    changes = _Changes(asyncio.get_running_loop())

    def tell() -> None:
        for n in range(1000):
            changes.put(WatchEvent("put", f"server/{n % 4}", str(n)))
            assert len(changes._waiting) <= 10
        changes.put(WatchEvent("delete", "server/2"))

    await asyncio.to_thread(tell)
    seen = {}
    while len(changes._waiting):
        event = await asyncio.wait_for(changes.get(), LIMIT_S)
        seen[event.key] = (event.kind, event.value)
    assert seen == {
        "server/0": ("put", "996"),
        "server/1": ("put", "997"),
        "server/2": ("delete", ""),
        "server/3": ("put", "999"),
    }


async def test_changes_wake_who_waits_for_them() -> None:
    changes = _Changes(asyncio.get_running_loop())
    for n in range(3):
        waiting = asyncio.ensure_future(changes.get())
        await asyncio.sleep(0)  # it waits
        assert not waiting.done()
        await asyncio.to_thread(changes.put, WatchEvent("put", "key", str(n)))
        assert (await asyncio.wait_for(waiting, LIMIT_S)).value == str(n)
