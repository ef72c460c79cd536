"""The generation engine reports the logprobs that the trainer computes: over real connections, and across a train
step. The step's weights reach the server in the middle of its responses.

    TrainEngine -> weights on disk -> GenerationServer -- HTTP --> PartialRolloutManager -- ZeroMQ --> TrainEngine.logprobs
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.processes import GenerationServerConfig, ModelConfig, WorkerInfo
from asyncrl.config.schema import (
    GenerationConfig,
    NameResolveConfig,
    OptimizerConfig,
    RuntimeConfig,
    SamplingConfig,
    TrainConfig,
)
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation.worker import GenerationServer
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.protocol.manager import ScheduleReply, Ticket
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import UpdateWeightsRequest
from asyncrl.rewards.trajectory import Episode, build_sample, summary_of
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.streams.push_pull import NameResolvingZmqPuller, NameResolvingZmqPusher
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version
from tests.support.memory_names import memory_system, open_names
from tests.support.services import make_services

LOGGER = logging.getLogger("test_engine_matches_trainer")
NAMES = Names("e", "t")
RUNTIME = RuntimeConfig()
V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
TRAIN = TrainConfig(max_tokens_per_mb=512, logprob_chunk_tokens=64, optimizer=OptimizerConfig(lr=5e-3, warmup_steps=0))
SAMPLING = SamplingConfig(max_new_tokens=200, temperature=1.3)
PROMPT, GROUP = [5, 6, 7, 8], 16


def info(kind: str, run_dir: Path) -> WorkerInfo:
    name_resolve = NameResolveConfig(endpoints=[f"memory://{run_dir}"])
    return WorkerInfo(kind, 0, 1, "e", "t", 1, str(run_dir), 1, name_resolve, RUNTIME)


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def resolver(tmp_path: Path) -> NameResolver:
    return open_names(info("test", tmp_path).name_resolve)


@pytest.fixture
async def server_url(model_path: Path, tmp_path: Path, resolver: NameResolver) -> AsyncIterator[str]:
    server = GenerationServer(
        GenerationServerConfig(
            worker=info("generation_server", tmp_path),
            engine="transformers",
            model_path=str(model_path),
            tokenizer_path=str(model_path),
            generation=GenerationConfig(max_running_requests=GROUP, max_batch_tokens=256, num_blocks=512, page_size=16),
            torch_threads=1,
        ),
        memory_system(),
    )
    main = asyncio.create_task(server.main())
    yield await asyncio.to_thread(resolver.wait, NAMES.generation_server(0), 60.0)
    server.stopping.set()
    await asyncio.wait_for(main, 60)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[PartialRolloutManager]:
    class NoOtherServer:
        async def schedule(self, ticket_id: str, lost_server: str, **_: object) -> ScheduleReply:
            raise AssertionError(f"{lost_server} was not to be lost")

    client = PartialRolloutManager(
        NoOtherServer(),
        make_services(logger=LOGGER),
        new_tokens_per_chunk=8,  # so that the engine waits for a slow client: responses must not end before the update
        request_timeout_s=60.0,
        turn_limit_s=60.0,
        max_requests=2 * GROUP,
    )
    yield client
    await client.close()


async def test_logprobs_of_server_and_trainer_are_equal_across_a_train_step(
    model_path: Path, tmp_path: Path, resolver: NameResolver, server_url: str, client: PartialRolloutManager
) -> None:
    trainer = engine_of(model_path)
    await serve(trainer, V0, server_url, tmp_path, model_path)
    generating = asyncio.ensure_future(client.generate(Route(ticket(server_url)), [PROMPT] * GROUP, SAMPLING, []))
    while client.counts.tokens < GROUP and not generating.done():  # noqa: ASYNC110 - chunks have come in
        await asyncio.sleep(0)
    await post(server_url, "/pause_generation", b'{"mode": "abort"}')
    trained = train_once(trainer)
    await serve(trainer, V1, server_url, tmp_path, model_path)
    await post(server_url, "/continue_generation", b"{}")
    episodes = [Episode(PROMPT) for _ in range(GROUP)]
    for episode, response in zip(episodes, await generating, strict=True):
        episode.add_response(response)
    sample = await through_the_stream(build_sample("t0", episodes), resolver)

    by_version = {
        V0: engine_of(model_path).logprobs(sample, temperature=SAMPLING.temperature),
        V1: trainer.logprobs(sample, temperature=SAMPLING.temperature),
    }
    assert trained["skipped_steps"] == 0
    sampled, versions = sample.data["loss_mask"], sample.data["versions"]
    assert (sample.data["version_start"] < sample.data["version_end"]).any()
    assert set(versions[sampled].tolist()) == {V0.pack(), V1.pack()}
    for version, expected in by_version.items():
        mine = versions == version.pack()
        np.testing.assert_allclose(sample.data["packed_logprobs"][mine], expected[mine], rtol=0, atol=1e-4)
        other = by_version[V1 if version == V0 else V0]
        assert np.abs(other[mine] - expected[mine]).max() > 0.05  # the versions differ by much more than that


async def serve(trainer: TrainEngine, version: WeightVersion, url: str, run_dir: Path, source_dir: Path) -> None:
    """Write the version and make the server load it, as a model worker and the manager do together."""
    path = version_dir(run_dir, "actor", version)
    write_version(path, take_share(trainer).items(), source_dir=source_dir, version=version, fsync=False)
    request = UpdateWeightsRequest(model_path=str(path), weight_version=str(version))
    await post(url, "/update_weights_from_disk", msgspec.json.encode(request))


async def post(url: str, path: str, body: bytes) -> None:
    async with aiohttp.ClientSession() as session, session.post(url + path, data=body) as answer:
        assert answer.status == 200, await answer.text()


def ticket(server_url: str) -> Ticket:
    return Ticket(
        ticket_id="t0",
        kind="train",
        locator=Locator(0, 0),
        attempt=1,
        min_version=0,
        deadline=2,
        server="generation_server/0",
        server_url=server_url,
        head=0,
    )


def engine_of(model_path: Path) -> TrainEngine:
    return TrainEngine(
        ModelConfig("actor", str(model_path), "d1", [0], trainable=True, optimizer=TRAIN.optimizer), TRAIN
    )


def train_once(trainer: TrainEngine) -> dict[str, float]:
    """A real train step on arbitrary data: it makes some random sequences likelier."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 64, 40) for _ in range(8)]
    sample = SequenceSample.from_groups(["a"], [{"packed_input_ids": ids}])

    def loss_fn(
        outputs: Mapping[str, Tensor], data: Mapping[str, Tensor], cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs["logprobs"].sum() / 320, {}

    return trainer.train_step(sample, loss_fn, temperature=1.0, lr_step=0)


async def through_the_stream(sample: SequenceSample, resolver: NameResolver) -> SequenceSample:
    """Send the sample from a rollout worker to a head, encoded, as ZeroMQ frames."""
    meta = TrajectoryMeta(
        ticket_id=sample.ids[0],
        locator=Locator(0, 0),
        attempt=1,
        head=0,
        keys=list(sample.keys),
        **msgspec.structs.asdict(summary_of(sample)),
        birth_time=0.0,
        task_id=0,
    )
    puller = NameResolvingZmqPuller(resolver, NAMES, puller_index=0, runtime=RUNTIME)
    pusher = NameResolvingZmqPusher(
        resolver, NAMES, pusher_index=0, num_pushers=1, num_pullers=1, runtime=RUNTIME, incarnation="one"
    )
    await puller.start()
    await pusher.start()
    try:
        pushing = asyncio.ensure_future(pusher.push(meta, sample, head=0, timeout_s=60.0))
        pulled = await asyncio.wait_for(puller.pull(), 60)
        pulled.ack(StoreVerdict(verdict="stored"))
        assert (await pushing).verdict == "stored"
    finally:
        await pusher.close()
        await puller.close()
    return pulled.sample
