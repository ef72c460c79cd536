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

END = "<|im_end|>"
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


# ---------------------------------------------------------------------------------------------------------- completions


async def completion(speaker: Speaker, prompt: Any, **fields: Any) -> Any:
    asked = speaker.openai.completions.create(model="policy", prompt=prompt, **fields)
    return await asyncio.wait_for(asked, LIMIT_S)


async def test_the_turns_of_completions_are_one_sequence(speaker: Speaker) -> None:
    """An answer that a stop string or the limit has ended is continued with its tokens, which the text alone would not give."""
    speaker.stage.policy.say("a b STOP", " and more", None, "end$", None)
    first = await completion(speaker, "One: ", stop="STOP", logprobs=0)
    (choice,) = first.choices
    assert (first.object, choice.text, choice.finish_reason) == ("text_completion", "a b ", "stop")
    assert first.id.startswith("cmpl-")
    tokens = choice.logprobs.tokens
    assert "".join(tokens) == "a b STOP"
    assert len(choice.logprobs.token_logprobs) == len(tokens) == first.usage.completion_tokens
    assert choice.logprobs.text_offset[0] == len("One: ")
    second = await completion(speaker, "One: a b STOP Two: ")
    assert (second.choices[0].text, second.choices[0].finish_reason) == (" and more", "length")
    third = await completion(speaker, ["One: a b STOP Two:  and more Three: "])
    assert third.choices[0].text == "end"
    (turn,) = speaker.stage.session.leaves("all")
    episode = turn.episode()
    assert TOKENIZER.decode(episode.input_ids) == "One: a b STOP Two:  and more Three: end" + END
    assert [len(response.output_ids) for _, response in episode.responses] == [
        first.usage.completion_tokens,
        second.usage.completion_tokens,
        third.usage.completion_tokens,
    ]
    assert third.usage.total_tokens == len(episode.input_ids)


async def test_a_completion_that_ended_with_eos_is_not_continued(speaker: Speaker) -> None:
    speaker.stage.policy.say("done$", None, "more$", None)
    await completion(speaker, "Go: ")
    await completion(speaker, "Go: done And: ")
    assert speaker.sequences() == ["Go: done" + END, "Go: done And: more" + END]


async def test_the_answers_of_a_completion_are_branches(speaker: Speaker) -> None:
    speaker.stage.policy.say("one$", None, "two", None, "three$", None)
    reply = await completion(speaker, "Go: ", n=2)
    assert [choice.text for choice in reply.choices] == ["one", "two"]
    await completion(speaker, "Go: two So: ")
    assert sorted(speaker.sequences()) == ["Go: one" + END, "Go: two So: three" + END]


async def test_completions_stream(speaker: Speaker) -> None:
    speaker.stage.policy.say("a ", "b ", "c$", None)
    stream = await completion(speaker, "Go: ", stream=True, stream_options={"include_usage": True}, logprobs=0)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "a b c"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    offsets = [at for chunk in chunks[:-1] if (found := chunk.choices[0].logprobs) for at in found.text_offset]
    assert offsets == sorted(offsets)
    assert len(offsets) == chunks[-1].usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": 0.5}, r"this run samples with rollout.sampling.temperature=1"),
        ({"prompt": ["a", "b"]}, r"prompt=.*: must be one text that is not empty"),
        ({"prompt": [1, 2]}, r"prompt=.*: must be one text that is not empty"),
        ({"prompt": ""}, r"prompt=.*: must be one text that is not empty"),
        ({"echo": True}, r"echo=True: this field is not supported"),
        ({"suffix": "x"}, r"suffix='x': this field is not supported"),
        ({"best_of": 3}, r"best_of=3: this field is not supported"),
        ({"logprobs": 1}, r"logprobs=1: only the logprobs of sampled tokens are known; use 0"),
        ({"extra_body": {"messages": []}}, r"messages: /v1/completions has no such field"),
        ({"seed": 1}, r"the engines have no seed per request"),
    ],
)
async def test_what_completions_refuse(speaker: Speaker, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        await completion(speaker, **{"prompt": "Go: ", **fields})
    assert speaker.stage.policy.requests == 0


async def test_fields_that_change_nothing_and_ignored_ones_pass(speaker: Speaker) -> None:
    speaker.stage.policy.say("a$", None, "a$", None)
    reply = await completion(speaker, "Go: ", echo=False, best_of=2, n=2, user="me", max_tokens=8)
    assert len(reply.choices) == 2
