"""An agent written for openai's client: the policy calls a calculator, reads its result, and answers.

`solve` works with any server of the OpenAI API. `CalculatorAgent` makes it trainable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from asyncrl.data.prompts import Prompt
from asyncrl.rollout.chat_agent import ChatAgent, ChatSession

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "adds or subtracts",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([+-])\s*(-?\d{1,9})\s*", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)


class CalculatorAgent(ChatAgent):
    """Gives reward 1 for the right number, else 0."""

    async def chat(self, session: ChatSession, prompt: Prompt) -> float:
        answer = await solve(session.client(), prompt.row["messages"])
        return float(final_number(answer) == int(prompt.answer))


async def solve(client: AsyncOpenAI, messages: Sequence[Any]) -> str:
    """Hold a conversation of at most two turns: calls of the calculator, then the answer."""
    conversation = list(messages)
    completion = await client.chat.completions.create(model="policy", messages=conversation, tools=[CALCULATOR])
    said = completion.choices[0].message
    if not said.tool_calls:
        return said.content or ""
    conversation.append(said)
    for call in said.tool_calls:
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    completion = await client.chat.completions.create(model="policy", messages=conversation, tools=[CALCULATOR])
    return completion.choices[0].message.content or ""


def calculate(arguments: str) -> str:
    """The calculator's result for the arguments of a call: a number, or "error"."""
    expression = json.loads(arguments).get("expression")
    match = _EXPRESSION.fullmatch(expression) if isinstance(expression, str) else None
    if match is None:
        return "error"
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a - b)


def final_number(text: str) -> int | None:
    """The number after the last `####`; None if there is none."""
    _, marker, tail = text.rpartition("####")
    match = _NUMBER.search(tail) if marker else None
    return int(match[0]) if match else None
