"""A run that learns from rewards of tokens only: its environment gives each token of a response a reward, and no other reward."""

from pathlib import Path

import pytest
from whole_runs import launch_sorter

from asyncrl.testing.runs import evaluations, train_steps

STEPS = 20

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]

# A token earns 1/7 if it stands where the right answer has it. So the seven tokens of a right response earn 1 in all.
ENVIRONMENT = """
from asyncrl.rollout.agent import Env


class Digits(Env):
    async def reset(self):
        return self.prompt.text, {}

    async def step(self, actions):
        return None, [self.rewards(action) for action in actions], True, False, {}

    def rewards(self, action):
        right = [*self.prompt.answer, None]  # EOS, which has no text, is right after the last digit
        said = [*action.text, *([None] if action.finished else [])]
        assert len(said) == len(action.token_ids)
        found = [i < len(right) and said[i] == right[i] for i in range(len(said))]
        return [float(hit) / len(right) for hit in found]
"""


def test_a_run_learns_from_rewards_of_tokens(sorter: Path, tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(ENVIRONMENT)
    with launch_sorter(
        sorter,
        tmp_path,
        f"rollout.tasks.default.env={tmp_path / 'digits.py'}:Digits",
        "train.dense_rewards=true",
        "train.algorithm=reinforce_pp",  # each token's advantage comes from its own and later rewards
        f"train.max_steps={STEPS}",
        f"eval.every_steps={STEPS}",
        "allocation=transformers.d1+d1",
    ) as run:
        assert run.wait(600) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert step["reward/dense_mean"] == pytest.approx(step["reward/mean"], abs=1e-5)  # there is no other reward
    start, *_, end = evaluations(run.run_dir)
    assert start["eval/sampled_reward"] < 0.6
    assert end["eval/sampled_reward"] >= 0.8
    assert end["eval/greedy_reward"] >= 0.9
