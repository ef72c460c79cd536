"""Recorder: replaces the model workers in a run without training (mode=rollout_only). No torch.

    rollout workers -- trajectory --> [trajectory receiver] -> store -- metadata --> master
    master -- calls --> [reply server]: write a batch to disk, publish the initial weights unchanged

To other processes it is a head: same streams, same verdicts, same calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from asyncrl.config.processes import RecorderConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.trajectories import (
    Entry,
    RecordingFullError,
    TrajectoryStore,
    recording_dir,
    tokenizer_fingerprint,
)
from asyncrl.dataflow.graph import TRAJECTORY_KEYS
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver, trajectory_error
from asyncrl.protocol.calls import CallResult, ClearData, ExecuteMFC, WriteWeights
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.run_folder import path_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.disk import writing
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker
from asyncrl.streams.request_reply import Call, NameResolvingReplyServer
from asyncrl.weights.versions import publish_folder


class Recorder(Worker):
    """The only head of a rollout-only run.

    consumes: trajectories, calls (from the master, in order).  produces: metadata, files, the initial weights as version 0.
    waits for: the next call; the disk during a call.  unblocked by: the master.
    """

    def __init__(self, config: RecorderConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self._files = TrajectoryStore(
            recording_dir(Path(config.worker.run_dir), config.worker.attempt),
            self.name,
            trained=False,
            max_bytes=config.max_bytes,
            prune=False,  # the rollouts are the result of the run
            tokenizer=tokenizer_fingerprint(config.tokenizer_path),
            clock=self.system.clock,
        )
        self._num_batches = 0  # recorded

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        config = self.config
        opening = TrajectoryReceiver.open(
            self.info,
            directory,
            self.system,
            self.incarnation,
            DataStore(config.store_capacity),
            head=0,
            check=partial(
                trajectory_error,
                limits=ModelLimits.of(config.model_path),
                keys=(*TRAJECTORY_KEYS, *config.words),
                max_words_bytes=config.max_words_bytes,
            ),
            verdict_limit_s=config.call_timeout_s,
            services=self.services,
        )
        receiver = await opened.enter_async_context(opening)
        server = NameResolvingReplyServer(
            directory.resolver,
            self.names,
            index=0,
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
        """Execute calls in order, forever. A failed call is answered with its error and ends this worker."""
        while True:
            call = await server.receive()
            self.board.progress()
            async with call.answering_errors():
                call.reply(await self._execute(call, receiver))

    async def _execute(self, call: Call, receiver: TrajectoryReceiver) -> CallResult:
        body, start = call.body, self.system.clock.monotonic()
        ids: list[str] = []
        stats: dict[str, float] = {}
        if isinstance(body, ExecuteMFC):
            ids = list(body.ids)
            number = self._num_batches
            await self._on_disk(partial(self._record, number, ids, receiver), f"batch {number}")
            self._num_batches += 1
            stats = {"record/num_files": float(self._files.num_files), "record/num_bytes": float(self._files.num_bytes)}
        elif isinstance(body, WriteWeights):
            await self._on_disk(partial(self._publish, body), "the initial weights")
        elif isinstance(body, ClearData):
            receiver.discard(body.ids)
        return CallResult(ids=ids, stats=stats, seconds=self.system.clock.monotonic() - start)

    async def _on_disk(self, write: Callable[[], None], what: str) -> None:
        written = asyncio.to_thread(write)
        await self.board.bounded(
            written, what=f"{what} to be written to disk", on=self.name, limit_s=self.config.call_timeout_s
        )

    def _record(self, number: int, ids: list[str], receiver: TrajectoryReceiver) -> None:
        entries = [
            Entry(receiver.store.whole(ticket), receiver.metas[ticket], position) for position, ticket in enumerate(ids)
        ]
        try:
            self._files.write(number, len(ids), entries)
        except RecordingFullError as error:
            raise RunEndedError(str(error)) from error

    def _publish(self, body: WriteWeights) -> None:
        path = path_of(self.info.run_dir, body.folder)
        with writing(path):
            publish_folder(
                path,
                source_dir=Path(self.config.model_path),
                version=WeightVersion.parse(body.weight_version),
                fsync=self.config.weights.fsync,
            )
