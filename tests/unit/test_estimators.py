"""Estimators of evaluations against cases computed by hand, and against enumeration of all subsets."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from asyncrl.algorithms.estimators import estimate, majority_at_k, pass_at_k


@pytest.mark.parametrize(
    ("responses", "correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 - 3 / 6),  # C(3, 2) / C(4, 2)
        (5, 2, 3, 1 - 1 / 10),  # C(3, 3) / C(5, 3)
        (4, 3, 2, 1.0),  # only one is wrong: each pair has a correct one
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
    ],
)
def test_pass_at_k_is_that_of_the_paper(responses: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(responses, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    for responses, k in ((6, 1), (6, 3), (7, 5)):
        for correct in range(responses + 1):
            verdicts = [at < correct for at in range(responses)]
            subsets = [any(subset) for subset in itertools.combinations(verdicts, k)]
            assert pass_at_k(responses, correct, k) == pytest.approx(sum(subsets) / len(subsets))


def test_majority_of_all_responses_and_of_ties() -> None:
    assert majority_at_k(["7", "7", "8"], [True, True, False], 3) == 1.0
    assert majority_at_k(["7", "8", "8"], [True, False, False], 3) == 0.0
    assert majority_at_k(["7", "8"], [True, False], 2) == 0.5
    # Pairs: 77 is correct, 78 twice a tie
    assert majority_at_k(["7", "7", "8"], [True, True, False], 2) == pytest.approx((1 + 2 * 0.5) / 3)
    # A response without an answer has no vote
    assert majority_at_k(["7", None, None], [True, False, False], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 1) == 0.0


@pytest.mark.parametrize("answers", ["aabbcd-", "aaabbb", "abcdef", "aabbcc--", "------"])
@pytest.mark.parametrize("right", ["a", "bc", ""])
def test_majority_is_the_mean_over_all_subsets(answers: str, right: str) -> None:
    given = [None if answer == "-" else answer for answer in answers]
    correct = [answer is not None and answer in right for answer in given]
    for k in range(1, len(given) + 1):
        shares = [_majority(subset, right) for subset in itertools.combinations(given, k)]
        assert majority_at_k(given, correct, k) == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def _majority(answers: tuple[str | None, ...], right: str) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, num in votes.items() if num == max(votes.values())]
    return sum(answer in right for answer in winners) / len(winners) if winners else 0.0


def test_the_interval_is_computed_by_hand() -> None:
    found = estimate([1.0, 0.0, 0.5, 0.5])  # squares 0.25 + 0.25: standard error sqrt(0.5 / (4 * 3))
    assert found.mean == 0.5
    assert found.half_width == pytest.approx(1.959964 * math.sqrt(0.5 / 12))
    assert estimate([0.3]).half_width is None
    assert estimate([1.0, 1.0]).half_width == 0.0


def test_the_interval_is_the_clustered_one_of_the_paper_by_hand() -> None:
    """Prompts with rewards 1, 0 and 1, 1: the mean is 0.75, the deviations are 0.25, -0.75 and 0.25, 0.25. Their squares add up to
    0.75, and the products of the ordered pairs of each prompt to -0.375 and 0.125: (0.75 - 0.25) / 4^2 = 0.03125."""
    rewards = [[1.0, 0.0], [1.0, 1.0]]
    mean = 0.75
    squares = sum((reward - mean) ** 2 for group in rewards for reward in group)
    pairs = sum((one - mean) * (two - mean) for group in rewards for one, two in itertools.permutations(group, 2))
    assert (squares, pairs) == (0.75, -0.25)
    clustered = math.sqrt((squares + pairs) / 4**2)
    assert clustered == pytest.approx(math.sqrt(0.03125))
    found = estimate([0.5, 1.0])
    assert found.half_width == pytest.approx(1.959964 * clustered * math.sqrt(2 / 1))
    assert found.half_width == pytest.approx(1.959964 * 0.25)


def test_the_interval_is_that_of_clusters_and_not_of_responses() -> None:
    rewards = [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    every = [reward for group in rewards for reward in group]
    mean = sum(every) / len(every)
    clustered = math.sqrt(sum(sum(reward - mean for reward in group) ** 2 for group in rewards)) / len(every)
    found = estimate([sum(group) / len(group) for group in rewards])
    assert found.half_width == pytest.approx(1.959964 * clustered * math.sqrt(3 / 2))


def test_what_has_no_estimate_is_refused() -> None:
    with pytest.raises(ValueError, match="k is 3 for 2 responses"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="3 of 2 responses are correct"):
        pass_at_k(2, 3, 1)
    with pytest.raises(ValueError, match="k is 0"):
        majority_at_k(["a"], [True], 0)
    with pytest.raises(ValueError, match="2 answers but 1 verdicts"):
        majority_at_k(["a", "b"], [True], 1)
    with pytest.raises(ValueError, match="judged both correct and wrong"):
        majority_at_k(["a", "a"], [True, False], 1)
    with pytest.raises(ValueError, match="no scores"):
        estimate([])
