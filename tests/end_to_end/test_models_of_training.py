"""Runs with further models and data on the training side: supervised texts."""

from pathlib import Path

import pytest
from whole_runs import launch_sorter

from asyncrl.testing.runs import evaluations, train_steps

STEPS = 20

pytestmark = pytest.mark.timeout(900)


def test_a_run_learns_from_supervised_texts(sorter: Path, tmp_path: Path) -> None:
    """All rewards are scaled to 0, so the texts alone change the model. The evaluation's rewards are not scaled."""
    with launch_sorter(
        sorter,
        tmp_path,
        "train.ppo.reward_scaling=0",
        f"train.ptx.texts.path={sorter / 'data' / 'train.jsonl'}",
        "train.ptx.coef=1",
        "train.ptx.batch_size=256",
        f"train.max_steps={STEPS}",
        f"eval.every_steps={STEPS}",
        "allocation=transformers.d1+d2",
    ) as run:
        assert run.wait(600) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert step["advantages/std"] == 0
        assert step["actor/loss"] == pytest.approx(step["actor/ptx_loss"], rel=1e-5)
    start, *_, end = evaluations(run.run_dir)
    assert steps[-1]["actor/ptx_loss"] < 0.6 * steps[0]["actor/ptx_loss"]
    assert start["eval/sampled_reward"] < 0.25
    assert end["eval/sampled_reward"] >= start["eval/sampled_reward"] + 0.2
