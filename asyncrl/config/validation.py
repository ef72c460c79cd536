"""Validation: find every field of a config that cannot work, with its value and the remedy.

launch/experiment.py calls this once, before anything starts. Limits of single numbers and allowed words are declared with
the fields (schema.py); dataflow/layout_checks.py checks layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from asyncrl.config.fields import leaf_values
from asyncrl.config.limits import allowed_in, limits_of
from asyncrl.config.modes import mode_of
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.schema import (
    AUTO,
    ExperimentConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    authenticates,
    can_be_reached,
    judges_by_group,
    model_settings,
    reward_models,
)
from asyncrl.config.transports import FILES, transport_of

Problem = tuple[str, object, str]  # field, value, remedy

# Metrics of all tasks together are named reward/<one of these>. Each task has a metric reward/<task>, so no task may have one of
# these names
REWARD_METRICS = ("mean", "min", "max", "std", "shaped_mean", "dense_mean", "equal_group_share")
_LARGEST_INTEGER = 2**63 - 1  # the largest that messages and checkpoints can hold
_LONGEST_S = 1_000_000_000  # 32 years: longer times overflow the system's clocks


def problems_of_sizes(config: ExperimentConfig) -> Iterator[Problem]:
    """Numbers that are not finite, or larger than makes sense."""
    for path, value, entry in leaf_values(config):
        if not isinstance(value, int | float):
            continue
        otherwise = _LONGEST_S if path.endswith("_s") else _LARGEST_INTEGER if isinstance(value, int) else math.inf
        largest = min(limits_of(entry).at_most, otherwise)
        if isinstance(value, float) and not math.isfinite(value):
            example = f", such as {entry.default:g} (the default)" if isinstance(entry.default, float) else ""
            yield path, value, f"must be a finite number{example}"
        elif value > largest:
            yield path, value, f"must be at most {largest:,}"


def problems_of_fields(config: ExperimentConfig) -> Iterator[Problem]:
    """All problems except those of sizes (`problems_of_sizes`) and layouts (dataflow/layout_checks.py)."""
    yield from _bad_choices(config)
    yield from _bad_switches(config)
    yield from _bad_numbers(config)
    yield from _bad_algorithm(config)
    yield from _bad_streaming(config)
    yield from _deadlocks(config)
    yield from _bad_modes(config)
    yield from _bad_network(config)
    yield from _bad_cluster(config)
    for name, value in (("experiment", config.experiment), ("trial", config.trial)):
        if not value or "/" in value or value in {".", ".."}:
            yield name, value, "must be a non-empty name without '/' (it names a folder and a key)"
    yield from _bad_roles(config)
    replays = mode_of(config.mode).replays  # the run needs no prompts
    for name, value in (("model_path", config.model_path), ("prompts.path", config.prompts.path)):
        if not value and not (replays and name == "prompts.path"):
            yield name, value, "is required"
    texts = config.train.ptx.texts if config.train.ptx is not None else None
    for name, prompts in (
        ("prompts", config.prompts),
        ("eval.prompts", config.eval.prompts),
        ("train.ptx.texts", texts),
    ):
        for option in ("system_prompt", "chat_template_args"):
            if prompts is not None and getattr(prompts, option) and not prompts.chat_template:
                yield f"{name}.{option}", getattr(prompts, option), f"needs {name}.chat_template=true"
    yield from _bad_template_arguments(config)
    yield from _bad_ptx(config)
    if config.eval.prompts is not None and not config.eval.prompts.path:
        yield "eval.prompts.path", "", "is required (or leave eval.prompts out: no evaluation)"
    if not config.rollout.tasks and not replays:
        yield "rollout.tasks", {}, "name at least one task, e.g. rollout.tasks.default.reward=my_module:reward"
    for name, task in config.rollout.tasks.items():
        for kind, spec in (("reward", task.reward), ("agent", task.agent), ("env", task.env)):
            if spec and ":" not in spec:
                yield f"rollout.tasks.{name}.{kind}", spec, "write package.module:name or path/to/file.py:name"
        if not (task.reward or task.env or task.agent):  # a ChatAgent may compute its rewards itself
            yield f"rollout.tasks.{name}", task, "needs a reward function or an env"
        if name in REWARD_METRICS and len(config.rollout.tasks) > 1:
            yield f"rollout.tasks.{name}", task, f"choose another name: reward/{name} is a metric of all tasks together"


# Arguments of transformers' apply_chat_template that asyncrl sets itself, or that would change what it returns
_NO_TEMPLATE_VARIABLES = {
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
}


def _bad_template_arguments(config: ExperimentConfig) -> Iterator[Problem]:
    """Every turn of a rollout has the template arguments of its prompt, so an agent may not have others."""
    texts = config.train.ptx.texts if config.train.ptx is not None else None
    for name, prompts in (
        ("prompts", config.prompts),
        ("eval.prompts", config.eval.prompts),
        ("train.ptx.texts", texts),
    ):
        for argument in (
            sorted(_NO_TEMPLATE_VARIABLES & prompts.chat_template_args.keys()) if prompts is not None else ()
        ):
            value = prompts.chat_template_args[argument]  # type: ignore[union-attr]
            yield f"{name}.chat_template_args.{argument}", value, "asyncrl sets it; leave it out"
    for task_name, task in config.rollout.tasks.items():
        own = task.agent_args.get("chat_template_args")
        for name, prompts in (("prompts", config.prompts), ("eval.prompts", config.eval.prompts)):
            if own is not None and prompts is not None and prompts.chat_template and own != prompts.chat_template_args:
                yield (
                    f"rollout.tasks.{task_name}.agent_args.chat_template_args",
                    own,
                    f"differs from {name}.chat_template_args={prompts.chat_template_args}, which all turns have; leave it out, "
                    f"and set {name}.chat_template_args",
                )


def _bad_ptx(config: ExperimentConfig) -> Iterator[Problem]:
    ptx, ppo = config.train.ptx, config.train.ppo
    if ptx is None:
        return
    if not ptx.texts.path:
        yield "train.ptx.texts.path", "", "is required (or leave train.ptx out: no supervised texts)"
    if not ptx.texts.answer_key:
        yield "train.ptx.texts.answer_key", "", "is required: the answers are what is trained"
    if ptx.batch_size < ppo.minibatches * ppo.epochs:
        times = f" * epochs={ppo.epochs}" if ppo.epochs > 1 else ""
        remedy = f"must be at least train.ppo.minibatches={ppo.minibatches}{times}, one text for each optimizer step"
        yield "train.ptx.batch_size", ptx.batch_size, remedy


def _bad_network(config: ExperimentConfig) -> Iterator[Problem]:
    network = config.network
    for name in ("tls_key", "tls_ca"):
        if getattr(network, name) and not network.tls_cert:
            yield f"network.{name}", getattr(network, name), "needs network.tls_cert"
    if network.sockets == "unix" and can_be_reached(config):
        yield "network.sockets", "unix", "other machines take part in this run; use auto or tcp"
    if network.tls_cert and not authenticates(config):
        yield "network.tls_cert", network.tls_cert, "needs network.authenticate=on"
    # The members of the process group meet at torch's TCPStore, the only rendezvous that SGLang's /init_weights_update_group
    # supports. It answers every client that reaches its port. Gloo and NCCL do not authenticate either.
    transport = config.weights.transport
    if transport_of(transport).forms_groups and authenticates(config) and can_be_reached(config):
        yield (
            "weights.transport",
            transport,
            f"cannot be authenticated, and other machines reach this run; use {FILES}, or network.authenticate=off in a network "
            "that you share with no one else",
        )


def _bad_roles(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of critic, teacher, reference and reward model."""
    train = config.train
    critic, ref = train.critic, train.ref
    if critic is not None and not 0 <= critic.value_norm_beta < 1:
        yield "train.critic.value_norm_beta", critic.value_norm_beta, "must be at least 0 and below 1 (it is a decay)"
    if train.num_critic_only_steps and critic is None:
        yield (
            "train.num_critic_only_steps",
            train.num_critic_only_steps,
            "there is no critic to train: set train.critic, e.g. train.critic.minibatches=4, or set this to 0",
        )
    if train.reward_model is not None and not train.reward_model.path:
        yield "train.reward_model.path", "", "is required: a model with one label; or leave train.reward_model out"
    if train.teacher is not None and not train.teacher.path:
        yield "train.teacher.path", "", "is required: a model with the actor's tokens; or leave train.teacher out"
    for name, model in train.reward_models.items():
        if not re.fullmatch(r"[a-z0-9_]+", name):
            yield (
                "train.reward_models",
                name,
                "is the end of a role's name: use lower-case letters, digits and underscores",
            )
        if not model.path:
            yield f"train.reward_models.{name}.path", "", "is required: a model with one label"
    if train.ema is not None and not 0 < train.ema.decay < 1:
        yield "train.ema.decay", train.ema.decay, "must be above 0 and below 1 (it is a decay)"
    if not 0 < ref.update_share <= 1:
        yield "train.ref.update_share", ref.update_share, "must be above 0 and at most 1 (1: a plain copy)"


def _bad_choices(config: object) -> Iterator[Problem]:
    """Words that are not among those of their field. config: any section, or the whole config."""
    for path, value, entry in leaf_values(config):
        if not (allowed := allowed_in(entry)):
            continue
        several = {f"{path}[{at}]": one for at, one in enumerate(value)} if isinstance(value, list) else {path: value}
        for name, word in several.items():
            if word not in allowed:
                yield name, word, one_of(word, allowed)


def _bad_switches(config: ExperimentConfig) -> Iterator[Problem]:
    switches = (
        ("train.tf32", config.train.tf32),
        ("train.gradient_checkpointing", config.train.gradient_checkpointing),
    )
    for name, switch in switches:
        if isinstance(switch, str) and switch != AUTO:
            yield name, switch, f"one of true, false, {AUTO}"


def _bad_numbers(config: ExperimentConfig) -> Iterator[Problem]:
    rollout = config.rollout
    chunk = rollout.new_tokens_per_chunk
    if isinstance(chunk, str) and chunk != AUTO:
        yield "rollout.new_tokens_per_chunk", chunk, f"must be a number of tokens, or {AUTO}"
    for path, value, entry in leaf_values(config):
        remedy = limits_of(entry).problem(value) if isinstance(value, int | float) else ""
        if remedy:
            yield path, value, remedy
    faults = config.runtime.faults
    for name in ("drop", "duplicate", "corrupt", "delay"):
        if not 0 <= (share := getattr(faults, name)) <= 0.5:
            yield (
                f"runtime.faults.{name}",
                share,
                "must be a share of all messages from 0 to 0.5; with more, messages would hardly arrive",
            )
    if config.manager.update_fraction > 1:
        yield (
            "manager.update_fraction",
            config.manager.update_fraction,
            "must be at most 1 (1: all servers at the same time)",
        )
    if not 0 < rollout.sampling.top_p <= 1:
        yield "rollout.sampling.top_p", rollout.sampling.top_p, "must be above 0 and at most 1 (1: all tokens)"
    if rollout.sampling.top_k < 1 and rollout.sampling.top_k != -1:
        yield "rollout.sampling.top_k", rollout.sampling.top_k, "must be at least 1, or -1 for all tokens"
    if rollout.success_rate_lb > rollout.success_rate_ub:
        bound = rollout.success_rate_ub
        yield (
            "rollout.success_rate_lb",
            rollout.success_rate_lb,
            f"is above rollout.success_rate_ub={bound}: all groups would be rejected",
        )
    if rollout.sampling.temperature <= 0 and not rollout.sampling.greedy:
        yield (
            "rollout.sampling.temperature",
            rollout.sampling.temperature,
            "must be above 0; for greedy sampling set rollout.sampling.greedy=true",
        )
    if config.generation.max_running_requests > config.generation.max_batch_tokens:
        running = config.generation.max_running_requests
        yield (
            "generation.max_running_requests",
            running,
            "must be at most generation.max_batch_tokens: each running request takes one token of every forward pass",
        )
    if config.eval.prompts is not None and not config.eval.modes:
        yield "eval.modes", [], "name sampled, greedy or both (or leave eval.prompts out: no evaluation)"


def one_of(value: object, allowed: Sequence[str]) -> str:
    """The remedy for a value that is none of the allowed ones."""
    words = [word for word in allowed if word]
    return f"{did_you_mean(str(value), words, cutoff=0.3)}one of {', '.join(words)}"


def ppo_problems(ppo: PPOConfig) -> Iterator[Problem]:
    """Values for which the formulas of asyncrl/algorithms are undefined."""
    yield from _bad_choices(ppo)
    yield from _bad_ppo(ppo)


def _bad_ppo(ppo: PPOConfig) -> Iterator[Problem]:
    """Problems of `ppo_problems` besides those of words."""
    if not 0 < ppo.eps_clip <= 1:
        yield "eps_clip", ppo.eps_clip, "must be above 0 and at most 1 (1: no lower bound)"
    for name, least, instead in (
        ("eps_clip_higher", 0, "null for eps_clip"),
        ("c_clip", 1, "null for no dual clip"),
        ("behav_imp_weight_cap", 0, "null for no cap"),
        ("behav_imp_weight_floor", 0, "null for no floor"),
        ("early_stop_imp_ratio", 1, "null for off"),
        ("early_stop_kl", 0, "null for off"),
        ("entropy_target", 0, "null for a fixed entropy_coef"),
    ):
        bound = getattr(ppo, name)
        if bound is not None and bound <= least:
            yield name, bound, f"must be above {least}, or {instead}"
    floor, cap = ppo.behav_imp_weight_floor, ppo.behav_imp_weight_cap
    if floor is not None and cap is not None and floor >= cap:
        yield "behav_imp_weight_floor", floor, f"must be below behav_imp_weight_cap={cap:g}"
    if ppo.c_clip is not None and ppo.policy_loss == "cispo":
        yield "c_clip", ppo.c_clip, "applies to policy_loss=clip only; set it to null"
    if ppo.minibatches < 1:
        yield "minibatches", ppo.minibatches, "must be at least 1"
    if ppo.use_decoupled_loss and ppo.recompute_logprob:
        yield "recompute_logprob", True, "applies to the naive loss only; set use_decoupled_loss=false"
    if ppo.kl_adaptive and ppo.kl_in == "loss":
        yield "kl_adaptive", True, "applies to kl_in=reward only: in the loss the coefficient is fixed; set it to false"
    if ppo.loss_normalization == "constant" and ppo.loss_length < 1:
        yield (
            "loss_length",
            ppo.loss_length,
            "must be the length of the longest response in tokens: loss_normalization=constant divides by it",
        )
    if ppo.overlong_penalty < 0:
        yield "overlong_penalty", ppo.overlong_penalty, "must not be negative; 0 switches it off"
    if ppo.overlong_penalty > 0 and ppo.overlong_length < 1:
        yield "overlong_length", ppo.overlong_length, "must be at least 1, such as rollout.sampling.max_new_tokens"
    if not 0 < ppo.overlong_buffer <= 1:
        yield "overlong_buffer", ppo.overlong_buffer, "must be above 0 and at most 1 (a share of overlong_length)"


def _bad_algorithm(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of the loss, and of the fields that it depends on."""
    ppo = config.train.ppo
    for name, value, remedy in _bad_ppo(ppo):
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
        remedy = "does not use values; with train.critic use train.ppo.baseline=none and train.ppo.advantage_norm=batch or none"
        yield f"train.ppo.{name}", choice, remedy
    if config.rollout.reject_equal_rewards and config.rollout.group_size == 1:
        yield "rollout.reject_equal_rewards", True, "would reject every group of one; use rollout.group_size > 1"
    if config.rollout.reject_equal_rewards and reward_models(config.train):
        field = "train.reward_model" if config.train.reward_model is not None else "train.reward_models"
        remedy = f"compares the rewards of reward functions only; with {field} set it to false"
        yield "rollout.reject_equal_rewards", True, remedy


def _bad_streaming(config: ExperimentConfig) -> Iterator[Problem]:
    """Fields with which a step cannot train on a part of its batch before the rest has arrived."""
    train = config.train
    if not train.streaming:
        return
    needs = "with train.streaming"
    if train.streaming_order == "tokens" and train.streaming_tokens < 1:
        yield "train.streaming_tokens", train.streaming_tokens, "must be at least 1 with train.streaming_order=tokens"
    mode = mode_of(config.mode)
    if mode.workers_generate or not mode.trains:
        yield (
            "train.streaming",
            True,
            f"mode={config.mode} has no groups that arrive one after another; set it to false",
        )
    if train.ppo.minibatches != 1:
        remedy = "must be 1 " + needs + ": minibatches are drawn from the whole batch"
        yield "train.ppo.minibatches", train.ppo.minibatches, remedy
    if train.ptx is not None:
        yield (
            "train.ptx",
            train.ptx.texts.path,
            f"is divided among the minibatches of a whole batch; {needs} leave it out",
        )
    if train.ppo.epochs != 1:
        yield "train.ppo.epochs", train.ppo.epochs, f"must be 1 {needs}: the first pass ends with the step"
    if train.ppo.advantage_norm == "batch":
        remedy = f"needs the whole batch before any gradient; {needs} use group or none"
        yield "train.ppo.advantage_norm", "batch", remedy
    if train.critic is not None and train.critic.value_norm:
        remedy = f"must be false {needs}: the critic's units change with the returns of the whole batch"
        yield "train.critic.value_norm", True, remedy
    if train.critic is not None and train.critic.minibatches != 1:
        remedy = "must be 1 " + needs + ": minibatches are drawn from the whole batch"
        yield "train.critic.minibatches", train.critic.minibatches, remedy
    offloaded = [role for role in train.offload if role in ("actor", "critic")]
    if offloaded:
        remedy = f"{' and '.join(offloaded)} must stay on the device {needs}: offloading drops the gradients of earlier parts"
        yield "train.offload", train.offload, remedy
    if train.wait_for_full_lag:
        yield "train.wait_for_full_lag", True, f"waits until the whole batch is stored; set it to false {needs}"


def _bad_modes(config: ExperimentConfig) -> Iterator[Problem]:
    """Fields that the mode requires or does not support."""
    mode, replay = mode_of(config.mode), config.replay
    if mode.workers_generate:
        yield from _bad_sync(config)
    if config.recover == "required" and not mode.is_recoverable:
        yield "recover", config.recover, f"mode={config.mode} writes no checkpoints; use auto, which begins anew"
    if mode.replays:
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
        yield name, value, f"is used with mode=train_only only; this is mode={config.mode}"
    transport = config.weights.transport
    from_memory = transport_of(transport).from_memory
    if not mode.updates_servers and from_memory:
        yield (
            "weights.transport",
            transport,
            f"sends weights from a trainer to servers, and mode={config.mode} has only one of them; use {FILES}",
        )
    if not mode.has_detached_groups:
        never = f"with mode={config.mode} no worker restarts alone"
        if config.train.actor_inf_on_missing:
            yield "train.actor_inf_on_missing", config.train.actor_inf_on_missing, f"{never}; leave it empty"
        for place, model in model_settings(config.train).values():
            if isinstance(model, RefConfig | RewardModelConfig) and model.on_missing != "wait":
                yield f"{place}.on_missing", model.on_missing, f"{never}; set it to wait"
    if from_memory and config.weights.full_every > 1:
        sent = f"weights.transport={transport} sends all tensors from memory"
        remedy = f"makes files smaller, and {sent}; set it to 1, or use {FILES}"
        yield "weights.full_every", config.weights.full_every, remedy
    limit_s, whole_s = config.weights.broadcast_timeout_s, config.manager.update_timeout_s
    if from_memory and limit_s >= whole_s:
        remedy = f"must be below manager.update_timeout_s={whole_s:g}, the limit of a whole update"
        yield "weights.broadcast_timeout_s", limit_s, remedy
    if not mode.updates_servers and config.weights.verify_logprobs:
        yield (
            "weights.verify_logprobs",
            True,
            f"compares servers with a trainer, and mode={config.mode} has only one of them; set it to false",
        )
    if not mode.trains and config.train.target_reward is not None:
        yield (
            "train.target_reward",
            config.train.target_reward,
            "nothing is trained with mode=rollout_only; set it to null",
        )


def _bad_cluster(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of runs on more than one host."""
    hosts = config.hosts
    if config.cluster == "hosts" and not hosts:
        yield "hosts", [], "name the hosts, including this one: hosts=[node1,node2]; or use cluster=local"
    if config.cluster == "local" and hosts:
        yield "hosts", hosts, "applies to cluster=hosts only; set that, or leave hosts out"
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
        yield "slurm.cpu_nodes", 0, "must be at least 1 if other slurm.cpu_... fields are set (a heterogeneous job)"
    for host in hosts:
        if not host or "/" in host or any(character.isspace() for character in host):
            yield "hosts", hosts, f"{host!r} is neither a name nor an address of a host"
    for host in sorted({host for host in hosts if hosts.count(host) > 1}):
        yield "hosts", hosts, f"{host} is named twice"
    if config.cluster != "local" and config.debug.leave_out:
        yield (
            "debug.leave_out",
            config.debug.leave_out,
            f"works with cluster=local only; this is cluster={config.cluster}",
        )


def _bad_sync(config: ExperimentConfig) -> Iterator[Problem]:
    """Fields that need rollout workers."""
    for name, task in config.rollout.tasks.items():
        for kind, spec in (("agent", task.agent), ("env", task.env)):
            if spec:
                remedy = (
                    f"mode=sync supports only tasks of one response with a reward function: set only "
                    f"rollout.tasks.{name}.reward"
                )
                yield f"rollout.tasks.{name}.{kind}", spec, f"{remedy}, or use mode=async"
    if config.train.wait_for_full_lag:
        yield "train.wait_for_full_lag", True, "with mode=sync no data is old; set it to false, or use mode=async"
    if config.train.dense_rewards:
        remedy = "needs an agent or an environment, and mode=sync has neither; set it to false, or use mode=async"
        yield "train.dense_rewards", True, remedy


def _deadlocks(config: ExperimentConfig) -> Iterator[Problem]:
    """Settings under which batches fill never or slowly: too few prompts in flight, leases shorter than two heartbeat intervals,
    or a KV cache smaller than a sequence."""
    manager, batch_size = config.manager, config.train.batch_size
    has_manager = not mode_of(config.mode).workers_generate
    if has_manager and 0 < manager.max_concurrent_rollouts < batch_size and manager.max_head_offpolicyness == 0:
        # This is no deadlock: when a rollout finishes, another prompt is admitted. But training is slow, and no user intends this.
        yield (
            "manager.max_concurrent_rollouts",
            manager.max_concurrent_rollouts,
            f"is below train.batch_size={batch_size}: generation would idle; use 0 (only eta bounds it) or >= {batch_size}",
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
