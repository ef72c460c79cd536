"""Slow servers: they get fewer groups, keep the groups that they have, and get their full share once they are quick again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_ledger import Desk

from asyncrl.manager import fleet
from asyncrl.manager.files import FilesInManager
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.protocol.manager import HeartbeatRequest
from asyncrl.protocol.versions import WeightVersion
from tests.support.services import make_services
from tests.support.summaries import group

SLOW, QUICK, OTHER = (f"generation_server/{index}" for index in range(3))


def run_groups(desk: Desk, seconds: dict[str, float], rounds: int) -> Counter[str]:
    """Run batches of 6 groups of 100 tokens. A group takes the seconds of its server. Returns the number of groups per server."""
    got: Counter[str] = Counter()
    for _ in range(rounds):
        tickets = desk.take(6)
        began = desk.now
        for ticket in sorted(tickets, key=lambda ticket: seconds[ticket.server]):
            desk.now = began + seconds[ticket.server]
            desk.finish(ticket, outcome="rejected", group=group(100))
            got[ticket.server] += 1
        desk.rejected_seen += 6
        desk.report()
    return got


def states(desk: Desk) -> dict[str, str]:
    return {view.server: view.state for view in desk.table.views()}


@pytest.mark.parametrize("routing", ["least_requests", "round_robin", "least_token_usage"])
def test_a_server_whose_groups_take_much_longer_gets_one_at_a_time(routing: str) -> None:
    desk = Desk(num_servers=3, batch_size=6)
    desk.table.policy = routing
    assert run_groups(desk, {SLOW: 4.0, QUICK: 1.0, OTHER: 1.2}, rounds=2)[SLOW] == 4
    assert states(desk) == {SLOW: "suspect", QUICK: "healthy", OTHER: "healthy"}
    assert "its groups take" in desk.table.servers[SLOW].slow
    got = run_groups(desk, {SLOW: 4.0, QUICK: 1.0, OTHER: 1.2}, rounds=4)
    assert got[SLOW] == 4
    assert got[QUICK] + got[OTHER] == 20
    # a slow server still gets one group at a time, which shows when it is quick again
    run_groups(desk, dict.fromkeys((SLOW, QUICK, OTHER), 1.0), rounds=12)
    assert states(desk)[SLOW] == "healthy"
    assert run_groups(desk, dict.fromkeys((SLOW, QUICK, OTHER), 1.0), rounds=4)[SLOW] == 8


def test_a_slow_server_is_quick_again_below_a_lower_bound() -> None:
    """A server between the two bounds keeps its state."""
    desk = Desk(num_servers=2)

    def state_after(server: str, seconds: float) -> str:
        for _ in range(40):
            desk.table.group_ended(server, 100, seconds)
        return states(desk)[server]

    state_after(QUICK, 1.0)
    found = [state_after(SLOW, seconds) for seconds in (2.5, 3.5, 2.5, 1.5)]
    assert found == ["healthy", "suspect", "suspect", "healthy"]


def test_slow_servers_are_used_when_the_others_are_full() -> None:
    desk = Desk(num_servers=2, batch_size=4)
    desk.table.max_groups = 2
    desk.table.answered(SLOW, str(WeightVersion(1, 0)), desk.now, took_s=5.0)
    assert states(desk)[SLOW] == "suspect"
    assert desk.table.servers[SLOW].slow == "took 5.0 s to answer a health probe"
    tickets = desk.take(4)
    assert [ticket.server for ticket in tickets] == [QUICK, QUICK, SLOW, SLOW]
    desk.table.answered(SLOW, str(WeightVersion(1, 0)), desk.now, took_s=0.1)
    assert states(desk)[SLOW] == "healthy"


def test_a_slow_server_that_still_answers_is_not_reported_as_dead() -> None:
    desk = Desk(num_servers=2)
    (ticket,) = [ticket for ticket in desk.take(2) if ticket.server == SLOW]
    for _ in range(10):  # each time it answers only after the limit of the health probe
        desk.now += 6.0
        desk.table.silent(SLOW, "no answer for 5 s", desk.now)
        assert states(desk)[SLOW] == "suspect"
        desk.now += 4.0
        desk.table.answered(SLOW, str(WeightVersion(1, 0)), desk.now, took_s=9.0)
        assert states(desk)[SLOW] == "suspect"
        request = HeartbeatRequest(worker="rollout_worker/0", incarnation="a", held=[ticket.ticket_id])
        reply = desk.ledger.heartbeat(request, desk.now)
        assert (reply.dead, reply.revoked) == ([], [])
    desk.now += 16.0
    desk.table.silent(SLOW, "no answer for 15 s", desk.now)
    assert states(desk)[SLOW] == "dead"


def test_equally_slow_servers_do_not_count_as_slow() -> None:
    desk = Desk(num_servers=3, batch_size=6)
    run_groups(desk, dict.fromkeys((SLOW, QUICK, OTHER), 40.0), rounds=4)
    assert set(states(desk).values()) == {"healthy"}


def test_moved_groups_do_not_count_towards_the_pace_of_a_server() -> None:
    desk = Desk(num_servers=2, batch_size=6)
    tickets = [ticket for ticket in desk.take(4) if ticket.server == SLOW]
    desk.table.leave(SLOW, desk.now)
    desk.now += 100.0
    assert desk.ledger.move_leavers(desk.now) == len(tickets) == 2
    for ticket in tickets:
        desk.finish(ticket, group=group(100))
    assert {server.pace.num_groups for server in desk.table.servers.values()} == {0}


@pytest.mark.parametrize("fails", [False, True])
async def test_all_slow_hosts_together_are_waited_for_within_one_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Ten hosts end their fetch one after another. The end of one does not prolong the wait for the next one."""
    monkeypatch.setattr(fleet, "_FETCH_SLACK_S", 0.4)
    table = ServerTable("round_robin", dead_after_s=10.0)
    no_session: Any = None
    made = Fleet(
        table,
        UpdatePlan(table),
        make_services(),
        session=no_session,
        path_of=lambda version: Path(str(version)),
        probe_every_s=1.0,
        probe_limit_s=1.0,
        verify_limit_s=0.8,  # half of it limits the wait for the first host
        files_url="http://files",
    )
    for index in range(10):
        table.announce(f"generation_server/{index}", str(index), 0.0)

    async def fetch(self: FilesInManager, url: str, version: WeightVersion, limit_s: float) -> None:
        await asyncio.sleep(0.2 * int(url))
        if fails:
            raise OSError("no disk")

    monkeypatch.setattr(FilesInManager, "fetch", fetch)
    await made._fetch_everywhere(WeightVersion(1, 0), 0)
    assert f"servers have not fetched {WeightVersion(1, 0)} yet; the others continue" in caplog.text
    assert made._updates
    await asyncio.wait(made._updates)
