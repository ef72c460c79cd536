"""The request queue that all engines share: requests wait in a bounded queue, run when there is room, and are answered once.

    submit -> _check -> _waiting -> _admit -> _begin -> _running -> _answer, _fail -> future
                           ^                               |
                           +----- _put_back: retracted ----+

A concrete engine adds its checks and the start and end of a request. No request starts while the engine is paused or being
updated.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import (
    EngineRequest,
    EngineStats,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.generation import FinishReason, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.trace import OFF, Tracer


@dataclass(eq=False, slots=True)
class Pending:
    """A request in flight, with the tokens sampled so far (in the embedded engine: up to its last retraction)."""

    request: EngineRequest
    since: float  # start of the wait, monotonic seconds
    future: asyncio.Future[Generated] = field(repr=False)
    key: str = ""  # its id in the backend, new each time it starts there: late results of an earlier start are ignored
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)  # the newest tokens may not be in a span yet


@dataclass(frozen=True)
class EngineArguments:
    """The arguments that all engines take."""

    model_path: str
    config: GenerationConfig
    eos_token_ids: Sequence[int] = ()
    on_tokens: Callable[[int, str], None] | None = None  # (number of new tokens, version)
    trace: Tracer = OFF
    clock: Clock = SYSTEM_CLOCK
    asleep: bool = False  # the engine begins asleep, and `wake` starts it


P = TypeVar("P", bound=Pending)


class QueueingEngine(GenerationEngine, Generic[P]):
    """See the module's docstring. All methods are called on the event loop."""

    def __init__(self, arguments: EngineArguments) -> None:
        self._asleep = arguments.asleep
        self._path, self._config = arguments.model_path, arguments.config
        self._eos_token_ids = set(arguments.eos_token_ids)
        self._on_tokens, self._trace, self._clock = arguments.on_tokens, arguments.trace, arguments.clock
        self._waiting: OrderedDict[str, P] = OrderedDict()  # by rid
        self._running: dict[str, P] = {}  # by key
        self._rids: set[str] = set()  # of waiting and running requests
        self._idle = asyncio.Event()  # set while no request runs
        self._idle.set()
        self._update_lock = asyncio.Lock()  # one change of the weights or the cache at a time
        self._paused = self._updating = self._closing = False
        self._version: WeightVersion | None = None
        self._num = dict.fromkeys(("requests", "aborted", "tokens", "prompt_tokens", "steps", "updates"), 0)

    # ---------------------------------------------------------------------------------------------- abstract methods

    @abstractmethod
    def _check(self, request: EngineRequest) -> None:
        """Raises RequestRefused."""

    @abstractmethod
    def _make(self, request: EngineRequest, since: float, future: asyncio.Future[Generated]) -> P: ...

    @abstractmethod
    def _new_key(self) -> str: ...

    @abstractmethod
    def _begin(self, pending: P) -> None:
        """Start the request. The tokens it already has become part of its prefix."""

    @abstractmethod
    def _end_unread(self, pending: P) -> None:
        """End a running request that its caller has cancelled."""

    @abstractmethod
    def _used_tokens(self) -> int:
        """EngineStats.used_tokens."""

    @abstractmethod
    async def _flush(self) -> bool:
        """Empty the prefix cache; called while no request runs. Returns False if that failed."""

    @abstractmethod
    async def _release_devices(self) -> None:
        """Release weights and KV cache; called while no request runs."""

    @abstractmethod
    async def _acquire_devices(self) -> None:
        """Inverse of _release_devices, or the first start."""

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, request: EngineRequest) -> asyncio.Future[Generated]:
        self._check_alive()
        if self._version is None:
            raise EngineUnavailable("no weight version has been loaded yet")
        if request.rid in self._rids:
            raise RequestRefused(f"rid {request.rid!r} is already in flight")
        self._check(request)
        if len(self._waiting) >= self._config.max_queue and not request.is_check:
            raise EngineUnavailable(f"the queue is full ({self._config.max_queue} requests are waiting)")
        pending = self._make(request, self._clock.monotonic(), asyncio.get_running_loop().create_future())
        pending.future.add_done_callback(lambda future: self._cancelled(pending) if future.cancelled() else None)
        self._rids.add(request.rid)
        self._waiting[request.rid] = pending
        if request.first:
            self._waiting.move_to_end(request.rid, last=False)
        self._num["requests"] += 1
        self._num["prompt_tokens"] += len(request.input_ids)
        self._admit()
        return pending.future

    def _admit(self) -> None:
        """Start waiting requests while there is room.

        None starts during a pause, because a pause ends or stops only those requests that were running when it began.
        """
        while (
            self._waiting
            and len(self._running) < self._config.max_running_requests
            and self._version is not None
            and not (self._paused or self._updating or self._closing)
        ):
            _, pending = self._waiting.popitem(last=False)
            pending.key = self._new_key()
            self._running[pending.key] = pending
            self._idle.clear()
            self._begin(pending)

    def _stopped(self, pending: P) -> None:
        """Remove a request from the running ones."""
        del self._running[pending.key]
        if not self._running:
            self._idle.set()

    def _put_back(self, pending: P) -> None:
        """Put a retracted request at the front of the queue."""
        pending.since = self._clock.monotonic()
        self._waiting[pending.request.rid] = pending
        self._waiting.move_to_end(pending.request.rid, last=False)

    def _forget(self, pending: P) -> None:
        """Remove a request from the queue or from the running ones. If it is in neither, do nothing."""
        if self._waiting.get(pending.request.rid) is pending:
            del self._waiting[pending.request.rid]
        elif self._running.get(pending.key) is pending:
            self._stopped(pending)
        else:
            return
        self._rids.discard(pending.request.rid)

    def _answer(self, pending: P, finish: FinishReason) -> None:
        """Answer a request with the tokens it has."""
        self._forget(pending)
        if finish.type == "abort":
            self._num["aborted"] += 1
        if not pending.future.done():
            pending.future.set_result(Generated(pending.token_ids, pending.logprobs, finish, pending.spans))

    def _fail(self, pending: P, error: Exception) -> None:
        self._forget(pending)
        if not pending.future.done():
            pending.future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        for pending in [*self._running.values(), *self._waiting.values()]:
            self._fail(pending, error)

    def _abort_pending(self, pending: P) -> None:
        """Answer a request as aborted, with the tokens it has."""
        self._answer(pending, FinishReason(type="abort", message="aborted"))

    def _cancelled(self, pending: P) -> None:
        """The caller has cancelled the request's future: end the request."""
        if self._waiting.get(pending.request.rid) is pending:
            self._abort_pending(pending)
        elif self._running.get(pending.key) is pending:
            self._end_unread(pending)
        self._admit()

    def expire_waiting(self) -> int:
        too_old = self._clock.monotonic() - self._config.max_wait_s
        old = [pending for pending in self._waiting.values() if pending.since < too_old]
        for pending in old:
            if pending.token_ids:  # a retracted request: return its tokens instead of an error
                self._abort_pending(pending)
                continue
            why = "while the server was paused" if self._paused else "for a free slot"
            self._fail(pending, EngineUnavailable(f"waited longer than {self._config.max_wait_s} s {why}"))
        return len(old)

    # ------------------------------------------------------------------------------------------------ weights and cache

    @contextmanager
    def _nothing_begins(self) -> Iterator[None]:
        """Within the `with` block no request starts, because the weights or the cache change. The caller holds _update_lock."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
            self._admit()

    async def _until_idle(self) -> None:
        """Wait until no request runs, for load_timeout_s at most; unblocked by the end of the last request."""
        try:
            async with asyncio.timeout(self._config.load_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise WeightsRefused(
                f"{len(self._running)} requests still run after {self._config.load_timeout_s} s (generation.load_timeout_s); "
                "pause with mode abort, or set abort_all_requests",
                ErrorClass.PASSING,
            ) from None

    def check_version(self, version: WeightVersion) -> None:
        """Raises WeightsRefused if the version is older than the served one."""
        if self._version is not None and version < self._version:
            raise WeightsRefused(
                f"version {version} is older than {self._version}, which is served; versions only increase",
                ErrorClass.PERMANENT,
            )

    def forget_version(self) -> None:
        self._version = None

    async def flush_cache(self) -> bool:
        async with self._update_lock:
            self._check_alive()
            if self._running:
                return False
            with self._nothing_begins():
                return await self._flush()

    async def sleep(self) -> None:
        if self._asleep:
            return
        await self.pause("abort")
        async with self._update_lock:
            with self._nothing_begins():
                await self._until_idle()
                self._version = None
                self._asleep = True  # from now on the end of the engine's threads or processes is no failure
                await self._release_devices()

    async def wake(self) -> None:
        async with self._update_lock:
            if self._asleep:
                self._paused = True
                await self._acquire_devices()
                self._asleep = False

    # ----------------------------------------------------------------------------------------------------------- state

    def stats(self) -> EngineStats:
        num = self._num
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            used_tokens=self._used_tokens(),
            paused=self._paused,
            version="" if self._version is None else str(self._version),
            num_requests=num["requests"],
            num_aborted=num["aborted"],
            num_tokens=num["tokens"],
            num_prompt_tokens=num["prompt_tokens"],
            num_steps=num["steps"],
            num_updates=num["updates"],
        )

    @property
    def model_path(self) -> str:
        return self._path

    def _check_alive(self) -> None:
        if self._closing:
            raise EngineUnavailable("the server is closing")
        if self._asleep:
            raise EngineUnavailable("the server sleeps: training uses its devices")
        if (failure := self.failure) is not None:
            first = (str(failure) or repr(failure)).splitlines()[0]
            raise EngineUnavailable(f"the engine has failed: {first}", retry_after_s=30.0)
