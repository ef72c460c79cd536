"""The manager over real HTTP: requests that wait for an event, clients that disappear, servers that are slow, wrong or dead."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest
from aiohttp import web

from asyncrl.config.processes import GserverManagerConfig, WorkerInfo
from asyncrl.config.schema import ManagerConfig, NameResolveConfig, RuntimeConfig
from asyncrl.manager import update_plan
from asyncrl.manager.routing import ServerState
from asyncrl.manager.worker import GserverManager, Management
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.manager import AllocateReply, EvaluateReply, FinishReply, HeartbeatReply, LedgerView, VersionReply
from asyncrl.protocol.names import MASTER_META
from asyncrl.protocol.scaling import DesiredServers, ServersReply
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import UpdateWeightsRequest
from asyncrl.runtime.channel_protocol import Endpoint
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.runtime.names.interface import NameResolveTimeout
from asyncrl.weights.versions import FileEntry, Manifest, _xxh3, version_dir
from tests.support.memory_names import memory_system, open_names
from tests.support.summaries import group

R = TypeVar("R", bound=msgspec.Struct)

B, ETA = 2, 1
HEARTBEAT_S = 0.1
LEASE_S = 20.0  # for tests in which no lease may end; a health probe's answer is late after a sixth of it
SHORT_LEASE_S = 4.0  # for tests that wait for the end of a lease
LIMIT_S = 25.0  # less than the 30 s of waiting requests: events must answer them earlier


class FakeServer:
    """The part of a generation server with which the manager communicates."""

    def __init__(self) -> None:
        self.version = ""
        self.paused = False
        self.loads: list[str] = []
        self.gate = asyncio.Event()  # a load ends when it is set
        self.gate.set()
        self.loading = asyncio.Event()
        self.echo: Callable[[str], str] = lambda version: version
        self.broken: str = ""  # the class of its refusals, if it refuses every version
        self.num_refusals = 0
        self.refuses_key = False
        self.mismatch = False  # True: it loads the weights, but reports that its logprobs differ from the trainer's

    async def start(self) -> str:
        app = web.Application()
        self.add_routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/fetch_weights", self._fetch)
        router.add_post("/pause_generation", self._pause)
        router.add_post("/continue_generation", self._continue)
        router.add_post("/update_weights_from_disk", self._update)
        router.add_get("/get_model_info", self._info)
        router.add_get("/health", self._health)

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _fetch(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": ""})

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"mode": "abort"}
        self.paused = True
        return web.json_response({"success": True})

    async def _continue(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"success": True})

    async def _update(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=UpdateWeightsRequest)
        assert self.paused
        assert Path(wanted.model_path).name == wanted.weight_version
        self.loading.set()
        await self.gate.wait()
        if self.broken:
            self.num_refusals += 1
            told = {"success": False, "message": f"broken {wanted.weight_version}", "error_class": self.broken}
            return web.json_response(told, status=400)
        self.loads.append(wanted.weight_version)
        if self.mismatch:
            told = {"success": False, "message": "logprobs differ by 3.1", "mismatch": True}
            return web.json_response(told, status=400)
        self.version = self.echo(wanted.weight_version)
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def _info(self, request: web.Request) -> web.Response:
        if self.refuses_key:
            return web.Response(status=401, text="unknown key")
        return web.json_response({"model_path": "m", "weight_version": self.version, "paused": self.paused})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


class SeenManager(GserverManager):
    """Exposes its components once it has started."""

    def __init__(self, config: GserverManagerConfig) -> None:
        super().__init__(config, memory_system())
        self.opened = asyncio.Event()

    async def manage(self, management: Management) -> None:
        self.seen = management
        self.opened.set()
        await super().manage(management)


class Setup:
    """A manager (a real worker, name resolve in memory), fake servers, a client session."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        space = run_dir.name
        self.info = WorkerInfo(
            kind="gserver_manager",
            index=0,
            count=1,
            experiment="e",
            trial=space,
            attempt=1,
            run_dir=str(run_dir),
            seed=1,
            name_resolve=NameResolveConfig(endpoints=["memory://"]),
            runtime=RuntimeConfig(start_timeout_s=LIMIT_S, stop_timeout_s=5.0),
        )
        self.run_dir = run_dir
        manager = ManagerConfig(
            **{
                "max_head_offpolicyness": ETA,
                "heartbeat_s": HEARTBEAT_S,
                "lease_s": LEASE_S,
                "update_timeout_s": LIMIT_S,
                **options,
            }
        )
        self.config = GserverManagerConfig(
            worker=self.info,
            manager=manager,
            role="actor",
            num_heads=2,
            batch_size=B,
            num_rollout_workers=2,
        )
        self.resolver = open_names(self.info.name_resolve)
        self.servers: list[FakeServer] = []
        self.requests = 0

    async def start(self) -> None:
        self.session = aiohttp.ClientSession()
        await self.start_manager()

    async def start_manager(self) -> None:
        self.manager = SeenManager(self.config)
        self.names = self.manager.names
        self.task = asyncio.create_task(self.manager.main())
        self.url = await asyncio.to_thread(self.resolver.wait, self.names.gserver_manager(), LIMIT_S)
        await asyncio.wait_for(self.manager.opened.wait(), LIMIT_S)

    async def stop_manager(self) -> None:
        self.manager.stopping.set()
        await asyncio.wait_for(self.task, LIMIT_S)
        self.resolver.delete(self.names.gserver_manager())

    async def stop(self) -> None:
        await self.stop_manager()
        await self.session.close()
        for server in self.servers:
            await server.stop()
        self.resolver.clear_subtree(self.names.root)
        self.resolver.close()

    async def poll(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Poll every 5 ms for a condition that causes no event outside the manager."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if value := condition():
                return value
            await asyncio.sleep(0.005)
        raise AssertionError("it did not happen")

    async def add_server(self) -> FakeServer:
        server = FakeServer()
        url = await server.start()
        self.resolver.add(self.names.generation_server(len(self.servers)), url, replace=True)
        self.servers.append(server)
        return server

    def write_weights(self, version: WeightVersion) -> Path:
        path = version_dir(self.run_dir, "actor", version)
        path.mkdir(parents=True)
        file = path / "model.safetensors"
        file.write_bytes(f"weights {version}".encode())
        files = {file.name: FileEntry(bytes=file.stat().st_size, xxh3=_xxh3(file))}
        manifest = Manifest(attempt=version.attempt, version=version.version, kind="full", files=files)
        (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        return path

    def publish(self, version: int, *, attempt: int = 1, write: bool = True) -> None:
        weights = WeightVersion(attempt, version)
        if write:
            self.write_weights(weights)
        self.resolver.add(self.names.model_version("actor"), str(weights), replace=True)

    def begin_master(self, attempt: int) -> None:
        """Publish the name resolve entries of a master of this attempt."""
        at = Endpoint("tcp://127.0.0.1:1", "m", max_message_bytes=1, attempt=attempt)
        self.resolver.add(self.names.stream(MASTER_META), msgspec.json.encode(at).decode(), replace=True)

    def journal(self) -> list[dict[str, Any]]:
        return read_json_lines(self.run_dir / "journal" / "gserver_manager.jsonl")

    async def post(self, path: str, body: Any, reply: type[R]) -> R:
        async with self.session.post(self.url + path, data=msgspec.json.encode(body)) as response:
            content = await response.read()
            assert response.status == 200, content
            return msgspec.json.decode(content, type=reply)

    async def report(self, **fields: Any) -> LedgerView:
        body = {"attempt": 1, "trained_version": 0, "consumed": [], "stored": [], "num_prompts": 100, "num_epochs": 1}
        return await self.post("/report", {**body, **fields}, LedgerView)

    async def allocate(
        self, count: int = 1, *, wait_s: float = 0.0, request_id: str = "", worker: int = 0
    ) -> AllocateReply:
        self.requests += 1
        body = {
            "request_id": request_id or f"r{self.requests}",
            "worker": f"rollout_worker/{worker}",
            "incarnation": "a",
            "count": count,
            "wait_s": wait_s,
        }
        return await self.post("/allocate_rollout", body, AllocateReply)

    async def finish(self, *tickets: str, outcome: str = "stored", worker: int = 0, **more: Any) -> FinishReply:
        results = [{"ticket_id": ticket, "outcome": outcome, **more} for ticket in tickets]
        body = {"worker": f"rollout_worker/{worker}", "incarnation": "a", "results": results}
        return await self.post("/finish_rollout", body, FinishReply)

    async def heartbeat(self, *held: str, worker: int = 0) -> HeartbeatReply:
        body = {"worker": f"rollout_worker/{worker}", "incarnation": "a", "held": list(held)}
        return await self.post("/heartbeat", body, HeartbeatReply)

    async def states(self) -> list[tuple[str, str]]:
        async with self.session.get(self.url + "/get_model_version") as response:
            reply = msgspec.json.decode(await response.read(), type=VersionReply)
        return [(server.state, server.version) for server in reply.servers]

    async def told_servers(self) -> ServersReply:
        async with self.session.get(self.url + "/servers") as response:
            return msgspec.json.decode(await response.read(), type=ServersReply)

    async def until_served(self, version: int) -> LedgerView:
        return await self.until_view(lambda view: view.served_version >= version)

    async def all_serve(self, version: int) -> None:
        wanted = [("healthy", str(WeightVersion(1, version)))] * len(self.servers)
        await self.until_view(lambda view: [(server.state, server.version) for server in view.servers] == wanted)

    async def until_view(self, condition: Callable[[LedgerView], bool]) -> LedgerView:
        """Wait until the condition holds for a view. As the master does, each further report waits for a newer ledger."""

        async def reports() -> LedgerView:
            view = await self.report(full=True)
            while not condition(view):
                view = await self.report(after_revision=view.revision, wait_s=10.0)
            return view

        return await asyncio.wait_for(reports(), LIMIT_S)


@contextlib.asynccontextmanager
async def running(run_dir: Path, **options: Any) -> AsyncIterator[Setup]:
    setup = Setup(run_dir, **options)
    await setup.start()
    try:
        yield setup
    finally:
        await setup.stop()


@contextlib.asynccontextmanager
async def serving_one(run_dir: Path, **options: Any) -> AsyncIterator[Setup]:
    """One healthy server at v0. The master is registered."""
    async with running(run_dir, **options) as setup:
        await setup.add_server()
        setup.publish(0)
        await setup.until_served(0)
        yield setup


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with serving_one(tmp_path) as setup:
        yield setup


def ids(reply: AllocateReply) -> list[str]:
    return [ticket.ticket_id for ticket in reply.tickets]


# ------------------------------------------------------------------------------------------------------------ admission


async def test_an_answer_waits_for_admission(setup: Setup) -> None:
    """Requests for tickets wait, because the staleness bound is reached. A train step consumes samples, but the manager grants new
    tickets only once the step's weights are served."""
    tickets = ids(await setup.allocate(100))
    assert len(tickets) == (1 + ETA) * B
    await setup.finish(*tickets)
    assert (await setup.allocate()).refusal == "staleness"
    waiting = asyncio.create_task(setup.allocate(100, wait_s=30.0))
    other = asyncio.create_task(setup.allocate(100, wait_s=30.0, worker=1))
    await setup.poll(lambda: setup.manager.seen.service.num_waiting == 2)
    await setup.report(trained_version=1, consumed=tickets[:B], stored=tickets[B:])
    assert setup.manager.seen.service.num_waiting == 2
    setup.publish(1)
    replies = await asyncio.wait_for(asyncio.gather(waiting, other), LIMIT_S)
    assert [len(reply.tickets) for reply in replies] == [1, 1]  # granted in turn
    assert {ticket.min_version for reply in replies for ticket in reply.tickets} == {1}


async def test_refusals_name_the_reason_after_the_wait(setup: Setup) -> None:
    await setup.allocate(100)
    began = time.monotonic()
    reply = await setup.allocate(wait_s=0.2)
    assert time.monotonic() - began >= 0.19
    assert (reply.tickets, reply.refusal, reply.finished) == ([], "staleness", False)


async def test_the_same_request_gets_the_same_tickets(setup: Setup) -> None:
    first = await setup.allocate(2, request_id="r")
    assert (await setup.allocate(2, request_id="r")) == first
    await setup.allocate(2)
    waits = [asyncio.create_task(setup.allocate(1, wait_s=30.0, request_id="w")) for _ in range(2)]
    await setup.poll(lambda: setup.manager.seen.service.num_waiting == 2)
    await setup.finish(ids(first)[0], outcome="rejected")
    one, two = await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S)
    assert one == two
    assert len(one.tickets) == 1


async def test_clients_that_vanish_while_waiting_get_nothing(setup: Setup) -> None:
    """In another implementation, ten clients disconnected while they waited, and ten tickets were granted but never received."""
    held = ids(await setup.allocate(100))
    waits = [asyncio.create_task(setup.allocate(1, wait_s=30.0, worker=1)) for _ in range(10)]
    await setup.poll(lambda: setup.manager.seen.service.num_waiting == 10)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await setup.poll(lambda: setup.manager.seen.service.num_waiting == 0)
    await setup.finish(*held, outcome="rejected")
    assert setup.manager.seen.ledger.num_live == 0
    assert len(ids(await setup.allocate(100))) == (1 + ETA) * B


async def test_tickets_of_answers_that_nobody_read_come_back(setup: Setup) -> None:
    """The manager granted tickets, but the client had disconnected. No heartbeat lists these tickets, so they are handed out
    again."""
    lost = ids(await setup.allocate(3))  # the test acts as if it had never read them
    (kept,) = ids(await setup.allocate(1))
    for _ in range(3):
        assert (await setup.heartbeat(kept)).revoked == []
        await asyncio.sleep(HEARTBEAT_S)
    assert setup.manager.seen.ledger.num_live == 1
    again = await setup.allocate(100)
    assert [ticket.issue for ticket in again.tickets] == [2, 2, 2]
    assert (await setup.heartbeat(kept, *lost)).revoked == lost
    assert (await setup.finish(*lost)).unknown == lost


async def test_a_silent_worker_loses_its_tickets_and_who_waits_gets_them(tmp_path: Path) -> None:
    async with serving_one(tmp_path, lease_s=SHORT_LEASE_S) as setup:
        await setup.allocate(100, worker=1)
        reply = await asyncio.wait_for(setup.allocate(100, wait_s=30.0), LIMIT_S)
        assert {ticket.issue for ticket in reply.tickets} == {2}


async def test_reports_wait_for_a_newer_ledger(setup: Setup) -> None:
    view = await setup.report()
    while (later := await setup.report(after_revision=view.revision, wait_s=1.0)).revision != view.revision:
        view = later  # the load of v0 may still change the ledger: wait until it is quiet
    assert (await setup.report(after_revision=view.revision, wait_s=0.05)).revision == view.revision
    waiting = asyncio.create_task(setup.report(after_revision=view.revision, wait_s=30.0))
    await asyncio.sleep(0)
    (ticket,) = ids(await setup.allocate(1))
    newer = await asyncio.wait_for(waiting, LIMIT_S)
    assert newer.revision > view.revision
    assert [live.ticket_id for live in newer.live] == [ticket]
    assert (await setup.report(after_revision=view.revision, wait_s=30.0)).revision == newer.revision
    of_another = newer.revision + 1000  # a revision that the master got from the previous manager
    assert (
        await asyncio.wait_for(setup.report(after_revision=of_another, wait_s=30.0), LIMIT_S)
    ).revision == newer.revision


async def test_evaluations_wait_for_their_end(setup: Setup) -> None:
    await setup.allocate(100)  # training takes all that it may; evaluation is independent of it
    part = {"eval_set": "s", "mode": "greedy", "num_prompts": 3}
    body = {"eval_id": "e", "parts": [part], "wait_s": 30.0}
    waiting = asyncio.create_task(setup.post("/evaluate", body, EvaluateReply))
    for position in range(3):
        (ticket,) = (await setup.allocate(5, wait_s=10.0)).tickets
        assert (ticket.kind, ticket.eval_set, ticket.eval_mode) == ("eval", "s", "greedy")
        assert ticket.locator.position == position
        await setup.finish(ticket.ticket_id, outcome="evaluated", group=group(4, rewards=[position]))
    reply = await asyncio.wait_for(waiting, LIMIT_S)
    assert reply.done
    assert [result.group.rewards for result in reply.results if result.group] == [[0.0], [1.0], [2.0]]
    assert await setup.post("/evaluate", body, EvaluateReply) == reply


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/allocate_rollout", b"{", "AllocateRequest: Input data was truncated"),
        ("/allocate_rollout", b"{}", "missing required field `request_id`"),
        ("/allocate_rollout", {"request_id": "r", "worker": "w", "incarnation": "a", "count": 0}, "count is 0"),
        ("/allocate_rollout", {"request_id": "r", "worker": "w", "incarnation": "a", "count": "1"}, "$.count"),
        ("/allocate_rollout", {"request_id": "", "worker": "w", "incarnation": "a", "count": 1}, "request_id"),
        (
            "/allocate_rollout",
            {"request_id": "r", "worker": "w", "incarnation": "a", "count": 1, "wait_s": -1.0},
            "wait_s is -1.0",
        ),
        (
            "/finish_rollout",
            {"worker": "w", "incarnation": "a", "results": [{"ticket_id": "t", "outcome": "lost"}]},
            "$.results[0].outcome",
        ),
        ("/heartbeat", {"worker": "", "incarnation": "a", "held": []}, "worker has 0 characters"),
        ("/report", {"attempt": 1, "trained_version": 0, "consumed": [], "stored": [3]}, "$.stored[0]"),
        (
            "/evaluate",
            {"eval_id": "e", "parts": [{"eval_set": "s", "mode": "best", "num_prompts": 1}]},
            "$.parts[0].mode",
        ),
        ("/evaluate", {"eval_id": "e", "parts": []}, "at least one part"),
        ("/schedule_request", {"worker": "w"}, "ticket_id"),
        ("/scale", {"generation": 0}, "generation is 0; use a number from 1 to 256"),
        ("/scale", {"generation": 257}, "generation is 257; use a number from 1 to 256"),
        ("/scale", {"generation": "2"}, "$.generation"),
        ("/scale", {}, "missing required field `generation`"),
    ],
)
async def test_malformed_requests_are_refused_with_a_reason(setup: Setup, path: str, body: Any, reason: str) -> None:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    async with setup.session.post(setup.url + path, data=data) as response:
        text = await response.text()
    assert response.status == 400
    assert reason in text


async def test_the_number_of_servers_is_set_as_by_the_command(setup: Setup) -> None:
    """The manager records the number where the launcher looks, and drains the servers above it."""
    await setup.add_server()
    await setup.all_serve(0)
    assert (await setup.told_servers()).target == 1  # of the allocation

    reply = await setup.post("/scale", {"generation": 3}, ServersReply)
    assert (reply.target, [server.state for server in reply.servers]) == (3, ["healthy", "healthy"])
    assert reply.missing == ["generation_server/2"]
    key = setup.names.desired_generation_servers()
    assert msgspec.json.decode(setup.resolver.get(key), type=DesiredServers).count == 3

    reply = await setup.post("/scale", {"generation": 2}, ServersReply)
    recorded = setup.resolver.get(key)
    assert await setup.post("/scale", {"generation": 2}, ServersReply) == reply
    assert setup.resolver.get(key) == recorded  # so that a repeated request restarts no drain

    reply = await setup.post("/scale", {"generation": 1}, ServersReply)
    assert (reply.target, reply.missing) == (1, [])
    await setup.poll(lambda: setup.manager.seen.table.servers["generation_server/1"].state is ServerState.DRAINING)
    assert [server.state for server in (await setup.told_servers()).servers] == ["healthy", "draining"]


async def test_the_number_outlives_the_manager(setup: Setup) -> None:
    await setup.post("/scale", {"generation": 4}, ServersReply)
    await setup.stop_manager()
    await setup.start_manager()
    assert (await setup.told_servers()).target == 4


async def test_without_name_resolve_the_number_is_neither_set_nor_known(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times_out(*arguments: Any, **options: Any) -> str:
        raise NameResolveTimeout("no answer within 5 s")

    monkeypatch.setattr(type(setup.resolver), "get", times_out)
    async with setup.session.post(setup.url + "/scale", data=b'{"generation": 2}') as response:
        assert (response.status, "no answer within 5 s" in await response.text()) == (503, True)
    async with setup.session.get(setup.url + "/servers") as response:
        assert response.status == 503


async def test_unknown_paths_and_wrong_methods_are_told(setup: Setup) -> None:
    async with setup.session.post(setup.url + "/allocate", data=b"{}") as response:
        assert (response.status, await response.text()) == (404, "there is no /allocate\n")
    async with setup.session.get(setup.url + "/allocate_rollout") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert await response.text() == "use POST for /allocate_rollout\n"
    async with setup.session.get(setup.url + "/health?probe=1") as response:
        assert response.status == 200


async def test_answers_are_plain_http_whatever_the_client_does(setup: Setup) -> None:
    """The client sends a body in several pieces, reuses a connection, and asks the server to close it after the answer."""
    body = b'{"worker": "rollout_worker/0", "incarnation": "a", "held": []}'
    reader, writer = await asyncio.open_connection(*setup.url.removeprefix("http://").split(":"))
    answers = []
    for connection in ("keep-alive", "close"):
        head = f"POST /heartbeat HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:9])
        await writer.drain()
        await setup.heartbeat()  # other requests are answered meanwhile
        writer.write(body[9:])
        lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)).decode().split("\r\n")
        headers = dict(line.split(": ") for line in lines[1:] if line)
        content = await asyncio.wait_for(reader.readexactly(int(headers.pop("Content-Length"))), LIMIT_S)
        assert msgspec.json.decode(content, type=HeartbeatReply).revoked == []
        answers.append((lines[0], headers))
    json = {"Content-Type": "application/json"}
    assert answers == [("HTTP/1.1 200 OK", json), ("HTTP/1.1 200 OK", {**json, "Connection": "close"})]
    assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    writer.close()


async def test_a_report_of_a_large_batch_is_taken_in(setup: Setup) -> None:
    """The report is longer than aiohttp's default limit of 1 MiB."""
    (ticket,) = ids(await setup.allocate(1))
    others = [f"a1-e0-p{position}-i1-v0-h0-x_{position}" for position in range(50_000)]
    body = {"attempt": 1, "trained_version": 0, "consumed": [*others, ticket], "stored": []}
    async with setup.session.post(setup.url + "/report", data=io.BytesIO(msgspec.json.encode(body))) as response:
        assert response.status == 200
        assert msgspec.json.decode(await response.read(), type=LedgerView).live == []


async def test_room_for_one_goes_to_who_waits_longest(setup: Setup) -> None:
    held = ids(await setup.allocate(100))
    waits = []
    for number in range(3):
        waits.append(asyncio.create_task(setup.allocate(1, wait_s=30.0, worker=number % 2)))
        await setup.poll(lambda: setup.manager.seen.service.num_waiting == len(waits))
    for number, wait in enumerate(waits):
        await setup.finish(held[number], outcome="rejected")
        assert len((await asyncio.wait_for(wait, LIMIT_S)).tickets) == 1
        assert setup.manager.seen.service.num_waiting == len(waits) - number - 1


async def test_an_attempt_that_no_master_has_begun_is_refused(setup: Setup) -> None:
    """A forged attempt number of 999, sent over HTTP, used to end the run's tickets and its master, once per attempt."""
    (ticket,) = ids(await setup.allocate())
    report = {"attempt": 999, "trained_version": 0, "consumed": [], "stored": [], "full": True, "num_prompts": 9}
    body = msgspec.json.encode({**report, "num_epochs": 1})
    async with setup.session.post(setup.url + "/report", data=body) as response:
        assert response.status == 503  # for example, name resolve has lost its data: the master retries
    setup.begin_master(1)
    async with setup.session.post(setup.url + "/report", data=body) as response:
        told = await response.text()
    assert (response.status, told) == (409, "attempt is 999; the newest that the run has begun is 1\n")
    assert (await setup.heartbeat(ticket)).revoked == []
    setup.begin_master(2)
    assert (await setup.report(attempt=2, full=True)).live == []
    async with setup.session.post(setup.url + "/report", data=body) as response:
        assert response.status == 409
    assert (await setup.report(attempt=2)).known


async def test_a_master_of_an_attempt_that_is_over_is_refused(setup: Setup) -> None:
    setup.begin_master(2)
    await setup.report(attempt=2, full=True)
    async with setup.session.post(
        setup.url + "/report",
        data=msgspec.json.encode({"attempt": 1, "trained_version": 5, "consumed": [], "stored": []}),
    ) as response:
        assert response.status == 409
        assert "attempt 1 is over" in await response.text()


async def test_health_and_metrics(setup: Setup) -> None:
    tickets = ids(await setup.allocate(100))
    await setup.allocate()
    await setup.finish(tickets[0], outcome="rejected", reason="too_hard", group=group(5))
    async with setup.session.get(setup.url + "/health") as response:
        assert response.status == 200
    async with setup.session.get(setup.url + "/metrics") as response:
        text = await response.text()
    for line in (
        "asyncrl_manager_live 3.0",
        'asyncrl_manager_tickets_total{event="rejected",reason="too_hard"} 1.0',
        'asyncrl_manager_refused_total{reason="staleness"} 1.0',
        'asyncrl_manager_rejected_responses_total{below="8",reason="too_hard"} 1.0',
        'asyncrl_manager_server_state{server="generation_server/0",state="healthy"} 1.0',
        'asyncrl_manager_updates_total{event="succeeded",server="generation_server/0"} 1.0',
        "asyncrl_manager_served_version 0.0",
    ):
        assert line in text


async def test_the_end_of_the_run_is_told_to_who_waits(setup: Setup) -> None:
    await setup.allocate(100)
    waiting = asyncio.create_task(setup.allocate(wait_s=30.0))
    await setup.poll(lambda: setup.manager.seen.service.num_waiting == 1)
    await setup.report(stop=True)  # the master stops, but its last evaluation may still come: workers wait
    assert not (await setup.allocate(worker=1)).finished
    setup.resolver.add(setup.names.experiment_status(), "COMPLETE", replace=True)
    assert (await asyncio.wait_for(waiting, LIMIT_S)).finished


# -------------------------------------------------------------------------------------------------------------- updates


async def test_each_server_is_updated_once_per_version(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        servers = [await setup.add_server(), await setup.add_server()]
        for version in range(4):
            setup.publish(version)
            await setup.all_serve(version)
        loads = [str(WeightVersion(1, version)) for version in range(4)]
        assert [server.loads for server in servers] == [loads, loads]
        assert not any(server.paused for server in servers)


async def test_a_slow_server_blocks_neither_the_other_nor_the_http_side(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        slow, quick = await setup.add_server(), await setup.add_server()
        setup.publish(0)
        await setup.all_serve(0)
        slow.gate.clear()
        setup.publish(1)
        await asyncio.wait_for(slow.loading.wait(), LIMIT_S)
        await setup.until_served(1)
        assert await setup.states() == [("updating", str(WeightVersion(1, 1))), ("healthy", str(WeightVersion(1, 1)))]
        setup.publish(2)  # the fast server goes on while the slow one still loads an outdated version
        await setup.until_served(2)
        began = time.monotonic()
        tickets = (await setup.allocate(4)).tickets
        assert time.monotonic() - began < LIMIT_S / 2  # the slow load, whose gate stays closed, delays no answer
        assert {ticket.server for ticket in tickets} == {"generation_server/1"}
        assert {ticket.min_version for ticket in tickets} == {2}
        assert len(quick.loads) == 3
        slow.gate.set()
        await setup.all_serve(2)
        assert slow.loads == quick.loads


async def test_a_server_that_echoes_the_wrong_version_never_gets_traffic(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        liar, honest = await setup.add_server(), await setup.add_server()
        liar.echo = lambda version: "a0001-v00000099"
        setup.publish(0)
        await setup.until_served(0)
        await setup.poll(lambda: setup.manager.seen.fleet.counters["failed", "generation_server/0"] >= 2)
        assert {ticket.server for ticket in (await setup.allocate(4)).tickets} == {"generation_server/1"}
        assert liar.paused
        assert honest.loads == [str(WeightVersion(1, 0))]
        assert (await setup.states())[0] != ("healthy", "")
        liar.echo = lambda version: version
        await setup.all_serve(0)


async def test_a_server_that_refuses_is_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        server = await setup.add_server()
        server.broken = "passing"
        setup.publish(0)
        await setup.poll(lambda: setup.manager.seen.fleet.counters["failed", "generation_server/0"] >= 1)
        assert (await setup.report(full=True)).served_version == -1
        assert (await setup.allocate()).refusal == "no_server"
        server.broken = ""
        await setup.all_serve(0)


async def test_a_server_that_refuses_a_version_is_named_until_it_loads_one(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        _, refusing = await setup.add_server(), await setup.add_server()
        refusing.broken = "permanent"
        setup.publish(0)
        note = "out of service: generation_server/1: loading a0001-v00000000 failed: refused: broken a0001-v00000000"
        await setup.poll(lambda: setup.manager.board.snapshot().notes == [note])
        refusing.broken = ""
        setup.publish(1)
        await setup.all_serve(1)
        await setup.poll(lambda: setup.manager.board.snapshot().notes == [])


@pytest.mark.parametrize(("error_class", "num_loads"), [("permanent", 3), ("unknown", 5)])
async def test_a_version_that_every_server_refuses_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_class: str, num_loads: int
) -> None:
    monkeypatch.setattr(update_plan, "FIRST_RETRY_S", 0.01)
    setup = Setup(tmp_path)
    await setup.start()
    for server in [await setup.add_server(), await setup.add_server()]:
        server.broken = error_class
    setup.publish(0)
    assert re.match(
        r"no generation server can load the weights a0001-v00000000, so the run ends\. generation_server/0, generation_server/1: "
        r"loading a0001-v00000000 failed: refused: broken .* set model_path to one that both support",
        await ended(setup),
    )
    assert [server.num_refusals for server in setup.servers] == [num_loads, num_loads]


async def ended(setup: Setup) -> str:
    """Wait until the manager ends the run. Returns the cause, and closes everything."""
    with pytest.raises(RunEndedError) as caught:
        await asyncio.wait_for(setup.task, LIMIT_S)
    await setup.session.close()
    for server in setup.servers:
        await server.stop()
    setup.resolver.clear_subtree(setup.names.root)
    setup.resolver.close()
    return str(caught.value)


async def test_servers_that_refuse_the_managers_key_from_the_start_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_plan, "FIRST_RETRY_S", 0.01)
    setup = Setup(tmp_path)
    await setup.start()
    (await setup.add_server()).refuses_key = True
    setup.publish(0)
    assert re.search(
        r"no generation server can load the weights .*/get_model_info answered 401: unknown key", await ended(setup)
    )


async def test_servers_that_begin_to_refuse_the_managers_key_end_the_run(tmp_path: Path) -> None:
    setup = Setup(tmp_path, update_timeout_s=1.0, lease_s=1.0)
    await setup.start()
    server = await setup.add_server()
    setup.publish(0)
    await setup.until_served(0)
    server.refuses_key = True
    assert re.match(
        r"no generation server may serve for 1 s \(manager\.update_timeout_s\), so the run ends\. generation_server/0 .* is dead: "
        r"silent for .* s: health probe failed: .*answered 401: unknown key",
        await ended(setup),
    )


async def test_a_run_without_servers_ends_after_a_limit(tmp_path: Path) -> None:
    setup = Setup(tmp_path, update_timeout_s=0.5)
    setup.config = replace(
        setup.config,
        replace_timeout_s=0.5,
        worker=replace(setup.info, runtime=replace(setup.info.runtime, start_timeout_s=1.0)),
    )
    await setup.start()
    await setup.report(full=True)
    assert (await setup.allocate()).refusal == "no_server"
    assert (await ended(setup)).startswith("no generation server may serve for 2 s (manager.update_timeout_s + train.")


async def test_a_server_that_refuses_a_version_is_left_out_while_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, loads this version no more, and tries the next one."""
    monkeypatch.setattr(update_plan, "FIRST_RETRY_S", 0.01)
    async with running(tmp_path) as setup:
        unfit, _ = await setup.add_server(), await setup.add_server()
        unfit.broken = "permanent"
        setup.publish(0)
        given_up = "refused: broken a0001-v00000000 (permanent); it serves nothing until a newer version"
        await setup.poll(lambda: f"generation_server/0 did not load a0001-v00000000: {given_up}" in caplog.text)
        await setup.until_served(0)
        assert {ticket.server for ticket in (await setup.allocate(4)).tickets} == {"generation_server/1"}
        assert unfit.num_refusals == 3
        unfit.broken = ""
        setup.publish(1)
        await setup.all_serve(1)


async def test_a_server_that_computes_with_other_weights_is_left_out_while_others_serve(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        wrong, _ = await setup.add_server(), await setup.add_server()
        wrong.mismatch = True
        setup.publish(0)
        await setup.until_served(0)
        await setup.poll(lambda: setup.manager.seen.fleet.counters["mismatched", "generation_server/0"] >= 3)
        assert {ticket.server for ticket in (await setup.allocate(4)).tickets} == {"generation_server/1"}
        assert (await setup.heartbeat()).dead == [setup.manager.seen.table.servers["generation_server/0"].url]
        wrong.mismatch = False
        await setup.all_serve(0)


async def test_weights_that_no_server_computes_with_end_the_run(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    await setup.start()
    server = await setup.add_server()
    server.mismatch = True
    setup.publish(0)
    with pytest.raises(RunEndedError, match=r"no server computes with weights a0001-v00000000 .* differ by 3\.1"):
        await asyncio.wait_for(setup.task, LIMIT_S)
    assert len(server.loads) == 3
    await setup.session.close()
    await server.stop()
    setup.resolver.clear_subtree(setup.names.root)
    setup.resolver.close()


async def test_one_mismatch_of_a_server_that_has_gone_does_not_end_the_run(tmp_path: Path) -> None:
    """The name of the only server disappears while the server loads, so no live server has failed the check."""
    async with running(tmp_path) as setup:
        server = await setup.add_server()
        server.mismatch = True
        server.gate.clear()
        setup.publish(0)
        await asyncio.wait_for(server.loading.wait(), LIMIT_S)
        setup.resolver.delete(setup.names.generation_server(0))
        await setup.poll(lambda: setup.manager.seen.table.servers["generation_server/0"].state is ServerState.DEAD)
        server.gate.set()
        await setup.poll(lambda: setup.manager.seen.fleet.counters["mismatched", "generation_server/0"] >= 1)
        assert (await setup.report(full=True)).served_version == -1  # the manager answers


async def test_broken_weights_never_reach_a_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as setup:
        server = await setup.add_server()
        setup.publish(0)
        await setup.all_serve(0)
        with caplog.at_level(logging.ERROR):
            path = setup.write_weights(WeightVersion(1, 1))
            (path / "model.safetensors").write_bytes(b"torn")
            setup.publish(1, write=False)
            await setup.poll(lambda: setup.manager.seen.fleet.counters["refused_manifest", ""] >= 1)
        assert "model.safetensors has 4 bytes" in caplog.text
        setup.publish(0, write=False)  # back to v0: ignored
        setup.resolver.add(setup.names.model_version("actor"), "nonsense", replace=True)
        setup.publish(2)
        await setup.all_serve(2)
        assert server.loads == [str(WeightVersion(1, 0)), str(WeightVersion(1, 2))]


async def test_a_dead_server_leaves_and_comes_back_through_a_load(tmp_path: Path) -> None:
    async with running(tmp_path) as setup:
        await setup.add_server()
        other = await setup.add_server()
        setup.publish(0)
        await setup.all_serve(0)
        (ticket,) = [t for t in (await setup.allocate(2)).tickets if t.server == "generation_server/1"]
        await other.stop()
        body = {"ticket_id": ticket.ticket_id, "worker": "rollout_worker/0", "lost_server": "generation_server/1"}
        async with setup.session.post(setup.url + "/schedule_request", data=msgspec.json.encode(body)) as response:
            assert (await response.json())["server"] == "generation_server/0"
        setup.resolver.delete(setup.names.generation_server(1))
        await setup.poll(lambda: setup.manager.seen.table.servers["generation_server/1"].state.value == "dead")
        reborn = FakeServer()
        setup.servers[1] = reborn
        setup.resolver.add(setup.names.generation_server(1), await reborn.start(), replace=True)
        await setup.all_serve(0)
        assert reborn.loads == [str(WeightVersion(1, 0))]


async def test_a_restarted_server_at_its_old_address_is_noticed(setup: Setup) -> None:
    (server,) = setup.servers
    server.version = ""  # the new process has loaded nothing
    await setup.poll(lambda: len(server.loads) == 2)
    await setup.all_serve(0)


# ---------------------------------------------------------------------------------------------------- a manager's successor


async def test_a_new_manager_goes_on_as_soon_as_it_has_heard_everybody(tmp_path: Path) -> None:
    """The lease is an hour, so nothing here may wait for it. Servers with the right version are not interrupted."""
    async with running(tmp_path, lease_s=3600.0) as setup:
        server, behind = await setup.add_server(), await setup.add_server()
        setup.publish(0)
        await setup.all_serve(0)
        held, stored, finished = ids(await setup.allocate(3))
        await setup.finish(stored)
        await setup.report(stored=[stored])
        await setup.stop_manager()
        setup.publish(1)
        server.version = str(WeightVersion(1, 1))  # the old manager had it load the new version, and then died
        await setup.start_manager()
        assert (await setup.heartbeat(held)).revoked == []
        assert (await setup.finish(finished)).unknown == []
        view = await setup.report(stored=[stored], full=True)
        assert not view.settled
        assert (await setup.allocate(worker=1)).refusal == "not_ready"
        waiting = asyncio.create_task(setup.allocate(100, wait_s=60.0, worker=1))
        beat = asyncio.create_task(setup.heartbeat(worker=1))
        fresh = await asyncio.wait_for(waiting, LIMIT_S)
        assert (await beat).revoked == []
        assert [ticket.locator.position for ticket in fresh.tickets] == [3]
        assert [ticket.min_version for ticket in fresh.tickets] == [1]
        view = await setup.until_view(lambda view: view.settled)
        states = {live.ticket_id: live.state for live in view.live}
        assert states == {held: "running", stored: "stored", finished: "stored", ids(fresh)[0]: "running"}
        await setup.all_serve(1)
        assert server.loads == [str(WeightVersion(1, 0))]
        assert behind.loads == [str(WeightVersion(1, 0)), str(WeightVersion(1, 1))]
        assert setup.manager.seen.fleet.counters["found", "generation_server/0"] == 1
        await setup.stop_manager()
        events = [(record["event"], record["ticket"]) for record in setup.journal()]
        assert events[:3] == [("admitted", held), ("admitted", stored), ("admitted", finished)]
        assert set(events[3:6]) == {("adopted", held), ("adopted", stored), ("adopted", finished)}
        assert events[6:] == [("admitted", ids(fresh)[0])]
        await setup.start_manager()


async def test_a_server_that_was_being_updated_when_the_manager_died_loads(tmp_path: Path) -> None:
    """The server reports the version but is paused. The progress of that update is unknown."""
    async with running(tmp_path) as setup:
        server = await setup.add_server()
        setup.publish(0)
        await setup.all_serve(0)
        await setup.stop_manager()
        server.paused = True
        await setup.start_manager()
        await setup.all_serve(0)
        assert server.loads == [str(WeightVersion(1, 0))] * 2
        assert not server.paused


async def test_a_server_that_somebody_else_has_paused_loads(setup: Setup) -> None:
    """A manager that was frozen may continue an update that its successor completed long ago."""
    (server,) = setup.servers
    server.paused = True
    await setup.poll(lambda: len(server.loads) == 2)
    await setup.all_serve(0)
    assert not server.paused


async def test_evaluations_go_on_at_a_new_manager(setup: Setup) -> None:
    body = {"eval_id": "e", "parts": [{"eval_set": "s", "mode": "greedy", "num_prompts": 1}]}
    assert not (await setup.post("/evaluate", body, EvaluateReply)).done
    (old,) = (await setup.allocate()).tickets
    assert old.kind == "eval"
    await setup.stop_manager()
    await setup.start_manager()
    assert not (await setup.post("/evaluate", body, EvaluateReply)).done  # the master asks until it is done
    await setup.report(full=True)
    await setup.heartbeat(old.ticket_id)
    await setup.heartbeat(worker=1)
    (again,) = (await setup.allocate(wait_s=10.0)).tickets
    assert (again.eval_id, again.locator) == ("e", old.locator)
    assert again.ticket_id != old.ticket_id
    done = {"group": group(3, rewards=[1.0])}
    assert (await setup.finish(old.ticket_id, outcome="evaluated", **done)).unknown == [old.ticket_id]
    await setup.finish(again.ticket_id, outcome="evaluated", **done)
    (result,) = (await setup.post("/evaluate", body, EvaluateReply)).results
    assert result.group is not None
    assert result.group.rewards == [1.0]


async def test_a_manager_whose_place_is_taken_ends(setup: Setup) -> None:
    setup.resolver.add(setup.names.gserver_manager(), "http://127.0.0.1:9", replace=True)
    with pytest.raises(RuntimeError, match="another gserver manager has replaced this one, at http://127"):
        await asyncio.wait_for(setup.task, LIMIT_S)
    setup.resolver.delete(setup.names.gserver_manager())
    await setup.start_manager()


# ------------------------------------------------------------------------------------------------ another attempt's master


async def test_a_new_attempt_begins_with_its_weights_and_may_go_back(setup: Setup) -> None:
    """The trainer group was restarted from a checkpoint. The manager, the servers and the rollout workers were not."""
    (server,) = setup.servers
    for version in (1, 2):
        setup.publish(version)
        await setup.report(trained_version=version)
    await setup.all_serve(2)
    held = ids(await setup.allocate(2))
    setup.publish(1, attempt=2)
    await setup.poll(lambda: server.version == str(WeightVersion(2, 1)))
    assert (await setup.heartbeat(*held)).revoked == held
    async with setup.session.post(
        setup.url + "/report",
        data=msgspec.json.encode({"attempt": 1, "trained_version": 3, "consumed": [], "stored": []}),
    ) as response:
        assert response.status == 409
    assert (await setup.allocate()).refusal == "not_ready"
    setup.publish(3)  # by a master that was frozen
    assert not (await setup.report(attempt=2, trained_version=1)).known
    view = await setup.report(attempt=2, trained_version=1, full=True)
    assert view.settled
    assert view.live == []
    (ticket,) = (await setup.allocate(wait_s=10.0)).tickets
    assert (ticket.attempt, ticket.min_version, ticket.deadline) == (2, 1, 1 + ETA)
    assert server.loads[-1] == str(WeightVersion(2, 1))


@pytest.mark.parametrize("forgotten", ["nothing", "keys", "journal"])
async def test_a_new_manager_with_an_old_config_does_not_fall_back(setup: Setup, forgotten: str) -> None:
    setup.publish(0, attempt=2)
    await setup.poll(lambda: setup.manager.seen.ledger.attempt == 2)
    await setup.report(attempt=2, full=True)
    (held,) = ids(await setup.allocate(wait_s=10.0))
    await setup.stop_manager()
    if forgotten == "keys":  # as after an etcd restart without its data
        setup.resolver.delete(setup.names.gserver_manager_began())
        setup.resolver.delete(setup.names.model_version("actor"))
    if forgotten == "journal":
        (setup.run_dir / "journal" / "gserver_manager.jsonl").unlink()
    await setup.start_manager()
    assert setup.config.worker.attempt == 1
    await setup.heartbeat(held)
    await setup.poll(lambda: setup.manager.seen.ledger.attempt == 2)
    assert (await setup.heartbeat(held)).revoked == []
    view = await setup.report(attempt=2, full=True)
    assert [live.ticket_id for live in view.live] == [held]


async def test_a_new_manager_waits_a_lease_and_takes_over_what_is_held(tmp_path: Path) -> None:
    async with serving_one(tmp_path, lease_s=SHORT_LEASE_S) as setup:
        held, stored = ids(await setup.allocate(2))
        await setup.finish(stored)
        await setup.report(stored=[stored])
        await setup.stop_manager()
        await setup.start_manager()
        assert not (await setup.report(stored=[stored])).known
        view = await setup.report(stored=[stored], full=True)
        assert (await setup.allocate(worker=1)).refusal == "not_ready"
        assert (await setup.heartbeat(held)).revoked == []
        view = await setup.report(stored=[stored])
        assert {(live.ticket_id, live.state) for live in view.live} == {(held, "running"), (stored, "stored")}

        async def beat() -> None:
            while True:
                await setup.heartbeat(held)
                await asyncio.sleep(HEARTBEAT_S)

        beating = asyncio.create_task(beat())
        fresh = await asyncio.wait_for(setup.allocate(100, wait_s=30.0, worker=1), LIMIT_S)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        assert [ticket.locator.position for ticket in fresh.tickets] == [2, 3]
