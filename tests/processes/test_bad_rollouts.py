"""Faulty rewards, agents and trajectories: each rollout is rejected with its reason, and the worker goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import LIMIT_S
from test_rollout_worker import Stage

from asyncrl.config.schema import RolloutConfig, TaskConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.protocol.generation import FinishReason, GenerateReply
from asyncrl.protocol.manager import TRAININGS_TURN, ScheduleReply
from asyncrl.protocol.trajectories import StoreVerdict
from asyncrl.rewards.outcome import RolloutRejected
from asyncrl.rollout.agent import ActQueue, Agent, Env, ObsQueue, RewardEnv, SingleStepAgent

LET_GO = threading.Event()  # set at the end of a test: hanging code goes on


def reward(prompt: str, completion: str, answer: Any) -> Any:
    """The answer determines the behaviour."""
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
    """Returns a valid trajectory that is then changed as the prompt's answer says."""

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
        reward_timeout_s=LIMIT_S,
        rollout_timeout_s=LIMIT_S,
        tasks={
            "default": TaskConfig(reward=f"{__name__}:reward"),
            "hanging": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:HangingAgent"),
            "breaking": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:BreakingAgent"),
        },
    )
    yield made
    LET_GO.set()
    await made.close()


def limit_rollouts(stage: Stage, limit_s: float) -> None:
    for task in stage.worker.rollouts._tasks._tasks.values():
        task.rollout = replace(task.rollout, rollout_timeout_s=limit_s)


async def outcomes_of(stage: Stage, rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(outcome, reason, detail) of a rollout of each row, one after another. A valid rollout follows at the end.

    A row that hangs has its own rollout_timeout_s. The others keep the long default, because a busy machine may delay them.
    """
    stage.rows = [{"prompt": f"{i}12", "answer": 0.5, "task": "default", **row} for i, row in enumerate([*rows, {}])]
    await stage.start()
    for position, row in enumerate(stage.rows):
        limit_s = row.get("rollout_timeout_s", stage.rollout.rollout_timeout_s)
        await stage.until_it_runs()
        limit_rollouts(stage, limit_s)
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
        "nan": ("reward_not_finite", ""),  # only the first rejection for a reason has a detail: "none" for this one
        "infinite": ("reward_not_finite", ""),
        "text": ("reward_not_finite", ""),
        "list": ("reward_not_finite", ""),
        "array": ("reward_not_finite", ""),
        "complex": ("reward_not_finite", ""),
        "hang": ("reward_timeout", "reward took more than 3 s"),
    }
    stage.rollout = replace(stage.rollout, reward_timeout_s=3.0)
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
    hangs = {"task": "hanging", "rollout_timeout_s": 0.3}
    rows = [hangs, hangs, {"task": "hanging", "answer": "exit"}]
    assert await outcomes_of(stage, rows) == [
        ("rejected", "rollout_timeout", "the agent of task 'hanging' took more than 0.3 s"),
        ("rejected", "rollout_timeout", ""),
        ("rejected", "agent_error", "the agent raised RuntimeError('SystemExit: 4')"),
    ]


async def test_training_s_turns_do_not_count_in_rollout_timeout_s(stage: Stage) -> None:
    stage.manager.replacement = ScheduleReply(reason=TRAININGS_TURN)
    stage.server.script.extend(["disconnect"] * 3 * 4)  # the server sleeps: all tries of the three responses fail
    stage.server.script_beyond = 4  # with four tokens of each response
    await stage.start()
    await stage.until_it_runs()
    limit_s = 2.0
    limit_rollouts(stage, limit_s)
    await stage.grant(stage.ticket(0))
    async with stage.manager.changed:
        await asyncio.wait_for(stage.manager.changed.wait_for(lambda: stage.manager.schedules), LIMIT_S)
    await asyncio.sleep(1.5 * limit_s)
    assert not stage.manager.results
    stage.manager.replacement = ScheduleReply(server=stage.server.name, server_url=stage.server.url)
    await stage.results(1)
    await stage.end()
    (result,) = stage.manager.results.values()
    assert (result.outcome, result.reason) == ("stored", "")


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


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        # permanent: another try would give the same result, so the prompt is finished
        ("not_finite: logprobs or rewards", ("rejected", "not_finite", "logprobs or rewards")),
        (
            "bad_tokens: ids from 0 to 99, the vocabulary has 50",
            ("rejected", "bad_tokens", "ids from 0 to 99, the voc"),
        ),
        # specific to this try
        (
            "wrong_attempt: it is of attempt 1",
            ("released", "refused", "trajectory ticket-0 refused: wrong_attempt: it"),
        ),
        ("store_full", ("released", "refused", "trajectory ticket-0 refused: store_full")),
    ],
)
async def test_what_the_head_refuses_comes_back_with_its_reason(
    stage: Stage, reason: str, expected: tuple[str, str, str]
) -> None:
    stage.verdict = StoreVerdict(verdict="refused", reason=reason)
    await stage.start()
    await stage.grant(stage.ticket(0))
    await stage.results(1)
    result = stage.manager.results["ticket-0"]
    assert (result.outcome, result.reason) == expected[:2]
    assert result.detail.startswith(expected[2])
    await stage.end()


# --------------------------------------------------------------------------------------------------- ending a process


async def test_what_would_end_or_stop_a_worker_ends_a_judge(stage: Stage) -> None:
    """By default rewards run in judge processes of their own. A reward that holds the GIL does not delay a valid rollout beside
    it."""
    judge = stage.tmp_path / "judge.py"
    judge.write_text(DANGEROUS)
    dangerous = TaskConfig(reward=f"{judge}:reward")
    isolation = RolloutConfig().reward_isolation
    stage.rollout = replace(
        stage.rollout, reward_isolation=isolation, reward_timeout_s=6.0, tasks={"default": dangerous}
    )
    expected = {
        "exit": ("rejected", "reward_died"),
        "abort": ("rejected", "reward_died"),
        "sys.exit": ("rejected", "reward_error"),
        "spin": ("rejected", "reward_timeout"),
        "fork": ("stored", ""),
        "": ("stored", ""),
    }
    stage.rows = [{"prompt": f"{i}12", "answer": answer, "task": "default"} for i, answer in enumerate(expected)]
    stage.rollout = replace(stage.rollout, max_concurrent_per_worker=len(expected))
    await stage.start()
    await stage.grant(*(stage.ticket(position) for position in range(len(expected))))
    order = list(await stage.results(len(expected)))
    await stage.end()
    found = [stage.manager.results[f"ticket-{position}"] for position in range(len(expected))]
    assert [(result.outcome, result.reason) for result in found] == list(expected.values())
    assert order[-1] == "ticket-3"  # the busy loop
    (detail,) = [
        result.detail for result in found[:2] if result.detail
    ]  # both have the same reason, and only the first rejection for a reason has a detail; either may be first
    ends = ("it ended with exit code 3", "it was killed by SIGABRT")
    assert detail.endswith(tuple(f"judge.py:reward has ended its process: {end}" for end in ends))


DANGEROUS = """
import os, re, sys

def reward(prompt, completion, answer):
    if answer == "exit": os._exit(3)
    if answer == "abort": os.abort()
    if answer == "sys.exit": sys.exit(4)
    if answer == "spin": re.match(r"(a+)+$", "a" * 64 + "b")
    if answer == "fork": return float(os.fork() == 0)
    return 0.5
"""


# -------------------------------------------------------------------------------------------- agents and environments


class OddError(BaseException):
    """A BaseException that is not an Exception: it would end a worker that catches only Exception."""


class OddAgent(SingleStepAgent):
    """Behaves as the prompt's row says."""

    async def collect_trajectory(
        self, prompt: Any, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        does = prompt.row.get("does")
        if does == "raise":
            raise OddError("no exception")
        if does == "cancel":
            raise asyncio.CancelledError
        if does == "hold on":
            while not LET_GO.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.1)
            return []
        if does == "ask":
            await obs_queue.put(prompt.row["for"])
            await act_queue.get()
        if does == "give":
            return prompt.row["what"]
        samples = await super().collect_trajectory(prompt, env, obs_queue, act_queue)
        if does == "give twice":
            return samples * 2
        if does == "reason":
            raise RolloutRejected(f"the prompt {prompt.row['prompt']} has a reason of its own: {'x' * 100}")
        return samples


async def test_whatever_an_agent_does_costs_its_own_rollout_only(stage: Stage) -> None:
    stage.rollout = replace(
        stage.rollout,
        tasks={"default": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:OddAgent")},
    )
    expected: list[tuple[dict[str, Any], str, str]] = [
        ({"does": "raise"}, "agent_error", "the agent raised RuntimeError('OddError: no exception')"),
        ({"does": "cancel"}, "agent_error", ""),
        ({"does": "ask", "for": 42}, "agent_error", ""),
        ({"does": "ask", "for": {"inputs": ["text"]}}, "agent_error", ""),
        *(({"does": "give", "what": what}, "agent_error", "") for what in (42, "text", [42], {"a": 1}, [None])),
        ({"does": "give", "what": None}, "agent_declined", "the agent of task 'default' returned no trajectory"),
        ({"does": "give", "what": []}, "agent_declined", ""),
        ({"does": "give twice"}, "agent_error", ""),
        ({"does": "reason"}, "the_prompt_1212_has_a_reason_of_its_own_", ""),
        (
            {"does": "hold on", "rollout_timeout_s": 1.0},
            "rollout_timeout",
            "the agent of task 'default' took more than 1 s",
        ),
    ]
    found = await outcomes_of(stage, [row for row, _, _ in expected])
    assert found == [("rejected", reason, detail) for _, reason, detail in expected]


class OddEnv(RewardEnv):
    """Behaves as the prompt's answer says."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if self.prompt.answer == "raise in init":
            raise OddError("in init")

    async def reset(self) -> Any:
        if self.prompt.answer == "raise in reset":
            raise LookupError("in reset")
        return await super().reset()

    async def step(self, action: Any) -> Any:
        answer = self.prompt.answer
        if answer == "hang":
            await asyncio.Event().wait()
        rewards: dict[str, Any] = {"nan": [float("nan")] * 3, "too few": [0.5], "text": ["good"] * 3, "none": None}
        if answer == "nothing":
            return None
        return None, rewards.get(answer, [0.5] * 3), True, False, {}

    async def close(self) -> None:
        if self.prompt.answer == "raise in close":
            raise SystemExit(5)
        if self.prompt.answer == "hang in close":
            await asyncio.Event().wait()


async def test_whatever_an_environment_does_costs_its_own_rollout_only(stage: Stage) -> None:
    stage.rollout = replace(
        stage.rollout,
        tasks={"default": TaskConfig(reward=f"{__name__}:reward", env=f"{__name__}:OddEnv")},
    )
    reasons = {
        "raise in init": "agent_error",
        "raise in reset": "agent_error",
        "nan": "agent_error",
        "too few": "agent_error",
        "text": "agent_error",
        "none": "agent_error",
        "nothing": "agent_error",
        "raise in close": "agent_error",
        "hang": "rollout_timeout",
        "hang in close": "rollout_timeout",
    }
    hangs = {"rollout_timeout_s": 0.5}
    rows = [{"answer": answer, **(hangs if why == "rollout_timeout" else {})} for answer, why in reasons.items()]
    found = await outcomes_of(stage, rows)
    assert [(outcome, reason) for outcome, reason, _ in found] == [("rejected", why) for why in reasons.values()]
    assert found[0][2] == "the agent raised RuntimeError('OddError: in init')"


# --------------------------------------------------------------------------------------------------- generation servers


def with_logprobs(change: Callable[[list[Any]], object]) -> Callable[[GenerateReply], bytes]:
    """A server's answer with changed logprobs."""

    def body(reply: GenerateReply) -> bytes:
        answer = msgspec.to_builtins(reply)
        rows = [list(row) for row in answer["meta_info"]["output_token_logprobs"]]
        change(rows)
        answer["meta_info"]["output_token_logprobs"] = rows
        return json.dumps(answer).encode()  # NaN, as SGLang writes a non-number

    return body


def set_first(value: Any) -> Callable[[list[Any]], object]:
    return lambda rows: rows[0].__setitem__(0, value)


def with_tokens(token: int) -> Callable[[GenerateReply], bytes]:
    def body(reply: GenerateReply) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(reply, output_ids=[token] * len(reply.output_ids)))

    return body


def empty(reply: GenerateReply) -> bytes:
    meta = msgspec.structs.replace(
        reply.meta_info, finish_reason=FinishReason(type="stop"), weight_versions=[], output_token_logprobs=[]
    )
    return msgspec.json.encode(GenerateReply(output_ids=[], meta_info=meta))


def too_long(reply: GenerateReply) -> bytes:
    meta = reply.meta_info
    longer = msgspec.structs.replace(
        meta,
        output_token_logprobs=[*meta.output_token_logprobs] * 2,
        weight_versions=[msgspec.structs.replace(meta.weight_versions[0], end=2 * len(reply.output_ids))],
    )
    return msgspec.json.encode(GenerateReply(output_ids=reply.output_ids * 2, meta_info=longer))


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        (with_logprobs(set_first(None)), "bad_logprobs", "logprob None"),
        (with_logprobs(set_first(3.0)), "bad_logprobs", "logprob 3.0"),
        (with_logprobs(set_first(-1e400)), "server_lost", "not a valid GenerateReply"),  # JSON has no infinity
        (with_logprobs(set_first(float("nan"))), "server_lost", "not a valid GenerateReply"),
        (with_logprobs(lambda rows: rows.pop()), "server_lost", "4 tokens with 3 logprobs; at most 4 were requested"),
        (with_tokens(-1), "bad_tokens", "ids from -1 to -1"),
        (with_tokens(1 << 40), "bad_tokens", "ids from 1099511627776 to 1099511627776"),
        (empty, "empty_response", "generated no token"),
        (too_long, "server_lost", "8 tokens with 8 logprobs; at most 4 were requested"),
    ],
)
async def test_what_a_server_answers_and_no_model_can_have_said(
    stage: Stage, answer: Any, reason: str, detail: str
) -> None:
    """A well-formed answer with bad tokens or logprobs rejects the prompt, because the prompt may be the cause. After a malformed
    answer the server counts as lost, and the prompt is tried again elsewhere."""
    stage.rollout = replace(stage.rollout, group_size=1)
    await stage.start()
    stage.manager.replacement = ScheduleReply(server=stage.server.name, server_url=stage.server.url)
    stage.server.script.extend([answer] * 16)
    await stage.grant(stage.ticket(0))
    await stage.results(1)
    result = stage.manager.results["ticket-0"]
    assert (result.outcome, result.reason) == ("released" if reason == "server_lost" else "rejected", reason)
    assert detail in result.detail
    stage.server.script.clear()
    await stage.grant(stage.ticket(1))
    assert (await stage.results(2))["ticket-1"] == ("stored", "")
    await stage.end()
