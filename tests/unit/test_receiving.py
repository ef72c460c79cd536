"""The HTTP routes that receive weights over the network: which version is verified and recorded when an update ends."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from asyncrl.generation.checks import TensorSpec, VerifiedLoads, VersionFence, check_sent, check_tensors
from asyncrl.generation.engine import WeightReceiver, WeightsRefused
from asyncrl.generation.receive import BroadcastInServer
from asyncrl.generation.server_side import Means, UnbrokenWork
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import (
    BeginWeightUpdate,
    EndWeightUpdate,
    JoinUpdateGroup,
    ReceiveWeights,
    TensorSpecs,
)
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.weights.versions import ScoredText

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)
TEXT = ScoredText([7, 8], [-1.0])


class Receiver(WeightReceiver):
    """Accepts every call."""

    num_ranks = 1

    async def join(self, group: JoinUpdateGroup) -> None: ...

    async def begin(self, update: BeginWeightUpdate) -> None: ...

    async def receive(self, bucket: ReceiveWeights) -> None: ...

    async def end(self, update: EndWeightUpdate) -> None: ...

    async def leave(self, group_name: str) -> None: ...


class Verified:
    """Records which versions are verified."""

    def __init__(self) -> None:
        self.versions: list[WeightVersion] = []

    def require_pause(self) -> None: ...

    async def verify(self, version: WeightVersion, scored_text: ScoredText | None, fingerprint: str) -> None:
        assert scored_text == TEXT
        self.versions.append(version)


class Fence(VersionFence):
    """Records which versions were loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[WeightVersion] = []

    def loaded(self, version: WeightVersion) -> None:
        super().loaded(version)
        self.versions.append(version)


class Request:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


async def post(http: BroadcastInServer, path: str, message: Any) -> int:
    handler = cast(Any, next(route.handler for route in http.routes() if route.path == path))
    response: web.Response = await handler(Request(msgspec.json.encode(message)))
    return response.status


async def versions_of_update(begun: str, *buckets: str | None) -> tuple[list[WeightVersion], list[WeightVersion]]:
    """Receive one update. Returns the versions that were verified, and those that were recorded as loaded."""
    verified, fence = Verified(), Fence()
    means = Means(
        cast(Any, None),
        fence,
        UnbrokenWork(),
        SYSTEM_CLOCK,
        verified=cast(VerifiedLoads, verified),
        receiver=Receiver(),
    )
    http = BroadcastInServer(means)
    begin = BeginWeightUpdate(weight_version=begun, probe_ids=TEXT.input_ids, probe_logprobs=TEXT.logprobs)
    assert await post(http, "/begin_weight_update", begin) == 200
    for bucket in buckets:
        assert await post(http, "/update_weights_from_distributed", ReceiveWeights(weight_version=bucket)) == 200
    assert await post(http, "/end_weight_update", EndWeightUpdate()) == 200
    return verified.versions, fence.versions


async def test_the_version_of_begin_is_verified_and_recorded() -> None:
    assert await versions_of_update(str(V1), None, str(V1)) == ([V1], [V1])


async def test_a_version_that_a_bucket_names_replaces_that_of_begin() -> None:
    assert await versions_of_update(str(V1), None, str(V2)) == ([V2], [V2])
    assert await versions_of_update("", str(V2), None) == ([V2], [V2])


def test_tensors_without_a_file_are_refused_with_a_message_that_names_none() -> None:
    expected, aliases = {"a": TensorSpec((2,))}, [["a"]]
    twice = TensorSpecs(names=["a", "a"], dtypes=["float32", "float32"], shapes=[[2], [2]])
    with pytest.raises(
        WeightsRefused, match=r"^the tensors in the sent weights do not fit the model: a was sent twice$"
    ):
        check_sent(expected, aliases, twice, complete=True)
    with pytest.raises(
        WeightsRefused, match=r"^the tensors in a version without whole tensors do not fit the model: a is missing$"
    ):
        check_tensors(expected, aliases, [])
