"""Calls to several model workers at once, and to worlds that are apart (dataflow/worlds.py).

What one life of such a world has left unanswered is done again in the next:

    an MFC there: fetch its inputs from the gang -> execute -> the gang fetches its outputs
                  \\____________ one piece of work: whatever of it fails, all of it is done again ____________/

So what such a world holds is never the only copy of anything but for the time of a piece of work, and a worker that dies takes
nothing with it that the gang does not have, or does not have made again. Nothing there is trained: the same inputs give the same
outputs, in whichever life. The gang waits for the outputs, as it would for a slow reference, and goes on.

How often a world is started again the launcher decides (launch/supervisor/policy.py). Here every wait has the limit of a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.dataflow.redistribution import Transfer
from asyncrl.dataflow.topology import Handler
from asyncrl.dataflow.worlds import Worlds
from asyncrl.master.buffer import StorageTracker
from asyncrl.protocol.messages import CallBody, CallResult, FetchData, FetchPart
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.channel_protocol import ChannelError, ReceiverRestarted
from asyncrl.runtime.request_reply import NameResolvingRequestClient, RemoteCallError

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


logger = logging.getLogger(__name__)

_PAUSE_S = 0.5  # before data is fetched again in the same life


class WorldEndedError(RuntimeError):
    """A life of a world is over, or about to be: what was asked of it is to be asked again in the next."""


class UnfetchedError(RuntimeError):
    """Data did not come from one world to the other. Both may be well, or one of them is about to be found dead."""


@dataclass(frozen=True)
class Life:
    """One life of a world that is apart."""

    world: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"life {self.number} of {', '.join(f'model_worker/{worker}' for worker in self.world)}"


class Repeats:
    """Decides what follows a failure of a piece of work. Pure.

    A life that has ended: another try in the next. Data that did not come: in the same life if that goes on, but not for ever:
    all failures in one life within the limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._life = -1
        self._since = 0.0

    def first_life(self, error: Exception, life: int, now: float) -> int:
        """The first life in which to try again after such a failure in this one. Raises the error where that is in vain."""
        if isinstance(error, WorldEndedError):
            return life + 1
        if self._life != life:
            self._life, self._since = life, now
        if now - self._since > self._limit_s:
            raise error
        return life


class ApartWorlds:
    """The master's dealings with worlds that are apart.

    consumes: pieces of work.  produces: what they give, once.
    waits for: replies; for the next life of a world that has ended. Both at most the limit of a call.
    unblocked by: the world's workers; their successors.
    """

    def __init__(
        self,
        worlds: Worlds,
        client: NameResolvingRequestClient,
        caller: WorkerCaller,
        limit_s: float,
        *,
        prepare: Callable[[Life], Awaitable[None]],
    ) -> None:
        """prepare: precedes all work in a life, once."""
        self.worlds = worlds
        self._client, self._caller, self._limit_s = client, caller, limit_s
        self._telling: set[asyncio.Task[None]] = set()
        self._prepare = prepare
        self._preparing = {world: asyncio.Lock() for world in worlds.apart}
        self._ready: dict[tuple[int, ...], int] = {}  # the life that a world has been prepared in

    async def repeated(self, what: str, world: Sequence[int], work: Callable[[Life], Awaitable[T]]) -> T:
        """What `work` gives in a life of the world; in the next where it raises WorldEndedError, and again in the same for a while
        where it raises UnfetchedError."""
        loop, repeats = asyncio.get_running_loop(), Repeats(self._limit_s)
        life = -1
        while True:  # as often as the launcher starts the world again; each turn is bounded
            life = await self._in_life(what, world, life)
            try:
                present = Life(tuple(world), life)
                await self._prepared(present)
                return await work(present)
            except (WorldEndedError, UnfetchedError) as error:
                again = repeats.first_life(error, life, loop.time())
                logger.warning("%s is to be done again: %s", what, error)
                if again == life:
                    await asyncio.sleep(_PAUSE_S)
                life = again

    async def call(
        self, what: str, life: Life, handlers: Sequence[Handler], bodies: Sequence[CallBody]
    ) -> list[CallResult]:
        """Call workers of a world in this life of it, and in no other. Raises WorldEndedError where that is over: a worker whose
        call has failed ends, and its world with it."""
        self._check(life)
        try:
            replies = await self._caller.start_each(what, handlers, bodies)
        except (ReceiverRestarted, RemoteCallError) as error:
            raise WorldEndedError(str(error)) from error
        self._check(life)  # else what is said to be there has gone meanwhile
        return replies

    async def fetch(self, what: str, life: Life, transfers: Sequence[Transfer], tracker: StorageTracker) -> float:
        """Have data fetched by workers of a world from the gang, or by the gang from them. Returns the bytes that have come. Raises
        UnfetchedError where not all has come, WorldEndedError where those that were to fetch have ended."""
        parts: dict[int, list[FetchPart]] = {}
        for transfer in transfers:
            (target,) = transfer.targets
            number = life.number if transfer.source in life.world else 0
            part = FetchPart(transfer.source, number, list(transfer.ids), list(transfer.keys))
            parts.setdefault(target, []).append(part)
        if not parts:
            return 0.0
        workers, bodies = list(parts), [FetchData(parts=of) for of in parts.values()]
        if workers[0] in life.world:
            replies = await self.call(what, life, workers, bodies)
        else:
            replies = await self._caller.start_each(what, workers, bodies)
        if unfetched := next((reply.unfetched for reply in replies if reply.unfetched), ""):
            raise UnfetchedError(unfetched)
        for transfer in transfers:
            tracker.add(transfer.targets[0], transfer.ids, transfer.keys)
        return float(sum(reply.num_bytes for reply in replies))

    def tell_nowait(self, what: str, workers: Sequence[int], body: CallBody) -> None:
        """Something that need not be said again to a world that has ended meanwhile, and that nobody waits for."""
        for worker in workers:
            if self._client.life_of(self.worlds.of(worker)) is not None:
                task = asyncio.create_task(self._tell(what, worker, body))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell(self, what: str, worker: int, body: CallBody) -> None:
        try:
            await self._caller.start(what, [worker], body)
        except (ChannelError, RemoteCallError) as error:
            logger.info("%s: %s", what, error)

    async def _prepared(self, life: Life) -> None:
        async with self._preparing[life.world]:
            if self._ready.get(life.world) != life.number:
                await self._prepare(life)
            self._ready[life.world] = life.number

    def _check(self, life: Life) -> None:
        if self._client.life_of(life.world) != life.number:
            raise WorldEndedError(f"{life} is over")

    async def _in_life(self, what: str, world: Sequence[int], first: int) -> int:
        names = ", ".join(f"model_worker/{worker}" for worker in world)
        back = self._client.wait_for_life(world, after=first - 1)
        return await self._caller.bounded(back, f"life {max(first, 0)}, for {what},", names)
