"""Whether the machine has the GPUs that the allocation needs: no two processes compute on one GPU unless they share it (pure)."""

from __future__ import annotations

from asyncrl.config.engines import DEFAULT_ENGINE
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.dataflow.topology import Allocation, allocation_of


def needed_gpus(config: ExperimentConfig) -> tuple[int, int]:
    """The GPUs of generation and those of training, also where both are the same ones."""
    allocation, mode = allocation_of(config), mode_of(config.mode)
    return (
        0 if mode.replays else allocation.num_generation_devices,
        allocation.num_training_devices if mode.trains else 0,
    )


def too_few_gpus(config: ExperimentConfig, found: int) -> str:
    """How to run with `found` GPUs; "" if they suffice. Without any GPU a run uses the CPU, so 0 suffice."""
    allocation = allocation_of(config)
    needed = allocation.num_devices if allocation.generation_devices is not None else sum(needed_gpus(config))
    if found == 0 or found >= needed:
        return ""
    return f"use {_fitting(allocation, found)}{needed} GPUs; two processes compute on one GPU only if the allocation shares it"


def _fitting(allocation: Allocation, found: int) -> str:
    """The allocations that use the GPUs found, if the user's gives only the numbers of servers and model workers."""
    grids = [grid for devices in allocation.training for _, grid in devices.grids]
    if allocation.names or any(grid != grid.only(SAMPLES) for grid in (allocation.generation, *grids)):
        return ""
    engine, numbers = allocation.engine or DEFAULT_ENGINE, f"@0-{found - 1}" if found > 1 else "@0"
    shared = (
        f"allocation={engine}.d{found}p1m1{numbers}+d{found}p1m1{numbers} with manager.max_head_offpolicyness=0, or "
    )
    return (f"allocation={engine}.d{found // 2}p1m1+d{found - found // 2}p1m1, or " if found > 1 else "") + shared
