"""The manager's HTTP side: decodes requests, calls the ledger, and answers long polls.

consumes: requests of rollout workers, of the master and of users; calls of `changed()` after each change of the ledger or servers.
produces: tickets, views of the ledger, results of evaluations, the desired number of servers.
waits for: admission (/allocate_rollout), a newer ledger (/report), the end of an evaluation (/evaluate): each for the request's
wait_s, at most MAX_WAIT_S; name resolve (/scale, /servers).
unblocked by: any change; the reply of name resolve. No handler blocks: between two awaits only the ledger's own computations run.

If a client disconnects while it waits, its request is removed. If it disconnects while its answer is sent, its tickets appear in
no heartbeat, and the ledger takes them back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from asyncrl.manager.fleet import Fleet
from asyncrl.manager.ledger import MAX_COUNT, Ledger, StaleAttemptError, UnreachedError
from asyncrl.manager.scaling import ServerTarget, servers_reply
from asyncrl.protocol.manager import (
    AllocateReply,
    AllocateRequest,
    EvaluateReply,
    EvaluateRequest,
    FinishReply,
    FinishRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LedgerView,
    MasterReport,
    ScheduleReply,
    ScheduleRequest,
    VersionReply,
)
from asyncrl.protocol.scaling import ScaleRequest, ServersReply
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import NameResolveError

Message = TypeVar("Message", bound=msgspec.Struct)
Reply = msgspec.Struct
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_WAIT_S = 60.0
_MAX_WAITING = 4096  # pending allocate requests; further ones are refused with 503
MAX_BODY_BYTES = 64 << 20
_MAX_NAME = 200
_COALESCE_S = 0.01  # if a /report had to wait for a change, it collects further changes for at least this long
_VIEW_SHARE = 0.05  # it collects for longer if views take long: at most this share of the time goes into making views
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_encode = msgspec.json.Encoder().encode
_FINAL_REFUSALS = ("superseded", "expired")  # waiting does not help


@dataclass(eq=False)
class _Waiting:
    """A pending allocate request: no ticket was admitted for it yet."""

    request: AllocateRequest
    answer: asyncio.Future[AllocateReply]
    num_clients: int = 0  # connections that wait for the answer


class ManagerService:
    """The handlers. One event loop; every handler is atomic between its awaits."""

    def __init__(
        self,
        ledger: Ledger,
        target: ServerTarget,
        fleet: Fleet,
        clock: Clock,
        *,
        newest_attempt: Callable[[], Awaitable[int]],
    ) -> None:
        """newest_attempt: returns the newest attempt that the run has begun; 0: not known now."""
        self.ledger = ledger
        self._target = target
        self._newest_attempt = newest_attempt
        self._clock = clock
        self._waiting: dict[tuple[str, str, str], _Waiting] = {}  # in order of arrival
        self.num_waiting = 0  # connections: more than requests if a request was sent twice
        self._change: asyncio.Future[None] | None = None
        self._told_revision = ledger.revision  # the newest revision that waiting handlers were notified of
        self._view_took_s = 0.0
        self._fleet = fleet
        self.refused: Counter[str] = Counter()  # answers without a ticket, by reason
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(ledger, self, fleet))
        self._routes: dict[str, tuple[str, Handler]] = {
            "/allocate_rollout": ("POST", _typed(AllocateRequest, self.allocate)),
            "/finish_rollout": ("POST", _typed(FinishRequest, self.finish)),
            "/schedule_request": ("POST", _typed(ScheduleRequest, self.schedule)),
            "/heartbeat": ("POST", _typed(HeartbeatRequest, self.heartbeat)),
            "/report": ("POST", _typed(MasterReport, self.report)),
            "/evaluate": ("POST", _typed(EvaluateRequest, self.evaluate)),
            "/scale": ("POST", _typed(ScaleRequest, self.scale)),
            "/servers": ("GET", self._servers),
            "/get_model_version": ("GET", self._model_version),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    # -------------------------------------------------------------------------------------------------------- life

    def close(self) -> None:
        """Answer all pending allocate requests."""
        for waiting in self._waiting.values():
            waiting.answer.set_result(AllocateReply(tickets=[], refusal="not_ready", finished=self.ledger.finished))
        self._waiting.clear()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Route a request to its handler."""
        method, handler = self._routes.get(request.path, ("", None))
        if handler is None:
            return web.Response(status=404, text=f"there is no {request.path}\n")
        if request.method != method:
            return web.Response(status=405, text=f"use {method} for {request.path}\n", headers={"Allow": method})
        return await handler(request)

    def changed(self) -> None:
        """The ledger or the servers have changed, or time has passed: answer the requests that wait for a change."""
        self._admit_waiting(len(self._waiting))
        self._tell_of_change()

    # ---------------------------------------------------------------------------------------------------- handlers

    async def allocate(self, request: AllocateRequest) -> AllocateReply:
        """Grant tickets as soon as one is admitted, in turn with the other pending requests."""
        _check_name(request.request_id, "request_id")
        _check_name(request.worker, "worker")
        _check_name(request.incarnation, "incarnation")
        if not 1 <= request.count <= MAX_COUNT:
            raise ValueError(f"count is {request.count}; ask for 1 to {MAX_COUNT} tickets")
        wait_s = _limited(request.wait_s)
        self._admit_room()  # pending requests came earlier
        (reply,) = self.ledger.allocate([request], self._clock.monotonic())
        self._tell_of_change()
        if not _settled(reply) and wait_s > 0.0:
            reply = await self._wait_for_tickets(request, wait_s)
        if not reply.tickets:
            self.refused[reply.refusal] += 1
        return reply

    async def finish(self, request: FinishRequest) -> FinishReply:
        _check_name(request.worker, "worker")
        reply = self.ledger.finish(request, self._clock.monotonic())
        self._after_request()
        return reply

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        reply = self.ledger.schedule(request, self._clock.monotonic())
        self._after_request()
        return reply

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        _check_name(request.worker, "worker")
        _check_name(request.incarnation, "incarnation")
        reply = self.ledger.heartbeat(request, self._clock.monotonic())
        self._after_request()
        return reply

    async def report(self, report: MasterReport) -> LedgerView:
        """Return the ledger once it is newer than the master's view, or after wait_s."""
        newest_attempt = None
        if report.attempt > self.ledger.attempt and not (newest_attempt := await self._newest_attempt()):
            raise web.HTTPServiceUnavailable(text="name resolve does not have the current attempt now; retry\n")
        until = self._clock.monotonic() + _limited(report.wait_s)
        # a revision that this ledger has not reached yet comes from the previous manager
        known = report.after_revision if report.after_revision <= self.ledger.revision else -1
        self.ledger.report(report, self._clock.monotonic(), newest_attempt=newest_attempt)
        self._fleet.take_turn(report.turn, WeightVersion(report.attempt, report.trained_version))
        self.changed()
        waited = False
        while self.ledger.revision <= known and self._clock.monotonic() < until:
            await self._next_change(until)
            waited = True
        if waited:
            await asyncio.sleep(max(_COALESCE_S, self._view_took_s / _VIEW_SHARE))
        now = self._clock.monotonic()
        view = self.ledger.view()
        self._view_took_s = self._clock.monotonic() - now
        damaged = "" if self._fleet.damaged is None else str(self._fleet.damaged)
        return msgspec.structs.replace(view, damaged=damaged, devices_free=self._fleet.devices_free)

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Return the evaluation's progress once it is done, or after wait_s."""
        until = self._clock.monotonic() + _limited(request.wait_s)
        _check_name(request.eval_id, "eval_id")
        reply = self.ledger.evaluate(request)
        self.changed()
        while not reply.done and self._clock.monotonic() < until:
            await self._next_change(until)
            reply = self.ledger.evaluate(request)
        return reply

    # -------------------------------------------------------------------------------------------------------- waits

    async def _wait_for_tickets(self, request: AllocateRequest, wait_s: float) -> AllocateReply:
        """Wait until `_admit_waiting` has answered this request. After wait_s, return an answer without tickets, with the reason of
        the refusal. A request that is sent twice gets the same answer twice."""
        key = (request.worker, request.incarnation, request.request_id)
        waiting = self._waiting.get(key)
        if waiting is None:
            if self.num_waiting >= _MAX_WAITING:
                raise web.HTTPServiceUnavailable(text=f"{_MAX_WAITING} requests are pending already; retry later")
            waiting = self._waiting[key] = _Waiting(request, asyncio.get_running_loop().create_future())
        waiting.num_clients += 1
        self.num_waiting += 1
        try:
            await asyncio.wait({waiting.answer}, timeout=wait_s)
        finally:
            waiting.num_clients -= 1
            self.num_waiting -= 1
            if not waiting.num_clients and self._waiting.get(key) is waiting:
                del self._waiting[key]
        if waiting.answer.done():
            return waiting.answer.result()
        refusal = self.ledger.refusal(self._clock.monotonic())
        return AllocateReply(tickets=[], refusal=refusal, finished=self.ledger.finished)

    def _after_request(self) -> None:
        """Like `changed`, after a request, and cheaper: no server has changed and no time has passed. Try only as many pending
        allocate requests as there is now room for, and wake the other handlers only if the ledger has changed."""
        self._admit_room()
        if self.ledger.revision != self._told_revision:  # most heartbeats change nothing
            self._tell_of_change()

    def _admit_room(self) -> None:
        if self._waiting and (room := self.ledger.room(self._clock.monotonic())):
            self._admit_waiting(room)

    def _admit_waiting(self, most: int) -> None:
        """Grant the admissible tickets to the first `most` pending requests, in turn."""
        first = list(itertools.islice(self._waiting.items(), most))
        if not first:
            return
        replies = self.ledger.allocate([waiting.request for _, waiting in first], self._clock.monotonic())
        for (key, waiting), reply in zip(first, replies, strict=True):
            if _settled(reply):
                del self._waiting[key]
                waiting.answer.set_result(reply)

    def _tell_of_change(self) -> None:
        self._told_revision = self.ledger.revision
        if self._change is not None:
            if not self._change.done():
                self._change.set_result(None)
            self._change = None

    async def _next_change(self, until: float) -> None:
        """Wait for the next change of the ledger or the servers, at most until this time (monotonic seconds)."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._change}, timeout=max(0.0, until - self._clock.monotonic()))

    # ----------------------------------------------------------------------------------------------------- for people

    async def scale(self, request: ScaleRequest) -> ServersReply:
        """Set the desired number of generation servers. The launcher starts and stops servers after this reply."""
        with _name_resolve_may_fail():
            await self._target.set(request.generation)
        return await self._states()

    async def _states(self) -> ServersReply:
        with _name_resolve_may_fail():
            target = await self._target.get()
        return servers_reply(target, self.ledger.servers.views())

    async def _servers(self, request: web.BaseRequest) -> web.StreamResponse:
        return _Json(await self._states())

    async def _model_version(self, request: web.BaseRequest) -> web.StreamResponse:
        ledger = self.ledger
        return _Json(
            VersionReply(
                trained_version=ledger.trained_version,
                served_version=ledger.served_version,
                servers=ledger.servers.views(),
            )
        )

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")


@contextlib.contextmanager
def _name_resolve_may_fail() -> Iterator[None]:
    """Answer 503 if name resolve does not answer."""
    try:
        yield
    except NameResolveError as error:
        raise web.HTTPServiceUnavailable(text=f"name resolve does not answer: {error}; retry\n") from error


def _typed(kind: type[Message], handle: Callable[[Message], Awaitable[Reply]]) -> Handler:
    """Return a handler of one message type. It answers 400 with the reason for a malformed message, and 409 for an attempt that
    is over or for an attempt or version that the run cannot have reached."""
    decoder = msgspec.json.Decoder(kind)

    async def run(request: web.BaseRequest) -> web.StreamResponse:
        content = request.content
        body = content.read_nowait() if content.is_eof() else await request.read()  # a small body has arrived in full
        try:
            return _Json(await handle(decoder.decode(body)))
        except (StaleAttemptError, UnreachedError) as error:
            return web.Response(status=409, text=f"{error}\n")
        except (ValueError, RecursionError) as error:  # includes msgspec's errors, which name the field
            return web.Response(status=400, text=f"{kind.__name__}: {error}\n")

    return run


def _settled(reply: AllocateReply) -> bool:
    """Whether the reply is final: waiting longer cannot improve it."""
    return bool(reply.tickets) or reply.finished or reply.refusal in _FINAL_REFUSALS


class _Json(web.StreamResponse):
    """A message as an answer: status 200, two headers and the body, in one write.

    aiohttp's own responses build a table of headers for each answer. That costs more than computing and encoding the answer here.
    """

    def __init__(self, message: msgspec.Struct) -> None:
        super().__init__()
        self._message = message

    async def prepare(self, request: web.BaseRequest) -> None:
        self._keep_alive = request.keep_alive
        body = _encode(self._message)
        connection = b"" if self._keep_alive else b"Connection: close\r\n"
        await request.writer.write_eof(b"%b%bContent-Length: %d\r\n\r\n%b" % (_HEAD, connection, len(body), body))

    async def write_eof(self, data: bytes = b"") -> None:
        """No-op: `prepare` has sent everything."""


def _check_name(value: str, field: str) -> None:
    if not value or len(value) > _MAX_NAME:
        raise ValueError(f"{field} has {len(value)} characters; use 1 to {_MAX_NAME}")


def _limited(wait_s: float) -> float:
    if not 0.0 <= wait_s < float("inf"):
        raise ValueError(f"wait_s is {wait_s}; use a number of seconds, 0 or more")
    return min(wait_s, MAX_WAIT_S)


class _Metrics:
    """Prometheus metrics, read from the ledger and the fleet on each request."""

    def __init__(self, ledger: Ledger, service: ManagerService, fleet: Fleet) -> None:
        self._ledger, self._service, self._fleet = ledger, service, fleet

    def collect(self) -> Iterator[Metric]:
        ledger = self._ledger
        for name, text, value in (
            ("live", "train tickets granted and not yet consumed, rejected or released", ledger.num_live),
            ("running", "train tickets with a running rollout", ledger.num_running),
            ("stored", "train tickets in transit, stored or in a train step", ledger.num_stored),
            ("running_evals", "evaluation tickets with a running rollout", ledger.num_evals_running),
            ("waiting_requests", "allocate requests that wait for admission", self._service.num_waiting),
            ("reissue_queue", "prompts that wait to be issued again", ledger.num_again),
            ("trained_version", "newest version the trainer has produced", ledger.trained_version),
            ("served_version", "newest version that servers serve", ledger.served_version),
        ):
            yield GaugeMetricFamily(f"asyncrl_manager_{name}", text, value=value)
        refused = {(reason,): count for reason, count in self._service.refused.items()}
        lengths = {(reason, str(1 << bits)): count for (reason, bits), count in ledger.rejected_lengths.items()}
        seconds = {(server,): spent for server, spent in self._fleet.update_seconds.items()}
        servers = ledger.servers.servers
        views = ledger.servers.views()
        states = {(view.server, view.state): 1 for view in views}
        running = {(view.server,): view.running for view in views}
        tokens = {
            (view.server,): servers[view.server].used_tokens + servers[view.server].promised_tokens for view in views
        }
        promised = "tokens the server last reported, plus tokens expected of groups assigned since"
        families: tuple[tuple[Any, str, str, list[str], Mapping[Any, float]], ...] = (
            (CounterMetricFamily, "tickets", "tickets by event and reason", ["event", "reason"], ledger.counters),
            (CounterMetricFamily, "refused", "answers without a ticket", ["reason"], refused),
            (
                CounterMetricFamily,
                "rejected_responses",
                "responses of rejected groups, by length",
                ["reason", "below"],
                lengths,
            ),
            (GaugeMetricFamily, "server_state", "1 for the server's current state", ["server", "state"], states),
            (GaugeMetricFamily, "server_running", "groups running on the server", ["server"], running),
            (GaugeMetricFamily, "server_tokens", promised, ["server"], tokens),
            (CounterMetricFamily, "updates", "weight updates", ["event", "server"], self._fleet.counters),
            (CounterMetricFamily, "update_seconds", "seconds spent in successful updates", ["server"], seconds),
        )
        for kind, name, text, labels, values in families:
            family = kind(f"asyncrl_manager_{name}", text, labels=labels)
            for of_labels, number in sorted(values.items()):
                family.add_metric(of_labels, number)
            yield family
