"""The rollout client against a real generation server, with a weight update in the middle of its responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import torch

from asyncrl.config import (
    GenerationConfig,
    GenerationServerConfig,
    NameResolveConfig,
    RuntimeConfig,
    SamplingConfig,
    WorkerInfo,
)
from asyncrl.generation.worker import GenerationServer
from asyncrl.messages import Locator, ScheduleReply, Ticket, UpdateWeightsRequest, WeightVersion
from asyncrl.names import Names
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.rollout.trajectory import Episode, build_sample
from asyncrl.runtime.name_resolve import open_name_resolver
from asyncrl.runtime.worker import StatusBoard
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights import version_dir, write_version

LOGGER = logging.getLogger("test_rollout_generation")
V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)


class NoOtherServer:
    async def schedule(self, ticket_id: str, lost_server: str) -> ScheduleReply:
        raise AssertionError(f"{lost_server} was not to be lost")


@dataclass
class Served:
    """A generation server that serves v0 of a tiny model and finds v1 on disk."""

    url: str
    run_dir: Path
    models: dict[WeightVersion, torch.nn.Module]

    async def post(self, path: str, body: bytes) -> None:
        async with aiohttp.ClientSession() as session, session.post(self.url + path, data=body) as answer:
            assert answer.status == 200, await answer.text()

    async def update(self, version: WeightVersion) -> None:
        request = UpdateWeightsRequest(
            model_path=str(version_dir(self.run_dir, "actor", version)), weight_version=str(version)
        )
        await self.post("/update_weights_from_disk", msgspec.json.encode(request))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    torch.set_num_threads(1)
    make_tiny_model(tmp_path / "model")
    models = {version: make_tiny_model(None, seed=version.version) for version in (V0, V1)}
    for version, model in models.items():
        tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        path = version_dir(tmp_path, "actor", version)
        write_version(path, tensors, source_dir=tmp_path / "model", version=version, fsync=False)
    name_resolve = NameResolveConfig(backend="memory", endpoints=[str(tmp_path)])
    server = GenerationServer(
        GenerationServerConfig(
            worker=WorkerInfo("generation_server", 0, 1, "e", "t", 1, str(tmp_path), 1, name_resolve, RuntimeConfig()),
            engine="transformers",
            model_path=str(tmp_path / "model"),
            tokenizer_path=str(tmp_path / "model"),
            generation=GenerationConfig(max_running_requests=16, max_batch_tokens=256, num_blocks=512, page_size=16),
            torch_threads=1,
        )
    )
    life = asyncio.create_task(server.main())
    resolver = open_name_resolver(name_resolve)
    url = await asyncio.to_thread(resolver.wait, Names("e", "t").generation_server(0), 30.0)
    made = Served(url, tmp_path, models)
    await made.update(V0)
    yield made
    server.stopping.set()
    await asyncio.wait_for(life, 30)
    resolver.close()


async def test_an_update_in_mid_sequence_keeps_tokens_logprobs_and_versions(served: Served) -> None:
    info = WorkerInfo("rollout_worker", 0, 1, "e", "t", 1, "", 1, NameResolveConfig(backend="memory"), RuntimeConfig())
    client = PartialRolloutManager(
        NoOtherServer(),
        board=StatusBoard(info, LOGGER),
        logger=LOGGER,
        new_tokens_per_chunk=64,
        request_timeout_s=60.0,
        max_requests=32,
    )
    await client.start()
    ticket = Ticket(
        ticket_id="t0",
        kind="train",
        locator=Locator(0, 0),
        attempt=1,
        min_version=0,
        deadline=2,
        server="generation_server/0",
        server_url=served.url,
        head=0,
    )
    prompt = [5, 6, 7, 8]
    sampling = SamplingConfig(max_new_tokens=300, temperature=1.3)
    try:
        generating = asyncio.ensure_future(client.generate(Route(ticket), [prompt] * 16, sampling, []))
        while not client.counts.tokens and not generating.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await served.post("/pause_generation", b'{"mode": "abort"}')
        await served.update(V1)
        await served.post("/continue_generation", b"{}")
        responses = await generating
    finally:
        await client.close()

    episodes = [Episode(prompt) for _ in responses]
    for episode, response in zip(episodes, responses, strict=True):
        episode.add_response(response)
    sample = build_sample("t0", episodes)
    mixed = sample.data["version_start"] != sample.data["version_end"]
    assert mixed.any()
    assert client.counts.interrupted >= mixed.sum()
    for ids, logprobs, versions in zip(
        sample.slices()[0], sample.slices("packed_logprobs")[0], sample.slices("versions")[0], strict=True
    ):
        assert set(versions[: len(prompt)].tolist()) == {-1}
        for version, model in served.models.items():
            mine = versions == version.pack()
            expected = forward_logprobs(model, ids, temperature=sampling.temperature)
            np.testing.assert_allclose(logprobs[mine], expected[mine], atol=1e-4)


def forward_logprobs(model: torch.nn.Module, ids: np.ndarray, *, temperature: float) -> np.ndarray:
    """Logprob of each token given those before it, from one undisturbed forward pass; position 0 holds 0."""
    input_ids = torch.from_numpy(ids).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits[0, :-1].float() / temperature
    picked = torch.log_softmax(logits, dim=-1).gather(1, input_ids[0, 1:, None])[:, 0]
    return np.concatenate([np.zeros(1, np.float32), picked.numpy()])
