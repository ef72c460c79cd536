"""generation.interrupt=finish: the settings that it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.config.schema import (
    ConfigError,
    ExperimentConfig,
    GenerationConfig,
    LoraConfig,
    PromptSourceConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from asyncrl.launch.experiment import validate

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


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_engines_that_compute_with_one_version_cannot_finish(engine: str) -> None:
    with pytest.raises(ConfigError, match=f"the engine {engine} computes with one version at a time"):
        validate(replace(CONFIG, allocation=f"{engine}.d1+d1"))
