"""Runs from Python, and runs that go on without their terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import asyncrl
from asyncrl.api import Run, RunFailed
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import is_running
from asyncrl.runtime.process import python_module
from asyncrl.testing.faults.processes import command_line
from asyncrl.testing.runs import assert_nothing_left, make_tiny_run

LIMIT_S = 300.0
_SCRIPT = """
import sys
from asyncrl import Run
run = Run(sys.argv[1], ["trial=killed", "train.max_steps=100000"])
for step in run.steps():
    print(step["step"], flush=True)
"""

_INTERRUPTED = """
import sys
import psutil
from asyncrl import Run
try:
    Run(sys.argv[1], sys.argv[2:])
except KeyboardInterrupt:
    assert psutil.Process().children() == []
"""


def until(condition):
    """The condition's true value, awaited for a minute."""
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("api"))


@pytest.mark.timeout(LIMIT_S)
def test_a_run_is_followed_to_its_end_and_stopped_by_leaving_the_block(config):
    assert asyncrl.Run is Run
    with Run(config, ["train.max_steps=3"]) as run:
        assert [step["step"] for step in run.steps()] == [1, 2, 3]
        assert list(run.steps()) == []  # each once
        assert run.wait() == json.loads((run.run_dir / "summary.json").read_text())
    assert run.exit_code == 0
    with Run.resume(run.run_dir, ["train.max_steps=100000"]) as run:
        first = next(run.steps())
        assert first["step"] == 4
        assert is_running(run.run_dir)
    assert run.exit_code == 143
    assert_nothing_left(run.run_dir)
    assert run.wait() == {}  # it was stopped, and did not fail


@pytest.mark.timeout(LIMIT_S)
def test_what_is_wrong_is_raised(config):
    with pytest.raises(ConfigError, match=r"did you mean 'train\.batch_size'"):
        Run(config, ["train.batchsize=3"])
    (config.parent / "broken.py").write_text("def reward(prompt, completion, answer):\n    raise ValueError('no')\n")
    broken = [f"rollout.tasks.default.reward={config.parent}/broken.py:reward", "trial=broken"]
    with Run(config, broken) as run, pytest.raises(RunFailed, match="rejected") as raised:
        list(run.steps())
    assert raised.value.exit_code == 1
    assert_nothing_left(run.run_dir)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("detach", [False, True], ids=["Run", "--detach"])
def test_an_interrupt_before_the_start_stops_the_launcher(config, detach):
    overrides = [str(config), "trial=interrupted", "train.max_steps=100000"]
    if detach:
        command = python_module("asyncrl.cli.main", "run", *overrides, "--detach")
    else:
        command = [sys.executable, "-c", _INTERRUPTED, *overrides]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    children = psutil.Process(script.pid).children
    (launcher,) = until(lambda: [child for child in children() if "asyncrl.cli.main" in command_line(child)])
    until(lambda: launcher.cpu_times().user > 0.3)  # it imports, and the script waits for it
    script.send_signal(signal.SIGINT)
    out, _ = script.communicate(timeout=60)
    assert script.returncode == (128 + signal.SIGINT if detach else 0), out
    until(lambda: not launcher.is_running())
    assert_nothing_left(config.parent / "runs" / "tiny" / "interrupted")


@pytest.mark.release
@pytest.mark.timeout(LIMIT_S)
def test_a_killed_script_leaves_no_process(config):
    script = subprocess.Popen([sys.executable, "-c", _SCRIPT, str(config)], stdout=subprocess.PIPE)
    assert script.stdout.readline() == b"1\n"
    script.kill()
    script.communicate()
    run_dir = config.parent / "runs" / "tiny" / "killed"
    until(lambda: not is_running(run_dir))
    assert_nothing_left(run_dir)


@pytest.mark.timeout(LIMIT_S)
def test_a_run_goes_on_without_its_terminal(config):
    words = ["run", str(config), "trial=left", "train.max_steps=100000", "--deta", "--json"]
    command = python_module("asyncrl.cli.main", *words)
    terminal = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    out, _ = terminal.communicate(timeout=LIMIT_S)
    told = json.loads(out.splitlines()[-1])
    run_dir = config.parent / "runs" / "tiny" / "left"
    try:
        assert terminal.returncode == 0, out
        assert (told["event"], told["run_dir"]) == ("left", str(run_dir))
        assert os.getsid(told["pid"]) == told["pid"]  # a hang-up of the terminal does not reach it
        with pytest.raises(ProcessLookupError):
            os.killpg(terminal.pid, signal.SIGHUP)
        assert is_running(run_dir)
    finally:
        stop = subprocess.run(python_module("asyncrl.cli.main", "stop", str(run_dir), "--now"), check=False)
    assert stop.returncode == 0
    assert_nothing_left(run_dir)
    assert "stopped" in (run_dir / "launcher.out").read_text()
