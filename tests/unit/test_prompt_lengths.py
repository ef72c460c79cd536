"""Prompts that a run would reject for their length are counted before it starts, with the real tokenizer."""

import json

import pytest

from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.checklist import Case, Finding
from asyncrl.launch.checks.preflight import _check_attention
from asyncrl.launch.checks.prompt_lengths import judge_prompt_lengths
from asyncrl.launch.experiment import load_experiment
from asyncrl.testing.tiny import make_char_tokenizer

MODEL = {"max_position_embeddings": 64}


class Clock:
    """Each reading is later by `step_s`."""

    def __init__(self, step_s=0.0):
        self.time_s, self.step_s = 0.0, step_s

    def monotonic(self):
        self.time_s += self.step_s
        return self.time_s


@pytest.fixture
def judge(tmp_path):
    make_char_tokenizer(tmp_path / "tokenizer")

    def judged(lengths, *overrides, model=MODEL, clock=None):
        lines = [json.dumps({"prompt": "1" * length, "answer": ""}) for length in lengths]
        (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
        file = tmp_path / "run.yaml"
        file.write_text(
            f"model_path: m\nprompts: {{path: {tmp_path}/p.jsonl}}\nallocation: transformers.d1+d1\n"
            "rollout: {tasks: {default: {reward: r.py:r}}, sampling: {max_new_tokens: 24}}\n"
        )
        config = load_experiment(file, overrides)
        return list(judge_prompt_lengths(config, model, str(tmp_path / "tokenizer"), clock or Clock()))

    return judged


def test_prompts_that_leave_no_room_for_the_response_are_counted(judge):
    assert judge([1, 40, 39]) == []
    (found,) = judge([1, 41, 50, 40])
    assert isinstance(found, Finding)
    assert (found.name, found.state) == ("length of prompts", "warn")
    assert found.value.startswith("2 of 4 prompts are too long; the longest has 50 tokens (")
    assert found.value.endswith(
        "p.jsonl:3), and rollout.sampling.max_new_tokens=24 leaves 40 of the model's 64 positions. The run rejects these prompts"
    )
    assert found.remedy == "leave them out, set rollout.sampling.max_new_tokens=14, or use a model with more positions"


def test_the_smaller_limit_is_named(judge):
    (found,) = judge([1, 41, 50, 40], "prompts.max_prompt_length=30")
    assert "3 of 4 prompts are too long" in found.value
    assert "prompts.max_prompt_length is 30" in found.value
    assert (
        judge([1, 63], "mode=sync", "allocation=d1", "manager.max_head_offpolicyness=0") == []
    )  # sync cuts the response
    (found,) = judge([1, 64], "mode=sync", "allocation=d1", "manager.max_head_offpolicyness=0")
    assert "leaves 63 of the model's 64 positions" in found.value


def test_the_length_of_an_enormous_prompt_is_told_as_a_bound(judge):
    (found,) = judge([1, 20_000], "prompts.max_prompt_length=8")  # only its beginning is tokenized
    assert "the longest has at least 9216 tokens" in found.value
    assert found.remedy == "leave them out"


def test_a_run_that_would_reject_every_prompt_is_refused(judge):
    (found,) = judge([41, 42])
    assert isinstance(found, ConfigError)
    assert "2 of 2 prompts are too long" in str(found)
    (found,) = judge([41, 42], "rollout.tasks.default.agent=a.py:Own")  # it may write other prompts
    assert isinstance(found, Finding)


def test_the_prompts_of_evaluations_are_counted_too(judge, tmp_path):
    (tmp_path / "e.jsonl").write_text('{"prompt": "' + "1" * 60 + '", "answer": ""}\n{"prompt": "1", "answer": ""}\n')
    (found,) = judge([1], f"eval.prompts={{path: {tmp_path}/e.jsonl}}")
    assert (found.name, "1 of 2" in found.value) == ("length of eval.prompts", True)


def test_the_time_is_limited(judge):
    (found,) = judge([41, 42, 43, 1], clock=Clock(step_s=2.0))
    assert found.value.startswith("at least 2 of 4 prompts are too long")


def test_a_model_that_the_engine_cannot_use_is_refused_before_the_start(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_path: m\nprompts: {path: p.jsonl}\nrollout: {tasks: {default: {reward: r.py:r}}}\n")
    model = {"layer_types": ["full_attention", "sliding_attention"]}
    for overrides, refused in (
        ([], True),
        (["generation.attention=sdpa"], False),
        (["allocation=sglang.d1+d1"], False),
    ):
        config = load_experiment(file, ["allocation=transformers.d1+d1", *overrides])
        found = list(_check_attention(Case(config, model=model)))
        assert bool(found) is refused
