"""Which GPUs and cores this process may use, found without torch and without a driver."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Asks the file system: no torch, no driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device.strip()]
    nodes = [match[1] for path in Path("/dev").glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name))]
    return [str(index) for index in range(len(nodes))]


def usable_cores() -> list[int]:
    """The cores that this process may run on, by number."""
    return sorted(os.sched_getaffinity(0))
