"""The manager, and servers that cannot read its weight folder: they fetch weights while they serve, and a slow one delays none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from test_manager_http import FakeServer, Setup

from asyncrl.generation.engine import WeightsRefused
from asyncrl.generation.fetched import FetchedWeights
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import FetchWeightsRequest
from asyncrl.weights.fetch import WeightFetcher

VERSIONS = [str(WeightVersion(1, number)) for number in range(4)]


class Host(FakeServer):
    """A server on a host of its own."""

    def __init__(self, memory: Path, name: str, setup: Setup) -> None:
        super().__init__()
        self._setup = setup
        self.fetcher = WeightFetcher(memory, name, logger=logging.getLogger("test"))
        self.fetched = FetchedWeights(self.fetcher, self._source)
        self.way = asyncio.Event()  # set: the way to the trainer's host is open
        self.way.set()
        self.asked: list[tuple[str, bool]] = []  # version, whether the server was paused at the time
        self.where: dict[str, str] = {}

    async def _source(self) -> str:
        return await asyncio.to_thread(self._setup.resolver.get, self._setup.names.weight_files("actor"))

    async def stop(self) -> None:
        await super().stop()
        self.fetched.close()

    async def _fetch(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=FetchWeightsRequest)
        self.asked.append((wanted.weight_version, self.paused))
        await self.way.wait()
        elsewhere = msgspec.structs.replace(wanted, model_path=f"/no/such/folder/{wanted.weight_version}")
        self.where[wanted.weight_version] = await self.fetched.fetch(elsewhere)
        return web.json_response({"success": True, "message": ""})


@contextlib.asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[Setup, Host, Host]]:
    (tmp_path / "memory").mkdir()
    setup = Setup(tmp_path / "run")
    setup.config = replace(setup.config, fetch=True)
    await setup.start()
    try:
        hosts = [Host(tmp_path / "memory", f"h{number}", setup) for number in range(2)]
        for index, host in enumerate(hosts):
            setup.resolver.add(setup.names.generation_server(index), await host.start(), replace=True)
            setup.servers.append(host)
        yield setup, hosts[0], hosts[1]
    finally:
        await setup.stop()


async def test_servers_fetch_before_they_are_paused(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (setup, one, other):
        for number in range(3):
            setup.publish(number)
            await setup.all_serve(number)
        for host in (one, other):
            assert host.loads == VERSIONS[:3]
            assert {version for version, _ in host.asked} == set(VERSIONS[:3])
            assert not any(paused for _, paused in host.asked)
            path = Path(host.where[VERSIONS[2]])
            assert path.is_relative_to(tmp_path / "memory")
            assert (path / "model.safetensors").read_bytes() == f"weights {VERSIONS[2]}".encode()
        assert one.where[VERSIONS[2]] != other.where[VERSIONS[2]]


async def test_a_host_that_cannot_fetch_holds_up_nobody_else(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (setup, slow, quick):
        setup.publish(0)
        await setup.all_serve(0)
        slow.way.clear()
        setup.publish(1)
        await setup.until_served(1)
        assert quick.loads == VERSIONS[:2]
        assert slow.loads == VERSIONS[:1]
        assert not slow.paused  # its running requests go on
        setup.publish(2)
        await setup.until_served(2)
        slow.way.set()
        await setup.all_serve(2)
        assert slow.loads[-1] == VERSIONS[2]


async def test_nothing_is_fetched_from_elsewhere(tmp_path: Path) -> None:
    """The request names a version of the run, but a source that is not the run's: the host refuses to fetch."""
    async with fleet(tmp_path) as (setup, host, _):
        setup.publish(0)
        await setup.all_serve(0)
        wanted = FetchWeightsRequest(
            model_path="/no/such/folder", weight_version=VERSIONS[0], source="http://127.0.0.1:1/weights", limit_s=5.0
        )
        with pytest.raises(WeightsRefused, match=r"source is .*; the run's weights are at http"):
            await host.fetched.fetch(wanted)
