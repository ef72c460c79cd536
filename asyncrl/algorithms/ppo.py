"""The policy losses: from the logprobs of three policies to the scalar loss.

The policies differ because generation continues with older weights while training updates them. Each policy gives logprobs of the
tokens in the batch:

    behaviour   sampled the tokens, possibly several versions ago, possibly several versions in one response
    proximal    the trained policy at the start of this train step
    current     the policy being optimised; only this one carries gradients

The anchor is the policy at the centre of the trust region: the proximal one with the decoupled loss or recompute_logprob, else the
behaviour policy.

Four independent choices define the loss of a token. docs/algorithms.md lists the choices of each algorithm:

    train.ppo.importance_level      token_ratios      the ratio current / anchor of a token, or of its whole sequence (GSPO)
    train.ppo.policy_loss           clip_loss | cispo_loss      the effect of the trust region on the gradient
    train.ppo.behav_imp_weight_*    masked_weights | clamped_weights      the treatment of the weight proximal / behaviour
    train.ppo.loss_normalization    sum_loss          the reduction over tokens

The loss of a token is a sum of terms (`TERMS`): the policy loss, and if configured a KL penalty and an entropy bonus.

Reading order: `policy_token_loss` computes every token's policy loss, `TERMS` has the terms, `sum_loss` reduces their sum to a
scalar, and `PPOLoss` combines all in the function that an engine calls on each micro-batch. Advantages come from advantages.py, the
critic's loss from value.py. Sums are divided by denominators counted over the whole minibatch on all ranks, so the update does not
depend on how the minibatch is cut. Micro-batches never cut a sequence.

Shapes: T tokens, packed (sequences one after another); S sequences; sequence s is cu_seqlens[s]:cu_seqlens[s + 1]. Position t
describes token t: logprobs_T[t] is the logprob of token t, mask_T[t] says whether the policy sampled it and it is to be trained.
A masked token is one whose mask is True. Logprobs, advantages and losses are float32, masks bool. Values where the mask is False,
even nan, have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.metrics import MAX, METRICS, TokenLoss, Tokens
from asyncrl.algorithms.packed import MAX_LOG_RATIO, count_per_sequence, masked_sum, mean_per_sequence, to_tokens
from asyncrl.config.schema import PPOConfig
from asyncrl.config.validation import ppo_problems

# ---------------------------------------------------------------------------------------------------------------- ratios


def token_ratios(
    logprobs_T: Tensor, anchor_logprobs_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, level: str
) -> Tensor:
    """The ratio of the tokens' probabilities under two policies; 0 where mask_T is False.

    token:     r_t = exp(logprob_t - anchor_t)                        (PPO, arXiv:1707.06347, eq. 6)
    sequence:  s   = exp(mean over the sequence's masked tokens of (logprob_t - anchor_t)), given to each of them
                     (Zheng et al., GSPO, arXiv:2507.18071, eq. 7: the ratio of whole responses, to the power 1 / length)
    """
    difference_T = (logprobs_T - anchor_logprobs_T).masked_fill(~mask_T, 0.0)
    if level == "sequence":
        difference_T = to_tokens(mean_per_sequence(difference_T, mask_T, cu_seqlens), cu_seqlens)
    elif level != "token":
        raise ValueError(f"importance_level is {level!r}; use token or sequence")
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(~mask_T, 0.0)


# ----------------------------------------------------------------------------------------------------------- trust region


def clip_loss(
    ratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float, c_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss_T and two bool masks: where the clipped term below is the larger one, and where the dual clip lowers the loss.

    The clipped surrogate (Schulman et al., PPO, arXiv:1707.06347, eq. 7), as a loss:

        L = max(-A * r, -A * clip(r, 1 - eps_low, 1 + eps_high))

    eps_high above eps_low is clip-higher (Yu et al., DAPO, arXiv:2503.14476). c_clip = c > 1 adds the dual clip (Ye et al.,
    arXiv:1912.09729). It bounds the loss where A < 0, which otherwise grows with r:

        L <- min(L, c * |A|)
    """
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    loss_T = torch.max(unclipped_T, clipped_T)
    by_clip_T = clipped_T > unclipped_T
    if c_clip is None:
        return loss_T, by_clip_T, torch.zeros_like(by_clip_T)
    bound_T = c_clip * advantages_T.abs()
    return torch.min(loss_T, bound_T), by_clip_T, loss_T > bound_T


def cispo_loss(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """(loss_T, where the ratio was clipped).

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4) clips the ratio, not the update. The clipped ratio is a weight without gradient, so
    every token keeps a gradient:

        L = -sg(clip(r, 1 - eps_low, 1 + eps_high)) * A * log pi        sg: stop gradient

    eps_low = 1 means no lower bound. The value of L has little meaning: it moves with log pi.
    """
    ratio_T = ratio_T.detach()
    weight_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return -weight_T * advantages_T * logprobs_T, weight_T != ratio_T


# ------------------------------------------------------------------------------------------------------------- correction


def masked_weights(weight_T: Tensor, cap: float | None, floor: float | None) -> Tensor:
    """w where floor <= w <= cap, else 0. A bound of None does not apply.

    Far outside the bounds, the two policies disagree so much that the weight is mostly noise. With a cap alone this is the
    decoupled loss of Fu et al., AReaL, arXiv:2505.24298. With both bounds it is IcePop (Ling Team, Ring-1T, arXiv:2510.18855), for
    servers and a trainer that compute the same policy differently.
    """
    return weight_T.masked_fill(outside(weight_T, cap, floor), 0.0)


def clamped_weights(weight_T: Tensor, cap: float | None, floor: float | None) -> Tensor:
    """clip(w, floor, cap). A bound of None does not apply.

    With a cap C alone this is truncated importance sampling, min(w, C) (Ionides, 2008; for language models Yao et al., "Your
    efficient RL framework secretly brings you off-policy RL training", 2025; as in V-trace, arXiv:1802.01561).
    """
    return weight_T if cap is None and floor is None else weight_T.clamp(floor, cap)


def outside(weight_T: Tensor, cap: float | None, floor: float | None) -> Tensor:
    """Return where a weight is above the cap or below the floor (bool)."""
    outside_T = torch.zeros_like(weight_T, dtype=torch.bool)
    if cap is not None:
        outside_T |= weight_T > cap
    if floor is not None:
        outside_T |= weight_T < floor
    return outside_T


# --------------------------------------------------------------------------------------------------------------- together


def policy_token_loss(
    logprobs_T: Tensor,
    anchor_logprobs_T: Tensor,
    behav_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    config: PPOConfig,
) -> TokenLoss:
    """The loss of every token, with r = current / anchor.

    With the naive loss, behav_logprobs_T is None. The anchor is the behaviour policy, or, with recompute_logprob, the proximal
    policy, which is then treated as if it had sampled the tokens. With the decoupled loss (Hilton et al., arXiv:2110.00641; for
    language models Fu et al., AReaL, arXiv:2505.24298) the anchor is the proximal policy, and a weight without gradient corrects
    for the policy that sampled the tokens:

        L <- L * w,    w = proximal / behaviour, within its bounds

    A token whose weight masked_weights sets to 0 adds nothing to the sum but counts in the denominator. With importance_level
    `sequence` both r and w are ratios of whole sequences: token weights would bring back the noise that sequence ratios avoid.
    """
    eps_low = config.eps_clip
    eps_high = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    anchor_logprobs_T = anchor_logprobs_T.detach()
    advantages_T = advantages_T.detach().masked_fill(~mask_T, 0.0)
    ratio_T = token_ratios(logprobs_T, anchor_logprobs_T, mask_T, cu_seqlens, config.importance_level)

    dual_clipped_T = torch.zeros_like(mask_T)
    if config.policy_loss == "clip":
        loss_T, clipped_T, dual_clipped_T = clip_loss(ratio_T, advantages_T, eps_low, eps_high, config.c_clip)
    elif config.policy_loss == "cispo":
        logprobs_T = logprobs_T.masked_fill(~mask_T, 0.0)
        loss_T, clipped_T = cispo_loss(logprobs_T, ratio_T, advantages_T, eps_low, eps_high)
    else:
        raise ValueError(f"policy_loss is {config.policy_loss!r}; use clip or cispo")

    weight_T = mask_T.to(logprobs_T.dtype)
    capped_T = torch.zeros_like(mask_T)
    if behav_logprobs_T is not None:
        behav_logprobs_T = behav_logprobs_T.detach()
        weight_T = token_ratios(anchor_logprobs_T, behav_logprobs_T, mask_T, cu_seqlens, config.importance_level)
        bounds = config.behav_imp_weight_cap, config.behav_imp_weight_floor
        bounded_weights = clamped_weights if config.behav_imp_weight_mode == "clamp" else masked_weights
        loss_T = loss_T * bounded_weights(weight_T, *bounds)
        capped_T = mask_T & outside(weight_T, *bounds)

    return TokenLoss(
        loss_T.masked_fill(~mask_T, 0.0),
        ratio_T.detach(),
        weight_T,
        mask_T & clipped_T,
        mask_T & dual_clipped_T,
        capped_T,
    )


def sum_loss(loss_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, normalization: str, denominator: float) -> Tensor:
    """This micro-batch's share of the minibatch's loss; the shares of all micro-batches on all ranks add up to it.

        token:     sum over tokens of L_t / N                                every token counts the same (DAPO, arXiv:2503.14476)
        sequence:  sum over sequences of (mean over its tokens of L_t) / M   every response counts the same (GRPO, arXiv:2402.03300)
        constant:  sum over tokens of L_t / (M * loss_length)                as in the policy gradient: no length is favoured
                                                                             (Dr.GRPO, arXiv:2503.20783)

    N: masked tokens; M: sequences that have any; both of the minibatch over all ranks. `denominator`: N, M or M * loss_length, as
    returned by `loss_denominator`.
    """
    if normalization in ("token", "constant"):
        return loss_T.sum() / denominator
    if normalization == "sequence":
        num_tokens_S = count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
        num_tokens_T = num_tokens_S.repeat_interleave(cu_seqlens.diff(), output_size=len(loss_T))
        return (loss_T / num_tokens_T).sum() / denominator
    raise ValueError(f"loss_normalization is {normalization!r}; use token, sequence or constant")


def loss_denominator(config: PPOConfig, num_tokens: float, num_sequences: float) -> float:
    """The divisor of `sum_loss`. The counts (masked tokens, sequences that have any) are of the whole minibatch, all ranks."""
    if config.loss_normalization == "token":
        return num_tokens
    return num_sequences * (config.loss_length if config.loss_normalization == "constant" else 1)


# ------------------------------------------------------------------------------------------------------------------ terms


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """One term of the loss of a micro-batch."""

    loss_T: Tensor  # float32, [T], with gradient; 0 where `loss_mask` is False
    stats: dict[str, Tensor]  # sums over masked tokens, without gradient; with names ending in `_max`: maxima


@dataclass(frozen=True)
class LossTerm:
    """A row of TERMS. Its coefficient is a field of PPOConfig (config/schema.py).

    compute(outputs, data, cu_seqlens, config): the term of a micro-batch, under autograd. Gradients flow through the outputs alone:
    `logprobs` and `entropy`, float32, [T], of the current policy. data: the keys of `loss_keys`, [T]; their dtypes are those of
    KEY_SPECS in data/sequence.py. Where `loss_mask` is False, outputs and data may be NaN. A micro-batch has whole sequences, and
    may have no masked token. The loss is summed over all ranks, so a term must not divide by a count of its own.
    """

    compute: Callable[[Tensors, Tensors, Tensor, PPOConfig], Term]
    is_on: Callable[[PPOConfig], bool] = lambda _: True  # a term that is off costs nothing
    # Further keys of data; actor_train must read them (dataflow/graph.py, train.extra_train_keys)
    keys: tuple[str, ...] = ()


def policy_term(outputs: Tensors, data: Tensors, cu_seqlens: Tensor, config: PPOConfig) -> Term:
    """The policy loss (`policy_token_loss`), and all metrics of METRICS that are made of tokens."""
    logprobs_T, mask_T = outputs["logprobs"], data["loss_mask"].bool()
    anchor_T = data[anchor_key(config)]
    behav_T = data["packed_logprobs"] if config.use_decoupled_loss else None
    token = policy_token_loss(logprobs_T, anchor_T, behav_T, data["advantages"], mask_T, cu_seqlens, config)
    with torch.no_grad():
        stats = {
            "approx_kl": masked_sum(anchor_T - logprobs_T, mask_T),  # k1 estimate of KL(anchor || current)
            "importance_weight": masked_sum(token.ratio_T, mask_T),
        }
        tokens = Tokens(logprobs_T, anchor_T, behav_T, token)
        for metric_name, metric in METRICS.items():
            if metric.of is not None and (values_T := metric.of(tokens)) is not None:
                name = metric_name.removeprefix("actor/")
                stats[name] = _max(values_T, mask_T) if name.endswith(MAX) else masked_sum(values_T, mask_T)
    return Term(token.loss_T, stats)


def _max(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.cat([values_T.masked_fill(~mask_T, 0.0), values_T.new_zeros(1)]).max()


def kl_term(outputs: Tensors, data: Tensors, cu_seqlens: Tensor, config: PPOConfig) -> Term:
    """L_t = kl_coef * kl_t, the estimate of KL(current || reference) (`kl_estimate`; GRPO, arXiv:2402.03300, eq. 3)."""
    mask_T = data["loss_mask"].bool()
    ref_T = data["packed_ref_logprobs"].masked_fill(~mask_T, 0.0)
    kl_T = kl_estimate(outputs["logprobs"].masked_fill(~mask_T, 0.0), ref_T, config.kl_estimator)
    return Term(config.kl_coef * kl_T, {"kl_loss": masked_sum(kl_T, mask_T)})


def entropy_term(outputs: Tensors, data: Tensors, cu_seqlens: Tensor, config: PPOConfig) -> Term:
    """L_t = -entropy_coef * H_t, with H_t = -sum over all words v of pi(v) log pi(v) at token t, in nats.

    Williams and Peng, "Function optimization using connectionist reinforcement learning algorithms", 1991; PPO, arXiv:1707.06347,
    eq. 9. H_t is exact, not estimated from the sampled token. No ratio corrects for the policy that sampled the tokens before t.
    """
    return Term(-config.entropy_coef * outputs["entropy"].masked_fill(~data["loss_mask"].bool(), 0.0), {})


TERMS = {  # in the order in which they are added
    "policy": LossTerm(policy_term),
    "kl": LossTerm(kl_term, lambda config: config.kl_coef > 0 and config.kl_in == "loss", ("packed_ref_logprobs",)),
    "entropy": LossTerm(entropy_term, lambda config: config.entropy_coef > 0),
}


def terms_of(config: PPOConfig) -> list[LossTerm]:
    """The terms of the loss that this config has."""
    return [term for term in TERMS.values() if term.is_on(config)]


@dataclass(frozen=True)
class PPOLoss:
    """The loss of one minibatch in the form of LossFn: an engine calls it on each micro-batch, under autograd.

    L_t is the sum of the terms of `terms_of`; `sum_loss` reduces it over the tokens. outputs: `logprobs` and `entropy`, T each.
    data: the keys of `loss_keys`. The statistics are sums over masked tokens (`loss`: this micro-batch's share), so that they add
    up over micro-batches and ranks. Those with names ending in `_max` are maxima.
    """

    config: PPOConfig
    denominator: float  # of the whole minibatch, all ranks: see loss_denominator
    # The current policy is the proximal one (dataflow/graph.py `is_one_update`): its logprobs, without gradient, are the anchor's
    anchor_is_current: bool = False

    def __call__(
        self, outputs: Mapping[str, Tensor], data: Mapping[str, Tensor], cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T = data["loss_mask"].bool()
        if self.anchor_is_current:
            data = {**data, "proximal_logprobs": outputs["logprobs"].detach()}
        terms = [term.compute(outputs, data, cu_seqlens, self.config) for term in terms_of(self.config)]
        loss_T = reduce(add, [term.loss_T for term in terms])
        loss = sum_loss(loss_T, mask_T, cu_seqlens, self.config.loss_normalization, self.denominator)
        stats = {"loss": loss.detach(), "num_tokens": mask_T.sum(), "entropy": masked_sum(outputs["entropy"], mask_T)}
        for term in terms:
            stats |= term.stats
        return loss, stats

    def stop_reason(self, stats: Mapping[str, float]) -> str:
        """Reason not to take the step, or "". stats: sums over the whole minibatch, all ranks, before the optimizer step.

        The ratio and the KL compare the policy with the anchor, the centre of the trust region (`anchor_key`). If the anchor is the
        policy at the start of the step, the first minibatch never stops. A mean beyond its bound means that the policy moved too
        far. A NaN does not stop the step here, because the engine itself skips steps with a loss or gradient that is not finite.
        """
        num_tokens = max(stats["num_tokens"], 1.0)
        for name, mean, bound in (
            ("early_stop_imp_ratio", stats["importance_weight"] / num_tokens, self.config.early_stop_imp_ratio),
            ("early_stop_kl", stats["approx_kl"] / num_tokens, self.config.early_stop_kl),
        ):
            if bound is not None and mean > bound:
                what = "importance ratio" if name == "early_stop_imp_ratio" else "KL to the anchor policy"
                return f"mean {what} {mean:.4g} is above train.ppo.{name}={bound:g}"
        return ""


def anchor_key(config: PPOConfig) -> str:
    """Key of the trust region's centre: the trainer's logprobs at the start of the step, or those that the servers reported."""
    return "proximal_logprobs" if config.use_decoupled_loss or config.recompute_logprob else "packed_logprobs"


def loss_keys(config: PPOConfig) -> list[str]:
    """Keys that PPOLoss reads, all packed [T]."""
    keys = ["loss_mask", "advantages", "packed_logprobs", anchor_key(config)]
    return list(dict.fromkeys([*keys, *(key for term in terms_of(config) for key in term.keys)]))


def check_ppo_config(config: PPOConfig) -> None:
    """Reject values that make no sense in the formulas above. Raises ValueError with every problem found."""
    problems = [f"train.ppo.{name} is {value!r}; {remedy}" for name, value, remedy in ppo_problems(config)]
    if problems:
        raise ValueError("\n".join(problems))
