"""Data store of a worker: capacity, duplicates, keys that MFCs add, copies of groups of other workers."""

import numpy as np
import pytest

from asyncrl.data.sequence import SequenceSample
from asyncrl.model.store import DUPLICATE, FULL, DataStore


def group(group_id: str, *lengths: int) -> SequenceSample:
    return SequenceSample.from_groups(
        [group_id],
        [{"packed_input_ids": [list(range(1, n + 1)) for n in lengths], "rewards": [float(n) for n in lengths]}],
    )


def test_groups_beyond_the_capacity_are_refused_with_a_reason():
    store = DataStore(2)
    assert [store.put(group(name, 3)) for name in "abc"] == ["", "", FULL]
    assert ("a" in store, "b" in store, len(store)) == (True, True, 2)
    assert store.discard(["a", "never seen"]) == 1
    assert store.put(group("c", 3)) == ""


def test_a_stored_id_is_a_duplicate_even_when_the_store_is_full():
    store = DataStore(1)
    store.put(group("a", 3))
    assert store.put(group("a", 4)) == DUPLICATE
    assert store.select(["a"], ["packed_input_ids"]).total_tokens() == 3


def test_a_sample_of_several_groups_is_stored_completely_or_not_at_all():
    store = DataStore(2)
    store.put(group("a", 1))
    assert store.put(SequenceSample.gather([group("b", 1), group("c", 1)])) == FULL
    assert ("a" in store, len(store)) == (True, 1)


def test_select_returns_groups_in_the_order_of_the_call():
    store = DataStore(4)
    for name, length in (("b", 2), ("a", 1), ("c", 3)):
        store.put(group(name, length))
    sample = store.select(["c", "a"], ["packed_input_ids"])
    assert sample.ids == ("c", "a")
    assert sample.keys == ("packed_input_ids",)
    assert sample.data["packed_input_ids"].tolist() == [1, 2, 3, 1]
    assert store.select([], ["packed_input_ids"]) is None
    with pytest.raises(ValueError, match=r"1 of 2 groups are not in the store, such as \['elsewhere'\]"):
        store.select(["a", "elsewhere"], ["packed_input_ids"])


def test_amend_adds_keys_to_each_group():
    store = DataStore(4)
    store.put(group("a", 2, 1))
    store.put(group("b", 3))
    batch = store.select(["b", "a"], ["packed_input_ids"])
    store.amend(batch.derive({"values": np.arange(6, dtype=np.float32)}))
    assert store.select(["a"], ["values"]).data["values"].tolist() == [3, 4, 5]
    assert store.select(["b"], ["values", "rewards"]).data["rewards"].tolist() == [3]


def test_a_missing_key_is_named():
    store = DataStore(1)
    store.put(group("a", 2))
    with pytest.raises(ValueError, match=r"'a' has no \['values'\]"):
        store.select(["a"], ["values"])


def test_amending_an_id_that_is_gone_changes_nothing():
    store = DataStore(4)
    store.put(group("a", 1))
    both = SequenceSample.gather([group("a", 1), group("gone", 1)])
    with pytest.raises(ValueError, match="gone"):
        store.amend(both.derive({"values": np.zeros(2, np.float32)}))
    with pytest.raises(ValueError, match="no"):
        store.select(["a"], ["values"])


def test_copies_take_no_room_from_trajectories_and_have_their_own_bound():
    store = DataStore(2)
    store.add_copies(SequenceSample.gather([group("x", 2), group("y", 3)]).select_keys(["packed_input_ids"]))
    assert [store.put(group(name, 3)) for name in "abc"] == ["", "", FULL]
    store.add_copies(group("x", 2).select_keys(["rewards"]))  # a further key of the copy x
    # A copy may also be a key that another worker made for a group stored here
    store.add_copies(group("a", 3).derive({"values": np.zeros(3, np.float32)}))
    assert store.whole("x") == group("x", 2)
    assert "values" in store.whole("a").keys
    with pytest.raises(ValueError, match="1 copies of groups arrived and 2 are stored; the limit is 2"):
        store.add_copies(group("z", 1))
    assert store.put(group("y", 3)) == DUPLICATE
    assert store.discard(["x", "a"]) == 2
    assert store.put(group("d", 1)) == ""
    store.add_copies(group("z", 1))
    assert store.discard("ybdz") == 4
    assert len(store) == 0


def test_a_capacity_of_zero_is_refused():
    with pytest.raises(ValueError, match="capacity"):
        DataStore(0)
