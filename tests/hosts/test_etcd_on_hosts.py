"""Three hosts have a private etcd of three servers, and a run outlives any one of them."""

import contextlib
import json
import os
import re
import signal
import sys
import time

import psutil
import pytest

from asyncrl.launch.etcd_member import MEMBERS_FOLDER
from asyncrl.launch.program import load_process_config
from asyncrl.launch.rundir import configs_dir, read_record
from asyncrl.testing.runs import assert_nothing_left, make_tiny_run, processes_of, train_steps

pytestmark = pytest.mark.timeout(400)
START_S = 200  # a busy machine imports torch on three hosts at once
VOTERS = """
import json, sys
from asyncrl.runtime.etcd_cluster import EtcdCluster, EtcdTls
tls = EtcdTls(*sys.argv[2:])
print(json.dumps([member.peer_urls for member in EtcdCluster([sys.argv[1]], tls).members() if not member.is_learner]))
"""


def voters(run):
    """Where the servers with a vote listen, as the launcher's says; what went wrong where it does not."""
    at = read_record(run.run_dir).names_at
    words = [sys.executable, "-c", VOTERS, at.endpoints[0], at.cert_file, at.key_file, at.ca_file]
    told = run.hosts[0].run(words)
    if told.returncode:
        return told.stderr  # one that is electing, say, does not answer
    return sorted(re.sub(r"https://|:\d+", "", url) for (url,) in json.loads(told.stdout))


def etcd_of(run, host):
    """The process of the etcd that an agent has."""
    folder = str(run.run_dir / MEMBERS_FOLDER / host.address)
    for process in processes_of(run.run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was found
            words = process.cmdline()
            if words and words[0].endswith("etcd") and folder in words:
                return process
    raise AssertionError(f"no etcd of {host.address}")


def steps_of(run):
    return train_steps(run.run_dir)[-1]["step"]


def stop(run):
    told = run.hosts[0].run([sys.executable, "-m", "asyncrl.launch.cli", "stop", str(run.run_dir)], limit_s=120)
    assert told.returncode == 0, told.stdout + told.stderr
    assert run.launcher.wait(60) in (0, 128 + signal.SIGTERM), run.launcher.output() + run.outputs()


def test_a_run_outlives_any_of_its_three_etcd_servers(run_on_hosts, tmp_path):
    config = make_tiny_run(tmp_path)
    run = run_on_hosts(
        config,
        "allocation=transformers.d1+d1",
        "rollout.num_workers=1",
        "train.max_steps=0",
        "network.host_lost_after_s=8",
    )
    first, second, third = (host.address for host in run.hosts)
    run.launcher.wait_for_output(f"etcd runs on {first} and {second}, {third}", START_S)
    run.launcher.wait_for_step(1, START_S)
    assert voters(run) == [first, second, third]
    endpoints = read_record(run.run_dir).endpoints
    assert [endpoint.partition(":")[0] for endpoint in endpoints] == [first, second, third]
    for file in configs_dir(run.run_dir, 1).glob("*_[0-9].yaml"):
        assert load_process_config(file).worker.name_resolve.endpoints == endpoints, file

    killed = etcd_of(run, run.hosts[1])
    os.kill(killed.pid, signal.SIGKILL)  # its agent starts it again
    run.launcher.wait_for_output(f"{second}: etcd runs again", 60)
    run.launcher.wait_for_step(steps_of(run) + 2, START_S)
    assert voters(run) == [first, second, third]

    run.hosts[2].kill()
    run.launcher.wait_for_output(f"host {third} is lost", 60)
    run.launcher.wait_for_output(f"etcd runs on {first} only", 60)
    run.launcher.wait_for_step(steps_of(run) + 2, START_S)
    run.launcher.wait_until(lambda: voters(run) == [first], "the lost one and the one that is left over are out", 60)
    assert "goes on alone" not in run.launcher.output()  # it has had a majority all the time

    stop(run)
    assert run.agents[run.hosts[1].name].wait(30) == 0
    assert_nothing_left(run.run_dir)
    assert not (run.run_dir / MEMBERS_FOLDER).exists()


def test_three_servers_leave_one_after_the_other_at_the_end(run_on_hosts, tmp_path):
    run = run_on_hosts(make_tiny_run(tmp_path), "rollout.num_workers=1", "train.max_steps=0")
    first, second, third = (host.address for host in run.hosts)
    run.launcher.wait_for_output(f"etcd runs on {first} and {second}, {third}", START_S)
    run.launcher.wait_for_step(1, START_S)

    run.hosts[0].unplug()  # the launcher's: to the other two its etcd is gone
    time.sleep(12)
    run.hosts[0].plug()
    run.launcher.wait_for_step(steps_of(run) + 2, START_S)
    assert "is lost" not in run.launcher.output()

    stop(run)
    assert [agent.wait(30) for agent in run.agents.values()] == [0, 0]
    assert "without having left" not in run.outputs()
    assert_nothing_left(run.run_dir)
    assert not (run.run_dir / MEMBERS_FOLDER).exists()
