"""A user's etcd of three servers (`name_resolve.endpoints`): a session survives the loss of any one of them."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from name_sessions import LIMIT_S, Recorder, Refreshes, gone, lives, patient, put

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.etcd.leases import LeaseIntervals
from asyncrl.runtime.names.etcd.resolver import EtcdNameResolver, open_name_resolver
from asyncrl.runtime.names.etcd.server import find_etcd
from asyncrl.runtime.ports import free_ports

pytestmark = pytest.mark.timeout(240)


class Cluster:
    def __init__(self, folder: Path) -> None:
        ports = free_ports("127.0.0.1", 6)
        clients = [f"http://127.0.0.1:{port}" for port in ports[:3]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[3:]]
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:3]]
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._commands = []
        for index, (client, peer) in enumerate(zip(clients, peers, strict=True)):
            command = [find_etcd(), "--name", str(index), "--data-dir", str(folder / str(index)), "--unsafe-no-fsync"]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", ",".join(f"{name}={url}" for name, url in enumerate(peers))]
            self._commands.append(command)
        for index in range(3):
            self.start(index)

    def start(self, index: int) -> None:
        with (self._folder / f"{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(self._commands[index], stdout=log, stderr=log)

    def kill(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()

    def wait_for(self, index: int) -> None:
        """Wait until this server answers a client. It can answer only while a majority of the three servers runs."""
        with open_name_resolver(patient(NameResolveConfig(endpoints=[self.endpoints[index]]))):
            pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for index in range(3):
        made.kill(index)


def test_keys_live_when_a_server_is_killed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any server may be killed, including the one that the session is connected to."""
    refreshes = Refreshes(monkeypatch)
    root = f"test/{uuid.uuid4().hex}"
    often = LeaseIntervals(refresh_s=0.5)
    with (
        EtcdNameResolver(cluster.endpoints, LIMIT_S, intervals=often) as names,
        EtcdNameResolver(cluster.endpoints, LIMIT_S) as other,
    ):
        lease = names.grant_lease(30)
        recorder = Recorder()
        other.watch(root, recorder, subtree=True)
        names.add(f"{root}/held", "1", lease=lease.id)
        told = [put(f"{root}/held", "1")]
        for index in range(3):
            cluster.kill(index)
            names.add(f"{root}/without", str(index), replace=True)
            assert other.get(f"{root}/without") == str(index)
            told.append(put(f"{root}/without", str(index)))
            recorder.wait_for(*told)
            refreshes.wait_for_another(lease.id)
            assert lives(names, lease)
            cluster.start(index)
            cluster.wait_for(index)
        assert names.compare_and_swap(f"{root}/without", "2", "done")
        recorder.wait_for(*told, put(f"{root}/without", "done"))
        lease.revoke()
        recorder.wait_for(*told, put(f"{root}/without", "done"), gone(f"{root}/held"))
