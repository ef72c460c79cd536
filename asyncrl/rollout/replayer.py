"""Replayer: replaces manager, servers and rollout workers when nothing is generated (mode=train_only).

    trajectories on disk --> [replayer] -- trajectory --> heads          (push-pull, as a rollout worker)
                                        <-- report, ledger --> master    (HTTP, as the manager)

The master forms its batches by its usual rule. The ledger that the replayer sends lists the recorded groups of a step with that
step as their deadline. Each step therefore waits for exactly its own batch and trains on it, whatever the speed of the processes.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
from aiohttp import web

from asyncrl.config.processes import ReplayerConfig
from asyncrl.data.replay import Recorded, plan_replay, translate
from asyncrl.data.trajectories import read_trajectory
from asyncrl.protocol.errors import DECODE_ERRORS, RunEndedError
from asyncrl.protocol.manager import LedgerView, MasterReport, TicketView
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_server import listen_routes
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker
from asyncrl.streams.push_pull import NameResolvingZmqPusher

_MAX_WAIT_S = 60.0  # longest time that the answer to a report is held back
_MAX_BODY_BYTES = 64 << 20


class Replayer(Worker):
    """Sends one recorded batch after another.

    consumes: files; reports of the master (the trained version).  produces: trajectories, ledgers.
    waits for: the master to train the previous batch (with eta >= 1: the batch before that), then for the verdicts of the heads.
    unblocked by: train steps.
    """

    def __init__(self, config: ReplayerConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self.plan = plan_replay(
            config.replay,
            batch_size=config.batch_size,
            max_steps=config.max_steps,
            max_head_offpolicyness=config.max_head_offpolicyness,
        )
        self._ahead = min(1, config.max_head_offpolicyness)  # batches sent while another one is trained
        self._trained = self.plan.first_step  # train steps done, by the master's count
        self._num_sent = 0  # batches whose sending has begun
        self._tickets: dict[str, TicketView] = {}
        self._revision = 0
        self._changed = asyncio.Condition()

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        """Send batch after batch; then stay up for the master's last reports."""
        info = self.info
        pusher = NameResolvingZmqPusher(
            directory.resolver,
            self.names,
            pusher_index=0,
            num_pushers=1,
            num_pullers=self.config.num_heads,
            runtime=info.runtime,
            transport=self.system.transport,
            incarnation=self.incarnation,
        )
        opened.push_async_callback(pusher.close)
        await pusher.start()
        report = web.post("/report", self._answer_report)
        serving = listen_routes(report, host=info.runtime.host, max_body_bytes=_MAX_BODY_BYTES)
        await directory.publish(self.names.gserver_manager(), await opened.enter_async_context(serving))
        self.began()
        place = 0
        for number, batch in enumerate(self.plan.batches):
            await self._until_trained(self.plan.first_step + number - self._ahead)
            places = range(place, place + len(batch))
            await self._begin(self.plan.first_step + number, batch, places)
            for index, (entry, where) in enumerate(zip(batch, places, strict=True)):
                await self._send(pusher, entry, head=index % self.config.num_heads, place=where)
            place += len(batch)
        self.logger.info("all %d trajectories are sent", place)
        await asyncio.Event().wait()  # until the worker is stopped

    async def _until_trained(self, version: int) -> None:
        limit_s = self.config.call_timeout_s
        if self._trained >= version:
            return
        async with self._changed:
            reached = self._changed.wait_for(lambda: self._trained >= version)
            await self.board.bounded(reached, what=f"version {version} to be trained", on="master", limit_s=limit_s)

    async def _begin(self, step: int, batch: list[Recorded], places: range) -> None:
        for entry, place in zip(batch, places, strict=True):
            ticket = entry.header.meta.ticket_id
            self._tickets[ticket] = TicketView(
                ticket_id=ticket,
                locator=Locator(0, place),
                deadline=step,
                state="running",
                worker=self.name,
            )
        self._num_sent += 1
        await self._notify()

    async def _send(self, pusher: NameResolvingZmqPusher, entry: Recorded, *, head: int, place: int) -> None:
        trajectory = await asyncio.to_thread(read_trajectory, entry.path)
        meta, sample = translate(trajectory, attempt=self.info.attempt, head=head, place=place)
        limit_s = self.config.call_timeout_s
        async with self.board.waiting("a verdict on a trajectory", on=f"head {head}", limit_s=limit_s):
            verdict = await pusher.push(meta, sample, head=head, timeout_s=limit_s)
        if verdict.verdict != "stored":
            raise RunEndedError(
                f"{entry.path} was not stored by head {head}: {verdict.verdict}, {verdict.reason}; a replay needs every group of "
                "its batches: set replay.first_step to start after this batch"
            )
        if meta.ticket_id in self._tickets:  # otherwise it has been trained already
            self._tickets[meta.ticket_id] = msgspec.structs.replace(self._tickets[meta.ticket_id], state="stored")
        self.board.progress()
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._revision += 1
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- as the manager

    async def _answer_report(self, request: web.Request) -> web.Response:
        """Answer with the ledger as soon as it is newer than the master's, or after wait_s."""
        try:
            report = msgspec.json.decode(await request.read(), type=MasterReport)
        except DECODE_ERRORS as error:
            return web.Response(status=400, text=f"MasterReport: {error}\n")
        if report.revoke:
            return web.Response(status=400, text=f"a replay cannot repeat revoked tickets: {report.revoke[:4]}\n")
        gone = [self._tickets.pop(ticket) for ticket in report.consumed if ticket in self._tickets]
        if gone or report.trained_version != self._trained:
            self._trained = report.trained_version
            self.board.version = str(self._trained)
            await self._notify()
        deadline = self.system.clock.monotonic() + min(report.wait_s, _MAX_WAIT_S)
        async with self._changed:
            while self._revision <= report.after_revision and (left := deadline - self.system.clock.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    break
        return web.Response(body=msgspec.json.encode(self._view()), content_type="application/json")

    def _view(self) -> LedgerView:
        return LedgerView(
            known=True,
            revision=self._revision,
            served_version=-1,
            exhausted=self._num_sent == len(self.plan.batches),
            live=list(self._tickets.values()),
            rejected=[],
            servers=[],
        )
