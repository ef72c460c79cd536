"""An environment of verifiers that brings its own program, which asks in capitals. Its prompts have an image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult


class Loud(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        said = data.prompt[0].content[1].text.upper()
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": said}])
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Whisper(vf.Task[vf.TaskData]):
    @vf.reward
    async def heard(self, trace: vf.Trace) -> float:
        return float(trace.nodes[0].message.content == "HI")


class Whispers(vf.Taskset[Whisper, vf.TasksetConfig]):
    def load(self) -> Iterator[Whisper]:
        image = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="data:image/png;base64,AAAA"))
        prompt = vf.UserMessage(content=[image, vf.TextContentPart(text="hi")])
        yield Whisper(vf.TaskData(prompt=[prompt]), self.config.task)


__all__ = ["Loud", "Whispers"]
