"""Shared by the algorithms: sums over the tokens of a sequence, and normalisation over a batch or within groups.

In this package an element is "masked" if its mask is True: it counts. Elements whose mask is False are left out.

Normalisation gives mean 0 and standard deviation 1 over the masked elements. Sums are taken in float64, so that another order of
addition (another layout of ranks) changes nothing that survives rounding to float32. The standard deviation is the population's
(divided by n): that of a single element is 0.

Shapes: T tokens, packed (sequences one after another); S sequences; sequence s is cu_seqlens[s]:cu_seqlens[s + 1]; N elements,
tokens or sequences, as the caller likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Differences of logprobs are clamped to this before exp: e^20 = 5e8 is far outside any trust region, and an inf would turn the
# gradient of a clipped token (0 * inf) into nan.
MAX_LOG_RATIO = 20.0


def to_tokens(x_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Repeat the value of each sequence for all its tokens."""
    return x_S.repeat_interleave(cu_seqlens.diff())


def count_per_sequence(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of masked tokens of each sequence: int64, S."""
    total_before = torch.cat([mask_T.new_zeros(1, dtype=torch.int64), mask_T.cumsum(0)])
    return total_before[cu_seqlens[1:]] - total_before[cu_seqlens[:-1]]


def sum_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """S sums in the dtype of x_T, computed in float64. Differentiable."""
    num_sequences = len(cu_seqlens) - 1
    sequence_T = torch.arange(num_sequences, device=x_T.device).repeat_interleave(
        cu_seqlens.diff(), output_size=len(x_T)
    )
    return x_T.new_zeros(num_sequences, dtype=torch.float64).index_add(0, sequence_T, x_T.double()).to(x_T.dtype)


def mean_per_sequence(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """S means over masked tokens; 0 for a sequence without any. Differentiable; values outside the mask have no effect."""
    count_S = count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
    return sum_per_sequence(x_T.masked_fill(~mask_T, 0.0), cu_seqlens) / count_S


def masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """The sum over masked tokens, without gradient."""
    return x_T.detach().masked_fill(~mask_T, 0.0).sum()


# A function that sums each value over the data-parallel ranks. Every rank calls it the same number of times and gets the same sums.
# `identity_sum` is the function for a single rank.
AllReduceSum = Callable[[list[float]], npt.NDArray[np.float64]]


def identity_sum(values: list[float]) -> npt.NDArray[np.float64]:
    """The AllReduceSum of a single rank: the sums are its own values."""
    return np.asarray(values, np.float64)


def normalise_batch(
    x_N: Tensor, mask_N: Tensor, all_reduce_sum: AllReduceSum = identity_sum, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / (std + eps), with mean and std over the masked elements of all ranks; 0 elsewhere.

    Makes two collective calls, so every rank must call it, even without elements.
    """
    values = x_N[mask_N].double()
    count, total = all_reduce_sum([float(values.numel()), float(values.sum())])
    mean = total / max(count, 1.0)
    (squares,) = all_reduce_sum([float((values - mean).square().sum())])
    std = (squares / max(count, 1.0)) ** 0.5
    return _scatter((values - mean) / (std + eps), x_N, mask_N)


def normalise_groups(
    x_N: Tensor, mask_N: Tensor, group_sizes: Sequence[int], eps: float = 1e-6, weights_N: Tensor | None = None
) -> Tensor:
    """(x - mean) / (std + eps), with mean and std over the masked elements of the element's own group; 0 elsewhere.

    Groups lie one after another, `group_sizes` elements each. A group never spans ranks, so this needs no communication.
    weights_N: the weight of each element in its group's mean and std; None: 1.
    """
    group_N = torch.arange(len(group_sizes)).repeat_interleave(torch.tensor(group_sizes, dtype=torch.int64))
    group = group_N.to(x_N.device)[mask_N]
    values = x_N[mask_N].double()
    weights = torch.ones_like(values) if weights_N is None else weights_N[mask_N].double()

    def sum_by_group(y: Tensor) -> Tensor:
        return torch.zeros(len(group_sizes), dtype=torch.float64, device=x_N.device).index_add_(0, group, y)

    count = sum_by_group(weights)
    count = count.masked_fill(count == 0, 1.0)
    centred = values - (sum_by_group(weights * values) / count)[group]
    std = (sum_by_group(weights * centred.square()) / count).sqrt()
    return _scatter(centred / (std[group] + eps), x_N, mask_N)


def group_means(x_N: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """The mean of each element's group: float64, N."""
    sizes_G = torch.tensor(group_sizes, dtype=torch.int64, device=x_N.device)
    group_N = torch.arange(len(group_sizes), device=x_N.device).repeat_interleave(sizes_G, output_size=len(x_N))
    sums_G = torch.zeros(len(group_sizes), dtype=torch.float64, device=x_N.device).index_add_(0, group_N, x_N.double())
    return (sums_G / sizes_G.clamp(min=1))[group_N]


def _scatter(values: Tensor, like_N: Tensor, mask_N: Tensor) -> Tensor:
    return torch.zeros_like(like_N).masked_scatter_(mask_N, values.to(like_N.dtype))
