"""Copies a model's weights into another of the same architecture, in any two layouts: actor -> ref, actor -> actor@1. Of models
with adapters only the trained ones are copied: the bases are the same.

    target <- share * source + (1 - share) * target

Each rank of the target receives its parts from source ranks that hold them; no rank assembles whole tensors. share=1 copies. A
smaller share, applied periodically, makes the target a moving average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from asyncrl.model.engine import TrainEngine
from asyncrl.model.sharding import local_part
from asyncrl.model.shards import Holding, Move, ShardError, plan_moves, plan_rounds, rounds_of, tensors_of
from asyncrl.model.tensor_exchange import (
    MAX_BYTES,
    carry,
    exchange,
    holding_of,
    this_worker,
    transport_device,
)
from asyncrl.weights.update_group import dtype_of


class _HeldShards(msgspec.Struct, frozen=True):
    """A worker's parts of both models."""

    source: Holding | None
    target: Holding | None


@torch.no_grad()
def reallocate(
    source: TrainEngine | None,
    target: TrainEngine | None,
    *,
    workers: Sequence[int],
    share: float = 1.0,
    max_bytes: int = MAX_BYTES,
) -> int:
    """Copy the weights (share=1) or average them. Returns the number of bytes that this worker sent.

    Collective over `workers`: all that hold a part of either model, in the same order everywhere (e.g. ascending).

    source, target: this worker's engines, or None if it has no part of that model. The mean is computed in float32 and stored in
    the target's own dtype: 16-bit targets lose steps that are small relative to a weight. Raises ShardError on all workers,
    before anything changes, if the models' tensors differ. A rank has at most max_bytes in transit.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share={share}: it must be above 0 and at most 1")
    for model in (source, target):
        if model is not None:
            model.onload()
    read_from = source.own_parameters() if source is not None else {}
    written_to = target.own_parameters() if target is not None else {}
    mine = _HeldShards(
        holding_of(source, read_from) if source is not None else None,
        holding_of(target, written_to) if target is not None else None,
    )
    held_by = {
        worker: msgspec.msgpack.decode(payload, type=_HeldShards)
        for worker, payload in exchange(workers, msgspec.msgpack.encode(mine)).items()
    }
    sources = {worker: held.source for worker, held in held_by.items() if held.source is not None}
    targets = {worker: held.target for worker, held in held_by.items() if held.target is not None}
    ours, theirs = tensors_of(sources), tensors_of(targets)
    check_fit(
        {name: piece.shape for name, piece in ours.items()}, {name: piece.shape for name, piece in theirs.items()}
    )
    travelling = theirs if share == 1.0 else ours  # share=1: cast to the target's dtype before sending
    dtypes = {name: dtype_of(piece.dtype) for name, piece in travelling.items()}
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    wanted = {worker: {name: piece.box for name, piece in held.pieces.items()} for worker, held in targets.items()}
    moves = plan_moves(sources, wanted, itemsizes=itemsizes, max_bytes=max_bytes)
    rounds = rounds_of(plan_rounds(moves, itemsizes=itemsizes, max_bytes=max_bytes), this_worker())
    here = {name: local_part(tensor) for name, tensor in read_from.items()}
    there = {name: local_part(tensor) for name, tensor in written_to.items()}

    def read(move: Move) -> Tensor:
        box, part = here[move.name]
        return part[move.box.within(box)]

    def write(move: Move, new: Tensor) -> None:
        box, part = there[move.name]
        old = part[move.box.within(box)]
        if share < 1.0 and old.is_floating_point():
            new = share * new.to(old.device).float() + (1.0 - share) * old.float()
        old.copy_(new)

    here_is = source if source is not None else target
    assert here_is is not None, "this worker holds a part of one of the models"
    device = transport_device([*sources.values(), *targets.values()], here_is.device)
    return carry(rounds, read=read, write=write, dtypes=dtypes, device=device)


def check_fit(source: Mapping[str, tuple[int, ...]], target: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shapes of all tensors of two models, by name. Raises ShardError if they differ."""
    for name in sorted(set(source) | set(target)):
        if source.get(name) != target.get(name):
            raise ShardError(
                f"the models do not fit: tensor {name} has the shape {source.get(name, 'of none')} in the source, "
                f"{target.get(name, 'of none')} in the target"
            )
