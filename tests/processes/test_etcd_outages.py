"""etcd sessions survive servers that die, lose their data, freeze or compact. The launcher keeps a run's private etcd alive.

All servers are real.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from name_sessions import LIMIT_S, OpenSession, Recorder, gone, lives, patient, put

from asyncrl.config.schema import ExperimentConfig, NameResolveConfig, NetworkConfig, RuntimeConfig
from asyncrl.launch.name_service import NameService
from asyncrl.launch.rundir import LaunchError
from asyncrl.protocol.names import Names
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.names.etcd import watch as etcd_watch
from asyncrl.runtime.names.etcd.access import UNRESTRICTED
from asyncrl.runtime.names.etcd.api import load_api
from asyncrl.runtime.names.etcd.leases import USUAL, LeaseIntervals
from asyncrl.runtime.names.etcd.resolver import EtcdNameResolver, open_name_resolver
from asyncrl.runtime.names.etcd.store import EtcdStore, KeyRange, WatchStream, below
from asyncrl.runtime.names.interface import Lease, LeaseNotFound, NameResolver, NameResolveTimeout
from tests.support.etcd_server import EtcdServer

pytestmark = pytest.mark.timeout(120)
NOT_A_HANG_S = 12.0  # gRPC itself gives up a frozen server after 15 s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    path = tmp_path_factory.mktemp("etcd")
    with EtcdServer(path / "data", path / "etcd.log", extra_args=["--unsafe-no-fsync"]) as server:
        yield server


@pytest.fixture
def open_etcd(server: EtcdServer) -> Iterator[OpenSession]:
    """Sessions with a long session timeout. intervals: how often they check their leases."""
    with ExitStack() as opened:

        def open_one(intervals: LeaseIntervals = USUAL) -> NameResolver:
            return opened.enter_context(EtcdNameResolver([server.endpoint], LIMIT_S, intervals=intervals))

        yield open_one


@contextmanager
def bare_store(server: EtcdServer) -> Iterator[EtcdStore]:
    """The server's data, read without a session."""
    store = EtcdStore([server.endpoint], LIMIT_S, threading.Event(), UNRESTRICTED)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def root() -> str:
    return f"test/{uuid.uuid4().hex}"


def lose_data(server: EtcdServer) -> None:
    server.kill()
    shutil.rmtree(server.data_dir)
    server.start()


def test_everything_survives_a_killed_server(server: EtcdServer, open_etcd: OpenSession, root: str) -> None:
    holder, user, other = open_etcd(), open_etcd(), open_etcd()
    lease = holder.grant_lease(5)
    holder.add(f"{root}/held", "1", lease=lease.id)
    user.add(f"{root}/used", "2", lease=lease.id)
    user.add(f"{root}/plain", "3")
    tree, key = Recorder(), Recorder()
    user.watch(root, tree, subtree=True)
    user.watch(f"{root}/later", key)
    with ThreadPoolExecutor(2) as pool:
        wait = pool.submit(user.wait, f"{root}/later", LIMIT_S)
        server.kill()
        change = pool.submit(server.start)
        other.add(f"{root}/later", "4")  # waits for the server to come back
        other.delete(f"{root}/plain")
        change.result(LIMIT_S)
        assert wait.result() == "4"
    state = {f"{root}/held": "1", f"{root}/used": "2", f"{root}/later": "4"}
    tree.wait_for_state(state)
    key.wait_for(put(f"{root}/later", "4"))
    other.add(f"{root}/after", "5")  # the streams work again
    tree.wait_for_state(state | {f"{root}/after": "5"})
    assert lives(holder, lease)
    lease.revoke()
    tree.wait_for_state({f"{root}/later": "4", f"{root}/after": "5"})
    assert gone(f"{root}/used") == tree.events[-1] or gone(f"{root}/held") == tree.events[-1]


def test_leases_entries_and_watches_come_back_from_lost_data(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_watch, "SETTLE_S", 15.0)  # long, for a busy machine
    holder, user, other = open_etcd(), open_etcd(), open_etcd()
    lease = holder.grant_lease(30)  # far longer than the test: the session must detect the loss, not wait for it
    holder.add(f"{root}/held", "1", lease=lease.id)
    holder.add(f"{root}/deleted", "1", lease=lease.id)
    holder.add(f"{root}/swapped", "1", lease=lease.id)
    user.add(f"{root}/used", "2", lease=lease.id)
    user.add(f"{root}/freed", "2", lease=lease.id)
    user.add(f"{root}/freed", "2", replace=True)
    holder.delete(f"{root}/deleted")
    assert holder.compare_and_swap(f"{root}/swapped", "1", "9")
    recorder = Recorder()
    other.watch(root, recorder, subtree=True)
    restored = {f"{root}/freed": "2", f"{root}/held": "1", f"{root}/swapped": "9", f"{root}/used": "2"}
    assert recorder.state == restored
    told = list(recorder.events)
    for value in ("second", "third"):
        lose_data(server)
        holder.add(f"{root}/new", value, replace=True, lease=lease.id)  # at once: it need not wait for the lease keeper
        told.append(put(f"{root}/new", value))
        recorder.wait_for(*told)  # restored entries cause no event, and neither does their loss
        for key, expected in restored.items():
            assert other.wait(key, LIMIT_S) == expected
        assert other.get_subtree(root) == dict(sorted((restored | {f"{root}/new": value}).items()))
    assert lives(holder, lease)
    lease.revoke()
    recorder.wait_for_state({f"{root}/freed": "2"})


def test_somebody_elses_lease_that_comes_back(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_keys, looks_in_vain = EtcdStore.lease_keys, threading.Semaphore(0)

    def look(store: EtcdStore, lease_id: int) -> set[bytes] | None:
        keys = lease_keys(store, lease_id)
        if keys is None:
            looks_in_vain.release()
        return keys

    monkeypatch.setattr(EtcdStore, "lease_keys", look)
    holder, user = open_etcd(), open_etcd(LeaseIntervals(check_s=0.1))
    lease = holder.grant_lease(30)
    user.add(f"{root}/a", "1", lease=lease.id)
    user.add(f"{root}/stolen", "1", lease=lease.id)
    recorder = Recorder()
    holder.watch(f"{root}/a", recorder)
    lease.revoke()
    recorder.wait_for(put(f"{root}/a", "1"), gone(f"{root}/a"))
    holder.add(f"{root}/stolen", "2")
    for _ in range(2):  # the session has acted on a check before it makes the next one
        assert looks_in_vain.acquire(timeout=LIMIT_S), "the session has not looked at the lease that is gone"
    assert lives(holder, holder.grant_lease(30, lease_id=lease.id))
    assert holder.wait(f"{root}/a", LIMIT_S) == "1"
    assert holder.get(f"{root}/stolen") == "2"


def test_a_session_that_was_frozen_takes_its_lease_again(server: EtcdServer, root: str) -> None:
    program = (
        "import sys\n"
        "from asyncrl.runtime.names.etcd.resolver import EtcdNameResolver\n"
        "names = EtcdNameResolver([sys.argv[1]])\n"
        "names.add(sys.argv[2], 'here', lease=names.grant_lease(1).id)\n"
        "names.watch('test/x', print)\n"
        "sys.stdin.read()\n"  # the process exits without closing: watches and leases must not delay it
    )
    child = subprocess.Popen([sys.executable, "-c", program, server.endpoint, f"{root}/a"], stdin=subprocess.PIPE)
    try:
        with open_name_resolver(patient(NameResolveConfig(endpoints=[server.endpoint]))) as names:
            recorder = Recorder()
            names.watch(f"{root}/a", recorder)
            recorder.wait_for_turns(f"{root}/a", "here", 1)
            child.send_signal(signal.SIGSTOP)
            recorder.wait_for_turns(f"{root}/a", "here", 2)
            child.send_signal(signal.SIGCONT)
            recorder.wait_for_turns(f"{root}/a", "here", 3)
        child.communicate(timeout=LIMIT_S)
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate(timeout=LIMIT_S)


def test_adds_are_done_once_through_an_outage(server: EtcdServer, open_etcd: OpenSession, root: str) -> None:
    names = open_etcd()
    under_way, stop = threading.Event(), threading.Event()

    def add(thread_index: int) -> int:
        index = 0
        while not stop.is_set():
            names.add(f"{root}/{thread_index}/{index}", "x")  # NameEntryExists would mean that a put was sent twice
            index += 1
            if index == 20:
                under_way.set()
        return index

    with ThreadPoolExecutor(3) as pool:
        added = [pool.submit(add, index) for index in range(3)]
        try:
            assert under_way.wait(LIMIT_S)
            for _ in range(3):
                server.kill()
                server.start()
        finally:
            stop.set()
        num_added = sum(future.result(LIMIT_S) for future in added)
    assert len(names.get_subtree(root)) == num_added


def wait_until_frozen(pid: int) -> None:
    """Wait until all threads of a process stand still after SIGSTOP. Each stops when it is next scheduled, so on a busy machine one
    of them may still answer for a moment."""
    tasks = Path(f"/proc/{pid}/task")

    def runs(task: Path) -> bool:
        try:
            return (task / "stat").read_text().rpartition(")")[2].split()[0] != "T"
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended: list the threads again
            return True

    deadline = time.monotonic() + LIMIT_S
    while any(runs(task) for task in tasks.iterdir()):
        assert time.monotonic() < deadline, f"{LIMIT_S:g} s went by before process {pid} stood still"
        time.sleep(0.01)


def test_a_frozen_server_is_an_error_not_a_hang(server: EtcdServer, open_etcd: OpenSession, root: str) -> None:
    watching = open_etcd()
    recorder = Recorder()
    watching.watch(f"{root}/a", recorder)
    names = open_name_resolver(NameResolveConfig(endpoints=[server.endpoint], timeout_s=0.3))
    names.grant_lease(5)
    operations: list[Callable[[], object]] = [
        lambda: names.add(f"{root}/a", "1"),
        lambda: names.get(f"{root}/a"),
        lambda: names.grant_lease(5),
        lambda: names.watch(f"{root}/a", recorder),
        lambda: names.wait(f"{root}/a", 0.3),
        lambda: open_name_resolver(NameResolveConfig(endpoints=[server.endpoint], timeout_s=0.3)),
    ]
    os.kill(server.pid, signal.SIGSTOP)
    wait_until_frozen(server.pid)
    try:
        for operation in operations:
            before = time.monotonic()
            with pytest.raises(TimeoutError, match=r"within 0.3 s.*Deadline Exceeded"):
                operation()
            assert time.monotonic() - before < NOT_A_HANG_S
        before = time.monotonic()
        names.close()
        assert time.monotonic() - before < NOT_A_HANG_S
    finally:
        os.kill(server.pid, signal.SIGCONT)
    watching.add(f"{root}/a", "2", replace=True)
    recorder.wait_for_state({f"{root}/a": "2"})


# ----------------------------------------------------------------------------------------------------- restoring entries


def test_a_lease_that_expires_under_a_frozen_server(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is granted again, and all sessions' entries return, before any watcher receives a deletion."""
    monkeypatch.setattr(etcd_watch, "SETTLE_S", LIMIT_S)  # long, for a busy machine
    open_watch, streams = EtcdStore.open_watch, []

    def note(store: EtcdStore, ranges: Sequence[KeyRange], *arguments: Any) -> WatchStream:
        stream = open_watch(store, ranges, *arguments)
        if list(ranges) == [below(root)]:
            streams.append(stream)
        return stream

    monkeypatch.setattr(EtcdStore, "open_watch", note)
    holder, user, other = open_etcd(), open_etcd(), open_etcd()
    lease = holder.grant_lease(10)
    holder.add(f"{root}/held", "1", lease=lease.id)
    user.add(f"{root}/used", "2", lease=lease.id)
    recorder = Recorder()
    other.watch(root, recorder, subtree=True)
    told = list(recorder.events)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        time.sleep(12.0)  # the lease has expired by then
        wait_until(lambda: any(stream.broken for stream in streams), "its stream is given up")  # within 15 s
    finally:
        os.kill(server.pid, signal.SIGCONT)
    watching = open_etcd()
    for key in ("held", "used"):
        assert watching.wait(f"{root}/{key}", LIMIT_S)
    other.add(f"{root}/last", "3")
    recorder.wait_for(*told, put(f"{root}/last", "3"))


def test_somebody_elses_lease_that_is_back_before_anybody_looked(
    server: EtcdServer, open_etcd: OpenSession, root: str
) -> None:
    # The session makes no check during the test: etcd must notify it of the lost lease
    holder, user = open_etcd(), open_etcd(LeaseIntervals(check_s=1000.0))
    lease = holder.grant_lease(30)
    user.add(f"{root}/a", "1", lease=lease.id)
    deleted = Recorder()
    holder.watch(f"{root}/a", deleted)
    with bare_store(server) as store:
        wait_until(lambda: has_mark(store, lease.id), "the mark hangs on the lease")
    lease.revoke()
    deleted.wait_for(put(f"{root}/a", "1"), gone(f"{root}/a"))
    holder.grant_lease(30, lease_id=lease.id)
    assert holder.wait(f"{root}/a", LIMIT_S) == "1"


def test_a_lease_that_is_lost_and_back_while_entries_are_put_again(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session puts its entries once more. It does not mistake the entries under the lost lease for current ones."""
    holder, user = open_etcd(), open_etcd(LeaseIntervals(check_s=0.05))
    lease = holder.grant_lease(30)
    create, lost = EtcdStore.create, threading.Event()

    def create_and_lose(store: EtcdStore, key: str, value: str, lease_id: int | None, again: bool = False) -> None:
        create(store, key, value, lease_id, again)
        if again and not lost.is_set():
            lease.revoke()
            holder.grant_lease(30, lease_id=lease.id)
            lost.set()

    monkeypatch.setattr(EtcdStore, "create", create_and_lose)
    user.add(f"{root}/a", "1", lease=lease.id)
    assert lost.wait(LIMIT_S)
    assert holder.wait(f"{root}/a", LIMIT_S) == "1"


def test_what_somebody_else_deletes_stays_deleted(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, marked = EtcdStore.create, threading.Event()

    def create_and_tell(store: EtcdStore, key: str, value: str, lease_id: int | None, again: bool = False) -> None:
        create(store, key, value, lease_id, again)
        if again:
            marked.set()

    monkeypatch.setattr(EtcdStore, "create", create_and_tell)
    holder, user = open_etcd(), open_etcd(LeaseIntervals(check_s=0.05))
    lease = holder.grant_lease(30)
    user.add(f"{root}/a", "1", lease=lease.id)
    assert marked.wait(LIMIT_S)
    assert holder.delete(f"{root}/a")
    time.sleep(0.5)  # many checks
    assert holder.get_subtree(root) == {}


def has_mark(store: EtcdStore, lease_id: int) -> bool:
    return any(key.startswith(b"asyncrl\0session/") for key in store.lease_keys(lease_id) or ())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


def test_an_entry_of_somebody_who_is_gone_is_looked_after(
    server: EtcdServer, open_etcd: OpenSession, root: str
) -> None:
    with open_name_resolver(patient(NameResolveConfig(endpoints=[server.endpoint]))) as visitor:
        visitor.add(f"{root}/wish", "2")
    resident, other = open_etcd(), open_etcd()
    resident.adopt(f"{root}/wish", "2")
    lose_data(server)
    assert other.wait(f"{root}/wish", LIMIT_S) == "2"


def test_deletes_of_an_outage_are_told_once_they_are_certain(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watcher receives a deletion only when the key stays away after the outage: a process that watches a server's address must
    not drop it because etcd was down."""
    monkeypatch.setattr(etcd_watch, "SETTLE_S", 10.0)  # long, for a busy machine
    stays, other = open_etcd(), open_etcd()
    leaves = open_name_resolver(patient(NameResolveConfig(endpoints=[server.endpoint])))
    stays.add(f"{root}/stays", "1", lease=stays.grant_lease(30).id)
    leaves.add(f"{root}/leaves", "1", lease=leaves.grant_lease(30).id)
    recorder = Recorder()
    other.watch(root, recorder, subtree=True)
    told = list(recorder.events)
    server.kill()
    leaves.close()  # stands for a process that dies during the outage
    shutil.rmtree(server.data_dir)
    server.start()
    recorder.wait_for(*told, gone(f"{root}/leaves"))
    assert other.get_subtree(root) == {f"{root}/stays": "1"}


def test_a_watch_whose_changes_were_compacted_reads_anew(
    server: EtcdServer, open_etcd: OpenSession, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, other = open_etcd(), open_etcd()
    other.add(f"{root}/a", "1")
    read, api = EtcdStore.read, load_api()

    def read_before_a_compaction(store: EtcdStore, *arguments: Any) -> Any:
        result = read(store, *arguments)
        monkeypatch.setattr(EtcdStore, "read", read)
        for value in ("2", "3"):
            other.add(f"{root}/a", value, replace=True)
        request = api.rpc.CompactionRequest(revision=read(store, (b"x", b""), "revision")[1])
        with api.grpc.insecure_channel(server.endpoint) as channel:
            api.rpc.KVStub(channel).Compact(request, timeout=LIMIT_S)
        return result

    monkeypatch.setattr(EtcdStore, "read", read_before_a_compaction)
    recorder = Recorder()
    watching.watch(f"{root}/a", recorder)
    recorder.wait_for(put(f"{root}/a", "1"), put(f"{root}/a", "3"))
    other.add(f"{root}/a", "4", replace=True)
    recorder.wait_for(put(f"{root}/a", "1"), put(f"{root}/a", "3"), put(f"{root}/a", "4"))


def test_starting_in_an_outage(server: EtcdServer, root: str) -> None:
    """A process that starts during the outage opens its session, watches, and publishes under a lease that is not yet restored."""
    config = NameResolveConfig(endpoints=[server.endpoint], timeout_s=0.3)
    recorder = Recorder()

    def start() -> None:
        with open_name_resolver(config, limit_s=LIMIT_S) as names:
            names.watch(root, recorder, subtree=True, limit_s=LIMIT_S)
            names.publish(f"{root}/a", "1", lease=77, limit_s=LIMIT_S)
            recorder.wait_for_state({f"{root}/a": "1"})  # the put may be repeated: its answer may be late

    server.kill()
    try:
        with pytest.raises(NameResolveTimeout, match=r"did not answer the first request within 0\.3 s"):
            open_name_resolver(config)
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(start)
            time.sleep(1.0)
            assert not started.done()
            server.start()
            with open_name_resolver(patient(config)) as holder:
                with pytest.raises(LeaseNotFound):
                    holder.publish(f"{root}/b", "1", lease=77, limit_s=0.3)
                holder.grant_lease(30, lease_id=77)
                started.result(2 * LIMIT_S)
    finally:
        server.start()


# ------------------------------------------------------------------------------------------------------- a run's own etcd


@contextmanager
def private_service(run_dir: Path, **runtime: Any) -> Iterator[tuple[NameService, list[str]]]:
    """The private etcd as the launcher of one machine runs it, and the notices that a person sees."""
    notices: list[str] = []
    config = ExperimentConfig(
        experiment="e",
        trial="t",
        runtime=RuntimeConfig(**runtime),
        name_resolve=patient(NameResolveConfig()),
        network=NetworkConfig(socket_dir=unix_sockets.make_folder(run_dir)),
    )
    try:
        service = NameService.open(config, run_dir, run_dir / "etcd.log", notices.append)
        try:
            yield service, notices
        finally:
            service.close()
    finally:
        unix_sockets.remove_folder(run_dir)


def etcd_of(run_dir: Path) -> psutil.Process:
    """Return the etcd process that this process started on the run's data folder."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(part.startswith(f"{run_dir}/etcd/") for part in child.cmdline()):
                return child
    raise AssertionError(f"no etcd of {run_dir} runs")


def wait_for_restart(service: NameService, notices: list[str], number: int = 1) -> None:
    def runs_again() -> bool:
        service.turn()
        return notices.count("etcd runs again") == number

    wait_until_long(runs_again, f"etcd runs again: {notices}")


def wait_until_long(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.05)


def test_a_private_etcd_that_freezes_for_good_is_replaced(tmp_path: Path) -> None:
    """A new server on the same data replaces the frozen one. Watchers see the run's keys as present all the time."""
    names = Names("e", "t")
    with private_service(tmp_path) as (service, notices):
        lease = service.grant_lease()
        with open_name_resolver(patient(NameResolveConfig(endpoints=service.endpoints))) as worker:
            worker.add(names.gserver_manager(), "http://here", lease=lease.id)
            recorder = Recorder()
            worker.watch(names.root, recorder, subtree=True)
            frozen = etcd_of(tmp_path)
            frozen.suspend()
            wait_for_restart(service, notices)
            assert not frozen.is_running()
            assert "has not answered for 12 s and was killed; it is started again on its data" in notices[0]
            worker.publish(names.model_version("actor"), "a0001-v00000003", lease=lease.id, limit_s=LIMIT_S)
            recorder.wait_for(
                put(names.gserver_manager(), "http://here"), put(names.model_version("actor"), "a0001-v00000003")
            )


@pytest.mark.parametrize("harm", ["gone", "torn"])
def test_a_private_etcd_that_loses_its_data_begins_anew(tmp_path: Path, harm: str) -> None:
    """The launcher's leases, statuses and all entries published by workers are restored."""
    names = Names("e", "t")
    with private_service(tmp_path) as (service, notices):
        lease = service.grant_lease()
        status = WorkerStatus(worker="master/0", pid=1, attempt=1, state="running", time=1.0, progress=1)
        service.publish({lease.id: status})
        with open_name_resolver(patient(NameResolveConfig(endpoints=service.endpoints))) as worker:
            worker.add(names.gserver_manager(), "http://here", lease=lease.id)
            assert worker.wait(names.status("master/0"), LIMIT_S)
            data, etcd = tmp_path / "etcd", etcd_of(tmp_path)
            etcd.suspend()  # so that it cannot die before its data is gone
            wait_until_frozen(etcd.pid)
            if harm == "gone":
                shutil.rmtree(data)
            else:
                for file in data.rglob("*.wal"):
                    file.write_bytes(b"torn" * 1000)
            etcd.kill()
            wait_for_restart(service, notices)
            without = [notice for notice in notices if "does not start on its data, so it is started without" in notice]
            assert len(without) == (harm == "torn")
            assert worker.wait(names.gserver_manager(), LIMIT_S) == "http://here"
            assert worker.wait(names.status("master/0"), LIMIT_S)


def test_a_private_etcd_that_ends_again_and_again_ends_the_run(tmp_path: Path) -> None:
    with private_service(tmp_path, max_restarts=0) as (service, notices):  # limits restarts of workers only
        for number in (1, 2, 3):
            etcd_of(tmp_path).kill()
            wait_for_restart(service, notices, number)
        etcd_of(tmp_path).kill()
        with pytest.raises(LaunchError, match=r"etcd has ended, and had been started again 3 times within the hour"):
            wait_until_long(lambda: bool(service.turn()), "the end is told")


def test_leases_of_the_dead_are_revoked_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All these leases are revoked, not only the first one tried. Otherwise the session would keep the others alive forever."""
    with EtcdServer(tmp_path / "data", tmp_path / "log", extra_args=["--unsafe-no-fsync"]) as server:
        config = ExperimentConfig(
            experiment="e", trial="t", name_resolve=NameResolveConfig(endpoints=[server.endpoint], timeout_s=3.0)
        )
        failed = threading.Event()

        def revoke(lease: Lease) -> None:
            try:
                revoke_it(lease)
            except NameResolveTimeout:
                failed.set()
                raise

        revoke_it = Lease.revoke
        monkeypatch.setattr(Lease, "revoke", revoke)
        service = NameService.open(config, tmp_path, tmp_path / "etcd.log", print)
        try:
            leases = [service.grant_lease() for _ in range(3)]
            server.kill()
            for lease in leases:
                service.revoke(lease)
            assert failed.wait(LIMIT_S), "no revocation has failed"
            server.start()
            with bare_store(server) as store:
                wait_until(lambda: all(store.lease_keys(lease.id) is None for lease in leases), "all are revoked")
        finally:
            service.close()
