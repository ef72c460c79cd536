"""Round-trip time of a call of the master and its reply, beside raw pyzmq under asyncio and Ray.

    python benchmarks/request_reply.py [--rounds 5] [--calls 2000] [--peers raw_pyzmq_asyncio,ray]
    python benchmarks/request_reply.py --curve      the cost of encryption: over TCP with CURVE beside `plain`

One call at a time between two processes: an MFC on a batch of 64 ids (1 kB), answered with the ids and ten statistics:

    asyncrl            NameResolvingRequestClient to NameResolvingReplyServer: typed, in order, at most once
    raw_pyzmq_asyncio  the same bytes both ways over zmq.asyncio DEALER sockets, without encoding, decoding or checks
    plain              asyncrl over TCP, neither authenticated nor encrypted (network.authenticate=off)
    ray                a method of an actor, called with the same ids, that returns the same ids and statistics

asyncrl uses Unix sockets, as in a run on one machine. With --curve it uses encrypted TCP, as between hosts.
`value` is asyncrl's median round trip in microseconds. The cases are `median` and `p99`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from common import Parent, alternate, children, finish, missing_peers, network_of, parser, percentile, run_part, table

PLAIN = "plain"
PEERS = {"raw_pyzmq_asyncio": "zmq", PLAIN: "zmq", "ray": "ray"}
IDS = [f"a1.t{number:06d}" for number in range(64)]
STATS = {f"statistic_{number}": number / 7 for number in range(10)}
WARM_UP = 200  # warm-up calls, which do not count
START_S, CALL_S = 120.0, 60.0  # limits of waits


def summary(seconds: list[float]) -> dict[str, float]:
    micros = [1e6 * s for s in seconds[WARM_UP:]]
    return {"median": percentile(micros, 50), "p99": percentile(micros, 99)}


# ------------------------------------------------------------------------------------------------------------------ asyncrl


def asyncrl_server(parent: Parent, calls: int, way: str = "unix") -> None:
    asyncio.run(_serve(parent, network_of(way)))


async def _serve(parent: Parent, keys: dict[str, str]) -> None:
    from asyncrl.config.schema import RuntimeConfig
    from asyncrl.protocol.calls import CallResult, ExecuteMFC
    from asyncrl.protocol.names import Names
    from asyncrl.streams.request_reply import NameResolvingReplyServer, request_stream
    from tests.support.memory_names import MemoryNameResolver

    resolver, names = MemoryNameResolver("bench"), Names("bench", "request-reply")
    server = NameResolvingReplyServer(resolver, names, index=0, runtime=RuntimeConfig())
    await server.start()

    async def answer() -> None:
        while True:
            call = await server.receive()
            assert isinstance(call.body, ExecuteMFC)
            call.reply(CallResult(ids=call.body.ids, keys=["proximal_logprobs"], stats=STATS, seconds=0.5))

    answering = asyncio.create_task(answer())
    parent.send(endpoint=resolver.get(names.stream(request_stream(0))), keys=keys)
    await asyncio.to_thread(parent.receive)  # until the benchmark closes the pipe
    answering.cancel()
    await server.close()


def asyncrl_client(parent: Parent, calls: int, way: str = "unix") -> None:
    asyncio.run(_call(parent, calls, way))


async def _call(parent: Parent, calls: int, way: str) -> None:
    from asyncrl.config.schema import RuntimeConfig
    from asyncrl.protocol.calls import ExecuteMFC
    from asyncrl.protocol.names import Names
    from asyncrl.streams.request_reply import NameResolvingRequestClient, request_stream
    from tests.support.memory_names import MemoryNameResolver

    resolver, names = MemoryNameResolver("bench"), Names("bench", "request-reply")
    found = parent.receive() or {}
    network_of(way, found["keys"])
    resolver.add(names.stream(request_stream(0)), str(found["endpoint"]))
    client = NameResolvingRequestClient(
        resolver, names, num_workers=1, handler_routing={}, runtime=RuntimeConfig(), incarnation="bench"
    )
    await client.start()
    seconds = []
    for number in range(WARM_UP + calls):
        start = time.perf_counter()
        (reply,) = client.call_nowait([0], [ExecuteMFC(mfc="actor_inf", version=number, ids=IDS)])
        result = await reply
        seconds.append(time.perf_counter() - start)
        assert result.ids == IDS
    parent.send(**summary(seconds))
    await client.close()


# -------------------------------------------------------------------------------------------------------------------- peers


def _bodies() -> tuple[bytes, bytes]:
    import msgspec

    from asyncrl.protocol.calls import CallResult, ExecuteMFC

    encode = msgspec.msgpack.encode
    call = ExecuteMFC(mfc="actor_inf", version=1, ids=IDS)
    return encode(call), encode(CallResult(ids=IDS, keys=["proximal_logprobs"], stats=STATS, seconds=0.5))


def raw_server(parent: Parent, calls: int) -> None:
    asyncio.run(_raw_serve(parent))


async def _raw_serve(parent: Parent) -> None:
    import zmq
    import zmq.asyncio

    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    parent.send(port=port)
    reply = _bodies()[1]
    while True:  # until the benchmark kills it
        await socket.recv()
        await socket.send(reply)


def raw_client(parent: Parent, calls: int) -> None:
    asyncio.run(_raw_call(parent, calls))


async def _raw_call(parent: Parent, calls: int) -> None:
    import zmq
    import zmq.asyncio

    socket = zmq.asyncio.Context().socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{(parent.receive() or {})['port']}")
    call = _bodies()[0]
    seconds = []
    for _ in range(WARM_UP + calls):
        start = time.perf_counter()
        await socket.send(call)
        await socket.recv()
        seconds.append(time.perf_counter() - start)
    parent.send(**summary(seconds))


def ray_side(parent: Parent, calls: int) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:

        @ray.remote
        class Worker:
            def execute(self, mfc: str, version: int, ids: list[str]) -> dict[str, Any]:
                return {"ids": ids, "keys": ["proximal_logprobs"], "stats": STATS, "seconds": 0.5}

        worker = Worker.remote()
        seconds = []
        for number in range(WARM_UP + calls):
            start = time.perf_counter()
            result = ray.get(worker.execute.remote("actor_inf", number, IDS), timeout=CALL_S)
            seconds.append(time.perf_counter() - start)
            assert result["ids"] == IDS
        parent.send(**summary(seconds))
    finally:
        ray.shutdown()


PARTS = {
    "asyncrl_server": asyncrl_server,
    "asyncrl_client": asyncrl_client,
    "raw_server": raw_server,
    "raw_client": raw_client,
    "ray": ray_side,
}

# ------------------------------------------------------------------------------------------------------------ the benchmark


def pair(server: str, client: str, calls: int, **settings: Any) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        with children(__file__, server, client, grace_s=1.0, calls=calls, **settings) as (serving, calling):
            calling.send(**serving.receive(START_S))
            return calling.receive(START_S + calls)

    return measure


def alone(part: str, calls: int) -> Callable[[], dict[str, float]]:
    """A side that starts its other processes itself."""

    def measure() -> dict[str, float]:
        with children(__file__, part, grace_s=30.0, calls=calls) as (side,):
            return side.receive(START_S + calls)

    return measure


def main() -> None:
    options = parser(__doc__ or "", quick={"calls": 200})
    options.add_argument("--calls", type=int, default=2000, help="calls per round and side (default 2000)")
    options.add_argument("--peers", help=f"comma-separated peers (default {','.join(PEERS)}; with --curve: plain)")
    options.add_argument(
        "--curve", action="store_true", help="compare asyncrl over encrypted TCP with asyncrl over plain TCP"
    )
    args = options.parse_args()
    makers = {
        "raw_pyzmq_asyncio": lambda: pair("raw_server", "raw_client", args.calls),
        "ray": lambda: alone("ray", args.calls),
        PLAIN: lambda: pair("asyncrl_server", "asyncrl_client", args.calls, way=PLAIN),
    }
    chosen = (PLAIN if args.curve else ",".join(PEERS)) if args.peers is None else args.peers
    wanted = [peer for peer in chosen.split(",") if peer]
    missing = missing_peers({peer: PEERS[peer] for peer in wanted})
    peers = [peer for peer in wanted if peer not in missing]
    sides = {"asyncrl": pair("asyncrl_server", "asyncrl_client", args.calls, way="curve" if args.curve else "unix")}
    rounds = alternate(args, sides | {peer: makers[peer]() for peer in peers})
    cases = ["median", "p99"]
    ratio = rounds.ratios("asyncrl", peers, cases)
    table(
        args,
        "round trip, us (median of rounds), and ours over theirs",
        ["", "asyncrl", *(cell for peer in peers for cell in (peer, "ratio"))],
        [
            [case, rounds.median("asyncrl", case)]
            + [cell for peer in peers for cell in (rounds.median(peer, case), f"{ratio[peer][case]:.2f}x")]
            for case in cases
        ],
    )
    finish(
        args,
        name="request_reply",
        value=rounds.median("asyncrl", "median"),
        unit="us",
        ratio=ratio,
        cases=cases,
        microseconds=rounds.summary(),
        calls=args.calls,
        peers_missing=missing,
        variant="curve" if args.curve else "",
    )


if __name__ == "__main__" and not run_part(PARTS):
    sys.exit(main())
