"""The word_problems example: answers in the format of GSM8K, hints, the environment of two tries, and the conversion of GSM8K."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from asyncrl.data.prompts import Prompt
from asyncrl.launch.experiment import load_experiment
from asyncrl.rewards.reward import Completion

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "word_problems"
MODULES = ("answers", "reward", "env", "make")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The example's modules, imported as its make.py does, with its folder first in sys.path. The names are free again later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,080", "1080"),
        ("#### 109,200,000", "109200000"),
        ("#### -47", "-47"),
        ("#### \u221212", "-12"),  # a real minus sign
        ("#### $-1,080.50 a day", "-1080.5"),
        ("#### -$3", "-3"),
        ("####7.0", "7"),
        ("#### .5", "0.5"),
        ("#### 12.", "12"),
        ("#### 5 #### 6", "6"),  # the last one counts
        ("the answer is 7", None),
        ("#### seven", None),
        ("#### ٣", None),
        ("", None),
    ],
)
def test_the_final_number_of_an_answer(example: dict[str, ModuleType], text: str, number: str | None) -> None:
    expected = None if number is None else Decimal(number)
    assert example["answers"].final_number(text) == expected


def test_the_reward_compares_final_numbers(example: dict[str, ModuleType]) -> None:
    score = example["reward"].score
    assert score("#### 1080", "1,080", True) == score("#### 70,000.00", "70000", True) == 1.0
    assert score("#### 1080", "1081", True) == score("1080", "1080", True) == score("", "", True) == 0.0
    assert score("#### 1080", "1080", False) == 0.0  # cut off: the number might have been 10800


class Judge:
    """The part of the task's reward that an environment uses."""

    def __init__(self, right: str) -> None:
        self.right = right

    async def score(self, prompt: Prompt, completions: list[Completion]) -> list[float]:
        return [float(completion.text == self.right) for completion in completions]


@pytest.mark.parametrize(
    ("tries", "told", "rewards"),
    [
        (["#### 7"], [None], [1.0]),
        (["#### 5", "#### 7"], ["No, it is more.", None], [0.0, 0.5]),
        (["#### 9", "#### 9"], ["No, it is less.", None], [0.0, 0.0]),
        (["seven", "#### 7"], ["There is no answer. Give it after ####.", None], [0.0, 0.5]),
    ],
)
async def test_the_environment_allows_two_tries(
    example: dict[str, ModuleType], tries: list[str], told: list[str | None], rewards: list[float]
) -> None:
    prompt = Prompt("e0-p0", "", [], "7", "twice", {}, False)
    env = example["env"].TwoTries(prompt=prompt, reward=Judge("#### 7")).fork()
    await env.reset()
    results = [await env.step(Completion(text, True)) for text in tries]
    assert [result[0] for result in results] == told
    assert [result[1] for result in results] == rewards
    assert [result[2] for result in results] == [False] * (len(tries) - 1) + [True]


def test_invented_problems_are_distinct_and_have_right_answers(example: dict[str, ModuleType]) -> None:
    make = example["make"]
    train, evaluation = make.invented(np.random.default_rng(1))
    assert (len(train), len(evaluation)) == (4096, 256)
    questions = [row["messages"][1]["content"] for row in train + evaluation]
    assert len(set(questions)) == len(questions)
    assert {row["task"] for row in evaluation} == {"once", "twice"}
    for row in train:
        a, b = sorted(map(int, re.findall(r"\d", row["messages"][1]["content"])))
        assert int(row["answer"]) in (a + b, b - a)
    assert make.invented(np.random.default_rng(1))[0] == train
    assert make.invented(np.random.default_rng(2))[0] != train


def test_demonstrations_are_mostly_wrong_and_hints_are_true(example: dict[str, ModuleType]) -> None:
    make, final_number = example["make"], example["answers"].final_number
    rng = np.random.default_rng(1)
    hints = 0
    for _ in range(500):
        messages = make.sloppy(rng)
        assert [message["role"] for message in messages][:2] == ["system", "user"]
        assert final_number(messages[-1]["content"]) is not None
        if len(messages) == 5:
            hints += 1
            assert messages[3]["content"] in ("No, it is more.", "No, it is less.")
    assert 100 < hints < 230
    right = "3 + 4 = 7\n#### 7"
    assert all(final_number(make.spoil(right, rng)) != 7 for _ in range(50))


def test_conversion_of_real_gsm8k(example: dict[str, ModuleType]) -> None:
    make = example["make"]
    train, evaluation = make.converted(FOLDER / "gsm8k_excerpt.jsonl")
    assert (len(train), len(evaluation)) == (48, 16)
    answers = [row["answer"] for row in train + evaluation]
    assert all(answer.lstrip("-").isdigit() for answer in answers)  # no commas left
    assert any(answer.startswith("-") for answer in answers)
    assert any(int(answer) >= 1000 for answer in answers)
    text = "".join(row["messages"][1]["content"] + row["solution"] for row in train + evaluation)
    assert {"\u2028", "€"} <= set(text)  # for example, a Unicode line separator within a line
    with pytest.raises(SystemExit, match="is this GSM8K"):
        make.convert({"question": "?", "answer": "42"})


def test_a_trained_tokenizer_is_saved_and_loaded(example: dict[str, ModuleType], tmp_path: Path) -> None:
    """Template, EOS and padding are saved with it. Each digit is a token of its own, and all texts of GSM8K can be encoded."""
    from asyncrl.data.prompts import load_tokenizer
    from asyncrl.testing import chat_model

    make = example["make"]
    train, evaluation = make.converted(FOLDER / "gsm8k_excerpt.jsonl")
    chat_model.make_tokenizer(map(make.text_of, train), vocab_size=600).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == 600
    assert len(tokenizer.encode("12345")) == 5
    assert len(tokenizer.encode("How many")) < len("How many")
    for row in evaluation:
        question = row["messages"][1]["content"]
        assert tokenizer.decode(tokenizer.encode(question)) == question
    text = chat_model.render(tokenizer, evaluation[0]["messages"])
    assert text.startswith("<|im_start|>system\nEnd with ####")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text).count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}")
def test_configs_of_examples_are_valid_and_name_their_hardware(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for_editors, first, *_ = file.read_text(encoding="utf-8").splitlines()
    assert for_editors.startswith("# yaml-language-server: $schema=")
    assert first.startswith("# ")
    assert "cores" in first or "GPU" in first
    monkeypatch.chdir(file.parent)  # functions that a config names are files beside it
    load_experiment(file)


def test_prompts_of_reasoning_gym_carry_the_data_for_its_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'asyncrl[gym]'")
    folder = FOLDER.parent / "reasoning_gym"
    monkeypatch.syspath_prepend(str(folder))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    make: Any = importlib.import_module("make")
    try:
        rows = json.loads(json.dumps(make.prompt_lines(16, seed=3)))  # as read from a file
        assert {row["entry"]["metadata"]["source_dataset"] for row in rows} == set(make.DATASETS)
        for row in rows:
            assert make.reward(row["prompt"], row["entry"]["answer"], row["entry"]) == 1.0
            assert make.reward(row["prompt"], row["entry"]["answer"], row["entry"], finished=False) == 0.0
            assert make.reward(row["prompt"], "no idea", row["entry"]) < 1.0
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
