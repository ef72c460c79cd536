"""The folder of a run: its lock, its attempts and its layout.

<fileroot>/<experiment>/<trial>/
  config.yaml          the user's config, merged and resolved (config/resolve.py), without secrets
  launcher.lock        locked while a launcher lives, and contains its pid
  run.json             the newest launch: its pid, its newest attempt, when it began, how to reach its name resolve, why it failed
  configs/attempt_N/   each process's resolved config; experiment.yaml: the run's config, which `resume` uses;
                       inputs.json: the state of the user's files when the launch began
  logs/attempt_N/      each process's output; logs/latest links to the newest attempt
  ticket.key           key with which the gserver manager seals tickets and the master verifies them
  metrics.jsonl  tensorboard/  summary.json  journal/  weights/  checkpoints/  trajectories/  etcd/
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path

import msgspec

from asyncrl import __version__
from asyncrl.config.schema import NameResolveConfig
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.disk import explain, write_file, write_when_there_is_room

LOCK_FILE = "launcher.lock"
RUN_FILE = "run.json"
# Version of all files that a run writes: metrics, journals, weights. Incremented when the format of one of them changes
RUN_FORMAT = 1
RUN_DIR_ENV = "ASYNCRL_RUN_DIR"  # set in every process of a run, and inherited by its children
LAUNCH_ENV = "ASYNCRL_LAUNCH"  # the same, but its value belongs to one launch of the run
SUMMARY_FILE = "summary.json"  # written at the end of a complete run
EXPERIMENT_FILE = "experiment.yaml"  # complete, unlike config.yaml, in which secrets are hidden
_ATTEMPT = re.compile(r"(?:attempt_|a)(\d+)(?:-[vs]\d+)?$")
_CHALLENGE_FILE = "launcher.challenge"
_CHALLENGE_S = 0.2
_SHOWN_BYTES = 40  # bytes of a damaged run.json that an error message shows
_PID_LIMIT_S = 1.0  # a launcher writes its pid into the lock file within this time after taking the lock


class LaunchError(RuntimeError):
    """A run could not start or has failed, or a command cannot do its work. If a process of the run failed, the message is the
    first cause, with its traceback or the end of its log, and the path of the log."""


class RunBusyError(LaunchError):
    """Another launcher or Slurm job uses this run's folder."""


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of run.json that exist in every format."""

    format: int = 1
    release: str = ""


class RunRecord(_Written, frozen=True, kw_only=True):
    """run.json: what commands such as `status` need to reach a run, and the format of the folder's files."""

    format: int = RUN_FORMAT
    release: str = __version__
    pid: int
    attempt: int
    experiment: str
    trial: str
    endpoints: list[str]
    started: float  # when the launch began, unix seconds
    attempt_started: float = 0.0  # when this attempt began, if it is not the first one of the launch
    on_stop_s: float = 0.0  # checkpoint.on_stop_s: how long the run may continue after it is told to stop

    # The complete config to reach name resolve. Secrets are in it as paths of files. None: an older release has begun the run
    name_resolve: NameResolveConfig | None = None
    total_steps: int = 0  # train steps of the complete run; 0: an older release has begun it
    host: str = ""  # the launcher's host, if the run has several; pid and lock are valid only there
    failure: str = ""  # the launcher's report of the failure that ended this launch, first cause first

    @property
    def attempt_began(self) -> float:
        return self.attempt_started or self.started

    @property
    def names_at(self) -> NameResolveConfig:
        return self.name_resolve or NameResolveConfig(endpoints=self.endpoints)


def logs_dir(run_dir: Path, attempt: int) -> Path:
    return run_dir / "logs" / f"attempt_{attempt}"


def all_logs_dirs(run_dir: Path) -> list[Path]:
    """Return the log folders of all attempts, the newest last."""
    return sorted((run_dir / "logs").glob("attempt_*"), key=lambda path: (len(path.name), path.name))


def configs_dir(run_dir: Path, attempt: int) -> Path:
    return run_dir / "configs" / f"attempt_{attempt}"


def newest_experiment(run_dir: Path) -> Path | None:
    """Return the path of the experiment.yaml of the newest launch in this folder; None if there is none. A launch writes this file
    beside the configs of its first attempt."""
    found = {
        int(file.parent.name[len("attempt_") :]): file for file in run_dir.glob(f"configs/attempt_*/{EXPERIMENT_FILE}")
    }
    return found[max(found)] if found else None


def keep_private(run_dir: Path, group: str = "") -> None:
    """Create the run's folder, and set the umask so that only this user can access files of this process and its children.

    From now on files have mode 0600 and folders 0700. With a Unix group (runtime.group), its members can read them: 0640 and 0750.
    The mode of an existing run folder changes, too. Raises LaunchError if the folder cannot be created, the group does not exist,
    or this user is not in it.
    """
    os.umask(0o027 if group else 0o077)
    try:
        gid = grp.getgrnam(group).gr_gid if group else -1
        new = [folder for folder in run_dir.parents if not folder.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in (run_dir, *new):
            os.chown(folder, -1, gid)
            folder.chmod(0o2750 if group else 0o700)  # setgid: files created inside inherit the group
    except KeyError as error:
        raise LaunchError(f"runtime.group={group!r}: this machine has no such group; `id -Gn` lists yours") from error
    except PermissionError as error:
        if group and run_dir.exists():
            raise LaunchError(
                f"runtime.group={group!r}: {run_dir} cannot be assigned to it ({error.strerror}); name a group that you are in: "
                "`id -Gn` lists them"
            ) from error
        raise LaunchError(f"the run's folder {run_dir} cannot be written: {error}; set fileroot=...") from error
    except OSError as error:
        raise LaunchError(f"the run's folder {run_dir} cannot be written: {error}; set fileroot=...") from error


class RunLock:
    """The lock of a run's folder. The launcher holds it while it lives; the kernel releases it when the process ends."""

    def __init__(self, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._fd = -1

    def acquire(self, take_over_s: float = 0.0) -> None:
        """Take the lock. Raises RunBusyError if another launcher holds it, LaunchError if the folder cannot be written.

        take_over_s: how long to wait for another launcher to end. That launcher is asked to end, because the batch system has given
        it up, which that launcher may not know.
        """
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LaunchError(
                f"the run's folder {self._run_dir} cannot be written: {error}; set fileroot=..."
            ) from error
        if not self._lock(take_over_s):
            os.close(self._fd)
            raise RunBusyError(
                f"{self._run_dir} is in use by process {holder(self._run_dir)}; stop it with "
                f"`asyncrl-launch stop {self._run_dir}`, or choose another trial=..."
            )
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._fd)
            raise LaunchError(f"{explain(self._run_dir / LOCK_FILE, error) or error}") from error

    def _lock(self, take_over_s: float) -> bool:
        deadline = self._clock.monotonic() + take_over_s
        challenge = self._run_dir / _CHALLENGE_FILE
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock.monotonic() >= deadline:
                    return False
                challenge.touch()
                self._clock.sleep(_CHALLENGE_S)
            else:
                challenge.unlink(missing_ok=True)  # made above, or by a launcher that gave up waiting
                return True

    def is_challenged(self) -> bool:
        """Whether another launcher was started to replace this one, and waits until this one has ended."""
        return (self._run_dir / _CHALLENGE_FILE).exists()

    def lost(self) -> str:
        """Return an error if the folder, or the lock in it, was removed or moved; "": it is in place."""
        try:
            os.stat(self._run_dir / LOCK_FILE)
            if os.fstat(self._fd).st_nlink:  # 0 links: the locked file was deleted, and another one is there now
                return ""
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # the file system does not answer at the moment
            return ""
        return (
            f"the run's folder {self._run_dir}, or {LOCK_FILE} in it, was removed or moved during the run. The run can no "
            "longer write there, so it ends. Do not change the folder of a run before the run has ended "
            f"(`asyncrl-launch stop {self._run_dir}`)"
        )

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def holder(run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> int | None:
    """Return the pid of the launcher that holds the folder's lock. None if no launcher does."""
    deadline = clock.monotonic() + _PID_LIMIT_S
    while is_running(run_dir):
        pid = (run_dir / LOCK_FILE).read_text().strip()
        if pid:
            return int(pid)
        if clock.monotonic() > deadline:
            raise LaunchError(f"{run_dir / LOCK_FILE} is locked, but contains no pid")
        clock.sleep(0.01)
    return None


def has_lock(pid: int, run_dir: Path) -> bool:
    """Whether a process has the folder's lock file open. The number in that file alone is no proof: it may be that of a process of
    another container, and the system reuses numbers."""
    try:
        lock = os.stat(run_dir / LOCK_FILE)
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), lock):
                    return True
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")  # a system without /proc
    except OSError:  # another user's process: a signal does not reach it either
        return True
    return False


def is_folder(recorded: str, folder: Path) -> bool:
    """Whether a recorded path can be that of this folder. False if it is that of another folder on this machine, as in the copy of
    a run. True if no such path exists here, because the folder may be mounted elsewhere, or may have been moved."""
    try:
        return os.path.samefile(recorded, folder)
    except OSError:
        return True


def is_running(run_dir: Path) -> bool:
    """Whether a launcher holds the folder's lock."""
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


def begin_attempt(run_dir: Path, after: int = 0) -> int:
    """Begin an attempt and return its number, which is higher than that of every attempt with files here. The number is unique,
    because only one launcher can create the log folder of that number. Raises LaunchError.

    after: number of the previous attempt of the same launch. So numbers grow even if files were removed from the folder.
    """
    check_folder(run_dir)
    logs = run_dir / "logs"
    write_when_there_is_room(logs, lambda: logs.mkdir(parents=True, exist_ok=True))
    attempt = max(next_attempt(run_dir), after + 1)
    while True:
        try:
            folder = logs_dir(run_dir, attempt)
            write_when_there_is_room(folder, folder.mkdir)
        except FileExistsError:
            attempt += 1
            continue
        latest = _latest_logs(run_dir)
        latest.unlink(missing_ok=True)
        write_when_there_is_room(latest, partial(latest.symlink_to, f"attempt_{attempt}"))
        summary = run_dir / SUMMARY_FILE
        if summary.exists():  # move an earlier attempt's summary away, so that it is not mistaken for this attempt's
            logs_dir(run_dir, attempt - 1).mkdir(exist_ok=True)
            summary.rename(logs_dir(run_dir, attempt - 1) / SUMMARY_FILE)
        return attempt


def link_logs(run_dir: Path, attempt: int, *, before: int, anew: Collection[str]) -> None:
    """Link the logs of processes that continue from the previous attempt into this attempt's log folder.

    anew: log file names, without suffix, of the processes that do not continue.
    """
    folder = logs_dir(run_dir, attempt)
    for log in sorted(logs_dir(run_dir, before).glob("*.log")):
        ends = any(log.stem == stem or log.stem.startswith(f"{stem}_") for stem in anew)
        if not ends and not (folder / log.name).exists():
            (folder / log.name).symlink_to(os.path.relpath(log.resolve(), folder.resolve()))


def next_attempt(run_dir: Path) -> int:
    """Return the number of the next attempt, above that of every attempt that has logs, configs, weight versions or checkpoints
    here. Does not reserve the number."""
    names = [
        path.name
        for pattern in ("logs/attempt_*", "configs/attempt_*", "weights/*/a*-v*", "checkpoints/recover/a*-s*")
        for path in run_dir.glob(pattern)
    ]
    numbers = [int(match[1]) for name in names if (match := _ATTEMPT.match(name))]
    return max(numbers, default=0) + 1


def check_folder(run_dir: Path) -> None:
    """Raise LaunchError if no attempt can begin here: the record is damaged or of another format, or logs/latest is a folder."""
    try:
        read_record(run_dir)
    except LaunchError as error:
        raise LaunchError(f"{error}. To start anew choose another trial=..., or move {run_dir} away") from error
    latest = _latest_logs(run_dir)
    if latest.is_dir() and not latest.is_symlink():  # after the folder was copied and the copy followed links
        raise LaunchError(
            f"{latest} is a folder, but must be a link to the newest logs: move it away (mv {latest} {latest}.old)"
        )


def _latest_logs(run_dir: Path) -> Path:
    return run_dir / "logs" / "latest"


def write_record(run_dir: Path, record: RunRecord) -> None:
    write_file(run_dir / RUN_FILE, msgspec.json.encode(record))


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of the newest attempt. None if no run was started here. Raises LaunchError if the file is damaged, or has
    another format than RUN_FORMAT."""
    data = b""
    try:
        data = (run_dir / RUN_FILE).read_bytes()
        written = msgspec.json.decode(data, type=_Written)
        if written.format != RUN_FORMAT:
            raise LaunchError(
                f"{run_dir} was written by asyncrl {written.release or 'of another release'} in format {written.format}; "
                f"this is asyncrl {__version__}, which supports format {RUN_FORMAT}: use that release for this run"
            )
        return msgspec.json.decode(data, type=RunRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (*DECODE_ERRORS, OSError) as error:
        raise LaunchError(
            f"{run_dir / RUN_FILE} cannot be read: {error}; it has {len(data)} bytes{_beginning(data)}. Move it away; the next run "
            "here writes a new one"
        ) from error


def _beginning(data: bytes) -> str:
    return f", beginning with {data[:_SHOWN_BYTES]!r}" if data else ""
