"""Tickets of a lost server move to another server, to the same one after it has recovered, or to its replacement process."""

from __future__ import annotations

from test_ledger import Desk

from asyncrl.protocol.manager import HeartbeatRequest, ScheduleReply, ScheduleRequest, Ticket
from asyncrl.protocol.versions import WeightVersion

NAME, URL, NEW_URL = "generation_server/0", "http://s0", "http://s0-again"
V0 = WeightVersion(1, 0)


def ask(desk: Desk, ticket: Ticket, url: str = URL) -> ScheduleReply:
    request = ScheduleRequest(
        ticket_id=ticket.ticket_id, worker="rollout_worker/0", lost_server=ticket.server, lost_url=url
    )
    return desk.ledger.schedule(request, desk.now)


def dead(desk: Desk) -> list[str]:
    request = HeartbeatRequest(worker="rollout_worker/0", incarnation="a", held=[])
    return desk.ledger.heartbeat(request, desk.now).dead


def test_a_replacement_process_gets_the_tickets_of_its_predecessor() -> None:
    desk = Desk()
    (ticket,) = desk.take(1)
    assert ask(desk, ticket).reason == "no_server"
    desk.table.withdraw(NAME)
    assert ask(desk, ticket).reason == "no_server"
    desk.table.announce(NAME, NEW_URL, desk.now)
    assert ask(desk, ticket).reason == "no_server"  # it has no weights yet
    desk.serve(0)
    reply = ask(desk, ticket)
    assert (reply.server, reply.server_url) == (NAME, NEW_URL)
    assert desk.table.servers[NAME].state.value == "healthy"  # reports about the old process do not count
    assert desk.table.servers[NAME].running == 1


def test_a_late_report_about_the_old_process_moves_no_other_ticket() -> None:
    desk = Desk(num_servers=2)
    tickets = {ticket.server: ticket for ticket in desk.take(2)}
    desk.table.announce(NAME, NEW_URL, desk.now)
    desk.serve(0, NAME)
    reply = ask(desk, tickets[NAME])
    assert (reply.server, reply.server_url) == (NAME, NEW_URL)
    assert [desk.table.servers[name].running for name in sorted(tickets)] == [1, 1]


def test_the_only_server_is_offered_again_after_it_has_answered_a_health_probe() -> None:
    desk = Desk()
    (ticket,) = desk.take(1)
    assert ask(desk, ticket).reason == "no_server"
    assert desk.table.servers[NAME].state.value == "suspect"
    assert ask(desk, ticket).reason == "no_server"
    desk.table.answered(NAME, str(V0), desk.now)
    assert ask(desk, ticket).server_url == URL
    assert ask(desk, ticket).reason == "no_server"  # lost once more
    assert desk.table.servers[NAME].state.value == "suspect"


def test_another_server_is_preferred_to_the_lost_one() -> None:
    desk = Desk(num_servers=2)
    ticket = next(ticket for ticket in desk.take(2) if ticket.server == NAME)
    desk.table.silent("generation_server/1", "busy", desk.now)
    assert ask(desk, ticket).reason == "no_server"
    desk.table.answered(NAME, str(V0), desk.now)
    desk.table.answered("generation_server/1", str(V0), desk.now)
    assert ask(desk, ticket).server == "generation_server/1"


def test_heartbeat_replies_list_the_addresses_of_dead_servers() -> None:
    desk = Desk(num_servers=2)
    assert dead(desk) == []
    desk.table.silent(NAME, "no answer", desk.now)
    assert dead(desk) == []  # suspect: it may yet answer
    desk.now += 16.0
    desk.table.silent(NAME, "no answer", desk.now)
    assert dead(desk) == [URL]
    desk.table.answered(NAME, str(V0), desk.now)  # it was frozen, and answers again at the same address
    assert dead(desk) == []
    desk.table.withdraw(NAME)
    assert dead(desk) == [URL]
    desk.table.announce(NAME, NEW_URL, desk.now)
    assert dead(desk) == [URL]  # the old address will never answer
    for number in range(40):
        desk.table.announce(NAME, f"http://{number}", desk.now)
        desk.serve(0, NAME)
    assert len(dead(desk)) == 16


def test_a_server_that_stays_interrupted_after_a_failed_load_counts_as_dead() -> None:
    desk = Desk(num_servers=2)
    incarnation = desk.table.begin_update(NAME, WeightVersion(1, 1))
    assert dead(desk) == []  # interrupted briefly
    desk.table.load_failed(NAME, incarnation, "refused")
    assert dead(desk) == [URL]
    desk.serve(1, NAME)
    assert dead(desk) == []
