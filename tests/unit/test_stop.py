"""`asyncrl-launch stop` with a launcher that misses signals, and with a damaged run record."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import main as cli
from asyncrl.launch.rundir import LOCK_FILE
from asyncrl.launch.slurm import JobRecord, read_job, slurm_dir, write_job

# A launcher that ends after the given number of SIGTERMs, like one that was suspended and missed some: of several equal pending
# signals the kernel keeps one.
LAUNCHER = """
import signal, sys
from pathlib import Path
from asyncrl.launch.rundir import RunLock

lock = RunLock(Path(sys.argv[1]))
lock.acquire()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready", flush=True)
while len(told) < int(sys.argv[2]):
    signal.sigtimedwait([], 0.1)
lock.release()
"""


def test_stop_now_repeats_its_signal_until_the_launcher_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), "3"], stdout=subprocess.PIPE, text=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "ready\n"
            assert cli.main(["stop", str(tmp_path), "--now"]) == 0
            assert launcher.wait(60) == 0
        finally:
            launcher.kill()


def test_a_process_that_does_not_hold_the_lock_gets_no_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher runs in another container, where its process has another number."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), "1"], stdout=subprocess.PIPE, text=True
        ) as launcher,
        subprocess.Popen(["sleep", "60"]) as stranger,
    ):
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "ready\n"
            (tmp_path / LOCK_FILE).write_text(f"{stranger.pid}\n")
            assert cli.main(["stop", str(tmp_path)]) == 1
            assert "is not one of this machine or container" in " ".join(capsys.readouterr().out.split())
            assert stranger.poll() is None
        finally:
            stranger.kill()
            launcher.kill()


def test_the_copy_of_a_run_has_no_part_in_its_job(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    slurm_dir(run).mkdir(parents=True)
    (slurm_dir(run) / "job.sbatch").touch()
    record = JobRecord(job_id="7", script=str(slurm_dir(run) / "job.sbatch"), output="")
    write_job(run, record)
    shutil.copytree(run, copy)
    assert read_job(run) == record
    assert read_job(copy) is None  # otherwise `stop` of the copy would cancel the job
    run.rename(tmp_path / "moved")
    assert read_job(tmp_path / "moved") == record


def test_a_run_with_a_damaged_record_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"pid": ')
    assert cli.main(["stop", str(tmp_path)]) == 1  # no launcher runs
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), "1"], stdout=subprocess.PIPE, text=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "ready\n"
            assert cli.main(["stop", str(tmp_path)]) == 0
            assert launcher.wait(60) == 0
        finally:
            launcher.kill()
