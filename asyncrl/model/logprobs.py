"""Logprobs of given tokens from hidden states, in chunks: [tokens, vocabulary] never exists for more than a chunk of tokens.

A vocabulary of 150k makes logits the largest tensor of training by far: 16k tokens in float32 are 10 GB, several times over
with gradients. Here the output layer runs on `chunk_tokens` hidden states at a time; backward computes each chunk's logits again.

Shapes: N tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OutputLayer = Callable[[Tensor], Tensor]  # hidden_CH -> logits_CV


def token_logprobs(
    hidden_NH: Tensor, output_layer: OutputLayer, targets_N: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) of softmax(logits / temperature), float32, for each token. Entropy carries no gradient."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; logprobs need one above 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1 (train.logprob_chunk_tokens)")
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for hidden_CH, targets_C in zip(
        torch.split(hidden_NH, chunk_tokens), torch.split(targets_N, chunk_tokens), strict=True
    ):
        if torch.is_grad_enabled():
            logprobs_C, entropy_C = checkpoint(
                _chunk,
                hidden_CH,
                output_layer,
                targets_C,
                temperature,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            logprobs_C, entropy_C = _chunk(hidden_CH, output_layer, targets_C, temperature)
        logprobs.append(logprobs_C)
        entropies.append(entropy_C)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden_CH: Tensor, output_layer: OutputLayer, targets_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_CV = output_layer(hidden_CH).float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    normaliser_C = logits_CV.logsumexp(-1)
    logprobs_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) - normaliser_C
    with torch.no_grad():  # last: the recomputation in backward stops before it
        entropy_C = _entropy(logits_CV, normaliser_C)
    return logprobs_C, entropy_C


def _entropy(logits_CV: Tensor, normaliser_C: Tensor) -> Tensor:
    """-sum p log p."""
    logprobs_CV = logits_CV - normaliser_C[:, None]
    return -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
