"""Hands weights out: files of a version, of a model for the user, of a checkpoint; and a copy in memory for the sender.

    all ranks of the model   snapshot, on the compute thread: numbered, collective; each rank gets its share
    each rank                its share's files to disk, beside what follows; the reply has them
    the model's first rank   commit: manifest, final name, when the master says that all files are there

The first rank of the model also has the sender (weights.transport=broadcast), and with it the whole model in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from asyncrl.config.schema import ModelConfig, ModelWorkerConfig
from asyncrl.model import checkpoint
from asyncrl.model.broadcast import WeightSender
from asyncrl.model.compute import Compute
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import commit_model, take_share, take_whole
from asyncrl.model.probe import LogprobProbe
from asyncrl.model.sending import Held
from asyncrl.protocol.messages import (
    CallResult,
    CommitCheckpoint,
    CommitWeights,
    HoldWeights,
    SaveCheckpoint,
    SaveModel,
    ShareWeights,
    WeightVersion,
    WriteWeights,
    WrittenFile,
)
from asyncrl.protocol.run_folder import path_of
from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.disk import writing
from asyncrl.runtime.request_reply import Call
from asyncrl.runtime.trace import Tracer
from asyncrl.weights.versions import Probe, commit_version, write_part

T = TypeVar("T")

SHARED = "shared"  # what a model is called in the files of ShareWeights
LAST_WORDS_S = 0.2  # between the answer to a call that failed and the end of the worker


class _Lane:
    """Writes one thing after another, on a thread of its own: weights and checkpoints do not wait for each other."""

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(1, name)
        self.writing: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self.writing is not None:  # what is half written has no final name: a wait would only be politeness
            self.writing.cancel()
        self.pool.shutdown(wait=False, cancel_futures=True)


class Publisher:
    """One worker's part of handing weights out.

    consumes: calls.  produces: files, replies; what the sender holds.
    waits for: the compute thread, and for the write before: so there is never more than one snapshot in memory that is written,
    one that is sent, and one of a checkpoint.  unblocked by: the other ranks of the model; the disk.
    """

    def __init__(
        self,
        config: ModelWorkerConfig,
        compute: Compute,
        sender: WeightSender | None,
        tasks: BackgroundTasks,
        *,
        board: StatusBoard,
        trace: Tracer,
        clock: Clock,
    ) -> None:
        """sender: at the first rank of the model that is served."""
        self._config, self._info, self._compute, self._sender = config, config.worker, compute, sender
        self._tasks, self._board, self._trace, self._clock = tasks, board, trace, clock
        self._probe = LogprobProbe(config.worker.seed) if config.weights.verify_logprobs else None
        self._measured: Probe | None = None  # with the newest snapshot
        self._held_version = ""  # that all ranks have made for the sender
        self._weights, self._checkpoints = (
            _Lane(f"{config.worker.name}-writer"),
            _Lane(f"{config.worker.name}-checkpoint-writer"),
        )

    def close(self) -> None:
        self._weights.close()
        self._checkpoints.close()

    # -------------------------------------------------------------------------------------------------------------- calls

    async def hold(self, body: HoldWeights, engine: TrainEngine) -> None:
        """Snapshot for the sender; at the other ranks nothing is left of it. The same snapshot is what WriteWeights writes."""
        await self._end_of_writing(self._weights)

        def snapshot() -> Held:
            buckets = take_whole(engine, self._config.weights.bucket_bytes)
            return Held(WeightVersion.parse(body.weight_version), buckets, self._measure(engine))

        held = await self._snapshot(snapshot, body.role)
        self._held_version, self._measured = body.weight_version, held.probe
        if self._sender is not None:
            self._sender.hold(held)

    async def write(self, call: Call, body: WriteWeights | SaveModel, engine: TrainEngine) -> None:
        """Snapshot in the order of calls, write beside what follows. The reply, with the files, comes when they are on disk."""
        path = self._path(body.folder)
        await self._end_of_writing(self._weights)
        if isinstance(body, WriteWeights) and body.weight_version == self._held_version:
            held = self._sender.held if self._sender is not None else None
            tensors = dict(held.tensors()) if held is not None else {}
        else:

            def snapshot() -> dict[str, torch.Tensor]:
                if isinstance(body, WriteWeights):
                    self._measured = self._measure(engine)
                return take_share(engine)

            tensors = await self._snapshot(snapshot, body.role)
        self._begin(self._weights, call, "write weights", path, partial(self._write_part, path, tensors))

    async def commit(self, call: Call, body: CommitWeights, engine: TrainEngine, model: ModelConfig) -> None:
        """All files are on disk: give the folder its final name."""
        path = self._path(body.folder)
        await self._end_of_writing(self._weights)
        commit = partial(self._commit, path, body, engine, model, self._measured)
        self._begin(self._weights, call, "commit weights", path, commit)

    async def write_checkpoint(
        self, call: Call, body: SaveCheckpoint, engines: Mapping[str, TrainEngine], state: dict[str, float]
    ) -> None:
        """Like write, of what training needs to go on. state: of this worker's interfaces, which goes back with the reply."""
        path = self._path(body.folder)
        await self._end_of_writing(self._checkpoints)
        part = await self._snapshot(partial(checkpoint.snapshot, engines), "a checkpoint")
        options = self._config.weights
        write = partial(checkpoint.write, path, part, shard_bytes=options.shard_bytes, fsync=options.fsync)
        self._begin(self._checkpoints, call, "write checkpoint", path, write, state)

    async def share(self, call: Call, body: ShareWeights, engine: TrainEngine) -> None:
        """Like write_checkpoint, of a model's parameters alone: for a model of another world."""
        path = self._path(body.folder)
        await self._end_of_writing(self._checkpoints)
        part = await self._snapshot(partial(checkpoint.snapshot, {SHARED: engine}, moments=False), body.model)
        options = self._config.weights
        write = partial(checkpoint.write, path, part, shard_bytes=options.shard_bytes, fsync=options.fsync)
        self._begin(self._checkpoints, call, "share weights", path, write)

    async def commit_checkpoint(self, call: Call, body: CommitCheckpoint) -> None:
        path = self._path(body.folder)
        await self._end_of_writing(self._checkpoints)

        def commit() -> list[WrittenFile]:
            fsync = self._config.weights.fsync
            checkpoint.commit(path, body.files, state=body.state, master=body.master, fsync=fsync)
            return []

        self._begin(self._checkpoints, call, "commit checkpoint", path, commit)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _path(self, folder: str) -> Path:
        """Raises OutsideRunError."""
        return path_of(self._info.run_dir, folder)

    def _measure(self, engine: TrainEngine) -> Probe | None:
        return self._probe.measure(engine) if self._probe is not None else None

    async def _snapshot(self, take: Callable[[], T], role: str) -> T:
        with self._trace.overlapping("snapshot", kind="weights", role=role):
            return await self._compute(take, f"snapshot of {role}")

    async def _end_of_writing(self, lane: _Lane) -> None:
        if lane.writing is not None:
            limit_s = self._config.train.call_timeout_s
            await self._board.bounded(lane.writing, what="the write before", on=self._info.name, limit_s=limit_s)

    def _begin(
        self,
        lane: _Lane,
        call: Call,
        what: str,
        path: Path,
        function: Callable[[], list[WrittenFile]],
        state: dict[str, float] | None = None,
    ) -> None:
        def on_disk() -> list[WrittenFile]:
            with writing(path):
                return function()

        lane.writing = self._tasks.spawn(self._write_and_reply(lane, call, what, on_disk, state or {}), what)

    async def _write_and_reply(
        self, lane: _Lane, call: Call, what: str, function: Callable[[], list[WrittenFile]], state: dict[str, float]
    ) -> None:
        start = self._clock.monotonic()
        try:
            with self._trace.overlapping(what, kind="weights"):
                files = await asyncio.get_running_loop().run_in_executor(lane.pool, function)
        except Exception as error:
            call.fail(error)
            await asyncio.sleep(LAST_WORDS_S)
            raise
        call.reply(CallResult(files=files, stats=state, seconds=self._clock.monotonic() - start))

    def _write_part(self, path: Path, tensors: dict[str, torch.Tensor]) -> list[WrittenFile]:
        options = self._config.weights
        return write_part(
            path,
            tensors.items(),
            part=self._info.index,
            shard_bytes=options.shard_bytes,
            fsync=options.fsync,
        )

    def _commit(
        self, path: Path, body: CommitWeights, engine: TrainEngine, model: ModelConfig, probe: Probe | None
    ) -> list[WrittenFile]:
        fsync, source_dir = self._config.weights.fsync, Path(model.path)
        if body.weight_version:
            version = WeightVersion.parse(body.weight_version)
            commit_version(
                path,
                body.files,
                source_dir=source_dir,
                version=version,
                fsync=fsync,
                probe=probe,
                replace=body.rewrite,
            )
        else:
            commit_model(
                path,
                body.files,
                config=engine.config,
                dtype=engine.dtype,
                source_dir=source_dir,
                tokenizer_path=self._config.tokenizer_path or self._config.model_path,
                fsync=fsync,
            )
        return []
