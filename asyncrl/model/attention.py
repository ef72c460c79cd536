"""Attention over a packed row: each token sees itself and the tokens before it in its own sequence.

A prefix that several sequences share is in the row once, as a segment of its own, and each of these sequences has a segment behind
it (Segments.of). Such a segment attends to copies of the keys of its prefix that it sees, and to its own.

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

from asyncrl.architectures.attention import LayerAttention, Pattern, attend, pattern_of
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


def _segments_of(
    lengths: Sequence[int], shared: Sequence[tuple[int, int]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut sequences behind their shared prefixes. Returns the tokens of each segment, and the segment that is its prefix or -1, [S]
    each."""
    prefix_of = {source: num for source, num in shared if num}
    own, parents = list[int](), list[int]()
    number_of = dict[int, int]()  # the segment of a sequence's prefix
    for i, length in enumerate(lengths):
        source, num = shared[i] if shared else (i, 0)
        if i in prefix_of:
            number_of[i], num = len(own), prefix_of[i]
            own.append(num)
            parents.append(-1)
        own.append(length - num)
        parents.append(number_of[source] if num else -1)
    return np.array(own, np.int64), np.array(parents, np.int64)


def _starts(lengths_S: npt.NDArray[np.int64], device: torch.device | str) -> Tensor:
    """The start of each segment, followed by the end of the last one, int32."""
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_S)]).astype(np.int32)).to(device)


@dataclass(frozen=True)
class Rectangle:
    """Segments as the rows of a batch, padded behind their ends."""

    rows: int  # B
    width: int  # W: tokens of the longest segment
    is_prefix: bool = False  # each row is a prefix of exactly `width` tokens
    prefix: int = 0  # tokens of the prefix that each row is behind; 0: the rows are begins of sequences
    parents: Tensor | None = None  # [B] int64: the row of each row's prefix in the rectangle of such prefixes


@dataclass(frozen=True)
class SharedKeys:
    """The keys of each segment for the varlen kernel: those of its prefix, and its own."""

    places: Tensor  # [N] int64: places in the row
    cu_seqlens: Tensor  # [S + 1] int32
    max_length: int

    @classmethod
    def of(
        cls, own_S: npt.NDArray[np.int64], parent_S: npt.NDArray[np.int64], device: torch.device | str
    ) -> SharedKeys:
        """own_S: tokens of each segment. parent_S: the segment that is its prefix; -1: none."""
        ends_S = np.cumsum(own_S)
        runs = [np.arange(end - own, end) for own, end in zip(own_S, ends_S, strict=True)]
        places = [
            np.concatenate([*([runs[parent]] if parent >= 0 else []), run])
            for parent, run in zip(parent_S, runs, strict=True)
        ]
        lengths_S = np.array([len(each) for each in places])
        return cls(
            torch.from_numpy(np.concatenate(places)).to(device), _starts(lengths_S, device), int(lengths_S.max())
        )


@dataclass(frozen=True)
class Segments:
    """Layout of the sequences in a packed row. Built once per micro-batch; every layer uses it, forward and backward.

    A sequence is a segment. If it shares a prefix, only its tokens behind the prefix are, and the prefix is a segment before those
    of the first such sequence."""

    num_tokens: int  # in all segments; the row may be longer, with padding that nothing reads
    max_length: int
    cu_seqlens: Tensor  # [S + 1] int32
    rectangles: tuple[Rectangle, ...]  # those of prefixes come before those behind them
    places: Tensor  # [T] int64: index of each token among the P places of the rectangles, which are stored one after another
    is_long: bool  # sdpa is faster than the varlen kernel. Compiled code depends on it, so it is not a length
    shared: SharedKeys | None = None  # None: no prefix is shared, so the keys of a segment are its own
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
        row_of. A row with a prefix is never long: what is behind one needs a mask in rectangles."""
        own_S, parent_S = _segments_of(lengths, shared)
        prefix_S = np.where(parent_S >= 0, own_S[parent_S], 0) if len(own_S) else own_S
        exact_S = np.where(np.isin(np.arange(len(own_S)), parent_S), own_S, 0)  # of a prefix, whose row has no padding
        rectangles = list[Rectangle]()
        start_S, row_S = np.zeros_like(own_S), np.zeros_like(own_S)  # place of a segment's first token; its row
        num_places = 0
        for prefix, exact in sorted({*zip(prefix_S.tolist(), exact_S.tolist(), strict=True)}):
            rest_S = np.flatnonzero((prefix_S == prefix) & (exact_S == exact))
            rest_S = rest_S[np.argsort(-own_S[rest_S], kind="stable")]
            while len(rest_S):
                width = int(own_S[rest_S[0]])
                rows = int(np.count_nonzero(own_S[rest_S] * _STRETCH + _SLACK >= width))
                chosen_S, rest_S = rest_S[:rows], rest_S[rows:]
                row_S[chosen_S] = np.arange(rows)
                start_S[chosen_S] = num_places + width * row_S[chosen_S]
                num_places += rows * width
                parents = torch.from_numpy(row_S[parent_S[chosen_S]]).to(device) if prefix else None
                rectangles.append(Rectangle(rows, width, exact > 0, prefix, parents))
        num_tokens, ends_S = int(own_S.sum()), np.cumsum(own_S)
        places_T = np.repeat(start_S - (ends_S - own_S), own_S) + np.arange(num_tokens)
        return cls(
            num_tokens,
            int(own_S.max(initial=0)),
            _starts(own_S, device),
            tuple(rectangles),
            torch.from_numpy(places_T).to(device),
            not prefix_S.any() and num_tokens > long_tokens * len(own_S),
            SharedKeys.of(own_S, parent_S, device) if prefix_S.any() else None,
        )

    @property
    def sizes(self) -> list[int]:
        """Places of each rectangle."""
        return [each.rows * each.width for each in self.rectangles]


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
    compute = _in_rectangles if why else _varlen
    output_THV = compute(query_THD, key_TKD, value_TKV, segments, terms)
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
    window, keys = terms.pattern.window, segments.shared or segments
    if segments.shared is not None:  # the kernel aligns queries with the last keys
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
    prefixes: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, by their tokens

    def compute(rectangle: Rectangle, query_BWHD: Tensor, key_BWKD: Tensor, value_BWKV: Tensor) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (query_BWHD, key_BWKD, value_BWKV))
        if rectangle.is_prefix:
            prefixes[rectangle.width] = key, value
        if rectangle.parents is not None:
            first = rectangle.prefix - terms.pattern.num_seen(rectangle.prefix)
            before = (t[:, :, first:].index_select(0, rectangle.parents) for t in prefixes[rectangle.prefix])
            key, value = (torch.cat([t, own], 2) for t, own in zip(before, (key, value), strict=True))
        return _causal(query, key, value, terms).transpose(1, 2)

    return in_rectangles(compute, [query_THD, key_TKD, value_TKV], segments)


def in_rectangles(compute: Callable[..., Tensor], packed: Sequence[Tensor], segments: Segments) -> Tensor:
    """Apply a causal computation to each rectangle. packed: [T, ...] each. compute: takes a Rectangle and then [B, W, ...] each;
    its result is [B, W, ...], too. Returns [T, ...]."""
    places, sizes = segments.places, segments.sizes
    split = [_Scatter.apply(t, places, sum(sizes)).split(sizes) for t in packed]  # type: ignore[no-untyped-call]
    outputs = []
    for rectangle, *parts in zip(segments.rectangles, *split, strict=True):
        shape = rectangle.rows, rectangle.width
        outputs.append(compute(rectangle, *(part.unflatten(0, shape) for part in parts)).flatten(0, 1))
    gathered: Tensor = _Gather.apply(torch.cat(outputs), places)  # type: ignore[no-untyped-call]
    return gathered


def _spread(values: Tensor, places: Tensor, num_places: int) -> Tensor:
    """[T, ...] -> [P, ...], with zeros in places without a token."""
    return values.new_zeros((num_places, *values.shape[1:])).index_copy_(0, places, values)


def _causal(query: Tensor, key: Tensor, value: Tensor, terms: _Terms) -> Tensor:
    """[B, H, W, V]; each row is a segment, with padding behind it. The last W of the keys and values are the segment's own."""
    shown, num_keys = None, key.shape[2]
    if num_keys > query.shape[2] or terms.pattern.limits(num_keys):
        at = torch.arange(num_keys, device=query.device)
        shown = terms.pattern.shows(at[-query.shape[2] :, None], at)[None]
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
