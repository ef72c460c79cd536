"""Building a trajectory from pieces: every token keeps its logprob, its version and its masks."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.dataflow.graph import TRAJECTORY_KEYS
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample, summary_of

V1, V2, V3 = (WeightVersion(1, version).pack() for version in (1, 2, 3))


def response(input_ids: list[int], output_ids: list[int], version: int = V1, *, finished: bool = True) -> Response:
    made = Response(input_ids, finished=finished)
    made.add_piece(output_ids, [-0.1 * token for token in output_ids], [(version, len(output_ids))])
    return made


def episode(
    prompt: list[int], output_ids: list[int], version: int = V1, *, finished: bool = True, reward: float = 0.0
) -> Episode:
    made = Episode(prompt)
    made.add_response(response(prompt, output_ids, version, finished=finished))
    made.reward = reward
    return made


def test_pieces_of_several_versions_join_into_runs() -> None:
    made = Response([7])
    made.add_piece([1, 2], [-0.1, -0.2], [(V1, 2)])
    made.add_piece([], [], [])
    made.add_piece([3, 4, 5], [-0.3, -0.4, -0.5], [(V1, 1), (V2, 2)])
    assert made.output_ids == [1, 2, 3, 4, 5]
    assert made.logprobs == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert made.versions == [(V1, 3), (V2, 2)]
    assert made.oldest_version == V1


def test_every_key_of_a_group_is_aligned() -> None:
    first = Episode([5, 6])
    pieces = Response([5, 6], finished=True)
    pieces.add_piece([1, 2], [-0.5, -0.25], [(V1, 2)])
    pieces.add_piece([9], [-1.5], [(V3, 1)])
    first.add_response(pieces)
    first.reward = 1.0
    second = episode([5, 6], [4], V2, finished=False)

    sample = build_sample("p", [first, second])

    assert set(sample.keys) == set(TRAJECTORY_KEYS)
    assert sample.seqlens["packed_input_ids"] == [[5, 3]]
    data = {key: array.tolist() for key, array in sample.data.items()}
    assert data["packed_input_ids"] == [5, 6, 1, 2, 9, 5, 6, 4]
    assert data["packed_prompts"] == [5, 6]
    np.testing.assert_allclose(data["packed_logprobs"], [0, 0, -0.5, -0.25, -1.5, 0, 0, -0.4], rtol=1e-6)
    assert data["prompt_mask"] == [True, True, False, False, False, True, True, False]
    assert data["loss_mask"] == [False, False, True, True, True, False, False, True]
    assert data["versions"] == [-1, -1, V1, V1, V3, -1, -1, V2]
    assert data["version_start"] == [V1, V2]
    assert data["version_end"] == [V3, V2]
    assert data["seq_no_eos_mask"] == [False, True]
    assert data["rewards"] == [1.0, 0.0]


def test_observations_of_the_environment_are_not_trained() -> None:
    member = Episode([5])
    member.add_response(response([5], [1, 2], V1))
    member.add_observation([30, 31])
    member.add_response(response([5, 1, 2, 30, 31], [3], V2))

    data = {key: array.tolist() for key, array in build_sample("p", [member]).data.items()}

    assert data["packed_input_ids"] == [5, 1, 2, 30, 31, 3]
    assert data["loss_mask"] == [False, True, True, False, False, True]
    assert data["prompt_mask"] == [True, False, False, False, False, False]
    assert data["versions"] == [-1, V1, V1, -1, -1, V2]
    np.testing.assert_allclose(data["packed_logprobs"], [0, -0.1, -0.2, 0, 0, -0.3], rtol=1e-6)
    assert (data["version_start"], data["version_end"]) == ([V1], [V2])


def test_the_last_response_decides_whether_a_sequence_is_truncated() -> None:
    member = Episode([5])
    member.add_response(response([5], [1]))
    assert not member.truncated
    member.add_observation([30])
    member.add_response(response([5, 1, 30], [2], finished=False))
    assert member.truncated


def test_a_response_must_continue_the_episode() -> None:
    with pytest.raises(ValueError, match="cannot continue an episode of 1 tokens"):
        Episode([5]).add_response(response([5, 6], [1]))


def test_the_ticket_completes_the_sample() -> None:
    sample = build_sample("e0-p3", [episode([5], [1], reward=0.5)])
    done = complete_sample(sample, ticket_id="t9", task_id=2, birth_time=12.5)
    assert done.ids == ("t9",)
    assert done.data["task_ids"].tolist() == [2]
    assert done.data["birth_time"].tolist() == [12.5]
    assert done.data["packed_input_ids"] is sample.data["packed_input_ids"]  # nothing is copied


def test_an_incomplete_sample_is_refused() -> None:
    sample = build_sample("p", [episode([5], [1])])
    without = sample.select_keys([key for key in sample.keys if key not in {"versions", "task_ids", "birth_time"}])
    with pytest.raises(ValueError, match=r"lacks the keys \['versions'\]"):
        complete_sample(without, ticket_id="t", task_id=0, birth_time=0.0)


@pytest.mark.parametrize("key", ["values", "proximal_logprobs"])
def test_a_key_that_only_mfcs_write_is_refused(key: str) -> None:
    sample = build_sample("p", [episode([5], [1])])
    sample = sample.update(sample.derive({key: np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match=rf"has the keys \['{key}'\].*`rewards`.*train\.mfcs"):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0)


def test_a_key_that_the_agent_adds_is_kept() -> None:
    """It is recorded with record.trajectories."""
    sample = build_sample("p", [episode([5], [1])])
    sample = sample.update(sample.derive({"my_notes": np.ones(2, np.float32)}))
    assert "my_notes" in complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0).keys


def test_a_sequence_without_sampled_tokens_is_refused() -> None:
    sample = build_sample("p", [episode([5], [1]), Episode([5])])
    with pytest.raises(ValueError, match="without a sampled token"):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    sample = build_sample("p", [episode([5], [1], reward=float("nan"))])
    with pytest.raises(ValueError, match="not finite"):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0)


def of_two_turns() -> Episode:
    """Two tokens, an observation of one token, and three tokens; the prompt has one."""
    member = Episode([5])
    member.add_response(response([5], [1, 2]))
    member.add_observation([30])
    member.add_response(response([5, 1, 2, 30], [3, 4, 6]))
    return member


def test_rewards_of_tokens_and_turns_stand_at_their_tokens() -> None:
    first, second = of_two_turns(), of_two_turns()
    first.add_turn_reward([0.25, 0.5], turn=0)  # one for each token of the first turn
    first.add_turn_reward(2)  # the last turn: at its last token
    first.add_reward([0.0, 1.0, 0.0])  # one for each token of the last response
    first.add_reward(3.0)  # of the whole episode
    second.add_turn_reward(-1.0, turn=0)
    sample = build_sample("p", [first, second])
    assert sample.data["dense_rewards"].tolist() == [0, 0.25, 0.5, 0, 0, 1, 2, 0, 0, -1, 0, 0, 0, 0]
    assert sample.data["rewards"].tolist() == [3, 0]
    done = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, dense_rewards=True)
    assert summary_of(done).rewards == [3 + 3.75, -1]


def test_rewards_must_be_one_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 rewards for a response of 3 tokens"):
        of_two_turns().add_turn_reward([1.0, 2.0])


def test_the_reward_of_a_turn_without_tokens_is_that_of_the_episode() -> None:
    member = episode([5], [1])
    member.add_response(response([5, 1], []))
    member.add_turn_reward(2.0)
    assert (member.reward, member.token_rewards) == (2.0, [])


def test_every_sample_of_a_run_with_dense_rewards_has_them() -> None:
    sample = build_sample("p", [episode([5], [1], reward=1.0)])
    assert "dense_rewards" not in complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0).keys
    done = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, dense_rewards=True)
    assert done.data["dense_rewards"].tolist() == [0, 0]
    assert summary_of(done).rewards == [1]


def test_a_reward_of_a_token_that_is_not_finite_is_refused() -> None:
    member = of_two_turns()
    member.add_reward([0.0, float("inf"), 0.0])
    with pytest.raises(ValueError, match="rewards that are not finite"):
        complete_sample(build_sample("p", [member]), ticket_id="t", task_id=0, birth_time=0.0, dense_rewards=True)


def test_rewards_of_tokens_need_the_field_in_the_config() -> None:
    member = of_two_turns()
    member.add_turn_reward(1.0)
    with pytest.raises(ValueError, match=r"set train\.dense_rewards=true"):
        complete_sample(build_sample("p", [member]), ticket_id="t", task_id=0, birth_time=0.0)


def test_the_summary_counts_sampled_tokens() -> None:
    turns = Episode([5])
    turns.add_response(response([5], [1, 2], V1))
    turns.add_observation([30])
    turns.add_response(response([5, 1, 2, 30], [3], V2))
    sample = build_sample("p", [turns, episode([5], [1], V3, reward=1.0)])
    summary = summary_of(sample)
    assert summary == GroupSummary(
        seqlens=[5, 2], response_lengths=[3, 1], rewards=[0.0, 1.0], version_start=[V1, V3], version_end=[V2, V3]
    )


def test_sequences_are_sessions_of_their_own_unless_the_agent_says_otherwise() -> None:
    """With train.branches a task whose agent has one sequence for each member trains beside others."""
    sample = build_sample("s", [episode([1, 2], [3, 4]), episode([1, 2], [5])])
    made = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, branches=True)
    assert made.data["sessions"].tolist() == [0, 1]
