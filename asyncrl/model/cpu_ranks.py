"""The ranks of an MFC on CPU workers without a model, such as `advantages:cpu2`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from asyncrl.dataflow.axes import LOSSES, SAMPLES
from asyncrl.model.mesh import ModelMesh


class CpuRanks:
    """One rank: what interfaces use of an engine without its model. Raises AttributeError for everything else."""

    is_head = True  # without tensor ranks and stages, each rank stores its results

    def __init__(self, name: str, mesh: ModelMesh | None) -> None:
        """name: of the placement. mesh: None if this is the only rank."""
        self._name, self._mesh = name, mesh
        self.replica = mesh.parts[SAMPLES] if mesh is not None else 0
        self.num_replicas = mesh.placement.grid.num_replicas if mesh is not None else 1

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        """Sums over data-parallel ranks; collective."""
        total = torch.tensor(values, dtype=torch.float64)
        if self._mesh is not None and self.num_replicas > 1:
            dist.all_reduce(total, group=self._mesh.group_that_sums(LOSSES))
        return total.numpy()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._name} runs on CPU workers, so its engine has no model and no {name}; leave it out of the allocation, then it "
            "runs on the workers of its role's model"
        )
