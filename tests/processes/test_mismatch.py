"""train.mismatch with a real engine and a real trainer: no sampling setting raises an alarm, and each planted fault does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import placement, shard

from asyncrl.config.processes import MismatchConfig
from asyncrl.config.schema import GenerationConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.generation import transformers as engine_module
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.first_step import FirstStep, MismatchError
from asyncrl.model.mesh import ModelMesh
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version
from tests.support.rank_processes import RankError, RankProcesses

LOGGER = logging.getLogger("test")
V0 = WeightVersion(1, 0)
TIGHT, WIDE = (1e-4, 1e-3, 0.01), (0.05, 0.5, 0.05)  # as in launch/program.py
PROMPTS = [list(range(5, 5 + length)) for length in (3, 9, 17, 40)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, initializer_range=0.2)  # far from uniform: a wrong temperature matters
    return path


@pytest.fixture(scope="module")
def trainer(model_path: Path) -> TrainEngine:
    return shard(str(model_path), None)


async def started(model_path: Path, trainer: TrainEngine, folder: Path, dtype: str = "float32") -> TransformersEngine:
    """An engine that serves the trainer's weights."""
    path = version_dir(folder, "actor", V0)
    write_version(path, take_share(trainer).items(), source_dir=model_path, version=V0, fsync=False)
    config = GenerationConfig(dtype=dtype, max_running_requests=16, max_batch_tokens=64, num_blocks=64, page_size=16)
    engine = TransformersEngine(EngineArguments(str(model_path), config))
    await engine.start()
    await engine.load_weights(path, V0)
    return engine


@pytest.fixture
async def engine(model_path: Path, trainer: TrainEngine, tmp_path: Path) -> AsyncIterator[TransformersEngine]:
    found = await started(model_path, trainer, tmp_path)
    yield found
    await found.close()


async def rollout(engine: TransformersEngine, **params: Any) -> SequenceSample:
    """A batch of groups, as actor_train gets it: with a turn of an environment, which is not trained and has logprobs of 0."""
    asked = SamplingParams(max_new_tokens=30, ignore_eos=True, **params)
    answers = await asyncio.gather(
        *(engine.submit(EngineRequest(f"r{at}", prompt, asked)) for at, prompt in enumerate(PROMPTS))
    )
    turn = [7, 8, 9]
    groups = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = np.array([*prompt, *answer.token_ids, *turn])
        trained = np.array([False] * len(prompt) + [True] * len(answer.token_ids) + [False] * len(turn))
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[trained] = answer.logprobs
        groups.append({"packed_input_ids": [ids], "trained_mask": [trained], "packed_logprobs": [logprobs]})
    return SequenceSample.from_groups([f"g{at}" for at in range(len(groups))], groups)


def check(
    trainer: TrainEngine, sample: SequenceSample, *, temperature: float = 1.0, bounds: tuple[float, ...] = TIGHT
) -> dict[str, float]:
    config = MismatchConfig("stop", temperature, *bounds)
    return FirstStep(config, LOGGER).check(trainer, sample, proximal_at=None, last=True)


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"temperature": 1.3}, 1.3),
        ({"top_p": 0.7}, 1.0),
        ({"top_k": 3, "temperature": 0.8}, 0.8),
        ({"temperature": 0.0}, 1.0),  # rollout.sampling.greedy
    ],
    ids=str,
)
async def test_no_sampling_setting_raises_an_alarm(
    trainer: TrainEngine, engine: TransformersEngine, params: dict[str, Any], temperature: float
) -> None:
    stats = check(trainer, await rollout(engine, **params), temperature=temperature)
    assert stats["mismatch/max"] < 1e-4  # float32: a tenth of the bound


async def test_rounding_in_16_bits_is_within_the_wide_bounds(
    model_path: Path, trainer: TrainEngine, tmp_path: Path
) -> None:
    coarse = await started(model_path, trainer, tmp_path, "bfloat16")
    try:
        sample = await rollout(coarse)
    finally:
        await coarse.close()
    stats = check(trainer, sample, bounds=WIDE)
    assert stats["mismatch/max"] > TIGHT[1]
    assert abs(stats["mismatch/approx_kl"]) < WIDE[0] / 5
    with pytest.raises(MismatchError, match=r"generation\.dtype"):
        check(trainer, sample)


def no_temperature(sample: Callable[..., Any], logits: Any, temperature: Any, *rest: Any, **more: Any) -> Any:
    return sample(logits, torch.ones_like(temperature), *rest, **more)


@pytest.mark.parametrize("bounds", [TIGHT, WIDE], ids=["float32", "16 bits"])
async def test_a_temperature_that_the_engine_ignores_is_found(
    trainer: TrainEngine,
    engine: TransformersEngine,
    monkeypatch: pytest.MonkeyPatch,
    bounds: tuple[float, ...],
) -> None:
    sample = engine_module.sample_tokens
    monkeypatch.setattr(engine_module, "sample_tokens", lambda *given, **more: no_temperature(sample, *given, **more))
    with pytest.raises(MismatchError, match="samples at another temperature"):
        check(trainer, await rollout(engine, temperature=0.6), temperature=0.6, bounds=bounds)


@pytest.mark.parametrize("bounds", [TIGHT, WIDE], ids=["float32", "16 bits"])
async def test_positions_that_are_shifted_are_found(
    trainer: TrainEngine,
    engine: TransformersEngine,
    monkeypatch: pytest.MonkeyPatch,
    bounds: tuple[float, ...],
) -> None:
    """While it decodes, the engine counts each token's position from the end of the prompt on twice as fast."""
    forward = type(engine._model).forward

    def shifted(self: Any, *given: Any, **more: Any) -> Any:
        more["position_ids"] = more["position_ids"] * 2
        return forward(self, *given, **more)

    monkeypatch.setattr(type(engine._model), "forward", shifted)
    sample = await rollout(engine)
    monkeypatch.undo()
    with pytest.raises(MismatchError, match="not the trainer's in the first train step"):
        check(trainer, sample, bounds=bounds)


@pytest.mark.parametrize(("change", "bounds"), [(1e-3, TIGHT), (0.1, WIDE)], ids=["float32", "16 bits"])
async def test_weights_of_another_version_are_found(
    model_path: Path, engine: TransformersEngine, change: float, bounds: tuple[float, ...]
) -> None:
    """The trainer has moved on, but the engine labels its tokens with the newest version."""
    moved = shard(str(model_path), None, change=change)
    with pytest.raises(MismatchError):
        check(moved, await rollout(engine), bounds=bounds)


# --------------------------------------------------------------------------------------------------------------- layouts


def judged(rank: int, path: str, grid: str, groups: list[SequenceSample], error: float) -> dict[str, float]:
    """The check on one rank. The data ranks have their own groups; with error, one token of the last group is wrong."""
    mesh = ModelMesh.make(placement("actor", grid), "cpu")
    if mesh is None:
        return {}
    engine = shard(path, mesh)
    mine = groups[mesh.parts[SAMPLES] :: mesh.placement.grid.num_replicas]
    sample = SequenceSample.gather(mine) if mine else None
    if sample is not None and "g2" in sample.ids:
        sample.data["packed_logprobs"][-1] += error
    config = MismatchConfig("stop", 1.0, *TIGHT)
    return FirstStep(config, LOGGER).check(engine, sample, proximal_at=None, last=True)


def test_every_rank_of_every_layout_comes_to_the_same_verdict(model_path: Path, trainer: TrainEngine) -> None:
    rng = np.random.default_rng(1)
    groups = []
    for at in range(3):
        ids = rng.integers(1, 64, 10 + at)
        group = {"packed_input_ids": [ids], "trained_mask": [np.arange(len(ids)) > 2]}
        sample = SequenceSample.from_groups([f"g{at}"], [group])
        logprobs = trainer.logprobs(sample, temperature=1.0)
        groups.append(sample.derive({"packed_logprobs": logprobs}).update(sample))
    with RankProcesses(4, limit_s=120.0) as ranks:
        for grid in ("d2", "m2", "p2", "d4"):  # d4: a rank has no groups
            size = placement("actor", grid).grid.size
            found = [stats for stats in ranks.run(judged, str(model_path), grid, groups, 0.0) if stats]
            assert len(found) == size
            assert all(stats == found[0] for stats in found)
            assert found[0]["mismatch/max"] < 1e-4
            with pytest.raises(RankError) as caught:
                ranks.run(judged, str(model_path), grid, groups, 0.5)
            assert len(caught.value.errors) == size
            assert len({str(error) for error in caught.value.errors.values()}) == 1
            assert "g2, response 0: token 11 of 12" in str(caught.value.errors[0])
