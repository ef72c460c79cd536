"""The manager's side of a broadcast, over HTTP: one request to the trainer for all servers. Failed servers load from disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from asyncrl.manager.fleet import Fleet
from asyncrl.manager.routing import ServerState, ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.protocol.generation import ModelInfo
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import BroadcastReply, BroadcastRequest, UpdateWeightsReply
from asyncrl.runtime.http_client import open_session
from tests.support.services import make_services

LIMIT_S = 20.0
V0, V1, V2 = (WeightVersion(1, number) for number in range(3))


class FakeServer:
    """Loads any version. `says` overrides the version that it reports."""

    def __init__(self) -> None:
        self.version = self.url = self.says = ""
        self.did: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path.strip("/")
        if path == "get_model_info":
            info = ModelInfo(model_path="", weight_version=self.says or self.version)
            return web.Response(body=msgspec.json.encode(info))
        if path != "health":
            self.did.append(path)
        if path == "update_weights_from_disk":
            self.version = (await request.json())["weight_version"]
        return web.Response(body=msgspec.json.encode(UpdateWeightsReply(success=True, message="")))


class FakeTrainer:
    """Sends to the requested servers, except those in `fails`."""

    def __init__(self, servers: dict[str, FakeServer]) -> None:
        self.servers, self.url = servers, ""
        self.fails: set[str] = set()
        self.asked: list[BroadcastRequest] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def answer(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=BroadcastRequest)
        self.asked.append(wanted)
        await self.may_answer.wait()
        for target in wanted.targets:
            server = self.servers[target.server]
            assert server.did[-1] == "pause_generation"
            if target.server not in self.fails:
                server.version = wanted.weight_version
        errors = {name: "hangs" for name in self.fails if name in {target.server for target in wanted.targets}}
        return web.Response(body=msgspec.json.encode(BroadcastReply(errors=errors)))


@asynccontextmanager
async def listening(answer) -> AsyncIterator[str]:  # type: ignore[no-untyped-def]
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Managed:
    def __init__(self, fleet: Fleet, servers: dict[str, FakeServer], trainer: FakeTrainer) -> None:
        self.fleet, self.servers, self.trainer = fleet, servers, trainer

    def publish(self, version: WeightVersion) -> None:
        """Mark the version as written to disk with a valid manifest."""
        self.fleet.plan.publish(version)
        self.fleet.changed()

    async def until(self, **states: str) -> None:
        """Wait until the servers are in these states: `healthy_1` (with the version) or `stale`."""

        def found() -> dict[str, str]:
            views = {name: self.fleet.table.servers[name] for name in states}
            return {
                name: server.state.value + (f"_{server.version.version}" if server.version is not None else "")
                for name, server in views.items()
            }

        async def wait() -> None:
            while found() != states:
                self.fleet.news.clear()
                await self.fleet.news.wait()

        try:
            await asyncio.wait_for(wait(), LIMIT_S)
        except TimeoutError:
            raise AssertionError(f"{found()} instead of {states}") from None


@asynccontextmanager
async def managed(*names: str, files_url: str = "") -> AsyncIterator[Managed]:
    """A fleet of these servers, all with version 0."""
    servers = {name: FakeServer() for name in names}
    trainer = FakeTrainer(servers)
    table = ServerTable("round_robin", dead_after_s=LIMIT_S)
    async with listening(trainer.answer) as url, open_session(max_connections=0) as session:
        fleet = Fleet(
            table,
            UpdatePlan(table, update_timeout_s=4 * LIMIT_S),
            make_services(),
            session=session,
            path_of=lambda version: Path("/nowhere") / str(version),
            probe_every_s=LIMIT_S,
            probe_limit_s=LIMIT_S,
            verify_limit_s=LIMIT_S,
            transport="broadcast",
            transfer_limit_s=4 * LIMIT_S,  # servers wait for each other for a quarter of it
            files_url=files_url,
        )
        fleet.trainer_at(url)
        loop = asyncio.create_task(fleet.update_loop())
        sockets = [listening(server.answer) for server in servers.values()]
        try:
            for name, socket in zip(names, sockets, strict=True):
                fleet.announce(name, await socket.__aenter__())
            found = Managed(fleet, servers, trainer)
            found.publish(V0)
            await found.until(**dict.fromkeys(names, "healthy_0"))
            yield found
        finally:
            loop.cancel()
            await fleet.close()
            for socket in sockets:
                await socket.__aexit__(None, None, None)


async def test_all_servers_in_one_broadcast_before_the_files_are_there() -> None:
    async with managed("a", "b") as run:
        run.fleet.hold(str(V1))
        await run.until(a="healthy_1", b="healthy_1")
        (request,) = run.trainer.asked
        assert (request.weight_version, sorted(target.server for target in request.targets)) == (str(V1), ["a", "b"])
        for server in run.servers.values():
            assert server.did[-2:] == ["pause_generation", "continue_generation"]
        run.publish(V1)
        run.fleet.hold(str(V2))
        await run.until(a="healthy_2", b="healthy_2")
        assert [server.did.count("update_weights_from_disk") for server in run.servers.values()] == [1, 1]
        assert run.fleet.counters["broadcast", "a"] == 2


async def test_a_host_fetches_no_version_that_it_gets_by_broadcast() -> None:
    """The files of a version are complete while it is broadcast. Only the server that fails in the broadcast fetches them."""
    async with managed("a", "b", files_url="http://127.0.0.1:9") as run:
        before = {name: server.did.count("fetch_weights") for name, server in run.servers.items()}
        run.trainer.fails = {"b"}
        run.trainer.may_answer.clear()
        run.fleet.hold(str(V1))
        await run.until(a="updating", b="updating")
        await run.fleet._fetch_everywhere(V1, 0)
        assert {name: server.did.count("fetch_weights") for name, server in run.servers.items()} == before
        run.trainer.may_answer.set()
        await run.until(a="healthy_1", b="stale")
        await run.fleet._fetch_everywhere(V1, 0)
        before["b"] += 1
        assert {name: server.did.count("fetch_weights") for name, server in run.servers.items()} == before


@pytest.mark.parametrize("how", ["refused", "another echo", "no trainer"])
async def test_what_a_broadcast_fails_with_loads_from_disk_when_that_is_there(how: str) -> None:
    async with managed("a", "b") as run:
        lost = {"b"}
        if how == "refused":
            run.trainer.fails = {"b"}
        elif how == "another echo":
            run.servers["b"].says = str(V0)
        else:
            run.fleet.trainer_at("http://127.0.0.1:9")
            lost = {"a", "b"}
        run.fleet.hold(str(V1))
        await run.until(**{name: "stale" if name in lost else "healthy_1" for name in ("a", "b")})
        run.servers["b"].says = ""
        assert "continue_generation" not in run.servers["b"].did[-1:]  # it stays paused: its weights are unknown
        run.publish(V1)
        await run.until(a="healthy_1", b="healthy_1")
        ahead, *paused = run.servers["b"].did[-4:]
        assert ahead == "fetch_weights"  # and verified, before the pause
        assert paused == ["pause_generation", "update_weights_from_disk", "continue_generation"]
        assert run.fleet.counters["failed", "b"] == 1
        assert run.fleet.table.servers["b"].state is ServerState.HEALTHY


async def test_a_fall_back_to_disk_is_one_warning_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    """There is not one warning for each version. A second warning comes only if broadcasts have worked in between."""

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    async with managed("a", "b") as run:
        run.trainer.fails = {"a", "b"}
        number = 1
        for failures in (1, 2, 3):
            while run.fleet.counters["failed", "b"] < failures:  # after a failure, some versions load from disk
                run.fleet.hold(str(WeightVersion(1, number)))
                run.publish(WeightVersion(1, number))
                await run.until(a=f"healthy_{number}", b=f"healthy_{number}")
                number += 1
        (warning,) = warnings()
        assert warning.startswith(f"broadcast of weights {V1} to a, b failed: hangs. They load ")
        run.trainer.fails = set()
        while not run.fleet.counters["broadcast", "b"]:
            run.fleet.hold(str(WeightVersion(1, number)))
            run.publish(WeightVersion(1, number))
            await run.until(a=f"healthy_{number}", b=f"healthy_{number}")
            number += 1
        run.trainer.fails = {"b"}
        run.fleet.hold(str(WeightVersion(1, number)))
        run.publish(WeightVersion(1, number))
        await run.until(a=f"healthy_{number}", b=f"healthy_{number}")
        assert len(warnings()) == 2
        assert " to b failed: hangs. " in warnings()[1]
