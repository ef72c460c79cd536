"""Rewards with answers: from the reward function, environment or agent to the evaluation."""

from __future__ import annotations

import json
import pickle

import msgspec
import numpy as np
import pytest

from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.reward_function import as_reward
from asyncrl.rewards.score import Score, answers_of
from asyncrl.rewards.trajectory import (
    ANSWERS,
    Episode,
    Response,
    build_sample,
    complete_sample,
    sample_answers,
    session_summary,
    summary_of,
)


def test_a_score_is_its_reward() -> None:
    score = Score(0.5, "42")
    assert (score, score + 1, score.answer, json.dumps(score)) == (0.5, 1.5, "42", "0.5")
    again = pickle.loads(pickle.dumps(score))
    assert (type(again), again, again.answer) == (Score, 0.5, "42")
    assert as_reward(score) is score
    assert as_reward(Score(float("nan"), "42")) is None
    assert as_reward(Score(1e39, "42")) is None


def test_long_answers_are_cut_and_stay_different() -> None:
    one, two, same = (Score(0, "1" * 500 + end).answer for end in ("a", "b", "a"))
    assert one is not None
    assert len(one) == 200
    assert one == same != two
    assert Score(0, "1" * 200).answer == "1" * 200


def test_an_answer_is_text() -> None:
    with pytest.raises(TypeError, match=r"the answer 42 of a Score must be text or None; use str\(answer\)"):
        Score(1.0, 42)  # type: ignore[arg-type]


def test_only_scores_have_answers() -> None:
    assert answers_of([1.0, 0.0]) == []
    assert answers_of([Score(1.0, "a"), 0.0, Score(0.0, None)]) == ["a", None, None]


def _episode(reward: object) -> Episode:
    response = Response([1, 2], finished=True)
    response.add_piece([3, 4], [0.0, 0.0], [(5, 2)])
    episode = Episode([1, 2])
    episode.add_response(response)
    episode.add_reward(reward)
    return episode


def test_the_answers_of_a_group_reach_its_summary_and_not_the_trainer() -> None:
    sample = build_sample("s", [_episode(Score(1.0, "7")), _episode(0.25)])
    assert sample_answers(sample) == ["7", None]
    complete = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0)
    assert ANSWERS not in complete.data
    assert complete.data["rewards"].tolist() == [1.0, 0.25]
    assert sample_answers(build_sample("s", [_episode(1.0)])) == []


def test_words_of_an_agents_own_are_no_answers() -> None:
    """They may be any objects, and need not be what the response answers."""
    own = SequenceSample.from_groups(["s"], [{"words_answer": [{"steps": 3}, 4]}])
    sample = build_sample("s", [_episode(1.0), _episode(0.0)]).update(own)
    assert sample_answers(sample) == []
    kept = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, words=["words_answer"])
    assert kept.words("words_answer") == [[{"steps": 3}, 4]]


def test_a_session_has_the_answer_of_its_last_sequence() -> None:
    episodes = [_episode(Score(1.0, text)) for text in ("a", "b", "c")]
    sample = build_sample("s", episodes, sessions=[0, 0, 1])
    summary = msgspec.structs.replace(summary_of(sample), answers=sample_answers(sample))
    assert session_summary(sample, summary).answers == ["b", "c"]
    assert np.asarray(session_summary(sample, summary).rewards).tolist() == [1.0, 1.0]
