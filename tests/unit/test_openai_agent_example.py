"""The calculator of examples/openai_agent. (An end-to-end test runs the agent itself.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.import_object import import_object
from asyncrl.launch.experiment import load_experiment
from asyncrl.rollout.rollouts import load_class

FOLDER = Path(__file__).parents[2] / "examples" / "openai_agent"


def load(name: str) -> object:
    return import_object(f"{FOLDER}/agent.py:{name}", "example")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 + 4", "7"),
        ("3-4", "-1"),
        (" -3 - -4 ", "1"),
        ("3 * 4", "error"),
        ("3 + 4 + 5", "error"),
        ("__import__('os')", "error"),
        ("9999999999 + 1", "error"),
        (7, "error"),
        (None, "error"),
    ],
)
def test_the_calculator_adds_and_subtracts_two_numbers(expression: object, result: str) -> None:
    assert load("calculate")(json.dumps({"expression": expression})) == result


def test_a_call_without_an_expression_is_an_error() -> None:
    assert load("calculate")("{}") == "error"


@pytest.mark.parametrize(
    ("text", "number"), [("#### 7", 7), ("#### 5 #### -6.", -6), ("7", None), ("#### seven", None), ("", None)]
)
def test_the_last_number_is_the_answer(text: str, number: int | None) -> None:
    assert load("final_number")(text) == number


def test_the_config_names_an_agent_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    config = load_experiment(FOLDER / "config.yaml")
    task = config.rollout.tasks["default"]
    assert (task.reward, task.env) == ("", "")
    load_class("rollout.tasks.default", task, "agent")
