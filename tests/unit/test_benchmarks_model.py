"""Benchmarks of the model, tiny: their result has the ratios that their claims are about."""

from __future__ import annotations

import pytest
from test_benchmarks import LIMIT_S, check, last_line

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(LIMIT_S + 100)


def test_logprobs() -> None:
    result = last_line("logprobs", "--tokens", "512", "--vocab", "20000", "--hidden", "8", "16")
    check(result, "logprobs", "MB")
    assert result["ratio"].keys() == {"memory", "time"}
    assert result["case"] == "hidden 16"
    assert result["cases"].keys() == {"hidden 8", "hidden 16"}
    assert result["ratio"]["memory"] < 0.5  # no goal, but the logits are not there


def test_train_step() -> None:
    options = ["--prompts", "4", "--group-size", "2", "--hidden", "32", "--layers", "1", "--steps", "1"]
    result = last_line("train_step", *options, "--peers", "padded")
    check(result, "train_step", "tokens/s")
    assert result["ratio"].keys() == result["memory_ratio"].keys() == {"padded"}
    assert result["batch"]["sequences"] == 8
    assert result["peers_missing"] == []
