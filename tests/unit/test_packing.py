"""Micro-batches hold every sequence once, keep the budget and balance tokens. Packed rows convert to sequences and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.sequence import SequenceSample
from asyncrl.model.attention import Rectangle
from asyncrl.model.packing import (
    MicroBatch,
    Packed,
    Prefix,
    SequenceBatch,
    cu_seqlens_of,
    plan_micro_batches,
    prefixes_of,
    run_indices,
)
from asyncrl.model.row_ranks import Predictions

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200), min_count=st.integers(0, 12))
def test_every_sequence_is_in_exactly_one_micro_batch_within_the_budget(lengths, max_tokens, min_count):
    plan = plan_micro_batches(lengths, max_tokens, min_count=min_count)
    assert sorted(i for batch in plan for i in batch.sequences) == list(range(len(lengths)))
    for batch in plan:
        assert batch.num_tokens == sum(lengths[i] for i in batch.sequences)
        assert batch.num_tokens <= max_tokens or len(batch.sequences) == 1
        assert list(batch.sequences) == sorted(batch.sequences)
    assert len(plan) >= min_count
    assert plan == plan_micro_batches(lengths, max_tokens, min_count=min_count)


@given(lengths=LENGTHS, max_tokens=st.integers(60, 200))
def test_the_number_of_micro_batches_is_near_the_minimum(lengths, max_tokens):
    """First fit, longest first, needs at most 11/9 of the minimum, plus 2/3."""
    fewest = -(-sum(lengths) // max_tokens)
    plan = plan_micro_batches(lengths, max_tokens, min_count=0)
    half = sum(1 for n in lengths if n > max_tokens // 2)  # no two of these fit together
    assert len(plan) <= 1.5 * max(fewest, half) + 1


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), min_count=st.integers(1, 12))
def test_tokens_are_balanced_if_the_budget_leaves_room(lengths, min_count):
    plan = plan_micro_batches(lengths, sum(lengths), min_count=min_count)
    assert len(plan) == min_count
    tokens = [batch.num_tokens for batch in plan]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert max(tokens) <= (4 / 3) * max(sum(lengths) / min_count, max(lengths), *_two_of(lengths, min_count))


def _two_of(lengths, count):
    """With more sequences than micro-batches, two of the count + 1 longest sequences share one."""
    longest = sorted(lengths, reverse=True)
    return [longest[count - 1] + longest[count]] if len(lengths) > count else [0]


def test_every_rank_can_have_as_many_micro_batches_as_the_rank_with_most():
    ranks = [[30, 10, 5], [60, 50, 40, 30, 20], []]
    count = max(len(plan_micro_batches(lengths, 64)) for lengths in ranks)
    plans = [plan_micro_batches(lengths, 64, min_count=count) for lengths in ranks]
    assert [len(plan) for plan in plans] == [4, 4, 4]
    assert [batch.num_tokens for batch in plans[0]] == [30, 10, 5, 0]
    assert [batch.sequences for batch in plans[2]] == [()] * 4


def test_a_sequence_longer_than_the_budget_gets_its_own_micro_batch():
    assert [batch.sequences for batch in plan_micro_batches([5, 100, 5], 10)] == [(1,), (0, 2)]
    assert [batch.num_tokens for batch in plan_micro_batches([5, 100, 5], 10, min_count=3)] == [100, 5, 5]


def test_the_budget_takes_precedence_over_balance():
    """4 + 4 and 3 + 3 + 2 fill two micro-batches exactly. Always adding to the least loaded one would give 4 + 3 + 2."""
    plan = plan_micro_batches([4, 4, 3, 3, 2], 8)
    assert [batch.num_tokens for batch in plan] == [8, 8]


def test_long_tails_are_balanced():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(5), np.log(300), 512)).astype(int).tolist()
    tokens = [batch.num_tokens for batch in plan_micro_batches(lengths, 4096)]
    assert len(tokens) == -(-sum(lengths) // 4096)
    assert max(tokens) - min(tokens) < 10


@pytest.mark.parametrize(("lengths", "max_tokens", "says"), [([3, 0], 10, "no token"), ([3], 0, "max_tokens_per_mb")])
def test_empty_sequences_and_an_empty_budget_are_refused(lengths, max_tokens, says):
    with pytest.raises(ValueError, match=says):
        plan_micro_batches(lengths, max_tokens)


def test_no_sequences_give_empty_micro_batches():
    assert plan_micro_batches([], 10, min_count=0) == []
    assert [(batch.sequences, batch.num_tokens) for batch in plan_micro_batches([], 10)] == [((), 0)]


def test_a_packed_row_by_hand():
    packed = Packed.of(np.array([1, 2, 3, 9, 7, 8]), [3, 1, 2], pad_to=8)
    assert packed.input_ids.tolist() == [[1, 2, 3, 9, 7, 8, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert packed.predictors.tolist() == [0, 1, 4]  # they predict 2, 3 and 8
    assert packed.predicted.tolist() == [1, 2, 5]
    assert packed.num_tokens == packed.segments.num_tokens == 6
    assert packed.segments.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_an_empty_micro_batch_is_one_token_of_padding():
    packed = Packed.of(np.array([], np.int64), [])
    assert packed.input_ids.tolist() == packed.position_ids.tolist() == [[0]]
    assert len(packed.predictors) == len(packed.predicted) == packed.num_tokens == 0
    assert Packed.of(np.array([], np.int64), [], pad_to=5).input_ids.shape == (1, 5)


def test_ids_that_do_not_match_the_lengths_are_refused():
    with pytest.raises(ValueError, match="3 token ids, but the sequences have 4"):
        Packed.of(np.array([1, 2, 3]), [2, 2])


@given(lengths=st.lists(st.integers(1, 20), max_size=10), padding=st.integers(0, 3))
def test_each_predictor_is_the_token_before_the_predicted_one(lengths, padding):
    ids = np.arange(1, sum(lengths) + 1)
    packed = Packed.of(ids, lengths, pad_to=len(ids) + padding)
    assert len(packed.predicted) == sum(lengths) - len(lengths)
    np.testing.assert_array_equal(packed.input_ids[0][packed.predictors], ids[packed.predicted.numpy()] - 1)
    starts = set(cu_seqlens_of(lengths)[:-1].tolist())
    assert starts.isdisjoint(packed.predicted.tolist())


@given(lengths=st.lists(st.integers(1, 300), max_size=60))
def test_attention_rectangles_hold_each_sequence_in_its_own_row_with_little_padding(lengths):
    segments = Packed.of(np.zeros(sum(lengths), np.int64), lengths).segments
    row_of_place = [
        (at, row) for at, one in enumerate(segments.rectangles) for row in range(one.rows) for _ in range(one.width)
    ]
    taken = set()
    for places in torch.split(segments.places, lengths):
        rows = {row_of_place[place] for place in places.tolist()}
        assert len(rows) == 1
        assert not rows & taken
        assert places.diff().eq(1).all()
        taken |= rows
        assert places[0] == 0 or row_of_place[places[0] - 1] not in rows  # a sequence starts at its row's first place
    assert sum(one.rows for one in segments.rectangles) == len(lengths)
    assert sum(segments.sizes) <= 1.1 * sum(lengths) + 4 * len(lengths)


@given(lengths=LENGTHS, data=st.data())
def test_run_indices_are_those_of_the_chosen_runs_in_order(lengths, data):
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True)) if lengths else []
    starts = cu_seqlens_of(lengths)
    expected = [t for i in chosen for t in range(starts[i], starts[i + 1])]
    assert run_indices(np.asarray(lengths, np.int64), chosen).tolist() == expected


def test_a_sequence_batch_splits_groups_and_keeps_keys_of_sequences():
    sample = SequenceSample.from_groups(
        ["a", "b"],
        [
            {"packed_input_ids": [[1, 2], [3]], "rewards": [1.0, 2.0], "task_ids": 5, "packed_prompts": [1]},
            {"packed_input_ids": [[4, 5, 6]], "rewards": [3.0], "task_ids": 6, "packed_prompts": [4]},
        ],
    )
    batch = SequenceBatch.of(sample)
    assert batch.lengths == (2, 1, 3)
    part = batch.select((1, 2))
    assert set(part) == {"packed_input_ids", "rewards"}
    assert part["packed_input_ids"].tolist() == [3, 4, 5, 6]
    assert part["rewards"].tolist() == [2.0, 3.0]
    assert batch.select(())["rewards"].dtype == np.float32


def test_keys_of_groups_are_dropped_even_if_each_group_has_one_sequence():
    groups = [{"packed_input_ids": [[1, 2]], "rewards": [1.0], "task_ids": 5, "packed_prompts": [1]}] * 2
    batch = SequenceBatch.of(SequenceSample.from_groups(["a", "b"], groups))
    assert set(batch.select((0, 1))) == {"packed_input_ids", "rewards"}


# ----------------------------------------------------------------------------------------------------- shared prefixes

# Of each group: (tokens of the prefix, tokens of each suffix)
GROUPS = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=8
)


def groups_of(groups) -> SequenceSample:
    """Groups whose sequences have exactly this prefix in common: the first token of each suffix is the number of its sequence."""
    rows = []
    for number, (prefix, suffixes) in enumerate(groups):
        ids = [np.array([number] * prefix + [100 + at] * n) for at, n in enumerate(suffixes)]
        rows.append({"packed_input_ids": ids})
    return SequenceSample.from_groups([str(number) for number in range(len(rows))], rows)


def costs_of(lengths) -> int:
    return sum(n * n for n in lengths)


@settings(deadline=None)
@given(
    groups=GROUPS,
    max_tokens=st.integers(1, 120),
    min_count=st.integers(0, 12),
)
def test_a_plan_with_shared_prefixes_keeps_the_budget_and_computes_each_token_of_a_micro_batch_once(
    groups, max_tokens, min_count
):
    batch = SequenceBatch.of(groups_of(groups))
    lengths, ids = batch.lengths, batch.data["packed_input_ids"]
    bounds = cu_seqlens_of(lengths)
    prefixes = prefixes_of(batch, costs_of)
    plan = plan_micro_batches(
        lengths,
        max_tokens,
        costs=[costs_of([n]) for n in lengths],
        min_count=min_count,
        prefixes=prefixes,
    )
    assert sorted(i for row in plan for i in row.sequences) == list(range(len(lengths)))
    assert len(plan) >= min_count
    whole = plan_micro_batches(lengths, max_tokens, min_count=min_count)
    assert sum(row.num_tokens for row in plan) <= sum(row.num_tokens for row in whole)
    for row in plan:
        own = [lengths[i] for i in row.sequences]
        assert row.num_tokens == sum(own) - sum(row.copies)
        assert row.num_tokens <= max_tokens or len(row.sequences) == 1
        tokens = [ids[bounds[i] : bounds[i + 1]] for i in row.sequences]
        for at, (source, num) in enumerate(row.shared):
            assert num < len(tokens[at])
            np.testing.assert_array_equal(tokens[at][:num], tokens[source][:num])
            assert row.shared[source][1] == 0
        packed = Packed.of(np.concatenate([*tokens, np.zeros(0, np.int64)]), own, shared=row.shared)
        places = np.arange(sum(own)) if packed.places is None else packed.places.numpy()
        assert packed.num_tokens == row.num_tokens == packed.segments.num_tokens
        assert set(places.tolist()) == set(range(row.num_tokens))
        np.testing.assert_array_equal(
            packed.input_ids[0].numpy()[places], np.concatenate([*tokens, np.zeros(0, np.int64)])
        )
        positions = np.concatenate([*(np.arange(n) for n in own), np.zeros(0, np.int64)])
        np.testing.assert_array_equal(packed.position_ids[0].numpy()[places], positions)
        predictor_of = dict(zip(packed.predicted.tolist(), packed.predictors.tolist(), strict=True))
        for token in np.flatnonzero(positions):
            assert predictor_of[places[token]] == places[token - 1]


@settings(deadline=None)
@given(groups=GROUPS)
def test_the_prefixes_of_groups_are_found(groups):
    found = {prefix.sequences: prefix for prefix in prefixes_of(SequenceBatch.of(groups_of(groups)), costs_of)}
    start = 0
    for tokens, suffixes in groups:
        members = tuple(range(start, start + len(suffixes)))
        start += len(suffixes)
        if tokens and len(suffixes) > 1:
            assert found.pop(members) == Prefix(members, tokens, costs_of([tokens]))
    assert not found


def test_sequences_of_several_first_turns_share_the_first_turn_of_each():
    """One group: two sequences of one turn, three of another, one of neither. Groups share nothing with each other."""
    texts = [[1, 2, 3, 4], [7, 7, 7, 1], [1, 2, 3, 5, 6], [7, 7, 7, 2], [9], [7, 7, 7, 7, 3]]
    group = {"packed_input_ids": [np.array(text) for text in texts]}
    batch = SequenceBatch.of(SequenceSample.from_groups(["a", "b"], [group, group]))
    found = prefixes_of(batch, sum)
    assert found == [
        Prefix((0, 2), 3, 3),
        Prefix((1, 3, 5), 3, 3),
        Prefix((6, 8), 3, 3),
        Prefix((7, 9, 11), 3, 3),
    ]


def test_equal_sequences_keep_their_last_token():
    """The token behind a prefix is predicted from it: each sequence has one."""
    batch = SequenceBatch.of(SequenceSample.from_groups(["a"], [{"packed_input_ids": [np.array([1, 2, 3])] * 3}]))
    assert prefixes_of(batch, sum) == [Prefix((0, 1, 2), 2, 2)]


def test_groups_stay_together_as_far_as_the_budget_allows():
    """Prefixes of 50 tokens, suffixes of 10. A budget of 90 takes four suffixes, and 130 all eight of a group."""
    lengths = [60] * 16
    prefixes = [Prefix(tuple(range(8)), 50, 50), Prefix(tuple(range(8, 16)), 50, 50)]
    small, exact, large = (plan_micro_batches(lengths, n, prefixes=prefixes) for n in (90, 130, 260))
    assert [(row.sequences, row.num_tokens) for row in small] == [
        (tuple(range(start, start + 8, 2)), 90) for start in (0, 1, 8, 9)
    ]
    assert [(row.sequences, row.num_tokens) for row in exact] == [
        (tuple(range(8)), 130),
        (tuple(range(8, 16)), 130),
    ]
    assert [(row.sequences, row.num_tokens) for row in large] == [(tuple(range(16)), 260)]
    of_stages = plan_micro_batches(lengths, 260, prefixes=prefixes, min_count=3)
    assert [len(row.sequences) for row in of_stages] == [8, 4, 4]
    assert sum(row.num_tokens for row in of_stages) == 130 + 90 + 90
    too_small = plan_micro_batches(lengths, 40, prefixes=prefixes)
    assert [row.sequences for row in too_small] == [(i,) for i in range(16)]
    assert all(row.shared == () for row in too_small)


def test_a_row_with_a_shared_prefix_by_hand():
    """1 2 3, 1 2 7 8, and 5 6."""
    ids, shared = np.array([1, 2, 3, 1, 2, 7, 8, 5, 6]), ((0, 0), (0, 2), (2, 0))
    packed = Packed.of(ids, [3, 4, 2], pad_to=8, shared=shared)
    assert packed.input_ids.tolist() == [[1, 2, 3, 7, 8, 5, 6, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 1, 0]]
    assert packed.predicted.tolist() == [1, 2, 3, 4, 6]
    assert packed.predictors.tolist() == [0, 1, 1, 3, 5]  # 2 predicts 3 and 7
    assert packed.places.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]
    # 1 2, then 3 and 7 8, both behind it, and 5 6
    segments = packed.segments
    assert segments.cu_seqlens.tolist() == [0, 2, 3, 5, 7]
    assert segments.shared.cu_seqlens.tolist() == [0, 2, 5, 9, 11]
    assert segments.shared.places.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6]
    whole, prefix, behind = segments.rectangles
    assert (whole, prefix) == (Rectangle(1, 2), Rectangle(1, 2, is_prefix=True))
    assert (behind.rows, behind.width, behind.prefix, behind.parents.tolist()) == (2, 2, 2, [0, 0])
    assert segments.places.tolist() == [2, 3, 6, 4, 5, 0, 1]
    assert MicroBatch((0, 1, 2), 7, shared).copies == [2]


class FakeRanks:
    """One of several context ranks."""

    def __init__(self, part: int, size: int) -> None:
        self.part, self.size = part, size


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 5),
    num_tokens=st.integers(1, 7),
    data=st.data(),
)
def test_each_prediction_is_made_by_the_rank_that_has_its_predictor(size, num_tokens, data):
    """Predictors come in any order, and several predictions may have the same one (shared prefixes)."""
    places = st.integers(0, size * num_tokens - 1)
    pairs = data.draw(st.lists(st.tuples(places, places), max_size=20))
    predictors, predicted = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    parts = [
        Predictions.of(predictors, predicted, num_tokens=num_tokens, ranks=FakeRanks(part, size), device="cpu")
        for part in range(size)
    ]
    assert len({len(part.predictors) for part in parts}) == 1
    made = [
        (number * num_tokens + int(predictor), int(token))
        for number, part in enumerate(parts)
        for predictor, token in zip(part.predictors, part.predicted, strict=True)
    ]
    for part in parts:
        assert [made[place] for place in part.order] == pairs
        assert all(0 <= int(predictor) < num_tokens for predictor in part.predictors)
