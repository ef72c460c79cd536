"""A private etcd of several servers: they join one that runs, and a run's keys outlive any one of them. Real servers, with TLS."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from name_sessions import LIMIT_S, Recorder, Refreshes, gone, patient, put

from asyncrl.config import NameResolveConfig
from asyncrl.runtime import etcd_cluster, name_resolve
from asyncrl.runtime.certificates import CertificateError, make_certificate
from asyncrl.runtime.etcd import EtcdNameResolver
from asyncrl.runtime.etcd_cluster import EtcdCluster, EtcdTls, Member
from asyncrl.runtime.etcd_server import EtcdServer, EtcdServerError
from asyncrl.runtime.name_resolve import NameResolveTimeout, open_name_resolver

pytestmark = pytest.mark.timeout(240)
FAST = ["--unsafe-no-fsync"]
START_LIMIT_S = 90.0  # etcd changes no cluster whose members have not all been connected for 5 s


@dataclass
class Three:
    servers: list[EtcdServer]
    tls: EtcdTls

    @property
    def config(self) -> NameResolveConfig:
        return NameResolveConfig(
            endpoints=[server.endpoint for server in self.servers],
            ca_file=self.tls.ca_file,
            cert_file=self.tls.cert_file,
            key_file=self.tls.key_file,
            timeout_s=LIMIT_S,
        )

    def members(self, index: int = 0) -> list[Member]:
        return EtcdCluster([self.servers[index].endpoint], self.tls).members(LIMIT_S)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """As the launcher has them: one that runs, and two that join it one after the other."""
    folder = tmp_path_factory.mktemp("etcd")
    tls = make_certificate(folder / "secrets", "etcd", ["127.0.0.1"])
    with ExitStack() as stack:
        servers: list[EtcdServer] = []
        for index in range(3):
            server = EtcdServer(
                folder / str(index),
                folder / f"{index}.log",
                extra_args=FAST,
                tls=tls,
                join=[other.endpoint for other in servers],
                grows=True,
            )
            stack.enter_context(server)
            servers.append(server)
        for server in servers:
            server.others = [other.endpoint for other in servers if other is not server]
        yield Three(servers, tls)


@pytest.fixture
def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked in vain is to say why, however long a busy machine takes for it. Not as long as all may take: what is asked
    too soon after a change of members is never answered, and has to be asked again."""
    monkeypatch.setattr(etcd_cluster, "_ASK_LIMIT_S", LIMIT_S / 6)


@pytest.fixture
def root() -> str:
    return f"test/{uuid.uuid4().hex}"


def test_servers_that_join_have_a_vote(three: Three) -> None:
    members = three.members()
    assert [(bool(member.name), member.is_learner) for member in members] == [(True, False)] * 3


def test_keys_live_when_a_server_is_killed(three: Three, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, the one that the session talks to and the first included; and for good."""
    monkeypatch.setattr(name_resolve, "_LONGEST_REFRESH_S", 0.5)
    refreshes = Refreshes(monkeypatch)
    config = three.config
    with (
        open_name_resolver(replace(config, endpoints=config.endpoints[:1])) as names,
        open_name_resolver(config) as other,
    ):
        assert isinstance(names, EtcdNameResolver)
        names.use_also(config.endpoints)  # as the launcher, whose session is older than the second server
        lease = names.grant_lease(30)
        recorder = Recorder()
        other.watch(root, recorder, subtree=True)
        names.add(f"{root}/held", "1", lease=lease.id)
        told = [put(f"{root}/held", "1")]
        for index, server in enumerate(three.servers):
            server.kill()
            names.add(f"{root}/without", str(index), replace=True)
            assert other.get(f"{root}/without") == str(index)
            told.append(put(f"{root}/without", str(index)))
            recorder.wait_for(*told)
            refreshes.wait_for_another(lease.id)
            assert lease.alive
            server.start(START_LIMIT_S)
        assert names.compare_and_swap(f"{root}/without", "2", "done")
        recorder.wait_for(*told, put(f"{root}/without", "done"))
        lease.revoke()
        recorder.wait_for(*told, put(f"{root}/without", "done"), gone(f"{root}/held"))


@pytest.mark.parametrize("index", [0, 2])
def test_a_server_that_has_lost_its_data_joins_again(three: Three, root: str, index: int) -> None:
    """The first one too, which would otherwise begin a cluster of its own beside the others."""
    server = three.servers[index]
    with open_name_resolver(three.config) as names:
        names.add(f"{root}/a", "1")
        server.kill()
        shutil.rmtree(server.data_dir)
        server.start(START_LIMIT_S)
        members = three.members(index)
        assert [member.is_learner for member in members] == [False] * 3
        with open_name_resolver(replace(three.config, endpoints=[server.endpoint])) as at_it:
            assert at_it.get(f"{root}/a") == "1"


@pytest.mark.usefixtures("slow_answers")
def test_strangers_neither_read_nor_join(three: Three, tmp_path: Path) -> None:
    strange = make_certificate(tmp_path, "strange", ["127.0.0.1"])
    config = replace(three.config, timeout_s=1.0)
    for stranger in (
        replace(config, ca_file="", cert_file="", key_file=""),
        replace(config, cert_file=strange.cert_file, key_file=strange.key_file),
        replace(config, cert_file="", key_file=""),
    ):
        with pytest.raises(NameResolveTimeout):
            open_name_resolver(stranger)
    joins = EtcdServer(
        tmp_path / "data", tmp_path / "log", extra_args=FAST, tls=strange, join=[three.servers[0].endpoint]
    )
    with pytest.raises(EtcdServerError, match=r"cannot join .*certificate verify failed"):
        joins.start(2.0)
    assert len(three.members()) == 3


@pytest.mark.usefixtures("slow_answers")
def test_a_server_alone_waits_for_nobody_who_does_not_come(tmp_path: Path, root: str) -> None:
    """Somebody is taken in and never starts: a learner has no vote, and the next one takes its place."""
    with EtcdServer(tmp_path / "first", tmp_path / "log", extra_args=FAST, grows=True) as first:
        cluster = EtcdCluster([first.endpoint])
        never, _ = cluster.add_learner("never", "http://127.0.0.1:1", LIMIT_S)
        with open_name_resolver(patient(NameResolveConfig(endpoints=[first.endpoint]))) as names:
            names.add(f"{root}/a", "1")
            assert names.get(f"{root}/a") == "1"
        assert not cluster.promote(never)
        second = EtcdServer(tmp_path / "second", tmp_path / "log2", extra_args=FAST, join=[first.endpoint])
        with pytest.raises(EtcdServerError, match="too many learner"):
            second.start(1.0)
        cluster.remove(never, LIMIT_S)
        cluster.remove(never, LIMIT_S)
        with second, open_name_resolver(patient(NameResolveConfig(endpoints=[second.endpoint]))) as names:
            assert names.get(f"{root}/a") == "1"


def test_without_openssl_there_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CertificateError, match=r"no program openssl .*; install it .*name_resolve\.endpoints"):
        make_certificate(tmp_path / "secrets", "etcd", [])
