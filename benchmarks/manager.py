"""The gserver manager's HTTP side: requests per second beside a bare aiohttp handler, and p99 during weight updates.

    python benchmarks/manager.py [--rounds 5] [--write-baseline]

asyncrl: a real GserverManager (ledger, servers, updates) in its own process, with stub generation servers.
bare_aiohttp: an aiohttp application in its own process that reads the same bodies and answers with bodies of the same size.
Both get the load of http_load.py, from rollout workers with one connection each. The generator has its own core, and so has the
server while capacity is measured. While latency is measured, the operating system places the server.

- capacity: closed loop, requests/s, at 1, 16, 64 and 256 clients. `value` is asyncrl's at 64.
- latency: open loop at half of that, p99 from the time at which a request was due: idle, and while one version of the weights after
  another is verified and loaded. Delays of admission do not count as latency: these requests ask for an immediate answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from common import (
    Child,
    Parent,
    Rounds,
    alternate,
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

CLIENTS = (1, 16, 64, 256)
AT = 64  # number of clients of the quoted figure and of the open loop
BATCH_SIZE, ETA = 512, 2
NUM_SERVERS = 4
SERVER_LOADS_S = 0.2
UPDATE_PAUSE_S = 0.1
_START_LIMIT_S = 60.0
_SERVED_POLL_S = 0.02  # long, because each poll takes the interpreter's lock from the measured work


# ------------------------------------------------------------------------------------------------------ parts: the server


def part_asyncrl(parent: Parent, *, core: int, folder: str, servers: list[str], **_: Any) -> None:
    from asyncrl.protocol.versions import WeightVersion

    _pin(core)
    manager, resolver = make_manager(folder, servers, eta=ETA, batch_size=BATCH_SIZE, num_clients=max(CLIENTS))
    names = manager.names

    def obey() -> None:
        parent.send(url=resolver.wait(names.gserver_manager(), _START_LIMIT_S))
        table = manager.seen.result(_START_LIMIT_S).table
        while (message := parent.receive()) is not None:
            if "publish" in message:
                version = str(WeightVersion(1, message["publish"]))
                resolver.add(names.model_version("actor"), version, replace=True)
                while {str(server.version) for server in list(table.servers.values())} != {version}:
                    time.sleep(_SERVED_POLL_S)  # bounded by the benchmark
            parent.send(cpu=cpu_seconds())
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    asyncio.run(manager.main())


def part_bare_aiohttp(parent: Parent, *, core: int, **_: Any) -> None:
    """A bare aiohttp server that only reads the body and answers with a recorded answer of the manager."""
    from aiohttp import web

    _pin(core)
    answers = parent.receive()
    assert answers is not None

    async def serve() -> None:
        app = web.Application(client_max_size=64 << 20)
        for path, text in answers.items():
            app.router.add_post(f"/{path}", _answering(text.encode()))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        parent.send(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
        while await asyncio.to_thread(parent.receive) is not None:
            parent.send(cpu=cpu_seconds())

    def _answering(answer: bytes) -> Any:
        async def handle(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=answer, content_type="application/json")

        return handle

    asyncio.run(serve())


def part_generation_servers(parent: Parent, *, core: int, **_: Any) -> None:
    """Stub generation servers for the manager. They load any version within SERVER_LOADS_S."""
    from aiohttp import web

    from asyncrl.protocol.weight_updates import UpdateWeightsRequest

    _pin(core)

    def make_app() -> web.Application:
        version = ""

        async def update(request: web.Request) -> web.Response:
            nonlocal version
            wanted = msgspec.json.decode(await request.read(), type=UpdateWeightsRequest)
            await asyncio.sleep(SERVER_LOADS_S)
            version = wanted.weight_version
            return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

        async def info(request: web.Request) -> web.Response:
            return web.json_response({"model_path": "m", "weight_version": version})

        async def agree(request: web.Request) -> web.Response:
            return web.json_response({"success": True, "message": ""})

        app = web.Application()
        app.router.add_post("/update_weights_from_disk", update)
        app.router.add_get("/get_model_info", info)
        for path in ("/fetch_weights", "/pause_generation", "/continue_generation"):
            app.router.add_post(path, agree)
        app.router.add_get("/health", agree)
        return app

    async def serve() -> None:
        urls = []
        for _number in range(NUM_SERVERS):
            runner = web.AppRunner(make_app(), access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        parent.send(urls=urls)
        while await asyncio.to_thread(parent.receive) is not None:
            pass

    asyncio.run(serve())


def part_load(parent: Parent, *, core: int, **_: Any) -> None:
    """Run http_load.py as the benchmark's messages request."""
    from http_load import Generator

    _pin(core)
    while (message := parent.receive()) is not None:
        how = message.pop("how")
        wait_s = 5.0 if how == "closed_loop" else 0.0
        generator = Generator(message.pop("url"), message.pop("num_clients"), batch_size=BATCH_SIZE, wait_s=wait_s)
        try:
            load = getattr(generator, how)(**message)
        finally:
            generator.close()
        parent.send(**msgspec.to_builtins(load))


def _pin(core: int) -> None:
    if core >= 0:
        os.sched_setaffinity(0, {core})


# ------------------------------------------------------------------------------------------------------------- the sides


class Bench:
    """The sides. The load generator stays; each measurement starts a fresh manager and fresh generation servers."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self._folder = folder
        cores = sorted(os.sched_getaffinity(0))
        self.server_core, self.load_core = (cores[0], cores[-1]) if len(cores) > 1 else (-1, -1)
        self._cleanup = contextlib.ExitStack()
        (self._load,) = self._cleanup.enter_context(children(__file__, "load", core=self.load_core))
        self._answers: dict[str, str] = {}  # recorded answers of the manager, for the bare handler
        self._num_started = 0
        self.shares: dict[str, list[float]] = {"generator": [], "asyncrl": [], "bare_aiohttp": []}
        self.refused: dict[str, list[float]] = {"idle": [], "update": []}
        self.capacity = 0.0

    def close(self) -> None:
        self._cleanup.close()

    # ------------------------------------------------------------------------------------------------ capacity

    def asyncrl(self) -> dict[str, float]:
        with self._manager(version_bytes=0, core=self.server_core) as (manager, url):
            return self._capacity("asyncrl", manager, url)

    def bare_aiohttp(self) -> dict[str, float]:
        with children(__file__, "bare_aiohttp", core=self.server_core) as (server,):
            server.send(**self._answers)
            return self._capacity("bare_aiohttp", server, server.receive(_START_LIMIT_S)["url"])

    def _capacity(self, side: str, server: Child, url: str) -> dict[str, float]:
        """Requests/s at each number of clients."""
        found = {}
        for num_clients in self.args.clients:
            before = self._cpu(server)
            load = self._measure("closed_loop", url, num_clients, warm_up_s=self.args.seconds / 4)
            cpu_s = self._cpu(server) - before
            found[str(num_clients)] = load["num_requests"] / load["duration_s"]
            found[f"{num_clients}_cpu_us"] = 1e6 * cpu_s / load["num_all"]
            if num_clients == AT:
                self.shares[side].append(cpu_s / load["all_s"])
                self.shares["generator"].append(load["cpu_share"])
            if side == "asyncrl":
                self._answers |= load["samples"]
        return found

    # ------------------------------------------------------------------------------------------------- latency

    def latency(self) -> dict[str, float]:
        """Milliseconds in an open loop at half of the capacity: first idle, then equally long under updates."""
        with self._manager(version_bytes=self.args.version_mb * 1_000_000, core=-1) as (manager, url):
            rate = self.capacity / 2
            idle = self._measure(
                "open_loop", url, AT, rate=rate, warm_up_s=self.args.open_seconds / 6, duration_s=self.args.open_seconds
            )
            update, spans = self._while_updating(manager, url, rate)
        in_update = [s for due, s in update["latencies"] if any(begin <= due < end for begin, end in spans)]
        self.refused["idle"].append(idle["num_refused"] / max(1, idle["num_requests"]))
        self.refused["update"].append(update["num_refused"] / max(1, update["num_requests"]))
        found = {}
        for name, latencies in (("idle", [s for _, s in idle["latencies"]]), ("update", in_update)):
            found[f"{name}_p50_ms"] = 1e3 * percentile(latencies, 50)
            found[f"{name}_p99_ms"] = 1e3 * percentile(latencies, 99)
            found[f"{name}_max_ms"] = 1e3 * max(latencies)
        found["updates"] = len(spans)
        return found

    def _while_updating(
        self, manager: Child, url: str, rate: float
    ) -> tuple[dict[str, Any], list[tuple[float, float]]]:
        """Run the open loop while versions are published one after another.

        Returns the load, and for each version the time of its publication and the time from which all servers serve it.
        """
        spans: list[tuple[float, float]] = []
        done = threading.Event()

        def publish() -> None:
            number = 0
            while not done.wait(UPDATE_PAUSE_S):
                number += 1
                begin = time.monotonic()
                self._publish(manager, number)
                spans.append((begin, time.monotonic()))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            load = self._measure(
                "open_loop", url, AT, rate=rate, warm_up_s=self.args.open_seconds / 6, duration_s=self.args.open_seconds
            )
        finally:
            done.set()
            thread.join()
        return load, spans

    # ------------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _manager(self, version_bytes: int, *, core: int) -> Any:
        """A manager whose servers all serve version 0. It runs on `core`, or (-1) where the system places its threads."""
        self._num_started += 1
        folder = self._folder / str(self._num_started)
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            # A manager never moves servers to an older version, so each manager gets servers without a version.
            (servers,) = stack.enter_context(children(__file__, "generation_servers", core=self.load_core))
            urls = servers.receive(_START_LIMIT_S)["urls"]
            settings = {"core": core, "folder": str(folder), "servers": urls}
            (manager,) = stack.enter_context(children(__file__, "asyncrl", **settings))
            url = manager.receive(_START_LIMIT_S)["url"]
            self._current = folder
            self._file = folder / "bytes"
            self._file.write_bytes(os.urandom(1 << 20) * max(1, version_bytes >> 20))
            self._digest = xxhash.xxh3_64(self._file.read_bytes()).hexdigest()
            self._publish(manager, 0)
            yield manager, url
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def _publish(self, manager: Child, number: int) -> None:
        """Publish a version directory whose weights link to the same file. Returns when all servers serve it."""
        from asyncrl.protocol.versions import WeightVersion
        from asyncrl.weights.versions import FileEntry, Manifest, version_dir

        version = WeightVersion(1, number)
        path = version_dir(self._current, "actor", version)
        path.mkdir(parents=True)
        os.link(self._file, path / "model.safetensors")
        files = {"model.safetensors": FileEntry(bytes=self._file.stat().st_size, xxh3=self._digest)}
        manifest = Manifest(attempt=1, version=number, kind="full", files=files)
        (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        manager.send(publish=number)
        manager.receive(_START_LIMIT_S)

    def _measure(self, how: str, url: str, num_clients: int, *, warm_up_s: float, **more: float) -> dict[str, Any]:
        duration_s = more.pop("duration_s", self.args.seconds)
        self._load.send(how=how, url=url, num_clients=num_clients, warm_up_s=warm_up_s, duration_s=duration_s, **more)
        return self._load.receive(warm_up_s + duration_s + _START_LIMIT_S)

    def _cpu(self, server: Child) -> float:
        server.send()
        return float(server.receive(_START_LIMIT_S)["cpu"])


# -------------------------------------------------------------------------------------------------------------- the rest


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"seconds": 0.5, "open_seconds": 2.0, "version_mb": 20})
    options.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), help="numbers of rollout workers")
    options.add_argument("--seconds", type=float, default=2.0, help="seconds of each closed loop (default 2)")
    options.add_argument("--open-seconds", type=float, default=6.0, help="seconds of each open loop (default 6)")
    options.add_argument("--version-mb", type=int, default=200, help="size of a published version (default 200)")
    options.add_argument("--folder", default=None, help="folder of the versions (default: a temporary folder)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = Bench(args, Path(folder))
        try:
            run(args, bench)
        finally:
            bench.close()


def run(args: argparse.Namespace, bench: Bench) -> None:
    capacity = alternate(args, {"asyncrl": bench.asyncrl, "bare_aiohttp": bench.bare_aiohttp})
    quoted = str(AT if AT in args.clients else args.clients[-1])
    bench.capacity = capacity.median("asyncrl", quoted)
    say(args, f"open loop at {bench.capacity / 2:.0f} requests/s")
    latency = alternate(args, {"latency": bench.latency}, warm_up=0)
    report(args, bench, capacity, latency, quoted)


def report(args: argparse.Namespace, bench: Bench, capacity: Rounds, latency: Rounds, quoted: str) -> None:
    cases = [str(num_clients) for num_clients in args.clients]
    ratios = capacity.ratios("asyncrl", ["bare_aiohttp"], cases)
    rows = [
        [f"{case} clients", capacity.median("asyncrl", case), capacity.median("bare_aiohttp", case)]
        + [ratios["bare_aiohttp"][case], capacity.spread("asyncrl", case)]
        + [capacity.median(side, f"{case}_cpu_us") for side in ("asyncrl", "bare_aiohttp")]
        for case in cases
    ]
    table(args, "requests/s (closed loop)", ["", "asyncrl", "bare_aiohttp", "ratio", "IQR", "us CPU", "bare us"], rows)
    found = {case: latency.median("latency", case) for case in latency.cases("latency")}
    rows = [[name] + [found[f"{name}_{what}_ms"] for what in ("p50", "p99", "max")] for name in ("idle", "update")]
    table(args, f"ms at {bench.capacity / 2:.0f} requests/s (open loop)", ["", "p50", "p99", "max"], rows)
    shares = {name: round(sum(values) / max(1, len(values)), 3) for name, values in bench.shares.items()}
    refused = {name: round(sum(values) / max(1, len(values)), 4) for name, values in bench.refused.items()}
    say(args, f"share of a core at {AT} clients: {shares}; allocate requests without a ticket: {refused}")
    finish(
        args,
        name="manager",
        value=capacity.median("asyncrl", quoted),
        unit="requests/s",
        ratio=ratios,
        spread=capacity.spread("asyncrl", quoted),
        cases=capacity.summary(),
        latency={**{case: round(value, 3) for case, value in found.items()}, "rate": round(bench.capacity / 2)},
        latency_spread={case: round(latency.spread("latency", case), 3) for case in found},
        p99_update_over_idle=round(found["update_p99_ms"] / found["idle_p99_ms"], 3),
        version_mb=args.version_mb,
        cpu_shares=shares,
        refused_shares=refused,
        peers_missing=[],
    )


if __name__ == "__main__":
    if not run_part(
        {
            "asyncrl": part_asyncrl,
            "bare_aiohttp": part_bare_aiohttp,
            "generation_servers": part_generation_servers,
            "load": part_load,
        }
    ):
        sys.exit(main())
