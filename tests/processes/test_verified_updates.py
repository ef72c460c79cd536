"""weights.verify_logprobs with a real trainer and a real engine: an engine must compute with the weights that it reports."""

from __future__ import annotations

import asyncio
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
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation import transformers as engine_module
from asyncrl.generation.checks import VerifiedLoads
from asyncrl.generation.engine import EngineArguments
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.transformers import LiveTensors, TransformersEngine
from asyncrl.model import packing
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.logprob_check import TextScorer
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import UpdateWeightsReply
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version

V0, V1, V2 = (WeightVersion(1, version) for version in range(3))
TRAIN = TrainConfig(max_tokens_per_mb=512, optimizer=OptimizerConfig(lr=5e-3, warmup_steps=0))
TOLERANCE, MAX_QUEUE = 1e-3, 20


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


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 (the engine counts, it has no event)
            await asyncio.sleep(0.005)


class Server:
    """A generation server, used through its HTTP endpoints."""

    def __init__(self, session: aiohttp.ClientSession, url: str, engine: TransformersEngine) -> None:
        self.session, self.url, self.engine = session, url, engine

    async def until_waiting(self, count: int) -> None:
        """Wait until this many requests are in the queue."""
        await until(lambda: self.engine.stats().waiting >= count)

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
    make_tiny_model(path, initializer_range=0.2)
    return path


@pytest.fixture
def trainer(model_path: Path, tmp_path: Path) -> Trainer:
    return Trainer(model_path, tmp_path)


@pytest.fixture
async def server(model_path: Path) -> AsyncIterator[Server]:
    config = GenerationConfig(
        max_running_requests=16, max_batch_tokens=256, num_blocks=128, page_size=16, max_queue=MAX_QUEUE
    )
    engine = TransformersEngine(EngineArguments(str(model_path), config))
    await engine.start()
    verified = VerifiedLoads(engine, tolerance=TOLERANCE, limit_s=30.0, logger=logging.getLogger("test"))
    http = GenerationHTTP(engine, engine_name="transformers", settings={}, verified=verified)
    async with http.listening("127.0.0.1") as url:
        async with aiohttp.ClientSession() as session:
            yield Server(session, url, engine)
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


def other_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = engine_module.sample_tokens
    monkeypatch.setattr(
        engine_module, "sample_tokens", lambda logits, asked, *rest, **more: sample(logits, asked * 1.5, *rest, **more)
    )


def shifted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded tokens are taken to be one position later. A forward pass of a whole text is right."""
    forward = Qwen2Model.forward

    def shifted(self: Any, *given: Any, **more: Any) -> Any:
        if more.get("position_ids") is not None and more["position_ids"].shape[-1] < 28:
            more["position_ids"] = more["position_ids"] + 1
        return forward(self, *given, **more)

    monkeypatch.setattr(Qwen2Model, "forward", shifted)


def swapped_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = LiveTensors._copy

    def swapped(self: LiveTensors, tensor_of: Callable[[str], Tensor], *given: Any, **more: Any) -> None:
        names = {"layers.0.mlp.up_proj": "layers.1.mlp.up_proj", "layers.1.mlp.up_proj": "layers.0.mlp.up_proj"}

        def other(name: str) -> Tensor:
            for one, another in names.items():
                if one in name:
                    return tensor_of(name.replace(one, another))
            return tensor_of(name)

        copy(self, other, *given, **more)

    monkeypatch.setattr(LiveTensors, "_copy", swapped)


def old_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update leaves the cache as it is. The engine finds the check's first page there, with keys of the last version."""
    monkeypatch.setattr(TransformersEngine, "_empty_cache", lambda self: None)


@pytest.mark.parametrize("fault", [other_temperature, shifted_positions, swapped_tensors, old_keys])
async def test_an_engine_with_a_fault_serves_no_token_of_the_version(
    trainer: Trainer, server: Server, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    assert (await server.update(trainer.write(V0), V0)).success
    trainer.train()
    path = trainer.write(V1)
    await server.post("/pause_generation", {"mode": "abort"})
    waiting = [asyncio.create_task(server.generate()) for _ in range(3)]
    await server.until_waiting(3)
    fault(monkeypatch)
    reply = await server.update(path, V1)
    assert (reply.success, reply.mismatch) == (False, True)
    whose = "the trainer's" if fault is swapped_tensors else "those of its own forward pass"
    assert f"are not {whose}" in reply.message
    assert {status for status, _ in await asyncio.gather(*waiting)} == {503}  # they ran beside the check
    assert await server.echo() == ""
    assert (await server.generate())[0] == 503
    monkeypatch.undo()
    assert (await server.update(path, V1)).success
    assert (await server.generate())[0] == 200


async def test_requests_run_during_the_check_and_are_answered_after_it(
    trainer: Trainer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, goes_on, asked = TransformersEngine.score, asyncio.Event(), asyncio.Event()

    async def held(self: TransformersEngine, *text: Any) -> list[float]:
        asked.set()
        await goes_on.wait()
        return await score(self, *text)

    monkeypatch.setattr(TransformersEngine, "score", held)
    updating = asyncio.create_task(server.update(trainer.write(V0), V0))
    await asyncio.wait_for(asked.wait(), 30)
    engine = server.engine
    before = engine.stats().num_tokens
    generating = asyncio.create_task(server.generate())
    await until(lambda: engine.stats().num_tokens >= before + 16 and not engine.stats().running)
    assert not engine.stats().paused
    assert not generating.done()  # all its tokens are sampled, but not verified
    assert not updating.done()
    goes_on.set()
    assert (await updating).success
    status, answer = await generating
    assert (status, len(answer["output_ids"])) == (200, 16)


async def test_a_full_queue_does_not_refuse_the_check(trainer: Trainer, server: Server) -> None:
    assert (await server.update(trainer.write(V0), V0)).success
    await server.post("/pause_generation", {"mode": "abort"})
    waiting = [asyncio.create_task(server.generate()) for _ in range(MAX_QUEUE)]
    await server.until_waiting(MAX_QUEUE)
    assert (await server.generate())[0] == 503
    reply = await server.update(trainer.write(V1), V1)
    assert reply.success, reply.message
    assert {status for status, _ in await asyncio.gather(*waiting)} == {200}


def test_a_text_of_random_tokens_is_as_exact_in_float32(trainer: Trainer, model_path: Path) -> None:
    trainer.scorer = TextScorer(seed=1, sampled=False)
    found = trainer.scorer.measure(trainer.engine)
    assert len(found.input_ids) == 40
    assert len(found.logprobs) == 32
    with torch.no_grad():
        logits_TV = trainer.engine.model(input_ids=torch.tensor([found.input_ids])).logits[0, :-1].double()
    expected = logits_TV.log_softmax(-1).gather(1, torch.tensor(found.input_ids[1:])[:, None])[-32:, 0]
    np.testing.assert_allclose(found.logprobs, expected, atol=TOLERANCE / 30)


def test_packing_that_mixes_the_texts_of_a_row_changes_the_scores(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer vouches for the rows on which it trains, not only for a text alone."""
    right = trainer.scorer.measure(trainer.engine)
    alone = SequenceSample.from_groups(["a"], [{"packed_input_ids": [np.array(right.input_ids)]}])
    expected = trainer.engine.logprobs(alone, temperature=1.0)[-len(right.logprobs) :]
    np.testing.assert_allclose(right.logprobs, expected, atol=1e-5)
    packed = packing.Packed.of
    monkeypatch.setattr(
        packing.Packed, "of", lambda ids, lengths, **more: packed(ids, [sum(lengths)], **more)
    )  # one sequence
    wrong = trainer.scorer.measure(trainer.engine)
    assert np.abs(np.subtract(wrong.logprobs, right.logprobs)).max() > 10 * TOLERANCE


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
    async def fail(self: TransformersEngine, *text: Any) -> list[float]:
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
    assert len(second.logprobs) == 32 < len(second.input_ids) == 40
    assert np.abs(np.subtract(second.logprobs, first.logprobs)).max() > 10 * TOLERANCE
    again = TextScorer(seed=2).measure(trainer.engine)
    assert again.input_ids != first.input_ids
