"""Model workers with a fake master and a fake rollout worker: one in this process, and two real processes over gloo and etcd."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.config import (
    ModelWorkerConfig,
    NameResolveConfig,
    OptimizerConfig,
    PPOConfig,
    RuntimeConfig,
    TrainConfig,
    WeightsConfig,
    WorkerInfo,
)
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow import build_dataflow
from asyncrl.messages import (
    CallBody,
    CallResult,
    ClearData,
    ExecuteMFC,
    Locator,
    Ping,
    SaveModel,
    StoreVerdict,
    TrajectoryMeta,
    WeightVersion,
    WriteWeights,
)
from asyncrl.model import intake
from asyncrl.model import worker as model_worker
from asyncrl.model.engine import TrainEngine
from asyncrl.model.intake import trajectory_error
from asyncrl.model.interfaces import make_interface
from asyncrl.model.worker import ModelWorker, interface_of
from asyncrl.names import Names
from asyncrl.runtime.etcd_server import EtcdServer
from asyncrl.runtime.name_resolve import NameResolver, open_name_resolver
from asyncrl.runtime.push_pull import MetaPuller, NameResolvingZmqPusher
from asyncrl.runtime.request_reply import NameResolvingRequestClient, RemoteCallError
from asyncrl.runtime.worker import run_worker
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights import tensor_files, verify_version

RUNTIME = RuntimeConfig(start_timeout_s=60.0, stop_timeout_s=5.0, log_level="WARNING")
TRAIN = TrainConfig(
    batch_size=8,
    max_tokens_per_mb=100,
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
    ppo=PPOConfig(minibatches=2, temperature=1.0, kl_coef=0.05),
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


def worker_config(name_resolve, run_dir, model_path, *, rank=0, size=1, capacity=8, train=TRAIN) -> ModelWorkerConfig:
    info = WorkerInfo("model_worker", rank, size, "test", "t0", 1, str(run_dir), 1, name_resolve, RUNTIME)
    weights = WeightsConfig(fsync=False)
    return ModelWorkerConfig(info, rank, size, str(model_path), str(model_path), train, weights, capacity)


def trajectory(ticket_id: str, head: int = 0, size: int = 3) -> tuple[TrajectoryMeta, SequenceSample]:
    """A group of random tokens: 4 of prompt, then a response; its rewards differ. The same ticket gives the same group."""
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
        locator=Locator(0, 0),
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
    """What model workers meet: a rollout worker's pusher, and a master that judges by `verdicts` (else: stored)."""

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
        num_pullers=num_workers,
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


@contextlib.asynccontextmanager
async def worker_here(config: ModelWorkerConfig) -> AsyncIterator[tuple[ModelWorker, Outside]]:
    """One model worker on this event loop, over name resolve in memory."""
    worker = ModelWorker(config)
    life = asyncio.create_task(worker.main())
    with open_name_resolver(config.worker.name_resolve) as resolver:
        async with outside(resolver, 1) as world:
            yield worker, world
        worker.stopping.set()
        await asyncio.wait_for(asyncio.gather(life, return_exceptions=True), LIMIT_S)


@pytest.fixture
def memory():
    return NameResolveConfig(backend="memory", endpoints=[uuid.uuid4().hex])


# ---------------------------------------------------------------------------------------------------- one, in this process


async def test_what_the_master_does_not_accept_leaves_the_store(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        world.verdicts["late"] = StoreVerdict(verdict="refused", reason="stale")
        world.verdicts["again"] = StoreVerdict(verdict="duplicate")
        verdicts = [await world.push(*trajectory(ticket)) for ticket in ("good", "late", "again", "good")]
        assert [v.verdict for v in verdicts] == ["stored", "refused", "duplicate", "duplicate"]
        assert verdicts[1].reason == "stale"
        assert worker.store.ids() == ["good"]
        assert [meta.ticket_id for meta in world.accepted] == ["good"]


async def test_trajectories_that_contradict_themselves_never_reach_the_master(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        await world.call(Ping())
        meta, sample = trajectory("t")
        for wrong, reason in (
            ({"attempt": 2}, "wrong_attempt"),
            ({"head": 0, "seqlens": [9]}, "bad_meta: lengths"),
            ({"rewards": [0.0] * 3}, "bad_meta: rewards"),
        ):
            changed = TrajectoryMeta(**{name: getattr(meta, name) for name in meta.__struct_fields__} | wrong)
            verdict = await world.push(changed, sample)
            assert (verdict.verdict, verdict.reason[: len(reason)]) == ("refused", reason)
        assert len(worker.store) == len(world.accepted) == 0


def changed_sample(sample: SequenceSample, key: str, value: float) -> SequenceSample:
    data = sample.data[key].copy()
    data[-1] = value
    return SequenceSample(sample.ids, sample.seqlens, {**sample.data, key: data})


def test_trajectory_error():
    meta, sample = trajectory("t")
    assert trajectory_error(meta, sample, vocab_size=64) == ""
    assert trajectory_error(meta, sample, vocab_size=5).startswith("bad_tokens")
    assert trajectory_error(meta, changed_sample(sample, "packed_logprobs", np.nan), vocab_size=64).startswith("not_fi")
    assert trajectory_error(meta, changed_sample(sample, "loss_mask", False), vocab_size=64).startswith(
        "bad_meta: resp"
    )
    assert trajectory_error(meta, sample.select_keys(["packed_input_ids"]), vocab_size=64).startswith("missing_keys")


async def test_a_full_store_takes_more_when_the_master_clears_it(memory, tmp_path, model_path):
    async with worker_here(worker_config(memory, tmp_path, model_path, capacity=1)) as (worker, world):
        await world.push(*trajectory("first"))
        second = asyncio.create_task(world.push(*trajectory("second")))
        await world.call(Ping())
        await world.call(ClearData(ids=["first"]))
        assert await second == STORED
        assert worker.store.ids() == ["second"]


async def test_a_store_that_stays_full_refuses_by_reason(memory, tmp_path, model_path, monkeypatch):
    monkeypatch.setattr(intake, "_ROOM_LIMIT_S", 0.05)
    async with worker_here(worker_config(memory, tmp_path, model_path, capacity=1)) as (_, world):
        await world.push(*trajectory("first"))
        assert await world.push(*trajectory("second")) == StoreVerdict(verdict="refused", reason="store_full")


async def test_training_goes_on_while_weights_are_written(memory, tmp_path, model_path, monkeypatch):
    may_write = threading.Event()
    write_version = model_worker.write_version

    def slow_write_version(*args, **kwargs):
        assert may_write.wait(LIMIT_S)
        return write_version(*args, **kwargs)

    monkeypatch.setattr(model_worker, "write_version", slow_write_version)
    async with worker_here(worker_config(memory, tmp_path, model_path)) as (worker, world):
        await world.push(*trajectory("t"))
        before = load_file(model_path / "model.safetensors")
        written = world.call_nowait(
            WriteWeights(role="actor", weight_version="a0001-v00000000", path=str(tmp_path / "v"))
        )
        for mfc in build_dataflow(TRAIN).order:
            await world.call(ExecuteMFC(mfc=mfc, version=0, ids=["t"]))
        assert not written.done()
        may_write.set()
        await written
        verify_version(tmp_path / "v", WeightVersion(1, 0))
        (file,) = tensor_files(tmp_path / "v")
        snapshot = load_file(file)
        assert snapshot.keys() == before.keys()
        assert all(torch.equal(snapshot[name], before[name]) for name in before)
        now = dict(worker.engines["actor"].named_tensors())
        assert not torch.equal(now["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
        frozen = dict(worker.engines["ref"].named_tensors())
        assert all(torch.equal(frozen[name], before[name]) for name in before)


async def test_a_call_that_fails_is_answered_and_ends_the_worker(memory, tmp_path, model_path):
    worker = ModelWorker(worker_config(memory, tmp_path, model_path))
    life = asyncio.create_task(worker.main())
    with open_name_resolver(memory) as resolver:
        async with outside(resolver, 1) as world:
            with pytest.raises(RemoteCallError, match="hold 0 of the batch's 1 groups"):
                await world.call(ExecuteMFC(mfc="actor_inf", version=0, ids=["nowhere"]))
            with pytest.raises(RuntimeError, match="disagree"):
                await asyncio.wait_for(life, LIMIT_S)


def test_an_unknown_role_is_refused_before_anything_starts(memory, tmp_path, model_path):
    from asyncrl.config import MFCConfig

    extra = {"judge": MFCConfig(role="critic", interface="json:loads", input_keys=["rewards"], output_keys=["j"])}
    with pytest.raises(ValueError, match="critic"):
        ModelWorker(worker_config(memory, tmp_path, model_path, train=replace(TRAIN, extra_mfcs=extra)))


def test_the_interface_of_loopback():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""


# ------------------------------------------------------------------------------------------------------ two real processes


@pytest.fixture
def etcd(tmp_path):
    server = EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log")
    server.start()
    yield NameResolveConfig(endpoints=[server.endpoint])
    server.stop()


def be_worker(config: ModelWorkerConfig) -> None:
    """Entry of a child process."""
    raise SystemExit(run_worker(ModelWorker(config)))


@contextlib.contextmanager
def two_workers(name_resolve, tmp_path, model_path):
    context = multiprocessing.get_context("spawn")
    configs = [worker_config(name_resolve, tmp_path, model_path, rank=rank, size=2) for rank in range(2)]
    processes = [context.Process(target=be_worker, args=(config,), daemon=True) for config in configs]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(15)
            if process.exitcode is None:
                process.kill()


def in_one_process(model_path, batches: list[list[str]]) -> dict[str, torch.Tensor]:
    """The same batches through the same dataflow on one engine without ranks, streams or stores."""
    graph = build_dataflow(TRAIN)
    engines = {role: TrainEngine(model_path, TRAIN, trainable=role == "actor") for role in graph.roles}
    interfaces = {name: make_interface(mfc, TRAIN, seed=1) for name, mfc in graph.mfcs.items()}
    for version, ids in enumerate(batches):
        sample = SequenceSample.gather([trajectory(ticket)[1] for ticket in ids])
        for name in graph.order:
            part = sample.select_keys(graph.mfcs[name].input_keys)
            made, _ = interfaces[name].run(engines[graph.mfcs[name].role], part, batch_ids=ids, version=version)
            sample = sample.update(made) if made is not None else sample
    return dict(engines["actor"].named_tensors())


async def test_two_processes_train_as_one(etcd, tmp_path, model_path):
    """Batches that fall unevenly on the heads, and one that leaves a head empty, give the update of one process."""
    heads = {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1, "f": 0, "g": 0, "h": 0}
    batches = [["a", "b", "c", "d", "e"], ["f", "g", "h"]]
    with two_workers(etcd, tmp_path, model_path) as processes, open_name_resolver(etcd) as resolver:
        async with outside(resolver, 2) as world:
            pushes = (world.push(*trajectory(ticket, head)) for ticket, head in heads.items())
            assert await asyncio.gather(*pushes) == [STORED] * len(heads)
            for version, ids in enumerate(batches):
                for mfc in build_dataflow(TRAIN).order:
                    results = await world.call(ExecuteMFC(mfc=mfc, version=version, ids=ids))
                    assert [r.ids for r in results] == [[i for i in ids if heads[i] == head] for head in (0, 1)]
                assert results[0].stats == results[1].stats
                assert results[0].stats["actor/optimizer_steps"] == 2
                await world.call(ClearData(ids=ids))
            path = tmp_path / "weights" / "a0001-v00000002"
            await world.call(WriteWeights(role="actor", weight_version=path.name, path=str(path)))
            await world.call(SaveModel(role="actor", path=str(tmp_path / "final")))
            (file,) = tensor_files(path)
            found, expected = load_file(file), in_one_process(model_path, batches)
            assert found.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=name)
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
            assert torch.equal(loaded.get_input_embeddings().weight, found["model.embed_tokens.weight"])
            assert (tmp_path / "final" / "tokenizer.json").exists()

            with pytest.raises(RemoteCallError, match="the batch's 2 groups"):  # cleared: both workers notice, and end
                await world.call(ExecuteMFC(mfc="actor_inf", version=2, ids=["a", "gone"]))
            for process in processes:
                await asyncio.to_thread(process.join, 20)
            assert [process.exitcode for process in processes] == [1, 1]
