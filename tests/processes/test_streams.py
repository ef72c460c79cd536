"""Both streams over real ZeroMQ sockets, and heads that are killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

from asyncrl.config.schema import RuntimeConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.protocol.calls import CallResult, ClearData, ExecuteMFC, Ping
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta
from asyncrl.runtime.channel import ChannelSender, FencedError
from asyncrl.runtime.channel_protocol import (
    ChannelClosed,
    ChannelFull,
    ChannelRefused,
    Endpoint,
    ReceiverRestarted,
)
from asyncrl.runtime.transport import ZmqTransport
from asyncrl.streams.push_pull import MetaPuller, MetaPusher, NameResolvingZmqPuller, NameResolvingZmqPusher
from asyncrl.streams.request_reply import (
    CALL_CREDIT_ITEMS,
    NameResolvingReplyServer,
    NameResolvingRequestClient,
    RemoteCallError,
)
from tests.support.memory_names import MemoryNameResolver

LIMIT_S = 60.0  # a killed head needs a process start to come back
RUNTIME = RuntimeConfig(push_credit_items=8, resend_after_s=0.2, start_timeout_s=LIMIT_S)
SHORT = RuntimeConfig(start_timeout_s=3.0, resend_after_s=0.1)  # long enough for live receivers to answer
NAMES = Names("e", "t")
STORED = StoreVerdict(verdict="stored")


@pytest.fixture
def resolver():
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        yield resolver


@pytest.fixture
async def opened():
    """opened(x) starts x and closes it at the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(thing):
            stack.push_async_callback(thing.close)
            await thing.start()
            return thing

        yield start


def trajectory(number=1, lengths=(1000, 2000), ticket=None):
    sample = SequenceSample.from_groups(
        [ticket or str(number)],
        [
            {
                "packed_input_ids": [np.full(n, number, np.int64) for n in lengths],
                "packed_logprobs": [np.linspace(-1, 0, n, dtype=np.float32) for n in lengths],
                "loss_mask": [np.arange(n) % 2 == 0 for n in lengths],
                "rewards": [0.5] * len(lengths),
            }
        ],
    )
    meta = TrajectoryMeta(
        ticket_id=ticket or str(number),
        locator=Locator(0, number),
        attempt=1,
        head=0,
        keys=list(sample.keys),
        seqlens=list(lengths),
        response_lengths=list(lengths),
        rewards=[0.5] * len(lengths),
        version_start=[1] * len(lengths),
        version_end=[2] * len(lengths),
        birth_time=1.5,
    )
    return meta, sample


def pusher(resolver, *, index=0, num_pushers=1, num_pullers=1, runtime=RUNTIME):
    return NameResolvingZmqPusher(
        resolver,
        NAMES,
        pusher_index=index,
        num_pushers=num_pushers,
        num_pullers=num_pullers,
        runtime=runtime,
        incarnation="i",
    )


def puller(resolver, index=0, runtime=RUNTIME):
    return NameResolvingZmqPuller(resolver, NAMES, puller_index=index, runtime=runtime)


# -------------------------------------------------------------------------------------------------------------- push-pull


@pytest.mark.parametrize("lengths", [(3, 5), (1000, 2000), (100_000,)], ids=["small", "medium", "zero-copy"])
async def test_round_trip(resolver, opened, lengths):
    push, pull = await opened(pusher(resolver)), await opened(puller(resolver))
    meta, sample = trajectory(7, lengths)
    pushing = asyncio.create_task(push.push(meta, sample, timeout_s=LIMIT_S))
    pulled = await pull.pull()
    assert pulled.meta == meta
    assert pulled.sample.seqlens == sample.seqlens
    for key, array in sample.data.items():
        np.testing.assert_array_equal(pulled.sample.data[key], array)
        assert pulled.sample.data[key].dtype == array.dtype
        assert pulled.sample.data[key].flags.writeable
    assert push.num_pending == 1
    pulled.ack(StoreVerdict(verdict="refused", reason="full"))
    assert await pushing == StoreVerdict(verdict="refused", reason="full")
    assert (push.num_pending, push.pending_bytes, pull.num_queued) == (0, 0, 0)


async def test_a_head_may_be_named_and_is_in_turn_where_it_is_not(resolver, opened):
    push = await opened(pusher(resolver, num_pullers=2))
    pullers = [await opened(puller(resolver, i)) for i in range(2)]
    pushes = [
        asyncio.create_task(push.push(*trajectory(i), head=head, timeout_s=LIMIT_S))
        for i, head in enumerate([None, None, None, None, 1, 1])
    ]
    heads = [0, 1, 0, 1, 1, 1]
    for i, head in enumerate(heads):
        pulled = await pullers[head].pull()
        assert pulled.meta.ticket_id == str(i)
        pulled.ack(STORED)
    assert await asyncio.gather(*pushes) == [STORED] * 6
    with pytest.raises(ValueError, match=r"head is 2; there are heads 0..1"):
        await push.push(*trajectory(), head=2, timeout_s=1)


async def sender_to(resolver, opened, stream):
    """Open a sender to `stream` that acts as another process. It can send any bytes, even invalid ones."""
    made = ChannelSender("other", stream, "other", runtime=RUNTIME)

    await opened(SimpleNamespace(start=partial(made.start, resolver, NAMES.stream(stream)), close=made.close))
    return made


async def test_what_is_no_trajectory_is_refused_with_the_reason(resolver, opened):
    push, pull = await opened(pusher(resolver)), await opened(puller(resolver))
    junk_sender = await sender_to(resolver, opened, "puller0")
    meta, sample = trajectory(1)
    pulling = asyncio.create_task(pull.pull())
    with pytest.raises(ChannelRefused, match="puller0 cannot read the trajectory: the sample has the ids"):
        await push.push(trajectory(2)[0], sample, timeout_s=LIMIT_S)
    with pytest.raises(ChannelRefused, match="cannot read the trajectory"):
        await junk_sender.send(b"no header", timeout_s=LIMIT_S, what="junk")
    pushing = asyncio.create_task(push.push(meta, sample, timeout_s=LIMIT_S))
    (await pulling).ack(STORED)
    assert await pushing == STORED


async def test_strangers_on_the_socket_do_no_harm(resolver, opened):
    pull = await opened(puller(resolver, runtime=RuntimeConfig(max_message_bytes=100_000)))
    address = msgspec.json.decode(resolver.get(NAMES.stream("puller0")), type=Endpoint).address
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(address)
    for message in ([b"junk"], [b""], [b"", b"x" * 1000], [b"x" * 1_000_000]):
        stranger.send_multipart(message)
    push = await opened(pusher(resolver))
    pushing = asyncio.create_task(push.push(*trajectory(), timeout_s=LIMIT_S))
    (await pull.pull()).ack(STORED)
    assert await pushing == STORED
    stranger.close(linger=0)
    context.term()


async def test_oversized_is_refused_by_the_limit_of_the_head(resolver, opened):
    await opened(puller(resolver, runtime=RuntimeConfig(max_message_bytes=10_000)))
    push = await opened(pusher(resolver))
    with pytest.raises(ChannelRefused, match="max_message_bytes is 10000"):
        await push.push(*trajectory(), timeout_s=LIMIT_S)


class HeadProcess:
    """Runs stream_puller.py and publishes its endpoint in the test's resolver."""

    def __init__(self, resolver, journal: Path) -> None:
        self.resolver, self.journal = resolver, journal
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("stream_puller.py")),
            str(self.journal),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self.process.stdout is not None
        endpoint = await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)
        self.resolver.add(NAMES.stream("puller0"), endpoint.decode().strip(), replace=True)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            await self.kill()

    def stored(self) -> list[str]:
        return self.journal.read_text().split()


async def push_all(push, numbers, width=32):
    """Push with `width` concurrent callers. Yield verdicts as they come."""
    tasks = set()
    numbers = iter(numbers)
    while True:
        while len(tasks) < width and (number := next(numbers, None)) is not None:
            tasks.add(asyncio.create_task(push.push(*trajectory(number), timeout_s=LIMIT_S)))
        if not tasks:
            return
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            yield task.result().verdict


async def test_a_killed_head_loses_nothing_and_repeats_nothing(resolver, opened, tmp_path):
    head = await opened(HeadProcess(resolver, tmp_path / "journal"))
    push = await opened(pusher(resolver))
    verdicts = []
    async for verdict in push_all(push, range(400)):
        verdicts.append(verdict)
        if len(verdicts) in (60, 200):
            await head.kill()
            await head.start()
    assert len(verdicts) == 400
    assert set(verdicts) <= {"stored", "duplicate"}
    assert sorted(map(int, head.stored())) == list(range(400))
    assert push.num_pending == 0


async def test_a_frozen_head_leaves_the_pusher_within_its_credit(resolver, opened, tmp_path):
    head = await opened(HeadProcess(resolver, tmp_path / "journal"))
    push = await opened(pusher(resolver))
    size = trajectory()[1].num_bytes + 1000
    verdicts, most_bytes, turned = [], 0, 0
    async for verdict in push_all(push, range(200), width=50):
        verdicts.append(verdict)
        if len(verdicts) == 60:
            head.process.send_signal(signal.SIGSTOP)
            for _ in range(20):  # one second
                await asyncio.sleep(0.05)
                most_bytes, turned = max(most_bytes, push.pending_bytes), turned + 1
            frozen_at = len(head.stored())
            head.process.send_signal(signal.SIGCONT)
    assert turned == 20
    assert 0 < most_bytes <= RUNTIME.push_credit_items * size
    assert frozen_at < 120
    assert push.num_resent == 0  # the head had received all messages, and its answers to resend queries said so
    assert verdicts == ["stored"] * 200
    assert sorted(map(int, head.stored())) == list(range(200))


async def test_metadata_from_head_to_master(resolver, opened):
    push = await opened(MetaPusher(resolver, NAMES, head=1, runtime=RUNTIME, incarnation="i"))
    pull = await opened(MetaPuller(resolver, NAMES, runtime=RUNTIME))
    junk_sender = await sender_to(resolver, opened, "master_meta")
    metas = [trajectory(i)[0] for i in range(20)]
    pushes = [asyncio.create_task(push.push_meta(meta, timeout_s=LIMIT_S)) for meta in metas]
    for meta in metas:
        pulled, ack = await pull.pull_meta()
        assert pulled == meta
        ack(StoreVerdict(verdict="duplicate"))
    assert [verdict.verdict for verdict in await asyncio.gather(*pushes)] == ["duplicate"] * 20
    pulling = asyncio.create_task(pull.pull_meta())
    with pytest.raises(ChannelRefused, match="cannot read the metadata"):
        await junk_sender.send(b"\x93", timeout_s=LIMIT_S, what="junk")
    pulling.cancel()
    with pytest.raises(TimeoutError, match=r"head1: waited 0.05 s for master_meta to settle metadata of trajectory 3"):
        await push.push_meta(metas[3], timeout_s=0.05)


def test_a_wildcard_cannot_be_published():
    with pytest.raises(ValueError, match="set an address of this machine"):
        ZmqTransport().bind_pull("0.0.0.0", queue_messages=1, max_frame_bytes=1)
    with pytest.raises(OSError, match=r"runtime\.host is '198\.51\.100\.1'"):
        ZmqTransport().bind_pull("198.51.100.1", queue_messages=1, max_frame_bytes=1)


# ---------------------------------------------------------------------------------------------------------- request-reply


ROUTING = {("actor", 0, 0, 0): 0, ("actor", 1, 0, 0): 1, 0: 0, 1: 1}
MESH = [("actor", 0, 0, 0), ("actor", 1, 0, 0)]


def client(resolver, num_workers=2, routing=ROUTING, runtime=RUNTIME, attempt=1):
    return NameResolvingRequestClient(
        resolver,
        NAMES,
        num_workers=num_workers,
        handler_routing=routing,
        runtime=runtime,
        incarnation="m",
        attempt=attempt,
    )


def server(resolver, index, attempt=1):
    return NameResolvingReplyServer(resolver, NAMES, index=index, runtime=RUNTIME, attempt=attempt)


@pytest.fixture
async def client_and_servers(resolver, opened):
    servers = [await opened(server(resolver, i)) for i in range(2)]
    return await opened(client(resolver)), servers


async def test_routing_sequences_and_order(client_and_servers):
    calls, servers = client_and_servers
    futures = []
    for step in range(50):
        futures += calls.call_nowait(MESH, [ExecuteMFC(mfc="m", version=step, ids=["a", "b"])] * 2)
        futures += calls.call_nowait([1], [ClearData(ids=[str(step)])])
    for index, worker in enumerate(servers):
        received = [await worker.receive() for _ in range(50 * (1 + index))]
        assert [call.worker_seq for call in received] == list(range(50 * (1 + index)))
        steps = [call for call in received if isinstance(call.body, ExecuteMFC)]
        assert [call.body.version for call in steps] == list(range(50))
        assert [call.global_seq for call in steps] == list(range(0, 100, 2))
        for call in reversed(received):  # replies may come in any order
            call.reply(CallResult(ids=[f"{index}.{call.worker_seq}"]))
    results = [result.ids[0] for result in await asyncio.gather(*futures)]
    assert results == [text for step in range(50) for text in (f"0.{step}", f"1.{2 * step}", f"1.{2 * step + 1}")]
    assert calls.num_pending == 0


async def test_errors_travel_with_their_traceback(client_and_servers):
    calls, servers = client_and_servers
    future, other = calls.call_nowait([0, 1], [Ping(), Ping()])
    call = await servers[0].receive()
    try:
        [][3]
    except IndexError as error:
        call.fail(error)
    (await servers[1].receive()).reply(CallResult(keys=["k"]))
    with pytest.raises(RemoteCallError, match="model_worker/0: IndexError: list index out of range") as caught:
        await future
    assert (caught.value.worker, caught.value.message) == ("model_worker/0", "IndexError: list index out of range")
    assert "[][3]" in caught.value.traceback
    assert "[][3]" in str(caught.value)
    assert (await other).keys == ["k"]


class Unknown(msgspec.Struct, tag="Unknown"):
    """A call of another release."""


async def test_a_call_that_cannot_be_read_is_refused_and_does_not_hold_up_the_next(client_and_servers):
    calls, servers = client_and_servers
    (junk,) = calls.call_nowait([0], [Unknown()])
    (good,) = calls.call_nowait([0], [Ping()])
    (await servers[0].receive()).reply(CallResult())
    await good
    with pytest.raises(ChannelRefused, match="model_worker/0 cannot read the call"):
        await junk


async def test_the_barrier_names_who_is_missing(resolver, opened):
    await opened(server(resolver, 0))
    gone = Endpoint("tcp://127.0.0.1:9", "of a worker long gone", 1000)
    resolver.add(NAMES.stream("request_reply/2"), msgspec.json.encode(gone).decode())
    calls = client(resolver, num_workers=3, runtime=SHORT)
    with pytest.raises(
        TimeoutError, match=r"still missing: model_worker/1 \(not published\), model_worker/2 \(published"
    ) as e:
        await calls.start()
    assert "model_worker/0" not in str(e.value)
    await calls.close()


async def test_the_barrier_waits_for_late_workers_and_passes_over_stale_names(resolver, opened):
    gone = Endpoint("tcp://127.0.0.1:9", "of a worker long gone", 1000)
    resolver.add(NAMES.stream("request_reply/1"), msgspec.json.encode(gone).decode())
    calls = client(resolver)
    starting = asyncio.create_task(opened(calls))
    servers = [await opened(server(resolver, i)) for i in range(2)]
    await starting
    futures = calls.call_nowait(MESH, [Ping(), Ping()])
    for worker in servers:
        (await worker.receive()).reply(CallResult())
    await asyncio.gather(*futures)


async def test_calls_of_a_master_whose_attempt_is_over_are_refused(resolver, opened):
    """The old master was frozen while all model workers were restarted. It finds them by name and sends before the new master."""
    workers = [await opened(server(resolver, i, attempt=2)) for i in range(2)]
    ghost = await opened(client(resolver))
    calls = await opened(client(resolver, attempt=2))
    late = ghost.call_nowait(MESH, [ClearData(ids=["a"])] * 2)
    future, other = calls.call_nowait(MESH, [Ping(), Ping()])
    for worker in workers:
        call = await worker.receive()
        assert isinstance(call.body, Ping)
        call.reply(CallResult())
    await asyncio.gather(future, other)
    for refused in late:
        with pytest.raises(ChannelRefused, match="the call is of attempt 1, this worker of attempt 2"):
            await refused


async def test_a_sender_ignores_a_receiver_whose_attempt_is_over(resolver, opened):
    """A recovered etcd may restore the endpoint of a receiver whose attempt is over. The sender ignores that endpoint.

    Such a receiver cannot publish its endpoint itself: its start raises FencedError.
    """
    pull = await opened(MetaPuller(resolver, NAMES, runtime=RUNTIME, attempt=2))
    push = await opened(MetaPusher(resolver, NAMES, head=0, runtime=RUNTIME, incarnation="h"))
    first = asyncio.create_task(push.push_meta(trajectory(1)[0], timeout_s=LIMIT_S))
    _, ack = await asyncio.wait_for(pull.pull_meta(), LIMIT_S)
    ack(StoreVerdict(verdict="stored"))
    await first
    ghost = Endpoint("tcp://127.0.0.1:9", "of a master that was frozen", 1000, attempt=1)
    resolver.add(NAMES.stream("master_meta"), msgspec.json.encode(ghost).decode(), replace=True)
    meta, _ = trajectory()
    sending = asyncio.create_task(push.push_meta(meta, timeout_s=LIMIT_S))
    _, ack = await asyncio.wait_for(pull.pull_meta(), LIMIT_S)
    ack(StoreVerdict(verdict="stored"))
    assert (await sending).verdict == "stored"
    third = await opened(MetaPuller(resolver, NAMES, runtime=RUNTIME, attempt=3))
    assert third.num_queued == 0
    with pytest.raises(FencedError, match="master_meta of attempt 2 ends: attempt 3 has begun"):
        await MetaPuller(resolver, NAMES, runtime=RUNTIME, attempt=2).start()


async def test_fail_all(client_and_servers):
    calls, servers = client_and_servers
    futures = calls.call_nowait(MESH, [Ping(), Ping()])
    late = await servers[0].receive()
    calls.fail_all(RuntimeError("model_worker/1 died"))
    for future in futures:
        with pytest.raises(RuntimeError, match="model_worker/1 died"):
            await future
    with pytest.raises(RuntimeError, match="model_worker/1 died"):
        calls.call_nowait(MESH, [Ping(), Ping()])
    late.reply(CallResult())  # no caller waits for it any more
    assert calls.num_pending == 0


async def test_unanswered_calls_fail_when_the_worker_restarts(resolver, opened):
    worker = await opened(server(resolver, 0))
    calls = await opened(client(resolver, num_workers=1, routing={}))
    (unanswered,) = calls.call_nowait([0], [Ping()])
    await worker.receive()
    await worker.close()
    worker = await opened(server(resolver, 0))
    with pytest.raises(ReceiverRestarted, match="model_worker/0 was restarted"):
        await asyncio.wait_for(unanswered, LIMIT_S)
    (answered,) = calls.call_nowait([0], [Ping()])
    (await worker.receive()).reply(CallResult())
    await answered


async def test_calls_are_sent_to_all_or_to_none(client_and_servers):
    calls, servers = client_and_servers
    with pytest.raises(ValueError, match="no worker handles 'nobody'"):
        calls.call_nowait([0, "nobody"], [Ping(), Ping()])
    futures = [calls.call_nowait([1], [Ping()])[0] for _ in range(CALL_CREDIT_ITEMS)]
    with pytest.raises(ChannelFull, match="model_worker/1 has 1024 unanswered calls"):
        calls.call_nowait([1], [Ping()])
    with pytest.raises(ChannelFull):
        calls.call_nowait([0, 1], [Ping(), Ping()])
    (first,) = calls.call_nowait([0], [Ping()])
    call = await servers[0].receive()
    assert call.worker_seq == 0
    call.reply(CallResult())
    await first
    await calls.close()
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert len(results) == CALL_CREDIT_ITEMS
    assert all(isinstance(result, ChannelClosed) for result in results)


async def test_a_cancelled_wait_for_a_reply_does_no_harm(client_and_servers):
    calls, servers = client_and_servers
    futures = calls.call_nowait([0, 0], [Ping(), Ping()])
    futures[0].cancel()
    for _ in range(2):
        (await servers[0].receive()).reply(CallResult(seconds=1.0))
    assert (await futures[1]).seconds == 1.0


def test_a_routing_beyond_the_workers_is_refused(resolver):
    with pytest.raises(ValueError, match="handler_routing sends 'x' to worker 2; there are 2 workers"):
        client(resolver, routing={"x": 2})
