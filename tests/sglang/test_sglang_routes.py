"""Routes from a real SGLang server: the experts that it returns are those of the trainer.

SGLang pins the memory of the experts for CUDA, which a CPU does not have. A stand-in leaves that out. All else is SGLang's own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.data.routes import ROUTES, Routes
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.sglang import SGLangEngine
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_process import AttachedServer, own_server
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.versions import version_dir, write_version
from tests.support.families import make_family
from tests.support.real_servers import START_LIMIT_S, ServerInThread
from tests.support.routed import difference, experts_of, sample_of, shares

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

_NO_PINNING = """\
import importlib.abc, importlib.machinery, sys
class WithoutPinning(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.mem_cache.pool_host.common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            module._cuda_host_register = lambda *_: None
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, WithoutPinning())
"""
V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
PROMPTS = [[1 + number, *range(2, 2 + 7 * number)] for number in range(8)]
TRAIN = TrainConfig(
    optimizer=OptimizerConfig(lr=3e-2, warmup_steps=0), routes="replay", max_tokens_per_mb=4096, share_prefix="off"
)


@pytest.fixture(scope="module")
def python(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter of SGLang's environment, with the stand-in."""
    folder = tmp_path_factory.mktemp("without_pinning")
    (folder / "sitecustomize.py").write_text(_NO_PINNING)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sglang_python} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("experts") / "model"
    make_family(path, "qwen3_moe", num_hidden_layers=3, num_experts=16)
    return path


@pytest.fixture(scope="module")
def server(
    python: str, model_path: Path, sglang_config: GenerationConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerInThread]:
    config = dataclasses.replace(sglang_config, python=python)
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    made = ServerInThread(
        lambda: own_server(config, str(model_path), tensor=1, seed=1, log=log, returns_routes=True), SGLangClient
    )
    yield made
    made.stop()


def trainer_of(path: Path, train: TrainConfig = TRAIN) -> TrainEngine:
    return TrainEngine(ModelConfig("actor", str(path), "d1", [0], trainable=True, optimizer=train.optimizer), train)


async def test_the_experts_are_those_of_the_trainer_also_after_an_update(
    server: ServerInThread, model_path: Path, sglang_config: GenerationConfig, tmp_path: Path
) -> None:
    """New weights come in the middle of all responses, which are retracted. A token keeps its first experts."""
    trainer = trainer_of(model_path)
    versions = {}
    for version in (V0, V1):
        versions[version] = version_dir(tmp_path, "actor", version)
        write_version(
            versions[version], take_share(trainer).items(), source_dir=model_path, version=version, fsync=False
        )
        with torch.no_grad():
            for parameter in trainer.named_parameters().values():
                parameter += 0.02 * torch.randn_like(parameter)
    sampled = 0

    def count(tokens: int, _: str) -> None:
        nonlocal sampled
        sampled += tokens

    engine = SGLangEngine(
        EngineArguments(str(model_path), sglang_config, returns_routes=True, on_tokens=count),
        AttachedServer(server.process.url, server.process.api_key),
    )
    await engine.start()
    try:
        await engine.load_weights(versions[V0], V0)
        params = SamplingParams(max_new_tokens=150, ignore_eos=True)
        early = [engine.submit(EngineRequest(f"a{i}", prompt, params)) for i, prompt in enumerate(PROMPTS)]
        whole = await asyncio.wait_for(asyncio.gather(*early), 120)
        sampled = 0
        late = [engine.submit(EngineRequest(f"b{i}", prompt, params)) for i, prompt in enumerate(PROMPTS)]
        while sampled < 40 * len(PROMPTS):  # noqa: ASYNC110 - pieces have come in
            await asyncio.sleep(0)
        await engine.pause("retract")
        await engine.load_weights(versions[V1], V1)
        await engine.resume()
        updated = await asyncio.wait_for(asyncio.gather(*late), 120)
    finally:
        await engine.close()

    compared = trainer_of(model_path, dataclasses.replace(TRAIN, routes="compare"))
    sample = sample_of(PROMPTS, whole)
    share, of_tokens = shares(compared, sample)
    print(f"{share:.2%} of choices, {of_tokens:.2%} of tokens differ; logprobs {difference(compared, sample):.2g}")
    assert share < 1e-3  # both compute in float32: a choice differs only if two experts are as good
    replayed = trainer_of(model_path)
    assert replayed.routes is not None
    rows = np.concatenate([Routes.decode(run).rows for run in sample.slices(ROUTES)[0]])
    known = rows[:, 0] != replayed.routes.layout.unknown
    assert (experts_of(replayed, sample)[known] == rows[known]).all()
    assert difference(replayed, sample) < 1e-5

    both = [(prompt, result) for prompt, result in zip(PROMPTS, updated, strict=True) if len(result.spans) == 2]
    assert both
    old, new = (trainer_of(folder, dataclasses.replace(TRAIN, routes="off")) for folder in versions.values())
    for prompt, result in both:
        assert result.routes is not None
        assert len(result.routes) == len(prompt) + len(result.token_ids) - 1
        text = sample_of([prompt], [dataclasses.replace(result, routes=None)])
        first = len(prompt) + result.spans[0].end - 1  # the token here was the first that the new weights sampled
        by_old, by_new = experts_of(old, text), experts_of(new, text)
        found = result.routes.rows
        assert (np.sort(found[:first], -1) == np.sort(by_old[:first], -1)).mean() > 0.99
        assert (np.sort(found[first:], -1) == np.sort(by_new[first : len(found)], -1)).mean() > 0.99
        assert (np.sort(by_old, -1) == np.sort(by_new, -1)).mean() < 0.95


def test_a_run_replays_the_experts_of_sglang(python: str, model_path: Path, tmp_path: Path) -> None:
    with launch(
        make_tiny_run(tmp_path / "tiny", num_prompts=400),
        "allocation=sglang.d1+d1",
        f"generation.python={python}",
        f"model_path={model_path}",
        f"generation.load_timeout_s={START_LIMIT_S}",
        f"runtime.start_timeout_s={START_LIMIT_S}",
        "manager.max_head_offpolicyness=0",
        "train.routes=replay",
        "train.max_steps=3",
        f"fileroot={tmp_path}",
    ) as run:
        assert run.wait(2 * START_LIMIT_S) == 0, run.output()
        steps = train_steps(run.run_dir)
        assert len(steps) == 3
        for step in steps:
            assert abs(step["actor/behav_approx_kl"]) < 1e-5
            assert step["actor/other_experts_token_share"] < 1e-2
        assert_nothing_left(run.run_dir)
