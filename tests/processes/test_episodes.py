"""Environments whose libraries play whole episodes: what each failure costs, another Python, and verifiers' own environments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_chat_agent import PROMPT, SAMPLING, Judge, echo, open_endpoint
from test_openai_api import EOS, TOKENIZER, VERSION

from asyncrl.config.schema import ConfigError, SamplingConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.rewards.outcome import RolloutReleased
from asyncrl.rewards.trajectory import OnPiece, Response
from asyncrl.rollout import episodes
from asyncrl.rollout.episodes import EpisodeAgent, VerifiersAgent
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.openai_session import Session, SessionLimits
from asyncrl.rollout.tool_calls import TAG, parse_tool_calls
from asyncrl.runtime import unix_sockets

LIMIT_S = 120.0
ENVIRONMENTS = Path(__file__).parents[1] / "environments"

# A library's own client, with the standard library: it may be of any Python
PLAY = """
import json, os, sys, time, urllib.request

def play(settings, item, address):
    say = item["say"]
    body = json.dumps({"messages": [{"role": "user", "content": say}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(address["base_url"] + "/chat/completions", body)) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"]
    exec(settings.get("after", ""))
    return float(said == say.upper() and sys.executable == settings.get("python", sys.executable))
"""


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with open_endpoint() as made:
        yield made


@pytest.fixture(autouse=True)
def no_process_stays(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Any] = []
    make = episodes.Judges

    def record(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(episodes, "Judges", record)
    episodes._judges.cache_clear()
    yield made
    for judges in made:
        judges.close()
    episodes._judges.cache_clear()


def agent(play: str, *, group_size: int = 1, **args: Any) -> EpisodeAgent:
    return EpisodeAgent(play=play, tokenizer=TOKENIZER, sampling=SAMPLING, group_size=group_size, **args)


async def collect(made: EpisodeAgent, endpoint: ChatEndpoint, policy: Any = echo, **row: Any) -> Any:
    prompt = replace(PROMPT, row=row)
    judge = Judge(prompt=prompt, reward=None)
    async with asyncio.timeout(LIMIT_S):
        (sample,) = await made.collect_sessions(prompt, judge, endpoint, policy)
    return sample


@pytest.fixture
def play(tmp_path: Path) -> str:
    (tmp_path / "library.py").write_text(PLAY)
    return f"{tmp_path}/library.py:play"


async def test_a_python_without_asyncrls_packages_plays(endpoint: ChatEndpoint, play: str) -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    made = agent(
        play, group_size=2, python=python, settings={"python": python, "after": "assert 'torch' not in sys.modules"}
    )
    sample = await collect(made, endpoint, say="hi")
    assert sample.data["rewards"].tolist() == [1.0, 1.0]
    assert TOKENIZER.decode(sample.slices("packed_input_ids")[0][0]).endswith("HI<|im_end|>")


async def test_a_function_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("def play(settings, item): ...")
    told = r"function of episodes .* it is called as \(settings, item, address\)$"
    with pytest.raises(ConfigError, match=told):
        await agent(f"{tmp_path}/library.py:play").start()
    with pytest.raises(ConfigError, match=r"there is no module 'no_such_library'"):
        await agent("no_such_library:play").start()


@pytest.mark.parametrize(
    ("after", "reason", "told"),
    [
        ("time.sleep(600)", "episode_timeout", "took more than 2 s"),
        ("sys.exit(3)", "episode_error", "SystemExit"),
        ("os._exit(3)", "episode_died", "exit code 3"),
        ("raise KeyError('gone')", "episode_error", "KeyError"),
        ("held = bytearray(3_000_000_000)", "episode_error", "MemoryError"),
    ],
)
async def test_an_episode_that_fails_is_released_and_no_reward(
    endpoint: ChatEndpoint, play: str, after: str, reason: str, told: str
) -> None:
    """It is played once: its next try is another rollout. It takes its limit and at most 2 s."""
    made = agent(play, settings={"after": after}, limit_s=2.0, memory_bytes=1_000_000_000)
    began = time.monotonic()
    with pytest.raises(RolloutReleased, match=told) as ended:
        await collect(made, endpoint, say="hi")
    assert ended.value.reason == reason
    assert endpoint.counts.requests == 1
    if reason == "episode_timeout":
        assert time.monotonic() - began < 2.0 + 2.0
    # The next episode is not harmed
    sample = await collect(agent(play, limit_s=LIMIT_S, memory_bytes=1_000_000_000), endpoint, say="ho")
    assert sample.data["rewards"].tolist() == [1.0]


async def test_a_step_has_a_limit_of_its_own(endpoint: ChatEndpoint, play: str) -> None:
    """The time in which the policy answers is not in it."""

    async def late(*request: Any, **more: Any) -> Any:
        await asyncio.sleep(1.5)
        return await echo(*request, **more)

    quick = agent(play, step_limit_s=1.0, limit_s=LIMIT_S)
    sample = await collect(quick, endpoint, late, say="hi")
    assert sample.data["rewards"].tolist() == [1.0]
    slow = agent(play, settings={"after": "time.sleep(600)"}, step_limit_s=1.0, limit_s=LIMIT_S)
    with pytest.raises(RolloutReleased, match="within 1 s of an answer") as ended:
        await collect(slow, endpoint, say="hi")
    assert ended.value.reason == "step_timeout"


def verifiers(name: str, *, group_size: int = 1, limit_s: float = LIMIT_S, **settings: Any) -> EpisodeAgent:
    chat: Any = {"tokenizer": TOKENIZER, "sampling": SAMPLING, "group_size": group_size}
    return VerifiersAgent(environment=name, limit_s=limit_s, **chat, **settings)


async def test_an_environment_of_verifiers(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    sample = await collect(verifiers("capitals", group_size=2), endpoint, index=1)
    assert sample.data["rewards"].tolist() == [1.0, 1.0]
    assert TOKENIZER.decode(sample.slices("packed_input_ids")[0][0]).endswith("HO<|im_end|>")


async def test_an_environment_that_cannot_be_played_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"'no_such' of verifiers cannot be made: .*taskset 'no_such' not found"):
        await verifiers("no_such").start()


async def test_an_environment_plays_with_its_own_harness(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers refuses a program that needs a container for the runtime of this process."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    sample = await collect(verifiers("whisper"), endpoint, index=0)
    assert sample.data["rewards"].tolist() == [1.0]
    with pytest.raises(ConfigError, match="needs a container runtime"):
        await verifiers("whisper", config={"agent": {"harness": {"id": "codex"}}}).start()


async def test_images_are_left_out_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    write = [sys.executable, "-m", "asyncrl.rollout.verifiers_episode", "whisper"]
    rows = await asyncio.to_thread(subprocess.run, write, check=True, capture_output=True, timeout=LIMIT_S)
    assert json.loads(rows.stdout) == {"index": 0, "text": "hi", "answer": ""}


@pytest.mark.release
async def test_an_environment_whose_tasks_never_end(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    sample = await collect(verifiers("capitals", config={"taskset": {"endless": True}}), endpoint, index=1001)
    assert TOKENIZER.decode(sample.slices("packed_input_ids")[0][0]).endswith("HO<|im_end|>")


@pytest.mark.release
async def test_several_turns_of_an_environment(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    sample = await collect(verifiers("echoes"), endpoint, index=0)
    assert sample.data["rewards"].tolist() == [0.5 * 3 + 1]
    ids, sampled = sample.slices("packed_input_ids")[0][0], sample.slices("loss_mask")[0][0]
    assert TOKENIZER.decode(ids[sampled]) == "HI<|im_end|>HI AGAIN<|im_end|>HI AGAIN AGAIN<|im_end|>"


def spoken(sample: Any) -> list[str]:
    """What each sequence trains."""
    pairs = zip(sample.slices("packed_input_ids")[0], sample.slices("loss_mask")[0], strict=True)
    return [TOKENIZER.decode(ids[sampled]) for ids, sampled in pairs]


async def test_each_seat_is_trained_with_its_own_reward(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guesser asks within the asker's conversation. Of a group of two, each seat has two sessions."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    sample = await collect(verifiers("duel", group_size=2), endpoint, index=0)
    assert sample.data["seats"].tolist() == [0, 0, 1, 1]
    assert sample.data["sessions"].tolist() == [0, 1, 0, 1]
    assert sample.data["rewards"].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert spoken(sample) == ["HI<|im_end|>AGAIN<|im_end|>"] * 2 + ["HI<|im_end|>"] * 2


@pytest.mark.release
async def test_a_seat_that_is_played_several_times(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is a session of the seat's group, also with equal words."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    sample = await collect(verifiers("duel", group_size=2, config={"num_guesses": 3}), endpoint, index=0)
    assert sample.data["seats"].tolist() == [0] * 2 + [1] * 6
    assert sample.data["sessions"].tolist() == [0, 1, *range(6)]
    assert spoken(sample)[2:] == ["HI<|im_end|>"] * 6


@pytest.mark.release
@pytest.mark.parametrize("of_its_own", [False, True], ids=["policy", "other_url"])
async def test_a_judges_seat_is_not_trained(
    endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch, of_its_own: bool
) -> None:
    """It judges, with the policy's answers or those of another URL, and only the speaker's tokens are trained."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    monkeypatch.setenv("JUDGES_KEY", "unused")
    config: dict[str, Any] = {"with_critic": True}
    async with judge_at(endpoint) as url:
        if of_its_own:
            config["critic"] = {
                "client": {"type": "eval", "base_url": url, "api_key_var": "JUDGES_KEY"},
                "model": "judge",
            }
        requests = endpoint.counts.requests
        sample = await collect(verifiers("echoes", config=config), endpoint, index=0)
        assert endpoint.counts.requests == requests + 4
    assert spoken(sample) == ["HI<|im_end|>HI AGAIN<|im_end|>HI AGAIN AGAIN<|im_end|>"]
    assert sample.data["rewards"].tolist() == [0.5 * 3 + 1 + 1]
    assert "seats" not in sample.data


@contextlib.asynccontextmanager
async def judge_at(endpoint: ChatEndpoint) -> AsyncIterator[str]:
    """The URL of a model that is not the policy: a session of no rollout."""
    limits = SessionLimits(max_requests=8, max_sequences=8, max_tokens=0, max_session_tokens=0)
    session = Session(
        echo,
        ChatTemplate(TOKENIZER, {}),
        sampling=SAMPLING,
        ignore=frozenset(),
        limits=limits,
        counts=endpoint.counts,
        tokenizer=TOKENIZER,
        parse=parse_tool_calls,
        tool_call_tag=TAG,
    )
    session_id = endpoint.open(session)
    try:
        yield endpoint.base_url(session_id)
    finally:
        await endpoint.end(session_id)


@pytest.fixture
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool's server is a program that the episode starts."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


async def call_add(input_ids: list[int], sampling: SamplingConfig, on_piece: OnPiece) -> Response:
    """Call the tool with the numbers of the question, then repeat its answer."""
    told = TOKENIZER.decode(input_ids)
    said = re.search(r"<tool_response>\s*(.*?)\s*</tool_response>|<\|im_start\|>tool\n(.*?)<\|im_end\|>", told)
    a, b = re.findall(r"<\|im_start\|>user\n(\d+) (\d+)", told)[0]
    call = f'<tool_call>{{"name": "numbers_add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    response = Response(list(input_ids))
    output = [*TOKENIZER.encode(next(filter(None, said.groups())) if said else call), EOS]
    response.add_piece(output, [-1.0] * len(output), [(VERSION, len(output))])
    on_piece(response)
    response.finished = True
    return response


async def test_tools_by_mcp(endpoint: ChatEndpoint, with_tools: None) -> None:
    sample = await collect(verifiers("adder"), endpoint, call_add, index=0)
    assert sample.data["rewards"].tolist() == [1.0]
    ids, sampled = sample.slices("packed_input_ids")[0][0], sample.slices("loss_mask")[0][0]
    assert TOKENIZER.decode(ids[sampled]).count("<|im_end|>") == 2


async def test_files_of_an_episode_are_in_the_folder_of_the_run(
    endpoint: ChatEndpoint, with_tools: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher removes it, also those of an episode that was killed. The file with the port of a tool's server is removed."""
    monkeypatch.setattr(unix_sockets, "_folder", str(tmp_path))
    (said,) = spoken(await collect(verifiers("adder"), endpoint, call_add, index=3))
    folder, has_port_file = said.removesuffix("<|im_end|>").rpartition("<|im_end|>")[2].split()
    assert has_port_file == "False"
    assert tmp_path in Path(folder).parents
    assert not Path(folder).exists()  # noqa: ASYNC240


@pytest.mark.release
async def test_episodes_share_a_server_until_one_fails(endpoint: ChatEndpoint, with_tools: None) -> None:
    made = verifiers("adder", config={"taskset": {"task": {"shared": True}}}, processes=1)

    async def folder() -> str:
        (said,) = spoken(await collect(made, endpoint, call_add, index=3))
        return said.rpartition("</tool_call>")[2].split()[0]

    first = await folder()
    assert await folder() == first
    with pytest.raises(RolloutReleased, match="episode_error"):
        await collect(made, endpoint, call_add, index=2)
    assert await folder() != first


@pytest.mark.release
async def test_the_error_names_why_a_tool_server_is_not_reached(endpoint: ChatEndpoint, with_tools: None) -> None:
    elsewhere = {"taskset": {"task": {"numbers": {"url": "http://127.0.0.1:9/mcp"}}}}
    with pytest.raises(RolloutReleased, match="ConnectError"):
        await collect(verifiers("adder", config=elsewhere), endpoint, call_add, index=0)


@pytest.mark.release
@pytest.mark.parametrize("index", [1, 2])
async def test_a_tool_that_hangs_or_ends_costs_its_episode(
    endpoint: ChatEndpoint, with_tools: None, index: int
) -> None:
    with pytest.raises(RolloutReleased, match="episode_"):
        await collect(verifiers("adder", limit_s=30.0), endpoint, call_add, index=index)
    sample = await collect(verifiers("adder", limit_s=LIMIT_S), endpoint, call_add, index=0)
    assert sample.data["rewards"].tolist() == [1.0]
