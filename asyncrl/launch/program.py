"""Derives the processes of a run from its config. Planning is pure: it reads no files and starts no processes.

`plan` is the only place that derives a process's config from the user's config. The launcher starts the processes that `plan`
returns.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf
from yaml import YAMLError, safe_load

from asyncrl.config.engines import traits_of
from asyncrl.config.modes import mode_of
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.processes import (
    GenerationServerConfig,
    GroupsConfig,
    GserverManagerConfig,
    MasterWorkerConfig,
    MismatchConfig,
    ModelWorkerConfig,
    RecorderConfig,
    ReplayerConfig,
    RolloutWorkerConfig,
    WorkerInfo,
)
from asyncrl.config.resolve import Facts, is_exact, resolve
from asyncrl.config.schema import (
    CheckpointConfig,
    ConfigError,
    ExperimentConfig,
    TrainConfig,
    fetches_weights,
    max_head_offpolicyness,
    num_kept_versions,
    rejects_equal_rewards,
    with_each_set,
)
from asyncrl.config.transports import forms_nccl_groups
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.dataflow.graph import build_dataflow, build_recording_dataflow, uses_routes
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.topology import Allocation, ModelPlacement, allocation_of
from asyncrl.dataflow.worker_groups import WorkerGroups, dispensable, worker_groups_of
from asyncrl.generation.sglang_environment import nccl_settings
from asyncrl.launch.redact import redact
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.names import ACTOR
from asyncrl.runtime.disk import write_when_there_is_room

ProcessConfig = (
    MasterWorkerConfig
    | ModelWorkerConfig
    | GenerationServerConfig
    | GserverManagerConfig
    | RolloutWorkerConfig
    | RecorderConfig
    | ReplayerConfig
)
CONFIG_CLASSES: Mapping[str, type[ProcessConfig]] = {
    "master": MasterWorkerConfig,
    "model_worker": ModelWorkerConfig,
    "generation_server": GenerationServerConfig,
    "gserver_manager": GserverManagerConfig,
    "rollout_worker": RolloutWorkerConfig,
    "recorder": RecorderConfig,
    "replayer": ReplayerConfig,
}
NO_CHECKPOINTS = CheckpointConfig(every_s=0.0)
_ALLOCATOR = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # settings of torch's allocator: the name, and its older one


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start: its name, the resources that it needs, and its resolved config."""

    name: str  # e.g. rollout_worker/1
    kind: str
    config: ProcessConfig
    computes: bool  # it constantly uses a core or a device
    env: Mapping[str, str]

    @property
    def file_stem(self) -> str:
        """The name of its log and config files, without suffix."""
        return self.name.replace("/", "_")


def run_directory(config: ExperimentConfig) -> Path:
    """Return <fileroot>/<experiment>/<trial>, absolute."""
    return (Path(config.fileroot).expanduser() / config.experiment / config.trial).absolute()


def plan(
    config: ExperimentConfig, *, attempt: int, num_prompts: int, devices: Sequence[str] = (), resume: str = ""
) -> list[ProcessSpec]:
    """Return all processes of a run, in start order. num_prompts: as counted by `preflight`.

    Limits of loading that are still `auto` do not count the models' bytes: the launcher, which knows them, resolves these limits
    before.

    resume: the folder of the checkpoint from which the attempt resumes; "": it starts anew.

    devices: the GPUs of the machine or of all hosts, by their names in CUDA_VISIBLE_DEVICES. The allocation may name each process's
    GPUs. Otherwise generation servers get the first ones, one per tensor parallel rank; model workers get the next ones, one each.
    If there are too few, processes get the same ones: checks/gpus.py refuses that before. On several hosts the processes get their
    GPUs later (launch/hosts/placement.py).
    """
    resolved = resolve(config, Facts(on_gpu=bool(devices), num_prompts=num_prompts, model_bytes=0))
    run = _Run(resolved, attempt, num_prompts, resume)
    processes = run.processes()
    _check_left_out(config, [process.worker.name for process in processes])
    specs = [_spec(process, config.train.torch_threads, on_gpu=bool(devices)) for process in processes]
    if not run.allocation.traits.is_embedded and forms_nccl_groups(
        config.weights.transport, config.weights.broadcast_backend, on_gpu=bool(devices)
    ):  # SGLang makes these settings itself; so must the trainers, before their first NCCL group
        settings = nccl_settings(config.generation.server_args, os.environ)
        specs = [replace(spec, env={**spec.env, **settings}) if num_devices(spec) else spec for spec in specs]
    if not devices or config.cluster != "local":  # on several hosts the launcher's placement chooses the GPUs
        return specs
    if run.allocation.generation_devices is not None:
        return [_on_named(spec, run.allocation, devices) for spec in specs]
    slots = itertools.cycle(devices)
    return [on_gpus(spec, _take(slots, num_devices(spec))) for spec in specs]


class _Run:
    """The values that the configs of a run's processes share, and one method per kind of process that builds its config."""

    def __init__(self, config: ExperimentConfig, attempt: int, num_prompts: int, resume: str) -> None:
        """config: resolved (config/resolve.py)."""
        self.config, self.attempt, self.num_prompts, self.resume = config, attempt, num_prompts, resume
        self.mode = mode_of(config.mode)
        self.allocation = allocation_of(config)
        self.eta = max_head_offpolicyness(config)
        self.train = config.train
        self.tokenizer_path = config.tokenizer_path or config.model_path
        if self.mode.trains:
            self.placements, self.mfcs = place(self.allocation, build_dataflow(self.train, config.mode))
        else:  # the recorder has no model
            self.placements, self.mfcs = [], [mfc.placed("") for mfc in build_recording_dataflow().mfcs.values()]
        self.models = models_of(self.placements, self.mfcs, self.train, config.model_path)
        self.heads = self.placements[0].heads if self.mode.trains else (0,)  # model workers that receive trajectories
        self.store_capacity = (1 + self.eta) * self.train.batch_size
        self.worker_groups = [list(group) for group in placed_groups(config)[0].all]

    def processes(self) -> list[ProcessConfig]:
        """Return the configs of all processes, in start order."""
        config, allocation = self.config, self.allocation
        trainers = (
            map(self.model_worker, range(allocation.num_model_workers)) if self.mode.trains else [self.recorder()]
        )
        if self.mode.workers_generate:
            return [*trainers, self.master()]
        if self.mode.replays:
            return [*trainers, self.master(), self.replayer()]
        servers = map(self.generation_server, range(allocation.num_servers))
        rollout_workers = map(self.rollout_worker, range(config.rollout.num_workers))
        return [*servers, *trainers, self.master(), self.gserver_manager(), *rollout_workers]

    def generation_server(self, index: int) -> GenerationServerConfig:
        config, allocation = self.config, self.allocation
        return GenerationServerConfig(
            worker=self._info("generation_server", index, allocation.num_servers),
            engine=allocation.engine,
            model_path=config.model_path,
            tokenizer_path=self.tokenizer_path,
            generation=config.generation,
            torch_threads=config.train.torch_threads,
            verify_tolerance=config.weights.verify_tolerance,
            tensor_parallel=allocation.generation.replica_size,
            fetch=fetches_weights(config),
            fetch_dir=config.weights.fetch_dir,
            full_every=config.weights.full_every,
            lora=config.train.lora,
            num_versions=num_kept_versions(config),
            shares_devices=bool(self.allocation.shared_workers),
            returns_routes=uses_routes(config.train),
        )

    def model_worker(self, index: int) -> ModelWorkerConfig:
        config, record = self.config, self.config.record
        groups = GroupsConfig(config.prompts, config.eval, config.rollout, config.generation)
        return ModelWorkerConfig(
            worker=self._info("model_worker", index, self.allocation.num_model_workers),
            models=self.models,
            mfcs=self.mfcs,
            model_path=config.model_path,
            tokenizer_path=self.tokenizer_path,
            train=self.train,
            weights=config.weights,
            # With arriving_inference, groups may arrive before the last batch is discarded
            store_capacity=self.store_capacity + self.train.batch_size * self.train.arriving_inference,
            record=replace(
                record,
                trajectories=record.trajectories and index in self.heads,  # only heads have the MFCs' results
                max_bytes=record.max_bytes // len(self.heads),
            ),
            groups=groups if self.mode.workers_generate else None,
            worker_groups=self.worker_groups,
            shares_devices=index in self.allocation.shared_workers,
            mismatch=_mismatch(config, self.train, self.allocation.engine),
        )

    def recorder(self) -> RecorderConfig:
        config = self.config
        return RecorderConfig(
            worker=self._info("recorder", 0, 1),
            model_path=config.model_path,
            tokenizer_path=self.tokenizer_path,
            weights=config.weights,
            store_capacity=self.store_capacity,
            call_timeout_s=self.train.call_timeout_s,
            max_bytes=config.record.max_bytes,
            words=config.train.words,
            max_words_bytes=config.train.max_words_bytes,
        )

    def master(self) -> MasterWorkerConfig:
        config, manager, trains = self.config, self.config.manager, self.mode.trains
        train, evaluation = self.train, config.eval
        if not trains:  # the weights do not change: nothing is saved, and they are evaluated at most once
            train = replace(train, save_every_steps=0, save_every_epochs=0, save_every_s=0.0)
            only = not self.mode.forms_batches
            evaluation = with_each_set(evaluation, at_end=only, every_steps=0, every_epochs=0, every_s=0.0)
            evaluation = with_each_set(evaluation, at_start=False) if only else evaluation
        return MasterWorkerConfig(
            worker=self._info("master", 0, 1),
            num_model_workers=self.allocation.num_model_workers if trains else 1,
            models=self.models,
            mfcs=self.mfcs,
            prompts=config.prompts,
            train=train,
            eval=evaluation,
            weights=config.weights,
            max_head_offpolicyness=self.eta,
            overdue=manager.overdue,
            overdue_wait_s=manager.overdue_wait_s,
            max_rejected_share=manager.max_rejected_share,
            tensorboard=config.tensorboard,
            wandb=config.wandb,
            trackio=config.trackio,
            mlflow=config.mlflow,
            tasks=sorted(config.rollout.tasks),
            gates={name: task.gate for name, task in sorted(config.rollout.tasks.items()) if task.gate is not None},
            mode=config.mode,
            checkpoint=config.checkpoint if writes_checkpoints(config) else NO_CHECKPOINTS,
            resume=self.resume,
            first_step=config.replay.first_step,
            records=config.record.trajectories and trains,
            num_replayed=self.num_prompts if self.mode.replays else 0,
            worker_groups=self.worker_groups,
            shared_workers=list(self.allocation.shared_workers),
            leave_after=self.allocation.until,
            group_size=config.rollout.group_size,
            sampling=config.rollout.sampling,
            reject_equal_rewards=rejects_equal_rewards(config.rollout),
            devices_per_server=self.allocation.generation.replica_size,
        )

    def gserver_manager(self) -> GserverManagerConfig:
        config, manager = self.config, self.config.manager
        max_concurrent = manager.max_concurrent_rollouts or self.store_capacity
        return GserverManagerConfig(
            worker=self._info("gserver_manager", 0, 1),
            manager=replace(manager, max_concurrent_rollouts=max_concurrent),
            role=ACTOR,
            num_heads=len(self.heads),
            num_rollout_workers=config.rollout.num_workers,
            batch_size=self.train.batch_size,
            interrupt=config.generation.interrupt,
            transport=config.weights.transport,
            broadcast_timeout_s=config.weights.broadcast_timeout_s,
            replace_timeout_s=config.train.call_timeout_s,
            fetch=fetches_weights(config),
            shares_devices=bool(self.allocation.shared_workers),
            wake_limit_s=config.generation.load_limit_s if self.allocation.shared_workers else 0.0,
            num_servers=self.allocation.num_servers,
            least_servers=_least_servers(config.debug.leave_out),
            external_servers=not can_scale(config),
        )

    def rollout_worker(self, index: int) -> RolloutWorkerConfig:
        config = self.config
        return RolloutWorkerConfig(
            worker=self._info("rollout_worker", index, config.rollout.num_workers),
            tokenizer_path=self.tokenizer_path,
            prompts=config.prompts,
            eval=config.eval,
            rollout=config.rollout,
            num_heads=len(self.heads),
            heartbeat_s=config.manager.heartbeat_s,
            dense_rewards=config.train.dense_rewards,
            branches=config.train.branches,
            with_routes=uses_routes(config.train),
            words=config.train.words,
            max_words_bytes=config.train.max_words_bytes,
        )

    def replayer(self) -> ReplayerConfig:
        return ReplayerConfig(
            worker=self._info("replayer", 0, 1),
            replay=self.config.replay,
            num_heads=len(self.heads),
            batch_size=self.train.batch_size,
            max_steps=self.train.max_steps,
            max_head_offpolicyness=self.eta,
            call_timeout_s=self.train.call_timeout_s,
        )

    def _info(self, kind: str, index: int, count: int) -> WorkerInfo:
        config = self.config
        return WorkerInfo(
            kind=kind,
            index=index,
            count=count,
            experiment=config.experiment,
            trial=config.trial,
            attempt=self.attempt,
            run_dir=str(run_directory(config)),
            seed=config.seed,
            name_resolve=config.name_resolve,
            runtime=config.runtime,
            trace=config.trace,
            network=config.network,
        )


def groups_that_restart_alone(config: ExperimentConfig) -> dict[tuple[str, ...], bool]:
    """Return the model workers of each group that restarts without the trainer group, and whether the run continues without this
    group (on_missing=continue)."""
    groups, placements = placed_groups(config)
    needless = dispensable(groups, placements, config.train)
    return {
        tuple(f"model_worker/{worker}" for worker in group): group in needless
        for group in groups.all
        if group != groups.trainer
    }


def placed_groups(config: ExperimentConfig) -> tuple[WorkerGroups, list[ModelPlacement]]:
    """Return the worker groups of the run, and where its models are placed."""
    allocation = allocation_of(config)
    if not mode_of(config.mode).trains:
        return WorkerGroups((0,)), []
    placements, mfcs = place(allocation, build_dataflow(config.train, config.mode))
    groups = worker_groups_of(
        placements,
        mfcs,
        config.train,
        num_workers=allocation.num_model_workers,
        mode=config.mode,
    )
    return groups, placements


def writes_checkpoints(config: ExperimentConfig) -> bool:
    """Whether the run writes checkpoints to resume from. Only recoverable modes do: in the others, doing the work
    again is as fast as restoring its results."""
    return config.checkpoint.enabled and mode_of(config.mode).is_recoverable


def can_scale(config: ExperimentConfig) -> bool:
    """Whether the run starts its generation servers itself, and on devices of their own, so that their number can change."""
    allocation = allocation_of(config)
    starts = mode_of(config.mode).has_servers and allocation.traits.starts_servers
    return starts and not allocation.shared_workers


def server_spec(
    index: int, config: ExperimentConfig, *, attempt: int, num_prompts: int, devices: Sequence[str] = ()
) -> ProcessSpec:
    """Return the process of any generation server, including those beyond the allocation.

    Servers beyond it get the GPUs after those of the allocation. If these are used up, processes share all GPUs in turn.
    """
    planned = plan(config, attempt=attempt, num_prompts=num_prompts, devices=devices)
    allocation = Allocation.parse(config.allocation)
    if index < allocation.num_servers:
        return next(spec for spec in planned if spec.name == f"generation_server/{index}")
    wide = replace(
        allocation,
        generation=allocation.generation.with_parts({SAMPLES: index + 1}),
        generation_devices=None,  # its number of devices is the allocation's
        training=tuple(replace(part, devices=None) for part in allocation.training),
    )
    more = plan(replace(config, allocation=str(wide)), attempt=attempt, num_prompts=num_prompts, devices=devices)
    spec = next(spec for spec in more if spec.name == f"generation_server/{index}")
    if not devices:
        return spec
    named = allocation.generation_devices is not None
    num_taken = allocation.num_devices if named else sum(map(num_devices, planned))
    num_taken += (index - allocation.num_servers) * num_devices(spec)
    slots = itertools.islice(itertools.cycle(devices), num_taken, None)
    return on_gpus(spec, _take(slots, num_devices(spec)))


def save_config(config: ExperimentConfig | ProcessConfig, path: Path, *, redacted: bool = False) -> None:
    """Write a config as YAML. redacted: replace secrets with ***, for people to read. Otherwise a config with secrets is readable
    only by its owner."""
    whole = asdict(config)
    mode = 0o666 if redacted or redact(whole) == whole else 0o600

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an existing file would keep its mode, which others may be able to read
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(config_text(config, redacted=redacted))

    write_when_there_is_room(path, write)


def load_process_config(path: Path) -> ProcessConfig:
    """Load a process's config, written by save_config. Raises OSError, or ValueError as parse_process_config does."""
    return parse_process_config(path.read_text())


def config_text(config: ExperimentConfig | ProcessConfig, *, redacted: bool = False) -> str:
    """Return a config as YAML text. A process's config is sent to its host in this form."""
    whole = asdict(config)
    return OmegaConf.to_yaml(OmegaConf.create(redact(whole) if redacted else whole))


def parse_process_config(text: str) -> ProcessConfig:
    """Parse the YAML text of a process's config; `worker.kind` in it selects the class. The config is resolved, so nothing is
    merged or looked up. Raises ValueError if the text is not the config of a process."""
    try:
        raw = safe_load(text)
        kind = raw["worker"]["kind"]
        if kind not in CONFIG_CLASSES:
            raise ValueError(f"worker.kind is {kind!r}, one of {', '.join(CONFIG_CLASSES)} is needed")
        config: ProcessConfig = msgspec.convert(raw, CONFIG_CLASSES[kind])
    except (KeyError, TypeError) as error:
        raise ValueError("not a config of a process: it has no worker.kind") from error
    except (YAMLError, *DECODE_ERRORS) as error:
        raise ValueError(f"not a config of a process: {error}") from error
    if unknown := list(_unknown(raw, asdict(config))):
        raise ValueError(f"{config.worker.name} has no field {', '.join(unknown)}")
    return config


def _unknown(read: Any, known: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the keys that were read, and are not in the config that was made of them."""
    if isinstance(read, dict) and isinstance(known, dict):
        for key, value in read.items():
            if key in known:
                yield from _unknown(value, known[key], f"{path}{key}.")
            else:
                yield f"{path}{key}"
    elif isinstance(read, list):
        for at, pair in enumerate(zip(read, known, strict=True)):
            yield from _unknown(*pair, f"{path}{at}.")


def num_devices(spec: ProcessSpec) -> int:
    """Return the number of GPUs of a process."""
    config = spec.config
    if isinstance(config, ModelWorkerConfig) and config.on_cpu:
        return 0
    return getattr(config, "tensor_parallel", 1) if spec.computes else 0


def named_devices(spec: ProcessSpec, allocation: Allocation) -> range:
    """Return the numbers of the devices that the allocation names for a process. It must name devices."""
    index, count = spec.config.worker.index, num_devices(spec)
    if spec.kind == "generation_server" and allocation.generation_devices is not None:
        first = allocation.generation_devices.first + index * count
        return range(first, first + count) if index < allocation.num_servers else range(0)
    if spec.kind == "model_worker" and count:
        return range(allocation.device_of_worker(index), allocation.device_of_worker(index) + 1)
    return range(0)


def _on_named(spec: ProcessSpec, allocation: Allocation, devices: Sequence[str]) -> ProcessSpec:
    """Return the process with the devices that the allocation names for it."""
    return on_gpus(spec, [devices[number] for number in named_devices(spec, allocation)])


def on_gpus(spec: ProcessSpec, gpus: Sequence[str]) -> ProcessSpec:
    """Return the process with these GPUs: it sees no others, and fails if torch cannot use them."""
    worker = replace(spec.config.worker, gpus=list(gpus))
    env = {**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return replace(spec, config=replace(spec.config, worker=worker), env=env)


def _take(slots: Iterator[str], count: int) -> list[str]:
    """Return the next `count` slots. A slot that comes several times is returned once, so the list may be shorter."""
    return list(dict.fromkeys(itertools.islice(slots, count)))


def _spec(process: ProcessConfig, torch_threads: int, *, on_gpu: bool) -> ProcessSpec:
    kind = process.worker.kind
    engine = process.engine if isinstance(process, GenerationServerConfig) else ""
    computes = kind == "model_worker" or traits_of(engine).starts_servers
    env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    threads = torch_threads if computes else 1
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    on_cpu = isinstance(process, ModelWorkerConfig) and process.on_cpu
    uses_allocator = (
        kind == "model_worker" or traits_of(engine).is_embedded
    )  # SGLang's memory saver refuses the setting
    if on_gpu and uses_allocator and not on_cpu and not any(name in os.environ for name in _ALLOCATOR):
        env[_ALLOCATOR[0]] = (
            "expandable_segments:True"  # each micro-batch has another length: fixed segments would fragment
        )
    return ProcessSpec(process.worker.name, kind, process, computes, env)


def _mismatch(config: ExperimentConfig, train: TrainConfig, engine: str) -> MismatchConfig | None:
    """The bounds of the first step (train.mismatch); docs/algorithms.md has the measurements behind them.

    A recording may come from any engine, and from another model on purpose, so with mode=train_only the check only warns. With
    mode=sync the trainer itself computes the behaviour logprobs, at its own temperature.
    """
    mode = mode_of(config.mode)
    action = "warn" if mode.replays and train.mismatch == "stop" else train.mismatch
    if action == "off":
        return None
    sampling, own = config.rollout.sampling, mode.workers_generate
    temperature = train.ppo.temperature if own else 1.0 if sampling.greedy else sampling.temperature
    is_tight = is_exact(config) and not mode.replays and (own or traits_of(engine).is_embedded)
    kl, token, share = (1e-4, 1e-3, 0.01) if is_tight else (0.05, 0.5, 0.05)
    return MismatchConfig(action, temperature, kl, token, share)


def _least_servers(left_out: Sequence[str]) -> int:
    """Return the smallest number of generation servers that includes every server that the user starts (debug.leave_out)."""
    parts = [name.partition("/") for name in left_out]
    return max([1, *(int(index) + 1 for kind, _, index in parts if kind == "generation_server")])


def _check_left_out(config: ExperimentConfig, names: Sequence[str]) -> None:
    for name in config.debug.leave_out:
        if name not in names:
            raise ConfigError(
                f"debug.leave_out={name!r}: no process of this run has this name; {did_you_mean(name, names)}use one of "
                f"{', '.join(names)}"
            )
