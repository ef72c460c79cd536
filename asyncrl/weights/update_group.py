"""Weights over the network: the code shared by the sender (model/broadcast.py) and receivers (generation/receive.py, SGLang), and
by the ranks of the trainer, which bring their shares to the sender (model/held_weights.py).

An update group consists of one trainer rank, which is rank 0 and sends, and the generation servers of a wave, which are updated
together. Each server has one rank per tensor parallel rank. Tensors are sent in buckets: tensors of one dtype, one after another in
a flat tensor, which is SGLang's `load_format=flattened_bucket`. A group is independent of all other process groups of its process:
it is not registered with torch.distributed, and its store uses the prefixes that SGLang derives from the group's name.

Every call that waits for a peer runs on a thread that only this group uses. A call that hangs blocks neither the event loop nor the
end of the process, and ends by its own time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import (
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

T = TypeVar("T")

BACKENDS = ("gloo", "nccl")
_BLOCK_BYTES = 1 << 16
_DIGEST_BYTES = 1 << 24  # the most that `digest` reads of a bucket
# Limit of NCCL's watchdog. Each broadcast has a limit of its own, and `leave` aborts it before that
_NCCL_LIMIT = timedelta(hours=1)


# --------------------------------------------------------------------------------------------------------------- ranks


def rank_offsets(num_ranks: Sequence[int]) -> tuple[list[int], int]:
    """First rank of each receiver, and the size of the group. Receivers may have different numbers of ranks. Rank 0 sends."""
    offsets, size = [], 1
    for count in num_ranks:
        if count < 1:
            raise ValueError(f"a receiver has {count} ranks; it must have at least one")
        offsets.append(size)
        size += count
    return offsets, size


# ------------------------------------------------------------------------------------------------------------- buckets


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype in one flat tensor of bytes."""

    specs: TensorSpecs
    flat: Tensor

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of the flat tensor, by name."""
        return list(zip(self.specs.names, views(self.flat, self.specs), strict=True))


def plan_buckets(sizes: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[int]]:
    """Group tensors into buckets, given (dtype, bytes) of each. Returns the indices of each bucket's tensors, in order: one dtype
    per bucket, at most bucket_bytes.

    A larger tensor gets its own bucket. With one dtype per bucket, every tensor is aligned within the flat tensor.
    """
    buckets: list[list[int]] = []
    filled, kind = 0, ""
    for index, (dtype, num_bytes) in enumerate(sizes):
        if not buckets or dtype != kind or filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled, kind = 0, dtype
        buckets[-1].append(index)
        filled += num_bytes
    return buckets


def bucket_specs(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], bucket_bytes: int) -> list[TensorSpecs]:
    """The buckets for tensors of these names, dtypes and shapes."""
    given = list(tensors)
    sizes = [(str(dtype), num_bytes_of(dtype, shape)) for _, dtype, shape in given]
    return [
        TensorSpecs(
            names=[given[i][0] for i in members],
            dtypes=[str(given[i][1]).removeprefix("torch.") for i in members],
            shapes=[list(given[i][2]) for i in members],
        )
        for members in plan_buckets(sizes, bucket_bytes)
    ]


def bytes_of(specs: TensorSpecs) -> int:
    """Size of a bucket."""
    return sum(map(num_bytes_of, map(dtype_of, specs.dtypes), specs.shapes))


def empty_buckets(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], bucket_bytes: int) -> list[Bucket]:
    """Buckets on the CPU with room for tensors of these names, dtypes and shapes."""
    return [
        Bucket(specs, torch.empty(bytes_of(specs), dtype=torch.uint8)) for specs in bucket_specs(tensors, bucket_bytes)
    ]


def views(flat: Tensor, specs: TensorSpecs) -> list[Tensor]:
    """The tensors of a bucket, as views. Raises ValueError if the specs do not match its size."""
    result, start = [], 0
    for dtype, shape in zip(map(dtype_of, specs.dtypes), specs.shapes, strict=True):
        end = start + num_bytes_of(dtype, shape)
        result.append(flat[start:end].view(dtype).view(shape))
        start = end
    if start != flat.numel():
        raise ValueError(f"a bucket has {flat.numel()} bytes, but its specs describe {start}")
    return result


def digest(flat: Tensor) -> str:
    """xxh3 of a bucket, or of blocks spread over it if it is larger than _DIGEST_BYTES. From a GPU only these blocks are copied.

    Detects different weights, a different order, and tensors that changed while they were sent. Does not detect a single wrong bit
    in a large bucket; the network has checksums for that, and reading everything twice more would take half as long as sending it.
    """
    stride = max(_BLOCK_BYTES, -(-len(flat) * _BLOCK_BYTES // _DIGEST_BYTES))
    state = xxhash.xxh3_64()
    for start in range(0, len(flat), stride):
        state.update(flat[start : start + _BLOCK_BYTES].cpu().numpy().data)
    state.update(flat[-_BLOCK_BYTES:].cpu().numpy().data)
    return str(state.hexdigest())


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name. Raises ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def num_bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)} has a negative size")
    return torch.Size(shape).numel() * dtype.itemsize


# --------------------------------------------------------------------------------------------------------------- group


class GroupThread:
    """Runs calls one after another, on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a call. The future gets its result on the event loop. Cancelling the future does not stop the call."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._calls.put((function, future))
        return asyncio.wrap_future(future)

    def end(self) -> None:
        """End the thread after all queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del item, function, future  # the waiting thread must not keep a group alive


class GroupMember:
    """One process's membership in an update group."""

    def __init__(self, name: str, backend: str, clock: Clock = SYSTEM_CLOCK) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
        self.name, self.backend, self._clock = name, backend, clock
        self._thread = GroupThread(f"update group {name}")
        self._group: Backend | None = None
        self._stream: torch.cuda.Stream | None = None
        self._left = False

    async def join(
        self,
        open_store: Callable[[], Store],
        *,
        rank: int,
        size: int,
        limit_s: float,
        host: str,
        device: torch.device,
        sends: bool = False,
    ) -> None:
        """Open the store and join the group with the other ranks. sends: this rank sends although it is not rank 0. Raises
        RuntimeError if they do not all join within limit_s."""

        def join() -> Backend:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            if self.backend == "nccl" and (rank == 0 or sends):
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return _open(open_store(), self.name, self.backend, rank, size, limit_s, host)

        self._group = await self._thread.call(join)

    async def broadcast(self, flat: Tensor, limit_s: float) -> None:
        """Send (rank 0) or receive a flat tensor. Raises RuntimeError if it takes longer than limit_s or a peer is gone."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=limit_s)
        await self._carry(lambda group, there: group.broadcast([there], options), flat, limit_s)

    async def send(self, flat: Tensor, limit_s: float) -> None:
        """Send a flat tensor to rank 0. Raises RuntimeError like `broadcast`."""
        await self._carry(lambda group, there: group.send([there], 0, 0), flat, limit_s)

    async def receive(self, flat: Tensor, source: int, limit_s: float) -> None:
        """Receive a flat tensor that a rank sends. Raises RuntimeError like `broadcast`."""
        await self._carry(lambda group, there: group.recv([there], source, 0), flat, limit_s)

    async def _carry(self, begin: Callable[[Any, Tensor], Any], flat: Tensor, limit_s: float) -> None:
        """Begin a transfer and wait for its end. A sender's tensor may be on the CPU: with NCCL it is copied to the device, on a
        stream that no computation uses."""
        group, stream = self._group, self._stream
        assert group is not None, "join first"

        def carry() -> None:
            with torch.cuda.stream(stream):  # None: no change
                started = self._clock.monotonic()
                work = begin(group, flat if stream is None else flat.to(stream.device, non_blocking=True))
                work.wait(timedelta(seconds=max(0.001, limit_s - (self._clock.monotonic() - started))))

        await self._thread.call(carry)

    def leave(self) -> None:
        """Leave the group, once. NCCL aborts a call in progress. With gloo it ends by its own limit; then sockets are closed."""
        if self._left:
            return
        group, self._left = self._group, True
        if group is not None and self.backend == "nccl":
            threading.Thread(target=group.abort, name=f"abort {self.name}", daemon=True).start()
        self._thread.call(self._close)
        self._thread.end()

    def _close(self) -> None:
        self._group = None


def _open(store: Store, name: str, backend: str, rank: int, size: int, limit_s: float, host: str) -> Backend:
    """Create an unregistered process group. The store prefixes are those of SGLang's init_custom_process_group."""
    device = "cpu" if backend == "gloo" else "cuda"
    prefixed = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    if backend == "gloo":
        gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]
        gloo._threads = 1
        gloo._timeout = timedelta(seconds=limit_s)
        return ProcessGroupGloo(prefixed, rank, size, gloo)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # here, because torch without NCCL lacks it

    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = _NCCL_LIMIT
    with _nccl_errors_end_no_process():
        return ProcessGroupNCCL(prefixed, rank, size, nccl)


@contextlib.contextmanager
def _nccl_errors_end_no_process() -> Iterator[None]:
    """After an error or a time-out, a group that is made here only cleans up. By default torch then ends the process: one slow
    receiver would end training. The groups of training are made earlier, and keep the default."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # CleanUpOnly
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def serve_store(host: str, timeout_s: float) -> tuple[TCPStore, str]:
    """Serve a torch.distributed store on a free port of one interface. Returns the store and its address.

    The store does not authenticate connections. Trainer ranks with authentication meet in name resolve instead
    (model/name_store.py). Update groups cannot, because SGLang's /init_weights_update_group accepts only the address of a TCPStore.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def store_at(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store that another process serves."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
