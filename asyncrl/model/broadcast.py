"""WeightSender: gives generation servers the newest weights over the network. The first rank of the model that is served has it.

    compute threads of all ranks -- export.take_whole, in buckets --> held: the newest version, in this rank's memory
    gserver manager -- POST /broadcast_weights: version, servers that it has paused --> one broadcast to all of them
    per server: join a group (kept while the servers are the same), begin, a request a bucket beside its broadcast, end

Whatever the layout, that rank holds the whole model in CPU memory, in the dtype handed out: once, and twice while the version
before is still sent. Where that is too much, weights.transport=disk has every rank write what it holds.

Nothing is broadcast before every server has joined and has agreed to what will come. A server that refuses, dies or hangs
costs this broadcast and no more: within its limit the manager is told, the group is given up, and the servers load from disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import msgspec
import torch
from aiohttp import web

from asyncrl.config.schema import ConfigError, WeightsConfig
from asyncrl.model.sending import FAILURES, Held, SendError, Sending, ServerClient, of_all
from asyncrl.protocol.messages import (
    DECODE_ERRORS,
    BroadcastReply,
    BroadcastRequest,
    BroadcastTarget,
    JoinUpdateGroup,
    LeaveUpdateGroup,
)
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.http_server import for_the_run, serve
from asyncrl.runtime.trace import OFF, Tracer
from asyncrl.weights.update_group import GroupMember, digest, rank_offsets, serve_store

_MAX_GROUPS = 4  # waves come in few combinations of servers; the one unused for longest is given up
_LEAVE_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.0


class WeightSender:
    """consumes: snapshots (`hold`), requests of the manager.  produces: weights in servers; replies that say who lacks them.

    waits for: servers to join, to agree, to receive; all of a broadcast within weights.broadcast_timeout_s.
    unblocked by: the servers, or that limit. The training side never waits for any of this.
    """

    def __init__(
        self, client: ServerClient, *, name: str, host: str, device: torch.device, options: WeightsConfig,
        logger: logging.Logger, trace: Tracer = OFF, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        """client: asks the servers."""
        self._name, self._host, self._device, self._options = name, host, device, options
        self._backend = options.broadcast_backend
        if self._backend == "auto":
            self._backend = "nccl" if device.type == "cuda" else "gloo"
        if self._backend == "nccl" and device.type != "cuda":
            raise ConfigError("weights.broadcast_backend='nccl': the trainer has no GPU; use gloo, or auto")
        self._logger, self._trace, self._clock = logger, trace, clock
        self._groups: OrderedDict[tuple[str, ...], GroupMember] = OrderedDict()  # by the servers' URLs
        self._held: Held | None = None
        self._failing = False  # the last broadcast has failed, which was told
        self._client = client
        self._goodbyes: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Bind a free port; gives the URL to publish."""
        app = web.Application(middlewares=[for_the_run])
        app.add_routes([web.post("/broadcast_weights", self._answer)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        try:
            yield await serve(runner, self._host)
        finally:
            await runner.cleanup()
            await self._leave_all()

    async def _leave_all(self) -> None:
        for key in list(self._groups):
            self._leave(key)
        if self._goodbyes:  # servers that somebody else runs go on without us
            await asyncio.wait(self._goodbyes, timeout=_CLOSE_LIMIT_S)
        for task in self._goodbyes:
            task.cancel()

    def hold(self, held: Held) -> None:
        """Have this version at hand instead of the one before. That one stays in memory only while it is being sent or written."""
        loop = asyncio.get_running_loop()
        held.digests.extend(loop.run_in_executor(None, digest, bucket.flat) for bucket in held.buckets)
        self._held = held

    @property
    def bucket_bytes(self) -> int:
        return self._options.bucket_bytes

    @property
    def held(self) -> Held | None:
        return self._held

    # ---------------------------------------------------------------------------------------------------- one broadcast

    async def broadcast(self, request: BroadcastRequest) -> BroadcastReply:
        """Send the version to these servers together. Answers within the limit, whatever they do."""
        held, targets = self._held, sorted(request.targets, key=lambda target: target.server)
        if held is None or str(held.version) != request.weight_version:
            here = "no weights" if held is None else f"weights {held.version}"
            return _all_failed(targets, f"the trainer holds {here}, not {request.weight_version}")
        limit_s = min(request.limit_s, self._options.broadcast_timeout_s)
        sending = Sending(held, targets, self._client, deadline=self._clock.monotonic() + limit_s, clock=self._clock)
        began = self._clock.monotonic()
        try:
            with self._trace.overlapping(f"broadcast {held.version}", kind="weights", servers=len(targets)):
                async with asyncio.timeout(limit_s):
                    reply = await self._send(sending, targets)
        except (asyncio.TimeoutError, *FAILURES) as error:
            why = f"not within {limit_s:g} s" if isinstance(error, asyncio.TimeoutError) else str(error) or repr(error)
            reply = _all_failed(targets, f"{sending.stage}: {why}")
        if reply.errors:
            self._forget(targets)
            level, self._failing = logging.DEBUG if self._failing else logging.WARNING, True
            causes = "; ".join(sorted(set(reply.errors.values())))
            self._logger.log(level, "weights %s were not sent: %s; servers load them from disk", held.version, causes)
        else:
            self._failing = False
            self._logger.info(
                "weights %s sent to %s (%.2f s)", held.version, _who(targets), self._clock.monotonic() - began
            )
        return reply

    async def _send(self, sending: Sending, targets: Sequence[BroadcastTarget]) -> BroadcastReply:
        group = await self._group_of(targets, sending)
        return await sending.run(group, torch.device("cpu") if self._backend == "gloo" else self._device)

    async def _group_of(self, targets: Sequence[BroadcastTarget], sending: Sending) -> GroupMember:
        """The group of these servers, made now if there is none yet."""
        key = tuple(target.url for target in targets)
        if (known := self._groups.get(key)) is not None:
            self._groups.move_to_end(key)
            return known
        sending.stage = "asking servers for their ranks"
        ranks = await of_all([self._client.num_ranks(target) for target in targets])
        if unable := [target.server for target, count in zip(targets, ranks, strict=True) if count < 1]:
            raise SendError(f"{', '.join(unable)} take no weights over the network")
        offsets, size = rank_offsets(ranks)
        sending.stage = "meeting in a group"
        store, address = await asyncio.to_thread(serve_store, self._host, sending.left_s)
        host, _, port = address.rpartition(":")
        name = f"{self._name}-{uuid.uuid4().hex[:8]}"  # a server may outlive runs, and keeps what was not destroyed
        member = GroupMember(name, self._backend)
        self._groups[key] = member  # from here on it is left, whatever happens
        joins = [
            JoinUpdateGroup(
                master_address=host,
                master_port=int(port),
                rank_offset=offset,
                world_size=size,
                group_name=name,
                backend=self._backend,
                limit_s=sending.left_s,
            )
            for offset in offsets
        ]
        mine = member.join(
            lambda: store, rank=0, size=size, limit_s=sending.left_s, host=self._host, device=self._device
        )
        theirs = [
            self._client.post(target, "/init_weights_update_group", join)
            for target, join in zip(targets, joins, strict=True)
        ]
        await of_all([mine, *theirs])
        while len(self._groups) > _MAX_GROUPS:
            self._leave(next(iter(self._groups)))
        return member

    def _forget(self, targets: Sequence[BroadcastTarget]) -> None:
        """A broadcast has failed: nothing more goes over connections of these servers."""
        urls = {target.url for target in targets}
        for key in [key for key in self._groups if urls & set(key)]:
            self._leave(key)

    def _leave(self, key: tuple[str, ...]) -> None:
        member = self._groups.pop(key)
        member.leave()
        task = asyncio.create_task(self._say_goodbye(member.name, key))
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    async def _say_goodbye(self, group_name: str, urls: Sequence[str]) -> None:
        """The servers may free what belongs to the group. A courtesy: they have limits of their own."""
        body = LeaveUpdateGroup(group_name=group_name)
        targets = [BroadcastTarget(server=url, url=url) for url in urls]
        said = asyncio.gather(
            *(self._client.post(target, "/destroy_weights_update_group", body) for target in targets),
            return_exceptions=True,
        )
        try:
            async with asyncio.timeout(_LEAVE_LIMIT_S):
                await said
        except asyncio.TimeoutError:
            self._logger.debug("not all of %s heard that group %s is no more", urls, group_name)

    # -------------------------------------------------------------------------------------------------------------- HTTP

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=BroadcastRequest)
        except DECODE_ERRORS as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=msgspec.json.encode(await self.broadcast(wanted)), content_type="application/json")


def _all_failed(targets: Sequence[BroadcastTarget], why: str) -> BroadcastReply:
    return BroadcastReply(errors={target.server: why for target in targets})


def _who(targets: Sequence[BroadcastTarget]) -> str:
    return ", ".join(target.server for target in targets)
