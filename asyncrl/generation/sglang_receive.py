"""Weights over the network into an SGLang server: each step is passed on, its schedulers are the ranks.

SGLang loads each bucket as it comes, so from the first one until the last has been confirmed nobody knows what it holds: the
engine has no version meanwhile, and generates nothing. One that hangs in a group can only be killed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from asyncrl.generation.engine import WeightReceiver, WeightsRefused
from asyncrl.generation.sglang_http import SGLangClient, SGLangError
from asyncrl.protocol.messages import (
    BeginWeightUpdate,
    EndWeightUpdate,
    JoinUpdateGroup,
    ReceiveWeights,
    TensorSpecs,
    WeightVersion,
)

_ASK_LIMIT_S = 10.0
_LOAD_LIMIT_S = 60.0
_HANG_SLACK_S = 5.0  # a group that has failed at the sender fails here, too, a moment later
_FLUSH_TRIES = 20
_FLUSH_PAUSE_S = 0.05


class NetworkUpdated(Protocol):
    """The engine whose SGLang server receives."""

    def check_tensors(self, specs: TensorSpecs, *, complete: bool) -> None:
        """Raises WeightsRefused where these tensors do not fit the model."""

    def check_network_update(self, version: WeightVersion) -> bool:
        """Raises WeightsRefused unless it may come now. True where prefixes must be flushed after it."""

    def network_updated(self, version: WeightVersion) -> None:
        """SGLang has loaded this version."""

    def forget_version(self) -> None: ...

    def fail(self, why: str) -> None:
        """Nothing brings SGLang back."""


class SGLangReceiver(WeightReceiver):
    """See the module's docstring."""

    def __init__(self, client: SGLangClient, engine: NetworkUpdated, *, num_ranks: int) -> None:
        self._client, self._engine, self._num_ranks = client, engine, num_ranks
        self._version: WeightVersion | None = None  # of the update that is open
        self._flush = True

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    async def join(self, group: JoinUpdateGroup) -> None:
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.group_name,
            "backend": group.backend,
        }
        await self._call("/init_weights_update_group", body, group.limit_s)

    async def begin(self, update: BeginWeightUpdate) -> None:
        try:
            version = WeightVersion.parse(update.weight_version)
        except ValueError as error:
            raise WeightsRefused(str(error)) from error
        if update.specs.names:
            self._engine.check_tensors(update.specs, complete=True)
        self._flush = self._engine.check_network_update(version)
        await self.abandon()
        await self._call("/begin_weight_update", {}, _ASK_LIMIT_S)
        self._version = version

    async def receive(self, bucket: ReceiveWeights) -> None:
        if self._version is None:
            raise WeightsRefused("update_weights_from_distributed must come between begin_ and end_weight_update")
        self._engine.check_tensors(bucket, complete=False)
        self._engine.forget_version()
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": bucket.group_name,
            "load_format": bucket.load_format,
            # SGLang calls an update failed whose flush comes a moment too early, and keeps its old label: flushed in `end`
            "flush_cache": False,
        }
        if bucket.weight_version is not None:
            body["weight_version"] = bucket.weight_version
        await self._call("/update_weights_from_distributed", body, bucket.limit_s)

    async def end(self, update: EndWeightUpdate) -> None:
        version, self._version = self._version, None
        if version is None:
            raise WeightsRefused("no weight update is open; call begin_weight_update first")
        await self._call("/end_weight_update", {}, _LOAD_LIMIT_S)
        if self._flush:
            await self._flush_prefixes()
        try:
            served = (await self._client.info(limit_s=_ASK_LIMIT_S)).weight_version
        except SGLangError as error:
            raise WeightsRefused(str(error)) from error
        if served != str(version):
            raise WeightsRefused(f"SGLang received {version} and says that it serves {served!r}")
        self._engine.network_updated(version)

    async def leave(self, group_name: str) -> None:
        await self.abandon()
        await self._call("/destroy_weights_update_group", {"group_name": group_name}, _ASK_LIMIT_S)

    async def abandon(self) -> None:
        """Close an update that was left open; what it brought is overwritten by the next load."""
        if self._version is not None:
            self._version = None
            await self._call("/end_weight_update", {}, _LOAD_LIMIT_S)

    async def _flush_prefixes(self) -> None:
        """Requests that have ended may be in SGLang's books a moment longer."""
        try:
            for _ in range(_FLUSH_TRIES):
                if await self._client.flush_cache(limit_s=_ASK_LIMIT_S):
                    return
                await asyncio.sleep(_FLUSH_PAUSE_S)
        except SGLangError as error:
            raise WeightsRefused(str(error)) from error
        raise WeightsRefused("SGLang did not flush its prefix cache after the update: it says that requests run")

    async def _call(self, path: str, body: dict[str, Any], limit_s: float) -> None:
        """A refusal is one; no answer means that its scheduler hangs in a group, or that it has died."""
        try:
            await self._client.call(path, body, limit_s=limit_s + _HANG_SLACK_S)
        except SGLangError as error:
            if error.status == 0:
                self._engine.fail(f"SGLang did not answer {path}: {error}")
            raise WeightsRefused(f"SGLang: {error}") from error
