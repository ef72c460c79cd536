"""The critic's side of PPO: its loss, and units in which values are easy to learn.

A critic outputs a value at every position: that of the state after token t. Its targets (returns) and the mask of states to learn
from come from advantages.py (`returns_of`), in the same positions.

Shapes: T tokens, packed; N returns, in any order; mask_T: the states to learn from. ValueNorm takes and returns the caller's dtype
and computes in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.packed import AllReduceSum, identity_sum, masked_sum


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, mask_T: Tensor, eps_clip: float
) -> tuple[Tensor, Tensor]:
    """Return loss_T, and where the clipped term below is the larger one (bool). They are 0 and False where mask_T is False.

    The clipped value loss of PPO's original implementation (studied in arXiv:2006.05990). With V_old, the critic's value at the
    start of the train step,

        L = 1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)

    A value that has moved further than eps towards its return gets no gradient. eps_clip = 0: L = 1/2 (V - R)^2.
    """
    zeros_T = torch.zeros_like(values_T)
    values_T = torch.where(mask_T, values_T, zeros_T)
    old_values_T = torch.where(mask_T, old_values_T.detach(), zeros_T)
    returns_T = torch.where(mask_T, returns_T.detach(), zeros_T)
    loss_T = (values_T - returns_T).square() / 2
    if eps_clip <= 0:
        return loss_T, torch.zeros_like(mask_T)
    within_T = old_values_T + (values_T - old_values_T).clamp(-eps_clip, eps_clip)
    clipped_T = (within_T - returns_T).square() / 2
    # A value within eps_clip of its old value is not clipped: the two losses differ there only by rounding
    decided_T = (clipped_T > loss_T) & ((values_T - old_values_T).abs() > eps_clip)
    return torch.max(loss_T, clipped_T), decided_T


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss of one minibatch in the form of LossFn: an engine calls it on each micro-batch, under autograd.

    outputs: `values`, T. data, T each: `values` (V_old), `returns`, and `loss_mask`, the states to learn from. All in the units of
    the critic (ValueNorm). The loss is the mean over the states of the minibatch; the statistics are sums over them.
    """

    eps_clip: float
    denominator: float  # states in loss_mask, of the whole minibatch, all ranks

    def __call__(
        self, outputs: Mapping[str, Tensor], data: Mapping[str, Tensor], cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T, values_T, returns_T = data["loss_mask"].bool(), outputs["values"], data["returns"]
        loss_T, clipped_T = value_loss(values_T, data["values"], returns_T, mask_T, self.eps_clip)
        loss = loss_T.sum() / self.denominator
        stats = {
            "loss": loss.detach(),
            "num_tokens": mask_T.sum(),
            "value": masked_sum(values_T, mask_T),
            "error_squared": masked_sum((values_T.detach() - returns_T).square(), mask_T),
            "clip_share": clipped_T.sum(),
        }
        return loss, stats


class ValueNorm:
    """Running mean and standard deviation of returns. A critic is trained in these units, so its outputs stay of order 1.

    m and q are the means of R and of R^2 over the batch of a train step (all ranks), R the returns. The running means decay
    exponentially, with bias correction:

        m_run <- beta * m_run + (1 - beta) * m        q_run likewise        w <- beta * w + (1 - beta)
        mean = m_run / w        std = sqrt(max(q_run / w - mean^2, MIN_VARIANCE))

    (MAPPO, arXiv:2103.01955, after PopArt, arXiv:1602.07714, without PopArt's rescaling of the output layer.) The state is float64
    and the same on every rank. Before the first update mean is 0 and std 1. If all returns so far were equal, MIN_VARIANCE keeps
    the first different return from looking enormous.

    The order within one train step, so that the critic is clipped around its actual output:

        V_old                         output of critic_inf, in the critic's units: kept unchanged
        V = denormalise(V_old)        for GAE; advantages and returns are in units of rewards
        update(returns)
        R = normalise(returns)        the targets of ValueLoss
    """

    MIN_VARIANCE = 1e-2

    def __init__(self, beta: float) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"train.critic.value_norm_beta is {beta}; it must be at least 0 and below 1")
        self.beta = beta
        self._mean = 0.0
        self._mean_square = 0.0
        self._weight = 0.0

    @property
    def mean(self) -> float:
        return self._mean / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        if not self._weight:
            return 1.0
        return math.sqrt(max(self._mean_square / self._weight - self.mean**2, self.MIN_VARIANCE))

    def update(self, returns_N: Tensor, all_reduce_sum: AllReduceSum = identity_sum) -> None:
        """Call once per train step, on every rank, even without returns: this makes one collective call. A batch without returns,
        or with one that is not finite, changes nothing."""
        x = returns_N.double()
        sums = [float(x.numel()), float(x.sum()), float(x.square().sum())]
        count, total, squares = all_reduce_sum(sums).tolist()
        if count == 0 or not math.isfinite(total + squares):
            return  # a broken batch must not break the units permanently; the engine skips the step of such a batch
        self._mean = self.beta * self._mean + (1 - self.beta) * total / count
        self._mean_square = self.beta * self._mean_square + (1 - self.beta) * squares / count
        self._weight = self.beta * self._weight + (1 - self.beta)

    def normalise(self, x_T: Tensor) -> Tensor:
        """Convert from units of rewards to those of the critic; keeps the dtype."""
        return ((x_T.double() - self.mean) / self.std).to(x_T.dtype)

    def denormalise(self, x_T: Tensor) -> Tensor:
        """Convert from units of the critic to those of rewards; keeps the dtype."""
        return (x_T.double() * self.std + self.mean).to(x_T.dtype)

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint; plain numbers."""
        return {"mean": self._mean, "mean_square": self._mean_square, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._mean, self._mean_square, self._weight = state["mean"], state["mean_square"], state["weight"]
