"""Values that would break training are refused on entry, and rejected prompts are reported."""

import logging

import numpy as np
import pytest

from asyncrl.config.schema import ConfigError
from asyncrl.data.sequence import SequenceSample
from asyncrl.master.report import rejection_lines
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.reward import Reward
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample
from tests.support.services import make_services

V1 = WeightVersion(1, 1).pack()
LOGGER = logging.getLogger("test")


def sample_of(logprob=-0.5, reward=1.0):
    """Return a sample as an agent does: a prompt of two tokens and a response of two."""
    episode = Episode([1, 2])
    episode.add_response(Response([1, 2], [3, 4], [-1.0, logprob], [(V1, 2)], finished=True))
    episode.reward = reward
    return build_sample("g", [episode])


def complete(sample):
    return complete_sample(sample, ticket_id="t", task_id=0, birth_time=1.0)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_are_refused(number):
    assert complete(sample_of()).ids == ("t",)
    with pytest.raises(ValueError, match="logprobs that are not finite"):
        complete(sample_of(logprob=number))
    with pytest.raises(ValueError, match="rewards that are not finite"):
        complete(sample_of(reward=number))


@pytest.mark.parametrize(
    ("key", "dtype"), [("packed_logprobs", np.float64), ("packed_input_ids", np.int32), ("loss_mask", np.int64)]
)
def test_wrong_dtypes_name_key_and_both_dtypes(key, dtype):
    sample = sample_of()
    with pytest.raises(ValueError, match=rf"{key}.*{np.dtype(dtype)}"):
        SequenceSample(sample.ids, sample.seqlens, {**sample.data, key: sample.data[key].astype(dtype)})


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("reward = 3", r"reward '.*:reward' is 3, which is not callable; name a function"),
        (
            "def reward(prompt): pass",
            r"signature \(prompt\): too many .*; it is called as \(prompt, completion, answer\)",
        ),
        ("def reward(p, c, a, extra): pass", r"signature \(p, c, a, extra\): missing a required argument: 'extra'"),
        (
            "def reward(p, c, a, *, extra): pass",
            r"missing a required .*'extra'; .* may also accept the keywords finished, task, row",
        ),
    ],
)
def test_rewards_that_cannot_be_called_are_refused(tmp_path, source, told):
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=told):
        Reward(f"{file}:reward", timeout_s=1.0, services=make_services(logger=LOGGER))


def test_rejections_are_reported_with_count_cause_and_remedy():
    lines = rejection_lines(
        {"too_hard": 2, "reward_error": 9, "of_an_agent": 1}, {"reward_error": "judge.py:reward raised KeyError('x')"}
    )
    assert lines == [
        "reward_error: 9; the first: judge.py:reward raised KeyError('x'). Fix the reward function",
        "too_hard: 2. Use easier prompts, or lower rollout.success_rate_lb",
        "of_an_agent: 1",
    ]
