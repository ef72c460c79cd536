"""Searches the layouts of a number of GPUs: estimates all of them in closed form, and plans the best few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.dataflow.axes import MATRICES, ParallelGrid
from asyncrl.dataflow.layout_checks import problem_of_grid
from asyncrl.dataflow.topology import Allocation, DeviceSet, allocation_of
from asyncrl.launch.checks.model_files import read_config
from asyncrl.launch.experiment import validate
from asyncrl.plan.capacity import RunPlan, plan_run
from asyncrl.plan.devices import GPUS_PER_HOST, Device
from asyncrl.plan.estimate import estimate_ranks
from asyncrl.plan.remedies import Planner
from asyncrl.plan.result import PlanError
from asyncrl.plan.shapes import ModelShape

_ESTIMATE_MARGIN = 1.25  # an estimate may exceed the memory by this factor before its layout is dropped
MOST_PLANNED = 4  # grids of training that are planned
_ENOUGH = 2  # layouts that fit, after which no further grid is planned


class Layout(msgspec.Struct, frozen=True):
    """An allocation of the GPUs. Times are lower bounds in seconds."""

    allocation: str
    training_s: float
    receiving_s: float  # of training: receiving from other ranks, at the same time as computing
    generation_s: float
    step_s: float
    expected_step_s: float  # by the shares of speeds.py
    peak: int  # bytes of the fullest GPU (RunPlan.peak)
    planned: bool  # false: a closed-form estimate
    fits: bool
    tight: bool = False  # it fits, but a process needs more than TIGHT_SHARE of its GPU


def search_layouts(
    config: ExperimentConfig, num_gpus: int, device: Device, planner: Planner, *, mean_response: int = 0
) -> list[Layout]:
    """Return the layouts of num_gpus GPUs that were planned, those that fit first, by the predicted time of a step. Further layouts
    follow with estimates, the fastest ones first.

    The layouts have one grid for all models and, with servers, one grid for them; sets of their own, as in `+ref_inf:d1`, are not
    tried. config: without `auto`. mean_response: as in plan_run. Raises PlanError if no layout can be valid.
    """

    def tried(allocation: object) -> ExperimentConfig:
        return replace(config, allocation=str(allocation))

    estimates = [
        _layout(plan_run(tried(allocation), device, estimate_ranks, mean_response=mean_response), planned=False)
        for allocation in _allocations(config, num_gpus)
    ]
    if not estimates:
        raise PlanError(
            f"--gpus {num_gpus}: no layout with the engine of allocation={config.allocation} has this number of GPUs; use "
            "another number"
        )
    likely = [layout for layout in estimates if layout.peak <= _ESTIMATE_MARGIN * device.memory]
    likely.sort(key=_speed)
    planned: list[Layout] = []
    rest: list[Layout] = []
    grids: set[str] = set()  # of training. A planned one is planned with all of its servers, which costs nothing
    refused: ValueError | None = None
    for layout in likely or sorted(estimates, key=lambda layout: layout.peak):
        grid = layout.allocation.rpartition("+")[2]
        enough = len(grids) == MOST_PLANNED or sum(done.fits for done in planned) >= _ENOUGH
        if enough and grid not in grids:
            rest.append(layout)
            continue
        try:
            validate(tried(layout.allocation))
            planned.append(_layout(planner(tried(layout.allocation)), planned=True))
            grids.add(grid)
        except (ConfigError, PlanError) as error:
            refused = error
    if not planned:
        raise PlanError(f"--gpus {num_gpus}: none of the best layouts can be planned: {refused}") from refused
    return [*sorted(planned, key=lambda layout: (not layout.fits, _speed(layout))), *rest]


def _allocations(config: ExperimentConfig, num_gpus: int) -> Iterator[Allocation]:
    """The allocations of exactly num_gpus GPUs that the model can be split into. No tensor group spans two hosts."""
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
    return (grid for grid in ParallelGrid.of_size(size) if grid.parts(MATRICES) <= GPUS_PER_HOST)


def _layout(plan: RunPlan, *, planned: bool) -> Layout:
    time = plan.time
    return Layout(
        allocation=plan.allocation,
        training_s=time.training_s,
        receiving_s=time.receiving_s,
        generation_s=time.generation_s,
        step_s=time.step_s,
        expected_step_s=time.expected_step_s,
        peak=plan.peak,
        planned=planned,
        fits=plan.fits,
        tight=plan.fits and bool(plan.shortages),
    )


def _speed(layout: Layout) -> tuple[float, float, float]:
    """Orders layouts by the time of a step; of equal ones, the one that receives less is faster, then the one with more slack."""
    return float(f"{layout.step_s:.2g}"), layout.receiving_s, layout.training_s + layout.generation_s
