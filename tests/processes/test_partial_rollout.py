"""The generation client against real HTTP servers: chunks, interruptions, lost servers, versions, bounds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from rollout_fakes import LIMIT_S, FakeGenerationServer, continuation, logprob_of

from asyncrl.config.schema import SamplingConfig
from asyncrl.protocol.manager import TRAININGS_TURN, ScheduleReply, Ticket
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import RolloutRejected, RolloutReleased
from asyncrl.rollout.client import PartialRolloutManager, Pauses, Route
from asyncrl.runtime.services import Services
from tests.support.services import make_services

LOGGER = logging.getLogger("test_partial_rollout")
SAMPLING = SamplingConfig(max_new_tokens=32)
PROMPT = [3, 1, 4]
V1, V2 = (WeightVersion(1, version).pack() for version in (1, 2))

MakeClient = Callable[..., Awaitable[PartialRolloutManager]]


class Chooser:
    """Acts as the manager's /schedule_request: each call removes the first of `servers` and returns it, or "no_server"."""

    def __init__(self) -> None:
        self.servers: list[FakeGenerationServer] = []
        self.lost: list[str] = []
        self.busy = 0  # number of calls that gave a busy server as their reason
        self.turns: list[str] = []  # reasons of the next answers, which name no server

    async def schedule(self, ticket_id: str, lost_server: str, *, busy: bool, **_: object) -> ScheduleReply:
        self.lost.append(lost_server)
        self.busy += busy
        if self.turns:
            return ScheduleReply(reason=self.turns.pop(0))
        if not self.servers:
            return ScheduleReply(reason="no_server")
        server = self.servers.pop(0)
        return ScheduleReply(server=server.name, server_url=server.url)


def ticket_at(server: FakeGenerationServer, ticket_id: str = "t0", min_version: int = 1) -> Ticket:
    return Ticket(
        ticket_id=ticket_id,
        kind="train",
        locator=Locator(0, 0),
        attempt=1,
        min_version=min_version,
        deadline=min_version + 2,
        server=server.name,
        server_url=server.url,
        head=0,
    )


@pytest.fixture
def chooser() -> Chooser:
    return Chooser()


@pytest.fixture
def services() -> Services:
    return make_services(logger=LOGGER)


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeGenerationServer]]:
    made = [FakeGenerationServer(f"generation_server/{index}") for index in range(2)]
    for server in made:
        await server.start()
    yield made
    for server in made:
        await server.stop()


@pytest.fixture
async def make_client(chooser: Chooser, services: Services) -> AsyncIterator[MakeClient]:
    # Generous limits: past them, a server on a busy machine counts as lost, and an abort is not sent.
    limits = Pauses(abort_limit_s=LIMIT_S, connect_limit_s=LIMIT_S)
    made: list[PartialRolloutManager] = []

    async def make(pauses: dict[str, Any] | None = None, **options: Any) -> PartialRolloutManager:
        defaults = {
            "new_tokens_per_chunk": 16,
            "request_timeout_s": LIMIT_S,
            "turn_limit_s": LIMIT_S,
            "max_requests": 128,
        }
        options["pauses"] = replace(limits, **(pauses or {}))
        client = PartialRolloutManager(chooser, services, **{**defaults, **options})
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


async def test_long_responses_take_one_request_a_chunk(
    servers: list[FakeGenerationServer], make_client: MakeClient
) -> None:
    client = await make_client()
    sampling = replace(SAMPLING, max_new_tokens=128)
    prompts = [[index, 2, 3] for index in range(8)]
    groups = await asyncio.gather(
        *(
            client.generate(Route(ticket_at(servers[0], f"t{index}")), [prompt] * 10, sampling, [0])
            for index, prompt in enumerate(prompts)
        )
    )
    assert len(servers[0].requests) == client.counts.requests == 8 * 10 * 128 // 16
    assert client.counts.tokens == 8 * 10 * 128
    assert len({request.rid for request in servers[0].requests}) == len(servers[0].requests)
    for prompt, group in zip(prompts, groups, strict=True):
        expected = continuation(prompt, 128)
        assert all(response.output_ids == expected and not response.finished for response in group)


async def test_a_response_ends_with_eos(servers: list[FakeGenerationServer], make_client: MakeClient) -> None:
    servers[0].eos_at = len(PROMPT) + 20
    client = await make_client()
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.finished
    assert response.output_ids == [*continuation(PROMPT, 19), 0]  # EOS is kept
    assert [request.sampling_params.max_new_tokens for request in servers[0].requests] == [16, 16]
    assert servers[0].requests[0].sampling_params.stop_token_ids == [0]


async def test_the_last_chunk_asks_for_no_more_than_is_left(
    servers: list[FakeGenerationServer], make_client: MakeClient
) -> None:
    client = await make_client(new_tokens_per_chunk=20)
    await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert [request.sampling_params.max_new_tokens for request in servers[0].requests] == [20, 12]


async def test_a_response_without_room_for_a_token_is_a_mistake_of_the_agent(
    servers: list[FakeGenerationServer], make_client: MakeClient
) -> None:
    client = await make_client()
    sampling = replace(SAMPLING, max_new_tokens=0)
    with pytest.raises(ValueError, match="max_new_tokens is 0; it must be at least 1"):
        await client.generate(Route(ticket_at(servers[0])), [PROMPT], sampling, [0])
    assert servers[0].requests == []


async def test_an_interruption_resumes_on_the_same_server_with_versions_exact(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    server = servers[0]
    server.script.extend([None, 5])  # a full chunk, then an update after 5 tokens
    server.version_after_interrupt = 2
    client = await make_client()
    (response,) = await client.generate(Route(ticket_at(server)), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert response.logprobs == [logprob_of(token) for token in response.output_ids]
    assert response.versions == [(V1, 21), (V2, 11)]
    assert [len(request.input_ids) for request in server.requests] == [3, 19, 24]
    # A continued response goes before new requests
    assert [request.priority for request in server.requests] == [0, 1, 1]
    assert client.counts.interrupted == 1
    assert chooser.lost == []


async def test_a_group_stays_on_one_server_over_pieces_updates_and_steps(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    """The server that the group stays on has the group's prefixes in its cache."""
    server, other = servers
    server.script.extend([None, 7, 3, 0])  # updates in the middle
    server.version_after_interrupt = 2
    client = await make_client()
    route = Route(ticket_at(server))
    inputs = [[index, *PROMPT] for index in range(6)]
    first = await client.generate(route, inputs, SAMPLING, [0])
    second = await client.generate(route, [response.output_ids for response in first], SAMPLING, [0])
    assert [response.output_ids for response in first] == [continuation(input_ids, 32) for input_ids in inputs]
    assert len(second) == 6
    assert len(server.requests) == 6 * 2 * 2 + client.counts.interrupted
    assert client.counts.interrupted == 3
    assert (other.requests, chooser.lost, route.server) == ([], [], server.name)


async def test_a_ticket_whose_server_leaves_goes_on_elsewhere_with_what_it_has(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    """No token is generated twice. Tokens that the leaving server has already sampled are kept."""
    first, second = servers
    first.version, second.version = 1, 2
    first.hold_beyond = 1 + len(PROMPT)
    first.hold.clear()
    client = await make_client()
    inputs = [[index, *PROMPT] for index in range(3)]
    route = Route(ticket_at(first))
    generating = asyncio.ensure_future(client.generate(route, inputs, SAMPLING, [0]))
    await first.wait_for_requests(6)  # the second piece of every response has been requested
    assert not client.move("another ticket", second.name, second.url)
    assert client.move("t0", second.name, second.url)
    assert not client.move("t0", second.name, second.url)  # a repeated notice
    responses = await asyncio.wait_for(generating, LIMIT_S)
    for input_ids, response in zip(inputs, responses, strict=True):
        assert response.output_ids == continuation(input_ids, 32)
        assert response.versions == [(V1, 16 + 5), (V2, 11)]
    assert {len(request.input_ids) for request in second.requests} == {4 + 16 + 5}
    assert set(first.aborted) == {request.rid for request in first.requests if len(request.input_ids) > 4}
    assert (route.server, client.counts.moved, chooser.lost, route.out) == (second.name, 1, [], {})


async def test_a_full_queue_is_waited_for_and_then_left(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    first, second = servers
    first.script.extend(web.Response(status=503) for _ in range(6))
    first.script_beyond = 1 + len(PROMPT)  # only second pieces take from the script
    chooser.servers = [second]
    client = await make_client({"busy_s": (0.0, 0.0)})
    route = Route(ticket_at(first))
    responses = await client.generate(route, [[1, *PROMPT], [2, *PROMPT]], SAMPLING, [0])
    assert [response.output_ids for response in responses] == [continuation([n, *PROMPT], 32) for n in (1, 2)]
    assert (chooser.lost, chooser.busy, route.server) == ([first.name], 1, second.name)
    assert {len(request.input_ids) for request in second.requests} == {4 + 16}


async def test_servers_that_are_full_for_long_lose_no_ticket(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    """The servers stay full for longer than the client would retry a lost server."""
    servers[0].script.extend(web.Response(status=503) for _ in range(40))
    chooser.servers = [servers[0]] * 20  # the manager says that no other server has room
    client = await make_client({"busy_s": (0.0,)})
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert (chooser.busy, client.counts.moved) == (20, 0)


async def test_a_server_that_stays_full_gives_the_ticket_back_in_the_end(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    servers[0].script.extend(web.Response(status=503) for _ in range(1000))
    chooser.servers = [servers[0]] * 1000
    client = await make_client({"busy_s": (0.02, 0.02)}, request_timeout_s=0.3)
    with pytest.raises(RolloutReleased, match=r"no server took a request within 0\.3 s") as caught:
        await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert caught.value.reason == "servers_busy"


async def test_interruptions_without_a_token_are_bounded(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    servers[0].script.extend([0] * 4)
    chooser.servers = [servers[1]]
    client = await make_client({"empty_abort_s": (0.0, 0.0, 0.0)})
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert (len(servers[0].requests), chooser.lost) == (4, ["generation_server/0"])


async def test_a_dead_server_is_left_once_for_the_whole_group_and_nothing_is_lost(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    first, second = servers
    first.version, second.version = 1, 2
    client = await make_client()
    chooser.servers = [second]
    inputs = [[index, *PROMPT] for index in range(6)]
    route = Route(ticket_at(first))
    first.hold.clear()
    first.hold_beyond = 1 + len(PROMPT)
    generating = asyncio.ensure_future(client.generate(route, inputs, SAMPLING, [0]))
    await first.wait_for_requests(12)  # the second chunk of every response has been requested
    await first.stop()
    responses = await generating
    assert chooser.lost == ["generation_server/0"]
    assert (route.server, client.counts.moved) == ("generation_server/1", 1)
    for input_ids, response in zip(inputs, responses, strict=True):
        assert response.output_ids == continuation(input_ids, 32)
        assert response.versions == [(V1, 16), (V2, 16)]
    assert {len(request.input_ids) for request in second.requests} == {4 + 16}


async def test_short_hiccups_stay_on_the_server(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    servers[0].script.extend(["disconnect", web.Response(status=500), web.Response(status=503)])
    client = await make_client({"busy_s": (0.0, 0.0)})
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert (client.counts.retried, chooser.lost) == (3, [])


@pytest.mark.parametrize("trouble", [lambda: web.Response(status=500), lambda: "garbage"])
async def test_a_server_that_keeps_failing_is_left(
    servers: list[FakeGenerationServer],
    make_client: MakeClient,
    chooser: Chooser,
    trouble: Callable[[], Any],
) -> None:
    servers[0].script.extend(trouble() for _ in range(3))
    chooser.servers = [servers[1]]
    client = await make_client({"retry_s": (0.0, 0.0)})
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert chooser.lost == ["generation_server/0"]


async def test_failures_in_a_row_give_the_ticket_back(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    for server in servers:
        server.script.extend(["garbage"] * 10)
    chooser.servers = [*servers, *servers, *servers]
    client = await make_client({"schedule_s": (0.0,)})
    with pytest.raises(RolloutReleased) as caught:
        await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert caught.value.reason == "server_lost"
    assert len(chooser.lost) == 4


async def test_no_server_to_be_had_gives_the_ticket_back(make_client: MakeClient, chooser: Chooser) -> None:
    gone = FakeGenerationServer()
    await gone.start()
    await gone.stop()
    client = await make_client({"schedule_s": (0.0, 0.05)}, request_timeout_s=0.3)
    with pytest.raises(RolloutReleased) as caught:
        await client.generate(Route(ticket_at(gone)), [PROMPT] * 3, SAMPLING, [0])
    assert caught.value.reason == "no_server"
    assert len(chooser.lost) >= 2  # the client asked again


async def test_responses_wait_for_the_end_of_trainings_turn_with_their_tokens(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    """Servers sleep for longer than request_timeout_s. After it they have other weights, and are full for a moment."""
    server, chunk = servers[0], len(PROMPT) + 1 + 16
    server.script_beyond = len(PROMPT) + 1  # the second piece of each response is interrupted, then the server sleeps
    server.script.extend([5, 5, *(web.Response(status=503) for _ in range(6))])
    server.version_after_interrupt = 2
    chooser.turns = ["no_server", *[TRAININGS_TURN] * 8]
    chooser.servers = [server] * 20
    client = await make_client({"busy_s": (0.0,), "schedule_s": (0.1,)}, request_timeout_s=0.5)
    route = Route(ticket_at(server))
    began = time.monotonic()
    responses = await client.generate(route, [[1, *PROMPT], [2, *PROMPT]], SAMPLING, [0])
    assert [response.output_ids for response in responses] == [continuation([n, *PROMPT], 32) for n in (1, 2)]
    assert {len(request.input_ids) for request in server.requests} == {len(PROMPT) + 1, chunk, chunk + 5}
    held_s = time.monotonic() - route.without_turns(time.monotonic())
    assert 0.7 < held_s < time.monotonic() - began
    assert chooser.turns == []


async def test_a_turn_of_training_has_a_limit(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    servers[0].script.extend(web.Response(status=503) for _ in range(100))
    chooser.turns = [TRAININGS_TURN] * 1000
    client = await make_client({"busy_s": (0.0,), "schedule_s": (0.02,)}, turn_limit_s=0.2)
    with pytest.raises(RolloutReleased, match=r"waited 0\.2 s for the end of training's turn from master") as caught:
        await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert caught.value.reason == "long_turn"


async def test_a_frozen_server_is_left_after_the_timeout(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    servers[0].hold.clear()
    chooser.servers = [servers[1]] * 4  # a busy machine may delay these servers too
    client = await make_client(request_timeout_s=1.0)
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert chooser.lost[0] == servers[0].name
    assert len(servers[0].requests) == 1
    servers[0].hold.set()


async def test_a_server_that_is_said_to_be_dead_is_left_at_once(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    """The client leaves the server long before the timeout. It keeps the tokens that were answered. The others are generated again
    elsewhere."""
    first, second = servers
    first.hold_beyond = 1 + len(PROMPT)
    first.hold.clear()
    chooser.servers = [second]
    client = await make_client(request_timeout_s=1000.0)
    inputs = [[index, *PROMPT] for index in range(3)]
    other = asyncio.ensure_future(client.generate(Route(ticket_at(second)), [PROMPT], SAMPLING, [0]))
    generating = asyncio.ensure_future(client.generate(Route(ticket_at(first)), inputs, SAMPLING, [0]))
    await first.wait_for_requests(6)
    assert client.leave(["http://127.0.0.1:1"]) == 0
    assert client.leave([first.url]) == 3
    responses = await asyncio.wait_for(generating, LIMIT_S)
    assert [response.output_ids for response in responses] == [continuation(input_ids, 32) for input_ids in inputs]
    assert chooser.lost == [first.name]
    assert {len(request.input_ids) for request in second.requests if len(request.input_ids) > 3} >= {4 + 16}
    assert (await other)[0].output_ids == continuation(PROMPT, 32)
    assert client.leave([first.url, second.url]) == 0
    first.hold.set()


async def test_cancelled_and_left_at_the_same_time_is_cancelled(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    servers[0].hold.clear()
    client = await make_client()
    generating = asyncio.ensure_future(client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0]))
    await servers[0].wait_for_requests(1)
    client.leave([servers[0].url])
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert chooser.lost == []
    servers[0].hold.set()


async def test_a_refused_prompt_is_rejected_at_once(
    servers: list[FakeGenerationServer], make_client: MakeClient
) -> None:
    servers[0].script.append(web.Response(status=400, text="the prompt is too long"))
    client = await make_client()
    with pytest.raises(RolloutRejected, match="the prompt is too long") as caught:
        await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert caught.value.reason == "generation_refused"
    assert len(servers[0].requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_key_or_address_is_not_the_prompts_fault(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser, status: int
) -> None:
    """The response continues at another server, after a single request."""
    servers[0].script.append(web.Response(status=status, text="not here"))
    chooser.servers = [servers[1]]
    client = await make_client()
    (response,) = await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert response.output_ids == continuation(PROMPT, 32)
    assert chooser.lost == [servers[0].name]
    assert len(servers[0].requests) == 1


async def test_a_key_that_every_server_refuses_releases_the_ticket_with_the_cause(
    servers: list[FakeGenerationServer], make_client: MakeClient, chooser: Chooser
) -> None:
    for server in servers:
        server.script.extend(web.Response(status=401, text="unknown key") for _ in range(8))
    chooser.servers = [servers[1], servers[0]] * 4
    client = await make_client(pauses={"schedule_s": (0.0,)})
    with pytest.raises(RolloutReleased, match="refuses requests: 401 unknown key") as caught:
        await client.generate(Route(ticket_at(servers[0])), [PROMPT], SAMPLING, [0])
    assert caught.value.reason == "server_lost"


async def test_tokens_older_than_the_ticket_allows_give_it_back(
    servers: list[FakeGenerationServer], make_client: MakeClient
) -> None:
    client = await make_client()
    with pytest.raises(RolloutReleased, match="a0001-v00000001; the ticket allows a0001-v00000003") as caught:
        await client.generate(Route(ticket_at(servers[0], min_version=3)), [PROMPT], SAMPLING, [0])
    assert caught.value.reason == "stale_server"


async def test_cancelling_aborts_on_the_server(servers: list[FakeGenerationServer], make_client: MakeClient) -> None:
    servers[0].hold.clear()
    client = await make_client()
    generating = asyncio.ensure_future(client.generate(Route(ticket_at(servers[0])), [PROMPT] * 3, SAMPLING, [0]))
    await servers[0].wait_for_requests(3)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    await servers[0].wait_for_aborts(3)
    assert sorted(servers[0].aborted) == sorted(request.rid for request in servers[0].requests)
    servers[0].hold.set()


async def test_requests_out_at_once_are_bounded(servers: list[FakeGenerationServer], make_client: MakeClient) -> None:
    client = await make_client(max_requests=4)
    await client.generate(Route(ticket_at(servers[0])), [PROMPT] * 20, SAMPLING, [0])
    assert servers[0].most_in_flight <= 4
    assert len(servers[0].requests) == 40


async def test_the_board_names_the_server_that_is_waited_for(
    servers: list[FakeGenerationServer], make_client: MakeClient, services: Services
) -> None:
    servers[0].hold.clear()
    client = await make_client()
    generating = asyncio.ensure_future(client.generate(Route(ticket_at(servers[0])), [PROMPT] * 3, SAMPLING, [0]))
    await servers[0].wait_for_requests(3)
    assert [(wait.what, wait.on) for wait in services.board.snapshot().waits] == [
        ("the next piece", "generation_server/0")
    ]
    servers[0].hold.set()
    await generating
    assert services.board.snapshot().waits == []


async def test_greedy_is_temperature_zero(servers: list[FakeGenerationServer], make_client: MakeClient) -> None:
    client = await make_client()
    await client.generate(Route(ticket_at(servers[0])), [PROMPT], replace(SAMPLING, greedy=True, temperature=0.7), [0])
    assert servers[0].requests[0].sampling_params.temperature == 0.0
