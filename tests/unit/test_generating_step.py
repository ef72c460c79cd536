"""A step function that generates (asyncrl/master/generating.py): its orders, and what goes wrong in one."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from test_executor import DATASET, LIMIT_S, mfc, ppo_graph, running
from test_step_function import PLACES, use

from asyncrl.cli.checks import checks_of
from asyncrl.cli.task_trial import judge_step
from asyncrl.config.fields import with_leaves
from asyncrl.config.modes import EVAL_ONLY
from asyncrl.config.schema import ConfigError, ExperimentConfig, PPOConfig, SamplingConfig
from asyncrl.dataflow.graph import TRAJECTORY_KEYS, DataflowGraph
from asyncrl.launch.checks.bound_names import takes_prompts
from asyncrl.launch.checks.checklist import Case, make_checks
from asyncrl.launch.experiment import load_experiment
from asyncrl.master.books import RejectedShareError
from asyncrl.master.buffer import PromptProgress
from asyncrl.master.generating import GeneratingStep, NoBatch, Prompts
from asyncrl.master.step_function import StepFunction, StepFunctionError
from asyncrl.protocol.calls import ExecuteMFC
from asyncrl.protocol.manager import Order, RejectedPrompt
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from tests.support.master import MasterParts, PlayedManager, PlayedWorkers, ledger, make_meta, master_config

ROOT = Path(__file__).parents[2]
TRAIN_ALL = """\
for function in models.functions:
    batch = batch.union(function(batch))
await batch
"""


def written(folder: Path, body: str) -> str:
    """A file with this step function; its spec. Lines of the body begin at line 6."""
    lines = ["import asyncio", "from types import SimpleNamespace", "", "", "async def step(models, prompts):"]
    path = folder / "step.py"
    path.write_text("\n".join([*lines, *(f"    {line}" for line in body.strip().splitlines())]) + "\n")
    return f"{path}:step"


async def run_step(
    body: str, folder: Path, *, form: Any = None, limit_s: float = 60.0, graph: Any = None, **config: Any
):
    """Run one step whose order brings four groups. Returns the orders, the calls, and the result."""
    orders: list[Order] = []
    async with running(graph or ppo_graph(), PLACES, 5) as (world, master):
        use(master, written(folder, body), limit_s=limit_s)

        async def store(order: Order) -> list[str]:
            orders.append(order)
            assert not world.calls(ExecuteMFC)
            for position in range(4):
                master.store(f"t{position}", position, position % 2, 5 + position)
            return [f"t{position}" for position in range(4)]

        prompts = Prompts(PromptProgress(5, 2), 8, 0)
        settings = master_config(folder, **{"group_size": 4, "sampling": SamplingConfig(max_new_tokens=9), **config})
        step = master.executor.generate_step(GeneratingStep(prompts, settings, form or store))
        result = await asyncio.wait_for(step, LIMIT_S)
        return orders, [(body.mfc, body.ids) for me, body in world.calls(ExecuteMFC) if me in (0, 2, 3)], result


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        ("prompts.next()", Order(before=Locator(1, 3), group_size=4, max_new_tokens=9)),
        ("prompts.next(4)", Order(before=Locator(0, 4), group_size=4, max_new_tokens=9)),
        ("prompts.next(5), n=2", Order(before=Locator(0, 5), group_size=2, max_new_tokens=9)),
        (
            "prompts.next(6), sampling={'max_new_tokens': 3}",
            Order(before=Locator(1, 1), group_size=4, max_new_tokens=3),
        ),
        ("prompts.next(1), sampling={'temperature': 1.0}", Order(before=Locator(0, 1), group_size=4, max_new_tokens=9)),
    ],
)
async def test_a_step_trains_on_the_groups_that_it_orders(arguments: str, order: Order, tmp_path: Path) -> None:
    orders, calls, result = await run_step(
        f"assert (prompts.step, prompts.num_left) == (1, 10)\nbatch = await models.actor.generate({arguments})\n{TRAIN_ALL}",
        tmp_path,
    )
    assert orders == [order]
    assert sorted(calls) == [(name, ["t0", "t1", "t2", "t3"]) for name in sorted(ppo_graph().mfcs)]
    assert result.trained == {"t0", "t1", "t2", "t3"}


async def test_the_wait_for_the_batch_has_its_own_limit(tmp_path: Path) -> None:
    """It is not taken for a hang of the function, which has another one."""
    waited: list[Order] = []

    async def slow(order: Order) -> list[str]:
        await asyncio.sleep(0.3)
        waited.append(order)
        raise NoBatch

    with pytest.raises(NoBatch):
        await run_step(
            f"batch = await models.actor.generate(prompts.next())\n{TRAIN_ALL}", tmp_path, form=slow, limit_s=0.05
        )
    assert len(waited) == 1


SWALLOWS = """\
try:
    batch = await models.actor.generate(prompts.next())
except {}:
    open(__file__ + ".taken", "w").close()
    await asyncio.sleep(0.01)
await asyncio.sleep(0.01)
"""


@pytest.mark.parametrize(("error", "is_taken"), [("Exception", False), ("BaseException", True)])
async def test_a_function_cannot_go_on_without_a_batch(error: str, is_taken: bool, tmp_path: Path) -> None:
    """It is no Exception, which a function may take for an error of its reward or data. Even `except BaseException` goes on with
    nothing."""

    async def stopped(order: Order) -> list[str]:
        await asyncio.sleep(0)
        raise NoBatch

    with pytest.raises(NoBatch):
        await run_step(SWALLOWS.format(error), tmp_path, form=stopped)
    assert (tmp_path / "step.py.taken").exists() is is_taken


async def test_an_error_of_the_generation_is_not_taken_for_one_of_the_function(tmp_path: Path) -> None:
    async def fails(order: Order) -> list[str]:
        raise RejectedShareError("too many")

    with pytest.raises(RejectedShareError, match=r"^too many$"):
        await run_step("await models.actor.generate(prompts.next())", tmp_path, form=fails)


async def test_a_batch_that_is_not_awaited_is_named(tmp_path: Path) -> None:
    async def slow(order: Order) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(StepFunctionError, match=r"it ended without `await models\.actor\.generate"):
        await run_step("models.actor.generate(prompts.next())", tmp_path, form=slow)


GENERATE = "batch = await models.actor.generate(prompts.next())"
WRONG = {
    "a second batch": (
        f"{GENERATE}\n{GENERATE}",
        r"step\.py:7: ValueError: actor\.generate is called for the second time in this step; a step has one batch",
    ),
    "too many prompts": (
        "prompts.next(9)",
        r"step\.py:6: .*prompts\.next\(9\): a step has 1 to train\.batch_size=8 prompts",
    ),
    "no prompts": ("prompts.next(0)", r"prompts\.next\(0\): a step has 1 to"),
    "something else": ("await models.actor.generate([1])", r"takes prompts from prompts\.next\(k\), and got \[1\]"),
    "too many responses": (
        "await models.actor.generate(prompts.next(), n=5)",
        r"generate\(n=5\): use 1 to rollout\.group_size=4",
    ),
    "a group of one": (
        "await models.actor.generate(prompts.next(), n=1)",
        r"generate\(n=1\): a group of one has no advantage",
    ),
    "another temperature": (
        "await models.actor.generate(prompts.next(), sampling={'temperature': 0.5})",
        r"'temperature': 0\.5.*the loss is that of rollout\.sampling\.temperature=1\.0; leave it out, or change the config",
    ),
    "longer responses": (
        "await models.actor.generate(prompts.next(), sampling={'max_new_tokens': 10})",
        r"'max_new_tokens': 10.*use 1 to rollout\.sampling\.max_new_tokens=9",
    ),
    "an unknown field": (
        "await models.actor.generate(prompts.next(), sampling={'temp': 1})",
        r"'temp'.*it has max_new_tokens, temperature, top_p, top_k, greedy",
    ),
    "no batch": (
        "prompts.next()",
        r"it ended without `await models\.actor\.generate\(\.\.\.\)`, so the step has no batch",
    ),
    "no training": (GENERATE, "it ended without a call of actor.train"),
    "a wait before the order": ("await asyncio.Event().wait()", r"train\.step hangs at .*step\.py:6: no call runs"),
    "a wait after the order": (f"{GENERATE}\nawait asyncio.Event().wait()", r"hangs at .*step\.py:7: no call runs"),
    "another role": (
        "models.ref.generate(prompts.next())",
        r"ref has no function 'generate'; it has inf; only the actor",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_in_a_step_is_named_with_its_line(what: str, tmp_path: Path) -> None:
    body, message = WRONG[what]
    ppo = PPOConfig(advantage_norm="group")
    with pytest.raises(StepFunctionError, match=message):
        await run_step(body, tmp_path, limit_s=0.3, train={"ppo": ppo})


async def test_groups_of_one_are_ordered_where_they_have_an_advantage(tmp_path: Path) -> None:
    body = f"batch = await models.actor.generate(prompts.next(), n=1)\n{TRAIN_ALL}"
    ppo = PPOConfig(advantage_norm="batch")
    orders, _, _ = await run_step(body, tmp_path, train={"ppo": ppo})
    assert orders[0].group_size == 1
    with pytest.raises(StepFunctionError, match="a group of one"):
        await run_step(body, tmp_path, train={"ppo": ppo}, reject_equal_rewards=True)


async def test_a_function_of_the_users_that_is_called_generate_is_not_hidden(tmp_path: Path) -> None:
    own = [
        mfc("generate", "actor", ["tokens"], ["made"]),
        mfc("actor_train", "actor", ["tokens", "made"], kind="train_step"),
    ]
    graph = DataflowGraph(own, DATASET)
    with pytest.raises(ValueError, match=r"train\.mfcs has a function 'generate' of actor; rename it"):
        await run_step(GENERATE, tmp_path, graph=graph)


async def test_a_step_that_gets_its_batch_has_no_generation(tmp_path: Path) -> None:
    async with running(ppo_graph(), PLACES, 5) as (_, master):
        spec = written(tmp_path, "await models.actor.generate(prompts)")
        (tmp_path / "step.py").write_text(
            (tmp_path / "step.py").read_text().replace("(models, prompts)", "(models, batch)")
        )
        use(master, spec)
        master.store("t0", 0, 0, 5)
        message = r"actor has no function 'generate'; it has inf, train; .* if the step is `async def step\(models, prompts\)`"
        with pytest.raises(StepFunctionError, match=message):
            await master.step(["t0"])


def test_next_leaves_out_prompts_that_are_done() -> None:
    """Such as those that a run without orders has trained out of order, before its checkpoint."""
    progress = PromptProgress(4, 2)
    progress.mark_trained([Locator(0, 0), Locator(0, 2)])
    progress.mark_rejected(Locator(1, 0), "x")
    prompts = Prompts(progress, 4, 7)
    assert (prompts.step, prompts.version, prompts.num_left, prompts.epochs_done) == (8, 7, 5, 0.75)
    assert prompts.next(3).locators == prompts.next(3).locators == (Locator(0, 1), Locator(0, 3), Locator(1, 1))
    progress.mark_trained(prompts.next().locators)
    assert prompts.next().locators == (Locator(1, 3),)


# ------------------------------------------------------------------------------------------------- settings that are refused

REFUSED = {
    "mode": ({"mode": "sync"}, "mode='sync': train.step generates its batch with generation servers; use mode=async"),
    "eta": (
        {"manager.max_head_offpolicyness": 2},
        "offpolicyness=2: train.step generates .* so no data is old; set it to 0",
    ),
    "overdue": (
        {"manager.overdue": "train"},
        "manager.overdue='train': train.step .* waits for all of it; use wait or drop",
    ),
    "streaming": ({"train.streaming": True}, "train.streaming=True: train.step .* has no parts; set it to false"),
    "arriving": ({"train.arriving_inference": True}, "train.arriving_inference=True: train.step .*; set it to false"),
}


def refused_before_start(config: ExperimentConfig) -> list[str]:
    rows = [row for row in checks_of("files", cost="short") if row.about == "the step's generation"]
    return make_checks(rows, Case(config)).problems


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_do_not_fit_are_refused_before_the_run_starts(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the source of a file. `check`, which imports the function, refuses them for an installed module, too."""
    changes, message = REFUSED[what]
    written(tmp_path, GENERATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "step", raising=False)
    config = load_experiment(ROOT / "examples" / "grpo" / "config.yaml", ["manager.max_head_offpolicyness=0"])

    def changed(step: str, **by: object) -> ExperimentConfig:
        return with_leaves(config, lambda path, value, _: {"train.step": step, **by}.get(path, value))

    for step in (f"{tmp_path}/step.py:step", "step:step"):
        assert refused_before_start(changed(step)) == []
        assert [finding.state for finding in judge_step(changed(step))] == ["ok"]
        told = refused_before_start(changed(step, **changes))
        found = judge_step(changed(step, **changes))
        if step == "step:step":
            assert told == []
            assert [finding.state for finding in found] == ["fail"]
            told = [f"{finding.name}={changes[finding.name]!r}: {finding.remedy}" for finding in found]
        (problem,) = told
        assert re.search(message, problem)
        if what != "mode":  # an evaluation makes no step
            only = changed(step, **{**changes, "mode": EVAL_ONLY})
            assert (refused_before_start(only), [finding.state for finding in judge_step(only)]) == ([], ["ok"])


@pytest.mark.parametrize(
    ("source", "generates"),
    [
        ("async def step(models, prompts): pass", True),
        ("async def step(models, prompts, more=1): pass", True),
        ("async def step(models, batch): pass\nasync def step(models, prompts): pass", True),
        ("async def step(models, batch, prompts=None): pass", False),
        ("async def other(models, prompts): pass", False),
        ("def step(models, prompts): pass", False),
        ("async def step(models, prompts:", False),
    ],
)
def test_the_source_shows_whether_a_step_generates(source: str, generates: bool, tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(source)
    assert takes_prompts(f"{tmp_path}/step.py:step") is generates
    if "async def step" in source and source.endswith("pass"):
        assert StepFunction(f"{tmp_path}/step.py:step", 1.0).generates is generates
    assert not takes_prompts("")
    assert not takes_prompts(f"{tmp_path}/nowhere.py:step")


async def test_the_master_refuses_them_before_a_ticket_is_granted(tmp_path: Path, opened: Any) -> None:
    train = {"step": written(tmp_path, GENERATE)}
    config = master_config(tmp_path, train=train, max_head_offpolicyness=1, overdue="train")
    message = "manager.max_head_offpolicyness=1: .*set it to 0\nmanager.overdue='train': "
    with pytest.raises(ConfigError, match=message):
        MasterParts(config, opened, manager=PlayedManager(), caller=PlayedWorkers())


# ---------------------------------------------------------------------------------------------------------- the master's steps

STEP = """\
with open(__file__ + ".told", "a") as file:
    file.write(f"{prompts.step}:{prompts.num_left} ")
batch = await models.actor.generate(prompts.next())
for function in models.functions:
    batch = batch.union(function(batch))
await batch
"""


class OrderedManager(PlayedManager):
    """Rolls out what is ordered: the first reports with an order bring its groups into the buffer. Rejects some prompts."""

    def __init__(self, rejects: set[int]) -> None:
        super().__init__()
        self.rejects, self.orders, self.parts = rejects, list[Order](), None
        self.served = Locator(0, 0)

    async def post(self, path: str, body: Any, kind: Any, **limits: Any) -> Any:
        order = getattr(body, "order", None)
        if order is None:
            assert path != "/report", "each report has an order"
            return await super().post(path, body, kind, **limits)
        self.orders += [order] if self.orders[-1:] != [order] else []
        rejected = []
        for position in range(self.served.position, order.before.position):
            if position in self.rejects:
                rejected.append(RejectedPrompt(locator=Locator(0, position), reason="too_hard"))
            else:
                versions = [WeightVersion(body.attempt, body.trained_version).pack()]
                about = {"keys": sorted(TRAJECTORY_KEYS), "version_start": versions, "version_end": versions}
                meta = make_meta(position, **about)
                assert self.parts.buffer.put(meta).verdict == "stored"
                self.parts.workers.tracker.add(0, [meta.ticket_id], meta.keys)
        self.served = max(self.served, order.before)
        self.view = ledger(exhausted=True, rejected=rejected)
        return await super().post(path, body, kind, **limits)


@pytest.fixture
async def opened() -> Any:
    async with AsyncExitStack() as stack:
        yield stack


def orders_of(folder: Path, opened: Any, *, rejects: set[int], num_prompts: int = 8, **fields: Any) -> Any:
    manager = OrderedManager(rejects)
    config = master_config(
        folder, train={"step": written(folder, STEP)}, num_prompts=num_prompts, max_head_offpolicyness=0, **fields
    )
    parts = MasterParts(config, opened, manager=manager, caller=PlayedWorkers())
    manager.parts = parts
    return parts, manager


async def test_each_step_orders_what_the_steps_before_have_left(tmp_path: Path, opened: Any) -> None:
    """Rejected prompts are not replaced within their step. If all of a step are rejected, the function is called again."""
    parts, manager = orders_of(tmp_path, opened, rejects={1, 2, 3}, num_prompts=7, max_rejected_share=1.0)
    assert parts.reports.order == Order(before=Locator(0, 0))  # of a report before the first order: nothing is granted
    await asyncio.wait_for(parts.trainer.begin(None), LIMIT_S)
    assert await asyncio.wait_for(parts.trainer.train(), LIMIT_S)
    told = (tmp_path / "step.py.told").read_text().split()
    assert told == ["1:7", "2:5", "2:3", "3:1"]
    assert [order.before.position for order in manager.orders] == [2, 4, 6, 7]
    trained = [json.loads(line) for line in (tmp_path / "journal" / "master.jsonl").read_text().splitlines()]
    groups = [[group["prompt"] for group in event["groups"]] for event in trained if event["event"] == "trained"]
    assert groups == [[[0, 0]], [[0, 4], [0, 5]], [[0, 6]]]


async def test_a_run_all_of_whose_prompts_are_rejected_ends_with_the_reasons(tmp_path: Path, opened: Any) -> None:
    parts, _ = orders_of(tmp_path, opened, rejects=set(range(4)), num_prompts=4, max_rejected_share=1.0)
    await asyncio.wait_for(parts.trainer.begin(None), LIMIT_S)
    with pytest.raises(RejectedShareError, match="every prompt was rejected, so no step was trained"):
        await asyncio.wait_for(parts.trainer.train(), LIMIT_S)


async def test_too_many_rejections_end_the_run(tmp_path: Path, opened: Any) -> None:
    parts, manager = orders_of(tmp_path, opened, rejects=set(range(1, 40)), num_prompts=40, max_rejected_share=0.5)
    await asyncio.wait_for(parts.trainer.begin(None), LIMIT_S)
    with pytest.raises(RejectedShareError, match=r"max_rejected_share=0\.5 is the limit"):
        await asyncio.wait_for(parts.trainer.train(), LIMIT_S)
    assert manager.orders[-1].before.position < 40


async def test_a_stop_during_the_generation_leaves_the_last_step_for_a_checkpoint(tmp_path: Path, opened: Any) -> None:
    parts, manager = orders_of(tmp_path, opened, rejects=set())
    await asyncio.wait_for(parts.trainer.begin(None), LIMIT_S)
    assert not await asyncio.wait_for(parts.trainer.train_one_step(), LIMIT_S)
    manager.rejects, manager.served = set(), Locator(0, 8)  # the next order brings nothing
    manager.view = ledger()
    post = manager.post

    async def stop(*arguments: Any, **limits: Any) -> Any:
        view = await post(*arguments, **limits)
        parts.leaving.set()
        return view

    parts.reports._manager.post = stop
    assert not await asyncio.wait_for(parts.trainer.train(), LIMIT_S)
    assert parts.books.step == 1
    assert parts.books.progress.cursor == Locator(0, 2)
    assert not parts.workers.executor.is_within_step
