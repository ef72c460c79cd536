"""Experts split over the data ranks (train.split_experts): each rank keeps an equal part of each layer's experts.

Tokens travel to the ranks that have their experts, and the results travel back, both by an all-to-all with uneven splits. So a
rank never gathers the experts of others. Each expert sees the tokens of all data ranks, so its gradient is the whole sum: FSDP,
which splits all other weights, leaves these parameters alone.

Shapes: T tokens of this rank, K experts of a token, N tokens that this rank's experts get, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import grouped_mm_experts_forward

from asyncrl.architectures.routes import is_experts
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.axes import GRADIENTS, SAMPLES
from asyncrl.model.mesh import ModelMesh


def split_experts(model: nn.Module, mesh: ModelMesh, path: str) -> set[nn.Parameter]:
    """Split the experts of a model without values. Returns the parameters that are split. Raises ConfigError if they cannot be, or
    if the model has none."""
    grid = mesh.placement.grid
    what, remedy = f"train.split_experts=on: model_path={path!r}", "set train.split_experts=off"
    if grid.only(SAMPLES) != grid or grid.num_copies > 1:
        raise ConfigError(
            f"{what} has the grid {grid}: experts are only split over data ranks; use d alone, or {remedy}"
        )
    size, part = grid.num_replicas, mesh.parts[SAMPLES]
    found: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
        number = int(getattr(module, "num_experts", 0))
        if not hasattr(module, "_is_expert_parallel") or any(shape[0] != number for shape in shapes.values()):
            raise ConfigError(
                f"{what}: {name} ({type(module).__name__}) has experts in another form {shapes}; {remedy}"
            )
        if number % size:
            raise ConfigError(f"{what} has {number} experts, which d{size} does not divide; use another d, or {remedy}")
        for key, parameter in list(module.named_parameters()):
            split = nn.Parameter(
                DTensor.from_local(
                    parameter.detach()[part * number // size : (part + 1) * number // size].contiguous(),
                    mesh.submesh(GRADIENTS),
                    [Shard(0)],
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            )
            setattr(module, key, split)
            found.add(split)
        module.forward = partial(_forward, module, mesh.group_that_splits(SAMPLES))
    if not found:
        raise ConfigError(f"{what} has no experts; {remedy}")
    return found


class _Own:
    """A layer's experts as its own code sees them: only those of this rank, in the dtype of the computation."""

    def __init__(self, module: nn.Module, num_experts: int, dtype: torch.dtype) -> None:
        self._module, self.num_experts, self._dtype = module, num_experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local().to(self._dtype) if isinstance(value, DTensor) else value


def _forward(
    module: nn.Module, group: dist.ProcessGroup, hidden_TH: Tensor, experts_TK: Tensor, scores_TK: Tensor
) -> Tensor:
    """The experts' sum for each of this rank's tokens: [T, H]. Collective over the data ranks."""
    size, num_each, top_k = group.size(), int(module.num_experts) // group.size(), experts_TK.shape[1]  # type: ignore[arg-type]
    chosen = experts_TK.reshape(-1)
    order = chosen.argsort(stable=True)
    sent = chosen.bincount(minlength=size * num_each).view(size, num_each)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, here = sent.sum(1).tolist(), received.sum(1).tolist()
    rows_NH = _Exchange.apply(hidden_TH[order // top_k], here, there, group)  # type: ignore[no-untyped-call]
    if sum(here):
        # The rows of each rank are in the order of the experts
        expert_N = torch.arange(num_each, device=order.device).repeat(size).repeat_interleave(received.reshape(-1))
        own: Any = _Own(module, num_each, rows_NH.dtype)
        rows_NH = grouped_mm_experts_forward(own, rows_NH, expert_N[:, None], rows_NH.new_ones(len(rows_NH), 1))
    sorted_rows = _Exchange.apply(rows_NH, there, here, group)  # type: ignore[no-untyped-call]
    results = torch.empty_like(sorted_rows).index_copy(0, order, sorted_rows)
    summed: Tensor = (results * scores_TK.reshape(-1, 1)).view(*experts_TK.shape, -1).sum(1)
    return summed.to(hidden_TH.dtype)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows. Its gradient travels back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, here: Sequence[int], there: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        """here, there: numbers of rows that each rank sends to this one, and gets from it."""
        ctx.of = here, there, group
        return _exchange(rows, here, there, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        here, there, group = ctx.of
        return _exchange(grad, there, here, group), None, None, None


def _exchange(rows: Tensor, here: Sequence[int], there: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(here), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), list(here), list(there), group=group)
    return result
