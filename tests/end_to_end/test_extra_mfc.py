"""Functions of a user's in the dataflow: an MFC with a key of its own, a reference model, the naive loss."""

import json
from pathlib import Path

import pytest
import torch
from whole_runs import launch_sorter, published_weights, trained_events

from asyncrl.testing.runs import train_steps

STEPS, BATCH, GROUP = 2, 16, 4
SMALL = (
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    f"rollout.group_size={GROUP}",
    "train.ppo.minibatches=2",
    "eval.prompts=null",
    "rollout.num_workers=1",
)

pytestmark = pytest.mark.timeout(900)

# A user's code: one function makes a key, another reads it. Each records its input.
FUNCTIONS = '''
import json, os
import numpy as np
from asyncrl.dataflow.mfc import mfc

def note(**what):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps(what) + "\\n")

@mfc(input_keys=["packed_input_ids"], output_keys=["my_weights"])
def weigh(engine, sample, train):
    """The key `my_weights`: for each token its id times ten."""
    note(mfc="weigh", rank=engine.replica, ids=list(sample.ids), keys=sorted(sample.keys), checksum=checksum(engine))
    return sample.derive({"my_weights": sample.data["packed_input_ids"].astype(np.float32) * 10})

@mfc(input_keys=["packed_input_ids", "my_weights"], output_keys=["my_checks"], dispatch="rank_zero")
def check(engine, sample, train):
    right = np.array_equal(sample.data["my_weights"], sample.data["packed_input_ids"] * 10)
    note(mfc="check", rank=engine.replica, ids=list(sample.ids), keys=sorted(sample.keys), right=right)
    return sample.derive({"my_checks": sample.data["my_weights"] + 1})

def checksum(engine):
    """Of the whole model: every rank gathers what it does not hold, so every rank calls this, with groups or without."""
    parameters = engine.named_parameters().values()
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in parameters]
    return sum(float(tensor.detach().double().abs().sum()) for tensor in whole)
'''


def test_mfcs_of_a_user_and_a_reference_model(sorter: Path, tmp_path: Path) -> None:
    functions = tmp_path / "my_functions.py"
    functions.write_text(FUNCTIONS)
    notes = tmp_path / "notes.jsonl"
    with launch_sorter(
        sorter,
        tmp_path,
        *SMALL,
        "train.ppo.kl_coef=0.1",
        f"train.mfcs=[{functions}:check,{functions}:weigh]",
        "train.extra_train_keys=[my_checks]",
        env={"NOTES": str(notes)},
    ) as run:
        assert run.wait(300) == 0, run.output()
    seen = [json.loads(line) for line in notes.read_text().splitlines()]
    for event in trained_events(run.run_dir):
        expected = {group["ticket"] for group in event["groups"]}
        for mfc in ("weigh", "check"):
            mine = [ticket for note in seen if note["mfc"] == mfc for ticket in note["ids"] if ticket in expected]
            assert sorted(mine) == sorted(expected)  # once, on one of the ranks
        of_check = [note for note in seen if note["mfc"] == "check" and note["ids"]]
        assert {note["rank"] for note in of_check} == {0}  # its dispatch
        assert {note["rank"] for note in seen if note["mfc"] == "weigh" and note["ids"]} == {0, 1}
        for note in seen:
            if note["mfc"] == "weigh" and expected & set(note["ids"]):
                # It ran after the previous train step and before the train step of its own batch.
                assert note["checksum"] == pytest.approx(checksum(run.run_dir, event["step"] - 1), rel=1e-12)
    assert checksum(run.run_dir, 0) != pytest.approx(checksum(run.run_dir, 1), rel=1e-12)
    for note in seen:
        assert note["keys"] == {"weigh": ["packed_input_ids"], "check": ["my_weights", "packed_input_ids"]}[note["mfc"]]
        assert note.get("right", True)
    first, second = train_steps(run.run_dir)
    for step in (first, second):
        assert {
            "time/weigh_s",
            "time/check_s",
            "time/ref_inf_s",
            "time/actor_inf_s",
            "time/advantages_s",
            "time/actor_train_s",
        } <= step.keys()
        assert step["kl/coef"] == pytest.approx(0.1)
    assert abs(first["kl/sequence_mean"]) < 1e-5  # the policy still equals its reference
    assert abs(second["kl/sequence_mean"]) > 1e-5


@pytest.mark.release
def test_naive_loss(sorter: Path, tmp_path: Path) -> None:
    """Without the decoupled loss (and by default without `recompute_logprob`) the trainer recomputes no logprobs: the ratio uses
    the servers' logprobs."""
    with launch_sorter(
        sorter, tmp_path, *SMALL, "train.ppo.use_decoupled_loss=false", "allocation=transformers.d1+d1"
    ) as run:
        assert run.wait(300) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert "time/actor_inf_s" not in step
        assert step["actor/skipped_steps"] == 0
    # The weights in training sampled the first batch. Its ratios are therefore 1 if the engine's logprobs are right.
    assert steps[0]["actor/importance_weight"] == pytest.approx(1.0, abs=0.05)


def checksum(run_dir: Path, version: int) -> float:
    return sum(float(tensor.to(torch.float64).abs().sum()) for tensor in published_weights(run_dir, version).values())
