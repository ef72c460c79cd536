"""Replaces everything outside a process: time, threads, ids, sockets, HTTP, name resolve, disk.

`installed()` is active for a whole series of simulations. Each stand-in calls `here()` to find the process whose code is running. A
seam that does not exist any more, for example because it was renamed, is an error here and not a wrong simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import asyncrl.generation.files
import asyncrl.generation.http
import asyncrl.master.buffer
import asyncrl.master.checkpointing
import asyncrl.master.model_workers
import asyncrl.master.publishing
import asyncrl.rollout.rollouts
import asyncrl.streams.push_pull
from asyncrl.config.processes import GserverManagerConfig, MasterWorkerConfig, RolloutWorkerConfig
from asyncrl.config.schema import PromptSourceConfig
from asyncrl.manager.http import ManagerService
from asyncrl.manager.ledger import Ledger
from asyncrl.manager.worker import ManagerFiles
from asyncrl.master.files import MasterFiles
from asyncrl.protocol.manager import AllocateReply, AllocateRequest
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.trajectories import StoreVerdict, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rollout.rollout_data import RolloutData
from asyncrl.runtime import http_client
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.system import System
from asyncrl.weights.checkpoints import DataIdentity, MasterState
from asyncrl.weights.versions import role_dir, version_dir
from tests.simulation import processes
from tests.simulation.network import SimSession
from tests.simulation.world import Process, SimulatedWorld, here

_STATUS_INTERVAL_S = 1.0


def use(world: SimulatedWorld) -> None:
    """Make the functions of `time` return this world's time from now on."""
    time.monotonic = world.scheduler.monotonic
    time.time = world.scheduler.time
    time.time_ns = world.scheduler.time_ns


# ------------------------------------------------------------------------------------------------------------ small stand-ins


def _wait(fs: Any, *, timeout: float | None = None, return_when: str = asyncio.ALL_COMPLETED) -> Any:
    """asyncio.wait without its check of each argument for coroutines, which is slow."""
    return asyncio.tasks._wait(set(fs), timeout, return_when, asyncio.get_running_loop())  # type: ignore[attr-defined]


def _session(max_connections: int, options: dict[str, Any]) -> SimSession:
    process = here()
    return SimSession(process.world, process, options)


_version_dir = functools.lru_cache(512)(version_dir)  # cached, because the same few calls repeat often
_name_of = functools.lru_cache(512)(name_of)  # cached, because it looks at the real disk


def _ticket_key(run_dir: Path) -> bytes:
    return str(run_dir).encode()


class _Launcher:
    """Replaces the status pipe: provides the lease, and shows the process's board to the launcher."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.lease = process.lease

    def show(self, board: StatusBoard) -> None:
        self._process.world.look_at(self._process, board)


class SimManagerFiles(ManagerFiles):
    """ManagerFiles on the simulated disk."""

    def __init__(self, config: GserverManagerConfig) -> None:
        self._config = config

    def journal(self) -> Any:
        return _Journal(Path("gserver_manager.jsonl"))

    def ticket_key(self) -> bytes:
        return _ticket_key(Path(self._config.worker.run_dir))

    def path_of(self, version: WeightVersion) -> Path:
        return _version_dir(self._config.worker.run_dir, self._config.role, version)

    def verify(self, path: Path, expected: WeightVersion) -> Any:
        return processes.verify_version(path, expected)

    verify.on_disk = True  # type: ignore[attr-defined]


class SimMasterFiles(MasterFiles):
    """MasterFiles on the simulated disk."""

    def __init__(self, config: MasterWorkerConfig) -> None:
        self._config = config

    def data(self) -> DataIdentity:
        return DataIdentity.of(processes.SimPrompts(self._config.prompts), self._config.train.num_epochs)  # type: ignore[arg-type]

    def num_prompts(self, source: PromptSourceConfig) -> int:
        return len(processes.SimPrompts(source))

    def state(self) -> MasterState:
        return msgspec.json.decode(here().world.masters[self._config.resume], type=MasterState)

    def ticket_key(self) -> bytes:
        return _ticket_key(Path(self._config.worker.run_dir))

    def journal(self) -> Any:
        return _Journal(Path("master.jsonl"))

    def metrics(self, trackers: object) -> Any:
        return _NoMetrics()

    def trackers(self) -> dict[str, Any]:
        return {}

    def generation_idle_share(self, began: float, ended: float) -> None:
        return None

    def prune_versions(self, served: Iterable[WeightVersion]) -> None:
        folder, process = role_dir(self._config.worker.run_dir, ACTOR), here()
        if kept := process.world.disk.prune(folder, keep=self._config.weights.keep, in_use=served):
            process.world.note(process, "pruned", kept=kept)

    def prune_checkpoints(self) -> None:
        here().world.prune_checkpoints(int(self._config.checkpoint.keep_last))

    def write_summary(self, summary: dict[str, Any]) -> None:
        process = here()
        process.world.note(process, "summary", steps=summary["steps"], dropped=summary["dropped_groups"])


class SimRolloutData(RolloutData):
    """RolloutData with prompts that need no file, and trajectories without tensors."""

    sample_type = processes.SimSample
    complete = staticmethod(processes.complete_sample)  # type: ignore[assignment]
    summary = staticmethod(processes.summary_of)  # type: ignore[assignment]
    answers = staticmethod(processes.answers_of)  # type: ignore[assignment]
    encode = staticmethod(processes.encode_sample)  # type: ignore[assignment]

    def __init__(self, config: RolloutWorkerConfig) -> None:
        self._config = config
        self.tokenizer = processes.SimTokenizer()
        self.eos_token_id = self.tokenizer.eos_token_id
        self.prompts = processes.SimPrompts(config.prompts)  # type: ignore[assignment]
        self.eval_prompts = {}  # the simulation evaluates nothing

    def add_words(self, sample: Any, prompt: Any) -> Any:
        return sample

    @staticmethod
    def session_summary(sample: Any, summary: Any) -> Any:
        return summary

    @staticmethod
    def rewards_by_seat(sample: Any, judged: Any) -> Any:
        return [judged.rewards]

    def journal(self) -> Any:
        return _Journal(Path(f"rollout_worker_{self._config.worker.index}.jsonl"))


@contextlib.asynccontextmanager
async def _listen(process: Process, answer: Any, host: str, *, max_body_bytes: int) -> AsyncIterator[str]:
    yield process.world.listen(process, answer)


def system_of(process: Process) -> System:
    """The machine as this process sees it: clock, ids, name resolve, sockets, HTTP, launcher."""
    return System(
        clock=process.world.scheduler,
        new_id=process.transport.new_id,
        pid=1,
        open_names=lambda config, limit_s: process.resolver,
        transport=process.transport,
        listen=partial(_listen, process),
        launcher=_Launcher(process),
        status_interval_s=_STATUS_INTERVAL_S,
    )


class _Journal:
    """Test double of JsonLinesWriter: records become events."""

    def __init__(self, path: Path) -> None:
        self._name = path.name

        self.last = here().world.journals.get(self._name)  # attribute of BackgroundJournal

    def write(self, record: dict[str, Any]) -> None:
        process = here()
        process.world.journals[self._name] = record
        process.world.on_journal(process, record)

    add = write

    async def run(self) -> None:
        await asyncio.Event().wait()

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NoMetrics:
    def write(self, step: int, metrics: Any, distributions: Any = None) -> None:
        pass

    def close(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------------- HTTP servers


# ------------------------------------------------------------------------------------------------------------- noting events


def _noting_allocate(real: Any) -> Any:
    async def allocate(self: ManagerService, request: AllocateRequest) -> AllocateReply:
        reply: AllocateReply = await real(self, request)
        if reply.tickets:
            process = here()
            tickets = tuple(ticket.ticket_id for ticket in reply.tickets)
            process.world.note(process, "answered", to=request.incarnation, request=request.request_id, tickets=tickets)
        return reply

    return allocate


def _noting_grant(real: Any) -> Any:
    def grant(self: Any, request: AllocateRequest, refusal: str, now: float) -> Any:
        live = real(self, request, refusal, now)
        process = here()
        process.ledger = self
        if live is not None:
            ticket = live.ticket
            process.world.note(
                process,
                "granted",
                ticket=ticket.ticket_id,
                to=request.incarnation,
                request=request.request_id,
                server=ticket.server_url,
                min_version=ticket.min_version,
                live=self.num_live,
                of=ticket.kind,
            )
        return live

    return grant


def _noting_put(real: Any) -> Any:
    def put(self: Any, meta: TrajectoryMeta) -> StoreVerdict:
        verdict: StoreVerdict = real(self, meta)
        process = here()
        process.buffer = self
        process.world.note(
            process,
            "stored" if verdict.verdict == "stored" else "not_stored",
            ticket=meta.ticket_id,
            prompt=(meta.locator.epoch, meta.locator.position),
            oldest=min(meta.version_start),
            reason=verdict.reason,
            attempt=meta.attempt,
        )
        return verdict

    return put


def _noting_push(real: Any) -> Any:
    async def push(self: Any, meta: TrajectoryMeta, sample: Any, *, head: int, timeout_s: float) -> StoreVerdict:
        process = here()
        is_mixed = min(meta.version_start) < max(meta.version_end)
        process.world.note(process, "pushed", ticket=meta.ticket_id, head=head, mixed=is_mixed)
        verdict: StoreVerdict = await real(self, meta, sample, head=head, timeout_s=timeout_s)
        process.world.note(process, "acked", ticket=meta.ticket_id, verdict=verdict.verdict)
        return verdict

    return push


def _noting_model_info(real: Any) -> Any:
    async def model_info(self: Any, request: Any) -> Any:
        process = here()
        process.world.note(process, "echoed", version=self._engine.stats().version)
        return await real(self, request)

    return model_info


# -------------------------------------------------------------------------------------------------------------------- install


def _patches() -> list[tuple[Any, str, Any]]:
    streams = asyncrl.streams.push_pull
    return [
        (time, "monotonic", time.monotonic),  # `use` sets them
        (time, "time", time.time),
        (time, "time_ns", time.time_ns),
        (asyncio, "wait", _wait),
        (asyncrl.generation.files, "name_of", _name_of),
        (asyncrl.master.publishing, "name_of", _name_of),
        (asyncrl.master.model_workers, "name_of", _name_of),
        (asyncrl.master.checkpointing, "name_of", _name_of),
        (ManagerService, "allocate", _noting_allocate(ManagerService.allocate)),
        (Ledger, "_grant_one", _noting_grant(Ledger._grant_one)),
        (
            asyncrl.master.buffer.AsyncIOSequenceBuffer,
            "put",
            _noting_put(asyncrl.master.buffer.AsyncIOSequenceBuffer.put),
        ),
        (streams.NameResolvingZmqPusher, "push", _noting_push(streams.NameResolvingZmqPusher.push)),
        (
            asyncrl.generation.http.GenerationHTTP,
            "_model_info",
            _noting_model_info(asyncrl.generation.http.GenerationHTTP._model_info),
        ),
    ]


@contextlib.contextmanager
def installed(wraps: Sequence[tuple[type, str, Callable[[Any], Any]]] = (), *, log: bool = False) -> Iterator[None]:
    """Context in which the seams are installed. Simulations run inside it. wraps: further replacements, such as a bug: (owner,
    name, function that makes the new attribute from the old one)."""
    replaced: list[tuple[Any, str, Any]] = []
    registry: Any = getattr(asyncio.tasks, "_all_tasks", None)  # Python 3.11
    if registry is None:
        registry = asyncio.tasks._scheduled_tasks  # type: ignore[attr-defined]
    registry.add = lambda task: None  # loops keep their own list, because Python's weak set costs more than a task
    disabled = logging.root.manager.disable
    if not log:
        logging.disable(logging.CRITICAL)
    try:
        with http_client.replaced(_session):
            for owner, name, wrap in wraps:  # below the noting wrappers, so that a bug's effects are noted
                replaced.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, wrap(getattr(owner, name)))
            for owner, name, value in _patches():
                replaced.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, value)
            gc.collect()
            gc.freeze()  # existing objects stay, so later collections only search a simulation's own objects
            gc.disable()  # a collection would run destructors at a time that the seed does not determine
            yield
    finally:
        del registry.add
        gc.enable()
        gc.unfreeze()
        for owner, name, value in reversed(replaced):
            setattr(owner, name, value)
        logging.disable(disabled)
