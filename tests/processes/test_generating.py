"""Groups made on the training side (mode=sync): sampling with an engine's weights; model workers that make and train a batch."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from asyncrl.config.processes import GroupsConfig, ModelConfig
from asyncrl.config.schema import (
    EvalConfig,
    EvalSetConfig,
    GenerationConfig,
    LoraConfig,
    OptimizerConfig,
    PPOConfig,
    PromptSourceConfig,
    RecordConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from asyncrl.data.trajectories import list_recording, read_trajectory, recording_dir
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.generating import Sampler
from asyncrl.model.mesh import ModelMesh
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from tests.support.rank_processes import RankProcesses
from tests.support.training_side import training_side
from tests.support.vision_models import make_vision_model

EOS = 0
VISION = ("qwen2_5_vl", "qwen3_vl", "gemma3")
TRAIN = TrainConfig(
    batch_size=4,
    max_tokens_per_mb=64,
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0),
    ppo=PPOConfig(minibatches=2, temperature=0.8),
    call_timeout_s=60.0,
)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
GREEDY = SamplingConfig(max_new_tokens=6, greedy=True)
SAMPLED = SamplingConfig(max_new_tokens=6, temperature=0.8)


@pytest.fixture(autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=32, intermediate_size=64)
    return str(path)


def make_engine(path, grid="d1", mesh=None, train=TRAIN):
    workers = list(range(ParallelGrid.parse(grid).size))
    return TrainEngine(
        ModelConfig("actor", path, grid, workers, trainable=True, optimizer=train.optimizer), train, mesh=mesh
    )


def make_sampler(engine, *, max_sequences=64, max_tokens=1000, eos_token_ids=(EOS,)):
    return Sampler(engine, eos_token_ids=eos_token_ids, max_sequences=max_sequences, max_tokens=max_tokens)


def sampled(sampler, sampling, num_each=1, prompts=PROMPTS, seed=(1, 2)):
    with sampler.weights():
        return dict(sampler.sample(prompts, num_each, sampling, seed=seed))


@torch.no_grad()
def greedy_one_by_one(model, prompt, max_new_tokens=6):
    """A whole forward pass for each token, without cache or padding."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


# ------------------------------------------------------------------------------------------------------------- the sampler


@pytest.mark.parametrize("max_sequences", [1, 3, 64])
def test_padded_and_cached_it_gives_what_plain_passes_give(model_path, max_sequences):
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval()
    found = sampled(make_sampler(make_engine(model_path), max_sequences=max_sequences), GREEDY, num_each=2)
    assert found == {at: [greedy_one_by_one(plain, prompt)] * 2 for at, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral"])
def test_other_architectures(tmp_path, architecture):
    make_tiny_model(tmp_path, architecture=architecture, hidden_size=32, intermediate_size=64)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = sampled(make_sampler(make_engine(str(tmp_path))), GREEDY)
    assert found == {at: [greedy_one_by_one(plain, prompt)] for at, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("family", VISION)
def test_architectures_that_read_images_too(tmp_path, family):
    """The positions of a text are plain ones, whatever was sampled before and however prompts are padded."""
    make_vision_model(tmp_path, family, dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    sampler = make_sampler(make_engine(str(tmp_path)))
    for prompts in (PROMPTS, PROMPTS[::-1]):
        found = sampled(sampler, GREEDY, prompts=prompts)
        assert found == {at: [greedy_one_by_one(plain, prompt)] for at, prompt in enumerate(prompts)}


def test_the_end_token_is_kept_and_nothing_after_it(model_path):
    plain = sampled(make_sampler(make_engine(model_path)), GREEDY)
    (response,) = plain[0]
    end = response[2]
    found = sampled(make_sampler(make_engine(model_path), eos_token_ids=(EOS, end)), GREEDY)
    assert found[0] == [response[: response.index(end) + 1]]


def test_it_samples_what_training_has_made(model_path):
    """The sampler borrows the weights while it samples. Training goes on with them."""
    engine = make_engine(model_path)
    sampler = make_sampler(engine)
    before = sampled(sampler, GREEDY)
    with torch.no_grad():
        for parameter in engine.named_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.5)
    after = sampled(sampler, GREEDY)
    engine.module.float()
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval()
    plain.load_state_dict(take_share(engine), strict=False)
    assert after != before
    assert after == {at: [greedy_one_by_one(plain, prompt)] for at, prompt in enumerate(PROMPTS)}
    assert all(parameter.requires_grad for parameter in engine.named_parameters().values())


def test_a_model_with_adapters_samples_with_them(model_path):
    lora = LoraConfig(rank=4, alpha=8.0)
    model = ModelConfig("actor", model_path, "d1", [0], trainable=True, optimizer=TRAIN.optimizer, lora=lora)
    engine = TrainEngine(model, TRAIN)
    sampler = make_sampler(engine)
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval()
    before = sampled(sampler, GREEDY)
    assert before == {at: [greedy_one_by_one(plain, prompt)] for at, prompt in enumerate(PROMPTS)}
    with torch.no_grad():
        own = engine.own_parameters()
        for name, parameter in own.items():
            if name.endswith("lora_B"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
                layer = name.removesuffix(".lora_B")
                plain.get_parameter(f"{layer}.weight").add_(2.0 * parameter @ own[f"{layer}.lora_A"])
    after = sampled(sampler, GREEDY)
    assert after != before
    assert after == {at: [greedy_one_by_one(plain, prompt)] for at, prompt in enumerate(PROMPTS)}


def test_the_seed_alone_decides(model_path):
    sampler = make_sampler(make_engine(model_path))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sampled(sampler, SAMPLED, num_each=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert sampled(sampler, SAMPLED, num_each=3) == first
    assert sampled(sampler, SAMPLED, num_each=3, seed=(1, 3)) != first
    assert len({tuple(response) for responses in first.values() for response in responses}) > len(first)


def test_samples_come_as_often_as_the_model_says(model_path):
    """Sample one token after one prompt 2,000 times, with temperature 0.8 and top_k 3, and compare the frequencies."""
    engine = make_engine(model_path)
    sampling = SamplingConfig(max_new_tokens=1, temperature=0.8, top_k=3)
    found = sampled(
        make_sampler(engine, max_sequences=1000, max_tokens=10**6), sampling, num_each=2000, prompts=[[5, 6]]
    )
    counts = np.bincount([response[0] for response in found[0]], minlength=64)
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval()
    with torch.no_grad():
        scores = plain(torch.tensor([[5, 6]])).logits[0, -1] / 0.8
    likeliest = scores.topk(3).indices
    expected = torch.softmax(scores[likeliest], 0).numpy()
    assert counts[likeliest.numpy()].sum() == 2000
    np.testing.assert_allclose(counts[likeliest.numpy()] / 2000, expected, atol=0.05)


def test_batches_keep_to_the_budget(model_path):
    sampler = make_sampler(make_engine(model_path), max_sequences=3, max_tokens=22)
    assert batch_sizes(sampler, [5, 5, 5, 1, 1, 1, 1]) == [2, 2, 3]
    assert batch_sizes(sampler, [40, 1]) == [1, 1]  # a batch has at least one response, even beyond the budget


def batch_sizes(sampler: Sampler, lengths: list[int]) -> list[int]:
    """Return the size of each batch: the number of rows in its first forward pass. A batch's responses come before the next batch
    runs, so the passes recorded since the previous batch's responses belong to one batch."""
    passes: list[int] = []
    sizes: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            passes.append(len(inputs[0]))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with sampler.weights():
            for _ in sampler.sample([[5] * length for length in lengths], 1, GREEDY, seed=(1, 2)):
                if passes:
                    sizes.append(passes[0])
                    passes.clear()
    finally:
        hook.remove()
    return sizes


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(2, limit_s=60.0) as ranks:
        yield ranks


@cache
def mesh_of(grid: str) -> ModelMesh | None:
    return ModelMesh.make(ModelPlacement("actor", ParallelGrid.parse(grid), (0, 1)), "cpu")


def sample_and_train(rank: int, path: str, dtype: str):
    """Each rank samples its own prompts, in its own batches. The parameters are whole only while a rank samples."""
    torch.set_num_threads(1)
    engine = make_engine(path, "d2", mesh_of("d2"), replace(TRAIN, dtype=dtype))
    sampler = make_sampler(engine, max_sequences=1 + rank)
    mine = PROMPTS[:3] if rank == 0 else PROMPTS[3:]
    first = sampled(sampler, GREEDY, prompts=mine)
    parts = {name: type(parameter.data).__name__ for name, parameter in engine.named_parameters().items()}
    logprobs = engine.logprobs(None, temperature=1.0)
    return first, sampled(sampler, GREEDY, prompts=mine), set(parts.values()), logprobs is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_data_ranks_have_parts_of(ranks, model_path, dtype):
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    for rank, (first, again, kinds, _) in enumerate(ranks.run(sample_and_train, model_path, dtype)):
        mine = PROMPTS[:3] if rank == 0 else PROMPTS[3:]
        assert first == again
        if dtype == "float32":
            assert first == {at: [greedy_one_by_one(plain, prompt)] for at, prompt in enumerate(mine)}
        assert kinds == {"DTensor"}


def make_stage_sampler(rank: int, path: str) -> str:
    engine = make_engine(path, "p2", mesh_of("p2"))
    with pytest.raises(ValueError, match="whole model") as error:
        make_sampler(engine)
    return str(error.value)


def test_a_stage_cannot_generate(ranks, model_path):
    assert all("not a pipeline stage" in text for text in ranks.run(make_stage_sampler, model_path))


# ---------------------------------------------------------------------------------------------------------- model workers

REWARD = """
from asyncrl.rewards.score import Score

def reward(prompt, completion, answer, finished):
    if answer == "raise":
        raise RuntimeError("no judgement")
    return Score((sum(map(ord, completion)) % 7) / 7 + finished, completion[:1] or None)

async def later(prompt, completion, answer):
    return 7.0
"""
ANSWERS = ["", "raise", "", "", "", "", "", ""]
TEXTS = ["12", "34", "567", "x" * 40, "8", "90", "11", "22"]


@pytest.fixture
def groups(tmp_path):
    """Prompts in the file's order. The second's reward raises, the fourth is too long, and the sixth is of the other task."""
    (tmp_path / "reward.py").write_text(REWARD)
    lines = [
        {"prompt": text, "answer": answer, "task": "b" if at == 5 else "a"}
        for at, (text, answer) in enumerate(zip(TEXTS, ANSWERS, strict=True))
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = PromptSourceConfig(str(tmp_path / "prompts.jsonl"), task_key="task", max_prompt_length=16, shuffle=False)
    tasks = {
        "a": TaskConfig(reward=f"{tmp_path}/reward.py:reward"),
        "b": TaskConfig(reward=f"{tmp_path}/reward.py:later"),
    }
    rollout = RolloutConfig(group_size=3, sampling=replace(SAMPLED, max_new_tokens=5), tasks=tasks)
    four = EvalSetConfig(
        prompts=prompts, modes=["sampled"], num_responses=4, sampling=replace(SAMPLED, max_new_tokens=2)
    )
    evaluation = EvalConfig(prompts=prompts, sets={"four": four})
    return GroupsConfig(prompts, evaluation, rollout, GenerationConfig(max_running_requests=4))


@pytest.mark.parametrize("grid", ["d1", "d2"])
def test_model_workers_make_groups_and_train_on_them(tmp_path, model_path, groups, grid):
    workers = list(range(ParallelGrid.parse(grid).size))
    models = [ModelConfig("actor", model_path, grid, workers, trainable=True, optimizer=TRAIN.optimizer)]
    mfcs = [mfc.placed("actor") for mfc in build_dataflow(TRAIN, "sync").mfcs.values()]
    record = RecordConfig(trajectories=True)
    locators = [Locator(0, position) for position in range(6)]

    async def scenario():
        async with training_side(models, mfcs, TRAIN, tmp_path, groups=groups, record=record) as side:
            replies = await side.make_groups(locators, version=0)
            assert [reply.ids for reply in replies] == [[meta.ticket_id for meta in r.metas] for r in replies]
            metas = sorted((meta for reply in replies for meta in reply.metas), key=lambda meta: meta.locator)
            rejected = {r.locator.position: r for reply in replies for r in reply.rejected}
            evaluated = await side.make_groups(locators[:3], version=0, eval_mode="greedy")
            of_set = await side.make_groups(locators[:1], version=0, eval_mode="sampled", eval_set="four")
            result = await side.step([meta.ticket_id for meta in metas], version=0)
            again = await side.make_groups([Locator(0, 6)], version=1)
            return metas, rejected, evaluated, of_set, result, again

    metas, rejected, evaluated, of_set, result, again = asyncio.run(scenario())

    assert [meta.locator.position for meta in metas] == [0, 2, 4, 5]
    assert {at: (r.reason, r.lengths != []) for at, r in rejected.items()} == {
        1: ("reward_error", True),
        3: ("prompt_too_long", False),
    }
    assert "no judgement" in rejected[1].detail
    first = WeightVersion(1, 0).pack()
    for meta in metas:
        assert len(meta.rewards) == 3
        assert set(meta.version_start) == set(meta.version_end) == {first}
        assert meta.head == meta.locator.position % len(workers)
        if meta.locator.position == 5:
            assert (meta.rewards, meta.task_id) == ([7.0] * 3, 1)
    judged = [meta for reply in evaluated for meta in reply.metas]
    assert sorted(meta.locator.position for meta in judged) == [0, 2]  # one response each; the other reward raises
    assert {len(meta.rewards) for meta in judged} == {1}
    assert [r.reason for reply in evaluated for r in reply.rejected] == ["reward_error"]
    (several,) = [meta for reply in of_set for meta in reply.metas]
    assert (len(several.rewards), max(several.response_lengths) <= 2, len(several.answers)) == (4, True, 4)
    assert any(several.answers)
    assert all(meta.answers == [] for meta in metas)  # only evaluations send answers
    assert [m.version_start for reply in again for m in reply.metas] == [[WeightVersion(1, 1).pack()] * 3]

    assert result.stats["actor/grad_norm"] > 0
    recorded = [read_trajectory(path).sample for path in list_recording(recording_dir(tmp_path, 1))]
    assert sorted(sample.ids[0] for sample in recorded) == sorted(meta.ticket_id for meta in metas)
    for sample in recorded:
        data = sample.data
        assert {"proximal_logprobs", "advantages", "trained_mask"} <= data.keys()  # wherever they were made
        assert not data["packed_logprobs"][~data["loss_mask"]].any()
        # The weights that sampled are the weights before the step, so the logprobs are those of the proximal policy
        expected = data["proximal_logprobs"][data["loss_mask"]]
        np.testing.assert_allclose(data["packed_logprobs"][data["loss_mask"]], expected, atol=1e-5)
        assert expected.all()
        for ids, mask, cut in zip(
            sample.slices("packed_input_ids")[0], sample.slices("loss_mask")[0], data["seq_no_eos_mask"], strict=True
        ):
            response = ids[mask]
            assert EOS not in response[:-1]
            assert bool(cut) == (response[-1] != EOS)
            assert len(response) <= 5
