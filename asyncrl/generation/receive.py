"""Receives weights over the network: the receiver for engines of this process, and the HTTP routes for all engines.

    POST /init_weights_update_group        JoinUpdateGroup: form a group with the sender and the other servers
    POST /begin_weight_update              BeginWeightUpdate: announces the tensors; if it is refused, nothing is sent
    POST /update_weights_from_distributed  ReceiveWeights: a bucket is broadcast now; answers when it has arrived
    POST /end_weight_update                EndWeightUpdate: all buckets have arrived; load them
    POST /destroy_weights_update_group     LeaveUpdateGroup

SGLang's protocol: 200 {"success": true, ...} or 400 {"success": false, "message": ...}. This server checks more than SGLang does:
names, shapes and dtypes before a bucket is received.

An engine of this process (StagedReceiver) also compares the checksums of all buckets at the end, if they are on the CPU. Its model
changes only after all tensors have arrived. Until then they are kept in memory; this memory then becomes the model's, and the
memory that it replaces receives the next update. Such a server therefore needs memory for two copies of its weights. In return,
later updates neither copy tensors of the model's dtype nor allocate memory; an allocation may take longer than the transfer itself.
A SGLang server loads each bucket on arrival (sglang.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from asyncrl.generation.engine import EngineFailed, WeightReceiver, WeightsRefused
from asyncrl.generation.server_side import Means, ServerSide, refuse, reply_with
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import (
    BeginWeightUpdate,
    EndWeightUpdate,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    ReceiveWeights,
    TensorSpecs,
    UpdateWeightsReply,
)
from asyncrl.runtime.clock import Clock
from asyncrl.weights.versions import ScoredText

if TYPE_CHECKING:
    import torch

    from asyncrl.weights.update_group import GroupMember

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)

MAX_GROUPS = 4  # as many as the sender keeps, which also leaves the least recently used one first


@dataclass
class _Update:
    version: str
    spare: list[torch.Tensor]  # buckets of earlier updates, in order, whose memory the next buckets can reuse
    group: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    flats: list[torch.Tensor] = field(default_factory=list)  # the buckets; the tensors are views of them
    # Checksums of the buckets, each computed while the next bucket arrives
    digests: list[asyncio.Future[str]] = field(default_factory=list)


class TensorEngine(Protocol):
    """The methods of an engine of this process that StagedReceiver calls. TransformersEngine documents them."""

    @property
    def weights_device(self) -> torch.device: ...

    def check_version(self, version: WeightVersion) -> None: ...

    def check_tensors(self, specs: TensorSpecs, *, complete: bool) -> None: ...

    async def load_tensors(self, tensors: dict[str, torch.Tensor], version: WeightVersion) -> None: ...

    def uses(self, flats: Sequence[torch.Tensor]) -> list[bool]: ...


class StagedReceiver(WeightReceiver):
    """Collects the tensors of an update, then passes all of them to the engine at once."""

    def __init__(self, engine: TensorEngine, host: str, clock: Clock) -> None:
        self._engine, self._host, self._clock = engine, host, clock
        self._groups: OrderedDict[str, GroupMember] = OrderedDict()
        self._update: _Update | None = None
        # Buckets of earlier updates. Some hold the model's tensors; the memory of the others can be reused
        self._flats: list[torch.Tensor] = []

    async def join(self, group: JoinUpdateGroup) -> None:
        from asyncrl.weights.update_group import GroupMember, store_at

        name = group.group_name
        if name in self._groups:
            raise WeightsRefused(f"group {name!r} already exists", ErrorClass.PASSING)
        try:
            member = GroupMember(name, group.backend, self._clock)
        except ValueError as error:
            raise WeightsRefused(str(error), ErrorClass.PERMANENT) from error
        try:
            async with asyncio.timeout(group.limit_s):
                await member.join(
                    partial(store_at, group.master_address, group.master_port, group.limit_s),
                    rank=group.rank_offset,
                    size=group.world_size,
                    limit_s=group.limit_s,
                    host=self._host,
                    device=self._engine.weights_device,
                )
        except BaseException as error:
            member.leave()
            if isinstance(error, (TimeoutError, RuntimeError, ValueError, OSError)):
                raise WeightsRefused(f"group {name!r} could not be joined: {_reason(error)}") from error
            raise
        self._groups[name] = member
        if len(self._groups) > MAX_GROUPS:
            await self.leave(next(iter(self._groups)))

    async def begin(self, update: BeginWeightUpdate) -> None:
        if update.weight_version:
            self._engine.check_version(_parse(update.weight_version))
        if update.specs.names:
            self._engine.check_tensors(update.specs, complete=True)
        used = self._engine.uses(self._flats)
        spare = [flat for flat, in_use in zip(self._flats, used, strict=True) if not in_use]
        self._flats = [flat for flat, in_use in zip(self._flats, used, strict=True) if in_use]
        self._update = _Update(update.weight_version, spare)  # replaces an open update, which its sender has abandoned

    async def receive(self, bucket: ReceiveWeights) -> None:
        import torch

        from asyncrl.weights.update_group import bytes_of, digest, views

        update, member = self._update, self._groups.get(bucket.group_name)
        if update is None:
            raise WeightsRefused(
                "update_weights_from_distributed must come between begin_ and end_weight_update", ErrorClass.PASSING
            )
        if member is None:
            raise WeightsRefused(
                f"there is no group {bucket.group_name!r}; call init_weights_update_group first", ErrorClass.PASSING
            )
        if bucket.load_format != "flattened_bucket":
            raise WeightsRefused(
                f"load_format is {bucket.load_format!r}; this engine accepts only flattened_bucket",
                ErrorClass.PERMANENT,
            )
        self._engine.check_tensors(bucket, complete=False)
        # Otherwise a sender that repeats tensors would fill the memory
        if again := update.tensors.keys() & set(bucket.names):
            raise WeightsRefused(
                f"{min(again)} was already received in this update; call begin_weight_update for a new one",
                ErrorClass.PASSING,
            )
        update.group = bucket.group_name
        self._groups.move_to_end(bucket.group_name)
        try:
            num_bytes = bytes_of(bucket)
            flat = update.spare.pop(0) if update.spare else None
            if flat is None or flat.numel() != num_bytes:
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._engine.weights_device)
            tensors = views(flat, bucket)
            # The group enforces limit_s itself, except for some transports
            async with asyncio.timeout(bucket.limit_s + 1.0):
                await member.broadcast(flat, bucket.limit_s)
        except (TimeoutError, RuntimeError, ValueError) as error:
            await self.leave(bucket.group_name)  # its connections, or the data in transit on them, are broken
            raise WeightsRefused(f"the bucket did not arrive: {_reason(error)}", ErrorClass.PASSING) from error
        if self._update is update:
            update.tensors.update(zip(bucket.names, tensors, strict=True))
            update.flats.append(flat)
            update.version = bucket.weight_version or update.version
            update.digests.append(asyncio.get_running_loop().run_in_executor(None, digest, flat))

    async def end(self, ended: EndWeightUpdate) -> None:
        update, self._update = self._update, None
        if update is None:
            raise WeightsRefused("no weight update is open; call begin_weight_update first", ErrorClass.PASSING)
        digests = await asyncio.gather(*update.digests)
        if ended.xxh3 and list(digests) != ended.xxh3:
            raise WeightsRefused(
                "checksums of the received buckets differ from those of the sent ones", ErrorClass.PASSING
            )
        await self._engine.load_tensors(update.tensors, _parse(update.version))
        self._flats += update.flats

    async def leave(self, group_name: str) -> None:
        member = self._groups.pop(group_name, None)
        if self._update is not None and self._update.group == group_name:
            self._update = None
        if member is not None:
            member.leave()


class BroadcastInServer(ServerSide):
    """The HTTP routes by which a server receives weights over the network."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._begun: BeginWeightUpdate | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/init_weights_update_group", _typed(JoinUpdateGroup, self._join)),
            web.post("/begin_weight_update", _typed(BeginWeightUpdate, self._begin)),
            web.post("/update_weights_from_distributed", _typed(ReceiveWeights, self._receive)),
            web.post("/end_weight_update", _typed(EndWeightUpdate, self._end)),
            web.post("/destroy_weights_update_group", _typed(LeaveUpdateGroup, self._leave)),
        ]

    @property
    def _engines(self) -> WeightReceiver:
        if self._means.receiver is None:
            raise WeightsRefused(
                "this engine takes no weights over the network; use update_weights_from_disk", ErrorClass.PERMANENT
            )
        return self._means.receiver

    async def _join(self, group: JoinUpdateGroup) -> str:
        await self._means.work.run(self._engines.join(group))
        return f"joined {group.group_name}"

    async def _begin(self, update: BeginWeightUpdate) -> str:
        if update.weight_version:
            await self._check(update.weight_version)
        await self._means.work.run(self._engines.begin(update))
        self._begun = update
        return "begun"

    async def _receive(self, bucket: ReceiveWeights) -> str:
        began = self._means.clock.monotonic()
        if bucket.weight_version:  # it replaces the version that the update began with
            await self._check(bucket.weight_version)
        await self._means.work.run(self._take(bucket))
        return f"{len(bucket.names)} tensors received in {self._means.clock.monotonic() - began:.3f} s"

    async def _take(self, bucket: ReceiveWeights) -> None:
        begun = self._begun
        await self._engines.receive(bucket)
        if bucket.weight_version and begun is not None and self._begun is begun:
            self._begun = msgspec.structs.replace(begun, weight_version=bucket.weight_version)

    async def _end(self, ended: EndWeightUpdate) -> str:
        await self._means.work.run(self._load(ended))
        return "loaded"

    async def _load(self, ended: EndWeightUpdate) -> None:
        begun, self._begun = self._begun, None
        await self._engines.end(ended)
        if self._means.verified is not None and begun is not None:
            scored_text = ScoredText(begun.probe_ids, begun.probe_logprobs) if begun.probe_ids else None
            await self._means.verified.verify(_parse(begun.weight_version), scored_text, ",".join(ended.xxh3))
        if begun is not None and begun.weight_version:
            self._means.fence.loaded(_parse(begun.weight_version))

    async def _check(self, weight_version: str) -> None:
        version = _parse(weight_version)
        self._means.fence.check(version)
        await self._means.fence.check_published(version)

    async def _leave(self, left: LeaveUpdateGroup) -> str:
        await self._means.work.run(self._engines.leave(left.group_name))
        return f"left {left.group_name}"


def _typed(
    kind: type[M], handler: Callable[[M], Awaitable[str]]
) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    """Wrap a handler of messages in an endpoint with SGLang's reply format."""
    decode = msgspec.json.Decoder(kind).decode

    async def answer(request: web.Request) -> web.Response:
        message = decode(await request.read() or b"{}")
        try:
            return reply_with(UpdateWeightsReply(success=True, message=await handler(message)))
        except (WeightsRefused, EngineFailed) as error:
            return refuse(error)

    return answer


def _parse(version: str) -> WeightVersion:
    try:
        return WeightVersion.parse(version)
    except ValueError as error:
        raise WeightsRefused(str(error), ErrorClass.PERMANENT) from error


def _reason(error: BaseException) -> str:
    return "it timed out" if isinstance(error, asyncio.TimeoutError) else str(error).split("\n")[0]
