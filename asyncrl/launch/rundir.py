"""The folder of a run: who runs in it, which attempt this is, where things are.

<fileroot>/<experiment>/<trial>/
  config.yaml          what the user asked for, merged
  run.json             the launcher's pid, attempt and name-resolve endpoints
  configs/attempt_N/   each process's resolved config
  logs/attempt_N/      each process's output
  metrics.jsonl  tensorboard/  summary.json  journal/  weights/  checkpoints/  etcd/
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

LOCK_FILE = "launcher.lock"
RUN_FILE = "run.json"
RUN_DIR_ENV = "ASYNCRL_RUN_DIR"  # every process of a run has it, and hands it on to what it starts itself


class RunBusyError(RuntimeError):
    """Another launcher runs in this folder."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: how `status` and `stop` find a run."""

    pid: int
    attempt: int
    experiment: str
    trial: str
    endpoints: list[str]
    started: float


class RunLock:
    """Held by the launcher as long as it lives, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_FILE
        self._fd = -1

    def acquire(self) -> None:
        """Raises RunBusyError where another launcher holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            record = read_record(self._path.parent)
            who = f" by process {record.pid}" if record else ""
            raise RunBusyError(
                f"{self._path.parent} is in use{who}; stop it with `asyncrl-launch stop {self._path.parent}` "
                "or choose another trial=..."
            ) from None

    def release(self) -> None:
        os.close(self._fd)


def is_running(run_dir: Path) -> bool:
    """Whether a launcher holds the folder."""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def begin_attempt(run_dir: Path) -> int:
    """Number of this attempt: the first for which logs/attempt_N could be made. A directory is made once, so the number is ours."""
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        try:
            (logs / f"attempt_{attempt}").mkdir()
        except FileExistsError:
            attempt += 1
            continue
        latest = logs / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"attempt_{attempt}")
        return attempt


def write_record(run_dir: Path, record: RunRecord) -> None:
    temporary = run_dir / f".{RUN_FILE}"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.rename(run_dir / RUN_FILE)


def read_record(run_dir: Path) -> RunRecord | None:
    """None where no run was started."""
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
