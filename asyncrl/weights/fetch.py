"""Weight versions for hosts that do not see the run's folder: served by the manager's host, fetched once per host into memory.

    <run>/weights/actor/a0001-v00000012/ -- WeightFiles, a thread beside the gserver manager: GET, ranges, the run's token
        -- HTTP --> WeightFetcher, in each generation server; one per host at a time --> /dev/shm/.../a0001-v00000012/
        -- WeightFiles, a thread beside the WeightFetcher --> at most FAN_OUT other hosts, and so on (FetchTree)

The source sends a version FAN_OUT times, however many hosts there are. A host that begins a fetch offers its own copy to the
source, with its request for the manifest; the answer names the host to fetch from. That host may still be fetching: it serves the
parts that it has. The manifest, with all checksums, comes from the source only. A fetcher continues from the source if the other
host refuses, is silent for _SILENT_S, sends a damaged file, or has not sent all after half of the time limit.

A FetchWeightsRequest tells a server the version and its URL while the server still generates. The server loads the version once the
files are complete. It compares the manifests first: a host that sees the same version in the run's folder fetches nothing. An
interrupted download resumes where it stopped, also in another process. Each file is checked against the manifest before the version
gets its final name, and again when it is loaded.

Of a version with a base the host also fetches the bases that it lacks. SGLang loads only full versions: `in_full` writes such a
version to this host in full. Its folders are those of a WeightFetcher of its own, which fetches nothing.

A host keeps the newest `keep` versions and their bases, fewer if there is no room, and any version that is being loaded. File locks
(flock) show which process fetches, which processes load, and whether servers of a run are still alive. The kernel drops the locks
of a killed process. The next WeightFetcher on the host removes the files of runs whose servers were all killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import http.client
import logging
import os
import shutil
import ssl
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

import msgspec
import xxhash
from aiohttp import web

from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass, class_of_status, classify
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime import security, unix_sockets
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.disk import size_text
from asyncrl.runtime.http_server import listen_routes
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import MANIFEST, Chain, FileEntry, Manifest, list_versions, read_manifest, with_bases

MEMORY = Path("/dev/shm")
FAN_OUT = 2  # times that the source, or another host, sends a version
_MAX_TREES = 8  # versions whose trees are kept
_OFFER = "Asyncrl-Offer"  # in a request for a manifest: the URL under which the asking host will serve this version
_FETCH_FROM = "Asyncrl-Fetch-From"  # in the answer: the URL under which another host serves it; "": fetch from here
_START_LIMIT_S = 10.0
_STOP_LIMIT_S = 5.0
_READ_BYTES = 1 << 20
_SILENT_S = 10.0  # a request is retried if the source sends nothing for this long
_RETRY_S = 0.2
_LONGEST_RETRY_S = 3.0
_GROWTH_POLL_S = 0.1  # pause before another host is asked again for the rest of a file that it is still fetching
_MAX_DAMAGED = 3  # downloads of a file with a wrong checksum before the fetch fails
_MAX_MANIFEST_BYTES = 16_000_000
_LOCK_POLL_S = 0.05
_ROOM_LEFT_BYTES = 64 << 20  # to leave free in the memory that versions are fetched into
_IN_USE_LOCK = "in_use.lock"
_FETCHING = ".fetching"


class FetchTree:
    """Where each host fetches a version from (pure). The source is "", other holders are URLs."""

    def __init__(self) -> None:
        # By version: holder -> where it fetches from, in the order of their first requests
        self._holders: dict[WeightVersion, dict[str, str]] = {}

    def place(self, version: WeightVersion, url: str) -> str:
        """Return the holder from which the host at this URL fetches: the first of those that came earlier with fewer than FAN_OUT
        readers. A host that asks again gets the same answer."""
        holders = self._holders.setdefault(version, {})
        if len(self._holders) > _MAX_TREES:
            del self._holders[next(iter(self._holders))]
        if url not in holders:
            readers = Counter(holders.values())
            holders[url] = next(holder for holder in ("", *holders) if readers[holder] < FAN_OUT)
        return holders[url]


class WeightFiles:
    """Serves the versions in a folder, read-only: GET /weights/<version>/<file>. Of a version that a WeightFetcher still fetches
    into this folder, it serves what is there. Runs an event loop on its own thread, so that large transfers do not block anything
    else.

    waits for: readers.  unblocked by: their reading, their disconnecting, or `close`.
    """

    def __init__(self, directory: Path, *, host: str) -> None:
        """directory: the role's folder, <run>/weights/actor, or that of a WeightFetcher."""
        self._directory, self._host = directory, host
        self._tree = FetchTree()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weight files", daemon=True)
        self._serving = contextlib.AsyncExitStack()

    def start(self) -> str:
        """Bind a free port. Returns the URL to which readers append a version's name. Blocks for a moment."""
        self._thread.start()
        route = web.get("/weights/{version}/{file}", self._answer)
        opening = self._serving.enter_async_context(listen_routes(route, host=self._host))
        url = asyncio.run_coroutine_threadsafe(opening, self._loop).result(_START_LIMIT_S)
        return f"{url}/weights"

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._serving.aclose(), self._loop).result(_STOP_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Serve the manifest or a file that it lists, and nothing else. FileResponse supports ranges."""
        name = request.match_info["file"]
        try:
            version = WeightVersion.parse(request.match_info["version"])
            folder, fetching = self._directory / str(version), self._directory / f"{version}{_FETCHING}"
            if (fetching / MANIFEST).exists() and not folder.exists():
                folder = fetching
            manifest = read_manifest(folder)
        except (ValueError, OSError) as error:
            return web.Response(status=404, text=f"{error}\n")
        if name != MANIFEST and name not in manifest.files:
            return web.Response(status=404, text=f"{folder.name} has no file {name!r}\n")
        headers = {}
        if name == MANIFEST and (url := request.headers.get(_OFFER)):
            headers[_FETCH_FROM] = self._tree.place(version, url)
        return web.FileResponse(folder / name, chunk_size=_READ_BYTES, headers=headers)


class _Found(NamedTuple):
    """A version at the source."""

    remote: _Source
    text: bytes  # of the manifest
    manifest: Manifest


class WeightFetcher:
    """The versions of a run on this host. Any number of processes can share them. Not thread-safe.

    consumes: files of a source, and of other hosts.  produces: complete versions, and parts of them for other hosts.
    waits for: the source, another host, or another process on this host that fetches the same version; all within limit_s.
    unblocked by: any of them, or `close`.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        *,
        host: str = "",
        keep: int = 2,
        logger: logging.Logger,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """folder: the target folder, shared by all runs of all users. run: the key of this run on this host (`run_key`).
        host: the address at which this process serves versions to other hosts; "": it serves none, and fetches from the source."""
        self._host, self._keep, self._logger, self._clock = host, keep, logger, clock
        base = folder / f"asyncrl-{os.getuid()}"
        self._root = base / run
        self._closed = False
        self._in_use: BinaryIO | None = None
        self._files: WeightFiles | None = None  # for other hosts, from the first fetch on
        self._offer = ""  # their URL
        self.fetched_bytes: Counter[str] = (
            Counter()
        )  # of files, by the URL of the version at the source or at another host
        _make_private(base)
        self._sweep(base)
        self._move_in()

    def fetch(self, path: Path, version: WeightVersion, source: str, limit_s: float) -> Path:
        """Make the version available on this host, and return its folder: path if it holds the same version, else a folder in
        memory. source: URL of the versions. Blocks.

        Raises WeightsError with the reason if the version is not available within limit_s.
        """
        deadline = self._clock.monotonic() + limit_s
        try:
            chain = [self._look_up(source, version, deadline)]
            with contextlib.suppress(OSError):
                if (path / MANIFEST).read_bytes() == chain[0].text:
                    return path
            while (base := chain[0].manifest.base_version) is not None:
                chain.insert(0, self._look_up(source, base, deadline))
            kept = {found.manifest.weight_version for found in chain}
            for found in chain:
                self._fetch_folder(found, kept, deadline)
            return self._root / str(version)
        except (*DECODE_ERRORS, OSError, http.client.HTTPException) as error:
            raise WeightsError(f"weights {version} could not be fetched from {source}/{version}: {error}") from error

    @contextlib.contextmanager
    def loading(self, version: WeightVersion, limit_s: float) -> Iterator[None]:
        """Prevent removal of the version, and of its bases, inside the `with` block."""
        deadline = self._clock.monotonic() + limit_s
        with contextlib.ExitStack() as stack:
            for needed in sorted(with_bases(self._root, [version])):
                stack.enter_context(self._locked(needed, fcntl.LOCK_SH, deadline))
            yield

    @contextlib.contextmanager
    def in_full(self, chain: Chain, limit_s: float) -> Iterator[Path]:
        """Yield a folder with all tensors of a version, whose chain is verified. It is written once for all servers of this host,
        and not removed inside the `with` block. Raises WeightsError, OSError. Blocks."""
        from asyncrl.weights.whole import write_whole  # torch, which a server of SGLang needs for nothing else

        (path, manifest), deadline = chain[-1], self._clock.monotonic() + limit_s
        version, text = manifest.weight_version, (path / MANIFEST).read_bytes()
        target = self._root / str(version)
        while True:
            with self._locked(version, fcntl.LOCK_SH, deadline):
                if _is_complete(target, text):
                    yield target
                    return
            with self._locked(version, fcntl.LOCK_EX, deadline):
                if not _is_complete(target, text):
                    shutil.rmtree(target, ignore_errors=True)
                    self._make_room(version, manifest.num_bytes, {version})
                    write_whole(path, target, fsync=False)
                    (target / MANIFEST).write_bytes(text)  # the folder belongs to exactly this chain

    def close(self) -> None:
        """Stop fetching, also a fetch that runs in another thread. If no other fetcher of the run is left on this host, remove the
        run's files there."""
        self._closed = True
        if self._files is not None:
            self._files.close()
        in_use, self._in_use = self._in_use, None
        if in_use is None:
            return
        with in_use:
            if _try_lock(in_use, fcntl.LOCK_EX):
                shutil.rmtree(self._root, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------------- one version

    def _look_up(self, source: str, version: WeightVersion, deadline: float) -> _Found:
        remote = self._source(f"{source}/{version}", deadline)
        text, _ = remote.manifest()
        manifest = msgspec.json.decode(text, type=Manifest)
        if manifest.weight_version != version:
            raise WeightsError(f"{remote.url} holds {manifest.weight_version}")
        return _Found(remote, text, manifest)

    def _source(self, url: str, deadline: float, *, grows: bool = False) -> _Source:
        return _Source(url, deadline, lambda: self._closed, self._clock, self.fetched_bytes, grows=grows)

    def _fetch_folder(self, found: _Found, chain: set[WeightVersion], deadline: float) -> None:
        """Make one folder available. chain: the versions of its chain, which are not removed to make room."""
        _, text, manifest = found
        version = manifest.weight_version
        target = self._root / str(version)
        temporary = target.with_name(target.name + _FETCHING)
        with self._locked(version, fcntl.LOCK_EX, deadline):
            if not _is_complete(target, text):
                if target.exists():  # another version with this name, from an earlier run in the same folder
                    shutil.rmtree(target)
                self._make_room(version, sum(entry.bytes for entry in manifest.files.values()), chain)
                temporary.mkdir(exist_ok=True)
                for name in manifest.files:
                    (temporary / name).touch()
                (temporary / MANIFEST).write_bytes(text)  # from now on its files are served as far as they are there
                began = self._clock.monotonic()
                try:
                    host = self._fetch_files(found, temporary, deadline)
                except BaseException:
                    (temporary / MANIFEST).unlink(missing_ok=True)  # readers do not wait for the rest
                    raise
                temporary.rename(target)
                self._logger.info("weights %s fetched from %s (%.2f s)", version, host, self._clock.monotonic() - began)

    def _fetch_files(self, found: _Found, folder: Path, deadline: float) -> str:
        """Fetch from where the source says; after a failure there, continue from the source. Return the last host."""
        remote = source = found.remote
        if other := self._other_host(found):
            half = (self._clock.monotonic() + deadline) / 2
            remote = self._source(f"{other}/{found.manifest.weight_version}", half, grows=True)
        for name, entry in found.manifest.files.items():
            try:
                remote.download(name, folder / name, entry)
            except (WeightsError, OSError, http.client.HTTPException) as error:
                if remote is source:
                    raise
                wording = "%s cannot be fetched from %s: %s; continuing from the source"
                self._logger.warning(wording, name, remote.url, error)
                remote = source
                source.download(name, folder / name, entry)
        return remote.host

    def _other_host(self, found: _Found) -> str:
        """Offer this host's copy to the source. Return the URL from which to fetch; "": the source's."""
        if not self._host:
            return ""
        if self._files is None:
            self._files = WeightFiles(self._root, host=self._host)
            self._offer = self._files.start()
        text, other = found.remote.manifest(self._offer)
        if text != found.text:
            raise WeightsError(f"{found.remote.url} was replaced meanwhile")
        return other

    def _make_room(self, version: WeightVersion, num_bytes: int, chain: set[WeightVersion]) -> None:
        """Remove versions that are not needed. Raises WeightsError if the new version still does not fit."""
        there = list_versions(self._root)
        kept = chain | with_bases(self._root, there[max(0, len(there) - self._keep + 1) :])
        for old in there:
            if old not in kept:
                self._remove(old)
        for unfinished in self._root.glob(f"*{_FETCHING}"):
            name = unfinished.name.removesuffix(_FETCHING)
            if name != str(version):
                self._remove(WeightVersion.parse(name))
        here = self._root / f"{version}{_FETCHING}"
        there_already = sum(file.stat().st_size for file in here.iterdir()) if here.is_dir() else 0
        needed = num_bytes - there_already + _ROOM_LEFT_BYTES
        for old in list_versions(self._root):
            if shutil.disk_usage(self._root).free >= needed:
                break
            if old not in chain:
                self._remove(old)
        free = shutil.disk_usage(self._root).free
        if free < needed:
            raise WeightsError(
                f"the weights need {size_text(needed)}, but {self._root} has only {size_text(free)} free; set "
                "weights.fetch_dir=... to a larger folder, in memory or on a fast disk",
                ErrorClass.UNKNOWN,
            )

    def _remove(self, version: WeightVersion) -> None:
        """Remove a version, unless a process is loading or fetching it."""
        path = self._lock_file(version)
        with path.open("ab") as lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                return
            for name in (str(version), f"{version}{_FETCHING}"):
                shutil.rmtree(self._root / name, ignore_errors=True)
            if _is_file(lock, path):
                path.unlink()

    def _lock_file(self, version: WeightVersion) -> Path:
        return self._root / f"{version}.lock"

    @contextlib.contextmanager
    def _locked(self, version: WeightVersion, how: int, deadline: float) -> Iterator[None]:
        path = self._lock_file(version)
        while True:
            with path.open("ab") as lock:
                while not _try_lock(lock, how):
                    if self._closed or self._clock.monotonic() > deadline:
                        raise WeightsError(f"another process on this host is still fetching or loading {version}")
                    self._clock.sleep(_LOCK_POLL_S)
                if _is_file(lock, path):  # else the previous holder removed the lock file with the version: retry
                    yield
                    return

    # ---------------------------------------------------------------------------------------------------------------- the host

    def _move_in(self) -> None:
        """Hold a lock on the run's folder as long as this process lives. Retry if another process removes the folder meanwhile."""
        while True:
            self._root.mkdir(mode=0o700, exist_ok=True)
            try:
                in_use = (self._root / _IN_USE_LOCK).open("ab")
            except FileNotFoundError:
                continue
            if _try_lock(in_use, fcntl.LOCK_SH) and _is_file(in_use, self._root / _IN_USE_LOCK):
                self._in_use = in_use
                return
            in_use.close()
            self._clock.sleep(_LOCK_POLL_S)

    def _sweep(self, base: Path) -> None:
        """Remove the files of other runs that have no living fetcher on this host: their servers were killed."""
        for folder in base.iterdir():
            with contextlib.suppress(OSError), (folder / _IN_USE_LOCK).open("ab") as in_use:
                if folder != self._root and _try_lock(in_use, fcntl.LOCK_EX):
                    shutil.rmtree(folder, ignore_errors=True)
                    self._logger.info("removed weights left behind by %s", folder.name)


def run_key(experiment: str, trial: str, run_dir: str, host: str) -> str:
    """Folder name of a run on a host, shared by all its generation servers there."""
    digest = hashlib.sha256(f"{experiment}\0{trial}\0{run_dir}\0{host}".encode()).hexdigest()[:16]
    return f"{experiment[:40]}-{trial[:40]}-{digest}".replace(os.sep, "_")


def fetch_folder(configured: str) -> Path:
    """weights.fetch_dir. Default: /dev/shm if it is writable, else the system's folder for temporary files."""
    if configured:
        return Path(configured)
    return MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())


# ----------------------------------------------------------------------------------------------------------------- the source


class _Source:
    """A version's files over HTTP, with the run's token. Its methods block, so it is used on a thread."""

    def __init__(
        self,
        url: str,
        deadline: float,
        broken_off: Callable[[], bool],
        clock: Clock,
        fetched: Counter[str],
        *,
        grows: bool = False,
    ) -> None:
        """fetched: counts the bytes of files, by URL. grows: this is another host, which may still be fetching. Then wait for the
        rest of a file, but raise any error at once, because the source has the files, too."""
        self.url, self._deadline, self._broken_off, self._clock = url, deadline, broken_off, clock
        self._fetched, self._grows, self._renamed = fetched, grows, False
        self._parts = urlsplit(url)
        self.host = self._parts.hostname or ""

    def manifest(self, offer: str = "") -> tuple[bytes, str]:
        """Fetch the manifest. offer: the URL under which this host will serve the version. Returns also the URL of the host to
        fetch it from; "": from here. Raises WeightsError, OSError, HTTPException."""
        pause_s = _RETRY_S
        while True:
            try:
                with self._get(MANIFEST, 0, {_OFFER: offer} if offer else {}) as response:
                    return response.read(_MAX_MANIFEST_BYTES), response.headers.get(_FETCH_FROM, "")
            except (OSError, http.client.HTTPException) as error:
                pause_s = self._pause(pause_s, error)

    def download(self, name: str, target: Path, entry: FileEntry) -> None:
        """Fetch the missing part of a file. Fetch the file again if its checksum is wrong, but not from a host that is not the
        source. Raises WeightsError, OSError, HTTPException."""
        times = 1 if self._grows else _MAX_DAMAGED
        for _ in range(times):
            if self._download(name, target, entry.bytes) == entry.xxh3:
                return
            target.unlink()
        raise WeightsError(f"{name} arrived with another checksum than the manifest's, {times} times")

    def _download(self, name: str, target: Path, size: int) -> str:
        """Fetch the missing part of a file, and return its checksum. Retries after interruptions until the deadline."""
        pause_s = _RETRY_S
        digest = xxhash.xxh3_64()
        with target.open("ab+") as file:
            if file.tell() > size:
                file.truncate(0)
            file.seek(0)
            while some := file.read(_READ_BYTES):
                digest.update(some)
            buffer = memoryview(bytearray(_READ_BYTES))
            while (there := file.tell()) < size:
                try:
                    with self._get(name, there) as response:
                        while count := response.readinto(buffer[: size - file.tell()]):
                            digest.update(buffer[:count])
                            file.write(buffer[:count])
                            self._fetched[self.url] += count
                            self._check()
                    if file.tell() < size:
                        raise http.client.IncompleteRead(b"", size - file.tell())
                except (OSError, http.client.HTTPException) as error:
                    if file.tell() > there:
                        pause_s = _RETRY_S
                    pause_s = self._pause(pause_s, error)
        return digest.hexdigest()

    @contextlib.contextmanager
    def _get(self, name: str, offset: int, more: Mapping[str, str] = {}) -> Iterator[http.client.HTTPResponse]:
        secured = security.current()
        headers = {**more, **(secured.headers if secured is not None else {})}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        timeout_s = max(0.1, min(_SILENT_S, self._deadline - self._clock.monotonic()))
        connection: http.client.HTTPConnection
        if unix_sockets.in_use():
            path = unix_sockets.path_of(self.host)
            if not path:
                raise WeightsError(f"{self.url} is not a socket of this run")
            connection = unix_sockets.Connection(path, timeout_s)
        elif self._parts.scheme == "https":
            tls = secured.ask_tls if secured is not None else None
            connection = http.client.HTTPSConnection(
                self.host, self._parts.port, timeout=timeout_s, context=tls or ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self.host, self._parts.port, timeout=timeout_s)
        try:
            connection.request("GET", f"{self._parts.path}/{name}", headers=headers)
            response = connection.getresponse()
            # Nothing beyond the offset yet; or, once, the folder has got its final name while the host answered
            if self._grows and (response.status == 416 or (response.status == 404 and not self._renamed)):
                self._renamed = response.status == 404
                raise http.client.IncompleteRead(b"")
            if class_of_status(response.status) is ErrorClass.PERMANENT:
                message = response.read(500).decode("utf-8", "replace").strip()
                gone = response.status == 404  # a version that was pruned meanwhile; a newer one follows
                raise WeightsError(
                    f"{self.url}/{name} answered {response.status}: {message}",
                    ErrorClass.PASSING if gone else ErrorClass.PERMANENT,
                )
            wanted = 206 if offset else 200
            if response.status != wanted:
                raise http.client.HTTPException(f"{self.url}/{name} answered {response.status} instead of {wanted}")
            if offset and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise WeightsError(f"{self.url}/{name} sent a different range than requested")
            yield response
        finally:
            connection.close()

    def _check(self) -> None:
        if self._broken_off():
            raise WeightsError("fetching was interrupted: this server is shutting down")
        if self._clock.monotonic() > self._deadline:
            raise WeightsError("fetching exceeded its time limit")

    def _pause(self, pause_s: float, error: Exception) -> float:
        """Wait before a retry, and return the next delay. Raises the error if it is permanent, such as that of a read-only disk,
        or if no time is left."""
        if self._grows:
            if not isinstance(error, http.client.IncompleteRead):
                raise error
            pause_s = _GROWTH_POLL_S
        if classify(error) is ErrorClass.PERMANENT or self._clock.monotonic() + pause_s > self._deadline:
            raise error
        self._check()
        self._clock.sleep(pause_s)
        return min(2 * pause_s, _LONGEST_RETRY_S)


# ----------------------------------------------------------------------------------------------------------------- small parts


def _is_complete(folder: Path, manifest: bytes) -> bool:
    try:
        return (folder / MANIFEST).read_bytes() == manifest
    except OSError:
        return False


def _try_lock(file: BinaryIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one that its path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _make_private(folder: Path) -> None:
    """Create a private folder in a world-writable one. Raises WeightsError if it is another user's or others can access it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise WeightsError(
            f"{folder} is accessible to other users or is not a folder of this user; remove it, or set weights.fetch_dir=... "
            "to another folder",
            ErrorClass.PERMANENT,
        )
