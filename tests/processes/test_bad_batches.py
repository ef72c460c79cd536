"""A batch with a non-finite loss, on real model workers in several layouts: it is kept whole, and examples/bad_batch finds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_worker import TRAIN, on_one_worker, one_model, placed_mfcs, push_all, trajectory, weights_in

from asyncrl.config.import_object import import_object
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import CriticConfig, OptimizerConfig, TrainConfig
from asyncrl.data.bad_batches import folder_of, list_bad_batches
from asyncrl.data.trajectories import Trajectory, list_recording, read_trajectory
from asyncrl.master.skipped import SkippedSteps
from asyncrl.protocol.calls import CommitWeights, WriteWeights
from asyncrl.testing.tiny import make_tiny_model
from tests.support.services import make_services
from tests.support.training_side import TrainingSide, training_side

EXAMINE = import_object(f"{Path(__file__).parents[2]}/examples/bad_batch/examine.py:examine", "the script")
IDS = ["a", "b", "c", "d", "e"]
HEADS = {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1}

POISON = """
import numpy as np
from asyncrl.dataflow.mfc import mfc

@mfc(input_keys=["packed_input_ids"], output_keys=["dense_rewards"])
def poison(engine, sample, train):
    '''The second response of group d gets a reward that is infinite, at its last token.'''
    dense = [[np.zeros(len(ids), np.float32) for ids in group] for group in sample.slices()]
    for ticket, group in zip(sample.ids, dense):
        if ticket == "d":
            group[1][-1] = -np.inf
    return sample.derive({"dense_rewards": np.concatenate([run for group in dense for run in group] or [np.zeros(0, np.float32)])})
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=32, intermediate_size=64)
    return path


@pytest.fixture
def train(tmp_path: Path) -> TrainConfig:
    """A config without advantage normalization, so that a bad reward affects only its own response."""
    (tmp_path / "poison.py").write_text(POISON)
    return replace(
        TRAIN,
        critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), minibatches=2),
        ppo=replace(TRAIN.ppo, advantage_norm="none", gae_lambda=0.9),
        mfcs=[f"{tmp_path}/poison.py:poison"],
    )


def spread_out(path: Path, train: TrainConfig) -> list[ModelConfig]:
    """The actor on two data ranks (workers 0 and 1), the critic on two tensor ranks (workers 1 and 2), a reference on worker 2."""
    return [
        one_model("actor", path, "d2p1m1", [0, 1], train),
        one_model("critic", path, "d1p1m2", [1, 2], train),
        one_model("ref", path, "d1p1m1", [2], train),
    ]


async def bad_step(side: TrainingSide, train: TrainConfig, run_dir: Path) -> dict[str, float]:
    """Execute a step on all groups, and save its batch as the master does after a skipped step. Return the step's stats."""
    await push_all(side, HEADS)
    result = await side.executor().execute_step(IDS, 0)
    skipped = SkippedSteps(train, run_dir, 1, make_services())
    assert skipped.add(result.stats)
    metas = [trajectory(ticket, HEADS[ticket])[0] for ticket in IDS]
    await skipped.save(metas, 1, result.stats, heads=side.heads, tracker=side.tracker, caller=side.caller)
    return result.stats


def saved(run_dir: Path) -> list[Trajectory]:
    (batch,) = list_bad_batches(run_dir)
    return [read_trajectory(file) for file in list_recording(batch.path)]


async def test_every_head_saves_its_groups_with_what_others_have_made_of_them(
    tmp_path: Path, model_path: Path, train: TrainConfig
) -> None:
    models, run_dir = spread_out(model_path, train), tmp_path / "run"
    async with training_side(models, placed_mfcs(train), train, run_dir) as side:
        stats = await bad_step(side, train, run_dir)
        path = run_dir / "weights" / "a0001-v00000001"
        write = WriteWeights(role="actor", weight_version=path.name, folder=f"weights/{path.name}")
        replies = await side.caller.call("write", [0, 1], write)
        files = [file for reply in replies for file in reply.files]
        commit = CommitWeights(role="actor", weight_version=path.name, folder=write.folder, files=files)
        await side.caller.call("commit", [0], commit)
    # One of two minibatches contains group d. Actor and critic made an optimizer step on the other.
    assert (stats["actor/skipped_steps"], stats["actor/optimizer_steps"]) == (1, 2)
    assert (stats["critic/skipped_steps"], stats["critic/optimizer_steps"]) == (1, 2)
    moved = weights_in(path)
    assert all(tensor.isfinite().all() for tensor in moved.values())
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in weights_in(model_path).items() if name in moved)

    batch = saved(run_dir)
    assert [group.header.meta.ticket_id for group in batch] == IDS
    assert [group.header.recorded_by for group in batch] == [f"model_worker/{HEADS[ticket]}" for ticket in IDS]
    made = {"proximal_logprobs", "packed_ref_logprobs", "values", "dense_rewards", "advantages", "returns"}
    for group in batch:
        assert made <= set(group.sample.keys)
        assert (group.header.step, group.header.batch, group.header.trained) == (0, 5, True)

    (kept,) = list_bad_batches(run_dir)
    found = list(EXAMINE(kept.path, train, model_path, seed=1))
    assert [line.endswith(": finite") for line in found] == [
        not (group.header.meta.ticket_id == "d" and member == 1)
        for group in batch
        for member in range(group.sample.num_sequences())
    ]
    (bad,) = (line for line in found if "NOT FINITE" in line)
    assert bad.startswith("d e0-p0 member 1: NOT FINITE: ")
    what = [part.split()[0] for part in bad.partition("NOT FINITE: ")[2].split(", ")]
    assert sorted(what) == ["advantages", "dense_rewards", "grad_norm", "loss", "returns"]
    assert "dense_rewards -inf at token" in bad

    name = break_weights(model_path, tmp_path / "broken")
    assert next(EXAMINE(kept.path, train, tmp_path / "broken", seed=1)) == f"weights model.{name}: NOT FINITE"


async def test_a_disk_that_refuses_costs_a_warning(
    tmp_path: Path, model_path: Path, train: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    folder = folder_of(run_dir, 1, 1)
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    async with training_side(on_one_worker(model_path, train), placed_mfcs(train), train, run_dir) as side:
        await push_all(side, dict.fromkeys(IDS, 0))
        result = await side.executor().execute_step(IDS, 0)
        skipped = SkippedSteps(train, run_dir, 1, make_services())
        metas = [trajectory(ticket)[0] for ticket in IDS]
        await skipped.save(metas, 1, result.stats, heads=side.heads, tracker=side.tracker, caller=side.caller)
    assert "could not be written" in caplog.text


def break_weights(model_path: Path, broken: Path) -> str:
    """Copy the model folder to `broken`, with an infinite value in one tensor. Return the tensor's name."""
    broken.mkdir()
    for file in model_path.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (tensors_file,) = model_path.glob("*.safetensors")
    tensors = load_file(tensors_file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = torch.inf
    save_file(tensors, broken / tensors_file.name, metadata={"format": "pt"})
    return name
