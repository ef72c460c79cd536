"""What of a config's layout could not work: allocation, engine, MFCs and roles; each with field, value and remedy (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import CRITIC, REF, REWARD, ExperimentConfig
from asyncrl.config.validation import Problem, one_of
from asyncrl.dataflow.graph import GENERATE_MFC, build_dataflow
from asyncrl.dataflow.topology import Allocation, allocation_of, unknown_name
from asyncrl.protocol.names import ACTOR

MFC_ROLES = (ACTOR, CRITIC, REF, REWARD)
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


def problems_of_layout(config: ExperimentConfig) -> Iterator[Problem]:
    """Of the allocation, of the MFCs that it places, and of the engine that it names."""
    for name, mfc in config.train.extra_mfcs.items():
        if mfc.role not in MFC_ROLES:
            yield f"train.extra_mfcs.{name}.role", mfc.role, one_of(mfc.role, MFC_ROLES)
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


def _bad_layout(config: ExperimentConfig, allocation: Allocation) -> Iterator[Problem]:
    """What the MFCs of the run do not agree with: one another, the places that the allocation gives them, train.offload."""
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


def _bad_generation(config: ExperimentConfig, allocation: Allocation) -> Iterator[Problem]:
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
