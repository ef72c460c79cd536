"""Reward functions: how they are found, called, bounded and judged."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import NameResolveConfig, RuntimeConfig, WorkerInfo
from asyncrl.data.prompts import Prompt
from asyncrl.groups.loading import load_object
from asyncrl.groups.outcome import RolloutRejected
from asyncrl.groups.reward import Completion, Reward
from asyncrl.runtime.worker import StatusBoard

LOGGER = logging.getLogger("test_rewards")
PROMPT = Prompt(prompt_id="e0-p0", text="2+2=", input_ids=[1], answer="4", task="sum", row={"level": 3}, too_long=False)
RIGHT, WRONG, CUT = Completion("4", True), Completion("5", True), Completion("4", False)

SOURCE = """
import asyncio, threading
from helper_of_rewards import WORTH

threads = set()

def exact(prompt, completion, answer):
    threads.add(threading.current_thread().name)
    return WORTH * (completion == answer)

def asks(prompt, completion, answer, *, finished, task, row):
    return {"sum": 1.0}[task] * row["level"] * finished

def takes_all(prompt, completion, answer, **known):
    return float(sorted(known) == ["finished", "row", "task"])

async def later(prompt, completion, answer, finished):
    await asyncio.sleep(0)
    return 1.0 if finished else 0.0

class Judge:
    async def __call__(self, prompt, completion, answer):
        return 0.25

judge = Judge()
release = threading.Event()

def hangs(prompt, completion, answer):
    release.wait(20)
    return 0.0

async def hangs_async(prompt, completion, answer):
    await asyncio.sleep(20)

def raises(prompt, completion, answer):
    raise KeyError("no such thing")

def stops(prompt, completion, answer):
    return next(iter(()))

def nan(prompt, completion, answer): return float("nan")
def none(prompt, completion, answer): return None
def text(prompt, completion, answer): return "1.0"
def yes(prompt, completion, answer): return True
number = 3
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("helper_of_rewards", None)
    (tmp_path / "helper_of_rewards.py").write_text("WORTH = 2.0\n")
    file = tmp_path / "rewards_of_test.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def board() -> StatusBoard:
    info = WorkerInfo("rollout_worker", 0, 1, "e", "t", 1, "", 1, NameResolveConfig(backend="memory"), RuntimeConfig())
    return StatusBoard(info, LOGGER)


@pytest.fixture
def make(path: Path, board: StatusBoard) -> Callable[..., Reward]:
    return lambda name, timeout_s=5.0: Reward(f"{path}:{name}", timeout_s=timeout_s, board=board, logger=LOGGER)


async def test_a_function_of_a_file_with_its_neighbours(make: Callable[..., Reward]) -> None:
    assert await make("exact").score(PROMPT, [RIGHT, WRONG, RIGHT]) == [2.0, 0.0, 2.0]


async def test_optional_arguments_go_to_those_who_take_them(make: Callable[..., Reward]) -> None:
    assert await make("asks").score(PROMPT, [RIGHT, CUT]) == [3.0, 0.0]
    assert await make("takes_all").score(PROMPT, [RIGHT]) == [1.0]


async def test_async_functions_and_callable_objects(make: Callable[..., Reward]) -> None:
    assert await make("later").score(PROMPT, [RIGHT, CUT]) == [1.0, 0.0]
    assert await make("judge").score(PROMPT, [RIGHT]) == [0.25]


async def test_a_fast_function_judges_a_group_in_one_thread_away_from_the_loop(
    make: Callable[..., Reward], path: Path
) -> None:
    reward = make("exact")
    await reward.score(PROMPT, [RIGHT])  # tells that it is fast
    threads: set[str] = load_object(f"{path}:threads", "threads")
    starts: list[threading.Thread] = []
    original = threading.Thread.start

    def counting(thread: threading.Thread) -> None:
        starts.append(thread)
        original(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", counting)
        await reward.score(PROMPT, [RIGHT] * 8)
    assert len(starts) == 1
    assert threading.main_thread().name not in threads


async def test_a_function_that_hangs_is_a_timeout_and_holds_up_nothing(make: Callable[..., Reward], path: Path) -> None:
    reward = make("hangs", timeout_s=0.05)
    try:
        for _ in range(2):
            with pytest.raises(RolloutRejected, match=r"took more than 0.05 s") as caught:
                await reward.score(PROMPT, [RIGHT, RIGHT])
            assert caught.value.reason == "reward_timeout"
    finally:
        load_object(f"{path}:release", "release").set()


async def test_an_async_function_that_hangs_is_a_timeout(make: Callable[..., Reward]) -> None:
    with pytest.raises(RolloutRejected) as caught:
        await make("hangs_async", timeout_s=0.05).score(PROMPT, [RIGHT])
    assert caught.value.reason == "reward_timeout"


@pytest.mark.parametrize("name", ["raises", "stops"])
async def test_an_error_rejects_and_only_the_first_is_logged(
    make: Callable[..., Reward], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    reward = make(name)
    for _ in range(3):
        with pytest.raises(RolloutRejected) as caught:
            await reward.score(PROMPT, [RIGHT, WRONG])
        assert caught.value.reason == "reward_error"
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].exc_info is not None
    assert f"in {name}" in caplog.text  # the user's own line is in the traceback


@pytest.mark.parametrize("name", ["nan", "none", "text"])
async def test_what_is_no_finite_number_rejects(make: Callable[..., Reward], name: str) -> None:
    with pytest.raises(RolloutRejected) as caught:
        await make(name).score(PROMPT, [RIGHT])
    assert caught.value.reason == "reward_not_finite"


async def test_a_truth_value_is_a_number(make: Callable[..., Reward]) -> None:
    assert await make("yes").score(PROMPT, [RIGHT]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "expected `package.module:name`"),
        ("no_such_package.rewards:exact", "there is no module 'no_such_package.rewards'"),
        ("json:no_such_name", "has no 'no_such_name'"),
        ("/no/such/file.py:exact", "there is no file /no/such/file.py"),
    ],
)
def test_a_wrong_path_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_object(spec, "reward")


def test_an_import_error_of_the_users_module_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_object("broken_rewards:exact", "reward")


def test_what_cannot_be_called_is_no_reward(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        make("number")
