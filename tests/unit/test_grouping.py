"""The default assignment of pushers to pullers."""

import pytest

from asyncrl.streams.push_pull import grouping


@pytest.mark.parametrize(
    ("num_pushers", "num_pullers", "expected"),
    [
        (6, 3, {0: [0, 1], 1: [2, 3], 2: [4, 5]}),
        (7, 3, {0: [0, 1, 6], 1: [2, 3], 2: [4, 5]}),
        (8, 3, {0: [0, 1, 6], 1: [2, 3, 7], 2: [4, 5]}),
        (3, 3, {0: [0], 1: [1], 2: [2]}),
        (4, 1, {0: [0, 1, 2, 3]}),
        (1, 1, {0: [0]}),
        (1, 2, {0: [0], 1: [0]}),
        (2, 5, {0: [0], 1: [1], 2: [0], 3: [1], 4: [0]}),
    ],
)
def test_assignments_of_small_layouts(num_pushers, num_pullers, expected):
    assert grouping(num_pushers, num_pullers) == expected


@pytest.mark.parametrize("num_pushers", range(1, 12))
@pytest.mark.parametrize("num_pullers", range(1, 12))
def test_every_pusher_is_assigned_and_the_load_is_even(num_pushers, num_pullers):
    groups = grouping(num_pushers, num_pullers)
    assert list(groups) == list(range(num_pullers))
    assert {pusher for pushers in groups.values() for pusher in pushers} == set(range(num_pushers))
    sizes = [len(pushers) for pushers in groups.values()]
    assert max(sizes) - min(sizes) <= 1
    if num_pushers >= num_pullers:  # each pusher has exactly one puller
        assert sum(sizes) == num_pushers


@pytest.mark.parametrize(("num_pushers", "num_pullers"), [(0, 1), (1, 0), (-1, 2)])
def test_counts_below_one_are_refused(num_pushers, num_pullers):
    with pytest.raises(ValueError, match="at least one"):
        grouping(num_pushers, num_pullers)
