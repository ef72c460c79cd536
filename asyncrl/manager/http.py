"""The manager's HTTP side: decodes, asks the ledger, and lets answers wait instead of being polled.

consumes: requests of rollout workers and of the master; `changed()` from whoever changes the ledger or the servers.
produces: tickets, views of the ledger, results of evaluations.
waits for: admission (/allocate_rollout), a newer ledger (/report), the end of an evaluation (/evaluate): each for as long as
the request says, at most MAX_WAIT_S.
unblocked by: any change. Nothing here blocks: between two awaits only the ledger's own computations run.

A client that goes away while it waits is taken off the list. One that goes away while it is being answered holds tickets that
no heartbeat lists: the ledger takes those back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from asyncrl.manager.ledger import MAX_COUNT, Ledger, StaleAttemptError
from asyncrl.messages import (
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
from asyncrl.runtime.clock import Clock, SystemClock

Message = TypeVar("Message", bound=msgspec.Struct)
Reply = msgspec.Struct

MAX_WAIT_S = 60.0
_MAX_WAITING = 4096  # allocate requests that wait; more are refused with 503
_MAX_BODY_BYTES = 64 << 20
_MAX_NAME = 200
_COALESCE_S = 0.01  # an answer that waited takes in what changes this shortly after: no message per finished rollout
_FINAL_REFUSALS = ("superseded", "expired")  # waiting does not help


class FleetMetrics(Protocol):
    """What /metrics shows of the updates of servers."""

    counters: Counter[tuple[str, str]]  # (what, server) -> how often
    update_seconds: defaultdict[str, float]  # server -> seconds spent in updates that succeeded


class ManagerService:
    """The handlers. One event loop; every handler is atomic between its awaits."""

    def __init__(self, ledger: Ledger, *, clock: Clock | None = None, fleet: FleetMetrics | None = None) -> None:
        self.ledger = ledger
        self._clock = clock or SystemClock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[AllocateRequest, asyncio.Future[AllocateReply]]] = {}
        self._change: asyncio.Future[None] | None = None
        self._refused: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(_Metrics(ledger, self, fleet))
        self._runner: web.AppRunner | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def refused(self) -> Counter[str]:
        """Answers without a ticket, by reason."""
        return self._refused

    # -------------------------------------------------------------------------------------------------------- life

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/allocate_rollout", _typed(AllocateRequest, self.allocate))
        app.router.add_post("/finish_rollout", _typed(FinishRequest, self.finish))
        app.router.add_post("/schedule_request", _typed(ScheduleRequest, self.schedule))
        app.router.add_post("/heartbeat", _typed(HeartbeatRequest, self.heartbeat))
        app.router.add_post("/report", _typed(MasterReport, self.report))
        app.router.add_post("/evaluate", _typed(EvaluateRequest, self.evaluate))
        app.router.add_get("/get_model_version", self._model_version)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def start(self, host: str) -> str:
        """Bind a free port; returns the URL to publish."""
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        port = self._runner.addresses[0][1]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_result(AllocateReply(tickets=[], refusal="not_ready", finished=self.ledger.finished))
        if self._runner is not None:
            await self._runner.cleanup()

    def changed(self) -> None:
        """The ledger, the servers or the time have changed: answer those who wait for that."""
        self._admit_waiting()
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        self._change = None

    # ---------------------------------------------------------------------------------------------------- handlers

    async def allocate(self, request: AllocateRequest) -> AllocateReply:
        """Tickets as soon as one is admitted, in turn with whoever else waits."""
        _check_name(request.request_id, "request_id")
        _check_name(request.worker, "worker")
        _check_name(request.incarnation, "incarnation")
        if not 1 <= request.count <= MAX_COUNT:
            raise ValueError(f"count is {request.count}; ask for 1 to {MAX_COUNT} tickets")
        wait_s = _limited(request.wait_s)
        if len(self._waiting) >= _MAX_WAITING:
            raise web.HTTPServiceUnavailable(text=f"{_MAX_WAITING} requests wait already")
        number = next(self._numbers)
        answer: asyncio.Future[AllocateReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (request, answer)
        try:
            self.changed()
            if not answer.done():
                await asyncio.wait({answer}, timeout=wait_s)
            if answer.done():
                return answer.result()
            refusal = self.ledger.refusal(self._clock.monotonic())
            self._refused[refusal] += 1
            return AllocateReply(tickets=[], refusal=refusal, finished=self.ledger.finished)
        finally:
            del self._waiting[number]

    async def finish(self, request: FinishRequest) -> FinishReply:
        _check_name(request.worker, "worker")
        reply = self.ledger.finish(request, self._clock.monotonic())
        self.changed()
        return reply

    async def schedule(self, request: ScheduleRequest) -> ScheduleReply:
        reply = self.ledger.schedule(request, self._clock.monotonic())
        self.changed()
        return reply

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        _check_name(request.worker, "worker")
        _check_name(request.incarnation, "incarnation")
        reply = self.ledger.heartbeat(request, self._clock.monotonic())
        self.changed()
        return reply

    async def report(self, report: MasterReport) -> LedgerView:
        """The ledger, once it is newer than the master's, or after wait_s."""
        until = self._clock.monotonic() + _limited(report.wait_s)
        self.ledger.report(report, self._clock.monotonic())
        self.changed()
        waited = False
        while self.ledger.revision <= report.after_revision and self._clock.monotonic() < until:
            await self._next_change(until)
            waited = True
        if waited:
            await asyncio.sleep(_COALESCE_S)
        return self.ledger.view(self._clock.monotonic())

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """How far the evaluation is, once it is done, or after wait_s."""
        until = self._clock.monotonic() + _limited(request.wait_s)
        _check_name(request.eval_id, "eval_id")
        reply = self.ledger.evaluate(request)
        self.changed()
        while not reply.done and self._clock.monotonic() < until:
            await self._next_change(until)
            reply = self.ledger.evaluate(request)
        return reply

    # -------------------------------------------------------------------------------------------------------- waits

    def _admit_waiting(self) -> None:
        """Deal out what can be admitted to those who wait, in turn."""
        waiting = [(request, answer) for request, answer in self._waiting.values() if not answer.done()]
        if not waiting:
            return
        replies = self.ledger.allocate([request for request, _ in waiting], self._clock.monotonic())
        for (_, answer), reply in zip(waiting, replies, strict=True):
            if reply.tickets or reply.finished or reply.refusal in _FINAL_REFUSALS:
                answer.set_result(reply)

    async def _next_change(self, until: float) -> None:
        """Wait for `changed`, until then at most."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._change}, timeout=max(0.0, until - self._clock.monotonic()))

    # ----------------------------------------------------------------------------------------------------- for people

    async def _model_version(self, request: web.Request) -> web.Response:
        ledger = self.ledger
        return _json(
            VersionReply(
                trained_version=ledger.trained_version,
                served_version=ledger.served_version,
                servers=ledger.servers.views(),
            )
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")


def _typed(
    kind: type[Message], handle: Callable[[Message], Awaitable[Reply]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler of one message type: 400 with the reason for what is not one, 409 for an attempt that is over."""
    decoder = msgspec.json.Decoder(kind)

    async def run(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            return _json(await handle(decoder.decode(body)))
        except StaleAttemptError as error:
            return web.Response(status=409, text=f"{error}\n")
        except ValueError as error:  # msgspec's errors too: what, and at which field
            return web.Response(status=400, text=f"{kind.__name__}: {error}\n")

    return run


def _json(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")


def _check_name(value: str, field: str) -> None:
    if not value or len(value) > _MAX_NAME:
        raise ValueError(f"{field} has {len(value)} characters; use 1 to {_MAX_NAME}")


def _limited(wait_s: float) -> float:
    if not 0.0 <= wait_s < float("inf"):
        raise ValueError(f"wait_s is {wait_s}; use a number of seconds, 0 or more")
    return min(wait_s, MAX_WAIT_S)


class _Metrics:
    """Prometheus metrics, read off the ledger when they are asked for."""

    def __init__(self, ledger: Ledger, service: ManagerService, fleet: FleetMetrics | None) -> None:
        self._ledger = ledger
        self._service = service
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        ledger = self._ledger
        for name, text, value in (
            ("live", "train tickets granted and not yet consumed, rejected or released", ledger.num_live),
            ("running", "train tickets being rolled out", ledger.num_running),
            ("stored", "train tickets in transit, stored or in a train step", ledger.num_stored),
            ("running_evals", "evaluation tickets being rolled out", ledger.num_evals_running),
            ("waiting_requests", "allocate requests that wait for admission", self._service.num_waiting),
            ("reissue_queue", "prompts that wait to be handed out again", ledger.num_again),
            ("trained_version", "newest version the trainer has made", ledger.trained_version),
            ("served_version", "newest version that servers serve", ledger.served_version),
        ):
            yield GaugeMetricFamily(f"asyncrl_manager_{name}", text, value=value)
        tickets = CounterMetricFamily("asyncrl_manager_tickets", "what became of tickets", labels=["event", "reason"])
        for (event, reason), count in sorted(ledger.counters.items()):
            tickets.add_metric([event, reason], count)
        yield tickets
        refused = CounterMetricFamily("asyncrl_manager_refused", "answers without a ticket", labels=["reason"])
        for reason, count in sorted(self._service.refused.items()):
            refused.add_metric([reason], count)
        yield refused
        lengths = CounterMetricFamily(
            "asyncrl_manager_rejected_responses", "responses of rejected groups, by length", labels=["reason", "below"]
        )
        for (reason, bits), count in sorted(ledger.rejected_lengths.items()):
            lengths.add_metric([reason, str(1 << bits)], count)
        yield lengths
        yield from self._of_servers()

    def _of_servers(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("asyncrl_manager_server_state", "1 for its state", labels=["server", "state"])
        running = GaugeMetricFamily("asyncrl_manager_server_running", "groups it was given", labels=["server"])
        for view in self._ledger.servers.views():
            state.add_metric([view.server, view.state], 1)
            running.add_metric([view.server], view.running)
        yield state
        yield running
        if self._fleet is None:
            return
        events = CounterMetricFamily("asyncrl_manager_updates", "weight updates", labels=["event", "server"])
        for (event, server), count in sorted(self._fleet.counters.items()):
            events.add_metric([event, server], count)
        yield events
        seconds = CounterMetricFamily("asyncrl_manager_update_seconds", "spent in updates", labels=["server"])
        for server, spent in sorted(self._fleet.update_seconds.items()):
            seconds.add_metric([server], spent)
        yield seconds
