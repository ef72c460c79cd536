"""Broadcasts the newest weights to generation servers over the network, from the first rank of the served model.

    compute threads of all ranks -- export.take_whole, in buckets --> held: the newest version, in this rank's memory
    gserver manager -- POST /broadcast_weights: version, paused servers --> one broadcast to all of them
    per server: join a group (reused for the same set of servers), begin, one request per bucket during its broadcast, end

In every layout this rank holds the whole model in CPU memory, in the dtype of exports. It holds two copies while the previous
version is still being broadcast. If that is too much memory, set weights.transport=disk: each rank then writes its own share.

The broadcast starts only after every server has joined the group and accepted the announced tensors. A server that refuses, dies
or hangs fails only this broadcast: within the time limit the manager receives the error, the sender leaves the group, and the
servers load the version from disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import torch
from aiohttp import web

from asyncrl.config.schema import ConfigError, WeightsConfig
from asyncrl.protocol.messages import (
    DECODE_ERRORS,
    BeginWeightUpdate,
    BroadcastReply,
    BroadcastRequest,
    BroadcastTarget,
    EndWeightUpdate,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    ReceiveWeights,
    TensorSpecs,
    UpdateWeightsReply,
    WeightVersion,
)
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.http_server import for_the_run, serve
from asyncrl.runtime.trace import OFF, Tracer
from asyncrl.weights.update_group import Bucket, GroupMember, digest, rank_offsets, serve_store
from asyncrl.weights.versions import ScoredText

_MAX_GROUPS = 4  # update waves use few combinations of servers; beyond these, the least recently used group is dropped
_LEAVE_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.0
_FAILURES = (aiohttp.ClientError, OSError, RuntimeError, ValueError)  # of a failed step of a broadcast


class BroadcastError(RuntimeError):
    """A server failed its part of a broadcast."""


@dataclass(frozen=True)
class HeldSnapshot:
    """One version in memory, with all its tensors."""

    version: WeightVersion
    buckets: list[Bucket]
    scored_text: ScoredText | None = None  # weights.verify_logprobs
    digests: list[asyncio.Future[str]] = field(default_factory=list)  # of the buckets; the sender fills them in

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [named for bucket in self.buckets for named in bucket.tensors()]


class _Info(msgspec.Struct):
    """The fields of GET /server_info that the sender needs. A plain SGLang server reports only tp_size."""

    num_weight_ranks: int | None = None
    tp_size: int = 1


class ServerClient:
    """Sends the requests of a broadcast to generation servers. The caller bounds every call."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def num_ranks(self, target: BroadcastTarget) -> int:
        """Number of ranks that a server occupies in a group."""
        info = msgspec.json.decode(await self._ask(target, "GET", "/server_info", b""), type=_Info)
        return info.tp_size if info.num_weight_ranks is None else info.num_weight_ranks

    async def post(self, target: BroadcastTarget, path: str, message: msgspec.Struct) -> UpdateWeightsReply:
        """Post a message and return the reply. Raises BroadcastError unless the reply reports success or a mismatch."""
        body = await self._ask(target, "POST", path, msgspec.json.encode(message))
        reply = msgspec.json.decode(body, type=UpdateWeightsReply)
        if not reply.success and not reply.mismatch:
            raise BroadcastError(f"{target.server} answered {path}: {reply.message}")
        return reply

    async def _ask(self, target: BroadcastTarget, method: str, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, target.url + path, data=body, headers=headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise BroadcastError(f"{target.server} did not answer {path}: {error!r}") from error
        if response.status not in (200, 400) or not answer.startswith(b"{"):
            text = answer[:200].decode(errors="replace")
            raise BroadcastError(f"{target.server} answered {path} with {response.status}: {text}")
        return answer


class Broadcast:
    """One broadcast of a version. `stage` names the current step; the error of a failed broadcast begins with it."""

    def __init__(
        self,
        held: HeldSnapshot,
        targets: Sequence[BroadcastTarget],
        client: ServerClient,
        *,
        deadline: float,
        clock: Clock,
    ) -> None:
        self._held, self._targets, self._client = held, targets, client
        self._deadline, self._clock = deadline, clock
        self.stage = ""

    @property
    def left_s(self) -> float:
        return max(0.001, self._deadline - self._clock.monotonic())

    async def run(self, group: GroupMember, device: torch.device) -> BroadcastReply:
        """Run all steps from `begin` to `end` with servers that have joined the group. device: the device the group sends from."""
        await self._begin()
        last = len(self._held.buckets) - 1
        for number, bucket in enumerate(self._held.buckets):
            self.stage = f"broadcasting bucket {number + 1} of {last + 1}"
            await self._send(group, bucket, bucket.flat.to(device), is_last=number == last)
        return await self._end()

    async def _begin(self) -> None:
        self.stage = "asking servers to accept the weights"
        held = self._held
        specs = [bucket.specs for bucket in held.buckets]
        begin = BeginWeightUpdate(
            weight_version=str(held.version),
            specs=TensorSpecs(
                names=[name for spec in specs for name in spec.names],
                dtypes=[dtype for spec in specs for dtype in spec.dtypes],
                shapes=[shape for spec in specs for shape in spec.shapes],
            ),
            probe_ids=held.scored_text.input_ids if held.scored_text is not None else [],
            probe_logprobs=held.scored_text.logprobs if held.scored_text is not None else [],
        )
        await _of_all([self._client.post(target, "/begin_weight_update", begin) for target in self._targets])

    async def _send(self, group: GroupMember, bucket: Bucket, flat: torch.Tensor, *, is_last: bool) -> None:
        """Broadcast one bucket, and post its description to all servers at the same time, because a server answers only after it
        has received the bucket. If one server refuses, the broadcast to all of them fails."""
        message = ReceiveWeights(
            names=bucket.specs.names,
            dtypes=bucket.specs.dtypes,
            shapes=bucket.specs.shapes,
            group_name=group.name,
            flush_cache=is_last,
            weight_version=str(self._held.version) if is_last else None,
            load_format="flattened_bucket",
            limit_s=self.left_s,
        )
        received = [self._client.post(target, "/update_weights_from_distributed", message) for target in self._targets]
        await _of_all([*received, group.broadcast(flat, self.left_s)])

    async def _end(self) -> BroadcastReply:
        """Collect each server's own result: a server that has loaded the version serves it even if others failed."""
        self.stage = "waiting for servers to load"
        end = EndWeightUpdate(xxh3=list(await asyncio.gather(*self._held.digests)))
        answers = await asyncio.gather(
            *(self._client.post(target, "/end_weight_update", end) for target in self._targets), return_exceptions=True
        )
        errors: dict[str, str] = {}
        mismatched = []
        for target, answer in zip(self._targets, answers, strict=True):
            if isinstance(answer, _FAILURES):
                errors[target.server] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif not answer.success:
                errors[target.server] = answer.message
                mismatched.append(target.server)
        return BroadcastReply(errors=errors, mismatched=mismatched)


class WeightSender:
    """consumes: snapshots (`hold`), requests of the manager.  produces: weights in servers; replies that name failed servers.

    waits for: servers to join, accept and receive; a whole broadcast takes at most weights.broadcast_timeout_s.
    unblocked by: the servers, or that limit. The training side never waits for any of this.
    """

    def __init__(
        self, client: ServerClient, *, name: str, host: str, device: torch.device, options: WeightsConfig,
        logger: logging.Logger, trace: Tracer = OFF, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        """client: sends the requests to the servers."""
        self._name, self._host, self._device, self._options = name, host, device, options
        self._backend = options.broadcast_backend
        if self._backend == "auto":
            self._backend = "nccl" if device.type == "cuda" else "gloo"
        if self._backend == "nccl" and device.type != "cuda":
            raise ConfigError("weights.broadcast_backend='nccl': the trainer has no GPU; use gloo, or auto")
        self._logger, self._trace, self._clock = logger, trace, clock
        self._groups: OrderedDict[tuple[str, ...], GroupMember] = OrderedDict()  # by the servers' URLs
        self._held: HeldSnapshot | None = None
        self._failing = False  # whether the last broadcast failed; its failure has been logged
        self._client = client
        self._goodbyes: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Bind a free port and yield the URL to publish."""
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
        if self._goodbyes:  # servers that this run did not start outlive it and would keep the groups
            await asyncio.wait(self._goodbyes, timeout=_CLOSE_LIMIT_S)
        for task in self._goodbyes:
            task.cancel()

    def hold(self, held: HeldSnapshot) -> None:
        """Replace the held version. The old one stays in memory only while it is being broadcast or written."""
        loop = asyncio.get_running_loop()
        held.digests.extend(loop.run_in_executor(None, digest, bucket.flat) for bucket in held.buckets)
        self._held = held

    @property
    def bucket_bytes(self) -> int:
        return self._options.bucket_bytes

    @property
    def held(self) -> HeldSnapshot | None:
        return self._held

    # ---------------------------------------------------------------------------------------------------- one broadcast

    async def broadcast(self, request: BroadcastRequest) -> BroadcastReply:
        """Broadcast the version to all these servers together. Returns within the limit even if servers hang."""
        held, targets = self._held, sorted(request.targets, key=lambda target: target.server)
        if held is None or str(held.version) != request.weight_version:
            here = "no weights" if held is None else f"weights {held.version}"
            return _all_failed(targets, f"the trainer holds {here}, not {request.weight_version}")
        limit_s = min(request.limit_s, self._options.broadcast_timeout_s)
        broadcast = Broadcast(
            held, targets, self._client, deadline=self._clock.monotonic() + limit_s, clock=self._clock
        )
        began = self._clock.monotonic()
        try:
            with self._trace.overlapping(f"broadcast {held.version}", kind="weights", servers=len(targets)):
                async with asyncio.timeout(limit_s):
                    reply = await self._send(broadcast, targets)
        except (asyncio.TimeoutError, *_FAILURES) as error:
            why = (
                f"not done within {limit_s:g} s"
                if isinstance(error, asyncio.TimeoutError)
                else str(error) or repr(error)
            )
            reply = _all_failed(targets, f"{broadcast.stage}: {why}")
        if reply.errors:
            self._forget(targets)
            level, self._failing = logging.DEBUG if self._failing else logging.WARNING, True
            causes = "; ".join(sorted(set(reply.errors.values())))
            self._logger.log(
                level,
                "weights %s did not reach every server: %s; servers without them load from disk",
                held.version,
                causes,
            )
        else:
            self._failing = False
            self._logger.info(
                "weights %s broadcast to %s (%.2f s)", held.version, _who(targets), self._clock.monotonic() - began
            )
        return reply

    async def _send(self, broadcast: Broadcast, targets: Sequence[BroadcastTarget]) -> BroadcastReply:
        group = await self._group_of(targets, broadcast)
        return await broadcast.run(group, torch.device("cpu") if self._backend == "gloo" else self._device)

    async def _group_of(self, targets: Sequence[BroadcastTarget], broadcast: Broadcast) -> GroupMember:
        """Return the group of these servers; create it if there is none."""
        key = tuple(target.url for target in targets)
        if (known := self._groups.get(key)) is not None:
            self._groups.move_to_end(key)
            return known
        broadcast.stage = "asking servers for their ranks"
        ranks = await _of_all([self._client.num_ranks(target) for target in targets])
        if unable := [target.server for target, count in zip(targets, ranks, strict=True) if count < 1]:
            raise BroadcastError(f"{', '.join(unable)} do not accept weights over the network")
        offsets, size = rank_offsets(ranks)
        broadcast.stage = "joining the group"
        store, address = await asyncio.to_thread(serve_store, self._host, broadcast.left_s)
        host, _, port = address.rpartition(":")
        name = f"{self._name}-{uuid.uuid4().hex[:8]}"  # unique: a server may outlive runs and keeps groups that were not destroyed
        member = GroupMember(name, self._backend, self._clock)
        self._groups[key] = member  # registered first, so that the group is left even if the join fails
        joins = [
            JoinUpdateGroup(
                master_address=host,
                master_port=int(port),
                rank_offset=offset,
                world_size=size,
                group_name=name,
                backend=self._backend,
                limit_s=broadcast.left_s,
            )
            for offset in offsets
        ]
        mine = member.join(
            lambda: store, rank=0, size=size, limit_s=broadcast.left_s, host=self._host, device=self._device
        )
        theirs = [
            self._client.post(target, "/init_weights_update_group", join)
            for target, join in zip(targets, joins, strict=True)
        ]
        await _of_all([mine, *theirs])
        while len(self._groups) > _MAX_GROUPS:
            self._leave(next(iter(self._groups)))
        return member

    def _forget(self, targets: Sequence[BroadcastTarget]) -> None:
        """Leave every group that contains one of these servers, so that connections of a failed broadcast are not reused."""
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
        """Tell the servers that they may free the group. Best effort: servers have time limits of their own."""
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
            self._logger.debug("not all of %s acknowledged leaving group %s", urls, group_name)

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


async def _of_all(steps: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return all results. Raise the first error at once, without waiting for the others."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # mark it as retrieved
