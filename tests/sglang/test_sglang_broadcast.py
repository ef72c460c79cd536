"""Weights over the network into a real SGLang server: exact versions, no stale prefix, refusals, a sender that disappears."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from asyncrl.config.schema import GenerationConfig, WeightsConfig
from asyncrl.generation.engine import EngineArguments, EngineRequest, Generated, WeightsRefused
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.sglang import SGLangEngine
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_process import AttachedServer
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.broadcast import ServerClient, WeightSender
from asyncrl.model.held_weights import ShareReader
from asyncrl.model.trainer_side import HeldShare
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import BroadcastReply, BroadcastRequest, BroadcastTarget, EndWeightUpdate
from asyncrl.runtime.http_client import open_session
from asyncrl.weights.update_group import GroupMember
from tests.support.buckets import pack
from tests.support.services import make_services
from tests.support.weight_store import V0, V1, V2, V3, WeightStore

LIMIT_S = 120.0  # limit for one wait, on a busy machine
PROMPT = list(range(3, 40))  # spans several pages of the prefix cache
SAMPLING = SamplingParams(max_new_tokens=24, ignore_eos=True)


class Served:
    """An engine with its HTTP server, as the manager sees it."""

    def __init__(self, engine: SGLangEngine | TransformersEngine, name: str) -> None:
        self.engine, self.name = engine, name
        self.first_token = asyncio.Event()
        self.receiver = engine.weight_receiver("127.0.0.1")
        self._http = GenerationHTTP(engine, engine_name=name, settings={}, receiver=self.receiver)

    async def __aenter__(self) -> Served:
        self._listening = self._http.listening("127.0.0.1")
        self.target = BroadcastTarget(server=self.name, url=await self._listening.__aenter__())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listening.__aexit__(None, None, None)

    async def generate(self, rid: str) -> Generated:
        return await asyncio.wait_for(self.engine.submit(EngineRequest(rid, PROMPT, SAMPLING)), LIMIT_S)


@contextlib.asynccontextmanager
async def sglang(url: str, store: WeightStore, config: GenerationConfig) -> AsyncIterator[Served]:
    first_token = asyncio.Event()
    engine = SGLangEngine(
        EngineArguments(str(store.model_path), config, on_tokens=lambda count, version: first_token.set()),
        AttachedServer(url),
    )
    await engine.start()
    try:
        await engine.load_weights(store.path(V0), V0)
        async with Served(engine, "sglang") as served:
            served.first_token = first_token
            yield served
    finally:
        await engine.close()


async def no_other_rank(worker: int) -> str:
    raise AssertionError(f"the share of worker {worker} is wanted")


@contextlib.asynccontextmanager
async def sender(limit_s: float = LIMIT_S) -> AsyncIterator[WeightSender]:
    async with open_session(max_connections=0) as session:
        made = WeightSender(
            ServerClient(session),
            ShareReader(session, no_other_rank, host="127.0.0.1", device=torch.device("cpu"), backend="gloo"),
            name="e/t/a1",
            host="127.0.0.1",
            device=torch.device("cpu"),
            options=WeightsConfig(transport="broadcast", broadcast_timeout_s=limit_s),
            services=make_services(),
        )
        async with made.serving():
            yield made


def held(store: WeightStore, version: WeightVersion) -> HeldShare:
    buckets = pack(((name, tensor, tensor.dtype) for name, tensor in store.tensors(version).items()), 100_000)
    assert len(buckets) > 3
    return HeldShare(version, buckets)


async def send(trainer: WeightSender, version: WeightVersion, *servers: Served, mode: str = "abort") -> BroadcastReply:
    for served in servers:
        await served.engine.pause(mode)
    targets = [served.target for served in servers]
    reply = await trainer.broadcast(BroadcastRequest(weight_version=str(version), targets=targets, limit_s=LIMIT_S))
    if not reply.errors:
        for served in servers:
            assert served.engine.stats().version == str(version)
            await served.engine.resume()
    return reply


async def test_both_engines_get_a_version_in_one_broadcast(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """Two broadcasts through one group. Every token is exactly of its version, and no prefix of the old one remains."""
    embedded = TransformersEngine(EngineArguments(str(store.model_path), GenerationConfig(num_blocks=64)), seed=1)
    await embedded.start()
    try:
        async with sglang(sglang_url, store, sglang_config) as ours, Served(embedded, "embedded") as other:
            await embedded.load_weights(store.path(V0), V0)
            async with sender() as trainer:
                for number, version in enumerate((V1, V2)):
                    await ours.generate(f"warm{number}")  # PROMPT is in the prefix cache, under the old version
                    trainer.hold(held(store, version))
                    assert await send(trainer, version, ours, other) == BroadcastReply()
                    for served in (ours, other):
                        generated = await served.generate(f"{served.name}{number}")
                        assert store.assert_versions_are_exact(PROMPT, generated) == {str(version)}
                assert len(trainer._groups) == 1
    finally:
        await embedded.close()


async def test_a_request_lives_through_a_broadcast(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """With mode retract the request waits, keeps its tokens, and goes on under the new version."""
    async with sglang(sglang_url, store, sglang_config) as ours, sender() as trainer:
        trainer.hold(held(store, V1))  # makes a model, which may take as long as the response
        sampling = SamplingParams(max_new_tokens=800, ignore_eos=True)
        running = ours.engine.submit(EngineRequest("long", PROMPT, sampling))
        await asyncio.wait_for(ours.first_token.wait(), LIMIT_S)
        assert await send(trainer, V1, ours, mode="retract") == BroadcastReply()
        generated = await asyncio.wait_for(running, LIMIT_S)
        assert store.assert_versions_are_exact(PROMPT, generated) == {str(V0), str(V1)}


async def test_without_begin_it_answers_400_and_nothing_is_sent(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig
) -> None:
    """SGLang itself answers 400. asyncrl refuses such a request earlier, without a request to SGLang."""
    client = SGLangClient(sglang_url)
    try:
        body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
        with pytest.raises(ServerError, match="must run between begin_weight_update") as refused:
            await client.call("/update_weights_from_distributed", body, limit_s=10.0)
        assert refused.value.status == 400
    finally:
        await client.close()
    async with sglang(sglang_url, store, sglang_config) as ours, sender() as trainer:
        with pytest.raises(WeightsRefused, match="no weight update is open"):
            await ours.receiver.end(EndWeightUpdate())
        trainer.hold(HeldShare(V1, pack([("other", torch.zeros(3), torch.float32)], 100)))
        assert "other does not belong to this model" in (await send(trainer, V1, ours)).errors["sglang"]
        await ours.engine.resume()
        assert store.assert_versions_are_exact(PROMPT, await ours.generate("sound")) == {str(V0)}


async def test_a_sender_that_goes_away_leaves_a_server_that_loads_from_disk(
    sglang_url: str, store: WeightStore, sglang_config: GenerationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang alone would wait for half an hour. The end of the sender unblocks it. The server then serves nothing until it has
    loaded weights from disk."""
    broadcast, sent = GroupMember.broadcast, []

    async def stop_sending(self: GroupMember, *arguments: Any) -> None:
        if len(sent) == 2:
            await asyncio.Event().wait()
        sent.append(self.name)
        await broadcast(self, *arguments)

    async with sglang(sglang_url, store, sglang_config) as ours, sender(limit_s=10.0) as trainer:
        trainer.hold(held(store, V2))
        with monkeypatch.context() as patch:
            patch.setattr(GroupMember, "broadcast", stop_sending)
            reply = await send(trainer, V2, ours)
        assert "broadcasting bucket 3 of" in reply.errors["sglang"]
        assert ours.engine.stats().version == ""  # the model already holds two new buckets
        await asyncio.wait_for(ours.engine.load_weights(store.path(V2), V2), LIMIT_S)
        await ours.engine.resume()
        assert store.assert_versions_are_exact(PROMPT, await ours.generate("healed")) == {str(V2)}
        trainer._options = dataclasses.replace(
            trainer._options, broadcast_timeout_s=LIMIT_S
        )  # the short timeout is no longer needed
        trainer.hold(held(store, V3))
        assert await send(trainer, V3, ours) == BroadcastReply()
        assert store.assert_versions_are_exact(PROMPT, await ours.generate("again")) == {str(V3)}
