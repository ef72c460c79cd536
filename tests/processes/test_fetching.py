"""Data between workers of different groups, over real HTTP: byte for byte, bounded, and only for the run's own processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
import uuid

import aiohttp
import msgspec
import pytest
from aiohttp import web
from test_data_manager import KEYS, make_group, same_bytes

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model import fetching
from asyncrl.model.fetching import DataFetcher, FetchError, HeldData, pack_sample, read_request, unpack_sample
from asyncrl.model.store import DataStore
from asyncrl.protocol.calls import FetchPart, HeldDataRequest
from asyncrl.protocol.errors import CodecError
from asyncrl.protocol.names import Names
from asyncrl.runtime import security
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import serve
from tests.support.memory_names import MemoryNameResolver
from tests.support.process_wide import secured_by

IDS = [f"g{number}" for number in range(6)]
SOURCE, ME = 0, 4


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Set long time limits: the sources here do answer, but a busy machine may delay them."""
    monkeypatch.setattr(fetching, "LIMIT_S", 100.0)


class Both:
    """A source that holds groups, and a fetcher with its own store."""

    def __init__(
        self, fetcher: DataFetcher, source: DataStore, store: DataStore, url: str, directory: Directory
    ) -> None:
        """store: the fetcher's."""
        self.fetcher, self.source, self.store, self.url, self.directory = fetcher, source, store, url, directory

    def publish(self, url: str, group_incarnation: int = 0, source: int = SOURCE) -> None:
        self.directory.resolver.add(self.directory.names.held_data(source, 1, group_incarnation), url, replace=True)

    async def fetch(
        self, ids: list[str], keys: tuple[str, ...] = KEYS, group_incarnation: int = 0, source: int = SOURCE
    ) -> int:
        return await self.fetcher.fetch([FetchPart(source, group_incarnation, ids, list(keys))])


@contextlib.asynccontextmanager
async def both(max_message_bytes: int = 1_000_000):
    runtime = RuntimeConfig(host="127.0.0.1", max_message_bytes=max_message_bytes)
    info = WorkerInfo("model_worker", ME, 5, "e", "t", 1, "/nowhere", 1, NameResolveConfig(), runtime)
    board, resolver = StatusBoard(info, logging.getLogger("test")), MemoryNameResolver(uuid.uuid4().hex)
    directory = Directory(resolver, Names("e", "t"), lease=1, board=board, limit_s=100.0)
    source, mine = DataStore(64), DataStore(64)
    for ticket in IDS:
        assert source.put(make_group(ticket)) == ""
    held = HeldData(source, host="127.0.0.1", max_bytes=max_message_bytes)
    async with held.serving() as url, open_session(max_connections=8) as session:
        fetcher = DataFetcher(session, mine, directory, board, attempt=1, max_bytes=max_message_bytes)
        made = Both(fetcher, source, mine, url, directory)
        made.publish(url)
        yield made
    resolver.close()


@contextlib.asynccontextmanager
async def answering(answer):
    """A source with a given answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application()
    app.add_routes([web.post(fetching.PATH, handle)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    try:
        yield await serve(runner, "127.0.0.1")
    finally:
        await runner.cleanup()


async def test_what_is_fetched_is_what_is_held_byte_for_byte():
    async with both() as pair:
        assert await pair.fetch(IDS) > 0
        for ticket in IDS:
            assert same_bytes(pair.store.whole(ticket), make_group(ticket))
        await pair.fetch(IDS[:2], ("rewards",))  # fetching again changes nothing
        assert len(pair.store) == len(IDS)


async def test_words_are_fetched_byte_for_byte():
    """Also copies that another call fetches later, and an empty text."""
    values = {"words_text": ["\u00fc\u2028", ""], "prompt_words_answer": {"x": [1, None, "\u4e2d"]}}
    group = SequenceSample.from_groups(["w"], [{"packed_input_ids": [[1, 2], [3]], **values}])
    async with both() as pair:
        assert pair.source.put(group) == ""
        await pair.fetch(["w"], ("packed_input_ids", "words_text"))
        await pair.fetch(["w"], ("prompt_words_answer",))
        found = pair.store.whole("w")
    assert same_bytes(found, group)
    assert found.words("words_text") == [values["words_text"]]
    assert found.words("prompt_words_answer") == [[values["prompt_words_answer"]]]


async def test_only_the_keys_that_are_asked_for_come():
    async with both() as pair:
        await pair.fetch(["g3", "g1"], ("rewards", "packed_input_ids"))
        assert [ticket for ticket in IDS if ticket in pair.store] == ["g1", "g3"]
        assert set(pair.store.whole("g1").keys) == {"rewards", "packed_input_ids"}


async def test_many_groups_come_in_answers_of_bounded_size():
    size = make_group(IDS[0]).num_bytes
    asked = []
    async with both(max_message_bytes=3 * size) as pair:

        async def relay(request: web.Request) -> web.Response:
            body = await request.read()
            asked.append(len(read_request(body).ids))
            async with aiohttp.ClientSession() as session, session.post(pair.url + fetching.PATH, data=body) as answer:
                return web.Response(status=answer.status, body=await answer.read())

        async with answering(relay) as url:
            pair.publish(url)
            await pair.fetch(IDS)
        assert all(ticket in pair.store for ticket in IDS)
        assert asked[0] == len(IDS)
        assert len(asked) > 1
    async with both(max_message_bytes=1) as pair:  # a group is never split
        await pair.fetch([IDS[0]], ("rewards",))
        assert IDS[0] in pair.store


@pytest.mark.parametrize(
    ("ids", "keys", "told"),
    [
        (
            ["g0", "nobody"],
            KEYS,
            r"model_worker/0 answered 404: 1 of 1 groups are not in the store, such as \['nobody'\]",
        ),
        (["g0"], ("values",), r"model_worker/0 answered 404: id 'g0' has no \['values'\] yet"),
    ],
)
async def test_what_is_not_there_is_told(ids, keys, told):
    async with both() as pair:
        with pytest.raises(FetchError, match=told):
            await pair.fetch(ids, keys)


async def test_who_is_gone_costs_a_moment_and_who_says_nothing_the_limit(monkeypatch):
    async with both() as pair:
        pair.publish("http://127.0.0.1:9", group_incarnation=1)
        began = time.monotonic()
        with pytest.raises(FetchError, match="model_worker/0 delivers no data: ClientConnectorError"):
            await pair.fetch(IDS, group_incarnation=1)
        assert time.monotonic() - began < fetching.LIMIT_S / 2
        monkeypatch.setattr(fetching, "LIMIT_S", 0.3)
        never = asyncio.Event()

        async def say_nothing(request):
            await never.wait()

        async with answering(say_nothing) as url:
            pair.publish(url, group_incarnation=2)
            with pytest.raises(FetchError, match=r"waited 0\.3 s for data of another worker group from model_worker/0"):
                await pair.fetch(IDS, group_incarnation=2)
            never.set()
        with pytest.raises(FetchError):  # no process has published that incarnation
            await pair.fetch(IDS, group_incarnation=3)
        assert len(pair.store) == 0


async def test_a_lost_connection_is_tried_again():
    answers = []

    async def lose_the_first(request):
        answers.append(len(answers))
        if len(answers) == 1:
            request.transport.close()
        return web.Response(body=pack_sample(make_group("g0")))

    async with both() as pair, answering(lose_the_first) as url:
        pair.publish(url, group_incarnation=1)
        await pair.fetch(["g0"], group_incarnation=1)
        assert same_bytes(pair.store.whole("g0"), make_group("g0"))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (pack_sample(make_group("g1")), r"was asked for .*; it sent .* of \['g1'\]"),
        (pack_sample(make_group("g0").select_keys(["rewards"])), r"it sent \['rewards'\] of \['g0'\]"),
        (pack_sample(SequenceSample.gather([make_group("g0"), make_group("g1")])), r"of \['g0', 'g1'\]"),
        (b"\x01", "delivers no data: CodecError"),
        (b"x" * 20_000_000, "sent more than"),
    ],
)
async def test_an_answer_to_another_question_is_not_believed(body, told):
    async def lie(request):
        return web.Response(body=body)

    async with both() as pair, answering(lie) as url:
        pair.publish(url, group_incarnation=1)
        with pytest.raises(FetchError, match=told):
            await pair.fetch(["g0"], group_incarnation=1)
        assert len(pair.store) == 0


@pytest.mark.parametrize(
    "request_",
    [
        HeldDataRequest(ids=[], keys=["rewards"]),
        HeldDataRequest(ids=["g0"], keys=[]),
        HeldDataRequest(ids=["g"] * 2000, keys=["k"]),
    ],
)
async def test_a_request_for_nothing_or_too_much_is_refused(request_):
    async with both() as pair, aiohttp.ClientSession() as session:
        async with session.post(pair.url + fetching.PATH, data=msgspec.msgpack.encode(request_)) as response:
            assert response.status == 400
        async with session.post(pair.url + fetching.PATH, data=b"\xc1") as response:
            assert response.status == 400


async def test_strangers_get_nothing():
    secrets = security.Security(security.Secrets.make())
    asked = msgspec.msgpack.encode(HeldDataRequest(ids=["g0"], keys=["rewards"]))
    with secured_by(secrets):
        async with both() as pair, aiohttp.ClientSession() as session:
            await pair.fetch(IDS)
            async with session.post(pair.url + fetching.PATH, data=asked) as response:
                assert response.status == 401


def test_an_answer_is_read_or_refused():
    body = pack_sample(make_group("g0"))
    assert same_bytes(unpack_sample(body, max_bytes=1_000_000), make_group("g0"))
    for broken in (
        b"",
        body[:-1],
        body + b"\0",
        struct.pack("<I", 0) + body[4:],
        struct.pack("<I", 2**32 - 1) + body[4:],
        struct.pack("<IQ", 1, 2**64 - 1),
    ):
        with pytest.raises(CodecError):
            unpack_sample(broken, max_bytes=1_000_000)
    with pytest.raises(
        CodecError, match="length <= 257"
    ):  # an object for each of many empty parts would fill the memory
        unpack_sample(msgspec.msgpack.encode([b""] * 300), max_bytes=1_000_000)
    with pytest.raises(CodecError, match="at most"):
        unpack_sample(body, max_bytes=100)
