"""The manager's ledger: the gate, tickets, leases, repeated calls, evaluation, new attempts, and the successor of a manager."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import pytest

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.manager.admission import EvaluationBook, Gate, PromptCursor
from asyncrl.manager.ledger import Ledger, StaleAttemptError, UnreachedError
from asyncrl.manager.routing import ServerTable
from asyncrl.protocol.manager import (
    AllocateReply,
    AllocateRequest,
    EvalPart,
    EvaluateRequest,
    FinishRequest,
    HeartbeatRequest,
    LedgerView,
    MasterReport,
    Order,
    RolloutResult,
    ScheduleReply,
    ScheduleRequest,
    Ticket,
)
from asyncrl.protocol.names import incarnation, is_earlier
from asyncrl.protocol.tickets import TicketId
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import REWARD_LOST
from asyncrl.runtime.worker import Worker
from tests.support.summaries import group


class Desk:
    """A ledger with healthy servers, a manual clock, and short methods to call it."""

    def __init__(self, *, num_servers: int = 1, register: bool = True, **options: Any) -> None:
        self.now = 0.0
        self.table = ServerTable("least_requests", dead_after_s=15.0)
        self.ledger = Ledger(self.table, **{"nonce": "x", "batch_size": 4, "eta": 1, **options})
        self.attempt = 1
        self.version = 0
        self.rejected_seen = 0
        self._requests = 0
        for index in range(num_servers):
            self.table.announce(f"generation_server/{index}", f"http://s{index}", self.now)
        self.serve(0)
        if register:
            self.report(full=True)

    def serve(self, version: int, *names: str, attempt: int = 1) -> None:
        for name in names or tuple(self.table.servers):
            loaded = WeightVersion(attempt, version)
            incarnation = self.table.begin_update(name, loaded)
            assert self.table.loaded(name, incarnation, loaded, self.now)

    def report(self, newest_attempt: int | None = None, **fields: Any) -> LedgerView:
        defaults = {
            "attempt": self.attempt,
            "trained_version": self.version,
            "consumed": [],
            "stored": [],
            "num_prompts": 100,
            "num_epochs": 2,
            "rejected_seen": self.rejected_seen,
        }
        self.ledger.report(MasterReport(**{**defaults, **fields}), self.now, newest_attempt=newest_attempt)
        return self.ledger.view()

    def ask(
        self, count: int = 1, worker: str = "rollout_worker/0", request_id: str = "", incarnation: str = "a"
    ) -> AllocateReply:
        self._requests += 1
        request_id = request_id or f"r{self._requests}"
        request = AllocateRequest(request_id=request_id, worker=worker, incarnation=incarnation, count=count)
        return self.ledger.allocate([request], self.now)[0]

    def take(self, count: int = 1, **more: Any) -> list[Ticket]:
        tickets = self.ask(count, **more).tickets
        assert len(tickets) == count
        return tickets

    def finish(
        self,
        *tickets: Ticket,
        outcome: Any = "stored",
        worker: str = "rollout_worker/0",
        incarnation: str = "a",
        **more: Any,
    ) -> list[str]:
        results = [RolloutResult(ticket_id=ticket.ticket_id, outcome=outcome, **more) for ticket in tickets]
        request = FinishRequest(worker=worker, incarnation=incarnation, results=results)
        return self.ledger.finish(request, self.now).unknown

    def beat(
        self, *held: Ticket, worker: str = "rollout_worker/0", incarnation: str = "a", after_s: float = 2.0
    ) -> list[str]:
        self.now += after_s
        request = HeartbeatRequest(worker=worker, incarnation=incarnation, held=[ticket.ticket_id for ticket in held])
        return self.ledger.heartbeat(request, self.now).revoked


def ids(tickets: list[Ticket]) -> list[str]:
    return [ticket.ticket_id for ticket in tickets]


def locators(tickets: list[Ticket]) -> list[tuple[int, int]]:
    return [(ticket.locator.epoch, ticket.locator.position) for ticket in tickets]


# ------------------------------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize(
    ("live", "running", "trained", "served", "refusal"),
    [
        (0, 0, 0, 0, ""),
        (7, 3, 5, 5, ""),
        (8, 3, 5, 5, "staleness"),
        (3, 3, 6, 5, ""),
        (4, 3, 6, 5, "staleness"),
        (0, 0, 7, 5, "staleness"),
        (7, 6, 5, 5, "capacity"),
        (7, 3, 5, 6, ""),  # the report of version 6 has not arrived yet
        (8, 3, 5, 6, "staleness"),  # and its absence must not open the gate
    ],
)
def test_gate(live: int, running: int, trained: int, served: int, refusal: str) -> None:
    gate = Gate(batch_size=4, eta=1, max_concurrent=6)
    assert gate.room(live=live, running=running, trained=trained, served=served)[1] == refusal


@pytest.mark.parametrize(("live", "running", "room"), [(0, 0, 6), (6, 1, 2), (3, 3, 3), (7, 0, 1)])
def test_the_room_of_the_gate_is_the_smaller_of_its_bounds(live: int, running: int, room: int) -> None:
    gate = Gate(batch_size=4, eta=1, max_concurrent=6)
    assert gate.room(live=live, running=running, trained=5, served=5) == (room, "")


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_allocation_stops_if_groups_finish_and_none_is_trained(eta: int) -> None:
    """AReaL v0.3 leaks here: it does not count a finished rollout until the master fetches it."""
    desk = Desk(eta=eta)
    admitted = 0
    while tickets := desk.ask().tickets:
        admitted += 1
        desk.finish(*tickets)
        assert admitted <= 100
    assert admitted == (1 + eta) * 4
    assert desk.ask().refusal == "staleness"


def test_a_train_step_admits_one_batch_once_it_is_served() -> None:
    desk = Desk()
    tickets = desk.ask(100).tickets
    assert len(tickets) == 8
    assert {ticket.min_version for ticket in tickets} == {0}
    assert {ticket.deadline for ticket in tickets} == {1}
    desk.finish(*tickets)
    desk.report(stored=ids(tickets))
    desk.version = 1
    view = desk.report(consumed=ids(tickets[:4]), stored=ids(tickets[4:]))
    assert len(view.live) == 4
    assert desk.ask().refusal == "staleness"  # trained, but not served yet
    desk.serve(1)
    fresh = desk.ask(100).tickets
    assert len(fresh) == 4
    assert {(ticket.min_version, ticket.deadline) for ticket in fresh} == {(1, 2)}


def test_stored_but_not_running_does_not_count_for_capacity() -> None:
    desk = Desk(max_concurrent=2)
    tickets = desk.ask(100).tickets
    assert len(tickets) == 2
    assert desk.ask().refusal == "capacity"
    desk.finish(tickets[0])
    assert len(desk.ask(100).tickets) == 1


def test_refusals_name_the_reason() -> None:
    desk = Desk(register=False)
    assert desk.ask().refusal == "not_ready"
    assert not desk.report().known  # not a full report
    assert desk.ask().refusal == "not_ready"
    assert desk.report(full=True, num_prompts=1, num_epochs=2).known
    desk.table.silent("generation_server/0", "no answer", desk.now)
    assert desk.ask().refusal == "no_server"
    desk.table.answered("generation_server/0", "a0001-v00000000", desk.now)
    desk.take(2)
    reply = desk.ask()
    assert (reply.refusal, reply.finished) == ("exhausted", False)
    assert desk.ledger.view().exhausted


def test_tickets_name_the_closed_tasks_and_a_late_report_closes_none() -> None:
    desk = Desk(register=False)
    desk.report(full=True, closed=["a", "b"])
    assert desk.take()[0].closed == ["a", "b"]
    for closed, expected in ((["b"], ["b"]), (["a", "b"], ["b"]), ([], []), (["b"], [])):
        desk.report(closed=closed)
        assert desk.take()[0].closed == expected


def test_after_a_stop_the_ledger_admits_nothing_for_good() -> None:
    desk = Desk()
    desk.report(stop=True)
    desk.report()
    assert desk.ask().refusal == "exhausted"


def test_a_full_report_without_prompts_is_refused() -> None:
    desk = Desk(register=False)
    with pytest.raises(ValueError, match="num_prompts is 0"):
        desk.report(full=True, num_prompts=0)


# ------------------------------------------------------------------------------------------------------------- prompts


def test_prompts_are_issued_in_order_and_the_next_epoch_follows_without_a_pause() -> None:
    desk = Desk(register=False, batch_size=5)
    desk.report(full=True, num_prompts=3, num_epochs=2)
    assert locators(desk.take(6)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_prompts_start_at_the_cursor_that_the_master_reports() -> None:
    desk = Desk(register=False)
    done = [Locator(0, 4), Locator(0, 6), Locator(0, 7)]
    desk.report(full=True, num_prompts=8, num_epochs=2, done_cursor=Locator(0, 3), done=done)
    assert locators(desk.take(4)) == [(0, 3), (0, 5), (1, 0), (1, 1)]


def test_a_cursor_past_the_end_of_an_epoch_continues_with_the_next() -> None:
    cursor = PromptCursor(2, 2, start=Locator(0, 2))
    assert cursor.take() == (Locator(1, 0), 1)
    assert cursor.take() == (Locator(1, 1), 1)
    assert cursor.exhausted
    assert PromptCursor(2, 2, start=Locator(2, 0)).exhausted
    assert not cursor.is_waiting(Locator(2, 0))


def test_ticket_ids_can_be_parsed() -> None:
    name = TicketId(3, Locator(1, 17), 2, 40, 1, "abc")
    assert TicketId.parse(str(name)) == name
    for other in ("", "x", str(name) + "/", str(name).replace("p17", "p"), "eval-a1-3-abc", "a1" * 500):
        assert TicketId.parse(other) is None


def test_released_prompts_go_first_and_at_most_max_issues_times() -> None:
    desk = Desk(max_issues=3)
    first, second = desk.take(2)
    desk.finish(first, outcome="released", reason="server_lost")
    again, third = desk.take(2)
    assert (again.locator, again.issue) == (first.locator, 2)
    assert (third.locator.position, second.issue) == (2, 1)
    assert again.ticket_id != first.ticket_id
    desk.finish(again, outcome="released", reason="server_lost")
    (last,) = desk.take(1)
    desk.finish(last, outcome="released", reason="server_lost")
    (rejected,) = desk.ledger.view().rejected
    assert (rejected.locator, rejected.reason) == (first.locator, "max_issues")
    assert rejected.detail == "issued 3 times, and the last ticket was released: server_lost"
    assert locators(desk.take(1)) == [(0, 3)]
    assert desk.ledger.counters["released", "server_lost"] == 3
    assert desk.ledger.view().released == {"server_lost": 3}


def test_a_prompt_rejected_after_max_issues_names_the_reason_that_its_worker_has_sent_once() -> None:
    desk = Desk(max_issues=1)
    first, second = desk.take(2)
    desk.finish(first, outcome="released", reason="refused", detail="the head holds another model")
    desk.finish(second, outcome="released", reason="refused")
    details = {rejected.detail for rejected in desk.ledger.view().rejected}
    assert details == {"issued 1 times, and the last ticket was released: refused (the head holds another model)"}


def test_a_prompt_released_because_of_lost_reward_processes_is_issued_without_limit() -> None:
    desk = Desk(max_issues=1)
    (ticket,) = desk.take(1)
    for issue in range(2, 6):
        desk.finish(ticket, outcome="released", reason=REWARD_LOST)
        (again,) = desk.take(1)
        assert (again.locator, again.issue) == (ticket.locator, issue)
        ticket = again
    assert desk.ledger.view().rejected == []


def test_rejections_free_room_and_are_reported_until_the_master_has_seen_them() -> None:
    desk = Desk(eta=0)
    tickets = desk.take(4)
    desk.finish(*tickets[:3], outcome="rejected", reason="too_hard", group=group(3, 200))
    view = desk.report()
    assert [rejected.locator for rejected in view.rejected] == [ticket.locator for ticket in tickets[:3]]
    assert view.rejected[0].lengths == [3, 200]
    assert len(desk.report(rejected_seen=2).rejected) == 1
    assert len(desk.report(rejected_seen=2).rejected) == 1  # repeated: the same
    assert len(desk.report(rejected_seen=1).rejected) == 1  # a late report
    assert desk.report(rejected_seen=3).rejected == []
    assert len(desk.take(3)) == 3
    assert desk.ledger.rejected_lengths == {("too_hard", 2): 3, ("too_hard", 8): 3}


def test_the_number_of_reasons_in_metric_labels_is_bounded() -> None:
    desk = Desk(batch_size=200)
    for number, ticket in enumerate(desk.take(100)):
        desk.finish(ticket, outcome="rejected", reason=f"reason {number}" + "!" * 1000)
    assert len({reason for what, reason in desk.ledger.counters if what == "rejected"}) == 33
    assert all(len(reason) <= 64 for _, reason in desk.ledger.counters)


# -------------------------------------------------------------------------------------------------------- repeated calls


def test_the_same_request_gets_the_same_tickets() -> None:
    desk = Desk()
    tickets = desk.take(3, request_id="r")
    assert desk.ask(3, request_id="r").tickets == tickets
    assert desk.ledger.num_live == 3
    assert desk.ask(3, request_id="r", worker="rollout_worker/1").tickets != tickets  # request ids are scoped by worker
    desk.finish(tickets[1])
    assert desk.ask(3, request_id="r").tickets == [tickets[0], tickets[2]]
    desk.finish(tickets[0], tickets[2])
    reply = desk.ask(3, request_id="r")
    assert (reply.tickets, reply.refusal) == ([], "expired")


def test_replies_are_kept_as_long_as_their_requests_may_be_repeated() -> None:
    """The ledger keeps neither the tickets of old replies nor all replies: a thousand workers get millions of them."""
    remembered = 16  # replies per worker
    desk = Desk(batch_size=100, eta=1)
    tickets = [desk.take(1, request_id=f"r{number}")[0] for number in range(60)]
    for number in range(60 - remembered, 60):
        assert desk.ask(1, request_id=f"r{number}").tickets == [tickets[number]]
    for number in reversed(range(60 - remembered)):
        assert desk.ask(1, request_id=f"r{number}").tickets[0] not in tickets
    desk.finish(tickets[-1], outcome="rejected")
    references = sys.getrefcount(tickets[-1])
    assert references == 2  # the list and this call: the ledger keeps no ended ticket


def test_a_refused_request_may_be_repeated() -> None:
    desk = Desk(eta=0)
    tickets = desk.take(4)
    assert desk.ask(request_id="again").refusal == "staleness"
    desk.finish(tickets[0], outcome="rejected")
    assert len(desk.ask(request_id="again").tickets) == 1


def test_a_repeated_result_or_one_of_an_unknown_ticket_changes_nothing() -> None:
    desk = Desk()
    (ticket,) = desk.take(1)
    assert desk.finish(ticket) == []
    revision = desk.ledger.revision
    assert desk.finish(ticket) == []
    assert desk.finish(ticket, outcome="released") == []  # an outcome is already recorded
    assert desk.ledger.num_stored == 1
    desk.report(stored=ids([ticket]))
    desk.version = 1
    desk.report(consumed=ids([ticket]))
    desk.report(consumed=ids([ticket]))
    assert desk.ledger.num_live == 0
    assert desk.finish(ticket) == ids([ticket])
    assert desk.ledger.num_live == 0
    assert desk.ledger.revision > revision


def test_an_outdated_report_changes_nothing() -> None:
    desk = Desk()
    tickets = desk.take(4)
    desk.report(stored=ids(tickets))
    desk.version = 1
    desk.report(consumed=ids(tickets))
    desk.report(trained_version=0, stored=ids(tickets))
    desk.report(trained_version=1, stored=ids(tickets))  # a late report: older than the other with this version
    assert desk.ledger.num_live == 0


def test_room_is_shared_out_round_robin() -> None:
    desk = Desk()
    requests = [
        AllocateRequest(request_id=f"r{index}", worker=f"rollout_worker/{index}", incarnation="a", count=count)
        for index, count in enumerate([100, 1, 100])
    ]
    replies = desk.ledger.allocate(requests, 0.0)
    assert [len(reply.tickets) for reply in replies] == [4, 1, 3]


@pytest.mark.parametrize(("kind", "outcome"), [("train", "evaluated"), ("eval", "stored")])
def test_an_outcome_of_the_wrong_kind_is_refused_and_changes_nothing(kind: str, outcome: str) -> None:
    desk = Desk()
    if kind == "eval":
        desk.ledger.evaluate(evaluation("greedy", num_prompts=1))
    tickets = desk.take(2)
    assert {ticket.kind for ticket in tickets} == {"train"} | {kind}
    wrong = next(ticket for ticket in tickets if ticket.kind == kind)
    with pytest.raises(ValueError, match=outcome):
        desk.finish(*sorted(tickets, key=lambda ticket: ticket is wrong), outcome=outcome)
    assert desk.ledger.num_running + desk.ledger.num_evals_running == 2


# --------------------------------------------------------------------------------------------------------- lost workers


def test_a_manager_that_was_suspended_gives_workers_time_to_report() -> None:
    """It could receive no heartbeat meanwhile, so every worker has half a lease to send one."""
    desk = Desk(eta=0)
    (ticket,) = desk.take(1)
    desk.ledger.expire(1.0)
    desk.ledger.expire(60.0)
    assert {view.ticket_id for view in desk.ledger.view().live} == {ticket.ticket_id}
    for now in (62.0, 65.0, 68.0):
        desk.ledger.expire(now)
    assert desk.ledger.num_live == 0


def test_a_ticket_id_is_never_used_twice() -> None:
    desk = Desk(eta=0)
    seen = set()
    for _ in range(3):
        (ticket,) = desk.take(1)
        assert ticket.ticket_id not in seen
        seen.add(ticket.ticket_id)
        desk.finish(ticket, outcome="released", reason="server_lost")


def test_a_silent_worker_loses_its_running_tickets() -> None:
    desk = Desk(eta=0)
    running, stored, other = desk.take(3)
    (theirs,) = desk.take(1, worker="rollout_worker/1")
    desk.finish(stored)
    desk.now = 14.0
    desk.beat(theirs, worker="rollout_worker/1", after_s=0.0)
    desk.ledger.expire(15.0)
    assert desk.ledger.num_live == 4
    desk.ledger.expire(15.1)
    assert {view.ticket_id for view in desk.ledger.view().live} == {stored.ticket_id, theirs.ticket_id}
    desk.now = 15.1
    again = desk.take(2, worker="rollout_worker/1")
    assert [ticket.locator for ticket in again] == [running.locator, other.locator]
    assert desk.beat(running, stored, other) == ids([running, other])  # it was only slow; both are issued again


def test_tickets_not_listed_twice_are_released() -> None:
    """If two heartbeats in a row do not list a ticket, the manager concludes that the reply with the ticket was lost."""
    desk = Desk()
    kept, lost = desk.take(2)
    assert desk.beat(kept) == []
    assert desk.beat(kept, after_s=0.0) == []  # the same heartbeat sent again does not count
    assert desk.ledger.num_live == 2
    desk.beat(kept)
    assert [view.ticket_id for view in desk.ledger.view().live] == [kept.ticket_id]
    assert desk.take(1)[0].locator == lost.locator


def test_a_ticket_is_kept_if_every_second_heartbeat_lists_it() -> None:
    desk = Desk()
    (ticket,) = desk.take(1)
    for held in ([], [ticket], [], [ticket], []):
        assert desk.beat(*held) == []
    assert desk.ledger.num_live == 1


def test_a_restarted_worker_loses_its_tickets_and_its_old_process_is_refused() -> None:
    desk = Desk()
    (ticket,) = desk.take(1, incarnation="a")
    assert desk.beat(incarnation="b") == []
    assert desk.ledger.num_live == 0
    assert desk.beat(ticket, incarnation="a") == ids([ticket])
    assert desk.ask(incarnation="a").refusal == "superseded"
    assert len(desk.ask(incarnation="b").tickets) == 1


def test_an_old_process_of_a_worker_cannot_replace_the_new_one() -> None:
    """This also holds for a new manager that hears the new process first, and later the old one, which was frozen."""
    ghost = incarnation("rollout_worker/0", attempt=1, start=9)
    (old,) = Desk().take(1, incarnation=ghost)
    worker = incarnation("rollout_worker/0", attempt=1, start=10)
    desk = successor(num_workers=1, nonce="y")
    assert desk.beat(incarnation=worker) == []
    desk.report(full=True)
    (ticket,) = desk.take(1, incarnation=worker)
    assert desk.beat(old, incarnation=ghost) == ids([old])
    assert desk.ask(incarnation=ghost).refusal == "superseded"
    assert desk.finish(old, ticket, incarnation=ghost) == ids([old, ticket])
    assert desk.beat(ticket, incarnation=worker) == []
    assert is_earlier(ghost, worker)
    assert not is_earlier(worker, ghost)
    assert not is_earlier("a", "b")


def started(number: int) -> str:
    """Return the incarnation of a rollout worker that a launcher starts now."""
    info = WorkerInfo(
        kind="rollout_worker",
        index=0,
        count=1,
        experiment="e",
        trial="t",
        attempt=1,
        run_dir="/nowhere",
        seed=1,
        name_resolve=NameResolveConfig(endpoints=["memory://"]),
        runtime=RuntimeConfig(),
        start=number,
    )
    return Worker(info).incarnation


def test_a_worker_started_after_the_clock_went_back_counts_as_the_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = started(4)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 2 * 3600 * 10**9)
    monkeypatch.setattr(time, "time", lambda: now / 1e9 - 2 * 3600)
    after = started(5)
    desk = Desk()
    desk.take(1, incarnation=before)
    assert desk.ask(incarnation=after).tickets
    assert desk.ask(incarnation=before).refusal == "superseded"


def test_a_worker_started_by_hand_has_no_order_within_its_attempt() -> None:
    by_hand, second = (incarnation("rollout_worker/0", attempt=1, start=start) for start in (0, 2))
    next_attempt = incarnation("rollout_worker/0", attempt=2, start=1)
    assert not is_earlier(by_hand, second)
    assert not is_earlier(second, by_hand)
    assert is_earlier(second, next_attempt)
    assert not is_earlier(next_attempt, second)


def test_a_stored_trajectory_of_a_lost_worker_supersedes_a_new_ticket() -> None:
    """It arrives first while the prompt waits to be issued again, then while its next ticket runs. No prompt has two tickets."""
    desk = Desk()
    (lost,) = desk.take(1)
    desk.finish(lost, outcome="released")
    view = desk.report(stored=ids([lost]))
    assert [(live.ticket_id, live.state, live.deadline) for live in view.live] == [(lost.ticket_id, "stored", 1)]
    assert desk.take(1)[0].locator.position == 1

    (lost,) = desk.take(1)
    desk.finish(lost, outcome="released")
    (again,) = desk.take(1)
    assert again.locator == lost.locator
    view = desk.report(stored=ids([lost]))
    assert lost.ticket_id in {live.ticket_id for live in view.live}
    assert desk.beat(again) == ids([again])
    assert desk.finish(again, outcome="released") == ids([again])
    assert desk.take(1)[0].locator.position == 3


def test_a_prompt_consumed_by_a_released_ticket_is_not_issued_again() -> None:
    desk = Desk()
    (lost,) = desk.take(1)
    desk.finish(lost, outcome="released")
    desk.version = 1
    desk.report(consumed=ids([lost]))
    assert desk.take(1)[0].locator.position == 1


def test_overdue_tickets_are_revoked_unless_their_groups_are_stored() -> None:
    desk = Desk()
    late, came = desk.take(2)
    desk.report(stored=ids([came]), revoke=ids([late, came]))
    assert [view.ticket_id for view in desk.ledger.view().live] == [came.ticket_id]
    assert desk.beat(late, came) == ids([late])
    assert desk.take(1)[0].locator == late.locator


def test_a_stored_ticket_that_the_master_drops_is_handed_out_again() -> None:
    desk = Desk()
    (ticket,) = desk.take(1)
    desk.report(stored=ids([ticket]))
    desk.report(revoke=ids([ticket]))
    desk.report(stored=ids([ticket]))  # an old report
    assert desk.ledger.num_live == 0
    assert desk.take(1)[0].locator == ticket.locator


# --------------------------------------------------------------------------------------------- servers, heads, eval


def test_tickets_balance_heads_and_servers() -> None:
    desk = Desk(num_servers=2, num_heads=3)
    tickets = desk.take(8)
    assert sorted(ticket.head for ticket in tickets) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert sorted(ticket.server for ticket in tickets) == ["generation_server/0"] * 4 + ["generation_server/1"] * 4
    desk.finish(*[ticket for ticket in tickets if ticket.head == 1], outcome="rejected")
    assert {ticket.head for ticket in desk.take(3)} == {1}


def test_grouping_sends_a_worker_to_its_heads() -> None:
    desk = Desk(num_heads=2, heads_of_worker={"rollout_worker/0": [1], "rollout_worker/1": [0]})
    assert {ticket.head for ticket in desk.take(2)} == {1}
    assert {ticket.head for ticket in desk.take(2, worker="rollout_worker/1")} == {0}


def test_new_tickets_go_to_servers_of_the_served_version() -> None:
    desk = Desk(num_servers=2)
    desk.version = 1
    desk.report()
    desk.serve(1, "generation_server/1")
    assert {ticket.server for ticket in desk.take(4)} == {"generation_server/1"}


def test_a_ticket_whose_server_is_lost_gets_another_server() -> None:
    desk = Desk(num_servers=2)
    (ticket,) = desk.take(1)
    other = {"generation_server/0": "generation_server/1", "generation_server/1": "generation_server/0"}[ticket.server]
    request = ScheduleRequest(ticket_id=ticket.ticket_id, worker="rollout_worker/0", lost_server=ticket.server)
    assert desk.ledger.schedule(request, 0.0).server == other
    assert desk.ledger.schedule(request, 0.0).server == other  # the same call again
    assert [desk.table.servers[name].running for name in (ticket.server, other)] == [0, 1]
    assert desk.table.servers[ticket.server].state.value == "suspect"
    desk.table.silent(other, "gone too", 0.0)
    assert desk.ledger.schedule(request, 0.0).reason == "no_server"
    unknown = ScheduleRequest(ticket_id=ticket.ticket_id, worker="rollout_worker/7")
    assert desk.ledger.schedule(unknown, 0.0).reason == "unknown_ticket"
    desk.finish(ticket)
    assert [desk.table.servers[name].running for name in (ticket.server, other)] == [0, 0]


def test_in_trainings_turn_a_ticket_without_a_server_is_told_to_wait_and_its_pace_does_not_count() -> None:
    desk = Desk()
    held, other = desk.take(2)
    desk.table.training = True
    (name,) = desk.table.servers
    desk.table.begin_sleep(name)
    request = ScheduleRequest(ticket_id=held.ticket_id, worker="rollout_worker/0", lost_server=name, busy=True)
    assert desk.ledger.schedule(request, 0.0) == ScheduleReply(reason="trainings_turn")
    desk.table.training = False
    assert desk.ledger.schedule(request, 0.0).reason == "no_server"  # it loads weights
    desk.serve(0)
    assert desk.ledger.schedule(request, 0.0).server == name
    desk.now = 1000.0
    desk.finish(held, group=group(3))
    assert desk.table.servers[name].pace.num_groups == 0
    desk.finish(other, group=group(3))
    assert desk.table.servers[name].pace.num_groups == 1


def moved_of(desk: Desk, *held: Ticket) -> dict[str, str]:
    """Return ticket -> new server, from the reply to the next heartbeat."""
    desk.now += 2.0
    request = HeartbeatRequest(worker="rollout_worker/0", incarnation="a", held=[ticket.ticket_id for ticket in held])
    return {moved.ticket_id: moved.server for moved in desk.ledger.heartbeat(request, desk.now).moved}


def test_full_servers_have_their_own_refusal() -> None:
    desk = Desk(num_servers=2, eval_share=1.0)
    desk.table.max_groups = 2
    tickets = desk.take(4)
    assert sorted(ticket.server for ticket in tickets) == ["generation_server/0"] * 2 + ["generation_server/1"] * 2
    assert desk.ask().refusal == "servers_full"
    desk.ledger.evaluate(evaluation("greedy", num_prompts=3))
    assert (desk.ask().refusal, desk.ledger.room(desk.now)) == ("servers_full", 0)
    desk.finish(tickets[0])
    (evaluated,) = desk.take(1)  # groups of evaluations count too
    assert (evaluated.kind, evaluated.server) == ("eval", tickets[0].server)
    assert desk.ask(5).refusal == "servers_full"
    desk.finish(evaluated, outcome="evaluated")
    desk.finish(*tickets[1:])
    assert desk.ledger.room(desk.now) > 1
    desk.table.withdraw("generation_server/0")
    assert len(desk.ask(5).tickets) == 2
    desk.table.withdraw("generation_server/1")
    assert desk.ask().refusal == "no_server"


def test_a_ticket_leaves_a_full_queue_for_a_server_with_room_or_stays() -> None:
    desk = Desk(num_servers=2)
    (ticket,) = desk.take(1)
    here = ticket.server
    (other,) = {"generation_server/0", "generation_server/1"} - {here}
    request = ScheduleRequest(ticket_id=ticket.ticket_id, worker="rollout_worker/0", lost_server=here, busy=True)
    assert desk.ledger.schedule(request, 0.0).server == other
    assert desk.table.servers[here].state.value == "healthy"  # nothing is wrong with it
    assert [desk.table.servers[name].running for name in (here, other)] == [0, 1]
    desk.table.max_groups = 1
    desk.take(1)
    back = ScheduleRequest(ticket_id=ticket.ticket_id, worker="rollout_worker/0", lost_server=other, busy=True)
    assert desk.ledger.schedule(back, 0.0).server == other  # no room elsewhere
    lost = ScheduleRequest(ticket_id=ticket.ticket_id, worker="rollout_worker/0", lost_server=other)
    # the ticket goes to the full server, because no other one is left
    assert desk.ledger.schedule(lost, 0.0).server == here


def test_tickets_that_a_leaving_server_does_not_finish_in_time_are_moved() -> None:
    desk = Desk(num_servers=3, num_heads=1)
    desk.table.drain_timeout_s = 10.0
    tickets = desk.take(6)
    leaver = tickets[0].server
    left, stay = [[t for t in tickets if (t.server == leaver) is gone] for gone in (True, False)]
    desk.table.leave(leaver, desk.now)
    assert desk.ledger.move_leavers(9.0) == 0
    assert leaver not in {ticket.server for ticket in desk.take(2)}
    desk.finish(left[1])
    assert desk.ledger.move_leavers(10.0) == 1
    assert desk.table.servers[leaver].running == 0
    assert desk.ledger.counters["moved", "drained"] == 1
    for _ in range(2):  # a reply may be lost
        (told,) = moved_of(desk, left[0], *stay).items()
        assert told[0] == left[0].ticket_id
        assert told[1] not in (leaver, "")
    # the worker has not learned of the move yet, and finds the server gone
    lost = ScheduleRequest(ticket_id=left[0].ticket_id, worker="rollout_worker/0", lost_server=leaver)
    assert desk.ledger.schedule(lost, desk.now).server == told[1]
    desk.finish(left[0])
    assert moved_of(desk, *stay) == {}


def test_a_ticket_stays_at_a_leaving_server_until_another_one_can_serve_it() -> None:
    desk = Desk(num_servers=2)
    desk.table.drain_timeout_s = 0.0
    (ticket,) = desk.take(1)
    (other,) = {"generation_server/0", "generation_server/1"} - {ticket.server}
    desk.table.begin_update(other, WeightVersion(1, 1))
    desk.table.leave(ticket.server, 0.0)
    assert desk.ledger.move_leavers(1.0) == 0
    assert moved_of(desk, ticket) == {}
    incarnation = desk.table.servers[other].incarnation
    assert desk.table.loaded(other, incarnation, WeightVersion(1, 1), 1.0)
    assert desk.ledger.move_leavers(2.0) == 1
    assert moved_of(desk, ticket) == {ticket.ticket_id: other}


def evaluation(*modes: Any, num_prompts: int, eval_id: str = "e") -> EvaluateRequest:
    parts = [EvalPart(eval_set="s", mode=mode, num_prompts=num_prompts) for mode in modes]
    return EvaluateRequest(eval_id=eval_id, parts=parts)


def test_a_large_evaluation_is_answered_in_replies_of_bounded_size() -> None:
    book, request = EvaluationBook(max_issues=1), evaluation("sampled", num_prompts=5)
    book.begin(request)
    for _ in range(5):
        item, _ = book.take()
        many = group(*[1] * 9_000)
        book.finish(item, RolloutResult(ticket_id="t", outcome="evaluated", group=many))
    found: list[int] = []
    sizes = []
    while len(found) < 5:
        reply = book.reply("e", len(found))
        assert reply.done
        found += [result.position for result in reply.results]
        sizes.append(len(reply.results))
    assert (found, sizes) == ([0, 1, 2, 3, 4], [3, 2])  # a reply ends with the prompt that reaches 20,000 responses


def test_evaluation_bypasses_the_gate_within_its_share() -> None:
    desk = Desk(eta=1, eval_share=0.25)  # 2 of 8
    for _ in range(2):
        reply = desk.ledger.evaluate(evaluation("sampled", "greedy", num_prompts=3))
        assert (reply.done, reply.num_finished, reply.num_total) == (False, 0, 6)
    tickets = desk.ask(100).tickets
    assert sum(ticket.kind == "train" for ticket in tickets) == 8
    evals = [ticket for ticket in tickets if ticket.kind == "eval"]
    assert len(evals) == 2
    assert all(live.locator != Locator(-1, -1) for live in desk.ledger.view().live)
    assert desk.ledger.num_live == 8
    seen = []
    while evals:
        seen += [(ticket.eval_mode, ticket.locator.position) for ticket in evals]
        for ticket in evals:
            reward = float(ticket.eval_mode == "greedy")
            done = group(ticket.locator.position + 1, rewards=[reward], version_end=1)
            desk.finish(ticket, outcome="evaluated", group=done)
            desk.finish(ticket, outcome="evaluated", group=done)
        evals = desk.ask(100).tickets
    assert sorted(seen) == [(mode, position) for mode in ("greedy", "sampled") for position in range(3)]
    reply = desk.ledger.evaluate(evaluation("sampled", "greedy", num_prompts=3))
    assert (reply.done, reply.num_finished) == (True, 6)
    assert [(result.part, result.position) for result in reply.results] == [(at // 3, at % 3) for at in range(6)]
    assert [result.group.rewards for result in reply.results if result.group] == [[0.0]] * 3 + [[1.0]] * 3
    rest = desk.ledger.evaluate(msgspec.structs.replace(evaluation("sampled", "greedy", num_prompts=3), after=4))
    assert rest.results == reply.results[4:]
    assert desk.ask().refusal == "staleness"


def test_evaluation_needs_no_master_and_its_lost_tickets_are_issued_again() -> None:
    desk = Desk(register=False, max_issues=2)
    desk.ledger.evaluate(evaluation("greedy", num_prompts=2))
    first, second = desk.take(2, worker="rollout_worker/1")
    desk.ledger.expire(16.0)
    again = desk.take(2)
    assert [(ticket.locator, ticket.issue) for ticket in again] == [(first.locator, 2), (second.locator, 2)]
    assert desk.finish(first, outcome="evaluated", group=group(1, rewards=[1.0])) == ids([first])
    desk.finish(again[0], outcome="released")
    desk.finish(again[1], outcome="evaluated", group=group(5, rewards=[1.0]))
    reply = desk.ledger.evaluate(evaluation("greedy", num_prompts=2))
    assert reply.done
    failed, judged = reply.results
    assert (failed.group, failed.reason) == (None, "ticket_lost")
    assert judged.group is not None
    assert judged.group.rewards == [1.0]


@pytest.mark.parametrize(
    "request_",
    [
        evaluation("greedy", num_prompts=2, eval_id=""),
        evaluation(num_prompts=2),
        evaluation("greedy", "greedy", num_prompts=2),
        evaluation("greedy", num_prompts=0),
    ],
)
def test_invalid_evaluations_are_refused(request_: EvaluateRequest) -> None:
    with pytest.raises(ValueError, match="evaluation"):
        Desk().ledger.evaluate(request_)


# ------------------------------------------------------------------------------------- new attempts and new managers


def test_a_new_attempt_voids_the_live_tickets() -> None:
    desk = Desk()
    tickets = desk.take(8)
    desk.attempt = 2
    assert not desk.report().known
    assert desk.ask().refusal == "not_ready"
    view = desk.report(full=True, done_cursor=Locator(0, 2), trained_version=3)
    assert (view.live, view.served_version) == ([], -1)
    assert desk.ask().refusal == "no_server"
    assert {server.state for server in view.servers} == {"stale"}
    desk.serve(3, attempt=2)
    fresh = desk.take(1)[0]
    assert (fresh.attempt, fresh.locator, fresh.min_version, fresh.deadline) == (2, Locator(0, 2), 3, 4)
    assert desk.finish(tickets[0]) == ids(tickets[:1])
    assert desk.beat(*tickets, fresh) == ids(tickets)
    desk.attempt = 1
    with pytest.raises(StaleAttemptError, match="attempt 1 is over"):
        desk.report()


# ---------------------------------------------------------------------------------------------- the successor of a manager


def successor(**options: Any) -> Desk:
    """A manager that replaces another one. The master has not reported to it yet."""
    return Desk(register=False, grace_s=15.0, **options)


def test_a_new_manager_admits_nothing_for_a_lease_and_adopts_the_held_tickets() -> None:
    running, stored, consumed, lost = Desk().take(4)
    desk = successor()
    assert desk.beat(running) == []  # judged after the master's first report
    desk.version = 1
    view = desk.report(full=True, stored=ids([stored]), done_cursor=Locator(0, 0), done=[consumed.locator])
    states = {live.ticket_id: (live.state, live.deadline) for live in view.live}
    assert states == {stored.ticket_id: ("stored", 1), running.ticket_id: ("running", 1)}
    assert not view.settled
    desk.serve(1)
    assert desk.ask().refusal == "not_ready"
    assert desk.beat(running, stored) == []
    desk.beat(running, after_s=14.0)
    assert desk.report().settled
    assert locators(desk.take(2)) == [(0, 3), (0, 4)]  # first the prompt of the lost ticket, then new ones
    assert desk.beat(running, lost) == ids([lost])
    assert desk.finish(running) == []
    assert desk.finish(lost) == ids([lost])


@pytest.mark.parametrize("master_first", [True, False])
def test_a_new_manager_admits_as_soon_as_the_master_and_all_workers_have_reported(master_first: bool) -> None:
    mine, theirs = Desk().take(2)
    desk = successor(num_workers=2)
    revision = -1
    if master_first:
        revision = desk.report(full=True).revision
    assert desk.beat(mine) == []
    assert desk.ask().refusal == "not_ready"
    assert desk.beat(mine) == []  # the same worker again
    assert desk.ask().refusal == "not_ready"
    assert desk.beat(theirs, worker="rollout_worker/1") == []
    view = desk.report(full=True)
    assert view.settled
    assert view.revision > revision  # wakes a master that waits for a change
    assert {live.ticket_id: live.worker for live in view.live} == {
        mine.ticket_id: "rollout_worker/0",
        theirs.ticket_id: "rollout_worker/1",
    }
    assert locators(desk.take(1)) == [(0, 2)]


def test_results_that_arrive_at_a_new_manager_count() -> None:
    """They count even if they arrive before the master's report, or before their worker's heartbeat."""
    early, rejected, late, released, last = Desk(batch_size=5).take(5)
    desk = successor(num_workers=2, batch_size=5)
    assert desk.finish(early) == []
    assert desk.finish(rejected, outcome="rejected", reason="too_hard") == []
    view = desk.report(full=True)
    assert [(live.ticket_id, live.state) for live in view.live] == [(early.ticket_id, "stored")]
    assert [prompt.locator for prompt in view.rejected] == [rejected.locator]
    assert desk.finish(late) == []
    assert desk.finish(released, outcome="released") == []
    desk.beat(last)
    desk.beat(worker="rollout_worker/1")
    view = desk.report()
    assert {live.ticket_id for live in view.live} == set(ids([early, late, last]))
    (again,) = desk.take(1)
    assert (again.locator, again.issue) == (released.locator, 2)
    assert locators(desk.take(1)) == [(0, 5)]


def test_a_first_manager_adopts_nothing() -> None:
    (ticket,) = Desk().take(1)
    desk = Desk(register=False)
    assert desk.finish(ticket) == ids([ticket])
    assert desk.beat(ticket) == ids([ticket])
    view = desk.report(full=True)
    assert view.settled
    assert view.live == []


def test_a_result_for_a_prompt_that_is_done_or_live_in_another_ticket_changes_nothing() -> None:
    done, doubled = Desk().take(2)
    (other,) = Desk(nonce="y").take(2)[1:]
    desk = successor()
    assert desk.finish(done) == []  # judged after the master's first report
    view = desk.report(full=True, stored=ids([other]), done=[done.locator])
    assert [live.ticket_id for live in view.live] == ids([other])
    assert desk.finish(doubled) == ids([doubled])
    assert desk.finish(done) == ids([done])


def test_an_attempt_may_begin_before_its_master_reports() -> None:
    """The manager may learn of the attempt from its weights first. The version may decrease."""
    desk = Desk(register=False)
    desk.version = 27
    desk.report(full=True)
    desk.serve(27)
    (ticket,) = desk.take(1)
    desk.ledger.begin_attempt(2)
    assert desk.beat(ticket) == ids([ticket])
    assert desk.ask().refusal == "not_ready"
    with pytest.raises(StaleAttemptError, match="attempt 1 is over"):
        desk.report()
    desk.attempt, desk.version = 2, 20
    assert not desk.report().known
    assert desk.report(full=True).settled  # attempt 2 has granted no ticket yet that a worker could hold
    assert desk.ask().refusal == "no_server"
    desk.serve(20, attempt=2)
    assert desk.take(1)[0].min_version == 20
    assert all(server.running == 1 for server in desk.table.servers.values())


def test_a_report_of_an_attempt_that_has_not_begun_is_refused_and_changes_nothing() -> None:
    desk = Desk()
    (ticket,) = desk.take(1)
    for _ in range(2):
        with pytest.raises(UnreachedError, match="attempt is 999; the newest that the run has begun is 2"):
            desk.report(attempt=999, full=True, newest_attempt=2)
    assert desk.ledger.attempt == 1
    assert desk.beat(ticket) == []
    desk.report(attempt=2, full=True, newest_attempt=2)
    assert desk.ledger.attempt == 2


def test_a_report_of_an_impossible_version_is_refused_and_later_reports_are_accepted() -> None:
    desk = Desk()
    tickets = desk.take(4)
    with pytest.raises(UnreachedError, match="trained_version is 99999; the highest possible one is 1"):
        desk.report(trained_version=99_999)
    assert desk.ledger.trained_version == 0
    desk.report(trained_version=2, consumed=ids(tickets))  # two steps, the first without a report of its own
    assert desk.ledger.trained_version == 2


def test_tickets_that_no_manager_of_this_run_granted_are_unknown() -> None:
    """Both a worker and the master may report such tickets."""
    forged = str(TicketId(1, Locator(0, 0), 1, 0, 0, "x_1"))
    later = forged.replace("a1-", "a999-")
    for desk in (Desk(), successor()):
        request = HeartbeatRequest(worker="rollout_worker/0", incarnation="a", held=[forged, later])
        desk.ledger.heartbeat(request, desk.now)
        desk.report(full=True, stored=[forged], consumed=[later])
        assert (desk.ledger.attempt, desk.ledger.num_live) == (1, 0)
    (ticket,) = Desk(ticket_key=b"of another run").take(1)
    desk = successor()
    desk.report(full=True)
    assert desk.beat(ticket) == ids([ticket])


def test_tickets_of_an_earlier_attempt_are_revoked_at_once() -> None:
    (ticket,) = Desk().take(1)
    desk = successor(attempt=2)
    assert desk.beat(ticket) == ids([ticket])


def test_a_manager_with_an_old_config_learns_the_attempt_from_held_tickets() -> None:
    old = Desk()
    old.attempt = 2
    old.report(full=True)
    old.serve(0, attempt=2)
    (held,) = old.take(1)
    desk = Desk(register=False)
    assert desk.beat(held) == []
    assert desk.ledger.attempt == 2
    with pytest.raises(StaleAttemptError, match="attempt 1 is over"):  # a master that was frozen
        desk.report(full=True)
    desk.attempt = 2
    view = desk.report(full=True)
    assert [live.ticket_id for live in view.live] == ids([held])
    assert not view.settled


def test_every_granted_and_every_adopted_ticket_is_recorded_in_the_journal() -> None:
    told: list[tuple[str, str]] = []
    desk = Desk(journal=lambda event, ticket: told.append((event, ticket.ticket_id)))
    held, stored = desk.take(2)
    assert told == [("admitted", held.ticket_id), ("admitted", stored.ticket_id)]
    told.clear()
    new = successor(journal=lambda event, ticket: told.append((event, ticket.ticket_id)))
    new.report(full=True, stored=ids([stored]))
    new.beat(held)
    assert told == [("adopted", stored.ticket_id), ("adopted", held.ticket_id)]


@pytest.mark.parametrize("max_concurrent", [3, 100])
@pytest.mark.parametrize("num_evals", [0, 2])
def test_room_is_an_upper_bound_of_the_grants(max_concurrent: int, num_evals: int) -> None:
    """A caller that serves waiting requests looks at no more of them than there is room for. So no grant may exceed the room."""
    desk = Desk(max_concurrent=max_concurrent, eval_share=1.0)
    if num_evals:
        desk.ledger.evaluate(evaluation("greedy", num_prompts=num_evals))
    room = desk.ledger.room(desk.now)
    granted = desk.ledger.allocate(
        [AllocateRequest(request_id="r", worker="w", incarnation="a", count=1000)], desk.now
    )[0].tickets
    assert num_evals + min(max_concurrent, 8) <= room
    assert 0 < len(granted) <= room
    assert desk.ledger.room(desk.now) == 0
    assert desk.ledger.refusal(desk.now) in ("capacity", "staleness")


# ------------------------------------------------------------------------------------------------- orders of train steps


def ordered(position: int, epoch: int = 0, **how: int) -> Order:
    return Order(before=Locator(epoch, position), **how)


def test_only_ordered_prompts_are_issued_with_the_size_that_is_ordered() -> None:
    desk = Desk(eta=0)
    assert desk.report(order=ordered(0)).exhausted  # the step has not ordered yet
    assert desk.ask(4).refusal == "exhausted"
    revision = desk.ledger.revision
    assert not desk.report(order=ordered(3, group_size=2, max_new_tokens=7)).exhausted
    assert desk.ledger.revision > revision  # waiting requests are tried again
    tickets = desk.ask(100).tickets
    assert locators(tickets) == [(0, 0), (0, 1), (0, 2)]
    assert {(ticket.group_size, ticket.max_new_tokens) for ticket in tickets} == {(2, 7)}
    assert desk.report(order=ordered(3, group_size=2, max_new_tokens=7)).exhausted


def test_the_same_order_again_and_an_older_one_change_nothing() -> None:
    """Reports may arrive twice, and late."""
    desk = Desk(eta=0)
    desk.report(order=ordered(2, group_size=2))
    tickets = desk.take(2)
    revision = desk.ledger.revision
    for late in (ordered(2, group_size=2), ordered(1, group_size=3), ordered(0), None):
        assert desk.report(order=late).exhausted
    assert desk.ledger.revision == revision
    desk.finish(tickets[0], outcome="released", reason="x")
    (again,) = desk.ask(4).tickets
    assert (again.locator, again.issue, again.group_size) == (Locator(0, 0), 2, 2)


def test_orders_go_on_into_the_next_epoch_and_end_with_the_last_one() -> None:
    desk = Desk(eta=0, register=False)
    desk.report(full=True, num_prompts=3, order=ordered(3))
    assert locators(desk.take(3)) == [(0, 0), (0, 1), (0, 2)]
    assert desk.report(order=ordered(3)).exhausted
    desk.report(order=ordered(1, epoch=1))
    assert locators(desk.ask(100).tickets) == [(1, 0)]
    desk.report(order=ordered(9, epoch=9), revoke=[])
    desk.ledger.gate = Gate(batch_size=100, eta=0, max_concurrent=100)
    assert locators(desk.ask(100).tickets) == [(1, 1), (1, 2)]
    assert desk.ask(100).refusal == "exhausted"


def test_prompts_that_were_done_before_the_first_order_are_left_out() -> None:
    """The run went on from a checkpoint of steps without orders."""
    desk = Desk(eta=0, register=False)
    desk.report(full=True, done_cursor=Locator(0, 1), done=[Locator(0, 2)], order=ordered(1))
    assert desk.ask(4).refusal == "exhausted"
    desk.report(order=ordered(4))
    assert locators(desk.ask(100).tickets) == [(0, 1), (0, 3)]


def test_a_new_manager_has_the_order_from_the_full_report() -> None:
    old = Desk(eta=0)
    old.report(order=ordered(3, group_size=2))
    held, lost, _ = old.take(3)
    desk = successor(eta=0)
    assert not desk.report(full=True, order=ordered(3, group_size=2)).settled
    desk.beat(held)
    desk.now += 20.0
    tickets = desk.ask(100).tickets
    assert locators(tickets) == [(0, 1), (0, 2)]
    assert {ticket.group_size for ticket in tickets} == {2}
    assert lost.ticket_id not in ids(tickets)


def test_a_new_attempt_begins_with_its_own_order() -> None:
    desk = Desk(eta=0)
    desk.report(order=ordered(50, group_size=5))
    desk.attempt = 2
    desk.report(full=True, order=ordered(2, group_size=3))  # of a checkpoint with fewer steps
    desk.serve(0, attempt=2)
    tickets = desk.ask(100).tickets
    assert locators(tickets) == [(0, 0), (0, 1)]
    assert {ticket.group_size for ticket in tickets} == {3}
