"""Another user of the machine, and another run of the same user, try every endpoint of a run with default settings."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from asyncrl.config.schema import is_loopback
from asyncrl.runtime import unix_sockets
from asyncrl.testing.runs import RunHandle, launch, make_tiny_run
from tests.support.endpoints import HTTP
from tests.support.live_runs import entry
from tests.support.process_wide import sockets_in
from tests.support.scanner import listening, scan

STRANGER = 65534
START_S = 200.0
pytestmark = pytest.mark.timeout(600)


def as_stranger(question: Callable[[], Any]) -> Any:
    """The answer of `question` in a process of another user, without our groups."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(reading)
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            os.write(writing, json.dumps(question()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    """A run whose folder lies below folders that all users may enter, like /home and /tmp."""
    assert os.geteuid() == 0, "the test becomes another user, which needs root: sudo bash launcher/run_tests.sh --all"
    folder = tmp_path_factory.mktemp("run")
    for part in (folder, *folder.parents[:-1]):
        part.chmod(part.stat().st_mode | stat.S_IXOTH)
    with launch(make_tiny_run(folder), "train.max_steps=0") as run:
        run.wait_for_step(1, START_S)
        yield run


def processes(run: RunHandle) -> list[psutil.Process]:
    launcher = psutil.Process(run.popen.pid)
    return [launcher, *launcher.children(recursive=True)]


def connects(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as ours:
        try:
            ours.connect(path)
        except OSError as error:
            return type(error).__name__
        return "connected"


def test_another_user_reaches_no_socket_of_the_folder(run: RunHandle) -> None:
    entries = list(Path(os.readlink(run.run_dir / unix_sockets.LINK)).iterdir())
    paths = [str(path) for path in entries if path.is_socket()]
    assert [path.name for path in entries if not path.is_socket()] == [unix_sockets.OWNER]
    assert len(paths) >= 8
    assert {connects(path) for path in paths} == {"connected"}  # our own user can connect
    assert as_stranger(lambda: sorted({connects(path) for path in paths})) == ["PermissionError"]


def test_another_user_gets_nothing_from_any_port(run: RunHandle) -> None:
    """The ports of gloo, SGLang and the agents' API are not covered."""
    found = list(listening(processes(run)))
    assert all(is_loopback(listener.host) for listener in found), found
    ports = [listener.address for listener in found]
    assert as_stranger(lambda: {address: found for address, found in scan(ports).items() if found}) == {}


def test_another_user_reads_no_file(run: RunHandle) -> None:
    def readable() -> list[str]:
        found = []
        for path in ("config.yaml", "secrets/token", "ticket.key", "metrics.jsonl", "logs", "."):
            place = run.run_dir / path
            try:
                _ = place.read_bytes() if place.is_file() else list(place.iterdir())
            except PermissionError:
                continue
            except OSError:
                pass
            found.append(path)
        return found

    assert as_stranger(readable) == []


def test_the_token_of_another_run_is_refused_on_every_route(run: RunHandle) -> None:
    """The HTTP servers of the manager and of a generation server refuse a token that is not the run's."""
    with sockets_in(os.readlink(run.run_dir / unix_sockets.LINK)):
        for owner, url in (
            ("gserver_manager", entry(run, lambda names: names.gserver_manager())),
            ("generation_server", entry(run, lambda names: names.generation_server(0))),
        ):
            path = unix_sockets.path_of(urlsplit(url).hostname or "")
            for route in HTTP[owner]:
                method, _, target = route.partition(" ")
                if "{" in target:
                    continue  # such a route is served at another address
                with closing(unix_sockets.Connection(path, 30.0)) as connection:
                    connection.request(method, target, headers={"Authorization": "Bearer of-another-run"})
                    assert connection.getresponse().status == 401, route


def test_on_tcp_another_run_is_refused_as_well(tmp_path: Path) -> None:
    with launch(make_tiny_run(tmp_path), "train.max_steps=0", "network.sockets=tcp") as run:
        run.wait_for_step(1, START_S)
        addresses = [listener.address for listener in listening(processes(run))]
        assert len(addresses) >= 8
        assert {address: found for address, found in scan(addresses).items() if found} == {}
        url = urlsplit(entry(run, lambda names: names.gserver_manager()))
        assert url.scheme == "https"
        unchecked = ssl._create_unverified_context()
        for route in HTTP["gserver_manager"]:
            method, _, target = route.partition(" ")
            if "{" in target:
                continue
            with closing(
                http.client.HTTPSConnection(url.hostname or "", url.port, timeout=30.0, context=unchecked)
            ) as connection:
                connection.request(method, target, headers={"Authorization": "Bearer of-another-run"})
                assert connection.getresponse().status == 401, route
