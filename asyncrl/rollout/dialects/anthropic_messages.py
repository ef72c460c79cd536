"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.data.chat import shortened
from asyncrl.rollout.dialects.dialect import Conversation, Dialect, Events, Piece, Reply, event, list_of_objects
from asyncrl.rollout.openai_request import RequestError
from asyncrl.rollout.openai_session import Answer

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class MessageEvents(Events):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._begun = False

    def piece(self, index: int, piece: Piece) -> bytes:
        delta = {"type": "text_delta", "text": piece.text}
        return self._begin() + _event("content_block_delta", {"index": 0, "delta": delta})

    def answered(self, index: int, answer: Answer) -> bytes:
        events = [self._begin(), _event("content_block_stop", {"index": 0})]
        for number, block in enumerate(_tool_uses(answer), 1):
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
            events += [
                _event("content_block_start", {"index": number, "content_block": {**block, "input": {}}}),
                _event("content_block_delta", {"index": number, "delta": delta}),
                _event("content_block_stop", {"index": number}),
            ]
        return b"".join(events)

    def end(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        return _event("message_delta", {"delta": _stop_of(answer), "usage": _usage(answer)}) + _event(
            "message_stop", {}
        )

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = {**_head(self.reply), "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": 0, "output_tokens": 0}  # message_delta has the numbers
        block = {"type": "text", "text": ""}
        return _event("message_start", {"message": message}) + _event(
            "content_block_start", {"index": 0, "content_block": block}
        )


class AnthropicMessages(Dialect):
    path = "/v1/messages"
    id_prefix = "msg_"
    events = MessageEvents
    ignorable = frozenset({"thinking", "context_management", "output_config", "container", "mcp_servers"})

    def chat_fields(self, fields: dict[str, Any], conversation: Conversation) -> dict[str, Any]:
        asked = dict(fields)
        messages = (
            [{"role": "system", "content": _text_blocks(asked.pop("system"), "system")}] if "system" in asked else []
        )
        for index, message in enumerate(list_of_objects(asked.pop("messages", None), "messages")):
            messages += _chat_messages(message, f"messages[{index}]")
        asked["messages"] = messages
        if "tools" in asked:
            asked["tools"] = [_tool(tool) for tool in list_of_objects(asked["tools"], "tools")]
        if "stop_sequences" in asked:
            asked["stop"] = asked.pop("stop_sequences")
        choice = asked.get("tool_choice")
        if isinstance(choice, Mapping):
            asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
            if choice.get("type") in ("auto", "none"):
                asked["tool_choice"] = choice["type"]
        if asked.get("thinking") == {"type": "disabled"}:
            del asked["thinking"]
        return asked

    def body(self, reply: Reply, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        text = answer.said.content
        blocks = [{"type": "text", "text": text}] if text or not answer.said.tool_calls else []
        return {
            **_head(reply),
            "content": [*blocks, *_tool_uses(answer)],
            **_stop_of(answer),
            "usage": _usage(answer),
        }

    def error(self, error: RequestError) -> dict[str, Any]:
        kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _event(name: str, body: dict[str, Any]) -> bytes:
    return event({"type": name, **body}, name)


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.response.output_ids)}


def _stop_of(answer: Answer) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if answer.stop else "end_turn"}
    return {"stop_reason": reasons[answer.finish_reason], "stop_sequence": answer.stop}


def _tool_uses(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.json.decode(call.arguments)}
        for call in answer.said.tool_calls
    ]


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A message in the form of chat completions: results of tools become messages of their own, before the message's text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}: role is {shortened(role)}; it must be user or assistant", param=where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in list_of_objects(content, f"{where}.content"):
        kind = block.get("type")
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text_blocks(block.get("content", ""), f"{where}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            raise RequestError(
                f"{where}.content has a block of type {shortened(kind)} in a message of role {role!r}; supported are text, "
                "tool_use of the assistant, and tool_result of the user",
                param=f"{where}.content",
            )
    said = {"role": role, "content": _text_blocks(texts, f"{where}.content")}
    if role == "assistant":
        return [{**said, "tool_calls": calls}]
    return [*results, said] if texts or not results else results


def _text_blocks(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = list_of_objects(content, where)
    if any(block.get("type") != "text" or not isinstance(block.get("text"), str) for block in blocks):
        raise RequestError(f"{where} is {shortened(content)}; it must be text, or a list of text blocks", param=where)
    return "".join(block["text"] for block in blocks)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise RequestError(
            f"tools has a tool of type {shortened(tool['type'])}; only tools that the client runs are supported",
            param="tools",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
