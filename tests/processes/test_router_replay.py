"""Router replay: the trainer of a mixture of experts uses the experts that the embedded engine has chosen for each token.

TransformersEngine, GenerationServer -- HTTP --> PartialRolloutManager -> SequenceSample -> TrainEngine
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_matches_trainer import (  # noqa: F401  (resolver: a fixture)
    GROUP,
    PROMPT,
    SAMPLING,
    TRAIN,
    V0,
    V1,
    client,
    info,
    post,
    resolver,
    serve,
    ticket,
    train_once,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from asyncrl.architectures.routes import routers_of, scores_of
from asyncrl.config.processes import GenerationServerConfig, ModelConfig
from asyncrl.config.schema import ConfigError, GenerationConfig, TrainConfig
from asyncrl.data.routes import ROUTES, RouteLayout, Routes
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.routes import RequestRoutes
from asyncrl.generation.states import Row
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.generation.worker import GenerationServer
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.routes import RouteError
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.names import Names
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.weights.versions import version_dir, write_version
from tests.support.families import make_family
from tests.support.memory_names import memory_system
from tests.support.routed import difference, experts_of, loss_fn, sample_of, shares

LIMIT_S = 120.0
NOISE = 0.02  # of the router's logits
# Layer 1 of 4 is dense
LAYOUT = RouteLayout((0, 2, 3), top_k=2, num_experts=16)
LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 16}
GENERATION = GenerationConfig(max_running_requests=GROUP, max_batch_tokens=64, num_blocks=256, page_size=16)
REPLAY, COMPARE = (replace(TRAIN, routes=words, max_tokens_per_mb=2048) for words in ("replay", "compare"))


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_family(tmp_path / "model", "qwen3_moe", **LAYERS)
    return tmp_path / "model"


def trainer_of(path: Path, train: TrainConfig = REPLAY) -> TrainEngine:
    return TrainEngine(ModelConfig("actor", str(path), "d1", [0], trainable=True, optimizer=train.optimizer), train)


def disturb(model: nn.Module) -> None:
    """The routers choose by logits with noise, and score the chosen experts without it: only the choices differ from a trainer."""

    def choose(router: nn.Module, _: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, _, _ = output
        noisy = logits + NOISE * logits.std(-1, keepdim=True) * torch.randn_like(logits)
        experts = noisy.topk(int(router.top_k), dim=-1).indices  # type: ignore[arg-type]
        return logits, scores_of(router, logits, experts), experts

    for router in routers_of(model, "")[1]:
        router.register_forward_hook(choose, prepend=True)


async def sampled(path: Path, *, noisy: bool = True, count: int = 8) -> SequenceSample:
    """A group that the embedded engine has sampled."""
    engine = TransformersEngine(EngineArguments(str(path), GENERATION, returns_routes=True), device="cpu")
    async with asyncio.timeout(LIMIT_S):
        await engine.start()
        try:
            version = version_dir(path.parent, "actor", V0)
            write_version(version, take_share(trainer_of(path)).items(), source_dir=path, version=V0, fsync=False)
            await engine.load_weights(version, V0)
            if noisy:
                disturb(engine._model)
            params = SamplingParams(max_new_tokens=40, ignore_eos=True)
            prompts = [[1 + number, *range(2, 2 + 7 * number)] for number in range(count)]
            requests = [EngineRequest(str(number), prompt, params) for number, prompt in enumerate(prompts)]
            results = await asyncio.gather(*map(engine.submit, requests))
        finally:
            await engine.close()
    return sample_of(prompts, results)


async def test_replay_repeats_the_choices_of_a_noisy_sampler(model_path: Path) -> None:
    sample = await sampled(model_path)
    rows = np.concatenate([Routes.decode(run).rows for run in sample.slices(ROUTES)[0]])
    known = rows[:, 0] != LAYOUT.unknown
    assert len(known) - known.sum() == 8  # the last token of each response
    trainer = trainer_of(model_path)
    assert trainer.routes is not None
    assert trainer.routes.layout == LAYOUT
    assert (experts_of(trainer, sample)[known] == rows[known]).all()
    assert difference(trainer, sample) <= 1e-6
    share, of_tokens = shares(trainer, sample)
    # Without the replay, each choice is made on hidden states that earlier choices have changed
    without = trainer_of(model_path, COMPARE)
    compared, of_compared = shares(without, sample)
    print(
        f"noise of {NOISE:.0%}: {share:.1%} of routers, {of_tokens:.1%} of tokens; compared {compared:.1%}, {of_compared:.1%}"
    )
    assert 0.01 < share < 0.2
    assert 0.03 < of_tokens < 0.5
    assert compared >= share / 2
    assert difference(without, sample) > 1e-3
    gap = difference(without, sample)
    print(f"logprobs differ by {gap:.2g} without replay, {difference(trainer, sample):.2g} with it")


@pytest.mark.release
async def test_in_many_layers_noise_changes_the_experts_of_most_tokens(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sizes = {"num_hidden_layers": 16, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
    make_family(tmp_path / "model", "qwen3_moe", initializer_range=0.05, **sizes)
    sample = await sampled(tmp_path / "model", count=4)
    without = trainer_of(tmp_path / "model", COMPARE)
    share, of_tokens = shares(without, sample)
    gap = difference(without, sample)
    print(f"noise of {NOISE:.0%}: {share:.1%} of routers, {of_tokens:.1%} of tokens; logprobs differ by {gap:.2g}")
    assert of_tokens > 0.8
    assert gap > 1e-4
    assert difference(trainer_of(tmp_path / "model"), sample) <= 1e-6


async def test_without_noise_no_choice_differs(model_path: Path) -> None:
    sample = await sampled(model_path, noisy=False)
    assert shares(trainer_of(model_path, COMPARE), sample) == (0.0, 0.0)
    assert difference(trainer_of(model_path), sample) <= 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
async def test_the_router_learns_from_the_replayed_experts(model_path: Path, checkpointing: bool) -> None:
    """Gradients are those of plain transformers whose routers return the sampler's experts with their scores."""
    sample = await sampled(model_path)
    trainer = trainer_of(model_path, replace(REPLAY, gradient_checkpointing=checkpointing, max_tokens_per_mb=100))
    plain = trainer_of(model_path, replace(TRAIN, max_tokens_per_mb=10_000))
    rows = torch.from_numpy(
        np.concatenate([Routes.decode(run).rows for run in sample.slices(ROUTES)[0]]).astype(np.int64)
    )
    for number, router in enumerate(routers_of(plain.model, "")[1]):
        experts = rows[:, 2 * number : 2 * number + 2]

        def replay(experts: Tensor, router: nn.Module, _: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            chosen = torch.where(experts == LAYOUT.unknown, output[2], experts)
            probs = output[0].softmax(-1).gather(1, chosen)
            return output[0], probs / probs.sum(-1, keepdim=True) if router.norm_topk_prob else probs, chosen  # type: ignore[return-value]

        router.register_forward_hook(partial(replay, experts))
    without_routes = sample.select_keys([key for key in sample.keys if key != ROUTES])
    found = trainer.try_step(sample, loss_fn, temperature=1.0)
    expected = plain.try_step(without_routes, loss_fn, temperature=1.0)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for name, parameter in trainer.named_parameters().items():
        other = plain.named_parameters()[name].grad
        assert parameter.grad is not None
        assert other is not None
        assert torch.allclose(parameter.grad, other, rtol=1e-4, atol=1e-7), name
        if ".gate.weight" in name:
            assert float(parameter.grad.abs().max()) > 0


def relabelled(sample: SequenceSample, change: Any) -> SequenceSample:
    """The sample with other routes."""
    lengths = sample.seqlens["packed_input_ids"][0]
    runs = [change(Routes.decode(run)).encode() for run in sample.slices(ROUTES)[0]]
    assert len(runs) == len(lengths)
    return (
        sample.update(SequenceSample.from_groups(["g"], [{ROUTES: runs}]))
        if ROUTES not in sample.keys
        else SequenceSample(
            sample.ids,
            sample.seqlens | {ROUTES: [[len(run) for run in runs]]},
            sample.data | {ROUTES: np.concatenate(runs)},
        )
    )


def reversed_layers(routes: Routes) -> Routes:
    return Routes(routes.layout, routes.rows.reshape(-1, 3, 2)[:, ::-1].reshape(-1, 6))


def counting_dense_layers(routes: Routes) -> Routes:
    """As an engine that numbers the layers with experts from 0, without the dense ones."""
    return Routes(replace(routes.layout, layers=(0, 1, 2)), routes.rows)


def without_a_layer(routes: Routes) -> Routes:
    return Routes(replace(routes.layout, layers=(0, 2)), routes.rows[:, :4])


def with_a_skipped_layer(routes: Routes) -> Routes:
    """As an engine whose buffer no router of the last layer has filled."""
    rows = routes.rows.copy()
    rows[:, 4:] = (0, 1)
    return Routes(routes.layout, rows)


def of_other_experts(routes: Routes) -> Routes:
    return Routes(replace(routes.layout, num_experts=32), routes.rows)


@pytest.mark.parametrize("train", [REPLAY, COMPARE])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (reversed_layers, "of the choices of layer 0 differ|of the choices of layer 3 differ"),
        (with_a_skipped_layer, "of the choices of layer 3 differ"),
        (without_a_layer, "layers=\\(0, 2\\)"),
        (counting_dense_layers, "layers=\\(0, 1, 2\\)"),
        (of_other_experts, "num_experts=32"),
    ],
)
async def test_routes_of_other_layers_end_the_run_before_an_update(
    model_path: Path, train: TrainConfig, change: Any, why: str
) -> None:
    sample = await sampled(model_path, noisy=False, count=4)
    trainer = trainer_of(model_path, train)
    before = {name: parameter.detach().clone() for name, parameter in trainer.named_parameters().items()}
    with pytest.raises(RouteError, match=why):
        trainer.train_step(relabelled(sample, change), loss_fn, temperature=1.0, lr_step=0)
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.named_parameters().items())
    trainer_of(model_path, train).train_step(sample, loss_fn, temperature=1.0, lr_step=0)


def test_the_engine_refuses_a_pass_in_which_a_layer_chose_nothing(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    routes = RequestRoutes(model, "")
    _, middle, _ = routers_of(model, "")[1]
    middle._forward_hooks.clear()
    error = pytest.raises(ValueError, match="2 routers have chosen; layers with experts: 3")
    with error, routes.of_pass([Row("a", first=0, length=3)], {"a"}):
        model(torch.tensor([[1, 2, 3]]))


async def test_pieces_and_an_update_keep_the_first_routes(
    model_path: Path,
    tmp_path: Path,
    resolver: NameResolver,  # noqa: F811
    client: PartialRolloutManager,  # noqa: F811
) -> None:
    """Pieces of 8 tokens over HTTP, and new weights in the middle: there is one route for each token, and those from before the
    update are the old weights'."""
    client._with_routes = True
    server = GenerationServer(
        GenerationServerConfig(
            worker=info("generation_server", tmp_path),
            engine="transformers",
            model_path=str(model_path),
            tokenizer_path=str(model_path),
            generation=GENERATION,
            torch_threads=1,
            returns_routes=True,
        ),
        memory_system(),
    )
    main = asyncio.create_task(server.main())
    try:
        url = await asyncio.to_thread(resolver.wait, Names("e", "t").generation_server(0), 60.0)
        trainer = trainer_of(model_path, replace(REPLAY, optimizer=replace(TRAIN.optimizer, lr=3e-2)))
        await serve(trainer, V0, url, tmp_path, model_path)
        sampling = replace(SAMPLING, max_new_tokens=100)
        generating = asyncio.ensure_future(client.generate(Route(ticket(url)), [PROMPT] * GROUP, sampling, []))
        while client.counts.tokens < 12 * GROUP and not generating.done():  # noqa: ASYNC110 - chunks have come in
            await asyncio.sleep(0)
        await post(url, "/pause_generation", b'{"mode": "retract"}')
        train_once(trainer)
        await serve(trainer, V1, url, tmp_path, model_path)
        await post(url, "/continue_generation", b"{}")
        responses = await generating
    finally:
        server.stopping.set()
        await asyncio.wait_for(main, 60)
    both = [response for response in responses if len(response.versions) == 2]
    assert both
    plain = trainer_of(model_path, replace(TRAIN, max_tokens_per_mb=2048))
    engines = {V0.pack(): plain, V1.pack(): trainer}
    trainer.routes = None
    for response in both[:4]:
        assert response.routes is not None
        assert response.routes.layout == LAYOUT
        assert len(response.routes) == len(PROMPT) + len(response.output_ids) - 1
        ids = response.input_ids + response.output_ids
        text = SequenceSample.from_groups(["a"], [{"packed_input_ids": [ids]}])
        (old, count), (new, _) = response.versions
        # The token at `first` was the first that the new weights sampled
        first = len(PROMPT) + count - 1
        own = {version: experts_of(engines[version], text) for version in (old, new)}
        rows = response.routes.rows
        assert (rows[:first] == own[old][:first]).all()
        assert (own[old] != own[new]).any()


def test_models_whose_routers_are_not_known_are_refused(tmp_path: Path) -> None:
    make_family(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match=r"train.routes.*no experts; set train.routes=off"):
        trainer_of(tmp_path / "llama")
