"""Name resolve: one suite on etcd and memory, and the behaviour of a private etcd. Outages are in test_etcd_outages.py."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from name_sessions import LIMIT_S, OpenSession, Recorder, gone, grant_left, lives, put, sessions

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names import interface
from asyncrl.runtime.names.etcd import resolver as etcd_resolver
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdServerError, find_etcd
from asyncrl.runtime.names.interface import (
    MAX_NAME_BYTES,
    MAX_VALUE_BYTES,
    LeaseExists,
    LeaseNotFound,
    NameEntryExists,
    NameEntryNotFound,
    NameResolver,
    NameResolverClosed,
    NameResolveTimeout,
    WatchEvent,
    normalize_name,
)
from tests.support.etcd_server import EtcdServer
from tests.support.memory_names import MemoryNameResolver, open_names


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    path = tmp_path_factory.mktemp("etcd")
    with EtcdServer(path / "data", path / "etcd.log", extra_args=["--unsafe-no-fsync"]) as server:
        yield server


@pytest.fixture(params=["memory", "etcd"])
def open_session(request: pytest.FixtureRequest) -> Iterator[OpenSession]:
    """Open further sessions with the same store."""
    if request.param == "etcd":
        yield from sessions(NameResolveConfig(endpoints=[request.getfixturevalue("server").endpoint]))
    else:
        yield from sessions(NameResolveConfig(endpoints=[f"memory://{uuid.uuid4()}"]), open_names)


@pytest.fixture
def names(open_session: OpenSession) -> NameResolver:
    return open_session()


@pytest.fixture
def root() -> str:
    return f"test/{uuid.uuid4().hex}"


# ----------------------------------------------------------------------------------------------------------------- entries


def test_add_get_delete(names: NameResolver, root: str) -> None:
    with pytest.raises(NameEntryNotFound, match=root):
        names.get(f"{root}/a")
    names.add(f"{root}/a", "1")
    assert names.get(f"{root}/a") == "1"
    with pytest.raises(NameEntryExists, match=f"{root}/a"):
        names.add(f"{root}/a", "2")
    with pytest.raises(NameEntryExists):
        names.add(f"{root}/a", "1")  # an equal value also counts as existing
    assert names.get(f"{root}/a") == "1"
    names.add(f"{root}/a", "2", replace=True)
    names.add(f"{root}/empty", "", replace=True)
    assert names.get(f"{root}/a") == "2"
    assert names.get(f"{root}/empty") == ""
    assert names.delete(f"{root}/a")
    assert not names.delete(f"{root}/a")
    with pytest.raises(NameEntryNotFound):
        names.get(f"{root}/a")


def test_sessions_share_entries(open_session: OpenSession, root: str) -> None:
    first, second = open_session(), open_session()
    first.add(f"{root}/a", "1")
    assert second.get(f"{root}/a") == "1"


def test_subtrees_end_at_slashes(names: NameResolver, root: str) -> None:
    kept = {
        f"{root}/t1": "itself",
        f"{root}/t1-x": "dash",
        f"{root}/t10": "ten",
        f"{root}/t10/a": "below ten",
        f"{root}/t0": "0",
    }
    below = {f"{root}/t1/a": "1", f"{root}/t1/a/b": "2", f"{root}/t1/z": "3"}
    for key, value in reversed([*kept.items(), *below.items()]):
        names.add(key, value)
    assert names.get_subtree(f"{root}/t1") == below
    assert list(names.get_subtree(f"{root}/t1")) == sorted(below)
    assert names.get_subtree(f"{root}/t1/") == below
    assert list(names.get_subtree(f"{root}/t1/a")) == [f"{root}/t1/a/b"]
    assert names.get_subtree(f"{root}/nothing") == {}
    assert names.clear_subtree(f"{root}/t1") == 3
    assert names.clear_subtree(f"{root}/t1") == 0
    assert names.get_subtree(root) == dict(sorted(kept.items()))


def test_names_are_normalised(names: NameResolver, root: str) -> None:
    names.add(f"//{root}//a///b/", "1")
    assert names.get(f"{root}/a/b") == "1"
    assert list(names.get_subtree(f"/{root}/a/")) == [f"{root}/a/b"]


@pytest.mark.parametrize(
    "name", ["", "/", "//", "a/../b", "./a", "a\nb", "a\0b", "a/\x7f", "\ud800", "x" * (MAX_NAME_BYTES + 1)]
)
def test_invalid_names(names: NameResolver, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        normalize_name(name)
    operations: list[Callable[[], object]] = [
        lambda: names.add(name, "1"),
        lambda: names.get(name),
        lambda: names.get_subtree(name),
        lambda: names.delete(name),
        lambda: names.clear_subtree(name),
        lambda: names.compare_and_swap(name, None, "1"),
        lambda: names.wait(name, 0.0),
        lambda: names.watch(name, lambda event: None),
    ]
    for operation in operations:
        with pytest.raises(ValueError, match="name"):
            operation()


def test_invalid_values(names: NameResolver, root: str) -> None:
    with pytest.raises(TypeError, match="bytes"):
        names.add(f"{root}/a", b"1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bytes; at most"):
        names.add(f"{root}/a", "x" * (MAX_VALUE_BYTES + 1))
    with pytest.raises(ValueError, match="unicode"):
        names.add(f"{root}/a", "\ud800")
    with pytest.raises(NameEntryNotFound):
        names.get(f"{root}/a")


def test_unicode_and_long_names(names: NameResolver, root: str) -> None:
    entries = {
        f"{root}/ключ é 名前 🚀": "wert ä\n\t値 🧪",
        f"{root}/{'long/' * 700}end": "l" * MAX_VALUE_BYTES,
        f"{root}/sp ace": " ",
    }
    recorder = Recorder()
    names.watch(root, recorder, subtree=True)
    for key, value in entries.items():
        names.add(key, value)
        assert names.get(key) == value
    assert names.get_subtree(root) == dict(sorted(entries.items()))
    recorder.wait_for(*(put(key, value) for key, value in entries.items()))


def test_compare_and_swap(names: NameResolver, root: str) -> None:
    key = f"{root}/status"
    assert not names.compare_and_swap(key, "RUNNING", "COMPLETE")
    assert names.compare_and_swap(key, None, "RUNNING")
    assert not names.compare_and_swap(key, None, "RUNNING")
    assert not names.compare_and_swap(key, "COMPLETE", "ABORTED")
    assert names.compare_and_swap(key, "RUNNING", "COMPLETE")
    assert names.get(key) == "COMPLETE"


def test_one_of_concurrent_adds_wins(open_session: OpenSession, root: str) -> None:
    resolvers = [open_session() for _ in range(3)]
    start = threading.Barrier(9)

    def contend(index: int) -> list[str]:
        resolver = resolvers[index % 3]
        start.wait(LIMIT_S)
        won = []
        for round_index in range(20):
            try:
                resolver.add(f"{root}/{round_index}", str(index))
            except NameEntryExists:
                continue
            won.append(f"{root}/{round_index}")
        return won

    with ThreadPoolExecutor(9) as pool:
        wins = list(pool.map(contend, range(9)))
    assert sorted(key for won in wins for key in won) == sorted(f"{root}/{index}" for index in range(20))
    winners = {key: str(index) for index, won in enumerate(wins) for key in won}
    assert resolvers[0].get_subtree(root) == dict(sorted(winners.items()))


def test_concurrent_swaps_lose_no_increment(open_session: OpenSession, root: str) -> None:
    resolvers = [open_session() for _ in range(2)]
    resolvers[0].add(f"{root}/counter", "0")

    def increment(index: int) -> None:
        for _ in range(20):
            while True:
                value = resolvers[index % 2].get(f"{root}/counter")
                if resolvers[index % 2].compare_and_swap(f"{root}/counter", value, str(int(value) + 1)):
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(4)))
    assert resolvers[0].get(f"{root}/counter") == "80"


# ------------------------------------------------------------------------------------------------------------ waits, watches


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the read of a wait take up to LIMIT_S, whatever the limit of the wait is, because a busy machine may delay it."""
    monkeypatch.setattr(interface, "_MIN_READ_S", LIMIT_S)


@pytest.mark.usefixtures("slow_reads")
def test_wait(open_session: OpenSession, root: str) -> None:
    names, other = open_session(), open_session()
    names.add(f"{root}/there", "1")
    assert names.wait(f"{root}/there", 0.0) == "1"
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(resolver.wait, f"{root}/later", LIMIT_S) for resolver in (names, names, other, other)]
        names.add(f"{root}/later-not", "wrong")
        names.add(f"{root}/later", "2")
        assert [wait.result() for wait in waits] == ["2"] * 4


@pytest.mark.usefixtures("slow_reads")
def test_wait_has_a_limit_and_a_name(names: NameResolver, root: str) -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{root}/never' did not appear within 0.3 s") as error:
        names.wait(f"{root}/never", 0.3)
    assert 0.25 < time.monotonic() - before < LIMIT_S
    assert isinstance(error.value, NameResolveTimeout)


def test_watch_a_key(open_session: OpenSession, root: str) -> None:
    names, other = open_session(), open_session()
    key = f"{root}/a"
    names.add(key, "1")
    recorder, absent = Recorder(), Recorder()
    watch = names.watch(key, recorder)
    names.watch(f"{root}/b", absent)
    assert recorder.events == [put(key, "1")]  # the current state arrives before watch returns
    assert absent.events == []
    names.add(f"{key}/below", "x")
    names.add(f"{key}b", "x")
    other.add(key, "2", replace=True)
    other.delete(key)
    assert other.compare_and_swap(key, None, "3")
    assert other.compare_and_swap(key, "3", "4")
    other.add(f"{root}/b", "b")
    recorder.wait_for(put(key, "1"), put(key, "2"), gone(key), put(key, "3"), put(key, "4"))
    absent.wait_for(put(f"{root}/b", "b"))
    watch.cancel()
    watch.cancel()
    other.delete(key)
    other.delete(f"{root}/b")
    absent.wait_for(put(f"{root}/b", "b"), gone(f"{root}/b"))
    assert len(recorder.events) == 5


def test_watch_a_subtree(open_session: OpenSession, root: str) -> None:
    names, other = open_session(), open_session()
    for key in ("t1/b", "t1/a", "t1", "t10/a"):
        names.add(f"{root}/{key}", key)
    recorder, until_a = Recorder(), Recorder()
    names.watch(f"{root}/t1", recorder, subtree=True)
    names.watch(f"{root}/t1/a", until_a)
    start = [put(f"{root}/t1/a", "t1/a"), put(f"{root}/t1/b", "t1/b")]
    assert recorder.events == start
    other.add(f"{root}/t1", "x", replace=True)
    other.add(f"{root}/t10/b", "x")
    other.add(f"{root}/t1/c/d", "3")
    other.clear_subtree(f"{root}/t1")
    recorder.wait_for(
        *start, put(f"{root}/t1/c/d", "3"), gone(f"{root}/t1/a"), gone(f"{root}/t1/b"), gone(f"{root}/t1/c/d")
    )
    until_a.wait_for(start[0], gone(f"{root}/t1/a"))


def test_watch_misses_nothing_while_it_begins(open_session: OpenSession, root: str) -> None:
    names, other = open_session(), open_session()
    begun = threading.Event()

    def write() -> None:
        for index in range(150):
            other.add(f"{root}/counter", str(index), replace=True)
            begun.set()

    recorder = Recorder()
    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(LIMIT_S)
    names.watch(f"{root}/counter", recorder)
    writer.join(LIMIT_S)
    recorder.wait_for_state({f"{root}/counter": "149"})
    values = [int(event.value) for event in recorder.events]
    assert values == list(range(values[0], 150))


def test_callbacks_may_use_the_resolver_cancel_and_fail(
    names: NameResolver, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()

    def echo(event: WatchEvent) -> None:
        if event.value == "bad":
            raise RuntimeError("no good")
        if event.kind == "put" and not event.key.endswith("echo"):
            names.add(f"{event.key}/echo", event.value, replace=True)
        recorder(event)
        if event.value == "last":
            watch.cancel()

    watch = names.watch(root, echo, subtree=True)
    names.add(f"{root}/a", "1")
    recorder.wait_for(put(f"{root}/a", "1"), put(f"{root}/a/echo", "1"))
    names.add(f"{root}/b", "bad")
    assert names.wait(f"{root}/b", LIMIT_S) == "bad"
    names.add(f"{root}/c", "last")
    assert names.wait(f"{root}/c/echo", LIMIT_S) == "last"
    recorder.wait_for(put(f"{root}/a", "1"), put(f"{root}/a/echo", "1"), put(f"{root}/c", "last"))
    assert "no good" in caplog.text


# ------------------------------------------------------------------------------------------------------------------ leases


@pytest.mark.full
def test_entries_expire_when_nobody_refreshes(open_session: OpenSession, root: str) -> None:
    names, other = open_session(), open_session()
    recorder = Recorder()
    other.watch(root, recorder, subtree=True)
    kept = names.grant_lease(9)  # granted before the other lease, and outlives it
    lease = grant_left(names, 9)  # lasts until the steps below are done
    names.add(f"{root}/kept", "k", lease=kept.id)
    names.add(f"{root}/a", "1", lease=lease.id)
    names.add(f"{root}/sub/b", "2", lease=lease.id)
    names.add(f"{root}/plain", "3", lease=lease.id)
    names.add(f"{root}/plain", "4", replace=True)  # no longer under the lease
    assert names.compare_and_swap(f"{root}/a", "1", "5")  # still under the lease
    assert lives(names, lease)
    recorder.wait_for_state({f"{root}/kept": "k", f"{root}/plain": "4"})
    assert gone(f"{root}/a") in recorder.events
    assert gone(f"{root}/sub/b") in recorder.events
    assert not lives(names, lease)
    lease.revoke()
    with pytest.raises(LeaseNotFound, match=f"{root}/b"):
        names.add(f"{root}/b", "1", lease=lease.id)
    assert lives(names, kept)
    assert names.get_subtree(root) == {f"{root}/kept": "k", f"{root}/plain": "4"}


def test_a_lease_with_an_id_is_shared(open_session: OpenSession, root: str) -> None:
    holder, user = open_session(), open_session()
    lease_id = uuid.uuid4().int >> 66
    lease = holder.grant_lease(30.5, lease_id=lease_id)
    assert lease.id == lease_id
    assert lease.ttl_s >= 30.5
    with pytest.raises(LeaseExists, match=f"{lease_id:#x}"):
        user.grant_lease(30, lease_id=lease_id)
    user.add(f"{root}/a", "1", lease=lease_id)
    user.add(f"{root}/b", "1", lease=lease_id)
    user.close()
    assert holder.get(f"{root}/a") == "1"  # the entry depends on the lease, not on the session
    lease.revoke()
    assert not lives(holder, lease)
    assert holder.get_subtree(root) == {}
    assert lives(holder, holder.grant_lease(30, lease_id=lease_id))  # the id is free again


def test_close_revokes_kept_leases_and_ends_waits(
    open_session: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_resolver, "_CLOSE_LIMIT_S", LIMIT_S)  # a slower close would leave the leases to expire
    names, other = open_session(), open_session()
    kept, left = names.grant_lease(30), grant_left(names, 30)
    names.add(f"{root}/kept", "1", lease=kept.id)
    names.add(f"{root}/left", "1", lease=left.id)
    names.add(f"{root}/plain", "1")
    recorder = Recorder()
    names.watch(root, recorder, subtree=True)
    num_events = len(recorder.events)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(names.wait, f"{root}/never", 60.0)
        while not names._waiters:
            time.sleep(0.001)
        names.close()
        with pytest.raises(NameResolverClosed):
            wait.result(LIMIT_S)
    names.close()
    assert list(other.get_subtree(root)) == [f"{root}/left", f"{root}/plain"]
    assert len(recorder.events) == num_events
    with pytest.raises(NameResolverClosed):
        names.get(root)
    with pytest.raises(NameResolverClosed):
        names.grant_lease(1)


@pytest.mark.parametrize(
    ("ttl_s", "lease_id"), [(0, None), (-1, None), (float("nan"), None), (float("inf"), None), (1, 0), (1, 2**63)]
)
def test_invalid_leases(names: NameResolver, ttl_s: float, lease_id: int | None) -> None:
    with pytest.raises(ValueError, match=r"ttl_s|lease_id"):
        names.grant_lease(ttl_s, lease_id=lease_id)


# ------------------------------------------------------------------------------------------------------- opening, importing


def test_open_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="needs a list"):
        open_name_resolver(NameResolveConfig(endpoints=[]))


def test_memory_spaces_are_apart(root: str) -> None:
    with MemoryNameResolver(f"{root} 1") as first, MemoryNameResolver(f"{root} 2") as second:
        first.add(root, "1")
        assert second.get_subtree("test") == {}


def test_a_lagging_memory_watch_keeps_the_newest_of_each_key(root: str) -> None:
    with MemoryNameResolver(root) as names, ThreadPoolExecutor(1) as pool:
        recorder, stuck, go = Recorder(), threading.Event(), threading.Event()

        def lag(event: WatchEvent) -> None:
            stuck.set()
            assert go.wait(LIMIT_S)
            recorder(event)

        names.watch(root, lag, subtree=True)
        first = pool.submit(names.add, f"{root}/a", "first")
        assert stuck.wait(LIMIT_S)
        for index in range(10_000):
            names.add(f"{root}/{index % 2}", str(index), replace=True)
        go.set()
        first.result(LIMIT_S)
        recorder.wait_for_state({f"{root}/a": "first", f"{root}/0": "9998", f"{root}/1": "9999"})
        assert len(recorder.events) < 5000


def test_modules_load_neither_grpc_nor_torch() -> None:
    program = (
        "import sys, asyncrl.runtime.names.etcd.resolver, asyncrl.runtime.names.etcd.server\n"
        "from asyncrl.runtime.names.etcd.api import load_api\n"
        "assert not {'grpc', 'etcd3', 'google.protobuf', 'torch', 'numpy'} & set(sys.modules)\n"
        "load_api()\n"
        "assert 'grpc' in sys.modules and not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_the_first_endpoint_that_answers_is_used(server: EtcdServer, root: str) -> None:
    with socket.socket() as refusing, socket.socket() as silent:
        refusing.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # accepts connections but never answers
        endpoints = [f"127.0.0.1:{closed.getsockname()[1]}" for closed in (refusing, silent)]
        config = NameResolveConfig(endpoints=[*endpoints, server.endpoint], timeout_s=LIMIT_S)
        # The silent endpoint gets half of limit_s. That is less than the 2 s after which gRPC itself gives it up.
        with open_name_resolver(config, limit_s=3.9) as names:
            names.add(f"{root}/a", "1", lease=names.grant_lease(5).id)
            recorder = Recorder()
            names.watch(root, recorder, subtree=True)
            assert names.wait(f"{root}/a", LIMIT_S) == "1"
            assert recorder.events == [put(f"{root}/a", "1")]
        with pytest.raises(NameResolveTimeout, match=f"{endpoints[0]}.*; {endpoints[1]}"):
            open_name_resolver(NameResolveConfig(endpoints=endpoints, timeout_s=0.5))


# ----------------------------------------------------------------------------------------------------------- the server itself


def test_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from asyncrl.runtime.names.etcd.server import EtcdServer\n"
        "server = EtcdServer(sys.argv[1] + '/data', sys.argv[1] + '/log', extra_args=['--unsafe-no-fsync'])\n"
        "thread = threading.Thread(target=server.start)\n"  # the thread that starts the server may end
        "thread.start(); thread.join()\n"
        "print(server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        etcd = psutil.Process(int(parent.stdout.readline()))
        assert etcd.is_running()
        parent.kill()
        parent.wait(LIMIT_S)
        etcd.wait(LIMIT_S)


def test_server_says_why_it_does_not_start(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "data", tmp_path / "log", extra_args=["--no-such-flag"])
    with pytest.raises(EtcdServerError, match="no-such-flag"):
        server.start()
    assert not server.running
    with pytest.raises(EtcdServerError, match="no/such/etcd"):
        find_etcd("no/such/etcd")


@pytest.mark.parametrize("on_sockets", [True, False])
def test_the_log_of_a_server_that_starts_and_stops_is_empty(tmp_path: Path, on_sockets: bool) -> None:
    """A clean run shows no warnings."""
    log = tmp_path / "log"
    with EtcdServer(tmp_path / "data", log, socket_dir=str(tmp_path) if on_sockets else "") as server:
        with open_name_resolver(NameResolveConfig(endpoints=[server.endpoint])) as resolver:
            resolver.add("key", "value")
        assert server.answers(LIMIT_S)
    assert log.read_text() == ""


def test_server_stops_and_changes_port_if_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.runtime.names.etcd import server as etcd_server

    choose = etcd_server._free_ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        choices = iter([(taken.getsockname()[1], choose("127.0.0.1")[0])])
        monkeypatch.setattr(etcd_server, "_free_ports", lambda host: next(choices, None) or choose(host))
        server = EtcdServer(tmp_path / "data", tmp_path / "log", extra_args=["--unsafe-no-fsync"])
        server.start()
        assert server.endpoint != f"127.0.0.1:{taken.getsockname()[1]}"
    endpoint, pid = server.endpoint, server.pid
    server.restart()
    assert (server.endpoint, server.pid != pid) == (endpoint, True)
    server.stop()
    assert server.wait_for_exit(0.0)
    assert not psutil.pid_exists(server.pid)
