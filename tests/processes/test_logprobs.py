"""Logprobs without logits equal the plain formula in values and gradients: at once, in blocks, with a sharded vocabulary."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.model import logprobs as module
from asyncrl.model.logprobs import token_logprobs

NUM_TOKENS, VOCAB = 37, 50


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "_BLOCK_LOGITS", {False: 128, True: 128})
    monkeypatch.setattr(module, "_LEAST_WORDS", 16)


def problem(bias: bool = False, num_tokens: int = NUM_TOKENS, vocab: int = VOCAB):
    """Return (hidden, layer, targets, weights of the tokens' logprobs in the loss)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 8, generator=generator, requires_grad=True)
    layer = torch.nn.Linear(8, vocab, bias=bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    return hidden, layer, targets, torch.randn(num_tokens, generator=generator)


def plain(hidden, layer, targets, temperature, cap=0.0):
    """Return (logprobs, entropy), computed from all logits."""
    logits = layer(hidden).float()
    all_logprobs = ((cap * (logits / cap).tanh() if cap else logits) / temperature).log_softmax(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, targets[:, None])[:, 0], entropy


def assert_close(found, expected, rtol=1e-5, atol=5e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("bias", "cap"), [(False, 0.0), (True, 0.0), (True, 3.0)])
def test_values_and_gradients_are_those_of_the_plain_formula(chunk_tokens, temperature, bias, cap):
    hidden, layer, targets, weights = problem(bias)
    inputs = [hidden, *layer.parameters()]
    found = token_logprobs(hidden, layer, targets, temperature=temperature, chunk_tokens=chunk_tokens, cap=cap)
    expected = plain(hidden, layer, targets, temperature, cap)
    assert_close(found, expected)
    for loss in (lambda out: out[0] @ weights, lambda out: out[1] @ weights.flip(0), both(weights)):
        grads = [torch.autograd.grad(loss(out), inputs, retain_graph=True) for out in (found, expected)]
        assert_close(*grads, atol=1e-5)


def both(weights):
    """Return a loss of logprobs and entropies. Some tokens count in only one of them, some in neither."""
    of_entropy = weights.flip(0).clone()
    of_entropy[:20] = 0
    return lambda out: out[0] @ weights + out[1] @ of_entropy


def test_entropy_by_hand():
    """Two words with the probabilities 3/4 and 1/4: H = 0.5623 nats, and dH / d logit = -p (log p + H), times 1 / temperature."""
    hidden = torch.tensor([[2 * math.log(3.0)]], requires_grad=True)  # the logits are (hidden, 0)
    weight = torch.tensor([[1.0], [0.0]])
    _, entropy = token_logprobs(hidden, weight, torch.tensor([0]), temperature=2.0, chunk_tokens=1)
    assert entropy.tolist() == pytest.approx([0.562335], abs=1e-6)
    entropy.sum().backward()
    assert hidden.grad.tolist() == [[pytest.approx(-0.75 * (math.log(0.75) + 0.562335) / 2, abs=1e-6)]]


def test_the_gradient_of_the_entropy_against_finite_differences():
    hidden, layer, targets, weights = problem(num_tokens=5)
    double = hidden.detach().double()

    def entropies(hidden):
        logits = hidden @ layer.weight.detach().double().T
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    _, entropy = token_logprobs(hidden, layer, targets, temperature=1.0, chunk_tokens=2)
    (grad,) = torch.autograd.grad(entropy @ weights, hidden)
    for row, column in ((0, 0), (3, 5), (4, 7)):
        step = torch.zeros_like(double)
        step[row, column] = 1e-5
        slope = ((entropies(double + step) - entropies(double - step)) @ weights.double()) / 2e-5
        assert float(grad[row, column]) == pytest.approx(float(slope), abs=1e-4)


def test_an_entropy_that_no_loss_uses_adds_nothing_to_backward():
    """Both losses have the same gradients. Only the one with the entropy computes with it."""
    hidden, layer, targets, weights = problem()
    counts = []
    for loss in (lambda out: out[0] @ weights, lambda out: out[0] @ weights + out[1] @ torch.zeros(NUM_TOKENS)):
        out = token_logprobs(hidden, layer, targets, temperature=1.0, chunk_tokens=37)
        with LargestTensor(only=torch.ops.aten.exp.default) as copies:
            grads = torch.autograd.grad(loss(out), [hidden, layer.weight])
        counts.append((copies.numel, grads))
    assert counts[0][0] == 0 < counts[1][0]
    assert_close(counts[0][1], counts[1][1], atol=1e-5)


def test_a_weight_may_be_given_that_something_else_uses_too():
    """With tied weights, the gradient of the embedding is added to that of the output layer."""
    hidden, layer, targets, weights = problem()
    embedded = (torch.nn.functional.embedding(targets, layer.weight) + hidden).detach()
    ids = targets.flip(0)
    grads = []
    for output in (lambda h: token_logprobs(h, layer.weight, targets, temperature=1.0, chunk_tokens=9)[0],
                   lambda h: plain(h, layer, targets, 1.0)[0]):  # fmt: skip
        logprobs = output(torch.nn.functional.embedding(ids, layer.weight) + embedded)
        grads.append(torch.autograd.grad(logprobs @ weights, layer.weight)[0])
    assert_close(*grads, atol=2e-5)


def test_tokens_outside_the_loss_get_no_gradient_and_cost_nothing_in_backward():
    hidden, layer, targets, weights = problem()
    weights[5:] = 0
    logprobs, _ = token_logprobs(hidden, layer, targets, temperature=1.0, chunk_tokens=37)
    with LargestTensor(only=torch.ops.aten.mm.default) as largest:
        found = torch.autograd.grad(logprobs @ weights, [hidden, layer.weight], retain_graph=True)
    assert 0 < largest.numel <= 5 * VOCAB
    expected = torch.autograd.grad(plain(hidden, layer, targets, 1.0)[0] @ weights, [hidden, layer.weight])
    assert_close(found, expected, atol=1e-5)
    assert found[0][5:].count_nonzero() == 0
    for grad in torch.autograd.grad(logprobs @ torch.zeros(NUM_TOKENS), [hidden, layer.weight]):
        assert grad.count_nonzero() == 0


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen):
    hidden, layer, targets, weights = problem()
    (hidden if frozen == "hidden" else layer.weight).requires_grad_(False)
    needs = layer.weight if frozen == "hidden" else hidden
    logprobs, _ = token_logprobs(hidden, layer, targets, temperature=1.0, chunk_tokens=9)
    expected = torch.autograd.grad(plain(hidden, layer, targets, 1.0)[0] @ weights, needs)
    assert_close(torch.autograd.grad(logprobs @ weights, needs), expected, atol=1e-5)
    with torch.no_grad():
        assert not token_logprobs(hidden, layer, targets, temperature=1.0, chunk_tokens=9)[0].requires_grad


def test_no_tokens_are_allowed():
    hidden, layer, targets, _ = problem()
    logprobs, entropy = token_logprobs(hidden[:0], layer, targets[:0], temperature=1.0, chunk_tokens=9)
    assert logprobs.shape == entropy.shape == (0,)
    (grad,) = torch.autograd.grad(logprobs.sum(), layer.weight)
    assert grad.count_nonzero() == 0


def test_logits_far_apart_neither_overflow_nor_vanish():
    """Logits from -500 to 500, in ascending and in descending order, compared with the plain formula in float64."""
    hidden = torch.tensor([[500.0], [-500.0], [90.0]], requires_grad=True)
    layer = torch.nn.Linear(1, VOCAB, bias=False)
    layer.weight.data = torch.linspace(-1, 1, VOCAB)[:, None]
    targets = torch.tensor([VOCAB - 2, 3, 0])
    found = token_logprobs(hidden, layer, targets, temperature=1.0, chunk_tokens=1)
    exact = torch.nn.Linear(1, VOCAB, bias=False, dtype=torch.float64)
    exact.weight.data = layer.weight.data.double()
    wide = hidden.detach().double().requires_grad_()
    all_logprobs = exact(wide).log_softmax(-1)
    expected = all_logprobs.gather(-1, targets[:, None])[:, 0]
    assert_close(found[0], expected.float())
    assert_close(found[1], -(all_logprobs.exp() * all_logprobs).sum(-1).detach().float(), atol=5e-5)
    (grad,) = torch.autograd.grad(found[0].sum(), hidden)
    assert_close(grad, torch.autograd.grad(expected.sum(), wide)[0].float(), atol=1e-5)


def test_bfloat16_computes_the_softmax_in_float32_and_keeps_float32_gradients():
    hidden, layer, targets, weights = problem()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = token_logprobs(hidden, layer, targets, temperature=0.7, chunk_tokens=9)
        expected, expected_entropy = plain(hidden, layer, targets, 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_close((logprobs, entropy), (expected, expected_entropy))  # of the same rounded logits
    found = torch.autograd.grad(logprobs @ weights, [hidden, layer.weight])
    assert {grad.dtype for grad in found} == {torch.float32}
    exact = torch.autograd.grad(plain(hidden, layer, targets, 0.7)[0] @ weights, [hidden, layer.weight])
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_weights_in_bfloat16_get_the_gradient_that_is_summed_in_float32():
    """FSDP computes with copies in bfloat16, autocast with the float32 weights: the gradients differ by one rounding, in any number
    of blocks."""
    hidden, layer, targets, weights = problem(bias=True)
    hidden16, weight16, bias16 = (
        tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, layer.weight, layer.bias)
    )
    wide = [weight16.detach().float().requires_grad_(), bias16.detach().float().requires_grad_()]
    found, _ = token_logprobs(hidden16, weight16, targets, temperature=1.0, chunk_tokens=3, bias=bias16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = token_logprobs(hidden16, wide[0], targets, temperature=1.0, chunk_tokens=3, bias=wide[1])
    assert torch.equal(found, expected)
    narrow = torch.autograd.grad(found @ weights, [weight16, bias16])
    for ours, theirs in zip(narrow, torch.autograd.grad(expected @ weights, wide), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, or only the operation `only`."""

    def __init__(self, only=None) -> None:
        super().__init__()
        self.only, self.numel = only, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.only in (None, func):
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("chunk_tokens", [1, 16, 256])
def test_no_tensor_of_all_tokens_and_the_whole_vocabulary_ever_exists(monkeypatch, chunk_tokens):
    monkeypatch.setattr(module, "_BLOCK_LOGITS", {False: 16 * 999, True: 0})
    hidden, layer, targets, weights = problem(num_tokens=256, vocab=999)
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(hidden, layer, targets, temperature=0.7, chunk_tokens=chunk_tokens)
        (logprobs @ weights).backward()
    assert largest.numel <= 16 * 999


def in_ranks(count, function):
    """Run function(rank, process group) on threads, each a separate gloo rank. Return the results in rank order."""
    store = dist.HashStore()
    results: list = [None] * count

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = function(rank, dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=30)))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("sizes", [(25, 25), (17, 33), (1, 49), (20, 13, 17)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_vocabulary_over_ranks_gives_what_one_rank_gives(sizes, bias):
    hidden, layer, targets, weights = problem(bias)
    targets[:2] = torch.tensor([0, VOCAB - 1])
    weights[3:9] = 0
    inputs = [hidden, *layer.parameters()]
    expected = token_logprobs(hidden, layer, targets, temperature=0.7, chunk_tokens=9)
    expected_grads = torch.autograd.grad(expected[0] @ weights, inputs, retain_graph=True)
    expected_grads += torch.autograd.grad(both(weights)(expected), inputs)
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def one_rank(rank, group):
        mine = slice(starts[rank], starts[rank] + sizes[rank])
        own_hidden = hidden.detach().clone().requires_grad_()
        own = [parameter.detach()[mine].clone().requires_grad_() for parameter in layer.parameters()]
        logprobs, entropy = token_logprobs(
            own_hidden, own[0], targets, bias=own[1] if bias else None, temperature=0.7, chunk_tokens=9,
            tensor_group=group, vocab_start=mine.start,
        )  # fmt: skip
        grads = torch.autograd.grad(logprobs @ weights, [own_hidden, *own], retain_graph=True)
        grads += torch.autograd.grad(both(weights)((logprobs, entropy)), [own_hidden, *own])
        return logprobs.detach(), entropy.detach(), grads

    results = in_ranks(len(sizes), one_rank)
    for logprobs, entropy, _ in results:
        assert_close((logprobs, entropy), (expected[0].detach(), expected[1].detach()))
        assert torch.equal(logprobs, results[0][0])  # equal on every rank, so that all ranks decide alike
    for at, grad in enumerate(expected_grads):
        if at % len(inputs) == 0:
            assert_close(sum(grads[at] for _, _, grads in results), grad, atol=1e-5)
        else:
            assert_close(torch.cat([grads[at] for _, _, grads in results]), grad, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"temperature": 0.0}, ValueError, "temperature is 0.0"),
        ({"chunk_tokens": 0}, ValueError, "logprob_chunk_tokens"),
        ({"output_layer": torch.nn.ReLU()}, TypeError, "need an nn.Linear"),
    ],
)
def test_what_cannot_be_computed_is_refused(settings, error, says):
    hidden, layer, targets, _ = problem()
    with pytest.raises(error, match=says):
        token_logprobs(
            hidden, targets_N=targets, **{"output_layer": layer, "temperature": 1.0, "chunk_tokens": 9} | settings
        )
