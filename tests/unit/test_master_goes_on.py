"""What a master remembers across a restart: all that its state has, and whether there is anything left to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.config.schema import (
    CheckpointConfig,
    EvalConfig,
    MasterWorkerConfig,
    ModelConfig,
    NameResolveConfig,
    PromptSourceConfig,
    RuntimeConfig,
    TrainConfig,
    WeightsConfig,
    WorkerInfo,
)
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.master.worker import MasterWorker
from asyncrl.protocol.messages import LoadCheckpoint, Locator, Ping
from asyncrl.runtime.metrics import JsonLinesWriter, read_json_lines
from asyncrl.weights.checkpoints import MasterState

LIMIT_S = 60.0


@pytest.fixture
def config(tmp_path: Path) -> MasterWorkerConfig:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": str(i), "answer": ""}) + "\n" for i in range(8)))
    info = WorkerInfo("master", 0, 1, "e", "t", 1, str(tmp_path), 1, NameResolveConfig(), RuntimeConfig())
    train = TrainConfig(batch_size=2, max_steps=3, save_every_steps=2)
    return MasterWorkerConfig(
        worker=info,
        num_model_workers=2,
        models=[ModelConfig("actor", "m", "d1p1m1", [0], trainable=True)],
        mfcs=[mfc.placed("actor") for mfc in build_dataflow(train).mfcs.values()],
        prompts=PromptSourceConfig(path=str(tmp_path / "p.jsonl")),
        train=train,
        eval=EvalConfig(every_s=50.0),
        weights=WeightsConfig(),
        max_head_offpolicyness=1,
        overdue="wait",
        overdue_wait_s=1000.0,
        max_rejected_share=0.5,
        tensorboard=False,
        checkpoint=CheckpointConfig(every_steps=2),
    )


@pytest.fixture
def next_attempt(config: MasterWorkerConfig, tmp_path: Path) -> Callable[[MasterState], MasterWorker]:
    """The master of the attempt after this state."""

    def make(state: MasterState) -> MasterWorker:
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "master.json").write_bytes(msgspec.json.encode(state))
        return MasterWorker(replace(config, worker=replace(config.worker, attempt=2), resume=str(tmp_path / "c")))

    return make


def after_two_steps(config: MasterWorkerConfig) -> MasterWorker:
    master = MasterWorker(config)
    master.step = 2
    master.progress.mark_trained(Locator(0, position) for position in (0, 1, 2, 5))
    master.progress.mark_rejected(Locator(0, 7), "too_hard")
    master.summary.num_steps, master.summary.first_reward = 2, 0.25
    master.summary.evaluations.append({"step": 0, "eval/greedy_reward": 0.5})
    master._recent_rewards.extend([0.25, 0.5])
    master._recent_outcomes.extend([True, True, False, True, True])
    assert master.save_schedule.check(step=2, epochs=0.5, now=0.0)
    return master


def test_it_remembers_all_of_it(config, next_attempt):
    before = after_two_steps(config)
    before._started -= 100.0
    state = before._state()
    master = next_attempt(state)
    assert (master.step, master.version, master.board.version) == (2, 2, "2")
    assert master._parent == (1, 2)
    assert (master.progress.cursor, master.progress.beyond_cursor) == (Locator(0, 3), [Locator(0, 5), Locator(0, 7)])
    assert (master.progress.num_trained, dict(master.progress.rejected)) == (4, {"too_hard": 1})
    assert master.summary == before.summary
    assert list(master._recent_rewards) == [0.25, 0.5]
    assert list(master._recent_outcomes) == [True, True, False, True, True]
    assert not master.save_schedule.check(step=3, epochs=0.6, now=0.0)  # that of step 2 was due at step 2
    assert master.save_schedule.check(step=4, epochs=0.6, now=0.0)
    again = master._state()
    assert again.wall_s >= 100.0
    same = {name: getattr(state, name) for name in state.__struct_fields__}
    differ = [name for name, value in same.items() if getattr(again, name) != value]
    assert sorted(differ) == ["attempt", "parent", "schedules", "time", "wall_s"]  # a time has gone by


async def run(master: MasterWorker, tmp_path: Path) -> list[Any]:
    """With model workers and manager that only listen. Returns what was done, in order."""
    done: list[Any] = []

    async def call(what: str, handlers: list[int], body: Any) -> None:
        done.append((handlers, body))

    async def publish(version: Any) -> None:
        done.append(str(version))

    async def finish() -> None:
        done.append("finish")

    async def train() -> bool:
        done.append("train")
        master.step += 1
        return True

    double: Any = master
    double.caller = double.checkpointer.caller = SimpleNamespace(call=call)
    double.hooks = SimpleNamespace(loaded=lambda: done.append("loaded"))
    double._publish_weights, double.finish, double.train_one_step = publish, finish, train
    double._evaluate_beside_training = lambda: done.append("evaluate")
    double.journal = JsonLinesWriter(tmp_path / "journal" / "master.jsonl")
    await asyncio.wait_for(master.work(), LIMIT_S)
    double.journal.close()
    return done


async def test_it_loads_then_publishes_the_same_weights_as_a_new_attempts(config, next_attempt, tmp_path):
    master = next_attempt(after_two_steps(config)._state())
    load = ([0, 1], LoadCheckpoint(folder="c"))
    assert await run(master, tmp_path) == [([0, 1], Ping()), load, "loaded", "a0002-v00000002", "train", "finish"]
    (begun,) = read_json_lines(tmp_path / "journal" / "master.jsonl")
    assert (begun["event"], begun["attempt"], begun["from"]) == ("begun", 2, [1, 2])
    assert (begun["num_prompts"], begun["num_epochs"], begun["max_head_offpolicyness"]) == (8, 1, 1)


async def test_weights_whose_evaluation_was_cut_off_are_evaluated_again(config, next_attempt, tmp_path):
    state = msgspec.structs.replace(after_two_steps(config)._state(), evaluating=True)
    assert (await run(next_attempt(state), tmp_path))[3:] == ["a0002-v00000002", "evaluate", "train", "finish"]


async def test_after_the_last_step_only_the_end_is_left(config, next_attempt, tmp_path):
    state = msgspec.structs.replace(after_two_steps(config)._state(), step=3)
    assert (await run(next_attempt(state), tmp_path))[3:] == ["a0002-v00000003", "finish"]


async def test_a_run_that_begins_has_no_parent(config, tmp_path):
    assert await run(MasterWorker(config), tmp_path) == [
        ([0, 1], Ping()),
        "a0001-v00000000",
        "evaluate",
        "train",
        "finish",
    ]
    (begun,) = read_json_lines(tmp_path / "journal" / "master.jsonl")
    assert (begun["event"], begun["attempt"], begun["from"]) == ("begun", 1, None)
