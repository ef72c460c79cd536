"""Runs the dataflow of one train step: every MFC as its keys are there, each a call to all workers of its mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from asyncrl.dataflow import DataflowGraph, MFCDef
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.messages import CallBody, CallResult, ExecuteMFC
from asyncrl.runtime.request_reply import NameResolvingRequestClient
from asyncrl.runtime.worker import StatusBoard
from asyncrl.topology import Handler

T = TypeVar("T")


@dataclass
class StepResult:
    """Statistics of all MFCs of a step, and the seconds each took at its slowest worker."""

    stats: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class MeshCaller:
    """Calls all workers of a mesh at once, with a limit and a name on the wait."""

    def __init__(
        self, client: NameResolvingRequestClient, board: StatusBoard, handlers: Sequence[Handler], limit_s: float
    ) -> None:
        self._client = client
        self._board = board
        self._handlers = tuple(handlers)
        self._limit_s = limit_s

    async def call(self, what: str, body: CallBody) -> list[CallResult]:
        """Enqueue to every member without awaiting in between, then wait for all. The first error wins."""
        return await self.start(what, body)

    def start(self, what: str, body: CallBody) -> asyncio.Task[list[CallResult]]:
        """Like call, but the sending happens now and the wait later."""
        futures = self._client.call_nowait(self._handlers, [body] * len(self._handlers))
        return asyncio.create_task(self._gather(what, futures))

    async def _gather(self, what: str, futures: Sequence[asyncio.Future[CallResult]]) -> list[CallResult]:
        return await self.bounded(asyncio.gather(*futures), what, "model workers")

    async def bounded(self, awaitable: Awaitable[T], what: str, on: str) -> T:
        """Await for at most the limit of a call."""
        return await self._board.bounded(awaitable, what=what, on=on, limit_s=self._limit_s)


class ModelFunctionCall:
    """One MFC: consumes batches that have its input keys, produces its output keys for them.

    waits for: the buffer to hold all input keys of the batch, then the replies of all workers of its mesh.
    unblocked by: amend_batch of the MFCs before it.
    """

    def __init__(self, mfc: MFCDef, buffer: AsyncIOSequenceBuffer, mesh: MeshCaller) -> None:
        self._mfc = mfc
        self._buffer = buffer
        self._mesh = mesh

    async def run(self, version: int, result: StepResult) -> None:
        mfc = self._mfc
        ids = await self._mesh.bounded(
            self._buffer.get_batch_for_rpc(mfc), f"the input keys of MFC {mfc.name}", "other MFCs"
        )
        replies = await self._mesh.call(f"MFC {mfc.name}", ExecuteMFC(mfc=mfc.name, version=version, ids=list(ids)))
        done = [ticket for reply in replies for ticket in reply.ids]
        if sorted(done) != sorted(ids):
            missing, extra = sorted(set(ids) - set(done)), sorted(set(done) - set(ids))
            raise RuntimeError(
                f"MFC {mfc.name} ran on {len(done)} of {len(ids)} ids; missing {missing[:5]}, extra {extra[:5]}"
            )
        for reply in replies:
            result.stats.update(reply.stats)
        result.seconds[mfc.name] = max(reply.seconds for reply in replies)
        await self._buffer.amend_batch(ids, mfc.output_keys)


class FunctionExecutor:
    """Executes the graph. Names no MFC: it knows only keys."""

    def __init__(self, graph: DataflowGraph, buffer: AsyncIOSequenceBuffer, meshes: Mapping[str, MeshCaller]) -> None:
        self._buffer = buffer
        self._calls = [
            ModelFunctionCall(graph.mfcs[name], buffer, meshes[graph.mfcs[name].role]) for name in graph.order
        ]

    async def execute_step(self, tickets: Sequence[str], version: int) -> StepResult:
        """Take a batch through every MFC. If one fails the others are cancelled and its error is raised."""
        result = StepResult()
        await self._buffer.begin_batch(tickets)
        tasks = [asyncio.ensure_future(call.run(version, result)) for call in self._calls]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self._buffer.end_batch()
        return result
