"""The codec: decoded samples equal the sent ones and own their memory; other input is refused before memory is allocated."""

from __future__ import annotations

import contextlib
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_samples import words

from asyncrl.data.sample_files import load_sample, save_sample
from asyncrl.data.sequence import DTYPES, FORMAT, SequenceSample, decode_sample, encode_sample
from asyncrl.protocol.errors import CodecError


def make_sample(dtype: str = "float32", lengths: tuple[tuple[int, ...], ...] = ((3, 2), (4,))) -> SequenceSample:
    n = sum(map(sum, lengths))
    ids = tuple(f"id{i}" for i in range(len(lengths)))
    seqlens = [list(group) for group in lengths]
    return SequenceSample(
        ids, {"x": seqlens, "y": seqlens}, {"x": np.arange(n).astype(dtype), "y": np.arange(n) % 2 == 0}
    )


def header_of(**changes: Any) -> bytes:
    """Return the header of make_sample(), with changes such as a hostile sender might make."""
    header = {"format": 1, "ids": ["a", "b"], "lengths": [[[3, 2], [4]]], "keys": [["x", "float32", 0]], **changes}
    return msgspec.msgpack.encode(list(header.values()))


FRAME = bytes(36)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_makes_the_round_trip(dtype: str) -> None:
    sample = make_sample(dtype)
    header, frames = encode_sample(sample)
    assert [frame.nbytes for frame in frames] == [sample.data["x"].nbytes, 9]
    assert decode_sample(header, [bytes(frame) for frame in frames]) == sample


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4), st.sampled_from(DTYPES))
def test_every_shape_makes_the_round_trip(lengths: list[list[int]], dtype: str) -> None:
    sample = make_sample(dtype, tuple(map(tuple, lengths)))
    assert decode_sample(*encode_sample(sample)) == sample


def test_special_values_are_preserved() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    sample = SequenceSample(("ü/🙂",), {"x": [[5]]}, {"x": values})
    decoded = decode_sample(*encode_sample(sample))
    assert decoded.ids == ("ü/🙂",)
    assert decoded.data["x"].tobytes() == values.tobytes()


def test_frames_are_sent_without_a_copy() -> None:
    sample = make_sample()
    _, frames = encode_sample(sample)
    assert np.shares_memory(np.frombuffer(frames[0], np.float32), sample.data["x"])
    strided = SequenceSample(("a",), {"x": [[3]]}, {"x": np.arange(6)[::2]})
    assert decode_sample(*encode_sample(strided)) == strided


@pytest.mark.parametrize("offset", range(9))
def test_received_arrays_are_owned_aligned_and_writable(offset: int) -> None:
    sample = make_sample("float64")
    header, frames = encode_sample(sample)
    message = bytes(offset) + bytes(frames[0])
    misaligned = memoryview(message)[offset:]
    decoded = decode_sample(memoryview(header), [misaligned, bytearray(frames[1])])
    assert decoded == sample
    for array in decoded.data.values():
        assert array.flags.owndata
        assert array.flags.aligned
        assert array.flags.writeable
        assert not np.shares_memory(array, np.frombuffer(message, np.uint8))
    decoded.data["x"][:] = -1
    assert sample.data["x"][0] == 0


def test_lengths_that_keys_share_are_sent_once() -> None:
    sample = make_sample(lengths=((1,),) * 1000)
    header, _ = encode_sample(sample)
    assert len(header) < len(encode_sample(sample.select_keys(["x"]))[0]) + 20


def test_the_same_keys_with_other_lengths_are_checked_again() -> None:
    keys = [["packed_input_ids", "int64", 0], ["rewards", "float32", 1]]
    good = header_of(keys=keys, lengths=[[[3, 2], [4]], [[1, 1], [1]]])
    assert decode_sample(good, [bytes(72), bytes(12)]).num_sequences() == 3
    with pytest.raises(CodecError, match="key 'rewards', id 'b': expected one value for each of the 1 sequences"):
        decode_sample(header_of(keys=keys, lengths=[[[3, 2], [4]], [[1, 1], [1, 1]]]), [bytes(72), bytes(16)])
    with pytest.raises(
        CodecError, match="key 'rewards': the lengths index 1 is out of range; the header has 1 lengths"
    ):
        decode_sample(header_of(keys=keys, lengths=[[[3, 2], [4]]]), [bytes(72), bytes(12)])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(words, st.lists(words, max_size=3)), max_size=3))
def test_words_make_the_round_trip_through_the_codec_and_files(groups: list[tuple[Any, list[Any]]]) -> None:
    given_words = [{"words_text": each, "prompt_words_answer": one} for one, each in groups]
    if not groups:
        return
    sample = SequenceSample.from_groups([f"id{i}" for i in range(len(groups))], given_words)
    header, frames = encode_sample(sample)
    decoded = decode_sample(header, [bytes(frame) for frame in frames])
    with tempfile.TemporaryDirectory() as folder:
        save_sample(decoded, Path(folder, "sample.safetensors"))
        loaded = load_sample(Path(folder, "sample.safetensors"))
    parts = [part for part in loaded.repeat(1).split(2) if part.num_ids]
    for found in (decoded, loaded, SequenceSample.gather(parts)):
        assert found.words("words_text") == [each for _, each in groups]
        assert found.words("prompt_words_answer") == [[one] for one, _ in groups]
    assert decoded == sample == loaded


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], (1, 2), {1: "a"}, {1, 2}, b"x", "\ud800", object()])
def test_words_that_json_would_change_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"key 'words_x', id 'a': a value of type \w+: (JSON would|it has no form)"):
        SequenceSample.from_groups(["a"], [{"words_x": ["fine", value]}])


@pytest.mark.parametrize(
    "text", [b"", b"nan", b"1 2", b'"\xff"', b"[" * 100_000, b"1e999", b"9" * 100_000, b"{'a': 1}"]
)
def test_bytes_that_are_no_json_are_refused_when_words_are_read(text: bytes) -> None:
    sample = SequenceSample(("a",), {"words_x": [[len(text)]]}, {"words_x": np.frombuffer(text, np.uint8)})
    decoded = decode_sample(*encode_sample(sample))
    with pytest.raises(ValueError, match="key 'words_x', id 'a': its bytes are no JSON"):
        decoded.words("words_x")
    with pytest.raises(ValueError, match="key 'rewards' has no words"):
        decoded.words("rewards")


# ----------------------------------------------------------------------------------------------------------- hostile input


@pytest.mark.parametrize(
    ("header", "frames", "message"),
    [
        (b"", [FRAME], "the header cannot be read"),
        (b"\xff\x00garbage", [FRAME], "the header cannot be read"),
        (header_of()[:-1], [FRAME], "the header cannot be read"),
        (header_of() + b"\x00", [FRAME], "the header cannot be read"),
        (b"\xdd\xff\xff\xff\xff", [FRAME], "the header cannot be read"),  # an array of 2**32 - 1 items
        (b"\x94\x01\xdd\xff\xff\xff\xff", [FRAME], "the header cannot be read"),
        (b"\x91" * 100_000, [FRAME], "the header cannot be read"),
        (header_of(ids=[1, 2]), [FRAME], r"the header cannot be read: Expected `str`, got `int`"),
        (header_of(lengths=[[[3, 2.5], [4]]]), [FRAME], "Expected `int`, got `float`"),
        (header_of(lengths=[[[3, 2**63], [4]]]), [FRAME], "take .* bytes, its frame has 36|the header cannot be read"),
        (header_of(ids=["a", "b"]).replace(b"\xa1a", b"\xa1\x80"), [FRAME], "the header cannot be read: 'utf-8'"),
        (header_of(format=2), [FRAME], "format 2, expected 1"),
        (header_of(), [], "0 frames for 1 keys"),
        (header_of(), [FRAME, FRAME], "2 frames for 1 keys"),
        (header_of(), [FRAME[:-1]], "key 'x': 9 values of float32 take 36 bytes, its frame has 35"),
        (header_of(), [FRAME + b"\x00"], "key 'x': 9 values of float32 take 36 bytes, its frame has 37"),
        (header_of(lengths=[[[2**62, 2**62], [4]]]), [FRAME], "take 36893488147419103248 bytes, its frame has 36"),
        (header_of(lengths=[[[12, -3], [0]]]), [FRAME], "key 'x', id 'a': a length is negative"),
        (header_of(lengths=[[[9]]]), [FRAME], "key 'x': lengths of 1 ids, expected 2"),
        (
            header_of(keys=[["x", "float32", 1]]),
            [FRAME],
            "key 'x': the lengths index 1 is out of range; the header has 1 lengths",
        ),
        (header_of(keys=[["x", "float32", -1]]), [FRAME], "key 'x': the lengths index -1 is out of range"),
        (header_of(keys=[["x", "object", 0]]), [bytes(72)], "key 'x': dtype 'object' is unknown; known are bool, int8"),
        (header_of(keys=[["x", "O", 0]]), [bytes(72)], "dtype 'O' is unknown"),
        (header_of(keys=[["x", ">f4", 0]]), [FRAME], "dtype '>f4' is unknown"),
        (header_of(keys=[["x", "f4,f4", 0]]), [bytes(72)], "dtype 'f4,f4' is unknown"),
        (header_of(keys=[["x", "float32", 0], ["x", "float32", 0]]), [FRAME, FRAME], "a key occurs twice"),
        (header_of(ids=["a", "a"]), [FRAME], r"ids \['a'\] occur more than once"),
        (header_of(ids=["a", ""]), [FRAME], "non-empty string"),
        (header_of(keys=[["rewards", "int32", 0]]), [FRAME], "key 'rewards': expected dtype float32, found int32"),
        (header_of(keys=[["rewards", "float32", 0]]), [FRAME], "key 'rewards', id 'a': expected one value"),
        (header_of(keys=[["x", "bool", 0]]), [b"\x01\x00\x02" * 3], "key 'x': a bool is 2"),
        (header_of(keys=[["words_x", "float32", 0]]), [FRAME], "key 'words_x': expected dtype uint8, found float32"),
        (
            header_of(keys=[["prompt_words_x", "uint8", 0]]),
            [bytes(9)],
            "id 'a': expected one prompt per group, found 2",
        ),
        (
            header_of(keys=[["rewards", "float32", 1], ["words_x", "uint8", 0]], lengths=[[[3, 2], [4]], [[1], [1]]]),
            [bytes(8), bytes(9)],
            "key 'words_x', id 'a': expected one run for each of the 1 sequences of 'rewards', found 2",
        ),
        (header_of(), [None], "frame 0: expected bytes, found NoneType"),
        (3, [FRAME], "frame header: expected bytes, found int"),
    ],
)
def test_invalid_messages_are_refused(header: Any, frames: list[Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_sample(header, frames)


def test_oversized_messages_are_refused() -> None:
    header, frames = encode_sample(make_sample())
    with pytest.raises(CodecError, match="the frames have 45 bytes, at most 44 are accepted"):
        decode_sample(header, frames, max_bytes=44)
    with pytest.raises(CodecError, match=r"the header has \d+ bytes, at most 10 are accepted"):
        decode_sample(header, frames, max_bytes=10)
    with pytest.raises(CodecError, match="the header has 4000001 bytes, at most 4000000 are accepted"):
        decode_sample(bytes(4_000_001), frames)
    assert decode_sample(header, frames, max_bytes=max(45, len(header))).num_ids == 2


def test_a_header_with_false_lengths_allocates_nothing() -> None:
    header = header_of(lengths=[[[10**9, 0], [0]]])
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="take 4000000000 bytes"):
            decode_sample(header, [FRAME])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=80), st.lists(st.binary(max_size=40), max_size=3))
def test_random_bytes_are_refused(header: bytes, frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        decode_sample(header, frames)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_header_with_a_changed_byte_is_refused_or_decoded(data: st.DataObject) -> None:
    header, frames = encode_sample(make_sample())
    damaged = bytearray(header)
    damaged[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        assert decode_sample(damaged, frames).num_ids == 2


def test_codec_errors_are_value_errors() -> None:
    assert issubclass(CodecError, ValueError)
    assert FORMAT == 1
