"""Estimators of an evaluation: mean@n, pass@k, majority@k and their confidence intervals (pure, no torch).

An evaluation draws n responses to each of P prompts. An estimator gives one score per prompt. `estimate` averages the scores over
prompts and gives the interval. Responses to one prompt are not independent, so the prompt is the unit of the interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_Z_95 = 1.959964  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval: mean +- half_width."""

    mean: float
    half_width: float | None  # None: one prompt has no spread
    num_prompts: int


def estimate(scores: Sequence[float]) -> Estimate:
    """The mean of one score per prompt, and the half width of its 95 % confidence interval, clustered by prompt.

    half_width = z sqrt(sum_i (s_i - mean)^2 / (P (P - 1))), z = 1.96

    For means of n rewards this is the clustered standard error of all n P rewards with the prompt as the cluster (Miller 2024,
    Adding Error Bars to Evals, arXiv:2411.00640),

        sqrt(SE_CLT^2 + sum_c sum_i sum_{j != i} (s_ci - mean) (s_cj - mean) / (n P)^2),  SE_CLT^2 = sum (s_ci - mean)^2 / (n P)^2

    times sqrt(P / (P - 1)) against the bias of small P. Without a cluster around several prompts it is also the paper's standard
    error of scores that are means over repeated answers. The normal approximation is rough for few prompts. If all scores are equal
    the width is 0, although the true one is not.

    Raises ValueError without scores.
    """
    num = len(scores)
    if not num:
        raise ValueError("no scores: an estimate needs at least one prompt")
    mean = math.fsum(scores) / num
    if num == 1:
        return Estimate(mean, None, 1)
    squares = math.fsum((score - mean) ** 2 for score in scores)
    return Estimate(mean, _Z_95 * math.sqrt(squares / (num * (num - 1))), num)


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k responses is correct: 1 - C(n - c, k) / C(n, k)
    (Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1).

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    _check_k(num_responses, k)
    if not 0 <= num_correct <= num_responses:
        raise ValueError(f"{num_correct} of {num_responses} responses are correct; it must be 0 to {num_responses}")
    return 1.0 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the probability that the most frequent answer of k responses is correct: the mean over all C(n, k)
    subsets of the n responses (self-consistency, Wang et al. 2022, arXiv:2203.11171). A tie counts as the mean of the tied answers.

    answers: [n], None for a response without an answer, which has no vote; without any vote the result is 0. correct: [n]; equal
    answers must be judged alike. Time: O(distinct answers * k^3).

    Raises ValueError unless 1 <= k <= n, if the lengths differ, or if equal answers are judged differently.
    """
    _check_k(len(answers), k)
    if len(correct) != len(answers):
        raise ValueError(f"{len(answers)} answers but {len(correct)} verdicts; each answer needs one")
    verdicts: dict[Hashable, bool] = {}
    for answer, verdict in zip(answers, correct, strict=True):
        if answer is not None and verdicts.setdefault(answer, verdict) != verdict:
            raise ValueError(f"the answer {answer!r} is judged both correct and wrong")
    votes = Counter(answer for answer in answers if answer is not None)
    if k == len(answers):  # the only subset
        most = max(votes.values(), default=0)
        winners = [verdicts[answer] for answer, num in votes.items() if num == most]
        return sum(winners) / len(winners) if winners else 0.0
    silent = len(answers) - votes.total()
    chosen = 0.0  # subsets of which the majority is correct; a tie of t answers counts 1 / t each
    for winner, count in votes.items():
        if not verdicts[winner]:
            continue
        others = [num for answer, num in votes.items() if answer != winner]
        for top in range(1, min(count, k) + 1):
            ways = _ways_below(others, silent, k - top, top)
            chosen += math.comb(count, top) * math.fsum(num / (ties + 1) for ties, num in ways.items())
    return chosen / math.comb(len(answers), k)


def _ways_below(counts: Sequence[int], silent: int, size: int, top: int) -> dict[int, int]:
    """Number of subsets of `size` responses, out of those of answers with these counts and of the silent ones, in which no answer
    has more than `top` votes, by the number of answers with exactly `top`."""
    ways = Counter({(taken, 0): math.comb(silent, taken) for taken in range(min(silent, size) + 1)})
    for count in counts:
        longer: Counter[tuple[int, int]] = Counter()
        for (taken, ties), num in ways.items():
            for more in range(min(count, top, size - taken) + 1):
                longer[taken + more, ties + (more == top)] += num * math.comb(count, more)
        ways = longer
    return {ties: num for (taken, ties), num in ways.items() if taken == size}


def _check_k(num_responses: int, k: int) -> None:
    if not 1 <= k <= num_responses:
        raise ValueError(f"k is {k} for {num_responses} responses; it must be 1 to {num_responses}")
