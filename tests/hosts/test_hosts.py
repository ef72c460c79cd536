"""A run across three hosts, each with its own address. All of them find the run, and it survives a pulled cable."""

import json
import signal
import time

import pytest
from hosts_run import launch, line_of, status_of

from asyncrl.testing.runs import assert_nothing_left, make_tiny_run, train_steps
from asyncrl.weights.checkpoints import list_checkpoints
from tests import pages

pytestmark = pytest.mark.timeout(400)
START_S = 200  # a busy machine imports torch on three hosts at once
CABLE_S = 20


def workers(run):
    told = status_of(run, run.hosts[1])
    assert told, "status does not answer"
    return told


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
    assert [daemon.wait(30) for daemon in run.daemons.values()] == [0, 0]
    assert_nothing_left(run.run_dir)


def test_the_pages_commands_are_a_run_that_outlives_a_host(run_on_hosts, tmp_path):
    """The page's commands run unchanged, each on the host it names. my_run.yaml is a small run."""
    pages.write_config(
        tmp_path / "my_run.yaml",
        make_tiny_run(tmp_path),
        "experiment=mine",
        "allocation=transformers.d2+d1",
        "rollout.num_workers=2",
        "train.max_steps=0",
        "train.num_epochs=10",  # enough epochs for the slowest machine
        "network.host_lost_after_s=8",
        "manager.lease_s=6",
        leave_out=("fileroot",),
    )
    run = run_on_hosts(tmp_path)
    run.launcher.wait_for_step(1, START_S)
    where = {name: worker["host"] for name, worker in workers(run).items()}
    dead = run.hosts[1]
    moved = {name for name, host in where.items() if host == dead.name}
    assert moved
    shown = run.hosts[2].run(pages.as_written(line_of("status"), tmp_path))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert all(name in shown.stdout for name in where)

    dead.kill()
    run.launcher.wait_for_output(f"host {dead.name} is lost", 60)

    def run_elsewhere():
        told = status_of(run, run.hosts[2])  # empty if name resolve does not answer at once
        return moved <= told.keys() and all(
            told[name]["state"] == "running" and told[name]["host"] != dead.name for name in moved
        )

    run.launcher.wait_until(run_elsewhere, "what was there runs elsewhere", START_S)
    done = len(train_steps(run.run_dir))
    run.launcher.wait_for_step(train_steps(run.run_dir)[-1]["step"] + 2, START_S)
    assert len(train_steps(run.run_dir)) > done

    told = run.hosts[2].run(pages.as_written(line_of("scale"), tmp_path))  # from a host other than the launcher's
    assert told.returncode == 0, told.stdout + told.stderr
    run.launcher.wait_until(
        lambda: status_of(run, run.hosts[2]).get("generation_server/2", {}).get("state") == "running",
        "a server more runs on the hosts that are left",
        START_S,
    )

    told = run.hosts[2].run(pages.as_written(line_of("stop"), tmp_path), limit_s=120)
    assert told.returncode == 0, told.stdout + told.stderr
    assert run.launcher.wait(60) == 128 + signal.SIGTERM
    assert run.daemons[run.hosts[2].name].wait(30) == 0
    assert_nothing_left(run.run_dir)
    assert list_checkpoints(run.run_dir)[-1][1] == train_steps(run.run_dir)[-1]["step"]
