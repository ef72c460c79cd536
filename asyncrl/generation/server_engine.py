"""An engine that drives another program's server: SGLang's or vLLM's. Its requests wait in our own queue.

    submit -> checks -> _waiting -> _admit -> one request to the server, streamed -> future
                          ^                                  |
                          +---- retracted: waits, with its tokens

Invalid input never reaches the server. Prompts, lengths, rids and sampling parameters are checked here, versions on disk are
verified (files, checksums, names and shapes of tensors) before the server loads them, and no queued request is sent while the
engine is paused. The server loads only full versions: another one is first written in full to this host.

Version labels are exact because the server runs no request during an update. `abort`, `retract` and `wait` all end the server's
requests first, so each request runs under one version, and the server's own label must confirm it. (`retract` keeps our requests:
they wait here and continue with their tokens as a prefix.) Only `in_place`, which is approximate by design, pauses the server with
its requests.

The server's request ids are our `GrowingResponse.key`. They are unique.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from asyncrl.data.model_limits import ModelLimits
from asyncrl.generation.adapter_tensors import AdapterTensors
from asyncrl.generation.checks import ModelTensors, check_params, check_prompt
from asyncrl.generation.engine import (
    CLOSING,
    EngineArguments,
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    Pending,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.generation.server_client import Piece, ServerClient, ServerError
from asyncrl.generation.server_process import ServerLink
from asyncrl.protocol.errors import ErrorClass, class_of_status, refuses_content
from asyncrl.protocol.generation import FinishReason, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.fetch import WeightFetcher

logger = logging.getLogger(__name__)

ASK_LIMIT_S = 10.0  # limit of a request for the server's state, or to abort, pause, continue or flush
_ABORT_LIMIT_S = 20.0  # limit until aborted requests have ended; they take one forward pass at most
_ABORT_AGAIN_S = 0.2  # aborts are repeated, because an abort that arrives before its request has no effect
_FLUSH_TRIES, UPDATE_FLUSH_TRIES = 5, 20
_FLUSH_PAUSE_S = 0.05
_WATCH_S = 0.5
_ENDS_TOO_S = 5.0  # after a child has ended: the server itself was killed, or ends because of it
_SILENT_LIMIT_S = 60.0  # a server that answers nothing for this long counts as dead


C = TypeVar("C", bound=ServerClient)


@dataclass(eq=False, slots=True)
class GrowingResponse(Pending):
    """A request in flight and its tokens so far. It may be sent to the server several times, with these tokens as its prefix.

    It grows piece by piece. Each piece is checked before any of its tokens is added. Pure.
    """

    begin: int = 0  # number of its tokens when it was last sent to the server
    retracted: bool = False  # when it ends at the server, it goes back to the queue and continues later
    ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # set when it has ended at the server

    def sent(self) -> None:
        """Record that it is sent to the server with its current tokens."""
        self.begin, self.retracted, self.ended = len(self.token_ids), False, asyncio.Event()

    def take(self, piece: Piece) -> int:
        """Append the new tokens of a piece; returns their number. Raises ServerError if the piece is inconsistent.

        A piece has either the new tokens or all tokens so far; `completion_tokens` shows how many are new. If a server aborts a
        request that is still in its queue, the piece repeats the last token and has no new one.
        """
        meta = piece.meta_info
        new = meta.completion_tokens - (len(self.token_ids) - self.begin)
        tokens, rows = piece.output_ids, meta.output_token_logprobs
        if new < 0 or len(tokens) < new or len(rows) < new:
            raise ServerError(f"a piece has {len(tokens)} tokens and {len(rows)} logprobs, but {new} should be new")
        if new == 0:
            return 0
        tokens, rows = tokens[-new:], rows[-new:]
        logprobs = [math.nan if row[0] is None else row[0] for row in rows]
        if [row[1] for row in rows] != tokens:
            raise ServerError("tokens and logprobs of a piece are not of the same response")
        if not all(map(math.isfinite, logprobs)):
            raise ServerError("logprobs are not finite")
        self.token_ids += tokens
        self.logprobs += logprobs
        return new

    def natural_end(self, stop_ids: Sequence[int]) -> FinishReason | None:
        """The stop or length finish that the tokens imply, or None.

        A server may run one more pass of an aborted request, and report `abort` even if that pass completes the response.
        """
        if self.token_ids and self.token_ids[-1] in stop_ids and len(self.token_ids) > self.begin:
            return FinishReason(type="stop", matched=self.token_ids[-1])
        if len(self.token_ids) >= self.request.params.max_new_tokens:
            return FinishReason(type="length", length=len(self.token_ids))
        return None

    def label(self, last: Piece, began: WeightVersion, served: WeightVersion | None) -> None:
        """Add the server's version labels as spans. Raises ServerError if a label is older than `began` or newer than
        `served`, or if the labels do not cover all tokens that were sampled since the request was last sent.

        began: the version when the request was sent; served: the current one. They differ only after a pause in place.
        """
        end = self.begin
        for span in last.meta_info.weight_versions:
            start, stop = self.begin + span.start, self.begin + span.end
            if start != end or stop < start:
                break
            if stop > start:
                _check_label(span.version, began, served)
                self.spans.append(VersionSpan(version=span.version, start=start, end=stop))
            end = stop
        if end != len(self.token_ids):
            found = last.meta_info.weight_versions
            raise ServerError(f"weight versions {found} do not cover {len(self.token_ids) - self.begin} tokens")


def _check_label(label: str, began: WeightVersion, served: WeightVersion | None) -> None:
    try:
        known = served is not None and began <= WeightVersion.parse(label) <= served
    except ValueError:
        known = False
    if not known:
        raise ServerError(
            f"the server reports tokens of version {label!r}; this engine serves {served} and served {began} when the request was "
            "sent: another program updates its weights"
        )


class ServerEngine(GenerationEngine[GrowingResponse], Generic[C]):
    """Runs requests on a server; see the module's docstring. C: the client of the server's program.

    Call all methods on the event loop. Files are read in threads.
    """

    program: ClassVar[str]  # its name, in errors

    def __init__(
        self, arguments: EngineArguments, server: ServerLink, client: C, local: WeightFetcher | None = None
    ) -> None:
        """local: writes versions in full, and is closed with the engine; None: only full versions are accepted."""
        super().__init__(arguments)
        self._server, self._client, self._local = server, client, local
        self._limits = ModelLimits.of(arguments.model_path)
        self._tensors = (
            AdapterTensors(arguments.model_path, arguments.lora)
            if arguments.lora is not None
            else ModelTensors(arguments.model_path, tied=self._limits.tied, local=local)
        )
        self._eos_token_ids.update(self._limits.eos_token_ids)
        self._max_prompt = self._max_length = self._limits.max_length
        self._prefix, self._keys = uuid.uuid4().hex[:8], itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeps_prefixes = True
        self._failure: BaseException | None = None
        self._told_tokens: int | None = None  # tokens in use, by the server's last report

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        async def is_ready(url: str) -> bool:
            await self._client.connect(url)
            try:
                await self._client.served_version(limit_s=ASK_LIMIT_S)
            except ServerError:
                return False
            return True

        await self._server.start(is_ready, self._config.load_limit_s)
        await self._ask_settings()
        self._in_background(self._watch(), "watch")

    @abstractmethod
    async def _ask_settings(self) -> None:
        """Read the limits of a server that has started. Raises ConfigError if it cannot serve this run."""

    def progress(self) -> str:
        return self._server.progress()

    async def close(self) -> None:
        if self._closing:
            return
        self._closing, had_some = True, bool(self._running)
        self._fail_all(EngineUnavailable(CLOSING))
        # Abort the requests: an external server would go on generating, and our own server may take long to end
        if had_some and self._failure is None:
            with contextlib.suppress(ServerError):
                await self._client.abort(limit_s=1.0)
        await self._end_tasks()
        await self._client.close()
        await self._server.close()
        if self._local is not None:
            self._local.close()

    async def _release_devices(self) -> None:
        logger.info(
            "this %s server cannot release its memory: it is stopped, and started again when it wakes", self.program
        )
        await self._end_tasks()
        await self._server.close()

    async def _acquire_devices(self) -> None:
        await self.start()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ASK_LIMIT_S)

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.program} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Watch the server and its load until the engine fails.

        Repeatedly waits at most half a second for the server's end, then asks for its load. When the server has ended, or has not
        answered for _SILENT_LIMIT_S, the engine fails, and with it all requests in flight.
        """
        answered = self._clock.monotonic()
        while self._failure is None:
            await self._server.wait_ended(_WATCH_S)
            ended = await self._how_it_ended()
            if ended is None:
                try:
                    self._told_tokens = await self._client.used_tokens(limit_s=ASK_LIMIT_S)
                    answered = self._clock.monotonic()
                except ServerError as error:
                    self._told_tokens = None
                    ended = await self._how_it_ended()
                    if self._clock.monotonic() - answered > _SILENT_LIMIT_S:
                        ended = f"the {self.program} server has not answered for {_SILENT_LIMIT_S:g} s: {error}"
            if ended is not None:
                self.fail(ended)

    async def _how_it_ended(self) -> str | None:
        """How the server ended; None while it runs. If a child has ended, first wait: the server may end, too."""
        ended = self._server.how_it_ended()
        if ended is not None:
            await self._server.wait_ended(_ENDS_TOO_S)
            ended = self._server.how_it_ended()
        return ended

    def fail(self, why: str) -> EngineFailed:
        """Mark the engine as failed permanently, and fail all requests. Returns the error, for a caller that has to raise it."""
        error = EngineFailed(why)
        if self._failure is None and not self._closing:
            self._failure = EngineFailed(f"{why}; {self._server.log_text()}")
            logger.error("%s", self._failure)
            self._fail_all(error)
            self._version = None
        return error

    # ------------------------------------------------------------------------------------------------------- requests

    def _check(self, request: EngineRequest) -> None:
        check_params(request.params)
        check_prompt(
            request,
            vocab_size=self._limits.vocab_size,
            max_prompt=self._max_prompt,
            max_length=self._max_length,
            why=f"the model's max_position_embeddings, or {self.program}'s KV cache",
        )

    def _make(self, request: EngineRequest, since: float, future: asyncio.Future[Generated]) -> GrowingResponse:
        return GrowingResponse(request, since, future)

    def _new_key(self) -> str:
        return f"{self._prefix}-{next(self._keys)}"

    def _begin(self, pending: GrowingResponse) -> None:
        assert self._version is not None
        pending.sent()
        self._in_background(self._run(pending, pending.version or self._version), pending.key)

    async def _run(self, pending: GrowingResponse, version: WeightVersion) -> None:
        """Run one request at the server from start to end.

        Waits for the next piece, for max_wait_s at most; unblocked by the server, by an abort, or by the server's death.
        """
        params = pending.request.params
        left = msgspec.structs.replace(params, max_new_tokens=params.max_new_tokens - pending.begin)
        wanted = self._client.wanted(left, self._stop_ids(pending), str(version))
        prompt = pending.request.input_ids + pending.token_ids
        finish: FinishReason | None = None
        try:
            pieces = self._client.generate(pending.key, prompt, wanted, idle_limit_s=self._config.max_wait_s)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    self._take(pending, piece)
                    if piece.meta_info.finish_reason is not None:
                        pending.label(piece, version, version if self.keeps_versions else self._version)
                        self._take_routes(pending, piece)
                        finish = piece.meta_info.finish_reason.as_ours()
            if finish is None:
                raise ServerError("a response ended without a finish reason")
        except ServerError as error:
            await self._lost(pending, error)
        else:
            self._ended(pending, finish)

    def _stop_ids(self, pending: GrowingResponse) -> list[int]:
        params = pending.request.params
        return sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)})

    def _take(self, pending: GrowingResponse, piece: Piece) -> None:
        new = pending.take(piece)
        self._num["tokens"] += new
        if new and self._on_tokens is not None:
            self._on_tokens(new, str(pending.version if self.keeps_versions else self._version))

    def _take_routes(self, pending: GrowingResponse, last: Piece) -> None:
        """Take the experts of the response's tokens, if the program returns them. Raises ServerError."""

    def _ended(self, pending: GrowingResponse, finish: FinishReason) -> None:
        """Handle the end of a request at the server: answer it, or put it back if it was retracted."""
        pending.ended.set()
        if finish.type == "abort":
            finish = pending.natural_end(self._stop_ids(pending)) or finish
        elif finish.type == "length":
            finish = FinishReason(type="length", length=len(pending.token_ids))
        if finish.type == "abort" and pending.retracted and not pending.future.done():
            self._stopped(pending)
            self._put_back(pending)
        else:
            self._answer(pending, finish)
        self._admit()

    async def _lost(self, pending: GrowingResponse, error: ServerError) -> None:
        """Handle a request without a complete answer. If the server has died, all requests fail; otherwise only this one."""
        await asyncio.sleep(0)  # sockets may close a moment before the thread that waits for the process sees its end
        if error.status == 0:
            await self._server.wait_ended(_WATCH_S)
            if (ended := await self._how_it_ended()) is not None:
                self.fail(ended)
        pending.ended.set()
        if error.status == 0 and self._failure is None:
            with contextlib.suppress(ServerError):
                await self._client.abort(pending.key, limit_s=ASK_LIMIT_S)  # its answer is no longer read
        error_class = class_of_status(error.status)
        if refuses_content(error.status):
            self._fail(pending, RequestRefused(f"{self.program} refuses the request: {error}"))
        elif error_class is ErrorClass.PASSING:
            self._fail(pending, EngineUnavailable(str(error)))
        elif error_class is ErrorClass.PERMANENT:  # a wrong key or URL, so it refuses every request
            self._fail(pending, error)
            self.fail(
                f"{self.program} answers {error.status} ({error}); check generation.urls and generation.api_key_file"
            )
        else:
            self._fail(pending, error)
        self._admit()

    def _end_unread(self, pending: GrowingResponse) -> None:
        if not self._closing:
            self._in_background(self._abort_quietly(pending), f"abort {pending.key}")

    # ------------------------------------------------------------------------------------------------ abort and pause

    async def _abort_quietly(self, pending: GrowingResponse) -> None:
        with contextlib.suppress(EngineFailed):
            await self._abort_running(pending)

    async def _abort_running(self, pending: GrowingResponse) -> bool:
        """Return True if this abort ended the request; False if it ended otherwise, or has not ended within _ABORT_LIMIT_S.

        While SGLang is paused in place, it ends no request. The abort then takes effect only after it continues.
        """
        pending.retracted = False
        await self._end([pending], pending.key)
        if not pending.future.done() or pending.future.cancelled() or pending.future.exception() is not None:
            return False
        return pending.future.result().finish.type == "abort"

    async def _end_running(self, *, retract: bool = False) -> int:
        """End all requests at the server; returns how many were answered as aborted. Raises EngineFailed if they do not end."""
        if self._held:
            await self._let_go()
        before = self._num["aborted"]
        running = list(self._running.values())
        for pending in running:
            pending.retracted = retract
        if not await self._end(running):
            raise self.fail(f"{self.program} has not ended aborted requests within {_ABORT_LIMIT_S:g} s")
        return self._num["aborted"] - before

    async def _end(self, requests: list[GrowingResponse], key: str = "") -> bool:
        """Abort the request with this key at the server; "": all requests.

        Repeats the abort, because an abort that arrives before its request has no effect. Waits until all of `requests` have ended.
        Returns False if they have not after _ABORT_LIMIT_S. Raises EngineFailed if the server has died, and EngineUnavailable if
        the engine closes meanwhile: no task is left then that would see them end.
        """
        ends = [pending.ended for pending in requests]
        deadline = self._clock.monotonic() + _ABORT_LIMIT_S
        while left := [ended for ended in ends if not ended.is_set()]:
            if self._failure is not None:
                raise EngineFailed(str(self._failure)) from self._failure
            if self._closing:
                raise EngineUnavailable(CLOSING)
            if self._clock.monotonic() > deadline:
                return False
            with contextlib.suppress(ServerError):
                await self._client.abort(key, limit_s=ASK_LIMIT_S)
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_S):
                    await left[-1].wait()
        return True

    async def _hold(self) -> None:
        await self._client.hold(limit_s=ASK_LIMIT_S)
        self._held = True

    async def _let_go(self) -> None:
        await self._client.resume(limit_s=ASK_LIMIT_S)
        self._held = False

    # ------------------------------------------------------------------------------------------------ weights and cache

    async def verify_ahead(self, path: Path, version: WeightVersion) -> None:
        async with contextlib.AsyncExitStack() as opened:
            await self._verify(path, version, opened)

    async def _verify(self, path: Path, version: WeightVersion, opened: contextlib.AsyncExitStack) -> Path:
        """The folder for the server to load, which stays as long as `opened`. Raises WeightsRefused."""
        verified = self._tensors.verified(path, version, self._config.load_limit_s)
        with self._trace.overlapping("verify weights", kind="engine", version=str(version)):
            return await asyncio.to_thread(opened.enter_context, verified)

    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        async with contextlib.AsyncExitStack() as opened:
            folder = await self._verify(path, version, opened)
            num_aborted = await opened.enter_async_context(self._updated(version, abort_running=abort_running))
            await self._abandon_update()
            with self._trace.overlapping("load weights", kind="engine", version=str(version)):
                await self._load(folder, version)
            self._path = str(path)
        return num_aborted

    async def _abandon_update(self) -> None:
        """Close an update over the network that was left open, if the program has them."""

    async def _load(self, path: Path, version: WeightVersion) -> None:
        """Make the server load a version, and check the version that it then reports.

        Raises WeightsRefused if the server has changed nothing. After any other error its weights are unknown: the engine fails.
        """
        began = self._clock.monotonic()
        try:
            await self._client.load(str(path), str(version), limit_s=self._config.load_limit_s)
            # With several versions, requests may begin at any moment: each load gives its prefixes a name of their own
            if not (self._held or self.keeps_versions) and not await self.flushed(UPDATE_FLUSH_TRIES):
                raise ServerError("it did not flush its prefix cache: it reports running requests")
            served = await self._client.served_version(limit_s=ASK_LIMIT_S)
        except ServerError as error:
            for words, error_class in self._client.not_changed.items():
                if words in str(error):
                    raise WeightsRefused(f"{path}: {error}", error_class) from error
            took_s, limit_s = self._clock.monotonic() - began, self._config.load_limit_s
            raise self.fail(
                f"{self.program} did not load {version}, after {took_s:.0f} s of at most {limit_s:g} s "
                f"(generation.load_timeout_s): {error}"
            ) from error
        if served != str(version):
            raise self.fail(f"{self.program} loaded {version} but reports {served!r}")

    @property
    def scores_before_resume(self) -> bool:
        return self._paused and not self._held

    async def score(self, input_ids: list[int], version: WeightVersion | None = None) -> list[float]:
        self._check_alive()
        if self._held:
            raise EngineUnavailable(
                f"{self.program} cannot score while it is paused in place; use another generation.interrupt"
            )
        served = version or self._version
        name = "" if served is None else str(served)
        scores = await self._client.score(self._new_key(), input_ids, name, limit_s=self._config.load_limit_s)
        if not self._running and self._keeps_prefixes:
            await self._client.flush_cache(limit_s=ASK_LIMIT_S)
        return scores

    async def flushed(self, num_tries: int) -> bool:
        """Flush the server's prefix cache; returns whether that succeeded. Makes up to num_tries tries, because the server refuses
        while a request runs, and it may still count a request as running for a moment after the answer to it."""
        for _ in range(num_tries):
            if await self._client.flush_cache(limit_s=ASK_LIMIT_S):
                return True
            await asyncio.sleep(_FLUSH_PAUSE_S)
        return False

    async def _flush(self) -> bool:
        return await self.flushed(_FLUSH_TRIES)

    # ----------------------------------------------------------------------------------------------------------- state

    def _used_tokens(self) -> int:
        own = sum(len(pending.request.input_ids) + len(pending.token_ids) for pending in self._running.values())
        return own if self._told_tokens is None else self._told_tokens

    @property
    def failure(self) -> BaseException | None:
        return None if self._closing else self._failure
