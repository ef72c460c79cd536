"""The GPUs and cores that this process may use, found without torch or a driver."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. Reads only the environment and /dev: no torch, no
    driver.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device.strip()]
    nodes = [match[1] for path in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name))]
    return [str(index) for index in range(len(nodes))]


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def granted_cores() -> int:
    """The number of cores that Slurm has granted on this machine; outside a Slurm job, the number of usable cores."""
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(given) if given.isdigit() and int(given) else len(usable_cores())


def granted_memory() -> int:
    """The bytes of memory that Slurm has granted on this machine; 0 if unknown or outside a Slurm job."""
    node, core = os.environ.get("SLURM_MEM_PER_NODE", ""), os.environ.get("SLURM_MEM_PER_CPU", "")
    megabytes = int(node) if node.isdigit() else int(core) * granted_cores() if core.isdigit() else 0
    return megabytes << 20
