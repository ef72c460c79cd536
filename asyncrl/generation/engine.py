"""The small interface between a generation server and the engine that samples.

The server (http.py, worker.py) speaks SGLang's protocol to the rest; an engine turns prompts into tokens with their logprobs.
`transformers.py` is the embedded engine. Everything here is called from the server's event loop.

Life of a request: `submit` checks it and puts it in a bounded queue; it runs when the engine is not paused and has room; its
future resolves once, with everything sampled so far, whether it stopped, was full or was aborted. A request runs under exactly
one weight version: an update only happens while nothing runs.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from asyncrl.messages import FinishReason, SamplingParams, WeightVersion


class RequestRefused(ValueError):
    """The request itself is wrong (HTTP 400). The message says what and what is allowed."""


class WeightsRefused(ValueError):
    """These weights cannot be loaded (HTTP 400). What was served before stays."""


class EngineUnavailable(RuntimeError):
    """Not now: queue full, no weights yet, waited too long, closing (HTTP 503)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFailed(RuntimeError):
    """The engine broke while it ran this request (HTTP 500)."""


@dataclass(frozen=True)
class EngineRequest:
    """A prompt and how to continue it. `rid` is the caller's name for it, unique among the requests in flight."""

    rid: str
    input_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Generated:
    """What a request gave. `logprobs[i]` belongs to `token_ids[i]`: after temperature, before top-p and top-k renormalisation.

    All tokens were sampled by `version`, "" only where there are none because the request never ran.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    version: str


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and depths now."""

    running: int
    waiting: int
    paused: bool
    version: str
    num_requests: int
    num_aborted: int
    num_tokens: int
    num_prompt_tokens: int
    num_steps: int
    num_updates: int


class GenerationEngine(ABC):
    """What a generation server needs of an engine."""

    @abstractmethod
    async def start(self) -> None:
        """Load what is needed to run. The engine has no weight version yet and refuses to generate."""

    @abstractmethod
    def submit(self, request: EngineRequest) -> asyncio.Future[Generated]:
        """Queue a request. Raises RequestRefused or EngineUnavailable at once. Cancelling the future aborts the request."""

    @abstractmethod
    async def abort(self, rid: str) -> bool:
        """End one request; its future resolves with what it has. False where no such request is in flight."""

    @abstractmethod
    async def abort_all(self) -> int:
        """End every request, running or waiting; each future resolves with what it has. Returns how many."""

    @abstractmethod
    async def pause(self) -> int:
        """Stop generating: running requests end as aborted with what they have, later ones wait. Returns how many ended."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`: waiting requests run."""

    @abstractmethod
    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """Verify a version directory and load it in place; returns how many requests it ended. Flushes the prefix cache.

        Requests that run are aborted if told so, else waited for. Raises WeightsRefused, and then nothing has changed.
        """

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Forget all cached prefixes. False (and nothing is done) while requests run."""

    @abstractmethod
    def expire_waiting(self) -> int:
        """Answer requests that have waited longer than allowed with EngineUnavailable; call it about once a second."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Depths and counters."""

    @property
    @abstractmethod
    def model_path(self) -> str:
        """Directory of the weights served (before the first update: of the model's configuration)."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """Why the engine is dead, if it is. Nothing brings it back but a restart of the server."""

    @abstractmethod
    async def close(self) -> None:
        """Stop. What is in flight is failed with EngineUnavailable."""
