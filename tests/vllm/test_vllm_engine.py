"""The engine with a real vLLM server: logprobs, versions across updates under load, aborts, refusals, its socket, and its death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import MAX_POSITIONS

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import (
    EngineArguments,
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.generation.vllm import VLLMClient, VLLMEngine, own_server
from asyncrl.protocol.generation import SamplingParams, VersionSpan
from tests.support.real_servers import ServerInThread, fails_when_it_stands_still
from tests.support.server_load import Counter, close_to, make_prompt, respond, within
from tests.support.weight_store import V0, V1, V2, V3, WeightStore

LONG = SamplingParams(max_new_tokens=1200, ignore_eos=True)  # still runs when a delayed test acts: vLLM is fast
ENDLESS = SamplingParams(max_new_tokens=MAX_POSITIONS - 100, ignore_eos=True)  # only an abort ends it in time
WHOLE = SamplingParams(max_new_tokens=300, ignore_eos=True)
ENDING = SamplingParams(max_new_tokens=200)


@contextlib.asynccontextmanager
async def attached(
    server: ServerInThread, store: WeightStore, config: GenerationConfig, *, num_versions: int = 1, **changes: Any
) -> AsyncIterator[tuple[VLLMEngine, Counter]]:
    """An engine at the session's server. It serves V0."""
    counter = Counter()
    changed = dataclasses.replace(config, **changes)
    arguments = EngineArguments(
        str(store.model_path), changed, on_tokens=counter, lora=store.lora, num_versions=num_versions
    )
    engine = VLLMEngine(arguments, server)
    await engine.start()
    try:
        await engine.load_weights(store.path(V0), V0)
        yield engine, counter
    finally:
        await engine.close()


async def test_logprobs_equal_a_plain_forward(
    vllm_server: ServerInThread, vllm_store: WeightStore, vllm_config: GenerationConfig
) -> None:
    """Requests with very different lengths and temperatures run in one batch, greedy ones among them."""
    rng = random.Random(1)
    async with attached(vllm_server, vllm_store, vllm_config) as (engine, counter):
        asked = []
        for i in range(40):
            prompt = make_prompt(rng, rng.choice([1, 2, 9, 33, 150]))
            params = SamplingParams(
                max_new_tokens=rng.choice([1, 5, 30, 60]), temperature=rng.choice([0.0, 0.6, 1.0, 1.3])
            )
            asked.append((prompt, params, engine.submit(EngineRequest(str(i), prompt, params))))
        for prompt, params, future in asked:
            result = await within(future)
            close_to(result.logprobs, vllm_store.logprobs(V0, prompt, result.token_ids, params.temperature or 1.0))
            assert result.spans == [VersionSpan(version=str(V0), start=0, end=len(result.token_ids))]
            assert result.finish.type == ("stop" if result.token_ids[-1] == 0 else "length")
            assert 0 not in result.token_ids[:-1]
            if params.temperature == 0:
                assert result.token_ids == vllm_store.greedy(V0, prompt, params.max_new_tokens)
        assert engine.stats().running == engine.stats().waiting == 0
        assert engine.stats().num_tokens == counter.count

        # Scores are those of a plain forward pass, up to a text as long as the model allows
        for length in (1, 40, MAX_POSITIONS):
            prompt = make_prompt(rng, length)
            scores = await within(engine.score(prompt))
            close_to(scores, [0.0, *vllm_store.logprobs(V0, prompt[:1], prompt[1:])])


async def test_stop_tokens_stay_and_a_whole_context_can_be_filled(
    vllm_server: ServerInThread, vllm_store: WeightStore, vllm_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(4), 8)
    async with attached(vllm_server, vllm_store, vllm_config) as (engine, _):
        path = vllm_store.greedy(V0, prompt, 5)
        stopping = SamplingParams(max_new_tokens=30, temperature=0.0, stop_token_ids=[path[-1]])
        stopped = await within(engine.submit(EngineRequest("stop", prompt, stopping)))
        assert stopped.token_ids == path[: path.index(path[-1]) + 1]
        assert (stopped.finish.type, stopped.finish.matched) == ("stop", path[-1])
        whole = make_prompt(random.Random(5), MAX_POSITIONS - 40)
        full = SamplingParams(max_new_tokens=40, ignore_eos=True)
        result = await within(engine.submit(EngineRequest("whole", whole, full)))
        assert len(result.token_ids) == 40
        close_to(result.logprobs, vllm_store.logprobs(V0, whole, result.token_ids))
        with pytest.raises(RequestRefused, match=f"allows {MAX_POSITIONS} tokens per request"):
            engine.submit(EngineRequest("long", [*whole, 1], full))
        for filtered in (SamplingParams(top_p=0.9), SamplingParams(top_k=3)):
            with pytest.raises(RequestRefused, match="would be renormalised among the tokens that they keep"):
                engine.submit(EngineRequest("filtered", prompt, filtered))
        for wrong in ([64], [-1]):
            with pytest.raises(RequestRefused, match="the vocabulary has 64 tokens"):
                engine.submit(EngineRequest("wrong", wrong, full))


@pytest.mark.parametrize("mode", ["abort", "retract", pytest.param("wait", marks=pytest.mark.release)])
async def test_updates_under_load_give_exact_versions(
    vllm_server: ServerInThread, vllm_store: WeightStore, vllm_config: GenerationConfig, mode: str
) -> None:
    """The weights are updated while requests run and others wait. Each token's logprob shows that the version of its label sampled
    the token, and that no other version did."""
    rng = random.Random(6)
    async with attached(vllm_server, vllm_store, vllm_config, max_running_requests=12) as (engine, counter):
        prompts = [
            make_prompt(rng, rng.choice([3, 20, 300])) for _ in range(18)
        ]  # 300 tokens fill pages of the prefix cache
        params = [LONG if i % 3 else ENDING for i in range(len(prompts))]
        asked = [
            asyncio.ensure_future(respond(engine, f"r{i}", prompt, asks))
            for i, (prompt, asks) in enumerate(zip(prompts, params, strict=True))
        ]
        for version in (V1,) if mode == "wait" else (V1, V2, V3):
            await counter.reaches(engine.stats().num_tokens + 400)
            running = engine.stats().running  # 12, unless a delayed test finds some that have ended
            assert running > 0
            assert await within(engine.pause(mode)) == running
            await within(engine.load_weights(vllm_store.path(version), version))
            assert engine.stats().running == 0
            await engine.resume()
        results = [await within(future) for future in asked]
    seen: set[str] = set()
    several = 0
    for prompt, asks, result in zip(prompts, params, results, strict=True):
        if asks is LONG:
            assert len(result.token_ids) == LONG.max_new_tokens
        else:
            assert 0 not in result.token_ids[:-1]
            assert result.finish.type == ("stop" if result.token_ids[-1] == 0 else "length")
        versions = vllm_store.assert_versions_are_exact(prompt, result)
        several += len(versions) > 1
        seen |= versions
    assert (several == 0) == (mode == "wait")
    assert len(seen) >= (2 if mode == "wait" else 4)
    assert sum(counter.by_version.values()) == sum(len(result.token_ids) for result in results)


async def test_no_stale_prefix_survives_an_update(
    vllm_server: ServerInThread,
    vllm_store: WeightStore,
    vllm_config: GenerationConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache keeps two pages of 128 tokens of the repeated prompt until the weights change. The planted fault hides the flush:
    the salt alone must keep the versions apart."""
    prompt, params = make_prompt(random.Random(7), 300), SamplingParams(max_new_tokens=20)
    async with attached(vllm_server, vllm_store, vllm_config) as (engine, _):

        async def nothing(client: VLLMClient, *, limit_s: float) -> bool:
            return True

        for version in (V0, V1, V2):
            if version == V2:
                monkeypatch.setattr(VLLMClient, "flush_cache", nothing)
            if version != V0:
                await engine.load_weights(vllm_store.path(version), version)
            for i in range(3):
                result = await within(engine.submit(EngineRequest(f"{version}{i}", prompt, params)))
                close_to(result.logprobs, vllm_store.logprobs(version, prompt, result.token_ids))


async def test_aborts_end_only_their_request(
    vllm_server: ServerInThread, vllm_store: WeightStore, vllm_config: GenerationConfig
) -> None:
    async with attached(vllm_server, vllm_store, vllm_config, max_running_requests=3) as (engine, counter):
        asked = {"a": ENDLESS, "ab": ENDLESS, "abc": WHOLE, "abcd": WHOLE}
        futures = {rid: engine.submit(EngineRequest(rid, [1, 2, 3], params)) for rid, params in asked.items()}
        await counter.reaches(60)
        aborted = await within(engine.abort("a"))
        result = await within(futures["a"])
        assert (aborted, result.finish.type) == (True, "abort")
        assert 0 < len(result.token_ids) == len(result.logprobs) < ENDLESS.max_new_tokens
        vllm_store.assert_versions_are_exact([1, 2, 3], result)
        futures["ab"].cancel()  # a caller that goes away frees its place
        for rid in ("abc", "abcd"):
            assert len((await within(futures[rid])).token_ids) == WHOLE.max_new_tokens
        assert not await engine.abort("a")
        for _ in range(6000):  # a busy server needs time for an abort
            if engine.stats().running == 0:
                break
            await asyncio.sleep(0.01)
        assert engine.stats().running == 0
        assert counter.count < ENDLESS.max_new_tokens
        with pytest.raises(WeightsRefused, match=f"holds {V1}, expected {V2}"):
            await engine.load_weights(vllm_store.path(V1), V2)
        assert engine.stats().version == str(V0)


def test_the_control_endpoints_listen_on_a_private_socket_only(vllm_server: ServerInThread) -> None:
    socket = Path(vllm_server.url.removeprefix("unix:"))
    assert stat.S_ISSOCK(socket.stat().st_mode)
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    main = psutil.Process(vllm_server.process.pid)
    listening = {
        connection.laddr.ip
        for process in (main, *main.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1"}  # the rendezvous of its ranks
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in main.environ()


@pytest.mark.release
async def test_a_pause_in_place_keeps_running_requests(
    vllm_store: WeightStore, vllm_config: GenerationConfig, tmp_path: Path
) -> None:
    """Labels say which version sampled which token. Tokens before the update are exact, those after it approximate."""
    config = dataclasses.replace(vllm_config, interrupt="in_place")
    counter = Counter()
    engine = VLLMEngine(
        EngineArguments(str(vllm_store.model_path), config, on_tokens=counter),
        own_server(config, str(vllm_store.model_path), tensor=1, seed=1, log=tmp_path / "vllm.log"),
    )
    await engine.start()
    try:
        await engine.load_weights(vllm_store.path(V0), V0)
        futures = [engine.submit(EngineRequest(f"r{i}", [1, 2, 3 + i], LONG)) for i in range(8)]
        await counter.reaches(800)
        assert await engine.pause("in_place") == 8
        await within(engine.load_weights(vllm_store.path(V1), V1))
        held = engine.stats()
        assert (held.running, held.version) == (8, str(V1))
        await engine.resume()
        for i, future in enumerate(futures):
            result = await within(future)
            assert len(result.token_ids) == LONG.max_new_tokens
            first, second = result.spans
            assert (first.version, second.version) == (str(V0), str(V1))
            exact = vllm_store.logprobs(V0, [1, 2, 3 + i], result.token_ids)
            close_to(result.logprobs[: first.end], exact[: first.end])
            assert abs(result.logprobs[second.start] - exact[second.start]) > 1e-4
    finally:
        await engine.close()


@pytest.mark.release
async def test_a_vllm_that_stands_still_is_given_up(
    vllm_server: ServerInThread,
    vllm_store: WeightStore,
    vllm_config: GenerationConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = VLLMEngine(EngineArguments(str(vllm_store.model_path), vllm_config), vllm_server)
    await fails_when_it_stands_still(engine, vllm_server.process, vllm_store, monkeypatch)


async def test_the_death_of_vllm_fails_its_requests_and_leaves_nothing(
    vllm_server: ServerInThread, vllm_store: WeightStore, vllm_config: GenerationConfig
) -> None:
    server = vllm_server.process
    async with attached(vllm_server, vllm_store, vllm_config) as (engine, counter):
        processes = [psutil.Process(server.pid), *server.children]
        assert len(processes) >= 3  # the front end, the engine's core and its worker
        future = engine.submit(EngineRequest("r", [1, 2], ENDLESS))
        await counter.reaches(10)
        server.children[-1].send_signal(signal.SIGKILL)
        with pytest.raises((EngineFailed, EngineUnavailable)):
            await within(future)
        for _ in range(600):
            if engine.failure is not None:
                break
            await asyncio.sleep(0.1)
        assert "its log" in str(engine.failure)
        with pytest.raises(EngineUnavailable, match="the engine has failed"):
            engine.submit(EngineRequest("late", [1, 2], ENDLESS))
    vllm_server.stop()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    assert not Path(server.url.removeprefix("unix:")).parent.exists()
