"""torch's varlen kernel on a CPU, by its formula: with `kernels_of_a_gpu` a test takes the kernels of attention of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from asyncrl.architectures.attention import Pattern
from asyncrl.model import attention


def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H100, with this torch's varlen kernel."""
    monkeypatch.setattr(attention, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(attention, "has_faster_sdpa", lambda device: True)
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, K, D]
    value: Tensor,  # [T, K, D]
    starts: Tensor,
    of_keys: Tensor,
    longest: int,
    longest_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: list[int] | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    output, sums = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
    for part, _, _, _, v, logits in _sequences(query, key, value, starts, of_keys, scale, window):
        sums[:, part] = logits.logsumexp(-1)
        output[part] = (logits.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    starts: Tensor,
    of_keys: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    scale, window = rest[4:6]
    repeated = len(key), *query.shape[1:]
    grads = [torch.zeros(query.shape), torch.zeros(repeated), torch.zeros(repeated)]
    factor = query.shape[2] ** -0.5 if scale is None else scale
    for part, keys, q, k, v, logits in _sequences(query, key, value, starts, of_keys, scale, window):
        of_output, shares = grad[part].float().transpose(0, 1), logits.softmax(-1)
        of_shares = of_output @ v.transpose(1, 2)
        of_logits = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * factor
        parts = of_logits @ k, of_logits.transpose(1, 2) @ q, shares.transpose(1, 2) @ of_output
        for whole, where, one in zip(grads, (part, keys, keys), parts, strict=True):
            whole[where] = one.transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    of_query, *shared = grads
    shared = [each.view(len(key), -1, groups, key.shape[2]).sum(2) for each in shared]
    return of_query.to(query.dtype), shared[0].to(key.dtype), shared[1].to(value.dtype)


def _sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    of_keys: Tensor,
    scale: float | None,
    window: list[int] | None,
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]:
    """(queries of a sequence, its keys; those queries, keys, values and masked logits, all [H, ...] in float32). The last query is
    at the last key."""
    left, right = window or (-1, -1)
    assert right == 0  # causal
    groups = query.shape[1] // key.shape[1]
    for (first, last), (first_key, last_key) in zip(pairwise(starts.tolist()), pairwise(of_keys.tolist()), strict=True):
        part, keys = slice(first, last), slice(first_key, last_key)
        q, k, v = query[part], key[keys].repeat_interleave(groups, 1), value[keys].repeat_interleave(groups, 1)
        q, k, v = (each.float().transpose(0, 1) for each in (q, k, v))
        at = torch.arange(last_key - first_key)
        shown = Pattern(window=left + 1).shows(at[len(at) - (last - first) :, None], at)
        logits = q @ k.transpose(1, 2) * (query.shape[2] ** -0.5 if scale is None else scale)
        yield part, keys, q, k, v, logits.masked_fill(~shown, -torch.inf)
