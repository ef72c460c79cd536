"""Process groups of one rank: what NCCL, FSDP and update groups do on a GPU can be seen there, except the traffic."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.dataflow.axes import GRADIENTS, ParallelGrid
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.generation.receive import StagedReceiver
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.name_store import NameStore
from asyncrl.model.sharding import apply_data_parallel, load_config, local_tensor, shard_units
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import (
    BeginWeightUpdate,
    EndWeightUpdate,
    JoinUpdateGroup,
    ReceiveWeights,
    TensorSpecs,
)
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.weights.update_group import GroupMember, digest, serve_store
from tests.support.memory_names import MemoryNameResolver

from .bench import Bench, random_weights
from .sheet import Row

_HOST, _LIMIT_S = "127.0.0.1", 20.0
_LARGEST_DIFFERENCE = 0.05  # of the gradient: FSDP computes norms in bfloat16, autocast in float32


def world(bench: Bench) -> Iterator[Row]:
    """The ranks meet in name resolve, as in a run with authentication."""
    resolver = MemoryNameResolver(uuid.uuid4().hex)
    bench.found["store"] = store = NameStore(resolver, "one_gpu/store", lease=None, limit_s=_LIMIT_S)
    backend = "cpu:gloo,cuda:nccl" if bench.on_gpu else "cpu:gloo"

    def join() -> None:
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=_LIMIT_S))
        dist.all_reduce(torch.zeros(1, device=bench.device))

    yield Row("a world of one joins, and its first collective", bench.clock(join), "s")
    ones = torch.ones(bench.size(1 << 26, 1 << 8), device=bench.device)
    yield bench.timed("all_reduce of 256 MB among one rank", lambda: dist.all_reduce(ones), num_bytes=4 * len(ones))


def fsdp(bench: Bench) -> Iterator[Row]:
    """Four layers of Qwen3-0.6B on a mesh of one: gradients and time, beside the same model under autocast."""
    mesh = ModelMesh.make(ModelPlacement("actor", ParallelGrid.parse("d1"), (0,)), bench.device.type)
    assert mesh is not None
    path = bench.model_folder("0.6B", bench.size(4, 2))
    whole = random_weights(bench.device).load_whole(path, "lm", load_config(path, "lm"), torch.float32)
    sharded = copy.deepcopy(whole)
    for unit in shard_units(sharded):
        apply_data_parallel(unit, mesh.submesh(GRADIENTS), torch.bfloat16)
    apply_data_parallel(sharded, mesh.submesh(GRADIENTS), torch.bfloat16)
    ids = torch.randint(whole.config.vocab_size, (1, bench.size(4096, 32)), device=bench.device)
    seconds = {}
    for name, model, autocast in (("autocast", whole, True), ("FSDP", sharded, False)):
        seconds[name] = bench.seconds(partial(_forward_and_backward, model, ids, autocast=autocast))
    yield Row("forward and backward under FSDP", 1e3 * seconds["FSDP"], "ms", 1e3 * seconds["autocast"], "of autocast")
    for model, autocast in ((whole, True), (sharded, False)):
        model.zero_grad()
        _forward_and_backward(model, ids, autocast=autocast)
    expected, found = (_gradients(model) for model in (whole, sharded))
    gap = float((found - expected).norm() / expected.norm())
    note = "" if gap < _LARGEST_DIFFERENCE else "failed: more than rounding"
    yield Row("relative difference of the gradient", gap, note=note, anywhere=True)


def _forward_and_backward(model: Any, ids: Tensor, *, autocast: bool) -> None:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 0].mean().backward()


def _gradients(model: nn.Module) -> Tensor:
    """One after another, in the order of the names."""
    grads = [local_tensor(parameter.grad) for _, parameter in sorted(model.named_parameters())]
    return torch.cat([grad.flatten() for grad in grads])


# ----------------------------------------------------------------------------------------------------------- update groups


def update_group(bench: Bench) -> Iterator[Row]:
    """A sender alone: from pinned memory over the device, then abort, then another group."""
    flat = torch.ones(bench.size(1 << 28, 1 << 12), dtype=torch.uint8, pin_memory=bench.on_gpu)
    backend = "nccl" if bench.on_gpu else "gloo"
    with asyncio.Runner() as runner:
        for time in ("first", "second"):
            member = GroupMember(f"alone-{time}", backend)
            seconds = bench.clock(lambda member=member: runner.run(_join(member, 0, 1, bench.device)))
            yield Row(f"join a group of one, {time} time", seconds, "s")
            first, later = (bench.clock(lambda m=member: runner.run(m.broadcast(flat, _LIMIT_S))) for _ in range(2))
            yield Row(
                f"broadcast of 256 MB, {time} group", len(flat) / later / 1e9, "GB/s", 64.0, f"first {first:.2f} s"
            )
            member.leave()


async def _join(member: GroupMember, rank: int, size: int, device: torch.device, store: Any = None) -> None:
    there = store or serve_store(_HOST, _LIMIT_S)[0]
    await member.join(lambda: there, rank=rank, size=size, limit_s=_LIMIT_S, host=_HOST, device=device)


def staged_receiver(bench: Bench) -> Iterator[Row]:
    """A sender and a receiver whose model is on the device, over gloo, in one process."""
    values = torch.randn(bench.size(1 << 26, 1 << 10))
    bucket = {"names": ["weight"], "dtypes": ["float32"], "shapes": [list(values.shape)]}
    engine = AsyncMock(spec=TransformersEngine, weights_device=bench.device, uses=lambda flats: [False] * len(flats))
    version = str(WeightVersion(1, 0))

    async def update() -> float:
        sender, receiver = GroupMember("pair", "gloo"), StagedReceiver(engine, _HOST, SYSTEM_CLOCK)
        store, address = serve_store(_HOST, _LIMIT_S)
        host, _, port = address.rpartition(":")
        group = {"group_name": "pair", "backend": "gloo", "limit_s": _LIMIT_S}
        join = JoinUpdateGroup(master_address=host, master_port=int(port), rank_offset=1, world_size=2, **group)
        await asyncio.gather(receiver.join(join), _join(sender, 0, 2, torch.device("cpu"), store))
        flat = values.view(torch.uint8)
        message = ReceiveWeights(**bucket, group_name="pair", load_format="flattened_bucket", weight_version=version)
        began = SYSTEM_CLOCK.monotonic()
        await receiver.begin(BeginWeightUpdate(weight_version=version, specs=TensorSpecs(**bucket)))
        await asyncio.gather(receiver.receive(message), sender.broadcast(flat, _LIMIT_S))
        await receiver.end(EndWeightUpdate(xxh3=[digest(flat)]))
        bench.synchronize()
        seconds = SYSTEM_CLOCK.monotonic() - began
        sender.leave()
        await receiver.leave("pair")
        return seconds

    seconds = asyncio.run(update())
    (tensors, _), _ = engine.load_tensors.call_args
    if not torch.equal(tensors["weight"].cpu(), values):
        raise RuntimeError("the receiver has other values than the sender")
    yield Row("update over gloo to a model on the device", 4 * len(values) / seconds / 1e9, "GB/s")


MEASUREMENTS = (
    ("world", world),
    ("FSDP", fsdp),
    ("update group", update_group),
    ("staged receiver", staged_receiver),
)
