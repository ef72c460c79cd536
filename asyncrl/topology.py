"""Ranks of pipe/data/tensor grids, names of model shards, and the table that routes calls to model workers. Pure.

Training order is pipe, data, tensor; the last varies fastest: rank = (pipe * data_size + data) * tensor_size + tensor.
The head of a data-parallel replica is its rank with tensor 0 on the last pipeline stage: it receives trajectories and replies.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

Handler = Hashable

_GRID = re.compile(r"(?:[dpm][1-9]\d*){1,3}")
# transformers: in the generation server's own process. sglang: a SGLang server that it starts and owns, m GPUs each.
# external: a SGLang server that somebody else runs, at one of generation.urls.
ENGINES = ("transformers", "sglang", "external")


@dataclass(frozen=True)
class ParallelGrid:
    """Sizes of a mesh: data, pipe and tensor (written m, for model parallel, as in `d2p1m1`)."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.pipe * self.tensor

    @classmethod
    def parse(cls, text: str) -> ParallelGrid:
        """`d2p1m1`, in any order, omitted sizes are 1. Raises ValueError saying what would fit."""
        if not _GRID.fullmatch(text):
            raise ValueError(
                f"{text!r} is not a grid such as d2p1m1 (d: data, p: pipe, m: tensor, each at most once, >= 1)"
            )
        sizes = re.findall(r"([dpm])(\d+)", text)
        if len({axis for axis, _ in sizes}) != len(sizes):
            raise ValueError(f"{text!r} names an axis twice; a grid is such as d2p1m1")
        given = {axis: int(size) for axis, size in sizes}
        return cls(data=given.get("d", 1), pipe=given.get("p", 1), tensor=given.get("m", 1))

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipe}m{self.tensor}"


@dataclass(frozen=True)
class Allocation:
    """`transformers.d2p1m1+d2p1m1`: the engine and grid of generation, then the grid of training."""

    engine: str
    generation: ParallelGrid
    training: ParallelGrid

    @property
    def num_servers(self) -> int:
        """A generation server holds one whole replica: its pipe and tensor ranks are inside it."""
        return self.generation.data

    @classmethod
    def parse(cls, text: str) -> Allocation:
        """Raises ValueError naming the part that does not fit."""
        engine, dot, grids = text.partition(".")
        generation, plus, training = grids.partition("+")
        if not dot or not plus:
            raise ValueError(
                f"{text!r} is not an allocation; write <engine>.<generation>+<training>, e.g. {ENGINES[0]}.d2p1m1+d2p1m1"
            )
        if engine not in ENGINES:
            raise ValueError(f"unknown generation engine {engine!r} in {text!r}; there are {', '.join(ENGINES)}")
        return cls(engine, ParallelGrid.parse(generation), ParallelGrid.parse(training))


class ProcessTopology:
    """A grid of ranks: named axes, the last one varying fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ValueError(f"axes {list(axes)} and sizes {list(dims)} make no grid")
        self.axes = tuple(axes)
        self.dims = tuple(dims)

    @property
    def size(self) -> int:
        size = 1
        for dim in self.dims:
            size *= dim
        return size

    def get_dim(self, axis: str) -> int:
        return self.dims[self.axes.index(axis)]

    def get_rank(self, **coordinates: int) -> int:
        """Rank of a full set of coordinates."""
        if set(coordinates) != set(self.axes):
            raise ValueError(f"coordinates {sorted(coordinates)} given, {sorted(self.axes)} needed")
        rank = 0
        for axis, dim in zip(self.axes, self.dims, strict=True):
            if not 0 <= coordinates[axis] < dim:
                raise ValueError(f"{axis}={coordinates[axis]} is outside 0..{dim - 1}")
            rank = rank * dim + coordinates[axis]
        return rank

    def get_coord(self, rank: int) -> dict[str, int]:
        """Inverse of get_rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside 0..{self.size - 1}")
        coordinates: dict[str, int] = {}
        for axis, dim in zip(reversed(self.axes), reversed(self.dims), strict=True):
            rank, coordinates[axis] = divmod(rank, dim)
        return {axis: coordinates[axis] for axis in self.axes}


def training_topology(grid: ParallelGrid) -> ProcessTopology:
    """Training order: pipe, data, tensor."""
    return ProcessTopology(("pipe", "data", "tensor"), (grid.pipe, grid.data, grid.tensor))


def inference_topology(grid: ParallelGrid) -> ProcessTopology:
    """Inference order: data, pipe, tensor."""
    return ProcessTopology(("data", "pipe", "tensor"), (grid.data, grid.pipe, grid.tensor))


@dataclass(frozen=True)
class ModelShardID:
    """One rank of one role's model."""

    role: str
    data: int
    pipe: int
    tensor: int

    @classmethod
    def from_rank(cls, role: str, topology: ProcessTopology, rank: int) -> ModelShardID:
        coordinates = topology.get_coord(rank)
        return cls(role, coordinates["data"], coordinates["pipe"], coordinates["tensor"])


def data_head(index: int) -> str:
    """Name by which the head of a data-parallel replica is called."""
    return f"__data{index}__"


def build_handler_routing(
    workers_of_role: Mapping[str, Sequence[int]], topology: ProcessTopology
) -> dict[Handler, int]:
    """Who answers to which name: every shard of every role, `__data{i}__` for the heads, and plain indexes.

    workers_of_role[role][rank] is the model worker that holds that rank. Heads are those of the first role.
    """
    routing: dict[Handler, int] = {}
    for role, workers in workers_of_role.items():
        if len(workers) != topology.size:
            raise ValueError(f"role {role!r} has {len(workers)} workers for {topology.size} ranks")
        for rank, worker in enumerate(workers):
            routing[ModelShardID.from_rank(role, topology, rank)] = worker
    first = next(iter(workers_of_role.values()))
    for index in range(topology.get_dim("data")):
        rank = topology.get_rank(pipe=topology.get_dim("pipe") - 1, data=index, tensor=0)
        routing[data_head(index)] = first[rank]
    for worker in sorted({worker for workers in workers_of_role.values() for worker in workers}):
        routing[worker] = worker
    return routing
