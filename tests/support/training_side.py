"""The training side without a run: real model workers; the test acts as master and as rollout worker.

    async with training_side(models, mfcs, train, folder) as side:
        await side.push(meta, sample)                  # to the head that the metadata names
        result = await side.step(ids, version=0)       # run the dataflow on these groups, then drop them

With `groups` the first MFC makes the groups (mode=sync), and nothing is pushed:

        replies = await side.make_groups(locators, version=0)

Name resolve is a private etcd; streams and process groups are real. Workers are forked from a server that has imported torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

from asyncrl.config.processes import GroupsConfig, ModelConfig, ModelWorkerConfig, PlacedMFC, WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RecordConfig, RuntimeConfig, TrainConfig, WeightsConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import without_generation
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import ModelPlacement, build_handler_routing
from asyncrl.master.balance import Balance
from asyncrl.master.buffer import AsyncIOSequenceBuffer, PromptProgress, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.executor import FunctionExecutor
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.step_result import StepResult
from asyncrl.protocol.calls import CallResult, ClearData, ExecuteMFC, Ping
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdServer
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.streams.push_pull import MetaPuller, NameResolvingZmqPusher
from asyncrl.streams.request_reply import NameResolvingRequestClient
from tests.support.executors import executor_of

PRELOAD = ["torch", "torch.distributed", "transformers", "asyncrl.model.worker"]
RUNTIME = RuntimeConfig(start_timeout_s=120.0, stop_timeout_s=5.0, log_level="WARNING")
EXPERIMENT, TRIAL = "test", "t0"
_MAX_GROUPS = 4096
_END_LIMIT_S = 10.0


def worker_info(kind: str, index: int, count: int, folder: Path, name_resolve: NameResolveConfig) -> WorkerInfo:
    return WorkerInfo(kind, index, count, EXPERIMENT, TRIAL, 1, str(folder), 1, name_resolve, RUNTIME)


def placed(mfc: MFCDef) -> PlacedMFC:
    """The MFC for the config of a process, if each role has one model."""
    return mfc.placed(mfc.model or mfc.role)


class TrainingSide:
    """The master's part of the training side. Made by `training_side`."""

    def __init__(
        self,
        models: Sequence[ModelConfig],
        mfcs: Sequence[PlacedMFC],
        train: TrainConfig,
        info: WorkerInfo,
        resolver: NameResolver,
        *,
        records: bool = False,
    ) -> None:
        self.names, self.resolver = Names(EXPERIMENT, TRIAL), resolver
        placements = [ModelPlacement.of(model) for model in models]
        self.num_workers = 1 + max(worker for placement in placements for worker in placement.workers)
        self.heads = placements[0].heads
        tag = uuid.uuid4().hex
        self.pusher = NameResolvingZmqPusher(
            resolver,
            self.names,
            pusher_index=0,
            num_pushers=1,
            num_pullers=len(self.heads),
            runtime=RUNTIME,
            incarnation=f"pusher-{tag}",
        )
        self.client = NameResolvingRequestClient(
            resolver,
            self.names,
            num_workers=self.num_workers,
            handler_routing=build_handler_routing(placements),
            runtime=RUNTIME,
            incarnation=f"master-{tag}",
        )
        self.metas = MetaPuller(resolver, self.names, runtime=RUNTIME)
        self.caller = WorkerCaller(
            self.client, StatusBoard(info, logging.getLogger("asyncrl.testing")), train.call_timeout_s
        )
        self.tracker = StorageTracker()
        self.buffer = AsyncIOSequenceBuffer(PromptProgress(_MAX_GROUPS, 1), capacity=_MAX_GROUPS, attempt=1)
        self._nodes, self._train = [MFCDef.of(mfc) for mfc in mfcs], train
        self.generation = next((mfc for mfc in self._nodes if mfc.kind == "generate"), None)
        self._executors: dict[tuple[str, ...], FunctionExecutor] = {}
        self.model_flops: dict[str, ModelFlops] = {}  # by model
        self._records = records
        self._limit_s = train.call_timeout_s
        self._placements = {placement.name: placement for placement in placements}

    async def push(self, meta: TrajectoryMeta, sample: SequenceSample) -> StoreVerdict:
        """Push a group, as a rollout worker does. Each prompt needs its own locator."""
        return await self.pusher.push(meta, sample, head=meta.head, timeout_s=self._limit_s)

    async def make_groups(
        self,
        locators: Sequence[Locator],
        version: int,
        eval_mode: Literal["", "greedy", "sampled"] = "",
        eval_set: str = "",
    ) -> list[CallResult]:
        """Make groups of these prompts (ids: `e<epoch>-p<position>`) on the data ranks, as the master does with mode=sync."""
        assert self.generation is not None, "there is no MFC of kind generate"
        makers = self._placements[self.generation.model]
        ids = [f"e{at.epoch}-p{at.position}" for at in locators]
        parts = [ids[rank :: makers.grid.num_replicas] for rank in range(makers.grid.num_replicas)]
        mfc = self.generation.name
        body = ExecuteMFC(
            mfc=mfc,
            version=version,
            ids=ids,
            parts=parts,
            locators=list(locators),
            eval_mode=eval_mode,
            eval_set=eval_set,
        )
        replies = await self.caller.call(f"MFC {mfc}", makers.workers, body)
        for meta in (meta for reply in replies if not eval_mode for meta in reply.metas):
            assert self.buffer.put(meta).verdict == "stored"
            self.tracker.add(makers.heads[meta.head], [meta.ticket_id], meta.keys)
        return replies

    def executor(self, mfcs: Sequence[str] = ()) -> FunctionExecutor:
        """The executor for the dataflow of the MFCs with these names; of all MFCs if none is given."""
        if (known := self._executors.get(tuple(mfcs))) is not None:
            return known
        nodes = [mfc for mfc in self._nodes if mfc.name in mfcs or not mfcs]
        graph, hooks = without_generation(nodes), ParameterHooks(nodes, self._train)
        placements = list(self._placements.values())
        balance = Balance(nodes, self._train, seed=1)
        balance.flops.update(self.model_flops)
        made = executor_of(
            graph,
            placements,
            self.buffer,
            self.tracker,
            self.caller,
            self.client,
            hooks,
            records=self._records,
            balance=balance,
        )
        self._executors[tuple(mfcs)] = made
        return made

    async def step(self, ids: Sequence[str], version: int, mfcs: Sequence[str] = ()) -> StepResult:
        """Run the dataflow on these groups, as the master does; then all workers drop them. mfcs: as in `executor`."""
        result = await self.executor(mfcs).execute_step(ids, version)
        await self.caller.call("forgetting groups", self.tracker.drop(ids), ClearData(ids=list(ids)))
        return result

    async def accept(self) -> None:
        """Answer the metadata from the heads with verdicts, forever."""
        while True:
            meta, ack = await self.metas.pull_meta()
            verdict = self.buffer.put(meta)
            if verdict.verdict == "stored":
                self.tracker.add(self.heads[meta.head], [meta.ticket_id], meta.keys)
            ack(verdict)


@contextlib.asynccontextmanager
async def training_side(
    models: Sequence[ModelConfig],
    mfcs: Sequence[PlacedMFC],
    train: TrainConfig,
    folder: Path,
    *,
    store_capacity: int = 64,
    weights: WeightsConfig | None = None,
    record: RecordConfig | None = None,
    groups: GroupsConfig | None = None,
) -> AsyncIterator[TrainingSide]:
    """Start everything and load the models; stop everything afterwards. folder: for all files that it writes."""
    with _etcd(folder) as name_resolve, open_name_resolver(name_resolve) as resolver:
        info = worker_info("master", 0, 1, folder, name_resolve)
        records = record is not None and record.trajectories
        side = TrainingSide(models, mfcs, train, info, resolver, records=records)
        configs = [
            ModelWorkerConfig(
                worker=worker_info("model_worker", index, side.num_workers, folder, name_resolve),
                models=list(models),
                mfcs=list(mfcs),
                model_path=models[0].path,
                tokenizer_path=models[0].path,
                train=train,
                weights=weights or WeightsConfig(fsync=False),
                store_capacity=store_capacity,
                record=record or RecordConfig(),
                groups=groups,
            )
            for index in range(side.num_workers)
        ]
        with _processes(configs):
            accepting = asyncio.create_task(side.accept()) if groups is None else None
            try:
                if groups is None:
                    await side.pusher.start()
                    await side.metas.start()
                await side.client.start()
                for reply in await side.caller.call("models to be loaded", range(side.num_workers), Ping()):
                    side.model_flops.update(reply.model_flops)
                yield side
            finally:
                if accepting is not None:
                    accepting.cancel()
                for part in (side.client, side.metas, side.pusher):
                    await part.close()


@contextlib.contextmanager
def _etcd(folder: Path) -> Iterator[NameResolveConfig]:
    folder.mkdir(parents=True, exist_ok=True)
    server = EtcdServer(folder / "etcd", folder / "etcd.log")
    server.start()
    try:
        yield NameResolveConfig(endpoints=[server.endpoint])
    finally:
        server.stop()


@contextlib.contextmanager
def _processes(configs: Sequence[ModelWorkerConfig]) -> Iterator[list[ForkServerProcess]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = [context.Process(target=_be_worker, args=(config,), daemon=True) for config in configs]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
        for process in processes:
            if process.pid is not None:
                process.join(_END_LIMIT_S)
                if process.exitcode is None:
                    process.kill()


def _be_worker(config: ModelWorkerConfig) -> None:
    """Entry point of a worker process."""
    from asyncrl.model.worker import ModelWorker
    from asyncrl.runtime.worker import configure_logging, run_worker

    configure_logging(config.worker)
    code = run_worker(ModelWorker(config))
    logging.shutdown()
    os._exit(code)  # without the shutdown of the process group, which would wait for workers that may have ended
