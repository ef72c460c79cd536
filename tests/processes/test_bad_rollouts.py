"""Rewards, agents and trajectories that will not do: each rollout is rejected with its reason, and the worker goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rollout_worker import Stage

from asyncrl.config import TaskConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.messages import StoreVerdict
from asyncrl.rollout.agent import ActQueue, Agent, ObsQueue, SingleStepAgent
from asyncrl.rollout.env import Env

LET_GO = threading.Event()  # at the end of a test: what hangs goes on


def reward(prompt: str, completion: str, answer: Any) -> Any:
    """The answer says what to do."""
    if answer == "raise":
        raise KeyError("no such thing")
    if answer == "exit":
        raise SystemExit(3)
    if answer == "hang":
        LET_GO.wait(60)
        return 0.0
    values: dict[Any, Any] = {
        "none": None,
        "nan": float("nan"),
        "infinite": float("-inf"),
        "text": "good",
        "list": [1.0],
        "array": np.ones(2),
        "complex": 1j,
    }
    return values.get(answer, 0.5)


class HangingAgent(Agent):
    async def collect_trajectory(
        self, prompt: Any, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        if prompt.answer == "exit":
            raise SystemExit(4)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class BreakingAgent(SingleStepAgent):
    """A sound trajectory, then what the prompt's answer says."""

    async def collect_trajectory(
        self, prompt: Any, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        (sample,) = await super().collect_trajectory(prompt, env, obs_queue, act_queue)
        key, what = prompt.row["breaks"]
        if what in {"nan", "inf"}:
            sample.data[key][-1] = float(what)
            return [sample]
        return [SequenceSample(sample.ids, sample.seqlens, {**sample.data, key: sample.data[key].astype(what)})]


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    LET_GO.clear()
    made = Stage(tmp_path)
    made.rollout = replace(
        made.rollout,
        reward_timeout_s=0.5,
        tasks={
            "default": TaskConfig(reward=f"{__name__}:reward"),
            "hanging": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:HangingAgent"),
            "breaking": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:BreakingAgent"),
        },
    )
    yield made
    LET_GO.set()
    await made.close()


async def outcomes_of(stage: Stage, rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(outcome, reason, detail) of a rollout of each row, one after another, and of a sound one at the end."""
    stage.rows = [{"prompt": f"{i}12", "answer": 0.5, "task": "default", **row} for i, row in enumerate([*rows, {}])]
    await stage.start()
    for position in range(len(stage.rows)):
        await stage.grant(stage.ticket(position))
        await stage.results(position + 1)
    await stage.end()
    results = [stage.manager.results[f"ticket-{position}"] for position in range(len(stage.rows))]
    assert (results[-1].outcome, results[-1].reason) == ("stored", "")
    assert [pulled.meta.ticket_id for pulled in stage.pulled] == [f"ticket-{len(rows)}"]
    return [(result.outcome, result.reason, result.detail) for result in results[:-1]]


async def test_whatever_a_reward_function_does_costs_its_own_rollout_only(stage: Stage) -> None:
    expected = {
        "raise": ("reward_error", "reward raised KeyError('no such thing')"),
        "exit": ("reward_error", ""),
        "none": ("reward_not_finite", "reward returned None; it must be a finite number"),
        "nan": ("reward_not_finite", ""),  # only the first of a reason is told in full
        "infinite": ("reward_not_finite", ""),
        "text": ("reward_not_finite", ""),
        "list": ("reward_not_finite", ""),
        "array": ("reward_not_finite", ""),
        "complex": ("reward_not_finite", ""),
        "hang": ("reward_timeout", "reward took more than 0.5 s"),
    }
    found = await outcomes_of(stage, [{"answer": answer} for answer in expected])
    assert [(outcome, reason) for outcome, reason, _ in found] == [
        ("rejected", reason) for reason, _ in expected.values()
    ]
    for (_, _, detail), (_, told) in zip(found, expected.values(), strict=True):
        assert detail.endswith(told)
        assert bool(detail) == bool(told)


@pytest.mark.parametrize(
    ("answer", "told"), [("nan", "nan"), ("text", "'good'"), ("list", "[1.0]"), ("infinite", "-inf")]
)
async def test_the_value_that_is_no_reward_is_shown(stage: Stage, answer: str, told: str) -> None:
    assert await outcomes_of(stage, [{"answer": answer}]) == [
        ("rejected", "reward_not_finite", f"{__name__}:reward returned {told}; it must be a finite number")
    ]


async def test_an_agent_that_hangs_is_rejected_after_rollout_timeout_s(stage: Stage) -> None:
    stage.rollout = replace(stage.rollout, rollout_timeout_s=0.3)
    rows = [{"task": "hanging"}, {"task": "hanging"}, {"task": "hanging", "answer": "exit"}]
    assert await outcomes_of(stage, rows) == [
        ("rejected", "rollout_timeout", "the agent of task 'hanging' took more than 0.3 s"),
        ("rejected", "rollout_timeout", ""),
        ("rejected", "agent_error", "the agent raised RuntimeError('SystemExit: 4')"),
    ]


async def test_an_agents_numbers_that_would_break_training(stage: Stage) -> None:
    breaks = [
        ("packed_logprobs", "nan"),
        ("packed_logprobs", "inf"),
        ("rewards", "nan"),
        ("packed_logprobs", "float64"),
        ("packed_input_ids", "int32"),
    ]
    found = await outcomes_of(stage, [{"task": "breaking", "breaks": entry} for entry in breaks])
    assert [(outcome, reason) for outcome, reason, _ in found] == [("rejected", "agent_error")] * len(breaks)
    assert found[0][2] == "an agent's sample has logprobs that are not finite"


async def test_what_the_head_refuses_comes_back_with_its_reason(stage: Stage) -> None:
    stage.verdict = StoreVerdict(verdict="refused", reason="not_finite: logprobs or rewards")
    await stage.start()
    await stage.grant(stage.ticket(0))
    await stage.results(1)
    result = stage.manager.results["ticket-0"]
    assert (result.outcome, result.reason) == ("released", "refused")
    assert result.detail == "trajectory ticket-0 refused: not_finite: logprobs or rewards"
    await stage.end()
