"""The result of an evaluation from the results of its prompts (pure). The master uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.algorithms.estimators import Estimate, estimate, majority_at_k, pass_at_k
from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion

_MOST_VOTES = 64  # majority@k is computed for k up to this, and for all responses: its time grows with k^3


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one part of an evaluation, or of one of its tasks. Prompts that failed count in no mean."""

    eval_set: str  # "": that of eval.prompts
    mode: str
    num_prompts: int
    num_failed: int
    reward: Estimate | None  # mean@n: over prompts, of the mean reward of their n responses; None: every prompt failed
    mean_length: float  # of a response, in tokens; 0 without one
    version_min: int  # of the sampled tokens; -1 without one
    version_max: int
    task: str = ""  # "": all prompts of the part
    # pass@1, majority@4, ...: k up to the number of responses
    at_k: Mapping[str, Estimate] = field(default_factory=dict)
    no_majority: str = ""  # why majority@k is absent, although prompts have several responses


def summarize(
    part: EvalPart, results: Sequence[EvaluatedPrompt], tasks: Sequence[str], correct_reward: float
) -> list[EvaluationResult]:
    """Return the result of a part and, if its prompts are of several tasks, of each task. Each prompt counts alike.

    results: of this part, one for each prompt. tasks: of the set's prompts, by position. correct_reward: a response with at least
    this reward is correct; as float32, like rewards.
    """
    least = float(np.float32(correct_reward))
    found = [_result(part, "", results, least)]
    of_task: dict[str, list[EvaluatedPrompt]] = {}
    for result in results:
        of_task.setdefault(tasks[result.position], []).append(result)
    if len(of_task) > 1:
        found += [_result(part, task, of_task[task], least) for task in sorted(of_task)]
    return found


def _result(part: EvalPart, task: str, results: Sequence[EvaluatedPrompt], least: float) -> EvaluationResult:
    groups = [result.group for result in results if result.group is not None]
    lengths = [length for group in groups for length in group.response_lengths]
    oldest = min((version for group in groups for version in group.version_start), default=None)
    newest = max((version for group in groups for version in group.version_end), default=None)
    at_k, no_majority = _at_k(groups, least)
    return EvaluationResult(
        eval_set=part.eval_set,
        mode=part.mode,
        task=task,
        num_prompts=len(results),
        num_failed=len(results) - len(groups),
        reward=estimate([sum(group.rewards) / len(group.rewards) for group in groups]) if groups else None,
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        version_min=WeightVersion.unpack(oldest).version if oldest is not None else -1,
        version_max=WeightVersion.unpack(newest).version if newest is not None else -1,
        at_k=at_k,
        no_majority=no_majority,
    )


def _at_k(groups: Sequence[GroupSummary], least: float) -> tuple[dict[str, Estimate], str]:
    """Return pass@k and majority@k of prompts with several responses, and why majority@k is absent. k: 1, 2, 4, ... and the number
    of responses, of the prompt with the fewest. Responses of several seats are not tries of the same: they have neither."""
    num = min((len(group.rewards) for group in groups), default=0)
    if num < 2 or any(group.num_seats > 1 for group in groups):
        return {}, ""
    correct = [[reward >= least for reward in group.rewards] for group in groups]

    def passes(at: int, k: int) -> float:
        return pass_at_k(len(correct[at]), sum(correct[at]), k)

    def votes(at: int, k: int) -> float:
        return majority_at_k(groups[at].answers or [None] * len(correct[at]), correct[at], k)

    found = dict(_estimates("pass", list(_powers(num)), len(groups), passes))
    if not any(group.answers for group in groups):
        return (
            found,
            "no reward gives an answer; let the reward function return asyncrl.rewards.score.Score(reward, answer)",
        )
    try:
        counts = [k for k in _powers(num) if k > 1 and (k <= _MOST_VOTES or k == num)]
        found |= dict(_estimates("majority", counts, len(groups), votes))
    except ValueError as error:
        return found, f"{error}; give answers that are judged differently different texts"
    return found, ""


def _estimates(
    name: str, counts: Sequence[int], num_prompts: int, score: Callable[[int, int], float]
) -> Iterator[tuple[str, Estimate]]:
    for k in counts:
        yield f"{name}@{k}", estimate([score(at, k) for at in range(num_prompts)])


def _powers(num: int) -> Iterator[int]:
    """1, 2, 4, ... below num, and num."""
    k = 1
    while k < num:
        yield k
        k *= 2
    yield num
