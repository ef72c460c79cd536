"""Plans for moving parts of tensors between workers: executed on arrays, over random layouts."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from asyncrl.model.shards import (
    Box,
    Holding,
    Move,
    Piece,
    ShardError,
    plan_moves,
    plan_owners,
    plan_rounds,
    plan_writers,
    tensors_of,
)

SHAPES = {"embed": (7, 5), "q": (6, 4), "norm": (3,), "o": (4, 6), "experts": (3, 2, 5), "scale": ()}


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Return (start, length) of each part, as torch.chunk cuts: the last parts may be shorter or empty."""
    each = -(-length // parts)
    return [(min(i * each, length), min(each, max(0, length - i * each))) for i in range(parts)]


def layout(rng: random.Random, workers: list[int], stages: int, data: int, tensor: int) -> dict[int, Holding]:
    """A model on pipe x data x tensor ranks. A stage has some of the tensors; each may be cut by tensor ranks, then by data
    ranks."""
    names = list(SHAPES)
    cuts = {name: (rng.choice([None, *range(len(shape))]), rng.random() < 0.7) for name, shape in SHAPES.items()}
    holdings = {}
    for rank, worker in enumerate(workers):
        stage, rest = divmod(rank, data * tensor)
        d, m = divmod(rest, tensor)
        pieces = {}
        for number, name in enumerate(names):
            tied = name == "embed" and stage == stages - 1
            if number * stages // len(names) != stage and not tied:
                continue
            shape, (tensor_dim, by_data) = SHAPES[name], cuts[name]
            start, size = [0] * len(shape), list(shape)
            if tensor_dim is not None:
                start[tensor_dim], size[tensor_dim] = cut(shape[tensor_dim], tensor)[m]
            if by_data and shape:
                offset, length = cut(size[0], data)[d]
                start[0], size[0] = start[0] + offset, length
            pieces[name] = Piece("float32", shape, Box(tuple(start), tuple(size)))
        holdings[worker] = Holding(stage, pieces)
    return holdings


def arrays(holdings: dict[int, Holding], whole: dict[str, np.ndarray]) -> dict[int, dict[str, np.ndarray]]:
    return {
        worker: {
            name: whole[name][piece.box.within(Box.whole(piece.shape))].copy() for name, piece in held.pieces.items()
        }
        for worker, held in holdings.items()
    }


def random_layout(rng: random.Random, world: int) -> dict[int, Holding]:
    stages, data, tensor = rng.choice([(1, 1, 1), (1, 3, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2), (1, 2, 2), (3, 1, 2)])
    return layout(rng, sorted(rng.sample(range(world), stages * data * tensor)), stages, data, tensor)


@pytest.mark.parametrize("seed", range(60))
def test_every_rank_gets_its_parts_once_and_rounds_keep_to_the_byte_limit(seed: int) -> None:
    rng = random.Random(seed)
    whole = {name: np.random.default_rng(seed).random(shape) for name, shape in SHAPES.items()}
    sources, targets = random_layout(rng, 10), random_layout(rng, 10)
    have = arrays(sources, whole)
    wanted = {worker: {name: piece.box for name, piece in held.pieces.items()} for worker, held in targets.items()}
    itemsizes = dict.fromkeys(SHAPES, 4)
    max_bytes = rng.choice([20, 60, 10**6])
    moves = plan_moves(sources, wanted, itemsizes=itemsizes, max_bytes=max_bytes)
    got = {worker: {name: np.full(box.size, np.nan) for name, box in boxes.items()} for worker, boxes in wanted.items()}
    written = Counter()
    rounds = plan_rounds(moves, itemsizes=itemsizes, max_bytes=max_bytes)
    assert [move for moves_of_round in rounds for move in moves_of_round] == moves
    for moves_of_round in rounds:
        load = Counter()
        for move in moves_of_round:
            piece = sources[move.source].pieces[move.name]
            part = have[move.source][move.name][move.box.within(piece.box)]
            assert part.shape == move.box.size
            got[move.target][move.name][move.box.within(wanted[move.target][move.name])] = part
            written[move.target, move.name] += move.box.num_elements
            if move.target != move.source:
                load.update({worker: 4 * move.box.num_elements for worker in (move.source, move.target)})
            if (
                move.target in sources and move.name in sources[move.target].pieces
            ):  # a target that holds some of the tensor takes this from itself
                own = sources[move.target].pieces[move.name].box.meet(move.box)
                assert own is None or move.source == move.target
        assert all(n <= max(max_bytes, 4 * 10) for n in load.values())  # a row of the widest tensor has 10 elements
    for worker, expected in arrays(targets, whole).items():
        for name, array in expected.items():
            np.testing.assert_array_equal(got[worker][name], array)
            assert written[worker, name] == array.size  # each element once


@pytest.mark.parametrize("seed", range(20))
def test_every_part_is_written_once(seed: int) -> None:
    rng = random.Random(seed)
    holdings = random_layout(rng, 8)
    sizes = {name: 4 * Box.whole(shape).num_elements for name, shape in SHAPES.items()}
    seen = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
    for worker, names in plan_writers(holdings, sizes).items():
        for name in names:
            seen[name][holdings[worker].pieces[name].box.within(Box.whole(SHAPES[name]))] += 1
    assert all((array == 1).all() for array in seen.values())


@pytest.mark.parametrize("seed", range(20))
def test_owners_hold_a_part_and_have_similar_loads(seed: int) -> None:
    rng = random.Random(seed)
    shapes = {f"layer.{i}": (rng.randint(1, 60),) for i in range(20)}
    pieces = {name: Piece("float32", shape, Box.whole(shape)) for name, shape in shapes.items()}
    early, late = dict(list(pieces.items())[:9]), dict(list(pieces.items())[9:])
    holdings = {4: Holding(0, early), 5: Holding(0, early), 6: Holding(1, late), 7: Holding(1, late)}
    sizes = {name: shape[0] for name, shape in shapes.items()}
    owners = plan_owners(holdings, sizes)
    filled = Counter()
    for name, owner in owners.items():
        assert name in holdings[owner].pieces
        filled[owner] += sizes[name]
    for one, other, stage in ((4, 5, early), (6, 7, late)):
        assert filled[one] + filled[other] == sum(sizes[name] for name in stage)
        assert abs(filled[one] - filled[other]) <= max(sizes[name] for name in stage)
    assert owners == plan_owners(dict(reversed(holdings.items())), sizes)  # the order of the holdings has no influence


def test_a_stage_that_lacks_a_part_is_named() -> None:
    holdings = {0: Holding(0, {"q": Piece("float32", (4,), Box((0,), (2,)))}), 1: Holding(0, {})}
    with pytest.raises(ShardError, match="tensor q of 4 elements: its parts in stage 0 have 2 in total"):
        plan_moves(holdings, {1: {"q": Box.whole((4,))}}, itemsizes={"q": 4}, max_bytes=8)
    with pytest.raises(ShardError, match=r"no tensor lm_head$"):
        plan_moves(holdings, {1: {"lm_head": Box.whole((4,))}}, itemsizes={"lm_head": 4}, max_bytes=8)
    other = {**holdings, 1: Holding(1, {"q": Piece("float32", (5,), Box.whole((5,)))})}
    with pytest.raises(ShardError, match=r"tensor q has the shape \(5,\) on one rank, \(4,\) on another"):
        tensors_of(other)


def test_large_parts_are_sent_in_pieces() -> None:
    box = Box((2, 0), (5, 3))
    assert list(box.split(6)) == [Box((2, 0), (2, 3)), Box((4, 0), (2, 3)), Box((6, 0), (1, 3))]
    assert list(box.split(1)) == [Box((row, 0), (1, 3)) for row in range(2, 7)]
    assert list(Box((), ()).split(0)) == [Box((), ())]
    move = Move("q", 0, 1, box)
    assert plan_rounds([move, move], itemsizes={"q": 4}, max_bytes=8) == [[move], [move]]
