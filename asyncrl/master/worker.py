"""MasterWorker: forms batches, runs the dataflow on them, publishes weight versions, and keeps the books.

It holds ids, keys, lengths and versions, never a tensor. It calls the gserver manager over HTTP and the model workers by
request-reply. The heads report every trajectory to it through the meta stream.

    rollouts.py or sync.py -> batch -> trainer.py -> executor.py -> publishing.py, checkpointing.py, evaluations.py
                                           books.py: records of all of these
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from asyncrl.config.modes import mode_of
from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import evaluation_sets
from asyncrl.dataflow.topology import build_handler_routing
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.master.books import Books
from asyncrl.master.buffer import AsyncIOSequenceBuffer, Grants, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.checkpointing import Checkpointer
from asyncrl.master.device_turns import DeviceTurns, Turns
from asyncrl.master.evaluations import Evaluations, ServerEvaluator
from asyncrl.master.files import MasterFiles
from asyncrl.master.model_workers import ModelWorkers, placements_of
from asyncrl.master.profiling import Profiles
from asyncrl.master.publishing import Publisher, WeightPublisher
from asyncrl.master.rollouts import BatchSource, ManagerReports, Rollouts, accept_trajectories
from asyncrl.master.sync import Generation
from asyncrl.master.trainer import Trainer
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.service_client import ServiceClient
from asyncrl.runtime.system import System
from asyncrl.runtime.trackers.tracker import Tracker
from asyncrl.runtime.worker import Worker
from asyncrl.streams.push_pull import MetaPuller
from asyncrl.streams.request_reply import NameResolvingRequestClient


class MasterWorker(Worker):
    """One per run."""

    def __init__(
        self, config: MasterWorkerConfig, system: System | None = None, files: MasterFiles | None = None
    ) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self._files = files if files is not None else MasterFiles(config)

    async def run(self, directory: Directory, opened: AsyncExitStack) -> None:
        config, info, files, clock = self.config, self.info, self._files, self.system.clock
        mode = mode_of(config.mode)
        trackers = files.trackers()
        metrics = files.metrics(trackers)
        opened.callback(metrics.close)
        journal = files.journal()
        opened.callback(journal.close)
        state = await asyncio.to_thread(files.state) if config.resume else None
        data = await asyncio.to_thread(files.data) if not config.num_replayed else None
        books = Books(config, data, self.services, journal=journal, metrics=metrics, state=state)
        capacity = (1 + config.max_head_offpolicyness) * config.train.batch_size
        buffer = AsyncIOSequenceBuffer(books.progress, capacity=capacity, attempt=info.attempt)
        tracker = StorageTracker(WorkerGroups.of_config(config.worker_groups, config.num_model_workers))
        if not mode.workers_generate:
            await self._open_intake(directory, opened, books, buffer, tracker)
        caller, workers = await self._connect_workers(directory, opened, books, buffer, tracker)
        leaving = asyncio.Event()
        source, publisher, evaluations, turns = await self._connect_manager(
            directory, opened, books, buffer, workers, leaving
        )
        checkpointer = Checkpointer(config, books, caller, files, self.services)
        trainer_group = workers.worker_groups.trainer
        profiles = Profiles(directory, caller, trainer_group, Path(info.run_dir), info.attempt)
        trainer = Trainer(
            config,
            books,
            buffer,
            workers,
            source,
            publisher,
            evaluations,
            checkpointer,
            self.services,
            turns=turns,
            profiles=profiles,
            leaving=leaving,
        )
        if mode.trains:
            self.tasks.spawn(profiles.watch(), "watch for profile requests")
        self.tasks.spawn(self._watch_stop_request(directory, leaving), "watch for the stop request")
        await directory.publish(self.names.experiment_status(), "RUNNING")
        self.began()
        await trainer.begin(state)
        began = clock.time()
        if not await trainer.train():
            if 0 < config.leave_after <= books.step:
                self.logger.info("step %d was the last one of this phase of the allocation", books.step)
                return
            self.logger.info("stopped after step %d: the launcher requested it", books.step)
            self.stopping.set()
            await asyncio.Event().wait()  # unblocked by: cancellation, which `stopping` causes at once
        ended = clock.time()
        await trainer.finish()
        await self._write_summary(books, trackers, began, ended)
        await directory.publish(self.names.experiment_status(), "COMPLETE")

    async def _open_intake(
        self,
        directory: Directory,
        opened: AsyncExitStack,
        books: Books,
        buffer: AsyncIOSequenceBuffer,
        tracker: StorageTracker,
    ) -> None:
        """Open the meta stream and start to accept trajectories. This must precede the heads' search for the stream."""
        info = self.info
        metas = MetaPuller(
            directory.resolver,
            self.names,
            runtime=info.runtime,
            transport=self.system.transport,
            lease=directory.lease,
            attempt=info.attempt,
        )
        opened.push_async_callback(metas.close)
        await metas.start()
        # train_only: the replayer has no manager
        grants = Grants(self._files.ticket_key, self.logger) if mode_of(self.config.mode).has_servers else None
        heads = next(iter(placements_of(self.config).values())).heads
        accepting = accept_trajectories(
            metas,
            buffer,
            tracker,
            books,
            heads=heads,
            grants=grants,
            services=self.services,
        )
        self.tasks.spawn(accepting, "accept trajectories")

    async def _connect_workers(
        self,
        directory: Directory,
        opened: AsyncExitStack,
        books: Books,
        buffer: AsyncIOSequenceBuffer,
        tracker: StorageTracker,
    ) -> tuple[WorkerCaller, ModelWorkers]:
        config, info = self.config, self.info

        def begin_anew(group: Sequence[int]) -> None:
            """Called when a worker group has begun a new incarnation: forget what its workers held, because their stores are
            empty."""
            tracker.forget(group)
            books.note("restarted", workers=[f"model_worker/{worker}" for worker in group])

        client = NameResolvingRequestClient(
            directory.resolver,
            self.names,
            num_workers=config.num_model_workers,
            handler_routing=build_handler_routing(list(placements_of(config).values())),
            runtime=info.runtime,
            transport=self.system.transport,
            incarnation=self.incarnation,
            attempt=info.attempt,
            groups=tracker.groups.all,
            on_new_incarnation=begin_anew,
        )
        opened.push_async_callback(client.close)
        async with self.board.waiting("model workers to connect", on="barrier", limit_s=info.runtime.start_limit_s):
            await client.start()
        caller = WorkerCaller(client, self.board, config.train.call_timeout_s)
        return caller, ModelWorkers(config, client, caller, buffer, tracker, logger=self.logger)

    async def _connect_manager(
        self,
        directory: Directory,
        opened: AsyncExitStack,
        books: Books,
        buffer: AsyncIOSequenceBuffer,
        workers: ModelWorkers,
        leaving: asyncio.Event,
    ) -> tuple[BatchSource, Publisher, Evaluations, Turns]:
        """Create the batch source, the weight publisher, the evaluations, and the turns on shared devices. mode=sync needs no
        manager: the model workers generate and evaluate."""
        config, services = self.config, self.services
        write = self._files.write_results
        prompts = {name: self._files.eval_prompts(chosen) for name, chosen in evaluation_sets(config.eval).items()}
        if mode_of(config.mode).workers_generate:
            generation = Generation(config, books, buffer, workers, leaving=leaving, board=self.board)
            evaluations = Evaluations(config.eval, prompts, books, generation, services, write=write)
            return generation, Publisher(workers), evaluations, Turns()
        key = self.names.gserver_manager()
        connecting = ServiceClient.connect(directory, services, key=key, service="gserver manager")
        manager = await opened.enter_async_context(connecting)
        reports = ManagerReports(books, buffer, manager, orders=workers.executor.generates)
        self.tasks.spawn(reports.follow(), "report to new managers")
        evaluator = ServerEvaluator(config.eval.timeout_s, manager, services)
        evaluations = Evaluations(config.eval, prompts, books, evaluator, services, write=write)
        turns = Turns()
        if config.shared_workers:
            turns = DeviceTurns(
                reports,
                workers.caller,
                config.shared_workers,
                directory,
                attempt=self.info.attempt,
                board=self.board,
                limit_s=config.train.call_timeout_s,
            )
        publisher = WeightPublisher(
            config,
            books,
            workers,
            reports,
            evaluations,
            directory,
            self._files,
            services,
            turns=turns,
        )
        rollouts = Rollouts(
            config,
            books,
            buffer,
            workers,
            reports,
            publisher.replace_damaged,
            publisher.let_generate,
            services,
            leaving=leaving,
        )
        return rollouts, publisher, evaluations, turns

    async def _watch_stop_request(self, directory: Directory, leaving: asyncio.Event) -> None:
        """Set `leaving` when the launcher requests that this attempt writes its last checkpoint and exits."""
        async for event in directory.watch(self.names.last_checkpoint()):
            if event.kind == "put" and event.value == str(self.info.attempt):
                leaving.set()

    async def _write_summary(self, books: Books, trackers: Mapping[str, Tracker], began: float, ended: float) -> None:
        """Write summary.json. began, ended: start and end of training, in seconds since the epoch."""
        summary = books.summarize(self.system.clock.time(), self._files.generation_idle_share(began, ended))
        for name, tracker in trackers.items():
            async with self.board.waiting("the last metrics to be sent", on=tracker.label, limit_s=tracker.limit_s):
                summary[name] = await asyncio.to_thread(tracker.finish)
        books.note("ended", step=books.step, done=books.progress.num_done, of=books.progress.num_total)
        self._files.write_summary(summary)
