"""Packed attention: a packed row gives the values and gradients that the plain model gives for each sequence alone."""

from __future__ import annotations

import copy
import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from asyncrl.architectures.attention import CAUSAL, LayerAttention, Pattern
from asyncrl.config.schema import TrainConfig
from asyncrl.model import attention
from asyncrl.model.attention import Segments
from asyncrl.model.packing import Packed
from asyncrl.model.states import keep_apart
from asyncrl.testing.tiny import ARCHITECTURES, make_tiny_model
from tests.support.varlen_on_cpu import kernels_of_a_gpu

LENGTHS = (7, 1, 30, 12, 13, 1, 64, 9, 30)


@pytest.fixture(autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


def models(architecture: str = "qwen2", plain: str = "eager", window: int | None = None, **shape):
    """Return (the Hugging Face model, the same model with packed attention)."""
    whole = make_tiny_model(None, architecture, **({"hidden_size": 32, "intermediate_size": 64} | shape))
    model = whole.base_model
    model.config.sliding_window = window
    if hasattr(model, "has_sliding_layers"):
        model.config.layer_types = ["sliding_attention" if window else "full_attention"] * len(model.layers)
        model.has_sliding_layers = window is not None
        for layer in model.layers:
            layer.self_attn.sliding_window = window
    packed = copy.deepcopy(whole)
    keep_apart(packed)
    packed = packed.base_model
    model.set_attn_implementation(plain)
    packed.set_attn_implementation(attention.NAME)
    return model, packed


def tokens_of(lengths, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, n) for n in lengths]


def one_at_a_time(model, sequences) -> torch.Tensor:
    """[T, hidden size]"""
    return torch.cat(
        [model(input_ids=torch.tensor(ids)[None], use_cache=False).last_hidden_state[0] for ids in sequences]
    )


def in_one_row(model, sequences, padding: int = 0) -> torch.Tensor:
    """[T, hidden size]"""
    ids = np.concatenate(sequences)
    packed = Packed.of(ids, [len(s) for s in sequences], pad_to=len(ids) + padding)
    hidden = model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, segments=packed.segments, use_cache=False
    ).last_hidden_state
    assert hidden.isfinite().all()
    return hidden[0, : packed.num_tokens]


def assert_same(model, packed_model, sequences, *, padding: int = 0, atol: float = 1e-5) -> None:
    expected, found = one_at_a_time(model, sequences), in_one_row(packed_model, sequences, padding)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for (name, ours), theirs in zip(packed_model.named_parameters(), model.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * max(1.0, scale), msg=name)


@pytest.mark.parametrize("plain", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_row_is_its_sequences_one_at_a_time(architecture, plain):
    assert_same(*models(architecture, plain), tokens_of(LENGTHS))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2)])
def test_heads_that_share_keys(heads, kv_heads):
    assert_same(*models(num_heads=heads, num_kv_heads=kv_heads), tokens_of(LENGTHS))


@pytest.mark.parametrize("window", [1, 8, 30, 1000])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2"])
def test_sliding_windows(architecture, window):
    model, packed = models(architecture, window=window)
    assert_same(model, packed, tokens_of(LENGTHS))
    unlimited, _ = models(architecture)
    differs = (one_at_a_time(unlimited, tokens_of(LENGTHS)) - in_one_row(packed, tokens_of(LENGTHS))).abs().max()
    assert (differs > 1e-3) == (window < max(LENGTHS))  # the comparison covers the window


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (40,), (5, 5, 5), (60, 3), (3, 60)], ids=str)
def test_edges(lengths):
    assert_same(*models(), tokens_of(lengths))


def test_padding_behind_the_sequences_changes_nothing():
    model, packed = models()
    assert_same(model, packed, tokens_of(LENGTHS), padding=11)
    without, padded = (in_one_row(packed, tokens_of(LENGTHS), padding) for padding in (0, 100))
    torch.testing.assert_close(padded, without, rtol=0, atol=1e-6)


def test_an_empty_micro_batch_runs_and_has_no_gradient():
    _, packed_model = models()
    packed = Packed.of(np.array([], np.int64), [], pad_to=4)
    hidden = packed_model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, segments=packed.segments, use_cache=False
    ).last_hidden_state
    assert hidden.isfinite().all()
    hidden[0, : packed.num_tokens].sum().backward()
    assert all(p.grad is None or not p.grad.count_nonzero() for p in packed_model.parameters())


def test_with_gradient_checkpointing():
    model, packed = models()
    enable = getattr(packed, "activation_checkpointing_enable", None)  # not in transformers 5.17
    (enable or packed.gradient_checkpointing_enable)({"use_reentrant": False})
    packed.train()
    assert_same(model, packed, tokens_of(LENGTHS))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"softcap": 0.5},
        {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.1])},
        {"sliding_window": 2, "softcap": 0.5, "s_aux": torch.tensor([0.3, -1.0, 2.0, 0.1])},
    ],
    ids=["plain", "softcap", "sinks", "all"],
)
def test_the_values_and_the_gradient_of_attention_itself(extra):
    """Values by the formula for each token, and gradients with torch's gradcheck, in float64. Values are wider than keys."""
    segments = attention.Segments.of([3, 1, 5])
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, 11, width, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, width in ((4, 4), (2, 4), (2, 6))
    ]

    def attend(*qkv):
        return attention.packed_attention(torch.nn.Module(), *qkv, None, segments=segments, scaling=0.7, **extra)[0]

    found = attend(*inputs)
    query, key, value = (tensor[0] for tensor in inputs)
    for start, end in ((0, 3), (3, 4), (4, 9)):
        for at in range(start, end):
            first = max(start, at + 1 - extra.get("sliding_window", 99))
            for head in range(4):
                logits = key[head // 2, first : at + 1] @ query[head, at] * 0.7
                logits = 0.5 * torch.tanh(logits / 0.5) if "softcap" in extra else logits
                sinks = extra["s_aux"][head : head + 1].double() if "s_aux" in extra else logits[:0]
                shares = torch.cat([logits, sinks]).softmax(0)[: len(logits)]
                expected = shares @ value[head // 2, first : at + 1]
                torch.testing.assert_close(found[0, at, head], expected, rtol=0, atol=1e-6)
    assert found[0, 9:].count_nonzero() == 0
    assert torch.autograd.gradcheck(attend, inputs)


def test_bfloat16_autocast_computes_attention_in_bfloat16():
    """Under autocast, rotary embeddings turn queries and keys into float32, but not values."""
    model, packed = models(plain="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = one_at_a_time(model, tokens_of(LENGTHS)), in_one_row(packed, tokens_of(LENGTHS))
    assert found.dtype == expected.dtype
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_without_segments_each_row_of_a_batch_is_a_sequence():
    model, packed = models()
    input_ids = torch.tensor(np.stack(tokens_of((9, 9, 9))))
    expected, found = (m(input_ids=input_ids, use_cache=False).last_hidden_state for m in (model, packed))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_sequences_do_not_see_each_other():
    _, packed = models()
    sequences = tokens_of(LENGTHS)
    before = in_one_row(packed, sequences)
    sequences[2] = (sequences[2] + 1) % 64
    changed = (in_one_row(packed, sequences) - before).abs().amax(-1) > 0
    start = sum(LENGTHS[:2])
    assert changed.nonzero().flatten().tolist() == list(range(start, start + LENGTHS[2]))


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"position_bias": torch.zeros(1, 2, 4, 4)}, "position_bias"),
        ({"dropout": 0.1}, "attention_dropout"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "not an attention_mask"),
    ],
)
def test_what_is_not_supported_is_refused(extra, says):
    query = torch.zeros(1, 2, 4, 8)
    arguments = {"attention_mask": None, "segments": attention.Segments.of([4])} | extra
    with pytest.raises(ValueError, match=says):
        attention.packed_attention(torch.nn.Module(), query, query, query, **arguments)


def test_two_packed_rows_are_refused():
    query = torch.zeros(2, 2, 4, 8)
    with pytest.raises(ValueError, match="one packed row, not 2"):
        attention.packed_attention(torch.nn.Module(), query, query, query, None, segments=attention.Segments.of([4]))


GPU = torch.device("cuda")
WIDTHS = (128, 128)


@pytest.fixture
def on_gpu(monkeypatch):
    """The choice of kernels is that of a GPU with FlashAttention; nothing is computed."""
    monkeypatch.setattr(attention, "has_flash_attention", lambda device: device.type == "cuda")


def kernel(dtype=torch.bfloat16, widths=WIDTHS, pattern=CAUSAL, softcap=False, sinks=False, device=GPU, **more) -> str:
    return attention.why_rectangles(device, dtype, widths, pattern, softcap=softcap, sinks=sinks, **more)


def test_the_reason_for_rectangles_is_named(on_gpu):
    assert kernel() == kernel(pattern=Pattern(window=16)) == ""
    assert "float32" in kernel(torch.float32)
    assert "keys have 192 numbers and values 128" in kernel(widths=(192, 128))
    assert "keys have 12 numbers" in kernel(widths=(12, 12))
    assert "chunks" in kernel(pattern=Pattern(chunk=8))
    assert "soft cap" in kernel(softcap=True)
    assert "sinks" in kernel(sinks=True)
    assert "cpu" in kernel(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("lengths", "is_long"),
    [
        ((16384,), True),
        ((4096,) * 4, True),
        ((256,) * 64, False),
        ((2001,), True),
        ((2000,), False),
        ((3000, 1000), False),
        ((3000, 1002), True),
        ((), False),
    ],
    ids=str,
)
def test_long_sequences_take_rectangles(on_gpu, monkeypatch, lengths, is_long):
    """By their mean length, where sdpa is faster than the varlen kernel: not with windows, and not within compiled code as a
    whole."""
    monkeypatch.setattr(attention, "has_faster_sdpa", lambda device: device.type == "cuda")
    long_tokens = attention.long_tokens_of(GPU, TrainConfig())
    segments = Segments.of(lengths, long_tokens=long_tokens)
    assert segments.is_long == is_long
    assert kernel(is_long=segments.is_long) == ("sequences are long" if is_long else "")
    assert kernel(pattern=Pattern(window=16), is_long=True) == ""
    assert "float32" in kernel(torch.float32, is_long=True)
    in_one_graph = TrainConfig(compile="on", gradient_checkpointing=True)
    for device, train in ((GPU, in_one_graph), (torch.device("cpu"), TrainConfig())):
        never = attention.long_tokens_of(device, train)
        assert not Segments.of(lengths, long_tokens=never).is_long


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_long", [False, True])
def test_each_kernel_of_a_gpu_gives_the_same_update(monkeypatch, is_long, window):
    """Values and gradients in bfloat16, with checkpointing that keeps the outputs of attention. The varlen kernel is a stand-in."""
    kernels_of_a_gpu(monkeypatch)
    model, packed = models("qwen2", num_heads=4, num_kv_heads=2, window=window)
    enable = getattr(packed, "activation_checkpointing_enable", None)  # not in transformers 5.17
    (enable or packed.gradient_checkpointing_enable)({"use_reentrant": False, "context_fn": attention.keep_outputs})
    packed.train()
    calls = Counter()
    for name in ("_varlen", "_in_rectangles"):
        compute = getattr(attention, name)

        def counted(*arguments, compute=compute, name=name):
            calls[name] += 1
            return compute(*arguments)

        monkeypatch.setattr(attention, name, counted)
    monkeypatch.setattr(attention, "_LONG_TOKENS", 0 if is_long else 2000)
    long_tokens = attention.long_tokens_of(torch.device("cpu"), TrainConfig())
    monkeypatch.setattr(Packed, "of", partial(Packed.of, long_tokens=long_tokens))
    sequences = tokens_of(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = one_at_a_time(model, sequences), in_one_row(packed, sequences)
    assert calls.keys() == {"_in_rectangles" if is_long and window is None else "_varlen"}
    assert (found - expected).norm() < 0.03 * expected.norm()
    for output in (expected, found):
        output.float().square().sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm() + 1e-3, name


def test_the_log_names_the_kernel_of_each_layer(on_gpu):
    def layer(number: int, sinks: bool) -> LayerAttention:
        return LayerAttention(
            number,
            CAUSAL,
            num_heads=2,
            num_key_heads=2,
            key_width=64,
            value_width=64,
            has_softcap=False,
            has_sinks=sinks,
        )

    layers = [layer(number, sinks=number == 1) for number in range(3)]

    def text_of(long_tokens: float) -> str:
        reasons = attention.reasons_of(layers, GPU, torch.bfloat16, long_tokens=long_tokens)
        return attention.kernels_text(reasons)

    kernel_name = f"torch {torch.__version__}'s varlen kernel"
    text = text_of(math.inf)
    assert text == f"rectangles (heads have sinks) in 1 of 3 layers, {kernel_name} in 2 of 3 layers"
    both = f"{kernel_name}, or rectangles (more than 2000 tokens per sequence of a micro-batch),"
    assert text_of(2000) == text.replace(kernel_name, both)


@pytest.mark.parametrize("asks_for_gqa", [True, False])
def test_grouped_heads_reach_kernels_with_and_without_that_argument(on_gpu, monkeypatch, asks_for_gqa):
    """torch 2.11's kernel has no such argument, and takes grouped heads without it."""
    given = {}

    def varlen(query, key, value, *_, **named):
        given.update(named)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    monkeypatch.setattr(attention, "_varlen_attn", varlen)
    monkeypatch.setattr(attention, "_asks_for_gqa", asks_for_gqa)
    monkeypatch.setattr(attention, "has_flash_attention", lambda device: True)
    query, key = torch.zeros(1, 4, 5, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16)
    output, _ = attention.packed_attention(torch.nn.Module(), query, key, key, None, segments=Segments.of([2, 3]))
    assert output.shape == (1, 5, 4, 16)
    assert given.get("enable_gqa") is (True if asks_for_gqa else None)
