"""Cells of the matrix {process} x {signal} x {phase}: the run survives each, and its records are consistent at the end.

Three runs are struck several times each, and a fourth one is struck by `asyncrl-launch chaos`. `python
benchmarks/chaos_matrix.py` runs the whole matrix; docs/chaos-matrix.md has its table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import main as cli
from asyncrl.testing.chaos import Cell, ChaosRun, make_chaos_run
from asyncrl.testing.runs import assert_nothing_left, journal
from asyncrl.weights.checkpoints import list_checkpoints
from asyncrl.weights.lineage import audit, read_attempts

pytestmark = pytest.mark.timeout(1200)

START_LIMIT_S = 180.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chaos_run(tmp_path_factory.mktemp("chaos"))


def assert_survives(run: ChaosRun, cells: list[Cell]) -> None:
    for cell in cells:
        outcome = run.strike(cell)
        assert not outcome.problem, f"{cell}: {outcome.problem}"
        assert outcome.in_phase, f"{cell}: the phase never came"
        assert cell.kind == "stop" or outcome.back_s is not None
    report = run.finish()
    assert report.problems == []
    assert report.exit_code == 0
    strikes = [event for event in journal(run.run_dir, "faults") if event["event"] == "fault"]
    assert [(event["target"], event["kind"], event["phase"]) for event in strikes] == [
        (cell.target, cell.kind, cell.phase) for cell in cells
    ]


def test_killed_in_the_middle_of_what_they_do(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        Cell("rollout_worker", "kill", "push"),
        Cell("generation_server", "kill", "update"),
        Cell("model_worker", "kill", "train_step"),
        Cell("gserver_manager", "kill", "generation"),
        Cell("etcd", "kill", "weight_write"),
        Cell("master", "kill", "weight_write"),
    ]
    # no process is frozen here; the long limit keeps the launcher from killing processes that a busy machine delays
    with ChaosRun(config, f"fileroot={tmp_path}", "runtime.frozen_after_s=120") as run:
        run.handle.wait_until(lambda: list_checkpoints(run.run_dir), "a checkpoint", START_LIMIT_S)
        assert_survives(run, cells)
    attempts = read_attempts(run.run_dir)
    assert [attempt.number for attempt in attempts] == [1, 2, 3]  # the training side died twice
    _, second, third = (attempt.parent for attempt in attempts)
    assert second is not None
    assert third is not None  # it resumes from the second attempt's checkpoint, or from the first's if there is none
    assert [stretch.attempt for stretch in audit(run.run_dir).lineage] == sorted({1, third[0], 3})
    assert cli.main(["audit", str(run.run_dir)]) == 0
    assert "ok: each of these prompts was trained or rejected once; no problem found" in capsys.readouterr().out


def test_frozen_on_a_bad_network_and_without_a_launcher(config: Path, tmp_path: Path) -> None:
    """The launcher kills a process that is frozen too long. A process that wakes up earlier learns of all changes. Messages are
    lost, doubled, damaged and delayed."""
    cells = [
        Cell("generation_server", "stop", "generation", stop_s=60.0),  # frozen for 60 s; the launcher kills it before
        Cell("rollout_worker", "stop", "push", stop_s=5.0),
        Cell("gserver_manager", "restart", "idle"),
        Cell("launcher", "kill", "train_step"),
    ]
    faults = [f"runtime.faults.{kind}=0.03" for kind in ("drop", "duplicate", "corrupt", "delay")]
    with ChaosRun(config, f"fileroot={tmp_path}", "runtime.resend_after_s=0.2", *faults) as run:
        assert_survives(run, cells)
    told = [event["event"] for event in journal(run.run_dir, "faults") if event["number"] == 0]
    assert told == ["fault", "killed_meanwhile", "recovered"]
    damaged = [
        line
        for log in run.run_dir.glob("logs/attempt_*/*.log")
        if not log.is_symlink()
        for line in log.read_text().splitlines()
        if "was damaged in transit" in line or "the checksum does not match" in line
    ]
    assert damaged
    # the trajectory receiver may still accept a group that finishes too late, while the master ends
    *_, last = (event for event in journal(run.run_dir) if event["event"] != "stored")
    assert last["event"] == "ended"


def test_the_nursery_of_a_reward_killed_frozen_and_stopped(config: Path, tmp_path: Path) -> None:
    """The faults hit the nursery, which starts the judges of rewards. No prompt is rejected: each is trained."""
    cells = [
        Cell("nursery", "kill", "generation"),
        Cell("nursery", "kill", "push"),
        Cell("nursery", "stop", "train_step", stop_s=3.0),
        Cell("nursery", "restart", "idle"),
    ]
    with ChaosRun(config, f"fileroot={tmp_path}", "runtime.frozen_after_s=120") as run:
        assert_survives(run, cells)
    assert audit(run.run_dir).rejected == {}


def test_the_command(config: Path, tmp_path: Path) -> None:
    config.with_name("pace").touch()  # rewards are slow, so that the run does not end before it is struck
    command = [sys.executable, "-m", "asyncrl.cli.main", "chaos", str(config), "--json", "--seed", "3"]
    command += ["--every", "1-2", "--for", "5", "--targets", "rollout_worker", "--kinds", "kill"]
    done = subprocess.run(
        [*command, f"fileroot={tmp_path}", "train.max_steps=30"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == 0, done.stderr
    assert told["problems"] == []
    assert told["audit"]["complete"]
    assert told["faults"]
    assert {fault["fault"]["target"] for fault in told["faults"]} == {"rollout_worker"}
    assert_nothing_left(tmp_path / "chaos" / "t0")
