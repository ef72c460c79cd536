"""How often the manager hears of each peer: rarer where they are many, never so rare that the dead are found later."""

import pytest

from asyncrl.manager.intervals import heartbeat_s, in_turn, probe_s


@pytest.mark.parametrize(
    ("num_workers", "expected_s"),
    [(0, 2.0), (1, 2.0), (2_000, 2.0), (3_000, 3.0), (5_000, 5.0), (16_384, 5.0), (10**9, 5.0)],
)
def test_heartbeats_are_a_thousand_a_second_or_a_third_of_a_lease_apart(num_workers, expected_s):
    assert heartbeat_s(2.0, num_workers, 15.0) == expected_s


def test_nobody_is_heard_of_more_often_than_asked_for():
    assert heartbeat_s(6.0, 5_000, 15.0) == 6.0  # more than a third of the lease, as the user has it
    assert heartbeat_s(0.5, 1, 4.0) == 0.5


def test_probes():
    assert probe_s(2.0, 64, 15.0) == 2.0
    assert probe_s(2.0, 600, 15.0) == 3.0
    assert probe_s(2.0, 1_024, 15.0) == 5.0


def test_each_has_its_turn():
    names = [f"generation_server/{index}" for index in range(10)]
    share = 2.0 / probe_s(2.0, 1_024, 15.0)  # two seconds of five
    asked, seen = {}, []
    for turn in range(6):
        now = 2.0 * turn
        due = in_turn(names, asked, share)
        assert len(due) == 4
        asked |= dict.fromkeys(due, now)
        seen.append(set(due))
    for turn in range(4):  # in any three turns all of them
        assert set.union(*seen[turn : turn + 3]) == set(names)
    assert in_turn(names, asked, 1.0) == sorted(names, key=asked.get)
