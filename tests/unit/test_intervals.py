"""Intervals of heartbeats and health probes: they grow with the number of peers, but a dead peer is never found later."""

import pytest

from asyncrl.manager.intervals import heartbeat_s, in_turn, probe_s


@pytest.mark.parametrize(
    ("num_workers", "expected_s"),
    [(0, 2.0), (1, 2.0), (2_000, 2.0), (3_000, 3.0), (5_000, 5.0), (16_384, 5.0), (10**9, 5.0)],
)
def test_heartbeats_total_at_most_1000_per_second_and_are_at_most_a_third_of_a_lease_apart(num_workers, expected_s):
    assert heartbeat_s(2.0, num_workers, 15.0) == expected_s


def test_a_heartbeat_is_never_more_frequent_than_configured():
    assert heartbeat_s(6.0, 5_000, 15.0) == 6.0  # more than a third of the lease: the user's value is kept
    assert heartbeat_s(0.5, 1, 4.0) == 0.5


def test_probe_intervals_grow_with_the_number_of_servers():
    assert probe_s(2.0, 64, 15.0) == 2.0
    assert probe_s(2.0, 600, 15.0) == 3.0
    assert probe_s(2.0, 1_024, 15.0) == 5.0


def test_every_server_is_probed_in_turn():
    names = [f"generation_server/{index}" for index in range(10)]
    share = 2.0 / probe_s(2.0, 1_024, 15.0)  # two seconds of five
    asked, seen = {}, []
    for turn in range(6):
        now = 2.0 * turn
        due = in_turn(names, asked, share)
        assert len(due) == 4
        asked |= dict.fromkeys(due, now)
        seen.append(set(due))
    for turn in range(4):  # any three consecutive turns cover all servers
        assert set.union(*seen[turn : turn + 3]) == set(names)
    assert in_turn(names, asked, 1.0) == sorted(names, key=asked.get)
