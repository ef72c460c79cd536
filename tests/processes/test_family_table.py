"""The table of families in docs/verification.md has each causal language model of transformers with its real verdict."""

from __future__ import annotations

import pytest
import torch

from tests.support.family_table import EQUAL, families, judge, listed

QUICK = (
    "llama",
    "mistral",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_neox",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
    "bloom",
)
# Families that users train and that must stay equal
PROMISED = ("mistral", "phi3", "starcoder2", "mixtral", "olmoe", "qwen3_moe", "gpt_neox", "llama", "qwen2", "qwen3")


def check(family: str) -> None:
    torch.set_num_threads(1)
    assert judge(family).text == listed()[family]


def test_the_table_has_each_family_once() -> None:
    assert sorted(listed()) == families()


def test_families_that_users_train_are_equal() -> None:
    assert [name for name in PROMISED if listed()[name] != EQUAL] == []


@pytest.mark.parametrize("family", QUICK)
def test_the_table_has_the_verdict(family: str) -> None:
    check(family)


@pytest.mark.release
@pytest.mark.parametrize("family", [name for name in families() if name not in QUICK])
def test_the_table_has_the_verdict_of_further_families(family: str) -> None:
    check(family)
