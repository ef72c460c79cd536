"""Passes, entropy target and distillation in whole runs on the quickstart's task. The limits count steps, not time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_runs import ROOT, assert_each_prompt_trained_once, launch_sorter, resumed

from asyncrl.testing.runs import assert_nothing_left, evaluations, launch, make_tiny_run, train_steps
from asyncrl.testing.tiny import make_tiny_model

BATCH, TARGET = 64, 0.4
SMALL = (
    "allocation=transformers.d1+d1",
    "rollout.num_workers=1",
    "eval.every_steps=0",
    "checkpoint.every_s=0",
    "weights.fsync=false",
    "tensorboard=false",
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]

# The recipe of the sloppy sorter, with right demonstrations only
_TEACHER = "import make; make.SHARE_WRONG = 0.0; make.main(make.make_recipe, 'a teacher')"


@pytest.fixture(scope="module")
def run(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a run of that many steps to its end and returns its folder."""

    def of_steps(num_steps: int, *overrides: str) -> Path:
        fileroot = tmp_path_factory.mktemp("losses")
        with launch_sorter(sorter, fileroot, f"train.max_steps={num_steps}", *SMALL, *overrides) as handle:
            assert handle.wait(600) == 0, handle.output()
            assert_nothing_left(handle.run_dir)
            assert_each_prompt_trained_once(handle.run_dir, num_steps, BATCH)
            return handle.run_dir

    return of_steps


def mean(records: list[dict[str, Any]], name: str) -> float:
    return sum(record[name] for record in records) / len(records)


def test_two_passes_over_each_batch_learn(run: Callable[..., Path]) -> None:
    folder = run(20, "train.ppo.epochs=2", "train.ppo.minibatches=2")
    start, end = evaluations(folder)
    assert start["eval/sampled_reward"] < 0.25
    assert end["eval/sampled_reward"] >= 0.6
    assert [step["actor/optimizer_steps"] for step in train_steps(folder)] == [4] * 20


def test_an_entropy_target_keeps_the_entropy_near_it(run: Callable[..., Path]) -> None:
    """Without a target the entropy falls from 0.62 to below 0.2 nats. The distance is a mean over the second half of the run."""
    constant = "train.optimizer.min_lr_ratio=1"
    off = train_steps(run(24, constant))
    on = train_steps(
        run(
            24,
            constant,
            f"train.ppo.entropy_target={TARGET}",
            "train.ppo.entropy_coef=0.4",
            "train.ppo.entropy_step=0.02",
        )
    )
    assert "actor/entropy_coef" not in off[0]
    assert [step["actor/entropy_coef"] for step in on[:3]] == [0.0, 0.0, 0.0]  # far above the target
    assert max(step["actor/entropy_coef"] for step in on[9:]) > 0.2
    far, near = (abs(mean(steps[12:], "actor/entropy") - TARGET) for steps in (off, on))
    print(f"distance to the target: {near:.3f} with it, {far:.3f} without")
    assert near < 0.7 * far, (near, far)
    assert mean(on[-4:], "reward/mean") > 0.3  # it still learns


def test_a_student_learns_from_a_teacher_without_rewards(
    run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rewards are only measured: reward_scaling is 0. The teacher has workers of its own."""
    teacher = tmp_path_factory.mktemp("teacher")
    command = [sys.executable, "-c", _TEACHER, "--out", str(teacher)]
    subprocess.run(command, check=True, timeout=600, cwd=ROOT / "examples" / "sloppy_sorter")
    folder = run(
        20,
        "allocation=transformers.d1+d1+teacher:d1",
        "train.ppo.reward_scaling=0",
        f"train.teacher.path={teacher / 'model'}",
    )
    start, end = evaluations(folder)
    assert start["eval/sampled_reward"] < 0.25
    assert end["eval/sampled_reward"] >= 0.5
    assert end["eval/greedy_reward"] >= 0.8
    steps = train_steps(folder)
    assert {step["reward/shaped_mean"] for step in steps} == {0.0}
    assert mean(steps[-3:], "distillation/token_mean") < 0.3 * mean(steps[:3], "distillation/token_mean")


def test_a_resumed_run_keeps_its_entropy_coefficient(tmp_path: Path) -> None:
    """The target is above any entropy of this model, so the coefficient rises by 0.01 in each step. The actor has two stages, and
    only the last one measures the entropy."""
    config = make_tiny_run(tmp_path)
    make_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64, num_layers=2)
    fields = (
        "allocation=transformers.d1+d1p2",
        "train.ppo.entropy_target=9",
        "train.ppo.entropy_step=0.01",
    )
    with launch(config, *fields) as handle:
        assert handle.wait(300) == 0, handle.output()
        folder = handle.run_dir
    with resumed(folder, "train.max_steps=4") as handle:
        assert handle.wait(300) == 0, handle.output()
    coefs = {step["step"]: step["actor/entropy_coef"] for step in train_steps(folder)}
    assert coefs == {1: 0.0, 2: pytest.approx(0.01), 3: pytest.approx(0.02), 4: pytest.approx(0.03)}
