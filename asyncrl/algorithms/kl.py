"""KL divergence to a reference policy: estimates per token, and controllers of the coefficient.

The penalty enters as a reward (token t costs `coef * kl_t`: advantages.py) or, with train.ppo.kl_in `loss`, as a term of the
loss (`coef * kl_t` is added to the loss of token t: ppo.py).

Shapes: T tokens, packed.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algorithms.packed import MAX_LOG_RATIO
from asyncrl.config.schema import PPOConfig

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) from each token, for tokens sampled from the policy. With d = log policy - log reference:

        k1 = d                   unbiased; negative for some tokens, noisy
        k2 = d^2 / 2             biased, low variance, never negative
        k3 = exp(-d) - 1 + d     unbiased, low variance, never negative

    J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). GRPO uses k3 (arXiv:2402.03300). These properties
    concern the values, as used in a reward. As a term of the loss, k2 has the gradient of the divergence; k3's gradient is close to
    it near the reference; k1's is 0 in expectation, so it has no effect (Tang and Munos, arXiv:2506.09477).
    """
    d_T = logprobs_T - ref_logprobs_T
    if estimator == "k1":
        return d_T
    if estimator == "k2":
        return d_T.square() / 2
    if estimator == "k3":
        return torch.exp((-d_T).clamp(max=MAX_LOG_RATIO)) - 1 + d_T
    raise ValueError(f"kl_estimator is {estimator!r}; use one of {', '.join(KL_ESTIMATORS)}")


class KLController(Protocol):
    """Holds the coefficient of the KL penalty."""

    coef: float

    def update(self, kl: float, num_sequences: int) -> None:
        """Call once per train step. kl: mean KL per sequence (nats, summed over its tokens) over num_sequences sequences."""


class FixedKLController:
    """The coefficient is constant."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_sequences: int) -> None:
        pass


class AdaptiveKLController:
    """The coefficient follows a target, by proportional control in log space:

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon)

    Ziegler et al., "Fine-tuning language models from human preferences" (arXiv:1909.08593). `update` takes statistics over all
    ranks, so that every rank has the same coefficient.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_sequences: int) -> None:
        if not math.isfinite(kl):
            return  # a broken batch must not break the coefficient permanently; the engine skips the step of such a batch, too
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= max(1 + error * num_sequences / self.horizon, 0.0)


def make_kl_controller(config: PPOConfig) -> KLController:
    """Return the configured controller."""
    if not config.kl_adaptive:
        return FixedKLController(config.kl_coef)
    for name, value in (("kl_target", config.kl_target), ("kl_horizon", config.kl_horizon)):
        if value <= 0:
            raise ValueError(f"train.ppo.{name} is {value}; with train.ppo.kl_adaptive it must be above 0")
    return AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)
