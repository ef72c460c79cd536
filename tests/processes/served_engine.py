"""A generation server with a tiny model in two versions, and a forward pass to check the tokens that it has sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch

from asyncrl.config.processes import GenerationServerConfig, WorkerInfo
from asyncrl.config.schema import GenerationConfig, NameResolveConfig, RuntimeConfig
from asyncrl.generation.worker import GenerationServer
from asyncrl.protocol.manager import ScheduleReply, Ticket
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import UpdateWeightsRequest
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version
from tests.support.memory_names import memory_system, open_names

V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)


class NoOtherServer:
    """Stands for the manager of a client that must not lose its server: a request for another server fails the test."""

    async def schedule(self, ticket_id: str, lost_server: str, **_: Any) -> ScheduleReply:
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

    async def update_in_a_pause(self, version: WeightVersion) -> None:
        """Update as the gserver manager does: running requests answer with the tokens that they have."""
        await self.post("/pause_generation", b'{"mode": "abort"}')
        await self.update(version)
        await self.post("/continue_generation", b"{}")

    def ticket(self) -> Ticket:
        return Ticket(
            ticket_id="t0",
            kind="train",
            locator=Locator(0, 0),
            attempt=1,
            min_version=0,
            deadline=2,
            server="generation_server/0",
            server_url=self.url,
            head=0,
        )


_EMBEDDED = GenerationConfig(max_running_requests=16, max_batch_tokens=256, num_blocks=512, page_size=16)


@asynccontextmanager
async def serve(
    run_dir: Path,
    tokenizer: Any = None,
    *,
    engine: str = "transformers",
    generation: GenerationConfig = _EMBEDDED,
    start_limit_s: float = 60.0,
    **sizes: Any,
) -> AsyncIterator[Served]:
    """Run a generation server that serves v0. tokenizer: the model's tokenizer; None: one with a token for each character.
    sizes: of the model, as for make_tiny_model."""
    torch.set_num_threads(1)
    make_tiny_model(run_dir / "model", tokenizer=tokenizer, **sizes)
    models = {
        version: make_tiny_model(None, tokenizer=tokenizer, seed=version.version, **sizes) for version in (V0, V1)
    }
    for version, model in models.items():
        tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
        path = version_dir(run_dir, "actor", version)
        write_version(path, tensors, source_dir=run_dir / "model", version=version, fsync=False)
    name_resolve = NameResolveConfig(endpoints=[f"memory://{run_dir}"])
    server = GenerationServer(
        GenerationServerConfig(
            worker=WorkerInfo("generation_server", 0, 1, "e", "t", 1, str(run_dir), 1, name_resolve, RuntimeConfig()),
            engine=engine,
            model_path=str(run_dir / "model"),
            tokenizer_path=str(run_dir / "model"),
            generation=generation,
            torch_threads=1,
        ),
        memory_system(),
    )
    main = asyncio.create_task(server.main())
    resolver = open_names(name_resolve)
    try:
        url = await asyncio.to_thread(resolver.wait, Names("e", "t").generation_server(0), start_limit_s)
        made = Served(url, run_dir, models)
        await made.update(V0)
        yield made
    finally:
        server.stopping.set()
        await asyncio.wait_for(main, 60)
        resolver.close()


def forward_logprobs(model: torch.nn.Module, ids: np.ndarray, *, temperature: float) -> np.ndarray:
    """Logprob of each token given those before it, from one undisturbed forward pass; position 0 holds 0."""
    input_ids = torch.from_numpy(ids).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits[0, :-1].float() / temperature
    picked = torch.log_softmax(logits, dim=-1).gather(1, input_ids[0, 1:, None])[:, 0]
    return np.concatenate([np.zeros(1, np.float32), picked.numpy()])
