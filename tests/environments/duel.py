"""An environment of verifiers: two seats play a game against each other, one of them in several runs, and both are trained."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    word: str = ""


class Round(vf.Task[Data]):
    pass


class DuelSet(vf.Taskset[Round, vf.TasksetConfig]):
    def load(self) -> Iterator[Round]:
        for word in ("hi", "ho"):
            yield Round(Data(prompt=None, word=word), self.config.task)


class DuelConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    guesser: vf.AgentConfig = vf.AgentConfig()
    num_guesses: int = 1


class Duel(vf.Env[DuelConfig]):
    """The asker speaks twice. Each guess follows the asker's first word. A guess as long as the last word wins."""

    async def run(self, task: Round, agents: vf.Agents) -> None:
        async with agents.asker.interaction(task) as asker:
            asked = (await asker.turn(task.data.word)).last_reply
            for _ in range(self.config.num_guesses):
                await agents.guesser.run(task.with_data(prompt=asked or "?"))
            await asker.turn("again")

    async def finalize(self, task: Round, episode: vf.Episode) -> None:
        (asker,) = (trace for trace in episode.traces if trace.agent.name == "asker")
        guesses = [trace for trace in episode.traces if trace is not asker]
        won = [1.0 if len(guess.last_reply) >= len(asker.last_reply) else -1.0 for guess in guesses]
        for guess, reward in zip(guesses, won, strict=True):
            guess.record_reward("won", reward)
        asker.record_reward("won", -sum(won) / len(won))


__all__ = ["Duel", "DuelSet"]
