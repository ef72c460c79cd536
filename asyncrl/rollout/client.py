"""PartialRolloutManager: assembles responses from pieces that generation servers return.

It sends one HTTP request per group member and piece. A piece has at most new_tokens_per_chunk tokens. After a full piece, or an
interruption (the server was updated; finish reason `abort`), the response continues on the same server with its tokens as prefix.
If the server is lost, stays full for long, or leaves the run, the response continues on another one that the gserver manager names.
If servers share their devices with training, responses wait for the end of training's turns; that time counts in no other limit.
All members of a group move together. Every token keeps the logprob and the weight version that its server reported.

Each request is bounded by request_timeout_s, and each response by the number of failures without a new token, so every wait ends.
While requests are outstanding, the status board shows for each server how long it has sent nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import aiohttp
import msgspec
import numpy as np
from yarl import URL

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.routes import Routes
from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass, class_of_status, classify, refuses_content
from asyncrl.protocol.generation import GenerateReply, GenerateRequest, SamplingParams
from asyncrl.protocol.manager import TRAININGS_TURN, ScheduleReply, Ticket
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import RolloutRejected, RolloutReleased
from asyncrl.rewards.trajectory import MAX_LOGPROB, OnPiece, Response
from asyncrl.runtime.background import gather_or_cancel
from asyncrl.runtime.board import StatusBoard, WaitTimeoutError
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.service_client import ServiceError
from asyncrl.runtime.services import Services

_MAX_FAILURES = 4  # consecutive losses of a server without a new token; after one more the ticket is released
_MAX_ABORTS = 256
_HEADERS = {"Content-Type": "application/json"}
_MAX_TOKEN = (1 << 31) - 1  # largest int32; the head, which knows the vocabulary, refuses ids outside it
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(GenerateReply)


class ServerChooser(Protocol):
    """Chooses another server for a ticket: the gserver manager's /schedule_request."""

    async def schedule(
        self, ticket_id: str, lost_server: str, *, lost_url: str, busy: bool = False
    ) -> ScheduleReply: ...


class Route:
    """The server of a ticket's requests. The group shares it: the first member that loses the server moves all members."""

    __slots__ = (
        "__weakref__",
        "_held_s",
        "_held_since",
        "generate_url",
        "lock",
        "moves",
        "oldest_allowed",
        "out",
        "server",
        "server_url",
        "ticket",
        "url",
    )

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.go_to(ticket.server, ticket.server_url)
        self.oldest_allowed = WeightVersion(ticket.attempt, max(0, ticket.min_version)).pack()
        self.moves = 0
        self.out: dict[str, URL] = {}  # outstanding requests and their servers; bounded by the client's slots
        self.lock = asyncio.Lock()
        self._held_s = 0.0  # in training's turns that are over
        self._held_since: float | None = None

    def go_to(self, server: str, url: str) -> None:
        self.server = server
        self.server_url = url  # the manager's exact string
        self.url = URL(url)
        self.generate_url = self.url / "generate"

    @contextlib.contextmanager
    def held(self, clock: Clock) -> Iterator[None]:
        """Training has its turn within the `with` block. The caller holds the lock."""
        self._held_since = clock.monotonic()
        try:
            yield
        finally:
            self._held_s += clock.monotonic() - self._held_since
            self._held_since = None

    def without_turns(self, now: float) -> float:
        """Return the time (monotonic seconds) less the seconds that the ticket has waited for the ends of training's turns."""
        return (now if self._held_since is None else self._held_since) - self._held_s


@dataclass
class ClientCounts:
    """Counters of the client."""

    requests: int = 0
    tokens: int = 0
    interrupted: int = 0  # pieces ended by an update
    retried: int = 0  # requests sent again to the same server
    moved: int = 0  # tickets moved to another server


class _ServerLostError(Exception):
    """The server gave no valid answer, even after short retries."""


class _ServerBusyError(_ServerLostError):
    """The server answered that it is busy, in the first try and in all short retries."""


@dataclass(frozen=True)
class Pauses:
    """Seconds between the tries of a request, and time limits of its parts."""

    retry_s: tuple[float, ...] = (0.0, 0.1, 0.4)  # on the same server: it closed the connection, or failed briefly
    # The server reports that it is busy: its queue is full, or an update takes long
    busy_s: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 1.0, 1.0)
    # Before the next try after the 1st, 2nd, ... interruption in a row that brought no new token
    empty_abort_s: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0)
    schedule_s: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 2.0)  # while no server is available; the last one repeats
    abort_limit_s: float = 2.0
    connect_limit_s: float = 5.0


class PartialRolloutManager:
    """Gets responses for a worker's tickets. All requests share one HTTP session and one limit of outstanding requests."""

    def __init__(
        self,
        chooser: ServerChooser,
        services: Services,
        *,
        new_tokens_per_chunk: int,
        request_timeout_s: float,
        turn_limit_s: float,
        max_requests: int,
        with_routes: bool = False,
        pauses: Pauses | None = None,
    ) -> None:
        """Call this on the event loop that uses the object. turn_limit_s: of the wait for the end of one of training's turns.
        with_routes: the servers return routes (train.routes), and an answer without them is not valid."""
        self._chooser = chooser
        self._board, self._logger, self._clock = services.board, services.logger, services.clock
        self._chunk = new_tokens_per_chunk
        self._timeout_s, self._turn_limit_s = request_timeout_s, turn_limit_s
        self._with_routes = with_routes
        self._pauses = pauses or Pauses()
        self._slots = asyncio.Semaphore(max_requests)
        self._waits = _ServerWaits(self._board, request_timeout_s)
        self._request_numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self._limits: dict[str, set[asyncio.Timeout]] = {}  # of outstanding requests, by server URL; bounded by _slots
        self._routes: weakref.WeakValueDictionary[str, Route] = weakref.WeakValueDictionary()  # by ticket
        self.counts = ClientCounts()
        self._session = open_session(
            max_connections=max_requests + 8,  # max_requests for /generate, each with one of _slots; 8 for aborts
            timeout=aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=self._pauses.connect_limit_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        """Cancel outstanding aborts and close the connections. All responses must have ended or been cancelled before."""
        for task in self._aborts:
            task.cancel()
        if self._aborts:
            await asyncio.wait(self._aborts)
        await self._session.close()

    async def generate(
        self, route: Route, inputs: Sequence[Sequence[int]], sampling: SamplingConfig, stop_token_ids: Sequence[int]
    ) -> list[Response]:
        """Return one response for each of the inputs, in order.

        Raises RolloutReleased (`stale_server`, `server_lost`, `servers_busy`, `no_server`, `long_turn`) or RolloutRejected
        (`generation_refused`, `empty_response`, `bad_logprobs`, `bad_tokens`). The first failure cancels the other responses.
        Cancellation aborts the requests on their servers.
        """
        return await gather_or_cancel(
            [self.respond(route, input_ids, sampling, stop_token_ids) for input_ids in inputs]
        )

    async def respond(
        self,
        route: Route,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        on_piece: OnPiece | None = None,
    ) -> Response:
        """Return one response: request pieces until EOS or max_new_tokens. Raises the same errors as `generate`. on_piece is called
        after each piece with a token, and returns True to end the response.

        Waits for the ticket's server or, after its loss, for the manager to name another; unblocked by the end of a piece, an
        update's interruption, or request_timeout_s.
        """
        if sampling.max_new_tokens < 1:  # of an agent of the user's: the config allows no such value
            raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
        self._routes[route.ticket.ticket_id] = route
        response = Response(list(input_ids))
        failures = aborts = 0  # since the last new token
        busy_since = 0.0  # time of the first busy answer since the last new token, without training's turns; 0: none
        while (missing := sampling.max_new_tokens - len(response.output_ids)) > 0:
            asked = min(missing, self._chunk)
            moves = route.moves
            params = SamplingParams(
                max_new_tokens=asked,
                temperature=0.0 if sampling.greedy else sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=list(stop_token_ids),
            )
            try:
                priority = int(bool(response.output_ids))  # a response that has begun goes before waiting requests
                routes_from = len(response.routes or ())
                reply = await self._request(
                    route, response.input_ids + response.output_ids, params, priority, routes_from
                )
                got = _add_piece(response, reply, asked, with_routes=self._with_routes)
                reason = reply.meta_info.finish_reason.type
                if reason == "abort" and not got and aborts == len(self._pauses.empty_abort_s):
                    raise _ServerLostError(f"interrupted {aborts} times in a row without a token")
            except _ServerBusyError as error:
                now = route.without_turns(self._clock.monotonic())
                busy_since = busy_since or now
                if now - busy_since > self._timeout_s:
                    raise RolloutReleased(
                        "servers_busy", f"no server took a request within {self._timeout_s:g} s: {error}"
                    ) from error
                await self._move(route, moves, 0, error)
                continue
            except _ServerLostError as error:
                failures += 1
                await self._move(route, moves, failures, error)
                continue
            if got:
                failures = aborts = 0
                busy_since = 0.0
                self.counts.tokens += got
                if response.oldest_version < route.oldest_allowed:
                    self._refuse_stale(route, response)
                if on_piece is not None and on_piece(response):
                    break
            if reason == "abort":
                self.counts.interrupted += 1
                if not got:
                    await asyncio.sleep(self._pauses.empty_abort_s[aborts])
                    aborts += 1
            elif reason == "stop" or got < asked:  # too few tokens and no EOS: the server's context is full
                response.finished = reason == "stop"
                break
        if not response.output_ids:
            raise RolloutRejected("empty_response", f"{route.server} generated no token")
        return response

    def _refuse_stale(self, route: Route, response: Response) -> NoReturn:
        found, allowed = WeightVersion.unpack(response.oldest_version), WeightVersion.unpack(route.oldest_allowed)
        raise RolloutReleased(
            "stale_server", f"{route.server} sampled with version {found}; the ticket allows {allowed} or newer"
        )

    async def _request(
        self, route: Route, input_ids: list[int], params: SamplingParams, priority: int, routes_from: int
    ) -> GenerateReply:
        """POST /generate, with short retries. Raises _ServerLostError, or RolloutRejected if the server refuses the prompt."""
        delays_s = iter(self._pauses.retry_s)
        busy_delays_s = iter(self._pauses.busy_s)
        async with self._slots:
            while True:
                server, server_url, url, generate_url = route.server, route.server_url, route.url, route.generate_url
                # The final dot ensures that no id is a prefix of another (SGLang aborts by prefix). Each try has a new id.
                rid = f"{route.ticket.ticket_id}.{next(self._request_numbers)}."
                request = GenerateRequest(
                    input_ids=input_ids, sampling_params=params, rid=rid, priority=priority, routes_from=routes_from
                )
                body = _ENCODER.encode(request)
                status, failure = 0, ""
                route.out[rid] = url
                try:
                    status, content = await self._post(server, server_url, generate_url, body)
                except TimeoutError as error:
                    raise _ServerLostError(f"no answer: {error!r}") from error
                except aiohttp.ClientConnectorError as error:
                    if classify(error) is ErrorClass.PERMANENT:
                        raise  # this worker's own error, such as a lack of file descriptors: the worker must end with it
                    raise _ServerLostError(f"not reachable: {error!r}") from error
                except (aiohttp.ClientError, ConnectionError) as error:
                    failure = repr(error)
                except asyncio.CancelledError:
                    self._abort_soon(url, rid)
                    raise
                finally:
                    del route.out[rid]
                if status == 200:
                    try:
                        return _DECODER.decode(content)
                    except DECODE_ERRORS as error:
                        raise _ServerLostError(f"the answer is not a valid GenerateReply: {error}") from error
                if status:
                    failure = f"{status} {content[:500].decode(errors='replace')}"
                if refuses_content(status):
                    raise RolloutRejected("generation_refused", f"{server}: {failure}")
                if status and class_of_status(status) is ErrorClass.PERMANENT:
                    # A wrong key or address: not the prompt's fault
                    raise _ServerLostError(f"refuses requests: {failure}")
                busy = bool(status) and class_of_status(status) is ErrorClass.PASSING
                delay_s = next(busy_delays_s if busy else delays_s, None)
                if delay_s is None:
                    raise (_ServerBusyError if busy else _ServerLostError)(failure)
                self.counts.retried += 1
                await asyncio.sleep(delay_s)

    def move(self, ticket_id: str, server: str, server_url: str) -> bool:
        """Move a ticket's responses to another server because its server leaves the run. Returns False if they have moved
        already, or the ticket has no responses here.

        Outstanding requests are aborted, so the old server answers them with their tokens so far. A repeated call aborts again the
        requests that are still at another server.
        """
        route = self._routes.get(ticket_id)
        if route is None:
            return False
        new = route.server_url != server_url
        if new:
            route.go_to(server, server_url)
            route.moves += 1
            self.counts.moved += 1
        for rid, url in route.out.items():
            if url != route.url:
                self._abort_soon(url, rid)
        return new

    def leave(self, server_urls: Sequence[str]) -> int:
        """End all outstanding requests to these dead servers. Their responses continue on other servers.

        Returns the number of ended requests.
        """
        limits = [limit for url in server_urls for limit in self._limits.get(url, ()) if not limit.expired()]
        for limit in limits:
            limit.reschedule(0.0)
        return len(limits)

    async def _post(self, server: str, server_url: str, url: URL, body: bytes) -> tuple[int, bytes]:
        """Raises _ServerLostError if `leave` ends the request."""
        self.counts.requests += 1
        self._waits.begin(server)
        limits = self._limits.setdefault(server_url, set())
        try:
            async with asyncio.timeout(None) as limit:
                limits.add(limit)
                async with self._session.post(url, data=body, headers=_HEADERS) as answer:
                    return answer.status, await answer.read()
        except TimeoutError:
            if limit.expired():
                raise _ServerLostError("the gserver manager reports that the server is dead") from None
            raise
        finally:
            self._waits.end(server)
            limits.discard(limit)
            if not limits:
                self._limits.pop(server_url, None)

    # ---------------------------------------------------------------------------------------------------- losing a server

    async def _move(self, route: Route, moves: int, failures: int, error: _ServerLostError) -> None:
        """Ask the manager for another server, unless another member of the group has done so since the request was sent.

        The manager may name the same server again if it is healthy. Waits for /schedule_request, for at most request_timeout_s;
        unblocked by a server becoming healthy. On shared devices it waits for the end of training's turn first.
        """
        if failures > _MAX_FAILURES:
            raise RolloutReleased("server_lost", f"{route.server}, after {failures} failures in a row: {error}")
        async with route.lock:
            if route.moves != moves:
                return
            lost, busy = route.server, isinstance(error, _ServerBusyError)
            try:
                reply = await self._named_server(route, busy)
            except WaitTimeoutError:
                raise RolloutReleased("no_server", f"{lost} was lost ({error}), and no other became healthy") from error
            except ServiceError as refusal:
                raise RolloutReleased("server_lost", f"{lost} was lost ({error}); {refusal}") from error
            route.go_to(reply.server, reply.server_url)
            route.moves += 1
            if busy and reply.server == lost:
                return  # all servers are busy: keep waiting for this one
            self.counts.moved += 1
        what = "left" if busy else "lost"
        self._logger.warning(
            "ticket %s: %s %s (%s), continues at %s", route.ticket.ticket_id, what, lost, error, route.server
        )
        if failures > 1:
            await asyncio.sleep(self._pauses.schedule_s[min(failures, len(self._pauses.schedule_s)) - 1])

    async def _named_server(self, route: Route, busy: bool) -> ScheduleReply:
        """Wait until the manager names a server: at most request_timeout_s without a turn of training, and turn_limit_s in each.
        A ticket waits in at most 1 + eta turns: no step begins without a group that would become too old."""
        while True:
            asked = self._ask_for_server(route, busy, in_turn=False)
            reply = await self._board.bounded(
                asked, what="another server", on="gserver manager", limit_s=self._timeout_s
            )
            if reply.server:
                return reply
            with route.held(self._clock):
                reply = await self._after_turn(route, busy)
            if reply.server:
                return reply

    async def _after_turn(self, route: Route, busy: bool) -> ScheduleReply:
        asked = self._ask_for_server(route, busy, in_turn=True)
        try:
            return await self._board.bounded(
                asked, what="the end of training's turn", on="master", limit_s=self._turn_limit_s
            )
        except WaitTimeoutError as error:
            raise RolloutReleased("long_turn", str(error)) from error

    async def _ask_for_server(self, route: Route, busy: bool, *, in_turn: bool) -> ScheduleReply:
        """Ask until the manager names a server, or until training's turn begins. in_turn: until it ends."""
        for delay_s in itertools.chain(self._pauses.schedule_s, itertools.repeat(self._pauses.schedule_s[-1])):
            reply = await self._chooser.schedule(
                route.ticket.ticket_id, route.server, lost_url=route.server_url, busy=busy
            )
            if reply.server or (reply.reason == TRAININGS_TURN) is not in_turn:
                return reply
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable")

    def _abort_soon(self, url: URL, rid: str) -> None:
        """Abort a request that nothing waits for any more, without waiting for the result. Best effort: errors are ignored."""
        if len(self._aborts) >= _MAX_ABORTS or self._session.closed:
            return
        task = asyncio.get_running_loop().create_task(self._abort(url, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, url: URL, rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=self._pauses.abort_limit_s)
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, ConnectionError):
            body = _ENCODER.encode({"rid": rid})
            async with self._session.post(
                url / "abort_request", data=body, headers=_HEADERS, timeout=timeout
            ) as answer:
                await answer.read()


# ----------------------------------------------------------------------------------------------------------------- pieces


@functools.lru_cache(maxsize=64)
def _packed(version: str) -> int:
    return WeightVersion.parse(version).pack()


def _add_piece(response: Response, reply: GenerateReply, asked: int, *, with_routes: bool) -> int:
    """Check a reply and append its tokens; returns their number. Raises _ServerLostError if the reply is inconsistent, and
    RolloutRejected if it is consistent but has an impossible logprob or token id."""
    output_ids, meta = reply.output_ids, reply.meta_info
    got = len(output_ids)
    if len(meta.output_token_logprobs) != got or got > asked:
        raise _ServerLostError(
            f"{got} tokens with {len(meta.output_token_logprobs)} logprobs; at most {asked} were requested"
        )
    logprobs = []
    for logprob, token, _ in meta.output_token_logprobs:
        if logprob is None or not -math.inf < logprob <= MAX_LOGPROB:
            raise RolloutRejected("bad_logprobs", f"the server sampled token {token} with logprob {logprob}")
        logprobs.append(logprob)
    if got and not 0 <= min(output_ids) <= max(output_ids) <= _MAX_TOKEN:
        raise RolloutRejected("bad_tokens", f"the server sampled ids from {min(output_ids)} to {max(output_ids)}")
    runs: list[tuple[int, int]] = []
    end = 0
    try:
        for span in meta.weight_versions:
            if span.start != end or span.end < span.start:
                break
            end = span.end
            if span.end > span.start:
                runs.append((_packed(span.version), span.end - span.start))
    except ValueError as error:
        raise _ServerLostError(str(error)) from error
    if end != got:
        raise _ServerLostError(f"the weight versions {meta.weight_versions} do not cover {got} tokens")
    routes = _routes_of(response, meta.routed_experts, got) if with_routes and got else response.routes
    response.add_piece(output_ids, logprobs, runs)
    response.routes = routes
    return got


def _routes_of(response: Response, encoded: bytes, got: int) -> Routes:
    """The routes of the response with a piece of `got` tokens. Raises _ServerLostError if there is not one for each token."""
    try:
        routes = Routes.decode(np.frombuffer(encoded, np.uint8))
        if response.routes is not None:
            routes = response.routes.joined(routes, start=len(response.routes))
    except ValueError as error:
        raise _ServerLostError(f"the routed experts are not valid: {error}") from error
    if len(routes) != (computed := len(response.input_ids) + len(response.output_ids) + got - 1):
        raise _ServerLostError(f"{len(routes)} tokens have routed experts; {computed} were computed")
    return routes


class _ServerWaits:
    """One named wait per server with outstanding requests. It restarts at every answer, so its age shows a stuck server.

    limit_s: time limit of each request, and therefore the maximum age of a wait.
    """

    def __init__(self, board: StatusBoard, limit_s: float) -> None:
        self._board = board
        self._limit_s = limit_s
        self._out: dict[str, int] = {}
        self._open: dict[str, contextlib.AbstractContextManager[None]] = {}

    def begin(self, server: str) -> None:
        out = self._out.get(server, 0)
        self._out[server] = out + 1
        if not out:
            self._enter(server)

    def end(self, server: str) -> None:
        self._open.pop(server).__exit__(None, None, None)
        self._out[server] -= 1
        if self._out[server]:
            self._enter(server)
        else:
            del self._out[server]

    def _enter(self, server: str) -> None:
        wait = self._board.showing("the next piece", on=server, limit_s=self._limit_s)
        wait.__enter__()
        self._open[server] = wait
