"""Model worker: one rank of the training side. It holds its shards of models and a part of the data, and executes calls in order.

    rollout workers -- trajectory --> [puller] -> store -- metadata --> master       (only at heads of the first model; with
                                                                                      mode=sync an MFC makes the groups here)
    master -- calls --> [reply server] -> compute thread: MFCs, data and weights in transit between workers, snapshots
                                          writer thread: snapshots to disk
    workers of other groups <-- data, weights --> [held data, kept weights, fetchers]      (if the run has several groups)
    gserver manager -- requests --> [the transport's side, at the ranks of the first model]: snapshots to generation servers

Sockets belong to the event loop. Everything that reads or changes models runs on one compute thread, one call after another in the
master's order. That order is the same on all workers, so collectives match. Snapshots of weights are written on other threads.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import torch
import transformers

from asyncrl.config.processes import ModelConfig, ModelWorkerConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.trajectories import BackgroundRecorder, recording_dir
from asyncrl.dataflow.graph import trajectory_keys
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.model.calls import Calls, trajectory_files
from asyncrl.model.compute import Compute
from asyncrl.model.cpu_ranks import CpuRanks
from asyncrl.model.data_manager import DataManager
from asyncrl.model.engine import TrainEngine, base_engine
from asyncrl.model.export import Exporter
from asyncrl.model.fetching import DataFetcher, HeldData
from asyncrl.model.group_maker import GroupMaker
from asyncrl.model.interfaces import make_interface
from asyncrl.model.kept_weights import KeptWeights, KeptWeightsFetcher
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.process_group import ProcessGroup, choose_device
from asyncrl.model.self_check import load_checked
from asyncrl.model.store import DataStore
from asyncrl.model.trainer_side import Rank, TrainerSide
from asyncrl.model.trajectory_receiver import TrajectoryReceiver, trajectory_error
from asyncrl.model.transports import KINDS
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker
from asyncrl.streams.request_reply import NameResolvingReplyServer


class ModelWorker(Worker):
    """One rank of a process group, with a shard of each model that is placed here.

    consumes: trajectories (from rollout workers), calls (from the master, in order).
    produces: metadata of trajectories, results of calls, files of weight versions.
    waits for: the next call; the other workers of a call, within train.call_timeout_s.
    unblocked by: the master; the other workers making the same call, or losing their connection.
    """

    def __init__(self, config: ModelWorkerConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self._placements = {model.name: ModelPlacement.of(model) for model in config.models}
        self._first = next(iter(self._placements.values()))  # its heads receive trajectories, its weights are served

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        """Bind and publish first, so that other processes need not wait; then load. Calls queue meanwhile."""
        config, info, index = self.config, self.info, self.info.index
        limit_s = config.train.call_timeout_s
        interfaces = {  # built first: a bad config fails before a model is loaded
            mfc.name: make_interface(MFCDef.of(mfc), config.train, seed=info.seed, tokenizer_path=config.tokenizer_path)
            for mfc in config.mfcs
            if mfc.kind != "generate" and index in self._placements[mfc.model].workers
        }
        compute = Compute(self.name, self.board, limit_s=limit_s, num_threads=config.train.torch_threads)
        opened.callback(compute.close)
        store = DataStore(config.store_capacity)
        receiver = await self._open_receiver(directory, opened, store) if config.groups is None else None
        kept_weights = KeptWeights({model.name: model for model in config.models})
        session = await opened.enter_async_context(open_session(max_connections=8))
        fetcher = await self._open_fetcher(directory, opened, store, kept_weights, session)
        server = NameResolvingReplyServer(
            directory.resolver,
            self.names,
            index=index,
            runtime=info.runtime,
            transport=self.system.transport,
            lease=directory.lease,
            attempt=info.attempt,
            group_incarnation=info.group_incarnation,
        )
        opened.push_async_callback(server.close)
        await server.start()
        if config.shares_devices:
            await directory.wait_for_key(self.names.devices_free(info.attempt), "devices free")
        choose = partial(choose_device, index, gpus=info.gpus, tf32=bool(config.train.tf32))
        device = torch.device("cpu") if config.on_cpu else await compute(choose, "the device")
        process_group = ProcessGroup(info, WorkerGroups.of_config(config.worker_groups, info.count), limit_s=limit_s)
        meshes = await self._join_group(process_group, directory, compute, device) if process_group.size > 1 else {}
        self.board.collectives = lambda: {
            group: number
            for mesh in meshes.values()
            if mesh is not None
            for group, number in mesh.collectives().items()
        }
        here = [model for model in config.models if index in model.workers]
        engines = {
            model.name: await self._load(model, compute, device, meshes.get(model.name))
            for model in here
            if model.kind != "none" and not model.base_of
        }
        engines |= {model.name: base_engine(engines[model.base_of]) for model in here if model.base_of}
        without_model = {
            model.name: CpuRanks(model.name, meshes.get(model.name)) for model in here if model.kind == "none"
        }
        group_makers: dict[str, GroupMaker] = {}
        for mfc in config.mfcs:
            if mfc.kind == "generate" and mfc.model in engines:
                group_maker = GroupMaker(config, engines[mfc.model], self.services)
                opened.callback(group_maker.close)
                await group_maker.start()
                group_makers[mfc.name] = group_maker
        data = DataManager(store, worker=index, limit_s=limit_s, rank_of=process_group.rank_of)
        opened.callback(data.close)
        holder = TrainerSide()
        if index in self._first.workers:
            is_first = index == self._first.workers[0]
            rank = Rank(info, is_first, config.weights, device, directory, self.services)
            holder = await opened.enter_async_context(KINDS[config.weights.transport](rank))
        exporter = Exporter(config, compute, holder, self.services)
        opened.callback(exporter.close)
        calls = Calls(
            config,
            process_group,
            engines,
            without_model,
            interfaces,
            store,
            receiver=receiver,
            group_makers=group_makers,
            data=data,
            fetcher=fetcher,
            kept_weights=kept_weights,
            weight_fetcher=KeptWeightsFetcher(session, fetcher.url_of, compute, self.board),
            exporter=exporter,
            recorder=self._open_recorder(opened),
            compute=compute,
            services=self.services,
        )
        if receiver is not None:
            self.tasks.spawn(receiver.run(), "take in")
        models = ", ".join([*engines, *without_model]) or "no model"
        self.logger.info("%s on %s: %s", process_group, device, models)
        self.began()
        await self.serve(calls, server)

    async def serve(self, calls: Calls, server: NameResolvingReplyServer) -> None:
        """Execute calls; everything is open."""
        await calls.run(server)

    async def _open_receiver(
        self, directory: Directory, opened: AsyncExitStack, store: DataStore
    ) -> TrajectoryReceiver | None:
        """Open the receiver; None unless this worker is a head."""
        config, index = self.config, self.info.index
        if index not in self._first.heads:
            return None
        limits = {model.name: ModelLimits.of(model.path) for model in config.models}
        # Every model of the run reads trajectories, so use the smallest maximum length
        limit = replace(limits[self._first.name], max_length=min(one.max_length for one in limits.values()))
        opening = TrajectoryReceiver.open(
            self.info,
            directory,
            self.system,
            self.incarnation,
            store,
            head=self._first.heads.index(index),
            check=partial(
                trajectory_error,
                limits=limit,
                keys=trajectory_keys(config.train),
                max_words_bytes=config.train.max_words_bytes,
            ),
            verdict_limit_s=config.train.call_timeout_s,
            services=self.services,
        )
        return await opened.enter_async_context(opening)

    async def _open_fetcher(
        self,
        directory: Directory,
        opened: AsyncExitStack,
        store: DataStore,
        kept_weights: KeptWeights,
        session: aiohttp.ClientSession,
    ) -> DataFetcher:
        """Open the fetcher and, in a run with several worker groups, the server that other workers fetch from."""
        info, max_bytes = self.info, self.info.runtime.max_message_bytes
        if len(self.config.worker_groups) > 1:
            held = HeldData(store, host=info.runtime.host, max_bytes=max_bytes)
            url = await opened.enter_async_context(held.serving(kept_weights.route()))
            await directory.publish(self.names.held_data(info.index, info.attempt, info.group_incarnation), url)
        return DataFetcher(session, store, directory, self.board, attempt=info.attempt, max_bytes=max_bytes)

    def _open_recorder(self, opened: AsyncExitStack) -> BackgroundRecorder | None:
        """Open the recorder; None without record.trajectories or if this worker is not a head."""
        if not self.config.record.trajectories or self.info.index not in self._first.heads:
            return None
        folder = recording_dir(Path(self.info.run_dir), self.info.attempt)
        recorder = BackgroundRecorder(trajectory_files(self.config, folder, self.system.clock), clock=self.system.clock)
        opened.push_async_callback(asyncio.to_thread, recorder.close, self.info.runtime.stop_timeout_s / 4)
        return recorder

    async def _join_group(
        self, process_group: ProcessGroup, directory: Directory, compute: Compute, device: torch.device
    ) -> dict[str, ModelMesh | None]:
        """Join the process group and make the meshes of all models of its worker group."""
        limit_s = self.info.runtime.start_limit_s
        join = partial(process_group.join, await process_group.rendezvous(directory), device)
        await compute(join, f"the process group of {process_group.size} workers", limit_s=limit_s)
        make = partial(process_group.meshes, list(self._placements.values()), device)
        return await compute(make, "the process groups of the models", limit_s=limit_s)

    async def _load(
        self, model: ModelConfig, compute: Compute, device: torch.device, mesh: ModelMesh | None
    ) -> TrainEngine:
        loading = LoadProgress(model.path, self.system.clock)

        def load() -> TrainEngine:
            loading.enter("imports and weights")
            torch.manual_seed(self.info.seed)
            transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # progress bars would fill the log
            with loading.watched():
                return load_checked(model, self.config.train, mesh=mesh, device=device, entered=loading.enter)

        what, limit_s = f"loading {model.name}", self.info.runtime.start_limit_s
        try:
            return await compute(load, what, limit_s=limit_s, detail=loading.text)
        except WaitTimeoutError as error:
            said = f"{error.what} (so far: {loading.phases()}; limit: runtime.start_timeout_s)"
            raise WaitTimeoutError(said, self.name, limit_s) from None
