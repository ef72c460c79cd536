"""The embedded engine's half of a model's self-check: decoded tokens have the logprobs of a forward pass over the whole text.

Decoding reads the cache, row by row, in a batch with other requests. The forward pass (TransformersEngine.score) reads no cache and
sees one text. A window, a position, a page or a neighbour that decoding treats differently shows as a difference.

consumes: an engine that has started and serves nothing yet.  produces: nothing; it raises SelfCheckError.
waits for: its own requests, within the caller's limit.  unblocked by: the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from asyncrl.architectures.agreement import Difference, SelfCheckError, bound_of
from asyncrl.architectures.small_copy import save_small_copy
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import EngineRequest, Generated, GenerationEngine
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.unix_sockets import folder_of_run

_NEW_TOKENS = 6  # of each request
_SMALL_PAGE = 8  # tokens; of the engine for a small copy


def prompt_lengths(page_size: int, max_length: int) -> list[int]:
    """Lengths of prompts: decoding crosses the end of the first page behind the first prompt, the second prompt is longer than a
    page, and the third one is short."""
    room = max_length - _NEW_TOKENS
    return [max(1, min(length, room)) for length in (page_size - 3, page_size + 5, 3)]


async def check_decoding(
    engine: GenerationEngine[Any],
    noise_of: Callable[[list[int]], Awaitable[float]],
    *,
    vocab_size: int,
    lengths: Sequence[int],
    bits: int,
    sharing: bool,
    versions: Sequence[WeightVersion | None],
) -> None:
    """Sample behind prompts of these lengths, all at once, under these versions in turn; None: under the only one. With `sharing`,
    sample once more under each behind the longest, whose first pages are in the cache then, of one version.

    noise_of: measures the model's own rounding on a text. bits: width of the engine's floating-point numbers. Raises
    SelfCheckError.
    """
    rng = np.random.default_rng(vocab_size)
    prompts = [rng.integers(vocab_size, size=length).tolist() for length in lengths]
    under = [versions[index % len(versions)] for index in range(len(prompts))]
    responses = await asyncio.gather(
        *(
            _sample(engine, index, prompt, version)
            for index, (prompt, version) in enumerate(zip(prompts, under, strict=True))
        )
    )
    for version in versions if sharing else ():
        prompts.append(max(prompts, key=len))
        under.append(version)
        responses.append(await _sample(engine, len(responses), prompts[-1], version))
    texts = [prompt + response.token_ids for prompt, response in zip(prompts, responses, strict=True)]
    decoded = [np.array(response.logprobs, np.float32) for response in responses]
    scores = [
        np.array(await engine.score(text, version), np.float32)[-_NEW_TOKENS:]
        for text, version in zip(texts, under, strict=True)
    ]
    worst, bound = Difference.between(decoded, scores), bound_of(bits)
    if worst.nats > bound:
        bound = bound_of(bits, max([await noise_of(text) for text in texts]))
    if worst.nats > bound:
        raise SelfCheckError(
            f"token {worst.token + 1} behind a prompt of {len(prompts[worst.text])} tokens was decoded with another logprob than a "
            f"forward pass over the whole text gives: they differ by {worst.nats:.3g} nats (bound: {bound:.0e})"
        )
    if len(versions) > 1:
        of_each = [[np.array(await engine.score(text, version), np.float32) for text in texts] for version in versions]
        if any(Difference.between(of_each[0], other).nats <= bound for other in of_each[1:]):
            raise SelfCheckError("adapters do not change its logprobs, so versions cannot be told apart")


def small_engine_config(config: GenerationConfig) -> GenerationConfig:
    """The config of an engine for a small copy: the same choices, in float32 and with small sizes."""
    return replace(
        config,
        dtype="float32",
        page_size=_SMALL_PAGE,
        num_blocks=64,
        max_batch_tokens=64,
        max_running_requests=8,
        load_timeout_s=120.0,
    )


async def check_small_copy(
    config: PreTrainedConfig, settings: GenerationConfig, make: Callable[[str, GenerationConfig], GenerationEngine[Any]]
) -> None:
    """Start an engine on a small copy of the architecture, which checks itself at its start beyond the ends of its windows.

    make: makes an engine for a model's folder. Raises ConfigError.
    """
    with TemporaryDirectory(prefix="asyncrl-self-check-", dir=folder_of_run()) as folder:
        await asyncio.to_thread(save_small_copy, config, Path(folder))
        engine = make(folder, small_engine_config(settings))
        try:
            await engine.start()
        finally:
            await engine.close()


async def _sample(
    engine: GenerationEngine[Any], index: int, prompt: list[int], version: WeightVersion | None
) -> Generated:
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=1.0, ignore_eos=True)
    return await engine.submit(EngineRequest(f"self-check-{index}", prompt, params, version=version))
