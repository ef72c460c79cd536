"""Broken weights: the trainer reports them before it trains, and no server is asked to load them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, TrainConfig
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.model.engine import TrainEngine
from asyncrl.model.sharding import Skeleton, load_config, load_whole, open_weights
from asyncrl.model.shards import Box
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.worker import error_text
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import commit_version, list_versions, side_files, write_part
from tests.support.services import make_services

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
    """Replace each tensor with `key` in its name by make(tensor). If make returns None, the tensor is removed."""
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
            "its weights are broken: .*NaN",
        ),
    ],
    ids=["cut", "missing", "tensor missing", "other shape", "nan"],
)
def test_the_trainer_names_the_model_and_what_is_wrong(model: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    damage(model)
    with pytest.raises(ConfigError, match=f"(?s)^model_path='{model}': .*{reason}") as caught:
        TrainEngine(ModelConfig("actor", str(model), "d1", [0]), TrainConfig(batch_size=1))
    assert "Traceback" not in error_text(caught.value)


@pytest.mark.parametrize(
    "load",
    [
        lambda path, config: load_whole(path, "lm", config, torch.float32),
        lambda path, config: open_weights(
            path, skeleton := Skeleton.of(config, "lm", torch.float32), config, torch.float32
        )(skeleton.tied_name, Box.whole(skeleton.model.get_parameter(skeleton.tied_name).shape)),
    ],
    ids=["one rank", "several"],
)
def test_an_output_layer_that_is_not_the_embedding_is_refused(model: Path, load: Any) -> None:
    """transformers would use it on one rank, and the embedding in its place on several."""
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = load_config(model, "lm")
    with pytest.raises(ConfigError, match=f"^model_path='{model}': .*\"tie_word_embeddings\": false"):
        load(model, config)


def test_a_shard_that_is_missing_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}'
    )
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*model-00002-of-00002\.safetensors"):
        TrainEngine(ModelConfig("actor", str(model), "d1", [0]), TrainConfig(batch_size=1))


# ------------------------------------------------------------------------------------------------------------ published ones


class Published:
    """A manager's fleet without servers, and a record of the versions that passed its verification."""

    def __init__(
        self, tmp_path: Path, source: Path, verify_limit_s: float, replace_limit_s: float = 0.0, session: Any = None
    ) -> None:
        """session None: no server is contacted."""
        table = ServerTable("round_robin", dead_after_s=10.0)
        self.tmp_path, self.source = tmp_path, source
        self.verified: asyncio.Queue[WeightVersion] = asyncio.Queue()
        self.refused = asyncio.Event()
        logger = logging.getLogger(f"asyncrl.test.{id(self)}")
        logger.addFilter(lambda record: self.refused.set() or record.levelno >= logging.WARNING)  # type: ignore[func-returns-value]
        self.fleet = Fleet(
            table,
            UpdatePlan(table, update_fraction=1.0, update_timeout_s=1.0),
            make_services(logger=logger),
            session=session,
            path_of=self.path_of,
            probe_every_s=1.0,
            probe_limit_s=1.0,
            verify_limit_s=verify_limit_s,
            replace_limit_s=replace_limit_s,
        )
        publish = self.fleet.plan.publish

        def note(version: WeightVersion, num_bytes: int) -> bool:
            self.verified.put_nowait(version)
            return publish(version, num_bytes)

        self.fleet.plan.publish = note  # type: ignore[method-assign]

    def path_of(self, version: WeightVersion) -> Path:
        return self.tmp_path / str(version)

    def write(self, version: WeightVersion, *, rewrite: bool = False) -> Path:
        path = self.path_of(version)
        files = write_part(path, [("w", torch.ones(3))])
        commit_version(path, files, sides=side_files(self.source), version=version, replace=rewrite)
        return path


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
    with pytest.raises(
        RunEndedError,
        match=rf"weights {V1} cannot be served: .*{reason}.*Check the disk, and that all processes see the same files",
    ):
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


@pytest.mark.parametrize("replacement", [V1, V2])
async def test_a_damaged_version_is_reported_and_its_replacement_served(
    tmp_path: Path, sound: Path, caplog: pytest.LogCaptureFixture, replacement: WeightVersion
) -> None:
    """The manager waits for a replacement up to the trainer's limit (replace_limit_s), also after verify_limit_s is over."""
    published = Published(tmp_path, sound, verify_limit_s=0.3, replace_limit_s=1000.0)
    (published.write(V1) / "model.safetensors").write_bytes(b"torn")
    published.fleet.publish(str(V1))
    loop = asyncio.create_task(published.fleet.verify_loop())
    await asyncio.wait_for(published.fleet.news.wait(), LIMIT_S)
    assert published.fleet.damaged == V1
    await asyncio.sleep(0.5)
    assert not loop.done()
    published.write(replacement, rewrite=True)
    published.fleet.publish(str(replacement))
    assert await asyncio.wait_for(published.verified.get(), LIMIT_S) == replacement
    assert published.fleet.damaged is None
    assert f"weights {V1} are damaged on disk; the trainer is asked to replace them" in caplog.text
    replaced = f"weights {V1}, which were damaged on disk, are replaced by {V2}" in caplog.text
    assert replaced == (replacement == V2)
    loop.cancel()
    await asyncio.wait({loop})
    assert list_versions(tmp_path) == sorted({V1, replacement})
    assert not list(tmp_path.glob(".*"))  # noqa: ASYNC240 (nothing of the old folder is left)


@pytest.mark.parametrize("loop", ["verify_loop", "update_loop"])
async def test_a_loop_that_is_woken_in_the_turn_that_cancels_it_ends(tmp_path: Path, sound: Path, loop: str) -> None:
    """asyncio.wait_for of Python 3.11 loses the cancellation."""
    fleet = Published(tmp_path, sound, verify_limit_s=1000.0).fleet
    fleet.publish(str(V1))  # V1 does not exist on disk: verification is next tried after the next publication
    task = asyncio.create_task(getattr(fleet, loop)())
    await asyncio.sleep(0.1)
    fleet.publish(str(V2))
    fleet.announce("generation_server/0", "http://127.0.0.1:1")
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1.0)
    assert done, "it goes on"
    await fleet.close()


async def test_a_version_that_a_server_refuses_is_verified_again(tmp_path: Path, sound: Path) -> None:
    """A version may be damaged on disk after the manager has verified it."""
    session = open_session(max_connections=0)
    published = Published(tmp_path, sound, verify_limit_s=0.3, replace_limit_s=1000.0, session=session)
    path = published.write(V1)

    async def refuse(request: web.Request) -> web.Response:
        if request.path != "/update_weights_from_disk":
            return web.json_response({"success": True, "message": "", "model_path": "", "weight_version": ""})
        (path / "model.safetensors").write_bytes(b"torn")
        return web.json_response({"success": False, "message": "other checksum"}, status=400)

    app = web.Application()
    app.add_routes([web.route("*", "/{path}", refuse)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    published.fleet.publish(str(V1))
    published.fleet.announce("generation_server/0", f"http://127.0.0.1:{runner.addresses[0][1]}")
    loops = {asyncio.create_task(published.fleet.verify_loop()), asyncio.create_task(published.fleet.update_loop())}
    deadline = time.monotonic() + LIMIT_S
    while published.fleet.damaged != V1:
        assert time.monotonic() < deadline, "the damage was not seen"
        await asyncio.sleep(0.02)
    for loop in loops:
        loop.cancel()
    await asyncio.wait(loops)
    await published.fleet.close()
    await session.close()
    await runner.cleanup()
