"""Weights over the network, with real servers and gloo: equal to those from disk. A server that dies, hangs or refuses loads from
disk, and delays neither training nor the other servers."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from asyncrl.config.processes import GenerationServerConfig, WorkerInfo
from asyncrl.config.schema import ConfigError, GenerationConfig, NameResolveConfig, RuntimeConfig, WeightsConfig
from asyncrl.generation.receive import StagedReceiver
from asyncrl.generation.worker import GenerationServer
from asyncrl.model.broadcast import ServerClient, WeightSender
from asyncrl.model.held_weights import ShareReader, ShareServer
from asyncrl.model.trainer_side import HeldShare
from asyncrl.protocol.names import Names
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import (
    BeginWeightUpdate,
    BroadcastReply,
    BroadcastRequest,
    BroadcastTarget,
    JoinUpdateGroup,
    ReceiveWeights,
    UpdateWeightsReply,
)
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.http_client import open_session
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.update_group import GroupMember, serve_store
from asyncrl.weights.versions import version_dir, write_version
from tests.support.buckets import pack
from tests.support.memory_names import memory_system, open_names
from tests.support.services import make_services

V0, V1, V2 = WeightVersion(1, 0), WeightVersion(1, 1), WeightVersion(1, 2)
GENERATION = GenerationConfig(max_running_requests=8, max_batch_tokens=128, num_blocks=32, page_size=16)
LIMIT_S = 30.0
CPU = torch.device("cpu")
START_LIMIT_S = 90.0  # for a process that imports torch, on a busy machine
SEND_LIMIT_S = 10.0  # long enough to reach the middle of a broadcast that cannot succeed; one test waits for its end
PROMPT = [3, 1, 4, 1, 5]
_spaces = itertools.count()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the versions v0, v1 and v2 beside it."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("broadcast")
    make_tiny_model(root / "model")
    for version in (V0, V1, V2):
        path = version_dir(root, "actor", version)
        write_version(path, tensors_of(version), source_dir=root / "model", version=version, fsync=False)
    return root / "model"


def tensors_of(version: WeightVersion) -> list[tuple[str, torch.Tensor]]:
    model = make_tiny_model(None, seed=version.version)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def held(version: WeightVersion, bucket_bytes: int = 100_000) -> HeldShare:
    """A snapshot with several buckets, so that a broadcast can fail in the middle."""
    buckets = pack(((name, tensor, tensor.dtype) for name, tensor in tensors_of(version)), bucket_bytes)
    assert len(buckets) > 3
    return HeldShare(version, buckets)


# -------------------------------------------------------------------------------------------------------------- servers


def make_server(model_path: Path, space: str, newest: WeightVersion = V2) -> tuple[GenerationServer, NameResolveConfig]:
    """newest: the newest version that the trainer has published."""
    resolve = NameResolveConfig(endpoints=[f"memory://{space}"])
    info = WorkerInfo(
        kind="generation_server", index=0, count=1, experiment="e", trial="t", attempt=1,
        run_dir=str(model_path.parent), seed=1, name_resolve=resolve, runtime=RuntimeConfig(),
    )  # fmt: skip
    config = GenerationServerConfig(
        worker=info, engine="transformers", model_path=str(model_path), tokenizer_path=str(model_path),
        generation=GENERATION, torch_threads=1,
    )  # fmt: skip
    open_names(resolve).add(Names("e", "t").weights_held("actor"), str(newest), replace=True)
    return GenerationServer(config, memory_system()), resolve


class Client:
    """A server as the manager and rollout workers see it."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str, model_path: Path) -> None:
        self.session, self.name, self.url, self.model_path = session, name, url, model_path
        self.target = BroadcastTarget(server=name, url=url)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, data=msgspec.json.encode(body)) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def load(self, version: WeightVersion) -> None:
        where = version_dir(self.model_path.parent, "actor", version)
        body = {"model_path": str(where), "weight_version": str(version)}
        status, reply = await self.post("/update_weights_from_disk", body)
        assert status == 200, reply

    async def pause(self) -> None:
        assert (await self.post("/pause_generation", {"mode": "abort"}))[0] == 200

    async def resume(self) -> None:
        assert (await self.post("/continue_generation", {}))[0] == 200

    async def version(self) -> str:
        async with self.session.get(self.url + "/get_model_info") as response:
            return str((await response.json())["weight_version"])

    async def logprobs(self) -> list[float]:
        """Logprobs of a greedy response to PROMPT. They are a precise fingerprint of the weights."""
        sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        status, reply = await self.post("/generate", body)
        assert status == 200, reply
        return [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]]


@asynccontextmanager
async def served(model_path: Path) -> AsyncIterator[Client]:
    """A server in this process, with version 0."""
    server, resolve = make_server(model_path, f"broadcast-{next(_spaces)}")
    main = asyncio.create_task(server.main())
    resolver = open_names(resolve)
    try:
        url = await asyncio.to_thread(resolver.wait, Names("e", "t").generation_server(0), LIMIT_S)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            client = Client(session, "here", url, model_path)
            await client.load(V0)
            yield client
    finally:
        server.stopping.set()
        await asyncio.wait_for(main, LIMIT_S)
        resolver.close()


def be_server(model_path: Path, pipe: Connection, newest: WeightVersion = V2) -> None:
    """The main function of a process: a server that sends its address through the pipe."""
    torch.set_num_threads(1)
    server, resolve = make_server(model_path, "process", newest)

    async def live() -> None:
        main = asyncio.create_task(server.main())
        resolver = open_names(resolve)
        pipe.send(await asyncio.to_thread(resolver.wait, Names("e", "t").generation_server(0), START_LIMIT_S))
        await main

    asyncio.run(live())


@pytest.fixture(scope="module")
def process(model_path: Path) -> Iterator[tuple[BaseProcess, str]]:
    """A server process that tests may freeze (SIGSTOP) and kill, and its address. The last test kills it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=be_server, args=(model_path, theirs), daemon=True)
    child.start()
    try:
        assert ours.poll(START_LIMIT_S), "the server did not start"
        yield child, ours.recv()
    finally:
        child.kill()
        child.join(LIMIT_S)


class Watch:
    """Counts the requests to servers by path, and calls a function of the test before the chosen request."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._acts: dict[tuple[str, int], Callable[[], None]] = {}

    def when_sending_bucket(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` in the middle of the next broadcast, before a server is asked to take bucket `number` (from 0)."""
        path = "/update_weights_from_distributed"
        self._acts[path, self.asked[path] + number] = act

    def client(self, session: aiohttp.ClientSession) -> ServerClient:
        return _WatchedClient(session, self)

    def see(self, path: str) -> None:
        self.asked[path] += 1
        self._acts.pop((path, self.asked[path] - 1), lambda: None)()


class _WatchedClient(ServerClient):
    def __init__(self, session: aiohttp.ClientSession, watch: Watch) -> None:
        super().__init__(session)
        self._watch = watch

    async def post(self, target: BroadcastTarget, path: str, message: msgspec.Struct) -> UpdateWeightsReply:
        self._watch.see(path)
        return await super().post(target, path, message)


class Unannounced(ServerClient):
    """A client that does not announce the tensors to come."""

    async def post(self, target: BroadcastTarget, path: str, message: msgspec.Struct) -> UpdateWeightsReply:
        if isinstance(message, BeginWeightUpdate):
            message = BeginWeightUpdate(weight_version=message.weight_version)
        return await super().post(target, path, message)


def reader(session: aiohttp.ClientSession, url_of: Callable[[int], Awaitable[str]]) -> ShareReader:
    return ShareReader(session, url_of, host="127.0.0.1", device=CPU, backend="gloo")


@asynccontextmanager
async def sender(
    limit_s: float = LIMIT_S,
    client: Callable[[aiohttp.ClientSession], ServerClient] = ServerClient,
    told: Callable[[str], None] = lambda url: None,
    ranks: Sequence[str] = (),
) -> AsyncIterator[WeightSender]:
    """A sender that serves its endpoint. told: a function that is called with the endpoint's URL. ranks: URLs of the other ranks'
    shares."""

    async def url_of(worker: int) -> str:
        return ranks[worker - 1]

    options = WeightsConfig(transport="broadcast", broadcast_timeout_s=limit_s)
    async with open_session(max_connections=0) as session:
        made = WeightSender(
            client(session), reader(session, url_of), name="e/t/a1", host="127.0.0.1", device=torch.device("cpu"),
            options=options, services=make_services(),
        )  # fmt: skip
        async with made.serving() as url:
            told(url)
            yield made


async def send(
    sender: WeightSender, version: WeightVersion, *clients: Client, limit_s: float = LIMIT_S
) -> BroadcastReply:
    """Pause, send, and continue the servers that succeeded, as the manager does."""
    for client in clients:
        await client.pause()
    targets = [client.target for client in clients]
    request = BroadcastRequest(weight_version=str(version), targets=targets, limit_s=limit_s)
    reply = await asyncio.wait_for(sender.broadcast(request), LIMIT_S)
    for client in clients:
        if client.name not in reply.errors:
            assert await client.version() == str(version)
            await client.resume()
    return reply


# ---------------------------------------------------------------------------------------------------------------- tests


async def test_a_version_sent_is_the_version_on_disk(model_path: Path) -> None:
    """After a broadcast, a server computes exactly as with the same version from disk. The second broadcast is requested
    over HTTP, as the manager does, and uses the process group of the first."""
    requests, urls = Watch(), list[str]()
    async with served(model_path) as client, sender(client=requests.client, told=urls.append) as trainer:
        before = await client.logprobs()
        trainer.hold(held(V1))
        assert await send(trainer, V1, client) == BroadcastReply()
        sent = await client.logprobs()
        await client.load(V1)
        assert await client.logprobs() == sent != before
        trainer.hold(held(V2))
        await client.pause()
        request = BroadcastRequest(weight_version=str(V2), targets=[client.target], limit_s=LIMIT_S)
        async with client.session.post(urls[0] + "/broadcast_weights", data=msgspec.json.encode(request)) as response:
            assert msgspec.json.decode(await response.read(), type=BroadcastReply) == BroadcastReply()
        await client.resume()
        assert requests.asked["/init_weights_update_group"] == 1
        assert "/destroy_weights_update_group" not in requests.asked
        sent = await client.logprobs()
        await client.load(V2)
        assert await client.logprobs() == sent


def test_nccl_needs_a_gpu() -> None:
    unused: Any = None
    options = WeightsConfig(transport="broadcast", broadcast_backend="nccl")
    with pytest.raises(ConfigError, match=r"broadcast_backend='nccl': the trainer has no GPU; use gloo, or auto"):
        WeightSender(
            unused, unused, name="n", host="", device=torch.device("cpu"), options=options,
            services=make_services(),
        )  # fmt: skip


async def test_nothing_is_broadcast_that_a_server_refuses(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast of another model's tensors, of an older version, or of a version that the trainer does not hold is refused at
    once. The old weights stay in use."""
    broadcasts: list[str] = []
    broadcast = GroupMember.broadcast

    async def note(self: GroupMember, *arguments: Any) -> None:
        broadcasts.append(self.name)
        await broadcast(self, *arguments)

    monkeypatch.setattr(GroupMember, "broadcast", note)
    async with served(model_path) as client, sender() as trainer:
        before = await client.logprobs()
        tensors = [(f"other.{name}", tensor, tensor.dtype) for name, tensor in tensors_of(V1)]
        trainer.hold(HeldShare(V1, pack(tensors, 100_000)))
        reply = await send(trainer, V1, client)
        assert "do not fit the model: other." in reply.errors["here"]
        assert (
            "the trainer holds weights a0001-v00000001, not a0001-v00000002"
            in (await send(trainer, V2, client)).errors["here"]
        )
        await client.load(V2)
        trainer.hold(held(V1))
        reply = await send(trainer, V1, client)
        assert f"version {V1} is older than {V2}" in reply.errors["here"]
        await client.load(V2)
        assert await client.version() == str(V2)
        await client.resume()
        assert await client.logprobs() != before
    assert broadcasts == []


async def test_the_protocol_refuses_what_comes_in_another_order(model_path: Path) -> None:
    async with served(model_path) as client:
        bucket = ReceiveWeights(names=[], dtypes=[], shapes=[], load_format="flattened_bucket", limit_s=1.0)
        status, reply = await client.post("/update_weights_from_distributed", bucket)
        assert (status, reply["success"]) == (400, False)
        assert "between begin_ and end_weight_update" in reply["message"]
        status, reply = await client.post("/end_weight_update", {})
        assert (status, reply["message"]) == (400, "no weight update is open; call begin_weight_update first")
        assert (await client.post("/begin_weight_update", {"weight_version": "v1"}))[0] == 400
        assert (await client.post("/begin_weight_update", BeginWeightUpdate()))[0] == 200
        status, reply = await client.post("/update_weights_from_distributed", bucket)
        assert (status, "there is no group" in reply["message"], reply["error_class"]) == (400, True, "passing")
        status, reply = await client.post("/end_weight_update", {})  # no tensor came
        assert (status, reply["success"]) == (400, False)
        join = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "limit_s": 0.5}
        status, reply = await client.post("/init_weights_update_group", {**join, "backend": "gloo"})
        assert (status, "could not be joined" in msgspec.convert(reply, UpdateWeightsReply).message) == (400, True)
        assert (await client.post("/destroy_weights_update_group", {}))[0] == 200
        assert await client.version() == str(V0)


async def test_a_version_that_the_trainer_has_not_published_is_refused(model_path: Path) -> None:
    """A label with a far higher version number would make the server refuse all versions that follow."""
    ahead = WeightVersion(1, 99_999)
    why = f"weight_version is {ahead}, which the trainer has not published; the newest is {V2}"
    async with served(model_path) as client:
        status, reply = await client.post("/begin_weight_update", BeginWeightUpdate(weight_version=str(ahead)))
        assert (status, reply["message"], reply["error_class"]) == (400, why, "passing")
        assert (await client.post("/begin_weight_update", BeginWeightUpdate()))[0] == 200
        bucket = ReceiveWeights(weight_version=str(ahead), load_format="flattened_bucket", limit_s=1.0)
        status, reply = await client.post("/update_weights_from_distributed", bucket)
        assert (status, reply["message"], reply["error_class"]) == (400, why, "passing")
        await client.load(V1)
        assert await client.version() == str(V1)


async def test_a_sender_that_repeats_itself_fills_no_memory(model_path: Path) -> None:
    """The sender here does not announce its tensors. If it did, the server would refuse it earlier, because the announcement
    repeats a name."""
    async with served(model_path) as client, sender(client=Unannounced) as trainer:
        buckets = held(V1).buckets
        trainer.hold(HeldShare(V1, [*buckets, buckets[0]]))
        reply = await send(trainer, V1, client)
        assert f"{min(buckets[0].specs.names)} was already received in this update" in reply.errors["here"]


class Ranks:
    """The other two of three ranks of a trainer. The sender has a third of the tensors."""

    def __init__(self) -> None:
        self.servers = [ShareServer("127.0.0.1", CPU) for _ in range(2)]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[str, str]]:
        async with self.servers[0].serving() as first, self.servers[1].serving() as second:
            yield first, second

    def hold(self, version: WeightVersion) -> HeldShare:
        """Hold the version at these ranks. Returns the sender's share."""
        tensors = [(name, tensor, tensor.dtype) for name, tensor in tensors_of(version)]
        mine, *others = (pack(tensors[start::3], 30_000) for start in range(3))
        for server, buckets in zip(self.servers, others, strict=True):
            server.hold(HeldShare(version, buckets))
        specs = {worker: [bucket.specs for bucket in buckets] for worker, buckets in enumerate(others, start=1)}
        return HeldShare(version, mine, others=specs)


async def test_the_shares_of_other_ranks_are_sent_too(model_path: Path) -> None:
    """While a version is sent, the other ranks already hold the next one. After that the old version is refused, and no server is
    blamed."""
    requests, ranks = Watch(), Ranks()
    async with (
        served(model_path) as client,
        ranks.serving() as urls,
        sender(client=requests.client, ranks=urls) as trainer,
    ):
        trainer.hold(ranks.hold(V1))
        requests.when_sending_bucket(1, lambda: ranks.hold(V2))
        assert await send(trainer, V1, client) == BroadcastReply()
        sent = await client.logprobs()
        await client.load(V1)
        assert await client.logprobs() == sent
        before = requests.asked.copy()
        reply = await send(trainer, V1, client)
        assert f"model_worker/1 answered 409: this rank holds weights {V2}, not {V1}" in reply.errors["here"]
        assert requests.asked["/begin_weight_update"] == before["/begin_weight_update"]


async def test_two_broadcasts_at_the_same_time_do_not_mix(model_path: Path) -> None:
    """Each of them has a group of the ranks. One group is kept, and later broadcasts use it."""
    ranks = Ranks()
    async with (
        served(model_path) as one,
        served(model_path) as two,
        ranks.serving() as urls,
        sender(ranks=urls) as trainer,
    ):
        trainer.hold(ranks.hold(V1))
        assert await asyncio.gather(send(trainer, V1, one), send(trainer, V1, two)) == [BroadcastReply()] * 2
        sent = [await one.logprobs(), await two.logprobs()]
        await one.load(V1)
        assert sent == [await one.logprobs()] * 2
        groups = set(ranks.servers[0]._members)
        assert len(groups) == 2
        for version in (V1, V2):
            trainer.hold(ranks.hold(version))
            assert await send(trainer, version, one) == BroadcastReply()
        assert set(ranks.servers[0]._members) == groups


async def test_more_broadcasts_than_a_rank_keeps_groups() -> None:
    """A rank leaves no group that a broadcast uses."""
    rank = ShareServer("127.0.0.1", CPU)
    rank.hold(
        HeldShare(
            V1, pack([("a", torch.rand(10_000), torch.float32), ("b", torch.rand(10_000), torch.float32)], 40_000)
        )
    )
    assert rank.held is not None
    mine = HeldShare(V1, [], others={1: rank.held.specs})
    async with rank.serving() as url, open_session(max_connections=0) as session, AsyncExitStack() as opened:

        async def url_of(worker: int) -> str:
            return url

        readers = [reader(session, url_of) for _ in range(6)]
        shares = [await one.open(mine, opened, LIMIT_S) for one in readers]
        async with asyncio.timeout(LIMIT_S / 2):
            for one, share in zip(readers, shares, strict=True):
                async with one.buckets(mine, share) as buckets:
                    digests = [bucket.digest async for bucket in buckets]
                assert digests == [await digest for digest in rank.held.digests]


async def test_a_receiver_leaves_the_group_that_is_used_least() -> None:
    """As the sender does. Otherwise the sender would use a group that a server has left."""
    no_checks = SimpleNamespace(weights_device=CPU, check_tensors=lambda *_, **__: None, uses=lambda flats: [])
    receiver = StagedReceiver(no_checks, "127.0.0.1", SYSTEM_CLOCK)  # type: ignore[arg-type]
    members: dict[str, GroupMember] = {}

    async def join(name: str) -> None:
        members[name] = GroupMember(name, "gloo")
        store, address = serve_store("127.0.0.1", LIMIT_S)
        host, _, port = address.rpartition(":")
        group = JoinUpdateGroup(
            master_address=host, master_port=int(port), rank_offset=1, world_size=2, group_name=name, backend="gloo"
        )
        mine = members[name].join(lambda: store, rank=0, size=2, limit_s=LIMIT_S, host=host, device=CPU)
        await asyncio.gather(mine, receiver.join(group))

    async def use(name: str) -> None:
        bucket = ReceiveWeights(
            names=["a"],
            dtypes=["uint8"],
            shapes=[[4]],
            group_name=name,
            load_format="flattened_bucket",
            limit_s=LIMIT_S,
        )
        await receiver.begin(BeginWeightUpdate())
        await asyncio.gather(
            receiver.receive(bucket), members[name].broadcast(torch.ones(4, dtype=torch.uint8), LIMIT_S)
        )

    try:
        for name in ("first", "second", "third", "fourth"):
            await join(name)
        await use("first")
        await join("fifth")
        await use("first")
    finally:
        for name, member in members.items():
            member.leave()
            await receiver.leave(name)


async def test_a_rank_that_notices_late_that_all_is_sent_stays_in_the_group(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender has received everything before the rank returns from its last call. The sender keeps the group, so the rank
    must keep it too: the next broadcast would wait for it until the limit."""
    ranks = Ranks()
    send_at_once = GroupMember.send

    async def send_late(member: GroupMember, flat: torch.Tensor, limit_s: float) -> None:
        await send_at_once(member, flat, limit_s)
        await asyncio.sleep(0.1)

    monkeypatch.setattr(GroupMember, "send", send_late)
    async with served(model_path) as client, ranks.serving() as urls, sender(ranks=urls) as trainer:
        groups = []
        for version in (V1, V2):
            trainer.hold(ranks.hold(version))
            assert await send(trainer, version, client) == BroadcastReply()
            groups.append(set(ranks.servers[1]._members))
        assert groups[0] == groups[1] != set()


async def test_the_sender_holds_its_share_and_a_few_buckets() -> None:
    """The peak memory of the process, measured by the kernel: reading the other shares needs two buckets and the buffers of a
    connection, not the model."""
    bucket_bytes, num_buckets = 4_000_000, 24
    tensors = [(f"w{number}", torch.rand(bucket_bytes // 4), torch.float32) for number in range(num_buckets)]
    other = HeldShare(V1, pack(tensors, bucket_bytes))
    mine = HeldShare(V1, [], others={1: [bucket.specs for bucket in other.buckets]})
    rank = ShareServer("127.0.0.1", CPU)

    def memory(field: str) -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
        return int(line.split()[1]) * 1024

    def begin() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return memory("VmRSS")

    async with rank.serving() as url, open_session(max_connections=0) as session:

        async def url_of(worker: int) -> str:
            return url

        rank.hold(other)
        await asyncio.gather(*other.digests)
        before = begin()
        opened, collector = AsyncExitStack(), reader(session, url_of)
        async with opened, collector.buckets(mine, await collector.open(mine, opened, LIMIT_S)) as buckets:
            number = 0
            async for bucket in buckets:
                assert torch.equal(bucket.flat, other.buckets[number].flat)
                assert bucket.digest == await other.digests[number]
                number += 1
        assert number == num_buckets
        assert memory("VmHWM") - before < 5 * bucket_bytes < num_buckets * bucket_bytes / 4


class Training:
    """Computes on a thread of its own, as a trainer does, and measures the longest time between two steps."""

    def __enter__(self) -> Training:
        self.num_steps, self.longest_s, self._stop = 0, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        matrix, last = torch.rand(200, 200), time.monotonic()
        while not self._stop.is_set():
            matrix @ matrix
            now = time.monotonic()
            self.num_steps, self.longest_s, last = self.num_steps + 1, max(self.longest_s, now - last), now


async def test_one_that_hangs_in_the_middle_delays_no_other(model_path: Path, process: tuple[BaseProcess, str]) -> None:
    """One server is stopped with SIGSTOP. The other one gets the version by a second broadcast, long before the limit. Training and
    further broadcasts go on. Once the stopped server runs again, it loads from disk."""
    child, url = process
    requests, ranks = Watch(), Ranks()

    def freeze() -> None:
        os.kill(child.pid or 0, signal.SIGSTOP)
        ranks.hold(V2)  # training has made the next version

    async with (
        served(model_path) as client,
        ranks.serving() as urls,
        sender(client=requests.client, ranks=urls) as trainer,
    ):
        other = Client(client.session, "there", url, model_path)
        await other.load(V0)
        trainer.hold(ranks.hold(V1))
        requests.when_sending_bucket(2, freeze)
        began = time.monotonic()
        with Training() as training:
            reply = await send(trainer, V1, client, other, limit_s=SEND_LIMIT_S)
            took_s = time.monotonic() - began
        try:
            assert set(reply.errors) == {"there"}
            assert "broadcasting bucket 2 of" in reply.errors["there"]
            assert "there did not answer for" in reply.errors["there"]
            assert took_s < 0.8 * SEND_LIMIT_S  # a quarter to notice it, and two broadcasts, on a busy machine
            assert training.num_steps > 10
            assert training.longest_s < took_s / 2
            sent = await client.logprobs()
            await client.load(V1)
            assert await client.logprobs() == sent
            trainer.hold(ranks.hold(V2))
            assert await send(trainer, V2, client) == BroadcastReply()
            assert requests.asked["/init_weights_update_group"] == 3  # two servers, then one, whose group is used again
        finally:
            os.kill(child.pid or 0, signal.SIGCONT)
        await other.load(V1)
        await other.resume()
        assert await other.logprobs() == sent
        assert await send(trainer, V2, client, other) == BroadcastReply()


async def test_one_that_dies_in_the_middle_delays_no_other(model_path: Path, process: tuple[BaseProcess, str]) -> None:
    """SIGKILL is noticed at once. The other server gets the version within the time of a broadcast without faults and a join."""
    child, url = process
    requests = Watch()
    async with served(model_path) as client, sender(3 * LIMIT_S, requests.client) as trainer:
        other = Client(client.session, "there", url, model_path)
        await other.load(V2)
        trainer.hold(held(V2))
        requests.when_sending_bucket(2, lambda: os.kill(child.pid or 0, signal.SIGKILL))
        began = time.monotonic()
        reply = await send(trainer, V2, client, other, limit_s=3 * LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 3
        assert set(reply.errors) == {"there"}
        assert await client.version() == str(V2)
        request = BroadcastRequest(weight_version=str(V2), targets=[client.target, other.target], limit_s=3 * LIMIT_S)
        await client.pause()
        reply = await trainer.broadcast(request)  # the dead server is detected before any group forms
        assert list(reply.errors) == ["there"]
        assert "there did not answer /server_info" in reply.errors["there"]
