"""A wheel installed without the repository: `asyncrl-launch init` writes a task, and the commands that it prints train it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import ROOT

from asyncrl.testing.runs import train_steps

STEPS = 2
SMALL = (f"train.max_steps={STEPS}", "train.batch_size=8", "eval.prompts=null", "weights.fsync=false")

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


def call(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run the command and return its output."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Build from a copy, because builds leave files behind. The copied example has a model folder; the wheel must not have it."""
    source = tmp_path / "source"
    for name in ("asyncrl", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "model", "data", "runs")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored if name == "examples" else None)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    made = source / "examples" / "sloppy_sorter" / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    call(*pip, cwd=tmp_path)
    (built,) = tmp_path.glob("asyncrl-*.whl")
    return built


def test_a_task_of_the_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    """asyncrl's dependencies come from the tests' environment."""
    installed = tmp_path / "installed"
    call(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", installed, wheel, cwd=tmp_path)
    launcher = (sys.executable, "-m", "asyncrl.cli.main")

    def launch(*words: str, cwd: Path) -> str:
        return call(*launcher, *words, cwd=cwd, PYTHONPATH=str(installed))

    where = call(
        sys.executable, "-c", "import asyncrl; print(asyncrl.__file__)", cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert Path(where.strip()).is_relative_to(installed)
    answer = json.loads(launch("init", "my_task", "--json", cwd=tmp_path))
    assert sorted(answer["files"]) == ["README.md", "config.yaml", "make.py", "reward.py", "schema.json"]
    task = tmp_path / "my_task"
    assert not (installed / "asyncrl" / "examples" / "sloppy_sorter" / "model").exists()
    launch("prepare", "config.yaml", cwd=task)
    printed = launch("run", "config.yaml", *SMALL, cwd=task)
    steps = train_steps(task / "runs" / "my_task" / "t0")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1)), printed
