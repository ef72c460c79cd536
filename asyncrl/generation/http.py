"""SGLang's HTTP protocol over a GenerationEngine, for rollout workers and the gserver manager.

    POST /generate                   GenerateRequest -> GenerateReply; a list of prompts in, a list of replies out
    POST /pause_generation           {"mode": "abort"}: new requests wait; the mode (engine.py) decides what happens to running ones
    POST /fetch_weights              and the other steps by which weights arrive: files.py, receive.py
    POST /continue_generation        {}
    POST /release_memory_occupation  {}: interrupt all requests and release the devices, until /resume_memory_occupation
    POST /resume_memory_occupation   {}: take the devices again, paused and without a version
    POST /abort_request              {"rid": ...} or {"abort_all": true}
    POST /flush_cache                200, or 400 while requests run
    GET  /health /health_generate /get_model_info /model_info /get_server_info /server_info /v1/loads /metrics

Status codes: 400 the request is wrong (the body names the error), 503 temporarily unavailable (with Retry-After), 500 the engine
failed. Generation requests of a client that disconnects are aborted. Other deviations from SGLang: before the first update
/generate answers 503; `stream` is refused; a paused server still answers control and state requests; pause also has the mode
`wait`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl import __version__
from asyncrl.generation.checks import Published, VerifiedLoads, VersionFence
from asyncrl.generation.engine import (
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    RequestRefused,
    WeightReceiver,
    WeightsRefused,
)
from asyncrl.generation.fetched import FetchedWeights
from asyncrl.generation.server_side import Means, UnbrokenWork
from asyncrl.generation.transports import KINDS
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.generation import GenerateMeta, GenerateReply, Load, LoadsReply, ModelInfo, SamplingParams
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.http_server import Listen, listen_http

MAX_BODY_BYTES = 64 << 20
HEALTH_GENERATE_LIMIT_S = 10.0

T = TypeVar("T")


# Like SGLang, ignore unknown fields of the request and refuse unknown fields of sampling_params.
class _StrictSamplingParams(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _One(Struct, frozen=True, kw_only=True):
    input_ids: list[int]
    sampling_params: _StrictSamplingParams = _StrictSamplingParams()
    rid: str | None = None
    return_logprob: bool = False
    stream: bool = False
    priority: int = 0
    routes_from: int = 0


class _Many(Struct, frozen=True, kw_only=True):
    input_ids: list[list[int]]
    sampling_params: _StrictSamplingParams | list[_StrictSamplingParams] = _StrictSamplingParams()
    rid: str | list[str] | None = None
    return_logprob: bool = False
    stream: bool = False


class _Shape(Struct, frozen=True):
    input_ids: msgspec.Raw


class _Pause(Struct, frozen=True):
    mode: str = "abort"


class _Abort(Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


_decode_one = msgspec.json.Decoder(_One).decode
_decode_many = msgspec.json.Decoder(_Many).decode
_decode_shape = msgspec.json.Decoder(_Shape).decode


class GenerationHTTP:
    """Serves the routes. `decode_text` fills GenerateReply.text; without it the text stays empty."""

    def __init__(
        self,
        engine: GenerationEngine[Any],
        *,
        engine_name: str,
        settings: dict[str, Any],
        decode_text: Callable[[list[int]], str] | None = None,
        verified: VerifiedLoads | None = None,
        receiver: WeightReceiver | None = None,
        fetched: FetchedWeights | None = None,
        run_dir: str = "",
        published: Published | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """verified, receiver, fetched, run_dir: as in Means. published: as in VersionFence."""
        self._engine, self._verified, self._work = engine, verified, UnbrokenWork()
        self._num_ranks = receiver.num_ranks if receiver is not None else 0
        means = Means(engine, VersionFence(published), self._work, clock, verified, receiver, fetched, run_dir)
        self._transports = [kind(means) for kind in KINDS.values()]
        self._engine_name, self._settings = engine_name, settings
        self._decode_text = decode_text or (lambda ids: "")
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._handlers: dict[tuple[str, str], Any] = {
            (route.method, route.path): route.handler for route in self.routes()
        }

    @contextlib.asynccontextmanager
    async def listening(self, host: str, listen: Listen = listen_http) -> AsyncIterator[str]:
        """Bind and serve; yields the URL. When a client disconnects, its handler and its generation requests are cancelled."""
        try:
            async with listen(self.answer, host, max_body_bytes=MAX_BODY_BYTES) as url:
                yield url
        finally:
            self._work.cancel()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request. An error becomes a status code with SGLang's body {"error": {"message": ...}}."""
        handler = self._handlers.get(("GET" if request.method == "HEAD" else request.method, request.path))
        if handler is None:
            return self._unknown(request)
        status, headers = 400, {}
        try:
            reply: web.StreamResponse = await handler(request)
            return reply
        except (RequestRefused, WeightsRefused, *DECODE_ERRORS) as error:
            message = str(error)
        except EngineUnavailable as error:
            status, message, headers = 503, str(error), {"Retry-After": f"{error.retry_after_s:.0f}"}
        except EngineFailed as error:
            status, message = 500, str(error)
        body = msgspec.json.encode({"error": {"message": message}})
        return web.Response(body=body, status=status, headers=headers, content_type="application/json")

    def _unknown(self, request: web.BaseRequest) -> web.Response:
        """Answer 404 for an unknown path and 405 for a wrong method."""
        if not (methods := [method for method, path in self._handlers if path == request.path]):
            return web.Response(status=404, text=f"there is no {request.path}\n")
        allow = ", ".join(methods)
        return web.Response(status=405, text=f"use {allow} for {request.path}\n", headers={"Allow": allow})

    def routes(self) -> list[web.RouteDef]:
        """Methods, paths and handlers."""
        return [
            web.post("/generate", self._generate),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/release_memory_occupation", self._sleep),
            web.post("/resume_memory_occupation", self._wake),
            *(route for transport in self._transports for route in transport.routes()),
            web.post("/abort_request", self._abort_request),
            web.post("/flush_cache", self._flush_cache),
            web.get("/flush_cache", self._flush_cache),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/get_model_info", self._model_info),
            web.get("/model_info", self._model_info),
            web.get("/get_server_info", self._server_info),
            web.get("/server_info", self._server_info),
            web.get("/v1/loads", self._loads),
            web.get("/metrics", self._metrics),
        ]

    # ----------------------------------------------------------------------------------------------------- /generate

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.read()
        if _is_list_of_prompts(body):
            return await self._generate_many(_decode_many(body))
        one = _decode_one(body)
        _refuse_stream(one.stream)
        engine_request = EngineRequest(one.rid or uuid.uuid4().hex, one.input_ids, one.sampling_params, one.priority)
        generated = await self._confirmed(self._engine.submit(engine_request))
        return _json(self._reply(engine_request, generated, one.return_logprob, one.routes_from))

    async def _generate_many(self, many: _Many) -> web.Response:
        """Answer a list of prompts. If one is refused or fails, all are cancelled."""
        _refuse_stream(many.stream)
        requests = _split(many)
        futures: list[asyncio.Future[Generated]] = []
        try:
            for engine_request in requests:
                futures.append(self._engine.submit(engine_request))
            results = await asyncio.gather(*map(self._confirmed, futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        replies = [
            self._reply(engine_request, generated, many.return_logprob)
            for engine_request, generated in zip(requests, results, strict=True)
        ]
        return web.Response(body=msgspec.json.encode(replies), content_type="application/json")

    async def _confirmed(self, future: asyncio.Future[Generated]) -> Generated:
        """Wait for a result, and until its weights are verified (weights.verify_logprobs). Raises EngineUnavailable."""
        return await future if self._verified is None else await self._verified.confirmed(future)

    def _reply(
        self, request: EngineRequest, generated: Generated, with_logprobs: bool, routes_from: int = 0
    ) -> GenerateReply:
        tokens = generated.token_ids
        pairs = zip(generated.logprobs, tokens, strict=True) if with_logprobs else ()
        return GenerateReply(
            text=self._decode_text(tokens),
            output_ids=tokens,
            meta_info=GenerateMeta(
                id=request.rid,
                finish_reason=generated.finish,
                prompt_tokens=len(request.input_ids),
                completion_tokens=len(tokens),
                weight_version=generated.spans[-1].version if generated.spans else self._engine.stats().version,
                weight_versions=generated.spans,
                output_token_logprobs=[(logprob, token, None) for logprob, token in pairs],
                routed_experts=generated.routes.encode(start=routes_from).tobytes() if generated.routes else b"",
            ),
        )

    # --------------------------------------------------------------------------------------- pause, update, continue

    async def _pause(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read() or b"{}", type=_Pause)
        count = await self._work.run(self._engine.pause(wanted.mode))
        return _json({"success": True, "message": f"paused ({wanted.mode}); {count} requests were running"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._work.run(self._engine.resume())
        return _json({"success": True, "message": "generation continues"})

    async def _sleep(self, request: web.Request) -> web.Response:
        await self._work.run(self._engine.sleep())
        return _json({"success": True, "message": "the devices are free"})

    async def _wake(self, request: web.Request) -> web.Response:
        await self._work.run(self._engine.wake())
        return _json({"success": True, "message": "awake, paused and without weights"})

    async def _abort_request(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=_Abort)
        if not wanted.rid and not wanted.abort_all:
            raise RequestRefused('no request is named; send {"rid": ...} or {"abort_all": true}')
        if wanted.abort_all:
            count = await self._work.run(self._engine.abort_all())
        else:
            count = int(await self._work.run(self._engine.abort(wanted.rid)))
        return _json({"success": True, "num_aborted": count})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        if await self._work.run(self._engine.flush_cache()):
            return _json({"success": True, "message": "cache flushed"})
        return _json({"success": False, "message": "requests are running; the cache was not flushed"}, status=400)

    # ---------------------------------------------------------------------------------------------------------- state

    async def _health(self, request: web.Request) -> web.Response:
        if self._engine.failure is not None:
            raise EngineUnavailable(f"the engine has failed: {self._engine.failure!r}", retry_after_s=30.0)
        return _json({"status": "ok", "weight_version": self._engine.stats().version})

    async def _health_generate(self, request: web.Request) -> web.Response:
        """Check the whole path of a request through queue and engine: generate one token from a one-token prompt."""
        if self._engine.stats().paused:
            raise EngineUnavailable("paused")
        probe = EngineRequest(f"health-{uuid.uuid4().hex}", [0], SamplingParams(max_new_tokens=1))
        try:
            async with asyncio.timeout(HEALTH_GENERATE_LIMIT_S):
                await self._engine.submit(probe)
        except TimeoutError:
            raise EngineUnavailable(f"no token within {HEALTH_GENERATE_LIMIT_S} s") from None
        return await self._health(request)

    async def _model_info(self, request: web.Request) -> web.Response:
        stats = self._engine.stats()
        return _json(ModelInfo(model_path=self._engine.model_path, weight_version=stats.version, paused=stats.paused))

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "engine": self._engine_name,
                "model_path": self._engine.model_path,
                "settings": self._settings,
                "state": dataclasses.asdict(self._engine.stats()),
                "pause_modes": self._engine.pause_modes,
                "num_weight_ranks": self._num_ranks,
            }
        )

    async def _loads(self, request: web.Request) -> web.Response:
        """Answer with the load: numbers of requests and of KV cache tokens. The gserver manager may ask for it several times a
        second to route requests, so the answer must stay cheap."""
        stats = self._engine.stats()
        # num_total_tokens is an estimate: a waiting request will use as many tokens as the average running one. Counting the
        # waiting requests' tokens would cost more.
        total = stats.used_tokens * (stats.running + stats.waiting) // max(stats.running, 1)
        load = Load(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_used_tokens=stats.used_tokens,
            num_total_tokens=total,
        )
        now = datetime.now(UTC).isoformat()
        return _json(LoadsReply(timestamp=now, version=__version__, loads=[load]))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"})


def _is_list_of_prompts(body: bytes) -> bool:
    """Whether input_ids is a list of lists. (msgspec has no union of two list types.)"""
    return bytes(_decode_shape(body).input_ids).lstrip(b" \t\r\n")[1:].lstrip(b" \t\r\n")[:1] == b"["


def _split(many: _Many) -> list[EngineRequest]:
    """Make one engine request per prompt. Raises RequestRefused if the lists differ in length."""
    count = len(many.input_ids)
    params = many.sampling_params if isinstance(many.sampling_params, list) else [many.sampling_params] * count
    if isinstance(many.rid, list):
        rids = many.rid
    else:
        stem = many.rid or uuid.uuid4().hex
        rids = [f"{stem}_{i}" for i in range(count)]
    if not len(params) == len(rids) == count:
        raise RequestRefused(
            f"{count} prompts, {len(params)} sampling_params, {len(rids)} rids: the lists must have equal lengths"
        )
    return [EngineRequest(rid, ids, one) for rid, ids, one in zip(rids, many.input_ids, params, strict=True)]


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise RequestRefused("stream is not supported by this engine; remove the field")


def _json(body: Struct | dict[str, Any], *, status: int = 200) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json")


class _EngineCollector(Collector):
    """Reads the engine's counters on each scrape, so that metrics add no cost to generation."""

    def __init__(self, engine: GenerationEngine[Any]) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("running", "Requests being generated", stats.running),
            ("waiting", "Requests waiting for a slot or the end of a pause", stats.waiting),
            ("num_used_tokens", "KV cache tokens used by running requests", stats.used_tokens),
            ("paused", "1 while paused", int(stats.paused)),
        ):
            yield GaugeMetricFamily(f"asyncrl_generation_{name}", text, value=value)
        for name, text, value in (
            ("requests", "Requests accepted", stats.num_requests),
            ("aborted_requests", "Requests aborted before they finished", stats.num_aborted),
            ("tokens", "Tokens sampled", stats.num_tokens),
            ("prompt_tokens", "Prompt tokens of accepted requests", stats.num_prompt_tokens),
            ("passes", "Forward passes", stats.num_steps),
            ("weight_updates", "Weight versions loaded", stats.num_updates),
        ):
            yield CounterMetricFamily(f"asyncrl_generation_{name}", text, value=value)
        version = GaugeMetricFamily(
            "asyncrl_generation_weight_version", "The version served", labels=["weight_version"]
        )
        version.add_metric([stats.version], 1.0)
        yield version
