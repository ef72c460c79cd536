"""Writes checkpoints beside training, so that a run can continue after a crash.

    after a step, in one turn of the event loop   take MasterState, send SaveCheckpoint to all workers, journal `snapshot`
    beside the steps that follow                  workers write files to disk; commit; journal; remove older checkpoints

So the master's state and the models' state belong to the same step, whatever happens between snapshot and commit. If the master's
state were of a later step, prompts would be lost: they would count as done, but the models would not have trained on them. If it
were of an earlier step, prompts would be trained twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.master.books import Books
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.files import MasterFiles
from asyncrl.protocol.calls import CallResult, CommitCheckpoint, SaveCheckpoint
from asyncrl.protocol.run_folder import name_of
from asyncrl.runtime.services import Services
from asyncrl.weights.checkpoints import MasterState, checkpoint_dir


class Checkpointer:
    """Writes one checkpoint at a time. A checkpoint that is due while another is being written begins after the first step that
    ends once the other is complete.

    consumes: the state to be saved, the workers' files.  produces: checkpoints; `snapshot` and `checkpoint` in the journal.
    waits for: the replies of the model workers, within train.call_timeout_s.  unblocked by: the model workers.
    """

    def __init__(
        self,
        config: MasterWorkerConfig,
        books: Books,
        caller: WorkerCaller,
        files: MasterFiles,
        services: Services,
    ) -> None:
        self._config, self._books, self._caller, self._files = config, books, caller, files
        self._services = services
        self._run_dir = Path(config.worker.run_dir)
        # Workers of other groups have no state to save
        self._everyone = WorkerGroups.of_config(config.worker_groups, config.num_model_workers).trainer
        self._due = False
        self._newest: int | None = None  # step of the checkpoint that began last
        self._task: asyncio.Task[None] | None = None

    def after_step(self, *, due: bool, take: Callable[[], MasterState]) -> None:
        """Begin a checkpoint of this step if one is due and none is being written. Does not await, so that the master's state from
        `take` and the state that the workers save belong to the same moment."""
        self._due |= due
        if not self._due or (self._task is not None and not self._task.done()):
            return
        self._due = False
        self._begin(take())

    async def last(self, *, step: int, take: Callable[[], MasterState]) -> None:
        """Write a checkpoint of the last step, if checkpoints are enabled and this step has none."""
        await self.end()
        if self._config.checkpoint.enabled and self._newest != step:
            self._begin(take())
            await self.end()

    def _begin(self, state: MasterState) -> None:
        self._newest = state.step
        path = checkpoint_dir(self._run_dir, state.attempt, state.step)
        save = SaveCheckpoint(folder=name_of(self._run_dir, path))
        saved = self._caller.call(f"{path.name} to be written", self._everyone, save)
        # A run that continues from this checkpoint voids all journal records after this `snapshot`
        self._books.note("snapshot", step=state.step)
        self._task = self._services.tasks.spawn(self._commit(path, state, saved), "checkpoint")

    async def end(self) -> None:
        """Wait for the end of the checkpoint that is being written."""
        if self._task is not None:
            await self._services.board.bounded(
                self._task,
                what="the last checkpoint to be written",
                on="model workers",
                limit_s=self._config.train.call_timeout_s,
            )

    async def _commit(self, path: Path, state: MasterState, saved: asyncio.Task[list[CallResult]]) -> None:
        start = self._services.clock.monotonic()
        with self._services.trace.overlapping(f"checkpoint of step {state.step}", kind="weights"):
            replies = await saved
            if self._config.weights.fsync:  # the journal up to this checkpoint must be on disk before the checkpoint is
                await asyncio.to_thread(self._books.journal.sync)
            commit = CommitCheckpoint(
                folder=name_of(self._run_dir, path),
                files=[file for reply in replies for file in reply.files],
                master=msgspec.json.encode(state).decode(),
            )
            await self._caller.call(f"{path.name} to be complete", self._everyone[:1], commit)
        self._books.note("checkpoint", step=state.step)
        write_s = self._services.clock.monotonic() - start
        self._services.logger.info("checkpoint of step %d in %.1f s: %s", state.step, write_s, path)
        if period_s := self._books.pace_checkpoints(write_s):
            self._services.logger.info("the next checkpoint by time follows %.0f s after this one began", period_s)
        await asyncio.to_thread(self._files.prune_checkpoints)
