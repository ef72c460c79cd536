"""Runs with a train step of the user's (train.step)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from whole_runs import DETERMINISTIC, LEARNABLE, assert_each_prompt_trained_once, resumed

from asyncrl.testing.runs import journal, launch, make_tiny_run, train_steps
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


GENERATES = """\
async def step(models, prompts):
    batch = await models.actor.generate(prompts.next())
    for function in models.functions:
        batch = batch.union(function(batch))
    await batch
"""
# Orders of two sizes, whose responses have two lengths. It kills the master in steps 3 and 4, and waits in step 6 for a new manager
UNEVEN = """\
import asyncio
import os
from pathlib import Path


def kill_at(place):
    file = Path(__file__).with_name("kill_" + place)
    if file.exists():
        file.unlink()
        os.kill(os.getpid(), 9)


async def step(models, prompts):
    first = prompts.step % 2 == 1
    if prompts.step == 3:
        kill_at("before")
    while prompts.step == 6 and not Path(__file__).with_name("go").exists():
        await asyncio.sleep(0.05)
    batch = await models.actor.generate(
        prompts.next(4 if first else 2), n=2 if first else 3, sampling={"max_new_tokens": 3 if first else 5}
    )
    if prompts.step == 4:
        kill_at("after")
    assert [len(group) for group in batch.rewards] == ([2] * 4 if first else [3] * 2), batch.rewards
    longest = max(length for group in batch.lengths for length in group)
    assert longest <= 4 + (3 if first else 5), batch.lengths
    for function in models.functions:
        batch = batch.union(function(batch))
    await batch
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
    (tmp_path / "generates.py").write_text(GENERATES)
    own = {"own": [f"train.step={tmp_path}/step.py:step"], "generates": [f"train.step={tmp_path}/generates.py:step"]}
    for name, settings in {"shipped": [], **own}.items():
        with launch(config, *overrides(tmp_path), f"trial={name}", *settings) as run:
            assert run.wait(LIMIT_S) == 0, run.output()
            weights[name] = final_weights(run.run_dir)
            assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
            found = audit(run.run_dir)
            assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
            metrics[name] = [set(step) for step in train_steps(run.run_dir)]
    for changed in own:
        assert metrics["shipped"] == metrics[changed]  # the same metrics
        assert weights["shipped"].keys() == weights[changed].keys()
        for name, tensor in weights["shipped"].items():
            torch.testing.assert_close(weights[changed][name], tensor, rtol=0, atol=1e-5)


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


def test_a_step_that_generates_goes_on_after_kills_in_the_middle_of_its_orders(config: Path, tmp_path: Path) -> None:
    """The master is killed before an order and after one, and the manager before an order."""
    (tmp_path / "step.py").write_text(UNEVEN)
    for place in ("before", "after"):
        (tmp_path / f"kill_{place}").touch()
    settings = (
        "allocation=transformers.d1@0+d1@0",  # shared: generation and training take turns
        "manager.max_head_offpolicyness=0",
        f"train.step={tmp_path}/step.py:step",
        "train.batch_size=4",
        "train.num_epochs=2",
        "train.max_steps=12",
        "rollout.group_size=3",
        "rollout.sampling.max_new_tokens=5",
        "checkpoint.every_steps=1",
        "manager.lease_s=5",
    )
    with launch(config, *settings, f"rollout.tasks.default.reward={tmp_path}/reward.py:reward") as run:
        run.wait_for_step(5, LIMIT_S)
        run.worker("gserver_manager/0").kill()
        (tmp_path / "go").touch()
        assert run.wait(LIMIT_S) == 0, run.output()
    assert not list(tmp_path.glob("kill_*"))
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, 12)
    # Of a step that was trained again, the event of the newest attempt
    steps = {event["step"]: event for event in journal(run.run_dir) if event["event"] == "trained"}
    prompts = [tuple(group["prompt"]) for step in sorted(steps) for group in steps[step]["groups"]]
    every = [(epoch, position) for epoch in range(2) for position in range(STEPS * BATCH)]
    assert sorted(prompts) == every[: len(prompts)]
    assert [len(steps[step]["groups"]) for step in sorted(steps)] == [4, 2] * 6
    ages = [step["offpolicy/head_max"] for step in train_steps(run.run_dir)]
    assert set(ages) == {0.0}
