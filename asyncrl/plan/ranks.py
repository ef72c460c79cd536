"""Plans the model workers of a run, from its config and the config.json of its models. Imports no torch: another process
(rank_main.py) computes the plan of each distinct rank of each model.

All data and tensor ranks of a stage have the plan of data rank 0 and tensor rank 0, which hold the largest pieces.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from asyncrl.config.modes import mode_of
from asyncrl.config.processes import ModelConfig, PlacedMFC
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ExperimentConfig, TrainConfig
from asyncrl.dataflow.axes import LAYERS
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.topology import ModelPlacement, allocation_of
from asyncrl.plan.batches import Load, load_of
from asyncrl.plan.result import ModelStep, PlanError, RankPlan
from asyncrl.protocol.names import ACTOR
from asyncrl.runtime.process import python_module

LIMIT_S = 900.0  # of each process that counts for a rank


class ShardTask(msgspec.Struct, frozen=True):
    """One rank of one model, with all MFCs that run on the model."""

    model: ModelConfig
    stage: int  # of pipeline parallelism; the rank is the first one of its stage
    mfcs: list[PlacedMFC]  # in the order of the dataflow
    loads: dict[str, Load]  # by MFC
    train: TrainConfig
    device_type: str

    @property
    def name(self) -> str:
        return f"{self.model.name}, stage {self.stage}"


class ShardPlan(msgspec.Struct, frozen=True):
    """The plan of one rank of one model, as if it were alone."""

    steps: list[ModelStep]
    load_peak: int
    loaded: int  # bytes once it is loaded
    resident: dict[str, int]  # kind -> bytes between MFCs, once it has trained
    in_transit: int  # bytes while weights are exported, beside the resident ones


def plan_training(
    config: ExperimentConfig,
    *,
    device_type: Literal["cpu", "cuda"] = "cuda",
    known: dict[bytes, ShardPlan] | None = None,
) -> list[RankPlan]:
    """Plan each distinct model worker of a run, in ascending order. batches.py has the assumptions about its batches.

    known: plans of ranks by their tasks, to which the new ones are added. Configs that differ in their servers have the same ranks.

    Raises PlanError if the config cannot be planned, or if a rank's process fails or takes longer than LIMIT_S.
    """
    config = resolve(config, Facts(on_gpu=device_type == "cuda"))
    models, mfcs = _placed(config)
    shards = _shards_by_worker(models)
    needed = sorted({shard for held in shards.values() for shard in held})
    tasks = [_task(config, next(m for m in models if m.name == name), pipe, mfcs, device_type) for name, pipe in needed]
    known, keys = {} if known is None else known, [msgspec.json.encode(task) for task in tasks]
    if new := {key: task for key, task in zip(keys, tasks, strict=True) if key not in known}:
        known |= zip(new, run_tasks(list(new.values())), strict=True)
    plans = {shard: known[key] for shard, key in zip(needed, keys, strict=True)}
    offloaded = {model.name for model in models if model.offload and device_type == "cuda"}
    by_shards: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for worker, held in sorted(shards.items()):
        by_shards.setdefault(tuple(held), []).append(worker)
    placements = {model.name: ModelPlacement.of(model) for model in models}
    return [
        _combined(
            workers,
            names=[str(placements[name].shard_of(workers[0])) for name, _ in held],
            plans={name: plans[name, pipe] for name, pipe in held},
            offloaded=offloaded,
        )
        for held, workers in by_shards.items()
    ]


def _placed(config: ExperimentConfig) -> tuple[list[ModelConfig], list[PlacedMFC]]:
    """The models and MFCs of a run, the latter in the order of the dataflow. Raises PlanError."""
    mode = mode_of(config.mode)
    if mode.workers_generate or not mode.trains:
        raise PlanError(f"mode={config.mode}: a plan covers training without generation; use mode async or train_only")
    if config.train.mfcs:
        raise PlanError(f"train.mfcs={config.train.mfcs}: a plan runs no functions of yours; plan without them")
    if not config.model_path:
        raise PlanError('model_path="": give a folder that has the config.json of a model')
    try:
        graph = build_dataflow(config.train, config.mode)
        placements, mfcs = place(allocation_of(config), graph)
    except ValueError as error:
        raise PlanError(f"allocation={config.allocation}: {error}") from error
    order = {name: number for number, name in enumerate(graph.order)}
    models = models_of(placements, mfcs, config.train, config.model_path)
    # The base of adapters is no model of its own
    computes = {model.name: model.base_of or model.name for model in models}
    on_gpus = [replace(mfc, model=computes[mfc.model]) for mfc in mfcs if MFCDef.of(mfc).has_model]
    own = [model for model in models if model.kind != "none" and not model.base_of]
    return own, sorted(on_gpus, key=lambda mfc: order[mfc.name])


def _shards_by_worker(models: Sequence[ModelConfig]) -> dict[int, list[tuple[str, int]]]:
    """Worker -> (model, stage) of each model that it holds."""
    found: dict[int, list[tuple[str, int]]] = {}
    for model in models:
        placement = ModelPlacement.of(model)
        for stage, workers in enumerate(placement.parts(LAYERS)):
            for worker in workers:
                found.setdefault(worker, []).append((model.name, stage))
    return found


def _task(
    config: ExperimentConfig, model: ModelConfig, stage: int, mfcs: Sequence[PlacedMFC], device_type: str
) -> ShardTask:
    grid, own = ModelPlacement.of(model).grid, [mfc for mfc in mfcs if mfc.model == model.name]
    loads = {mfc.name: load_of(config, MFCDef.of(mfc), grid) for mfc in own}
    return ShardTask(model, stage, own, loads, config.train, device_type)


def run_tasks(tasks: Sequence[ShardTask]) -> list[ShardPlan]:
    """Plan ranks, in processes of their own. Raises PlanError."""
    command = python_module("asyncrl.plan.rank_main")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=msgspec.json.encode(tasks), capture_output=True, env=env, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise PlanError(lines[-1] if lines else f"the process that plans ended with exit status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[ShardPlan])


# ------------------------------------------------------------------------------------------------------------------ workers


def _combined(
    workers: Sequence[int], *, names: Sequence[str], plans: Mapping[str, ShardPlan], offloaded: set[str]
) -> RankPlan:
    """The plan of workers that hold these models. plans: by model, in the order in which they are loaded."""
    resident = {name: Counter({} if name in offloaded else plan.resident) for name, plan in plans.items()}
    together = sum(resident.values(), Counter[str]())
    peak, at_peak, kinds, peak_in = together.total(), together, together, ""
    load_peak = loaded = export_peak = 0
    for name, plan in plans.items():
        others = together - resident[name]
        for step in plan.steps:
            if step.peak + others.total() > peak:
                peak, at_peak = step.peak + others.total(), Counter(step.at_peak) + others
                peak_in = ", ".join(filter(None, (step.mfc, step.moment)))
            kinds = kinds | (Counter(step.kinds) + others)
        load_peak = max(load_peak, loaded + plan.load_peak)
        loaded += plan.loaded
        if name == ACTOR:
            export_peak = others.total() + sum(plan.resident.values()) + plan.in_transit
    return RankPlan(
        worker=workers[0],
        shards=list(names),
        stands_for=list(workers),
        peak=peak,
        at_peak=at_peak,
        kinds=kinds,
        steps=[step for plan in plans.values() for step in plan.steps],
        load_peak=load_peak,
        export_peak=export_peak,
        peak_in=peak_in,
    )
