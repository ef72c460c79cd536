"""The transports of weights: how the bytes of a version get from the trainer to a generation server, and the traits of each (pure).

The life of a version:

    trainer   every rank of the served model holds its share (`TrainerSide.hold`), and the master puts the version into name resolve
              (only transports from memory); then the files are written and published
    manager   `Offers` decides which servers get the version from memory, `UpdatePlan` which load it and when; `ManagerSide`
              has a paused server load it
    server    `ServerSide` receives the tensors, checks them and gives them to the engine

Each side has a base class and a table of kinds, in `transports.py` of `model/`, `manager/` and `generation/`. Code outside a
transport's own files asks for a trait and never compares the name of a transport.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportTraits:
    """The defaults are the traits of files. Every run writes them: a server that gets a version in no other way loads its files."""

    # The trainer holds each version in memory and offers it before its files are complete, to servers that serve already
    from_memory: bool = False
    # Trainer and servers form process groups (gloo, NCCL), whose connections do not authenticate
    forms_groups: bool = False


FILES = "disk"
TRANSPORTS = {
    FILES: TransportTraits(),
    "broadcast": TransportTraits(from_memory=True, forms_groups=True),
}


def forms_nccl_groups(transport: str, backend: str, *, on_gpu: bool) -> bool:
    """Whether trainer and servers form groups of NCCL. backend: weights.broadcast_backend. on_gpu: the trainer has GPUs."""
    return transport_of(transport).forms_groups and (backend == "nccl" or (backend == "auto" and on_gpu))


def transport_of(name: str) -> TransportTraits:
    """The traits of a transport. An unknown transport, which another check refuses, has the traits of files."""
    return TRANSPORTS.get(name, TRANSPORTS[FILES])
