"""Agent and reward function for runs with a paced engine (paced_engine.py), written like those of a user."""

from __future__ import annotations

from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.trajectory import Episode, build_sample
from asyncrl.rollout.agent import ActQueue, Agent, Env, ObsQueue

FIRST_MEMBER = 2  # token id of the first member; lower ids are EOS and the engine's filler


class MemberAgent(Agent):
    """One response per member. Each member's prompt ends with its own token, which determines the length of its response."""

    async def collect_trajectory(
        self, prompt: Prompt, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        await env.reset()
        episodes = [Episode([*prompt.input_ids, FIRST_MEMBER + member]) for member in range(self.group_size)]
        responses = await self.generate([list(episode.input_ids) for episode in episodes], obs_queue, act_queue)
        _, rewards, _, _, _ = await env.step([self.decode(response) for response in responses])
        for episode, response, reward in zip(episodes, responses, rewards, strict=True):
            episode.add_response(response)
            episode.reward = float(reward)
        return [build_sample(prompt.prompt_id, episodes)]


async def reward(prompt: str, completion: str, answer: object) -> float:
    """The reward is the length of the completion, so that the rewards of a group differ."""
    return float(len(completion))
