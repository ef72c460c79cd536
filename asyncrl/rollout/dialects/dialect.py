"""An API that agents speak: how its requests are read, and how answers, events and errors are written in it.

Each API is one file beside this one and one row of `DIALECTS` (openai_api.py). Every request is read as a chat completion, so the
same rules apply, ignore or refuse its fields (openai_request.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import Message, shortened
from asyncrl.rollout.openai_request import ChatRequest, RequestError
from asyncrl.rollout.openai_session import Answer

MODEL = "policy"  # the model that /v1/models lists; requests may use any name
Conversation = Callable[[str], list[Message]]  # the messages up to an answer, by the answer's id


@dataclass(frozen=True)
class Reply:
    """What all answers to one request share."""

    id: str
    created: int  # seconds since 1970
    request: ChatRequest
    fields: dict[str, Any]  # of the request, as the client sent them
    sampling: SamplingConfig
    decode_token: Callable[[int], str]

    @property
    def model(self) -> str:
        return self.request.model or MODEL

    def answer_id(self, index: int) -> str:
        """The id of one of the request's `n` answers."""
        return self.id if index == 0 else f"{self.id}-{index}"


@dataclass(frozen=True)
class Piece:
    """New text of an answer that is being generated."""

    text: str
    token_ids: Sequence[int] = field(default=())  # sampled since the last piece
    logprobs: Sequence[float] = field(default=())


class Events(ABC):
    """Writes the answers to one request as server-sent events. `piece` and `answered` may alternate between the answers."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> bytes:
        """New text of an answer."""

    @abstractmethod
    def answered(self, index: int, answer: Answer) -> bytes:
        """The end of an answer, whose text has been sent, with its tool calls."""

    @abstractmethod
    def end(self, answers: Sequence[Answer]) -> bytes:
        """The end of the reply."""


class Dialect(ABC):
    """One API."""

    path: str  # of the requests
    id_prefix: str  # of the ids of its answers
    events: type[Events]
    gives_several: bool = False  # whether a request may ask for `n` answers
    is_text: bool = False  # whether a request is one text, which no chat template renders
    ignorable: frozenset[str] = frozenset()  # fields beside those of a chat completion that agent_args.ignore may list

    def chat_fields(self, fields: dict[str, Any], conversation: Conversation) -> dict[str, Any]:
        """The fields of a chat completion that ask for the same. Raises RequestError. Unknown fields are kept, and so refused by
        name."""
        return fields

    @abstractmethod
    def body(self, reply: Reply, answers: Sequence[Answer]) -> dict[str, Any]:
        """The reply to a request without a stream."""

    def error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error reply, and the event of an error within a stream."""
        return error.body


def event(body: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + msgspec.json.encode(body) + b"\n\n"


def list_of_objects(value: Any, where: str) -> list[Mapping[str, Any]]:
    """The value, checked. where: the field, for the error."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RequestError(f"{where} is {shortened(value)}; it must be a list of objects", param=where)
    return value
