"""Runs whose model has linear attention: the logprobs that the embedded engine samples are the trainer's, and it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import assert_each_prompt_trained_once, launch_sorter

from asyncrl.testing.runs import evaluations, launch, make_tiny_run, train_steps

STEPS, LIMIT_S = 4, 200.0


@pytest.mark.timeout(300)
def test_the_trainer_recomputes_the_logprobs_of_the_samples(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path / "task", architecture="qwen3_5_text", num_layers=3)
    synchronous = "manager.max_head_offpolicyness=0"  # each sample has the version that its step trains
    with launch(config, synchronous, f"train.max_steps={STEPS}", f"fileroot={tmp_path}") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert abs(step["actor/behav_approx_kl"]) < 1e-6  # the mean difference of the logprobs


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_quickstart_learns_with_a_hybrid(hybrid_sorter: Path, tmp_path: Path) -> None:
    with launch_sorter(hybrid_sorter, tmp_path) as run:
        assert run.wait(6 * LIMIT_S) == 0, run.output()
    start, *_, end = evaluations(run.run_dir)
    assert start["eval/greedy_reward"] < 0.6
    assert end["eval/greedy_reward"] >= 0.9
    assert_each_prompt_trained_once(run.run_dir, 60, 64)
    assert max(step["offpolicy/head_max"] for step in train_steps(run.run_dir)) > 0
