"""A process that the user starts, as the launcher observes it: through name resolve."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncrl.config.schema import ExperimentConfig, PromptSourceConfig
from asyncrl.launch.program import plan
from asyncrl.launch.rundir import LaunchError
from asyncrl.launch.supervisor.external_process import ExternalProcess
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.clock import wait_until
from asyncrl.runtime.names.interface import WatchEvent

NAME = "rollout_worker/0"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def left_out(tmp_path: Path, told: list[str]) -> ExternalProcess:
    config = ExperimentConfig(fileroot=str(tmp_path), model_path="/model", prompts=PromptSourceConfig(path="/p.jsonl"))
    specs = {spec.name: spec for spec in plan(config, attempt=1, num_prompts=8, devices=[])}
    (tmp_path / "configs" / "attempt_1").mkdir(parents=True)
    made = ExternalProcess(specs[NAME], tmp_path, wait_s=60.0, notice=told.append)
    told.clear()
    return made


def put(state: str, error: str = "", pid: int = 7) -> WatchEvent:
    status = WorkerStatus(worker=NAME, pid=pid, attempt=1, state=state, time=0.0, progress=0, waits=[], error=error)
    return WatchEvent("put", "status", msgspec.json.encode(status).decode())


GONE = WatchEvent("delete", "status", "")


def test_a_process_that_ends_between_two_turns_is_reported(left_out: ExternalProcess, told: list[str]) -> None:
    for event in (put("starting"), put("running"), put("done"), GONE):
        left_out.observe(event)
    left_out.turn()
    assert told == [f"{NAME} has started (process 7)"]


def test_the_run_waits_for_a_process_that_ends_too_early(left_out: ExternalProcess, told: list[str]) -> None:
    for event in (put("running"), GONE):
        left_out.observe(event)
        left_out.turn()
    assert told == [
        f"{NAME} has started (process 7)",
        f"{NAME} has ended; the run waits for it to be started again",
    ]


def test_a_failure_is_reported_even_if_the_process_is_already_gone(left_out: ExternalProcess) -> None:
    left_out.observe(put("error", "ValueError: no"))
    left_out.observe(GONE)
    with pytest.raises(LaunchError, match="which you started, failed\n\nValueError: no"):
        left_out.turn()


def test_a_process_can_be_stopped_and_is_then_seen_to_be_gone(left_out: ExternalProcess) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", str(left_out.config_path)]
    with subprocess.Popen(command) as process:
        try:
            # The system sets the command line shortly after Popen has returned
            shown = psutil.Process(process.pid)
            assert wait_until(lambda: str(left_out.config_path) in shown.cmdline(), limit_s=60.0, every_s=0.01)
            left_out.observe(put("running", pid=process.pid))
            left_out.turn()
            process.send_signal(signal.SIGSTOP)  # it must not end before is_gone is read
            assert wait_until(lambda: shown.status() == psutil.STATUS_STOPPED, limit_s=60.0, every_s=0.01)
            left_out.ask_to_stop()
            assert not left_out.is_gone
            process.send_signal(signal.SIGCONT)
            assert process.wait(60) == -signal.SIGTERM
            assert left_out.is_gone
        finally:
            process.kill()
