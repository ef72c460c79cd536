"""The shipped examples of a user's own model, data, reward and environment run for a few steps, each in a copy of its folder.

The tests read the run's recordings: which tasks ran, which tokens the policy read, and which of them were trained.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_runs import ROOT

from asyncrl.config.import_object import import_object
from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample
from asyncrl.data.trajectories import read_trajectory
from asyncrl.launch.experiment import load_experiment
from asyncrl.rollout.tool_calls import Said, parse_tool_calls
from asyncrl.testing.runs import RunHandle, evaluations, launch, train_steps

EXAMPLES = ROOT / "examples"
STEPS, BATCH, GROUP = 3, 8, 4
ONCE, TWICE = 0, 1  # task ids, in the order of the names
SMALL = (
    f"train.max_steps={STEPS}",
    f"train.batch_size={BATCH}",
    f"rollout.group_size={GROUP}",
    "train.ppo.minibatches=1",
    "rollout.num_workers=1",
    "generation.num_blocks=256",
    "eval.num_prompts=8",
    "eval.every_steps=0",
    "weights.fsync=false",
    "record.trajectories=true",
)

pytestmark = pytest.mark.timeout(900)


def make(example: str, out: Path, *arguments: str, folder: str = ".") -> Path:
    """Copy the example and make its model and data. The warm start is just long enough for answers to end."""
    for file in (EXAMPLES / example).iterdir():
        if file.is_file():
            shutil.copy(file, out)
    command = [sys.executable, "make.py", "--out", folder, *arguments]
    subprocess.run(command, cwd=out, check=True, timeout=600)
    return out


def launch_example(config: str, made: Path, fileroot: Path, *overrides: str) -> RunHandle:
    """Launch from the copy's folder: paths in the config are relative to it."""
    return launch(made / config, f"fileroot={fileroot}", *SMALL, *overrides, cwd=made)


def recorded(run_dir: Path) -> list[SequenceSample]:
    """All trained groups."""
    files = sorted((run_dir / "trajectories" / "attempt_1").glob("*.safetensors"))
    return [read_trajectory(file).sample for file in files]


@pytest.fixture(scope="module")
def word_problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("word_problems", tmp_path_factory.mktemp("word_problems"), "--steps", "30")


@pytest.fixture(scope="module")
def word_run(word_problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    with launch_example("config.yaml", word_problems, tmp_path_factory.mktemp("runs")) as run:
        assert run.wait(300) == 0, run.output()
        yield run


def rows_of(made: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (made / "data" / "train.jsonl").read_bytes().split(b"\n") if line]


def rendered(row: dict[str, Any]) -> str:
    """The text of a data row as the model reads it, written out."""
    turns = (f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in row["messages"])
    return "".join(turns) + "<|im_start|>assistant\n"


def prompt_source(made: Path, config: str, tokenizer: Any) -> PromptSource:
    prompts = load_experiment(made / config).prompts
    assert prompts.chat_template
    own = {**vars(prompts), "path": str(made / prompts.path)}
    return PromptSource(PromptSourceConfig(**own), tokenizer)


@pytest.mark.release
def test_both_tasks_are_trained_and_evaluated(word_run: RunHandle) -> None:
    steps = train_steps(word_run.run_dir)
    assert len(steps) == STEPS
    samples = recorded(word_run.run_dir)
    assert len(samples) == STEPS * BATCH
    assert {int(sample.data["task_ids"][0]) for sample in samples} == {ONCE, TWICE}
    assert [record["step"] for record in evaluations(word_run.run_dir)] == [0, STEPS]
    assert json.loads((word_run.run_dir / "summary.json").read_text())["rejected"] == {}


@pytest.mark.release
def test_rewards_are_what_judge_and_environment_make_of_the_text(word_run: RunHandle, word_problems: Path) -> None:
    tokenizer = load_tokenizer(word_problems / "model")
    score = import_object(f"{EXAMPLES}/word_problems/reward.py:score", "reward")
    answers = {rendered(row): row["answer"] for row in rows_of(word_problems)}
    seen = []
    for sample in recorded(word_run.run_dir):
        answer = answers[tokenizer.decode(sample.data["packed_prompts"])]
        (ids_of,), (loss_of,) = sample.slices(), sample.slices("loss_mask")
        for ids, loss, reward in zip(ids_of, loss_of, sample.data["rewards"].tolist(), strict=True):
            tries = [
                score(tokenizer.decode(text, skip_special_tokens=True), answer, text[-1] == tokenizer.eos_token_id)
                for _, text in said_by(loss, ids)
            ]
            assert reward == (tries[0] if len(tries) == 1 else 0.5 * tries[1])
            seen.append(reward)
    steps = train_steps(word_run.run_dir)
    assert np.mean([step["reward/mean"] for step in steps]) == pytest.approx(np.mean(seen), abs=1e-5)


@pytest.mark.release
def test_prompts_are_what_the_chat_template_makes_of_the_messages(word_run: RunHandle, word_problems: Path) -> None:
    tokenizer = load_tokenizer(word_problems / "model")
    expected = {rendered(row) for row in rows_of(word_problems)}
    prompts = {tokenizer.decode(sample.data["packed_prompts"]) for sample in recorded(word_run.run_dir)}
    assert len(prompts) == STEPS * BATCH
    assert prompts <= expected


@pytest.mark.release
def test_what_the_environment_says_is_read_and_not_trained(word_run: RunHandle, word_problems: Path) -> None:
    """An episode of one step is prompt, response and EOS. In an episode of two steps, the template's user turn with the hint
    follows the first response."""
    tokenizer = load_tokenizer(word_problems / "model")
    eos = tokenizer.eos_token_id
    hints = 0
    for sample in recorded(word_run.run_dir):
        twice = int(sample.data["task_ids"][0]) == TWICE
        (ids_of,), (loss_of,), (prompt_of,) = (
            sample.slices(key) for key in ("packed_input_ids", "loss_mask", "prompt_mask")
        )
        for ids, loss, prompt, cut in zip(ids_of, loss_of, prompt_of, sample.data["seq_no_eos_mask"], strict=True):
            assert loss[-1]
            assert (ids[-1] == eos) != cut
            said = said_by(~loss & ~prompt, ids)
            assert len(said) <= int(twice)
            for start, text in said:
                assert ids[start - 1] == eos  # the first response ended, and its EOS is trained
                assert loss[start - 1]
                assert tokenizer.decode(text) in {
                    f"\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n"
                    for hint in ("No, it is more.", "No, it is less.", "There is no answer. Give it after ####.")
                }
                hints += 1
            for response in said_by(loss, ids):
                assert eos not in response[1][:-1].tolist()  # a response stops at its first EOS
    assert hints > 0


def said_by(mask: np.ndarray, ids: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (start, ids) of each run of consecutive tokens in the mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(start), ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def test_real_gsm8k(tmp_path: Path) -> None:
    """The excerpt of GSM8K in the repository. It has unicode, prompts of all lengths (the run rejects the longest), and commas in
    answers."""
    made = make("word_problems", tmp_path, "--gsm8k", "gsm8k_excerpt.jsonl", "--steps", "5", folder="gsm8k")
    source = prompt_source(made, "gsm8k.yaml", load_tokenizer(made / "gsm8k" / "model"))
    assert len(source) == 48
    overrides = ("train.max_steps=1", "prompts.max_prompt_length=150", "eval.prompts=null")
    with launch_example("gsm8k.yaml", made, tmp_path / "runs", *overrides) as run:
        assert run.wait(300) == 0, run.output()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert set(summary["rejected"]) <= {"prompt_too_long"}
    assert len(recorded(run.run_dir)) == BATCH


@pytest.mark.release
def test_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="pip install 'asyncrl[gym]'")
    made = make("reasoning_gym", tmp_path, "--steps", "30")
    with launch_example("config.yaml", made, tmp_path / "runs") as run:
        assert run.wait(300) == 0, run.output()
    samples = recorded(run.run_dir)
    assert len(samples) == STEPS * BATCH
    assert max(sample.data["rewards"].max() for sample in samples) > 0  # a short answer is sometimes right by chance
    assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == {}


@pytest.mark.release
def test_math_on_a_cpu(tmp_path: Path) -> None:
    """Model, allocation and sizes are overridden. Everything else is as it is for 8 GPUs."""
    excerpt = EXAMPLES / "word_problems" / "gsm8k_excerpt.jsonl"
    made = make("math", tmp_path, "--gsm8k", str(excerpt), "--fractions", "48", "--model", "--steps", "12")
    overrides = (
        "model_path=model",
        "allocation=transformers.d1p1m1+d1p1m1",
        "eval.num_prompts=0",
        "rollout.sampling.max_new_tokens=32",
    )
    with launch_example("config.yaml", made, tmp_path / "runs", *overrides) as run:
        assert run.wait(300) == 0, run.output()
    tokenizer = load_tokenizer(made / "model")
    names = ("fractions", "gsm8k")  # by task id
    for step in train_steps(run.run_dir):
        assert sum(step[f"count/{name}"] for name in names) == BATCH * GROUP
        means = {name: step.get(f"reward/{name}", 0.0) for name in names}
        assert sum(means[name] * step[f"count/{name}"] for name in names) / (BATCH * GROUP) == pytest.approx(
            step["reward/mean"]
        )
    samples = recorded(run.run_dir)
    assert len(samples) == STEPS * BATCH
    assert {int(sample.data["task_ids"][0]) for sample in samples} == {0, 1}
    for sample in samples:
        assert tokenizer.decode(sample.data["packed_prompts"]).startswith(
            "<|im_start|>system\nPlease reason step by step"
        )
    assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == {}
    assert [record["eval/greedy_num_prompts"] for record in evaluations(run.run_dir)] == [16, 16]  # all of them


@pytest.mark.release
def test_an_agent_of_openais_client(tmp_path: Path) -> None:
    """Both turns form one sequence: a tool call, the calculator's reply (not trained), and an answer."""
    made = make("openai_agent", tmp_path, "--steps", "120")
    with launch_example("config.yaml", made, tmp_path / "runs") as run:
        assert run.wait(300) == 0, run.output()
    assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == {}
    samples = recorded(run.run_dir)
    assert len(samples) == STEPS * BATCH
    tokenizer = load_tokenizer(made / "model")
    calculate = import_object(f"{EXAMPLES}/openai_agent/agent.py:calculate", "tool")
    final_number = import_object(f"{EXAMPLES}/openai_agent/agent.py:final_number", "answer")
    answers = {row["messages"][0]["content"]: int(row["answer"]) for row in rows_of(made)}
    called = 0
    for sample in samples:
        prompt = tokenizer.decode(sample.data["packed_prompts"])
        assert prompt.startswith("<|im_start|>tool\ncalculator: adds or subtracts<|im_end|>\n<|im_start|>user\n")
        answer = answers[prompt.split("\n")[3].removesuffix("<|im_end|>")]
        (ids_of,), (loss_of,), (prompt_of,) = (
            sample.slices(key) for key in ("packed_input_ids", "loss_mask", "prompt_mask")
        )
        for ids, loss, given, reward in zip(ids_of, loss_of, prompt_of, sample.data["rewards"].tolist(), strict=True):
            turns = [said_in(tokenizer, text) for _, text in said_by(loss, ids)]
            assert reward == float(final_number(turns[-1].content) == answer)
            results = "".join(
                f"\n<|im_start|>tool\n{calculate(call.arguments)}<|im_end|>" for call in turns[0].tool_calls
            )
            between = [tokenizer.decode(text) for _, text in said_by(~loss & ~given, ids)]
            assert between == [f"{results}\n<|im_start|>assistant\n"] * (len(turns) - 1)
            assert len(turns) == 1 + bool(results)
            called += bool(results)
    assert called > 0


def said_in(tokenizer: Any, ids: np.ndarray) -> Said:
    """An answer as the agent sees it. A truncated answer counts as no tool call, whatever it contains."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return parse_tool_calls(text) if ids[-1] == tokenizer.eos_token_id else Said(text)
