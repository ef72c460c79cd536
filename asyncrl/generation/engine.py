"""The interface between a generation server and the engine that samples, and the request queue that all engines share.

The server (http.py, worker.py) speaks SGLang's protocol to other processes; an engine turns prompts into tokens with their
logprobs. `transformers.py` is the embedded engine, `sglang.py` drives a SGLang server. All methods are called from the server's
event loop.

    submit -> _check -> _waiting -> _admit -> _begin -> _running -> _answer, _fail -> future
                           ^                               |
                           +----- _put_back: retracted ----+

Life of a request: `submit` checks it and puts it in a bounded queue. It runs when the engine is not paused or being updated, and
has room. Its future resolves once: with all tokens sampled so far, if the response stopped, reached its length or was aborted;
otherwise with an error. Every token carries the weight version that sampled it. The mode of the pause around an update
(INTERRUPT_MODES) decides how the update treats running requests.

Several versions (generation.interrupt=finish, adapters only). A load stops nothing: a request runs under the version with which it
began, and later requests begin with the new one. The engine keeps `num_versions` of them. An older one is unloaded (`_unload`)
after its requests have been aborted with their tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from asyncrl.config.schema import INTERRUPT_MODES, GenerationConfig, LoraConfig
from asyncrl.data.routes import Routes
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.generation import FinishReason, SamplingParams, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import BeginWeightUpdate, EndWeightUpdate, JoinUpdateGroup, ReceiveWeights
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.trace import OFF, Tracer


class RequestRefused(ValueError):
    """The request itself is wrong (HTTP 400). The message names the error and the allowed values."""


class WeightsRefused(ValueError):
    """These weights cannot be loaded (HTTP 400). The engine keeps its version, unless its weights may have changed."""

    def __init__(self, text: str, error_class: ErrorClass = ErrorClass.PASSING) -> None:
        """error_class: permanent if the engine refuses this version however often it is sent; passing if the same version may be
        accepted later, for example after another call."""
        super().__init__(text)
        self.error_class = error_class


CLOSING = "the server is closing"
_SLEEPS = "the server sleeps: training uses its devices"


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

    priority: above 0, the request goes to the front of the queue. It is above 0 for a response that has already begun: otherwise
    each update that interrupts it would put it behind the waiting requests again, and the train step that needs it would wait
    longer.
    is_check: a request of the logprob check. A full queue does not refuse it, and with several versions it needs no free slot.
    version: with which it runs, one that is loaded; None: the newest.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    priority: int = 0
    is_check: bool = False
    version: WeightVersion | None = None


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
    routes: Routes | None = (
        None  # of all tokens of prompt and response but the last, with EngineArguments.returns_routes
    )


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

    num_ranks = 1  # number of the engine's ranks in a group: one for each tensor parallel rank

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
    routes: Routes | None = None
    version: WeightVersion | None = None  # with which it began; in place, that of the last load

    def add_routes(self, routes: Routes) -> None:
        """Take the routes of its prompt and its tokens but the last, since it last started in the backend. A token keeps those with
        which the token behind it was sampled. Raises ValueError if they do not fit."""
        computed = len(self.request.input_ids) + len(self.token_ids) - 1
        routes = Routes(routes.layout, routes.rows[:computed])
        self.routes = routes if self.routes is None else self.routes.joined(routes, start=0)

    def close_span(self, version: WeightVersion | None, end: int) -> None:
        """Record that this version sampled the tokens after the last span, up to token `end`."""
        start = self.spans[-1].end if self.spans else 0
        if end == start:
            return
        if self.spans and self.spans[-1].version == str(version):
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=str(version), start=start, end=end))


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
    # Results have the experts of each token. Only engines without a routes_limit (config/engines.py) can do that
    returns_routes: bool = False
    lora: LoraConfig | None = None  # versions are adapters of the model
    num_versions: int = 1  # that the engine keeps; above 1: interrupt=finish


P = TypeVar("P", bound=Pending)


class GenerationEngine(ABC, Generic[P]):
    """The engine of a generation server. P: a request in flight.

    A concrete engine starts and closes, begins and ends requests, and loads versions; its abstract methods say what it adds.
    """

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
        self._held = False  # a pause in place has stopped running requests
        self._version: WeightVersion | None = None
        self.num_versions = arguments.num_versions
        self._loaded: list[WeightVersion] = []  # with several versions: those that are loaded, the oldest first
        self._num = dict.fromkeys(("requests", "aborted", "tokens", "prompt_tokens", "steps", "updates"), 0)

    # ------------------------------------------------------------------------------------------------------ lifecycle

    @abstractmethod
    async def start(self) -> None:
        """Load the model or start the server. Afterwards the engine has no weight version yet and refuses to generate."""

    def progress(self) -> str:
        """How far `start` has come, for a status line."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine. Requests in flight fail with EngineUnavailable."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """The error that ended the engine, or None. Only a restart of the server recovers from it."""

    async def sleep(self) -> None:
        """Interrupt all running requests, then release the devices: weights and KV cache.

        Until `wake` the engine has no version and refuses to generate, also the requests that have waited for a slot. Does nothing
        if the engine sleeps already.
        """
        if self._asleep:
            return
        await self.pause("abort")
        async with self._update_lock:
            with self._nothing_begins():
                await self._until_idle()
                self._version = None
                self._asleep = True  # from now on the end of the engine's threads or processes is no failure
                for pending in list(self._waiting.values()):
                    self._fail(pending, EngineUnavailable(_SLEEPS))
                await self._release_devices()

    async def wake(self) -> None:
        """Take the devices again. The engine stays paused and has no version. Does nothing if the engine is awake."""
        async with self._update_lock:
            if self._asleep:
                self._paused = True
                await self._acquire_devices()
                self._asleep = False

    @abstractmethod
    async def _release_devices(self) -> None:
        """Release weights and KV cache; called while no request runs."""

    @abstractmethod
    async def _acquire_devices(self) -> None:
        """Inverse of _release_devices, or the first start."""

    # ------------------------------------------------------------------------------------------------------- requests

    def submit(self, request: EngineRequest) -> asyncio.Future[Generated]:
        """Queue a request. Raises RequestRefused or EngineUnavailable at once. Cancelling the future aborts the request."""
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
        if request.priority > 0:
            self._waiting.move_to_end(request.rid, last=False)
        self._num["requests"] += 1
        self._num["prompt_tokens"] += len(request.input_ids)
        self._admit()
        return pending.future

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

    def _admit(self) -> None:
        """Start waiting requests while there is room.

        None starts during a pause, because a pause ends or stops only those requests that were running when it began.
        """
        while (
            self._waiting
            and self._has_slot(next(iter(self._waiting.values())).request)
            and self._version is not None
            and not (self._paused or self._updating or self._closing)
        ):
            _, pending = self._waiting.popitem(last=False)
            pending.key = self._new_key()
            pending.version = pending.request.version or self._version
            self._running[pending.key] = pending
            self._idle.clear()
            self._begin(pending)

    def _has_slot(self, request: EngineRequest) -> bool:
        """With several versions an update empties no slot, and the check that it needs cannot wait for one."""
        beyond = self._num_check_slots if request.is_check else 0
        return len(self._running) < self._config.max_running_requests + beyond

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
            pending.future.set_result(
                Generated(pending.token_ids, pending.logprobs, finish, pending.spans, pending.routes)
            )

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
        """End requests that have waited longer than max_wait_s; returns their number. Call it about once a second.

        Their futures get EngineUnavailable, or, for a retracted request, the tokens that it has.
        """
        too_old = self._clock.monotonic() - self._config.max_wait_s
        old = [pending for pending in self._waiting.values() if pending.since < too_old]
        for pending in old:
            if pending.token_ids:  # a retracted request: return its tokens instead of an error
                self._abort_pending(pending)
                continue
            why = "while the server was paused" if self._paused else "for a free slot"
            self._fail(pending, EngineUnavailable(f"waited longer than {self._config.max_wait_s} s {why}"))
        return len(old)

    # ------------------------------------------------------------------------------------------------ abort and pause

    async def abort(self, rid: str) -> bool:
        """End one request; its future resolves with the tokens so far.

        Returns False if no such request is in flight, or if it finished before the abort.
        """
        if rid in self._waiting:
            self._abort_pending(self._waiting[rid])
            return True
        for pending in self._running.values():
            if pending.request.rid == rid:
                return await self._abort_running(pending)
        return False

    async def abort_all(self) -> int:
        """End every request, running or waiting; each future resolves with the tokens so far. Returns their number."""
        count = len(self._waiting)
        for pending in list(self._waiting.values()):
            self._abort_pending(pending)
        return count + await self._end_running()

    @abstractmethod
    async def _abort_running(self, pending: P) -> bool:
        """`abort` for a running request."""

    @abstractmethod
    async def _end_running(self, *, retract: bool = False) -> int:
        """End all running requests: answer them as aborted with their tokens so far, or put them back. A request that finishes
        meanwhile is answered as finished. Returns how many were answered as aborted."""

    @abstractmethod
    async def _hold(self) -> None:
        """Stop running requests where they are, and set `_held`, which says that there may be such requests."""

    @abstractmethod
    async def _let_go(self) -> None:
        """Let them run again, and reset `_held`."""

    @property
    def pause_modes(self) -> tuple[str, ...]:
        """The subset of INTERRUPT_MODES that `pause` accepts."""
        lacking = {"in_place": not self._can_hold, "finish": not self.keeps_versions}
        return tuple(mode for mode in INTERRUPT_MODES if not lacking.get(mode, False))

    @property
    def _num_check_slots(self) -> int:
        """Slots for requests of the logprob check only: two for the newest version, one for each other."""
        return self.num_versions + 1 if self.keeps_versions else 0

    @property
    def keeps_versions(self) -> bool:
        """Whether requests of several versions may run at once."""
        return self.num_versions > 1

    @property
    def _can_hold(self) -> bool:
        """Whether the engine keeps no keys of the old weights for later requests, so that it can pause in place."""
        return self._config.interrupt == "in_place"

    async def pause(self, mode: str = "abort") -> int:
        """Stop generating; new requests wait. Returns how many requests were running. The mode decides what happens to them:

        abort: they end with the tokens so far. retract: they wait and continue after `resume`; their KV cache is recomputed.
        wait: they finish, and `pause` returns after that. in_place: they continue after `resume` with their existing KV cache.
        finish: nothing stops, and new requests do not wait: they begin with the version that is loaded at that time.
        Raises RequestRefused for another mode, and with wait WeightsRefused if they do not finish within load_timeout_s.
        """
        self._check_alive()
        if mode not in self.pause_modes:
            raise RequestRefused(
                f"mode {mode!r} is not supported by this server; use one of {', '.join(self.pause_modes)} (in_place needs "
                "generation.interrupt=in_place, which disables prefix sharing; finish needs generation.interrupt=finish)"
            )
        count = len(self._running)
        if mode == "finish":
            return count
        self._paused = True
        if mode == "in_place":
            await self._hold()
        elif mode == "wait":
            await self._until_idle()
        else:
            await self._end_running(retract=mode == "retract")
        return count

    async def resume(self) -> None:
        """Undo `pause`: waiting requests run."""
        self._check_alive()
        if self._held:
            await self._let_go()
        self._paused = False
        self._admit()

    # ------------------------------------------------------------------------------------------------ weights and cache

    @abstractmethod
    async def verify_ahead(self, path: Path, version: WeightVersion) -> None:
        """Check the files of a version while requests run, so that load_weights need not read them for the check.

        Raises WeightsRefused. An engine may leave the check to load_weights.
        """

    @abstractmethod
    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """Verify a version directory and load it in place; returns how many requests it ended.

        With abort_running, all running requests are aborted. Otherwise the load waits until they have ended; it neither waits for
        nor ends requests that a pause in place has stopped, nor any if the engine keeps several versions. Flushes the prefix cache,
        except in these two cases. Raises WeightsRefused; in that case weights and version have not changed.
        """

    @asynccontextmanager
    async def _updated(self, version: WeightVersion, *, abort_running: bool = False) -> AsyncIterator[int]:
        """Yield how many requests were ended, when nothing runs that the new weights would change. After the block, the engine
        serves the version. If it keeps several, the block must leave running requests their versions."""
        async with self._update_lock:
            self._check_alive()
            self.check_version(version)
            with contextlib.nullcontext() if self.keeps_versions else self._nothing_begins():
                num_aborted = await self._end_running() if abort_running else 0
                if not (self._held or self.keeps_versions):
                    await self._until_idle()
                yield num_aborted
                self._version = version
                self._num["updates"] += 1
            if self.keeps_versions:
                await self._unload_oldest(version)

    async def _unload_oldest(self, loaded: WeightVersion) -> None:
        """Unload the versions that are too old once this one is loaded, after the end of their requests."""
        self._loaded = [*(one for one in self._loaded if one != loaded), loaded]
        while len(self._loaded) > self.num_versions:
            oldest = self._loaded.pop(0)
            for pending in [one for one in self._running.values() if one.version == oldest]:
                await self._abort_running(pending)
            await self._unload(oldest)

    async def _unload(self, version: WeightVersion) -> None:
        """With several versions: drop this one. No request runs under it, and none will."""
        raise NotImplementedError

    @property
    def older_versions_in_use(self) -> list[WeightVersion]:
        """With several versions: those before the newest under which requests run, the oldest first."""
        running = {one.version for one in self._running.values() if self.keeps_versions and one.version is not None}
        return sorted(running - {self._version})

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
        if self._held:
            await self._let_go()
        try:
            async with asyncio.timeout(self._config.load_limit_s):
                await self._idle.wait()
        except TimeoutError:
            raise WeightsRefused(
                f"{len(self._running)} requests still run after {self._config.load_limit_s} s (generation.load_timeout_s); "
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

    @abstractmethod
    async def score(self, input_ids: list[int], version: WeightVersion | None = None) -> list[float]:
        """Logprob of each token given those before it, at temperature 1; 0 for the first. version: one that is loaded; None: the
        newest.

        Works while the engine is paused (a SGLang server that is paused in place raises EngineUnavailable), and no waiting request
        starts because of it. Uses no cached prefixes. Leaves none behind either, except on SGLang while requests run.
        """

    @property
    def scores_before_resume(self) -> bool:
        """Whether `score` is asked before requests run again after a load, because they would change the last bits of its result.
        Other engines score as exactly while requests run."""
        return False

    def forget_version(self) -> None:
        """Drop the version because the loaded weights are wrong: generate nothing and report no version until a load succeeds."""
        self._version = None

    def weight_receiver(self, host: str) -> WeightReceiver | None:
        """The receiver of weights over the network. host: address of its sockets. None: this engine loads from disk only."""
        return None

    async def flush_cache(self) -> bool:
        """Drop all cached prefixes. While requests run this does nothing and returns False."""
        async with self._update_lock:
            self._check_alive()
            if self._running:
                return False
            with self._nothing_begins():
                return await self._flush()

    @abstractmethod
    async def _flush(self) -> bool:
        """Empty the prefix cache; called while no request runs. Returns False if that failed."""

    # ----------------------------------------------------------------------------------------------------------- state

    def stats(self) -> EngineStats:
        """Current queue depths and counters."""
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

    @abstractmethod
    def _used_tokens(self) -> int:
        """EngineStats.used_tokens."""

    @property
    def model_path(self) -> str:
        """Directory of the weights last loaded from disk. Before the first such load: the model directory of the config."""
        return self._path

    def _check_alive(self) -> None:
        if self._closing:
            raise EngineUnavailable(CLOSING)
        if self._asleep:
            raise EngineUnavailable(_SLEEPS)
        if (failure := self.failure) is not None:
            first = (str(failure) or repr(failure)).splitlines()[0]
            raise EngineUnavailable(f"the engine has failed: {first}", retry_after_s=30.0)
