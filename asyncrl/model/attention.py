"""Attention over a packed row: each token sees itself and the tokens before it in its own sequence.

Registered with transformers as `asyncrl_packed`. Load a model with attn_implementation=NAME and pass `segments=` to the model's
forward pass; transformers passes the segments on to every layer. transformers builds no mask for an implementation it does not know
and would drop a given attention_mask, so pass none. Without segments every row of the batch is one sequence.

On a CUDA device with a 16-bit dtype, attention runs in torch's varlen kernel (FlashAttention-2) if it supports the device and the
layer, and if the sequences are not so long that sdpa is faster (why_rectangles). Otherwise, sequences of similar length become the
rows of a rectangle, padded to the rectangle's width, and run through sdpa's causal path. Padding comes after the real tokens, so no
real token attends to it.
architectures/attention.py finds the window or chunk of each layer, and computes the rectangles.

Shapes: T tokens, H query heads, K key heads, D width of a key, V of a value, S sequences, B rows of a rectangle, W its width, P
places in all rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface

from asyncrl.architectures.attention import LayerAttention, Pattern, attend, pattern_of
from asyncrl.config.schema import TrainConfig
from asyncrl.model.kernels import has_faster_sdpa, has_flash_attention

NAME = "asyncrl_packed"

# A rectangle accepts a sequence of length n if the rectangle's longest one has at most _STRETCH * n + _SLACK tokens. Padding costs
# arithmetic; each further rectangle costs a few kernel launches per layer. Measured on one CPU core, forward and backward of
# attention, 128 and 512 sequences of up to 107 tokens, 32 of up to 2000: (_STRETCH, _SLACK) from (1.05, 2) to (1.2, 4) are within
# 10 % of each other, (1.5, 8) takes 1.1 to 1.3 times as long, (2, 16) 1.4 to 1.5 times.
_STRETCH = 1.1
_SLACK = 4
# Mean length of a row's sequences above which sdpa is faster than the varlen kernel. Measured on an H200 with torch 2.11, forward
# and backward of 32 query and 8 key heads: rectangles take 0.6 of the time for one sequence of 16k tokens, 0.7 for four of 4k, and
# 1.25 for 64 of 256
_LONG_TOKENS = 2000


def _find_varlen() -> Any:
    """Return torch's kernel for sequences of varying length; None before torch 2.11, whose kernel is the first with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in signature(varlen_attn).parameters else None


_varlen_attn = _find_varlen()
# torch 2.11 gives grouped heads to FlashAttention without asking; later versions want to be told
_asks_for_gqa = _varlen_attn is not None and "enable_gqa" in signature(_varlen_attn).parameters


# For torch.utils.checkpoint: backward recomputes all but the outputs of attention. Layers with sinks or a soft cap recompute them,
# too, because theirs come from ordinary matrix products
keep_outputs = partial(
    create_selective_checkpoint_contexts,
    [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        *([] if _varlen_attn is None else [torch.ops.torch_attn._varlen_attn.default]),
    ],
)


@dataclass(frozen=True)
class Segments:
    """Layout of the sequences in a packed row. Built once per micro-batch; every layer uses it, forward and backward."""

    num_tokens: int  # in all sequences; the row may be longer, with padding that nothing reads
    max_length: int
    cu_seqlens: Tensor  # [S + 1] int32
    rectangles: tuple[tuple[int, int], ...]  # (B, W), longest first
    places: Tensor  # [T] int64: index of each token among the P places of the rectangles, which are stored one after another
    is_long: bool  # sdpa is faster than the varlen kernel. Compiled code depends on it, so it is not a length

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, device: torch.device | str = "cpu", long_tokens: float = math.inf
    ) -> Segments:
        """long_tokens: is_long if the sequences have more tokens than that on average."""
        lengths_S = np.asarray(lengths, np.int64)
        longest_first = np.argsort(-lengths_S, kind="stable")
        rectangles: list[tuple[int, int]] = []
        start_S = np.zeros_like(lengths_S)  # place of each sequence's first token
        at = num_places = 0
        while at < len(longest_first):
            rest = lengths_S[longest_first[at:]]
            width = int(rest[0])
            rows = int(np.count_nonzero(rest * _STRETCH + _SLACK >= width))
            start_S[longest_first[at : at + rows]] = num_places + width * np.arange(rows)
            rectangles.append((rows, width))
            num_places += rows * width
            at += rows
        ends_S = np.cumsum(lengths_S)
        num_tokens = int(lengths_S.sum())
        places_T = np.repeat(start_S - (ends_S - lengths_S), lengths_S) + np.arange(num_tokens)
        cu_seqlens = np.concatenate([np.zeros(1, np.int64), ends_S]).astype(np.int32)
        return cls(
            num_tokens,
            max(lengths, default=0),
            torch.from_numpy(cu_seqlens).to(device),
            tuple(rectangles),
            torch.from_numpy(places_T).to(device),
            num_tokens > long_tokens * len(lengths_S),
        )

    @property
    def num_places(self) -> int:
        return sum(rows * width for rows, width in self.rectangles)


@dataclass(frozen=True)
class _Terms:
    """What a layer computes besides the product of queries, keys and values."""

    pattern: Pattern
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None  # [H]


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,  # [1, K, T, V]
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output. With segments: [1, T, H, V], with zeros in the padding after the sequences. Without segments:
    [batch, length, H, V], one sequence per row."""
    if position_bias is not None:
        raise ValueError(f"{NAME} attention does not support position_bias, which {type(module).__name__} requires")
    if dropout:
        raise ValueError(
            f"{NAME} attention does not support dropout ({dropout}): set attention_dropout to 0 in the config"
        )
    if attention_mask is not None:
        raise ValueError(f"{NAME} attention takes segments, not an attention_mask")
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    terms = _Terms(pattern_of(module, sliding_window), scaling, softcap, s_aux)
    if segments is None:
        return _causal(query, key, value, terms).transpose(1, 2).contiguous(), None
    if query.shape[0] != 1:
        raise ValueError(f"{NAME} attention with segments takes one packed row, not {query.shape[0]} rows")
    num_tokens, num_all = segments.num_tokens, query.shape[2]
    query_THD, key_TKD, value_TKV = (t[0].transpose(0, 1)[:num_tokens] for t in (query, key, value))
    why = why_rectangles(
        query.device,
        query.dtype,
        (query.shape[-1], value.shape[-1]),
        terms.pattern,
        softcap=softcap is not None,
        sinks=s_aux is not None,
        is_long=segments.is_long,
    )
    compute = _in_rectangles if why else _varlen
    output_THV = compute(query_THD, key_TKD, value_TKV, segments, terms)
    return pad(output_THV, (0, 0, 0, 0, 0, num_all - num_tokens))[None], None


def why_rectangles(
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int],
    pattern: Pattern,
    *,
    softcap: bool,
    sinks: bool,
    is_long: bool = False,
) -> str:
    """Why attention of this kind runs in rectangles; "" if it runs in the varlen kernel. widths: of a key and of a value.

    is_long: as in Segments. Windows stay in the varlen kernel: sdpa has no fast kernel for the mask of a rectangle.
    """
    width, value_width = widths
    reasons = {
        f"the device is {device.type}, not a GPU with FlashAttention": not has_flash_attention(device),
        f"torch {torch.__version__} has no varlen kernel with windows": _varlen_attn is None,
        f"the dtype is {str(dtype).removeprefix('torch.')}": dtype not in (torch.float16, torch.bfloat16),
        f"keys have {width} numbers and values {value_width}": width > 256 or width % 8 != 0 or value_width != width,
        "attention is limited to chunks": bool(pattern.chunk),
        "scores have a soft cap": softcap,
        "heads have sinks": sinks,
        "sequences are long": is_long and not pattern.window,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def long_tokens_of(device: torch.device, train: TrainConfig) -> float:
    """Mean length of a row's sequences above which sdpa is faster than the varlen kernel; inf: never. With checkpointing the whole
    code of a layer is compiled at once, which rectangles cannot be."""
    is_one_graph = train.compile == "on" and bool(train.gradient_checkpointing)
    return _LONG_TOKENS if has_faster_sdpa(device) and not is_one_graph else math.inf


def reasons_of(
    layers: Sequence[LayerAttention], device: torch.device, dtype: torch.dtype, *, long_tokens: float
) -> dict[bool, list[str]]:
    """why_rectangles of each layer. Key: whether the sequences of a row are long."""
    return {
        is_long: [
            why_rectangles(
                device,
                dtype,
                (layer.key_width, layer.value_width),
                layer.pattern,
                softcap=layer.has_softcap,
                sinks=layer.has_sinks,
                is_long=is_long and long_tokens < math.inf,
            )
            for layer in layers
        ]
        for is_long in (False, True)
    }


def kernels_text(reasons: Mapping[bool, Sequence[str]]) -> str:
    """The kernels of each layer, for people. reasons: of reasons_of."""
    found = sorted(_kernels(*both) for both in zip(reasons[False], reasons[True], strict=True))
    return ", ".join(f"{text} in {len(list(same))} of {len(found)} layers" for text, same in groupby(found))


def _kernels(why: str, why_long: str) -> str:
    if why:
        return f"rectangles ({why})"
    long = f", or rectangles (more than {_LONG_TOKENS} tokens per sequence of a micro-batch)," if why_long else ""
    return f"torch {torch.__version__}'s varlen kernel{long}"


def _varlen(query_THD: Tensor, key_TKD: Tensor, value_TKV: Tensor, segments: Segments, terms: _Terms) -> Tensor:
    if not segments.num_tokens:
        return query_THD
    window = terms.pattern.window
    gqa = {"enable_gqa": query_THD.shape[1] != key_TKD.shape[1]} if _asks_for_gqa else {}
    output_THV: Tensor = _varlen_attn(
        query_THD,
        key_TKD,
        value_TKV,
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.max_length,
        segments.max_length,
        scale=terms.scaling,
        window_size=(window - 1, 0) if window else (-1, 0),  # (left, right); the left count excludes the token itself
        **gqa,
    )
    return output_THV


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the rectangles differ from pass to pass, and so would the code
def _in_rectangles(query_THD: Tensor, key_TKD: Tensor, value_TKV: Tensor, segments: Segments, terms: _Terms) -> Tensor:
    if not segments.rectangles:
        return value_TKV.repeat_interleave(query_THD.shape[1] // value_TKV.shape[1], 1)

    def compute(query_BWHD: Tensor, key_BWKD: Tensor, value_BWKV: Tensor) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (query_BWHD, key_BWKD, value_BWKV))
        return _causal(query, key, value, terms).transpose(1, 2)

    return in_rectangles(compute, [query_THD, key_TKD, value_TKV], segments)


def in_rectangles(compute: Callable[..., Tensor], packed: Sequence[Tensor], segments: Segments) -> Tensor:
    """Apply a causal computation to each rectangle. packed: [T, ...] each. compute: its arguments and its result are [B, W, ...].
    Returns [T, ...]."""
    sizes = [rows * width for rows, width in segments.rectangles]
    split = [
        _Scatter.apply(t, segments.places, sum(sizes)).split(sizes)  # type: ignore[no-untyped-call]
        for t in packed
    ]
    outputs = []
    for shape, *parts in zip(segments.rectangles, *split, strict=True):
        outputs.append(compute(*(part.unflatten(0, shape) for part in parts)).flatten(0, 1))
    gathered: Tensor = _Gather.apply(torch.cat(outputs), segments.places)  # type: ignore[no-untyped-call]
    return gathered


def _causal(query: Tensor, key: Tensor, value: Tensor, terms: _Terms) -> Tensor:
    """[B, H, W, V]; each row is a sequence, with padding behind it."""
    shown = None
    if terms.pattern.limits(query.shape[2]):
        at = torch.arange(query.shape[2], device=query.device)
        shown = terms.pattern.shows(at[:, None], at)[None]
    return attend(query, key, value, shown=shown, scaling=terms.scaling, softcap=terms.softcap, sinks=terms.sinks)


class _Scatter(torch.autograd.Function):
    """[T, ...] -> [P, ...], with zeros in places without a token."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, num_places: int) -> Tensor:
        ctx.save_for_backward(places)
        return values.new_zeros((num_places, *values.shape[1:])).index_copy_(0, places, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class _Gather(torch.autograd.Function):
    """[P, ...] -> [T, ...]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_places = len(values)
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros((ctx.num_places, *grad.shape[1:])).index_copy_(0, places, grad), None


def register() -> str:
    """Register the implementation with transformers and return its name."""
    AttentionInterface.register(NAME, packed_attention)
    return NAME


register()
