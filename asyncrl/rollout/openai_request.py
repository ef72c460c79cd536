"""Parses requests of the OpenAI API (pure). Every field of a chat completion is applied, ignored as harmless, or refused.

Fields are refused if they are unsupported or would make the recorded logprobs wrong, such as a temperature other than the run's.
The error names the field, its value and the remedy. For an agent that cannot be changed, list fields in its task's
`agent_args.ignore`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import Message, message_for_template, tools_for_template
from asyncrl.protocol.errors import DECODE_ERRORS

# These fields do not affect sampling.
_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
_MAX_ANSWERS = 128  # of one request, as in OpenAI's API
_MAX_STOPS = 16
_MAX_STOP_CHARS = 256


class RequestError(Exception):
    """An error reply in the format of the OpenAI API."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": kind or ("invalid_request_error" if status < 500 else "server_error"),
                "param": param,
                "code": code,
            }
        }


@dataclass(frozen=True)
class RequestRules:
    """The rules that requests are checked against."""

    sampling: SamplingConfig
    ignore: frozenset[str] = frozenset()  # fields that are ignored


@dataclass(frozen=True)
class ChatRequest:
    """A valid request for a chat completion."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any]
    num_answers: int
    max_new_tokens: int
    stops: tuple[str, ...]
    parse_tools: bool
    logprobs: bool
    stream: bool
    include_usage: bool
    speaker: str = ""  # one of the session's, by the header X-Session-ID
    is_text: bool = False  # the content of the only message is the prompt, which no chat template renders


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """The fields of a request with their types. Nulls have been removed before."""

    messages: list[dict[str, Any]]
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] = []
    n: int = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[str, float] = {}
    response_format: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


_NEEDED = frozenset({"messages", "model", "stream", "stream_options"})
IGNORABLE = frozenset(_Body.__struct_fields__) - _NEEDED


def fields_of(body: bytes, rules: RequestRules) -> dict[str, Any]:
    """The fields of a request, without nulls and those that are ignored. Raises RequestError."""
    try:
        fields = msgspec.json.decode(body)
    except (*DECODE_ERRORS, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None and name not in rules.ignore}


def chat_request(fields: dict[str, Any], rules: RequestRules) -> ChatRequest:
    """Check the fields of a chat completion. Raises RequestError that names the field."""
    for name in fields:
        if name not in _Body.__struct_fields__ and name not in _WITHOUT_EFFECT:
            raise _refused(name, fields[name], "this field is not supported")
    try:
        asked = msgspec.convert(fields, _Body)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("`$.")[2].partition("`")[0] if "`$." in str(error) else "messages"
        raise RequestError(str(error), param=field) from None
    _check_sampling(asked, rules.sampling)
    _check_unsupported(asked)
    return ChatRequest(
        model=asked.model,
        messages=_messages(asked.messages),
        tools=_tools(asked.tools),
        template_arguments=asked.chat_template_kwargs,
        num_answers=asked.n,
        max_new_tokens=_max_new_tokens(asked, rules.sampling),
        stops=_stops(asked.stop),
        parse_tools=bool(asked.tools) and asked.tool_choice != "none",
        logprobs=asked.logprobs,
        stream=asked.stream,
        include_usage=asked.stream_options.include_usage,
    )


def _refused(name: str, value: Any, why: str) -> RequestError:
    remedy = f"; remove it, or list it in the task's agent_args.ignore (ignore: [{name}])"
    return RequestError(f"{name}={value!r}: {why}{remedy}", param=name)


def _check_sampling(asked: _Body, sampling: SamplingConfig) -> None:
    """Refuse temperature, top_p and top_k that differ from the run's.

    The trainer computes logprobs with the run's temperature. Logprobs recorded with another temperature could not be compared
    with them.
    """
    greedy = sampling.greedy and asked.temperature == 0.0
    if asked.temperature not in (None, sampling.temperature) and not greedy:
        why = f"this run samples with rollout.sampling.temperature={sampling.temperature:g}"
        raise _refused("temperature", asked.temperature, why)
    for name, value, own in (("top_p", asked.top_p, sampling.top_p), ("top_k", asked.top_k, sampling.top_k)):
        if value not in (None, own):
            raise _refused(name, value, f"this run samples with rollout.sampling.{name}={own:g}")


def _check_unsupported(asked: _Body) -> None:
    refused: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
        ("n", asked.n, lambda n: not 1 <= n <= _MAX_ANSWERS, f"a request gets 1 to {_MAX_ANSWERS} answers"),
        ("seed", asked.seed, lambda seed: seed is not None, "the engines have no seed per request"),
        ("top_logprobs", asked.top_logprobs, bool, "only the logprobs of sampled tokens are known"),
        ("presence_penalty", asked.presence_penalty, bool, "it would make the recorded logprobs wrong"),
        ("frequency_penalty", asked.frequency_penalty, bool, "it would make the recorded logprobs wrong"),
        ("repetition_penalty", asked.repetition_penalty, lambda x: x != 1, "it would make the recorded logprobs wrong"),
        ("min_p", asked.min_p, bool, "it would make the recorded logprobs wrong"),
        ("logit_bias", asked.logit_bias, bool, "it would make the recorded logprobs wrong"),
        ("response_format", asked.response_format, lambda x: x.get("type", "text") != "text", "only text is sampled"),
        ("tool_choice", asked.tool_choice, lambda x: x not in ("auto", "none"), "the policy decides (auto, none)"),
        ("parallel_tool_calls", asked.parallel_tool_calls, lambda x: not x, "the policy decides the number of calls"),
    )
    for name, value, is_refused, why in refused:
        if is_refused(value):
            raise _refused(name, value, why)


def _max_new_tokens(asked: _Body, sampling: SamplingConfig) -> int:
    most = sampling.max_new_tokens
    for name, value in (
        ("max_completion_tokens", asked.max_completion_tokens),
        ("max_tokens", asked.max_tokens),
    ):
        if value is None:
            continue
        if value < 1:
            raise RequestError(f"{name}={value}: must be at least 1", param=name)
        if value > most:
            why = f"it exceeds rollout.sampling.max_new_tokens={most}, which can be raised"
            raise _refused(name, value, why)
        return value
    return most


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > _MAX_STOPS or any(not 0 < len(text) <= _MAX_STOP_CHARS for text in stops):
        raise RequestError(
            f"stop={stop!r}: at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters", param="stop"
        )
    return stops


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    if not messages:
        raise RequestError("messages is empty; give at least one", param="messages")
    made = []
    for index, message in enumerate(messages):
        try:
            made.append(message_for_template(message))
        except ValueError as error:
            raise RequestError(f"messages[{index}]: {error}", param=f"messages[{index}]") from None
    return made


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    try:
        return tools_for_template(list(tools))
    except ValueError as error:
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from None  # tools[index]
