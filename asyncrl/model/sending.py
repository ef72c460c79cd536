"""One broadcast of weights, as WeightSender (broadcast.py) makes it: what is said to each server, and when what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import torch

from asyncrl.protocol.messages import (
    BeginWeightUpdate,
    BroadcastReply,
    BroadcastTarget,
    EndWeightUpdate,
    ReceiveWeights,
    TensorSpecs,
    UpdateWeightsReply,
    WeightVersion,
)
from asyncrl.runtime.clock import Clock
from asyncrl.weights.update_group import Bucket, GroupMember
from asyncrl.weights.versions import Probe

FAILURES = (aiohttp.ClientError, OSError, RuntimeError, ValueError)  # of a step; torch's errors are RuntimeErrors


class SendError(RuntimeError):
    """A server did not do its part of a broadcast."""


@dataclass(frozen=True)
class Held:
    """A version in memory, whole."""

    version: WeightVersion
    buckets: list[Bucket]
    probe: Probe | None = None  # weights.verify_logprobs
    digests: list[asyncio.Future[str]] = field(default_factory=list)  # of the buckets, filled in by the sender

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [named for bucket in self.buckets for named in bucket.tensors()]


class _Info(msgspec.Struct):
    """What of GET /server_info is needed; tp_size is what a bare SGLang server says."""

    num_weight_ranks: int | None = None
    tp_size: int = 1


class ServerClient:
    """Asks generation servers to take part. Every call is bounded by the caller."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def num_ranks(self, target: BroadcastTarget) -> int:
        """How many ranks of a group a server takes."""
        info = msgspec.json.decode(await self._ask(target, "GET", "/server_info", b""), type=_Info)
        return info.tp_size if info.num_weight_ranks is None else info.num_weight_ranks

    async def post(self, target: BroadcastTarget, path: str, message: msgspec.Struct) -> UpdateWeightsReply:
        """Raises SendError where the server does not say that it was done."""
        body = await self._ask(target, "POST", path, msgspec.json.encode(message))
        reply = msgspec.json.decode(body, type=UpdateWeightsReply)
        if not reply.success and not reply.mismatch:
            raise SendError(f"{target.server} answered {path}: {reply.message}")
        return reply

    async def _ask(self, target: BroadcastTarget, method: str, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, target.url + path, data=body, headers=headers) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise SendError(f"{target.server} did not answer {path}: {error!r}") from error
        if response.status not in (200, 400) or not answer.startswith(b"{"):
            text = answer[:200].decode(errors="replace")
            raise SendError(f"{target.server} answered {path} with {response.status}: {text}")
        return answer


class Sending:
    """`stage` says where it is, for whoever reads why it failed."""

    def __init__(
        self, held: Held, targets: Sequence[BroadcastTarget], client: ServerClient, *, deadline: float, clock: Clock
    ) -> None:
        self._held, self._targets, self._client = held, targets, client
        self._deadline, self._clock = deadline, clock
        self.stage = ""

    @property
    def left_s(self) -> float:
        return max(0.001, self._deadline - self._clock.monotonic())

    async def run(self, group: GroupMember, device: torch.device) -> BroadcastReply:
        """Everything from `begin` to `end`, to servers that have joined the group. device: where the group sends from."""
        await self._begin()
        last = len(self._held.buckets) - 1
        for number, bucket in enumerate(self._held.buckets):
            self.stage = f"sending bucket {number + 1} of {last + 1}"
            await self._send(group, bucket, bucket.flat.to(device), is_last=number == last)
        return await self._end()

    async def _begin(self) -> None:
        self.stage = "asking servers whether they take the weights"
        held = self._held
        specs = [bucket.specs for bucket in held.buckets]
        begin = BeginWeightUpdate(
            weight_version=str(held.version),
            specs=TensorSpecs(
                names=[name for spec in specs for name in spec.names],
                dtypes=[dtype for spec in specs for dtype in spec.dtypes],
                shapes=[shape for spec in specs for shape in spec.shapes],
            ),
            probe_ids=held.probe.input_ids if held.probe is not None else [],
            probe_logprobs=held.probe.logprobs if held.probe is not None else [],
        )
        await of_all([self._client.post(target, "/begin_weight_update", begin) for target in self._targets])

    async def _send(self, group: GroupMember, bucket: Bucket, flat: torch.Tensor, *, is_last: bool) -> None:
        """The servers answer when they have received: the broadcast goes on beside the requests. One refusal ends it."""
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
        await of_all([*received, group.broadcast(flat, self.left_s)])

    async def _end(self) -> BroadcastReply:
        """Each server for itself: who has loaded serves, whatever became of the others."""
        self.stage = "waiting for servers to load"
        end = EndWeightUpdate(xxh3=list(await asyncio.gather(*self._held.digests)))
        answers = await asyncio.gather(
            *(self._client.post(target, "/end_weight_update", end) for target in self._targets), return_exceptions=True
        )
        errors: dict[str, str] = {}
        mismatched = []
        for target, answer in zip(self._targets, answers, strict=True):
            if isinstance(answer, FAILURES):
                errors[target.server] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif not answer.success:
                errors[target.server] = answer.message
                mismatched.append(target.server)
        return BroadcastReply(errors=errors, mismatched=mismatched)


async def of_all(steps: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all; the first error is raised at once, and nobody waits for the others."""
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
                task.exception()  # seen
