"""Runs the MFC calls of a train step. A call waits until its input keys exist, and is then sent to all workers of its model.

The step function (train.step, or shipped_step.py) makes the calls, with handles of the batch and of the models (handles.py).

    batch -> PartOfStep.begin (keys move) -> ModelFunctionCall, once all input keys exist -> Home.run (ExecuteMFC) -> new keys move

A worker sends without waiting, so MFCs of disjoint meshes run at the same time, and
none waits for a worker that computes something else.

No deadlock: one master sends all calls, each to all its workers without awaiting in between. So any two workers receive the calls
that they share in the same order, even if meshes overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from asyncrl.dataflow.graph import TRAIN_MFC, steps_early, waiting_for_batch
from asyncrl.master.balance import Balance
from asyncrl.master.buffer import AsyncIOSequenceBuffer, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.generating import Generate, GeneratingStep, Prompts
from asyncrl.master.handles import Batch, Call, Function, Models
from asyncrl.master.homes import Home
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.refresh import Refresher
from asyncrl.master.step_function import StepFunction
from asyncrl.master.step_part import PartOfStep
from asyncrl.master.step_result import StepResult
from asyncrl.protocol.calls import ExecuteMFC
from asyncrl.protocol.manager import Order
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion

NUM_PARTS = "streaming/parts"  # statistic of a step: parts of its batch, if there were several


class ModelFunctionCall:
    """One MFC: consumes batches that have its input keys, produces its output keys for them.

    waits for: the calls that make the input keys, an earlier call if its function has a state, then its model's workers (homes.py).
    """

    def __init__(self, home: Home, caller: WorkerCaller, hooks: ParameterHooks) -> None:
        self.home, self.mfc = home, home.mfc
        self._caller, self._hooks = caller, hooks
        self.num_ranks = home.placement.grid.num_replicas
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

    async def run(self, step: PartOfStep, batch: Batch, call: Call) -> None:
        # Calls of a function that has a state follow one another. Without a state they may run at the same time
        async with contextlib.nullcontext() if self.home.state == {} else self._turn:
            moved = await self.home.run(step, call, await self._ready(step, batch, call))
        call.made.set()
        if moved is not None:
            await moved

    async def _ready(self, step: PartOfStep, batch: Batch, call: Call) -> ExecuteMFC:
        """Wait until the batch has all input keys. Returns the body of the call."""
        mfc, made = self.mfc, step.made.get(self.mfc.name, frozenset())
        if call.after:
            await asyncio.wait(call.after)  # each has a limit of its own
        making = {maker: None for key in mfc.input_keys for maker in batch.makers(key)}
        for maker in making:
            await self._caller.bounded(maker.made.wait(), f"the input keys of MFC {mfc.name}", f"MFC {maker.mfc.name}")
        missing = [key for key in mfc.input_keys if key in step.missing]
        on_policy = step.on_policy and mfc.name == TRAIN_MFC
        if on_policy:
            step.on_policy = False  # further calls of the step train from changed weights
        batches = [part.select(set(part.ids) - made) for part in call.batches] if made else call.batches
        return ExecuteMFC(
            mfc=mfc.name,
            version=step.version,
            ids=[group for group in batch.ids if group not in made],
            parts=step.parts_for(mfc, batches, self.home.moved_keys),
            ends_step=step.ends_step,
            batch=step.batch,
            on_policy=on_policy,
            missing=missing,
            state=self.home.state,
        )


class OnPolicy:
    """Whether a step trains on data that its own weights have sampled (train.mismatch).

    Knows whether the actor still has the weights with which the attempt began: until its first train step, all versions of the
    attempt are the same weights."""

    def __init__(self) -> None:
        self._first: int | None = None  # the version with which the attempt began
        self._is_trained = False

    def begin(self, version: int, metas: Iterable[TrajectoryMeta]) -> bool:
        """The step from this version begins, or a part of it. Returns whether the weights of the actor sampled all of these groups
        and have not been trained in this attempt."""
        self._first = version if self._first is None else self._first
        if self._is_trained:
            return False
        return all(self._is_own(packed, meta.attempt) for meta in metas for packed in meta.version_start)

    def trained(self) -> None:
        """The actor has been trained."""
        self._is_trained = True

    def _is_own(self, packed: int, attempt: int) -> bool:
        version = WeightVersion.unpack(packed)
        return version.attempt == attempt and version.version >= (self._first or 0)


class FunctionExecutor:
    """Runs the step function on batches, with a function for each MFC of the graph. No MFC is treated specially here."""

    def __init__(
        self,
        homes: Sequence[Home],
        refresher: Refresher,
        buffer: AsyncIOSequenceBuffer,
        tracker: StorageTracker,
        caller: WorkerCaller,
        hooks: ParameterHooks,
        function: StepFunction,
        heads: Sequence[int],
        balance: Balance,
        *,
        records: bool = False,
    ) -> None:
        """homes: of all MFCs, in the order of their keys. heads: the workers that receive trajectories. records: they also record
        them, together with the keys that MFCs produce."""
        self._buffer, self._tracker, self._caller, self._hooks = buffer, tracker, caller, hooks
        self._refresher, self._function, self._heads, self._records = refresher, function, heads, records
        self._balance = balance
        self._on_policy = OnPolicy()
        self._result = StepResult()  # of the step that runs, or comes next
        self._homes = homes
        mfcs = [home.mfc for home in homes]
        self._steps_early = any(steps_early(mfc, mfcs, hooks.train) for mfc in mfcs)
        self._waiting = waiting_for_batch(mfcs, hooks.train)
        self._made: dict[str, set[str]] = {}  # by MFC: the groups of earlier parts, if others wait for the batch
        self.is_within_step = False  # the workers may hold weights of a step that has not ended
        self._calls = [ModelFunctionCall(home, caller, hooks) for home in homes]

    @property
    def states(self) -> dict[str, dict[str, float]]:
        """The states of the MFCs' functions that have one, such as the KL coefficient of `advantages`. A checkpoint keeps them."""
        return {home.mfc.name: home.state for home in self._homes if home.state}

    @states.setter
    def states(self, states: Mapping[str, dict[str, float]]) -> None:
        for home in self._homes:
            home.state = states.get(home.mfc.name)

    async def process_arriving(self, version: int) -> None:
        """Run MFCs on stored groups as they arrive (train.arriving_inference). version: the first step trains from it."""
        self._at(version, num_left=self._hooks.train.batch_size)
        await asyncio.gather(*(home.process_arriving() for home in self._homes))

    def _at(self, version: int, *, num_left: int) -> None:
        for home in self._homes:
            home.at(version, num_left=num_left)

    async def execute_part(self, tickets: Sequence[str], version: int) -> None:
        """Run the MFCs on a part of the batch of the step from this version (train.streaming), except those that wait for the whole
        batch. `execute_step` then runs them on the rest of the batch, and the others on all of it."""
        self.is_within_step = self._steps_early
        await self._run(tickets, version, ends_step=False)
        self._result.add(NUM_PARTS, 1.0)
        self._buffer.end_part()

    async def execute_step(self, tickets: Sequence[str], version: int) -> StepResult:
        """Run the MFCs of the step from this version on a batch. If one fails, the others are cancelled and its error is raised."""
        earlier = set(self._buffer.earlier)
        if self._waiting:
            await self._run(tickets, version)
        else:
            rest = [ticket for ticket in tickets if ticket not in earlier]
            await self._run(rest, version, tickets if earlier else ())
        if earlier:
            self._result.add(NUM_PARTS, 1.0)
        self._buffer.end_batch()
        self.is_within_step, self._made = False, {}
        result, self._result = self._result, StepResult()
        return result

    @property
    def generates(self) -> bool:
        """Whether the step function generates its batch: use generate_step."""
        return self._function.generates

    async def generate_step(self, generation: GeneratingStep) -> StepResult:
        """Run the step of a step function that generates. Raises the errors of the generation."""
        await self._run((), generation.prompts.version, generation=generation)
        self._buffer.end_batch()
        result, self._result = self._result, StepResult()
        return result

    async def _run(
        self,
        tickets: Sequence[str],
        version: int,
        batch: Sequence[str] = (),
        *,
        ends_step: bool = True,
        generation: GeneratingStep | None = None,
    ) -> None:
        left_out = self._hooks.left_out(version) | (frozenset() if ends_step else self._waiting)
        reads: dict[str, list[str]] = {}
        for home in self._homes:
            if home.mfc.name not in left_out:
                reads.setdefault(home.mfc.model, []).extend(home.moved_keys)
        step = PartOfStep(
            version,
            reads,
            {home.placement.name: home.placement for home in self._homes},
            self._heads,
            self._tracker,
            self._caller,
            self._balance,
            records=self._records,
            result=self._result,
            ends_step=ends_step,
            batch=batch,
            made=self._made,
        )
        num_taken = len(self._buffer.earlier) + len(tickets)
        self._at(version, num_left=0 if ends_step else max(0, self._hooks.train.batch_size - num_taken))

        def begin(tickets: Sequence[str]) -> Batch:
            self._buffer.begin_batch(tickets)
            metas = self._buffer.metas(tickets)
            step.on_policy = self._on_policy.begin(version, metas)
            step.begin(metas, self._buffer.common_keys(tickets))
            return Batch(metas, step.read, version=version)

        try:
            async with asyncio.TaskGroup() as group:
                data: Batch | Prompts
                generate: Generate[Batch] | None = None
                if generation is None:
                    data = begin(tickets)
                else:
                    data, form = generation.prompts, generation.form

                    async def formed(order: Order) -> Batch:
                        return begin(await form(order))

                    generate = Generate(generation.config, lambda order: group.create_task(formed(order)))

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
                            adds_up=self._hooks.train.streaming and not self._waiting,
                        )
                        for runner in self._calls
                    ],
                    generate,
                )
                for runner in self._calls if ends_step else ():
                    if made := self._made.get(runner.mfc.name):
                        step.move(runner.mfc.output_keys, made)
                group.create_task(self._function.run(models, data))
            step.result.count(models.calls)
            for call in models.calls if self._waiting and not ends_step else ():
                if step.missing.isdisjoint(call.mfc.output_keys):
                    self._made.setdefault(call.mfc.name, set()).update(call.ids)
            if ends_step and TRAIN_MFC not in left_out:
                self._on_policy.trained()
            await step.moved()
            if ends_step:
                await self._copy_weights(version + 1)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one; the others follow from it
        finally:
            step.give_up()
        if ends_step:
            self._at(version + 1, num_left=self._hooks.train.batch_size)

    async def _copy_weights(self, version: int) -> None:
        """Copy weights after the step that produced this version. Models of other worker groups get theirs beside the next step."""
        copies = self._hooks.after_step(version)
        excluded = {
            body.target: [home.refreshing() for home in self._homes if home.placement.name == body.target]
            for body in copies
        }
        self._refresher.begin(copies, version, excluded)
        await asyncio.gather(*self._refresher.copy(copies))
