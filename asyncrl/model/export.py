"""Exports weights: files of a version, of a model for the user, of a checkpoint; and an in-memory copy for the transport.

    all ranks of the model   take_share: a call in the master's order, collective: each rank copies some whole tensors to the CPU
    each rank's writer       weights.write_part: writes its share's files, concurrently with later calls; the reply lists them
    the model's first rank   commit: manifest, final name, once the master reports that all files are there

With weights.full_every > 1 each rank also keeps its share of the last version. The next version may then hold only the changes
(weights/form.py).

Exports are in Hugging Face format from any layout. No rank gathers the whole model. For a transport from
memory (trainer_side.py) each rank keeps its share.

The plan of an export (the owner of each tensor, the moves) is made at a model's first export and kept: layouts do not change.

Tensors have the names and shapes of the checkpoint that the model was loaded from. Their values are those of the parameters, cast
to the dtype of exports. Some architectures fuse several checkpoint tensors into one parameter (fused experts). Such a parameter is
split again (architectures/checkpoint_names.py): a rank exports the tensors of those experts that it holds.

Tensors of the checkpoint that the trainer does not train (TrainEngine.untrained) belong to the share of the first rank. They are
exported as they are in the checkpoint.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.adapters import Adapters
from asyncrl.architectures.checkpoint_names import places_of
from asyncrl.config.processes import ModelConfig, ModelWorkerConfig
from asyncrl.config.schema import ConfigError
from asyncrl.model import checkpoint, sharding
from asyncrl.model.compute import Compute
from asyncrl.model.engine import TrainEngine
from asyncrl.model.logprob_check import EXACT, TextScorer
from asyncrl.model.sharding import local_part, persistent_buffers
from asyncrl.model.shards import Box, Move, Piece, plan_moves, plan_owners, plan_rounds, rounds_of, tensors_of
from asyncrl.model.tensor_exchange import (
    CPU,
    MAX_BYTES,
    carry,
    exchange_holdings,
    holding_of,
    this_worker,
    transport_device,
    workers_of,
)
from asyncrl.model.trainer_side import HeldShare, TrainerSide
from asyncrl.protocol.calls import (
    CallResult,
    CommitCheckpoint,
    CommitWeights,
    HoldWeights,
    SaveCheckpoint,
    SaveModel,
    WriteWeights,
)
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import path_of
from asyncrl.protocol.versions import WeightVersion, WrittenFile
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.runtime.disk import writing
from asyncrl.runtime.services import Services
from asyncrl.streams.request_reply import Call
from asyncrl.weights.adapter import ABOUT, TENSORS, AdapterForm, about, name_of
from asyncrl.weights.forms import BETWEEN_FULL
from asyncrl.weights.update_group import Bucket, bucket_specs, dtype_of, empty_buckets, num_bytes_of
from asyncrl.weights.versions import (
    FileWriter,
    Manifest,
    ScoredText,
    commit_folder,
    commit_version,
    name_shards,
    side_files,
    write_part,
)

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


def take_share(model: TrainEngine, *, max_bytes: int = MAX_BYTES) -> dict[str, Tensor]:
    """Copy this rank's share of the model's whole tensors to the CPU, in the dtype of exports and in the model's order.

    Collective over all ranks of the model. Every tensor is in exactly one share, owned by a rank of the tensor's stage. Shares of
    the ranks of a stage have similar sizes. In addition to its share a rank holds at most max_bytes in transit. Training may
    continue while a share is written.
    """
    tensors = checkpoint_tensors(model)
    plan = _plan_of(model, tensors, max_bytes)
    share = plan.share_of(this_worker())
    room = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in share if name not in model.untrained}
    _gather(plan, tensors, room)
    return {name: room[name] if name in room else model.untrained[name] for name, _, _ in share}


def take_buckets(
    model: TrainEngine, bucket_bytes: int, *, max_bytes: int = MAX_BYTES
) -> tuple[list[Bucket], list[list[TensorSpecs]]]:
    """Like take_share, in buckets for a broadcast (update_group.py). Also returns the specs of the buckets of each rank of the
    model, in the order of its ranks."""
    tensors = checkpoint_tensors(model)
    plan = _plan_of(model, tensors, max_bytes)
    buckets = empty_buckets(plan.share_of(this_worker()), bucket_bytes)
    room = dict(named for bucket in buckets for named in bucket.tensors())
    _gather(plan, tensors, room)
    for name in room.keys() & model.untrained.keys():
        room[name].copy_(model.untrained[name])
    return buckets, [bucket_specs(plan.share_of(worker), bucket_bytes) for worker in workers_of(model)]


def commit_model(
    path: Path,
    files: Sequence[WrittenFile],
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    sides: Mapping[str, bytes],
    fsync: bool = True,
) -> None:
    """Make a model that `from_pretrained` loads, from files that weights.write_part wrote for `path` on all ranks.

    Afterwards path is complete or absent; its previous content is replaced. config: of the model. dtype: of its files.
    sides: the contents of its generation config and of its tokenizer's files, by name. A config.json among them is not used.
    """

    def finish(writer: FileWriter) -> None:
        name_shards(writer, files)
        about = type(config).from_dict(config.to_dict())
        about.dtype = dtype
        writer.when_there_is_room(lambda: about.save_pretrained(writer.directory))
        for name, content in sides.items():
            if name != CONFIG:  # that of the files' weights is written above
                writer.write(name, [content])

    commit_folder(path, files, finish, fsync=fsync, replace=True)


def commit_adapter(path: Path, files: Sequence[WrittenFile], *, sides: Mapping[str, bytes], fsync: bool = True) -> None:
    """Like commit_model, for an adapter that peft loads. sides: its config and the tokenizer's files, by name."""

    def finish(writer: FileWriter) -> None:
        name_shards(writer, files, AdapterForm.stem)
        for name, content in sides.items():
            writer.write(name, [content])

    commit_folder(path, files, finish, fsync=fsync, replace=True)


@torch.no_grad()
def merged_tensors(adapters: Adapters, folder: Path, dtype: torch.dtype, backbone: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the base's checkpoint, one after another, with an adapter's folder merged into them: W + alpha / rank * B A,
    in float32, then cast. A value model has the folder's output layer in place of the base's. backbone: the name of the model
    without its output layer. Raises ConfigError if the checkpoint has other names than the model."""
    matrices = load_file(folder / TENSORS)
    files = sharding.stored_tensors(adapters.base)
    layers = {f"{layer}.weight": layer for layer in adapters.layers}
    check_mergeable(adapters)
    for name in adapters.heads:
        yield name, matrices[adapters.names[name]].to(dtype)
    for name, file in files.items():
        if adapters.heads and not name.startswith(f"{backbone}."):
            continue  # the output layer of the base
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        if name in layers:
            a, b = (matrices[name_of(layers[name], which)] for which in "AB")
            tensor = tensor.float() + b @ a * (adapters.lora.alpha / adapters.lora.rank)
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def check_mergeable(adapters: Adapters) -> None:
    """Raises ConfigError if the base's checkpoint has other names than the model."""
    files = sharding.stored_tensors(adapters.base)
    if lacking := [layer for layer in adapters.layers if f"{layer}.weight" not in files]:
        raise ConfigError(
            f"train.lora.merge=True: the checkpoint in model_path={adapters.base!r} has no {lacking[0]}.weight: its names differ "
            "from the model's; set it to false and merge with peft"
        )


def checkpoint_tensors(model: TrainEngine) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's stage, under their checkpoint names. Offloaded weights are moved back first.
    Of a model with adapters the trained ones only, under peft's names.

    Of a parameter that holds several tensors of the checkpoint (experts), a rank with some of its rows has those tensors that lie
    in these rows, each whole. Raises ConfigError if one lies in several rows and the model is on several ranks.
    """
    model.onload()
    if model.adapters is not None:
        return {model.adapters.names[name]: tensor.detach() for name, tensor in model.own_parameters().items()}
    tensors = _stored(model.model, model.named_parameters())
    places = places_of(model.model, {name: tensor.shape for name, tensor in tensors.items()})
    found = {}
    for name, place in places.items():
        tensor = tensors[place.name]
        if place.is_whole or len(workers_of(model)) == 1:
            found[name] = place.within(tensor)
            continue
        box, part = local_part(tensor)
        begin, end = place.rows(tensor.shape)
        if begin != end or box.size[1:] != tensor.shape[1:]:
            raise ConfigError(
                f"allocation: models of type {model.config.model_type!r} keep {place.name} in one tensor, but their checkpoints in "
                "several, in another way than experts; weights of such a model cannot be exported from more than one rank: train "
                "it on d1p1m1"
            )
        if box.start[0] <= begin < box.start[0] + box.size[0]:
            found[name] = place.within_rows(part, box.start[0])
    return found


def exported_specs(model: PreTrainedModel, untrained: Mapping[str, Tensor]) -> TensorSpecs:
    """Names, dtypes and shapes of what a trainer of this model exports. The model may be on the meta device. untrained: as in
    TrainEngine."""
    tensors = _stored(model, dict(model.named_parameters()))
    places = places_of(model, {name: tensor.shape for name, tensor in tensors.items()})
    found = {name: (tensors[place.name].dtype, place.shape) for name, place in places.items()}
    found |= {name: (tensor.dtype, tensor.shape) for name, tensor in untrained.items()}
    dtypes = [str(dtype).removeprefix("torch.") for dtype, _ in found.values()]
    return TensorSpecs(names=list(found), dtypes=dtypes, shapes=[list(shape) for _, shape in found.values()])


def _stored(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These parameters, and the model's persistent buffers."""
    tensors = {**parameters, **dict(persistent_buffers(model))}
    return {name: tensor.detach() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class _ExportPlan:
    """Which rank assembles which tensor, and this rank's moves."""

    whole: dict[str, Piece]  # all tensors of the model
    owners: dict[str, int]
    dtypes: dict[str, torch.dtype]  # in which each tensor is exported
    rounds: list[list[Move]]
    device: torch.device  # of the transfers

    def share_of(self, worker: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of the tensors that a worker assembles, in the model's order."""
        return [
            (name, self.dtypes[name], piece.shape) for name, piece in self.whole.items() if self.owners[name] == worker
        ]


_plans: WeakKeyDictionary[TrainEngine, dict[int, _ExportPlan]] = WeakKeyDictionary()  # by model and max_bytes


def _plan_of(model: TrainEngine, tensors: Mapping[str, Tensor], max_bytes: int) -> _ExportPlan:
    """Return the plan of a model's exports. Collective at the first call for a model, which makes it."""
    plans = _plans.setdefault(model, {})
    if max_bytes not in plans:
        plans[max_bytes] = _make_plan(model, tensors, max_bytes)
    return plans[max_bytes]


def _make_plan(model: TrainEngine, tensors: Mapping[str, Tensor], max_bytes: int) -> _ExportPlan:
    holdings = exchange_holdings(workers_of(model), holding_of(model, tensors))
    whole = tensors_of(holdings)
    given = {name: dtype_of(piece.dtype) for name, piece in whole.items()}
    exported = model.dtype if model.adapters is None else torch.float32
    dtypes = {name: exported if dtype.is_floating_point else dtype for name, dtype in given.items()}
    owners = plan_owners(holdings, {name: num_bytes_of(dtypes[name], piece.shape) for name, piece in whole.items()})
    if model.adapters is not None:  # they are one file
        owners = dict.fromkeys(owners, workers_of(model)[0])
    targets: dict[int, dict[str, Box]] = {}
    for name, piece in whole.items():
        targets.setdefault(owners[name], {})[name] = Box.whole(piece.shape)
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    moves = plan_moves(holdings, targets, itemsizes=itemsizes, max_bytes=max_bytes)
    rounds = rounds_of(plan_rounds(moves, itemsizes=itemsizes, max_bytes=max_bytes), this_worker())
    device = transport_device(holdings.values(), model.device) if len(holdings) > 1 else CPU
    for name, tensor in model.untrained.items():
        whole[name], dtypes[name], owners[name] = _piece_of(tensor), tensor.dtype, workers_of(model)[0]
    return _ExportPlan(whole, owners, dtypes, rounds, device)


def _piece_of(tensor: Tensor) -> Piece:
    return Piece(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), Box.whole(tensor.shape))


def _gather(plan: _ExportPlan, tensors: Mapping[str, Tensor], room: Mapping[str, Tensor]) -> None:
    """Assemble each whole tensor at its owner, in the owner's tensor of this name in `room`. Collective."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    carry(
        plan.rounds,
        read=lambda move: parts[move.name][1][move.box.within(parts[move.name][0])],
        write=lambda move, part: room[move.name][move.box.within(Box.whole(plan.whole[move.name].shape))].copy_(part),
        dtypes=plan.dtypes,
        device=plan.device,
    )


T = TypeVar("T")


class _Lane:
    """Writes one item at a time, on a thread of its own. Weights and checkpoints have a lane each: neither waits for the other."""

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(1, name)
        self.writing: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self.writing is not None:  # not awaited, because a half-written folder never gets its final name
            self.writing.cancel()
        self.pool.shutdown(wait=False, cancel_futures=True)


class Exporter:
    """One worker's part of exporting weights.

    consumes: calls.  produces: files, replies; the share that is held for a broadcast.
    waits for: the compute thread and the previous write. So memory holds at most one snapshot being written, one being broadcast
    and one of a checkpoint.  unblocked by: the other ranks of the model; the disk.
    """

    def __init__(
        self,
        config: ModelWorkerConfig,
        compute: Compute,
        holder: TrainerSide,
        services: Services,
    ) -> None:
        """holder: of this rank's share, for a transport from memory."""
        self._config, self._info, self._compute, self._holder = config, config.worker, compute, holder
        self._tasks, self._board, self._trace, self._clock = (
            services.tasks,
            services.board,
            services.trace,
            services.clock,
        )
        options = config.weights
        scorer = TextScorer(config.worker.seed, sampled=options.verify_tolerance >= EXACT)
        self._scorer = scorer if options.verify_logprobs else None
        self._measured: ScoredText | None = None  # measured with the newest snapshot
        # weights.full_every > 1: this rank's share of the actor's last version, and the number of versions since the last full one
        self._base: dict[str, torch.Tensor] | None = None
        self._num_since_full = 0
        # The side files of exported models are read once: a folder that is removed or edited later changes no export
        self._sides = {
            model.name: side_files(Path(model.path))
            for model in config.models
            if config.worker.index == model.workers[0] and model.kind != "none"
        }
        of_tokenizer = side_files(Path(config.tokenizer_path or config.model_path)) if self._sides else {}
        self._tokenizer = {name: of_tokenizer[name] for name in of_tokenizer.keys() - {CONFIG, GENERATION_CONFIG}}
        self._committed: Manifest | None = None  # of the last version, on the first rank
        self._weights = _Lane(f"{config.worker.name}-writer")
        self._checkpoints = _Lane(f"{config.worker.name}-checkpoint-writer")

    def close(self) -> None:
        self._weights.close()
        self._checkpoints.close()

    # -------------------------------------------------------------------------------------------------------------- calls

    async def hold(self, body: HoldWeights, engine: TrainEngine) -> None:
        """Take this rank's share for a broadcast. A later WriteWeights of this version writes this share."""
        await self._free(self._weights)

        def snapshot() -> HeldShare:
            buckets, specs = take_buckets(engine, self._config.weights.bucket_bytes)
            others = dict(list(zip(self._config.models[0].workers, specs, strict=True))[1:])
            version = WeightVersion.parse(body.weight_version)
            return HeldShare(version, buckets, self._measure(engine), others)

        held = await self._snapshot(snapshot, body.role)
        self._measured = held.scored_text
        self._holder.hold(held)

    async def write(self, call: Call, body: WriteWeights | SaveModel, engine: TrainEngine) -> None:
        """Take a snapshot in the order of calls and write it while later calls run. Reply with the files once they are on disk."""
        path = await self._turn(self._weights, body.folder)
        held = self._holder.held
        if isinstance(body, WriteWeights) and held is not None and body.weight_version == str(held.version):
            tensors = dict(held.tensors())
        else:

            def snapshot() -> dict[str, torch.Tensor]:
                if isinstance(body, WriteWeights):
                    self._measured = self._measure(engine)
                return take_share(engine)

            tensors = await self._snapshot(snapshot, body.role)
        write = partial(self._write_part, path, tensors, self._base_of(body, tensors), engine.adapters)
        self._begin(self._weights, call, "write weights", path, write)

    async def commit(self, call: Call, body: CommitWeights, engine: TrainEngine, model: ModelConfig) -> None:
        """Write the manifest (or the config) and give the folder its final name. The files of all ranks are already on disk."""
        path = await self._turn(self._weights, body.folder)
        commit = partial(self._commit, path, body, engine, model, self._measured)
        self._begin(self._weights, call, "commit weights", path, commit)

    async def write_checkpoint(self, call: Call, body: SaveCheckpoint, take: Callable[[], checkpoint.Snapshot]) -> None:
        """Like `write`, for a training checkpoint. take: returns this rank's part of it; runs on the compute thread."""
        path = await self._turn(self._checkpoints, body.folder)
        part = await self._snapshot(take, "a checkpoint")
        options = self._config.weights
        write = partial(checkpoint.write, path, part, shard_bytes=options.shard_bytes, fsync=options.fsync)
        self._begin(self._checkpoints, call, "write checkpoint", path, write)

    async def commit_checkpoint(self, call: Call, body: CommitCheckpoint) -> None:
        path = await self._turn(self._checkpoints, body.folder)
        fsync = self._config.weights.fsync
        commit = partial(checkpoint.commit, path, body.files, master=body.master, fsync=fsync)
        self._begin(self._checkpoints, call, "commit checkpoint", path, commit)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _measure(self, engine: TrainEngine) -> ScoredText | None:
        return self._scorer.measure(engine) if self._scorer is not None else None

    async def _snapshot(self, take: Callable[[], T], role: str) -> T:
        with self._trace.overlapping("snapshot", kind="weights", role=role):
            return await self._compute(take, f"snapshot of {role}")

    async def _turn(self, lane: _Lane, folder: str) -> Path:
        """Wait until the lane is free. Returns the path of the folder. Raises OutsideRunError."""
        path = path_of(self._info.run_dir, folder)
        await self._free(lane)
        return path

    async def _free(self, lane: _Lane) -> None:
        if lane.writing is not None:
            limit_s = self._config.train.call_timeout_s
            await self._board.bounded(lane.writing, what="the previous write", on=self._info.name, limit_s=limit_s)

    def _begin(
        self,
        lane: _Lane,
        call: Call,
        what: str,
        path: Path,
        function: Callable[[], list[WrittenFile] | None],
    ) -> None:
        def on_disk() -> list[WrittenFile] | None:
            with writing(path):
                return function()

        lane.writing = self._tasks.spawn(self._write_and_reply(lane, call, what, on_disk), what)

    async def _write_and_reply(
        self, lane: _Lane, call: Call, what: str, function: Callable[[], list[WrittenFile] | None]
    ) -> None:
        start = self._clock.monotonic()
        async with call.answering_errors():
            with self._trace.overlapping(what, kind="weights"):
                files = await asyncio.get_running_loop().run_in_executor(lane.pool, function)
        call.reply(CallResult(files=files or [], seconds=self._clock.monotonic() - start))

    def _base_of(
        self, body: WriteWeights | SaveModel, share: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return the share of the version to which this one may hold changes, and keep this one's share. None: it must be full. The
        answer is the same on all ranks. A version that is written again is full, because the chain may be what is damaged."""
        full_every = self._config.weights.full_every
        if not isinstance(body, WriteWeights) or full_every == 1:
            return None
        base, self._base = self._base, share if body.role == ACTOR else None
        is_full = base is None or self._base is None or body.rewrite or self._num_since_full + 1 >= full_every
        self._num_since_full = 0 if is_full else self._num_since_full + 1
        return None if is_full else base

    def _write_part(
        self,
        path: Path,
        tensors: dict[str, torch.Tensor],
        base: dict[str, torch.Tensor] | None,
        adapters: Adapters | None,
    ) -> list[WrittenFile]:
        options, part = self._config.weights, self._info.index
        changes = BETWEEN_FULL.encode(base, tensors) if base is not None else None
        return write_part(
            path,
            tensors.items() if changes is None else (),
            part=part,
            shard_bytes=options.shard_bytes if adapters is None else sys.maxsize,
            fsync=options.fsync,
            others={BETWEEN_FULL.file_name(part): changes} if changes is not None else None,
        )

    def _commit(
        self, path: Path, body: CommitWeights, engine: TrainEngine, model: ModelConfig, scored_text: ScoredText | None
    ) -> None:
        fsync, sides, adapters = self._config.weights.fsync, self._sides[model.name], engine.adapters
        kept = {**self._tokenizer, **{name: sides[name] for name in (GENERATION_CONFIG,) if name in sides}}
        if adapters is not None:
            sides = {ABOUT: about(adapters.lora, adapters.base, adapters.layers, with_head=bool(adapters.heads))}
        if body.weight_version:
            version = WeightVersion.parse(body.weight_version)
            self._committed = commit_version(
                path,
                body.files,
                sides=sides,
                version=version,
                fsync=fsync,
                scored_text=scored_text,
                base=self._committed,
                replace=body.rewrite,
            )
        elif adapters is not None:
            commit_adapter(path, body.files, sides={**self._tokenizer, **sides}, fsync=fsync)
            if adapters.lora.merge:
                merged = path.with_name(f"{path.name}-merged")
                tensors = merged_tensors(adapters, path, engine.dtype, engine.model.base_model_prefix)
                files = write_part(merged, tensors, shard_bytes=self._config.weights.shard_bytes, fsync=fsync)
                commit_model(merged, files, config=engine.config, dtype=engine.dtype, sides=kept, fsync=fsync)
        else:
            commit_model(
                path,
                body.files,
                config=engine.config,
                dtype=engine.dtype,
                sides=kept,
                fsync=fsync,
            )
