"""Broadcasts the newest weights to generation servers over the network, from the first rank of the served model.

    compute threads of all ranks -- export.take_buckets --> held_weights.py: each rank's share of the newest version, in its memory
    gserver manager -- POST /broadcast_weights: version, paused servers --> one broadcast to all of them
    per server: join a group (reused for the same set of servers), begin, one request per bucket during its broadcast, end

The sender receives the other ranks' shares bucket by bucket while it sends, so no rank holds the whole model.

The broadcast starts only after every server has joined the group and accepted the announced tensors. If a server refuses, dies or
hangs, the sender leaves the group and sends everything again to the other servers, within the same time limit. In a group that
fails although all of its servers answer, any of them may be at fault. So each of them then has a group of its own. Only the servers
at fault, which the reply names, load the version from disk. If the trainer is at fault, or the limit has passed, all of them do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
import torch
from aiohttp import web

from asyncrl.config.schema import SLOW_BYTES_PER_S, ConfigError, WeightsConfig
from asyncrl.model.held_weights import SentBucket, ShareReader, Shares, ShareServer
from asyncrl.model.trainer_side import HeldShare, Rank, TrainerSide
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import (
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
)
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import listen_routes
from asyncrl.runtime.services import Services
from asyncrl.weights.update_group import GroupMember, rank_offsets, serve_store

T = TypeVar("T")
Targets = Sequence[BroadcastTarget]
Groups = Sequence[tuple[Targets, GroupMember]]  # each server is in one of them

_MAX_GROUPS = 4  # update waves use few combinations of servers; beyond these, the least recently used group is dropped
_MAX_TRIES = 4  # for one request
# Of weights.broadcast_timeout_s: a silent server is found within a quarter of it, and a group has this quarter for a step
_SILENT_SHARE, _STEP_SHARE = 1 / 6, 1 / 4
_LEAVE_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.0
_FAILURES = (aiohttp.ClientError, OSError, RuntimeError, ValueError)  # of a failed step of a broadcast


class BroadcastError(RuntimeError):
    """A server failed its part of a broadcast."""

    def __init__(self, target: BroadcastTarget, why: str, *, is_gone: bool = False) -> None:
        """is_gone: the server does not answer."""
        super().__init__(f"{target.server} {why}")
        self.server, self.is_gone = target.server, is_gone


class ServersAtFault(RuntimeError):
    """A step failed because of these servers, and the broadcast may succeed without them."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        super().__init__("; ".join(sorted(set(causes.values()))))
        self.causes = causes  # by server


class GroupFailed(RuntimeError):
    """A step failed in a group whose servers all answer. Any of them may be at fault."""


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

    async def ping(self, target: BroadcastTarget) -> None:
        """Return if the server answers, whatever it answers. Raises BroadcastError."""
        try:
            await self._ask(target, "GET", "/get_model_info", b"")
        except BroadcastError as error:
            if error.is_gone:
                raise

    async def post(self, target: BroadcastTarget, path: str, message: msgspec.Struct) -> UpdateWeightsReply:
        """Post a message and return the reply. Raises BroadcastError unless the reply reports success or a mismatch."""
        body = await self._ask(target, "POST", path, msgspec.json.encode(message))
        reply = msgspec.json.decode(body, type=UpdateWeightsReply)
        if not reply.success and not reply.mismatch:
            raise BroadcastError(target, f"answered {path}: {reply.message}")
        return reply

    async def _ask(self, target: BroadcastTarget, method: str, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, target.url + path, data=body, headers=headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise BroadcastError(target, f"did not answer {path}: {error!r}", is_gone=True) from error
        if response.status not in (200, 400) or not answer.startswith(b"{"):
            text = answer[:200].decode(errors="replace")
            raise BroadcastError(target, f"answered {path} with {response.status}: {text}")
        return answer


class Broadcast:
    """One broadcast of a version to some servers. `stage` names the current step; the error of a failed broadcast begins with it.

    A step that fails raises ServersAtFault or GroupFailed, unless the trainer fails. A server that is awaited and stays silent for
    limit_s * _SILENT_SHARE is at fault. A step of a group takes at most limit_s * _STEP_SHARE, and longer for many bytes.
    """

    def __init__(
        self,
        held: HeldShare,
        targets: Sequence[BroadcastTarget],
        client: ServerClient,
        *,
        deadline: float,
        limit_s: float,
        clock: Clock,
    ) -> None:
        self._held, self._targets, self._client = held, targets, client
        self._deadline, self._silent_s, self._step_s = deadline, limit_s * _SILENT_SHARE, limit_s * _STEP_SHARE
        self._clock = clock
        self.stage = ""

    @property
    def left_s(self) -> float:
        return max(0.001, self._deadline - self._clock.monotonic())

    async def ranks(self, targets: Targets) -> list[int]:
        """The number of ranks of each server in a group."""
        self.stage = "asking servers for their ranks"
        found = await self._of_each(
            [self._watched(target, partial(self._client.num_ranks, target)) for target in targets]
        )
        if unable := {
            target.server: f"{target.server} does not accept weights over the network"
            for target, count in zip(targets, found, strict=True)
            if count < 1
        }:
            raise ServersAtFault(unable)
        return found

    async def join(self, targets: Targets, messages: Sequence[JoinUpdateGroup], mine: Awaitable[None]) -> None:
        """Have the servers join a group. mine: the sender's own part."""
        self.stage = "joining the group"
        path = "/init_weights_update_group"
        theirs = [
            self._watched(target, partial(self._client.post, target, path, message))
            for target, message in zip(targets, messages, strict=True)
        ]
        await self._of_all(targets, [mine, *theirs], self._step_s)

    async def run(self, groups: Groups, reader: ShareReader, shares: Shares) -> BroadcastReply:
        """Run all steps from `begin` to `end` with servers that have joined the groups. shares: those of the other ranks."""
        await self._begin()
        digests: list[str] = []
        count = len(self._held.specs)
        async with reader.buckets(self._held, shares, pin=groups[0][1].backend == "nccl") as buckets:
            self.stage = f"collecting bucket 1 of {count}"
            async for bucket in buckets:
                digests.append(bucket.digest)
                self.stage = f"broadcasting bucket {len(digests)} of {count}"
                await self._send(groups, bucket, is_last=len(digests) == count)
                self.stage = f"collecting bucket {len(digests) + 1} of {count}"
        return await self._end(digests)

    async def _begin(self) -> None:
        self.stage = "asking servers to accept the weights"
        held = self._held
        begin = BeginWeightUpdate(
            weight_version=str(held.version),
            specs=TensorSpecs(
                names=[name for specs in held.specs for name in specs.names],
                dtypes=[dtype for specs in held.specs for dtype in specs.dtypes],
                shapes=[shape for specs in held.specs for shape in specs.shapes],
            ),
            probe_ids=held.scored_text.input_ids if held.scored_text is not None else [],
            probe_logprobs=held.scored_text.logprobs if held.scored_text is not None else [],
        )
        await self._of_each(self._posts("/begin_weight_update", begin, self._targets))

    async def _send(self, groups: Groups, bucket: SentBucket, *, is_last: bool) -> None:
        """Broadcast one bucket, to one group after another. Post its description to all servers of a group at the same time,
        because a server answers only after it has received the bucket."""
        message = ReceiveWeights(
            names=bucket.specs.names,
            dtypes=bucket.specs.dtypes,
            shapes=bucket.specs.shapes,
            flush_cache=is_last,
            weight_version=str(self._held.version) if is_last else None,
            load_format="flattened_bucket",
            limit_s=self.left_s,
        )
        for targets, group in groups:
            limit_s = min(self.left_s, self._step_s + bucket.flat.numel() / SLOW_BYTES_PER_S)
            to_group = msgspec.structs.replace(message, group_name=group.name)
            received = self._posts("/update_weights_from_distributed", to_group, targets)
            await self._of_all(targets, [*received, group.broadcast(bucket.flat, limit_s)], limit_s)

    async def _end(self, digests: list[str]) -> BroadcastReply:
        """Collect each server's own result: a server that has loaded the version serves it even if others failed."""
        self.stage = "waiting for servers to load"
        posts = self._posts("/end_weight_update", EndWeightUpdate(xxh3=digests), self._targets)
        answers = await asyncio.gather(*posts, return_exceptions=True)
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

    # ------------------------------------------------------------------------------------------------------- faults

    def _posts(
        self, path: str, message: msgspec.Struct, targets: Targets
    ) -> list[Coroutine[Any, Any, UpdateWeightsReply]]:
        return [self._watched(target, partial(self._client.post, target, path, message)) for target in targets]

    async def _watched(self, target: BroadcastTarget, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a request to a server. Raises BroadcastError if the server falls silent before."""
        asked, watch = asyncio.ensure_future(ask()), asyncio.ensure_future(self._until_silent(target))
        try:
            await asyncio.wait({asked, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                await watch
            return await asked
        finally:
            await _end_tasks([asked, watch])

    async def _until_silent(self, target: BroadcastTarget) -> None:
        while True:  # the caller cancels it; every iteration is bounded
            await asyncio.sleep(self._silent_s / 2)
            await self._ping(target)

    async def _ping(self, target: BroadcastTarget) -> None:
        try:
            async with asyncio.timeout(self._silent_s):
                await self._client.ping(target)
        except TimeoutError as error:
            why = f"did not answer for {self._silent_s:.1f} s"
            raise BroadcastError(target, why, is_gone=True) from error

    async def _of_each(self, steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return all results. Each step concerns one server. Raises ServersAtFault after all steps have ended."""
        found = await asyncio.gather(*steps, return_exceptions=True)
        self._raise([error for error in found if isinstance(error, BaseException)])
        return [result for result in found if not isinstance(result, BaseException)]

    async def _of_all(self, targets: Targets, steps: Sequence[Awaitable[Any]], limit_s: float) -> None:
        """Wait for steps of one group, which end together. After the first error or limit_s, find the servers at fault: those that
        do not answer any more, or the only one. Raises GroupFailed if there are others: errors may be consequences."""
        tasks = [asyncio.ensure_future(step) for step in steps]
        try:
            done, pending = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for task in done if (error := task.exception()) is not None]
            if not errors and not pending:
                return
            pings = await asyncio.gather(*map(self._ping, targets), return_exceptions=True)
            self._raise([error for error in [*errors, *pings] if isinstance(error, BroadcastError) and error.is_gone])
            cause = errors[0] if errors else RuntimeError(f"it took longer than {limit_s:.1f} s")
            if len(targets) > 1:
                raise GroupFailed(str(cause))
            self._raise(
                [cause if isinstance(cause, BroadcastError) else BroadcastError(targets[0], f"failed: {cause}")]
            )
        finally:
            await _end_tasks(tasks)

    def _raise(self, errors: Sequence[BaseException]) -> None:
        """Raise ServersAtFault for the errors of servers, or else the first error, if any."""
        causes = {error.server: f"{self.stage}: {error}" for error in errors if isinstance(error, BroadcastError)}
        if causes:
            raise ServersAtFault(causes)
        if errors:
            raise errors[0]


def backend_of(options: WeightsConfig, device: torch.device) -> str:
    """The backend of the groups that weights travel in. Raises ConfigError."""
    backend = options.broadcast_backend
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("weights.broadcast_backend='nccl': the trainer has no GPU; use gloo, or auto")
    return backend


class WeightSender(TrainerSide):
    """consumes: snapshots (`hold`), requests of the manager.  produces: weights in servers; replies that name failed servers.

    waits for: servers to join, accept and receive; a whole broadcast takes at most the limit of its request.
    unblocked by: the servers, or that limit. The training side never waits for any of this.
    """

    def __init__(
        self, client: ServerClient, reader: ShareReader, *, name: str, host: str, device: torch.device,
        options: WeightsConfig, services: Services,
    ) -> None:  # fmt: skip
        """client: sends the requests to the servers. reader: reads the other ranks' shares."""
        super().__init__()
        self._name, self._host, self._device, self._options = name, host, device, options
        self._backend = backend_of(options, device)
        self._logger, self._trace, self._clock = services.logger, services.trace, services.clock
        self._groups: OrderedDict[tuple[str, ...], GroupMember] = OrderedDict()  # by the servers' URLs
        self._used = Counter[tuple[str, ...]]()  # the groups of broadcasts in progress
        self._failing = False  # whether the last broadcast failed; its failure has been logged
        self._client, self._reader = client, reader
        self._goodbyes: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Bind a free port and yield the URL to publish."""
        try:
            async with listen_routes(web.post("/broadcast_weights", self._answer), host=self._host) as url:
                yield url
        finally:
            await self._leave_all()

    async def _leave_all(self) -> None:
        self._reader.keep(None)
        for key in list(self._groups):
            self._leave(key)
        if self._goodbyes:  # servers that this run did not start outlive it and would keep the groups
            await asyncio.wait(self._goodbyes, timeout=_CLOSE_LIMIT_S)
        for task in self._goodbyes:
            task.cancel()

    # ---------------------------------------------------------------------------------------------------- one broadcast

    async def broadcast(self, request: BroadcastRequest) -> BroadcastReply:
        """Broadcast the version to all these servers together, at most _MAX_TRIES times: each time without the servers that were at
        fault before, and in a group for each after no server could be blamed. Returns within the limit even if servers hang."""
        held, targets = self.held, sorted(request.targets, key=lambda target: target.server)
        if held is None or str(held.version) != request.weight_version:
            here = "no weights" if held is None else f"weights {held.version}"
            return _all_failed(targets, f"the trainer holds {here}, not {request.weight_version}")
        limit_s = request.limit_s
        began = self._clock.monotonic()
        reply, left, num_tries, alone = BroadcastReply(), targets, 0, False
        async with AsyncExitStack() as opened:
            opened.enter_context(
                self._trace.overlapping(f"broadcast {held.version}", kind="weights", servers=len(targets))
            )
            while left and num_tries < _MAX_TRIES:
                num_tries += 1
                parts = [[target] for target in left] if alone else [left]
                found, left = await self._try(held, parts, opened, deadline=began + limit_s, limit_s=limit_s)
                alone = alone or not found.errors
                reply.errors.update(found.errors)
                reply.mismatched.extend(found.mismatched)
        why = f"{num_tries} broadcasts failed because of other servers"
        reply.errors.update(dict.fromkeys((target.server for target in left), why))
        self._log(held.version, targets, reply, self._clock.monotonic() - began)
        return reply

    async def _try(
        self,
        held: HeldShare,
        parts: Sequence[list[BroadcastTarget]],
        opened: AsyncExitStack,
        *,
        deadline: float,
        limit_s: float,
    ) -> tuple[BroadcastReply, list[BroadcastTarget]]:
        """Broadcast once, over a group for each part. Returns the reply, and the servers that may get the version in another try.
        Until that has opened the shares again, this try keeps them open, so that the other ranks keep them."""
        targets = [target for part in parts for target in part]
        step_s = min(limit_s, self._options.broadcast_timeout_s)
        broadcast = Broadcast(held, targets, self._client, deadline=deadline, limit_s=step_s, clock=self._clock)
        keys = [tuple(target.url for target in part) for part in parts]
        self._used.update(keys)
        again: list[BroadcastTarget] = []
        try:
            async with asyncio.timeout(broadcast.left_s):
                broadcast.stage = "opening the shares of the other ranks"
                shares = await self._reader.open(held, opened, broadcast.left_s)
                groups = [(part, await self._group_of(part, broadcast)) for part in parts]
                reply = await broadcast.run(groups, self._reader, shares)
        except ServersAtFault as fault:
            reply = BroadcastReply(errors=dict(fault.causes))
            again = [target for target in targets if target.server not in fault.causes]
        except GroupFailed as error:
            self._logger.info("%s: %s; each server gets a group of its own", broadcast.stage, error)
            reply, again = BroadcastReply(), targets
        except (TimeoutError, *_FAILURES) as error:
            late = isinstance(error, asyncio.TimeoutError)
            why = f"not done within {limit_s:g} s" if late else str(error) or repr(error)
            reply = _all_failed(targets, f"{broadcast.stage}: {why}")
        finally:
            self._used -= Counter(keys)
        if reply.errors or again:
            self._forget(targets, reply.errors)
        for key in [key for key in self._groups if key not in self._used][:-_MAX_GROUPS]:
            self._leave(key)
        return reply, again

    def _log(
        self, version: WeightVersion, targets: Sequence[BroadcastTarget], reply: BroadcastReply, took_s: float
    ) -> None:
        reached = [target.server for target in targets if target.server not in reply.errors]
        if reached:
            self._logger.info("weights %s broadcast to %s (%.2f s)", version, ", ".join(reached), took_s)
        if not reply.errors:
            self._failing = False
            return
        level, self._failing = logging.DEBUG if self._failing else logging.WARNING, True
        causes = "; ".join(sorted(set(reply.errors.values())))
        self._logger.log(
            level,
            "weights %s did not reach every server: %s; servers without them load from disk",
            version,
            causes,
        )

    async def _group_of(self, targets: Sequence[BroadcastTarget], broadcast: Broadcast) -> GroupMember:
        """Return the group of these servers; create it if there is none."""
        key = tuple(target.url for target in targets)
        if (known := self._groups.get(key)) is not None:
            self._groups.move_to_end(key)
            return known
        offsets, size = rank_offsets(await broadcast.ranks(targets))
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
        await broadcast.join(targets, joins, mine)
        return member

    def _forget(self, targets: Sequence[BroadcastTarget], at_fault: Collection[str]) -> None:
        """Leave the group of a failed broadcast, whose connections must not be reused, and every group that contains a server at
        fault. Other groups stay, so that their servers need not join again."""
        failed = tuple(target.url for target in targets)
        urls = {target.url for target in targets if target.server in at_fault}
        for key in [key for key in self._groups if key == failed or urls & set(key)]:
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
        except TimeoutError:
            self._logger.debug("not all of %s acknowledged leaving group %s", urls, group_name)

    # -------------------------------------------------------------------------------------------------------------- HTTP

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=BroadcastRequest)
        except DECODE_ERRORS as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=msgspec.json.encode(await self.broadcast(wanted)), content_type="application/json")


@contextlib.asynccontextmanager
async def broadcasting(rank: Rank) -> AsyncIterator[TrainerSide]:
    """The first rank has the sender. The others serve their shares to it."""
    info, directory = rank.info, rank.directory
    names = directory.names
    if not rank.is_first:
        shares = ShareServer(info.runtime.host, rank.device)
        async with shares.serving() as url:
            await directory.publish(names.held_weights(info.index, info.attempt), url)
            yield shares
        return

    async def url_of(worker: int) -> str:
        return await directory.wait_for_key(
            names.held_weights(worker, info.attempt), f"model_worker/{worker} to serve its share"
        )

    async with open_session(max_connections=0) as session:
        sender = WeightSender(
            ServerClient(session),
            ShareReader(
                session,
                url_of,
                host=info.runtime.host,
                device=rank.device,
                backend=backend_of(rank.weights, rank.device),
                clock=rank.services.clock,
            ),
            name=f"{info.experiment}/{info.trial}/a{info.attempt}",
            host=info.runtime.host,
            device=rank.device,
            options=rank.weights,
            services=rank.services,
        )
        async with sender.serving() as url:
            await directory.publish(names.weight_sender(ACTOR), url)
            yield sender


def _all_failed(targets: Sequence[BroadcastTarget], why: str) -> BroadcastReply:
    return BroadcastReply(errors={target.server: why for target in targets})


async def _end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # mark it as retrieved
