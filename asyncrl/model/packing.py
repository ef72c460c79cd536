"""Converts a packed SequenceSample into micro-batches that a model can run, and back.

A micro-batch is one packed row of whole sequences, one after another, without padding; positions restart at each sequence. The
transformer runs on exactly these tokens. Only attention (attention.py) needs to know the sequences, to keep them apart.

Sequences that begin with the same tokens can share them (`prefixes_of`): the first of them is in the row as a whole, and of each
other one only the tokens behind the prefix, at the positions that they have in their sequence. `Packed.places` maps the tokens of
the sequences to the row, so losses and results see whole sequences. Gradients of shared tokens add up there.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.data.sequence import Array, SequenceSample, spec_of
from asyncrl.model.attention import Segments, row_of
from asyncrl.model.row_ranks import ContextRanks, Predictions


@dataclass(frozen=True)
class Prefix:
    """Sequences that begin with the same tokens, each with at least one more token."""

    sequences: tuple[int, ...]  # indices into the sample's sequences, ascending
    tokens: int  # of the prefix
    cost: int  # of the prefix, in the unit of the sequences' costs


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that run together as one packed row."""

    sequences: tuple[
        int, ...
    ]  # indices into the sample's sequences, ascending; empty: keeps this rank in step with others
    num_tokens: int  # of the row
    # Of each sequence: (number within `sequences` of the one that has its first tokens in the row, how many tokens these are); ():
    # no sequence shares tokens
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def copies(self) -> list[int]:
        """Tokens of each prefix that the row does not repeat."""
        return [tokens for _, tokens in self.shared if tokens]


@dataclass(frozen=True)
class _Part:
    """Sequences that share a prefix, or one sequence."""

    sequences: tuple[int, ...]
    tokens: int  # that count against the budget
    cost: int
    prefix: Prefix | None = None


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    costs: Sequence[int] = (),
    min_count: int = 1,
    prefixes: Sequence[Prefix] = (),
) -> list[MicroBatch]:
    """Plan micro-batches of at most max_tokens with balanced costs, as few as first fit (longest first) needs.

    costs: of the sequences; a longer one has a higher cost. Empty: their tokens.
    prefixes: a sequence is in at most one. Sequences that share a prefix stay together as far as the budget allows. Only to reach
    min_count are they split further. Where they are split, each micro-batch computes the prefix once.
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
    parts = [part for prefix in prefixes for part in _within_budget(prefix, lengths, costs, max_tokens)]
    alone = set(range(len(lengths))).difference(*(prefix.sequences for prefix in prefixes))
    parts += [_Part((i,), lengths[i], costs[i]) for i in sorted(alone)]
    while len(parts) < min_count and (divisible := [part for part in parts if part.prefix is not None]):
        largest = max(divisible, key=lambda part: (part.tokens, part.sequences))
        parts.remove(largest)
        half = len(largest.sequences) // 2
        for sequences in (largest.sequences[:half], largest.sequences[half:]):
            parts.append(_part(sequences, largest.prefix, lengths, costs))
    tokens, of_parts = [part.tokens for part in parts], [part.cost for part in parts]
    longest_first = sorted(range(len(parts)), key=lambda i: (-tokens[i], parts[i].sequences))
    fitted = _first_fit(longest_first, tokens, max_tokens)
    count = max(len(fitted), min_count)
    rows = (
        _balanced(longest_first, tokens, of_parts, max_tokens, count)
        or _balanced(longest_first, tokens, tokens, max_tokens, count)
        or fitted + [[] for _ in range(count - len(fitted))]
    )
    rows.sort(key=lambda row: -sum(of_parts[i] for i in row))
    return [_micro_batch([parts[i] for i in row], lengths) for row in rows]


def _within_budget(prefix: Prefix, lengths: Sequence[int], costs: Sequence[int], max_tokens: int) -> list[_Part]:
    """Divide the sequences of a prefix into parts that keep the budget, as few as first fit needs."""
    once = prefix.tokens
    own = [lengths[i] - once for i in prefix.sequences]  # tokens that each of them adds to a part
    longest_first = sorted(range(len(own)), key=lambda i: (-own[i], i))
    fitted = _first_fit(longest_first, own, max_tokens - once)
    return [
        _part([prefix.sequences[i] for i in chosen], prefix, lengths, costs)
        for chosen in _balanced(longest_first, own, own, max_tokens - once, len(fitted)) or fitted
    ]


def _part(sequences: Sequence[int], prefix: Prefix | None, lengths: Sequence[int], costs: Sequence[int]) -> _Part:
    tokens, cost = sum(lengths[i] for i in sequences), sum(costs[i] for i in sequences)
    copies = len(sequences) - 1
    if prefix is None or not copies:
        return _Part(tuple(sequences), tokens, cost)
    return _Part(
        tuple(sorted(sequences)),
        tokens - copies * prefix.tokens,
        cost - copies * prefix.cost,
        prefix,
    )


def _micro_batch(parts: Sequence[_Part], lengths: Sequence[int]) -> MicroBatch:
    source = {
        i: (part.sequences[0], part.prefix.tokens)
        for part in parts
        if part.prefix is not None
        for i in part.sequences[1:]
    }
    sequences = tuple(sorted(i for part in parts for i in part.sequences))
    num_tokens = sum(lengths[i] for i in sequences) - sum(tokens for _, tokens in source.values())
    if not source:
        return MicroBatch(sequences, num_tokens)
    number = {sequence: at for at, sequence in enumerate(sequences)}
    shared = ((number[source[i][0]], source[i][1]) if i in source else (number[i], 0) for i in sequences)
    return MicroBatch(sequences, num_tokens, tuple(shared))


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
    counts: tuple[int, ...]  # of the sequences of each group

    @classmethod
    def of(cls, sample: SequenceSample) -> SequenceBatch:
        counts = [len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
        keys = [
            key
            for key in sample.keys
            if ((spec := spec_of(key)) is None or spec.layout in ("token", "sequence") or spec.layout == "runs")
            and [len(lengths) for lengths in sample.seqlens[key]] == counts
        ]
        key_lengths = {
            key: np.array([n for lengths in sample.seqlens[key] for n in lengths], dtype=np.int64) for key in keys
        }
        lengths = tuple(key_lengths["packed_input_ids"].tolist())
        return cls(lengths, {key: sample.data[key] for key in keys}, key_lengths, tuple(counts))

    def select(self, sequences: Sequence[int]) -> dict[str, Array]:
        """Return all keys of these sequences, packed in the given order."""
        return {
            key: array[run_indices(self.key_lengths[key], sequences)] if len(sequences) else array[:0]
            for key, array in self.data.items()
        }


def prefixes_of(batch: SequenceBatch, cost: Callable[[Sequence[int]], int]) -> list[Prefix]:
    """The prefixes that sequences of one group share. They are chosen so that as many tokens as possible are shared.

    cost: of whole sequences with these lengths.
    """
    ids, bounds = batch.data["packed_input_ids"], cu_seqlens_of(batch.lengths)
    found = list[Prefix]()
    for start, stop in pairwise(cu_seqlens_of(batch.counts)):
        sequences = {i: ids[bounds[i] : bounds[i + 1]].astype(">i8") for i in range(start, stop)}
        ordered = sorted(sequences, key=lambda i: sequences[i].tobytes())  # neighbours share most
        for members, tokens in _most_shared(
            [len(sequences[i]) for i in ordered],
            [_num_equal(sequences[i], sequences[j]) for i, j in pairwise(ordered)],
        ):
            found.append(Prefix(tuple(sorted(ordered[members])), tokens, cost([tokens])))
    return found


def _num_equal(one: Array, other: Array) -> int:
    """How many tokens at the begin of both are equal."""
    least = min(len(one), len(other))
    differs = np.flatnonzero(one[:least] != other[:least])
    return int(differs[0]) if len(differs) else least


def _most_shared(lengths: Sequence[int], equal: Sequence[int]) -> list[tuple[slice, int]]:
    """Divide sequences in lexicographic order so that the most tokens are shared. Returns (members, tokens of their prefix).

    equal: at i, how many tokens at the begin of sequences i and i + 1 are equal.
    """
    most = [(0, 0, 0)]  # of the first n sequences: (tokens saved, begin of the last part, its prefix)
    for stop in range(1, len(lengths) + 1):
        best, prefix = (most[-1][0], stop - 1, 0), lengths[stop - 1] - 1
        for start in range(stop - 2, -1, -1):
            prefix = min(prefix, equal[start], lengths[start] - 1)
            saved = most[start][0] + (stop - start - 1) * prefix
            best = max(best, (saved, start, prefix), key=lambda one: one[0])
        most.append(best)
    parts, stop = list[tuple[slice, int]](), len(lengths)
    while stop:
        _, start, prefix = most[stop]
        if prefix:
            parts.append((slice(start, stop), prefix))
        stop = start
    return parts[::-1]


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
    """A micro-batch as model input, and the places for mapping outputs back. T tokens, then padding to T' that nothing reads.

    Token t of a sequence is predicted where its token t - 1 is in the row. The first token of each sequence has no prediction.
    The last token of a shared prefix predicts the next token of several sequences. L: tokens of all sequences, those of a shared
    prefix once for each of them.
    """

    input_ids: Tensor  # [1, T'] int64; 0 in the padding
    position_ids: Tensor  # [1, T'] int64: of each token in its sequence; 0 in the padding
    segments: Segments
    predictors: Tensor  # [N] int64: places with a hidden state that predicts a token
    predicted: Tensor  # [N] int64: the places of those tokens
    num_tokens: int  # T
    places: Tensor | None = None  # [L] int64: of the tokens of the sequences; None: no tokens are shared, so L is T
    own: Predictions | None = None  # those of this context rank; None: it has the whole row

    @classmethod
    def of(
        cls,
        packed_ids: npt.NDArray[np.int64],
        lengths: Sequence[int],
        *,
        pad_to: int = 0,
        device: torch.device | str = "cpu",
        long_tokens: float = math.inf,
        shared: Sequence[tuple[int, int]] = (),
        context: ContextRanks | None = None,
    ) -> Packed:
        """packed_ids: the sequences of the micro-batch, one after another. pad_to: minimum of T', which is at least 1.
        long_tokens: as in Segments.of. shared: as in MicroBatch. context: the ranks that share the row; their number must divide
        T'."""
        cu_seqlens = cu_seqlens_of(lengths)
        if len(packed_ids) != cu_seqlens[-1]:
            raise ValueError(f"{len(packed_ids)} token ids, but the sequences have {cu_seqlens[-1]} tokens in total")
        positions_L = np.arange(len(packed_ids)) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
        segments = Segments.of(lengths, device=device, long_tokens=long_tokens, shared=shared)
        places_L, tokens_T = row_of(lengths, shared)
        num_tokens = len(tokens_T)
        input_ids = np.zeros(max(num_tokens, pad_to, 1), np.int64)
        input_ids[:num_tokens] = packed_ids[tokens_T]
        position_ids = np.zeros_like(input_ids)
        position_ids[:num_tokens] = positions_L[tokens_T]
        predicted = tokens_T[np.flatnonzero(position_ids)]  # tokens of the sequences

        def on_device(array: npt.NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        def to_device(tokens_N: npt.NDArray[np.int64]) -> Tensor:
            """The places in the row of these tokens of the sequences."""
            return on_device(places_L[tokens_N])

        own = None
        if context is not None:
            num_own, places = len(input_ids) // context.size, (places_L[predicted - 1], places_L[predicted])
            own = Predictions.of(*places, num_tokens=num_own, ranks=context, device=device)
        return cls(
            on_device(input_ids[None]),
            on_device(position_ids[None]),
            replace(segments, context=context),
            to_device(predicted - 1),
            to_device(predicted),
            num_tokens,
            on_device(places_L) if any(tokens for _, tokens in shared) else None,
            own,
        )
