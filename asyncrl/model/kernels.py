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
    if _planned_device_type:
        return _planned_device_type == "cuda"
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
