"""Searches the layouts of a number of GPUs: estimates them in closed form, and plans the best few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.dataflow.axes import MATRICES, SAMPLES, TABLE, TOKENS, ParallelGrid
from asyncrl.dataflow.layout_checks import problem_of_grid
from asyncrl.dataflow.topology import Allocation, DeviceSet, allocation_of
from asyncrl.launch.checks.model_files import read_config
from asyncrl.launch.experiment import validate
from asyncrl.plan.bounds import TimeBound
from asyncrl.plan.capacity import RunPlan, plan_run
from asyncrl.plan.devices import GPUS_PER_HOST, Device
from asyncrl.plan.estimate import estimate_ranks
from asyncrl.plan.remedies import Planner
from asyncrl.plan.result import PlanError
from asyncrl.plan.shapes import ModelShape

_ESTIMATE_MARGIN = 1.25  # an estimate may exceed the memory by this factor before its layout is dropped
MOST_PLANNED = 4  # grids of training that are planned
_ENOUGH = 2  # layouts that fit with room to spare, after which no further grid is planned
_MOST_SPLITS = 2  # that are planned beside a run's own
_FASTER = 0.95  # a split is proposed if its step is expected to take less than this share of the run's


class Layout(msgspec.Struct, frozen=True):
    """An allocation of the GPUs."""

    allocation: str
    time: TimeBound
    peak: int  # bytes of the fullest GPU (RunPlan.peak)
    planned: bool  # false: a closed-form estimate
    fits: bool
    tight: bool = False  # it fits, but a process needs more than TIGHT_SHARE of its GPU


def search_layouts(
    config: ExperimentConfig, num_gpus: int, device: Device, planner: Planner, *, mean_response: int = 0
) -> list[Layout]:
    """Return the layouts of num_gpus GPUs that were planned, by the expected time of a step: those that fit, those that hardly fit,
    those that do not. Further layouts follow with estimates, the fastest ones first.

    The layouts have one grid for all models and, with servers, one grid for them; sets of their own, as in `+ref_inf:d1`, are not
    tried. config: without `auto`. mean_response: as in plan_run. Raises PlanError if no layout can be valid.
    """
    estimates = _estimates(config, _allocations(config, num_gpus), device, mean_response)
    if not estimates:
        raise PlanError(
            f"--gpus {num_gpus}: no layout with the engine of allocation={config.allocation} has this number of GPUs; use "
            "another number"
        )
    likely = [layout for layout in estimates if layout.peak <= _ESTIMATE_MARGIN * device.memory]
    planned: list[Layout] = []
    rest: list[Layout] = []
    grids: set[str] = set()  # of training. A planned one is planned with all of its servers, which costs nothing
    refused: ValueError | None = None
    for layout in likely or sorted(estimates, key=lambda layout: layout.peak):
        grid = layout.allocation.rpartition("+")[2]
        enough = len(grids) == MOST_PLANNED or sum(done.fits and not done.tight for done in planned) >= _ENOUGH
        if enough and grid not in grids:
            rest.append(layout)
            continue
        try:
            planned.append(_planned(config, layout, planner))
            grids.add(grid)
        except (ConfigError, PlanError) as error:
            refused = error
    if not planned:
        raise PlanError(f"--gpus {num_gpus}: none of the best layouts can be planned: {refused}") from refused
    return [*sorted(planned, key=lambda layout: (not layout.fits, layout.tight, _speed(layout))), *rest]


def better_split(
    config: ExperimentConfig, plan: RunPlan, device: Device, planner: Planner, *, mean_response: int = 0
) -> Layout | None:
    """Return the division of a plan's GPUs between servers and replicas of training, each as large as now, with the shortest
    expected step. It is planned and fits with room to spare. None: the shortest one is not _FASTER, or none of the _MOST_SPLITS
    best estimates fits, or the run has no servers, names its GPUs or has several grids of training."""
    allocation = allocation_of(config)
    grids = [grid for devices in allocation.training for _, grid in devices.grids]
    if plan.server is None or allocation.generation_devices is not None or len(grids) != 1:
        return None
    limit_s = _FASTER * plan.time.expected_step_s
    splits = _splits(allocation, grids[0])
    for layout in _estimates(config, splits, device, mean_response)[:_MOST_SPLITS]:
        if layout.time.expected_step_s >= limit_s:
            break
        with contextlib.suppress(ConfigError, PlanError):
            found = _planned(config, layout, planner)
            if found.fits and not found.tight and found.time.expected_step_s < limit_s:
                return found
    return None


def _splits(allocation: Allocation, grid: ParallelGrid) -> Iterator[Allocation]:
    for replicas in range(1, allocation.num_devices // grid.replica_size + 1):
        training = grid.with_parts({SAMPLES: replicas})
        servers, rest = divmod(allocation.num_devices - training.size, allocation.generation.replica_size)
        if servers and not rest:
            generation = allocation.generation.with_parts({SAMPLES: servers})
            yield replace(allocation, generation=generation, training=(DeviceSet((("", training),)),))


def _estimates(
    config: ExperimentConfig, allocations: Iterable[Allocation], device: Device, mean_response: int
) -> list[Layout]:
    """The fastest ones first."""
    plans = (
        plan_run(_with(config, allocation), device, estimate_ranks, mean_response=mean_response)
        for allocation in allocations
    )
    return sorted((_layout(plan, planned=False) for plan in plans), key=_speed)


def _planned(config: ExperimentConfig, layout: Layout, planner: Planner) -> Layout:
    """Raises ConfigError or PlanError."""
    validate(_with(config, layout.allocation))
    return _layout(planner(_with(config, layout.allocation)), planned=True)


def _with(config: ExperimentConfig, allocation: object) -> ExperimentConfig:
    return replace(config, allocation=str(allocation))


def _allocations(config: ExperimentConfig, num_gpus: int) -> Iterator[Allocation]:
    """The allocations of exactly num_gpus GPUs that the model can be split into. No tensor or context group spans two
    hosts."""
    allocation, shape = allocation_of(config), ModelShape.of(config.model_path)
    model = read_config(config.model_path, "give a folder in Hugging Face format")
    serves = mode_of(config.mode).has_servers and allocation.traits.starts_servers
    for training in range(1, num_gpus + (not serves)) if serves else (num_gpus,):
        grids = [grid for grid in _grids(training) if not problem_of_grid(grid, model)]
        if not serves:
            for grid in grids:
                yield replace(allocation, training=(DeviceSet((("", grid),)),), generation_devices=None)
            continue
        left = num_gpus - training
        widest = GPUS_PER_HOST if allocation.traits.is_tensor_parallel else 1
        for servers in ParallelGrid.of_size(left):
            width = servers.replica_size
            if servers.num_stages > 1 or width > widest or not shape.serves_on(width):
                continue
            for grid in grids:
                yield Allocation(allocation.engine, servers, (DeviceSet((("", grid),)),))


def _grids(size: int) -> Iterator[ParallelGrid]:
    axes = tuple(axis for axis in TABLE if not axis.copies)
    grids = ParallelGrid.of_size(size, axes)
    return (grid for grid in grids if grid.parts(MATRICES) * grid.parts(TOKENS) <= GPUS_PER_HOST)


def _layout(plan: RunPlan, *, planned: bool) -> Layout:
    tight = plan.fits and bool(plan.shortages)
    return Layout(plan.allocation, plan.time, plan.peak, planned, plan.fits, tight)


def _speed(layout: Layout) -> tuple[float, float, float]:
    """Orders layouts by the expected time of a step, as it is shown. Of equal ones, the one that receives less is faster, then the
    one with more slack."""
    time = layout.time
    return float(f"{time.expected_step_s:.3g}"), time.receiving_s, time.expected_training_s + time.expected_generation_s
