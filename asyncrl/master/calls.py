"""Calls to several model workers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from asyncrl.dataflow.topology import Handler
from asyncrl.protocol.messages import CallBody, CallResult
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.request_reply import NameResolvingRequestClient

T = TypeVar("T")


class WorkerCaller:
    """Calls several workers at once, with a limit and a name on the wait."""

    def __init__(self, client: NameResolvingRequestClient, board: StatusBoard, limit_s: float) -> None:
        self._client = client
        self._board = board
        self._limit_s = limit_s

    async def call(self, what: str, handlers: Sequence[Handler], body: CallBody) -> list[CallResult]:
        """Enqueue to every handler without awaiting in between, then wait for all. The first error wins."""
        return await self.start(what, handlers, body)

    def start(self, what: str, handlers: Sequence[Handler], body: CallBody) -> asyncio.Task[list[CallResult]]:
        """Like call, but the sending happens now and the wait later."""
        return self.start_each(what, handlers, [body] * len(handlers))

    def start_each(
        self, what: str, handlers: Sequence[Handler], bodies: Sequence[CallBody]
    ) -> asyncio.Task[list[CallResult]]:
        """Like start, with a call of its own for each handler."""
        futures = self._client.call_nowait(handlers, bodies)
        return asyncio.create_task(self._gather(what, futures))

    async def _gather(self, what: str, futures: Sequence[asyncio.Future[CallResult]]) -> list[CallResult]:
        return await self.bounded(asyncio.gather(*futures), what, "model workers")

    async def bounded(self, awaitable: Awaitable[T], what: str, on: str) -> T:
        """Await for at most the limit of a call."""
        return await self._board.bounded(awaitable, what=what, on=on, limit_s=self._limit_s)
