"""Stand-ins for the computing parts of a simulated run: an agent, an engine, a model worker. Everything else is the real class.

A model worker's weights are the list of the groups that they were trained on. Each version and each checkpoint contains the list,
and a restart loads it. So the final weights of a run show which prompts they contain, and how often.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from asyncrl.config.processes import GenerationServerConfig, ModelWorkerConfig
from asyncrl.data.prompts import Prompt
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.dataflow.graph import TRAJECTORY_KEYS
from asyncrl.dataflow.redistribution import transfers
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.generation.engine import EngineArguments, GenerationEngine
from asyncrl.generation.engines import Engines
from asyncrl.model.fetching import LIMIT_S, PATH
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver
from asyncrl.protocol.calls import (
    CallResult,
    ClearData,
    CommitCheckpoint,
    CommitWeights,
    ExecuteMFC,
    FetchData,
    FetchPart,
    LoadCheckpoint,
    ReadValues,
    Redistribute,
    ReleaseDevices,
    SaveCheckpoint,
    SaveModel,
    WriteWeights,
)
from asyncrl.protocol.trajectories import GroupSummary, Locator
from asyncrl.protocol.versions import WeightVersion, WrittenFile
from asyncrl.rewards.outcome import RolloutRejected, RolloutReleased
from asyncrl.rewards.trajectory import Response
from asyncrl.rollout.agent import ActQueue, Agent, Env, ObsQueue
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.names.interface import NameResolveError
from asyncrl.runtime.system import System
from asyncrl.runtime.trace import OFF
from asyncrl.runtime.worker import Worker
from asyncrl.streams.request_reply import Call, NameResolvingReplyServer
from tests.simulation.disk import Folder
from tests.simulation.world import here
from tests.support.paced_engine import LongTail, PacedEngine

PROMPT_TOKENS = 3
_LAST_WORDS_S = 0.2

# ------------------------------------------------------------------------------------------------------------------ rollouts


@dataclass(eq=False)
class SimSample:
    """A trajectory without tensors: its id and the values on which decisions depend."""

    ids: tuple[str, ...]
    length: int
    version_start: int
    version_end: int
    keys: tuple[str, ...] = TRAJECTORY_KEYS
    num_bytes: int = 1

    def unpack(self) -> list[SimSample]:
        return [self]


def summary_of(sample: SimSample) -> GroupSummary:
    """Like rewards.trajectory.summary_of."""
    return GroupSummary(
        seqlens=[PROMPT_TOKENS + sample.length],
        response_lengths=[sample.length],
        rewards=[float(sample.length % 2)],
        version_start=[sample.version_start],
        version_end=[sample.version_end],
    )


def answers_of(sample: SimSample) -> list[str | None]:
    """Like rewards.trajectory.sample_answers."""
    return []


def complete_sample(sample: SimSample, *, ticket_id: str, task_id: int, birth_time: float) -> SimSample:
    return replace(sample, ids=(ticket_id,))


def encode_sample(sample: SimSample) -> tuple[bytes, list[bytes]]:
    return f"{sample.ids[0]} {sample.length} {sample.version_start} {sample.version_end}".encode(), []


def decode_sample(header: bytes, frames: Sequence[Any], *, max_bytes: int) -> SimSample:
    ticket, length, start, end = header.decode().split()
    return SimSample((ticket,), int(length), int(start), int(end))


def trajectory_error(meta: Any, sample: Any) -> str:
    return "" if sample.ids == (meta.ticket_id,) else "bad_meta"


class SimTokenizer:
    eos_token_id = 0
    chat_template = ""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return ""


class SimPrompts:
    """Like data.prompts.PromptSource: num_prompts prompts of three tokens each, which encode epoch and position."""

    def __init__(self, config: Any, tokenizer: Any = None, seed: int = 1) -> None:
        self._count, self.config, self.seed = here().world.scenario.num_prompts, config, seed

    def fingerprint(self) -> str:
        return "simulated"

    def __len__(self) -> int:
        return self._count

    def get(self, locator: Locator) -> Prompt:
        ids = [1 + locator.epoch, locator.position // 256, locator.position % 256]
        return Prompt(f"e{locator.epoch}-p{locator.position}", "", ids, "", "default", {}, False)


class SimEnv(Env):
    async def reset(self) -> tuple[Any, dict[str, Any]]:
        return None, {}

    async def step(self, action: Any) -> Any:
        raise NotImplementedError


class SimAgent(Agent):
    """Collects one response. The scenario determines which prompts are rejected or released, and which are judged slowly."""

    async def collect_trajectory(self, prompt: Prompt, env: Env, obs_queue: ObsQueue, act_queue: ActQueue) -> list[Any]:
        process = here()
        responses: list[Response] = await self.generate([prompt.input_ids], obs_queue, act_queue)
        mood = zlib.crc32(f"{process.world.scenario.seed} {prompt.prompt_id}".encode()) % 1000 / 1000
        scenario = process.world.scenario
        if mood < scenario.reject_share:
            raise RolloutRejected("simulated", "the scenario says so")
        if process.world.network.random() < scenario.release_share:
            raise RolloutReleased("simulated", "the scenario says so")
        if process.world.network.random() < scenario.slow_share:
            await asyncio.sleep(scenario.slow_s * process.world.network.random())
        versions = [version for response in responses for version, _ in response.versions]
        length = sum(len(response.output_ids) for response in responses)
        return [SimSample(("",), length, min(versions), max(versions))]


# ---------------------------------------------------------------------------------------------------------------- generation


class _Tail(LongTail):
    """Response lengths from a cheap hash."""

    def length(self, input_ids: Sequence[int]) -> int:
        drawn = zlib.crc32(bytes(input_ids[: self.prompt_tokens]), self.seed) / 2**32
        return 1 + int(3.0 / (0.04 + drawn**1.5))  # mean about 16, 5 % above 60, at most 76


class SimEngine(PacedEngine):
    """Notes each version that it loads. Beside model workers on the same devices it begins asleep."""

    def __init__(self, *args: Any, asleep: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asleep = asleep

    async def _acquire_devices(self) -> None:
        await self.start()  # the first wake is the start
        process = here()
        process.world.note(process, "devices", taken=True)
        await asyncio.sleep(process.world.scenario.load_s)

    async def _release_devices(self) -> None:
        process = here()
        await asyncio.sleep(process.world.scenario.load_s * process.world.network.random())
        process.world.note(process, "devices", taken=False)

    async def load_weights(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        count = await super().load_weights(path, version, abort_running=abort_running)
        process = here()
        process.world.note(process, "loaded", version=str(version), path=str(path))
        return count


def verify_version(path: Path, expected: WeightVersion) -> Any:
    world = here().world
    return world.disk.verify(path, expected, world.now)


verify_version.on_disk = True  # type: ignore[attr-defined]


class SimEngines(Engines):
    """Makes one paced engine."""

    def __init__(self, config: GenerationServerConfig) -> None:
        self._config, self._trace, self._clock = config, OFF, SYSTEM_CLOCK

    def journal(self) -> Any:
        return NoJournal()

    def tokenizer(self) -> SimTokenizer:
        return SimTokenizer()

    def _make(self, arguments: EngineArguments) -> GenerationEngine[Any]:
        scenario = here().world.scenario
        return SimEngine(
            _Tail(scenario.seed % 2**32, PROMPT_TOKENS),
            self._config.generation,
            tokens_per_s=scenario.tokens_per_s,
            load_s=scenario.load_s,
            verify=verify_version,
            asleep=self._config.shares_devices,
            num_versions=self._config.num_versions,
        )

    def start_wait(self) -> tuple[str, str]:
        return "starting", self._config.worker.name


class NoJournal:
    """Like generation.journal.TokenJournal, but writes nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def add(self, *args: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


# -------------------------------------------------------------------------------------------------------------- training side


@dataclass
class Weights:
    """The groups that a model was trained on, in order: (prompt, ticket, version at which it was trained)."""

    trained: list[tuple[Locator, str, int]] = field(default_factory=list)
    version: int = 0


async def in_halves(models: Any, batch: Any) -> None:
    """The step of a user: inference on halves of the batch, and a key that it reads."""
    await batch.read("rewards")
    for function in models.functions:
        halves = batch.chunk(2) if function.mfc.kind == "inference" and len(batch) > 1 else [batch]
        made = [function(half) for half in halves]
        batch = batch.union(made[0] if len(made) == 1 else batch.concat(made))
    await batch


async def in_orders(models: Any, prompts: Any) -> None:
    """The step of a user that generates: of each three steps one orders a single prompt."""
    ordered = prompts.next(1 if prompts.step % 3 == 0 else None)
    batch = await models.actor.generate(ordered)
    assert len(batch) <= len(ordered)
    await in_halves(models, batch)


class SimModelWorker(Worker):
    """A rank that computes nothing. Its receiver, its store and its calls are real. It notes the groups that it would train on,
    and which keys it has of which groups.

    consumes: trajectories, calls, data of other worker groups.  produces: metadata, replies, data for other worker groups, versions
    and checkpoints on the simulated disk.
    waits for: free devices at its start; the next call.  unblocked by: the master.
    """

    def __init__(self, config: ModelWorkerConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self._mfcs = {mfc.name: mfc for mfc in config.mfcs}
        self._placements = {model.name: ModelPlacement.of(model) for model in config.models}
        self._first = next(iter(self._placements.values()))
        self.store = DataStore(config.store_capacity)
        self._keys: defaultdict[str, set[str]] = defaultdict(set)  # made here, or copied from other workers, by group
        self.weights = Weights()
        self._earlier: list[str] = []  # groups whose gradients are added up, but not in the weights yet
        self._num_deltas = -1  # since the last full version; -1: there is none yet
        self._committed: Folder | None = None  # the last version that this worker has committed
        self.receiver: TrajectoryReceiver | None = None

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        index, runtime = self.info.index, self.info.runtime
        if index in self._first.heads:
            opening = TrajectoryReceiver.open(
                self.info,
                directory,
                self.system,
                self.incarnation,
                self.store,
                head=self._first.heads.index(index),
                check=trajectory_error,
                verdict_limit_s=self.config.train.call_timeout_s,
                services=self.services,
                decode=decode_sample,  # type: ignore[arg-type]
            )
            self.receiver = await opened.enter_async_context(opening)
        server = NameResolvingReplyServer(
            directory.resolver,
            self.names,
            index=index,
            runtime=runtime,
            transport=self.system.transport,
            lease=directory.lease,
            worker=self.name,
            attempt=self.info.attempt,
            group_incarnation=self.info.group_incarnation,
        )
        opened.push_async_callback(server.close)
        self._resolver = directory.resolver
        self._session = await opened.enter_async_context(open_session(max_connections=8))
        if self.config.worker_groups[1:]:
            url = await opened.enter_async_context(self.system.listen(self._held, "", max_body_bytes=1 << 20))
            await directory.publish(self.names.held_data(index, self.info.attempt, self.info.group_incarnation), url)
        await server.start()
        if self.config.shares_devices:
            await directory.wait_for_key(self.names.devices_free(self.info.attempt), "devices free")
            self._take_devices()
        if self.receiver is not None:
            self.tasks.spawn(self.receiver.run(), "take in")
        self.began()
        await self._work(server)

    async def _work(self, server: NameResolvingReplyServer) -> None:
        """Execute calls in order, for ever. Writing runs concurrently with the next calls."""
        while True:
            call = await server.receive()
            self.board.progress()
            body = call.body
            if isinstance(body, WriteWeights | SaveModel | SaveCheckpoint | CommitWeights | CommitCheckpoint):
                snapshot = Weights(list(self.weights.trained), self.weights.version)
                self.tasks.spawn(self._write(call, snapshot, self._is_delta(body)), "write")
                continue
            try:
                call.reply(await self._execute(body))
            except Exception as error:
                call.fail(error)
                await asyncio.sleep(_LAST_WORDS_S)
                raise

    async def _execute(self, body: Any) -> CallResult:
        start = time.monotonic()
        if isinstance(body, ExecuteMFC):
            return await self._run_mfc(body, start)
        if isinstance(body, ClearData):
            if self.receiver is not None:
                self.receiver.discard(body.ids)
            for ticket in body.ids:
                self._keys.pop(ticket, None)
        elif isinstance(body, Redistribute):
            for step in body.steps:
                for transfer in transfers(step):
                    if self.info.index in transfer.targets:
                        self._keep(transfer.ids, transfer.keys)
        elif isinstance(body, FetchData):
            try:
                await asyncio.gather(*map(self._fetch, body.parts))
            except (aiohttp.ClientError, TimeoutError, NameResolveError) as error:
                return CallResult(unfetched=repr(error))
        elif isinstance(body, ReadValues):
            self._check_keys("ReadValues", body.ids, [body.key])
            return CallResult(values=[[[0.0]] for _ in body.ids])
        elif isinstance(body, ReleaseDevices):
            here().world.note(here(), "devices", taken=False)
        elif isinstance(body, LoadCheckpoint):
            path = self._path(body.folder)
            loaded: Weights = here().world.disk.folders[path].content
            self.weights = Weights(list(loaded.trained), loaded.version)
            self._take_devices()
            here().world.note(here(), "restored", path=path, version=loaded.version)
        return CallResult(seconds=time.monotonic() - start)

    async def _run_mfc(self, body: ExecuteMFC, start: float) -> CallResult:
        process, mfc = here(), self._mfcs[body.mfc]
        placement = self._placements[mfc.model]
        data = placement.part_of(self.info.index, SAMPLES)
        ids = body.parts[data]
        self._check_keys(f"MFC {mfc.name!r}", ids, [key for key in mfc.input_keys if key not in body.missing])
        self._take_devices()
        if mfc.kind == "train_step":
            await asyncio.sleep(process.world.scenario.step_s)
            self._train(body)
        if self.info.index != placement.heads[data]:
            return CallResult(seconds=time.monotonic() - start)
        self._keep(ids, mfc.output_keys)
        return CallResult(ids=list(ids), keys=list(mfc.output_keys), seconds=time.monotonic() - start)

    def _train(self, body: ExecuteMFC) -> None:
        from asyncrl.protocol.tickets import TicketId

        process, is_first = here(), self.info.index == self._first.workers[0]
        about: dict[str, Any] = {"attempt": self.info.attempt, "version": body.version}
        if (body.batch or not body.ends_step) and is_first:
            process.world.note(process, "part", **about, tickets=list(body.ids), last=body.ends_step)
        if not body.ends_step:
            self._earlier += body.ids
            return
        batch, self._earlier = [*self._earlier, *body.ids], []
        for ticket in batch:
            name = TicketId.parse(ticket)
            assert name is not None, "a ticket of a ledger"
            self.weights.trained.append((name.locator, ticket, body.version))
        if is_first:
            process.world.note(
                process,
                "trained",
                **about,
                tickets=batch,
                batch=list(body.batch or body.ids),
                weights=self.weights.version,
            )
        self.weights.version = body.version + 1

    # ------------------------------------------------------------------------------------------------------ data, devices

    def _take_devices(self) -> None:
        if self.config.shares_devices:
            here().world.note(here(), "devices", taken=True)

    def _keep(self, ids: Sequence[str], keys: Sequence[str]) -> None:
        for ticket in ids:
            self._keys[ticket].update(keys)

    def _check_keys(self, what: str, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Raises RuntimeError if this worker lacks one of these keys of these groups."""
        for ticket in ids:
            came = TRAJECTORY_KEYS if ticket in self.store else ()
            if lacking := set(keys).difference(came, self._keys.get(ticket, ())):
                raise RuntimeError(f"{what}: {sorted(lacking)} of {ticket} are not here; master and workers disagree")

    async def _held(self, request: Any) -> web.Response:
        """Like fetching.HeldData: deliver keys of groups to another worker group."""
        part = msgspec.json.decode(await request.read(), type=FetchPart)
        try:
            self._check_keys("fetch", part.ids, part.keys)
        except RuntimeError as error:
            return web.Response(status=404, text=str(error))
        return web.Response(body=b"{}")

    async def _fetch(self, part: FetchPart) -> None:
        """Like fetching.DataFetcher, with a single try."""
        async with asyncio.timeout(LIMIT_S):
            key = self.names.held_data(part.source, self.info.attempt, part.group_incarnation)
            url = await asyncio.to_thread(self._resolver.get, key)
            async with self._session.post(url + PATH, data=msgspec.json.encode(part)) as response:
                response.raise_for_status()
        self._keep(part.ids, part.keys)

    # ------------------------------------------------------------------------------------------------------------- writing

    def _is_delta(self, body: Any) -> bool:
        """Like export.Exporter._base_of."""
        full_every = self.config.weights.full_every
        if not isinstance(body, WriteWeights) or full_every == 1:
            return False
        is_full = self._num_deltas < 0 or body.rewrite or self._num_deltas + 1 >= full_every
        self._num_deltas = 0 if is_full else self._num_deltas + 1
        return not is_full

    def _path(self, folder: str) -> str:
        """Path on the simulated disk."""
        return f"{self.info.run_dir}/{folder}"

    async def _write(self, call: Call, weights: Weights, is_delta: bool) -> None:
        """Like the exporter: write files beside the path; then the first worker renames the folder."""
        world, process = here().world, here()
        body: Any = call.body
        path = self._path(body.folder)
        slow_s = world.slow_disk.get(process.name, 0.0)
        await asyncio.sleep(world.scenario.write_s * (0.5 + world.network.random()) + slow_s * world.network.random())
        if isinstance(body, WriteWeights | SaveModel | SaveCheckpoint):
            # a later call commits the weights as they were when this call came
            world.snapshots[path] = weights, is_delta
            call.reply(CallResult(files=[WrittenFile(f"part-{self.info.index}", 1, "", [])]))
            return
        content, is_delta = world.snapshots.pop(path, (weights, False))
        version = (
            WeightVersion.parse(body.weight_version)
            if isinstance(body, CommitWeights) and body.weight_version
            else None
        )
        if isinstance(body, CommitCheckpoint):
            content = Weights(list(content.trained), content.version)
            world.disk.rename(path, Folder(None, content))
            world.masters[path] = body.master
        else:
            rewrite = isinstance(body, CommitWeights) and body.rewrite
            folder = Folder(version, content, base=self._committed if is_delta else None)
            world.disk.rename(path, folder, replace=version is None or rewrite)
            self._committed = folder if version is not None else self._committed
        world.note(process, "committed", path=path, trained=len(content.trained))
        call.reply(CallResult())
