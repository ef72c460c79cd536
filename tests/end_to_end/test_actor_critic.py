"""PPO with a critic and a reference model reaches the quickstart's rewards. The limits count steps, not time.

Actor and critic each use two pipeline stages and two replicas. The reference has a worker of its own.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from whole_runs import ROOT, assert_each_prompt_trained_once, launch_sorter

from asyncrl.testing.runs import RunHandle, assert_nothing_left, evaluations, train_steps

STEPS, BATCH = 36, 64  # the config has 60 steps; the reward limits are the quickstart's, which also runs 60

pytestmark = [pytest.mark.timeout(1800), pytest.mark.release]


@pytest.fixture(scope="module")
def run(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    config = ROOT / "configs" / "actor_critic_cpu.yaml"
    with launch_sorter(
        sorter, tmp_path_factory.mktemp("actor_critic"), f"train.max_steps={STEPS}", config=config
    ) as run:
        assert run.wait(1500) == 0, run.output()
        assert_nothing_left(run.run_dir)
        yield run


def test_reward_climbs(run: RunHandle) -> None:
    start, *_, end = evaluations(run.run_dir)
    assert start["eval/sampled_reward"] < 0.25
    assert end["eval/sampled_reward"] >= 0.80
    assert end["eval/greedy_reward"] >= 0.93
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)


def test_the_critic_learns_what_to_expect(run: RunHandle) -> None:
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    assert sum(step["critic/explained_variance"] for step in steps[-10:]) / 10 > 0.1
    for step in steps:
        assert math.isfinite(step["kl/token_mean"])
        assert step["actor/skipped_steps"] == step["critic/skipped_steps"] == 0
    assert steps[-1]["kl/sequence_mean"] > steps[0]["kl/sequence_mean"]  # the actor moves away from the reference


def test_data_moved_between_workers_and_both_models_are_saved(run: RunHandle) -> None:
    assert all(step["redistribution/bytes"] > 0 for step in train_steps(run.run_dir))
    AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoints" / "final")
    critic = AutoModelForTokenClassification.from_pretrained(run.run_dir / "checkpoints" / "final-critic")
    assert critic.score.out_features == 1
