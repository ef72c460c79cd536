"""A loss that is not finite: the step is skipped, told and counted, its batch is kept, and `replay` finds what did it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.bad_batches import list_bad_batches
from asyncrl.data.prompts import load_tokenizer
from asyncrl.data.trajectories import list_recording, read_trajectory
from asyncrl.launch.cli import main
from asyncrl.messages import WeightVersion
from asyncrl.testing.runs import RunHandle, launch, make_tiny_run, train_steps
from asyncrl.weights import list_versions, version_dir

pytestmark = pytest.mark.timeout(900)

POISON = """
import json, os
import numpy as np

PREFIX = json.loads(os.environ["POISON"])

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
OVERRIDES = (
    "prompts.shuffle=false",
    "train.extra_mfcs.poison.interface=poison:poison",
    "train.extra_mfcs.poison.input_keys=[packed_input_ids]",
    "train.extra_mfcs.poison.output_keys=[dense_rewards]",
    "weights.keep=1",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = make_tiny_run(folder, num_prompts=40)
    (folder / "poison.py").write_text(POISON)
    return config


def environment(config: Path, prefix: str) -> dict[str, str]:
    """Poisons prompts that begin so; prompts are numbered in four digits."""
    tokenizer = load_tokenizer(config.parent / "model")
    paths = os.pathsep.join([str(config.parent), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": paths, "POISON": json.dumps(tokenizer.encode(prefix, add_special_tokens=False))}


Replay = Callable[..., dict[str, Any]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """`asyncrl-launch replay ... --json`."""

    def call(*words: str, code: int = 0) -> dict[str, Any]:
        assert main(["replay", *words, "--json"]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


@pytest.fixture(scope="module")
def run(tiny: Path) -> Iterator[RunHandle]:
    """Over. A response of step 2 is bad, whose prompts are 0002 and 0003, each a minibatch; five steps in all. With eta = 0: else
    whichever two of the first four are judged first would be step 1."""
    overrides = (
        *OVERRIDES,
        "manager.max_head_offpolicyness=0",
        "train.max_steps=5",
        "train.ppo.minibatches=2",
        "record.trajectories=true",
    )
    with launch(tiny, *overrides, env=environment(tiny, "0003")) as run:
        assert run.wait(300) == 0, run.output()
        yield run


def test_one_bad_sequence_costs_its_minibatch(
    run: RunHandle, replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = train_steps(run.run_dir)
    assert [step["actor/skipped_steps"] for step in steps] == [0, 1, 0, 0, 0]
    assert [step["actor/optimizer_steps"] for step in steps] == [2] * 5
    assert json.loads((run.run_dir / "summary.json").read_text())["skipped_steps"] == 1
    told = "warning: step 2: 1 of 2 optimizer steps of the actor skipped, because loss or gradient were not finite"
    assert run.output().count(told) == 1
    assert f"asyncrl-launch replay {run.run_dir} 2" in run.output()

    (batch,) = list_bad_batches(run.run_dir)
    assert (batch.attempt, batch.step, batch.weights) == (1, 2, WeightVersion(1, 1))
    assert batch.weights in list_versions(run.run_dir / "weights" / "actor")  # kept beyond weights.keep
    groups = [read_trajectory(file) for file in list_recording(batch.path)]
    assert [group.header.meta.locator.position for group in groups] == [2, 3]
    assert {"advantages", "proximal_logprobs", "dense_rewards", "trained_mask"} <= set(groups[0].sample.keys)

    found = replay(str(run.run_dir), "2")
    assert (found["step"], found["groups"], found["sequences"]) == (2, 2, 4)
    assert found["stats"]["actor/skipped_steps"] == 1
    assert sorted(part["grad_norm"] is None for part in found["minibatches"]) == [False, True]
    assert found["max_logprob_difference"] < 1e-4
    assert [(bad["prompt"], bad["member"], bad["spread"]) for bad in found["bad"]] == [
        ("e0-p3", 1, False),
        ("e0-p3", 0, True),  # its advantage is normalised with that of the other
    ]
    itself = found["bad"][0]
    assert (itself["cause"], itself["ticket"]) == ("dense_rewards", groups[1].header.meta.ticket_id)
    assert [values["what"] for values in itself["bad"]] == ["dense_rewards", "advantages", "loss", "gradient"]
    assert itself["bad"][0]["value"] == "inf"
    assert itself["bad"][0]["first"] == itself["tokens"] - 1

    assert replay(str(run.run_dir)) == found  # the newest

    assert main(["replay", str(run.run_dir), "2"]) == 0
    text = capsys.readouterr().out
    assert "2 sequences with values that are not finite, 1 of them by themselves" in text
    assert "dense_rewards inf at token" in text

    # A step that was recorded, and sound; its weights are those of the end
    sound = replay(str(run.run_dir), "4", "--weights", str(run.run_dir / "checkpoints" / "final"))
    assert sound["finite"] is True
    assert sound["bad"] == []
    # Pruned, unless a server had them to the end
    shutil.rmtree(version_dir(run.run_dir, "actor", WeightVersion(1, 3)), ignore_errors=True)
    gone = replay(str(run.run_dir), "4", code=1)["error"]["message"]
    assert "a0001-v00000003 has no manifest.json: not a weight version, or it was pruned" in gone
    assert "--weights DIR takes others" in gone
    missing = replay(str(run.run_dir), "77", code=1)["error"]["message"]
    assert "there is no batch of step 77. Bad batches are kept of the steps: 2 (attempt 1)" in missing


def test_what_was_recorded_is_skipped_again_when_it_is_trained_again(
    tiny: Path, run: RunHandle, replay: Replay
) -> None:
    """mode=train_only: the recorded batch is bad again, and found out again."""
    overrides = ("mode=train_only", "trial=again", f"replay.path={run.run_dir}", "train.max_steps=3")
    with launch(tiny, *OVERRIDES, *overrides, env=environment(tiny, "0003")) as again:
        assert again.wait(300) == 0, again.output()
    assert [step["actor/skipped_steps"] for step in train_steps(again.run_dir)] == [0, 1, 0]
    found = replay(str(again.run_dir))
    assert found["step"] == 2
    (itself,) = [bad for bad in found["bad"] if not bad["spread"]]
    assert (itself["member"], itself["cause"]) == (1, "dense_rewards")


def test_too_many_in_a_row_end_the_run_with_the_reason(tiny: Path, replay: Replay) -> None:
    """mode=sync; from the second step on all prompts are bad."""
    overrides = (*OVERRIDES, "mode=sync", "trial=sync", "train.max_skipped_steps=4", "train.keep_bad_batches=2")
    with launch(tiny, *overrides, "train.max_steps=20", env=environment(tiny, "00")) as run:
        assert run.wait(300) == 1
    output = run.output()
    assert "the last 4 train steps of the actor were skipped: loss or gradient were not finite in all of them" in output
    assert "train.max_skipped_steps=4" in output
    assert f"asyncrl-launch replay {run.run_dir} 4" in output
    assert "Traceback" not in output
    assert [step["actor/skipped_steps"] for step in train_steps(run.run_dir)] == [1] * 4
    assert [batch.step for batch in list_bad_batches(run.run_dir)] == [3, 4]
    found = replay(str(run.run_dir))
    assert found["step"] == 4
    assert [(bad["member"], bad["spread"]) for bad in found["bad"]] == [(1, False)] * 2 + [(0, True)] * 2
