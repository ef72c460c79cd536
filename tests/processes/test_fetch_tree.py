"""Hosts fetch a version from each other. The source sends it twice, and a host that fails costs its readers a bounded time."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_weight_files import Flaky, damaged, make_version

from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.security import Secrets, Security
from asyncrl.weights import fetch as weight_files
from asyncrl.weights.fetch import FAN_OUT, FetchTree, WeightFetcher, WeightFiles
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import MANIFEST, verify_version
from tests.support.process_wide import secured_by

LIMIT_S = 60.0
FIRST = WeightVersion(1, 0)
ELSEWHERE = Path("/no/such/folder")
HOSTS = """
import json, logging, os, sys
from pathlib import Path
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.fetch import WeightFetcher

memory, source, version, first, *others = sys.argv[1:]
run = next((run for run in others if not os.fork()), first)
host = WeightFetcher(Path(memory), run, host="127.0.0.1", logger=logging.getLogger())
os.write(1, b"ready\\n")
while os.read(0, 1):
    path = host.fetch(Path("/no"), WeightVersion.parse(version), source, 60.0)
    os.write(1, json.dumps([str(path), dict(host.fetched_bytes)]).encode() + b"\\n")
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "run" / "weights" / "actor"


@pytest.fixture
def source(actor: Path) -> Iterator[str]:
    files = WeightFiles(actor, host="127.0.0.1")
    yield files.start()
    files.close()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source sends a version once. So the second host that asks fetches from the first."""
    monkeypatch.setattr(weight_files, "FAN_OUT", 1)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Callable[[], WeightFetcher]]:
    """Makes hosts in this process."""
    with contextlib.ExitStack() as opened:

        def make() -> WeightFetcher:
            run = f"here-{len(list((tmp_path / 'memory').glob('*/here-*')))}"
            made = WeightFetcher(tmp_path / "memory", run, host="127.0.0.1", logger=logging.getLogger("test"))
            opened.callback(made.close)
            return made

        yield make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(source, *runs) starts hosts, each in a process of its own. Each fetches FIRST when it reads a byte."""
    with contextlib.ExitStack() as opened:

        def make(source: str, *runs: str) -> subprocess.Popen[bytes]:
            words = [sys.executable, "-c", HOSTS, str(tmp_path / "memory"), source, str(FIRST), *runs]
            pipe = subprocess.PIPE
            hosts = opened.enter_context(subprocess.Popen(words, stdin=pipe, stdout=pipe, bufsize=0))
            opened.callback(hosts.kill)
            for _ in runs:
                assert told(hosts) == b"ready\n"
            return hosts

        yield make


def told(hosts: subprocess.Popen[bytes]) -> bytes:
    assert hosts.stdout is not None
    return hosts.stdout.readline()


def begin(hosts: subprocess.Popen[bytes], count: int) -> None:
    assert hosts.stdin is not None
    hosts.stdin.write(b"f" * count)


def offer(source: str, url: str) -> str:
    """Offer FIRST at this URL to the source. Return from where it is to be fetched."""
    request = urllib.request.Request(f"{source}/{FIRST}/{MANIFEST}", headers={"Asyncrl-Offer": url})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return str(answer.headers["Asyncrl-Fetch-From"])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_no_holder_sends_a_version_more_often_than_the_fan_out(count: int) -> None:
    tree = FetchTree()
    hosts = [f"http://h{number}" for number in range(count)]
    places = {host: tree.place(FIRST, host) for host in hosts}
    assert max(Counter(places.values()).values()) <= FAN_OUT
    depth = {"": 0}
    for host in hosts:  # a KeyError: it would fetch from a host that came later
        depth[host] = depth[places[host]] + 1
    assert max(depth.values()) <= math.log2(count + 2)
    assert {host: tree.place(FIRST, host) for host in reversed(hosts)} == places


def test_versions_have_trees_of_their_own_and_old_ones_are_forgotten() -> None:
    tree = FetchTree()
    for number in range(100):
        assert [tree.place(WeightVersion(1, number), host) for host in "abc"] == ["", "", "a"]
    assert len(tree._holders) <= 8


def test_the_source_sends_a_version_twice_to_seven_hosts(actor: Path, source: str, start: Start) -> None:
    num_bytes = make_version(actor, FIRST, numbers=4_000_000)
    hosts = start(source, *(f"h{number}" for number in range(7)))
    begin(hosts, 7)
    sent: Counter[str] = Counter()
    for _ in range(7):
        path, fetched = json.loads(told(hosts))
        verify_version(Path(path), FIRST)
        assert sum(fetched.values()) == num_bytes  # no byte twice
        sent.update(fetched)
    assert sent[f"{source}/{FIRST}"] == max(sent.values()) == 2 * num_bytes
    assert sum(sent.values()) == 7 * num_bytes


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.usefixtures("narrow")
def test_a_host_that_dies_or_freezes_midway_costs_its_reader_only_the_rest(
    actor: Path,
    source: str,
    start: Start,
    here: Callable[[], WeightFetcher],
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    monkeypatch.setattr(weight_files, "_SILENT_S", 1.0)
    num_bytes, stuck = make_version(actor, FIRST), threading.Event()

    def half(number: int, body: bytes) -> bytes:
        if number == 2:  # the relay asks for the second half
            stuck.set()
            time.sleep(5.0)
        return body[: len(body) // 2] if number == 1 else body

    slow = Flaky(source, half)
    relay = start(slow.url, "relay")
    begin(relay, 1)
    assert stuck.wait(LIMIT_S)
    reader, found = here(), []
    thread = threading.Thread(target=lambda: found.append(reader.fetch(ELSEWHERE, FIRST, slow.url, LIMIT_S)))
    thread.start()
    while not reader.fetched_bytes.total() >= num_bytes // 3:  # bounded by the test's limit
        time.sleep(0.01)
    relay.send_signal(how)
    began = time.monotonic()
    thread.join(LIMIT_S)
    assert time.monotonic() - began < 10.0
    verify_version(found[0], FIRST)
    assert reader.fetched_bytes.total() == num_bytes  # no byte twice
    from_source = reader.fetched_bytes[f"{slow.url}/{FIRST}"]
    assert num_bytes // 3 < from_source < num_bytes * 2 // 3
    slow._server.socket.close()


@pytest.mark.usefixtures("narrow")
def test_a_forged_file_is_refused_and_fetched_from_the_source(
    actor: Path, source: str, here: Callable[[], WeightFetcher], caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes = make_version(actor, FIRST)
    forger = Flaky(source, lambda _, body: damaged(body))
    assert offer(source, forger.url) == ""
    reader = here()
    verify_version(reader.fetch(ELSEWHERE, FIRST, source, LIMIT_S), FIRST)
    size = (actor / str(FIRST) / "model.safetensors").stat().st_size
    assert reader.fetched_bytes[f"{forger.url}/{FIRST}"] >= size
    assert reader.fetched_bytes.total() == num_bytes + size  # the forged file, and all files
    assert "model.safetensors arrived with another checksum than the manifest's, 1 times" in caplog.text
    forger.close()


@pytest.mark.usefixtures("narrow")
def test_a_copy_that_does_not_grow_is_left_after_half_of_the_limit(
    actor: Path, source: str, here: Callable[[], WeightFetcher], tmp_path: Path
) -> None:
    num_bytes = make_version(actor, FIRST)
    torn = tmp_path / "torn"
    (torn / f"{FIRST}.fetching").mkdir(parents=True)
    for file in (actor / str(FIRST)).iterdir():
        body = file.read_bytes()
        (torn / f"{FIRST}.fetching" / file.name).write_bytes(body[:1_000_000])
    files = WeightFiles(torn, host="127.0.0.1")
    url = files.start()
    assert offer(source, url) == ""
    reader, limit_s, began = here(), 4.0, time.monotonic()
    verify_version(reader.fetch(ELSEWHERE, FIRST, source, limit_s), FIRST)
    assert limit_s / 2 - 0.2 < time.monotonic() - began
    assert 1_000_000 < reader.fetched_bytes[f"{url}/{FIRST}"] < 1_001_000  # and config.json
    assert reader.fetched_bytes.total() == num_bytes
    files.close()


@pytest.mark.usefixtures("narrow")
def test_a_host_without_the_version_keeps_no_reader_waiting(
    actor: Path, source: str, here: Callable[[], WeightFetcher]
) -> None:
    """It has pruned the version, or its own fetch has failed: then it has withdrawn the manifest."""
    num_bytes = make_version(actor, FIRST)
    cut = Flaky(source, lambda _, body: damaged(body))
    failed = here()
    with pytest.raises(WeightsError, match="another checksum"):
        failed.fetch(ELSEWHERE, FIRST, cut.url, LIMIT_S)
    cut.close()
    reader, began = here(), time.monotonic()
    verify_version(reader.fetch(ELSEWHERE, FIRST, source, LIMIT_S), FIRST)
    assert time.monotonic() - began < LIMIT_S / 4
    assert reader.fetched_bytes == {f"{source}/{FIRST}": num_bytes}


def test_strangers_get_nothing_from_a_host(actor: Path, here: Callable[[], WeightFetcher], narrow: None) -> None:
    make_version(actor, FIRST)
    with secured_by(Security(Secrets.make())):
        files = WeightFiles(actor, host="127.0.0.1")
        source, first, second = files.start(), here(), here()
        first.fetch(ELSEWHERE, FIRST, source, LIMIT_S)
        second.fetch(ELSEWHERE, FIRST, source, LIMIT_S)
        (url,) = second.fetched_bytes  # that of the first host
        assert not url.startswith(source)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/config.json", timeout=LIMIT_S)
        with refused.value:
            assert refused.value.code == 401
        files.close()
