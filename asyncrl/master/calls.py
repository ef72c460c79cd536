"""Calls to several model workers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from asyncrl.dataflow.topology import Handler
from asyncrl.protocol.calls import CallBody, CallResult
from asyncrl.runtime.board import StatusBoard
from asyncrl.streams.request_reply import NameResolvingRequestClient

T = TypeVar("T")


class WorkerCaller:
    """Calls several workers at once. Each wait has a limit, and a name on the status board."""

    def __init__(self, client: NameResolvingRequestClient, board: StatusBoard, limit_s: float) -> None:
        self._client = client
        self._board = board
        self._limit_s = limit_s

    def call(
        self, what: str, handlers: Sequence[Handler], body: CallBody | Sequence[CallBody]
    ) -> asyncio.Task[list[CallResult]]:
        """Send to every handler now, without awaiting in between. body: for all handlers, or one for each of them. Returns a task
        for all replies, which raises the first error."""
        bodies = body if isinstance(body, Sequence) else [body] * len(handlers)
        replies = asyncio.gather(*self._client.call_nowait(handlers, bodies))
        return asyncio.create_task(self.bounded(replies, what, "model workers"))

    async def bounded(self, awaitable: Awaitable[T], what: str, on: str) -> T:
        """Await for at most the limit of a call."""
        return await self._board.bounded(awaitable, what=what, on=on, limit_s=self._limit_s)
