"""The GPUs and cores that this process may use, found without torch or a driver. Peak FLOP/s of GPUs, and peak memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Sequence
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

_GPU = "GPU-"
_ID_KINDS = (_GPU, "MIG-")
_SHARED_NODES = ("/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")  # WSL, Jetson, AMD
_SLURM_GPUS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")


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
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. Reads only the environment, /dev and /proc: no torch, no
    driver.
    """
    return devices_of(os.environ.get("CUDA_VISIBLE_DEVICES"), count_gpus(), gpu_ids())


def devices_of(chosen: str | None, present: int | None, ids: Sequence[str] = ()) -> list[str]:
    """The GPUs that CUDA uses with this value of CUDA_VISIBLE_DEVICES (None: not set), one name each, without spaces. Pure.

    present: the GPUs of this machine; None: unknown. ids: their ids (`GPU-...`); empty: unknown.

    CUDA ignores the list from the first invalid entry on: a number below 0 or too large, an unknown id, any other word. The first
    entry says whether the list has numbers or ids. An entry that comes twice makes the whole list invalid. A number ends with
    its last digit (`1gpu` is 1). An id may be shortened.
    """
    if chosen is None:
        return [str(index) for index in range(present or 0)]
    entries = [entry.strip() for entry in chosen.split(",")]
    kind = next((kind for kind in _ID_KINDS if entries[0].startswith(kind)), "")
    found: list[str] = []
    for entry in entries:
        device = _known_id(entry, kind, ids) if kind else _number_of(entry)
        if not device or present == 0 or (not kind and present is not None and int(device) >= present):
            break
        if device in found:
            return []
        found.append(device)
    return found


def _number_of(entry: str) -> str:
    """The index that this entry of CUDA_VISIBLE_DEVICES begins with; "" if there is none, or a negative one."""
    digits = re.match(r"[+-]?[0-9]+", entry)
    return str(int(digits[0])) if digits and int(digits[0]) >= 0 else ""


def _known_id(entry: str, kind: str, ids: Sequence[str]) -> str:
    """The id that this entry of CUDA_VISIBLE_DEVICES means; "" if the machine has no such GPU, or several."""
    if kind == _GPU and ids:
        meant = [known for known in ids if known.startswith(entry)]
        return meant[0] if len(meant) == 1 else ""
    return entry if entry.startswith(kind) else ""


def count_gpus() -> int | None:
    """The number of NVIDIA GPUs of this machine. None: unknown, because it has GPUs without device nodes of their own, or because
    Slurm has granted GPUs whose nodes have other names."""
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    elsewhere = any(map(os.environ.get, _SLURM_GPUS)) or any(map(os.path.exists, _SHARED_NODES))
    return None if not nodes and elsewhere else len(nodes)


def gpu_ids() -> list[str]:
    """The ids (`GPU-...`) of this machine's GPUs; empty if the driver does not tell all of them."""
    texts = []
    with contextlib.suppress(OSError):
        texts = [path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    found = [
        match[1] for text in texts if (match := re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", text, re.MULTILINE))
    ]
    return found if len(found) == len(texts) else []


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cores_near(pci_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores of the NUMA node of a PCI device, such as `0000:17:00.0`; empty if the system does not tell them."""
    try:
        ranges = [part.partition("-") for part in (devices / pci_id / "local_cpulist").read_text().split(",")]
        return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()


def bind_threads(cores: set[int]) -> None:
    """Bind each thread of this process to those of these cores that it may run on already. A thread that may run on none of them
    stays as it is. Threads that it begins later inherit its cores."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            if common := os.sched_getaffinity(int(thread)) & cores:
                os.sched_setaffinity(int(thread), common)


def granted_cores() -> int:
    """The number of cores that Slurm has granted on this machine; outside a Slurm job, the number of usable cores."""
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(given) if given.isdigit() and int(given) else len(usable_cores())


def granted_memory() -> int:
    """The bytes of memory that Slurm has granted on this machine; 0 if unknown or outside a Slurm job."""
    node, core = os.environ.get("SLURM_MEM_PER_NODE", ""), os.environ.get("SLURM_MEM_PER_CPU", "")
    megabytes = int(node) if node.isdigit() else int(core) * granted_cores() if core.isdigit() else 0
    return megabytes << 20
