"""Executes the master's calls on a model worker, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config.processes import ModelWorkerConfig
from asyncrl.config.schema import EMA, REF
from asyncrl.data.sequence import SequenceSample, is_words
from asyncrl.data.trajectories import BackgroundRecorder, Entry, TrajectoryStore, tokenizer_fingerprint
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.dataflow.graph import TRAIN_MFC, steps_early
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model import checkpoint
from asyncrl.model.compute import Compute
from asyncrl.model.cpu_ranks import CpuRanks
from asyncrl.model.data_manager import DataManager
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import Exporter
from asyncrl.model.fetching import DataFetcher, FetchError
from asyncrl.model.first_step import FirstStep
from asyncrl.model.group_maker import GroupMaker
from asyncrl.model.interfaces import Interface, Stats, StepTotals
from asyncrl.model.kept_weights import KeptWeights, KeptWeightsFetcher
from asyncrl.model.out_of_memory import OutOfDeviceMemory
from asyncrl.model.process_group import ProcessGroup
from asyncrl.model.profiling import Profiler
from asyncrl.model.reallocate import reallocate
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver
from asyncrl.protocol.calls import (
    BeginProfile,
    CallResult,
    ClearData,
    CommitCheckpoint,
    CommitWeights,
    EndProfile,
    ExecuteMFC,
    FetchData,
    FetchWeights,
    HoldWeights,
    KeepWeights,
    LoadCheckpoint,
    Ping,
    ReadValues,
    Reallocate,
    Redistribute,
    ReleaseDevices,
    SaveBatch,
    SaveCheckpoint,
    SaveModel,
    WriteWeights,
)
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import path_of
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.devices import peak_flops, peak_memory_bytes
from asyncrl.runtime.services import Services
from asyncrl.streams.request_reply import Call, NameResolvingReplyServer


class Calls:
    """Executes calls in order of arrival.

    consumes: calls.  produces: their replies, directly or through the exporter once its files are on disk.
    waits for: the compute thread, which waits for the other workers of a call, within train.call_timeout_s.
    unblocked by: the other workers making the same call, or losing their connection.
    """

    def __init__(
        self,
        config: ModelWorkerConfig,
        process_group: ProcessGroup,
        engines: Mapping[str, TrainEngine],
        without_model: Mapping[str, CpuRanks],
        interfaces: Mapping[str, Interface],
        store: DataStore,
        *,
        receiver: TrajectoryReceiver | None,
        group_makers: Mapping[str, GroupMaker],
        data: DataManager,
        fetcher: DataFetcher,
        kept_weights: KeptWeights,
        weight_fetcher: KeptWeightsFetcher,
        exporter: Exporter,
        recorder: BackgroundRecorder | None,
        compute: Compute,
        services: Services,
    ) -> None:
        """engines: by model; without_model: by placement; interfaces: by MFC; all only those of this worker. receiver: on heads
        only. group_makers: by the MFC that generates."""
        self.store, self.engines = store, engines
        self._config, self._info, self._process_group = config, config.worker, process_group
        self._receiver, self._group_makers, self._data, self._fetcher = receiver, group_makers, data, fetcher
        self._kept_weights, self._weight_fetcher = kept_weights, weight_fetcher
        self._exporter, self._recorder, self._compute = exporter, recorder, compute
        self._board, self._logger, self._trace, self._clock = (
            services.board,
            services.logger,
            services.trace,
            services.clock,
        )
        self._models = {model.name: model for model in config.models}
        self._placements = {model.name: ModelPlacement.of(model) for model in config.models}
        self._heads = next(iter(self._placements.values())).heads  # heads receive trajectories
        self._without_model = without_model
        self._mfcs = {mfc.name: MFCDef.of(mfc) for mfc in config.mfcs if mfc.model in {**engines, **without_model}}
        self._interfaces = interfaces
        self._first_states = {mfc: interface.state() for mfc, interface in interfaces.items()}
        self._totals: dict[str, StepTotals] = {}  # by MFC: of the newest step
        self._first_step = FirstStep(config.mismatch, services.logger) if config.mismatch is not None else None
        self._profiler = Profiler(self._info)
        self._metas: dict[str, TrajectoryMeta] = (
            receiver.metas if receiver is not None else {}
        )  # by ticket: metadata of the groups in the store

    async def run(self, server: NameResolvingReplyServer) -> None:
        """Runs forever. A failed call is answered with its error and ends this worker. So other workers that are in a collective
        with this one lose their connection instead of waiting for it."""
        while True:
            call = await server.receive()
            self._board.progress()
            async with call.answering_errors():
                try:
                    await self._execute(call)
                except torch.OutOfMemoryError as error:
                    raise self._out_of_memory(call.body, error) from error

    async def _execute(self, call: Call) -> None:
        """Execute one call. It is answered before this returns, or by the exporter once its files are on disk."""
        body, exporter = call.body, self._exporter
        if isinstance(body, ReadValues):
            call.reply(CallResult(values=self._values(body)))
        elif isinstance(body, ExecuteMFC):
            call.reply(await self._compute(partial(self._run_mfc_measured, body), f"MFC {body.mfc}"))
        elif isinstance(body, (WriteWeights, SaveModel)):
            await exporter.write(call, body, self._engine(body.role))
        elif isinstance(body, CommitWeights):
            await exporter.commit(call, body, self._engine(body.role), self._models[body.role])
        elif isinstance(body, SaveCheckpoint):
            await exporter.write_checkpoint(call, body, self._part_of_checkpoint)
        elif isinstance(body, CommitCheckpoint):
            await exporter.commit_checkpoint(call, body)
        else:
            await self._execute_here(call)

    def _out_of_memory(self, body: object, error: Exception) -> OutOfDeviceMemory:
        call = body.mfc if isinstance(body, ExecuteMFC) else type(body).__name__
        where = next(filter(None, (engine.where for engine in self.engines.values())), "")
        return OutOfDeviceMemory(call, where, self._config.train, error)

    async def _execute_here(self, call: Call) -> None:
        """Execute a call of a kind that does not overlap later calls: it is complete and answered when this returns."""
        body, start, num_bytes, unfetched = call.body, self._clock.monotonic(), 0, ""
        model_flops: dict[str, ModelFlops] = {}
        if isinstance(body, FetchData):
            try:
                with self._trace.overlapping("fetch data", kind="data"):
                    num_bytes = await self._fetcher.fetch(body.parts)
            except FetchError as error:  # the failure is in another worker group: this worker continues
                unfetched = str(error)
            self._board.set_queue("store", len(self.store))
        elif isinstance(body, Redistribute):
            move = partial(self._redistribute, body)
            num_bytes = await self._compute(move, "the redistribution of data", detail=self._data.receiving)
            self._board.set_queue("store", len(self.store))
        elif isinstance(body, Reallocate):
            num_bytes = await self._compute(partial(self._reallocate, body), f"weights of {body.target}")
        elif isinstance(body, KeepWeights):
            num_bytes = await self._compute(partial(self._keep_weights, body), f"weights for {body.target}")
        elif isinstance(body, FetchWeights):
            try:
                with self._trace.overlapping("fetch weights", kind="weights", model=body.model):
                    num_bytes = await self._weight_fetcher.fetch(body, self._engine(body.model))
            except FetchError as error:
                unfetched = str(error)
        elif isinstance(body, HoldWeights):
            await self._exporter.hold(body, self._engine(body.role))
        elif isinstance(body, LoadCheckpoint):
            await self._compute(partial(self._load_checkpoint, self._folder(body.folder)), "the checkpoint to load")
        elif isinstance(body, SaveBatch):
            num_bytes = await asyncio.to_thread(self._save_batch, body)
        elif isinstance(body, ClearData):
            self._forget(body.ids)
        elif isinstance(body, ReleaseDevices):
            await self._compute(self._release_devices, "the models to leave the device")
        elif isinstance(body, BeginProfile):
            await self._compute(self._profiler.begin, "the profiler to begin")
        elif isinstance(body, EndProfile):
            folder = self._folder(body.folder) if body.folder else None
            num_bytes = await self._compute(partial(self._profiler.end, folder), "the profile to be written")
        elif isinstance(body, Ping):
            await self._compute(lambda: None, "ping")
            model_flops = {name: engine.flops for name, engine in self.engines.items()}
        else:
            raise TypeError(f"this worker cannot execute a call of kind {type(body).__name__}")
        if unfetched:
            self._logger.warning("%s", unfetched)
        seconds = self._clock.monotonic() - start
        call.reply(CallResult(seconds=seconds, num_bytes=num_bytes, unfetched=unfetched, model_flops=model_flops))

    def _release_devices(self) -> None:
        for engine in self.engines.values():
            engine.offload(folder=Path(self._info.run_dir))

    def _run_mfc_measured(self, body: ExecuteMFC) -> CallResult:
        before = self._counts()
        with self._trace.span(body.mfc, track="compute", version=body.version):
            result = self._run_mfc(body)
        flops, tokens, shared = (now - then for now, then in zip(self._counts(), before, strict=True))
        peak = self._config.train.peak_flops
        if not peak and torch.cuda.is_available():
            peak = peak_flops(torch.cuda.get_device_name())
        return msgspec.structs.replace(
            result,
            flops=flops,
            num_tokens=tokens,
            num_tokens_shared=shared,
            peak_flops=peak,
            memory_bytes=peak_memory_bytes(),
        )

    def _counts(self) -> tuple[int, int, int]:
        """Of the replicas of which this worker is the head, so far: FLOPs of training, tokens, and shared tokens of them."""
        heads = [engine for engine in self.engines.values() if engine.is_head]
        return (
            sum(engine.trained_flops for engine in heads),
            sum(engine.num_tokens for engine in heads),
            sum(engine.num_tokens_shared for engine in heads),
        )

    def _run_mfc(self, body: ExecuteMFC) -> CallResult:
        """On the compute thread: run the MFC on this replica's part of the batch. The replica's head stores and reports results."""
        start = self._clock.monotonic()
        if body.mfc not in self._mfcs:
            raise ValueError(f"this worker has no MFC {body.mfc!r}; the MFCs of its models are {list(self._mfcs)}")
        mfc = self._mfcs[body.mfc]
        self._weight_fetcher.check_finished(mfc.model)
        placement = self._placements[mfc.model]
        self._board.version = str(WeightVersion(self._info.attempt, body.version))
        replica = placement.part_of(self._info.index, SAMPLES)
        ids = body.parts[replica]
        if mfc.kind == "generate":
            return self._make_groups(body, ids)
        sample = self.store.select(ids, [key for key in mfc.input_keys if key not in body.missing])
        made, stats = self._compute_on(mfc.model, sample, body)
        if self._models[mfc.model].offload:
            self.engines[mfc.model].offload()
        if self._info.index != placement.heads[replica]:
            return CallResult(seconds=self._clock.monotonic() - start)
        if made is not None:
            self.store.amend(made.select_keys(mfc.output_keys))
        records = body.mfc == TRAIN_MFC and body.ends_step and body.version % self._config.record.every == 0
        if self._recorder is not None and records:
            self._record(self._recorder, body)
        return CallResult(
            ids=ids,
            keys=list(mfc.output_keys),
            stats={name: float(value) for name, value in stats.items()},
            seconds=self._clock.monotonic() - start,
            state=self._interfaces[body.mfc].state(),
        )

    def _compute_on(
        self, model: str, sample: SequenceSample | None, body: ExecuteMFC
    ) -> tuple[SequenceSample | None, Stats]:
        engine: Any = self.engines[model] if model in self.engines else self._without_model[model]
        interface = self._interfaces[body.mfc]
        # The master's copy counts: a repeated call, or one in a new incarnation, begins with the same state
        interface.restore(self._first_states[body.mfc] if body.state is None else body.state)
        if body.missing:
            interface = interface.without(body.missing)
        if body.mfc not in self._totals or self._totals[body.mfc].version != body.version:
            self._totals[body.mfc] = interface.begin(body.version)
        step = self._totals[body.mfc]
        step.ends, step.batch = body.ends_step, body.batch or body.ids
        step.steps_early = steps_early(self._mfcs[body.mfc], self._mfcs.values(), self._config.train)
        first = self._check_first_step(engine, sample, body, step) if body.on_policy else {}
        made, stats = interface.run(engine, sample, batch_ids=body.ids, step=step)
        return made, interface.stats_of_step(stats, batch_ids=body.ids, step=step) | first

    def _check_first_step(
        self, engine: TrainEngine, sample: SequenceSample | None, body: ExecuteMFC, step: StepTotals
    ) -> Stats:
        if self._first_step is None:
            return {}
        has_proximal = {"proximal_logprobs"} <= set(self._mfcs[body.mfc].input_keys) - set(body.missing)
        proximal_at = self._config.train.ppo.temperature if has_proximal else None
        last = body.ends_step or step.steps_early  # the verdict comes before the first optimizer step
        return self._first_step.check(engine, sample, proximal_at=proximal_at, last=last)

    def _make_groups(self, body: ExecuteMFC, ids: list[str]) -> CallResult:
        """Make the groups of this worker's replica. All are stored, except those of an evaluation."""
        start = self._clock.monotonic()
        made = self._group_makers[body.mfc].make(body, ids)
        if not body.eval_mode:
            for sample, meta in zip(made.samples, made.metas, strict=True):
                if reason := self.store.put(sample):
                    raise RuntimeError(f"group {meta.ticket_id} was generated but cannot be stored: {reason}")
                self._metas[meta.ticket_id] = meta
        model = self._mfcs[body.mfc].model
        if self._models[model].offload:
            self.engines[model].offload()
        return CallResult(
            ids=[meta.ticket_id for meta in made.metas],
            metas=made.metas,
            rejected=made.rejected,
            seconds=self._clock.monotonic() - start,
        )

    def _record(self, recorder: BackgroundRecorder, body: ExecuteMFC) -> None:
        """Queue the batch's trajectories that this head received, for the recorder's thread. Each has all keys of this store."""
        batch = body.batch or body.ids
        here = [(place, ticket) for place, ticket in enumerate(batch) if ticket in self._metas]
        entries = [Entry(self.store.whole(ticket), self._metas[ticket], place) for place, ticket in here]
        recorder.record_nowait(body.version, len(batch), entries)

    def _values(self, body: ReadValues) -> list[list[Any]]:
        found = self.store.select(body.ids, [body.key])
        assert found is not None
        if is_words(body.key):
            return found.words(body.key)
        return [[sequence.tolist() for sequence in group] for group in found.slices(body.key)]

    def _save_batch(self, body: SaveBatch) -> int:
        """Write the groups of the batch that came to this head. The files are written before the reply. A disk error is logged and
        does not stop training."""
        placed = [(place, meta) for place, meta in enumerate(body.metas) if meta.ticket_id in self.store]
        mine = [
            (place, meta) for place, meta in placed if self._heads[meta.head % len(self._heads)] == self._info.index
        ]
        entries = [Entry(self.store.whole(meta.ticket_id), meta, place) for place, meta in mine]
        files = trajectory_files(self._config, self._folder(body.folder), self._clock)
        try:
            files.write(body.version, len(body.metas), entries)
        except OSError as error:
            self._logger.warning("%d groups could not be saved in %s: %s", len(entries), body.folder, error)
        return files.num_bytes

    def _redistribute(self, body: Redistribute) -> int:
        with self._trace.span("move data", track="compute"):
            return self._data.execute(body.steps)

    def _reallocate(self, body: Reallocate) -> int:
        workers = {*self._placements[body.source].workers, *self._placements[body.target].workers}
        ranks = sorted(map(self._process_group.rank_of, workers))
        source, target = self.engines.get(body.source), self.engines.get(body.target)
        with self._trace.span("copy weights", track="compute", source=body.source, target=body.target):
            return reallocate(source, target, workers=ranks, share=body.share)

    def _keep_weights(self, body: KeepWeights) -> int:
        folder = self._folder(body.checkpoint) if body.checkpoint else None
        with self._trace.span("keep weights", track="compute", source=body.source, target=body.target):
            return self._kept_weights.keep(body, self._engine(body.source), folder)

    def _part_of_checkpoint(self) -> checkpoint.Snapshot:
        part = checkpoint.snapshot(self._checkpointed)
        self._kept_weights.add_to(part)
        return part

    @property
    def _checkpointed(self) -> dict[str, TrainEngine]:
        """This worker's engines of the models that a run changes. Every other model is unchanged on disk, or is a further layout of
        one of these."""
        ref_moves = self._config.train.ref.update_interval > 0
        return {
            name: engine
            for name, engine in self.engines.items()
            if self._models[name].trainable or name == EMA or (ref_moves and name.partition("@")[0] == REF)
        }

    def _load_checkpoint(self, path: Path) -> None:
        checkpoint.load(
            path,
            self._checkpointed,
            workers=range(self._process_group.size),
            or_as_is=(REF,),
            instead={EMA: ACTOR},  # a run that has had no average so far begins it with the actor
        )

    def _forget(self, ids: list[str]) -> None:
        if self._receiver is not None:
            self._receiver.discard(ids)
        else:
            self.store.discard(ids)
            for group_id in ids:
                self._metas.pop(group_id, None)
            self._board.set_queue("store", len(self.store))

    def _folder(self, name: str) -> Path:
        """Raises OutsideRunError."""
        return path_of(self._info.run_dir, name)

    def _engine(self, model: str) -> TrainEngine:
        if model not in self.engines:
            raise ValueError(f"this worker has no model {model!r}; its models are {list(self.engines)}")
        return self.engines[model]


def trajectory_files(config: ModelWorkerConfig, folder: Path, clock: Clock) -> TrajectoryStore:
    """Return the store that writes this worker's recordings to a folder."""
    return TrajectoryStore(
        folder,
        config.worker.name,
        trained=True,
        max_bytes=config.record.max_bytes,
        prune=True,
        tokenizer=tokenizer_fingerprint(config.tokenizer_path or config.model_path),
        clock=clock,
    )
