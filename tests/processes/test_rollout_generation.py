"""The rollout client and a real generation server, with a weight update in the middle of the responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import SamplingConfig
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Episode, build_sample
from asyncrl.rollout.client import PartialRolloutManager, Route
from tests.processes.served_engine import V1, NoOtherServer, forward_logprobs, serve
from tests.support.services import make_services

LIMIT_S = 60.0
PASSES = 12  # of the engine before the update; every running response is in its first piece then, and few have ended


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set after PASSES passes. The engine then blocks until it is asked to pause. Therefore the update comes in
    the middle of a piece, however slow the client is."""
    reached, paused = threading.Event(), threading.Event()
    count_pass, pause = TransformersEngine._count_pass, TransformersEngine.pause

    def count_and_wait(engine: TransformersEngine, num_new_tokens: Mapping[WeightVersion | None, int]) -> None:
        count_pass(engine, num_new_tokens)
        if engine._checked and engine._num["steps"] >= PASSES:  # the self-check at the start has passes of its own
            reached.set()
            assert paused.wait(LIMIT_S)

    async def pause_and_tell(engine: TransformersEngine, mode: str = "abort") -> int:
        paused.set()
        return await pause(engine, mode)

    monkeypatch.setattr(TransformersEngine, "_count_pass", count_and_wait)
    monkeypatch.setattr(TransformersEngine, "pause", pause_and_tell)
    return reached


async def test_an_update_in_mid_sequence_keeps_tokens_logprobs_and_versions(
    tmp_path: Path, reached: threading.Event
) -> None:
    client = PartialRolloutManager(
        NoOtherServer(),
        make_services(),
        new_tokens_per_chunk=64,
        request_timeout_s=60.0,
        turn_limit_s=60.0,
        max_requests=32,
    )
    prompt = [5, 6, 7, 8]
    sampling = SamplingConfig(max_new_tokens=300, temperature=1.3)
    async with serve(tmp_path) as served:
        try:
            generating = asyncio.ensure_future(client.generate(Route(served.ticket()), [prompt] * 16, sampling, []))
            assert await asyncio.to_thread(reached.wait, LIMIT_S)
            await served.update_in_a_pause(V1)
            responses = await generating
        finally:
            await client.close()

    episodes = [Episode(prompt) for _ in responses]
    for episode, response in zip(episodes, responses, strict=True):
        episode.add_response(response)
    sample = build_sample("t0", episodes)
    mixed = sample.data["version_start"] != sample.data["version_end"]
    assert mixed.any()
    assert client.counts.interrupted >= mixed.sum()
    for ids, logprobs, versions in zip(
        sample.slices()[0], sample.slices("packed_logprobs")[0], sample.slices("versions")[0], strict=True
    ):
        assert set(versions[: len(prompt)].tolist()) == {-1}
        for version, model in served.models.items():
            mine = versions == version.pack()
            expected = forward_logprobs(model, ids, temperature=sampling.temperature)
            np.testing.assert_allclose(logprobs[mine], expected[mine], atol=1e-4)
