"""The engine with a real SGLang server: logprobs, versions across updates under load, pauses, aborts, refusals, server death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from asyncrl.config.processes import GenerationServerConfig, WorkerInfo
from asyncrl.config.schema import ConfigError, GenerationConfig, NameResolveConfig, RuntimeConfig
from asyncrl.generation.engine import (
    EngineArguments,
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.generation.sglang import SGLangEngine
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_process import AttachedServer, own_server
from asyncrl.generation.worker import GenerationServer
from asyncrl.protocol.generation import SamplingParams, VersionSpan
from asyncrl.protocol.names import Names
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.metrics import read_json_lines
from tests.support.memory_names import memory_system, open_names
from tests.support.real_servers import START_LIMIT_S
from tests.support.server_load import LIMIT_S, Counter, close_to, make_prompt, respond, within
from tests.support.weight_store import MAX_POSITIONS, V0, V1, V2, V3, WeightStore

LONG = SamplingParams(
    max_new_tokens=600, ignore_eos=True
)  # runs for a second or two, so that it still runs when a delayed test acts
ENDING = SamplingParams(max_new_tokens=200)


@contextlib.asynccontextmanager
async def attached(
    url: str, store: WeightStore, config: GenerationConfig, version: WeightVersion | None = V0, **changes: Any
) -> AsyncIterator[SGLangEngine]:
    """An engine attached to the session's server, as `external` attaches one."""
    counter = Counter()
    engine = SGLangEngine(
        EngineArguments(str(store.model_path), dataclasses.replace(config, **changes), on_tokens=counter),
        AttachedServer(url),
    )
    engine.counter = counter  # type: ignore[attr-defined]
    await engine.start()
    try:
        if version is not None:
            await engine.load_weights(store.path(version), version)
        yield engine
    finally:
        await engine.close()


def counter_of(engine: SGLangEngine) -> Counter:
    counter = engine.counter  # type: ignore[attr-defined]
    assert isinstance(counter, Counter)
    return counter


# ------------------------------------------------------------------------------------------------------------ sampling


async def test_logprobs_equal_a_plain_forward(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """Requests with very different lengths, temperatures and filters run in one batch."""
    rng = random.Random(1)
    async with attached(sglang_url, store, sglang_config) as engine:
        asked = []
        for i in range(40):
            prompt = make_prompt(rng, rng.choice([1, 2, 9, 33, 150]))
            temperature = rng.choice([0.6, 1.0, 1.3])
            params = SamplingParams(
                max_new_tokens=rng.choice([1, 5, 30, 60]),
                temperature=temperature,
                top_p=rng.choice([0.9, 1.0]),
                top_k=rng.choice([-1, 3]),
            )
            asked.append((prompt, params, engine.submit(EngineRequest(str(i), prompt, params))))
        for prompt, params, future in asked:
            result = await within(future)
            close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids, params.temperature))
            assert result.spans == [VersionSpan(version=str(V0), start=0, end=len(result.token_ids))]
            assert result.finish.type == ("stop" if result.token_ids[-1] == 0 else "length")
            assert result.finish.type == "stop" or len(result.token_ids) == params.max_new_tokens
        assert engine.stats().running == engine.stats().waiting == 0
        assert engine.stats().num_tokens == counter_of(engine).count


async def test_greedy_has_logprobs_at_temperature_one(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(2), 12)
    greedy, warm = SamplingParams(max_new_tokens=40, temperature=0.0), SamplingParams(max_new_tokens=40)
    async with attached(sglang_url, store, sglang_config) as engine:
        beside = [engine.submit(EngineRequest(f"warm{i}", prompt, warm)) for i in range(4)]
        result = await within(engine.submit(EngineRequest("greedy", prompt, greedy)))
        await within(asyncio.gather(*beside))
    assert result.token_ids == store.greedy(V0, prompt, 40)
    close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids))


async def test_filters_keep_to_the_likeliest(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(3), 12)
    async with attached(sglang_url, store, sglang_config) as engine:
        for i, params in enumerate(
            (SamplingParams(max_new_tokens=30, top_k=1), SamplingParams(max_new_tokens=30, top_p=1e-6))
        ):
            result = await within(engine.submit(EngineRequest(str(i), prompt, params)))
            assert result.token_ids == store.greedy(V0, prompt, 30)


async def test_stop_tokens_stay_and_eos_can_be_ignored(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(4), 8)
    async with attached(sglang_url, store, sglang_config) as engine:
        path = store.greedy(V0, prompt, 5)
        stopping = SamplingParams(max_new_tokens=30, temperature=0.0, stop_token_ids=[path[-1]])
        stopped = await within(engine.submit(EngineRequest("stop", prompt, stopping)))
        assert stopped.token_ids == path[: path.index(path[-1]) + 1]
        assert (stopped.finish.type, stopped.finish.matched) == ("stop", path[-1])
        many = [engine.submit(EngineRequest(f"on{i}", prompt, LONG)) for i in range(8)]
        results = [await within(future) for future in many]
        assert {len(result.token_ids) for result in results} == {LONG.max_new_tokens}
        assert any(0 in result.token_ids[:-1] for result in results)  # EOS was sampled and ignored
        ending = [engine.submit(EngineRequest(f"off{i}", prompt, ENDING)) for i in range(8)]
        results = [await within(future) for future in ending]
        assert any(result.finish.type == "stop" and result.finish.matched == 0 for result in results)


async def test_a_whole_context_can_be_filled(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    rng = random.Random(5)
    async with attached(sglang_url, store, sglang_config) as engine:
        for length in (MAX_POSITIONS - 40, MAX_POSITIONS - 1):
            prompt = make_prompt(rng, length)
            params = SamplingParams(max_new_tokens=MAX_POSITIONS - length, ignore_eos=True)
            result = await within(engine.submit(EngineRequest(str(length), prompt, params)))
            assert len(result.token_ids) == MAX_POSITIONS - length
            close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids))
            with pytest.raises(RequestRefused, match=f"allows {MAX_POSITIONS} tokens per request"):
                engine.submit(EngineRequest("long", [*prompt, 1], params))


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("mode", ["abort", "retract", "wait"])
async def test_updates_under_load_give_exact_versions(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig, mode: str
) -> None:
    """The weights are updated while requests run and others wait. Each token's logprob shows that the version of its label sampled
    the token."""
    rng = random.Random(6)
    async with attached(sglang_url, store, sglang_config, max_running_requests=12) as engine:
        prompts = [make_prompt(rng, rng.choice([3, 20, 90])) for _ in range(18)]
        params = [LONG if i % 3 else ENDING for i in range(len(prompts))]
        asked = [
            asyncio.ensure_future(respond(engine, f"r{i}", prompt, asks))
            for i, (prompt, asks) in enumerate(zip(prompts, params, strict=True))
        ]
        for version in (V1,) if mode == "wait" else (V1, V2, V3):  # the first update in "wait" lets twelve requests end
            before = engine.stats().num_tokens
            await counter_of(engine).reaches(before + 400)
            assert await within(engine.pause(mode)) == 12
            await within(engine.load_weights(store.path(version), version))
            assert engine.stats().running == 0
            await engine.resume()
        results = [await within(future) for future in asked]
        by_version = counter_of(engine).by_version
    seen: set[str] = set()
    several = 0
    for prompt, asks, result in zip(prompts, params, results, strict=True):
        if asks is LONG:
            assert len(result.token_ids) == LONG.max_new_tokens
        else:  # no request goes on after its EOS, although an abort hides that a response has just ended
            assert 0 not in result.token_ids[:-1]
            assert result.finish.type == ("stop" if result.token_ids[-1] == 0 else "length")
        versions = store.assert_versions_are_exact(prompt, result)
        several += len(versions) > 1
        seen |= versions
    assert (several == 0) == (mode == "wait")
    assert len(seen) >= (2 if mode == "wait" else 4)
    assert sum(by_version.values()) == sum(len(result.token_ids) for result in results)  # none lost, none counted twice


async def test_no_stale_prefix_survives_an_update(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """SGLang keeps the repeated long prompt in its prefix cache until the weights change."""
    prompt = make_prompt(random.Random(7), 200)
    async with attached(sglang_url, store, sglang_config) as engine:
        for version in (V0, V1, V2):
            if version != V0:
                await engine.load_weights(store.path(version), version)
            for i in range(3):
                result = await within(
                    engine.submit(EngineRequest(f"{version}{i}", prompt, SamplingParams(max_new_tokens=20)))
                )
                close_to(result.logprobs, store.logprobs(version, prompt, result.token_ids))


async def test_a_load_without_a_pause_waits_or_aborts(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(8), 8)
    async with attached(sglang_url, store, sglang_config) as engine:
        waited = engine.submit(EngineRequest("waited", prompt, LONG))
        assert await within(engine.load_weights(store.path(V1), V1)) == 0
        assert waited.done()
        aborted = engine.submit(EngineRequest("aborted", prompt, LONG))
        await counter_of(engine).reaches(LONG.max_new_tokens + 1)
        assert await within(engine.load_weights(store.path(V2), V2, abort_running=True)) == 1
        result = await within(aborted)
        assert result.finish.type == "abort"
        assert 0 < len(result.token_ids) < LONG.max_new_tokens
        assert store.assert_versions_are_exact(prompt, result) == {str(V1)}
        assert (engine.stats().version, engine.stats().num_updates) == (str(V2), 3)


async def test_versions_only_grow_and_are_verified(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig, tmp_path: Path
) -> None:
    async with attached(sglang_url, store, sglang_config, None) as engine:
        with pytest.raises(EngineUnavailable, match="no weight version"):
            engine.submit(EngineRequest("early", [1], LONG))
        await engine.load_weights(store.path(V1), V1)
        with pytest.raises(WeightsRefused, match="versions only increase"):
            await engine.load_weights(store.path(V0), V0)
        with pytest.raises(WeightsRefused, match="manifest"):
            await engine.load_weights(tmp_path, V2)
        with pytest.raises(WeightsRefused, match=f"holds {V1}, expected {V2}"):
            await engine.load_weights(store.path(V1), V2)
        assert engine.stats().version == str(V1)
        result = await within(engine.submit(EngineRequest("still", [1, 2], SamplingParams(max_new_tokens=5))))
        assert result.spans[0].version == str(V1)
        assert engine.model_path == str(store.path(V1))


async def test_scores_are_those_of_a_plain_forward(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(9), 40)
    async with attached(sglang_url, store, sglang_config) as engine:
        await engine.pause()
        for version in (V1, V2):
            await engine.load_weights(store.path(version), version)
            scores = await within(engine.score(prompt))
            assert scores[0] == 0.0
            close_to(scores[1:], store.logprobs(version, prompt[:1], prompt[1:]))
        engine.forget_version()
        assert engine.stats().version == ""


# ------------------------------------------------------------------------------------------------------ pause and abort


async def test_while_paused_nothing_is_sent(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """A paused SGLang would accept a request but could not abort it. Requests wait in asyncrl's engine and can be aborted there."""
    async with attached(sglang_url, store, sglang_config, max_running_requests=2, max_queue=4) as engine:
        await engine.pause()
        futures = [engine.submit(EngineRequest(f"r{i}", [1, 2], LONG)) for i in range(4)]
        assert (engine.stats().running, engine.stats().waiting, engine.stats().paused) == (0, 4, True)
        with pytest.raises(EngineUnavailable, match="the queue is full"):
            engine.submit(EngineRequest("one more", [1, 2], LONG))
        assert await engine.abort("r0")
        assert (await futures[0]).finish.type == "abort"
        futures[1].cancel()
        await asyncio.sleep(0)
        await engine.resume()
        results = [await within(future) for future in futures[2:]]
        assert {len(result.token_ids) for result in results} == {LONG.max_new_tokens}
        assert engine.stats().waiting == 0


async def test_aborting_one_leaves_those_whose_names_begin_alike(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    async with attached(sglang_url, store, sglang_config) as engine:
        futures = {rid: engine.submit(EngineRequest(rid, [1, 2, 3], LONG)) for rid in ("a", "ab", "abc")}
        with pytest.raises(RequestRefused, match="already in flight"):
            engine.submit(EngineRequest("ab", [1], LONG))
        await counter_of(engine).reaches(20)
        assert await within(engine.abort("a"))
        result = await futures["a"]
        assert result.finish.type == "abort"
        assert len(result.token_ids) == len(result.logprobs) < LONG.max_new_tokens
        store.assert_versions_are_exact([1, 2, 3], result)
        for rid in ("ab", "abc"):
            assert len((await within(futures[rid])).token_ids) == LONG.max_new_tokens
        assert not await engine.abort("a")
        assert await within(engine.submit(EngineRequest("a", [1], SamplingParams(max_new_tokens=2))))


async def test_a_caller_that_goes_away_frees_its_place(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    client = SGLangClient(sglang_url)
    async with attached(sglang_url, store, sglang_config, max_running_requests=2) as engine:
        futures = [engine.submit(EngineRequest(f"r{i}", [1, 2], LONG)) for i in range(3)]
        await counter_of(engine).reaches(10)
        futures[0].cancel()
        futures[1].cancel()
        assert len((await within(futures[2])).token_ids) == LONG.max_new_tokens
        assert engine.stats().num_aborted == 2
        assert engine.stats().running == 0
    await client.close()


async def test_load_is_what_sglang_says(sglang_url: str, store: WeightStore, sglang_config: GenerationConfig) -> None:
    async with attached(sglang_url, store, sglang_config) as engine:
        assert engine.stats().used_tokens == 0
        futures = [engine.submit(EngineRequest(f"r{i}", [1 + i, 2], LONG)) for i in range(16)]
        await counter_of(engine).reaches(400)
        await engine.pause("retract")  # so that the load starts at a known moment
        await engine.resume()
        used = engine.stats().used_tokens
        assert await within(engine.abort_all()) == 16
        await within(asyncio.gather(*futures))
        assert 0 <= used <= 16 * (2 + LONG.max_new_tokens)


async def test_what_sglang_would_take_badly_is_refused(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    refused = [
        (EngineRequest("r", [], LONG), "input_ids is empty"),
        (EngineRequest("r", [1, 64], LONG), "contains 64; the vocabulary has 64"),
        (EngineRequest("r", [-1], LONG), "contains -1"),
        (EngineRequest("r", [1], SamplingParams(max_new_tokens=0)), "must be at least 1"),
        (EngineRequest("r", [1], SamplingParams(temperature=-1.0)), "temperature is -1.0"),
        (EngineRequest("r", [1], SamplingParams(top_p=0.0)), "top_p is 0.0"),
        (EngineRequest("r", [1], SamplingParams(top_k=0)), "top_k is 0"),
        (EngineRequest("r", [1], SamplingParams(stop_token_ids=[64])), "stop_token_ids contains 64"),
        (
            EngineRequest("r", [1], SamplingParams(ignore_eos=True, stop_token_ids=[1])),
            "ignore_eos and stop_token_ids are both set",
        ),
    ]
    async with attached(sglang_url, store, sglang_config) as engine:
        for request, message in refused:
            with pytest.raises(RequestRefused, match=message):
                engine.submit(request)
        with pytest.raises(RequestRefused, match="'in_place' is not supported by this server"):
            await engine.pause("in_place")
        assert engine.stats().num_requests == 0
        assert engine.failure is None


# ------------------------------------------------------------------------------------------------------- start and end


async def test_a_whole_generation_server_in_front(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig, tmp_path: Path
) -> None:
    """A generation server with the engine `external`: asyncrl's protocol over sockets, versions, the journal. SGLang still runs
    after the server has ended."""
    name_resolve = NameResolveConfig(endpoints=[f"memory://{tmp_path}"])
    run_dir = str(store.root / "run")
    info = WorkerInfo("generation_server", 0, 1, "e", "t", 1, run_dir, 1, name_resolve, RuntimeConfig())
    server = GenerationServer(
        GenerationServerConfig(
            worker=info,
            engine="external",
            model_path=str(store.model_path),
            tokenizer_path=str(store.model_path),
            generation=dataclasses.replace(sglang_config, python="", urls=[sglang_url]),
            torch_threads=1,
        ),
        memory_system(),
    )
    main = asyncio.create_task(server.main())
    key = Names("e", "t").generation_server(0)
    url = await asyncio.to_thread(open_names(name_resolve).wait, key, LIMIT_S)
    async with aiohttp.ClientSession() as session:

        async def post(path: str, **body: Any) -> tuple[int, Any]:
            async with session.post(url + path, json=body) as answer:
                return answer.status, await answer.json()

        assert (await post("/generate", input_ids=[1]))[0] == 503
        for version in (V0, V1):
            assert (await post("/pause_generation", mode="retract"))[0] == 200
            loaded = await post(
                "/update_weights_from_disk", model_path=str(store.path(version)), weight_version=str(version)
            )
            assert loaded[1]["success"]
            assert (await post("/continue_generation"))[0] == 200
            params = {"max_new_tokens": 40, "ignore_eos": True}
            status, reply = await post("/generate", input_ids=[1, 2], sampling_params=params, return_logprob=True)
            assert status == 200
            meta = reply["meta_info"]
            assert meta["weight_versions"] == [{"version": str(version), "start": 0, "end": 40}]
            logprobs = [row[0] for row in meta["output_token_logprobs"]]
            close_to(logprobs, store.logprobs(version, [1, 2], reply["output_ids"]))
        status, told = await post("/update_weights_from_disk", model_path=str(tmp_path), weight_version=str(V2))
        assert (status, told["success"]) == (400, False)
        async with session.get(f"{url}/get_server_info") as answer:
            assert (await answer.json())["pause_modes"] == ["abort", "retract", "wait"]
    server.stopping.set()
    await within(main)
    journal = read_json_lines(store.root / "run" / "journal" / "generation_server_0.jsonl")
    by_version = {
        str(version): sum(line["tokens"] for line in journal if line["version"] == str(version)) for version in (V0, V1)
    }
    assert by_version == {str(V0): 40, str(V1): 40}
    async with aiohttp.ClientSession() as session, session.get(f"{sglang_url}/health") as answer:
        assert answer.status == 200


async def test_an_unreachable_server_is_told(store: WeightStore, sglang_config: GenerationConfig) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config = dataclasses.replace(sglang_config, load_timeout_s=0.3)
        engine = SGLangEngine(
            EngineArguments(str(store.model_path), config),
            AttachedServer(f"http://127.0.0.1:{unused.getsockname()[1]}/"),
        )
        with pytest.raises(ConfigError, match=r"no SGLang server answers at http://127.0.0.1:\d+ within 0.3 s"):
            await within(engine.start())
        await engine.close()


async def test_a_server_that_cannot_start_says_why(
    store: WeightStore, sglang_config: GenerationConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(sglang_config, server_args={"no-such-argument": "1"})
    server = own_server(config, str(store.model_path), tensor=1, seed=1, log=tmp_path / "logs" / "sglang.log")
    engine = SGLangEngine(EngineArguments(str(store.model_path), config), server)
    with pytest.raises(ConfigError, match=r"(?s)exit code 2 while it was starting.*no-such-argument"):
        await within(engine.start(), START_LIMIT_S + 30)
    await engine.close()


@pytest.mark.release
async def test_its_own_server_in_place_then_death(
    store: WeightStore, sglang_config: GenerationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checks that need a server of their own share one with two tensor ranks, because a start takes seconds."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    config = dataclasses.replace(sglang_config, interrupt="in_place")
    server = own_server(config, str(store.model_path), tensor=2, seed=1, log=tmp_path / "logs" / "sglang.log")
    counter = Counter()
    engine = SGLangEngine(EngineArguments(str(store.model_path), config, on_tokens=counter), server)
    try:
        await within(engine.start(), START_LIMIT_S + 30)
        processes = [psutil.Process(server.pid), *server.children]
        named = sorted(process.cmdline()[0] for process in server.children)  # sorted by name, not by pid: pids wrap
        assert named == ["sglang::detokenizer", "sglang::scheduler_TP0", "sglang::scheduler_TP1"]
        assert "PYTHONPATH" not in processes[0].environ()
        assert engine.pause_modes == ("abort", "retract", "wait", "in_place")
        await engine.load_weights(store.path(V0), V0)

        await in_place(engine, store, counter)

        dying = [asyncio.ensure_future(engine.submit(EngineRequest(f"d{i}", [1, 2], LONG))) for i in range(40)]
        await counter.reaches(counter.count + 100)
        processes[0].send_signal(signal.SIGKILL)
        ends = await within(asyncio.gather(*dying, return_exceptions=True))
        assert all(isinstance(end, EngineFailed) for end in ends)
        assert "was killed by signal SIGKILL" in str(ends[0])
        assert "was killed by signal SIGKILL" in str(engine.failure)
        with pytest.raises(EngineUnavailable, match="the engine has failed"):
            engine.submit(EngineRequest("after", [1], LONG))
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, LIMIT_S)
        assert alive == []
    finally:
        await engine.close()
    assert engine.failure is None  # a closed engine has not failed


async def in_place(engine: SGLangEngine, store: WeightStore, counter: Counter) -> None:
    """Requests survive an update. Logprobs of tokens before the update are exactly the old weights'; later ones are approximate."""
    prompts = [make_prompt(random.Random(i), 10) for i in range(8)]
    futures = [engine.submit(EngineRequest(f"p{i}", prompt, LONG)) for i, prompt in enumerate(prompts)]
    await counter.reaches(8 * 40)
    assert await within(engine.pause("in_place")) == 8
    with pytest.raises(EngineUnavailable, match="paused in place"):
        await engine.score([1, 2])
    await within(engine.load_weights(store.path(V1), V1))
    assert engine.stats().running == 8
    await engine.resume()
    for prompt, future in zip(prompts, futures, strict=True):
        result = await within(future)
        assert [span.version for span in result.spans] == [str(V0), str(V1)]
        assert result.spans[-1].end == len(result.token_ids) == LONG.max_new_tokens
        cut = result.spans[0].end
        close_to(result.logprobs[:cut], store.logprobs(V0, prompt, result.token_ids)[:cut])
    fresh = await within(engine.submit(EngineRequest("fresh", prompts[0], SamplingParams(max_new_tokens=30))))
    close_to(fresh.logprobs, store.logprobs(V1, prompts[0], fresh.token_ids))  # no prefix of the old weights
