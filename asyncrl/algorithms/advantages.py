"""From rewards to advantages: reward shaping, group advantages, generalised advantage estimation on packed sequences.

Called once a train step by the `ppo_actor` interface on the groups that this rank holds, before the batch is split into
minibatches. Nothing here communicates: a group never spans ranks (normalisation over the whole batch: normalisation.py).

Shapes: T tokens, packed; S sequences; sequence s is cu_seqlens[s]:cu_seqlens[s + 1]; A actions: the tokens that the policy
sampled (mask_T), in order. Everything is float32 outside and float64 inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.normalisation import normalise_groups
from asyncrl.algorithms.ppo import count_per_sequence


def shape_rewards(
    rewards_S: Tensor, truncated_S: Tensor, *, scaling: float, bias: float, clip: float, mask_no_eos_with_zero: bool
) -> Tensor:
    """What a sequence is rewarded with: clip((reward - bias) * scaling, -clip, clip).

    With mask_no_eos_with_zero a truncated sequence gets 0 instead: its answer was not seen, so it was neither right nor wrong.
    """
    shaped_S = ((rewards_S - bias) * scaling).clamp(-clip, clip)
    return shaped_S.masked_fill(truncated_S, 0.0) if mask_no_eos_with_zero else shaped_S


def trained_mask(mask_T: Tensor, truncated_S: Tensor, cu_seqlens: Tensor, *, mask_too_long: bool) -> Tensor:
    """The tokens that the loss is over. mask_too_long takes truncated sequences out (DAPO, arXiv:2503.14476).

    They count in no denominator and in no normalisation over tokens; their rewards stay in their group's mean and
    standard deviation.
    """
    return mask_T & ~to_tokens(truncated_S, cu_seqlens) if mask_too_long else mask_T


def group_advantages(rewards_S: Tensor, group_sizes: Sequence[int], eps: float = 1e-6) -> Tensor:
    """A_s = (reward_s - mean of its group) / (std of its group + eps): Shao et al., GRPO, arXiv:2402.03300.

    The advantage of a whole sequence; every token of the response gets it (`to_tokens`). Equal rewards: 0, nothing to learn.
    """
    return normalise_groups(rewards_S, torch.ones_like(rewards_S, dtype=torch.bool), group_sizes, eps)


def final_rewards(rewards_S: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards per token: that of the sequence at the last token that the policy sampled, 0 elsewhere.

    A sequence without a sampled token has no place for its reward: nothing could be learned from it.
    """
    end_S = count_per_sequence(mask_T, cu_seqlens).cumsum(0)  # actions up to the end of each sequence
    has_actions_S = count_per_sequence(mask_T, cu_seqlens) > 0
    action_at = mask_T.nonzero().squeeze(1)
    rewards_T = torch.zeros(len(mask_T), dtype=rewards_S.dtype, device=rewards_S.device)
    rewards_T[action_at[end_S[has_actions_S] - 1]] = rewards_S[has_actions_S]
    return rewards_T


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    truncated_S: Tensor,
    cu_seqlens: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16), per token; 0 where mask_T is False.

    values_T[t] is the value of the state after token t, as a critic gives it at position t. So the action at t is chosen in a
    state of value values_T[t - 1]. Over the actions k = 1..K of a sequence, at the positions t_k:

        delta_k = r_k + discount * V_{k+1} - V_k        V_k = values_T[t_k - 1]
        A_k     = delta_k + discount * gae_lambda * A_{k+1},    A_{K+1} = 0

    r_k is what was rewarded from t_k until before the next action (tokens of an environment in between belong to the action
    before them). V_{K+1} is 0 where the sequence has ended and, where it was truncated, the value at its last action (bootstrap:
    more reward was to come). Value-free: values 0; with discount = gae_lambda = 1 every token gets the sum of rewards to come.

    The recursion is a suffix sum, done by doubling in log2(longest) vector operations instead of one per token.
    """
    device = rewards_T.device
    num_actions_S = count_per_sequence(mask_T, cu_seqlens)
    at_A = mask_T.nonzero().squeeze(1)
    num_actions = len(at_A)
    sequence_A = torch.arange(len(num_actions_S), device=device).repeat_interleave(
        num_actions_S, output_size=num_actions
    )
    end_A = num_actions_S.cumsum(0)[sequence_A]  # one past the last action of the same sequence
    index_A = torch.arange(num_actions, device=device)
    is_last_A = index_A + 1 == end_A

    # Rewards from each action until before the next one, or the end of the sequence.
    reward_before = torch.cat([rewards_T.new_zeros(1, dtype=torch.float64), rewards_T.double().cumsum(0)])
    next_at_A = torch.cat([at_A[1:], at_A.new_zeros(1)])[:num_actions]
    until_A = torch.where(is_last_A, cu_seqlens[1:][sequence_A], next_at_A)
    reward_A = reward_before[until_A] - reward_before[at_A]

    # The state of an action at the very first position of a sequence has seen no token: no critic valued it.
    values_T = values_T.double()
    value_A = torch.where(at_A > cu_seqlens[:-1][sequence_A], values_T[(at_A - 1).clamp(min=0)], 0.0)
    last_value_A = torch.where(truncated_S[sequence_A], values_T[at_A], 0.0)
    next_value_A = torch.where(is_last_A, last_value_A, torch.cat([value_A[1:], value_A.new_zeros(1)])[:num_actions])
    advantage_A = reward_A + discount * next_value_A - value_A

    # After each round advantage_A[k] is the discounted sum of the deltas k .. k + reach - 1 of its sequence.
    reach, decay = 1, discount * gae_lambda
    longest = int(num_actions_S.max()) if len(num_actions_S) else 0
    while reach < longest:
        beyond_A = advantage_A[(index_A + reach).clamp(max=num_actions - 1)]
        advantage_A = advantage_A + decay * torch.where(index_A + reach < end_A, beyond_A, 0.0)
        reach, decay = 2 * reach, decay * decay

    return torch.zeros_like(rewards_T).masked_scatter_(mask_T, advantage_A.to(rewards_T.dtype))


def to_tokens(x_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A value of each sequence, given to every one of its tokens."""
    return x_S.repeat_interleave(cu_seqlens.diff())
