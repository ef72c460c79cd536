"""Continuing a conversation: the tokens behind an answer equal those of rendering the whole conversation again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.data.chat import ChatTemplate, TemplateRefused, message_for_template, same_message, tools_for_template
from asyncrl.testing.tiny import CHAT_TEMPLATE, make_chat_tokenizer

USER = {"role": "user", "content": "What is 3 + 4?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
HEADER = "{% if add_generation_prompt %}<a>{% endif %}"

# This template trims contents and writes the role into the header of a turn. It omits the content of an answer with tool calls.
TRIMMING = (
    "{% for m in messages %}<h>{{ m.role }}</h>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
# This template leaves out the thoughts of all answers but the last.
THINKING = (
    "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' %}{% if not loop.last %}{% set said = said.split('</think>')[-1] %}"
    "{% elif '</think>' not in said %}{% set said = '<think></think>' + said %}{% endif %}{% endif %}"
    "<{{ m.role }}>{{ said }}<|im_end|>\n{% endfor %}" + HEADER
)
# This template requires alternating roles, ids of nine characters, and a call before a tool's result.
STRICT = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == ns.last %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'tool' and ns.last != 'call' %}{{ raise_exception('a tool result without a call') }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "[CALL]{{ c.function | tojson }}{% endfor %}{% set ns.last = 'call' %}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% set ns.last = m.role %}{% endif %}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)
# This template renders a tool's result differently if the messages also include the call.
ATTENTIVE = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.tool_calls %}{% set ns.called = true %}"
    "[CALL]{{ m.tool_calls[0].function | tojson }}{% else %}<{{ 'result' if ns.called else m.role }}>{{ m.content }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
OPEN_ENDED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Templates that are refused:
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<{{ m.role }}>{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}" + HEADER
)
TWICE = "{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}" + HEADER
LATE_END = (
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|im_end|>{% else %}.{% endif %}{% endfor %}" + HEADER
)


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def calls(arguments: Any) -> dict[str, Any]:
    return {"id": None, "function": {"name": "add", "arguments": arguments}}


def chat(template: str = CHAT_TEMPLATE, **arguments: Any) -> tuple[ChatTemplate, Any]:
    tokenizer = make_chat_tokenizer(None, template)
    return ChatTemplate(tokenizer, arguments), tokenizer


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMING, STRICT, ATTENTIVE])
@pytest.mark.parametrize(
    ("answer", "after"),
    [
        (assistant("Seven."), [{"role": "user", "content": "Sure?"}]),
        (assistant("", tool_calls=[CALL]), [{"role": "tool", "content": "7", "tool_call_id": "abcdef123"}]),
        (assistant("Seven."), [{"role": "user", "content": "Sure?"}, assistant("Yes."), USER]),
    ],
)
def test_a_continuation_equals_rendering_the_whole_conversation(
    template: str, answer: dict[str, Any], after: list[dict[str, Any]]
) -> None:
    renderer, tokenizer = chat(template)
    eos = tokenizer.eos_token_id
    everything = renderer.prompt_ids([USER, answer, *after], TOOLS, {})
    continuation = renderer.continuation_ids([USER], answer, after, TOOLS, {}, stop_token=eos)
    assert continuation is not None
    end = len(everything) - len(continuation)
    assert everything[end:] == continuation
    assert everything[end - 1] == eos  # the policy has sampled it
    assert everything[:end].count(eos) == {CHAT_TEMPLATE: 3, TRIMMING: 2, STRICT: 1, ATTENTIVE: 2}[template]


def test_the_template_closes_a_truncated_answer() -> None:
    renderer, tokenizer = chat()
    ids = renderer.continuation_ids([USER], assistant("Sev"), [USER], None, {}, stop_token=None)
    assert tokenizer.decode(ids) == ("<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n")


def test_an_end_of_turn_that_the_template_does_not_write_is_kept() -> None:
    renderer, tokenizer = chat(OPEN_ENDED)
    ids = renderer.continuation_ids([USER], assistant("7"), [USER], None, {}, stop_token=tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "\nuser: What is 3 + 4?\nassistant: "


def test_thoughts_that_a_template_drops_do_not_matter() -> None:
    renderer, tokenizer = chat(THINKING)
    answer = assistant("<think>hm</think>7")
    ids = renderer.continuation_ids([USER], answer, [USER], None, {}, stop_token=tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "\n<user>What is 3 + 4?<|im_end|>\n<a>"


def test_a_template_without_tools_shows_the_content_instead() -> None:
    renderer, tokenizer = chat("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}" + HEADER)
    said = {"role": "tool", "content": "7"}
    answer = assistant("", tool_calls=[CALL])
    ids = renderer.continuation_ids([USER], answer, [said], TOOLS, {}, stop_token=tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "<tool>7<|im_end|><a>"


@pytest.mark.parametrize("template", [FORGETFUL, TWICE, LATE_END])
def test_templates_without_a_recognisable_continuation_are_refused(template: str) -> None:
    renderer, tokenizer = chat(template)
    stop = tokenizer.eos_token_id
    assert renderer.continuation_ids([USER], assistant("7"), [USER], None, {}, stop_token=stop) is None
    assert renderer.prompt_ids([USER, assistant("7"), USER], None, {})


def test_arguments_reach_the_template() -> None:
    renderer, tokenizer = chat("{{ messages[0].content }}{{ mood }}{{ tools | length }}", mood="glad")
    assert tokenizer.decode(renderer.prompt_ids([USER], TOOLS, {})) == "What is 3 + 4?glad1"
    assert tokenizer.decode(renderer.prompt_ids([USER], TOOLS, {"mood": "sad"})) == "What is 3 + 4?sad1"


def test_a_refusal_by_the_template_gives_the_reason() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        chat(STRICT)[0].prompt_ids([USER, USER], None, {})
    with pytest.raises(ValueError, match="has no chat template"):
        chat("")


def test_messages_are_converted_for_templates() -> None:
    made = message_for_template(
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}],
        }
    )
    assert made["content"] == ""
    assert "refusal" not in made
    assert made["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_for_template({"role": "developer", "content": parts}) == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "robot", "content": "a"}, "role is 'robot'"),
        ({"content": "a"}, "role is None"),
        ({"role": "user"}, "needs content"),
        ({"role": "user", "content": 3}, "content is 3"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "a part of type 'image_url'"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "use tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "expected {id, type, function"),
        ({"role": "assistant", "tool_calls": {"id": "1"}}, "must be a list"),
        (
            {"role": "assistant", "tool_calls": [calls("{cut")]},
            "the arguments of add are '{cut'; they must be an object",
        ),
        ({"role": "assistant", "tool_calls": [calls([1])]}, r"the arguments of add are \[1\]"),
        ("hi", "expected an object with role and content, found 'hi'"),
        ({"role": "user", "content": nested(100_000)}, "content has a part of type a deeply nested list"),
        ({"role": "user", "content": ["a" * 1000]}, r"content has a part of type 'a+\.\.\. \(1,002 characters\)"),
    ],
)
def test_invalid_messages_are_refused(message: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        message_for_template(message)


@pytest.mark.parametrize("arguments", [{"a": 3}, '{"a": 3}', '"{\\"a\\": 3}"'])
def test_arguments_of_tool_calls_are_objects_in_the_template(arguments: Any) -> None:
    renderer, _ = chat()
    messages = [USER, message_for_template(assistant("", tool_calls=[calls(arguments)]))]
    assert '{"name": "add", "arguments": {"a": 3}}' in renderer.prompt_text(messages, None)


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    (call,) = message_for_template(assistant("", tool_calls=[calls(arguments)]))["tool_calls"]
    assert call == {"type": "function", "function": {"name": "add", "arguments": {}}}


def test_tools_are_a_list_or_its_json() -> None:
    assert tools_for_template(TOOLS) == tools_for_template(json.dumps(TOOLS)) == TOOLS
    assert tools_for_template(None) is tools_for_template([]) is tools_for_template("[]") is None
    for bad, told in (
        (3, "tools is 3; it must be a list"),
        ([3], r"tools\[0\] is 3"),
        ([*TOOLS, {"name": "f"}], r"tools\[1\]"),
    ):
        with pytest.raises(ValueError, match=told):
            tools_for_template(bad)


def test_a_system_prompt_belongs_to_every_rendering() -> None:
    tokenizer = make_chat_tokenizer(None)
    plain, made = ChatTemplate(tokenizer, {}), ChatTemplate(tokenizer, {}, "Be brief.")
    system = {"role": "system", "content": "Be brief."}
    own = {"role": "system", "content": "Be long."}
    assert made.prompt_ids([USER], TOOLS, {}) == plain.prompt_ids([system, USER], TOOLS, {})
    assert made.prompt_ids([own, USER], TOOLS, {}) == plain.prompt_ids([own, USER], TOOLS, {})
    eos = tokenizer.eos_token_id
    continued = made.continuation_ids([USER], assistant("7"), [USER], None, {}, stop_token=eos)
    assert continued == plain.continuation_ids([USER], assistant("7"), [USER], None, {}, stop_token=eos)


def test_the_sampled_token_ends_the_turn() -> None:
    """A model has several tokens that end a response. Only the token that was sampled is left out of the template's text."""
    renderer, tokenizer = chat(CHAT_TEMPLATE.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|end|>", "<|im_start|>"]})
    (end,) = tokenizer.encode("<|end|>")
    turn = "\n<|im_start|>user\nNo.<|end|>\n<|im_start|>assistant\n"
    assert renderer.turn_text("user", "No.", stop_token=end) == turn
    assert renderer.turn_text("user", "No.", stop_token=tokenizer.eos_token_id) == f"<|end|>{turn}"
    assert renderer.turn_text("user", "No.", stop_token=None) == f"<|end|>{turn}"


def test_a_header_that_ends_the_answer_before_it_is_not_written_twice() -> None:
    """GLM-4 does not end turns: the policy samples the header of the next turn, which generation_config.json lists as EOS."""
    renderer, tokenizer = chat(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|tool|>"]})
    user, tool = tokenizer.encode("<|user|><|tool|>")
    for stop, text in (
        (user, "\nNo.<|assistant|>"),
        (tool, "<|user|>\nNo.<|assistant|>"),
        (None, "<|user|>\nNo.<|assistant|>"),
    ):
        after = [{"role": "user", "content": "No."}]
        ids = renderer.continuation_ids([USER], assistant("7"), after, None, {}, stop_token=stop)
        assert tokenizer.decode(ids) == renderer.turn_text("user", "No.", stop_token=stop) == text


def test_an_answer_is_recognised_by_its_content() -> None:
    call = {**CALL, "index": 0}
    assert same_message(assistant("a b\n"), assistant("a b", annotations=[]))
    assert same_message(assistant("", tool_calls=[CALL]), assistant("", tool_calls=[call]))
    assert not same_message(assistant("a b"), assistant("a  b"))
    assert not same_message(assistant(""), assistant("", tool_calls=[CALL]))
    assert not same_message(USER, {**USER, "content": "What is 3 + 4? "})
    assert not same_message(USER, {**USER, "role": "system"})
