"""examples/staleness: one command runs the grid on the real system and summarizes the results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ROOT

SCRIPT = ROOT / "examples" / "staleness" / "run.py"

pytestmark = [pytest.mark.timeout(1500), pytest.mark.release]


def sweep(out: Path, sorter: Path, *arguments: str) -> str:
    command = [
        *(sys.executable, str(SCRIPT), "--out", str(out), "--eval-prompts", str(sorter / "data" / "eval.jsonl")),
        *arguments,
        f"model_path={sorter / 'model'}",
        f"prompts.path={sorter / 'data' / 'train.jsonl'}",
        "train.batch_size=16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_small_grid(sorter: Path, tmp_path: Path) -> None:
    grid = ("--etas", "1", "--losses", "naive", "--seeds", "5", "--steps", "3")
    first = sweep(tmp_path, sorter, *grid)
    assert "run 1 of 1: eta = 1, naive, seed 5" in first
    (result,) = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert (result["eta"], result["loss"], result["seed"], result["steps"]) == (1, "naive", 5, 3)
    assert 0 < result["head_mean"] <= result["head_max"] <= 1
    assert 0 <= result["sampled"] <= 1
    config = (tmp_path / "naive-eta1" / "seed5" / "config.yaml").read_text()
    assert "use_decoupled_loss: false" in config
    row = (tmp_path / "table.md").read_text().splitlines()[2]
    assert row.startswith(f"| 1 | {result['head_mean']:.1f} (1) | {result['sampled']:.3f} |")
    assert (tmp_path / "staleness.png").stat().st_size > 5_000
    again = sweep(tmp_path, sorter, *grid)  # completed runs are not repeated
    assert "run 1 of 1" not in again
    assert "| 1 |" in again
