"""The unchanged quickstart: in sixty steps a model that sorts badly learns to sort. All limits count steps, not time.

ASYNCRL_LEARNING_WITH adds overrides, with the same reward limits. For example
"allocation=sglang.d1p1m1+d1p1m1 generation.python=.venv-sglang/bin/python" is the quickstart with SGLang.
"""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import assert_each_prompt_trained_once, assert_nobody_left_behind, launch_sorter, trained_prompts

from asyncrl.cli.commands.logs import LogFiles, stream_logs
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, assert_nothing_left, evaluations, metrics, train_steps
from asyncrl.weights.versions import verify_version

STEPS, BATCH, GROUP, ETA, KEEP, NUM_SERVERS, NUM_EVAL = 60, 64, 8, 2, 3, 2, 512

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def run(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    changes = shlex.split(os.environ.get("ASYNCRL_LEARNING_WITH", ""))
    with launch_sorter(sorter, tmp_path_factory.mktemp("learning"), *changes) as run:
        assert run.wait(1500) == 0, run.output()
        assert_nothing_left(run.run_dir)
        yield run


def test_reward_climbs(run: RunHandle) -> None:
    start, _, end = evaluations(run.run_dir)
    assert start["eval/sampled_reward"] < 0.25
    rewards = [record["reward/mean"] for record in train_steps(run.run_dir)]
    assert len(rewards) == STEPS
    assert sum(rewards[17:22]) / 5 >= 0.65  # steps 18 to 22
    assert end["eval/sampled_reward"] >= 0.80
    assert end["eval/greedy_reward"] >= 0.93


def test_is_evaluated_at_start_middle_and_end(run: RunHandle) -> None:
    records = evaluations(run.run_dir)
    assert [record["step"] for record in records] == [0, STEPS // 2, STEPS]
    for record in records:
        for mode in ("sampled", "greedy"):
            assert record[f"eval/{mode}_num_prompts"] == NUM_EVAL
            assert record[f"eval/{mode}_num_failed"] == 0
            # An evaluation in the middle runs during training and sees several versions. The first and last see one version.
            oldest, newest = record[f"eval/{mode}_version_min"], record[f"eval/{mode}_version_max"]
            assert oldest == newest == record["step"] or (record["step"] == STEPS // 2 and oldest <= newest <= STEPS)
    assert f"eval  step   {STEPS}" in run.output()


def test_a_run_that_learns_gets_no_advice(run: RunHandle) -> None:
    assert "does not rise" not in run.output()


def test_staleness_is_bounded_and_no_prompt_is_lost(run: RunHandle) -> None:
    steps = train_steps(run.run_dir)
    assert max(record["offpolicy/head_max"] for record in steps) <= ETA
    assert max(record["offpolicy/head_mean"] for record in steps) > 0
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
    assert_nobody_left_behind(run.run_dir, ETA)
    assert not [name for record in steps for name in record if name.startswith("rejected/")]
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["rejected"] == {}
    assert summary["sequences"] == STEPS * BATCH * GROUP == len(trained_prompts(run.run_dir)) * GROUP
    assert summary["head_offpolicyness_max"] <= ETA


def test_the_logs_of_a_clean_run_have_no_warnings(run: RunHandle) -> None:
    files = LogFiles(run.run_dir / "logs" / "attempt_1", lambda _: True)
    entries = [entry for entry in stream_logs(files) if entry is not None]
    files.close()
    assert {entry.worker for entry in entries} >= {"master/0", "rollout_worker/0"}
    assert [entry for entry in entries if entry.at_least("WARNING")] == []


def test_what_is_left_on_disk(run: RunHandle) -> None:
    versions = sorted((run.run_dir / "weights" / "actor").iterdir())
    assert [path.name for path in versions[-KEEP:]] == [
        str(WeightVersion(1, version)) for version in range(STEPS - KEEP + 1, STEPS + 1)
    ]
    assert len(versions) <= KEEP + NUM_SERVERS  # each server may still hold a version when the last one is pruned
    verify_version(versions[-1], WeightVersion(1, STEPS))
    events = list((run.run_dir / "tensorboard" / "attempt_1").glob("events.out.tfevents.*"))
    assert any(b"reward/mean" in file.read_bytes() for file in events)
    assert {record["step"] for record in metrics(run.run_dir)} == set(range(STEPS + 1))


def test_the_final_model_loads_and_sorts(run: RunHandle, sorter: Path) -> None:
    torch.set_num_threads(1)
    final = run.run_dir / "checkpoints" / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    rows = [json.loads(line) for line in (sorter / "data" / "eval.jsonl").read_text().splitlines()[:64]]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")  # all of one length
    output = model.generate(**prompts, max_new_tokens=10, do_sample=False)
    completions = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(completion == row["answer"] for completion, row in zip(completions, rows, strict=True))
    assert right >= 55, list(zip(completions, rows, strict=True))
