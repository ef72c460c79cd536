"""Parses tool calls in a policy's answers (pure), in the format of Hermes and Qwen.

    I add them up. <tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>

There is one JSON object between each pair of tags. If any call is cut or invalid, the whole answer stays text, and the agent sees
exactly this text.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field

import msgspec

from asyncrl.protocol.errors import DECODE_ERRORS

TAG = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON of an object, exactly as sampled
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])  # Mistral's templates need nine alphanumerics


@dataclass(frozen=True)
class Said:
    """An answer in the form of an OpenAI message."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_decode_call = msgspec.json.Decoder(_Call).decode


def parse_tool_calls(text: str) -> Said:
    """Parse an answer. Content is the text before the first call; text between and after calls remains only in the tokens."""
    if TAG not in text:
        return Said(text)
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = _decode_call(match[1].strip())
            msgspec.json.decode(call.arguments, type=dict)
        except (*DECODE_ERRORS, RecursionError):
            return Said(text)
        arguments = bytes(call.arguments).decode().strip()
        calls.append(ToolCall(call.name, arguments))
    if len(calls) != text.count(TAG):
        return Said(text)
    return Said(text[: text.index(TAG)].rstrip(), tuple(calls))


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters of an incomplete text can be shown: those before a marker or before a possible start of one."""
    shown = len(text)
    for marker in markers:
        found = text.find(marker)
        if found >= 0:
            shown = min(shown, found)
            continue
        longest = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
        shown = min(shown, len(text) - longest)
    return shown
