"""Agents that are programs: a shell script of curl-like requests, and every way in which a program can end badly."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_chat_agent import PROMPT, SAMPLING, Judge, echo, open_endpoint
from test_openai_api import LIMIT_S, TOKENIZER

from asyncrl.config.import_object import adapted
from asyncrl.config.schema import ConfigError, TaskConfig
from asyncrl.rewards.outcome import RolloutRejected
from asyncrl.rollout import command_agent
from asyncrl.rollout.command_agent import CommandAgent
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.rollouts import load_class

# A program without a package: bash speaks HTTP itself. The answer to the prompt's own text is its capitals
SHELL = r"""
read -r prompt
host=${OPENAI_BASE_URL#http://}; path=/${host#*/}; host=${host%%/*}
body='{"messages": [{"role": "user", "content": "hi"}]}'
exec 3<>"/dev/tcp/${host%:*}/${host#*:}"
printf 'POST %s/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %s\r\n\r\n%s' \
    "$path" "${#body}" "$body" >&3
grep -q HI <&3
"""


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with open_endpoint() as made:
        yield made


def agent(command: list[str], *, group_size: int = 1, **args: Any) -> CommandAgent:
    return CommandAgent(command=command, tokenizer=TOKENIZER, sampling=SAMPLING, group_size=group_size, **args)


async def play(made: CommandAgent, endpoint: ChatEndpoint) -> Any:
    judge = Judge(prompt=PROMPT, reward=None)
    (sample,) = await asyncio.wait_for(made.collect_sessions(PROMPT, judge, endpoint, echo), LIMIT_S)
    return sample


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def named(mark: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if mark in " ".join(_cmdline(one))]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _cmdline(one: psutil.Process) -> list[str]:
    try:
        return one.cmdline() if one.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


async def test_a_shell_script_is_judged_afterwards(endpoint: ChatEndpoint, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(SHELL)
    sample = await play(agent(["bash", str(script)], group_size=2), endpoint)
    assert sample.data["rewards"].tolist() == [1.0, 1.0]
    assert TOKENIZER.decode(sample.slices("packed_input_ids")[0][0]).endswith("HI<|im_end|>")


async def test_what_the_program_reads(endpoint: ChatEndpoint, tmp_path: Path) -> None:
    code = (
        "import os, sys, openai\n"
        f"open({str(tmp_path / 'read')!r}, 'w').write(sys.stdin.read())\n"
        "openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])\n"
        "assert os.environ['ANTHROPIC_BASE_URL'] + '/v1' == os.environ['OPENAI_BASE_URL']\n"
    )
    await play(agent(python(code)), endpoint)
    read = json.loads((tmp_path / "read").read_text())
    assert read == {"prompt_id": "e0-p0", "member": 0, "text": "", "row": PROMPT.row}


async def test_a_bounded_number_of_programs_runs_at_the_same_time(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command_agent, "_MAX_PROGRAMS", 1)
    (tmp_path / "agent.sh").write_text(
        f"mkdir {tmp_path}/alone || exit 9\n{SHELL}\nsleep 0.3\nrmdir {tmp_path}/alone\n"
    )
    sample = await play(agent(["bash", str(tmp_path / "agent.sh")], group_size=3), endpoint)
    assert sample.data["rewards"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("code", "args", "error", "told"),
    [
        ("import sys; print('lost'); sys.exit(3)", {}, RuntimeError, r"exit code 3; its output ends with: lost"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", {}, RuntimeError, r"exit code -11"),
        ("import time; time.sleep(600)", {"limit_s": 1.0}, RolloutRejected, r"agent_timeout: .* more than 1 s"),
        ("while True: print('x' * 9999)", {"output_bytes": 10_000}, RolloutRejected, r"agent_output: .* 10000 bytes"),
        ("pass", {}, RolloutRejected, r"no_response: the agent ended without an answer"),
    ],
)
async def test_a_program_that_ends_badly(
    endpoint: ChatEndpoint, code: str, args: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        await play(agent(python(code), **args), endpoint)


@pytest.mark.parametrize("ending", ["by itself", "at its limit", "with the rollout"])
async def test_all_descendants_end_with_the_program(endpoint: ChatEndpoint, tmp_path: Path, ending: str) -> None:
    """A child in a session of its own, whose parent has ended, is killed too."""
    mark = f"descendant-{time.time_ns()}"
    lasting = shlex.join(python(f"import time; time.sleep(600)  # {mark}"))
    ready = tmp_path / "ready"
    end = "exit 1" if ending == "by itself" else "sleep 600"
    command = ["bash", "-c", f"(setsid {lasting} >/dev/null 2>&1 &); touch {ready}; {end}"]
    playing = asyncio.ensure_future(play(agent(command, limit_s=3.0 if ending == "at its limit" else 600.0), endpoint))
    await asyncio.to_thread(wait_until, ready.exists)
    if ending == "with the rollout":
        assert named(mark)
        playing.cancel()
    with pytest.raises((RuntimeError, RolloutRejected, asyncio.CancelledError)):
        await playing
    assert named(mark) == []


def test_the_config_names_the_command() -> None:
    assert adapted("command:./agent.sh --fast") == (
        "asyncrl.rollout.command_agent:CommandAgent",
        {"command": "./agent.sh --fast"},
    )
    task = TaskConfig(agent="command:./agent.sh", reward="a:b", agent_args={"limit_s": 5})
    assert load_class("t", task, "agent") == (CommandAgent, {"command": "./agent.sh", "limit_s": 5})
    with pytest.raises(ConfigError, match=r"CommandAgent needs t\.reward or t\.env"):
        load_class("t", TaskConfig(agent="command:./agent.sh"), "agent")
    with pytest.raises(ValueError, match="there is no program of this name"):
        agent(["./no-such-program"])
