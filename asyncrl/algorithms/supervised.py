"""The supervised term of the actor's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class SupervisedLoss:
    """loss + coef * ptx, with ptx the mean of -log pi(t) over the supervised tokens t of a minibatch (nats per token).

    PPO-ptx: Ouyang et al., InstructGPT, arXiv:2203.02155, eq. 2, where the supervised texts are pretraining data. Texts lie among
    the responses, packed [T]. `loss_mask` is False in texts, `supervised_mask` is False in responses.

    The logprobs are those of the whole loss: at the sampling temperature.
    """

    loss: Loss  # of the responses
    coef: float
    denominator: float  # supervised tokens of the whole minibatch, over all ranks

    def __call__(
        self, outputs: Mapping[str, Tensor], data: Mapping[str, Tensor], cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = self.loss(outputs, data, cu_seqlens)
        ptx = -outputs["logprobs"].masked_fill(~data["supervised_mask"], 0.0).sum() / self.denominator
        loss = loss + self.coef * ptx
        return loss, stats | {"loss": loss.detach(), "ptx_loss": ptx.detach()}

    def stop_reason(self, stats: Mapping[str, float]) -> str:
        """The responses' reason to skip the optimizer step; "": none."""
        reason: str = getattr(self.loss, "stop_reason", lambda _: "")(stats)
        return reason
