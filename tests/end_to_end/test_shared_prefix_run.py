"""Training on the committed recording with prompts that are computed once for their group: the same weights as without."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_runs import ROOT

from asyncrl.testing.runs import launch, train_steps
from tests.support.replays import final_weights, largest_difference

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

ORACLE = ROOT / "tests" / "oracle"
LIMIT_S = 250.0
TOLERANCE = 1e-5


def test_sharing_prompts_gives_the_weights_of_training_without(tmp_path: Path) -> None:
    weights, shared = {}, {}
    for sharing in ("on", "off"):
        with launch(
            ORACLE / "runs" / "group.yaml",
            f"fileroot={tmp_path / sharing}",
            f"model_path={ORACLE / 'model'}",
            f"prompts.path={ORACLE / 'prompts.jsonl'}",
            f"rollout.tasks.default.reward={ORACLE / 'reward.py'}:reward",
            f"replay.path={ORACLE / 'recording'}",
            f"train.share_prefix={sharing}",
        ) as run:
            assert run.wait(LIMIT_S) == 0, run.output()
        weights[sharing] = final_weights(run.run_dir)
        shared[sharing] = [step.get("shared_tokens/actor_train", 0.0) for step in train_steps(run.run_dir)]
    assert len(shared["on"]) == 10
    assert min(shared["on"]) > 0.1  # of the tokens
    assert max(shared["off"]) == 0
    assert largest_difference(weights["on"], weights["off"]) < TOLERANCE
