"""The device whose kernels the model code chooses: that of the tensors, except in a plan (asyncrl/plan), whose tensors have no data
and stand for those of a GPU."""

from __future__ import annotations

import torch

_planned_device_type = ""  # of this process; "": the process computes


def plan_for(device_type: str) -> None:
    """Choose the kernels of this device type in the whole process, whatever the device of the tensors. For processes that compute
    nothing."""
    global _planned_device_type
    _planned_device_type = device_type


def uses_gpu_kernels(device: torch.device) -> bool:
    """Whether computations on tensors of this device use the kernels of a GPU."""
    return (_planned_device_type or device.type) == "cuda"


def has_flash_attention(device: torch.device) -> bool:
    """Whether FlashAttention-2 supports this device."""
    return _capability(device) >= (8, 0)


def has_faster_sdpa(device: torch.device) -> bool:
    """Whether sdpa has a faster kernel than FlashAttention-2 for this device. Measured on an H200; a plan assumes such a GPU."""
    return _capability(device) >= (9, 0)


def _capability(device: torch.device) -> tuple[int, int]:
    if _planned_device_type:
        return (9, 0) if _planned_device_type == "cuda" else (0, 0)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
