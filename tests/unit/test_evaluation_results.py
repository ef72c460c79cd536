"""The result of an evaluation, computed by hand, and its line."""

from __future__ import annotations

import msgspec
import pytest
from rich.text import Text

from asyncrl.cli.progress import evaluation_line
from asyncrl.dataflow.evaluation import summarize
from asyncrl.master.report import RunSummary
from asyncrl.protocol.manager import EvaluationResult
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion


def _group(rewards: list[float], oldest: int = 3, newest: int = 3) -> GroupSummary:
    num = len(rewards)
    return GroupSummary(
        seqlens=[9] * num,
        response_lengths=[4] * num,
        rewards=rewards,
        version_start=[WeightVersion(1, oldest).pack()] * num,
        version_end=[WeightVersion(1, newest).pack()] * num,
    )


def test_prompts_count_alike_and_the_interval_is_by_prompt() -> None:
    result = summarize("sampled", [_group([1.0, 0.0, 0.0, 0.0]), _group([1.0], newest=4), _group([0.25])], num_failed=2)
    assert (result.num_prompts, result.num_failed, result.mean_length) == (5, 2, 4.0)
    assert result.mean_reward == 0.5  # of 0.25, 1 and 0.25
    assert result.reward_ci95 == pytest.approx(1.959964 * 0.25)  # squares 0.0625 + 0.25 + 0.0625: sqrt(0.375 / 6)
    assert (result.version_min, result.version_max) == (3, 4)


def test_one_prompt_has_no_interval_and_none_has_no_result() -> None:
    assert summarize("greedy", [_group([1.0])], num_failed=0).reward_ci95 is None
    nothing = summarize("greedy", [], num_failed=3)
    assert (nothing.mean_reward, nothing.reward_ci95, nothing.version_min, nothing.version_max) == (0.0, None, -1, -1)


def test_the_interval_reaches_metrics_and_the_line() -> None:
    result = summarize("greedy", [_group([1.0]), _group([0.0])], num_failed=0)
    sent = msgspec.json.decode(msgspec.json.encode(result), type=EvaluationResult)
    metrics = RunSummary().add_evaluation(3, [sent])
    assert metrics["eval/greedy_reward_ci95"] == pytest.approx(1.959964 * 0.5)
    line = Text.from_markup(evaluation_line({"step": 3, **metrics})).plain
    assert line == "eval  step    3  reward greedy 0.500 ±0.980"
    assert "eval/greedy_reward_ci95" not in RunSummary().add_evaluation(3, [summarize("greedy", [_group([1.0])], 0)])
