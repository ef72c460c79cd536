"""Plans agree with real ranks: peaks within 5 %, traffic exactly. benchmarks/plan_accuracy.py has all layouts.

A plan extrapolates from two micro-batches and two minibatches; the measured steps have three micro-batches and two minibatches.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import AUTO, ExperimentConfig, LoraConfig, PPOConfig, PromptSourceConfig, TrainConfig
from asyncrl.plan.devices import DEVICES, library_bytes
from asyncrl.plan.ranks import ShardPlan, ShardTask, plan_training, run_tasks
from asyncrl.plan.result import ModelStep, PlanError
from asyncrl.testing.tiny import make_tiny_model
from tests.support.plan_accuracy import Case, compare, tasks_of
from tests.support.rank_processes import PRELOAD, RankProcesses

pytestmark = pytest.mark.timeout(600)

LENGTHS = (192, 192, 128)  # the planner makes micro-batches of exactly these


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(4, limit_s=120.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(model, grid, role, checkpointing, 2, 3, LENGTHS), id=f"{model} {grid} {role}", marks=marks)
        for model, grid, role, checkpointing, marks in (
            ("qwen2", "d2m2", "actor", True, ()),
            ("qwen2", "p2", "critic", False, ()),
            ("llama", "d2r2", "actor", False, ()),
            ("llama", "c2", "actor", False, ()),
            ("qwen2", "d2c2", "critic", True, ()),
            ("qwen3", "d1", "actor", "attention", ()),
            ("qwen3_5_text", "d2", "actor", True, ()),
            ("qwen3_5_text", "m2", "actor", False, pytest.mark.release),
            ("qwen3_5_text", "p2", "actor", True, pytest.mark.release),
            ("llama", "m2", "actor", True, pytest.mark.release),
            ("mistral", "p2", "actor", True, pytest.mark.release),
            ("qwen3_moe", "d1", "actor", True, pytest.mark.release),
            ("qwen3_moe", "d2", "actor", True, pytest.mark.release),
            ("qwen3_moe", "d2e2", "actor", True, ()),
            ("qwen3_moe", "d4e2", "actor", False, pytest.mark.release),
            ("qwen3_moe", "d2c2e2", "critic", True, pytest.mark.release),
            ("qwen3_moe", "d2r2e2", "actor", True, pytest.mark.release),
            ("qwen3_moe", "d2p2e2", "actor", True, pytest.mark.release),
            ("qwen3_moe", "c2", "actor", True, pytest.mark.release),
        )
    ],
)
def test_a_plan_agrees_with_real_ranks(case: Case, tmp_path: Path, ranks: RankProcesses) -> None:
    if case.model == "qwen3_moe":
        make_mixture_of_experts(tmp_path)
    else:
        make_tiny_model(tmp_path, case.model)
    found = compare(case, tmp_path, ranks)
    assert {(one.mfc, one.stage): one.predicted_traffic for one in found} == {
        (one.mfc, one.stage): one.measured_traffic for one in found
    }
    assert {one.mfc: one.error for one in found if abs(one.error) > 0.05} == {}


@pytest.mark.parametrize(
    ("model", "grid", "role", "checkpointing"),
    [
        ("qwen2", "d2", "actor", True),
        ("qwen2", "c2", "actor", True),
        pytest.param("qwen2", "m2", "actor", False, marks=pytest.mark.release),
        ("qwen3_5_text", "d2", "actor", True),
        pytest.param("mistral", "d2", "actor", False, marks=pytest.mark.release),
    ],
)
def test_a_plan_of_shared_prompts_agrees_with_real_ranks(
    model: str, grid: str, role: str, checkpointing: bool, tmp_path: Path, ranks: RankProcesses
) -> None:
    """Two groups of four sequences, and a shorter one, in each of three micro-batches."""
    make_tiny_model(tmp_path, model)
    lengths, counts = (160,) * 8 + (100,), (4, 4, 1)
    found = compare(Case(model, grid, role, checkpointing, 2, 3, lengths, prefix=64, counts=counts), tmp_path, ranks)
    assert [one.predicted_traffic for one in found] == [one.measured_traffic for one in found]
    assert {one.mfc: one.error for one in found if abs(one.error) > 0.05} == {}


@pytest.mark.parametrize(
    ("grid", "role", "checkpointing"),
    [
        ("d1", "actor", True),
        ("d2", "critic", False),
        *(
            pytest.param(*each, True, marks=pytest.mark.release)
            for each in (("d2m2", "actor"), ("p2", "critic"), ("c2", "actor"))
        ),
    ],
)
def test_a_plan_of_adapters_agrees_with_real_ranks(
    grid: str, role: str, checkpointing: bool, tmp_path: Path, ranks: RankProcesses
) -> None:
    make_tiny_model(tmp_path)
    found = compare(Case("qwen2", grid, role, checkpointing, 2, 3, LENGTHS, lora=LoraConfig(rank=4)), tmp_path, ranks)
    assert {one.mfc for one in found} >= ({"ref_inf", "actor_train"} if role == "actor" else {"critic_train"})
    assert [one.predicted_traffic for one in found] == [one.measured_traffic for one in found]
    assert {one.mfc: one.error for one in found if abs(one.error) > 0.05} == {}


@pytest.mark.parametrize("grid", ["d2e2", pytest.param("d2c2e2", marks=pytest.mark.release)])
def test_a_plan_of_the_auxiliary_loss_of_routers_agrees_with_real_ranks(
    grid: str, tmp_path: Path, ranks: RankProcesses
) -> None:
    """Its further forward pass sends tokens to their experts and back. The peak stays."""
    make_mixture_of_experts(tmp_path)
    without, with_loss = (
        [one for one in compare(case, tmp_path, ranks) if one.mfc == "actor_train"]
        for case in (
            Case("qwen3_moe", grid, "actor", True, 2, 3, LENGTHS, router_aux_loss_coef=coef) for coef in (0.0, 0.1)
        )
    )
    assert [one.predicted_traffic for one in with_loss] == [one.measured_traffic for one in with_loss]
    assert all(abs(one.error) <= 0.05 for one in with_loss)
    for plain, found in zip(without, with_loss, strict=True):
        assert found.measured <= 1.02 * plain.measured
        moved, before = (one.measured_traffic["expert all_to_all"].count for one in (found, plain))
        assert (
            moved * 8 == before * 11
        )  # three in a forward pass, as numbers of tokens go first, and two in a backward pass


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plan_of_context_ranks_has_half_of_the_activations(tmp_path: Path, checkpointing: bool) -> None:
    make_tiny_model(tmp_path, "llama")
    of_grids = {}
    for grid in ("d2", "c2"):
        (plan,) = run_tasks(tasks_of(Case("llama", grid, "actor", checkpointing, 1, 1, (1000, 1000)), tmp_path))
        (train,) = (step for step in plan.steps if step.mfc == "actor_train")
        of_grids[grid] = train.kinds["activations"]
    assert of_grids["c2"] <= 0.55 * of_grids["d2"]


def make_mixture_of_experts(path: Path) -> None:
    config = make_tiny_model(None, "qwen3").config.to_dict()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    moe = AutoConfig.for_model(**config | {"model_type": "qwen3_moe"} | experts)
    AutoModelForCausalLM.from_config(moe).save_pretrained(path)


def plan_twice(tasks: bytes) -> tuple[bytes, bytes]:
    """With all layers, and extrapolated. FSDP gathers each layer on its own, as it does in large models."""
    from asyncrl.model import sharding
    from asyncrl.plan.rank_main import plan_tasks

    sharding.UNIT_ELEMENTS = 1
    decoded = msgspec.json.decode(tasks, type=list[ShardTask])
    in_full, extrapolated = (plan_tasks(decoded, in_full=in_full) for in_full in (True, False))
    return msgspec.json.encode(in_full), msgspec.json.encode(extrapolated)


@pytest.mark.release
def test_a_plan_of_many_layers_follows_from_two_smaller_ones(tmp_path: Path) -> None:
    tasks = []
    for model, grid, role, checkpointing, num_layers in [
        ("qwen2", "d2", "actor", False, 9),
        ("qwen2", "m2", "critic", True, 8),
        ("qwen2", "p2", "actor", True, 17),
        ("qwen3_5_text", "d2", "actor", True, 13),
        ("qwen3_5_text", "m2", "actor", False, 12),
    ]:
        path = tmp_path / str(num_layers)
        make_tiny_model(path, model, num_layers=num_layers)
        tasks += tasks_of(Case("tiny", grid, role, checkpointing, 1, 5, LENGTHS), path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(1, context) as pool:
        plans = pool.submit(plan_twice, msgspec.json.encode(tasks)).result()
    in_full, extrapolated = (msgspec.json.decode(encoded, type=list[ShardPlan]) for encoded in plans)
    for expected, found in zip(in_full, extrapolated, strict=True):
        assert [exact_part(step) for step in found.steps] == [exact_part(step) for step in expected.steps]
        assert (found.loaded, found.resident, found.in_transit) == (
            expected.loaded,
            expected.resident,
            expected.in_transit,
        )
        # Python collects garbage at any time, so a peak may have some small tensors more
        for step, wanted in zip(found.steps, expected.steps, strict=True):
            assert step.peak == pytest.approx(wanted.peak, rel=0.001)
            assert step.at_peak == pytest.approx(wanted.at_peak, rel=0.001)
            assert step.kinds == pytest.approx(wanted.kinds, rel=0.001)
        assert found.load_peak == pytest.approx(expected.load_peak, rel=0.001)


def exact_part(step: ModelStep) -> ModelStep:
    return msgspec.structs.replace(step, peak=0, at_peak={}, kinds={})


def test_a_run_is_planned_from_its_config(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())  # no weights
    train = TrainConfig(batch_size=4, max_tokens_per_mb=1024)
    config = ExperimentConfig(
        model_path=str(tmp_path), allocation="transformers.d1+d2", prompts=PromptSourceConfig(path="-"), train=train
    )
    (plan,) = plan_training(config, device_type="cuda")
    assert (plan.shards, plan.stands_for) == (["actor:d0p0m0"], [0, 1])
    assert [step.mfc for step in plan.steps] == ["actor_inf", "advantages", "actor_train"]
    assert plan.peak == max(step.peak for step in plan.steps) == sum(plan.at_peak.values())
    parameters = 127_552 // 2 * 4
    assert plan.at_peak["parameters"] == pytest.approx(parameters, rel=0.05)
    assert plan.at_peak["optimizer"] == pytest.approx(2 * parameters, rel=0.05)
    assert parameters < plan.load_peak < 1.2 * parameters  # the shard, and the part that is read last

    (tmp_path / "config.json").unlink()
    with pytest.raises(PlanError, match=r"actor, stage 0 .* cannot be planned: .*model_path"):
        plan_training(config, device_type="cuda")


def test_more_tokens_in_a_block_of_logits_need_no_more_memory_on_a_gpu(model: Path, tmp_path: Path) -> None:
    """A block has fewer words then. So the default of a GPU is a fixed one."""
    large = json.loads((model / "config.json").read_text()) | {"vocab_size": 1 << 17}
    (tmp_path / "config.json").write_text(json.dumps(large))
    logits = {}
    for tokens in (AUTO, 1024):
        train = TrainConfig(batch_size=32, dtype="bfloat16", logprob_chunk_tokens=tokens)
        config = ExperimentConfig(model_path=str(tmp_path), allocation="transformers.d1+d1", train=train)
        (plan,) = plan_training(config)
        (logits[tokens],) = (step.kinds["logits"] for step in plan.steps if step.mfc == "actor_train")
    assert 8 << 26 < logits[AUTO] <= logits[1024] < 16 << 26


def test_inference_of_a_pipeline_needs_less_than_training_however_many_micro_batches_it_has(model: Path) -> None:
    """A stage keeps one hidden state that is on its way, not all that it sends."""
    case = Case("qwen2", "p2", "actor", True, 1, 4, LENGTHS)
    few, many = (run_tasks(tasks_of(replace(case, micro_batches=count), model))[0] for count in (4, 64))
    of_few, of_many = ({step.mfc: step for step in plan.steps} for plan in (few, many))
    tokens = of_many["actor_inf"].tokens - of_few["actor_inf"].tokens
    assert tokens == 60 * sum(LENGTHS)
    ids_and_places, hidden_state = 48, 64 * 4  # bytes of a token; the batch's ids stay on the device
    assert of_many["actor_inf"].peak - of_few["actor_inf"].peak <= ids_and_places * tokens < hidden_state * tokens
    assert of_many["actor_inf"].peak < of_many["actor_train"].peak


@pytest.mark.release
def test_adapters_of_8_billion_parameters_with_their_reference_fit_a_gpu_of_24_gib(tmp_path: Path) -> None:
    """One GPU, which generation server and model worker use in turns. The reference is the base. The shape is Qwen3-8B's."""
    shape = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288}
    shape |= {"vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    ppo = PPOConfig(kl_coef=0.1, temperature=1.0)
    train = TrainConfig(
        dtype="bfloat16", gradient_checkpointing=True, max_tokens_per_mb=4096, ppo=ppo, lora=LoraConfig()
    )
    config = ExperimentConfig(
        model_path=str(tmp_path),
        allocation="transformers.d1@0+d1@0",
        prompts=PromptSourceConfig(path="-", max_prompt_length=512),
        train=train,
    )
    (plan,) = plan_training(config, device_type="cuda")
    assert plan.shards == ["actor:d0p0m0"]
    assert [step.mfc for step in plan.steps if step.mfc != "advantages"] == ["actor_inf", "ref_inf", "actor_train"]
    libraries = library_bytes(communicates=True)
    assert max(plan.peak, plan.load_peak, plan.export_peak) + libraries < 0.9 * DEVICES["rtx4090-24g"].memory
    assert plan.at_peak["gradients"] < 0.02 * plan.at_peak["parameters"]
    steps = {step.mfc: step for step in plan.steps}
    assert steps["actor_train"].model_flops < 2.2 * steps["ref_inf"].model_flops
