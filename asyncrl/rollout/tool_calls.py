"""Tool calls in what a policy says (pure): the format of Hermes and Qwen.

    I add them up. <tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>

One object between each pair of tags. Text in which any call is cut or is no such object stays text: the agent sees what was said.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field

import msgspec

from asyncrl.protocol.messages import DECODE_ERRORS

TAG = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON of an object, as it was sampled
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])  # nine of 0-9a-f: Mistral's templates want it so


@dataclass(frozen=True)
class Said:
    """An answer as an OpenAI message has it."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_decode_call = msgspec.json.Decoder(_Call).decode


def parse_tool_calls(text: str) -> Said:
    """Content is what stands before the first call; what stands between and behind calls is in the tokens only."""
    if TAG not in text:
        return Said(text)
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = _decode_call(match[1].strip())
        except DECODE_ERRORS:
            return Said(text)
        arguments = bytes(call.arguments).decode().strip()
        if not arguments.startswith("{"):
            return Said(text)
        calls.append(ToolCall(call.name, arguments))
    if len(calls) != text.count(TAG):
        return Said(text)
    return Said(text[: text.index(TAG)].rstrip(), tuple(calls))


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters of text, which goes on, can be shown: those before a marker, or before what may become one."""
    shown = len(text)
    for marker in markers:
        found = text.find(marker)
        if found >= 0:
            shown = min(shown, found)
            continue
        longest = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
        shown = min(shown, len(text) - longest)
    return shown
