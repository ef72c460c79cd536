"""The Unix sockets of a run on one machine, in a folder that only the run's user can enter (mode 0700).

The kernel lets no other user in, so nothing has to be proved or encrypted, and a stranger cannot take an address that a dead
process has left. The launcher makes the folder at its start and removes it at its end; each process uses it for all that it binds
(`use`). A path of a socket has at most 107 bytes and network file systems have no sockets: so the folder is not the run's own.
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
from collections.abc import Iterator
from pathlib import Path

LINK = "sockets"  # in the run's folder: where the sockets of its launcher are
_PREFIX = "asyncrl-"
_MAX_FOLDER_BYTES = 80  # what is left is for the names of sockets
_DOMAIN = ".unix"  # of URLs: http://<name of the socket>.unix
_NAME_BYTES = 6

_folder = ""


def use(folder: str) -> None:
    """From now on this process binds in that folder, "": on TCP. Call it before the first socket is made."""
    global _folder
    _folder = folder


@contextlib.contextmanager
def used(folder: str) -> Iterator[None]:
    """The same for a while, for tests."""
    before = _folder
    use(folder)
    try:
        yield
    finally:
        use(before)


def new_path() -> str:
    """An unused path at which this process may bind a socket. "": it binds on TCP."""
    return f"{_folder}/{secrets.token_hex(_NAME_BYTES)}" if _folder else ""


def in_use() -> bool:
    return bool(_folder)


def holds(path: str) -> bool:
    """Whether a socket at this path would be one of the run's."""
    folder, _, name = path.rpartition("/")
    return bool(_folder) and folder == _folder and name not in ("", ".", "..")


def url_of(path: str) -> str:
    """Of an HTTP server that is bound there: for processes of the run."""
    return f"http://{path.rpartition('/')[2]}{_DOMAIN}"


def path_of(host: str) -> str:
    """The inverse, of a URL's host. "": it is no such host."""
    name = host.removesuffix(_DOMAIN)
    return f"{_folder}/{name}" if _folder and name != host and "/" not in name else ""


class Connection(http.client.HTTPConnection):
    """To an HTTP server on a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def make_folder(run_dir: Path) -> str:
    """A new one for the launcher of this run; that of a launcher before it, which has died, goes. Raises OSError where there is no
    place for it."""
    remove_folder(run_dir)
    failure = OSError("there is no folder for sockets")
    for base in dict.fromkeys(("/tmp", tempfile.gettempdir())):  # $XDG_RUNTIME_DIR goes when its user logs out
        if len(os.fsencode(base)) > _MAX_FOLDER_BYTES - len(_PREFIX) - 8:
            continue
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            failure = error
            continue
        (run_dir / LINK).symlink_to(folder)
        return folder
    raise failure


def remove_folder(run_dir: Path) -> None:
    """Of the run's launcher, if it is there and this user's."""
    link = run_dir / LINK
    with contextlib.suppress(OSError):
        folder = Path(os.readlink(link))
        link.unlink()
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and folder.name.startswith(_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
