"""The GPUs of this machine as their driver reports them, and whether they suffice for the allocation: no two processes compute on
one GPU unless they share it."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.engines import DEFAULT_ENGINE
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.dataflow.topology import Allocation, allocation_of

COMMAND_LIMIT_S = 5.0  # time limit of `nvidia-smi`, which hangs if the driver hangs, and of `etcd --version`


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it."""

    name: str
    total_mib: float
    used_mib: float
    driver: str
    id: str = ""  # GPU-...; "": unknown


def query_gpus(command: str = "nvidia-smi") -> list[Gpu] | str:
    """All GPUs as reported by nvidia-smi; if it does not answer or lists none, a text that says so."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version,uuid"
    output = output_of([command, query, "--format=csv,noheader,nounits"])
    if isinstance(output, OSError):
        return f"{command} does not answer: {output.strerror or output}"
    return [
        Gpu(row[0], _number(row[1]), _number(row[2]), row[3], row[4])
        for row in csv.reader(output.splitlines(), skipinitialspace=True)
        if len(row) == 5
    ] or f"{command} lists none: {output.strip()[:200]}"


def chosen_gpus(devices: Sequence[str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those of the machine's `gpus` that `devices` name, as CUDA_VISIBLE_DEVICES does; all of them if it names none."""
    found = [gpu for index, gpu in enumerate(gpus) if str(index) in devices or (gpu.id and gpu.id in devices)]
    return found or list(gpus)


def needed_gpus(config: ExperimentConfig) -> tuple[int, int]:
    """The GPUs of generation and those of training, also where both are the same ones."""
    allocation, mode = allocation_of(config), mode_of(config.mode)
    return (
        0 if mode.replays else allocation.num_generation_devices,
        allocation.num_training_devices if mode.trains else 0,
    )


def num_gpus(config: ExperimentConfig) -> int:
    """The GPUs of a run: as many as it needs, or up to the last one that its allocation names."""
    allocation = allocation_of(config)
    return allocation.num_devices if allocation.generation_devices is not None else sum(needed_gpus(config))


def too_few_gpus(config: ExperimentConfig, found: int) -> str:
    """How to run with `found` GPUs; "" if they suffice. Without any GPU a run uses the CPU, so 0 suffice."""
    needed = num_gpus(config)
    if found == 0 or found >= needed:
        return ""
    fitting = _fitting(allocation_of(config), found)
    return f"use {fitting}{needed} GPUs; two processes compute on one GPU only if the allocation shares it"


def _fitting(allocation: Allocation, found: int) -> str:
    """The allocations that use the GPUs found, if the user's gives only the numbers of servers and model workers."""
    grids = [grid for devices in allocation.training for _, grid in devices.grids]
    if allocation.names or any(grid != grid.only(SAMPLES) for grid in (allocation.generation, *grids)):
        return ""
    engine, numbers = allocation.engine or DEFAULT_ENGINE, f"@0-{found - 1}" if found > 1 else "@0"
    shared = f"allocation={engine}.d{found}p1m1{numbers}+d{found}p1m1{numbers}, or "
    return (f"allocation={engine}.d{found // 2}p1m1+d{found - found // 2}p1m1, or " if found > 1 else "") + shared


def output_of(command: list[str]) -> str | OSError:
    """A command's output; an OSError if it cannot run, fails or exceeds its limit."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=COMMAND_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        return error
    except subprocess.TimeoutExpired:
        return OSError(f"no answer within {COMMAND_LIMIT_S:g} s")
    if done.returncode:
        return OSError(
            f"exit code {done.returncode}: {(done.stderr or done.stdout).decode(errors='replace').strip()[:200]}"
        )
    return done.stdout.decode(errors="replace")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return 0.0
