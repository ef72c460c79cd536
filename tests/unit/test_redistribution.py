"""Assignment of ids to ranks, and redistribution plans: executed on dictionaries, over random layouts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.dataflow.redistribution import assign, members, plan_redistribution, transfers
from asyncrl.protocol.calls import RedistribStep

KEYS = ("input_ids", "logprobs", "values")


def execute(steps, state):
    """Run the steps on `state`: worker -> set of (id, key). Returns the sent pairs as (source, target, id, key)."""
    sent = []
    for step in steps:
        for transfer in transfers(step):
            for target in transfer.targets:
                for pair in ((group, key) for group in transfer.ids for key in transfer.keys):
                    assert pair in state[transfer.source], "a worker sends a pair that it does not have"
                    state[target].add(pair)
                    sent.append((transfer.source, target, *pair))
    return sent


@st.composite
def situations(draw):
    """(workers, ids needed by worker, keys, holders). Every pair has a holder; any worker may need any ids."""
    workers = list(range(draw(st.integers(1, 6))))
    ids = [f"t{i}" for i in range(draw(st.integers(0, 8)))]
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True))
    some = st.sets(st.sampled_from(workers), min_size=1)
    holders = {group: {key: draw(some) for key in KEYS} for group in ids}
    replicas = draw(st.lists(st.lists(st.sampled_from(workers), unique=True, min_size=1), max_size=4))
    needed: dict[int, list[str]] = {}
    for replica in replicas:  # all workers of a replica need the same ids
        part = draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
        for worker in replica:
            needed.setdefault(worker, part)
    return workers, needed, keys, holders


@given(situations())
def test_a_plan_moves_exactly_the_missing_pairs(situation):
    workers, needed, keys, holders = situation
    before = {w: {(i, k) for i, of in holders.items() for k, have in of.items() if w in have} for w in workers}
    state = {worker: set(pairs) for worker, pairs in before.items()}
    steps = plan_redistribution(needed, keys, holders)
    sent = execute(steps, state)
    missing = {
        (worker, group, key)
        for worker, ids in needed.items()
        for group in ids
        for key in keys
        if (group, key) not in before[worker]
    }
    assert Counter((target, group, key) for _, target, group, key in sent) == Counter(missing)
    assert all((group, key) in before[source] for source, _, group, key in sent)  # received pairs are not forwarded
    for worker, ids in needed.items():
        assert {(group, key) for group in ids for key in keys} <= state[worker]
    assert all(len(step.workers) > 1 for step in steps if step.kind == "bcast")
    assert set(members(steps)) == {worker for source, target, *_ in sent for worker in (source, target)}


def held(**where):
    """held(t0=[0]): worker 0 holds every key of t0."""
    return {group: {key: workers for key in KEYS} for group, workers in where.items()}


def test_workers_that_need_the_same_ids_get_a_bcast():
    steps = plan_redistribution({1: ["a", "b"], 2: ["a", "b"]}, KEYS, held(a=[0], b=[0]))
    assert steps == [RedistribStep("bcast", 0, [1, 2], [["a", "b"]], list(KEYS))]


def test_workers_that_need_different_ids_of_one_holder_get_a_scatter():
    steps = plan_redistribution({1: ["a", "c"], 2: ["b"]}, ["values"], held(a=[0], b=[0], c=[0]))
    assert steps == [RedistribStep("scatter", 0, [1, 2], [["a", "c"], ["b"]], ["values"])]


def test_a_worker_that_needs_ids_of_several_holders_gets_a_gather():
    steps = plan_redistribution({3: ["a", "b", "c"]}, ["values"], held(a=[0], b=[1], c=[0]))
    assert steps == [RedistribStep("gather", 3, [0, 1], [["a", "c"], ["b"]], ["values"])]


def test_pairs_that_a_worker_already_has_are_not_sent():
    holders = held(a=[0], b=[0, 1])
    holders["a"]["input_ids"] = [0, 1]
    steps = plan_redistribution({1: ["a", "b"]}, KEYS, holders)
    assert steps == [RedistribStep("scatter", 0, [1], [["a"]], ["logprobs", "values"])]
    assert plan_redistribution({0: ["a", "b"], 1: ["b"]}, KEYS, holders) == []


def test_holders_share_the_sending():
    steps = plan_redistribution({2: list("abcd")}, KEYS, held(a=[0, 1], b=[0, 1], c=[0, 1], d=[0, 1]))
    assert steps == [RedistribStep("gather", 2, [0, 1], [["a", "c"], ["b", "d"]], list(KEYS))]


def test_a_broadcast_to_two_workers_counts_twice():
    steps = plan_redistribution({2: ["a", "b", "c"], 3: ["a"]}, ["values"], held(a=[0, 1], b=[0, 1], c=[0, 1]))
    assert steps == [
        RedistribStep("bcast", 0, [2, 3], [["a"]], ["values"]),
        RedistribStep("scatter", 1, [2], [["b", "c"]], ["values"]),
    ]


def test_a_pair_without_a_holder_is_named():
    with pytest.raises(ValueError, match=r"'values' of id 'a', which the workers \[1\] need"):
        plan_redistribution({1: ["a"]}, ["values"], {"a": {"values": [], "logprobs": [0]}})
    with pytest.raises(ValueError, match="'gone'"):
        plan_redistribution({1: ["gone"]}, ["values"], {})


def test_an_inconsistent_step_is_refused():
    with pytest.raises(ValueError, match="2 workers; it needs one for each worker"):
        transfers(RedistribStep("scatter", 0, [1, 2], [["a"]], ["values"]))
    with pytest.raises(ValueError, match="a bcast has 2 lists of ids; it must have exactly one"):
        transfers(RedistribStep("bcast", 0, [1, 2], [["a"], ["b"]], ["values"]))


# ------------------------------------------------------------------------------------------------------------ assignment


@st.composite
def batches(draw):
    num_ranks = draw(st.integers(1, 5))
    tokens = {f"t{i}": draw(st.integers(0, 50)) for i in range(draw(st.integers(0, 12)))}
    holders = {group: draw(st.sets(st.integers(0, num_ranks - 1))) for group in tokens}
    return list(tokens), tokens, holders, num_ranks, draw(st.sampled_from([0.0, 0.1, 0.5, 2.0]))


@given(batches())
def test_every_id_gets_one_rank_loads_are_balanced_and_no_move_is_needless(batch):
    ids, tokens, holders, num_ranks, tolerance = batch
    parts = assign(ids, tokens, holders, num_ranks, tolerance)
    assert len(parts) == num_ranks
    assert sorted(group for part in parts for group in part) == sorted(ids)
    assert all(part == [group for group in ids if group in part] for part in parts)  # canonical order
    loads = [sum(tokens[group] for group in part) for part in parts]
    limit = (1 + tolerance) * sum(loads) / num_ranks
    fullest = loads.index(max(loads))
    if max(loads) > limit:  # no move of a single id would help
        gap = max(loads) - min(loads)
        assert all(tokens[group] == 0 or tokens[group] >= gap for group in parts[fullest])
        return
    for rank, part in enumerate(parts):
        for group in part:
            if holders[group] and rank not in holders[group]:
                assert all(loads[home] + tokens[group] > limit for home in holders[group])


@given(batches())
def test_ids_stay_with_their_holders_while_the_loads_are_balanced(batch):
    ids, tokens, holders, num_ranks, tolerance = batch
    settled = {group: [min(holders[group], default=0)] for group in ids}
    here = [[group for group in ids if settled[group] == [rank]] for rank in range(num_ranks)]
    loads = [sum(tokens[group] for group in part) for part in here]
    if max(loads) <= (1 + tolerance) * sum(loads) / num_ranks:
        assert assign(ids, tokens, settled, num_ranks, tolerance) == here
    else:
        parts = assign(ids, tokens, settled, num_ranks, tolerance)
        assert max(sum(tokens[group] for group in part) for part in parts) <= max(loads)


def test_no_more_tokens_move_than_the_tolerance_requires():
    tokens = {"a": 50, "b": 30, "c": 12, "d": 8}
    at_0 = {group: [0] for group in tokens}
    assert assign(list(tokens), tokens, at_0, 2, tolerance=0.1) == [["b", "c", "d"], ["a"]]
    assert assign(list(tokens), tokens, at_0, 2, tolerance=0.4) == [["a", "c", "d"], ["b"]]
    assert assign(list(tokens), tokens, at_0, 2, tolerance=1.0) == [list("abcd"), []]


def test_more_ranks_than_ids():
    assert assign(["a", "b"], {"a": 5, "b": 7}, {}, 4, tolerance=0.1) == [["b"], ["a"], [], []]
    assert assign([], {}, {}, 2, tolerance=0.1) == [[], []]
    with pytest.raises(ValueError, match="num_ranks is 0; use at least 1"):
        assign([], {}, {}, 0, tolerance=0.1)


def test_ids_without_a_holder_are_distributed_evenly():
    tokens = {f"t{i}": 10 + i for i in range(12)}
    parts = assign(list(tokens), tokens, {}, 3, tolerance=0.1)
    loads = [sum(tokens[group] for group in part) for part in parts]
    assert max(loads) <= 1.1 * sum(loads) / 3
