"""What rollout workers run where a paced engine generates (paced_engine.py): an agent and a reward of the kind that users write."""

from __future__ import annotations

from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.trajectory import Episode, build_sample
from asyncrl.rollout.agent import ActQueue, Agent, Env, ObsQueue

FIRST_MEMBER = 2  # token id of the first member: those before are EOS and what the engine emits


class MemberAgent(Agent):
    """One response a member; each member's prompt ends in a token of its own, which draws the length of its response."""

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
    """Paid for the length, so that rewards differ."""
    return float(len(completion))
