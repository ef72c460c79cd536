"""The device on which a process computes: one of the GPUs that the launcher gave it, otherwise any GPU, otherwise the CPU.

A process that was given GPUs never computes on the CPU instead: it fails with the reason why torch cannot use them.

    python -m asyncrl.runtime.rank_device 0,1     # prints this reason and a remedy, one line each
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.config.schema import ConfigError
from asyncrl.runtime.devices import bind_threads, cores_near, devices_of

logger = logging.getLogger(__name__)

_REASON_CHARS = 400
_SIMULATED = (
    "ASYNCRL_SIMULATED_GPUS"  # 1: the GPUs of tests, which are files without a driver; processes compute on the CPU
)


def rank_device(index: int = 0, *, gpus: Sequence[str] = ()) -> torch.device:
    """The device, always with an index. A GPU also becomes the current one of the calling thread. CUDA keeps the current device per
    thread, and FSDP and NCCL take it. So call this on the thread that computes.

    gpus: those that the launcher gave this process (WorkerInfo.gpus). With them the process also stays on the cores of the GPU's
    NUMA node, as far as it may use them. index: which of all visible GPUs, modulo their number; it matters only to processes
    without a launcher, which see all of them. Raises ConfigError if torch cannot use the given GPUs.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", index % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if gpus:
            _stay_near(device)
        return device
    if gpus and os.environ.get(_SIMULATED) != "1":
        raise ConfigError("; ".join(why_unusable(gpus)))
    return torch.device("cpu")


def _stay_near(device: torch.device) -> None:
    about: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack these fields
    if not hasattr(about, "pci_bus_id"):  # torch does not document these fields
        return
    pci_id = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    cores = cores_near(pci_id)
    bind_threads(cores)
    logger.debug("cores near %s (%s): %s", device, pci_id, sorted(cores) or "the system does not tell them")


def why_unusable(gpus: Sequence[str]) -> tuple[str, str]:
    """Why torch cannot use these GPUs, and a remedy. Both are empty if it can."""
    if torch.cuda.is_available() or os.environ.get(_SIMULATED) == "1":
        return "", ""
    chosen, build = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.version.cuda or torch.version.hip
    if not build:
        why, remedy = "it is a build for CPUs", "install a CUDA build of torch (launcher/setup.sh)"
    elif chosen is not None and not devices_of(chosen, None):
        why, remedy = f"CUDA_VISIBLE_DEVICES={chosen!r} names no GPU", "keep the value that the launcher sets"
    else:
        why = _error_of_cuda()
        remedy = f"check with `nvidia-smi` that the driver runs CUDA {build}; update it, or install an older torch"
    return (
        f"torch {torch.__version__} cannot use the GPUs {','.join(gpus)}, which this run has: {why}",
        f"{remedy}, or start the launcher with CUDA_VISIBLE_DEVICES= (empty) to run on the CPU",
    )


def _error_of_cuda() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:_REASON_CHARS].rstrip(".")
    return "it finds none"


if __name__ == "__main__":
    print(*why_unusable(sys.argv[1].split(",")), sep="\n")
