"""Runs the training engine of one rank without weights, data or other ranks, and counts with a Tracker.

Parameters are fake tensors: they have shapes and dtypes. The engine and the interfaces are those of a model worker; the process
group is torch's fake one. Where values decide about shapes or control flow, `PlannedEngine` gives them.

The fake tensors are on the device `cpu`, because those of `cuda` cannot run backward without CUDA. kernels.plan_for chooses the
kernels of the planned device.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.attention import layers_of
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import REF, TrainConfig
from asyncrl.data.sequence import SequenceSample, is_words, spec_of
from asyncrl.dataflow.axes import LAYERS, ParallelGrid
from asyncrl.dataflow.graph import ADVANTAGES_MFC
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model import kernels
from asyncrl.model.engine import TrainEngine, base_engine
from asyncrl.model.interfaces import Interface, make_interface
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.sharding import Read, Skeleton, WeightSource, load_config, local_tensor, make_model
from asyncrl.model.shards import Box
from asyncrl.plan.batches import Load
from asyncrl.plan.counts import Cost, Moment, ShardCounts, StepCounts, extrapolated, plus
from asyncrl.plan.layers import set_layers
from asyncrl.plan.ranks import ShardPlan, ShardTask
from asyncrl.plan.result import KINDS, Collective, ModelStep, PlanError
from asyncrl.plan.tracker import GPU_ROUNDING, REST, Memory, Tracker
from asyncrl.protocol.model_flops import ModelFlops

# FakeTensorMode keeps the values of constants up to this size: the numbers of micro-batches, and the starts of sequences
_CONSTANT_ELEMENTS = 16_384
_TRAINED = ("loss_mask", "trained_mask", "value_mask", "advantages", "returns")  # keys with other values than 0
TRANSIT_BYTES = 256_000_000  # of export.take_share: in transit at one rank


def count_shard(task: ShardTask, num_layers: int = 0) -> ShardCounts:
    """Run one rank. Changes torch for the whole process: call it once, in a process of its own.

    num_layers: of the whole model; 0: as many as its config says.
    """
    torch.set_num_threads(1)
    kernels.plan_for(task.device_type)
    world = FakeWorld(task.device_type, num_layers)
    grid = ModelPlacement.of(task.model).grid
    mesh = world.mesh(grid, task.stage) if grid.size > 1 else None
    engine = PlannedEngine(world, task.model, task.train, mesh)
    memory = world.tracker.memory
    gc.collect()
    counts = ShardCounts(load_peak=memory.peak, loaded=memory.total, exported=_export_bytes(engine))
    planned = [_PlannedMFC(engine, MFCDef.of(mfc), task.train, task.loads[mfc.name]) for mfc in task.mfcs]
    for mfc in planned:
        mfc.make_state()
    counts.steps = {mfc.name: mfc.count() for mfc in planned}
    gc.collect()
    counts.resident = dict(+memory.now)
    return counts


def shard_plan(task: ShardTask, counts: ShardCounts, model_flops: ModelFlops) -> ShardPlan:
    return ShardPlan(
        steps=[_model_step(task, MFCDef.of(mfc), counts.steps[mfc.name], model_flops) for mfc in task.mfcs],
        load_peak=counts.load_peak,
        loaded=counts.loaded,
        resident=counts.resident,
        in_transit=min(TRANSIT_BYTES, counts.exported),
    )


def _model_step(task: ShardTask, mfc: MFCDef, counts: StepCounts, model_flops: ModelFlops) -> ModelStep:
    load, grid, cost = task.loads[mfc.name], ModelPlacement.of(task.model).grid, counts.cost
    computes = mfc.name != ADVANTAGES_MFC
    flops = 0
    if computes:
        trains = mfc.kind == "train_step"
        of_lengths, of_copies = (model_flops.of_batch(each, trains=trains) for each in (load.lengths, load.copies))
        flops = load.repeats * (of_lengths - of_copies)
    moments = counts.moments.values()
    name, fullest = max(counts.moments.items(), key=lambda entry: entry[1].peak)
    kinds = {kind: max(moment.kinds.get(kind, 0) for moment in moments) for kind in KINDS}
    return ModelStep(
        model=task.model.name,
        mfc=mfc.name,
        peak=fullest.peak,
        at_peak={kind: num_bytes for kind, num_bytes in fullest.at_peak.items() if num_bytes},
        kinds={kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes},
        flops=cost.flops,
        collectives={name: Collective(count, cost.bytes[name]) for name, count in sorted(cost.counts.items()) if count},
        model_flops=flops // grid.replica_size,
        tokens=load.tokens,
        shared=load.shared,
        moment=name,
    )


class FakeWorld:
    """Fake tensors, a fake process group, and the tracker that sees all operations on both."""

    def __init__(self, device_type: str, num_layers: int = 0) -> None:
        self._num_layers = num_layers
        self.tracker = Tracker(rounding=GPU_ROUNDING if device_type == "cuda" else 1)
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        fake_tensor.CONSTANT_NUMEL_LIMIT = _CONSTANT_ELEMENTS
        _patch_torch(self.tracker)

    def mesh(self, grid: ParallelGrid, stage: int) -> ModelMesh:
        """The mesh of the first rank of this stage. The world has the ranks of this grid only."""
        placement = ModelPlacement("planned", grid, tuple(range(grid.size)))
        rank = placement.parts(LAYERS)[stage][0]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
        mesh = ModelMesh.make(placement, "cpu")
        assert mesh is not None
        self.tracker.labels = {group.group_name: mesh.label(names) for names, group in mesh.groups.items()}
        return mesh

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """In this context all tensors are fake, and all operations counted."""
        with self._fakes, self.tracker, self.tracker.within("activations"):
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fake tensor that is not counted."""
        with self._fakes:
            return torch.empty(*shape, dtype=dtype)

    def weights(self) -> WeightSource:
        return WeightSource(self._load_whole, self._open, self._load_config, has_values=False)

    def _load_config(self, path: str | Path, kind: str) -> PreTrainedConfig:
        config = load_config(path, kind)
        if self._num_layers:
            set_layers(config, self._num_layers)
        return config

    def _load_whole(self, path: str | Path, kind: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        with self._fakes, self.tracker:
            return make_model(kind, config, dtype)

    def _open(self, path: str | Path, skeleton: Skeleton, config: PreTrainedConfig, dtype: torch.dtype) -> Read:
        def read(name: str, box: Box) -> Tensor:
            return self.empty(box.size, dtype)

        return read


def _patch_torch(tracker: Tracker) -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        tracker.resized(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    # Meshes use the values of tensors. fully_shard makes further ones
    for name in ("__init__", "_concatenate"):
        setattr(DeviceMesh, name, _without_fakes(DeviceMesh.__dict__[name]))


def _without_fakes(function: Any) -> Any:
    inner = function.__func__ if isinstance(function, staticmethod) else function

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return inner(*args, **kwargs)

    return staticmethod(call) if isinstance(function, staticmethod) else call


class PlannedEngine(TrainEngine):
    """An engine whose tensors have no values. It counts what each train step costs."""

    def __init__(self, world: FakeWorld, model: ModelConfig, train: TrainConfig, mesh: ModelMesh | None) -> None:
        self.world = world
        self.train_steps: list[Cost] = []  # of each optimizer step
        self.micro_batches = 0  # that the next calls are planned to have; 0: any number
        self._before_step = Cost()
        with world.tracker:
            super().__init__(model, train, mesh=mesh, weights=world.weights())
        tracker, parameters = world.tracker, list(self.named_parameters().values())
        tracker.reclassify(map(local_tensor, parameters), "parameters")
        tracker.on_reduced = self._name_gradients
        layers = layers_of(self.model)
        for number, layer in enumerate(layers):
            _mark_moments(layer, tracker.memory, is_first=number == 0, is_last=number == len(layers) - 1)
        for parameter in self.own_parameters().values() if self.trainable else ():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: tracker.reclassify([local_tensor(p.grad)], "gradients")
            )

    def _name_gradients(self) -> None:
        grads = (parameter.grad for parameter in self.named_parameters().values())
        self.world.tracker.reclassify((local_tensor(grad) for grad in grads if grad is not None), "gradients")

    def _values_of(self, tensor: Tensor, planned: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return planned

    def _set_up(self, *args: Any, **kwargs: Any) -> Any:
        work = super()._set_up(*args, **kwargs)
        if self.micro_batches not in (0, len(work.plan)):
            raise PlanError(
                f"its batches have {len(work.plan)} micro-batches in place of {self.micro_batches}; plan with "
                "train.share_prefix=off"
            )
        return work

    def _infer(self, *args: Any, **kwargs: Any) -> npt.NDArray[np.float32] | None:
        with self.world.computing():
            return super()._infer(*args, **kwargs)

    def accumulate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._before_step = plus(Cost(), self.world.tracker.cost)
        with self.world.computing():
            return super().accumulate(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.world.computing():
            result = super().step(*args, **kwargs)
        self.train_steps.append(plus(self.world.tracker.cost, self._before_step, -1))
        return result

    def all_reduce_sum(self, values: npt.NDArray[Any] | Sequence[float]) -> npt.NDArray[np.float64]:
        with self.world.tracker:
            return super().all_reduce_sum(values)

    def mean_over_ranks(self, value: float | None) -> float:
        with self.world.tracker:
            return super().mean_over_ranks(value)


def _mark_moments(layer: nn.Module, memory: Memory, *, is_first: bool, is_last: bool) -> None:
    """Tell forward and backward of the first, the last and the other layers apart. Recomputation belongs to backward."""
    place = "the first layer" if is_first else "the last layer" if is_last else "an inner layer"

    def on_gradient(tensor: object, moment: str) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: memory.enter(moment))  # type: ignore[no-untyped-call]

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        if not _in_backward():
            memory.enter(f"forward of {place}")
            if is_first:
                on_gradient(args[0], REST)

    def after(_: nn.Module, __: object, output: Any) -> None:
        if not _in_backward():
            on_gradient(output[0] if isinstance(output, tuple) else output, f"backward of {place}")
            if is_last:
                memory.enter("after the layers")

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _PlannedMFC:
    """One MFC. Its costs and its peaks follow from two runs.

    Costs are linear in the numbers of micro-batches and of minibatches. The peak of a train step is that of two micro-batches (with
    a pipeline: of one more than stages), which more do not exceed. Inference keeps the outputs of all micro-batches of the last
    stage, so the peak of each moment is linear.
    """

    def __init__(self, engine: PlannedEngine, mfc: MFCDef, train: TrainConfig, load: Load) -> None:
        self._engine, self._mfc, self._train, self._load = engine, mfc, train, load
        self._is_of_base = mfc.role == REF and engine.adapters is not None
        self.name = mfc.name
        self._trains, self._computes = mfc.kind == "train_step", mfc.name != ADVANTAGES_MFC
        most, stages = load.minibatches, engine.num_stages
        # (minibatches, micro-batches of each)
        if not load.full:
            self._first, self._second = (1, load.micro_batches), (min(2, most), load.micro_batches)
        elif self._trains:
            self._first, self._second = (min(2, most), stages), (1, stages + 1)
        else:  # the first micro-batch finds less memory in use than all later ones
            self._first, self._second = (1, 2), (1, 3)
        self._runs: list[tuple[Cost, Cost, dict[str, Moment]]] = []  # cost of a minibatch; other cost

    def make_state(self) -> None:
        """The first run of a train step makes the optimizer's state."""
        if self._trains:
            self._run(*self._first)

    def count(self) -> StepCounts:
        if not self._trains:
            self._run(*self._first)
        if self._second != self._first:
            self._run(*self._second)
        (first, first_rest, before), (second, second_rest, moments) = self._runs[0], self._runs[-1]
        load = self._load
        further = load.micro_batches - self._second[1] if load.full else 0
        if not self._trains:
            moments = extrapolated(before, moments, further)
        one = extrapolated(first, second, further)
        rest = second_rest
        if self._first[0] != self._second[0]:
            more = load.minibatches - self._second[0]
            difference = self._first[0] - self._second[0]  # 1 or -1 minibatches
            rest = plus(rest, plus(first_rest, second_rest, -1), more * difference)
        return StepCounts(plus(rest, one, load.minibatches), moments)

    def _run(self, minibatches: int, micro_batches: int) -> None:
        engine, tracker = self._engine, self._engine.world.tracker
        times = micro_batches if self._load.full else 1
        sample = sample_of(self._load, times, minibatches, self._mfc.input_keys)
        interface = _interface(self._mfc, self._train, minibatches)
        engine.train_steps.clear()
        engine.micro_batches = micro_batches if self._computes and self._load.full else 0
        gc.collect()
        tracker.memory.restart()
        before = plus(Cost(), tracker.cost)
        step = interface.begin(0)
        interface.run(base_engine(engine) if self._is_of_base else engine, sample, batch_ids=sample.ids, step=step)
        total = plus(tracker.cost, before, -1)
        if not engine.train_steps:
            self._runs.append((total, Cost(), tracker.memory.moments))
            return
        rest = total
        for cost in engine.train_steps:
            rest = plus(rest, cost, -1)
        self._runs.append((engine.train_steps[-1], rest, tracker.memory.moments))


def _interface(mfc: MFCDef, train: TrainConfig, minibatches: int) -> Interface:
    ppo = replace(train.ppo, epochs=1, minibatches=minibatches, temperature=train.ppo.temperature or 1.0)
    critic = replace(train.critic, minibatches=minibatches) if train.critic is not None else None
    return make_interface(mfc, replace(train, ppo=ppo, critic=critic, ptx=None))


def sample_of(load: Load, times: int, minibatches: int, keys: Sequence[str]) -> SequenceSample:
    """A sample with one group for each minibatch, of `times` as many sequences as the load has. Every token but the first of a
    sequence is trained and has a gradient. Sequences begin with the same tokens only if they share a prefix in the load."""
    groups = [{key: _values(key, load.lengths * times) for key in keys} for _ in range(minibatches)]
    for group in groups:
        ids, number = group["packed_input_ids"], 0
        for of_prefix, count in enumerate((load.counts or [1] * len(load.lengths)) * times):
            for sequence in ids[number : number + count]:
                sequence[: load.prefix], sequence[load.prefix :] = of_prefix, number
                number += 1
    return SequenceSample.from_groups([str(number) for number in range(len(groups))], groups)


def _values(key: str, lengths: Sequence[int]) -> Any:
    spec = spec_of(key)
    dtype, per_token = (spec.dtype, spec.layout == "token") if spec is not None else (np.dtype("float32"), True)
    if is_words(key):
        return "" if spec is not None and spec.layout == "prompt" else [""] * len(lengths)
    arrays = [np.zeros(length if per_token else 1, dtype) for length in lengths]
    for array in arrays if key in _TRAINED else ():
        array[1:] = 1
    return arrays if per_token else [array[0] for array in arrays]


def _export_bytes(engine: PlannedEngine) -> int:
    local = sum(local_tensor(tensor).numel() for tensor in engine.own_parameters().values())
    return 2 * local * (engine.dtype if engine.adapters is None else torch.float32).itemsize
