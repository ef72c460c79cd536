"""Processes of a run, and the folder, variables and files that they find when they start."""

import importlib.metadata
import os
import shlex
import subprocess
import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

import pytest
import torch

from asyncrl.config.schema import ConfigError, RuntimeConfig
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.model.process_group import ProcessGroup
from asyncrl.runtime.process import python_module
from asyncrl.testing.runs import launch, make_tiny_run, train_steps
from asyncrl.weights.update_group import serve_store

LIMIT_S = 200.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


# ------------------------------------------------------------------------------------------------------- the current folder


@pytest.fixture
def shadowing(tmp_path):
    """A folder with a file for every module of the standard library and of the installed packages. Its import fails."""
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()} - {"asyncrl"}
    for name in filter(PathFinder.find_spec, names):  # some exist only on other systems
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder was imported')\n")
    return tmp_path


@pytest.mark.real_start
def test_files_in_the_current_folder_replace_no_module_in_any_process(tiny, shadowing):
    mine = shadowing / "mine"
    mine.mkdir()
    (mine / "scoring.py").write_text(
        "import subprocess, sys\n"
        "import beside\n"
        "def reward(prompt, completion, answer):\n"
        "    # a process of the user's own finds modules in the current folder, as always\n"
        "    own = subprocess.run([sys.executable, '-c', 'import of_the_user'], capture_output=True)\n"
        "    return float(beside.ONE + (b'imported' in own.stderr))\n"
    )
    (shadowing / "beside.py").write_text("ONE = 1.0\n")
    (shadowing / "of_the_user.py").write_text("raise SystemExit('imported')\n")
    overrides = (f"fileroot={shadowing}/runs", "rollout.tasks.default.reward=mine.scoring:reward", "train.max_steps=1")
    with launch(tiny, *overrides, cwd=shadowing) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert train_steps(run.run_dir)[0]["reward/mean"] == 2.0


def test_a_process_without_a_fork_server_neither(shadowing):
    """Also where the user starts the launcher by `-m`, which puts the current folder first."""
    (shadowing / "types.py").unlink()  # `python -m` itself imports these before any module of ours
    (shadowing / "typing.py").unlink()
    for command in (
        python_module("asyncrl.launch.worker_main", "--help"),
        [sys.executable, "-m", "asyncrl.cli.main", "--version"],
    ):
        done = subprocess.run(command, cwd=shadowing, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ)
        assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------------------ variables


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_interface_that_the_machine_lacks_is_named_before_the_start(tiny, tmp_path, command):
    done = subprocess.run(
        python_module("asyncrl.cli.main", command, str(tiny), f"fileroot={tmp_path}", "allocation=transformers.d1+d2"),
        env={**os.environ, "GLOO_SOCKET_IFNAME": "nosuch0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "GLOO_SOCKET_IFNAME=nosuch0" in line]
    assert "it has lo" in line
    assert "Set GLOO_SOCKET_IFNAME to one of them, or unset it" in line
    assert not (tmp_path / "tiny").exists()


def test_a_worker_on_another_machine_names_the_interface_that_it_lacks(monkeypatch):
    """`check` does not see that machine. The worker's error is one line, without a traceback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    info = SimpleNamespace(index=0, runtime=RuntimeConfig())
    _store, address = serve_store("127.0.0.1", LIMIT_S)
    with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME=nosuch0: this machine has no interface"):
        ProcessGroup(info, WorkerGroups((0,)), limit_s=LIMIT_S).join(address, torch.device("cpu"))


# -------------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", ">/dev/full 2>/dev/full"])
def test_a_command_works_although_its_output_is_closed_or_full(tmp_path, streams):
    program = shlex.join(python_module("asyncrl.cli.main"))
    done = subprocess.run(
        ["sh", "-c", f"{program} ls {tmp_path} {streams}"], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_character_that_the_encoding_lacks_is_escaped(tmp_path):
    command = python_module("asyncrl.cli.main", "check", str(tmp_path / "\u6a21.yaml"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2, done.stderr
    assert "\\u6a21.yaml" in done.stdout
