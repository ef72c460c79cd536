"""A rollout worker's tickets: the gserver manager grants them, the worker holds them and reports the result of each.

ManagerClient makes the HTTP calls. Every call is idempotent and is retried, with back-off, until its limit. A manager that restarts
at another address is found immediately (runtime/service_client.py) and immediately gets the list of held tickets: a new manager
grants no train ticket until it has the lists of all workers, or a lease has passed. Results are sent in batches: results that
arrive while a batch is being sent go into the next one. HeldTickets requests as many tickets as it has room for, runs each
rollout and reports its result.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from asyncrl.config.schema import RolloutConfig
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
from asyncrl.rewards.outcome import RolloutEnded
from asyncrl.rollout.client import PartialRolloutManager
from asyncrl.rollout.rollouts import Rollouts
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.service_client import ServiceClient
from asyncrl.runtime.services import Services


class ManagerClient:
    """The calls allocate, heartbeat, schedule and finish. They raise WaitTimeoutError if the manager does not answer within
    call_limit_s."""

    def __init__(
        self, service: ServiceClient, *, worker: str, incarnation: str, new_id: Callable[[], str], call_limit_s: float
    ) -> None:
        """worker, incarnation: of this process. new_id: makes request ids."""
        self._service = service
        self._worker, self._incarnation, self._new_id = worker, incarnation, new_id
        self._limit_s = call_limit_s
        # Bounded: each result occupies its rollout's slot
        self._results: list[tuple[RolloutResult, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Drop results that have not been sent. The manager releases their tickets when the heartbeats stop."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})

    async def allocate(self, count: int, *, wait_s: float) -> AllocateReply:
        """Ask for up to count tickets. The manager answers as soon as it can grant one, after wait_s at the latest."""
        request = AllocateRequest(
            request_id=self._new_id(),  # the same in all retries, so that a lost answer loses no tickets
            worker=self._worker,
            incarnation=self._incarnation,
            count=count,
            wait_s=wait_s,
        )
        return await self._service.post(
            "/allocate_rollout", request, AllocateReply, limit_s=self._limit_s, wait_s=wait_s
        )

    async def heartbeat(self, held: Collection[str]) -> HeartbeatReply:
        """Report the tickets that this worker holds; the reply lists the revoked ones."""
        request = HeartbeatRequest(worker=self._worker, incarnation=self._incarnation, held=list(held))
        return await self._service.post("/heartbeat", request, HeartbeatReply, limit_s=self._limit_s)

    async def until_heartbeat(self, interval_s: float) -> None:
        """Wait until a heartbeat is due: after interval_s, or immediately if another process has become the manager."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(interval_s):
                await self._service.replaced.wait()
        self._service.replaced.clear()

    async def schedule(self, ticket_id: str, lost_server: str, *, lost_url: str, busy: bool = False) -> ScheduleReply:
        """Ask for another server for a ticket."""
        request = ScheduleRequest(
            ticket_id=ticket_id, worker=self._worker, lost_server=lost_server, lost_url=lost_url, busy=busy
        )
        return await self._service.post("/schedule_request", request, ScheduleReply, limit_s=self._limit_s)

    async def finish(self, result: RolloutResult) -> None:
        """Report a ticket's result. Returns when the manager has acknowledged it; until then the rollout's slot stays occupied."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._results.append((result, sent))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_results(), name=f"{self._worker}:results")
        await sent  # settled by the sender, whose calls have a limit

    async def _send_results(self) -> None:
        """Send the queued results, batch after batch, until none are left. A failure is raised in the callers of `finish`."""
        while self._results:
            batch, self._results = self._results, []
            request = FinishRequest(
                worker=self._worker, incarnation=self._incarnation, results=[result for result, _ in batch]
            )
            error: BaseException | None = None
            try:
                await self._service.post("/finish_rollout", request, FinishReply, limit_s=self._limit_s)
            except asyncio.CancelledError:
                for _, sent in batch:
                    sent.cancel()
                raise
            except Exception as raised:
                error = raised
            for _, sent in batch:
                if sent.done():
                    continue  # the caller of `finish` was cancelled
                if error is None:
                    sent.set_result(None)
                else:
                    sent.set_exception(error)


_ALLOCATE_WAIT_S = 5.0  # longest time that the manager holds back its answer until it can grant a ticket
_REFUSED_PAUSE_S = 0.2  # pause after an empty answer that came sooner than this
STOP_REPORT_S = 2.0  # time limit for a stopping worker to report a released ticket


@dataclass
class _HeldTicket:
    """A ticket that this worker holds, from its grant until the manager has acknowledged its result."""

    ticket: Ticket
    birth_time: float
    task: asyncio.Task[None] | None = None
    taken_back: str = ""  # reason of its cancellation
    reporting: bool = False  # its result is final, so it can no longer be cancelled


class HeldTickets:
    """Holds at most max_concurrent_per_worker train tickets, and evaluation tickets in addition: together at most twice that
    number."""

    def __init__(
        self,
        name: str,
        rollout: RolloutConfig,
        manager: ManagerClient,
        client: PartialRolloutManager,
        rollouts: Rollouts,
        services: Services,
        *,
        stop_timeout_s: float,
    ) -> None:
        """name: of the worker."""
        self._name, self._rollout, self._stop_timeout_s = name, rollout, stop_timeout_s
        self.rollouts = rollouts
        self._manager, self._client, self._services = manager, client, services
        self._held: dict[str, _HeldTicket] = {}
        self._changed = asyncio.Event()  # a ticket has ended

    async def run(self) -> None:
        """Keep the worker full of rollouts until the run needs no more.

        consumes: tickets (allocate_rollout). produces: one task per ticket. waits for: room (the end of a ticket) and admission
        (the manager holds back its answer). unblocked by: ends of rollouts, train steps that consume stored trajectories.
        """
        self._services.tasks.spawn(self._heartbeat_loop(), "heartbeat")
        while True:
            await self._wait_for_room()
            asked = self._services.clock.monotonic()
            reply = await self._manager.allocate(self._room(), wait_s=_ALLOCATE_WAIT_S)
            for ticket in reply.tickets:
                self._begin(ticket)
            if reply.finished:
                break
            if reply.refusal == "superseded":
                raise RuntimeError(f"another process now runs as {self._name}; this one ends")
            if not reply.tickets and self._services.clock.monotonic() - asked < _REFUSED_PAUSE_S:
                await asyncio.sleep(_REFUSED_PAUSE_S)
        await self._drain()

    def _room(self) -> int:
        """Return how many more tickets to request. Train tickets are limited to max_concurrent_per_worker, and train and evaluation
        tickets together to twice that number."""
        most = self._rollout.max_concurrent_per_worker
        train = sum(held.ticket.kind == "train" for held in self._held.values())
        return min(most - train, 2 * most - len(self._held))

    async def _wait_for_room(self) -> None:
        """Wait until there is room for another ticket.

        The wait needs no limit of its own: a rollout that ends makes room, and the manager revokes the tickets of overdue rollouts.
        """
        while self._room() < 1:
            self._changed.clear()
            with self._services.board.showing("room for another rollout", on=self._name):
                await self._changed.wait()

    def _begin(self, ticket: Ticket) -> None:
        if ticket.ticket_id in self._held:
            return  # granted twice, by the answer to a repeated request
        held = _HeldTicket(ticket, birth_time=self._services.clock.time())
        self._held[ticket.ticket_id] = held
        self._services.board.set_queue("rollouts", len(self._held))
        held.task = self._services.tasks.spawn(self._see_through(held), f"rollout {ticket.ticket_id}")
        held.task.add_done_callback(lambda _: self._end(ticket))

    def _end(self, ticket: Ticket) -> None:
        del self._held[ticket.ticket_id]
        self._services.board.set_queue("rollouts", len(self._held))
        self._services.board.progress()
        self._changed.set()

    async def _heartbeat_loop(self) -> None:
        """Send heartbeats and apply the replies.

        produces: the list of held tickets. consumes: revocations, moves, dead servers.
        waits for: the manager, at most call_limit_s.
        """
        interval_s = 0.0  # immediately, because a newly started manager waits for the first heartbeat
        while True:
            await self._manager.until_heartbeat(interval_s)
            reply = await self._manager.heartbeat(list(self._held))
            interval_s = reply.heartbeat_s
            for ticket_id in reply.revoked:
                self._cancel(self._held.get(ticket_id), "revoked")
            for moved in reply.moved:
                if self._client.move(moved.ticket_id, moved.server, moved.server_url):
                    self._services.logger.info(
                        "ticket %s continues at %s: its server leaves", moved.ticket_id, moved.server
                    )
            if num_left := self._client.leave(reply.dead):
                self._services.logger.warning(
                    "%d requests to dead servers were cancelled (%s)", num_left, ", ".join(reply.dead)
                )

    def _cancel(self, held: _HeldTicket | None, why: str) -> None:
        if held is None or held.task is None or held.reporting or held.taken_back:
            return
        held.taken_back = why
        held.task.cancel()

    async def _drain(self) -> None:
        """Wait for the running rollouts to end; after request_timeout_s cancel them."""
        limit_s = self._rollout.request_timeout_s
        try:
            await self._services.board.bounded(
                self._all_ended(), what="the last rollouts", on=self._name, limit_s=limit_s
            )
        except WaitTimeoutError:
            self._services.logger.warning("%d rollouts did not end within %g s", len(self._held), limit_s)
            for held in list(self._held.values()):
                self._cancel(held, "stopped")
            await self._services.board.bounded(
                self._all_ended(), what="the cancelled rollouts", on=self._name, limit_s=self._stop_timeout_s
            )

    async def _all_ended(self) -> None:
        while self._held:
            self._changed.clear()
            await self._changed.wait()

    async def _see_through(self, held: _HeldTicket) -> None:
        """Roll out a ticket, then report its result, also after RolloutEnded or cancellation. Any other error ends the worker."""
        ticket = held.ticket
        try:
            with self._services.trace.overlapping("rollout", kind="rollout", ticket=ticket.ticket_id):
                result = await self.rollouts.roll_out(ticket, held.birth_time)
        except RolloutEnded as ended:
            detail = self.rollouts.tell_once(ended.reason, ended)
            result = RolloutResult(
                ticket_id=ticket.ticket_id, outcome=ended.outcome, reason=ended.reason, detail=detail
            )
        except asyncio.CancelledError:
            held.taken_back = held.taken_back or "stopped"  # cancelled without a reason: the worker is stopping
            result = RolloutResult(ticket_id=ticket.ticket_id, outcome="released", reason=held.taken_back)
        held.reporting = True
        await self._report(result, stopping=held.taken_back == "stopped")

    async def _report(self, result: RolloutResult, *, stopping: bool) -> None:
        if not stopping:
            await self._manager.finish(result)
            return
        try:
            async with asyncio.timeout(STOP_REPORT_S):
                await self._manager.finish(result)
        except (TimeoutError, RuntimeError) as error:
            self._services.logger.debug(
                "ticket %s not reported (%r): the manager will release it after missing heartbeats",
                result.ticket_id,
                error,
            )
