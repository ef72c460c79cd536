"""The GPUs and cores that this process may use, found without torch or a driver. Peak FLOP/s of GPUs, and peak memory."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

# Dense bfloat16 FLOP/s of NVIDIA GPUs, from their data sheets, by a part of the name that torch reports. The first match counts
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
}


def peak_flops(name: str) -> float:
    """The peak bfloat16 FLOP/s of the GPU with this name (torch.cuda.get_device_name); 0.0 if it is unknown."""
    return next((flops for part, flops in PEAK_FLOPS.items() if re.search(rf"\b{re.escape(part)}\b", name)), 0.0)


def peak_memory_bytes() -> int:
    """The most memory that this process has used so far. On GPUs, if it has used one: the bytes of tensors there, without the
    allocator's reserve. Otherwise: its resident memory."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)  # a process that computes no tensors imports no torch
    if getattr(cuda, "is_initialized", bool)():
        return sum(cuda.max_memory_allocated(index) for index in range(cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
