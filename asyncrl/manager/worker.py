"""GserverManager: admits rollouts, routes them, and keeps the generation servers on the newest verified weights.

It joins the pure parts (ledger.py, routing.py, update_plan.py, members.py) with what touches the world: the HTTP side
(http.py), the generation servers (fleet.py, load.py) and name resolve (here). All on one event loop, on which nothing waits for a
server: updates and probes are tasks of their own, checksums are computed on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.config.schema import GserverManagerConfig
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.http import ManagerService
from asyncrl.manager.ledger import Ledger
from asyncrl.manager.load import LoadPoller
from asyncrl.manager.members import Members
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.protocol.messages import DECODE_ERRORS, ScaleWish, Ticket, WeightVersion
from asyncrl.protocol.names import MASTER_META
from asyncrl.protocol.tickets import make_key
from asyncrl.runtime.channel_wire import Endpoint
from asyncrl.runtime.clock import SystemClock
from asyncrl.runtime.journal import BackgroundJournal
from asyncrl.runtime.names.interface import NameEntryExists, NameEntryNotFound, NameResolveTimeout
from asyncrl.runtime.worker import WaitTimeoutError, Worker
from asyncrl.weights.fetch import WeightFiles
from asyncrl.weights.versions import role_dir, version_dir

_ENDED = ("COMPLETE",)
_COLLECT_S, _COLLECT_ALL_S, _NEVER = 0.25, 600.0, 1 << 30  # see _collect_garbage
_WANT_OF_SERVERS = frozenset({"no_server", "updating"})  # refusals of the ledger


class GserverManager(Worker):
    """One per run. `run` only turns the clock: leases expire, those who wait are looked after, the board is kept."""

    def __init__(self, config: GserverManagerConfig) -> None:
        super().__init__(config.worker)
        self.config = config
        self.clock = SystemClock()
        self._drain_news = asyncio.Event()  # a leaving server may have nothing left to do
        self._missing = ""  # servers without which nothing is admitted
        self._missing_wait = contextlib.ExitStack()
        self._files: WeightFiles | None = None

    async def setup(self) -> None:
        config, options = self.config, self.config.manager
        self.journal = BackgroundJournal(Path(self.info.run_dir) / "journal" / "gserver_manager.jsonl")
        noted = (self.journal.last or {}).get("attempt", 0)  # by a manager before this one, whose attempt went on
        attempt = max(self.info.attempt, noted if isinstance(noted, int) else 0)
        is_successor = await self._is_successor() or noted == attempt
        ticket_key = await asyncio.to_thread(make_key, Path(self.info.run_dir))
        self.table = ServerTable(
            options.routing,
            dead_after_s=options.lease_s,
            max_groups=options.max_groups_per_server,
            drain_timeout_s=options.drain_timeout_s,
            attempt=attempt,
        )
        self.members = Members(self.table)
        self.plan = UpdatePlan(
            self.table, update_fraction=options.update_fraction, update_timeout_s=options.update_timeout_s
        )
        self.ledger = Ledger(
            self.table,
            batch_size=config.batch_size,
            eta=options.max_head_offpolicyness,
            max_concurrent=options.max_concurrent_rollouts,
            eval_share=options.eval_share,
            num_heads=config.num_heads,
            heads_of_worker=self._heads_of_workers(),
            max_issues=options.max_issues,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            attempt=attempt,
            grace_s=options.lease_s if is_successor else 0.0,
            num_workers=config.num_rollout_workers,
            ticket_key=ticket_key,
            journal=self._note,
        )
        self.fleet = Fleet(
            self.table,
            self.plan,
            path_of=lambda version: version_dir(self.info.run_dir, config.role, version),
            on_change=self._servers_changed,
            probe_every_s=options.heartbeat_s,
            probe_limit_s=options.lease_s / 3,
            verify_limit_s=options.update_timeout_s,
            replace_limit_s=config.replace_timeout_s,
            interrupt=config.interrupt,
            broadcast_limit_s=config.broadcast_timeout_s,
            logger=self.logger,
            trace=self.trace,
            files_url=await self._serve_files() if config.fetch else "",
        )
        self.loads = LoadPoller(
            self.table,
            heartbeat_s=options.heartbeat_s,
            limit_s=options.lease_s / 3,
            on_told=self._drain_news.set,
            logger=self.logger,
        )
        self.service = ManagerService(
            self.ledger, clock=self.clock, fleet=self.fleet, newest_attempt=self._newest_attempt
        )
        await self.fleet.start()
        self.url = await self.service.start(self.info.runtime.host)
        await self.publish(self.names.gserver_manager(), self.url)
        self.logger.info("listening on %s", self.url)

    async def run(self) -> None:
        """consumes: time. produces: expired leases, status. Cancelled when the run is over."""
        if gc.isenabled():
            self.spawn(self._collect_garbage(), "collect garbage")
        self.spawn(self.journal.run(), "write the journal")
        self.spawn(self._watch_successor(), "watch for a successor")
        self.spawn(self._watch_servers(), "watch generation servers")
        self.spawn(self._watch_wish(), "watch the number of servers")
        self.spawn(self._tell_drained(), "tell who has drained")
        self.spawn(self.loads.run(), "ask for loads")
        self.spawn(self._watch_versions(), "watch model version")
        if self.config.transport == "broadcast":
            self.spawn(self._watch_sender(), "watch the sender of weights")
            self.spawn(self._watch_held(), "watch weights in the trainer's memory")
        self.spawn(self._watch_experiment(), "watch experiment status")
        self.spawn(self.fleet.verify_loop(), "verify weights")
        self.spawn(self.fleet.update_loop(), "update servers")
        self.spawn(self.fleet.probe_loop(), "probe servers")
        while True:
            self.ledger.expire(self.clock.monotonic())
            if moved := self.ledger.move_leavers(self.clock.monotonic()):
                self.logger.info("%d groups go on at other servers: theirs leave the run", moved)
            self.service.changed()
            self._show()
            await asyncio.sleep(self.config.manager.heartbeat_s / 2)

    async def close(self) -> None:
        for name in ("service", "fleet"):
            if hasattr(self, name):
                await getattr(self, name).close()
        if self._files is not None:
            await asyncio.to_thread(self._files.close)
        if hasattr(self, "journal"):
            await asyncio.to_thread(self.journal.close)

    async def _serve_files(self) -> str:
        """For hosts that do not see the run's folder; this process sees it, it verifies what is in there."""
        directory = role_dir(self.info.run_dir, self.config.role)
        self._files = WeightFiles(directory, host=self.info.runtime.host)
        url = await asyncio.to_thread(self._files.start)
        await self.publish(self.names.weight_files(self.config.role), url)
        self.logger.info("weights for other hosts are at %s", url)
        return url

    # ------------------------------------------------------------------------------------------------------ watches

    async def _watch_servers(self) -> None:
        async for event in self.watch(self.names.generation_servers(), subtree=True):
            name = f"generation_server/{event.key.rsplit('/', 1)[-1]}"
            if event.kind == "put":
                self.fleet.announce(name, event.value)
                self.members.see(name, self.clock.monotonic())
            else:
                self.fleet.withdraw(name)

    async def _watch_wish(self) -> None:
        """`asyncrl-launch scale`: how many servers there are to be."""
        async for event in self.watch(self.names.generation_wish()):
            try:
                wish = msgspec.json.decode(event.value, type=ScaleWish) if event.kind == "put" else None
            except DECODE_ERRORS as error:
                self.logger.error("%s ignored: %s", event.key, error)
                continue
            self.members.set_wish(wish, self.clock.monotonic())
            self.logger.info("generation servers wanted: %s", wish.generation if wish else "all")
            self.fleet.members_changed()

    async def _tell_drained(self) -> None:
        """produces: an entry in name resolve for each leaving server that may be stopped. waits for: news of one."""
        while True:
            await self._drain_news.wait()
            self._drain_news.clear()
            for name, wish in self.members.drained():
                try:
                    await self.publish(self.names.generation_server_drained(int(name.rpartition("/")[2])), wish)
                except WaitTimeoutError as error:  # the launcher does not wait for ever, either
                    self.logger.warning("%s", error)
                    continue
                self.members.told(name, wish)
                self.logger.info("%s has nothing left to do", name)

    async def _watch_versions(self) -> None:
        async for event in self.watch(self.names.model_version(self.config.role)):
            if event.kind == "put":  # a missing version means hold
                self.fleet.publish(event.value)
                self._follow_attempt()

    async def _watch_sender(self) -> None:
        async for event in self.watch(self.names.weight_sender(self.config.role)):
            if event.kind == "put":
                self.fleet.sender_at(event.value)

    async def _watch_held(self) -> None:
        async for event in self.watch(self.names.weights_held(self.config.role)):
            if event.kind == "put":
                self.fleet.hold(event.value)
                self._follow_attempt()

    async def _watch_successor(self) -> None:
        """One that stood still so long that another took its place must not go on beside it."""
        async for event in self.watch(self.names.gserver_manager()):
            if event.kind == "put" and event.value != self.url:
                raise RuntimeError(f"another process is the gserver manager now, at {event.value}; this one ends")

    async def _watch_experiment(self) -> None:
        async for event in self.watch(self.names.experiment_status()):
            self.ledger.finished = event.kind == "put" and event.value in _ENDED
            self.service.changed()

    async def _collect_garbage(self) -> None:
        """Python's collector goes through all objects every few seconds: with 16,384 connections a million, most of a second. It
        also counts wrongly here, where what a request leaves takes the place of what the one before has left: half a second for
        what it takes to be few and new. So what is new is looked through often, and all, for what ended connections leave, seldom.
        """
        gc.set_threshold(gc.get_threshold()[0], _NEVER, _NEVER)
        while True:
            for _ in range(round(_COLLECT_ALL_S / _COLLECT_S)):
                await asyncio.sleep(_COLLECT_S)
                gc.collect(1)
            gc.collect()

    # ------------------------------------------------------------------------------------------------------ helpers

    def _servers_changed(self) -> None:
        self.ledger.revision += 1
        self.service.changed()
        self._drain_news.set()
        self._show()

    def _show(self) -> None:
        ledger, board = self.ledger, self.board
        board.version = str(ledger.served_version)
        board.set_queue("running", ledger.num_running)
        board.set_queue("stored", ledger.num_stored)
        board.set_queue("waiting_requests", self.service.num_waiting)
        self._show_missing()
        board.progress()

    def _show_missing(self) -> None:
        """While nothing is admitted for want of a server: whom that waits for."""
        missing = ""
        refusal = self.ledger.refusal(self.clock.monotonic())
        too_old = refusal == "staleness" and not self.ledger.num_live  # they have fallen too far behind the trainer
        if refusal in _WANT_OF_SERVERS or too_old:
            missing = ", ".join(view.server for view in self.table.views() if view.state != "healthy")
        if refusal in _WANT_OF_SERVERS:
            missing = missing or "generation servers"
        if missing != self._missing:
            self._missing = missing
            self._missing_wait.close()
            if missing:
                self._missing_wait.enter_context(self.board.showing("a server that may serve", on=missing))

    def _follow_attempt(self) -> None:
        """The weights say which attempt it is: before its master does, and where this manager's config is older."""
        if self.fleet.attempt > self.ledger.attempt:
            self.logger.info("attempt %d has begun: what runs for older ones is taken back", self.fleet.attempt)
            self.ledger.begin_attempt(self.fleet.attempt)
            self.service.changed()

    async def _newest_attempt(self) -> int:
        """Of weights and master in name resolve: a master publishes its stream before it reports. 0: not known."""
        newest = 0
        with contextlib.suppress(NameEntryNotFound, NameResolveTimeout, ValueError):
            weights = await asyncio.to_thread(self.resolver.get, self.names.model_version(self.config.role))
            newest = WeightVersion.parse(weights).attempt
        try:
            stream = await asyncio.to_thread(self.resolver.get, self.names.stream(MASTER_META))
        except (NameEntryNotFound, NameResolveTimeout) as error:
            self.logger.warning("the master's attempt is not known: %s", error)
            return newest if newest > self.ledger.attempt else 0
        with contextlib.suppress(*DECODE_ERRORS):
            newest = max(newest, msgspec.json.decode(stream, type=Endpoint).attempt)
        return newest

    def _note(self, event: Literal["admitted", "adopted"], ticket: Ticket) -> None:
        self.journal.add(
            {
                "event": event,
                "attempt": ticket.attempt,
                "ticket": ticket.ticket_id,
                "prompt": ticket.locator,
                "time": time.time(),
            }
        )

    async def _is_successor(self) -> bool:
        """Whether a manager has been at work before, as name resolve remembers it."""
        limit_s = self.info.runtime.start_timeout_s
        return await self.board.bounded(self._began(), what="the manager's entry", on="name resolve", limit_s=limit_s)

    async def _began(self) -> bool:
        while True:  # bounded by the caller; each turn takes as long as the resolver tries
            try:
                await asyncio.to_thread(self.resolver.add, self.names.gserver_manager_began(), self.incarnation)
            except NameEntryExists:
                return True
            except NameResolveTimeout as error:
                self.logger.warning("%s; trying again", error)
            else:
                return False

    def _heads_of_workers(self) -> dict[str, list[int]] | None:
        """Heads that each rollout worker may send to, by head_policy; None: all to all."""
        policy, num_workers = self.config.manager.head_policy, self.config.num_rollout_workers
        if policy == "balanced":
            return None
        if policy != "grouping":
            raise ValueError(f"manager.head_policy is {policy!r}; use balanced or grouping")
        from asyncrl.runtime.push_pull import grouping  # zmq is needed for nothing else here

        heads: dict[str, list[int]] = {}
        for head, workers in grouping(num_workers, self.config.num_heads).items():
            for worker in workers:
                heads.setdefault(f"rollout_worker/{worker}", []).append(head)
        return heads
