"""Model workers with a fake master and a fake rollout worker: one in this process, and real processes over gloo and etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.config.processes import ModelConfig, ModelWorkerConfig, PlacedMFC, WorkerInfo
from asyncrl.config.schema import (
    CriticConfig,
    NameResolveConfig,
    OptimizerConfig,
    PPOConfig,
    RuntimeConfig,
    TrainConfig,
    WeightsConfig,
)
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.launch.standstill import Watchdog, late_ranks
from asyncrl.master.step_result import StepResult
from asyncrl.model import export
from asyncrl.model import worker as model_worker
from asyncrl.model.calls import Calls
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.flops import flops_of
from asyncrl.model.interfaces import make_interface
from asyncrl.model.out_of_memory import OutOfDeviceMemory
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver, trajectory_error
from asyncrl.model.worker import ModelWorker
from asyncrl.protocol.calls import (
    BeginProfile,
    CallBody,
    CallResult,
    ClearData,
    CommitCheckpoint,
    CommitWeights,
    EndProfile,
    ExecuteMFC,
    LoadCheckpoint,
    Ping,
    SaveBatch,
    SaveCheckpoint,
    SaveModel,
    WriteWeights,
)
from asyncrl.protocol.names import Names
from asyncrl.protocol.run_folder import OutsideRunError
from asyncrl.protocol.status import WorkerStatus
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.system import System
from asyncrl.streams.push_pull import MetaPuller, NameResolvingZmqPusher
from asyncrl.streams.request_reply import NameResolvingReplyServer, NameResolvingRequestClient, RemoteCallError
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import MANIFEST, tensor_files, verify_version
from tests.support.memory_names import memory_system, open_names
from tests.support.services import make_services
from tests.support.training_side import TrainingSide, training_side

RUNTIME = RuntimeConfig(start_timeout_s=60.0, stop_timeout_s=5.0, log_level="WARNING")
TRAIN = TrainConfig(
    batch_size=8,
    max_tokens_per_mb=100,
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
    ppo=PPOConfig(minibatches=2, temperature=1.0, kl_coef=0.05),
    call_timeout_s=100.0,
)
LIMIT_S = 60.0
STORED = StoreVerdict(verdict="stored")


@pytest.fixture(autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=32, intermediate_size=64)
    return path


def one_model(name: str, path: Path, grid: str, workers: Sequence[int], train: TrainConfig = TRAIN) -> ModelConfig:
    kind = "value" if name == "critic" else "lm"
    optimizer = train.critic.optimizer if name == "critic" else train.optimizer
    trainable = name in ("actor", "critic")
    return ModelConfig(name, str(path), grid, list(workers), kind, trainable=trainable, optimizer=optimizer)


def on_one_worker(path: Path, train: TrainConfig = TRAIN) -> list[ModelConfig]:
    return [one_model(role, path, "d1p1m1", [0], train) for role in build_dataflow(train).roles]


def placed_mfcs(train: TrainConfig = TRAIN, **elsewhere: str) -> list[PlacedMFC]:
    """Place each MFC on the model of its role, unless `elsewhere` names its model."""
    return [mfc.placed(elsewhere.get(mfc.name, mfc.role)) for mfc in build_dataflow(train).mfcs.values()]


def worker_config(name_resolve, run_dir, model_path, *, capacity=8, train=TRAIN) -> ModelWorkerConfig:
    info = WorkerInfo("model_worker", 0, 1, "test", "t0", 1, str(run_dir), 1, name_resolve, RUNTIME)
    return ModelWorkerConfig(
        worker=info,
        models=on_one_worker(model_path, train),
        mfcs=placed_mfcs(train),
        model_path=str(model_path),
        tokenizer_path=str(model_path),
        train=train,
        weights=WeightsConfig(fsync=False),
        store_capacity=capacity,
    )


def trajectory(
    ticket_id: str, head: int = 0, size: int = 3, position: int = 0
) -> tuple[TrajectoryMeta, SequenceSample]:
    """A group of `size` sequences: the same prompt of 4 random tokens, then a random response each. Its rewards differ.

    The same ticket always gives the same group.
    """
    rng = np.random.default_rng(list(ticket_id.encode()))
    prompt = rng.integers(1, 64, 4)
    lengths = (4 + rng.integers(2, 20, size)).tolist()
    masks = [np.arange(n) >= 4 for n in lengths]
    version = WeightVersion(1, 0).pack()
    group = {
        "packed_input_ids": [np.concatenate([prompt, rng.integers(1, 64, n - 4)]) for n in lengths],
        "packed_prompts": prompt,
        "packed_logprobs": [
            np.where(mask, -4.2 + 0.1 * rng.normal(size=len(mask)), 0).astype(np.float32) for mask in masks
        ],
        "prompt_mask": [~mask for mask in masks],
        "loss_mask": masks,
        "seq_no_eos_mask": [False] * size,
        "rewards": rng.normal(size=size).astype(np.float32),
        "task_ids": 0,
        "versions": [np.where(mask, version, -1) for mask in masks],
        "version_start": np.full(size, version),
        "version_end": np.full(size, version),
        "birth_time": 1.0,
    }
    sample = SequenceSample.from_groups([ticket_id], [group])
    meta = TrajectoryMeta(
        ticket_id=ticket_id,
        locator=Locator(0, position),
        attempt=1,
        head=head,
        keys=list(sample.keys),
        seqlens=lengths,
        response_lengths=[n - 4 for n in lengths],
        rewards=sample.data["rewards"].tolist(),
        version_start=[version] * size,
        version_end=[version] * size,
        birth_time=1.0,
    )
    return meta, sample


@dataclass
class Outside:
    """The model workers' peers: a rollout worker's pusher, and a master that judges by `verdicts` (default: stored)."""

    pusher: NameResolvingZmqPusher
    client: NameResolvingRequestClient
    num_workers: int
    verdicts: dict[str, StoreVerdict]
    accepted: list[TrajectoryMeta]

    async def push(self, meta: TrajectoryMeta, sample: SequenceSample) -> StoreVerdict:
        return await self.pusher.push(meta, sample, head=meta.head, timeout_s=LIMIT_S)

    def call_nowait(self, body: CallBody) -> asyncio.Future[list[CallResult]]:
        workers = range(self.num_workers)
        replies = asyncio.gather(*self.client.call_nowait(workers, [body] * self.num_workers))
        return asyncio.ensure_future(asyncio.wait_for(replies, LIMIT_S))

    async def call(self, body: CallBody) -> list[CallResult]:
        return await self.call_nowait(body)


@contextlib.asynccontextmanager
async def outside(resolver: NameResolver, num_workers: int) -> AsyncIterator[Outside]:
    names, tag = Names("test", "t0"), uuid.uuid4().hex
    pusher = NameResolvingZmqPusher(
        resolver,
        names,
        pusher_index=0,
        num_pushers=1,
        num_pullers=max(1, num_workers),
        runtime=RUNTIME,
        incarnation=f"pusher-{tag}",
    )
    metas = MetaPuller(resolver, names, runtime=RUNTIME)
    client = NameResolvingRequestClient(
        resolver,
        names,
        num_workers=num_workers,
        handler_routing={},
        runtime=RUNTIME,
        incarnation=f"master-{tag}",
    )
    world = Outside(pusher, client, num_workers, {}, [])

    async def judge() -> None:
        while True:
            meta, ack = await metas.pull_meta()
            verdict = world.verdicts.get(meta.ticket_id, STORED)
            if verdict.verdict == "stored":
                world.accepted.append(meta)
            ack(verdict)

    await pusher.start()
    await metas.start()
    judging = asyncio.create_task(judge())
    try:
        await client.start()
        yield world
    finally:
        judging.cancel()
        for part in (client, metas, pusher):
            await part.close()


class SeenWorker(ModelWorker):
    """Exposes the executor of its calls once it has started."""

    calls: Calls

    async def serve(self, calls: Calls, server: NameResolvingReplyServer) -> None:
        self.calls = calls
        await super().serve(calls, server)


@contextlib.asynccontextmanager
async def worker_here(config: ModelWorkerConfig) -> AsyncIterator[tuple[SeenWorker, Outside]]:
    """One model worker on this event loop, with name resolve in memory."""
    worker = SeenWorker(config, memory_system())
    main = asyncio.create_task(worker.main())
    with open_names(config.worker.name_resolve) as resolver:
        async with outside(resolver, 1) as world:
            yield worker, world
        worker.stopping.set()
        await asyncio.wait_for(asyncio.gather(main, return_exceptions=True), LIMIT_S)


@pytest.fixture
def memory():
    return NameResolveConfig(endpoints=[f"memory://{uuid.uuid4().hex}"])


# ---------------------------------------------------------------------------------------------------- one, in this process


async def test_what_the_master_does_not_accept_leaves_the_store(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        world.verdicts["late"] = StoreVerdict(verdict="refused", reason="stale")
        world.verdicts["again"] = StoreVerdict(verdict="duplicate")
        verdicts = [await world.push(*trajectory(ticket)) for ticket in ("good", "late", "again", "good")]
        assert [v.verdict for v in verdicts] == ["stored", "refused", "duplicate", "duplicate"]
        assert verdicts[1].reason == "stale"
        assert ("good" in worker.calls.store, len(worker.calls.store)) == (True, 1)
        assert [meta.ticket_id for meta in world.accepted] == ["good"]


async def test_trajectories_that_contradict_themselves_never_reach_the_master(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        (reply,) = await world.call(Ping())
        assert reply.model_flops["actor"] == flops_of(AutoModelForCausalLM.from_pretrained(model_path))
        meta, sample = trajectory("t")
        for wrong, reason in (
            ({"attempt": 2}, "wrong_attempt"),
            ({"head": 0, "seqlens": [9]}, "bad_meta: lengths"),
            ({"rewards": [0.0] * 3}, "bad_meta: rewards"),
        ):
            changed = TrajectoryMeta(**{name: getattr(meta, name) for name in meta.__struct_fields__} | wrong)
            verdict = await world.push(changed, sample)
            assert (verdict.verdict, verdict.reason[: len(reason)]) == ("refused", reason)
        assert len(worker.calls.store) == len(world.accepted) == 0


def changed_sample(sample: SequenceSample, key: str, value: float) -> SequenceSample:
    data = sample.data[key].copy()
    data[-1] = value
    return SequenceSample(sample.ids, sample.seqlens, {**sample.data, key: data})


def test_trajectory_error():
    meta, sample = trajectory("t")
    longest = max(meta.seqlens)
    fits = ModelLimits(vocab_size=64, max_length=longest)
    for limits, changed, problem in (
        (ModelLimits(vocab_size=5, max_length=longest), sample, "bad_tokens"),
        (ModelLimits(vocab_size=64, max_length=longest - 1), sample, f"bad_lengths: {meta.seqlens}; the model has"),
        (fits, changed_sample(sample, "packed_logprobs", np.nan), "not_fi"),
        (fits, changed_sample(sample, "loss_mask", False), "bad_meta: resp"),
        (fits, sample.select_keys(["packed_input_ids"]), "missing_keys"),
    ):
        assert trajectory_error(meta, changed, limits=limits).startswith(problem)
    assert trajectory_error(meta, sample, limits=fits) == ""


async def test_a_full_store_takes_more_when_the_master_clears_it(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path, capacity=1)) as (worker, world):
        await world.push(*trajectory("first"))
        second = asyncio.create_task(world.push(*trajectory("second")))
        deadline = time.monotonic() + LIMIT_S
        while "room in the store" not in {wait.what for wait in worker.board.snapshot().waits}:
            assert time.monotonic() < deadline, "it does not wait"
            await asyncio.sleep(0.01)
        await world.call(ClearData(ids=["first"]))
        assert await second == STORED
        assert ("second" in worker.calls.store, len(worker.calls.store)) == (True, 1)


async def test_a_store_that_stays_full_refuses_by_reason(memory, tmp_path, model_path):
    info = worker_config(memory, tmp_path, model_path).worker
    services, names = make_services(info), Names(info.experiment, info.trial)
    with open_names(memory) as resolver:
        lease = resolver.grant_lease(LIMIT_S).id
        opening = TrajectoryReceiver.open(
            info,
            Directory(resolver, names, lease=lease, board=services.board, limit_s=LIMIT_S),
            System(),
            "head",
            DataStore(1),
            head=0,
            check=lambda meta, sample: "",
            verdict_limit_s=LIMIT_S,
            services=services,
            room_limit_s=0.05,
        )
        async with opening as receiver, outside(resolver, 0) as world:
            receiving = services.tasks.spawn(receiver.run(), "take in")
            await world.push(*trajectory("first"))
            assert await world.push(*trajectory("second")) == StoreVerdict(verdict="refused", reason="store_full")
            receiving.cancel()


async def test_training_goes_on_while_weights_are_written(memory, tmp_path, model_path, monkeypatch):
    may_write = threading.Event()
    write_part = export.write_part

    def slow_write_part(*args, **kwargs):
        assert may_write.wait(LIMIT_S)
        return write_part(*args, **kwargs)

    monkeypatch.setattr(export, "write_part", slow_write_part)
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        await world.push(*trajectory("t"))
        before = load_file(model_path / "model.safetensors")
        path, version = tmp_path / "v", "a0001-v00000000"
        written = world.call_nowait(WriteWeights(role="actor", weight_version=version, folder="v"))
        for mfc in build_dataflow(TRAIN).order:
            await world.call(ExecuteMFC(mfc=mfc, version=0, ids=["t"], parts=[["t"]]))
        assert not written.done()
        may_write.set()
        (reply,) = await written
        assert not path.exists()
        await world.call(CommitWeights(role="actor", weight_version=version, folder="v", files=reply.files))
        verify_version(path, WeightVersion(1, 0))
        (file,) = tensor_files(path)
        snapshot = load_file(file)
        assert snapshot.keys() == before.keys()
        assert all(torch.equal(snapshot[name], before[name]) for name in before)
        now = take_share(worker.calls.engines["actor"])
        assert not torch.equal(now["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
        frozen = take_share(worker.calls.engines["ref"])
        assert all(torch.equal(frozen[name], before[name]) for name in before)


async def test_a_model_for_the_user_is_complete_or_absent(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        path = tmp_path / "final"
        for _ in range(2):  # removes the earlier state
            (reply,) = await world.call(SaveModel(role="actor", folder="final"))
            await world.call(CommitWeights(role="actor", weight_version="", folder="final", files=reply.files))
        loaded = AutoModelForCausalLM.from_pretrained(path)
        now = take_share(worker.calls.engines["actor"])
        assert torch.equal(loaded.get_input_embeddings().weight, now["model.embed_tokens.weight"])
        assert (path / "tokenizer.json").exists()


async def test_training_goes_on_from_a_checkpoint(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):

        async def train(version):
            for mfc in build_dataflow(TRAIN).order:
                await world.call(ExecuteMFC(mfc=mfc, version=version, ids=["t"], parts=[["t"]]))
            return take_share(worker.calls.engines["actor"])

        await world.push(*trajectory("t"))
        await train(0)
        folder = "recover/checkpoint"
        (reply,) = await world.call(SaveCheckpoint(folder=folder))
        await world.call(CommitCheckpoint(folder=folder, files=reply.files))
        first = await train(1)
        assert any(not torch.equal(first[name], tensor) for name, tensor in (await train(2)).items())
        await world.call(LoadCheckpoint(folder=folder))
        again = await train(1)
        assert all(torch.equal(first[name], again[name]) for name in first)


async def test_the_compute_thread_chooses_the_device_among_the_gpus_of_the_launcher(
    memory, tmp_path, model_path, monkeypatch
):
    """CUDA has a current device per thread, and what computes runs on this one."""
    asked = []

    def choose(index, *, gpus, tf32):
        asked.append((threading.current_thread().name, index, list(gpus)))
        return torch.device("cpu")

    monkeypatch.setattr(model_worker, "choose_device", choose)
    config = worker_config(memory, tmp_path, model_path)
    config = replace(config, worker=replace(config.worker, gpus=["5"]))
    async with worker_here(config) as (worker, world):
        await world.call(Ping())
        threads = await worker.calls._compute(threading.current_thread, "the thread")
    assert asked == [(threads.name, 0, ["5"])]


async def test_the_error_of_a_load_that_takes_too_long_names_its_phases(memory, tmp_path, model_path, monkeypatch):
    def load(*_, entered, **__):
        entered("self-check")
        time.sleep(3.0)

    monkeypatch.setattr(model_worker, "load_checked", load)
    config = worker_config(memory, tmp_path, model_path)
    runtime = replace(RUNTIME, start_timeout_s=1.0)
    worker = ModelWorker(replace(config, worker=replace(config.worker, runtime=runtime)), memory_system())
    with pytest.raises(
        WaitTimeoutError,
        match=r"waited 1 s for loading actor \(so far: imports and weights 0 s, self-check 1 s; limit: runtime.start_timeout_s\)",
    ):
        await asyncio.wait_for(worker.main(), LIMIT_S)


async def test_a_call_that_fails_is_answered_and_ends_the_worker(memory, tmp_path, model_path):
    worker = ModelWorker(worker_config(memory, tmp_path, model_path), memory_system())
    main = asyncio.create_task(worker.main())
    with open_names(memory) as resolver:
        async with outside(resolver, 1) as world:
            with pytest.raises(RemoteCallError, match=r"such as \['nowhere'\]; master and workers disagree"):
                await world.call(ExecuteMFC(mfc="actor_inf", version=0, ids=["nowhere"], parts=[["nowhere"]]))
            with pytest.raises(ValueError, match="disagree"):
                await asyncio.wait_for(main, LIMIT_S)


async def test_too_little_memory_on_a_gpu_is_named_with_advice(memory, tmp_path, model_path):
    def fail(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is"
        )

    worker = SeenWorker(worker_config(memory, tmp_path, model_path), memory_system())
    main = asyncio.create_task(worker.main())
    with open_names(memory) as resolver:
        async with outside(resolver, 1) as world:
            await world.push(*trajectory("t"))
            for mfc in build_dataflow(TRAIN).order[:-1]:
                await world.call(ExecuteMFC(mfc=mfc, version=0, ids=["t"], parts=[["t"]]))
            worker.calls.engines["actor"].model.model.layers[0].register_forward_pre_hook(fail)
            with pytest.raises(RemoteCallError, match="OutOfDeviceMemory"):
                await world.call(ExecuteMFC(mfc="actor_train", version=0, ids=["t"], parts=[["t"]]))
            with pytest.raises(OutOfDeviceMemory) as raised:
                await asyncio.wait_for(main, LIMIT_S)
    tokens = trajectory("t")[1].data["packed_input_ids"].size - 2 * 4  # two sequences share the prompt of the first
    assert str(raised.value) == (
        f"out of GPU memory in actor_train, micro-batch 1 of 1 ({tokens} tokens in 3 sequences): CUDA out of memory. Tried to "
        "allocate 2.00 GiB.\nUse train.max_tokens_per_mb=50 or train.gradient_checkpointing=true, or more ranks in the "
        "allocation. `asyncrl-launch plan` of this config counts its memory and names changes that fit"
    )
    assert worker.board.snapshot().recurs_as == "out of GPU memory in actor_train"


@pytest.mark.parametrize("folder", ["../precious", "link"])
async def test_a_call_that_names_a_folder_outside_the_run_changes_nothing(memory, tmp_path, model_path, folder):
    """Neither the folder nor its neighbours change, whatever the call is."""
    run_dir, precious = tmp_path / "run", tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (precious / "thesis.txt").write_text("years of work")
    run_dir.mkdir()
    (run_dir / "link").symlink_to(precious)
    for body in (
        SaveModel(role="actor", folder=folder),
        CommitWeights(role="actor", weight_version="", folder=folder, files=[]),
        SaveCheckpoint(folder=folder),
        CommitCheckpoint(folder=folder, files=[]),
        LoadCheckpoint(folder=folder),
        SaveBatch(folder=folder, version=0, metas=[]),
    ):
        main = asyncio.create_task(ModelWorker(worker_config(memory, run_dir, model_path), memory_system()).main())
        with open_names(memory) as resolver:
            async with outside(resolver, 1) as world:
                with pytest.raises(RemoteCallError, match="OutsideRunError"):
                    await world.call(body)
                with pytest.raises(OutsideRunError):
                    await asyncio.wait_for(main, LIMIT_S)
    assert [path.name for path in tmp_path.iterdir() if path != run_dir] == ["precious"]
    assert [path.read_text() for path in precious.iterdir()] == ["years of work"]


# ---------------------------------------------------------------------------------------------------------- real processes


def in_one_process(model_path, train: TrainConfig, batches: list[list[str]]) -> dict[str, dict[str, torch.Tensor]]:
    """Train on the same batches with the same dataflow on whole models, without ranks, streams or stores. Return the weights by
    trained role."""
    graph = build_dataflow(train)
    engines = {model.name: TrainEngine(model, train) for model in on_one_worker(model_path, train)}
    interfaces = {name: make_interface(mfc, train, seed=1) for name, mfc in graph.mfcs.items()}
    for version, ids in enumerate(batches):
        sample = SequenceSample.gather([trajectory(ticket)[1] for ticket in ids])
        for name in graph.order:
            if name == "actor_train" and version < train.num_critic_only_steps:
                continue
            part = sample.select_keys(graph.mfcs[name].input_keys)
            made, _ = interfaces[name].run(
                engines[graph.mfcs[name].role], part, batch_ids=ids, step=interfaces[name].begin(version)
            )
            sample = sample.update(made) if made is not None else sample
    return {role: take_share(engines[role]) for role in graph.trained_roles}


async def write_and_commit(side: TrainingSide, model: ModelConfig, body: WriteWeights | SaveModel) -> None:
    replies = await side.caller.call("write", model.workers, body)
    files = [file for reply in replies for file in reply.files]
    version = body.weight_version if isinstance(body, WriteWeights) else ""
    rewrite = isinstance(body, WriteWeights) and body.rewrite
    commit = CommitWeights(role=body.role, weight_version=version, folder=body.folder, files=files, rewrite=rewrite)
    await side.caller.call("commit", model.workers[:1], commit)


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in tensor_files(path) for name, tensor in load_file(file).items()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=name)


async def push_all(side: TrainingSide, heads: dict[str, int]) -> None:
    trajectories = [trajectory(ticket, head, position=i) for i, (ticket, head) in enumerate(heads.items())]
    assert await asyncio.gather(*(side.push(*pair) for pair in trajectories)) == [STORED] * len(heads)


def wait_until_stores_are_empty(side: TrainingSide) -> None:
    """Wait until no worker's status shows a group in its store. Statuses are published twice a second."""
    keys = [side.names.status(f"model_worker/{index}") for index in range(side.num_workers)]
    deadline = time.monotonic() + LIMIT_S
    while held := [msgspec.json.decode(side.resolver.get(key), type=WorkerStatus).queues.get("store") for key in keys]:
        if held == [0] * len(keys):
            return
        assert time.monotonic() < deadline, f"groups at workers: {held}"
        time.sleep(0.1)


def statuses_of(side: TrainingSide) -> list[WorkerStatus]:
    found = side.resolver.get_subtree(side.names.statuses())
    return [msgspec.json.decode(value, type=WorkerStatus) for value in found.values()]


async def assert_a_stopped_rank_is_named(side: TrainingSide, stepping: asyncio.Task[StepResult]) -> None:
    """Stop worker 1 before it enters a collective of the step. The standstill report names it. Then the step goes on."""
    pid = next(status.pid for status in statuses_of(side) if status.worker == "model_worker/1")
    os.kill(pid, signal.SIGSTOP)  # the step's calls are not sent before this coroutine waits
    try:
        deadline = time.monotonic() + LIMIT_S
        while not late_ranks(statuses := statuses_of(side)):
            assert time.monotonic() < deadline, statuses
            await asyncio.sleep(0.1)
        told = Watchdog(1.0, now=0.0).turn(2.0, statuses, {}, {"model_worker/1"})
        assert told is not None
        (named,) = [line for line in told.splitlines() if "has not entered" in line]
        assert re.match(
            r"  model_worker/1: .*is stopped .*, has not entered collective \d+ of (actor|ref) data group 0, in which "
            r"model_worker/0 waits, ",
            named,
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    result = await stepping
    assert result.stats["actor/optimizer_steps"] == 2


def assert_profiles(folder: Path, began_us: float, ended_us: float, sizes: Sequence[int]) -> None:
    """Both workers have recorded the operations of the step, on the monotonic clock."""
    files = [folder / f"model_worker_{index}.jsonl" for index in (0, 1)]
    assert [path.stat().st_size for path in files] == sizes
    for index, path in enumerate(files):
        header, *events = map(json.loads, path.read_text().splitlines())
        assert header["process"] == f"model_worker/{index}"
        assert {event["pid"] for event in events} == {header["pid"]}
        backward = [event for event in events if "Backward" in event["name"] and event["ph"] == "X"]
        assert len(backward) > 10
        assert all(began_us <= event["ts"] <= event["ts"] + event["dur"] <= ended_us for event in backward)


async def test_two_processes_train_as_one(tmp_path, model_path):
    """Batches that are uneven between heads, and one that leaves a head empty, give the update of one process."""
    heads = {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1, "f": 0, "g": 0, "h": 0}
    batches = [["a", "b", "c", "d", "e"], ["f", "g", "h"]]
    models = [one_model(role, model_path, "d2p1m1", [0, 1]) for role in build_dataflow(TRAIN).roles]
    train = replace(TRAIN, peak_flops=1e9)
    async with training_side(models, placed_mfcs(), train, tmp_path / "run") as side:
        await push_all(side, heads)
        await assert_a_stopped_rank_is_named(side, asyncio.create_task(side.step(batches[0], 0)))
        await side.caller.call("profiles", [0, 1], BeginProfile())
        began_us = time.monotonic_ns() / 1000
        result = await side.step(batches[1], 1)
        ended_us = time.monotonic_ns() / 1000
        assert result.stats["actor/optimizer_steps"] == 2
        assert min(result.stats[f"memory/model_worker_{index}_bytes"] for index in (0, 1)) > 1e7
        replies = await side.caller.call("profiles", [0, 1], EndProfile(folder="profile/p"))
        assert_profiles(tmp_path / "run" / "profile" / "p", began_us, ended_us, [reply.num_bytes for reply in replies])
        (discarded,) = await side.caller.call("profiles", [0], EndProfile(folder="profile/q"))  # nothing is recorded
        assert discarded.num_bytes == 0
        assert [path.name for path in (tmp_path / "run" / "profile").iterdir()] == ["p"]
        path = tmp_path / "run" / "weights" / "a0001-v00000002"
        write = WriteWeights(role="actor", weight_version=path.name, folder=f"weights/{path.name}")
        await write_and_commit(side, models[0], write)
        await write_and_commit(side, models[0], SaveModel(role="actor", folder="final"))
        verify_version(path, WeightVersion(1, 2))
        assert_close(weights_in(path), in_one_process(model_path, TRAIN, batches)["actor"])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
        assert torch.equal(loaded.get_input_embeddings().weight, weights_in(path)["model.embed_tokens.weight"])
        # Model FLOPs of the second batch: each replica's sequences once, prompts once for each group, with all parameters
        lengths = [length for ticket in batches[1] for length in trajectory(ticket)[0].seqlens]
        counted = flops_of(loaded)
        copies = [4] * (len(lengths) - len(batches[1]))  # the prompts of all sequences but one of each group
        flops = counted.of_batch(lengths, trains=True) - counted.of_batch(copies, trains=True)
        assert result.peak_s == {"actor_train": pytest.approx(flops / (2 * train.peak_flops))}

        manifest = (path / MANIFEST).read_bytes()
        tensor_files(path)[0].write_bytes(b"torn")  # damaged on disk: the same version is written again from memory
        rewrite = WriteWeights(role="actor", weight_version=path.name, folder=write.folder, rewrite=True)
        await write_and_commit(side, models[0], rewrite)
        verify_version(path, WeightVersion(1, 2))
        assert (path / MANIFEST).read_bytes() == manifest
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

        body = ExecuteMFC(mfc="actor_inf", version=2, ids=["a", "gone"], parts=[["a"], ["gone"]])
        with pytest.raises(RemoteCallError, match="master and workers disagree"):  # the data was cleared
            await side.caller.call("MFC", [0, 1], body)


async def test_models_on_workers_of_their_own_train_as_one_process(tmp_path, model_path):
    """The actor on two data ranks (workers 0 and 1), the critic on two tensor ranks (workers 1 and 2), a reference on worker 2, and
    a copy of the actor in two pipeline stages (workers 1 and 2).

    The first step trains only the critic. Proximal logprobs come from the copy in stages, which gets the weights of each step.
    """
    train = replace(
        TRAIN,
        critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), minibatches=2),
        ppo=replace(TRAIN.ppo, advantage_norm="batch", gae_lambda=0.9),
        num_critic_only_steps=1,
    )
    models = [
        one_model("actor", model_path, "d2p1m1", [0, 1], train),
        one_model("critic", model_path, "d1p1m2", [1, 2], train),
        one_model("ref", model_path, "d1p1m1", [2], train),
        one_model("actor@1", model_path, "d1p2m1", [1, 2], train),
    ]
    heads = {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1, "f": 0, "g": 1, "h": 1}
    batches = [["a", "b", "c"], ["d", "e"], ["f", "g", "h"]]
    async with training_side(models, placed_mfcs(train, actor_inf="actor@1"), train, tmp_path / "run") as side:
        await push_all(side, heads)
        for version, ids in enumerate(batches):
            result = await side.step(ids, version)
            assert result.stats["redistribution/bytes"] > 0
            assert ("actor_train" in result.seconds) == (version > 0)
        expected = in_one_process(model_path, train, batches)
        for model in models[:2]:
            path = tmp_path / "run" / model.name
            version = WriteWeights(role=model.name, weight_version="a0001-v00000003", folder=model.name)
            await write_and_commit(side, model, version)
            assert_close(weights_in(path), expected[model.name])
        await asyncio.to_thread(wait_until_stores_are_empty, side)
        assert (len(side.tracker), len(side.buffer)) == (0, 0)
