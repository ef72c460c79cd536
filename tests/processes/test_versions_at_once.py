"""generation.interrupt=finish in the embedded engine: requests of several versions of an adapter in the same passes, each under the
version with which it began; and faults, each of which is noticed before a token is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ConfigError
from asyncrl.generation.adapter_versions import AdapterVersions, _Named
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.engine import (
    EngineArguments,
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    Generated,
    WeightsRefused,
)
from asyncrl.generation.states import Row
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.protocol.generation import SamplingParams, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import read_manifest
from tests.processes.test_adapter_versions import GENERATION, LORA, NUM
from tests.processes.test_adapter_versions import model_path as model_path
from tests.processes.test_adapter_versions import run as run
from tests.processes.test_delta_versions import Run

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks transformers for it

FINISH = replace(GENERATION, interrupt="finish", num_blocks=128)
PROMPT = list(range(1, 40))  # longer than two pages: with one version its pages are shared
LONG = 300  # tokens; some hundred passes, while loads take some dozen
Engines = Callable[..., AbstractAsyncContextManager[tuple[TransformersEngine, VerifiedLoads]]]


class Passes:
    """The numbers of versions in the passes of an engine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most, real = 0, AdapterVersions.of_pass

        def of_pass(versions: AdapterVersions, rows: Sequence[Row], num_tokens: int) -> Any:
            self.most = max(self.most, len({row.version for row in rows}))
            return real(versions, rows, num_tokens)

        patch.setattr(AdapterVersions, "of_pass", of_pass)


@asynccontextmanager
async def running(model_path: Path, run: Run, *, num_versions: int = NUM) -> AsyncIterator[Any]:
    """An engine that serves version 0, and its loads with the logprob check."""
    engine = TransformersEngine(EngineArguments(str(model_path), FINISH, lora=LORA, num_versions=num_versions))
    await engine.start()
    try:
        loads = VerifiedLoads(engine, tolerance=1e-3, limit_s=60.0, logger=logging.getLogger("test"))
        await loads.load(run.path(0), WeightVersion(1, 0))
        yield engine, loads
    finally:
        await engine.close()


async def begun(engine: TransformersEngine, rid: str, tokens: int = LONG) -> asyncio.Future[Generated]:
    """A request that has sampled some tokens."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    future, before = engine.submit(EngineRequest(rid, PROMPT, params)), engine.stats().num_tokens
    while engine.stats().num_tokens < before + 8:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return future


def expected_logprobs(model_path: Path, adapter: Path, response: Generated) -> np.ndarray:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), adapter)
    ids = torch.tensor([PROMPT + response.token_ids])
    with torch.no_grad():
        rows = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


async def test_requests_of_several_versions_share_passes_and_each_has_the_logprobs_of_its_own(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    async with running(model_path, run) as (engine, loads):
        futures = [await begun(engine, "0")]
        for number in range(1, NUM):
            assert await engine.pause("finish") == number
            await loads.load(run.path(number), WeightVersion(1, number))
            assert engine.stats().version == str(WeightVersion(1, number))
            futures.append(await begun(engine, str(number)))
        responses = await asyncio.gather(*futures)
    assert passes.most >= 3
    for number, response in enumerate(responses):
        assert response.finish.type == "length"
        assert response.spans == [VersionSpan(version=str(WeightVersion(1, number)), start=0, end=LONG)]
        expected = expected_logprobs(model_path, run.path(number), response)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
        other = expected_logprobs(model_path, run.path((number + 1) % NUM), response)
        assert np.abs(other - expected).max() > 1e-2  # the comparison could tell another version


async def test_the_requests_of_a_version_that_is_unloaded_come_back_with_their_tokens(
    run: Run, model_path: Path
) -> None:
    async with running(model_path, run, num_versions=2) as (engine, loads):
        futures = [await begun(engine, "0")]
        await loads.load(run.path(1), WeightVersion(1, 1))
        assert not futures[0].done()
        futures.append(await begun(engine, "1"))
        await loads.load(run.path(2), WeightVersion(1, 2))
        first = await futures[0]
        assert first.finish.type == "abort"
        assert first.spans == [VersionSpan(version=str(WeightVersion(1, 0)), start=0, end=len(first.token_ids))]
        np.testing.assert_allclose(first.logprobs, expected_logprobs(model_path, run.path(0), first), atol=1e-4)
        assert list(engine._versions._older) == [WeightVersion(1, 1)]
        assert (await futures[1]).finish.type == "length"


async def test_all_slots_may_be_taken_at_an_update(run: Run, model_path: Path) -> None:
    """The check needs no free slot, so an update does not wait for the end of a response."""
    async with running(model_path, run) as (engine, loads):
        futures = [await begun(engine, str(number)) for number in range(FINISH.max_running_requests)]
        await loads.load(run.path(1), WeightVersion(1, 1))
        assert not any(future.done() for future in futures)
        late = engine.submit(EngineRequest("late", PROMPT, SamplingParams(max_new_tokens=4, ignore_eos=True)))
        assert {span.version for span in (await late).spans} == {str(WeightVersion(1, 1))}
        await asyncio.gather(*futures)


async def test_versions_that_are_sent_from_memory_leave_running_requests_theirs(run: Run, model_path: Path) -> None:
    async with running(model_path, run) as (engine, loads):
        old = await begun(engine, "old")
        manifest = read_manifest(run.path(1))
        await engine.load_tensors(dict(run.expected[1]), WeightVersion(1, 1))
        await loads.verify(WeightVersion(1, 1), manifest.scored_text, manifest.fingerprint)
        assert not old.done()
        new = await begun(engine, "new", tokens=20)
        for number, response in enumerate([await old, await new]):
            assert {span.version for span in response.spans} == {str(WeightVersion(1, number))}
            expected = expected_logprobs(model_path, run.path(number), response)
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- faults


def not_delivered(patch: pytest.MonkeyPatch) -> None:
    real = AdapterVersions.install

    def install(self: AdapterVersions, new: Any, version: WeightVersion, *, keeps: bool) -> None:
        own = {name: parameter.data.clone() for name, parameter in self._parameters.items()}
        real(self, type(new)(own), version, keeps=keeps)

    patch.setattr(AdapterVersions, "install", install)


def half_delivered(patch: pytest.MonkeyPatch) -> None:
    real = AdapterVersions.install

    def install(self: AdapterVersions, new: Any, version: WeightVersion, *, keeps: bool) -> None:
        own = {name: parameter.data.clone() for name, parameter in self._parameters.items()}
        real(self, type(new)(own | dict(list(new.tensors.items())[::2])), version, keeps=keeps)

    patch.setattr(AdapterVersions, "install", install)


def under_the_old_name_too(patch: pytest.MonkeyPatch) -> None:
    real = AdapterVersions.install

    def install(self: AdapterVersions, new: Any, version: WeightVersion, *, keeps: bool) -> None:
        real(self, new, version, keeps=keeps)
        self._older = dict.fromkeys(self._older, self._of_layers())

    patch.setattr(AdapterVersions, "install", install)


def left_in_the_prefix_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Named, "__getitem__", list.__getitem__)


def all_rows_of_the_newest(patch: pytest.MonkeyPatch) -> None:
    real = AdapterVersions.of_pass
    patch.setattr(
        AdapterVersions,
        "of_pass",
        lambda self, rows, num: real(self, [replace(row, version=self._newest) for row in rows], num),
    )


def rows_of_the_next_request(patch: pytest.MonkeyPatch) -> None:
    real = AdapterVersions.of_pass
    patch.setattr(
        AdapterVersions,
        "of_pass",
        lambda self, rows, num: real(
            self,
            [replace(row, version=rows[(index + 1) % len(rows)].version) for index, row in enumerate(rows)],
            num,
        ),
    )


FAULTS = [
    not_delivered,
    half_delivered,
    under_the_old_name_too,
    left_in_the_prefix_cache,
    all_rows_of_the_newest,
    rows_of_the_next_request,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_fault_during_a_run_serves_no_token_of_the_new_version(
    run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    async with running(model_path, run) as (engine, loads):
        old = await begun(engine, "old")
        fault(monkeypatch)
        loading = asyncio.create_task(loads.load(run.path(1), WeightVersion(1, 1)))
        while engine.stats().version != str(WeightVersion(1, 1)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        new = engine.submit(EngineRequest("new", PROMPT, SamplingParams(max_new_tokens=2, ignore_eos=True)))
        answer = asyncio.create_task(loads.confirmed(new))
        with pytest.raises(WeightsRefused, match="logprobs"):
            await loading
        with pytest.raises(EngineUnavailable, match="failed the logprob check"):
            await answer
        assert engine.stats().version == ""
        assert (await old).finish.type == "abort"  # under the version with which it began


@pytest.mark.parametrize(
    "fault",
    [left_in_the_prefix_cache, all_rows_of_the_newest, rows_of_the_next_request],
    ids=lambda fault: fault.__name__,
)
async def test_a_fault_of_every_pass_is_found_at_the_start(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    engine = TransformersEngine(EngineArguments(str(model_path), FINISH, lora=LORA, num_versions=2))
    with pytest.raises(ConfigError, match="was decoded with another logprob than a forward pass"):
        await engine.start()
    await engine.close()


async def test_a_version_that_is_gone_serves_no_token(run: Run, model_path: Path) -> None:
    async with running(model_path, run) as (engine, loads):

        def lose() -> None:
            with engine._manager.pause():  # between two passes
                engine._versions._older.clear()

        old = await begun(engine, "old")
        await loads.load(run.path(1), WeightVersion(1, 1))
        await engine._in_control(lose)
        with pytest.raises(EngineFailed, match="weight version a0001-v00000000 is not loaded"):
            await old


async def test_a_layer_that_computes_other_tokens_than_the_pass_is_an_error(run: Run, model_path: Path) -> None:
    async with running(model_path, run) as (engine, loads):
        await loads.load(run.path(1), WeightVersion(1, 1))
        layer = engine._model.model.layers[0].mlp.up_proj
        rows = [Row("a", 0, 3, WeightVersion(1, 0)), Row("b", 0, 2, WeightVersion(1, 1))]
        with engine._versions.of_pass(rows, 5), torch.no_grad():
            layer(torch.zeros(1, 5, layer.in_features))
            with pytest.raises(ValueError, match="computes 2 of the 5 tokens of a pass"):
                layer(torch.zeros(1, 2, layer.in_features))
