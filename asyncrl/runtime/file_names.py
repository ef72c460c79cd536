"""Name resolve in a folder that all hosts share, for clusters where etcd is not wanted. file_store.py has the files.

A session follows the folder: one look lists the entries and reads the versions that it has not seen. Whoever watches is told
each version, in order, at most `poll_s` late (and what the file system adds). What was overwritten stays for a minute, so that
whoever looks now and then misses nothing and whoever writes slowly cannot overwrite what came meanwhile; then it is removed.

A lease ends when somebody who looks has seen no heartbeat for its time to live, and says so by removing it. Every session that
watches, keeps a lease or has put something looks. A host that stood still, or could not reach the folder, judges nobody by that.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncrl.runtime.file_store import FileStore, LeaseFile, Stat, Version, key_of, stem_of
from asyncrl.runtime.name_resolve import (
    Lease,
    LeaseNotFound,
    NameEntryExists,
    NameResolveError,
    NameResolver,
    NameResolverClosed,
    NameResolveTimeout,
    Watch,
    WatchCallback,
    WatchEvent,
    refresh_interval,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_S = 60.0  # what was overwritten or deleted stays so long for whoever has not looked since
_SLOW_WRITE_S = KEEP_S / 3  # a write that took longer may have met what was removed meanwhile
_SETTLE_S = 2.0  # a folder may change without its time's changing: for so long it is listed all the same
_FOREIGN_FORGET_S = 120.0  # entries under somebody else's lease are put again until it has been gone for so long
_RETRY_S = 0.05
_CLOSE_LIMIT_S = 2.0
_MAX_CALLS = 64  # at the same time, with those that hang in a file system which does not answer
_LOOKS_A_TTL = 6
_LOST = "lost"
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EMLINK, errno.ENOTSUP}


@dataclass
class _Entry:
    """The newest version that this session has seen of an entry that it follows."""

    number: int
    version: Version
    told: bool  # watches believe that it is there
    since: float  # time.monotonic() when it was seen, or seen to hang on a lease that is gone


@dataclass
class _Own:
    """What this session has put, and puts again if it is lost."""

    value: str
    lease: int
    grant: str
    missing_since: float | None = None


@dataclass
class _Seen:
    """A lease's heartbeat, and for how long we have seen it unchanged."""

    grant: str
    heartbeat: int
    age_s: float = 0.0
    looked: float = field(default_factory=time.monotonic)


class _FileWatch(Watch):
    def __init__(self, names: FileNameResolver, key: str, subtree: bool, callback: WatchCallback) -> None:
        super().__init__(key + "/" if subtree else key, callback)
        self._names = names
        self._subtree = subtree
        self.begun = False  # its first state has been delivered, by whoever asked for the watch

    def matches(self, key: str) -> bool:
        return key.startswith(self.what) if self._subtree else key == self.what

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def deliver(self) -> None:
        if self.begun:
            self._deliver()

    def begin(self) -> None:
        self._deliver()
        self.begun = True
        self._deliver()  # what came meanwhile

    def _stop(self) -> None:
        self._names._watches.pop(self, None)


class FileNameResolver(NameResolver):
    """A session. Every call runs in a thread that may hang with the file system; the caller waits timeout_s at most."""

    def __init__(
        self, folder: str | Path, timeout_s: float = 5.0, poll_s: float = 0.2, open_limit_s: float | None = None
    ) -> None:
        """open_limit_s: how long to try to reach the folder at first; default: timeout_s."""
        super().__init__()
        if not Path(folder).is_absolute():
            raise ValueError(
                f"name_resolve.path={str(folder)!r}: name a folder that all hosts share by its absolute path"
            )
        for name, seconds in (("timeout_s", timeout_s), ("poll_s", poll_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"name_resolve.{name} is {seconds!r}; it must be positive")
        self._folder = Path(folder)
        self._store = FileStore(self._folder)
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._calls = threading.Semaphore(_MAX_CALLS)
        self._lock = threading.RLock()  # of all below
        self._entries: dict[str, _Entry] = {}  # those followed
        self._read: dict[str, tuple[int, Version]] = {}  # by name: the last one that was read
        self._known: set[str] = set()  # all that were listed
        self._id = ""  # of the folder, as it was when we have put our entries
        self._listed_id = ""  # of the folder that all we have read is from
        self._leases: dict[int, LeaseFile] = {}
        self._lease_files: dict[int, int] = {}
        self._own: dict[str, _Own] = {}
        self._kept: dict[int, tuple[float, str]] = {}  # time to live, grant
        self._refreshed: dict[int, float] = {}
        self._seen: dict[int, _Seen] = {}
        self._superseded: dict[tuple[str, int], float] = {}  # since when
        self._new: dict[str, float] = {}  # files half written: since when
        self._stamp = 0
        self._stats: dict[str, tuple[Stat, float]] = {}  # of a folder when it was listed; when that changed
        self._watches: dict[_FileWatch, None] = {}
        self._poller: threading.Thread | None = None
        self._poller_lock = threading.Lock()
        self._wake = threading.Event()
        try:
            self._do("the first look", self._open, open_limit_s)
        except BaseException:
            self._closed.set()
            raise

    # ------------------------------------------------------------------------------------------------------- entries

    def _add(self, key: str, value: str, replace: bool, lease: int | None) -> None:
        by = uuid.uuid4().hex

        def decide(entry: Version | None) -> Version:
            if not replace and entry is not None:
                raise NameEntryExists(f"name {key!r} exists already")
            return Version(key, value, by, 0, lease or 0, self._grant_of(lease, key) if lease else "")

        def add() -> None:
            with self._lock:
                version = self._change(key, decide, by)
                assert version is not None
                self._own[key] = _Own(value, version.lease, version.grant)

        self._do(f"add {key!r}", add)
        self._start_poller()

    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool:
        by = uuid.uuid4().hex

        def decide(entry: Version | None) -> Version | None:
            if (None if entry is None else entry.value) != expected:
                return None
            lease, grant = (0, "") if entry is None else (entry.lease, entry.grant)
            return Version(key, value, by, 0, lease, grant)

        def swap() -> bool:
            with self._lock:
                version = self._change(key, decide, by)
                if version is not None and (expected is None or key in self._own):
                    self._own[key] = _Own(value, version.lease, version.grant)
                return version is not None

        swapped = self._do(f"compare and swap {key!r}", swap)
        self._start_poller()
        return swapped

    def _look_after(self, key: str, value: str) -> None:
        def look_after() -> None:
            with self._lock:
                self._own[key] = _Own(value, 0, "")

        self._do(f"look after {key!r}", look_after)
        self._start_poller()

    def _get(self, key: str) -> str | None:
        def get() -> str | None:
            with self._lock:
                version = self._there(key)
                return None if version is None else version.value

        return self._do(f"get {key!r}", get)

    def _is_held(self, key: str) -> bool:
        """Nobody may have been looking when its holder died, so the lease may be there still."""

        def is_held() -> bool:
            with self._lock:
                version = self._there(key)
                lease = self._store.read_lease(version.lease) if version is not None and version.lease else None
                if version is None or lease is None:
                    return version is not None
                silence_s = self._store.silence_s(version.lease)
                return silence_s is not None and silence_s <= lease.ttl_s

        return self._do(f"look who holds {key!r}", is_held)

    def _get_subtree(self, key: str) -> dict[str, str]:
        return self._do(f"get_subtree {key!r}", lambda: self._below(key))

    def _delete(self, key: str) -> bool:
        return self._do(f"delete {key!r}", lambda: self._remove(key))

    def _clear_subtree(self, key: str) -> int:
        """One entry after another: what is put below it meanwhile may stay."""

        def clear() -> int:
            with self._lock:
                for name in [name for name in self._own if name.startswith(key + "/")]:
                    del self._own[name]
            return sum([self._remove(name) for name in self._below(key)])

        return self._do(f"clear_subtree {key!r}", clear)

    def _remove(self, key: str) -> bool:
        by = uuid.uuid4().hex

        def decide(entry: Version | None) -> Version | None:
            return None if entry is None else Version(key, None, by, 0)

        with self._lock:
            self._own.pop(key, None)
            return self._change(key, decide, by) is not None

    def _change(self, key: str, decide: Callable[[Version | None], Version | None], by: str) -> Version | None:
        """Write the version that `decide` makes of the entry that is there, unless somebody is faster; then decide anew. With
        the lock. None: it decided to write nothing."""
        stem = stem_of(key)
        for turn in itertools.count():
            self._check_open()
            began = time.monotonic()
            number, before = self._newest(stem, self._list())
            if before is not None and before.by == by:
                return before  # a try before, whose answer was lost
            version = decide(before if before is not None and self._is_there(before) else None)
            if version is None:
                return None
            self._stamp = max(time.time_ns(), self._stamp + 1, before.stamp + 1 if before is not None else 0)
            version = msgspec.structs.replace(version, stamp=self._stamp)
            if self._store.write_version(stem, number + 1, version):
                took_s = time.monotonic() - began
                if took_s > _SLOW_WRITE_S and self._newest(stem, self._list())[0] != number + 1:
                    raise NameResolveTimeout(
                        f"{self._folder} took {took_s:.0f} s to change {key!r}, which others have changed since"
                    )
                self._wake.set()
                return version
            if turn > 2:
                self._closed.wait(random.random() * _RETRY_S)
        raise AssertionError

    def _there(self, key: str) -> Version | None:
        """The entry, if it is there. With the lock."""
        _, version = self._newest(stem_of(key), self._list())
        return version if version is not None and self._is_there(version) else None

    def _below(self, key: str) -> dict[str, str]:
        found = {}
        grants: dict[int, LeaseFile | None] = {}
        with self._lock:
            listing = self._list()
            for stem in listing:
                name = key_of(stem)
                if name is not None and not name.startswith(key + "/"):
                    continue
                _, version = self._newest(stem, listing)
                if version is None or version.value is None or not version.key.startswith(key + "/"):
                    continue
                if version.lease and version.lease not in grants:
                    grants[version.lease] = self._store.read_lease(version.lease)
                if not version.lease or _granted(grants[version.lease], version.grant):
                    found[version.key] = version.value
        return dict(sorted(found.items()))

    def _is_there(self, version: Version) -> bool:
        if version.value is None:
            return False
        return not version.lease or _granted(self._store.read_lease(version.lease), version.grant)

    def _grant_of(self, lease_id: int, key: str) -> str:
        lease = self._store.read_lease(lease_id)
        if lease is None and lease_id in self._kept:  # taken for dead while we stood still
            self._grant_again(lease_id)
            lease = self._store.read_lease(lease_id)
        if lease is None:
            raise LeaseNotFound(f"lease {lease_id:#x} of {key!r} does not exist (expired, revoked or never granted)")
        return lease.grant

    # -------------------------------------------------------------------------------------------------------- looking

    def _list(self) -> dict[str, list[int]]:
        if self._changed("list", self._store.entries_stat()):  # has the file system look, too
            self._forget_other_folder()
        return self._store.list_entries()

    def _forget_other_folder(self) -> None:
        """Where somebody has emptied it, versions begin anew, and so may the numbers of files: what we know is of another one."""
        folder_id = self._store.read_id()
        if folder_id == self._listed_id:
            return
        self._listed_id = folder_id
        self._read.clear()
        self._known.clear()
        self._superseded.clear()
        self._lease_files.clear()
        for entry in self._entries.values():
            entry.number = 0  # whatever is there is news

    def _newest(self, stem: str, listing: dict[str, list[int]]) -> tuple[int, Version | None]:
        """Number and content of an entry's newest version; (0, None) where there is none, (number, None) of a broken one."""
        numbers = listing.get(stem)
        if not numbers:
            self._read.pop(stem, None)
            return 0, None
        known = self._read.get(stem)
        if known is not None and known[0] == numbers[-1]:
            return known
        version = self._store.read_version(stem, numbers[-1])
        if version is not None:
            self._read[stem] = (numbers[-1], version)
        return numbers[-1], version

    def _look(self) -> None:
        """Take in what has changed since the last look, and line it up for whoever watches. With the lock."""
        self._look_at_leases()
        listing = self._list()
        news = self._read_news(listing)
        if news:
            # What was written before something that we have seen is there by now, though a listing in the middle of changes
            # may have missed it.
            newest = max(version.stamp for _, _, version in news)
            known = {(stem, number) for stem, number, _ in news}
            listing = self._list()
            news += [
                (stem, number, version)
                for stem, number, version in self._read_news(listing)
                if (stem, number) not in known and version.stamp < newest
            ]
        for stem, number, version in sorted(news, key=lambda new: (new[2].stamp, new[0], new[1])):
            self._take_in(stem, number, version)
        for stem in self._entries.keys() - listing.keys():
            entry = self._entries.pop(stem)
            if entry.told:  # somebody has removed the file
                self._tell(WatchEvent("delete", entry.version.key))
        self._known |= listing.keys()
        for stem in self._known - listing.keys():
            self._read.pop(stem, None)
        self._known &= listing.keys()
        self._note_superseded(listing)

    def _look_at_leases(self) -> None:
        if not self._changed("leases", self._store.leases_stat()):
            return
        files = self._store.list_leases()
        for lease_id in [
            lease_id for lease_id in self._leases if self._lease_files.get(lease_id) != files.get(lease_id)
        ]:
            del self._leases[lease_id]
        self._lease_files = files
        for lease_id in files.keys() - self._leases.keys():
            if lease := self._store.read_lease(lease_id):
                self._leases[lease_id] = lease
        for entry in self._entries.values():
            if entry.told and entry.version.lease and not self._holds(entry.version):
                entry.told, entry.since = False, time.monotonic()
                self._tell(WatchEvent("delete", entry.version.key))

    def _read_news(self, listing: dict[str, list[int]]) -> list[tuple[str, int, Version]]:
        """Versions that this session has not seen, of entries that it follows."""
        news = []
        for stem, numbers in listing.items():
            entry = self._entries.get(stem)
            if entry is not None and entry.number == numbers[-1]:
                continue
            key = key_of(stem)
            if key is not None and not self._follows(key):
                continue
            # the highest number is lower: it was removed, and has begun anew
            seen = 0 if entry is None or numbers[-1] < entry.number else entry.number
            if entry is None and stem in self._known:
                seen = numbers[-1] - 1  # what it was before we followed it is no news
            for number in numbers:
                if number <= seen:
                    continue
                version = self._store.read_version(stem, number)
                if version is None:  # removed meanwhile, or broken
                    version = Version(key or "", None, "", 0)
                if key is not None or self._follows(version.key):
                    news.append((stem, number, version))
        return news

    def _follows(self, key: str) -> bool:
        """Whoever keeps leases follows everything, and removes what is over."""
        return bool(self._kept) or any(watch.matches(key) for watch in list(self._watches))

    def _take_in(self, stem: str, number: int, version: Version) -> None:
        before = self._entries.get(stem)
        told = before is not None and before.told
        key = version.key or (before.version.key if before else "")
        there = version.value is not None and (not version.lease or self._holds(version))
        if there and version.value is not None:
            self._tell(WatchEvent("put", key, version.value))
        elif told:
            self._tell(WatchEvent("delete", key))
        self._stamp = max(self._stamp, version.stamp)
        self._entries[stem] = _Entry(number, version, there, time.monotonic())

    def _holds(self, version: Version) -> bool:
        """Whether the lease it hangs on is there, as far as we know; looked up where we know of none."""
        lease = self._leases.get(version.lease)
        if not _granted(lease, version.grant):
            lease = self._store.read_lease(version.lease)
        return _granted(lease, version.grant)

    def _tell(self, event: WatchEvent) -> None:
        for watch in list(self._watches):
            if watch.matches(event.key):
                watch._enqueue([event])

    def _changed(self, what: str, stat: Stat) -> bool:
        """Whether a folder needs to be listed; for each use of its own, as the news is told once (and until it has settled)."""
        now = time.monotonic()
        before, since = self._stats.get(what, (None, now))
        if stat != before:
            self._stats[what] = (stat, now)
            return True
        return now - since < _SETTLE_S

    def _deliver(self) -> None:
        """Without the lock, in a thread that may wait for callbacks."""
        for watch in list(self._watches):
            watch.deliver()

    # -------------------------------------------------------------------------------------------------------- watches

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        watch = _FileWatch(self, key, subtree, callback)

        def begin() -> None:
            with self._lock:
                self._look()
                self._watches[watch] = None
                there = {version.key: version.value or "" for version in self._follow_below(watch)}
                watch._enqueue([WatchEvent("put", key, there[key]) for key in sorted(there)])

        try:
            self._do(f"watch {watch.what!r}", begin, limit_s)
        except BaseException:
            watch.cancel()
            raise
        watch.begin()
        self._start_poller()
        return watch

    def _follow_below(self, watch: _FileWatch) -> list[Version]:
        """Follow what the watch is about, from now on; and what of it is there."""
        listing = self._list()
        found = []
        for stem in listing:
            key = key_of(stem)
            if key is not None and not watch.matches(key):
                continue
            if stem not in self._entries:
                number, version = self._newest(stem, listing)
                if version is None or not watch.matches(version.key):
                    continue
                there = version.value is not None and (not version.lease or self._holds(version))
                self._entries[stem] = _Entry(number, version, there, time.monotonic())
            entry = self._entries[stem]
            if entry.told and watch.matches(entry.version.key):
                found.append(entry.version)
        return found

    # --------------------------------------------------------------------------------------------------------- leases

    def _grant_lease(self, ttl_s: float, lease_id: int | None, keep_alive: bool) -> Lease:
        chosen = secrets.randbelow(2**63 - 1) + 1 if lease_id is None else lease_id

        def grant() -> None:
            with self._lock:
                made = self._store.make_lease(chosen, ttl_s)
                if keep_alive:
                    self._kept[chosen] = (ttl_s, made)
                    self._refreshed[chosen] = time.monotonic()

        self._do(f"grant lease {chosen:#x}", grant)
        self._start_poller()
        self._wake.set()
        return Lease(self, chosen, ttl_s)

    def _refresh_lease(self, lease_id: int) -> bool:
        self._check_open()
        return self._do(f"refresh lease {lease_id:#x}", lambda: self._store.beat(lease_id))

    def _revoke_lease(self, lease_id: int) -> None:
        self._check_open()

        def revoke() -> None:
            with self._lock:
                self._kept.pop(lease_id, None)
            self._store.remove_lease(lease_id)

        self._do(f"revoke lease {lease_id:#x}", revoke)
        self._wake.set()

    def _lease_alive(self, lease_id: int) -> bool:
        self._check_open()
        return self._do(f"lease {lease_id:#x}", lambda: self._store.read_lease(lease_id)) is not None

    # ----------------------------------------------------------------------------------------------------- the poller

    def _start_poller(self) -> None:
        with self._poller_lock:
            if self._poller is None and not self._closed.is_set():
                self._poller = threading.Thread(target=self._run, name="name resolve in files", daemon=True)
                self._poller.start()

    def _run(self) -> None:
        """consumes: the folder. produces: refreshed leases, callbacks, what was lost; removes what is over.
        waits for: poll_s, or 5 poll_s after a failure. unblocked by: that, a change of this session's, close."""
        failed = False
        while not self._closed.is_set():
            try:
                with self._lock:
                    self._turn()
                failed = False
            except (NameResolverClosed, LeaseNotFound, NameEntryExists):
                pass
            except (OSError, NameResolveError) as error:
                if not failed:
                    logger.warning("name resolve in %s: %s; trying again", self._folder, error)
                failed = True
            except Exception:
                logger.exception("name resolve in %s failed; trying again", self._folder)
                failed = True
            self._deliver()
            self._wake.wait(5 * self._poll_s if failed else self._poll_s)
            self._wake.clear()

    def _turn(self) -> None:
        if self._own or self._kept:
            self._restore_folders()
        self._refresh_kept()
        entries = self._changed("turn: entries", self._store.entries_stat())
        if self._changed("turn: leases", self._store.leases_stat()) or entries:
            self._look()
        self._end_leases()
        self._put_again()
        self._remove_old()

    def _restore_folders(self) -> None:
        """Where somebody has emptied the folder."""
        try:
            if not self._changed("id", self._store.entries_stat()) or self._store.read_id() == self._id:
                return
        except FileNotFoundError:
            pass
        self._store.make_folders()
        self._id = self._store.read_id()
        logger.warning("%s was emptied: leases and entries are restored", self._folder)
        for own in self._own.values():
            own.grant = _LOST
        for lease_id in self._kept:
            self._refreshed[lease_id] = -math.inf

    def _refresh_kept(self) -> None:
        now = time.monotonic()
        for lease_id, (ttl_s, grant) in list(self._kept.items()):
            if now - self._refreshed[lease_id] < refresh_interval(ttl_s):
                continue
            if _granted(self._store.read_lease(lease_id), grant) and self._store.beat(lease_id):
                self._refreshed[lease_id] = now
            else:
                self._grant_again(lease_id)

    def _grant_again(self, lease_id: int) -> None:
        """A lease of ours that somebody has taken for dead; unless somebody else has it by now."""
        ttl_s, _ = self._kept[lease_id]
        logger.warning("lease %#x was taken for dead: granting it again", lease_id)
        try:
            self._kept[lease_id] = (ttl_s, self._store.make_lease(lease_id, ttl_s))
            self._refreshed[lease_id] = time.monotonic()
        except NameResolveError as error:
            logger.warning("%s, to another session; leaving it", error)
            del self._kept[lease_id]

    def _end_leases(self) -> None:
        """Remove the leases that nobody refreshes. Time in which we did not look does not count."""
        now = time.monotonic()
        for lease_id in self._seen.keys() - self._leases.keys():
            del self._seen[lease_id]
        for lease_id, lease in list(self._leases.items()):
            if lease_id in self._kept:
                continue
            seen = self._seen.get(lease_id)
            every_s = max(self._poll_s, lease.ttl_s / _LOOKS_A_TTL)
            if seen is not None and seen.grant == lease.grant and now - seen.looked < every_s - self._poll_s / 2:
                continue
            heartbeat = self._store.heartbeat(lease_id)
            if heartbeat is None:
                continue
            if seen is None or seen.grant != lease.grant or seen.heartbeat != heartbeat:
                self._seen[lease_id] = _Seen(lease.grant, heartbeat)
                continue
            seen.age_s += min(now - seen.looked, 2 * every_s)
            seen.looked = now
            if seen.age_s > lease.ttl_s and self._store.heartbeat(lease_id) == heartbeat:
                logger.info("lease %#x has not been refreshed for %.1f s: it ends", lease_id, seen.age_s)
                self._store.remove_lease(lease_id)
                self._wake.set()

    def _put_again(self) -> None:
        """What hangs on a lease that was granted again, and all where the folder was emptied."""
        now = time.monotonic()
        for key, own in list(self._own.items()):
            lease = self._leases.get(own.lease) if own.lease else None
            if own.lease and lease is None:
                own.missing_since = own.missing_since or now
                if now - own.missing_since > _FOREIGN_FORGET_S:
                    del self._own[key]
                continue
            own.missing_since = None
            if own.grant == (lease.grant if lease else ""):
                continue
            try:
                self._put_own(key, own)
            except LeaseNotFound:
                continue
            except NameEntryExists:
                entry = self._there(key)
                if entry is None or entry.value != own.value:
                    logger.warning("name %r was put by another session; leaving it", key)
                    del self._own[key]
                else:
                    own.lease, own.grant = entry.lease, entry.grant

    def _put_own(self, key: str, own: _Own) -> None:
        by = uuid.uuid4().hex

        def add(entry: Version | None) -> Version:
            if entry is not None:
                raise NameEntryExists(f"name {key!r} exists already")
            return Version(key, own.value, by, 0, own.lease, self._grant_of(own.lease, key) if own.lease else "")

        version = self._change(key, add, by)
        assert version is not None
        own.grant = version.grant

    # ------------------------------------------------------------------------------------------------ what is over

    def _note_superseded(self, listing: dict[str, list[int]]) -> None:
        now = time.monotonic()
        old = {(stem, number) for stem, numbers in listing.items() for number in numbers[:-1]}
        self._superseded = {version: self._superseded.get(version, now) for version in old}

    def _remove_old(self) -> None:
        """What was overwritten; the last word on what was deleted; entries whose lease is gone; files half written. Each after
        KEEP_S in which this session has seen it so, thrice that where it keeps no lease: others will have done it."""
        now = time.monotonic()
        keep_s = KEEP_S if self._kept else 3 * KEEP_S
        for (stem, number), since in list(self._superseded.items()):
            if now - since > keep_s:
                self._store.remove_version(stem, number)
                del self._superseded[stem, number]
                if stem in self._entries:  # the word that is left stays as long: a listing may have met both
                    self._entries[stem].since = now
        with_history = {stem for stem, _ in self._superseded}
        for stem, entry in list(self._entries.items()):
            if entry.told or now - entry.since <= keep_s or stem in with_history:
                continue
            if entry.version.value is None:
                self._store.remove_version(stem, entry.number)
                del self._entries[stem]
            elif not self._is_there(entry.version):  # a word that it is gone, for those who look by names only
                word = Version(entry.version.key, None, uuid.uuid4().hex, max(time.time_ns(), entry.version.stamp + 1))
                self._store.write_version(stem, entry.number + 1, word)
        if self._kept and now - self._new.get("", -math.inf) > KEEP_S:
            names = self._store.list_new()
            for name in names:
                if name in self._new:  # as a minute ago
                    self._store.remove_new(name)
            self._new = {"": now} | dict.fromkeys(names, now)

    # ---------------------------------------------------------------------------------------------------------- calls

    def _open(self) -> None:
        self._store.make_folders()
        with self._lock:
            self._id = self._listed_id = self._store.read_id()
            self._look()

    def _do(self, what: str, function: Callable[[], T], limit_s: float | None = None) -> T:
        """In a thread of its own, for a file system that does not answer holds up whoever asks, for ever. Again where it fails,
        until the limit. Raises NameResolveTimeout then, NameResolveError where it is refused."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while True:
            if self._closed.is_set():
                raise NameResolverClosed(f"name resolver was closed during {what}")
            try:
                result = self._call(what, function, deadline, limit_s)
                self._deliver()
                return result
            except OSError as error:
                if isinstance(error, NameResolveError):  # a timeout of ours
                    raise
                if error.errno in _REFUSALS:
                    raise NameResolveError(
                        f"name_resolve.path={str(self._folder)!r}: {what} is refused: {error.strerror} ({error.filename})"
                    ) from error
                if isinstance(error, FileNotFoundError):  # the folder was emptied
                    self._wake.set()
                if time.monotonic() + _RETRY_S >= deadline:
                    raise NameResolveTimeout(
                        f"name_resolve.path={str(self._folder)!r}: {what} could not be done within {limit_s:g} s: {error}"
                    ) from error
            self._closed.wait(_RETRY_S)

    def _call(self, what: str, function: Callable[[], T], deadline: float, limit_s: float) -> T:
        late = NameResolveTimeout(
            f"name_resolve.path={str(self._folder)!r}: the file system did not answer {what} within {limit_s:g} s"
        )
        if not self._calls.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise late
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
            finally:
                self._calls.release()

        threading.Thread(target=run, name=f"name resolve: {what}"[:60], daemon=True).start()
        try:
            return result.result(max(deadline - time.monotonic(), 0.01))
        except FutureTimeout:
            if result.done():
                raise  # of the function itself
            raise late from None

    def _close(self) -> None:
        for watch in list(self._watches):
            watch.cancel()
        self._wake.set()
        if self._poller is not None and self._poller is not threading.current_thread():
            self._poller.join(_CLOSE_LIMIT_S)

        def revoke() -> None:
            for lease_id in list(self._kept):
                self._store.remove_lease(lease_id)

        try:
            self._call("close", revoke, time.monotonic() + _CLOSE_LIMIT_S, _CLOSE_LIMIT_S)
        except (OSError, NameResolveError) as error:
            logger.warning("leases were not revoked at close (%s); they expire", error)


def _granted(lease: LeaseFile | None, grant: str) -> bool:
    return lease is not None and lease.grant == grant
