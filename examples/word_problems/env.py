"""An environment of two steps: whoever is wrong is told in which direction, and may try once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from answers import final_number  # of this folder: asyncrl puts it on sys.path

from asyncrl.rewards.reward import Completion
from asyncrl.rollout.agent import RewardEnv, StepResult

SECOND_TRY = 0.5  # what a right second answer is worth


class TwoTries(RewardEnv):
    """Pays 1 for a right answer, half of it for a right one after the hint. Each group member plays a fork of it."""

    tries = 0

    async def reset(self) -> tuple[str, dict[str, Any]]:
        self.tries = 0
        return await super().reset()

    async def step(self, action: Completion | Sequence[Completion]) -> StepResult:
        """The answer as text comes in, what the policy reads next goes out: (observation, reward, terminated, truncated, info)."""
        assert isinstance(action, Completion)  # the multi-step agent plays each group member by itself
        _, reward, _, _, info = await super().step(action)  # asks the task's reward function
        self.tries += 1
        if self.tries == 2:
            return None, SECOND_TRY * reward, True, False, info
        if reward == 1.0:
            return None, reward, True, False, info
        return hint(action.text, self.prompt.answer), 0.0, False, False, info


def hint(completion: str, answer: str) -> str:
    """What a wrong answer is told."""
    found, right = final_number(completion), final_number(f"#### {answer}")
    if found is None or right is None or found == right:
        return "There is no answer. Give it after ####."
    return "No, it is more." if found < right else "No, it is less."
