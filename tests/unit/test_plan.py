"""Plans: the tracker on operations counted by hand, the assumed batches, the sum of a worker's models, and model FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature

import pytest
import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from asyncrl.architectures.attention import read_attention
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import (
    CriticConfig,
    ExperimentConfig,
    PPOConfig,
    PromptSourceConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
)
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import training_mfcs
from asyncrl.model import kernels
from asyncrl.model.attention import Segments, packed_attention
from asyncrl.model.flops import flops_of
from asyncrl.model.packing import SequenceBatch, prefixes_of
from asyncrl.model.sharding import Skeleton
from asyncrl.plan.batches import Load, load_of
from asyncrl.plan.counts import Cost, Moment, StepCounts, extrapolated, plus
from asyncrl.plan.layers import sampled_layers, set_layers
from asyncrl.plan.ranks import ShardPlan, ShardTask, _combined, plan_training
from asyncrl.plan.result import ModelStep, PlanError
from asyncrl.plan.shapes import ModelShape
from asyncrl.plan.shard import sample_of
from asyncrl.plan.tracker import REST, Tracker
from asyncrl.protocol.model_flops import delta_rule_flops
from tests.support.family_table import default_config

BLOCK = 4096  # 1000 float32 numbers, rounded up to 512 bytes


@pytest.fixture
def tracker():
    """Under it tensors are fake."""
    tracker = Tracker(rounding=512)
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        yield tracker


def test_a_storage_counts_from_its_birth_to_its_end(tracker):
    memory = tracker.memory
    first = torch.empty(1000)
    view = first[10:].view(-1, 10)  # no new storage
    assert memory.total == BLOCK
    second = first * 2
    assert (memory.total, memory.peak) == (2 * BLOCK, 2 * BLOCK)
    del first
    assert memory.total == 2 * BLOCK  # the view holds the storage
    del view, second
    assert (memory.total, memory.peak) == (0, 2 * BLOCK)
    memory.restart()
    assert memory.peak == 0


def test_a_storage_has_the_kind_of_its_span_until_it_gets_another(tracker):
    memory = tracker.memory
    with tracker.within("activations"):
        hidden = torch.empty(1000)
        with record_function("FSDP::all_gather (model.layers.0)"):
            sent = torch.empty(2000)
            with record_function("FSDP::all_gather_copy_out (model.layers.0)"):
                gathered = torch.empty(1000)
        other = torch.empty(1000)
    assert memory.moments[REST].at_peak == {"activations": 2 * BLOCK, "transfer": 8192, "gathered": BLOCK}
    del sent
    tracker.reclassify([other], "gradients")
    assert +memory.now == {"activations": BLOCK, "gradients": BLOCK, "gathered": BLOCK}
    assert memory.moments[REST].kinds["transfer"] == 8192  # each kind's own peak
    del hidden, gathered


def test_a_resized_storage_counts_with_its_new_size(tracker):
    tensor = torch.empty(1000)
    for size, expected in ((0, 0), (8000, 8192)):
        tensor.untyped_storage().resize_(size)
        tracker.resized(tensor.untyped_storage())
        assert tracker.memory.total == expected
    assert tracker.memory.peak == 8192


def test_flops_of_products_and_of_their_gradients(tracker):
    x, weight = torch.empty(3, 5, requires_grad=True), torch.empty(7, 5, requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()
    assert tracker.cost.flops == 3 * (2 * 3 * 5 * 7)  # forward, and two products in backward


def test_flops_and_workspace_of_attention_over_sequences(tracker, monkeypatch):
    """Sequences of 3 and 5 tokens, 2 query heads and 1 key head of width 8."""
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 16)
    query, key, value = (torch.empty(8, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (2, 1, 1))
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    asks = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}  # torch 2.11 does not
    out = varlen_attn(query, key, value, starts, starts, 5, 5, window_size=(-1, 0), **asks)
    forward = 4 * 2 * 8 * (3 * 3 + 5 * 5) // 2
    assert tracker.cost.flops == forward
    out.sum().backward()
    assert tracker.cost.flops == forward * 3.5
    padded = 8 + 2 * 128
    assert tracker.memory.moments[REST].kinds["workspace"] == 4 * 2 * padded * (32 + 1) + 2 * 8 * 2 * 8 * 2


def test_flops_of_attention_to_a_shared_prefix(tracker, monkeypatch):
    """A sequence of 5 tokens, and the last 2 of one of 5 tokens."""
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 16)
    query, key, value = (torch.empty(tokens, 2, 8, dtype=torch.bfloat16) for tokens in (7, 10, 10))
    starts, of_keys = (torch.tensor(each, dtype=torch.int32) for each in ([0, 5, 7], [0, 5, 10]))
    varlen_attn(query, key, value, starts, of_keys, 5, 5, window_size=(-1, 0))
    assert tracker.cost.flops == 4 * 2 * 8 * (5 * 5 / 2 + (5 * 5 - 3 * 3) / 2)


def test_both_kernels_of_attention_on_a_gpu_have_their_memory(tracker, monkeypatch):
    """Rectangles of long sequences have copies of queries, keys and values beside what the varlen kernel needs."""
    monkeypatch.setattr(kernels, "_planned_device_type", "cuda")
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 256)
    found = []
    for long_tokens in (math.inf, 0):
        tracker.memory.restart()
        inputs = [torch.empty(1, heads, 256, 32, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
        segments = Segments.of([64] * 4, long_tokens=long_tokens)
        packed_attention(nn.Module(), *inputs, None, segments=segments)[0].sum().backward()
        found.append(tracker.memory.moments[REST])
    varlen, rectangles = found
    assert varlen.kinds["workspace"] == rectangles.kinds["workspace"] > 0
    assert varlen.peak < rectangles.peak < varlen.peak + 3 * (4 + 2 + 2) * 256 * 32 * 2


def test_flops_of_the_delta_rule(tracker):
    """Two chunks of 64 tokens, 4 heads, keys of 16 and values of 24 values. Then as many FLOPs by hand."""
    query, key = (torch.empty(1, 128, 2, 16) for _ in range(2))
    value, gate, beta = torch.empty(1, 128, 4, 24), torch.empty(1, 128, 4), torch.empty(1, 128, 4)
    torch_chunk_gated_delta_rule(query, key, value, g=gate, beta=beta)
    of_token = 4 * (5 * 64 * 16 + 3 * 64 * 24 + 6 * 16 * 24)
    assert delta_rule_flops(4, 16, 24) == of_token
    assert tracker.cost.flops == 128 * of_token


def test_values_that_fake_tensors_lack_are_guessed(tracker):
    tensor = torch.empty(3, 4)
    assert (float(tensor[0, 0]), int(tensor.long()[0, 0]), bool(tensor.isnan().any())) == (1.0, 1, False)
    assert tensor.nonzero().shape == (12, 2)  # the most that there can be
    with pytest.raises(NotImplementedError, match=r"masked_select.*depends on values"):
        tensor.masked_select(tensor > 0)


def test_payloads_of_collectives(tracker):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        dist.all_reduce(torch.empty(10))
        dist.all_gather([torch.empty(5) for _ in range(4)], torch.empty(5))
        dist.send(torch.empty(3), 1)
    finally:
        dist.destroy_process_group()
    assert tracker.cost.counts == {"all_reduce": 1, "all_gather": 1, "send": 1}
    assert tracker.cost.bytes == {"all_reduce": 40, "all_gather": 80, "send": 12}


def test_each_moment_has_its_own_peak(tracker):
    memory = tracker.memory
    held = torch.empty(1000)
    memory.enter("forward")
    passing = torch.empty(2000)
    del passing
    with record_function("Optimizer.step#AdamW.step"):
        state = torch.empty(1000)
    del state
    assert {name: moment.peak for name, moment in memory.moments.items()} == {
        REST: 2 * BLOCK,  # before all others, and after the optimizer
        "forward": BLOCK + 8192,
        "the optimizer's step": 2 * BLOCK,
    }
    assert memory.moments["the optimizer's step"].at_peak == {"other": BLOCK, "optimizer": BLOCK}
    assert memory.peak == BLOCK + 8192
    del held


def test_counts_are_extrapolated_number_by_number():
    def counts(layers: int) -> StepCounts:
        cost = Cost(5 + layers, {"send": layers} if layers else {}, {"send": 8 * layers})
        return StepCounts(cost, {REST: Moment(100 - layers, {"logits": 100 - layers})})

    assert extrapolated(counts(0), counts(1), 6) == counts(7)
    assert plus(counts(3).cost, counts(1).cost, -2) == Cost(-4, {"send": 1}, {"send": 8})


# ------------------------------------------------------------------------------------------------------------------ batches


def config_of(**train) -> ExperimentConfig:
    rollout = RolloutConfig(group_size=4, sampling=SamplingConfig(max_new_tokens=1000))
    ppo = PPOConfig(minibatches=2)
    return ExperimentConfig(
        model_path="m", prompts=PromptSourceConfig(path="p"), rollout=rollout, train=TrainConfig(ppo=ppo, **train)
    )


@pytest.mark.parametrize(
    ("train", "grid", "expected"),
    [
        # 16 sequences of 1000 + 512 tokens, in 2 minibatches, on 2 data ranks: 4 sequences in one micro-batch
        ({"batch_size": 4, "max_tokens_per_mb": 16384}, "d2", Load(2, 1, [1512] * 4, full=False)),
        # the same tokens in micro-batches of 4000: two sequences and a shorter one
        ({"batch_size": 4, "max_tokens_per_mb": 4000}, "d2", Load(2, 2, [1512, 1512, 976])),
        # fewer micro-batches than stages: the pipeline splits the sequences
        ({"batch_size": 4, "max_tokens_per_mb": 4000}, "d2p4", Load(2, 4, [1512] * 4, full=False)),
        # a sequence that is longer than a micro-batch
        ({"batch_size": 4, "max_tokens_per_mb": 1000}, "d4", Load(2, 2, [1000])),
    ],
)
def test_a_batch_is_spread_over_ranks_and_minibatches(train, grid, expected):
    config = config_of(**train, share_prefix="off")
    (mfc,) = [mfc for mfc in training_mfcs(config.train) if mfc.name == "actor_train"]
    assert load_of(config, mfc, ParallelGrid.parse(grid)) == expected


@pytest.mark.parametrize(
    ("most", "grid", "expected", "tokens"),
    [
        # As above. The prompt of 512 tokens is once in the row of a group: 512 + 4 * 1000
        (16384, "d2", Load(2, 1, [1512] * 4, full=False, prefix=512, counts=[4]), 4512),
        (4512, "d2", Load(2, 1, [1512] * 4, full=False, prefix=512, counts=[4]), 4512),
        # Three sequences of the group, and 488 tokens of a fourth one behind the prompt: 6,048 of 5,536 tokens
        (4000, "d2", Load(2, 2, [1512, 1512, 1512, 1000], prefix=512, counts=[4]), 4000),
        # A group, and a sequence of another one
        (4600, "d1", Load(2, 2, [1512] * 4 + [88], prefix=512, counts=[4, 1]), 4600),
        # Two stages need two micro-batches, so the prompt is in both
        (4512, "d2p2", Load(2, 2, [1512] * 4, full=False, prefix=512, counts=[4]), 5024),
        # The prompt fills the micro-batch
        (512, "d2", Load(2, 4, [512]), 512),
    ],
)
def test_a_group_has_its_prompt_once_in_a_micro_batch(most, grid, expected, tokens):
    config = config_of(batch_size=4, max_tokens_per_mb=most, share_prefix="on", dtype="bfloat16")
    (mfc,) = [mfc for mfc in training_mfcs(config.train) if mfc.name == "actor_train"]
    load = load_of(config, mfc, ParallelGrid.parse(grid))
    assert load == expected
    assert load.row_tokens == tokens
    assert load.tokens - load.shared == load.repeats * tokens


@pytest.mark.parametrize(
    ("changes", "prompt", "copies"),
    [
        ({}, 512, [512] * 3),
        ({"share_prefix": "off"}, 512, []),
        ({"compile": "on"}, 512, []),
        ({"routes": "replay"}, 512, []),
        # Three of 4 * (1000 + prompt) tokens are less than 5 %, or not
        ({}, 71, []),
        ({}, 72, [72] * 3),
        ({"share_prefix": "on"}, 71, [71] * 3),
    ],
)
def test_auto_counts_a_prompt_once_where_the_run_shares_it(changes, prompt, copies):
    config = config_of(**{"batch_size": 4, "dtype": "bfloat16"} | changes)
    config = replace(config, prompts=replace(config.prompts, max_prompt_length=prompt))
    (mfc,) = [mfc for mfc in training_mfcs(config.train) if mfc.name == "actor_train"]
    assert load_of(config, mfc, ParallelGrid.parse("d2")).copies == copies


def test_sequences_of_a_planned_group_share_their_prompt_and_no_more():
    load = Load(2, 3, [5, 5, 5, 4], prefix=2, counts=[3, 1])
    sample = sample_of(load, 2, 3, ["packed_input_ids", "loss_mask"])
    assert sample.seqlens["packed_input_ids"] == [[5, 5, 5, 4] * 2] * 3
    batch = SequenceBatch.of(sample)
    assert [(one.sequences, one.tokens) for one in prefixes_of(batch, sum)] == [
        ((8 * group + first, 8 * group + first + 1, 8 * group + first + 2), 2) for group in range(3) for first in (0, 4)
    ]


@pytest.mark.parametrize(("mfc", "minibatches"), [("actor_train", 4), ("critic_train", 2)])
def test_actor_and_critic_pass_over_the_batch_as_often(mfc, minibatches):
    train = TrainConfig(
        batch_size=4,
        max_tokens_per_mb=16384,
        ppo=PPOConfig(minibatches=4, epochs=3),
        critic=CriticConfig(minibatches=2),
    )
    config = replace(config_of(), train=train)
    (node,) = [node for node in training_mfcs(train) if node.name == mfc]
    load = load_of(config, node, ParallelGrid())
    assert load.minibatches == 3 * minibatches
    assert load.tokens == 3 * 16 * 1512


# ------------------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    "family",
    ["lfm2", "lfm2_moe", "lfm3", "olmo_hybrid", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next"],
)
def test_the_shape_of_a_published_model_is_that_of_transformers(family):
    config = default_config(family)
    model = Skeleton.of(config, "lm", torch.float32).model
    layers = read_attention(model, family)
    shape, flops = ModelShape.from_config(config.to_dict()), flops_of(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.kv_values_per_token() == sum(n.num_key_heads * (n.key_width + n.value_width) for n in layers)
    assert shape.forward_flops(64, 64) == flops.of_batch([64]) - 2 * 64 * (not shape.tied) * shape.vocab * shape.hidden


def test_biases_count():
    for family, bias in (("qwen3_next", "attention_bias"), ("lfm2", "conv_bias")):
        config = default_config(family)
        setattr(config, bias, True)
        model = Skeleton.of(config, "lm", torch.float32).model
        shape = ModelShape.from_config(config.to_dict())
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------------------------- layers

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("grid", "pipe", "num_layers", "unit", "expected"),
    [
        ("d1", 0, 7, 1, None),  # 3 and 4 layers are not less
        ("d1", 0, 8, 1, (3, 4, 4)),
        ("p2", 0, 17, 1, (3, 4, 5)),  # 9 layers
        ("p2", 1, 17, 1, (3, 4, 4)),
        ("d2", 0, 19, 2, (7, 9, 5)),  # FSDP gathers two layers at once, and one in the end
        ("d2", 0, 15, 2, None),
        ("d2", 0, 15, 15, (3, 4, 11)),  # FSDP gathers the whole model at once
    ],
)
def test_a_large_stage_is_planned_from_two_smaller_ones(monkeypatch, grid, pipe, num_layers, unit, expected):
    config = AutoConfig.for_model("qwen3", **TINY, num_hidden_layers=num_layers)
    model = Skeleton.of(config, "lm", torch.float32).model
    of_layer = sum(parameter.numel() for parameter in model.base_model.layers[0].parameters())
    monkeypatch.setattr("asyncrl.model.sharding.UNIT_ELEMENTS", unit * of_layer)
    size = ParallelGrid.parse(grid).size
    task = ShardTask(ModelConfig("actor", "m", grid, list(range(size))), pipe, [], {}, TrainConfig(), "cuda")
    assert sampled_layers(task, model) == expected


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 2}),
    ],
)
def test_a_model_with_different_layers_is_planned_in_full(model_type, more):
    config = AutoConfig.for_model(model_type, **TINY, num_hidden_layers=10, **more)
    model = Skeleton.of(config, "lm", torch.float32).model
    task = ShardTask(ModelConfig("actor", "m", "d1", [0]), 0, [], {}, TrainConfig(), "cuda")
    assert sampled_layers(task, model) is None


@pytest.mark.parametrize(
    ("grid", "num_layers", "expected"),
    [
        ("d1", 20, None),  # 8 and 12 layers are not less
        ("d1", 24, (8, 12, 3)),  # three layers of linear attention and one of attention repeat
        ("d1", 26, (10, 14, 3)),
        ("p2", 48, (8, 12, 3)),
        ("p2", 44, None),  # the second stage would begin with another layer
    ],
)
def test_a_hybrid_is_planned_from_two_numbers_of_periods(grid, num_layers, expected):
    config = AutoConfig.for_model("qwen3_5_text", **TINY, num_hidden_layers=num_layers)
    model = Skeleton.of(config, "lm", torch.float32).model
    size = ParallelGrid.parse(grid).size
    for stage in range(ParallelGrid.parse(grid).num_stages):
        task = ShardTask(ModelConfig("actor", "m", grid, list(range(size))), stage, [], {}, TrainConfig(), "cuda")
        assert sampled_layers(task, model) == expected


def test_a_model_gets_fewer_layers():
    config = AutoConfig.for_model("qwen3_moe", **TINY, num_hidden_layers=10, num_experts=4, moe_intermediate_size=16)
    set_layers(config, 3)
    model = Skeleton.of(config, "lm", torch.float32).model
    assert len(model.base_model.layers) == 3


# ------------------------------------------------------------------------------------------------------------------ workers


def shard_plan(model: str, mfc: str, peak: int, resident: int) -> ShardPlan:
    step = ModelStep(model, mfc, peak, {"logits": peak}, {"logits": peak}, 1, {}, 1, 1, "backward of the last layer")
    return ShardPlan([step], load_peak=resident + 5, loaded=resident, resident={"parameters": resident}, in_transit=7)


@pytest.mark.parametrize(
    ("offloaded", "peak", "parameters", "mfc"),
    [(set(), 140, 40, "actor_train"), ({"ref"}, 120, 0, "ref_inf")],
)
def test_a_worker_holds_the_resident_bytes_of_its_other_models(offloaded, peak, parameters, mfc):
    plans = {"actor": shard_plan("actor", "actor_train", 100, 60), "ref": shard_plan("ref", "ref_inf", 60, 40)}
    plan = _combined([3, 4], names=["actor", "ref"], plans=plans, offloaded=offloaded)
    # actor_train with the reference's 40, ref_inf with the actor's 60
    assert plan.peak == max(100 + parameters, 60 + 60) == peak
    assert plan.kinds["logits"] == 100
    assert plan.peak_in == f"{mfc}, backward of the last layer"
    assert (plan.worker, plan.stands_for, len(plan.steps)) == (3, [3, 4], 2)
    assert plan.load_peak == 60 + 45  # one after another
    assert plan.export_peak == 60 + parameters + 7


def test_a_config_that_cannot_be_planned_is_refused():
    config = config_of(batch_size=4)
    with pytest.raises(PlanError, match="mode=sync"):
        plan_training(replace(config, mode="sync", allocation="d1"))
    with pytest.raises(PlanError, match=r"train.mfcs=\['m:f'\]"):
        plan_training(replace(config, train=replace(config.train, mfcs=["m:f"])))
    with pytest.raises(PlanError, match=r"allocation=transformers.d1\+d1x2"):
        plan_training(replace(config, allocation="transformers.d1+d1x2"))
    with pytest.raises(PlanError, match="model_path"):
        plan_training(replace(config, model_path=""))


# -------------------------------------------------------------------------------------------------------------- model FLOPs

QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def test_model_flops_of_qwen3_06b_agree_with_published_utilisation():
    """prime-rl's MFU of Qwen3-0.6B on one H100 (989e12): 23.7 % at 25.5k tokens/s, and 26.8 % at 10.1k tokens/s, imply 9.2e9
    FLOPs a token in sequences of 16k tokens, and 26.1e9 in sequences of 64k."""
    config = AutoConfig.for_model("qwen3", **QWEN3_0_6B)
    flops = flops_of(Skeleton.of(config, "lm", torch.float32).model)
    for length, expected in ((16384, 9.2e9), (65536, 26.1e9)):
        assert flops.of_batch([length], trains=True) / length == pytest.approx(expected, rel=0.05)
    assert flops.of_batch([10]) * 3 == flops.of_batch([10], trains=True)


def test_a_token_of_a_mixture_of_experts_uses_its_share_of_the_experts():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **experts, head_dim=8)
    skeleton = Skeleton.of(config, "lm", torch.float32)
    whole = sum(parameter.numel() for parameter in skeleton.model.parameters())
    of_experts = 8 * 3 * 32 * 16
    assert flops_of(skeleton.model).num_parameters == whole - of_experts * 6 // 8
