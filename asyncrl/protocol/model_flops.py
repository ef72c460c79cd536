"""Model FLOPs: those that the mathematics of a model needs. Recomputed activations do not count. MFU is defined by them
(arXiv:2204.02311, appendix B), and ranks and micro-batches are balanced by them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class ModelFlops(Struct, frozen=True, kw_only=True):
    """The sizes of a whole model on which its FLOPs depend. The default counts tokens alone: it stands for a model of unknown
    sizes."""

    num_parameters: int = 1  # that one token uses: of a mixture of experts, its share of the experts; tied ones once
    # (window, chunk, layers x query heads x size of a head) of the layers with this window or chunk (architectures/attention.py
    # `Pattern`); 0: none
    widths: list[tuple[int, int, int]] = []

    def of_batch(self, lengths: Sequence[int], *, trains: bool = False) -> int:
        """FLOPs over sequences of these lengths (tokens).

        The forward pass needs 2 for each token and parameter, and 4 * width for each pair of tokens of which one attends to the
        other. The backward pass needs twice as many.
        """
        of_attention = sum(width * _pairs(n, window, chunk) for window, chunk, width in self.widths for n in lengths)
        return (6 if trains else 2) * (self.num_parameters * sum(lengths) + 2 * of_attention)


def _pairs(length: int, window: int, chunk: int) -> int:
    """How many pairs of tokens attend in a sequence: each token to itself and, of those before it, to all, or to the last
    window - 1, or to those of its chunk."""
    if 0 < chunk < length:
        return length // chunk * _pairs(chunk, window, 0) + _pairs(length % chunk, window, 0)
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
