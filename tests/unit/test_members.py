"""Which generation servers stay: the desired number of servers applied to those that are present."""

from __future__ import annotations

import msgspec
import pytest

from asyncrl.manager.load import interval_s
from asyncrl.manager.routing import Members, ServerTable
from asyncrl.protocol.scaling import DesiredServers

NAMES = [f"generation_server/{index}" for index in range(3)]


@pytest.fixture
def members() -> Members:
    members = Members(ServerTable())
    for name in NAMES:
        members.table.announce(name, f"http://{name}", 0.0)
        members.see(name, 0.0)
    return members


def states(members: Members) -> str:
    """Return two letters per server: st(ale) or dr(aining)."""
    return "".join(members.table.servers[name].state.value[:2] for name in NAMES)


def test_the_servers_with_the_highest_index_leave_and_the_newest_number_counts(members: Members) -> None:
    assert states(members) == "ststst"
    members.set_desired(DesiredServers(count=1, id="a"), 1.0)
    assert states(members) == "stdrdr"
    members.set_desired(DesiredServers(count=2, id="b"), 1.0)
    assert states(members) == "ststdr"
    members.set_desired(None, 1.0)
    assert states(members) == "ststst"


def test_a_server_beyond_the_desired_number_leaves_on_arrival(members: Members) -> None:
    members.set_desired(DesiredServers(count=3, id="a"), 1.0)
    members.table.announce("generation_server/10", "http://late", 2.0)
    members.see("generation_server/10", 2.0)
    assert members.table.servers["generation_server/10"].state.value == "draining"


def test_each_drained_server_is_reported_once_per_request(members: Members) -> None:
    assert members.drained() == []
    members.set_desired(DesiredServers(count=1, id="a"), 1.0)
    assert members.drained() == []
    members.table.load_reported(NAMES[2], 0, 0, 0.0)
    assert members.drained() == [(NAMES[2], "a")]
    members.drain_reported(NAMES[2], "a")
    assert members.drained() == []
    members.set_desired(DesiredServers(count=2, id="b"), 2.0)
    assert members.drained() == [(NAMES[2], "b")]
    members.table.withdraw(NAMES[2])
    assert members.drained() == [(NAMES[2], "b")]  # a server that is gone counts as drained
    members.set_desired(DesiredServers(count=3, id="c"), 3.0)
    assert members.drained() == []


@pytest.mark.parametrize("text", ['{"count":0,"id":"a"}', '{"count":"3","id":"a"}', "3", '{"count":1}'])
def test_an_invalid_desired_number_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=DesiredServers)


@pytest.mark.parametrize(
    ("num_servers", "heartbeat_s", "expected"),
    [(1, 2.0, 0.2), (20, 2.0, 0.2), (64, 2.0, 0.64), (1000, 2.0, 2.0), (1, 0.1, 0.1)],
)
def test_the_polling_interval_of_the_load_is_bounded(num_servers: int, heartbeat_s: float, expected: float) -> None:
    assert interval_s(num_servers, heartbeat_s) == expected
