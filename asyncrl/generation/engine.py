"""The small interface between a generation server and the engine that samples.

The server (http.py, worker.py) speaks SGLang's protocol to the rest; an engine turns prompts into tokens with their logprobs.
`transformers.py` is the embedded engine, `sglang.py` the other; what both do with requests is in `queueing.py`. Everything here is
called from the server's event loop.

Life of a request: `submit` checks it and puts it in a bounded queue; it runs when the engine is not paused and has room; its
future resolves once, with everything sampled so far, whether it stopped, was full or was aborted. Every token carries the weight
version that sampled it; what an update does to running requests is the mode of the pause around it (INTERRUPT_MODES).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import INTERRUPT_MODES
from asyncrl.protocol.messages import (
    BeginWeightUpdate,
    EndWeightUpdate,
    FinishReason,
    JoinUpdateGroup,
    ReceiveWeights,
    SamplingParams,
    VersionSpan,
    WeightVersion,
)

__all__ = [
    "INTERRUPT_MODES",
    "EngineFailed",
    "EngineRequest",
    "EngineStats",
    "EngineUnavailable",
    "Generated",
    "GenerationEngine",
    "RequestRefused",
    "WeightReceiver",
    "WeightsRefused",
]


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
    """A prompt and how to continue it. `rid` is the caller's name for it, unique among the requests in flight.

    first: it goes before those that wait. A response that an update has interrupted would else lose its place to them, again with
    each update, and the train step that waits for it would wait for them too.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    first: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """What a request gave. `logprobs[i]` belongs to `token_ids[i]`: after temperature, before top-p and top-k renormalisation.

    `spans` say which version sampled which tokens: in order, without gaps, none empty. More than one where the request lived
    through an update.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    spans: list[VersionSpan]


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and depths now."""

    running: int
    waiting: int
    used_tokens: int  # prompts and responses of the running requests: what they hold of the KV cache
    paused: bool
    version: str
    num_requests: int
    num_aborted: int
    num_tokens: int
    num_prompt_tokens: int
    num_steps: int
    num_updates: int


class WeightReceiver(ABC):
    """How an engine takes part in weights that are sent over the network; model/broadcast.py is the other end.

    Calls come in this order: join, once for a group; for each update begin, receive for each bucket, end; leave. The server is
    paused from before `begin` until after `end`. All raise WeightsRefused; an update that was broken off before `end` may have
    left nothing or some of its tensors in the engine, which then serves nothing until a load succeeds.
    """

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """How many ranks of a group it takes: one for each tensor parallel rank."""

    @abstractmethod
    async def join(self, group: JoinUpdateGroup) -> None:
        """Meet the other members."""

    @abstractmethod
    async def begin(self, update: BeginWeightUpdate) -> None:
        """An update is to come. What is known to be impossible is refused here, before anything is sent."""

    @abstractmethod
    async def receive(self, bucket: ReceiveWeights) -> None:
        """Returns when the bucket is here. Refused without `begin`, and then nothing must be sent."""

    @abstractmethod
    async def end(self, update: EndWeightUpdate) -> None:
        """Everything has come: the engine serves the version. Flushes the prefix cache."""

    @abstractmethod
    async def leave(self, group_name: str) -> None:
        """The group is no more; an update of it that is under way is broken off. Nothing happens where there is no such group."""


class GenerationEngine(ABC):
    """What a generation server needs of an engine."""

    @abstractmethod
    async def start(self) -> None:
        """Load what is needed to run. The engine has no weight version yet and refuses to generate."""

    def progress(self) -> str:
        """How far `start` has come, to be shown behind what is waited for."""
        return ""

    @abstractmethod
    def submit(self, request: EngineRequest) -> asyncio.Future[Generated]:
        """Queue a request. Raises RequestRefused or EngineUnavailable at once. Cancelling the future aborts the request."""

    @abstractmethod
    async def abort(self, rid: str) -> bool:
        """End one request; its future resolves with what it has. False where no such request is in flight."""

    @abstractmethod
    async def abort_all(self) -> int:
        """End every request, running or waiting; each future resolves with what it has. Returns how many."""

    @property
    @abstractmethod
    def pause_modes(self) -> tuple[str, ...]:
        """Those of INTERRUPT_MODES that `pause` takes."""

    @abstractmethod
    async def pause(self, mode: str = "abort") -> int:
        """Stop generating; new requests wait. Returns how many requests were running. What becomes of them is the mode:

        abort: they end, with what they have. retract: they wait and go on after `resume`, their KV cache computed anew.
        wait: returns when they have finished. in_place: they go on after `resume` with the KV cache that they have.
        Raises RequestRefused for another mode.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Undo `pause`: waiting requests run."""

    @abstractmethod
    async def verify_ahead(self, path: Path, version: WeightVersion) -> None:
        """Check the files of a version while requests run, so that load_weights need not read them for it.

        Raises WeightsRefused. An engine may leave the check to load_weights.
        """

    @abstractmethod
    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """Verify a version directory and load it in place; returns how many requests it ended. Flushes the prefix cache.

        Requests that run are aborted if told so, else waited for; those that an in-place pause stopped stay as they are.
        Raises WeightsRefused, and then nothing has changed.
        """

    @abstractmethod
    async def score(self, input_ids: list[int]) -> list[float]:
        """Logprob of each token given those before it, at temperature 1, under the weights that are loaded; 0 for the first.

        Also while paused, which no waiting request may take for the end of the pause. No cached prefix is used or made.
        """

    @abstractmethod
    def forget_version(self) -> None:
        """What is loaded is not what it should be: generate nothing, and echo no version, until a load succeeds."""

    def weight_receiver(self, host: str) -> WeightReceiver | None:
        """What receives weights over the network, on sockets of this host. None: this engine loads from disk only."""
        return None

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
