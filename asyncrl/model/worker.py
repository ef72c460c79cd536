"""Model worker: one rank of the training side. Holds its shards of models and a part of the data, executes calls in order.

    rollout workers -- trajectory --> [puller] -> store -- metadata --> master       (heads of the first model only; mode=sync:
                                                                                      made here, in the first of the MFCs)
    master -- calls --> [reply server] -> compute thread: MFCs, data and weights on their way between workers, snapshots
                                          writer thread: snapshots to disk
    workers of other worlds <-- data --> [held data, fetcher]      (where the run has worlds apart: worlds.py)
    gserver manager -- /broadcast_weights --> [sender, on the first model's first rank]: snapshots to generation servers

Sockets live on the event loop; everything that touches a tensor runs on one compute thread, one call after another in the
order of the master's calls, which is the same on all workers: so collectives meet. Writing weights is off that path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from asyncrl.config.schema import REF, ModelConfig, ModelWorkerConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.trajectories import (
    BackgroundRecorder,
    Entry,
    TrajectoryStore,
    recording_dir,
    tokenizer_fingerprint,
)
from asyncrl.dataflow.graph import TRAIN_MFC, MFCDef
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worlds import Worlds
from asyncrl.model import checkpoint
from asyncrl.model.data_manager import DataManager
from asyncrl.model.engine import TrainEngine
from asyncrl.model.fetching import DataFetcher, FetchError, HeldData
from asyncrl.model.group_maker import GroupMaker
from asyncrl.model.interfaces import make_interface
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.publishing import LAST_WORDS_S, SHARED, Publisher
from asyncrl.model.reallocate import reallocate
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver
from asyncrl.model.world import World, choose_device
from asyncrl.protocol.messages import (
    CallResult,
    ClearData,
    CommitCheckpoint,
    CommitWeights,
    ExecuteMFC,
    FetchData,
    HoldWeights,
    LoadCheckpoint,
    Ping,
    Reallocate,
    Redistribute,
    SaveBatch,
    SaveCheckpoint,
    SaveModel,
    ShareWeights,
    TakeWeights,
    TrajectoryMeta,
    WeightVersion,
    WriteWeights,
)
from asyncrl.protocol.run_folder import path_of
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.request_reply import Call, NameResolvingReplyServer
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import PhasedWorker

T = TypeVar("T")


class ModelWorker(PhasedWorker):
    """One rank of a world, with a shard of each model that is placed here.

    consumes: trajectories (from rollout workers), calls (from the master, in order).
    produces: metadata of trajectories, results of calls, files of weight versions.
    waits for: the next call; inside one for the other workers in it, limited by train.call_timeout_s.
    unblocked by: the master; the other workers making the same call, or losing their connection.
    """

    def __init__(self, config: ModelWorkerConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        index = config.worker.index
        self.models = {model.name: model for model in config.models}
        self.placements = {model.name: ModelPlacement.of(model) for model in config.models}
        here = [name for name, placement in self.placements.items() if index in placement.workers]
        self.mfcs = {mfc.name: MFCDef.of(mfc) for mfc in config.mfcs if mfc.model in here}
        self.interfaces = {
            name: make_interface(mfc, config.train, seed=config.worker.seed)
            for name, mfc in self.mfcs.items()
            if mfc.kind != "generate"
        }
        self.group_maker: GroupMaker | None = None
        self.engines: dict[str, TrainEngine] = {}
        self.store = DataStore(config.store_capacity)
        worlds = Worlds.of_config(config.worker.count, config.apart)
        self.world = World(self, worlds, limit_s=config.train.call_timeout_s)
        self.data = DataManager(
            self.store, worker=index, limit_s=config.train.call_timeout_s, rank_of=self.world.rank_of
        )
        max_bytes = config.worker.runtime.max_message_bytes
        self.held = HeldData(self.store, host=config.worker.runtime.host, max_bytes=max_bytes) if worlds.apart else None
        self.fetcher = DataFetcher(self, self.store)
        self.first = next(iter(self.placements.values()))  # its heads take trajectories, its weights are served
        self.intake: TrajectoryReceiver | None = None
        self.metas: dict[str, TrajectoryMeta] = {}  # of trajectories in the store
        is_head = index in self.first.heads
        self.recorder = self._make_recorder() if config.record.trajectories and is_head else None
        self.publisher = Publisher(self, config, self._on_compute)
        self._compute = ThreadPoolExecutor(1, f"{self.name}-compute", initializer=self._set_torch_threads)

    # --------------------------------------------------------------------------------------------------------------- life

    async def setup(self) -> None:
        """Bind and publish first, so that the others need not wait; then load. Calls queue meanwhile."""
        index, runtime = self.info.index, self.info.runtime
        if index in self.first.heads and self.config.groups is None:
            self.intake = TrajectoryReceiver(
                self,
                self.store,
                head=self.first.heads.index(index),
                limits=self._limits(),
                verdict_limit_s=self.config.train.call_timeout_s,
            )
            self.metas = self.intake.metas
            await self.intake.open()
        if self.held is not None:
            self.fetcher.open()
            await self.publish(self.names.held_data(index, self.info.attempt, self.info.life), await self.held.start())
        self.server = NameResolvingReplyServer(
            self.resolver,
            self.names,
            index=index,
            runtime=runtime,
            transport=self.system.transport,
            lease=self.lease,
            attempt=self.info.attempt,
            life=self.info.life,
        )
        await self.server.start()
        device = choose_device(index, tf32=bool(self.config.train.tf32))
        meshes = await self._meet(device)
        for name, placement in self.placements.items():
            if index not in placement.workers:
                continue
            loading = LoadProgress(self.models[name].path)
            self.engines[name] = await self._on_compute(
                partial(self._load, self.models[name], device, meshes.get(name), loading),
                f"loading {name}",
                limit_s=runtime.start_timeout_s,
                detail=loading.text,
            )
        for mfc in self.mfcs.values():
            if mfc.kind == "generate":
                self.group_maker = GroupMaker(self.config, self.engines[mfc.model], self.board, self.logger)
        if index == self.first.workers[0] and self.config.weights.transport == "broadcast":
            await self.publisher.open_sender(device)
        if self.intake is not None:
            self.spawn(self.intake.run(), "take in")
        self.logger.info(
            "rank %d of %d%s on %s: %s",
            self.world.rank,
            self.world.size,
            f", apart, in life {self.info.life}" if self.world.is_apart else "",
            device,
            ", ".join(self.engines) or "no model",
        )

    async def work(self) -> None:
        """Execute calls in order, for ever. A call that fails is answered with its error, and ends this worker: its peers
        may be in a collective with it and must not wait."""
        while True:
            call = await self.server.receive()
            self.board.progress()
            try:
                await self._execute(call)
            except Exception as error:
                call.fail(error)
                await asyncio.sleep(LAST_WORDS_S)
                raise

    async def close(self) -> None:
        self._compute.shutdown(wait=False, cancel_futures=True)
        self.data.close()
        if self.group_maker is not None:
            self.group_maker.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close, self.info.runtime.stop_timeout_s / 4)
        if hasattr(self, "server"):
            await self.server.close()
        if self.intake is not None:
            await self.intake.close()
        if self.held is not None:
            await self.held.close()
        await self.fetcher.close()
        await self.publisher.close()

    # -------------------------------------------------------------------------------------------------------------- calls

    async def _execute(self, call: Call) -> None:
        """One call. Its reply is given here, or by the publisher when what it wrote is on disk."""
        body, publisher = call.body, self.publisher
        if isinstance(body, ExecuteMFC):
            call.reply(await self._on_compute(partial(self._run_mfc_traced, body), f"MFC {body.mfc}"))
        elif isinstance(body, (WriteWeights, SaveModel)):
            await publisher.write(call, body, self._engine(body.role))
        elif isinstance(body, CommitWeights):
            await publisher.commit(call, body, self._engine(body.role), self.models[body.role])
        elif isinstance(body, ShareWeights):
            await publisher.share(call, body, self._engine(body.model))
        elif isinstance(body, SaveCheckpoint):
            state = {f"{mfc}/{name}": x for mfc, it in self.interfaces.items() for name, x in it.state().items()}
            await publisher.write_checkpoint(call, body, self._checkpointed, state)
        elif isinstance(body, CommitCheckpoint):
            await publisher.commit_checkpoint(call, body)
        else:
            await self._execute_here(call)

    async def _execute_here(self, call: Call) -> None:
        """A call that is over when its turn is."""
        body, start, num_bytes, unfetched = call.body, time.monotonic(), 0, ""
        if isinstance(body, FetchData):
            try:
                with self.trace.overlapping("fetch data", kind="data"):
                    num_bytes = await self.fetcher.fetch(body.parts)
            except FetchError as error:  # of another world: this one goes on
                unfetched = str(error)
                self.logger.warning("%s", error)
            self.board.set_queue("store", len(self.store))
        elif isinstance(body, Redistribute):
            num_bytes = await self._on_compute(partial(self._redistribute, body), "data to be moved")
            self.board.set_queue("store", len(self.store))
        elif isinstance(body, Reallocate):
            num_bytes = await self._on_compute(partial(self._reallocate, body), f"weights of {body.target}")
        elif isinstance(body, TakeWeights):
            take = partial(
                checkpoint.take, self._folder(body.folder), SHARED, self._engine(body.model), share=body.share
            )
            await self._on_compute(take, f"weights of {body.model}")
        elif isinstance(body, HoldWeights):
            await self.publisher.hold(body, self._engine(body.role))
        elif isinstance(body, LoadCheckpoint):
            await self._on_compute(
                partial(self._load_checkpoint, self._folder(body.folder)), "the checkpoint to be loaded"
            )
        elif isinstance(body, SaveBatch):
            num_bytes = await asyncio.to_thread(self._save_batch, body)
        elif isinstance(body, ClearData):
            self._forget(body.ids)
        elif isinstance(body, Ping):
            await self._on_compute(lambda: None, "ping")
        call.reply(CallResult(seconds=time.monotonic() - start, num_bytes=num_bytes, unfetched=unfetched))

    def _run_mfc_traced(self, body: ExecuteMFC) -> CallResult:
        with self.trace.span(body.mfc, track="compute", version=body.version):
            return self._run_mfc(body)

    def _run_mfc(self, body: ExecuteMFC) -> CallResult:
        """On the compute thread: the MFC on the part of this worker's replica. Its head stores what is made, and reports."""
        start = time.monotonic()
        if body.mfc not in self.mfcs:
            raise ValueError(f"there is no MFC {body.mfc!r} on a model of this worker; there are {list(self.mfcs)}")
        mfc = self.mfcs[body.mfc]
        placement, engine = self.placements[mfc.model], self.engines[mfc.model]
        self.board.version = str(WeightVersion(self.info.attempt, body.version))
        data = placement.shard_of(self.info.index).data
        ids = body.parts[data]
        if mfc.kind == "generate":
            return self._make_groups(body, ids)
        sample = self.store.select(ids, mfc.input_keys)
        made, stats = self.interfaces[mfc.name].run(engine, sample, batch_ids=body.ids, version=body.version)
        if self.models[mfc.model].offload:
            engine.offload()
        if self.info.index != placement.head(data):
            return CallResult(seconds=time.monotonic() - start)
        if made is not None:
            self.store.amend(made.select_keys(mfc.output_keys))
        if self.recorder is not None and body.mfc == TRAIN_MFC and body.version % self.config.record.every == 0:
            self._record(self.recorder, body)
        return CallResult(
            ids=ids,
            keys=list(mfc.output_keys),
            stats={name: float(value) for name, value in stats.items()},
            seconds=time.monotonic() - start,
        )

    def _make_groups(self, body: ExecuteMFC, ids: list[str]) -> CallResult:
        """Those of this worker's replica; all but an evaluation's go into the store."""
        assert self.group_maker is not None, "setup has made it"
        start = time.monotonic()
        made = self.group_maker.make(body, ids)
        if not body.eval_mode:
            for sample, meta in zip(made.samples, made.metas, strict=True):
                if reason := self.store.put(sample):
                    raise RuntimeError(f"group {meta.ticket_id} was made and cannot be stored: {reason}")
                self.metas[meta.ticket_id] = meta
        model = self.mfcs[body.mfc].model
        if self.models[model].offload:
            self.engines[model].offload()
        return CallResult(
            ids=[meta.ticket_id for meta in made.metas],
            metas=made.metas,
            rejected=made.rejected,
            seconds=time.monotonic() - start,
        )

    def _record(self, recorder: BackgroundRecorder, body: ExecuteMFC) -> None:
        """Hand the batch's trajectories that came to this head, with all keys that are here, to the thread that writes them."""
        here = [(place, ticket) for place, ticket in enumerate(body.ids) if ticket in self.metas]
        entries = [Entry(self.store.whole(ticket), self.metas[ticket], place) for place, ticket in here]
        recorder.record_nowait(body.version, len(body.ids), entries)

    def _save_batch(self, body: SaveBatch) -> int:
        """Not by the recorder's thread: the reply says that it is done. What the disk refuses is told, and costs no training."""
        placed = [(place, meta) for place, meta in enumerate(body.metas) if meta.ticket_id in self.store]
        mine = [
            (place, meta)
            for place, meta in placed
            if self.first.heads[meta.head % len(self.first.heads)] == self.info.index
        ]
        entries = [Entry(self.store.whole(meta.ticket_id), meta, place) for place, meta in mine]
        files = self._files(self._folder(body.folder))
        try:
            files.write(body.version, len(body.metas), entries)
        except OSError as error:
            self.logger.warning("%d groups could not be saved in %s: %s", len(entries), body.folder, error)
        return files.num_bytes

    def _redistribute(self, body: Redistribute) -> int:
        with self.trace.span("move data", track="compute"):
            return self.data.execute(body.steps)

    def _reallocate(self, body: Reallocate) -> int:
        workers = {*self.placements[body.source].workers, *self.placements[body.target].workers}
        ranks = sorted(map(self.world.rank_of, workers))
        source, target = self.engines.get(body.source), self.engines.get(body.target)
        with self.trace.span("copy weights", track="compute", source=body.source, target=body.target):
            return reallocate(source, target, workers=ranks, share=body.share)

    @property
    def _checkpointed(self) -> dict[str, TrainEngine]:
        """Models that training has changed. Others are as on disk, or other layouts of one of these."""
        ref_moves = self.config.train.ref.update_interval > 0
        return {
            name: engine
            for name, engine in self.engines.items()
            if self.models[name].trainable or (ref_moves and name.partition("@")[0] == REF)
        }

    def _load_checkpoint(self, path: Path) -> None:
        state = checkpoint.load(path, self._checkpointed, workers=range(self.world.size), or_as_is=(REF,))
        for mfc, interface in self.interfaces.items():
            interface.restore({key.partition("/")[2]: x for key, x in state.items() if key.partition("/")[0] == mfc})

    def _forget(self, ids: list[str]) -> None:
        if self.intake is not None:
            self.intake.discard(ids)
        else:
            self.store.discard(ids)
            for group_id in ids:
                self.metas.pop(group_id, None)
            self.board.set_queue("store", len(self.store))

    def _folder(self, name: str) -> Path:
        """Raises OutsideRunError."""
        return path_of(self.info.run_dir, name)

    def _engine(self, model: str) -> TrainEngine:
        if model not in self.engines:
            raise ValueError(f"there is no model {model!r} on this worker; there are {list(self.engines)}")
        return self.engines[model]

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _on_compute(
        self, function: Callable[[], T], what: str, limit_s: float | None = None, detail: Callable[[], str] = str
    ) -> T:
        """Run on the compute thread, visibly and bounded."""
        future = asyncio.get_running_loop().run_in_executor(self._compute, function)
        return await self.board.bounded(
            future, what=what, on=self.name, limit_s=limit_s or self.config.train.call_timeout_s, detail=detail
        )

    async def _meet(self, device: torch.device) -> dict[str, ModelMesh | None]:
        """The meshes of all models; none where this is the only worker."""
        if self.world.size == 1:
            return {}
        address = await self.world.rendezvous()
        join = partial(self.world.join, address, device)
        limit_s = self.info.runtime.start_timeout_s
        await self._on_compute(join, f"the {self.world.size} workers to meet", limit_s=limit_s)
        make = partial(self.world.meshes, list(self.placements.values()), device)
        return await self._on_compute(make, "process groups of the models", limit_s=limit_s)

    def _limits(self) -> ModelLimits:
        """Of what every model of the run can read."""
        limits = {model.name: ModelLimits.of(model.path) for model in self.config.models}
        return replace(limits[self.first.name], max_length=min(one.max_length for one in limits.values()))

    def _make_recorder(self) -> BackgroundRecorder:
        return BackgroundRecorder(self._files(recording_dir(Path(self.info.run_dir), self.info.attempt)))

    def _files(self, folder: Path) -> TrajectoryStore:
        config = self.config
        return TrajectoryStore(
            folder,
            self.name,
            trained=True,
            max_bytes=config.record.max_bytes,
            prune=True,
            tokenizer=tokenizer_fingerprint(config.tokenizer_path or config.model_path),
        )

    def _set_torch_threads(self) -> None:
        if self.config.train.torch_threads > 0:
            torch.set_num_threads(self.config.train.torch_threads)

    def _load(
        self, model: ModelConfig, device: torch.device, mesh: ModelMesh | None, loading: LoadProgress
    ) -> TrainEngine:
        torch.manual_seed(self.info.seed)
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # they fill the log
        with loading.watched():
            return TrainEngine(model, self.config.train, mesh=mesh, device=device)
