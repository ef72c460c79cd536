"""Converts chat messages to tokens so that a conversation continues with exactly the tokens that were sampled (pure).

A first request is rendered as a whole. In a request that continues an answer of the policy, the answer's tokens stay as they were
sampled, and only the text that the template writes after them is tokenised. To find this text, the conversation is rendered with
a mark in place of the answer, once up to the answer and once with all later messages:

    closed = render(before, MARK)                  ... MARK<|im_end|>\n
    full   = render(before, MARK, what follows)    ... MARK<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n

The text after MARK in `full` is the continuation, without the end-of-turn token that the policy has sampled. For an answer with
tool calls the mark replaces the name of the last call, or the whole answer if the template does not show that name.

Two kinds of template are refused: those that do not show the mark exactly once, for example because they drop or rewrite earlier
answers, and those in which the end of a turn depends on later messages. The result is then None, and the caller renders the
conversation again as a new sequence. A template may drop parts of earlier answers (Qwen3: thoughts). They stay in the context here,
because the policy has seen them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.protocol.messages import DECODE_ERRORS

Message = dict[str, Any]  # in the templates' format: content is text, arguments of tool calls are objects
Tools = Sequence[Mapping[str, Any]]

_MARK = f"answer{secrets.token_hex(8)}"  # passes through trim filters and JSON unchanged


class TemplateRefused(ValueError):
    """The tokenizer's chat template cannot render these messages."""


class ChatTemplate:
    """A tokenizer's chat template with its constant arguments."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, but a ChatAgent needs one; use the tokenizer of a chat model"
            )
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools | None, arguments: Mapping[str, Any]) -> list[int]:
        """Tokens of a whole conversation and of the next answer's header. Raises TemplateRefused."""
        return self._encode(self._render(messages, tools, arguments, header=True))

    def continuation_ids(
        self,
        before: Sequence[Message],
        answer: Message,
        after: Sequence[Message],
        tools: Tools | None,
        arguments: Mapping[str, Any],
        *,
        stop_token: int | None,
    ) -> list[int] | None:
        """Tokens between an answer's tokens and the next answer. stop_token: the token that ended the answer; None if the answer
        was cut, or ended by a stop string.

        Returns None if the template is refused (see the module's docstring).
        """
        marked: Message = {"role": "assistant", "content": _MARK}
        variants = [marked]
        if answer.get("tool_calls"):
            variants.insert(0, {**answer, "tool_calls": _marked_calls(answer["tool_calls"])})
        for stand_in in variants:
            try:
                closed = self._behind_mark([*before, stand_in], tools, arguments, header=False)
                full = self._behind_mark([*before, stand_in, *after], tools, arguments, header=True)
                ending = (
                    closed
                    if stand_in is marked
                    else self._behind_mark([*before, marked], tools, arguments, header=False)
                )
            except TemplateRefused:
                continue
            # `closed` is the text after the mark, which may start with the rest of a tool call; `ending` is only the end of turn
            if full.startswith(closed):
                return self._encode(self._less_sampled_end(ending, stop_token) + full[len(closed) :])
        return None

    def _less_sampled_end(self, ending: str, stop_token: int | None) -> str:
        """The template's text at the end of a turn, without the text of the token with which the policy has ended it."""
        if stop_token is None:
            return ending
        end_of_turn = str(self._tokenizer.decode([stop_token], skip_special_tokens=False))
        stripped = ending.lstrip()
        return stripped.removeprefix(end_of_turn) if stripped.startswith(end_of_turn) else ending

    def _behind_mark(
        self, messages: Sequence[Message], tools: Tools | None, arguments: Mapping[str, Any], *, header: bool
    ) -> str:
        text = self._render(messages, tools, arguments, header=header)
        if text.count(_MARK) != 1:
            raise TemplateRefused("the chat template does not show an earlier answer exactly once")
        return text.partition(_MARK)[2]

    def _render(
        self, messages: Sequence[Message], tools: Tools | None, arguments: Mapping[str, Any], *, header: bool
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=header,
                    **{**self._arguments, **arguments},
                )
            )
        except Exception as error:  # a template is a program and may raise anything, e.g. if roles do not alternate
            raise TemplateRefused(f"the chat template refuses these messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        try:
            return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        except Exception as error:  # tokenizers raises plain Exception
            raise TemplateRefused(f"the tokenizer cannot encode {text!r}: {error}") from error


def _marked_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [*map(dict, calls[:-1]), {**calls[-1], "function": {"name": _MARK, "arguments": {}}}]


def same_message(one: Message, other: Message) -> bool:
    """Whether a client's message is the recorded one. Of an answer only content and tool calls are compared, and whitespace around
    the content is ignored."""
    if one["role"] != other["role"]:
        return False
    if one["role"] != "assistant":
        return one == other
    return _said(one) == _said(other)


def _said(answer: Message) -> tuple[str, list[Any]]:
    calls = answer.get("tool_calls") or []
    return answer["content"].strip(), [(call.get("id"), call.get("function")) for call in calls]


def message_for_template(message: Mapping[str, Any]) -> Message:
    """Convert a message of the OpenAI API to the templates' format. Raises ValueError that names the error.

    Text parts are joined, the arguments of tool calls become objects, `developer` becomes `system`, nulls are removed.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"role is {role!r}; it must be system, developer, user, assistant or tool")
    if kept.get("function_call"):
        raise ValueError("function_call is not supported; use tool_calls")
    if "content" not in kept and role != "assistant":
        raise ValueError(f"a message of role {role!r} needs content")
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _text_of(kept.get("content", ""))
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    else:
        kept["tool_calls"] = [_call_for_template(call) for call in kept["tool_calls"]]
    return kept


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is {content!r}; it must be text, or a list of text parts")
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"content has a part of type {kind!r}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _call_for_template(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise ValueError(f"tool_calls contains {call!r}; expected {{id, type, function: {{name, arguments}}}}")
    arguments: Any = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except DECODE_ERRORS:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
