"""Explains to the user why a file of a run cannot be written: the path, the reason, the free space and the remedy.

The operating system reports `No space left on device`, usually without the path. Processes of a run
write metrics, journals, weights and checkpoints inside `writing(path)`, which adds the rest. `write_when_there_is_room` repeats a
write while the disk is full. A failed fsync is never repeated: the kernel may have dropped the data, and a second fsync would
report success.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from asyncrl.protocol.errors import FORBIDDEN, NO_MORE_FILES, NO_SPACE, ErrorClass, Failures, classify
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger(__name__)
T = TypeVar("T")

FULL_LIMIT_S = 2.0  # for a single write: an event loop may wait meanwhile, and with it the heartbeats
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # between two tries on a full disk

_EXPLAINED = {
    *NO_SPACE,
    *FORBIDDEN,
    *NO_MORE_FILES,
    errno.EFBIG,
    errno.EIO,
}  # errors that are not listed have other causes than disks, such as a removed folder
_MAX_CAUSES = 20  # in a chain of exceptions
_OPEN_FILES = 65_536  # enough; more would slow process start on systems that close descriptors one by one
LEAST_OPEN_FILES = 256  # the quickstart runs with this limit; etcd refuses fewer than 150
MORE_OPEN_FILES = (
    "raise the hard limit as root: /etc/security/limits.conf, a service's LimitNOFILE, docker run --ulimit nofile=65536"
)
_NEARLY_FULL_BYTES = 64_000_000  # etcd requests this much at once
# Libraries written in Rust (safetensors) raise their own errors, which contain the system's error number only in their
# text
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class StorageError(OSError):
    """A file of the run could not be written. The text gives path, reason, free space and remedy; it needs no traceback.

    Its errno is that of the system's error, so `classify` knows a full disk (passing) from a forbidden one (permanent). A process
    that ends with it has no more tries: its successor would meet the same disk.
    """

    outlives_restart = True

    def __init__(self, text: str, number: int | None = None) -> None:
        """number: the system's error number."""
        super().__init__(text)
        self.errno = number


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise StorageError about `path` for errors inside the block that `explain` knows. Other exceptions pass through."""
    try:
        yield
    except Exception as error:
        explained = explain(path, error)
        if explained is None or isinstance(error, StorageError):
            raise
        raise explained from error


def write_when_there_is_room(
    path: Path, write: Callable[[], T], failures: Failures | None = None, *, clock: Clock = SYSTEM_CLOCK
) -> T:
    """Call a function that writes `path`. While the disk is full, call it again: other files may be removed meanwhile. Blocks for
    at most the limit of `failures`. Raises StorageError about the first error, and other exceptions as they are.

    write: may be called again after it has failed. failures: of this file; a later write has no time of its own after a write that
    has used up the limit. None: FULL_LIMIT_S for this write.
    """
    failures = failures or Failures(FULL_LIMIT_S)
    pause_s, first = _FIRST_PAUSE_S, None
    while True:
        try:
            with writing(path):
                written = write()
            failures.worked()
            return written
        except StorageError as error:
            first = first or error
            if (
                failures.failed(classify(error), str(error), clock.monotonic())
                or classify(error) is not ErrorClass.PASSING
            ):
                raise
            logger.warning("%s. Trying again", error)
        except Exception as error:
            if first is None:
                raise
            raise first from error  # a consequence of the first one
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all, and replace an older one. Waits for a moment while the disk is full. One process at a
    time may write to a path. Raises StorageError."""
    temporary = path.with_name(f".{path.name}")

    def write() -> None:
        try:
            temporary.write_bytes(content)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    write_when_there_is_room(path, write)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read (0600), and replace an older one atomically. Raises OSError."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)


def explain(path: Path, error: Exception) -> StorageError | None:
    """Return the error as a StorageError about `path`; None unless the disk or a lack of file descriptors caused it."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    if number not in _EXPLAINED:
        return None
    assert number is not None
    if number in NO_MORE_FILES:
        return StorageError(f"{path} could not be opened: {too_many_open_files(number)}", number)
    return StorageError(f"{path} could not be written: {os.strerror(number)}; {_remedy(path, number)}", number)


def too_many_open_files(number: int) -> str:
    """Return the cause and the remedy if a file, socket or pipe cannot be opened."""
    if number == errno.ENFILE:
        return f"{os.strerror(number)} on the whole machine; raise it: sysctl fs.file-max"
    allowed, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{os.strerror(number)}: the soft limit is {allowed}, sockets and pipes included, and the hard limit {highest}; "
        "raise both (`ulimit -Hn 65536`, LimitNOFILE of a service), or set rollout.max_concurrent_per_worker=... lower"
    )


def out_of_files(error: object) -> StorageError | None:
    """Return a StorageError if the error, or an error that caused it, is a lack of file descriptors. None otherwise, and
    if the error is a StorageError or was caused by one.
    """
    for _ in range(_MAX_CAUSES):
        if not isinstance(error, BaseException):
            return None
        if isinstance(error, StorageError):
            return None
        if (number := getattr(error, "errno", None)) in NO_MORE_FILES:
            return StorageError(f"{too_many_open_files(number)} ({error})", number)
        error = error.__cause__ or error.__context__
    return None


def too_few_open_files(highest: int) -> str:
    """Return why a run cannot start under this hard limit, and the remedy; "" if it can."""
    if highest == resource.RLIM_INFINITY or highest >= LEAST_OPEN_FILES:
        return ""
    return f"`ulimit -Hn` is {highest}, and each process of a run needs at least {LEAST_OPEN_FILES} open files; {MORE_OPEN_FILES}"


def raise_open_files() -> None:
    """Raise the open-file limit of this process and its children as far as the hard limit allows, up to _OPEN_FILES."""
    allowed, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if highest == resource.RLIM_INFINITY else min(highest, _OPEN_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))


def _remedy(path: Path, number: int) -> str:
    if number in NO_SPACE:
        return f"{room(path)}. Make room there, keep less (weights.keep=1), or set fileroot=... to a larger disk"
    if number == errno.EFBIG:
        return (
            "files of this size are not allowed here: see `ulimit -f`, or set weights.shard_bytes=... to smaller files"
        )
    if number in FORBIDDEN:
        return "make the folder writable for this user, or set fileroot=... to one that is"
    return f"{room(path)}. If the disk is sound, start again; if not, set fileroot=... to another"


def room(path: Path) -> str:
    """Return the free space on the disk that holds `path`, or would hold it."""
    try:
        usage = shutil.disk_usage(existing_parent(path))
    except OSError as error:
        return f"the free space is unknown ({error.strerror})"
    return f"{size_text(usage.free)} of {size_text(usage.total)} are free on that disk"


def nearly_full(path: Path) -> str:
    """Return one line if the disk under `path` is almost full, otherwise "". A failure on such a disk is probably due
    to the lack of space.
    """
    try:
        free = shutil.disk_usage(existing_parent(path)).free
    except OSError:
        return ""
    if free >= _NEARLY_FULL_BYTES:
        return ""
    return f"The disk is full or almost full: {room(path)}, at {path}. Make room, or set fileroot=... to a larger disk"


def existing_parent(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent folder."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def size_text(num_bytes: float) -> str:
    """Format a number of bytes for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
