"""weights.verify_logprobs with a real trainer and a real engine: an engine must compute with the weights that it reports."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation import transformers as engine_module
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.queueing import EngineArguments
from asyncrl.generation.transformers import LiveTensors, TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.logprob_check import TextScorer
from asyncrl.protocol.messages import UpdateWeightsReply, WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version

V0, V1, V2 = (WeightVersion(1, version) for version in range(3))
TRAIN = TrainConfig(max_tokens_per_mb=512, optimizer=OptimizerConfig(lr=5e-3, warmup_steps=0))
TOLERANCE = 1e-3


class Trainer:
    """Acts as a model worker's rank 0: train, take a snapshot, score a text, write both."""

    def __init__(self, model_path: Path, run_dir: Path) -> None:
        self.engine = TrainEngine(
            ModelConfig("actor", str(model_path), "d1", [0], trainable=True, optimizer=TRAIN.optimizer), TRAIN
        )
        self.scorer = TextScorer(seed=1)
        self.model_path, self.run_dir = model_path, run_dir

    def write(self, version: WeightVersion, *, with_text: bool = True) -> Path:
        path = version_dir(self.run_dir, "actor", version)
        scored_text = self.scorer.measure(self.engine) if with_text else None
        tensors = take_share(self.engine).items()
        write_version(path, tensors, source_dir=self.model_path, version=version, fsync=False, scored_text=scored_text)
        return path

    def train(self) -> None:
        ids = [np.random.default_rng(1).integers(1, 64, 40) for _ in range(4)]
        sample = SequenceSample.from_groups(["a"], [{"packed_input_ids": ids}])

        def loss_fn(outputs: Mapping[str, Tensor], *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return -outputs["logprobs"].sum() / 160, {}

        self.engine.train_step(sample, loss_fn, temperature=1.0, lr_step=0)


class Server:
    """A generation server, used through its HTTP endpoints."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def update(self, path: Path, version: WeightVersion, *, pause: bool = True) -> UpdateWeightsReply:
        """Update as the gserver manager does: continue only after a success."""
        if pause:
            assert (await self.post("/pause_generation", {"mode": "abort"}))[0] == 200
        status, answer = await self.post(
            "/update_weights_from_disk", {"model_path": str(path), "weight_version": str(version)}
        )
        reply = msgspec.convert(answer, UpdateWeightsReply)
        assert status == (200 if reply.success else 400)
        if reply.success:
            await self.post("/continue_generation", {})
        return reply

    async def echo(self) -> str:
        async with self.session.get(f"{self.url}/get_model_info") as answer:
            return str((await answer.json())["weight_version"])

    async def generate(self) -> tuple[int, Any]:
        params = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
        return await self.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Trainer:
    return Trainer(model_path, tmp_path)


@pytest.fixture
async def server(model_path: Path) -> AsyncIterator[Server]:
    config = GenerationConfig(max_running_requests=16, max_batch_tokens=256, num_blocks=128, page_size=16)
    engine = TransformersEngine(EngineArguments(str(model_path), config))
    await engine.start()
    verified = VerifiedLoads(engine, tolerance=TOLERANCE, limit_s=30.0, logger=logging.getLogger("test"))
    http = GenerationHTTP(engine, engine_name="transformers", settings={}, verified=verified)
    async with http.listening("127.0.0.1") as url:
        async with aiohttp.ClientSession() as session:
            yield Server(session, url)
        await engine.close()


async def test_what_the_trainer_wrote_passes_and_is_generated_with(trainer: Trainer, server: Server) -> None:
    for version in (V0, V1):
        reply = await server.update(trainer.write(version), version)
        assert reply.success, reply.message
        assert await server.echo() == str(version)
        status, answer = await server.generate()
        assert status == 200
        ids = np.array([5, 6, 7, *answer["output_ids"]])
        sample = SequenceSample.from_groups(["a"], [{"packed_input_ids": [ids]}])
        expected = trainer.engine.logprobs(sample, temperature=1.0)[3:]
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(found, expected, atol=1e-4)
        trainer.train()


def nothing(copy: Callable[..., None], *arguments: Any, **more: Any) -> None:
    """The engine checks the files and reports them as loaded, but does not load them."""


def all_but_one(copy: Callable[..., None], live: LiveTensors, *arguments: Any, **more: Any) -> None:
    """One of many tensors keeps its old values."""
    kept = live._live["model.layers.0.mlp.up_proj.weight"]
    old = kept.detach().clone()
    copy(live, *arguments, **more)
    kept.data.copy_(old)


@pytest.mark.parametrize("fault", [nothing, all_but_one])
async def test_stale_weights_are_caught_and_not_served(
    trainer: Trainer, server: Server, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    assert (await server.update(trainer.write(V0), V0)).success
    trainer.train()
    copy = LiveTensors._copy
    monkeypatch.setattr(LiveTensors, "_copy", lambda *arguments, **more: fault(copy, *arguments, **more))
    path = trainer.write(V1)
    reply = await server.update(path, V1)
    assert not reply.success
    assert reply.mismatch
    assert (
        f"weights {V1} were loaded, but the server's logprobs of the check's text are not the trainer's"
        in reply.message
    )
    assert ("the engine still computes with the old weights" in reply.message) == (fault is nothing)
    assert await server.echo() == ""
    await server.post("/continue_generation", {})  # the server does not continue, although a client asks for it
    assert (await server.generate())[0] == 503
    monkeypatch.undo()
    assert (await server.update(path, V1)).success
    assert (await server.generate())[0] == 200


async def test_what_was_refused_before_still_is_and_the_old_version_goes_on(
    trainer: Trainer, server: Server, model_path: Path
) -> None:
    """Wrong shapes and torn files never reach the logprob check. The previous version stays in use."""
    assert (await server.update(trainer.write(V0), V0)).success
    other = version_dir(trainer.run_dir, "actor", V1)
    tensors = [(name, torch.zeros(3, 64) if "up_proj" in name else t) for name, t in take_share(trainer.engine).items()]
    write_version(other, tensors, source_dir=model_path, version=V1, fsync=False)
    reply = await server.update(other, V1)
    assert (reply.success, reply.mismatch) == (False, False)
    assert "(3, 64)" in reply.message
    torn = trainer.write(V2)
    (torn / "model.safetensors").write_bytes(b"torn")
    reply = await server.update(torn, V2)
    assert (reply.success, reply.mismatch) == (False, False)
    assert await server.echo() == str(V0)


async def test_an_update_that_cannot_be_verified_is_refused(trainer: Trainer, server: Server) -> None:
    reply = await server.update(trainer.write(V0), V0, pause=False)
    assert "pause generation before an update" in reply.message
    reply = await server.update(trainer.write(V1, with_text=False), V1)
    assert f"weights {V1} have no text to score in their manifest" in reply.message
    assert await server.echo() == ""
    assert (await server.generate())[0] == 503


async def test_scoring_between_the_passes_leaves_running_requests_exact(trainer: Trainer, model_path: Path) -> None:
    """Scoring replaces the model's attention and restores it. Running requests must not notice."""
    config = GenerationConfig(max_running_requests=16, max_batch_tokens=256, num_blocks=128, page_size=16)
    engine = TransformersEngine(EngineArguments(str(model_path), config))
    await engine.start()
    try:
        await engine.load_weights(trainer.write(V0), V0)
        scored_text = trainer.scorer.measure(trainer.engine)
        prompt, params = [5, 6, 7], engine_module.SamplingParams(max_new_tokens=300, ignore_eos=True)
        running = engine.submit(engine_module.EngineRequest("a", prompt, params))
        scores = []
        while not running.done():
            scores.append(await engine.score(scored_text.input_ids))
        result = await running
    finally:
        await engine.close()
    assert len(scores) > 2
    assert all(score == scores[0] for score in scores)
    np.testing.assert_allclose(scores[0][-len(scored_text.logprobs) :], scored_text.logprobs, atol=1e-4)
    sample = SequenceSample.from_groups(["a"], [{"packed_input_ids": [np.array(prompt + result.token_ids)]}])
    np.testing.assert_allclose(result.logprobs, trainer.engine.logprobs(sample, temperature=1.0)[3:], atol=1e-4)


async def test_an_engine_that_cannot_score_serves_nothing(
    trainer: Trainer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: TransformersEngine, input_ids: list[int]) -> list[float]:
        raise engine_module.EngineFailed("no room")

    monkeypatch.setattr(TransformersEngine, "score", fail)
    reply = await server.update(trainer.write(V0), V0)
    assert reply.message == f"weights {V0}: the check's text could not be scored: no room"
    assert await server.echo() == ""


def test_the_text_stays_the_same_while_the_weights_move(trainer: Trainer) -> None:
    first = trainer.scorer.measure(trainer.engine)
    trainer.train()
    second = trainer.scorer.measure(trainer.engine)
    assert second.input_ids == first.input_ids
    assert len(second.logprobs) == 24 < len(second.input_ids)
    assert np.abs(np.subtract(second.logprobs, first.logprobs)).max() > 10 * TOLERANCE
    again = TextScorer(seed=2).measure(trainer.engine)
    assert again.input_ids != first.input_ids
