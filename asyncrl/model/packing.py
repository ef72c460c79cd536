"""From a packed SequenceSample to micro-batches that a model can run, and back. Pure numpy.

A micro-batch is some sequences of about the same length, laid out as right-padded rows. Under causal attention no real token can
see the padding behind it, so rows need no mask and no position ids, and sdpa takes its fast causal path. What comes out of
the model is brought back to the packed layout at once: padding exists only between embedding and last hidden state.

Why rows and not one long packed row: sdpa computes masked-out blocks too. Measured on one CPU core, forward and backward, budget
of 2048 / 16384 tokens (2 layers, hidden 64):

    512 sequences of ~17 tokens          one row, block-diagonal mask 1043 / 5202 ms    rows 198 / 197 ms
    512 sequences, long tail to 112      one row 2075 ms / -                            rows 390 / 488 ms
    64 sequences, long tail to 2000      one row 4373 ms / -                            rows 1738 / 1941 ms

Several sequences to a row under a block-diagonal mask came to 222, 396-488 and 4107-4280 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.data.sequence import KEY_SPECS, Array, SequenceSample

MIN_FILL = (
    0.8  # of a row is real tokens; measured 0.5 to 0.9: below, padding costs more, above, many small micro-batches
)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that run together: one row each, `width` tokens wide."""

    sequences: tuple[int, ...]  # indices into the sample's sequences, ascending
    width: int  # length of the longest

    @property
    def num_padded_tokens(self) -> int:
        """What the token budget bounds: padding included, because it costs memory like any token."""
        return len(self.sequences) * self.width


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, *, min_fill: float = MIN_FILL) -> list[MicroBatch]:
    """First fit, longest first: each sequence joins the first micro-batch that has room for a row of its width and would not be
    padding to more than 1 - min_fill of the row; else it opens one. A sequence longer than the budget gets one for itself.

    Every sequence is in exactly one. The same lengths always give the same plan.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1 (train.max_tokens_per_mb)")
    empty = [i for i, length in enumerate(lengths) if length < 1]
    if empty:
        raise ValueError(f"sequences {empty[:8]} have no token; every sequence has a prompt of at least one")
    open_batches: list[list[int]] = []  # the first sequence of each is its longest
    first_open = 0  # batches before it are full: lengths only fall, so that a full one stays full
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while first_open < len(open_batches) and _is_closed(
            open_batches[first_open], lengths, lengths[i], max_tokens, min_fill
        ):
            first_open += 1
        for members in open_batches[first_open:]:
            if not _is_closed(members, lengths, lengths[i], max_tokens, min_fill):
                members.append(i)
                break
        else:
            open_batches.append([i])
    return [MicroBatch(tuple(sorted(members)), lengths[members[0]]) for members in open_batches]


def _is_closed(members: Sequence[int], lengths: Sequence[int], length: int, max_tokens: int, min_fill: float) -> bool:
    """Nothing of this length or shorter can join any more."""
    width = lengths[members[0]]
    return (len(members) + 1) * width > max_tokens or length < min_fill * width


@dataclass(frozen=True)
class SequenceBatch:
    """A SequenceSample as its sequences, ids forgotten: what a loss is computed on.

    Holds the keys with a run or a value for each sequence (`token` and `sequence` layouts, and others of such a shape); keys of a
    whole group (prompts, task ids) have no place in a micro-batch, which may cut through a group.
    """

    lengths: tuple[int, ...]  # of packed_input_ids
    data: dict[str, Array]
    key_lengths: dict[str, npt.NDArray[np.int64]]  # per key, of each sequence

    @classmethod
    def of(cls, sample: SequenceSample) -> SequenceBatch:
        counts = [len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
        keys = [
            key
            for key in sample.keys
            if (key not in KEY_SPECS or KEY_SPECS[key].layout in ("token", "sequence"))
            and [len(lengths) for lengths in sample.seqlens[key]] == counts
        ]
        key_lengths = {
            key: np.array([n for lengths in sample.seqlens[key] for n in lengths], dtype=np.int64) for key in keys
        }
        lengths = tuple(key_lengths["packed_input_ids"].tolist())
        return cls(lengths, {key: sample.data[key] for key in keys}, key_lengths)

    def select(self, sequences: Sequence[int]) -> dict[str, Array]:
        """All keys of some sequences, packed in the given order."""
        return {
            key: array[run_indices(self.key_lengths[key], sequences)] if len(sequences) else array[:0]
            for key, array in self.data.items()
        }


def run_indices(lengths: npt.NDArray[np.int64], sequences: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where the values of some sequences are in a packed array: their runs, one after another."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[np.asarray(sequences, dtype=np.int64)]
    counts = lengths[np.asarray(sequences, dtype=np.int64)]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    indices: npt.NDArray[np.int64] = np.repeat(starts, counts) + within
    return indices


def cu_seqlens_of(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each sequence begins, and at last where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])


@dataclass(frozen=True)
class Rows:
    """A micro-batch as the model takes it, and the way back.

    Token t of a sequence is predicted at position t - 1. Position 0 of each sequence is predicted by nothing.
    """

    input_ids: npt.NDArray[np.int64]  # [rows, width], padded with 0
    predictors: npt.NDArray[np.int64]  # positions in the flattened rows whose hidden states predict a token
    predicted: npt.NDArray[np.int64]  # where in the packed micro-batch that token is
    num_tokens: int  # of the packed micro-batch

    @classmethod
    def of(cls, packed_ids: npt.NDArray[np.int64], lengths: Sequence[int], width: int) -> Rows:
        """packed_ids: the sequences of the micro-batch, one after another."""
        lengths_S = np.asarray(lengths, dtype=np.int64)
        real = np.arange(width)[None, :] < lengths_S[:, None]
        input_ids = np.zeros((len(lengths_S), width), np.int64)
        input_ids[real] = packed_ids
        first = cu_seqlens_of(lengths)[:-1]
        predicted = np.delete(np.arange(len(packed_ids)), first)
        positions = np.flatnonzero(real)  # of each packed token in the flattened rows
        return cls(input_ids, positions[predicted] - 1, predicted, len(packed_ids))
