"""The plan of a run, by hand-computed numbers: sizes of models, servers, times, processes that do not fit, remedies, layouts."""

import json
from dataclasses import replace
from functools import partial

import msgspec
import pytest
import yaml

from asyncrl.cli import checks as table
from asyncrl.cli import planning
from asyncrl.cli.commands import plan as plan_command
from asyncrl.cli.commands.plan import PlanReport
from asyncrl.cli.commands.run import refuse_too_large
from asyncrl.cli.main import main
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ConfigError, LoraConfig
from asyncrl.dataflow.axes import MATRICES, TOKENS, ParallelGrid
from asyncrl.dataflow.topology import Allocation, allocation_of
from asyncrl.launch.checks import checklist
from asyncrl.launch.checks.checklist import Case, Check
from asyncrl.launch.checks.gpus import Gpu
from asyncrl.launch.experiment import load_experiment
from asyncrl.model.logprobs import _BLOCK_LOGITS
from asyncrl.plan import bounds, ranks
from asyncrl.plan import layouts as layouts_module
from asyncrl.plan.bounds import Placed, generation_time, receive_time, sharing_of, step_times
from asyncrl.plan.capacity import gib, placed_models, plan_run
from asyncrl.plan.devices import DEVICES, Device, device_named, library_bytes
from asyncrl.plan.estimate import estimate_ranks
from asyncrl.plan.generation import plan_server, sglang_memory_fraction
from asyncrl.plan.host import plan_host
from asyncrl.plan.layouts import better_split, search_layouts
from asyncrl.plan.remedies import MOST_PLANS, changed, find_remedies
from asyncrl.plan.result import Collective, ModelStep, PlanError, RankPlan
from asyncrl.plan.shapes import ModelShape
from asyncrl.plan.speeds import LOAD_BYTES, REACHED
from tests.pages import ROOT

GIB = 1 << 30
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
MISTRAL_7B = LLAMA_8B | {"model_type": "mistral", "vocab_size": 32000}
MIXTRAL = MISTRAL_7B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_SMALL = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_MOE = QWEN3_SMALL | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
LINEAR = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN3_NEXT = LINEAR | {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
QWEN35_9B = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": LINEAR
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "layer_types": [*3 * ["linear_attention"], "full_attention"] * 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 12288,
        "vocab_size": 248320,
    },
}
LFM2_1B = {  # LFM2-1.2B
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "block_ff_dim": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "vocab_size": 65536,
    "tie_embedding": True,
}
STATE = 4 * 8192 * 2 + 32 * 128 * 128 * 4  # bytes of a layer's state: the convolution in bfloat16, the rest in float32
YAML = """\
model_path: {folder}
allocation: sglang.d2p1m1+d4p1m1
prompts: {{path: p.jsonl}}
rollout: {{group_size: 8, sampling: {{max_new_tokens: 1024}}, tasks: {{default: {{reward: "m:f"}}}}}}
train: {{batch_size: 16, algorithm: grpo, max_tokens_per_mb: 16384}}
"""
TOY = Device("toy", memory=80 * GIB, flops=1e15, memory_bandwidth=1e12, link=1e11, network=1e10)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A config of a model that consists of its config.json."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    (folder / "run.yaml").write_text(YAML.format(folder=folder))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def load(file):
    """Return a function that returns the config with overrides. It reads the file once, because that takes long. Prompts are not
    shared unless a test says so."""
    config = changed(load_experiment(file), [("train.share_prefix", "off")])

    def changed_by(*overrides):
        pairs = [override.partition("=")[::2] for override in overrides]
        return resolve(changed(config, [(path, yaml.safe_load(value)) for path, value in pairs]), Facts(on_gpu=True))

    return changed_by


def rank(**sizes):
    """A rank that holds nothing but these bytes."""
    return RankPlan(
        0, ["actor"], [0, 1, 2, 3], sum(sizes.values()), sizes, sizes, [], 0, 0, "actor_inf, forward of the last layer"
    )


def step(flops=0, **collectives):
    calls = {name: Collective(1, size) for name, size in collectives.items()}
    return ModelStep("actor", "actor_train", 0, {}, {}, flops, calls, flops // 2, 100)


# ----------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (QWEN_7B, 7_615_616_512, 7_615_616_512),
        (LLAMA_8B, 8_030_261_248, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096, 7_241_732_096),
        (QWEN3_SMALL, 596_049_920, 596_049_920),
        (QWEN3_MOE, 30_532_122_624, 3_353_032_704),
        (MIXTRAL, 46_702_792_704, 12_879_925_248),
        (QWEN3_NEXT, 79_674_391_296, 3_874_929_408),
        (QWEN35_9B, 8_953_803_264, 8_953_803_264),
        (LFM2_1B, 1_170_340_608, 1_170_340_608),
    ],
)
def test_the_parameters_of_published_models(config, parameters, active):
    shape = ModelShape.from_config(config)
    assert shape.parameters == parameters
    assert shape.active_parameters == active
    assert shape.parameters_of_rank(1) == parameters


def test_tensor_ranks_divide_weights_and_heads():
    shape = ModelShape.from_config(QWEN_7B)
    assert shape.kv_values_per_token() * 2 == 2 * 28 * 4 * 128 * 2 == 57_344  # bytes in bfloat16
    assert shape.kv_values_per_token(4) * 4 == shape.kv_values_per_token()
    assert shape.kv_values_per_token(8) == shape.kv_values_per_token(4)  # at least one head on each rank
    norms = 28 * 2 * 3584 + 3584
    assert shape.replicated_parameters == norms
    assert shape.parameters_of_rank(4) == norms + (7_615_616_512 - norms) // 4
    keys = 28 * 2 * 4 * 128 * (3584 + 1)  # each head on two of eight ranks
    assert shape.parameters_of_rank(8) == norms + (7_615_616_512 - norms + keys) // 8


def test_the_flops_of_a_forward_pass():
    shape = ModelShape.from_config(QWEN_7B)
    matmuls = 2 * (7_615_616_512 - 152_064 * 3584)  # the embedding is looked up
    assert shape.forward_flops(10, 5) == 10 * (matmuls + 4 * 28 * 3584 * 3)  # a token attends to (5 + 1) / 2 tokens
    tied = ModelShape.from_config(QWEN3_SMALL)
    assert tied.forward_flops(1, 1) == 2 * 596_049_920 + 4 * 28 * 2048


def test_layers_with_a_state_keep_no_keys_and_attend_to_no_tokens():
    shape = ModelShape.from_config(QWEN35_9B)
    assert (shape.attention_layers, shape.state_layers) == (8, 24)
    assert shape.kv_values_per_token() == 2 * 8 * 4 * 256
    assert shape.state_bytes(2) == 24 * STATE
    assert shape.state_bytes(2, 4) * 4 == shape.state_bytes(2)
    of_state = 24 * 32 * (64 * 8 * 128 + 6 * 128 * 128)  # linear in the tokens
    matmuls = 2 * (8_953_803_264 - 248_320 * 4096) + of_state
    assert shape.forward_flops(10, 5) == 10 * (matmuls + 4 * 8 * 4096 * 3)
    assert ModelShape.from_config(QWEN3_NEXT).kv_values_per_token() == 2 * 12 * 2 * 256
    assert ModelShape.from_config(LFM2_1B).state_bytes(2) == 10 * 3 * 2048 * 2
    assert not shape.serves_on(32)  # 16 heads of keys


def test_a_hybrid_says_which_layers_have_attention():
    with pytest.raises(KeyError, match="layer_types"):
        ModelShape.from_config({name: value for name, value in LFM2_1B.items() if name != "full_attn_idxs"})


def test_an_unknown_family_is_refused():
    with pytest.raises(
        PlanError, match=r"model_type='gpt2': its sizes are not known; use one of lfm2, .*llama, mistral"
    ):
        ModelShape.from_config({"model_type": "gpt2"})
    with pytest.raises(PlanError, match=r"model_path='/none': its config\.json does not give the model's sizes"):
        ModelShape.of("/none")


def test_the_headers_of_the_files_give_the_parameters(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    header = json.dumps({"w": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    assert ModelShape.of(str(tmp_path)).parameters == 6


# ---------------------------------------------------------------------------------------------------------------- servers


@pytest.mark.parametrize(
    ("kind", "tensor", "args", "fraction"),
    [
        ("h100-80g", 1, {}, 0.835),  # 512 + 8192 * 1.5 + 256 * 2 + 128 of 81559 MiB
        ("h100-80g", 4, {}, 0.824),  # 512 * 2 for the graphs of a batch of 512, 4 * 128 for the ranks
        ("rtx4090-24g", 1, {}, 0.847),  # 512 + 2048 * 1.5 + 24 * 2 + 128 of 24564 MiB
        ("h100-80g", 1, {"chunked-prefill-size": "2048", "cuda-graph-max-bs": "8"}, 0.874),  # at least 10 GiB
        ("h100-80g", 1, {"mem-fraction-static": "0.5"}, 0.5),
    ],
)
def test_the_memory_that_sglang_takes(kind, tensor, args, fraction):
    assert sglang_memory_fraction(DEVICES[kind].memory, tensor, args) == fraction


def test_requests_of_an_sglang_server(load):
    shape = ModelShape.from_config(QWEN_7B)
    args = "generation.server_args={mem-fraction-static: '0.5', page-size: '16'}"
    server = plan_server(load(args, "generation.max_running_requests=200"), shape, TOY)
    assert (server.count, server.gpus, server.block_tokens, server.block_bytes) == (2, 1, 16, 16 * 57_344)
    assert server.weights == 2 * 7_615_616_512
    room = (80 * GIB - library_bytes(communicates=False)) // 2 - server.weights
    assert server.blocks == room // (16 * 57_344)
    assert server.request_tokens == 2048  # 1024 of the prompt and 1024 of the response
    assert server.requests == server.blocks // 128
    assert server.remark == ""
    more = plan_server(load(args, "generation.max_running_requests=1000"), shape, TOY)
    assert more.remark == (
        f"generation.max_running_requests=1000: the KV cache of a server holds {server.requests} requests of 2,048 tokens, so it "
        "runs fewer of that length at the same time"
    )
    few = plan_server(load("generation.server_args={max-total-tokens: '4096'}"), shape, TOY)
    assert (few.blocks, few.requests) == (4096, 2)
    with pytest.raises(PlanError, match=r"generation\.server_args\.page-size='big': must be a number"):
        plan_server(load("generation.server_args={page-size: big}"), shape, TOY)


def test_an_8_bit_cache_holds_twice_as_many_tokens(load):
    shape, half = ModelShape.from_config(QWEN_7B), "mem-fraction-static: '0.5'"
    of_16_bits = plan_server(load(f"generation.server_args={{{half}}}"), shape, TOY)
    of_8_bits = plan_server(load(f"generation.server_args={{{half}, kv-cache-dtype: fp8_e4m3}}"), shape, TOY)
    assert of_8_bits.kv_token * 2 == of_16_bits.kv_token
    assert of_8_bits.blocks // 2 == of_16_bits.blocks
    assert abs(of_8_bits.memory - of_16_bits.memory) < of_16_bits.block_bytes


def test_requests_of_the_embedded_engine(load):
    shape = ModelShape.from_config(QWEN_7B)
    overrides = ["allocation=transformers.d2+d1", "generation.num_blocks=100", "generation.page_size=32"]
    server = plan_server(load(*overrides), shape, TOY)
    assert (server.blocks, server.requests) == (100, 1)  # 64 blocks a request
    assert server.memory == 2 * 7_615_616_512 + 100 * 32 * 57_344 + library_bytes(communicates=False)
    assert plan_server(load("mode=sync", "allocation=d4"), shape, TOY) is None


def test_a_server_holds_eta_and_two_adapters_and_the_one_that_is_being_loaded(load):
    """By hand: of a layer q and o have 2 * 7168 inputs and outputs, k and v 2 * 4096, the MLP 3 * 22528."""
    shape, of_rank_1 = ModelShape.from_config(QWEN_7B), 28 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    all_linear, changes = LoraConfig(rank=12), ("manager.max_head_offpolicyness=2", "generation.num_blocks=100")

    def planned(lora, engine, *more):
        config = load(*changes, f"allocation={engine}.d2+d1", *more)
        return plan_server(replace(config, train=replace(config.train, lora=lora)), shape, TOY)

    base, room = planned(None, "transformers"), planned(None, "vllm")
    assert base.adapters == room.adapters == 0
    for mode, held in (("abort", 1), ("finish", 5)):
        interrupt = f"generation.interrupt={mode}"
        plan = planned(all_linear, "transformers", interrupt)
        assert plan.adapters == held * 4 * 12 * of_rank_1  # in float32
        assert plan.memory == base.memory + plan.adapters
        # vLLM reserves room for a rank of 16, in all linear layers, in bfloat16. Its cache has the rest
        plan = planned(LoraConfig(rank=12, targets=["q_proj"]), "vllm", interrupt)
        assert plan.adapters == held * 2 * 16 * of_rank_1
        assert abs((room.blocks - plan.blocks) * plan.block_bytes - plan.adapters) < plan.block_bytes
    some = planned(LoraConfig(rank=12, targets=["q_proj", "mlp.down_proj"]), "transformers")
    assert some.adapters == 4 * 12 * 28 * (7168 + 22528)
    assert planned(all_linear, "transformers", "weights.transport=broadcast").received == 4 * 12 * of_rank_1


def test_experts_and_layers_with_a_state_have_no_adapters():
    moe, hybrid = ModelShape.from_config(QWEN3_MOE), ModelShape.from_config(QWEN35_9B)
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    assert moe.adapter_parameters(1, ["all-linear"]) == 48 * attention
    assert moe.adapter_parameters(1, ["gate_proj"]) == 0
    of_q = hybrid.adapter_parameters(1, ["q_proj"])
    assert of_q == hybrid.attention_layers * (
        hybrid.hidden + 2 * hybrid.heads * hybrid.head_dim
    )  # queries and their gate


@pytest.mark.parametrize("config", [QWEN3_NEXT, QWEN35_9B])
def test_the_embedded_engine_has_one_state_for_each_running_request(load, config):
    shape = ModelShape.from_config(config)
    overrides = ["allocation=transformers.d2+d1", "generation.num_blocks=4096", "generation.page_size=32"]
    server = plan_server(load(*overrides, "generation.max_running_requests=40"), shape, TOY)
    kv_token, states = shape.attention_layers * 2 * shape.kv_heads * 256 * 2, 40 * shape.state_layers * STATE
    assert (server.kv_token, server.states, server.requests, server.remark) == (kv_token, states, 40, "")
    libraries = library_bytes(communicates=False)
    assert server.memory == 2 * shape.parameters + 4096 * 32 * kv_token + states + libraries


def test_sglang_divides_its_memory_between_states_and_cache(load):
    """SGLang 0.5: as 9 to 10, and three states for a running request, because prefixes have some."""
    shape, state = ModelShape.from_config(QWEN35_9B), 24 * STATE
    half = "mem-fraction-static: '0.5'"
    server = plan_server(load(f"generation.server_args={{{half}}}", "generation.max_running_requests=200"), shape, TOY)
    room = (80 * GIB - library_bytes(communicates=False)) // 2 - server.weights
    num_states = int(room * 0.9 / 1.9) // state
    assert server.states == num_states * state
    assert server.blocks == (room - server.states) // 32_768
    assert server.requests == server.running(2048) == num_states // 3
    assert server.remark.startswith(
        f"generation.max_running_requests=200: the states of a server hold {num_states // 3}"
    )
    apart = [
        f"generation.server_args={{{half}}}",
        "generation.max_running_requests=20",
        "generation.prefix_sharing=false",
    ]
    assert plan_server(load(*apart), shape, TOY).states == 20 * state
    few = f"generation.server_args={{{half}, max-mamba-cache-size: '30'}}"
    assert (plan_server(load(few), shape, TOY).states, plan_server(load(few), shape, TOY).requests) == (30 * state, 10)


# ------------------------------------------------------------------------------------------------------------------ times


def test_the_time_in_which_a_rank_receives():
    d4, m4 = Placed(ParallelGrid.parse("d4")), Placed(ParallelGrid.parse("m4"))
    assert receive_time("data all_gather", Collective(9, 10**11), d4, TOY) == pytest.approx(
        0.75
    )  # all but its own quarter
    assert receive_time("tensor all_reduce", Collective(9, 10**11), m4, TOY) == pytest.approx(1.0)
    assert receive_time("pipe recv", Collective(9, 10**11), Placed(ParallelGrid.parse("p2")), TOY) == pytest.approx(1.0)
    assert receive_time("pipe send", Collective(9, 10**11), d4, TOY) == 0
    d16 = Placed(ParallelGrid.parse("d16"), num_hosts=2)  # a host receives half, through eight adapters
    assert receive_time("data all_gather", Collective(9, 16 * 10**10), d16, TOY) == pytest.approx(15 / 10)
    slow = replace(TOY, link=1e13)
    assert receive_time("data all_gather", Collective(9, 16 * 10**10), d16, slow) == pytest.approx(1.0)
    wide = Placed(ParallelGrid.parse("d8m2"), num_hosts=2)  # two tensor groups of the host receive
    assert receive_time("data all_gather", Collective(9, 16 * 10**10), wide, slow) == pytest.approx(2.0)
    assert receive_time("tensor all_gather", Collective(9, 16 * 10**10), wide, TOY) == pytest.approx(0.8)  # on one host
    copies = Placed(ParallelGrid.parse("d8r2"), num_hosts=2)  # each copy has a host
    assert receive_time("data all_gather", Collective(9, 16 * 10**10), copies, TOY) == pytest.approx(1.4)
    assert receive_time("copy all_reduce", Collective(9, 10**10), copies, TOY) == pytest.approx(1.0)
    assert receive_time("copy_data all_reduce", Collective(9, 10**10), copies, TOY) == pytest.approx(1 / 8)
    split = Placed(ParallelGrid.parse("d16e4"), num_hosts=2)  # groups of four within a host, their peers on both
    assert receive_time("expert all_to_all", Collective(9, 10**11), split, TOY) == pytest.approx(0.75)
    assert receive_time("peers all_gather", Collective(9, 16 * 10**10), split, TOY) == pytest.approx(4.0)


def test_a_pipeline_waits_until_it_is_full():
    times = step_times(step(10**15, **{"pipe recv": 10**11}), Placed(ParallelGrid.parse("d2p4")), 16, TOY)
    assert times == (pytest.approx(19 / 16), pytest.approx(19 / 16))
    assert step_times(step(10**15), Placed(ParallelGrid.parse("d4")), 16, TOY) == (1, 0)


def test_the_time_of_a_step(load):
    config = load()  # async: 2 servers, 4 ranks
    ranks = [replace_steps(rank(parameters=1), [step(2 * 10**15, **{"data all_gather": 4 * 10**11}), step(10**14)])]
    plan = plan_run(config, TOY, lambda config: ranks)
    assert plan.time.training_s == pytest.approx(3.0 + 0.1)  # the first one receives for longer than it computes
    assert plan.time.receiving_s == pytest.approx(3.0)
    assert plan.time.mfu == pytest.approx(1.05e15 / (3.1 * 1e15))
    inference = msgspec.structs.replace(step(10**14), mfc="actor_inf")  # takes time, and is no training
    with_inference = [replace_steps(ranks[0], [*ranks[0].steps, inference])]
    assert plan_run(config, TOY, lambda config: with_inference).time.mfu == pytest.approx(1.05e15 / (3.2 * 1e15))
    assert plan.time.step_s == max(plan.time.training_s, plan.time.generation_s)
    in_turns = plan_run(load("manager.max_head_offpolicyness=0"), TOY, lambda config: ranks).time
    assert in_turns.step_s == in_turns.training_s + in_turns.generation_s


@pytest.mark.parametrize("model", [QWEN_7B, QWEN35_9B])
@pytest.mark.parametrize(("group", "prompt", "response"), [(8, 512, 1024), (16, 512, 64)])
def test_a_shared_prompt_saves_tokens_and_flops(load, model, group, prompt, response):
    shape = ModelShape.from_config(model)
    lengths = f"rollout.sampling.max_new_tokens={response}"
    config = load(f"rollout.group_size={group}", lengths, "train.share_prefix='on'")
    sharing = sharing_of(config, shape, 0)
    whole, copies = group * (prompt + response), (group - 1) * prompt
    assert (sharing.is_on, sharing.tokens) == (True, copies / whole)
    saved = shape.forward_flops(copies, prompt)
    assert sharing.flops == pytest.approx(saved / shape.forward_flops(whole, prompt + response))
    auto = load(f"rollout.group_size={group}", lengths, "train.share_prefix='auto'")
    assert sharing_of(auto, shape, 0) == sharing
    off = load(f"rollout.group_size={group}", lengths)
    assert sharing_of(off, shape, 0) == msgspec.structs.replace(sharing, is_on=False)
    assert sharing_of(off, shape, response // 2).tokens == copies / (group * (prompt + response // 2))
    assert sharing_of(load("rollout.group_size=1", "train.algorithm=ppo"), shape, 0) is None


@pytest.mark.parametrize("share", ["auto", "on"])
def test_a_mean_response_shortens_what_is_behind_a_shared_prompt(load, share):
    shape, config = (
        ModelShape.from_config(QWEN_7B),
        load(f"train.share_prefix={share!r}", "train.max_tokens_per_mb=6000"),
    )
    ranks = [replace_steps(rank(parameters=1), [step(10**15, **{"data all_gather": 10**8})])]
    full, short = (plan_run(config, TOY, lambda config: ranks, mean_response=mean) for mean in (0, 256))
    group = {response: shape.forward_flops(8 * (512 + response), 512 + response) for response in (256, 1024)}
    copies = shape.forward_flops(7 * 512, 512)
    share = (group[256] - copies) / (group[1024] - copies)
    assert short.time.training_s == pytest.approx(share * full.time.training_s)
    assert short.time.receiving_s == pytest.approx(full.time.receiving_s * (512 + 8 * 256) / (512 + 8 * 1024))
    assert short.sharing.flops > full.sharing.flops


@pytest.mark.parametrize("share", ["auto", "on"])
def test_an_estimate_counts_a_shared_prompt_once(load, share):
    """A rank has 32 sequences. A micro-batch has room for a group in 512 + 8 * 1024 tokens and seven sequences of another one, so
    there are three micro-batches."""
    shape = ModelShape.from_config(QWEN_7B)
    (ranks,) = estimate_ranks(load(f"train.share_prefix={share!r}"))
    (inference,) = [step for step in ranks.steps if step.mfc == "actor_inf"]
    tokens, copies = 3 * 15 * 1536, 3 * 13 * 512
    assert (inference.tokens, inference.shared) == (tokens, copies)
    assert inference.model_flops == int(shape.forward_flops(tokens, 1536) - shape.forward_flops(copies, 512))


def test_an_estimate_of_a_hybrid_counts_its_states_on_each_tensor_rank(load, monkeypatch):
    """Two tensor ranks compute the same states, each with the values that the rule's backward pass needs."""
    hybrid = ModelShape.from_config(QWEN35_9B)
    attends = replace(hybrid, state_layers=0, state=None, stored=hybrid.parameters - 24 * 67_403_968)
    found = {}
    for shape in (hybrid, attends):
        monkeypatch.setattr(ModelShape, "of", lambda path, shape=shape: shape)
        (found[shape],) = estimate_ranks(load("allocation=sglang.d2+m2", "train.gradient_checkpointing=true"))
    with_state, without = (rank.steps[0] for rank in found.values())
    of_state = 16_384 * 4 * 32 * (15 * 128 + 11 * 128 + 280)
    assert with_state.at_peak["activations"] - without.at_peak["activations"] == of_state
    parameters = [each.at_peak["parameters"] for each in found.values()]
    assert parameters[0] - parameters[1] == 4 * 24 * 67_403_968  # whole, and not their half
    rule = 24 * 32 * (64 * 8 * 128 + 6 * 128 * 128)
    in_full = with_state.tokens * (2 * 24 * 67_403_968 + rule)
    others = with_state.tokens * shape_flops(hybrid) - in_full
    assert with_state.flops == pytest.approx(others / 2 + in_full)
    assert with_state.model_flops == pytest.approx((others + in_full) / 2)


def shape_flops(shape):
    return shape.forward_flops(1536, 1536) / 1536


def test_the_time_of_generation(load):
    shape = ModelShape.from_config(QWEN_7B)
    config = load("generation.max_running_requests=32")  # 64 requests for each of 2 servers
    server = plan_server(config, shape, TOY)
    read = 1024 * 2 * server.weights + 64 * 1024 * (512 + 512) * 57_344  # prompts of 512 tokens
    assert generation_time(config, shape, server, TOY, 1024) == pytest.approx(read / 1e12)
    slow = replace(TOY, flops=1e12)
    tokens = 64 * 1024 + 8 * 512  # one prompt a group
    assert generation_time(config, shape, server, slow, 1024) == pytest.approx(shape.forward_flops(tokens, 1536) / 1e12)


def test_the_embedded_engine_computes_the_prompt_of_a_hybrid_for_each_request(load):
    shape, slow = ModelShape.from_config(QWEN35_9B), replace(TOY, flops=1e12)
    config = load("allocation=transformers.d2+d1", "generation.max_running_requests=64", "generation.num_blocks=100000")
    server = plan_server(config, shape, TOY)
    tokens = 64 * (1024 + 512)
    assert generation_time(config, shape, server, slow, 1024) == pytest.approx(shape.forward_flops(tokens, 1536) / 1e12)
    moved = 64 * 1024 * ((512 + 512) * 32_768 + 2 * 24 * STATE)  # a state is read and written
    assert generation_time(config, shape, server, TOY, 1024) == pytest.approx((1024 * server.weights + moved) / 1e12)
    for none in ("generation.prefix_sharing=false", "generation.interrupt=in_place"):
        assert not plan_server(load(none), ModelShape.from_config(QWEN_7B), TOY).shares_prefixes
    assert plan_server(load(), shape, TOY).shares_prefixes  # SGLang keeps states of prefixes


def test_the_expected_time_is_the_bound_over_the_share_that_real_steps_reach(load):
    ranks = [replace_steps(rank(parameters=1), [step(10**15)])]
    for name, training in (("h100-80g", 0.4), ("h200-141g", 0.3)):
        for eta, together in ((1, max), (0, lambda *times: sum(times))):
            time = plan_run(load(f"manager.max_head_offpolicyness={eta}"), DEVICES[name], lambda config: ranks).time
            assert time.expected_training_s == pytest.approx(time.training_s / training)
            assert time.expected_generation_s == pytest.approx(time.generation_s / 0.8)
            assert time.expected_step_s == together(time.expected_training_s, time.expected_generation_s)


def test_the_share_of_the_h200_is_the_measured_one():
    record = json.loads((ROOT / "benchmarks/gpu/2026-11-27.json").read_text())
    cases = {entry["case"]: entry["seconds"] for entry in record["step"]}
    device = DEVICES["h200-141g"]
    (step_s,) = [entry for entry in record["second"]["step"] if entry["name"] == "1.7B, 16k, checkpointing: step"]
    assert round(step_s["planned"] / step_s["value"], 2) == REACHED[device.name].training
    loads = [entry["note"] for entry in record["second"]["generate"] if entry["name"].startswith("load_weights")]
    assert min(float(note.partition(" ")[0]) for note in loads) == LOAD_BYTES / 1e9
    for case, flops, share in (("1.7B", 5.742e14, 0.31), ("0.6B", 3.429e14, 0.23)):  # planned
        measured = cases[f"{case}, 2 x 16384 tokens, no checkpointing"]
        assert round(flops / device.flops / measured, 2) == share
    assert set(REACHED) <= set(DEVICES)


def test_servers_run_as_many_requests_as_fit_at_their_mean_length(load):
    shape = ModelShape.from_config(QWEN_7B)
    config = load("generation.server_args={max-total-tokens: '4096'}")  # two requests of 2,048 tokens
    server = plan_server(config, shape, TOY)
    assert (server.requests, server.running(512 + 512), server.running(512 + 128)) == (2, 4, 6)
    weights = 1024 * 64 / 4 * server.weights  # 64 requests, four at a time
    assert generation_time(config, shape, server, TOY, 1024) * 1e12 == pytest.approx(
        weights + 64 * 1024 * 1024 * 57_344
    )
    weights = 256 * 64 / 6 * server.weights
    assert generation_time(config, shape, server, TOY, 256) * 1e12 == pytest.approx(weights + 64 * 256 * 640 * 57_344)


def test_a_mean_response_shortens_training_and_generation_but_no_memory(load):
    shape, config = ModelShape.from_config(QWEN_7B), load("train.max_tokens_per_mb=4096")
    ranks = [replace_steps(rank(parameters=1), [step(10**15, **{"data all_gather": 10**8})])]
    full = plan_run(config, TOY, lambda config: ranks)
    short = plan_run(config, TOY, lambda config: ranks, mean_response=256)
    assert (full.time.response_tokens, short.time.response_tokens) == (1024, 256)
    share = shape.forward_flops(768, 768) / shape.forward_flops(1536, 1536)
    assert short.time.training_s == pytest.approx(share * full.time.training_s)
    assert short.time.receiving_s == pytest.approx(full.time.receiving_s / 2)
    one_micro_batch = plan_run(load(), TOY, lambda config: ranks, mean_response=256)  # gathers parameters all the same
    assert one_micro_batch.time.receiving_s == pytest.approx(full.time.receiving_s)
    assert short.time.mfu == pytest.approx(full.time.mfu)
    assert short.time.generation_s < full.time.generation_s / 4
    assert (short.peak, short.server) == (full.peak, full.server)


def replace_steps(plan, steps):
    return msgspec.structs.replace(plan, steps=steps)


def test_the_hosts_of_a_model(load):
    config = load("allocation=sglang.d4p1m2+d8p1m1+ref_inf:d2p1m1", "train.ppo.kl_coef=0.1")
    placed = placed_models(config, allocation_of(config))
    assert {name: entry.num_hosts for name, entry in placed.items()} == {"actor": 1, "ref": 1}
    config = load("allocation=sglang.d4p1m1+d8p1m1")
    assert placed_models(config, allocation_of(config))["actor"].num_hosts == 2
    config = load("allocation=sglang.d2p1m1@0-1+d2p1m1@7-8")
    assert placed_models(config, allocation_of(config))["actor"].num_hosts == 2


def test_servers_that_the_mode_does_not_start_have_no_gpus(load):
    config = load("allocation=sglang.d1+d8", "mode=train_only")
    plan = plan_run(config, TOY, lambda config: [rank(parameters=1)])
    assert (plan.num_devices, plan.server) == (8, None)
    assert placed_models(config, allocation_of(config))["actor"].num_hosts == 1  # not on GPUs 1 to 8
    assert plan_host(config).num_hosts == 1
    named = load("allocation=sglang.d2@0-1+d2@6-7")
    assert plan_run(named, TOY, lambda config: [rank(parameters=1)]).num_devices == 8


# --------------------------------------------------------------------------------------------------------------- shortages


def test_a_rank_that_does_not_fit(load):
    libraries = library_bytes(communicates=True)
    room = TOY.memory - libraries
    for size, count, fails in ((room + 1, 1, True), (room, 1, False), (int(0.9 * TOY.memory) - libraries, 0, False)):
        plan = plan_run(load(), TOY, lambda config, size=size: [rank(optimizer=size - GIB, activations=GIB)])
        assert [shortage.fails for shortage in plan.shortages] == [fails] * count
        assert plan.fits is not fails
        assert plan.peak == size + libraries
    plan = plan_run(load(), TOY, lambda config: [rank(optimizer=90 * GIB, activations=GIB)])
    (shortage,) = plan.shortages
    assert shortage.stands_for == [f"model_worker/{index}" for index in range(4)]
    assert (
        shortage.text
        == "optimizer 90.0 GiB, libraries 1.1 GiB, activations 1.0 GiB in actor_inf, forward of the last layer"
    )
    loading = msgspec.structs.replace(rank(optimizer=GIB), load_peak=100 * GIB)
    (shortage,) = plan_run(load(), TOY, lambda config: [loading]).shortages
    assert shortage.text == "tensors 100.0 GiB, libraries 1.1 GiB while the models are loaded"


def test_a_server_that_does_not_fit(load):
    small = replace(TOY, memory=16 * GIB)  # the weights alone are 14.2 GiB
    plan = plan_run(load(), small, lambda config: [rank(optimizer=GIB)])
    (shortage,) = plan.shortages
    assert (shortage.process, shortage.fails) == ("generation_server/0", True)
    assert shortage.text.startswith("weights 14.2 GiB")
    assert plan_run(load(), TOY, lambda config: [rank(optimizer=GIB)]).shortages == []  # SGLang always fills its GPU
    config = load("allocation=transformers.d2+d4", "generation.num_blocks=40000")
    (shortage,) = plan_run(config, TOY, lambda config: [rank(optimizer=GIB)]).shortages
    assert shortage.text == "KV cache 68.4 GiB, weights 14.2 GiB, libraries 0.6 GiB"


def test_the_buckets_of_a_broadcast_are_counted(load):
    """The embedding has 152,064 * 3,584 parameters in bfloat16, more than weights.bucket_bytes."""
    bucket, libraries = 2 * 152_064 * 3584, library_bytes(communicates=True)
    of_set = lambda config: [rank(optimizer=GIB)]  # noqa: E731
    plan = plan_run(load("weights.transport=broadcast"), TOY, of_set)
    assert [(each.worker, each.stands_for, each.broadcast) for each in plan.ranks] == [
        (0, [0], 3 * bucket),  # it sends one of its own, and receives into two
        (1, [1, 2, 3], bucket),
    ]
    assert [plan.needed(each) for each in plan.ranks] == [GIB + libraries + count * bucket for count in (3, 1)]
    tight = plan_run(load("weights.transport=broadcast"), TOY, lambda config: [rank(optimizer=69 * GIB)])
    (shortage,) = tight.shortages
    assert (shortage.stands_for, "broadcast 3.0 GiB" in shortage.text) == (["model_worker/0"], True)
    roomy = plan_run(load("weights.transport=broadcast", "weights.bucket_bytes=2000000000"), TOY, of_set)
    assert roomy.ranks[1].broadcast == 2 * 10**9
    for none in ("weights.transport=disk", "weights.broadcast_backend=gloo"):
        assert plan_run(load("weights.transport=broadcast", none), TOY, of_set).ranks == of_set(None)


def test_an_embedded_engine_holds_the_weights_that_it_receives_beside_those_in_use(load):
    shape, overrides = ModelShape.from_config(QWEN_7B), ("allocation=transformers.d2+d4", "generation.num_blocks=100")
    from_disk = plan_server(load(*overrides), shape, TOY)
    broadcast = plan_server(load(*overrides, "weights.transport=broadcast"), shape, TOY)
    assert broadcast.memory == from_disk.memory + 2 * 7_615_616_512
    assert broadcast.weights == from_disk.weights
    assert plan_server(load("weights.transport=broadcast"), shape, TOY).received == 0  # SGLang loads each bucket


def test_the_main_memory_of_the_fullest_host(load):
    parameters = 7_615_616_512
    host = plan_host(load("manager.max_head_offpolicyness=1"))
    assert host.num_hosts == 1
    assert host.parts["a checkpoint"] == 12 * parameters
    assert host.parts["weight versions"] == 2 * parameters
    assert host.parts["SGLang"] == 2 * 2 * GIB
    of_token = 8 + 4 + 1 + 1 + 8 + 4 + 4 + 1
    assert host.parts["trajectories"] == 2 * 16 * 8 * (512 + 1024) * of_token  # two batches of groups of 8
    assert host.memory == sum(host.parts.values())
    # Two servers and four ranks, which read the files once together
    assert (host.read, host.read_by_process) == ((2 + 1) * 2 * parameters, 2 * parameters)
    apart = plan_host(load("allocation=sglang.d4m2+d8"))  # the servers fill the first host
    assert (apart.num_hosts, "SGLang" in apart.parts, apart.parts["a checkpoint"]) == (2, False, 12 * parameters)
    split = plan_host(load("allocation=sglang.d4+d12"))
    assert split.parts["a checkpoint"] == 12 * parameters * 8 // 12
    frozen = plan_host(load("train.ppo.kl_coef=0.1", "train.offload=[ref]"))
    each = 2 * parameters / 4 / (256 << 20)
    assert frozen.parts["ref, offloaded"] == 4 * -(-each // 1) * (256 << 20)


# ---------------------------------------------------------------------------------------------------------------- remedies


def paced(config, *, static=40, of_tokens=1.0, frozen=0):
    """Ranks whose memory follows the config: GiB of static bytes for 4 ranks, and of activations for 16,384 tokens."""
    grid = allocation_of(config).training[0].grids[0][1]
    train = config.train
    kept = (
        of_tokens
        * train.max_tokens_per_mb
        / 16384
        / grid.parts(MATRICES)
        * {True: 0.25, "attention": 0.5, False: 1}[train.gradient_checkpointing]
    )
    sizes = {
        "optimizer": int(static * GIB * 4 / grid.size),
        "activations": int(kept * GIB),
        "parameters": 0 if "ref" in train.offload else frozen * GIB,
    }
    steps = [step(), msgspec.structs.replace(step(), model="ref", mfc="ref_inf")] if frozen else [step()]
    return [replace_steps(rank(**sizes), steps)]


def remedies(config, planner):
    plan = plan_run(config, TOY, planner)
    tried = []

    def tracked(config):
        tried.append(config)
        return plan_run(config, TOY, planner)

    found = find_remedies(config, plan, tracked)
    assert len(tried) <= MOST_PLANS
    return [" ".join(remedy.overrides) for remedy in found]


def test_remedies_are_the_smallest_changes_that_fit(load):
    without = load("train.gradient_checkpointing=false")
    assert remedies(without, partial(paced, of_tokens=48)) == [
        "train.max_tokens_per_mb=8192",
        "train.gradient_checkpointing=true",
    ]
    assert remedies(without, partial(paced, of_tokens=100)) == [
        "train.max_tokens_per_mb=4096",
        "train.gradient_checkpointing=true",
    ]
    kept = load("train.gradient_checkpointing=attention")
    assert remedies(kept, partial(paced, of_tokens=90)) == [
        "train.max_tokens_per_mb=8192",
        "train.gradient_checkpointing=true",
    ]
    with_ref = load("train.ppo.kl_coef=0.1", "train.gradient_checkpointing=true")
    assert remedies(with_ref, partial(paced, frozen=50)) == ["train.offload=[ref]"]


def test_changes_are_combined_or_ranks_are_added_where_no_small_change_suffices(load):
    without = load("train.gradient_checkpointing=false")
    together = "train.max_tokens_per_mb=2048 train.gradient_checkpointing=true"
    assert remedies(without, partial(paced, static=77, of_tokens=60)) == [together]
    assert remedies(load(), partial(paced, static=100)) == ["allocation=sglang.d2p1m1+d8p1m1"]
    assert remedies(load("allocation=sglang.d2p1m1@0-1+d4p1m1@2-5"), partial(paced, static=100)) == []


def test_a_change_that_does_not_fit_is_not_proposed(load):
    assert remedies(load(), lambda config: [rank(other=100 * GIB)]) == []

    def refuses(config):
        if allocation_of(config).num_model_workers > 4:
            raise PlanError("too many")
        return paced(config, static=100)

    assert remedies(load(), refuses) == []


def test_remedies_of_servers(load):
    config = load("allocation=transformers.d2+d4", "generation.num_blocks=60000")
    (found,) = remedies(config, paced)
    name, _, blocks = found.partition("=")
    server = plan_server(config, ModelShape.from_config(QWEN_7B), TOY)
    assert name == "generation.num_blocks"
    assert 0 <= (TOY.memory - server.memory + (60000 - int(blocks)) * server.block_bytes) < server.block_bytes
    small = replace(TOY, memory=16 * GIB)
    plan = plan_run(load(), small, partial(paced, static=1))
    found = find_remedies(load(), plan, lambda config: plan_run(config, small, partial(paced, static=1)))
    assert [remedy.overrides for remedy in found] == [["allocation=sglang.d1p1m2+d4p1m1"]]
    assert not ModelShape.from_config(QWEN_7B).serves_on(8)  # 28 heads
    assert ModelShape.from_config(LLAMA_8B).serves_on(16)  # two ranks hold the same head of keys and values


# ----------------------------------------------------------------------------------------------------------------- layouts


def test_layouts_use_all_gpus_and_are_sorted_by_time(load):
    planned = []

    def planner(config):
        planned.append(config.allocation)
        return plan_run(config, DEVICES["h100-80g"], estimate_ranks)

    layouts = search_layouts(load(), 8, DEVICES["h100-80g"], planner)
    grids = {allocation.rpartition("+")[2] for allocation in planned}
    assert (len(grids), len(planned)) == (
        1,
        2,
    )  # two that fit are enough: one grid of training with d2 and with m2 as servers
    most = len(planned)
    assert [layout.planned for layout in layouts] == [True] * most + [False] * (len(layouts) - most)
    assert all(layout.fits for layout in layouts[:most])
    times = [float(f"{layout.time.expected_step_s:.3g}") for layout in layouts[most:]]
    assert times == sorted(times)
    for layout in layouts:
        allocation = Allocation.parse(layout.allocation)
        assert allocation.num_devices == 8
        (devices,) = allocation.training
        assert devices.grids[0][1].parts(MATRICES) in (1, 2, 4)  # 28 heads, 4 of keys and values
        assert allocation.generation.replica_size in (1, 2, 4)
    with pytest.raises(PlanError, match="--gpus 1: no layout with the engine of allocation=sglang"):
        search_layouts(load(), 1, TOY, planner)


def test_a_model_of_8b_trains_on_131_072_tokens_with_context_ranks(tmp_path):
    """The activations of one sequence nearly fill a GPU. Half of them leave room."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 131_072}))
    (tmp_path / "run.yaml").write_text(YAML.format(folder=tmp_path))
    long = (
        "allocation=sglang.d1+d8",
        "train.max_tokens_per_mb=131072",
        "rollout.sampling.max_new_tokens=130048",
        "generation.num_blocks=8192",
    )
    offline = ("mode=train_only", "replay.path=recordings", "eval.prompts=null", "train.gradient_checkpointing=true")
    config = resolve(load_experiment(tmp_path / "run.yaml", [*long, *offline]), Facts(on_gpu=True))
    device = DEVICES["h100-80g"]
    best, *_ = layouts = search_layouts(config, 8, device, lambda config: plan_run(config, device, estimate_ranks))
    assert (best.allocation, best.fits, best.tight) == ("sglang.d1p1m1+d4p1m1c2", True, False)
    of_grids = {layout.allocation.partition("+")[2]: layout for layout in layouts}
    assert of_grids["d8p1m1"].tight
    assert of_grids["d4p1m2"].time.receiving_s > 1.5 * best.time.receiving_s
    assert of_grids["d1p1m1c8"].peak < of_grids["d2p1m1c4"].peak < best.peak


def of_30b_a3b(tmp_path, load, *settings):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | {"max_position_embeddings": 40_960}))
    (tmp_path / "run.yaml").write_text(YAML.format(folder=tmp_path))
    return resolve(load_experiment(tmp_path / "run.yaml", [*OFFLINE, *settings]), Facts(on_gpu=True))


OFFLINE = (
    "mode=train_only",
    "replay.path=recordings",
    "eval.prompts=null",
    "train.gradient_checkpointing=true",
    "train.share_prefix=off",
)


def test_the_layouts_of_30b_a3b_on_8_gpus(tmp_path, load):
    """Split experts save the gathers of experts: with few tokens in a micro-batch they are most of the traffic."""
    few = of_30b_a3b(tmp_path, load, "allocation=sglang.d1+d8", "train.max_tokens_per_mb=2048")
    device = DEVICES["h100-80g"]
    layouts = search_layouts(few, 8, device, lambda config: plan_run(config, device, estimate_ranks))
    of_grids = {layout.allocation.partition("+")[2]: layout for layout in layouts}
    assert {"d8p1m1", "d8p1m1e2", "d8p1m1e8", "d4p1m1c2e8"} <= {*of_grids}
    assert not any("m2" in grid or "m4" in grid for grid in of_grids)
    plain, split = of_grids["d8p1m1"], of_grids["d8p1m1e8"]
    assert split.time.receiving_s < 0.4 * plain.time.receiving_s
    assert split.peak < plain.peak
    assert layouts[0].fits
    assert "e" in layouts[0].allocation.partition("+")[2]


@pytest.mark.parametrize(
    ("grid", "dense", "peers", "exchanged"), [("d8", 1, 0, 0), ("d8e8", 0, 0, 1), ("d8e2", 0, 1, 1)]
)
def test_the_traffic_of_split_experts(tmp_path, load, grid, dense, peers, exchanged):
    """By hand: 128 experts of 3 * 2048 * 768 parameters in each of 48 layers, and 8 of a token."""
    (rank,) = estimate_ranks(of_30b_a3b(tmp_path, load, f"allocation=sglang.d1+{grid}"))
    step = next(step for step in rank.steps if step.mfc == "actor_train")
    experts, hidden, layers, value = 48 * 128 * 3 * 2048 * 768, 2048, 48, 2
    shape, found = ModelShape.from_config(QWEN3_MOE), step.collectives
    calls = found["data all_gather"].count // (2 * layers)  # micro-batches, in two passes
    assert found["data all_gather"].bytes == 2 * calls * value * (shape.parameters - (not dense) * experts)
    assert found["data reduce_scatter"].bytes == calls * 4 * (shape.parameters - (not dense) * experts)
    assert ("peers all_gather" in found) == bool(peers)
    if peers:
        assert found["peers all_gather"].bytes == 2 * calls * value * experts // 2
        assert found["peers reduce_scatter"].bytes == calls * 4 * experts // 2
    assert ("expert all_to_all" in found) == bool(exchanged)
    if exchanged:  # to the experts and back, forward, recomputed and backward
        assert found["expert all_to_all"].bytes == 3 * layers * step.tokens * 2 * 8 * hidden * value


def test_an_estimate_counts_the_forward_pass_of_the_auxiliary_loss_of_routers(tmp_path, load):
    """Beside a forward pass, its recomputation, and a backward pass that counts twice in FLOPs and gathers once."""
    settings = ["allocation=sglang.d1+d8e2"]
    without, with_loss = (
        {step.mfc: step for step in estimate_ranks(of_30b_a3b(tmp_path, load, *settings, *more))[0].steps}
        for more in ([], ["train.router_aux_loss_coef=0.1"])
    )
    plain, found = without.pop("actor_train"), with_loss.pop("actor_train")
    assert found.flops == pytest.approx(plain.flops * 5 / 4)
    assert (found.model_flops, found.peak) == (plain.model_flops, plain.peak)
    for name, factor in {"data all_gather": 3 / 2, "peers all_gather": 3 / 2, "expert all_to_all": 4 / 3}.items():
        assert found.collectives[name].bytes == pytest.approx(plain.collectives[name].bytes * factor)
    assert found.collectives["data reduce_scatter"] == plain.collectives["data reduce_scatter"]
    assert with_loss == without


def test_remedies_share_out_long_rows_where_activations_do_not_fit(load):
    """One row of 16,384 tokens cannot be cut into micro-batches. Context ranks come before tensor ranks."""
    config = load(
        "train.gradient_checkpointing=true", "rollout.sampling.max_new_tokens=15872", "allocation=sglang.d2+d4"
    )

    def long_rows(config):
        (devices,) = allocation_of(config).training
        grid = devices.grids[0][1]
        return paced(config, of_tokens=250 / grid.parts(TOKENS))

    assert remedies(config, long_rows) == ["allocation=sglang.d2p1m1+d2p1m1c2"]


def test_an_estimate_has_the_block_of_logits_of_a_gpu(load):
    (rank,) = estimate_ranks(resolve(load(), Facts(on_gpu=True)))
    assert rank.at_peak["logits"] == 10 * _BLOCK_LOGITS[True]


def test_ranks_of_layouts_that_differ_only_in_their_servers_are_planned_once(load, monkeypatch):
    planned = []

    def run_tasks(tasks):
        planned.append([task.model.grid for task in tasks])
        return [ranks.ShardPlan([step()], 0, 0, {}, 0) for _ in tasks]

    monkeypatch.setattr(ranks, "run_tasks", run_tasks)
    known = {}
    for allocation in ("sglang.d2+d1p2m1", "sglang.m2+d1p2m1", "sglang.m2+d2"):
        ranks.plan_training(load(f"allocation={allocation}"), known=known)
    assert planned == [["d1p2m1", "d1p2m1"], ["d2p1m1"]]


def test_layouts_with_one_training_grid_agree_and_only_planned_ones_say_that_they_fit(file, load, monkeypatch, capsys):
    """The estimate of one grid is too low: its plan does not fit, with any servers."""
    device = DEVICES["h100-80g"]
    fastest = search_layouts(load(), 8, device, lambda config: plan_run(config, device, estimate_ranks))[0]
    grid = fastest.allocation.rpartition("+")[2]

    def plan_ranks(config, known=None):
        found = estimate_ranks(config)
        large = config.allocation.endswith(f"+{grid}")
        return [msgspec.structs.replace(each, peak=90 * GIB if large else 75 * GIB) for each in found]

    layouts = search_layouts(load(), 8, device, lambda config: plan_run(config, device, plan_ranks))
    siblings = [layout for layout in layouts if layout.allocation.endswith(f"+{grid}")]
    assert len(siblings) > 1
    assert {(layout.planned, layout.fits) for layout in siblings} == {(True, False)}
    assert (layouts[0].fits, layouts[0].tight) == (True, True)
    monkeypatch.setattr(plan_command, "plan_training", plan_ranks)
    code, out = call(capsys, file, "--gpu", "h100-80g", "--gpus", "8")
    states = [
        line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[2].strip() for line in out.splitlines() if "sglang." in line
    ]
    assert (code, set(states)) == (0, {"hardly", "no", "not planned"})


def test_a_layout_that_hardly_fits_comes_behind_a_slower_one_and_does_not_end_the_search(load):
    device = DEVICES["h100-80g"]

    def plan_ranks(config):
        found = estimate_ranks(config)
        fastest = allocation_of(config).num_training_devices == 6
        return [msgspec.structs.replace(each, peak=75 * GIB if fastest else 40 * GIB) for each in found]

    layouts = search_layouts(load(), 8, device, lambda config: plan_run(config, device, plan_ranks))
    planned = [layout for layout in layouts if layout.planned]
    assert [layout.tight for layout in planned] == sorted(layout.tight for layout in planned)
    assert planned[-1].tight
    assert planned[-1].time.expected_step_s < planned[0].time.expected_step_s
    assert len({layout.allocation.rpartition("+")[2] for layout in planned if not layout.tight}) == 2


@pytest.mark.parametrize(
    ("allocation", "training", "side", "found", "tried"),
    [
        (
            "sglang.d4+d4",
            1.0,
            "generation",
            "sglang.d5p1m1+d3p1m1",
            1,
        ),  # 3.3 s of training instead of 3.75 s of generation
        ("sglang.d6+d2", 8.0, "training", "sglang.d2p1m1+d6p1m1", 1),  # 13.3 s instead of 40; d1+d7: 15 s of generation
        ("sglang.d2m2+d2p2", 8.0, "training", "sglang.d1p1m2+d3p2m1", 1),
        ("sglang.d6+d2", 0.2, "generation", None, 1),  # d7+d1 would take 2.1 s instead of 2.5, but does not fit
        ("sglang.d4+d4", 1.4, "generation", None, 0),  # balanced
        ("sglang.d2@0-1+d6@2-7", 1.0, "generation", None, 0),
    ],
)
def test_the_split_that_would_help_is_planned_and_fits(load, monkeypatch, allocation, training, side, found, tried):
    """The bounds on N GPUs: 4 * training / N s of training, 12 / N s of generation. A single GPU cannot train."""

    def plan_ranks(config):
        size = allocation_of(config).num_training_devices
        flops = int(TOY.flops * training * 4 / size)
        peak = 79 * GIB if size == 1 else GIB
        return [replace_steps(rank(parameters=peak), [step(flops)])]

    planned = []
    monkeypatch.setattr(layouts_module, "estimate_ranks", plan_ranks)
    monkeypatch.setattr(bounds, "generation_time", lambda config, shape, server, *_: 12 / server.count / server.gpus)

    def planner(config):
        planned.append(config.allocation)
        return plan_run(config, TOY, plan_ranks)

    config = load(f"allocation={allocation}")
    plan = planner(config)
    split = better_split(config, plan, TOY, planner)
    assert plan.time.bottleneck == side
    assert (split.allocation if split is not None else None) == found
    if split is not None:
        assert split.planned
        assert split.time.expected_step_s < plan.time.expected_step_s
        assert planned[-1] == found
    assert len(planned) == 1 + tried


def test_layouts_that_do_not_fit_come_last(load):
    tiny = replace(DEVICES["h100-80g"], memory=30 * GIB)
    layouts = search_layouts(load(), 4, tiny, lambda config: plan_run(config, tiny, estimate_ranks))
    assert not any(layout.fits for layout in layouts if layout.planned)
    whole = search_layouts(load("mode=sync", "allocation=d4"), 4, TOY, lambda c: plan_run(c, TOY, estimate_ranks))
    assert whole[0].allocation == "d4p1m1"


# ---------------------------------------------------------------------------------------------------------- check and run


H100 = [Gpu("NVIDIA H100 80GB HBM3", 81559.0, 0.0, "550")]


def test_the_gpu_of_this_machine():
    assert device_named("NVIDIA H100 80GB HBM3") == DEVICES["h100-80g"]
    assert device_named("NVIDIA H100 PCIe") is None
    gpus = [replace(H100[0], total_mib=80000.0), replace(H100[0], total_mib=70000.0), Gpu("Odd", 90000.0, 0.0, "1")]
    assert planning.device_here(["0", "1"], gpus).memory == 70000 << 20
    odd = planning.device_here(["2"], gpus)
    assert (odd.name, odd.memory) == ("Odd", 90000 << 20)
    assert planning.device_here(["0"], "nvidia-smi does not answer") is None


def judged(config, planner, gpus=H100):
    case = Case(config, devices=["0"])
    case.gpus = gpus
    (finding,) = planning.check_plan(case, planner)
    return finding


def test_check_compares_the_plan_with_the_gpus(load, file):
    large = lambda config: [rank(optimizer=90 * GIB)]  # noqa: E731
    found = judged(load_experiment(file), large)
    assert (found.state, found.value) == (
        "fail",
        "model_worker/0 needs at least 91.1 GiB of 79.6 GiB: optimizer 90.0 GiB, libraries 1.1 GiB in actor_inf, forward of "
        "the last layer",
    )
    assert found.remedy.endswith("finds changes that fit; plan.enforce=off starts anyway")
    found = judged(load("plan.enforce='off'"), large)
    assert (found.state, "starts anyway" in found.remedy) == ("warn", False)
    tight = judged(load(), lambda config: [rank(optimizer=75 * GIB)])
    assert (tight.state, tight.remedy[:13]) == ("warn", "fragmentation")
    fine = judged(load(), lambda config: [rank(optimizer=40 * GIB)])
    assert (fine.state, fine.value) == ("ok", "the fullest GPU needs at least 41.1 GiB of 79.6 GiB")
    assert judged(load(), large, "nvidia-smi does not answer").state == "warn"

    def refuses(config):
        raise PlanError("train.mfcs=...: unknown")

    assert judged(load(), refuses).value == "this config cannot be planned: train.mfcs=...: unknown"


def test_run_refuses_what_does_not_fit(load, monkeypatch):
    told = []
    monkeypatch.setattr(checklist, "visible_devices", lambda: [])
    refuse_too_large(load(), told.append)  # on a CPU nothing is planned
    assert told == []
    monkeypatch.setattr(checklist, "visible_devices", lambda: ["0"])
    monkeypatch.setattr(checklist, "query_gpus", lambda: H100)
    large = partial(planning.check_plan, plan_ranks=lambda _: [rank(other=90 * GIB)])
    monkeypatch.setattr(table, "CHECKS", (Check("plan", large, place="machine", cost="plan"),))
    with pytest.raises(ConfigError, match=r"allocation=sglang.d2p1m1\+d4p1m1: model_worker/0 needs at least 91.1 GiB"):
        refuse_too_large(load(), told.append)
    refuse_too_large(load("plan.enforce='off'"), told.append)
    assert told[-1].startswith("plan: model_worker/0 needs at least 91.1 GiB")
    phases = "allocation=sglang.d2+d4 until 20 then sglang.d4+d2"
    with pytest.raises(ConfigError, match=r"allocation=sglang.d2\+d4 until 20: model_worker/0 needs at least 91.1 GiB"):
        refuse_too_large(load(phases), told.append)


# ---------------------------------------------------------------------------------------------------------------- command


def call(capsys, *words):
    code = main(["plan", *map(str, words)])
    return code, capsys.readouterr().out


def test_the_command_prints_plan_and_remedies(file, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "plan_training", lambda config, known: paced(config, static=100))
    code, out = call(capsys, file, "--gpu", "h100-80g", "--json")
    report = msgspec.json.decode(out, type=PlanReport)
    assert (code, report.fits) == (1, False)
    assert msgspec.json.decode(msgspec.json.encode(report), type=PlanReport) == report
    assert report.plan.server.kv_token == 57_344
    assert report.remedies[0].overrides == ["allocation=sglang.d2p1m1+d8p1m1"]
    code, out = call(capsys, file, "--gpu", "h100-80g")
    assert code == 1
    assert "model_worker/0 (and 3 like it) does not fit: at least 101.3 GiB of 79.6 GiB" in out
    assert "fits with allocation=sglang.d2p1m1+d8p1m1" in out
    text = " ".join(out.split())
    assert "estimate of a train step if every response has the maximum of 1,024 tokens" in text
    assert "if training reaches 40% (published runs of another trainer on H100s, 0.34 to 0.51) and generation" in text
    assert "generation reaches 80% (assumed) of the peak" in text
    assert (
        f"main memory of the fullest host of 1: about {gib(report.host.memory)} (a checkpoint 85.1 GiB, weight versions"
        in text
    )
    assert (
        "loading at the start: a process reads at most 14.2 GiB, expected 6.62 s at 2.3 GB/s (measured for the" in text
    )
    code, out = call(capsys, file, "--gpu", "h100-80g", "allocation=sglang.d2+d8")
    assert code == 0
    assert f"fits: the fullest GPU needs at least {gib(int(51.3 * GIB))}" in out
    assert call(capsys, file, "--gpu", "v100")[0] == 2
    assert call(capsys, file, "allocation=sglang.d2+d4 until 20 then sglang.d4+d2")[0] == 2


def test_the_output_fits_100_columns_and_names_the_moment_of_the_peak(file, load, monkeypatch, capsys):
    kinds = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "transfer", "workspace")

    def planner(config, known):
        moves = {"data all_gather": 10**12, "tensor all_reduce": 10**12, "tensor reduce_scatter": 10**12}
        ranks = [replace_steps(rank(**dict.fromkeys(kinds, GIB), other=1024), [step(10**16, **moves)])]
        return [msgspec.structs.replace(ranks[0], shards=["actor:d0p0m0", "ref:d0p0m0", "critic:d0p0m0"])]

    monkeypatch.setattr(plan_command, "plan_training", planner)
    code, out = call(capsys, file, "--gpu", "h100-80g")
    assert (code, max(map(len, out.splitlines())) <= 100) == (0, True)
    assert out.count("\N{BOX DRAWINGS HEAVY DOWN AND HORIZONTAL}") == 7 + 4  # both tables, not paragraphs
    columns = [line.split("\N{BOX DRAWINGS LIGHT VERTICAL}") for line in out.splitlines()]
    cells = [" ".join(words) for words in zip(*(row[1:-1] for row in columns if len(row) == 10), strict=True)]
    assert " ".join(cells[6].split()) == "actor_inf, forward of the last layer"
    assert " ".join(cells[7].split()) == ", ".join(f"{kind} 1.0" for kind in kinds) + ", libraries 1.1"
    monkeypatch.setattr(plan_command, "plan_training", lambda config, known: estimate_ranks(config))
    code, out = call(capsys, file, "--gpu", "h100-80g", "--gpus", "8")
    assert out.count("\N{BOX DRAWINGS HEAVY DOWN AND HORIZONTAL}") > 4
    assert max(map(len, out.splitlines())) <= 100


def test_the_command_takes_a_mean_response(file, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "plan_training", lambda config, known: estimate_ranks(config))
    code, out = call(capsys, file, "--gpu", "h100-80g", "--mean-response", "256")
    assert (code, "estimate of a train step with responses of 256 tokens on average" in out) == (0, True)
    for words in ((), ("--gpus", "4")):
        times = []
        for mean in ("256", "1024"):
            code, out = call(capsys, file, "--gpu", "h100-80g", "--json", *words, "--mean-response", mean)
            report = msgspec.json.decode(out, type=PlanReport)
            times.append(
                report.plan.time.step_s if report.plan else max(layout.time.step_s for layout in report.layouts)
            )
        assert times[0] < times[1]
    assert call(capsys, file, "--mean-response", "1025")[0] == 2
    assert call(capsys, file, "--mean-response", "-1")[0] == 2


def test_the_command_names_the_bottleneck_and_the_split_that_would_help(file, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "plan_training", lambda config, known: estimate_ranks(config))
    small = (file, "--gpu", "h100-80g", "train.max_tokens_per_mb=2048", "allocation=sglang.d6+d2")
    report = msgspec.json.decode(call(capsys, *small, "--json")[1], type=PlanReport)
    split = report.split
    assert split.planned
    assert split.time.expected_step_s < report.plan.time.expected_step_s
    code, out = call(capsys, *small)
    text = " ".join(out.split())
    assert (code, "the bottleneck is training" in text) == (0, True)
    assert f"{split.allocation} would be better balanced: expected" in text
    code, out = call(capsys, *small, f"allocation={split.allocation}")
    assert (code, "the bottleneck is" in out, "better balanced" in out) == (0, True, False)


def test_the_command_searches_layouts(file, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "plan_training", lambda config, known: estimate_ranks(config))
    code, out = call(capsys, file, "--gpu", "h100-80g", "--gpus", "8", "--json")
    report = msgspec.json.decode(out, type=PlanReport)
    assert (code, report.fits, report.plan) == (0, True, None)
    assert len(report.layouts) > 20
    code, out = call(capsys, file, "--gpu", "h100-80g", "--gpus", "8")
    assert report.layouts[0].allocation in out
    assert "others: see --json" in out
