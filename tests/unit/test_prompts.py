"""Prompt sources: each line occurs once per epoch, in an order that the seed determines. Broken files are refused at start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.prompts import PromptError, PromptSource, load_tokenizer
from asyncrl.protocol.trajectories import Locator
from asyncrl.testing.tiny import make_char_tokenizer, make_chat_tokenizer

ROWS = [{"prompt": f"q{i}", "answer": str(i), "kind": "even" if i % 2 == 0 else "odd", "extra": [i]} for i in range(20)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant:{% endif %}"
)


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "prompts.jsonl", ROWS)


def order(source: PromptSource, epoch: int) -> list[str]:
    return [source.get(Locator(epoch, position)).text for position in range(len(source))]


TEXTS = [row["prompt"] for row in ROWS]

# ------------------------------------------------------------------------------------------------------------------- order


def test_each_epoch_has_every_prompt_once_in_another_order(jsonl: str) -> None:
    source = PromptSource(PromptSourceConfig(path=jsonl), seed=3)
    epochs = [order(source, epoch) for epoch in range(4)]
    assert len(source) == 20
    for epoch in epochs:
        assert sorted(epoch) == sorted(TEXTS)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_depends_on_the_seed_alone(jsonl: str) -> None:
    config = PromptSourceConfig(path=jsonl)
    first, second, other = PromptSource(config, seed=3), PromptSource(config, seed=3), PromptSource(config, seed=4)
    expected = [order(first, epoch) for epoch in range(5)]
    for epoch in (4, 0, 3, 1, 2, 0):  # the order of an epoch does not depend on earlier calls
        assert order(second, epoch) == expected[epoch]
        assert order(other, epoch) != expected[epoch]


def test_without_shuffling_the_order_is_that_of_the_file(jsonl: str) -> None:
    source = PromptSource(PromptSourceConfig(path=jsonl, shuffle=False))
    assert order(source, 0) == order(source, 7) == TEXTS


@pytest.mark.parametrize("locator", [Locator(0, 20), Locator(0, -1), Locator(-1, 0)])
def test_a_locator_outside_the_epoch_is_refused(jsonl: str, locator: Locator) -> None:
    with pytest.raises(ValueError, match="an epoch has 20 prompts"):
        PromptSource(PromptSourceConfig(path=jsonl)).get(locator)


def test_a_weight_says_how_often_a_task_is_in_each_epoch(jsonl: str) -> None:
    config = PromptSourceConfig(path=jsonl, task_key="kind", task_weights={"even": 2.5, "odd": 0.4})
    sources = [PromptSource(config, seed=3) for _ in range(2)]
    epochs = [order(sources[0], epoch) for epoch in range(5)]
    assert len(sources[0]) == 25 + 4
    assert sources[0].tasks == {"even", "odd"}
    halves = set()
    for epoch in epochs:
        counts = Counter(epoch)
        assert sorted(counts[text] for text in TEXTS[::2]) == [2] * 5 + [3] * 5
        assert sorted(counts[text] for text in TEXTS[1::2]) == [0] * 6 + [1] * 4
        halves.add(tuple(text for text in TEXTS[1::2] if counts[text]))
    assert len(halves) > 1  # drawn anew
    assert epochs == [order(sources[1], epoch) for epoch in range(5)]


def test_whatever_changes_the_order_changes_the_fingerprint(jsonl: str, tmp_path: Path) -> None:
    swapped = write_jsonl(
        tmp_path / "swapped.jsonl", [*ROWS[:18], ROWS[18] | {"kind": "odd"}, ROWS[19] | {"kind": "even"}]
    )
    of_files = {path: PromptSourceConfig(path=path, task_key="kind") for path in (jsonl, swapped)}
    assert len({PromptSource(config).fingerprint() for config in of_files.values()}) == 1
    weighted = [replace(config, task_weights={"even": weight}) for config in of_files.values() for weight in (2.0, 3.0)]
    sources = [PromptSource(config) for config in (of_files[jsonl], *weighted)]
    orders = [order(source, 0) for source in sources]
    assert all(one != other for at, one in enumerate(orders) for other in orders[:at])
    assert len({source.fingerprint() for source in sources}) == len(sources)


def test_a_small_weight_draws_at_least_one_line(jsonl: str) -> None:
    config = PromptSourceConfig(path=jsonl, task_key="kind", task_weights={"even": 0.01, "odd": 0})
    assert len(order(PromptSource(config), 0)) == 1


def test_a_task_of_weight_0_is_left_out(jsonl: str) -> None:
    source = PromptSource(PromptSourceConfig(path=jsonl, task_key="kind", task_weights={"odd": 0}), seed=3)
    assert sorted(order(source, 1)) == sorted(TEXTS[::2])
    assert source.tasks == {"even"}
    assert source.all_tasks == {"even", "odd"}
    with pytest.raises(ValueError, match="holds no prompts of a task with a weight"):
        PromptSource(PromptSourceConfig(path=jsonl, task_key="kind", task_weights={"odd": 0, "even": 0}))


def test_a_negative_seed_is_refused(jsonl: str) -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        PromptSource(PromptSourceConfig(path=jsonl), seed=-1)


# ----------------------------------------------------------------------------------------------------------------- reading


def test_a_prompt_carries_its_whole_line(jsonl: str) -> None:
    source = PromptSource(PromptSourceConfig(path=jsonl, task_key="kind", shuffle=False))
    prompt = source.get(Locator(2, 7))
    assert (prompt.prompt_id, prompt.text, prompt.answer, prompt.task) == ("e2-p7", "q7", "7", "odd")
    assert prompt.row == ROWS[7]
    assert prompt.input_ids == []  # no tokenizer
    assert not prompt.too_long


def test_answers_pass_through_untouched(tmp_path: Path) -> None:
    rows = [{"q": "a", "truth": {"x": [1, None, "ü"]}}, {"q": "b", "truth": None}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    source = PromptSource(PromptSourceConfig(path=path, prompt_key="q", answer_key="truth", shuffle=False))
    assert [source.get(Locator(0, i)).answer for i in range(2)] == [{"x": [1, None, "ü"]}, None]
    assert PromptSource(PromptSourceConfig(path=path, prompt_key="q", answer_key="")).get(Locator(0, 0)).answer == ""


def test_without_a_task_key_all_prompts_have_the_default_task(jsonl: str) -> None:
    assert PromptSource(PromptSourceConfig(path=jsonl)).get(Locator(0, 0)).task == "default"


def test_parquet_and_jsonl_give_equal_prompts(tmp_path: Path, jsonl: str) -> None:
    path = tmp_path / "prompts.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    from_parquet, from_jsonl = (PromptSource(PromptSourceConfig(path=str(p), task_key="kind")) for p in (path, jsonl))
    assert len(from_parquet) == 20
    for position in range(20):
        assert from_parquet.get(Locator(1, position)) == from_jsonl.get(Locator(1, position))


def test_hub_names_are_loaded_with_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, subset, split))
        return ROWS

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = PromptSource(PromptSourceConfig(path="someone/sums", split="test", shuffle=False))
    assert order(source, 0) == TEXTS
    PromptSource(PromptSourceConfig(path="someone/sums", subset="main"))
    assert asked == [("someone/sums", None, "test"), ("someone/sums", "main", "train")]
    with pytest.raises(ValueError, match=r"someone/sums\[train\], row 0: no key 'question'"):
        PromptSource(PromptSourceConfig(path="someone/sums", prompt_key="question"))


def test_hub_names_need_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'asyncrl\[hub\]'"):
        PromptSource(PromptSourceConfig(path="someone/sums"))


def test_parquet_needs_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "p.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'asyncrl\[parquet\]'"):
        PromptSource(PromptSourceConfig(path=str(tmp_path / "p.parquet")))


def test_blank_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a", "answer": 1}\n  \n{"prompt": "b", "answer": 2}', encoding="utf-8")
    assert len(PromptSource(PromptSourceConfig(path=str(path)))) == 2


# ---------------------------------------------------------------------------------------------------------------- refusals


GOOD = b'{"prompt": "a", "answer": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b'{"prompt": "b", \n', r"p\.jsonl:2: not a line of JSON"),
        (GOOD + b"\xff\xfe\n", r"p\.jsonl:2: not a line of JSON"),
        (GOOD + b'{"prompt": "\xff", "answer": 1}\n', r"p\.jsonl:2: not a line of JSON"),
        (GOOD + GOOD + b"[1]\n", r"p\.jsonl:3: expected an object with the key 'prompt', found list"),
        (
            GOOD + b'{"answer": 1}\n',
            r"p\.jsonl:2: no key 'prompt', only \['answer'\]; set prompts.prompt_key to the right one",
        ),
        (
            b'{"prompt": "a"}\n',
            r"p\.jsonl:1: no key 'answer', only \['prompt'\]; set prompts.answer_key .*\"\" if there is none",
        ),
        (b'{"prompt": 3, "answer": 1}\n', r"p\.jsonl:1: 'prompt' must be a non-empty string .* found 3"),
        (b'{"prompt": "", "answer": 1}\n', r"p\.jsonl:1: 'prompt' must be a non-empty string"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}], "answer": 1}\n',
            r"p\.jsonl:1: .* set prompts.chat_template=true",
        ),
        (b"", r"p\.jsonl holds no prompts"),
        (b"\n \n", r"p\.jsonl holds no prompts"),
        (GOOD + b"\0" + GOOD, r"p\.jsonl:2: not a line of JSON"),
        (GOOD + b"\n" + b"\0" * 80, r"p\.jsonl:3: not a line of JSON"),
        (GOOD + b'{"prompt": "\\ud800", "answer": 1}\n', r"p\.jsonl:2: not a line of JSON"),
        (GOOD + GOOD.strip() + GOOD, r"p\.jsonl:2: not a line of JSON: .*trailing characters"),
        (GOOD.decode().encode("utf-16"), r"p\.jsonl:1: not a line of JSON: .*UTF-16, save it as UTF-8"),
        (b'{"prompt": 3' + b"1" * 5000 + b"}\n", r"p\.jsonl:1: "),
    ],
)
def test_broken_files_are_refused_with_the_number_of_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PromptSource(PromptSourceConfig(path=str(path)))


def test_a_task_must_be_a_string(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "answer": 1, "kind": 2}])
    with pytest.raises(ValueError, match=r"p\.jsonl:1: the task under 'kind' must be a string, found 2"):
        PromptSource(PromptSourceConfig(path=path, task_key="kind"))


def test_lines_without_a_task_get_the_default_task(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "p.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2, "kind": "odd"}]
    )
    with pytest.raises(ValueError, match=r"p\.jsonl:1: no key 'kind'"):
        PromptSource(PromptSourceConfig(path=path, task_key="kind"))
    source = PromptSource(PromptSourceConfig(path=path, task_key="kind", default_task="even", shuffle=False))
    assert source.tasks == {"even", "odd"}
    assert [source.get(Locator(0, i)).task for i in range(2)] == ["even", "odd"]
    assert PromptSource(PromptSourceConfig(path=path, default_task="even")).tasks == {"even"}
    assert PromptSource(PromptSourceConfig(path=path)).tasks == {"default"}


def test_paths_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no prompt file .*nowhere\.jsonl"):
        PromptSource(PromptSourceConfig(path=str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ValueError, match=r"a prompt file ends in \.jsonl or \.parquet"):
        PromptSource(PromptSourceConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"prompts\.path is empty"):
        PromptSource(PromptSourceConfig())
    (tmp_path / "p.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"p\.parquet: not a Parquet file"):
        PromptSource(PromptSourceConfig(path=str(tmp_path / "p.parquet")))


def test_an_enormous_line_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    os.truncate(path, 1 << 40)  # a hole without a newline
    with pytest.raises(ValueError, match=r"p\.jsonl:2: the line has more than 256 MiB"):
        PromptSource(PromptSourceConfig(path=str(path)))


def test_byte_order_marks_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + GOOD + b"\xef\xbb\xbf" + GOOD + b"\xef\xbb\xbf\n")
    assert len(PromptSource(PromptSourceConfig(path=str(path)))) == 3


def test_an_invalid_text_in_parquet_is_refused_with_its_row(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"b", b"\xff", b"d"]).cast(pyarrow.binary())
    invalid = pyarrow.StringArray.from_buffers(4, texts.buffers()[1], texts.buffers()[2])
    parquet.write_table(pyarrow.table({"prompt": invalid, "answer": [1, 2, 3, 4]}), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet, row 2: not UTF-8"):
        PromptSource(PromptSourceConfig(path=str(tmp_path / "p.parquet")))


def test_a_refused_value_is_shortened(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": {"a": "b" * 10_000}, "answer": 1}])
    with pytest.raises(ValueError, match=r"p\.jsonl:1: .* found \{'a': 'b+\.\.\. \(10,009 characters\)$"):
        PromptSource(PromptSourceConfig(path=path))


# ---------------------------------------------------------------------------------------------------------------- messages

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}


def chat(tmp_path: Path, rows: list[Any], suffix: str = ".jsonl", **config: Any) -> PromptSource:
    path = tmp_path / f"chats{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    made = PromptSourceConfig(
        path=str(path), prompt_key="messages", answer_key="", chat_template=True, shuffle=False, **config
    )
    return PromptSource(made, make_chat_tokenizer(None))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CHATS = [
    {"messages": [user([{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}])]},
    {"messages": [{"role": "developer", "content": "Be brief."}, user("hi")]},
    {
        "messages": [
            user("3+4?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ],
        "tools": [TOOL],
    },
]
BEGIN, END = "<|im_start|>", "<|im_end|>\n"
READ = [
    f"{BEGIN}system\nSYS{END}{BEGIN}user\n1+1?{END}{BEGIN}assistant\n",
    f"{BEGIN}system\nBe brief.{END}{BEGIN}user\nhi{END}{BEGIN}assistant\n",
    f"{BEGIN}tools\n{json.dumps(TOOL)}\n{END}{BEGIN}system\nSYS{END}{BEGIN}user\n3+4?{END}{BEGIN}assistant\n"
    f"<tool_call>\n{json.dumps(CALL['function'])}\n</tool_call>{END}{BEGIN}tool\n7{END}{BEGIN}assistant\n",
]


@pytest.mark.parametrize("encoded", [False, True])
def test_messages_and_tools_are_converted_for_the_template(tmp_path: Path, encoded: bool) -> None:
    rows: Any = json.loads(json.dumps(CHATS))
    if encoded:
        function = rows[2]["messages"][1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
        rows[2]["tools"] = json.dumps(rows[2]["tools"])
    source = chat(tmp_path, rows, system_prompt="SYS")
    assert order(source, 0) == READ


def test_keys_that_only_columns_have_are_absent(tmp_path: Path) -> None:
    """Parquet has each key in every row: absent ones are null. The arguments of two calls, and two tools, differ in their keys."""
    other_call = {"type": "function", "function": {"name": "neg", "arguments": {"x": 1}}}
    other_tool = {
        "type": "function",
        "function": {"name": "neg", "parameters": {"properties": {"x": {"type": "number"}}}},
    }
    rows: Any = [
        {
            "messages": [user("3+4?"), {"role": "assistant", "tool_calls": [CALL]}, user("x")],
            "tools": [TOOL],
            "kind": "a",
        },
        {
            "messages": [user("-1?"), {"role": "assistant", "tool_calls": [other_call]}, user("x")],
            "tools": [other_tool],
        },
        {"messages": [user("hi")], "level": {"a": 1}},
    ]
    columns = chat(tmp_path, rows, ".parquet", task_key="kind", default_task="b")
    lines = chat(tmp_path, rows, task_key="kind", default_task="b")
    assert order(columns, 0) == order(lines, 0)
    assert columns.fingerprint() == lines.fingerprint()
    assert columns.tasks == lines.tasks == {"a", "b"}
    for index in range(3):
        assert columns.get(Locator(0, index)).row["messages"] == rows[index]["messages"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
            "message 0: content has a part of type",
        ),
        ({"messages": [user(8), user(7)]}, "message 0: content is 8; it must be text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments of f",
        ),
        ({"messages": [user("a")], "tools": [{"name": "f"}]}, r"shows the line's tools: tools\[0\] is"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_the_template_cannot_show_is_refused_with_the_line(
    tmp_path: Path, row: dict[str, Any], told: str, suffix: str
) -> None:
    place = r"chats\.jsonl:1: " if suffix == ".jsonl" else r"chats\.parquet, row 0: "
    with pytest.raises(ValueError, match=place + ".*" + told):
        chat(tmp_path, [row], suffix)


def test_a_prompt_that_the_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    template = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}a"
    config = PromptSourceConfig(path=str(path), answer_key="", chat_template=True, shuffle=False)
    source = PromptSource(config, make_chat_tokenizer(None, template))
    assert source.get(Locator(0, 0)).text == "a"
    with pytest.raises(PromptError, match=r"p\.jsonl:4: the chat template refuses .*no b"):
        source.get(Locator(0, 1))


# --------------------------------------------------------------------------------------------------------------- tokenizing


def test_prompts_are_tokenized_and_long_ones_marked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "abc", "answer": 1}, {"prompt": "abcd", "answer": 1}])
    source = PromptSource(
        PromptSourceConfig(path=path, max_prompt_length=3, shuffle=False), make_char_tokenizer(None, "abcd")
    )
    short, long = source.get(Locator(0, 0)), source.get(Locator(0, 1))
    assert (short.input_ids, short.too_long) == ([1, 2, 3], False)
    assert (long.input_ids, long.too_long) == ([1, 2, 3, 4], True)


@pytest.mark.parametrize("chat_template", [False, True])
def test_an_enormous_prompt_is_too_long_without_being_tokenized_whole(tmp_path: Path, chat_template: bool) -> None:
    """A tokenizer takes 300 bytes of memory for each character: 80 MB in one prompt would take all of a machine's."""
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a" * 1_000_000, "answer": 1}])
    config = PromptSourceConfig(path=path, max_prompt_length=3, chat_template=chat_template)
    prompt = PromptSource(config, make_chat_tokenizer(None)).get(Locator(0, 0))
    assert prompt.too_long
    assert len(prompt.input_ids) < 10_000
    assert len(prompt.text) >= 1_000_000


@pytest.mark.parametrize("chat_template", [False, True])
def test_an_enormous_prompt_of_few_tokens_is_tokenized_whole(tmp_path: Path, chat_template: bool) -> None:
    """A tokenizer that splits at spaces makes no token of them."""
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"a{' ' * 10_000}b", "answer": 1}])
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = PromptSourceConfig(path=path, max_prompt_length=3, chat_template=chat_template)
    prompt = PromptSource(config, tokenizer).get(Locator(0, 0))
    assert (prompt.input_ids, prompt.too_long) == ([1, 2], False)


@pytest.mark.parametrize("prompt", ["ab", [{"role": "user", "content": "ab"}]])
def test_chat_templates_are_rendered(tmp_path: Path, prompt: Any) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": 1}])
    tokenizer = make_char_tokenizer(None, "abcdefghijklmnopqrstuvwxyz<>:")
    config = PromptSourceConfig(path=path, chat_template=True)
    with pytest.raises(ValueError, match=r"chat_template is true, but the tokenizer has none"):
        PromptSource(config, tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    rendered = PromptSource(config, tokenizer).get(Locator(0, 0))
    assert rendered.text == "<user:ab><assistant:"
    assert rendered.input_ids == tokenizer.encode(rendered.text, add_special_tokens=False)
    counting = PromptSource(config)
    assert len(counting) == 1
    with pytest.raises(ValueError, match="without a tokenizer"):
        counting.get(Locator(0, 0))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", "<system:be brief><user:ab><assistant:"),
        ([{"role": "user", "content": "ab"}], "<system:be brief><user:ab><assistant:"),
        ([{"role": "system", "content": "own"}, {"role": "user", "content": "ab"}], "<system:own><user:ab><assistant:"),
    ],
)
def test_a_system_prompt_goes_first_unless_the_line_has_its_own(tmp_path: Path, prompt: Any, expected: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": 1}])
    tokenizer = make_char_tokenizer(None, "abcdefghijklmnopqrstuvwxyz<>: ")
    tokenizer.chat_template = CHAT_TEMPLATE
    source = PromptSource(PromptSourceConfig(path=path, chat_template=True, system_prompt="be brief"), tokenizer)
    assert source.get(Locator(0, 0)).text == source.get(Locator(1, 0)).text == expected


def test_the_chat_template_gets_its_arguments(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "answer": 1}])
    tokenizer = make_char_tokenizer(None, "abcdefghijklmnopqrstuvwxyz<>:")
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if not thinking %}>{% endif %}"
    config = PromptSourceConfig(path=path, chat_template=True, chat_template_args={"thinking": False})
    assert PromptSource(config, tokenizer).get(Locator(0, 0)).text == "<user:ab><assistant:>"


def test_a_chat_that_the_template_refuses_raises_prompt_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "answer": 1}])
    tokenizer = make_char_tokenizer(None, "ab")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match=r"the chat template refuses .*'ab'.*roles must alternate"):
        PromptSource(PromptSourceConfig(path=path, chat_template=True), tokenizer).get(Locator(0, 0))


@pytest.mark.parametrize("key", ["images", "videos"])
def test_a_prompt_with_images_is_refused(tmp_path: Path, key: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "answer": 1, key: []}])
    PromptSource(PromptSourceConfig(path=path), make_char_tokenizer(None, "ab")).get(Locator(0, 0))
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "answer": 1, key: ["a.png"]}])
    with pytest.raises(ValueError, match=rf"p\.jsonl:1: the prompt has {key}, which no model would see"):
        PromptSource(PromptSourceConfig(path=path), make_char_tokenizer(None, "ab"))


@pytest.mark.parametrize("prompt", [[], [1], [{"role": "user"}], {"role": "user", "content": "a"}])
def test_an_invalid_chat_is_refused(tmp_path: Path, prompt: Any) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": 1}])
    with pytest.raises(ValueError, match=r"p\.jsonl:1: 'prompt' must be a non-empty string or a list of messages"):
        PromptSource(PromptSourceConfig(path=path, chat_template=True))


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_without_tokens_are_refused(tmp_path: Path, chat: bool) -> None:
    class Deaf:
        chat_template = "a template"

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return messages[0]["content"]

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return []

    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x", "answer": 1}])
    source: Any = PromptSource(PromptSourceConfig(path=path, chat_template=chat), Deaf())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the prompt 'x' has no tokens"):
        source.get(Locator(0, 0))


def test_a_tokenizer_is_loaded_and_used_without_torch(tmp_path: Path) -> None:
    tokenizer = make_char_tokenizer(None, "abcdefghijklmnopqrstuvwxyz<>:")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "answer": 1}])
    program = f"""
import sys
from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.prompts import PromptError, PromptSource, load_tokenizer
from asyncrl.protocol.trajectories import Locator
source = PromptSource(PromptSourceConfig(path={path!r}, chat_template=True), load_tokenizer({str(tmp_path / "model")!r}))
assert source.get(Locator(0, 0)).text == "<user:ab><assistant:"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_prompt_that_the_tokenizer_cannot_encode_raises_prompt_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "space.jsonl", [{"prompt": "1 2", "answer": ""}, {"prompt": "12", "answer": ""}])
    source = PromptSource(PromptSourceConfig(path=path, shuffle=False), make_char_tokenizer(None, "12"))
    with pytest.raises(PromptError, match="cannot encode the prompt '1 2'"):
        source.get(Locator(0, 0))
    assert len(source.get(Locator(0, 1)).input_ids) == 2
