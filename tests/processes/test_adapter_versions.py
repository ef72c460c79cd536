"""Versions of an adapter: written by a real model worker, loaded by the embedded engine, with the logprob check; and faults on the
way, each of which the server notices before it samples a token."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.config.schema import (
    CriticConfig,
    GenerationConfig,
    LoraConfig,
    NameResolveConfig,
    OptimizerConfig,
    WeightsConfig,
)
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.placed_models import with_adapters
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.engine import EngineArguments, EngineRequest, WeightsRefused
from asyncrl.generation.transformers import LiveTensors, TransformersEngine
from asyncrl.protocol.calls import ClearData, CommitWeights, SaveModel
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.adapter import ABOUT, TENSORS
from asyncrl.weights.versions import commit_version, list_versions, prune_versions, read_manifest, role_dir, write_part
from tests.processes.test_delta_versions import Run
from tests.processes.test_model_worker import TRAIN, worker_config, worker_here

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks transformers for it

LORA = LoraConfig(rank=4, alpha=8.0, merge=True)
OPTIMIZER = OptimizerConfig(lr=2e-2, warmup_steps=0)
PPO = replace(TRAIN.ppo, advantage_norm="batch")
WITH_LORA = replace(TRAIN, lora=LORA, optimizer=OPTIMIZER, critic=CriticConfig(optimizer=OPTIMIZER), ppo=PPO)
GENERATION = GenerationConfig(max_running_requests=4, max_batch_tokens=64, num_blocks=16, page_size=16)
NUM = 4
IDS = list(range(1, 30))


class TrainedRun(Run):
    values: torch.Tensor  # of IDS, by the critic at the end


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("adapters") / "model"
    make_tiny_model(path, hidden_size=32, intermediate_size=64)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> TrainedRun:
    return asyncio.run(trained(tmp_path_factory.mktemp("run"), model_path))


async def trained(folder: Path, model_path: Path) -> TrainedRun:
    """Four versions of an adapter, and the final models."""
    config = worker_config(NameResolveConfig(endpoints=[f"memory://{folder}"]), folder, model_path, train=WITH_LORA)
    models = with_adapters(config.models, LORA)
    config = replace(config, models=models, weights=WeightsConfig(fsync=False, verify_logprobs=True))
    async with worker_here(config) as (worker, world):
        made = TrainedRun(folder, worker, world, WITH_LORA)
        for number in range(NUM):
            if number:
                await made.step(number)
            await made.write(number)
            made.remember()
        of_actor, of_ref = (worker.calls.engines[name].named_parameters() for name in ("actor", "ref"))
        assert all(of_ref[name] is tensor for name, tensor in of_actor.items())  # no second copy
        for role, folder in (("actor", "checkpoints/final"), ("critic", "checkpoints/final-critic")):
            (reply,) = await world.call(SaveModel(role=role, folder=folder))
            await world.call(CommitWeights(role=role, weight_version="", folder=folder, files=reply.files))
        sample = SequenceSample.from_groups(["a"], [{"packed_input_ids": [IDS]}])
        values = worker.calls.engines["critic"].values(sample)
        assert values is not None
        made.values = torch.from_numpy(values)
        return made


@pytest.fixture
async def start(model_path: Path) -> AsyncIterator[Callable[[], Any]]:
    """Starts an engine, and its loads with the logprob check."""
    started: list[TransformersEngine] = []

    async def make() -> tuple[TransformersEngine, VerifiedLoads]:
        started.append(TransformersEngine(EngineArguments(str(model_path), GENERATION, lora=LORA)))
        await started[-1].start()
        await started[-1].pause()
        loads = VerifiedLoads(started[-1], tolerance=1e-3, limit_s=30.0, logger=logging.getLogger("test"))
        return started[-1], loads

    yield make
    for one in started:
        await one.close()


async def test_a_version_is_an_adapter_that_the_engine_and_peft_load(run: Run, model_path: Path, start: Any) -> None:
    engine, loads = await start()
    for number in range(NUM):
        path, manifest = run.path(number), read_manifest(run.path(number))
        assert manifest.kind == "adapter"
        assert set(manifest.files) == {TENSORS, ABOUT}
        tensors = load_file(path / TENSORS)
        assert tensors.keys() == run.expected[number].keys()
        assert all(torch.equal(tensors[name], run.expected[number][name]) for name in tensors)
        await loads.load(path, WeightVersion(1, number))
        assert engine.stats().version == str(WeightVersion(1, number))
        live = engine._model.state_dict()
        assert torch.equal(
            live["model.layers.0.mlp.up_proj.lora_B"],
            tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"],
        )
    scored = (await engine.score(IDS))[1:]
    for model in (
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), run.path(NUM - 1)),
        AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / "final-merged"),
    ):
        with torch.no_grad():
            log = torch.log_softmax(model(torch.tensor([IDS])).logits[0, :-1], -1)
        np.testing.assert_allclose(scored, log.gather(1, torch.tensor(IDS)[1:, None])[:, 0], atol=1e-4)
    final = load_file(run.run_dir / "checkpoints" / "final" / TENSORS)
    assert all(torch.equal(tensor, run.expected[-1][name]) for name, tensor in final.items())


async def test_an_adapter_that_was_sent_computes_as_one_on_disk(run: TrainedRun, start: Any) -> None:
    (engine, loads), (other, other_loads) = await start(), await start()
    await other_loads.load(run.path(2), WeightVersion(1, 2))
    expected = await other.score(IDS)
    await loads.load(run.path(1), WeightVersion(1, 1))
    assert await engine.score(IDS) != expected
    await engine.pause()
    with pytest.raises(WeightsRefused, match="is missing"):
        await engine.load_tensors(half(run.expected[2]), WeightVersion(1, 2))
    await engine.load_tensors(dict(run.expected[2]), WeightVersion(1, 2))
    assert await engine.score(IDS) == expected


def test_a_critic_is_saved_as_an_adapter_with_its_output_layer_and_merged(run: TrainedRun, model_path: Path) -> None:
    base = AutoModelForTokenClassification.from_pretrained(model_path, num_labels=1)
    folder = run.run_dir / "checkpoints" / "final-critic"
    for model in (
        peft.PeftModel.from_pretrained(base, folder),
        AutoModelForTokenClassification.from_pretrained(folder.with_name("final-critic-merged")),
    ):
        with torch.no_grad():
            torch.testing.assert_close(model(torch.tensor([IDS])).logits[0, :, 0], run.values, rtol=0, atol=1e-4)
    assert run.values.abs().max() > 1e-2


def test_a_version_has_hardly_more_bytes_than_its_matrices(run: Run) -> None:
    path = run.path(NUM - 1)
    matrices = sum(tensor.nbytes for tensor in load_file(path / TENSORS).values())
    header = (path / TENSORS).stat().st_size - matrices
    names = len(read_manifest(path).files) and len(load_file(path / TENSORS))
    # What does not grow with the matrices: for each of them 150 bytes of the header at most, and the config
    assert header <= 150 * names + 100
    assert (path / ABOUT).stat().st_size <= 3_000


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_versions", [1, 4])
async def test_fifty_versions_need_no_more_memory_than_ten(tmp_path: Path, num_versions: int) -> None:
    """Trainer and server are in this process, and requests run at each update. The server keeps one version or, with
    interrupt=finish, four. A version is at most 1.05 times as large as the matrices."""
    lora, keep = replace(LORA, rank=64), 5
    train = replace(WITH_LORA, lora=lora)
    make_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512)
    config = worker_config(
        NameResolveConfig(endpoints=[f"memory://{tmp_path}"]), tmp_path, tmp_path / "model", train=train
    )
    weights = WeightsConfig(fsync=False, verify_logprobs=True)
    config = replace(config, models=with_adapters(config.models, lora), weights=weights)
    mode = "finish" if num_versions > 1 else "abort"
    generation = replace(GENERATION, interrupt=mode, num_blocks=128)
    arguments = EngineArguments(str(tmp_path / "model"), generation, lora=lora, num_versions=num_versions)
    engine, used, asked = TransformersEngine(arguments), [], []
    loads = VerifiedLoads(engine, tolerance=1e-3, limit_s=30.0, logger=logging.getLogger("test"))
    await engine.start()
    async with worker_here(config) as (worker, world):
        made = Run(tmp_path, worker, world, train)
        for number in range(50):
            if number:
                await made.step(number)
                await world.call(ClearData(ids=[f"t{number}"]))  # as the master does after each step
            await made.write(number)
            await engine.pause(mode)
            await loads.load(made.path(number), WeightVersion(1, number))
            await engine.resume()
            prune_versions(role_dir(tmp_path, "actor"), keep=keep, in_use=[])
            params = SamplingParams(max_new_tokens=200, ignore_eos=True)
            asked.append(engine.submit(EngineRequest(str(number), IDS, params)))
            used.append(psutil.Process().memory_info().rss)
        responses = await asyncio.gather(*asked)
        await engine.close()
    named = {span.version for response in responses for span in response.spans}
    assert str(WeightVersion(1, 49)) in named
    assert len(named) > 40
    assert len(list_versions(role_dir(tmp_path, "actor"))) == keep
    matrices = sum(tensor.nbytes for tensor in load_file(made.path(49) / TENSORS).values())
    assert sum(file.stat().st_size for file in made.path(49).iterdir()) <= 1.05 * matrices
    assert max(used[40:]) - max(used[:10]) < 10 * matrices  # all versions together are 40 times as large


def not_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveTensors, "_copy", lambda *_, **__: None)


def half_copied(patch: pytest.MonkeyPatch) -> None:
    real = LiveTensors._copy
    patch.setattr(LiveTensors, "_copy", lambda self, tensor_of, given: real(self, tensor_of, set(sorted(given)[::2])))


def left_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransformersEngine, "_empty_cache", lambda self: None)


@pytest.mark.parametrize("fault", [not_delivered, half_copied, left_in_the_cache])
async def test_an_adapter_that_does_not_reach_the_engine_serves_no_token(
    run: Run, start: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    engine, loads = await start()
    await loads.load(run.path(1), WeightVersion(1, 1))
    await engine.pause()
    fault(monkeypatch)
    with pytest.raises(WeightsRefused, match="logprobs"):
        await loads.load(run.path(2), WeightVersion(1, 2))
    assert engine.stats().version == ""


async def test_an_adapter_under_another_versions_name_is_refused(run: Run, start: Any, tmp_path: Path) -> None:
    engine, loads = await start()
    await loads.load(run.path(1), WeightVersion(1, 1))
    await engine.pause()
    with pytest.raises(WeightsRefused, match=r"holds a0001-v00000001, expected a0001-v00000002"):
        await loads.load(run.path(1), WeightVersion(1, 2))
    old = tmp_path / "a0001-v00000002"  # the old tensors with the new manifest
    shutil.copytree(run.path(2), old)
    shutil.copy(run.path(1) / TENSORS, old / TENSORS)
    with pytest.raises(WeightsRefused, match="has another checksum than the manifest"):
        await loads.load(old, WeightVersion(1, 2))
    assert engine.stats().version == str(WeightVersion(1, 1))


def half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(tensors.items())[::2])


def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor[:2] if "lora_A" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "alpha", "message"),
    [(half, 8.0, "is missing"), (cut, 8.0, "has shape"), (dict, 9.0, "lora_alpha is 8, but train.lora.alpha is 9")],
)
async def test_a_version_that_is_no_adapter_of_this_run_is_refused(
    run: Run, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, alpha: float, message: str
) -> None:
    engine, loads = await start()
    await loads.load(run.path(1), WeightVersion(1, 1))
    await engine.pause()
    engine._adapters.lora = replace(LORA, alpha=alpha)
    path = tmp_path / "a0001-v00000002"
    files = write_part(path, change(load_file(run.path(2) / TENSORS)).items(), fsync=False)
    sides = {ABOUT: (run.path(2) / ABOUT).read_bytes()}
    commit_version(path, files, sides=sides, version=WeightVersion(1, 2), fsync=False)
    with pytest.raises(WeightsRefused, match=message):
        await loads.load(path, WeightVersion(1, 2))
    assert engine.stats().version == str(WeightVersion(1, 1))
