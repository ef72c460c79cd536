"""Generation and training take turns on devices that they share: when the master gives the turn away, and what a config may say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import (
    ConfigError,
    EvalConfig,
    ExperimentConfig,
    GenerationConfig,
    ManagerConfig,
    PromptSourceConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.launch.experiment import validate
from asyncrl.protocol.calls import ReleaseDevices
from tests.support.master import LIMIT_S, MasterParts, PlayedManager, PlayedWorkers, make_meta, master_config

MFCS = build_dataflow(TrainConfig()).mfcs.values()
KEYS = sorted({key for mfc in MFCS for key in mfc.input_keys} - {key for mfc in MFCS for key in mfc.output_keys})
SHARED = replace(
    ExperimentConfig(),
    allocation="transformers.d1@0+d1@0",
    model_path="/m",
    prompts=PromptSourceConfig(path="/p.jsonl"),
    rollout=RolloutConfig(tasks={"default": TaskConfig(reward="r:r")}),
    manager=ManagerConfig(max_head_offpolicyness=2),
)


@pytest.fixture
async def opened() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class Manager(PlayedManager):
    """In generation's nth turn it has rollouts finish `deliveries[n]` batches of two groups. Evaluations end in its turns only."""

    def __init__(self, deliveries: list[int]) -> None:
        super().__init__()
        self.deliveries = deliveries
        self.parts: MasterParts
        self._num_made = 0

    async def post(self, path: str, body: Any, kind: type, **limits: Any) -> Any:
        turn = getattr(body, "turn", "")
        began = bool(turn) and turn != (self.turns or [""])[-1]
        if turn:
            (self.may_end.set if turn == "generation" else self.may_end.clear)()
        reply = await super().post(path, body, kind, **limits)
        if began and turn == "generation":
            for _ in range(2 * (self.deliveries.pop(0) if self.deliveries else 0)):
                meta = make_meta(self._num_made, f"t{self._num_made}", keys=KEYS)
                assert self.parts.buffer.put(meta).verdict == "stored"
                self.parts.workers.tracker.add(0, [meta.ticket_id], KEYS)
                self._num_made += 1
        return reply


async def turns_of(
    run_dir: Path, opened: AsyncExitStack, deliveries: list[int], **fields: Any
) -> tuple[list[str], list[Any]]:
    """Train three steps; return the turns, and the calls to the model workers."""
    config = master_config(run_dir, train={"max_steps": 3}, max_head_offpolicyness=2, **fields)
    manager, caller = Manager(deliveries), PlayedWorkers()
    manager.parts = parts = MasterParts(config, opened, manager=manager, caller=caller, shares_devices=True)
    await asyncio.wait_for(parts.trainer.begin(None), LIMIT_S)
    assert await asyncio.wait_for(parts.trainer.train(), LIMIT_S)
    return manager.turns, caller.calls


async def test_a_step_whose_batch_is_stored_begins_in_the_same_turn(opened: AsyncExitStack, tmp_path: Path) -> None:
    turns, calls = await turns_of(tmp_path, opened, [2, 1])
    assert turns == ["training", "generation", "training", "generation", "training"]  # the first of training loads
    assert sum(isinstance(call, ReleaseDevices) for call in calls) == 2  # also at the start


async def test_without_stored_batches_each_step_has_a_turn(opened: AsyncExitStack, tmp_path: Path) -> None:
    turns, _ = await turns_of(tmp_path, opened, [1, 1, 1])
    assert turns == ["training", *["generation", "training"] * 3]


async def test_an_evaluation_gets_a_turn_of_generation_before_the_next_step(
    opened: AsyncExitStack, tmp_path: Path
) -> None:
    prompts = PromptSourceConfig(path=str(tmp_path / "p.jsonl"))
    eval_config = EvalConfig(prompts=prompts, num_prompts=1, every_steps=1, at_start=False, at_end=False)
    turns, _ = await turns_of(tmp_path, opened, [3], eval=eval_config)
    # Of steps 1 and 2; that of step 3 gets its turn in Trainer.finish
    assert turns == ["training", "generation", "training", "generation", "training", "generation", "training"]


@pytest.mark.parametrize("interrupt", ["abort", "retract"])
def test_generation_may_run_ahead_if_its_responses_may_be_interrupted(interrupt: str) -> None:
    validate(replace(SHARED, generation=GenerationConfig(interrupt=interrupt)))


@pytest.mark.parametrize("where", [{"cluster": "hosts", "hosts": ["a", "b"]}, {"cluster": "slurm"}], ids=str)
def test_devices_may_be_shared_on_several_hosts(where: dict[str, Any]) -> None:
    validate(replace(SHARED, allocation="sglang.d4@0-3+d4@0-3", **where))


@pytest.mark.parametrize("interrupt", ["wait", "in_place"])
def test_responses_that_may_not_be_interrupted_need_a_run_that_is_synchronous(interrupt: str) -> None:
    config = replace(SHARED, generation=GenerationConfig(interrupt=interrupt))
    with pytest.raises(ConfigError, match=r"generation.interrupt=.* interrupts unfinished .*; use abort or retract"):
        validate(config)
    validate(replace(config, manager=ManagerConfig(max_head_offpolicyness=0)))
