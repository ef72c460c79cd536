"""Trajectories on disk: written ones are read back, and broken ones are refused."""

import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import make_group, make_store, record_batches
from safetensors.numpy import load, save

from asyncrl.data.sequence import DTYPES, SequenceSample
from asyncrl.data.trajectories import (
    BackgroundRecorder,
    Entry,
    RecordingFullError,
    TrajectoryError,
    TrajectoryHeader,
    find_recording,
    list_recording,
    read_header,
    read_trajectory,
    recording_dir,
    tokenizer_fingerprint,
    write_trajectory,
)
from asyncrl.testing.tiny import make_char_tokenizer


def header_of(meta, sample, **changes) -> TrajectoryHeader:
    values = {"step": 3, "position": 1, "batch": 4, "trained": True, "recorded_by": "model_worker/0", "time": 1.0}
    seqlens = {key: lengths[0] for key, lengths in sample.seqlens.items()}
    return TrajectoryHeader(meta=meta, seqlens=seqlens, **{**values, **changes})


@pytest.fixture
def recorded(tmp_path):
    """A recorded file, its header and its sample."""
    meta, sample = make_group(7, version=2)
    extra = sample.derive({"proximal_logprobs": np.linspace(-1, 0, sample.total_tokens(), dtype=np.float32)})
    sample = sample.update(extra)
    header = header_of(meta, sample)
    return write_trajectory(tmp_path, header, sample), header, sample


def test_a_written_trajectory_is_read_back(recorded):
    path, header, sample = recorded
    assert path.name == "step_00000003-group_0001-model_worker_0.safetensors"
    trajectory = read_trajectory(path)
    assert trajectory.header == read_header(path) == header
    assert trajectory.sample == sample
    assert trajectory.sample.keys == sample.keys
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    key=st.text(min_size=1, max_size=8).filter(lambda key: key != "__metadata__" and "\0" not in key),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_of_any_keys(tmp_path, lengths, dtype, key, seed):
    bits = np.random.default_rng(seed).integers(0, 2, sum(lengths) * np.dtype(dtype).itemsize, np.uint8)
    meta, _ = make_group(0)
    sample = SequenceSample((meta.ticket_id,), {key: [lengths]}, {key: bits.view(dtype)})
    path = write_trajectory(tmp_path, header_of(meta, sample), sample)
    assert read_trajectory(path).sample == sample
    assert read_header(path) == read_trajectory(path).header


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_short_is_refused(recorded, share):
    path, _, _ = recorded
    cut = path.with_name("cut.safetensors")
    content = path.read_bytes()
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(TrajectoryError, match=r"cut\.safetensors"):
        read_trajectory(cut)


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_refused_or_changes_nothing(recorded, place, bit):
    """Some changed bytes do not change the meaning of JSON: the case of a \\u escape, or a space."""
    path, header, sample = recorded
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    broken = path.with_name("broken.safetensors")
    broken.write_bytes(content)
    try:
        trajectory = read_trajectory(broken)
    except TrajectoryError:
        return
    assert trajectory.header == header
    assert trajectory.sample == sample


def test_files_that_are_not_trajectories_are_refused(tmp_path, recorded):
    _, header, sample = recorded
    cases = {
        "foreign": (save({"weight": np.zeros(2, np.float32)}), "not a trajectory of asyncrl"),
        "noise": (b"\xff" * 100, "broken or cut short"),
        "empty": (b"", "cut short"),
        "text": (b'{"prompt": "not a tensor in sight", "and": "more"}', "cut short"),
    }
    for name, (content, message) in cases.items():
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(content)
        with pytest.raises(TrajectoryError, match=message):
            read_trajectory(file)
        with pytest.raises(TrajectoryError, match=message):
            read_header(file)
    with pytest.raises(TrajectoryError, match="cannot be read"):
        read_trajectory(tmp_path / "nowhere.safetensors")
    newer = write_trajectory(tmp_path, msgspec.structs.replace(header, format=2, position=5), sample)
    with pytest.raises(TrajectoryError, match="format 2, this release reads 1"):
        read_trajectory(newer)
    other_lengths = msgspec.structs.replace(header, seqlens={**header.seqlens, "rewards": [1]}, position=6)
    with pytest.raises(TrajectoryError, match="'rewards'"):
        read_trajectory(write_trajectory(tmp_path, other_lengths, sample))


def test_nothing_is_unpickled(recorded):
    path, _, _ = recorded
    assert b"pickle" not in path.read_bytes()
    assert load(path.read_bytes())["packed_input_ids"].dtype == np.int64  # any safetensors reader can read it


def test_the_oldest_steps_are_pruned_to_make_room(tmp_path):
    whole = record_batches(tmp_path / "all", batches=5, size=2)
    room = int(whole.num_bytes * 0.65)
    store = record_batches(tmp_path / "some", batches=5, size=2, trained=True, max_bytes=room, prune=True)
    files = list_recording(recording_dir(tmp_path / "some", 1))
    assert [read_header(file).step for file in files] == [2, 2, 3, 3, 4, 4]
    assert store.num_bytes == sum(file.stat().st_size for file in files) <= room
    assert store.num_files == len(files)


def test_recordings_of_untrained_rollouts_are_never_pruned(tmp_path):
    with pytest.raises(RecordingFullError, match=r"record\.max_bytes=3000.*train\.max_steps"):
        record_batches(tmp_path, batches=5, size=2, max_bytes=3000)
    files = list_recording(recording_dir(tmp_path, 1))
    assert [read_header(file).step for file in files][:2] == [0, 0]
    assert sum(file.stat().st_size for file in files[:-1]) <= 3000


def test_the_newest_attempt_that_recorded_is_found(tmp_path):
    for attempt in (2, 10):
        record_batches(tmp_path, batches=1, size=1, attempt=attempt)
    recording_dir(tmp_path, 11).mkdir()
    newest = recording_dir(tmp_path, 10)
    assert find_recording(tmp_path) == find_recording(tmp_path / "trajectories") == find_recording(newest) == newest
    assert find_recording(recording_dir(tmp_path, 2)).name == "attempt_2"
    for empty in (recording_dir(tmp_path, 11), tmp_path / "nowhere"):
        with pytest.raises(TrajectoryError, match=r"record\.trajectories=true"):
            find_recording(empty)


def test_trajectories_are_recorded_in_the_background_of_training(tmp_path):
    recorder = BackgroundRecorder(make_store(tmp_path, trained=True, prune=True))
    meta, sample = make_group(0)
    recorder.record_nowait(0, 1, [Entry(sample, meta, 0)])
    recorder.close(10.0)
    (file,) = list_recording(recording_dir(tmp_path, 1))
    assert read_trajectory(file).sample == sample
    assert recorder.num_lost == 0


def test_a_slow_disk_loses_recordings_and_does_not_delay_training(tmp_path, caplog):
    may_write, writing = threading.Event(), threading.Event()

    class SlowStore:
        def __init__(self):
            self.steps = []

        def write(self, step, batch, entries):
            writing.set()
            assert may_write.wait(100)
            self.steps.append(step)

    store = SlowStore()
    recorder = BackgroundRecorder(store)
    meta, sample = make_group(0)
    recorder.record_nowait(0, 1, [Entry(sample, meta, 0)])
    assert writing.wait(30)
    start = time.monotonic()
    for step in range(1, 6):  # two are queued, three are dropped
        recorder.record_nowait(step, 1, [Entry(sample, meta, 0)])
    assert time.monotonic() - start < 50.0  # training did not wait for the blocked write
    may_write.set()
    recorder.close(30.0)
    assert store.steps == [0, 1, 2]
    assert recorder.num_lost == 3
    assert [record.message for record in caplog.records] == [
        "1 trajectories were not recorded so far: the disk is slower than training; use record.every"
    ]


def test_a_disk_that_fails_does_not_fail_training(tmp_path, caplog):
    (tmp_path / "trajectories").write_text("in the way")
    recorder = BackgroundRecorder(make_store(tmp_path, trained=True, prune=True))
    meta, sample = make_group(0)
    recorder.record_nowait(0, 1, [Entry(sample, meta, 0)])
    recorder.close(10.0)
    assert recorder.num_lost == 1
    assert "not recorded" in caplog.text


def test_equal_tokenizers_have_equal_fingerprints(tmp_path):
    for name, alphabet in (("one", "0123"), ("copy", "0123"), ("other", "0124")):
        make_char_tokenizer(tmp_path / name, alphabet)
    marks = {name: tokenizer_fingerprint(str(tmp_path / name)) for name in ("one", "copy", "other", "nowhere")}
    assert marks["one"] == marks["copy"] != marks["other"]
    assert marks["nowhere"] == ""
