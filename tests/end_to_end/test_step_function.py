"""Runs with a train step of the user's (train.step)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from whole_runs import DETERMINISTIC, LEARNABLE, assert_each_prompt_trained_once, resumed

from asyncrl.testing.runs import launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.replays import final_weights

pytestmark = pytest.mark.timeout(600)

STEPS, BATCH, LIMIT_S = 4, 6, 300.0
SETTINGS = (
    *DETERMINISTIC,
    "allocation=transformers.d1+d2",
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.ppo.advantage_norm=batch",
    "train.ppo.kl_coef=0.5",
    "checkpoint.every_steps=1",
)
SAME = """\
async def step(models, batch):
    halves = [half.union(models.ref.inf(half)) for half in batch.chunk(2)]
    batch = type(batch).concat(halves).union(models.actor.inf(batch))
    batch = batch.union(models.actor.advantages(batch))
    for read, known in zip(await batch.read("rewards"), batch.rewards, strict=True):
        assert abs(read[0][0] - known[0]) < 1e-6
    advantages = await batch.chunk(3)[1].read("advantages")
    assert [len(group[0]) for group in advantages] == [lengths[0] for lengths in batch.lengths[2:4]]
    await models.actor.train(batch)
"""
RAISES = """\
from pathlib import Path

done = []


async def step(models, batch):
    for function in models.functions:
        batch = batch.union(function(batch))
    await batch
    done.append(batch)
    if len(done) == 3 and Path(__file__).with_name("broken").exists():
        raise ValueError("out of ideas")
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    config = make_tiny_run(tmp_path, num_prompts=STEPS * BATCH)
    (tmp_path / "reward.py").write_text(f"def reward(prompt, completion, answer):\n    return {LEARNABLE}\n")
    (tmp_path / "step.py").write_text(SAME)
    return config


def overrides(folder: Path) -> list[str]:
    return [*SETTINGS, f"rollout.tasks.default.reward={folder / 'reward.py'}:reward"]


def test_its_weights_are_those_of_the_shipped_step(config: Path, tmp_path: Path) -> None:
    weights, metrics = {}, {}
    for name, own in (("shipped", []), ("own", [f"train.step={tmp_path / 'step.py'}:step"])):
        with launch(config, *overrides(tmp_path), f"trial={name}", *own) as run:
            assert run.wait(LIMIT_S) == 0, run.output()
            weights[name] = final_weights(run.run_dir)
            assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
            found = audit(run.run_dir)
            assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
            metrics[name] = [set(step) for step in train_steps(run.run_dir)]
    assert metrics["shipped"] == metrics["own"]  # the same metrics
    assert weights["shipped"].keys() == weights["own"].keys()
    for name, tensor in weights["shipped"].items():
        torch.testing.assert_close(weights["own"][name], tensor, rtol=0, atol=1e-5)


def test_an_error_ends_the_run_with_its_line_and_the_run_can_be_resumed(config: Path, tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(RAISES)
    (tmp_path / "broken").touch()
    with launch(config, *overrides(tmp_path), f"train.step={tmp_path / 'step.py'}:step") as run:
        assert run.wait(LIMIT_S) != 0
        assert f"train.step failed at {tmp_path / 'step.py'}:12: ValueError: out of ideas" in run.output()
        folder = run.run_dir
    (tmp_path / "broken").unlink()
    with resumed(folder) as again:
        assert again.wait(LIMIT_S) == 0, again.output()
    found = audit(folder)
    assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
