"""The examples of train.step: each is made in a folder of its own, and learns."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whole_runs import ROOT

from asyncrl.testing.runs import launch, train_steps
from asyncrl.weights.lineage import audit

pytestmark = pytest.mark.timeout(600)

# example -> metric -> (highest mean of the first five steps, lowest mean of the last ten)
LEARNS = {
    "grpo": {"reward/mean": (0.2, 0.6)},
    "ppo_critic": {"reward/mean": (-0.2, 0.45), "critic/explained_variance": (0.1, 0.15)},
    "self_play": {"game/best_moves": (0.6, 0.85), "game/best_replies": (0.7, 0.85)},
    "verl_loop": {"reward/mean": (-0.2, 0.5)},
    "trained_judge": {"reward/mean": (0.5, 0.7), "judge/accuracy": (0.8, 0.85)},
}

MODELS = {  # example -> its trained models, as saved at the end
    "grpo": ["final"],
    "ppo_critic": ["final", "final-critic"],
    "self_play": ["final", "final-opponent"],
    "verl_loop": ["final", "final-critic"],
    "trained_judge": ["final", "final-judge"],
}


@pytest.mark.parametrize("example", LEARNS)
def test_it_learns(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("step.py", "config.yaml"):
        shutil.copy(ROOT / "examples" / example / file, tmp_path)
    monkeypatch.chdir(tmp_path)  # paths in the config are relative to it
    subprocess.run([sys.executable, "step.py"], check=True, timeout=300)
    with launch("config.yaml", f"fileroot={tmp_path}/runs", "weights.fsync=false") as run:
        assert run.wait(400) == 0, run.output()
    steps = train_steps(run.run_dir)
    for metric, (first, last) in LEARNS[example].items():
        values = [step[metric] for step in steps]
        assert np.mean(values[:5]) < first, metric
        assert np.mean(values[-10:]) > last, metric
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, len(steps))
    for model in MODELS[example]:
        assert (run.run_dir / "checkpoints" / model / "model.safetensors").is_file()
