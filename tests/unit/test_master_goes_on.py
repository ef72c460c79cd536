"""A restarted master restores its whole state from the checkpoint and continues the run, or ends it if no step is left."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.algorithms.estimators import estimate
from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import CheckpointConfig, EvalConfig, PromptSourceConfig, TrainConfig
from asyncrl.dataflow.evaluation import EvaluationResult
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.minibatches import split_minibatches
from asyncrl.master.evaluations import EvalPrompt, Evaluations
from asyncrl.master.report import Ages, StepTimes, step_metrics
from asyncrl.master.rollouts import unless
from asyncrl.protocol.calls import ExecuteMFC, LoadCheckpoint, WriteWeights
from asyncrl.protocol.manager import RejectedPrompt
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.weights.checkpoints import MasterState
from tests.support.clock import ManualClock
from tests.support.master import (
    LIMIT_S,
    MasterParts,
    PlayedManager,
    PlayedWorkers,
    make_books,
    make_meta,
    master_config,
)
from tests.support.services import make_services

MFCS = build_dataflow(TrainConfig()).mfcs.values()
TRAJECTORY_KEYS = {key for mfc in MFCS for key in mfc.input_keys} - {key for mfc in MFCS for key in mfc.output_keys}


@pytest.fixture
def opened():
    return AsyncExitStack()


@pytest.fixture
async def clock(opened):
    async with opened:
        yield ManualClock()


@pytest.fixture
def config(tmp_path: Path) -> MasterWorkerConfig:
    return master_config(
        tmp_path,
        train={"max_steps": 3, "save_every_steps": 2},
        num_model_workers=2,
        eval=EvalConfig(prompts=PromptSourceConfig(path=str(tmp_path / "p.jsonl")), num_prompts=1, every_s=50.0),
        checkpoint=CheckpointConfig(every_steps=2),
    )


def next_attempt(config: MasterWorkerConfig) -> MasterWorkerConfig:
    return replace(config, worker=replace(config.worker, attempt=2), resume=f"{config.worker.run_dir}/c")


def after_two_steps(config: MasterWorkerConfig, opened: AsyncExitStack, clock: ManualClock) -> MasterState:
    books = make_books(config, opened, clock=clock)
    books.write_evaluation(
        0,
        [
            EvaluationResult(
                eval_set="",
                mode="greedy",
                num_prompts=4,
                num_failed=0,
                reward=estimate([0.5] * 4),
                mean_length=3.0,
                version_min=0,
                version_max=0,
            )
        ],
    )
    books.reject([RejectedPrompt(locator=Locator(0, 7), reason="too_hard")], lambda locator: False)
    for positions, reward in (((0, 1), 0.25), ((2, 5), 0.5)):
        metas = [make_meta(position, rewards=[reward]) for position in positions]
        books.train(metas)
        books.write_step(metas, step_metrics(metas, books.step - 1, StepTimes(1.0, 1.0, 0.0)), {}, (0.0, 1.0))
    assert books.is_due("save")
    clock.now += 100.0
    return books.state(evaluating=False, mfcs={"advantages": {"kl_coef": 0.2}})


async def test_a_restarted_master_restores_its_whole_state(config, opened, clock):
    state = after_two_steps(config, opened, clock)
    clock.now += 7.0  # between the attempts
    as_written = msgspec.json.decode(msgspec.json.encode(state), type=MasterState)
    books = make_books(next_attempt(config), opened, clock=clock, state=as_written)
    assert (books.step, str(books.version), books.parent) == (2, "a0002-v00000002", (1, 2))
    assert (books.progress.cursor, books.progress.beyond_cursor) == (Locator(0, 3), [Locator(0, 5), Locator(0, 7)])
    assert (books.progress.num_trained, dict(books.progress.rejected)) == (4, {"too_hard": 1})
    assert (books.summary.num_steps, books.summary.first_reward, books.summary.last_reward) == (2, 0.25, 0.5)
    assert [line["eval/greedy_reward"] for line in books.summary.evaluations] == [0.5]
    assert books.summary.ages == Ages(
        by_length={2: {0: 2, 1: 2}}, tails={0: 2, 1: 2}
    )  # two responses of 3 tokens a step
    again = books.state(evaluating=False, mfcs=state.mfcs)
    assert (again.recent_rewards, again.recent_outcomes) == ([0.25, 0.5], [False, True, True, True, True])
    same = {name: getattr(state, name) for name in state.__struct_fields__}
    differ = [name for name, value in same.items() if getattr(again, name) != value]
    assert sorted(differ) == ["attempt", "parent", "time"]
    assert again.wall_s == 100.0
    assert books.summarize(clock.now + 1.0, None)["wall_s"] == 101.0
    books.step = 3
    assert not books.is_due("save")  # the save that was due at step 2 does not move to step 3
    books.step = 4
    assert books.is_due("save")


class Source:
    """Forms batches of two prompts without waiting."""

    seconds: dict[str, float] = {}  # noqa: RUF012
    servers = ()
    trained_s = 0.0

    def __init__(self, parts: MasterParts) -> None:
        self._parts = parts

    async def form_batch(self, order: Any = None) -> list[str]:
        first = self._parts.books.progress.cursor.position
        attempt, keys = self._parts.books.attempt, sorted(TRAJECTORY_KEYS)
        metas = [make_meta(at, f"t{at}", attempt=attempt, keys=keys) for at in (first, first + 1)]
        assert all(self._parts.buffer.put(meta).verdict == "stored" for meta in metas)
        tickets = [meta.ticket_id for meta in metas]
        self._parts.workers.tracker.add(0, tickets, keys)
        return tickets

    async def trained(self, tickets: Any) -> None:
        pass


async def live(config: MasterWorkerConfig, opened: AsyncExitStack, state: MasterState | None) -> list[str]:
    """Run a master until its last step, with model workers and a manager that record their calls. Return the recorded calls."""
    manager, caller = PlayedManager(), PlayedWorkers()
    manager.may_end.set()
    parts = MasterParts(config, opened, manager=manager, caller=caller, state=state, source=Source)
    await asyncio.wait_for(parts.trainer.begin(state), LIMIT_S)
    begun = len(caller.calls)
    assert await asyncio.wait_for(parts.trainer.train(), LIMIT_S)
    await asyncio.wait_for(parts.evaluations.all_over(), LIMIT_S)
    steps = [body for body in caller.calls[begun:] if isinstance(body, ExecuteMFC) and body.mfc == "actor_train"]
    told = [*map(_told, caller.calls[:begun]), *(f"train from {body.version}" for body in steps)]
    return [*told, *(f"evaluate {name}" for name in manager.evaluations)]


def _told(body: Any) -> str:
    if isinstance(body, LoadCheckpoint):
        return f"load {body.folder}"
    return f"write {body.weight_version}" if isinstance(body, WriteWeights) else type(body).__name__


async def test_a_new_attempt_loads_the_weights_and_publishes_them_as_its_own(config, opened, clock, tmp_path):
    state = after_two_steps(config, opened, clock)
    told = ["Ping", "load c", "write a0002-v00000002", "CommitWeights", "train from 2"]
    assert await live(next_attempt(config), opened, state) == told
    (begun,) = [event for event in read_json_lines(tmp_path / "journal" / "master.jsonl") if event["event"] == "begun"]
    assert (begun["attempt"], begun["from"]) == (2, [1, 2])
    assert (begun["num_prompts"], begun["num_epochs"], begun["max_head_offpolicyness"]) == (8, 1, 1)


async def test_an_interrupted_evaluation_is_repeated(config, opened, clock):
    state = msgspec.structs.replace(after_two_steps(config, opened, clock), evaluating=True)
    assert (await live(next_attempt(config), opened, state))[-2:] == ["train from 2", "evaluate a2-s2"]


async def test_a_restart_after_the_last_step_trains_no_further_step(config, opened, clock):
    state = msgspec.structs.replace(after_two_steps(config, opened, clock), step=3)
    told = ["Ping", "load c", "write a0002-v00000003", "CommitWeights"]
    assert await live(next_attempt(config), opened, state) == told


async def test_the_first_attempt_has_no_parent(config, opened, clock, tmp_path):
    told = ["Ping", "write a0001-v00000000", "CommitWeights", *(f"train from {step}" for step in range(3))]
    assert await live(config, opened, None) == [*told, "evaluate a1-s0"]
    (begun,) = [event for event in read_json_lines(tmp_path / "journal" / "master.jsonl") if event["event"] == "begun"]
    assert (begun["attempt"], begun["from"]) == (1, None)


async def test_the_workers_report_the_sizes_by_which_their_groups_are_balanced(config, opened, clock):
    caller = PlayedWorkers()
    caller.model_flops["actor"] = ModelFlops(num_parameters=2, widths=[(0, 0, 1)])
    workers = MasterParts(config, opened, manager=PlayedManager(), caller=caller, source=Source).workers
    await asyncio.wait_for(workers.load(), LIMIT_S)
    assert workers.balance.costs("actor", [make_meta(0, "t", seqlens=[1, 2])]) == {"t": 2 * 2 * 3 + 4 * (1 + 3)}
    groups = [make_meta(i, f"t{i}") for i in range(16)]
    parts = workers.balance.deal("actor", groups, 4, {}, drawn_for=0)
    drawn = split_minibatches([meta.ticket_id for meta in groups], 4, seed=config.worker.seed, version=0)
    assert all(sum(group in part for group in some) == 1 for some in drawn for part in parts)


async def test_a_stop_before_training_has_the_shared_devices_ends_no_evaluation():
    """Otherwise the checkpoint would not say that the next attempt must repeat it."""

    class Endless:
        def begin(self, eval_id, step, parts):
            return asyncio.Event().wait

    services, books = make_services(), SimpleNamespace(step=1, attempt=1)
    config = EvalConfig(prompts=PromptSourceConfig(path="p.jsonl"))
    evaluations = Evaluations(
        config, {"": [EvalPrompt(1, "default")]}, books, Endless(), services, write=lambda *_: None
    )
    evaluations.begin([""])
    leaving = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, leaving.set)
    await asyncio.wait_for(unless(leaving, evaluations.ended()), LIMIT_S)
    await asyncio.sleep(0)
    assert evaluations.num_running == 1
    for task in services.tasks.running:
        task.cancel()
