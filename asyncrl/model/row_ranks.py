"""The ranks that share the tokens of a packed row: tensor ranks between attention and MLPs (sequence parallelism), context ranks
everywhere but in attention.

Context ranks compute attention as in DeepSpeed-Ulysses (arXiv:2309.14509). Each has all heads of successive tokens, T / c of them.
One all-to-all gives each rank some heads of all tokens, and another one returns the outputs. Every rank of the group knows all
tokens of the row and computes the loss of all of them, so a rank's gradient of its own results is the whole one.

Shapes: T tokens of the row with padding, c ranks, H query heads, K key heads, D width of a key, V of a value; N tokens that are
predicted; M predictions of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.dataflow.axes import problem_of_heads


@dataclass(frozen=True)
class RowRanks:
    """The ranks that share a row, from the point of view of one of them. Each has the same number of the row's tokens."""

    group: dist.ProcessGroup
    part: int  # which part of a row this rank has

    @property
    def size(self) -> int:
        return self.group.size()

    def gather(self, part: Tensor) -> Tensor:
        """[1, T / m, ...] of each rank -> [1, T, ...]. The gradient of a rank's part is the sum of the ranks' gradients."""
        device = part.device.type
        if torch.is_autocast_enabled(device):  # half the bytes; what computes on whole rows would cast them, too
            part = part.to(torch.get_autocast_dtype(device))
        return _Gather.apply(part, self.group)  # type: ignore[no-untyped-call, no-any-return]

    def gather_results(self, part: Tensor) -> Tensor:
        """Like gather, for results from which all ranks compute the same loss: each has the whole gradient, and takes its part."""
        return _GatherResults.apply(part, self.group, self.part)  # type: ignore[no-untyped-call, no-any-return]

    def sum(self, row: Tensor) -> Tensor:
        """[1, T, ...] of each rank -> the sum over the ranks for this rank's tokens, [1, T / m, ...]."""
        return _Sum.apply(row, self.group)  # type: ignore[no-untyped-call, no-any-return]

    def own(self, row: Tensor) -> Tensor:
        """[1, T, ...] -> this rank's tokens, [1, T / m, ...]. The gradient is 0 for the other tokens."""
        return row.chunk(self.size, dim=1)[self.part]


class ContextRanks(RowRanks):
    """The ranks that compute attention by heads and everything else by tokens."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query: [1, H, T / c, D] of each rank; key, value: [1, K, T / c, ...]. Returns this rank's heads of the row: [1, H / c, T,
        D], and [1, K / c, T, ...] or, with fewer key heads than ranks, [1, 1, T, ...]. Raises ValueError for heads that do not
        divide."""
        if problem := problem_of_heads(query.shape[1], key.shape[1], self.size):
            raise ValueError(problem)
        if copies := self.size // key.shape[1]:  # the ranks with a key head's queries need the key head
            key, value = (heads.repeat_interleave(copies, 1) if copies > 1 else heads for heads in (key, value))
        widths, counts = [], []
        parts = []
        for heads in (query, key, value):
            of_ranks = heads[0].reshape(self.size, -1, *heads.shape[2:])
            parts.append(of_ranks.transpose(1, 2).flatten(2))  # [c, T / c, heads * width]
            widths.append(parts[-1].shape[2])
            counts.append(heads.shape[1] // self.size)
        rows = _AllToAll.apply(torch.cat(parts, 2), self.group).flatten(0, 1)  # type: ignore[no-untyped-call]
        row_of = zip(rows.split(widths, 1), counts, strict=True)
        query, key, value = (row.unflatten(1, (count, -1)).transpose(0, 1)[None] for row, count in row_of)
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """[1, T, H / c, V] of each rank -> all heads of this rank's tokens, [1, T / c, H, V]."""
        parts = output.reshape(self.size, -1, *output.shape[2:])
        received = _AllToAll.apply(parts, self.group)  # type: ignore[no-untyped-call]
        tokens: Tensor = received.transpose(0, 1).flatten(1, 2)[None]
        return tokens

    def own_heads(self, heads: Tensor) -> Tensor:
        """[H] -> [H / c]."""
        return heads.chunk(self.size)[self.part]


@dataclass(frozen=True)
class Predictions:
    """The tokens that this context rank predicts: those whose predictors are in its part of the row."""

    predictors: Tensor  # [M] int64: places in the part
    predicted: Tensor  # [M] int64: places in the row. Behind the rank's own tokens both repeat the first of the row
    order: Tensor  # [N] int64: the place of each prediction among those of all ranks, [c * M]

    @classmethod
    def of(
        cls,
        predictors: npt.NDArray[np.int64],
        predicted: npt.NDArray[np.int64],
        *,
        num_tokens: int,
        ranks: ContextRanks,
        device: torch.device | str,
    ) -> Predictions:
        """num_tokens: of each part of the row."""
        owners = predictors // num_tokens
        counts = np.bincount(owners, minlength=ranks.size)
        most = max(int(counts.max()), 1)
        by_owner = np.argsort(owners, kind="stable")
        order = np.empty_like(predictors)
        order[by_owner] = np.arange(len(owners)) + np.repeat(
            most * np.arange(ranks.size) - (np.cumsum(counts) - counts), counts
        )
        own = by_owner[owners[by_owner] == ranks.part]
        padding = (0, most - len(own))
        arrays = (np.pad(predictors[own] - ranks.part * num_tokens, padding), np.pad(predicted[own], padding), order)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))

    def gather(self, results: Sequence[Tensor], ranks: ContextRanks) -> tuple[Tensor, ...]:
        """[M] of each rank -> [N] on every rank."""
        row: Tensor = ranks.gather_results(torch.stack(tuple(results), 1)[None])[0]
        return row.index_select(0, self.order).unbind(1)


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    row = part.new_empty(1, part.shape[1] * group.size(), *part.shape[2:])
    dist.all_gather_into_tensor(row[0], part[0].contiguous(), group=group)
    return row


def _reduce_scatter(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = row.new_empty(1, row.shape[1] // group.size(), *row.shape[2:])
    dist.reduce_scatter_tensor(part[0], row[0].contiguous(), group=group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _GatherResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, number: int) -> Tensor:
        ctx.of = group.size(), number
        return _all_gather(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        size, number = ctx.of
        return grad.chunk(size, dim=1)[number], None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(row, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    """[c, ...] -> [c, ...]: part i goes to rank i, and part i of the result comes from rank i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received
