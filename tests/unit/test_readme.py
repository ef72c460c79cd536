"""The README's page on own models, data and rewards: its files, put where it says, are a run that `check` accepts."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import UsageError, main, parse
from asyncrl.config.schema import ExperimentConfig, NameResolveConfig, RuntimeConfig, WorkerInfo
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.launch.experiment import load_experiment
from asyncrl.protocol.messages import Locator
from asyncrl.rewards.import_object import import_object
from asyncrl.rewards.reward import Completion
from asyncrl.rollout.chat_agent import ChatAgent
from asyncrl.rollout.rollouts import TRAIN, TaskTable
from asyncrl.runtime.board import StatusBoard
from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
from tests import readme

HEADING = "## Your own model, data and reward"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant:{% endif %}"
)


def blocks(language: str) -> list[str]:
    """The page's code blocks in this language."""
    return readme.blocks(HEADING, language)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page shows, as files, with a small model where its path to one is. It is the current folder."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_char_tokenizer(None, "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = CHAT_TEMPLATE
    make_tiny_model(tmp_path / "model", tokenizer=tokenizer, hidden_size=32, num_layers=1)
    for block in [*blocks("python"), *blocks("yaml")]:
        name = re.match(r"# ([\w.]+)", block)
        assert name, f"the first line of a block names its file:\n{block}"
        (tmp_path / name[1]).write_text(block.replace("/path/to/a/hugging/face/model", "model"), encoding="utf-8")
    (line,) = blocks("json")
    row = json.loads(line)
    rows = [{**row, "task": task} for task in ("once", "twice", "again")] * 32
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def configs(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.yaml"))
    assert found
    return found


def test_check_accepts_each_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config in configs(folder):
        assert main(["check", str(config)]) == 0, capsys.readouterr().out


def table(config: ExperimentConfig, tokenizer: Any) -> TaskTable:
    worker = WorkerInfo(
        "rollout_worker", 0, 1, "e", "t", 1, "", 1, NameResolveConfig(endpoints=["memory://"]), RuntimeConfig()
    )
    logger = logging.getLogger("test_readme")
    return TaskTable(config.rollout, tokenizer=tokenizer, board=StatusBoard(worker, logger), logger=logger)


def test_its_rewards_and_environments_do_what_it_says(folder: Path) -> None:
    """Every task of the page is loaded as a rollout worker does, and answered: wrongly at first, then rightly."""
    tokenizer = load_tokenizer(folder / "model")
    for file in configs(folder):
        config = load_experiment(file)
        source = PromptSource(config.prompts, tokenizer)
        tasks = table(config, tokenizer)
        prompts = {prompt.task: prompt for prompt in (source.get(Locator(0, i)) for i in range(len(source)))}
        assert prompts.keys() == config.rollout.tasks.keys()
        for name, prompt in prompts.items():
            assert prompt.text == "<user:What is 17 + 25?><assistant:"
            assert tasks.of(prompt).agents[TRAIN].group_size == 8

            async def play(prompt: Any = prompt, tasks: TaskTable = tasks) -> list[float]:
                env = tasks.of(prompt).make_env(prompt).fork()
                await env.reset()
                rewards = []
                for text in ("41", "42"):
                    step = env.step([Completion(text, True)] if prompt.task == "once" else Completion(text, True))
                    observation, reward, *_ = await step
                    assert (observation == "That is wrong. Try again.") == (prompt.task != "once" and text == "41")
                    rewards.append(reward)
                return rewards

            expected = {"once": [[0.0], [1.0]], "twice": [0.0, 0.5], "again": [0.0, 1.0]}[name]
            assert asyncio.run(play()) == expected


def is_command(name: str) -> bool:
    """Whether asyncrl-launch has help for it."""
    try:
        parse([name, "--help"])
    except UsageError:
        return False
    except SystemExit as end:
        return end.code == 0
    raise AssertionError("--help ends the program")


def test_its_commands_exist() -> None:
    assert not is_command("none-such")
    words = [line.split() for block in blocks("bash") for line in block.splitlines() if line.strip()]
    shown = [line[1] for line in words if line[0] == "asyncrl-launch"]
    assert len(shown) >= 4
    assert all(is_command(name) for name in shown)
    for line in words:
        if "bash" in line:
            script = line.index("bash") + 1
            assert all((readme.README.parent / path).is_file() for path in line[script : script + 2])


@pytest.mark.parametrize("heading", ["## On several machines", "## On Slurm"])
def test_a_cluster_takes_five_lines(heading: str) -> None:
    """tests/hosts and tests/slurm run them."""
    lines = [line.split() for line in readme.commands(heading)]
    assert len(lines) == 5
    for program, word, *_ in lines:
        assert program in ("asyncrl-launch", "sbatch")
        assert is_command(word) if program == "asyncrl-launch" else (readme.README.parent / word).is_file()


def test_its_agent_of_openais_client_is_one(folder: Path) -> None:
    agent = import_object(str(folder / "my_agent.py:MyAgent"), "agent")
    assert issubclass(agent, ChatAgent)
    assert inspect.iscoroutinefunction(agent.chat)


def test_what_it_says_of_rewards_is_so() -> None:
    """The keywords it names are those there are."""
    from asyncrl.rewards import reward, reward_function

    python = "".join(blocks("python"))
    judged = re.search(r"async def judged\((.*?)\)", python)
    assert judged
    assert [word.strip() for word in judged[1].split("*,")[1].split(",")] == list(reward_function.OPTIONAL_ARGUMENTS)
    assert inspect.iscoroutinefunction(reward.Reward.score)
