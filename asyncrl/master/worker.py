"""MasterWorker: forms batches, runs the dataflow on them, publishes weight versions, and keeps the books.

It holds ids, keys, lengths and versions, never a tensor. With the gserver manager it speaks HTTP, with the model workers
request-reply, and the heads tell it of every trajectory through the meta stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from asyncrl.config.schema import CRITIC, REF, MasterWorkerConfig
from asyncrl.data.bad_batches import weights_needed
from asyncrl.data.prompts import PromptSource
from asyncrl.dataflow.graph import MFCDef, without_generation
from asyncrl.dataflow.topology import ModelPlacement, ParallelGrid, build_handler_routing
from asyncrl.dataflow.worlds import Worlds
from asyncrl.master.batch import BatchFormer, NotReady
from asyncrl.master.buffer import AsyncIOSequenceBuffer, Grants, PromptProgress, StorageTracker
from asyncrl.master.calls import ApartWorlds, WorkerCaller
from asyncrl.master.executor import FunctionExecutor, ParameterHooks, StepResult
from asyncrl.master.recovery import Checkpointer
from asyncrl.master.refresh import Refresher
from asyncrl.master.report import (
    RunSummary,
    StepTimes,
    UpdateSeconds,
    generation_idle_share,
    rejection_lines,
    step_metrics,
)
from asyncrl.master.schedule import REWARD_WINDOW, Schedule, ended_by
from asyncrl.master.skipped import SkippedSteps
from asyncrl.protocol.messages import (
    CallBody,
    CallResult,
    ClearData,
    CommitWeights,
    EvaluateReply,
    EvaluateRequest,
    HoldWeights,
    LedgerView,
    MasterReport,
    Ping,
    RejectedPrompt,
    SaveModel,
    StoreVerdict,
    TrajectoryMeta,
    WeightVersion,
    WriteWeights,
)
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.tickets import read_key
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.disk import writing
from asyncrl.runtime.metrics import JsonLinesWriter, MetricsWriter
from asyncrl.runtime.push_pull import MetaPuller
from asyncrl.runtime.request_reply import NameResolvingRequestClient
from asyncrl.runtime.service_client import ServiceClient
from asyncrl.runtime.system import System
from asyncrl.runtime.wandb_writer import SLACK_S, WandbWriter
from asyncrl.runtime.worker import PhasedWorker, RunEndedError
from asyncrl.weights.checkpoints import DataIdentity, MasterState, read_state
from asyncrl.weights.versions import prune_versions, role_dir, version_dir

T = TypeVar("T")

_LONG_POLL_S = 5.0  # how long the manager may hold back its answer while nothing changes
_CALL_LIMIT_S = 60.0  # a call to the manager, retries included
_MAX_REWRITES = 3  # of a version that is damaged on disk
_REWRITE_PAUSE_S = 10.0  # for the manager to hear that a version was written again
_MAX_EVALUATIONS = 4  # that go on at the same time
_REJECTION_WINDOW = 4  # batches' worth of prompts that max_rejected_share looks back on
_RECORDER = ModelPlacement(ACTOR, ParallelGrid(), (0,))  # rollout_only: no model, but who takes its place
_SAVED = (ACTOR, CRITIC)  # models that the user gets at the end


class RejectedShareError(RunEndedError):
    """Too many prompts were rejected to go on; carries the reasons and their counts."""


class _Rewritten(NamedTuple):
    """The version that was written again last."""

    version: WeightVersion
    times: int
    last: float  # time.monotonic() of the last time


class MasterWorker(PhasedWorker):
    """One train step after another.

    consumes: metadata of trajectories (from the heads), the ledger (from the manager).
    produces: MFC calls, weight versions, reports of consumed tickets, metrics.
    waits for: a batch (`form_batch`: stored trajectories that DESIGN.md, "The asynchronous rule", lets train), the replies of the
    model workers, and before a step's weights are written for those of the step before.
    unblocked by: rollout workers finishing, model workers replying.

    Where the model workers make the trajectories: sync.py.
    """

    rejects_in = "rollout_worker"  # the kind of process that says why a prompt is rejected

    def __init__(self, config: MasterWorkerConfig, system: System | None = None) -> None:
        super().__init__(config.worker, system)
        self.config = config
        self.run_dir = Path(config.worker.run_dir)
        train = config.train
        self.data: DataIdentity | None = None  # train_only: there are no prompts
        if config.num_replayed:
            self.progress = PromptProgress(config.num_replayed, 1)
        else:
            self.data = DataIdentity.of(PromptSource(config.prompts, None, config.worker.seed), train.num_epochs)
            self.progress = PromptProgress(self.data.num_prompts, train.num_epochs)
        capacity = (1 + config.max_head_offpolicyness) * train.batch_size
        self.buffer = AsyncIOSequenceBuffer(self.progress, capacity=capacity, attempt=config.worker.attempt)
        self.grants = Grants(lambda: read_key(self.run_dir), self.logger)
        self.former = BatchFormer(
            batch_size=train.batch_size,
            max_head_offpolicyness=config.max_head_offpolicyness,
            overdue=config.overdue,
            overdue_wait_s=config.overdue_wait_s,
            wait_for_full_lag=train.wait_for_full_lag,
        )
        self._num_eval_prompts = 0  # where all are evaluated
        if config.eval.prompts is not None and not config.eval.num_prompts:
            self._num_eval_prompts = len(PromptSource(config.eval.prompts, None, config.worker.seed))
        self.trains = config.mode != "rollout_only"
        self._grants_tickets = config.mode in ("async", "rollout_only")  # train_only: the replayer has no manager
        models = [ModelPlacement.of(model) for model in config.models]
        self.models = {model.name: model for model in models or [_RECORDER]}
        self.heads = next(iter(self.models.values())).heads  # workers that take trajectories, by head
        self.worlds = Worlds.of_config(config.num_model_workers, config.apart)
        self.tracker = StorageTracker(self.worlds.all_apart)
        self.skipped = SkippedSteps(train, self.run_dir, config.worker.attempt, self.logger)
        self.step = config.first_step  # batches done
        self.summary = RunSummary()
        self.save_schedule = Schedule(
            every_steps=train.save_every_steps,
            every_epochs=train.save_every_epochs,
            every_s=train.save_every_s,
            now=time.monotonic(),
        )
        self.eval_schedule = Schedule(
            every_steps=config.eval.every_steps,
            every_epochs=config.eval.every_epochs,
            every_s=config.eval.every_s,
            now=time.monotonic(),
        )
        self.checkpoint_schedule = Schedule(
            every_steps=config.checkpoint.every_steps,
            every_epochs=config.checkpoint.every_epochs,
            every_s=config.checkpoint.every_s,
            now=time.monotonic(),
        )
        self.checkpointer = Checkpointer(self, config, self.checkpoint_schedule)
        self._consumed: list[str] = []  # not yet answered for by the manager
        self._num_rejections_seen = 0
        self._first_details: dict[str, str] = {}  # of rejections, by reason
        self._recent_outcomes: deque[bool] = deque(maxlen=_REJECTION_WINDOW * train.batch_size)
        self._recent_rewards: deque[float] = deque(maxlen=REWARD_WINDOW)
        self._publishing: asyncio.Task[None] | None = None
        self._rewritten = _Rewritten(WeightVersion(0, 0), 0, 0.0)
        self._evaluations: list[asyncio.Task[None]] = []
        self._baseline: asyncio.Task[None] | None = None
        self._view: LedgerView | None = None
        self._reporting = asyncio.Lock()
        self._update_seconds = UpdateSeconds()
        self._full_report_due = True
        self._started = self._training_began = time.time()
        self._parent: tuple[int, int] | None = None  # (attempt, step) that this attempt goes on from
        self._evaluate_again = False
        self.refresher: Refresher | None = None  # from setup on
        self._shared: dict[str, str] = {}  # of the checkpoint that this attempt goes on from
        self._leaving = asyncio.Event()  # the run is told to stop
        if config.resume:
            self._restore(read_state(Path(config.resume)))

    @property
    def version(self) -> int:
        """Of the newest weights."""
        return self.step if self.trains else 0

    # ------------------------------------------------------------------------------------------------------------- life

    async def setup(self) -> None:
        config, models = self.config, list(self.models.values())
        await self._open_intake()
        self.wandb = self._open_wandb()
        self.metrics = MetricsWriter(
            self.run_dir, attempt=self.info.attempt, tensorboard=config.tensorboard, wandb=self.wandb
        )
        self.journal = JsonLinesWriter(self.run_dir / "journal" / "master.jsonl")
        self.client = NameResolvingRequestClient(
            self.resolver,
            self.names,
            num_workers=config.num_model_workers,
            handler_routing=build_handler_routing(models),
            runtime=self.info.runtime,
            transport=self.system.transport,
            incarnation=self.incarnation,
            attempt=self.info.attempt,
            apart=self.worlds.apart,
            on_new_life=self._world_began_anew,
        )
        async with self.board.waiting(
            "model workers to connect", on="barrier", limit_s=self.info.runtime.start_timeout_s
        ):
            await self.client.start()
        self.caller = WorkerCaller(self.client, self.board, config.train.call_timeout_s)
        self.apart = ApartWorlds(self.worlds, self.client, self.caller, config.train.call_timeout_s)
        self.checkpointer.caller, self.checkpointer.journal = self.caller, self.journal
        mfcs = [MFCDef.of(mfc) for mfc in config.mfcs]
        self.hooks = ParameterHooks(mfcs, config.train)
        graph = without_generation([mfc if mfc.model else replace(mfc, model=ACTOR) for mfc in mfcs])
        self.refresher = Refresher(self.models, self.apart, self.caller, self.run_dir, self.info.attempt)
        self.executor = FunctionExecutor(
            graph,
            models,
            self.buffer,
            self.tracker,
            self.caller,
            self.hooks,
            recorders=self.heads if config.records else (),
            apart=self.apart,
            refresher=self.refresher,
        )
        await self._meet_manager()
        self.spawn(self._hear_of_the_end(), "hear of the end")
        await self.publish(self.names.experiment_status(), "RUNNING")

    async def _open_intake(self) -> None:
        """Before the heads look for it."""
        info = self.info
        self.metas = MetaPuller(
            self.resolver,
            self.names,
            runtime=info.runtime,
            transport=self.system.transport,
            lease=self.lease,
            attempt=info.attempt,
        )
        await self.metas.start()
        self.spawn(self._accept_trajectories(), "accept trajectories")

    async def _meet_manager(self) -> None:
        key = self.names.gserver_manager()
        connecting = ServiceClient.connect(
            self.directory,
            self.tasks,
            self.board,
            self.logger,
            key=key,
            service="gserver manager",
            on_moved=self._meet_new_manager,
        )
        self.manager = await self.opened.enter_async_context(connecting)

    def _meet_new_manager(self) -> None:
        """It admits nothing before it has a report: it need not wait for the end of this step."""
        self.spawn(self.report(), "report to a new manager")

    async def close(self) -> None:
        for name in ("client", "metas"):
            if hasattr(self, name):
                await getattr(self, name).close()
        for name in ("metrics", "journal"):
            if hasattr(self, name):
                getattr(self, name).close()

    async def work(self) -> None:
        await asyncio.gather(
            self.caller.call("models to be loaded", list(self.worlds.gang), Ping()),
            *(self._load_apart(world) for world in self.worlds.apart),
        )
        if self.config.resume:
            await self.checkpointer.load(self.config.resume)
            await self._restore_refreshed()
            self.hooks.loaded()
        self._write_begun()
        await self._publish_weights(WeightVersion(self.info.attempt, self.version))
        self._training_began = time.time()
        if self._parent is None and self.config.eval.at_start:
            self._baseline = self._evaluate_beside_training()
        elif self._evaluate_again:
            self._evaluate_beside_training()
        finished = self._parent is not None and self._is_over()
        while not finished:
            finished = await self.train_one_step()
            if self._leaving.is_set() and not finished:
                await self._leave()
        await self.finish()

    async def _restore_refreshed(self) -> None:
        """Models whose weights are in no checkpoint, or in one that only the gang has loaded."""
        if self.refresher is not None and self.config.train.ref.update_interval > 0:
            refreshed = [name for name, model in self.models.items() if model.role == REF]
            await self.refresher.restore(self._shared, self.config.resume, refreshed)

    async def _load_apart(self, world: Sequence[int]) -> None:
        what = "models to be loaded"
        pings = [Ping()] * len(world)
        await self.apart.repeated(what, world, lambda life: self.apart.call(what, life, world, pings))

    def _world_began_anew(self, world: Sequence[int]) -> None:
        """A world that is apart is in another life: its workers' stores are empty."""
        self.tracker.forget(world)
        self._journal("restarted", workers=[f"model_worker/{worker}" for worker in world])

    async def _hear_of_the_end(self) -> None:
        async for event in self.watch(self.names.last_checkpoint()):
            if event.kind == "put" and event.value == str(self.info.attempt):
                self._leaving.set()

    async def _leave(self) -> None:
        """Between two steps: write what the run can go on from, then end as one that was told to stop."""
        await self._write_last_checkpoint()
        self.logger.info("stopped after step %d, as the launcher asked", self.step)
        self.stopping.set()
        await asyncio.Event().wait()  # unblocked by: cancellation, which `stopping` brings at once

    # ----------------------------------------------------------------------------------------------------- one train step

    async def train_one_step(self) -> bool:
        """Form a batch, run the dataflow on it, hand its weights to the writer, write the books. True after the last one."""
        self.skipped.check()
        start = time.monotonic()
        with self.trace.span("form batch", track="steps", step=self.step + 1):
            batch = await self.form_batch()
        if self._leaving.is_set():  # what is in the buffer is rolled out again
            return False
        if not batch:
            if self.step == self.config.first_step:
                raise RejectedShareError(f"every prompt was rejected, nothing was trained: {self._rejections()}")
            return True
        version = self.version
        metas = self.buffer.metas(batch)
        formed = time.monotonic()
        train_start = time.time()
        with self.trace.span("train step", track="steps", step=version + 1, prompts=len(batch)):
            result = await self.executor.execute_step(batch, version)
        train_end = time.time()
        trained = time.monotonic()
        self.step += 1
        self.board.version = str(self.version)
        self.progress.mark_trained(meta.locator for meta in metas)
        self._consumed.extend(batch)
        self._recent_outcomes.extend([True] * len(batch))
        await self._tell_consumed()
        if self.skipped.add(result.stats):
            await self._keep_bad_batch(metas, result)
        cleared = self._clear(batch)
        if self.trains:
            with self.trace.span("wait for weights", track="steps", version=version):
                await self._wait_for_publisher()
            weights = self._publish_weights(WeightVersion(self.info.attempt, self.version))
            self._publishing = self.spawn(weights, "publish weights")
        await cleared
        times = StepTimes(formed - start, trained - formed, time.monotonic() - trained)
        metrics = {**step_metrics(metas, version, times, self.config.tasks), **result.stats}
        self._write_books(metas, metrics, result, (train_start, train_end))
        self._recent_rewards.append(metrics["reward/mean"])
        last = self._is_over()
        self._run_schedules(last)
        self._run_checkpoints()
        return last

    async def form_batch(self) -> Sequence[str]:
        """Tickets of the next batch, in canonical order; empty when there will be no more, or the run is told to stop.

        waits for: enough trajectories stored, and the stragglers that the deadline rule waits for.
        unblocked by: the manager's ledger changing (long poll, bounded), which every finished rollout does; the end.
        """
        moved = time.monotonic()
        state = (len(self.buffer), self.progress.num_done)
        view = await self.report()
        while True:  # each turn is bounded, and so is a standstill
            decision = self.former.decide(
                stored=self.buffer.stored,
                live=view.live,
                version=self.version,
                exhausted=view.exhausted,
                now=time.monotonic(),
                settled=view.settled,
            )
            self.board.set_queue("stored", len(self.buffer))
            self.board.progress()
            await self._replace_damaged(view)
            if not isinstance(decision, NotReady):
                return decision.tickets
            if decision.drop:
                self.summary.num_dropped += len(decision.drop)
                for ticket in decision.drop:
                    self.buffer.drop(ticket)
                self._journal("dropped", tickets=list(decision.drop))
                await self._clear(decision.drop)
            limit_s = self.config.train.data_timeout_s
            if state != (state := (len(self.buffer), self.progress.num_done)):
                moved = time.monotonic()
            if time.monotonic() - moved > limit_s:
                raise WaitTimeoutError(decision.reason, decision.on, limit_s)
            waited_s = time.monotonic() - moved
            wait_s = min(_LONG_POLL_S, max(0.0, limit_s - waited_s))
            async with self.board.waiting(decision.reason, on=decision.on, limit_s=limit_s, waited_s=waited_s):
                waiting = self.report(revoke=decision.revoke, wait_s=wait_s, after_revision=view.revision)
                told = await self._unless_leaving(waiting)
            if told is None:
                return ()
            view = told

    async def _unless_leaving(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """What it gives; None where the run is told to stop meanwhile."""
        work = asyncio.create_task(coroutine, name=f"{self.name}:work")
        leaving = asyncio.create_task(self._leaving.wait(), name=f"{self.name}:leaving")
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._leaving.is_set() else work.result()
        finally:
            leaving.cancel()
            work.cancel()

    async def _keep_bad_batch(self, metas: Sequence[TrajectoryMeta], result: StepResult) -> None:
        """Of a step that was skipped, or a part of it: for examples/bad_batch. Its weights are not pruned."""
        await self.skipped.save(
            metas, self.step, result.stats, heads=self.heads, tracker=self.tracker, caller=self.caller
        )

    def _clear(self, tickets: Sequence[str]) -> asyncio.Task[list[CallResult]]:
        """Have everyone who holds something of these groups forget it."""
        workers, body, what = self.tracker.drop(tickets), ClearData(ids=list(tickets)), "forgetting groups"
        self.apart.tell_nowait(what, [worker for worker in workers if worker in self.worlds.all_apart], body)
        return self.caller.start(what, [worker for worker in workers if worker not in self.worlds.all_apart], body)

    def _is_over(self) -> bool:
        """Whether the step before was the last one."""
        field = ended_by(
            self.config.train,
            step=self.step,
            recent_rewards=self._recent_rewards,
            num_done=self.progress.num_done,
            num_total=self.progress.num_total,
        )
        if field:
            self.logger.info(
                "step %d was the last one: train.%s=%s", self.step, field, getattr(self.config.train, field)
            )
        return bool(field)

    async def finish(self) -> None:
        """After the last step: last weights, the model for the user, a checkpoint, the last evaluation, the summary."""
        training_ended = time.time()
        await self._wait_for_publisher()
        if self.trains:
            await self._save("final")  # first: an evaluation that fails must not cost the result
        await self._write_last_checkpoint()
        await self._tell_consumed(stop=True)
        if self.config.eval.at_end and self.config.eval.prompts is not None:
            try:
                await self._wait_until_served(self.version)
                self._evaluate_beside_training(name="end")
            except WaitTimeoutError as error:
                self.logger.warning("no last evaluation: %s", error)
        await asyncio.gather(*self._evaluations)
        end = time.time()
        summary = self.summary.as_dict(
            mode=self.config.mode,
            attempt=self.info.attempt,
            wall_s=end - self._started,
            version=self.version,
            rejected=self.progress.rejected,
            generation_idle=generation_idle_share(self.run_dir, self._training_began, training_ended),
        )
        if self.wandb is not None:
            limit_s = self.config.wandb.finish_timeout_s + SLACK_S
            async with self.board.waiting("the last metrics to be sent", on="W&B", limit_s=limit_s):
                summary["wandb"] = await asyncio.to_thread(self.wandb.finish)
        self._journal("ended", step=self.step, done=self.progress.num_done, of=self.progress.num_total)
        self._write_summary(summary)
        await self.publish(self.names.experiment_status(), "COMPLETE")

    def _open_wandb(self) -> WandbWriter | None:
        info, config = self.info, self.config.wandb
        if config.mode == "disabled":
            return None
        return WandbWriter(config, self.run_dir, experiment=info.experiment, trial=info.trial, attempt=info.attempt)

    def _write_summary(self, summary: dict[str, object]) -> None:
        """Complete or absent."""
        path = self.run_dir / "summary.json"
        with writing(path):
            temporary = path.with_name(".summary.json")
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1))
            temporary.rename(path)

    # ----------------------------------------------------------------------------------------------------------- weights

    async def _publish_weights(self, version: WeightVersion) -> None:
        """Have a version written (off the critical path: the reply comes when it is on disk), then tell the world.

        With weights.transport=broadcast the world is told twice, of the weights in memory before.
        """
        path = version_dir(self.run_dir, ACTOR, version)
        sends = self.trains and self.config.weights.transport == "broadcast"
        hold = HoldWeights(role=ACTOR, weight_version=str(version))
        held = self._start_of(ACTOR, f"weights {version} to be in memory", hold) if sends else None
        write = WriteWeights(role=ACTOR, weight_version=str(version), folder=name_of(self.run_dir, path))
        written = self._start_of(ACTOR, f"weights {version} to be written", write)
        if held is not None:
            await held
            await self._baseline_first(version)
            await self.publish(self.names.weights_held(ACTOR), str(version))
        with self.trace.overlapping(f"publish {version}", kind="weights"):
            await self._commit(write, await written)
        await self._baseline_first(version)
        await self.publish(self.names.model_version(ACTOR), str(version))
        served = [server.version for server in self._view.servers if server.version] if self._view else []
        await asyncio.to_thread(
            prune_versions,
            role_dir(self.run_dir, ACTOR),
            keep=self.config.weights.keep,
            in_use=[*(WeightVersion.parse(text) for text in served), *weights_needed(self.run_dir)],
        )
        self._journal("published", version=version.version)

    async def _replace_damaged(self, view: LedgerView) -> None:
        """Write the newest version again where it is damaged on disk. Called between two steps: the model workers still hold it.

        An older version needs nothing: the newest one replaces it. Raises RunEndedError where the version cannot be written
        again, or was damaged again after _MAX_REWRITES times.
        """
        version = WeightVersion(self.info.attempt, self.version)
        if view.damaged != str(version):
            return
        path, count = version_dir(self.run_dir, ACTOR, version), 0
        if self._rewritten.version == version:
            count = self._rewritten.times
            if time.monotonic() < self._rewritten.last + _REWRITE_PAUSE_S:
                return
        if not self.trains or count >= _MAX_REWRITES:
            tried = f"it was written again {count} times" if count else f"mode={self.config.mode} cannot write it again"
            raise RunEndedError(f"weights {version} in {path} are damaged, and {tried}; see that the disk is sound")
        await self._wait_for_publisher()
        write = WriteWeights(role=ACTOR, weight_version=str(version), folder=name_of(self.run_dir, path), rewrite=True)
        with self.trace.overlapping(f"rewrite {version}", kind="weights"):
            await self._commit(write, await self._start_of(ACTOR, f"weights {version} to be written again", write))
        self.logger.warning("weights %s were damaged on disk; they were written again from memory", version)
        await self.publish(self.names.model_version(ACTOR), str(version))
        self._rewritten = _Rewritten(version, count + 1, time.monotonic())

    async def _baseline_first(self, version: WeightVersion) -> None:
        """No server moves on before the initial weights have been evaluated. Training goes on meanwhile."""
        if self._baseline is not None and version.version == 1:
            limit_s = self.config.eval.timeout_s + _CALL_LIMIT_S + _LONG_POLL_S
            async with self.board.waiting(
                "the evaluation of the initial weights", on="gserver manager", limit_s=limit_s
            ):
                await self._baseline

    async def _wait_for_publisher(self) -> None:
        if self._publishing is not None:
            await self.board.bounded(
                self._publishing,
                what="the last weights to be published",
                on="weight writer",
                limit_s=self.config.train.call_timeout_s,
            )

    async def _wait_until_served(self, version: int) -> None:
        async def served() -> None:
            view = await self.report()
            while view.served_version < version:  # bounded by the caller
                await self._replace_damaged(view)
                view = await self.report(wait_s=_LONG_POLL_S, after_revision=view.revision)

        await self.board.bounded(
            served(),
            what=f"version {version} to be served",
            on="gserver manager",
            limit_s=self.config.eval.timeout_s,
        )

    async def _save(self, name: str) -> None:
        """The models for the user: the actor's by this name, the critic's beside it."""
        for model in _SAVED:
            if model in self.models:
                path = self.run_dir / "checkpoints" / (name if model == ACTOR else f"{name}-{model}")
                save = SaveModel(role=model, folder=name_of(self.run_dir, path))
                await self._commit(save, await self._start_of(model, f"{model} to be saved as {path.name}", save))
                self.logger.info("model saved in %s", path)

    def _start_of(self, model: str, what: str, body: CallBody) -> asyncio.Task[list[CallResult]]:
        """Call all workers of a model."""
        return self.caller.start(what, self.models[model].workers, body)

    async def _commit(self, body: WriteWeights | SaveModel, written: Sequence[CallResult]) -> None:
        """All workers of the model have written their files: the first of them gives the folder its name."""
        commit = CommitWeights(
            role=body.role,
            weight_version=body.weight_version if isinstance(body, WriteWeights) else "",
            folder=body.folder,
            files=[file for reply in written for file in reply.files],
            rewrite=isinstance(body, WriteWeights) and body.rewrite,
        )
        await self.caller.call(f"{body.folder} to be complete", self.models[body.role].workers[:1], commit)

    # ----------------------------------------------------------------------------------------------- manager and schedules

    async def report(
        self, *, revoke: Sequence[str] = (), wait_s: float = 0.0, after_revision: int = -1, stop: bool = False
    ) -> LedgerView:
        """Tell the manager where training is and take in its ledger. A manager that does not know us gets a full report."""
        async with self._reporting:  # what one report has told must not be told, or struck off, by another
            return await self._report(revoke, wait_s, after_revision, stop)

    async def _report(self, revoke: Sequence[str], wait_s: float, after_revision: int, stop: bool) -> LedgerView:
        while True:  # twice at most, unless managers keep restarting; each turn is bounded
            consumed = list(self._consumed)
            full = self._full_report_due
            view = await self.manager.post(
                "/report",
                MasterReport(
                    attempt=self.info.attempt,
                    trained_version=self.version,
                    consumed=consumed,
                    stored=self.buffer.stored_tickets,
                    revoke=list(revoke),
                    rejected_seen=self._num_rejections_seen,
                    full=full,
                    done=self.progress.beyond_cursor if full else [],
                    done_cursor=self.progress.cursor,
                    num_prompts=self.progress.num_prompts,
                    num_epochs=self.progress.num_epochs,
                    after_revision=after_revision,
                    wait_s=wait_s,
                    stop=stop,
                ),
                LedgerView,
                limit_s=_CALL_LIMIT_S,
                wait_s=wait_s,
            )
            self._full_report_due = not view.known
            if view.known:
                break
            self._num_rejections_seen = 0  # a new manager counts from the start
        del self._consumed[: len(consumed)]
        self._record_rejections(view)
        self._view = view
        return view

    async def _tell_consumed(self, *, stop: bool = False) -> None:
        """Whoever hands prompts out learns what has been trained. stop: nothing more is needed."""
        await self.report(stop=stop)

    def _record_rejections(self, view: LedgerView) -> None:
        self._num_rejections_seen += len(view.rejected)
        self._reject(view.rejected)

    def _reject(self, prompts: Sequence[RejectedPrompt]) -> None:
        """Prompts that will not be trained. Raises RejectedShareError where they are too many."""
        for rejected in prompts:
            if self.progress.is_done(rejected.locator) or self.buffer.holds(rejected.locator):
                continue  # its trajectory came after the manager had given the prompt up
            self.progress.mark_rejected(rejected.locator, rejected.reason)
            self._recent_outcomes.append(False)
            if rejected.detail:
                self._first_details.setdefault(rejected.reason, rejected.detail)
            self._journal("rejected", prompt=rejected.locator, reason=rejected.reason, detail=rejected.detail)
        window = self._recent_outcomes
        share = window.count(False) / max(len(window), 1)
        if len(window) == window.maxlen and share > self.config.max_rejected_share:
            raise RejectedShareError(
                f"{share:.0%} of the last {len(window)} prompts were rejected; manager.max_rejected_share="
                f"{self.config.max_rejected_share:g} is what may be: {self._rejections()}"
            )

    def _rejections(self) -> str:
        """How many prompts were rejected why, what helps, and where more is to be read."""
        lines = rejection_lines(self.progress.rejected, self._first_details)
        log = f"the first of each kind is told in full in {self.run_dir}/logs/latest/{self.rejects_in}_*.log"
        return "\n  ".join(["", *lines, log])

    def _evaluate_beside_training(self, name: str = "") -> asyncio.Task[None]:
        before = self._evaluations[-1] if self._evaluations else None
        eval_id = f"a{self.info.attempt}-{name or f's{self.step}'}"
        task = self.spawn(self._evaluate(eval_id, self.step, before), "evaluate")
        self._evaluations.append(task)
        self._count_evaluations()
        task.add_done_callback(lambda _: self._count_evaluations())
        return task

    def _count_evaluations(self) -> None:
        """For the status."""
        self.board.set_queue("evaluations", sum(not task.done() for task in self._evaluations))

    async def _evaluate(self, eval_id: str, step: int, before: asyncio.Task[None] | None) -> None:
        """Run an evaluation to its end through eval tickets. One that takes too long is given up with a warning.

        before: the evaluation begun before this one. It is written first, so that a reader meets them in the order of steps.
        """
        config = self.config.eval
        if config.prompts is None:
            return
        request = EvaluateRequest(
            eval_id=eval_id,
            modes=list(config.modes),  # type: ignore[arg-type]  # checked when the config was loaded
            num_prompts=config.num_prompts or self._num_eval_prompts,
            wait_s=_LONG_POLL_S,
        )
        deadline = time.monotonic() + config.timeout_s
        while time.monotonic() < deadline:
            reply = await self.manager.post(
                "/evaluate", request, EvaluateReply, limit_s=_CALL_LIMIT_S, wait_s=_LONG_POLL_S
            )
            if reply.done:
                if before is not None:  # it gives up in time
                    limit_s = config.timeout_s + _CALL_LIMIT_S + _LONG_POLL_S
                    async with self.board.waiting("the evaluation before", on="gserver manager", limit_s=limit_s):
                        await asyncio.wait({before})
                self.metrics.write(step, self.summary.add_evaluation(step, reply.results))
                return
        self.logger.warning("evaluation at step %d gave up after %g s (eval.timeout_s)", step, config.timeout_s)

    def _run_schedules(self, last: bool) -> None:
        now, epochs = time.monotonic(), self.progress.epochs_done()
        at_end = last and self.config.eval.at_end  # `finish` evaluates the last weights, once they are served
        if self.eval_schedule.check(step=self.step, epochs=epochs, now=now) and not at_end:
            if sum(not task.done() for task in self._evaluations) < _MAX_EVALUATIONS:
                self._evaluate_beside_training()
            else:
                self.logger.warning("no evaluation at step %d: %d still go on", self.version, _MAX_EVALUATIONS)
        if self.save_schedule.check(step=self.step, epochs=epochs, now=now):
            self.spawn(self._save(f"step_{self.version:08d}"), "save")

    # ------------------------------------------------------------------------------------------------------- checkpoints

    def _run_checkpoints(self) -> None:
        """After all that a step is: what a checkpoint holds is complete. Not while the initial weights are being evaluated,
        which nobody would do again."""
        if self._baseline is not None and not self._baseline.done():
            return
        self.checkpointer.after_step(
            step=self.step, epochs=self.progress.epochs_done(), now=time.monotonic(), take=self._state
        )

    async def _write_last_checkpoint(self) -> None:
        """Of the last step of this attempt, if it has trained one: what `resume` goes on from."""
        if self._parent is None or self.step > self._parent[1]:
            await self.checkpointer.last(step=self.step, take=self._state)

    def _schedules(self) -> dict[str, Schedule]:
        return {"save": self.save_schedule, "eval": self.eval_schedule, "checkpoint": self.checkpoint_schedule}

    def _state(self) -> MasterState:
        """What `_restore` goes on from."""
        assert self.data is not None
        now = time.monotonic()
        return MasterState(
            attempt=self.info.attempt,
            step=self.step,
            time=time.time(),
            parent=self._parent,
            data=self.data,
            done_cursor=self.progress.cursor,
            done_beyond=self.progress.beyond_cursor,
            num_trained=self.progress.num_trained,
            rejected=dict(self.progress.rejected),
            schedules={name: schedule.state(now) for name, schedule in self._schedules().items()},
            summary=msgspec.to_builtins(self.summary),
            recent_rewards=list(self._recent_rewards),
            recent_outcomes=list(self._recent_outcomes),
            batch_size=self.config.train.batch_size,
            wall_s=time.time() - self._started,
            evaluating=any(not task.done() for task in self._evaluations),
            shared=self.refresher.state() if self.refresher is not None else {},
        )

    def _restore(self, state: MasterState) -> None:
        """Before anything else has happened."""
        self._parent = (state.attempt, state.step)
        self.step = state.step
        self.board.version = str(self.version)
        self.progress.restore(state.done_cursor, state.done_beyond, state.num_trained, state.rejected)
        self.summary = msgspec.convert(state.summary, RunSummary)
        self._recent_rewards.extend(state.recent_rewards)
        self._recent_outcomes.extend(state.recent_outcomes)
        self._started -= state.wall_s
        self._evaluate_again = state.evaluating
        self._shared = state.shared
        for name, schedule in self._schedules().items():
            if name in state.schedules:
                schedule.restore(state.schedules[name], time.monotonic())

    # ------------------------------------------------------------------------------------------------------------- books

    async def _accept_trajectories(self) -> None:
        """consumes: metadata from the heads; produces: verdicts, which the heads pass on as acknowledgements."""
        while True:
            meta, ack = await self.metas.pull_meta()
            if self._grants_tickets and (reason := self.grants.refusal(meta, time.monotonic())):
                self.board.set_queue("not_granted", self.grants.num_refused)
                ack(StoreVerdict(verdict="refused", reason=reason))
                continue
            num_stored = len(self.buffer)
            verdict = self.buffer.put(meta)
            if len(self.buffer) > num_stored:  # not one that was told about before
                self.tracker.add(self.heads[meta.head], [meta.ticket_id], meta.keys)
                self.summary.add_trajectory(meta)
                self._journal("stored", ticket=meta.ticket_id, prompt=meta.locator)
            ack(verdict)

    def _journal(self, event: str, **fields: object) -> None:
        self.journal.write({"event": event, "attempt": self.info.attempt, **fields, "time": time.time()})

    def _write_begun(self) -> None:
        """With all that an audit of what follows has to know."""
        config = self.config
        eta = None if config.overdue == "train" else config.max_head_offpolicyness
        num_prompts, num_epochs = self.progress.num_prompts, self.progress.num_epochs
        about = {
            "mode": config.mode,
            "first_step": config.first_step,
            "num_prompts": num_prompts,
            "num_epochs": num_epochs,
            "max_head_offpolicyness": eta,
        }
        self._journal("begun", **{"from": self._parent}, **about)

    def _write_books(
        self,
        metas: Sequence[TrajectoryMeta],
        metrics: dict[str, float],
        result: StepResult,
        train_span: tuple[float, float],
    ) -> None:
        servers = self._view.servers if self._view is not None else []
        metrics = {**metrics, "time/servers_updating_s": self._update_seconds.since_last(servers)}
        self.summary.add_step(metrics)
        rejected = {f"rejected/{reason}": float(count) for reason, count in self.progress.rejected.items()}
        seconds = {f"time/{name}_s": value for name, value in result.seconds.items()}
        self.metrics.write(self.step, {"time": time.time(), "version": self.version, **metrics, **seconds, **rejected})
        self.journal.write(
            {
                "event": "trained",
                "attempt": self.info.attempt,
                "step": self.step,
                "start": train_span[0],
                "end": train_span[1],
                "groups": [
                    {
                        "ticket": meta.ticket_id,
                        "prompt": meta.locator,
                        "head": meta.head,
                        "versions": [
                            (WeightVersion.unpack(first).version, WeightVersion.unpack(last).version)
                            for first, last in zip(meta.version_start, meta.version_end, strict=True)
                        ],
                    }
                    for meta in metas
                ],
            }
        )
