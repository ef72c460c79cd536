"""The config of each process, one dataclass per kind. Dataclasses only, no torch.

`asyncrl.launch.program.plan` derives them from the user's config (schema.py). They are written to disk, so that each process can be
started alone from its own config.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config.schema import (
    CheckpointConfig,
    EvalConfig,
    GateConfig,
    GenerationConfig,
    LoraConfig,
    ManagerConfig,
    MlflowConfig,
    NameResolveConfig,
    NetworkConfig,
    OptimizerConfig,
    PromptSourceConfig,
    RecordConfig,
    ReplayConfig,
    RolloutConfig,
    RuntimeConfig,
    SamplingConfig,
    TrackioConfig,
    TrainConfig,
    WandbConfig,
    WeightsConfig,
)


@dataclass(frozen=True)
class WorkerInfo:
    """Identity of a process and location of the run. The first field of every process's config."""

    kind: str  # master | model_worker | generation_server | gserver_manager | rollout_worker | recorder | replayer
    index: int
    count: int  # number of processes of this kind
    experiment: str
    trial: str
    attempt: int
    run_dir: str  # <fileroot>/<experiment>/<trial>, absolute
    seed: int
    name_resolve: NameResolveConfig  # endpoints filled in
    runtime: RuntimeConfig
    trace: bool = False
    network: NetworkConfig = field(default_factory=NetworkConfig)
    group_incarnation: int = 0  # how often its worker group alone has been restarted in this attempt
    start: int = 0  # number of this start among all starts by its launcher; 0: started by hand
    gpus: list[str] = field(default_factory=list)  # that the launcher gave it, as in CUDA_VISIBLE_DEVICES

    @property
    def name(self) -> str:
        """The name in logs, status and errors, e.g. rollout_worker/1."""
        return f"{self.kind}/{self.index}"


@dataclass(frozen=True)
class ModelConfig:
    """A model of the training side: its placement (topology.ModelPlacement), checkpoint and kind."""

    name: str  # the role; a second layout of a role is e.g. actor@1
    path: str
    grid: str  # e.g. d2p1m1
    workers: list[int]  # model worker of each rank, in training order
    # lm: logprobs | value: one number per token (critic) | reward: one number per sequence | none: CPU workers without weights
    kind: str = "lm"
    trainable: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: bool = False  # move the weights off the GPU between MFCs
    float32: bool = False  # its weights are float32 although it is not trained: a moving average
    lora: LoraConfig | None = None  # it has adapters, and its other weights are frozen
    base_of: str = ""  # it is the base of this model, which has adapters: it has no weights of its own


@dataclass(frozen=True)
class PlacedMFC:
    """A dataflow.MFCDef in the config of a process."""

    name: str
    role: str
    model: str  # ModelConfig.name
    kind: str  # inference | train_step | generate
    interface: str
    input_keys: list[str]
    output_keys: list[str] = field(default_factory=list)
    dispatch: str = "data_parallel"  # one of mfc.DISPATCHES


@dataclass(frozen=True)
class GroupsConfig:
    """Settings with which model workers generate groups (mode=sync). Of `generation` they use only max_running_requests,
    num_blocks and page_size."""

    prompts: PromptSourceConfig
    eval: EvalConfig
    rollout: RolloutConfig
    generation: GenerationConfig


@dataclass(frozen=True)
class MismatchConfig:
    """What a model worker does if the first on-policy data has other logprobs than its own (train.mismatch): the bounds."""

    action: str  # stop | warn
    temperature: float  # at which the behaviour logprobs were computed
    kl: float  # of |mean(behaviour - trainer)|, in nats per token
    bound: float  # of |behaviour - trainer| of a token ...
    share: float  # ... which this share of the tokens may exceed


@dataclass(frozen=True)
class MasterWorkerConfig:
    worker: WorkerInfo
    num_model_workers: int
    models: list[ModelConfig]  # the heads of the first one receive trajectories; rollout_only: none
    mfcs: list[PlacedMFC]
    prompts: PromptSourceConfig
    train: TrainConfig
    eval: EvalConfig
    weights: WeightsConfig
    max_head_offpolicyness: int
    overdue: str
    overdue_wait_s: float
    max_rejected_share: float
    tensorboard: bool
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    tasks: list[str] = field(default_factory=list)  # names of rollout.tasks, by task id
    gates: dict[str, GateConfig] = field(default_factory=dict)  # of the tasks that have one, by name
    mode: str = "async"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = ""  # checkpoint from which this attempt continues; "": it begins anew
    first_step: int = 0  # train_only: first recorded step of the replay
    num_replayed: int = 0  # train_only: number of groups to replay; they are used instead of prompts.
    # With record.trajectories the heads receive the outputs of all MFCs for their trajectories, whichever worker computes them.
    records: bool = False
    # WorkerGroups.all; empty: all workers are in one group
    worker_groups: list[list[int]] = field(default_factory=list)
    shared_workers: list[int] = field(default_factory=list)  # workers that share devices with generation servers
    devices_per_server: int = 1  # devices of a generation server
    leave_after: int = 0  # step after which the next phase of a hybrid allocation goes on; 0: none follows
    # Of rollout. A step that generates orders at most as much
    group_size: int = 8
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reject_equal_rewards: bool = False


@dataclass(frozen=True)
class ModelWorkerConfig:
    worker: WorkerInfo
    models: list[ModelConfig]  # all models of the run, in the master's order: every worker creates every process group
    mfcs: list[PlacedMFC]
    model_path: str
    tokenizer_path: str
    train: TrainConfig
    weights: WeightsConfig
    store_capacity: int  # groups that this head may hold: (1 + eta) * batch size
    record: RecordConfig = field(default_factory=RecordConfig)  # max_bytes: this head's share
    groups: GroupsConfig | None = None  # mode=sync
    worker_groups: list[list[int]] = field(default_factory=list)  # as in MasterWorkerConfig
    shares_devices: bool = False  # with a generation server; the models are on the device only in training's turns
    mismatch: MismatchConfig | None = None  # null: the first step is not checked

    @property
    def on_cpu(self) -> bool:
        """Whether this worker holds no model, and so uses no GPU."""
        own = [model for model in self.models if self.worker.index in model.workers]
        return bool(own) and all(model.kind == "none" for model in own)


@dataclass(frozen=True)
class RecorderConfig:
    """rollout_only: replaces the model workers."""

    worker: WorkerInfo
    model_path: str
    tokenizer_path: str
    weights: WeightsConfig
    store_capacity: int
    call_timeout_s: float
    max_bytes: int
    words: list[str] = field(default_factory=list)  # train.words
    max_words_bytes: int = 0  # train.max_words_bytes


@dataclass(frozen=True)
class ReplayerConfig:
    """train_only: replaces rollout workers and gserver manager."""

    worker: WorkerInfo
    replay: ReplayConfig
    num_heads: int
    batch_size: int
    max_steps: int
    max_head_offpolicyness: int
    call_timeout_s: float


@dataclass(frozen=True)
class GenerationServerConfig:
    worker: WorkerInfo
    engine: str  # one of config.engines.ENGINES
    model_path: str
    tokenizer_path: str
    generation: GenerationConfig
    torch_threads: int
    verify_tolerance: float = 0.0  # tolerance of the logprob check; 0: no check
    tensor_parallel: int = 1  # GPUs of one SGLang server
    fetch: bool = False  # weights.fetch with `auto` resolved
    fetch_dir: str = ""
    lora: LoraConfig | None = None  # train.lora: versions are adapters of the model
    num_versions: int = 1  # that a server keeps: with interrupt=finish eta + 2
    full_every: int = 1  # weights.full_every; above 1 SGLang's servers write deltas in full to fetch_dir
    shares_devices: bool = False  # with model workers; the engine is on the devices only in generation's turns
    returns_routes: bool = False  # train.routes is not off


@dataclass(frozen=True)
class GserverManagerConfig:
    worker: WorkerInfo
    manager: ManagerConfig
    role: str  # role whose weight versions are served
    num_heads: int
    batch_size: int
    num_rollout_workers: int = 1  # head_policy `grouping` divides them among the heads
    interrupt: str = "abort"  # generation.interrupt
    transport: str = "disk"  # weights.transport
    broadcast_timeout_s: float = 30.0  # weights.broadcast_timeout_s
    fetch: bool = False  # weights.fetch with `auto` resolved
    # Limit for the trainer to replace a version that is damaged on disk: train.call_timeout_s
    replace_timeout_s: float = 1800.0
    shares_devices: bool = False  # the servers sleep in training's turns
    wake_limit_s: float = 0.0  # then the time in which a server must wake: generation.load_timeout_s
    num_servers: int = 1  # of the allocation; POST /scale changes the number
    # POST /scale refuses a smaller number: a server that you start yourself (debug.leave_out) stays
    least_servers: int = 1
    external_servers: bool = False  # asyncrl does not start the servers, so POST /scale refuses every number


@dataclass(frozen=True)
class RolloutWorkerConfig:
    worker: WorkerInfo
    tokenizer_path: str
    prompts: PromptSourceConfig
    eval: EvalConfig
    rollout: RolloutConfig
    num_heads: int
    heartbeat_s: float
    dense_rewards: bool = False  # train.dense_rewards
    branches: bool = False  # train.branches
    with_routes: bool = False  # train.routes is not off
    words: list[str] = field(default_factory=list)  # train.words
    max_words_bytes: int = 0  # train.max_words_bytes
