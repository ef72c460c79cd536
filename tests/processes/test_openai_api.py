"""The endpoint over real sockets with openai's client. The test acts as the policy behind it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import RolloutReleased
from asyncrl.rewards.trajectory import OnPiece, Response
from asyncrl.rollout.openai_api import MAX_BODY_BYTES, ChatEndpoint
from asyncrl.rollout.openai_session import Session, SessionLimits
from asyncrl.rollout.tool_calls import TAG, parse_tool_calls
from asyncrl.runtime import http_server
from asyncrl.runtime.security import Secrets, Security
from asyncrl.testing.tiny import make_chat_tokenizer
from tests.support.process_wide import secured_by
from tests.support.services import make_services

LOGGER = logging.getLogger("test_openai_api")
SERVICES = make_services(logger=LOGGER)
TOKENIZER = make_chat_tokenizer(None)
EOS = TOKENIZER.eos_token_id
VERSION = WeightVersion(1, 3).pack()
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
LIMIT_S = 60.0


class Pieces:
    """A policy that sends each piece when the test adds it. None ends the answer; an exception ends the rollout."""

    def __init__(self) -> None:
        self.next: asyncio.Queue[list[int] | Exception | None] = asyncio.Queue()
        self.asked = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()
        self.requests = 0

    def say(self, *pieces: str | Exception | None) -> None:
        for piece in pieces:
            said = TOKENIZER.encode(piece.replace("$", "<|im_end|>")) if isinstance(piece, str) else piece
            self.next.put_nowait(said)

    def say_tokens(self, ids: list[int]) -> None:
        self.next.put_nowait(ids)

    async def __call__(self, input_ids: list[int], sampling: SamplingConfig, on_piece: OnPiece) -> Response:
        self.requests += 1
        self.asked.release()
        response = Response(list(input_ids))
        try:
            while (piece := await self.next.get()) is not None:
                if isinstance(piece, Exception):
                    raise piece
                response.add_piece(piece, [-0.5] * len(piece), [(VERSION, len(piece))])
                if on_piece(response):
                    return response
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        response.finished = response.output_ids[-1] == EOS
        return response


class Stage:
    def __init__(self) -> None:
        self.policy = Pieces()
        self.endpoint = ChatEndpoint(SERVICES)
        self.session = Session(
            self.policy,
            ChatTemplate(TOKENIZER, {}),
            sampling=SamplingConfig(max_new_tokens=64),
            ignore=frozenset(),
            limits=SessionLimits(16, 16, 0, 0),
            counts=self.endpoint.counts,
            tokenizer=TOKENIZER,
            parse=parse_tool_calls,
            tool_call_tag=TAG,
        )
        self.id = ""

    async def ask(self, messages: list[Any] = MESSAGES, **fields: Any) -> Any:
        """Send a request with the client that agents share."""
        client = self.endpoint.client(self.id)
        return await asyncio.wait_for(
            client.chat.completions.create(model="policy", messages=messages, **fields), LIMIT_S
        )


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    await made.endpoint.start("127.0.0.1")
    made.id = made.endpoint.open(made.session)
    yield made
    await made.endpoint.close()


async def test_a_completion(stage: Stage) -> None:
    stage.policy.say("Hel", "lo$", None)
    reply = await stage.ask(logprobs=True)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert reply.model == "policy"
    assert reply.id.startswith("chatcmpl-")
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (6, reply.usage.prompt_tokens + 6)
    assert [token.token for token in choice.logprobs.content] == [*"Hello", "<|im_end|>"]
    assert {token.logprob for token in choice.logprobs.content} == {-0.5}
    assert choice.logprobs.content[0].bytes == [ord("H")]


async def test_a_client_that_has_named_a_session_may_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STRANGER_S", 0.2)
    with secured_by(Security(Secrets.make())):
        stage = Stage()
        await stage.endpoint.start("127.0.0.1")
        stage.id = stage.endpoint.open(stage.session)
        asked = asyncio.create_task(stage.ask())
        await stage.policy.asked.acquire()
        await asyncio.sleep(0.5)
        stage.policy.say("one$", None)
        assert (await asked).choices[0].message.content == "one"
        assert stage.policy.requests == 1
        await stage.endpoint.close()


@pytest.mark.parametrize("in_url", [True, False])
async def test_clients_of_ones_own(stage: Stage, in_url: bool) -> None:
    """The session's id is in the URL (with any key), or it is the key. The client is blocking and runs in a thread."""
    stage.policy.say("one$", None, "two$", None)
    where: dict[str, Any] = (
        {"base_url": stage.endpoint.base_url(stage.id), "api_key": "any"}
        if in_url
        else {"base_url": f"{stage.endpoint.url}/v1", "api_key": stage.id}
    )
    async with openai.AsyncOpenAI(**where) as client:
        reply = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert reply.choices[0].message.content == "one"
        assert [model.id async for model in client.models.list()] == ["policy"]

    def block() -> str | None:
        with openai.OpenAI(**where) as client:
            return client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content

    assert await asyncio.wait_for(asyncio.to_thread(block), LIMIT_S) == "two"


async def test_pieces_are_streamed_as_they_come(stage: Stage) -> None:
    stream = asyncio.ensure_future(stage.ask(stream=True, logprobs=True, stream_options={"include_usage": True}))
    stage.policy.say("Hel")
    chunks = aiter(await stream)
    first = (await asyncio.wait_for(anext(chunks), LIMIT_S)).choices[0]  # before the policy continues
    assert (first.delta.role, first.delta.content) == ("assistant", "He")  # the last token is held back
    stage.policy.say("lo ü", "$", None)
    rest = [chunk async for chunk in chunks]
    *deltas, last, usage = rest
    assert "He" + "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == "Hello ü"
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 9  # ü takes two
    counted = [first, *(chunk.choices[0] for chunk in deltas)]
    assert sum(len(choice.logprobs.content) for choice in counted if choice.logprobs) == 9
    assert {chunk.id for chunk in rest} == {usage.id}


async def test_a_character_is_sent_when_it_is_whole(stage: Stage) -> None:
    stream = asyncio.ensure_future(stage.ask(stream=True))
    first, second = "a", "\N{PARTY POPPER}"
    ids = TOKENIZER.encode(second)
    assert len(ids) == 4
    stage.policy.say_tokens([*TOKENIZER.encode(first), *ids[:3]])
    chunks = aiter(await stream)
    assert (await asyncio.wait_for(anext(chunks), LIMIT_S)).choices[0].delta.content == first
    stage.policy.say_tokens([ids[3], *TOKENIZER.encode("b")])
    stage.policy.say("$", None)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == second + "b"


async def test_a_stream_ends_with_done_and_holds_stop_strings_back(stage: Stage) -> None:
    stage.policy.say("one S", "TO", "P two$", None)
    url = f"{stage.endpoint.base_url(stage.id)}/chat/completions"
    body = {"messages": MESSAGES, "stream": True, "stop": "STOP"}
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        assert answer.content_type == "text/event-stream"
        events = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "one "
    assert choices[-1]["finish_reason"] == "stop"


async def test_a_streamed_tool_call_is_no_text(stage: Stage) -> None:
    stage.policy.say("I add.\n<tool_", 'call>{"name": "add", "argu', 'ments": {"a": 1}}</tool_call>$', None)
    stream = await stage.ask(stream=True, tools=TOOLS)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices).strip() == "I add."
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 1}')
    assert choices[-1].finish_reason == "tool_calls"
    stage.policy.say("2$", None)
    said = {
        "role": "assistant",
        "content": "I add.\n",
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
    }
    await stage.ask([*MESSAGES, said, {"role": "tool", "tool_call_id": call.id, "content": "2"}], tools=TOOLS)
    assert stage.session.num_sequences == 1  # the client's assembled message continues the conversation


async def test_unknown_sessions_and_those_that_are_over(stage: Stage) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await stage.endpoint.client("nobody").chat.completions.create(model="m", messages=MESSAGES)
    assert unknown.value.code == "session_not_found"
    await stage.endpoint.end(stage.id)
    with pytest.raises(openai.NotFoundError, match="this session does not exist or has ended"):
        await stage.ask()
    async with aiohttp.ClientSession() as http, http.post(f"{stage.endpoint.url}/v1/chat/completions") as answer:
        assert answer.status == 401
    assert stage.policy.requests == 0


async def test_errors_have_the_form_of_the_api(stage: Stage) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await stage.ask(temperature=0.5)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    assert "rollout.sampling.temperature=1" in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="use /v1/chat/completions"):
        await stage.endpoint.client(stage.id).embeddings.create(model="m", input="x")
    with pytest.raises(openai.APIStatusError) as too_large:
        await stage.ask([{"role": "user", "content": "x" * (MAX_BODY_BYTES + 1)}])
    assert too_large.value.status_code == 413
    assert stage.endpoint.counts.refused == 2
    assert not stage.session.failed.done()


async def test_the_end_of_a_rollout_reaches_the_client_and_is_kept(stage: Stage) -> None:
    """The policy is called once: openai's client retries by itself after many errors, but not after this one."""
    stage.policy.say(RolloutReleased("server_lost", "gone"))
    async with openai.AsyncOpenAI(base_url=stage.endpoint.base_url(stage.id), api_key="any", max_retries=3) as client:
        with pytest.raises(openai.APIStatusError, match="server_lost: gone") as ended:
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert (ended.value.status_code, ended.value.code) == (410, "server_lost")
    assert stage.policy.requests == 1
    assert isinstance(stage.session.failed.exception(), RolloutReleased)


async def test_the_end_of_a_rollout_in_mid_stream(stage: Stage) -> None:
    stage.policy.say("Hello")
    chunks = aiter(await stage.ask(stream=True))
    assert (await asyncio.wait_for(anext(chunks), LIMIT_S)).choices[0].delta.content == "Hell"
    stage.policy.say(RolloutReleased("server_lost", "gone"))
    with pytest.raises(openai.APIError, match="server_lost: gone"):
        async for _ in chunks:
            pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_its_request(stage: Stage, stream: bool) -> None:
    async def listen() -> None:
        reply = await stage.ask(stream=stream)
        async for _ in reply:
            pass

    asking = asyncio.ensure_future(listen())
    await asyncio.wait_for(stage.policy.asked.acquire(), LIMIT_S)
    if stream:
        stage.policy.say("Hello")
    asking.cancel()
    await asyncio.wait_for(stage.policy.cancelled.wait(), LIMIT_S)
    assert stage.session.num_sequences == 0


async def test_an_error_of_the_endpoint_ends_the_rollout(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.policy.say(ZeroDivisionError("ours"))
    with pytest.raises(openai.InternalServerError, match="ours"):
        await stage.ask()
    assert "endpoint_error" in str(stage.session.failed.exception())
    assert "a chat completion failed" in caplog.text
