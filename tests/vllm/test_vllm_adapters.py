"""Versions that are adapters (train.lora), with a real vLLM server: each token is of the adapter that it names, and a fault on the
way of an adapter is noticed before a token leaves the server."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_vllm_engine import attached
from torch import Tensor

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.engine import EngineFailed, EngineRequest, EngineUnavailable, WeightsRefused
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.vllm import AdapterClient, VLLMClient, VLLMEngine, own_server
from asyncrl.protocol.generation import SamplingParams
from asyncrl.weights.adapter import TENSORS
from tests.support.adapter_store import AdapterStore
from tests.support.real_servers import ServerInThread
from tests.support.server_load import close_to, make_prompt, respond, within
from tests.support.weight_store import V0, V1, V2, V3

LONG = SamplingParams(max_new_tokens=600, ignore_eos=True)  # still runs when a delayed test acts
LONGER = SamplingParams(max_new_tokens=1000, ignore_eos=True)  # outlasts three loads

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks transformers for it


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> AdapterStore:
    """With tied embeddings: vLLM loads the base once, so their packed copy stays right (test_vllm_bites.py)."""
    return AdapterStore(
        tmp_path_factory.mktemp("adapters"), hidden_size=128, tied=True, max_positions=4096, num_layers=12
    )


@pytest.fixture(scope="module")
def server(
    vllm_config: GenerationConfig, store: AdapterStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerInThread]:
    log = tmp_path_factory.mktemp("vllm") / "adapters.log"
    started = ServerInThread(
        lambda: own_server(
            vllm_config, str(store.model_path), tensor=1, seed=1, log=log, lora=store.lora, num_versions=3
        ),
        VLLMClient,
    )
    yield started
    started.stop()


def checked(engine: VLLMEngine) -> VerifiedLoads:
    return VerifiedLoads(engine, tolerance=1e-3, limit_s=60.0, logger=logging.getLogger("test"))


async def adapters_of(engine: VLLMEngine) -> list[str]:
    return [model.id for model in (await engine._client._models(10.0))[1:]]


async def test_each_token_is_of_the_adapter_that_it_names(
    server: ServerInThread, store: AdapterStore, vllm_config: GenerationConfig, tmp_path: Path
) -> None:
    """Versions replace each other while requests run and others wait. peft computes their logprobs."""
    rng = random.Random(3)
    async with attached(server, store, vllm_config, max_running_requests=8) as (engine, counter):
        loads = checked(engine)
        prompts = [make_prompt(rng, rng.choice([3, 20, 300])) for _ in range(10)]
        asked = [asyncio.ensure_future(respond(engine, f"r{i}", prompt, LONG)) for i, prompt in enumerate(prompts)]
        for mode, version in (("abort", V1), ("retract", V2), ("retract", V3)):
            await counter.reaches(counter.count + 300)
            await engine.pause(mode)
            await within(loads.load(store.path(version), version))
            assert await adapters_of(engine) == [str(version)]
        found = [await within(future) for future in asked]
        named = [store.assert_versions_are_exact(*pair) for pair in zip(prompts, found, strict=True)]
        assert set().union(*named) == {str(version) for version in (V0, V1, V2, V3)}

        # A version may be loaded again, also from a folder that is then removed
        await engine.pause()
        shutil.copytree(store.path(V3), tmp_path / str(V3))
        await within(loads.load(tmp_path / str(V3), V3))
        shutil.rmtree(tmp_path / str(V3))
        assert await adapters_of(engine) == [str(V3)]
        text = make_prompt(rng, 50)
        close_to(await within(engine.score(text)), [0.0, *store.logprobs(V3, text[:1], text[1:])])

        # An adapter that is gone is not taken for another one
        with pytest.raises(ServerError, match=f"The model `{V2}` does not exist"):
            await engine.score(text, V2)


@pytest.mark.release
async def test_requests_finish_under_the_adapter_with_which_they_began(
    server: ServerInThread, store: AdapterStore, vllm_config: GenerationConfig
) -> None:
    """Requests of three versions run at once. A load of a fourth one ends those of the oldest, with their tokens so far."""
    changes = {"interrupt": "finish", "max_running_requests": 6}
    async with attached(server, store, vllm_config, num_versions=3, **changes) as (engine, counter):
        loads, asked = checked(engine), []
        await within(loads.load(store.path(V0), V0))
        for version in (V0, V1, V2, V3):
            if version != V0:
                assert await engine.pause("finish") == len(asked)
                await within(loads.load(store.path(version), version))
            for number in range(2):
                prompt = [1, 2, 3 + number]
                asked.append((version, prompt, engine.submit(EngineRequest(f"{version}-{number}", prompt, LONGER))))
            if version == V2:
                await counter.reaches(counter.count + 600)
                assert engine.older_versions_in_use == [V0, V1]
        assert await adapters_of(engine) == [str(version) for version in (V1, V2, V3)]
        for version, prompt, future in asked:
            result = await within(future)
            assert (result.finish.type == "abort") == (version == V0)
            assert [span.version for span in result.spans] == [str(version)]
            store.assert_versions_are_exact(prompt, result)


# ------------------------------------------------------------------------------------------------------------ planted faults


def not_loaded(patch: pytest.MonkeyPatch, _: Path) -> None:
    async def nothing(self: AdapterClient, path: str, version: str, *, limit_s: float) -> None: ...

    async def says_so(self: AdapterClient, *, limit_s: float) -> str:
        return str(V1)

    patch.setattr(AdapterClient, "load", nothing)
    patch.setattr(AdapterClient, "served_version", says_so)


def not_delivered(patch: pytest.MonkeyPatch, _: Path) -> None:
    """The new name, with the tensors of the old version."""
    real = AdapterClient.load

    async def old(self: AdapterClient, path: str, version: str, *, limit_s: float) -> None:
        await real(self, path.replace(str(V1), str(V0)), version, limit_s=limit_s)

    patch.setattr(AdapterClient, "load", old)


def old_name(patch: pytest.MonkeyPatch, _: Path) -> None:
    """The new adapter is loaded, and requests name the old one, which stays."""

    async def stays(self: AdapterClient, version: str, *, limit_s: float) -> None: ...

    patch.setattr(AdapterClient, "unload", stays)
    patch.setattr(AdapterClient, "_model", lambda self, version: {"model": str(V0)})


def other_files(
    patch: pytest.MonkeyPatch, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    real = AdapterClient.load

    async def changed(self: AdapterClient, path: str, version: str, *, limit_s: float) -> None:
        shutil.copytree(path, folder / version)
        save_file(change(load_file(folder / version / TENSORS)), folder / version / TENSORS)
        await real(self, str(folder / version), version, limit_s=limit_s)

    patch.setattr(AdapterClient, "load", changed)


def half(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """vLLM gets half of the layers."""
    other_files(patch, folder, lambda tensors: {name: one for name, one in tensors.items() if ".layers.1." not in name})


def unknown_names(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """vLLM uses none of the tensors, and says nothing."""
    other_files(
        patch, folder, lambda tensors: {name.replace(".layers.", ".blocks."): one for name, one in tensors.items()}
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (not_loaded, f"The model `{V1}` does not exist"),
        (not_delivered, f"bit-identical to those of {V0}"),
        (old_name, f"reports tokens of version .{V0}"),
        (half, "logprobs of the check's text are not the trainer's"),
        (unknown_names, "logprobs of the check's text are not the trainer's"),
    ],
)
async def test_a_fault_on_the_way_of_an_adapter_is_noticed_before_a_token_leaves(
    server: ServerInThread,
    store: AdapterStore,
    vllm_config: GenerationConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Callable[[pytest.MonkeyPatch, Path], None],
    message: str,
) -> None:
    async with attached(server, store, vllm_config) as (engine, _):
        loads = checked(engine)
        await engine.pause()
        await within(loads.load(store.path(V0), V0))
        await engine.pause()
        waiting = asyncio.ensure_future(loads.confirmed(engine.submit(EngineRequest("r", [1, 2, 3], LONG))))
        fault(monkeypatch, tmp_path)
        with pytest.raises(WeightsRefused, match=message):
            await within(loads.load(store.path(V1), V1))
        assert engine.stats().version == ""
    with pytest.raises(EngineUnavailable):
        await within(waiting)


def unloaded_too_early(patch: pytest.MonkeyPatch, _: Path) -> None:
    """The older adapter is gone while a request runs under it."""
    real = AdapterClient.load

    async def load(self: AdapterClient, path: str, version: str, *, limit_s: float) -> None:
        await real(self, path, version, limit_s=limit_s)
        await self.unload(str(V0), limit_s=limit_s)

    patch.setattr(AdapterClient, "load", load)


def new_name(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Requests of the older adapter name the new one."""
    patch.setattr(AdapterClient, "_model", lambda self, version: {"model": str(V1)})


def under_the_old_name_too(patch: pytest.MonkeyPatch, _: Path) -> None:
    real = AdapterClient.load

    async def load(self: AdapterClient, path: str, version: str, *, limit_s: float) -> None:
        await real(self, path, str(V0), limit_s=limit_s)
        await real(self, path, version, limit_s=limit_s)

    patch.setattr(AdapterClient, "load", load)


@pytest.mark.release
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (unloaded_too_early, f"The model `{V0}` does not exist"),
        (new_name, f"reports tokens of version .{V1}"),
        (under_the_old_name_too, f"weights {V0} were loaded, but the server's logprobs of the check's text are not"),
    ],
)
async def test_a_fault_beside_a_request_of_an_older_adapter_is_noticed(
    server: ServerInThread,
    store: AdapterStore,
    vllm_config: GenerationConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Callable[[pytest.MonkeyPatch, Path], None],
    message: str,
) -> None:
    async with attached(server, store, vllm_config, num_versions=3, interrupt="finish") as (engine, counter):
        loads = checked(engine)
        await within(loads.load(store.path(V0), V0))
        old = engine.submit(EngineRequest("old", [1, 2, 3], LONGER))
        await counter.reaches(counter.count + 20)
        fault(monkeypatch, tmp_path)
        with pytest.raises(WeightsRefused, match=message):
            await within(loads.load(store.path(V1), V1))
        assert engine.stats().version == ""
        if fault is unloaded_too_early:  # the engine has failed
            with pytest.raises(EngineFailed, match=message):
                await within(old)
            return
        result = await within(old)
        assert result.finish.type == "abort"
        store.assert_versions_are_exact([1, 2, 3], result)
