"""Files that cannot be written: the error gives path, reason, free space and remedy, and existing files stay intact."""

import contextlib
import errno
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from recordings import make_group, make_store

from asyncrl.config.schema import ExperimentConfig
from asyncrl.data.trajectories import Entry, list_recording, recording_dir
from asyncrl.launch.program import save_config
from asyncrl.launch.rundir import RunRecord, begin_attempt, logs_dir, read_record, write_record
from asyncrl.master.files import MasterFiles
from asyncrl.protocol.errors import Failures
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime import disk
from asyncrl.runtime.disk import StorageError, explain, nearly_full, write_when_there_is_room, writing
from asyncrl.runtime.metrics import EventFile, JsonLinesWriter, MetricsWriter, read_json_lines
from asyncrl.runtime.ticket_key import make_key, read_key
from asyncrl.runtime.worker import error_text
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import (
    commit_folder,
    list_versions,
    publish_folder,
    verify_version,
    version_dir,
    write_part,
    write_version,
)
from tests.support.clock import ManualClock

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            FULL,
            r"No space left on device; .* of .* are free on that disk\. Make room there, .*weights\.keep=1.* set fileroot=",
        ),
        (OSError(errno.EDQUOT, "?"), r"Disk quota exceeded; .* are free on that disk"),
        (OSError(errno.EROFS, "?"), r"Read-only file system; make the folder writable for this user, or set fileroot="),
        (PermissionError(errno.EACCES, "?"), r"Permission denied; make the folder writable"),
        (OSError(errno.EFBIG, "?"), r"File too large; .*`ulimit -f`, or set weights\.shard_bytes="),
        (OSError(errno.EIO, "?"), r"Input/output error; .* set fileroot=\.\.\. to another"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), r"No space left on device; "),  # safetensors
    ],
)
def test_system_errors_are_reported_with_path_and_remedy(tmp_path, error, text):
    path = tmp_path / "not" / "there"
    with pytest.raises(StorageError, match=rf"{path} could not be written: {text}") as caught, writing(path):
        raise error
    assert caught.value.__cause__ is error
    assert error_text(caught.value) == str(caught.value)  # shown to the user without a traceback


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "gone"), ValueError("no tensors to write"), KeyError("x")]
)
def test_errors_unrelated_to_disks_pass_through(tmp_path, error):
    assert explain(tmp_path, error) is None
    with pytest.raises(type(error)) as caught, writing(tmp_path):
        raise error
    assert caught.value is error


def test_nested_writes_report_only_the_inner_path(tmp_path):
    with (
        pytest.raises(StorageError, match="inner could not be written"),
        writing(tmp_path / "outer"),
        writing(tmp_path / "inner"),
    ):
        raise FULL


def test_a_full_disk_is_reported_with_a_remedy(tmp_path, monkeypatch):
    assert nearly_full(tmp_path / "run") == ""
    usage = type(shutil.disk_usage(tmp_path))(total=8_000_000, used=8_000_000, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert nearly_full(tmp_path / "run") == (
        f"The disk is full or almost full: 0 B of 8.0 MB are free on that disk, at {tmp_path / 'run'}. Make room, or set "
        "fileroot=... to a larger disk"
    )


def test_sizes():
    assert [disk.size_text(size) for size in (0, 999, 12_345, 1_500_000, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "12 kB",
        "1.5 MB",
        "2.5 GB",
        "3000.0 TB",
    ]


# ------------------------------------------------------------------------------------------------------- metrics and journals


def fill(path):
    """Make the disk under this file, which the process has open, appear full from now on."""
    (descriptor,) = (fd for fd in map(int, os.listdir("/proc/self/fd")) if has_open(fd, path))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)


def has_open(fd, path):
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:  # the descriptor of the listing itself
        return False


def test_a_journal_on_a_disk_that_fills_up(tmp_path):
    path = tmp_path / "journal" / "master.jsonl"
    writer = JsonLinesWriter(path)
    writer.write({"event": "trained", "step": 1})
    fill(path)
    with pytest.raises(StorageError, match=rf"{path} could not be written: No space left on device; "):
        writer.write({"event": "trained", "step": 2})
    writer.close()  # no buffered data is left that could fail again
    assert read_json_lines(path) == [{"event": "trained", "step": 1}]


def test_tensorboard_on_a_disk_that_fills_up_fails_without_blocking(tmp_path):
    writer = MetricsWriter(tmp_path, attempt=1, tensorboard=True)
    writer.write(1, {"reward/mean": 0.5})
    (events,) = (tmp_path / "tensorboard" / "attempt_1").iterdir()
    fill(events)
    told = r"tensorboard/attempt_1/events\.out\.tfevents\..* could not be written: No space left"
    for step in range(2, 30):  # more than a queue would hold
        with pytest.raises(StorageError, match=told):
            writer.write(step, {"reward/mean": 0.5})
    writer.close()


EVENTS = (
    "1800000000000000 a37f4b2209000000 000000f83f1a0d62 7261696e2e457665 6e743a322a28646c "
    "3b00000000000000 1a23ac5c09000000 000000f83f10ac02 2a2d0a180a117265 776172642f6d6561 "
    "6e5f6f665f697415 0000003f0a110a0a 6c656e6774682f6d 6178150000807f85 125b3a"
)


def test_event_files_have_the_format_of_tensorflow(tmp_path, monkeypatch):
    """The bytes equal those of tensorboardX 2.6: length, checksum, event, checksum."""
    monkeypatch.setattr(time, "time", lambda: 1.5)
    events = EventFile(tmp_path)
    events.write(300, {"reward/mean of it": 0.5, "length/max": 1e40})
    events.close()
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().hex(" ", -8) == EVENTS


def test_a_line_that_is_not_json_is_reported_by_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \xff}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=rf"{path}:2: not a JSON object: .*; delete the line"):
        read_json_lines(path)


# --------------------------------------------------------------------------------------------------------------------- weights


@contextlib.contextmanager
def files_limited_to(num_bytes):
    """Limit the size of files that this process writes, as `ulimit -f` does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path, num_parameters, source):
    """Write a version as the trainer does."""
    with writing(path):
        tensors = [("w", torch.ones(num_parameters))]
        write_version(path, tensors, source_dir=source, version=WeightVersion.parse(path.name))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_version_that_does_not_fit_leaves_earlier_ones_and_no_partial_one(tmp_path, source):
    first, second = (version_dir(tmp_path, "actor", WeightVersion(1, number)) for number in range(2))
    write(first, 10, source)
    told = rf"{second} could not be written: File too large; .*`ulimit -f`"
    with files_limited_to(50_000), pytest.raises(StorageError, match=told):
        write(second, 100_000, source)
    assert list_versions(first.parent) == [WeightVersion(1, 0)]
    assert [entry.name for entry in first.parent.iterdir()] == [first.name]
    verify_version(first, WeightVersion(1, 0))


def test_a_version_on_a_full_disk(small_disk, source):
    first, second = (version_dir(small_disk, "actor", WeightVersion(1, number)) for number in range(2))
    write(first, 1_000_000, source)
    with pytest.raises(
        StorageError, match=rf"{second} could not be written: No space left on device; .* of 8\.4 MB are free"
    ):
        write(second, 2_000_000, source)
    assert [entry.name for entry in first.parent.iterdir()] == [first.name]
    verify_version(first, WeightVersion(1, 0))


def test_a_journal_on_a_full_disk(small_disk):
    writer = JsonLinesWriter(small_disk / "journal.jsonl")
    records = [{"step": step, "text": "x" * 200_000} for step in range(100)]
    with pytest.raises(
        StorageError, match=r"journal\.jsonl could not be written: No space left on device; 0 B of 8\.4 MB"
    ):
        list(map(writer.write, records))
    writer.close()
    whole = read_json_lines(small_disk / "journal.jsonl")  # an incomplete last line is ignored
    assert [record["step"] for record in whole] == list(range(len(whole)))
    assert len(whole) > 30


def test_a_folder_that_cannot_be_written(tmp_path, read_only):
    with pytest.raises(
        StorageError, match=r"master\.jsonl could not be written: Read-only file system; make the folder writable"
    ):
        JsonLinesWriter(read_only / "journal" / "master.jsonl")
    with pytest.raises(StorageError, match="Read-only file system"):
        EventFile(read_only / "tensorboard")
    assert Path(read_only).is_dir()


# ------------------------------------------------------------------------------------------- a disk that is full for a moment


class Disk:
    """Refuses some writes with the given errors, and accepts the next one."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def write(self):
        if self.errors:
            raise self.errors.pop(0)
        return "written"


def test_a_write_is_repeated_while_the_disk_is_full():
    clock = ManualClock(0.0)
    quota = OSError(errno.EDQUOT, "?")
    assert (
        write_when_there_is_room(Path("/file"), Disk(FULL, quota, FULL).write, Failures(30.0), clock=clock) == "written"
    )
    assert 0.5 < clock.now < 2.0
    with pytest.raises(StorageError, match="No space left on device"):
        write_when_there_is_room(Path("/file"), Disk(*[FULL] * 1000).write, Failures(30.0), clock=clock)
    assert 30.0 < clock.now < 34.0


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "?"), OSError(errno.EIO, "?"), OSError(errno.EFBIG, "?")]
)
def test_a_write_that_fails_for_another_reason_is_not_repeated(error):
    clock = ManualClock(0.0)
    with pytest.raises(StorageError):
        write_when_there_is_room(Path("/file"), Disk(error).write, Failures(30.0), clock=clock)
    with pytest.raises(StorageError, match="No space left"):  # the first error, not its consequence
        write_when_there_is_room(
            Path("/file"), Disk(FULL, FileNotFoundError("half a version")).write, Failures(30.0), clock=clock
        )
    with pytest.raises(ValueError, match="no disk"):
        write_when_there_is_room(Path("/file"), Disk(ValueError("no disk")).write, Failures(30.0), clock=clock)
    assert clock.now < 1.0


@pytest.mark.parametrize(
    "make", [lambda disk: JsonLinesWriter(disk / "lines"), lambda disk: EventFile(disk / "events")]
)
def test_metrics_survive_a_disk_that_is_full_for_a_moment(small_disk, make):
    writer = make(small_disk)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    removal = threading.Timer(0.3, ballast.unlink)
    removal.start()
    large = {f"group/{number}": float(number) for number in range(3000)}
    if isinstance(writer, EventFile):
        writer.write(1, large)
        size = next((small_disk / "events").iterdir()).stat().st_size
        writer.write(2, large)
        assert (
            next((small_disk / "events").iterdir()).stat().st_size - size < 1.1 * size
        )  # no part of a failed write is left
    else:
        writer.write(large)
        assert read_json_lines(small_disk / "lines") == [large]
    removal.join()
    writer.close()


def test_a_version_survives_a_disk_that_is_full_for_a_moment(small_disk, source):
    """Also while its last files are written, when a second try would find half a version."""
    path = version_dir(small_disk, "actor", WeightVersion(1, 1))
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    removal = threading.Timer(0.3, ballast.unlink)
    removal.start()
    write(path, 100_000, source)
    removal.join()
    verify_version(path)


def record(folder):
    meta, sample = make_group(0)
    store = make_store(folder, trained=False, prune=False)
    store.write(0, 1, [Entry(sample, meta, 0)])
    assert store.num_files == len(list_recording(recording_dir(folder, 1))) == 1


def record_initial_weights(folder):
    model = folder.parent / "a_model"
    make_tiny_model(model)
    path = version_dir(folder, "actor", WeightVersion(1, 0))
    publish_folder(path, source_dir=model, version=WeightVersion(1, 0))
    verify_version(path)


def write_a_checkpoint(folder):
    path = folder / "checkpoints" / "one"
    files = write_part(path, [("w", torch.ones(1000))], others={"state": b"{}"})

    def finish(writer):
        writer.rename(files[0].name, "renamed")
        writer.write("last", [b"x"])

    commit_folder(path, files, finish, fsync=True)
    assert sorted(entry.name for entry in path.iterdir()) == ["last", "renamed", "state"]


def write_again(folder):
    """Replace a damaged version."""
    path = folder / "weights" / "one"
    for number in range(2):
        files = write_part(path, [("w", torch.full((1000,), float(number)))])
        commit_folder(path, files, lambda writer: None, fsync=False, replace=True)
    assert [entry.name for entry in path.parent.iterdir()] == ["one"]


def summarise(folder):
    MasterFiles(SimpleNamespace(worker=SimpleNamespace(run_dir=str(folder)))).write_summary({"steps": 3})
    assert msgspec.json.decode((folder / "summary.json").read_bytes()) == {"steps": 3}


def begin_an_attempt(folder):
    attempt = begin_attempt(folder)
    assert (attempt, logs_dir(folder, attempt).is_dir()) == (1, True)
    assert (folder / "logs" / "latest").readlink() == Path("attempt_1")
    run_record = RunRecord(pid=4, attempt=1, experiment="e", trial="t", endpoints=["h:1"], started=3.0)
    write_record(folder, run_record)
    assert read_record(folder) == run_record


def write_a_config(folder):
    save_config(ExperimentConfig(), folder / "configs" / "attempt_1" / "master.yaml")
    assert (folder / "configs" / "attempt_1" / "master.yaml").stat().st_size > 100


def begin_journals_and_metrics(folder):
    JsonLinesWriter(folder / "journal" / "master.jsonl").close()
    EventFile(folder / "tensorboard").close()
    assert (folder / "journal" / "master.jsonl").is_file()


def make_the_ticket_key(folder):
    assert make_key(folder / "run") == read_key(folder / "run")


WRITERS = (
    record,
    record_initial_weights,
    write_a_checkpoint,
    write_again,
    summarise,
    begin_an_attempt,
    write_a_config,
    begin_journals_and_metrics,
    make_the_ticket_key,
)


@pytest.mark.parametrize("write_files", WRITERS)
def test_what_a_run_writes_survives_a_disk_that_is_full_for_a_moment(mount, write_files):
    """Full of bytes and of files: neither a folder nor a file can be made."""
    disk = mount("size=8m,nr_inodes=100")
    ballast = disk / "ballast"
    ballast.mkdir()
    with contextlib.suppress(OSError):
        for number in range(1000):
            (ballast / str(number)).touch()
    with (ballast / "0").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    removal = threading.Timer(0.3, shutil.rmtree, [ballast])
    removal.start()
    try:
        write_files(disk)
    finally:
        removal.join()


@pytest.mark.parametrize("write_files", WRITERS)
@pytest.mark.parametrize("call", ["rename", "mkdir"])
def test_renames_and_folders_survive_a_disk_that_is_full_for_a_moment(tmp_path, monkeypatch, write_files, call):
    """On file systems that need room for a rename. Each one fails once."""
    done, failed = getattr(Path, call), set()

    def full_at_first(path, *arguments, **options):
        if str(path).startswith(str(folder)) and path not in failed:
            failed.add(path)
            raise FULL
        return done(path, *arguments, **options)

    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(Path, call, full_at_first)
    write_files(folder)


def test_a_disk_that_stays_full_ends_a_recording_with_its_cause(mount, monkeypatch):
    disk = mount("size=8m,nr_inodes=3")
    (disk / "file").touch()
    monkeypatch.setattr("asyncrl.data.trajectories._FULL_LIMIT_S", 0.3)
    (disk / "another").touch()
    with pytest.raises(StorageError, match="attempt_1 could not be written: No space left on device"):
        record(disk)
