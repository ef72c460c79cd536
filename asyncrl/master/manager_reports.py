"""Tells the gserver manager where training is, and takes in its ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from asyncrl.master.books import Books
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.protocol.messages import LedgerView, MasterReport, ServerView
from asyncrl.runtime.service_client import ServiceClient

LONG_POLL_S: Final = 5.0  # how long the manager may hold back its answer while nothing changes
CALL_LIMIT_S: Final = 60.0  # a call to the manager, retries included


class ManagerReports:
    """consumes: consumed tickets, the buffer.  produces: views of the ledger, rejections in the books.

    waits for: the manager, at most CALL_LIMIT_S.  unblocked by: its answer.
    """

    def __init__(self, books: Books, buffer: AsyncIOSequenceBuffer, manager: ServiceClient) -> None:
        self._books, self._buffer, self._manager = books, buffer, manager
        self.servers: Sequence[ServerView] = ()  # of the newest view
        self._consumed: list[str] = []  # not yet answered for by the manager
        self._num_rejections_seen = 0
        self._full_report_due = True
        self._reporting = asyncio.Lock()

    def consume(self, tickets: Sequence[str]) -> None:
        """These have been trained: the next report says so."""
        self._consumed.extend(tickets)

    async def report(
        self, *, revoke: Sequence[str] = (), wait_s: float = 0.0, after_revision: int = -1, stop: bool = False
    ) -> LedgerView:
        """Report, and return the ledger. A manager that does not know this master gets a full report. stop: nothing more is
        needed."""
        async with self._reporting:  # what one report has told must not be told, or struck off, by another
            return await self._report(revoke, wait_s, after_revision, stop)

    async def _report(self, revoke: Sequence[str], wait_s: float, after_revision: int, stop: bool) -> LedgerView:
        progress = self._books.progress
        while True:  # twice at most, unless managers keep restarting; each turn is bounded
            consumed, full = list(self._consumed), self._full_report_due
            view = await self._manager.post(
                "/report",
                MasterReport(
                    attempt=self._books.attempt,
                    trained_version=self._books.version.version,
                    consumed=consumed,
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
                    stop=stop,
                ),
                LedgerView,
                limit_s=CALL_LIMIT_S,
                wait_s=wait_s,
            )
            self._full_report_due = not view.known
            if view.known:
                break
            self._num_rejections_seen = 0  # a new manager counts from the start
        del self._consumed[: len(consumed)]
        self._num_rejections_seen += len(view.rejected)
        self._books.reject(view.rejected, self._buffer.holds)
        self.servers = view.servers
        return view
