"""Largest run that the control plane carries: manager and etcd under 1,024 generation servers and 16,384 rollout clients.

    python benchmarks/scale.py [--clients 1024 16384] [--servers 1024] [--write-baseline]

manager: a real GserverManager in its own process. Its servers are 1,024 sockets that answer as generation servers do (one
process). Each client is a separate connection that sends the requests of a rollout worker: heartbeats, as often as the manager
asks, and allocate and finish at --rate per second among all clients. Two processes run the clients. Open loop: latency counts from
the time at which a request was due. The manager has its own core, all other processes share the rest.
names: a real etcd. Each client is a separate gRPC connection with two watches, like a worker's session. Measures the time until one
put has reached all clients, and etcd's cost per client. launcher: its work for each process, keeping a lease and putting a status.
simulation: discrete events of a run of 10,000 GPUs with the measured service times. It shows the effect of the manager's queue on
generation, and the load at which the manager saturates.

Each number is the median of --rounds rounds. `value` is the p99 of an allocation at the largest number of clients, in ms (`spread`:
minimum and maximum of the rounds). `bottleneck` describes the first bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import (
    BASELINES,
    Child,
    Parent,
    children,
    cpu_seconds,
    finish,
    make_manager,
    parser,
    percentile,
    run_part,
    say,
    table,
)

from asyncrl.config.schema import ManagerConfig
from asyncrl.manager import intervals

CLIENTS = (1024, 16384)
NUM_SERVERS = 1024
BATCH_SIZE, ETA = 1024, 2
HOLDS_S = 5.0  # time for which a client holds a ticket
WATCHES = 2
PUTS = 10
NAME_PROCESSES = 4
_START_LIMIT_S = 300.0

# ------------------------------------------------------------------------------------------------------ parts: the manager


def part_manager(parent: Parent, *, core: int, folder: str, **_: Any) -> None:
    from asyncrl.protocol.versions import WeightVersion

    _prepare(core)
    urls = (parent.receive() or {})["urls"]
    manager, resolver = make_manager(folder, urls, eta=ETA, batch_size=BATCH_SIZE, num_clients=max(CLIENTS))

    def obey() -> None:
        url = resolver.wait(manager.names.gserver_manager(), _START_LIMIT_S)
        table, version = manager.seen.result(_START_LIMIT_S).table, WeightVersion(1, 0)
        began = time.monotonic()
        resolver.add(manager.names.model_version("actor"), str(version), replace=True)
        while sum(server.version == version for server in list(table.servers.values())) < len(urls):
            time.sleep(0.1)  # bounded by the benchmark
        parent.send(url=url, all_serve_s=time.monotonic() - began)
        while parent.receive() is not None:
            parent.send(cpu=cpu_seconds(), rss=psutil.Process().memory_info().rss)
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    asyncio.run(manager.main())


def part_servers(parent: Parent, *, core: int, num_servers: int, **_: Any) -> None:
    """Stub generation servers: one port each, no HTTP library."""
    _prepare(core)
    info = b'{"model_path":"m","weight_version":"%s"}'
    agreed = b'{"success":true,"message":"","num_paused_requests":0}'

    class Server(asyncio.Protocol):
        def __init__(self, state: dict[str, bytes]) -> None:
            self._state, self._received = state, b""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            self._received += data
            while (head := self._received.find(b"\r\n\r\n")) >= 0:
                lines = self._received[:head].lower()
                at = lines.find(b"content-length: ")
                size = int(lines[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                if len(self._received) < head + 4 + size:
                    return
                body, path = self._received[head + 4 : head + 4 + size], self._received.split(b" ", 2)[1]
                self._received = self._received[head + 4 + size :]
                if path == b"/update_weights_from_disk":
                    start = body.find(b'"weight_version":"') + 18
                    self._state["version"] = body[start : body.find(b'"', start)]
                answer = info % self._state["version"] if path == b"/get_model_info" else agreed
                headers = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                self._transport.write(headers % len(answer) + answer)

    async def serve() -> None:
        loop, urls = asyncio.get_running_loop(), []
        for _number in range(num_servers):
            state = {"version": b""}
            server = await loop.create_server(lambda state=state: Server(state), "127.0.0.1", 0)  # type: ignore[misc]
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        parent.send(urls=urls)
        while await asyncio.to_thread(parent.receive) is not None:
            parent.send(cpu=cpu_seconds())

    asyncio.run(serve())


def part_clients(parent: Parent, *, core: int, **_: Any) -> None:
    """Rollout workers, one connection each. The first process also acts as the master and sends all allocations."""
    from http_load import Connection, _Rollouts, _ticket_id

    _prepare(core)
    settings = parent.receive()
    assert settings is not None
    url, first, count, rate = (settings[name] for name in ("url", "first", "count", "rate"))
    import select

    rollouts = _Rollouts(BATCH_SIZE, 8, 0.0)
    epoll, by_fd = select.epoll(), {}
    connections = []
    for number in range(count + (1 if rate else 0)):
        connection = Connection(url)
        by_fd[connection.fileno] = number
        connections.append(connection)
        epoll.register(connection.fileno, select.EPOLLIN)
    master = connections.pop() if rate else None
    if master is not None:
        master.send("report", rollouts.report(full=True), time.monotonic())
    parent.send(connected=count)

    while (command := parent.receive()) is not None:
        seconds, warm_up_s, every_s = command["seconds"], command["warm_up_s"], command["heartbeat_s"]
        start = time.monotonic()
        counting_from, end = start + warm_up_s, start + warm_up_s + seconds
        cpu, cpu_from = 0.0, 0.0
        due: list[tuple[float, int, str, str]] = [
            (start + every_s * number / count, number, "heartbeat", "") for number in range(count)
        ]
        if rate:
            due.append((start, -1, "allocate_rollout", ""))
        heapq.heapify(due)
        held: dict[int, set[str]] = {}
        waiting: dict[int, deque[tuple[float, str, str]]] = {}  # requests that wait for a busy connection
        latencies: dict[str, list[float]] = {"heartbeat": [], "allocate_rollout": [], "finish_rollout": []}
        refused = 0

        def send(number: int, at: float, kind: str, ticket: str) -> None:
            connection = connections[number]
            if connection.kind:
                waiting.setdefault(number, deque()).append((at, kind, ticket))  # noqa: B023
            elif kind == "heartbeat":
                connection.send(kind, rollouts.heartbeat(first + number, sorted(held.get(number, ()))), at)  # noqa: B023
            elif kind == "allocate_rollout":
                connection.send(kind, rollouts.allocate(first + number), at)
            else:
                connection.send(kind, rollouts.finish(first + number, ticket), at)
                held[number].discard(ticket)  # noqa: B023
                rollouts.stored(ticket)

        while (now := time.monotonic()) < end:
            if not cpu_from and now >= counting_from:
                cpu, cpu_from = time.process_time(), now
            while due and due[0][0] <= now:
                at, number, kind, ticket = heapq.heappop(due)
                if kind == "heartbeat":
                    heapq.heappush(due, (at + every_s, number, kind, ""))
                elif kind == "allocate_rollout":
                    heapq.heappush(due, (at + 1.0 / rate, -1, kind, ""))
                    number = random.randrange(count)
                send(number, at, kind, ticket)
            if master is not None and not master.kind and (report := rollouts.report()) is not None:
                master.send("report", report, now)
            if master is not None and master.unsent:
                master.flush()
            wait_s = min(max(due[0][0] - now, 0.0), 0.05) if due else 0.05
            for fd, _event in epoll.poll(wait_s):
                number = by_fd[fd]
                connection = master if number == count else connections[number]
                assert connection is not None
                kind, since = connection.kind, connection.since
                body = connection.receive()
                if body is None or connection is master:
                    continue
                if since >= counting_from:
                    latencies[kind].append(time.monotonic() - since)
                if kind == "allocate_rollout":
                    if ticket := _ticket_id(body):
                        held.setdefault(number, set()).add(ticket)
                        heapq.heappush(due, (time.monotonic() + HOLDS_S, number, "finish_rollout", ticket))
                    else:
                        refused += 1
                if left := waiting.get(number):
                    send(number, *left.popleft())
        spent_s = time.monotonic() - cpu_from
        late = sum(len(left) for left in waiting.values())
        parent.send(
            latencies={kind: sorted(found)[:: max(1, len(found) // 5000)] for kind, found in latencies.items()},
            counts={kind: len(found) for kind, found in latencies.items()},
            refused=refused,
            late=late,
            cpu_share=(time.process_time() - cpu) / spent_s,
            seconds=spent_s,
        )
        for number, connection in enumerate(connections):  # wait for answers to requests in flight
            limit = time.monotonic() + 30.0
            while connection.kind and time.monotonic() < limit:
                connection.receive()
                time.sleep(0.0005 if connection.kind else 0.0)
            waiting.pop(number, None)


# ---------------------------------------------------------------------------------------------------------- parts: names


def part_watchers(parent: Parent, **_: Any) -> None:
    """Sessions with etcd: one connection each, a first request, and watches. Reports when each watch sees a put."""
    from grpc import aio  # type: ignore[import-untyped]

    from asyncrl.runtime.names.etcd.api import load_api

    _prepare(-1)
    rpc = load_api().rpc
    settings = parent.receive()
    assert settings is not None
    endpoint, count, key = settings["endpoint"], settings["count"], settings["key"].encode()

    async def run() -> None:
        heard: list[float] = []
        channels, tasks = [], []
        watching = 0
        all_heard = asyncio.Event()
        expected = 0

        async def watch(channel: Any, watched: bytes) -> None:
            nonlocal watching
            call = channel.stream_stream(
                "/etcdserverpb.Watch/Watch",
                request_serializer=rpc.WatchRequest.SerializeToString,
                response_deserializer=rpc.WatchResponse.FromString,
            )()
            await call.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=watched)))
            while (response := await call.read()) is not aio.EOF:
                if response.created:
                    watching += 1
                elif response.events:
                    heard.append(time.monotonic())
                    if len(heard) >= expected:
                        all_heard.set()

        for begin in range(0, count, 64):
            for _number in range(begin, min(begin + 64, count)):
                channel = aio.insecure_channel(endpoint, options=(("grpc.use_local_subchannel_pool", 1),))
                channels.append(channel)
                tasks.append(asyncio.create_task(watch(channel, key)))
                tasks += [asyncio.create_task(watch(channel, key + b"/other%d" % n)) for n in range(1, WATCHES)]
            while watching < min(begin + 64, count) * WATCHES:  # noqa: ASYNC110 (bounded by the benchmark)
                await asyncio.sleep(0.01)
        parent.send(connected=count)
        while await asyncio.to_thread(parent.receive) is not None:
            heard.clear()
            all_heard.clear()
            expected = count
            parent.send(ready=True)
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(60.0):
                    await all_heard.wait()
            parent.send(heard=heard)
        os._exit(0)

    asyncio.run(run())


def _prepare(core: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if core >= 0:
        os.sched_setaffinity(0, {core})


# ------------------------------------------------------------------------------------------------------------ measuring


def measure_manager(args: argparse.Namespace, folder: Path, num_clients: int) -> dict[str, float]:
    """Measure one number of clients. The manager's CPU time for its servers alone, measured first, without clients, is subtracted
    before the CPU time per request is computed."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = (cores[0], cores[-1]) if len(cores) > 1 else (-1, -1)
    # Warm up until each client has sent a heartbeat, and the effects of its first request are over
    warm_up_s = 2 * max(heartbeat_s(num_clients), 2.5)
    run_dir = folder / str(num_clients)
    run_dir.mkdir()
    publish_version(run_dir)
    with (
        children(__file__, "servers", core=others, num_servers=args.servers) as (servers,),
        children(__file__, "manager", core=own, folder=str(run_dir)) as (manager,),
        children(__file__, "clients", "clients", core=others) as clients,
    ):
        manager.send(urls=servers.receive(_START_LIMIT_S)["urls"])
        started = manager.receive(_START_LIMIT_S)
        idle = _spent(manager, args.seconds)
        before = _ask(manager)
        halves = (num_clients - num_clients // 2, num_clients // 2)
        for child, first, count, rate in zip(clients, (0, halves[0]), halves, (args.rate, 0.0), strict=True):
            child.send(url=started["url"], first=first, count=count, rate=rate)
        for child in clients:
            child.receive(_START_LIMIT_S)
        for child in clients:
            child.send(seconds=args.seconds, warm_up_s=warm_up_s, heartbeat_s=heartbeat_s(num_clients))
        time.sleep(warm_up_s)
        busy = _spent(manager, args.seconds - 0.5)
        seen = [child.receive(_START_LIMIT_S) for child in clients]
        after = _ask(manager)
    heartbeats = [s for one in seen for s in one["latencies"]["heartbeat"]]
    allocations = seen[0]["latencies"]["allocate_rollout"]
    if not allocations or not heartbeats:
        raise SystemExit(
            f"none of {num_clients} clients was answered within {args.seconds:g} s (load average {os.getloadavg()[0]:.0f}): "
            "the machine is too busy for a measurement; repeat it on a quiet machine, or increase --seconds"
        )
    requests_a_s = sum(sum(one["counts"].values()) / one["seconds"] for one in seen)
    return {
        "all_serve_s": started["all_serve_s"],
        "idle_cpu": idle,
        "cpu": busy,
        "requests_a_s": requests_a_s,
        "due_a_s": num_clients / heartbeat_s(num_clients) + 2 * args.rate,
        "cpu_us_a_request": 1e6 * (busy - idle) / max(requests_a_s, 1.0),
        "allocate_p50_ms": 1e3 * percentile(allocations, 50),
        "allocate_p99_ms": 1e3 * percentile(allocations, 99),
        "heartbeat_p99_ms": 1e3 * percentile(heartbeats, 99),
        "kb_a_client": (after["rss"] - before["rss"]) / 1024 / num_clients,
        "refused": float(seen[0]["refused"]),
        "unsent": float(sum(one["late"] for one in seen)),
        "generators_cpu": sum(one["cpu_share"] for one in seen),
    }


def heartbeat_s(num_clients: int) -> float:
    """The interval that the manager gives to its clients."""
    options = ManagerConfig()
    return intervals.heartbeat_s(options.heartbeat_s, num_clients, options.lease_s)


def probe_s(num_servers: int) -> float:
    options = ManagerConfig()
    return intervals.probe_s(options.heartbeat_s, num_servers, options.lease_s)


def _ask(child: Child) -> dict[str, Any]:
    child.send()
    return child.receive(_START_LIMIT_S)


def _spent(child: Child, seconds: float) -> float:
    """Share of a core that the child uses over `seconds`."""
    began, cpu = time.monotonic(), _ask(child)["cpu"]
    time.sleep(seconds)
    return float(_ask(child)["cpu"] - cpu) / (time.monotonic() - began)


def publish_version(run_dir: Path) -> None:
    import msgspec
    import xxhash

    from asyncrl.protocol.versions import WeightVersion
    from asyncrl.weights.versions import FileEntry, Manifest, version_dir

    path = version_dir(run_dir, "actor", WeightVersion(1, 0))
    path.mkdir(parents=True)
    data = os.urandom(1 << 16)
    (path / "model.safetensors").write_bytes(data)
    files = {"model.safetensors": FileEntry(bytes=len(data), xxh3=xxhash.xxh3_64(data).hexdigest())}
    manifest = Manifest(attempt=1, version=0, kind="full", files=files)
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def measure_names(folder: Path, num_clients: int) -> dict[str, float]:
    from asyncrl.config.schema import NameResolveConfig
    from asyncrl.runtime.names.etcd.resolver import open_name_resolver
    from tests.support.etcd_server import EtcdServer

    _prepare(-1)
    late: list[float] = []
    puts: list[float] = []
    with (
        EtcdServer(folder / f"etcd{num_clients}", folder / f"etcd{num_clients}.log") as server,
        children(__file__, *["watchers"] * NAME_PROCESSES) as watchers,
        open_name_resolver(NameResolveConfig(endpoints=[server.endpoint])) as names,
    ):
        names.add("warm", "up")
        process = psutil.Process(server.pid)
        rss = process.memory_info().rss
        counts = [num_clients // NAME_PROCESSES + (n < num_clients % NAME_PROCESSES) for n in range(NAME_PROCESSES)]
        began = time.monotonic()
        for child, count in zip(watchers, counts, strict=True):
            child.send(endpoint=server.endpoint, count=count, key="scale/watched")
        for child in watchers:
            child.receive(_START_LIMIT_S)
        connect_s = time.monotonic() - began
        kb = (process.memory_info().rss - rss) / 1024 / num_clients
        cpu = sum(process.cpu_times()[:2])
        for number in range(PUTS):
            for child in watchers:
                child.send()
            for child in watchers:
                child.receive(_START_LIMIT_S)
            at = time.monotonic()
            names.add("scale/watched", str(number), replace=True)
            puts.append(time.monotonic() - at)
            heard = [moment - at for child in watchers for moment in child.receive(_START_LIMIT_S)["heard"]]
            if len(heard) != num_clients:
                raise SystemExit(f"{num_clients - len(heard)} of {num_clients} watchers did not see a put within 60 s")
            late += heard
        cpu = sum(process.cpu_times()[:2]) - cpu
        latest = max(late)
    return {
        "connect_s": connect_s,
        "kb_a_client": kb,
        "put_p50_ms": 1e3 * percentile(puts, 50),
        "told_p50_ms": 1e3 * percentile(late, 50),
        "told_p99_ms": 1e3 * percentile(late, 99),
        "told_last_ms": 1e3 * latest,
        "etcd_cpu_us_a_watcher": 1e6 * cpu / PUTS / num_clients,
    }


def measure_launcher(folder: Path, num_processes: int) -> dict[str, float]:
    """The launcher's work for each process of a run: keep a lease, put a status."""
    from asyncrl.config.schema import NameResolveConfig
    from asyncrl.runtime.names.etcd.resolver import open_name_resolver
    from tests.support.etcd_server import EtcdServer

    with EtcdServer(folder / "etcd_leases", folder / "etcd_leases.log") as server:
        config = NameResolveConfig(endpoints=[server.endpoint], timeout_s=60.0)
        with open_name_resolver(config) as names:
            began = time.monotonic()
            leases = [names.grant_lease(30.0) for _ in range(num_processes)]
            grant_s = time.monotonic() - began
            began, status = time.monotonic(), "x" * 400
            for number, lease in enumerate(leases):
                names.add(f"scale/status/{number}", status, replace=True, lease=lease.id)
            put_s = time.monotonic() - began
            cpu, began = time.process_time(), time.monotonic()
            time.sleep(20.0)
            share = (time.process_time() - cpu) / (time.monotonic() - began)
            there, expected = names.get_subtree("scale/status"), range(0, num_processes, 257)
            alive = sum(f"scale/status/{number}" in there for number in expected)
            os.kill(server.pid, 9)  # kill etcd: revoking all leases at the end would only take time
    return {
        "grant_us": 1e6 * grant_s / num_processes,
        "status_us": 1e6 * put_s / num_processes,
        "keeper_cpu": share,
        "lost": float(len(expected) - alive),
    }


# ----------------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Run:
    """A run of 10,000 GPUs: 1,024 servers with 8 GPUs each, the other GPUs train. Lengths have a long tail."""

    clients: int = 16384
    servers: int = 1024
    groups_a_server: int = 16  # concurrent groups
    batch: int = 8192  # groups per train step
    eta: int = 2
    step_s: float = 60.0
    group_s: float = 90.0  # median
    spread: float = 0.8  # standard deviation of its logarithm
    heartbeat_s: float = 2.0
    seconds: float = 600.0


def simulate(run: Run, service_s: float, idle_share: float, heartbeats_from: float) -> dict[str, float]:
    """Simulate a run by discrete events.

    The manager answers requests one after another, each in service_s. Health probes of servers take idle_share of its time.
    heartbeats_from: time in seconds from which heartbeats arrive, evenly spaced, and from which waiting times count.
    """
    rng = random.Random(1)
    service = service_s / max(1.0 - idle_share, 0.01)
    events: list[tuple[float, int, str]] = []
    sequence = 0
    free_at = 0.0
    waits: list[float] = []
    busy = 0.0
    live = stored = 0
    trained_at = 0.0
    training = False
    gate_waiting = 0
    idle_for_manager = 0.0
    num_steps = 0
    slots = run.servers * run.groups_a_server

    def push(at: float, what: str) -> None:
        nonlocal sequence
        sequence += 1
        heapq.heappush(events, (at, sequence, what))

    def ask(at: float) -> float:
        """The time at which the manager answers a request that arrives at `at`."""
        nonlocal free_at, busy
        begin = max(at, free_at)
        free_at = begin + service
        if at >= heartbeats_from:
            busy += service_s  # idle_share accounts for the health probes in between
        return free_at

    for number in range(run.clients):
        push(heartbeats_from + run.heartbeat_s * number / run.clients, "heartbeat")
    for _number in range(slots):
        push(rng.random() * 10.0, "want")  # slots start within ten seconds
    while events:
        at, _, what = heapq.heappop(events)
        if at > run.seconds:
            break
        if what == "heartbeat":
            ask(at)
            push(at + run.heartbeat_s, what)
        elif what == "want":
            if live + stored >= (1 + run.eta) * run.batch:
                gate_waiting += 1
                continue
            live += 1
            answered = ask(at)
            if at > heartbeats_from:
                waits.append(answered - at)
                idle_for_manager += answered - at
            push(answered + run.group_s * rng.lognormvariate(0.0, run.spread), "ended")
        elif what == "ended":
            live -= 1
            stored += 1
            push(ask(at), "want")
            if not training and stored >= run.batch:
                training = True
                push(max(at, trained_at) + run.step_s, "trained")
        elif what == "trained":
            stored -= run.batch
            num_steps += 1
            training, trained_at = stored >= run.batch, at
            if training:
                push(at + run.step_s, "trained")
            for _number in range(min(gate_waiting, run.batch)):
                push(at, "want")
            gate_waiting = max(0, gate_waiting - run.batch)
    span = run.seconds - heartbeats_from
    return {
        "utilisation": busy / span + idle_share,
        "allocate_p50_ms": 1e3 * percentile(waits, 50),
        "allocate_p99_ms": 1e3 * percentile(waits, 99),
        "slots_idle_for_manager": idle_for_manager / (slots * span),
        "allocations_a_s": len(waits) / span,
        "steps": float(num_steps),
    }


# -------------------------------------------------------------------------------------------------------------- the rest


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"clients": [64], "servers": 32, "seconds": 2.0})
    options.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    options.add_argument("--servers", type=int, default=NUM_SERVERS)
    options.add_argument(
        "--rate", type=float, default=200.0, help="allocations per second, and as many finished rollouts (default 200)"
    )
    options.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement (default 8)")
    options.add_argument(
        "--service-us", type=float, default=0.0, help="CPU time of a request in the simulation (default: as measured)"
    )
    options.add_argument(
        "--probe-us",
        type=float,
        default=0.0,
        help="CPU time of a health probe in the simulation (default: as measured)",
    )
    options.add_argument("--without", nargs="+", default=[], choices=["manager", "names", "launcher", "simulation"])
    args = options.parse_args()
    load_before = os.getloadavg()[0]
    managers: dict[str, list[dict[str, float]]] = defaultdict(list)
    resolvers: dict[str, list[dict[str, float]]] = defaultdict(list)
    launcher: dict[str, float] = {}
    for number in range(1, args.rounds + 1):
        for num_clients in args.clients:
            with tempfile.TemporaryDirectory() as folder:
                label = f"{num_clients} clients, round {number}/{args.rounds}"
                if "manager" not in args.without:
                    found = measure_manager(args, Path(folder), num_clients)
                    managers[str(num_clients)].append(found)
                    say(args, f"manager, {label}: {_short(found)}")
                if "names" not in args.without:
                    found = measure_names(Path(folder), num_clients)
                    resolvers[str(num_clients)].append(found)
                    say(args, f"names, {label}: {_short(found)}")
    if "launcher" not in args.without:
        with tempfile.TemporaryDirectory() as folder:
            launcher = measure_launcher(Path(folder), max(args.clients) + args.servers)
        say(args, f"launcher: {_short(launcher)}")
    manager, names = _medians(managers), _medians(resolvers)
    p99s = [found["allocate_p99_ms"] for found in managers[str(max(args.clients))]]
    simulated: dict[str, dict[str, float]] = {}
    bottleneck = ""
    largest = manager.get(str(max(args.clients)), {})
    if "simulation" not in args.without:
        probes_a_s = args.servers / probe_s(args.servers)
        service_us = args.service_us or largest.get("cpu_us_a_request", 0.0) or service_of_baseline()
        idle = args.probe_us * probes_a_s / 1e6 if args.probe_us else largest.get("idle_cpu", 0.0)
        service_s = service_us / 1e6
        for clients in (1024, 4096, 8192, 16384, 32768):
            run = Run(clients=clients, heartbeat_s=heartbeat_s(clients), seconds=300.0)
            simulated[str(clients)] = simulate(run, service_s, idle, 120.0)
            say(args, f"simulation {clients}: {_short(simulated[str(clients)])}")
        carries = (1.0 - idle) / service_s
        bottleneck = (
            f"the gserver manager's one core: a request takes {1e6 * service_s:.0f} us of it and health probes of "
            f"{args.servers} servers {100 * idle:.0f} %, so it carries {carries:.0f} requests/s; {max(args.clients)} clients send "
            f"{max(args.clients) / heartbeat_s(max(args.clients)):.0f} heartbeats/s"
        )
    show(args, "Gserver manager", manager)
    show(args, "etcd", names)
    show(args, "10,000 GPUs, simulated", simulated)
    say(args, bottleneck)
    finish(
        args,
        name="scale",
        value=largest.get("allocate_p99_ms"),
        unit="ms",
        ratio={},
        spread=[min(p99s), max(p99s)] if p99s else [],
        manager=manager,
        names=names,
        launcher=launcher,
        simulation=simulated,
        bottleneck=bottleneck,
        load_average={"before": load_before, "after": os.getloadavg()[0]},
    )


def service_of_baseline() -> float:
    """CPU microseconds per request, from baselines/manager.json."""
    baseline = json.loads((BASELINES / "manager.json").read_text())
    return float(1e6 * baseline["cpu_shares"]["asyncrl"] / baseline["value"])


def _medians(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of each number over the rounds."""
    return {
        clients: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for clients, rounds in found.items()
    }


def _short(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def show(args: argparse.Namespace, title: str, found: dict[str, dict[str, float]]) -> None:
    if found:
        header = ["", *found]
        rows = [[name, *[column[name] for column in found.values()]] for name in next(iter(found.values()))]
        table(args, title, header, rows)


if __name__ == "__main__":
    parts = {"manager": part_manager, "servers": part_servers, "clients": part_clients, "watchers": part_watchers}
    if not run_part(parts):
        sys.exit(main())
