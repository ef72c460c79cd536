"""The asynchronous rule as a whole: admission, ledger and batch formation under arbitrary schedules.

A model of the run: rollout workers finish in any order, lose answers, repeat calls, die and restart; trajectories arrive late;
reports are repeated; servers load versions late. In every reachable state (docs/design/asynchronous-rule.md):

1. no group is trained more than eta versions after its oldest token was sampled; without faults none is dropped for its age;
   at most (1 + eta) * B tickets are live;
2. each prompt of each epoch is trained exactly once or rejected with a reason.

The run never stalls: when nothing runs, a step can start or a prompt can be admitted, until all prompts are done.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.manager.admission import Gate
from asyncrl.manager.ledger import Ledger
from asyncrl.manager.routing import ServerState, ServerTable
from asyncrl.master.batch import BatchFormer, NotReady, Ready
from asyncrl.protocol.manager import (
    AllocateRequest,
    FinishRequest,
    HeartbeatRequest,
    LedgerView,
    MasterReport,
    RolloutResult,
    Ticket,
    TicketView,
)
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion

LEASE_S = 15.0
HEARTBEAT_S = 2.0
OVERDUE_S = 100.0
NUM_SEEDS = 40


@dataclass
class Rollout:
    """A ticket held by a rollout worker."""

    ticket: Ticket
    first_version: int = -1  # the version of its first token; -1: none sampled yet
    pushed: bool = False  # the master has answered for its trajectory, but the manager has not heard of it


@dataclass
class Worker:
    name: str
    start: int = 0
    held: dict[str, Rollout] = field(default_factory=dict)
    last_request: AllocateRequest | None = None
    frozen: bool = False
    repeats: list[FinishRequest] = field(default_factory=list)

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.start}"


class Run:
    """The run: the real ledger, server table and batch former, and a small model of the rest."""

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
        overdue: str = "wait",
        overdue_wait_s: float = 1e9,
    ) -> None:
        self.batch_size, self.eta, self.overdue = batch_size, eta, overdue
        self.num_prompts, self.num_epochs = num_prompts, num_epochs
        self.now = 0.0
        self.table = ServerTable("least_requests", dead_after_s=1e9)
        self.ledger = Ledger(
            self.table,
            batch_size=batch_size,
            eta=eta,
            max_concurrent=max_concurrent,
            num_heads=2,
            max_issues=max_issues,
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
            nonce="m",
        )
        self.former = BatchFormer(
            batch_size=batch_size, max_head_offpolicyness=eta, overdue=overdue, overdue_wait_s=overdue_wait_s
        )
        self.max_issues = max_issues
        self.workers = [Worker(f"rollout_worker/{index}") for index in range(num_workers)]
        self.table.announce("generation_server/0", "http://s", 0.0)
        self.num_requests = 0
        # the master
        self.trained_version = 0
        self.published = 0
        self.stored: dict[str, TrajectoryMeta] = {}
        self.taken: set[str] = set()  # tickets taken for the next batch (train.streaming)
        self.step: list[str] = []  # tickets in the current train step
        self.consumed: list[str] = []  # not yet reported
        self.rejected_seen = 0
        self.trained: Counter[Locator] = Counter()
        self.rejected: dict[Locator, str] = {}
        self.view: LedgerView | None = None
        self.pending_revoke: tuple[str, ...] = ()
        self.last_report: MasterReport | None = None
        # counts of events
        self.num_faults = 0
        self.num_dropped_for_age = 0
        self.num_revoked = 0
        self.num_late_after_rejection = 0
        self.num_steps = 0
        self.max_age = 0
        self.partial_batches = 0
        self.serve()
        self.report(full=True)

    # -------------------------------------------------------------------------------------------------- servers

    @property
    def served(self) -> int:
        version = self.table.servers["generation_server/0"].version
        assert version is not None
        return version.version

    def serve(self) -> None:
        """Load the newest published version on the server. Running rollouts continue under it."""
        version = WeightVersion(1, self.published)
        incarnation = self.table.begin_update("generation_server/0", version)
        assert self.table.loaded("generation_server/0", incarnation, version, self.now)

    # ------------------------------------------------------------------------------------------- rollout workers

    def allocate(self, worker: Worker, count: int, *, lose_answer: bool = False, repeat: bool = False) -> int:
        if not repeat or worker.last_request is None:
            self.num_requests += 1
            worker.last_request = AllocateRequest(
                request_id=f"r{self.num_requests}", worker=worker.name, incarnation=worker.incarnation, count=count
            )
        (reply,) = self.ledger.allocate([worker.last_request], self.now)
        if lose_answer:
            self.num_faults += 1
            return 0
        new = [ticket for ticket in reply.tickets if ticket.ticket_id not in worker.held]
        for ticket in new:
            assert ticket.min_version <= self.served
            assert ticket.deadline == ticket.min_version + self.eta
            worker.held[ticket.ticket_id] = Rollout(ticket)
        return len(new)

    def sample(self, rollout: Rollout) -> None:
        """Sample the first token, unless one exists."""
        if rollout.first_version < 0:
            rollout.first_version = self.served
            assert rollout.first_version >= rollout.ticket.min_version

    def finish(
        self, worker: Worker, rollout: Rollout, outcome: Literal["stored", "rejected", "released"], *, told: bool = True
    ) -> None:
        """End a rollout. Its trajectory goes to the master; then, if `told`, the manager receives the outcome."""
        if not rollout.pushed:
            self.sample(rollout)
            if outcome == "stored" and not self.store(rollout):
                outcome = "released"  # the master has another trajectory of this prompt
            if outcome == "stored":
                rollout.pushed = True
        elif rollout.pushed:
            outcome = "stored"
        if outcome == "released":
            self.num_faults += 1
        if not told:
            return
        result = RolloutResult(ticket_id=rollout.ticket.ticket_id, outcome=outcome, reason=f"{outcome} for the test")
        request = FinishRequest(worker=worker.name, incarnation=worker.incarnation, results=[result])
        self.ledger.finish(request, self.now)
        worker.repeats = [*worker.repeats[-3:], request]
        del worker.held[rollout.ticket.ticket_id]

    def heartbeat(self, worker: Worker) -> None:
        request = HeartbeatRequest(worker=worker.name, incarnation=worker.incarnation, held=list(worker.held))
        for ticket_id in self.ledger.heartbeat(request, self.now).revoked:
            worker.held.pop(ticket_id, None)

    def kill(self, worker: Worker) -> None:
        self.num_faults += len(worker.held)
        worker.held.clear()
        worker.start += 1
        worker.last_request = None

    # ------------------------------------------------------------------------------------------------- the master

    def is_done(self, locator: Locator) -> bool:
        return locator in self.trained or locator in self.rejected

    def store(self, rollout: Rollout) -> bool:
        """Store a trajectory; the first one of a prompt wins."""
        ticket = rollout.ticket
        known = {meta.locator for meta in self.stored.values()}
        if ticket.ticket_id in self.stored:
            return True
        if self.is_done(ticket.locator) or ticket.locator in known:
            return False
        version = WeightVersion(1, rollout.first_version).pack()
        self.stored[ticket.ticket_id] = TrajectoryMeta(
            ticket_id=ticket.ticket_id,
            locator=ticket.locator,
            attempt=1,
            head=ticket.head,
            keys=[],
            seqlens=[2],
            response_lengths=[1],
            rewards=[1.0],
            version_start=[version],
            version_end=[version],
            birth_time=0.0,
        )
        return True

    def report(self, *, full: bool = False, lose_answer: bool = False, old: bool = False) -> None:
        if old and self.last_report is not None:  # a copy that was delayed for a long time
            self.ledger.report(self.last_report, self.now)
            return
        report = MasterReport(
            attempt=1,
            trained_version=self.trained_version,
            consumed=list(self.consumed),
            stored=list(self.stored),
            revoke=list(self.pending_revoke),
            rejected_seen=self.rejected_seen,
            full=full,
            num_prompts=self.num_prompts,
            num_epochs=self.num_epochs,
        )
        self.last_report = report
        self.ledger.report(report, self.now)
        view = self.ledger.view()
        if lose_answer:
            return
        self.consumed.clear()
        self.pending_revoke = ()
        stored = {meta.locator for meta in self.stored.values()}
        for rejected in view.rejected:
            self.rejected_seen += 1
            if not self.is_done(rejected.locator) and rejected.locator not in stored:
                self.rejected[rejected.locator] = rejected.reason
            else:
                self.num_late_after_rejection += 1
        self.view = view

    def try_step(self) -> bool:
        """Begin a train step if the asynchronous rule allows it."""
        assert self.view is not None
        assert not self.step
        decision = self.former.decide(
            stored=list(self.stored.values()),
            live=self.view.live,
            version=self.trained_version,
            exhausted=self.view.exhausted,
            now=self.now,
        )
        if isinstance(decision, NotReady):
            self.pending_revoke += decision.revoke
            self.num_revoked += len(decision.revoke)
            self.num_dropped_for_age += len(decision.drop)
            assert not self.taken & {*decision.drop, *decision.revoke}, "a group in the batch is given up"
            for ticket_id in decision.drop:
                del self.stored[ticket_id]
            return False
        self.check_batch(decision)
        assert self.taken <= set(decision.tickets)
        self.taken = set()
        self.step = list(decision.tickets)
        return bool(self.step)

    def take(self, count: int) -> None:
        """Take up to `count` admissible trajectories for the next batch, as with train.streaming."""
        assert self.view is not None
        groups = self.former.admissible(
            stored=list(self.stored.values()), live=self.view.live, version=self.trained_version
        )
        assert not self.taken & {meta.ticket_id for meta in groups}
        assert len(self.taken) + len(groups) <= self.batch_size
        self.former.take(groups[:count])
        self.taken |= {meta.ticket_id for meta in groups[:count]}
        if self.num_faults == 0:
            self.check_that_the_batch_can_be_completed()

    def check_that_the_batch_can_be_completed(self) -> None:
        """The full rule: whenever the live tickets finish, the earliest ones complete the batch, and the rest fits into the steps
        before their deadlines. The manager's own ledger counts here, not the master's view of it."""
        trained = {*self.consumed, *self.step}
        deadlines = {view.ticket_id: view.deadline for view in self.ledger.view().live}
        rest = sorted(
            deadline for ticket, deadline in deadlines.items() if ticket not in trained and ticket not in self.taken
        )
        rest = rest[self.batch_size - len(self.taken) :]
        for deadline in range(self.trained_version, self.trained_version + self.eta + 1):
            due = sum(other <= deadline for other in rest)
            assert due <= (deadline - self.trained_version) * self.batch_size, (deadline, sorted(deadlines.items()))

    def check_batch(self, ready: Ready) -> None:
        metas = [self.stored[ticket_id] for ticket_id in ready.tickets]
        assert metas == sorted(metas, key=lambda meta: meta.locator)
        assert len(metas) == self.batch_size or ready.partial or not metas
        for meta in metas:
            age = self.trained_version - WeightVersion.unpack(min(meta.version_start)).version
            assert age >= 0, "a trajectory is newer than the version that trains on it"
            self.max_age = max(self.max_age, age)
            if self.overdue != "train":
                assert age <= self.eta, f"{meta.ticket_id} is {age} versions old at step {self.trained_version}"
        if ready.partial:
            self.partial_batches += 1

    def end_step(self) -> None:
        for ticket_id in self.step:
            meta = self.stored.pop(ticket_id)
            self.trained[meta.locator] += 1
            assert self.trained[meta.locator] == 1, f"{meta.locator} is trained twice"
        self.consumed += self.step
        self.step = []
        self.trained_version += 1
        self.num_steps += 1

    # ---------------------------------------------------------------------------------------------- end of the run

    @property
    def finished(self) -> bool:
        return len(self.trained) + len(self.rejected) == self.num_prompts * self.num_epochs

    def drain(self) -> None:
        """Take turns without faults until the run ends. From any state it must end within a bounded number of turns."""
        limit = 20 + 8 * self.max_issues * self.num_prompts * self.num_epochs
        for _ in range(limit):
            if self.finished and not self.step:
                break
            if self.step:
                self.end_step()
            self.published = self.trained_version
            if self.served < self.published:
                self.serve()
            for worker in self.workers:
                worker.frozen = False
                self.allocate(worker, 1000)
                for rollout in list(worker.held.values()):
                    self.finish(worker, rollout, "stored")
            for _ in range(2):  # releases tickets whose answers were lost: no heartbeat lists them
                self.now += HEARTBEAT_S
                for worker in self.workers:
                    self.heartbeat(worker)
            self.report()
            self.try_step()
            if not self.step:
                self.report()
        else:
            raise AssertionError(f"the run did not end: {self.ledger.refusal(self.now)!r}, {self.ledger.view()}")
        self.report()
        assert self.ledger.num_live == 0
        assert self.ledger.num_running == 0
        assert self.ledger.exhausted
        assert self.table.servers["generation_server/0"].running == 0
        everything = {Locator(e, p) for e in range(self.num_epochs) for p in range(self.num_prompts)}
        assert set(self.trained) | set(self.rejected) == everything
        assert not set(self.trained) & set(self.rejected)
        assert set(self.trained.values()) <= {1}
        assert all(self.rejected.values())


class AsyncRule(RuleBasedStateMachine):
    """All events that may happen, in any order."""

    run: Run
    faults = True

    @initialize(
        batch_size=st.integers(1, 4),
        eta=st.integers(0, 3),
        num_prompts=st.integers(1, 9),
        num_epochs=st.integers(1, 3),
        max_concurrent=st.integers(0, 6),
    )
    def begin(self, **options: int) -> None:
        self.run = Run(**options, overdue_wait_s=OVERDUE_S if self.faults else 1e9)

    def some_worker(self, data: st.DataObject) -> Worker:
        return self.run.workers[data.draw(st.integers(0, len(self.run.workers) - 1))]

    def some_rollout(self, data: st.DataObject) -> tuple[Worker, Rollout] | None:
        pairs = [(worker, rollout) for worker in self.run.workers for rollout in worker.held.values()]
        return data.draw(st.sampled_from(pairs)) if pairs else None

    # ------------------------------------------------------------------------------------------------------ events

    @rule(data=st.data(), count=st.integers(1, 20))
    def allocate(self, data: st.DataObject, count: int) -> None:
        self.run.allocate(self.some_worker(data), count)

    @rule(data=st.data())
    def allocate_again(self, data: st.DataObject) -> None:
        self.run.allocate(self.some_worker(data), 1, repeat=True)

    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        if pair := self.some_rollout(data):
            self.run.sample(pair[1])

    @rule(data=st.data(), outcome=st.sampled_from(["stored"] * 4 + ["rejected"]), count=st.integers(1, 6))
    def finish(self, data: st.DataObject, outcome: Any, count: int) -> None:
        for _ in range(count):
            if pair := self.some_rollout(data):
                self.run.finish(*pair, outcome)

    @rule(data=st.data())
    def finish_but_the_manager_hears_later(self, data: st.DataObject) -> None:
        if pair := self.some_rollout(data):
            self.run.finish(*pair, "stored", told=False)

    @rule(data=st.data())
    def finish_is_told_again(self, data: st.DataObject) -> None:
        worker = self.some_worker(data)
        if worker.repeats:
            self.run.ledger.finish(data.draw(st.sampled_from(worker.repeats)), self.run.now)

    @rule()
    def time_passes(self) -> None:
        self.run.now += HEARTBEAT_S
        for worker in self.run.workers:
            if not worker.frozen:
                self.run.heartbeat(worker)
        self.run.ledger.expire(self.run.now)

    @rule(lose_answer=st.booleans())
    def report(self, lose_answer: bool) -> None:
        self.run.report(lose_answer=lose_answer)

    @rule()
    def an_old_report_arrives(self) -> None:
        self.run.report(old=True)

    @precondition(lambda self: not self.run.step)
    @rule()
    def try_step(self) -> None:
        self.run.try_step()

    @precondition(lambda self: not self.run.step)
    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        self.run.take(count)

    @precondition(lambda self: not self.run.step)
    @rule(told=st.booleans(), served=st.booleans())
    def try_whole_step(self, told: bool, served: bool) -> None:
        self.run.report()
        if not self.run.try_step():
            return
        self.run.end_step()
        if told:
            self.run.report()
        if served:
            self.run.published = self.run.trained_version
            self.run.serve()

    @precondition(lambda self: self.run.step)
    @rule()
    def end_step(self) -> None:
        self.run.end_step()

    @precondition(lambda self: self.run.published < self.run.trained_version)
    @rule()
    def publish(self) -> None:
        self.run.published = self.run.trained_version

    @precondition(lambda self: self.run.served < self.run.published)
    @rule()
    def serve(self) -> None:
        self.run.serve()

    # ------------------------------------------------------------------------------------------------------ faults

    @precondition(lambda self: self.faults)
    @rule(data=st.data())
    def answer_is_lost(self, data: st.DataObject) -> None:
        self.run.allocate(self.some_worker(data), 2, lose_answer=True)

    @precondition(lambda self: self.faults)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if pair := self.some_rollout(data):
            self.run.finish(*pair, "released")

    @precondition(lambda self: self.faults)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        self.run.kill(self.some_worker(data))

    @precondition(lambda self: self.faults)
    @rule(data=st.data())
    def worker_freezes_or_thaws(self, data: st.DataObject) -> None:
        """A worker frozen past its lease loses its tickets, but its trajectories may still arrive."""
        worker = self.some_worker(data)
        worker.frozen = not worker.frozen
        self.run.num_faults += 1
        if worker.frozen:
            for _ in range(int(LEASE_S / HEARTBEAT_S) + 1):
                self.time_passes()

    @precondition(lambda self: self.faults)
    @rule()
    def a_rollout_hangs_for_long(self) -> None:
        for _ in range(int(OVERDUE_S / HEARTBEAT_S)):
            self.time_passes()
        self.run.num_faults += 1

    # -------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def live_is_bounded(self) -> None:
        if not hasattr(self, "run"):
            return
        run, ledger = self.run, self.run.ledger
        # A trajectory of an abandoned prompt may still arrive before the master has heard that the prompt was abandoned.
        room = (1 + run.eta) * run.batch_size + ledger.counters["accepted_late", ""]
        assert ledger.num_live <= room
        assert ledger.num_running <= ledger.gate.max_concurrent
        live = ledger.view().live
        assert ledger.num_running == sum(ticket.state == "running" for ticket in live)
        assert len({ticket.locator for ticket in live}) == ledger.num_live == len(live)
        assert run.table.servers["generation_server/0"].running == ledger.num_running
        assert run.table.servers["generation_server/0"].state is ServerState.HEALTHY

    @invariant()
    def without_faults_nothing_is_lost(self) -> None:
        if hasattr(self, "run") and self.run.num_faults == 0:
            assert self.run.num_dropped_for_age == 0
            assert self.run.num_revoked == 0
            assert self.run.ledger.num_live <= (1 + self.run.eta) * self.run.batch_size
            assert "max_issues" not in self.run.rejected.values()

    @invariant()
    def nothing_stands_still(self) -> None:
        """If no rollout or step runs, and all is reported and served: a step or a prompt can start, or all is done."""
        if not hasattr(self, "run"):
            return
        run = self.run
        told = run.view is not None and run.view.revision == run.ledger.revision and not run.consumed
        idle = not run.step and run.ledger.num_running == 0 and run.served == run.trained_version
        if not (told and idle) or run.finished or run.pending_revoke or any(worker.held for worker in run.workers):
            return
        if set(run.stored) != {ticket.ticket_id for ticket in run.ledger.view().live}:
            return  # the manager has not heard of all stored tickets
        assert run.ledger.refusal(run.now) == "" or len(run.stored) >= run.batch_size or run.ledger.exhausted

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.drain()


class AsyncRuleWithoutFaults(AsyncRule):
    faults = False


# Hypothesis replays a failure from its seed. The schedules are the same on every machine.
_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAsyncRule = AsyncRule.TestCase
TestAsyncRule.settings = _SETTINGS
TestAsyncRuleWithoutFaults = AsyncRuleWithoutFaults.TestCase
TestAsyncRuleWithoutFaults.settings = _SETTINGS


@pytest.mark.parametrize("eta", [0, 1, 2, 5])
def test_admission_stops_without_training(eta: int) -> None:
    """The leak of AReaL v0.3: it does not count samples that are finished but not yet fetched by the master."""
    run = Run(batch_size=3, eta=eta, num_prompts=100, num_epochs=1)
    (worker, _) = run.workers
    admitted = 0
    while run.allocate(worker, 1):
        admitted += 1
        for rollout in list(worker.held.values()):
            run.finish(worker, rollout, "stored")
        run.report()
        assert admitted <= 100
    assert admitted == (1 + eta) * 3
    assert run.ledger.refusal(run.now) == "staleness"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_durations_with_long_tails(seed: int, streams: bool) -> None:
    """Event-driven runs without faults. Rollouts take 1 to 300 s (log-uniform), and versions are served late.

    No group exceeds eta, nothing is dropped, the run does not deadlock, and every prompt is trained once or rejected. With
    `streams` the batches are taken in pieces.
    """
    rng = random.Random(seed)
    run = Run(
        batch_size=rng.randint(1, 12),
        eta=rng.choice([0, 1, 2, 4, 8]),
        num_prompts=rng.randint(5, 60),
        num_epochs=rng.randint(1, 3),
        max_concurrent=rng.choice([0, 3, 20]),
    )
    train_s, serve_s = rng.uniform(0.0, 30.0), rng.uniform(0.0, 60.0)
    ends: dict[str, float] = {}
    step_ends = serve_at = float("inf")
    for _ in range(20_000):
        for worker in run.workers:
            run.allocate(worker, rng.randint(1, 8))
            for ticket_id, rollout in worker.held.items():
                run.sample(rollout)
                ends.setdefault(ticket_id, run.now + 10 ** rng.uniform(0.0, 2.5))
        run.report()
        if run.finished:
            break
        if streams and not run.step:
            run.take(rng.randint(1, 3))
        if not run.step and run.try_step():
            step_ends = run.now + train_s
        upcoming = min([step_ends, serve_at, *(ends[ticket] for worker in run.workers for ticket in worker.held)])
        assert upcoming < float("inf"), "no event is pending"
        run.now = upcoming
        if step_ends <= run.now:
            run.end_step()
            step_ends, serve_at = float("inf"), min(serve_at, run.now + serve_s)
        if serve_at <= run.now:
            run.published = run.trained_version
            run.serve()
            serve_at = float("inf")
        for worker in run.workers:
            for ticket_id, rollout in list(worker.held.items()):
                if ends[ticket_id] <= run.now:
                    run.finish(worker, rollout, "rejected" if rng.random() < 0.1 else "stored")
    assert run.finished
    assert run.max_age <= run.eta
    assert (run.num_revoked, run.num_dropped_for_age, run.num_faults) == (0, 0, 0)
    run.drain()


def some_rollouts(run: Run, rng: random.Random) -> list[tuple[Worker, Rollout]]:
    pairs = [(worker, rollout) for worker in run.workers for rollout in worker.held.values()]
    return rng.sample(pairs, min(len(pairs), rng.randint(1, 4)))


def something_happens(run: Run, rng: random.Random) -> None:
    worker = rng.choice(run.workers)
    match rng.choices(
        [
            "allocate",
            "finish",
            "report",
            "step",
            "serve",
            "time",
            "untold",
            "old",
            "repeat",
            "lose",
            "kill",
            "freeze",
            "hang",
        ],
        [6, 8, 5, 5, 4, 4, 2, 1, 1, 0.5, 0.3, 0.3, 0.1],
    )[0]:
        case "allocate":
            run.allocate(worker, rng.randint(1, 6), repeat=rng.random() < 0.1)
        case "finish" | "untold" as how:
            for pair in some_rollouts(run, rng):
                outcome = rng.choices(["stored", "rejected", "released"], [12, 1, 0.3])[0]
                run.finish(*pair, outcome, told=how == "finish" or outcome != "stored")
        case "report":
            run.report(lose_answer=rng.random() < 0.1)
        case "step":
            if run.step:
                run.end_step()
            else:
                run.try_step()
        case "serve":
            run.published = rng.randint(run.published, run.trained_version)
            if run.served < run.published:
                run.serve()
        case "time" | "hang" as how:
            for _ in range(1 if how == "time" else int(OVERDUE_S / HEARTBEAT_S)):
                run.now += HEARTBEAT_S
                for other in run.workers:
                    if not other.frozen:
                        run.heartbeat(other)
                run.ledger.expire(run.now)
        case "old":
            run.report(old=True)
        case "repeat":
            for request in worker.repeats:
                run.ledger.finish(request, run.now)
        case "lose":
            run.allocate(worker, 2, lose_answer=True)
        case "kill":
            run.kill(worker)
        case "freeze":
            worker.frozen = not worker.frozen
            run.num_faults += 1


@pytest.mark.parametrize("overdue", ["wait", "drop", "train"])
def test_long_runs_with_faults(overdue: str) -> None:
    """Schedules longer than the state machine's, with many train steps in between."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        run = Run(
            batch_size=rng.randint(1, 4),
            eta=rng.randint(0, 3),
            num_prompts=rng.randint(10, 40),
            num_epochs=2,
            max_concurrent=rng.choice([0, 0, 5]),
            overdue=overdue,
            overdue_wait_s=OVERDUE_S,
        )
        for _ in range(300):
            something_happens(run, rng)
            room = (1 + run.eta) * run.batch_size + run.ledger.counters["accepted_late", ""]
            assert run.ledger.num_live <= room
        seen["steps"] += run.num_steps
        seen["revoked"] += run.num_revoked
        seen["dropped"] += run.num_dropped_for_age
        seen["late"] += run.ledger.counters["accepted_late", ""]
        seen["offpolicy"] += run.max_age > 0
        run.drain()
    assert seen["steps"] > 200
    assert min(seen["late"], seen["offpolicy"]) > 10


# --------------------------------------------------------------------------------------------- the example of the page


def test_the_example_of_the_page_follows_the_rule() -> None:
    """docs/design/asynchronous-rule.md: in each second the gate admits exactly the tickets that begin, and the batch
    former starts exactly the steps that begin."""
    page = (Path(__file__).parents[2] / "docs" / "design" / "asynchronous-rule.md").read_text(encoding="utf-8")
    trainer, served, rollouts = (
        [(name, int(begin), int(end)) for name, begin, end in re.findall(r"^    (.+) : (\d+), (\d+)$", section, re.M)]
        for section in page.split("```mermaid\ngantt\n")[1].partition("```")[0].split("section ")[1:]
    )
    steps = [(set(name.split()[3:]), begin, end) for name, begin, end in trainer]
    views = {
        name[0]: TicketView(
            ticket_id=name[0],
            locator=Locator(0, position),
            deadline=int(name.split()[-1]),
            state="running",
            worker="rollout_worker/0",
        )
        for position, (name, _, _) in enumerate(rollouts)
    }
    gate = Gate(batch_size=2, eta=1, max_concurrent=4)
    former = BatchFormer(batch_size=2, max_head_offpolicyness=1)
    waited_for = set()
    for now in range(served[-1][2]):
        trained = sum(end <= now for _, _, end in steps)
        consumed = set().union(*(tickets for tickets, _, end in steps if end <= now))
        taken = set().union(*(tickets for tickets, begin, _ in steps if begin < now))
        version = next(int(name) for name, begin, end in served if begin <= now < end)
        live = [name[0] for name, begin, _ in rollouts if begin < now and name[0] not in consumed]
        running = [name[0] for name, begin, end in rollouts if begin < now < end]
        room, _ = gate.room(live=len(live), running=len(running), trained=trained, served=version)
        granted = [name[0] for name, begin, _ in rollouts if begin == now]
        assert len(granted) == room, now
        assert all(views[ticket].deadline == version + 1 for ticket in granted)
        if any(begin < now < end for _, begin, end in steps):
            continue
        stored = [name[0] for name, _, end in rollouts if end <= now and name[0] not in taken]
        metas = [
            TrajectoryMeta(
                ticket_id=ticket,
                locator=views[ticket].locator,
                attempt=1,
                head=0,
                keys=[],
                seqlens=[2],
                response_lengths=[1],
                rewards=[1.0],
                version_start=[WeightVersion(1, views[ticket].deadline - 1).pack()],
                version_end=[WeightVersion(1, version).pack()],
                birth_time=0.0,
            )
            for ticket in stored
        ]
        ledger = [views[ticket] for ticket in (*live, *granted)]
        decision = former.decide(stored=metas, live=ledger, version=trained, exhausted=False, now=float(now))
        begun = [tickets for tickets, begin, _ in steps if begin == now]
        assert [set(decision.tickets)] == begun if isinstance(decision, Ready) else begun == [], now
        if isinstance(decision, NotReady) and len(stored) >= 2:
            waited_for.update(decision.stragglers)
    assert waited_for == {"d"}
