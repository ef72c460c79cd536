"""Weights for models of other worker groups, from memory: a reference that follows the actor, a further layout of the actor.

    master -- KeepWeights --> all ranks of the source: each keeps a copy of its parts on the CPU, in train.dtype
    master -- FetchWeights --> all ranks of the target: each asks for the boxes that its own layout needs
    KeptWeightsFetcher -- POST /kept_weights: which parts? --> KeptWeights, at each rank of the source
    KeptWeightsFetcher -- POST /kept_weights: some boxes --> KeptWeights: their bytes, then a digest

No rank of either side assembles a tensor, and no collective spans two worker groups. Keeping is a copy in the master's order of
calls. Fetching runs beside training. Every answer is of one version, and its digest also covers the request: torn or wrong bytes
are refused. A model that has fetched only a part computes nothing until a later call has fetched all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import torch
import xxhash
from aiohttp import web
from torch import Tensor

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import REF
from asyncrl.model import checkpoint, sharding
from asyncrl.model.compute import Compute
from asyncrl.model.engine import TrainEngine
from asyncrl.model.fetching import LIMIT_S, FetchError
from asyncrl.model.reallocate import check_fit
from asyncrl.model.sharding import local_part
from asyncrl.model.shards import Box, Holding, Move, Piece, plan_moves, plan_writers, tensors_of
from asyncrl.model.tensor_exchange import exchange_holdings, holding_of, this_worker, workers_of
from asyncrl.protocol.calls import FetchWeights, KeepWeights, KeptWeightsRequest
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.runtime.background import gather_or_cancel
from asyncrl.runtime.board import StatusBoard, WaitTimeoutError
from asyncrl.weights.checkpoints import shapes
from asyncrl.weights.update_group import dtype_of, num_bytes_of

PATH = "/kept_weights"
BUCKET_BYTES = 16 << 20  # of an answer; a single row of a tensor may be larger
_MAX_PARTS = 1024  # of a request
_AT_ONCE = 4  # sources that are asked at the same time
_TRIES = 4  # of a request in a row, as of other data between worker groups (fetching.py)
_RETRY_S = 0.1
_READ_BYTES = 1 << 18
_DIGEST_BYTES = 8
_ALIGNMENT = 8  # in bytes, of each part in an answer
_ME = -1  # stands for this worker in a plan; it is none of the sources

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(KeptWeightsRequest).decode
_decode_holding = msgspec.msgpack.Decoder(Holding).decode


@dataclass(frozen=True)
class Kept:
    """One rank's parts of one version, on the CPU. They never change. Each part of the model is kept by one rank."""

    weight_version: str
    holding: Holding
    parts: Mapping[str, Tensor]  # by name of the parameter

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


# --------------------------------------------------------------------------------------------------------------- trainer


class KeptWeights:
    """Keeps this rank's parts of the newest weights of each target, and serves them: POST /kept_weights.

    consumes: KeepWeights, in the master's order.  produces: answers; parts of checkpoints.
    Memory holds one copy for each target, and an older one as long as an answer reads from it.
    """

    def __init__(self, models: Mapping[str, ModelConfig]) -> None:
        """models: of the run, by name."""
        self._models = models
        self._kept: dict[str, Kept] = {}  # by target
        self._names: dict[str, list[str]] = {}  # by source: the tensors whose local parts this rank keeps

    @property
    def kept(self) -> Mapping[str, Kept]:
        """The kept weights, by target."""
        return self._kept

    @torch.no_grad()
    def keep(self, body: KeepWeights, source: TrainEngine, folder: Path | None) -> int:
        """Replace the kept weights of a target. Returns their bytes. Runs on the compute thread.

        Collective over the ranks of the source at its first call. folder: of body.checkpoint. The mean is computed in float32 and
        stored in train.dtype, as by model/reallocate.py. Raises CheckpointError, and ConfigError if the target's path cannot be
        read.
        """
        source.onload()
        tensors = source.own_parameters()
        here = holding_of(source, tensors)
        if body.source not in self._names:
            holdings = exchange_holdings(workers_of(source), here)
            sizes = {
                name: num_bytes_of(dtype_of(piece.dtype), piece.shape) for name, piece in tensors_of(holdings).items()
            }
            self._names[body.source] = plan_writers(holdings, sizes)[this_worker()]
        pieces = {
            name: msgspec.structs.replace(here.pieces[name], dtype=_name_of(_dtype_in(source, tensors[name])))
            for name in self._names[body.source]
        }
        holding = Holding(here.stage, pieces)
        before = self._kept.pop(body.target, None)
        if body.share == 1.0:
            before = None  # its memory is free before the new copy is made
        if folder is not None:
            parts = _of_checkpoint(folder, body.target, source, {name: tensors[name] for name in pieces})
        elif body.share == 1.0:
            parts = {name: _copy(local_part(tensors[name])[1], _dtype_in(source, tensors[name])) for name in pieces}
        else:
            old = before.parts if before is not None else _of_path(self._models[body.target], source, pieces)
            parts = {name: _mixed(local_part(tensors[name])[1], old[name], body.share) for name in pieces}
        if parts is None:
            return 0
        kept = self._kept[body.target] = Kept(body.weight_version, holding, parts)
        return kept.num_bytes

    def add_to(self, part: checkpoint.Snapshot) -> None:
        """Add the kept weights of reference models to this rank's part of a checkpoint. Those of the actor's further layouts are
        the actor's own. Runs on the compute thread."""
        for target, kept in self._kept.items():
            if target.partition("@")[0] == REF:
                for name, piece in kept.holding.pieces.items():
                    part.tensors[f"{target}.{name}"] = kept.parts[name]
                    part.offsets[f"{target}.{name}"] = piece.box.start
                    part.worker.shapes[f"{target}.{name}"] = piece.shape

    def route(self) -> web.RouteDef:
        return web.post(PATH, self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        asked = await request.read()
        try:
            wanted = _decode_request(asked)
            kept = self._kept.get(wanted.model)
            if kept is None or kept.weight_version != wanted.weight_version:
                there = "none" if kept is None else kept.weight_version
                text = f"weights {wanted.weight_version} of {wanted.model} are asked for; this worker keeps {there}\n"
                return web.Response(status=409, text=text)
            if not wanted.parts:
                return web.Response(body=_signed(asked, bytearray(_encode(kept.holding))))
            body = await asyncio.to_thread(pack, kept, wanted, asked)
        except (*DECODE_ERRORS, ValueError) as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=body)


def pack(kept: Kept, wanted: KeptWeightsRequest, asked: bytes) -> bytearray:
    """Return the body of an answer. Raises ValueError for parts that are not kept, or too many of them."""
    found = []
    for name, start, size in wanted.parts:
        piece, box = kept.holding.pieces.get(name), Box(tuple(start), tuple(size))
        if piece is None or len(start) != len(piece.shape) or piece.box.meet(box) != box:
            raise ValueError(f"{box} of tensor {name} is asked for; this worker keeps {piece and piece.box}")
        found.append(kept.parts[name][box.within(piece.box)])
    num_bytes = sum(_aligned(part.nbytes) for part in found)
    if (len(found) > 1 and num_bytes > BUCKET_BYTES) or len(found) > _MAX_PARTS:
        raise ValueError(
            f"{len(found)} parts are asked for; an answer has {BUCKET_BYTES} bytes, and {_MAX_PARTS} parts, at most"
        )
    room = bytearray(num_bytes)
    for view, part in zip(_views(room, found), found, strict=True):
        view.copy_(part)
    return _signed(asked, room)


def _signed(asked: bytes, answer: bytearray) -> bytearray:
    """The answer, then the digest of the request and the answer."""
    return answer + _digest(asked, answer)


def _digest(asked: bytes, answer: bytearray | memoryview) -> bytes:
    state = xxhash.xxh3_64(asked)
    state.update(answer)
    return state.digest()


def _views(room: bytearray, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors like these parts, one after another in the room."""
    start = 0
    for part in parts:
        yield torch.frombuffer(room, dtype=part.dtype, count=part.numel(), offset=start).view(part.shape)
        start += _aligned(part.nbytes)


def _aligned(num_bytes: int) -> int:
    """The room of a part in an answer, so that the next one can be viewed in its dtype."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _dtype_in(source: TrainEngine, tensor: Tensor) -> torch.dtype:
    return source.dtype if tensor.is_floating_point() else tensor.dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype).to("cpu", copy=part.device.type == "cpu").contiguous()


def _mixed(part: Tensor, old: Tensor, share: float) -> Tensor:
    if not old.is_floating_point():
        return _copy(part, old.dtype)
    mean = share * part.float() + (1.0 - share) * old.to(part.device).float()
    return _copy(mean, old.dtype)


def _of_path(model: ModelConfig, source: TrainEngine, pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """Read these parts of the weights at a model's path."""
    config = sharding.load_config(model.path, model.kind)
    skeleton = sharding.Skeleton.of(config, model.kind, source.dtype)
    read = sharding.open_weights(model.path, skeleton, config, source.dtype)
    check_fit(
        {name: pieces[name].shape for name in pieces},
        {name: tuple(tensor.shape) for name, tensor in skeleton.model.named_parameters() if name in pieces},
    )
    parts = {}
    for name, piece in pieces.items():
        parts[name] = _copy(read(name, piece.box), dtype_of(piece.dtype))
    return parts


def _of_checkpoint(
    folder: Path, target: str, source: TrainEngine, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Read a model's local parts of a checkpoint, as the source would hold them. None: the checkpoint has no such model."""
    saved, role = {name.partition(".")[0] for name in shapes(folder)}, target.partition("@")[0]
    if saved.isdisjoint({target, role}):
        return None
    theirs = {
        name: torch.empty_like(tensor.detach(), dtype=_dtype_in(source, tensor)) for name, tensor in tensors.items()
    }
    checkpoint.read_into(folder, target if target in saved else role, theirs)
    return {name: _copy(local_part(tensor)[1], tensor.dtype) for name, tensor in theirs.items()}


# ------------------------------------------------------------------------------------------------------ model elsewhere


class KeptWeightsFetcher:
    """Replaces the weights of this worker's models by kept ones.

    consumes: FetchWeights.  produces: changed parameters.
    waits for: the sources' answers, LIMIT_S for each; the compute thread.  unblocked by: the answers, or that limit.
    Memory holds at most _AT_ONCE answers.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url_of: Callable[[int, int], Awaitable[str]],
        compute: Compute,
        board: StatusBoard,
    ) -> None:
        """url_of: returns the URL of a worker, by its number and the incarnation of its group."""
        self._session, self._url_of, self._compute, self._board = session, url_of, compute, board
        self._unfinished: dict[str, str] = {}  # model -> the version of which it has a part

    def check_finished(self, model: str) -> None:
        """Raises RuntimeError if the model has weights of several versions."""
        if model in self._unfinished:
            raise RuntimeError(f"{model} has fetched only a part of the weights {self._unfinished[model]}")

    async def fetch(self, body: FetchWeights, engine: TrainEngine) -> int:
        """Fetch all parts that this rank of the model holds. Returns the number of bytes received.

        The first part of the work is collective over the ranks of the model. Raises ShardError on all ranks, before anything
        changes, if the models' tensors differ. After a FetchError the model computes nothing until a later call has succeeded.
        """
        what = f"weights {body.weight_version} of {body.model}"
        places, theirs = await self._compute(partial(_places_of, engine), what)
        answers = await gather_or_cancel([self._ask(worker, _request(body), what) for worker in body.sources])
        sources = {worker: _decode_holding(answer) for worker, answer in zip(body.sources, answers, strict=True)}
        held = tensors_of(sources)
        check_fit({name: piece.shape for name, piece in held.items()}, theirs)
        dtypes = {name: dtype_of(piece.dtype) for name, piece in held.items()}
        itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
        wanted = {_ME: {name: box for name, (box, _) in places.items()}}
        moves = plan_moves(sources, wanted, itemsizes=itemsizes, max_bytes=BUCKET_BYTES)
        self._unfinished[body.model] = body.weight_version
        turns = asyncio.Semaphore(_AT_ONCE)

        async def fetch_from(worker: int) -> int:
            num_bytes = 0
            for bucket, size in _buckets([move for move in moves if move.source == worker], dtypes):
                async with turns:
                    answer = await self._ask(worker, _request(body, bucket), what, num_bytes=size)
                    await self._compute(partial(_write, answer, bucket, dtypes, places), what)
                num_bytes += size
            return num_bytes

        num_bytes = sum(await gather_or_cancel([fetch_from(worker) for worker in body.sources]))
        del self._unfinished[body.model]
        return num_bytes

    async def _ask(self, worker: int, asked: bytes, what: str, *, num_bytes: int | None = None) -> bytearray:
        """Return an answer without its digest. num_bytes: its size, if known. Raises FetchError."""
        source, num_failures = f"model_worker/{worker}", 0
        while True:
            try:
                asking = self._ask_once(worker, asked, num_bytes)
                return await self._board.bounded(asking, what=what, on=source, limit_s=LIMIT_S)
            except WaitTimeoutError as error:
                raise FetchError(str(error)) from error
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                num_failures += 1
                if num_failures == _TRIES:
                    raise FetchError(f"{source} does not deliver {what}: {error!r}") from error
                await asyncio.sleep(_RETRY_S)

    async def _ask_once(self, worker: int, asked: bytes, num_bytes: int | None) -> bytearray:
        url = await self._url_of(worker, 0)  # the trainer group restarts with the attempt
        async with self._session.post(url + PATH, data=asked) as response:
            if response.status != 200:
                text = (await response.content.read(500)).decode(errors="replace").strip()
                raise FetchError(f"model_worker/{worker} answered {response.status}: {text}")
            if num_bytes is None:
                answer = bytearray(await response.read())
            else:
                answer = bytearray()
                async for some in response.content.iter_chunked(_READ_BYTES):
                    answer += some
                    if len(answer) > num_bytes + _DIGEST_BYTES:
                        break
        digest = bytes(answer[-_DIGEST_BYTES:])
        del answer[-_DIGEST_BYTES:]
        if num_bytes not in (None, len(answer)) or digest != _digest(asked, answer):
            raise aiohttp.ClientPayloadError(f"the answer of {len(answer)} bytes is torn, or of another request")
        return answer


def _request(body: FetchWeights, bucket: Sequence[Move] = ()) -> bytes:
    parts = [(move.name, list(move.box.start), list(move.box.size)) for move in bucket]
    return _encode(KeptWeightsRequest(model=body.model, weight_version=body.weight_version, parts=parts))


def _places_of(engine: TrainEngine) -> tuple[dict[str, tuple[Box, Tensor]], dict[str, tuple[int, ...]]]:
    """This rank's parts by name, and the shapes of all tensors of the model. Collective over its ranks, on the compute thread."""
    engine.onload()
    tensors = engine.own_parameters()
    whole = tensors_of(exchange_holdings(workers_of(engine), holding_of(engine, tensors)))
    places = {name: local_part(tensor) for name, tensor in tensors.items()}
    return places, {name: piece.shape for name, piece in whole.items()}


def _buckets(moves: Sequence[Move], dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[list[Move], int]]:
    """Cut the moves, in order, into requests. Yields each with the bytes of its answer."""
    bucket: list[Move] = []
    filled = 0
    for move in moves:
        size = _aligned(num_bytes_of(dtypes[move.name], move.box.size))
        if bucket and (len(bucket) == _MAX_PARTS or filled + size > BUCKET_BYTES):
            yield bucket, filled
            bucket, filled = [], 0
        bucket.append(move)
        filled += size
    if bucket:
        yield bucket, filled


@torch.no_grad()
def _write(
    answer: bytearray,
    bucket: Sequence[Move],
    dtypes: Mapping[str, torch.dtype],
    places: Mapping[str, tuple[Box, Tensor]],
) -> None:
    """Write the parts of an answer into the model. Runs on the compute thread."""
    start = 0
    for move in bucket:
        box, part = places[move.name]
        count, dtype = move.box.num_elements, dtypes[move.name]
        new = torch.frombuffer(answer, dtype=dtype, count=count, offset=start).view(move.box.size)
        part[move.box.within(box)].copy_(new)
        start += _aligned(count * dtype.itemsize)
