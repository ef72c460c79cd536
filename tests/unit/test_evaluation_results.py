"""The result of an evaluation, computed by hand, and its line."""

from __future__ import annotations

import pytest
from rich.text import Text

from asyncrl.algorithms.metrics import EvalName
from asyncrl.cli.progress import evaluation_line
from asyncrl.dataflow.evaluation import EvaluationResult, summarize
from asyncrl.master.report import RunSummary
from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt
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


def _result(mode: str, groups: list[GroupSummary | None], eval_set: str = "") -> EvaluationResult:
    part = EvalPart(eval_set=eval_set, mode=mode, num_prompts=len(groups))  # type: ignore[arg-type]
    return summarize(part, [EvaluatedPrompt(part=0, position=at, group=group) for at, group in enumerate(groups)])


def test_prompts_count_alike_and_the_interval_is_by_prompt() -> None:
    groups = [_group([1.0, 0.0, 0.0, 0.0]), None, _group([1.0], newest=4), _group([0.25]), None]
    result = _result("sampled", groups)
    assert (result.num_prompts, result.num_failed, result.mean_length) == (5, 2, 4.0)
    assert result.reward is not None
    assert result.reward.mean == 0.5  # of 0.25, 1 and 0.25
    assert result.reward.half_width == pytest.approx(1.959964 * 0.25)  # squares 0.0625 + 0.25 + 0.0625: sqrt(0.375 / 6)
    assert (result.version_min, result.version_max) == (3, 4)


def test_one_prompt_has_no_interval_and_none_has_no_result() -> None:
    one = _result("greedy", [_group([1.0])])
    assert one.reward is not None
    assert one.reward.half_width is None
    nothing = _result("greedy", [None] * 3)
    assert (nothing.reward, nothing.version_min, nothing.version_max) == (None, -1, -1)


def test_the_interval_reaches_metrics_and_the_line() -> None:
    metrics = RunSummary().add_evaluation(3, [_result("greedy", [_group([1.0]), _group([0.0])])])
    assert metrics["eval/greedy_reward_ci95"] == pytest.approx(1.959964 * 0.5)
    line = Text.from_markup(evaluation_line({"step": 3, **metrics})).plain
    assert line == "eval  step    3  reward greedy 0.500 ±0.980"
    assert "eval/greedy_reward_ci95" not in RunSummary().add_evaluation(3, [_result("greedy", [_group([1.0])])])


def test_metrics_of_a_set_have_its_name() -> None:
    results = [_result("sampled", [_group([1.0])]), _result("sampled", [_group([0.0])], eval_set="aime")]
    metrics = RunSummary().add_evaluation(3, results, "ema_")
    assert (metrics["eval/ema_sampled_reward"], metrics["eval/aime/ema_sampled_reward"]) == (1.0, 0.0)
    line = Text.from_markup(evaluation_line({"step": 3, **metrics})).plain
    assert line == "eval  step    3  reward ema_sampled 1.000  aime ema_sampled 0.000"


@pytest.mark.parametrize(
    "name", ["eval/greedy_reward", "eval/aime/ema_sampled_reward_ci95", "eval/a-1/sampled_num_failed"]
)
def test_the_name_of_a_metric_is_read_back(name: str) -> None:
    found = EvalName.parse(name)
    assert found is not None
    assert str(found) == name


@pytest.mark.parametrize("name", ["step", "reward/mean", "eval/best_reward", "train/greedy_reward", "eval/greedy"])
def test_other_metrics_are_none_of_evaluations(name: str) -> None:
    assert EvalName.parse(name) is None
