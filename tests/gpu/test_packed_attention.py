"""Packed attention on a GPU: the varlen kernel and rectangles in bfloat16, and rectangles in float32, give the CPU's results."""

import copy
import math

import numpy as np
import pytest
import torch

from asyncrl.architectures.attention import CAUSAL
from asyncrl.model import attention
from asyncrl.model.logprobs import token_logprobs
from asyncrl.model.packing import Packed
from asyncrl.testing.tiny import make_tiny_model

pytestmark = pytest.mark.gpu

LENGTHS = (7, 1, 300, 12, 13, 1, 64, 9, 30)


def outputs(model, device, dtype, window, long_tokens=math.inf):
    """(logprobs, gradient of every parameter) of a packed row with padding, under autocast to dtype."""
    ids = np.random.default_rng(0).integers(0, 64, sum(LENGTHS))
    packed = Packed.of(ids, LENGTHS, pad_to=len(ids) + 5, device=device, long_tokens=long_tokens)
    model = copy.deepcopy(model).to(device)
    for layer in model.base_model.layers:
        layer.self_attn.sliding_window = window
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        hidden = model.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, segments=packed.segments, use_cache=False
        ).last_hidden_state[0]
        logprobs, _ = token_logprobs(
            hidden[packed.predictors],
            model.get_output_embeddings(),
            packed.input_ids[0, packed.predicted],
            temperature=0.7,
            chunk_tokens=64,
        )
    (logprobs.sum() / len(ids)).backward()
    return logprobs.detach().cpu(), [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("dtype", "long_tokens", "tolerance"),
    [(torch.float32, math.inf, 1e-4), (torch.bfloat16, math.inf, 0.03), (torch.bfloat16, 0, 0.03)],
)
def test_values_and_gradients_are_those_of_the_cpu(dtype, long_tokens, tolerance, window):
    """long_tokens 0: the kernel of long sequences."""
    model = make_tiny_model(None)
    model.set_attn_implementation(attention.NAME)
    (expected, expected_grads), (found, grads) = (
        outputs(model, "cpu", torch.float32, window),
        outputs(model, "cuda", dtype, window, long_tokens),
    )
    assert (found - expected).norm() < tolerance * expected.norm()
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert (ours - theirs).norm() < tolerance * theirs.norm() + 1e-6


def test_16_bits_take_the_varlen_kernel():
    """This torch has the kernel. A torch whose kernel went unnoticed would train in rectangles, several times slower."""

    def why(dtype: torch.dtype) -> str:
        device = torch.device("cuda", 0)
        return attention.why_rectangles(device, dtype, (128, 128), CAUSAL, softcap=False, sinks=False)

    assert why(torch.bfloat16) == why(torch.float16) == ""
    assert "float32" in why(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_heads_have_the_values_that_they_have_among_all(dtype):
    """Each context rank computes some of the heads of a row."""
    segments = attention.Segments.of(LENGTHS, device="cuda")
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 64, device="cuda", dtype=dtype) for heads in (8, 4, 4))

    def attend(part: slice, keys: slice) -> torch.Tensor:
        layer = torch.nn.Module()
        return attention.packed_attention(layer, query[:, part], key[:, keys], value[:, keys], None, segments=segments)[
            0
        ]

    whole = attend(slice(8), slice(4))
    for ranks in (2, 4, 8):  # of 8, two have the same head of keys and values
        for rank in range(ranks):
            part = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            keys = slice(rank * 4 // ranks, max((rank + 1) * 4 // ranks, rank * 4 // ranks + 1))
            torch.testing.assert_close(attend(part, keys), whole[:, :, part])
