"""Weights of a model in another worker group, fetched over HTTP from the memory of the trainer's ranks: bit for bit those that the
model would have inside the trainer group, in any two layouts."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path

import pytest
import torch
from sharded_models import placement, shard, three_layers, united

from asyncrl.config.processes import ModelConfig, WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.model import checkpoint, kept_weights
from asyncrl.model.compute import Compute
from asyncrl.model.export import take_share
from asyncrl.model.kept_weights import KeptWeights, KeptWeightsFetcher
from asyncrl.model.mesh import ModelMesh
from asyncrl.protocol.calls import FetchWeights, KeepWeights
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import listen_routes
from tests.support.rank_processes import RankProcesses

LIMIT_S = 100.0


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(4, limit_s=LIMIT_S) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return three_layers(tmp_path_factory.mktemp("model"))


def wait_for(path: Path) -> str:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)
    return path.read_text()


def write(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def pass_on(rank: int, path: str, source: str, target: str, share: float, dtype: torch.dtype, folder: str) -> dict:
    """Keep on the source's ranks 0, 1 and fetch on the target's ranks 2, 3: after two changes of the source, and after a checkpoint
    that new ranks load. Returns this rank's share of the target."""
    sizes = placement("s", source).grid.size, placement("t", target).grid.size
    workers = list(range(sizes[0])), list(range(2, 2 + sizes[1]))
    mesh, target_mesh = (
        ModelMesh.make(placement(*at), "cpu") for at in (("actor", source, workers[0]), ("ref", target, workers[1]))
    )
    shared = Path(folder)
    if mesh is not None:
        engine = shard(path, mesh, dtype=dtype, change=0.1)
        models = {"ref": ModelConfig("ref", path, target, workers[1])}
        kept = KeptWeights(models)
        for version in (1, 2):
            kept.keep(KeepWeights(source="actor", target="ref", weight_version=str(version), share=share), engine, None)
            with torch.no_grad():
                for parameter in engine.named_parameters().values():
                    parameter.mul_(1.5)  # the next step of training: it must not change what is kept
        part = checkpoint.snapshot({"actor": engine})
        kept.add_to(part)
        files = checkpoint.write(shared / "c", part, fsync=False)
        write(shared / f"files{rank}", "")
        torch.save(files, shared / f"list{rank}")
        asyncio.run(serve(kept, shared / f"url{rank}", [shared / f"one{worker}" for worker in workers[1]]))
        # A new attempt: nothing is kept but what the checkpoint has
        if rank == 0:
            for worker in workers[0]:
                wait_for(shared / f"files{worker}")
            every = [file for worker in workers[0] for file in torch.load(shared / f"list{worker}", weights_only=False)]
            checkpoint.commit(shared / "c", every, fsync=False)
            write(shared / "committed", "")
        wait_for(shared / "committed")
        again = KeptWeights(models)
        body = KeepWeights(source="actor", target="ref", weight_version="2", checkpoint="c")
        assert again.keep(body, engine, shared / "c") == kept.kept["ref"].num_bytes
        asyncio.run(serve(again, shared / f"again{rank}", [shared / f"two{worker}" for worker in workers[1]]))
    if target_mesh is None:
        return {}
    found = []
    for name, done in (("url", "one"), ("again", "two")):
        model = shard(path, target_mesh, dtype=dtype, trainable=False)
        urls = {worker: wait_for(shared / f"{name}{worker}") for worker in workers[0]}
        body = FetchWeights(model="ref", weight_version="2", sources=workers[0])
        asyncio.run(fetch(urls, body, model))
        write(shared / f"{done}{rank}", "")
        found.append(take_share(model))
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
    return found[0]


async def serve(kept: KeptWeights, url_file: Path, until: list[Path]) -> None:
    async with listen_routes(kept.route(), host="127.0.0.1") as url:
        write(url_file, url)
        for path in until:
            await asyncio.to_thread(wait_for, path)


async def fetch(urls: dict[int, str], body: FetchWeights, engine) -> int:
    async def url_of(worker: int, incarnation: int) -> str:
        return urls[worker]

    info = WorkerInfo("model_worker", 0, 1, "e", "t", 1, "/nowhere", 1, NameResolveConfig(), RuntimeConfig())
    board = StatusBoard(info, logging.getLogger(uuid.uuid4().hex))
    compute = Compute("me", board, limit_s=LIMIT_S)
    kept_weights.BUCKET_BYTES = 3000  # many answers
    async with open_session(max_connections=8) as session:
        num_bytes = await KeptWeightsFetcher(session, url_of, compute, board).fetch(body, engine)
    compute.close()
    return num_bytes


@pytest.mark.parametrize(
    ("source", "target", "share", "dtype"),
    [
        ("d1", "d2", 1.0, torch.bfloat16),
        ("d2", "m2", 1.0, torch.bfloat16),
        ("m2", "p2", 1.0, torch.float32),
        ("p2", "d1", 1.0, torch.bfloat16),
        ("d1", "p2", 0.25, torch.float32),
        ("d2", "d1", 0.25, torch.bfloat16),
        ("m2", "d2", 0.25, torch.bfloat16),
        ("p2", "m2", 0.25, torch.bfloat16),
    ],
)
def test_a_model_elsewhere_has_the_bits_that_it_would_have_in_the_trainer_group(
    ranks, model_path, tmp_path, source, target, share, dtype
):
    shares = ranks.run(pass_on, model_path, source, target, share, dtype, str(tmp_path))
    found = united(shares)
    ours = {name: tensor.detach() for name, tensor in shard(model_path, None, change=0.1).named_parameters().items()}
    wanted = {
        name: tensor.detach().to(dtype)
        for name, tensor in shard(model_path, None, trainable=False).named_parameters().items()
    }
    for factor in (1.0, 1.5):  # the arithmetic of model/reallocate.py
        for name, tensor in ours.items():
            new = tensor * factor
            mean = share * new.float() + (1.0 - share) * wanted[name].float() if share < 1.0 else new
            wanted[name] = mean.to(dtype)
    assert set(found) == set(wanted)
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []
    assert {tensor.dtype for tensor in found.values()} == {dtype}
