"""What of a config could not work: every field, its value and the remedy. `validate` is asked once, before anything starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from asyncrl.config.fields import leaf_values
from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.schema import (
    ATTENTIONS,
    AUTO,
    CRITIC,
    INTERRUPT_MODES,
    MODES,
    RECOVERABLE_MODES,
    REF,
    REWARD,
    ConfigError,
    ExperimentConfig,
    PPOConfig,
    authenticates,
    can_be_reached,
    judges_by_group,
)
from asyncrl.dataflow.topology import Allocation, allocation_of, unknown_name
from asyncrl.protocol.names import ACTOR

# reward/<this>, beside reward/<task>
REWARD_METRICS = ("mean", "min", "max", "std", "shaped_mean", "equal_group_share")
TRANSPORTS = ("disk", "broadcast")
BROADCAST_BACKENDS = ("auto", "gloo", "nccl")
WANDB_MODES = ("disabled", "offline", "online")
SCHEDULES = ("linear", "cosine", "constant")
MFC_KINDS = ("inference", "train_step")
MFC_ROLES = (ACTOR, CRITIC, REF, REWARD)
RECOVER = ("auto", "required", "off")
CLUSTERS = ("local", "hosts", "slurm")
AUTHENTICATE = ("on", "off")
SOCKETS = ("auto", "unix", "tcp")
# The largest sensible values, by the name of the field; a larger one is a slip of the keyboard or does not fit into any machine
_LARGEST = {
    "lr": 1,
    "group_size": 65_536,
    "batch_size": 10_000_000,
    "minibatches": 65_536,
    "torch_threads": 1024,
    "num_workers": 65_536,
    "max_concurrent_per_worker": 1_000_000,
    "max_concurrent_rollouts": 10_000_000,
    "max_head_offpolicyness": 10_000,
    "max_new_tokens": 100_000_000,
    "max_prompt_length": 100_000_000,
    "max_running_requests": 1_000_000,
    "max_batch_tokens": 100_000_000,
    "page_size": 1_000_000,
    "num_blocks": 1_000_000_000,
    "nodes": 65_536,
    "cpu_nodes": 65_536,
}
_LARGEST_INTEGER = 2**63 - 1  # messages and checkpoints hold no larger one
_LONGEST_S = 1_000_000_000  # 32 years: longer times overflow the system's clocks
_MOST_PROCESSES = 65_536  # of an allocation
_OURS = "is set by asyncrl"
OWN_SERVER_ARGS = {  # what generation.server_args must not hold, and what to set instead
    "model-path": "use model_path",
    "host": _OURS,
    "port": _OURS,
    "tp-size": "use m of the allocation, such as sglang.d1p1m2+d1p1m1",
    "tensor-parallel-size": "use m of the allocation, such as sglang.d1p1m2+d1p1m1",
    "dp-size": "use d of the allocation: a server each",
    "data-parallel-size": "use d of the allocation: a server each",
    "nnodes": "a server runs on one machine",
    "skip-tokenizer-init": _OURS,
    "incremental-streaming-output": _OURS,
    "weight-version": _OURS,
    "api-key": "is made by asyncrl where the run authenticates (network.authenticate)",
    "admin-api-key": "is made by asyncrl where the run authenticates (network.authenticate)",
}
_RUNS_WITH = {  # what makes an MFC or a role part of a run
    "actor_gen": "mode=sync",
    "actor_inf": "train.ppo.use_decoupled_loss=true",
    "ref_inf": "train.ppo.kl_coef above 0",
    REF: "train.ppo.kl_coef above 0",
    "critic_inf": "train.critic",
    "critic_train": "train.critic",
    CRITIC: "train.critic",
    "rew_inf": "train.reward_model",
    REWARD: "train.reward_model",
}


def validate(config: ExperimentConfig) -> None:
    """Refuse what could not work, before anything starts. Raises ConfigError with every problem found, one a line."""
    found = list(_bad_sizes(config)) or _problems(config)  # comparisons with nan mean nothing
    problems = [f"{name}={value!r}: {remedy}" for name, value, remedy in found]
    if problems:
        raise ConfigError("\n".join(problems))


def _bad_sizes(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """Numbers of any field that are not finite, or larger than makes sense."""
    for path, value, default in leaf_values(config):
        if not isinstance(value, int | float):
            continue
        name = path.rpartition(".")[2]
        otherwise = _LONGEST_S if name.endswith("_s") else _LARGEST_INTEGER if isinstance(value, int) else math.inf
        largest = _LARGEST.get(name, otherwise)
        if isinstance(value, float) and not math.isfinite(value):
            example = f", such as {default:g} (the default)" if isinstance(default, float) else ""
            yield path, value, f"must be a finite number{example}"
        elif value > largest:
            yield path, value, f"must be at most {largest:,}"


def _problems(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """(field, value, remedy) of each problem."""
    yield from _bad_choices(config)
    yield from _bad_numbers(config)
    yield from _bad_algorithm(config)
    yield from _deadlocks(config)
    yield from _bad_modes(config)
    yield from _bad_network(config)
    yield from _bad_cluster(config)
    for name, value in (("experiment", config.experiment), ("trial", config.trial)):
        if not value or "/" in value or value in {".", ".."}:
            yield name, value, "must be a non-empty name without '/' (it names a folder and a key)"
    try:
        allocation = allocation_of(config)
    except ValueError as error:
        yield "allocation", config.allocation, str(error)
    else:
        if max(allocation.generation.size, allocation.num_model_workers) > _MOST_PROCESSES:
            yield (
                "allocation",
                config.allocation,
                f"must have at most {_MOST_PROCESSES:,} servers and model workers each",
            )
            return
        if config.mode != "sync":
            yield from _bad_generation(config, allocation)
        yield from _bad_layout(config, allocation)
    yield from _bad_roles(config)
    replays = config.mode == "train_only"  # without prompts: what is trained on is recorded
    for name, value in (("model_path", config.model_path), ("prompts.path", config.prompts.path)):
        if not value and not (replays and name == "prompts.path"):
            yield name, value, "is required"
    for name, prompts in (("prompts", config.prompts), ("eval.prompts", config.eval.prompts)):
        for option in ("system_prompt", "chat_template_args"):
            if prompts is not None and getattr(prompts, option) and not prompts.chat_template:
                yield f"{name}.{option}", getattr(prompts, option), f"needs {name}.chat_template=true"
    if config.eval.prompts is not None and not config.eval.prompts.path:
        yield "eval.prompts.path", "", "is required (or leave eval.prompts out: no evaluation)"
    if not config.rollout.tasks and not replays:
        yield "rollout.tasks", {}, "name at least one task, e.g. rollout.tasks.default.reward=my_module:reward"
    for name, task in config.rollout.tasks.items():
        for kind, spec in (("reward", task.reward), ("agent", task.agent), ("env", task.env)):
            if spec and ":" not in spec:
                yield f"rollout.tasks.{name}.{kind}", spec, "write package.module:name or path/to/file.py:name"
        if not (task.reward or task.env or task.agent):  # a ChatAgent may give its rewards itself
            yield f"rollout.tasks.{name}", task, "needs a reward function or an env"
        if name in REWARD_METRICS and len(config.rollout.tasks) > 1:
            yield f"rollout.tasks.{name}", task, f"choose another name: reward/{name} is a metric of all tasks together"


def _bad_network(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    network = config.network
    for name in ("tls_key", "tls_ca"):
        if getattr(network, name) and not network.tls_cert:
            yield f"network.{name}", getattr(network, name), "needs network.tls_cert"
    if network.sockets == "unix" and can_be_reached(config):
        yield "network.sockets", "unix", "other machines take part in this run: use auto or tcp"
    if network.tls_cert and not authenticates(config):
        yield "network.tls_cert", network.tls_cert, "needs network.authenticate=on"
    # The group's members meet at torch's TCPStore, the only rendezvous that SGLang's /init_weights_update_group takes: it answers
    # whoever reaches its port. And gloo and NCCL ask nobody for a key.
    if config.weights.transport == "broadcast" and authenticates(config) and can_be_reached(config):
        yield (
            "weights.transport",
            "broadcast",
            "cannot be authenticated, and other machines reach this run; use disk, or network.authenticate=off where nobody "
            "else is in the network",
        )


def _bad_layout(config: ExperimentConfig, allocation: Allocation) -> Iterator[tuple[str, object, str]]:
    """What the MFCs of the run do not agree with: one another, the places that the allocation gives them, train.offload."""
    from asyncrl.dataflow.graph import GENERATE_MFC, build_dataflow  # it imports this module

    train = config.train
    try:
        graph = build_dataflow(train, config.mode)
    except ValueError as error:
        yield "train.extra_mfcs", list(train.extra_mfcs), str(error)
        return
    strangers = [name for name in allocation.names if name not in graph.mfcs and name not in graph.roles]
    for name in strangers:
        yield "allocation", config.allocation, f"{name!r} {_missing(name) or unknown_name(name, graph)}"
    if not strangers:
        try:
            placements, model_of = allocation.place(graph)
        except ValueError as error:
            yield "allocation", config.allocation, str(error)
        else:
            grid = {placement.name: placement.grid for placement in placements}.get(model_of.get(GENERATE_MFC, ""))
            if grid is not None and grid.size != grid.data:
                remedy = f"give {GENERATE_MFC} workers of its own, e.g. {allocation}+{GENERATE_MFC}:d1p1m1"
                remedy += f", or all of them d{grid.size}p1m1" if not allocation.names else ""
                whole = f"{GENERATE_MFC} needs the whole model on each worker, and {grid} cuts it: {remedy}"
                yield "allocation", config.allocation, whole
            if config.record.trajectories and model_of.get(GENERATE_MFC, ACTOR) != ACTOR:
                remedy = f"groups are recorded where they are trained on, and {GENERATE_MFC} makes them elsewhere: set it to false"
                yield "record.trajectories", True, f"{remedy}, or leave {GENERATE_MFC} out of the allocation"
    for role in train.offload:
        if role in graph.mfcs:
            yield "train.offload", train.offload, f"{role!r} is an MFC, name its role: {graph.mfcs[role].role}"
        elif role not in graph.roles:
            yield "train.offload", train.offload, f"{role!r} {_missing(role) or unknown_name(role, graph)}"
    if REF not in graph.roles and (train.ref.path or train.ref.update_interval):
        name, value = ("path", train.ref.path) if train.ref.path else ("update_interval", train.ref.update_interval)
        yield f"train.ref.{name}", value, "nothing asks the reference model; set train.ppo.kl_coef above 0"


def _missing(name: str) -> str:
    """Why a known MFC or role is not part of a run."""
    return f"is not part of this run: it comes with {_RUNS_WITH[name]}" if name in _RUNS_WITH else ""


def _bad_roles(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """What critic, reference and reward model need."""
    train = config.train
    critic, ref = train.critic, train.ref
    if critic is not None:
        for field_name, value, fits, remedy in (
            ("optimizer.lr", critic.optimizer.lr, critic.optimizer.lr > 0, "must be above 0"),
            ("minibatches", critic.minibatches, critic.minibatches >= 1, "must be at least 1"),
            ("eps_clip", critic.eps_clip, critic.eps_clip >= 0, "must not be negative; 0 switches it off"),
            (
                "value_norm_beta",
                critic.value_norm_beta,
                0 <= critic.value_norm_beta < 1,
                "must be at least 0 and below 1: a decay",
            ),
        ):
            if not fits:
                yield f"train.critic.{field_name}", value, remedy
    if train.num_critic_only_steps and critic is None:
        yield (
            "train.num_critic_only_steps",
            train.num_critic_only_steps,
            "there is no critic to train: set train.critic, e.g. train.critic.minibatches=4, or 0 here",
        )
    if train.reward_model is not None and not train.reward_model.path:
        yield "train.reward_model.path", "", "is required: a model with one label; or leave train.reward_model out"
    if not 0 < ref.update_share <= 1:
        yield "train.ref.update_share", ref.update_share, "must be above 0 and at most 1 (1: a plain copy)"


def _bad_generation(config: ExperimentConfig, allocation: Allocation) -> Iterator[tuple[str, object, str]]:
    """What the engine of an allocation needs, and what is not its own."""
    generation, engine, grid = config.generation, allocation.engine, allocation.generation
    if grid.pipe != 1 or (grid.tensor != 1 and engine != "sglang"):
        fitting = f"d{grid.data}p1m{grid.tensor if engine == 'sglang' else 1}"
        why = {"sglang": "has no pipeline stages", "external": "has the parallelism that it was started with"}
        yield (
            "allocation",
            config.allocation,
            f"the engine {engine} {why.get(engine, 'runs data parallel only')}: use {fitting}",
        )
    if engine == "external" and len(generation.urls) != grid.data:
        yield (
            "generation.urls",
            generation.urls,
            f"name {grid.data}, one for each server of allocation={config.allocation}",
        )
    for url in generation.urls:
        if not url.startswith(("http://", "https://")):
            yield "generation.urls", url, "write it as http://host:port"
    if generation.urls and engine != "external":
        yield "generation.urls", generation.urls, f"is for the engine external; this is allocation={config.allocation}"
    if generation.api_key_file and engine != "external":
        yield (
            "generation.api_key_file",
            generation.api_key_file,
            f"is for the engine external; this is allocation={config.allocation}",
        )
    if generation.server_args and engine != "sglang":  # python says where SGLang is, should it be used
        yield (
            "generation.server_args",
            generation.server_args,
            f"is for the engine sglang; this is allocation={config.allocation}",
        )
    for name in generation.server_args:
        if name.startswith("--") or "_" in name or not name:
            shown = name.removeprefix("--").replace("_", "-")
            yield (
                f"generation.server_args.{name}",
                generation.server_args[name],
                f"write {shown}, as on a command line without --",
            )
        if name in OWN_SERVER_ARGS:
            yield f"generation.server_args.{name}", generation.server_args[name], OWN_SERVER_ARGS[name]
    if generation.interrupt == "in_place" and config.weights.verify_logprobs and engine != "transformers":
        yield (
            "weights.verify_logprobs",
            True,
            "SGLang scores nothing while it is paused in place; use another generation.interrupt",
        )


def _bad_choices(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    dtypes = ("float32", "bfloat16", "float16", AUTO)
    choices = (
        ("manager.routing", config.manager.routing, ("round_robin", "least_requests", "least_token_usage")),
        ("manager.head_policy", config.manager.head_policy, ("balanced", "grouping")),
        ("rollout.reward_isolation", config.rollout.reward_isolation, ("process", "thread")),
        ("manager.overdue", config.manager.overdue, ("wait", "drop", "train")),
        ("train.optimizer.schedule", config.train.optimizer.schedule, SCHEDULES),
        *(
            [("train.critic.optimizer.schedule", config.train.critic.optimizer.schedule, SCHEDULES)]
            if config.train.critic
            else []
        ),
        ("train.algorithm", config.train.algorithm, ("", *ALGORITHMS)),
        ("train.correction", config.train.correction, ("", *CORRECTIONS)),
        ("train.dtype", config.train.dtype, ("float32", "bfloat16", AUTO)),
        ("generation.dtype", config.generation.dtype, dtypes),
        ("generation.attention", config.generation.attention, ATTENTIONS),
        ("generation.interrupt", config.generation.interrupt, INTERRUPT_MODES),
        ("weights.transport", config.weights.transport, TRANSPORTS),
        ("weights.fetch", config.weights.fetch, ("auto", "on", "off")),
        ("weights.broadcast_backend", config.weights.broadcast_backend, BROADCAST_BACKENDS),
        ("runtime.log_level", config.runtime.log_level, ("DEBUG", "INFO", "WARNING", "ERROR")),
        ("mode", config.mode, MODES),
        ("recover", config.recover, RECOVER),
        ("cluster", config.cluster, CLUSTERS),
        ("network.authenticate", config.network.authenticate, AUTHENTICATE),
        ("network.sockets", config.network.sockets, SOCKETS),
        ("wandb.mode", config.wandb.mode, WANDB_MODES),
        *((f"eval.modes[{index}]", mode, ("sampled", "greedy")) for index, mode in enumerate(config.eval.modes)),
        *((f"train.extra_mfcs.{name}.kind", mfc.kind, MFC_KINDS) for name, mfc in config.train.extra_mfcs.items()),
        *((f"train.extra_mfcs.{name}.role", mfc.role, MFC_ROLES) for name, mfc in config.train.extra_mfcs.items()),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.3)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            yield name, value, f"{hint}one of {', '.join(allowed)}"
    switches = (
        ("train.tf32", config.train.tf32),
        ("train.gradient_checkpointing", config.train.gradient_checkpointing),
    )
    for name, switch in switches:
        if isinstance(switch, str) and switch != AUTO:
            yield name, switch, f"one of true, false, {AUTO}"


def _bad_numbers(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    train, rollout = config.train, config.rollout
    chunk = rollout.new_tokens_per_chunk
    if isinstance(chunk, str) and chunk != AUTO:
        yield "rollout.new_tokens_per_chunk", chunk, f"must be a number of tokens, or {AUTO}"
    at_least_one = (
        ("train.batch_size", train.batch_size),
        ("train.num_epochs", train.num_epochs),
        ("train.max_tokens_per_mb", train.max_tokens_per_mb),
        ("train.logprob_chunk_tokens", train.logprob_chunk_tokens),
        ("rollout.num_workers", rollout.num_workers),
        ("rollout.group_size", rollout.group_size),
        *([("rollout.new_tokens_per_chunk", chunk)] if isinstance(chunk, int) else []),
        ("rollout.max_concurrent_per_worker", rollout.max_concurrent_per_worker),
        ("rollout.sampling.max_new_tokens", rollout.sampling.max_new_tokens),
        ("manager.max_issues", config.manager.max_issues),
        ("weights.keep", config.weights.keep),
        ("weights.bucket_bytes", config.weights.bucket_bytes),
        ("checkpoint.keep_last", config.checkpoint.keep_last),
        ("runtime.push_credit_items", config.runtime.push_credit_items),
        ("runtime.push_credit_bytes", config.runtime.push_credit_bytes),
        ("runtime.max_message_bytes", config.runtime.max_message_bytes),
        ("generation.max_running_requests", config.generation.max_running_requests),
        ("generation.num_blocks", config.generation.num_blocks),
        ("generation.page_size", config.generation.page_size),
        ("record.every", config.record.every),
        ("record.max_bytes", config.record.max_bytes),
        ("slurm.nodes", config.slurm.nodes),
    )
    for name, count in at_least_one:
        if count < 1:
            yield name, count, "must be at least 1"
    above_zero = (
        ("train.optimizer.lr", train.optimizer.lr),
        ("manager.lease_s", config.manager.lease_s),
        ("manager.heartbeat_s", config.manager.heartbeat_s),
        ("manager.update_fraction", config.manager.update_fraction),
        ("weights.broadcast_timeout_s", config.weights.broadcast_timeout_s),
        ("rollout.reward_timeout_s", rollout.reward_timeout_s),
        ("rollout.request_timeout_s", rollout.request_timeout_s),
        ("rollout.rollout_timeout_s", rollout.rollout_timeout_s),
        ("runtime.start_timeout_s", config.runtime.start_timeout_s),
        ("runtime.resend_after_s", config.runtime.resend_after_s),
        ("debug.wait_s", config.debug.wait_s),
        ("slurm.signal_s", config.slurm.signal_s),
        ("network.host_lost_after_s", config.network.host_lost_after_s),
        ("network.cut_off_limit_s", config.network.cut_off_limit_s),
        ("network.agents_limit_s", config.network.agents_limit_s),
        ("wandb.init_timeout_s", config.wandb.init_timeout_s),
        ("wandb.finish_timeout_s", config.wandb.finish_timeout_s),
    )
    for name, number in above_zero:
        if number <= 0:
            yield name, number, "must be above 0"
    not_negative = (
        ("train.max_steps", train.max_steps),
        ("train.keep_bad_batches", train.keep_bad_batches),
        ("train.max_skipped_steps", train.max_skipped_steps),
        ("train.save_every_steps", train.save_every_steps),
        ("train.save_every_epochs", train.save_every_epochs),
        ("train.save_every_s", train.save_every_s),
        ("train.num_critic_only_steps", train.num_critic_only_steps),
        ("train.ref.update_interval", train.ref.update_interval),
        ("checkpoint.every_steps", config.checkpoint.every_steps),
        ("checkpoint.every_epochs", config.checkpoint.every_epochs),
        ("checkpoint.every_s", config.checkpoint.every_s),
        ("checkpoint.on_stop_s", config.checkpoint.on_stop_s),
        ("slurm.time_s", config.slurm.time_s),
        ("slurm.gpus_per_node", config.slurm.gpus_per_node),
        ("slurm.cpus_per_node", config.slurm.cpus_per_node),
        ("slurm.cpu_nodes", config.slurm.cpu_nodes),
        ("slurm.cpu_cpus_per_node", config.slurm.cpu_cpus_per_node),
        ("eval.every_steps", config.eval.every_steps),
        ("eval.every_epochs", config.eval.every_epochs),
        ("eval.every_s", config.eval.every_s),
        ("manager.max_concurrent_rollouts", config.manager.max_concurrent_rollouts),
        ("manager.max_groups_per_server", config.manager.max_groups_per_server),
        ("replay.first_step", config.replay.first_step),
        ("runtime.max_restarts", config.runtime.max_restarts),
        ("rollout.reward_memory_bytes", rollout.reward_memory_bytes),
        ("weights.verify_tolerance", config.weights.verify_tolerance),
    )
    for name, number in not_negative:
        if number < 0:
            yield name, number, "must not be negative; 0 switches it off"
    faults = config.runtime.faults
    for name in ("drop", "duplicate", "corrupt", "delay"):
        if not 0 <= (share := getattr(faults, name)) <= 0.5:
            yield (
                f"runtime.faults.{name}",
                share,
                "is a share of all messages, from 0 to 0.5: with more nothing would arrive",
            )
    if faults.delay_s < 0:
        yield "runtime.faults.delay_s", faults.delay_s, "must not be negative"
    if config.manager.drain_timeout_s < 0:
        yield "manager.drain_timeout_s", config.manager.drain_timeout_s, "must be 0 (move what runs at once) or more"
    if config.eval.num_prompts < 0:
        yield "eval.num_prompts", config.eval.num_prompts, "must be at least 1, or 0 for all"
    if config.manager.update_fraction > 1:
        yield (
            "manager.update_fraction",
            config.manager.update_fraction,
            "must be at most 1: all servers at the same time",
        )
    if not 0 < rollout.sampling.top_p <= 1:
        yield "rollout.sampling.top_p", rollout.sampling.top_p, "must be above 0 and at most 1 (1: no cut)"
    if rollout.sampling.top_k < 1 and rollout.sampling.top_k != -1:
        yield "rollout.sampling.top_k", rollout.sampling.top_k, "must be at least 1, or -1 for no cut"
    if rollout.success_rate_lb > rollout.success_rate_ub:
        bound = rollout.success_rate_ub
        yield (
            "rollout.success_rate_lb",
            rollout.success_rate_lb,
            f"is above rollout.success_rate_ub={bound}: all would be rejected",
        )
    if config.manager.max_head_offpolicyness < 0:
        yield "manager.max_head_offpolicyness", config.manager.max_head_offpolicyness, "must be 0 (synchronous) or more"
    if rollout.sampling.temperature <= 0 and not rollout.sampling.greedy:
        yield (
            "rollout.sampling.temperature",
            rollout.sampling.temperature,
            "must be above 0; rollout.sampling.greedy=true is greedy",
        )
    if config.generation.max_running_requests > config.generation.max_batch_tokens:
        running = config.generation.max_running_requests
        yield (
            "generation.max_running_requests",
            running,
            "must be at most generation.max_batch_tokens: each needs a token a pass",
        )
    if config.eval.prompts is not None and not config.eval.modes:
        yield "eval.modes", [], "name sampled, greedy or both (or leave eval.prompts out: no evaluation)"


def ppo_problems(ppo: PPOConfig) -> Iterator[tuple[str, object, str]]:
    """(field, value, remedy) of values for which the formulas of asyncrl/algorithms make no sense."""
    for name, allowed in (
        ("policy_loss", ("clip", "cispo")),
        ("importance_level", ("token", "sequence")),
        ("behav_imp_weight_mode", ("mask", "clamp")),
        ("baseline", ("none", "group_mean", "leave_one_out")),
        ("advantage_norm", ("group", "batch", "none")),
        ("kl_in", ("reward", "loss")),
        ("kl_estimator", ("k1", "k2", "k3")),
        ("loss_normalization", ("token", "sequence", "constant")),
    ):
        value = getattr(ppo, name)
        if value not in allowed:
            nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.3)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            yield name, value, f"{hint}one of {', '.join(allowed)}"
    if not 0 < ppo.eps_clip <= 1:
        yield "eps_clip", ppo.eps_clip, "must be above 0 and at most 1 (1: no lower bound)"
    for name, least, instead in (
        ("eps_clip_higher", 0, "null for eps_clip"),
        ("c_clip", 1, "null for no dual clip"),
        ("behav_imp_weight_cap", 0, "null for no cap"),
        ("behav_imp_weight_floor", 0, "null for no floor"),
        ("early_stop_imp_ratio", 1, "null for off"),
        ("early_stop_kl", 0, "null for off"),
    ):
        bound = getattr(ppo, name)
        if bound is not None and bound <= least:
            yield name, bound, f"must be above {least}, or {instead}"
    floor, cap = ppo.behav_imp_weight_floor, ppo.behav_imp_weight_cap
    if floor is not None and cap is not None and floor >= cap:
        yield "behav_imp_weight_floor", floor, f"must be below behav_imp_weight_cap={cap:g}"
    if ppo.c_clip is not None and ppo.policy_loss == "cispo":
        yield "c_clip", ppo.c_clip, "is for policy_loss=clip; set it to null"
    if ppo.minibatches < 1:
        yield "minibatches", ppo.minibatches, "must be at least 1"
    if ppo.use_decoupled_loss and ppo.recompute_logprob:
        yield "recompute_logprob", True, "is for the naive loss; set use_decoupled_loss=false"
    if ppo.kl_adaptive and ppo.kl_in == "loss":
        yield "kl_adaptive", True, "is for kl_in=reward: in the loss the coefficient is fixed"
    if ppo.loss_normalization == "constant" and ppo.loss_length < 1:
        yield (
            "loss_length",
            ppo.loss_length,
            "is what loss_normalization=constant divides by: the longest response, in tokens",
        )
    if ppo.overlong_penalty < 0:
        yield "overlong_penalty", ppo.overlong_penalty, "must not be negative; 0 switches it off"
    if ppo.overlong_penalty > 0 and ppo.overlong_length < 1:
        yield "overlong_length", ppo.overlong_length, "must be at least 1, such as rollout.sampling.max_new_tokens"
    if not 0 < ppo.overlong_buffer <= 1:
        yield "overlong_buffer", ppo.overlong_buffer, "must be above 0 and at most 1: a share of overlong_length"


def _bad_algorithm(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """The algorithm by itself, and with what it needs."""
    ppo = config.train.ppo
    for name, value, remedy in ppo_problems(ppo):
        yield f"train.ppo.{name}", value, remedy
    name, choice = ("advantage_norm", "group") if ppo.advantage_norm == "group" else ("baseline", ppo.baseline)
    if judges_by_group(ppo) and config.rollout.group_size == 1:
        instead = "batch" if name == "advantage_norm" else "none"
        yield (
            f"train.ppo.{name}",
            choice,
            f"a group of one has no advantage; use {instead}, or rollout.group_size > 1",
        )
    if judges_by_group(ppo) and config.train.critic is not None:
        remedy = "does without values; with train.critic use train.ppo.baseline=none and train.ppo.advantage_norm=batch or none"
        yield f"train.ppo.{name}", choice, remedy
    if config.rollout.reject_equal_rewards and config.rollout.group_size == 1:
        yield "rollout.reject_equal_rewards", True, "would reject every group of one; use rollout.group_size > 1"
    if config.rollout.reject_equal_rewards and config.train.reward_model is not None:
        yield (
            "rollout.reject_equal_rewards",
            True,
            "sees the rewards of functions only; with train.reward_model set it to false",
        )


def _bad_modes(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """What one mode needs and another has no use for."""
    replay = config.replay
    if config.mode == "sync":
        yield from _bad_sync(config)
    if config.recover == "required" and config.mode not in RECOVERABLE_MODES:
        yield "recover", config.recover, f"mode={config.mode} writes no checkpoints; use auto, which begins it anew"
    if config.mode == "train_only":
        if not replay.path:
            yield "replay.path", "", "is required with mode=train_only: a run that recorded trajectories"
        if config.eval.prompts is not None:
            yield (
                "eval.prompts",
                config.eval.prompts.path,
                "nothing generates with mode=train_only; set eval.prompts=null",
            )
    elif replay.path or replay.first_step:
        name, value = ("replay.path", replay.path) if replay.path else ("replay.first_step", replay.first_step)
        yield name, value, f"is read with mode=train_only only, this is mode={config.mode}"
    if config.mode != "async" and config.weights.transport == "broadcast":
        yield (
            "weights.transport",
            "broadcast",
            f"sends weights from a trainer to servers, and mode={config.mode} has only one of them; use disk",
        )
    limit_s, whole_s = config.weights.broadcast_timeout_s, config.manager.update_timeout_s
    if config.weights.transport == "broadcast" and limit_s >= whole_s:
        remedy = f"must be below manager.update_timeout_s={whole_s:g}, the limit of a whole update"
        yield "weights.broadcast_timeout_s", limit_s, remedy
    if config.mode != "async" and config.weights.verify_logprobs:
        yield (
            "weights.verify_logprobs",
            True,
            f"compares servers with a trainer, and mode={config.mode} has only one of them; set it to false",
        )
    theirs = config.allocation.startswith(("sglang.", "external."))
    if config.weights.verify_logprobs and theirs and config.generation.interrupt == "in_place":
        yield (
            "weights.verify_logprobs",
            True,
            "SGLang scores nothing while its requests stand still; use another generation.interrupt than in_place",
        )
    if config.mode == "rollout_only" and config.train.target_reward is not None:
        yield (
            "train.target_reward",
            config.train.target_reward,
            "nothing is trained with mode=rollout_only; set it to null",
        )


def _bad_cluster(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """What more than one host needs."""
    hosts = config.hosts
    if config.cluster == "hosts" and not hosts:
        yield "hosts", [], "name the hosts, this one among them: hosts=[node1,node2]; or use cluster=local"
    if config.cluster == "local" and hosts:
        yield "hosts", hosts, "is for cluster=hosts; add that, or leave hosts out"
    slurm = config.slurm
    for name, value in (
        *((f"slurm.options[{at}]", option) for at, option in enumerate(slurm.options)),
        *((f"slurm.cpu_options[{at}]", option) for at, option in enumerate(slurm.cpu_options)),
        *((f"slurm.srun_options[{at}]", option) for at, option in enumerate(slurm.srun_options)),
    ):
        if not value.startswith("-"):
            yield name, value, "write it as on the command line: --name=value"
    for name in ("partition", "memory_per_node", "account", "qos", "cpu_partition", "cpu_memory_per_node"):
        if any(character.isspace() for character in getattr(slurm, name)):
            yield f"slurm.{name}", getattr(slurm, name), "must not have blanks"
    if not slurm.cpu_nodes and (slurm.cpu_partition or slurm.cpu_cpus_per_node or slurm.cpu_options):
        yield "slurm.cpu_nodes", 0, "the other slurm.cpu_... fields are of a heterogeneous job: give it CPU nodes"
    for host in hosts:
        if not host or "/" in host or any(character.isspace() for character in host):
            yield "hosts", hosts, f"{host!r} is neither a name nor an address of a host"
    for host in sorted({host for host in hosts if hosts.count(host) > 1}):
        yield "hosts", hosts, f"{host} is named twice"
    if config.cluster != "local" and config.debug.leave_out:
        yield "debug.leave_out", config.debug.leave_out, f"is for cluster=local; this is cluster={config.cluster}"


def _bad_sync(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """What takes rollout workers."""
    for name, task in config.rollout.tasks.items():
        for kind, spec in (("agent", task.agent), ("env", task.env)):
            if spec:
                remedy = (
                    f"mode=sync has tasks of one response and a reward function: name rollout.tasks.{name}.reward alone"
                )
                yield f"rollout.tasks.{name}.{kind}", spec, f"{remedy}, or use mode=async"
    if config.train.wait_for_full_lag:
        yield "train.wait_for_full_lag", True, "with mode=sync no data is old; set it to false, or use mode=async"


def _deadlocks(config: ExperimentConfig) -> Iterator[tuple[str, object, str]]:
    """Settings under which a batch could never be full."""
    manager, batch_size = config.manager, config.train.batch_size
    has_manager = config.mode != "sync"
    if has_manager and 0 < manager.max_concurrent_rollouts < batch_size and manager.max_head_offpolicyness == 0:
        # with eta = 0 this is slow, not stuck: tickets finish and free their slot; named because it is never meant
        yield (
            "manager.max_concurrent_rollouts",
            manager.max_concurrent_rollouts,
            f"is below train.batch_size={batch_size}: generation would idle; use 0 (no bound but staleness) or >= {batch_size}",
        )
    if has_manager and manager.heartbeat_s * 2 >= manager.lease_s:
        yield "manager.lease_s", manager.lease_s, f"must be more than twice manager.heartbeat_s={manager.heartbeat_s}"
    longest = max(config.rollout.sampling.max_new_tokens, 1)
    capacity = config.generation.num_blocks * config.generation.page_size
    if 0 < capacity < longest + config.prompts.max_prompt_length:
        needed = -(-(longest + config.prompts.max_prompt_length) // config.generation.page_size)
        yield (
            "generation.num_blocks",
            config.generation.num_blocks,
            f"cannot hold one full sequence; use at least {needed}",
        )
