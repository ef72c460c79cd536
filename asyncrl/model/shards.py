"""Plans for moving parts of tensors: which worker holds which part, and which worker sends it to which. Pure.

A part is a box: a rectangle of the whole tensor. Data ranks (FSDP) and tensor ranks cut a tensor into boxes. An uncut tensor is a
single box on each rank. Three operations use the same plan with different targets:

    export         each tensor whole, at one of the ranks that hold its parts (plan_owners chooses it)
    sending        every tensor whole, at one rank
    reallocation   each rank of another model gets its own boxes

So no worker gathers more than its own target, and parts that are cut the same way on both sides are never assembled.
Every worker computes the same plans, in one order, from the holdings that all workers have exchanged (tensor_exchange.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor, by its first index and its size in each dimension. A scalar is a box without dimensions."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    def meet(self, other: Box) -> Box | None:
        """The intersection; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(end - first for first, end in zip(start, ends, strict=True))
        return None if any(length <= 0 for length in size) else Box(start, size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds `outer`."""
        return tuple(
            slice(first - origin, first - origin + length)
            for first, length, origin in zip(self.start, self.size, outer.start, strict=True)
        )

    def split(self, max_elements: int) -> Iterator[Box]:
        """Cut the box along its first dimension into pieces of at most max_elements, or of one row if a row is larger."""
        if self.num_elements <= max_elements or not self.size:
            yield self
            return
        rows = max(1, max_elements // (self.num_elements // self.size[0]))
        for first in range(0, self.size[0], rows):
            length = min(rows, self.size[0] - first)
            yield Box((self.start[0] + first, *self.start[1:]), (length, *self.size[1:]))


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of a tensor."""

    dtype: str  # torch's name
    shape: tuple[int, ...]  # of the whole tensor
    box: Box


class Holding(msgspec.Struct, frozen=True):
    """A worker's parts of a model, in the model's order. Each stage holds whole tensors, cut among its workers."""

    stage: int
    pieces: dict[str, Piece]
    on_gpu: bool = False


@dataclass(frozen=True)
class Move:
    """A part of a tensor that goes from one worker to another, or to itself."""

    name: str
    source: int
    target: int
    box: Box


class ShardError(ValueError):
    """The tensors of two models or ranks do not match, or a model lacks a tensor or a part of one."""


def tensors_of(holdings: Mapping[int, Holding]) -> dict[str, Piece]:
    """All tensors of a model by name, stage after stage, each as described by the first worker that has a part of it."""
    result: dict[str, Piece] = {}
    for worker in sorted(holdings, key=lambda worker: (holdings[worker].stage, worker)):
        for name, piece in holdings[worker].pieces.items():
            if result.setdefault(name, piece).shape != piece.shape:
                raise ShardError(
                    f"tensor {name} has the shape {piece.shape} on one rank, {result[name].shape} on another"
                )
    return result


def plan_owners(holdings: Mapping[int, Holding], num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Choose the worker that assembles each tensor: one of those that hold its parts, with byte counts balanced.

    Largest tensor first, each to the candidate with the fewest bytes so far (longest processing time first). Within a stage, the
    largest total of a worker is at most an even share of the stage plus one tensor.
    """
    candidates: dict[str, list[int]] = {}
    for worker in sorted(holdings):
        for name in holdings[worker].pieces:
            candidates.setdefault(name, []).append(worker)
    owners: dict[str, int] = {}
    filled: Counter[int] = Counter()
    for name in sorted(candidates, key=lambda name: (-num_bytes[name], name)):
        owners[name] = min(candidates[name], key=lambda worker: (filled[worker], worker))
        filled[owners[name]] += num_bytes[name]
    return owners


def plan_writers(holdings: Mapping[int, Holding], num_bytes: Mapping[str, int]) -> dict[int, list[str]]:
    """List the tensors of which each worker writes its own part, so that every part is written once. A part held by several
    workers is written by the one with the fewest bytes so far. num_bytes: of each whole tensor.
    """
    tensors = tensors_of(holdings)
    writers: dict[int, list[str]] = {worker: [] for worker in sorted(holdings)}
    filled: Counter[int] = Counter()
    for name in sorted(tensors, key=lambda name: (-num_bytes[name], name)):
        stages = _boxes_by_stage(name, tensors[name].shape, holdings)
        for box, workers in stages[min(stages)].items() if stages else ():
            writer = min(workers, key=lambda worker: (filled[worker], worker))
            writers[writer].append(name)
            filled[writer] += num_bytes[name] * box.num_elements // math.prod(tensors[name].shape)
    return writers


def plan_moves(
    sources: Mapping[int, Holding],
    targets: Mapping[int, Mapping[str, Box]],
    *,
    itemsizes: Mapping[str, int],
    max_bytes: int,
) -> list[Move]:
    """Plan moves that give each target worker its boxes. Each part goes once to each target, from one worker that holds it.

    A worker uses its own parts first; otherwise the holder that has sent the fewest bytes sends. Tensors are in the order of
    `sources`. No move exceeds max_bytes (with itemsizes[name] bytes per element), except a single row that does. Raises
    ShardError for a tensor that the sources lack, in whole or in part.
    """
    tensors = tensors_of(sources)
    wanted: dict[str, list[int]] = {}
    for worker in sorted(targets):
        for name in targets[worker]:
            wanted.setdefault(name, []).append(worker)
    if unknown := [name for name in wanted if name not in tensors]:
        raise ShardError(f"the source has no tensor {unknown[0]}" + _more(unknown))
    sent: Counter[int] = Counter()
    moves: list[Move] = []
    for name in tensors:
        if name not in wanted:
            continue
        stages = _boxes_by_stage(name, tensors[name].shape, sources)
        for target in wanted[name]:
            stage = sources[target].stage if target in sources else -1
            boxes = stages[stage if stage in stages else min(stages)]
            for box, holders in boxes.items():
                common = box.meet(targets[target][name])
                if common is None:
                    continue
                source = target if target in holders else min(holders, key=lambda worker: (sent[worker], worker))
                for part in common.split(max(1, max_bytes // itemsizes[name])):
                    moves.append(Move(name, source, target, part))
                    if source != target:
                        sent[source] += part.num_elements * itemsizes[name]
    return moves


def plan_rounds(moves: Sequence[Move], *, itemsizes: Mapping[str, int], max_bytes: int) -> list[list[Move]]:
    """Cut the moves, in order, into rounds. In each, a worker has at most max_bytes in transit, or a single larger move."""
    rounds: list[list[Move]] = []
    load: Counter[int] = Counter()
    for move in moves:
        num_bytes = move.box.num_elements * itemsizes[move.name] if move.source != move.target else 0
        full = any(load[worker] and load[worker] + num_bytes > max_bytes for worker in (move.source, move.target))
        if not rounds or full:
            rounds.append([])
            load.clear()
        rounds[-1].append(move)
        load[move.source] += num_bytes
        load[move.target] += num_bytes
    return rounds


def rounds_of(rounds: Sequence[Sequence[Move]], worker: int) -> list[list[Move]]:
    """The moves from and to one worker, round by round."""
    mine = ([move for move in moves if worker in (move.source, move.target)] for moves in rounds)
    return [moves for moves in mine if moves]


def _boxes_by_stage(
    name: str, shape: tuple[int, ...], sources: Mapping[int, Holding]
) -> dict[int, dict[Box, list[int]]]:
    """Stage -> box -> workers that hold it. A tied tensor is in two stages; the boxes of either stage cover it."""
    stages: dict[int, dict[Box, list[int]]] = {}
    for worker in sorted(sources):
        piece = sources[worker].pieces.get(name)
        if piece is not None and piece.box.num_elements:
            stages.setdefault(sources[worker].stage, {}).setdefault(piece.box, []).append(worker)
    for stage, boxes in stages.items():
        found, expected = sum(box.num_elements for box in boxes), Box.whole(shape).num_elements
        if found != expected:
            raise ShardError(f"tensor {name} of {expected} elements: its parts in stage {stage} have {found} in total")
    if not stages and Box.whole(shape).num_elements:
        raise ShardError(f"tensor {name}: no worker holds a part of it")
    return stages


def _more(names: Sequence[str]) -> str:
    return f" (nor {len(names) - 1} more)" if len(names) > 1 else ""
