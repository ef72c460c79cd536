"""The embedded engine with a tiny real model: logprobs, versions, interruptions, updates, refusals."""

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation import transformers as embedded
from asyncrl.generation.engine import (
    EngineArguments,
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    Generated,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.generation.padded_attention import group_lengths
from asyncrl.generation.transformers import TransformersEngine, sample_tokens
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version

CONFIG = GenerationConfig(
    max_running_requests=64, max_batch_tokens=512, num_blocks=256, page_size=16, load_timeout_s=20.0, max_queue=200
)
V0, V1, V2 = (WeightVersion(1, v) for v in range(3))
LIMIT_S = 30.0  # for one wait, on a busy machine


class Store:
    """A model directory and its weight versions. v1 and v2 have clearly different weights."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.root = root
        self.model_path = root / "model"
        make_tiny_model(self.model_path)
        self._models: dict[WeightVersion, torch.nn.Module] = {}
        for version in (V0, V1, V2):
            self.write(version)

    def tensors(self, version: WeightVersion) -> dict[str, torch.Tensor]:
        model = make_tiny_model(None, seed=1 + version.version)
        return {name: p.detach() for name, p in model.named_parameters()}  # a tied tensor appears once

    def write(self, version: WeightVersion, tensors: dict[str, torch.Tensor] | None = None, run: str = "run") -> Path:
        path = version_dir(self.root / run, "actor", version)
        given = self.tensors(version) if tensors is None else tensors
        write_version(path, given.items(), source_dir=self.model_path, version=version, fsync=False)
        return path

    def path(self, version: WeightVersion) -> Path:
        return version_dir(self.root / "run", "actor", version)

    def logprobs(
        self, version: WeightVersion, prompt: list[int], tokens: list[int], temperature: float = 1.0
    ) -> list[float]:
        """Logprobs of the tokens after the prompt, from a plain forward pass."""
        if version not in self._models:
            self._models[version] = AutoModelForCausalLM.from_pretrained(self.path(version), dtype=torch.float32)
        with torch.no_grad():
            logits = self._models[version](torch.tensor([prompt + tokens])).logits[0]
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    def greedy(self, version: WeightVersion, prompt: list[int], count: int) -> list[int]:
        self.logprobs(version, prompt, [0])
        tokens: list[int] = []
        while len(tokens) < count and 0 not in tokens:
            with torch.no_grad():
                tokens.append(int(self._models[version](torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
        return tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


class WatchedEngine(TransformersEngine):
    """Exposes transformers' manager, and calls `after_pass` in the generation thread after every pass."""

    manager: ContinuousBatchingManager

    def __init__(self, model_path: str, config: GenerationConfig) -> None:
        super().__init__(EngineArguments(model_path, config, on_tokens=lambda tokens, version: self.after_pass()))
        self.after_pass: Callable[[], None] = lambda: None

    async def start(self) -> None:
        start = ContinuousBatchingManager.start

        def note(manager: ContinuousBatchingManager) -> None:
            self.manager = manager
            start(manager)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContinuousBatchingManager, "start", note)
            await super().start()


@asynccontextmanager
async def running(
    store: Store, version: WeightVersion | None = V0, config: GenerationConfig = CONFIG, **changes: Any
) -> AsyncIterator[WatchedEngine]:
    engine = WatchedEngine(str(store.model_path), dataclasses.replace(config, **changes))
    await engine.start()
    if version is not None:
        await engine.load_weights(store.path(version), version)
    try:
        yield engine
    finally:
        await engine.close()


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def make_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(length)]


async def until(engine: WatchedEngine, condition: Callable[[], bool]) -> threading.Event:
    """Let the engine work until the condition holds. The condition is checked after every pass.

    Then block the engine's thread, so that a slow test still acts at this point. The block ends when the returned event is set, or
    when the engine is asked to pause, as most operations on requests and weights do.
    """
    go_on, holds, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    asked_to_pause = engine.manager.background_thread_status.is_pause_requested
    deadline = time.monotonic() + 2 * LIMIT_S

    def after_pass() -> None:
        if condition():
            engine.after_pass = lambda: None
            loop.call_soon_threadsafe(holds.set)
            while not go_on.wait(0.002) and not asked_to_pause() and time.monotonic() < deadline:
                pass

    engine.after_pass = after_pass
    await asyncio.wait_for(holds.wait(), LIMIT_S)
    return go_on


def only_version(result: Generated) -> str:
    """Assert that a single version sampled the response, and return this version."""
    (span,) = result.spans
    assert (span.start, span.end) == (0, len(result.token_ids))
    return span.version


def close_to(found: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("attention", ["padded", "sdpa", "eager"])
async def test_logprobs_equal_a_plain_forward(store: Store, attention: str) -> None:
    """Requests with very different lengths, temperatures and filters run in the same passes. Some prompts are longer than a
    pass."""
    rng = random.Random(1)
    async with running(store, attention=attention, max_batch_tokens=96, max_running_requests=32) as engine:
        asked = []
        for i in range(30):
            prompt = make_prompt(rng, rng.choice([1, 2, 9, 33, 150]))
            temperature = rng.choice([0.6, 1.0, 1.3])
            params = SamplingParams(
                max_new_tokens=rng.choice([1, 5, 30]),
                temperature=temperature,
                top_p=rng.choice([0.9, 1.0]),
                top_k=rng.choice([-1, 3]),
            )
            asked.append((prompt, temperature, engine.submit(EngineRequest(str(i), prompt, params))))
        for prompt, temperature, future in asked:
            result = await future
            close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids, temperature))
            assert only_version(result) == str(V0)
            assert result.finish.type == ("stop" if result.token_ids[-1] == 0 else "length")
        assert engine.stats().running == engine.stats().waiting == 0


async def test_greedy_beside_sampling(store: Store) -> None:
    rng = random.Random(2)
    prompt = make_prompt(rng, 12)
    greedy, warm = SamplingParams(max_new_tokens=10, temperature=0.0), SamplingParams(max_new_tokens=10)
    async with running(store) as engine:
        results = await asyncio.gather(
            *[engine.submit(EngineRequest(f"g{i}", prompt, greedy)) for i in range(8)],
            *[engine.submit(EngineRequest(f"s{i}", prompt, warm)) for i in range(8)],
        )
    expected = store.greedy(V0, prompt, 10)
    for result in results[:8]:
        assert result.token_ids == expected
        close_to(result.logprobs, store.logprobs(V0, prompt, expected))
    assert len({tuple(result.token_ids) for result in results[8:]}) > 4


def test_sample_tokens_follows_the_distribution() -> None:
    torch.manual_seed(3)
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    count = 20_000

    def shares(temperature: float, top_p: float, top_k: int) -> torch.Tensor:
        tokens, logprobs = sample_tokens(
            logits.expand(count, 5),
            torch.full((count,), temperature),
            torch.full((count,), top_p),
            torch.full((count,), top_k, dtype=torch.int32),
            needs_sorting=top_p < 1 or top_k > 0,
        )
        scaled = logits / (temperature or 1.0)
        torch.testing.assert_close(logprobs, scaled.log_softmax(0)[tokens])  # never renormalized
        return torch.bincount(tokens, minlength=5) / count

    torch.testing.assert_close(shares(1.0, 1.0, 0), logits.softmax(0), atol=0.015, rtol=0)
    torch.testing.assert_close(shares(0.5, 1.0, 0), (logits / 0.5).softmax(0), atol=0.015, rtol=0)
    top2 = torch.cat([logits[:2].softmax(0), torch.zeros(3)])
    torch.testing.assert_close(shares(1.0, 1.0, 2), top2, atol=0.015, rtol=0)
    torch.testing.assert_close(shares(1.0, 0.7, 0), top2, atol=0.015, rtol=0)  # .56 + .21 is the first sum >= .7
    assert shares(1.0, 0.01, 0)[0] == shares(0.0, 1.0, 0)[0] == 1.0


def test_rectangles_hold_each_request_once() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        keys = rng.integers(1, 300, size=rng.integers(1, 60))
        queries = np.where(rng.random(keys.size) < 0.5, 1, rng.integers(1, keys + 1))
        groups = group_lengths(queries, keys)
        assert sorted(np.concatenate(groups).tolist()) == list(range(keys.size))
        for group in groups:
            assert len({bool(queries[i] == 1) for i in group}) == 1
            assert keys[group].max() <= 1.5 * keys[group].min() + 32
    assert len(group_lengths(np.ones(64, dtype=int), np.arange(8, 16).repeat(8))) == 1


async def test_stop_tokens(store: Store) -> None:
    rng = random.Random(5)
    prompt = make_prompt(rng, 8)
    first = store.greedy(V0, prompt, 3)
    async with running(store) as engine:
        params = SamplingParams(max_new_tokens=3, temperature=0.0, stop_token_ids=[first[1]])
        result = await engine.submit(EngineRequest("a", prompt, params))
    assert result.token_ids == first[: first.index(first[1]) + 1]
    assert (result.finish.type, result.finish.matched) == ("stop", first[1])


async def test_more_requests_than_the_cache_holds(store: Store) -> None:
    """Requests evicted from a full cache return with all of their tokens and logprobs."""
    rng = random.Random(6)
    async with running(store, num_blocks=16, page_size=8, max_running_requests=32) as engine:
        prompts = [make_prompt(rng, rng.randrange(4, 20)) for _ in range(16)]
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        futures = [engine.submit(EngineRequest(str(i), prompt, params)) for i, prompt in enumerate(prompts)]
        for prompt, future in zip(prompts, futures, strict=True):
            result = await asyncio.wait_for(future, LIMIT_S)
            close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids))
            assert len(result.token_ids) == len(result.logprobs) == 40


# ------------------------------------------------------------------------------------------- interruptions and updates

LONG = SamplingParams(max_new_tokens=400, temperature=0.8, ignore_eos=True)


async def test_a_response_across_an_update(store: Store) -> None:
    """Responses are interrupted, then continued with new weights. Every token's logprob is that of the version that sampled it,
    given the whole prefix."""
    rng = random.Random(7)
    prompts = [make_prompt(rng, rng.randrange(1, 40)) for _ in range(24)]
    async with running(store, prefix_sharing=True) as engine:
        futures = [engine.submit(EngineRequest(f"r{i}", prompt, LONG)) for i, prompt in enumerate(prompts)]
        await until(engine, lambda: engine.stats().num_tokens > 24 * 6)
        await engine.pause()
        first = await asyncio.gather(*futures)
        aborted = [i for i, result in enumerate(first) if result.finish.type == "abort"]
        assert len(aborted) == 24
        again = [
            engine.submit(EngineRequest(f"r{i}", prompts[i] + first[i].token_ids, SamplingParams(max_new_tokens=20)))
            for i in aborted
        ]
        assert engine.stats().waiting == len(aborted)  # they wait for the end of the pause
        await engine.load_weights(store.path(V1), V1)
        await engine.resume()
        second = await asyncio.gather(*again)
    for i, result in enumerate(first):
        assert only_version(result) == str(V0)
        assert len(result.token_ids) == len(result.logprobs)
        close_to(result.logprobs, store.logprobs(V0, prompts[i], result.token_ids, 0.8))
    for i, result in zip(aborted, second, strict=True):
        assert only_version(result) == str(V1)
        close_to(result.logprobs, store.logprobs(V1, prompts[i] + first[i].token_ids, result.token_ids))


async def test_the_prefix_cache_does_not_outlive_an_update(store: Store) -> None:
    """A prompt of several pages is shared before the update, and computed again after it."""
    prompt = make_prompt(random.Random(8), 100)
    params = SamplingParams(max_new_tokens=6)
    async with running(store) as engine:
        for version in (V0, V1, V2):
            if version != V0:
                gone = engine.submit(EngineRequest("gone", prompt, LONG))  # its caller leaves just before the update
                await until(engine, lambda: engine.stats().num_tokens > 0)
                gone.cancel()
                await engine.load_weights(store.path(version), version)
            for i in range(3):
                result = await engine.submit(EngineRequest(str(i), prompt, params))
                close_to(result.logprobs, store.logprobs(version, prompt, result.token_ids))
        assert await engine.flush_cache()


def versions_prove_themselves(store: Store, prompt: list[int], result: Generated) -> None:
    """Assert that every token's logprob is that of its span's version, given the whole prefix, and that the logprobs of each span
    differ from the other version's."""
    assert [span.version for span in result.spans] == [str(V0), str(V1)]
    assert [span.start for span in result.spans] == [0, result.spans[0].end]
    for span, version in zip(result.spans, (V0, V1), strict=True):
        prefix = prompt + result.token_ids[: span.start]
        tokens = result.token_ids[span.start : span.end]
        close_to(result.logprobs[span.start : span.end], store.logprobs(version, prefix, tokens, 0.8))
        other = store.logprobs(V1 if version == V0 else V0, prefix, tokens, 0.8)
        assert np.abs(np.subtract(result.logprobs[span.start : span.end], other)).max() > 0.01
    assert result.spans[-1].end == len(result.token_ids) == len(result.logprobs)


async def test_retracted_requests_go_on_under_the_new_weights(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not notice the update. Requests that waited come after those that ran."""
    rng = random.Random(17)
    prompts = [make_prompt(rng, rng.randrange(1, 40)) for _ in range(12)]
    params = SamplingParams(max_new_tokens=60, temperature=0.8, ignore_eos=True)
    async with running(store, max_running_requests=8) as engine:
        futures = [engine.submit(EngineRequest(f"r{i}", prompt, params)) for i, prompt in enumerate(prompts)]
        await until(engine, lambda: engine.stats().num_tokens > 8 * 6)
        assert engine.stats().used_tokens > 8 * 6
        assert await engine.pause("retract") == 8
        assert (engine.stats().running, engine.stats().waiting, engine.stats().used_tokens) == (0, 12, 0)
        add_request, begun = engine.manager.add_request, []

        def note(input_ids: list[int], *arguments: Any, **options: Any) -> Any:
            begun.append(input_ids)
            return add_request(input_ids, *arguments, **options)

        monkeypatch.setattr(engine.manager, "add_request", note)
        await engine.load_weights(store.path(V1), V1)
        await engine.resume()
        results = await asyncio.gather(*futures)
        assert [ids[: len(prompt)] for ids, prompt in zip(begun, prompts, strict=True)] == prompts  # in this order
    assert engine.stats().num_aborted == 0
    for prompt, result in zip(prompts[:8], results, strict=False):
        assert result.finish.length == 60
        versions_prove_themselves(store, prompt, result)
    assert {only_version(result) for result in results[8:]} == {str(V1)}


async def test_a_retracted_request_that_waits_too_long_is_answered_with_what_it_has(store: Store) -> None:
    async with running(store, max_wait_s=0.0) as engine:
        future = engine.submit(EngineRequest("x", make_prompt(random.Random(18), 10), LONG))
        await until(engine, lambda: engine.stats().num_tokens > 3)
        await engine.pause("retract")
        assert engine.expire_waiting() == 1
        result = await future
        assert (result.finish.type, engine.stats().num_aborted) == ("abort", 1)
        assert len(result.token_ids) == len(result.logprobs) > 3
        await engine.resume()
        assert not engine.expire_waiting()


async def test_a_retracted_request_can_be_aborted_and_retracted_again(store: Store) -> None:
    prompt = make_prompt(random.Random(18), 10)
    async with running(store) as engine:
        future = engine.submit(EngineRequest("x", prompt, LONG))
        await until(engine, lambda: engine.stats().num_tokens > 3)
        await engine.pause("retract")
        before = engine.stats().num_tokens
        await engine.resume()
        await until(engine, lambda: engine.stats().num_tokens > before + 3)
        await engine.pause("retract")
        assert await engine.abort("x")
        result = await future
    assert result.finish.type == "abort"
    assert len(result.token_ids) > 6
    assert only_version(result) == str(V0)
    close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids, 0.8))


async def test_wait_lets_running_requests_finish(store: Store) -> None:
    prompt = make_prompt(random.Random(19), 10)
    params = SamplingParams(max_new_tokens=30, temperature=0.8, ignore_eos=True)
    async with running(store) as engine:
        first = engine.submit(EngineRequest("first", prompt, params))
        go_on = await until(engine, lambda: engine.stats().num_tokens > 3)
        pausing = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        go_on.set()
        second = engine.submit(EngineRequest("second", prompt, params))
        assert await pausing == 1
        assert first.done()
        await engine.load_weights(store.path(V1), V1)
        await engine.resume()
        assert only_version(await first) == str(V0)
        assert (await first).finish.length == 30
        assert only_version(await second) == str(V1)


async def test_wait_has_a_limit(store: Store) -> None:
    async with running(store, load_timeout_s=0.05) as engine:
        slow = engine.submit(EngineRequest("slow", make_prompt(random.Random(19), 10), LONG))
        go_on = await until(engine, lambda: engine.stats().running == 1)
        with pytest.raises(WeightsRefused, match="1 requests still run"):
            await asyncio.wait_for(engine.pause("wait"), LIMIT_S / 2)
        slow.cancel()
        go_on.set()


async def test_in_place_keeps_the_kv_cache(store: Store) -> None:
    """Versions and counts are exact. Logprobs after the update are approximate: new weights read old keys and values."""
    rng = random.Random(20)
    prompts = [make_prompt(rng, rng.randrange(20, 40)) for _ in range(8)]
    params = SamplingParams(max_new_tokens=60, temperature=0.8, ignore_eos=True)
    async with running(store, interrupt="in_place") as engine:
        futures = [engine.submit(EngineRequest(f"r{i}", prompt, params)) for i, prompt in enumerate(prompts)]
        await until(engine, lambda: engine.stats().num_tokens > 8 * 6)
        assert await engine.pause("in_place") == 8
        steps = engine.stats().num_steps
        late = engine.submit(EngineRequest("late", prompts[0], params))
        await engine.load_weights(store.path(V1), V1)
        assert engine.stats().num_steps == steps
        await engine.resume()
        results = await asyncio.gather(*futures)
        close_to((await late).logprobs, store.logprobs(V1, prompts[0], (await late).token_ids, 0.8))
    off = 0.0
    for prompt, result in zip(prompts, results, strict=True):
        old, new = result.spans
        assert (old.version, new.version, new.end) == (str(V0), str(V1), 60)
        close_to(result.logprobs[: old.end], store.logprobs(V0, prompt, result.token_ids[: old.end], 0.8))
        exact = store.logprobs(V1, prompt + result.token_ids[: old.end], result.token_ids[old.end :], 0.8)
        off = max(off, float(np.abs(np.subtract(result.logprobs[old.end :], exact)).max()))
    assert off > 0.001  # therefore no claim of exactness includes this mode
    async with running(store) as engine:
        with pytest.raises(RequestRefused, match=r"generation\.interrupt=in_place"):
            await engine.pause("in_place")
        with pytest.raises(RequestRefused, match=r"use one of abort, retract, wait \(in_place needs"):
            await engine.pause("gently")


async def test_an_update_without_a_pause(store: Store) -> None:
    """An update without a pause waits for running requests or, with abort_running, ends them. In both cases no reply mixes
    versions."""
    rng = random.Random(9)
    prompt = make_prompt(rng, 10)
    async with running(store, max_running_requests=2) as engine:
        futures = [
            engine.submit(EngineRequest(str(i), prompt, SamplingParams(max_new_tokens=30, ignore_eos=True)))
            for i in range(4)
        ]
        go_on = await until(engine, lambda: engine.stats().num_tokens > 0)  # two requests run
        updating = asyncio.ensure_future(engine.load_weights(store.path(V1), V1))
        await asyncio.sleep(0)
        go_on.set()
        assert await updating == 0
        results = await asyncio.gather(*futures)
        for result in results:
            assert result.finish.type != "abort"
            version = V0 if only_version(result) == str(V0) else V1
            close_to(result.logprobs, store.logprobs(version, prompt, result.token_ids))
        assert only_version(results[0]) == str(V0)
        assert only_version(results[3]) == str(V1)
        so_far = engine.stats().num_tokens
        future = engine.submit(EngineRequest("x", prompt, LONG))
        await until(engine, lambda: engine.stats().num_tokens > so_far)
        await engine.load_weights(store.path(V2), V2, abort_running=True)
        assert (await future).finish.type == "abort"
        assert only_version(await future) == str(V1)


async def test_abort(store: Store) -> None:
    prompt = make_prompt(random.Random(10), 10)
    async with running(store, max_running_requests=1) as engine:
        runs = engine.submit(EngineRequest("runs", prompt, LONG))
        waits = engine.submit(EngineRequest("waits", prompt, LONG))
        assert await engine.abort("waits")
        assert (await waits).token_ids == []
        assert (await waits).finish.type == "abort"
        await until(engine, lambda: engine.stats().num_tokens > 5)
        assert await engine.abort("runs")
        result = await runs
        assert len(result.token_ids) > 5
        close_to(result.logprobs, store.logprobs(V0, prompt, result.token_ids, 0.8))
        assert not await engine.abort("runs")
        again = engine.submit(EngineRequest("runs", prompt, LONG))  # an answered rid may come again
        assert await engine.abort_all() == 1
        await again


async def test_a_caller_that_leaves_frees_its_slot(store: Store) -> None:
    prompt = make_prompt(random.Random(11), 10)
    async with running(store, max_running_requests=1) as engine:
        first = engine.submit(EngineRequest("first", prompt, LONG))
        second = engine.submit(EngineRequest("second", prompt, SamplingParams(max_new_tokens=2)))
        first.cancel()
        assert (await asyncio.wait_for(second, LIMIT_S)).token_ids
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.num_aborted) == (0, 0, 1)


async def test_what_was_begun_goes_before_what_waits(store: Store) -> None:
    prompt, order, futures = make_prompt(random.Random(11), 10), [], []
    async with running(store, max_running_requests=1) as engine:
        for rid, first in (("runs", False), ("new", False), ("newer", False), ("resumed", True)):
            request = EngineRequest(rid, prompt, SamplingParams(max_new_tokens=4, ignore_eos=True), first)
            futures.append(engine.submit(request))
            futures[-1].add_done_callback(lambda _, rid=rid: order.append(rid))
        await asyncio.wait_for(asyncio.gather(*futures), LIMIT_S)
    assert order == ["runs", "resumed", "new", "newer"]


async def refused(awaitable: Awaitable[object], *words: str) -> None:
    with pytest.raises(WeightsRefused) as caught:
        await awaitable
    for word in words:
        assert word in str(caught.value)


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(store: Store, tmp_path: Path) -> None:
    good = store.tensors(V2)
    name = "model.layers.0.mlp.up_proj.weight"
    missing = {key: value for key, value in good.items() if key != name}
    extra = good | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}
    shaped = good | {name: torch.zeros(3, 64)}
    untied = good | {"lm_head.weight": torch.zeros_like(good["model.embed_tokens.weight"])}
    integer = good | {name: torch.zeros(256, 64, dtype=torch.int32)}
    prompt = make_prompt(random.Random(12), 20)
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    async with running(store, V1) as engine:
        before = await engine.submit(EngineRequest("a", prompt, params))
        await refused(engine.load_weights(store.write(V2, missing, "missing"), V2), name, "missing")
        await refused(engine.load_weights(store.write(V2, extra, "extra"), V2), "layers.7", "does not belong")
        await refused(engine.load_weights(store.write(V2, shaped, "shaped"), V2), name, "(3, 64)", "(256, 64)")
        await refused(engine.load_weights(store.write(V2, untied, "untied"), V2), "lm_head", "tied")
        await refused(engine.load_weights(store.write(V2, integer, "integer"), V2), name, "I32")
        await refused(engine.load_weights(tmp_path / "nowhere", V2), "nowhere")
        await refused(engine.load_weights(store.path(V1), V2), str(V1), str(V2))  # a folder of V1
        await refused(engine.load_weights(store.path(V0), V0), "older")
        torn = store.write(V2, good, "torn")
        file = torn / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        await refused(engine.load_weights(torn, V2), "model.safetensors", "bytes")
        after = await engine.submit(EngineRequest("a", prompt, params))
        assert after == before
        assert engine.stats().version == str(V1)
        tied_given_twice = good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()}
        await engine.load_weights(store.write(V2, tied_given_twice, "twice"), V2)
        result = await engine.submit(EngineRequest("a", prompt, params))
        close_to(result.logprobs, store.logprobs(V2, prompt, result.token_ids))


async def test_broken_numbers_fail_their_requests_only(store: Store) -> None:
    broken = {key: torch.full_like(value, torch.nan) for key, value in store.tensors(V1).items()}
    prompt = make_prompt(random.Random(13), 20)
    async with running(store) as engine:
        await engine.load_weights(store.write(V1, broken, "broken"), V1)
        with pytest.raises(EngineFailed, match="not finite"):
            await engine.submit(EngineRequest("a", prompt, SamplingParams(max_new_tokens=4)))
        await engine.load_weights(store.path(V2), V2)
        result = await engine.submit(EngineRequest("a", prompt, SamplingParams(max_new_tokens=4)))
        close_to(result.logprobs, store.logprobs(V2, prompt, result.token_ids))


# ------------------------------------------------------------------------------------------------- limits and refusals


async def test_bad_requests_are_refused(store: Store) -> None:
    async with running(store) as engine:
        longest = [1] * 500
        for ids, params, word in [
            ([], SamplingParams(), "empty"),
            ([1, 64], SamplingParams(), "64"),
            ([-1], SamplingParams(), "-1"),
            (longest, SamplingParams(max_new_tokens=13), "do not fit"),
            ([1], SamplingParams(max_new_tokens=0), "max_new_tokens"),
            ([1], SamplingParams(temperature=-1.0), "temperature"),
            ([1], SamplingParams(temperature=float("nan")), "temperature"),
            ([1], SamplingParams(top_p=0.0), "top_p"),
            ([1], SamplingParams(top_k=0), "top_k"),
        ]:
            with pytest.raises(RequestRefused, match=word):
                engine.submit(EngineRequest("a", ids, params))
        future = engine.submit(EngineRequest("a", longest, SamplingParams(max_new_tokens=12)))
        with pytest.raises(RequestRefused, match="in flight"):
            engine.submit(EngineRequest("a", [1], SamplingParams()))
        assert (await future).token_ids


async def test_nothing_is_generated_before_the_first_version(store: Store) -> None:
    async with running(store, None) as engine:
        assert engine.stats().version == ""
        with pytest.raises(EngineUnavailable, match="no weight version"):
            engine.submit(EngineRequest("a", [1], SamplingParams()))


async def test_it_sleeps_without_its_memory_and_wakes_with_the_same_tokens(store: Store) -> None:
    prompt, greedy = [1, 2, 3], SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    async with running(store, num_blocks=65536) as engine:
        before = await engine.submit(EngineRequest("a", prompt, greedy))
        running_one = engine.submit(EngineRequest("b", [1, 2], LONG))
        await until(engine, lambda: engine.stats().running > 0)
        awake = resident_bytes()
        await engine.sleep()
        assert (await running_one).finish.type == "abort"
        assert (
            awake - resident_bytes() > 0.9 * 65536 * 16 * 2 * 2 * 2 * 16 * 4
        )  # the cache: layers, keys and values, heads
        assert engine.failure is None
        assert engine.stats().version == ""
        with pytest.raises(EngineUnavailable, match="sleeps"):
            engine.submit(EngineRequest("c", prompt, greedy))
        await engine.sleep()  # no effect
        await engine.wake()
        assert engine.stats().paused
        await engine.load_weights(store.path(V0), V0)
        await engine.resume()
        after = await engine.submit(EngineRequest("d", prompt, greedy))
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


async def test_a_response_that_sleep_interrupts_goes_on_under_the_weights_of_the_next_turn(store: Store) -> None:
    prompt, greedy = [5, 2, 9], SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    async with running(store, max_running_requests=1) as engine:
        first = engine.submit(EngineRequest("first", prompt, greedy))
        await until(engine, lambda: engine.stats().num_tokens > 6)
        waiting = engine.submit(EngineRequest("waiting", prompt, greedy))
        await engine.sleep()
        begun = await first
        assert (begun.finish.type, only_version(begun)) == ("abort", str(V0))
        assert 6 < len(begun.token_ids) < 40
        with pytest.raises(
            EngineUnavailable, match="sleeps"
        ):  # so its client does not wait for an answer for a whole turn
            await waiting
        await engine.wake()
        await engine.load_weights(store.path(V1), V1)
        await engine.resume()
        rest = await engine.submit(EngineRequest("rest", prompt + begun.token_ids, greedy))
        assert only_version(rest) == str(V1)
        close_to(rest.logprobs, store.logprobs(V1, prompt + begun.token_ids, rest.token_ids))


async def test_an_engine_that_begins_asleep_starts_when_it_wakes(store: Store) -> None:
    engine = TransformersEngine(EngineArguments(str(store.model_path), CONFIG, asleep=True))
    assert engine.failure is None
    with pytest.raises(EngineUnavailable, match="sleeps"):
        await engine.load_weights(store.path(V0), V0)
    await engine.sleep()
    await engine.wake()
    await engine.load_weights(store.path(V0), V0)
    await engine.resume()
    assert (await engine.submit(EngineRequest("a", [1], SamplingParams(max_new_tokens=1)))).token_ids
    await engine.sleep()
    await engine.close()


async def test_the_queue_is_bounded_in_number_and_time(store: Store) -> None:
    async with running(store, max_queue=3, max_wait_s=0.0) as engine:
        await engine.pause()
        futures = [engine.submit(EngineRequest(str(i), [1], SamplingParams())) for i in range(3)]
        with pytest.raises(EngineUnavailable, match="full"):
            engine.submit(EngineRequest("3", [1], SamplingParams()))
        assert engine.expire_waiting() == 3
        for future in futures:
            with pytest.raises(EngineUnavailable, match="paused"):
                await future
        await engine.resume()
        assert (await engine.submit(EngineRequest("0", [1], SamplingParams(max_new_tokens=1)))).token_ids


async def test_close_answers_what_is_in_flight(store: Store) -> None:
    async with running(store, max_running_requests=1) as engine:
        futures = [engine.submit(EngineRequest(str(i), [1, 2], LONG)) for i in range(3)]
    for future in futures:
        with pytest.raises((EngineUnavailable, EngineFailed)):
            await future
    with pytest.raises(EngineUnavailable):
        engine.submit(EngineRequest("late", [1], LONG))


async def test_a_dead_generation_thread_is_noticed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(store) as engine:

        def fail(*args: object, **kwargs: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(engine.manager.batch_processor, "prepare_next_batch", fail)
        future = engine.submit(EngineRequest("a", [1], SamplingParams(max_new_tokens=5)))
        with pytest.raises(EngineFailed, match="no room"):
            await future
        await asyncio.to_thread(engine.manager.join, 0.0, 10.0)
        assert isinstance(engine.failure, MemoryError)
        with pytest.raises(EngineUnavailable, match="no room"):
            engine.submit(EngineRequest("b", [1], SamplingParams()))


def test_a_pass_waits_for_its_inputs(monkeypatch):
    """On a GPU, inputs are written on the thread's stream, and a pass runs on another one."""
    events: list[object] = []

    class Stream:
        device = "cuda:0"

        def wait_stream(self, stream: object) -> None:
            events.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of inputs on {device}")
    monkeypatch.setattr(embedded.ModelRunner, "compute_batch", lambda self, model, batch_data: events.append("pass"))
    runner = object.__new__(embedded._Runner)
    for stream in (Stream(), None):  # None: on a CPU
        runner.inputs_and_outputs = SimpleNamespace(compute_stream=stream)
        runner.compute_batch(None, {})
    assert events == ["stream of inputs on cuda:0", "pass", "pass"]
