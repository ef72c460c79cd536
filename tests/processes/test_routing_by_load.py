"""Routing by the servers' reported load, full queues, a server that leaves: a real manager, engines and client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from test_manager_http import Setup, running

from asyncrl.config.processes import GenerationServerConfig
from asyncrl.config.schema import GenerationConfig, SamplingConfig
from asyncrl.generation.worker import GenerationServer
from asyncrl.protocol.generation import LoadsReply
from asyncrl.protocol.manager import HeartbeatReply, ScheduleReply, Ticket
from asyncrl.protocol.scaling import DesiredServers
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Response
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version
from tests.support.memory_names import memory_system
from tests.support.services import make_services

LOGGER = logging.getLogger("test_routing_by_load")
SERVERS = ["generation_server/0", "generation_server/1"]
PROMPT = [5, 6, 7, 8]
LONG = 900  # tokens of a response that must still run when its server leaves; eight such responses fit on a server
WORKER = "rollout_worker/0"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=32, intermediate_size=64, num_layers=1, max_positions=2048)
    return path


@contextlib.asynccontextmanager
async def serving(setup: Setup, model_path: Path, **options: int) -> AsyncIterator[list[str]]:
    """Two real generation servers, which announce themselves and serve v0. Yields their URLs."""
    sizes = {"max_running_requests": 16, "max_batch_tokens": 256, "num_blocks": 512, "page_size": 16}
    servers = [
        GenerationServer(
            GenerationServerConfig(
                worker=replace(setup.info, kind="generation_server", index=index, count=2),
                engine="transformers",
                model_path=str(model_path),
                tokenizer_path=str(model_path),
                generation=GenerationConfig(**{**sizes, **options}),
                torch_threads=1,
            ),
            memory_system(),
        )
        for index in range(2)
    ]
    mains: list[asyncio.Task[None]] = []
    try:
        for index, server in enumerate(servers):  # one at a time: transformers cannot load two models at once
            mains.append(asyncio.create_task(server.main()))
            await asyncio.to_thread(setup.resolver.wait, setup.names.generation_server(index), 60.0)
        tensors = make_tiny_model(None, hidden_size=32, intermediate_size=64, num_layers=1).named_parameters()
        version = WeightVersion(1, 0)
        path = version_dir(setup.run_dir, "actor", version)
        write_version(path, ((n, p.detach()) for n, p in tensors), source_dir=model_path, version=version, fsync=False)
        setup.publish(0, write=False)
        await asyncio.wait_for(both_serve(setup), 60)
        yield [setup.manager.seen.table.servers[name].url for name in SERVERS]
    finally:
        for server in servers:
            server.stopping.set()
        await asyncio.wait_for(asyncio.gather(*mains), 30)


async def both_serve(setup: Setup) -> None:
    view = await setup.report(full=True)
    while [server.state for server in view.servers] != ["healthy"] * 2:
        view = await setup.report(after_revision=view.revision, wait_s=10.0)


class Chooser:
    """A rollout worker's calls to the manager."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    async def schedule(self, ticket_id: str, lost_server: str, *, lost_url: str, busy: bool = False) -> ScheduleReply:
        body = {
            "ticket_id": ticket_id, "worker": WORKER, "lost_server": lost_server, "lost_url": lost_url, "busy": busy
        }  # fmt: skip
        return await self.setup.post("/schedule_request", body, ScheduleReply)


@contextlib.asynccontextmanager
async def a_client(setup: Setup) -> AsyncIterator[PartialRolloutManager]:
    client = PartialRolloutManager(
        Chooser(setup),
        make_services(setup.info, logger=LOGGER),
        new_tokens_per_chunk=1024,
        request_timeout_s=60.0,
        turn_limit_s=60.0,
        max_requests=64,
    )
    try:
        yield client
    finally:
        await client.close()


async def beat(setup: Setup, client: PartialRolloutManager, tickets: Sequence[Ticket]) -> None:
    """Send heartbeats as a rollout worker does, and apply the moves in the replies."""
    while True:
        body = {"worker": WORKER, "incarnation": "a", "held": [ticket.ticket_id for ticket in tickets]}
        for moved in (await setup.post("/heartbeat", body, HeartbeatReply)).moved:
            client.move(moved.ticket_id, moved.server, moved.server_url)
        await asyncio.sleep(0.05)


async def keep_busy(setup: Setup, url: str, first: int) -> None:
    """Request long responses as another client, one after another. The first has `first` tokens, so that the responses of several
    such clients end at different times."""
    for number in itertools.count():
        body = {
            "input_ids": PROMPT,
            "rid": f"other {asyncio.current_task()} {number}",
            "sampling_params": {"max_new_tokens": 400 if number else first, "ignore_eos": True},
        }
        async with setup.session.post(f"{url}/generate", data=msgspec.json.encode(body)) as response:
            assert response.status == 200
            await response.read()


async def loads(setup: Setup, url: str) -> LoadsReply:
    async with setup.session.get(f"{url}/v1/loads") as response:
        assert response.status == 200
        return msgspec.json.decode(await response.read(), type=LoadsReply)


async def test_a_loaded_server_gets_fewer_groups(tmp_path: Path, model_path: Path) -> None:
    async with (
        running(tmp_path, routing="least_token_usage", max_head_offpolicyness=9) as setup,
        serving(setup, model_path) as urls,
    ):
        table = setup.manager.seen.table
        assert [load.num_total_tokens for load in (await loads(setup, urls[0])).loads] == [0]
        others = [asyncio.create_task(keep_busy(setup, urls[0], 50 * (n + 1))) for n in range(8)]
        await setup.poll(lambda: table.servers[SERVERS[0]].used_tokens > 200)
        (load,) = (await loads(setup, urls[0])).loads
        assert 1 <= load.num_running_reqs <= 8
        tickets = (await setup.allocate(6)).tickets
        counts = Counter(ticket.server for ticket in tickets)
        assert counts[SERVERS[1]] == 6, f"{counts}, {table.servers}"
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # A client that disconnects ends its requests. The other server's promised tokens are in its reported load by now.
        await setup.poll(lambda: not any(s.used_tokens + s.promised_tokens for s in table.servers.values()))
        assert {ticket.server for ticket in (await setup.allocate(2)).tickets} == set(SERVERS)


async def test_full_queues_lose_no_ticket(tmp_path: Path, model_path: Path) -> None:
    """Two groups of eight go to two servers that take three requests each."""
    async with (
        running(tmp_path, max_head_offpolicyness=1) as setup,
        serving(setup, model_path, max_running_requests=2, max_queue=1),
        a_client(setup) as client,
    ):
        tickets = (await setup.allocate(2)).tickets
        sampling = SamplingConfig(max_new_tokens=24, greedy=True)  # with greedy decoding this model never samples EOS
        beating = asyncio.create_task(beat(setup, client, tickets))
        groups = await asyncio.gather(
            *(client.generate(Route(ticket), [PROMPT] * 8, sampling, []) for ticket in tickets)
        )
        beating.cancel()
        assert [len(response.output_ids) for group in groups for response in group] == [24] * 16
        assert client.counts.retried > 0  # the queues were full
        await setup.finish(*[ticket.ticket_id for ticket in tickets])
        assert not [what for what, _ in setup.manager.seen.ledger.counters if what == "released"]
        assert {server.state.value for server in setup.manager.seen.table.servers.values()} == {"healthy"}


async def test_a_server_that_leaves_hands_its_groups_over_and_loses_no_token(tmp_path: Path, model_path: Path) -> None:
    async with (
        running(tmp_path, drain_timeout_s=0.1, max_head_offpolicyness=1) as setup,
        serving(setup, model_path),
        a_client(setup) as client,
    ):
        tickets = (await setup.allocate(2)).tickets
        (leaving,) = [ticket for ticket in tickets if ticket.server == SERVERS[1]]
        sampling = SamplingConfig(max_new_tokens=LONG, greedy=True)
        beating = asyncio.create_task(beat(setup, client, tickets))
        routes = [Route(ticket) for ticket in tickets]
        generating = [asyncio.ensure_future(client.generate(route, [PROMPT] * 4, sampling, [])) for route in routes]
        table = setup.manager.seen.table
        url = table.servers[SERVERS[1]].url

        async def has_begun() -> None:
            while (await loads(setup, url)).loads[0].num_used_tokens < 4 * 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        await asyncio.wait_for(has_begun(), 30)
        desired = msgspec.json.encode(DesiredServers(count=1, id="one")).decode()
        setup.resolver.add(setup.names.desired_generation_servers(), desired, replace=True)
        await setup.poll(lambda: table.servers[SERVERS[1]].state.value == "draining")
        drained = await asyncio.to_thread(setup.resolver.wait, setup.names.generation_server_drained(1), 30.0)
        assert drained == "one"
        assert (await loads(setup, url)).loads[0].num_running_reqs == 0
        groups: list[list[Response]] = await asyncio.wait_for(asyncio.gather(*generating), 60)
        beating.cancel()
        assert {route.server for route in routes} == {SERVERS[0]}
        assert [len(response.output_ids) for group in groups for response in group] == [LONG] * 8
        assert (client.counts.moved, client.counts.tokens) == (1, LONG * 8)  # no token generated twice, none discarded
        assert setup.manager.seen.ledger.counters["moved", "drained"] == 1
        await setup.finish(*[ticket.ticket_id for ticket in tickets])
        assert leaving.server != routes[0].server
        assert {ticket.server for ticket in (await setup.allocate(2)).tickets} == {SERVERS[0]}

        setup.resolver.add(setup.names.desired_generation_servers(), desired.replace("1", "2"), replace=True)
        await asyncio.wait_for(both_serve(setup), 30)  # the server is desired again, and loads
