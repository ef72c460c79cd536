"""Nine cases that SGLang 0.5.23 handles badly or in an unexpected way. asyncrl prevents each of them.

Each test shows the server's own behaviour, where the server survives it, and that asyncrl's engine avoids the case. A failure in
the first half of a test means that a newer SGLang has improved.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import re
import time
from collections.abc import AsyncIterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from packaging.requirements import Requirement
from test_sglang_engine import LONG, attached, close_to, counter_of, make_prompt, within

from asyncrl.config.schema import ConfigError, ExperimentConfig, GenerationConfig
from asyncrl.generation.engine import EngineRequest, RequestRefused, WeightsRefused
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.sglang import SGLangEngine
from asyncrl.generation.sglang_http import SGLangClient, sglang_params
from asyncrl.generation.sglang_process import server_arguments, server_environment
from asyncrl.launch.experiment import validate
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import tensor_files, version_dir
from tests.support.weight_store import EXACT, MAX_POSITIONS, V0, V1, V2, WeightStore

SHORT = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@contextlib.asynccontextmanager
async def raw(url: str) -> AsyncIterator[SGLangClient]:
    """SGLang's client, without asyncrl's engine."""
    client = SGLangClient(url)
    try:
        yield client
    finally:
        await client.close()


async def generate(client: SGLangClient, rid: str, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """SGLang's unchanged answer."""
    tokens, logprobs, meta = list[int](), list[float](), None
    async for piece in client.generate(rid, prompt, sglang_params(params, []), idle_limit_s=60.0):
        tokens += piece.output_ids
        logprobs += [row[0] or 0.0 for row in piece.meta_info.output_token_logprobs]
        meta = piece.meta_info
    assert meta is not None
    return {"tokens": tokens, "logprobs": logprobs, "meta": meta}


async def update(client: SGLangClient, path: Path, version: WeightVersion) -> None:
    """Load weights, with retries: the scheduler may still count a request that it has answered (sglang.py does the same)."""
    for tries_left in reversed(range(5)):
        try:
            await client.update_weights_from_disk(str(path), str(version), flush_cache=True, limit_s=60.0)
            return
        except ServerError as error:
            if not tries_left or "Weights were updated, but the cache was not flushed" not in str(error):
                raise
            await asyncio.sleep(0.05)


async def status_of(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as answer:
        return answer.status, await answer.text()


async def test_1_tensors_are_received_between_begin_and_end_only(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """Without begin_weight_update SGLang receives no tensor, so a trainer that broadcasts one would hang. Therefore the trainer
    must check SGLang's answer before it sends any tensor."""
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none", "flush_cache": False}
    async with raw(sglang_url) as client:
        with pytest.raises(ServerError, match="must run between begin_weight_update") as refused:
            await client.call("/update_weights_from_distributed", body, limit_s=10.0)
        assert refused.value.status == 400


async def test_2_in_place_runs_without_overlap_scheduling() -> None:
    """With overlap scheduling, SGLang labels the first token after an update with the new version, but old weights sampled it."""

    def arguments(config: GenerationConfig) -> list[str]:
        return server_arguments(config, "/model", port=1, tensor=1, seed=1, max_length=512, on_gpu=True)

    assert "--disable-overlap-schedule" in arguments(GenerationConfig(interrupt="in_place"))
    for interrupt in ("abort", "retract", "wait"):  # labels are exact with overlap too: no request runs meanwhile
        assert "--disable-overlap-schedule" not in arguments(GenerationConfig(interrupt=interrupt))


async def test_3_flushing_in_place_fails_after_the_weights_changed(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    prompt = make_prompt(random.Random(1), 100)
    async with raw(sglang_url) as client, attached(sglang_url, store, sglang_config) as engine:
        running = engine.submit(EngineRequest("running", [1, 2], LONG))
        await counter_of(engine).reaches(20)
        await client.pause("in_place", limit_s=10.0)
        with pytest.raises(ServerError, match="Weights were updated, but the cache was not flushed"):
            await client.update_weights_from_disk(str(store.path(V0)), str(V0), flush_cache=True, limit_s=60.0)
        await client.resume(limit_s=10.0)
        await within(running)
        # asyncrl never updates a server with a prefix cache in place, and every update flushes the cache.
        assert "--disable-radix-cache" in server_arguments(
            GenerationConfig(interrupt="in_place"), "/model", port=1, tensor=1, seed=1, max_length=512, on_gpu=True
        )
        with pytest.raises(RequestRefused, match="in_place"):
            await engine.pause("in_place")
        for version in (V0, V1):
            await engine.load_weights(store.path(version), version)
            result = await within(engine.submit(EngineRequest(f"{version}", prompt, SHORT)))
            close_to(result.logprobs, store.logprobs(version, prompt, result.token_ids))


async def test_4_a_request_that_comes_while_sglang_is_paused_cannot_be_aborted(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    async with raw(sglang_url) as client:
        await client.pause("retract", limit_s=10.0)
        blocked = asyncio.ensure_future(generate(client, "blocked.", [1, 2], SHORT))
        for _ in range(3):
            await client.abort("blocked.", limit_s=10.0)
            await asyncio.wait([blocked], timeout=0.1)
        assert not blocked.done()
        began = time.monotonic()
        async with aiohttp.ClientSession() as session, session.get(f"{sglang_url}/health") as answer:
            assert answer.status == 200
        assert time.monotonic() - began < 15.0  # 20 s without SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
        await client.resume(limit_s=10.0)
        await within(blocked)
    environment = server_environment({}, python="/venv/bin/python", tmp="/t", tensor=1, on_gpu=True)
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    async with attached(sglang_url, store, sglang_config) as engine:  # requests wait here and can be aborted
        await engine.pause()
        future = engine.submit(EngineRequest("r", [1, 2], LONG))
        assert await engine.abort("r")
        assert (await future).finish.type == "abort"


async def test_5_an_update_without_a_pause_waits_for_running_requests(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """An update without a pause takes as long as the longest running response. asyncrl therefore pauses the server, or limits the
    time of the update."""
    async with raw(sglang_url) as client, attached(sglang_url, store, sglang_config) as engine:
        future = engine.submit(EngineRequest("r", [1, 2], LONG))
        await counter_of(engine).reaches(20)
        await update(client, store.path(V0), V0)
        assert len((await within(future)).token_ids) == LONG.max_new_tokens
    async with raw(sglang_url) as client, attached(sglang_url, store, sglang_config) as engine:
        engine._config = dataclasses.replace(engine._config, load_timeout_s=0.2)  # too short for running requests
        await client.pause("in_place", limit_s=10.0)  # generation takes longer than the load's limit
        future = engine.submit(EngineRequest("r", [1, 2], LONG))
        with pytest.raises(WeightsRefused, match=r"1 requests still run after 0.2 s"):
            await engine.load_weights(store.path(V1), V1)
        assert engine.stats().version == str(V0)
        await client.resume(limit_s=10.0)
        assert len((await within(future)).token_ids) == LONG.max_new_tokens


async def test_6_a_checkpoint_that_does_not_fit_is_success_to_sglang(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig, tmp_path: Path
) -> None:
    tensors = store.tensors(V1)
    missing = store.write(V2, {name: tensors[name] for name in list(tensors)[:-1]}, run="missing")
    foreign = store.write(V2, {**tensors, "model.layers.7.mlp.up_proj.weight": torch.zeros(4, 4)}, run="foreign")
    shapes = store.write(V2, {**tensors, "model.norm.weight": torch.zeros(65)}, run="shapes")
    truncated = store.write(V2, tensors, run="truncated")
    (file,) = tensor_files(truncated)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])  # SGLang would die of this file
    absent = version_dir(tmp_path, "actor", V2)
    async with raw(sglang_url) as client:
        await update(client, missing, V2)  # success: true
        with pytest.raises(ServerError, match="Failed to get weights iterator"):
            await client.update_weights_from_disk(str(absent), str(V2), flush_cache=True, limit_s=60.0)
    async with attached(sglang_url, store, sglang_config) as engine:
        for path, why in (
            (missing, "is missing"),
            (foreign, "does not belong to this model"),
            (shapes, r"has shape \(65,\), expected \(64,\)"),
            (truncated, r"bytes, the manifest says"),
            (absent, "no manifest.json"),
        ):
            with pytest.raises(WeightsRefused, match=why):
                await engine.load_weights(path, V2)
        file.write_bytes(whole[:-4] + b"\0\0\0\0")
        with pytest.raises(WeightsRefused, match="another checksum"):
            await engine.load_weights(truncated, V2)
        assert (engine.failure, engine.stats().version) == (None, str(V0))
        result = await within(engine.submit(EngineRequest("r", [1, 2, 3], SHORT)))
        close_to(result.logprobs, store.logprobs(V0, [1, 2, 3], result.token_ids))


async def test_7_what_sglang_refuses_ignores_or_dies_of(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """A token outside the vocabulary kills SGLang (not shown here). asyncrl refuses such a request before it sends anything."""
    bad = [
        ({"input_ids": [1] * (MAX_POSITIONS + 88), "sampling_params": {}}, "longer than the model's context length"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
    ]
    for body, why in bad:
        status, text = await status_of(sglang_url, "/generate", body)
        assert status == 400
        assert why in text
    ignored = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "retrun_logprob": True}
    assert (await status_of(sglang_url, "/generate", ignored))[0] == 200
    async with raw(sglang_url) as client:
        pieces = client.generate("twice.", [1, 2], sglang_params(LONG, []), idle_limit_s=60.0)
        await within(anext(pieces))  # the request runs
        doubled = {"rid": "twice.", "input_ids": [1], "sampling_params": {}}
        assert "Duplicate request ID" in (await status_of(sglang_url, "/generate", doubled))[1]
        assert [piece.meta_info.finish_reason is not None async for piece in pieces][-1]
    async with attached(sglang_url, store, sglang_config) as engine:
        for ids in ([64], [-1], [1] * (MAX_POSITIONS + 88), []):
            with pytest.raises(RequestRefused):
                engine.submit(EngineRequest("r", ids, SHORT))
        await asyncio.sleep(0)
        assert engine.stats().num_requests == 0
        ours = [engine.submit(EngineRequest(rid, [1, 2], SHORT)) for rid in ("twice.", "other")]  # our rids are unique
        assert [len((await within(future)).token_ids) for future in ours] == [8, 8]
        assert engine.failure is None


async def test_8_logprobs_are_after_temperature_and_before_filters(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """All of asyncrl uses such logprobs. SGLang's sampling seed has no effect, so asyncrl does not offer one."""
    prompt = make_prompt(random.Random(2), 10)
    async with raw(sglang_url) as client, attached(sglang_url, store, sglang_config) as engine:
        params = SamplingParams(max_new_tokens=30, temperature=0.7, top_p=0.8, top_k=5, ignore_eos=True)
        result = await within(engine.submit(EngineRequest("r", prompt, params)))
        close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids, 0.7))
        assert all(
            abs(a - b) < EXACT
            for a, b in zip(result.logprobs, store.logprobs(V0, prompt, result.token_ids, 0.7), strict=True)
        )
        seeded = sglang_params(SamplingParams(max_new_tokens=16, ignore_eos=True), []) | {"sampling_seed": 7}
        answers = set()
        for i in range(4):
            async for piece in client.generate(f"seed{i}.", prompt, seeded, idle_limit_s=60.0):
                answers.add(tuple(piece.output_ids))
        assert len(answers) > 1
    assert "sampling_seed" not in SamplingParams.__struct_fields__


async def test_9_weights_come_from_disk_or_over_the_network_only(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """/update_weights_from_tensor, called by another process, kills SGLang on a CPU (not shown here). asyncrl never calls it."""
    import asyncrl

    sources = Path(asyncrl.__file__).parent.rglob("*.py")
    assert [file.name for file in sources if "update_weights_from_tensor" in file.read_text(encoding="utf-8")] == []
    assert not hasattr(SGLangEngine, "update_weights_from_tensor")


def test_scoring_while_paused_in_place_is_refused_by_the_config(store: WeightStore) -> None:
    """A scoring request would wait for the end of SGLang's pause (see test 4), and the pause would end only after the scores."""
    from asyncrl.config.schema import WeightsConfig

    config = ExperimentConfig(
        allocation="sglang.d1+d1",
        model_path=str(store.model_path),
        generation=GenerationConfig(interrupt="in_place"),
        weights=dataclasses.replace(WeightsConfig(), verify_logprobs=True),
    )
    with pytest.raises(
        ConfigError, match=r"weights\.verify_logprobs=True: SGLang scores nothing while it is paused in place"
    ):
        validate(config)


def test_the_torch_of_machines_with_gpus_is_the_one_that_sglang_pins(sglang_python: str) -> None:
    """launcher/setup.sh installs it for the trainer, and setup_sglang.sh for SGLang."""
    (site,) = Path(sglang_python).parent.parent.glob("lib/python3*/site-packages")
    (sglang,) = distributions(name="sglang", path=[str(site)])
    (pinned,) = (
        need for need in map(Requirement, sglang.requires or []) if need.name == "torch" and need.marker is None
    )
    script = Path(__file__).resolve().parents[2] / "launcher" / "setup.sh"
    (installed,) = re.findall(r"^ASYNCRL_CUDA_TORCH=(\S+)$", script.read_text(), re.M)
    assert str(pinned.specifier) == f"=={installed}"
