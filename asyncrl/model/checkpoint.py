"""Checkpoints: everything needed to continue training: models, optimizers, random state. Any layout can load them.

    all ranks            snapshot: a call in the master's order, collective, on the compute thread; copies this rank's parts to CPU
    each rank's writer   write: its own files, concurrently with later calls; no collective
    one rank's writer    commit, after all have answered: checks that no part is missing, writes the manifest, renames the folder
    all ranks            load: a call in the master's order, collective

Tensors are stored in torch.distributed.checkpoint's safetensors format (HuggingFaceStorageReader): each file records where its
tensors belong in the whole ones. torch.distributed.checkpoint loads them; each rank reads the parts that it holds in its layout.
Names are global: `<model>.<checkpoint name>`, `<model>.<checkpoint name>.exp_avg`. Nothing is pickled. torch's usual format has a
pickled `.metadata`, which lets anyone with write access to the folder run code here. This format has JSON headers, and the rest is
JSON.

weights/checkpoints.py has the part that needs no torch: the manifest, the folder's location and the check for completeness.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into

from asyncrl.model.engine import TrainEngine
from asyncrl.model.sharding import local_part
from asyncrl.model.shards import plan_writers, tensors_of
from asyncrl.model.tensor_exchange import (
    exchange_holdings,
    holding_of,
    raised_by_all,
    this_worker,
    workers_of,
)
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.versions import WrittenFile
from asyncrl.weights.checkpoints import (
    FORMAT,
    MANIFEST,
    MASTER_FILE,
    CheckpointError,
    Manifest,
    check,
    read_manifest,
    state_file,
    verify,
)
from asyncrl.weights.update_group import dtype_of, num_bytes_of
from asyncrl.weights.versions import FileWriter, commit_folder, write_part

__all__ = ["CheckpointError", "commit", "load", "read_into", "snapshot", "verify", "write"]

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, each as large as the parameter


class RandomState(msgspec.Struct, frozen=True):
    """State of the process-wide random generators."""

    torch: bytes
    cuda: bytes | None
    numpy: tuple[str, list[int], int, int, float]
    python: tuple[int, list[int], float | None]


class WorkerState(msgspec.Struct, frozen=True):
    """State of a worker other than tensors.

    steps: by model, the optimizer's step count of each trained parameter. shapes: of the tensors that the files must contain.
    """

    random: RandomState
    steps: dict[str, dict[str, float]]
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Snapshot:
    """This worker's part of a checkpoint, in CPU memory."""

    worker: WorkerState
    tensors: dict[str, Tensor] = field(default_factory=dict)  # parts, by global name
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)  # first index of each part in the whole tensor


# ---------------------------------------------------------------------------------------------------------------- saving


@torch.no_grad()
def snapshot(models: Mapping[str, TrainEngine]) -> Snapshot:
    """Copy this worker's share of these models to the CPU. Each part of a tensor is in one worker's share, in its own dtype.

    models: the engines of the models to save, by name, in the same order on every worker.
    Collective over the ranks of each model. Training may continue while the snapshot is written.
    """
    result = Snapshot(WorkerState(_random_state(), {}, {}))
    for model_name, model in models.items():
        model.onload()
        tensors = model.own_parameters()
        holdings = exchange_holdings(workers_of(model), holding_of(model, tensors))
        whole = tensors_of(holdings)
        sizes = {name: num_bytes_of(dtype_of(piece.dtype), piece.shape) for name, piece in whole.items()}
        mine = set(plan_writers(holdings, sizes)[this_worker()])
        steps = result.worker.steps[model_name] = {}
        for name, tensor in tensors.items():
            state = model.optimizer.state.get(tensor, {}) if model.optimizer is not None else {}
            if state:
                steps[name] = float(state["step"])
            if name not in mine:
                continue
            named = {name: tensor} | {f"{name}.{moment}": state[moment] for moment in _MOMENTS if state}
            for full_name, part in named.items():
                box, local = local_part(part)
                result.tensors[f"{model_name}.{full_name}"] = local.to("cpu", copy=True).contiguous()
                result.offsets[f"{model_name}.{full_name}"] = box.start
        expected = {f"{name}.{moment}": whole[name].shape for name in steps for moment in _MOMENTS}
        if this_worker() == workers_of(model)[0]:
            expected |= {name: piece.shape for name, piece in whole.items()}
        result.worker.shapes.update({f"{model_name}.{name}": shape for name, shape in expected.items()})
    return result


def write(path: Path, part: Snapshot, *, shard_bytes: int = 2_000_000_000, fsync: bool = True) -> list[WrittenFile]:
    """Write this worker's files; they are on disk on return. Runs on any thread. Raises like weights.write_part."""
    me = this_worker()
    return write_part(
        path,
        part.tensors.items(),
        part=me,
        shard_bytes=shard_bytes,
        fsync=fsync,
        offsets=part.offsets,
        others={state_file(me): msgspec.json.encode(part.worker)},
    )


def commit(path: Path, files: Sequence[WrittenFile], *, master: str = "", fsync: bool = True) -> None:
    """Make a checkpoint of the files of all workers, on a process that sees them all. Afterwards path is complete or absent.

    master: the text of master.json. Raises CheckpointError if a part of a tensor is missing, WeightsError if a file differs from
    its report, OSError (disk full, ...). Errors leave nothing behind.
    """

    def finish(writer: FileWriter) -> None:
        workers = sorted(int(file.name[len("state-") : -len(".json")]) for file in files if not file.tensors)
        _check_whole(writer.directory, [_read_state(writer.directory, worker) for worker in workers])
        if master:
            writer.write(MASTER_FILE, [master.encode()])
        manifest = Manifest(FORMAT, dict(sorted(writer.files.items())), workers)
        writer.write(MANIFEST, [msgspec.json.encode(manifest)])

    commit_folder(path, files, finish, fsync=fsync)


# --------------------------------------------------------------------------------------------------------------- loading


@torch.no_grad()
def load(
    path: Path,
    models: Mapping[str, TrainEngine],
    *,
    workers: Sequence[int],
    or_as_is: Collection[str] = (),
    instead: Mapping[str, str] | None = None,
) -> None:
    """Load a checkpoint, saved in any layout, into these models.

    Collective over `workers`, which must be the same everywhere. Each worker checks some of the files; if one check fails, all
    workers raise CheckpointError before anything changes. For a tensor that does not fit a model (missing, other shape) only the
    ranks that find it raise CheckpointError. A model saved without optimizer state is loaded without it. Random state is restored
    if `workers` are those that saved. A second model of a role (`ref@1`) that was not saved is loaded from the role's first one.
    or_as_is: roles whose models stay unchanged if the checkpoint lacks them. instead: model -> the saved model that it is loaded
    from if the checkpoint lacks it.
    """
    manifest = _verified(path, workers)
    me = this_worker()
    states = [_read_state(path, worker) for worker in manifest.workers]
    steps: dict[str, dict[str, float]] = {}
    for state in states:
        for model_name, of_model in state.steps.items():
            steps.setdefault(model_name, {}).update(of_model)
    saved = {name.partition(".")[0] for state in states for name in state.shapes}
    for model_name, model in models.items():
        role = model_name.partition("@")[0]
        source = role if model_name not in saved and role in saved else model_name
        source = source if source in saved else (instead or {}).get(model_name, source)
        if source in saved or role not in or_as_is:
            model.onload()
            _load_model(path, source, model.own_parameters(), model.optimizer, steps.get(source, {}))
    if manifest.workers == sorted(workers):
        _set_random_state(states[manifest.workers.index(me)].random)


@torch.no_grad()
def read_into(path: Path, model_name: str, tensors: Mapping[str, Tensor]) -> None:
    """Read the parameters of a saved model into these tensors, by name, whatever layout it was saved in. Each rank on its own.
    Raises CheckpointError if they do not fit. The files are not verified."""
    _load_model(path, model_name, tensors, None, {})


def _verified(path: Path, workers: Sequence[int]) -> Manifest:
    """Collective over `workers`: each checks some of the files. If one finds an error, all raise it."""
    manifest = read_manifest(path)
    at = list(workers).index(this_worker())
    mine = [name for place, name in enumerate(manifest.files) if place % len(workers) == at]
    with raised_by_all(workers, CheckpointError):
        check(path, {name: manifest.files[name] for name in mine})
    return manifest


def _load_model(
    path: Path,
    model_name: str,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    steps: Mapping[str, float],
) -> None:
    """Read into the tensors in place with torch.distributed.checkpoint, each rank on its own."""
    wanted: dict[str, Any] = {}
    for name, tensor in parameters.items():
        wanted[f"{model_name}.{name}"] = tensor.detach()
        if optimizer is None or name not in steps or not tensor.requires_grad:
            continue
        state = optimizer.state[tensor]
        fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        state["step"] = torch.tensor(steps[name], dtype=torch.float32, device=tensor.device if fused else "cpu")
        for moment in _MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
            wanted[f"{model_name}.{name}.{moment}"] = state[moment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # load_into warns about no_dist, which is intended here
            load_into(wanted, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    except (ValueError, RuntimeError, KeyError, CheckpointException) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        raise CheckpointError(f"{path} does not fit model {model_name!r}: {causes[0]}") from error


# ---------------------------------------------------------------------------------------------------------------- inside


def _check_whole(directory: Path, states: Sequence[WorkerState]) -> None:
    """Check by the files' headers that every tensor is complete: the sizes of its parts add up. Parts cannot overlap, because each
    is written once."""
    found: dict[str, int] = {}
    for name, about in HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata)
        found[name] = sum(math.prod(chunk.sizes) for chunk in about.chunks)
    expected = {name: torch.Size(shape).numel() for state in states for name, shape in state.shapes.items()}
    if unknown := found.keys() - expected.keys():
        raise CheckpointError(f"{directory} is incomplete: no worker's state has the shape of tensor {min(unknown)}")
    for name, num in sorted(expected.items()):
        if found.get(name, 0) != num:
            raise CheckpointError(
                f"{directory} is incomplete: tensor {name} has {found.get(name, 0)} of {num} elements"
            )


def _read_state(path: Path, worker: int) -> WorkerState:
    try:
        return msgspec.json.decode((path / state_file(worker)).read_bytes(), type=WorkerState)
    except (*DECODE_ERRORS, OSError) as error:
        raise CheckpointError(f"{path / state_file(worker)} cannot be read: {error}") from error


def _random_state() -> RandomState:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
    return RandomState(
        torch=torch.get_rng_state().numpy().tobytes(),
        cuda=cuda,
        numpy=(str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        python=(version, list(words), gauss_next),
    )


def _set_random_state(state: RandomState) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
    if state.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.cuda), dtype=torch.uint8))
    kind, keys, position, has_gauss, gauss = state.numpy
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state.python
    random.setstate((version, tuple(words), gauss_next))
