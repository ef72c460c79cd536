"""From a config to the processes of a run. Pure: it reads nothing and starts nothing.

`plan` is the one place where a process's config is derived from the user's; every launcher starts what it returns.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from asyncrl.config import (
    ExperimentConfig,
    GenerationServerConfig,
    GserverManagerConfig,
    MasterWorkerConfig,
    ModelWorkerConfig,
    PromptSourceConfig,
    RolloutConfig,
    RolloutWorkerConfig,
    TaskConfig,
    TrainConfig,
    WorkerInfo,
)
from asyncrl.topology import Allocation

ACTOR = "actor"
ProcessConfig = (
    MasterWorkerConfig | ModelWorkerConfig | GenerationServerConfig | GserverManagerConfig | RolloutWorkerConfig
)
CONFIG_CLASSES: Mapping[str, type[ProcessConfig]] = {
    "master": MasterWorkerConfig,
    "model_worker": ModelWorkerConfig,
    "generation_server": GenerationServerConfig,
    "gserver_manager": GserverManagerConfig,
    "rollout_worker": RolloutWorkerConfig,
}


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start: its name, what it needs of the machine, and its resolved config."""

    name: str  # e.g. rollout_worker/1
    kind: str
    config: ProcessConfig
    computes: bool  # uses a core (or a device) all the time
    env: Mapping[str, str]

    @property
    def file_stem(self) -> str:
        """Name of its log and config files."""
        return self.name.replace("/", "_")


def run_directory(config: ExperimentConfig) -> Path:
    """<fileroot>/<experiment>/<trial>, absolute."""
    return (Path(config.fileroot).expanduser() / config.experiment / config.trial).absolute()


def total_steps(config: ExperimentConfig, num_prompts: int) -> int:
    """Train steps that the run will take if nothing is rejected."""
    by_epochs = math.ceil(num_prompts * config.train.num_epochs / config.train.batch_size)
    return min(by_epochs, config.train.max_steps) if config.train.max_steps else by_epochs


def plan(config: ExperimentConfig, *, attempt: int, num_prompts: int, devices: Sequence[str] = ()) -> list[ProcessSpec]:
    """All processes of a run, in the order in which they are started. num_prompts: size of the prompt source.

    devices: the GPUs of the machine as CUDA_VISIBLE_DEVICES names them. Generation servers get the first ones, model workers
    those after; where there are fewer than processes that compute, they are shared in turn.
    """
    allocation = Allocation.parse(config.allocation)
    manager = config.manager
    num_heads = allocation.training.data
    eta = manager.max_head_offpolicyness
    model_path = _absolute(config.model_path)
    tokenizer_path = _absolute(config.tokenizer_path or config.model_path)
    train = _resolve_train(config, num_prompts)
    prompts = _resolve_prompts(config.prompts)
    eval_prompts = _resolve_prompts(config.eval.prompts) if config.eval.prompts else None

    def info(kind: str, index: int, count: int) -> WorkerInfo:
        return WorkerInfo(
            kind=kind,
            index=index,
            count=count,
            experiment=config.experiment,
            trial=config.trial,
            attempt=attempt,
            run_dir=str(run_directory(config)),
            seed=config.seed,
            name_resolve=config.name_resolve,
            runtime=config.runtime,
        )

    processes: list[ProcessConfig] = [
        *(
            GenerationServerConfig(
                worker=info("generation_server", index, allocation.num_servers),
                engine=allocation.engine,
                model_path=model_path,
                tokenizer_path=tokenizer_path,
                generation=config.generation,
                torch_threads=config.train.torch_threads,
            )
            for index in range(allocation.num_servers)
        ),
        *(
            ModelWorkerConfig(
                worker=info("model_worker", index, allocation.training.size),
                data_parallel_rank=index,
                data_parallel_size=num_heads,
                model_path=model_path,
                tokenizer_path=tokenizer_path,
                train=train,
                weights=config.weights,
                store_capacity=(1 + eta) * train.batch_size,
            )
            for index in range(allocation.training.size)
        ),
        MasterWorkerConfig(
            worker=info("master", 0, 1),
            num_model_workers=allocation.training.size,
            data_parallel_size=num_heads,
            prompts=prompts,
            train=train,
            eval=replace(config.eval, prompts=eval_prompts),
            weights=config.weights,
            max_head_offpolicyness=eta,
            overdue=manager.overdue,
            overdue_wait_s=manager.overdue_wait_s,
            max_rejected_share=manager.max_rejected_share,
            tensorboard=config.tensorboard,
        ),
        GserverManagerConfig(
            worker=info("gserver_manager", 0, 1),
            manager=replace(
                manager,
                max_concurrent_rollouts=manager.max_concurrent_rollouts or (1 + eta) * train.batch_size,
            ),
            role=ACTOR,
            num_heads=num_heads,
            num_rollout_workers=config.rollout.num_workers,
            batch_size=train.batch_size,
        ),
        *(
            RolloutWorkerConfig(
                worker=info("rollout_worker", index, config.rollout.num_workers),
                tokenizer_path=tokenizer_path,
                prompts=prompts,
                eval_prompts=eval_prompts,
                rollout=_resolve_rollout(config.rollout),
                num_heads=num_heads,
                heartbeat_s=manager.heartbeat_s,
            )
            for index in range(config.rollout.num_workers)
        ),
    ]
    specs = [_spec(process, config.train.torch_threads) for process in processes]
    if not devices:
        return specs
    slots = itertools.cycle(devices)
    return [replace(s, env={**s.env, "CUDA_VISIBLE_DEVICES": next(slots) if s.computes else ""}) for s in specs]


def with_endpoints(config: ExperimentConfig, endpoints: list[str]) -> ExperimentConfig:
    """The config with the name-resolve endpoints that the launcher has started."""
    return replace(config, name_resolve=replace(config.name_resolve, endpoints=endpoints))


def save_config(config: ExperimentConfig | ProcessConfig, path: Path) -> None:
    """Write a config as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), path)


def load_process_config(path: Path) -> ProcessConfig:
    """Inverse of save_config for a process: the `worker.kind` in the file says which."""
    raw = OmegaConf.load(path)
    kind = OmegaConf.select(raw, "worker.kind")
    if kind not in CONFIG_CLASSES:
        raise ValueError(f"{path}: worker.kind is {kind!r}, one of {', '.join(CONFIG_CLASSES)} is needed")
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CONFIG_CLASSES[kind]), raw))
    assert isinstance(loaded, ProcessConfig)
    return loaded


def _spec(process: ProcessConfig, torch_threads: int) -> ProcessSpec:
    kind = process.worker.kind
    computes = kind in {"model_worker", "generation_server"}
    env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    threads = torch_threads if computes else 1
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return ProcessSpec(process.worker.name, kind, process, computes, env)


def _resolve_train(config: ExperimentConfig, num_prompts: int) -> TrainConfig:
    sampling, ppo = config.rollout.sampling, config.train.ppo
    temperature = ppo.temperature or (1.0 if sampling.greedy else sampling.temperature)
    steps = config.train.total_steps or total_steps(config, num_prompts)
    return replace(config.train, total_steps=steps, ppo=replace(ppo, temperature=temperature))


def _resolve_rollout(rollout: RolloutConfig) -> RolloutConfig:
    """Reward, agent and env files by absolute path, so that a process can be started from anywhere."""

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
