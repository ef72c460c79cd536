"""Micro-batches: every sequence exactly once, the budget kept, and the way into rows and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.sequence import SequenceSample
from asyncrl.model.packing import Rows, SequenceBatch, cu_seqlens_of, plan_micro_batches, run_indices

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200), min_fill=st.floats(0, 1))
def test_every_sequence_is_in_exactly_one_micro_batch_within_the_budget(lengths, max_tokens, min_fill):
    plan = plan_micro_batches(lengths, max_tokens, min_fill=min_fill)
    assert sorted(i for batch in plan for i in batch.sequences) == list(range(len(lengths)))
    for batch in plan:
        assert batch.width == max(lengths[i] for i in batch.sequences)
        assert batch.num_padded_tokens <= max_tokens or len(batch.sequences) == 1
        assert min(lengths[i] for i in batch.sequences) >= min_fill * batch.width
        assert list(batch.sequences) == sorted(batch.sequences)
    assert plan == plan_micro_batches(lengths, max_tokens, min_fill=min_fill)


def test_a_sequence_longer_than_the_budget_gets_its_own_micro_batch():
    plan = plan_micro_batches([5, 100, 5], 10)
    assert [batch.sequences for batch in plan] == [(1,), (0, 2)]


def test_first_fit_fills_an_earlier_micro_batch_first():
    plan = plan_micro_batches([10, 10, 10, 9, 8], 20)
    assert [batch.sequences for batch in plan] == [(0, 1), (2, 3), (4,)]
    assert [batch.sequences for batch in plan_micro_batches([10, 9, 5, 8], 40)] == [(0, 1, 3), (2,)]


def test_padding_is_bounded_on_long_tails():
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(5), np.log(300), 512)).astype(int).tolist()
    padded = sum(batch.num_padded_tokens for batch in plan_micro_batches(lengths, 16384))
    assert padded < 1.15 * sum(lengths)
    assert 512 * max(lengths) > 3 * sum(lengths)  # what padding to the longest costs


@pytest.mark.parametrize(("lengths", "max_tokens", "says"), [([3, 0], 10, "no token"), ([3], 0, "max_tokens_per_mb")])
def test_what_cannot_be_planned_is_refused(lengths, max_tokens, says):
    with pytest.raises(ValueError, match=says):
        plan_micro_batches(lengths, max_tokens)


def test_nothing_makes_no_micro_batch():
    assert plan_micro_batches([], 10) == []


def test_rows_by_hand():
    rows = Rows.of(np.array([1, 2, 3, 7, 8]), [3, 2], 4)
    np.testing.assert_array_equal(rows.input_ids, [[1, 2, 3, 0], [7, 8, 0, 0]])
    np.testing.assert_array_equal(rows.predictors, [0, 1, 4])  # they predict 2, 3 and 8
    np.testing.assert_array_equal(rows.predicted, [1, 2, 4])


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=10), padding=st.integers(0, 3))
def test_each_predictor_is_the_token_before_the_predicted_one(lengths, padding):
    packed = np.arange(1, sum(lengths) + 1)
    rows = Rows.of(packed, lengths, max(lengths) + padding)
    assert len(rows.predicted) == sum(lengths) - len(lengths)
    np.testing.assert_array_equal(rows.input_ids.ravel()[rows.predictors], packed[rows.predicted] - 1)


@given(lengths=LENGTHS, data=st.data())
def test_run_indices_are_the_runs_one_after_another(lengths, data):
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True)) if lengths else []
    starts = cu_seqlens_of(lengths)
    expected = [t for i in chosen for t in range(starts[i], starts[i + 1])]
    assert run_indices(np.asarray(lengths, np.int64), chosen).tolist() == expected


def test_a_sequence_batch_cuts_through_groups_and_keeps_keys_of_sequences():
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
