"""The main memory of a host, and what its processes read when they start (pure).

The parts of processes are those of the quick estimate (launch/checks/memory.py), with sizes from config.json. This file adds the
trajectories, and tells which host a process is on. Not counted: the page cache, and pinned memory that CUDA takes for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from asyncrl.config.engines import traits_of
from asyncrl.config.processes import GenerationServerConfig, ModelWorkerConfig
from asyncrl.config.schema import ExperimentConfig, max_head_offpolicyness
from asyncrl.data.sequence import KEY_SPECS
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.launch.checks.gpus import num_gpus
from asyncrl.launch.checks.memory import DTYPE_BYTES, ModelSize, estimate, sizes_of
from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.program import plan as plan_processes
from asyncrl.plan.batches import sequence_tokens
from asyncrl.plan.devices import GPUS_PER_HOST
from asyncrl.plan.shapes import ModelShape

# Keys that rollout workers send, and those that MFCs of PPO add
_KEYS = ["packed_input_ids", "packed_logprobs", "prompt_mask", "loss_mask", "versions"]
_KEYS += ["proximal_logprobs", "advantages", "trained_mask"]
_FILE_BYTES = DTYPE_BYTES["bfloat16"]  # of a parameter in the files of a checkpoint


class HostPlan(msgspec.Struct, frozen=True):
    """The host whose processes take the most main memory. Bytes."""

    num_hosts: int
    memory: int  # of all parts, as if its processes held them at the same time
    parts: dict[str, int]  # of it
    read: int  # of files, by all its processes together when the run starts
    read_by_process: int  # the most by one process


def plan_host(config: ExperimentConfig) -> HostPlan:
    """Plan the hosts of a run, of GPUS_PER_HOST GPUs each. config: without `auto`. Processes without a GPU are on the first host.
    Raises PlanError, or ConfigError if the processes cannot be planned."""
    gpus = [str(number) for number in range(num_gpus(config))]
    specs = plan_processes(
        replace(config, cluster="local"), attempt=1, num_prompts=config.train.batch_size, devices=gpus
    )
    sizes = sizes_of(specs, _size_of)
    hosts: dict[int, list[ProcessSpec]] = {}
    for spec in specs:
        first = spec.env.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        hosts.setdefault(int(first or 0) // GPUS_PER_HOST, []).append(spec)
    plans = [_plan_host(config, of_host, sizes, len(hosts)) for of_host in hosts.values()]
    return max(plans, key=lambda plan: plan.memory)


def _plan_host(
    config: ExperimentConfig, specs: Sequence[ProcessSpec], sizes: Mapping[str, ModelSize], num_hosts: int
) -> HostPlan:
    parts = Counter[str]()
    for part in estimate(specs, sizes):
        if not part.device:
            parts[part.what] += round(part.num_bytes)
    workers = [spec.config.worker for spec in specs if isinstance(spec.config, ModelWorkerConfig)]
    if workers:
        groups = (1 + max_head_offpolicyness(config)) * config.train.batch_size * len(workers) / workers[0].count
        longest = config.rollout.sampling.max_new_tokens
        of_token = sum(KEY_SPECS[key].dtype.itemsize for key in _KEYS)
        parts["trajectories"] = round(groups * config.rollout.group_size * sequence_tokens(config, longest) * of_token)
    read = [_read_by(spec, sizes) for spec in specs]
    return HostPlan(num_hosts, parts.total(), dict(parts), sum(read), max(read))


def _read_by(spec: ProcessSpec, sizes: Mapping[str, ModelSize]) -> int:
    """Bytes of model files that a process reads at its start. The ranks of a copy read its files once together."""
    config = spec.config
    read = 0
    if isinstance(config, ModelWorkerConfig):
        for model in config.models:
            if model.kind != "none" and not model.base_of and config.worker.index in model.workers:
                grid = ParallelGrid.parse(model.grid)
                read += sizes[model.path].num_parameters * grid.num_copies // grid.size
    elif isinstance(config, GenerationServerConfig) and traits_of(config.engine).starts_servers:
        read = sizes[config.model_path].num_parameters
    return read * _FILE_BYTES


def _size_of(path: str) -> ModelSize:
    shape = ModelShape.of(path)
    return ModelSize(shape.parameters, shape.kv_values_per_token(), shape.state_layers, shape.state)
