"""A rank's coordinates in the grid of a model, and the process groups of its neighbours.

Every model worker is a rank of a torch.distributed world (process_group.py). A model's grid covers some of the ranks, in training
order (pipe, data, tensor; the last varies fastest). Making a mesh makes process groups, which is collective over the whole world:
every worker makes the meshes of all models of its group in the same order, including models that it does not hold. In this file a
placement's workers are ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.dataflow.topology import ModelPlacement

DIMS = ("pipe", "data", "tensor")


@dataclass(frozen=True)
class ModelMesh:
    """The mesh of one model, from the point of view of one rank."""

    placement: ModelPlacement
    device_mesh: DeviceMesh  # dims: pipe, data, tensor
    pipe: int
    data: int
    tensor: int
    pipe_group: dist.ProcessGroup  # the stages with the same data and tensor coordinates
    data_group: dist.ProcessGroup
    tensor_group: dist.ProcessGroup
    model_group: dist.ProcessGroup  # all ranks of the model

    @classmethod
    def make(cls, placement: ModelPlacement, device_type: str) -> ModelMesh | None:
        """Make the mesh of a model. Collective over the world; waits at most the world's timeout. Returns None if this rank holds
        no part of the model."""
        if list(placement.workers) != sorted(placement.workers):
            # torch numbers the ranks of a group in the world's order, so another order would contradict the coordinates
            raise ValueError(
                f"model {placement.name!r}: its workers are {list(placement.workers)}; list them in ascending order"
            )
        grid = placement.grid
        ranks = torch.tensor(placement.workers).reshape(grid.pipe, grid.data, grid.tensor)
        device_mesh = DeviceMesh(device_type, ranks, mesh_dim_names=DIMS)
        model_group = dist.new_group(list(placement.workers))
        if dist.get_rank() not in placement.workers:
            return None
        at = placement.shard_of(dist.get_rank())
        pipe_group, data_group, tensor_group = (device_mesh.get_group(dim) for dim in DIMS)
        return cls(
            placement,
            device_mesh,
            at.pipe,
            at.data,
            at.tensor,
            pipe_group,
            data_group,
            tensor_group,
            model_group,
        )

    def collectives(self) -> dict[str, int]:
        """The number of collectives that this rank has entered in each of its groups, except pipe groups: those send and receive.
        Any thread may call it."""
        groups = {"data": self.data_group, "tensor": self.tensor_group, "model": self.model_group}
        device = torch.device(self.device_mesh.device_type)
        entered = {}
        for dim, group in groups.items():
            if group.size() > 1:
                first = dist.get_process_group_ranks(group)[0]
                with contextlib.suppress(RuntimeError):  # a backend that does not number its collectives
                    backend: Any = group._get_backend(device)  # torch's type stubs lack the next method
                    number = backend._get_sequence_number_for_group()
                    entered[f"{self.placement.name} {dim} group {first}"] = number
        return entered

    @property
    def is_first_stage(self) -> bool:
        return self.pipe == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipe == self.placement.grid.pipe - 1

    @property
    def is_head(self) -> bool:
        """Whether this rank stores and reports the outputs of its replica."""
        return self.is_last_stage and self.tensor == 0
