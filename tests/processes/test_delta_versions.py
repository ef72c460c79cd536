"""weights.full_every with a real model worker and real engines: deltas end in the same weights as full versions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.schema import GenerationConfig, NameResolveConfig, OptimizerConfig, TrainConfig, WeightsConfig
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.generation import transformers as engine_module
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.engine import EngineArguments, WeightsRefused
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.export import take_share
from asyncrl.protocol.calls import CommitWeights, ExecuteMFC, WriteWeights
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import read_manifest
from asyncrl.weights.whole import whole
from tests.processes.test_model_worker import TRAIN, Outside, SeenWorker, trajectory, worker_config, worker_here

NUM = 6
FULL_EVERY = 4
BF16 = replace(TRAIN, dtype="bfloat16", optimizer=OptimizerConfig(lr=2e-6, warmup_steps=0))
GENERATION = GenerationConfig(
    max_running_requests=4, max_batch_tokens=64, num_blocks=16, page_size=16, dtype="bfloat16"
)


class Run:
    """The actor after each of NUM - 1 steps, in its memory and on disk. The last version is written a second time."""

    def __init__(self, run_dir: Path, worker: SeenWorker, world: Outside, train: TrainConfig = BF16) -> None:
        self.run_dir, self._worker, self._world, self._train = run_dir, worker, world, train
        self.expected: list[dict[str, Tensor]] = []

    def path(self, number: int) -> Path:
        return self.run_dir / "weights" / "actor" / str(WeightVersion(1, number))

    async def write(self, number: int, *, rewrite: bool = False) -> None:
        version, folder = str(WeightVersion(1, number)), f"weights/actor/{WeightVersion(1, number)}"
        body = WriteWeights(role="actor", weight_version=version, folder=folder, rewrite=rewrite)
        (reply,) = await self._world.call(body)
        commit = CommitWeights(role="actor", weight_version=version, folder=folder, files=reply.files, rewrite=rewrite)
        await self._world.call(commit)

    async def step(self, number: int) -> None:
        await self._world.push(*trajectory(f"t{number}"))
        for mfc in build_dataflow(self._train).order:
            await self._world.call(ExecuteMFC(mfc=mfc, version=number, ids=[f"t{number}"], parts=[[f"t{number}"]]))

    def remember(self) -> None:
        self.expected.append(take_share(self._worker.calls.engines["actor"]))


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64)
    return tmp_path / "model"


@pytest.fixture
async def start(model_path: Path) -> AsyncIterator[Callable[[], Any]]:
    """Starts an engine, and its loads with the logprob check."""
    started: list[TransformersEngine] = []

    async def make() -> tuple[TransformersEngine, VerifiedLoads]:
        started.append(TransformersEngine(EngineArguments(str(model_path), GENERATION)))
        await started[-1].start()
        await started[-1].pause()
        logger = logging.getLogger("test")
        return started[-1], VerifiedLoads(started[-1], tolerance=0.3, limit_s=30.0, logger=logger)

    yield make
    for one in started:
        await one.close()


def assert_serves(engine: TransformersEngine, expected: dict[str, Tensor]) -> None:
    live = engine._model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(live[name].view(torch.int16), tensor.view(torch.int16)), name


async def test_deltas_end_in_the_weights_of_full_versions(
    tmp_path: Path, model_path: Path, start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = worker_config(NameResolveConfig(endpoints=[f"memory://{tmp_path}"]), tmp_path, model_path, train=BF16)
    config = replace(config, weights=WeightsConfig(fsync=False, full_every=FULL_EVERY, verify_logprobs=True))
    async with worker_here(config) as (worker, world):
        run = Run(tmp_path, worker, world)
        for number in range(NUM):
            if number:
                await run.step(number)
            await run.write(number)
            run.remember()
        kinds = [read_manifest(run.path(number)).kind for number in range(NUM)]
        assert kinds == ["full", "delta", "delta", "delta", "full", "delta"]
        sizes = [sum(file.stat().st_size for file in run.path(number).iterdir()) for number in range(NUM)]
        assert sizes[5] < sizes[4] / 2
        for number in range(NUM):
            found, expected = whole(run.path(number)), run.expected[number]
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)

        opened: list[str] = []
        real = engine_module.safe_open
        monkeypatch.setattr(
            engine_module,
            "safe_open",
            lambda file, **more: (opened.append(Path(file).parent.name), real(file, **more))[1],
        )
        server, loads = await start()
        for number in range(NUM):
            await loads.load(run.path(number), WeightVersion(1, number))
            assert_serves(server, run.expected[number])
            assert server.stats().version == str(WeightVersion(1, number))
        assert opened == [str(WeightVersion(1, 0)), str(WeightVersion(1, 4))]  # deltas need no file of the bases

        late, loads = await start()
        await loads.load(run.path(3), WeightVersion(1, 3))
        assert_serves(late, run.expected[3])
        assert opened[2:] == [str(WeightVersion(1, 0))]
        await loads.load(run.path(5), WeightVersion(1, 5))  # it has skipped the base, version 4
        assert_serves(late, run.expected[5])

        base = next(run.path(4).glob("*.safetensors"))
        base.write_bytes(base.read_bytes()[:-1])
        await run.step(NUM)
        await run.write(NUM)
        run.remember()
        with pytest.raises(WeightsRefused, match=r"v00000004/model\.safetensors has"):
            await loads.load(run.path(NUM), WeightVersion(1, NUM))
        assert_serves(late, run.expected[5])
        assert late.stats().version == str(WeightVersion(1, 5))
        await run.write(NUM, rewrite=True)  # which the master has done if the manager cannot verify the version
        assert read_manifest(run.path(NUM)).kind == "full"
        await loads.load(run.path(NUM), WeightVersion(1, NUM))
        assert_serves(late, run.expected[NUM])
        await run.step(NUM + 1)
        await run.write(NUM + 1)
        run.remember()
        assert read_manifest(run.path(NUM + 1)).base_version == WeightVersion(1, NUM)
        await loads.load(run.path(NUM + 1), WeightVersion(1, NUM + 1))
        assert_serves(late, run.expected[NUM + 1])
