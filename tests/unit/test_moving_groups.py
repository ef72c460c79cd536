"""Servers join, leave, die and fill up in any order: every running ticket is counted at one server, and none is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_ledger import Desk

from asyncrl.manager.routing import ServerState
from asyncrl.protocol.manager import HeartbeatRequest, ScheduleRequest, Ticket
from asyncrl.protocol.versions import WeightVersion

NAMES = [f"generation_server/{index}" for index in range(3)]
SERVERS = st.sampled_from(NAMES)
WORKER = "rollout_worker/0"


class Moves(RuleBasedStateMachine):
    @initialize(max_groups=st.integers(0, 4), drain_timeout_s=st.sampled_from([0.0, 5.0]))
    def begin(self, max_groups: int, drain_timeout_s: float) -> None:
        self.desk = Desk(num_servers=3, eta=2)
        self.table = self.desk.table
        self.table.max_groups, self.table.drain_timeout_s = max_groups, drain_timeout_s
        self.at: dict[str, str] = {}  # ticket -> server to which its worker sends requests
        self.held: dict[str, Ticket] = {}

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        room = self.desk.ledger.room(self.desk.now)
        tickets = self.desk.ask(count).tickets
        assert len(tickets) == min(count, room)
        for ticket in tickets:
            assert self.table.servers[ticket.server].state is ServerState.HEALTHY
            self.held[ticket.ticket_id], self.at[ticket.ticket_id] = ticket, ticket.server

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.held:
            ticket = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
            del self.at[ticket.ticket_id]
            assert self.desk.finish(ticket) == []
            self.desk.version += 1
            self.desk.report(consumed=[ticket.ticket_id])
            self.desk.version -= 1

    @rule(data=st.data(), busy=st.booleans())
    def schedule(self, data: st.DataObject, busy: bool) -> None:
        """The worker cannot send further requests of a ticket to its current server."""
        if self.held:
            ticket_id = data.draw(st.sampled_from(sorted(self.held)))
            request = ScheduleRequest(ticket_id=ticket_id, worker=WORKER, lost_server=self.at[ticket_id], busy=busy)
            reply = self.desk.ledger.schedule(request, self.desk.now)
            assert reply.server or reply.reason == "no_server"
            if reply.server:
                assert self.table.servers[reply.server].state is ServerState.HEALTHY
                self.at[ticket_id] = reply.server

    @rule(after_s=st.sampled_from([0.1, 3.0]))
    def heartbeat(self, after_s: float) -> None:
        self.desk.now += after_s
        self.desk.ledger.move_leavers(self.desk.now)
        request = HeartbeatRequest(worker=WORKER, incarnation="a", held=list(self.held))
        reply = self.desk.ledger.heartbeat(request, self.desk.now)
        assert reply.revoked == []
        for moved in reply.moved:
            assert moved.server_url == self.table.servers[moved.server].url
            self.at[moved.ticket_id] = moved.server

    @rule(name=SERVERS)
    def leave(self, name: str) -> None:
        self.table.leave(name, self.desk.now)

    @rule(name=SERVERS)
    def stay(self, name: str) -> None:
        self.table.stay(name)

    @rule(name=SERVERS)
    def end(self, name: str) -> None:
        self.table.withdraw(name)

    @rule(name=SERVERS)
    def start(self, name: str) -> None:
        self.table.announce(name, f"http://{name}/{self.desk.now}", self.desk.now)

    @rule(name=SERVERS, answers=st.booleans())
    def probe(self, name: str, answers: bool) -> None:
        if answers:
            self.table.answered(name, str(self.table.servers[name].version), self.desk.now)
        else:
            self.table.silent(name, "no answer", self.desk.now)

    @rule(name=SERVERS)
    def load(self, name: str) -> None:
        if self.table.servers[name].state is ServerState.STALE:
            incarnation = self.table.begin_update(name, WeightVersion(1, 0))
            assert self.table.loaded(name, incarnation, WeightVersion(1, 0), self.desk.now)

    @invariant()
    def every_ticket_is_at_one_server(self) -> None:
        if not hasattr(self, "desk"):
            return
        running = Counter(self.servers_of_tickets().values())
        assert {name: server.running for name, server in self.table.servers.items() if server.running} == running
        assert running.total() == self.desk.ledger.num_running == len(self.held)
        assert all(
            not server.leaving or server.state in (ServerState.DRAINING, ServerState.DEAD) for server in self.servers()
        )

    @invariant()
    def servers_that_have_drained_have_no_tickets(self) -> None:
        for server in self.servers():
            if server.leaving and server.state is ServerState.DRAINING and self.table.has_drained(server.name):
                assert server.name not in self.servers_of_tickets().values()

    def servers_of_tickets(self) -> dict[str, str]:
        """Return each ticket's server in the ledger: the worker's, unless the next heartbeat reply moves the ticket."""
        request = HeartbeatRequest(worker=WORKER, incarnation="a", held=list(self.held))
        moved = self.desk.ledger.heartbeat(request, self.desk.now).moved
        return {**self.at, **{ticket.ticket_id: ticket.server for ticket in moved}}

    def servers(self):  # type: ignore[no-untyped-def]
        return self.table.servers.values() if hasattr(self, "table") else []

    def teardown(self) -> None:
        """If only one server stays, all tickets that remain at draining servers move to it, and their worker learns of it."""
        if not hasattr(self, "desk"):
            return
        for name in NAMES:
            self.leave(name)
        self.stay(NAMES[0])
        self.end(NAMES[0])
        self.start(NAMES[0])
        self.load(NAMES[0])
        for _ in range(3):
            self.heartbeat(3.0)
        draining = {server.name for server in self.servers() if server.state is ServerState.DRAINING}
        assert not [ticket_id for ticket_id in self.held if self.at[ticket_id] in draining]


TestMoves = Moves.TestCase
TestMoves.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
