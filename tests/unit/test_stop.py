"""`asyncrl-launch stop` with a launcher that misses signals, and with a damaged run record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncrl.cli import main as cli

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
