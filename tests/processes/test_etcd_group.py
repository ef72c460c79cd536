"""A private etcd that grows over hosts and shrinks again: the parts of launcher and agents in one process, with real servers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncrl.config import ExperimentConfig, NameResolveConfig
from asyncrl.config_file import load_experiment
from asyncrl.launch import etcd_member
from asyncrl.launch.etcd_group import EtcdGroup
from asyncrl.launch.etcd_member import MEMBERS_FOLDER, EtcdMember
from asyncrl.launch.private_etcd import PrivateEtcd
from asyncrl.launch.rundir import logs_dir
from asyncrl.messages import AgentRecord, EtcdWish, HostReport
from asyncrl.runtime.certificates import make_certificate
from asyncrl.runtime.etcd_cluster import EtcdCluster
from asyncrl.runtime.etcd_server import EtcdServer
from asyncrl.runtime.name_resolve import NameResolver, open_name_resolver

pytestmark = pytest.mark.timeout(400)
LIMIT_S = 90.0
ALONE_AFTER_S = 4.0  # where it is to go on alone; elsewhere a busy machine must not look like lost hosts
CONFIG = """
experiment: etcd
fileroot: {folder}/runs
cluster: hosts
hosts: [a, b, c]
model_path: {folder}
prompts: {{path: {folder}/p.jsonl}}
rollout: {{tasks: {{default: {{reward: "r:r"}}}}}}
"""


class Bench:
    """Host `a` is the launcher's."""

    def __init__(self, folder: Path, alone_after_s: float = LIMIT_S) -> None:
        self.tls = make_certificate(folder / "secrets", "etcd", ["127.0.0.1"])
        self.notices: list[str] = []
        self.said: list[str] = []
        server = EtcdServer(folder / "etcd", folder / "etcd.log", tls=self.tls, grows=True)
        self.etcd = PrivateEtcd(server, folder / "etcd.log", 3, self.notices.append, alone_after_s=alone_after_s)
        self.etcd.start()
        self.name_resolve = NameResolveConfig(
            endpoints=[server.endpoint],
            ca_file=self.tls.ca_file,
            cert_file=self.tls.cert_file,
            key_file=self.tls.key_file,
            timeout_s=LIMIT_S,
        )
        self.run_dir = folder / "run"
        logs_dir(self.run_dir, 1).mkdir(parents=True)
        (folder / "c.yaml").write_text(CONFIG.format(folder=folder))
        config = load_experiment(folder / "c.yaml")
        self.config = replace(config, name_resolve=self.name_resolve)
        self.wish: EtcdWish | None = None
        self.group = EtcdGroup(
            self.etcd, launcher="l", own_host="a", attempt=1, put=self._take_wish, say=self.said.append
        )
        self.members: dict[str, EtcdMember] = {}
        self.agents = {"a": record("a")}
        self.names = open_name_resolver(self.name_resolve)

    def _take_wish(self, wish: EtcdWish) -> None:
        self.wish = wish
        if hasattr(self, "names"):
            self.names.use_also(wish.endpoints)

    def add(self, host: str, config: ExperimentConfig | None = None) -> EtcdMember:
        self.agents[host] = record(host)
        self.members[host] = EtcdMember(
            config or self.config,
            host=host,
            agent=f"agent-{host}",
            address="127.0.0.1",
            run_dir=self.run_dir,
            notice=self.notices.append,
        )
        return self.members[host]

    def lose(self, host: str) -> None:
        """With all that ran there, and without a word; whoever holds the agent's lease is not told yet."""
        life = self.members.pop(host)._life
        assert life is not None
        life._etcd.close(0.0)

    def turn(self) -> None:
        self.group.turn(self.agents)
        for host, member in self.members.items():
            member.turn(self.wish)
            self.group.hear(HostReport(agent=f"agent-{host}", launcher="l", etcd=member.report()))
        time.sleep(0.05)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{LIMIT_S:g} s went by before {what}: {self.said} {self.notices}"
            self.turn()

    def voters(self) -> int:
        members = EtcdCluster([self.etcd.server.endpoint], self.tls).members(LIMIT_S)
        return sum(bool(member.name) and not member.is_learner for member in members)

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / MEMBERS_FOLDER).glob("*"))

    def close(self) -> None:
        self.group.close()
        for member in self.members.values():
            member.close()
        self.names.close()
        self.etcd.close(2.0)


def record(host: str) -> AgentRecord:
    return AgentRecord(host=host, incarnation=f"agent-{host}", address="127.0.0.1", cores=1, memory_bytes=1, pid=1)


def servers_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and words[0].endswith("etcd") and str(folder) in words:
            found.append(process)
    return found


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Parametrized with the seconds without a majority after which it goes on alone."""
    monkeypatch.setattr(etcd_member, "_LEAVE_LIMIT_S", LIMIT_S / 2)  # of which etcd takes 5 s before it lets one go
    made = Bench(tmp_path, getattr(request, "param", LIMIT_S))
    yield made
    made.close()


def put_and_get(names: NameResolver, value: str) -> None:
    names.add("test/key", value, replace=True)
    assert names.get("test/key") == value


def test_three_servers_and_one_again_and_what_was_put_is_there_all_the_time(bench: Bench) -> None:
    bench.names.add("test/kept", "1", lease=bench.names.grant_lease(15).id)
    bench.turn()
    assert bench.group.is_settled  # nobody to ask: the launcher does not wait
    bench.add("b")
    bench.add("c")
    bench.until(lambda: len(bench.group.endpoints) == 3, "both have said where they will listen")
    bench.until(lambda: bool(bench.said), "both have joined")
    assert bench.said == ["etcd runs on a and b, c: any one of these hosts may be lost"]
    assert bench.voters() == 3

    (process,) = servers_in(bench.run_dir / MEMBERS_FOLDER / "b")
    os.kill(process.pid, signal.SIGKILL)
    put_and_get(bench.names, "without b")
    bench.until(lambda: "etcd runs again" in bench.notices, "it was started again on its data")
    assert bench.voters() == 3

    bench.lose("b")
    put_and_get(bench.names, "without b for good")
    del bench.agents["b"]
    bench.until(lambda: bench.said[1:] == ["etcd runs on a only"] and bench.voters() == 1, "a is alone")
    bench.until(lambda: bench.members["c"].report() is None, "c has left")
    assert bench.folders() == ["b"]
    assert not servers_in(bench.run_dir / MEMBERS_FOLDER / "c")
    put_and_get(bench.names, "alone")

    bench.add("b")  # the host is back
    bench.until(lambda: len(bench.said) == 3 and bench.voters() == 3, "it grows again")
    for host in ("b", "c"):
        bench.members.pop(host).close()
    assert bench.voters() == 1
    assert bench.folders() == []
    assert bench.names.get("test/kept") == "1"
    assert not any("anew" in notice or "alone" in notice for notice in bench.notices), bench.notices


@pytest.mark.parametrize("bench", [ALONE_AFTER_S], indirect=True)
def test_with_both_others_gone_at_once_it_goes_on_alone(bench: Bench) -> None:
    bench.names.add("test/kept", "1", lease=bench.names.grant_lease(30).id)
    bench.add("b")
    bench.add("c")
    bench.until(lambda: bool(bench.said), "both have joined")
    cluster = bench.etcd.server.name
    for host in ("b", "c"):
        bench.lose(host)
    bench.until(lambda: bench.etcd.server.name != cluster, "it begins anew")
    assert any("it goes on alone" in notice for notice in bench.notices)
    bench.agents = {"a": record("a")}

    def is_back() -> bool:
        return "test/kept" in bench.names.get_subtree("test")

    bench.until(is_back, "its session has put again what it had put")
    assert bench.voters() == 1
    put_and_get(bench.names, "alone")
    bench.add("b")
    bench.add("c")
    bench.until(lambda: bench.said[-1].endswith("may be lost") and bench.voters() == 3, "others join the new one")


def test_a_host_that_cannot_read_the_certificate_has_none_and_nobody_waits(bench: Bench, tmp_path: Path) -> None:
    bench.add("b")
    key = tmp_path / "elsewhere.key"  # of a folder that this host does not see
    elsewhere = replace(bench.name_resolve, key_file=str(key))
    member = bench.add("c", replace(bench.config, name_resolve=elsewhere))
    bench.until(lambda: bench.group.is_settled and bench.voters() == 1 and not bench.folders(), "a is alone")
    report = member.report()
    assert report is None or report.state == "failed"
    assert any(f"name_resolve.key_file={str(key)!r} cannot be read" in notice for notice in bench.notices)
    put_and_get(bench.names, "alone")
    bench.add("d")
    bench.until(lambda: bool(bench.said), "another host does instead")
    assert bench.said == ["etcd runs on a and b, d: any one of these hosts may be lost"]
