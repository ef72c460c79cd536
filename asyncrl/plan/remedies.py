"""Finds the smallest changes of a config with which every process fits its GPU. Each is planned before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.dataflow.axes import MATRICES, SAMPLES, TOKENS
from asyncrl.dataflow.layout_checks import problem_of_grid
from asyncrl.dataflow.topology import DeviceSet, allocation_of
from asyncrl.launch.checks.model_files import read_config
from asyncrl.launch.experiment import validate
from asyncrl.plan.capacity import RunPlan, Shortage
from asyncrl.plan.devices import GPUS_PER_HOST
from asyncrl.plan.generation import ServerPlan, request_tokens
from asyncrl.plan.result import PlanError, RankPlan
from asyncrl.plan.shapes import ModelShape

# Plans a changed config. Raises PlanError
Planner = Callable[[ExperimentConfig], RunPlan]
Change = tuple[str, Any]  # field and value

MOST_PLANS = 6  # a plan of a large model takes a minute of a core for each distinct rank
_MOST_REMEDIES = 2
# Factors of the numbers of data, tensor and context ranks: first those with as many GPUs. Context ranks receive less than tensor
# ranks, which also share out what is gathered
_SCALES = (
    *((1 / 2, 1, 2), (1 / 2, 2, 1), (1 / 4, 1, 4), (1 / 4, 4, 1), (1 / 8, 1, 8)),
    *((2, 1, 1), (1, 1, 2), (1, 2, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1), (8, 1, 1), (4, 2, 1), (16, 1, 1), (8, 2, 1)),
    *((32, 1, 1), (64, 1, 1)),
)
_SMALLEST_CHUNK = 128  # of train.logprob_chunk_tokens
_SERVER, _RANK = "generation_server/", "model_worker/"


class Remedy(msgspec.Struct, frozen=True):
    """Changes with which the plan fits."""

    overrides: list[str]  # as on the command line
    peak: int  # bytes of the fullest GPU then
    num_devices: int


def find_remedies(config: ExperimentConfig, plan: RunPlan, planner: Planner) -> list[Remedy]:
    """Return up to two ways to make the plan fit, the smallest first; none if no way is found within MOST_PLANS plans.

    A plan whose servers and ranks are both too large gets the changes of both.
    """
    search = _Search(config, planner)
    failing = [shortage for shortage in plan.shortages if shortage.fails]
    of_servers = next((shortage for shortage in failing if shortage.process.startswith(_SERVER)), None)
    of_rank = max(
        (shortage for shortage in failing if shortage.process.startswith(_RANK)), key=lambda s: s.needed, default=None
    )
    base: tuple[Change, ...] = ()
    if of_servers is not None and plan.server is not None:
        found = search.fitting(_changes_of_servers(config, plan.server, of_servers), fits=_servers_fit)
        if not found or of_rank is None:
            return [_remedy(*entry) for entry in found]
        base = found[0][0]
    if of_rank is None:
        return []
    rank = next(rank for rank in plan.ranks if of_rank.process == f"{_RANK}{rank.worker}")
    small = list(_small_changes(config, rank, of_rank.needed - of_rank.memory))
    found = search.fitting([(*base, change) for change in small])
    if not found:
        together = tuple(dict(_small_changes(config, rank, 0)).items())  # with the smallest micro-batches
        static = sum(rank.at_peak.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
        room, rest = of_rank.memory - plan.libraries, plan.needed(rank) - plan.libraries - static
        asked = changed(config, base)
        found = search.fitting([(*base, *together)] if len(together) > 1 else [], most=1)
        found = found or search.fitting([(*base, grids) for grids in _layouts(asked, rank, static, rest, room)], most=1)
        found = found or search.fitting(
            [(*base, grids, *together) for grids in _layouts(asked, rank, static, 0, room)], most=1
        )
    return [_remedy(*entry) for entry in found]


def changed(config: ExperimentConfig, changes: Sequence[Change]) -> ExperimentConfig:
    """The config with these fields changed. A later change of a field replaces an earlier one."""
    for path, value in changes:
        config = _with(config, path.split("."), value)
    return config


class _Search:
    """Plans changed configs, at most MOST_PLANS of them."""

    def __init__(self, config: ExperimentConfig, planner: Planner) -> None:
        self._config, self._planner, self._left = config, planner, MOST_PLANS

    def fitting(
        self,
        candidates: Sequence[tuple[Change, ...]],
        *,
        most: int = _MOST_REMEDIES,
        fits: Callable[[RunPlan], bool] = lambda plan: plan.fits,
    ) -> list[tuple[tuple[Change, ...], RunPlan]]:
        """The first `most` candidates whose plan fits, in order. Of candidates that change the same field only the first."""
        found: list[tuple[tuple[Change, ...], RunPlan]] = []
        for changes in candidates:
            fields = {path for path, _ in changes}
            if len(found) == most or not self._left:
                break
            if any(fields == {path for path, _ in earlier} for earlier, _ in found):
                continue
            config = changed(self._config, changes)
            try:
                validate(config)
                self._left -= 1
                plan = self._planner(config)
            except (ConfigError, PlanError):
                continue
            if fits(plan):
                found.append((changes, plan))
        return found


def _servers_fit(plan: RunPlan) -> bool:
    return not any(shortage.fails and shortage.process.startswith(_SERVER) for shortage in plan.shortages)


def _remedy(changes: Sequence[Change], plan: RunPlan) -> Remedy:
    return Remedy([f"{path}={_text(value)}" for path, value in dict(changes).items()], plan.peak, plan.num_devices)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _small_changes(config: ExperimentConfig, rank: RankPlan, excess: int) -> Iterator[Change]:
    """Changes of one field that keep the GPUs, from those that cost least time. A change is left out if all that it could free is
    less than the excess."""
    train, at_peak = config.train, rank.at_peak
    if train.accumulate_unsharded and at_peak.get("gradients", 0) > excess:
        yield "train.accumulate_unsharded", False
    of_tokens = sum(at_peak.get(kind, 0) for kind in ("activations", "logits", "workspace"))
    least = request_tokens(config, ModelShape.of(config.model_path))
    share = 1 - excess / of_tokens if of_tokens else 0.0
    budget = train.max_tokens_per_mb
    while share > 0 and budget // 2 >= least:
        budget //= 2
        if budget <= share * train.max_tokens_per_mb:  # memory is at most proportional to the tokens
            yield "train.max_tokens_per_mb", budget
    if train.gradient_checkpointing is not True and at_peak.get("activations", 0) > excess:
        yield "train.gradient_checkpointing", True
    if at_peak.get("logits", 0) > excess and int(train.logprob_chunk_tokens) > _SMALLEST_CHUNK:
        yield "train.logprob_chunk_tokens", _SMALLEST_CHUNK
    if waiting := _waiting_roles(config, rank):
        yield "train.offload", waiting
    if train.dtype == "float32":
        yield "train.dtype", "bfloat16"


def _waiting_roles(config: ExperimentConfig, rank: RankPlan) -> list[str]:
    """train.offload with all roles of which this rank holds only frozen models; empty if that changes nothing."""
    roles = {step.model.partition("@")[0] for step in rank.steps}
    trained = {step.model.partition("@")[0] for step in rank.steps if step.mfc.endswith("_train")}
    new = sorted(roles - trained - set(config.train.offload))
    return [*config.train.offload, *new] if new else []


def _layouts(config: ExperimentConfig, rank: RankPlan, static: int, rest: int, room: int) -> Iterator[Change]:
    """Yield allocations in which the rank's set of workers has other grids: first context and tensor ranks in place of data ranks,
    then more ranks. Those that cannot fit are left out: all ranks divide the static bytes, context and tensor ranks the rest.
    """
    allocation = allocation_of(config)
    if allocation.generation_devices is not None:  # the numbers of devices are the user's
        return
    model = read_config(config.model_path, "give a folder in Hugging Face format")
    sizes = [devices.size for devices in allocation.training]
    at = next(place for place in range(len(sizes)) if rank.worker < sum(sizes[: place + 1]))
    for data, tensor, context in _SCALES:
        if static / (data * tensor * context) + rest / (tensor * context) > room:
            continue
        grids = []
        for name, grid in allocation.training[at].grids:
            parts = {MATRICES: grid.parts(MATRICES) * tensor, TOKENS: grid.parts(TOKENS) * context}
            scaled = grid.with_parts({SAMPLES: int(grid.num_replicas * data), **parts})
            if scaled.num_replicas != grid.num_replicas * data or problem_of_grid(scaled, model):
                break
            grids.append((name, scaled))
        else:
            training = (*allocation.training[:at], DeviceSet(tuple(grids)), *allocation.training[at + 1 :])
            yield "allocation", str(replace(allocation, training=training))


def _changes_of_servers(config: ExperimentConfig, server: ServerPlan, shortage: Shortage) -> list[tuple[Change, ...]]:
    """Fewer blocks of the embedded engine, or fewer requests with a state; more tensor ranks of SGLang's servers, first with fewer
    servers; bfloat16."""
    allocation, shape = allocation_of(config), ModelShape.of(config.model_path)
    found: list[tuple[Change, ...]] = []
    if not allocation.traits.sizes_own_cache:
        room = server.blocks - -(-(shortage.needed - shortage.memory) // server.block_bytes)
        if room * server.block_tokens >= server.request_tokens:
            found.append((("generation.num_blocks", room),))
        if server.request_state:
            fewer = server.max_requests - -(-(shortage.needed - shortage.memory) // server.request_state)
            found += [(("generation.max_running_requests", fewer),)] if fewer >= 1 else []
    if config.generation.dtype == "float32":
        found.append((("generation.dtype", "bfloat16"),))
    if allocation.traits.is_tensor_parallel and allocation.generation_devices is None:
        grid = allocation.generation
        for times in (2, 4, 8):
            width = grid.replica_size * times
            if width > GPUS_PER_HOST or not shape.serves_on(width):
                continue
            for count in sorted({grid.num_replicas // times, grid.num_replicas} - {0}):
                wide = replace(allocation, generation=grid.with_parts({SAMPLES: count, MATRICES: width}))
                found.append((("allocation", str(wide)),))
    return found


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})
