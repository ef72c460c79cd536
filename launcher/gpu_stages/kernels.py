"""Attention, the parts of a decoder layer, and the output layer: each kernel's time beside the least that the card needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
            gap = float((outputs["varlen"] - outputs["rectangles"]).detach().abs().max())
            note = "" if gap < _LARGEST_DIFFERENCE else "failed: the kernels differ by more than rounding"
            yield Row(f"attention {name}: largest difference", gap, note=note)


def _attend(views: list[Tensor], segments: Segments) -> Tensor:
    return packed_attention(nn.Module(), *views, None, segments=segments)[0]


@dataclass
class _Layer:
    """The decoder layer of Qwen3-8B, and a row of 16k tokens in sequences of 4k."""

    bench: Bench

    def __post_init__(self) -> None:
        bench, path = self.bench, self.bench.model_folder("8B", 1)
        model = random_weights(bench.device).load_whole(path, "lm", load_config(path, "lm"), torch.bfloat16)
        self.config, self.module = model.config, model.model.layers[0]
        lengths = [bench.size(4096, 16)] * 4
        self.tokens = sum(lengths)
        self.hidden = bench.randn(1, self.tokens, self.config.hidden_size, grad=True)
        positions = torch.cat([torch.arange(length, device=bench.device) for length in lengths])[None]
        self.position = model.model.rotary_emb(self.hidden, positions)
        segments = Segments.of(lengths, device=bench.device)
        self.arguments = {"attention_mask": None, "position_embeddings": self.position, "segments": segments}
        linear = sum(parameter.numel() for parameter in self.module.parameters() if parameter.ndim == 2)
        width = self.config.num_attention_heads * self.config.head_dim
        self.flops = 2 * linear * self.tokens + 2 * width * sum(length**2 for length in lengths)  # of forward

    def passes(self, name: str, function: Any) -> Iterator[Row]:
        """Forward keeps what backward needs, too."""
        yield self.bench.timed(f"{name}: forward", partial(function, self.hidden, **self.arguments), flops=self.flops)
        yield self.bench.timed(f"{name}: both passes", partial(self.both, function), flops=3 * self.flops)

    def both(self, function: Any) -> None:
        output = function(self.hidden, **self.arguments)
        (output[0] if isinstance(output, tuple) else output).sum().backward()


def eager_layer(bench: Bench) -> Iterator[Row]:
    """On one rank the engine has float32 weights under autocast, with FSDP bfloat16 ones."""
    layer = _Layer(bench)
    yield from layer.passes("layer, eager", layer.module)
    module = layer.module.float()

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(bench.device.type, torch.bfloat16):  # for each call: it keeps the weights that it has cast
            return module(*args, **kwargs)

    yield from layer.passes("layer, eager, float32 weights", under_autocast)


def compiled_layer(bench: Bench) -> Iterator[Row]:
    layer = _Layer(bench)
    compiled = _compiled(bench, layer.module)
    yield Row("layer, first compiled call", bench.clock(partial(layer.both, compiled)), "s", note="compiles")
    yield from layer.passes("layer, compiled", compiled)


def elementwise(bench: Bench) -> Iterator[Row]:
    """The parts of the layer that move bytes, forward, each eager and compiled."""
    layer = _Layer(bench)
    module, config, tokens = layer.module, layer.config, layer.tokens
    heads, kv_heads, width, mlp = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size
    )  # fmt: skip
    query, key = bench.randn(1, heads, tokens, width), bench.randn(1, kv_heads, tokens, width)
    gate, up = bench.randn(1, tokens, mlp), bench.randn(1, tokens, mlp)
    rope = sys.modules[type(module).__module__].apply_rotary_pos_emb
    parts: list[tuple[str, Callable[..., Any], tuple[Any, ...], int]] = [
        ("RMSNorm", module.input_layernorm, (layer.hidden.detach(),), 2 * config.hidden_size),
        ("q-norm", module.self_attn.q_norm, (query,), 2 * heads * width),
        ("RoPE", rope, (query, key, *layer.position), 2 * (heads + kv_heads) * width + 2 * width),
        ("SwiGLU", lambda a, b: module.mlp.act_fn(a) * b, (gate, up), 3 * mlp),
    ]
    with torch.no_grad():
        for name, part, args, per_token in parts:
            for kind, function in (("eager", part), ("compiled", _compiled(bench, part))):
                yield bench.timed(f"{name}, {kind}", partial(function, *args), num_bytes=2 * per_token * tokens)


def _compiled(bench: Bench, function: Any) -> Any:
    """On a CPU without Inductor, which would take most of the time of the test."""
    return torch.compile(function, dynamic=False, backend="inductor" if bench.on_gpu else "aot_eager")


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
    ("eager layer", eager_layer),
    ("compiled layer", compiled_layer),
    ("elementwise", elementwise),
)
