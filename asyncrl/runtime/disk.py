"""What a person is told when a file of a run cannot be written: which, why, how much room there is, and what helps.

The system says `No space left on device` and mostly not where. Whatever writes into a run's folder does so inside
`writing(path)`, which puts the rest to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
NO_MORE_FILES = {errno.EMFILE, errno.ENFILE}  # open ones: sockets and pipes count, too
_EXPLAINED = {
    *_FULL,
    *_FORBIDDEN,
    *NO_MORE_FILES,
    errno.EFBIG,
    errno.EIO,
}  # others are no matter of disks: a folder that is gone
_MAX_CAUSES = 20  # of an error, one behind the other
_OPEN_FILES = 65_536  # enough; more would make starting a process slow on systems that close them one by one
LEAST_OPEN_FILES = 256  # the quickstart runs with so many; etcd refuses fewer than 150
MORE_OPEN_FILES = (
    "raise the hard limit as root: /etc/security/limits.conf, a service's LimitNOFILE, docker run --ulimit nofile=65536"
)
_NEARLY_FULL_BYTES = 64_000_000  # etcd asks for as much at once
# libraries written in Rust (safetensors) raise errors of their own, which have the system's number in their text only
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class StorageError(OSError):
    """A file of the run could not be written. The text has path, reason, room and remedy, and is enough without a traceback."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise StorageError about path for what the system refuses inside. What else is raised inside passes through."""
    try:
        yield
    except Exception as error:
        explained = explain(path, error)
        if explained is None or isinstance(error, StorageError):
            raise
        raise explained from error


def write_private(path: Path, content: bytes) -> None:
    """For its owner only (0600), in the place of an older one, and whole at any time. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)


def explain(path: Path, error: Exception) -> StorageError | None:
    """The error as a StorageError about path; None if it is none of a disk's."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    if number not in _EXPLAINED:
        return None
    assert number is not None
    if number in NO_MORE_FILES:
        return StorageError(f"{path} could not be opened: {too_many_open_files(number)}")
    return StorageError(f"{path} could not be written: {os.strerror(number)}; {_remedy(path, number)}")


def too_many_open_files(number: int) -> str:
    """What is the matter and what helps where a file, socket or pipe cannot be opened."""
    if number == errno.ENFILE:
        return f"{os.strerror(number)} on the whole machine; raise it: sysctl fs.file-max"
    allowed, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{os.strerror(number)}: this process may have {allowed}, sockets and pipes included, and {highest} if that were raised; "
        "raise both (`ulimit -Hn 65536`, LimitNOFILE of a service), or set rollout.max_concurrent_per_worker=... lower"
    )


def out_of_files(error: object) -> StorageError | None:
    """The error as a StorageError, if it, or what has caused it, is that no file, socket or pipe can be opened any more."""
    for _ in range(_MAX_CAUSES):
        if not isinstance(error, BaseException):
            return None
        if isinstance(error, StorageError):
            return None
        if (number := getattr(error, "errno", None)) in NO_MORE_FILES:
            return StorageError(f"{too_many_open_files(number)} ({error})")
        error = error.__cause__ or error.__context__
    return None


def too_few_open_files(highest: int) -> str:
    """Why a run cannot start under this hard limit, and the remedy. "" where it can."""
    if highest == resource.RLIM_INFINITY or highest >= LEAST_OPEN_FILES:
        return ""
    return f"`ulimit -Hn` is {highest}, and each process of a run needs at least {LEAST_OPEN_FILES} open files; {MORE_OPEN_FILES}"


def raise_open_files() -> None:
    """Let this process, and those that it starts, have as many open files as the system lets it have without asking."""
    allowed, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if highest == resource.RLIM_INFINITY else min(highest, _OPEN_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))


def _remedy(path: Path, number: int) -> str:
    if number in _FULL:
        return f"{room(path)}. Make room there, keep less (weights.keep=1), or set fileroot=... to a larger disk"
    if number == errno.EFBIG:
        return (
            "files of this size are not allowed here: see `ulimit -f`, or set weights.shard_bytes=... to smaller files"
        )
    if number in _FORBIDDEN:
        return "make the folder writable for this user, or set fileroot=... to one that is"
    return f"{room(path)}. If the disk is sound, start again; if not, set fileroot=... to another"


def room(path: Path) -> str:
    """How much room is left where path is, or would be."""
    try:
        usage = shutil.disk_usage(existing_parent(path))
    except OSError as error:
        return f"the disk does not say how much is free ({error.strerror})"
    return f"{size_text(usage.free)} of {size_text(usage.total)} are free on that disk"


def nearly_full(path: Path) -> str:
    """One line about the disk under path if there is next to no room on it, else "": then whatever failed, failed of that."""
    try:
        free = shutil.disk_usage(existing_parent(path)).free
    except OSError:
        return ""
    if free >= _NEARLY_FULL_BYTES:
        return ""
    return (
        f"The disk is full or nearly so: {room(path)}, where {path} is. Make room, or set fileroot=... to a larger disk"
    )


def existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def size_text(num_bytes: float) -> str:
    """Bytes for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
