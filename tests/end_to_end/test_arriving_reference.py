"""A detached reference processes groups as they arrive. The weights equal those of a run that processes each batch in its step.

eta = 0, greedy decoding and one response a prompt make the runs deterministic, as in test_resume.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import DETERMINISTIC, LEARNABLE

from asyncrl.testing.runs import launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.replays import final_weights

STEPS, BATCH, LIMIT_S = 9, 6, 300.0
SETTINGS = [
    *DETERMINISTIC,
    "prompts.shuffle=false",
    "allocation=transformers.d1+d1+ref_inf:d2",
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.ppo.advantage_norm=batch",
    "train.ppo.kl_coef=0.5",
    "train.ref.update_interval=2",
    "train.ref.update_share=0.5",
]
_REWARD = f"""\
import time

def reward(prompt, completion, answer):
    time.sleep(0.1 * (int(prompt) % 3))  # groups arrive one after another
    return {LEARNABLE}
"""


@pytest.mark.release
def test_the_update_is_that_of_a_run_that_waits_for_the_batch(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path, num_prompts=STEPS * BATCH)
    (tmp_path / "reward.py").write_text(_REWARD)
    weights, steps = {}, {}
    for arriving in ("true", "false"):
        with launch(config, *SETTINGS, f"train.arriving_inference={arriving}", f"trial={arriving}") as run:
            assert run.wait(LIMIT_S) == 0, run.output()
            found = audit(run.run_dir)
            assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
            weights[arriving] = final_weights(run.run_dir)
            steps[arriving] = train_steps(run.run_dir)
    shares = [step["arriving/ref_inf_share"] for step in steps["true"]]
    assert max(shares) > 0.5, f"hardly a group was processed before its step: {shares}"
    for key in ("reward/mean", "batch/num_generated_tokens"):
        assert [step[key] for step in steps["true"]] == [step[key] for step in steps["false"]], key
    for name, expected in weights["false"].items():
        assert (weights["true"][name] - expected).abs().max() <= 1e-5, name
    assert abs(steps["true"][-1]["kl/sequence_mean"]) > 1e-4, "the reference is another model than the actor by then"
