"""A generation engine that computes nothing: it emits tokens at a fixed rate in each of a fixed number of slots.

For benchmarks and tests of everything around generation. It is honest about what the others rely on: a bounded queue, weight
versions verified by their manifest, every way of pausing, prefixes resumed where they broke off, the version of every token.
How long a response gets depends on its prompt alone (`LongTail`), however often it is interrupted and wherever it goes on. Nothing
is charged for reading a prompt, or a prefix again.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from asyncrl.generation.engine import (
    INTERRUPT_MODES,
    EngineRequest,
    EngineStats,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.messages import FinishReason, VersionSpan, WeightVersion
from asyncrl.weights import WeightsError, verify_version

EOS, FILLER = 0, 1  # token ids: the last of a response, and all others
_LOGPROB = -1.0
_LOWEST, _HIGHEST = 5, 300  # starts of the long-tail task
_IDLE_LIMIT_S = 60.0  # that a pause or a load waits for running requests


@dataclass(frozen=True)
class LongTail:
    """Response lengths of the long-tail task (examples/long_tail), drawn by a seeded hash: mean 24, median 10, some over 100.

    A prompt's last token tells the members of its group apart: the rest draws a length, of which each member gets 0.5 to 1.5.
    """

    seed: int
    prompt_tokens: int  # in a prompt, the member's token included

    def length(self, input_ids: Sequence[int]) -> int:
        """Tokens of the whole response, EOS included, to a prompt that may be followed by a part of its response."""
        prompt = np.asarray(input_ids[: self.prompt_tokens], np.int64)
        start = math.exp(math.log(_LOWEST) + self._uniform(prompt[:-1]) * math.log((_HIGHEST + 1) / _LOWEST))
        return max(1, round(_descent_tokens(int(start)) * (0.5 + self._uniform(prompt))))

    def _uniform(self, ids: np.ndarray) -> float:
        return xxhash.xxh3_64_intdigest(ids.tobytes(), self.seed) / 2**64


@cache
def _descent_tokens(start: int) -> int:
    """Characters of `270;261;...;9;0` for 280 (from each number its digit sum is subtracted), and EOS."""
    count = 0
    while start > 0:
        start -= sum(map(int, str(start)))
        count += len(str(start)) + 1
    return count


@dataclass(eq=False, slots=True)
class _Request:
    """In flight. While it runs, it has had `done` tokens at `since`, and one more each 1 / tokens_per_s after that."""

    request: EngineRequest
    total: int  # tokens of this answer
    finish: FinishReason  # if nothing interrupts it
    queued_at: float
    future: asyncio.Future[Generated] = field(repr=False)
    done: int = 0
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    num_told: int = 0  # tokens that on_tokens has heard of


class PacedEngine(GenerationEngine):
    """`slots` responses at a time, each at tokens_per_s; a load takes load_s beside the verification. All on the event loop.

    on_tokens(count, version) is told of new tokens whenever something ends, and by `tell_tokens`.
    """

    def __init__(
        self,
        tail: LongTail,
        *,
        slots: int,
        tokens_per_s: float,
        load_s: float = 0.0,
        max_queue: int = 2048,
        max_wait_s: float = 300.0,
        on_tokens: Callable[[int, str], None] = lambda count, version: None,
    ) -> None:
        self._tail, self._slots, self._tokens_per_s, self._load_s = tail, slots, tokens_per_s, load_s
        self._max_queue, self._max_wait_s = max_queue, max_wait_s
        self._on_tokens = on_tokens
        self._waiting: OrderedDict[str, _Request] = OrderedDict()  # by rid, as are those that run
        self._running: dict[str, _Request] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._update_lock = asyncio.Lock()
        self._paused = self._stands_still = self._updating = self._closing = False
        self._version: WeightVersion | None = None
        self._path = ""
        self._num = dict.fromkeys(("requests", "aborted", "tokens", "prompt_tokens", "updates"), 0)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        self._closing = True
        for one in [*self._running.values(), *self._waiting.values()]:
            self._fail(one, EngineUnavailable("the server is closing"))

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, request: EngineRequest) -> asyncio.Future[Generated]:
        if self._closing or self._version is None:
            raise EngineUnavailable(
                "the server is closing" if self._closing else "no weight version has been loaded yet"
            )
        if request.rid in self._waiting or request.rid in self._running:
            raise RequestRefused(f"rid {request.rid!r} is in flight already")
        if len(request.input_ids) < self._tail.prompt_tokens or request.params.max_new_tokens < 1:
            raise RequestRefused(f"prompts have {self._tail.prompt_tokens} tokens here, responses at least one")
        if len(self._waiting) >= self._max_queue:
            raise EngineUnavailable(f"the queue is full ({self._max_queue} requests wait)")
        missing = self._tail.length(request.input_ids) - (len(request.input_ids) - self._tail.prompt_tokens)
        total = min(max(1, missing), request.params.max_new_tokens)
        stops = total >= missing
        finish = FinishReason(type="stop", matched=EOS) if stops else FinishReason(type="length", length=total)
        one = _Request(request, total, finish, self._loop.time(), self._loop.create_future())
        one.future.add_done_callback(lambda future: self._drop(one) if future.cancelled() else None)
        self._waiting[request.rid] = one
        if request.first:
            self._waiting.move_to_end(request.rid, last=False)
        self._num["requests"] += 1
        self._num["prompt_tokens"] += len(request.input_ids)
        self._admit()
        return one.future

    def _admit(self) -> None:
        """Those that wait get the free slots, first come first served."""
        while self._waiting and len(self._running) < self._slots and not (self._paused or self._updating):
            rid, one = self._waiting.popitem(last=False)
            self._running[rid] = one
            self._idle.clear()
            self._go(one)

    def _go(self, one: _Request) -> None:
        one.since = self._loop.time()
        one.timer = self._loop.call_at(one.since + (one.total - one.done) / self._tokens_per_s, self._end, one)

    def _halt(self, one: _Request) -> None:
        """It has so many tokens now, and gets no more until `_go`."""
        one.done = self._num_tokens(one)
        self._tell(one)
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None

    def _num_tokens(self, one: _Request) -> int:
        if one.timer is None:
            return one.done
        new = math.floor((self._loop.time() - one.since) * self._tokens_per_s)
        return min(one.total, one.done + new)

    def _end(self, one: _Request) -> None:
        """Its last token is due."""
        one.done = one.total
        one.timer = None
        self._answer(one, one.finish)

    def _answer(self, one: _Request, finish: FinishReason) -> None:
        """With the tokens that it has."""
        self._halt(one)
        self._close_span(one)
        if one.done == one.total:
            finish = one.finish
        last = [EOS] if finish.type == "stop" else [FILLER]
        tokens = [FILLER] * (one.done - 1) + last if one.done else []
        self._drop(one)
        if not one.future.done():
            one.future.set_result(Generated(tokens, [_LOGPROB] * one.done, finish, one.spans))

    def _fail(self, one: _Request, error: Exception) -> None:
        self._drop(one)
        if not one.future.done():
            one.future.set_exception(error)

    def _drop(self, one: _Request) -> None:
        """It leaves queue and slot."""
        rid = one.request.rid
        if self._running.get(rid) is one:
            self._halt(one)
            del self._running[rid]
            if not self._running:
                self._idle.set()
            self._admit()
        elif self._waiting.get(rid) is one:
            del self._waiting[rid]

    def _close_span(self, one: _Request) -> None:
        """What came after the last span was sampled by the version that is served."""
        start = one.spans[-1].end if one.spans else 0
        if one.done > start:
            one.spans.append(VersionSpan(version=str(self._version), start=start, end=one.done))

    def expire_waiting(self) -> int:
        too_old = self._loop.time() - self._max_wait_s
        old = [one for one in self._waiting.values() if one.queued_at < too_old]
        for one in old:
            self._fail(one, EngineUnavailable(f"waited longer than {self._max_wait_s} s"))
        return len(old)

    # ------------------------------------------------------------------------------------------------ abort and pause

    async def abort(self, rid: str) -> bool:
        return bool(self._abort([rid]))

    async def abort_all(self) -> int:
        return self._abort([*self._waiting, *self._running])

    def _abort(self, rids: Sequence[str]) -> int:
        found = [one for rid in rids if (one := self._running.get(rid) or self._waiting.get(rid)) is not None]
        for one in found:
            self._num["aborted"] += 1
            self._answer(one, FinishReason(type="abort", message="aborted"))
        return len(found)

    @property
    def pause_modes(self) -> tuple[str, ...]:
        return INTERRUPT_MODES

    async def pause(self, mode: str = "abort") -> int:
        if mode not in INTERRUPT_MODES:
            raise RequestRefused(f"mode {mode!r} is not known; use one of {', '.join(INTERRUPT_MODES)}")
        self._paused = True
        running = list(self._running.values())
        if mode == "abort":
            self._abort(list(self._running))
        elif mode == "wait":
            await self._until_idle()
        else:  # the difference is the KV cache, which is not here
            self._stands_still = True
            for one in running:
                self._halt(one)
        return len(running)

    async def resume(self) -> None:
        self._paused = False
        if self._stands_still:
            self._stands_still = False
            for one in self._running.values():
                self._go(one)
        self._admit()

    async def _until_idle(self) -> None:
        try:
            await asyncio.wait_for(self._idle.wait(), _IDLE_LIMIT_S)
        except asyncio.TimeoutError:
            raise WeightsRefused(f"{len(self._running)} requests still run after {_IDLE_LIMIT_S:g} s") from None

    # ------------------------------------------------------------------------------------------------------- weights

    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        async with self._update_lock:
            if self._version is not None and version < self._version:
                raise WeightsRefused(f"version {version} is older than {self._version}, which is served")
            self._updating = True
            try:
                num_aborted = self._abort(list(self._running)) if abort_running else 0
                if not self._stands_still:
                    await self._until_idle()
                await asyncio.to_thread(verify_version, path, version)
                await asyncio.sleep(self._load_s)
                for one in self._running.values():
                    self._close_span(one)
                self._version, self._path = version, str(path)
                self._num["updates"] += 1
                return num_aborted
            except (WeightsError, OSError) as error:
                raise WeightsRefused(str(error)) from error
            finally:
                self._updating = False
                self._admit()

    async def score(self, input_ids: list[int]) -> list[float]:
        return [0.0, *[_LOGPROB] * (len(input_ids) - 1)]

    def forget_version(self) -> None:
        self._version = None

    async def flush_cache(self) -> bool:
        return not self._running

    # --------------------------------------------------------------------------------------------------------- watch

    def tell_tokens(self) -> None:
        """Tell on_tokens of what was emitted since it was last told."""
        for one in self._running.values():
            self._tell(one)

    def _tell(self, one: _Request) -> None:
        if new := self._num_tokens(one) - one.num_told:
            one.num_told += new
            self._num["tokens"] += new
            self._on_tokens(new, str(self._version))

    def stats(self) -> EngineStats:
        running = self._running.values()
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            used_tokens=sum(len(one.request.input_ids) + self._num_tokens(one) for one in running),
            paused=self._paused,
            version="" if self._version is None else str(self._version),
            num_requests=self._num["requests"],
            num_aborted=self._num["aborted"],
            num_tokens=self._num["tokens"],
            num_prompt_tokens=self._num["prompt_tokens"],
            num_steps=0,
            num_updates=self._num["updates"],
        )

    @property
    def model_path(self) -> str:
        return self._path

    @property
    def failure(self) -> BaseException | None:
        return None
