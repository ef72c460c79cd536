"""Moves keys of groups between model workers, over torch.distributed.

    master -- Redistribute(steps) --> DataManager of each worker in them: store -> [bytes] -> store

All workers execute calls in the master's order, and the steps of a call in the same order. A worker receives a step's data when it
reaches this step. Sends are asynchronous: a busy receiver does not block the sender's computation. So a worker only ever waits for
a worker that is at an earlier call or step, and waits cannot form a cycle.

A transfer has three kinds of message, sent as raw bytes through the process group's CPU backend: sizes, the header of
data/sequence.py, one frame per key. Dtypes are kept, nothing is unpickled, and the receiver checks that the data matches the plan.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.data.sequence import decode_sample, encode_sample
from asyncrl.dataflow.redistribution import Transfer, transfers
from asyncrl.model.store import DataStore
from asyncrl.protocol.calls import RedistribStep

_Posted = tuple[dist.Work, Tensor, str]  # the tensor must stay alive until it is sent


class DataManager:
    """One worker's part of redistributions. Runs on the compute thread, except for the waits for posted sends.

    consumes: steps.  produces: copies in the store.
    waits for: the senders, each message at most limit_s; a separate thread waits for posted sends.
    unblocked by: the senders reaching the same step; a sender's error, which ends the connection.
    """

    def __init__(
        self, store: DataStore, *, worker: int, limit_s: float, rank_of: Callable[[int], int] | None = None
    ) -> None:
        """worker: number of this worker, as in the steps. rank_of: maps a worker to its rank in torch.distributed's world, which
        must have a CPU backend; default: its number."""
        self._store = store
        self._worker = worker
        self._rank_of = rank_of or int
        self._limit = timedelta(seconds=limit_s)
        # The master bounds this queue: it begins no batch before all workers have answered the moves of the previous batch
        self._posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._receiving = ""

    def receiving(self) -> str:
        """The data that this worker waits for, and its source, as text; "" if it waits for none. Any thread may call it."""
        return self._receiving

    def execute(self, steps: Sequence[RedistribStep]) -> int:
        """Execute this worker's part of the steps. Returns the number of bytes posted, headers included.

        Raises RuntimeError if data does not arrive or does not match the plan, or if an earlier send failed.
        """
        if self._error is not None:
            raise self._error
        num_bytes = 0
        for step in steps:
            for transfer in transfers(step):
                if transfer.source == self._worker:
                    num_bytes += self._post(transfer)
                elif self._worker in transfer.targets:
                    self._receive(transfer)
        return num_bytes

    def close(self) -> None:
        """Stop. Posted sends that were not received are abandoned."""
        self._posted.put(None)

    def _post(self, transfer: Transfer) -> int:
        sample = self._store.select(transfer.ids, transfer.keys)
        assert sample is not None, "a transfer has ids"
        header, frames = encode_sample(sample)
        parts = [_bytes_of(bytearray(header)), *map(_bytes_of, frames)]
        sizes = torch.tensor([part.numel() for part in parts])
        what = f"{len(transfer.ids)} groups' {', '.join(transfer.keys)}"
        for target in transfer.targets:
            for part in (sizes, *parts):
                if part.numel():
                    self._keep(dist.isend(part, self._rank_of(target)), part, f"{what} to model_worker/{target}")
        return (sizes.nbytes + int(sizes.sum())) * len(transfer.targets)

    def _receive(self, transfer: Transfer) -> None:
        what = f"{len(transfer.ids)} groups' {', '.join(transfer.keys)} from model_worker/{transfer.source}"
        self._receiving = f": {what}"
        sizes = torch.empty(1 + len(transfer.keys), dtype=torch.int64)
        self._wait_for(sizes, transfer.source, what)
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        for part in parts:
            self._wait_for(part, transfer.source, what)
        self._receiving = ""
        header, *frames = (part.numpy() for part in parts)
        sample = decode_sample(header, frames, max_bytes=sys.maxsize)
        if sample.ids != transfer.ids or sample.keys != transfer.keys:
            raise RuntimeError(f"expected {what}, {list(transfer.ids[:4])}; received {list(sample.ids[:4])}")
        self._store.add_copies(sample)

    def _wait_for(self, part: Tensor, source: int, what: str) -> None:
        if not part.numel():
            return
        work = dist.irecv(part, self._rank_of(source))
        assert work is not None, "irecv returns None only outside the process group"
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise RuntimeError(f"receiving {what}: {error}") from error

    # ----------------------------------------------------------------------------------------------------- posted sends

    def _keep(self, work: dist.Work | None, part: Tensor, what: str) -> None:
        assert work is not None, "isend returns None only outside the process group"
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_until_sent, name="sends", daemon=True)
            self._thread.start()
        self._posted.put((work, part, what))

    def _wait_until_sent(self) -> None:
        """On a thread of its own: keep each tensor alive until it has been sent."""
        while (posted := self._posted.get()) is not None:
            work, _, what = posted
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                self._error = self._error or RuntimeError(f"sending {what}: {error}")


def _bytes_of(buffer: memoryview | bytearray) -> Tensor:
    """Return a tensor of bytes that shares memory with the buffer."""
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)) if len(buffer) else torch.empty(0, dtype=torch.uint8)
