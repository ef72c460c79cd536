"""The Unix sockets of a run on one machine, in a folder that only the run's user can enter (mode 0700).

The kernel keeps other users out, so connections need no authentication or encryption, and no stranger can take over the
address of a dead process. The launcher creates the folder at its start and removes it at its end. Each process binds
the sockets of its streams and of its HTTP servers there (`use`), except servers for clients outside asyncrl, which use
TCP. The folder is outside the run's folder, because a socket path has at most 107 bytes and
network file systems do not support sockets.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from asyncrl.protocol.run_folder import SOCKETS, WEIGHTS

LINK = SOCKETS  # in the run's folder: a symbolic link to the socket folder
OWNER = "owner"  # in the socket folder: the run and the launch to which it belongs
_MAX_OWNER_CHARS = 10_000
_MEMORY = "/dev/shm"
_PREFIX = "asyncrl-"
_MAX_FOLDER_BYTES = 80  # the rest of the path is for socket names
_DOMAIN = ".unix"  # in URLs: http://<name of the socket>.unix
_NAME_BYTES = 6

_folder = ""


def use(folder: str) -> None:
    """Make this process bind its sockets in this folder from now on, or on TCP if it is "". Call it before the first
    socket is created.
    """
    global _folder
    _folder = folder


def new_path() -> str:
    """Return an unused path at which this process may bind a socket; "" if it binds on TCP."""
    return f"{_folder}/{secrets.token_hex(_NAME_BYTES)}" if _folder else ""


def in_use() -> bool:
    return bool(_folder)


def holds(path: str) -> bool:
    """Return whether this path lies in the run's socket folder."""
    folder, _, name = path.rpartition("/")
    return bool(_folder) and folder == _folder and name not in ("", ".", "..")


def url_of(path: str) -> str:
    """Return the URL under which processes of the run reach the HTTP server on the Unix socket at this path."""
    return f"http://{path.rpartition('/')[2]}{_DOMAIN}"


def folder_of_run() -> str | None:
    """The run's folder, also for temporary files: the reaper removes it if the run is killed. None: the run has none."""
    return _folder or None


def path_of(host: str) -> str:
    """Inverse of `url_of`, for the host of a URL. Returns "" for any other host."""
    name = host.removesuffix(_DOMAIN)
    return f"{_folder}/{name}" if _folder and name != host and "/" not in name else ""


class Connection(http.client.HTTPConnection):
    """A connection to an HTTP server on a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def make_folder(run_dir: Path, *, with_weights: bool = False) -> str:
    """Create a socket folder for this run's launcher, and remove the folder of a previous launcher that died. The caller holds the
    run's lock.

    with_weights: the folder is in shared memory and also holds the run's weight versions: `weights` in the run's folder becomes a
    link to it. Weights that are on disk there already stay there. Raises OSError if no base folder is usable.
    """
    remove_folder(run_dir)
    if os.path.lexists(run_dir / LINK):
        raise OSError(f"{run_dir / LINK} is not a link, as after a copy that followed links: move it away")
    failure = OSError("no usable folder for Unix sockets")
    bases = (
        [_MEMORY] if with_weights else ["/tmp", tempfile.gettempdir()]
    )  # not $XDG_RUNTIME_DIR: it is removed at logout
    for base in dict.fromkeys(bases):
        if len(os.fsencode(base)) > _MAX_FOLDER_BYTES - len(_PREFIX) - 8:
            continue
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            failure = error
            continue
        Path(folder, OWNER).write_text(f"{_name_of(run_dir)}\n{secrets.token_hex()}\n")
        (run_dir / LINK).symlink_to(folder)
        if with_weights and not (run_dir / WEIGHTS).exists():
            Path(folder, WEIGHTS).mkdir()
            (run_dir / WEIGHTS).symlink_to(Path(folder, WEIGHTS))
        return folder
    raise failure


def remove_folder(run_dir: Path, made: str = "") -> None:
    """Remove a socket folder of this run, and the links to it. Its owner file must name this run: the link alone proves nothing,
    because in the copy of a run's folder it leads to the folder of the original.

    made: the folder to remove, which this launcher has made. "": the folder to which the link leads; the caller holds the run's
    lock. Then a link that leads to another run's folder is removed, too.
    """
    linked = _target(run_dir / LINK)
    folder = made or linked
    if linked == folder:
        if _target(run_dir / WEIGHTS) == f"{folder}/{WEIGHTS}":
            (run_dir / WEIGHTS).unlink()
        if linked:
            (run_dir / LINK).unlink()
    with contextlib.suppress(OSError):
        about = os.lstat(folder)
        is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
        if is_ours and owner_of(folder).partition("\n")[0] == _name_of(run_dir):
            shutil.rmtree(folder, ignore_errors=True)


def owner_of(folder: str) -> str:
    """Return the content of a folder's owner file: the run, and a number of the launch. "": there is none."""
    try:
        with open(os.open(Path(folder, OWNER), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            return file.read(_MAX_OWNER_CHARS)
    except (OSError, ValueError):
        return ""


def _name_of(run_dir: Path) -> str:
    """Identify a run on this machine. A copy has another path, and another inode even if it takes the place of the original."""
    return f"{run_dir.resolve()} {run_dir.stat().st_ino}".replace("\n", " ")


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
