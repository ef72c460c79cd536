"""The plan of a whole run on one kind of GPU: memory of ranks and servers, time, and the processes that do not fit.

It combines the plan of the model workers (ranks.py), that of the servers (generation.py) and bounds of time (bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from asyncrl.config.engines import traits_of
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig, max_head_offpolicyness
from asyncrl.config.transports import forms_nccl_groups
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.placed_models import place
from asyncrl.dataflow.topology import Allocation, allocation_of
from asyncrl.launch.checks.gpus import needed_gpus, num_gpus
from asyncrl.launch.checks.memory import DTYPE_BYTES
from asyncrl.plan.bounds import Placed, Sharing, TimeBound, sharing_of, time_bound
from asyncrl.plan.devices import GPUS_PER_HOST, Device, library_bytes
from asyncrl.plan.generation import ServerPlan, plan_server
from asyncrl.plan.result import RankPlan
from asyncrl.plan.shapes import ModelShape

# (config without `auto`) -> the plans of its distinct model workers. Raises PlanError
RankPlanner = Callable[[ExperimentConfig], list[RankPlan]]

GIB = 1 << 30
_RECEIVED_BUCKETS = 2  # of other ranks, at the sender of a broadcast (model/held_weights.py)
TIGHT_SHARE = 0.9  # a process that needs more than this share of its GPU is reported: fragmentation is not counted


class Shortage(msgspec.Struct, frozen=True):
    """A process whose GPU has too little memory, or hardly enough."""

    process: str  # e.g. model_worker/0
    stands_for: list[str]  # all processes with the same plan
    needed: int  # bytes at least
    memory: int  # bytes of the GPU
    text: str

    @property
    def fails(self) -> bool:
        return self.needed > self.memory


class RunPlan(msgspec.Struct, frozen=True):
    """The plan of a run."""

    device: str
    memory: int  # bytes of each GPU
    allocation: str
    num_devices: int
    ranks: list[RankPlan]
    libraries: int  # bytes of each model worker beside its tensors
    server: ServerPlan | None
    time: TimeBound
    shortages: list[Shortage]
    sharing: Sharing | None = None  # of prompts in training; null: there is nothing to share

    @property
    def fits(self) -> bool:
        return not any(shortage.fails for shortage in self.shortages)

    @property
    def peak(self) -> int:
        """Bytes of the fullest GPU. GPUs of SGLang count only in a run without training, because its cache takes all that is
        free."""
        needed = [self.needed(rank) for rank in self.ranks]
        if self.server is not None and (not traits_of(self.server.engine).sizes_own_cache or not needed):
            needed.append(self.server.memory)
        return max(needed, default=0)

    def needed(self, rank: RankPlan) -> int:
        """Bytes of the rank's GPU: the largest of step, load and export, the buckets of a broadcast, and the libraries."""
        return max(rank.peak, rank.load_peak, rank.export_peak) + rank.broadcast + self.libraries


def plan_run(config: ExperimentConfig, device: Device, plan_ranks: RankPlanner, *, mean_response: int = 0) -> RunPlan:
    """Plan a run. config: without `auto`. mean_response: tokens, for the times; 0: the maximum. Memory is always that of the
    longest responses. Raises PlanError, and ValueError for an invalid allocation."""
    allocation = allocation_of(config)
    shape = ModelShape.of(config.model_path)
    server = plan_server(config, shape, device)
    ranks = list(_with_buckets(config, plan_ranks(config), shape)) if mode_of(config.mode).trains else []
    shared = bool(allocation.shared_workers)
    # On shared devices the server's process keeps its context during training's turn
    libraries = library_bytes(communicates=allocation.num_training_devices > 1) * (2 if shared else 1)
    in_turns = shared or max_head_offpolicyness(config) == 0
    placed = placed_models(config, allocation)
    plan = RunPlan(
        device=device.name,
        memory=device.memory,
        allocation=str(allocation),
        num_devices=num_gpus(config),
        ranks=ranks,
        libraries=libraries,
        server=server,
        time=time_bound(config, ranks, placed, shape, server, device, in_turns=in_turns, mean_response=mean_response),
        shortages=[],
        sharing=sharing_of(config, shape, mean_response) if ranks else None,
    )
    return msgspec.structs.replace(plan, shortages=list(_shortages(plan)))


def _with_buckets(config: ExperimentConfig, ranks: Sequence[RankPlan], shape: ModelShape) -> Iterator[RankPlan]:
    """Count the buckets of a broadcast over NCCL. Every rank of the actor copies its own buckets to its GPU, one after another.
    The first rank sends them to the servers, so it is planned apart from its like; it also receives those of other ranks."""
    weights = config.weights
    if not mode_of(config.mode).updates_servers or not forms_nccl_groups(
        weights.transport, weights.broadcast_backend, on_gpu=True
    ):
        yield from ranks
        return
    value = DTYPE_BYTES[config.train.dtype]
    # A tensor that is larger than a bucket has one of its own
    bucket = min(max(weights.bucket_bytes, shape.largest_tensor * value), shape.parameters * value)
    placements, _ = allocation_of(config).place(build_dataflow(config.train, config.mode))
    sender, *others = placements[0].workers
    for rank in ranks:
        rest = [worker for worker in rank.stands_for if worker != sender]
        if len(rest) < len(rank.stands_for):
            held = bucket * (1 + _RECEIVED_BUCKETS * bool(others))
            yield msgspec.structs.replace(rank, worker=sender, stands_for=[sender], broadcast=held)
        if rest:
            held = bucket * (rest[0] in others)
            yield msgspec.structs.replace(rank, worker=rest[0], stands_for=rest, broadcast=held)


def placed_models(config: ExperimentConfig, allocation: Allocation) -> dict[str, Placed]:
    """The grid and the hosts of each model of training, by name. The GPUs of the servers come before those of training, unless
    the allocation names them."""
    if not mode_of(config.mode).trains:
        return {}
    first, named = needed_gpus(config)[0], allocation.generation_devices is not None
    placements, _ = place(allocation, build_dataflow(config.train, config.mode))
    placed = {}
    for placement in placements:
        if placement.grid.on_cpu:
            continue
        gpus = [allocation.device_of_worker(worker) if named else first + worker for worker in placement.workers]
        num_hosts = len({gpu // GPUS_PER_HOST for gpu in gpus})
        placed[placement.name] = Placed(placement.grid, num_hosts)
    return placed


def parts_text(sizes: Sequence[tuple[str, int]]) -> str:
    """Sizes for people, the largest first; parts below 50 MiB are left out."""
    shown = sorted(sizes, key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in shown if size >= GIB // 20) or "less than 0.1 GiB"


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _shortages(plan: RunPlan) -> Iterator[Shortage]:
    for rank in plan.ranks:
        needed = plan.needed(rank)
        if needed > TIGHT_SHARE * plan.memory:
            moment, parts = _fullest(rank)
            text = (
                f"{parts_text([*parts.items(), ('libraries', plan.libraries), ('broadcast', rank.broadcast)])} {moment}"
            )
            names = [f"model_worker/{worker}" for worker in rank.stands_for]
            yield Shortage(f"model_worker/{rank.worker}", names, needed, plan.memory, text)
    server = plan.server
    if server is None:
        return
    takes_all = traits_of(server.engine).sizes_own_cache
    limit = plan.memory if takes_all else TIGHT_SHARE * plan.memory
    if server.memory > limit:
        names = [f"generation_server/{index}" for index in range(server.count)]
        beside = "reserve" if takes_all else "libraries"
        parts = {"weights": server.weights, "KV cache": server.cache}
        parts["received weights"] = server.received
        parts["adapters"] = server.adapters
        parts["states"] = server.states
        parts[beside] = server.memory - sum(parts.values())
        yield Shortage(names[0], names, server.memory, plan.memory, parts_text(list(parts.items())))


def _fullest(rank: RankPlan) -> tuple[str, dict[str, int]]:
    """The moment at which a rank needs most, and the parts of it."""
    step = f"in {rank.peak_in}" if rank.peak_in else "between MFCs"
    moments = {
        step: rank.peak,
        "while the models are loaded": rank.load_peak,
        "while the weights are exported": rank.export_peak,
    }
    moment = max(moments, key=lambda name: moments[name])
    return moment, rank.at_peak if moment == step else {"tensors": moments[moment]}
