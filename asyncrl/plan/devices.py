"""Kinds of GPU (pure): memory, compute, bandwidths, and the memory that CUDA's libraries take."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.runtime.devices import PEAK_FLOPS

_MIB = 1 << 20
GPUS_PER_HOST = 8  # of the machines that the bandwidths between hosts are of

# Least memory of a process beside its tensors. Measured ranges: context and kernels of torch 0.4 to 0.7 GiB, the workspaces of
# cuBLAS and cuBLASLt 32 MiB each on Hopper, NCCL's buffers 0.3 to 0.8 GiB with the communicators of data and tensor ranks
_CONTEXT_BYTES = 512 * _MIB
_CUBLAS_BYTES = 64 * _MIB
_NCCL_BYTES = 512 * _MIB


@dataclass(frozen=True)
class Device:
    """A kind of GPU. Speeds are the peaks of its data sheet, for a lower bound of time."""

    name: str
    memory: int  # bytes, as nvidia-smi reports them
    flops: float  # dense bfloat16 FLOP/s
    memory_bandwidth: float  # bytes/s
    link: float  # bytes/s that a GPU can receive from others of its host
    network: float  # bytes/s that a GPU's network adapter can receive from other hosts


def _device(name: str, mib: int, gpu: str, memory_gbs: float, link_gbs: float, network_gbs: float) -> Device:
    return Device(name, mib * _MIB, PEAK_FLOPS[gpu], memory_gbs * 1e9, link_gbs * 1e9, network_gbs * 1e9)


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA H100 data sheet (SXM5): 3.35 TB/s, NVLink 900 GB/s in both directions; DGX H100: 8 x 400 Gb/s
        _device("h100-80g", 81_559, "H100", 3_350, 450, 50),
        # NVIDIA H200 data sheet (SXM): compute and NVLink of the H100, 4.8 TB/s; DGX H200: 8 x 400 Gb/s
        _device("h200-141g", 143_771, "H200", 4_800, 450, 50),
        # NVIDIA A100 data sheet (SXM4): 2,039 and 1,555 GB/s, NVLink 600 GB/s; DGX A100: 8 x 200 Gb/s
        _device("a100-80g", 81_920, "A100", 2_039, 300, 25),
        _device("a100-40g", 40_960, "A100", 1_555, 300, 25),
        # NVIDIA L40S data sheet: 864 GB/s, PCIe 4.0 x16. Network: a 200 Gb/s adapter for each GPU is assumed
        _device("l40s-48g", 46_068, "L40S", 864, 32, 25),
        # NVIDIA DGX B200 data sheet, an eighth of it: 64 TB/s, NVLink 14.4 TB/s, 8 x 400 Gb/s
        _device("b200-192g", 183_359, "B200", 8_000, 900, 50),
        # NVIDIA Ada architecture paper, GeForce RTX 4090: 1,008 GB/s, PCIe 4.0 x16. Network: 100
        # Gb/s is assumed
        _device("rtx4090-24g", 24_564, "RTX 4090", 1_008, 32, 12.5),
    )
}
DEFAULT = "h100-80g"
# Words of the name that nvidia-smi reports -> kind. The H100 with PCIe and the H100 NVL have other speeds
_NAMES = {"H200": "h200-141g", "H100 80GB HBM3": "h100-80g", "L40S": "l40s-48g", "B200": "b200-192g"} | {
    "RTX 4090": "rtx4090-24g",
    "A100-SXM4-80GB": "a100-80g",
    "A100-SXM4-40GB": "a100-40g",
}


def device_named(reported: str) -> Device | None:
    """The kind of GPU with this name in nvidia-smi; None: the table lacks it."""
    return next((DEVICES[kind] for words, kind in _NAMES.items() if words in reported), None)


def library_bytes(*, communicates: bool) -> int:
    """Bytes that CUDA, cuBLAS and, if the process communicates with other GPUs, NCCL take at least."""
    return _CONTEXT_BYTES + _CUBLAS_BYTES + _NCCL_BYTES * communicates
