"""A train step that a user writes (train.step): on the executor with its real calls, and what goes wrong in one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from test_executor import DATASET, Master, mfc, placement, ppo_graph, running, trajectory

from asyncrl.config.schema import ConfigError, TrainConfig
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import DataflowGraph, build_dataflow
from asyncrl.master.handles import Batch
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.step_function import StepFunction, StepFunctionError
from asyncrl.protocol.calls import ExecuteMFC, Reallocate
from tests.support.executors import executor_of

PLACES = [placement("actor", "d2", [0, 1]), placement("ref", "d1", [2]), placement("critic", "d1m2", [3, 4])]


def written(folder: Path, body: str) -> str:
    """A file with this step function; its spec. Lines of the body begin at line 6."""
    lines = ["import asyncio", "from asyncrl.master.handles import Batch", "", "", "async def step(models, batch):"]
    path = folder / "step.py"
    path.write_text("\n".join([*lines, *(f"    {line}" for line in body.strip().splitlines())]) + "\n")
    return f"{path}:step"


def use(master: Master, spec: str, *, limit_s: float = 60.0, train: TrainConfig | None = None, function=None) -> None:
    """Replace the step function of the master's executor."""
    world = master.world
    hooks = ParameterHooks(world.graph.mfcs.values(), train or TrainConfig())
    places = list(world.placements.values())
    master.executor = executor_of(
        world.graph,
        places,
        master.buffer,
        master.tracker,
        master.caller,
        master.client,
        hooks,
        function=function or StepFunction(spec, limit_s),
    )


async def train(body: str, folder: Path, *, num_groups: int = 6, limit_s: float = 60.0):
    """Train one step with this function. Returns the calls (MFC, ids) in the order of the first worker of each, and the result."""
    async with running(ppo_graph(), PLACES, 5) as (world, master):
        use(master, written(folder, body), limit_s=limit_s)
        tickets = [f"t{i}" for i in range(num_groups)]
        for i, ticket in enumerate(tickets):
            master.store(ticket, i, i % 2, 5 + i)
        result = await master.step(tickets)
        assert world.held == [set()] * 5  # no worker holds data any more
        assert len(set(world.sent)) == len(world.sent)
        calls = [(body.mfc, tuple(body.ids)) for me, body in world.calls(ExecuteMFC) if me in (0, 2, 3)]
        return calls, result


WHOLE = ("t0", "t1", "t2", "t3", "t4", "t5")


async def test_a_step_with_the_calls_of_the_shipped_one(tmp_path):
    body = """\
batch = batch.union(models.actor.inf(batch), models.ref.inf(batch), models.critic.inf(batch))
actor, critic = models.actor.train(batch), models.critic.train(batch)
assert "actor_train/x" not in batch.union(actor).stats
assert (await actor).stats == {"actor_train/x": 1.0}
await critic
"""
    calls, result = await train(body, tmp_path)
    assert sorted(calls) == [(name, WHOLE) for name in sorted(ppo_graph().mfcs)]
    assert result.stats["critic_train/x"] == 1.0
    assert result.seconds["actor_train"] == 0.5


async def test_parts_of_a_batch_are_computed_and_joined_without_a_wait(tmp_path):
    """The reference runs on chunks, the critic on a selection first. The actor trains on the halves of the joined batch."""
    body = """\
batch = batch.union(models.actor.inf(batch))
chunks = [chunk.union(models.ref.inf(chunk)) for chunk in batch.chunk(4)]
joined = Batch.concat(chunks[::-1])
assert set(joined.ids) == set(batch.ids) and "ref" in joined.keys and "ref" not in batch.keys
short = [id for id, lengths in zip(batch.ids, batch.lengths, strict=True) if sum(lengths) < 8]
left = batch.select([id for id in batch.ids if id not in short])
values = Batch.concat([models.critic.inf(batch.select(short)), models.critic.inf(left)])
joined = joined.union(values)
first, second = joined.chunk(2)
await models.actor.train(first)
await asyncio.gather(models.actor.train(second), models.critic.train(joined))
"""
    calls, result = await train(body, tmp_path)
    by_name = {name: [ids for called, ids in calls if called == name] for name in ppo_graph().mfcs}
    assert by_name["actor_inf"] == [WHOLE]
    assert by_name["ref_inf"] == [("t0", "t1"), ("t2", "t3"), ("t4",), ("t5",)]
    assert by_name["critic_inf"] == [("t0", "t1", "t2"), ("t3", "t4", "t5")]
    assert by_name["actor_train"] == [("t5", "t4", "t2"), ("t3", "t0", "t1")]
    assert len(by_name["critic_train"]) == 1
    assert result.seconds["ref_inf"] == 2.0  # of all its calls


async def test_values_are_read_on_request(tmp_path):
    """Those of a call that has just begun, and of a part of the batch; from any worker that holds them."""
    body = """\
batch = batch.union(models.ref.inf(batch))
assert await batch.read("ref") == [[[float(id[1:])]] for id in batch.ids]
assert await batch.chunk(3)[1].read("rewards") == [[[2.0]], [[3.0]]]
for function in models.functions:
    batch = batch if function is models.ref.inf else batch.union(function(batch))
await batch
"""
    calls, _ = await train(body, tmp_path)
    assert len(calls) == 5


@pytest.mark.parametrize("grid", ["d2", "d2m2", "d2p2", "d2p2m2"])
@pytest.mark.parametrize("is_far", [False, True])
async def test_the_dispatch_of_a_function_decides_which_ranks_get_which_groups(tmp_path, grid, is_far):
    """On meshes of up to three dimensions, beside the actor or on workers of their own. The actor then trains with all results."""
    size = ParallelGrid.parse(grid).size
    first = 2 if is_far else 0
    places = [placement("actor", "d2", [0, 1]), placement("ref", grid, range(first, first + size))]
    kinds = {"spread": "data_parallel", "zero": "rank_zero", "all": "one_to_all", "each": "all_to_all"}
    mfcs = [replace(mfc(name, "ref", ["tokens"], [name]), dispatch=dispatch) for name, dispatch in kinds.items()]
    graph = DataflowGraph([*mfcs, mfc("actor_train", "actor", ["tokens", *kinds], kind="train_step")], DATASET)
    body = """\
zero, all, spread = models.ref.zero(batch), models.ref.all(batch), models.ref.spread(batch)
each = models.ref.each(batch.select(["t0"]), batch.select(["t1", "t2", "t3"]))
await models.actor.train(batch.union(zero, all, spread, each))
"""
    async with running(graph, places, first + size) as (world, master):
        use(master, written(tmp_path, body))
        tickets = ["t0", "t1", "t2", "t3"]
        for i, ticket in enumerate(tickets):
            master.store(ticket, i, i % 2, 5)
        await master.step(tickets)
        calls = {body.mfc: body for _, body in world.calls(ExecuteMFC)}
        workers = {name: {me for me, body in world.calls(ExecuteMFC) if body.mfc == name} for name in calls}
    assert all(workers[name] == set(places[1].workers) for name in kinds)
    assert calls["zero"].parts == [tickets, []]
    assert calls["all"].parts == [tickets, tickets]
    assert sorted(map(len, calls["spread"].parts)) == [2, 2]
    assert calls["each"].parts == [["t0"], ["t1", "t2", "t3"]]
    assert calls["each"].ids == tickets


async def test_a_call_with_the_wrong_number_of_batches_is_refused(tmp_path):
    mfcs = [
        replace(mfc("actor_each", "actor", ["tokens"], ["made"]), dispatch="all_to_all"),
        mfc("actor_train", "actor", ["tokens", "made"], kind="train_step"),
    ]
    async with running(DataflowGraph(mfcs, DATASET), [placement("actor", "d2", [0, 1])], 2) as (_, master):
        use(master, written(tmp_path, "await models.actor.train(batch.union(models.actor.each(batch)))"))
        master.store("t0", 0, 0, 5)
        with pytest.raises(
            StepFunctionError, match=r"step.py:6: .* actor.each got 1 batches, and takes 2 \(dispatch all_to"
        ):
            await master.step(["t0"])


async def test_with_streaming_the_function_is_called_for_each_part(tmp_path):
    """It may divide a part. The last call of a function that trains takes the step."""
    body = """\
batch = batch.union(models.ref.inf(batch), models.critic.inf(batch))
halves = [half.union(models.actor.inf(half)) for half in batch.chunk(2)]
await asyncio.gather(models.actor.train(Batch.concat(halves)), models.critic.train(batch))
"""
    async with running(ppo_graph(), PLACES, 5) as (world, master):
        use(master, written(tmp_path, body))
        tickets = ["t0", "t1", "t2", "t3"]
        for i, ticket in enumerate(tickets):
            master.store(ticket, i, i % 2, 5)
        await master.executor.execute_part(["t2", "t0"], 0)
        await master.step(tickets)
        calls = [body for me, body in world.calls(ExecuteMFC) if body.mfc == "actor_train" and me == 0]
        halves = [body.ids for me, body in world.calls(ExecuteMFC) if body.mfc == "actor_inf" and me == 0]
    assert [(body.ends_step, body.ids, body.batch) for body in calls] == [
        (False, ["t2", "t0"], []),
        (True, ["t1", "t3"], tickets),
    ]
    assert halves == [["t2"], ["t0"], ["t1"], ["t3"]]


async def test_groups_are_trained_again_with_fresh_logprobs(tmp_path):
    """On purpose: a key is dropped and made again, on workers of its own, and goes to its readers again. The second call of
    actor.inf begins after the first training, with its weights."""
    graph = DataflowGraph(
        [
            mfc("actor_inf", "actor@1", ["tokens"], ["prox"]),
            mfc("ref_inf", "ref", ["tokens"], ["ref"]),
            mfc("actor_train", "actor", ["tokens", "prox", "ref"], kind="train_step"),
        ],
        DATASET,
    )
    places = [placement("actor", "d2", [0, 1]), placement("actor@1", "d1", [2]), placement("ref", "d1", [3])]
    body = """\
assert (batch.version, batch.step) == (4, 5) and batch.chunk(2)[0].version == 4
batch = batch.union(models.actor.inf(batch), models.ref.inf(batch))
models_of = models.actor.train(batch)
batch = batch.drop("prox")
assert "prox" not in batch.keys and "ref" in batch.keys
batch = batch.union(models.actor.inf(batch))
await asyncio.gather(models_of, models.actor.train(batch, again=True))
"""
    async with running(graph, places, 4) as (world, master):
        use(master, written(tmp_path, body))
        world.remade = {"prox"}
        for i, ticket in enumerate(WHOLE):
            master.store(ticket, i, i % 2, 5)
        result = await master.step(list(WHOLE), 4)
        seen = [
            (body.mfc if isinstance(body, ExecuteMFC) else (body.source, body.target))
            for me, body in world.log
            if me == (2 if isinstance(body, ExecuteMFC) and body.mfc == "actor_inf" else 0)
            and isinstance(body, ExecuteMFC | Reallocate)
        ]
        assert seen == ["actor_inf", "actor_train", ("actor", "actor@1"), "actor_inf", "actor_train"]
        sent = [(target, group) for _, target, group, key in world.sent if key == "prox"]
        assert {group for _, group in sent} == set(WHOLE)
        assert len(sent) == 2 * len(WHOLE)
    assert result.trained == set(WHOLE)
    assert result.seconds["actor_train"] == 1.0


async def test_the_groups_that_a_step_has_trained_are_counted(tmp_path):
    body = """\
for function in models.functions[:3]:
    batch = batch.union(function(batch))
await asyncio.gather(models.actor.train(batch.select(["t1", "t4"])), models.critic.train(batch.select(["t4", "t5"])))
"""
    _, result = await train(body, tmp_path)
    assert result.trained == {"t1", "t4", "t5"}


async def test_with_streaming_a_part_is_one_update(tmp_path):
    body = """\
for function in models.functions[:3]:
    batch = batch.union(function(batch))
await models.critic.train(batch)
await asyncio.gather(*map(models.actor.train, batch.chunk(2)))
"""
    async with running(ppo_graph(), PLACES, 5, train=TrainConfig(streaming=True)) as (_, master):
        use(master, written(tmp_path, body), train=TrainConfig(streaming=True))
        for i, ticket in enumerate(WHOLE):
            master.store(ticket, i, i % 2, 5)
        message = r"step\.py:9.*actor\.train .* follows actor\.train .*: with train\.streaming all of a part of a batch is one"
        with pytest.raises(StepFunctionError, match=message):
            await master.executor.execute_part(["t2", "t0"], 0)


async def test_the_message_of_a_failure_has_the_remedy(tmp_path):
    for body in ("raise KeyError('kl')", "await models.actor.inf(batch)\nawait asyncio.Event().wait()"):
        function = StepFunction(written(tmp_path, body), 0.1, remedy=lambda: "do this")
        async with running(ppo_graph(), PLACES, 5) as (_, master):
            use(master, "", function=function)
            master.store("t0", 0, 0, 5)
            with pytest.raises(StepFunctionError, match=r"; do this$"):
                await master.step(["t0"])


WRONG = {
    "it raises": ("x = 1\nraise KeyError('kl')", r"step\.py:7: KeyError: 'kl'"),
    "it lacks a key": ("await models.actor.train(batch)", r"step\.py:6: ValueError: 6 of 6 groups have no 'prox'"),
    "it forgets to train": (
        "await models.actor.inf(batch)",
        r"it ended without a call of actor\.train, so the model was not trained",
    ),
    "it trains twice": (
        "for model in models.functions[:3]:\n    batch = batch.union(model(batch))\n"
        "await models.actor.train(batch)\nawait models.actor.train(batch.chunk(2)[0])",
        r"step\.py:9: ValueError: actor\.train \(.*step\.py:9\) trains 3 groups again that actor\.train \(.*step\.py:8\) has "
        r"trained; pass again=True if that is meant",
    ),
    "it drops a result": (
        "for model in models.functions:\n    batch = batch.union(model(batch))\n"
        "models.ref.inf(batch.chunk(2)[1])\nawait batch",
        r"the result of ref\.inf \(.*step\.py:8\) was dropped",
    ),
    "it makes a key twice": (
        "batch.union(models.ref.inf(batch)).union(models.ref.inf(batch))",
        r"step\.py:6: ValueError: ref\.inf .* and ref\.inf .* both make ref for the same groups",
    ),
    "it calls a function that does not exist": (
        "models.actor.infer(batch)",
        "actor has no function 'infer'; it has inf, train",
    ),
    "it calls a role that does not exist": ("models.judge.inf(batch)", "no role 'judge'; it has actor, ref, critic"),
    "it reads a key that is not made": (
        "await batch.read('prox')",
        r"step\.py:6: ValueError: 6 of 6 groups have no 'prox'",
    ),
    "it hangs": ("await models.actor.inf(batch)\nawait asyncio.Event().wait()", r"hangs at .*step\.py:7: no call runs"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_in_a_step_is_named_with_its_line(what, tmp_path):
    body, message = WRONG[what]
    with pytest.raises(StepFunctionError, match=message):
        await train(body, tmp_path, limit_s=0.3)


async def test_the_error_of_a_call_is_not_taken_for_one_of_the_function(tmp_path):
    async with running(ppo_graph(), PLACES, 5) as (world, master):
        use(master, written(tmp_path, "for f in models.functions:\n    batch = batch.union(f(batch))\nawait batch"))
        master.store("t0", 0, 0, 5)
        world.gates["ref_inf"] = [asyncio.Event()]  # the reference never answers
        master.caller._limit_s = 0.2
        with pytest.raises(TimeoutError):
            await master.step(["t0"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:step", "nowhere.py"),
        ("asyncrl.master.handles:Batch", "name a function `async def step"),
        ("asyncrl.master.step_function:StepFunction.run", "is called as step"),
    ],
)
def test_a_spec_that_is_no_step_function_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        StepFunction(spec, 1.0)


def test_a_function_with_other_arguments_is_refused(tmp_path):
    (tmp_path / "few.py").write_text("async def step(batch):\n    pass\n")
    with pytest.raises(ConfigError, match=r"it is called as step\(models, batch\)"):
        StepFunction(f"{tmp_path / 'few.py'}:step", 1.0)


async def no_values(ids, key):
    raise AssertionError("nothing is read")


def test_handles():
    metas = [trajectory(f"t{i}", i, 0, 10 + i) for i in range(5)]
    batch = Batch(metas, no_values)
    assert (len(batch), batch.keys, batch.lengths[4], batch.rewards[0]) == (5, frozenset(DATASET), [14], [0.0])
    assert [len(chunk) for chunk in batch.chunk(3)] == [2, 2, 1]
    assert Batch.concat(batch.chunk(5)).ids == batch.ids
    assert batch.select(["t3", "t1"]).ids == ("t1", "t3")
    for wrong, message in (
        (lambda: batch.chunk(6), "5 groups cannot be divided into 6 chunks"),
        (lambda: batch.select(["t9"]), "lacks 1 of the selected groups, e.g. t9"),
        (lambda: batch.union(batch.chunk(5)[0]), "union needs the same groups"),
        (lambda: Batch.concat([batch, batch]), "the same group is in a batch twice"),
        (lambda: batch.makers("values"), "5 of 5 groups have no 'values'"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_names_of_functions():
    names = {name: f"{mfc.role}.{mfc.function}" for name, mfc in build_dataflow(TrainConfig()).mfcs.items()}
    assert names == {"actor_inf": "actor.inf", "advantages": "actor.advantages", "actor_train": "actor.train"}
    extra = DataflowGraph([mfc("filter", "actor", ["tokens"], ["kept"])], DATASET).mfcs["filter"]
    assert extra.function == "filter"
