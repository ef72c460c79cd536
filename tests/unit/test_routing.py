"""Health states of generation servers, and the choice of a server for a group."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from fake_policy import POLICY

from asyncrl.config.limits import rule_of
from asyncrl.config.schema import ManagerConfig
from asyncrl.manager.routing import POLICIES, ServerState, ServerTable
from asyncrl.protocol.versions import WeightVersion

NAMES = [f"generation_server/{index}" for index in range(3)]


def v(version: int, attempt: int = 1) -> WeightVersion:
    return WeightVersion(attempt, version)


def load(table: ServerTable, name: str, version: WeightVersion, now: float = 0.0) -> bool:
    return table.loaded(name, table.begin_update(name, version), version, now)


@pytest.fixture
def table() -> ServerTable:
    table = ServerTable("least_requests", dead_after_s=10.0)
    for name in NAMES:
        table.announce(name, f"http://{name}", 0.0)
        load(table, name, v(0))
    return table


def picked(table: ServerTable, count: int, min_version: int = 0) -> list[int]:
    indexes = []
    for _ in range(count):
        server = table.pick(min_version)
        assert server is not None
        table.granted(server.name, 10.0)
        indexes.append(NAMES.index(server.name))
    return indexes


def test_round_robin(table: ServerTable) -> None:
    table.policy = "round_robin"
    table.granted(NAMES[0])
    assert picked(table, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_least_requests(table: ServerTable) -> None:
    for _ in range(3):
        table.granted(NAMES[0])
    table.granted(NAMES[2])
    assert sorted(picked(table, 5)) == [1, 1, 1, 2, 2]
    table.ended(NAMES[0])
    assert picked(table, 1) == [0]


def test_least_token_usage(table: ServerTable) -> None:
    """The load of a server is its polled token usage plus the tokens promised since the poll was sent."""
    table.policy = "least_token_usage"
    for name, used in zip(NAMES, (100, 75, 90), strict=True):
        table.load_reported(name, used, 1, 0.0)
    assert picked(table, 4) == [1, 1, 2, 1]
    asked = table.servers[NAMES[1]].promised_tokens
    assert asked == 30.0
    table.granted(NAMES[1], 10.0)  # promised while the poll is in flight: its reply does not include these tokens
    table.load_reported(NAMES[1], 75, 4, asked)
    assert table.servers[NAMES[1]].promised_tokens == 10.0
    assert picked(table, 2) == [1, 1]
    assert picked(table, 1) == [2]


def test_a_full_server_gets_no_more_groups(table: ServerTable) -> None:
    table.max_groups = 2
    assert table.room(0) == 6
    assert sorted(picked(table, 6)) == [0, 0, 1, 1, 2, 2]
    assert (table.room(0), table.pick(0)) == (0, None)
    assert table.has(0)
    moved = table.pick_for_moved(0, exclude=NAMES[0])  # a moved group may exceed the limit
    assert moved is not None
    assert moved.name != NAMES[0]
    table.ended(NAMES[1])
    assert table.room(0) == 1
    assert picked(table, 1) == [1]
    load(table, NAMES[0], v(1))
    assert table.room(1) == 0
    table.max_groups = 0
    assert table.room(0) is None


def test_a_server_above_its_limit_does_not_reduce_the_room_of_others(table: ServerTable) -> None:
    """A moved group may exceed the limit of its new server."""
    table.max_groups = 2
    for _ in range(3):
        table.granted(NAMES[0])
    assert table.room(0) == 4
    assert sorted(picked(table, 4)) == [1, 1, 2, 2]


# ---------------------------------------------------------------------------------------------------- servers that leave


def test_a_leaving_server_gets_no_groups_and_drains(table: ServerTable) -> None:
    assert picked(table, 3) == [0, 1, 2]
    table.leave(NAMES[1], 1.0)
    server = table.servers[NAMES[1]]
    assert server.view().state == "draining"
    assert server.view().version == str(v(0))  # it still serves its version
    assert 1 not in picked(table, 6)
    table.load_reported(NAMES[1], 50, 0, 0.0)
    assert not table.has_drained(NAMES[1])  # its group may be idle between two steps of an agent
    table.ended(NAMES[1], 10.0)
    table.handed_over(NAMES[1])
    assert not table.has_drained(NAMES[1])  # it must report that no request runs
    table.load_reported(NAMES[1], 50, 1, 0.0)
    assert not table.has_drained(NAMES[1])
    table.load_reported(NAMES[1], 0, 0, 0.0)
    assert table.has_drained(NAMES[1])
    table.withdraw(NAMES[1])
    assert server.is_gone
    assert [view.server for view in table.views()] == [NAMES[0], NAMES[2]]


def test_a_leaving_server_with_groups_is_overdue_after_the_drain_timeout(table: ServerTable) -> None:
    table.drain_timeout_s = 5.0
    picked(table, 3)
    table.leave(NAMES[1], 1.0)
    table.leave(NAMES[1], 4.0)  # repeated: the timeout does not start again
    assert table.overdue_leavers(5.9) == []
    assert table.overdue_leavers(6.0) == [table.servers[NAMES[1]]]
    table.ended(NAMES[1])
    assert table.overdue_leavers(6.0) == []


def test_a_server_that_is_desired_again_must_load(table: ServerTable) -> None:
    table.leave(NAMES[1], 1.0)
    table.stay(NAMES[1])
    assert table.servers[NAMES[1]].state is ServerState.STALE
    assert 1 not in picked(table, 4)
    assert load(table, NAMES[1], v(0))
    assert 1 in picked(table, 4)
    table.stay(NAMES[1])  # it never left
    assert table.servers[NAMES[1]].state is ServerState.HEALTHY


def test_views_show_how_long_updates_interrupted_the_servers(table: ServerTable) -> None:
    for number in (1, 2):
        assert table.loaded(NAMES[0], table.begin_update(NAMES[0], v(number)), v(number), 10.0, took_s=0.5)
    table.load_failed(NAMES[1], table.begin_update(NAMES[1], v(2)), "refused")
    assert [view.update_s for view in table.views()] == [1.0, 0.0, 0.0]


def test_the_load_of_a_leaving_server_is_void(table: ServerTable) -> None:
    incarnation = table.begin_update(NAMES[1], v(1))
    table.leave(NAMES[1], 1.0)
    assert not table.loaded(NAMES[1], incarnation, v(1), 2.0)
    assert not table.load_failed(NAMES[1], incarnation, "late")
    assert table.servers[NAMES[1]].state is ServerState.DRAINING
    assert table.served == 0


def test_a_leaving_server_never_serves_again_after_any_event(table: ServerTable) -> None:
    server = table.servers[NAMES[1]]
    for now in (20.0, 40.0):
        table.leave(NAMES[1], now)
        table.answered(NAMES[1], "something else", now)
        table.begin_attempt(table.attempt + 1)
        assert server.state is ServerState.DRAINING
        table.silent(NAMES[1], "no answer", now + 10.1)
        assert server.state is ServerState.DEAD
        assert table.has_drained(NAMES[1])
        table.answered(NAMES[1], str(v(0)), now + 11.0)
        assert server.state is ServerState.DRAINING
    table.announce(NAMES[1], "http://elsewhere", 60.0)
    assert (server.state, server.url) == (ServerState.DRAINING, "http://elsewhere")


def test_the_name_of_a_server_that_left_can_be_used_again(table: ServerTable) -> None:
    table.leave(NAMES[1], 1.0)
    table.withdraw(NAMES[1])
    table.stay(NAMES[1])
    assert table.servers[NAMES[1]].state is ServerState.DEAD
    table.announce(NAMES[1], "http://new", 2.0)
    assert table.servers[NAMES[1]].state is ServerState.STALE
    assert load(table, NAMES[1], v(0), 3.0)
    assert 1 in picked(table, 3)


def test_the_words_of_the_config_are_the_rows_of_the_table() -> None:
    (routing,) = (field for field in dataclasses.fields(ManagerConfig) if field.name == "routing")
    assert rule_of(routing).words == tuple(POLICIES)


@pytest.mark.parametrize("name", [*POLICIES, "fake"])
def test_the_contract_of_a_policy(table: ServerTable, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A policy only orders the servers: the least load is picked, of equals the next one, and never one that may not serve."""
    monkeypatch.setitem(POLICIES, "fake", POLICY)
    table.policy, table.max_groups = name, 2

    def loads() -> dict[str, float]:
        return {server.name: POLICIES[name].load_of(server) for server in table.servers.values()}

    for busy in NAMES[:2]:  # in turn the only server with a group, so that the loads differ
        table.granted(busy, 10.0)
        before = loads()
        assert name == "round_robin" or len(set(before.values())) > 1
        first = table.pick(0)
        assert first is not None
        assert before[first.name] == min(before.values())
        assert loads() == before  # to look at the servers changes none of them
        table.ended(busy, 10.0)
    assert sorted(picked(table, 6)) == [0, 0, 1, 1, 2, 2]  # no server gets more than it may have
    assert table.pick(0) is None
    table.ended(NAMES[1], 10.0)
    assert picked(table, 1) == [1]
    assert table.pick(1, max_groups=0) is None  # no server has this version


def test_only_servers_with_the_version_or_a_newer_one(table: ServerTable) -> None:
    load(table, NAMES[1], v(2))
    assert picked(table, 2, min_version=1) == [1, 1]
    assert table.pick(3) is None
    assert table.pick(1, exclude=NAMES[1]) is None
    assert table.served == 2


def test_served_version_never_goes_back(table: ServerTable) -> None:
    load(table, NAMES[1], v(2))
    table.withdraw(NAMES[1])
    assert table.served == 2
    assert not table.has(2)
    load(table, NAMES[2], v(1))  # this load began before the newer one
    assert table.served == 2


def test_a_suspect_server_recovers_only_with_the_right_echo(table: ServerTable) -> None:
    server = table.servers[NAMES[0]]
    table.silent(NAMES[0], "no answer", 1.0)
    assert server.state is ServerState.SUSPECT
    assert NAMES[0] not in {NAMES[index] for index in picked(table, 6)}
    table.answered(NAMES[0], str(v(0)), 2.0)
    assert server.state is ServerState.HEALTHY
    table.silent(NAMES[0], "no answer", 3.0)
    table.answered(NAMES[0], "", 4.0)  # restarted at its old address
    assert server.state is ServerState.STALE
    assert server.view().version == ""


def test_a_healthy_server_that_echoes_something_else_is_stale(table: ServerTable) -> None:
    table.answered(NAMES[0], str(v(7)), 1.0)
    assert table.servers[NAMES[0]].state is ServerState.STALE
    assert "a0001-v00000007 instead of a0001-v00000000" in table.servers[NAMES[0]].reason


def test_a_server_is_dead_after_a_long_silence_and_recovers_through_a_load(table: ServerTable) -> None:
    server = table.servers[NAMES[0]]
    for now in (5.0, 10.0, 10.1):
        table.silent(NAMES[0], "no answer", now)
    assert server.state is ServerState.DEAD
    table.answered(NAMES[0], str(v(0)), 11.0)
    assert server.state is ServerState.STALE
    table.answered(NAMES[0], str(v(0)), 12.0)
    assert server.state is ServerState.STALE  # the right echo alone is not enough
    assert load(table, NAMES[0], v(0), 13.0)
    assert server.state is ServerState.HEALTHY


def test_a_server_that_has_never_served_is_dead_after_a_long_silence(table: ServerTable) -> None:
    table.announce("generation_server/3", "http://3", 0.0)
    table.silent("generation_server/3", "no answer", 10.0)
    assert table.servers["generation_server/3"].state is ServerState.STALE
    table.silent("generation_server/3", "no answer", 10.1)
    assert table.servers["generation_server/3"].state is ServerState.DEAD


def test_a_new_process_of_a_server_must_load_and_the_load_of_the_old_one_is_void(table: ServerTable) -> None:
    server = table.servers[NAMES[0]]
    incarnation = table.begin_update(NAMES[0], v(1))
    table.announce(NAMES[0], "http://elsewhere", 1.0)
    assert (server.state, server.url) == (ServerState.STALE, "http://elsewhere")
    assert not table.loaded(NAMES[0], incarnation, v(1), 2.0)
    assert not table.load_failed(NAMES[0], incarnation, "late")
    assert server.state is ServerState.STALE
    assert table.served == 0


def test_the_same_announcement_again_changes_nothing(table: ServerTable) -> None:
    table.announce(NAMES[0], f"http://{NAMES[0]}", 1.0)
    assert table.servers[NAMES[0]].state is ServerState.HEALTHY
    table.withdraw(NAMES[0])
    table.withdraw("generation_server/9")
    assert table.servers[NAMES[0]].state is ServerState.DEAD
    table.announce(NAMES[0], f"http://{NAMES[0]}", 2.0)
    assert table.servers[NAMES[0]].state is ServerState.STALE


def test_a_new_attempt_makes_all_servers_stale_and_voids_their_loads(table: ServerTable) -> None:
    incarnation = table.begin_update(NAMES[0], v(1))
    table.silent(NAMES[2], "no answer", 0.0)
    table.begin_attempt(2)
    assert table.served == -1
    assert not table.loaded(NAMES[0], incarnation, v(1), 1.0)
    assert {server.state for server in table.servers.values()} == {ServerState.STALE}
    load(table, NAMES[1], v(1, attempt=2))
    assert table.served == 1
    table.begin_attempt(1)
    assert table.attempt == 2


def test_a_dead_server_becomes_healthy_only_through_stale_and_a_load() -> None:
    """Checks all sequences of four events after the death of a server."""
    events = {
        "announce": lambda table, incarnation: table.announce("s", "http://s", 1.0),
        "announce elsewhere": lambda table, incarnation: table.announce("s", "http://t", 1.0),
        "withdraw": lambda table, incarnation: table.withdraw("s"),
        "answered": lambda table, incarnation: table.answered("s", str(v(0)), 1.0),
        "silent": lambda table, incarnation: table.silent("s", "no answer", 1.0),
        "late load": lambda table, incarnation: table.loaded("s", incarnation, v(0), 1.0),
        "new attempt": lambda table, incarnation: table.begin_attempt(table.attempt + 1),
        "leave": lambda table, incarnation: table.leave("s", 1.0),
        "stay": lambda table, incarnation: table.stay("s"),
    }
    for sequence in itertools.product(events, repeat=4):
        table = ServerTable()
        table.announce("s", "http://s", 0.0)
        load(table, "s", v(0))
        incarnation = table.begin_update("s", v(0))
        table.withdraw("s")
        for event in sequence:
            events[event](table, incarnation)
            assert table.servers["s"].state in (ServerState.DEAD, ServerState.STALE, ServerState.DRAINING), sequence
            assert table.pick(0) is None


def test_views_name_the_version_being_loaded(table: ServerTable) -> None:
    """The trainer keeps a version on disk while a server loads it."""
    table.begin_update(NAMES[0], v(4))
    assert [(view.state, view.version) for view in table.views()][:2] == [
        ("updating", "a0001-v00000004"),
        ("healthy", "a0001-v00000000"),
    ]
