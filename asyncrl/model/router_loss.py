"""The auxiliary loss of a mixture of experts, over the tokens of an optimizer step (Switch Transformer, arXiv:2101.03961, eq. 4-6).

    loss = coef * E * sum over experts of (choices of the expert, as a mean) * (the expert's probability, as a mean)

Both means are over all layers and all tokens of the minibatch, on all ranks, padding left out, as in transformers'
load_balancing_loss_func. The choices have no gradient. They are counted in a forward pass of their own, before the first backward
pass. Then the loss is a sum over tokens, which micro-batches and ranks add up as every other loss.

Shapes: T tokens of a row with padding, E experts, K experts of a token. Each of c context ranks routes its own T / c tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.architectures.routes import is_softmax, routers_of
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.axes import LOSSES
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.packing import MicroBatch
from asyncrl.model.pipeline import Outputs, Stage


class RouterLoss:
    """The routers of a model in training, and their auxiliary loss."""

    def __init__(self, stage: Stage, path: str, *, coef: float, mesh: ModelMesh | None) -> None:
        """stage: it has all layers. Raises ConfigError if transformers has no such loss for the model's routers."""
        self._layout, self._routers = routers_of(stage.model, path, off="train.router_aux_loss_coef=0")
        if not all(map(is_softmax, self._routers)):
            raise ConfigError(
                f"train.router_aux_loss_coef={coef}: model_path={path!r} has routers of {type(self._routers[0]).__name__}, for "
                "which transformers has no auxiliary loss; set it to 0"
            )
        self._stage, self._coef, self._mesh = stage, coef, mesh
        self._logits: list[Tensor] = []  # of the newest forward pass, layer by layer: [T / c, E]
        self._factors_E: Tensor  # of the loss, for the sum of an expert's probabilities

    def forward(self, number: Tensor) -> Outputs:
        """Run the stage on a micro-batch, and keep the logits of its routers. Layers that the backward pass computes again add
        none."""
        found = self._logits = []
        with contextlib.ExitStack() as hooks:
            for router in self._routers:
                hooks.enter_context(router.register_forward_hook(lambda _, __, output: found.append(output[0])))
            outputs: Outputs = self._stage(number)
        return outputs

    @torch.no_grad()
    def count(self, plan: Sequence[MicroBatch]) -> None:
        """Count the choices for all tokens of the minibatch. Collective over all ranks of the model."""
        counts_E = torch.zeros(self._layout.num_experts, dtype=torch.float64, device=self._stage.device)
        for i, micro_batch in enumerate(plan):
            self.forward(torch.tensor([[i]]))
            for logits_TE in self._logits if micro_batch.sequences else ():
                chosen_N = self._of_sequences(logits_TE.topk(self._layout.top_k).indices, i).flatten()
                counts_E.index_add_(0, chosen_N, torch.ones_like(chosen_N, dtype=torch.float64))
        if self._mesh is not None:
            dist.all_reduce(counts_E, group=self._mesh.group_that_sums(LOSSES))
        num_routed = (counts_E.sum() / self._layout.top_k).clamp(min=1)  # tokens, once for each layer
        self._factors_E = (self._coef * len(counts_E) * counts_E / num_routed**2).float()

    def of_micro_batch(self, number: int) -> Tensor:
        """Its share of the loss, with gradient, after its forward pass. Collective over context ranks."""
        of_layers_T = [logits_TE.float().softmax(-1) @ self._factors_E for logits_TE in self._logits]
        self._logits = []  # the engine would keep them until its next train step
        return self._of_sequences(torch.stack(of_layers_T).sum(0), number).sum()

    def _of_sequences(self, part: Tensor, number: int) -> Tensor:
        """[T / c, ...] of each context rank -> [L, ...], where L counts a token of a shared prefix once for each sequence."""
        packed = self._stage.micro_batches[number]
        context = packed.segments.context
        row = part if context is None else context.gather_results(part[None])[0]
        return row[: packed.num_tokens] if packed.places is None else row.index_select(0, packed.places)
