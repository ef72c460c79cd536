"""A plan: the memory, traffic and FLOPs of each distinct rank of a layout, computed without a GPU and without weights.

ranks.py makes it, rank_main.py computes it for the models of one rank. Peaks are bytes of tensors, each storage rounded up to 512
bytes as the CUDA allocator does.
"""

from __future__ import annotations

import msgspec

# The kind of a storage; "workspace" is memory within a kernel, which no tensor holds
KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "transfer",
    "workspace",
    "other",
)


class Collective(msgspec.Struct, frozen=True):
    """The calls of one collective operation by one rank in one train step or inference call."""

    count: int
    bytes: int  # payload: the largest tensor argument of each call, summed over the calls


def collective_name(group: str, operation: str) -> str:
    """group: the axes along which its ranks differ, as in "data" or "copy_data"; "model": all axes."""
    return f"{group} {operation}".lstrip()


class ModelStep(msgspec.Struct, frozen=True):
    """One MFC of a model on a rank, on its share of one step's batch."""

    model: str
    mfc: str
    peak: int  # bytes, of this model alone
    at_peak: dict[str, int]  # kind -> bytes at the moment of the peak
    kinds: dict[str, int]  # kind -> its own largest bytes
    flops: int  # executed by this rank, recomputation included
    collectives: dict[str, Collective]  # by group and operation, as in "tensor all_gather" (collective_name)
    model_flops: int  # of this rank's share: 6 (inference: 2) x parameters and causal attention, without recomputation
    tokens: int  # of this rank's replica
    moment: str = ""  # of the peak, as in "backward of the last layer"; "": not known
    shared: int = 0  # of the tokens, those of prompts that another sequence of their row has computed


class RankPlan(msgspec.Struct, frozen=True):
    """A model worker, with all of its models. Workers with the same plan are listed once."""

    worker: int
    shards: list[str]  # the shards that it holds, as in handler names
    stands_for: list[int]  # all workers with this plan, `worker` included
    peak: int  # bytes: the largest, over its MFCs, of the MFC's peak and the resident bytes of its other models
    at_peak: dict[str, int]
    kinds: dict[str, int]
    steps: list[ModelStep]
    load_peak: int  # bytes while the models are loaded, one after another
    export_peak: int  # bytes while the actor's weights are exported; 0 if the worker exports nothing
    peak_in: str = ""  # MFC and moment of `peak`; "": between MFCs
    broadcast: int = 0  # bytes of the buckets that it holds while weights are broadcast from its GPU


class PlanError(ValueError):
    """The config cannot be planned. The text names field, value and remedy."""
