"""Fields of a chat completion request: honoured, ignored if configured so, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncrl.config.schema import SamplingConfig
from asyncrl.rollout.openai_request import IGNORABLE, ChatRequest, RequestError, RequestRules, chat_request, fields_of

RULES = RequestRules(SamplingConfig(max_new_tokens=64, temperature=0.7, top_p=0.9))
MESSAGES = [{"role": "user", "content": "hi"}]


def parse(rules: RequestRules = RULES, **fields: Any) -> ChatRequest:
    return chat_request(fields_of(msgspec.json.encode({"messages": MESSAGES, **fields}), rules), rules)


def test_defaults_of_omitted_fields() -> None:
    request = parse()
    assert request.messages == MESSAGES
    assert (request.max_new_tokens, request.stops, request.tools, request.stream) == (64, (), None, False)
    assert parse(max_tokens=64) == parse(max_completion_tokens=64) == request  # all that the run allows
    assert parse(max_tokens=1).max_new_tokens == 1


def test_honoured_fields() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = parse(
        model="any",
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        max_tokens=32,
        max_completion_tokens=16,
        stop="x",
        n=1,
        logprobs=True,
        tools=tools,
        stream=True,
        stream_options={"include_usage": True},
        response_format={"type": "text"},
        presence_penalty=0,
        user="me",
        metadata={"a": "b"},
        seed=None,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert (request.model, request.max_new_tokens, request.stops) == ("any", 16, ("x",))
    assert (request.tools, request.parse_tools) == (tools, True)
    assert request.logprobs
    assert request.stream
    assert request.include_usage
    assert request.template_arguments == {"enable_thinking": False}
    assert not parse(tools=tools, tool_choice="none").parse_tools


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"temperature": 1.0}, "temperature", "this run samples with rollout.sampling.temperature=0.7"),
        ({"temperature": 0}, "temperature", "agent_args.ignore"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"top_p": 1.0}, "top_p", "rollout.sampling.top_p=0.9"),
        ({"top_k": 5}, "top_k", "rollout.sampling.top_k=-1"),
        ({"max_tokens": 65}, "max_tokens", "it exceeds rollout.sampling.max_new_tokens=64"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"n": 0}, "n", "a request gets 1 to 128 answers"),
        ({"seed": 1}, "seed", "no seed"),
        ({"top_logprobs": 2}, "top_logprobs", "only the logprobs of sampled tokens"),
        ({"presence_penalty": 0.1}, "presence_penalty", "recorded logprobs wrong"),
        ({"frequency_penalty": 0.1}, "frequency_penalty", "recorded logprobs wrong"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "recorded logprobs wrong"),
        ({"min_p": 0.1}, "min_p", "recorded logprobs wrong"),
        ({"logit_bias": {"5": -100}}, "logit_bias", "recorded logprobs wrong"),
        ({"response_format": {"type": "json_object"}}, "response_format", "only text is sampled"),
        ({"tool_choice": "required"}, "tool_choice", "the policy decides"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "the policy decides"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "the policy decides"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "is not supported"),
        ({"stop": [""]}, "stop", "strings of 1 to"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "expected {type: function"),
        ({"tools": {}}, "tools", "Expected `array`"),
        ({"messages": []}, "messages", "give at least one"),
        ({"messages": None}, "messages", "missing required field `messages`"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]", "role is 'robot'"),
    ],
)
def test_refused_fields(fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    error = refused.value.body["error"]
    assert refused.value.status == 400
    assert error["param"] == param
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"


def test_ignored_fields_are_not_read() -> None:
    rules = RequestRules(RULES.sampling, frozenset({"temperature", "seed", "n"}))
    assert parse(rules, temperature="hot", seed=3, n=8) == parse()
    assert not {"messages", "stream"} & IGNORABLE


def test_a_greedy_evaluation_accepts_the_training_temperature_and_zero() -> None:
    rules = RequestRules(SamplingConfig(temperature=0.7, greedy=True))
    for temperature in (0.7, 0):
        parse(rules, temperature=temperature)
    with pytest.raises(RequestError):
        parse(rules, temperature=0.5)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        chat_request(fields_of(body, RULES), RULES)
