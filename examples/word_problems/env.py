"""An environment of two steps: after a wrong answer the model gets a hint, and may try once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from answers import final_number  # in this folder, which asyncrl puts on sys.path

from asyncrl.rewards.reward import Completion
from asyncrl.rollout.agent import RewardEnv, StepResult

SECOND_TRY = 0.5  # reward of a right second answer


class TwoTries(RewardEnv):
    """Gives reward 1 for a right answer, and half of it for a right answer after the hint. Each group member plays in its own fork
    of the environment."""

    tries = 0

    async def reset(self) -> tuple[str, dict[str, Any]]:
        self.tries = 0
        return await super().reset()

    async def step(self, action: Completion | Sequence[Completion]) -> StepResult:
        """Take an answer. Returns (observation, reward, terminated, truncated, info); the policy reads the observation next."""
        assert isinstance(action, Completion)  # the multi-step agent plays each group member separately
        _, reward, _, _, info = await super().step(action)  # calls the task's reward function
        self.tries += 1
        if self.tries == 2:
            return None, SECOND_TRY * reward, True, False, info
        if reward == 1.0:
            return None, reward, True, False, info
        return hint(action.text, self.prompt.answer), 0.0, False, False, info


def hint(completion: str, answer: str) -> str:
    """The hint after a wrong answer."""
    found, right = final_number(completion), final_number(f"#### {answer}")
    if found is None or right is None or found == right:
        return "There is no answer. Give it after ####."
    return "No, it is more." if found < right else "No, it is less."
