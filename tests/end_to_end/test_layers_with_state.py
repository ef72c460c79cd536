"""A run whose model has linear attention: the logprobs that the embedded engine samples are the trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.testing.runs import launch, make_tiny_run, train_steps

pytestmark = pytest.mark.timeout(300)

STEPS, LIMIT_S = 4, 200.0


def test_the_trainer_recomputes_the_logprobs_of_the_samples(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path / "task", architecture="qwen3_5_text", num_layers=3)
    synchronous = "manager.max_head_offpolicyness=0"  # each sample has the version that its step trains
    with launch(config, synchronous, f"train.max_steps={STEPS}", f"fileroot={tmp_path}") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert abs(step["actor/behav_approx_kl"]) < 1e-6  # the mean difference of the logprobs
