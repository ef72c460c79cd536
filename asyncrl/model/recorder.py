"""Recorder: what stands in the place of the model workers where nothing is trained (mode=rollout_only). No torch.

    rollout workers -- trajectory --> [intake] -> store -- metadata --> master
    master -- calls --> [reply server]: a batch to disk, the initial weights published as they are

To the others it is a head: the same streams, the same verdicts, the same calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncrl.config.schema import RecorderConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.trajectories import (
    Entry,
    RecordingFullError,
    TrajectoryStore,
    recording_dir,
    tokenizer_fingerprint,
)
from asyncrl.model.store import DataStore
from asyncrl.model.trajectory_receiver import TrajectoryReceiver
from asyncrl.protocol.messages import CallResult, ClearData, ExecuteMFC, WeightVersion, WriteWeights
from asyncrl.protocol.run_folder import path_of
from asyncrl.runtime.disk import writing
from asyncrl.runtime.request_reply import Call, NameResolvingReplyServer
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import PhasedWorker, RunEndedError
from asyncrl.weights.versions import publish_folder

_LAST_WORDS_S = 0.2  # between the answer to a call that failed and the end of the worker


class Recorder(PhasedWorker):
    """The only head of a run that only rolls out.

    consumes: trajectories, calls (from the master, in order).  produces: metadata, files, the initial weights as version 0.
    waits for: the next call; inside one for the disk.  unblocked by: the master.
    """

    def __init__(self, config: RecorderConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self.store = DataStore(config.store_capacity)
        self._num_batches = 0  # recorded
        self.files = TrajectoryStore(
            recording_dir(Path(config.worker.run_dir), config.worker.attempt),
            self.name,
            trained=False,
            max_bytes=config.max_bytes,
            prune=False,  # what is rolled out is the result of the run
            tokenizer=tokenizer_fingerprint(config.tokenizer_path),
        )

    async def setup(self) -> None:
        config, runtime = self.config, self.info.runtime
        limits = ModelLimits.of(config.model_path)
        self.intake = TrajectoryReceiver(self, self.store, head=0, limits=limits, verdict_limit_s=config.call_timeout_s)
        self.server = NameResolvingReplyServer(
            self.resolver,
            self.names,
            index=0,
            runtime=runtime,
            transport=self.system.transport,
            lease=self.lease,
            worker=self.name,
            attempt=self.info.attempt,
        )
        await self.intake.open()
        await self.server.start()
        self.spawn(self.intake.run(), "take in")

    async def work(self) -> None:
        """Execute calls in order, for ever. One that fails is answered with its error and ends this worker."""
        while True:
            call = await self.server.receive()
            self.board.progress()
            try:
                call.reply(await self._execute(call))
            except Exception as error:
                call.fail(error)
                await asyncio.sleep(_LAST_WORDS_S)
                raise

    async def close(self) -> None:
        for name in ("server", "intake"):
            if hasattr(self, name):
                await getattr(self, name).close()

    async def _execute(self, call: Call) -> CallResult:
        body, start = call.body, time.monotonic()
        ids: list[str] = []
        stats: dict[str, float] = {}
        if isinstance(body, ExecuteMFC):
            ids = list(body.ids)
            number = self._num_batches
            await self._on_disk(partial(self._record, number, ids), f"batch {number}")
            self._num_batches += 1
            stats = {"record/num_files": float(self.files.num_files), "record/num_bytes": float(self.files.num_bytes)}
        elif isinstance(body, WriteWeights):
            await self._on_disk(partial(self._publish, body), "the initial weights")
        elif isinstance(body, ClearData):
            self.intake.discard(body.ids)
        return CallResult(ids=ids, stats=stats, seconds=time.monotonic() - start)

    async def _on_disk(self, write: Callable[[], None], what: str) -> None:
        written = asyncio.to_thread(write)
        await self.board.bounded(
            written, what=f"{what} to be on disk", on=self.name, limit_s=self.config.call_timeout_s
        )

    def _record(self, number: int, ids: list[str]) -> None:
        entries = [
            Entry(self.store.whole(ticket), self.intake.metas[ticket], position) for position, ticket in enumerate(ids)
        ]
        try:
            with writing(self.files.folder):
                self.files.write(number, len(ids), entries)
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
