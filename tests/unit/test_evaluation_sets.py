"""Evaluation sets: eval.sets in a config, and which sets a master evaluates when."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import (
    ConfigError,
    EvalConfig,
    EvalSetConfig,
    ExperimentConfig,
    PromptSourceConfig,
    eval_sampling,
    evaluation_sets,
    prompt_sources,
)
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import save_config
from tests.support.master import LIMIT_S, MasterParts, PlayedManager, PlayedWorkers, ledger, master_config

BASE = """
model_path: m
allocation: transformers.d1+d1
prompts: {path: p.jsonl, chat_template: true, system_prompt: Think.}
rollout:
  sampling: {max_new_tokens: 24, top_p: 0.9}
  tasks: {default: {reward: r.py:r}, aime: {reward: r.py:r}}
eval:
  every_steps: 7
  modes: [sampled]
  sets:
    aime:
      prompts: {path: a.jsonl, records: aime, default_task: aime}
      num_prompts: 30
      num_responses: 4
      every_steps: 20
      sampling: {temperature: 0.6}
    math: {prompts: {path: m.jsonl, chat_template: false, system_prompt: ""}}
"""


def load(tmp_path: Path, *overrides: str) -> ExperimentConfig:
    (tmp_path / "run.yaml").write_text(BASE)
    return load_experiment(tmp_path / "run.yaml", overrides)


def test_a_set_has_the_values_of_eval_for_what_it_leaves_out(tmp_path: Path) -> None:
    config = load(tmp_path)
    aime, math = config.eval.sets["aime"], config.eval.sets["math"]
    assert (aime.every_steps, aime.num_responses, aime.num_prompts) == (20, 4, 30)
    assert (math.every_steps, math.num_responses, math.num_prompts, math.modes) == (7, 1, 512, ["sampled"])
    assert aime.sampling is not None
    assert (aime.sampling.temperature, aime.sampling.top_p, aime.sampling.max_new_tokens) == (0.6, 0.9, 24)
    assert math.sampling is None  # that of rollout.sampling
    assert eval_sampling(math, config.rollout)["sampled"] == (config.rollout.sampling, 1)


def test_an_override_names_a_set(tmp_path: Path) -> None:
    config = load(tmp_path, "eval.sets.aime.every_steps=3", "eval.every_steps=5", "eval.sampling.max_new_tokens=9")
    assert [chosen.every_steps for chosen in config.eval.sets.values()] == [3, 5]
    sampling = {name: chosen.sampling for name, chosen in config.eval.sets.items()}
    assert [(one.max_new_tokens, one.temperature, one.top_p) for one in sampling.values() if one] == [
        (9, 0.6, 0.9),
        (9, 1.0, 0.9),
    ]


def test_the_chats_of_a_set_are_rendered_like_those_of_the_run(tmp_path: Path) -> None:
    config = load(tmp_path)
    sources = prompt_sources(config)
    assert list(sources) == ["prompts", "eval.sets.aime.prompts", "eval.sets.math.prompts"]
    assert (sources["eval.sets.aime.prompts"].chat_template, sources["eval.sets.aime.prompts"].system_prompt) == (
        True,
        "Think.",
    )
    assert not sources["eval.sets.math.prompts"].chat_template


def test_the_set_without_a_name_is_that_of_eval_prompts(tmp_path: Path) -> None:
    assert list(evaluation_sets(load(tmp_path).eval)) == ["aime", "math"]
    config = load(tmp_path, "eval.prompts.path=e.jsonl", "eval.num_responses=2")
    sets = evaluation_sets(config.eval)
    assert list(sets) == ["", "aime", "math"]
    assert (sets[""].num_responses, sets["aime"].num_responses, sets["math"].num_responses) == (2, 4, 2)


def test_a_written_config_is_read_back(tmp_path: Path) -> None:
    config = load(tmp_path, "eval.prompts.path=e.jsonl")
    save_config(config, tmp_path / "again.yaml")
    assert load_experiment(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.sets.a/b.prompts.path=x.jsonl", "eval.sets='a/b'"),
        ("eval.sets.new.every_steps=3", "eval.sets.new.prompts.path=''"),
        ("eval.sets.aime.modes=[greedy]", "eval.sets.aime.num_responses=4"),
        ("eval.sets.math.modes=[]", "eval.sets.math.modes"),
        ("eval.sets.math.modes=[greedy,greedy]", "eval.sets.math.modes"),
        ("eval.sets.aime.sampling.temperature=0", "eval.sets.aime.sampling.temperature=0.0: must be above 0; greedy"),
        ("eval.sets.aime.sampling.max_new_tokens=99999", "generation.num_blocks"),
        ("eval.sets.aime.num_responses=1025", "eval.sets.aime.num_responses=1025"),
        ("eval.sets.aime.every_step=3", "did you mean 'eval.sets.aime.every_steps'"),
    ],
)
def test_sets_that_cannot_work_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------------- when sets are due


def sets_of(tmp_path: Path) -> EvalConfig:
    own = EvalSetConfig(prompts=PromptSourceConfig(path=str(tmp_path / "p.jsonl")), num_prompts=2, modes=["greedy"])
    often = dataclasses.replace(own, every_steps=1, at_start=False, at_end=True)
    seldom = dataclasses.replace(own, every_steps=2, at_start=True, at_end=False)
    return EvalConfig(sets={"often": often, "seldom": seldom})


class Asked(PlayedManager):
    """Records the parts of each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end.set()
        self.sets: list[list[str]] = []

    async def post(self, path: str, body: Any, kind: type, **limits: Any) -> Any:
        if path == "/evaluate" and body.eval_id not in self.evaluations:
            self.sets.append([part.eval_set for part in body.parts])
        return await super().post(path, body, kind, **limits)


async def test_each_set_is_evaluated_when_it_is_due(tmp_path: Path) -> None:
    manager = Asked()
    async with AsyncExitStack() as opened:
        config = master_config(tmp_path, eval=sets_of(tmp_path))
        master = MasterParts(config, opened, manager=manager, caller=PlayedWorkers())
        await asyncio.wait_for(master.trainer.begin(None), LIMIT_S)
        await asyncio.wait_for(master.evaluations.all_over(), LIMIT_S)
        for step in (1, 2):
            master.books.step = step
            master.trainer._run_schedules(last=step == 2)
            await asyncio.wait_for(master.evaluations.all_over(), LIMIT_S)
        manager.view = ledger(served=2)
        await asyncio.wait_for(master.trainer.finish(), LIMIT_S)
        evaluations = master.books.summary.evaluations
    # At the last step `often` waits for the end, when the last weights are served
    assert list(zip(manager.evaluations, manager.sets, strict=True)) == [
        ("a1-s0", ["seldom"]),
        ("a1-s1", ["often"]),
        ("a1-s2", ["seldom"]),
        ("a1-end", ["often"]),
    ]
    assert [sorted(key for key in record if key.endswith("_reward")) for record in evaluations] == [
        ["eval/seldom/greedy_reward"],
        ["eval/often/greedy_reward"],
        ["eval/seldom/greedy_reward"],
        ["eval/often/greedy_reward"],
    ]
