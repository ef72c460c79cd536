"""An environment of verifiers: a tool, which a server of its own offers by MCP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import verifiers.v1 as vf


class Numbers(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if a == 13:
            time.sleep(600)  # noqa: ASYNC251 - the planted fault
        if a == 14:
            os._exit(3)
        if a == 15:
            has_port_file = os.path.exists(os.environ["MCP_PORT_FILE"])  # noqa: ASYNC240
            return f"{os.environ['TMPDIR']} {has_port_file}"
        return str(a + b)


class Data(vf.TaskData):
    total: str = ""


class TaskConfig(vf.TaskConfig):
    numbers: vf.ToolsetConfig = vf.ToolsetConfig()
    shared: bool = False  # one server for all episodes


class Sum(vf.Task[Data, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config: TaskConfig) -> list[vf.Toolset]:
        return [] if config.shared else [Numbers(config.numbers)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.total)


class SumsConfig(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Numbers(config.task.numbers)] if config.task.shared else []

    def load(self) -> Iterator[Sum]:
        for a in (3, 13, 14, 15):
            yield Sum(Data(prompt=f"{a} 4", total=str(a + 4)), self.config.task)


__all__ = ["Numbers", "Sums"]

if __name__ == "__main__":
    Numbers.run()
