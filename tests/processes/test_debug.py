"""Tests of `asyncrl-launch debug`, which runs a single process from its resolved config in the user's terminal."""

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from asyncrl.config.schema import NameResolveConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import load_process_config, plan, save_config
from asyncrl.launch.rundir import RunLock
from asyncrl.protocol.names import Names
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.testing.runs import make_tiny_run
from tests.support.etcd_server import EtcdServer

LIMIT_S = 100.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=20)


def resolved(tiny, folder, name, endpoints=(), **changes):
    """The config of one process, written to disk."""
    config = replace(load_experiment(tiny), name_resolve=NameResolveConfig(endpoints=list(endpoints)))
    (spec,) = (spec for spec in plan(config, attempt=1, num_prompts=20) if spec.name == name)
    path = folder / f"{spec.file_stem}.yaml"
    save_config(replace(spec.config, **changes), path)
    return path


def debug(*arguments, typed="") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "asyncrl.cli.main", "debug", *map(str, arguments)]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_an_error_is_looked_at_where_it_was_raised(tiny, tmp_path):
    path = resolved(tiny, tmp_path, "rollout_worker/0", endpoints=["127.0.0.1:1"], tokenizer_path=str(tmp_path))
    done = debug(path, "--pdb", typed="p 'directory is', directory.name\nq\n")
    assert done.returncode == 1, done.stderr
    assert "nothing answers at 127.0.0.1:1; it runs alone, with a private etcd" in done.stdout
    assert f"('directory is', '{tmp_path.name}')" in done.stdout  # of the frame that raised
    assert "has no tokenizer.json" in done.stderr


def test_a_process_left_for_debugging_stops_when_its_run_ends(tiny, tmp_path):
    """A killed launcher sends no request to stop. The process notices that the launcher's lock is free."""
    with EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", NameResolveConfig().binary) as etcd:
        run_dir = tmp_path / "run"
        lock = RunLock(run_dir)
        lock.acquire()
        config = replace(
            load_experiment(tiny, ["runtime.start_timeout_s=1000", "network.authenticate=off"]),
            name_resolve=NameResolveConfig(endpoints=[etcd.endpoint]),
        )
        (spec,) = (spec for spec in plan(config, attempt=1, num_prompts=20) if spec.name == "rollout_worker/0")
        path = tmp_path / "rollout_worker_0.yaml"
        save_config(replace(spec.config, worker=replace(spec.config.worker, run_dir=str(run_dir))), path)
        command = [sys.executable, "-m", "asyncrl.cli.main", "debug", str(path)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert any("setting up" in line for line in process.stderr)
                lock.release()
                assert process.wait(LIMIT_S) == 0
            finally:
                process.kill()


@pytest.fixture
def with_breakpoint(tiny, tmp_path):
    """The config of a rollout worker whose reward function has a breakpoint at import. It finds no other process."""
    (tmp_path / "stops.py").write_text("breakpoint()\ndef reward(prompt, completion, answer):\n    return 0.0\n")
    overrides = [f"rollout.tasks.default.reward={tmp_path}/stops.py:reward", "runtime.start_timeout_s=2"]
    with EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", NameResolveConfig().binary) as etcd:
        config = load_experiment(
            tiny, [*overrides, f"name_resolve.endpoints=[{etcd.endpoint}]", "network.authenticate=off"]
        )
        (spec,) = (s for s in plan(config, attempt=1, num_prompts=20) if s.name == "rollout_worker/0")
        path = tmp_path / "rollout_worker_0.yaml"
        save_config(spec.config, path)
        yield path


def test_a_breakpoint_has_a_terminal(with_breakpoint):
    done = debug(with_breakpoint, typed="p 'it', 'stopped'\nc\n")
    assert "('it', 'stopped')" in done.stdout
    assert "it runs alone, with a private etcd" not in done.stdout  # name resolve answers, so this is not printed
    assert "waited 2 s for the address of the gserver manager" in done.stderr  # it went on, alone


def test_a_breakpoint_in_a_process_of_the_launcher_says_what_to_do(with_breakpoint):
    start = f"run_config(Path({str(with_breakpoint)!r}), launched=True)"
    code = f"from pathlib import Path; from asyncrl.launch.worker_main import run_config; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "breakpoint(): this process has no terminal; start the run with debug.leave_out=" in done.stderr


def test_what_is_no_process_config_is_refused(tiny, tmp_path):
    done = debug(tiny)
    assert done.returncode == 2
    assert "is not the resolved config of a process: " in done.stdout
    assert "--dry-run" in done.stdout
    assert debug(tmp_path / "nowhere.yaml").returncode == 2


def test_a_process_that_runs_already_is_not_started_again(tiny, tmp_path):
    """Name resolve says that the process already runs: the test publishes the process's status there."""
    with EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", NameResolveConfig().binary) as etcd:
        path = resolved(tiny, tmp_path, "rollout_worker/0", endpoints=[etcd.endpoint])
        worker = load_process_config(path).worker
        key = Names(worker.experiment, worker.trial).status("rollout_worker/0")
        with open_name_resolver(worker.name_resolve) as resolver:
            status = WorkerStatus(worker="rollout_worker/0", pid=77, attempt=1, state="running", time=0.0, progress=0)
            resolver.add(key, msgspec.json.encode(status).decode())
            done = debug(path)
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "rollout_worker/0 is already running (process 77); " in told
    assert "debug.leave_out=[rollout_worker/0]" in told
