"""Throughput of trajectories from a rollout worker to a head beside raw pyzmq, Ray and TransferQueue, and its cost to the head.

    python benchmarks/push_pull.py [--rounds 5] [--seconds 1] [--cases 4x4096,8x512,1x128] [--peers raw_pyzmq,ray]
    python benchmarks/push_pull.py --curve      the cost of encryption: asyncrl's streams over TCP with CURVE beside `plain`

A case NxL is a group of N sequences of L tokens with all keys of a real trajectory, built before the clock starts. Every side
keeps the same number of groups in flight. A group counts when the sender knows that it is stored. The sides:

    asyncrl               NameResolvingZmqPusher to NameResolvingZmqPuller, one process each: validated, decoded into separate
                          arrays, stored, acknowledged with a verdict
    raw_pyzmq             exactly the frames that asyncrl puts on the wire (the small ones joined before the clock starts), over a
                          blocking PUSH/PULL pair, large ones not copied when sent; the same arrays copied out of them and
                          stored; 8 bytes over a second pair acknowledge a group. No validation, no resending
    ray                   an actor call with the same numpy arrays; the actor copies them (Ray's are read-only views), stores
                          them and returns a verdict
    transfer_queue        TransferQueue 0.1.11 (SimpleStorage): kv_put of one group's tensors, kv_batch_get, a copy of the result
    transfer_queue_batch  the same for 32 groups at once: stacked, kv_batch_put, kv_batch_get, a copy of each group

    plain                 asyncrl over TCP, neither authenticated nor encrypted (network.authenticate=off)

asyncrl uses Unix sockets, as in a run on one machine. With --curve it uses encrypted TCP, as between hosts.

TransferQueue's client alternates puts and gets. Removing groups from it is not counted. Further fields: CPU microseconds per group
of the sending and the receiving process, and the slowdown of a train step (`slow_down`, 1 = none) while the stream runs beside it
in the same process, at the rate of a real run.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import psutil
from common import Child, Parent, alternate, children, finish, missing_peers, network_of, parser, run_part, say, table

CASES = ("4x4096", "8x512", "1x128")
PLAIN = "plain"
PEERS = {
    "raw_pyzmq": "zmq",
    PLAIN: "zmq",
    "ray": "ray",
    "transfer_queue": "transfer_queue",
    "transfer_queue_batch": "transfer_queue",
}
IN_FLIGHT = 32  # groups sent but not yet acknowledged
BATCH = 32  # groups per batch of transfer_queue_batch
STORED = 64  # number of groups that a receiver keeps
POOL = 8  # number of different groups, sent in rotation
START_S, CALL_S = 120.0, 60.0  # limits of waits
# What the quickstart pushes to one head: 64 groups of 8 sequences a train step of 0.7 s, over two heads; and ten times its lengths.
TRAIN_CASES = {"8x17": 45.0, "8x170": 45.0}
TRAIN_STEPS = 20


# --------------------------------------------------------------------------------------------------------------- the groups


def make_sample(case: str, number: int) -> Any:
    """A group in the form that a rollout worker pushes: a quarter of each sequence is prompt; two versions sampled it."""
    from asyncrl.data.sequence import SequenceSample

    sequences, length = map(int, case.split("x"))
    rng = np.random.default_rng(number)
    prompt = max(1, length // 4)
    ids = rng.integers(0, 50_000, sequences * length)
    ids = ids.reshape(sequences, length)
    ids[:, :prompt] = ids[0, :prompt]
    sampled = np.tile(np.arange(length) >= prompt, sequences)
    data = {
        "packed_input_ids": ids.reshape(-1),
        "packed_prompts": ids[0, :prompt].copy(),
        "packed_logprobs": np.where(sampled, -rng.random(len(sampled)), 0).astype(np.float32),
        "prompt_mask": ~sampled,
        "loss_mask": sampled,
        "seq_no_eos_mask": np.zeros(sequences, np.bool_),
        "rewards": rng.random(sequences).astype(np.float32),
        "task_ids": np.zeros(1, np.int64),
        "versions": np.where(sampled, np.int64(7 + number % 2), -1),
        "version_start": np.full(sequences, 7, np.int64),
        "version_end": np.full(sequences, 8, np.int64),
        "birth_time": np.array([1.7e9 + number]),
    }
    runs = {1: [1], prompt: [prompt], sequences: [1] * sequences, len(sampled): [length] * sequences}
    lengths = {key: [runs[len(array)]] for key, array in data.items()}
    lengths["packed_prompts"] = [[prompt]]
    for key in ("seq_no_eos_mask", "rewards", "version_start", "version_end"):
        lengths[key] = [[1] * sequences]
    return SequenceSample((f"t1.{number:06d}",), lengths, data)


def make_meta(sample: Any) -> Any:
    from asyncrl.protocol.trajectories import Locator, TrajectoryMeta

    lengths = sample.seqlens["packed_input_ids"][0]
    return TrajectoryMeta(
        ticket_id=sample.ids[0],
        locator=Locator(0, 1),
        attempt=1,
        head=0,
        keys=list(sample.keys),
        seqlens=lengths,
        response_lengths=lengths,
        rewards=sample.data["rewards"].tolist(),
        version_start=sample.data["version_start"].tolist(),
        version_end=sample.data["version_end"].tolist(),
        birth_time=1.7e9,
    )


# ------------------------------------------------------------------------------------------------------------------ asyncrl


def asyncrl_receiver(parent: Parent, trainer: bool = False, way: str = "unix") -> None:
    """A head: pulls, stores, acknowledges. With `trainer` it also runs train steps on a thread when the parent asks."""
    asyncio.run(_receive(parent, trainer, network_of(way)))


async def _receive(parent: Parent, trainer: bool, keys: dict[str, str]) -> None:
    from asyncrl.config.schema import RuntimeConfig
    from asyncrl.protocol.names import Names
    from asyncrl.protocol.trajectories import StoreVerdict
    from asyncrl.streams.push_pull import NameResolvingZmqPuller, puller_stream
    from tests.support.memory_names import MemoryNameResolver

    resolver, names = MemoryNameResolver("bench"), Names("bench", "push-pull")
    puller = NameResolvingZmqPuller(resolver, names, puller_index=0, runtime=RuntimeConfig())
    await puller.start()
    stored: deque[Any] = deque(maxlen=STORED)
    verdict = StoreVerdict(verdict="stored")

    async def take_in() -> None:
        while True:
            pulled = await puller.pull()
            stored.append(pulled.sample)
            pulled.ack(verdict)

    taking = asyncio.create_task(take_in())
    parent.send(endpoint=resolver.get(names.stream(puller_stream(0))), keys=keys)
    step = await asyncio.to_thread(_train_step) if trainer else None
    while await asyncio.to_thread(parent.receive) is not None:  # the parent bounds this wait by closing the pipe
        assert step is not None
        parent.send(step_s=await asyncio.to_thread(_median_step_s, step))
    taking.cancel()
    await puller.close()


def asyncrl_sender(parent: Parent, trainer: bool = False, way: str = "unix") -> None:
    asyncio.run(_send(parent, way))


async def _send(parent: Parent, way: str) -> None:
    from asyncrl.config.schema import RuntimeConfig
    from asyncrl.protocol.names import Names
    from asyncrl.streams.push_pull import NameResolvingZmqPusher, puller_stream
    from tests.support.memory_names import MemoryNameResolver

    resolver, names = MemoryNameResolver("bench"), Names("bench", "push-pull")
    found = parent.receive() or {}
    network_of(way, found["keys"])
    resolver.add(names.stream(puller_stream(0)), str(found["endpoint"]))
    pusher = NameResolvingZmqPusher(
        resolver, names, pusher_index=0, num_pushers=1, num_pullers=1, runtime=RuntimeConfig(), incarnation="bench"
    )
    await pusher.start()
    while (order := await asyncio.to_thread(parent.receive)) is not None:
        samples = [make_sample(order["case"], number) for number in range(POOL)]
        metas = [make_meta(sample) for sample in samples]
        start = time.perf_counter()
        end = start + order["seconds"]
        count = 0

        async def push(number: int, metas: list[Any] = metas, samples: list[Any] = samples) -> None:
            nonlocal count
            verdict = await pusher.push(metas[number % POOL], samples[number % POOL], head=0, timeout_s=CALL_S)
            assert verdict.verdict == "stored"
            count += 1

        async def keep_pushing(number: int, end: float = end) -> None:
            while time.perf_counter() < end:
                await push(number)

        if order["rate"]:
            pushes = []
            while (now := time.perf_counter()) < end:
                pushes.append(asyncio.create_task(push(int((now - start) * order["rate"]))))
                await asyncio.sleep(1 / order["rate"])
            await asyncio.gather(*pushes)
        else:
            await asyncio.gather(*(keep_pushing(number) for number in range(IN_FLIGHT)))
        parent.send(groups=count, seconds=time.perf_counter() - start)
    await pusher.close()


def _train_step() -> Callable[[], None]:
    """A small transformer's forward, backward and Adam step, about 30 ms on one thread."""
    import torch

    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(8, 64, 128)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    return step


def _median_step_s(step: Callable[[], None]) -> float:
    import torch

    torch.set_num_threads(1)  # the setting is per thread
    seconds = []
    for _ in range(TRAIN_STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# ---------------------------------------------------------------------------------------------------------------- raw pyzmq


def raw_receiver(parent: Parent) -> None:
    import zmq

    from asyncrl.runtime.channel_protocol import unpack

    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    back = push.bind_to_random_port("tcp://127.0.0.1")
    parent.send(port=port, back=back)
    stored: deque[Any] = deque(maxlen=STORED)
    sizes_by_header: dict[bytes, list[int]] = {}
    while True:  # until the benchmark kills it
        first, *frames = pull.recv_multipart(copy=False)
        header = first.bytes
        sizes = sizes_by_header.get(header)
        if sizes is None:
            sizes = sizes_by_header[header] = msgspec.msgpack.decode(header, type=tuple[list[int], bytes, bytes])[0]
        arrays = [np.frombuffer(view, np.uint8).copy() for view in unpack([frame.buffer for frame in frames], sizes)]
        stored.append((header, arrays))
        push.send(b"12345678")


def raw_sender(parent: Parent) -> None:
    import zmq

    from asyncrl.data.sequence import encode_sample
    from asyncrl.runtime.channel_protocol import pack

    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pull.setsockopt(zmq.RCVTIMEO, int(CALL_S * 1000))
    ports = parent.receive() or {}
    push.connect(f"tcp://127.0.0.1:{ports['port']}")
    pull.connect(f"tcp://127.0.0.1:{ports['back']}")
    while (order := parent.receive()) is not None:
        messages = []
        for number in range(POOL):
            sample = make_sample(order["case"], number)
            header, frames = encode_sample(sample)
            sizes = [frame.nbytes for frame in frames]
            header = msgspec.msgpack.encode((sizes, header, msgspec.msgpack.encode(make_meta(sample))))
            messages.append([header, *pack(frames, sizes)])
        start = time.perf_counter()
        end = start + order["seconds"]
        sent = acknowledged = 0
        while acknowledged < sent or time.perf_counter() < end:
            while sent - acknowledged < IN_FLIGHT and time.perf_counter() < end:
                push.send_multipart(messages[sent % POOL], copy=False)
                sent += 1
            if acknowledged < sent:
                pull.recv()
                acknowledged += 1
        parent.send(groups=sent, seconds=time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------------ Ray, TransferQueue


@contextmanager
def _ray() -> Iterator[Any]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=500_000_000, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def ray_side(parent: Parent) -> None:
    with _ray() as ray:

        @ray.remote
        class Head:
            def __init__(self) -> None:
                self.stored: deque[Any] = deque(maxlen=STORED)

            def store(self, meta: bytes, arrays: dict[str, Any]) -> str:
                self.stored.append((meta, {key: array.copy() for key, array in arrays.items()}))
                return "stored"

        head = Head.remote()
        parent.send(ready=True)
        while (order := parent.receive()) is not None:
            samples = [make_sample(order["case"], number) for number in range(POOL)]
            messages = [(msgspec.msgpack.encode(make_meta(sample)), sample.data) for sample in samples]
            ray.get(head.store.remote(*messages[0]), timeout=CALL_S)  # the actor is up
            start = time.perf_counter()
            end = start + order["seconds"]
            sent, pending = 0, []
            while time.perf_counter() < end:
                if len(pending) == IN_FLIGHT:
                    done, pending = ray.wait(pending, timeout=CALL_S)
                    assert ray.get(done, timeout=CALL_S) == ["stored"]
                pending.append(head.store.remote(*messages[sent % POOL]))
                sent += 1
            ray.get(pending, timeout=CALL_S)
            parent.send(groups=sent, seconds=time.perf_counter() - start)


def transfer_queue_side(parent: Parent) -> None:
    os.environ["TQ_LOGGING_LEVEL"] = "ERROR"
    with _ray():
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict

        tq.init()
        try:
            parent.send(ready=True)
            used = 0
            stored: deque[Any] = deque(maxlen=STORED)
            while (order := parent.receive()) is not None:
                samples = [make_sample(order["case"], number) for number in range(BATCH)]
                groups = [{key: torch.from_numpy(array) for key, array in s.data.items()} for s in samples]
                count, spent_s, size = 0, 0.0, order["batch"]
                while spent_s < order["seconds"]:
                    keys = [f"{used + i}" for i in range(size)]
                    used += size
                    start = time.perf_counter()
                    if size == 1:
                        tq.kv_put(keys[0], "train", groups[count % BATCH], {"stored": 0})
                    else:
                        columns = {key: torch.stack([group[key] for group in groups]) for key in groups[0]}
                        tq.kv_batch_put(keys, "train", TensorDict(columns, batch_size=size), [{"stored": 0}] * size)
                    found = tq.kv_batch_get(keys, "train")
                    rows = {key: found[key].unbind(0) for key in groups[0]}
                    stored.extend({key: row[i].clone() for key, row in rows.items()} for i in range(size))
                    spent_s += time.perf_counter() - start
                    count += size
                    tq.kv_clear(keys, "train")
                parent.send(groups=count, seconds=spent_s)
        finally:
            tq.close()


# ------------------------------------------------------------------------------------------------------------ the benchmark

PARTS = {
    "asyncrl_receiver": asyncrl_receiver,
    "asyncrl_sender": asyncrl_sender,
    "raw_receiver": raw_receiver,
    "raw_sender": raw_sender,
    "ray": ray_side,
    "transfer_queue": transfer_queue_side,
}


def order(sender: Child, case: str, seconds: float, *, rate: float = 0.0, batch: int = 1) -> None:
    sender.send(case=case, seconds=seconds, rate=rate, batch=batch)


def groups_per_s(sender: Child, seconds: float) -> float:
    answer = sender.receive(seconds + CALL_S)
    return float(answer["groups"]) / float(answer["seconds"])


class Pair:
    """A side with one sending and one receiving process. Also records the CPU microseconds per group of both."""

    def __init__(self, receiver: str, sender: str, cases: list[str], seconds: float, **settings: Any) -> None:
        self._parts = receiver, sender
        self._cases = cases
        self._seconds = seconds
        self._settings = settings
        self.cpu_us: dict[str, dict[str, list[float]]] = {"receiver": {}, "sender": {}}

    def __call__(self) -> dict[str, float]:
        rates = {}
        with children(__file__, *self._parts, grace_s=1.0, **self._settings) as (receiver, sender):
            sender.send(**receiver.receive(START_S))
            processes = {"receiver": psutil.Process(receiver.pid), "sender": psutil.Process(sender.pid)}
            for case in self._cases:
                order(sender, case, self._seconds / 5)  # warms up connections, allocators and caches
                groups_per_s(sender, self._seconds)
                before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
                order(sender, case, self._seconds)
                rates[case] = groups_per_s(sender, self._seconds)
                for name, process in processes.items():
                    used_us = 1e6 * (sum(process.cpu_times()[:2]) - before[name])
                    self.cpu_us[name].setdefault(case, []).append(used_us / (rates[case] * self._seconds))
        return rates

    def cpu(self) -> dict[str, dict[str, float]]:
        """Medians without the first value, which is from the warm-up round."""
        return {
            name: {case: round(statistics.median(values[1:] or values), 1) for case, values in cases.items()}
            for name, cases in self.cpu_us.items()
        }


def single(part: str, cases: list[str], seconds: float, batch: int = 1) -> Callable[[], dict[str, float]]:
    """A side that starts its other processes itself."""

    def measure() -> dict[str, float]:
        with children(__file__, part, grace_s=30.0) as (side,):
            side.receive(START_S)
            rates = {}
            for case in cases:
                order(side, case, seconds / 5, batch=batch)
                groups_per_s(side, seconds)
                order(side, case, seconds, batch=batch)
                rates[case] = groups_per_s(side, seconds)
            return rates

    return measure


def train_steps(rounds: int) -> dict[str, dict[str, float]]:
    """Return by case the median milliseconds of a train step without and with the stream, measured in alternation, and the
    slowdown."""
    found: dict[str, dict[str, list[float]]] = {case: {"alone": [], "beside": []} for case in TRAIN_CASES}
    with children(__file__, "asyncrl_receiver", "asyncrl_sender", trainer=True) as (trainer, sender):
        sender.send(**trainer.receive(START_S))
        for number in range(-1, rounds):
            for case, rate in TRAIN_CASES.items():
                trainer.send()
                alone_s = trainer.receive(CALL_S)["step_s"]
                order(sender, case, TRAIN_STEPS * alone_s * 1.2, rate=rate)
                trainer.send()
                beside_s = trainer.receive(CALL_S)["step_s"]
                sender.receive(CALL_S)
                if number >= 0:
                    found[case]["alone"].append(1000 * alone_s)
                    found[case]["beside"].append(1000 * beside_s)
    result = {}
    for case, times in found.items():
        alone_ms, beside_ms = statistics.median(times["alone"]), statistics.median(times["beside"])
        slow_down = statistics.median(b / a for a, b in zip(times["alone"], times["beside"], strict=True))
        result[case] = {
            "groups_per_s": TRAIN_CASES[case],
            "step_alone_ms": round(alone_ms, 2),
            "step_beside_ms": round(beside_ms, 2),
            "slow_down": round(slow_down, 3),
        }
    return result


def main() -> None:
    options = parser(__doc__ or "", quick={"seconds": 0.2})
    options.add_argument(
        "--seconds", type=float, default=1.0, help="duration of one measurement, per side and case (default 1)"
    )
    options.add_argument("--cases", default=",".join(CASES), help="comma-separated cases")
    options.add_argument("--peers", help=f"comma-separated peers (default {','.join(PEERS)}; with --curve: plain)")
    options.add_argument(
        "--curve", action="store_true", help="compare asyncrl over encrypted TCP with asyncrl over plain TCP"
    )
    options.add_argument(
        "--no-train-step", action="store_true", help="skip the measurement of the train step beside the stream"
    )
    args = options.parse_args()
    cases, seconds = args.cases.split(","), args.seconds

    makers: dict[str, Callable[[], Callable[[], dict[str, float]]]] = {
        "raw_pyzmq": lambda: Pair("raw_receiver", "raw_sender", cases, seconds),
        "ray": lambda: single("ray", cases, seconds),
        "transfer_queue": lambda: single("transfer_queue", cases, seconds),
        "transfer_queue_batch": lambda: single("transfer_queue", cases, seconds, batch=BATCH),
        PLAIN: lambda: Pair("asyncrl_receiver", "asyncrl_sender", cases, seconds, way=PLAIN),
    }
    chosen = (PLAIN if args.curve else ",".join(PEERS)) if args.peers is None else args.peers
    wanted = [peer for peer in chosen.split(",") if peer]
    missing = missing_peers({peer: PEERS[peer] for peer in wanted})
    peers = [peer for peer in wanted if peer not in missing]
    ours = Pair("asyncrl_receiver", "asyncrl_sender", cases, seconds, way="curve" if args.curve else "unix")
    sides: dict[str, Callable[[], dict[str, float]]] = {"asyncrl": ours}
    sides |= {peer: makers[peer]() for peer in peers}
    rounds = alternate(args, sides)
    cpu = {side: measure.cpu() for side, measure in sides.items() if isinstance(measure, Pair)}
    slow_down: dict[str, Any] = {}
    if not (args.no_train_step or args.curve):
        say(args, "a train step beside the stream")
        slow_down = train_steps(args.rounds)

    ratio = rounds.ratios("asyncrl", peers, cases)
    table(
        args,
        "groups/s (median), and ours over theirs",
        ["case", "asyncrl", *(cell for peer in peers for cell in (peer, "ratio"))],
        [
            [case, rounds.median("asyncrl", case)]
            + [cell for peer in peers for cell in (rounds.median(peer, case), f"{ratio[peer][case]:.2f}x")]
            for case in cases
        ],
    )
    table(
        args,
        "CPU microseconds per group",
        ["side", *(f"{case} {name}" for case in cases for name in ("receiver", "sender"))],
        [
            [side, *(used[name][case] for case in cases for name in ("receiver", "sender"))]
            for side, used in cpu.items()
        ],
    )
    if slow_down:
        header = ["groups", *next(iter(slow_down.values()))]
        table(args, "train step beside the stream", header, [[c, *row.values()] for c, row in slow_down.items()])
    finish(
        args,
        name="push_pull",
        value=rounds.median("asyncrl", cases[0]),
        unit="groups/s",
        ratio=ratio,
        cases=cases,
        groups_per_s=rounds.summary(),
        cpu_us_per_group=cpu,
        train_step=slow_down,
        in_flight=IN_FLIGHT,
        peers_missing=missing,
        variant="curve" if args.curve else "",
    )


if __name__ == "__main__" and not run_part(PARTS):
    sys.exit(main())
