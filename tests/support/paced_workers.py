"""Stand-ins for generation server and trainer that keep a fixed pace and compute nothing, for timing the rest of a run.

    python -m tests.support.paced_workers CONFIG_OF_PROCESS PACE_AS_JSON

The rest of the run is real: launcher, name resolve, manager, master, rollout workers, both streams, the HTTP protocol of the
servers, weight versions on disk and their verification. paced_run.py starts these two in a run with debug.leave_out.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.config.processes import GenerationServerConfig, ModelWorkerConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.dataflow.redistribution import transfers
from asyncrl.generation.http import GenerationHTTP
from asyncrl.generation.journal import TokenJournal, journal_path
from asyncrl.launch.program import ProcessConfig, load_process_config
from asyncrl.launch.worker_main import end_process, join_network
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver, trajectory_error
from asyncrl.protocol.calls import CallBody, CallResult, ClearData, CommitWeights, ExecuteMFC, Redistribute
from asyncrl.protocol.run_folder import path_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S
from asyncrl.runtime.process import die_with_parent
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker, configure_logging, run_worker
from asyncrl.streams.request_reply import Call, NameResolvingReplyServer
from asyncrl.weights.versions import publish_folder
from tests.support.paced_engine import LongTail, PacedEngine

_FLUSH_EVERY = 10  # buckets of the journal
_LAST_WORDS_S = 0.2  # between the error reply to a call and the end of the worker


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of generation and training. generation.max_running_requests is the number of slots of a server."""

    tokens_per_s: float  # of one slot
    step_s: float  # of one train step; a part of a batch takes its share by groups
    load_s: float = 0.0  # time for which a server loads new weights, in addition to their verification
    # Time of a detached reference or reward model for a whole batch; a part of it takes its share by groups
    ref_step_s: float = 0.0
    seed: int = 1  # of the response lengths
    prompt_tokens: int  # tokens of a prompt, including the token of the group's member


class PacedServer(Worker):
    """A generation server with a PacedEngine.

    consumes: prompts, weight versions.  produces: tokens, and a journal of their times.  waits for: the clock only.
    """

    def __init__(self, config: GenerationServerConfig, pace: Pace, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self._journal = TokenJournal(journal_path(self.info.run_dir, self.info.index), now=self.system.clock.time)
        self._engine = PacedEngine(
            LongTail(pace.seed, pace.prompt_tokens),
            config.generation,
            tokens_per_s=pace.tokens_per_s,
            load_s=pace.load_s,
            on_tokens=self._journal.add,
            clock=self.system.clock,
            num_versions=config.num_versions,
        )
        self._http = GenerationHTTP(
            self._engine,
            engine_name="paced",
            settings=msgspec.to_builtins(pace),
            run_dir=self.info.run_dir,
            clock=self.system.clock,
        )

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        opened.callback(self._journal.close)
        await self._engine.start()
        url = await opened.enter_async_context(self._http.listening(self.info.runtime.host, self.system.listen))
        opened.push_async_callback(self._engine.close)
        await directory.publish(self.names.generation_server(self.info.index), url)
        self.began()
        while True:
            for _ in range(_FLUSH_EVERY):
                await asyncio.sleep(JOURNAL_BUCKET_S)
                self._engine.tell_tokens()
            stats = self._engine.stats()
            self.board.version = stats.version
            self.board.set_queue("running", stats.running)
            self.board.set_queue("waiting", stats.waiting)
            self._engine.expire_waiting()
            await asyncio.to_thread(self._journal.flush)


class PacedTrainer(Worker):
    """A head, and a data-parallel rank of training: receives trajectories like a real one, sleeps for a train step, and, if it is
    the first, publishes weights.

    consumes: trajectories, calls (from the master, in order).  produces: metadata, weight versions (the initial weights again).
    waits for: the next call; inside a train step for the clock.  unblocked by: the master.
    """

    def __init__(self, config: ModelWorkerConfig, pace: Pace, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self._config, self._step_s = config, pace.step_s
        self._mfcs = {mfc.name: mfc for mfc in config.mfcs}
        self._moved = set[str]()  # ids of the groups that other ranks would have sent to this one

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        config = self._config
        opening = TrajectoryReceiver.open(
            self.info,
            directory,
            self.system,
            self.incarnation,
            DataStore(config.store_capacity),
            head=self.info.index,
            check=partial(trajectory_error, limits=ModelLimits.of(config.model_path)),
            verdict_limit_s=config.train.call_timeout_s,
            services=self.services,
        )
        receiver = await opened.enter_async_context(opening)
        server = NameResolvingReplyServer(
            directory.resolver,
            self.names,
            index=self.info.index,
            runtime=self.info.runtime,
            transport=self.system.transport,
            lease=directory.lease,
            worker=self.name,
            attempt=self.info.attempt,
        )
        opened.push_async_callback(server.close)
        await server.start()
        self.tasks.spawn(receiver.run(), "take in")
        self.began()
        await self._work(server, receiver)

    async def _work(self, server: NameResolvingReplyServer, receiver: TrajectoryReceiver) -> None:
        """Execute calls in order, forever. While weights are being written, the next calls are executed."""
        while True:
            call = await server.receive()
            self.board.progress()
            # a model saved for the user has no version; this stand-in does not write it
            if isinstance(call.body, CommitWeights) and call.body.weight_version:
                self.tasks.spawn(self._write(call, call.body), "write")
            else:
                await self._answer(call, receiver)

    async def _answer(self, call: Call, receiver: TrajectoryReceiver) -> None:
        try:
            call.reply(await self._execute(call.body, receiver))
        except Exception as error:
            call.fail(error)
            await asyncio.sleep(_LAST_WORDS_S)
            raise

    async def _execute(self, body: CallBody, receiver: TrajectoryReceiver) -> CallResult:
        start = self.system.clock.monotonic()
        if isinstance(body, ClearData):
            receiver.discard(body.ids)
            self._moved.difference_update(body.ids)
        if isinstance(body, Redistribute):
            moves = [move for step in body.steps for move in transfers(step) if self.info.index in move.targets]
            self._moved.update(ticket for move in moves for ticket in move.ids)
        if not isinstance(body, ExecuteMFC):
            return CallResult()
        mfc, mine = self._mfcs[body.mfc], body.parts[self.info.index]
        if missing := [ticket for ticket in mine if ticket not in receiver.store and ticket not in self._moved]:
            raise RuntimeError(f"MFC {mfc.name!r}: this head does not have {missing[:5]}; master and head disagree")
        if mfc.kind == "train_step":
            share = 1.0 if body.ends_step and not body.batch else len(body.ids) / self._config.train.batch_size
            await asyncio.sleep(self._step_s * share)
        return CallResult(ids=list(mine), keys=list(mfc.output_keys), seconds=self.system.clock.monotonic() - start)

    async def _write(self, call: Call, body: CommitWeights) -> None:
        version, source = WeightVersion.parse(body.weight_version), Path(self._config.model_path)
        fsync = self._config.weights.fsync
        await asyncio.to_thread(
            publish_folder, path_of(self.info.run_dir, body.folder), source_dir=source, version=version, fsync=fsync
        )
        call.reply(CallResult())


class PacedReference(Worker):
    """A model worker of a detached group that sleeps for its MFCs. It fetches no data.

    consumes: calls.  produces: their replies.  waits for: the next call; inside an MFC for the clock.  unblocked by: the master.
    """

    def __init__(self, config: ModelWorkerConfig, pace: Pace, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self._group_s = pace.ref_step_s / config.train.batch_size
        self._mfcs = {mfc.name: mfc for mfc in config.mfcs}

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        server = NameResolvingReplyServer(
            directory.resolver,
            self.names,
            index=self.info.index,
            runtime=self.info.runtime,
            transport=self.system.transport,
            lease=directory.lease,
            worker=self.name,
            attempt=self.info.attempt,
        )
        opened.push_async_callback(server.close)
        await server.start()
        self.began()
        while True:
            call = await server.receive()
            self.board.progress()
            result = CallResult()
            if isinstance(call.body, ExecuteMFC):
                seconds, keys = self._group_s * len(call.body.ids), list(self._mfcs[call.body.mfc].output_keys)
                await asyncio.sleep(seconds)
                result = CallResult(ids=call.body.ids, keys=keys, seconds=seconds)
            call.reply(result)


def make_worker(config: ProcessConfig, pace: Pace) -> Worker:
    """The stand-in for the process with this config."""
    if isinstance(config, GenerationServerConfig):
        return PacedServer(config, pace)
    if isinstance(config, ModelWorkerConfig):
        detached = any(config.worker.index in group for group in config.worker_groups[1:])
        return PacedReference(config, pace) if detached else PacedTrainer(config, pace)
    raise ValueError(f"{config.worker.name}: there is no stand-in for a {config.worker.kind}")


def main() -> int:
    die_with_parent()
    config = load_process_config(Path(sys.argv[1]))
    configure_logging(config.worker)
    join_network(config.worker)
    return run_worker(make_worker(config, msgspec.json.decode(sys.argv[2], type=Pace)))


if __name__ == "__main__":
    end_process(main())
