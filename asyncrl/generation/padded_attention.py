"""Attention for continuous batching that never multiplies queries of one request with keys of another.

transformers' paged `sdpa` and `eager` attention multiply every query of a batch with every key of every request and mask out
the keys of other requests: the work grows with the square of the number of requests. Here requests of similar lengths are padded
to one rectangle and computed as a batch. It is pure PyTorch and runs on every device that the model runs on; flash attention
kernels are faster on GPUs that support them.

The plan (the positions of queries and cache rows) is made once per forward pass, on the host. It travels to the device in one copy
with the other inputs of the pass, and every layer gets it as the keyword argument `attention_plan`. The KV cache reads the rows:
its `read_index` is replaced by the padded one. The cache keeps all keys of every layer with attention, whatever the layer attends
to: a layer's window or chunk (architectures/attention.py) is part of its mask only. Layers without attention have no place in it.

Shapes: B requests of a rectangle, Q padded query length, K padded key length, H heads, G query heads per key head, D width of a
key, V width of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.architectures.attention import CAUSAL, Pattern, attend, pattern_of

NAME = "asyncrl_padded"

# A request shares a rectangle with longer ones if the longest is at most _STRETCH times as long as the request, plus _SLACK tokens.
# The rule applies to the number of keys and to the number of queries. Padding costs arithmetic; an additional rectangle costs a few
# kernel launches per layer.
_STRETCH = 1.5
_SLACK = 32


class Rectangle(NamedTuple):
    """Requests padded to one size."""

    num_requests: int  # B
    query_length: int  # Q
    key_length: int  # K
    first_key: int  # index in the plan's read_index at which this rectangle's B * K rows start
    query_index: Tensor  # [B * Q] position of each query in the packed batch; padding repeats the request's first query
    real: Tensor | None  # [tokens] indices of the real queries among the B * Q; None: all are real
    target: Tensor  # [tokens] positions of the real queries in the packed batch
    query_at: Tensor  # [B, Q] position of each query in its request
    masks: dict[tuple[Pattern, torch.dtype], Tensor]  # made so far

    def mask(self, pattern: Pattern, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, Q, K] additive. Made on the device, for the first layer with this pattern."""
        if not pattern.limits(self.key_length):
            pattern = CAUSAL
        if (pattern, dtype) not in self.masks:
            shown_BQK = pattern.shows(
                self.query_at[:, :, None], torch.arange(self.key_length, device=self.query_at.device)
            )
            mask = torch.zeros(shown_BQK.shape, dtype=dtype, device=shown_BQK.device)
            mask.masked_fill_(shown_BQK.logical_not_(), torch.finfo(dtype).min)
            self.masks[pattern, dtype] = mask[:, None, None]
        return self.masks[pattern, dtype]


class AttentionPlan(NamedTuple):
    """A tree of tensors for torch's pytree, which moves them to the device."""

    read_index: Tensor  # rows of the KV cache, in the order of the rectangles
    rectangles: list[Rectangle]
    places: dict[int, int]  # of the layers in the KV cache, by their numbers in the model


def group_lengths(query_lengths: np.ndarray, key_lengths: np.ndarray) -> list[np.ndarray]:
    """Group requests into rectangles. Returns an array of request indices for each rectangle, sorted by decreasing number of keys.

    Requests that decode (one query) and requests in prefill (several queries) never share a rectangle.
    """
    groups: list[np.ndarray] = []
    for members in (np.flatnonzero(query_lengths == 1), np.flatnonzero(query_lengths > 1)):
        members = members[np.lexsort((-query_lengths[members], -key_lengths[members]))]
        while members.size:
            longest_key, longest_query = key_lengths[members[0]], query_lengths[members].max()
            fits = (key_lengths[members] * _STRETCH + _SLACK >= longest_key) & (
                query_lengths[members] * _STRETCH + _SLACK >= longest_query
            )
            # No request fits both the most keys and the most queries: give the request with most keys its own rectangle
            if not fits.any():
                fits[0] = True
            groups.append(members[fits])
            members = members[~fits]
    return groups


def make_plan(
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    rows: np.ndarray,
    trash_row: int,
    places: Mapping[int, int],
) -> AttentionPlan:
    """Plan one forward pass, in tensors on the CPU. `rows`: the cache rows of all keys, in the order of the requests. places: as
    in AttentionPlan."""
    queries, keys = np.asarray(query_lengths, dtype=np.int64), np.asarray(key_lengths, dtype=np.int64)
    query_starts, key_starts = np.cumsum(queries) - queries, np.cumsum(keys) - keys
    read_index: list[np.ndarray] = []
    rectangles: list[Rectangle] = []
    first_key = 0
    for members in group_lengths(queries, keys):
        q_B, k_B = queries[members, None], keys[members, None]
        width_q, width_k = int(q_B.max()), int(k_B.max())
        at_Q, at_K = np.arange(width_q), np.arange(width_k)
        key_at_BK = np.minimum(key_starts[members, None] + at_K, len(rows) - 1)
        read_index.append(np.where(at_K < k_B, rows[key_at_BK], trash_row).reshape(-1))
        real_BQ = at_Q < q_B
        query_index = query_starts[members, None] + np.where(real_BQ, at_Q, 0)
        everything = bool(real_BQ.all())
        rectangles.append(
            Rectangle(
                num_requests=len(members),
                query_length=width_q,
                key_length=width_k,
                first_key=first_key,
                query_index=torch.from_numpy(query_index.reshape(-1)),
                real=None if everything else torch.from_numpy(np.flatnonzero(real_BQ)),
                target=torch.from_numpy(query_index[real_BQ]),
                query_at=torch.from_numpy(k_B - q_B + at_Q),
                masks={},
            )
        )
        first_key += len(members) * width_k
    return AttentionPlan(torch.from_numpy(np.concatenate(read_index)), rectangles, dict(places))


def padded_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, tokens, D]
    key: Tensor,  # [1, H / G, tokens, D]
    value: Tensor,  # [1, H / G, tokens, V]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any,
    attention_plan: AttentionPlan,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write new keys and values to the cache, read each request's keys and values, attend; returns [1, tokens, H, V]."""
    pattern = pattern_of(module, sliding_window)
    width, value_width = key.shape[3], value.shape[3]
    if width != value_width:  # the cache has one width for both
        key, value = pad(key, (0, max(0, value_width - width))), pad(value, (0, max(0, width - value_width)))
    place = attention_plan.places[module.layer_idx]  # type: ignore[index]
    key, value = cache.update(key_states=key, value_states=value, layer_idx=place, kwargs=kwargs)
    key, value = key[..., :width], value[..., :value_width]
    num_heads, num_tokens = query.shape[1:3]
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    query_THD = query[0].transpose(0, 1)
    output_THV = torch.empty((num_tokens, num_heads, value_width), dtype=query.dtype, device=query.device)
    for part in attention_plan.rectangles:
        B, Q, K = part.num_requests, part.query_length, part.key_length
        chosen = slice(part.first_key, part.first_key + B * K)
        k = key[0, :, chosen].view(num_kv_heads, B, K, width).transpose(0, 1)  # [B, H/G, K, D]
        v = value[0, :, chosen].view(num_kv_heads, B, K, value_width).transpose(0, 1)
        q = query_THD[part.query_index]
        mask = part.mask(pattern, query.dtype)
        if softcap is not None or s_aux is not None:
            q, shown = q.view(B, Q, num_heads, width).transpose(1, 2), mask[:, 0, 0] == 0
            out = attend(q, k, v, shown=shown, scaling=scaling, softcap=softcap, sinks=s_aux).transpose(1, 2)
            out = out.reshape(B * Q, num_heads, value_width)
        else:
            q = q.view(B, Q, num_kv_heads, group, width)
            # Queries of one key head are adjacent
            q = q.permute(0, 2, 3, 1, 4).reshape(B, num_kv_heads, group * Q, width)
            mask = mask.expand(B, 1, group, Q, K).reshape(B, 1, group * Q, K)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
            out = out.view(B, num_kv_heads, group, Q, value_width).permute(0, 3, 1, 2, 4)
            out = out.reshape(B * Q, num_heads, value_width)
        output_THV[part.target] = out if part.real is None else out[part.real]
    return output_THV.unsqueeze(0), None


def register() -> str:
    """Register the implementation with transformers; returns its name."""
    AttentionInterface.register(NAME, padded_attention)
    return NAME
