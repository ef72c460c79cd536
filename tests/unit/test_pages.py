"""The code in the documentation: `check` accepts the run that your-own-task.md describes, and every command on a page exists."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from asyncrl.cli.main import UsageError, main, parse
from asyncrl.config.import_object import import_object
from asyncrl.config.schema import ExperimentConfig, ppo_by_task
from asyncrl.data import padded, sample_files, sequence
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample
from asyncrl.launch.experiment import load_experiment
from asyncrl.protocol.trajectories import Locator
from asyncrl.rewards.reward import Completion
from asyncrl.rollout.chat_agent import ChatAgent
from asyncrl.rollout.rollouts import TRAIN, TaskTable
from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
from tests import pages
from tests.support.services import make_services

TASK_PAGE = pages.ROOT / "docs" / "your-own-task.md"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant:{% endif %}"
)


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in this language."""
    return pages.blocks(TASK_PAGE, language)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the page's blocks to files in the current folder, with a small model at the page's path of a model."""
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


@pytest.mark.full
def test_check_accepts_each_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config in configs(folder):
        assert main(["check", str(config)]) == 0, capsys.readouterr().out


def table(config: ExperimentConfig, tokenizer: Any) -> TaskTable:
    return TaskTable(config.rollout, {}, make_services(), tokenizer=tokenizer)


def test_the_rewards_and_environments_of_the_page_work_as_described(folder: Path) -> None:
    """Every task of the page is loaded as in a rollout worker, and answered wrongly at first, then correctly."""
    tokenizer = load_tokenizer(folder / "model")
    for file in configs(folder):
        config = load_experiment(file)
        source = PromptSource(config.prompts, tokenizer)
        tasks = table(config, tokenizer)
        prompts = {prompt.task: prompt for prompt in (source.get(Locator(0, i)) for i in range(len(source)))}
        assert prompts.keys() == config.rollout.tasks.keys()
        for name, prompt in prompts.items():
            assert prompt.text == "<user:What is 17 + 25?><assistant:"
            assert tasks.of(prompt).agents["", TRAIN].group_size == 8

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


def shown_commands(page: Path) -> list[list[str]]:
    """Return the words of each line of the page's bash blocks, without comments and variable assignments."""
    lines = [line for block in pages.blocks(page, "bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), line)) for line in words if line]


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """asyncrl-launch accepts their words, and the scripts and configs that they name exist in the repository."""
    for program, *words in shown_commands(page):
        if program == "asyncrl-launch":
            parse(words)
        if program in ("bash", "sbatch"):
            assert (pages.ROOT / words[0]).is_file()
        for word in words:
            if re.match(r"(configs|examples|benchmarks|launcher)/", word):
                assert (pages.ROOT / word).exists(), word


@pytest.mark.parametrize(("name", "least"), [("running", 10), ("your-own-task", 8), ("hosts", 5), ("slurm", 4)])
def test_the_pages_for_users_show_commands(name: str, least: int) -> None:
    shown = shown_commands(pages.ROOT / "docs" / f"{name}.md")
    assert sum(program == "asyncrl-launch" for program, *_ in shown) >= least


def test_an_unknown_command_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```bash\nasyncrl-launch none-such RUN   # no command\n```\n")
    with pytest.raises(UsageError):
        test_the_commands_of_a_page_exist(tmp_path / "page.md")


def test_check_accepts_the_config_of_the_readme(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model, and the reward that its comment describes."""
    (block,) = pages.blocks(pages.ROOT / "README.md", "yaml")
    (folder / "my_run.yaml").write_text(block.replace("/path/to/a/hugging/face/model", "model"))
    (folder / "my_task.py").write_text("def reward(prompt, completion, answer):\n    return len(completion)\n")
    assert main(["check", "my_run.yaml"]) == 0, capsys.readouterr().out
    assert len(block.splitlines()) <= 15


def test_the_preset_of_the_algorithms_page_is_applied() -> None:
    block, _ = pages.blocks(pages.ROOT / "docs" / "algorithms.md", "yaml")
    shown = OmegaConf.create(block)
    overrides = [f"train.{key}={value}" for key, value in shown.train.items() if key != "ppo"]
    overrides += [f"train.ppo.{key}={value}" for key, value in shown.train.ppo.items()]
    config = load_experiment(pages.ROOT / "configs" / "quickstart_cpu.yaml", overrides)
    assert config.train.ppo.eps_clip_higher == shown.train.ppo.eps_clip_higher
    assert config.rollout.reject_equal_rewards  # of dapo


def test_the_tasks_of_the_algorithms_page_may_have_their_algorithms() -> None:
    _, block = pages.blocks(pages.ROOT / "docs" / "algorithms.md", "yaml")
    tasks = {name: {"reward": "my_task.py:reward"} for name in ("code", "math", "chat")}
    train = OmegaConf.to_container(OmegaConf.create(block).train)
    overrides = [f"train={json.dumps(train)}", f"rollout.tasks={json.dumps(tasks)}"]
    config = load_experiment(pages.ROOT / "configs" / "quickstart_cpu.yaml", overrides)
    own = ppo_by_task(config.train.ppo, config.train.tasks)
    assert [own[name].reward_scaling for name in ("chat", "code", "math")] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["hosts", "slurm"])
def test_a_cluster_needs_five_commands(name: str) -> None:
    """tests/hosts and tests/slurm run these commands."""
    lines = shown_commands(pages.ROOT / "docs" / f"{name}.md")
    assert len(lines) == 5
    assert {line[0] for line in lines} <= {"asyncrl-launch", "sbatch"}


def test_the_agent_of_the_page_is_a_chat_agent(folder: Path) -> None:
    agent = import_object(str(folder / "my_agent.py:MyAgent"), "agent")
    assert issubclass(agent, ChatAgent)
    assert inspect.iscoroutinefunction(agent.chat)


def test_the_snippet_of_the_samples_page_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its assertions hold, and it prints the beginning that its last comment shows."""
    monkeypatch.chdir(tmp_path)
    (block,) = pages.blocks(pages.ROOT / "docs" / "data.md", "python")
    exec(compile(block, "docs/data.md", "exec"), {})
    shown = block.splitlines()[-1].partition("# ")[2].removesuffix("...")
    assert capsys.readouterr().out.startswith(shown)


def test_the_table_of_the_samples_page_names_methods_and_functions() -> None:
    """Each name in the column of asyncrl is one of SequenceSample, or one that docs/data.md's snippet or the codec has."""
    page = (pages.ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")][1:]
    named = {name.removeprefix("SequenceSample.") for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    modules = (sequence, sample_files, padded)
    missing = {name for name in named if not any(hasattr(place, name) for place in (SequenceSample, *modules))}
    assert missing == set()
    public = {
        name for name in vars(SequenceSample) if not name.startswith("_") and callable(getattr(SequenceSample, name))
    }
    looking = {"num_sequences", "total_tokens", "cu_seqlens", "slices", "of_decoded"}
    assert public - named == looking


def test_the_page_describes_the_arguments_of_rewards() -> None:
    """The page names exactly the existing optional keyword arguments."""
    from asyncrl.rewards import reward, reward_function

    python = "".join(blocks("python"))
    judged = re.search(r"async def judged\((.*?)\)", python)
    assert judged
    assert [word.strip() for word in judged[1].split("*,")[1].split(",")] == list(reward_function.REWARD.optional)
    assert inspect.iscoroutinefunction(reward.Reward.score)


def test_each_row_of_the_page_about_other_systems_has_a_test_that_exists_or_a_reason() -> None:
    text = (pages.ROOT / "docs" / "from-other-systems.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[-1] != "shown by"]
    assert len(rows) > 80
    for name, what, shown in rows:
        named = re.findall(r"`((?:unit|processes|end_to_end|sglang|hosts|slurm)/\w+\.py)(?:::(\w+))?`", shown)
        assert named or what.startswith("not there: "), f"{name}: no test and no reason"
        assert len(named) == shown.count("`") / 2, f"{name}: {shown}"
        for file, test in named:
            source = (pages.ROOT / "tests" / file).read_text()
            assert not test or f"def {test}(" in source, f"{name}: {file}::{test}"
    assert "partly" not in text
