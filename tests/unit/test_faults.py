"""Injected faults: the schedule of a seed, the effect on messages, and channels that deliver every message despite them."""

import asyncio
import contextlib
import random
from collections import Counter

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.config.schema import ConfigError, ExperimentConfig, FaultsConfig, RuntimeConfig
from asyncrl.launch.experiment import validate
from asyncrl.runtime import http_client
from asyncrl.runtime.channel import ChannelReceiver, ChannelSender
from asyncrl.runtime.transport import (
    FaultyTransport,
    PushSocket,
    Transport,
    ZmqTransport,
    transport_of,
)
from asyncrl.testing.faults import KINDS, TARGETS, check_target, schedule
from tests.support.memory_transport import MemoryTransport

LIMITS = RuntimeConfig(
    push_credit_items=16, push_credit_bytes=1 << 22, resend_after_s=0.05, max_message_bytes=1 << 20, start_timeout_s=5.0
)
ALL = FaultsConfig(seed=3, drop=0.1, duplicate=0.1, corrupt=0.1, delay=0.1, delay_s=0.02)


# ------------------------------------------------------------------------------------------------------------- the schedule


def test_a_seed_gives_the_same_faults():
    first, again = (schedule(seed=5, every=(5.0, 15.0), for_s=600.0, targets=TARGETS) for _ in range(2))
    assert first == again
    assert first != schedule(seed=6, every=(5.0, 15.0), for_s=600.0, targets=TARGETS)


def test_faults_keep_the_requested_interval_and_reach_every_target():
    faults = schedule(seed=1, every=(5.0, 15.0), for_s=4000.0, kinds=KINDS, targets=TARGETS, phases=("", "push"))
    assert [fault.number for fault in faults] == list(range(len(faults)))
    gaps = np.diff([0.0, *(fault.at for fault in faults)])
    assert gaps.min() + 1e-3 >= 5.0
    assert gaps.max() <= 15.001
    assert faults[-1].at < 4000.0 <= faults[-1].at + 15.001
    assert {fault.target for fault in faults} == set(TARGETS)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.phase for fault in faults} == {"", "push"}
    assert all(1.0 <= fault.stop_s <= 20.0 and 0.0 <= fault.draw < 1.0 for fault in faults)


def test_weights_set_how_often_a_target_is_chosen():
    faults = schedule(
        seed=1,
        every=(1.0, 1.0),
        for_s=1000.0,
        targets=("master", "etcd", "launcher"),
        weights={"etcd": 8.0, "launcher": 0.0},
    )
    met = Counter(fault.target for fault in faults)
    assert met["launcher"] == 0
    assert met["etcd"] > 4 * met["master"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": (9.0, 3.0)}, "every is 9-3"),
        ({"every": (0.0, 3.0)}, "every is 0-3"),
        (
            {"targets": ["rolout_worker"]},
            r"'rolout_worker' is not a target; did you mean 'rollout_worker'\? use one of master",
        ),
        ({"targets": ["rollout_worker/x"]}, "'rollout_worker/x' is not a target"),
        ({"targets": []}, "targets is empty"),
        ({"kinds": ["murder"]}, "'murder' is unknown; use kill, stop, restart"),
        ({"weights": {"master": -1.0}}, "none may be negative"),
    ],
)
def test_an_invalid_schedule_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        schedule(**{"seed": 1, "every": (1.0, 2.0), "for_s": 10.0, "targets": ["master"], **options})


def test_one_worker_can_be_the_target():
    check_target("rollout_worker/1")


# -------------------------------------------------------------------------------------------------------------- the messages


class Recorded(Transport):
    """Keeps the messages that are sent."""

    def __init__(self):
        self.sent = []

    def bind_pull(self, host, *, queue_messages, max_frame_bytes):
        raise NotImplementedError

    def connect_push(self, address, *, queue_messages):
        recorded = self

        class Push(PushSocket):
            def send_nowait(self, frames):
                recorded.sent.append([bytes(frame) for frame in frames])
                return True

            def close(self):
                pass

        return Push()


def sent_with(who="a", count=300, **faults):
    transport = Recorded()
    push = FaultyTransport(transport, FaultsConfig(seed=1, **faults), who).connect_push("x", queue_messages=1)
    for number in range(count):
        assert push.send_nowait([b"head %d" % number, bytes(50)])
    return transport.sent


def test_without_faults_the_transport_is_zeromq():
    assert type(transport_of(FaultsConfig(), "x")) is ZmqTransport
    assert isinstance(transport_of(FaultsConfig(drop=0.01), "x"), FaultyTransport)
    assert sent_with() == [[b"head %d" % number, bytes(50)] for number in range(300)]


def test_each_fault_has_its_effect():
    assert 200 < len(sent_with(drop=0.2)) < 280
    twice = sent_with(duplicate=0.2)
    assert 320 < len(twice) < 400
    assert set(Counter(frames[0] for frames in twice).values()) == {1, 2}
    plain = sent_with()
    damaged = [(after, before) for after, before in zip(sent_with(corrupt=0.2), plain, strict=True) if after != before]
    assert 30 < len(damaged) < 100
    for after, before in damaged:
        differing = [a != b for x, y in zip(after, before, strict=True) for a, b in zip(x, y, strict=True)]
        assert sum(differing) == 1
    assert {after[1] != before[1] for after, before in damaged} == {False, True}  # in the envelope or in a tensor


def test_each_channel_has_its_own_faults_and_repeats_them_at_each_start():
    assert sent_with("a", drop=0.2) == sent_with("a", drop=0.2)
    assert sent_with("a", drop=0.2) != sent_with("b", drop=0.2)


async def test_a_delayed_message_arrives_later_but_not_after_close():
    transport = Recorded()
    push = FaultyTransport(transport, FaultsConfig(delay=1.0, delay_s=0.01), "a").connect_push("x", queue_messages=1)
    frame = bytearray(b"as sent")
    assert push.send_nowait([frame])
    frame[:2] = b"AS"  # the sender may reuse its memory once the message is settled
    assert transport.sent == []
    await asyncio.sleep(0.05)
    assert transport.sent == [[b"as sent"]]
    push.send_nowait([b"never"])
    push.close()
    await asyncio.sleep(0.05)
    assert transport.sent == [[b"as sent"]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ordered", [False, True])
async def test_a_channel_delivers_everything_once_and_unchanged(seed, ordered):
    """This includes tensors: a changed byte in a frame is detected, and the message is sent again."""
    memory = MemoryTransport()
    faults = FaultsConfig(seed=seed, drop=0.1, duplicate=0.1, corrupt=0.2, delay=0.1, delay_s=0.02)
    drawn = random.Random(seed)
    bodies = [[drawn.randbytes(drawn.choice((0, 10, 40_000))) for _ in range(3)] for _ in range(80)]
    async with contextlib.AsyncExitStack() as stack:
        receiver = ChannelReceiver("r", runtime=LIMITS, ordered=ordered, transport=FaultyTransport(memory, faults, "r"))
        endpoint = await receiver.start()
        stack.push_async_callback(receiver.close)
        sender = ChannelSender(
            "s", "r", "1", runtime=LIMITS, on_restart="fail", transport=FaultyTransport(memory, faults, "s")
        )
        await sender.start()
        stack.push_async_callback(sender.close)
        sender.connect(endpoint)
        seen = {}

        async def take():
            while True:
                delivery = await receiver.receive()
                assert delivery.header not in seen
                seen[delivery.header] = [bytes(frame) for frame in delivery.frames]
                delivery.ack(delivery.header)

        taking = asyncio.create_task(take())
        verdicts = await asyncio.gather(
            *(sender.send(b"%d" % n, body, timeout_s=60, what=str(n)) for n, body in enumerate(bodies))
        )
        taking.cancel()
        await asyncio.wait({taking})
    assert verdicts == [b"%d" % n for n in range(len(bodies))]
    assert seen == {b"%d" % n: body for n, body in enumerate(bodies)}
    assert not ordered or list(seen) == verdicts
    assert receiver.num_damaged > 0
    assert sender.num_resent > 0


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (FaultsConfig(drop=0.9), r"runtime\.faults\.drop=0\.9: must be a share of all messages from 0 to 0\.5"),
        (FaultsConfig(corrupt=-0.1), r"runtime\.faults\.corrupt=-0\.1"),
        (FaultsConfig(delay_s=-1.0), r"runtime\.faults\.delay_s=-1\.0: must not be negative"),
    ],
)
def test_invalid_faults_are_refused(faults, says):
    with pytest.raises(ConfigError, match=says):
        validate(ExperimentConfig(runtime=RuntimeConfig(faults=faults)))


# ------------------------------------------------------------------------------------------------------------------ HTTP


async def calls(faults, count, request):
    """Make `count` single calls to a real server. Return the calls that it saw, and their outcomes at the client."""
    request.addfinalizer(lambda: http_client.inject_faults(FaultsConfig(), "rollout_worker/0"))
    http_client.inject_faults(faults, "rollout_worker/0")
    seen = Counter()

    async def answer(request):
        seen[await request.text()] += 1
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/", answer)
    server = TestServer(app)
    await server.start_server()
    became = []
    async with server, http_client.open_session(max_connections=4) as session:
        for number in range(count):
            try:
                async with session.post(server.make_url("/"), data=str(number)) as reply:
                    became.append(await reply.text())
            except aiohttp.ServerDisconnectedError as error:
                became.append(str(error))
    return seen, Counter(became), became


async def test_calls_and_answers_are_lost_but_none_is_duplicated(request):
    seen, became, order = await calls(FaultsConfig(seed=1, drop=0.5, delay=0.2, delay_s=0.01), 200, request)
    call, answer = "runtime.faults.drop: the call is lost", "runtime.faults.drop: the answer is lost"
    assert became.keys() == {"ok", call, answer}
    assert min(became.values()) > 20
    assert set(seen.values()) == {1}
    assert len(seen) == became["ok"] + became[answer]
    _, _, again = await calls(FaultsConfig(seed=1, drop=0.5, delay=0.2, delay_s=0.01), 200, request)
    assert again == order
    _, _, other = await calls(FaultsConfig(seed=2, drop=0.5, delay=0.2, delay_s=0.01), 200, request)
    assert other != order


async def test_faults_of_channels_do_not_change_calls(request):
    _, became, _ = await calls(FaultsConfig(corrupt=0.5, duplicate=0.5), 20, request)  # these apply to channels only
    assert became == {"ok": 20}
