"""A layer's experts that ranks share out, compared with the layer's own code on all of their tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.architectures.routes import is_experts
from asyncrl.model.experts import forward_split
from tests.support.families import make_family

NUM_EXPERTS, TOP_K = 8, 2
NUM_TOKENS = (9, 1, 6, 4)  # of each rank
FAMILIES = ("qwen3_moe", "gpt_oss")  # GPT-OSS has biases, and matrices the other way round

Outcome = dict[str, Tensor]  # the output, and the gradients of inputs and parameters


def layer_of(family: str) -> nn.Module:
    name = "num_local_experts" if family == "gpt_oss" else "num_experts"
    return next(filter(is_experts, make_family(None, family, **{name: NUM_EXPERTS}).modules()))


def own_outcome(
    layer: nn.Module, rank: int, group: Any, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Outcome:
    """Of a rank that keeps its part of the layer's experts. Collective over the group."""
    own, each = copy.deepcopy(layer), NUM_EXPERTS // group.size()
    for name, parameter in list(own.named_parameters()):
        part = parameter.detach()[rank * each : (rank + 1) * each]
        setattr(own, name, nn.Parameter(part.to(device, dtype)))

    def forward(*inputs: Tensor) -> Tensor:
        return forward_split(own, group, lambda tensor, _: tensor.cpu().numpy(), *inputs)

    return _outcome(forward, own, rank, device, dtype)


def assert_whole(found: Sequence[Outcome], layer: nn.Module, tolerance: float) -> None:
    """The outcomes of all ranks are those of the layer on all tokens. tolerance: of the difference's norm."""
    layer, each = copy.deepcopy(layer), NUM_EXPERTS // len(found)
    for rank, outcome in enumerate(found):
        for name, expected in _outcome(layer, layer, rank, "cpu", torch.float32).items():
            if name in ("output", "hidden", "scores"):
                _assert_near(outcome[name], expected, tolerance, f"{name} of rank {rank}")
    for name, parameter in layer.named_parameters():  # the gradients of all tokens have added up
        assert parameter.grad is not None
        for rank, outcome in enumerate(found):
            part = parameter.grad[rank * each : (rank + 1) * each]
            _assert_near(outcome[name], part, tolerance, f"{name} of rank {rank}")


def _outcome(
    forward: Callable[..., Any], layer: nn.Module, rank: int, device: torch.device | str, dtype: torch.dtype
) -> Outcome:
    random = torch.Generator().manual_seed(rank)
    count = NUM_TOKENS[rank]
    hidden, weights = (torch.randn(count, 64, generator=random).to(device, dtype) for _ in range(2))
    scores = torch.rand(count, TOP_K, generator=random).to(device, dtype)
    # No token goes to the last two experts. With four ranks the last rank gets none
    chosen = torch.rand(count, NUM_EXPERTS - 2, generator=random).argsort(-1)[:, :TOP_K].to(device)
    output = forward(hidden.requires_grad_(), chosen, scores.requires_grad_())
    (output * weights).sum().backward()
    made = {"output": output.detach(), "hidden": hidden.grad, "scores": scores.grad}
    made |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value.float().cpu() for name, value in made.items() if value is not None}


def _assert_near(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    gap, norm = float((found - expected).norm()), float(expected.norm())
    assert gap <= tolerance * norm + 1e-7, f"{what}: {gap:.3g} of {norm:.3g}"


def outcome_of_rank(rank: int, family: str, device: str, dtype: str) -> Outcome:
    """For processes that are ranks of a world. Collective over it."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    return own_outcome(layer_of(family), rank, dist.group.WORLD, device=where, dtype=getattr(torch, dtype))
