"""torch.distributed's store in name resolve, called as torch does."""

import uuid
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from asyncrl.model.name_store import NameStore
from tests.support.memory_names import MemoryNameResolver


@pytest.fixture
def store():
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        named = NameStore(
            resolver, "run/store", lease=None, limit_s=0.2
        )  # keep a reference: torch holds only the C++ part
        yield PrefixStore("group//0", named)


def test_it_keeps_what_ranks_leave_for_each_other(store):
    store.set("rank//0", b"\x00\xff address")
    assert store.get("rank//0") == b"\x00\xff address"
    store.wait(["rank//0"])
    assert store.check(["rank//0"])
    assert not store.check(["rank//0", "rank//1"])
    assert store.delete_key("rank//0")
    assert not store.delete_key("rank//0")


def test_it_counts(store):
    assert [store.add("here", 1), store.add("here", 2), store.add("here", -1)] == [1, 3, 2]


def test_it_sets_what_is_as_expected(store):
    assert store.compare_set("k", "", "a") == b"a"
    assert store.compare_set("k", "b", "c") == b"a"
    assert store.compare_set("k", "a", "c") == b"c"
    assert store.get("k") == b"c"


@pytest.mark.parametrize("torchs_own", [False, True])
def test_an_absent_key_is_set_only_if_none_is_expected(store, torchs_own):
    """As torch's own stores do: compare_set returns the expected value, although the key is still absent."""
    compared = HashStore() if torchs_own else store
    assert compared.compare_set("k", "b", "c") == b"b"
    assert not compared.check(["k"])
    assert compared.compare_set("k", "", "c") == b"c"
    assert compared.compare_set("k", "", "d") == b"c"


def test_who_does_not_come_is_waited_for_no_longer_than_the_limit(store):
    with pytest.raises(TimeoutError):
        store.get("rank//1")
    with pytest.raises(TimeoutError):
        store.wait(["rank//1"], timedelta(seconds=600))
