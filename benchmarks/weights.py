"""Weights from the trainer to serving, over the disk and over the network, beside moving the same bytes without further work.

    python benchmarks/weights.py [--rounds 5] [--sizes 64 256 1024] [--receivers 1 4 16] [--hosts 1 3 7] [--hosts-mb 256]
                                 [--folder DIR] [--write-baseline]
    python benchmarks/weights.py --adapter       # a version of an adapter beside a full one

asyncrl: from the call that writes a version (shards, checksums, fsync, rename) until the server serves it. The gserver manager
verifies the version and has the generation server load and echo it. Manager and server are real, in their own processes; the
server holds a Qwen2 model of that size in the transformers engine. Warm: not the first version.
delta_1, delta_3, delta_100: the same for the version after it, in which that many percent of the elements changed, as the exporter
writes it with weights.full_every: the trainer finds the changes, and the server changes its model in memory. At 100 % the version
is full. Deltas are for --dtype bfloat16.
copy_fsync: the version's files copied one by one to another folder, each synced.
broadcast: weights.transport=broadcast; from the snapshot in the trainer's memory, through the same manager and server, to the echo.
raw_gloo: one broadcast of the same bytes in torch.distributed's gloo, between two otherwise idle processes.
receivers: one broadcast of the smallest size to this many servers, from the trainer's memory until all have loaded, without a
manager. frozen: the same with one of them stopped (SIGSTOP), until the others have loaded in a second broadcast; and the longest
time between two steps of a computation in the trainer's process meanwhile.
hosts: one version of hosts-mb to this many hosts without the run's folder: processes with folders of their own, over loopback. The
ratio is the time until the last one has it, over one plain copy of the files through a socket. source_copies: how often the source
has sent the version. On loopback all hosts share the cores, so the ratio grows with their number; source_copies does not.

adapter: with train.lora.rank=16 on a base of that size a version is an adapter; beside it a full version of the same model, which a
second manager and server serve. `value` is then the adapter's seconds at the largest size.

`value` is asyncrl's seconds per GB at the largest size, over the disk. `phases` splits them: write (trainer), verify (manager),
load (server: verify again, copy into the model, echo), rest (messages between them).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from common import (
    Child,
    ChildFailed,
    Numbers,
    Parent,
    Rounds,
    alternate,
    children,
    finish,
    parser,
    run_part,
    say,
    seen_manager,
    table,
    worker_info,
)

SIZES_MB = (64, 256, 1024)
PERCENTS = (1, 3, 100)
DELTAS = tuple(f"delta_{percent}" for percent in PERCENTS)
RECEIVERS = (1, 4, 16)
HOSTS = (1, 3, 7)
SIDES = ("asyncrl", *DELTAS, "copy_fsync", "broadcast", "raw_gloo")
PHASES = ("write", "verify", "load", "rest")
_START_LIMIT_S = 120.0
_PUBLISH_LIMIT_S = 120.0
_RANK = 16  # of adapters
_FROZEN_LIMIT_S = 30.0  # the default of weights.broadcast_timeout_s
_POLL_S = 0.001
_SCRATCH_BYTES = 1 << 24


# ------------------------------------------------------------------------------------------------------ parts: manager, server


def part_server(parent: Parent, *, folder: str, model: str, dtype: str, index: int = 0, rank: int = 0) -> None:
    """A generation server with the transformers engine, configured as by the launcher. rank: of adapters; 0: versions are full."""
    from asyncrl.config.processes import GenerationServerConfig
    from asyncrl.config.schema import GenerationConfig, LoraConfig
    from asyncrl.generation.worker import GenerationServer
    from asyncrl.protocol.versions import WeightVersion
    from tests.support.memory_names import memory_system, open_names

    info = dataclasses.replace(worker_info("generation_server", folder), index=index)
    server = GenerationServer(
        GenerationServerConfig(
            worker=info,
            engine="transformers",
            model_path=model,
            tokenizer_path=model,
            generation=GenerationConfig(num_blocks=64, dtype=dtype),
            torch_threads=1,
            lora=LoraConfig(rank=rank) if rank else None,
        ),
        memory_system(),
    )
    resolver = open_names(info.name_resolve)

    def obey() -> None:
        # Act as the trainer, which is in another process: every version up to this one counts as published
        resolver.add(server.names.weights_held("actor"), str(WeightVersion(1, 1 << 30)))
        parent.send(url=resolver.wait(server.names.generation_server(index), _START_LIMIT_S))
        while parent.receive() is not None:
            pass
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    asyncio.run(server.main())


def part_manager(parent: Parent, *, folder: str, server: str, sender: str, **_: Any) -> None:
    """The part that runs the gserver manager. For each version number that it receives, it publishes the version as the trainer
    would, waits until the server serves it, and answers with the seconds that verification and loading took."""
    from asyncrl.config.processes import GserverManagerConfig
    from asyncrl.config.schema import ManagerConfig
    from asyncrl.manager.worker import ManagerFiles
    from asyncrl.protocol.versions import WeightVersion
    from tests.support.memory_names import open_names

    class TimedFiles(ManagerFiles):
        verify_s = 0.0

        def verify(self, path: Path, expected: WeightVersion) -> Any:
            start = time.monotonic()
            try:
                return super().verify(path, expected)
            finally:
                self.verify_s = time.monotonic() - start

    info = worker_info("gserver_manager", folder)
    config = GserverManagerConfig(
        worker=info, manager=ManagerConfig(), role="actor", num_heads=1, batch_size=64, num_rollout_workers=1,
        transport="broadcast",
    )  # fmt: skip
    files = TimedFiles(config)
    manager = seen_manager(config, files)
    resolver = open_names(info.name_resolve)
    resolver.add(manager.names.generation_server(0), server)

    def obey() -> None:
        resolver.wait(manager.names.gserver_manager(), _START_LIMIT_S)
        seen = manager.seen.result(_START_LIMIT_S)
        parent.send(ready=True)
        resolver.add(manager.names.weight_sender("actor"), sender)
        while (message := parent.receive()) is not None:
            version = WeightVersion(1, message["version"])
            before = seen.fleet.update_seconds["generation_server/0"]
            key = manager.names.weights_held if message["in_memory"] else manager.names.model_version
            resolver.add(key("actor"), str(version), replace=True)
            while seen.table.served < version.version:  # bounded by the benchmark
                time.sleep(_POLL_S)
            load_s = seen.fleet.update_seconds["generation_server/0"] - before
            parent.send(served_at=time.monotonic(), verify=files.verify_s, load=load_s)
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    asyncio.run(manager.main())


def part_raw_receiver(parent: Parent, *, address: str, num_bytes: int) -> None:
    """The receiving end of a raw broadcast, once per message."""
    import torch

    torch.set_num_threads(1)
    group, buffer = raw_group(address, 1), torch.zeros(num_bytes, dtype=torch.uint8)
    while parent.receive() is not None:
        group.broadcast([buffer]).wait()
        parent.send(received_at=time.monotonic())


def part_host(parent: Parent, *, folder: str, source: str, run: str) -> None:
    """A host without the run's folder. For each message it fetches a version, or takes a plain copy from a port."""
    import logging

    from asyncrl.protocol.versions import WeightVersion
    from asyncrl.weights.fetch import WeightFetcher

    logging.basicConfig()
    fetcher = WeightFetcher(Path(folder), run, host="127.0.0.1", logger=logging.getLogger())
    parent.send(ready=True)
    while (message := parent.receive()) is not None:
        if (port := message.get("copy")) is not None:
            with socket.create_connection(("127.0.0.1", port)) as sock, (Path(folder) / "copy").open("wb") as file:
                while some := sock.recv(1 << 20):
                    file.write(some)
            parent.send(done=True)
        else:
            before = fetcher.fetched_bytes.copy()
            version = WeightVersion(1, message["version"])
            fetcher.fetch(Path("/no/such/folder"), version, source, _PUBLISH_LIMIT_S)
            parent.send(fetched=(fetcher.fetched_bytes - before)[f"{source}/{version}"])
    fetcher.close()


def raw_group(address: str, rank: int) -> Any:
    """A gloo group of two. Rank 0 serves the store at the address."""
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo, TCPStore

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=_START_LIMIT_S)
    store = TCPStore(host, int(port), is_master=rank == 0, timeout=limit, wait_for_workers=False)
    return ProcessGroupGloo(store, rank, 2, limit)


# ------------------------------------------------------------------------------------------------------------- the sides


class Trainer:
    """A sender of weights on a thread with its own event loop, like that of rank 0 of the training side."""

    def __init__(self) -> None:
        import torch

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._opened = AsyncExitStack()
        self.sender, self.url = self.run(self._open(torch.device("cpu")))

    async def _open(self, device: Any) -> tuple[Any, str]:
        from asyncrl.config.schema import WeightsConfig
        from asyncrl.model.broadcast import ServerClient, WeightSender
        from asyncrl.model.held_weights import ShareReader
        from asyncrl.runtime.http_client import open_session
        from tests.support.services import make_services

        async def url_of(worker: int) -> str:
            raise ChildFailed("this trainer has one rank")

        options = WeightsConfig(transport="broadcast")
        self.bucket_bytes = options.bucket_bytes
        self.session = session = await self._opened.enter_async_context(open_session(max_connections=0))
        sender = WeightSender(
            ServerClient(session),
            ShareReader(session, url_of, host="127.0.0.1", device=device, backend="gloo"),
            name="benchmark",
            host="127.0.0.1",
            device=device,
            options=options,
            services=make_services(logger="benchmark"),
        )
        return sender, await self._opened.enter_async_context(sender.serving())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PUBLISH_LIMIT_S)

    async def hold(self, held: Any) -> None:
        self.sender.hold(held)

    def close(self) -> None:
        self.run(self._opened.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)


class Publisher:
    """The trainer's side at one size, with a manager and a server that wait for versions."""

    def __init__(self, folder: Path, model: Path, trainer: Trainer, manager: Child, rank: int = 0) -> None:
        """rank: of adapters; 0: versions are full."""
        from asyncrl.weights.versions import side_files

        self._folder, self._trainer, self._manager = folder, trainer, manager
        if rank:
            self._tensors, self._sides = adapter_of(model, rank)
        else:
            self._tensors, self._buckets = snapshot_of(model, trainer)
            self._sides = side_files(model)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self._tensors)
        self._version = 0
        self._manifest: Any = None  # of the latest version on disk
        self.phases: dict[str, dict[str, list[float]]] = {
            side: {phase: [] for phase in PHASES} for side in ("asyncrl", *DELTAS)
        }
        self.written_bytes: dict[str, int] = {}  # by side

    def asyncrl(self) -> float:
        """Seconds until the next version, written to disk, is served."""
        return self._on_disk("asyncrl", dict(self._tensors), None)

    def delta(self, percent: int) -> float:
        """The same for a version with that many percent of the elements changed since the latest one."""
        import torch

        old, new = dict(self._tensors), {}
        bits = {2: torch.int16, 4: torch.int32}
        for name, tensor in old.items():
            new[name] = tensor.clone()
            flat = new[name].view(-1).view(bits[tensor.element_size()])
            flat ^= (torch.rand(len(flat)) * 100 < percent).to(flat.dtype)
        total_s = self._on_disk(f"delta_{percent}", new, old)
        self._tensors = list(new.items())
        return total_s

    def _on_disk(self, side: str, tensors: dict[str, Any], old: dict[str, Any] | None) -> float:
        """Write the next version as model/export.py does, and have it served. old: the tensors of the version before."""
        from asyncrl.protocol.versions import WeightVersion
        from asyncrl.weights.delta import DeltaForm
        from asyncrl.weights.versions import (
            commit_version,
            prune_versions,
            role_dir,
            version_dir,
            write_part,
        )

        version = WeightVersion(1, self._version)
        start = time.monotonic()
        path = version_dir(self._folder, "actor", version)
        changes = DeltaForm().encode(old, tensors) if old is not None else None
        others = {DeltaForm().file_name(0): changes} if changes is not None else None
        files = write_part(path, tensors.items() if changes is None else (), others=others)
        self._manifest = commit_version(path, files, sides=self._sides, version=version, base=self._manifest)
        written = time.monotonic()
        self._manager.send(version=version.version, in_memory=False)
        told = self._manager.receive(_PUBLISH_LIMIT_S)
        total_s = told["served_at"] - start
        spent = {"write": written - start, "verify": told["verify"], "load": told["load"]}
        for phase, seconds in {**spent, "rest": total_s - sum(spent.values())}.items():
            self.phases[side][phase].append(seconds)
        self.written_bytes[side] = sum(file.stat().st_size for file in path.iterdir())
        self._version += 1
        self._path = path
        prune_versions(role_dir(self._folder, "actor"), keep=1, in_use=[])
        return total_s

    def broadcast(self) -> float:
        """Seconds until the next version is served, sent from memory."""
        from asyncrl.model.trainer_side import HeldShare
        from asyncrl.protocol.versions import WeightVersion

        version = WeightVersion(1, self._version)
        start = time.monotonic()
        self._trainer.run(self._trainer.hold(HeldShare(version, self._buckets)))
        self._manager.send(version=version.version, in_memory=True)
        told = self._manager.receive(_PUBLISH_LIMIT_S)
        self._version += 1
        return float(told["served_at"] - start)

    def raw_gloo(self) -> float:
        """Seconds of one broadcast of the same bytes."""
        self._receiver.send(go=True)
        start = time.monotonic()
        self._group.broadcast([self._bytes]).wait()
        return float(self._receiver.receive(_PUBLISH_LIMIT_S)["received_at"] - start)

    @contextlib.contextmanager
    def raw_receiver(self) -> Iterator[None]:
        """A second process and a gloo group with it."""
        import torch

        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        # The actual weights: untouched zeros would all map to one page and cost nothing to read.
        self._bytes = torch.cat([bucket.flat for bucket in self._buckets])
        with children(__file__, "raw_receiver", address=address, num_bytes=self.num_bytes) as (self._receiver,):
            self._group = raw_group(address, 0)
            yield

    def with_warm_pages(self, measure: Callable[[], float]) -> float:
        """Measure after a scratch file has given the kernel as many free pages as the version's files need.

        Writing the scratch file is not measured. A virtual machine is slow to regain pages that it has returned to its host (3 s
        per GB were seen), which would count against the side that runs first.
        """
        scratch = self._folder / "scratch"
        with scratch.open("wb") as file:
            for _ in range(-(-self.num_bytes // _SCRATCH_BYTES)):
                file.write(bytes(_SCRATCH_BYTES))
        scratch.unlink()
        return measure()

    def copy_fsync(self) -> float:
        """Seconds of copying and syncing the files of the latest version."""
        target = self._folder / "copy"
        target.mkdir()
        files = sorted(self._path.iterdir())
        start = time.monotonic()
        for file in files:
            shutil.copyfile(file, target / file.name)
            with (target / file.name).open("rb") as copied:
                os.fsync(copied.fileno())
        took_s = time.monotonic() - start
        shutil.rmtree(target)
        return took_s


def snapshot_of(model: Path, trainer: Trainer) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Copies of a model's tensors, like a trainer's snapshot (load_file returns the mapped file), and the same in buckets."""
    from safetensors.torch import load_file

    from tests.support.buckets import pack

    tensors = [(name, tensor.clone()) for name, tensor in load_file(model / "model.safetensors").items()]
    return tensors, pack(((name, tensor, tensor.dtype) for name, tensor in tensors), trainer.bucket_bytes)


def adapter_of(model: Path, rank: int) -> tuple[list[tuple[str, Any]], dict[str, bytes]]:
    """The tensors of an adapter of this model, and its side file."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.architectures.adapters import add_adapters
    from asyncrl.config.schema import LoraConfig
    from asyncrl.weights.adapter import ABOUT, about

    lora = LoraConfig(rank=rank)
    adapters = add_adapters(AutoModelForCausalLM.from_pretrained(model), lora, str(model))
    tensors = [(adapters.names[name], torch.randn(shape)) for name, shape in adapters.shapes.items()]
    return tensors, {ABOUT: about(lora, str(model), adapters.layers)}


class Receivers:
    """The trainer's side, and servers without a manager. All servers have a version."""

    def __init__(self, folder: Path, model: Path, trainer: Trainer, servers: list[Child], urls: list[str]) -> None:
        from asyncrl.protocol.versions import WeightVersion
        from asyncrl.weights.versions import version_dir, write_version

        self._trainer, self._servers, self._urls, self._version = trainer, servers, urls, 0
        tensors, self._buckets = snapshot_of(model, trainer)
        self.num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        version = WeightVersion(1, 0)
        path = version_dir(folder, "actor", version)
        write_version(path, tensors, source_dir=model, version=version)
        self._post(urls, "update_weights_from_disk", {"model_path": str(path), "weight_version": str(version)})

    def _post(self, urls: Sequence[str], path: str, body: dict[str, str]) -> None:
        async def post(url: str) -> None:
            async with self._trainer.session.post(f"{url}/{path}", data=json.dumps(body)) as response:
                if response.status != 200:
                    raise ChildFailed(f"{path}: {await response.text()}")

        async def post_all() -> None:
            await asyncio.gather(*map(post, urls))

        self._trainer.run(post_all())

    def broadcast(self, *, freeze: bool = False) -> float:
        """Seconds of the next version's broadcast. freeze: stop the last server first; it must be the only one that fails."""
        from asyncrl.model.trainer_side import HeldShare
        from asyncrl.protocol.versions import WeightVersion
        from asyncrl.protocol.weight_updates import BroadcastRequest, BroadcastTarget

        self._version += 1
        version = WeightVersion(1, self._version)
        self._post(self._urls, "pause_generation", {"mode": "abort"})
        self._trainer.run(self._trainer.hold(HeldShare(version, self._buckets)))
        targets = [BroadcastTarget(server=str(number), url=url) for number, url in enumerate(self._urls)]
        request = BroadcastRequest(weight_version=str(version), targets=targets, limit_s=_FROZEN_LIMIT_S)
        if freeze:
            os.kill(self._servers[-1].pid, signal.SIGSTOP)
        start = time.monotonic()
        reply = self._trainer.run(self._trainer.sender.broadcast(request))
        took_s = time.monotonic() - start
        if freeze:
            os.kill(self._servers[-1].pid, signal.SIGCONT)
        expected = {str(len(self._urls) - 1)} if freeze else set()
        if set(reply.errors) != expected:
            raise ChildFailed(f"servers {sorted(reply.errors)} failed: {reply.errors}")
        return took_s


class Training:
    """A computation in the trainer's process, as long as this is entered: the longest time between two of its steps."""

    longest_s = 0.0

    def __enter__(self) -> Training:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        import torch

        matrix, last = torch.rand(256, 256), time.monotonic()
        while not self._stop.is_set():
            matrix @ matrix
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now


def measure_receivers(args: argparse.Namespace, folder: Path, count: int) -> dict[str, float]:
    """Broadcasts of the smallest size to `count` servers, and with two or more servers one broadcast with a frozen server."""
    model = folder / "model"
    make_model(model, args.sizes[0], args.dtype)
    common = {"folder": str(folder), "model": str(model), "dtype": args.dtype}
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(children(__file__, "server", index=index, **common))[0] for index in range(count)
        ]
        urls = [server.receive(_START_LIMIT_S)["url"] for server in servers]
        trainer = Trainer()
        opened.callback(trainer.close)
        side = Receivers(folder, model, trainer, servers, urls)
        side.broadcast()  # the servers join
        taken = [side.broadcast() for _ in range(args.rounds)]
        found = {"s_per_gb": round(statistics.median(taken) / side.num_bytes * 1e9, 4)}
        if count > 1:
            with Training() as training:
                found["frozen_s"] = round(side.broadcast(freeze=True), 3)
            found["longest_step_s"] = round(training.longest_s, 4)
        return found


def measure_hosts(args: argparse.Namespace, folder: Path, count: int) -> dict[str, float]:
    """Time of a version to `count` hosts over that of a plain copy, and how often the source has sent it. Medians of rounds."""
    from asyncrl.protocol.versions import WeightVersion
    from asyncrl.weights.fetch import WeightFiles
    from asyncrl.weights.versions import publish_folder

    actor, model = folder / "actor", folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(os.urandom(args.hosts_mb * 1_000_000))
    files = WeightFiles(actor, host="127.0.0.1")
    source, ratios, copies = files.start(), [], []
    with contextlib.ExitStack() as opened:
        opened.callback(files.close)
        hosts = [
            opened.enter_context(children(__file__, "host", folder=str(folder), source=source, run=f"h{number}"))[0]
            for number in range(count)
        ]
        for host in hosts:
            host.receive(_START_LIMIT_S)
        for number in range(args.rounds):
            copy_s = plain_copy(hosts[0], model / "model.safetensors")
            version = WeightVersion(1, number)
            publish_folder(actor / str(version), source_dir=model, version=version, fsync=False)
            began = time.monotonic()
            for host in hosts:
                host.send(version=number)
            sent = sum(host.receive(_PUBLISH_LIMIT_S)["fetched"] for host in hosts)
            ratios.append((time.monotonic() - began) / copy_s)
            copies.append(sent / args.hosts_mb / 1e6)
            shutil.rmtree(actor / str(version))
    return {"ratio": round(statistics.median(ratios), 2), "source_copies": round(statistics.median(copies), 2)}


def plain_copy(host: Child, path: Path) -> float:
    """Seconds of one copy of a file to a host, through a socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener, path.open("rb") as file:
        began = time.monotonic()
        host.send(copy=listener.getsockname()[1])
        with listener.accept()[0] as connection:
            connection.sendfile(file)
        host.receive(_PUBLISH_LIMIT_S)
        return time.monotonic() - began


def make_model(folder: Path, size_mb: int, dtype: str) -> None:
    """A Qwen2 model of about size_mb with random weights, and a tokenizer."""
    import torch

    from asyncrl.testing.tiny import make_tiny_model

    hidden = 512 if size_mb < 128 else 1024
    layer_bytes = 16 * hidden * hidden * getattr(torch, dtype).itemsize
    model = make_tiny_model(
        folder,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=max(1, round(size_mb * 1e6 / layer_bytes)),
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64,
    )
    if dtype != "float32":
        model.to(getattr(torch, dtype)).save_pretrained(folder)


@contextlib.contextmanager
def publisher(args: argparse.Namespace, folder: Path, size_mb: int, rank: int = 0) -> Iterator[Publisher]:
    """All processes for one size, ready to serve versions. rank: of adapters; 0: versions are full."""
    model = folder / "model"
    make_model(model, size_mb, args.dtype)
    common = {"folder": str(folder), "model": str(model), "dtype": args.dtype}
    with children(__file__, "server", rank=rank, **common) as (server,):
        url = server.receive(_START_LIMIT_S)["url"]
        trainer = Trainer()
        with children(__file__, "manager", folder=str(folder), server=url, sender=trainer.url) as (manager,):
            manager.receive(_START_LIMIT_S)
            yield Publisher(folder, model, trainer, manager, rank)
        trainer.close()


def measure_adapters(args: argparse.Namespace, folder: str) -> None:
    """Versions of an adapter beside full versions, of the same models."""
    cases: dict[str, dict[str, float]] = {}
    ratio, spread = {}, 0.0
    for size_mb in args.sizes:
        case, root = f"{size_mb}MB", Path(folder) / str(size_mb)
        with publisher(args, root / "full", size_mb) as full, publisher(args, root / "adapter", size_mb, _RANK) as own:
            rounds = alternate(
                args,
                {
                    "full": lambda full=full: {"s": full.with_warm_pages(full.asyncrl)},
                    "adapter": lambda own=own: {"s": own.with_warm_pages(own.asyncrl)},
                },
            )
            bytes_of = {name: side.written_bytes["asyncrl"] for name, side in (("full", full), ("adapter", own))}
            over = bytes_of["adapter"] / own.num_bytes
        shutil.rmtree(root)
        ratio[case], spread = rounds.ratio("adapter", "full", "s"), rounds.spread("adapter", "s")
        cases[case] = {f"{name}_s": round(rounds.median(name, "s"), 4) for name in bytes_of}
        cases[case] |= {f"{name}_bytes": size for name, size in bytes_of.items()}
        cases[case]["bytes_per_byte_of_matrices"] = round(over, 4)
    columns = list(next(iter(cases.values())))
    table(args, "versions", ["", *columns], [[case, *one.values()] for case, one in cases.items()])
    value = cases[f"{args.sizes[-1]}MB"]["adapter_s"]
    finish(
        args,
        name="weights",
        variant="adapter",
        value=value,
        unit="s",
        ratio={"full": ratio},
        spread=spread,
        cases=cases,
    )


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"sizes": [8], "receivers": [1, 2], "hosts": [3], "hosts_mb": 8})
    options.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MB), help="MB of weights")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options.add_argument(
        "--folder", default=None, help="folder on the file system to measure (default: a temporary folder)"
    )
    options.add_argument("--receivers", type=int, nargs="+", default=list(RECEIVERS), help="numbers of servers")
    options.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS), help="numbers of hosts that fetch")
    options.add_argument("--hosts-mb", type=int, default=256, help="MB of the version that hosts fetch")
    options.add_argument("--adapter", action="store_true", help="measure versions of an adapter beside full ones only")
    args = options.parse_args()
    if args.adapter:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure_adapters(args, folder)
        return
    found: dict[int, tuple[Rounds, Publisher]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for size_mb in args.sizes:
            say(args, f"{size_mb} MB of {args.dtype} in {folder}")
            with publisher(args, Path(folder) / str(size_mb), size_mb) as side, side.raw_receiver():
                sides: dict[str, Callable[[], Numbers]] = {
                    "asyncrl": lambda side=side: {"s": side.with_warm_pages(side.asyncrl)},
                    # Right after a full version: after a broadcast the server would load the whole chain
                    **{
                        f"delta_{percent}": lambda side=side, percent=percent: {
                            "s": side.with_warm_pages(lambda: side.delta(percent))
                        }
                        for percent in PERCENTS
                    },
                    "copy_fsync": lambda side=side: {"s": side.with_warm_pages(side.copy_fsync)},
                    "broadcast": lambda side=side: {"s": side.broadcast()},
                    "raw_gloo": lambda side=side: {"s": side.raw_gloo()},
                }
                found[size_mb] = (alternate(args, sides), side)
            shutil.rmtree(Path(folder) / str(size_mb))
        spread = {}
        for count in args.receivers:
            say(args, f"{count} receivers of {args.sizes[0]} MB")
            spread[str(count)] = measure_receivers(args, Path(folder) / "receivers", count)
            shutil.rmtree(Path(folder) / "receivers")
        hosts = {}
        for count in args.hosts:
            say(args, f"{count} hosts fetch {args.hosts_mb} MB")
            hosts[str(count)] = measure_hosts(args, Path(folder) / "hosts", count)
            shutil.rmtree(Path(folder) / "hosts")
    report(args, found, spread, hosts)


def report(
    args: argparse.Namespace,
    found: dict[int, tuple[Rounds, Publisher]],
    spread: dict[str, dict[str, float]],
    hosts: dict[str, dict[str, float]],
) -> None:
    rows, shares, cases, phases, deltas = [], [], {}, {}, {}
    ratio: dict[str, dict[str, float]] = {"copy_fsync": {}, "raw_gloo": {}}
    for size_mb, (rounds, side) in found.items():
        gb, case = side.num_bytes / 1e9, f"{size_mb}MB"
        ratio["copy_fsync"][case] = rounds.ratio("asyncrl", "copy_fsync", "s")
        ratio["raw_gloo"][case] = rounds.ratio("broadcast", "raw_gloo", "s")
        # A warm-up round, if any, is not counted here either.
        by_side = {
            name: {phase: statistics.median(values[-args.rounds :]) / gb for phase, values in spent.items()}
            for name, spent in side.phases.items()
        }
        counted = by_side["asyncrl"]
        phases[case] = {phase: round(seconds, 4) for phase, seconds in counted.items()}
        deltas[case] = {
            name: {"bytes": side.written_bytes[name], **{phase: round(s, 4) for phase, s in by_side[name].items()}}
            for name in DELTAS
        }
        shares.append([case, *(100 * side.written_bytes[name] / side.num_bytes for name in DELTAS)])
        medians = {f"{name}_s_per_gb": round(rounds.median(name, "s") / gb, 4) for name in SIDES}
        cases[case] = medians | {f"{name}_iqr": round(rounds.spread(name, "s") / gb, 4) for name in SIDES}
        rows.append([case, *medians.values(), ratio["copy_fsync"][case], ratio["raw_gloo"][case], *counted.values()])
    table(args, "seconds per GB", ["", *SIDES, "ratio disk", "ratio network", *PHASES], rows)
    table(args, "bytes of a version, in % of all tensors", ["", *DELTAS], shares)
    columns = ["s_per_gb", "frozen_s", "longest_step_s"]
    table(
        args,
        "receivers",
        ["", *columns],
        [[count, *(one.get(column, "") for column in columns)] for count, one in spread.items()],
    )
    table(
        args,
        "hosts that fetch",
        ["", "ratio", "source copies"],
        [[count, *one.values()] for count, one in hosts.items()],
    )
    ratio["plain_copy"] = {f"{count} hosts": one["ratio"] for count, one in hosts.items()}
    last = f"{args.sizes[-1]}MB"
    finish(
        args,
        name="weights",
        value=cases[last]["asyncrl_s_per_gb"],
        unit="s/GB",
        ratio=ratio,
        spread=cases[last]["asyncrl_iqr"],
        cases=cases,
        phases=phases,
        deltas=deltas,
        receivers=spread,
        hosts=hosts,
        dtype=args.dtype,
        peers_missing=[],
    )


if __name__ == "__main__":
    if not run_part(
        {"server": part_server, "manager": part_manager, "raw_receiver": part_raw_receiver, "host": part_host}
    ):
        sys.exit(main())
