"""Exports weight versions and publishes them to the run, off the critical path.

the workers write -> commit -> name resolve: model_version -> gserver manager -> generation servers
transports from memory (config/transports.py): the workers hold them -> name resolve: weights_held, before the files are complete
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import EMA
from asyncrl.config.transports import transport_of
from asyncrl.master.books import Books
from asyncrl.master.device_turns import Turns
from asyncrl.master.evaluations import Evaluations
from asyncrl.master.files import MasterFiles
from asyncrl.master.model_workers import ModelWorkers
from asyncrl.master.rollouts import LONG_POLL_S, ManagerReports
from asyncrl.protocol.calls import HoldWeights, Reallocate, WriteWeights
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.services import Services
from asyncrl.weights.versions import version_dir

_MAX_REWRITES = 3  # maximum number of rewrites of one damaged version
REWRITE_PAUSE_S = 10.0  # minimum time after a rewrite before the next, so that the manager learns of it


class _Rewritten(NamedTuple):
    """The version that was rewritten last."""

    version: WeightVersion
    times: int  # number of its rewrites
    last: float  # time of its last rewrite, in monotonic seconds


class Publisher:
    """Publishes nothing: no process serves the weights, and the model workers generate (mode=sync)."""

    metrics: Mapping[str, float] = {}  # of the newest complete version

    def __init__(self, workers: ModelWorkers) -> None:
        self._workers = workers

    async def publish(self) -> None:
        """Export the newest version, then publish it."""

    def start(self) -> None:
        """Start to publish the newest version in the background."""

    async def finished(self) -> None:
        """Wait for the version that is being published."""

    async def served(self) -> None:
        """Wait until the newest version is served. Raises WaitTimeoutError."""

    async def let_generate(self) -> None:
        """Begin generation's turn on shared devices."""

    async def serve_average(self) -> None:
        """Let the actor's moving average (train.ema) generate, for an evaluation after the last step. Raises WaitTimeoutError."""
        # It is copied over the weights that generate, so no later step may follow
        copies = [Reallocate(source=EMA, target=model) for model in self._workers.generating]
        await asyncio.gather(*self._workers.refresher.copy(copies))

    async def keep(self, path: Path) -> None:
        """Save the weights after a bad batch in this folder, unless the version that the batch trained from is kept."""
        await self._workers.save_in(path, ACTOR, "weights to be saved with a bad batch")


class WeightPublisher(Publisher):
    """Exports and publishes weight versions.

    consumes: versions that the workers hold.  produces: versions on disk, and their names in name resolve.
    waits for: the workers' files; the evaluation of the initial weights, before any server gets newer ones.
    unblocked by: the workers; the gserver manager.
    """

    def __init__(
        self,
        config: MasterWorkerConfig,
        books: Books,
        workers: ModelWorkers,
        reports: ManagerReports,
        evaluations: Evaluations,
        directory: Directory,
        files: MasterFiles,
        services: Services,
        *,
        turns: Turns,
        rewrite_pause_s: float = REWRITE_PAUSE_S,
    ) -> None:
        super().__init__(workers)
        self._config, self._books, self._reports = config, books, reports
        self._evaluations, self._directory, self._files, self._turns = evaluations, directory, files, turns
        self._services = services
        self._run_dir = Path(config.worker.run_dir)
        self._rewrite_pause_s = rewrite_pause_s
        self._publishing: asyncio.Task[None] | None = None
        self.metrics = {"time/publish_s": 0.0}
        self._rewritten = _Rewritten(WeightVersion(0, 0), 0, 0.0)

    def start(self) -> None:
        self._publishing = self._services.tasks.spawn(self.publish(), "publish weights")

    async def finished(self) -> None:
        if self._publishing is not None:
            limit_s = self._config.train.call_timeout_s
            what = "the last weights to be published"
            await self._services.board.bounded(self._publishing, what=what, on="weight writer", limit_s=limit_s)

    async def publish(self) -> None:
        """With a transport from memory an earlier entry in name resolve announces the weights there."""
        version, names = self._books.version, self._directory.names
        began, held = self._services.clock.monotonic(), None
        if self._books.trains and transport_of(self._config.weights.transport).from_memory:
            hold = HoldWeights(role=ACTOR, weight_version=str(version))
            held = self._workers.start(ACTOR, f"weights {version} to be in memory", hold)
        write = self._write(version)
        written = self._workers.start(ACTOR, f"weights {version} to be written", write)
        if held is not None:
            await held
            await self._baseline_first(version)
            await self._directory.publish(names.weights_held(ACTOR), str(version))
        with self._services.trace.overlapping(f"publish {version}", kind="weights"):
            await self._workers.commit(write, await written)
        self.metrics = {"time/publish_s": self._services.clock.monotonic() - began}  # until the last file is written
        await self._baseline_first(version)
        await self._directory.publish(names.model_version(ACTOR), str(version))
        served = [WeightVersion.parse(server.version) for server in self._reports.servers if server.version]
        await asyncio.to_thread(self._files.prune_versions, served)
        self._books.note("published", version=version.version)

    async def let_generate(self) -> None:
        """Shared devices: generation's turn begins, with the newest version. Every call of the last step that needs the models must
        have been sent: workers execute calls in order. No effect in generation's turn, and without shared devices."""
        if self._turns.is_shared:
            await self.finished()
            await self._turns.generation()

    async def replace_damaged(self, damaged: str) -> None:
        """Rewrite the newest version if the gserver manager reports it as damaged on disk, unless it was rewritten less than
        REWRITE_PAUSE_S ago. Must be called between two steps. No effect once the model workers no longer hold it, because they have
        taken optimizer steps on the first parts of the next batch (train.streaming): the next version replaces it.

        A damaged older version needs no rewrite, because the newest one replaces it. Raises RunEndedError if the version cannot be
        rewritten, or is damaged again after _MAX_REWRITES rewrites.
        """
        version, count = self._books.version, 0
        if damaged != str(version):
            return
        if self._rewritten.version == version:
            count = self._rewritten.times
            if self._services.clock.monotonic() < self._rewritten.last + self._rewrite_pause_s:
                return
        if not self._books.trains or count >= _MAX_REWRITES:
            tried = f"it was rewritten {count} times" if count else f"mode={self._config.mode} cannot rewrite it"
            path = version_dir(self._run_dir, ACTOR, version)
            raise RunEndedError(f"weights {version} in {path} are damaged, and {tried}; check the disk")
        await self.finished()
        await self._turns.training()
        if self._workers.executor.is_within_step:
            return
        write = self._write(version, rewrite=True)
        with self._services.trace.overlapping(f"rewrite {version}", kind="weights"):
            written = await self._workers.start(ACTOR, f"weights {version} to be written again", write)
            await self._workers.commit(write, written)
        self._services.logger.warning("weights %s were damaged on disk; they were rewritten from memory", version)
        await self._directory.publish(self._directory.names.model_version(ACTOR), str(version))
        self._rewritten = _Rewritten(version, count + 1, self._services.clock.monotonic())
        await self._turns.generation()

    async def serve_average(self) -> None:
        """Publish the average as the version after the last one."""
        await self._turns.training()
        last = self._books.version
        version = WeightVersion(last.attempt, last.version + 1)
        write = self._write(version, role=EMA)
        await self._workers.commit(write, await self._workers.start(EMA, f"weights {version} to be written", write))
        await self._directory.publish(self._directory.names.model_version(ACTOR), str(version))
        await self._turns.generation()
        await self._served(version.version)

    async def keep(self, path: Path) -> None:
        """No effect: the version is not pruned."""

    async def served(self) -> None:
        await self._served(self._books.version.version)

    async def _served(self, version: int) -> None:
        """Wait until the gserver manager reports a version as served. Raises WaitTimeoutError after eval.timeout_s."""
        what, limit_s = f"version {version} to be served", self._config.eval.timeout_s
        await self._services.board.bounded(
            self._until_served(version), what=what, on="gserver manager", limit_s=limit_s
        )

    async def _until_served(self, version: int) -> None:
        view = await self._reports.report()
        while view.served_version < version:  # bounded by the caller
            await self.replace_damaged(view.damaged)
            view = await self._reports.report(wait_s=LONG_POLL_S, after_revision=view.revision)

    async def _baseline_first(self, version: WeightVersion) -> None:
        """Before version 1, wait until the initial weights have been evaluated: no server may get newer ones earlier. Training
        continues meanwhile."""
        if version.version == 1:
            await self._evaluations.baseline_over()

    def _write(self, version: WeightVersion, *, role: str = ACTOR, rewrite: bool = False) -> WriteWeights:
        folder = name_of(self._run_dir, version_dir(self._run_dir, ACTOR, version))
        return WriteWeights(role=role, weight_version=str(version), folder=folder, rewrite=rewrite)
