"""Models that read images beside text are trained on texts: every export has their towers, bit by bit as in the checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_models import placement, shard, united
from torch import Tensor
from transformers import AutoModelForImageTextToText

from asyncrl.architectures.agreement import Difference, texts_of
from asyncrl.cli.architecture_check import Task, check_architecture
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.generation.engine import EngineArguments
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import commit_model, take_buckets, take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.self_check import _sample_of, compute, load_checked
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.delta import DeltaForm
from asyncrl.weights.versions import commit_version, side_files, version_dir, write_part, write_version
from tests.support.rank_processes import RankProcesses
from tests.support.vision_models import SINGLE, bits_of, is_of_text, make_vision_model

LIMIT_S = 60.0
FAMILIES = ["qwen3_5", "qwen3_5_moe", "gemma3"]
V0, V1, V2 = (WeightVersion(1, number) for number in range(3))
SMALL = GenerationConfig(page_size=8, num_blocks=64, max_batch_tokens=64, max_running_requests=8)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(2, limit_s=100.0) as ranks:
        yield ranks


def towers(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return bits_of({name: tensor for name, tensor in tensors.items() if not is_of_text(name)})


def trainer_of(path: Path) -> TrainEngine:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    model = ModelConfig("actor", str(path), "d1", [0], trainable=True, optimizer=optimizer)
    train = TrainConfig(dtype="float32", max_tokens_per_mb=256)
    return load_checked(model, train, mesh=None, device=torch.device("cpu"))


def train(engine: TrainEngine) -> None:
    sample = _sample_of(texts_of(engine.vocab_size))
    stats = engine.train_step(sample, lambda out, *_: (-out["logprobs"].mean(), {}), temperature=1.0, lr_step=0)
    assert stats["grad_norm"] > 0


@pytest.mark.parametrize("family", FAMILIES)
async def test_towers_are_exported_as_they_are_in_the_checkpoint(family: str, tmp_path: Path) -> None:
    """In a full version, in tensors that are sent, and in a model for the user. A delta does not name them."""
    path = tmp_path / "model"
    source = make_vision_model(path, family)
    trainer = trainer_of(path)
    assert not [name for name in trainer.named_parameters() if "visual" in name or "vision_tower" in name]
    assert [name for name in trainer.untrained if "visual" in name or "vision_tower" in name]
    before = take_share(trainer)
    train(trainer)
    assert trainer.optimizer is not None
    assert len(trainer.optimizer.state) == len(trainer.named_parameters())
    after = take_share(trainer)
    assert after.keys() == source.keys()
    assert towers(after) == towers(before) == towers(source)
    assert all(not torch.equal(after[name], before[name]) for name in after if is_of_text(name) and "q_proj" in name)
    sent = {name: tensor.clone() for bucket in take_buckets(trainer, 1 << 20)[0] for name, tensor in bucket.tensors()}
    assert bits_of(sent) == bits_of(after)
    changes = DeltaForm().encode(before, after, worth=10.0)

    async def difference() -> float:
        texts = texts_of(trainer.vocab_size)
        expected = compute(trainer, texts)
        assert expected is not None
        scores = [np.array(await engine.score(text), np.float32) for text in texts]
        return Difference.between(scores, expected).nats

    def folder(version: WeightVersion) -> Path:
        return version_dir(tmp_path, "actor", version)

    engine = TransformersEngine(EngineArguments(str(path), SMALL), device="cpu")
    async with asyncio.timeout(LIMIT_S):
        await engine.start()
        try:
            base = write_version(folder(V0), before.items(), source_dir=path, version=V0, fsync=False)
            await engine.load_weights(folder(V0), V0)
            assert await difference() > 0.01
            files = write_part(folder(V1), (), part=0, fsync=False, others={DeltaForm().file_name(0): changes})
            commit_version(folder(V1), files, sides=side_files(path), version=V1, fsync=False, base=base)
            changed = {part.name for part in DeltaForm().read(folder(V1)) if part.values}
            assert changed == {name for name in after if not torch.equal(after[name], before[name])}
            await engine.load_weights(folder(V1), V1)
            assert await difference() <= 1e-5
            train(trainer)
            assert await difference() > 0.01
            await engine.load_tensors(take_share(trainer), V2)
            assert await difference() <= 1e-5
        finally:
            await engine.close()
    final = tmp_path / "final"
    files = write_part(final, after.items(), part=0, fsync=False)
    commit_model(final, files, config=trainer.config, dtype=trainer.dtype, sides={}, fsync=False)
    assert towers(load_file(final / SINGLE)) == towers(source)
    architectures = [json.loads((one / "config.json").read_text())["architectures"] for one in (path, final)]
    assert architectures[0] == architectures[1]
    loaded, info = AutoModelForImageTextToText.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"]
    assert type(loaded).__name__ == architectures[0][0]


def share_after_a_step(rank: int, path: str, grid: str) -> dict[str, Tensor]:
    mesh = ModelMesh.make(placement("actor", grid), "cpu")
    assert mesh is not None
    engine = shard(path, mesh)
    is_first = rank == 0
    assert all((tensor.device.type == "cpu") == is_first for tensor in engine.untrained.values())
    half = texts_of(engine.vocab_size)
    mine = half[(mesh.placement.grid.num_stages > 1 and slice(None)) or slice(rank, None, 2)]
    engine.train_step(_sample_of(mine), lambda out, *_: (-out["logprobs"].sum() / 50, {}), temperature=1.0, lr_step=0)
    return take_share(engine)


@pytest.mark.parametrize("grid", ["d2", "p2"])
def test_each_layout_exports_them(ranks: RankProcesses, tmp_path: Path, grid: str) -> None:
    """Under the names of the checkpoint, which are not those of the modules."""
    source = make_vision_model(tmp_path, "qwen3_5")
    share = united(ranks.run(share_after_a_step, str(tmp_path), grid))
    assert share.keys() == source.keys()
    assert towers(share) == towers(source)
    alone = shard(str(tmp_path), None)
    sample = _sample_of(texts_of(alone.vocab_size))
    alone.train_step(sample, lambda out, *_: (-out["logprobs"].sum() / 50, {}), temperature=1.0, lr_step=0)
    for name, tensor in take_share(alone).items():
        torch.testing.assert_close(share[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_that_takes_the_tensors_of_the_folder_takes_the_export(family: str, tmp_path: Path) -> None:
    make_vision_model(tmp_path, family)
    assert not check_architecture(Task(str(tmp_path), True, None, by_folder=True)).problem


def test_weights_in_another_format_are_refused_if_a_tower_would_be_lost(tmp_path: Path) -> None:
    source = make_vision_model(tmp_path, "qwen3_5")
    named = {name.replace("model.language_model.", "language_model.model."): tensor for name, tensor in source.items()}
    save_file(named, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="its weights"):
        trainer_of(tmp_path)


def test_what_a_text_model_has_beside_its_own_tensors_is_exported_too(tmp_path: Path) -> None:
    make_vision_model(tmp_path / "both", "qwen3_5")
    source = {name: t for name, t in load_file(tmp_path / "both" / SINGLE).items() if "visual" not in name}
    text = {name.replace("language_model.", ""): tensor for name, tensor in source.items()}
    config = json.loads((tmp_path / "both" / "config.json").read_text())["text_config"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps(config))
    save_file(text, tmp_path / "text" / SINGLE, metadata={"format": "pt"})
    shutil.copy(tmp_path / "both" / "tokenizer.json", tmp_path / "text")
    share = take_share(trainer_of(tmp_path / "text"))
    assert share.keys() == text.keys()
    assert bits_of({"mtp.norm.weight": share["mtp.norm.weight"]}) == bits_of(
        {"mtp.norm.weight": text["mtp.norm.weight"]}
    )
