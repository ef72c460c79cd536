"""The minimum memory of a run, tested at the boundary: one byte less is refused with field, sizes and remedy."""

import json
from dataclasses import replace

import pytest
import torch

from asyncrl.cli import doctor
from asyncrl.config.processes import ModelConfig
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import (
    ExperimentConfig,
    GenerationConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    TrainConfig,
    WeightsConfig,
)
from asyncrl.launch.checks.checklist import Case
from asyncrl.launch.checks.gpus import Gpu
from asyncrl.launch.checks.memory import CHECKPOINT_BYTES, DTYPE_BYTES, ModelSize, estimate, too_little_memory
from asyncrl.launch.program import plan
from asyncrl.model.checkpoint import snapshot
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.testing.tiny import make_tiny_model
from tests.support.vision_models import is_of_text, make_vision_model

SIZES = {"/model": ModelSize(1000, 10), "/ref": ModelSize(500, 10), "/judge": ModelSize(100, 10)}
CACHE = 100 * 16 * 10  # number of values
CONFIG = ExperimentConfig(
    allocation="transformers.d2+d2", model_path="/model", generation=GenerationConfig(num_blocks=100, page_size=16)
)
WITH_MODELS = replace(
    CONFIG,
    train=TrainConfig(
        ppo=PPOConfig(kl_coef=0.1), ref=RefConfig(path="/ref"), reward_model=RewardModelConfig(path="/judge")
    ),
)

KL = TrainConfig(ppo=PPOConfig(kl_coef=0.1), dtype="bfloat16")
FOLLOWS = replace(KL, ref=RefConfig(update_interval=1))


def found(config, limits, devices=()):
    config = resolve(config, Facts(on_gpu=bool(devices)))
    return too_little_memory(estimate(plan(config, attempt=1, num_prompts=100, devices=devices), SIZES), limits)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (CONFIG, 2 * 4 * (1000 + CACHE) + 16 * 1000),  # data-parallel ranks share a model
        (replace(CONFIG, allocation="transformers.d1+d1p2"), 4 * (1000 + CACHE) + 16 * 1000),
        (replace(CONFIG, generation=replace(CONFIG.generation, dtype="bfloat16")), 4 * (1000 + CACHE) + 16 * 1000),
        (replace(CONFIG, allocation="sglang.d1+d1"), 4 * (1000 + CACHE) + 16 * 1000),
        (replace(CONFIG, allocation="external.d2+d1"), 16 * 1000),
        (replace(CONFIG, allocation="external.d2+d2r2"), 2 * 16 * 1000),
        (replace(CONFIG, mode="sync", allocation="d2"), 16 * 1000),
        (replace(CONFIG, mode="rollout_only"), 2 * 4 * (1000 + CACHE)),
        (replace(CONFIG, mode="train_only"), 16 * 1000),
        (replace(CONFIG, allocation="transformers.d1@0+d1@0"), 4 * (1000 + CACHE)),  # more than in training's turn
        (
            replace(
                CONFIG, allocation="transformers.d1@0+d1@0", generation=GenerationConfig(num_blocks=1, page_size=4)
            ),
            16 * 1000,
        ),
        # A reference on workers of its own; its weights are kept at the actor's ranks only if it follows the actor
        (replace(CONFIG, allocation="external.d2+d2+ref_inf:d1", train=KL), (16 + 2) * 1000),
        (replace(CONFIG, allocation="external.d2+d2+ref_inf:d1", train=FOLLOWS), (16 + 2 + 2) * 1000),
        (replace(CONFIG, allocation="external.d2+d2", train=FOLLOWS), (16 + 2) * 1000),
        (WITH_MODELS, 2 * 4 * (1000 + CACHE) + 16 * 1000 + 4 * 500 + 4 * 100),
        (
            replace(WITH_MODELS, train=replace(WITH_MODELS.train, dtype="bfloat16")),
            2 * 4 * (1000 + CACHE) + 16 * 1000 + 2 * 500 + 2 * 100,
        ),
    ],
)
def test_the_minimum_of_main_memory(config, needed):
    assert found(config, {"": needed}) is None
    assert found(config, {"": needed - 1}) is not None


def test_the_minimum_of_gpu_memory():
    config = replace(CONFIG, train=TrainConfig(dtype="float32"), generation=replace(CONFIG.generation, dtype="float32"))
    server, rank = 4 * (1000 + CACHE), 8 * 1000
    devices = ["0", "1", "2"]  # GPU 0 also has a rank
    roomy = dict.fromkeys(devices, 10**9)
    needed = {"0": server + rank, "1": server, "2": rank}
    for device, size in needed.items():
        assert found(config, roomy | {device: size}, devices) is None
        value, _ = found(config, roomy | {device: size - 1}, devices)
        assert f"of GPU {device}, at least" in value
    assert found(config, {"": 0}, devices) is None  # nothing is in main memory
    assert found(config, {"7": 1}, devices) is None
    served_by_sglang = replace(config, allocation="sglang.d1+d1")  # SGLang chooses the size of its cache
    assert found(served_by_sglang, {"0": 4 * 1000}, ["0", "1"]) is None
    offloaded = replace(WITH_MODELS, train=replace(WITH_MODELS.train, offload=["ref"], dtype="float32"))
    rank = 8 * 1000 + 2 * 100
    assert found(offloaded, {"2": rank}, devices) is None
    assert found(offloaded, {"2": rank - 1}, devices) is not None


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (CONFIG, "set generation.num_blocks below 100 (pages of generation.page_size=16 tokens)"),
        (replace(CONFIG, mode="train_only"), "use a smaller model than /model"),
        (
            replace(CONFIG, generation=GenerationConfig(num_blocks=1), allocation="transformers.d9+d1"),
            "use fewer generation servers in allocation=...",
        ),
    ],
)
def test_the_remedy_concerns_the_largest_part(config, remedy):
    value, told = found(config, {"": 5000})
    assert value.startswith("5 kB available, at least ")
    assert told.startswith(remedy)


def test_the_message_lists_available_and_needed_memory():
    value, _ = found(CONFIG, {"": 1000})
    assert value == (
        "1 kB available, at least 152 kB needed: weights of generation servers 8 kB, KV caches 128 kB, "
        "actor (weights, gradients and Adam state) 16 kB"
    )


def test_check_fails_if_memory_cannot_suffice(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 3})
    )
    config = ExperimentConfig(fileroot=str(tmp_path), model_path=str(tmp_path))
    specs = plan(config, attempt=1, num_prompts=9)
    needed = 4 * config.generation.num_blocks * config.generation.page_size * 2 * 3 * 2 * 16
    for available, state in ((needed, "warn"), (needed - 1, "fail")):
        monkeypatch.setattr(doctor, "memory_limits", lambda available=available: (64 << 30, available))
        (finding,) = doctor.check_memory(Case(config, specs))
        assert finding.state == state
    on_gpu = plan(resolve(config, Facts(on_gpu=True)), attempt=1, num_prompts=9, devices=["0"])
    case = Case(config, on_gpu, devices=["0"])
    case.gpus = [Gpu("tiny", total_mib=1, used_mib=0, driver="1")]
    monkeypatch.setattr(doctor, "memory_limits", lambda: (1 << 40, 1 << 40))
    (finding,) = doctor.check_memory(case)
    assert "of GPU 0, at least" in finding.value
    case.gpus = "no driver"
    (finding,) = doctor.check_memory(case)
    assert finding.state == "ok"


@pytest.mark.parametrize("nested", [False, True])
def test_all_layers_with_attention_have_keys_in_the_cache(tmp_path, nested):
    shape = {"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 4}
    shape["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape} if nested else shape))
    assert ModelSize.of(str(tmp_path)).kv_values_per_token == 2 * 3 * 2 * 16


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_towers_and_heads_that_predict_several_tokens_do_not_count(tmp_path, family):
    tensors = make_vision_model(tmp_path, family)
    of_text = sum(tensor.numel() for name, tensor in tensors.items() if is_of_text(name))
    assert ModelSize.of(str(tmp_path)).num_parameters == of_text < sum(map(torch.numel, tensors.values()))


def test_requests_of_a_hybrid_have_states(tmp_path):
    make_tiny_model(tmp_path, "qwen3_5_text", num_layers=5)
    generation = GenerationConfig(max_running_requests=8, dtype="bfloat16")
    of_layer = 128 * 4 * 2 + 4 * 16 * 16 * 4  # the convolution in bfloat16
    assert ModelSize.of(str(tmp_path)).states_bytes(generation) == 8 * 3 * of_layer
    for config in (replace(CONFIG, allocation="transformers.d2+d1"), replace(CONFIG, allocation="d2", mode="sync")):
        config = resolve(replace(config, model_path=str(tmp_path), generation=generation), Facts(on_gpu=False))
        specs = plan(config, attempt=1, num_prompts=100)
        parts = estimate(specs, {str(tmp_path): ModelSize.of(str(tmp_path))})
        assert sum(part.num_bytes for part in parts if part.what == "states of requests") == 2 * 8 * 3 * of_layer


def parts_of(*, devices=("0", "1", "2", "3"), **train):
    """Bytes of main memory of each part, by process, of a run with two servers and two ranks of training."""
    weights = WeightsConfig(bucket_bytes=400, **{"transport": train.pop("transport", "disk")})
    config = replace(
        CONFIG, weights=weights, train=replace(TrainConfig(dtype="bfloat16", ppo=PPOConfig(kl_coef=0.1)), **train)
    )
    specs = plan(resolve(config, Facts(on_gpu=bool(devices))), attempt=1, num_prompts=100, devices=devices)
    return {
        spec.name: {part.what: part.num_bytes for part in estimate([spec], SIZES) if not part.device}
        for spec in specs
        if spec.kind == "model_worker"
    }


def test_a_rank_copies_versions_checkpoints_and_buckets_to_main_memory():
    first, second = parts_of().values()
    assert first == second
    assert (first["weight versions"], first["a checkpoint"]) == (2 * 500, 12 * 500)
    first, second = parts_of(transport="broadcast").values()
    assert (first["weight versions"], first["buckets"]) == (2 * 2 * 500, 2 * 400)  # one is sent, the next one is held
    assert "buckets" not in second
    (alone,) = (
        parts for name, parts in parts_of(devices=(), transport="broadcast").items() if name == "model_worker/0"
    )
    assert alone["buckets"] == 2 * 400  # gloo: it receives from the other rank


def test_offloaded_models_are_in_pinned_chunks_of_main_memory():
    first, _ = parts_of(offload=["actor", "ref"]).values()
    assert first["actor, offloaded"] == first["ref, offloaded"] == 256 << 20
    assert "ref, offloaded" not in parts_of(offload=["ref"], devices=())["model_worker/0"]  # it stays where it is


def test_the_copies_are_what_an_export_and_a_checkpoint_take(tmp_path):
    make_tiny_model(tmp_path)
    model = ModelConfig("actor", str(tmp_path), "d1", [0], trainable=True)
    engine = TrainEngine(model, TrainConfig(dtype="float32", tf32=False, gradient_checkpointing=False))
    size = sum(parameter.numel() for parameter in engine.named_parameters().values())
    share = sum(tensor.nbytes for tensor in take_share(engine).values())
    assert share == size * DTYPE_BYTES["float32"]
    for parameter in engine.named_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    assert sum(tensor.nbytes for tensor in snapshot({"actor": engine}).tensors.values()) == size * CHECKPOINT_BYTES
