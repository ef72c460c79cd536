"""Attention over a packed row: each token sees itself and the tokens before it in its own sequence.

A prefix that several sequences share is in the row once (Segments.shared). On a CPU, `_TwoParts` attends to it. The varlen kernel
gets the keys of each sequence, prefix included, as copies. In other rectangles (windows, chunks, soft caps, sinks, GPUs without the
varlen kernel) attention is computed on the sequences in full (SharedPrefixes.written_out).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AttentionInterface

from asyncrl.architectures.attention import CAUSAL, LayerAttention, Pattern, attend, pattern_of
from asyncrl.config.schema import TrainConfig
from asyncrl.model.kernels import has_faster_sdpa, has_flash_attention
from asyncrl.model.row_ranks import ContextRanks

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


def row_of(
    lengths: Sequence[int], shared: Sequence[tuple[int, int]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (place in the row of each token of the sequences [L], the token at each place of the row [T]).

    shared: of each sequence, (the sequence that has its first tokens in the row, how many tokens these are); (): none are shared.
    """
    ends = np.cumsum(np.asarray(lengths, np.int64))
    is_own = np.ones(int(sum(lengths)), bool)
    copies = [(ends[i] - lengths[i], ends[j] - lengths[j], n) for i, (j, n) in enumerate(shared) if n]
    for start, _, num in copies:
        is_own[start : start + num] = False
    places_L = np.cumsum(is_own) - 1
    for start, source, num in copies:
        places_L[start : start + num] = places_L[source : source + num]
    return places_L, np.flatnonzero(is_own)


@dataclass(frozen=True)
class SharedPrefixes:
    """What several sequences of a row share. L: tokens of all sequences, those of a shared prefix once for each of them.

    A prefix is in the row as the begin of one of its sequences. Of each other one the row has the tokens behind the prefix: a
    suffix. Z: tokens of all suffixes.
    """

    whole: Segments  # the layout of the sequences, each in full
    places: Tensor  # [L] int64: the place in the row of each token of the sequences
    tokens: Tensor  # [T] int64: the token of the sequences at each place of the row
    # (B, Q, P): B prefixes of exactly P tokens; the suffixes of each have at most Q tokens together
    blocks: tuple[tuple[int, int, int], ...]
    prefixes: Tensor  # [sum of B * P] int64: the places in the row of the prefixes of all blocks
    suffixes: Tensor  # [Z] int64: the places in the row of all suffixes
    queries: Tensor  # [Z] int64: the places of the same tokens in the blocks, of Q each

    @classmethod
    def of(
        cls, lengths: Sequence[int], shared: Sequence[tuple[int, int]], device: torch.device | str
    ) -> SharedPrefixes:
        places_L, tokens_T = row_of(lengths, shared)
        starts = np.cumsum(np.asarray(lengths, np.int64)) - lengths
        suffixes_of: dict[tuple[int, int], list[npt.NDArray[np.int64]]] = {}  # key: (prefix, its sequence)
        for i, (source, num) in enumerate(shared):
            if num:
                own = places_L[starts[i] + num : starts[i] + lengths[i]]
                suffixes_of.setdefault((num, source), []).append(own)
        blocks = list[tuple[int, int, int]]()
        prefixes, suffixes, queries = ([np.zeros(0, np.int64)] for _ in range(3))
        at = 0
        for num, same in groupby(sorted(suffixes_of), key=lambda key: key[0]):
            rows = [(source, np.concatenate(suffixes_of[num, source])) for _, source in same]
            most = max(len(row) for _, row in rows)
            for source, row in rows:
                prefixes.append(places_L[starts[source] : starts[source] + num])
                suffixes.append(row)
                queries.append(at + np.arange(len(row)))
                at += most
            blocks.append((len(rows), most, num))
        arrays = (places_L, tokens_T, *(np.concatenate(parts) for parts in (prefixes, suffixes, queries)))
        places, tokens, *others = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(Segments.of(lengths, device=device), places, tokens, tuple(blocks), *others)

    def written_out(self, compute: Callable[..., Tensor], row: Sequence[Tensor]) -> Tensor:
        """Apply a computation to the sequences in full, and return its results at the row's tokens. row: [T, ...] each. compute:
        [L, ...] and the layout of the sequences -> [L, ...]."""
        return compute(*(t.index_select(0, self.places) for t in row), self.whole).index_select(0, self.tokens)


@dataclass(frozen=True)
class Segments:
    """Layout of the sequences in a packed row. Built once per micro-batch; every layer uses it, forward and backward.

    With shared prefixes, the tokens that a sequence has in the row are a segment."""

    num_tokens: int  # in all segments; the row may be longer, with padding that nothing reads
    max_length: int
    cu_seqlens: Tensor  # [S + 1] int32
    rectangles: tuple[tuple[int, int], ...]  # (B, W), longest first
    places: Tensor  # [T] int64: index of each token among the P places of the rectangles, which are stored one after another
    is_long: bool  # sdpa is faster than the varlen kernel. Compiled code depends on it, so it is not a length
    shared: SharedPrefixes | None = None
    context: ContextRanks | None = None  # the ranks that share the row; None: this rank has all of it

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        long_tokens: float = math.inf,
        shared: Sequence[tuple[int, int]] = (),
    ) -> Segments:
        """lengths: of the sequences. long_tokens: is_long if the sequences have more tokens than that on average. shared: as in
        row_of. Only the varlen kernel computes a prefix on a GPU once, so a row with one is never long."""
        if any(num for _, num in shared):
            own = [length - num for length, (_, num) in zip(lengths, shared, strict=True)]
            return replace(cls.of(own, device=device), shared=SharedPrefixes.of(lengths, shared, device))
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
        return _num_places(self.rectangles)


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
    [batch, length, H, V], one sequence per row. With context ranks, T is the number of this rank's tokens."""
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
    context = segments.context
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
        terms = terms if s_aux is None else replace(terms, sinks=context.own_heads(s_aux))
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
    row, shared = (query_THD, key_TKD, value_TKV), segments.shared
    if not why:
        output_THV = _varlen(*row, segments, terms)
    elif shared is None:
        output_THV = _in_rectangles(*row, segments, terms)
    elif not why_written_out(
        query.device,
        (query.shape[-1], value.shape[-1]),
        is_limited=terms.pattern.limits(shared.whole.max_length),
        softcap=softcap is not None,
        sinks=s_aux is not None,
    ):
        output_THV = _in_two_parts(*row, segments, scaling)
    else:
        output_THV = shared.written_out(lambda *whole: _in_rectangles(*whole, terms), row)
    output = pad(output_THV, (0, 0, 0, 0, 0, num_all - num_tokens))[None]
    return output if context is None else context.to_tokens(output), None


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


def why_written_out(
    device: torch.device, widths: tuple[int, int], *, is_limited: bool, softcap: bool, sinks: bool
) -> str:
    """Why attention in rectangles computes a shared prefix again for each of its sequences; "": it computes the prefix once.

    widths: of a key and of a value. is_limited: some token does not attend to all tokens before it."""
    reasons = {
        f"the device is {device.type}, not a CPU": device.type != "cpu",
        f"keys have {widths[0]} numbers and values {widths[1]}": widths[0] != widths[1],
        "attention is limited to windows or chunks": is_limited,
        "scores have a soft cap": softcap,
        "heads have sinks": sinks,
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


def reasons_to_write_out(layers: Sequence[LayerAttention], device: torch.device, dtype: torch.dtype) -> list[str]:
    """Of each layer: why it computes a shared prefix again for each sequence; "": it computes the prefix once. Windows and chunks
    count, although a row of short sequences does not reach their ends."""
    in_rectangles = reasons_of(layers, device, dtype, long_tokens=math.inf)[False]
    return [
        why
        and why_written_out(
            device,
            (layer.key_width, layer.value_width),
            is_limited=layer.pattern != CAUSAL,
            softcap=layer.has_softcap,
            sinks=layer.has_sinks,
        )
        for layer, why in zip(layers, in_rectangles, strict=True)
    ]


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
    window, keys = terms.pattern.window, segments
    if segments.shared is not None:  # the kernel aligns queries with the last keys
        keys = segments.shared.whole
        key_TKD, value_TKV = (t.index_select(0, segments.shared.places) for t in (key_TKD, value_TKV))
    gqa = {"enable_gqa": query_THD.shape[1] != key_TKD.shape[1]} if _asks_for_gqa else {}
    output_THV: Tensor = _varlen_attn(
        query_THD,
        key_TKD,
        value_TKV,
        segments.cu_seqlens,
        keys.cu_seqlens,
        segments.max_length,
        keys.max_length,
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the rectangles differ from pass to pass, and so would the code
def _in_two_parts(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    """Attention of a row with shared prefixes, without repeated keys and without masks."""
    output_THD: Tensor = _TwoParts.apply(query_THD, key_TKD, value_TKD, segments, scaling)  # type: ignore[no-untyped-call]
    return output_THD


class _TwoParts(torch.autograd.Function):
    """The tokens of a segment attend to their own segment in one call, and those of suffixes to their prefix in another.

    Each call gives outputs and the logarithm of the sum of exp of the logits (L). Softmax over all keys is the mean of both
    outputs, weighted by exp(L). The kernel's backward pass needs the outputs and L of the whole softmax, and then gives the
    gradients of its own keys: the identity that ring attention uses (arXiv:2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
    ) -> Tensor:
        shared = segments.shared
        assert shared is not None
        own = [_flash(*block, 0.0, True, scale=scaling) for block in _rectangles_of(segments, query, key, value)]
        blocks = zip(_suffixes_of(shared, query), _prefixes_of(shared, key, value), strict=True)
        others = [_flash(*of_query, *of_keys, 0.0, False, scale=scaling) for of_query, of_keys in blocks]
        output_THD, sums_TH = (_rows(parts, segments.places) for parts in zip(*own, strict=True))
        other_ZHD, other_ZH = (_rows(parts, shared.queries) for parts in zip(*others, strict=True))
        own_ZHD, own_ZH = output_THD[shared.suffixes], sums_TH[shared.suffixes]
        both_ZH = torch.logaddexp(own_ZH, other_ZH)
        weights = ((each - both_ZH).exp()[..., None] for each in (own_ZH, other_ZH))
        both_ZHD = own_ZHD * next(weights) + other_ZHD * next(weights)
        output_THD.index_copy_(0, shared.suffixes, both_ZHD.to(output_THD.dtype))
        sums_TH.index_copy_(0, shared.suffixes, both_ZH)
        ctx.save_for_backward(query, key, value, output_THD, sums_TH)
        ctx.segments, ctx.scaling = segments, scaling
        return output_THD

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *result = ctx.saved_tensors
        segments: Segments = ctx.segments
        shared = segments.shared
        assert shared is not None
        own = [
            _flash_backward(*block, 0.0, True, scale=ctx.scaling)
            for block in _rectangles_of(segments, grad, query, key, value, *result)
        ]
        others = [
            _flash_backward(of_output, of_query, *of_keys, *of_result, 0.0, False, scale=ctx.scaling)
            for (of_output, of_query, *of_result), of_keys in zip(
                _suffixes_of(shared, grad, query, *result), _prefixes_of(shared, key, value), strict=True
            )
        ]
        grads = [_rows(parts, segments.places) for parts in zip(*own, strict=True)]
        of_query, *of_keys = zip(*others, strict=True)
        grads[0].index_add_(0, shared.suffixes, _rows(of_query, shared.queries))
        for total, parts in zip(grads[1:], of_keys, strict=True):
            total.index_add_(0, shared.prefixes, _rows(parts))
        return *grads, None, None


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _rectangles_of(segments: Segments, *packed: Tensor) -> Iterator[list[Tensor]]:
    """Yield the tokens of each rectangle. packed: [T, H, ...] each; yielded as [B, H, W, ...]."""
    shapes = segments.rectangles
    return _cut([_spread(values, segments.places, _num_places(shapes)) for values in packed], shapes)


def _suffixes_of(shared: SharedPrefixes, *packed: Tensor) -> Iterator[list[Tensor]]:
    """Yield the tokens of the suffixes of each block, [B, H, Q, ...]."""
    shapes = [(rows, most) for rows, most, _ in shared.blocks]
    return _cut([_spread(values[shared.suffixes], shared.queries, _num_places(shapes)) for values in packed], shapes)


def _prefixes_of(shared: SharedPrefixes, *packed: Tensor) -> Iterator[list[Tensor]]:
    """Yield the tokens of the prefixes of each block, [B, H, P, ...]."""
    return _cut([values[shared.prefixes] for values in packed], [(rows, tokens) for rows, _, tokens in shared.blocks])


def _cut(values: Sequence[Tensor], shapes: Sequence[tuple[int, int]]) -> Iterator[list[Tensor]]:
    split = [torch.split(each, [rows * width for rows, width in shapes]) for each in values]
    for shape, *parts in zip(shapes, *split, strict=True):
        yield [part.unflatten(0, shape).transpose(1, 2) for part in parts]


def _rows(parts: Sequence[Tensor], places: Tensor | None = None) -> Tensor:
    """[B, H, W, ...] of each rectangle -> [T, H, ...]; the tokens at these places, or all."""
    values = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    return values if places is None else values.index_select(0, places)


def _spread(values: Tensor, places: Tensor, num_places: int) -> Tensor:
    """[T, ...] -> [P, ...], with zeros in places without a token."""
    return values.new_zeros((num_places, *values.shape[1:])).index_copy_(0, places, values)


def _num_places(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in shapes)


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
        return _spread(values, places, num_places)

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
        return _spread(grad, places, ctx.num_places), None


def register() -> str:
    """Register the implementation with transformers and return its name."""
    AttentionInterface.register(NAME, packed_attention)
    return NAME


register()
