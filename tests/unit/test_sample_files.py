"""Samples in files: saved ones are loaded with all bits. Torn, damaged and forged files are refused with the reason."""

import itertools
import os
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_samples import bits_of, random_bits, random_samples
from safetensors.numpy import load, save

from asyncrl.data.sample_files import SampleFileError, _checksum, load_sample, save_sample
from asyncrl.data.sequence import DTYPES, SequenceSample

SHARED_FOLDER = [HealthCheck.function_scoped_fixture]  # each example replaces the file of the one before


def make_sample(value: float = 0.0) -> SequenceSample:
    lengths = [[2, 1], [3]]
    return SequenceSample(
        ("a", "b"),
        {"x": lengths, "mask": lengths, "rewards": [[1, 1], [1]]},
        {
            "x": np.full(6, value, np.float16),
            "mask": np.arange(6) % 2 == 0,
            "rewards": np.array([1, np.nan, -0.0], np.float32),
        },
    )


@pytest.fixture
def path(tmp_path):
    saved = tmp_path / "sample.safetensors"
    save_sample(make_sample(), saved)
    return saved


# ------------------------------------------------------------------------------------------------------------- round trips


@given(random_samples())
@settings(max_examples=50, deadline=None, suppress_health_check=SHARED_FOLDER)
def test_a_saved_sample_is_loaded_with_all_bits(tmp_path, sample):
    save_sample(sample, tmp_path / "sample")
    loaded = load_sample(str(tmp_path / "sample"))
    assert bits_of(loaded) == bits_of(sample)
    assert loaded.keys == sample.keys
    assert os.listdir(tmp_path) == ["sample"]
    assert all(array.flags.writeable and array.flags.aligned for array in loaded.data.values())


def test_every_dtype_and_strided_arrays_are_kept(tmp_path):
    rng = np.random.default_rng(0)
    data = {dtype: random_bits(rng, dtype, 14)[::2] for dtype in DTYPES}
    sample = SequenceSample(("ü/🙂",), {dtype: [[7]] for dtype in DTYPES}, data)
    save_sample(sample, tmp_path / "sample")
    assert bits_of(load_sample(tmp_path / "sample")) == bits_of(sample)


def test_any_reader_of_safetensors_reads_the_arrays(path):
    assert b"pickle" not in path.read_bytes()
    arrays = load(path.read_bytes())
    assert arrays.keys() == {"x", "mask", "rewards"}
    assert arrays["mask"].tolist() == [True, False] * 3


def test_a_reader_never_sees_a_part_of_a_file(path):
    """The file is replaced again and again while it is read."""
    stop, seen = threading.Event(), set()

    def write():
        for value in itertools.cycle(range(100)):
            if stop.is_set():
                return
            save_sample(make_sample(value), path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(seen) < 20:
            seen.add(load_sample(path).data["x"][0])
    finally:
        stop.set()
        writer.join()


def test_a_failed_save_leaves_the_older_file(path):
    (path.parent / f".{path.name}.writing").mkdir()
    with pytest.raises(OSError, match="writing"):
        save_sample(make_sample(1.0), path)
    assert load_sample(path) == make_sample()


# ---------------------------------------------------------------------------------------------------------------- refusals


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=50, deadline=None, suppress_health_check=SHARED_FOLDER)
def test_a_torn_file_is_refused(path, share):
    torn = path.with_name("torn")
    content = path.read_bytes()
    torn.write_bytes(content[: int(share * len(content))])
    with pytest.raises(SampleFileError, match="torn is broken or cut short"):
        load_sample(torn)


def forge(path, header=None, arrays=None):
    """Write a file as an attacker might: consistent with itself, and with a valid checksum."""
    arrays = arrays or {"x": np.zeros(3, np.float32)}
    header = {"format": 1, "ids": ["a", "b"], "lengths": [[[2], [1]]], "keys": {"x": 0}, **(header or {})}
    text = msgspec.json.encode(header).decode()
    path.write_bytes(save(arrays, {"asyncrl_sample": text, "xxh3": _checksum(text, arrays)}))
    return path


def test_a_forged_file_that_is_right_in_all_is_loaded(tmp_path):
    assert load_sample(forge(tmp_path / "forged")).seqlens == {"x": [[2], [1]]}


@pytest.mark.parametrize(
    ("header", "arrays", "message"),
    [
        ({"format": 2}, None, "format 2, this release reads 1"),
        ({"ids": "ab"}, None, "header cannot be read: Expected `array`"),
        ({"ids": ["a", 1]}, None, "header cannot be read: Expected `str`"),
        ({"ids": ["a", "a"]}, None, r"ids \['a'\] occur more than once"),
        ({"ids": ["a", ""]}, None, "non-empty string"),
        ({"ids": ["a"]}, None, "key 'x': lengths of 2 ids, expected 1"),
        ({"lengths": [[[2.5], [1]]]}, None, "header cannot be read: Expected `int`"),
        ({"lengths": [[[4], [-1]]]}, None, "key 'x', id 'b': a length is negative"),
        ({"lengths": [[[2], [2]]]}, None, "key 'x': its lengths add up to 4, but the array has 3 values"),
        ({"lengths": [[[2**62], [2**62]]]}, None, "add up to 9223372036854775808, but the array has 3"),
        ({"keys": {"x": 1}}, None, "key 'x': the lengths index 1 is out of range; the header has 1 lengths"),
        ({"keys": {"x": -1}}, None, "the lengths index -1 is out of range"),
        ({"keys": {"y": 0}}, None, r"holds the keys \['x'\], its header names \['y'\]"),
        ({"keys": {"x": 0, "y": 0}}, None, r"holds the keys \['x'\], its header names \['x', 'y'\]"),
        ({}, {"x": np.zeros((3, 1), np.float32)}, r"key 'x': expected a 1-D numpy array, found shape \(3, 1\)"),
        ({}, {"x": np.zeros(3, np.complex64)}, "key 'x': dtype .*complex64.* cannot be sent"),
        ({}, {"x": np.array([0, 1, 2], np.uint8).view(np.bool_)}, "key 'x': a bool is 2; only 0 and 1 are bools"),
        ({"keys": {"rewards": 0}}, {"rewards": np.zeros(3)}, "key 'rewards': expected dtype float32, found float64"),
    ],
)
def test_a_forged_file_is_refused(tmp_path, header, arrays, message):
    with pytest.raises(SampleFileError, match=rf"forged.*{message}"):
        load_sample(forge(tmp_path / "forged", header, arrays))


def test_a_dtype_of_safetensors_that_numpy_lacks_is_refused(path):
    content = path.read_bytes().replace(b'"F16"', b'"BF16"')
    length = int.from_bytes(content[:8], "little") + 1
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(SampleFileError, match="an array of dtype 'BF16', which is no dtype of a sample"):
        load_sample(path)


def test_other_files_are_refused(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(save({"weight": np.zeros(2, np.float32)}))
    with pytest.raises(SampleFileError, match="not a sample of asyncrl"):
        load_sample(foreign)
    with pytest.raises(SampleFileError, match="cannot be read"):
        load_sample(tmp_path / "nowhere")
    with pytest.raises(SampleFileError, match="cannot be read"):
        load_sample(tmp_path)


def test_a_sample_that_does_not_fit_a_file_is_refused(tmp_path):
    reserved = SequenceSample(("a",), {"__metadata__": [[1]]}, {"__metadata__": np.zeros(1)})
    with pytest.raises(ValueError, match="key '__metadata__' has a meaning in safetensors files"):
        save_sample(reserved, tmp_path / "sample")
    long_id = SequenceSample(("a" * 16_000_000,), {}, {})
    with pytest.raises(ValueError, match="at most 16000000 fit; write several files"):
        save_sample(long_id, tmp_path / "sample")
    assert os.listdir(tmp_path) == []
