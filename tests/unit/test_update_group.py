"""Broadcast of weights, the parts that need no network: ranks, buckets, digests, and the messages for SGLang."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.weight_updates import BeginWeightUpdate, ReceiveWeights, TensorSpecs
from asyncrl.weights.update_group import GroupMember, GroupThread, digest, plan_buckets, rank_offsets, views
from tests.support.buckets import pack

LIMIT_S = 60.0


def test_servers_get_consecutive_ranks():
    assert rank_offsets([1]) == ([1], 2)
    assert rank_offsets([2, 1, 4]) == ([1, 3, 4], 8)
    assert rank_offsets([]) == ([], 1)
    with pytest.raises(ValueError, match="0 ranks"):
        rank_offsets([2, 0])


@given(st.lists(st.integers(1, 8), max_size=10))
def test_every_rank_is_given_to_one_server(counts):
    offsets, size = rank_offsets(counts)
    taken = [rank for offset, count in zip(offsets, counts, strict=True) for rank in range(offset, offset + count)]
    assert taken == list(range(1, size))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50)), max_size=30), st.integers(1, 100))
def test_buckets_keep_the_order_and_the_size_limit_and_have_one_dtype(sizes, bucket_bytes):
    buckets = plan_buckets(sizes, bucket_bytes)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len({sizes[index][0] for index in bucket}) == 1
        assert sum(sizes[index][1] for index in bucket) <= bucket_bytes or len(bucket) == 1


def test_a_bucket_is_a_copy_that_its_specs_describe():
    weight, norm, count = torch.randn(3, 4), torch.randn(4), torch.tensor(7)
    given_tensors = [
        ("weight", weight, torch.bfloat16),
        ("norm", norm, torch.bfloat16),
        ("count", count, torch.int64),
    ]
    first, second = pack(given_tensors, 1000)
    assert first.specs == TensorSpecs(names=["weight", "norm"], dtypes=["bfloat16", "bfloat16"], shapes=[[3, 4], [4]])
    assert (first.flat.dtype, first.flat.numel()) == (torch.uint8, 32)
    assert (second.specs.dtypes, second.specs.shapes) == (["int64"], [[]])
    kept = weight.clone()
    weight.zero_()  # training goes on
    tensors = dict(first.tensors() + second.tensors())
    assert torch.equal(tensors["weight"], kept.bfloat16())
    assert torch.equal(tensors["norm"], norm.bfloat16())
    assert tensors["count"].item() == 7


def test_a_large_tensor_has_a_bucket_of_its_own():
    tensors = [(name, torch.zeros(size), torch.float32) for name, size in (("a", 2), ("b", 100), ("c", 2), ("d", 2))]
    assert [bucket.specs.names for bucket in pack(tensors, 16)] == [["a"], ["b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ({"dtypes": ["float32"], "shapes": [[3]]}, "16 bytes, but its specs describe 12"),
        ({"dtypes": ["nn"], "shapes": [[4]]}, "'nn' is no dtype"),
        ({"dtypes": ["float32"], "shapes": [[-4]]}, "negative"),
    ],
)
def test_specs_that_do_not_describe_a_bucket_are_refused(specs, reason):
    with pytest.raises(ValueError, match=reason):
        views(torch.zeros(16, dtype=torch.uint8), TensorSpecs(names=["a"], **specs))


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, 40_000_000])
def test_different_buckets_have_different_digests(size):
    flat = torch.arange(size).to(torch.uint8)
    assert digest(flat) == digest(flat.clone())
    if size > 1:
        assert len({digest(flat), digest(flat.roll(1)), digest(flat + 1), digest(flat[:-1])}) == 4


def test_a_digest_of_a_small_bucket_covers_every_byte():
    flat = torch.zeros(300_000, dtype=torch.uint8)
    before = digest(flat)
    for position in range(0, len(flat), 9_999):
        changed = flat.clone()
        changed[position] = 1
        assert digest(changed) != before


def test_messages_have_the_field_names_of_sglang():
    """The fields that SGLang requires have SGLang's names. asyncrl adds fields of its own."""
    bucket = ReceiveWeights(
        names=["a"], dtypes=["float32"], shapes=[[2, 3]], group_name="g", load_format="flattened_bucket"
    )
    sent = msgspec.json.decode(msgspec.json.encode(bucket))
    assert {key: sent[key] for key in ("names", "dtypes", "shapes", "group_name", "load_format", "flush_cache")} == {
        "names": ["a"], "dtypes": ["float32"], "shapes": [[2, 3]], "group_name": "g",
        "load_format": "flattened_bucket", "flush_cache": True,
    }  # fmt: skip
    assert msgspec.json.decode(b"{}", type=BeginWeightUpdate) == BeginWeightUpdate()
    with pytest.raises(msgspec.ValidationError, match="1 names, 0 dtypes"):
        msgspec.json.decode(b'{"names": ["a"]}', type=ReceiveWeights)


async def test_a_call_that_hangs_does_not_block_the_event_loop():
    release, entered = threading.Event(), threading.Event()

    def hang() -> int:
        entered.set()
        release.wait(LIMIT_S)
        return 1

    thread = GroupThread("test")
    first, second = thread.call(hang), thread.call(lambda: 2)
    await asyncio.to_thread(entered.wait, LIMIT_S)
    first.cancel()
    assert not second.done()
    release.set()
    assert await asyncio.wait_for(second, LIMIT_S) == 2
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(thread.call(lambda: 1 // 0), LIMIT_S)
    thread.end()


async def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"'mpi'.*gloo, nccl"):
        GroupMember("g", "mpi")
