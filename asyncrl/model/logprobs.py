"""Logprobs of given tokens from hidden states, in blocks: the [tokens, vocabulary] matrix never exists as a whole.

With a vocabulary of 150k, logits are by far the largest tensor of training: 16k tokens in float32 are 10 GB, and several times
that with gradients. Here logits exist for one block of tokens and vocabulary at a time. Besides its inputs, forward keeps two
numbers per token for backward (normaliser and entropy); backward recomputes each block's logits. A token without gradient costs
nothing in backward. Nor does the entropy, if no loss uses it.

Vocabulary-parallel: with a tensor_group each rank has some rows of the output layer. Forward reduces three sums and a maximum per
token over the ranks. Backward leaves it to the caller to sum the gradient of the hidden states.

Shapes: N tokens, H hidden size, V vocabulary (of this rank), C tokens and U words of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from asyncrl.model.kernels import uses_gpu_kernels

# Logits of a block: few enough for the caches of a CPU, enough to keep a GPU busy.
_BLOCK_LOGITS = {False: 1 << 21, True: 1 << 26}  # key: whether the device is a GPU
SPAN = "asyncrl::logprobs"  # name in profiles and plans
_LEAST_WORDS = 256  # per block: smaller matrix products are slow


def token_logprobs(
    hidden_NH: Tensor,
    output_layer: nn.Module | Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    bias: Tensor | None = None,
    cap: float = 0.0,
    tensor_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (log p(target), entropy) of softmax(logits / temperature), float32, for each token. Entropy is in nats. Both carry a
    gradient.

    output_layer: an nn.Linear, or its weight [V, H] (pass its bias, if any, as `bias`). cap: logits are cap * tanh(outputs / cap);
    0: the outputs of the layer are the logits.
    tensor_group: all its ranks have the same hidden_NH, targets_N and gradients of the results. Each rank passes its own rows of
    the weight, which begin at word vocab_start. The gradient of hidden_NH is the sum of those of the ranks. Forward is collective.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1 (train.logprob_chunk_tokens)")
    if isinstance(output_layer, nn.Linear):
        weight, bias = output_layer.weight, output_layer.bias
    elif isinstance(output_layer, Tensor):
        weight = output_layer
    else:
        raise TypeError(f"the output layer is a {type(output_layer).__name__}; logprobs in blocks need an nn.Linear")
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight, bias, targets_N, 1.0 / temperature, cap, chunk_tokens, tensor_group, vocab_start
    )
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    @record_function(SPAN)
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        scale: float,
        cap: float,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        vocab_start: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = hidden_NH.dtype
        if torch.is_autocast_enabled(hidden_NH.device.type):
            dtype = torch.get_autocast_dtype(hidden_NH.device.type)
        targets_N = targets_N - vocab_start
        hidden = hidden_NH.to(dtype)
        # Per token: the highest logit so far, and relative to it the sum of exp and the sum of exp * logit; the target's logit.
        high_N = hidden.new_full(targets_N.shape, -torch.inf, dtype=torch.float32)
        sum_N, weighted_N, target_N = hidden.new_zeros((3, len(targets_N)), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for words, weight_UH, bias_U in _words(weight_VH, bias_V, dtype, min(chunk_tokens, len(hidden))):
                for tokens in _chunks(len(hidden), chunk_tokens):
                    logits_CU = _logits(hidden[tokens], weight_UH, bias_U, scale, cap)
                    inside_C, column_C = _inside(targets_N[tokens], words)
                    target_N[tokens] += logits_CU.gather(1, column_C).squeeze(1).where(inside_C, 0.0)
                    before_C = high_N[tokens]
                    high_C = torch.maximum(before_C, logits_CU.amax(1))
                    shrink_C = (before_C - high_C).exp_()
                    exp_CU = (logits_CU - high_C[:, None]).exp_()
                    sum_N[tokens] = sum_N[tokens] * shrink_C + exp_CU.sum(1)
                    dot_C = torch.bmm(exp_CU[:, None], logits_CU[:, :, None])[:, 0, 0]
                    weighted_N[tokens] = weighted_N[tokens] * shrink_C + dot_C
                    high_N[tokens] = high_C
        if group is not None:
            highest_N = high_N.clone()
            dist.all_reduce(highest_N, dist.ReduceOp.MAX, group)
            shrink_N = (high_N - highest_N).exp_()
            sums = torch.stack([sum_N * shrink_N, weighted_N * shrink_N, target_N])
            dist.all_reduce(sums, group=group)
            high_N, (sum_N, weighted_N, target_N) = highest_N, sums.unbind()
        normaliser_N = high_N + sum_N.log()
        entropy_N = normaliser_N - weighted_N / sum_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, normaliser_N, entropy_N)
        ctx.settings = (dtype, scale, cap, chunk_tokens)
        ctx.set_materialize_grads(False)  # the gradient of an output that no loss uses is None
        return target_N - normaliser_N, entropy_N

    @staticmethod
    @record_function(SPAN)
    def backward(ctx: Any, grad_N: Tensor | None, entropy_grad_N: Tensor | None) -> tuple[Tensor | None, ...]:
        """With p = softmax of the logits (after the temperature) and H = its entropy:

        d logprob / d logits = scale * (one at the target - p)
        d entropy / d logits = -scale * p * (log p + H)
        d logits / d outputs = 1 - (logits / cap)^2 with a cap, else 1
        """
        hidden_NH, weight_VH, bias_V, targets_N, normaliser_N, entropy_N = ctx.saved_tensors
        dtype, scale, cap, chunk_tokens = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_N = torch.zeros_like(normaliser_N) if grad_N is None else grad_N
        has_grad_N = grad_N != 0 if entropy_grad_N is None else (grad_N != 0) | (entropy_grad_N != 0)
        used = has_grad_N.nonzero().squeeze(1)  # equal on all ranks of the group
        hidden, targets, normaliser = (t[used] for t in (hidden_NH.to(dtype), targets_N, normaliser_N))
        factor = grad_N[used, None] * -scale if entropy_grad_N is None else grad_N.new_full((len(used), 1), -scale)
        scaled = (hidden * factor).to(dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight_VH) if need_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for words, weight_UH, bias_U in _words(weight_VH, bias_V, dtype, min(chunk_tokens, len(hidden))):
                sum_UH = None if grad_weight is None else _for_sums(grad_weight[words])
                for tokens in _chunks(len(hidden), chunk_tokens):
                    delta_CU = _logits(hidden[tokens], weight_UH, bias_U, scale, cap)
                    slope_CU = 1.0 - (delta_CU / (scale * cap)).square() if cap else None
                    delta_CU.sub_(normaliser[tokens, None])
                    inside_C, column_C = _inside(targets[tokens], words)
                    if entropy_grad_N is None:
                        delta_CU.exp_().scatter_add_(1, column_C, -inside_C[:, None].float())
                    else:
                        now_C = used[tokens]
                        grad_C1, entropy_C1 = grad_N[now_C, None], entropy_N[now_C, None]
                        share_CU = delta_CU.exp()
                        delta_CU.add_(entropy_C1).mul_(entropy_grad_N[now_C, None]).add_(grad_C1).mul_(share_CU)
                        delta_CU.scatter_add_(1, column_C, inside_C[:, None] * -grad_C1)
                    if slope_CU is not None:
                        delta_CU.mul_(slope_CU)
                    # delta_CU is not multiplied by factor: scaled and grad_hidden, of [tokens, hidden], are, which is less work.
                    if grad_bias is not None:
                        grad_bias[words] += (factor[tokens].T @ delta_CU)[0]
                    delta_CU = delta_CU.to(dtype)
                    if need_hidden:
                        _add_product(grad_hidden[tokens], delta_CU, weight_UH)
                    if sum_UH is not None:
                        _add_product(sum_UH, delta_CU.T, scaled[tokens])
                if grad_weight is not None and sum_UH is not None and sum_UH.dtype != grad_weight.dtype:
                    grad_weight[words] = sum_UH
        grad_bias = None if grad_bias is None else grad_bias.to(bias_V.dtype)
        if not need_hidden:
            return None, grad_weight, grad_bias, *(None,) * 6
        grad_hidden.mul_(factor)
        grad_hidden_NH = torch.zeros_like(hidden_NH).index_copy_(0, used, grad_hidden.to(hidden_NH.dtype))
        return grad_hidden_NH, grad_weight, grad_bias, *(None,) * 6


def _words(
    weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype, num_tokens: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield slices of the output layer's rows (words), in the dtype of the computation. Each has so many words that a block with
    num_tokens has about _BLOCK_LOGITS logits, but at least _LEAST_WORDS."""
    num_words = max(_LEAST_WORDS, _BLOCK_LOGITS[uses_gpu_kernels(weight_VH.device)] // max(num_tokens, 1))
    for start in range(0, len(weight_VH), num_words):
        words = slice(start, min(start + num_words, len(weight_VH)))
        yield words, weight_VH[words].to(dtype), None if bias_V is None else bias_V[words].to(dtype)


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))


def _logits(hidden_CH: Tensor, weight_UH: Tensor, bias_U: Tensor | None, scale: float, cap: float) -> Tensor:
    """Logits in float32, divided by the temperature. Rounded to the dtype of the computation first, like the model's own logits."""
    logits_CU = nn.functional.linear(hidden_CH, weight_UH, bias_U).float()
    if cap:
        logits_CU.div_(cap).tanh_().mul_(cap)
    return logits_CU if scale == 1.0 else logits_CU.mul_(scale)


def _inside(targets_C: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Return (whether each target is one of these words [C], the target's column among them [C, 1], 0 if it is not)."""
    inside_C = (targets_C >= words.start) & (targets_C < words.stop)
    return inside_C, (targets_C - words.start).where(inside_C, 0)[:, None]


def _for_sums(zeros_UH: Tensor) -> Tensor:
    """Return where to sum over blocks of tokens: this tensor, or zeros in float32 if it has 16 bits (FSDP's copy of the weight)."""
    return zeros_UH if zeros_UH.dtype.itemsize > 2 else torch.zeros_like(zeros_UH, dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
