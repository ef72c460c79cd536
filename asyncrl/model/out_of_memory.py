"""The error of a call for which the GPU has too little memory: what was computed, what is allocated, and what helps.

The master's calls are the one place where torch's error is caught and named (calls.py). Before that, inference of a model on a
single rank runs once more, with half of the tokens per micro-batch (engine.py `_forward`). Nothing else is repeated: several ranks
would wait for each other in a collective, and the gradients of a train step would be half done.
"""

from __future__ import annotations

import torch

from asyncrl.config.schema import TrainConfig

_GIB = 1 << 30


class OutOfDeviceMemory(RuntimeError):
    """recurs_as: name of the failure, equal for failures that a restart would repeat (WorkerStatus.recurs_as)."""

    def __init__(self, call: str, where: str, train: TrainConfig, error: Exception) -> None:
        """call: an MFC, or another call of the master. where: the micro-batch; "" outside of one."""
        self.recurs_as = f"out of GPU memory in {call}"
        used = ""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            allocated, reserved = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
            used = f"{allocated:.1f} GiB allocated, {reserved:.1f} GiB reserved; "
        reason = str(error).partition("If reserved but unallocated memory")[0].strip()
        super().__init__(f"{self.recurs_as}{where and f', {where}'}: {used}{reason}\n{advice(train)}")


def advice(train: TrainConfig) -> str:
    """What makes a step need less memory, from what costs least time."""
    changes = [
        f"train.max_tokens_per_mb={train.max_tokens_per_mb // 2}",
        "train.gradient_checkpointing=true" if train.gradient_checkpointing is not True else "",
        "train.accumulate_unsharded=false" if train.accumulate_unsharded else "",
    ]
    return (
        f"Use {' or '.join(filter(None, changes))}, or more ranks in the allocation. `asyncrl-launch plan` of this config "
        "counts its memory and names changes that fit"
    )
