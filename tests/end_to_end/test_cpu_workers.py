"""The advantages, and a reward function of a user's, on CPU workers without a model. These workers restart alone, and their state
is part of the checkpoint: the final weights equal those of an undisturbed run without such workers.

eta = 0, greedy decoding and one response a prompt make the runs deterministic, as in test_resume.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from whole_runs import DETERMINISTIC, LEARNABLE, Gate, resumed

from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.replays import final_weights

pytestmark = pytest.mark.timeout(900)

STEPS, BATCH, LIMIT_S = 9, 4, 300.0
GROUP = ("model_worker/1", "model_worker/2")
SETTINGS = (
    *DETERMINISTIC,
    Gate.OVERRIDE,
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.ppo.advantage_norm=batch",
    "train.ppo.kl_coef=0.5",
    "train.ppo.kl_adaptive=true",
    "train.ppo.kl_target=0.001",
    "train.ppo.kl_horizon=50",
    "checkpoint.every_steps=1",
)
SHORTER = """\
import numpy as np

from asyncrl.dataflow.mfc import mfc


@mfc(input_keys=["packed_input_ids", "loss_mask"], output_keys=["dense_rewards"])
def shorter(engine, sample, train):
    count = engine.all_reduce_sum([float(sample.num_ids)])[0]
    return sample.derive({"dense_rewards": np.float32(-0.1 / count) * sample.data["loss_mask"]})
"""


def pids(run: RunHandle, names: tuple[str, ...]) -> dict[str, int]:
    return {name: run.worker(name).pid for name in names}


def after(run: RunHandle, step: int) -> None:
    run.wait_until(lambda: len(train_steps(run.run_dir)) >= step, f"step {step}", LIMIT_S)


def test_they_restart_alone_and_the_weights_are_those_of_a_run_without_them(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path, num_prompts=STEPS * BATCH)
    gate = Gate(config, BATCH, LEARNABLE)
    (tmp_path / "shorter.py").write_text(SHORTER)
    settings = (*SETTINGS, f"train.mfcs=[{tmp_path / 'shorter.py'}:shorter]")
    with launch(config, *settings, "allocation=transformers.d1+d1", "trial=whole") as whole:
        assert whole.wait(LIMIT_S) == 0, whole.output()

    gate.let(3)
    there = "allocation=transformers.d1+d1+advantages:cpu2,shorter:cpu1"
    with launch(config, *settings, there, "trial=cpu") as run:
        after(run, 3)
        before, others = pids(run, GROUP), pids(run, ("master/0", "model_worker/0", "generation_server/0"))
        os.kill(before["model_worker/1"], signal.SIGKILL)
        gate.let(6)
        after(run, 6)
        assert pids(run, tuple(others)) == others, "they restarted alone"
        assert not set(pids(run, GROUP).values()) & set(before.values())
        os.kill(run.popen.pid, signal.SIGINT)
        assert run.wait(LIMIT_S) != 0
        gate.open()
        with resumed(run.run_dir) as again:
            assert again.wait(LIMIT_S) == 0, again.output()
        found = audit(run.run_dir)
        assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
        assert_nothing_left(run.run_dir)

    one, other = train_steps(whole.run_dir), train_steps(run.run_dir)
    coefficients = [step["kl/coef"] for step in one]
    assert len(set(coefficients)) == STEPS, "the coefficient adapts in every step"
    assert [step["kl/coef"] for step in other] == pytest.approx(coefficients, rel=1e-6)
    assert [step["reward/dense_mean"] for step in other] == pytest.approx([s["reward/dense_mean"] for s in one])
    weights = final_weights(run.run_dir)
    for name, tensor in final_weights(whole.run_dir).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
