"""Ranks of a layout's grid, the placement of models by an allocation, and the routing table of calls to model workers. Pure.

Training order is pipe, copy, data, context, tensor. The last axis varies fastest. With one copy of the weights and whole rows,
rank = (pipe * data_size + data) * tensor_size + tensor.
The head of a data-parallel replica is its rank with context 0 and tensor 0 on the last pipeline stage. The head stores and reports
the replica's results. The heads of the first model also receive trajectories.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.engines import DEFAULT_ENGINE, ENGINES, EngineTraits, traits_of
from asyncrl.config.modes import mode_of
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.axes import AXES, MATRICES, SAMPLES, Axis, ParallelGrid
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.mfc import ON_CPU
from asyncrl.protocol.names import ACTOR

Handler = Hashable

_DEVICES = re.compile(r"(\d+)(?:-(\d+))?")


class ProcessTopology:
    """A grid of ranks: named axes, the last one varying fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ValueError(f"axes {list(axes)} and sizes {list(dims)} do not form a grid")
        self.axes = tuple(axes)
        self.dims = tuple(dims)

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank at these coordinates. Each axis must have one."""
        if set(coordinates) != set(self.axes):
            raise ValueError(f"coordinates are {sorted(coordinates)}; give exactly {sorted(self.axes)}")
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
    """Training order: pipe, copy, data, context, tensor."""
    axes = sorted(grid.ranked, key=lambda entry: entry[0].order)
    return ProcessTopology([axis.name for axis, _ in axes], [size for _, size in axes])


@dataclass(frozen=True)
class ModelShardID:
    """One rank of a model, with its coordinates in the order of its layout's axes."""

    model: str
    coordinates: tuple[int, ...]
    axes: tuple[Axis, ...] = AXES

    def __str__(self) -> str:
        coordinates = zip(self.axes, self.coordinates, strict=True)
        return f"{self.model}:{''.join(f'{axis.letter}{at}' for axis, at in coordinates)}"


@dataclass(frozen=True)
class ModelPlacement:
    """Placement of a model that runs on model workers. workers[rank] is the model worker that holds this rank of the model. Ranks
    are in training order.

    name: the model's role. A second layout of a role has a name such as `actor@1`. An MFC without a model has one such as
    `advantages@cpu`.
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

    @functools.cached_property
    def shards(self) -> tuple[ModelShardID, ...]:
        """All ranks of the model, in training order."""
        axes = tuple(axis for axis, _ in self.grid.ranked)
        found = map(self.topology.get_coord, range(self.grid.size))
        return tuple(ModelShardID(self.name, tuple(at[axis.name] for axis in axes), axes) for at in found)

    def shard_of(self, worker: int) -> ModelShardID:
        """Return the rank of this model that the worker holds. Raises ValueError if it holds none."""
        return self.shards[self.workers.index(worker)]

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of workers whose coordinates differ along these axes only, in training order. Each worker is in one
        group."""
        found: dict[tuple[int, ...], list[int]] = {}
        for worker, shard in zip(self.workers, self.shards, strict=True):
            rest = zip(shard.axes, shard.coordinates, strict=True)
            found.setdefault(tuple(at for axis, at in rest if axis.name not in names), []).append(worker)
        return tuple(map(tuple, found.values()))

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each group that splits matrices."""
        return self.groups(*(axis.name for axis in self.grid.axes if axis.splits == MATRICES))

    def parts(self, what: str) -> tuple[tuple[int, ...], ...]:
        """Return the workers that have each part of the samples, layers or matrices."""
        return self.groups(*(axis.name for axis in self.grid.axes if axis.splits != what))

    def part_of(self, worker: int, what: str) -> int:
        """Return which part of the samples, layers or matrices the worker has. Raises ValueError if it holds no rank."""
        return [worker in part for part in self.parts(what)].index(True)

    @functools.cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each data-parallel replica. All of them need the replica's part of a batch."""
        return self.parts(SAMPLES)

    @functools.cached_property
    def heads(self) -> tuple[int, ...]:
        """For each replica, the worker that holds its outputs: the one with context 0 and tensor 0 on the last pipeline stage."""
        return tuple(
            worker
            for worker, shard in zip(self.workers, self.shards, strict=True)
            if all(
                axis.splits == SAMPLES or at == axis.head % size
                for (axis, size), at in zip(self.grid.ranked, shard.coordinates, strict=True)
            )
        )

    @classmethod
    def of(cls, model: ModelConfig) -> ModelPlacement:
        """Make the placement from its form in process configs (ModelConfig)."""
        return cls(model.name, ParallelGrid.parse(model.grid), tuple(model.workers))


_NO_SERVERS = ParallelGrid().with_parts({SAMPLES: 0})


@dataclass(frozen=True)
class DeviceRange:
    """Numbered devices first .. last, written `@first-last` or `@first` behind a grid."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def overlaps(self, other: DeviceRange) -> bool:
        return self.first <= other.last and other.first <= self.last

    @classmethod
    def split(cls, text: str) -> tuple[str, DeviceRange | None]:
        """Return the text in front of the `@` and the devices behind it; None: there is no `@`. Raises ValueError with the expected
        form."""
        rest, at, devices = text.partition("@")
        if not at:
            return text, None
        if (found := _DEVICES.fullmatch(devices)) is None or int(found[1]) > int(found[2] or found[1]):
            raise ValueError(f"{devices!r} in {text!r} does not name devices: write their numbers, such as @0-3 or @4")
        return rest, cls(int(found[1]), int(found[2] or found[1]))

    def __str__(self) -> str:
        return f"@{self.first}" if self.size == 1 else f"@{self.first}-{self.last}"


@dataclass(frozen=True)
class DeviceSet:
    """Model workers that several models share. Each grid uses the first grid.size of them, so the largest grid sets their number.

    grids: pairs (name of an MFC or of a role, grid). A single pair with the name "" stands for all MFCs without a grid of their
    own (in a set of other grids too, if sets were joined). devices: one for each worker; None: the launcher chooses them.
    """

    grids: tuple[tuple[str, ParallelGrid], ...]
    devices: DeviceRange | None = None

    def __post_init__(self) -> None:
        if len({grid.on_cpu for _, grid in self.grids}) > 1:
            raise ValueError(f"{self} mixes workers with and without GPUs: put the cpu grids after a + of their own")
        if self.on_cpu and (self.devices or not all(name for name, _ in self.grids)):
            raise ValueError(
                f"{self}: CPU workers have no model, so name an MFC and no devices, such as advantages:cpu2"
            )

    @property
    def size(self) -> int:
        return max(grid.size for _, grid in self.grids)

    @property
    def on_cpu(self) -> bool:
        return self.grids[0][1].on_cpu

    @classmethod
    def parse(cls, text: str) -> DeviceSet:
        """Parse `d2p1m1`, or `actor_train:d2p1m1,ref_inf:d1p1m1`; devices may follow, as in `d2p1m1@0-1`. Raises ValueError with
        the expected form."""
        text, devices = DeviceRange.split(text)
        if ":" not in text and "," not in text:
            return cls((("", ParallelGrid.parse(text)),), devices)
        grids: list[tuple[str, ParallelGrid]] = []
        for item in text.split(","):
            name, colon, grid = item.partition(":")
            if not colon or not name:
                raise ValueError(
                    f"{item!r} in {text!r} has no name: write name:grid, such as actor:d2p1m1,ref_inf:d1p1m1; a grid without a "
                    "name (for all MFCs that are not named) must be a separate set, after a +"
                )
            grids.append((name, ParallelGrid.parse(grid)))
        return cls(tuple(grids), devices)

    def __str__(self) -> str:
        named = ",".join(f"{name}:{grid}" for name, grid in self.grids if name)
        unnamed = [str(grid) for name, grid in self.grids if not name]
        return "+".join(f"{grids}{self.devices or ''}" for grids in [*unnamed, named] if grids)


def _joined(sets: Sequence[DeviceSet]) -> tuple[DeviceSet, ...]:
    """Make one set of those that name the same devices. Sets without devices stay as they are."""
    joined: dict[object, DeviceSet] = {}
    for number, part in enumerate(sets):
        place = part.devices or number
        grids = joined[place].grids if place in joined else ()
        joined[place] = DeviceSet(grids + part.grids, part.devices)
    return tuple(joined.values())


@dataclass(frozen=True)
class Allocation:
    """Devices of generation and of training: `<engine>.<generation grid>+<set>`, then more sets, each after a `+`.

    A set is a group of model workers. `d2p2m1` serves every MFC that no other set names. `name:grid,name:grid` serves the named
    MFCs, which share the set's workers; the name of a role stands for all MFCs of that role. `sglang.d4p1m1+d2p2m1+ref_inf:d1p1m1`
    has four workers for all models but the reference, and a fifth for the reference. MFCs of one role with the same grid on the
    same workers share one model; otherwise the role has several models. If no set is without names, an MFC that is not named runs
    where another MFC of its role runs, and an MFC of a role that is not named at all runs where the actor runs.

    Devices behind every grid, as in `sglang.d4p1m1@0-3+d2p2m1@0-3`, fix where the processes run. If generation and sets name the
    same devices, they share them: generation and training take turns. Sets that name the same devices are one set, so their models
    share its workers. Without numbers no devices are shared. ` until N` at the end: the allocation ends with step N (phases.py).
    """

    engine: str  # "": no generation servers
    generation: ParallelGrid
    training: tuple[DeviceSet, ...]
    generation_devices: DeviceRange | None = None
    until: int = 0  # last step; 0: that of the run

    @property
    def traits(self) -> EngineTraits:
        return traits_of(self.engine)

    @property
    def num_servers(self) -> int:
        """The number of generation servers. Each holds one whole replica, including all its pipe and tensor ranks."""
        return self.generation.num_replicas

    @property
    def num_model_workers(self) -> int:
        return sum(devices.size for devices in self.training)

    @property
    def shared_workers(self) -> tuple[int, ...]:
        """Model workers that share their devices with generation servers; empty: none does."""
        first = 0
        shared: list[int] = []
        for devices in self.training:
            if devices.devices and self.generation_devices and devices.devices.overlaps(self.generation_devices):
                shared += range(first, first + devices.size)
            first += devices.size
        return tuple(shared)

    def device_of_worker(self, index: int) -> int:
        """The number of a model worker's device. The allocation must name devices."""
        for devices in self.training:
            if index < devices.size and devices.devices is not None:
                return devices.devices.first + index
            index -= devices.size
        raise ValueError(f"{self} names no device for this model worker")

    @property
    def num_devices(self) -> int:
        """The least number of devices with which no two processes compute on one, unless they share it by name."""
        named = [devices for devices in (self.generation_devices, *(part.devices for part in self.training)) if devices]
        if named:
            return 1 + max(devices.last for devices in named)
        return self.num_generation_devices + self.num_training_devices

    @property
    def num_generation_devices(self) -> int:
        """The number of ranks of the generation servers that asyncrl starts."""
        return self.generation.size if self.traits.starts_servers else 0

    @property
    def num_training_devices(self) -> int:
        """The number of model workers that compute on a device each. CPU workers do not."""
        return sum(devices.size for devices in self.training if not devices.on_cpu)

    @property
    def names(self) -> tuple[str, ...]:
        """MFCs and roles that the allocation names."""
        return tuple(name for devices in self.training for name, _ in devices.grids if name)

    @classmethod
    def parse(cls, text: str) -> Allocation:
        """Parse an allocation. Raises ValueError that names the malformed part. Does not check that the named MFCs exist; `place`
        does."""
        whole, until, step = text.partition(" until ")
        if until and not step.strip().isdigit():
            raise ValueError(f"{step!r} in {text!r} is not a step: write its number, such as until 20")
        engine, dot, grids = whole.strip().partition(".")
        generation, plus, training = grids.partition("+")
        if not dot or not plus:
            raise ValueError(
                f"{text!r} is not an allocation; write <engine>.<generation>+<training>, such as {DEFAULT_ENGINE}.d2p1m1+d2p1m1"
            )
        if engine not in ENGINES:
            hint = did_you_mean(engine, ENGINES)
            raise ValueError(f"unknown generation engine {engine!r} in {text!r}; {hint}use one of {', '.join(ENGINES)}")
        sets = _joined([DeviceSet.parse(part) for part in training.split("+")])
        names = [name for devices in sets for name, _ in devices.grids]
        for name in dict.fromkeys(names):
            if names.count(name) > 1 and name:
                raise ValueError(f"{name!r} has {names.count(name)} grids in {text!r}: keep one")
            if names.count(name) > 1:
                raise ValueError(
                    f"{text!r} has {names.count(name)} grids without a name: one is for all MFCs that are not named; give the "
                    "other grids names, such as ref_inf:d1p1m1"
                )
        generation, devices = DeviceRange.split(generation)
        allocation = cls(engine, ParallelGrid.parse(generation), sets, devices, int(step or 0))
        allocation._check_devices(text)
        return allocation

    def _check_devices(self, text: str) -> None:
        """Raises ValueError unless every grid names as many devices as it needs, or none does, and sets overlap no other sets."""
        parts: list[tuple[ParallelGrid | DeviceSet, int, DeviceRange | None]] = [
            (self.generation, self.generation.size, self.generation_devices)
        ]
        parts += [(devices, devices.size, devices.devices) for devices in self.training if not devices.on_cpu]
        if len({devices is None for _, _, devices in parts}) > 1:
            raise ValueError(f"{text!r} names devices for some grids only: name them for every grid, or for none")
        for part, size, devices in parts:
            if devices is not None and devices.size != size:
                raise ValueError(f"{part} in {text!r} needs {size} devices; {devices} are {devices.size}")
        for part, other in itertools.combinations(self.training, 2):
            if part.devices and other.devices and part.devices.overlaps(other.devices):
                raise ValueError(
                    f"{part} and {other} in {text!r} overlap: models share all of their workers or none, so name the same devices "
                    "for both"
                )

    @classmethod
    def parse_training(cls, text: str) -> Allocation:
        """Parse the allocation of a run whose model workers generate (mode=sync): the sets alone, as in `d2p1m1`, or a whole
        allocation, whose generation servers are then ignored."""
        whole = cls.parse(text if "." in text else f"{DEFAULT_ENGINE}.d1p1m1+{text.removeprefix('+')}")
        return cls("", _NO_SERVERS, whole.training)

    def __str__(self) -> str:
        training = "+".join(map(str, self.training))
        generation = f"{self.engine}.{self.generation}{self.generation_devices or ''}+" if self.engine else ""
        return f"{generation}{training}{f' until {self.until}' if self.until else ''}"

    def place(self, graph: DataflowGraph) -> tuple[list[ModelPlacement], dict[str, str]]:
        """Return the models of training, with the actor's trained model first, and each MFC's model: MFC name -> model name. An MFC
        on CPU workers has a placement of its own, such as `advantages@cpu`, which holds no weights.

        Model workers are numbered from 0, set after set. A role with several models has `actor`, which is the trained one (or the
        first one defined), `actor@1` and so on. Raises ValueError with the remedy if the graph lacks one of the allocation's names,
        if a grid is used by no MFC, if the actor has no workers, or if two MFCs would train different models of a role.
        """
        spots = self._spots()
        for name in self.names:
            if name not in graph.mfcs and name not in graph.roles:
                raise ValueError(f"{name!r} {unknown_name(name, graph)}")
        named = _Named(spots, graph)
        spot_of = {name: named.spot(name) for name in graph.mfcs}
        for name in sorted(spots.keys() - named.used):
            whose = f"{name}:{spots[name].grid}" if name else str(spots[name].grid)
            raise ValueError(f"no MFC runs on {whose}: other grids name each of its MFCs; leave this grid out")
        models: list[ModelPlacement] = []
        model_of: dict[str, str] = {}
        for role in dict.fromkeys([ACTOR, *(mfc.role for mfc in graph.mfcs.values())]):
            found: dict[_Spot, str] = {}
            for name in named.of_role(role):
                spot = spot_of[name]
                if spot.grid.on_cpu:
                    if graph.mfcs[name].needs_weights or name not in spots:
                        raise ValueError(
                            f"{name} cannot run on {spot.grid}, which has no model; name MFCs that need none, such as advantages"
                        )
                    model_of[name] = f"{name}{ON_CPU}"
                    models.append(ModelPlacement(model_of[name], spot.grid, spot.workers))
                    continue
                if spot not in found:
                    found[spot] = f"{role}@{len(found)}" if found else role
                    models.append(ModelPlacement(found[spot], spot.grid, spot.workers))
                if graph.mfcs[name].kind == "train_step" and found[spot] != role:
                    trains = next(other for other, model in model_of.items() if model == role)
                    raise ValueError(
                        f"{name} and {trains} both train the {role}, on {spot} and {spot_of[trains]}; only one model of a role "
                        f"can be trained: name the role alone ({role}:{spot_of[trains].grid})"
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
    """A grid on grid.size consecutive model workers, starting at `first`."""

    grid: ParallelGrid
    first: int

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + self.grid.size))

    def __str__(self) -> str:
        return f"{self.grid} starting at model worker {self.first}"


class _Named:
    """Finds the spot of each MFC from the names in an allocation. used: the names of all spots that `spot` has returned so far."""

    def __init__(self, spots: Mapping[str, _Spot], graph: DataflowGraph) -> None:
        self.spots, self.graph = spots, graph
        self.used: set[str] = set()

    def of_role(self, role: str) -> list[str]:
        """Return the names of the MFCs of a role. Those that train the role's model come first."""
        mfcs = [mfc for mfc in self.graph.mfcs.values() if mfc.role == role]
        return [mfc.name for mfc in sorted(mfcs, key=lambda mfc: mfc.kind != "train_step")]

    def spot(self, mfc: str) -> _Spot:
        """Return the MFC's spot. In order of preference: the spot named after the MFC, after its role, the unnamed spot, the spot
        of another MFC of its role, the actor's spot."""
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
            f"the {ACTOR} has no workers: add a grid for all MFCs that are not named, such as +d1p1m1, or {ACTOR}:d1p1m1"
        )


def allocation_of(config: ExperimentConfig) -> Allocation:
    """Parse the config's allocation; with mode=sync it has no generation servers. Raises ValueError with the expected form."""
    parse = Allocation.parse_training if mode_of(config.mode).workers_generate else Allocation.parse
    return parse(config.allocation)


def unknown_name(name: str, graph: DataflowGraph) -> str:
    """A text for an error: no MFC or role of the graph has this name; then the names that exist."""
    mfcs, roles = tuple(graph.mfcs), graph.roles
    hint = did_you_mean(name, [*mfcs, *roles])
    return f"is neither an MFC nor a role of this run: {hint}MFCs: {', '.join(mfcs)}; roles: {', '.join(roles)}"


def build_handler_routing(models: Sequence[ModelPlacement]) -> dict[Handler, int]:
    """Return the table handler -> model worker. Handlers, the addresses of calls, are the shards of all models and the indexes of
    the workers. A call that concerns data goes to the indexes of the workers that hold it (StorageTracker)."""
    routing: dict[Handler, int] = {}
    for model in models:
        routing |= dict(zip(model.shards, model.workers, strict=True))
    return routing | {worker: worker for worker in sorted({*routing.values()})}
