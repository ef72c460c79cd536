"""The table of families in docs/families.md has each language model of transformers with its real verdict and figures."""

from __future__ import annotations

import pytest
import torch

from tests.support.family_table import families, judge, listed

# Families that users train and that must stay equal, in the trainer and in the embedded engine
PROMISED = [
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "llama",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "phi",
    "phi3",
    "glm",
    "glm4",
    "glm4_moe",
    "olmo2",
    "olmo3",
    "olmoe",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "deepseek_v3",
    "gpt_neox",
    "starcoder2",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "llava",
    "mistral3",
    "glm4v",
]
READ_IMAGES = ("qwen3_vl", "qwen3_vl_moe", "internvl", "llava", "mistral3", "glm4v")  # checked quickly: Qwen2.5-VL
QUICK = (
    *(family for family in PROMISED if family not in READ_IMAGES),
    "gemma4_text",
    "llama4_text",
    "mamba2",
    "zamba2",
    "bloom",
)
# Rounding differs between CPUs: a figure may be so many times the listed one, or this figure
TIMES, LEAST = 10.0, 1e-6


def check(family: str) -> None:
    torch.set_num_threads(1)
    found, expected = judge(family), listed()[family]
    assert (found.is_trained, found.reason) == (expected.is_trained, expected.reason)
    if found.trainer is not None and expected.trainer is not None:
        assert found.trainer.nats <= TIMES * max(expected.trainer.nats, LEAST)
        assert found.trainer.gradients <= TIMES * max(expected.trainer.gradients, LEAST)


def test_the_table_has_each_family_once() -> None:
    assert sorted(listed()) == families()


def test_families_that_users_train_are_trained_and_sampled() -> None:
    assert [name for name in PROMISED if not listed()[name].is_trained or listed()[name].reason] == []


@pytest.mark.parametrize("family", QUICK)
def test_the_table_has_the_verdict(family: str) -> None:
    check(family)


@pytest.mark.release
@pytest.mark.parametrize("family", [name for name in families() if name not in QUICK])
def test_the_table_has_the_verdict_of_further_families(family: str) -> None:
    check(family)
