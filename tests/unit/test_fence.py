"""The fence refuses places (such as an attempt) earlier than the newest one, adopts later ones, and never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.fence import Fence, IncarnationFence
from asyncrl.protocol.names import incarnation
from asyncrl.protocol.versions import WeightVersion


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_the_newest_is_the_highest_place_so_far_and_lower_places_are_over(places: list[tuple[int, int]]) -> None:
    fence = Fence[tuple[int, int] | None](None)
    seen: list[tuple[int, int]] = []
    for place in places:
        assert fence.is_over(place) == any(place < other for other in seen)
        assert fence.adopt(place) == all(place > other for other in seen)
        seen.append(place)
        assert fence.newest == max(seen)
        assert fence.is_current(max(seen))


def test_no_place_is_over_before_one_is_seen() -> None:
    fence = Fence[WeightVersion | None](None)
    assert not fence.is_over(WeightVersion(0, 0))
    assert fence.adopt(WeightVersion(1, 5))
    assert fence.is_over(WeightVersion(1, 4))
    assert not fence.is_over(WeightVersion(1, 5))
    assert not fence.adopt(WeightVersion(1, 5))
    assert fence.adopt(WeightVersion(2, 0))


def test_incarnations_are_ordered_by_their_names() -> None:
    first, second = (incarnation("worker", start=start) for start in (1, 2))
    fence = IncarnationFence(second)
    assert fence.is_over(first)
    assert not fence.adopt(first)
    assert fence.newest == second


def test_incarnations_whose_names_have_no_order_are_ordered_by_arrival() -> None:
    fence = IncarnationFence("a")
    assert fence.adopt("b")
    assert fence.is_over("a")
    assert not fence.adopt("a")
    assert not fence.is_over("b")
    assert fence.adopt("c")
    assert fence.is_over("b")
