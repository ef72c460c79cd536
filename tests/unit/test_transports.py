"""The tables of transports: the contract that each transport keeps, and that no other code compares a transport's name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_transport import TRAITS, FakeInManager, FakeInServer, sharing
from safetensors.torch import load_file

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import ExperimentConfig, GenerationConfig, NameResolveConfig, RuntimeConfig, WeightsConfig
from asyncrl.config.transports import TRANSPORTS, transport_of
from asyncrl.config.validation import problems_of_fields
from asyncrl.generation import transports as generation
from asyncrl.generation.checks import TensorSpec, check_sent, check_tensors
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.receive import StagedReceiver
from asyncrl.manager import transports as manager
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.model import transports as model
from asyncrl.model.trainer_side import HeldShare, Rank
from asyncrl.protocol.names import Names
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.weights.versions import tensor_files, version_dir, write_version
from tests.support.buckets import pack
from tests.support.decisions import PACKAGE, decisions
from tests.support.memory_names import open_names
from tests.support.paced_engine import LongTail, PacedEngine
from tests.support.services import make_services

V0, V1 = WeightVersion(1, 0), WeightVersion(1, 1)
LIMIT_S = 40.0  # for one wait, on a busy machine
TRANSFER_LIMIT_S = 6.0  # a server that dies is noticed within a sixth of it
NAMES = Names("e", "t")
SHAPES = {"embedding": (7, 3), "layer.weight": (5, 5), "layer.bias": (5,), "scale": ()}
EXPECTED = {name: TensorSpec(shape) for name, shape in SHAPES.items()}
Tensors = dict[str, torch.Tensor]
_spaces = itertools.count()


def tensors_of(version: WeightVersion) -> Tensors:
    """Random bits, also those that are no number."""
    numbers = torch.Generator().manual_seed(version.version)
    return {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=numbers).view(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def _tensors_in(path: Path) -> Tensors:
    return {name: tensor for file in tensor_files(path) for name, tensor in load_file(file).items()}


def bits(tensors: Tensors) -> dict[str, object]:
    return {name: tensor.view(torch.int16).tolist() for name, tensor in tensors.items()}


class KeepingEngine(PacedEngine):
    """Keeps the tensors of the version that it serves. `arriving` is called before each bucket and each load of files."""

    def __init__(self) -> None:
        limits = GenerationConfig(max_running_requests=2, max_queue=2, max_batch_tokens=64, num_blocks=64, page_size=16)
        super().__init__(LongTail(seed=1, prompt_tokens=3), limits, tokens_per_s=200.0)
        self.tensors: Tensors = {}
        self.sources: list[str] = []
        self.arriving: Callable[[], None] = lambda: None
        self.weights_device = torch.device("cpu")

    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        self.arriving()
        tensors = await asyncio.to_thread(_tensors_in, path)
        check_tensors(EXPECTED, [[name] for name in EXPECTED], tensor_files(path))
        count = await super().load_weights(path, version, abort_running=abort_running)
        self._keep(tensors)
        self.sources.append("files")
        return count

    async def load_tensors(self, tensors: Tensors, version: WeightVersion) -> None:
        self.check_version(version)
        self._keep(tensors)
        self._version = version
        self.sources.append("memory")

    def check_tensors(self, specs: TensorSpecs, *, complete: bool) -> None:
        check_sent(EXPECTED, [[name] for name in EXPECTED], specs, complete=complete)
        if not complete:
            self.arriving()

    def uses(self, flats: Sequence[torch.Tensor]) -> list[bool]:
        return [False for _ in flats]

    def weight_receiver(self, host: str) -> StagedReceiver:
        return StagedReceiver(cast(Any, self), host, SYSTEM_CLOCK)

    def _keep(self, tensors: Tensors) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}


class Server:
    """A generation server, in this process."""

    def __init__(self, name: str) -> None:
        self.name, self.engine, self.url = name, KeepingEngine(), ""
        self._serving = AsyncExitStack()
        self._dying: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.engine.start()
        receiver = self.engine.weight_receiver("127.0.0.1")
        http = GenerationHTTP(self.engine, engine_name="keeping", settings={}, receiver=receiver)
        self.url = await self._serving.enter_async_context(http.listening("127.0.0.1"))

    def die(self) -> None:
        self._dying.add(asyncio.get_running_loop().create_task(self.close()))

    async def close(self) -> None:
        await self._serving.aclose()


class Run:
    """Trainer, manager and servers. The files of version 0 are published, and servers `a` and `b` serve it."""

    def __init__(self, transport: str, folder: Path, opened: AsyncExitStack) -> None:
        self.traits, self._transport, self._folder, self._opened = transport_of(transport), transport, folder, opened
        self.servers: dict[str, Server] = {}
        (folder / "model").mkdir()

    async def start(self) -> None:
        opened = self._opened
        names = NameResolveConfig(endpoints=[f"memory://transports-{next(_spaces)}"])
        info = WorkerInfo("model_worker", 0, 1, "e", "t", 1, str(self._folder), 1, names, RuntimeConfig())
        services = make_services(info)
        resolver = opened.enter_context(open_names(names))
        lease = resolver.grant_lease(LIMIT_S).id
        directory = Directory(resolver, NAMES, lease=lease, board=services.board, limit_s=LIMIT_S)
        weights = WeightsConfig(transport=self._transport, broadcast_timeout_s=TRANSFER_LIMIT_S)
        rank = Rank(info, True, weights, torch.device("cpu"), directory, services)
        self.trainer = await opened.enter_async_context(model.KINDS[self._transport](rank))
        table = ServerTable("round_robin", dead_after_s=LIMIT_S)
        self.fleet = Fleet(
            table,
            UpdatePlan(table, update_timeout_s=LIMIT_S, offers=manager.KINDS[self._transport].offers()),
            services,
            session=await opened.enter_async_context(open_session(max_connections=0)),
            path_of=lambda version: version_dir(self._folder, "actor", version),
            probe_every_s=LIMIT_S,
            probe_limit_s=LIMIT_S,
            verify_limit_s=LIMIT_S,
            transport=self._transport,
            transfer_limit_s=TRANSFER_LIMIT_S,
        )
        opened.push_async_callback(self.fleet.close)
        for loop in (self.fleet.update_loop(), self.fleet.verify_loop()):
            opened.callback(asyncio.create_task(loop).cancel)
        if self.traits.from_memory:
            self.fleet.trainer_at(resolver.get(NAMES.weight_sender("actor")))
        for name in ("a", "b"):
            await self.add(name)
        self.publish(V0)
        await self.until(a=0, b=0)

    async def add(self, name: str) -> None:
        server = self.servers[name] = Server(name)
        await server.start()
        self._opened.push_async_callback(server.close)
        self.fleet.announce(name, server.url)

    def offer(self, tensors: Tensors, *, is_torn: bool = False) -> None:
        """Send version 1: from memory, or as files. is_torn: the bytes that arrive are not those of the trainer."""
        if not self.traits.from_memory:
            self.publish(V1, tensors, is_torn=is_torn)
            return
        held = HeldShare(V1, pack(((name, tensor, tensor.dtype) for name, tensor in tensors.items()), 40))
        assert len(held.buckets) > 2
        if is_torn:
            held.digests.extend(asyncio.get_running_loop().create_future() for _ in held.buckets)
            for digest in held.digests:
                digest.set_result("0" * 16)
        self.trainer.hold(held)
        self.fleet.hold(str(V1))

    def publish(self, version: WeightVersion, tensors: Tensors | None = None, *, is_torn: bool = False) -> None:
        """Write the files of a version, and publish it."""
        path = version_dir(self._folder, "actor", version)
        given = tensors_of(version) if tensors is None else tensors
        write_version(path, given.items(), source_dir=self._folder / "model", version=version, fsync=False)
        if is_torn:
            (file,) = path.glob("*.safetensors")
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        self.fleet.publish(str(version))

    async def until(self, **versions: int | None) -> None:
        """Wait until the servers serve these versions; None: nothing, after a version was refused."""

        def found() -> dict[str, int | None]:
            servers = {name: self.fleet.table.servers[name] for name in versions}
            return {
                name: server.version.version if server.version is not None and server.state.value == "healthy" else None
                for name, server in servers.items()
            }

        async def wait() -> None:
            while found() != versions:
                self.fleet.news.clear()
                await self.fleet.news.wait()

        try:
            await asyncio.wait_for(wait(), LIMIT_S)
        except TimeoutError:
            raise AssertionError(f"{found()} instead of {versions}") from None

    async def until_told(self, name: str, why: str) -> None:
        """Wait until the manager knows why a server serves nothing."""
        await until(lambda: why in self.fleet.table.servers[name].reason)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not happened():  # noqa: ASYNC110 - no event tells of a log record
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(transport: str, folder: Path) -> AsyncIterator[Run]:
    async with AsyncExitStack() as opened:
        run = Run(transport, folder, opened)
        await run.start()
        yield run


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "fake", TRAITS)
    monkeypatch.setitem(model.KINDS, "fake", sharing)
    monkeypatch.setitem(manager.KINDS, "fake", FakeInManager)
    monkeypatch.setitem(generation.KINDS, "fake", FakeInServer)


CONTRACT = pytest.mark.parametrize("transport", ["disk", "broadcast", "fake"])


@CONTRACT
async def test_all_tensors_arrive_bit_for_bit_also_at_a_late_server(transport: str, tmp_path: Path) -> None:
    async with running(transport, tmp_path) as run:
        run.offer(tensors_of(V1))
        await run.until(a=1, b=1)
        await run.add("late")
        await run.until(late=1)
        for server in run.servers.values():
            assert bits(server.engine.tensors) == bits(tensors_of(V1))
            from_memory = run.traits.from_memory
            late = server.name == "late" and not from_memory
            assert server.engine.sources == (["files"] if late else ["files", "memory" if from_memory else "files"])


@CONTRACT
async def test_a_server_that_dies_midway_is_named_and_the_other_one_gets_the_version(
    transport: str, tmp_path: Path
) -> None:
    async with running(transport, tmp_path) as run:
        run.servers["b"].engine.arriving = run.servers["b"].die
        run.offer(tensors_of(V1))
        await run.until(a=1)
        assert bits(run.servers["a"].engine.tensors) == bits(tensors_of(V1))
        await run.until_told("b", f"loading {V1} failed")


@CONTRACT
async def test_a_torn_transfer_is_refused_and_named(
    transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(transport, tmp_path) as run:
        run.offer(tensors_of(V1), is_torn=True)
        await until(lambda: "checksum" in caplog.text)
        for server in run.servers.values():
            assert bits(server.engine.tensors) == bits(tensors_of(V0))
        if run.traits.from_memory:
            for name in ("a", "b"):
                await run.until_told(name, "checksums")
            run.publish(V1)  # the files are whole
            await run.until(a=1, b=1)


@CONTRACT
@pytest.mark.parametrize("wrong", ["shape", "missing"])
async def test_tensors_of_a_wrong_size_are_refused_and_named(transport: str, wrong: str, tmp_path: Path) -> None:
    async with running(transport, tmp_path) as run:
        tensors = tensors_of(V1)
        if wrong == "shape":
            tensors["layer.bias"] = torch.zeros(6, dtype=torch.bfloat16)
        else:
            del tensors["layer.bias"]
        run.offer(tensors)
        for server in run.servers.values():
            await run.until_told(server.name, "layer.bias")
            assert bits(server.engine.tensors) == bits(tensors_of(V0))


def test_each_transport_has_a_row_in_each_table() -> None:
    assert list(TRANSPORTS) == list(model.KINDS) == list(manager.KINDS) == list(generation.KINDS)


def test_the_checks_of_a_config_follow_the_traits() -> None:
    def remedies(transport: str, mode: str) -> str:
        config = ExperimentConfig(mode=mode, weights=WeightsConfig(transport=transport))
        return "; ".join(remedy for name, _, remedy in problems_of_fields(config) if name == "weights.transport")

    needs_both = "mode=rollout_only has only one of them; use disk"
    assert needs_both in remedies("fake", "rollout_only")
    assert needs_both not in remedies("fake", "async")
    assert needs_both not in remedies("disk", "rollout_only")


def test_no_other_code_compares_the_name_of_a_transport() -> None:
    """A decision that depends on the transport reads a trait, so that a new transport needs no change there."""
    tables = {PACKAGE / folder / "transports.py" for folder in ("config", "model", "manager", "generation")}
    assert decisions({*TRANSPORTS}, tables) == set()
