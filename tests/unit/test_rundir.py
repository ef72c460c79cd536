"""The folder of a run: its lock, attempts, run record and file modes."""

import grp
import os
import shutil
import stat
import subprocess
import sys
import threading

import pytest

from asyncrl.launch.rundir import (
    LOCK_FILE,
    LaunchError,
    RunBusyError,
    RunLock,
    RunRecord,
    begin_attempt,
    holder,
    is_running,
    keep_private,
    read_record,
    write_record,
)

RECORD = RunRecord(pid=4, attempt=2, experiment="e", trial="t", endpoints=["h:1"], started=3.0)


def test_only_one_launcher_can_hold_the_lock(tmp_path):
    run_dir = tmp_path / "e" / "t"
    assert not is_running(run_dir)
    assert holder(run_dir) is None
    lock = RunLock(run_dir)
    lock.acquire()
    assert is_running(run_dir)
    assert holder(run_dir) == os.getpid()
    with pytest.raises(RunBusyError, match=f"in use by process {os.getpid()}; stop it with `asyncrl-launch stop"):
        RunLock(run_dir).acquire()
    lock.release()
    assert not is_running(run_dir)
    second = RunLock(run_dir)
    second.acquire()
    second.release()


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from asyncrl.launch.rundir import RunLock\n"
        "RunLock(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert (tmp_path / "launcher.lock").read_text()  # the file keeps the pid of the dead process, without effect
    assert not is_running(tmp_path)
    assert holder(tmp_path) is None
    lock = RunLock(tmp_path)
    lock.acquire()
    assert holder(tmp_path) == os.getpid()
    lock.release()


def test_a_launcher_that_takes_over_challenges_the_holder_of_the_lock(tmp_path):
    holding, coming = RunLock(tmp_path), RunLock(tmp_path)
    holding.acquire()
    assert not holding.is_challenged()
    with pytest.raises(RunBusyError):
        coming.acquire(take_over_s=0.01)
    assert holding.is_challenged()
    taking_over = threading.Thread(target=coming.acquire, kwargs={"take_over_s": 60})
    taking_over.start()
    holding.release()
    taking_over.join(60)
    assert not coming.is_challenged()
    with pytest.raises(RunBusyError):
        RunLock(tmp_path).acquire()
    coming.release()


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be written: .* set fileroot=\.\.\."):
        RunLock(tmp_path / "file" / "e").acquire()
    assert not is_running(tmp_path / "file" / "e")
    assert read_record(tmp_path / "file" / "e") is None


def test_attempts_are_numbered_by_their_folders(tmp_path):
    assert [begin_attempt(tmp_path) for _ in range(3)] == [1, 2, 3]
    assert os.readlink(tmp_path / "logs" / "latest") == "attempt_3"
    assert (tmp_path / "logs" / "latest").is_dir()


def test_attempt_numbers_keep_growing_after_the_folder_was_removed(tmp_path):
    first = begin_attempt(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert begin_attempt(tmp_path / "run", after=first) == first + 1


@pytest.mark.parametrize("way", ["removed", "moved", "removed and made anew"])
def test_a_lock_reports_that_its_folder_is_gone(tmp_path, way):
    run_dir = tmp_path / "run"
    lock = RunLock(run_dir)
    lock.acquire()
    assert not lock.lost()
    if way == "moved":
        run_dir.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(run_dir)
    if way == "removed and made anew":
        run_dir.mkdir()
        (run_dir / LOCK_FILE).touch()
    assert f"the run's folder {run_dir}, or launcher.lock in it, was removed or moved" in lock.lost()
    lock.release()


def test_a_written_record_is_read_back(tmp_path):
    assert read_record(tmp_path) is None
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_broken_record_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"pid": "x"')
    with pytest.raises(LaunchError, match=r"run\.json cannot be read"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b'{"pid": 1', pytest.param(b"\0" * 100, id="zeros"), b"[]", b'{"pid": "four"}']
)
def test_the_error_for_a_broken_record_has_its_content_and_a_remedy(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    told = rf"it has {len(content)} bytes.*\. Move it away; the next run here writes a new one"
    with pytest.raises(LaunchError, match=told) as error:
        read_record(tmp_path)
    assert repr(content[:40]) in str(error.value) or not content


def test_a_folder_in_the_place_of_the_link_to_the_newest_logs_is_refused(tmp_path):
    """A copy that follows symbolic links leaves such a folder."""
    (tmp_path / "logs" / "latest").mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"logs/latest is a folder, but .* move it away \(mv "):
        begin_attempt(tmp_path)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["latest"]
    (tmp_path / "logs" / "latest").rename(tmp_path / "logs" / "latest.old")
    assert begin_attempt(tmp_path) == 1


def test_a_file_in_the_place_of_the_link_is_replaced(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "latest").write_text("")
    begin_attempt(tmp_path)
    assert os.readlink(tmp_path / "logs" / "latest") == "attempt_1"


# ------------------------------------------------------------------------------------------------------------------ file modes


@pytest.fixture
def umask():
    """Sets the umask to 022, and restores the old one after the test."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}


def test_only_its_user_can_access_the_files_of_a_run(tmp_path, umask):
    run_dir = tmp_path / "experiment" / "trial"
    keep_private(run_dir)
    (run_dir / "weights").mkdir()
    subprocess.run([sys.executable, "-c", "open('by_a_child', 'w')"], cwd=run_dir, check=True)
    assert modes(run_dir) == {"trial": 0o700, "weights": 0o700, "by_a_child": 0o600}
    assert stat.S_IMODE(run_dir.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700  # existing parents keep their modes


def test_an_existing_run_folder_that_others_can_read_becomes_private(tmp_path, umask):
    run_dir = tmp_path / "trial"
    run_dir.mkdir(mode=0o755)
    keep_private(run_dir)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_run_can_be_shared_with_a_unix_group(tmp_path, umask):
    run_dir, group = tmp_path / "experiment" / "trial", grp.getgrgid(os.getgid()).gr_name
    keep_private(run_dir, group)
    (run_dir / "weights").mkdir()
    (run_dir / "metrics.jsonl").write_text("")
    assert modes(run_dir) == {"trial": 0o2750, "weights": 0o2750, "metrics.jsonl": 0o640}
    assert {path.stat().st_gid for path in run_dir.iterdir()} == {os.getgid()}
    with pytest.raises(LaunchError, match=r"runtime.group='no such group': this machine has no such group"):
        keep_private(run_dir, "no such group")
