"""Cells of the matrix {process} x {signal} x {phase}: each is survived, and the run's books are right in the end.

Two runs, struck again and again. The whole matrix: python benchmarks/chaos_matrix.py, and its table in docs/chaos-matrix.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.launch import cli
from asyncrl.lineage import audit
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.testing.chaos import Cell, ChaosRun, make_chaos_run
from asyncrl.testing.runs import assert_nothing_left, journal

pytestmark = pytest.mark.timeout(900)


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
    with ChaosRun(config, f"fileroot={tmp_path}") as run:
        assert_survives(run, cells)
    found = audit(run.run_dir)
    assert [stretch.attempt for stretch in found.lineage] == [1, 2, 3]  # the training side died twice
    assert cli.main(["audit", str(run.run_dir)]) == 0
    assert "ok: each of these prompts once, nothing is wrong" in capsys.readouterr().out


def test_frozen_on_a_bad_network_and_without_a_launcher(config: Path, tmp_path: Path) -> None:
    """What is frozen too long is killed; what wakes up before is told what has changed. Messages are lost, doubled and damaged."""
    cells = [
        Cell("generation_server", "stop", "generation", stop_s=20.0),
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
        if "was damaged on its way" in line or "the checksum does not fit" in line
    ]
    assert damaged
    assert read_json_lines(run.run_dir / "journal" / "master.jsonl")[-1]["event"] == "ended"


def test_the_command(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.launch.cli", "chaos", str(config), "--json", "--seed", "3"]
    command += ["--every", "1-2", "--for", "5", "--targets", "rollout_worker", "--kinds", "kill"]
    done = subprocess.run(
        [*command, f"fileroot={tmp_path}", "train.max_steps=30"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == 0, done.stderr
    assert told["problems"] == []
    assert told["audit"]["complete"]
    assert told["faults"]
    assert {fault["fault"]["target"] for fault in told["faults"]} == {"rollout_worker"}
    assert_nothing_left(tmp_path / "chaos" / "t0")
