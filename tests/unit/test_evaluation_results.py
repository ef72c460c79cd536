"""The result of an evaluation, computed by hand, and its line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.text import Text

from asyncrl.algorithms.metrics import EvalName
from asyncrl.cli.progress import evaluation_line
from asyncrl.config.schema import EvalConfig, PromptSourceConfig
from asyncrl.dataflow.evaluation import EvaluationResult, summarize
from asyncrl.master.evaluations import EvalPrompt, Evaluations
from asyncrl.master.report import RunSummary
from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion
from tests.support.services import make_services


def _group(rewards: list[float], oldest: int = 3, newest: int = 3, answers: list[Any] | None = None) -> GroupSummary:
    num = len(rewards)
    return GroupSummary(
        seqlens=[9] * num,
        response_lengths=[4] * num,
        rewards=rewards,
        version_start=[WeightVersion(1, oldest).pack()] * num,
        version_end=[WeightVersion(1, newest).pack()] * num,
        answers=answers or [],
    )


def _results(
    mode: str, groups: list[GroupSummary | None], tasks: str, eval_set: str = "", correct: float = 1.0
) -> list[EvaluationResult]:
    """tasks: a letter for each group."""
    part = EvalPart(eval_set=eval_set, mode=mode, num_prompts=len(groups))  # type: ignore[arg-type]
    results = [EvaluatedPrompt(part=0, position=at, group=group) for at, group in enumerate(groups)]
    return summarize(part, results, tasks, correct)


def _result(mode: str, groups: list[GroupSummary | None], eval_set: str = "", correct: float = 1.0) -> EvaluationResult:
    (result,) = _results(mode, groups, "a" * len(groups), eval_set, correct)
    return result


def test_prompts_count_alike_and_the_interval_is_by_prompt() -> None:
    groups = [_group([1.0, 0.0, 0.0, 0.0]), None, _group([1.0], newest=4), _group([0.25]), None]
    result = _result("sampled", groups)
    assert (result.num_prompts, result.num_failed, result.mean_length) == (5, 2, 4.0)
    assert result.reward is not None
    assert result.reward.mean == 0.5  # of 0.25, 1 and 0.25
    assert result.reward.half_width == pytest.approx(1.959964 * 0.25)  # squares 0.0625 + 0.25 + 0.0625: sqrt(0.375 / 6)
    assert (result.version_min, result.version_max) == (3, 4)


def test_responses_of_several_seats_are_no_tries_of_the_same() -> None:
    assert _result("sampled", [_group([1.0, 0.0])]).at_k.keys() == {"pass@1", "pass@2"}
    seats = msgspec.structs.replace(_group([1.0, 0.0]), num_seats=2)
    result = _result("sampled", [_group([1.0, 0.0]), seats])
    assert (result.at_k, result.no_majority) == ({}, "")
    assert result.reward is not None
    assert result.reward.mean == 0.5


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


def test_several_responses_give_pass_and_majority_at_k() -> None:
    """Of four responses the first prompt has two correct ones, of equal answers, and the second has none."""
    groups = [
        _group([1.0, 1.0, 0.0, 0.0], answers=["7", "7", "8", None]),
        _group([0.0] * 4, answers=["1", "1", "2", "3"]),
    ]
    result = _result("sampled", groups)
    assert {name: found.mean for name, found in result.at_k.items()} == {
        "pass@1": pytest.approx(0.5 / 2),
        "pass@2": pytest.approx((1 - 1 / 6) / 2),
        "pass@4": 0.5,
        # Pairs of 7, 7, 8 and a silent one: 77 and both 7- are correct, both 78 are ties, 8- is wrong
        "majority@2": pytest.approx((1 + 2 + 2 * 0.5) / 6 / 2),
        "majority@4": 0.5,
    }
    assert result.at_k["pass@4"].half_width == pytest.approx(1.959964 * 0.5)  # of 1 and 0
    metrics = RunSummary().add_evaluation(1, [result])
    line = Text.from_markup(evaluation_line({"step": 3, **metrics})).plain
    assert line == "eval  step    3  reward sampled 0.250 ±0.490 pass@4 0.500 majority@4 0.500"
    assert metrics["eval/sampled_majority@4"] == 0.5
    assert metrics["eval/sampled_pass@4_ci95"] == pytest.approx(1.959964 * 0.5)


def test_k_is_at_most_the_number_of_responses_of_every_prompt() -> None:
    result = _result("sampled", [_group([1.0] * 6), _group([1.0] * 5), None])
    assert list(result.at_k) == ["pass@1", "pass@2", "pass@4", "pass@5"]
    assert _result("greedy", [_group([1.0]), _group([0.0])]).at_k == {}
    assert _result("sampled", [None]).at_k == {}


def test_a_response_is_correct_from_the_configured_reward_on() -> None:
    """Rewards travel as float32: 0.9 arrives as a slightly smaller number."""
    arrived = float(np.float32(0.9))
    assert arrived < 0.9
    groups: list[GroupSummary | None] = [_group([arrived, 0.5])]
    assert _result("sampled", groups).at_k["pass@2"].mean == 0.0
    assert _result("sampled", groups, correct=0.9).at_k["pass@2"].mean == 1.0


@pytest.mark.parametrize(
    ("answers", "why"),
    [(None, "no reward gives an answer"), (["7", "7"], "the answer '7' is judged both correct and wrong")],
)
def test_an_absent_majority_has_a_reason(answers: list[Any] | None, why: str) -> None:
    result = _result("sampled", [_group([1.0, 0.0], answers=answers)])
    assert list(result.at_k) == ["pass@1", "pass@2"]
    assert why in result.no_majority
    assert _result("greedy", [_group([1.0])]).no_majority == ""


def test_each_of_several_tasks_has_a_result() -> None:
    groups = [_group([1.0, 0.0]), _group([1.0, 1.0]), None, _group([0.0, 0.0])]
    results = _results("sampled", groups, "abba", eval_set="mix")
    assert [(one.task, one.num_prompts, one.num_failed) for one in results] == [("", 4, 1), ("a", 2, 0), ("b", 2, 1)]
    metrics = RunSummary().add_evaluation(1, results)
    assert metrics["eval/mix/sampled_reward"] == pytest.approx(0.5)
    assert (metrics["eval/mix/sampled_reward.a"], metrics["eval/mix/sampled_pass@2.b"]) == (0.25, 1.0)


def test_a_missing_majority_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    books: Any = SimpleNamespace(step=1, attempt=1, write_evaluation=lambda *_: None)

    class Evaluator:
        def begin(self, eval_id: str, step: int, parts: Any) -> Any:
            async def results() -> list[EvaluatedPrompt]:
                return [EvaluatedPrompt(part=0, position=0, group=_group([1.0, 0.0]))]

            return results

    async def evaluate_twice() -> None:
        config = EvalConfig(prompts=PromptSourceConfig(path="p.jsonl"), modes=["sampled"], num_responses=2)
        prompts = {"": [EvalPrompt(1, "default")]}
        evaluations = Evaluations(config, prompts, books, Evaluator(), make_services(), write=lambda *_: None)
        for _ in range(2):
            evaluations.begin([""])
            await asyncio.wait_for(evaluations.all_over(), 10.0)

    asyncio.run(evaluate_twice())
    assert caplog.text.count("eval: no majority@k (said once): no reward gives an answer") == 1


@pytest.mark.parametrize(
    "name",
    [
        "eval/mix/sampled_pass@4_ci95.a/b.c",
        "eval/greedy_reward.a",
        "eval/greedy_reward",
        "eval/aime/ema_sampled_reward_ci95",
        "eval/a-1/sampled_num_failed",
    ],
)
def test_the_name_of_a_metric_is_read_back(name: str) -> None:
    found = EvalName.parse(name)
    assert found is not None
    assert str(found) == name


@pytest.mark.parametrize("name", ["step", "reward/mean", "eval/best_reward", "train/greedy_reward", "eval/greedy"])
def test_other_metrics_are_none_of_evaluations(name: str) -> None:
    assert EvalName.parse(name) is None
