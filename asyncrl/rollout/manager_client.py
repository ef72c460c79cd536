"""ManagerClient: a rollout worker's side of the gserver manager's HTTP calls.

Every call is idempotent and is retried, with back-off, until its limit; a manager that comes back elsewhere is found at once
(runtime/service_client.py), and is to be told at once what is held here: it admits nothing before. Results of rollouts are sent
in batches: whatever has gathered while the last batch was out goes with the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Self

from asyncrl.protocol.messages import (
    AllocateReply,
    AllocateRequest,
    FinishReply,
    FinishRequest,
    HeartbeatReply,
    HeartbeatRequest,
    RolloutResult,
    ScheduleReply,
    ScheduleRequest,
)
from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.service_client import ServiceClient


class ManagerClient:
    """allocate, heartbeat, schedule, finish. Raises WaitTimeoutError where the manager stays away for call_limit_s."""

    def __init__(
        self,
        service: ServiceClient,
        new_manager: asyncio.Event,
        *,
        worker: str,
        incarnation: str,
        new_id: Callable[[], str],
        call_limit_s: float,
    ) -> None:
        """Use `connect`. new_manager: is set where another process is the manager."""
        self._service, self._new_manager = service, new_manager
        self._worker, self._incarnation, self._new_id = worker, incarnation, new_id
        self._limit_s = call_limit_s
        self._results: list[
            tuple[RolloutResult, asyncio.Future[None]]
        ] = []  # bounded: each holds up its rollout's slot
        self._sender: asyncio.Task[None] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls,
        directory: Directory,
        tasks: BackgroundTasks,
        board: StatusBoard,
        logger: logging.Logger,
        *,
        worker: str,
        incarnation: str,
        new_id: Callable[[], str],
        call_limit_s: float,
    ) -> AsyncIterator[Self]:
        """Wait for the manager. worker, incarnation: this process. new_id: makes ids of requests."""
        new_manager = asyncio.Event()
        async with ServiceClient.connect(
            directory,
            tasks,
            board,
            logger,
            key=directory.names.gserver_manager(),
            service="gserver manager",
            on_moved=new_manager.set,
        ) as service:
            client = cls(
                service,
                new_manager,
                worker=worker,
                incarnation=incarnation,
                new_id=new_id,
                call_limit_s=call_limit_s,
            )
            yield client
            await client._drop_results()

    async def _drop_results(self) -> None:
        """Results that have not been sent by now: the manager frees the tickets when the heartbeats end."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})

    async def allocate(self, count: int, *, wait_s: float) -> AllocateReply:
        """Ask for up to count tickets. The answer comes when there is one, after wait_s at the latest."""
        request = AllocateRequest(
            request_id=self._new_id(),  # kept over the retries: a lost answer costs nothing
            worker=self._worker,
            incarnation=self._incarnation,
            count=count,
            wait_s=wait_s,
        )
        return await self._service.post(
            "/allocate_rollout", request, AllocateReply, limit_s=self._limit_s, wait_s=wait_s
        )

    async def heartbeat(self, held: Collection[str]) -> HeartbeatReply:
        """Say which tickets this worker holds; learn which it has lost."""
        request = HeartbeatRequest(worker=self._worker, incarnation=self._incarnation, held=list(held))
        return await self._service.post("/heartbeat", request, HeartbeatReply, limit_s=self._limit_s)

    async def until_heartbeat(self, interval_s: float) -> None:
        """Wait until a heartbeat is due: after interval_s, or at once where another process is the manager now."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(interval_s):
                await self._new_manager.wait()
        self._new_manager.clear()

    async def schedule(self, ticket_id: str, lost_server: str, *, lost_url: str, busy: bool = False) -> ScheduleReply:
        """Another server for a ticket."""
        request = ScheduleRequest(
            ticket_id=ticket_id, worker=self._worker, lost_server=lost_server, lost_url=lost_url, busy=busy
        )
        return await self._service.post("/schedule_request", request, ScheduleReply, limit_s=self._limit_s)

    async def finish(self, result: RolloutResult) -> None:
        """Report how a ticket ended. Returns when the manager has it: until then the rollout's slot stays taken."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._results.append((result, sent))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_results(), name=f"{self._worker}:results")
        await sent  # settled by the sender, whose calls have a limit

    async def _send_results(self) -> None:
        """Send what has gathered, batch after batch, until nothing is left. A failure goes to those who wait for it."""
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
                    continue  # whoever reported it was cancelled
                if error is None:
                    sent.set_result(None)
                else:
                    sent.set_exception(error)
