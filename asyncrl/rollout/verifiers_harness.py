"""verifiers' chat program, run in the process of the episode. verifiers itself installs it for each episode with uv, which takes
seconds and needs an index of packages."""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils import compaction, core, mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness"]

# verifiers joins these modules to one program, so they use each other's names without importing them
_NAMES = {**vars(mcp), **vars(compaction), **vars(core)}
for _part in (mcp, compaction, core):
    vars(_part).update({name: value for name, value in _NAMES.items() if name not in vars(_part)})


class InProcessHarness(NullHarness):  # type: ignore[misc]
    async def setup(self, runtime: Any) -> None:
        """There is nothing to install."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Hold the conversation of one agent. An error is the episode's."""
        system_prompt, prompt = self.resolve_prompt(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        arguments = argparse.Namespace(
            base_url=endpoint,
            api_key=secret,
            model=ctx.model,
            system_prompt=system_prompt or "",
            prompt=prompt if isinstance(prompt, str) else "",
            initial_messages_file="" if prompt is None or isinstance(prompt, str) else _written(prompt),
            mcp_config=json.dumps({"mcpServers": servers} if servers else {}),
            tool_interception_url=tool_interception_url or "",
            bash=False,
            edit=False,
            search=False,
            serper_key="",
            compaction=False,
            summarize_at_tokens=None,
        )
        core.parse_args = lambda: arguments  # which `main` calls first, before it awaits
        try:
            await core.main()
        except ExceptionGroup as error:  # verifiers would only tell how many errors there are
            raise RuntimeError("; ".join(f"{type(one).__name__}: {one}" for one in _errors_of(error))) from error
        return ProgramResult(exit_code=0, stdout="", stderr="")


def _errors_of(error: Exception) -> list[Exception]:
    return (
        [one for part in error.exceptions for one in _errors_of(part)] if isinstance(error, ExceptionGroup) else [error]
    )


def _written(messages: Any) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:  # the program removes it
        json.dump([message_to_wire(message) for message in messages], file)
    return file.name
