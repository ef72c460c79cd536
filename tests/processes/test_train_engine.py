"""The training engine on a real tiny model: logprobs, the same update in any layout, weights on disk."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from asyncrl.config import OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.engine import TrainEngine, learning_rate
from asyncrl.model.logprobs import token_logprobs
from asyncrl.testing.tiny import make_tiny_model

TRAIN = TrainConfig(max_tokens_per_mb=64, logprob_chunk_tokens=16, optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0))


@pytest.fixture(autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=32, intermediate_size=64)
    return path


def make_sample(num_groups: int = 7, group_size: int = 3, seed: int = 0) -> SequenceSample:
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        lengths = rng.integers(3, 30, group_size)
        groups.append(
            {
                "packed_input_ids": [rng.integers(0, 64, n) for n in lengths],
                "loss_mask": [np.arange(n) >= 2 for n in lengths],
                "advantages": [rng.normal(size=n).astype(np.float32) for n in lengths],
                "task_ids": 0,
            }
        )
    return SequenceSample.from_groups([f"g{i}" for i in range(num_groups)], groups)


def policy_gradient(denominator: float):
    """-sum(advantage * logprob) / denominator, with statistics of both kinds."""

    def loss_fn(logprobs_T, entropy_T, data, cu_seqlens):
        assert not entropy_T.requires_grad
        assert int(cu_seqlens[-1]) == len(logprobs_T) == len(data["packed_input_ids"])
        mask_T = data["loss_mask"]
        loss = -(data["advantages"] * logprobs_T)[mask_T].sum() / denominator
        return loss, {"tokens": mask_T.sum(), "entropy": entropy_T[mask_T].sum(), "length_max": cu_seqlens.diff().max()}

    return loss_fn


def plain_logprobs(model, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """The obvious way: one sequence, all logits."""
    tokens = torch.tensor(ids)[None]
    logits = model(input_ids=tokens).logits.float()[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


# ------------------------------------------------------------------------------------------------------- chunked logprobs


def problem(num_tokens: int = 37, vocab: int = 50):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 8, generator=generator, requires_grad=True)
    layer = torch.nn.Linear(8, vocab, bias=False)
    torch.nn.init.normal_(layer.weight, generator=generator)
    return hidden, layer, torch.randint(0, vocab, (num_tokens,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_equal_the_plain_formula_in_value_and_gradient(chunk_tokens, temperature):
    hidden, layer, targets = problem()
    weights = torch.randn(37, generator=torch.Generator().manual_seed(1))
    logprobs, entropy = token_logprobs(hidden, layer, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    found = torch.autograd.grad((logprobs * weights).sum(), [hidden, layer.weight])
    all_logprobs = (layer(hidden) / temperature).log_softmax(-1)
    plain = all_logprobs.gather(-1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((plain * weights).sum(), [hidden, layer.weight])
    torch.testing.assert_close(logprobs, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, -(all_logprobs.exp() * all_logprobs).sum(-1).detach(), rtol=1e-6, atol=2e-6)
    assert not entropy.requires_grad
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=5e-6)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def test_no_tensor_of_all_tokens_and_the_whole_vocabulary_ever_exists():
    hidden, layer, targets = problem(num_tokens=256, vocab=999)
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(hidden, layer, targets, temperature=0.9, chunk_tokens=16)
        logprobs.sum().backward()
    assert largest.numel == 16 * 999


# --------------------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("max_tokens_per_mb", [10, 64, 16384])
@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_logprobs_equal_a_plain_forward_of_each_sequence(model_path, max_tokens_per_mb, temperature):
    sample = make_sample()
    engine = TrainEngine(model_path, replace(TRAIN, max_tokens_per_mb=max_tokens_per_mb), trainable=False)
    found = engine.logprobs(sample, temperature=temperature)
    assert found.dtype == np.float32
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        expected = [
            np.concatenate([[0.0], plain_logprobs(model, ids, temperature)])
            for ids_of_group in sample.slices("packed_input_ids")
            for ids in ids_of_group
        ]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=2e-6)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral"])
def test_other_architectures(tmp_path, architecture):
    make_tiny_model(tmp_path, architecture, hidden_size=32, intermediate_size=64, num_layers=1, tie_embeddings=False)
    engine = TrainEngine(tmp_path, TRAIN)
    sample = make_sample(2)
    before = engine.logprobs(sample, temperature=1.0)
    engine.train_step(sample, policy_gradient(10.0), temperature=1.0, lr_step=0)
    assert not np.allclose(before, engine.logprobs(sample, temperature=1.0), atol=1e-4)


def test_logits_that_are_changed_after_the_output_layer_are_refused(tmp_path):
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, logit_scale=0.1
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cohere"):
        TrainEngine(tmp_path, TRAIN)


# --------------------------------------------------------------------------------------------------------------- training


def parameters_of(engine: TrainEngine) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in engine.named_tensors()}


def assert_same_parameters(found, expected, atol=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=atol, err_msg=name)


def plain_updates(model_path, sample: SequenceSample, steps: int, denominator: float) -> dict[str, np.ndarray]:
    """Plain torch, one sequence at a time: what every layout must come to."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    config = TRAIN.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=0.0
    )
    for _ in range(steps):
        optimizer.zero_grad()
        keys = ("packed_input_ids", "loss_mask", "advantages")
        for group in zip(*(sample.slices(key) for key in keys), strict=True):
            for ids, mask, advantages in zip(*group, strict=True):
                logprobs = plain_logprobs(model, ids, 1.0)
                terms = torch.tensor(advantages[1:]) * logprobs * torch.tensor(mask[1:])
                (-terms.sum() / denominator).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected_after_three_steps(model_path):
    torch.set_num_threads(1)
    return plain_updates(model_path, make_sample(), 3, 50.0)


@pytest.mark.parametrize("max_tokens_per_mb", [1, 40, 16384])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_any_micro_batch_budget_gives_the_plain_update(
    model_path, expected_after_three_steps, max_tokens_per_mb, gradient_checkpointing
):
    train = replace(TRAIN, max_tokens_per_mb=max_tokens_per_mb, gradient_checkpointing=gradient_checkpointing)
    engine = TrainEngine(model_path, train)
    sample = make_sample()
    for step in range(3):
        stats = engine.train_step(sample, policy_gradient(50.0), temperature=1.0, lr_step=step)
    assert_same_parameters(parameters_of(engine), expected_after_three_steps)
    assert stats["tokens"] == sample.data["loss_mask"].sum()
    assert stats["length_max"] == max(n for lengths in sample.seqlens["packed_input_ids"] for n in lengths)
    assert stats["lr"] == 1e-3
    assert stats["skipped_steps"] == 0
    assert stats["grad_norm"] > 1  # so that the comparison covers clipping


def in_two_ranks(function) -> list:
    """function(rank, process group) on two threads, each a gloo rank of its own."""
    store = dist.HashStore()
    results: list = [None, None]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = function(rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)))
        except BaseException as error:
            results[rank] = error
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("cut", [3, 1, 0], ids=["4+3", "uneven", "empty head"])
def test_two_ranks_give_the_plain_update(model_path, expected_after_three_steps, cut):
    sample = make_sample()
    parts = [sample.select_ids(sample.ids[cut:]), sample.select_ids(sample.ids[:cut]) if cut else None]

    def train(rank, group):
        engine = TrainEngine(model_path, replace(TRAIN, max_tokens_per_mb=40 + 60 * rank), process_group=group)
        assert (engine.dp_rank, engine.dp_size) == (rank, 2)
        for step in range(3):
            stats = engine.train_step(parts[rank], policy_gradient(50.0), temperature=1.0, lr_step=step)
        return parameters_of(engine), stats, engine.all_reduce_sum([1.0, rank])

    (first, first_stats, sums), (second, second_stats, _) = in_two_ranks(train)
    assert_same_parameters(first, expected_after_three_steps)
    assert_same_parameters(second, first, atol=0)
    assert first_stats == second_stats
    assert first_stats["tokens"] == sample.data["loss_mask"].sum()
    assert sums.tolist() == [2.0, 1.0]


def test_a_loss_that_is_not_finite_skips_the_step_on_all_ranks(model_path):
    def train(rank, group):
        engine = TrainEngine(model_path, TRAIN, process_group=group)
        before = parameters_of(engine)
        denominator = math.nan if rank == 0 else 50.0
        stats = engine.train_step(make_sample(2, seed=rank), policy_gradient(denominator), temperature=1.0, lr_step=0)
        assert_same_parameters(parameters_of(engine), before, atol=0)
        good = engine.train_step(make_sample(2, seed=rank), policy_gradient(50.0), temperature=1.0, lr_step=0)
        return stats["skipped_steps"], good["skipped_steps"], engine.skipped_steps

    assert in_two_ranks(train) == [(1.0, 0.0, 1), (1.0, 0.0, 1)]


def test_norms_and_biases_do_not_decay(model_path):
    train = replace(TRAIN, optimizer=replace(TRAIN.optimizer, weight_decay=0.5))
    engine = TrainEngine(model_path, train)
    before = parameters_of(engine)
    engine.train_step(None, policy_gradient(1.0), temperature=1.0, lr_step=0)  # no gradient: what changes is decay
    after = parameters_of(engine)
    for name, old in before.items():
        expected = old if old.ndim < 2 else old * (1 - 1e-3 * 0.5)
        np.testing.assert_allclose(after[name], expected, atol=1e-7, err_msg=name)


def test_a_frozen_model_refuses_to_train(model_path):
    with pytest.raises(RuntimeError, match="frozen"):
        TrainEngine(model_path, TRAIN, trainable=False).train_step(
            None, policy_gradient(1.0), temperature=1.0, lr_step=0
        )


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(model_path):
    sample = make_sample(3)
    exact = TrainEngine(model_path, TRAIN).logprobs(sample, temperature=1.0)
    engine = TrainEngine(model_path, replace(TRAIN, dtype="bfloat16"))
    found = engine.logprobs(sample, temperature=1.0)
    assert 0 < np.abs(found - exact).mean() < 0.02
    before = engine.model.get_input_embeddings().weight.detach().clone()
    engine.train_step(sample, policy_gradient(10.0), temperature=1.0, lr_step=0)
    assert before.dtype == torch.float32
    assert not torch.equal(before, engine.model.get_input_embeddings().weight)
    assert {tensor.dtype for _, tensor in engine.named_tensors()} == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_saved_models_load_in_transformers_and_hold_shared_weights_once(tmp_path, tie_embeddings):
    make_tiny_model(tmp_path / "in", hidden_size=32, intermediate_size=64, tie_embeddings=tie_embeddings)
    engine = TrainEngine(tmp_path / "in", TRAIN)
    sample = make_sample(2)
    engine.train_step(sample, policy_gradient(10.0), temperature=1.0, lr_step=0)
    names = [name for name, _ in engine.named_tensors()]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) is not tie_embeddings
    engine.save(tmp_path / "out")
    again = TrainEngine(tmp_path / "out", TRAIN, trainable=False)
    expected = engine.logprobs(sample, temperature=1.0)
    np.testing.assert_array_equal(again.logprobs(sample, temperature=1.0), expected)


def test_a_snapshot_does_not_change_while_training_goes_on(model_path):
    engine = TrainEngine(model_path, TRAIN)
    snapshot = engine.named_tensors()
    before = {name: tensor.clone() for name, tensor in snapshot}
    engine.train_step(make_sample(), policy_gradient(10.0), temperature=1.0, lr_step=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot)
    after = dict(engine.named_tensors())
    assert not any(torch.equal(tensor, after[name]) for name, tensor in snapshot)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0: 0.2, 4: 1.0, 5: 1.0, 10: 0.55, 15: 0.1, 99: 0.1}),
        ("cosine", {0: 0.2, 5: 1.0, 10: 0.55, 15: 0.1}),
        ("constant", {0: 0.2, 5: 1.0, 99: 1.0}),
    ],
)
def test_learning_rate(schedule, expected):
    config = OptimizerConfig(lr=1.0, warmup_steps=5, min_lr_ratio=0.1, schedule=schedule)
    assert {step: learning_rate(config, step, 15) for step in expected} == pytest.approx(expected)
    assert learning_rate(config, 99, 0) == 1.0  # the end is not known: no decay
