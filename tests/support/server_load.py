"""Requests and answers for tests of engines that drive a server: counted tokens, and responses resumed after each interruption."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import numpy as np

from asyncrl.generation.engine import EngineRequest, Generated, GenerationEngine
from asyncrl.protocol.generation import SamplingParams, VersionSpan
from tests.support.weight_store import EXACT

LIMIT_S = 120.0  # limit for one wait, on a busy machine


class Counter:
    """Counts tokens as they arrive. A test can wait for a number of them."""

    def __init__(self) -> None:
        self.count, self.by_version = 0, dict[str, int]()
        self._more = asyncio.Event()

    def __call__(self, tokens: int, version: str) -> None:
        self.count += tokens
        self.by_version[version] = self.by_version.get(version, 0) + tokens
        self._more.set()

    async def reaches(self, count: int) -> None:
        async def wait() -> None:
            while self.count < count:
                self._more.clear()
                await self._more.wait()

        await asyncio.wait_for(wait(), LIMIT_S)


def make_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, 64) for _ in range(length)]


def joined(pieces: list[Generated]) -> Generated:
    """Join the pieces of a response as a client does."""
    tokens, logprobs, spans = list[int](), list[float](), list[VersionSpan]()
    for piece in pieces:
        offset = len(tokens)
        tokens, logprobs = tokens + piece.token_ids, logprobs + piece.logprobs
        spans += [VersionSpan(version=s.version, start=offset + s.start, end=offset + s.end) for s in piece.spans]
    return Generated(tokens, logprobs, pieces[-1].finish, spans)


async def respond(engine: GenerationEngine[Any], rid: str, prompt: list[int], params: SamplingParams) -> Generated:
    """A whole response. It is resumed with its prefix after each interruption."""
    pieces: list[Generated] = []
    while not pieces or pieces[-1].finish.type == "abort":
        has = [token for piece in pieces for token in piece.token_ids]
        wanted = msgspec.structs.replace(params, max_new_tokens=params.max_new_tokens - len(has))
        pieces.append(await engine.submit(EngineRequest(f"{rid}.{len(pieces)}", prompt + has, wanted)))
    return joined(pieces)


def close_to(found: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(found, expected, atol=EXACT, rtol=0)


async def within(awaitable: Any, limit_s: float = LIMIT_S) -> Any:
    return await asyncio.wait_for(awaitable, limit_s)
