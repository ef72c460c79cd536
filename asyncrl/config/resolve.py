"""Resolves a config (pure): from what the user wrote to what the processes of a run get.

`resolve` applies STEPS in their order. Each gives one group of derived values: a step is the only place that decides them. A step
changes nothing while a fact that it needs is not known. Resolving a resolved config again changes nothing.

run: its result is config.yaml in the run's folder, and the source of the processes' configs (launch/program.py).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from asyncrl.config.engines import ENGINES, EngineTraits
from asyncrl.config.fields import with_leaves
from asyncrl.config.limits import rule_of
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import AUTO, SLOW_BYTES_PER_S, ExperimentConfig, NameResolveConfig, TaskAlgorithmConfig

T = TypeVar("T")

_PATIENT = {  # limits of waits for a process that the user starts
    "runtime.start_timeout_s",
    "manager.lease_s",
    "manager.update_timeout_s",
    "manager.overdue_wait_s",
    "rollout.reward_timeout_s",
    "rollout.request_timeout_s",
    "rollout.rollout_timeout_s",
    "train.call_timeout_s",
    "train.data_timeout_s",
}
_PATIENT_OF_TASKS = ("reward_timeout_s", "rollout_timeout_s")
# By the kind of file (limits.Rule): the ends of texts that name a file; other texts name none
_SUFFIXES: dict[str, str | tuple[str, ...]] = {"code": ".py", "data": (".jsonl", ".parquet")}
_SPARE_S = 60.0  # margin between the limit of the last checkpoint and a job's time limit
_CHUNK_TOKENS = 1024
_LOGPROB_CHUNK_TOKENS = {False: 1024, True: 8192}  # key: whether the device is a GPU
_SENDS_OF_A_RESPONSE = 4
# Base of the limits of loading and starting. In its first start SGLang compiles kernels, and it captures CUDA graphs in each
_START_S, _START_OF_PROGRAM_S = 120.0, 600.0
# Assumed speed of one response on a full server. It is low, because a request's time includes its wait in the queue
_SLOWEST_TOKENS_PER_S = 16


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from."""

    step: int
    num_done: int  # prompts that are trained or rejected, summed over all epochs
    batch_size: int


@dataclass(frozen=True)
class Facts:
    """What a config depends on besides itself. The defaults: not known yet."""

    on_gpu: bool | None = None  # whether the run's machines have GPUs
    num_prompts: int | None = None  # as counted by preflight
    model_bytes: int | None = None  # of the files of all models
    resumed: Resumed | None = None
    host: str = ""  # address that the sockets of this host bind; "": that of the config
    socket_dir: str = ""  # folder of the Unix sockets; "": there are none
    name_resolve: NameResolveConfig | None = None  # the etcd that the launcher has started or connected to


def resolve(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Return the config with every `auto`, every path and every derived value resolved, as far as the facts are known. Values that
    the user has written stay."""
    for step in STEPS:
        config = step(config, facts)
    return config


def total_steps(config: ExperimentConfig, num_prompts: int) -> int:
    """Return the number of train steps (mode=rollout_only: of batches) of the complete run if no prompt is rejected.
    mode=train_only: the number of the last step, because the steps are numbered from replay.first_step."""
    epochs, first = (1, config.replay.first_step) if mode_of(config.mode).replays else (config.train.num_epochs, 0)
    by_epochs = first + math.ceil(num_prompts * epochs / config.train.batch_size)
    return min(by_epochs, config.train.max_steps) if config.train.max_steps else by_epochs


def is_exact(config: ExperimentConfig) -> bool:
    """Whether servers and trainer of a resolved config compute in float32, without TF32."""
    return config.train.dtype == config.generation.dtype == "float32" and not config.train.tf32


# -------------------------------------------------------------------------------------------------------------- steps


def with_absolute_paths(config: T, _: Facts | None = None) -> T:
    """Return a config or a section with absolute paths, so that it works from any folder. Modules in it are still imported from the
    current folder."""
    return with_leaves(config, lambda _, value, entry: _absolute(value, rule_of(entry).file))


def _place(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Where the processes listen, and how they find each other."""
    return replace(
        config,
        runtime=replace(config.runtime, host=facts.host or config.runtime.host),
        network=replace(config.network, socket_dir=facts.socket_dir or config.network.socket_dir),
        name_resolve=facts.name_resolve or config.name_resolve,
    )


def _limits(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Time limits of loading and starting. Each rank and each server reads all bytes of its model, and the processes of a host
    share its disk and its cores."""
    if facts.model_bytes is None:
        return config
    engine = ENGINES.get(config.allocation.partition(".")[0], EngineTraits())
    limit_s = _START_OF_PROGRAM_S if engine.program is not None else _START_S
    limit_s += round(facts.model_bytes / SLOW_BYTES_PER_S)
    generation, runtime = config.generation, config.runtime
    load_s = _chosen(generation.load_timeout_s, limit_s)
    # A server starts within a run's start
    start_s = _chosen(runtime.start_timeout_s, max(limit_s, float(load_s)))
    return replace(
        config,
        generation=replace(generation, load_timeout_s=load_s),
        runtime=replace(runtime, start_timeout_s=start_s),
    )


def _patient(config: ExperimentConfig, _: Facts) -> ExperimentConfig:
    """If the user starts a process by hand (debug.leave_out), raise some time limits to at least debug.wait_s. The user's process
    may start late, or stop in a debugger, and the other processes must not give up waiting for it."""
    if not config.debug.leave_out:
        return config
    wait_s = config.debug.wait_s
    of_tasks = {f"rollout.tasks.{name}.{end}" for name in config.rollout.tasks for end in _PATIENT_OF_TASKS}
    raised = _PATIENT | of_tasks
    return with_leaves(
        config, lambda path, value, _: max(value, wait_s) if path in raised and value not in (AUTO, None) else value
    )


def _job(config: ExperimentConfig, _: Facts) -> ExperimentConfig:
    """In a Slurm job, raise checkpoint.on_stop_s to the time between the signal and the time limit, less _SPARE_S. It stays if it
    is longer, or 0 (no last checkpoint)."""
    checkpoint = config.checkpoint
    if config.cluster != "slurm" or not checkpoint.on_stop_s:
        return config
    limit_s = max(checkpoint.on_stop_s, config.slurm.signal_s - _SPARE_S)
    return replace(config, checkpoint=replace(checkpoint, on_stop_s=limit_s))


def _auto(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Resolve `auto` by the device.

    CPU: float32, no TF32, no gradient checkpointing, chunks of 1024 tokens. GPU: bfloat16 (trained weights stay float32), TF32,
    gradient checkpointing, logits of 8192 tokens at a time, and chunks that deliver the longest response in at most four requests;
    but a chunk must be generated within `rollout.request_timeout_s` at 16 tokens/s. The chunk size does not delay an update: an
    interrupted server answers at once with the tokens so far. If a server is lost, the current chunk is lost.
    """
    on_gpu = facts.on_gpu
    if on_gpu is None:
        return config
    rollout, generation, train = config.rollout, config.generation, config.train
    dtype, chunk = ("bfloat16" if on_gpu else "float32"), _CHUNK_TOKENS
    if on_gpu:
        share = math.ceil(rollout.sampling.max_new_tokens / _SENDS_OF_A_RESPONSE)
        chunk = max(chunk, min(share, int(rollout.request_timeout_s * _SLOWEST_TOKENS_PER_S)))
    return replace(
        config,
        rollout=replace(rollout, new_tokens_per_chunk=_chosen(rollout.new_tokens_per_chunk, chunk)),
        generation=replace(generation, dtype=_chosen(generation.dtype, dtype)),
        train=replace(
            train,
            dtype=_chosen(train.dtype, dtype),
            logprob_chunk_tokens=_chosen(train.logprob_chunk_tokens, _LOGPROB_CHUNK_TOKENS[on_gpu]),
            tf32=_chosen(train.tf32, on_gpu),
            gradient_checkpointing=_chosen(train.gradient_checkpointing, on_gpu),
        ),
    )


def _logprob_check(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Whether servers check their logprobs after each update (null: if it is possible), and by how much these may differ from the
    trainer's, which depends on the numerics of both. No check: a tolerance of 0."""
    weights, checks = config.weights, config.weights.verify_logprobs
    if checks is None:
        # Another check refuses an unknown engine
        engine = ENGINES.get(config.allocation.partition(".")[0], EngineTraits())
        is_possible = config.generation.interrupt != "in_place" or engine.scores_in_place
        checks = mode_of(config.mode).updates_servers and is_possible
    tolerance = weights.verify_tolerance
    if facts.on_gpu is not None:
        tolerance = (tolerance or (1e-3 if is_exact(config) else 0.3)) if checks else 0.0
    return replace(config, weights=replace(weights, verify_logprobs=checks, verify_tolerance=tolerance))


def _training(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """The temperature of logprobs in training, and the number of steps over which the learning rate decays. If the batch size has
    changed since the checkpoint, these are the steps done and those for the remaining prompts."""
    train, sampling, ppo, resumed = config.train, config.rollout.sampling, config.train.ppo, facts.resumed
    temperature = ppo.temperature or (1.0 if sampling.greedy else sampling.temperature)
    steps = train.total_steps
    if not steps and facts.num_prompts is not None:
        steps = total_steps(config, facts.num_prompts)
        if resumed is not None and resumed.batch_size != train.batch_size:
            left = facts.num_prompts * train.num_epochs - resumed.num_done
            steps = min(resumed.step + math.ceil(left / train.batch_size), train.max_steps or sys.maxsize)
    # Task ids number all tasks by name. So if one task has an algorithm of its own, all tasks are named here
    own = {name: train.tasks.get(name, TaskAlgorithmConfig()) for name in config.rollout.tasks if train.tasks}
    ppo = replace(ppo, temperature=temperature)
    return replace(config, train=replace(train, total_steps=steps, ppo=ppo, tasks=own))


STEPS: tuple[Callable[[ExperimentConfig, Facts], ExperimentConfig], ...] = (
    with_absolute_paths,
    _place,
    _limits,
    _patient,
    _job,
    _auto,
    _logprob_check,
    _training,
)


def _chosen(asked: T, found: T) -> T:
    return found if asked == AUTO else asked


def _absolute(value: Any, file: str) -> Any:
    """file: which kind of file the field names (limits.Rule)."""
    if isinstance(value, list):
        return [_absolute(one, file) for one in value]
    path, colon, name = value.rpartition(":") if file == "code" else (value, "", "")
    if not file or not path or not path.endswith(_SUFFIXES.get(file, "")):
        return value
    return f"{os.path.abspath(os.path.expanduser(path))}{colon}{name}"
