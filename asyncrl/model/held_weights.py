"""The newest weights in memory: each rank of the served model holds its share, and the sender reads the shares during a broadcast.

    compute threads of all ranks -- export.take_buckets --> HeldShare: this rank's share, in buckets
    sender, on the first rank -- GET /held_weights/{version} --> ShareServer of every other rank: its buckets, in one answer

So a rank holds its share, and the sender also the two buckets that it reads and sends. A newer version replaces a share at once,
but a share lives as long as an answer is open. The sender opens the answers of all ranks before it sends a bucket, and closes them
when the broadcast is over. So a version that is being sent stays complete while training makes the next one.

This is HTTP and no process group: the sender asks when servers are ready, several times if a wave is repeated, and a read that
fails fails one broadcast. In a process group it would break the connections of all later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from weakref import WeakValueDictionary

import aiohttp
import torch
from aiohttp import web
from torch import Tensor

from asyncrl.model.trainer_side import HeldShare, TrainerSide
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.runtime.http_server import listen_routes
from asyncrl.weights.update_group import bytes_of

_PART_BYTES = 1 << 20  # written or read at once; the event loop copies each part
_DIGEST_CHARS = 16  # of an xxh3 in hexadecimal; it follows its bucket


Answers = Mapping[int, aiohttp.StreamReader]  # open shares, by worker


class ShareError(RuntimeError):
    """Another rank did not deliver its share."""


class ShareServer(TrainerSide):
    """Serves this rank's newest share to the sender: the bytes of each bucket, then its digest. The answer stays open after that.

    consumes: shares (`hold`).  produces: answers.
    waits for: the sender to read an answer and to close it, at most limit_s.  unblocked by: the sender, or that limit.
    """

    def __init__(self, host: str, *, limit_s: float) -> None:
        """limit_s: of an answer (weights.broadcast_timeout_s)."""
        super().__init__()
        self._host, self._limit_s = host, limit_s
        # The held share, and those being read, by version
        self._alive: WeakValueDictionary[str, HeldShare] = WeakValueDictionary()

    def hold(self, held: HeldShare) -> None:
        """Replace the held share. The old one stays in memory only while it is being read or written."""
        super().hold(held)
        self._alive[str(held.version)] = held

    def serving(self) -> AbstractAsyncContextManager[str]:
        """Bind a free port and yield the URL to publish."""
        return listen_routes(web.get("/held_weights/{version}", self._answer), host=self._host, cancels=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        wanted = request.match_info["version"]
        held = self._alive.get(wanted)
        if held is None:
            here = "no weights" if self.held is None else f"weights {self.held.version}"
            return web.Response(status=409, text=f"this rank holds {here}, not {wanted}")
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            async with asyncio.timeout(self._limit_s):
                for bucket, digested in zip(held.buckets, held.digests, strict=True):
                    room = bucket.flat.numpy().data
                    for start in range(0, len(room), _PART_BYTES):
                        await response.write(room[start : start + _PART_BYTES])
                    await response.write((await digested).encode())
                await asyncio.Event().wait()  # until the sender closes the connection, which cancels this
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return response


@dataclass(frozen=True)
class SentBucket:
    """A bucket to send. `flat` is valid until the next bucket is taken."""

    specs: TensorSpecs
    flat: Tensor
    digest: str


class ShareReader:
    """Reads the shares of other ranks. Keeps two buffers, because memory that is new to the process is slow to write."""

    def __init__(self, session: aiohttp.ClientSession, url_of: Callable[[int], Awaitable[str]]) -> None:
        """url_of: returns the URL of a worker's ShareServer."""
        self._session, self._url_of = session, url_of
        self._urls: dict[int, str] = {}  # they stay the same: the workers of a model end together
        self._spare: list[Tensor] = []

    async def open(self, held: HeldShare, opened: AsyncExitStack) -> Answers:
        """Open all other shares of a version, until `opened` closes. The caller bounds the wait. Raises ShareError."""
        return {worker: await self._open(worker, held.version, opened) for worker in held.others}

    async def _open(self, worker: int, version: WeightVersion, opened: AsyncExitStack) -> aiohttp.StreamReader:
        try:
            if worker not in self._urls:
                self._urls[worker] = await self._url_of(worker)
            url = f"{self._urls[worker]}/held_weights/{version}"
            no_limit = aiohttp.ClientTimeout(total=None)
            asking = self._session.get(url, timeout=no_limit, read_bufsize=_PART_BYTES)
            answer = await opened.enter_async_context(asking)
            if answer.status != 200:
                raise ShareError(f"model_worker/{worker} answered {answer.status}: {await answer.text()}")
        except (aiohttp.ClientError, OSError) as error:
            raise ShareError(f"model_worker/{worker} did not open its share: {error!r}") from error
        return answer.content

    @contextlib.asynccontextmanager
    async def buckets(
        self, held: HeldShare, answers: Answers, *, pin: bool = False
    ) -> AsyncIterator[AsyncIterator[SentBucket]]:
        """Yield the buckets of a version in the order of held.specs; read one ahead. The caller bounds every wait.

        pin: yield buckets in pinned memory, from which a GPU copies asynchronously. Raises ShareError in the iteration.
        """
        largest = max(map(bytes_of, held.specs), default=0) if pin or held.others else 0
        room, self._spare = self._spare, []
        if sum(buffer.numel() for buffer in room) < 2 * largest:
            room = [torch.empty(largest, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        found = _all_buckets(held, answers, room, copy=pin)
        ahead = _one_ahead(found)
        try:
            yield ahead
        finally:
            await ahead.aclose()
            await found.aclose()
        self._spare = room  # after an error a call that hangs may still use it


async def _all_buckets(
    held: HeldShare, answers: Answers, room: list[Tensor], *, copy: bool
) -> AsyncGenerator[SentBucket, None]:
    """Yield the buckets. Those of other ranks are in the two buffers of `room` by turns; with `copy` this rank's own are, too."""
    loop = asyncio.get_running_loop()
    turns = itertools.cycle(room)
    for bucket, digested in zip(held.buckets, held.digests, strict=True):
        flat = bucket.flat
        if copy:
            flat = await loop.run_in_executor(None, next(turns)[: flat.numel()].copy_, flat)
        yield SentBucket(bucket.specs, flat, await digested)
    for worker, parts in held.others.items():
        for specs in parts:
            flat, digested_there = next(turns)[: bytes_of(specs)], bytearray(_DIGEST_CHARS)
            try:
                await _read(answers[worker], flat.numpy().data)
                await _read(answers[worker], memoryview(digested_there))
            except (aiohttp.ClientError, OSError, EOFError) as error:
                raise ShareError(f"model_worker/{worker} did not deliver its share: {error!r}") from error
            yield SentBucket(specs, flat, digested_there.decode())


async def _read(content: aiohttp.StreamReader, room: memoryview) -> None:
    """Fill the room. The event loop runs between the parts. Raises EOFError."""
    at = 0
    while at < len(room):
        part = await content.read(min(_PART_BYTES, len(room) - at))
        if not part:
            raise EOFError("the answer is too short")
        room[at : at + len(part)] = part
        at += len(part)


async def _one_ahead(items: AsyncIterator[SentBucket]) -> AsyncGenerator[SentBucket, None]:
    """Yield the items; take the next one while the consumer works on the current one."""
    following = asyncio.ensure_future(anext(items, None))
    try:
        while (item := await following) is not None:
            following = asyncio.ensure_future(anext(items, None))
            yield item
    finally:
        following.cancel()
        await asyncio.wait({following})
        if not following.cancelled():
            following.exception()  # mark it as retrieved
