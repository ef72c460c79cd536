"""The generation server's side of a transport of weights: HTTP routes that receive the tensors of a version and load them.

    gserver manager or trainer -- HTTP --> ServerSide -- tensors, checked --> engine

`config/transports.py` describes the life of a version. `transports.py` has the table of kinds. A server has the routes of all of
them, and does not know which transport the run has.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from asyncrl.generation.checks import LogprobMismatch, VerifiedLoads, VersionFence
from asyncrl.generation.engine import GenerationEngine, WeightReceiver
from asyncrl.protocol.errors import classify
from asyncrl.protocol.weight_updates import UpdateWeightsReply
from asyncrl.runtime.clock import Clock

if TYPE_CHECKING:
    from asyncrl.generation.fetched import FetchedWeights

T = TypeVar("T")


class UnbrokenWork:
    """Runs work to its end even if the client that asked for it disconnects."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        # A second request with the same key waits for the first one's task
        self._in_progress: dict[Hashable, asyncio.Task[Any]] = {}

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.once(object(), lambda: work)

    async def once(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Like `run`, but if work with the same key is in progress, wait for it instead of starting it again."""
        task = self._in_progress.get(key)
        if task is None:
            task = self._in_progress[key] = asyncio.ensure_future(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._in_progress.pop(key))
        result: T = await asyncio.shield(task)
        return result

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


@dataclass(frozen=True)
class Means:
    """The server's means that a transport uses."""

    engine: GenerationEngine[Any]
    fence: VersionFence
    work: UnbrokenWork
    clock: Clock
    verified: VerifiedLoads | None = None  # loads versions and runs the logprob check (weights.verify_logprobs)
    receiver: WeightReceiver | None = None  # the engine's; None: this server loads from disk only
    fetched: FetchedWeights | None = None  # fetches versions that are not in the run's folder here
    run_dir: str = ""  # the run whose weights this server loads; "": it loads from any folder


def reply_with(reply: UpdateWeightsReply) -> web.Response:
    status = 200 if reply.success else 400
    return web.Response(body=msgspec.json.encode(reply), status=status, content_type="application/json")


def refuse(error: Exception) -> web.Response:
    """The reply to a request whose version is refused."""
    mismatch = isinstance(error, LogprobMismatch)
    return reply_with(
        UpdateWeightsReply(success=False, message=str(error), mismatch=mismatch, error_class=classify(error))
    )


class ServerSide(ABC):
    """The manager has paused the server before tensors arrive. A version is loaded in full or refused: then the reply
    (UpdateWeightsReply, status 400) has the reason, and the server serves nothing that it has not verified.
    """

    def __init__(self, means: Means) -> None:
        self._means = means

    @abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """Methods, paths and handlers."""
