"""Generation on hosts that cannot read the trainer's weight folder: each version is fetched once a host, also from each other, or
comes by broadcast."""

import json
import re
import sys
import time

import pytest

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.testing.runs import assert_nothing_left, make_tiny_run, train_steps
from asyncrl.testing.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(400)
LIMIT_S = 300


def hide_weights(config, hosts):
    """On these hosts a separate folder hides the weights of the run."""
    weights = run_directory(load_experiment(config)) / "weights"
    weights.mkdir(parents=True)
    for host in hosts:
        assert host.run(["mount", "-t", "tmpfs", "tmpfs", str(weights)]).returncode == 0
    return weights


@pytest.mark.parametrize("hosts", [4], indirect=True)
@pytest.mark.parametrize(
    "form", [(), pytest.param(("train.lora.rank=4",), marks=pytest.mark.release)], ids=["full", "adapter"]
)
def test_weights_reach_hosts_without_the_runs_weights(hosts, run_on_hosts, tmp_path, form):
    config = make_tiny_run(tmp_path, num_prompts=12)
    weights = hide_weights(config, hosts[1:])

    run = run_on_hosts(
        config,
        "allocation=transformers.d3+d1",
        "rollout.num_workers=1",
        "train.max_steps=0",
        f"weights.fetch_dir={tmp_path / 'memory'}",
        *form,
    )
    assert run.launcher.wait(LIMIT_S) == 0, run.launcher.output() + run.outputs()

    assert train_steps(run.run_dir)[-1]["step"] == 6
    folder = run.run_dir / "logs" / "attempt_1"
    logs = {path.stem: path.read_text() for path in folder.glob("generation_server_*.log")}
    assert len(logs) == 3
    found = {name: re.findall(r"weights (\S+) fetched from (10\.77\.0\.\d)", text) for name, text in logs.items()}
    fetched = {name: [version for version, _ in versions] for name, versions in found.items()}
    away = [name for name, versions in fetched.items() if versions]
    assert len(away) == 3, logs  # the trainer has the fourth host
    # A version may be pruned at the other host meanwhile, so not each one comes from there
    assert {host for versions in found.values() for _, host in versions} > {hosts[0].address}
    manager = (folder / "gserver_manager_0.log").read_text()
    for name in away:  # a server that started late begins with a later version than the first
        served = re.findall(rf"{'/'.join(name.rsplit('_', 1))} serves (\S+) \(", manager)
        assert served, manager
        assert set(served) <= set(fetched[name])
        assert len(fetched[name]) == len(set(fetched[name]))
    for host in hosts[1:]:  # on the other hosts, nothing was written at the path of the run's weights folder
        assert host.run(["ls", str(weights)]).stdout == ""
    assert [path for path in (tmp_path / "memory").glob("*/*")] == []  # the copies were removed when the servers ended
    told = hosts[0].run([sys.executable, "-m", "asyncrl.cli.main", "audit", str(run.run_dir), "--json"])
    assert json.loads(told.stdout)["problems"] == []
    assert_nothing_left(run.run_dir)


def test_a_private_network_carries_broadcasts_between_hosts(hosts, run_on_hosts, tmp_path):
    """What a server does not fetch comes by broadcast. It compares checksums of all bytes with those of the sender."""
    config = make_tiny_run(tmp_path)
    hide_weights(config, hosts[1:])
    run = run_on_hosts(
        config,
        "allocation=transformers.d2+d1",
        "rollout.num_workers=1",
        "train.max_steps=3",
        "manager.max_head_offpolicyness=0",  # each step needs the version before it
        "weights.transport=broadcast",
        "weights.broadcast_network=private",
        "weights.bucket_bytes=20_000",
        f"weights.fetch_dir={tmp_path / 'memory'}",
    )
    assert run.launcher.wait(LIMIT_S) == 0, run.launcher.output() + run.outputs()

    logs = {path.stem: path.read_text() for path in (run.run_dir / "logs" / "attempt_1").glob("*_?.log")}
    sent = re.findall(r"weights (\S+) broadcast to (.*) \(", logs["model_worker_0"])
    by_broadcast = []
    # A server that starts late begins with a later version than the first, or is in no broadcast
    for index in range(2):
        server = logs[f"generation_server_{index}"]
        fetched = re.findall(r"weights (\S+) fetched from 10\.77\.0\.1", server)  # so it is on another host
        verified = re.findall(r"weights (\S+) verified", server)
        assert verified[0] in fetched
        received = set(verified).difference(fetched, ["a0001-v00000003"])  # the run ends during the last broadcast
        assert received <= {version for version, servers in sent if f"generation_server/{index}" in servers}
        by_broadcast += received
    assert by_broadcast
    assert_nothing_left(run.run_dir)


@pytest.mark.release
def test_a_cable_that_is_pulled_during_a_broadcast_costs_only_its_host(hosts, run_on_hosts, tmp_path):
    """The other server gets the version by another broadcast. The server behind the cable fetches the version, or a newer one, when
    the cable is back. Broadcasts to both follow."""
    config = make_tiny_run(tmp_path)
    # About 300 buckets, so that a broadcast takes seconds
    make_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64, num_layers=24)
    hide_weights(config, hosts[1:])
    run = run_on_hosts(
        config,
        "allocation=transformers.d2+d1",
        "rollout.num_workers=1",
        "train.max_steps=8",
        "manager.max_head_offpolicyness=0",
        "weights.transport=broadcast",
        "weights.broadcast_network=private",
        "weights.bucket_bytes=1",
        f"weights.fetch_dir={tmp_path / 'memory'}",
    )
    run.launcher.wait_for_step(2, LIMIT_S)  # its version is broadcast now
    time.sleep(0.7)
    hosts[2].unplug()
    folder = run.run_dir / "logs" / "attempt_1"

    def failure():
        return re.search(
            r"broadcast of weights (\S+) to (\S+) failed: (.*)", (folder / "gserver_manager_0.log").read_text()
        )

    version, behind, why = run.launcher.wait_until(failure, "the broadcast has failed", 60).groups()
    hosts[2].plug()
    assert run.launcher.wait(LIMIT_S) == 0, run.launcher.output() + run.outputs()

    assert re.match(rf"broadcasting bucket \d+ of \d+: {behind} did not answer for", why)
    other = f"generation_server/{1 - int(behind[-1])}"
    sent = re.findall(r"weights (\S+) broadcast to (.*) \(", (folder / "model_worker_0.log").read_text())
    assert (version, other) in sent
    fetched = re.findall(r"weights (\S+) fetched from", (folder / f"{behind.replace('/', '_')}.log").read_text())
    assert any(number >= version for number in fetched)
    assert [servers for number, servers in sent if number > version][-1] == "generation_server/0, generation_server/1"
    assert train_steps(run.run_dir)[-1]["step"] == 8
    assert "is lost" not in run.launcher.output()
    assert_nothing_left(run.run_dir)
