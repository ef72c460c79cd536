"""Where the model of an MFC lives, and what a call of the MFC does there.

InTrainerGroup      the master's order of calls holds for its workers, so new keys move while other calls run
InDetachedGroup     its workers fetch the inputs of a call, and the trainer group fetches the outputs
ArrivingInference   the same, and stored groups are processed before their step (train.arriving_inference)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from asyncrl.config.schema import REF
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.mfc import LOGPROBS, SCORES, MFCDef
from asyncrl.dataflow.redistribution import Transfer, plan_fetches
from asyncrl.dataflow.topology import Handler, ModelPlacement
from asyncrl.dataflow.worker_groups import on_missing
from asyncrl.master.balance import Balance
from asyncrl.master.buffer import AsyncIOSequenceBuffer, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.detached import DetachedGroups, GroupMissingError, Incarnation
from asyncrl.master.handles import Call
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.refresh import Refresher
from asyncrl.master.report import MISSING
from asyncrl.master.step_part import PartOfStep
from asyncrl.protocol.calls import CallResult, ClearData, ExecuteMFC
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.trajectories import TrajectoryMeta

logger = logging.getLogger(__name__)


class Home(ABC):
    """The workers of an MFC's model. Records what they reply."""

    def __init__(self, mfc: MFCDef, placement: ModelPlacement) -> None:
        self.mfc, self.placement = mfc, placement
        self.moved_keys = mfc.input_keys  # those that move to the workers as soon as they exist
        self.handlers: list[Handler] = list(placement.shards)  # of all workers, in rank order
        self.state: dict[str, float] | None = None  # of its function after the newest call; None: before the first one

    @abstractmethod
    async def run(self, step: PartOfStep, call: Call, body: ExecuteMFC) -> asyncio.Task[None] | None:
        """Run a call whose input keys exist. Returns the move of the new keys to the models that read them, if it is under way."""

    def at(self, version: int, *, num_left: int) -> None:  # noqa: B027
        """The step from this version runs, or is the next one. It will still take num_left of the groups that are not in it."""

    async def process_arriving(self) -> None:  # noqa: B027
        """Process stored groups as they arrive, if the function does so."""

    def refreshing(self) -> contextlib.AbstractAsyncContextManager[None]:
        """While the block runs, the model's weights may change. Afterwards groups that are stored count as not processed."""
        return contextlib.nullcontext()

    def take_note(self, step: PartOfStep, call: Call, body: ExecuteMFC, replies: Sequence[CallResult]) -> None:
        """Record the produced keys, their workers and the statistics. Raises RuntimeError if a head ran on other ids than
        requested."""
        if call.remakes:  # no call reads the former values any more (`order`)
            step.tracker.discard(body.ids, self.mfc.output_keys)
        call.stats = self.record(step.tracker, body, replies)
        call.number = step.next_number()
        call.seconds = max(reply.seconds for reply in replies)
        peak_flops = sum(reply.peak_flops for reply in replies)
        if peak_flops and self.mfc.kind == "train_step":
            call.peak_s = sum(reply.flops for reply in replies) / peak_flops
        shared = sum(reply.num_tokens_shared for reply in replies)
        step.result.add_share(f"shared_tokens/{self.mfc.name}", shared, sum(reply.num_tokens for reply in replies))
        for worker, reply in zip(self.placement.workers, replies, strict=True):
            if reply.memory_bytes:  # a peak: a later reply never has less
                step.result.stats[f"memory/model_worker_{worker}_bytes"] = float(reply.memory_bytes)

    def record(self, tracker: StorageTracker, body: ExecuteMFC, replies: Sequence[CallResult]) -> dict[str, float]:
        """Record the produced keys and their workers. Returns the statistics. Raises RuntimeError as take_note does."""
        mfc, placement, stats = self.mfc, self.placement, dict[str, float]()
        by_worker = dict(zip(placement.workers, replies, strict=True))
        for head, part in zip(placement.heads, body.parts, strict=True):
            reply = by_worker[head]
            if reply.ids != part:
                raise RuntimeError(
                    f"MFC {mfc.name} ran on {len(reply.ids)} ids at model_worker/{head}, {reply.ids[:5]}; {len(part)} ids were "
                    f"requested, {part[:5]}"
                )
            tracker.add(head, part, reply.keys)
            stats.update(reply.stats)
            self.state = reply.state
        return stats


class InTrainerGroup(Home):
    """The workers compute in the master's order of calls. waits for: their replies."""

    def __init__(
        self, mfc: MFCDef, placement: ModelPlacement, caller: WorkerCaller, hooks: ParameterHooks, refresher: Refresher
    ) -> None:
        super().__init__(mfc, placement)
        self._caller, self._hooks, self._refresher = caller, hooks, refresher

    async def run(self, step: PartOfStep, call: Call, body: ExecuteMFC) -> asyncio.Task[None] | None:
        copied = self._refresher.copy(self._hooks.before(self.mfc))
        replies, *_ = await asyncio.gather(self._caller.call(f"MFC {self.mfc.name}", self.handlers, body), *copied)
        self.take_note(step, call, body, replies)
        if self.mfc.kind == "train_step" and step.ends_step:
            self._hooks.trained(self.mfc)
        return step.move(self.mfc.output_keys, body.ids)  # sent before other calls that read the keys are sent


class InDetachedGroup(Home):
    """The workers are outside the trainer group.

    waits for: the newest refresh of the model; their replies; the next incarnation of their worker group, if the group ends.
    The workers add up statistics and a state over the calls of a step. So a new incarnation first executes the step's earlier calls
    again, on their inputs and with the states with which they began.
    If the group is missing and on_missing=continue, the step goes on without the output keys. A call without groups needs nothing
    from the group.
    """

    def __init__(
        self,
        mfc: MFCDef,
        placement: ModelPlacement,
        hooks: ParameterHooks,
        detached: DetachedGroups,
        refresher: Refresher,
        tracker: StorageTracker,
    ) -> None:
        super().__init__(mfc, placement)
        self._refresher = refresher
        self.moved_keys = ()  # they are fetched
        # No step can do without advantages
        self._on_missing = on_missing(hooks.train, mfc.role) if mfc.has_model else "wait"
        self._detached, self._worker_group = detached, detached.worker_groups.of(placement.workers[0])
        self._tracker = tracker
        # Calls of the step with a state or statistics, which add up at the workers
        self._earlier: list[ExecuteMFC] = []
        self._caught_up = -1  # the incarnation that has executed them

    async def run(self, step: PartOfStep, call: Call, body: ExecuteMFC) -> None:
        is_missing = False
        await self._refresher.refreshed(self.placement.name)
        try:
            if body.ids:  # the last part of a batch may have no groups
                await self._work(step, call, body)
        except GroupMissingError as error:
            logger.warning("step %d is trained without it: %s", step.version + 1, error)
            step.missing.update(self.mfc.output_keys)  # before calls that read them begin
            is_missing = True
        if self._on_missing == "continue":
            name = f"{MISSING}{self.mfc.name}"
            step.result.stats[name] = max(step.result.stats.get(name, 0.0), float(is_missing))

    async def _work(self, step: PartOfStep, call: Call, body: ExecuteMFC) -> None:
        """Raises GroupMissingError."""
        await self._repeated(f"MFC {self.mfc.name}", partial(self._once, step, call, body))

    async def _repeated(self, what: str, work: Callable[[Incarnation], Awaitable[None]]) -> None:
        """Raises GroupMissingError."""
        await self._detached.repeated(what, self._worker_group, work, on_missing=self._on_missing)

    async def _once(self, step: PartOfStep, call: Call, body: ExecuteMFC, incarnation: Incarnation) -> None:
        self._earlier = [earlier for earlier in self._earlier if earlier.version == body.version]
        for earlier in self._earlier if self._caught_up != incarnation.number else ():
            # What they add up (StepTotals) has ended with the incarnation before
            await self._fetch_inputs(earlier, self._inputs(earlier), incarnation)
            await self._execute(earlier, incarnation)
        self._caught_up = incarnation.number
        num_bytes = await self._fetch_inputs(body, self._inputs(body), incarnation)
        self.take_note(step, call, body, await self._execute(body, incarnation))
        step.count_bytes(num_bytes + await self._fetch("outputs", step.outputs(self.mfc, body.ids), incarnation))
        if self.state or call.stats:
            self._earlier.append(body)

    def _inputs(self, body: ExecuteMFC) -> list[str]:
        return [key for key in self.mfc.input_keys if key not in body.missing]

    async def _fetch_inputs(self, body: ExecuteMFC, keys: Sequence[str], incarnation: Incarnation) -> float:
        """Have the workers fetch these keys of their parts. Returns the number of bytes."""
        replicas, tracker = self.placement.replicas, self._tracker
        needed = {worker: part for rank, part in enumerate(body.parts) for worker in replicas[rank]}
        inputs = plan_fetches(needed, keys, tracker.there, self._detached.worker_groups.trainer)
        return await self._fetch("inputs", inputs, incarnation)

    async def _execute(self, body: ExecuteMFC, incarnation: Incarnation) -> list[CallResult]:
        """Run the MFC. Its workers keep the outputs."""
        return await self._detached.call(incarnation, f"MFC {self.mfc.name}", self.handlers, body)

    async def _fetch(self, which: str, transfers: Sequence[Transfer], incarnation: Incarnation) -> float:
        return await self._detached.fetch(f"{which} of MFC {self.mfc.name}", incarnation, transfers, self._tracker)


class ArrivingGroups:
    """Decides which groups form the next chunk: those that are trained first, at most max_tokens tokens. Pure.

    Groups are trained in about the order of the oldest version that sampled them. No group is processed that will be trained only
    after the model's weights have changed, because its outputs must come from the weights of its step.
    """

    def __init__(self, *, max_tokens: int, batch_size: int, update_interval: int) -> None:
        """update_interval: steps between two changes of the model's weights; 0: they never change."""
        self._max_tokens, self._batch_size, self._update_interval = max_tokens, batch_size, update_interval

    def next_chunk(
        self, stored: Sequence[TrajectoryMeta], done: Collection[str], *, version: int, num_left: int
    ) -> list[TrajectoryMeta]:
        """Return the groups to process now; empty: none. stored: the groups that are in no batch yet, in order of arrival. done:
        tickets that have been processed. version: the running step trains from it, or the next step will. num_left: the number of
        stored groups that this step will still take."""
        ordered = sorted(stored, key=lambda meta: min(meta.version_start))  # stable
        if self._update_interval:
            further_steps = self._update_interval - version % self._update_interval - 1
            ordered = ordered[: num_left + further_steps * self._batch_size]
        chunk: list[TrajectoryMeta] = []
        num_tokens = 0
        for meta in ordered:
            if meta.ticket_id in done:
                continue
            num_tokens += sum(meta.seqlens)
            if chunk and num_tokens > self._max_tokens:
                break
            chunk.append(meta)
        return chunk


class ArrivingInference(InDetachedGroup):
    """The model is detached, and its weights do not change within a step. Its workers also process stored groups before their step
    (train.arriving_inference).

    consumes: stored groups, in chunks (ArrivingGroups); a step's batch.  produces: its output keys, which its workers hold until
    the step.
    waits for: a change of the stored groups; the same as InDetachedGroup.
    The storage tracker records which groups have been processed. If the detached group ends or the model is refreshed, the tracker
    forgets the outputs, so the groups count as not processed again.
    A chunk excludes a refresh of the model, and a step's work unless all groups of the step have been processed. So these wait
    for at most one chunk.
    """

    def __init__(
        self,
        mfc: MFCDef,
        placement: ModelPlacement,
        hooks: ParameterHooks,
        detached: DetachedGroups,
        refresher: Refresher,
        tracker: StorageTracker,
        buffer: AsyncIOSequenceBuffer,
        balance: Balance,
    ) -> None:
        super().__init__(mfc, placement, hooks, detached, refresher, tracker)
        self._buffer, self._balance, train = buffer, balance, hooks.train
        self._arriving = ArrivingGroups(
            max_tokens=train.max_tokens_per_mb * placement.grid.num_replicas,
            batch_size=train.batch_size,
            update_interval={REF: train.ref.update_interval, ACTOR: 1}.get(mfc.role, 0),
        )
        self._lock = asyncio.Lock()
        self._version, self._num_left = 0, 0

    def at(self, version: int, *, num_left: int) -> None:
        self._version, self._num_left = version, num_left

    async def process_arriving(self) -> None:
        """Never returns."""
        what = f"MFC {self.mfc.name} on arriving groups"
        while True:  # each turn is bounded, except the wait for a change
            seen = self._buffer.num_changes
            await self._refresher.refreshed(self.placement.name)
            async with self._lock:
                has_work = bool(self._next_chunk())
                try:
                    if has_work:
                        await self._repeated(what, self._process_chunk)
                except GroupMissingError as error:  # the steps report it, too
                    logger.info("%s", error)
                    has_work = False
            if not has_work:
                await self._buffer.wait_for_change(seen)

    @contextlib.asynccontextmanager
    async def refreshing(self) -> AsyncIterator[None]:
        async with self._lock:
            try:
                yield
            finally:
                self._tracker.forget(self.placement.workers, self.mfc.output_keys)

    async def _work(self, step: PartOfStep, call: Call, body: ExecuteMFC) -> None:
        num_left = len(set(body.ids) - self._processed())
        step.result.add_share(f"arriving/{self.mfc.name}_share", len(body.ids) - num_left, len(body.ids))
        async with self._lock if num_left else contextlib.nullcontext():  # its groups may be in the chunk under way
            await self._repeated(f"MFC {self.mfc.name}", partial(self._rest, step, call, body))

    async def _rest(self, step: PartOfStep, call: Call, body: ExecuteMFC, incarnation: Incarnation) -> None:
        """Run the MFC on the groups of the batch that have not been processed yet."""
        done, call.seconds = self._processed(), 0.0
        if rest := [meta for meta in self._buffer.metas(body.ids) if meta.ticket_id not in done]:
            call.seconds = await self._process(rest, step.version, incarnation)
        step.count_bytes(await self._fetch("outputs", step.outputs(self.mfc, body.ids), incarnation))

    def _next_chunk(self) -> list[TrajectoryMeta]:
        stored, done = self._buffer.stored, self._processed()
        return self._arriving.next_chunk(stored, done, version=self._version, num_left=self._num_left)

    async def _process_chunk(self, incarnation: Incarnation) -> None:
        if not (chunk := self._next_chunk()):  # dropped meanwhile
            return
        await self._process(chunk, self._version, incarnation)
        if dropped := self._dropped(chunk):
            self._tracker.drop(dropped)
            self._detached.tell_nowait("forgetting groups", self.placement.workers, ClearData(ids=dropped))

    async def _process(self, metas: Sequence[TrajectoryMeta], version: int, incarnation: Incarnation) -> float:
        """Run the MFC on these groups, or on none if the master drops one of them while their inputs arrive: their workers may have
        cleared it. Returns the seconds at the slowest worker."""
        ids, num_ranks = [meta.ticket_id for meta in metas], self.placement.grid.num_replicas
        parts = self._balance.deal(self.placement.name, metas, num_ranks, {}, drawn_for=None)
        body = ExecuteMFC(mfc=self.mfc.name, version=version, ids=ids, parts=parts)
        await self._fetch_inputs(body, self.mfc.input_keys, incarnation)
        if self._dropped(metas):
            return 0.0
        replies = await self._execute(body, incarnation)
        self.record(self._tracker, body, replies)
        return max(reply.seconds for reply in replies)

    def _dropped(self, metas: Sequence[TrajectoryMeta]) -> list[str]:
        stored = set(self._buffer.stored_tickets)
        return [meta.ticket_id for meta in metas if meta.ticket_id not in stored]

    def _processed(self) -> set[str]:
        return self._tracker.held_by_any(self.placement.heads, self.mfc.output_keys)


def homes_of(
    graph: DataflowGraph,
    placements: Mapping[str, ModelPlacement],
    caller: WorkerCaller,
    hooks: ParameterHooks,
    detached: DetachedGroups,
    refresher: Refresher,
    tracker: StorageTracker,
    buffer: AsyncIOSequenceBuffer,
    balance: Balance,
) -> list[Home]:
    """Return where the model of each MFC lives, in the graph's order. Raises ValueError if an MFC's model is not placed."""
    mfcs = [graph.mfcs[name] for name in graph.order]
    if homeless := [f"{mfc.name} on {mfc.model!r}" for mfc in mfcs if mfc.model not in placements]:
        raise ValueError(f"MFCs run on models without workers: {homeless}; placed models: {list(placements)}")
    homes: list[Home] = []
    for mfc in mfcs:
        placement = placements[mfc.model]
        # Only a function that computes each sequence alone can run on groups before their step
        alone = mfc.interface in (LOGPROBS, SCORES)
        if detached.worker_groups.is_local(placement.workers[0]):
            homes.append(InTrainerGroup(mfc, placement, caller, hooks, refresher))
        elif hooks.train.arriving_inference and alone:
            homes.append(ArrivingInference(mfc, placement, hooks, detached, refresher, tracker, buffer, balance))
        else:
            homes.append(InDetachedGroup(mfc, placement, hooks, detached, refresher, tracker))
    return homes
