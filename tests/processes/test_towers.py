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
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.agreement import Difference, SelfCheckError, texts_of
from asyncrl.cli.architecture_check import Task, check_architecture
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.data.auto_classes import auto_classes
from asyncrl.generation.engine import EngineArguments
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import commit_model, take_buckets, take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.self_check import _plain, _sample_of, check_small_copy, compute, load_checked
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.delta import DeltaForm
from asyncrl.weights.versions import commit_version, side_files, version_dir, write_part, write_version
from tests.support.family_table import default_config, listed
from tests.support.rank_processes import RankProcesses
from tests.support.vision_models import SINGLE, bits_of, is_of_text, make_vision_model

LIMIT_S = 60.0
FAMILIES = ["qwen3_5", "qwen3_5_moe", "gemma3", "qwen2_5_vl"]
READ_IMAGES = sorted(
    family
    for family, auto_class in auto_classes().items()
    if auto_class == "AutoModelForImageTextToText" and listed()[family].is_trained
)
QUICK = ("qwen3_vl", "llava_next")  # the latter has a parameter beside its modules
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


def by_part(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters that texts reach, and the others."""
    ids = torch.arange(1, 17)[None]
    model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[:, :-1].gather(
        2, ids[:, 1:, None]
    ).sum().backward()
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, parameter in model.named_parameters():
        parts[parameter.grad is None][name] = parameter.detach()
    return parts


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.release) for name in READ_IMAGES]
)
def test_what_texts_do_not_reach_is_exported_as_it_is(family: str, tmp_path: Path) -> None:
    """Under the names that the checkpoint has. The texts have the token that stands for an image."""
    path, final = tmp_path / "model", tmp_path / "final"
    source = make_vision_model(path, family)
    trainer = trainer_of(path)
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    texts = [[1, 2, token, 3] for token in (4, *image_tokens(trainer.config))]
    expected = [_plain(plain.eval(), text) for text in texts]
    found = compute(trainer, texts)
    assert found is not None
    assert Difference.between(found, expected).nats <= 1e-4
    reached, others = by_part(plain)
    assert reached
    assert others
    train(trainer)
    share = take_share(trainer)
    assert share.keys() == source.keys()
    commit_model(
        final,
        write_part(final, share.items(), part=0, fsync=False),
        config=trainer.config,
        dtype=trainer.dtype,
        sides={},
        fsync=False,
    )
    after, info = AutoModelForImageTextToText.from_pretrained(final, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert type(after) is type(plain)
    now = dict(after.named_parameters())
    assert [name for name, tensor in others.items() if not torch.equal(now[name], tensor)] == []
    matrices = [name for name, tensor in reached.items() if tensor.dim() > 1]
    assert any(not torch.equal(now[name], reached[name]) for name in matrices)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_the_positions_of_a_text_are_plain_in_time_height_and_width(family: str, tmp_path: Path) -> None:
    """The trainer passes them; transformers makes them of the tokens."""
    make_vision_model(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    positions: list[Tensor] = []
    (rotary,) = [module for name, module in model.named_modules() if name.endswith("language_model.rotary_emb")]
    rotary.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs.get("position_ids", args[-1])), with_kwargs=True
    )
    for text in ([1, 2, 3], [4, *image_tokens(model.config), 5]):
        model(input_ids=torch.tensor([text]), use_cache=False)
        assert positions[-1].tolist() == [[list(range(len(text)))]] * 3


def image_tokens(config: PreTrainedConfig) -> list[int]:
    ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id", "image_token_index"))
    return [token for token in ids if isinstance(token, int)]


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


def test_without_a_small_copy_a_model_that_reads_images_is_refused(tmp_path: Path) -> None:
    """A causal language model is then checked as it is loaded."""
    config = default_config("step3p7")
    config.save_pretrained(tmp_path)
    with pytest.raises(SelfCheckError, match="no small copy of it can be made"):
        check_small_copy(config)
    assert "no small copy of it can be made" in check_architecture(Task(str(tmp_path), True, None)).problem


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
