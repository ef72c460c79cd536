"""What LoRA meets and is not proven with is refused, with the field and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from feature_pairs import set_fields

from asyncrl.config.schema import (
    ConfigError,
    CriticConfig,
    EmaConfig,
    ExperimentConfig,
    LoraConfig,
    PromptSourceConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.experiment import validate

CONFIG = ExperimentConfig(
    experiment="lora",
    model_path="/model",
    prompts=PromptSourceConfig(path="prompts"),
    rollout=RolloutConfig(tasks={"default": TaskConfig(reward="m:reward")}),
    allocation="transformers.d1+d1",
    train=TrainConfig(lora=LoraConfig()),
)


def test_adapters_alone_are_accepted() -> None:
    validate(CONFIG)
    validate(set_fields(CONFIG, {"train.ppo.kl_coef": 0.1, "allocation": "transformers.d2+d2p2m2c2"}))
    validate(set_fields(CONFIG, {"allocation": "vllm.d2+d2", "train.lora.rank": 512}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train.lora.rank": 513}, "train.lora.rank=513: the engine vllm has room for 512 at most"),
        (
            {"allocation": "vllm.d1@0+d1@0", "manager.max_head_offpolicyness": 0},
            "shared devices or phases with the engine vllm is not proven",
        ),
        ({"allocation": "vllm.d2m2+d2"}, "tensor ranks of the engine vllm is not proven"),
        ({"weights.fetch": "on"}, "weights.fetch='on': with the engine vllm it is not proven"),
        ({"generation.interrupt": "in_place"}, "a request keeps the adapter with which it began"),
        ({"weights.verify_logprobs": False}, "is silent about tensors of an adapter that it does not use"),
        ({"generation.server_args": {"lora-modules": "x=/x"}}, "use train.lora.start"),
    ],
)
def test_what_vllm_cannot_do_with_adapters_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(set_fields(CONFIG, {"allocation": "vllm.d1+d1", **fields}))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"train.lora.targets": ["all-linear", "q_proj"]}, "train.lora.targets"),
        ({"train.lora.targets": []}, "train.lora.targets"),
        ({"train.lora.dropout": 0.1}, "train.lora.dropout"),
        ({"mode": "rollout_only"}, "mode"),
        ({"allocation": "sglang.d1+d1"}, "allocation"),
        ({"allocation": "external.d1+d1", "generation.urls": ["http://host:1"]}, "allocation"),
        ({"weights.full_every": 2}, "weights.full_every"),
        ({"train.routes": "compare"}, "train.routes"),
        ({"train.compile": "on"}, "train.compile"),
        ({"train.ema": EmaConfig()}, "train.ema.decay"),
        ({"train.ppo.kl_coef": 0.1, "train.ref.update_interval": 1}, "train.ref.update_interval"),
    ],
)
def test_each_feature_that_is_not_proven_is_refused_only_with_adapters(fields: dict[str, Any], field: str) -> None:
    config = set_fields(CONFIG, fields)
    with pytest.raises(ConfigError, match=rf"{field}="):
        validate(config)
    if not field.startswith("train.lora"):
        validate(replace(config, train=replace(config.train, lora=None)))


@pytest.mark.parametrize(
    ("allocation", "path", "shares"),
    [
        ("transformers.d1+d2", "", True),
        ("transformers.d1+d2", "/other", False),
        ("transformers.d1+d2+ref_inf:d1", "", False),
        ("transformers.d1+actor_train:d2,actor_inf:d2,ref_inf:d1", "", False),
    ],
)
def test_the_reference_is_the_actors_base_if_it_has_the_same_weights_and_workers(
    allocation: str, path: str, shares: bool
) -> None:
    config = set_fields(CONFIG, {"allocation": allocation, "train.ppo.kl_coef": 0.1, "train.ref.path": path})
    placements, mfcs = place(allocation_of(config), build_dataflow(config.train, config.mode))
    models = {model.name: model for model in models_of(placements, mfcs, config.train, config.model_path)}
    assert models["actor"].lora == LoraConfig()
    assert models["ref"].base_of == ("actor" if shares else "")
    assert models["ref"].lora is None


def test_the_critic_has_adapters_too_and_begins_with_none_of_the_actors() -> None:
    fields = {"train.critic": CriticConfig(), "train.ppo.advantage_norm": "batch", "train.lora.start": "/adapter"}
    config = set_fields(CONFIG, {**fields, "allocation": "transformers.d1+d1+critic:d1"})
    placements, mfcs = place(allocation_of(config), build_dataflow(config.train, config.mode))
    models = {model.name: model for model in models_of(placements, mfcs, config.train, config.model_path)}
    assert models["actor"].lora == LoraConfig(start="/adapter")
    assert models["critic"].lora == LoraConfig()
