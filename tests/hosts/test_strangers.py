"""A stranger in the network of a run connects to every listening socket of every process, and gets only refusals."""

import json
import signal
import sys

import pytest
from hosts_run import HostsRun

from asyncrl.testing.runs import assert_nothing_left, make_tiny_run
from tests.support import scanner
from tests.support.namespaces import Hosts
from tests.support.scanner import Listener

pytestmark = pytest.mark.timeout(400)
START_S = 200  # a busy machine imports torch on several hosts at once
SCANNER = [sys.executable, scanner.__file__]


@pytest.fixture
def run_and_stranger(hosts):
    """run_and_stranger(config, ...) starts a run on two hosts. The third host is not part of the run."""
    started = []

    def start(config, *overrides):
        started.append(HostsRun.of(Hosts(hosts[:2], ""), config, *overrides))
        return started[0], hosts[2]

    yield start
    for run in started:
        run.close()


def told(host, *words):
    done = host.run([*SCANNER, *words], limit_s=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sockets_of(host):
    """Listeners of a host by the address that a stranger would try, whatever address each is bound to."""
    listeners = [Listener(**entry) for entry in told(host)]
    return {f"{host.address}:{listener.port}": listener for listener in listeners}


def scanned(run, stranger):
    """The answers of the run's sockets, by process and address. Sockets that revealed nothing are left out."""
    sockets = {address: listener for host in run.hosts for address, listener in sockets_of(host).items()}
    processes = {listener.process.rpartition("/")[2].strip() for listener in sockets.values()}
    for kind in ("master_0", "gserver_manager_0", "generation_server_0", "model_worker_0", "rollout_worker_0"):
        assert any(kind in process for process in processes), f"{kind} listens nowhere: {processes}"
    assert any(not listener.host.startswith("127.") for listener in sockets.values())
    answers = told(stranger, *sockets)
    return {f"{sockets[address].process} at {address}": found for address, found in answers.items() if found}


def test_no_port_answers_a_stranger(run_and_stranger, tmp_path):
    run, stranger = run_and_stranger(
        make_tiny_run(tmp_path),
        "allocation=transformers.d2+d2+ref_inf:d1",
        "train.ppo.kl_coef=0.1",
        "rollout.num_workers=2",
        "train.max_steps=0",
    )
    run.launcher.wait_for_step(1, START_S)
    assert scanned(run, stranger) == {}
    assert (run.run_dir / "secrets" / "keys.json").exists()


def test_the_scanner_finds_what_answers_where_authentication_is_off(run_and_stranger, tmp_path):
    """With authentication off, the scanner finds open ports, which shows that it works. Still, no process survives the launcher."""
    run, stranger = run_and_stranger(
        make_tiny_run(tmp_path), "rollout.num_workers=1", "train.max_steps=0", "network.authenticate=off"
    )
    run.launcher.wait_for_step(1, START_S)
    found = " ".join(f"{who}: {answers}" for who, answers in scanned(run, stranger).items())
    for answer in (
        "HTTP /get_model_version: 200",
        "HTTP /server_info: 200",
        "ZeroMQ NULL: let in",
        "HTTP /version: 200",  # etcd
    ):
        assert answer in found
    assert "network.authenticate=off: any client that reaches" in run.launcher.output()

    run.launcher.signal(signal.SIGKILL, group=True)
    assert run.daemons[run.hosts[1].name].wait(60) == 1
    assert_nothing_left(run.run_dir, 60)  # on the launcher's host its reaper ensures this, with a delay
