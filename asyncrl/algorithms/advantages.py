"""From rewards to advantages: reward shaping, baselines of groups, generalised advantage estimation on packed sequences.

`compute_advantages` does all of this, as configured in train.ppo. The MFC `advantages` (AdvantagesInterface in model/interfaces.py)
calls it once per train step on the groups that this rank holds, before the batch is split into minibatches. The functions above
`compute_advantages` in this file are its parts. A group never spans ranks; only normalisation over the batch communicates
(packed.py).

Shapes: T tokens, packed; S sequences; sequence s is cu_seqlens[s]:cu_seqlens[s + 1]; groups lie one after another, `group_sizes`
sequences each; A actions: the tokens that the policy sampled (mask_T), in order. float32 outside, float64 inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.packed import (
    AllReduceSum,
    count_per_sequence,
    group_means,
    identity_sum,
    normalise_batch,
    normalise_groups,
    sum_per_sequence,
    to_tokens,
)
from asyncrl.algorithms.ppo import anchor_key
from asyncrl.config.schema import PPOConfig, judges_by_group

# ---------------------------------------------------------------------------------------------------------------- rewards


def shape_rewards(
    rewards_S: Tensor, truncated_S: Tensor, *, scaling: float, bias: float, clip: float, mask_no_eos_with_zero: bool
) -> Tensor:
    """Shape the reward of each sequence: clip((reward - bias) * scaling, -clip, clip).

    With mask_no_eos_with_zero a truncated sequence gets 0 instead: its answer is unknown, so it is neither right nor wrong.
    """
    shaped_S = ((rewards_S - bias) * scaling).clamp(-clip, clip)
    return shaped_S.masked_fill(truncated_S, 0.0) if mask_no_eos_with_zero else shaped_S


def overlong_penalties(lengths_S: Tensor, *, length: int, buffer: float, penalty: float) -> Tensor:
    """Reward penalty of responses by their number of sampled tokens: float32, S, from -penalty to 0.

    Soft overlong punishment (Yu et al., DAPO, arXiv:2503.14476, eq. 13), with b = buffer * length tokens:

        0                                        where lengths <= length - b
        penalty * (length - b - lengths) / b     in between
        -penalty                                 where lengths >= length
    """
    buffer_tokens = buffer * length
    return penalty * ((length - buffer_tokens - lengths_S) / buffer_tokens).clamp(-1.0, 0.0).float()


def trained_mask(mask_T: Tensor, truncated_S: Tensor, cu_seqlens: Tensor, *, mask_too_long: bool) -> Tensor:
    """The tokens in the loss. mask_too_long removes truncated sequences (DAPO, arXiv:2503.14476).

    Removed tokens count in no denominator and in no normalisation over tokens. The rewards of their sequences stay in their
    group's mean and standard deviation.
    """
    return mask_T & ~to_tokens(truncated_S, cu_seqlens) if mask_too_long else mask_T


# ------------------------------------------------------------------------------------------------ responses as a whole


def group_advantages(rewards_S: Tensor, group_sizes: Sequence[int], eps: float = 1e-6) -> Tensor:
    """A_s = (reward_s - mean of its group) / (std of its group + eps): Shao et al., GRPO, arXiv:2402.03300.

    The advantage of a whole sequence; every token of the response gets it (`to_tokens`). Equal rewards give 0.
    """
    return normalise_groups(rewards_S, torch.ones_like(rewards_S, dtype=torch.bool), group_sizes, eps)


def mean_baseline_advantages(rewards_S: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """A_s = reward_s - mean of its group: Liu et al., Dr.GRPO, arXiv:2503.20783.

    GRPO without the division by the std. That division gives more weight to prompts that are nearly always (or never) solved.
    """
    return (rewards_S.double() - group_means(rewards_S, group_sizes)).to(rewards_S.dtype)


def leave_one_out_advantages(rewards_S: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """A_s = reward_s - mean of the others of its group: Ahmadian et al., RLOO, arXiv:2402.14740.

    The baseline is unbiased, because it does not depend on the response that is compared with it. In a group of n responses these
    advantages equal n / (n - 1) times those of mean_baseline_advantages. In a group of one the advantage is 0.
    """
    sizes_G = torch.tensor(group_sizes, dtype=torch.float64, device=rewards_S.device)
    factor_G = sizes_G / (sizes_G - 1).clamp(min=1)
    factor_S = factor_G.repeat_interleave(sizes_G.long(), output_size=len(rewards_S))
    return (factor_S * (rewards_S.double() - group_means(rewards_S, group_sizes))).to(rewards_S.dtype)


def groups_of_seats(data: Mapping[str, Tensor], group_sizes: Sequence[int]) -> Sequence[int]:
    """The sizes of the groups whose responses are compared with each other: of each seat in each group.

    The sequences of a seat lie one after another (`seats`, S). Without `seats` a group is compared as a whole.
    """
    if "seats" not in data:
        return group_sizes
    group_S = torch.arange(len(group_sizes)).repeat_interleave(torch.tensor(group_sizes, dtype=torch.int64))
    pairs = zip(group_S.tolist(), data["seats"].tolist(), strict=True)
    return [len(list(of)) for _, of in itertools.groupby(pairs)]


def session_advantages(scores_S: Tensor, sessions_S: Tensor, group_sizes: Sequence[int], config: PPOConfig) -> Tensor:
    """The same three advantages for groups of sessions with several sequences each: float32, S.

    sessions_S: int64, the index of the sequence's session in its group, below the number of its sequences.
    A sequence has the weight 1 / (sequences of its session), so each session counts once.
    With n sessions of the mean rewards m_i in a group:

        group          (reward_s - mean(m)) / (std + eps), with the weighted variance mean_i(mean of (reward - mean(m))^2 in i)
        group_mean     reward_s - mean(m)
        leave_one_out  reward_s - mean of the other sessions' m; 0 for n = 1

    If the sequences of a session share their reward, they get the advantage that the session would have as one sequence.
    """
    sizes_G = torch.tensor(group_sizes, dtype=torch.int64, device=scores_S.device)
    group_S = torch.arange(len(sizes_G), device=scores_S.device).repeat_interleave(sizes_G, output_size=len(scores_S))
    most = max(group_sizes, default=0)  # the index of a session is smaller than the number of sequences of its group
    of_S = group_S * most + sessions_S
    count_K = torch.bincount(of_S, minlength=len(sizes_G) * most).double()
    if config.advantage_norm == "group":
        every_S = torch.ones_like(scores_S, dtype=torch.bool)
        return normalise_groups(scores_S, every_S, group_sizes, weights_N=1 / count_K[of_S])
    mean_K = torch.zeros_like(count_K).index_add_(0, of_S, scores_S.double()) / count_K.clamp(min=1)
    sum_S = mean_K.view(len(sizes_G), most).sum(1)[group_S]
    num_S = (count_K.view(len(sizes_G), most) > 0).sum(1)[group_S]
    baseline_S = sum_S / num_S
    if config.baseline == "leave_one_out":
        others_S = (sum_S - mean_K[of_S]) / (num_S - 1).clamp(min=1)
        baseline_S = torch.where(num_S > 1, others_S, scores_S.double())
    return (scores_S.double() - baseline_S).to(scores_S.dtype)


# --------------------------------------------------------------------------------------------------------- token by token


def final_rewards(rewards_S: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards per token: the sequence's reward at the last token that the policy sampled, 0 elsewhere.

    A sequence without a sampled token has no position for its reward, so its reward is dropped: there is nothing to learn from.
    """
    end_S = count_per_sequence(mask_T, cu_seqlens).cumsum(0)  # number of actions up to the end of each sequence
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

    values_T[t] is the value of the state after token t, which a critic outputs at position t. So the action at t is chosen in a
    state of value values_T[t - 1]. Over the actions k = 1..K of a sequence, at the positions t_k:

        delta_k = r_k + discount * V_{k+1} - V_k        V_k = values_T[t_k - 1]
        A_k     = delta_k + discount * gae_lambda * A_{k+1},    A_{K+1} = 0

    r_k is the sum of rewards from t_k until before the next action (tokens of an environment in between belong to the action
    before them). V_{K+1} is 0 if the sequence has ended. If it was truncated, V_{K+1} is the value at its last action (bootstrap:
    more reward was to come). To use no values, pass zeros: with discount = gae_lambda = 1 every action then gets the sum of the
    rewards to come.

    The recursion is a suffix sum, computed by doubling in log2(longest) vector operations instead of one per token.
    """
    device = rewards_T.device
    num_actions_S = count_per_sequence(mask_T, cu_seqlens)
    at_A = mask_T.nonzero().squeeze(1)
    num_actions = len(at_A)
    sequence_A = torch.arange(len(num_actions_S), device=device).repeat_interleave(
        num_actions_S, output_size=num_actions
    )
    end_A = num_actions_S.cumsum(0)[sequence_A]  # index after the last action of the same sequence
    index_A = torch.arange(num_actions, device=device)
    is_last_A = index_A + 1 == end_A

    # Rewards from each action until before the next one, or the end of the sequence. Not computed as differences of a running sum
    # over all sequences: one value that is not finite would spoil all later ones.
    action_T = mask_T.cumsum(0) - 1  # index of the last action up to this token, possibly of an earlier sequence
    sequence_T = torch.arange(len(num_actions_S), device=device).repeat_interleave(
        cu_seqlens.diff(), output_size=len(mask_T)
    )
    earned_T = (action_T >= 0) & (sequence_A[action_T.clamp(min=0)] == sequence_T) if num_actions else mask_T
    reward_A = rewards_T.new_zeros(num_actions, dtype=torch.float64)
    reward_A.index_add_(0, action_T[earned_T], rewards_T[earned_T].double())

    # The state of an action at the very first position of a sequence has seen no token, so it has no value.
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


def returns_of(advantages_T: Tensor, values_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (returns_T, states_T): the critic's targets (0 elsewhere), and a bool mask of the positions of their states.

    R_k = A_k + V_k with the advantages of `gae`, before any normalisation. It is stored at the position that V_k was read from,
    the token before the action: t_k - 1. So values, returns and states of a critic's train step are aligned. An action at the
    first position of its sequence has no such state.
    """
    first_T = torch.zeros_like(mask_T)
    first_T[cu_seqlens[:-1][cu_seqlens.diff() > 0]] = True
    states_T = torch.cat([(mask_T & ~first_T)[1:], mask_T.new_zeros(1)])[: len(mask_T)]
    next_T = torch.cat([advantages_T[1:], advantages_T.new_zeros(1)])[: len(mask_T)]
    return (next_T + values_T).masked_fill(~states_T, 0.0), states_T


# ----------------------------------------------------------------------------------------------------------- distillation


def distillation_advantages(
    logprobs_T: Tensor, teacher_logprobs_T: Tensor, mask_T: Tensor, coef: float | Tensor
) -> Tensor:
    """-coef * (logprob_t - teacher_logprob_t) for each token, 0 where mask_T is False: added to the advantages of any algorithm.

    It is the estimate from one token of -coef * KL(policy || teacher), so the policy gradient with this advantage descends the
    reverse KL in the states that the policy visits (On-Policy Distillation, K. Lu, Thinking Machines Lab, 2025). A token gets only
    its own estimate, no later ones (a discount of 0). MiniLLM (arXiv:2306.08543, eq. 3) also has the sum of later ones; GKD
    (arXiv:2306.13649) has the KL over the whole vocabulary, which would need the teacher's logits.

    logprobs_T: those of the anchor (`anchor_key`). As part of the advantage, the estimate passes through the trust region and the
    weight proximal / behaviour of the policy loss, which make it right for tokens that older policies sampled. As a loss of its own
    it would not be: its gradient is 0 in expectation for tokens of the current policy (k1 in `kl_estimate`).

    coef: one number, or one of each token (T).
    """
    return (-coef * (logprobs_T - teacher_logprobs_T)).masked_fill(~mask_T, 0.0)


def distillation_keys(config: PPOConfig) -> list[str]:
    """Keys of the two logprobs that `distillation_advantages` compares."""
    return [anchor_key(config), "packed_teacher_logprobs"]


# --------------------------------------------------------------------------------------------------------------- together


@dataclass(frozen=True)
class Advantages:
    """Result of `compute_advantages`."""

    advantages_T: Tensor  # 0 where mask_T is False
    mask_T: Tensor  # bool: the tokens to train
    rewards_S: Tensor  # shaped: scaled, clipped, with overlong penalties
    kl_T: Tensor | None  # estimate of KL(policy || reference), 0 where nothing was sampled; None without a KL penalty
    returns_T: Tensor  # targets of a critic where states_T is True, else 0; only meaningful with a critic
    states_T: Tensor  # bool: positions of the states in which the tokens to train were sampled (see returns_of)


def compute_advantages(
    data: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    group_sizes: Sequence[int],
    config: PPOConfig,
    *,
    kl_coef: float,
    all_reduce_sum: AllReduceSum = identity_sum,
) -> Advantages:
    """Compute advantages from the keys of `advantage_keys` (packed, of this rank's groups). kl_coef: of the KL controller.

    Optional keys: `values` (T: a critic's values, denormalised to units of rewards), `dense_rewards` (T), `sessions`, `seats` (S).
    Collective if config.advantage_norm is `batch` (every rank calls it, even without groups), else not.

    If config compares responses within their group (schema.judges_by_group), or their seat of it (`groups_of_seats`), the sum of a
    sequence's dense rewards is added to its reward, and every token gets the advantage of its response plus the result of `gae` on
    the KL penalties alone (with discount = gae_lambda = 1: the sum of the token's and all later penalties of its sequence). The
    penalties take no part in the group's normalisation, which would enlarge them in a group of nearly equal rewards. Values are not
    used. Otherwise the reward is placed at the last sampled token, each dense reward at its own token, and GAE gives the
    advantages.
    """
    sampled_T, truncated_S = data["loss_mask"], data["seq_no_eos_mask"]
    mask_T = trained_mask(sampled_T, truncated_S, cu_seqlens, mask_too_long=config.mask_too_long)
    rewards_S = shape_rewards(
        data["rewards"],
        truncated_S,
        scaling=config.reward_scaling,
        bias=config.reward_bias,
        clip=config.max_reward_clip,
        mask_no_eos_with_zero=config.mask_no_eos_with_zero,
    )
    if config.overlong_penalty > 0:
        rewards_S = rewards_S + overlong_penalties(
            count_per_sequence(sampled_T, cu_seqlens),
            length=config.overlong_length,
            buffer=config.overlong_buffer,
            penalty=config.overlong_penalty,
        )
    zeros_T = torch.zeros(len(sampled_T), device=sampled_T.device)
    dense_T, values_T = data.get("dense_rewards", zeros_T), data.get("values", zeros_T)

    kl_T, rewards_T = None, zeros_T
    if config.kl_coef > 0:
        kl_T = kl_estimate(data[anchor_key(config)], data["packed_ref_logprobs"], config.kl_estimator)
        kl_T = kl_T.masked_fill(~sampled_T, 0.0)
        rewards_T = -kl_coef * kl_T if config.kl_in == "reward" else zeros_T

    base_T = zeros_T
    if judges_by_group(config):
        scores_S = rewards_S + sum_per_sequence(dense_T, cu_seqlens)
        compared = groups_of_seats(data, group_sizes)
        if "sessions" in data:
            base_S = session_advantages(scores_S, data["sessions"], compared, config)
        else:
            base_S = _judge(scores_S, compared, config)
        base_T = to_tokens(base_S, cu_seqlens)
        values_T = zeros_T
    else:
        rewards_T = rewards_T + final_rewards(rewards_S, sampled_T, cu_seqlens) + dense_T
    estimated_T = gae(
        rewards_T,
        values_T,
        sampled_T,
        truncated_S,
        cu_seqlens,
        discount=config.discount,
        gae_lambda=config.gae_lambda,
    )
    returns_T, states_T = returns_of(estimated_T, values_T, mask_T, cu_seqlens)
    advantages_T = base_T + estimated_T
    if config.advantage_norm == "batch":
        advantages_T = normalise_batch(advantages_T, mask_T, all_reduce_sum)
    advantages_T = advantages_T.masked_fill(~mask_T, 0.0)
    return Advantages(advantages_T, mask_T, rewards_S, kl_T, returns_T, states_T)


def advantages_by_task(
    data: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    group_sizes: Sequence[int],
    configs: Sequence[PPOConfig],
    *,
    kl_coef: float,
) -> Advantages:
    """Compute the advantages of each group as the config of its task says: configs[task_ids].

    task_ids: int64, one for each group. Each different config computes all groups, and a group takes the results of its own. None
    may normalise over the batch, so a group's results depend on no other group.
    """
    different = list(dict.fromkeys(configs))
    each = [compute_advantages(data, cu_seqlens, group_sizes, config, kl_coef=kl_coef) for config in different]
    number_G = torch.tensor([different.index(config) for config in configs])[data["task_ids"]]
    number_S = number_G.repeat_interleave(torch.tensor(group_sizes, dtype=torch.int64))
    number_T = to_tokens(number_S, cu_seqlens)

    def chosen(name: str, number: Tensor) -> Tensor:
        return torch.stack([getattr(made, name) for made in each])[number, torch.arange(len(number))]

    of_T = {name: chosen(name, number_T) for name in ("advantages_T", "mask_T", "returns_T", "states_T")}
    return replace(each[0], rewards_S=chosen("rewards_S", number_S), **of_T)


def advantage_keys(config: PPOConfig) -> list[str]:
    """Keys that `compute_advantages` needs. `values` and `dense_rewards` are used if present."""
    penalty = [anchor_key(config), "packed_ref_logprobs"] if config.kl_coef > 0 else []
    return ["loss_mask", "seq_no_eos_mask", "rewards", *penalty]


def _judge(scores_S: Tensor, group_sizes: Sequence[int], config: PPOConfig) -> Tensor:
    if config.advantage_norm == "group":
        return group_advantages(scores_S, group_sizes)
    if config.baseline == "group_mean":
        return mean_baseline_advantages(scores_S, group_sizes)
    if config.baseline == "leave_one_out":
        return leave_one_out_advantages(scores_S, group_sizes)
    raise ValueError(f"baseline is {config.baseline!r}; use none, group_mean or leave_one_out")
