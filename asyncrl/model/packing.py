"""Converts a packed SequenceSample into micro-batches that a model can run, and back.

A micro-batch is one packed row of whole sequences, one after another, without padding; positions restart at each sequence. The
transformer runs on exactly these tokens. Only attention (attention.py) needs to know the sequences, to keep them apart.

An earlier version used micro-batches of right-padded rows of similar length. They cost as much or more, there are more of them (the
tail of lengths never fills a class of rows), and ranks get different numbers of them. CPU ms of forward and backward, one core
of a busy machine (minimum of two runs), budget of 2048 / 16384 tokens, 2 layers; in parentheses the number of micro-batches;
"to N": the longest sequence has N tokens:

                                                    packed                       right-padded rows
    hidden 64:  512 sequences of 17 tokens          246 (5) / 225 (1)            252 (5) / 226 (1)
                512, median 16, mean 29, to 107     443 (8) / 466 (1)            465 (12) / 501 (11)
                64, median 233, mean 421, to 1974   1676 (14) / 1628 (2)         1699 (27) / 1683 (17)
    hidden 512: 128, mean 31, to 107                2724 (2) / 2732 (1)          2976 (11) / 3039 (11)

benchmarks/train_step.py compares a whole batch padded to its longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.data.sequence import Array, SequenceSample, spec_of
from asyncrl.model.attention import Segments


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that run together as one packed row."""

    sequences: tuple[
        int, ...
    ]  # indices into the sample's sequences, ascending; empty: keeps this rank in step with others
    num_tokens: int


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, costs: Sequence[int] = (), min_count: int = 1
) -> list[MicroBatch]:
    """Plan micro-batches of at most max_tokens with balanced costs, as few as first fit (longest first) needs.

    costs: of the sequences; a longer one has a higher cost. Empty: their tokens.
    The micro-batches with the highest costs come first, so those of the ranks that run at the same time have similar costs. There
    are at least min_count; the last ones are empty if there are fewer sequences. Every sequence is in exactly one micro-batch. A
    sequence of more than max_tokens gets a micro-batch of its own. Ranks that must run the same number take the maximum of their
    counts and plan again with it as min_count. The plan depends only on the arguments. No sequences and min_count 0 give an empty
    plan.
    """
    costs = costs or lengths
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1 (train.max_tokens_per_mb)")
    empty = [i for i, length in enumerate(lengths) if length < 1]
    if empty:
        raise ValueError(f"sequences {empty[:8]} have no tokens; every sequence needs a prompt of at least one token")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fitted = _first_fit(longest_first, lengths, max_tokens)
    count = max(len(fitted), min_count)
    parts = (
        _balanced(longest_first, lengths, costs, max_tokens, count)
        or _balanced(longest_first, lengths, lengths, max_tokens, count)
        or fitted + [[] for _ in range(count - len(fitted))]
    )
    parts.sort(key=lambda part: -sum(costs[i] for i in part))
    return [MicroBatch(tuple(sorted(part)), sum(lengths[i] for i in part)) for part in parts]


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each sequence joins the first part that has room for it, or else opens a new one."""
    parts: list[list[int]] = []
    room: list[int] = []
    first_open = 0  # earlier parts are full: not one more token fits
    for i in longest_first:
        while first_open < len(parts) and room[first_open] < 1:
            first_open += 1
        for at in range(first_open, len(parts)):
            if lengths[i] <= room[at]:
                parts[at].append(i)
                room[at] -= lengths[i]
                break
        else:
            parts.append([i])
            room.append(max_tokens - lengths[i])
    return parts


def _balanced(
    longest_first: Sequence[int], lengths: Sequence[int], costs: Sequence[int], max_tokens: int, count: int
) -> list[list[int]]:
    """Each sequence joins the part with the lowest cost so far of those with room for it. Empty: some sequence finds no room."""
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, loads = [0] * count, [0] * count
    for i in longest_first:
        with_room = [at for at in range(count) if not parts[at] or tokens[at] + lengths[i] <= max_tokens]
        if not with_room:
            return []
        at = min(with_room, key=loads.__getitem__)
        parts[at].append(i)
        tokens[at] += lengths[i]
        loads[at] += costs[i]
    return parts


@dataclass(frozen=True)
class SequenceBatch:
    """The sequences of a SequenceSample without their ids: the input of a loss.

    It holds the keys with one run or value per sequence (`token` and `sequence` layouts, and others of such a shape). Keys of a
    whole group (prompts, task ids) are left out, because a micro-batch may cut through a group.
    """

    lengths: tuple[int, ...]  # of packed_input_ids
    data: dict[str, Array]
    key_lengths: dict[str, npt.NDArray[np.int64]]  # per key, for each sequence

    @classmethod
    def of(cls, sample: SequenceSample) -> SequenceBatch:
        counts = [len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
        keys = [
            key
            for key in sample.keys
            if ((spec := spec_of(key)) is None or spec.layout in ("token", "sequence"))
            and [len(lengths) for lengths in sample.seqlens[key]] == counts
        ]
        key_lengths = {
            key: np.array([n for lengths in sample.seqlens[key] for n in lengths], dtype=np.int64) for key in keys
        }
        lengths = tuple(key_lengths["packed_input_ids"].tolist())
        return cls(lengths, {key: sample.data[key] for key in keys}, key_lengths)

    def select(self, sequences: Sequence[int]) -> dict[str, Array]:
        """Return all keys of these sequences, packed in the given order."""
        return {
            key: array[run_indices(self.key_lengths[key], sequences)] if len(sequences) else array[:0]
            for key, array in self.data.items()
        }


def run_indices(lengths: npt.NDArray[np.int64], sequences: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the indices of these sequences' values in a packed array: one sequence's run of values after another."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[np.asarray(sequences, dtype=np.int64)]
    counts = lengths[np.asarray(sequences, dtype=np.int64)]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    indices: npt.NDArray[np.int64] = np.repeat(starts, counts) + within
    return indices


def cu_seqlens_of(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """The start of each sequence, followed by the end of the last one."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])


@dataclass(frozen=True)
class Packed:
    """A micro-batch as model input, and the positions for mapping outputs back. T tokens, then padding to T' that nothing reads.

    Token t of a sequence is predicted at position t - 1. The first token of each sequence has no prediction.
    """

    input_ids: Tensor  # [1, T'] int64; 0 in the padding
    position_ids: Tensor  # [1, T'] int64, from 0 in each sequence; 0 in the padding
    segments: Segments
    predictors: Tensor  # [N] int64: positions with a hidden state that predicts a token
    predicted: Tensor  # [N] int64: the positions of those tokens
    num_tokens: int  # T

    @classmethod
    def of(
        cls,
        packed_ids: npt.NDArray[np.int64],
        lengths: Sequence[int],
        *,
        pad_to: int = 0,
        device: torch.device | str = "cpu",
        long_tokens: float = math.inf,
    ) -> Packed:
        """packed_ids: the sequences of the micro-batch, one after another. pad_to: minimum of T', which is at least 1.
        long_tokens: as in Segments.of."""
        num_tokens = len(packed_ids)
        cu_seqlens = cu_seqlens_of(lengths)
        if num_tokens != cu_seqlens[-1]:
            raise ValueError(f"{num_tokens} token ids, but the sequences have {cu_seqlens[-1]} tokens in total")
        input_ids = np.zeros(max(num_tokens, pad_to, 1), np.int64)
        input_ids[:num_tokens] = packed_ids
        position_ids = np.zeros_like(input_ids)
        position_ids[:num_tokens] = np.arange(num_tokens) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        predicted = np.flatnonzero(position_ids)

        def to_device(array: npt.NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            to_device(input_ids[None]),
            to_device(position_ids[None]),
            Segments.of(lengths, device=device, long_tokens=long_tokens),
            to_device(predicted - 1),
            to_device(predicted),
            num_tokens,
        )
