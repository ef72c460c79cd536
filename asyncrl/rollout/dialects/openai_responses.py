"""OpenAI's responses.

`previous_response_id` continues any answer of the session. Its instructions stay, unless the request has its own: then these take
their place, so the conversation starts a new sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.data.chat import shortened
from asyncrl.rollout.dialects.dialect import Conversation, Dialect, Events, Piece, Reply, event, list_of_objects
from asyncrl.rollout.openai_request import RequestError
from asyncrl.rollout.openai_session import Answer

# Values that change nothing here. Other values of these fields are refused
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
}
_TEXT_PARTS = ("text", "input_text", "output_text")


class ResponseEvents(Events):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._number = 0
        self._text = ""

    def piece(self, index: int, piece: Piece) -> bytes:
        begin = self._begin()
        self._text += piece.text
        return begin + self._event("response.output_text.delta", {**self._part, "delta": piece.text, "logprobs": []})

    def answered(self, index: int, answer: Answer) -> bytes:
        events = [self._begin()]
        message, *calls = _output(self.reply, answer, with_message=True)
        (text,) = message["content"]
        events += [
            self._event("response.output_text.done", {**self._part, "text": self._text, "logprobs": []}),
            self._event("response.content_part.done", {**self._part, "part": text}),
            self._event("response.output_item.done", {"output_index": 0, "item": message}),
        ]
        for position, call in enumerate(calls, 1):
            place = {"item_id": call["id"], "output_index": position}
            begun = {**call, "arguments": "", "status": "in_progress"}
            events += [
                self._event("response.output_item.added", {"output_index": position, "item": begun}),
                self._event("response.function_call_arguments.delta", {**place, "delta": call["arguments"]}),
                self._event(
                    "response.function_call_arguments.done",
                    {**place, "arguments": call["arguments"], "name": call["name"]},
                ),
                self._event("response.output_item.done", {"output_index": position, "item": call}),
            ]
        return b"".join(events)

    def end(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        body = _body(self.reply, answer, _output(self.reply, answer, with_message=True))
        return self._event(f"response.{body['status']}", {"response": body})

    @property
    def _part(self) -> dict[str, Any]:
        return {"item_id": _message_id(self.reply), "output_index": 0, "content_index": 0}

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = {"response": _body(self.reply, None, [])}
        item = {
            "id": _message_id(self.reply),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        return b"".join(
            [
                self._event("response.created", response),
                self._event("response.in_progress", response),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event("response.content_part.added", {**self._part, "part": _text_part("")}),
            ]
        )

    def _event(self, name: str, body: dict[str, Any]) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **body}, name)


class OpenAIResponses(Dialect):
    path = "/v1/responses"
    id_prefix = "resp_"
    events = ResponseEvents
    ignorable = frozenset({"text", "truncation", "max_tool_calls", "background", "reasoning", "include"})

    def chat_fields(self, fields: dict[str, Any], conversation: Conversation) -> dict[str, Any]:
        asked = dict(fields)
        messages: list[Any] = []
        if "previous_response_id" in asked:
            messages = list(conversation(str(asked.pop("previous_response_id"))))
        if "instructions" in asked:
            if messages and messages[0]["role"] == "system":
                del messages[0]
            messages.insert(0, {"role": "system", "content": asked.pop("instructions")})
        asked["messages"] = messages + _messages(asked.pop("input", None))
        if "max_output_tokens" in asked:
            asked["max_completion_tokens"] = asked.pop("max_output_tokens")
        if "tools" in asked:
            asked["tools"] = [_tool(tool) for tool in list_of_objects(asked["tools"], "tools")]
        text = asked.get("text")
        if isinstance(text, Mapping) and text.keys() <= {"format"}:  # with other fields it is refused
            del asked["text"]
            if "format" in text:
                asked["response_format"] = text["format"]
        for name, harmless in _HARMLESS.items():
            if name in asked and asked[name] in harmless:
                del asked[name]
        return asked

    def body(self, reply: Reply, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return _body(reply, answer, _output(reply, answer))


def _body(reply: Reply, answer: Answer | None, output: list[dict[str, Any]]) -> dict[str, Any]:
    """answer: None while it is being generated."""
    fields = reply.fields
    cut = answer is not None and answer.finish_reason == "length"
    usage = None
    if answer is not None:
        prompt, sampled = answer.num_prompt_tokens, len(answer.response.output_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress" if answer is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": reply.request.max_new_tokens,
        "metadata": fields.get("metadata") or {},
        "model": reply.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": fields.get("previous_response_id"),
        "store": True,
        "temperature": reply.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_p": reply.sampling.top_p,
        "truncation": "disabled",
        "usage": usage,
    }


def _output(reply: Reply, answer: Answer, *, with_message: bool = False) -> list[dict[str, Any]]:
    """The items of an answer. with_message: the message is there though it has no text, because a stream has begun it."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if with_message or answer.said.content or not answer.said.tool_calls:
        content = [_text_part(answer.said.content)]
        items = [
            {"id": _message_id(reply), "type": "message", "status": status, "role": "assistant", "content": content}
        ]
    for call in answer.said.tool_calls:
        function = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"id": f"fc_{call.id}", "type": "function_call", "status": status, **function})
    return items


def _message_id(reply: Reply) -> str:
    return f"msg_{reply.id.partition('_')[2]}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(given: Any) -> list[dict[str, Any]]:
    """The input in the form of chat completions. A message of the assistant and the calls behind it are one answer."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(list_of_objects(given, "input")):
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            )
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        else:
            raise RequestError(
                f"input[{index}] is of type {shortened(kind)}; supported are message, function_call and function_call_output",
                param=f"input[{index}]",
            )
    return messages


def _content(content: Any) -> Any:
    """Parts of text, in the form of chat completions; other parts stay, so they are refused."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools has a tool of type {shortened(tool.get('type'))}; only functions that the client runs are supported",
            param="tools",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}
