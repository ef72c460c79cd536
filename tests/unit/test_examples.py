"""The examples' tasks: prompts, answers, demonstrations and rewards. The end-to-end tests check that their models learn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from asyncrl.config.import_object import import_object
from asyncrl.data.sequence import SequenceSample

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(monkeypatch: pytest.MonkeyPatch, example: str) -> ModuleType:
    """Import an example's make.py as when it is run: its own folder comes first."""
    monkeypatch.syspath_prepend(str(EXAMPLES / example))
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    spec = importlib.util.spec_from_file_location(f"make_{example}", EXAMPLES / example / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    return module


@pytest.fixture
def sorter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "sloppy_sorter")


@pytest.fixture
def long_tail(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "long_tail")


# ----------------------------------------------------------------------------------------------------------- sloppy sorter


@pytest.mark.parametrize(
    ("completion", "finished", "expected"),
    [
        ("123558", True, 1.0),
        ("123558", False, 0.0),  # correct so far, but truncated: it might have continued
        ("123585", True, 0.0),
        ("12355", True, 0.0),
        ("1235588", True, 0.0),
        (" 123558", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_sorter_reward(sorter: ModuleType, completion: str, finished: bool, expected: float) -> None:
    assert sorter.reward("S583125=", completion, "123558", finished=finished) == expected


def test_sorter_reward_treats_a_completion_as_finished_by_default(sorter: ModuleType) -> None:
    assert sorter.reward("S583127=", "123578", "123578") == 1.0


def test_sorter_prompts(sorter: ModuleType) -> None:
    recipe = sorter.make_recipe(np.random.default_rng(1))
    prompts = [prompt for prompt, _ in [*recipe.train, *recipe.evaluation]]
    assert len(recipe.train) >= 60 * 64
    assert len(recipe.evaluation) == 512
    assert len(set(prompts)) == len(prompts)  # so the training and evaluation prompts are disjoint
    for prompt, answer in [*recipe.train, *recipe.evaluation]:
        assert prompt[0] == "S"
        assert prompt[-1] == "="
        assert answer == "".join(sorted(prompt[1:-1]))
        assert len(answer) == 6
        assert set(prompt + answer) <= set(recipe.alphabet)
    assert len(recipe.alphabet) == len(set(recipe.alphabet)) == 63


def test_sorter_demonstrations_are_mostly_wrong_and_exclude_evaluation_prompts(sorter: ModuleType) -> None:
    recipe = sorter.make_recipe(np.random.default_rng(1))
    held_out = {prompt for prompt, _ in recipe.evaluation}
    rng = np.random.default_rng(2)
    shown = [recipe.demonstrate(rng) for _ in range(4000)]
    right = np.mean([completion == sorter.right(prompt[1:-1]) for prompt, completion in shown])
    assert 0.12 < right < 0.18
    assert not held_out & {prompt for prompt, _ in shown}
    assert all(len(completion) == 6 and completion.isdigit() for _, completion in shown)


def test_sorter_demonstrations_have_three_kinds_of_mistakes(sorter: ModuleType) -> None:
    rng = np.random.default_rng(1)
    shown = [sorter.sloppy("583127", rng) for _ in range(3000)]
    share = {completion: shown.count(completion) / 3000 for completion in set(shown)}
    assert 0.12 < share.pop("123578") < 0.18
    assert 0.24 < share.pop("875321") < 0.33
    assert 0.24 < share.pop("583127") < 0.33
    assert all(sum(a != b for a, b in zip("123578", completion, strict=True)) == 1 for completion in share)


def test_the_seed_determines_the_prompts(sorter: ModuleType, long_tail: ModuleType) -> None:
    for make in (sorter, long_tail):
        first, again, other = (make.make_recipe(np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert (first.train, first.evaluation) == (again.train, again.evaluation)
        assert first.train != other.train


# --------------------------------------------------------------------------------------------------------------- long tail


def test_descent(long_tail: ModuleType) -> None:
    assert long_tail.descent(20) == [18, 9, 0]
    assert long_tail.descent(280)[:4] == [270, 261, 252, 243]
    assert long_tail.descent(5) == [0]


def test_lengths_have_a_long_tail(long_tail: ModuleType) -> None:
    recipe = long_tail.make_recipe(np.random.default_rng(1))
    lengths = np.array([len(answer) + 1 for _, answer in recipe.train])  # with EOS
    assert 21 < lengths.mean() < 26
    assert np.median(lengths) == 10
    assert 65 < np.percentile(lengths, 90) < 78
    assert 100 < lengths.max() == 107 < recipe.max_new_tokens
    for prompt, answer in recipe.train[:50]:
        assert prompt[-1] == ":"
        assert 5 <= int(prompt[:-1]) <= 300
        assert set(prompt + answer) <= set(recipe.alphabet)


@pytest.mark.parametrize(
    ("completion", "finished", "expected"),
    [
        ("18;9;0", True, 1.0),
        ("18;9;0", False, 0.0),
        ("18;9;1", True, 2 / 3),
        ("18;9", True, 2 / 3),
        ("18;9;0;0", True, 2 / 3),  # continued where it should have ended
        ("17;9;0", True, 0.0),  # nothing counts after the first mistake
        ("", True, 0.0),
    ],
)
def test_long_tail_reward(long_tail: ModuleType, completion: str, finished: bool, expected: float) -> None:
    assert long_tail.reward("20:", completion, "18;9;0", finished=finished) == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------------------- self-play


class NoPreference:
    """An engine whose model finds all replies equally likely, on one rank."""

    def logprobs(self, sample: SequenceSample, *, temperature: float) -> np.ndarray:
        return np.zeros(sample.total_tokens(), np.float32)

    def all_reduce_sum(self, values: list[float]) -> np.ndarray:
        return np.array(values, np.float64)


def test_self_play_rewards_and_games() -> None:
    """In these games the reply has one legal value, or does not matter."""
    reply = import_object(f"{EXAMPLES}/self_play/step.py:reply", "function")
    games = {(2, 2): 1, (2, 3): -1, (3, 0): -1, (5, 1): 0, (6, 2): 0, (4, 3): -1}  # heap and move -> the actor's reward
    groups = [{"packed_input_ids": [list(game) for game in games]}]
    made, stats = reply(NoPreference(), SequenceSample.from_groups(["t"], groups), None)
    assert made.data["dense_rewards"].tolist() == [x for reward in games.values() for x in (0, reward)]
    assert made.data["game"].reshape(-1, 3)[:, :2].tolist() == [list(game) for game in games]
    assert made.data["game_mask"].reshape(-1, 3).tolist() == [[False, False, n > 2] for n in range(6)]
    assert made.data["game_won"].tolist() == [0] * 17 + [1]
    assert stats == {"game/best_moves": 3 / 5, "game/best_replies": 1.0}
