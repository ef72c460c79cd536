"""SequenceSample: splitting, joining, repeating and renaming preserve the data. Inconsistent data is refused."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_samples import bits_of, random_samples

from asyncrl.data.sequence import KEY_SPECS, SequenceSample


def group(lengths: list[int], start: int = 0) -> dict[str, Any]:
    """A group whose token values count up from start, so that all values are distinct."""
    bounds = np.cumsum([start, *lengths])
    runs = [np.arange(a, b) for a, b in pairwise(bounds)]
    return {
        "packed_input_ids": runs,
        "packed_prompts": runs[0][:1] if runs else [],
        "packed_logprobs": [run.astype(np.float32) for run in runs],
        "loss_mask": [run % 2 == 0 for run in runs],
        "rewards": [float(n) for n in lengths],
        "seq_no_eos_mask": [n > 2 for n in lengths],
        "task_ids": start,
        "birth_time": 0.5 + start,
        "my_pairs": [np.array([start, n], np.int16) for n in lengths],  # an unknown key with lengths of its own
    }


def make_sample(*group_lengths: list[int]) -> SequenceSample:
    return SequenceSample.from_groups(
        [f"id{i}" for i in range(len(group_lengths))],
        [group(lengths, 100 * i) for i, lengths in enumerate(group_lengths)],
    )


@pytest.fixture
def sample() -> SequenceSample:
    return make_sample([3, 2], [4], [1, 1, 5])


samples = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=9).map(
    lambda groups: make_sample(*groups)
)
EMPTY = make_sample([1]).select_ids([])

# ------------------------------------------------------------------------------------------------------------------ contents


def test_a_sample_is_packed_in_the_order_of_its_ids(sample: SequenceSample) -> None:
    assert sample.ids == ("id0", "id1", "id2")
    assert sample.data["packed_input_ids"].tolist() == [
        0,
        1,
        2,
        3,
        4,
        100,
        101,
        102,
        103,
        200,
        201,
        202,
        203,
        204,
        205,
        206,
    ]
    assert sample.seqlens["packed_input_ids"] == [[3, 2], [4], [1, 1, 5]]
    assert sample.seqlens["rewards"] == [[1, 1], [1], [1, 1, 1]]
    assert sample.seqlens["task_ids"] == sample.seqlens["packed_prompts"] == [[1], [1], [1]]
    assert sample.data["task_ids"].tolist() == [0, 100, 200]
    assert sample.seqlens["my_pairs"] == [[2, 2], [2], [2, 2, 2]]
    for key, array in sample.data.items():
        assert key == "my_pairs" or array.dtype == KEY_SPECS[key].dtype


def test_counts_and_bounds(sample: SequenceSample) -> None:
    assert (sample.num_ids, sample.num_sequences(), sample.total_tokens(), sample.total_tokens("rewards")) == (
        3,
        6,
        16,
        6,
    )
    assert sample.cu_seqlens().tolist() == [0, 3, 5, 9, 10, 11, 16]
    assert sample.cu_seqlens().dtype == np.int64
    assert EMPTY.cu_seqlens().tolist() == [0]
    assert sample.num_bytes == sum(array.nbytes for array in sample.data.values())


def test_the_sizes_of_a_sample() -> None:
    sample = make_sample([3, 2], [4]).select_keys(["loss_mask", "packed_input_ids", "rewards"])
    sizes = sample.sizes()
    assert sizes == {
        "num_ids": 2,
        "num_sequences": 3,
        "num_tokens": 9,
        "num_bytes": 93,
        "num_bytes_by_key": {"loss_mask": 9, "packed_input_ids": 72, "rewards": 12},
        "mean_bytes_of_id": 46.5,
        "max_bytes_of_id": 53,
    }
    assert json.loads(json.dumps(sizes)) == sizes
    assert str(sample) == (
        "2 ids, 3 sequences, 9 tokens, 93 bytes; of an id: mean 46, max 53\n"
        "packed_input_ids: 72 bytes of int64\nrewards: 12 bytes of float32\nloss_mask: 9 bytes of bool"
    )
    assert sample.select_keys(["rewards"]).sizes()["num_tokens"] == 0
    assert str(SequenceSample((), {}, {})) == "0 ids, 0 sequences, 0 tokens, 0 bytes; of an id: mean 0, max 0"


def test_slices_are_views_of_each_sequence(sample: SequenceSample) -> None:
    slices = sample.slices("packed_input_ids")
    assert [[run.tolist() for run in runs] for runs in slices[:2]] == [[[0, 1, 2], [3, 4]], [[100, 101, 102, 103]]]
    assert np.shares_memory(slices[2][2], sample.data["packed_input_ids"])


def test_equality_compares_everything(sample: SequenceSample) -> None:
    assert sample == make_sample([3, 2], [4], [1, 1, 5])
    assert sample != make_sample([3, 2], [4], [1, 5, 1])
    assert sample != sample.select_ids(["id1", "id0", "id2"])
    assert sample != sample.select_keys(["rewards"])
    assert sample != "sample"
    nan = sample.derive({"values": np.full(16, np.nan, np.float32)})
    assert nan == sample.derive({"values": np.full(16, np.nan, np.float32)})
    with pytest.raises(TypeError):
        hash(sample)


def test_numpy_integers_as_lengths_become_plain_ones() -> None:
    lengths: Any = [np.array([2, 1])]
    sample = SequenceSample(("a",), {"x": lengths}, {"x": np.zeros(3)})
    assert sample.seqlens == {"x": [[2, 1]]}
    assert all(type(n) is int for n in sample.seqlens["x"][0])


# -------------------------------------------------------------------------------------------------------------- round trips


@settings(deadline=None, max_examples=50)
@given(samples)
def test_gather_undoes_unpack(sample: SequenceSample) -> None:
    parts = sample.unpack()
    assert [part.ids for part in parts] == [(group_id,) for group_id in sample.ids]
    assert SequenceSample.gather(parts) == sample


@settings(deadline=None, max_examples=50)
@given(samples, st.integers(1, 12))
def test_gather_undoes_split(sample: SequenceSample, n: int) -> None:
    parts = sample.split(n)
    counts = [part.num_ids for part in parts]
    assert len(parts) == n
    assert max(counts) - min(counts) <= 1
    assert SequenceSample.gather(parts) == sample


@settings(deadline=None, max_examples=50)
@given(samples, st.integers(1, 20))
def test_split_tokens_keeps_to_the_budget(sample: SequenceSample, max_tokens: int) -> None:
    parts = sample.split_tokens(max_tokens)
    assert SequenceSample.gather(parts) == sample
    assert all(part.total_tokens() <= max_tokens or part.num_ids == 1 for part in parts)
    for part, following in pairwise(parts):  # no part has room for the next id
        assert part.total_tokens() + sum(following.seqlens["packed_input_ids"][0]) > max_tokens


@settings(deadline=None, max_examples=50)
@given(samples, st.integers(1, 5))
def test_split_balanced_gives_parts_of_similar_size(sample: SequenceSample, n: int) -> None:
    parts = sample.split_balanced(n)
    assert len(parts) == n
    assert SequenceSample.gather(parts).select_ids(sample.ids) == sample
    tokens = [part.total_tokens() for part in parts]
    longest = max(sum(lengths) for lengths in sample.seqlens["packed_input_ids"])
    assert max(tokens) - min(tokens) <= longest
    assert sample.num_ids < n or all(part.num_ids for part in parts)
    for part in parts:
        assert list(part.ids) == sorted(part.ids, key=sample.ids.index)


def test_split_balanced_of_an_example() -> None:
    parts = make_sample([9], [1], [5], [4], [1]).split_balanced(2)
    assert [part.ids for part in parts] == [("id0", "id1"), ("id2", "id3", "id4")]


def test_empty_samples_split_and_gather() -> None:
    assert [part.num_ids for part in EMPTY.split(2)] == [0, 0]
    assert EMPTY.split_tokens(5) == []
    assert EMPTY.unpack() == []
    assert EMPTY.split_balanced(2) == [EMPTY, EMPTY]
    assert SequenceSample.gather([EMPTY, make_sample([2]), EMPTY]) == make_sample([2])
    assert {key: array.dtype for key, array in EMPTY.data.items()} == {
        k: a.dtype for k, a in make_sample([2]).data.items()
    }
    assert SequenceSample.from_groups([], []).num_ids == 0


@settings(deadline=None, max_examples=50)
@given(samples, st.data())
def test_select_ids_takes_any_ids_in_any_order(sample: SequenceSample, data: st.DataObject) -> None:
    chosen = data.draw(st.permutations(sample.ids).flatmap(lambda ids: st.integers(0, len(ids)).map(lambda n: ids[:n])))
    selected = sample.select_ids(chosen)
    assert selected.ids == tuple(chosen)
    by_id = {part.ids[0]: part for part in sample.unpack()}
    for part in selected.unpack():
        assert part == by_id[part.ids[0]]


@settings(deadline=None, max_examples=50)
@given(samples, st.data())
def test_update_reorders_the_other_sample(sample: SequenceSample, data: st.DataObject) -> None:
    ours, theirs = ["packed_input_ids", "task_ids"], ["rewards", "my_pairs", "packed_logprobs"]
    order = data.draw(st.permutations(sample.ids))
    updated = sample.select_keys(ours).update(sample.select_keys(theirs).select_ids(order))
    assert updated == sample.select_keys([*ours, *theirs])


def test_update_replaces_a_key(sample: SequenceSample) -> None:
    other = sample.derive({"packed_logprobs": np.full(16, 7, np.float32)})
    assert sample.update(other).data["packed_logprobs"].tolist() == [7] * 16
    assert sample.data["packed_logprobs"][0] == 0


@settings(deadline=None, max_examples=50)
@given(random_samples(), st.data())
def test_union_joins_keys_and_reorders_the_other_sample(sample: SequenceSample, data: st.DataObject) -> None:
    ours = data.draw(st.sets(st.sampled_from(sample.keys)))
    theirs = data.draw(st.sets(st.sampled_from(sample.keys)))  # may have keys of ours, with equal bits
    other = sample.select_keys(theirs).select_ids(data.draw(st.permutations(sample.ids)))
    assert bits_of(sample.select_keys(ours).union(other)) == bits_of(sample.select_keys(ours | theirs))


@settings(deadline=None, max_examples=50)
@given(random_samples(min_ids=1), st.integers(1, 4), st.data())
def test_gather_undoes_the_splits_of_any_dtype(sample: SequenceSample, n: int, data: st.DataObject) -> None:
    for parts in (sample.unpack(), sample.split(n), sample.split_tokens(n), sample.split_balanced(n)):
        whole = SequenceSample.gather(data.draw(st.permutations(parts)))
        assert bits_of(whole.select_ids(sample.ids)) == bits_of(sample)


@settings(deadline=None, max_examples=50)
@given(random_samples(), st.integers(1, 3), st.booleans())
def test_repeat_copies_each_id(sample: SequenceSample, n: int, interleave: bool) -> None:
    repeated = sample.repeat(n, interleave=interleave)
    pairs = [(group_id, copy) for group_id in sample.ids for copy in range(n)]
    expected = pairs if interleave else sorted(pairs, key=lambda pair: pair[1])
    assert repeated.ids == tuple(f"{group_id}#{copy}" for group_id, copy in expected)
    for copy in range(n):
        part = repeated.select_ids([f"{group_id}#{copy}" for group_id in sample.ids])
        assert bits_of(part)[1:] == bits_of(sample)[1:]


def test_repeat_of_an_example() -> None:
    sample = make_sample([1], [2])
    assert sample.repeat(2).ids == ("id0#0", "id0#1", "id1#0", "id1#1")
    assert sample.repeat(2).data["packed_input_ids"].tolist() == [0, 0, 100, 101, 100, 101]
    assert sample.repeat(2, interleave=False).data["packed_input_ids"].tolist() == [0, 100, 101, 0, 100, 101]
    assert sample.repeat(2).repeat(1).ids[0] == "id0#0#0"


def test_derive_packs_new_keys_like_an_old_one(sample: SequenceSample) -> None:
    derived = sample.derive({"proximal_logprobs": np.ones(16, np.float32)})
    assert derived.keys == ("proximal_logprobs",)
    assert derived.seqlens["proximal_logprobs"] == sample.seqlens["packed_input_ids"]
    assert sample.derive({"scores": np.ones(6)}, like="rewards").seqlens["scores"] == [[1, 1], [1], [1, 1, 1]]


def test_remap_keys_can_be_undone(sample: SequenceSample) -> None:
    renamed = sample.remap_keys({"packed_logprobs": "proximal_logprobs", "my_pairs": "your_pairs"})
    assert set(renamed.keys) == {*sample.keys, "proximal_logprobs", "your_pairs"} - {"packed_logprobs", "my_pairs"}
    assert renamed.remap_keys({"proximal_logprobs": "packed_logprobs", "your_pairs": "my_pairs"}) == sample
    swapped = (
        sample.select_keys(["x", "y"]) if "x" in sample.keys else sample.derive({"x": np.zeros(16), "y": np.ones(16)})
    )
    assert swapped.remap_keys({"x": "y", "y": "x"}).data["x"].tolist() == [1] * 16


def test_samples_are_frozen(sample: SequenceSample) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.ids = ()  # type: ignore[misc]


# ----------------------------------------------------------------------------------------------------------------- refusals

IDS2 = [[2], [1]]
TOKENS3 = np.zeros(3, np.int64)
ONES2 = [[1], [1]]


@pytest.mark.parametrize(
    ("seqlens", "data", "message"),
    [
        ({"x": IDS2}, {}, r"seqlens has the keys \['x'\], data has \[\]"),
        ({"x": [[3]]}, {"x": TOKENS3}, r"key 'x': lengths of 1 ids, expected 2"),
        ({"x": [[2], 1]}, {"x": TOKENS3}, r"key 'x', id 'b': lengths must be a list of integers, found 1"),
        ({"x": [[2], [1.0]]}, {"x": TOKENS3}, r"key 'x', id 'b': lengths must be a list of integers"),
        ({"x": [[4], [-1]]}, {"x": TOKENS3}, r"key 'x', id 'b': a length is negative"),
        ({"x": IDS2}, {"x": [1, 2, 3]}, r"key 'x': expected a 1-D numpy array, found list"),
        ({"x": IDS2}, {"x": np.zeros((3, 1))}, r"key 'x': expected a 1-D numpy array, found shape \(3, 1\)"),
        ({"x": IDS2}, {"x": np.zeros(4)}, r"key 'x': its lengths add up to 3, but the array has 4 values"),
        ({"x": IDS2}, {"x": np.array(["a", "b", "c"])}, r"key 'x': dtype .* cannot be sent"),
        ({"x": IDS2}, {"x": np.array([None] * 3)}, r"key 'x': dtype .* cannot be sent"),
        ({"x": IDS2}, {"x": np.zeros(3, ">i4")}, r"key 'x': dtype .* cannot be sent"),
        (
            {"packed_input_ids": IDS2},
            {"packed_input_ids": np.zeros(3, np.int32)},
            r"'packed_input_ids': expected dtype int64, found int32",
        ),
        (
            {"packed_input_ids": IDS2, "loss_mask": [[1], [2]]},
            {"packed_input_ids": TOKENS3, "loss_mask": np.zeros(3, np.bool_)},
            r"key 'loss_mask', id 'a': expected the lengths of 'packed_input_ids', \[2\], found \[1\]",
        ),
        (
            {"values": IDS2, "proximal_logprobs": [[2], [0]]},
            {"values": np.zeros(3, np.float32), "proximal_logprobs": np.zeros(2, np.float32)},
            r"key 'proximal_logprobs', id 'b': expected the lengths of 'values', \[1\], found \[0\]",
        ),
        (
            {"packed_prompts": [[1, 1], [1]]},
            {"packed_prompts": TOKENS3},
            r"key 'packed_prompts', id 'a': expected one prompt per group, found 2",
        ),
        (
            {"task_ids": IDS2},
            {"task_ids": TOKENS3},
            r"key 'task_ids', id 'a': expected one value per group, found lengths \[2\]",
        ),
        (
            {"packed_input_ids": IDS2, "rewards": [[1], [1, 1]]},
            {"packed_input_ids": TOKENS3, "rewards": np.zeros(3, np.float32)},
            r"key 'rewards', id 'b': expected one value for each of the 1 sequences of 'packed_input_ids', found lengths \[1, 1\]",
        ),
        (
            {"rewards": ONES2, "seq_no_eos_mask": [[1, 1], [1]]},
            {"rewards": np.zeros(2, np.float32), "seq_no_eos_mask": np.zeros(3, np.bool_)},
            r"key 'seq_no_eos_mask', id 'a': expected one value for each of the 1 sequences of 'rewards'",
        ),
        (
            {"rewards": [[2], [1]]},
            {"rewards": np.zeros(3, np.float32)},
            r"key 'rewards', id 'a': expected one value for each",
        ),
    ],
)
def test_inconsistent_keys_lengths_and_dtypes_are_refused(seqlens: Any, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceSample(("a", "b"), seqlens, data)


@pytest.mark.parametrize(
    ("ids", "message"),
    [(("a", "a"), r"ids \['a'\] occur more than once"), (("a", ""), "non-empty"), (("a", 1), "non-empty string")],
)
def test_ids_must_be_unique_non_empty_strings(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceSample(ids, {}, {})


def test_gather_refuses_repeated_ids_and_different_keys_or_dtypes(sample: SequenceSample) -> None:
    with pytest.raises(ValueError, match="at least one"):
        SequenceSample.gather([])
    with pytest.raises(ValueError, match=r"\['id0', 'id1', 'id2'\] occur more than once"):
        SequenceSample.gather([sample, sample])
    one, two, three = sample.unpack()
    with pytest.raises(ValueError, match=r"ids \['id1'\] have the keys \['rewards'\]"):
        SequenceSample.gather([one, two.select_keys(["rewards"])])
    wider = three.remap_keys({"my_pairs": "old"}).select_keys([k for k in three.keys if k != "my_pairs"])
    wider = wider.update(three.derive({"my_pairs": np.zeros(6, np.int32)}, like="my_pairs"))
    with pytest.raises(ValueError, match=r"key 'my_pairs' is int16 for ids \['id0'\], int32 for \['id2'\]"):
        SequenceSample.gather([one, two, wider])


def test_the_error_for_an_unknown_id_or_key_names_it(sample: SequenceSample) -> None:
    with pytest.raises(ValueError, match=r"ids \['nope'\] are not in the sample; it has \['id0', 'id1', 'id2'\]"):
        sample.select_ids(["id0", "nope"])
    with pytest.raises(ValueError, match="occur more than once"):
        sample.select_ids(["id0", "id0"])
    for ask in (
        lambda: sample.select_keys(["nope"]),
        lambda: sample.cu_seqlens("nope"),
        lambda: sample.slices("nope"),
        lambda: sample.derive({"x": np.zeros(1)}, like="nope"),
        lambda: sample.remap_keys({"nope": "x"}),
        lambda: sample.total_tokens("nope"),
    ):
        with pytest.raises(ValueError, match=r"key .nope. is not in the sample; it has .*rewards"):
            ask()


def test_update_needs_the_same_ids(sample: SequenceSample) -> None:
    with pytest.raises(ValueError, match=r"missing \['id1', 'id2'\], unknown \[\]"):
        sample.update(sample.select_ids(["id0"]))


FLOATS = np.array([0.0, np.nan, 1.0], np.float32)
OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize(
    ("lengths", "values", "message"),
    [
        (
            IDS2,
            [-0.0, np.nan, 1.0],
            "key 'x', id 'a': the two samples have different values; update would replace them",
        ),
        (IDS2, [0.0, OTHER_NAN, 1.0], "key 'x', id 'a': the two samples have different values"),
        (IDS2, [0.0, np.nan, 2.0], "key 'x', id 'b': the two samples have different values"),
        ([[1, 1], [1]], FLOATS, r"key 'x', id 'a': this sample has lengths \[2\], the other sample \[1, 1\]"),
        ([[2], [1, 0]], FLOATS, r"key 'x', id 'b': this sample has lengths \[1\], the other sample \[1, 0\]"),
        (
            IDS2,
            FLOATS.astype(np.float64),
            r"key 'x', ids \['a', 'b'\]: this sample has float32, the other sample has float64",
        ),
    ],
)
def test_union_refuses_a_key_that_differs(lengths: Any, values: Any, message: str) -> None:
    array = values if isinstance(values, np.ndarray) else np.array(values, np.float32)
    sample = SequenceSample(("a", "b"), {"x": IDS2}, {"x": FLOATS})
    other = SequenceSample(("a", "b"), {"x": lengths}, {"x": array}).select_ids(["b", "a"])
    assert sample.union(sample) == sample
    with pytest.raises(ValueError, match=message):
        sample.union(other)


def test_union_needs_the_same_ids(sample: SequenceSample) -> None:
    with pytest.raises(ValueError, match=r"union needs the same ids: missing \['id1', 'id2'\], unknown \[\]"):
        sample.union(sample.select_ids(["id0"]))


def test_repeat_refuses_names_of_copies_that_are_ids_already() -> None:
    sample = SequenceSample(("a", "a#1"), {"x": ONES2}, {"x": np.zeros(2)})
    assert sample.repeat(1).ids == ("a#0", "a#1#0")
    with pytest.raises(ValueError, match=r"copies would get the names \['a#1'\], which are ids of the sample"):
        sample.repeat(2)
    with pytest.raises(ValueError, match="the number of copies is 0; it must be at least 1"):
        sample.repeat(0)


def test_remap_refuses_collisions_and_wrong_dtypes(sample: SequenceSample) -> None:
    with pytest.raises(ValueError, match="two keys the same name"):
        sample.remap_keys({"packed_logprobs": "rewards"})
    with pytest.raises(ValueError, match="key 'task_ids': expected dtype int64, found float64"):
        sample.select_keys(["birth_time"]).remap_keys({"birth_time": "task_ids"})


@pytest.mark.parametrize("split", [SequenceSample.split, SequenceSample.split_tokens, SequenceSample.split_balanced])
def test_splits_need_an_argument_of_at_least_one(sample: SequenceSample, split: Any) -> None:
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        split(sample, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [[1.0]]}, r"key 'rewards', id 'id0': expected a flat list or 1-D array, found shape \(1, 1\)"),
        ({"packed_input_ids": [[1.5]]}, r"key 'packed_input_ids', id 'id0': expected int64, found float64"),
        ({"loss_mask": [[1]]}, r"key 'loss_mask', id 'id0': expected bool, found int64"),
        ({"packed_logprobs": [np.zeros(1)]}, r"key 'packed_logprobs', id 'id0': expected float32, found float64"),
        ({"task_ids": "a"}, r"key 'task_ids', id 'id0': expected int64"),
        (
            {"my_pairs": [np.zeros(1, np.int16), np.zeros(1, np.int8)]},
            r"key 'my_pairs': runs of several dtypes: \['int16', 'int8'\]",
        ),
        ({"other": [[1]]}, r"group 'id1' has the keys"),
    ],
)
def test_from_groups_refuses_wrong_shapes_dtypes_and_keys(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceSample.from_groups(["id0", "id1"], [{**group([1]), **change}, group([1])])


def test_from_groups_needs_one_id_per_group() -> None:
    with pytest.raises(ValueError, match="2 ids for 1 groups"):
        SequenceSample.from_groups(["a", "b"], [group([1])])
