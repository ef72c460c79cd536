"""The interface between a generation server and the engine that samples.

The server (http.py, worker.py) speaks SGLang's protocol to other processes; an engine turns prompts into tokens with their
logprobs. `transformers.py` is the embedded engine, `sglang.py` drives a SGLang server; `queueing.py` has the request queue of both.
All methods are called from the server's event loop.

Life of a request: `submit` checks it and puts it in a bounded queue. It runs when the engine is not paused and has room. Its
future resolves once: with all tokens sampled so far, if the response stopped, reached its length or was aborted; otherwise with an
error. Every token carries the weight version that sampled it. The mode of the pause around an update (INTERRUPT_MODES) decides how
the update treats running requests.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import INTERRUPT_MODES
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.generation import FinishReason, SamplingParams, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import BeginWeightUpdate, EndWeightUpdate, JoinUpdateGroup, ReceiveWeights

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
    """The request itself is wrong (HTTP 400). The message names the error and the allowed values."""


class WeightsRefused(ValueError):
    """These weights cannot be loaded (HTTP 400). The engine keeps its version, unless its weights may have changed."""

    def __init__(self, text: str, error_class: ErrorClass) -> None:
        """error_class: permanent if the engine refuses this version however often it is sent; passing if the same version may be
        accepted later, for example after another call."""
        super().__init__(text)
        self.error_class = error_class


class EngineUnavailable(RuntimeError):
    """The engine cannot serve the request now: queue full, no weights yet, waited too long, closing (HTTP 503)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFailed(RuntimeError):
    """The engine failed while it ran this request (HTTP 500)."""


@dataclass(frozen=True)
class EngineRequest:
    """A prompt and its sampling parameters. `rid` is chosen by the caller and unique among the requests in flight.

    first: the request goes to the front of the queue. Set for a response that has already begun: otherwise each update that
    interrupts it would put it behind the waiting requests again, and the train step that needs it would wait longer.
    is_check: a request of the logprob check. A full queue does not refuse it.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    first: bool = False
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a request. `logprobs[i]` belongs to `token_ids[i]`: after temperature, before top-p and top-k renormalisation.

    `spans` says which version sampled which tokens: in order, without gaps, none empty. A response that has tokens from before and
    after an update has more than one.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    spans: list[VersionSpan]


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and current queue depths."""

    running: int
    waiting: int
    used_tokens: int  # KV cache use: prompts and responses of the running requests
    paused: bool
    version: str
    num_requests: int
    num_aborted: int
    num_tokens: int
    num_prompt_tokens: int
    num_steps: int
    num_updates: int


class WeightReceiver(ABC):
    """An engine's receiver of weights that are sent over the network; model/broadcast.py is the sender.

    Order of calls: `join` once per group; for each update `begin`, `receive` for each bucket, `end`; then `leave`. A bucket is a
    part of the model's tensors that is sent at once. The server is paused from before `begin` until after `end`. Each call may
    raise WeightsRefused. An update that stops before `end` may have changed some tensors of the engine; if it has, the engine
    serves nothing until a load succeeds.
    """

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """The number of ranks that the engine takes in a group: one for each tensor parallel rank."""

    @abstractmethod
    async def join(self, group: JoinUpdateGroup) -> None:
        """Join the group; returns when the process group with its other members is formed."""

    @abstractmethod
    async def begin(self, update: BeginWeightUpdate) -> None:
        """Prepare for an update. An update that cannot succeed is refused here, before any data is sent."""

    @abstractmethod
    async def receive(self, bucket: ReceiveWeights) -> None:
        """Receive a bucket; returns when it has arrived. A bucket without `begin` is refused; the sender must then not send it."""

    @abstractmethod
    async def end(self, update: EndWeightUpdate) -> None:
        """Finish the update after all buckets have arrived; on return the engine serves the version. Flushes the prefix cache,
        except during a pause in place."""

    @abstractmethod
    async def leave(self, group_name: str) -> None:
        """Leave the group and abandon its open update, if any. Without such a group this does nothing."""


class GenerationEngine(ABC):
    """The engine of a generation server."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model or start the server. Afterwards the engine has no weight version yet and refuses to generate."""

    def progress(self) -> str:
        """How far `start` has come, for a status line."""
        return ""

    @abstractmethod
    def submit(self, request: EngineRequest) -> asyncio.Future[Generated]:
        """Queue a request. Raises RequestRefused or EngineUnavailable at once. Cancelling the future aborts the request."""

    @abstractmethod
    async def abort(self, rid: str) -> bool:
        """End one request; its future resolves with the tokens so far.

        Returns False if no such request is in flight, or if it finished before the abort.
        """

    @abstractmethod
    async def abort_all(self) -> int:
        """End every request, running or waiting; each future resolves with the tokens so far. Returns their number."""

    @property
    @abstractmethod
    def pause_modes(self) -> tuple[str, ...]:
        """The subset of INTERRUPT_MODES that `pause` accepts."""

    @abstractmethod
    async def pause(self, mode: str = "abort") -> int:
        """Stop generating; new requests wait. Returns how many requests were running. The mode decides what happens to them:

        abort: they end with the tokens so far. retract: they wait and continue after `resume`; their KV cache is recomputed.
        wait: they finish, and `pause` returns after that. in_place: they continue after `resume` with their existing KV cache.
        Raises RequestRefused for another mode, and with wait WeightsRefused if they do not finish within load_timeout_s.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Undo `pause`: waiting requests run."""

    @abstractmethod
    async def sleep(self) -> None:
        """Interrupt all running requests, then release the devices: weights and KV cache.

        Until `wake` the engine has no version and refuses to generate. Does nothing if the engine sleeps already.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Take the devices again. The engine stays paused and has no version. Does nothing if the engine is awake."""

    @abstractmethod
    async def verify_ahead(self, path: Path, version: WeightVersion) -> None:
        """Check the files of a version while requests run, so that load_weights need not read them for the check.

        Raises WeightsRefused. An engine may leave the check to load_weights.
        """

    @abstractmethod
    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """Verify a version directory and load it in place; returns how many requests it ended.

        With abort_running, all running requests are aborted. Otherwise the load waits until they have ended; it neither waits for
        nor ends requests that a pause in place has stopped. Flushes the prefix cache, except during a pause in place. Raises
        WeightsRefused; in that case weights and version have not changed.
        """

    @abstractmethod
    async def score(self, input_ids: list[int]) -> list[float]:
        """Logprob of each token given those before it, at temperature 1, under the loaded weights; 0 for the first.

        Works while the engine is paused (a SGLang server that is paused in place raises EngineUnavailable), and no waiting request
        starts because of it. Uses no cached prefixes. Leaves none behind either, except on SGLang while requests run.
        """

    @property
    def scores_before_resume(self) -> bool:
        """Whether `score` is asked before requests run again after a load, because they would change the last bits of its result.
        Other engines score as exactly while requests run."""
        return False

    @abstractmethod
    def forget_version(self) -> None:
        """Drop the version because the loaded weights are wrong: generate nothing and report no version until a load succeeds."""

    def weight_receiver(self, host: str) -> WeightReceiver | None:
        """The receiver of weights over the network. host: address of its sockets. None: this engine loads from disk only."""
        return None

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Drop all cached prefixes. While requests run this does nothing and returns False."""

    @abstractmethod
    def expire_waiting(self) -> int:
        """End requests that have waited longer than max_wait_s; returns their number. Call it about once a second.

        Their futures get EngineUnavailable, or, for a retracted request, the tokens that it has.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Current queue depths and counters."""

    @property
    @abstractmethod
    def model_path(self) -> str:
        """Directory of the weights last loaded from disk. Before the first such load: the model directory of the config."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None. Only a restart of the server recovers from it."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine. Requests in flight fail with EngineUnavailable."""
