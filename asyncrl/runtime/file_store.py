"""The files behind name resolve in a shared folder (file_names.py): entries in versions, leases with a heartbeat. No locks.

    <folder>/entries/<key>.<number>   a version of an entry, never changed; the highest number counts
    <folder>/leases/<id>              a lease; its time of modification is its heartbeat
    <folder>/new/                     what is being written, and leases that have ended
    <folder>/id                       made with the folder

A version comes into being by a hard link from `new/`, which fails where the name is taken, on network file systems too: of all who
write version n + 1 of what they have read as version n, one wins, and the others read again. So nobody ever holds a lock, and
nobody's death leaves one. Clocks of hosts are never compared: whoever looks at a lease sees whether its heartbeat has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import struct
import uuid
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from asyncrl.runtime.name_resolve import LeaseExists, NameResolveError

logger = logging.getLogger(__name__)

_AT_FDCWD = -100
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_BASIC = 0x7FF
_STATX_BYTES = 256
_MAX_STEM = 200


class Version(msgspec.Struct, frozen=True):
    """One version of an entry."""

    key: str
    value: str | None  # None: the entry was deleted
    by: str  # one write: whoever tries it again knows its own
    stamp: int  # grows with what the writer has seen: changes of several keys are told in this order
    lease: int = 0
    grant: str = ""  # of the lease: one granted again under its id is another


class LeaseFile(msgspec.Struct, frozen=True):
    ttl_s: float
    grant: str


class Stat(NamedTuple):
    inode: int
    mtime_ns: int


def fresh_stat(path: Path) -> Stat:
    """As the file server has it: a network file system's client would answer from memory for up to a minute, and list a folder
    from memory too. Asked so, it drops what is old. Raises OSError."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):  # another C library: the file system's own delay stays
        plain = os.stat(path)
        return Stat(plain.st_ino, plain.st_mtime_ns)
    if statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    (inode,) = struct.unpack_from("=Q", buffer, 32)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, 112)
    return Stat(inode, seconds * 1_000_000_000 + nanoseconds)


def stem_of(key: str) -> str:
    """A key as the name of a file, which has at most 255 bytes: of a long one, a hash."""
    quoted = quote(key, safe="")
    return quoted if len(quoted) <= _MAX_STEM else "=" + hashlib.sha256(key.encode()).hexdigest()


def key_of(stem: str) -> str | None:
    """None: it is in the file."""
    return None if stem.startswith("=") else unquote(stem)


class FileStore:
    """Raises OSError where the file system does."""

    def __init__(self, folder: Path) -> None:
        self._entries = folder / "entries"
        self._leases = folder / "leases"
        self._new = folder / "new"
        self._id = folder / "id"
        self._folder = folder

    def make_folders(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_mode & 0o002:
            raise NameResolveError(
                f"name_resolve.path={str(self._folder)!r}: everybody may write there; run `chmod o-w {self._folder}`"
            )
        for folder in (self._entries, self._leases, self._new):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self._id.exists():
            self._link(uuid.uuid4().hex.encode(), self._id)

    def read_id(self) -> str:
        """Of this store: another one means that somebody has emptied the folder since. "": there is none now."""
        try:
            return self._id.read_text()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    # entries

    def entries_stat(self) -> Stat:
        return fresh_stat(self._entries)

    def list_entries(self) -> dict[str, list[int]]:
        """The numbers of each entry's versions, ascending."""
        found: dict[str, list[int]] = {}
        for name in os.listdir(self._entries):
            stem, _, number = name.rpartition(".")
            if stem and number.isdecimal():
                found.setdefault(stem, []).append(int(number))
        for numbers in found.values():
            numbers.sort()
        return found

    def read_version(self, stem: str, number: int) -> Version | None:
        """None: there is none, or the host of its writer crashed before its content was on disk."""
        try:
            return msgspec.json.decode((self._entries / f"{stem}.{number}").read_bytes(), type=Version)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.debug("%s.%d is broken: %s", stem, number, error)
            return None

    def write_version(self, stem: str, number: int, version: Version) -> bool:
        """False: somebody else has made that one."""
        return self._link(msgspec.json.encode(version), self._entries / f"{stem}.{number}")

    def remove_version(self, stem: str, number: int) -> None:
        (self._entries / f"{stem}.{number}").unlink(missing_ok=True)

    # leases

    def leases_stat(self) -> Stat:
        return fresh_stat(self._leases)

    def list_leases(self) -> dict[int, int]:
        """Their ids, and for each the number of its file, which is another where it was granted again."""
        found = {}
        with os.scandir(self._leases) as files:
            for file in files:
                with contextlib.suppress(ValueError):
                    found[int(file.name, 16)] = file.inode()
        return found

    def read_lease(self, lease_id: int) -> LeaseFile | None:
        path = self._lease_path(lease_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            fresh_stat(self._leases)  # that it was not there may be remembered
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return msgspec.json.decode(data, type=LeaseFile)
        except msgspec.DecodeError:
            return None

    def make_lease(self, lease_id: int, ttl_s: float) -> str:
        """Its grant. Raises LeaseExists."""
        lease = LeaseFile(ttl_s, uuid.uuid4().hex)
        if not self._link(msgspec.json.encode(lease), self._lease_path(lease_id)):
            raise LeaseExists(f"lease {lease_id:#x} exists already")
        return lease.grant

    def beat(self, lease_id: int) -> bool:
        """Change a lease's heartbeat. False if it is gone."""
        try:
            os.utime(self._lease_path(lease_id))
        except FileNotFoundError:
            return False
        return True

    def heartbeat(self, lease_id: int) -> int | None:
        """Compare it with one seen before; it tells no time. None: there is no such lease."""
        try:
            return fresh_stat(self._lease_path(lease_id)).mtime_ns
        except FileNotFoundError:
            return None

    def silence_s(self, lease_id: int) -> float | None:
        """How old a lease's heartbeat is, by the file system's own clock, which a file made now tells. None: it is gone."""
        heartbeat = self.heartbeat(lease_id)
        if heartbeat is None:
            return None
        new = self._new / uuid.uuid4().hex
        try:
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return (fresh_stat(new).mtime_ns - heartbeat) / 1e9
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)

    def remove_lease(self, lease_id: int) -> bool:
        """The file stays for a while elsewhere, so that no other gets its number meanwhile."""
        try:
            self._lease_path(lease_id).rename(self._new / uuid.uuid4().hex)
        except FileNotFoundError:
            return False
        return True

    # what writers that died have left

    def list_new(self) -> list[str]:
        return os.listdir(self._new)

    def remove_new(self, name: str) -> None:
        (self._new / name).unlink(missing_ok=True)

    def _lease_path(self, lease_id: int) -> Path:
        return self._leases / f"{lease_id:016x}"

    def _link(self, data: bytes, path: Path) -> bool:
        """Make a file with its content at once, unless it is there."""
        new = self._new / uuid.uuid4().hex
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            try:
                os.link(new, path)
            except FileExistsError:
                return os.stat(new).st_nlink == 2  # NFS may have made it and lost the answer, and tried again
            return True
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
