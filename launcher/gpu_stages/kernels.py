"""Attention, the parts of a decoder layer, and the output layer: each kernel's time beside the least that the card needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from asyncrl.architectures.attention import CAUSAL
from asyncrl.model import attention
from asyncrl.model.attention import Segments, packed_attention
from asyncrl.model.logprobs import token_logprobs
from asyncrl.model.sharding import load_config

from .bench import Bench, random_weights
from .sheet import NEEDS_GPU, Row

_LENGTHS = {"1 x 16k": [16384], "4 x 4k": [4096] * 4, "64 x 256": [256] * 64}
_TINY_LENGTHS = {"1 x 256": [256], "4 x 64": [64] * 4, "64 x 4": [4] * 64}
_LARGEST_DIFFERENCE = 0.05  # of two attention kernels in bfloat16, for values near 1


def attention_kernels(bench: Bench) -> Iterator[Row]:
    """32 query heads, 8 key heads, 128 numbers a head."""
    heads, kv_heads, width = (4, 2, 16) if bench.tiny else (32, 8, 128)
    why = attention.why_rectangles(bench.device, torch.bfloat16, (width, width), CAUSAL, softcap=False, sinks=False)
    for name, lengths in (_TINY_LENGTHS if bench.tiny else _LENGTHS).items():
        tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        segments = Segments.of(lengths, device=bench.device)
        inputs = [bench.randn(1, tokens, count, width, grad=True) for count in (heads, kv_heads, kv_heads)]
        views = [tensor.transpose(1, 2) for tensor in inputs]  # as the projections of a layer give them
        flops, outputs = 2 * heads * width * squares, {}
        for kernel, reason in (("varlen", why), ("rectangles", "asked for")):
            if kernel == "varlen" and why and bench.on_gpu:
                yield Row(f"attention {name} varlen", note=f"failed: runs in rectangles: {why}")
                continue
            with mock.patch.object(attention, "why_rectangles", lambda *_, reason=reason, **__: reason):
                forward = partial(_attend, views, segments)
                outputs[kernel] = output = forward()
                grad = torch.randn_like(output)
                backward = partial(torch.autograd.grad, output, inputs, grad, retain_graph=True)
                yield bench.timed(f"attention {name} {kernel} forward", forward, flops=flops)
                yield bench.timed(f"attention {name} {kernel} backward", backward, flops=2.5 * flops)
        if len(outputs) == 2:
            gap = float((outputs["varlen"] - outputs["rectangles"]).abs().max())
            note = "" if gap < _LARGEST_DIFFERENCE else "failed: the kernels differ by more than rounding"
            yield Row(f"attention {name}: largest difference", gap, note=note)


def _attend(views: list[Tensor], segments: Segments) -> Tensor:
    return packed_attention(nn.Module(), *views, None, segments=segments)[0]


def decoder_layer(bench: Bench) -> Iterator[Row]:
    """One layer of Qwen3-8B on a row of 16k tokens in sequences of 4k: its elementwise parts, and the whole layer, each eager and
    compiled. On one rank the engine has float32 weights under autocast, with FSDP bfloat16 ones."""
    layer, hidden, position, segments = _layer(bench)
    tokens, size = hidden.shape[1], hidden.shape[2]
    module, config = sys.modules[type(layer).__module__], layer.self_attn.config
    heads, kv_heads, width, mlp = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
    )  # fmt: skip
    linear = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    squares = int((segments.cu_seqlens.diff().double() ** 2).sum())
    flops = 2 * linear * tokens + 2 * heads * width * squares
    arguments = {"attention_mask": None, "position_embeddings": position, "segments": segments}
    yield from _whole_layer(bench, "layer, eager", layer, hidden, arguments, flops)
    compiled = _compiled(bench, layer)
    seconds = bench.clock(partial(_both, compiled, hidden, arguments))
    yield Row("layer, first compiled call", seconds, "s", note="compiles")
    yield from _whole_layer(bench, "layer, compiled", compiled, hidden, arguments, flops)

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(bench.device.type, torch.bfloat16):  # for each call: it keeps the weights that it has cast
            return layer(*args, **kwargs)

    layer.float()
    yield from _whole_layer(bench, "layer, eager, float32 weights", under_autocast, hidden, arguments, flops)
    query, key = bench.randn(1, heads, tokens, width), bench.randn(1, kv_heads, tokens, width)
    gate, up = bench.randn(1, tokens, mlp), bench.randn(1, tokens, mlp)
    parts: list[tuple[str, Callable[..., Any], tuple[Any, ...], int]] = [
        ("RMSNorm", layer.input_layernorm, (hidden.detach(),), 2 * size),
        ("q-norm", layer.self_attn.q_norm, (query,), 2 * heads * width),
        ("RoPE", module.apply_rotary_pos_emb, (query, key, *position), 2 * (heads + kv_heads) * width + 2 * width),
        ("SwiGLU", lambda a, b: layer.mlp.act_fn(a) * b, (gate, up), 3 * mlp),
    ]
    layer.bfloat16()
    with torch.no_grad():
        for name, part, args, per_token in parts:
            for kind, function in (("eager", part), ("compiled", _compiled(bench, part))):
                yield bench.timed(f"{name}, {kind}", partial(function, *args), num_bytes=2 * per_token * tokens)


def _layer(bench: Bench) -> tuple[Any, Tensor, Any, Segments]:
    path = bench.model_folder("8B", 1)
    model = random_weights(bench.device).load_whole(path, "lm", load_config(path, "lm"), torch.bfloat16)
    lengths = [bench.size(4096, 16)] * 4
    positions = torch.cat([torch.arange(length, device=bench.device) for length in lengths])[None]
    hidden = bench.randn(1, sum(lengths), model.config.hidden_size, grad=True)
    position = model.model.rotary_emb(hidden, positions)
    return model.model.layers[0], hidden, position, Segments.of(lengths, device=bench.device)


def _compiled(bench: Bench, function: Any) -> Any:
    """On a CPU without Inductor, which would take most of the time of the test."""
    return torch.compile(function, dynamic=False, backend="inductor" if bench.on_gpu else "aot_eager")


def _whole_layer(
    bench: Bench, name: str, layer: Any, hidden: Tensor, arguments: dict[str, Any], flops: float
) -> Iterator[Row]:
    """Forward keeps what backward needs, too."""
    yield bench.timed(f"{name}: forward", partial(layer, hidden, **arguments), flops=flops)
    yield bench.timed(f"{name}: both passes", partial(_both, layer, hidden, arguments), flops=3 * flops)


def _both(layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> None:
    output = layer(hidden, **arguments)
    (output[0] if isinstance(output, tuple) else output).sum().backward()


def output_layer(bench: Bench) -> Iterator[Row]:
    """Qwen3-8B's, for 8k tokens, with weights in bfloat16 as under FSDP."""
    tokens, size, words = bench.size(8192, 64), bench.size(4096, 32), bench.size(151936, 512)
    hidden, weight = bench.randn(tokens, size, grad=True), (bench.randn(words, size) * 0.02).requires_grad_()
    targets = torch.randint(words, (tokens,), device=bench.device)
    for block in (1024, 4096, 8192):
        forward = partial(token_logprobs, hidden, weight, targets, temperature=1.0, chunk_tokens=block)
        logprobs, _ = forward()
        backward = partial(torch.autograd.grad, logprobs.sum(), [hidden, weight], retain_graph=True)
        flops = 2 * tokens * size * words
        yield bench.timed(f"token_logprobs, blocks of {block}, forward", forward, flops=flops)
        yield bench.timed(f"token_logprobs, blocks of {block}, backward", backward, flops=3 * flops)


def products(bench: Bench) -> Iterator[Row]:
    """The parts of one block of the output layer."""
    tokens, size, words = bench.size(1024, 16), bench.size(4096, 32), bench.size(65536, 512)
    hidden, weight = bench.randn(tokens, size), bench.randn(words, size)
    probs = torch.rand(tokens, words, device=bench.device)
    logits = torch.rand_like(probs)
    read = 8 * tokens * words
    yield bench.timed("entropy by bmm", lambda: torch.bmm(probs[:, None], logits[:, :, None])[:, 0, 0], num_bytes=read)
    yield bench.timed("entropy by (p * logits).sum", lambda: (probs * logits).sum(1), num_bytes=read)
    flops, delta, total = 2 * tokens * size * words, bench.randn(words, tokens), torch.zeros_like(weight).float()
    yield bench.timed("logits: mm, then float()", lambda: (hidden @ weight.T).float(), flops=flops)
    yield bench.timed("weight's gradient: total += mm", lambda: total.add_(delta @ hidden), flops=flops)
    if not bench.on_gpu:
        yield Row("mm with a float32 output", note=NEEDS_GPU)
        return
    yield bench.timed(
        "logits: mm with a float32 output", lambda: torch.mm(hidden, weight.T, out_dtype=torch.float32), flops=flops
    )
    yield bench.timed(
        "weight's gradient: addmm with a float32 output",
        lambda: torch.addmm(total, delta, hidden, out_dtype=torch.float32),
        flops=flops,
    )


MEASUREMENTS = (
    ("attention", attention_kernels),
    ("output layer", output_layer),
    ("products", products),
    ("decoder layer", decoder_layer),
)
