"""Rewards and advantages, compared with values computed by hand and with loops over sequences and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import (
    advantage_keys,
    advantages_by_task,
    compute_advantages,
    final_rewards,
    gae,
    group_advantages,
    groups_of_seats,
    leave_one_out_advantages,
    mean_baseline_advantages,
    overlong_penalties,
    returns_of,
    session_advantages,
    shape_rewards,
    trained_mask,
)
from asyncrl.algorithms.packed import mean_per_sequence, sum_per_sequence, to_tokens
from asyncrl.config.schema import PPOConfig, TaskAlgorithmConfig, ppo_by_task


def reference_gae(
    rewards: list[float], values: list[float], mask: list[bool], truncated: bool, discount: float, lam: float
) -> list[float]:
    """Compute the advantages of one sequence, from its last action to its first."""
    actions = [t for t, on in enumerate(mask) if on]
    advantages = [0.0] * len(mask)
    next_advantage = 0.0
    for k in reversed(range(len(actions))):
        t = actions[k]
        last = k == len(actions) - 1
        until = len(mask) if last else actions[k + 1]
        value = values[t - 1] if t > 0 else 0.0
        next_value = (values[t] if truncated else 0.0) if last else values[actions[k + 1] - 1]
        delta = sum(rewards[t:until]) + discount * next_value - value
        next_advantage = delta + discount * lam * next_advantage
        advantages[t] = next_advantage
    return advantages


def packed(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def bools(text: str) -> Tensor:
    return torch.tensor([letter == "1" for letter in text], dtype=torch.bool)


def test_shape_rewards_by_hand() -> None:
    rewards, truncated = torch.tensor([1.0, 0.0, 1.0, 100.0]), bools("0010")
    shaped = shape_rewards(rewards, truncated, scaling=2.0, bias=0.5, clip=20.0, mask_no_eos_with_zero=False)
    assert shaped.tolist() == [1.0, -1.0, 1.0, 20.0]
    shaped = shape_rewards(rewards, truncated, scaling=2.0, bias=0.5, clip=20.0, mask_no_eos_with_zero=True)
    assert shaped.tolist() == [1.0, -1.0, 0.0, 20.0]
    shaped = shape_rewards(-rewards, truncated, scaling=2.0, bias=0.5, clip=20.0, mask_no_eos_with_zero=False)
    assert shaped.tolist() == [-3.0, -1.0, -3.0, -20.0]


def test_trained_mask() -> None:
    mask, truncated = bools("0110011"), bools("01")
    assert trained_mask(mask, truncated, packed(4, 3), mask_too_long=False).tolist() == mask.tolist()
    assert trained_mask(mask, truncated, packed(4, 3), mask_too_long=True).tolist() == bools("0110000").tolist()


def test_group_advantages_by_hand() -> None:
    """Groups of 4 (mean 0.5, std 0.5), 2 (mean 3, std 1) and 1."""
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, 4.0, 5.0]), [4, 2, 1])
    assert advantages.tolist() == pytest.approx([1, -1, 1, -1, -1, 1, 0], abs=1e-5)
    assert group_advantages(torch.tensor([0.3, 0.3, 0.3]), [3]).abs().max() < 1e-8
    assert to_tokens(advantages[:2], packed(2, 3)).tolist() == pytest.approx([1, 1, -1, -1, -1], abs=1e-5)


def test_baselines_by_hand() -> None:
    """Groups of 4 (one right answer), 2 and 1. Leave-one-out subtracts the mean of the other three rewards: 0 or 1/3."""
    rewards, sizes = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 4.0, 5.0]), [4, 2, 1]
    assert mean_baseline_advantages(rewards, sizes).tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1, 0]
    assert leave_one_out_advantages(rewards, sizes).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, -2, 2, 0])
    for of_group in (mean_baseline_advantages, leave_one_out_advantages, group_advantages):
        assert of_group(torch.zeros(0), []).tolist() == []
        assert of_group(torch.full((3,), 0.1), [3]).abs().max() < 1e-8  # 0.1 has no exact float32
        assert of_group(rewards, sizes).dtype == torch.float32


def test_overlong_penalties_by_hand() -> None:
    """DAPO's numbers: at most 20480 tokens, of them 4096 in the buffer at the end."""
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    penalties = overlong_penalties(lengths, length=20480, buffer=0.2, penalty=1.0)
    assert penalties.tolist() == pytest.approx([0, 0, -0.5, -1, -1])
    assert penalties.dtype == torch.float32
    assert overlong_penalties(lengths, length=20480, buffer=0.2, penalty=3.0).tolist() == pytest.approx(
        [0, 0, -1.5, -3, -3]
    )
    assert overlong_penalties(torch.tensor([5]), length=10, buffer=1.0, penalty=1.0).tolist() == [-0.5]


def test_sequences_by_hand() -> None:
    x, mask = torch.tensor([1.0, 2.0, 4.0, float("nan"), 8.0]), bools("11001")
    assert sum_per_sequence(torch.tensor([1.0, 2.0, 4.0, 8.0]), packed(1, 0, 3)).tolist() == [1, 0, 14]
    assert mean_per_sequence(x, mask, packed(3, 1, 0, 1)).tolist() == [1.5, 0, 0, 8]


def test_final_rewards_are_on_the_last_sampled_token() -> None:
    """Covers tokens of the environment after it, gaps in the mask, and a sequence without sampled tokens."""
    mask = bools("0110" + "00" + "10101")
    rewards = final_rewards(torch.tensor([5.0, 7.0, 9.0]), mask, packed(4, 2, 5))
    assert rewards.tolist() == [0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 9]
    assert final_rewards(torch.zeros(0), bools(""), packed()).tolist() == []


def test_gae_by_hand() -> None:
    """A prompt of 2 tokens, 3 actions, discount 0.5, lambda 0.5, reward 1 at the end; values after each token are 9 2 4 8 16.

    If the sequence ended, delta = (0 + .5 * 4 - 2, 0 + .5 * 8 - 4, 1 - 8) = (0, 0, -7). If it was truncated, the last delta is
    1 + .5 * 16 - 8 = 1.
    """
    rewards, values, mask = torch.tensor([0.0, 0, 0, 0, 1]), torch.tensor([9.0, 2, 4, 8, 16]), bools("00111")
    ended = gae(rewards, values, mask, bools("0"), packed(5), discount=0.5, gae_lambda=0.5)
    assert ended.tolist() == [0, 0, -7 / 16, -7 / 4, -7]
    truncated = gae(rewards, values, mask, bools("1"), packed(5), discount=0.5, gae_lambda=0.5)
    assert truncated.tolist() == [0, 0, 1 / 16, 1 / 4, 1]


def test_returns_by_hand() -> None:
    """The same sequence. The return R_k = A_k + V_k stands beside V_k, one token before the action.

    An action at the first token has no state.
    """
    values, mask = torch.tensor([9.0, 2, 4, 8, 16]), bools("00111")
    advantages = torch.tensor([0, 0, -7 / 16, -7 / 4, -7])
    returns, states = returns_of(advantages, values, mask, packed(5))
    assert states.tolist() == bools("01110").tolist()
    assert returns.tolist() == [0, 2 - 7 / 16, 4 - 7 / 4, 1, 0]
    returns, states = returns_of(torch.ones(5), torch.zeros(5), bools("10" + "101"), packed(2, 0, 3))
    assert states.tolist() == bools("00010").tolist()
    assert returns.tolist() == [0, 0, 0, 1, 0]
    assert returns_of(torch.zeros(0), torch.zeros(0), bools(""), packed())[1].tolist() == []


def test_with_lambda_1_returns_are_sums_of_later_rewards() -> None:
    """This holds for any critic if the sequence has ended."""
    mask, values = bools("00111"), torch.randn(5)
    rewards = torch.tensor([0.0, 0, 1, 2, 4])
    advantages = gae(rewards, values, mask, bools("0"), packed(5), discount=1.0, gae_lambda=1.0)
    assert returns_of(advantages, values, mask, packed(5))[0].tolist() == pytest.approx([0, 7, 6, 4, 0], abs=1e-5)


def test_value_free_gives_every_token_the_final_reward() -> None:
    mask = bools("0111" + "011")
    rewards = final_rewards(torch.tensor([0.7, -1.3]), mask, packed(4, 3))
    advantages = gae(rewards, torch.zeros(7), mask, bools("01"), packed(4, 3), discount=1.0, gae_lambda=1.0)
    assert advantages.tolist() == pytest.approx([0, 0.7, 0.7, 0.7, 0, -1.3, -1.3])


@pytest.mark.parametrize("seed", range(20))
def test_gae_against_the_reference(seed: int) -> None:
    """Covers any lengths (including 0 and 1), masks with gaps, and rewards at any token."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 40, (6,), generator=random).tolist()
    total = sum(lengths)
    rewards, values = (torch.randn(total, generator=random) for _ in range(2))
    mask = torch.rand(total, generator=random) < (0.2, 0.7, 1.0)[seed % 3]
    truncated = torch.rand(6, generator=random) < 0.5
    discount, lam = (1.0, 1.0) if seed % 4 == 0 else torch.rand(2, generator=random).tolist()
    expected: list[float] = []
    for s, length in enumerate(lengths):
        here = slice(len(expected), len(expected) + length)
        expected += reference_gae(
            rewards[here].tolist(), values[here].tolist(), mask[here].tolist(), bool(truncated[s]), discount, lam
        )
    advantages = gae(rewards, values, mask, truncated, packed(*lengths), discount=discount, gae_lambda=lam)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)


def test_gae_without_tokens_or_actions() -> None:
    empty = torch.zeros(0)
    assert gae(empty, empty, bools(""), bools(""), packed(), discount=1.0, gae_lambda=1.0).tolist() == []
    ones = torch.ones(3)
    assert gae(ones, ones, bools("000"), bools("1"), packed(3), discount=1.0, gae_lambda=1.0).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------------------------- compute_advantages

# Two groups of two sequences: prompts of one token, responses of 1, 2, 2 and 1 tokens. The last response is truncated.
LENGTHS, SIZES = (2, 3, 3, 2), [2, 2]
DATA = {
    "rewards": torch.tensor([1.0, 0.0, 3.0, 1.0]),
    "loss_mask": bools("01" + "011" + "011" + "01"),
    "seq_no_eos_mask": bools("0001"),
}


def made(extra: dict[str, Tensor] | None = None, kl_coef: float = 0.0, **fields: object) -> list[float]:
    config = PPOConfig(kl_coef=kl_coef, **fields)  # type: ignore[arg-type]
    result = compute_advantages(DATA | (extra or {}), packed(*LENGTHS), SIZES, config, kl_coef=kl_coef)
    assert not result.advantages_T[~result.mask_T].any()
    assert result.advantages_T.dtype == result.returns_T.dtype == torch.float32
    return result.advantages_T.tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, -1, 1, -1]),  # GRPO
        ({"baseline": "leave_one_out"}, [1, -1, 1, -1]),  # normalisation by group cancels the factor n / (n - 1)
        ({"baseline": "group_mean", "advantage_norm": "none"}, [0.5, -0.5, 1, -1]),  # Dr.GRPO
        ({"baseline": "leave_one_out", "advantage_norm": "none"}, [1, -1, 2, -2]),  # RLOO
        ({"advantage_norm": "none"}, [1, 0, 3, 1]),  # REINFORCE
        ({"advantage_norm": "none", "reward_bias": 1.0, "reward_scaling": 2.0}, [0, -2, 4, 0]),
        ({"advantage_norm": "none", "mask_no_eos_with_zero": True}, [1, 0, 3, 0]),
        ({"advantage_norm": "none", "mask_too_long": True}, [1, 0, 3, 0]),
        # DAPO's penalty applies before the baseline: a response has at most 2 tokens, and one with 2 tokens loses 1
        (
            {
                "advantage_norm": "none",
                "overlong_penalty": 1.0,
                "overlong_length": 2,
                "overlong_buffer": 0.5,
            },
            [1, -1, 2, 1],
        ),
        (
            {
                "baseline": "group_mean",
                "advantage_norm": "none",
                "overlong_penalty": 1.0,
                "overlong_length": 2,
                "overlong_buffer": 0.5,
            },
            [1, -1, 0.5, -0.5],
        ),
    ],
)
def test_every_token_gets_the_advantage_of_its_response(fields: dict[str, object], expected: list[float]) -> None:
    one, two, three, four = expected
    wanted = [0, one, 0, two, two, 0, three, three, 0, four]
    assert made(**fields) == pytest.approx(wanted, abs=1e-5)


def test_each_task_has_its_own_algorithm() -> None:
    """The first group is of a task with RLOO. The second one is of a task without a baseline, whose rewards count twice and whose
    truncated response is not trained. The task between them has no group."""
    tasks = {
        "a": TaskAlgorithmConfig(baseline="leave_one_out", advantage_norm="none"),
        "b": TaskAlgorithmConfig(),
        "c": TaskAlgorithmConfig(advantage_norm="none", reward_scaling=2.0, mask_too_long=True),
    }
    configs = list(ppo_by_task(PPOConfig(), tasks).values())
    data = DATA | {"task_ids": torch.tensor([0, 2])}
    found = advantages_by_task(data, packed(*LENGTHS), SIZES, configs, kl_coef=0.0)
    assert found.advantages_T.tolist() == [0, 1, 0, -1, -1, 0, 6, 6, 0, 0]
    assert found.rewards_S.tolist() == [1, 0, 6, 2]
    assert found.mask_T.tolist() == bools("01" + "011" + "011" + "00").tolist()
    assert found.states_T.tolist() == bools("10" + "110" + "110" + "00").tolist()
    none = {key: value[:0] for key, value in data.items()}
    assert advantages_by_task(none, packed(), [], configs, kl_coef=0.0).advantages_T.tolist() == []


def test_the_kl_penalty_of_each_task_is_that_of_the_batch() -> None:
    logprobs = {"proximal_logprobs": torch.zeros(10), "packed_ref_logprobs": -torch.arange(10.0)}
    data = DATA | logprobs | {"task_ids": torch.tensor([1, 0])}
    tasks = {"a": TaskAlgorithmConfig(reward_scaling=2.0), "b": TaskAlgorithmConfig(reward_scaling=3.0)}
    a, b = ppo_by_task(PPOConfig(kl_coef=0.5), tasks).values()
    found = advantages_by_task(data, packed(*LENGTHS), SIZES, [a, b], kl_coef=0.25)
    of_a, of_b = (compute_advantages(data, packed(*LENGTHS), SIZES, one, kl_coef=0.25) for one in (a, b))
    first = sum(LENGTHS[: SIZES[0]])
    assert found.advantages_T.tolist() == [*of_b.advantages_T[:first].tolist(), *of_a.advantages_T[first:].tolist()]
    assert found.kl_T.tolist() == of_a.kl_T.tolist()
    assert found.kl_T.any()


def test_reinforce_pp_normalises_over_tokens_of_the_batch() -> None:
    """The rewards of the six tokens are 1, 0, 0, 3, 3, 1: mean 4/3, variance 20/6 - 16/9.

    With a baseline they are 1/2, -1/2, -1/2, 1, 1, -1.
    """
    std = (14 / 9) ** 0.5
    right, wrong, best = ((reward - 4 / 3) / std for reward in (1, 0, 3))
    wanted = [0, right, 0, wrong, wrong, 0, best, best, 0, right]
    assert made(advantage_norm="batch") == pytest.approx(wanted, abs=1e-4)
    values = [0.5, -0.5, -0.5, 1, 1, -1]
    mean = sum(values) / 6
    std = (sum((value - mean) ** 2 for value in values) / 6) ** 0.5
    one, two, _, three, _, four = ((value - mean) / std for value in values)
    wanted = [0, one, 0, two, two, 0, three, three, 0, four]
    assert made(advantage_norm="batch", baseline="group_mean") == pytest.approx(wanted, abs=1e-4)


def test_untrained_tokens_do_not_enter_the_normalisation_over_tokens() -> None:
    """The rewards of five trained tokens are 1, 0, 0, 3, 3: mean 7/5, variance 19/5 - 49/25.

    The truncated response is excluded.
    """
    right, wrong, best = ((reward - 1.4) / 1.84**0.5 for reward in (1, 0, 3))
    wanted = [0, right, 0, wrong, wrong, 0, best, best, 0, 0]
    assert made(advantage_norm="batch", mask_too_long=True) == pytest.approx(wanted, abs=1e-4)


def test_a_kl_penalty_in_the_reward_lowers_its_own_and_earlier_advantages() -> None:
    """k1 is 0.5 at each token and the coefficient 0.1: a token's advantage includes its own penalty and all later ones.

    With kl_in="loss" no penalty enters the advantages.
    """
    extra = {"proximal_logprobs": torch.zeros(10), "packed_ref_logprobs": torch.full((10,), -0.5)}
    paid = [0, 1 - 0.05, 0, -0.1, -0.05, 0, 3 - 0.1, 3 - 0.05, 0, 1 - 0.05]
    assert made(extra, 0.1, advantage_norm="none") == pytest.approx(paid)
    free = [0, 1, 0, 0, 0, 0, 3, 3, 0, 1]
    assert made(extra, 0.1, advantage_norm="none", kl_in="loss") == pytest.approx(free)


def test_dense_rewards_enter_the_baseline_and_the_advantage_of_their_token() -> None:
    dense = torch.zeros(10)
    dense[3] = 2.0  # at the first action of the second response
    extra = {"dense_rewards": dense}
    assert made(extra, advantage_norm="none")[2:5] == [0, 2, 0]
    assert made(extra, advantage_norm="none", baseline="group_mean")[:5] == [0, -0.5, 0, 0.5, 0.5]


def test_values_go_into_gae_and_returns() -> None:
    values = torch.full((10,), 0.5)
    config = PPOConfig(advantage_norm="none")
    result = compute_advantages(DATA | {"values": values}, packed(*LENGTHS), SIZES, config, kl_coef=0.0)
    # The last response was truncated, so GAE bootstraps from its last value, 0.5.
    assert result.advantages_T.tolist() == pytest.approx([0, 0.5, 0, -0.5, -0.5, 0, 2.5, 2.5, 0, 1])
    assert result.states_T.tolist() == bools("10" + "110" + "110" + "10").tolist()
    assert result.returns_T.tolist() == pytest.approx([1, 0, 0, 0, 0, 3, 3, 0, 1.5, 0])
    by_group = PPOConfig(baseline="group_mean", advantage_norm="none")
    assert compute_advantages(
        DATA | {"values": values}, packed(*LENGTHS), SIZES, by_group, kl_coef=0.0
    ).advantages_T.tolist() == made(baseline="group_mean", advantage_norm="none")


def test_nan_at_masked_tokens_changes_nothing() -> None:
    """The engine writes 0 there; any other value changes nothing."""
    mask = DATA["loss_mask"]
    extra = {"proximal_logprobs": torch.zeros(10), "packed_ref_logprobs": torch.full((10,), -0.5)}
    garbage = {key: value.masked_fill(~mask, float("nan")) for key, value in extra.items()}
    for fields in ({"advantage_norm": "batch"}, {}, {"kl_estimator": "k3"}):
        assert made(garbage, 0.1, **fields) == made(extra, 0.1, **fields)


def test_advantage_keys() -> None:
    assert advantage_keys(PPOConfig()) == ["loss_mask", "seq_no_eos_mask", "rewards"]
    assert advantage_keys(PPOConfig(kl_coef=0.1))[3:] == ["proximal_logprobs", "packed_ref_logprobs"]
    assert advantage_keys(PPOConfig(kl_coef=0.1, use_decoupled_loss=False))[3:] == [
        "packed_logprobs",
        "packed_ref_logprobs",
    ]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_reward_affects_only_its_own_sequence(value: float) -> None:
    """Sequences behind it on the same rank are not affected."""
    mask_T = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 6, 8])
    rewards_T = torch.tensor([0.0, 0, 1, 0, 0, 2, 0, 3])
    arguments = (torch.zeros(8), mask_T, torch.zeros(3, dtype=torch.bool), cu_seqlens)
    sound_T = gae(rewards_T, *arguments, discount=1.0, gae_lambda=1.0)
    assert sound_T.tolist() == [0, 1, 1, 0, 2, 2, 0, 3]
    rewards_T[2] = value
    bad_T = gae(rewards_T, *arguments, discount=1.0, gae_lambda=1.0)
    assert not bad_T[1:3].isfinite().any()
    assert bad_T[3:].tolist() == sound_T[3:].tolist()


SESSION_REWARDS = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0, 2.0])  # sessions of 3, 1 and 2 sequences
SESSIONS = torch.tensor([0, 0, 0, 1, 2, 2])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The sessions' mean is (1 + 0 + 2) / 3 = 1; that of the sequences would be 7 / 6
        ({"advantage_norm": "none", "baseline": "group_mean"}, [0, 0, 0, -1, 1, 1]),
        ({"advantage_norm": "none", "baseline": "leave_one_out"}, [0, 0, 0, -1.5, 1.5, 1.5]),
        ({}, [0, 0, 0, -(1.5**0.5), 1.5**0.5, 1.5**0.5]),  # the variance of 1, 0, 2 is 2 / 3
    ],
)
def test_each_session_counts_once_in_its_group(fields: dict[str, Any], expected: list[float]) -> None:
    """The second group has one session, whose sequences have rewards of their own."""
    config = PPOConfig(**fields)
    rewards_S, sessions_S = torch.cat([SESSION_REWARDS, torch.ones(2)]), torch.cat([SESSIONS, torch.zeros(2).long()])
    found = session_advantages(rewards_S, sessions_S, [6, 2], config)
    assert found.tolist() == pytest.approx([*expected, 0, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Session means 2, 0: mean 1. Rewards 1, 3 of the first session
        ({"advantage_norm": "none", "baseline": "group_mean"}, [0, 2, -1]),
        ({"advantage_norm": "none", "baseline": "leave_one_out"}, [1, 3, -2]),
        ({}, [0, 2 / 1.5**0.5, -1 / 1.5**0.5]),  # variance ((0 + 4) / 2 + 1) / 2
    ],
)
def test_rewards_of_single_sequences_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    data = {
        "rewards": torch.tensor([1.0, 3.0, 0.0]),
        "sessions": torch.tensor([0, 0, 1]),
        "loss_mask": bools("010101"),
        "seq_no_eos_mask": bools("000"),
    }
    made = compute_advantages(data, packed(2, 2, 2), [3], PPOConfig(kl_coef=0.0, **fields), kl_coef=0.0)
    assert made.advantages_T[1::2].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The seat of two sessions has the mean 2 (3 and 1, of two sequences); that of three has 8
        ({"advantage_norm": "none", "baseline": "group_mean"}, [1, -1, -1, -2, 0, 2]),
        ({"advantage_norm": "none", "baseline": "leave_one_out"}, [2, -2, -2, -3, 0, 3]),
        ({}, [1, -1, -1, -(1.5**0.5), 0, 1.5**0.5]),
    ],
)
def test_each_seat_is_compared_with_itself(fields: dict[str, Any], expected: list[float]) -> None:
    """The second group has the same seats, and only sessions with equal rewards."""
    rewards = torch.tensor([3.0, 1.0, 1.0, 6.0, 8.0, 10.0])
    data = {
        "rewards": torch.cat([rewards, torch.tensor([1.0, 1.0, -1.0, -1.0])]),
        "sessions": torch.tensor([0, 1, 1, 0, 1, 2, 0, 1, 0, 1]),
        "seats": torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 1, 1]),
        "loss_mask": bools("01" * 10),
        "seq_no_eos_mask": bools("0" * 10),
    }
    assert groups_of_seats(data, [6, 4]) == [3, 3, 2, 2]
    config = PPOConfig(kl_coef=0.0, max_reward_clip=20.0, **fields)
    made = compute_advantages(data, packed(*[2] * 10), [6, 4], config, kl_coef=0.0)
    assert made.advantages_T[1::2].tolist() == pytest.approx([*expected, 0, 0, 0, 0], abs=1e-5)


def test_equal_neighbouring_seats_of_two_groups_are_two() -> None:
    assert groups_of_seats({"seats": torch.tensor([0, 0, 0, 0])}, [2, 2]) == [2, 2]
    assert groups_of_seats({"seats": torch.zeros(0, dtype=torch.int64)}, []) == []
