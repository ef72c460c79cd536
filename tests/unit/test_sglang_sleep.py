"""The order in which an engine has SGLang release its memory and take it again, and its end, with a fake server.

A CPU has no memory saver, so the release of a real server frees nothing there. The order matters: SGLang 0.5.23 dies of a release
while a request ends, and of a resume without a release.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import EngineArguments, EngineFailed, EngineRequest, EngineUnavailable, RequestRefused
from asyncrl.generation.sglang import SGLangEngine
from asyncrl.generation.sglang_process import AttachedServer
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model


class SleepingServer(AttachedServer):
    """Stands for a server on a GPU."""

    can_sleep = True


class FakeSGLang:
    """Answers like SGLang 0.5.23, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.busy = 0  # flushes that find a request that has not ended
        self.broken = False
        self.refusal = 0  # status of answers to /generate; 0: they are empty
        self.holds = False  # /generate is not answered
        self.aborted = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/")
        if name == "model_info":
            return web.json_response({"model_path": "", "weight_version": ""})
        if name == "server_info":
            return web.json_response({"max_req_input_len": 100})
        if name == "v1/loads":
            return web.json_response({"timestamp": "", "version": "", "loads": []})
        if name == "generate" and self.refusal:
            return web.Response(status=self.refusal, text="told so")
        if name == "generate" and self.holds:
            await asyncio.Event().wait()
        if name == "abort_request":
            self.aborted.set()
        self.calls.append(name)
        if name == "flush_cache" and self.busy:
            self.busy -= 1
            return web.Response(status=400)
        if name.endswith("memory_occupation"):
            assert await request.json() == {"tags": ["kv_cache", "weights"]}
            return web.json_response(None, status=500 if self.broken else 200)
        return web.Response()


@asynccontextmanager
async def attached(fake: FakeSGLang, model: Path, *, asleep: bool = False) -> AsyncIterator[SGLangEngine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # a held /generate never ends
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    engine = SGLangEngine(
        EngineArguments(str(model), GenerationConfig(), asleep=asleep), SleepingServer(f"http://{host}:{port}")
    )
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_tiny_model(path := tmp_path_factory.mktemp("model"))
    return path


async def test_memory_is_released_when_idle_and_taken_back_once(model: Path) -> None:
    fake = FakeSGLang()
    async with attached(fake, model) as engine:
        await engine.start()
        fake.busy = 2
        await engine.sleep()
        assert fake.calls == ["flush_cache"] * 3 + ["release_memory_occupation"]
        await engine.sleep()
        with pytest.raises(EngineUnavailable, match="sleeps"):
            await engine.score([1, 2])
        await engine.wake()
        await engine.wake()
        assert fake.calls[4:] == ["resume_memory_occupation"]
        assert engine.stats().paused
        assert engine.stats().version == ""


async def test_nothing_is_resumed_in_an_engine_that_begins_asleep(model: Path) -> None:
    fake = FakeSGLang()
    async with attached(fake, model, asleep=True) as engine:
        await engine.sleep()
        await engine.wake()
        assert fake.calls == []


@pytest.mark.parametrize("never_idle", [True, False])
async def test_a_failed_release_ends_the_engine(model: Path, never_idle: bool) -> None:
    fake = FakeSGLang()
    async with attached(fake, model) as engine:
        await engine.start()
        fake.busy, fake.broken = (1000, False) if never_idle else (0, True)
        with pytest.raises(EngineFailed, match="did not release its memory"):
            await engine.sleep()
        assert engine.failure is not None
        assert ("release_memory_occupation" in fake.calls) == (not never_idle)


@pytest.mark.parametrize(
    ("status", "error", "ends"),
    [
        (400, RequestRefused, False),  # the prompt is at fault
        (413, RequestRefused, False),
        (429, EngineUnavailable, False),
        (503, EngineUnavailable, False),
        (500, EngineFailed, False),
        (401, EngineFailed, True),  # a wrong key: no request succeeds
        (404, EngineFailed, True),
    ],
)
async def test_a_refusal_of_sglang_has_the_class_of_its_status(
    model: Path, status: int, error: type[Exception], ends: bool
) -> None:
    fake = FakeSGLang()
    async with attached(fake, model) as engine:
        await engine.start()
        fake.refusal = status
        engine._version = WeightVersion(1, 0)
        with pytest.raises(error, match="told so"):
            await engine.submit(EngineRequest("r", [1, 2], SamplingParams(max_new_tokens=4)))
        assert (engine.failure is not None) == ends
        assert not ends or "check generation.urls and generation.api_key_file" in str(engine.failure)


@pytest.mark.parametrize("call", [lambda engine: engine.abort("r"), lambda engine: engine.abort_all()])
async def test_an_abort_that_is_repeated_ends_when_the_engine_closes(
    model: Path, call: Callable[[SGLangEngine], Awaitable[object]]
) -> None:
    fake = FakeSGLang()
    fake.holds = True
    async with attached(fake, model) as engine:
        await engine.start()
        engine._version = WeightVersion(1, 0)
        response = engine.submit(EngineRequest("r", [1, 2], SamplingParams(max_new_tokens=4)))
        aborting = asyncio.ensure_future(call(engine))
        async with asyncio.timeout(10):
            await fake.aborted.wait()
            await engine.close()
            with pytest.raises(EngineUnavailable, match="closing"):
                await aborting
            with pytest.raises(EngineUnavailable, match="closing"):
                await response


async def test_a_call_to_sglang_after_the_close_is_an_error_of_the_engine(model: Path) -> None:
    async with attached(FakeSGLang(), model) as engine:
        await engine.start()
        await engine.close()
        with pytest.raises(EngineFailed, match="closed"):
            await engine._flush()
