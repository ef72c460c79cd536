"""Agents: how a prompt becomes a trajectory. They ask for responses through a queue and meet an environment with them.

An agent puts an Observation (what the policy is to continue) into obs_queue and gets the responses, in the same order, from
act_queue; the worker (worker.py) generates them in between. One agent object serves all prompts of a task at the same time,
so what belongs to one rollout lives in `collect_trajectory`, not on the object. Agents written for OpenAI's client are in
chat_agent.py.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.reward import Completion
from asyncrl.rewards.trajectory import Episode, Response, build_sample
from asyncrl.rollout.env import Env


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy is to continue: one response for each of `inputs` (the same prompt n times: a group)."""

    inputs: Sequence[list[int]]
    sampling: SamplingConfig


ObsQueue = asyncio.Queue[Observation]
ActQueue = asyncio.Queue[list[Response]]


class Agent(ABC):
    """Subclasses take tokenizer, sampling and group_size, and the task's agent_args, by keyword."""

    def __init__(self, *, tokenizer: Any, sampling: SamplingConfig, group_size: int) -> None:
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.group_size = group_size  # responses a prompt; 1 in evaluations

    @abstractmethod
    async def collect_trajectory(
        self, prompt: Prompt, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        """The trajectory of one prompt: a list with one sample of one group, or an empty one to reject the prompt.

        Cancelled when the ticket is taken back. Whatever it raises (but RolloutEnded) rejects the prompt as `agent_error`.
        """

    async def generate(self, inputs: Sequence[list[int]], obs_queue: ObsQueue, act_queue: ActQueue) -> list[Response]:
        """Ask the policy to continue each of the inputs, and wait for all."""
        await obs_queue.put(Observation(inputs, self.sampling))
        return await act_queue.get()

    def decode(self, response: Response) -> Completion:
        """The response as text, without special tokens."""
        return Completion(self.tokenizer.decode(response.output_ids, skip_special_tokens=True), response.finished)


class SingleStepAgent(Agent):
    """One response a group member; the environment judges the whole group in one step."""

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
            episode.reward = float(reward)
            episodes.append(episode)
        return [build_sample(prompt.prompt_id, episodes)]


class MultiStepAgent(Agent):
    """Several turns: what the environment says to a response is appended, and the policy continues.

    Every group member plays a fork of the environment. Its reward is the sum of what its turns were paid, turn t times
    turn_discount^t. An episode ends when the environment says so, when a response is cut, or after max_turns.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        sampling: SamplingConfig,
        group_size: int,
        max_turns: int = 4,
        turn_discount: float = 1.0,
        feedback_template: str = "{}",  # how an observation is put before the policy
        feedback_role: str = "",  # or: as a turn of this role (say, user) of the tokenizer's chat template
        chat_template_args: Mapping[str, Any] | None = None,  # for that template: those of prompts.chat_template_args
    ) -> None:
        super().__init__(tokenizer=tokenizer, sampling=sampling, group_size=group_size)
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        if "{}" not in feedback_template:
            raise ValueError(f"feedback_template {feedback_template!r} has no {{}}, where the observation goes")
        if feedback_role and feedback_template != "{}":
            raise ValueError(
                f"feedback_role={feedback_role!r} and feedback_template={feedback_template!r}: set one of them"
            )
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.feedback_template = feedback_template
        self.feedback_role = feedback_role
        self.chat_template_args = dict(chat_template_args or {})
        self.feedback_text("tried here, so that a template without this role stops the start and not the rollouts")

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
                        self._take_turn(turn, episodes[i], envs[i], response)
                        for i, response in zip(active, responses, strict=True)
                    )
                )
                active = [i for i, more in zip(active, goes_on, strict=True) if more]
                if not active:
                    break
        finally:
            await asyncio.gather(*(member.close() for member in envs))
        return [build_sample(prompt.prompt_id, episodes)]

    async def _take_turn(self, turn: int, episode: Episode, env: Env, response: Response) -> bool:
        """One member's turn. True: the environment's answer is appended and another turn follows."""
        episode.add_response(response)
        observation, reward, terminated, truncated, _ = await env.step(self.decode(response))
        episode.reward += float(reward) * self.turn_discount**turn
        if terminated or truncated or not response.finished or turn + 1 == self.max_turns:
            return False
        text = self.feedback_text("" if observation is None else str(observation))
        episode.add_observation(self.tokenizer.encode(text, add_special_tokens=False))
        return True

    def feedback_text(self, observation: str) -> str:
        """What is appended between a response and the next one."""
        if self.feedback_role:
            return chat_turn(self.tokenizer, self.feedback_role, observation, self.chat_template_args)
        return self.feedback_template.replace("{}", observation)


def chat_turn(tokenizer: Any, role: str, content: str, template_args: Mapping[str, Any]) -> str:
    """What a chat template puts between a response and the next one, when somebody of this role says content in between.

    The response has brought its own EOS. Raises ValueError where the template does not show what was said.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"feedback_role={role!r}: the tokenizer has no chat template; use feedback_template")
    response = "<<the response>>"
    messages = [
        {"role": "user", "content": "the prompt"},
        {"role": "assistant", "content": response},
        {"role": role, "content": content},
    ]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_args))
    _, found, turn = text.rpartition(response)
    if not found or content.strip() not in turn:  # templates may trim
        raise ValueError(
            f"feedback_role={role!r}: the chat template does not show what this role says; use feedback_template"
        )
    return turn.removeprefix(tokenizer.eos_token)
