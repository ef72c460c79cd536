"""Engines in any layout for tests of weights. Each parameter is changed by random numbers that depend only on its name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model.engine import TrainEngine
from asyncrl.model.mesh import ModelMesh
from asyncrl.testing.tiny import ALPHABET, make_char_tokenizer, make_tiny_model


def placement(name: str, grid: str, workers: list[int] | None = None) -> ModelPlacement:
    parsed = ParallelGrid.parse(grid)
    return ModelPlacement(name, parsed, tuple(workers if workers is not None else range(parsed.size)))


def three_layers(folder: Path) -> str:
    """Make a tiny model with three layers and an odd number of words. Returns its path."""
    tokenizer = make_char_tokenizer(None, ALPHABET[:-1])
    make_tiny_model(folder, tokenizer=tokenizer, hidden_size=24, intermediate_size=54, num_layers=3)
    return str(folder)


def shard(
    path: str,
    mesh: ModelMesh | None,
    *,
    dtype: torch.dtype = torch.float32,
    change: float = 0.0,
    trainable: bool = True,
) -> TrainEngine:
    """The model of `path` in the layout of the mesh. `change` times a normal random number is added to each element; the numbers
    are the same in every layout. mesh None: unsharded."""
    name, grid, workers = ("whole", "d1p1m1", [0])
    if mesh is not None:
        name, grid, workers = mesh.placement.name, str(mesh.placement.grid), list(mesh.placement.workers)
    config = ModelConfig(name, path, grid, workers, trainable=trainable)
    engine = TrainEngine(config, TrainConfig(dtype=str(dtype).removeprefix("torch.")), mesh=mesh)
    with torch.no_grad():
        for tensor_name, parameter in engine.named_parameters().items():
            generator = torch.Generator().manual_seed(sum(tensor_name.encode()))
            noise: Tensor = change * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.add_(noise)
    return engine


def united(shares: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model, from the shares of all ranks. No tensor is in two of them."""
    whole: dict[str, Tensor] = {}
    for share in shares:
        assert not whole.keys() & share.keys()
        whole |= share
    return whole
