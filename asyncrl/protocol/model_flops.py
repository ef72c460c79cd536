"""Model FLOPs: those that the mathematics of a model needs. Recomputed activations do not count. MFU is defined by them
(arXiv:2204.02311, appendix B), and ranks and micro-batches are balanced by them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

_CHUNK = 64  # tokens that transformers' chunk_gated_delta_rule, and flash-linear-attention's kernel, compute at once


class ModelFlops(Struct, frozen=True, kw_only=True):
    """The sizes of a whole model on which its FLOPs depend. The default counts tokens alone: it stands for a model of unknown
    sizes."""

    num_parameters: int = 1  # that one token uses: of a mixture of experts, its share of the experts; tied ones once
    num_frozen: int = 0  # of them, those that need no gradients: the base of adapters
    # (window, chunk, layers x query heads x size of a head) of the layers with this window or chunk (architectures/attention.py
    # `Pattern`); 0: none
    widths: list[tuple[int, int, int]] = []
    of_states: int = 0  # FLOPs of a token in the forward passes of linear attention, beside those of parameters

    def of_batch(self, lengths: Sequence[int], *, trains: bool = False) -> int:
        """FLOPs over sequences of these lengths (tokens).

        The forward pass needs 2 for each token and parameter, 4 * width for each pair of tokens of which one attends to the
        other, and `of_states` for each token. The backward pass needs twice as many, but 2 for each token and frozen parameter.
        """
        of_attention = sum(width * _pairs(n, window, chunk) for window, chunk, width in self.widths for n in lengths)
        of_token = 2 * self.num_parameters + self.of_states
        forward = of_token * sum(lengths) + 4 * of_attention
        return 3 * forward - 2 * self.num_frozen * sum(lengths) if trains else forward


def delta_rule_flops(heads: int, key_width: int, value_width: int) -> int:
    """FLOPs of a token in the gated delta rule of one layer, forward (arXiv:2412.06464, section 3.3, as transformers'
    torch_chunk_gated_delta_rule computes it). heads: of values. The matrix products of a chunk of C tokens, with K and V the widths
    of a key and a value, and S [K, V] the state:

        keys * keys and queries * keys    4 C C K      two triangular systems         C C (K + V)
        keys * S, queries * S, update     6 C K V      pairs of the chunk * values    2 C C V
    """
    return heads * (_CHUNK * (5 * key_width + 3 * value_width) + 6 * key_width * value_width)


def _pairs(length: int, window: int, chunk: int) -> int:
    """How many pairs of tokens attend in a sequence: each token to itself and, of those before it, to all, or to the last
    window - 1, or to those of its chunk."""
    if 0 < chunk < length:
        return length // chunk * _pairs(chunk, window, 0) + _pairs(length % chunk, window, 0)
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
