"""The trainer's side of a transport of weights: one rank of the served model holds its share of the newest version in memory.

    compute threads of all ranks -- export.take_buckets --> HeldShare --> TrainerSide --> servers, as the transport sends it

`config/transports.py` describes the life of a version. `transports.py` has the table of kinds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import WeightsConfig
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.services import Services
from asyncrl.weights.update_group import Bucket, digest
from asyncrl.weights.versions import ScoredText


@dataclass(frozen=True)
class HeldShare:
    """One rank's share of one version, in CPU memory. On a single rank it is the whole model."""

    version: WeightVersion
    buckets: list[Bucket]
    scored_text: ScoredText | None = None  # weights.verify_logprobs
    others: Mapping[int, list[TensorSpecs]] = field(default_factory=dict)  # at the sender: buckets of other workers
    digests: list[asyncio.Future[str]] = field(default_factory=list)  # of the buckets; see `begin_digests`

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [named for bucket in self.buckets for named in bucket.tensors()]

    @property
    def specs(self) -> list[TensorSpecs]:
        """All buckets of the version, in the order in which they are sent."""
        return [bucket.specs for bucket in self.buckets] + [specs for part in self.others.values() for specs in part]

    def begin_digests(self) -> None:
        """Compute the digests on other threads, once."""
        loop = asyncio.get_running_loop()
        if not self.digests:
            self.digests.extend(loop.run_in_executor(None, digest, bucket.flat) for bucket in self.buckets)


@dataclass(frozen=True)
class Rank:
    """One rank of the served model, and the means that a transport uses there."""

    info: WorkerInfo
    is_first: bool  # of the model's ranks
    weights: WeightsConfig
    device: torch.device
    directory: Directory
    services: Services


class TrainerSide:
    """Holds this rank's share. A transport from memory has a subclass that also sends it. Training never waits for that.

    Each kind is opened once for each rank, and closed with the worker. While open it serves its own endpoints. The first rank
    publishes the address for the gserver manager (`weight_sender` in name resolve).
    """

    def __init__(self) -> None:
        self.held: HeldShare | None = None

    def hold(self, held: HeldShare) -> None:
        """Replace the held share. The old one stays in memory only while it is being sent or written."""
        held.begin_digests()
        self.held = held
