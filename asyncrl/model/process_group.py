"""The torch.distributed process group of a worker group (dataflow/worker_groups.py), in one attempt and one incarnation.

The group's first worker serves the rendezvous store and publishes its address; the others find it by name. In a run with
authentication no worker serves a store: the workers meet in name resolve (name_store.py). Inside a process group (meshes,
collectives, reallocation) workers are identified by rank. Messages from and to the master use worker numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.name_store import NameStore
from asyncrl.runtime import security
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.interfaces import GLOO, NCCL, derived_interfaces, interfaces_here, wrong_interface
from asyncrl.runtime.rank_device import rank_device
from asyncrl.weights.update_group import serve_store, store_at

STORE = "model_workers"  # argument of names.process_group


class ProcessGroup:
    """The process group of this worker's worker group. Members: the workers of that group; a worker's rank is its index among them.
    With a single member there is no torch.distributed process group and no mesh.

    waits for: the first member to serve, then all members to join (runtime.start_timeout_s); other members in a collective, at
    most limit_s.  unblocked by: the others' arrival, or the loss of their connection.
    """

    def __init__(self, info: WorkerInfo, worker_groups: WorkerGroups, *, limit_s: float) -> None:
        self._info = info
        self._limit_s = limit_s
        self._store: Store | None = None  # the first member serves it; it must outlive the process group
        self.members = worker_groups.of(info.index)
        self.rank, self.size = self.members.index(info.index), len(self.members)
        self._in_trainer_group = worker_groups.is_local(info.index)

    def __str__(self) -> str:
        where = "" if self._in_trainer_group else f", detached, in incarnation {self._info.group_incarnation}"
        return f"rank {self.rank} of {self.size}{where}"

    def rank_of(self, worker: int) -> int:
        """Return the rank of a worker of this group. Raises ValueError for a worker of another group."""
        return self.members.index(worker)

    async def rendezvous(self, directory: Directory) -> str:
        """Return the address of the store once it is served and published; "" with name resolve."""
        info, runtime = self._info, self._info.runtime
        store = STORE if self._in_trainer_group else f"{STORE}_{self.members[0]}"
        key = directory.names.process_group(store, info.attempt, info.group_incarnation)
        if security.current() is not None:
            self._store = NameStore(directory.resolver, key, lease=directory.lease, limit_s=runtime.start_limit_s)
            return ""
        if self.rank:
            return await directory.wait_for_key(key, f"model_worker/{self.members[0]} to open the rendezvous store")
        self._store, address = serve_store(runtime.host, runtime.start_limit_s)
        await directory.publish(key, address)
        return address

    def join(self, address: str, device: torch.device) -> None:
        """Join the other members. On the compute thread, like everything that waits for them."""
        runtime = self._info.runtime
        if self._store is None:
            host, _, port = address.rpartition(":")
            self._store = store_at(host, int(port), runtime.start_limit_s)
        os.environ.update(derived_interfaces(runtime.host, os.environ, on_gpu=device.type == "cuda"))
        for variable in (GLOO, NCCL) if device.type == "cuda" else (GLOO,):
            if problem := wrong_interface(variable, os.environ, interfaces_here()):
                raise ConfigError(problem)
        if device.type == "cuda":
            # NCCL's flight recorder keeps the newest collectives, and writes them beside the logs if one of them times out
            trace = Path(self._info.run_dir, "logs", f"attempt_{self._info.attempt}", f"nccl_{self.members[0]}_rank_")
            os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(trace))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._limit_s),
        )
        # NCCL creates its communicator at the first operation, which must include all ranks. A copy between two ranks does not,
        # so run a collective first
        dist.all_reduce(torch.zeros(1, device=device))

    def meshes(self, placements: list[ModelPlacement], device: torch.device) -> dict[str, ModelMesh | None]:
        """Given the placements of all groups, return the meshes of this group's models, by name. Collective over the group."""
        made: dict[str, ModelMesh | None] = {}
        for placement in placements:
            if set(placement.workers) <= set(self.members):
                ranks = replace(placement, workers=tuple(map(self.rank_of, placement.workers)))
                made[placement.name] = ModelMesh.make(ranks, device.type)
        return made


def choose_device(index: int, *, gpus: Sequence[str] = (), tf32: bool = False) -> torch.device:
    """As rank_device, on the compute thread. tf32: use TF32 for float32 matrix products on GPUs, in the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = tf32  # has no effect on a CPU
    return rank_device(index, gpus=gpus)
