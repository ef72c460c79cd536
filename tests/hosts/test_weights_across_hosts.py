"""Generation on hosts that cannot read the trainer's weight folder: each version is fetched once a host."""

import json
import re
import sys

import pytest

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.testing.runs import assert_nothing_left, make_tiny_run, train_steps

pytestmark = pytest.mark.timeout(400)
LIMIT_S = 300


def test_weights_reach_hosts_without_the_runs_weights(hosts, run_on_hosts, tmp_path):
    config = make_tiny_run(tmp_path, num_prompts=12)
    run_dir = run_directory(load_experiment(config))
    weights = run_dir / "weights"
    weights.mkdir(parents=True)
    for host in hosts[1:]:  # a separate folder on these hosts hides the trainer's
        assert host.run(["mount", "-t", "tmpfs", "tmpfs", str(weights)]).returncode == 0

    run = run_on_hosts(
        config,
        "allocation=transformers.d2+d1",
        "rollout.num_workers=1",
        "train.max_steps=0",
        f"weights.fetch_dir={tmp_path / 'memory'}",
    )
    assert run.launcher.wait(LIMIT_S) == 0, run.launcher.output() + run.outputs()

    assert train_steps(run.run_dir)[-1]["step"] == 6
    folder = run.run_dir / "logs" / "attempt_1"
    logs = {path.stem: path.read_text() for path in folder.glob("generation_server_*.log")}
    assert len(logs) == 2
    fetched = {name: re.findall(r"weights (\S+) fetched from 10\.77\.0\.\d", text) for name, text in logs.items()}
    away = [name for name, versions in fetched.items() if versions]
    assert away, logs  # at least one server is on another host than the trainer
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
