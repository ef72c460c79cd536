"""Ranks of pipe/data/tensor grids, where an allocation puts models, and the table that routes calls to model workers. Pure.

Training order is pipe, data, tensor; the last varies fastest: rank = (pipe * data_size + data) * tensor_size + tensor.
The head of a data-parallel replica is its rank with tensor 0 on the last pipeline stage: it receives trajectories and replies.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.schema import ExperimentConfig, ModelConfig
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.protocol.names import ACTOR

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


@functools.cache
def training_topology(grid: ParallelGrid) -> ProcessTopology:
    """Training order: pipe, data, tensor."""
    return ProcessTopology(("pipe", "data", "tensor"), (grid.pipe, grid.data, grid.tensor))


def inference_topology(grid: ParallelGrid) -> ProcessTopology:
    """Inference order: data, pipe, tensor. Generation servers get GPUs in this order: each has those of one data rank."""
    return ProcessTopology(("data", "pipe", "tensor"), (grid.data, grid.pipe, grid.tensor))


@dataclass(frozen=True)
class ModelShardID:
    """One rank of a model."""

    model: str
    data: int
    pipe: int
    tensor: int

    @classmethod
    def from_rank(cls, model: str, topology: ProcessTopology, rank: int) -> ModelShardID:
        coordinates = topology.get_coord(rank)
        return cls(model, coordinates["data"], coordinates["pipe"], coordinates["tensor"])


@dataclass(frozen=True)
class ModelPlacement:
    """Where a model of the training side is: workers[rank] is the model worker that holds that rank, in training order.

    name: its role; a second layout of a role is e.g. `actor@1`.
    """

    name: str
    grid: ParallelGrid
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.workers) != self.grid.size or len(set(self.workers)) != len(self.workers):
            raise ValueError(
                f"model {self.name!r} has the grid {self.grid} of {self.grid.size} ranks and the workers {list(self.workers)}: "
                "one worker a rank"
            )

    @property
    def role(self) -> str:
        return self.name.partition("@")[0]

    @property
    def topology(self) -> ProcessTopology:
        return training_topology(self.grid)

    def worker_of(self, *, data: int, pipe: int, tensor: int) -> int:
        return self.workers[self.topology.get_rank(data=data, pipe=pipe, tensor=tensor)]

    def shard_of(self, worker: int) -> ModelShardID:
        """Raises ValueError where the worker holds nothing of this model."""
        return ModelShardID.from_rank(self.name, self.topology, self.workers.index(worker))

    def replica(self, data: int) -> tuple[int, ...]:
        """Workers of a data-parallel replica: all that need its data."""
        coordinates = map(self.topology.get_coord, range(self.grid.size))
        return tuple(worker for worker, at in zip(self.workers, coordinates, strict=True) if at["data"] == data)

    def head(self, data: int) -> int:
        """The worker of a replica that has its outputs: tensor 0 of the last stage."""
        return self.worker_of(data=data, pipe=self.grid.pipe - 1, tensor=0)

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(self.head(data) for data in range(self.grid.data))

    @classmethod
    def of(cls, model: ModelConfig) -> ModelPlacement:
        """As the configs of processes hold it."""
        return cls(model.name, ParallelGrid.parse(model.grid), tuple(model.workers))


_NO_SERVERS = ParallelGrid(data=0)


@dataclass(frozen=True)
class DeviceSet:
    """Model workers that models share: each grid takes the first grid.size of them, so there are as many as the largest needs.

    grids: (name of an MFC or of a role, grid); the name "" alone: all MFCs that are named nowhere.
    """

    grids: tuple[tuple[str, ParallelGrid], ...]

    @property
    def size(self) -> int:
        return max(grid.size for _, grid in self.grids)

    @classmethod
    def parse(cls, text: str) -> DeviceSet:
        """`d2p1m1`, or `actor_train:d2p1m1,ref_inf:d1p1m1`. Raises ValueError saying what would fit."""
        if ":" not in text and "," not in text:
            return cls((("", ParallelGrid.parse(text)),))
        grids: list[tuple[str, ParallelGrid]] = []
        for item in text.split(","):
            name, colon, grid = item.partition(":")
            if not colon or not name:
                raise ValueError(
                    f"{item!r} in {text!r} has no name: write name:grid, such as actor:d2p1m1,ref_inf:d1p1m1; a grid without a "
                    "name (of all MFCs that are not named) is a set of its own, after a +"
                )
            grids.append((name, ParallelGrid.parse(grid)))
        return cls(tuple(grids))

    def __str__(self) -> str:
        return ",".join(f"{name}:{grid}" if name else str(grid) for name, grid in self.grids)


@dataclass(frozen=True)
class Allocation:
    """Devices of generation and of training: `<engine>.<generation grid>+<set>`, then more sets, each after a `+`.

    A set is some model workers: `d2p2m1` for every MFC that is not named in another, or `name:grid,name:grid` for the MFCs (or
    roles: all their MFCs) of these names, which share its workers. `sglang.d4p1m1+d2p2m1+ref_inf:d1p1m1` has four workers for
    all but the reference, which has a fifth. MFCs of one role in the same grid on the same workers share one model; otherwise the
    role has several. Without a set for the rest, an MFC goes with its role, and a role that is not named with the actor.
    """

    engine: str  # "": no generation servers
    generation: ParallelGrid
    training: tuple[DeviceSet, ...]

    @property
    def num_servers(self) -> int:
        """A generation server holds one whole replica: its pipe and tensor ranks are inside it."""
        return self.generation.data

    @property
    def num_model_workers(self) -> int:
        return sum(devices.size for devices in self.training)

    @property
    def names(self) -> tuple[str, ...]:
        """MFCs and roles that it names."""
        return tuple(name for devices in self.training for name, _ in devices.grids if name)

    @classmethod
    def parse(cls, text: str) -> Allocation:
        """Raises ValueError naming the part that does not fit. Whether there are such MFCs `place` finds out."""
        engine, dot, grids = text.partition(".")
        generation, plus, training = grids.partition("+")
        if not dot or not plus:
            raise ValueError(
                f"{text!r} is not an allocation; write <engine>.<generation>+<training>, e.g. {ENGINES[0]}.d2p1m1+d2p1m1"
            )
        if engine not in ENGINES:
            raise ValueError(f"unknown generation engine {engine!r} in {text!r}; there are {', '.join(ENGINES)}")
        sets = tuple(DeviceSet.parse(part) for part in training.split("+"))
        names = [name for devices in sets for name, _ in devices.grids]
        for name in dict.fromkeys(names):
            if names.count(name) > 1 and name:
                raise ValueError(f"{name!r} has {names.count(name)} grids in {text!r}: keep one")
            if names.count(name) > 1:
                raise ValueError(
                    f"{text!r} has {names.count(name)} grids without a name: one is for all MFCs that are not named, say of the "
                    "others whose they are, such as ref_inf:d1p1m1"
                )
        return cls(engine, ParallelGrid.parse(generation), sets)

    @classmethod
    def parse_training(cls, text: str) -> Allocation:
        """Of a run whose model workers generate (mode=sync): the sets alone, as in `d2p1m1`, or a whole allocation, whose
        generation servers are left out."""
        whole = cls.parse(text if "." in text else f"{ENGINES[0]}.d1p1m1+{text.removeprefix('+')}")
        return cls("", _NO_SERVERS, whole.training)

    def __str__(self) -> str:
        training = "+".join(map(str, self.training))
        return f"{self.engine}.{self.generation}+{training}" if self.engine else training

    def place(self, graph: DataflowGraph) -> tuple[list[ModelPlacement], dict[str, str]]:
        """The models of training, the trained one of the actor first; and of each MFC of the graph the name of its model.

        Model workers are numbered from 0 on, set after set. A role with several models has `actor`, which is trained (or defined
        first), `actor@1` and so on. Raises ValueError saying what would fit, where a name is none of the graph's, a grid is
        nobody's, the actor has no place, or two MFCs would train different models of a role.
        """
        spots = self._spots()
        for name in self.names:
            if name not in graph.mfcs and name not in graph.roles:
                raise ValueError(f"{name!r} {unknown_name(name, graph)}")
        named = _Named(spots, graph)
        spot_of = {name: named.spot(name) for name in graph.mfcs}
        for name in sorted(spots.keys() - named.used):
            whose = f"{name}:{spots[name].grid}" if name else str(spots[name].grid)
            raise ValueError(f"nothing runs on {whose}: each of its MFCs is named by itself; leave it out")
        models: list[ModelPlacement] = []
        model_of: dict[str, str] = {}
        for role in dict.fromkeys([ACTOR, *(mfc.role for mfc in graph.mfcs.values())]):
            found: dict[_Spot, str] = {}
            for name in named.of_role(role):
                spot = spot_of[name]
                if spot not in found:
                    found[spot] = f"{role}@{len(found)}" if found else role
                    models.append(ModelPlacement(found[spot], spot.grid, spot.workers))
                if graph.mfcs[name].kind == "train_step" and found[spot] != role:
                    trains = next(other for other, model in model_of.items() if model == role)
                    raise ValueError(
                        f"{name} and {trains} both train the {role}, on {spot} and {spot_of[trains]}; one model of a role is "
                        f"trained: name the role alone ({role}:{spot_of[trains].grid})"
                    )
                model_of[name] = found[spot]
        return models, model_of

    def _spots(self) -> dict[str, _Spot]:
        spots: dict[str, _Spot] = {}
        first = 0
        for devices in self.training:
            spots |= {name: _Spot(grid, first) for name, grid in devices.grids}
            first += devices.size
        return spots


@dataclass(frozen=True)
class _Spot:
    """A grid on the model workers from `first` on."""

    grid: ParallelGrid
    first: int

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + self.grid.size))

    def __str__(self) -> str:
        return f"{self.grid} from model worker {self.first} on"


class _Named:
    """Which spot an MFC has by what an allocation names. used: the names that decided."""

    def __init__(self, spots: Mapping[str, _Spot], graph: DataflowGraph) -> None:
        self.spots, self.graph = spots, graph
        self.used: set[str] = set()

    def of_role(self, role: str) -> list[str]:
        """MFCs of a role, those that train it first."""
        mfcs = [mfc for mfc in self.graph.mfcs.values() if mfc.role == role]
        return [mfc.name for mfc in sorted(mfcs, key=lambda mfc: mfc.kind != "train_step")]

    def spot(self, mfc: str) -> _Spot:
        """Of its own name, else of its role's, else of the rest, else of an MFC of its role, else of the actor."""
        role = self.graph.mfcs[mfc].role
        candidates = [mfc, role, "", *self.of_role(role)]
        if role != ACTOR:
            actor = self.of_role(ACTOR)
            candidates += [*actor[:1], ACTOR, *actor[1:]]
        for name in candidates:
            if name in self.spots:
                self.used.add(name)
                return self.spots[name]
        raise ValueError(
            f"the {ACTOR} has no place: add a grid for all MFCs that are not named, such as +d1p1m1, or {ACTOR}:d1p1m1"
        )


def allocation_of(config: ExperimentConfig) -> Allocation:
    """With mode=sync without generation servers. Raises ValueError saying what would fit."""
    return (
        Allocation.parse_training(config.allocation) if config.mode == "sync" else Allocation.parse(config.allocation)
    )


def unknown_name(name: str, graph: DataflowGraph) -> str:
    """That nothing in the graph is called so, and what is."""
    mfcs, roles = tuple(graph.mfcs), graph.roles
    nearest = difflib.get_close_matches(name, [*mfcs, *roles], n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"is neither an MFC nor a role of this run: {hint}MFCs: {', '.join(mfcs)}; roles: {', '.join(roles)}"


def data_head(index: int) -> str:
    """Name by which the head of a data-parallel replica is called."""
    return f"__data{index}__"


def build_handler_routing(models: Sequence[ModelPlacement]) -> dict[Handler, int]:
    """Who answers to which name: every shard of every model, `__data{i}__` for the heads of the first model, and plain indexes.

    The master calls shards and indexes. `__data{i}__` is for calls about data of one replica; trajectories themselves travel by
    push-pull, not by calls.
    No models: a recorder alone, which is head 0 (mode=rollout_only).
    """
    if not models:
        return {data_head(0): 0, 0: 0}
    routing: dict[Handler, int] = {}
    for model in models:
        routing |= {ModelShardID.from_rank(model.name, model.topology, rank): w for rank, w in enumerate(model.workers)}
    routing |= {data_head(index): worker for index, worker in enumerate(models[0].heads)}
    routing |= {worker: worker for worker in sorted({worker for model in models for worker in model.workers})}
    return routing
