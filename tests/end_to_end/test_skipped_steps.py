"""A non-finite loss: the step is skipped, reported and counted. Its batch is kept, and a script names the sequence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.data.bad_batches import list_bad_batches
from asyncrl.data.prompts import load_tokenizer
from asyncrl.data.trajectories import list_recording, read_trajectory
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, launch, make_tiny_run, train_steps
from asyncrl.weights.versions import list_versions

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]

POISON = """
import json, os
import numpy as np
from asyncrl.dataflow.mfc import mfc

PREFIX = json.loads(os.environ.get("POISON", "null"))  # the test's own process imports this file without it

@mfc(input_keys=["packed_input_ids"], output_keys=["dense_rewards"])
def poison(engine, sample, train):
    '''A reward at any token; an infinite one for the second response to prompts that begin so.'''
    dense = np.zeros(sample.total_tokens(), np.float32)
    starts, at = sample.cu_seqlens(), 0
    for group in sample.slices():
        for member, ids in enumerate(group):
            if member == 1 and ids[: len(PREFIX)].tolist() == PREFIX:
                dense[starts[at + 1] - 1] = np.inf
            at += 1
    return sample.derive({"dense_rewards": dense})
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = make_tiny_run(folder, num_prompts=40)
    (folder / "poison.py").write_text(POISON)
    return config


def poisoned(config: Path) -> tuple[str, ...]:
    return ("prompts.shuffle=false", f"train.mfcs=[{config.parent}/poison.py:poison]", "weights.keep=1")


def environment(config: Path, prefix: str) -> dict[str, str]:
    """Poison the prompts that begin with `prefix`. Prompts are numbered in four digits."""
    tokenizer = load_tokenizer(config.parent / "model")
    return {"POISON": json.dumps(tokenizer.encode(prefix, add_special_tokens=False))}


SCRIPT = Path(__file__).parents[2] / "examples" / "bad_batch" / "examine.py"


def examine(run_dir: Path, *step: str, env: dict[str, str]) -> list[str]:
    """The script's output lines, without tickets."""
    command = [sys.executable, str(SCRIPT), str(run_dir), *step]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env={**os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return [re.sub(r"^\S+ (?=e\d+-p)", "", line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def run(tiny: Path) -> Iterator[RunHandle]:
    """A finished run of five steps. Step 2 has prompts 0002 and 0003, each a minibatch, and one of its responses is bad.

    eta = 0, because otherwise step 1 would consist of whichever two of the first four prompts are judged first.
    """
    overrides = (
        *poisoned(tiny),
        "manager.max_head_offpolicyness=0",
        "train.max_steps=5",
        "train.ppo.minibatches=2",
        "record.trajectories=true",
    )
    with launch(tiny, *overrides, env=environment(tiny, "0003")) as run:
        assert run.wait(300) == 0, run.output()
        yield run


def test_one_bad_sequence_costs_its_minibatch(tiny: Path, run: RunHandle) -> None:
    steps = train_steps(run.run_dir)
    assert [step["actor/skipped_steps"] for step in steps] == [0, 1, 0, 0, 0]
    assert [step["actor/optimizer_steps"] for step in steps] == [2] * 5
    assert json.loads((run.run_dir / "summary.json").read_text())["skipped_steps"] == 1
    told = "warning: step 2: 1 of 2 optimizer steps of the actor skipped, because loss or gradient was not finite"
    assert run.output().count(told) == 1
    assert f"examples/bad_batch/examine.py {run.run_dir} 2" in run.output()

    (batch,) = list_bad_batches(run.run_dir)
    assert (batch.attempt, batch.step, batch.weights) == (1, 2, WeightVersion(1, 1))
    assert batch.weights in list_versions(run.run_dir / "weights" / "actor")  # kept beyond weights.keep
    groups = [read_trajectory(file) for file in list_recording(batch.path)]
    assert [group.header.meta.locator.position for group in groups] == [2, 3]
    assert {"advantages", "proximal_logprobs", "dense_rewards", "trained_mask"} <= set(groups[0].sample.keys)

    title, *found = examine(run.run_dir, "2", env=environment(tiny, "0003"))
    assert title == f"train step 2 of attempt 1, weights {run.run_dir}/weights/actor/a0001-v00000001"
    assert found[:2] == ["e0-p2 member 0: finite", "e0-p2 member 1: finite"]
    # the first member's advantage is normalized together with the second's
    assert re.fullmatch(r"e0-p3 member 0: NOT FINITE: advantages nan at token \d+, loss, grad_norm", found[2])
    last = len(groups[1].sample.slices()[0][1]) - 1
    assert found[3].startswith(f"e0-p3 member 1: NOT FINITE: dense_rewards inf at token {last}, advantages ")
    assert found[3].endswith(", loss, grad_norm")
    assert len(found) == 4
    missing = subprocess.run([sys.executable, SCRIPT, run.run_dir, "77"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr) == (1, f"{run.run_dir} has no such bad batch; steps with one: [2]\n")


def test_what_was_recorded_is_skipped_again_when_it_is_trained_again(tiny: Path, run: RunHandle) -> None:
    """With mode=train_only the recorded batch is bad again, and the run detects this again."""
    overrides = ("mode=train_only", "trial=again", f"replay.path={run.run_dir}", "train.max_steps=3")
    with launch(tiny, *poisoned(tiny), *overrides, env=environment(tiny, "0003")) as again:
        assert again.wait(300) == 0, again.output()
    assert [step["actor/skipped_steps"] for step in train_steps(again.run_dir)] == [0, 1, 0]
    found = examine(again.run_dir, env=environment(tiny, "0003"))
    assert found[0].startswith("train step 2 of attempt 1, weights ")
    (itself,) = [line for line in found if "dense_rewards" in line]
    assert "member 1: NOT FINITE: dense_rewards inf at token" in itself


def test_too_many_in_a_row_end_the_run_with_the_reason(tiny: Path) -> None:
    """In this run with mode=sync every prompt is bad, so every step is skipped."""
    overrides = (*poisoned(tiny), "mode=sync", "trial=sync", "train.max_skipped_steps=4", "train.keep_bad_batches=2")
    with launch(tiny, *overrides, "train.max_steps=20", env=environment(tiny, "00")) as run:
        assert run.wait(300) == 1
    output = run.output()
    assert "the last 4 train steps of the actor were skipped: loss or gradient were not finite in all of them" in output
    assert "train.max_skipped_steps=4" in output
    assert f"examples/bad_batch/examine.py {run.run_dir} 4" in output
    assert "Traceback" not in output
    assert [step["actor/skipped_steps"] for step in train_steps(run.run_dir)] == [1] * 4
    assert [batch.step for batch in list_bad_batches(run.run_dir)] == [3, 4]
    title, *found = examine(run.run_dir, env=environment(tiny, "00"))
    assert title == f"train step 4 of attempt 1, weights {run.run_dir}/bad_batches/a0001-s00000004/weights"
    assert ["dense_rewards" in line for line in found] == [False, True] * 2
    assert all(line.endswith("loss, grad_norm") for line in found)
