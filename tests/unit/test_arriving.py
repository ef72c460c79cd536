"""Detached frozen models process stored groups while the trainer trains (train.arriving_inference)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from test_detached_groups import COMPUTED, FETCHED_FROM, FETCHING, WorldOfGroups
from test_detached_groups import running as running_groups
from test_executor import DATASET, mfc, placement, trajectory

from asyncrl.config.schema import (
    ExperimentConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
    TrainConfig,
)
from asyncrl.dataflow.graph import DataflowGraph, build_dataflow
from asyncrl.dataflow.layout_checks import problems_of_layout
from asyncrl.master.homes import ArrivingGroups
from asyncrl.protocol.calls import ExecuteMFC, FetchData

WITH_ALL = TrainConfig(
    ppo=PPOConfig(kl_coef=0.1), reward_model=RewardModelConfig(path="/r"), teacher=TeacherConfig(path="/t")
)


def graph_of(role, inference):
    """An actor, and a model of another role on workers of its own."""
    interface = build_dataflow(WITH_ALL).mfcs[inference].interface
    return DataflowGraph(
        [
            mfc("actor_inf", "actor", ["tokens"], ["prox"]),
            replace(mfc(inference, role, ["tokens"], ["out"]), interface=interface),
            mfc("actor_train", "actor", ["tokens", "prox", "out"], kind="train_step"),
        ],
        DATASET,
    )


# --------------------------------------------------------------------------------------------------------------- decisions


def metas(*groups):
    """Each group: (ticket, tokens, oldest version)."""
    made = []
    for position, (ticket, tokens, version) in enumerate(groups):
        meta = trajectory(ticket, position, 0, tokens)
        meta.version_start[:] = [version]
        made.append(meta)
    return made


def tickets(chunk):
    return [meta.ticket_id for meta in chunk]


def test_a_chunk_has_the_oldest_groups_that_are_not_done_and_at_most_a_micro_batch_of_tokens():
    groups = ArrivingGroups(max_tokens=10, batch_size=2, update_interval=0)
    stored = metas(("a", 4, 1), ("b", 4, 0), ("c", 4, 1), ("d", 30, 2))
    assert tickets(groups.next_chunk(stored, set(), version=2, num_left=0)) == ["b", "a"]
    assert tickets(groups.next_chunk(stored, {"a", "b"}, version=2, num_left=0)) == ["c"]
    assert tickets(groups.next_chunk(stored, {"a", "b", "c"}, version=2, num_left=0)) == ["d"]
    assert groups.next_chunk(stored, {"a", "b", "c", "d"}, version=2, num_left=0) == []


@pytest.mark.parametrize(
    ("version", "num_left", "num_groups"),
    [(0, 2, 6), (0, 0, 4), (1, 0, 2), (2, 2, 2), (2, 1, 1), (2, 0, 0), (3, 2, 6), (5, 0, 0)],
)
def test_no_group_is_processed_before_the_refresh_that_precedes_its_step(version, num_left, num_groups):
    """The reference is refreshed after the steps that produce versions 3, 6 and so on. A batch has 2 groups. With train.streaming a
    step may have taken one of them."""
    groups = ArrivingGroups(max_tokens=1000, batch_size=2, update_interval=3)
    stored = metas(*((f"t{i}", 1, 0) for i in range(10)))
    chunk = groups.next_chunk(stored, {"t0"}, version=version, num_left=num_left)
    assert tickets(chunk) == [f"t{i}" for i in range(1, num_groups)]


def test_arriving_inference_without_a_detached_model_is_refused():
    train = TrainConfig(arriving_inference=True, ppo=PPOConfig(kl_coef=0.1))
    for role, training in (("ref_inf", train), ("teacher_inf", replace(train, teacher=TeacherConfig(path="/t")))):
        placed = ExperimentConfig(model_path="/m", allocation=f"transformers.d1+d1+{role}:d1", train=training)
        assert list(problems_of_layout(placed)) == []
    own = ExperimentConfig(model_path="/m", allocation="transformers.d1+d1+actor_inf:d1+advantages:cpu1", train=train)
    assert list(problems_of_layout(replace(own, train=replace(train, actor_inf_on_missing="wait")))) == []
    places = (
        "transformers.d1+d1",
        "transformers.d1+d1+advantages:cpu1",
        own.allocation,
    )  # actor_inf is in the trainer group
    for allocation in places:
        refused = ExperimentConfig(model_path="/m", allocation=allocation, train=train)
        ((field, _, remedy),) = problems_of_layout(refused)
        assert (field, remedy.partition(",")[0]) == (
            "train.arriving_inference",
            "needs a reference",
        )


def test_a_cpu_worker_is_no_actor_inf_on_workers_of_its_own():
    train = TrainConfig(actor_inf_on_missing="wait")
    refused = ExperimentConfig(model_path="/m", allocation="transformers.d1+d1+advantages:cpu1", train=train)
    ((field, _, remedy),) = problems_of_layout(refused)
    assert (field, remedy.partition(",")[0]) == (
        "train.actor_inf_on_missing",
        "needs actor_inf on workers of its own",
    )


# ------------------------------------------------------------------------------------------------------------------ steps


@contextlib.asynccontextmanager
async def running(train=None, role="ref", inference="ref_inf", **options):
    train = train or TrainConfig(arriving_inference=True, batch_size=2)
    graph, places = graph_of(role, inference), [placement("actor", "d2", [0, 1]), placement(role, "d2", [2, 3])]
    async with running_groups(graph, places, 4, [[2, 3]], train=train, world_of=World, **options) as (world, master):
        arriving = asyncio.create_task(master.executor.process_arriving(0))
        await asyncio.sleep(0)  # it has begun
        yield world, master
        if arriving.done():
            arriving.result()
        arriving.cancel()


class World(WorldOfGroups):
    async def run(self, body, me):
        self.ids[body.mfc].update(body.ids if me == self.placements[self.graph.mfcs[body.mfc].model].workers[0] else ())
        return await super().run(body, me)

    @property
    def ids(self):
        return self.__dict__.setdefault("_ids", defaultdict(Counter))


def store(master, *names):
    for name in names:
        master.store(name, int(name[1:]), int(name[1:]) % 2, 5)


async def until(happened):
    async with asyncio.timeout(20.0):
        while not happened():  # noqa: ASYNC110 - the state is the fake workers'
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("role", "inference"), [("ref", "ref_inf"), ("reward", "rew_inf"), ("teacher", "teacher_inf")])
async def test_groups_are_processed_while_the_trainer_trains_and_once_each(role, inference):
    async with running(role=role, inference=inference) as (world, master):
        gate = asyncio.Event()
        world.gates["actor_train"] = [gate]
        store(master, "t0", "t1")
        first = asyncio.create_task(master.step(["t0", "t1"], 0))
        await until(lambda: world.ids["actor_train"])
        store(master, "t2", "t3", "t4")
        await until(lambda: world.ids[inference]["t4"])
        await until(
            lambda: {"t2", "t3", "t4"} <= {group for group, key in world.held[2] | world.held[3] if key == "out"}
        )
        assert not first.done()
        gate.set()
        await first
        stats = (await master.step(["t2", "t3"], 1)).stats
        assert stats[f"arriving/{inference}_share"] == 1.0
        stats = (await master.step(["t4"], 2)).stats
        assert stats[f"arriving/{inference}_share"] == 1.0
        assert world.ids[inference] == Counter(["t0", "t1", "t2", "t3", "t4"])
        assert all(not held for held in world.held), "workers still hold data"
        assert (len(master.tracker), len(master.buffer)) == (0, 0)


@pytest.mark.parametrize("moment", [FETCHING, COMPUTED, FETCHED_FROM, "idle"])
async def test_groups_are_processed_again_if_their_reader_ends(moment):
    async with running() as (world, master):
        world.ends = {(moment, 0)} if moment != "idle" else set()
        store(master, "t0", "t1", "t2")
        await until(lambda: {"t0", "t1", "t2"} <= master.tracker.held_by_any([2, 3], ["out"]))
        if moment == "idle":
            world.begin_again(2)
        await master.step(["t0", "t1"], 0)
        await master.step(["t2"], 1)
        assert world.incarnations[2] == 1
        assert world.ids["actor_train"] == Counter(["t0", "t1", "t2"])
        assert all(not held for held in world.held)
        assert len(master.tracker) == 0


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("ref", {"ref": RefConfig(update_interval=1)}),
        ("ref", {"ref": RefConfig(update_interval=2)}),
        ("actor@1", {"actor_inf_on_missing": "wait"}),
    ],
)
async def test_groups_get_the_weights_of_their_step(role, settings):
    """Weights are numbers here. `expected` is the model's weight in the step that runs, or comes next. The fake workers
    assert it for every MFC of the role, also on arriving groups. A detached layout of the actor changes with each step."""
    train = TrainConfig(arriving_inference=True, batch_size=1, **settings)
    interval = train.ref.update_interval or 1
    async with running(train, role=role) as (world, master):
        world.weights = [0.0, 0.0, 2.0, 2.0]
        shares, weights = [], {}
        record, expected = World.run, 2.0

        async def run(body, me):
            if body.mfc == "ref_inf":
                weights.update(dict.fromkeys(body.ids, world.weights[me]))
            return await record(world, body, me)

        world.run = run
        for version, trained in enumerate(("t1", "t3", "t0", "t5", "t2", "t7")):  # some wait across a refresh
            store(master, f"t{2 * version}", f"t{2 * version + 1}")  # more groups than the steps need
            world.weights[:2] = [10.0 + version] * 2
            await asyncio.sleep(0.05)
            shares.append((await master.step([trained], version)).stats["arriving/ref_inf_share"])
            assert weights[trained] == expected
            if (version + 1) % interval == 0:
                expected = 10.0 + version
        assert max(shares) == 1.0


async def test_a_reference_that_ends_in_a_chunk_during_a_refresh_gets_the_new_weights():
    """The chunk excludes the refresh. Its repetition needs the new weights, because those before are no longer kept."""
    train = TrainConfig(arriving_inference=True, batch_size=1, ref=RefConfig(update_interval=2))
    async with running(train) as (world, master):
        world.weights, gate = [10.0, 10.0, 2.0, 2.0], asyncio.Event()
        store(master, "t1", "t2")
        master.store("t3", 3, 1, 5, version=1)
        await master.step(["t1"], 0)
        await master.step(["t2"], 1)  # after it the first refresh
        await until(lambda: "t3" in master.tracker.held_by_any([2, 3], ["out"]))
        master.store("t4", 4, 0, 5, version=1)
        await until(lambda: "t4" in master.tracker.held_by_any([2, 3], ["out"]))
        await master.step(["t3"], 2)
        world.gates["ref_inf"] = [gate]
        store(master, "t5")  # older than t4, so it may be the next to be trained
        await until(lambda: world.ids["ref_inf"]["t5"])
        world.weights[:2] = [13.0] * 2
        await master.step(["t4"], 3, detached=False)  # after it the second refresh
        await until(lambda: world.kept[0, "ref"][1] == 13.0)
        world.begin_again(2)
        gate.set()
        await asyncio.wait_for(master.step(["t5"], 4), 20.0)
        assert world.weights[2:] == [13.0] * 2
        assert world.incarnations[2] == 1


async def test_a_group_that_is_dropped_is_released():
    async with running() as (world, master):
        gate = asyncio.Event()
        world.gates["ref_inf"] = [gate]
        store(master, "t0")
        await until(lambda: world.calls(ExecuteMFC))
        master.buffer.drop("t0")
        master.tracker.drop(["t0"])
        gate.set()
        await until(lambda: world.held[2] == world.held[3] == set())
        assert len(master.tracker) == 0


async def test_a_group_that_is_dropped_while_its_inputs_arrive_is_not_processed():
    """The master may have cleared them again, together with other groups that it has dropped."""
    async with running() as (world, master):
        fetch, arrived, gate = world.fetch, asyncio.Event(), asyncio.Event()

        async def answer_late(body, me):
            result = await fetch(body, me)
            arrived.set()
            await gate.wait()
            return result

        world.fetch = answer_late
        store(master, "t0", "t1")
        await arrived.wait()
        master.buffer.drop("t0")
        master.tracker.drop(["t0"])
        world.held[:] = [{pair for pair in held if pair[0] != "t0"} for held in world.held]
        gate.set()
        await until(lambda: world.ids["ref_inf"]["t1"])
        assert world.ids["ref_inf"] == Counter(["t1"])


async def test_without_the_setting_nothing_runs_before_the_step():
    async with running(TrainConfig(batch_size=2)) as (world, master):
        store(master, "t0")
        await asyncio.sleep(0.1)
        assert world.calls(FetchData) == []
        assert "arriving/ref_inf_share" not in (await master.step(["t0"], 0)).stats


# ------------------------------------------------------------------------------------------------ parts of a batch


@pytest.mark.parametrize("last", [["t3"], []])
async def test_parts_of_a_batch_with_groups_that_arrive(last):
    """The share is one of all groups of the batch. The last part may have none."""
    train = TrainConfig(arriving_inference=True, batch_size=8)
    async with running(train) as (world, master):
        store(master, "t0")
        await master.executor.execute_part(["t0"], 0)  # begins before the group has been processed
        store(master, "t1", "t2", *last)
        await until(lambda: len(master.tracker.held_by_any([2, 3], ["out"])) == 3 + len(last))
        await master.executor.execute_part(["t1", "t2"], 0)
        stats = (await master.step(["t0", "t1", "t2", *last], 0)).stats
        num_groups = 3 + len(last)
        assert stats["arriving/ref_inf_share"] == (num_groups - 1) / num_groups
        assert stats["streaming/parts"] == 3
        assert world.ids["actor_train"] == Counter(["t0", "t1", "t2", *last])
        assert (len(master.tracker), len(master.buffer)) == (0, 0)


async def test_between_parts_only_groups_of_the_step_are_processed_before_a_refresh():
    """The reference changes after each step. A batch has two groups, of which one has been trained: one more is processed."""
    train = TrainConfig(arriving_inference=True, batch_size=2, ref=RefConfig(update_interval=1))
    async with running(train) as (world, master):
        world.weights = [1.0] * 4
        store(master, "t0")
        await master.executor.execute_part(["t0"], 0)
        store(master, "t1", "t2", "t3")
        await until(lambda: world.ids["ref_inf"]["t1"])
        await asyncio.sleep(0.05)
        assert set(world.ids["ref_inf"]) == {"t0", "t1"}
        await master.step(["t0", "t1"], 0)
        await until(lambda: world.ids["ref_inf"]["t3"])
        assert world.ids["ref_inf"] == Counter(["t0", "t1", "t2", "t3"])
