"""Padded 2-D arrays of a SequenceSample, and back, for users of verl: its batches are padded. numpy only.

Shapes: S sequences, one row for each, in the order of the sample's ids; T columns. verl's layout, here side="both", has P columns
for prompts, padded on the left, and R columns for responses, padded on the right. So every response begins at column P:

    prompts          [S, P]  the first P columns of input_ids
    responses        [S, R]  the last R columns of input_ids
    input_ids        [S, T]  int64, T = P + R; here the key packed_input_ids
    attention_mask   [S, T]  int64: 1 at a token, 0 at padding
    uid              [S]     object: the id of the row's group, a str
    words_NAME       [S]     object: a string or object of the row, which JSON can hold (only from_padded reads it)
    prompt_words_NAME [S]    object: the same of the row's group, in each of its rows (only from_padded reads it)
    any other key    [S, T]  its dtype

Source of the layout: the result of generate_sequences in verl's verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncrl.data.sequence import Array, SequenceSample, encode_words, is_words

_TOKENS, _PROMPT_MASK = "packed_input_ids", "prompt_mask"
_NEEDED = ("input_ids", "attention_mask", "uid")


def to_padded(
    sample: SequenceSample, pad_values: Mapping[str, bool | int | float], side: Literal["left", "right", "both"]
) -> dict[str, Array]:
    """Return padded arrays of the keys of `pad_values`, with attention_mask and uid. This module's docstring has the shapes.

    pad_values: the keys to pad, each with the value of its padding. They must have one value per token. packed_input_ids must be
    among them, with the id of the pad token; it becomes input_ids. Keys with one value per sequence need no padding:
    `sample.data` has their values in the order of the rows.
    side: where the padding of a row is. "left" or "right": all of it. "both": left of the prompt and right of the response. This
    needs the key prompt_mask, which marks the prompts, and adds prompts and responses, which are views of input_ids.
    P and R are those of the longest prompt and of the longest response; all may be 0.

    Raises ValueError for an unknown side, a key that is missing or has other lengths, a pad value that its dtype cannot hold, an id
    without sequences, and a prompt_mask that marks a token after a response token.
    """
    if side not in ("left", "right", "both"):
        raise ValueError(f"side is {side!r}; it must be 'left', 'right' or 'both'")
    if _TOKENS not in pad_values:
        raise ValueError(f"pad_values has no {_TOKENS!r}: give the id of the pad token")
    lengths_S = np.diff(sample.cu_seqlens(_TOKENS))
    for key, value in pad_values.items():
        _check_key(sample, key, value)
    empty = [group_id for group_id, lengths in zip(sample.ids, sample.seqlens[_TOKENS], strict=True) if not lengths]
    if empty:
        raise ValueError(f"ids {empty[:4]} have no sequences, so they would have no row; leave them out")

    # The first part of a row ends at column P, the second one begins there. With side="left" a row has only the first part.
    first_S = {"left": lengths_S, "right": np.zeros_like(lengths_S)}[side] if side != "both" else _prompts(sample)
    P, R = int(first_S.max(initial=0)), int((lengths_S - first_S).max(initial=0))
    columns_T, start_S1 = np.arange(P + R), (P - first_S)[:, None]
    is_token_ST = (columns_T >= start_S1) & (columns_T < start_S1 + lengths_S[:, None])

    padded: dict[str, Array] = {}
    for key, value in pad_values.items():
        values_ST = np.full(is_token_ST.shape, value, sample.data[key].dtype)
        values_ST[is_token_ST] = sample.data[key]
        padded["input_ids" if key == _TOKENS else key] = values_ST
    if side == "both":
        padded["prompts"], padded["responses"] = padded["input_ids"][:, :P], padded["input_ids"][:, P:]
    padded["attention_mask"] = is_token_ST.astype(np.int64)
    uids = [
        group_id for group_id, n in zip(sample.ids, map(len, sample.seqlens[_TOKENS]), strict=True) for _ in range(n)
    ]
    padded["uid"] = np.array(uids, dtype=object)
    return padded


def from_padded(padded: Mapping[str, Array]) -> SequenceSample:
    """Return the sample of padded arrays: those of `to_padded`, or of a batch of verl. This module's docstring has the shapes.

    input_ids, attention_mask and uid are needed. Rows with the same uid are the sequences of one id; they need not be neighbours.
    Ids are in the order of their first rows. There is a token wherever attention_mask is 1. Padding is dropped, whatever its value.
    responses tells where prompts end: the sample gets the key prompt_mask, unless it is given. prompts is not read.
    Arrays named words_NAME and prompt_words_NAME become words. Any other array [S, T] becomes a key with one value per token, an
    array [S] a key with one value per sequence.

    Raises ValueError for a missing array, one that is no numpy array, another shape, a mask that is not 0 or 1, a uid that is no
    str, responses that are not the last columns of input_ids, a known key with another dtype than in KEY_SPECS, an array of objects
    under another name, words that JSON cannot hold, and prompt_words_NAME that differ within a group.
    """
    missing = [key for key in _NEEDED if key not in padded]
    if missing:
        raise ValueError(f"the arrays {missing} are missing; there are {sorted(padded)}")
    for key, array in padded.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{key!r} is a {type(array).__name__}; convert it to a numpy array")
    mask_ST = padded["attention_mask"]
    if mask_ST.ndim != 2 or not np.isin(mask_ST, (0, 1)).all():
        raise ValueError(
            f"'attention_mask' of shape {mask_ST.shape}: it must be 2-D, with 1 at tokens and 0 at padding"
        )
    if padded["input_ids"].shape != mask_ST.shape:
        raise ValueError(_wrong_shape("input_ids", padded["input_ids"], mask_ST))
    uids = padded["uid"].tolist()
    if padded["uid"].shape != mask_ST.shape[:1] or not all(isinstance(uid, str) for uid in uids):
        raise ValueError(f"'uid' of shape {padded['uid'].shape}: it must have one str for each of {len(mask_ST)} rows")

    counts = Counter(uids)  # in the order of the first rows
    place_of = {uid: place for place, uid in enumerate(counts)}
    order_S = np.argsort(np.array([place_of[uid] for uid in uids], np.int64), kind="stable")
    is_token_ST = mask_ST[order_S].astype(np.bool_)
    lengths = iter(is_token_ST.sum(axis=1).tolist())
    token_lengths = [[next(lengths) for _ in range(n)] for n in counts.values()]
    sequence_lengths = [[1] * n for n in counts.values()]

    seqlens, data, words = {}, {}, dict[str, list[Any]]()
    for key, array in {**_prompt_mask(padded), **padded}.items():
        if key in ("attention_mask", "uid", "prompts", "responses"):
            continue
        if is_words(key) or array.dtype.kind in "OUS":
            words[key] = _words_by_group(key, array, order_S, counts)
            continue
        name = _TOKENS if key == "input_ids" else key
        if array.shape == mask_ST.shape:
            seqlens[name], data[name] = token_lengths, array[order_S][is_token_ST]
        elif array.shape == mask_ST.shape[:1]:
            seqlens[name], data[name] = sequence_lengths, array[order_S]
        else:
            raise ValueError(_wrong_shape(key, array, mask_ST))
    sample = SequenceSample(tuple(counts), seqlens, data)
    if not words:
        return sample
    groups = [{key: values[place] for key, values in words.items()} for place in range(len(counts))]
    return sample.update(SequenceSample.from_groups(sample.ids, groups))


def _words_by_group(
    key: str, array: Array, order_S: npt.NDArray[np.int64], counts: Mapping[str, int]
) -> list[list[Any]] | list[Any]:
    """The values of an array of objects [S] by group, as `SequenceSample.from_groups` takes them. order_S: the rows, group by
    group. counts: rows of each group."""
    if not is_words(key):
        raise ValueError(
            f"{key!r} has the dtype {array.dtype}; name strings and objects words_NAME, e.g. 'words_{key}'"
        )
    if array.dtype != object or array.shape != order_S.shape:
        raise ValueError(
            f"{key!r} has the dtype {array.dtype} and the shape {array.shape}; words are an array of objects of shape "
            f"{order_S.shape}"
        )
    rows = iter(array[order_S].tolist())
    groups = [[next(rows) for _ in range(n)] for n in counts.values()]
    if not key.startswith("prompt_"):
        return groups
    for group_id, values in zip(counts, groups, strict=True):
        if any(encode_words(value).tobytes() != encode_words(values[0]).tobytes() for value in values[1:]):
            raise ValueError(f"{key!r} differs between the rows of id {group_id!r}; name words of a row words_NAME")
    return [values[0] for values in groups]


def _check_key(sample: SequenceSample, key: str, value: Any) -> None:
    """Raise ValueError if the sample's key cannot be padded with the value."""
    if key not in sample.data or sample.seqlens[key] != sample.seqlens[_TOKENS]:
        keys = [other for other, lengths in sample.seqlens.items() if lengths == sample.seqlens[_TOKENS]]
        raise ValueError(f"key {key!r} cannot be padded; the keys with one value per token are {sorted(keys)}")
    dtype, given = sample.data[key].dtype, np.asarray(value)
    is_number = given.ndim == 0 and given.dtype.kind in "biuf"
    with np.errstate(invalid="ignore"):  # NaN as an integer
        if not is_number or (dtype.kind != "f" and given.astype(dtype) != given):
            raise ValueError(f"key {key!r}: the pad value {value!r} is no {dtype}")


def _prompts(sample: SequenceSample) -> npt.NDArray[np.int64]:
    """The number of prompt tokens of each sequence: int64 [S]. Raises ValueError if they are not the first ones."""
    _check_key(sample, _PROMPT_MASK, False)
    counts = []
    for group_id, runs in zip(sample.ids, sample.slices(_PROMPT_MASK), strict=True):
        for run in runs:
            counts.append(n := int(np.count_nonzero(run)))
            if not run[:n].all():
                raise ValueError(f"key {_PROMPT_MASK!r}, id {group_id!r}: a prompt token follows a response token")
    return np.array(counts, np.int64)


def _prompt_mask(padded: Mapping[str, Array]) -> dict[str, Array]:
    """The key prompt_mask, bool [S, T], if the arrays tell where the responses begin."""
    if "responses" not in padded:
        return {}
    input_ids_ST, responses_SR = padded["input_ids"], padded["responses"]
    P = input_ids_ST.shape[1] - (responses_SR.shape[1] if responses_SR.ndim == 2 else 0)
    if P < 0 or not np.array_equal(input_ids_ST[:, P:], responses_SR):
        raise ValueError(
            f"'responses' of shape {responses_SR.shape} are not the last columns of 'input_ids' of shape {input_ids_ST.shape}"
        )
    return {_PROMPT_MASK: np.broadcast_to(np.arange(input_ids_ST.shape[1]) < P, input_ids_ST.shape)}


def _wrong_shape(key: str, array: Array, mask_ST: Array) -> str:
    return (
        f"{key!r} has the shape {array.shape}; expected {mask_ST.shape}, as attention_mask, or {mask_ST.shape[:1]}. "
        "If it has only the columns of responses, pad it on the left"
    )
