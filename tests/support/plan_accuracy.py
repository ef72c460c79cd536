"""Compares plans (asyncrl/plan) with real train steps, in processes connected by gloo.

Peaks are measured by the memory events of torch.profiler, payloads by wrappers of the process group's methods. Neither is part of
the code that predicts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import REF, CriticConfig, LoraConfig, PPOConfig, TrainConfig
from asyncrl.dataflow.axes import EXPERTS, LAYERS, ParallelGrid
from asyncrl.dataflow.graph import ADVANTAGES_MFC, training_mfcs
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.plan.batches import Load
from asyncrl.plan.ranks import ShardPlan, ShardTask, run_tasks
from asyncrl.plan.result import Collective, collective_name
from asyncrl.protocol.names import ACTOR
from tests.support.rank_processes import RankProcesses

IDLE_LIMIT_S = 30.0  # for the other threads to become idle after a collective
LIMIT_S = 300.0  # of the measurement of a case


@dataclass(frozen=True)
class Case:
    """One model in one layout, and the batch of each data rank."""

    model: str
    grid: str
    role: str  # actor | critic | ref
    checkpointing: bool | str
    minibatches: int
    micro_batches: int
    lengths: tuple[int, ...]  # of the sequences of a micro-batch: equal but for the last one, which may be shorter
    prefix: int = 0  # tokens that the sequences of a group share
    counts: tuple[int, ...] = ()  # sequences of each group
    lora: LoraConfig | None = None  # its base is the reference
    router_aux_loss_coef: float = 0.0

    def __str__(self) -> str:
        return f"{self.model} {self.grid} {self.role}{' checkpointing' if self.checkpointing else ''}"


class Found(msgspec.Struct, frozen=True):
    """One MFC on one stage: predicted, and measured. peak: of the rank of the stage with the largest one; collectives: of the first
    rank of the stage."""

    mfc: str
    stage: int
    predicted: int  # bytes
    measured: int
    predicted_traffic: dict[str, Collective]
    measured_traffic: dict[str, Collective]

    @property
    def error(self) -> float:
        """Of the peak. 0 for the MFC `advantages`, which computes on the host: a plan counts only its traffic."""
        if self.mfc == ADVANTAGES_MFC:
            return 0.0
        return self.predicted / self.measured - 1


def tasks_of(case: Case, path: Path) -> list[ShardTask]:
    """The tasks of the stages."""
    grid = ParallelGrid.parse(case.grid)
    train = TrainConfig(
        max_tokens_per_mb=sum(case.lengths) - case.prefix * (len(case.lengths) - len(case.counts)),
        gradient_checkpointing=case.checkpointing,
        ppo=PPOConfig(kl_coef=0.1, advantage_norm="batch", temperature=1.0),
        critic=CriticConfig(),
        lora=case.lora,
        router_aux_loss_coef=case.router_aux_loss_coef,
    )
    roles = [case.role, *([REF] if case.lora is not None and case.role == ACTOR else [])]
    mfcs = [mfc.placed(case.role) for mfc in training_mfcs(train) if mfc.role in roles]
    model = ModelConfig(
        case.role,
        str(path),
        str(grid),
        list(range(grid.size)),
        kind="value" if case.role == "critic" else "lm",
        trainable=case.role != "ref",
        lora=case.lora,
    )
    loads = {}
    for mfc in mfcs:
        minibatches = case.minibatches if mfc.kind == "train_step" else 1
        micro_batches = case.minibatches * case.micro_batches // minibatches
        loads[mfc.name] = Load(
            minibatches, micro_batches, list(case.lengths), prefix=case.prefix, counts=list(case.counts)
        )
    return [ShardTask(model, stage, mfcs, loads, train, "cpu") for stage in range(grid.num_stages)]


def compare(case: Case, path: Path, ranks: RankProcesses, *, rounds: int = 1) -> list[Found]:
    """path: folder of the case's model, with weights. rounds: measured runs of each MFC."""
    tasks = tasks_of(case, path)
    plans = run_tasks(tasks)
    measured = ranks.run(measure, msgspec.json.encode(tasks[0]), rounds, limit_s=LIMIT_S)
    placement = ModelPlacement.of(tasks[0].model)
    return [found for stage, plan in enumerate(plans) for found in _compare_stage(plan, stage, placement, measured)]


def _compare_stage(plan: ShardPlan, stage: int, placement: ModelPlacement, measured: Sequence[Any]) -> list[Found]:
    of_stage = [measured[rank] for rank in placement.parts(LAYERS)[stage]]
    return [
        Found(
            step.mfc,
            stage,
            step.peak,
            max(of_rank[step.mfc][0] for of_rank in of_stage),
            step.collectives,
            of_stage[0][step.mfc][1],
        )
        for step in plan.steps
    ]


# ---------------------------------------------------------------------------------------------------------------- measuring


def measure(rank: int, encoded: bytes, rounds: int) -> dict[str, tuple[int, dict[str, Collective]]]:
    """Run all MFCs of a task on this rank, once to make the optimizer's state and then `rounds` times. Returns the largest peak in
    bytes, and the collectives of the last run, of each MFC; {} for a rank outside the grid. Collective over the world."""
    import gc

    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from asyncrl.model.engine import TrainEngine, base_engine
    from asyncrl.model.interfaces import make_interface
    from asyncrl.model.mesh import ModelMesh
    from asyncrl.plan.shard import sample_of

    task = msgspec.json.decode(encoded, type=ShardTask)
    placement = ModelPlacement.of(task.model)
    mesh = ModelMesh.make(placement, "cpu") if placement.grid.size > 1 else None
    if rank >= placement.grid.size:
        return {}
    labels: dict[str, str] = {}
    if mesh is not None:
        labels = {str(group.group_name): mesh.label(names) for names, group in mesh.groups.items()}
    engine = TrainEngine(task.model, task.train, mesh=mesh)
    if placement.grid.parts(EXPERTS) > 1:
        _spread_tokens(engine.model)
    gc.collect()
    at_start = _bytes_of_storages(engine)
    traffic: dict[str, dict[str, Collective]] = {}
    from_numpy = torch.from_numpy
    # A device gets a copy of each array. On a CPU the tensor borrows the array, whose memory torch.profiler does not see
    copied = mock.patch.object(torch, "from_numpy", lambda array: from_numpy(array).clone())
    with copied, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for number in range(rounds + 1):
            gc.collect()
            for mfc in task.mfcs:
                load = task.loads[mfc.name]
                ppo = replace(task.train.ppo, minibatches=load.minibatches)
                critic = CriticConfig(minibatches=load.minibatches)
                interface = make_interface(MFCDef.of(mfc), replace(task.train, ppo=ppo, critic=critic))
                sample = sample_of(load, load.micro_batches, load.minibatches, mfc.input_keys)
                with record_function(f"{_SPAN}{number}:{mfc.name}"), _Payloads(labels) as payloads:
                    of_mfc = base_engine(engine) if mfc.role == REF and engine.adapters is not None else engine
                    interface.run(of_mfc, sample, batch_ids=sample.ids, step=interface.begin(0))
                traffic[mfc.name] = payloads.collectives
    peaks = _peaks(profiled.profiler.kineto_results.events(), at_start)
    return {
        mfc.name: (max(peaks[f"{_SPAN}{number}:{mfc.name}"] for number in range(1, rounds + 1)), traffic[mfc.name])
        for mfc in task.mfcs
    }


def _spread_tokens(model: Any) -> None:
    """Let routers choose the experts in turn, as a plan assumes: each has equally many tokens."""
    from asyncrl.architectures.routes import routers_of, scores_of

    def in_turn(router: Any, _: object, output: Any) -> Any:
        logits, scores, chosen = output
        import torch

        experts = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape) % logits.shape[-1]
        return logits, scores_of(router, logits, experts).to(scores.dtype), experts

    for router in routers_of(model, "")[1]:
        router.register_forward_hook(in_turn)


def _bytes_of_storages(engine: Any) -> int:
    from asyncrl.model.sharding import local_tensor

    tensors = [*map(local_tensor, engine.named_parameters().values()), *engine.module.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    whole: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return int(min(sum(storages.values()), whole))  # tensors of a model file share one storage


def _peaks(events: Sequence[Any], at_start: int) -> dict[str, int]:
    """The largest number of bytes in each span of _SPAN."""
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name().startswith(_SPAN)}
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks, total, at = dict.fromkeys(spans, 0), at_start, 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        while at < len(changes) and changes[at][0] < start:
            total += changes[at][1]
            at += 1
        peaks[name] = total
        while at < len(changes) and changes[at][0] <= end:
            total += changes[at][1]
            peaks[name] = max(peaks[name], total)
            at += 1
    return peaks


_SPAN = "plan_accuracy:"  # beginning of the names of the measured spans
_METHODS = {  # of a process group -> name in a plan; torch 2.11 has those that begin with _ in place of those with _single
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}


class _Payloads:
    """Counts the calls of the process groups' methods, and their payload: the larger one of output and input.

    Each collective completes before its call returns, as those of a plan do, and gloo's thread has dropped its tensors. So this
    thread frees them: torch.profiler does not see what other threads free. The handle of a send drops its tensor when it has been
    waited for, as NCCL's does.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        """labels: torch's name of a process group -> its name in a plan."""
        self._labels = labels

    def __enter__(self) -> _Payloads:
        from torch.distributed import ProcessGroup

        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._methods = {name: getattr(ProcessGroup, name) for name in _METHODS if hasattr(ProcessGroup, name)}
        for name, method in self._methods.items():
            setattr(ProcessGroup, name, self._counted(_METHODS[name], method))
        return self

    def __exit__(self, *_: object) -> None:
        from torch.distributed import ProcessGroup

        for name, method in self._methods.items():
            setattr(ProcessGroup, name, method)

    def _counted(self, name: str, method: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            label = collective_name(self._labels.get(group.group_name, ""), name)
            self._counts[label] += 1
            self._bytes[label] += max(map(_num_bytes, args[:2]))
            work = method(group, *args, **kwargs)
            if name in ("send", "recv"):
                return _Transfer(work)
            work.wait()
            _await_idle_threads()
            return work

        return call

    @property
    def collectives(self) -> dict[str, Collective]:
        return {name: Collective(self._counts[name], self._bytes[name]) for name in sorted(self._counts)}


class _Transfer:
    """Handle of a send or recv."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def _await_idle_threads() -> None:
    """Wait until no other thread of this process runs, or is ready to run: gloo's are done with the last collective."""
    limit = time.monotonic() + IDLE_LIMIT_S
    own = threading.get_native_id()
    while True:
        time.sleep(0.002)
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat") if int(path.parent.name) != own]
        if not any(stat.rpartition(")")[2].startswith(" R") for stat in stats):
            return
        if time.monotonic() > limit:
            raise TimeoutError(f"a thread still ran {IDLE_LIMIT_S:g} s after a collective")


def _num_bytes(argument: Any) -> int:
    if isinstance(argument, (list, tuple)):
        return sum(map(_num_bytes, argument))
    return argument.numel() * argument.element_size() if hasattr(argument, "numel") else 0
