"""The PPO losses: naive and decoupled, from the logprobs of three policies to one number to minimise.

The policies differ because generation runs ahead of training (logprobs of the tokens in the batch, each):

    behaviour   sampled the tokens, maybe several versions ago, maybe several versions in one response
    proximal    the trained policy at the start of this train step; PPO's trust region is around it
    current     the policy being optimised: gradients flow through this one only

What was left out: value losses (no critic yet), an entropy bonus, sequence-level ratios.

The order of reading: `ppo_token_loss` gives every token its loss, `sum_loss` makes one number of them, `PPOLoss` is both as the
function that an engine calls on each micro-batch. Advantages come from advantages.py. Sums are divided by denominators
counted over the whole minibatch on all ranks, so that the update does not depend on how the minibatch was cut up.

Shapes: T tokens, packed (sequences one after another); S sequences; sequence s is cu_seqlens[s]:cu_seqlens[s + 1]. Position t
describes token t: logprobs_T[t] is the logprob of token t, mask_T[t] says whether the policy sampled it and it is to be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config import PPOConfig

# Differences of logprobs are cut here before exp: e^20 = 5e8 is far outside of any trust region, and an inf would turn the
# gradient of a clipped token (0 * inf) into nan.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """What `ppo_token_loss` gives, per token; 0 or False where mask_T is False. Only `loss_T` carries a gradient."""

    loss_T: Tensor
    ratio_T: Tensor  # current / anchor
    weight_T: Tensor  # proximal / behaviour, before the cap; 1 with the naive loss
    clipped_T: Tensor  # bool: the clip decided
    dual_clipped_T: Tensor  # bool: the dual clip decided
    capped_T: Tensor  # bool: the behaviour weight is above the cap


def ppo_token_loss(
    logprobs_T: Tensor,
    anchor_logprobs_T: Tensor,
    behav_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    mask_T: Tensor,
    config: PPOConfig,
) -> TokenLoss:
    """The loss of every token.

    The clipped surrogate (Schulman et al., PPO, arXiv:1707.06347, eq. 7), with r = current / anchor:

        L = max(-A * r, -A * clip(r, 1 - eps_clip, 1 + eps_clip_higher))

    eps_clip_higher (clip-higher: Yu et al., DAPO, arXiv:2503.14476) is eps_clip where it is not set. With c_clip = c > 1, dual clip
    (Ye et al., arXiv:1912.09729): where A < 0, a large r must not make the loss larger than

        L <- min(L, c * |A|)

    Naive PPO: the anchor is the behaviour policy (behav_logprobs_T is None). The decoupled loss (Hilton et al.,
    arXiv:2110.00641; for language models Fu et al., AReaL, arXiv:2505.24298): the anchor is the proximal policy, and a weight
    without gradient corrects for what sampled the tokens:

        L <- L * w,    w = proximal / behaviour

    A token with w > behav_imp_weight_cap was so unlikely under the behaviour policy that its weight is mostly noise. In mode
    `mask` it is taken out of the sum (and stays in the denominator); in mode `clamp` its weight becomes the cap.
    """
    eps_low = config.eps_clip
    eps_high = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    anchor_logprobs_T = anchor_logprobs_T.detach()
    advantages_T = advantages_T.detach().masked_fill(~mask_T, 0.0)

    ratio_T = _exp_difference(logprobs_T, anchor_logprobs_T, mask_T)
    unclipped_loss_T = -advantages_T * ratio_T
    clipped_loss_T = -advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    loss_T = torch.max(unclipped_loss_T, clipped_loss_T)
    clipped_T = mask_T & (clipped_loss_T > unclipped_loss_T)

    dual_clipped_T = torch.zeros_like(mask_T)
    if config.c_clip is not None:
        bound_T = config.c_clip * advantages_T.abs()
        dual_clipped_T = mask_T & (loss_T > bound_T)
        loss_T = torch.min(loss_T, bound_T)

    weight_T = mask_T.to(logprobs_T.dtype)
    capped_T = torch.zeros_like(mask_T)
    if behav_logprobs_T is not None:
        weight_T = _exp_difference(anchor_logprobs_T, behav_logprobs_T.detach(), mask_T)
        applied_T = weight_T
        if config.behav_imp_weight_cap is not None:
            capped_T = mask_T & (weight_T > config.behav_imp_weight_cap)
            instead = config.behav_imp_weight_cap if config.behav_imp_weight_mode == "clamp" else 0.0
            applied_T = weight_T.masked_fill(capped_T, instead)
        loss_T = loss_T * applied_T

    return TokenLoss(loss_T.masked_fill(~mask_T, 0.0), ratio_T.detach(), weight_T, clipped_T, dual_clipped_T, capped_T)


def sum_loss(loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, normalization: str, denominator: float) -> Tensor:
    """This micro-batch's share of the minibatch's loss; the shares of all micro-batches on all ranks add up to it.

        token:     sum over tokens of L_t / (masked tokens of the minibatch)               every token counts the same (DAPO)
        sequence:  sum over sequences of (mean over its masked tokens of L_t)               every response counts the same
                   / (sequences of the minibatch that have masked tokens)                  (GRPO, arXiv:2402.03300)

    `denominator` is the count in brackets, over all ranks. Sequences are never cut by micro-batches.
    """
    if normalization == "token":
        return loss_T.sum() / denominator
    if normalization == "sequence":
        num_tokens_S = count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
        num_tokens_T = num_tokens_S.repeat_interleave(cu_seqlens.diff(), output_size=len(loss_T))
        return (loss_T / num_tokens_T).sum() / denominator
    raise ValueError(f"loss_normalization is {normalization!r}; use token or sequence")


@dataclass(frozen=True)
class PPOLoss:
    """The loss of one minibatch, as an engine wants it: called on each micro-batch, under autograd.

    Reads the keys loss_mask, advantages, packed_logprobs and, where the config asks for it, proximal_logprobs. The statistics
    are sums over masked tokens, so that they add up over micro-batches and ranks (names ending in `_max`: maxima).
    """

    config: PPOConfig
    denominator: float  # of the whole minibatch, all ranks: see sum_loss

    def __call__(
        self, logprobs_T: Tensor, entropy_T: Tensor, data: Mapping[str, Tensor], cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T = data["loss_mask"].bool()
        anchor_T = data[anchor_key(self.config)]
        behav_T = data["packed_logprobs"] if self.config.use_decoupled_loss else None
        token = ppo_token_loss(logprobs_T, anchor_T, behav_T, data["advantages"], mask_T, self.config)
        loss = sum_loss(token.loss_T, mask_T, cu_seqlens, self.config.loss_normalization, self.denominator)
        with torch.no_grad():
            stats = {
                "loss": loss.detach(),
                "entropy": _masked_sum(entropy_T, mask_T),
                "approx_kl": _masked_sum(anchor_T - logprobs_T, mask_T),  # k1 estimate of KL(anchor || current)
                "importance_weight": _masked_sum(token.ratio_T, mask_T),
                "clip_share": token.clipped_T.sum(),
                "dual_clip_share": token.dual_clipped_T.sum(),
            }
            if behav_T is not None:
                stats |= {
                    "behav_weight": _masked_sum(token.weight_T, mask_T),
                    "behav_weight_max": torch.cat([token.weight_T, token.weight_T.new_zeros(1)]).max(),
                    "behav_approx_kl": _masked_sum(behav_T - anchor_T, mask_T),  # k1 of KL(behaviour || proximal)
                    "cap_share": token.capped_T.sum(),
                }
        return loss, stats


def anchor_key(config: PPOConfig) -> str:
    """The policy that the trust region is around: what the trainer computed at the start of the step, or what the servers said."""
    return "proximal_logprobs" if config.use_decoupled_loss or config.recompute_logprob else "packed_logprobs"


def count_per_sequence(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many tokens of each sequence are masked in: int64, S."""
    total_before = torch.cat([mask_T.new_zeros(1, dtype=torch.int64), mask_T.cumsum(0)])
    return total_before[cu_seqlens[1:]] - total_before[cu_seqlens[:-1]]


def check_ppo_config(config: PPOConfig) -> None:
    """Refuses values for which the formulas above make no sense."""
    if not 0 < config.eps_clip < 1:
        raise ValueError(f"train.ppo.eps_clip is {config.eps_clip}; it must be between 0 and 1")
    if config.eps_clip_higher is not None and config.eps_clip_higher <= 0:
        raise ValueError(
            f"train.ppo.eps_clip_higher is {config.eps_clip_higher}; it must be above 0, or null for eps_clip"
        )
    if config.c_clip is not None and config.c_clip <= 1:
        raise ValueError(f"train.ppo.c_clip is {config.c_clip}; the dual clip must be above 1, or null for none")
    if config.behav_imp_weight_cap is not None and config.behav_imp_weight_cap <= 0:
        raise ValueError(
            f"train.ppo.behav_imp_weight_cap is {config.behav_imp_weight_cap}; it must be above 0, or null for no cap"
        )
    for name, value, choices in (
        ("behav_imp_weight_mode", config.behav_imp_weight_mode, ("mask", "clamp")),
        ("loss_normalization", config.loss_normalization, ("token", "sequence")),
        ("advantage_norm", config.advantage_norm, ("group", "batch", "none")),
        ("kl_estimator", config.kl_estimator, ("k1", "k2", "k3")),
    ):
        if value not in choices:
            raise ValueError(f"train.ppo.{name} is {value!r}; use one of {', '.join(choices)}")
    if config.minibatches < 1:
        raise ValueError(f"train.ppo.minibatches is {config.minibatches}; it must be at least 1")


def _exp_difference(a_T: Tensor, b_T: Tensor, mask_T: Tensor) -> Tensor:
    """exp(a - b) where mask_T, else 0, without overflow; whatever stands outside of the mask cannot reach the gradient."""
    difference_T = (a_T - b_T).masked_fill(~mask_T, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_T.exp().masked_fill(~mask_T, 0.0)


def _masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    return x_T.detach().masked_fill(~mask_T, 0.0).sum()
