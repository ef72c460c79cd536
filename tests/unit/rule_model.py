"""A small model of a run around the real ledger, server table, buffer, batch former and prompt progress.

It models their environment: rollout workers, ghosts of workers, late, duplicated, lost and reordered messages, and managers
and trainer groups (master and heads) that die and restart. A driver chooses the next event. Each event asserts its own
conditions; `check` asserts the invariants that hold between events.

    worker --allocate, finish, heartbeat (HTTP, repeated until answered)--> manager     one in flight per kind and worker
    worker --push (channel, repeated until a verdict arrives)--> head and master
    master --report (HTTP)--> manager
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.manager.ledger import Ledger, StaleAttemptError
from asyncrl.manager.routing import ServerTable
from asyncrl.master.batch import BatchFormer, NotReady
from asyncrl.master.buffer import AsyncIOSequenceBuffer, PromptProgress
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.manager import (
    AllocateReply,
    AllocateRequest,
    FinishRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LedgerView,
    MasterReport,
    RolloutResult,
    Ticket,
)
from asyncrl.protocol.tickets import TicketId
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion

LEASE_S, HEARTBEAT_S, OVERDUE_S = 15.0, 2.0, 100.0
SERVER = "generation_server/0"


@dataclass(eq=False)
class Call:
    """A request to a manager, in flight. It may arrive any number of times before its answer does."""

    what: str
    to: int  # the manager's generation; a request to a dead manager never arrives
    arrive: Callable[[], Any]
    answer: Callable[[Any], None]
    who: Worker | Master
    answers: list[Any] = field(default_factory=list)  # in flight


@dataclass(eq=False)
class Rollout:
    ticket: Ticket
    first_version: WeightVersion | None = None  # the version of its first token
    verdict: StoreVerdict | None = None
    pushes: int = 0  # copies of its trajectory in flight


@dataclass(eq=False)
class Worker:
    """A rollout worker's process. A ghost continues after its successor has started."""

    name: str
    start: int
    ghost: bool = False
    knows: int = 0  # the generation of the manager that it addresses
    held: dict[str, Rollout] = field(default_factory=dict)
    results: list[RolloutResult] = field(default_factory=list)  # not yet acknowledged by the manager
    calls: dict[str, Call] = field(default_factory=dict)
    requests: int = 0
    heartbeat_due: bool = True

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.start:019d}.1.00000000"


@dataclass
class Checkpoint:
    version: int
    trained: list[tuple[int, int, list[Locator]]]  # the lineage so far: (attempt, step, prompts)
    progress: tuple[Locator, list[Locator], int, Counter[str]]  # the arguments of PromptProgress.restore


@dataclass(eq=False)
class Master:
    """The master and the heads of one attempt."""

    attempt: int
    version: int
    progress: PromptProgress
    buffer: AsyncIOSequenceBuffer
    former: BatchFormer
    knows: int
    view: LedgerView | None = None
    full_due: bool = True
    rejected_seen: int = 0
    consumed: list[str] = field(default_factory=list)
    revoke: list[str] = field(default_factory=list)
    step: tuple[str, ...] = ()
    call: Call | None = None
    alive: bool = True


class World:
    """See the module docstring."""

    def __init__(
        self,
        *,
        batch_size: int,
        eta: int,
        num_prompts: int,
        num_epochs: int,
        num_workers: int = 2,
        max_concurrent: int = 0,
        max_issues: int = 3,
    ) -> None:
        self.batch_size, self.eta = batch_size, eta
        self.num_prompts, self.num_epochs = num_prompts, num_epochs
        self.max_concurrent, self.max_issues = max_concurrent, max_issues
        self.num_workers = num_workers
        self.now = 0.0
        self.attempt = 1
        self.generation = 0  # number of managers started so far
        self.published = WeightVersion(1, 0)  # `model_version` in name resolve
        self.serves = WeightVersion(1, 0)  # the version that the generation server has loaded
        self.trained: list[tuple[int, int, list[Locator]]] = []
        self.workers = [Worker(f"rollout_worker/{index}", 0) for index in range(num_workers)]
        self.ghosts: list[Worker] = []
        self.pushes: list[tuple[Worker, Rollout, TrajectoryMeta]] = []  # copies in flight, in any order
        self.verdicts: list[tuple[Worker, Rollout, StoreVerdict]] = []
        self.zombies: list[Master] = []  # masters that were presumed dead
        self.issued: Counter[str] = Counter()
        self.num_lost = 0  # tickets held by workers when they were replaced
        self.num_dropped = self.num_duplicates = self.num_revoked = 0
        self.master = self._new_master(Checkpoint(0, [], (Locator(0, 0), [], 0, Counter())))
        self.checkpoint = self._take_checkpoint()
        self.begin_manager(1, first=True)
        self.serve()

    # ------------------------------------------------------------------------------------------------------ the manager

    def begin_manager(self, attempt: int, *, first: bool = False) -> None:
        """Replace the manager. Requests in flight to the previous manager are lost."""
        self.generation += 1
        self.table = ServerTable("least_requests", dead_after_s=1e9, attempts=Fence(attempt))
        self.ledger = Ledger(
            self.table,
            batch_size=self.batch_size,
            eta=self.eta,
            max_concurrent=self.max_concurrent,
            num_heads=2,
            max_issues=self.max_issues,
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
            attempt=attempt,
            grace_s=0.0 if first else LEASE_S,
            num_workers=self.num_workers,
            nonce=f"m{self.generation}",
            journal=self._note,
        )
        self.table.announce(SERVER, "http://s", self.now)

    def _note(self, event: str, ticket: Ticket) -> None:
        if event == "admitted":
            self.issued[ticket.ticket_id] += 1
            assert self.issued[ticket.ticket_id] == 1, f"{ticket.ticket_id} was issued twice"

    def serve(self) -> None:
        """The manager reads `model_version` and has the server load it. fleet_model.py models which servers must load."""
        if self.published.attempt < self.ledger.attempt:
            return
        self.ledger.begin_attempt(self.published.attempt)
        server = self.table.servers[SERVER]
        if server.version == self.published or (server.version is not None and server.version > self.published):
            return
        incarnation = self.table.begin_update(SERVER, self.published)
        assert self.serves <= self.published, "the server would load an older version"
        self.serves = self.published
        assert self.table.loaded(SERVER, incarnation, self.published, self.now)

    def expire(self) -> None:
        self.ledger.expire(self.now)

    # ------------------------------------------------------------------------------------------------- calls to the manager

    def _begin_call(
        self, who: Worker | Master, what: str, arrive: Callable[[], Any], answer: Callable[[Any], None]
    ) -> Call:
        return Call(what, who.knows, arrive, answer, who)

    def arrives(self, call: Call) -> bool:
        """Deliver the request if its manager is alive. The same request may arrive again."""
        if call.to != self.generation:
            return False
        try:
            answer = call.arrive()
            call.answers.append(answer)
            if isinstance(call.who, Master):
                assert call.who.attempt == self.ledger.attempt, "the report of an earlier attempt was accepted"
            if isinstance(answer, HeartbeatReply):
                names = [TicketId.parse(ticket_id) for ticket_id in answer.revoked]
                assert all(name is None or name.attempt <= self.ledger.attempt for name in names), (
                    "the manager revoked a ticket of an attempt that it does not know"
                )
            self.check()
        except StaleAttemptError:
            assert isinstance(call.who, Master)
            assert call.who.attempt < self.ledger.attempt
            call.who.alive = False  # the zombie learns that its attempt is over, and ends
        return True

    def answered(self, call: Call, index: int = -1) -> None:
        """Deliver an answer and end the call. Other answers to this call are discarded."""
        answer = call.answers[index]
        if isinstance(call.who, Worker):
            call.who.calls.pop(call.what, None)
        elif call.who.call is call:
            call.who.call = None
        call.answer(answer)

    def calls(self) -> list[Call]:
        """Return all calls in flight."""
        calls = [call for worker in [*self.workers, *self.ghosts] for call in worker.calls.values()]
        return calls + [master.call for master in [self.master, *self.zombies] if master.call is not None]

    def notice(self, who: Worker | Master) -> None:
        """Let a process find the current manager. Unanswered calls are repeated there, and a heartbeat goes first."""
        if who.knows == self.generation:
            return
        who.knows = self.generation
        if isinstance(who, Master):
            if who.call is not None:
                who.call.to, who.call.answers = self.generation, []
            return
        who.heartbeat_due = True
        for call in who.calls.values():
            call.to, call.answers = self.generation, []

    # -------------------------------------------------------------------------------------------------- rollout workers

    def allocate(self, worker: Worker, count: int) -> None:
        if "allocate" in worker.calls:
            return
        worker.requests += 1
        request = AllocateRequest(
            request_id=f"{worker.incarnation}-{worker.requests}",
            worker=worker.name,
            incarnation=worker.incarnation,
            count=count,
        )

        def answer(reply: AllocateReply) -> None:
            for ticket in reply.tickets:
                worker.held.setdefault(ticket.ticket_id, Rollout(ticket))

        worker.calls["allocate"] = self._begin_call(
            worker, "allocate", lambda: self.ledger.allocate([request], self.now)[0], answer
        )

    def heartbeat(self, worker: Worker) -> None:
        if "heartbeat" in worker.calls:
            return
        worker.heartbeat_due = False
        request = HeartbeatRequest(worker=worker.name, incarnation=worker.incarnation, held=list(worker.held))

        def answer(reply: HeartbeatReply) -> None:
            for ticket_id in reply.revoked:
                rollout = worker.held.get(ticket_id)
                if rollout is not None and not any(result.ticket_id == ticket_id for result in worker.results):
                    # A ticket is not lost if its prompt was trained before its worker received the verdict.
                    self.num_revoked += not self.master.progress.is_done(rollout.ticket.locator)
                    self._ends(worker, rollout, "released", "revoked")

        worker.calls["heartbeat"] = self._begin_call(
            worker, "heartbeat", lambda: self.ledger.heartbeat(request, self.now), answer
        )

    def sample(self, rollout: Rollout) -> bool:
        """Sample the first token if the server has a version that the ticket allows. Return whether a token exists."""
        least = WeightVersion(rollout.ticket.attempt, rollout.ticket.min_version)
        if rollout.first_version is None and self.serves.attempt == least.attempt and self.serves >= least:
            rollout.first_version = self.serves
        return rollout.first_version is not None

    def push(self, worker: Worker, rollout: Rollout) -> None:
        """Send a copy of the rollout's trajectory to the head, after its first token is sampled."""
        if rollout.verdict is not None or rollout.pushes > 3 or not self.sample(rollout):
            return
        assert rollout.first_version is not None
        ticket, version = rollout.ticket, rollout.first_version.pack()
        meta = TrajectoryMeta(
            ticket_id=ticket.ticket_id,
            locator=ticket.locator,
            attempt=ticket.attempt,
            head=ticket.head,
            keys=[],
            seqlens=[2],
            response_lengths=[1],
            rewards=[1.0],
            version_start=[version],
            version_end=[version],
            birth_time=0.0,
        )
        rollout.pushes += 1
        self.pushes.append((worker, rollout, meta))

    def push_arrives(self, index: int) -> None:
        worker, rollout, meta = self.pushes.pop(index)
        rollout.pushes -= 1
        verdict = self.master.buffer.put(meta)
        assert verdict.verdict != "stored" or meta.attempt == self.master.attempt, (
            "a trajectory of another attempt was stored"
        )
        self.verdicts.append((worker, rollout, verdict))

    def verdict_arrives(self, index: int) -> None:
        worker, rollout, verdict = self.verdicts.pop(index)
        if rollout.verdict is not None or rollout.ticket.ticket_id not in worker.held:
            return
        rollout.verdict = verdict
        self.num_duplicates += verdict.verdict == "duplicate"
        if verdict.verdict == "refused":
            self._ends(worker, rollout, "released", "refused")
        else:
            self._ends(worker, rollout, "stored")

    def _ends(
        self, worker: Worker, rollout: Rollout, outcome: Literal["stored", "rejected", "released"], reason: str = ""
    ) -> None:
        ticket_id = rollout.ticket.ticket_id
        if all(result.ticket_id != ticket_id for result in worker.results):
            worker.results.append(RolloutResult(ticket_id=ticket_id, outcome=outcome, reason=reason or outcome))

    def gives_up(self, worker: Worker, rollout: Rollout, outcome: Literal["rejected", "released"]) -> None:
        """Give a rollout up because its agent or its server failed."""
        if rollout.pushes or rollout.verdict is not None:
            return
        self._ends(worker, rollout, outcome)

    def finish(self, worker: Worker) -> None:
        """Report how rollouts have ended."""
        if "finish" in worker.calls or not worker.results:
            return
        results = list(worker.results)
        request = FinishRequest(worker=worker.name, incarnation=worker.incarnation, results=results)

        def answer(_: object) -> None:
            for result in results:
                worker.held.pop(result.ticket_id, None)
            del worker.results[: len(results)]

        worker.calls["finish"] = self._begin_call(
            worker, "finish", lambda: self.ledger.finish(request, self.now), answer
        )

    def restart_worker(self, index: int, *, ghost: bool) -> None:
        """Replace a worker's process. ghost: the old process was frozen rather than killed, and continues."""
        old = self.workers[index]
        self.num_lost += len(old.held) + sum(call.what == "allocate" for call in old.calls.values()) * 1000
        self.workers[index] = Worker(old.name, old.start + 1, knows=self.generation)
        if ghost:
            old.ghost = True
            self.ghosts = [*self.ghosts[-3:], old]

    # ---------------------------------------------------------------------------------------------------------- the trainer group

    def _new_master(self, checkpoint: Checkpoint) -> Master:
        progress = PromptProgress(self.num_prompts, self.num_epochs)
        progress.restore(*checkpoint.progress)
        capacity = (1 + self.eta) * self.batch_size
        return Master(
            attempt=self.attempt,
            version=checkpoint.version,
            progress=progress,
            buffer=AsyncIOSequenceBuffer(progress, capacity=capacity, attempt=self.attempt),
            former=BatchFormer(batch_size=self.batch_size, max_head_offpolicyness=self.eta, overdue_wait_s=OVERDUE_S),
            knows=self.generation,
        )

    def _take_checkpoint(self) -> Checkpoint:
        progress = self.master.progress
        state = (progress.cursor, progress.beyond_cursor, progress.num_trained, Counter(progress.rejected))
        return Checkpoint(self.master.version, list(self.trained), state)

    def save(self) -> None:
        """Commit a checkpoint, unless a step is in progress."""
        if not self.master.step:
            self.checkpoint = self._take_checkpoint()

    def restart_trainer_group(self, *, zombie: bool) -> None:
        """Restart master and heads from the last checkpoint as the next attempt. All later training is discarded."""
        old = self.master
        self.attempt += 1
        self.trained = list(self.checkpoint.trained)
        self.master = self._new_master(self.checkpoint)
        if zombie:
            self.zombies = [*self.zombies[-1:], old]

    def publish(self) -> None:
        """Publish the newest weights. The model assumes that their files are on disk."""
        version = WeightVersion(self.master.attempt, self.master.version)
        self.published = max(self.published, version)

    def report(self, master: Master) -> None:
        if master.call is not None or not master.alive:
            return
        consumed, full, revoke = list(master.consumed), master.full_due, list(master.revoke)
        report = MasterReport(
            attempt=master.attempt,
            trained_version=master.version,
            consumed=consumed,
            stored=master.buffer.stored_tickets,
            revoke=revoke,
            rejected_seen=master.rejected_seen,
            full=full,
            done=master.progress.beyond_cursor if full else [],
            done_cursor=master.progress.cursor,
            num_prompts=self.num_prompts,
            num_epochs=self.num_epochs,
        )

        def arrive() -> LedgerView:
            self.ledger.report(report, self.now)
            return self.ledger.view()

        def answer(view: LedgerView) -> None:
            master.full_due = not view.known
            if not view.known:
                master.rejected_seen = 0
                return
            del master.consumed[: len(consumed)]
            del master.revoke[: len(revoke)]
            master.rejected_seen += len(view.rejected)
            for rejected in view.rejected:
                if not (master.progress.is_done(rejected.locator) or master.buffer.holds(rejected.locator)):
                    master.progress.mark_rejected(rejected.locator, rejected.reason)
            master.view = view

        master.call = self._begin_call(master, "report", arrive, answer)

    def try_step(self) -> None:
        """Begin a train step if the asynchronous rule allows it."""
        master = self.master
        if master.step or master.view is None or master.revoke:
            return
        stored = master.buffer.stored
        decision = master.former.decide(
            stored=stored,
            live=master.view.live,
            version=master.version,
            exhausted=master.view.exhausted,
            now=self.now,
            settled=master.view.settled,
        )
        if isinstance(decision, NotReady):
            master.revoke += decision.revoke
            self.num_dropped += len(decision.drop)
            for ticket_id in decision.drop:
                master.buffer.drop(ticket_id)
            return
        if not decision.tickets:
            return
        metas = master.buffer.metas(decision.tickets)
        assert metas == sorted(metas, key=lambda meta: meta.locator)
        assert len(metas) == self.batch_size or decision.partial
        for meta in metas:
            first = WeightVersion.unpack(min(meta.version_start))
            assert meta.attempt == first.attempt == master.attempt, (
                "a trajectory of an abandoned lineage would be trained"
            )
            age = master.version - first.version
            assert 0 <= age <= self.eta, f"{meta.ticket_id} is {age} versions old at step {master.version}"
        master.buffer.begin_batch(decision.tickets)
        master.step = decision.tickets

    def end_step(self) -> None:
        """End the train step: every rank has returned."""
        master = self.master
        if not master.step:
            return
        locators = [meta.locator for meta in master.buffer.metas(master.step)]
        master.progress.mark_trained(locators)  # raises if a prompt is trained twice
        master.buffer.end_batch()
        master.version += 1
        master.consumed += master.step
        master.step = ()
        self.trained.append((master.attempt, master.version, locators))

    # ------------------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        ledger, master = self.ledger, self.master
        assert ledger.attempt <= self.attempt
        assert ledger.attempt < self.attempt or ledger.trained_version <= master.version
        live = ledger.view().live
        assert ledger.num_running == sum(ticket.state == "running" for ticket in live)
        assert len({ticket.locator for ticket in live}) == ledger.num_live == len(live)
        assert ledger.num_running <= ledger.gate.max_concurrent + self.num_lost
        # A trajectory of an abandoned prompt may still arrive and be accepted, and a ghost's ticket may be adopted.
        late = ledger.counters["accepted_late", ""] + self.num_lost * (ledger.counters["adopted", ""] > 0)
        assert ledger.num_live <= (1 + self.eta) * self.batch_size + late
        assert all(ticket.ticket_id.startswith(f"a{ledger.attempt}-") for ticket in live)
        assert len(master.buffer) <= (1 + self.eta) * self.batch_size
        lineage = [locator for _, _, locators in self.trained for locator in locators]
        assert len(lineage) == len(set(lineage)), "a prompt was trained twice"
        assert [step for _, step, _ in self.trained] == list(range(1, len(self.trained) + 1))
        attempts = [attempt for attempt, _, _ in self.trained]
        assert attempts == sorted(attempts)
        assert len(lineage) == master.progress.num_trained

    @property
    def finished(self) -> bool:
        progress = self.master.progress
        return progress.num_done == progress.num_total and not self.master.step

    def turn(self, stragglers: int = 0) -> None:
        """Perform every possible action once, without faults. Bit i of stragglers holds back rollouts at position i (modulo 8)."""
        self.now += HEARTBEAT_S
        self.publish()
        self.serve()
        for who in [*self.workers, self.master]:
            self.notice(who)
        self.report(self.master)
        for worker in self.workers:
            self.heartbeat(worker)
            self.finish(worker)
        self.deliver_all()
        for worker in self.workers:
            self.allocate(worker, 1000)
        self.deliver_all()
        for worker in self.workers:
            for rollout in list(worker.held.values()):
                if not stragglers >> (rollout.ticket.locator.position % 8) & 1:
                    self.push(worker, rollout)
        while self.pushes:
            self.push_arrives(0)
        while self.verdicts:
            self.verdict_arrives(0)
        self.end_step()
        for worker in self.workers:
            self.finish(worker)
        self.deliver_all()
        self.report(self.master)
        self.deliver_all()
        self.try_step()
        self.expire()
        self.check()

    def deliver_all(self) -> None:
        for call in self.calls():
            if not isinstance(call.who, Worker) or not call.who.ghost:
                self.arrives(call)
                if call.answers:
                    self.answered(call)

    def drain(self) -> None:
        """Take turns without faults until the run ends. From any state it must end within a bounded number of turns."""
        self.ghosts, self.zombies = [], []
        limit = 100 + 10 * self.max_issues * self.num_prompts * self.num_epochs
        for _ in range(limit):
            if self.finished:
                break
            self.turn()
        else:
            view = self.ledger.view()
            raise AssertionError(f"the run did not end: {self.ledger.refusal(self.now)!r}, {view}, {self.master}")
        for _ in range(3):
            self.turn()
        assert self.ledger.num_live == 0
        assert self.ledger.exhausted
        trained = [locator for _, _, locators in self.trained for locator in locators]
        rejected = self.master.progress.rejected
        assert len(trained) + sum(rejected.values()) == self.num_prompts * self.num_epochs
