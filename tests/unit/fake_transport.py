"""A transport in one file: each server pulls the tensors from the trainer's memory. test_transports.py adds its rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch
from aiohttp import ClientError, web

from asyncrl.config.transports import TransportTraits
from asyncrl.generation.engine import WeightsRefused
from asyncrl.generation.server_side import ServerSide, refuse, reply_with
from asyncrl.manager.manager_side import ManagerSide, OfferError
from asyncrl.manager.update_plan import Update
from asyncrl.model.trainer_side import HeldShare, Rank, TrainerSide
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import TensorSpecs, UpdateWeightsReply
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import serve
from asyncrl.weights.update_group import bytes_of, digest, views

TRAITS = TransportTraits(from_memory=True)


class PullWeights(msgspec.Struct):
    weight_version: str
    source: str


class Pulled(msgspec.Struct):
    """The first line of a share. The bytes of its buckets follow."""

    specs: list[TensorSpecs]
    xxh3: list[str]


class FakeInTrainer(TrainerSide):
    def hold(self, held: HeldShare) -> None:
        held.begin_digests()
        super().hold(held)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        held, response = self.held, web.StreamResponse()
        if held is None or str(held.version) != request.match_info["version"]:
            return web.Response(status=409)
        await response.prepare(request)
        line = Pulled(specs=held.specs, xxh3=list(await asyncio.gather(*held.digests)))
        await response.write(msgspec.json.encode(line) + b"\n")
        for bucket in held.buckets:
            await response.write(bucket.flat.numpy().tobytes())
        return response


@asynccontextmanager
async def sharing(rank: Rank) -> AsyncIterator[TrainerSide]:
    side, app = FakeInTrainer(), web.Application()
    app.add_routes([web.get("/share/{version}", side.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    try:
        url = await serve(runner, rank.info.runtime.host)
        await rank.directory.publish(rank.directory.names.weight_sender(ACTOR), url)
        yield side
    finally:
        await runner.cleanup()


class FakeInManager(ManagerSide):
    async def load(self, update: Update) -> None:
        version, calls = str(update.version), self._means.calls
        request = PullWeights(weight_version=version, source=f"{self._trainer_url}/share/{version}")
        try:
            async with asyncio.timeout(self._means.limit_s):
                answer = await calls.post(f"{update.url}/pull_weights", msgspec.json.encode(request), also_ok=400)
            reply = msgspec.json.decode(answer, type=UpdateWeightsReply)
        except (ClientError, TimeoutError) as error:
            reply = UpdateWeightsReply(success=False, message=repr(error))
        if not reply.success:
            self._means.logger.warning("%s did not pull %s: %s", update.server, version, reply.message)
            raise OfferError(f"pull: {reply.message}")


class FakeInServer(ServerSide):
    def routes(self) -> list[web.RouteDef]:
        return [web.post("/pull_weights", self._pull)]

    async def _pull(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=PullWeights)
        try:
            await self._means.work.run(self._load(wanted))
        except (WeightsRefused, ValueError) as error:
            return refuse(error)
        return reply_with(UpdateWeightsReply(success=True, message="pulled"))

    async def _load(self, wanted: PullWeights) -> None:
        version, engine = WeightVersion.parse(wanted.weight_version), self._means.engine
        self._means.fence.check(version)
        await self._means.fence.check_published(version)
        await self._take(wanted.source, version, engine)
        self._means.fence.loaded(version)

    async def _take(self, source: str, version: WeightVersion, engine: Any) -> None:
        tensors: dict[str, torch.Tensor] = {}
        async with open_session(max_connections=1) as session, session.get(source) as response:
            if response.status != 200:
                raise WeightsRefused(f"the trainer answered {response.status}", ErrorClass.PASSING)
            pulled = msgspec.json.decode(await response.content.readline(), type=Pulled)
            names = [name for specs in pulled.specs for name in specs.names]
            dtypes = [dtype for specs in pulled.specs for dtype in specs.dtypes]
            shapes = [shape for specs in pulled.specs for shape in specs.shapes]
            engine.check_tensors(TensorSpecs(names=names, dtypes=dtypes, shapes=shapes), complete=True)
            for specs, expected in zip(pulled.specs, pulled.xxh3, strict=True):
                engine.check_tensors(specs, complete=False)
                flat = torch.frombuffer(
                    bytearray(await response.content.readexactly(bytes_of(specs))), dtype=torch.uint8
                )
                if digest(flat) != expected:
                    raise WeightsRefused("checksums of the pulled tensors differ", ErrorClass.PASSING)
                tensors.update(zip(specs.names, views(flat, specs), strict=True))
        await engine.load_tensors(tensors, version)
