"""A detached reference ends at any moment of a step: the step still completes, and the trainer group is not affected."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from random import Random

import pytest
from test_executor import DATASET, LIMIT_S, NAMES, RUNTIME, Master, World, mfc, placement, ppo_graph

from asyncrl.config.schema import RefConfig, TrainConfig
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.topology import build_handler_routing
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.master.buffer import StorageTracker
from asyncrl.master.detached import DetachedGroups, GroupEndedError, GroupFailsError
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.refresh import Refresher
from asyncrl.protocol.calls import (
    CallResult,
    ClearData,
    ExecuteMFC,
    FetchData,
    FetchWeights,
    KeepWeights,
    Ping,
    Redistribute,
)
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.channel import FencedError
from asyncrl.streams.request_reply import NameResolvingReplyServer, NameResolvingRequestClient
from tests.support.executors import executor_of
from tests.support.memory_names import MemoryNameResolver
from tests.support.memory_transport import MemoryTransport

# When a reference ends: before it fetches its inputs, after it has computed, or before its outputs are fetched
FETCHING, COMPUTED, FETCHED_FROM = "fetching", "computed", "fetched from"
# When a refreshed reference ends: before it has fetched weights, or afterwards
FETCHING_WEIGHTS, HAS_WEIGHTS = "fetching weights", "has weights"


class WorldOfGroups(World):
    """Workers that also fetch. The workers of a detached group end and restart together, as under the launcher."""

    def __init__(self, graph, placements, num_workers, detached, rng, start):
        super().__init__(graph, placements, num_workers, rng)
        elsewhere = {worker for group in detached for worker in group}
        trainer = tuple(worker for worker in range(num_workers) if worker not in elsewhere)
        self.worker_groups = WorkerGroups(trainer, tuple(map(tuple, detached)))
        self.incarnations = [0] * num_workers
        self.ends = set()  # (moment, incarnation): when a detached group ends
        self.fails = set()  # incarnations in which an MFC of a detached group raises
        self.stay_away = False  # groups are not restarted
        self.beside = set()
        self.start = start
        self.serving, self.servers = {}, {}
        self.weights = [float(index) for index in range(num_workers)]  # each worker's model is one number
        self.expected = None  # weights that an MFC of a detached group must compute with
        self.may_fetch_weights = asyncio.Event()
        self.may_fetch_weights.set()
        self.kept = {}  # (worker, target) -> version and weights that the worker keeps

    async def serve(self, server, me):
        while True:
            call = await server.receive()
            self.log.append((me, call.body))
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            result = await self.execute(call.body, me)
            if (
                isinstance(call.body, ExecuteMFC)
                and not self.worker_groups.is_local(me)
                and self.incarnations[me] in self.fails
            ):
                call.fail(RuntimeError("out of memory"))
                await self.end_of(me)
            call.reply(result)

    async def execute(self, body, me):
        if isinstance(body, FetchData):
            return await self.fetch(body, me)
        if isinstance(body, Redistribute):
            assert me in self.worker_groups.trainer
            for step in body.steps:
                await self.move(step, me)
        elif isinstance(body, ExecuteMFC):
            assert me in self.worker_groups.trainer or self.weights[me] == self.expected or self.expected is None
            result = await self.run(body, me)
            await self.moment_detached(COMPUTED, me)
            return result
        elif isinstance(body, KeepWeights):
            on_disk = float(self.worker_groups.of(self.placements[body.target].workers[0])[0])
            _, before = self.kept.get((me, body.target), ("", on_disk))
            mean = body.share * self.weights[me] + (1 - body.share) * before
            self.kept[me, body.target] = body.weight_version, mean
        elif isinstance(body, FetchWeights):
            await self.moment_detached(FETCHING_WEIGHTS, me)
            await self.may_fetch_weights.wait()
            there = {self.kept[source, body.model] for source in body.sources}
            if {version for version, _ in there} != {body.weight_version}:
                return CallResult(unfetched=f"other weights than {body.weight_version} are kept")
            ((_, self.weights[me]),) = there
            await self.moment_detached(HAS_WEIGHTS, me)
        elif isinstance(body, ClearData):
            self.held[me] = {pair for pair in self.held[me] if pair[0] not in body.ids}
        return CallResult()

    async def fetch(self, body, me):
        await self.moment_detached(FETCHING, me)
        for part in body.parts:
            assert self.worker_groups.of(part.source) != self.worker_groups.of(me), (
                "data inside a group must be sent, not fetched"
            )
            if not self.worker_groups.is_local(part.source) and (FETCHED_FROM, part.group_incarnation) in self.ends:
                self.ends.remove((FETCHED_FROM, part.group_incarnation))
                self.begin_again(part.source)
            if part.group_incarnation != self.incarnations[part.source]:
                return CallResult(unfetched=f"model_worker/{part.source} gives no data")
            pairs = {(group, key) for group in part.ids for key in part.keys}
            assert self.held[part.source] >= pairs, "a worker was asked for data that it does not hold"
            self.held[me] |= pairs
        return CallResult(num_bytes=len(body.parts))

    async def moment_detached(self, moment, me):
        if not self.worker_groups.is_local(me) and (moment, self.incarnations[me]) in self.ends:
            self.ends.remove((moment, self.incarnations[me]))
            await self.end_of(me)

    async def end_of(self, me):
        self.begin_again(me)
        await asyncio.Event().wait()  # stay here until cancelled: this incarnation has ended

    def begin_again(self, worker):
        """End all workers of the group at once. They restart one by one."""
        group = self.worker_groups.of(worker)
        for member in group:
            self.incarnations[member] += 1
            self.held[member] = set()
            self.weights[member] = float(group[0])  # as on disk
        task = asyncio.create_task(self.bring_back(group, self.incarnations[worker]))
        self.beside.add(task)

    async def bring_back(self, group, number):
        for member in group:
            self.serving[member].cancel()
            await self.servers[member].close()
        for member in () if self.stay_away else self.rng.sample(group, len(group)):
            await asyncio.sleep(self.rng.random() / 50)
            if self.incarnations[member] == number:
                await self.start(member)


@contextlib.asynccontextmanager
async def running(
    graph,
    placements,
    num_workers,
    detached,
    *,
    rng=None,
    limit_s=LIMIT_S,
    train=None,
    world_of=WorldOfGroups,
):
    transport = MemoryTransport()

    async def start(index):
        server = world.servers[index] = NameResolvingReplyServer(
            resolver,
            NAMES,
            index=index,
            runtime=RUNTIME,
            transport=transport,
            group_incarnation=world.incarnations[index],
        )
        await server.start()
        world.serving[index] = asyncio.create_task(world.serve(server, index))

    world = world_of(graph, placements, num_workers, detached, rng or Random(0), start)
    async with contextlib.AsyncExitStack() as stack:
        resolver = stack.enter_context(MemoryNameResolver(uuid.uuid4().hex))
        world.delete = resolver.delete
        for index in range(num_workers):
            await start(index)
        tracker = StorageTracker(world.worker_groups)
        client = NameResolvingRequestClient(
            resolver,
            NAMES,
            num_workers=num_workers,
            handler_routing=build_handler_routing(placements),
            runtime=RUNTIME,
            incarnation="master",
            transport=transport,
            groups=world.worker_groups.all,
            on_new_incarnation=tracker.forget,
        )
        stack.push_async_callback(client.close)
        await client.start()
        yield world, MasterOfGroups(world, client, tracker, limit_s, train or TrainConfig())
        ended = [task for task in world.serving.values() if task.done() and not task.cancelled()]
        for task in [*ended, *world.beside]:
            await task  # re-raises an assertion of a worker
        for task in world.serving.values():
            task.cancel()
        await asyncio.gather(*world.serving.values(), return_exceptions=True)
        for server in world.servers.values():
            await server.close()


class MasterOfGroups(Master):
    def __init__(self, world, client, tracker, limit_s, train):
        super().__init__(world, client, train, 64, limit_s)
        self.tracker = tracker
        self.detached = DetachedGroups(
            world.worker_groups,
            client,
            self.caller,
            limit_s,
            missing_after_s=train.missing_after_s,
        )
        models = list(world.placements.values())
        hooks = ParameterHooks(world.graph.mfcs.values(), train)
        self.refresher = Refresher(world.placements, self.detached, self.caller, 1, train)
        self.executor = executor_of(
            world.graph,
            models,
            self.buffer,
            tracker,
            self.caller,
            client,
            hooks,
            detached=self.detached,
            refresher=self.refresher,
        )

    async def step(self, tickets, version=0, *, detached=True):
        result = await asyncio.wait_for(self.executor.execute_step(tickets, version), LIMIT_S)
        holding, body = self.tracker.drop(tickets), ClearData(ids=list(tickets))
        self.detached.tell_nowait("clear", [w for w in holding if not self.world.worker_groups.is_local(w)], body)
        await self.caller.call("clear", [w for w in holding if w in self.world.worker_groups.trainer], body)
        for group in self.world.worker_groups.detached if detached else ():  # wait for the answers of each group
            await self.detached.repeated(
                "clear",
                group,
                lambda incarnation: self.detached.call(incarnation, "-", incarnation.group, body),
            )
        return result


PLACES = [placement("actor", "d2", [0, 1]), placement("ref", "d1", [2]), placement("critic", "d1m2", [3, 4])]


def num_calls(world):
    """Count MFC calls by MFC and worker."""
    return Counter((body.mfc, me) for me, body in world.calls(ExecuteMFC))


async def steps(world, master, count=2):
    for step in range(count):
        tickets = [f"s{step}t{i}" for i in range(6)]
        for i, ticket in enumerate(tickets):
            master.store(ticket, 10 * step + i, i % 2, 5 + i)
        await master.step(tickets, step)
    assert all(not held for held in world.held), "workers still hold data"
    assert (len(master.tracker), len(master.buffer)) == (0, 0)


async def test_a_detached_group_fetches_its_inputs_and_the_trainer_group_its_outputs():
    async with running(ppo_graph(), PLACES, 5, [[2]]) as (world, master):
        await steps(world, master)
        assert set(num_calls(world).values()) == {2}  # one call per step
        assert {me for me, _ in world.calls(Redistribute)} <= {0, 1, 3, 4}
        assert {me for me, _ in world.calls(FetchData)} >= {0, 1, 2}
        fetched = [part for me, body in world.calls(FetchData) for part in body.parts if me == 2]
        assert {key for part in fetched for key in part.keys} == {"tokens"}, "it must fetch only the keys that it reads"


@pytest.mark.parametrize("moment", [FETCHING, COMPUTED, FETCHED_FROM])
async def test_calls_are_repeated_in_the_next_incarnation_of_a_group(moment):
    async with running(ppo_graph(), PLACES, 5, [[2]]) as (world, master):
        world.ends = {(moment, 0), (moment, 1)}
        await steps(world, master)
        assert world.incarnations == [0, 0, 2, 0, 0]
        calls = num_calls(world)
        assert calls.pop(("ref_inf", 2)) == (2 if moment == FETCHING else 4)
        assert set(calls.values()) == {2}, "another worker received a call twice"


async def test_calls_to_several_workers_are_repeated_once_all_are_back():
    graph = DataflowGraph(
        [
            mfc("ref_inf", "ref", ["tokens"], ["ref"]),
            mfc("rew_inf", "reward", ["tokens", "ref"], ["scores"]),
            mfc("again", "ref", ["ref", "scores"], ["more"]),
            mfc("train", "actor", ["tokens", "rewards", "scores", "more"], kind="train_step"),
        ],
        DATASET,
    )
    places = [placement("actor", "d2", [1, 4]), placement("ref", "d2m2", [0, 2, 3, 5]), placement("reward", "d1", [2])]
    for seed in range(8):
        async with running(graph, places, 6, [[0, 2, 3, 5]], rng=Random(seed)) as (world, master):
            world.ends = {(Random(seed).choice((FETCHING, COMPUTED, FETCHED_FROM)), number) for number in range(3)}
            await steps(world, master)
            assert world.incarnations[1] == world.incarnations[4] == 0
            assert len({world.incarnations[worker] for worker in (0, 2, 3, 5)}) == 1
            assert world.incarnations[0] == 3
            of_ref = {count for (name, _), count in num_calls(world).items() if name == "ref_inf"}
            assert max(of_ref) - min(of_ref) <= 3  # each of 3 incarnations may end before it has read a call


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("moment", [FETCHING_WEIGHTS, HAS_WEIGHTS, FETCHING, COMPUTED])
async def test_a_refreshed_reference_keeps_its_weights_in_every_incarnation(moment, share):
    """Weights are numbers here: the actor's weight is its version, the reference's weight on disk is 2."""
    graph = DataflowGraph(
        [
            mfc("ref_inf", "ref", ["tokens"], ["ref"]),
            mfc("actor_train", "actor", ["tokens", "ref"], kind="train_step"),
        ],
        DATASET,
    )
    places = [placement("actor", "d2", [0, 1]), placement("ref", "d2", [2, 3])]
    train = TrainConfig(ref=RefConfig(update_interval=2, update_share=share))
    async with running(graph, places, 4, [[2, 3]], train=train) as (world, master):
        world.weights = [0.0, 0.0, 2.0, 2.0]
        world.ends = {(moment, number) for number in range(3)}
        world.expected = 2.0
        for version in range(1, 9):
            ticket = f"t{version}"
            master.store(ticket, version, 0, 5)
            world.weights[:2] = [float(version)] * 2
            await master.step([ticket], version - 1)
            if version % 2 == 0:
                world.expected = share * version + (1 - share) * world.expected
            if version in (3, 6):
                world.begin_again(2)  # with no call in flight
        await master.refresher.refreshed("ref")
        assert world.incarnations[2] >= 3
        assert world.weights[2:] == [world.expected] * 2


async def test_a_step_is_over_before_a_reference_has_its_weights_and_its_next_call_waits_for_them():
    graph = DataflowGraph(
        [
            mfc("actor_inf", "actor", ["tokens"], ["old"]),
            mfc("ref_inf", "ref", ["tokens"], ["ref"]),
            mfc("actor_train", "actor", ["tokens", "old", "ref"], kind="train_step"),
        ],
        DATASET,
    )
    places = [placement("actor", "d2", [0, 1]), placement("ref", "d2", [2, 3])]
    train = TrainConfig(ref=RefConfig(update_interval=1))
    async with running(graph, places, 4, [[2, 3]], train=train) as (world, master):
        world.weights = [1.0, 1.0, 2.0, 2.0]
        world.may_fetch_weights.clear()
        master.store("t0", 0, 0, 5)
        master.store("t1", 1, 1, 5)
        await master.step(["t0"], 0, detached=False)  # it ends although no worker has fetched the weights
        assert world.kept[0, "ref"] == world.kept[1, "ref"] == ("a0001-v00000001", 1.0)
        world.weights[:2] = [3.0] * 2  # the next step changes them
        world.expected = 1.0
        stepping = asyncio.create_task(master.step(["t1"], 1, detached=False))
        async with asyncio.timeout(LIMIT_S):
            while num_calls(world)["actor_inf", 0] < 2:  # noqa: ASYNC110 - the state is the fake workers'
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert num_calls(world)["ref_inf", 2] == 1
        world.may_fetch_weights.set()
        await stepping
        assert num_calls(world)["ref_inf", 2] == 2


async def test_a_refresh_that_fails_ends_the_step_that_needs_the_model():
    train = TrainConfig(ref=RefConfig(update_interval=1))
    places = [placement("actor", "d2", [0, 1]), placement("ref", "d1", [2]), placement("critic", "d1m2", [3, 4])]
    async with running(ppo_graph(), places, 5, [[2]], train=train, limit_s=0.5) as (world, master):
        master.store("t0", 0, 0, 5)
        master.store("t1", 1, 1, 5)
        world.may_fetch_weights.clear()
        await master.step(["t0"], 0, detached=False)
        # The step's own waits have the same limit. So the refresh has failed before the step begins
        for ends in (master.refresher.refreshed("ref"), master.step(["t1"], 1, detached=False)):
            with pytest.raises(WaitTimeoutError, match=r"waited 0\.5 s for ref to fetch weights from model workers"):
                await ends
        world.may_fetch_weights.set()


async def test_an_error_in_a_detached_group_ends_only_its_incarnation():
    async with running(ppo_graph(), PLACES, 5, [[2]]) as (world, master):
        world.fails = {0}
        await steps(world, master)
        assert world.incarnations == [0, 0, 1, 0, 0]


async def test_a_call_that_fails_in_each_incarnation_with_the_same_error_ends_the_run():
    async with running(ppo_graph(), PLACES, 5, [[2]]) as (world, master):
        world.fails = set(range(1000))
        with pytest.raises(
            GroupFailsError, match=r"failed in 3 incarnations .* the same error, so the run ends: .*out of memory"
        ):
            await steps(world, master)
        assert world.incarnations[2] == 3


async def test_every_wait_for_a_group_that_does_not_return_has_a_limit_and_a_name():
    async with running(ppo_graph(), PLACES, 5, [[2]], limit_s=0.2) as (world, master):
        world.stay_away = True
        world.begin_again(2)
        await asyncio.gather(*world.beside)
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.2 s for a ping from model workers"):
            await master.detached.repeated(
                "a ping", (2,), lambda incarnation: master.detached.call(incarnation, "a ping", [2], [Ping()])
            )

        async def fail(incarnation):
            raise GroupEndedError("it has said so")

        with pytest.raises(WaitTimeoutError, match="for incarnation 1, for a ping, from model_worker/2"):
            await master.detached.repeated("a ping", (2,), fail)


async def test_an_earlier_incarnation_cannot_return():
    async with running(ppo_graph(), PLACES, 5, [[2]]) as (world, _):
        world.begin_again(2)
        await asyncio.gather(*world.beside)
        world.incarnations[2] = 0
        with pytest.raises(
            FencedError, match="model_worker/2 in incarnation 0 ends: incarnation 1 of its worker group has begun"
        ):
            await world.start(2)
        world.incarnations[2] = 1
