"""Weights for hosts that cannot read the run's folder.

A host fetches each version once, and continues an interrupted fetch. Only files of versions are served, and with authentication
only to processes of the run.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.security import Secrets, Security
from asyncrl.weights import fetch as weight_files
from asyncrl.weights.fetch import WeightFetcher, WeightFiles, _Source, run_key
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import publish_folder, verify_version
from tests.support.process_wide import secured_by

LIMIT_S = 60.0
LOGGER = logging.getLogger("test_weight_files")
FIRST = WeightVersion(1, 0)


def make_version(directory: Path, version: WeightVersion, *, numbers: int = 500_000) -> int:
    """Write a version. Return the size of its files in bytes."""
    model = directory.parent / f"model of {version}"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    values = np.random.default_rng(version.version).random(numbers, dtype=np.float32)
    save_file({"a": values, "b": values[:1000]}, model / "model.safetensors")
    manifest = publish_folder(directory / str(version), source_dir=model, version=version, fsync=False)
    return sum(entry.bytes for entry in manifest.files.values())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time after which a silent source is asked again: a busy machine may delay it, and these tests count requests."""
    monkeypatch.setattr(weight_files, "_SILENT_S", LIMIT_S)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights" / "actor"


@pytest.fixture
def source(actor: Path) -> Iterator[str]:
    files = WeightFiles(actor, host="127.0.0.1")
    yield files.start()
    files.close()


@pytest.fixture
def fetcher(tmp_path: Path) -> Iterator[Callable[..., WeightFetcher]]:
    made: list[WeightFetcher] = []

    def make(run: str = "run-1", keep: int = 2) -> WeightFetcher:
        folder = tmp_path / "memory"
        folder.mkdir(exist_ok=True)
        made.append(WeightFetcher(folder, run, keep=keep, logger=LOGGER))
        return made[-1]

    yield make
    for one in made:
        one.close()


def damaged(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


class Flaky:
    """Forwards the source's answers. For a tensor file, spoil(number of the request from 1, body of the answer) returns the body
    that is sent instead, which may be damaged or shorter."""

    def __init__(self, source: str, spoil: Callable[[int, bytes], bytes]) -> None:
        self.requests: list[str] = []  # the requested range of each file request
        flaky = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urllib.request.Request(f"{source.removesuffix('/weights')}{self.path}")
                wanted = self.headers.get("Range", "")
                for name in {"Range", "Asyncrl-Offer"} & set(self.headers):
                    asked.add_header(name, self.headers[name])
                with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
                    body, status, headers = answer.read(), answer.status, answer.headers
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                for name in {"Content-Range", "Asyncrl-Fetch-From"} & set(headers):
                    self.send_header(name, headers[name])
                self.end_headers()
                if self.path.endswith(".safetensors"):
                    flaky.requests.append(wanted)
                    body = spoil(len(flaky.requests), body)
                with contextlib.suppress(BrokenPipeError):  # the client was killed
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/weights"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_a_host_fetches_a_version_once(actor: Path, source: str, fetcher: Callable[..., WeightFetcher]) -> None:
    num_bytes = make_version(actor, FIRST)
    elsewhere = Path("/no/such/folder") / str(FIRST)
    servers = [fetcher() for _ in range(3)]
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(one.fetch(elsewhere, FIRST, source, LIMIT_S))) for one in servers
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert sum(one.fetched_bytes.total() for one in servers) == num_bytes
    verify_version(found[0], FIRST)
    assert found[0].stat().st_mode & 0o077 == 0 or found[0].parent.parent.stat().st_mode & 0o077 == 0
    other_host = fetcher("run-1-on-another-host")
    other_host.fetch(elsewhere, FIRST, source, LIMIT_S)
    assert other_host.fetched_bytes.total() == num_bytes


def test_who_sees_the_very_version_fetches_nothing(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher], tmp_path: Path
) -> None:
    num_bytes = make_version(actor, FIRST)
    one = fetcher()
    assert one.fetch(actor / str(FIRST), FIRST, source, LIMIT_S) == actor / str(FIRST)
    assert one.fetched_bytes.total() == 0

    stale = tmp_path / "old" / "weights" / "actor"  # the same name with other weights: the remains of an earlier run
    make_version(stale, FIRST, numbers=400_000)
    there = one.fetch(stale / str(FIRST), FIRST, source, LIMIT_S)
    assert there != stale / str(FIRST)
    assert one.fetched_bytes.total() == num_bytes


def test_what_breaks_off_goes_on_where_it_was(actor: Path, source: str, fetcher: Callable[..., WeightFetcher]) -> None:
    num_bytes = make_version(actor, FIRST)
    flaky = Flaky(source, lambda number, body: body[: len(body) // 2] if number <= 3 else body)
    one = fetcher()
    there = one.fetch(Path("/no"), FIRST, flaky.url, LIMIT_S)
    flaky.close()
    verify_version(there, FIRST)
    assert one.fetched_bytes.total() == num_bytes  # no byte twice
    assert flaky.requests[0] == ""
    starts = [int(wanted.removeprefix("bytes=").rstrip("-")) for wanted in flaky.requests[1:]]
    assert starts == sorted(set(starts))
    assert len(starts) == 3


def test_a_killed_process_leaves_its_part_to_the_next(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher], tmp_path: Path
) -> None:
    num_bytes = make_version(actor, FIRST)
    stuck = threading.Event()

    def half(number: int, body: bytes) -> bytes:
        if number == 1:
            return body[: len(body) // 2]
        stuck.set()
        time.sleep(LIMIT_S if number == 2 else 0)
        return body

    flaky = Flaky(source, half)
    (tmp_path / "memory").mkdir()
    code = (
        "import logging, sys\nfrom pathlib import Path\nfrom asyncrl.protocol.versions import WeightVersion\n"
        "from asyncrl.weights.fetch import WeightFetcher\n"
        "one = WeightFetcher(Path(sys.argv[1]), 'run-1', logger=logging.getLogger())\n"
        f"one.fetch(Path('/no'), WeightVersion(1, 0), sys.argv[2], {LIMIT_S})"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "memory"), flaky.url]) as process:
        assert stuck.wait(LIMIT_S)
        process.send_signal(signal.SIGKILL)
    one = fetcher()
    there = one.fetch(Path("/no"), FIRST, source, LIMIT_S)
    verify_version(there, FIRST)
    assert num_bytes // 3 < one.fetched_bytes.total() < num_bytes * 2 // 3
    flaky._server.socket.close()


def test_what_arrives_damaged_is_fetched_again_and_never_kept(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher]
) -> None:
    make_version(actor, FIRST)
    flaky = Flaky(source, lambda number, body: damaged(body) if number == 1 else body)
    verify_version(fetcher().fetch(Path("/no"), FIRST, flaky.url, LIMIT_S), FIRST)
    assert flaky.requests == ["", ""]
    flaky.close()

    always = Flaky(source, lambda _, body: damaged(body))
    with pytest.raises(
        WeightsError, match=r"model\.safetensors arrived with another checksum than the manifest's, 3 times"
    ):
        fetcher("run-2").fetch(Path("/no"), FIRST, always.url, LIMIT_S)
    always.close()


def test_a_source_that_is_away_is_waited_for_within_the_limit(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher]
) -> None:
    with pytest.raises(WeightsError, match="could not be fetched from http://127"):
        fetcher().fetch(Path("/no"), FIRST, "http://127.0.0.1:9/weights", 0.5)
    with pytest.raises(WeightsError, match="answered 404"):
        fetcher().fetch(Path("/no"), FIRST, source, LIMIT_S)


@pytest.mark.parametrize(
    ("error", "repeated"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (http.client.IncompleteRead(b""), True),
        (OSError(errno.EROFS, "read-only"), False),
        (PermissionError(errno.EACCES, "forbidden"), False),
    ],
)
def test_a_fetch_is_repeated_only_after_an_error_that_may_pass(error: Exception, repeated: bool) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    source = _Source("http://127.0.0.1:1/v", 10.0, lambda: False, clock, Counter())
    if repeated:
        assert source._pause(0.2, error) == 0.4
    else:
        with pytest.raises(OSError, match=r"read-only|forbidden"):
            source._pause(0.2, error)
    assert slept == [0.2] * repeated


def test_old_versions_go_and_what_is_being_loaded_stays(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher]
) -> None:
    versions = [WeightVersion(1, number) for number in range(5)]
    for version in versions:
        make_version(actor, version, numbers=2000)
    one, other = fetcher(), fetcher()
    root = one.fetch(Path("/no"), versions[0], source, LIMIT_S).parent
    with other.loading(versions[0], LIMIT_S):
        for version in versions[1:4]:
            one.fetch(Path("/no"), version, source, LIMIT_S)
        there = {path.name for path in root.iterdir() if path.is_dir()}
        assert there == {str(versions[0]), *map(str, versions[2:4])}
    one.fetch(Path("/no"), versions[4], source, LIMIT_S)
    assert {path.name for path in root.iterdir() if path.is_dir()} == set(map(str, versions[3:]))
    assert len(list(root.glob("*.lock"))) <= 4


def test_too_little_room_is_told_with_what_helps(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_version(actor, FIRST)
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(WeightsError, match=r"has only 1\.0 MB free; set weights\.fetch_dir="):
        fetcher().fetch(Path("/no"), FIRST, source, LIMIT_S)


def test_the_last_server_of_a_host_takes_its_files_along_and_a_killed_ones_are_swept(
    actor: Path, source: str, fetcher: Callable[..., WeightFetcher], tmp_path: Path
) -> None:
    make_version(actor, FIRST, numbers=2000)
    one, other = fetcher(), fetcher()
    there = one.fetch(Path("/no"), FIRST, source, LIMIT_S)
    one.close()
    assert there.is_dir()
    other.close()
    assert not there.parent.exists()

    code = (
        "import logging, os, sys\nfrom pathlib import Path\nfrom asyncrl.weights.fetch import WeightFetcher\n"
        "one = WeightFetcher(Path(sys.argv[1]), 'killed', logger=logging.getLogger())\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "memory")], check=False, timeout=LIMIT_S)
    left = tmp_path / "memory" / f"asyncrl-{os.getuid()}" / "killed"
    assert left.is_dir()
    fetcher("another")
    assert not left.exists()


def test_a_folder_of_somebody_else_is_not_used(fetcher: Callable[..., WeightFetcher], tmp_path: Path) -> None:
    (tmp_path / "memory" / f"asyncrl-{os.getuid()}").mkdir(parents=True)
    (tmp_path / "memory" / f"asyncrl-{os.getuid()}").chmod(0o777)
    with pytest.raises(WeightsError, match="accessible to other users"):
        fetcher()


def test_nothing_but_versions_is_served(actor: Path, source: str, tmp_path: Path) -> None:
    make_version(actor, FIRST, numbers=2000)
    (actor / str(FIRST) / "secret").write_text("T0PSECRET")
    (tmp_path / "run" / "secret").write_text("T0PSECRET")
    for path in (
        f"{FIRST}/secret", f"{FIRST}/..%2f..%2f..%2f..%2fsecret", "..%2f..%2f/secret", f"{FIRST}/../../../secret", f"{FIRST}/", "",
        f"{FIRST}", "a0001-v00000099/manifest.json",
    ):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{source}/{path}", timeout=LIMIT_S)
        with refused.value:
            assert refused.value.code == 404
            assert b"T0PSECRET" not in refused.value.read()


def test_strangers_get_nothing_and_the_runs_own_do(actor: Path, fetcher: Callable[..., WeightFetcher]) -> None:
    num_bytes = make_version(actor, FIRST)
    with secured_by(Security(Secrets.make())):
        files = WeightFiles(actor, host="127.0.0.1")
        url = files.start()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/{FIRST}/manifest.json", timeout=LIMIT_S)
        with refused.value:
            assert refused.value.code == 401
        one = fetcher()
        one.fetch(Path("/no"), FIRST, url, LIMIT_S)
        assert one.fetched_bytes.total() == num_bytes
        files.close()


def test_runs_and_hosts_have_folders_of_their_own() -> None:
    runs = ("a", "t0", "/r", "h1"), ("a", "t0", "/r", "h2"), ("a", "t0", "/s", "h1"), ("a", "t1", "/r", "h1")
    keys = {run_key(*words) for words in runs}
    assert len(keys) == 4
    assert "/" not in run_key("a/b", "c/d", "/r", "h")
