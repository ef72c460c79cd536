"""Experts split over ranks (`e` in a grid): each of e successive ranks keeps an equal part of each layer's experts.

Tokens travel to the ranks that have their experts, and the results travel back, both by an all-to-all with uneven splits. So a
rank never gathers the experts of others. An expert sees the tokens of e ranks. FSDP shares it out among the ranks that have the
same part, and sums its gradient over them, as it does with all other weights and all ranks (DeepSpeed-MoE, arXiv:2201.05596).

Shapes: T tokens of this rank, K experts of a token, N tokens that this rank's experts get, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import grouped_mm_experts_forward

from asyncrl.architectures.routes import is_experts
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.axes import EXPERTS
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.sharding import apply_data_parallel


def check_experts(model: nn.Module, mesh: ModelMesh, path: str) -> None:
    """model: with all its layers. Raises ConfigError if its experts cannot be split, or if it has none."""
    grid = mesh.placement.grid
    what, remedy = f"model_path={path!r} with the grid {grid} of {mesh.placement.name!r}", "leave e out"
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not found:
        raise ConfigError(f"{what}: it has no experts; {remedy}")
    for name, module in found:
        shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
        number = int(getattr(module, "num_experts", 0))
        if not hasattr(module, "_is_expert_parallel") or any(shape[0] != number for shape in shapes.values()):
            raise ConfigError(
                f"{what}: {name} ({type(module).__name__}) has experts in another form {shapes}; {remedy}"
            )
        if number % grid.parts(EXPERTS):
            raise ConfigError(
                f"{what}: e{grid.parts(EXPERTS)} does not divide {number} experts; use another e, or {remedy}"
            )


# (tensor, planned) -> the tensor's values; those planned if it has none (TrainEngine._values_of)
ValuesOf = Callable[[Tensor, npt.NDArray[Any]], npt.NDArray[Any]]


def split_experts(model: nn.Module, mesh: ModelMesh, dtype: torch.dtype | None, values_of: ValuesOf) -> None:
    """Split the experts of a stage without values, and apply FSDP to them. dtype: of the computation; None: that of the
    parameters. A plan takes all experts to have equally many tokens."""
    between, peers = mesh.submesh_of_parts(EXPERTS)
    for module in filter(is_experts, model.modules()):
        for key, parameter in list(module.named_parameters()):
            setattr(module, key, _part_of(parameter, between, mesh.parts[EXPERTS]))
        module.forward = partial(forward_split, module, mesh.group_that_splits(EXPERTS), values_of)
        # Scores keep their dtype: some routers have them in float32
        apply_data_parallel(module, peers, dtype, casts_inputs=False)


def _part_of(parameter: Tensor, mesh: DeviceMesh, part: int) -> nn.Parameter:
    each = parameter.shape[0] // mesh.size()
    local = parameter.detach()[part * each : (part + 1) * each].contiguous()
    shape, stride = parameter.shape, parameter.stride()
    split = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


class _Own:
    """A layer's experts as its own code sees them: only those of this rank, in the dtype of the computation."""

    def __init__(self, module: nn.Module, num_experts: int, dtype: torch.dtype) -> None:
        self._module, self.num_experts, self._dtype = module, num_experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local().to(self._dtype) if isinstance(value, DTensor) else value


def forward_split(
    module: nn.Module,
    group: dist.ProcessGroup,
    values_of: ValuesOf,
    hidden_TH: Tensor,
    experts_TK: Tensor,
    scores_TK: Tensor,
) -> Tensor:
    """The experts' sum for each of this rank's tokens: [T, H]. Collective over the ranks that share out the experts."""
    size, num_each, top_k = group.size(), int(module.num_experts) // group.size(), experts_TK.shape[1]  # type: ignore[arg-type]
    chosen = experts_TK.reshape(-1)
    order = chosen.argsort(stable=True)
    sent = chosen.new_zeros(size * num_each).index_add(0, chosen, torch.ones_like(chosen)).view(size, num_each)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    even = (len(chosen) + size - 1 - np.arange(size)) // size
    planned = np.stack([even, np.full(size, even[dist.get_rank(group)])])
    there, here = values_of(torch.stack([sent.sum(1), received.sum(1)]), planned).tolist()
    rows_NH = _Exchange.apply(hidden_TH[order // top_k], here, there, group)  # type: ignore[no-untyped-call]
    own: Any = _Own(module, num_each, rows_NH.dtype)
    if sum(here):
        # The rows of each rank are in the order of the experts
        expert_N = torch.arange(num_each, device=order.device).repeat(size)
        expert_N = expert_N.repeat_interleave(received.reshape(-1), output_size=sum(here))
        rows_NH = grouped_mm_experts_forward(own, rows_NH, expert_N[:, None], rows_NH.new_ones(len(rows_NH), 1))
    else:  # FSDP sums gradients over the ranks with these experts, so this one has some, too
        rows_NH = rows_NH + sum(getattr(own, name).sum() for name, _ in module.named_parameters()) * 0.0
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
