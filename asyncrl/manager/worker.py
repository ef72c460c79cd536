"""GserverManager: admits rollouts, routes them, and keeps the generation servers on the newest verified weights.

It connects the pure parts (ledger.py, routing.py, update_plan.py) with the parts that do I/O: the HTTP side (http.py), the
generation servers (fleet.py, load.py) and name resolve (this file). All of it runs on one event loop. No server blocks the loop:
updates and health probes are separate tasks, and a thread computes checksums.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.config.processes import GserverManagerConfig
from asyncrl.config.transports import transport_of
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.http import MAX_BODY_BYTES, ManagerService
from asyncrl.manager.ledger import Ledger
from asyncrl.manager.load import LoadPoller
from asyncrl.manager.routing import Members, ServerTable
from asyncrl.manager.scaling import ServerTarget
from asyncrl.manager.transports import KINDS
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.protocol.errors import DECODE_ERRORS, RunEndedError
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.manager import Ticket
from asyncrl.protocol.names import MASTER_META
from asyncrl.protocol.scaling import DesiredServers
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.channel_protocol import Endpoint
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.journal import BackgroundJournal
from asyncrl.runtime.names.interface import NameEntryExists, NameEntryNotFound, NameResolveTimeout
from asyncrl.runtime.services import Services
from asyncrl.runtime.system import System
from asyncrl.runtime.ticket_key import make_key
from asyncrl.runtime.worker import Worker
from asyncrl.weights.fetch import WeightFiles
from asyncrl.weights.versions import Manifest, VerifiedVersion, role_dir, version_dir

_COLLECT_S, _COLLECT_ALL_S, _NEVER = 0.25, 600.0, 1 << 30  # see _collect_garbage
_WANT_OF_SERVERS = frozenset({"no_server", "updating"})  # refusals of the ledger


class ManagerFiles:
    """The manager's part of the run's folder."""

    def __init__(self, config: GserverManagerConfig) -> None:
        self._run_dir, self._role = Path(config.worker.run_dir), config.role
        self._verified = VerifiedVersion()
        self._newest: WeightVersion | None = None  # the version that was verified last, or failed

    def journal(self) -> BackgroundJournal:
        return BackgroundJournal(self._run_dir / "journal" / "gserver_manager.jsonl")

    def ticket_key(self) -> bytes:
        """Return the run's ticket key. Creates it if there is none."""
        return make_key(self._run_dir)

    def path_of(self, version: WeightVersion) -> Path:
        return version_dir(self._run_dir, self._role, version)

    def verify(self, path: Path, expected: WeightVersion) -> Manifest:
        """Verify a version. If it was verified just before, a check has failed, here or at a server. Then all files of its chain
        are read again, whether or not they have changed since."""
        if expected == self._newest:
            self._verified = VerifiedVersion()
        self._newest = expected
        return self._verified.verify(path, expected)[-1][1]


class GserverManager(Worker):
    """One per run."""

    def __init__(
        self, config: GserverManagerConfig, system: System | None = None, files: ManagerFiles | None = None
    ) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self._files = files if files is not None else ManagerFiles(config)

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        config, options, clock = self.config, self.config.manager, self.system.clock
        journal = self._files.journal()
        opened.push_async_callback(asyncio.to_thread, journal.close)
        noted = (journal.last or {}).get("attempt", 0)  # attempt of a previous manager's last ticket
        attempt = max(self.info.attempt, noted if isinstance(noted, int) else 0)
        limit_s = self.info.runtime.start_limit_s
        began = self._began_before(directory)
        began_before = await self.board.bounded(began, what="the manager's entry", on="name resolve", limit_s=limit_s)
        is_successor = began_before or noted == attempt
        table = ServerTable(
            options.routing,
            dead_after_s=options.lease_s,
            max_groups=options.max_groups_per_server,
            drain_timeout_s=options.drain_timeout_s,
            attempts=Fence(attempt),
            updates_interrupt=config.interrupt != "finish",
        )
        ledger = Ledger(
            table,
            batch_size=config.batch_size,
            eta=options.max_head_offpolicyness,
            max_concurrent=options.max_concurrent_rollouts,
            eval_share=options.eval_share,
            num_heads=config.num_heads,
            heads_of_worker=heads_of_workers(config),
            max_issues=options.max_issues,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            attempt=attempt,
            grace_s=options.lease_s if is_successor else 0.0,
            num_workers=config.num_rollout_workers,
            ticket_key=await asyncio.to_thread(self._files.ticket_key),
            nonce=self.system.new_id()[:6],
            journal=lambda event, ticket: journal.add(_noted(event, ticket, clock.time())),
        )
        fleet = Fleet(
            table,
            UpdatePlan(
                table,
                update_fraction=options.update_fraction,
                update_timeout_s=options.update_timeout_s + config.wake_limit_s,
                shares_devices=config.shares_devices,
                patience_s=options.update_timeout_s + config.replace_timeout_s,
                offers=KINDS[config.transport].offers(),
            ),
            self.services,
            session=await opened.enter_async_context(open_session(max_connections=0)),
            path_of=self._files.path_of,
            verify=self._files.verify,
            probe_every_s=options.heartbeat_s,
            probe_limit_s=options.lease_s / 3,
            verify_limit_s=options.update_timeout_s,
            replace_limit_s=config.replace_timeout_s,
            interrupt=config.interrupt,
            transport=config.transport,
            transfer_limit_s=config.broadcast_timeout_s,
            files_url=await self._serve_files(directory, opened) if config.fetch else "",
            shares_devices=config.shares_devices,
        )
        opened.push_async_callback(fleet.close)
        service = ManagerService(
            ledger,
            ServerTarget(
                directory.resolver,
                self.names,
                allocated=config.num_servers,
                new_id=self.system.new_id,
                least=config.least_servers,
                is_external=config.external_servers,
            ),
            fleet,
            clock,
            newest_attempt=lambda: self._newest_attempt(directory, ledger.attempt),
        )
        url = await opened.enter_async_context(
            self.system.listen(service.answer, self.info.runtime.host, max_body_bytes=MAX_BODY_BYTES)
        )
        opened.callback(service.close)
        management = Management(config, directory, url, ledger, fleet, service, self.services)
        await directory.publish(self.names.gserver_manager(), url)
        self.logger.info("listening on %s", url)
        self.began()
        self.tasks.spawn(journal.run(), "write the journal")
        await self.manage(management)

    async def manage(self, management: Management) -> None:
        """Start the tasks of `management` and run its loop. Everything that they use must be open."""
        management.spawn()
        await management.run()

    async def _serve_files(self, directory: Directory, opened: AsyncExitStack) -> str:
        """Serve the weight files to hosts that do not see the run's folder. Returns the URL. This process always sees that folder:
        it verifies the files there."""
        folder = role_dir(self.info.run_dir, self.config.role)
        files = WeightFiles(folder, host=self.info.runtime.host)
        opened.push_async_callback(asyncio.to_thread, files.close)
        url = await asyncio.to_thread(files.start)
        await directory.publish(self.names.weight_files(self.config.role), url)
        self.logger.info("serving weights for other hosts at %s", url)
        return url

    async def _began_before(self, directory: Directory) -> bool:
        """Whether name resolve records that a manager has run before. If not, record it now."""
        while True:  # bounded by the caller; the resolver bounds each turn
            try:
                await asyncio.to_thread(directory.resolver.add, self.names.gserver_manager_began(), self.incarnation)
            except NameEntryExists:
                return True
            except NameResolveTimeout as error:
                self.logger.warning("%s; retrying", error)
            else:
                return False

    async def _newest_attempt(self, directory: Directory, known: int) -> int:
        """Return the newest attempt that name resolve shows, in the published weight version or in the master's stream. A master
        publishes its stream before it reports. 0: the stream cannot be read, and the weights' attempt is not newer than `known`."""
        newest = 0
        with contextlib.suppress(NameEntryNotFound, NameResolveTimeout, ValueError):
            weights = await asyncio.to_thread(directory.resolver.get, self.names.model_version(self.config.role))
            newest = WeightVersion.parse(weights).attempt
        try:
            stream = await asyncio.to_thread(directory.resolver.get, self.names.stream(MASTER_META))
        except (NameEntryNotFound, NameResolveTimeout) as error:
            self.logger.warning("cannot read the master's attempt from name resolve: %s", error)
            return newest if newest > known else 0
        with contextlib.suppress(*DECODE_ERRORS):
            newest = max(newest, msgspec.json.decode(stream, type=Endpoint).attempt)
        return newest


class Management:
    """Keeps ledger and fleet up to date with name resolve. `run` handles time: it expires leases, answers pending requests and
    updates the status board.

    consumes: time, changes of names.  produces: expired leases, versions for the fleet, status.
    waits for: time only.  unblocked by: cancellation.
    """

    def __init__(
        self,
        config: GserverManagerConfig,
        directory: Directory,
        url: str,
        ledger: Ledger,
        fleet: Fleet,
        service: ManagerService,
        services: Services,
    ) -> None:
        """url: the URL of this manager."""
        options = config.manager
        self.config, self.ledger, self.fleet, self.service = config, ledger, fleet, service
        self.table = fleet.table
        self.members = Members(self.table)
        self._directory, self._names, self._url = directory, directory.names, url
        self._board, self._logger, self._clock = services.board, services.logger, services.clock
        self._tasks = services.tasks
        self._drain_news = asyncio.Event()  # set when a leaving server may have drained
        self._loads = LoadPoller(
            self.table,
            fleet.calls,
            heartbeat_s=options.heartbeat_s,
            limit_s=options.lease_s / 3,
            on_told=self._drain_news.set,
            logger=services.logger,
        )
        self._missing = ""  # servers that admission waits for; "": none
        self._missing_wait = contextlib.ExitStack()
        self._missing_since = 0.0
        # The trainer may take this long to publish a version that is awaited or damaged, and servers to load it
        start_s = config.worker.runtime.start_limit_s
        self._missing_limit_s = options.update_timeout_s + max(config.replace_timeout_s, start_s)

    def spawn(self) -> None:
        """Start the watches and loops that run beside `run`."""
        tasks = self._tasks
        if gc.isenabled():
            tasks.spawn(_collect_garbage(), "collect garbage")
        tasks.spawn(self._watch_successor(), "watch for a successor")
        tasks.spawn(self._watch_servers(), "watch generation servers")
        tasks.spawn(self._follow_servers(), "follow the servers' states")
        tasks.spawn(self._watch_desired(), "watch the number of servers")
        tasks.spawn(self._tell_drained(), "report drained servers")
        tasks.spawn(self._loads.run(), "poll server loads")
        tasks.spawn(self._watch_versions(), "watch model version")
        if transport_of(self.config.transport).from_memory:
            tasks.spawn(self._watch_sender(), "watch the sender of weights")
            tasks.spawn(self._watch_held(), "watch weights in the trainer's memory")
        tasks.spawn(self._watch_experiment(), "watch experiment status")
        tasks.spawn(self.fleet.verify_loop(), "verify weights")
        tasks.spawn(self.fleet.update_loop(), "update servers")
        tasks.spawn(self.fleet.probe_loop(), "health probes of servers")

    async def run(self) -> None:
        """Loop until cancelled at the end of the run. Raises RunEndedError if admission waits for servers for too long."""
        while True:
            now = self._clock.monotonic()
            self._judge_missing(now)
            self.ledger.expire(now)
            if moved := self.ledger.move_leavers(now):
                self._logger.info("moved %d groups to other servers: their servers leave the run", moved)
            self.service.changed()
            self._show()
            await asyncio.sleep(self.config.manager.heartbeat_s / 2)

    async def _follow_servers(self) -> None:
        """Pass on each change of the servers' states.

        consumes: `fleet.news`.  produces: a new revision of the ledger; answers.  unblocked by: the next change.
        """
        while True:
            await self.fleet.news.wait()
            self.fleet.news.clear()
            self.ledger.revision += 1
            self.service.changed()
            self._drain_news.set()
            self._show()

    # ------------------------------------------------------------------------------------------------------ watches

    async def _watch_servers(self) -> None:
        async for event in self._directory.watch(self._names.generation_servers(), subtree=True):
            name = f"generation_server/{event.key.rsplit('/', 1)[-1]}"
            if event.kind == "put":
                self.fleet.announce(name, event.value)
                self.members.see(name, self._clock.monotonic())
            else:
                self.fleet.withdraw(name)

    async def _watch_desired(self) -> None:
        """Follow the desired number of servers, which `asyncrl-launch scale` or `POST /scale` sets."""
        async for event in self._directory.watch(self._names.desired_generation_servers()):
            try:
                desired = msgspec.json.decode(event.value, type=DesiredServers) if event.kind == "put" else None
            except DECODE_ERRORS as error:
                self._logger.error("%s ignored: %s", event.key, error)
                continue
            self.members.set_desired(desired, self._clock.monotonic())
            self._logger.info("desired generation servers: %s", desired.count if desired else "all")
            self.fleet.changed()

    async def _tell_drained(self) -> None:
        """Tell the launcher which leaving servers may be stopped.

        produces: an entry in name resolve for each such server. waits for: `_drain_news`.
        """
        while True:
            await self._drain_news.wait()
            self._drain_news.clear()
            for name, request in self.members.drained():
                try:
                    await self._directory.publish(
                        self._names.generation_server_drained(int(name.rpartition("/")[2])), request
                    )
                except WaitTimeoutError as error:  # the launcher's wait is bounded too
                    self._logger.warning("%s", error)
                    continue
                self.members.drain_reported(name, request)
                self._logger.info("%s has drained: it has no groups and no requests", name)

    async def _watch_versions(self) -> None:
        async for event in self._directory.watch(self._names.model_version(self.config.role)):
            if event.kind == "put":  # a deleted version has no effect: servers keep their weights
                self.fleet.publish(event.value)
                self._follow_attempt()

    async def _watch_sender(self) -> None:
        async for event in self._directory.watch(self._names.weight_sender(self.config.role)):
            if event.kind == "put":
                self.fleet.trainer_at(event.value)

    async def _watch_held(self) -> None:
        async for event in self._directory.watch(self._names.weights_held(self.config.role)):
            if event.kind == "put":
                self.fleet.hold(event.value)
                self._follow_attempt()

    async def _watch_successor(self) -> None:
        """End this process if another manager has replaced it, because this one stood still for too long. Two managers must not run
        at the same time."""
        async for event in self._directory.watch(self._names.gserver_manager()):
            if event.kind == "put" and event.value != self._url:
                raise RuntimeError(
                    f"another gserver manager has replaced this one, at {event.value}; this process ends"
                )

    async def _watch_experiment(self) -> None:
        async for event in self._directory.watch(self._names.experiment_status()):
            self.ledger.finished = event.kind == "put" and event.value == "COMPLETE"
            self.service.changed()

    # ------------------------------------------------------------------------------------------------------ helpers

    def _show(self) -> None:
        ledger, board = self.ledger, self._board
        board.version = str(ledger.served_version)
        board.set_queue("running", ledger.num_running)
        board.set_queue("stored", ledger.num_stored)
        board.set_queue("waiting_requests", self.service.num_waiting)
        board.notes = self.fleet.refusals()
        self._show_missing()
        board.progress()

    def _show_missing(self) -> None:
        """Show on the board which servers admission waits for, if it waits for servers."""
        missing = ""
        refusal = self.ledger.refusal(self._clock.monotonic())
        too_old = refusal == "staleness" and not self.ledger.num_live  # servers have fallen too far behind the trainer
        if refusal in _WANT_OF_SERVERS or too_old:
            missing = ", ".join(view.server for view in self.table.views() if view.state != "healthy")
        if refusal in _WANT_OF_SERVERS:
            missing = missing or "generation servers"
        if self.table.training or self.ledger.finished:
            missing = ""  # sleeping servers are not awaited, nor is any at the end of the run
        now = self._clock.monotonic()
        if not self._missing:
            self._missing_since = now
        if missing != self._missing:
            self._missing = missing
            self._missing_wait.close()
            if missing:
                wait = self._board.showing("a server that may serve", on=missing, limit_s=self._missing_limit_s)
                self._missing_wait.enter_context(wait)

    def _judge_missing(self, now: float) -> None:
        """Raise RunEndedError if no server may serve for the limit, or, if each of them refuses this manager's requests for a
        permanent reason such as a wrong key, for manager.update_timeout_s."""
        refusing = self.fleet.all_refuse_probes()
        limit_s = self.config.manager.update_timeout_s if refusing else self._missing_limit_s
        if not self._missing or now - self._missing_since <= limit_s:
            return
        states = [
            f"{server.name} ({server.url}) is {server.state.value}: {server.reason or 'no reason is known'}"
            for server in self.table.servers.values()
        ]
        fields = "" if refusing else " + train.call_timeout_s or runtime.start_timeout_s"
        raise RunEndedError(
            f"no generation server may serve for {limit_s:.0f} s (manager.update_timeout_s{fields}), so the run ends. "
            f"{'; '.join(states) or 'No server is known'}. The servers' logs have more"
        )

    def _follow_attempt(self) -> None:
        """Adopt the attempt of the weights if it is newer. Weights may arrive before the first report of that attempt's master, and
        this manager's config may be older than the attempt."""
        if self.fleet.attempt > self.ledger.attempt:
            self._logger.info("attempt %d has begun: tickets of older attempts are void", self.fleet.attempt)
            self.ledger.begin_attempt(self.fleet.attempt)
            self.service.changed()


def _noted(event: Literal["admitted", "adopted"], ticket: Ticket, now: float) -> dict[str, object]:
    """Return the ticket's journal record."""
    return {
        "event": event,
        "attempt": ticket.attempt,
        "ticket": ticket.ticket_id,
        "prompt": ticket.locator,
        "time": now,
    }


async def _collect_garbage() -> None:
    """Run the garbage collector on a schedule of our own.

    Python's collector scans all objects every few seconds. With 16,384 connections it scans a million objects, and that takes
    most of a second. Its thresholds also misjudge this process, where objects of one request replace those of the previous one: a
    collection of supposedly few young objects takes half a second. Therefore young objects are collected every _COLLECT_S, and
    all objects, for the garbage of closed connections, only every _COLLECT_ALL_S.
    """
    gc.set_threshold(gc.get_threshold()[0], _NEVER, _NEVER)
    while True:
        for _ in range(round(_COLLECT_ALL_S / _COLLECT_S)):
            await asyncio.sleep(_COLLECT_S)
            gc.collect(1)
        gc.collect()


def heads_of_workers(config: GserverManagerConfig) -> dict[str, list[int]] | None:
    """Return, for each rollout worker, the heads (trainer processes that receive trajectories) to which head_policy lets it send.
    None: every worker may send to every head."""
    policy, num_workers = config.manager.head_policy, config.num_rollout_workers
    if policy == "balanced":
        return None
    from asyncrl.streams.push_pull import grouping  # imported here, because nothing else here needs zmq

    heads: dict[str, list[int]] = {}
    for head, workers in grouping(num_workers, config.num_heads).items():
        for worker in workers:
            heads.setdefault(f"rollout_worker/{worker}", []).append(head)
    return heads
