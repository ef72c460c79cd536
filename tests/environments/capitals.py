"""An environment of verifiers: one turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    word: str = ""


class Capitals(vf.Task[Data]):
    @vf.reward
    async def same(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.word.upper())


class CapitalsConfig(vf.TasksetConfig):
    endless: bool = False


class CapitalsSet(vf.Taskset[Capitals, CapitalsConfig]):
    @property
    def INFINITE(self) -> bool:  # type: ignore[override]
        return self.config.endless

    def load(self) -> Iterator[Capitals]:
        for word in itertools.cycle(("hi", "ho")) if self.config.endless else ("hi", "ho"):
            yield Capitals(Data(prompt=word, word=word), self.config.task)


__all__ = ["CapitalsSet"]
