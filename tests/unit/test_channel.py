"""Channels over the in-memory transport: loss, duplication, reordering and corruption; credit; restarts; refusals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import zlib
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import RuntimeConfig
from asyncrl.runtime import channel_protocol
from asyncrl.runtime.channel import ChannelReceiver, ChannelSender
from asyncrl.runtime.channel_protocol import (
    MAX_SENDS,
    WINDOW_SPAN,
    ChannelClosed,
    ChannelError,
    ChannelFull,
    ChannelRefused,
    InOrder,
    PeerLedger,
    ReceiverRestarted,
    SendWindow,
    Verdict,
    pack,
    unpack,
)
from asyncrl.runtime.transport import ZmqTransport
from tests.support.memory_transport import Faults, MemoryTransport

LIMITS = RuntimeConfig(
    push_credit_items=8, push_credit_bytes=100_000, resend_after_s=0.01, max_message_bytes=50_000, start_timeout_s=60.0
)
PATIENT = dataclasses.replace(LIMITS, resend_after_s=100.0)  # for tests without resends


def window(items=4, nbytes=100):
    return SendWindow(credit_items=items, credit_bytes=nbytes, resend_after_s=1.0)


class TestSendWindow:
    def test_credit_in_items_and_bytes(self):
        state = window(items=3)
        state.admit("a", 60, 0.0)
        assert not state.can_admit(41)
        assert state.can_admit(40)
        assert state.can_admit(20, 2)
        assert not state.can_admit(20, 3)
        state.admit("b", 10, 0.0)
        state.admit("c", 10, 0.0)
        assert not state.can_admit(0)
        assert state.settle(1, 0.0) == "b"
        assert state.can_admit(30)
        assert state.settle(1, 0.0) is None

    def test_a_message_larger_than_all_credit_is_sent_alone(self):
        state = window()
        assert state.can_admit(1000)
        state.admit("large", 1000, 0.0)
        assert not state.can_admit(0)

    def test_low_is_the_oldest_unsettled(self):
        state = window()
        assert state.low == 0
        for item in "abc":
            state.admit(item, 1, 0.0)
        state.settle(1, 0.0)
        assert state.low == 0
        state.settle(0, 0.0)
        assert state.low == 2
        state.settle(2, 0.0)
        assert state.low == 3

    def test_one_unsettled_message_eventually_stops_the_window(self):
        state = window()
        state.admit("stuck", 1, 0.0)
        for seq in range(1, WINDOW_SPAN):
            assert state.can_admit(1)
            state.admit("quick", 1, 0.0)
            state.settle(seq, 0.0)
        assert not state.can_admit(1)
        state.settle(0, 0.0)
        assert state.can_admit(1)

    def test_resend_queries_cover_only_old_messages_and_back_off(self):
        state = window()
        state.answered = True
        state.admit("a", 1, 0.0)
        state.admit("b", 1, 0.5)
        assert state.resend_query(0.9) is None
        assert state.resend_query(1.0) == [0]
        times = [now / 10 for now in range(11, 500) if state.resend_query(now / 10) is not None]
        assert times == pytest.approx([3.0, 7.0, 15.0, 23.0, 31.0, 39.0, 47.0])

    def test_a_verdict_ends_the_back_off(self):
        state = window()
        state.answered = True
        for item in "ab":
            state.admit(item, 1, 0.0)
        for now in (1.0, 3.0, 7.0):
            assert state.resend_query(now) == [0, 1]
        state.settle(0, 7.1)
        assert state.resend_query(8.0) is None
        assert state.resend_query(8.1) == [1]

    def test_a_silent_receiver_is_queried_though_nothing_is_pending(self):
        state = window()
        state.new_receiver(0.0)
        assert state.resend_query(0.5) is None
        assert state.resend_query(1.0) == []
        state.answered = True
        assert state.resend_query(50.0) is None
        state.new_receiver(60.0)
        assert state.resend_query(61.0) == []  # the new receiver has sent nothing yet

    def test_a_message_that_never_arrives_is_given_up(self):
        state = window()
        state.admit("a", 1, 0.0)
        for _ in range(MAX_SENDS - 1):
            again, lost = state.missing([0, 5], 0.0)
            assert ([out.item for out in again], lost) == (["a"], [])
        assert state.missing([0], 0.0) == ([], ["a"])
        assert state.num_pending == 0
        assert state.pending_bytes == 0

    def test_a_new_receiver_gets_all_unsettled_messages_in_order(self):
        state = window()
        for item in "abc":
            state.admit(item, 1, 0.0)
        state.settle(1, 0.0)
        assert [out.item for out in state.new_receiver(0.0)] == ["a", "c"]

    def test_each_receiver_has_its_own_limit_of_resends(self):
        state = window()
        state.admit("a", 1, 0.0)
        for _ in range(2):
            for _ in range(MAX_SENDS - 1):
                assert state.missing([0], 0.0)[1] == []
            state.new_receiver(0.0)
        assert state.num_pending == 1


class TestPeerLedger:
    def test_every_kind_of_arrival(self):
        ledger = PeerLedger(5)
        assert ledger.arrive(5, 5) == "new"
        assert ledger.arrive(5, 5) == "held"
        assert ledger.settle(5, Verdict(False, b"v"))
        assert ledger.arrive(5, 5) == Verdict(False, b"v")
        assert ledger.arrive(7, 6) == "new"
        assert ledger.arrive(5, 5) == "past"
        assert ledger.arrive(6 + WINDOW_SPAN, 6) == "beyond"
        assert not ledger.settle(5, Verdict(False, b""))

    def test_a_message_is_settled_once(self):
        ledger = PeerLedger(0)
        ledger.arrive(0, 0)
        assert ledger.settle(0, Verdict(True, b""))
        with pytest.raises(ValueError, match="message 0 is already settled"):
            ledger.settle(0, Verdict(False, b""))

    def test_answers_a_resend_query(self):
        ledger = PeerLedger(0)
        ledger.arrive(0, 0)
        ledger.arrive(1, 0)
        ledger.settle(1, Verdict(True, b"no"))
        assert ledger.asked([0, 1, 2], 0) == ([(1, Verdict(True, b"no"))], [2])
        assert ledger.num_held == 1
        assert ledger.asked([0, 1, 2], 1) == ([(1, Verdict(True, b"no"))], [2])  # the sender has given up 0
        assert ledger.num_held == 0

    def test_only_unsettled_messages_are_held(self):
        ledger = PeerLedger(0)
        ledger.arrive(0, 0)
        ledger.arrive(1, 0)
        ledger.settle(0, Verdict(False, b""))
        assert ledger.num_held == 1
        assert ledger.arrive(2, 1) == "new"
        assert (len(ledger), ledger.num_held) == (2, 2)

    def test_a_jump_of_low_is_cheap_and_forgets_everything(self):
        ledger = PeerLedger(0)
        for seq in range(100):
            ledger.arrive(seq, 0)
        assert ledger.arrive(1 << 60, 1 << 60) == "new"
        assert (len(ledger), ledger.num_held) == (1, 1)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.booleans()), max_size=200))
    def test_delivers_once_and_remembers_only_the_window(self, events):
        ledger, delivered, highest_low = PeerLedger(0), set(), 0
        for seq, lag, settle in events:
            low = max(0, seq - lag)
            highest_low = max(highest_low, low)
            if ledger.arrive(seq, low) == "new":
                assert seq not in delivered
                delivered.add(seq)
                if settle:
                    ledger.settle(seq, Verdict(False, b""))
            assert len(ledger) <= 31 - highest_low


class TestInOrder:
    @settings(max_examples=50, deadline=None)
    @given(st.permutations(range(12)))
    def test_any_order_comes_out_sorted(self, arrivals):
        order, out = InOrder(0), []
        for seq in arrivals:
            out += order.arrive(seq, 0, seq)
        assert out == list(range(12))

    def test_skips_messages_that_the_sender_gave_up(self):
        order = InOrder(0)
        assert order.arrive(2, 0, "two") == []
        assert order.arrive(5, 0, "five") == []
        assert order.arrive(4, 4, "four") == ["four", "five"]
        assert order.arrive(3, 0, "late") == []
        assert len(order) == 0

    def test_a_resend_query_also_reports_messages_that_were_given_up(self):
        order = InOrder(0)
        assert order.arrive(1, 0, "one") == []
        assert order.advance(1) == ["one"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_schedule_settles_every_message_and_delivers_it_once(seed):
    """Runs the state of both sides over an unreliable network, with receivers that restart, on a simulated clock."""
    random = Random(seed)
    sender: SendWindow[int] = SendWindow(credit_items=5, credit_bytes=1000, resend_after_s=1.0)
    receiver, incarnation, now = PeerLedger(0), 0, 0.0
    net: list[tuple[str, int, object]] = []  # kind, receiver's incarnation, content
    delivered: set[tuple[int, int]] = set()
    held: list[int] = []
    settled: list[int] = []
    wanted, admitted = 25, 0
    for step in range(4000):
        faulty = step < 400
        now += random.random()
        if len(settled) < wanted and sender.can_admit(10) and admitted < wanted:
            out = sender.admit(admitted, 10, now)
            admitted += 1
            net.append(("data", incarnation, (out.seq, sender.low)))
        if (seqs := sender.resend_query(now)) is not None:
            net.append(("query", incarnation, (seqs, sender.low)))
        if held and random.random() < 0.5:
            seq = held.pop(random.randrange(len(held)))
            if receiver.settle(seq, Verdict(False, b"")):
                net.append(("report", incarnation, ([seq], [])))
        if faulty and random.random() < 0.01:
            incarnation, receiver, held = incarnation + 1, PeerLedger(sender.low), []
            net += [("data", incarnation, (out.seq, sender.low)) for out in sender.new_receiver(now)]
        if net and random.random() < 0.8:
            index = random.randrange(len(net)) if faulty else 0
            kind, target, content = net[index]
            if not (faulty and random.random() < 0.2):  # otherwise it is duplicated
                del net[index]
            if (
                faulty and random.random() < 0.2
            ) or target != incarnation:  # lost, or addressed to an earlier incarnation
                continue
            if kind == "report":
                settled += [seq for seq in content[0] if sender.settle(seq, now) is not None]
                sender.answered = True
                again, lost = sender.missing(content[1], now)
                assert not lost
                net += [("data", incarnation, (out.seq, sender.low)) for out in again]
            elif kind == "query":
                verdicts, missing = receiver.asked(*content)
                net.append(("report", incarnation, ([seq for seq, _ in verdicts], missing)))
            else:
                seq, low = content
                arrival = receiver.arrive(seq, low)
                if arrival == "new":
                    assert (incarnation, seq) not in delivered
                    delivered.add((incarnation, seq))
                    held.append(seq)
                elif isinstance(arrival, Verdict):
                    net.append(("report", incarnation, ([seq], [])))
        assert sender.num_pending <= 5
        assert len(receiver) <= wanted
        if len(settled) == wanted:
            break
    assert sorted(settled) == list(range(wanted))
    assert {seq for _, seq in delivered} == set(range(wanted))


# ------------------------------------------------------------------------------------------------------ the asyncio shell


class Tampering(MemoryTransport):
    """Passes each message through `tamper` on its way."""

    def __init__(self, tamper):
        super().__init__()
        self.tamper = tamper

    def connect_push(self, address, *, queue_messages):
        push = super().connect_push(address, queue_messages=queue_messages)
        send = push.send_nowait
        push.send_nowait = lambda frames: send(self.tamper(frames))
        return push


class Net:
    """Senders and receivers over one in-memory transport."""

    def __init__(self):
        self.transport = MemoryTransport()
        self.stack = contextlib.AsyncExitStack()

    async def receiver(self, limits=LIMITS, **options):
        receiver = ChannelReceiver("receiver", runtime=limits, transport=self.transport, **options)
        endpoint = await receiver.start()
        self.stack.push_async_callback(receiver.close)
        return receiver, endpoint

    async def sender(self, endpoint=None, limits=LIMITS, name="sender", **options):
        sender = ChannelSender(name, "receiver", "1", runtime=limits, transport=self.transport, **options)
        await sender.start()
        self.stack.push_async_callback(sender.close)
        if endpoint is not None:
            sender.connect(endpoint)
        return sender


@pytest.fixture
async def net():
    net = Net()
    async with net.stack:
        yield net
    assert {
        task for task in asyncio.all_tasks() if "reader" in task.get_name() or "verdicts" in task.get_name()
    } == set()


async def settle_all(receiver, seen, *, hold=0):
    """Acknowledge all messages, but keep the oldest `hold` unacknowledged. With hold=0 the verdict repeats the header."""
    held = []
    while True:
        delivery = await receiver.receive()
        seen.append((delivery.sender, bytes(delivery.header)))
        held.append(delivery)
        if len(held) > hold:
            held.pop().ack(b"ok:" + delivery.header if not hold else b"ok")


async def running(coroutine):
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


async def stop(task):
    task.cancel()
    await asyncio.wait({task})


async def turns(num=20):
    """Run some event-loop turns, so that everything that can proceed does."""
    for _ in range(num):
        await asyncio.sleep(0)


async def test_header_frames_and_verdict(net):
    receiver, endpoint = await net.receiver()
    sender = await net.sender(endpoint)
    sending = await running(sender.send(b"head", [b"one", memoryview(b"two"), b""], timeout_s=60, what="it"))
    delivery = await receiver.receive()
    assert (delivery.header, [bytes(frame) for frame in delivery.frames]) == (b"head", [b"one", b"two", b""])
    assert (delivery.sender, delivery.seq) == ("sender", 0)
    delivery.ack(b"fine")
    assert await sending == b"fine"
    assert sender.num_pending == 0
    with pytest.raises(RuntimeError, match="already settled"):
        delivery.ack()


@pytest.mark.parametrize("seed", range(6))
async def test_no_message_is_lost_or_repeated_under_faults(net, seed):
    net.transport.random.seed(seed)
    receiver, endpoint = await net.receiver()
    senders = [await net.sender(endpoint, name=f"s{i}") for i in range(3)]
    net.transport.faults = Faults(lose=0.15, double=0.15, delay=0.15, corrupt=0.1)
    seen = []
    consumer = await running(settle_all(receiver, seen))
    work = [(sender, b"%d" % i) for i in range(60) for sender in senders]
    verdicts = await asyncio.gather(
        *(sender.send(body, [b"x" * 10], timeout_s=60, what=body.decode()) for sender, body in work)
    )
    await stop(consumer)
    assert verdicts == [b"ok:" + body for _, body in work]
    assert sorted(seen) == sorted((sender.name, body) for sender, body in work)
    assert sum(sender.num_resent for sender in senders) > 0
    assert receiver.num_malformed > 0
    assert receiver.num_remembered <= 3 * LIMITS.push_credit_items * 4


@pytest.mark.parametrize("seed", range(3))
async def test_an_ordered_channel_keeps_the_order_under_faults(net, seed):
    net.transport.random.seed(seed)
    receiver, endpoint = await net.receiver(ordered=True)
    sender = await net.sender(endpoint, on_restart="fail")
    net.transport.faults = Faults(lose=0.15, double=0.15, delay=0.2, corrupt=0.1)
    seen = []
    consumer = await running(settle_all(receiver, seen))
    bodies = [b"%d" % i for i in range(100)]
    await asyncio.gather(*(sender.send(body, timeout_s=60, what=body.decode()) for body in bodies))
    await stop(consumer)
    assert [body for _, body in seen] == bodies


async def test_without_faults_nothing_is_sent_twice(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    await sender.wait_answered()
    before = net.transport.num_sent
    seen = []
    consumer = await running(settle_all(receiver, seen))
    await asyncio.gather(*(sender.send(b"%d" % i, timeout_s=60, what="it") for i in range(100)))
    await stop(consumer)
    assert sender.num_resent == 0
    assert 100 < net.transport.num_sent - before <= 200  # 100 messages; verdicts may share a message


async def test_a_held_message_is_queried_but_not_sent_again(net):
    messages, enough = [], asyncio.Event()

    def count(frames):
        messages.append(frames)
        if len(messages) == 8:  # a query and its answer, the message, two queries and their answers, a query
            enough.set()
        return frames

    net.transport = Tampering(count)
    receiver, endpoint = await net.receiver()
    sender = await net.sender(endpoint)
    sending = await running(sender.send(b"slow", [b"frame"], timeout_s=60, what="it"))
    delivery = await receiver.receive()
    await asyncio.wait_for(enough.wait(), 60)
    assert sum(len(frames) > 1 for frames in messages) == 1
    assert sender.num_resent == 0
    assert receiver.num_queued == 0
    delivery.ack(b"done")
    assert await sending == b"done"


async def test_credit_runs_out_when_nothing_is_received(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    sends = [asyncio.create_task(sender.send(b"%d" % i, [b"x" * 100], timeout_s=60, what="it")) for i in range(30)]
    await turns()
    assert receiver.num_queued == PATIENT.push_credit_items
    assert sender.num_pending == 30
    assert sender.pending_bytes <= PATIENT.push_credit_items * 102
    with pytest.raises(ChannelFull, match="which use up the credit"):
        sender.send_nowait(b"more")
    seen = []
    consumer = await running(settle_all(receiver, seen))
    await asyncio.gather(*sends)
    await stop(consumer)
    assert [body for _, body in seen] == [b"%d" % i for i in range(30)]  # the send that waited first goes first


async def test_credit_in_bytes(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    sends = [asyncio.create_task(sender.send(b"", [b"x" * 40_000], timeout_s=60, what="it")) for _ in range(5)]
    await turns()
    assert receiver.num_queued == 2
    assert sender.pending_bytes == 80_000
    seen = []
    consumer = await running(settle_all(receiver, seen))
    await asyncio.gather(*sends)
    await stop(consumer)
    assert len(seen) == 5


async def test_the_receiver_stops_reading_when_its_queue_is_full(net):
    receiver, endpoint = await net.receiver(PATIENT)
    senders = [await net.sender(endpoint, PATIENT, name=f"s{i}") for i in range(4)]
    sends = [
        asyncio.create_task(sender.send(b"%d" % i, timeout_s=60, what="it"))
        for i in range(PATIENT.push_credit_items)
        for sender in senders
    ]
    await turns()
    assert receiver.num_queued == PATIENT.push_credit_items
    seen = []
    consumer = await running(settle_all(receiver, seen))
    await asyncio.gather(*sends)
    await stop(consumer)
    assert len(seen) == 4 * PATIENT.push_credit_items


async def test_a_timed_out_send_gives_the_reason_and_leaves_no_backlog(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    held = [asyncio.create_task(sender.send(b"a", timeout_s=60, what="it")) for _ in range(PATIENT.push_credit_items)]
    await turns()
    with pytest.raises(TimeoutError, match=r"waited 0.01 s for receiver to settle ticket 7; still without credit: 8"):
        await sender.send(b"b", timeout_s=0.01, what="ticket 7")
    assert sender.num_pending == PATIENT.push_credit_items
    consumer = await running(settle_all(receiver, seen := []))
    await asyncio.gather(*held)
    await stop(consumer)
    assert {body for _, body in seen} == {b"a"}

    nobody = await net.sender()
    with pytest.raises(TimeoutError, match="no receiver is published there"):
        await nobody.send(b"c", timeout_s=0.01, what="it")


async def test_a_timed_out_message_keeps_its_credit_until_it_is_settled(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    with pytest.raises(TimeoutError):
        await sender.send(b"late", timeout_s=0.01, what="it")
    assert sender.num_pending == 1
    (await receiver.receive()).ack()
    await turns()
    assert sender.num_pending == 0


async def test_a_cancelled_receive_changes_nothing(net):
    receiver, endpoint = await net.receiver()
    sender = await net.sender(endpoint)
    for _ in range(5):
        await stop(await running(receiver.receive()))
    consumer = await running(settle_all(receiver, seen := []))
    await sender.send(b"x", timeout_s=60, what="it")
    await stop(consumer)
    assert seen == [("sender", b"x")]


async def test_a_restarted_receiver_gets_messages_that_the_old_one_had_not_settled(net):
    old, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    sends = [asyncio.create_task(sender.send(b"%d" % i, timeout_s=60, what="it")) for i in range(12)]
    deliveries = [await old.receive() for _ in range(8)]
    for i in (1, 2, 5):
        deliveries[i].ack(b"old")
    await turns()
    new, endpoint = await net.receiver(PATIENT)
    sender.connect(endpoint)
    deliveries[0].ack(b"too late")  # ignored: it comes from an earlier incarnation
    await turns()
    assert not sends[0].done()
    await old.close()
    seen = []
    consumer = await running(settle_all(new, seen))
    verdicts = await asyncio.gather(*sends)
    await stop(consumer)
    assert [body for _, body in seen] == [b"%d" % i for i in range(12) if i not in (1, 2, 5)]
    assert [verdict == b"old" for verdict in verdicts] == [i in (1, 2, 5) for i in range(12)]


async def test_messages_for_an_earlier_holder_of_the_address_are_not_delivered(net):
    receiver, endpoint = await net.receiver()
    stale = type(endpoint)(endpoint.address, "receiver.before", endpoint.max_message_bytes)
    sender = await net.sender(stale)
    sending = await running(sender.send(b"x", timeout_s=60, what="it"))
    await turns()
    assert receiver.num_queued == 0
    sender.connect(endpoint)
    (await receiver.receive()).ack()
    await sending


async def test_messages_of_a_restarted_sender_are_delivered(net):
    receiver, endpoint = await net.receiver()
    consumer = await running(settle_all(receiver, seen := []))
    for start in range(3):
        sender = await net.sender(endpoint)
        for i in range(3):
            await sender.send(b"%d.%d" % (start, i), timeout_s=60, what="it")
        await sender.close()
    await stop(consumer)
    assert [body for _, body in seen] == [b"%d.%d" % (start, i) for start in range(3) for i in range(3)]


async def test_on_restart_fail_fails_pending_messages(net):
    old, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT, on_restart="fail")
    lost = sender.send_nowait(b"lost")
    await old.receive()
    new, endpoint = await net.receiver(PATIENT, ordered=True)
    await sender.wait_answered()
    sender.connect(endpoint)
    with pytest.raises(ReceiverRestarted, match="receiver was restarted"):
        await lost
    later = sender.send_nowait(b"later")
    delivery = await new.receive()
    assert (delivery.header, delivery.seq) == (b"later", 1)
    delivery.ack()
    await later


async def test_replacing_a_receiver_that_never_answered_is_not_a_restart(net):
    _, endpoint = await net.receiver()
    stale = type(endpoint)("mem://h:99", "receiver.before", endpoint.max_message_bytes)
    sender = await net.sender(stale, on_restart="fail")
    call = sender.send_nowait(b"call")
    receiver, endpoint = await net.receiver(ordered=True)
    sender.connect(endpoint)
    (await receiver.receive()).ack(b"yes")
    assert await call == b"yes"


async def test_refusals_reach_the_sender(net):
    receiver, endpoint = await net.receiver()
    sender = await net.sender(endpoint)
    sending = await running(sender.send(b"bad", timeout_s=60, what="it"))
    (await receiver.receive()).refuse("not to my taste")
    with pytest.raises(ChannelRefused, match="not to my taste"):
        await sending


async def test_an_oversized_message_is_refused_before_it_is_sent(net):
    _, endpoint = await net.receiver()
    sender = await net.sender(endpoint)
    with pytest.raises(ChannelRefused, match=r"50003 bytes to receiver: runtime.max_message_bytes is 50000"):
        await sender.send(b"123", [b"x" * 50_000], timeout_s=60, what="it")
    _, small = await net.receiver(dataclasses.replace(LIMITS, max_message_bytes=100))
    sender.connect(small)
    with pytest.raises(ChannelRefused, match="is 100"):
        await sender.send(b"", [b"x" * 101], timeout_s=60, what="it")
    assert sender.num_pending == 0


async def test_an_oversized_message_is_also_refused_by_the_receiver(net):
    receiver, endpoint = await net.receiver(dataclasses.replace(LIMITS, max_message_bytes=100))
    sender = await net.sender(type(endpoint)(endpoint.address, endpoint.incarnation, 1 << 40))
    with pytest.raises(ChannelRefused, match="101 bytes"):
        await sender.send(b"", [b"x" * 101], timeout_s=60, what="it")
    assert receiver.num_queued == 0


@pytest.mark.parametrize(
    "tamper",
    [
        lambda frames: [frames[0], frames[1][:-1]] if len(frames) > 1 else frames,
        lambda frames: [*frames, b"extra"] if len(frames) > 1 else frames,
    ],
    ids=["truncated", "one frame too many"],
)
async def test_malformed_frames_are_refused_with_a_reason(net, tamper):
    net.transport = Tampering(tamper)
    receiver, endpoint = await net.receiver(ordered=True)
    sender = await net.sender(endpoint, on_restart="fail")
    with pytest.raises(ChannelRefused, match="malformed: received frames of"):
        await sender.send(b"x", [b"frame"], timeout_s=60, what="it")
    # this message has only one frame, which `tamper` leaves alone
    sending = await running(sender.send(b"good", timeout_s=60, what="it"))
    (await receiver.receive()).ack()
    await sending


async def test_a_message_that_never_arrives_is_not_sent_for_ever(net):
    net.transport = Tampering(lambda frames: [b"\0" * 40, *frames[1:]] if len(frames) > 1 else frames)
    receiver, endpoint = await net.receiver(dataclasses.replace(LIMITS, resend_after_s=0.001))
    sender = await net.sender(endpoint, dataclasses.replace(LIMITS, resend_after_s=0.001))
    with pytest.raises(ChannelRefused, match="did not receive the message despite repeated sends"):
        await sender.send(b"x", [b"frame"], timeout_s=60, what="it")
    assert receiver.num_malformed == MAX_SENDS
    assert sender.num_pending == 0


# A message with deeply nested lists behind its fields
NESTED = b"\x9f\xa4data\xa0\xa0\xa0\xa0\x00\x00\x90\xc4\x00\x00" + b"\x91" * 5_000


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\0",
        b"junk" * 10,
        zlib.crc32(b"\x93\xa4data").to_bytes(4, "little") + b"\x93\xa4data",
        zlib.crc32(b"\xc1").to_bytes(4, "little") + b"\xc1",
        zlib.crc32(NESTED).to_bytes(4, "little") + NESTED,
    ],
)
async def test_junk_on_the_socket_is_counted_and_ignored(net, junk):
    receiver, endpoint = await net.receiver()
    sender = await net.sender(endpoint)
    for address in list(net.transport.pulls):
        net.transport.connect_push(address, queue_messages=10).send_nowait([junk])
    sending = await running(sender.send(b"x", timeout_s=60, what="it"))
    (await receiver.receive()).ack()
    await sending
    assert receiver.num_malformed == 1


async def test_dedupe_memory_is_bounded(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    consumer = await running(settle_all(receiver, []))
    for i in range(1000):
        await sender.send(b"%d" % i, timeout_s=60, what="it")
    assert receiver.num_remembered <= 1
    await stop(consumer)


async def test_senders_that_were_silent_for_long_are_forgotten(net, monkeypatch):
    monkeypatch.setattr("asyncrl.runtime.channel.MAX_PEERS", 4)
    receiver, endpoint = await net.receiver(PATIENT)
    for i in range(12):
        sender = await net.sender(endpoint, PATIENT, name=f"s{i}")
        sending = await running(sender.send(b"x", timeout_s=60, what="it"))
        (await receiver.receive()).ack()
        await sending
    assert receiver.num_remembered <= 4


async def test_close_fails_pending_and_later_calls(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    sends = [asyncio.create_task(sender.send(b"x", timeout_s=60, what="it")) for _ in range(20)]
    await turns()
    receiving = [await running(receiver.receive()) for _ in range(12)]
    await sender.close()
    await sender.close()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert all(isinstance(result, ChannelClosed) for result in results)
    with pytest.raises(ChannelClosed):
        await sender.send(b"x", timeout_s=60, what="it")
    await receiver.close()
    results = await asyncio.gather(*receiving, return_exceptions=True)
    assert sum(isinstance(result, ChannelClosed) for result in results) == 4
    with pytest.raises(ChannelClosed):
        await receiver.receive()
    results[0].ack()  # no sender receives it, and this is not an error


async def test_a_socket_that_breaks_fails_the_sends_and_receives(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    for pull in list(net.transport.pulls.values()):
        pull.fail(OSError("the socket is broken"))
    with pytest.raises(ChannelError, match="cannot read the verdicts of receiver: OSError"):
        await sender.send(b"x", timeout_s=60, what="it")
    with pytest.raises(OSError, match="the socket is broken"):
        await receiver.receive()


@pytest.mark.parametrize(
    "sizes", [[], [0], [5], [40_000], [3, 0, 7], [3, 40_000, 7, 50_000], [40_000, 50_000], [32_768, 32_769]]
)
def test_packed_frames_are_unpacked_unchanged(sizes):
    frames = [bytes([i]) * size for i, size in enumerate(sizes)]
    travelling = pack(frames, sizes)
    assert len(travelling) <= len(frames)
    assert [bytes(frame) for frame in unpack(travelling, sizes)] == frames
    with pytest.raises(ValueError, match="malformed: received frames of"):
        unpack([*travelling, b"x"], sizes)
    with pytest.raises(ValueError, match="malformed: received frames of"):
        unpack(travelling, [*sizes, 1])


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="malformed: received frames of"):
        unpack([b"12"], [3, -1])


async def test_verdicts_of_one_turn_are_batched_and_the_last_is_sent_at_once(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    await sender.wait_answered()
    sends = [await running(sender.send(b"x", timeout_s=60, what="it")) for _ in range(5)]
    deliveries = [await receiver.receive() for _ in sends]
    before = net.transport.num_sent
    for delivery in deliveries[:-1]:
        delivery.ack()
    assert net.transport.num_sent == before
    deliveries[-1].ack()
    assert net.transport.num_sent == before + 1
    await asyncio.gather(*sends)
    assert net.transport.num_sent == before + 1


async def test_a_verdict_does_not_wait_for_unsettled_messages(net):
    receiver, endpoint = await net.receiver(PATIENT)
    sender = await net.sender(endpoint, PATIENT)
    sends = [await running(sender.send(b"%d" % i, timeout_s=60, what="it")) for i in range(2)]
    first, second = await receiver.receive(), await receiver.receive()
    first.ack(b"one")
    assert await sends[0] == b"one"
    second.ack(b"two")
    assert await sends[1] == b"two"


async def test_a_resumed_socket_delivers_messages_that_arrived_during_the_pause():
    transport = ZmqTransport()
    pull = transport.bind_pull("127.0.0.1", queue_messages=100, max_frame_bytes=1000)
    push = transport.connect_push(pull.address, queue_messages=100)
    seen, came = [], asyncio.Event()

    def deliver(frames):
        seen.append(int(bytes(frames[0])))
        if len(seen) in (30, 60):  # while messages keep arriving
            pull.pause()
        came.set()

    async def until(count):
        while len(seen) < count:
            came.clear()
            await asyncio.wait_for(came.wait(), 60)

    try:
        assert push.send_nowait([b"0"])  # arrives before there is a listener
        pull.listen(deliver, pytest.fail)
        for number in range(1, 60):
            assert push.send_nowait([b"%d" % number])
        await until(30)
        await turns()
        assert len(seen) == 30
        pull.resume()
        await until(60)
        assert push.send_nowait([b"60"])
        pull.resume()
        await until(61)
        assert seen == list(range(61))
    finally:
        pull.close()
        push.close()


def test_a_resend_query_asks_for_no_more_than_the_window():
    assert channel_protocol.MAX_QUERY <= WINDOW_SPAN
