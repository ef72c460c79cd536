"""Checkpoints saved in one layout and loaded in another: training goes on bit for bit. A torn checkpoint is detected."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded_models import placement, shard, three_layers, united

from asyncrl.model import checkpoint
from asyncrl.model.checkpoint import CheckpointError
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.protocol.versions import WrittenFile
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.checkpoints import FORMAT
from asyncrl.weights.form import WeightsError
from tests.support.rank_processes import RankError, RankProcesses

DRAWS = 3


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(8, limit_s=120.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return three_layers(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(ranks, model_path, tmp_path_factory) -> Path:
    """A checkpoint of d2p2m2 after two steps, with a frozen reference on d2."""
    path = tmp_path_factory.mktemp("checkpoints") / "step-2"
    save_all(ranks, model_path, "d2p2m2", path)
    return path


def save_all(ranks: RankProcesses, model_path: str, grid: str, path: Path) -> list[Any]:
    answers = ranks.run(save, model_path, grid, str(path), num_ranks=None)
    checkpoint.commit(path, [file for files, _ in answers for file in files], fsync=False)
    return [drawn for _, drawn in answers]


# ---------------------------------------------------------------------------------------------------------------- ranks


def make(path: str, grid: str, ref_grid: str, *, change: float) -> dict[str, TrainEngine]:
    """Make this rank's part of an actor with an optimizer, and of a frozen reference that only the first ranks hold."""
    models = {}
    for name, sizes in (("actor", grid), ("ref", ref_grid)):
        mesh = ModelMesh.make(placement(name, sizes), "cpu")
        if mesh is not None:
            trainable = name == "actor"
            models[name] = shard(path, mesh, change=change if trainable else 2 * change, trainable=trainable)
    return models


def step(model: TrainEngine) -> None:
    """Take an optimizer step. The gradients are elementwise functions of the parameters, so each shard computes its own."""
    for parameter in model.named_parameters().values():
        parameter.grad = parameter.detach().sin()
    assert model.optimizer is not None
    for group in model.optimizer.param_groups:
        group["lr"] = 1e-2
    model.optimizer.step()


def draw() -> list[float]:
    return [float(torch.rand(1)), float(np.random.rand()), random.random()]


def save(rank: int, model_path: str, grid: str, path: str) -> tuple[list[WrittenFile], list[float]]:
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    np.random.randn()
    models = make(model_path, grid, "d2", change=0.1)
    for _ in range(2):
        if "actor" in models:
            step(models["actor"])
    taken = checkpoint.snapshot(models)
    if "actor" in models:  # training goes on before the files are written
        step(models["actor"])
    return checkpoint.write(Path(path), taken, fsync=False), draw()


def load(rank: int, model_path: str, grid: str, ref_grid: str, path: str, num_ranks: int) -> Any:
    """Load the checkpoint. Return (actor after one more step, ref, random numbers)."""
    models = make(model_path, grid, ref_grid, change=0.5)
    if rank >= num_ranks:
        return {}, {}, None
    checkpoint.load(Path(path), models, workers=range(num_ranks))
    drawn = draw()
    if "actor" in models:
        step(models["actor"])
    return share(models.get("actor")), share(models.get("ref")), drawn


def share(model: TrainEngine | None) -> dict[str, torch.Tensor]:
    return take_share(model) if model is not None else {}


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("grid", "ref_grid"),
    [
        ("d1", "d1"),
        ("d3", "m2"),
        ("p2m2", "p2"),
        ("d2p2", "d2m2"),
        ("d2p2m2", "d2"),
        ("d2m2r2", "d2r2"),
        ("d2c2", "c2m2"),
    ],
)
def test_training_goes_on_in_another_layout(ranks, model_path, saved, grid, ref_grid):
    size = max(placement("a", grid).grid.size, placement("a", ref_grid).grid.size)
    actors, refs, _ = zip(*ranks.run(load, model_path, grid, ref_grid, str(saved), size), strict=True)
    expected = shard(model_path, None, change=0.1)
    for _ in range(3):
        step(expected)
    actor, ref = united(actors), united(refs)
    for found, wanted in ((actor, expected), (ref, shard(model_path, None, change=0.2))):
        assert set(found) == set(wanted.named_parameters())
        for name, tensor in wanted.named_parameters().items():
            assert torch.equal(found[name], tensor), name


def test_copies_of_the_weights_are_written_once(ranks, model_path, tmp_path):
    save_all(ranks, model_path, "d2m2r2", tmp_path / "c")
    actors, _, _ = zip(*ranks.run(load, model_path, "d2p2", "d2", str(tmp_path / "c"), 4), strict=True)
    expected = shard(model_path, None, change=0.1)
    for _ in range(3):
        step(expected)
    for name, tensor in united(actors).items():
        assert torch.equal(tensor, expected.named_parameters()[name]), name


def test_random_numbers_go_on_where_they_were(ranks, model_path, tmp_path):
    drawn = save_all(ranks, model_path, "d2p2m2", tmp_path / "c")
    again = ranks.run(load, model_path, "d2p2m2", "d2", str(tmp_path / "c"), 8)
    assert [numbers for *_, numbers in again] == drawn
    assert len({tuple(numbers) for numbers in drawn}) == 8


def test_each_part_is_written_once_and_by_all(saved, model_path):
    """The files contain the parameters, two moments in float32, and the reference. Nothing is written twice, although all ranks
    hold the norms and two stages hold tied tensors."""
    manifest = checkpoint.verify(saved)
    sizes = [entry.bytes for name, entry in manifest.files.items() if name.endswith(".safetensors")]
    one = sum(tensor.nbytes for tensor in shard(model_path, None).named_parameters().values())
    headers = sum(
        int.from_bytes((saved / name).read_bytes()[:8], "little") + 8 for name in manifest.files if "part" in name
    )
    assert sum(sizes) == 4 * one + headers
    assert len(sizes) == 8
    assert not [entry for entry in saved.iterdir() if entry.suffix not in (".safetensors", ".json")]  # no pickles


def test_one_process_without_a_world(model_path, tmp_path):
    """A checkpoint of one process can be saved and loaded, also before the first step, when AdamW has no moments yet."""
    for steps in (0, 2):
        model = shard(model_path, None, change=0.1)
        for _ in range(steps):
            step(model)
        path = tmp_path / str(steps)
        files = checkpoint.write(path, checkpoint.snapshot({"actor": model}))
        checkpoint.commit(path, files)
        other = shard(model_path, None)
        checkpoint.load(path, {"actor": other}, workers=[0])
        for each in (model, other):
            step(each)
        for name, tensor in model.named_parameters().items():
            assert torch.equal(other.named_parameters()[name], tensor), name


def test_a_tensor_that_no_state_describes_is_named(saved):
    with pytest.raises(
        CheckpointError, match=r"is incomplete: no worker's state has the shape of tensor actor\.[a-z0-9._]+$"
    ):
        checkpoint._check_whole(saved, [])


def test_what_a_died_attempt_left_goes(ranks, model_path, tmp_path):
    left = tmp_path / "c.writing"
    left.mkdir()
    (left / "part-00007-00003.safetensors").write_bytes(b"torn")
    (left / "state-00099.json").write_bytes(b"{")
    save_all(ranks, model_path, "d2", tmp_path / "c")
    checkpoint.verify(tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "state-00099.json").exists()


def test_a_missing_part_makes_no_checkpoint(ranks, model_path, tmp_path):
    path = tmp_path / "c"
    files = [file for files, _ in ranks.run(save, model_path, "d2", str(path)) for file in files]
    lacking = [file for file in files if not file.name.startswith("part-00001")]
    with pytest.raises(CheckpointError, match=r"tensor actor\..* has \d+ of \d+ elements"):
        checkpoint.commit(path, lacking)
    assert list(tmp_path.iterdir()) == []
    files = [file for files, _ in ranks.run(save, model_path, "d2", str(path)) for file in files]
    (tmp_path / "c.writing" / files[0].name).write_bytes(b"short")
    with pytest.raises(WeightsError, match=r"has 5 bytes; the worker that wrote it reported \d+ bytes"):
        checkpoint.commit(path, files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "checkpoint.json").unlink(), "has no checkpoint.json"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "cannot be read"),
        (
            lambda path: (path / "part-00003-00000.safetensors").unlink(),
            "part-00003-00000.safetensors is in the manifest but",
        ),
        (lambda path: flip(path / "part-00005-00000.safetensors"), "part-00005-00000.safetensors has another checksum"),
        (lambda path: flip(path / "state-00002.json"), "state-00002.json has another checksum"),
    ],
    ids=["no manifest", "torn manifest", "no part", "flipped", "flipped state"],
)
def test_a_torn_checkpoint_is_refused_by_all(ranks, model_path, saved, tmp_path, damage, message):
    path = tmp_path / "torn"
    shutil.copytree(saved, path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(path)
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(load, model_path, "d2", "d1", str(path), 2, grace_s=120.0)
    errors = caught.value.errors
    assert [type(errors[rank]) for rank in sorted(errors)] == [CheckpointError] * 2


def test_another_model_does_not_fit(model_path, saved, tmp_path):
    make_tiny_model(tmp_path, hidden_size=24, intermediate_size=54, num_layers=3)
    with pytest.raises(CheckpointError, match=r"does not fit model 'ref': Size mismatch .*\(\[64, 24\]\) for ref"):
        checkpoint.load(saved, {"ref": shard(str(tmp_path), None)}, workers=[0])
    with pytest.raises(CheckpointError, match=r"does not fit model 'critic': Missing key .* critic\."):
        checkpoint.load(saved, {"critic": shard(model_path, None)}, workers=[0])


def test_models_that_the_checkpoint_does_not_have(model_path, saved):
    """A second reference loads the first one's data. A model that the checkpoint lacks is an error, or keeps its weights."""
    second, new = shard(model_path, None), shard(model_path, None, change=0.3)
    models = {"ref@1": second, "reward": new}
    with pytest.raises(CheckpointError, match=r"does not fit model 'reward': Missing key .* reward\."):
        checkpoint.load(saved, models, workers=[0])
    checkpoint.load(saved, models, workers=[0], or_as_is=("reward",))
    for found, wanted in ((second, shard(model_path, None, change=0.2)), (new, shard(model_path, None, change=0.3))):
        for name, tensor in wanted.named_parameters().items():
            assert torch.equal(found.named_parameters()[name], tensor), name


def test_an_average_that_the_checkpoint_does_not_have_begins_with_the_actor(model_path, saved):
    actor, average = shard(model_path, None), shard(model_path, None)
    checkpoint.load(saved, {"actor": actor, "ema": average}, workers=[0], instead={"ema": "actor", "actor": "ref"})
    expected = shard(model_path, None, change=0.1)
    for _ in range(2):
        step(expected)
    for found in (actor, average):
        for name, tensor in expected.named_parameters().items():
            assert torch.equal(found.named_parameters()[name], tensor), name


def test_a_newer_format_is_said(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "c")
    about = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    (tmp_path / "c" / "checkpoint.json").write_text(json.dumps(about | {"format": FORMAT + 1}))
    with pytest.raises(
        CheckpointError, match=rf"has format {FORMAT + 1}; this is asyncrl .*, which reads format {FORMAT}"
    ):
        checkpoint.verify(tmp_path / "c")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
