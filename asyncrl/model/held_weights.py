"""The newest weights in memory: each rank of the served model holds its share, and the sender collects the shares in a broadcast.

    compute threads of all ranks -- export.take_buckets --> HeldShare: this rank's share, in buckets
    sender, on the first rank -- POST /held_weights --> ShareServer of every other rank: it finds its share and joins the group
    every other rank -- its buckets, over that group --> ShareReader: one after another, into two buffers

So a rank holds its share, and the sender also the two buckets that it receives and sends. With NCCL these are on the device, so a
bucket reaches the servers without the host's memory. A newer version replaces a share at once, but a share lives as long as an
answer is open. The sender opens the answers of all ranks before it sends a bucket, and closes them when the broadcast is over. So a
version that is being sent stays complete while training makes the next one.

The group is the shares' own (weights/update_group.py), not one of training. A transfer that fails costs this group only: both sides
leave it, and the next broadcast makes another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import msgspec
import torch
from aiohttp import web
from msgspec.structs import replace
from torch import Tensor
from torch._C._distributed_c10d import Store

from asyncrl.model.trainer_side import HeldShare, TrainerSide
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import JoinUpdateGroup, SendShare, TensorSpecs
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.http_server import listen_routes
from asyncrl.weights.update_group import GroupMember, bytes_of, serve_store, store_at

_DIGEST_CHARS = 16  # of an xxh3 in hexadecimal
_ALL_SENT = b"all sent"  # the group can be used again: the rank waits in no call
_MAX_GROUPS = 4  # that a rank keeps; the sender keeps one, and one for each broadcast in progress


class ShareError(RuntimeError):
    """Another rank did not deliver its share."""


class ShareServer(TrainerSide):
    """Sends this rank's newest share to the sender, over a group that the sender names. The answer stays open after that.

    consumes: shares (`hold`), requests of the sender.  produces: buckets, and their digests in the answer.
    waits for: the other ranks to join; the sender to receive each bucket and to close the answer, at most the limit
    of the request.  unblocked by: the sender, or that limit.
    """

    def __init__(self, host: str, device: torch.device, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self._host, self._device, self._clock = host, device, clock
        self._members = OrderedDict[str, GroupMember]()  # those that no broadcast uses, by the group's name
        # The held share, and those being sent, by version
        self._alive: WeakValueDictionary[str, HeldShare] = WeakValueDictionary()

    def hold(self, held: HeldShare) -> None:
        """Replace the held share. The old one stays in memory only while it is being sent or written."""
        super().hold(held)
        self._alive[str(held.version)] = held

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Bind a free port and yield the URL to publish."""
        try:
            async with listen_routes(web.post("/held_weights", self._answer), host=self._host, cancels=True) as url:
                yield url
        finally:
            for member in self._members.values():
                member.leave()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            wanted = msgspec.json.decode(await request.read(), type=SendShare)
        except DECODE_ERRORS as error:
            return web.Response(status=400, text=f"{error}\n")
        held = self._alive.get(wanted.weight_version)
        if held is None:
            here = "no weights" if self.held is None else f"weights {self.held.version}"
            return web.Response(status=409, text=f"this rank holds {here}, not {wanted.weight_version}")
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            async with asyncio.timeout(wanted.group.limit_s):
                with contextlib.suppress(RuntimeError):  # the sender sees it too, and may ask again for this version
                    await self._send(held, wanted.group, response)
                await asyncio.Event().wait()  # until the sender closes the connection, which cancels this
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send(self, held: HeldShare, group: JoinUpdateGroup, response: web.StreamResponse) -> None:
        """Send each bucket's digest in the answer, and the bucket to rank 0 of the group. Leaves the group after an error."""
        name, limit_s = group.group_name, group.limit_s
        known = self._members.pop(name, None)
        member = known or GroupMember(name, group.backend, self._clock)
        try:
            if known is None:
                await member.join(
                    lambda: store_at(group.master_address, group.master_port, limit_s),
                    rank=group.rank_offset,
                    size=group.world_size,
                    limit_s=limit_s,
                    host=self._host,
                    device=self._device,
                    sends=True,
                )
            for bucket, digested in zip(held.buckets, held.digests, strict=True):
                await response.write((await digested).encode())
                await member.send(bucket.flat, limit_s)
            self._members[name] = member  # first, because the sender may now begin the next broadcast
            await response.write(_ALL_SENT)
        except BaseException:
            self._members.pop(name, None)
            member.leave()
            raise
        if len(self._members) > _MAX_GROUPS:
            self._members.popitem(last=False)[1].leave()


@dataclass(frozen=True)
class SentBucket:
    """A bucket to send. `flat` is valid until the next bucket is taken."""

    specs: TensorSpecs
    flat: Tensor
    digest: str


@dataclass(frozen=True)
class _Group:
    """A group of all ranks of the trainer, for one broadcast at a time."""

    member: GroupMember
    join: JoinUpdateGroup  # how the other ranks join it
    store: Store


@dataclass
class Shares:
    """The open shares of the other ranks of one version."""

    answers: dict[int, aiohttp.StreamReader]  # by worker, in the order of their ranks
    group: _Group | None = None  # that brings them; None: there are no other ranks
    limit_s: float = 0.0  # of each transfer
    have_arrived: bool = False


class ShareReader:
    """Receives the shares of other ranks. Keeps its buffers, because memory that is new to the process is slow to write."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url_of: Callable[[int], Awaitable[str]],
        *,
        host: str,
        device: torch.device,
        backend: str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """url_of: returns the URL of a worker's ShareServer. device: of this rank. backend: gloo or nccl."""
        self._session, self._url_of, self._host, self._clock = session, url_of, host, clock
        self._device, self._backend = device, backend
        self._urls: dict[int, str] = {}  # they stay the same: the workers of a model end together
        self._idle: _Group | None = None  # of an earlier broadcast
        self._spare: dict[str, list[Tensor]] = {}

    async def open(self, held: HeldShare, opened: AsyncExitStack, limit_s: float) -> Shares:
        """Open the shares of all other ranks, until `opened` closes, at most limit_s. Raises ShareError or RuntimeError."""
        if not held.others:
            return Shares({})
        group, self._idle = self._idle, None
        if is_new := group is None:
            group = await self._new_group(1 + len(held.others), limit_s)
        shares = Shares({}, group, limit_s)
        opened.callback(self._close, shares)
        for rank, worker in enumerate(held.others, start=1):
            join = replace(group.join, rank_offset=rank, limit_s=limit_s)
            shares.answers[worker] = await self._open(worker, join, held.version, opened)
        if is_new:  # the others join once their answers have begun
            store, size = group.store, group.join.world_size
            await group.member.join(
                lambda: store, rank=0, size=size, limit_s=limit_s, host=self._host, device=self._device
            )
        return shares

    def _close(self, shares: Shares) -> None:
        """Keep the group of shares that arrived. The ranks may still be sending in any other group, so leave it."""
        if shares.group is not None and shares.have_arrived:
            self.keep(shares.group)
        elif shares.group is not None:
            shares.group.member.leave()

    async def _new_group(self, size: int, limit_s: float) -> _Group:
        store, address = await asyncio.to_thread(serve_store, self._host, limit_s)
        host, _, port = address.rpartition(":")
        name = f"shares-{uuid.uuid4().hex[:8]}"
        join = JoinUpdateGroup(
            master_address=host,
            master_port=int(port),
            rank_offset=0,
            world_size=size,
            group_name=name,
            backend=self._backend,
            limit_s=limit_s,
        )
        return _Group(GroupMember(name, self._backend, self._clock), join, store)

    async def _open(
        self, worker: int, join: JoinUpdateGroup, version: WeightVersion, opened: AsyncExitStack
    ) -> aiohttp.StreamReader:
        message = msgspec.json.encode(SendShare(weight_version=str(version), group=join))
        try:
            if worker not in self._urls:
                self._urls[worker] = await self._url_of(worker)
            no_limit = aiohttp.ClientTimeout(total=None)
            asking = self._session.post(f"{self._urls[worker]}/held_weights", data=message, timeout=no_limit)
            answer = await opened.enter_async_context(asking)
            if answer.status != 200:
                raise ShareError(f"model_worker/{worker} answered {answer.status}: {await answer.text()}")
        except (aiohttp.ClientError, OSError) as error:
            raise ShareError(f"model_worker/{worker} did not open its share: {error!r}") from error
        return answer.content

    def keep(self, group: _Group | None) -> None:
        """Keep this group for the next `open`, or none; leave the one that was kept."""
        kept, self._idle = self._idle, group
        if kept is not None:
            kept.member.leave()

    @contextlib.asynccontextmanager
    async def buckets(
        self, held: HeldShare, shares: Shares, *, pin: bool = False
    ) -> AsyncIterator[AsyncIterator[SentBucket]]:
        """Yield the buckets of a version in the order of held.specs; receive one ahead. The caller bounds every wait.

        pin: yield this rank's own buckets in pinned memory, from which a GPU copies asynchronously. Raises ShareError or
        RuntimeError in the iteration.
        """
        largest = max(map(bytes_of, held.specs), default=0)
        there = self._device if self._backend == "nccl" else torch.device("cpu")
        rooms = {
            "pinned": self._room("pinned", largest if pin else 0, pin_memory=pin),
            "received": self._room("received", largest if held.others else 0, device=there),
        }
        found = _all_buckets(held, shares, rooms, copy=pin)
        ahead = _one_ahead(found)
        try:
            yield ahead
        finally:
            await ahead.aclose()
            await found.aclose()
        self._spare, shares.have_arrived = rooms, True  # after an error a call that hangs may still use a buffer

    def _room(self, name: str, num_bytes: int, **options: Any) -> list[Tensor]:
        """Two buffers of at least this size."""
        room = self._spare.pop(name, [])
        if sum(buffer.numel() for buffer in room) < 2 * num_bytes:
            room = [torch.empty(num_bytes, dtype=torch.uint8, **options) for _ in range(2)]
        return room


async def _all_buckets(
    held: HeldShare, shares: Shares, rooms: Mapping[str, list[Tensor]], *, copy: bool
) -> AsyncGenerator[SentBucket, None]:
    """Yield the buckets. Those of other ranks are in two buffers by turns; with `copy` this rank's own are in two others."""
    loop = asyncio.get_running_loop()
    turns = itertools.cycle(rooms["pinned"])
    for bucket, digested in zip(held.buckets, held.digests, strict=True):
        flat = bucket.flat
        if copy:
            flat = await loop.run_in_executor(None, next(turns)[: flat.numel()].copy_, flat)
        yield SentBucket(bucket.specs, flat, await digested)
    turns = itertools.cycle(rooms["received"])
    for source, (worker, parts) in enumerate(held.others.items(), start=1):
        assert shares.group is not None
        for specs in parts:
            flat = next(turns)[: bytes_of(specs)]
            try:
                digest = await shares.answers[worker].readexactly(_DIGEST_CHARS)
                await shares.group.member.receive(flat, source, shares.limit_s)
            except (aiohttp.ClientError, OSError, EOFError, RuntimeError) as error:
                raise ShareError(f"model_worker/{worker} did not deliver its share: {error!r}") from error
            yield SentBucket(specs, flat, digest.decode())
        try:
            await shares.answers[worker].readexactly(len(_ALL_SENT))
        except (aiohttp.ClientError, OSError, EOFError) as error:
            raise ShareError(f"model_worker/{worker} did not end its share: {error!r}") from error


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
