"""Moves parts of tensors between model workers as planned by shards.py. Collective, on the compute thread, in the master's calls.

    exchange     every worker gets a few bytes of every other (its holdings), in a ring
    carry        sends raw parts in rounds, with at most max_bytes in transit at a worker

Transfers are point-to-point over torch.distributed's world, the process group of this worker group. In this file and in shards.py a
worker is identified by its rank in this world. Any subset of workers can take part without the others. With NCCL all ranks of the
world must have run one collective together before a subset communicates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.dataflow.axes import LAYERS
from asyncrl.model.engine import TrainEngine
from asyncrl.model.sharding import local_part
from asyncrl.model.shards import Holding, Move, Piece

MAX_BYTES = 256_000_000  # in transit at one rank at any time
_ALIGNMENT = 8  # in bytes, of every part in a buffer, so that it can be viewed in its own dtype
CPU = torch.device("cpu")


def this_worker() -> int:
    """Rank of this worker in the world; 0 without a world."""
    return dist.get_rank() if dist.is_initialized() else 0


def exchange(workers: Sequence[int], payload: bytes) -> dict[int, bytes]:
    """Give every worker the payloads of all. Collective over `workers`, which must be the same everywhere.

    Payloads go round in a ring, so each worker sends as many bytes as it receives, however many workers there are.
    """
    me, count = this_worker(), len(workers)
    position, latest = workers.index(me), payload
    result = {me: payload}
    for step in range(1, count):
        latest = _pass_on(latest, to=workers[(position + 1) % count], source=workers[position - 1])
        result[workers[position - step]] = latest
    return result


@contextlib.contextmanager
def raised_by_all(workers: Sequence[int], kind: type[Exception]) -> Iterator[None]:
    """If the block raises an error of this kind on some workers, all raise one of these errors after it. Collective."""
    own: Exception | None = None
    try:
        yield
    except kind as error:
        own = error
    texts = exchange(workers, str(own or "").encode()).values()
    if told := sorted(text.decode() for text in texts if text):
        raise kind(told[0]) from own


def exchange_holdings(workers: Sequence[int], mine: Holding) -> dict[int, Holding]:
    """Exchange the holdings of all workers. Collective."""
    payloads = exchange(workers, msgspec.msgpack.encode(mine))
    return {worker: msgspec.msgpack.decode(payloads[worker], type=Holding) for worker in sorted(payloads)}


def holding_of(model: TrainEngine, tensors: Mapping[str, Tensor]) -> Holding:
    """This worker's holding, given its tensors."""
    return Holding(
        model.mesh.parts[LAYERS] if model.mesh is not None else 0,
        {
            name: Piece(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), local_part(tensor)[0])
            for name, tensor in tensors.items()
        },
        on_gpu=all(tensor.device.type == "cuda" for tensor in tensors.values()),
    )


def transport_device(holdings: Iterable[Holding], own: torch.device) -> torch.device:
    """Device for transfers: the worker's own GPU (NCCL) if all workers have all their tensors on GPUs, else the CPU (gloo)."""
    return own if all(held.on_gpu for held in holdings) else CPU


def workers_of(model: TrainEngine) -> tuple[int, ...]:
    """All workers of the model, in the order of its ranks."""
    return model.mesh.placement.workers if model.mesh is not None else (this_worker(),)


@torch.no_grad()
def carry(
    rounds: Iterable[Sequence[Move]],
    *,
    read: Callable[[Move], Tensor],
    write: Callable[[Move, Tensor], object],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device = CPU,
) -> int:
    """Execute this worker's moves (shards.rounds_of); the plan must be the same on every worker. Returns the number of bytes that
    this worker sent.

    read: returns the part of a move that this worker sends, in any dtype, on any device; it is cast to dtypes[name] first.
    write: receives the part of a move to this worker; the tensor is invalid afterwards. device: of the buffers; it selects the
    transport.
    """
    me = this_worker()
    num_sent = 0
    for moves_of_round in rounds:
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
    """Parts with the same source and target in a round, in one flat tensor."""

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
    """Start all operations together and wait for them. Two workers that send to each other do not block each other."""
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _pass_on(payload: bytes, *, to: int, source: int) -> bytes:
    """Send a payload to one worker, and return the payload that another one sends."""
    size = torch.zeros(1, dtype=torch.int64)
    _wait([dist.P2POp(dist.isend, torch.tensor([len(payload)]), to), dist.P2POp(dist.irecv, size, source)])
    received = torch.empty(int(size), dtype=torch.uint8)
    operations = [dist.P2POp(dist.irecv, received, source)] if len(received) else []
    if payload:
        operations.append(dist.P2POp(dist.isend, torch.frombuffer(bytearray(payload), dtype=torch.uint8), to))
    _wait(operations)
    return received.numpy().tobytes()
