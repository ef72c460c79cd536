"""The entrance from messages to tokens (pure): of prompts, evaluation, texts of train.ptx, the OpenAI API and agents.

    message -> message_for_template -> ChatTemplate -> encode    a conversation, rendered by the tokenizer's chat template
    text    -> encode_prompt                                     a prompt that is read as it is

A chat template writes all special tokens of a conversation, as in transformers' apply_chat_template. Before a text that is read as
it is, the tokenizer's own start (BOS) stands once. No end of text follows a prompt, also if the tokenizer adds one to each text.

A conversation continues with exactly the tokens that were sampled. A first request is rendered as a whole. In a request that
continues an answer of the policy, the answer's tokens stay as they were sampled, and only the text that the template writes after
them is tokenised. To find this text, the conversation is rendered with a mark in place of the answer, once up to the answer and
once with all later messages:

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

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.protocol.errors import DECODE_ERRORS

Message = dict[str, Any]  # in the templates' format: content is text, arguments of tool calls are objects
Tools = Sequence[Mapping[str, Any]]

_TOOL_FORMAT = "{type: function, function: {name, description, parameters}}"
_MAX_SHOWN = 300  # characters of a value in an error message
_MARK = f"answer{secrets.token_hex(8)}"  # passes through trim filters and JSON unchanged


class TemplateRefused(ValueError):
    """The tokenizer's chat template cannot render these messages."""


class ChatTemplate:
    """A tokenizer's chat template with its constant arguments, and the system message of chats that have none of their own."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any], system_prompt: str = "") -> None:
        """Raises ValueError if the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use the tokenizer of a chat model")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self._system_prompt = system_prompt

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """The same template with further arguments; these win."""
        return ChatTemplate(self._tokenizer, {**self._arguments, **arguments}, self._system_prompt)

    def prompt_text(self, messages: Sequence[Message], tools: Tools | None) -> str:
        """Text of a whole conversation and of the next answer's header. Raises TemplateRefused."""
        return self._render(messages, tools, {}, header=True)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools | None, arguments: Mapping[str, Any]) -> list[int]:
        """Tokens of a whole conversation and of the next answer's header. Raises TemplateRefused."""
        return self._encode(self._render(messages, tools, arguments, header=True))

    def turn_text(self, role: str, content: str, *, stop_token: int | None) -> str:
        """Text between an answer and the next one, with a message of this role between them. stop_token: as in continuation_ids.

        Raises TemplateRefused if the template does not show the message.
        """
        messages = [
            {"role": "user", "content": "the prompt"},
            {"role": "assistant", "content": _MARK},
            {"role": role, "content": content},
        ]
        _, found, turn = self._render(messages, None, {}, header=True).rpartition(_MARK)
        if not found or content.strip() not in turn:  # templates may trim
            raise TemplateRefused(f"the chat template does not show messages of this role ({role!r})")
        return self._less_sampled_end(turn, stop_token)

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
                return self._encode(self._less_sampled_end(ending + full[len(closed) :], stop_token))
        return None

    def _less_sampled_end(self, ending: str, stop_token: int | None) -> str:
        """The template's text after an answer, without the text of the token with which the policy has ended it. This token may end
        the turn, or begin the next one, if the template does not end turns (GLM-4)."""
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
        system = self._system_prompt and messages[0]["role"] != "system"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [{"role": "system", "content": self._system_prompt}, *messages] if system else list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=header,
                    **{**self._arguments, **arguments},
                )
            )
        except Exception as error:  # a template is a program and may raise anything, e.g. if roles do not alternate
            raise TemplateRefused(f"the chat template refuses {shortened(list(messages))}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        try:
            return encode(self._tokenizer, text)
        except ValueError as error:
            raise TemplateRefused(str(error)) from error


# ------------------------------------------------------------------------------------------------------------------ tokens


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that contains all its special tokens. Raises ValueError if the tokenizer cannot encode it."""
    return _ids(tokenizer, text, special=False)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a prompt that is read as it is: the tokenizer's start (BOS) once, then the text, and nothing after it.

    Raises ValueError if the tokenizer cannot encode it, or knows none of its characters.
    """
    ids = _ids(tokenizer, text, special=False)
    if not ids:
        raise ValueError(f"the prompt {shortened(text)} has no tokens: the tokenizer knows none of its characters")
    return with_start(ids, _ids(tokenizer, text, special=True)) if _ids(tokenizer, "", special=True) else ids


def with_start(ids: list[int], whole: list[int]) -> list[int]:
    """Tokens of a text after those that the tokenizer writes before it, unless the text begins with them itself. whole: the text's
    tokens with all that the tokenizer adds, which may be an end too."""
    start = next((at for at in range(len(whole) - len(ids) + 1) if whole[at : at + len(ids)] == ids), 0)
    return ids if ids[:start] == whole[:start] else whole[:start] + ids


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    try:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=special)]
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"the tokenizer cannot encode the prompt {shortened(text)}: {error}") from error


class SpecialTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        known = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, known))) if known else None

    def removed_from(self, text: str) -> str:
        """The text without them. All other characters stay as they are, unlike with encode and decode."""
        return self._any.sub("", text) if self._any else text


def shortened(value: Any) -> str:
    """The value for an error message."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


# ---------------------------------------------------------------------------------------------------------------- messages


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


def messages_for_template(messages: Any) -> list[Message]:
    """Convert the messages of a chat. Raises ValueError that names the message and the error."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"expected a list of messages (role, content), found {shortened(messages)}")
    made = []
    for index, message in enumerate(messages):
        try:
            made.append(message_for_template(message))
        except ValueError as error:
            raise ValueError(f"message {index}: {error}") from None
    return made


def message_for_template(message: Any) -> Message:
    """Convert a message of the OpenAI API, or of a row of prompts, to the templates' format. Raises ValueError.

    Text parts are joined, the arguments of tool calls become objects, `developer` becomes `system`, nulls are removed.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"expected an object with role and content, found {shortened(message)}")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ValueError(f"role is {shortened(role)}; it must be system, developer, user, assistant or tool")
    if kept.get("function_call"):
        raise ValueError("function_call is not supported; use tool_calls")
    if "content" not in kept and role != "assistant":
        raise ValueError(f"a message of role {role!r} needs content")
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _text_of(kept.get("content", ""))
    calls = kept.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is {shortened(calls)}; it must be a list")
    return {**kept, "tool_calls": [_call_for_template(call) for call in calls]} if calls else kept


def tools_for_template(tools: Any) -> list[dict[str, Any]] | None:
    """Check the tools of a chat: a list, or its JSON. None: there are none. Raises ValueError that names the tool."""
    tools = _decoded(tools)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools is {shortened(tools)}; it must be a list of {_TOOL_FORMAT}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function" or not function.get("name"):
            raise ValueError(f"tools[{index}] is {shortened(tool)}; expected {_TOOL_FORMAT}")
    return [dict(tool) for tool in tools]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is {shortened(content)}; it must be text, or a list of text parts")
    texts = []
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"content has a part of type {shortened(kind)}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _call_for_template(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise ValueError(f"tool_calls contains {shortened(call)}; expected {{id, type, function: {{name, arguments}}}}")
    arguments = _decoded(function.get("arguments")) or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"tool_calls: the arguments of {function['name']} are {shortened(arguments)}; they must be an object"
        )
    kept = {key: value for key, value in call.items() if value is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _decoded(value: Any) -> Any:
    """The value itself, or what its JSON contains. A string that is no JSON stays."""
    while isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (*DECODE_ERRORS, RecursionError):
            return value
    return value
