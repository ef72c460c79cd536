"""The loop of train steps, and the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.modes import mode_of
from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.data.bad_batches import WEIGHTS, folder_of
from asyncrl.dataflow.graph import TRAIN_MFC
from asyncrl.master.books import Books, RejectedShareError, eval_schedule
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.master.checkpointing import Checkpointer
from asyncrl.master.device_turns import Turns
from asyncrl.master.evaluations import Evaluations
from asyncrl.master.generating import GeneratingStep, NoBatch, Prompts
from asyncrl.master.model_workers import ModelWorkers
from asyncrl.master.profiling import Profiles
from asyncrl.master.publishing import Publisher
from asyncrl.master.report import StepTimes, UpdateSeconds, of_whole_batch, step_metrics, throughput_metrics
from asyncrl.master.rollouts import BatchSource, unless
from asyncrl.master.skipped import SkippedSteps
from asyncrl.master.step_result import StepResult
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.manager import Order
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.services import Services
from asyncrl.weights.checkpoints import MasterState


class _Formed(NamedTuple):
    """The batch of a step, and when it was complete."""

    batch: Sequence[str]
    metas: Sequence[TrajectoryMeta]
    monotonic: float
    time: float
    us: int  # of the timeline


class Trainer:
    """Runs the train steps.

    consumes: batches.  produces: MFC calls, weight versions, saved models, checkpoints, records in the books.
    waits for: a batch; the replies of the model workers; before it exports a step's weights, the
    end of the previous export.
    unblocked by: rollout workers that finish; model workers that reply.
    """

    def __init__(
        self,
        config: MasterWorkerConfig,
        books: Books,
        buffer: AsyncIOSequenceBuffer,
        workers: ModelWorkers,
        source: BatchSource,
        publisher: Publisher,
        evaluations: Evaluations,
        checkpointer: Checkpointer,
        services: Services,
        *,
        turns: Turns,
        profiles: Profiles,
        leaving: asyncio.Event,
    ) -> None:
        """leaving: set when the launcher stops the run."""
        self._config, self._books, self._buffer, self._workers, self._source = config, books, buffer, workers, source
        self._publisher, self._evaluations, self._checkpointer, self._turns = (
            publisher,
            evaluations,
            checkpointer,
            turns,
        )
        self._services, self._leaving, self._profiles = services, leaving, profiles
        self._run_dir = Path(config.worker.run_dir)
        self._skipped = SkippedSteps(config.train, self._run_dir, books.attempt, services)
        self._update_seconds = UpdateSeconds()
        self._formed = _Formed((), (), 0.0, 0.0, 0)  # of the step that runs
        self._num_generated = books.summary.num_finished_tokens  # until the end of the previous step

    async def begin(self, state: MasterState | None) -> None:
        """Wait until the models are loaded, load the checkpoint that `state` belongs to (None: the run begins anew), and publish
        the weights with which training begins."""
        config, books = self._config, self._books
        await self._turns.begin()
        await self._workers.load()
        if state is not None:
            self._workers.executor.states = state.mfcs
            await self._workers.load_checkpoint(Path(config.resume), state.step)
        books.begin()
        if not mode_of(config.mode).forms_batches:
            await self._source.end()  # before the manager grants a train ticket
        await self._publisher.publish()
        await self._turns.generation()
        if config.train.arriving_inference:
            arriving = self._workers.executor.process_arriving(books.version.version)
            self._services.tasks.spawn(arriving, "process arriving groups")
        sets = self._evaluations.sets
        if state is None:
            self._evaluations.begin([name for name, chosen in sets.items() if chosen.at_start], baseline=True)
        elif state.evaluating:
            self._evaluations.begin(list(sets))

    async def train(self) -> bool:
        """Run all steps. Returns False if this attempt ends before the last step: the launcher stopped the run, or the next phase
        of its allocation begins. The last trained step then has a checkpoint, if checkpoints are enabled."""
        if not mode_of(self._config.mode).forms_batches:
            return True
        finished = self._books.parent is not None and self._books.is_over()
        while not finished:
            if not self._leaves():
                finished = await self.train_one_step()
            if self._leaves() and not finished:
                await self._turns.training()
                await self._write_last_checkpoint()
                return False
        return True

    def _leaves(self) -> bool:
        """Whether this attempt ends now, before the run does."""
        return self._leaving.is_set() or 0 < self._config.leave_after <= self._books.step

    async def train_one_step(self) -> bool:
        """Form a batch, run the dataflow on it, start to publish the weights, write the books. Returns True after the last step,
        or if no batch is left. Returns False without a step if the launcher stops the run while the batch is formed, or if all
        prompts that the step has ordered are rejected: the next call orders further ones."""
        books, clock, executor = self._books, self._services.clock, self._workers.executor
        self._skipped.check()
        await self._profiles.before_step(books.step + 1)
        start, version = clock.monotonic(), books.version.version
        prompts = Prompts(books.progress, self._config.train.batch_size, version)
        if executor.generates and not prompts.num_left:
            return self._no_prompt_is_left()
        try:
            if executor.generates:
                result = await executor.generate_step(GeneratingStep(prompts, self._config, self._form))
            else:
                result = await executor.execute_step(await self._form(), version)
        except NoBatch:
            if self._leaving.is_set() or executor.generates:
                return False
            return self._no_prompt_is_left()
        train_end, trained = clock.time(), clock.monotonic()
        batch, metas, formed, train_start, begun_us = self._formed
        self._services.trace.add_span("train step", begun_us, track="steps", step=version + 1, prompts=len(batch))
        books.train(metas)
        await self._source.trained(batch)
        if self._skipped.add(result.stats):
            await self._keep_bad_batch(metas, result)
        forgotten = self._workers.forget(batch)
        if books.trains:
            with self._services.trace.span("wait for weights", track="steps", version=version):
                await self._publisher.finished()
            self._publisher.start()
        await forgotten
        formed -= self._source.trained_s
        times = StepTimes(formed - start, trained - formed, clock.monotonic() - trained)
        # Without an MFC that trains (mode=rollout_only), the batch counts as it is
        in_update = result.trained if self._books.trains else None
        metrics = of_whole_batch(
            result.stats, step_metrics(metas, version, times, self._config.tasks, trained=in_update)
        )
        metrics["time/servers_updating_s"] = self._update_seconds.since_last(self._source.servers)
        metrics |= self._publisher.metrics
        metrics |= self._throughput(metas, result, times.total_s)
        books.write_step(metas, metrics, {**result.seconds, **self._source.seconds}, (train_start, train_end))
        await self._profiles.after_step(books.step)
        last = books.is_over()
        self._run_schedules(last)
        return last

    async def _form(self, order: Order | None = None) -> Sequence[str]:
        """Form the batch of the next step; training may use the devices then. order: of a step that generates.

        Raises NoBatch if the launcher stops the run meanwhile, if no prompt is left, or if all ordered ones are rejected."""
        clock = self._services.clock
        with self._services.trace.span("form batch", track="steps", step=self._books.step + 1):
            batch = await self._source.form_batch(order)
        if self._leaving.is_set() or not batch:  # a later attempt rolls out the prompts in the buffer again
            raise NoBatch
        if self._turns.is_shared and self._evaluations.num_running:  # they need the servers, with these weights
            await self._publisher.let_generate()
            await unless(self._leaving, self._evaluations.ended())
            if self._leaving.is_set():
                raise NoBatch
        await self._turns.training()
        metas = self._buffer.metas(batch)
        self._formed = _Formed(batch, metas, clock.monotonic(), clock.time(), self._services.trace.now_us())
        return batch

    def _no_prompt_is_left(self) -> bool:
        """Return True: the last step is over. Raises RejectedShareError if there was none."""
        if self._books.step == self._config.first_step:
            raise RejectedShareError(f"every prompt was rejected, so no step was trained: {self._books.rejections()}")
        return True

    def _throughput(self, metas: Sequence[TrajectoryMeta], result: StepResult, step_s: float) -> dict[str, float]:
        config, models = self._config, self._workers.models
        on = {mfc.name: models[mfc.model].grid.size for mfc in config.mfcs if mfc.model in models}
        before, self._num_generated = self._num_generated, self._books.summary.num_finished_tokens
        if mode_of(config.mode).workers_generate:
            generation_devices = sum(on[mfc.name] for mfc in config.mfcs if mfc.kind == "generate")
        else:  # train_only has no servers
            servers = [server for server in self._source.servers if server.state != "dead"]
            generation_devices = len(servers) * config.devices_per_server
        return throughput_metrics(
            num_tokens=sum(sum(meta.seqlens) for meta in metas if meta.ticket_id in result.trained),
            num_generated=self._num_generated - before,
            step_s=step_s,
            seconds=result.seconds if self._books.trains else {},
            peak_s=result.peak_s,
            train_mfc=TRAIN_MFC,
            training_devices=on.get(TRAIN_MFC, 1),
            generation_devices=generation_devices,
        )

    async def finish(self) -> None:
        """End the run after the last step: publish the last weights, save the models, write a checkpoint, evaluate."""
        await self._publisher.finished()
        await self._turns.training()
        if self._books.trains:
            await self._workers.save("final")  # first, so that a failed evaluation does not lose the result
        await self._write_last_checkpoint()
        last = [name for name, chosen in self._evaluations.sets.items() if chosen.at_end]
        if last or self._evaluations.num_running:
            await self._turns.generation()
        await self._source.end()
        if last:
            try:
                await self._publisher.served()
                self._evaluations.begin(last, name="end")
            except WaitTimeoutError as error:
                self._services.logger.warning("skipped the last evaluation: %s", error)
        await self._evaluations.all_over()
        if not (mode_of(self._config.mode).forms_batches or self._books.summary.evaluations):
            raise RunEndedError(f"no evaluation ended within eval.timeout_s={self._config.eval.timeout_s:g}; raise it")
        await self._evaluate_average(last)

    async def _evaluate_average(self, sets: Sequence[str]) -> None:
        """Evaluate the actor's moving average (train.ema), after the last evaluation of the actor."""
        if self._config.train.ema is None or not (sets and self._books.trains):
            return
        try:
            await self._publisher.serve_average()  # the models have been saved
            self._evaluations.begin(sets, name="ema", prefix="ema_")
        except WaitTimeoutError as error:
            self._services.logger.warning("skipped the evaluation of the moving average: %s", error)
        await self._evaluations.all_over()

    async def _write_last_checkpoint(self) -> None:
        """Write a checkpoint of the last step, for a later attempt to continue from. An attempt that itself continues from a
        checkpoint and has trained no step since writes none, and none is written within a step: a later attempt continues from the
        previous one."""
        if self._workers.executor.is_within_step:
            self._services.logger.warning(
                "no checkpoint of step %d is written: the next step has taken optimizer steps on the first parts of its batch",
                self._books.step,
            )
            return
        parent = self._books.parent
        if parent is None or self._books.step > parent[1]:
            await self._checkpointer.last(step=self._books.step, take=self._state)

    def _run_schedules(self, last: bool) -> None:
        """Start what is due. Called at the end of a step, so that a checkpoint's state is complete. No checkpoint begins during the
        evaluation of the initial weights, because no later attempt would repeat that evaluation."""
        due = [name for name in self._evaluations.sets if self._books.is_due(eval_schedule(name))]
        # `finish` evaluates the last weights on the sets with at_end, once they are served
        self._evaluations.begin_if_room([name for name in due if not (last and self._evaluations.sets[name].at_end)])
        if self._books.is_due("save"):
            version = self._books.version.version
            self._services.tasks.spawn(self._workers.save(f"step_{version:08d}"), "save")
        if not self._evaluations.baseline_runs:
            self._checkpointer.after_step(due=self._books.is_due("checkpoint"), take=self._state)

    def _state(self) -> MasterState:
        evaluating = self._evaluations.num_running > 0
        workers = self._workers
        return self._books.state(evaluating=evaluating, mfcs=workers.executor.states)

    async def _keep_bad_batch(self, metas: Sequence[TrajectoryMeta], result: StepResult) -> None:
        """Save the batch of a step of which all or some optimizer steps were skipped, for examples/bad_batch."""
        workers, step = self._workers, self._books.step
        await self._skipped.save(
            metas, step, result.stats, heads=workers.heads, tracker=workers.tracker, caller=workers.caller
        )
        if self._config.train.keep_bad_batches:
            await self._publisher.keep(folder_of(self._run_dir, self._books.attempt, step) / WEIGHTS)
