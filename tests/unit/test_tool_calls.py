"""Tool calls in text: parsing of complete texts, and holding back of text that may become a marker."""

from __future__ import annotations

import pytest

from asyncrl.rollout.tool_calls import TAG, held_back, parse_tool_calls


def test_calls_are_found() -> None:
    said = parse_tool_calls(
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3,  "b": "x"}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert said.content == "I add."
    assert [(call.name, call.arguments) for call in said.tool_calls] == [("add", '{"a": 3,  "b": "x"}'), ("now", "{}")]
    ids = [call.id for call in said.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


@pytest.mark.parametrize(
    "text",
    [
        "nothing here",
        '<tool_call>{"name": "add", "arguments": {}',  # cut off
        '<tool_call>{"name": "add", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>add(3)</tool_call>",
        '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": ',  # the second of two is cut off
        '{"name": "add"}</tool_call>',
    ],
)
def test_invalid_calls_stay_text(text: str) -> None:
    said = parse_tool_calls(text)
    assert (said.content, said.tool_calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc", "abc"),
        ("abc<", "abc"),
        ("abc<tool_cal", "abc"),
        ("abc<tool_call>x", "abc"),
        ("<tool_call>x", ""),
        ("abc<tool_x", "abc<tool_x"),
        ("ab\nSTO", "ab\n"),
        ("abSTOP<", "ab"),
        ("", ""),
    ],
)
def test_text_that_may_become_a_marker_is_held_back(text: str, shown: str) -> None:
    assert text[: held_back(text, (TAG, "STOP"))] == shown
