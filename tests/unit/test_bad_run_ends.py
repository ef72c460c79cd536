"""How a failing run ends: a real master between a manager and model workers that the test plays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from asyncrl.cli.progress import make_console, print_summary
from asyncrl.config.schema import (
    EvalConfig,
    PromptSourceConfig,
)
from asyncrl.master.books import RejectedShareError
from asyncrl.master.publishing import REWRITE_PAUSE_S
from asyncrl.master.report import StepTimes, step_metrics
from asyncrl.protocol.calls import CommitCheckpoint, CommitWeights, SaveCheckpoint, SaveModel
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.manager import RejectedPrompt
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.runtime.worker import error_text
from asyncrl.testing.runs import journal
from asyncrl.weights.checkpoints import MasterState, checkpoint_dir
from tests.support.master import (
    LIMIT_S,
    MasterParts,
    PlayedManager,
    PlayedWorkers,
    ledger,
    make_meta,
    master_config,
)

MakeMaster = Callable[..., MasterParts]


@pytest.fixture
async def make(tmp_path: Path) -> Any:
    """Return a function that builds parts of a master: make(train={...}, max_rejected_share=..., clock=..., fields of eval)."""
    async with AsyncExitStack() as opened:

        def make_master(
            train: dict[str, Any] | None = None,
            max_rejected_share: float = 0.5,
            num_prompts: int = 8,
            clock: Any = None,
            rewrite_pause_s: float = REWRITE_PAUSE_S,
            **eval_fields: Any,
        ) -> MasterParts:
            prompts = PromptSourceConfig(path=str(tmp_path / "p.jsonl"))
            config = master_config(
                tmp_path,
                train=train,
                num_prompts=num_prompts,
                eval=EvalConfig(prompts=prompts, num_prompts=1, modes=["greedy"], **eval_fields),
                max_rejected_share=max_rejected_share,
            )
            manager, caller = PlayedManager(), PlayedWorkers()
            time = clock(manager) if clock is not None else SYSTEM_CLOCK
            return MasterParts(
                config, opened, manager=manager, caller=caller, clock=time, rewrite_pause_s=rewrite_pause_s
            )

        yield make_master


def rejections(count: int, reason: str = "reward_error") -> list[RejectedPrompt]:
    """Rejections for one reason. Only the first has a detail, as in the reports of a rollout worker."""
    return [
        RejectedPrompt(locator=Locator(0, i), reason=reason, detail="judge.py raised KeyError(3)" if i == 0 else "")
        for i in range(count)
    ]


# ------------------------------------------------------------------------------------------------------------------ rejections


async def test_a_run_in_which_every_prompt_is_rejected_ends_with_reason_and_remedy(
    make: MakeMaster, tmp_path: Path
) -> None:
    """This also holds if the window of max_rejected_share never fills; the summary does not crash."""
    master = make(max_rejected_share=1.0)
    master.manager.view = ledger(rejected=rejections(8), exhausted=True)
    with pytest.raises(RejectedShareError, match="every prompt was rejected, so no step was trained") as caught:
        await asyncio.wait_for(master.trainer.train_one_step(), LIMIT_S)
    text = error_text(caught.value)
    assert "reward_error: 8; the first: judge.py raised KeyError(3). Fix the reward function" in text
    assert f"{tmp_path}/logs/latest/rollout_worker_*.log" in text
    assert "Traceback" not in text
    assert not (tmp_path / "summary.json").exists()


async def test_every_rejected_prompt_is_in_the_journal(make: MakeMaster, tmp_path: Path) -> None:
    master = make()
    master.manager.view = ledger(rejected=rejections(3))
    await master.reports.report()
    events = journal(tmp_path)
    assert [(event["event"], event["prompt"], event["reason"]) for event in events] == [
        ("rejected", [0, position], "reward_error") for position in range(3)
    ]
    assert [event["detail"] for event in events] == ["judge.py raised KeyError(3)", "", ""]
    assert master.books.progress.rejected == {"reward_error": 3}


async def test_released_rollouts_are_counted_through_a_restart_of_the_manager(make: MakeMaster, tmp_path: Path) -> None:
    master, replace = make(), msgspec.structs.replace
    reports = [{"lost": 1}, {"lost": 3, "episode_timeout": 1}, None, {"lost": 2}]
    views = [ledger() if counts is None else replace(ledger(), released=counts) for counts in reports]
    views[2] = replace(ledger(), known=False)
    master.manager.later = dict(enumerate(views, 1))
    for _ in range(3):
        await master.reports.report()
    assert master.manager.reports == 4
    metas = [make_meta(0)]
    master.books.write_step(metas, step_metrics(metas, 0, StepTimes(1.0, 1.0, 0.0)), {}, (0.0, 1.0))
    (record,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert {name: value for name, value in record.items() if name.startswith("released/")} == {
        "released/lost": 5.0,
        "released/episode_timeout": 1.0,
    }


async def test_more_rejections_than_max_rejected_share_end_the_run(make: MakeMaster) -> None:
    master = make(max_rejected_share=0.5, num_prompts=12)
    master.books.train([make_meta(position) for position in range(8, 12)])  # the window is 4 batches of 2
    master.manager.view = ledger(rejected=rejections(4, "too_hard"))
    await master.reports.report()  # half of the last 8 prompts are rejected, which is allowed
    master.manager.view = ledger(rejected=[RejectedPrompt(locator=Locator(0, 7), reason="too_hard")])
    with pytest.raises(
        RejectedShareError, match=r"62% of the last 8 prompts were rejected; manager\.max_rejected_share=0\.5"
    ) as e:
        await master.reports.report()
    assert (
        "too_hard: 5; the first: judge.py raised KeyError(3). Use easier prompts, or lower rollout.success_rate_lb"
        in str(e.value)
    )


@pytest.mark.parametrize(
    ("reason", "detail", "remedy"),
    [
        ("reward_timeout", "slow.py:reward took more than 60 s", "raise rollout.reward_timeout_s"),
        ("reward_died", "it was killed by SIGSEGV", "os._exit, a crash in a C extension, memory"),
        ("reward_not_finite", "returned nan; it must be", "return a finite number"),
        ("bad_logprobs", "token 7 with logprob nan", "See the generation servers' logs"),
        ("bad_tokens", "ids from -1 to -1", "Check that tokenizer and model belong together"),
        ("empty_response", "generated no token", "the model's positions"),
        ("agent_error", "the agent raised KeyError('x')", "Fix the agent or environment"),
        ("agent_hangs", "64 rollouts were cancelled", "do not catch asyncio.CancelledError"),
        ("rollout_timeout", "took more than 3600 s", "raise rollout.rollout_timeout_s"),
        ("push_refused", "message of 2 GB", "Raise runtime.max_message_bytes"),
        ("max_issues", "worker_lost", "manager.max_issues limits how often a prompt is tried"),
    ],
)
async def test_the_most_frequent_reason_is_reported_first_with_its_remedy(
    make: MakeMaster, reason: str, detail: str, remedy: str
) -> None:
    """A few prompts have another reason. The most frequent reason comes first, with its first detail and its remedy."""
    master = make(max_rejected_share=0.5, num_prompts=12)
    master.books.train([make_meta(position) for position in range(8, 11)])  # the window is 4 batches of 2
    others = [RejectedPrompt(locator=Locator(0, 7), reason="too_hard")]
    mine = [RejectedPrompt(locator=Locator(0, i), reason=reason, detail=detail if i == 0 else "") for i in range(4)]
    master.manager.view = ledger(rejected=[*others, *mine])
    with pytest.raises(RejectedShareError) as caught:
        await master.reports.report()
    text = error_text(caught.value)
    assert text.startswith("62% of the last 8 prompts were rejected; manager.max_rejected_share=0.5 is the limit")
    assert f"\n  {reason}: 4; the first: {detail}. " in text
    assert remedy in text
    assert text.index(reason) < text.index("too_hard: 1")
    assert "rollout_worker_*.log" in text


# ----------------------------------------------------------------------------------------------------------------------- limits


class Clock:
    """A report takes a second."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def monotonic(self) -> float:
        return float(self._manager.reports)

    time = monotonic

    def sleep(self, seconds: float) -> None:
        raise AssertionError("the master's loop must not sleep")


async def test_no_data_for_data_timeout_s_ends_the_run_and_names_the_awaited_process(make: MakeMaster) -> None:
    master = make(train={"data_timeout_s": 10.0}, clock=Clock)
    told = r"waited 10 s for step 0 waits for data: 0 of 2 prompts are stored.* from gserver manager"
    with pytest.raises(WaitTimeoutError, match=told):
        await asyncio.wait_for(master.rollouts.form_batch(), LIMIT_S)
    assert master.manager.reports == 11


async def test_each_rejection_restarts_the_wait_for_data(make: MakeMaster) -> None:
    master = make(train={"data_timeout_s": 10.0}, max_rejected_share=1.0, clock=Clock)
    manager: Any = master.manager
    manager.later = {
        number: ledger(rejected=[rejected]) for number, rejected in zip((8, 16), rejections(2), strict=True)
    }
    with pytest.raises(WaitTimeoutError):
        await asyncio.wait_for(master.rollouts.form_batch(), LIMIT_S)
    assert manager.reports == 16 + 11


async def test_at_most_four_evaluations_run_at_a_time(make: MakeMaster, caplog: pytest.LogCaptureFixture) -> None:
    master = make(every_steps=1)
    manager = master.manager
    for step in range(1, 7):
        master.books.step = step
        master.evaluations.begin_if_room([""])
        await asyncio.sleep(0)
    assert manager.evaluations == [f"a1-s{step}" for step in range(1, 5)]
    assert [f"no evaluation at step {step}: 4 are still running" in caplog.text for step in range(1, 7)] == [
        False,
        False,
        False,
        False,
        True,
        True,
    ]
    manager.may_end.set()
    await asyncio.wait_for(master.evaluations.all_over(), LIMIT_S)
    master.books.step = 7
    master.evaluations.begin_if_room([""])
    await asyncio.sleep(0)
    assert manager.evaluations[-1] == "a1-s7"


# -------------------------------------------------------------------------------------------------------------------- the end


async def test_model_and_checkpoint_are_saved_before_the_last_evaluation(make: MakeMaster, tmp_path: Path) -> None:
    """The result is on disk even if the evaluation fails."""
    master = make()
    master.books.step = 1
    master.manager.view = ledger(served=1)
    finishing = asyncio.create_task(master.trainer.finish())
    await asyncio.wait_for(master.manager.evaluating.wait(), LIMIT_S)
    assert master.caller.calls == [
        SaveModel(role="actor", folder="checkpoints/final"),
        CommitWeights(role="actor", weight_version="", folder="checkpoints/final", files=[]),
        SaveCheckpoint(folder=name_of(tmp_path, checkpoint_dir(tmp_path, 1, 1))),
        ANY,
    ]
    commit = master.caller.calls[-1]
    assert isinstance(commit, CommitCheckpoint)
    assert msgspec.json.decode(commit.master, type=MasterState).step == 1
    assert not (tmp_path / "summary.json").exists()
    finishing.cancel()
    await asyncio.wait({finishing})


async def test_a_failed_last_evaluation_does_not_lose_the_model(make: MakeMaster) -> None:
    master = make()
    master.books.step = 1
    master.manager.view = ledger(served=1)
    master.manager.fails = True
    with pytest.raises(ConnectionError, match="gserver manager is gone"):
        await asyncio.wait_for(master.trainer.finish(), LIMIT_S)
    kinds = [type(call) for call in master.caller.calls]
    assert kinds == [SaveModel, CommitWeights, SaveCheckpoint, CommitCheckpoint]


async def test_the_summary_gives_the_versions_that_an_evaluation_saw(make: MakeMaster, tmp_path: Path) -> None:
    master = make(at_end=False)
    master.books.summary.add_step(
        {
            "batch/num_sequences": 4.0,
            "batch/num_generated_tokens": 12.0,
            "batch/num_prompts": 2.0,
            "batch/num_sequences_of_two_versions": 0.0,
            "reward/mean": 0.5,
            "offpolicy/head_mean": 0.0,
            "offpolicy/head_max": 0.0,
            "time/wait_data_s": 1.0,
            "time/train_s": 1.0,
            "time/wait_weights_s": 0.0,
        }
    )
    master.manager.may_end.set()
    master.evaluations.begin([""])  # of version 0, while training continues; the manager reports versions 0 to 2
    await asyncio.wait_for(master.trainer.finish(), LIMIT_S)
    master.files.write_summary(master.books.summarize(time.time(), None))
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    (evaluation,) = summary["evaluations"]
    assert (evaluation["eval/greedy_version_min"], evaluation["eval/greedy_version_max"]) == (0.0, 2.0)
    console = make_console()
    with console.capture() as captured:
        print_summary(tmp_path, console)
    assert "greedy 0.500 (versions 0 to 2)" in captured.get()


@pytest.mark.parametrize("within_step", [False, True])
async def test_a_run_that_is_stopped_writes_no_weights_of_an_unfinished_step(
    make: MakeMaster, caplog: pytest.LogCaptureFixture, *, within_step: bool
) -> None:
    """With train.streaming the workers may have taken optimizer steps on the first parts of the next batch."""
    master = make()
    master.books.step = 1
    master.workers.executor.is_within_step = within_step
    master.leaving.set()
    assert not await asyncio.wait_for(master.trainer.train(), LIMIT_S)
    saves = [call for call in master.caller.calls if isinstance(call, SaveCheckpoint)]
    assert len(saves) == (0 if within_step else 1)
    assert ("no checkpoint of step 1 is written" in caplog.text) is within_step


# --------------------------------------------------------------------------------------------------- weights damaged on disk


V0 = "a0001-v00000000"


async def test_the_newest_version_is_rewritten_if_damaged_on_disk(
    make: MakeMaster, caplog: pytest.LogCaptureFixture
) -> None:
    """The rewrite happens between two steps; the next batch waits for it."""
    master = make()
    damaged = msgspec.structs.replace(ledger(), damaged=V0)
    master.manager.later = {1: damaged, 2: damaged}
    master.manager.view = ledger(exhausted=True)
    assert await asyncio.wait_for(master.rollouts.form_batch(), LIMIT_S) == ()
    write, commit = master.caller.calls
    folder = f"weights/actor/{V0}"
    assert (write.weight_version, write.folder, write.rewrite) == (V0, folder, True)
    assert (commit.weight_version, commit.folder, commit.rewrite) == (V0, folder, True)
    assert master.resolver.get(master.names.model_version("actor")) == V0
    assert f"weights {V0} were damaged on disk; they were rewritten from memory" in caplog.text


async def test_an_older_damaged_version_is_not_rewritten(make: MakeMaster) -> None:
    master = make()
    master.books.step = 1  # training has moved past version 0
    damaged = msgspec.structs.replace(ledger(exhausted=True), damaged=V0)
    master.manager.later = {1: damaged}
    await asyncio.wait_for(master.rollouts.form_batch(), LIMIT_S)
    assert master.caller.calls == []


async def test_a_damaged_version_is_not_rewritten_from_weights_of_an_unfinished_step(make: MakeMaster) -> None:
    """With train.streaming the workers may have taken optimizer steps on the first parts of the next batch."""
    master = make()
    master.workers.executor.is_within_step = True
    master.manager.later = {1: msgspec.structs.replace(ledger(), damaged=V0)}
    master.manager.view = ledger(exhausted=True)
    assert await asyncio.wait_for(master.rollouts.form_batch(), LIMIT_S) == ()
    assert master.caller.calls == []


async def test_repeated_damage_to_a_version_ends_the_run(make: MakeMaster) -> None:
    master = make(rewrite_pause_s=0.0)
    damaged = msgspec.structs.replace(ledger(), damaged=V0)
    master.manager.later = dict.fromkeys(range(1, 9), damaged)
    with pytest.raises(RunEndedError, match=f"weights {V0} in .* are damaged, and it was rewritten 3 times"):
        await asyncio.wait_for(master.rollouts.form_batch(), LIMIT_S)
