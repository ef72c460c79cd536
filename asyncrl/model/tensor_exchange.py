"""Moves parts of tensors between model workers, as shards.py plans it. Collective, on the compute thread, in numbered calls only.

    exchange     every worker tells the others a few bytes (what it holds)
    carry        parts travel, raw, in rounds; what is on the way is never more than max_bytes at a worker

Point to point over the world, in which a worker's rank is its number: any workers can take part, and no others are asked.
With NCCL the world must have spoken once, all ranks together, before some of them do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.model.shards import Box, Holding, Move, Piece, plan_rounds

if TYPE_CHECKING:
    from asyncrl.model.mesh import ModelMesh

_ALIGNMENT = 8  # bytes: of every part in a buffer, so that it can be seen in its own dtype
CPU = torch.device("cpu")


class ShardedModel(Protocol):
    """What is needed of an engine (engine.TrainEngine): its parameters under their global names, and where its rank is."""

    @property
    def mesh(self) -> ModelMesh | None:
        """None: this worker has all of the model."""

    def named_parameters(self) -> dict[str, Tensor]:
        """Of this rank's stage, by checkpoint name, in the same order at all ranks of the stage."""

    def onload(self) -> None:
        """Bring them to the device, if they are not there."""


def this_worker() -> int:
    """Number of this worker; 0 where there is no world."""
    return dist.get_rank() if dist.is_initialized() else 0


def exchange(workers: Sequence[int], payload: bytes) -> dict[int, bytes]:
    """What each of the workers gives, to all of them. Collective over `workers`, which are the same everywhere.

    Through the first one: so none has the answer before all have come.
    """
    me, root = this_worker(), workers[0]
    if len(workers) == 1:
        return {me: payload}
    if me != root:
        _send_bytes(payload, root)
        return msgspec.msgpack.decode(_receive_bytes(root), type=dict[int, bytes])
    result = {me: payload} | {worker: _receive_bytes(worker) for worker in workers[1:]}
    encoded = msgspec.msgpack.encode(result)
    for worker in workers[1:]:
        _send_bytes(encoded, worker)
    return result


def exchange_holdings(workers: Sequence[int], mine: Holding) -> dict[int, Holding]:
    """What each of the workers holds. Collective."""
    told = exchange(workers, msgspec.msgpack.encode(mine))
    return {worker: _decode_holding(told[worker]) for worker in sorted(told)}


@lru_cache(maxsize=256)  # layouts do not change in a run, and are told before every export
def _decode_holding(encoded: bytes) -> Holding:
    return msgspec.msgpack.decode(encoded, type=Holding)


def local_part(tensor: Tensor) -> tuple[Box, Tensor]:
    """The part of a tensor that is here, and where it belongs in the whole one. The part shares the tensor's memory."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape), tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Box(tuple(chunk.offsets), tuple(chunk.sizes)), tensor.to_local().detach()


def holding_of(model: ShardedModel, tensors: Mapping[str, Tensor]) -> Holding:
    """What this worker holds, given its tensors."""
    return Holding(
        model.mesh.pipe if model.mesh is not None else 0,
        {
            name: Piece(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), local_part(tensor)[0])
            for name, tensor in tensors.items()
        },
        on_gpu=all(tensor.device.type == "cuda" for tensor in tensors.values()),
    )


def transport_device(holdings: Iterable[Holding]) -> torch.device:
    """Where parts travel from and to: the GPUs (NCCL) only where everything is there on all of the workers, else the CPU (gloo)."""
    return torch.device("cuda", torch.cuda.current_device()) if all(held.on_gpu for held in holdings) else CPU


def workers_of(model: ShardedModel) -> tuple[int, ...]:
    """All workers of the model, in the order of its ranks."""
    return model.mesh.placement.workers if model.mesh is not None else (this_worker(),)


@torch.no_grad()
def carry(
    moves: Sequence[Move],
    *,
    read: Callable[[Move], Tensor],
    write: Callable[[Move, Tensor], object],
    dtypes: Mapping[str, torch.dtype],
    max_bytes: int,
    device: torch.device = CPU,
) -> int:
    """Carry out moves, the same list at every worker in it. Returns the number of bytes that this worker has sent.

    read: the part of a move from here, of any dtype and device; it travels in dtypes[name], cast before it is sent.
    write: takes the part of a move to here, which is gone afterwards. device: where buffers are: the transport goes by it.
    """
    me = this_worker()
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    mine = [move for move in moves if me in (move.source, move.target)]
    num_sent = 0
    for moves_of_round in plan_rounds(moves, itemsizes=itemsizes, max_bytes=max_bytes) if mine else []:
        outgoing: dict[int, list[Move]] = {}
        incoming: dict[int, list[Move]] = {}
        for move in moves_of_round:
            if move.source == me == move.target:
                write(move, read(move).to(dtypes[move.name]))
            elif move.source == me:
                outgoing.setdefault(move.target, []).append(move)
            elif move.target == me:
                incoming.setdefault(move.source, []).append(move)
        received = {peer: _Buffer(incoming[peer], dtypes, device) for peer in sorted(incoming)}
        sent = {peer: _Buffer(outgoing[peer], dtypes, device) for peer in sorted(outgoing)}
        for buffer in sent.values():
            for move, view in buffer.views():
                view.copy_(read(move))
            num_sent += buffer.num_bytes
        _wait(
            [dist.P2POp(dist.irecv, buffer.flat, peer) for peer, buffer in received.items()]
            + [dist.P2POp(dist.isend, buffer.flat, peer) for peer, buffer in sent.items()]
        )
        for buffer in received.values():
            for move, view in buffer.views():
                write(move, view)
    return num_sent


class _Buffer:
    """Parts that go the same way in a round, in one flat tensor."""

    def __init__(self, moves: Sequence[Move], dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
        self._places: list[tuple[Move, torch.dtype, int, int]] = []
        end = self.num_bytes = 0
        for move in moves:
            dtype = dtypes[move.name]
            start, length = -(-end // _ALIGNMENT) * _ALIGNMENT, move.box.num_elements * dtype.itemsize
            end = start + length
            self.num_bytes += length
            self._places.append((move, dtype, start, end))
        self.flat = torch.empty(end, dtype=torch.uint8, device=device)

    def views(self) -> Iterable[tuple[Move, Tensor]]:
        for move, dtype, start, end in self._places:
            yield move, self.flat[start:end].view(dtype).view(move.box.size)


def _wait(operations: list[Any]) -> None:
    """Together, so that two that send to each other do not wait for each other."""
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _send_bytes(payload: bytes, worker: int) -> None:
    dist.send(torch.tensor([len(payload)]), worker)
    if payload:
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), worker)


def _receive_bytes(worker: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, worker)
    payload = torch.empty(int(size), dtype=torch.uint8)
    if len(payload):
        dist.recv(payload, worker)
    return payload.numpy().tobytes()
