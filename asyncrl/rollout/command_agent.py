"""CommandAgent: an agent that is a program, in any language. It asks the policy over HTTP, and the task judges its last answer.

    rollout.tasks.default.agent=command:./agent.sh

Each member of a group is one process. It reads the prompt from its standard input, as JSON. Its environment has the policy's
addresses, under the names that the clients of OpenAI and Anthropic read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.data.prompts import Prompt
from asyncrl.rewards.outcome import RolloutRejected
from asyncrl.rollout.chat_agent import ChatAgent, ChatSession
from asyncrl.runtime.background import gather_or_cancel
from asyncrl.runtime.process import python_module

_MAX_PROGRAMS = 64  # that run at the same time, per task and worker; further ones wait for the end of one
_READ_BYTES = 1 << 16
_SHOWN_CHARS = 2_000
_END_LIMIT_S = 10.0  # for killing the program and its descendants


class CommandAgent(ChatAgent):
    """Runs a command for each member of a group.

    waits for: a place among the programs that run; the end of the program, or of its output.  unblocked by: the programs, their
    limits, the end of the rollout.
    """

    judges_itself = False

    def __init__(
        self,
        *,
        command: str | Sequence[str],  # as in a shell, but without one: a program and its arguments
        limit_s: float = 600.0,  # of one program
        output_bytes: int = 1 << 20,  # of one program's output and errors together
        **settings: Any,  # those of ChatAgent
    ) -> None:
        super().__init__(**settings)
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        if not self._command or shutil.which(self._command[0]) is None:
            raise ValueError(f"command={command!r}: there is no program of this name that can be run")
        if limit_s <= 0 or output_bytes < 1:
            raise ValueError(f"limit_s={limit_s} and output_bytes={output_bytes} must be positive")
        self._limit_s, self._output_bytes = limit_s, output_bytes
        self._places = asyncio.Semaphore(_MAX_PROGRAMS)

    async def chat(self, session: ChatSession, prompt: Prompt) -> None:
        async with self._places:
            await self._run(session, prompt)

    async def _run(self, session: ChatSession, prompt: Prompt) -> None:
        environment = os.environ | {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.api_key,
        }
        about = {"prompt_id": prompt.prompt_id, "member": session.member, "text": prompt.plain_text, "row": prompt.row}
        program = await asyncio.create_subprocess_exec(
            *python_module("asyncrl.rollout.command_main", *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        try:
            async with asyncio.timeout(self._limit_s):
                written = _write(program, msgspec.json.encode(about))
                _, told = await gather_or_cancel([written, self._read(program)])
                code = await program.wait()
        except TimeoutError:
            raise RolloutRejected("agent_timeout", f"{self._name} took more than {self._limit_s:g} s") from None
        finally:
            await _end(program)
        if code:
            raise RuntimeError(f"{self._name} ended with exit code {code}; its output ends with: {told}")

    @property
    def _name(self) -> str:
        return f"the program {Path(self._command[0]).name}"

    async def _read(self, program: asyncio.subprocess.Process) -> str:
        """Read the output to its end. Returns its last part."""
        assert program.stdout is not None
        kept: deque[bytes] = deque(maxlen=2)
        total = 0
        while block := await program.stdout.read(_READ_BYTES):
            kept.append(block)
            total += len(block)
            if total > self._output_bytes:
                raise RolloutRejected(
                    "agent_output", f"{self._name} wrote more than {self._output_bytes} bytes (agent_args.output_bytes)"
                )
        return b"".join(kept).decode(errors="replace")[-_SHOWN_CHARS:].strip() or "(nothing)"


async def _write(program: asyncio.subprocess.Process, text: bytes) -> None:
    assert program.stdin is not None
    try:
        program.stdin.write(text + b"\n")
        await program.stdin.drain()
    except ConnectionError:  # the program does not read
        pass
    finally:
        program.stdin.close()


async def _end(program: asyncio.subprocess.Process) -> None:
    """End the program and its descendants, and read the rest of their output: its pipe is closed when it is empty."""
    assert program.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        program.terminate()
    try:
        async with asyncio.timeout(_END_LIMIT_S):
            while await program.stdout.read(_READ_BYTES):
                pass
            await program.wait()
    except TimeoutError:
        program.kill()
        await program.wait()
