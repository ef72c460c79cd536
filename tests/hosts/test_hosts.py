"""A run across three hosts, each with an address of its own: it is found from all of them, and outlives a cable that is pulled."""

import json
import signal
import sys
import time

import pytest

from asyncrl.testing.runs import assert_nothing_left, make_tiny_run, processes_of, train_steps

pytestmark = pytest.mark.timeout(400)
START_S = 200  # a busy machine imports torch on three hosts at once
CABLE_S = 20


def launch(host, *words, limit_s=60):
    return host.run([sys.executable, "-m", "asyncrl.launch.cli", *map(str, words)], limit_s=limit_s)


def workers(run):
    """By name, as any host that sees the run's folder is told."""
    told = launch(run.hosts[1], "status", run.run_dir, "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    return {worker["worker"]: worker for worker in json.loads(told.stdout)["workers"]}


def test_no_sample_is_lost_when_a_cable_is_pulled_for_a_while(run_on_hosts, tmp_path):
    config = make_tiny_run(tmp_path, num_prompts=120)
    run = run_on_hosts(config, "allocation=transformers.d2+d2", "rollout.num_workers=2", "train.max_steps=0")
    run.launcher.wait_for_step(1, START_S)
    where = {name: worker["host"] for name, worker in workers(run).items()}
    assert set(where.values()) == set(run.hosts.addresses)
    cut = run.hosts[1]
    assert {name.partition("/")[0] for name, host in where.items() if host == cut.address} >= {"generation_server"}

    cut.unplug()
    time.sleep(CABLE_S)
    cut.plug()

    assert run.launcher.wait(START_S) == 0, run.outputs()
    told = json.loads(launch(run.hosts[0], "audit", run.run_dir, "--json").stdout)
    assert told["problems"] == []
    assert "is lost" not in run.launcher.output()
    assert train_steps(run.run_dir)[-1]["step"] == 60
    assert [agent.wait(30) for agent in run.agents.values()] == [0, 0]
    assert_nothing_left(run.run_dir)


def test_what_a_dead_host_ran_is_started_elsewhere_and_nothing_outlives_the_launcher(run_on_hosts, tmp_path):
    config = make_tiny_run(tmp_path)
    run = run_on_hosts(
        config,
        "allocation=transformers.d2+d1",
        "rollout.num_workers=2",
        "train.max_steps=0",
        "network.host_lost_after_s=5",
        "manager.lease_s=6",
    )
    run.launcher.wait_for_step(1, START_S)
    where = {name: worker["host"] for name, worker in workers(run).items()}
    dead = run.hosts[1]
    moved = {name for name, host in where.items() if host == dead.address}
    assert moved

    dead.kill()
    run.launcher.wait_for_output(f"host {dead.address} is lost", 60)
    run.launcher.wait_until(
        lambda: all(
            worker["state"] == "running" and worker["host"] != dead.address
            for name, worker in status_of(run).items()
            if name in moved
        ),
        "what was there runs elsewhere",
        START_S,
    )
    done = len(train_steps(run.run_dir))
    run.launcher.wait_for_step(train_steps(run.run_dir)[-1]["step"] + 2, START_S)
    assert len(train_steps(run.run_dir)) > done

    told = launch(run.hosts[2], "scale", run.run_dir, "generation=3")  # from another host than the launcher's
    assert told.returncode == 0, told.stdout + told.stderr
    run.launcher.wait_until(
        lambda: status_of(run).get("generation_server/2", {}).get("state") == "running",
        "a server more runs on the hosts that are left",
        START_S,
    )

    run.launcher.signal(signal.SIGKILL, group=True)
    assert run.agents[run.hosts[2].name].wait(60) == 1
    assert not processes_of(run.run_dir), "something outlived the launcher"


def status_of(run):
    told = launch(run.hosts[2], "status", run.run_dir, "--json")
    return {worker["worker"]: worker for worker in json.loads(told.stdout)["workers"]} if told.returncode == 0 else {}
