"""Invariants that must hold after every event of a simulated run (principles 3 to 6 of DESIGN.md): staleness, exactly once,
verified weights, bounded waits and queues. A run must also end, and without unexpected errors.

They are plain functions of the events and of the state, and do not rely on checks of the run's own parts. The first broken
invariant is the outcome of the simulation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from asyncrl.manager.ledger import Ledger
from asyncrl.protocol.tickets import TicketId
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.board import StatusBoard
from tests.simulation.world import Event, Process

if TYPE_CHECKING:
    from tests.simulation.network import SimPull
    from tests.simulation.run import SimulatedRun

_WAIT_SLACK_S = 10.0  # beyond a wait's limit, because waits are only checked once a second and events may be late
_LEASE_SLACK_S = 10.0
_MAX_QUEUED = 2048  # messages waiting in one socket

Prompt = tuple[int, int]


class Invariants:
    """Checks each event, and each process once a second. `violation` is "" until an invariant is broken."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.scenario = run.scenario
        self.capacity = (1 + run.scenario.eta) * run.scenario.batch_size
        self.violation = ""
        self.oldest: dict[str, WeightVersion] = {}  # stored ticket -> oldest version of its tokens
        self.echoed: dict[str, dict[int, int]] = {}  # server's incarnation -> attempt -> newest version it reported
        self.loaded: dict[str, WeightVersion] = {}  # server's incarnation -> version that it loaded last
        self.published: WeightVersion | None = None
        self.parts: dict[tuple[int, int], list[str]] = {}  # attempt, version -> the groups in the parts of its batch
        self.holders: set[str] = set()  # processes with models on devices that they share
        self.answers: dict[
            tuple[str, str, str], frozenset[str]
        ] = {}  # manager, worker, request -> the tickets of the first answer
        self._handlers = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    def __call__(self, event: Event) -> None:
        if not self.violation and (handler := self._handlers.get(event.kind)) is not None:
            handler(event, **event.fields)

    def broken(self, name: str, text: str) -> None:
        if not self.violation:
            self.violation = f"{name}: {text}"
            self._run.stop()

    # --------------------------------------------------------------------------------------------------- staleness

    def _on_granted(
        self, event: Event, ticket: str, to: str, request: str, server: str, min_version: int, live: int, of: str
    ) -> None:
        if of == "train" and live > self.capacity:
            self.broken("gate", f"{ticket} was granted with {live} tickets live; (1 + eta) B is {self.capacity}")
        name = self._run.urls.get(server, "")
        own = TicketId.parse(ticket)
        attempt = own.attempt if own is not None else self._run.attempt_of(event.process)
        if self.echoed.get(name, {}).get(attempt, -1) < min_version:
            self.broken(
                "traffic",
                f"{ticket} is routed to {name or server}, which has never reported version {min_version} or newer",
            )

    def _on_answered(self, event: Event, to: str, request: str, tickets: tuple[str, ...]) -> None:
        first = self.answers.setdefault((event.process, to, request), frozenset(tickets))
        # If a worker counted as lost, its tickets were taken back. The same request may then get other tickets
        if not first.issuperset(tickets) and self._run.live_tickets(event.process) & first:
            self.broken("granted twice", f"request {request} of {to} got {sorted(first)}, and later {sorted(tickets)}")

    def _on_trained(
        self, event: Event, attempt: int, version: int, tickets: list[str], batch: list[str], weights: int
    ) -> None:
        if weights != version:
            self.broken("step", f"the step from version {version} was taken with weights of version {weights}")
        if sorted(tickets) != sorted(batch):
            odd = sorted(set(batch) ^ set(tickets)) or "some groups twice"
            self.broken("batch", f"the step from version {version} was not taken on its batch of {len(batch)}: {odd}")
        prompts = self._run.lineage
        for ticket in tickets:
            name = TicketId.parse(ticket)
            assert name is not None
            prompt = (name.locator.epoch, name.locator.position)
            if name.attempt != attempt:
                self.broken("attempt", f"{ticket} was trained in attempt {attempt}")
            oldest = self.oldest.get(ticket)
            if oldest is None:
                self.broken("stored", f"{ticket} was trained, but never stored at the master")
            elif self.scenario.overdue != "train" and version - oldest.version > self.scenario.eta:
                self.broken(
                    "staleness",
                    f"{ticket} has tokens of {oldest} and was trained at {version}; eta is {self.scenario.eta}",
                )
            if prompt in prompts:
                self.broken("exactly once", f"prompt {prompt} was trained as {prompts[prompt]}, and again as {ticket}")
            prompts[prompt] = ticket

    def _on_part(self, event: Event, attempt: int, version: int, tickets: list[str], last: bool) -> None:
        earlier = self.parts.setdefault((attempt, version), [])
        if twice := set(earlier).intersection(tickets):
            self.broken("part", f"{sorted(twice)} were in two parts of the batch of version {version}")
        if last and not earlier:
            self.broken("part", f"the last part of the batch of version {version} is the first one")
        earlier += tickets

    # ------------------------------------------------------------------------------------------------ exactly once

    def _on_stored(self, event: Event, ticket: str, prompt: Prompt, oldest: int, reason: str, attempt: int) -> None:
        version, name = WeightVersion.unpack(oldest), TicketId.parse(ticket)
        assert name is not None
        self.oldest[ticket] = version
        own = self._run.attempt_of(event.process)
        if attempt != own or version.attempt != own:
            self.broken("attempt", f"{ticket} of attempt {attempt}, tokens of {version}, was stored in attempt {own}")
        if version.version < name.min_version:
            self.broken("staleness", f"{ticket} has tokens of {version}, older than its min_version")
        buffer = self._run.master_buffer(event.process)
        if buffer is None:
            return
        stored = [meta.locator for meta in buffer.metas(buffer.stored_tickets)]
        if len(set(stored)) < len(stored):
            twice = next(where for where, count in Counter(stored).items() if count > 1)
            self.broken("exactly once", f"prompt {twice} is stored twice; the second ticket is {ticket}")
        if len(buffer) > self.capacity:
            self.broken("queue", f"the master holds {len(buffer)} trajectories; (1 + eta) B is {self.capacity}")

    def _on_not_stored(self, event: Event, ticket: str, prompt: Prompt, oldest: int, reason: str, attempt: int) -> None:
        if not self.scenario.faults and "trajectories already" in reason:
            self.broken("gate", f"without a fault the master had no room for {ticket}: {reason}")

    def _on_acked(self, event: Event, ticket: str, verdict: str) -> None:
        if verdict == "stored" and ticket not in self.oldest:
            self.broken("acknowledged", f"{ticket} was acknowledged as stored before the master had it")

    # ----------------------------------------------------------------------------------------------------- weights

    def _on_published(self, event: Event, version: str) -> None:
        new = WeightVersion.parse(version)
        if self._run.version_on_disk(new) is None:
            self.broken("weights", f"model_version {version} was published, but is not on disk")
        if self.published is not None and new < self.published:
            self.broken("weights", f"model_version went back from {self.published} to {version}")
        self.published = new
        self._check_chain(new)

    def _on_pruned(self, event: Event, kept: list[WeightVersion]) -> None:
        for version in kept:
            self._check_chain(version)

    def _check_chain(self, version: WeightVersion) -> None:
        """A delta applies only to its base, so all of its chain must be on disk."""
        disk = self._run.disk
        for place, folder in disk.chain(self._run.path_of(version)):
            if disk.folders.get(place) is not folder:
                self.broken("delta", f"{version} needs {folder.version}, which is not on disk any more")
            if folder.version is None or folder.version.attempt != version.attempt:
                self.broken("delta", f"{version} needs {folder.version} of another attempt")

    # ------------------------------------------------------------------------------------------------------ shared devices

    def _on_devices(self, event: Event, taken: bool) -> None:
        (self.holders.add if taken else self.holders.discard)(event.process)
        if len({label.startswith("generation_server/") for label in self.holders}) > 1:
            self.broken("devices", f"generation and training have them at the same time: {sorted(self.holders)}")

    def _on_killed(self, event: Event) -> None:
        self.holders.discard(event.process)

    def _on_loaded(self, event: Event, version: str, path: str) -> None:
        new = WeightVersion.parse(version)
        before = self.loaded.get(event.process)
        if path not in self._run.committed:
            self.broken("weights", f"{event.process} loaded {version}, which was never complete on disk")
        if before is not None and new < before:
            self.broken("weights", f"{event.process} went back from {before} to {version}")
        self.loaded[event.process] = new

    def _on_echoed(self, event: Event, version: str) -> None:
        if version:
            new, newest = WeightVersion.parse(version), self.echoed.setdefault(event.process, {})
            newest[new.attempt] = max(new.version, newest.get(new.attempt, -1))

    # --------------------------------------------------------------------------------------------------- unexpected ends

    def _on_ended(self, event: Event, error: str) -> None:
        self.holders.discard(event.process)
        if error:  # no fault excuses one
            self.broken("failed", f"{event.process}: {error}")

    def _on_callback_error(self, event: Event, error: str) -> None:
        self.broken("failed", f"{event.process}: {error}")

    def _on_http_500(self, event: Event, path: str, error: str) -> None:
        self.broken("failed", f"{event.process} answered {path} with 500: {error}")

    # --------------------------------------------------------------------------------------------------------- bounds

    def look_at(self, process: Process, board: StatusBoard) -> None:
        """Check waits, queues and leases. Called once a second."""
        now = self._run.scheduler.monotonic()
        for wait in board.snapshot().waits:
            waited_s, limit_s = min(wait.since_s, now - process.thawed_at), wait.limit_s
            if limit_s is not None and waited_s > limit_s + _WAIT_SLACK_S and not wait.what.startswith("step "):
                self.broken(
                    "wait",
                    f"{process.label} waits for {wait.what} from {wait.on} for {waited_s:.0f} s; its limit is {limit_s:g} s",
                )
        worker: Any = process.worker
        if process.ledger is not None:
            self._look_at_leases(process, process.ledger)
        elif process.kind == "model_worker" and len(worker.store) > worker.store.capacity:
            self.broken(
                "queue", f"{process.label} holds {len(worker.store)} groups; its capacity is {worker.store.capacity}"
            )

    def look_at_queue(self, pull: SimPull) -> None:
        """Check a socket's queue. Called whenever a message has to wait in it."""
        if len(pull.queue) > _MAX_QUEUED:
            self.broken("queue", f"{len(pull.queue)} messages wait at {pull.address}")

    def _look_at_leases(self, manager: Process, ledger: Ledger) -> None:
        now, slack_s = self._run.now, 2 * self.scenario.lease_s + _LEASE_SLACK_S
        for live in ledger._live.values():
            if live.state != "running":
                continue
            died_at = self._run.died_at.get(live.incarnation)
            begun = live.granted_at - (self._run.scheduler.monotonic() - now)
            quiet = max(self._run.quiet_since, manager.started_at, begun)
            if died_at is not None and now - max(died_at, quiet) > slack_s:
                self.broken(
                    "lease",
                    f"{live.ticket.ticket_id} is held by {live.incarnation}, which died {now - died_at:.0f} s ago",
                )

    # ------------------------------------------------------------------------------------------------------ at the end

    def at_end(self) -> None:
        """Check the final weights after the master has ended without an error: each prompt is in them once, or was rejected."""
        run, scenario = self._run, self.scenario
        final = run.final_weights()
        if final is None:
            self.broken("end", "the master has ended without final weights")
            return
        trained = Counter((locator.epoch, locator.position) for locator, _, _ in final.trained)
        twice = [prompt for prompt, count in trained.items() if count > 1]
        if twice:
            self.broken("exactly once", f"prompts {twice[:5]} are in the final weights more than once")
        every = {(epoch, position) for epoch in range(scenario.num_epochs) for position in range(scenario.num_prompts)}
        lost = every - trained.keys() - run.rejected.keys()
        if lost:
            self.broken("exactly once", f"prompts {sorted(lost)[:5]} ({len(lost)}) were neither trained nor rejected")
        both = trained.keys() & run.rejected.keys()
        if both:
            self.broken("exactly once", f"prompts {sorted(both)[:5]} were both trained and rejected")
        if not scenario.faults and scenario.overdue == "wait" and scenario.overdue_wait_s >= 30.0:
            odd = {reason for reason in run.rejected.values() if reason != "simulated"} - (
                {"max_issues"} if scenario.release_share else set()
            )
            if odd or run.num_dropped:
                self.broken(
                    "wasted",
                    f"without a fault {run.num_dropped} groups were dropped, prompts rejected for {sorted(odd)}",
                )
