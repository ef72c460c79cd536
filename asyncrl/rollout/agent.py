"""Environments, which judge a policy's responses, and agents, which turn a prompt into a trajectory.

An environment has gym's reset and step as async methods. It belongs to one prompt: the worker makes it with the prompt and the
task's reward. The prompt is the first observation. An agent that plays the members of a group separately uses one `fork` for each.

An agent puts an Observation (the inputs that the policy continues) into obs_queue and gets the responses, in the same order, from
act_queue; the worker (rollouts.py) generates them in between. One agent object serves all prompts of a task at the same time, so
the state of one rollout belongs in `collect_trajectory`, not on the object. chat_agent.py has agents written for OpenAI's client.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import ChatTemplate, TemplateRefused, encode
from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.reward import Completion, Reward
from asyncrl.rewards.trajectory import Episode, Response, build_sample

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info


class Env(ABC):
    """One problem. Subclasses take prompt, reward (None if the task has no reward) and the task's env_args by keyword."""

    def __init__(self, *, prompt: Prompt, reward: Reward | None) -> None:
        self.prompt = prompt
        self.reward = reward

    @abstractmethod
    async def reset(self) -> tuple[Any, dict[str, Any]]:
        """Start an episode. Returns (observation, info)."""

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Take a Completion. Returns (observation, reward, terminated, truncated, info); the observation is text or None.

        The reward is a number, or a Score (rewards/score.py), which has the answer, too. With train.dense_rewards it may also be a
        sequence with one number for each of the action's token_ids.
        """

    def fork(self) -> Env:
        """A new environment of the same problem, not yet reset. Its progress is independent of this one's.

        The default makes a shallow copy. Override it if `__init__` creates mutable state.
        """
        return copy.copy(self)

    async def close(self) -> None:  # noqa: B027
        """Release the environment's resources. Called exactly once, also if the rollout failed."""


class RewardEnv(Env):
    """A one-step environment around a reward function. A step with a list of completions returns the list of their rewards."""

    def __init__(self, *, prompt: Prompt, reward: Reward | None) -> None:
        super().__init__(prompt=prompt, reward=reward)
        if reward is None:
            raise ValueError(
                f"task {prompt.task!r} has no reward; set rollout.tasks.<name>.reward or rollout.tasks.<name>.env"
            )
        self._reward = reward

    async def reset(self) -> tuple[str, dict[str, Any]]:
        return self.prompt.plain_text, {}

    async def step(self, action: Completion | Sequence[Completion]) -> StepResult:
        if isinstance(action, Completion):
            (value,) = await self._reward.score(self.prompt, [action])
            return None, value, True, False, {}
        return None, await self._reward.score(self.prompt, action), True, False, {}


class UnjudgedEnv(Env):
    """The environment of an agent that returns its own rewards, if the config has neither reward nor env."""

    async def reset(self) -> tuple[str, dict[str, Any]]:
        return self.prompt.plain_text, {}

    async def step(self, action: Any) -> StepResult:
        raise ValueError(
            f"the agent of task {self.prompt.task!r} returned no reward, and the task has neither reward nor env; set "
            "rollout.tasks.<name>.reward, or return a number from chat"
        )


class FeedbackEnv(RewardEnv):
    """A multi-step environment around a reward function: the policy tries again until the reward is high enough.

    A response with reward >= success ends the episode, and so does a response that was cut. After any other response the policy
    reads `feedback` and tries again, up to max_turns responses in all (the agent's max_turns must not be lower). Only the last
    turn is rewarded.
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
            raise TypeError("FeedbackEnv takes one completion per step; fork it for each member of a group")
        _, value, _, _, info = await super().step(action)
        self._turns += 1
        if value >= self._success:
            return None, value, True, False, info
        if self._turns >= self._max_turns or not action.finished:
            return None, value, False, True, info
        return self._feedback, 0.0, False, False, info


@dataclass(frozen=True, slots=True)
class Observation:
    """Inputs that the policy continues: one response for each of `inputs` (n times the same prompt for a group of n)."""

    inputs: Sequence[list[int]]
    sampling: SamplingConfig


ObsQueue = asyncio.Queue[Observation]
ActQueue = asyncio.Queue[list[Response]]


class Agent(ABC):
    """Turns prompts into trajectories. Subclasses take tokenizer, sampling, group_size and the task's agent_args by keyword."""

    def __init__(self, *, tokenizer: Any, sampling: SamplingConfig, group_size: int) -> None:
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.group_size = group_size  # responses per prompt

    @abstractmethod
    async def collect_trajectory(
        self, prompt: Prompt, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        """The trajectory of one prompt: a list with one sample of one group, or an empty list to reject the prompt.

        Cancelled when the ticket is revoked, and after rollout.rollout_timeout_s. Every exception except RolloutEnded rejects the
        prompt as `agent_error`.
        """

    async def generate(self, inputs: Sequence[list[int]], obs_queue: ObsQueue, act_queue: ActQueue) -> list[Response]:
        """Ask the policy to continue each input, and wait for all responses."""
        await obs_queue.put(Observation(inputs, self.sampling))
        return await act_queue.get()

    def decode(self, response: Response) -> Completion:
        """The response as text, without special tokens."""
        text = self.tokenizer.decode(response.output_ids, skip_special_tokens=True)
        return Completion(text, response.finished, tuple(response.output_ids))


class SingleStepAgent(Agent):
    """One response per group member; the environment judges the whole group in one step."""

    async def collect_trajectory(
        self, prompt: Prompt, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        await env.reset()
        responses = await self.generate([prompt.input_ids] * self.group_size, obs_queue, act_queue)
        _, rewards, _, _, _ = await env.step([self.decode(response) for response in responses])
        episodes = []
        for response, reward in zip(responses, rewards, strict=True):
            episode = Episode(prompt.input_ids)
            episode.add_response(response)
            episode.add_reward(reward)
            episodes.append(episode)
        return [build_sample(prompt.prompt_id, episodes)]


class MultiStepAgent(Agent):
    """Several turns: the environment's observation is appended to each response, and the policy continues.

    Every group member plays its own fork of the environment. A member's reward is the sum over its turns t = 0, 1, ... of
    reward_t * turn_discount^t. With turn_rewards each of these is at the last token of its turn instead, so that GAE and the sum of
    future rewards (train.ppo.advantage_norm other than group, no baseline) credit a turn only with its own and later rewards.
    An episode ends when the environment terminates or truncates it, when a response is cut, or after max_turns.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        sampling: SamplingConfig,
        group_size: int,
        max_turns: int = 4,
        turn_discount: float = 1.0,
        turn_rewards: bool = False,  # a turn's reward is at its last token; needs train.dense_rewards
        feedback_template: str = "{}",  # the text that the policy reads; {} is the observation
        feedback_role: str = "",  # alternative: the observation is a turn of this role (e.g. user) in the chat template
        chat_template_args: Mapping[str, Any] | None = None,  # variables of the template beside those of the prompts
    ) -> None:
        super().__init__(tokenizer=tokenizer, sampling=sampling, group_size=group_size)
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        if "{}" not in feedback_template:
            raise ValueError(f"feedback_template is {feedback_template!r}; it must contain {{}} for the observation")
        if feedback_role and feedback_template != "{}":
            raise ValueError(
                f"feedback_role={feedback_role!r} and feedback_template={feedback_template!r}: set only one of them"
            )
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.turn_rewards = turn_rewards
        self.feedback_template = feedback_template
        self.feedback_role = feedback_role
        self.chat_template_args = dict(chat_template_args or {})
        if feedback_role and not tokenizer.chat_template:
            raise ValueError(
                f"feedback_role={feedback_role!r}: the tokenizer has no chat template; use feedback_template"
            )
        try:
            self.feedback_text("a sample observation")
        except TemplateRefused as error:  # at the start, not in rollouts
            raise ValueError(f"feedback_role={feedback_role!r}: {error}; use feedback_template") from error

    async def collect_trajectory(
        self, prompt: Prompt, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        episodes = [Episode(prompt.input_ids) for _ in range(self.group_size)]
        envs = [env.fork() for _ in episodes]
        try:
            await asyncio.gather(*(member.reset() for member in envs))
            active = list(range(self.group_size))
            for turn in range(self.max_turns):
                responses = await self.generate([list(episodes[i].input_ids) for i in active], obs_queue, act_queue)
                goes_on = await asyncio.gather(
                    *(
                        self._take_turn(turn, prompt, episodes[i], envs[i], response)
                        for i, response in zip(active, responses, strict=True)
                    )
                )
                active = [i for i, more in zip(active, goes_on, strict=True) if more]
                if not active:
                    break
        finally:
            await asyncio.gather(*(member.close() for member in envs))
        return [build_sample(prompt.prompt_id, episodes)]

    async def _take_turn(self, turn: int, prompt: Prompt, episode: Episode, env: Env, response: Response) -> bool:
        """Play one member's turn. Returns True if the observation was appended and another turn follows."""
        episode.add_response(response)
        observation, reward, terminated, truncated, _ = await env.step(self.decode(response))
        episode.note_answer(reward)
        factor = self.turn_discount**turn
        scaled = float(reward) * factor if np.ndim(reward) == 0 else [float(value) * factor for value in reward]
        if self.turn_rewards:
            episode.add_turn_reward(scaled)
        else:
            episode.add_reward(scaled)
        if terminated or truncated or not response.finished or turn + 1 == self.max_turns:
            return False
        observed = "" if observation is None else str(observation)
        text = self.feedback_text(observed, prompt.template, response.output_ids[-1])
        episode.add_observation(encode(self.tokenizer, text))
        return True

    def feedback_text(
        self, observation: str, template: ChatTemplate | None = None, stop_token: int | None = None
    ) -> str:
        """The text that is appended between a response and the next one. template: that of the prompt, None if it has none.
        stop_token: the token that ended the response; None: EOS."""
        if not self.feedback_role:
            return self.feedback_template.replace("{}", observation)
        template = template or ChatTemplate(self.tokenizer, {})
        stop_token = self.tokenizer.eos_token_id if stop_token is None else stop_token
        return template.with_arguments(self.chat_template_args).turn_text(
            self.feedback_role, observation, stop_token=stop_token
        )


def chat_turn(
    tokenizer: Any, role: str, content: str, template_args: Mapping[str, Any], *, stop_token: int | None = None
) -> str:
    """Return the text that a chat template writes between a response and the next one, with a message of this role and content
    between them.

    The token that ended the first response is not included, because the response contains it. stop_token: this token; None: EOS.
    Raises ValueError if the template does not show the message.
    """
    template = ChatTemplate(tokenizer, template_args)
    return template.turn_text(role, content, stop_token=tokenizer.eos_token_id if stop_token is None else stop_token)
