"""The rollout client against a real generation server, with a weight update in the middle of its responses."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
from served_engine import V1, NoOtherServer, forward_logprobs, serve

from asyncrl.config import NameResolveConfig, RuntimeConfig, SamplingConfig, WorkerInfo
from asyncrl.groups.trajectory import Episode, build_sample
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.runtime.worker import StatusBoard

LOGGER = logging.getLogger("test_rollout_generation")


async def test_an_update_in_mid_sequence_keeps_tokens_logprobs_and_versions(tmp_path: Path) -> None:
    info = WorkerInfo("rollout_worker", 0, 1, "e", "t", 1, "", 1, NameResolveConfig(backend="memory"), RuntimeConfig())
    client = PartialRolloutManager(
        NoOtherServer(),
        board=StatusBoard(info, LOGGER),
        logger=LOGGER,
        new_tokens_per_chunk=64,
        request_timeout_s=60.0,
        max_requests=32,
    )
    prompt = [5, 6, 7, 8]
    sampling = SamplingConfig(max_new_tokens=300, temperature=1.3)
    async with serve(tmp_path) as served:
        await client.start()
        try:
            generating = asyncio.ensure_future(client.generate(Route(served.ticket()), [prompt] * 16, sampling, []))
            while not client.counts.tokens and not generating.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
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
