"""Rewards and advantages, by hand and against loops over sequences and tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import final_rewards, gae, group_advantages, shape_rewards, to_tokens, trained_mask


def reference_gae(
    rewards: list[float], values: list[float], mask: list[bool], truncated: bool, discount: float, lam: float
) -> list[float]:
    """One sequence, from its last action to its first."""
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
    """Groups of 4, 2 and 1: mean 0.5, std 0.5; mean 3, std 1; alone."""
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0, 2.0, 4.0, 5.0]), [4, 2, 1])
    assert advantages.tolist() == pytest.approx([1, -1, 1, -1, -1, 1, 0], abs=1e-5)
    assert group_advantages(torch.tensor([0.3, 0.3, 0.3]), [3]).abs().max() < 1e-8
    assert to_tokens(advantages[:2], packed(2, 3)).tolist() == pytest.approx([1, 1, -1, -1, -1], abs=1e-5)


def test_final_rewards_stand_on_the_last_sampled_token() -> None:
    """With padding of the environment behind it, with gaps, and a sequence in which nothing was sampled."""
    mask = bools("0110" + "00" + "10101")
    rewards = final_rewards(torch.tensor([5.0, 7.0, 9.0]), mask, packed(4, 2, 5))
    assert rewards.tolist() == [0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 9]
    assert final_rewards(torch.zeros(0), bools(""), packed()).tolist() == []


def test_gae_by_hand() -> None:
    """Prompt of 2 tokens, 3 actions, discount 0.5, lambda 0.5, reward 1 at the end, values after each token 9 2 4 8 16.

    delta = (0 + .5 * 4 - 2, 0 + .5 * 8 - 4, 1 - 8) = (0, 0, -7) where it ended; 1 + .5 * 16 - 8 = 1 at last where it was truncated.
    """
    rewards, values, mask = torch.tensor([0.0, 0, 0, 0, 1]), torch.tensor([9.0, 2, 4, 8, 16]), bools("00111")
    ended = gae(rewards, values, mask, bools("0"), packed(5), discount=0.5, gae_lambda=0.5)
    assert ended.tolist() == [0, 0, -7 / 16, -7 / 4, -7]
    truncated = gae(rewards, values, mask, bools("1"), packed(5), discount=0.5, gae_lambda=0.5)
    assert truncated.tolist() == [0, 0, 1 / 16, 1 / 4, 1]


def test_value_free_gives_every_token_the_final_reward() -> None:
    mask = bools("0111" + "011")
    rewards = final_rewards(torch.tensor([0.7, -1.3]), mask, packed(4, 3))
    advantages = gae(rewards, torch.zeros(7), mask, bools("01"), packed(4, 3), discount=1.0, gae_lambda=1.0)
    assert advantages.tolist() == pytest.approx([0, 0.7, 0.7, 0.7, 0, -1.3, -1.3])


@pytest.mark.parametrize("seed", range(20))
def test_gae_against_the_reference(seed: int) -> None:
    """Any lengths (0 and 1 too), masks with gaps, rewards anywhere."""
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


def test_gae_of_nothing() -> None:
    empty = torch.zeros(0)
    assert gae(empty, empty, bools(""), bools(""), packed(), discount=1.0, gae_lambda=1.0).tolist() == []
    ones = torch.ones(3)
    assert gae(ones, ones, bools("000"), bools("1"), packed(3), discount=1.0, gae_lambda=1.0).tolist() == [0, 0, 0]
