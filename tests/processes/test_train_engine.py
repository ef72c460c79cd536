"""The training engine with a real tiny model: logprobs, the same update in any layout, weights on disk."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.engine import TrainEngine, learning_rate
from asyncrl.model.export import commit_model, take_share
from asyncrl.model.process_group import choose_device
from asyncrl.model.reallocate import reallocate
from asyncrl.model.self_check import compile_checked
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import side_files, write_part

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
    """-sum(advantage * logprob) / denominator, with statistics that are summed (tokens, entropy) and a maximum (length_max)."""

    def loss_fn(outputs, data, cu_seqlens):
        logprobs_T, entropy_T = outputs["logprobs"], outputs["entropy"]
        assert int(cu_seqlens[-1]) == len(logprobs_T) == len(data["packed_input_ids"])
        mask_T = data["loss_mask"]
        loss = -(data["advantages"] * logprobs_T)[mask_T].sum() / denominator
        return loss, {"tokens": mask_T.sum(), "entropy": entropy_T[mask_T].sum(), "length_max": cu_seqlens.diff().max()}

    return loss_fn


def plain_logprobs(model, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """The direct computation: one sequence, all logits."""
    tokens = torch.tensor(ids)[None]
    logits = model(input_ids=tokens).logits.float()[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def make_engine(path, train: TrainConfig = TRAIN, kind: str = "lm", *, trainable: bool = True) -> TrainEngine:
    return TrainEngine(ModelConfig("model", str(path), "d1", [0], kind, trainable, train.optimizer), train)


# --------------------------------------------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("max_tokens_per_mb", [10, 64, 16384])
@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_logprobs_equal_a_plain_forward_of_each_sequence(model_path, max_tokens_per_mb, temperature):
    sample = make_sample()
    engine = make_engine(model_path, replace(TRAIN, max_tokens_per_mb=max_tokens_per_mb), trainable=False)
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
    engine = make_engine(tmp_path, TRAIN)
    sample = make_sample(2)
    before = engine.logprobs(sample, temperature=1.0)
    engine.train_step(sample, policy_gradient(10.0), temperature=1.0, lr_step=0)
    assert not np.allclose(before, engine.logprobs(sample, temperature=1.0), atol=1e-4)


CHANGED_LOGITS = {
    "cohere": {"logit_scale": 0.1},
    "granite": {"logits_scaling": 8.0},
    "gemma3_text": {"final_logit_softcapping": 2.0, "head_dim": 8},
}


@pytest.fixture(params=CHANGED_LOGITS)
def changed_logits(request, tmp_path):
    """The folder of a model that changes its logits after the output layer. Its weights are large, so that a cap shows."""
    config = AutoConfig.for_model(
        request.param,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        initializer_range=0.5,
        **CHANGED_LOGITS[request.param],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_logits_that_are_scaled_or_capped_are_those_of_transformers(changed_logits):
    engine = make_engine(changed_logits)
    ids = make_sample().data["packed_input_ids"][:20]
    sample = SequenceSample.from_groups(["a"], [{"packed_input_ids": [ids], "advantages": [np.ones(20, np.float32)]}])

    def loss_fn(outputs, data, cu_seqlens):
        return outputs["logprobs"].sum() / 20, {}

    model = AutoModelForCausalLM.from_pretrained(changed_logits)
    expected = plain_logprobs(model, ids, 1.3)
    (expected.sum() / 20).backward()
    found = engine.logprobs(sample, temperature=1.3)
    np.testing.assert_allclose(found[1:], expected.detach().numpy(), rtol=0, atol=1e-5)
    stats = engine.try_step(sample, loss_fn, temperature=1.3)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_logits_that_are_changed_in_an_unknown_way_are_refused(changed_logits, monkeypatch):
    from transformers import CohereForCausalLM, Gemma3ForCausalLM, GraniteForCausalLM

    for kind in (CohereForCausalLM, Gemma3ForCausalLM, GraniteForCausalLM):
        forward = kind.forward

        def bent(self, *arguments, forward=forward, **options):
            output = forward(self, *arguments, **options)
            output.logits = output.logits + 0.2 * output.logits.square()
            return output

        monkeypatch.setattr(kind, "forward", bent)
    with pytest.raises(ConfigError, match="changes its logits after the output layer"):
        make_engine(changed_logits)


def test_a_value_model_from_a_causal_model_begins_with_zeros_and_learns(model_path):
    engine = make_engine(model_path, kind="value")
    sample = make_sample(2)

    def squared_error(outputs, data, cu_seqlens):
        mask = data["loss_mask"]
        return (outputs["values"] - data["advantages"])[mask].square().sum() / 50, {"tokens": mask.sum()}

    before = engine.values(sample)
    assert (before.dtype, before.shape) == (np.float32, sample.data["packed_input_ids"].shape)
    assert not before.any()
    losses = [engine.train_step(sample, squared_error, temperature=1.0, lr_step=i)["loss"] for i in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    names = set(engine.named_parameters())
    assert {"score.weight", "score.bias"} < names
    assert "lm_head.weight" not in names


def test_values_are_those_of_the_saved_value_model(model_path, tmp_path):
    config = AutoConfig.from_pretrained(model_path, num_labels=1)
    model = AutoModelForTokenClassification.from_pretrained(model_path, config=config).eval()
    model.save_pretrained(tmp_path)
    sample = make_sample(3)
    found = make_engine(tmp_path, kind="value", trainable=False).values(sample)
    with torch.no_grad():
        expected = [
            model(input_ids=torch.tensor(ids)[None]).logits[0, :, 0].numpy()
            for group in sample.slices("packed_input_ids")
            for ids in group
        ]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=2e-6)


@pytest.mark.parametrize("max_tokens_per_mb", [40, 16384])
def test_scores_are_those_of_the_saved_reward_model(model_path, tmp_path, max_tokens_per_mb):
    config = AutoConfig.from_pretrained(model_path, num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, config=config).eval()
    model.save_pretrained(tmp_path)
    sample = make_sample(3)
    train = replace(TRAIN, max_tokens_per_mb=max_tokens_per_mb)
    found = make_engine(tmp_path, train, kind="reward", trainable=False).scores(sample)
    with torch.no_grad():
        expected = [
            float(model(input_ids=torch.tensor(ids)[None]).logits)
            for group in sample.slices("packed_input_ids")
            for ids in group
        ]
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_reward_model_needs_its_output_layer_and_gives_scores_only(model_path):
    with pytest.raises(ConfigError, match=r"lack score\.weight"):
        make_engine(model_path, kind="reward", trainable=False)
    with pytest.raises(RuntimeError, match="'value' has no logprobs"):
        make_engine(model_path, kind="value").logprobs(make_sample(1), temperature=1.0)


def test_without_groups_there_are_no_outputs(model_path):
    assert make_engine(model_path).logprobs(None, temperature=1.0) is None


# --------------------------------------------------------------------------------------------------------------- training


def parameters_of(engine: TrainEngine) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in take_share(engine).items()}


def assert_same_parameters(found, expected, atol=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=atol, err_msg=name)


def plain_updates(model_path, sample: SequenceSample, steps: int, denominator: float) -> dict[str, np.ndarray]:
    """Compute the updates in plain torch, one sequence at a time. Every layout must give this result."""
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
@pytest.mark.parametrize("gradient_checkpointing", [False, True, "attention"])
def test_any_micro_batch_budget_gives_the_plain_update(
    model_path, expected_after_three_steps, max_tokens_per_mb, gradient_checkpointing
):
    train = replace(TRAIN, max_tokens_per_mb=max_tokens_per_mb, gradient_checkpointing=gradient_checkpointing)
    engine = make_engine(model_path, train)
    sample = make_sample()
    for step in range(3):
        stats = engine.train_step(sample, policy_gradient(50.0), temperature=1.0, lr_step=step)
    assert_same_parameters(parameters_of(engine), expected_after_three_steps)
    assert stats["tokens"] == sample.data["loss_mask"].sum()
    assert stats["length_max"] == max(n for lengths in sample.seqlens["packed_input_ids"] for n in lengths)
    assert stats["lr"] == 1e-3
    assert stats["skipped_steps"] == 0
    assert stats["grad_norm"] > 1  # the comparison covers clipping


class AttentionCalls(TorchDispatchMode):
    """Counts the forward passes of attention."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def test_backward_takes_the_kept_outputs_of_attention(model_path):
    def calls_of(choice) -> int:
        engine = make_engine(model_path, replace(TRAIN, gradient_checkpointing=choice))
        with AttentionCalls() as calls:
            engine.train_step(make_sample(), policy_gradient(50.0), temperature=1.0, lr_step=0)
        return calls.count

    once = calls_of(False)
    assert (calls_of(True), calls_of("attention")) == (2 * once, once)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
def test_compiled_layers_give_the_plain_update(model_path, expected_after_three_steps):
    """Forward and backward, in micro-batches of several lengths; compiled as for a GPU, but each operation runs by itself."""
    engine = make_engine(model_path, replace(TRAIN, max_tokens_per_mb=40))
    engine.compile_layers("aot_eager")
    for step in range(3):
        engine.train_step(make_sample(), policy_gradient(50.0), temperature=1.0, lr_step=step)
    assert_same_parameters(parameters_of(engine), expected_after_three_steps)


@pytest.mark.release  # the compiler for a CPU takes a minute
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own use of it
def test_code_of_inductor_gives_the_plain_update(model_path, expected_after_three_steps):
    engine = make_engine(model_path, TRAIN)
    compile_checked(engine, "actor", 1e-4)
    for step in range(3):
        engine.train_step(make_sample(), policy_gradient(50.0), temperature=1.0, lr_step=step)
    for name, found in parameters_of(engine).items():
        np.testing.assert_allclose(found, expected_after_three_steps[name], rtol=0, atol=1e-4, err_msg=name)


def run_out_of_memory(engine: TrainEngine, tokens: int) -> list[int]:
    """From now on the GPU "has room" for this many tokens in a micro-batch. Returns the list of micro-batches that are tried."""
    tried: list[int] = []

    def check(_, arguments):
        tried.append(arguments[0].shape[1])
        if tried[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine.model.model.layers[1].register_forward_pre_hook(check)
    return tried


@pytest.mark.parametrize("kind", ["lm", "reward"])
def test_inference_that_runs_out_of_memory_gives_the_same_with_half_of_the_tokens(model_path, tmp_path, caplog, kind):
    if kind == "reward":
        config = AutoConfig.from_pretrained(model_path, num_labels=1)
        AutoModelForSequenceClassification.from_pretrained(model_path, config=config).save_pretrained(tmp_path)
    engine = make_engine(model_path if kind == "lm" else tmp_path, kind=kind, trainable=kind == "lm")
    infer, sample = partial(engine.logprobs, temperature=0.7) if kind == "lm" else engine.scores, make_sample()
    expected = infer(sample)
    caplog.clear()
    tried = run_out_of_memory(engine, 40)
    np.testing.assert_allclose(infer(sample), expected, rtol=0, atol=1e-6)
    assert tried[0] > 40 >= max(tried[1:])
    (warning,) = [record.message for record in caplog.records]
    assert re.match(rf"micro-batch 1 of \d+ \({tried[0]} tokens in \d sequences\): CUDA out of memory", warning)
    tried.clear()
    infer(sample)  # does not try again what has failed
    assert 0 < max(tried) <= 40
    assert engine.where == ""


def test_inference_that_cannot_be_made_smaller_fails_and_so_does_training(model_path):
    engine, sample = make_engine(model_path), make_sample()
    tried = run_out_of_memory(engine, 10)  # half of the tokens are still too many
    with pytest.raises(torch.OutOfMemoryError):
        engine.logprobs(sample, temperature=1.0)
    assert len(tried) == 2
    one = make_sample(num_groups=1, group_size=1)
    with pytest.raises(torch.OutOfMemoryError):
        engine.logprobs(one, temperature=1.0)
    assert len(tried) == 3  # a single sequence is not tried again
    assert engine.where == f"micro-batch 1 of 1 ({one.data['packed_input_ids'].size} tokens in 1 sequence)"
    with pytest.raises(torch.OutOfMemoryError):
        engine.train_step(sample, policy_gradient(50.0), temperature=1.0, lr_step=0)
    assert len(tried) == 4  # a train step is not repeated


def test_an_offloaded_model_has_no_memory_and_trains_on_as_if_it_had_stayed(
    model_path, expected_after_three_steps, tmp_path
):
    engine, sample = make_engine(model_path), make_sample()
    for step in range(3):
        engine.train_step(sample, policy_gradient(50.0), temperature=1.0, lr_step=step)
        engine.offload()  # a model on the CPU has no other place than a file
        assert all(tensor.untyped_storage().nbytes() for tensor in tensors_of(engine))
        engine.offload(folder=tmp_path)
        engine.offload(folder=tmp_path)
        assert [tensor.untyped_storage().nbytes() for tensor in tensors_of(engine)] == [0] * len(tensors_of(engine))
        assert all(parameter.grad is None for parameter in engine.named_parameters().values())
        assert list(tmp_path.iterdir()) == []  # the file has no name, so it does not outlive the process
        logprobs = engine.logprobs(sample, temperature=1.0)  # moves the model back
        np.testing.assert_array_equal(engine.logprobs(sample, temperature=1.0), logprobs)
    assert_same_parameters(parameters_of(engine), expected_after_three_steps)


def tensors_of(engine: TrainEngine) -> list[torch.Tensor]:
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [*engine.named_parameters().values(), *states]


def test_a_loss_that_is_not_finite_skips_the_step(model_path):
    engine = make_engine(model_path)
    before = parameters_of(engine)
    bad = engine.train_step(make_sample(2), policy_gradient(math.nan), temperature=1.0, lr_step=0)
    assert_same_parameters(parameters_of(engine), before, atol=0)
    good = engine.train_step(make_sample(2), policy_gradient(50.0), temperature=1.0, lr_step=0)
    assert (bad["skipped_steps"], good["skipped_steps"], engine.skipped_steps) == (1.0, 0.0, 1)


class Stopping:
    """A loss function that returns `reason` as its reason to stop the step after a minibatch; "": it goes on."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, outputs, data, cu_seqlens):
        return policy_gradient(50.0)(outputs, data, cu_seqlens)

    def stop_reason(self, stats):
        assert stats["tokens"] > 0
        assert math.isfinite(stats["loss"])
        return self.reason


def test_a_loss_function_can_stop_the_step_once_it_has_seen_the_statistics(model_path):
    engine = make_engine(model_path)
    before = parameters_of(engine)
    stopped = engine.train_step(make_sample(2), Stopping("far from the behaviour policy"), temperature=1.0, lr_step=0)
    assert_same_parameters(parameters_of(engine), before, atol=0)
    assert (stopped["stopped_steps"], stopped["skipped_steps"]) == (1.0, 0.0)
    taken = engine.train_step(make_sample(2), Stopping(""), temperature=1.0, lr_step=0)
    assert taken["stopped_steps"] == 0.0
    assert not np.array_equal(parameters_of(engine)["model.norm.weight"], before["model.norm.weight"])


def test_norms_and_biases_do_not_decay(model_path):
    train = replace(TRAIN, optimizer=replace(TRAIN.optimizer, weight_decay=0.5))
    engine = make_engine(model_path, train)
    before = parameters_of(engine)
    engine.train_step(None, policy_gradient(1.0), temperature=1.0, lr_step=0)  # no gradient: only decay acts
    after = parameters_of(engine)
    for name, old in before.items():
        expected = old if old.ndim < 2 else old * (1 - 1e-3 * 0.5)
        np.testing.assert_allclose(after[name], expected, atol=1e-7, err_msg=name)


def test_a_frozen_model_refuses_to_train(model_path):
    with pytest.raises(RuntimeError, match="frozen"):
        make_engine(model_path, TRAIN, trainable=False).train_step(
            None, policy_gradient(1.0), temperature=1.0, lr_step=0
        )


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(model_path):
    sample = make_sample(3)
    exact = make_engine(model_path, TRAIN).logprobs(sample, temperature=1.0)
    engine = make_engine(model_path, replace(TRAIN, dtype="bfloat16"))
    found = engine.logprobs(sample, temperature=1.0)
    assert 0 < np.abs(found - exact).mean() < 0.02
    before = engine.named_parameters()["model.embed_tokens.weight"].detach().clone()
    engine.train_step(sample, policy_gradient(10.0), temperature=1.0, lr_step=0)
    assert before.dtype == torch.float32
    assert not torch.equal(before, engine.named_parameters()["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in take_share(engine).values()} == {torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------------- weights


def test_a_moving_average_keeps_steps_that_bfloat16_would_lose(model_path):
    """The actor stands a little above the average. In bfloat16 a hundredth of the way would be rounded away."""
    train = replace(TRAIN, dtype="bfloat16")
    actor = make_engine(model_path, train)
    config = ModelConfig("ema", str(model_path), "d1", [0], trainable=False, float32=True)
    average = TrainEngine(config, train)
    before = {name: tensor.detach().clone() for name, tensor in average.named_parameters().items()}
    with torch.no_grad():
        for tensor in actor.named_parameters().values():
            tensor.add_(1e-3)
    reallocate(actor, average, workers=[0], share=0.01)
    for name, tensor in average.named_parameters().items():
        moved = tensor.detach() - before[name]
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-5), rtol=0, atol=1e-6, msg=name)
    assert average.optimizer is None
    assert average.logprobs(make_sample(), temperature=1.0) is not None  # the logprob check scores a text with it


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_saved_models_load_in_transformers_and_hold_shared_weights_once(tmp_path, tie_embeddings):
    make_tiny_model(tmp_path / "in", hidden_size=32, intermediate_size=64, tie_embeddings=tie_embeddings)
    engine = make_engine(tmp_path / "in", TRAIN)
    sample = make_sample(2)
    engine.train_step(sample, policy_gradient(10.0), temperature=1.0, lr_step=0)
    tensors = take_share(engine)
    assert ("lm_head.weight" in tensors) is not tie_embeddings
    files = write_part(tmp_path / "out", tensors.items(), part=0, shard_bytes=10**9, fsync=False)
    commit_model(
        tmp_path / "out",
        files,
        config=engine.config,
        dtype=engine.dtype,
        sides=side_files(tmp_path / "in"),
        fsync=False,
    )
    again = make_engine(tmp_path / "out", TRAIN, trainable=False)
    expected = engine.logprobs(sample, temperature=1.0)
    np.testing.assert_array_equal(again.logprobs(sample, temperature=1.0), expected)


def test_a_snapshot_does_not_change_while_training_goes_on(model_path):
    engine = make_engine(model_path, TRAIN)
    snapshot = take_share(engine)
    before = {name: tensor.clone() for name, tensor in snapshot.items()}
    engine.train_step(make_sample(), policy_gradient(10.0), temperature=1.0, lr_step=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.items())
    after = take_share(engine)
    assert not any(torch.equal(tensor, after[name]) for name, tensor in snapshot.items())


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
    assert learning_rate(config, 99, 0) == 1.0  # the number of steps is unknown: no decay


def test_tf32_is_of_float32_matmuls_on_gpus_alone():
    matmul, on_cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul.fp32_precision
    try:
        choose_device(0, tf32=True)
        assert matmul.allow_tf32
        assert torch.backends.mkldnn.matmul.fp32_precision == on_cpu
    finally:
        choose_device(0)
    assert not matmul.allow_tf32
