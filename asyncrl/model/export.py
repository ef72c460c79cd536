"""Hugging Face format out of any layout. No rank gathers the whole model, unless it is to send it over the network.

    all ranks of the model   take_share: numbered, collective, on the compute thread: each has some tensors whole, on the CPU
    each rank's writer       weights.write_part: its files on disk, beside what follows; no collective
    one rank's writer        weights.commit_version or commit_model, when all have answered: complete or absent

take_whole takes the same way to one rank, which then holds the whole model in CPU memory: what weights.transport=broadcast sends.

Names and values are those of the checkpoint the model was loaded from; bits are those of the parameters, cast to the dtype that
is handed out. Architectures whose modules hold several tensors of a checkpoint in one (fused experts) are taken apart again, which
only a single rank can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config.schema import ConfigError
from asyncrl.data.prompts import load_tokenizer
from asyncrl.model.moving import (
    CPU,
    ShardedModel,
    carry,
    exchange_holdings,
    holding_of,
    local_part,
    this_worker,
    transport_device,
    workers_of,
)
from asyncrl.model.shards import Box, Holding, Piece, plan_moves, plan_owners, tensors_of
from asyncrl.protocol.messages import WrittenFile
from asyncrl.weights.update_group import Bucket, dtype_of, empty_buckets, num_bytes_of
from asyncrl.weights.versions import FileWriter, commit_folder, name_shards

GENERATION_CONFIG = "generation_config.json"
_MAX_BYTES = 256_000_000  # on the way at a rank at once


class ExportedModel(ShardedModel, Protocol):
    """engine.TrainEngine."""

    @property
    def dtype(self) -> torch.dtype:
        """In which its weights are handed out."""

    @property
    def model(self) -> PreTrainedModel:
        """With the parameters and buffers of this rank's stage, by their checkpoint names."""

    @property
    def config(self) -> PreTrainedConfig:
        """Of the whole model."""


def take_share(model: ExportedModel, *, max_bytes: int = _MAX_BYTES) -> dict[str, Tensor]:
    """Copies of this rank's share of the model's tensors, whole, on the CPU, in the dtype handed out, in the model's order.

    Collective over all ranks of the model. Every tensor is in one share, that of a rank of its stage; the shares of a stage's ranks
    have about the same size. Beside its share a rank holds at most max_bytes of what is on the way. Training may go on with the
    model while a share is written.
    """
    tensors, holdings, dtypes = _told(model)
    whole = tensors_of(holdings)
    owners = plan_owners(holdings, {name: num_bytes_of(dtypes[name], whole[name].shape) for name in whole})
    me = this_worker()
    room = {name: torch.empty(piece.shape, dtype=dtypes[name]) for name, piece in whole.items() if owners[name] == me}
    _gather(model, tensors, holdings, whole, owners, dtypes, room, max_bytes)
    return room


def take_whole(model: ExportedModel, bucket_bytes: int, *, max_bytes: int = _MAX_BYTES) -> list[Bucket]:
    """Copies of all tensors, at the model's first worker, in buckets as they are sent (update_group.py); nothing at the others.

    Collective over all ranks of the model. That worker then holds the whole model in CPU memory, in the dtype handed out.
    """
    tensors, holdings, dtypes = _told(model)
    whole = tensors_of(holdings)
    root = workers_of(model)[0]
    buckets: list[Bucket] = []
    if this_worker() == root:
        buckets = empty_buckets(((name, dtypes[name], piece.shape) for name, piece in whole.items()), bucket_bytes)
    room = dict(named for bucket in buckets for named in bucket.tensors())
    _gather(model, tensors, holdings, whole, dict.fromkeys(whole, root), dtypes, room, max_bytes)
    return buckets


def commit_model(
    path: Path,
    files: Sequence[WrittenFile],
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    source_dir: Path,
    tokenizer_path: str | Path,
    fsync: bool = True,
) -> None:
    """A model for the user, of files that weights.write_part has written for `path` at all ranks: `from_pretrained` loads it.

    Complete or absent; what was at path before goes. config: of the model; dtype: of its files; source_dir: the folder
    of the model that it comes from, for its generation config.
    """

    def finish(writer: FileWriter) -> None:
        name_shards(writer, files)
        about = type(config).from_dict(config.to_dict())
        about.dtype = dtype
        about.save_pretrained(writer.directory)
        if (source_dir / GENERATION_CONFIG).is_file():
            writer.write(GENERATION_CONFIG, [(source_dir / GENERATION_CONFIG).read_bytes()])
        load_tokenizer(tokenizer_path).save_pretrained(writer.directory)

    commit_folder(path, files, finish, fsync=fsync, replace=True)


def checkpoint_tensors(model: ExportedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's stage, under the names that the checkpoint has for them. Onloads.

    Raises ConfigError where the checkpoint has other tensors than the module, and the model is on several ranks.
    """
    model.onload()
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters().items()}
    persistent = model.model.state_dict(keep_vars=True)
    tensors |= {name: tensor.detach() for name, tensor in model.model.named_buffers() if name in persistent}
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    changed = sorted(set(empty) - set(_reverted(model.model, empty)))
    if not changed:
        return tensors
    if len(workers_of(model)) > 1:
        raise ConfigError(
            f"allocation: models of type {model.config.model_type!r} keep {changed[0]} in one tensor, their checkpoints in "
            "several; weights of such a model cannot be handed out from more than one rank: train it on d1p1m1"
        )
    return dict(_reverted(model.model, tensors))


def _reverted(model: PreTrainedModel, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    converted: Any = revert_weight_conversion(model, dict(tensors))
    return dict(converted)


def _told(model: ExportedModel) -> tuple[dict[str, Tensor], dict[int, Holding], dict[str, torch.dtype]]:
    """This rank's tensors, what all ranks hold, and the dtype in which each tensor is handed out. Collective."""
    tensors = checkpoint_tensors(model)
    holdings = exchange_holdings(workers_of(model), holding_of(model, tensors))
    dtypes = {name: dtype_of(piece.dtype) for name, piece in tensors_of(holdings).items()}
    return (
        tensors,
        holdings,
        {name: model.dtype if given.is_floating_point else given for name, given in dtypes.items()},
    )


def _gather(
    model: ExportedModel,
    tensors: Mapping[str, Tensor],
    holdings: Mapping[int, Holding],
    whole: Mapping[str, Piece],
    owners: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    room: Mapping[str, Tensor],
    max_bytes: int,
) -> None:
    """Put each tensor together at its owner, in `room` there. Collective."""
    targets: dict[int, dict[str, Box]] = {}
    for name, piece in whole.items():
        targets.setdefault(owners[name], {})[name] = Box.whole(piece.shape)
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    carry(
        plan_moves(holdings, targets, itemsizes=itemsizes, max_bytes=max_bytes),
        read=lambda move: parts[move.name][1][move.box.within(parts[move.name][0])],
        write=lambda move, part: room[move.name][move.box.within(Box.whole(whole[move.name].shape))].copy_(part),
        dtypes=dtypes,
        max_bytes=max_bytes,
        device=transport_device(holdings.values()) if len(holdings) > 1 else CPU,
    )
