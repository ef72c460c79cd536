"""Curricula: a closed task opens at the pass rate of another task, and stays open in later attempts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from asyncrl.config.schema import GateConfig
from asyncrl.master.books import RejectedShareError
from asyncrl.master.curriculum import Curriculum
from asyncrl.master.report import StepTimes, step_metrics
from asyncrl.protocol.manager import RejectedPrompt
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.metrics import read_json_lines
from tests.support.master import make_books, make_meta, master_config

GATES = {"hard": GateConfig(task="easy", pass_rate=0.75, passes=0.5, groups=2)}
TASKS = ["easy", "hard"]


def metas(*rewards, task=0):
    return [make_meta(at, rewards=list(each), task_id=task) for at, each in enumerate(rewards)]


def test_a_gate_opens_at_the_mean_of_its_newest_groups_and_not_before():
    curriculum = Curriculum(TASKS, GATES)
    assert curriculum.closed == ["hard"]
    assert curriculum.train(metas([1.0, 1.0])) == []  # one group of two
    assert curriculum.train(metas([0.5, 0.4], [1.0, 1.0], task=1)) == []  # of another task
    assert curriculum.train(metas([0.5, 0.4, 0.0, 0.0])) == []  # 1 and 0.25
    assert curriculum.metrics() == {"curriculum/hard_open": 0.0, "curriculum/hard_pass_rate": 0.625}
    assert curriculum.train(metas([0.5, 0.5], [0.5, 0.4])) == ["hard"]
    assert curriculum.closed == []
    assert curriculum.train(metas([0.0], [0.0])) == []
    assert curriculum.closed == []  # for good


def test_the_state_goes_on_where_it_was():
    whole, before = Curriculum(TASKS, GATES), Curriculum(TASKS, GATES)
    steps = [metas([1.0]), metas([0.0]), metas([1.0]), metas([1.0]), metas([0.0])]
    opened = [whole.train(step) for step in steps]
    assert [bool(found) for found in opened] == [False, False, False, True, False]
    for cut in range(len(steps)):
        before = Curriculum(TASKS, GATES)
        found = [before.train(step) for step in steps[:cut]]
        after = Curriculum(TASKS, GATES, before.state())
        assert [*found, *(after.train(step) for step in steps[cut:])] == opened
        assert after.state() == whole.state()


@pytest.fixture
def opened():
    with_all = AsyncExitStack()
    return with_all


async def test_a_checkpoint_has_the_curriculum(tmp_path, opened):
    async with opened:
        config = replace(master_config(tmp_path), tasks=TASKS, gates=GATES)
        books = make_books(config, opened)
        books.train(metas([1.0], [1.0]))
        books.write_step(metas([1.0]), step_metrics(metas([1.0]), 0, StepTimes(1.0, 1.0, 0.0)), {}, (0.0, 1.0))
        state = books.state(evaluating=False, mfcs={})
        assert make_books(config, opened, state=state).curriculum.closed == []
        assert make_books(config, opened).curriculum.closed == ["hard"]
        (line,) = [
            one for one in read_json_lines(tmp_path / "journal" / "master.jsonl") if one["event"] == "task_opened"
        ]
        assert (line["task"], line["step"]) == ("hard", 1)
        (record,) = read_json_lines(tmp_path / "metrics.jsonl")
        assert (record["curriculum/hard_open"], record["curriculum/hard_pass_rate"]) == (1.0, 1.0)


async def test_prompts_of_closed_tasks_do_not_count_as_failures(tmp_path, opened):
    async with opened:
        books = make_books(master_config(tmp_path, num_prompts=64), opened)

        def reject(first, reason):
            prompts = [RejectedPrompt(locator=Locator(0, at), reason=reason) for at in range(first, first + 20)]
            books.reject(prompts, lambda _: False)

        reject(0, "task_closed")
        assert books.progress.rejected == {"task_closed": 20}
        with pytest.raises(RejectedShareError):
            reject(20, "too_hard")
