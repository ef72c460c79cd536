"""Readers of problem sets: records in the shape that their authors publish, through a prompt source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.limits import rule_of
from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.data.records import RECORDS, read_record
from asyncrl.protocol.trajectories import Locator
from asyncrl.testing.tiny import make_chat_tokenizer

GSM8K = {"question": "Two hens lay 540 eggs each. How many?", "answer": "540*2=<<540*2=1080>>1,080\n#### 1,080"}
MATH500 = {
    "problem": "Write $(0,3)$ in polar coordinates.",
    "solution": "... so $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/1.json",
}
AIME_CAPITALS = {"ID": "2024-II-4", "Problem": "Find m+n.", "Solution": "...", "Answer": 33}
AIME = {"id": 60, "problem": "Find the minutes.", "answer": "073", "year": "2024"}
AIME_QUESTION = {"question": "Find the angle.", "answer": "336^\\circ"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Find a+b."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


@pytest.mark.parametrize(
    ("name", "record", "prompt", "answer"),
    [
        ("gsm8k", GSM8K, GSM8K["question"], "1,080"),
        ("math500", MATH500, MATH500["problem"], MATH500["answer"]),
        ("aime", AIME_CAPITALS, "Find m+n.", "33"),
        ("aime", AIME, "Find the minutes.", "73"),
        ("aime", AIME_QUESTION, "Find the angle.", "336"),
    ],
)
def test_a_published_record_is_a_prompt_with_its_answer(
    tmp_path: Path, name: str, record: dict[str, Any], prompt: str, answer: str
) -> None:
    source = PromptSource(PromptSourceConfig(path=_file(tmp_path, record), records=name))
    found = source.get(Locator(0, 0))
    assert (found.text, found.answer) == (prompt, answer)
    assert {key: found.row[key] for key in record if key not in ("prompt", "answer")} == {
        key: value for key, value in record.items() if key not in ("prompt", "answer")
    }


def test_the_messages_of_dapo_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    config = PromptSourceConfig(path=_file(tmp_path, DAPO), records="dapo", chat_template=True)
    found = PromptSource(config, make_chat_tokenizer(None)).get(Locator(0, 0))
    assert "Find a+b." in found.text
    assert found.answer == "34"
    with pytest.raises(ValueError, match="chat_template=true"):
        PromptSource(PromptSourceConfig(path=config.path, records="dapo"))


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "42"}, "no `####`"),
        ("gsm8k", {"question": "q", "answer": "42 ####"}, "no `####`"),
        ("gsm8k", MATH500 | {"answer": "#### 3"}, "'question'"),
        ("math500", GSM8K, "'problem'"),
        ("aime", MATH500, "integer from 0 to 999"),
        ("aime", {"problem": "p", "answer": 1000}, "integer from 0 to 999"),
        ("dapo", GSM8K, "'reward_model'"),
        ("dapo", DAPO | {"reward_model": {"style": "rule"}}, "'ground_truth'"),
        ("dapo", DAPO | {"reward_model": "34"}, "must be an object"),
    ],
)
def test_a_record_of_another_shape_stops_the_run_with_its_line(
    tmp_path: Path, name: str, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"set.jsonl:1: .*{message}"):
        PromptSource(PromptSourceConfig(path=_file(tmp_path, record), records=name))


def test_a_right_answer_of_zero_is_an_answer() -> None:
    assert read_record("aime", {"problem": "p", "answer": 0})["answer"] == "0"


def test_the_config_names_each_reader() -> None:
    rule = rule_of(PromptSourceConfig.__dataclass_fields__["records"])
    assert set(rule.words) == {"", *RECORDS}


def _file(folder: Path, record: dict[str, Any]) -> str:
    path = folder / "set.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return str(path)
