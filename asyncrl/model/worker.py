"""Model worker: one rank of the training side. Holds models, stores the trajectories of its head, executes MFCs in order.

    rollout workers -- trajectory --> [puller] -> store -- metadata --> master
    master -- calls --> [reply server] -> compute thread: MFCs on what the store holds, weight snapshots
                                          writer thread: snapshots to disk
    gserver manager -- /broadcast_weights --> [sender, on rank 0]: snapshots to generation servers

Sockets live on the event loop; everything that touches a tensor runs on one compute thread, one call after another in the
order of the master's calls, which is the same on all ranks: so collectives meet. Writing weights is off that path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import TCPStore

from asyncrl.config import ModelWorkerConfig
from asyncrl.data.prompts import load_tokenizer
from asyncrl.data.trajectories import (
    BackgroundRecorder,
    Entry,
    TrajectoryStore,
    recording_dir,
    tokenizer_fingerprint,
)
from asyncrl.dataflow import TRAIN_MFC, build_dataflow
from asyncrl.messages import (
    CallResult,
    ClearData,
    ExecuteMFC,
    HoldWeights,
    Ping,
    SaveModel,
    StoreVerdict,
    WeightVersion,
    WriteWeights,
)
from asyncrl.model.broadcast import WeightSender
from asyncrl.model.engine import TrainEngine
from asyncrl.model.intake import Intake
from asyncrl.model.interfaces import make_interface
from asyncrl.model.probe import LogprobProbe
from asyncrl.model.sending import Held
from asyncrl.model.store import DataStore
from asyncrl.runtime.disk import writing
from asyncrl.runtime.loading import LoadProgress
from asyncrl.runtime.request_reply import Call, NameResolvingReplyServer
from asyncrl.runtime.worker import Worker
from asyncrl.update_group import serve_store
from asyncrl.weights import Probe, write_version

T = TypeVar("T")

ROLES = ("actor", "ref")  # actor: trained; ref: the same initial weights, frozen
STORED = StoreVerdict(verdict="stored")
_LAST_WORDS_S = 0.2  # between the answer to a call that failed and the end of the worker


class ModelWorker(Worker):
    """One data-parallel rank.

    consumes: trajectories (from rollout workers), calls (from the master, in order).
    produces: metadata of trajectories, results of calls, weight versions on disk (rank 0).
    waits for: the next call; inside one for the other ranks, limited by train.call_timeout_s.
    unblocked by: the master; the other ranks making the same call, or losing their connection.
    """

    def __init__(self, config: ModelWorkerConfig) -> None:
        super().__init__(config.worker)
        self.config = config
        self.head = config.data_parallel_rank
        self.graph = build_dataflow(config.train)
        unknown = [role for role in self.graph.roles if role not in ROLES]
        if unknown:
            raise ValueError(f"MFCs run on the roles {unknown}; there are {list(ROLES)} (train.extra_mfcs.*.role)")
        self.interfaces = {
            name: make_interface(mfc, config.train, seed=config.worker.seed) for name, mfc in self.graph.mfcs.items()
        }
        self.engines: dict[str, TrainEngine] = {}
        self.store = DataStore(config.store_capacity)
        self.recorder = self._make_recorder() if config.record.trajectories else None
        self._probe = LogprobProbe(config.worker.seed) if config.weights.verify_logprobs else None
        self.sender: WeightSender | None = None  # rank 0, with weights.transport=broadcast
        self._store_tcp: TCPStore | None = None  # rank 0 serves it; it must outlive the process group
        self._compute = ThreadPoolExecutor(1, f"{self.name}-compute", initializer=self._set_torch_threads)
        self._writer = ThreadPoolExecutor(1, f"{self.name}-writer")
        self._writing: asyncio.Task[None] | None = None

    # --------------------------------------------------------------------------------------------------------------- life

    async def setup(self) -> None:
        """Bind and publish first, so that the others need not wait; then load. Calls queue meanwhile."""
        runtime = self.info.runtime
        self.intake = Intake(
            self,
            self.store,
            head=self.head,
            vocab_size=lambda: self.engines["actor"].vocab_size,
            verdict_limit_s=self.config.train.call_timeout_s,
        )
        self.server = NameResolvingReplyServer(
            self.resolver, self.names, index=self.info.index, runtime=runtime, lease=self.lease
        )
        await self.intake.open()
        await self.server.start()
        device = choose_device(self.info.index)
        group = await self._join_process_group(device)
        for role in self.graph.roles:
            loading = LoadProgress(self.config.model_path)
            self.engines[role] = await self._on_compute(
                partial(self._load, role, device, group, loading),
                f"loading {role}",
                limit_s=runtime.start_timeout_s,
                detail=loading.text,
            )
        if self.head == 0 and self.config.weights.transport == "broadcast":
            await self._open_sender(device)
        self.spawn(self.intake.run(), "take in")
        self.logger.info("rank %d of %d on %s", self.head, self.config.data_parallel_size, device)

    async def run(self) -> None:
        """Execute calls in order, for ever. A call that fails is answered with its error, and ends this worker: its peers
        may be in a collective with it and must not wait."""
        while True:
            call = await self.server.receive()
            self.board.progress()
            try:
                await self._execute(call)
            except Exception as error:
                call.fail(error)
                await asyncio.sleep(_LAST_WORDS_S)
                raise

    async def close(self) -> None:
        self._compute.shutdown(wait=False, cancel_futures=True)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close, self.info.runtime.stop_timeout_s / 4)
        for name in ("server", "intake"):
            if hasattr(self, name):
                await getattr(self, name).close()
        if self.sender is not None:
            await self.sender.close()
        if self._writing is not None:  # a version half written has no final name: a wait would only be politeness
            self._writing.cancel()
        self._writer.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------------------------------------------------------- calls

    async def _execute(self, call: Call) -> None:
        """One call. Its reply is given here, or by the writer when what it wrote is on disk."""
        body, start = call.body, time.monotonic()
        if isinstance(body, ExecuteMFC):
            result = await self._on_compute(partial(self._run_mfc_traced, body), f"MFC {body.mfc}")
            call.reply(result)
        elif isinstance(body, HoldWeights):
            await self._hold(body)
            call.reply(CallResult(seconds=time.monotonic() - start))
        elif isinstance(body, (WriteWeights, SaveModel)):
            await self._write(call, body)
        else:
            if isinstance(body, ClearData):
                self.intake.discard(body.ids)
            elif isinstance(body, Ping):
                await self._on_compute(lambda: None, "ping")
            call.reply(CallResult(seconds=time.monotonic() - start))

    def _run_mfc_traced(self, body: ExecuteMFC) -> CallResult:
        with self.trace.span(body.mfc, track="compute", version=body.version):
            return self._run_mfc(body)

    def _run_mfc(self, body: ExecuteMFC) -> CallResult:
        """On the compute thread: the MFC on the ids of the batch that are here, in the order of the call."""
        start = time.monotonic()
        if body.mfc not in self.graph.mfcs:
            raise ValueError(f"there is no MFC {body.mfc!r}; there are {list(self.graph.mfcs)}")
        mfc, engine = self.graph.mfcs[body.mfc], self.engines[self.graph.mfcs[body.mfc].role]
        self.board.version = str(WeightVersion(self.info.attempt, body.version))
        sample = self.store.select(body.ids, mfc.input_keys)
        num_held = int(engine.all_reduce_sum([float(sample.num_ids if sample is not None else 0)])[0])
        if num_held != len(body.ids):
            raise RuntimeError(
                f"MFC {mfc.name!r}: the heads hold {num_held} of the batch's {len(body.ids)} groups; master and heads disagree"
            )
        made, stats = self.interfaces[mfc.name].run(engine, sample, batch_ids=body.ids, version=body.version)
        if made is not None:
            self.store.amend(made.select_keys(mfc.output_keys))
        if self.recorder is not None and body.mfc == TRAIN_MFC and body.version % self.config.record.every == 0:
            self._record(self.recorder, body)
        return CallResult(
            ids=list(sample.ids) if sample is not None else [],
            keys=list(mfc.output_keys),
            stats={name: float(value) for name, value in stats.items()},
            seconds=time.monotonic() - start,
        )

    def _record(self, recorder: BackgroundRecorder, body: ExecuteMFC) -> None:
        """Hand the groups of the batch that are here, with all their keys, to the thread that writes them."""
        here = [(place, ticket) for place, ticket in enumerate(body.ids) if ticket in self.store]
        entries = [Entry(self.store.whole(ticket), self.intake.metas[ticket], place) for place, ticket in here]
        recorder.record_nowait(body.version, len(body.ids), entries)

    async def _write(self, call: Call, body: WriteWeights | SaveModel) -> None:
        """Snapshot in the order of calls, write beside what follows. Replicas are equal: only rank 0 writes.

        Waits for the write before, so that there is never more than one snapshot in memory.
        """
        if body.role not in self.engines:
            raise ValueError(f"there is no model of role {body.role!r}; there are {list(self.engines)}")
        if self.head != 0:
            call.reply(CallResult())
            return
        await self._end_of_writing()
        engine = self.engines[body.role]
        held = self.sender.held if self.sender is not None else None
        if held is not None and isinstance(body, WriteWeights) and body.weight_version == str(held.version):
            tensors, probe = held.tensors(), held.probe
        else:
            with self.trace.overlapping("snapshot", kind="weights", role=body.role):
                tensors, probe = await self._on_compute(partial(self._snapshot, engine), f"snapshot of {body.role}")
        if isinstance(body, WriteWeights):
            write = partial(self._write_version, body, tensors, probe)
        else:
            write = partial(self._save_model, body, engine, tensors)
        self._writing = self.spawn(self._write_and_reply(call, write), "write")

    async def _hold(self, body: HoldWeights) -> None:
        """Snapshot for the sender, which rank 0 has. The same snapshot is what WriteWeights writes."""
        if self.sender is None:
            return
        await self._end_of_writing()
        engine, version = self.engines[body.role], WeightVersion.parse(body.weight_version)

        def snapshot() -> Held:
            buckets = engine.buckets(self.config.weights.bucket_bytes)
            return Held(version, buckets, self._probe.measure(engine) if self._probe is not None else None)

        with self.trace.overlapping("snapshot", kind="weights", role=body.role):
            self.sender.hold(await self._on_compute(snapshot, f"snapshot of {body.role}"))

    async def _end_of_writing(self) -> None:
        """So that what is written and what is newest are the only snapshots in memory, and one that is being sent."""
        if self._writing is not None:
            limit_s = self.config.train.call_timeout_s
            await self.board.bounded(self._writing, what="the write before", on=self.name, limit_s=limit_s)

    async def _write_and_reply(self, call: Call, write: Callable[[], None]) -> None:
        start = time.monotonic()
        try:
            with self.trace.overlapping("write weights", kind="weights"):
                await asyncio.get_running_loop().run_in_executor(self._writer, write)
        except Exception as error:
            call.fail(error)
            await asyncio.sleep(_LAST_WORDS_S)
            raise
        call.reply(CallResult(seconds=time.monotonic() - start))

    def _snapshot(self, engine: TrainEngine) -> tuple[list[tuple[str, torch.Tensor]], Probe | None]:
        """On the compute thread: the weights, and what servers must find when they have loaded them."""
        return engine.named_tensors(), self._probe.measure(engine) if self._probe is not None else None

    def _write_version(self, body: WriteWeights, tensors: list[tuple[str, torch.Tensor]], probe: Probe | None) -> None:
        path = Path(body.path)
        with writing(path):
            write_version(
                path,
                tensors,
                source_dir=Path(self.config.model_path),
                version=WeightVersion.parse(body.weight_version),
                shard_bytes=self.config.weights.shard_bytes,
                fsync=self.config.weights.fsync,
                probe=probe,
            )

    def _save_model(self, body: SaveModel, engine: TrainEngine, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Model and tokenizer, complete or absent at path; raises StorageError with nothing left behind."""
        path = Path(body.path)
        temporary = path.with_name(path.name + ".writing")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with writing(path):
                engine.save(temporary, tensors)
                load_tokenizer(self.config.tokenizer_path or self.config.model_path).save_pretrained(temporary)
                shutil.rmtree(path, ignore_errors=True)
                temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _on_compute(
        self, function: Callable[[], T], what: str, limit_s: float | None = None, detail: Callable[[], str] = str
    ) -> T:
        """Run on the compute thread, visibly and bounded."""
        future = asyncio.get_running_loop().run_in_executor(self._compute, function)
        return await self.board.bounded(
            future, what=what, on=self.name, limit_s=limit_s or self.config.train.call_timeout_s, detail=detail
        )

    async def _open_sender(self, device: torch.device) -> None:
        info = self.info
        self.sender = WeightSender(
            name=f"{info.experiment}/{info.trial}/a{info.attempt}",
            host=info.runtime.host,
            device=device,
            options=self.config.weights,
            logger=self.logger,
            trace=self.trace,
        )
        await self.publish(self.names.weight_sender("actor"), await self.sender.start())

    def _make_recorder(self) -> BackgroundRecorder:
        config = self.config
        files = TrajectoryStore(
            recording_dir(Path(self.info.run_dir), self.info.attempt),
            self.name,
            trained=True,
            max_bytes=config.record.max_bytes,
            prune=True,
            tokenizer=tokenizer_fingerprint(config.tokenizer_path or config.model_path),
        )
        return BackgroundRecorder(files)

    def _set_torch_threads(self) -> None:
        if self.config.train.torch_threads > 0:
            torch.set_num_threads(self.config.train.torch_threads)

    def _load(
        self, role: str, device: torch.device, group: dist.ProcessGroup | None, loading: LoadProgress
    ) -> TrainEngine:
        torch.manual_seed(self.info.seed)
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # they fill the log
        trainable = role in self.graph.trained_roles
        with loading.watched():
            return TrainEngine(
                self.config.model_path, self.config.train, device=device, process_group=group, trainable=trainable
            )

    async def _join_process_group(self, device: torch.device) -> dist.ProcessGroup | None:
        """All data-parallel ranks of this attempt: rank 0 binds a store and publishes it, the others find it by name."""
        size = self.config.data_parallel_size
        if size == 1:
            return None
        runtime = self.info.runtime
        key = self.names.process_group("actor", self.info.attempt)
        address = ""
        if self.head == 0:
            self._store_tcp, address = await self._on_compute(
                partial(serve_store, runtime.host, runtime.start_timeout_s), "opening the rendezvous store"
            )
            await self.publish(key, address)
        else:
            address = await self.wait_for_key(key, "rank 0 to open the rendezvous store")
        join = partial(self._init_process_group, address, device)
        return await self._on_compute(join, f"the {size} ranks to meet", limit_s=runtime.start_timeout_s)

    def _init_process_group(self, address: str, device: torch.device) -> dist.ProcessGroup | None:
        runtime = self.info.runtime
        if self._store_tcp is None:
            host, _, port = address.rpartition(":")
            self._store_tcp = TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=runtime.start_timeout_s)
            )
        interface = interface_of(runtime.host)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._store_tcp,
            rank=self.head,
            world_size=self.config.data_parallel_size,
            timeout=timedelta(seconds=self.config.train.call_timeout_s),
        )
        return dist.group.WORLD


def interface_of(host: str) -> str:
    """Name of the network interface that has an address, "" if none has: what gloo is told to bind to."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return ""


def choose_device(index: int) -> torch.device:
    """A GPU of its own where there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
