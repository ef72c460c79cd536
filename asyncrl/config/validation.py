"""Validation: find every field of a config that cannot work, with its value and the remedy.

launch/experiment.py calls this once, before anything starts. What a field allows by itself is declared with it (schema.py,
limits.py), and this module compares fields with each other; dataflow/layout_checks.py checks layouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from operator import attrgetter

from asyncrl.config.fields import elements
from asyncrl.config.limits import rule_of
from asyncrl.config.modes import mode_of
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.schema import (
    MOST_REPEATS,
    ExperimentConfig,
    PPOConfig,
    RefConfig,
    RewardModelConfig,
    SamplingConfig,
    TrainConfig,
    authenticates,
    can_be_reached,
    eval_place,
    evaluation_sets,
    generating_sources,
    judges_by_group,
    model_settings,
    needs_whole_batch,
    ppo_by_task,
    prompt_sources,
    rejects_equal_rewards,
    reward_models,
    rollout_of_task,
)
from asyncrl.config.transports import FILES, transport_of

Problem = tuple[str, object, str]  # field, value, remedy
Conflict = tuple[bool, str, str]  # between fields: whether it is there, the field that is named, the remedy

# Metrics of all tasks together are named reward/<one of these>. Each task has a metric reward/<task>, so no task may have one of
# these names
REWARD_METRICS = ("mean", "min", "max", "std", "shaped_mean", "dense_mean", "equal_group_share")
_LARGEST_INTEGER = 2**63 - 1  # the largest that messages and checkpoints can hold
_LONGEST_S = 1_000_000_000  # 32 years: longer times overflow the system's clocks
# Arguments of transformers' apply_chat_template that asyncrl sets itself, or that would change what it returns
_NO_TEMPLATE_VARIABLES = {
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
}


def problems_of_values(config: object) -> Iterator[Problem]:
    """Values that their fields do not allow (limits.py), and numbers that are not finite or that no machine holds. config: any
    section, or the whole config."""
    for name, value, entry in elements(config):
        remedy = rule_of(entry).problem(value)
        if isinstance(value, int | float):
            largest = _LONGEST_S if name.endswith("_s") else _LARGEST_INTEGER if isinstance(value, int) else math.inf
            if isinstance(value, float) and not math.isfinite(value):
                example = f", such as {entry.default:g} (the default)" if isinstance(entry.default, float) else ""
                remedy = f"must be a finite number{example}"
            elif value > largest:
                remedy = remedy or f"must be at most {largest:,}"
        if remedy:
            yield name, value, remedy


def problems_of_fields(config: ExperimentConfig) -> Iterator[Problem]:
    """Fields that do not fit each other, except in layouts (dataflow/layout_checks.py)."""
    yield from problems_among(config, _of_generation(config))
    yield from _bad_algorithm(config)
    yield from _bad_algorithms_of_tasks(config)
    yield from _bad_streaming(config)
    yield from _bad_modes(config)
    yield from problems_among(config, _of_network(config))
    yield from problems_among(config, _of_cluster(config))
    yield from _bad_models(config)
    yield from _bad_prompts(config)
    yield from _bad_sampling("rollout.sampling", config.rollout.sampling)
    yield from _bad_evaluations(config)
    yield from _bad_tasks(config)
    yield from _bad_task_weights(config)


def problems_among(config: object, conflicts: Iterable[Conflict], path: str = "") -> Iterator[Problem]:
    """The conflicts that there are. path: of the section whose fields they name."""
    for is_wrong, field, remedy in conflicts:
        if is_wrong:
            yield f"{path}{field}", attrgetter(field)(config), remedy


def _of_generation(config: ExperimentConfig) -> Iterable[Conflict]:
    """Settings under which batches fill never or slowly: too few prompts in flight, leases shorter than two heartbeat
    intervals, or a KV cache smaller than a sequence."""
    manager, rollout, generation = config.manager, config.rollout, config.generation
    batch_size = config.train.batch_size
    has_manager = not mode_of(config.mode).workers_generate
    longest = config.prompts.max_prompt_length + max(new for _, _, _, new in generating_sources(config))
    needed = math.ceil(longest / generation.page_size)
    return (
        (
            rollout.success_rate_lb > rollout.success_rate_ub,
            "rollout.success_rate_lb",
            f"is above rollout.success_rate_ub={rollout.success_rate_ub}: all groups would be rejected",
        ),
        (
            generation.max_running_requests > generation.max_batch_tokens,
            "generation.max_running_requests",
            "must be at most generation.max_batch_tokens: each running request takes one token of every forward pass",
        ),
        (
            generation.num_blocks < needed,
            "generation.num_blocks",
            f"cannot hold one full sequence; use at least {needed}",
        ),
        # No deadlock: when a rollout finishes, another prompt is admitted. But training is slow, and no user intends this
        (
            has_manager and 0 < manager.max_concurrent_rollouts < batch_size and manager.max_head_offpolicyness == 0,
            "manager.max_concurrent_rollouts",
            f"is below train.batch_size={batch_size}: generation would idle; use 0 (only eta bounds it) or >= {batch_size}",
        ),
        (
            has_manager and manager.heartbeat_s * 2 >= manager.lease_s,
            "manager.lease_s",
            f"must be more than twice manager.heartbeat_s={manager.heartbeat_s}",
        ),
    )


def ppo_problems(ppo: PPOConfig) -> Iterator[Problem]:
    """Values for which the formulas of asyncrl/algorithms are undefined."""
    yield from problems_of_values(ppo)
    yield from problems_among(ppo, _of_ppo(ppo))


def _of_ppo(ppo: PPOConfig) -> Iterable[Conflict]:
    floor, cap = ppo.behav_imp_weight_floor, ppo.behav_imp_weight_cap
    return (
        (
            floor is not None and cap is not None and floor >= cap,
            "behav_imp_weight_floor",
            f"must be below behav_imp_weight_cap={cap}",
        ),
        (
            ppo.c_clip is not None and ppo.policy_loss == "cispo",
            "c_clip",
            "applies to policy_loss=clip only; set it to null",
        ),
        (
            ppo.use_decoupled_loss and ppo.recompute_logprob,
            "recompute_logprob",
            "applies to the naive loss only; set use_decoupled_loss=false",
        ),
        (
            ppo.proximal_pass == "always" and not (ppo.use_decoupled_loss or ppo.recompute_logprob),
            "proximal_pass",
            "applies to use_decoupled_loss or recompute_logprob only: no other loss reads proximal logprobs; use auto",
        ),
        (
            ppo.kl_adaptive and ppo.kl_in == "loss",
            "kl_adaptive",
            "applies to kl_in=reward only: in the loss the coefficient is fixed; set it to false",
        ),
        (
            ppo.loss_normalization == "constant" and ppo.loss_length < 1,
            "loss_length",
            "must be the length of the longest response in tokens: loss_normalization=constant divides by it",
        ),
        (
            ppo.overlong_penalty > 0 and ppo.overlong_length < 1,
            "overlong_length",
            "must be at least 1, such as rollout.sampling.max_new_tokens",
        ),
    )


def _bad_algorithm(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of the loss, and of the fields that it depends on."""
    ppo, train = config.train.ppo, config.train
    yield from problems_among(ppo, _of_ppo(ppo), "train.ppo.")
    name = "advantage_norm" if ppo.advantage_norm == "group" else "baseline"
    instead = "batch" if name == "advantage_norm" else "none"
    is_alone = config.rollout.group_size == 1
    yield from problems_among(
        config,
        (
            (
                judges_by_group(ppo) and is_alone,
                f"train.ppo.{name}",
                f"a group of one has no advantage; use {instead}, or rollout.group_size > 1",
            ),
            (
                judges_by_group(ppo) and train.critic is not None,
                f"train.ppo.{name}",
                "does not use values; with train.critic use train.ppo.baseline=none and train.ppo.advantage_norm=batch or none",
            ),
            (
                train.share_prefix == "on" and train.compile == "on",
                "train.share_prefix",
                "is not shown to work in compiled layers; use off, or train.compile=off",
            ),
        ),
    )
    if not rejects_equal_rewards(config.rollout):
        return
    own = [f"tasks.{name}." for name, task in config.rollout.tasks.items() if task.reject_equal_rewards]
    for place in own or [""]:
        field = f"rollout.{place}reject_equal_rewards"
        if is_alone:
            yield field, True, "would reject every group of one; use rollout.group_size > 1"
        if reward_models(train):
            models = "train.reward_model" if train.reward_model is not None else "train.reward_models"
            yield field, True, f"compares the rewards of reward functions only; with {models} set it to false"


def _bad_algorithms_of_tasks(config: ExperimentConfig) -> Iterator[Problem]:
    """Values of train.tasks that do not fit the run, or each other."""
    train, tasks = config.train, config.rollout.tasks
    for is_wrong, remedy in (
        (
            mode_of(config.mode).replays,
            "recordings have the numbers of tasks, and not their names; with mode=train_only leave it out",
        ),
        (
            train.ppo.advantage_norm == "batch",
            "train.ppo.advantage_norm=batch normalises over the groups of all tasks; use group or none, or leave it out",
        ),
        (train.critic is not None, "train.critic predicts rewards that are shaped alike; leave one of the two out"),
    ):
        if train.tasks and is_wrong:
            yield "train.tasks", sorted(train.tasks), remedy
    for name, ppo in ppo_by_task(train.ppo, train.tasks).items():
        place, own = f"train.tasks.{name}", train.tasks[name]
        if name not in tasks:
            known = f"tasks: {', '.join(sorted(tasks))}"
            yield "train.tasks", name, f"is not in rollout.tasks; {did_you_mean(name, tasks)}{known}"
        if judges_by_group(ppo) and not judges_by_group(train.ppo) and config.rollout.group_size == 1:
            field = "advantage_norm" if ppo.advantage_norm == "group" else "baseline"
            yield f"{place}.{field}", getattr(ppo, field), "a group of one has no advantage; use rollout.group_size > 1"
        if ppo.overlong_penalty > 0 and ppo.overlong_length < 1:
            remedy = "needs train.ppo.overlong_length, or one of this task: such as rollout.sampling.max_new_tokens"
            yield f"{place}.overlong_penalty", ppo.overlong_penalty, remedy
        if own.teacher_coef is not None and train.teacher is None:
            yield f"{place}.teacher_coef", own.teacher_coef, "there is no teacher; set train.teacher, or leave it out"


def _bad_streaming(config: ExperimentConfig) -> Iterator[Problem]:
    """Fields with which a step cannot train on a part of its batch before the rest has arrived."""
    train, mode = config.train, mode_of(config.mode)
    if not train.streaming:
        return
    needs = "with train.streaming"
    whole = needs_whole_batch(train)
    offloaded = [role for role in train.offload if role in ("actor", "critic")]
    yield from problems_among(
        config,
        (
            (
                train.streaming_order == "tokens" and train.streaming_tokens < 1,
                "train.streaming_tokens",
                "must be at least 1 with train.streaming_order=tokens",
            ),
            (
                train.streaming_parts > train.batch_size,
                "train.streaming_parts",
                f"must be at most train.batch_size={train.batch_size}: a part has at least one group",
            ),
            (
                train.streaming_parts > 0 and train.streaming_order != "groups",
                "train.streaming_parts",
                f"decides when a part begins, and so does train.streaming_order={train.streaming_order}; set one of them",
            ),
            (
                mode.workers_generate or not mode.trains,
                "train.streaming",
                f"mode={config.mode} has no groups that arrive one after another; set it to false",
            ),
            (
                whole and bool(train.step),
                "train.step",
                "would run on parts without the advantages, which ppo.advantage_norm=batch and critic.value_norm make from the "
                f"whole batch; {needs} use another advantage_norm and no value_norm, or leave it empty",
            ),
            (
                bool(offloaded) and not whole,
                "train.offload",
                f"{' and '.join(offloaded)} must stay on the device {needs}: offloading drops the gradients of earlier parts",
            ),
            (
                train.wait_for_full_lag,
                "train.wait_for_full_lag",
                f"waits until the whole batch is stored; set it to false {needs}",
            ),
        ),
    )
    if train.ptx is not None and not whole:
        remedy = f"is divided among the minibatches of a whole batch; {needs} leave it out"
        yield "train.ptx", train.ptx.texts.path, remedy


def problems_of_generating_step(mode: str, train: TrainConfig, eta: int, overdue: str) -> Iterator[Problem]:
    """Fields that do not fit a step function that generates. The checks of files call this if its source shows that it does, and
    the master, which imports it, in any case. eta, overdue: of `manager`."""
    traits, generates = mode_of(mode), "train.step generates its batch"
    if not traits.forms_batches:
        return
    if not (traits.trains and traits.has_servers):
        yield "mode", mode, f"{generates} with generation servers; use mode=async, or a step function of a batch"
    if eta > 0:
        yield (
            "manager.max_head_offpolicyness",
            eta,
            f"{generates} with the step's weights, so no data is old; set it to 0",
        )
    if overdue == "train":
        yield "manager.overdue", overdue, f"{generates}, and waits for all of it; use wait or drop"
    if train.streaming:
        yield "train.streaming", True, f"{generates} at once, and has no parts; set it to false"
    if train.arriving_inference:
        yield "train.arriving_inference", True, f"{generates}, and begins its calls afterwards; set it to false"


def _bad_modes(config: ExperimentConfig) -> Iterator[Problem]:
    """Fields that the mode requires or does not support."""
    mode, train, transport = mode_of(config.mode), config.train, config.weights.transport
    from_memory, whole_s = transport_of(transport).from_memory, config.manager.update_timeout_s
    only_replay = f"is used with mode=train_only only; this is mode={config.mode}"
    yield from problems_among(
        config,
        (
            (
                config.recover == "required" and not mode.is_recoverable,
                "recover",
                f"mode={config.mode} writes no checkpoints; use auto, which begins anew",
            ),
            (
                mode.replays and not config.replay.path,
                "replay.path",
                "is required with mode=train_only: a run that recorded trajectories",
            ),
            (
                mode.replays and bool(evaluation_sets(config.eval)),
                "eval.prompts.path" if config.eval.prompts is not None else "eval.sets",
                "nothing generates with mode=train_only; set eval.prompts=null, and leave eval.sets out",
            ),
            (not mode.replays and bool(config.replay.path), "replay.path", only_replay),
            (
                not mode.replays and not config.replay.path and bool(config.replay.first_step),
                "replay.first_step",
                only_replay,
            ),
            (
                not mode.updates_servers and from_memory,
                "weights.transport",
                f"sends weights from a trainer to servers, and mode={config.mode} has only one of them; use {FILES}",
            ),
            (
                from_memory and config.weights.full_every > 1,
                "weights.full_every",
                f"makes files smaller, and weights.transport={transport} sends all tensors from memory; set it to 1, or use "
                f"{FILES}",
            ),
            (
                from_memory and config.weights.broadcast_timeout_s >= whole_s,
                "weights.broadcast_timeout_s",
                f"must be below manager.update_timeout_s={whole_s:g}, the limit of a whole update",
            ),
            (
                not mode.updates_servers and bool(config.weights.verify_logprobs),
                "weights.verify_logprobs",
                f"compares servers with a trainer, and mode={config.mode} has only one of them; set it to false",
            ),
            (
                not mode.trains and train.target_reward is not None,
                "train.target_reward",
                "nothing is trained with mode=rollout_only; set it to null",
            ),
            (
                mode.workers_generate and train.wait_for_full_lag,
                "train.wait_for_full_lag",
                "with mode=sync no data is old; set it to false, or use mode=async",
            ),
            (
                mode.workers_generate and train.dense_rewards,
                "train.dense_rewards",
                "needs an agent or an environment, and mode=sync has neither; set it to false, or use mode=async",
            ),
            (
                mode.workers_generate and train.branches,
                "train.branches",
                "needs an agent, and mode=sync has none; set it to false, or use mode=async",
            ),
            (
                mode.workers_generate and bool(train.words),
                "train.words",
                "rollout workers add them, and mode=sync has none; leave it empty, or use mode=async",
            ),
            (
                not all(key.startswith(("words_", "prompt_words_")) for key in train.words),
                "train.words",
                "names of keys with words begin with words_ (one for each response) or prompt_words_ (one for the group)",
            ),
        ),
    )
    if not mode.has_detached_groups:
        never = f"with mode={config.mode} no worker restarts alone"
        if train.actor_inf_on_missing:
            yield "train.actor_inf_on_missing", train.actor_inf_on_missing, f"{never}; leave it empty"
        for place, model in model_settings(train).values():
            if isinstance(model, RefConfig | RewardModelConfig) and model.on_missing != "wait":
                yield f"{place}.on_missing", model.on_missing, f"{never}; set it to wait"


def _of_network(config: ExperimentConfig) -> Iterable[Conflict]:
    network = config.network
    return (
        *(
            (bool(getattr(network, name)) and not network.tls_cert, f"network.{name}", "needs network.tls_cert")
            for name in ("tls_key", "tls_ca")
        ),
        (
            network.sockets == "unix" and can_be_reached(config),
            "network.sockets",
            "other machines take part in this run; use auto or tcp",
        ),
        (
            bool(network.tls_cert) and not authenticates(config),
            "network.tls_cert",
            "needs network.authenticate=on",
        ),
        # The members of the process group meet at torch's TCPStore, the only rendezvous that SGLang's /init_weights_update_group
        # supports. It answers every client that reaches its port. Gloo and NCCL do not authenticate either
        (
            transport_of(config.weights.transport).forms_groups
            and config.weights.broadcast_network != "private"
            and authenticates(config)
            and can_be_reached(config),
            "weights.transport",
            f"cannot be authenticated, and other machines reach this run; use {FILES}, or weights.broadcast_network=private if "
            "every machine on the network between the hosts may read and forge the weights",
        ),
    )


def _of_cluster(config: ExperimentConfig) -> Iterable[Conflict]:
    """Runs on more than one host."""
    hosts, slurm = config.hosts, config.slurm
    return (
        (
            config.cluster == "hosts" and not hosts,
            "hosts",
            "name the hosts, including this one: hosts=[node1,node2]; or use cluster=local",
        ),
        (
            config.cluster == "local" and bool(hosts),
            "hosts",
            "applies to cluster=hosts only; set that, or leave hosts out",
        ),
        *(
            (True, "hosts", f"{host} is named twice")
            for host in sorted({host for host in hosts if hosts.count(host) > 1})
        ),
        (
            not slurm.cpu_nodes and bool(slurm.cpu_partition or slurm.cpu_cpus_per_node or slurm.cpu_options),
            "slurm.cpu_nodes",
            "must be at least 1 if other slurm.cpu_... fields are set (a heterogeneous job)",
        ),
        (
            config.cluster != "local" and bool(config.debug.leave_out),
            "debug.leave_out",
            f"works with cluster=local only; this is cluster={config.cluster}",
        ),
    )


def _bad_models(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of the actor and of the models beside it."""
    train = config.train
    if not config.model_path:
        yield "model_path", "", "is required"
    if train.num_critic_only_steps and train.critic is None:
        remedy = "there is no critic to train: set train.critic, e.g. train.critic.minibatches=4, or set this to 0"
        yield "train.num_critic_only_steps", train.num_critic_only_steps, remedy
    for name in train.reward_models:
        if not re.fullmatch(r"[a-z0-9_]+", name):
            remedy = "is the end of a role's name: use lower-case letters, digits and underscores"
            yield "train.reward_models", name, remedy
    yield from problems_among(config, _of_experts(config))
    ptx, ppo = train.ptx, train.ppo
    if ptx is None:
        return
    if not ptx.texts.answer_key:
        yield "train.ptx.texts.answer_key", "", "is required: the answers are what is trained"
    if ptx.batch_size < ppo.minibatches * ppo.epochs:
        times = f" * epochs={ppo.epochs}" if ppo.epochs > 1 else ""
        remedy = f"must be at least train.ppo.minibatches={ppo.minibatches}{times}, one text for each optimizer step"
        yield "train.ptx.batch_size", ptx.batch_size, remedy


def _of_experts(config: ExperimentConfig) -> Iterable[Conflict]:
    """What the experts of generation servers (train.routes) and the auxiliary loss of routers cannot be combined with."""
    train, mode = config.train, mode_of(config.mode)
    is_on, has_loss, loss = train.routes != "off", train.router_aux_loss_coef > 0, "train.router_aux_loss_coef"
    return (
        (
            has_loss and train.streaming,
            loss,
            "with train.streaming the first parts of a batch are trained before the choices of its last one are known; set it to 0",
        ),
        (has_loss and train.compile == "on", loss, "compiled layers do not show their routers' choices; set it to 0"),
        (has_loss and train.lora is not None, loss, "with train.lora it is not shown to be equal; set it to 0"),
        (
            is_on and not mode.updates_servers,
            "train.routes",
            f"needs servers that return experts and a trainer that reads them, and mode={config.mode} has only one of them; set it "
            "to off",
        ),
        (
            is_on and train.ptx is not None,
            "train.routes",
            "supervised texts have no routes; leave train.ptx out, or set it to off",
        ),
        (
            is_on and train.compile == "on",
            "train.compile",
            "compiled layers do not see the routes of a micro-batch; set it to off with train.routes",
        ),
        (
            is_on and train.share_prefix == "on",
            "train.share_prefix",
            "the copies of a shared prompt have different routes; set it to off with train.routes",
        ),
    )


def _bad_prompts(config: ExperimentConfig) -> Iterator[Problem]:
    without = {
        "eval.prompts": " (or leave eval.prompts out: no evaluation)",
        "train.ptx.texts": " (or leave train.ptx out: no supervised texts)",
    }
    for name, prompts in prompt_sources(config).items():
        if not prompts.path and not (name == "prompts" and mode_of(config.mode).replays):
            yield f"{name}.path", "", f"is required{without.get(name, '')}"
        for option in ("system_prompt", "chat_template_args"):
            if getattr(prompts, option) and not prompts.chat_template:
                yield f"{name}.{option}", getattr(prompts, option), f"needs {name}.chat_template=true"
        for argument in sorted(_NO_TEMPLATE_VARIABLES & prompts.chat_template_args.keys()):
            value = prompts.chat_template_args[argument]
            yield f"{name}.chat_template_args.{argument}", value, "asyncrl sets it; leave it out"


def _bad_evaluations(config: ExperimentConfig) -> Iterator[Problem]:
    if not (mode_of(config.mode).forms_batches or evaluation_sets(config.eval)):
        yield (
            "eval.prompts.path",
            "",
            f"is required with mode={config.mode}, or a set in eval.sets: nothing else is done",
        )
    for name, chosen in evaluation_sets(config.eval).items():
        place = eval_place(name)
        if name and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            yield "eval.sets", name, "is part of the names of metrics: use at most 64 letters, digits, - and _"
        if chosen.prompts is None:
            yield f"{place}.prompts.path", "", f"is required (or leave {place} out)"
        if not chosen.modes:
            yield f"{place}.modes", [], f"name sampled, greedy or both (or leave {place}.prompts out: no evaluation)"
        if len(set(chosen.modes)) != len(chosen.modes):
            yield f"{place}.modes", chosen.modes, "name each mode once"
        if chosen.num_responses > 1 and "sampled" not in chosen.modes:
            yield (
                f"{place}.num_responses",
                chosen.num_responses,
                f"needs sampled in {place}.modes: greedy responses are equal",
            )
        if chosen.sampling is not None:
            yield from _bad_sampling(f"{place}.sampling", chosen.sampling)


def _bad_sampling(place: str, sampling: SamplingConfig) -> Iterator[Problem]:
    if sampling.temperature <= 0 and not sampling.greedy:
        remedy = f"must be above 0; for greedy sampling set {place}.greedy=true"
        if place != "rollout.sampling":
            remedy = f"must be above 0; greedy responses are a mode: {place.removesuffix('sampling')}modes=[greedy]"
        yield f"{place}.temperature", sampling.temperature, remedy
    if sampling.top_k < 1 and sampling.top_k != -1:
        yield f"{place}.top_k", sampling.top_k, "must be at least 1, or -1 for all tokens"


def _bad_task_weights(config: ExperimentConfig) -> Iterator[Problem]:
    for source, prompts in prompt_sources(config).items():
        weights, place = prompts.task_weights, f"{source}.task_weights"
        if weights and source != "prompts":
            yield place, weights, "only prompts.task_weights has an effect: other sources are read once, line by line"
        if weights and not prompts.shuffle:
            yield place, weights, f"draws lines anew in each epoch; set {source}.shuffle=true, or leave the weights out"
        for name, weight in weights.items():
            if not 0 <= weight <= MOST_REPEATS:
                yield f"{place}.{name}", weight, f"must be from 0 to {MOST_REPEATS}: how often a line is in an epoch"


def _bad_gate(config: ExperimentConfig, place: str, name: str) -> Iterator[Problem]:
    """Problems of a task's gate: an unknown task, a circle, or a pass rate of groups that are not all counted."""
    tasks, gate = config.rollout.tasks, config.rollout.tasks[name].gate
    if gate is None:
        return
    if gate.task not in tasks:
        yield (
            f"{place}.gate.task",
            gate.task,
            f"names no task; {did_you_mean(gate.task, tasks)}tasks: {', '.join(sorted(tasks))}",
        )
        return
    seen, other = [name], gate.task
    while other in tasks and other not in seen and (before := tasks[other].gate) is not None:
        seen, other = [*seen, other], before.task
    if other in seen:
        yield f"{place}.gate.task", gate.task, f"these tasks wait for each other: {', '.join(seen)}; leave one gate out"
    own = rollout_of_task(config.rollout, gate.task)
    if own.reject_equal_rewards or own.success_rate_ub < gate.passes:
        which = "reject_equal_rewards" if own.reject_equal_rewards else "success_rate_ub"
        yield (
            f"{place}.gate.task",
            gate.task,
            f"{which} of that task rejects groups that have passed, so that its pass rate would not count them; set "
            f"rollout.tasks.{gate.task}.{which}={'false' if own.reject_equal_rewards else '1e9'}",
        )
    if mode_of(config.mode).workers_generate:
        yield (
            f"{place}.gate",
            gate,
            "mode=sync has no tickets that name closed tasks; use mode=async, or leave the gate out",
        )


def _bad_tasks(config: ExperimentConfig) -> Iterator[Problem]:
    mode, tasks = mode_of(config.mode), config.rollout.tasks
    if not tasks and not mode.replays:
        yield "rollout.tasks", {}, "name at least one task, e.g. rollout.tasks.default.reward=my_module:reward"
    for name, task in tasks.items():
        place = f"rollout.tasks.{name}"
        if not (task.reward or task.env or task.agent):  # a ChatAgent may compute its rewards itself
            yield place, task, "needs a reward function or an env"
        if name in REWARD_METRICS and len(tasks) > 1:
            yield place, task, f"choose another name: reward/{name} is a metric of all tasks together"
        of_task, longest = rollout_of_task(config.rollout, name), config.rollout.sampling.max_new_tokens
        bounds = [name for name in ("success_rate_lb", "success_rate_ub") if getattr(task, name) is not None]
        if bounds and of_task.success_rate_lb > of_task.success_rate_ub:
            yield (
                f"{place}.{bounds[0]}",
                getattr(task, bounds[0]),
                f"success_rate_lb={of_task.success_rate_lb} is above success_rate_ub={of_task.success_rate_ub} of the task: all "
                "groups would be rejected",
            )
        if of_task.sampling.max_new_tokens > longest:
            yield (
                f"{place}.max_new_tokens",
                task.max_new_tokens,
                f"is above rollout.sampling.max_new_tokens={longest}, for which caches and lengths are planned; raise that one",
            )
        if task.max_new_tokens is not None and mode.workers_generate:
            remedy = "mode=sync samples all tasks of a batch alike; leave it out, or use mode=async"
            yield f"{place}.max_new_tokens", task.max_new_tokens, remedy
        yield from _bad_gate(config, place, name)
        for kind in ("agent", "env"):
            if mode.workers_generate and (spec := getattr(task, kind)):
                only = f"mode=sync supports only tasks of one response with a reward function: set only {place}.reward"
                yield f"{place}.{kind}", spec, f"{only}, or use mode=async"
        if task.agent_args.get("trained") == "all" and not config.train.branches:
            yield f"{place}.agent_args.trained", "all", "a session may have several sequences; set train.branches=true"
        # Every turn of a rollout has the template arguments of its prompt, so an agent may not have others
        own = task.agent_args.get("chat_template_args")
        for source, prompts in prompt_sources(config).items():
            if source == "train.ptx.texts":  # texts without turns
                continue
            if own is not None and prompts.chat_template and own != prompts.chat_template_args:
                remedy = (
                    f"differs from {source}.chat_template_args={prompts.chat_template_args}, which all turns have; leave it "
                    f"out, and set {source}.chat_template_args"
                )
                yield f"{place}.agent_args.chat_template_args", own, remedy
