"""An environment of verifiers: several turns. It says a word, then the answer to it twice, and wants capitals each time."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    word: str = ""


class Echo(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def turns(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))

    @vf.reward
    async def capitals(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == f"{self.data.word} AGAIN AGAIN".upper())


class EchoSet(vf.Taskset[Echo, vf.TasksetConfig]):
    def load(self) -> Iterator[Echo]:
        for word in ("hi", "ho"):
            yield Echo(Data(prompt=None, word=word), self.config.task)


class EchoEnvConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    with_critic: bool = False


class EchoEnv(vf.Env[EchoEnvConfig]):
    async def run(self, task: Echo, agents: vf.Agents) -> None:
        async with agents.speaker.interaction(task) as speaker:
            said = task.data.word
            for _ in range(3):
                said = (await speaker.turn(said)).last_reply + " again"
        if self.config.with_critic:
            agents.critic.trainable = False
            judged = await agents.critic.run(task.with_data(prompt="judge"))
            speaker.trace.record_reward("judged", float(judged.last_reply == "JUDGE"))


__all__ = ["EchoEnv", "EchoSet"]
