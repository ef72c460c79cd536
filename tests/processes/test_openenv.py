"""Environments behind OpenEnv's protocol: at a URL and in servers that are started here, and what each fault costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils
from test_chat_agent import PROMPT, SAMPLING, Judge, echo, open_endpoint
from test_openai_api import TOKENIZER

from asyncrl.config.import_object import adapted, import_object
from asyncrl.rewards.outcome import RolloutReleased
from asyncrl.rollout import openenv
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.openenv import OpenEnvAgent

LIMIT_S = 90.0
ROOT = Path(__file__).parents[2]
SERVER = ROOT / "tests" / "environments" / "openenv_server.py"


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with open_endpoint() as made:
        yield made


@pytest.fixture(autouse=True)
async def made_servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Any]]:
    """Ends the servers that are free after the test; all others must have ended."""
    made: list[Any] = []

    class Recorded(openenv._Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(openenv, "_Server", Recorded)
    openenv._servers.cache_clear()
    yield made
    for server in made:
        await server.end()
    openenv._servers.cache_clear()


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of servers: a program that serves whatever it is told to run."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -P {SERVER} $@\n")
    program.chmod(0o755)
    return str(program)


def agent(spec: str, *, group_size: int = 1, **args: Any) -> OpenEnvAgent:
    path, given = adapted(f"openenv:{spec}")
    chat: Any = {"tokenizer": TOKENIZER, "sampling": SAMPLING, "group_size": group_size}
    made: OpenEnvAgent = import_object(path, "agent")(**given, **chat, **{"observation": "text", **args})
    return made


async def collect(made: OpenEnvAgent, endpoint: ChatEndpoint, seed: int = 0) -> Any:
    prompt = replace(PROMPT, row={"reset": {"seed": seed}})
    async with asyncio.timeout(LIMIT_S):
        (sample,) = await made.collect_sessions(prompt, Judge(prompt=prompt, reward=None), endpoint, echo)
    return sample


def spoken(sample: Any) -> list[str]:
    pairs = zip(sample.slices("packed_input_ids")[0], sample.slices("loss_mask")[0], strict=True)
    return [TOKENIZER.decode(ids[sampled]) for ids, sampled in pairs]


@pytest.mark.parametrize("full", [False, True])
async def test_a_server_at_a_url(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """A server that has room for one session plays those of a group one after another."""
    monkeypatch.syspath_prepend(str(SERVER.parent))
    import openenv_server

    async with test_utils.TestServer(openenv_server.make("full" if full else "")) as server:
        sample = await collect(agent(str(server.make_url("")), group_size=2), endpoint, seed=2)
    assert spoken(sample) == ["HU<|im_end|>HUHU<|im_end|>"] * 2
    assert sample.data["rewards"].tolist() == [2.0, 2.0]


async def test_servers_that_are_started(endpoint: ChatEndpoint, python: str, made_servers: list[Any]) -> None:
    """Each plays one episode at a time. Rewards may stand at the turns."""
    made = agent("game:app", python=python, group_size=2, turn_rewards=True)
    sample = await collect(made, endpoint)
    assert spoken(sample) == ["HI<|im_end|>HIHI<|im_end|>"] * 2
    assert sample.data["dense_rewards"].sum() == 4.0
    await collect(made, endpoint)
    assert [server.exit_code for server in made_servers] == [None, None]


async def test_a_fault_costs_its_rollout_and_its_server(
    endpoint: ChatEndpoint, python: str, made_servers: list[Any]
) -> None:
    """Rollouts of the same time in other servers are not harmed. It takes its limit and at most 2 s."""
    faults = {
        "hang": ("step_timeout", "step took more than 3 s"),
        "exit": ("episode_died", "the environment's server is gone at step"),
        "leak": ("episode_error", "MemoryError"),
        "exception": ("episode_error", "KeyError"),
        "no_observation": ("episode_error", "the answer has no observation"),
        "no_number": ("episode_error", "the answer is not of OpenEnv's protocol"),
    }
    for fault, (reason, told) in faults.items():
        made = agent(fault, python=python, step_limit_s=3.0, memory_bytes=1_000_000_000)
        await collect(made, endpoint)  # the server has started
        failing = asyncio.create_task(collect(made, endpoint, seed=1))
        began = time.monotonic()
        sound = await collect(made, endpoint, seed=2)
        with pytest.raises(RolloutReleased, match=told) as ended:
            await failing
        assert ended.value.reason == reason
        assert sound.data["rewards"].tolist() == [2.0]
        assert fault != "hang" or time.monotonic() - began < LIMIT_S
        assert [server.exit_code is None for server in made_servers[-2:]].count(True) == 1
    assert endpoint.counts.requests == sum(2 + 1 + 2 for _ in faults)


async def test_a_server_that_does_not_start(endpoint: ChatEndpoint, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    with pytest.raises(RolloutReleased, match="episode_lost: game:app ended with exit code 7"):
        await collect(agent("game:app", python=str(broken)), endpoint)
    with pytest.raises(RolloutReleased, match=r"began no session within 1 s: .*127\.0\.0\.1"):
        await collect(agent("http://127.0.0.1:9", start_limit_s=1.0), endpoint)
    with pytest.raises(ValueError, match="there is no such program"):
        agent("game:app", python="no-such-python")


async def test_an_observation_without_the_named_field(endpoint: ChatEndpoint, python: str) -> None:
    made = agent("game:app", python=python, observation="board")
    with pytest.raises(ValueError, match=r"agent_args\.observation=board: the environment's observations have text"):
        await collect(made, endpoint)


REAL = """
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Shout(Environment):
    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=0, episode_id=None, **kwargs):
        self.word, self._state = ("hi", "ho", "hu")[seed], State(episode_id=episode_id, step_count=0)
        return Heard(text=self.word, done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        reward = float(action.message == self.word.upper())
        self._state.step_count += 1
        self.word += self.word
        return Heard(text=self.word, done=self._state.step_count == 2, reward=reward)

    @property
    def state(self):
        return self._state


app = create_app(Shout, Say, Heard, env_name="shout")
"""


@pytest.fixture
def real_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with a module `shout` and openenv-core, whose 67 packages do not belong into asyncrl's environment."""
    folder = tmp_path / "environment"
    python = str(folder / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "-q", "openenv-core==0.3.0"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "shout.py").write_text(REAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return python


@pytest.mark.release
@pytest.mark.timeout(900)
async def test_a_server_of_the_package(
    endpoint: ChatEndpoint, real_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers that it starts have room for one session."""
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", 500.0)
    made = agent("shout:app", python=real_python, group_size=2, start_limit_s=400.0, processes=1)
    sample = await collect(made, endpoint, seed=2)
    assert spoken(sample) == ["HU<|im_end|>HUHU<|im_end|>"] * 2
    assert sample.data["rewards"].tolist() == [2.0, 2.0]
