"""Batches that an MFC generates (mode=sync), without manager, ledger, rollout workers or servers.

    prompts in the epoch's order -> actor_gen, on its model's workers -> groups, held by those workers -> the rest of the dataflow

Groups are generated with the weights that are then trained, so no group is stale. No weights are published, because no process
serves them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.master.books import Books
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.master.evaluations import Results
from asyncrl.master.model_workers import ModelWorkers
from asyncrl.master.rollouts import BatchSource
from asyncrl.protocol.calls import CallResult, ExecuteMFC
from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt, Order
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.board import StatusBoard


class Generation(BatchSource):
    """The batch source and the evaluator of mode=sync.

    consumes: prompts, by their positions in the epoch's order.  produces: batches, results of evaluations.
    waits for: the replies of the model workers.  unblocked by: the model workers.
    """

    def __init__(
        self,
        config: MasterWorkerConfig,
        books: Books,
        buffer: AsyncIOSequenceBuffer,
        workers: ModelWorkers,
        *,
        leaving: asyncio.Event,
        board: StatusBoard,
    ) -> None:
        """leaving: set when the launcher stops the run."""
        self._config, self._books, self._buffer, self._workers = config, books, buffer, workers
        self._leaving, self._board = leaving, board
        self._mfc = next(MFCDef.of(mfc) for mfc in config.mfcs if mfc.kind == "generate")
        self._makers = workers.models[self._mfc.model]
        # Number of prompts issued, over all epochs. After a step they are all done, as are those before a checkpoint's cursor.
        cursor = books.progress.cursor
        self._next = cursor.epoch * books.progress.num_prompts + cursor.position

    async def form_batch(self, order: Order | None = None) -> Sequence[str]:
        """Generate the groups of the next prompts. Prompts without a group are rejected, and further prompts replace them. A
        batch is smaller than batch_size only at the end of the run, or when the launcher stops the run."""
        self.seconds = {self._mfc.name: 0.0}
        self._board.set_queue("stored", len(self._buffer))
        batch_size, num_total = self._config.train.batch_size, self._books.progress.num_total
        while missing := min(batch_size - len(self._buffer), num_total - self._next):
            if self._leaving.is_set():
                break
            await self._make_groups(missing)
        return [meta.ticket_id for meta in sorted(self._buffer.stored, key=lambda meta: meta.locator)]

    def begin(self, eval_id: str, step: int, parts: Sequence[EvalPart]) -> Results:
        """Begin an evaluation: send its calls now, so that workers execute them before those of the next step, with the current
        weights."""
        calls = []
        for number, part in enumerate(parts):
            locators = [Locator(0, at) for at in range(part.num_prompts)]
            ids = [f"{eval_id}-{number}-{at.position}" for at in locators]
            what = f"evaluation {eval_id}, {part.eval_set or 'eval.prompts'}, {part.mode}"
            calls.append(self._generate(what, ids, locators, part))
        return partial(_results, calls)

    async def _make_groups(self, count: int) -> None:
        """Generate groups for the next `count` prompts."""
        progress = self._books.progress
        first, self._next = self._next, self._next + count
        locators = [Locator(*divmod(flat, progress.num_prompts)) for flat in range(first, self._next)]
        # A checkpoint of mode=async may have done prompts beyond its cursor
        locators = [at for at in locators if not progress.is_done(at)]
        if not locators:
            return
        version = self._books.version
        ids = [f"a{version.attempt}-e{at.epoch}-p{at.position}-i1-v{version.version}" for at in locators]
        replies = await self._generate(f"MFC {self._mfc.name}", ids, locators)
        for reply in replies:
            for meta in reply.metas:
                verdict = self._buffer.put(meta)
                if verdict.verdict != "stored":
                    raise RuntimeError(
                        f"the buffer did not store the generated group {meta.ticket_id}: {verdict.reason}"
                    )
                self._workers.tracker.add(self._makers.heads[meta.head], [meta.ticket_id], meta.keys)
                self._books.store(meta)
        name = self._mfc.name
        self.seconds = {name: self.seconds[name] + max(reply.seconds for reply in replies)}
        self._board.set_queue("stored", len(self._buffer))
        self._board.progress()
        self._books.reject([rejected for reply in replies for rejected in reply.rejected], self._buffer.holds)

    def _generate(
        self, what: str, ids: Sequence[str], locators: Sequence[Locator], part: EvalPart | None = None
    ) -> asyncio.Task[list[CallResult]]:
        """Send the calls at once, so that they use the current weights. The ids are dealt to the data ranks in turn. part: of an
        evaluation."""
        workers = self._workers
        copied = workers.refresher.copy(workers.hooks.before(self._mfc))
        num_ranks = self._makers.grid.num_replicas
        body = ExecuteMFC(
            mfc=self._mfc.name,
            version=self._books.version.version,
            ids=list(ids),
            parts=[list(ids[rank::num_ranks]) for rank in range(num_ranks)],
            locators=list(locators),
            eval_mode=part.mode if part is not None else "",
            eval_set=part.eval_set if part is not None else "",
        )
        return asyncio.create_task(_first_of(workers.caller.call(what, list(self._makers.shards), body), copied))


async def _first_of(
    call: asyncio.Task[list[CallResult]], others: Sequence[asyncio.Task[list[CallResult]]]
) -> list[CallResult]:
    """Return the results of `call`. Raises if `call` or one of `others` (copies of weights) fails."""
    replies, *_ = await asyncio.gather(call, *others)
    return replies


async def _results(calls: Sequence[asyncio.Task[list[CallResult]]]) -> list[EvaluatedPrompt]:
    found: list[EvaluatedPrompt] = []
    for part, call in enumerate(calls):
        for reply in await call:
            found += [EvaluatedPrompt(part=part, position=meta.locator.position, group=meta) for meta in reply.metas]
            found += [
                EvaluatedPrompt(part=part, position=rejected.locator.position, group=None, reason=rejected.reason)
                for rejected in reply.rejected
            ]
    return sorted(found, key=lambda result: (result.part, result.position))
