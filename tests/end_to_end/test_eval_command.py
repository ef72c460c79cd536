"""AIME-shaped evaluation in a run, and `asyncrl-launch eval` of its models, with a tiny model and real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.evaluation_files import list_results, read_results
from asyncrl.testing.runs import RunHandle, assert_nothing_left, evaluations, launch, make_tiny_run

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]

LIMIT_S = 300.0
# The rewards differ with the text, so two models have equal means only if they answer alike
REWARD = """
from asyncrl.rewards.score import Score

def reward(prompt, completion, answer):
    return Score(sum(map(ord, completion)) / 1000, completion or None)

def aime(prompt, completion, answer):
    assert answer == str(int(answer))  # of the reader: without leading zeros
    return Score(float("1" in completion), completion or None)
"""
SETS = """
eval:
  prompts: {{path: "{folder}/prompts.jsonl", max_prompt_length: 16}}
  num_prompts: 8
  modes: [greedy]
  sets:
    aime:
      prompts: {{path: "{folder}/aime.jsonl", records: aime, default_task: aime, shuffle: false}}
      num_prompts: 0
      modes: [sampled]
      num_responses: 4
      sampling: {{temperature: 0.6}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=40)
    folder = config.parent
    (folder / "reward.py").write_text(REWARD)
    lines = [
        {"ID": f"2024-I-{number}", "Problem": f"{number:04d}", "Answer": f"{number:03d}"} for number in range(1, 6)
    ]
    (folder / "aime.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = config.read_text().replace(
        "tasks: {default:", f'tasks: {{aime: {{reward: "{folder}/reward.py:aime"}}, default:'
    )
    config.write_text(text + SETS.format(folder=folder))
    return config


@pytest.fixture(scope="module")
def trained(config: Path) -> Iterator[RunHandle]:
    # A learning rate that changes the answers within two steps
    with launch(config, "trial=t0", "train.optimizer.lr=0.05") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        yield run


def evaluate(target: Path, *arguments: str) -> tuple[dict[str, Any], Path]:
    """Return the printed results, and the folder in which the launcher ran."""
    command = [sys.executable, "-P", "-m", "asyncrl.cli.main", "eval", str(target), "--json", *arguments]
    runs = target.parent if target.suffix == ".yaml" else target
    with RunHandle(command, runs) as run:
        code = run.wait(LIMIT_S)
        printed = run.output()
    assert code == 0, printed
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{"))), runs


def test_a_run_evaluates_an_aime_shaped_set(trained: RunHandle) -> None:
    first, last = evaluations(trained.run_dir)
    assert [first["step"], last["step"]] == [0, 2]
    for record in (first, last):
        assert (record["eval/greedy_num_prompts"], record["eval/aime/sampled_num_prompts"]) == (8.0, 5.0)
        values = [record[f"eval/aime/sampled_{value}"] for value in ("reward", "pass@1", "pass@2", "pass@4")]
        assert values[0] == pytest.approx(values[1])  # the rewards are 0 or 1
        assert values[1:] == sorted(values[1:])
        assert 0.0 <= record["eval/aime/sampled_majority@4"] <= 1.0
    for file in list_results(trained.run_dir):
        results = [result for result in read_results(file) if result.eval_set == "aime"]
        assert [(result.line, result.task, len(result.rewards)) for result in results] == [
            (at + 1, "aime", 4) for at in range(5)
        ]
    assert_nothing_left(trained.run_dir)


def test_the_command_gives_the_runs_own_figures(config: Path, trained: RunHandle) -> None:
    """Greedy responses are those of the run's servers: the final model has the result of the last evaluation, and the model before
    training that of the first."""
    first, last = evaluations(trained.run_dir)
    assert first["eval/greedy_reward"] != last["eval/greedy_reward"]
    before = {path.name for path in trained.run_dir.parent.iterdir()}
    for target, own in ((trained.run_dir / "checkpoints" / "final", last), (config, first)):
        found, _ = evaluate(target)
        assert found["eval/greedy_reward"] == own["eval/greedy_reward"]
        assert found["eval/greedy_length"] == own["eval/greedy_length"]
        assert found["eval/aime/sampled_num_prompts"] == 5.0
    assert {path.name for path in trained.run_dir.parent.iterdir()} == before  # its folder is gone
    assert_nothing_left(trained.run_dir.parent)


def test_a_named_trial_keeps_the_results(trained: RunHandle) -> None:
    found, _ = evaluate(trained.run_dir, "trial=kept", "eval.sets.aime.num_responses=2")
    kept = trained.run_dir.parent / "kept"
    assert found["run_dir"] == str(kept)
    (file,) = list_results(kept)
    assert {len(result.rewards) for result in read_results(file) if result.eval_set == "aime"} == {2}
    assert_nothing_left(kept)
