"""Weights that are broken: the trainer says so before anything is trained, and no server is told to load them."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config import ConfigError, ModelConfig, TrainConfig
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.messages import WeightVersion
from asyncrl.model.engine import TrainEngine
from asyncrl.runtime.worker import RunEndedError, told
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights import write_version

LIMIT_S = 30.0
V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=32, intermediate_size=64, num_layers=1)
    return path


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change(model: Path, key: str, make) -> None:  # type: ignore[no-untyped-def]
    """Replace the tensors whose name has `key` by make(tensor); None leaves them out."""
    tensors = load_file(model / "model.safetensors")
    made = {name: make(tensor) if key in name else tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in made.items() if tensor is not None}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "cannot be loaded: .*incomplete metadata.*; copy it again, or give another"),
        (lambda model: (model / "model.safetensors").unlink(), "cannot be loaded: .*no file named model.safetensors"),
        (
            lambda model: change(model, "down_proj", lambda _: None),
            "its weights lack .*down_proj.*of type 'qwen2' has; copy",
        ),
        (lambda model: change(model, "down_proj", lambda t: t[:8].contiguous()), "cannot be loaded: "),
        (
            lambda model: change(model, "", lambda t: torch.full_like(t, torch.nan)),
            "its weights are broken: .*no numbers",
        ),
    ],
    ids=["cut", "missing", "tensor missing", "other shape", "nan"],
)
def test_the_trainer_names_the_model_and_what_is_wrong(model: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    damage(model)
    with pytest.raises(ConfigError, match=f"(?s)^model_path='{model}': .*{reason}") as caught:
        TrainEngine(ModelConfig("actor", str(model), "d1", [0]), TrainConfig(batch_size=1))
    assert "Traceback" not in told(caught.value)


def test_a_shard_that_is_missing_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}'
    )
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*model-00002-of-00002\.safetensors"):
        TrainEngine(ModelConfig("actor", str(model), "d1", [0]), TrainConfig(batch_size=1))


# ------------------------------------------------------------------------------------------------------------ published ones


class Published:
    """A manager's fleet without servers, and what it takes for publishable."""

    def __init__(self, tmp_path: Path, source: Path, verify_limit_s: float) -> None:
        table = ServerTable("round_robin", dead_after_s=10.0, attempt=1)
        self.tmp_path, self.source = tmp_path, source
        self.verified: asyncio.Queue[WeightVersion] = asyncio.Queue()
        self.refused = asyncio.Event()
        logger = logging.getLogger(f"asyncrl.test.{id(self)}")
        logger.addFilter(lambda record: self.refused.set() or record.levelno == logging.ERROR)  # type: ignore[func-returns-value]
        self.fleet = Fleet(
            table,
            UpdatePlan(table, update_fraction=1.0, update_timeout_s=1.0),
            path_of=self.path_of,
            on_change=lambda: None,
            probe_every_s=1.0,
            probe_limit_s=1.0,
            verify_limit_s=verify_limit_s,
            logger=logger,
        )
        publish = self.fleet.plan.publish

        def note(version: WeightVersion) -> bool:
            self.verified.put_nowait(version)
            return publish(version)

        self.fleet.plan.publish = note  # type: ignore[method-assign]

    def path_of(self, version: WeightVersion) -> Path:
        return self.tmp_path / str(version)

    def write(self, version: WeightVersion) -> Path:
        write_version(self.path_of(version), [("w", torch.ones(3))], source_dir=self.source, version=version)
        return self.path_of(version)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda path: (path / "model.safetensors").write_bytes(b"torn"),
            r"model\.safetensors has 4 bytes, the manifest says",
        ),
        (lambda path: (path / "model.safetensors").unlink(), r"model\.safetensors is in the manifest but not on disk"),
        (
            lambda path: (path / "manifest.json").unlink(),
            r"has no manifest\.json: not a weight version, or it was pruned",
        ),
        (lambda path: (path / "manifest.json").write_text('{"kind": "delta"}'), r"manifest\.json cannot be read"),
    ],
    ids=["cut", "missing", "no manifest", "other manifest"],
)
async def test_no_server_hears_of_broken_weights_which_end_the_run_by_name(  # type: ignore[no-untyped-def]
    tmp_path: Path, sound: Path, caplog: pytest.LogCaptureFixture, damage, reason: str
) -> None:
    published = Published(tmp_path, sound, verify_limit_s=0.3)
    damage(published.write(V1))
    published.fleet.publish(str(V1))
    with pytest.raises(RunEndedError, match=rf"weights {V1} cannot be served: .*{reason}.*See that the disk is sound"):
        await asyncio.wait_for(published.fleet.verify_loop(), LIMIT_S)
    assert published.verified.empty()
    assert f"weights {V1} are not served: " in caplog.text  # from the first time on


async def test_broken_weights_are_passed_over_for_newer_ones(tmp_path: Path, sound: Path) -> None:
    published = Published(tmp_path, sound, verify_limit_s=1000.0)
    (published.write(V1) / "model.safetensors").write_bytes(b"torn")
    published.fleet.publish(str(V1))
    loop = asyncio.create_task(published.fleet.verify_loop())
    await asyncio.wait_for(published.refused.wait(), LIMIT_S)
    published.write(V2)
    published.fleet.publish(str(V2))
    assert await asyncio.wait_for(published.verified.get(), LIMIT_S) == V2
    loop.cancel()
    await asyncio.wait({loop})


async def test_a_version_that_shows_late_is_served(tmp_path: Path, sound: Path) -> None:
    published = Published(tmp_path, sound, verify_limit_s=1000.0)
    published.fleet.publish(str(V1))
    loop = asyncio.create_task(published.fleet.verify_loop())
    await asyncio.wait_for(published.refused.wait(), LIMIT_S)
    published.write(V1)
    assert await asyncio.wait_for(published.verified.get(), LIMIT_S) == V1
    loop.cancel()
    await asyncio.wait({loop})
