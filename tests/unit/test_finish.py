"""generation.interrupt=finish: the settings that it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.config.processes import GenerationServerConfig
from asyncrl.config.schema import (
    ConfigError,
    ExperimentConfig,
    GenerationConfig,
    LoraConfig,
    ManagerConfig,
    PromptSourceConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from asyncrl.launch.experiment import validate
from asyncrl.launch.program import plan

CONFIG = ExperimentConfig(
    experiment="finish",
    model_path="/model",
    prompts=PromptSourceConfig(path="prompts"),
    rollout=RolloutConfig(tasks={"default": TaskConfig(reward="m:reward")}),
    allocation="transformers.d1+d1",
    generation=GenerationConfig(interrupt="finish"),
    train=TrainConfig(lora=LoraConfig()),
)


def test_full_weights_cannot_finish() -> None:
    with pytest.raises(ConfigError, match=r"generation\.interrupt='finish': finish needs adapters \(train\.lora\)"):
        validate(replace(CONFIG, train=TrainConfig()))


def test_an_engine_that_computes_with_one_version_cannot_finish() -> None:
    with pytest.raises(
        ConfigError, match="the engine sglang computes with one version at a time; use transformers or vllm"
    ):
        validate(replace(CONFIG, allocation="sglang.d1+d1"))


def test_vllm_can_finish_on_servers_of_one_rank() -> None:
    validate(replace(CONFIG, allocation="vllm.d1+d1"))
    with pytest.raises(ConfigError, match=r"tensor ranks of the engine vllm is not proven with train\.lora"):
        validate(replace(CONFIG, allocation="vllm.d1m2+d1"))


def test_servers_that_share_devices_have_nothing_to_finish() -> None:
    config = replace(CONFIG, allocation="transformers.d1@0+d1@0", manager=ManagerConfig(max_head_offpolicyness=0))
    with pytest.raises(
        ConfigError, match=r"generation\.interrupt='finish': .*no request runs while servers get a version"
    ):
        validate(config)


def test_a_server_keeps_eta_and_two_versions() -> None:
    for interrupt, eta, kept in (("finish", 2, 4), ("finish", 0, 2), ("abort", 2, 1)):
        config = replace(
            CONFIG,
            generation=GenerationConfig(interrupt=interrupt),
            manager=ManagerConfig(max_head_offpolicyness=eta),
        )
        configs = [spec.config for spec in plan(config, num_prompts=100, attempt=1)]
        assert [one.num_versions for one in configs if isinstance(one, GenerationServerConfig)] == [kept]
