"""Damaged or forged trajectories over real sockets: the sender learns the reason, and the head goes on with the next message."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from asyncrl.config.schema import RuntimeConfig
from asyncrl.data.sequence import SequenceSample, encode_sample
from asyncrl.protocol.names import MASTER_META, Names
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.runtime.channel import ChannelSender
from asyncrl.runtime.channel_protocol import ChannelRefused
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.streams.push_pull import MetaPuller, NameResolvingZmqPuller, puller_stream
from tests.support.memory_names import MemoryNameResolver

RUNTIME = RuntimeConfig(push_credit_items=8, resend_after_s=0.2, start_timeout_s=10.0, max_message_bytes=1_000_000)
NAMES = Names("e", "t")
STORED = StoreVerdict(verdict="stored")
LIMIT_S = 20.0
LENGTHS = [3, 5]


@pytest.fixture
def resolver():
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        yield resolver


@contextlib.asynccontextmanager
async def channel_to(
    resolver: NameResolver, name: str, pull: NameResolvingZmqPuller | MetaPuller
) -> AsyncIterator[ChannelSender]:
    """A bare channel to a receiver. It sends any bytes."""
    send = ChannelSender("sender", name, "i", runtime=RUNTIME)
    async with contextlib.AsyncExitStack() as stack:
        for end in (send, pull):
            stack.push_async_callback(end.close)
        await send.start(resolver, NAMES.stream(name))
        await pull.start()
        yield send


@pytest.fixture
async def stream(resolver):
    """A channel to a head, and the head's end of it."""
    pull = NameResolvingZmqPuller(resolver, NAMES, puller_index=0, runtime=RUNTIME)
    async with channel_to(resolver, puller_stream(0), pull) as send:
        yield send, pull


def trajectory(ticket: str) -> tuple[TrajectoryMeta, SequenceSample]:
    group = {
        "packed_input_ids": [np.arange(length) for length in LENGTHS],
        "packed_logprobs": [np.full(length, -0.5, np.float32) for length in LENGTHS],
        "loss_mask": [np.arange(length) > 1 for length in LENGTHS],
        "rewards": [0.5, 1.0],
    }
    sample = SequenceSample.from_groups([ticket], [group])
    meta = TrajectoryMeta(
        ticket_id=ticket,
        locator=Locator(0, 0),
        attempt=1,
        head=0,
        keys=list(sample.keys),
        seqlens=LENGTHS,
        response_lengths=[1, 3],
        rewards=[0.5, 1.0],
        version_start=[1, 1],
        version_end=[1, 1],
        birth_time=1.0,
    )
    return meta, sample


KEYS = ["packed_input_ids", "packed_logprobs", "loss_mask", "rewards"]


def key_entry(header, name):
    """The key's entry, [name, dtype, number of its lengths], in the codec's header, which is [format, ids, lengths, keys]."""
    return next(entry for entry in header[3] if entry[0] == name)


def as_double(header, frames):
    """Send a key as float64, which it must not have. The number of bytes is right for float64."""
    key_entry(header, "packed_logprobs")[1] = "float64"
    frames[KEYS.index("packed_logprobs")] = np.zeros(sum(LENGTHS), np.float64).tobytes()


def unknown_dtype(header, frames):
    key_entry(header, "rewards")[1] = "object"


def cut_frame(header, frames):
    frames[0] = frames[0][:-8]


def lost_frame(header, frames):
    del frames[-1]


def one_frame_more(header, frames):
    frames.append(b"more")


def no_bool(header, frames):
    frames[KEYS.index("loss_mask")] = bytes([2] * sum(LENGTHS))


def negative_length(header, frames):
    header[2][0] = [[-3, 11]]


def huge_length(header, frames):
    header[2][0] = [[2**62, 2**62]]


def no_such_lengths(header, frames):
    key_entry(header, "rewards")[2] = 99


def other_release(header, frames):
    header[0] = 99


def keys_at_odds(header, frames):
    """Token keys with contradictory lengths."""
    header[2].append([[1, 1, 1, 5]])
    key_entry(header, "packed_logprobs")[2] = len(header[2]) - 1


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (as_double, "packed_logprobs.*float64"),
        (unknown_dtype, "key 'rewards': dtype 'object' is unknown; known are "),
        (cut_frame, "key 'packed_input_ids': 8 values of int64 take 64 bytes, its frame has 56"),
        (lost_frame, "3 frames for 4 keys"),
        (one_frame_more, "5 frames for 4 keys"),
        (no_bool, "key 'loss_mask': a bool is 2; only 0 and 1 are bools"),
        (negative_length, "a length is negative"),
        (huge_length, "values of int64 take .* bytes, its frame has 64"),
        (no_such_lengths, "key 'rewards': the lengths index 99 is out of range"),
        (other_release, "format 99, expected 1: both sides must run the same release"),
        (keys_at_odds, "packed_logprobs"),
    ],
)
async def test_the_sender_is_told_and_the_next_one_arrives(stream, tamper, reason):
    send, pull = stream
    meta, sample = trajectory("bad")
    sample_header, frames = encode_sample(sample)
    header, frames = msgspec.msgpack.decode(sample_header), [bytes(frame) for frame in frames]
    tamper(header, frames)
    forged = msgspec.msgpack.encode([meta, msgspec.msgpack.encode(header)])
    pulling = asyncio.create_task(pull.pull())
    with pytest.raises(ChannelRefused, match=rf"puller0 cannot read the trajectory: .*{reason}"):
        await send.send(forged, frames, timeout_s=LIMIT_S, what="a forged trajectory")
    sending = asyncio.create_task(send_good(send))
    pulled = await asyncio.wait_for(pulling, LIMIT_S)
    assert pulled.meta.ticket_id == "good"
    pulled.ack(STORED)
    assert await sending == STORED
    assert send.num_pending == 0  # a refused message is not resent and holds no credit


async def send_good(send: ChannelSender) -> StoreVerdict:
    meta, sample = trajectory("good")
    header, frames = encode_sample(sample)
    verdict = await send.send(msgspec.msgpack.encode([meta, header]), frames, timeout_s=LIMIT_S, what="a trajectory")
    return msgspec.msgpack.decode(verdict, type=StoreVerdict)


async def test_frames_of_another_message_are_refused(stream):
    """The frames are whole but do not fit the header: they belong to another message."""
    send, pull = stream
    meta, sample = trajectory("bad")
    sample_header, _ = encode_sample(sample)
    pulling = asyncio.create_task(pull.pull())
    header = msgspec.msgpack.encode([meta, sample_header])
    with pytest.raises(ChannelRefused, match="0 frames for 4 keys"):
        await send.send(header, timeout_s=LIMIT_S, what="a header alone")
    sending = asyncio.create_task(send_good(send))
    (await asyncio.wait_for(pulling, LIMIT_S)).ack(STORED)
    assert await sending == STORED


async def test_metadata_that_cannot_be_read_is_refused_by_the_master(resolver):
    pull = MetaPuller(resolver, NAMES, runtime=RUNTIME)
    async with channel_to(resolver, MASTER_META, pull) as send:
        pulling = asyncio.create_task(pull.pull_meta())
        with pytest.raises(ChannelRefused, match="master_meta cannot read the metadata"):
            await send.send(b"\x93nonsense", timeout_s=LIMIT_S, what="junk")
        wrong = msgspec.to_builtins(trajectory("t")[0]) | {"attempt": "first"}
        with pytest.raises(ChannelRefused, match=r"cannot read the metadata: .*Expected `int`, got `str`"):
            await send.send(msgspec.msgpack.encode(wrong), timeout_s=LIMIT_S, what="wrong types")
        meta = trajectory("good")[0]
        sending = asyncio.create_task(send.send(msgspec.msgpack.encode(meta), timeout_s=LIMIT_S, what="metadata"))
        got, ack = await asyncio.wait_for(pulling, LIMIT_S)
        assert got == meta
        ack(STORED)
        assert msgspec.msgpack.decode(await sending, type=StoreVerdict) == STORED
