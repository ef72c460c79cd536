"""Correct fakes for the rollout side: a generation server with a deterministic policy, and a manager that grants given tickets.

The policy's next token is a function of all tokens before it. Therefore a response resumed after an interruption, or on another
server, must equal an undisturbed response.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.protocol.generation import FinishReason, GenerateMeta, GenerateReply, GenerateRequest, VersionSpan
from asyncrl.protocol.manager import (
    AllocateReply,
    AllocateRequest,
    FinishReply,
    FinishRequest,
    HeartbeatReply,
    HeartbeatRequest,
    RolloutResult,
    ScheduleReply,
    ScheduleRequest,
    Ticket,
)
from asyncrl.protocol.versions import WeightVersion

LIMIT_S = 60.0  # for waits that should end at once, on a busy machine
VOCABULARY = 50  # ids 1..49; 0 is EOS and is only sampled at `eos_at`


def next_token(context: list[int]) -> int:
    return 1 + (7 * sum(context) + 13 * len(context)) % (VOCABULARY - 1)


def logprob_of(token: int) -> float:
    return -token / 64  # exact in float32


def continuation(prompt: list[int], count: int) -> list[int]:
    """The policy's answer without a disturbance."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class HttpService:
    """An aiohttp application on a free port of the loopback."""

    def __init__(self) -> None:
        self.app = web.Application(client_max_size=1 << 26)
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class FakeGenerationServer(HttpService):
    """Serves the policy. Each entry of `script` determines the treatment of one of the next requests."""

    def __init__(self, name: str = "generation_server/0", version: int = 1, *, eos_at: int = 0) -> None:
        super().__init__()
        self.name = name
        self.version = version
        self.eos_at = eos_at  # sequence length (prompt included) at which EOS is sampled; 0: never
        self.script: deque[Any] = (
            deque()
        )  # int: interrupt after this many tokens; str: `disconnect`, `garbage`; web.Response; function: the answer's body
        self.script_beyond = 0  # only requests with longer input take from the script
        self.version_after_interrupt = 0
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.hold = asyncio.Event()  # cleared: requests with input longer than hold_beyond tokens wait
        self.hold_beyond = 0
        self.abort_after = 5  # tokens in the answer to a request that is aborted while it waits
        self._held: dict[str, asyncio.Event] = {}  # set: the request was aborted
        self.hold.set()
        self.arrived = asyncio.Condition()
        self.app.router.add_post("/generate", self._generate)
        self.app.router.add_post("/abort_request", self._abort)

    async def wait_for_requests(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)

    async def wait_for_aborts(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.aborted) >= count)

    async def _abort(self, http: web.Request) -> web.Response:
        self.aborted.append(msgspec.json.decode(await http.read())["rid"])
        if held := self._held.get(self.aborted[-1]):
            held.set()
        async with self.arrived:
            self.arrived.notify_all()
        return web.Response()

    async def _generate(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        assert request.return_logprob
        self.requests.append(request)
        takes = bool(self.script) and len(request.input_ids) > self.script_beyond
        event = self.script.popleft() if takes else None
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        async with self.arrived:
            self.arrived.notify_all()
        try:
            if len(request.input_ids) > self.hold_beyond and await self._was_aborted(request.rid):
                event = self.abort_after
        finally:
            self.in_flight -= 1
        if isinstance(event, web.Response):
            return event
        if callable(event):
            return web.Response(body=event(self._sample(request, None)), content_type="application/json")
        if event == "disconnect":
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if event == "garbage":
            return web.Response(body=b'{"output_ids": "no"}')
        return web.Response(body=msgspec.json.encode(self._sample(request, event)), content_type="application/json")

    async def _was_aborted(self, rid: str) -> bool:
        """Wait until hold is set or the request is aborted, at most 2 * LIMIT_S. Return whether it was aborted."""
        aborted = self._held[rid] = asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.hold, aborted)]
        try:
            await asyncio.wait(waits, timeout=2 * LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._held[rid]
            for wait in waits:
                wait.cancel()
        return aborted.is_set()

    def _sample(self, request: GenerateRequest, interrupt_after: int | None) -> GenerateReply:
        asked = request.sampling_params.max_new_tokens
        context = list(request.input_ids)
        output: list[int] = []
        finish = FinishReason(type="length", length=asked)
        version = str(WeightVersion(1, self.version))
        while len(output) < asked:
            if interrupt_after is not None and len(output) == interrupt_after:
                finish = FinishReason(type="abort", message="weights are updated")
                self.version = self.version_after_interrupt or self.version
                break
            is_end = bool(self.eos_at) and len(context) + 1 >= self.eos_at
            token = 0 if is_end else next_token(context)
            output.append(token)
            context.append(token)
            if is_end:
                finish = FinishReason(type="stop", matched=0)
                break
        return GenerateReply(
            output_ids=output,
            meta_info=GenerateMeta(
                id=request.rid,
                finish_reason=finish,
                prompt_tokens=len(request.input_ids),
                completion_tokens=len(output),
                weight_version=version,
                weight_versions=[VersionSpan(version=version, start=0, end=len(output))] if output else [],
                output_token_logprobs=[(logprob_of(token), token, None) for token in output],
            ),
        )


class FakeManager(HttpService):
    """Grants the tickets that a test puts into `waiting`; keeps every result."""

    def __init__(self, tickets: Iterable[Ticket] = ()) -> None:
        super().__init__()
        self.waiting: deque[Ticket] = deque(tickets)
        self.finished = False
        self.heartbeat_s = 0.05
        self.refusal = ""  # if set: refuse every request for tickets with this reason
        self.replacement = ScheduleReply(reason="no_server")
        self.results: dict[str, RolloutResult] = {}
        self.revoked: list[str] = []
        self.heartbeats: list[HeartbeatRequest] = []
        self.schedules: list[ScheduleRequest] = []
        self.calls: Counter[str] = Counter()
        self.asked: list[int] = []
        self._answers: dict[str, AllocateReply] = {}
        self.changed = asyncio.Condition()
        self.app.router.add_post("/allocate_rollout", self._allocate)
        self.app.router.add_post("/finish_rollout", self._finish)
        self.app.router.add_post("/heartbeat", self._heartbeat)
        self.app.router.add_post("/schedule_request", self._schedule)

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def wait_for_results(self, count: int) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: len(self.results) >= count), LIMIT_S)

    async def wait_for_heartbeat(self, held: set[str]) -> None:
        async with self.changed:
            await asyncio.wait_for(
                self.changed.wait_for(lambda: bool(self.heartbeats) and set(self.heartbeats[-1].held) == held), LIMIT_S
            )

    async def _allocate(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=AllocateRequest)
        self.asked.append(request.count)
        if self.refusal:
            return _reply(AllocateReply(tickets=[], refusal=self.refusal))
        if request.request_id not in self._answers:
            async with self.changed:
                try:
                    await asyncio.wait_for(
                        self.changed.wait_for(lambda: bool(self.waiting) or self.finished), request.wait_s
                    )
                except TimeoutError:
                    return _reply(AllocateReply(tickets=[], refusal="staleness"))
            tickets = [self.waiting.popleft() for _ in range(min(request.count, len(self.waiting)))]
            self._answers[request.request_id] = AllocateReply(tickets=tickets, finished=self.finished)
        return _reply(self._answers[request.request_id])

    async def _finish(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=FinishRequest)
        self.calls["finish"] += 1
        for result in request.results:
            assert result.ticket_id not in self.results, "finished twice"
            self.results[result.ticket_id] = result
        await self.notify()
        return _reply(FinishReply())

    async def _heartbeat(self, http: web.Request) -> web.Response:
        self.heartbeats.append(msgspec.json.decode(await http.read(), type=HeartbeatRequest))
        await self.notify()
        return _reply(HeartbeatReply(revoked=self.revoked, heartbeat_s=self.heartbeat_s))

    async def _schedule(self, http: web.Request) -> web.Response:
        self.schedules.append(msgspec.json.decode(await http.read(), type=ScheduleRequest))
        return _reply(self.replacement)


def _reply(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")
