"""Environments: what a policy's responses meet. gym's reset and step, async.

An environment belongs to one prompt (the worker makes it with the prompt and the task's reward). The prompt itself is the
first observation. Agents that play the members of a group apart take a `fork` for each.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from asyncrl.data.prompts import Prompt
from asyncrl.rewards.reward import Completion, Reward

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info


class Env(ABC):
    """One problem. Subclasses take prompt and reward (None where the task names no reward) and the task's env_args by keyword."""

    def __init__(self, *, prompt: Prompt, reward: Reward | None) -> None:
        self.prompt = prompt
        self.reward = reward

    @abstractmethod
    async def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begin. Gives (observation, info)."""

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Take a Completion. Gives (observation, reward, terminated, truncated, info); an observation is text, or None."""

    def fork(self) -> Env:
        """An environment of the same problem, not yet reset, that shares no progress. Override if __init__ makes mutable state."""
        return copy.copy(self)

    async def close(self) -> None:  # noqa: B027
        """Release what the environment holds. Called once, however the rollout ended."""


class RewardEnv(Env):
    """The environment of one step around a reward function. A list of completions is judged in one call, and gives a list."""

    def __init__(self, *, prompt: Prompt, reward: Reward | None) -> None:
        super().__init__(prompt=prompt, reward=reward)
        if reward is None:
            raise ValueError(
                f"task {prompt.task!r} has no reward; set rollout.tasks.<name>.reward, or an env of its own"
            )
        self._reward = reward

    async def reset(self) -> tuple[str, dict[str, Any]]:
        return self.prompt.text, {}

    async def step(self, action: Completion | Sequence[Completion]) -> StepResult:
        if isinstance(action, Completion):
            (value,) = await self._reward.score(self.prompt, [action])
            return None, value, True, False, {}
        return None, await self._reward.score(self.prompt, action), True, False, {}


class UnjudgedEnv(Env):
    """The environment of an agent that gives its rewards itself, where the config names neither reward nor env."""

    async def reset(self) -> tuple[str, dict[str, Any]]:
        return self.prompt.text, {}

    async def step(self, action: Any) -> StepResult:
        raise ValueError(
            f"the agent of task {self.prompt.task!r} leaves the reward to the task, which has neither reward nor env; set "
            "rollout.tasks.<name>.reward, or return a number from chat"
        )


class FeedbackEnv(RewardEnv):
    """Asks again until the reward is good enough: several steps around a reward function.

    A response with reward >= success ends the episode, and so does one that was cut; after any other the policy reads
    `feedback` and tries again, max_turns times in all (give the agent no fewer). Only the last turn is paid.
    """

    def __init__(
        self, *, prompt: Prompt, reward: Reward | None, feedback: str, success: float = 1.0, max_turns: int = 4
    ) -> None:
        super().__init__(prompt=prompt, reward=reward)
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        self._feedback = feedback
        self._success = success
        self._max_turns = max_turns
        self._turns = 0

    async def reset(self) -> tuple[str, dict[str, Any]]:
        self._turns = 0
        return await super().reset()

    async def step(self, action: Completion | Sequence[Completion]) -> StepResult:
        if not isinstance(action, Completion):
            raise TypeError("FeedbackEnv takes one completion a step; fork it for each member of a group")
        _, value, _, _, info = await super().step(action)
        self._turns += 1
        if value >= self._success:
            return None, value, True, False, info
        if self._turns >= self._max_turns or not action.finished:
            return None, value, False, True, info
        return self._feedback, 0.0, False, False, info
