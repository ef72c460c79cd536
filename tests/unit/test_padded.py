"""Padded arrays: rows in verl's layout, and the way back to the same sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_samples import bits_of, random_samples

from asyncrl.data.padded import from_padded, to_padded
from asyncrl.data.sequence import SequenceSample

PADS = {"packed_input_ids": 0}


@pytest.fixture
def sample():
    return SequenceSample.from_groups(
        ["a", "b"],
        [
            {
                "packed_input_ids": [[1, 2, 3, 4], [1, 2, 9]],
                "prompt_mask": [[True, True, False, False], [True, True, False]],
                "packed_logprobs": [[0, 0, -1, -2], [0, 0, -3]],
                "rewards": [1, 0],
            },
            {
                "packed_input_ids": [[7, 8]],
                "prompt_mask": [[True, False]],
                "packed_logprobs": [[0, -4]],
                "rewards": [2],
            },
        ],
    )


def test_prompts_are_padded_on_the_left_and_responses_on_the_right(sample):
    padded = to_padded(sample, {"packed_input_ids": 5, "packed_logprobs": np.nan}, "both")
    assert padded["prompts"].tolist() == [[1, 2], [1, 2], [5, 7]]
    assert padded["responses"].tolist() == [[3, 4], [9, 5], [8, 5]]
    assert padded["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 9, 5], [5, 7, 8, 5]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 0]]
    assert padded["attention_mask"].dtype == padded["input_ids"].dtype == np.int64
    np.testing.assert_array_equal(padded["packed_logprobs"][2], np.array([np.nan, 0, -4, np.nan], np.float32))
    assert padded["packed_logprobs"].dtype == np.float32
    assert padded["uid"].tolist() == ["a", "a", "b"]
    assert padded.keys() == {"input_ids", "packed_logprobs", "prompts", "responses", "attention_mask", "uid"}


@pytest.mark.parametrize(
    ("side", "rows"), [("left", [[0, 0, 7, 8], [0, 1, 2, 9]]), ("right", [[7, 8, 0, 0], [1, 2, 9, 0]])]
)
def test_whole_rows_are_padded_on_one_side(sample, side, rows):
    padded = to_padded(sample, PADS, side)
    assert [padded["input_ids"][2].tolist(), padded["input_ids"][1].tolist()] == rows
    assert padded.keys() == {"input_ids", "attention_mask", "uid"}


def test_a_batch_of_verl_becomes_a_sample(sample):
    """Its rows are shuffled, its columns wider than needed, and its padding has any values. prompt_mask follows from responses."""
    padded = to_padded(sample, {"packed_input_ids": 5, "packed_logprobs": 7}, "both")
    wide = {key: np.pad(padded[key], ((0, 0), (1, 2)), constant_values=6) for key in ("input_ids", "packed_logprobs")}
    batch = {
        **wide,
        "responses": wide["input_ids"][:, 3:],
        "attention_mask": np.pad(padded["attention_mask"], ((0, 0), (1, 2))),
        "rewards": sample.data["rewards"],
        "uid": padded["uid"],
    }
    shuffled = {key: array[[2, 0, 1]] for key, array in batch.items()}
    assert from_padded(shuffled) == sample.select_ids(["b", "a"])
    apart = {key: array[[0, 2, 1]] for key, array in batch.items()}  # the rows of "a" are no neighbours
    assert from_padded(apart) == sample


@settings(deadline=None, max_examples=100)
@given(random_samples(), st.sampled_from(["left", "right", "both"]))
def test_from_padded_undoes_to_padded(sample, side):
    keys = ["packed_input_ids", "prompt_mask", "x"]
    padded = to_padded(sample, dict.fromkeys(keys, False), side)
    assert {padded[key].shape for key in ("input_ids", "attention_mask", "prompt_mask", "x")} == {padded["x"].shape}
    assert padded["x"].dtype == sample.data["x"].dtype
    whole = from_padded({**padded, "rewards": sample.data["rewards"]})
    assert bits_of(whole) == bits_of(sample.select_keys([*keys, "rewards"]))
    if side == "both":  # prompt_mask follows from responses
        del padded["prompt_mask"]
        assert bits_of(from_padded(padded)) == bits_of(sample.select_keys(keys))


# ---------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("pads", "side", "message"),
    [
        (PADS, "middle", "side is 'middle'; it must be 'left', 'right' or 'both'"),
        ({"prompt_mask": False}, "left", "pad_values has no 'packed_input_ids'"),
        (
            {**PADS, "nope": 0},
            "left",
            r"key 'nope' cannot be padded; .* per token are \['packed_input_ids', 'packed_log",
        ),
        ({**PADS, "rewards": 0}, "left", "key 'rewards' cannot be padded"),
        ({"packed_input_ids": 0.5}, "left", "key 'packed_input_ids': the pad value 0.5 is no int64"),
        ({"packed_input_ids": np.nan}, "left", "the pad value nan is no int64"),
        ({"packed_input_ids": None}, "left", "the pad value None is no int64"),
        ({"packed_input_ids": [0]}, "left", r"the pad value \[0\] is no int64"),
        ({**PADS, "prompt_mask": 2}, "left", "key 'prompt_mask': the pad value 2 is no bool"),
        ({**PADS, "packed_logprobs": "0"}, "left", "key 'packed_logprobs': the pad value '0' is no float32"),
    ],
)
def test_keys_and_values_that_cannot_be_padded_are_refused(sample, pads, side, message):
    with pytest.raises(ValueError, match=message):
        to_padded(sample, pads, side)


def test_samples_that_have_no_such_rows_are_refused(sample):
    with pytest.raises(ValueError, match="key 'packed_input_ids' is not in the sample"):
        to_padded(sample.select_keys(["rewards"]), PADS, "left")
    with pytest.raises(ValueError, match="key 'prompt_mask' cannot be padded"):
        to_padded(sample.select_keys(["packed_input_ids"]), PADS, "both")
    late = sample.update(sample.derive({"prompt_mask": np.array([1, 1, 0, 0, 1, 0, 1, 1, 0], np.bool_)}))
    with pytest.raises(ValueError, match="key 'prompt_mask', id 'a': a prompt token follows a response token"):
        to_padded(late, PADS, "both")
    no_sequences = SequenceSample(("a",), {"packed_input_ids": [[]]}, {"packed_input_ids": np.zeros(0, np.int64)})
    with pytest.raises(ValueError, match=r"ids \['a'\] have no sequences"):
        to_padded(no_sequences, PADS, "left")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uid": None}, r"the arrays \['uid'\] are missing; there are \['attention_mask', 'input_ids'"),
        ({"x": [1, 2, 3]}, "'x' is a list; convert it to a numpy array"),
        ({"attention_mask": np.ones(3)}, r"'attention_mask' of shape \(3,\): it must be 2-D"),
        ({"attention_mask": np.full((3, 4), 2)}, "with 1 at tokens and 0 at padding"),
        ({"input_ids": np.zeros((3, 5), np.int64)}, r"'input_ids' has the shape \(3, 5\); expected \(3, 4\)"),
        ({"uid": np.array(["a", "b"], object)}, r"'uid' of shape \(2,\): it must have one str for each of 3 rows"),
        ({"uid": np.arange(3)}, "must have one str"),
        ({"uid": np.array(["a", "", "b"], object)}, "an id is a non-empty string"),
        (
            {"x": np.zeros((3, 2))},
            r"'x' has the shape \(3, 2\); expected \(3, 4\), .* columns of responses, pad it on the left",
        ),
        ({"responses": np.zeros((3, 2), np.int64)}, r"'responses' of shape \(3, 2\) are not the last columns"),
        ({"responses": np.zeros((3, 5), np.int64)}, r"'responses' of shape \(3, 5\) are not the last columns"),
        ({"responses": np.zeros(3, np.int64)}, r"'responses' of shape \(3,\) are not the last columns"),
        (
            {"input_ids": np.zeros((3, 4), np.int32), "responses": None},
            "'packed_input_ids': expected dtype int64, found int32",
        ),
    ],
)
def test_arrays_that_are_no_sample_are_refused(sample, changes, message):
    padded = {**to_padded(sample, PADS, "both"), **changes}
    with pytest.raises(ValueError, match=message):
        from_padded({key: array for key, array in padded.items() if array is not None})


def test_arrays_of_objects_become_words_of_rows_and_groups():
    """As verl's non_tensor_batch has them. Rows of a group need not be neighbours."""
    rows = {
        "input_ids": np.array([[1, 2], [3, 0], [1, 4]]),
        "attention_mask": np.array([[1, 1], [1, 0], [1, 1]]),
        "uid": np.array(["a", "b", "a"], object),
    }
    texts = np.array(["first", {"tool": [1, None]}, "third"], object)
    answers = np.array([{"x": 1, "y": 2}, "other", {"x": 1, "y": 2}], object)
    found = from_padded({**rows, "words_text": texts, "prompt_words_answer": answers, "rewards": np.float32([1, 2, 3])})
    assert found.words("words_text") == [["first", "third"], [{"tool": [1, None]}]]
    assert found.words("prompt_words_answer") == [[{"x": 1, "y": 2}], ["other"]]
    assert found.data["rewards"].tolist() == [1, 3, 2]
    assert from_padded(to_padded(found, PADS, "left")) == found.select_keys(["packed_input_ids"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"source": np.array(["p"] * 3, object)},
            "'source' has the dtype object; name .* words_NAME, e.g. 'words_source'",
        ),
        ({"source": np.array(["p"] * 3)}, "'source' has the dtype <U1; name strings"),
        (
            {"words_x": np.array(["p"] * 3)},
            "'words_x' has the dtype <U1 and the shape .*; words are an array of objects",
        ),
        ({"words_x": np.full((3, 4), ord("1"), np.uint8)}, r"the shape \(3, 4\); words are .* of shape \(3,\)"),
        ({"words_x": np.array([1, 2, {3}], object)}, "key 'words_x', id 'b': a value of type set"),
        ({"prompt_words_x": np.array(["p", "q", "r"], object)}, "'prompt_words_x' differs between the rows of id 'a'"),
        ({"prompt_words_x": np.array([1, True, "r"], object)}, "'prompt_words_x' differs between the rows of id 'a'"),
    ],
)
def test_objects_that_are_no_words_are_refused(sample, words, message):
    with pytest.raises(ValueError, match=message):
        from_padded({**to_padded(sample, PADS, "both"), **words})
