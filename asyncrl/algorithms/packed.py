"""What the algorithms share: numbers of a sequence from numbers of its tokens, and back; masks that keep nan out.

Shapes: T tokens, packed (sequences one after another); S sequences; sequence s is cu_seqlens[s]:cu_seqlens[s + 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

# Differences of logprobs are cut here before exp: e^20 = 5e8 is far outside of any trust region, and an inf would turn the
# gradient of a clipped token (0 * inf) into nan.
MAX_LOG_RATIO = 20.0


def to_tokens(x_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A value of each sequence, given to every one of its tokens."""
    return x_S.repeat_interleave(cu_seqlens.diff())


def count_per_sequence(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many tokens of each sequence are masked in: int64, S."""
    total_before = torch.cat([mask_T.new_zeros(1, dtype=torch.int64), mask_T.cumsum(0)])
    return total_before[cu_seqlens[1:]] - total_before[cu_seqlens[:-1]]


def sum_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """S sums in the dtype of x_T, taken in float64. Differentiable."""
    num_sequences = len(cu_seqlens) - 1
    sequence_T = torch.arange(num_sequences, device=x_T.device).repeat_interleave(
        cu_seqlens.diff(), output_size=len(x_T)
    )
    return x_T.new_zeros(num_sequences, dtype=torch.float64).index_add(0, sequence_T, x_T.double()).to(x_T.dtype)


def mean_per_sequence(x_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """S means over masked tokens; 0 for a sequence without any. Differentiable; what stands outside of the mask has no say."""
    count_S = count_per_sequence(mask_T, cu_seqlens).clamp(min=1)
    return sum_per_sequence(x_T.masked_fill(~mask_T, 0.0), cu_seqlens) / count_S


def masked_sum(x_T: Tensor, mask_T: Tensor) -> Tensor:
    """The sum over masked tokens, without gradient."""
    return x_T.detach().masked_fill(~mask_T, 0.0).sum()
