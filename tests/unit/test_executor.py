"""The executor with its real calls, in-memory streams and workers that hold dictionaries: random graphs on random layouts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import CriticConfig, NameResolveConfig, PPOConfig, RefConfig, RuntimeConfig, TrainConfig
from asyncrl.dataflow.axes import SAMPLES, ParallelGrid
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.mfc import ADVANTAGES, MFCDef
from asyncrl.dataflow.minibatches import split_minibatches
from asyncrl.dataflow.redistribution import transfers
from asyncrl.dataflow.topology import ModelPlacement, build_handler_routing
from asyncrl.master.balance import Balance
from asyncrl.master.batch import BatchFormer, Ready
from asyncrl.master.buffer import AsyncIOSequenceBuffer, PromptProgress, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.homes import homes_of
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.streaming import PartRunner, begins_part
from asyncrl.protocol.calls import CallResult, ClearData, ExecuteMFC, ReadValues, Reallocate, Redistribute
from asyncrl.protocol.manager import LedgerView, TicketView
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.channel_protocol import ChannelClosed
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.streams.request_reply import NameResolvingReplyServer, NameResolvingRequestClient
from tests.support.executors import executor_of
from tests.support.memory_names import MemoryNameResolver
from tests.support.memory_transport import MemoryTransport

RUNTIME = RuntimeConfig(start_timeout_s=10.0)
NAMES = Names("e", "t")
LIMIT_S = 60.0
DATASET = ("tokens", "rewards")


def placement(name, grid, workers):
    return ModelPlacement(name, ParallelGrid.parse(grid), tuple(workers))


def mfc(name, model, reads, writes=(), kind="inference"):
    return MFCDef(name, model.partition("@")[0], kind, "x:y", tuple(reads), tuple(writes), model)


def trajectory(ticket, position, head, length, version=0):
    return TrajectoryMeta(
        ticket_id=ticket,
        locator=Locator(0, position),
        attempt=1,
        head=head,
        keys=list(DATASET),
        seqlens=[length],
        response_lengths=[1],
        rewards=[0.0],
        version_start=[version],
        version_end=[version],
        birth_time=0.0,
    )


class World:
    """Workers that execute calls one after another, as model workers do. Sends do not wait; receives wait for their data."""

    def __init__(self, graph, placements, num_workers, rng=None):
        self.graph, self.placements = graph, {placement.name: placement for placement in placements}
        self.num_workers = num_workers
        self.held = [set() for _ in range(num_workers)]  # (id, key)
        self.log = []  # (worker, call)
        self.gates = defaultdict(list)  # MFC -> events that a worker awaits before it answers
        self.wires = defaultdict(asyncio.Queue)
        self.sent = []
        self.ran = asyncio.Condition()
        self.rng = rng or Random(0)
        self.remade = set()  # keys that calls make again: workers receive them again
        self.counts = set()  # MFCs whose functions count their calls in their state

    async def serve(self, server, me):
        while True:
            try:
                call = await server.receive()
            except ChannelClosed:
                return
            body = call.body
            async with self.ran:
                self.log.append((me, body))
                self.ran.notify_all()
            result = CallResult()
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            if isinstance(body, Redistribute):
                for step in body.steps:
                    await self.move(step, me)
            elif isinstance(body, ExecuteMFC):
                result = await self.run(body, me)
            elif isinstance(body, ReadValues):
                assert self.held[me].issuperset((group, body.key) for group in body.ids)
                result = CallResult(values=[[[float(group[1:])]] for group in body.ids])
            elif isinstance(body, ClearData):
                self.held[me] = {pair for pair in self.held[me] if pair[0] not in body.ids}
            call.reply(result)

    async def move(self, step, me):
        for transfer in transfers(step):
            pairs = [(group, key) for group in transfer.ids for key in transfer.keys]
            for target in transfer.targets:
                if transfer.source == me:
                    assert self.held[me].issuperset(pairs)
                    self.wires[me, target].put_nowait(pairs)
                    self.sent += [(me, target, *pair) for pair in pairs]
                elif target == me:
                    assert await self.wires[transfer.source, me].get() == pairs
                    again = {pair for pair in self.held[me] if pair[1] not in self.remade}
                    assert again.isdisjoint(pairs), "a worker was sent data that it already holds"
                    self.held[me].update(pairs)

    async def run(self, body, me):
        function = self.graph.mfcs[body.mfc]
        where = self.placements[function.model]
        part = body.parts[where.part_of(me, SAMPLES)]
        assert self.held[me].issuperset((group, key) for group in part for key in function.input_keys)
        for gate in self.gates[body.mfc]:
            await gate.wait()
        device = {"peak_flops": 100.0, "memory_bytes": 1000 + me}
        if me not in where.heads:
            return CallResult(seconds=1.0, **device)
        self.held[me].update((group, key) for group in part for key in function.output_keys)
        made = {"ids": part, "keys": list(function.output_keys), "stats": {f"{body.mfc}/x": 1.0}}
        if body.mfc in self.counts:
            made["state"] = {"calls": (body.state or {}).get("calls", 0.0) + 1}
        return CallResult(**made, seconds=0.5, flops=50, num_tokens=8, num_tokens_shared=2, **device)

    async def until(self, happened):
        async with self.ran:
            await asyncio.wait_for(self.ran.wait_for(happened), LIMIT_S)

    def calls(self, kind):
        return [(me, body) for me, body in self.log if isinstance(body, kind)]


class Master:
    def __init__(self, world, client, train, num_groups, limit_s=LIMIT_S):
        self.world, self.client = world, client
        models = list(world.placements.values())
        info = WorkerInfo("master", 0, 1, "e", "t", 1, "/nowhere", 1, NameResolveConfig(), RUNTIME)
        self.caller = WorkerCaller(client, StatusBoard(info, logging.getLogger("test")), limit_s)
        self.tracker = StorageTracker()
        self.buffer = AsyncIOSequenceBuffer(PromptProgress(num_groups, 1), capacity=num_groups, attempt=1)
        hooks = ParameterHooks(world.graph.mfcs.values(), train)
        self.balance = Balance(world.graph.mfcs.values(), train, seed=1)
        self.executor = executor_of(
            world.graph, models, self.buffer, self.tracker, self.caller, client, hooks, balance=self.balance
        )
        self.heads = models[0].heads

    def store(self, ticket, position, head, length, version=0):
        meta = trajectory(ticket, position, head, length, version)
        assert self.buffer.put(meta).verdict == "stored"
        self.tracker.add(self.heads[head], [ticket], meta.keys)
        self.world.held[self.heads[head]].update((ticket, key) for key in meta.keys)

    async def step(self, tickets, version=0):
        result = await asyncio.wait_for(self.executor.execute_step(tickets, version), LIMIT_S)
        holding = self.tracker.drop(tickets)
        await self.caller.call("clear", holding, ClearData(ids=list(tickets)))
        return result


@contextlib.asynccontextmanager
async def running(graph, placements, num_workers, *, train=None, num_groups=64, rng=None):
    world = World(graph, placements, num_workers, rng)
    transport = MemoryTransport()
    async with contextlib.AsyncExitStack() as stack:
        resolver = stack.enter_context(MemoryNameResolver(uuid.uuid4().hex))
        serving = []
        for index in range(num_workers):
            server = NameResolvingReplyServer(resolver, NAMES, index=index, runtime=RUNTIME, transport=transport)
            await server.start()
            stack.push_async_callback(server.close)
            serving.append(asyncio.create_task(world.serve(server, index)))
        client = NameResolvingRequestClient(
            resolver,
            NAMES,
            num_workers=num_workers,
            handler_routing=build_handler_routing(placements),
            runtime=RUNTIME,
            incarnation="master",
            transport=transport,
        )
        stack.push_async_callback(client.close)
        await client.start()
        yield world, Master(world, client, train or TrainConfig(), num_groups)
        for task in serving:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def ppo_graph():
    return DataflowGraph(
        [
            mfc("actor_inf", "actor", ["tokens"], ["prox"]),
            mfc("ref_inf", "ref", ["tokens"], ["ref"]),
            mfc("critic_inf", "critic", ["tokens"], ["values"]),
            mfc("actor_train", "actor", ["tokens", "rewards", "prox", "ref", "values"], kind="train_step"),
            mfc("critic_train", "critic", ["tokens", "rewards", "values"], kind="train_step"),
        ],
        DATASET,
    )


async def test_mfcs_of_disjoint_meshes_run_at_the_same_time():
    places = [placement("actor", "d2", [0, 1]), placement("ref", "d1", [2]), placement("critic", "d1m2", [3, 4])]
    async with running(ppo_graph(), places, 5) as (world, master):
        gate = asyncio.Event()
        world.gates["actor_inf"] = [gate]  # the actor computes until no other MFC can proceed
        for i in range(6):
            master.store(f"t{i}", i, i % 2, 5 + i)
        stepping = asyncio.create_task(master.step([f"t{i}" for i in range(6)]))
        await world.until(lambda: "critic_train" in [body.mfc for _, body in world.calls(ExecuteMFC)])
        running_now = {body.mfc for _, body in world.calls(ExecuteMFC)}
        assert running_now == {"actor_inf", "ref_inf", "critic_inf", "critic_train"}
        gate.set()
        result = await stepping
        assert result.seconds == {"actor_inf": 0.5, "ref_inf": 0.5, "critic_inf": 1.0, "actor_train": 0.5} | {
            "critic_train": 1.0
        }
        assert "actor_train/x" in result.stats
        # model FLOPs of all heads, over the peak of all workers of the model
        assert result.peak_s == {"actor_train": 0.5, "critic_train": 0.25}
        assert result.stats["shared_tokens/actor_train"] == 0.25
        assert {result.stats[f"memory/model_worker_{i}_bytes"] - 1000 for i in range(5)} == set(range(5))
        assert result.stats["time/transfer_s"] == 0.0
        assert world.held == [set()] * 5  # no worker holds data any more
        assert (len(master.tracker), len(master.buffer)) == (0, 0)


async def test_no_data_moves_within_one_mesh_of_balanced_data_ranks():
    graph = DataflowGraph(
        [mfc("inf", "actor", ["tokens"], ["prox"]), mfc("train", "actor", ["tokens", "prox"], kind="train_step")],
        DATASET,
    )
    async with running(graph, [placement("actor", "d2", [0, 1])], 2) as (world, master):
        for i in range(4):
            master.store(f"t{i}", i, i % 2, 10)
        result = await master.step(["t0", "t1", "t2", "t3"])
        assert [body.parts for _, body in world.calls(ExecuteMFC)] == [[["t0", "t2"], ["t1", "t3"]]] * 4
        assert world.calls(Redistribute) == []
        assert "redistribution/bytes" not in result.stats


def random_case(rng):
    """Return a graph of up to seven MFCs, up to four models, each on any workers, and the number of workers."""
    num_workers = rng.randint(1, 6)
    grids = [g for g in ("d1", "d2", "d3", "m2", "p2", "d2m2", "d2p2", "d1p2m2")]
    models = []
    for name in ("actor", "ref", "critic", "actor@1")[: rng.randint(1, 4)]:
        fitting = [grid for grid in grids if ParallelGrid.parse(grid).size <= num_workers]
        grid = rng.choice(fitting)
        models.append(placement(name, grid, rng.sample(range(num_workers), ParallelGrid.parse(grid).size)))
    keys, mfcs = list(DATASET), []
    for i in range(rng.randint(1, 7)):
        reads = rng.sample(keys, rng.randint(1, len(keys)))
        writes = [f"k{i}"] if rng.random() < 0.8 else []
        mfcs.append(mfc(f"f{i}", rng.choice(models).name, reads, writes))
        keys += writes
    return DataflowGraph(mfcs, DATASET), models, num_workers


@pytest.mark.parametrize("seed", range(40))
async def test_any_graph_on_any_meshes_completes_and_sends_each_key_once(seed):
    rng = Random(seed)
    graph, models, num_workers = random_case(rng)
    async with running(graph, models, num_workers, rng=rng) as (world, master):
        for step in range(2):
            tickets = [f"s{step}t{i}" for i in range(rng.randint(1, 7))]
            for i, ticket in enumerate(tickets):
                master.store(ticket, 10 * step + i, rng.randrange(models[0].grid.num_replicas), rng.randint(1, 50))
            await master.step(tickets, step)
        assert len(set(world.sent)) == len(world.sent)
        assert world.held == [set()] * num_workers
        assert len(world.calls(ExecuteMFC)) == 2 * sum(
            world.placements[function.model].grid.size for function in graph.mfcs.values()
        )


async def test_the_ranks_share_each_minibatch_of_a_whole_batch_by_its_flops():
    graph = DataflowGraph([mfc("train", "actor", ["tokens"], kind="train_step")], DATASET)
    train = TrainConfig(ppo=PPOConfig(minibatches=2))
    async with running(graph, [placement("actor", "d2", [0, 1])], 2, train=train) as (world, master):
        master.balance.flops["actor"] = ModelFlops(num_parameters=1, widths=[(0, 0, 1)])  # about the squared lengths
        tickets = [f"t{i}" for i in range(8)]
        lengths = dict(zip(tickets, [30, 100, 30, 100, 40, 90, 40, 90], strict=True))
        for i, ticket in enumerate(tickets):
            master.store(ticket, i, 0, lengths[ticket])
        await master.step(tickets, 3)
        _, body = world.calls(ExecuteMFC)[0]
        drawn = split_minibatches(tickets, 2, seed=1, version=3)
        dealt = [sorted(lengths[group] for group in part if group in some) for some in drawn for part in body.parts]
        assert dealt == [[30, 30, 90], [100], [40, 40, 90], [100]]


async def test_weights_are_copied_before_use_elsewhere_and_to_the_reference_at_its_interval():
    graph = DataflowGraph(
        [
            mfc("actor_inf", "actor@1", ["tokens"], ["prox"]),
            mfc("ref_inf", "ref", ["tokens"], ["ref"]),
            mfc("critic_train", "critic", ["tokens"], kind="train_step"),
            mfc("actor_train", "actor", ["tokens", "prox", "ref"], kind="train_step"),
        ],
        DATASET,
    )
    places = [
        placement("actor", "d1", [0]),
        placement("actor@1", "d2", [1, 2]),
        placement("ref", "d1", [1]),
        placement("critic", "d1", [0]),
    ]
    train = TrainConfig(num_critic_only_steps=1, ref=RefConfig(update_interval=2, update_share=0.5))
    async with running(graph, places, 3, train=train) as (world, master):
        for version in range(4):
            master.store(f"t{version}", version, 0, 5)
            await master.step([f"t{version}"], version)
        seen = {me: [] for me in range(3)}
        for me, body in world.log:
            if isinstance(body, ExecuteMFC):
                seen[me].append(body.mfc)
            elif isinstance(body, Reallocate):
                seen[me].append((body.source, body.target, body.share))
        again, refresh = ("actor", "actor@1", 1.0), ("actor", "ref", 0.5)
        at_0 = [seen[0][i] for i in range(len(seen[0])) if seen[0][i] != "critic_train"]
        assert at_0 == ["actor_train", refresh, again, "actor_train", again, "actor_train", refresh]
        at_2 = ["actor_inf", "actor_inf", again, "actor_inf", again, "actor_inf"]
        assert seen[2] == at_2
        assert seen[1].index(refresh) < seen[1].index(again)


def test_an_mfc_without_a_model_is_refused():
    graph = DataflowGraph([mfc("inf", "reward", ["tokens"], ["r"])], DATASET)
    with pytest.raises(ValueError, match=r"inf on 'reward'.*placed models: \['actor'\]"):
        homes_of(graph, {"actor": placement("actor", "d1", [0])}, *[None] * 7)


# ------------------------------------------------------------------------------------------------ parts of a batch


@pytest.mark.parametrize(("model", "early"), [("actor@1", True), ("actor", False)])
async def test_a_layout_of_its_own_keeps_the_weights_of_the_step_when_minibatches_step_early(model, early):
    """It gets them before the first call that trains, and the master knows that the trainer's weights are those of no version."""
    graph = DataflowGraph(
        [mfc("inf", model, ["tokens"], ["prox"]), mfc("train", "actor", ["tokens"], kind="train_step")], DATASET
    )
    places = [placement("actor", "d1", [0]), placement("actor@1", "d1", [1])]
    train = TrainConfig(streaming=True, ppo=PPOConfig(minibatches=2))
    async with running(graph, places, 2, train=train) as (world, master):
        for version in range(2):
            for place in range(4):
                master.store(f"s{version}t{place}", 4 * version + place, 0, 10)
            for part in (["t0", "t1"], ["t2"]):
                await asyncio.wait_for(
                    master.executor.execute_part([f"s{version}{ticket}" for ticket in part], version), LIMIT_S
                )
                assert master.executor.is_within_step == early
            await master.step([f"s{version}t{place}" for place in range(4)], version)
            assert not master.executor.is_within_step
        seen = [body for me, body in world.log if me == 0 and isinstance(body, (ExecuteMFC, Reallocate))]
        seen = [type(body).__name__ if isinstance(body, Reallocate) else body.mfc for body in seen]
        trains = [place for place, name in enumerate(seen) if name == "train"]
        copies = [place for place, name in enumerate(seen) if name == "Reallocate"]
        assert len(trains) == 6
        assert copies == ([trains[3] - 1] if early else [])


@pytest.mark.parametrize("last", [["t4", "t5"], []])
async def test_a_batch_in_parts(last):
    """Each group passes every MFC once. The last part carries the whole batch, and may be empty."""
    places = [placement("actor", "d2", [0, 1]), placement("ref", "d1", [2]), placement("critic", "d1m2", [3, 4])]
    async with running(ppo_graph(), places, 5) as (world, master):
        batch = ["t0", "t1", "t2", "t3", *last]
        for ticket in batch:
            master.store(ticket, int(ticket[1:]), int(ticket[1:]) % 2, 10)
        for part in (["t1"], ["t0", "t2", "t3"]):
            await asyncio.wait_for(master.executor.execute_part(part, 0), LIMIT_S)
            assert [meta.ticket_id for meta in master.buffer.stored] == [
                t for t in batch if t not in master.buffer.earlier
            ]
        result = await master.step(batch)
        calls = [body for me, body in world.calls(ExecuteMFC) if body.mfc == "actor_train" and me == 0]
        assert [(body.ends_step, body.ids, body.batch) for body in calls] == [
            (False, ["t1"], []),
            (False, ["t0", "t2", "t3"], []),
            (True, last, batch),
        ]
        ran = [(body.mfc, ticket) for me, body in world.calls(ExecuteMFC) if me in (0, 2, 3) for ticket in body.ids]
        assert sorted(ran) == sorted((mfc, ticket) for mfc in ppo_graph().mfcs for ticket in batch)
        assert result.seconds["actor_train"] == 1.5
        assert result.stats["streaming/parts"] == 3
        assert "actor_train/x" in result.stats
        assert world.held == [set()] * 5
        assert (len(master.tracker), len(master.buffer), master.buffer.earlier) == (0, 0, ())
        master.store("u", 10, 0, 5)
        assert "streaming/parts" not in (await master.step(["u"], 1)).stats
        assert world.calls(ExecuteMFC)[-1][1].ends_step
        assert world.calls(ExecuteMFC)[-1][1].batch == []


@pytest.mark.parametrize("last", [["t4", "t5"], []])
@pytest.mark.parametrize(
    "settings", [{"ppo": PPOConfig(advantage_norm="batch")}, {"critic": CriticConfig(path="/c", value_norm=True)}]
)
async def test_targets_that_are_normalised_over_the_batch_are_made_once_from_all_of_its_parts(settings, last):
    """Inference runs once on each group, when its part is there. What makes the targets, reads them or trains runs once."""
    graph = DataflowGraph(
        [
            mfc("critic_inf", "critic", ["tokens"], ["values"]),
            replace(mfc("advantages", "actor", ["tokens", "rewards", "values"], ["adv"]), interface=ADVANTAGES),
            mfc("spread", "actor", ["adv"], ["spread"]),
            mfc("actor_train", "actor", ["tokens", "adv", "spread"], kind="train_step"),
            mfc("critic_train", "critic", ["tokens", "values", "adv"], kind="train_step"),
            mfc("judge_train", "judge", ["tokens"], kind="train_step"),
        ],
        DATASET,
    )
    places = [placement("actor", "d2", [0, 1]), placement("critic", "d1m2", [2, 3]), placement("judge", "d1", [4])]
    train = TrainConfig(streaming=True, **settings)
    async with running(graph, places, 5, train=train) as (world, master):
        for version in range(2):
            batch = [f"t{6 * version + int(ticket[1:])}" for ticket in ("t0", "t1", "t2", "t3", *last)]
            for ticket in batch:
                master.store(ticket, int(ticket[1:]), int(ticket[1:]) % 2, 10)
            for part in ([batch[1]], [batch[0], batch[2], batch[3]]):
                await asyncio.wait_for(master.executor.execute_part(part, version), LIMIT_S)
                assert not master.executor.is_within_step
            result = await master.step(batch, version)
            calls = [body for me, body in world.calls(ExecuteMFC) if me in (0, 2, 4) and body.version == version]
            ran = defaultdict(list)
            for body in calls:
                ran[body.mfc].append(body.ids)
                assert body.ends_step or body.mfc == "critic_inf"
                assert body.batch == []
            assert ran.pop("critic_inf") == [batch[1:2], [batch[0], *batch[2:4]], batch[4:]]
            assert ran == {name: [batch] for name in set(graph.mfcs) - {"critic_inf"}}
            assert result.stats["streaming/parts"] == 3
            assert world.held == [set()] * 5
            assert (len(master.tracker), len(master.buffer), master.buffer.earlier) == (0, 0, ())


def test_groups_that_are_enough_for_a_part():
    groups = [trajectory(f"t{i}", i, 0, length) for i, length in enumerate([50, 52, 200])]
    balance = Balance([], TrainConfig(), seed=1)
    by = {
        "groups": TrainConfig(),
        "balanced": TrainConfig(streaming_order="balanced"),
        "tokens": TrainConfig(streaming_order="tokens", streaming_tokens=102),
    }
    begins = {
        name: [begins_part(groups[:n], balance, train, num_ranks=2) for n in range(4)] for name, train in by.items()
    }
    assert begins == {
        "groups": [False, True, True, True],
        "balanced": [False, False, True, False],  # one rank would have none, then 200 of 302 tokens
        "tokens": [False, False, True, True],
    }


@pytest.mark.parametrize(
    ("parts", "at_first", "expected"),
    [
        (3, 7, [[0, 1, 2], [3, 4], [5, 6]]),  # all are there
        (3, 4, [[0, 1, 2], [3, 4], [5, 6]]),  # one part, until the rest arrives
        (7, 2, [[0], [1], [2], [3], [4], [5], [6]]),
        (1, 7, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
async def test_a_fixed_number_of_parts(parts, at_first, expected):
    graph = DataflowGraph([mfc("train", "actor", ["tokens"], kind="train_step")], DATASET)
    async with running(graph, [placement("actor", "d1", [0])], 1) as (world, master):
        former = BatchFormer(batch_size=7, max_head_offpolicyness=0)
        train = TrainConfig(batch_size=7, streaming_parts=parts)
        runner = PartRunner(
            train,
            former,
            master.buffer,
            master.executor,
            master.balance,
            version=0,
            num_ranks=1,
            clock=SYSTEM_CLOCK,
        )
        live = [
            TicketView(ticket_id=f"t{i}", locator=Locator(0, i), deadline=0, state="running", worker="w")
            for i in range(7)
        ]
        for place in range(at_first):
            master.store(f"t{place}", place, 0, 5)
        running_parts = asyncio.create_task(runner.run())
        runner.look(
            LedgerView(known=True, revision=1, served_version=0, exhausted=False, live=live, rejected=[], servers=[])
        )
        for _ in range(50):
            await asyncio.sleep(0.001)
        for place in range(at_first, 7):
            master.store(f"t{place}", place, 0, 5)
        decision = former.decide(stored=master.buffer.stored, live=live, version=0, exhausted=False, now=0.0)
        runner.stop()
        await asyncio.wait_for(running_parts, LIMIT_S)
        await asyncio.wait_for(runner.run_rest(decision.tickets), LIMIT_S)
        await master.step(list(decision.tickets))
        assert [body.ids for _, body in world.calls(ExecuteMFC)] == [[f"t{i}" for i in part] for part in expected]


async def test_parts_begin_when_groups_are_stored_and_the_last_one_when_the_batch_is_complete():
    """The runner takes what is stored when the trainer is free. The batch is decided while a part still runs."""
    graph = DataflowGraph([mfc("train", "actor", ["tokens"], kind="train_step")], DATASET)
    async with running(graph, [placement("actor", "d1", [0])], 1) as (world, master):
        former = BatchFormer(batch_size=4, max_head_offpolicyness=0)
        runner = PartRunner(
            TrainConfig(),
            former,
            master.buffer,
            master.executor,
            master.balance,
            version=0,
            num_ranks=1,
            clock=SYSTEM_CLOCK,
        )
        live = [
            TicketView(ticket_id=f"t{i}", locator=Locator(0, i), deadline=0, state="running", worker="w")
            for i in range(4)
        ]
        view = LedgerView(known=True, revision=1, served_version=0, exhausted=False, live=live, rejected=[], servers=[])
        gate = asyncio.Event()
        world.gates["train"] = [gate]
        running_parts = asyncio.create_task(runner.run())

        def decide():
            return former.decide(stored=master.buffer.stored, live=live, version=0, exhausted=False, now=0.0)

        master.store("t3", 3, 0, 10)
        runner.look(view)
        await world.until(lambda: len(world.calls(ExecuteMFC)) == 1)
        for i in (0, 1, 2):
            master.store(f"t{i}", i, 0, 10)
            runner.look(view)
        decision = decide()
        runner.stop()
        assert decision == Ready(("t0", "t1", "t2", "t3"))
        await asyncio.sleep(0)
        assert not running_parts.done()
        gate.set()
        await asyncio.wait_for(running_parts, LIMIT_S)
        await master.step(decision.tickets)
        assert [body.ids for _, body in world.calls(ExecuteMFC)] == [["t3"], ["t0", "t1", "t2"]]


async def test_the_state_of_a_function_travels_with_its_calls():
    """A repeated call, and a call after a resume, begin with the state that the call before has returned."""
    graph = DataflowGraph(
        [mfc("count", "actor", ["tokens"], ["made"]), mfc("actor_train", "actor", ["made"], kind="train_step")], DATASET
    )
    async with running(graph, [placement("actor", "d1", [0])], 1) as (world, master):
        world.counts = {"count"}
        for number, ticket in enumerate(["t0", "t1"]):
            master.store(ticket, number, 0, 5)
            await master.step([ticket])
        assert master.executor.states == {"count": {"calls": 2.0}}
        master.executor.states = {"count": {"calls": 7.0}}
        master.store("t2", 2, 0, 5)
        await master.step(["t2"])
        assert [body.state for _, body in world.calls(ExecuteMFC) if body.mfc == "count"] == [
            None,
            {"calls": 1.0},
            {"calls": 7.0},
        ]
        assert master.executor.states == {"count": {"calls": 8.0}}
