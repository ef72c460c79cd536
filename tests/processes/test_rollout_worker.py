"""The rollout worker with a fake manager, a fake generation server and a real head's puller."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from msgspec.structs import asdict
from rollout_fakes import LIMIT_S, FakeGenerationServer, FakeManager, continuation, logprob_of

from asyncrl.config.processes import RolloutWorkerConfig, WorkerInfo
from asyncrl.config.schema import (
    EvalConfig,
    EvalSetConfig,
    NameResolveConfig,
    PromptSourceConfig,
    RolloutConfig,
    RuntimeConfig,
    SamplingConfig,
    TaskConfig,
)
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import TRAJECTORY_KEYS
from asyncrl.protocol.manager import ScheduleReply, Ticket
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import Locator, StoreVerdict
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rollout import tickets as tickets_module
from asyncrl.rollout.agent import ActQueue, Agent, Env, ObsQueue
from asyncrl.rollout.tickets import HeldTickets
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.streams.push_pull import NameResolvingZmqPuller, Pulled
from asyncrl.testing.tiny import make_char_tokenizer
from tests.support.memory_names import MemoryNameResolver, memory_system

V1 = WeightVersion(1, 1).pack()
EOS_AT = 12
_counter = itertools.count()


def reward(prompt: str, completion: str, answer: Any, *, finished: bool, task: str) -> float:
    """The answer determines the behaviour."""
    if answer == "raise":
        raise RuntimeError("this prompt cannot be judged")
    if answer == "differ":
        return float(next(_counter))
    assert task in {"default", "rude", "silent", "hard", "short"}
    return float(answer) if finished else -1.0


class RudeAgent(Agent):
    async def collect_trajectory(
        self, prompt: Any, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        raise LookupError("lost my way")


class SilentAgent(Agent):
    async def collect_trajectory(
        self, prompt: Any, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        return []


class LateAgent(Agent):
    async def collect_trajectory(
        self, prompt: Any, env: Env, obs_queue: ObsQueue, act_queue: ActQueue
    ) -> list[SequenceSample]:
        await asyncio.sleep(LIMIT_S)
        return []


class SeenWorker(RolloutWorker):
    """Exposes its rollouts once it has started."""

    def __init__(self, config: RolloutWorkerConfig) -> None:
        super().__init__(config, memory_system())
        self.opened = asyncio.Event()

    async def roll_out(self, tickets: HeldTickets) -> None:
        self.rollouts = tickets.rollouts
        self.opened.set()
        await super().roll_out(tickets)


class Stage:
    """A worker and its peers."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.space = str(tmp_path)
        self.resolver = MemoryNameResolver(self.space)
        self.names = Names("e", "t")
        self.branches = False
        self.server = FakeGenerationServer(eos_at=EOS_AT)
        self.manager = FakeManager()
        self.runtime = RuntimeConfig(start_timeout_s=LIMIT_S, stop_timeout_s=5.0)
        self.puller = NameResolvingZmqPuller(self.resolver, self.names, puller_index=0, runtime=self.runtime)
        self.pulled: list[Pulled] = []
        self.verdict = StoreVerdict(verdict="stored")
        self.rows: list[dict[str, Any]] = [
            {"prompt": f"{index}12", "answer": 0.5, "task": "default"} for index in range(8)
        ]
        self.rollout = RolloutConfig(
            group_size=3,
            sampling=SamplingConfig(max_new_tokens=32),
            new_tokens_per_chunk=4,
            max_concurrent_per_worker=4,
            request_timeout_s=LIMIT_S,
            reward_isolation="thread",  # rewards here count in a variable of this process
            tasks={
                "default": TaskConfig(reward=f"{__name__}:reward"),
                "rude": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:RudeAgent"),
                "silent": TaskConfig(reward=f"{__name__}:reward", agent=f"{__name__}:SilentAgent"),
            },
        )
        self.worker: SeenWorker
        self.prompts: PromptSource
        self.main: asyncio.Task[None] | None = None
        self._pulling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the services and the worker."""
        make_char_tokenizer(self.tmp_path / "tokenizer")
        (self.tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        source = PromptSourceConfig(
            path=str(self.tmp_path / "prompts.jsonl"), max_prompt_length=4, task_key="task", shuffle=False
        )
        self.prompts = PromptSource(source, load_tokenizer(self.tmp_path / "tokenizer"))
        await self.server.start()
        await self.manager.start()
        self.resolver.add(self.names.gserver_manager(), self.manager.url)
        await self.puller.start()
        self.start_pulling()
        name_resolve = NameResolveConfig(endpoints=[f"memory://{self.space}"])
        info = WorkerInfo("rollout_worker", 0, 1, "e", "t", 1, str(self.tmp_path), 1, name_resolve, self.runtime)
        four = EvalSetConfig(
            prompts=source,
            num_responses=4,
            sampling=SamplingConfig(max_new_tokens=5, temperature=0.6),
            modes=["sampled"],
        )
        self.worker = SeenWorker(
            RolloutWorkerConfig(
                worker=info,
                tokenizer_path=str(self.tmp_path / "tokenizer"),
                prompts=source,
                eval=EvalConfig(prompts=source, sets={"four": four}),
                rollout=self.rollout,
                num_heads=1,
                heartbeat_s=0.05,
                branches=self.branches,
            )
        )
        self.main = asyncio.create_task(self.worker.main())

    def start_pulling(self) -> None:
        async def pull() -> None:
            while True:
                pulled = await self.puller.pull()
                self.pulled.append(pulled)
                pulled.ack(self.verdict)

        self._pulling = asyncio.create_task(pull())

    async def stop_pulling(self) -> None:
        assert self._pulling is not None
        self._pulling.cancel()
        await asyncio.wait({self._pulling})

    def ticket(self, position: int, **fields: Any) -> Ticket:
        defaults: dict[str, Any] = {
            "ticket_id": f"ticket-{position}",
            "kind": "train",
            "locator": Locator(0, position),
            "attempt": 1,
            "min_version": 1,
            "deadline": 3,
            "server": self.server.name,
            "server_url": self.server.url,
            "head": 0,
        }
        return Ticket(**{**defaults, **fields})

    async def grant(self, *tickets: Ticket) -> None:
        self.manager.waiting.extend(tickets)
        await self.manager.notify()

    async def results(self, count: int) -> dict[str, tuple[str, str]]:
        """Outcome and reason by ticket, once `count` results exist. A failure of the worker fails the test."""
        assert self.main is not None
        waiting = asyncio.ensure_future(self.manager.wait_for_results(count))
        await asyncio.wait({waiting, self.main}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.main.result()
            raise AssertionError("the worker ended early")
        waiting.result()
        return {ticket_id: (result.outcome, result.reason) for ticket_id, result in self.manager.results.items()}

    async def until_it_runs(self) -> None:
        await asyncio.wait_for(self.worker.opened.wait(), LIMIT_S)

    async def end(self, how: Literal["finished", "stop"] = "finished") -> None:
        """Let the worker end by itself, or stop it. Raise its errors."""
        assert self.main is not None
        if how == "finished":
            self.manager.finished = True
            await self.manager.notify()
        else:
            self.worker.stopping.set()
        await asyncio.wait_for(self.main, LIMIT_S)

    async def close(self) -> None:
        if self.main is not None and not self.main.done():
            self.server.hold.set()
            self.worker.stopping.set()
            await asyncio.wait({self.main}, timeout=10)
        await self.stop_pulling()
        await self.puller.close()
        await self.manager.stop()
        await self.server.stop()
        self.resolver.close()


async def until(condition: Callable[[], bool]) -> None:
    """Poll every 5 ms for a condition that causes no event."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    yield made
    await made.close()


async def test_trajectories_arrive_complete(stage: Stage) -> None:
    await stage.start()
    await stage.grant(*(stage.ticket(position) for position in range(6)))
    outcomes = await stage.results(6)
    await stage.end()
    assert set(outcomes.values()) == {("stored", "")}
    assert {pulled.meta.ticket_id for pulled in stage.pulled} == set(outcomes)
    for pulled in stage.pulled:
        meta, sample = pulled.meta, pulled.sample
        prompt_ids = stage.prompts.get(meta.locator).input_ids
        expected = [*continuation(prompt_ids, EOS_AT - len(prompt_ids) - 1), 0]
        assert set(sample.keys) == set(meta.keys) == set(TRAJECTORY_KEYS)
        assert sample.ids == (meta.ticket_id,)
        assert [ids.tolist() for ids in sample.slices()[0]] == [prompt_ids + expected] * 3
        for logprobs in sample.slices("packed_logprobs")[0]:
            np.testing.assert_array_equal(logprobs[len(prompt_ids) :], [logprob_of(token) for token in expected])
        assert meta.seqlens == [EOS_AT] * 3
        assert meta.response_lengths == [len(expected)] * 3
        assert meta.rewards == sample.data["rewards"].tolist() == [0.5] * 3
        assert meta.version_start == meta.version_end == [V1] * 3
        assert sample.data["seq_no_eos_mask"].tolist() == [False] * 3
        assert meta.birth_time == sample.data["birth_time"][0] > 1e9
        group = stage.manager.results[meta.ticket_id].group
        assert group is not None
        assert asdict(group).items() <= asdict(meta).items()
    assert max(stage.manager.asked) == 4  # never more than it has room for
    journal = read_json_lines(stage.tmp_path / "journal" / "rollout_worker_0.jsonl")
    assert {record["ticket"] for record in journal} == set(outcomes)
    assert {(record["event"], record["attempt"], record["head"], record["verdict"]) for record in journal} == {
        ("pushed", 1, 0, "stored")
    }


async def test_rollouts_that_will_not_do_are_rejected_with_their_reason(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.rollout = replace(stage.rollout, success_rate_lb=0.05, success_rate_ub=0.95)
    for row, change in zip(
        stage.rows,
        [
            {"answer": 0.0},
            {"answer": 1.0},
            {"answer": "raise"},
            {"prompt": "12345"},
            {"task": "rude"},
            {"task": "silent"},
            {"task": "never heard of"},
            {},
        ],
        strict=True,
    ):
        row.update(change)
    await stage.start()
    await stage.grant(*(stage.ticket(position) for position in range(8)))
    outcomes = await stage.results(8)
    await stage.end()
    assert outcomes == {
        "ticket-0": ("rejected", "too_hard"),
        "ticket-1": ("rejected", "too_easy"),
        "ticket-2": ("rejected", "reward_error"),
        "ticket-3": ("rejected", "prompt_too_long"),
        "ticket-4": ("rejected", "agent_error"),
        "ticket-5": ("rejected", "agent_declined"),
        "ticket-6": ("rejected", "unknown_task"),
        "ticket-7": ("stored", ""),
    }
    assert [pulled.meta.ticket_id for pulled in stage.pulled] == ["ticket-7"]
    assert stage.manager.results["ticket-0"].group.response_lengths == [9, 9, 9]
    assert "lost my way" in caplog.text
    assert "in collect_trajectory" in caplog.text  # the agent's own line


async def test_groups_that_teach_nothing_are_rejected_where_the_config_says_so(stage: Stage) -> None:
    """DAPO's dynamic sampling for rewards in any unit: a group is rejected if all its rewards are equal. Evaluation accepts every
    group."""
    stage.rollout = replace(stage.rollout, reject_equal_rewards=True)
    stage.rows[1]["answer"] = "differ"
    await stage.start()
    await stage.grant(stage.ticket(0), stage.ticket(1), stage.ticket(2, kind="eval"))
    outcomes = await stage.results(3)
    await stage.end()
    assert outcomes == {
        "ticket-0": ("rejected", "equal_rewards"),
        "ticket-1": ("stored", ""),
        "ticket-2": ("evaluated", ""),
    }


async def test_a_task_has_filters_and_limits_of_its_own(stage: Stage) -> None:
    hard = {"reward": f"{__name__}:reward", "success_rate_ub": 0.9, "reject_equal_rewards": True}
    short = {"reward": f"{__name__}:reward", "success_rate_lb": -9.0, "max_new_tokens": 4}
    late = {"reward": f"{__name__}:reward", "agent": f"{__name__}:LateAgent", "rollout_timeout_s": 0.2}
    tasks = {
        **stage.rollout.tasks,
        "hard": TaskConfig(**hard),
        "short": TaskConfig(**short),
        "late": TaskConfig(**late),
    }
    stage.rollout = replace(stage.rollout, success_rate_lb=0.05, tasks=tasks)
    for row, change in zip(
        stage.rows,
        [
            {"task": "hard", "answer": 1.0},
            {"answer": 1.0},
            {"task": "hard"},
            {},
            {"task": "hard", "answer": 0.0},
            {"answer": 0.0},
            {"task": "late"},
            {"task": "short"},
        ],
        strict=True,
    ):
        row.update(change)
    await stage.start()
    await stage.grant(*(stage.ticket(position) for position in range(8)))
    outcomes = await stage.results(8)
    await stage.end()
    assert outcomes == {
        "ticket-0": ("rejected", "too_easy"),
        "ticket-1": ("stored", ""),
        "ticket-2": ("rejected", "equal_rewards"),
        "ticket-3": ("stored", ""),
        "ticket-4": ("rejected", "too_hard"),
        "ticket-5": ("rejected", "too_hard"),
        "ticket-6": ("rejected", "rollout_timeout"),
        "ticket-7": ("stored", ""),
    }
    lengths = {pulled.meta.ticket_id: pulled.meta.response_lengths for pulled in stage.pulled}
    assert lengths["ticket-3"] == [9, 9, 9]
    assert lengths["ticket-7"] == [4, 4, 4]


async def test_prompts_of_a_closed_task_are_rejected_and_its_evaluations_are_not(stage: Stage) -> None:
    await stage.start()
    closed = stage.ticket(1)
    await stage.grant(
        stage.ticket(0),
        msgspec.structs.replace(closed, closed=["default"]),
        msgspec.structs.replace(stage.ticket(2), closed=["rude"]),
        msgspec.structs.replace(stage.ticket(3, kind="eval"), closed=["default"]),
    )
    outcomes = await stage.results(4)
    await stage.end()
    assert outcomes == {
        "ticket-0": ("stored", ""),
        "ticket-1": ("rejected", "task_closed"),
        "ticket-2": ("stored", ""),
        "ticket-3": ("evaluated", ""),
    }


async def test_a_new_manager_is_told_at_once_what_is_held(stage: Stage) -> None:
    """A new manager learns at once which tickets the worker holds, although the next heartbeat is not due for long, and although
    the frozen old manager has closed no connection."""
    stage.server.hold.clear()
    stage.manager.heartbeat_s = 1000.0
    await stage.start()
    await stage.grant(stage.ticket(0), stage.ticket(1))
    await stage.server.wait_for_requests(6)
    new = FakeManager()
    await new.start()
    stage.resolver.add(stage.names.gserver_manager(), new.url, replace=True)
    await new.wait_for_heartbeat({"ticket-0", "ticket-1"})
    await until(lambda: bool(new.asked))  # the old manager still holds the previous request for tickets
    stage.server.hold.set()
    await asyncio.wait_for(new.wait_for_results(2), LIMIT_S)
    assert not stage.manager.results
    new.finished = True
    await new.notify()
    await stage.end()
    await new.stop()


async def test_evaluations_take_one_response_and_are_not_pushed(stage: Stage) -> None:
    await stage.start()
    common: dict[str, Any] = {"kind": "eval", "eval_id": "start"}
    await stage.grant(
        stage.ticket(0, ticket_id="greedy", eval_mode="greedy", **common),
        stage.ticket(1, ticket_id="sampled", eval_mode="sampled", **common),
    )
    outcomes = await stage.results(2)
    await stage.end()
    assert outcomes == {"greedy": ("evaluated", ""), "sampled": ("evaluated", "")}
    assert stage.pulled == []
    for ticket_id, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        result = stage.manager.results[ticket_id]
        group = result.group
        assert group is not None
        assert (group.rewards, group.response_lengths, group.version_start, group.version_end) == (
            [0.5],
            [9],
            [V1],
            [V1],
        )
        mine = [request for request in stage.server.requests if request.rid.startswith(ticket_id)]
        assert len(mine) == 3  # chunks of one response
        assert {request.sampling_params.temperature for request in mine} == {temperature}


async def test_a_set_has_its_own_sampling_and_number_of_responses(stage: Stage) -> None:
    await stage.start()
    await stage.grant(
        stage.ticket(0, ticket_id="own", kind="eval", eval_id="s3", eval_set="four", eval_mode="sampled"),
        stage.ticket(1, ticket_id="gone", kind="eval", eval_id="s3", eval_set="other", eval_mode="sampled"),
    )
    outcomes = await stage.results(2)
    await stage.end()
    assert outcomes == {"own": ("evaluated", ""), "gone": ("rejected", "no_eval_prompts")}
    group = stage.manager.results["own"].group
    assert group is not None
    assert len(group.rewards) == 4
    assert max(group.response_lengths) <= 5
    mine = [request for request in stage.server.requests if request.rid.startswith("own")]
    assert {request.sampling_params.temperature for request in mine} == {0.6}


async def test_evaluations_run_beside_a_full_worker(stage: Stage) -> None:
    stage.server.hold.clear()
    await stage.start()
    await stage.grant(*(stage.ticket(position) for position in range(3)))
    await stage.manager.wait_for_heartbeat({f"ticket-{position}" for position in range(3)})
    await stage.grant(
        *(stage.ticket(index, ticket_id=f"eval-{index}", kind="eval", eval_mode="greedy") for index in range(3))
    )
    await stage.manager.wait_for_heartbeat({*(f"ticket-{i}" for i in range(3)), *(f"eval-{i}" for i in range(3))})
    await stage.grant(stage.ticket(3))  # there is still room for a fourth train ticket
    await stage.manager.wait_for_heartbeat({*(f"ticket-{i}" for i in range(4)), *(f"eval-{i}" for i in range(3))})
    stage.server.hold.set()
    await stage.results(7)
    await stage.end()


async def test_a_revoked_ticket_is_cancelled_and_released(stage: Stage) -> None:
    stage.server.hold.clear()
    await stage.start()
    await stage.grant(stage.ticket(0), stage.ticket(1))
    await stage.server.wait_for_requests(6)
    stage.manager.revoked = ["ticket-0", "somebody-elses"]
    assert await stage.results(1) == {"ticket-0": ("released", "revoked")}
    await stage.server.wait_for_aborts(3)
    assert all(rid.startswith("ticket-0.") for rid in stage.server.aborted)
    stage.server.hold.set()
    assert (await stage.results(2))["ticket-1"] == ("stored", "")
    await stage.end()


async def test_a_stopped_worker_releases_what_it_holds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "STOP_REPORT_S", LIMIT_S)  # for how long a stopped worker reports results
    stage.server.hold.clear()
    await stage.start()
    await stage.grant(stage.ticket(0), stage.ticket(1))
    await stage.server.wait_for_requests(6)
    await stage.end("stop")
    assert await asyncio.wait_for(stage.manager.wait_for_results(2), 1) is None
    assert {result.reason for result in stage.manager.results.values()} == {"stopped"}
    assert stage.manager.calls["finish"] <= 2  # in batches


async def test_when_the_run_is_finished_running_rollouts_still_end(stage: Stage) -> None:
    stage.server.hold.clear()
    await stage.start()
    await stage.grant(stage.ticket(0))
    await stage.server.wait_for_requests(3)
    ending = asyncio.ensure_future(stage.end())
    await stage.manager.wait_for_heartbeat({"ticket-0"})
    stage.server.hold.set()
    await ending
    assert stage.manager.results["ticket-0"].outcome == "stored"


async def test_a_manager_at_another_address_is_found(stage: Stage) -> None:
    stage.server.hold.clear()
    await stage.start()
    await stage.grant(stage.ticket(0))
    await stage.server.wait_for_requests(3)
    await stage.manager.stop()
    stage.server.hold.set()
    stage.manager = FakeManager([stage.ticket(1)])
    await stage.manager.start()
    stage.resolver.add(stage.names.gserver_manager(), stage.manager.url, replace=True)
    assert await stage.results(2) == {"ticket-0": ("stored", ""), "ticket-1": ("stored", "")}
    await stage.end()


async def test_a_full_head_holds_up_the_worker_and_loses_nothing(stage: Stage) -> None:
    await stage.start()
    await stage.stop_pulling()
    await stage.grant(*(stage.ticket(position) for position in range(8)))
    await stage.manager.wait_for_heartbeat({f"ticket-{position}" for position in range(4)})
    assert len(stage.manager.waiting) == 4  # it asks for no more than it can hold
    stage.start_pulling()
    assert set((await stage.results(8)).values()) == {("stored", "")}
    assert len({pulled.meta.ticket_id for pulled in stage.pulled}) == 8
    await stage.end()


@pytest.mark.parametrize(
    ("verdict", "expected"), [("duplicate", ("stored", "duplicate")), ("refused", ("released", "refused"))]
)
async def test_the_masters_verdict_decides(stage: Stage, verdict: Any, expected: tuple[str, str]) -> None:
    stage.verdict = StoreVerdict(verdict=verdict, reason="because")
    await stage.start()
    await stage.grant(stage.ticket(0))
    assert await stage.results(1) == {"ticket-0": expected}
    await stage.end()


async def test_a_lost_server_is_replaced_through_the_manager(stage: Stage) -> None:
    await stage.start()
    other = FakeGenerationServer("generation_server/1", eos_at=EOS_AT)
    await other.start()
    stage.manager.replacement = ScheduleReply(server=other.name, server_url=other.url)
    ticket = stage.ticket(0)
    await stage.server.stop()
    await stage.grant(ticket)
    assert await stage.results(1) == {"ticket-0": ("stored", "")}
    await stage.end()
    await other.stop()
    assert [(request.ticket_id, request.lost_server) for request in stage.manager.schedules] == [
        ("ticket-0", "generation_server/0")
    ]


async def test_an_error_of_the_worker_itself_ends_it(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    await stage.start()
    with caplog.at_level(logging.CRITICAL):
        await stage.grant(stage.ticket(99))  # there is no such prompt: manager and worker disagree on the data
        assert stage.main is not None
        with pytest.raises(ValueError, match="there is no prompt at epoch 0, position 99"):
            await asyncio.wait_for(stage.main, LIMIT_S)


async def test_a_worker_whose_place_is_taken_ends(stage: Stage) -> None:
    stage.manager.refusal = "superseded"
    await stage.start()
    assert stage.main is not None
    with pytest.raises(RuntimeError, match="another process now runs as rollout_worker/0"):
        await asyncio.wait_for(stage.main, LIMIT_S)
