"""A generation engine that computes nothing: it emits tokens at a fixed rate in each of a fixed number of slots.

It serves benchmarks and tests of everything around generation. It uses the queue of all engines (generation/engine.py), and
implements everything that other processes rely on: verification of weight versions by their manifest, all pause modes, resuming
of prefixes, and the version of every token.
The length of a response depends only on its prompt (`LongTail`), however often it is interrupted and on whichever server it
resumes. Prefill of a prompt or prefix takes no time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import (
    EngineArguments,
    EngineRequest,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    Pending,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.protocol.errors import classify
from asyncrl.protocol.generation import FinishReason
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import verify_version

EOS, FILLER = 0, 1  # token ids: the last token of a response, and all others
_LOGPROB = -1.0
_LOWEST, _HIGHEST = 5, 300  # range of the starting numbers of the long-tail task


@dataclass(frozen=True)
class LongTail:
    """Response lengths of the long-tail task (examples/long_tail), drawn by a seeded hash: mean 24, median 10, some over 100.

    A prompt's last token identifies the member of its group. The other tokens draw a length; each member's length is 0.5 to 1.5
    times that.
    """

    seed: int
    prompt_tokens: int  # tokens of a prompt, including the member's token

    def length(self, input_ids: Sequence[int]) -> int:
        """Tokens of the whole response, including EOS. input_ids: the prompt, and perhaps a part of the response."""
        prompt = np.asarray(input_ids[: self.prompt_tokens], np.int64)
        start = math.exp(math.log(_LOWEST) + self._uniform(prompt[:-1]) * math.log((_HIGHEST + 1) / _LOWEST))
        return max(1, round(_descent_tokens(int(start)) * (0.5 + self._uniform(prompt))))

    def _uniform(self, ids: np.ndarray) -> float:
        return xxhash.xxh3_64_intdigest(ids.tobytes(), self.seed) / 2**64


@cache
def _descent_tokens(start: int) -> int:
    """Characters of `270;261;...;9;0` for 280 (each number minus its digit sum gives the next), plus EOS."""
    count = 0
    while start > 0:
        start -= sum(map(int, str(start)))
        count += len(str(start)) + 1
    return count


@dataclass(eq=False, slots=True)
class _Paced(Pending):
    """A request in flight. While it runs, it had `done` tokens at time `begun`, and gets another every 1 / tokens_per_s seconds."""

    total: int = 0  # tokens of this answer
    is_cut: bool = False  # max_new_tokens truncates the response
    done: int = 0
    begun: float = 0.0
    timer: asyncio.TimerHandle | None = None
    num_told: int = 0  # tokens reported to on_tokens

    @property
    def ends(self) -> FinishReason:
        """The finish reason, if nothing interrupts it."""
        return FinishReason(type="length", length=self.total) if self.is_cut else FinishReason(type="stop", matched=EOS)


class PacedEngine(GenerationEngine[_Paced]):
    """Runs config.max_running_requests responses at a time, each at tokens_per_s. A load takes load_s plus the verification.
    Everything except the verification runs on the event loop.

    It calls on_tokens(count, version) for new tokens whenever a response ends or is halted, and in `tell_tokens`.
    """

    def __init__(
        self,
        tail: LongTail,
        config: GenerationConfig,
        *,
        tokens_per_s: float,
        load_s: float = 0.0,
        on_tokens: Callable[[int, str], None] | None = None,
        verify: Callable[[Path, WeightVersion], object] = verify_version,
        clock: Clock = SYSTEM_CLOCK,
        num_versions: int = 1,
    ) -> None:
        super().__init__(
            EngineArguments(
                "", config, eos_token_ids=(EOS,), on_tokens=on_tokens, clock=clock, num_versions=num_versions
            )
        )
        self._tail, self._load_s, self._verify = tail, load_s, verify
        self.tokens_per_s = tokens_per_s  # may be changed while the engine is paused
        self._keys = itertools.count()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        self._closing = True
        self._fail_all(EngineUnavailable("the server is closing"))

    async def _release_devices(self) -> None:
        """It holds no device."""

    async def _acquire_devices(self) -> None:
        """It holds no device."""

    # ------------------------------------------------------------------------------------------------------- requests

    def _check(self, request: EngineRequest) -> None:
        if len(request.input_ids) < self._tail.prompt_tokens or request.params.max_new_tokens < 1:
            raise RequestRefused(
                f"the input must have at least {self._tail.prompt_tokens} tokens, and max_new_tokens must be at least 1"
            )

    def _make(self, request: EngineRequest, since: float, future: asyncio.Future[Generated]) -> _Paced:
        missing = self._tail.length(request.input_ids) - (len(request.input_ids) - self._tail.prompt_tokens)
        total = min(max(1, missing), request.params.max_new_tokens)
        return _Paced(request, since, future, total=total, is_cut=total < missing)

    def _new_key(self) -> str:
        return str(next(self._keys))

    def _begin(self, pending: _Paced) -> None:
        pending.begun = self._loop.time()
        due = pending.begun + (pending.total - pending.done) / self.tokens_per_s
        pending.timer = self._loop.call_at(due, self._end, pending)

    def _halt(self, pending: _Paced) -> None:
        """Stop the response at its current number of tokens until `_begin`."""
        pending.done = self._num_tokens(pending)
        self._tell(pending)
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None

    def _num_tokens(self, pending: _Paced) -> int:
        if pending.timer is None:
            return pending.done
        new = math.floor((self._loop.time() - pending.begun) * self.tokens_per_s)
        return min(pending.total, pending.done + new)

    def _end(self, pending: _Paced) -> None:
        """Answer a response when its last token is due."""
        pending.done = pending.total
        pending.timer = None
        self._answer(pending, pending.ends)
        self._admit()

    def _end_unread(self, pending: _Paced) -> None:
        self._abort_pending(pending)

    def _stopped(self, pending: _Paced) -> None:
        self._halt(pending)
        super()._stopped(pending)

    def _answer(self, pending: _Paced, finish: FinishReason) -> None:
        """Answer with the tokens so far."""
        self._forget(pending)
        pending.close_span(pending.version, pending.done)
        if pending.done == pending.total:
            finish = pending.ends
        if pending.done:
            last = EOS if finish.type == "stop" else FILLER
            pending.token_ids = [FILLER] * (pending.done - 1) + [last]
        pending.logprobs = [_LOGPROB] * pending.done
        super()._answer(pending, finish)

    # ------------------------------------------------------------------------------------------------ abort and pause

    async def _abort_running(self, pending: _Paced) -> bool:
        self._abort_pending(pending)
        self._admit()
        return True

    async def _end_running(self, *, retract: bool = False) -> int:
        running = list(self._running.values())
        if retract:  # it differs from a pause in place by the KV cache only, which does not exist here
            await self._hold()
            return 0
        for pending in running:
            self._abort_pending(pending)
        self._admit()
        return len(running)

    @property
    def _can_hold(self) -> bool:
        return True

    async def _hold(self) -> None:
        self._held = True
        for pending in self._running.values():
            self._halt(pending)

    async def _let_go(self) -> None:
        self._held = False
        for pending in self._running.values():
            self._begin(pending)

    # ------------------------------------------------------------------------------------------------------- weights

    async def verify_ahead(self, path: Path, version: WeightVersion) -> None:
        """Nothing to do: load_weights verifies the files."""

    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        async with self._updated(version, abort_running=abort_running) as num_aborted:
            try:
                await asyncio.to_thread(self._verify, path, version)
            except (WeightsError, OSError) as error:
                raise WeightsRefused(str(error), classify(error)) from error
            await asyncio.sleep(self._load_s)
            for pending in () if self.keeps_versions else self._running.values():
                pending.close_span(pending.version, pending.done)
                pending.version = version
            self._path = str(path)
        return num_aborted

    async def _unload(self, version: WeightVersion) -> None:
        """It holds no weights."""

    async def score(self, input_ids: list[int], version: WeightVersion | None = None) -> list[float]:
        return [0.0, *[_LOGPROB] * (len(input_ids) - 1)]

    async def _flush(self) -> bool:
        return True

    # --------------------------------------------------------------------------------------------------------- watch

    def tell_tokens(self) -> None:
        """Report the tokens emitted since the last report to on_tokens."""
        for pending in self._running.values():
            self._tell(pending)

    def _tell(self, pending: _Paced) -> None:
        if new := self._num_tokens(pending) - pending.num_told:
            pending.num_told += new
            self._num["tokens"] += new
            if self._on_tokens is not None:
                self._on_tokens(new, str(pending.version))

    def _used_tokens(self) -> int:
        return sum(len(pending.request.input_ids) + self._num_tokens(pending) for pending in self._running.values())

    @property
    def failure(self) -> BaseException | None:
        return None
