"""SyncMasterWorker: the master where generation is an MFC (mode=sync). No manager, ledger, rollout workers or servers.

    prompts in the epoch's order -> actor_gen, on the actor's workers -> groups, which lie there -> the rest of the dataflow

Groups are made under the weights that they are trained on, so nothing is ever old, and no weights are published: nobody serves
them. Buffer, tracker, executor, schedules and books are those of MasterWorker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from asyncrl.config.schema import MasterWorkerConfig
from asyncrl.data.bad_batches import WEIGHTS, folder_of
from asyncrl.dataflow.graph import MFCDef
from asyncrl.master.executor import StepResult, shard_handlers, start_copies
from asyncrl.master.worker import MasterWorker
from asyncrl.protocol.messages import (
    CallResult,
    EvaluationResult,
    ExecuteMFC,
    Locator,
    SaveModel,
    TrajectoryMeta,
    WeightVersion,
)
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.runtime.system import System


class SyncMasterWorker(MasterWorker):
    """Makes a batch, trains on it, makes the next.

    consumes: prompts, by their places in the epoch's order.  produces: MFC calls, models for the user, metrics.
    waits for: the replies of the model workers.  unblocked by: them.
    """

    rejects_in = "model_worker"

    def __init__(self, config: MasterWorkerConfig, system: System | None = None) -> None:
        super().__init__(config, system)
        self.generation = next(MFCDef.of(mfc) for mfc in config.mfcs if mfc.kind == "generate")
        self.makers = self.models[self.generation.model]
        # Prompts handed out, over all epochs. After a step they are all done, and so are those before the cursor of a checkpoint
        self._next = self.progress.cursor.epoch * self.progress.num_prompts + self.progress.cursor.position
        self._generation_s = 0.0  # for the batch

    async def _open_intake(self) -> None:
        """Groups come with the replies to calls."""

    async def _meet_manager(self) -> None:
        """There is none."""

    async def _tell_consumed(self, *, stop: bool = False) -> None:
        """This process itself hands the prompts out."""

    async def _publish_weights(self, version: WeightVersion) -> None:
        """Nobody serves them."""

    async def _keep_bad_batch(self, metas: Sequence[TrajectoryMeta], result: StepResult) -> None:
        """No weights are on disk for others: those that the step has left go with its batch."""
        await super()._keep_bad_batch(metas, result)
        if self.config.train.keep_bad_batches:
            path = folder_of(self.run_dir, self.info.attempt, self.step) / WEIGHTS
            save = SaveModel(role=ACTOR, folder=name_of(self.run_dir, path))
            await self._commit(save, await self._start_of(ACTOR, "weights to be saved with a bad batch", save))

    async def _wait_until_served(self, version: int) -> None:
        """The model workers generate with what they train."""

    # ------------------------------------------------------------------------------------------------------------- a batch

    async def form_batch(self) -> Sequence[str]:
        """The next prompts' groups, in the epoch's order. Prompts that gave none are rejected, and more take their places; only
        at the end of the run is a batch smaller. Empty when there are no more prompts."""
        self._generation_s = 0.0
        self.board.set_queue("stored", len(self.buffer))
        batch_size, num_total = self.config.train.batch_size, self.progress.num_total
        while missing := min(batch_size - len(self.buffer), num_total - self._next):
            if self._leaving.is_set():
                break
            await self._make_groups(missing)
        return [meta.ticket_id for meta in sorted(self.buffer.stored, key=lambda meta: meta.locator)]

    async def _make_groups(self, count: int) -> None:
        """Of the next so many prompts."""
        first, self._next = self._next, self._next + count
        locators = [Locator(*divmod(flat, self.progress.num_prompts)) for flat in range(first, self._next)]
        locators = [at for at in locators if not self.progress.is_done(at)]  # a checkpoint of mode=async knows some
        if not locators:
            return
        attempt, version = self.info.attempt, self.version
        ids = [f"a{attempt}-e{at.epoch}-p{at.position}-i1-v{version}" for at in locators]
        replies = await self._generate(f"MFC {self.generation.name}", ids, locators)
        for reply in replies:
            for meta in reply.metas:
                verdict = self.buffer.put(meta)
                if verdict.verdict != "stored":
                    raise RuntimeError(f"group {meta.ticket_id} was made for nothing: {verdict.reason}")
                self.tracker.add(self.makers.heads[meta.head], [meta.ticket_id], meta.keys)
                self.summary.add_trajectory(meta)
                self._journal("stored", ticket=meta.ticket_id, prompt=meta.locator)
        self._generation_s += max(reply.seconds for reply in replies)
        self.board.set_queue("stored", len(self.buffer))
        self.board.progress()
        self._reject([rejected for reply in replies for rejected in reply.rejected])

    def _generate(
        self, what: str, ids: Sequence[str], locators: Sequence[Locator], eval_mode: Any = ""
    ) -> asyncio.Task[list[CallResult]]:
        """Called at once, so that weights are those of now; dealt out to the data ranks in turn."""
        copied = start_copies(self.hooks.before(self.generation), self.models, self.caller)
        num_ranks = self.makers.grid.data
        body = ExecuteMFC(
            mfc=self.generation.name,
            version=self.version,
            ids=list(ids),
            parts=[list(ids[rank::num_ranks]) for rank in range(num_ranks)],
            locators=list(locators),
            eval_mode=eval_mode,
        )
        return asyncio.create_task(_first_of(self.caller.start(what, shard_handlers(self.makers), body), copied))

    def _write_books(
        self,
        metas: Sequence[TrajectoryMeta],
        metrics: dict[str, float],
        result: StepResult,
        train_span: tuple[float, float],
    ) -> None:
        result.seconds[self.generation.name] = self._generation_s
        super()._write_books(metas, metrics, result, train_span)

    # ---------------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, eval_id: str, step: int, before: asyncio.Task[None] | None) -> Coroutine[Any, Any, None]:
        """The calls are sent now: workers execute them before the next step's, with the weights of now."""
        config = self.config.eval
        calls = {}
        if config.prompts is not None:
            locators = [Locator(0, at) for at in range(config.num_prompts or self._num_eval_prompts)]
            for mode in config.modes:
                ids = [f"{eval_id}-{mode}-{at.position}" for at in locators]
                calls[mode] = self._generate(f"evaluation {eval_id}, {mode}", ids, locators, eval_mode=mode)
        return self._write_evaluation(step, calls)

    async def _write_evaluation(self, step: int, calls: dict[str, asyncio.Task[list[CallResult]]]) -> None:
        results = [_result(mode, await call) for mode, call in calls.items()]
        if results:
            self.metrics.write(step, self.summary.add_evaluation(step, results))


async def _first_of(
    call: asyncio.Task[list[CallResult]], others: Sequence[asyncio.Task[list[CallResult]]]
) -> list[CallResult]:
    """What a call gives. The others may fail as well."""
    replies, *_ = await asyncio.gather(call, *others)
    return replies


def _result(mode: Any, replies: Sequence[CallResult]) -> EvaluationResult:
    metas = [meta for reply in replies for meta in reply.metas]
    failed = [rejected for reply in replies for rejected in reply.rejected]
    rewards = [reward for meta in metas for reward in meta.rewards]
    lengths = [length for meta in metas for length in meta.response_lengths]
    versions = [WeightVersion.unpack(version).version for meta in metas for version in meta.version_start]
    return EvaluationResult(
        mode=mode,
        num_prompts=len(metas) + len(failed),
        num_failed=len(failed),
        mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        version_min=min(versions, default=-1),
        version_max=max(versions, default=-1),
    )
