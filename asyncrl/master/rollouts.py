"""Batches of trajectories from rollout workers: accepts trajectories from the heads and forms the next batch of them.

ManagerReports reports the training progress to the gserver manager and receives its ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.master.batch import BatchFormer, NotReady
from asyncrl.master.books import Books
from asyncrl.master.buffer import AsyncIOSequenceBuffer, Grants, StorageTracker
from asyncrl.master.model_workers import ModelWorkers
from asyncrl.master.streaming import PartRunner
from asyncrl.protocol.manager import LedgerView, MasterReport, Order, ServerView
from asyncrl.protocol.trajectories import StoreVerdict
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.service_client import ServiceClient
from asyncrl.runtime.services import Services
from asyncrl.streams.push_pull import MetaPuller

T = TypeVar("T")

LONG_POLL_S: Final = 5.0  # maximum time for which the manager delays its answer while its ledger does not change
CALL_LIMIT_S: Final = 60.0  # limit of a call to the manager, retries included


class ManagerReports:
    """Reports to the gserver manager.

    consumes: consumed tickets, the buffer.  produces: views of the ledger, rejections in the books.
    waits for: the manager, at most CALL_LIMIT_S.  unblocked by: its answer.
    """

    def __init__(
        self, books: Books, buffer: AsyncIOSequenceBuffer, manager: ServiceClient, *, orders: bool = False
    ) -> None:
        """orders: the train steps order their prompts."""
        self.order = Order(before=books.progress.cursor) if orders else None  # of the step that runs, or the last one
        self._books, self._buffer, self._manager = books, buffer, manager
        self.servers: Sequence[ServerView] = ()  # from the newest view
        self.turn: Literal["", "generation", "training"] = ""  # see MasterReport
        self._consumed: list[str] = []  # not yet acknowledged by the manager
        self._num_rejections_seen = 0
        self._released_seen: Mapping[str, int] = {}  # by reason, of the present manager
        self._full_report_due = True
        self._stop = False  # also for managers that begin later
        self._reporting = asyncio.Lock()

    async def follow(self) -> None:
        """Report to each new manager at once: it grants no train ticket before it has a report. Never returns."""
        while True:
            await self._manager.replaced.wait()
            self._manager.replaced.clear()
            await self.report()

    async def report(
        self,
        *,
        consumed: Sequence[str] = (),
        revoke: Sequence[str] = (),
        wait_s: float = 0.0,
        after_revision: int = -1,
        stop: bool = False,
    ) -> LedgerView:
        """Report, and return the ledger. A manager that does not know this master gets a full report. consumed: tickets that a step
        has trained. stop: no further tickets are needed, now and later."""
        self._consumed.extend(consumed)
        self._stop = self._stop or stop
        async with self._reporting:  # concurrent reports would send or remove the same consumed tickets twice
            progress = self._books.progress
            while True:  # at most two turns, unless managers keep restarting; each turn is bounded
                to_report, full = list(self._consumed), self._full_report_due
                view = await self._manager.post(
                    "/report",
                    MasterReport(
                        attempt=self._books.attempt,
                        trained_version=self._books.version.version,
                        consumed=to_report,
                        stored=self._buffer.stored_tickets,
                        revoke=list(revoke),
                        rejected_seen=self._num_rejections_seen,
                        full=full,
                        done=progress.beyond_cursor if full else [],
                        done_cursor=progress.cursor,
                        num_prompts=progress.num_prompts,
                        num_epochs=progress.num_epochs,
                        after_revision=after_revision,
                        wait_s=wait_s,
                        stop=self._stop,
                        turn=self.turn,
                        closed=self._books.curriculum.closed,
                        order=self.order,
                    ),
                    LedgerView,
                    limit_s=CALL_LIMIT_S,
                    wait_s=wait_s,
                )
                self._full_report_due = not view.known
                if view.known:
                    break
                self._num_rejections_seen, self._released_seen = 0, {}  # a new manager counts from the start
            del self._consumed[: len(to_report)]
            self._num_rejections_seen += len(view.rejected)
            self._books.reject(view.rejected, self._buffer.holds)
            self._books.release(
                {reason: count - self._released_seen.get(reason, 0) for reason, count in view.released.items()}
            )
            self._released_seen = view.released
            self.servers = view.servers
            return view


async def accept_trajectories(
    metas: MetaPuller,
    buffer: AsyncIOSequenceBuffer,
    tracker: StorageTracker,
    books: Books,
    *,
    heads: Sequence[int],
    grants: Grants | None,
    services: Services,
) -> None:
    """Accept trajectories from the heads. Never returns. heads: by head, its model worker. grants: None if no manager grants
    tickets.

    consumes: metadata from the heads.  produces: verdicts, which the heads forward as acknowledgements.
    waits for: the next metadata.  unblocked by: a head.
    """
    while True:
        meta, ack = await metas.pull_meta()
        if grants is not None and (reason := grants.refusal(meta, services.clock.monotonic())):
            services.board.set_queue("not_granted", grants.num_refused)
            ack(StoreVerdict(verdict="refused", reason=reason))
            continue
        num_stored = len(buffer)
        verdict = buffer.put(meta)
        if len(buffer) > num_stored:  # a new trajectory was stored: the message was neither refused nor a repetition
            tracker.add(heads[meta.head], [meta.ticket_id], meta.keys)
            books.store(meta)
        ack(verdict)


class BatchSource:
    """The source of the trainer's batches."""

    seconds: Mapping[str, float] = {}  # of the MFCs that produced the last batch, by name
    trained_s = 0.0  # of the last form_batch: seconds in which parts of the batch were trained (train.streaming)

    @property
    def servers(self) -> Sequence[ServerView]:
        """The generation servers in the manager's last view."""
        return ()

    async def form_batch(self, order: Order | None = None) -> Sequence[str]:
        """Return the tickets of the next batch, in canonical order; empty if no batch follows or the launcher stops the run. order:
        of a step that generates. All of its prompts are in the batch, except those that are rejected."""
        raise NotImplementedError

    async def trained(self, tickets: Sequence[str]) -> None:
        """These tickets have been trained."""

    async def end(self) -> None:
        """No further batch is needed."""


class Rollouts(BatchSource):
    """The batch source of a run with rollout workers, or with a replayer in their place.

    consumes: the buffer, views of the ledger.  produces: batches.
    waits for: enough stored trajectories, and the stragglers that the deadline rule (batch.py) waits for; at most
    train.data_timeout_s without a newly stored or done prompt.
    unblocked by: a change of the manager's ledger (a bounded long poll), which every finished rollout causes; the end of the run.
    """

    def __init__(
        self,
        config: MasterWorkerConfig,
        books: Books,
        buffer: AsyncIOSequenceBuffer,
        workers: ModelWorkers,
        reports: ManagerReports,
        replace_damaged: Callable[[str], Awaitable[None]],
        let_generate: Callable[[], Awaitable[None]],
        services: Services,
        *,
        leaving: asyncio.Event,
    ) -> None:
        """replace_damaged, let_generate: of WeightPublisher. leaving: set when the launcher stops the run."""
        self._books, self._buffer, self._workers, self._reports = books, buffer, workers, reports
        self._replace_damaged, self._let_generate, self._leaving = replace_damaged, let_generate, leaving
        self._board, self._clock = services.board, services.clock
        self._train, self._limit_s = config.train, config.train.data_timeout_s
        self._former = BatchFormer(
            batch_size=config.train.batch_size,
            max_head_offpolicyness=config.max_head_offpolicyness,
            overdue=config.overdue,
            overdue_wait_s=config.overdue_wait_s,
            wait_for_full_lag=config.train.wait_for_full_lag,
        )

    @property
    def servers(self) -> Sequence[ServerView]:
        return self._reports.servers

    async def form_batch(self, order: Order | None = None) -> Sequence[str]:
        self.trained_s = 0.0
        self._reports.order = order
        if not self._train.streaming:
            return await self._form(None)
        runner = PartRunner(
            self._train,
            self._former,
            self._buffer,
            self._workers.executor,
            self._workers.balance,
            version=self._books.version.version,
            num_ranks=len(self._workers.heads),
            clock=self._clock,
        )
        running, forming = asyncio.create_task(runner.run()), asyncio.create_task(self._form(runner))
        try:
            await asyncio.wait({running, forming}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running  # raises: before `stop` the runner ends only if a part fails
            batch = await forming
            await running  # the part that is running now
            await runner.run_rest(batch)
            self.trained_s = runner.seconds
            return batch
        finally:
            running.cancel()
            forming.cancel()

    async def _form(self, runner: PartRunner | None) -> Sequence[str]:
        """Form the next batch. runner: trains on its parts meanwhile."""
        buffer, progress = self._buffer, self._books.progress
        moved = self._clock.monotonic()
        state = (len(buffer), progress.num_done)
        view = await self._reports.report()
        while True:  # each turn is bounded, and so is the time without a change
            decision = self._former.decide(
                stored=buffer.stored,
                live=view.live,
                version=self._books.version.version,
                exhausted=view.exhausted,
                now=self._clock.monotonic(),
                settled=view.settled,
            )
            self._board.set_queue("stored", len(buffer))
            self._board.progress()
            # Before anything is awaited, so that the runner takes no ticket that this decision gives up or leaves out
            if not isinstance(decision, NotReady):
                if runner is not None:
                    runner.stop()
            else:
                for ticket in decision.drop:
                    buffer.drop(ticket)
            await self._replace_damaged(view.damaged)
            if not isinstance(decision, NotReady):
                return decision.tickets
            await self._let_generate()
            if runner is not None:
                runner.look(view)
            if decision.drop:
                self._books.drop(decision.drop)
                await self._workers.forget(decision.drop)
            if state != (state := (len(buffer), progress.num_done)):
                moved = self._clock.monotonic()
            waited_s = self._clock.monotonic() - moved
            if waited_s > self._limit_s:
                raise WaitTimeoutError(decision.reason, decision.on, self._limit_s)
            newer = await self._newer_view(view, decision, waited_s)
            if newer is None:
                if runner is not None:
                    runner.stop()
                return ()
            view = newer

    async def _newer_view(self, view: LedgerView, decision: NotReady, waited_s: float) -> LedgerView | None:
        """Report, with the tickets to revoke, and return the next view: as soon as the ledger changes, else after at most
        LONG_POLL_S. None if the launcher stops the run meanwhile."""
        wait_s = min(LONG_POLL_S, max(0.0, self._limit_s - waited_s))
        report = self._reports.report(revoke=decision.revoke, wait_s=wait_s, after_revision=view.revision)
        async with self._board.waiting(decision.reason, on=decision.on, limit_s=self._limit_s, waited_s=waited_s):
            return await unless(self._leaving, report)

    async def trained(self, tickets: Sequence[str]) -> None:
        await self._reports.report(consumed=tickets)

    async def end(self) -> None:
        await self._reports.report(stop=True)


async def unless(event: asyncio.Event, coroutine: Coroutine[Any, Any, T]) -> T | None:
    """Return the coroutine's result; None if the event is set meanwhile, which cancels the coroutine."""
    work, stop = asyncio.create_task(coroutine), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        return None if event.is_set() else work.result()
    finally:
        stop.cancel()
        work.cancel()
