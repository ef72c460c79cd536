"""The APIs of the endpoint with the official clients: several turns continue the tokens that were sampled, in every API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from test_openai_api import LIMIT_S, MESSAGES, TOKENIZER, Stage

from asyncrl.rewards.outcome import RolloutReleased

CALL = 'I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ANTHROPIC_TOOLS: list[Any] = [{"name": "add", "input_schema": {"type": "object"}}]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}]


class Speaker:
    """A session's stage and the official clients."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.openai = stage.endpoint.client(stage.id)
        self.anthropic = anthropic.AsyncAnthropic(base_url=stage.endpoint.url, api_key=stage.id, max_retries=3)

    async def message(self, messages: list[Any], **fields: Any) -> Any:
        asked = self.anthropic.messages.create(model="policy", max_tokens=64, messages=messages, **fields)
        return await asyncio.wait_for(asked, LIMIT_S)

    async def response(self, given: Any, **fields: Any) -> Any:
        return await asyncio.wait_for(self.openai.responses.create(model="policy", input=given, **fields), LIMIT_S)

    def sequences(self) -> list[str]:
        """The trained sequences as text, with special tokens."""
        return [TOKENIZER.decode(turn.episode().input_ids) for turn in self.stage.session.leaves("all")]


@pytest.fixture
async def speaker() -> AsyncIterator[Speaker]:
    stage = Stage()
    await stage.endpoint.start("127.0.0.1")
    stage.id = stage.endpoint.open(stage.session)
    made = Speaker(stage)
    yield made
    await made.anthropic.close()
    await stage.endpoint.close()


async def test_anthropics_turns_are_one_sequence(speaker: Speaker) -> None:
    speaker.stage.policy.say(CALL + "$", None, "1 in all$", None)
    first = await speaker.message(MESSAGES, system="Add.", tools=ANTHROPIC_TOOLS)
    said, use = first.content
    assert (said.text, use.name, use.input, first.stop_reason) == ("I add.", "add", {"a": 1}, "tool_use")
    assert first.usage.output_tokens == len(TOKENIZER.encode(CALL)) + 1
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "1"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await speaker.message(turns, system="Add.", tools=ANTHROPIC_TOOLS)
    assert (second.content[0].text, second.stop_reason) == ("1 in all", "end_turn")
    (sequence,) = speaker.sequences()
    assert CALL in sequence  # as it was sampled, not as the template would write it
    assert sequence.index(CALL) < sequence.index("1 in all")


async def test_anthropics_stream(speaker: Speaker) -> None:
    speaker.stage.policy.say("I add. <tool_", CALL[13:] + "$", None, "2$", None)
    async with speaker.anthropic.messages.stream(
        model="policy", max_tokens=64, messages=MESSAGES, tools=ANTHROPIC_TOOLS
    ) as stream:
        told = "".join([text async for text in stream.text_stream])
        message = await stream.get_final_message()
    assert told.strip() == "I add."
    said, use = message.content
    assert (use.name, use.input, message.stop_reason) == ("add", {"a": 1}, "tool_use")
    assert message.usage.output_tokens == len(TOKENIZER.encode(CALL)) + 1
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "1"}
    await speaker.message(
        [*MESSAGES, {"role": "assistant", "content": [said, use]}, {"role": "user", "content": [result]}],
        tools=ANTHROPIC_TOOLS,
    )
    assert len(speaker.sequences()) == 1


async def test_anthropics_stops_and_limits(speaker: Speaker) -> None:
    speaker.stage.policy.say("one STOP", "two", None)
    stopped = await speaker.message(MESSAGES, stop_sequences=["no", "STOP"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one ", "stop_sequence", "STOP")
    assert (await speaker.message(MESSAGES)).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"extra_body": {"temperature": 0.5}}, r"this run samples with rollout.sampling.temperature=1"),
        ({"extra_body": {"n": 2}}, r"n=2: /v1/messages gives one answer"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, r"thinking=.*: this field is not supported"),
        ({"tool_choice": {"type": "any"}, "tools": ANTHROPIC_TOOLS}, r"the policy decides"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"a tool of type 'bash_20250124'"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\]: role is 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"a block of type 'image'"),
    ],
)
async def test_what_anthropics_client_is_refused(speaker: Speaker, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=told) as refused:
        await speaker.message(**{"messages": MESSAGES, **fields})
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert speaker.stage.policy.requests == 0


async def test_the_end_of_a_rollout_reaches_anthropics_client_once(speaker: Speaker) -> None:
    speaker.stage.policy.say(RolloutReleased("server_lost", "gone"))
    with pytest.raises(anthropic.APIStatusError, match="server_lost: gone"):
        await speaker.message(MESSAGES)
    assert speaker.stage.policy.requests == 1
    speaker.stage.policy.say("some", RolloutReleased("server_lost", "gone"))
    with pytest.raises(anthropic.APIStatusError, match="server_lost: gone"):
        async for _ in await speaker.message(MESSAGES, stream=True):
            pass


@pytest.mark.parametrize("by_id", [True, False])
async def test_the_turns_of_responses_are_one_sequence(speaker: Speaker, by_id: bool) -> None:
    """The client sends the whole conversation, or the id of the response that it continues."""
    speaker.stage.policy.say(CALL + "$", None, "1 in all$", None)
    first = await speaker.response("hi", instructions="Add.", tools=RESPONSES_TOOLS)
    assert (first.status, first.output_text) == ("completed", "I add.")
    _, call = first.output
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    if by_id:
        second = await speaker.response([result], previous_response_id=first.id, tools=RESPONSES_TOOLS)
    else:
        items = [{"role": "user", "content": "hi"}, *first.output, result]
        second = await speaker.response(items, instructions="Add.", tools=RESPONSES_TOOLS)
    assert second.output_text == "1 in all"
    (sequence,) = speaker.sequences()
    assert CALL in sequence
    assert second.usage.total_tokens == len(speaker.stage.session.leaves("all")[0].episode().input_ids)


async def test_responses_of_other_instructions_are_another_sequence(speaker: Speaker) -> None:
    speaker.stage.policy.say("one$", None, "two$", None)
    first = await speaker.response("hi", instructions="Add.")
    await speaker.response("more", instructions="Subtract.", previous_response_id=first.id)
    assert len(speaker.sequences()) == 2
    with pytest.raises(openai.NotFoundError, match="this session has no answer 'resp_other'"):
        await speaker.response("more", previous_response_id="resp_other")


async def test_the_stream_of_responses(speaker: Speaker) -> None:
    speaker.stage.policy.say("I add. <tool_", CALL[13:] + "$", None, "2$", None)
    async with speaker.openai.responses.stream(model="policy", input="hi", tools=RESPONSES_TOOLS) as stream:
        told = [event async for event in stream]
        final = await stream.get_final_response()
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta").strip() == "I add."
    assert [event.sequence_number for event in told] == list(range(len(told)))
    call = final.output[1]
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    await speaker.response(
        [{"role": "user", "content": "hi"}, *(item.model_dump() for item in final.output), result],
        tools=RESPONSES_TOOLS,
    )
    assert len(speaker.sequences()) == 1


async def test_a_response_that_is_cut_or_refused(speaker: Speaker) -> None:
    speaker.stage.policy.say("two", None)
    cut = await speaker.response("hi", max_output_tokens=8)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    for fields, told in (
        ({"reasoning": {"effort": "low"}}, "reasoning=.*: this field is not supported"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search'"),
        ({"include": ["message.output_text.logprobs"]}, "include=.*not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "only text is sampled"),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, "text=.*not supported"),
        ({"extra_body": {"n": 2}}, "n=2: /v1/responses gives one answer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type 'item_reference'"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            await speaker.response(**{"given": fields.pop("input", "hi"), **fields})


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_to_one_request_are_branches(speaker: Speaker, stream: bool) -> None:
    policy = speaker.stage.policy
    asked = asyncio.ensure_future(speaker.stage.ask(n=2, stream=stream))
    for _ in range(2):
        await asyncio.wait_for(policy.asked.acquire(), LIMIT_S)
    policy.say("one$", None, "two$", None)
    reply = await asked
    texts = ["", ""]
    if stream:
        async for chunk in reply:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        reply_id = chunk.id
    else:
        texts, reply_id = [choice.message.content for choice in reply.choices], reply.id
        assert reply.usage.completion_tokens == 8
    assert sorted(texts) == ["one", "two"]
    assert {turn.completion_id for turn in speaker.stage.session.leaves("all")} == {reply_id, f"{reply_id}-1"}
    policy.say("more$", None)
    await speaker.stage.ask([*MESSAGES, {"role": "assistant", "content": "two"}, {"role": "user", "content": "go on"}])
    assert sum("two" in sequence and "more" in sequence for sequence in speaker.sequences()) == 1
    assert len(speaker.sequences()) == 2
