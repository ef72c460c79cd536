"""Whole runs for tests: launch them in a process of their own, and observe their files and processes.

with launch("config.yaml", f"fileroot={tmp_path}") as run:
    run.wait_for_step(2, limit_s=120)
    run.signal(signal.SIGINT)
    assert run.wait(60) == 130, run.output()
    assert_nothing_left(run.run_dir)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.launch.rundir import RUN_DIR_ENV, is_running
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.metrics import METRICS_FILE, read_json_lines
from asyncrl.runtime.process import python_module
from asyncrl.testing.faults.processes import command_line

T = TypeVar("T")

LAUNCHED_ENV = "ASYNCRL_LAUNCHED_RUN_DIR"  # unlike RUN_DIR_ENV it is also set for the launcher of a test
_POLL_S = 0.05

start_launcher: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # asyncrl's own tests fork launchers instead


class RunHandle:
    """A launcher in its own process group, as in a terminal. Leaving the `with` block kills all remaining processes of the run."""

    def __init__(
        self,
        command: list[str],
        run_dir: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.run_dir, self._clock = run_dir, clock
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._printed = ""  # the whole output, after `_output` is closed
        self.popen = start_launcher(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, LAUNCHED_ENV: str(run_dir), **(env or {})},
            start_new_session=True,
        )

    def output(self) -> str:
        """The launcher's output so far, stdout and stderr."""
        if self._output.closed:
            return self._printed
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def wait(self, timeout: float) -> int:
        """Wait for the launcher's exit code (-N: killed by signal N). After the timeout raise AssertionError with its output."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout:g} s; it printed:\n{self.output()}") from None

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the launcher. group: to its whole process group, as a terminal does."""
        if group:
            os.killpg(self.popen.pid, number)
        else:
            self.popen.send_signal(number)

    def wait_until(self, condition: Callable[[], T], what: str, limit_s: float) -> T:
        """Wait for a true value of the condition. Raise AssertionError with the output if the run ends or limit_s passes first."""
        deadline = self._clock.monotonic() + limit_s
        while True:
            ended = self.popen.poll() is not None  # read first: the condition may become true just before the run ends
            if value := condition():
                return value
            if ended or self._clock.monotonic() > deadline:
                why = f"the run ended with code {self.popen.returncode}" if ended else f"{limit_s:g} s passed"
                raise AssertionError(f"{why} before {what}; it printed:\n{self.output()}")
            self._clock.sleep(_POLL_S)

    def wait_for_step(self, step: int, limit_s: float) -> dict[str, Any]:
        """Wait for this train step or a later one, and return the metrics of the first such step."""

        def find() -> dict[str, Any]:
            return next((record for record in train_steps(self.run_dir) if record["step"] >= step), {})

        return self.wait_until(find, f"train step {step}", limit_s)

    def wait_for_output(self, text: str, limit_s: float) -> str:
        """Wait until the text is in the output, and return the whole output."""
        return self.wait_until(lambda: self.output() if text in self.output() else "", f"{text!r} was printed", limit_s)

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker such as `rollout_worker/0`. Raise AssertionError if there is none."""
        config = f"{name.replace('/', '_')}.yaml"
        for process in processes_of(self.run_dir):
            if any(Path(argument).name == config for argument in command_line(process)):
                return process
        raise AssertionError(f"{name} does not run; running: {describe(processes_of(self.run_dir))}")

    def close(self) -> None:
        """Kill all remaining processes of the run, the launcher first."""
        self.popen.kill()  # has no effect if it has ended
        for process in processes_of(self.run_dir):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait()
        unix_sockets.remove_folder(self.run_dir)  # the reaper normally does this, but it was killed too
        if not self._output.closed:
            self._printed = self.output()
            self._output.close()

    def __enter__(self) -> RunHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(
    config_path: str | Path, *overrides: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> RunHandle:
    """Start `asyncrl-launch run CONFIG key=value ...` in its own process.

    env: added to this process's environment. cwd: the launcher's current folder; config_path and fileroot must then be absolute.
    """
    command = python_module("asyncrl.cli.main", "run", str(config_path), *overrides)
    return RunHandle(command, run_directory(load_experiment(config_path, overrides)), env, cwd)


_TINY_CONFIG = """\
# The smallest run: one process of each kind, a random model, well under a second per step.
experiment: tiny
fileroot: {folder}/runs
allocation: transformers.d1+d1
model_path: {folder}/model
prompts: {{path: "{folder}/prompts.jsonl", max_prompt_length: 16}}
rollout:
  num_workers: 1
  group_size: 2
  sampling: {{max_new_tokens: 4}}
  tasks: {{default: {{reward: "{folder}/reward.py:reward"}}}}
generation: {{num_blocks: 64}}
manager: {{max_head_offpolicyness: 1}}
train: {{batch_size: 2, max_steps: 2, ppo: {{minibatches: 1}}}}
weights: {{fsync: false}}
tensorboard: false
"""

_TINY_REWARD = """\
def reward(prompt, completion, answer):
    return float(len(set(completion)))
"""


def make_tiny_run(folder: Path, num_prompts: int = 2000, *, architecture: str = "qwen2", num_layers: int = 1) -> Path:
    """Write the config of the smallest run, a random model, prompts and a reward function. Takes some seconds."""
    from asyncrl.testing.tiny import make_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model", architecture, hidden_size=32, intermediate_size=64, num_layers=num_layers)
    prompts = (json.dumps({"prompt": f"{number:04d}", "answer": ""}) for number in range(num_prompts))
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    (folder / "reward.py").write_text(_TINY_REWARD, encoding="utf-8")
    config = folder / "tiny.yaml"
    config.write_text(_TINY_CONFIG.format(folder=folder), encoding="utf-8")
    return config


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl, of train steps and evaluations."""
    return read_json_lines(run_dir / METRICS_FILE)


def train_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The records of train steps only."""
    return [record for record in metrics(run_dir) if "reward/mean" in record]


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The records of evaluations only."""
    return [record for record in metrics(run_dir) if any(key.startswith("eval/") for key in record)]


def journal(run_dir: Path, worker: str = "master") -> list[dict[str, Any]]:
    """A worker's journal. worker: `master`, `generation_server_0` and so on."""
    return read_json_lines(run_dir / "journal" / f"{worker}.jsonl")


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """All live processes of a run, including grandchildren: those with its folder in their command line or environment."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid()
        and (_names(run_dir, command_line(process)) or _environment_names(run_dir, process))
    ]


def assert_nothing_left(run_dir: Path, within_s: float = 10.0, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Assert that within within_s no process of the run is alive (so that no port is held either) and its folder is unlocked."""
    deadline = clock.monotonic() + within_s
    while (left := processes_of(run_dir)) or is_running(run_dir):
        assert clock.monotonic() < deadline, f"{within_s:g} s later these remain: {describe(left) or 'locks'}"
        clock.sleep(_POLL_S)


def describe(processes: list[psutil.Process]) -> str:
    return "; ".join(f"{process.pid} {' '.join(command_line(process))[:200]}" for process in processes)


def _names(run_dir: Path, cmdline: list[str]) -> bool:
    folder = str(run_dir)
    return any(argument.endswith(folder) or f"{folder}/" in argument for argument in cmdline)


def _environment_names(run_dir: Path, process: psutil.Process) -> bool:
    try:
        environment = process.environ()
    except (psutil.Error, OSError):  # the process has ended, or belongs to another user
        return False
    return str(run_dir) in (environment.get(RUN_DIR_ENV), environment.get(LAUNCHED_ENV))
