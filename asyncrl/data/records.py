"""Readers of published problem sets (pure): they give a record the keys `prompt` and `answer`, and keep its other keys.

A reader is a function and a row of RECORDS. `prompts.records` names it; the file is the user's, by path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Record = Mapping[str, Any]


def read_record(name: str, record: Record) -> dict[str, Any]:
    """The record with `prompt` and `answer`. name: of RECORDS.

    Raises ValueError with the key that is missing or has no usable value.
    """
    prompt, answer = RECORDS[name](record)
    return {**record, "prompt": prompt, "answer": answer}


def _gsm8k(record: Record) -> tuple[Any, str]:
    """openai/gsm8k: `question`, and `answer` with a solution that ends with `#### 1,080`. The answer is the text after it."""
    solution = str(_value(record, "answer"))
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("the answer has no `####` with a number after it, as in GSM8K's solutions")
    return _value(record, "question"), answer.strip()


def _math500(record: Record) -> tuple[Any, str]:
    """HuggingFaceH4/MATH-500: `problem`, and `answer` in LaTeX without a box. `solution` is not used."""
    return _value(record, "problem"), str(_value(record, "answer"))


def _aime(record: Record) -> tuple[Any, str]:
    """AIME: `problem` or `question`, and `answer`, with or without capitals. An answer is an integer from 0 to 999, as a number or
    a text, perhaps with leading zeros or a degree sign; it becomes a text without them."""
    folded = {key.casefold(): value for key, value in record.items()}
    text = str(_value(folded, "answer")).strip().removesuffix("^\\circ").removesuffix("°").strip()
    if not (text.isascii() and text.isdigit() and int(text) <= 999):
        raise ValueError(f"the answer is {text[:40]!r}; an answer of AIME is an integer from 0 to 999")
    return _value(folded, "problem" if "problem" in folded else "question"), str(int(text))


def _dapo(record: Record) -> tuple[Any, str]:
    """BytedTsinghua-SIA/DAPO-Math-17k, the shape of verl: `prompt`, a list of messages, and `reward_model` with `ground_truth`."""
    judged = _value(record, "reward_model")
    if not isinstance(judged, Mapping):
        raise ValueError(f"reward_model is {type(judged).__name__}; it must be an object with ground_truth")
    return _value(record, "prompt"), str(_value(judged, "ground_truth"))


def _value(record: Record, key: str) -> Any:
    value = record.get(key)
    if value is None or value == "":
        raise ValueError(f"no value under {key!r}, only {sorted(record)}; set prompts.records to the shape of the data")
    return value


RECORDS: dict[str, Callable[[Record], tuple[Any, str]]] = {
    "gsm8k": _gsm8k,
    "math500": _math500,
    "aime": _aime,
    "dapo": _dapo,
}
