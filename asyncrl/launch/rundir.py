"""The folder of a run: who runs in it, which attempt this is, where things are.

<fileroot>/<experiment>/<trial>/
  config.yaml          what the user asked for, merged
  launcher.lock        held, and its pid in it, as long as a launcher lives
  run.json             the newest attempt: its number, when it began, its name-resolve endpoints
  configs/attempt_N/   each process's resolved config
  logs/attempt_N/      each process's output; logs/latest is the newest
  metrics.jsonl  tensorboard/  summary.json  journal/  weights/  checkpoints/  etcd/
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

import msgspec

LOCK_FILE = "launcher.lock"
RUN_FILE = "run.json"
RUN_DIR_ENV = "ASYNCRL_RUN_DIR"  # every process of a run has it, and hands it on to what it starts itself
_PID_LIMIT_S = 1.0  # between taking the lock and writing the pid into it


class LaunchError(RuntimeError):
    """The run could not start, or failed; the message is the first cause, with its traceback and where to look."""


class RunBusyError(LaunchError):
    """Another launcher runs in this folder."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: how `status` finds a run."""

    pid: int
    attempt: int
    experiment: str
    trial: str
    endpoints: list[str]
    started: float


def logs_dir(run_dir: Path, attempt: int) -> Path:
    return run_dir / "logs" / f"attempt_{attempt}"


def configs_dir(run_dir: Path, attempt: int) -> Path:
    return run_dir / "configs" / f"attempt_{attempt}"


class RunLock:
    """Held by the launcher as long as it lives, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fd = -1

    def acquire(self) -> None:
        """Raises RunBusyError where another launcher holds it, LaunchError where the folder cannot be written."""
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LaunchError(
                f"the run's folder {self._run_dir} cannot be written: {error}; set fileroot=..."
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise RunBusyError(
                f"{self._run_dir} is in use by process {holder(self._run_dir)}; stop it with "
                f"`asyncrl-launch stop {self._run_dir}`, or choose another trial=..."
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def holder(run_dir: Path) -> int | None:
    """Pid of the launcher that holds the folder. None if none does."""
    deadline = time.monotonic() + _PID_LIMIT_S
    while is_running(run_dir):
        pid = (run_dir / LOCK_FILE).read_text().strip()
        if pid:
            return int(pid)
        if time.monotonic() > deadline:
            raise LaunchError(f"{run_dir / LOCK_FILE} is locked, and names no process")
        time.sleep(0.01)
    return None


def is_running(run_dir: Path) -> bool:
    """Whether a launcher holds the folder."""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
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
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        try:
            logs_dir(run_dir, attempt).mkdir()
        except FileExistsError:
            attempt += 1
            continue
        latest = run_dir / "logs" / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"attempt_{attempt}")
        summary = run_dir / "summary.json"
        if summary.exists():  # of an attempt before: it must not pass for this one's
            summary.rename(logs_dir(run_dir, attempt - 1) / "summary.json")
        return attempt


def write_record(run_dir: Path, record: RunRecord) -> None:
    temporary = run_dir / f".{RUN_FILE}"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.rename(run_dir / RUN_FILE)


def read_record(run_dir: Path) -> RunRecord | None:
    """None where no run was started. Raises LaunchError where the file is broken."""
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise LaunchError(f"{run_dir / RUN_FILE} cannot be read: {error}") from error
