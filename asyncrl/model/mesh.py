"""A rank's coordinates in the grid of a model, and the process groups of its neighbours.

Every model worker is a rank of a torch.distributed world (process_group.py). A model's grid covers some of the ranks, in training
order (pipe, copy, data, context, tensor; the last varies fastest). Making a mesh makes process groups, which is collective over the
whole world: every worker makes the meshes of all models of its group in the same order, including models that it does not hold. In
this file a placement's workers are ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.dataflow.axes import EXPERTS, LAYERS, PEERS, SUMS, TOKENS
from asyncrl.dataflow.topology import ModelPlacement


@dataclass(frozen=True)
class ModelMesh:
    """The mesh of one model, from the point of view of one rank."""

    placement: ModelPlacement
    device_mesh: DeviceMesh  # its dims are the axes, in training order. Those that shard a copy of the weights are one
    # The same for what an axis inside others splits, with two dims in place of that one: PEERS, and the axis
    inner_mesh: DeviceMesh
    rank: int
    parts: Mapping[str, int]  # which part of the samples, layers, matrices and rows this rank has
    groups: Mapping[frozenset[str], dist.ProcessGroup]  # by the axes along which the group's ranks differ

    @classmethod
    def make(cls, placement: ModelPlacement, device_type: str) -> ModelMesh | None:
        """Make the mesh of a model. Collective over the world; waits at most the world's timeout. Returns None if this rank holds
        no part of the model."""
        if list(placement.workers) != sorted(placement.workers):
            # torch numbers the ranks of a group in the world's order, so another order would contradict the coordinates
            raise ValueError(
                f"model {placement.name!r}: its workers are {list(placement.workers)}; list them in ascending order"
            )
        topology, rank = placement.topology, dist.get_rank()
        dims, sizes = _dims(placement), dict(zip(topology.axes, topology.dims, strict=True))
        workers = torch.tensor(placement.workers).reshape([math.prod(sizes[axis] for axis in dim) for dim in dims])
        device_mesh = DeviceMesh(device_type, workers, mesh_dim_names=tuple(map("_".join, dims)))
        inner_mesh = device_mesh
        groups: dict[frozenset[str], dist.ProcessGroup] = {}
        wanted = [frozenset(topology.axes), *(frozenset(placement.grid.summed(what)) for what in SUMS)]
        wanted += [frozenset({name}) for name in topology.axes]
        for names in (names for names in dict.fromkeys(wanted) if names not in map(frozenset, dims)):
            for ranks in placement.groups(*names):
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    groups[names] = group
        for axis, size in placement.grid.inside:
            sharding = placement.grid.sharding
            sizes_of_dims = placement.grid.num_shards // size, size
            inner_mesh = device_mesh._unflatten("_".join(sharding), sizes_of_dims, (PEERS, axis.name))
            # A group of its own, also where FSDP's has the same ranks: exchanges then do not queue behind its gathers
            sharers = placement.groups(*sharding)
            for ranks in (group[at : at + size] for group in sharers for at in range(0, len(group), size)):
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    groups[frozenset({axis.name})] = group
        if rank not in placement.workers:
            return None
        groups |= {frozenset(dim): device_mesh.get_group("_".join(dim)) for dim in dims}
        own = {axis.splits: placement.part_of(rank, axis.splits) for axis, _ in placement.grid.ranked}
        for axis, _ in placement.grid.inside:
            groups[frozenset({PEERS})] = inner_mesh.get_group(PEERS)
            own[axis.splits] = inner_mesh.get_local_rank(axis.name)
        return cls(placement, device_mesh, inner_mesh, rank, own, groups)

    def group(self, *names: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along these axes only. There is one for each axis, for all axes, and for those over
        which something is summed. Raises KeyError for others."""
        return self.groups[frozenset(names)]

    def group_that_sums(self, what: str) -> dist.ProcessGroup:
        """The ranks over which losses, gradients, partials or norms are summed."""
        return self.group(*self.placement.grid.summed(what))

    def group_that_splits(self, what: str) -> dist.ProcessGroup:
        """The ranks that share out the samples, layers, matrices or rows that this rank has a part of."""
        return self.group(*(axis.name for axis in self.placement.grid.axes if axis.splits == what))

    def submesh(self, what: str) -> DeviceMesh:
        """The mesh of group_that_sums(what)."""
        names = {*self.placement.grid.summed(what)}
        return self.device_mesh[tuple("_".join(dim) for dim in _dims(self.placement) if names.issuperset(dim))]

    def submesh_of_parts(self, what: str) -> tuple[DeviceMesh, DeviceMesh]:
        """Of an axis inside others: the mesh of group_that_splits(what), and that of the ranks with the same part, over which its
        gradients are summed. FSDP splits it further along the last dim of the second one."""
        (name,) = (axis.name for axis in self.placement.grid.axes if axis.splits == what)
        copies = [axis.name for axis in self.placement.grid.axes if axis.copies]
        return self.inner_mesh[name], self.inner_mesh[(*copies, PEERS)]

    def label(self, names: Collection[str]) -> str:
        """The name of a group in reports and plans: the axes along which its ranks differ, or `model` for all of them."""
        axes = self.placement.topology.axes
        if {*names} == {*axes}:
            return "model"
        return "_".join(axis for axis in (*axes, *sorted({*names} - {*axes})) if axis in names)

    def collectives(self) -> dict[str, int]:
        """The number of collectives that this rank has entered in each of its groups, except pipe groups: those send and receive.
        Any thread may call it."""
        grid = self.placement.grid
        used = [*map(grid.summed, SUMS), *((axis.name,) for axis in grid.axes if axis.splits in (TOKENS, EXPERTS))]
        device = torch.device(self.device_mesh.device_type)
        entered = {}
        for names in dict.fromkeys(used):
            group = self.group(*names)
            if group.size() > 1:
                first = dist.get_process_group_ranks(group)[0]
                with contextlib.suppress(RuntimeError):  # a backend that does not number its collectives
                    backend: Any = group._get_backend(device)  # torch's type stubs lack the next method
                    number = backend._get_sequence_number_for_group()
                    entered[f"{self.placement.name} {self.label(names)} group {first}"] = number
        return entered

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is in the first copy of the weights. The others have equal gradients."""
        shard = self.placement.shard_of(self.rank)
        return not any(axis.copies and at for axis, at in zip(shard.axes, shard.coordinates, strict=True))

    @property
    def is_first_stage(self) -> bool:
        return self.parts[LAYERS] == 0

    @property
    def is_last_stage(self) -> bool:
        return self.parts[LAYERS] == self.placement.grid.num_stages - 1

    @property
    def is_head(self) -> bool:
        """Whether this rank stores and reports the outputs of its replica."""
        return self.rank in self.placement.heads


def _dims(placement: ModelPlacement) -> list[tuple[str, ...]]:
    """The axes of each dim of the mesh: FSDP splits the weights along one dim."""
    sharding = placement.grid.sharding
    return [tuple(dim) for _, dim in groupby(placement.topology.axes, lambda axis: "" if axis in sharding else axis)]
