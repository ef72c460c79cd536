"""Runs the MFC calls of a train step. A call waits until its input keys exist, and is then sent to all workers of its model.

The step function (train.step, or shipped_step.py) makes the calls, with handles of the batch and of the models (handles.py).

    batch -> parts for each model's data ranks -> Redistribute (keys that the parts lack)
    keys that an MFC has produced --------------> Redistribute (to models that read them) -> ExecuteMFC, once all input keys exist

Data moves as soon as it exists, before the calls that need it are sent. A worker sends without waiting, so MFCs of disjoint
meshes run at the same time, and none waits for a worker that computes something else.

No deadlock: one master sends all calls, each to all its workers without awaiting in between. So any two workers receive the calls
that they share in the same order, even if meshes overlap.

Redistribute never sends data between worker groups (dataflow/worker_groups.py). The workers of a detached model fetch the inputs
of its MFC when the MFC runs, and the trainer group fetches the outputs before the MFC counts as done (calls.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.dataflow.graph import TRAIN_MFC, DataflowGraph
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.redistribution import Transfer, assign, members, plan_fetches, plan_redistribution
from asyncrl.dataflow.topology import Handler, ModelPlacement
from asyncrl.master.buffer import AsyncIOSequenceBuffer, StorageTracker
from asyncrl.master.calls import DetachedGroups, GroupMissingError, Incarnation, WorkerCaller
from asyncrl.master.handles import Batch, Call, Function, Models
from asyncrl.master.on_policy import OnPolicy
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.refresh import Refresher
from asyncrl.master.report import MISSING
from asyncrl.master.step_function import StepFunction
from asyncrl.master.step_result import StepResult
from asyncrl.protocol.messages import (
    CallResult,
    ClearData,
    ExecuteMFC,
    ReadValues,
    Reallocate,
    RedistribStep,
    Redistribute,
    TrajectoryMeta,
)

logger = logging.getLogger(__name__)


MOVED_BYTES = "redistribution/bytes"  # statistic of a step: bytes that model workers have sent to each other
# Statistic of a step: seconds of the moves in the trainer group, at the slowest worker of each
TRANSFER_S = "time/transfer_s"
NUM_PARTS = "streaming/parts"  # statistic of a step: parts of its batch, if there were several
BALANCE_TOLERANCE = 0.1  # a data rank with more tokens than (1 + this) times the ranks' mean gives groups away


class _Step:
    """One batch, or one part of it, on its way through the step: its parts for the data ranks, its data movements and its results.
    Its methods send and do not wait, except `moved`."""

    def __init__(
        self,
        version: int,
        mfcs: Sequence[MFCDef],
        placements: Mapping[str, ModelPlacement],
        tracker: StorageTracker,
        caller: WorkerCaller,
        recorders: Sequence[int],
        detached: Collection[int] = (),
        *,
        result: StepResult,
        ends_step: bool,
        batch: Sequence[str],
    ) -> None:
        """recorders: by head, the worker that records the head's trajectories; empty: no recording. detached: workers that are not
        in the trainer group. result: of the step, to which this part adds. ends_step, batch: as in ExecuteMFC."""
        self.version = version
        self.on_policy = False  # the first call of actor_train of the step gets on-policy data
        self.ends_step, self.batch = ends_step, list(batch)
        # (model, groups) -> the ids of each data rank
        self._parts: dict[tuple[str, frozenset[str]], list[list[str]]] = {}
        self.missing: set[str] = set()  # keys that no worker computes in this step, because a detached group is missing
        self.result = result
        self.tracker = tracker
        self._sent: list[asyncio.Task[None]] = []
        self._num_replied = 0
        self._recorders = recorders
        self._recorded: dict[int, list[str]] = {}  # worker -> the groups that it records
        self._placements = placements
        self._caller = caller
        self._reads: dict[str, list[str]] = {}  # model -> the keys that its MFCs read
        for mfc in mfcs:
            self._reads.setdefault(mfc.model, []).extend(mfc.input_keys)
        self._detached = frozenset(detached)
        self._trainer_group = (
            frozenset(w for placement in placements.values() for w in placement.workers) - self._detached
        )
        self._heads = next(iter(placements.values())).heads
        self._came_to: dict[int, list[str]] = {}  # worker -> the groups that it received as a head
        self._ids: frozenset[str] = frozenset()  # the groups of the batch
        self._tokens: dict[str, int] = {}  # of each group

    def begin(self, metas: Sequence[TrajectoryMeta], keys: Collection[str]) -> None:
        """Assign the batch's parts to each model's ranks and move the keys that they lack. A group goes to a data rank that lacks
        the fewest of these keys, as far as the balance of tokens allows."""
        ids = [meta.ticket_id for meta in metas]
        self._ids = frozenset(ids)
        self._tokens = {meta.ticket_id: sum(meta.seqlens) for meta in metas}
        for meta in metas:
            self._came_to.setdefault(self._heads[meta.head % len(self._heads)], []).append(meta.ticket_id)
            if self._recorders:
                self._recorded.setdefault(self._recorders[meta.head], []).append(meta.ticket_id)
        steps: list[RedistribStep] = []
        for model, reads in self._reads.items():
            wanted = _those_in(reads, keys)
            self._assign(model, ids, wanted)
            steps += self._plan(model, wanted, self._ids)
        self._send(steps)

    def parts_for(self, mfc: MFCDef, batches: Sequence[Batch]) -> list[list[str]]:
        """Return the ids of each data rank for a call on these batches, and send the keys that the ranks lack. For the whole batch
        nothing has to be sent: its keys move as soon as they exist."""
        ids = [group for batch in batches for group in batch.ids]
        if mfc.dispatch == "data_parallel":
            groups = frozenset(ids)
            if (mfc.model, groups) not in self._parts:
                self._assign(mfc.model, ids, mfc.input_keys)
            parts = self._parts[mfc.model, groups]
            if groups == self._ids:
                return parts
        else:
            parts = self._dispatched(mfc, ids, batches)
        if not self._is_detached(mfc.model):
            self._send(self._plan_for(self._workers_of(mfc.model, parts), self._read_by(mfc)))
        return parts

    def _dispatched(self, mfc: MFCDef, ids: list[str], batches: Sequence[Batch]) -> list[list[str]]:
        data = self._placements[mfc.model].grid.num_replicas
        if mfc.dispatch == "one_to_all":
            return [ids] * data
        return [ids, *[[]] * (data - 1)] if mfc.dispatch == "rank_zero" else [list(batch.ids) for batch in batches]

    def _assign(self, model: str, ids: Sequence[str], keys: Sequence[str]) -> None:
        placement = self._placements[model]
        homes = {group: self._homes(group, placement, keys) for group in ids}
        parts = assign(ids, self._tokens, homes, placement.grid.num_replicas, BALANCE_TOLERANCE)
        self._parts[model, frozenset(ids)] = parts

    def inputs(self, mfc: MFCDef, parts: Sequence[list[str]]) -> list[Transfer]:
        """Return the fetches from the trainer group by which the workers of a detached model get the MFC's missing input keys of
        their parts."""
        needed = self._workers_of(mfc.model, parts)
        return plan_fetches(needed, self._read_by(mfc), self.tracker.there, self._trainer_group)

    def _read_by(self, mfc: MFCDef) -> list[str]:
        """The input keys of an MFC that exist in this step."""
        return [key for key in mfc.input_keys if key not in self.missing]

    def outputs(self, mfc: MFCDef, ids: Collection[str]) -> list[Transfer]:
        """Return the fetches by which the trainer group gets the output keys that an MFC of a detached model made for these groups.

        Each group of responses goes to the workers that read or record it, and in any case to the head that received it. So the
        trainer group has all outputs, and another worker group can fetch them from there.
        """
        needed = {worker: dict.fromkeys(came) for worker, came in self._came_to.items()}
        for model, reads in self._reads.items():
            if not self._is_detached(model) and _those_in(reads, mfc.output_keys):
                for worker, part in self._needed(model).items():
                    needed.setdefault(worker, {}).update(dict.fromkeys(part))
        wanted = self._only({worker: list(groups) for worker, groups in needed.items()}, frozenset(ids))
        return plan_fetches(wanted, mfc.output_keys, self.tracker.there, self._placements[mfc.model].heads)

    def move(self, keys: Collection[str], ids: Collection[str]) -> asyncio.Task[None]:
        """Send new keys of these groups to the workers that record them, and to all models of the trainer group that read them."""
        groups = frozenset(ids)
        plans = [self._plan(model, _those_in(reads, keys), groups) for model, reads in self._reads.items()]
        plans.append(self._plan_for(self._only(self._recorded, groups), list(keys)))
        return self._send([step for plan in plans for step in plan])

    async def read(self, ids: Sequence[str], key: str) -> list[list[list[float]]]:
        """Return the values of a key by id and sequence, from workers of the trainer group. Raises ValueError if the key is missing
        in this step."""
        if key in self.missing:
            raise ValueError(
                f"{key} is missing in this step, because the workers that make it are down (on_missing=continue)"
            )
        by_worker: dict[int, list[str]] = {}
        for group in ids:
            by_worker.setdefault(min(self.tracker.holders[group][key]), []).append(group)
        bodies = [ReadValues(ids=groups, key=key) for groups in by_worker.values()]
        replies = await self._caller.start_each(f"the values of {key}", list(by_worker), bodies)
        values = {
            group: found
            for groups, reply in zip(by_worker.values(), replies, strict=True)
            for group, found in zip(groups, reply.values, strict=True)
        }
        return [values[group] for group in ids]

    def copy_weights(self, copies: Iterable[Reallocate]) -> list[asyncio.Task[list[CallResult]]]:
        """Start copies of weights. Each copy is one call to all workers of its source model and its target model."""
        return start_copies(copies, self._placements, self._caller)

    def _homes(self, group: str, placement: ModelPlacement, keys: Sequence[str]) -> list[int]:
        """Return the data ranks whose workers lack the fewest of these keys of a group."""
        ranks = range(placement.grid.num_replicas)
        missing = [self.tracker.num_missing(group, placement.replicas[rank], keys) for rank in ranks]
        return [rank for rank in ranks if missing[rank] == min(missing)]

    def _plan(self, model: str, keys: Sequence[str], groups: frozenset[str]) -> list[RedistribStep]:
        """Plan the moves of these keys of these groups to a model's workers, as the whole batch is divided among them; none for a
        detached model. Planned moves count as done, so that the next plan can build on them."""
        if self._is_detached(model) or not keys:
            return []
        return self._plan_for(self._only(self._needed(model), groups), keys)

    def _needed(self, model: str) -> dict[int, list[str]]:
        """Return the ids of the batch that each worker of a model computes on."""
        return self._workers_of(model, self._parts[model, self._ids])

    def _workers_of(self, model: str, parts: Sequence[list[str]]) -> dict[int, list[str]]:
        """Return the part of each worker of a model. parts: by data rank."""
        return {worker: part for rank, part in enumerate(parts) for worker in self._placements[model].replicas[rank]}

    def _only(self, needed: Mapping[int, list[str]], groups: frozenset[str]) -> Mapping[int, list[str]]:
        """Of the ids that each worker needs, those of these groups."""
        if groups == self._ids:
            return needed
        return {worker: [group for group in ids if group in groups] for worker, ids in needed.items()}

    def _is_detached(self, model: str) -> bool:
        return self._placements[model].workers[0] in self._detached

    def _plan_for(self, needed: Mapping[int, Sequence[str]], keys: Sequence[str]) -> list[RedistribStep]:
        steps = plan_redistribution(needed, keys, self.tracker.holders) if keys else []
        self.tracker.apply(steps)
        return steps

    def _send(self, steps: list[RedistribStep]) -> asyncio.Task[None]:
        replies = None
        if steps:
            replies = self._caller.start("data to be moved", members(steps), Redistribute(steps=steps))
        self._sent.append(asyncio.create_task(self._count(replies)))
        return self._sent[-1]

    def next_number(self) -> int:
        """The number of a call in the order of replies, which is that of execution. It begins with 1."""
        self._num_replied += 1
        return self._num_replied

    async def moved(self) -> None:
        """Wait until all data that was sent has arrived."""
        await asyncio.gather(*self._sent)

    def give_up(self) -> None:
        """Stop waiting for replies."""
        for task in self._sent:
            task.cancel()

    async def _count(self, replies: asyncio.Task[list[CallResult]] | None) -> None:
        if replies is not None:
            done = await replies
            self.count_bytes(sum(reply.num_bytes for reply in done))
            self.result.add(TRANSFER_S, max(reply.seconds for reply in done))

    def count_bytes(self, num_bytes: float) -> None:
        """Add to the number of bytes that model workers have sent to each other."""
        self.result.add(MOVED_BYTES, num_bytes)


def start_copies(
    copies: Iterable[Reallocate], placements: Mapping[str, ModelPlacement], caller: WorkerCaller
) -> list[asyncio.Task[list[CallResult]]]:
    """Start copies of weights. Each copy is one call to all workers of its source model and its target model."""
    tasks = []
    for body in copies:
        workers = {*placements[body.source].workers, *placements[body.target].workers}
        what = f"weights of {body.source} to be copied to {body.target}"
        tasks.append(caller.start(what, sorted(workers), body))
    return tasks


def shard_handlers(placement: ModelPlacement) -> list[Handler]:
    """Return the handlers (addresses for calls) of all workers of a model, in rank order."""
    return list(placement.shards)


def _those_in(reads: Iterable[str], keys: Collection[str]) -> list[str]:
    return [key for key in dict.fromkeys(reads) if key in keys]


class ModelFunctionCall:
    """One MFC: consumes batches that have its input keys, produces its output keys for them.

    waits for: the calls that make the input keys, an earlier call if its function has a state, then the replies of all workers of
    its model.
    """

    def __init__(self, mfc: MFCDef, placement: ModelPlacement, caller: WorkerCaller, hooks: ParameterHooks) -> None:
        self.mfc = mfc
        self._placement = placement
        self._caller = caller
        self._hooks = hooks
        self._handlers = shard_handlers(placement)
        self.num_ranks = placement.grid.num_replicas
        self.state: dict[str, float] | None = None  # of its function after the newest call; None: before the first one
        self._turn = asyncio.Lock()

    def order(self, call: Call, batch: Batch, earlier: Iterable[Call]) -> None:
        """Decide which earlier calls of the step must be over before this one is sent: those that train its role, and if keys are
        made again, those that read or make the same keys. Raises ValueError if its model gets the trained weights too late."""
        reads, makes = set(self.mfc.input_keys), set(self.mfc.output_keys)
        after = []
        for other in earlier:
            trains = other.mfc.kind == "train_step" and other.mfc.role == self.mfc.role
            if trains and self._hooks.gets_weights_after_step(self.mfc):
                raise ValueError(
                    f"{call} comes after {other}, and its workers get the new weights after the step; call it before, or take "
                    f"{self.mfc.name} out of the allocation"
                )
            others, is_shared = set(other.mfc.output_keys), not call.ids.isdisjoint(other.ids)
            call.remakes = call.remakes or (is_shared and not makes.isdisjoint(others))
            changed = makes & (others | set(other.mfc.input_keys)) | (reads & others if other.remakes else set())
            if trains or (is_shared and changed):
                after.append(other.task)
        call.remakes = call.remakes or not makes.isdisjoint(batch.came_with)
        call.after = tuple(after)

    async def run(self, step: _Step, batch: Batch, call: Call) -> None:
        async with self._own_turn():
            body = await self._ready(step, batch, call)
            await self._work(step, call, body)
            if self.mfc.kind == "train_step" and step.ends_step:
                self._hooks.trained(self.mfc)
            moved = step.move(self.mfc.output_keys, body.ids)  # sent before other calls that read the keys are sent
        call.made.set()
        await moved

    async def _work(self, step: _Step, call: Call, body: ExecuteMFC) -> None:
        copied = step.copy_weights(self._hooks.before(self.mfc))
        replies, *_ = await asyncio.gather(self._caller.start(f"MFC {self.mfc.name}", self._handlers, body), *copied)
        self._take_note(step, call, body, replies)

    def _own_turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Calls of a function that has a state follow one another. Without a state they may run at the same time."""
        return contextlib.nullcontext() if self.state == {} else self._turn

    async def _ready(self, step: _Step, batch: Batch, call: Call) -> ExecuteMFC:
        """Wait until the batch has all input keys. Returns the body of the call."""
        mfc = self.mfc
        if call.after:
            await asyncio.wait(call.after)  # each has a limit of its own
        making = {maker: None for key in mfc.input_keys for maker in batch.makers(key)}
        for maker in making:
            await self._caller.bounded(maker.made.wait(), f"the input keys of MFC {mfc.name}", f"MFC {maker.mfc.name}")
        missing = [key for key in mfc.input_keys if key in step.missing]
        on_policy = step.on_policy and mfc.name == TRAIN_MFC
        if on_policy:
            step.on_policy = False  # further calls of the step train from changed weights
        return ExecuteMFC(
            mfc=mfc.name,
            version=step.version,
            ids=list(batch.ids),
            parts=step.parts_for(mfc, call.batches),
            ends_step=step.ends_step,
            batch=step.batch,
            on_policy=on_policy,
            missing=missing,
            state=self.state,
        )

    def _take_note(self, step: _Step, call: Call, body: ExecuteMFC, replies: Sequence[CallResult]) -> None:
        """Record the produced keys, their workers and the statistics. Raises RuntimeError if a head ran on other ids than
        requested."""
        if call.remakes:  # no call reads the former values any more (`order`)
            step.tracker.discard(body.ids, self.mfc.output_keys)
        call.stats = self._record(step.tracker, body, replies)
        call.number = step.next_number()
        call.seconds = max(reply.seconds for reply in replies)
        peak_flops = sum(reply.peak_flops for reply in replies)
        if peak_flops and self.mfc.kind == "train_step":
            call.peak_s = sum(reply.flops for reply in replies) / peak_flops
        for worker, reply in zip(self._placement.workers, replies, strict=True):
            if reply.memory_bytes:  # a peak: a later reply never has less
                step.result.stats[f"memory/model_worker_{worker}_bytes"] = float(reply.memory_bytes)

    def _record(self, tracker: StorageTracker, body: ExecuteMFC, replies: Sequence[CallResult]) -> dict[str, float]:
        """Record the produced keys and their workers. Returns the statistics. Raises RuntimeError as _take_note does."""
        mfc, placement, stats = self.mfc, self._placement, dict[str, float]()
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


class DetachedFunctionCall(ModelFunctionCall):
    """An MFC of a model in a detached group.

    waits for: the same as ModelFunctionCall; the next incarnation of its worker group, if the group ends (calls.py).
    If the group is missing and on_missing=continue, the step goes on without the output keys. A call without groups needs nothing
    from the group.
    """

    def __init__(
        self,
        mfc: MFCDef,
        placement: ModelPlacement,
        caller: WorkerCaller,
        hooks: ParameterHooks,
        detached: DetachedGroups,
        tracker: StorageTracker,
    ) -> None:
        super().__init__(mfc, placement, caller, hooks)
        self._on_missing = hooks.on_missing(mfc)
        self._detached, self._worker_group = detached, detached.worker_groups.of(placement.workers[0])
        self._tracker = tracker

    async def run(self, step: _Step, batch: Batch, call: Call) -> None:
        is_missing = False
        try:
            async with self._own_turn():
                body = await self._ready(step, batch, call)
                if body.ids:  # the last part of a batch may have no groups
                    await self._work(step, call, body)
        except GroupMissingError as error:
            logger.warning("step %d is trained without it: %s", step.version + 1, error)
            step.missing.update(self.mfc.output_keys)  # before calls that read them begin
            is_missing = True
        if self._on_missing == "continue":
            name = f"{MISSING}{self.mfc.name}"
            step.result.stats[name] = max(step.result.stats.get(name, 0.0), float(is_missing))
        call.made.set()

    async def _work(self, step: _Step, call: Call, body: ExecuteMFC) -> None:
        """Raises GroupMissingError."""
        await self._repeated(f"MFC {self.mfc.name}", partial(self._once, step, call, body))

    async def _repeated(self, what: str, work: Callable[[Incarnation], Awaitable[None]]) -> None:
        """Raises GroupMissingError."""
        await self._detached.repeated(what, self._worker_group, work, on_missing=self._on_missing)

    async def _once(self, step: _Step, call: Call, body: ExecuteMFC, incarnation: Incarnation) -> None:
        num_bytes, replies = await self._execute(body, step.inputs(self.mfc, body.parts), incarnation)
        self._take_note(step, call, body, replies)
        step.count_bytes(num_bytes + await self._fetch("outputs", step.outputs(self.mfc, body.ids), incarnation))

    async def _execute(
        self, body: ExecuteMFC, inputs: Sequence[Transfer], incarnation: Incarnation
    ) -> tuple[float, list[CallResult]]:
        """Fetch the inputs and run the MFC. Its workers keep the outputs. Returns the number of fetched bytes, and the replies."""
        num_bytes = await self._fetch("inputs", inputs, incarnation)
        handlers = self._handlers
        replies = await self._detached.call(f"MFC {self.mfc.name}", incarnation, handlers, [body] * len(handlers))
        return num_bytes, replies

    async def _fetch(self, which: str, transfers: Sequence[Transfer], incarnation: Incarnation) -> float:
        return await self._detached.fetch(f"{which} of MFC {self.mfc.name}", incarnation, transfers, self._tracker)


class ArrivingFunctionCall(DetachedFunctionCall):
    """An MFC of a detached frozen model that also processes stored groups before their step (train.arriving_inference).

    consumes: stored groups, in chunks; a step's batch.  produces: its output keys, which its workers hold until the step.
    waits for: a change of the stored groups; the same as DetachedFunctionCall.
    A chunk excludes a refresh of the model, and a step's work unless all groups of the step have been processed. So these wait
    for at most one chunk.
    """

    def __init__(
        self,
        mfc: MFCDef,
        placement: ModelPlacement,
        caller: WorkerCaller,
        hooks: ParameterHooks,
        detached: DetachedGroups,
        tracker: StorageTracker,
        buffer: AsyncIOSequenceBuffer,
    ) -> None:
        super().__init__(mfc, placement, caller, hooks, detached, tracker)
        self._buffer = buffer
        self._arriving = hooks.arriving(mfc, placement.grid.num_replicas)
        self._lock = asyncio.Lock()
        self._version, self._num_left = 0, 0

    @property
    def model(self) -> str:
        return self._placement.name

    def at(self, version: int, *, num_left: int) -> None:
        """The step from this version runs, or is the next one. It will still take num_left of the groups that are not in it."""
        self._version, self._num_left = version, num_left

    async def process_arriving(self) -> None:
        """Process stored groups as they arrive. Never returns."""
        what = f"MFC {self.mfc.name} on arriving groups"
        while True:  # each turn is bounded, except the wait for a change
            seen = self._buffer.num_changes
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
        """While the block runs, the model's weights may change. Afterwards groups that are stored count as not processed."""
        async with self._lock:
            try:
                yield
            finally:
                self._tracker.forget(self._placement.workers, self.mfc.output_keys)

    async def _work(self, step: _Step, call: Call, body: ExecuteMFC) -> None:
        num_left = len(set(body.ids) - self._processed())
        step.result.add_share(f"arriving/{self.mfc.name}_share", len(body.ids) - num_left, len(body.ids))
        async with self._lock if num_left else contextlib.nullcontext():  # its groups may be in the chunk under way
            await super()._work(step, call, body)

    async def _once(self, step: _Step, call: Call, body: ExecuteMFC, incarnation: Incarnation) -> None:
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
        stored_now = set(self._buffer.stored_tickets)
        if dropped := [meta.ticket_id for meta in chunk if meta.ticket_id not in stored_now]:
            self._tracker.drop(dropped)
            self._detached.tell_nowait("forgetting groups", self._placement.workers, ClearData(ids=dropped))

    async def _process(self, metas: Sequence[TrajectoryMeta], version: int, incarnation: Incarnation) -> float:
        """Run the MFC on these groups. Returns the seconds at the slowest worker."""
        mfc, placement, tracker = self.mfc, self._placement, self._tracker
        ids, tokens = [meta.ticket_id for meta in metas], {meta.ticket_id: sum(meta.seqlens) for meta in metas}
        parts = assign(ids, tokens, {}, placement.grid.num_replicas, BALANCE_TOLERANCE)
        needed = {worker: part for rank, part in enumerate(parts) for worker in placement.replicas[rank]}
        fetches = plan_fetches(needed, mfc.input_keys, tracker.there, self._detached.worker_groups.trainer)
        body = ExecuteMFC(mfc=mfc.name, version=version, ids=ids, parts=parts)
        _, replies = await self._execute(body, fetches, incarnation)
        self._record(tracker, body, replies)
        return max(reply.seconds for reply in replies)

    def _processed(self) -> set[str]:
        return self._tracker.held_by_any(self._placement.heads, self.mfc.output_keys)


class FunctionExecutor:
    """Runs the step function on batches, with a function for each MFC of the graph. No MFC is treated specially here."""

    def __init__(
        self,
        graph: DataflowGraph,
        placements: Sequence[ModelPlacement],
        buffer: AsyncIOSequenceBuffer,
        tracker: StorageTracker,
        caller: WorkerCaller,
        hooks: ParameterHooks,
        *,
        recorders: Sequence[int] = (),
        detached: DetachedGroups | None = None,
        refresher: Refresher | None = None,
        function: StepFunction | None = None,
    ) -> None:
        """recorders: by head, the worker that records trajectories together with the keys that MFCs produce. detached, refresher:
        None if all workers are in one worker group. function: None: the shipped one."""
        self._buffer, self._tracker, self._caller, self._hooks = buffer, tracker, caller, hooks
        self._recorders = recorders
        self._function = function or StepFunction("", math.inf)
        self._placements = {placement.name: placement for placement in placements}
        mfcs = [graph.mfcs[name] for name in graph.order]
        homeless = [f"{mfc.name} on {mfc.model!r}" for mfc in mfcs if mfc.model not in self._placements]
        if homeless:
            raise ValueError(f"MFCs run on models without workers: {homeless}; placed models: {list(self._placements)}")
        self._detached = detached.worker_groups.all_detached if detached is not None else frozenset()
        self._refresher = refresher
        self._on_policy = OnPolicy()
        self._result = StepResult()  # of the step that runs, or comes next
        self._calls: list[ModelFunctionCall] = []
        for mfc in mfcs:
            about = mfc, self._placements[mfc.model], caller, hooks
            if detached is None or self._placements[mfc.model].workers[0] not in self._detached:
                self._calls.append(ModelFunctionCall(*about))
            elif hooks.is_arriving(mfc):
                self._calls.append(ArrivingFunctionCall(*about, detached, tracker, buffer))
            else:
                self._calls.append(DetachedFunctionCall(*about, detached, tracker))

    @property
    def states(self) -> dict[str, dict[str, float]]:
        """The states of the MFCs' functions that have one, such as the KL coefficient of `advantages`. A checkpoint keeps them."""
        return {call.mfc.name: call.state for call in self._calls if call.state}

    @states.setter
    def states(self, states: Mapping[str, dict[str, float]]) -> None:
        for call in self._calls:
            call.state = states.get(call.mfc.name)

    @property
    def _arriving(self) -> list[ArrivingFunctionCall]:
        return [call for call in self._calls if isinstance(call, ArrivingFunctionCall)]

    async def process_arriving(self, version: int) -> None:
        """Run the MFCs of detached frozen models on stored groups as they arrive. version: the first step trains from it. Returns
        at once if no MFC does so."""
        self._at(version, num_left=self._hooks.batch_size)
        await asyncio.gather(*(call.process_arriving() for call in self._arriving))

    def _at(self, version: int, *, num_left: int) -> None:
        for call in self._arriving:
            call.at(version, num_left=num_left)

    async def execute_part(self, tickets: Sequence[str], version: int) -> None:
        """Run the MFCs on a part of the batch of the step from this version (train.streaming). `execute_step` then runs them on the
        rest of the batch."""
        await self._run(tickets, version, ends_step=False)
        self._result.add(NUM_PARTS, 1.0)
        self._buffer.end_part()

    async def execute_step(self, tickets: Sequence[str], version: int) -> StepResult:
        """Run the MFCs of the step from this version on a batch. If one fails, the others are cancelled and its error is raised."""
        earlier = set(self._buffer.earlier)
        rest = [ticket for ticket in tickets if ticket not in earlier]
        await self._run(rest, version, tickets if earlier else ())
        if earlier:
            self._result.add(NUM_PARTS, 1.0)
        self._buffer.end_batch()
        result, self._result = self._result, StepResult()
        return result

    async def _run(
        self, tickets: Sequence[str], version: int, batch: Sequence[str] = (), *, ends_step: bool = True
    ) -> None:
        left_out = self._hooks.left_out(version)
        step = _Step(
            version,
            [call.mfc for call in self._calls if call.mfc.name not in left_out],
            self._placements,
            self._tracker,
            self._caller,
            self._recorders,
            self._detached,
            result=self._result,
            ends_step=ends_step,
            batch=batch,
        )
        num_taken = len(self._buffer.earlier) + len(tickets)
        self._at(version, num_left=0 if ends_step else max(0, self._hooks.batch_size - num_taken))
        self._buffer.begin_batch(tickets)
        metas = self._buffer.metas(tickets)
        step.on_policy = self._on_policy.begin(version, metas)
        try:
            async with asyncio.TaskGroup() as group:

                def start(runner: ModelFunctionCall, call: Call, groups: Batch) -> asyncio.Task[None]:
                    runner.order(call, groups, models.calls)
                    return group.create_task(runner.run(step, groups, call))

                models = Models(
                    [
                        Function(
                            runner.mfc,
                            partial(start, runner),
                            num_ranks=runner.num_ranks,
                            is_left_out=runner.mfc.name in left_out,
                            adds_up=self._hooks.adds_up,
                        )
                        for runner in self._calls
                    ]
                )
                step.begin(metas, self._buffer.common_keys(tickets))
                group.create_task(self._function.run(models, Batch(metas, step.read, version=version)))
            step.result.count(models.calls)
            if ends_step and TRAIN_MFC not in left_out:
                self._on_policy.trained()
            await step.moved()
            if ends_step:
                await self._refresh(step, version + 1)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one; the others follow from it
        finally:
            step.give_up()
        if ends_step:
            self._at(version + 1, num_left=self._hooks.batch_size)

    async def _refresh(self, step: _Step, version: int) -> None:
        """Copy weights after the step that produced this version: by collectives in the trainer group, else through the disk."""
        refresher, copies = self._refresher, self._hooks.after_step(version)
        elsewhere = [body for body in copies if refresher is not None and refresher.is_detached(body.target)]
        copied = step.copy_weights(body for body in copies if body not in elsewhere)
        await asyncio.gather(*copied)
        if refresher is not None:
            for body in elsewhere:
                async with contextlib.AsyncExitStack() as refreshing:
                    for call in self._arriving:
                        if call.model == body.target:
                            await refreshing.enter_async_context(call.refreshing())
                    await refresher.refresh(body, version)
