"""Resolves a config (pure): from what the user wrote to what the processes of a run get.

`resolve` applies STEPS in their order. Each gives one group of derived values: a step is the only place that decides them. A step
changes nothing while a fact that it needs is not known. Resolving a resolved config again changes nothing.

run: its result is config.yaml in the run's folder, and the source of the processes' configs (launch/program.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import (
    AUTO,
    ExperimentConfig,
    NameResolveConfig,
    PromptSourceConfig,
    RolloutConfig,
    TaskConfig,
    verifies_logprobs,
    with_model_paths,
)

T = TypeVar("T")

_CHUNK_TOKENS = 1024
_SENDS_OF_A_RESPONSE = 4
# Assumed speed of one response on a full server. It is low, because a request's time includes its wait in the queue
_SLOWEST_TOKENS_PER_S = 16


@dataclass(frozen=True)
class Facts:
    """What a config depends on besides itself. The defaults: not known yet."""

    on_gpu: bool | None = None  # whether the run's machines have GPUs
    num_prompts: int | None = None  # as counted by preflight
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


def with_absolute_paths(config: ExperimentConfig, _: Facts | None = None) -> ExperimentConfig:
    """Return the config with absolute paths, so that it works from any folder. Modules in it are still imported from the current
    folder."""
    train = with_model_paths(config.train, lambda field, path: _absolute(path))
    return replace(
        config,
        fileroot=_absolute(config.fileroot),
        model_path=_absolute(config.model_path),
        tokenizer_path=_absolute(config.tokenizer_path),
        prompts=_resolve_prompts(config.prompts),
        eval=replace(config.eval, prompts=_resolve_prompts(config.eval.prompts) if config.eval.prompts else None),
        rollout=_resolve_rollout(config.rollout),
        generation=replace(
            config.generation,
            python=_absolute(config.generation.python),
            api_key_file=_absolute(config.generation.api_key_file),
        ),
        name_resolve=absolute_name_resolve(config.name_resolve),
        network=replace(
            config.network,
            tls_cert=_absolute(config.network.tls_cert),
            tls_key=_absolute(config.network.tls_key),
            tls_ca=_absolute(config.network.tls_ca),
        ),
        weights=replace(config.weights, fetch_dir=_absolute(config.weights.fetch_dir)),
        replay=replace(config.replay, path=_absolute(config.replay.path)),
        train=replace(
            train,
            step=_absolute_spec(train.step),
            ptx=replace(train.ptx, texts=_resolve_prompts(train.ptx.texts)) if train.ptx else None,
            mfcs=list(map(_absolute_spec, train.mfcs)),
        ),
    )


def place(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Where the processes listen, and how they find each other."""
    return replace(
        config,
        runtime=replace(config.runtime, host=facts.host or config.runtime.host),
        network=replace(config.network, socket_dir=facts.socket_dir or config.network.socket_dir),
        name_resolve=facts.name_resolve or config.name_resolve,
    )


def _patient(config: ExperimentConfig, _: Facts) -> ExperimentConfig:
    """If the user starts a process by hand (debug.leave_out), raise the time limits below to at least debug.wait_s. The user's
    process may start late, or stop in a debugger, and the other processes must not give up waiting for it."""
    if not config.debug.leave_out:
        return config
    wait_s = config.debug.wait_s

    def at_least(limit_s: float) -> float:
        return max(limit_s, wait_s)

    runtime, manager, rollout, train = config.runtime, config.manager, config.rollout, config.train
    return replace(
        config,
        runtime=replace(runtime, start_timeout_s=at_least(runtime.start_timeout_s)),
        manager=replace(
            manager,
            lease_s=at_least(manager.lease_s),
            update_timeout_s=at_least(manager.update_timeout_s),
            overdue_wait_s=at_least(manager.overdue_wait_s),
        ),
        rollout=replace(
            rollout,
            reward_timeout_s=at_least(rollout.reward_timeout_s),
            request_timeout_s=at_least(rollout.request_timeout_s),
            rollout_timeout_s=at_least(rollout.rollout_timeout_s),
        ),
        train=replace(
            train, call_timeout_s=at_least(train.call_timeout_s), data_timeout_s=at_least(train.data_timeout_s)
        ),
    )


def _auto(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Resolve `auto` by the device.

    CPU: float32, no TF32, no gradient checkpointing, chunks of 1024 tokens. GPU: bfloat16 (trained weights stay float32), TF32,
    gradient checkpointing, and chunks that deliver the longest response in at most four requests; but a chunk must be generated
    within `rollout.request_timeout_s` at 16 tokens/s. The chunk size does not delay an update: an interrupted server answers at
    once with the tokens so far. If a server is lost, the current chunk is lost.
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
            tf32=_chosen(train.tf32, on_gpu),
            gradient_checkpointing=_chosen(train.gradient_checkpointing, on_gpu),
        ),
    )


def _logprob_check(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """Whether servers check their logprobs, and by how much these may differ from the trainer's, which depends on the numerics of
    both. No check: a tolerance of 0."""
    weights, checks = config.weights, verifies_logprobs(config)
    tolerance = weights.verify_tolerance
    if facts.on_gpu is not None:
        tolerance = (tolerance or (1e-3 if is_exact(config) else 0.3)) if checks else 0.0
    return replace(config, weights=replace(weights, verify_logprobs=checks, verify_tolerance=tolerance))


def _training(config: ExperimentConfig, facts: Facts) -> ExperimentConfig:
    """The temperature of logprobs in training, and the number of steps over which the learning rate decays."""
    train, sampling, ppo = config.train, config.rollout.sampling, config.train.ppo
    temperature = ppo.temperature or (1.0 if sampling.greedy else sampling.temperature)
    planned = 0 if facts.num_prompts is None else total_steps(config, facts.num_prompts)
    steps = train.total_steps or planned
    return replace(config, train=replace(train, total_steps=steps, ppo=replace(ppo, temperature=temperature)))


STEPS: tuple[Callable[[ExperimentConfig, Facts], ExperimentConfig], ...] = (
    with_absolute_paths,
    place,
    _patient,
    _auto,
    _logprob_check,
    _training,
)


def _chosen(asked: T, found: T) -> T:
    return found if asked == AUTO else asked


def absolute_name_resolve(config: NameResolveConfig) -> NameResolveConfig:
    """Return the config of name resolve, with the paths of its files made absolute."""
    return replace(
        config,
        password_file=_absolute(config.password_file),
        ca_file=_absolute(config.ca_file),
        cert_file=_absolute(config.cert_file),
        key_file=_absolute(config.key_file),
    )


def _resolve_rollout(rollout: RolloutConfig) -> RolloutConfig:
    """Make the paths of reward, agent and env files absolute, so that a process can start from any folder."""

    def resolve(task: TaskConfig) -> TaskConfig:
        return replace(
            task, reward=_absolute_spec(task.reward), agent=_absolute_spec(task.agent), env=_absolute_spec(task.env)
        )

    return replace(rollout, tasks={name: resolve(task) for name, task in rollout.tasks.items()})


def _absolute_spec(spec: str) -> str:
    file, colon, name = spec.rpartition(":")
    return f"{_absolute(file)}{colon}{name}" if file.endswith(".py") else spec


def _resolve_prompts(prompts: PromptSourceConfig) -> PromptSourceConfig:
    return replace(prompts, path=_absolute(prompts.path)) if prompts.path.endswith((".jsonl", ".parquet")) else prompts


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else path
