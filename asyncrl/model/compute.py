"""The compute thread of a model worker: it runs everything that reads or changes models, and all collectives of the worker group.

Snapshots are written and broadcast outside it: they are copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from asyncrl.runtime.board import StatusBoard

T = TypeVar("T")


class Compute:
    """Runs one call after another in the master's order. That order is the same on all workers, so collectives match."""

    def __init__(self, name: str, board: StatusBoard, *, limit_s: float, num_threads: int = 0) -> None:
        """name: of the worker. limit_s: default limit of a call. num_threads: torch's thread count; 0: torch's own choice."""
        self._name, self._board, self._limit_s, self._num_threads = name, board, limit_s, num_threads
        self._pool = ThreadPoolExecutor(1, f"{name}-compute", initializer=self._begin)

    async def __call__(
        self, function: Callable[[], T], what: str, *, limit_s: float = 0.0, detail: Callable[[], str] = str
    ) -> T:
        """Run the function on the thread. The status board shows the wait for it, which ends with WaitTimeoutError after the limit.
        Raises the function's errors."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        return await self._board.bounded(
            future, what=what, on=self._name, limit_s=limit_s or self._limit_s, detail=detail
        )

    def close(self) -> None:
        """Stop without waiting for the function that is still running."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if self._num_threads > 0:
            torch.set_num_threads(self._num_threads)
