"""One batch, or one part of it, on its way through a train step: where its groups are computed, and which data moves.

    batch -> parts for each model's data ranks -> Redistribute (keys that the parts lack)
    keys that an MFC has produced --------------> Redistribute (to models that read them)

Data moves as soon as it exists, before the calls that need it are sent. Redistribute never sends data between worker groups
(dataflow/worker_groups.py). Workers outside the trainer group fetch the inputs of a call when it runs, and the trainer group
fetches the outputs before the call counts as done (homes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.redistribution import Transfer, members, plan_fetches, plan_redistribution
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.master.balance import Balance
from asyncrl.master.buffer import StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.handles import Batch
from asyncrl.master.step_result import StepResult
from asyncrl.protocol.calls import CallResult, ReadValues, RedistribStep, Redistribute
from asyncrl.protocol.trajectories import TrajectoryMeta

MOVED_BYTES = "redistribution/bytes"  # statistic of a step: bytes that model workers have sent to each other
# Statistic of a step: seconds of the moves in the trainer group, at the slowest worker of each
TRANSFER_S = "time/transfer_s"


class PartOfStep:
    """One batch, or one part of it, on its way through the step: its parts for the data ranks, its data movements and its results.
    Its methods send and do not wait, except `moved`."""

    def __init__(
        self,
        version: int,
        reads: Mapping[str, Sequence[str]],
        placements: Mapping[str, ModelPlacement],
        heads: Sequence[int],
        tracker: StorageTracker,
        caller: WorkerCaller,
        balance: Balance,
        *,
        records: bool,
        result: StepResult,
        ends_step: bool,
        batch: Sequence[str],
        made: Mapping[str, Set[str]],
    ) -> None:
        """reads: model -> the keys that move to its workers (Home.moved_keys). placements: of these models.
        heads, records: as in FunctionExecutor. result: of the step, to which this part adds. ends_step, batch: as in ExecuteMFC.
        made: MFC -> groups of this part whose output keys an earlier part of the step has made."""
        self.version = version
        self.on_policy = False  # the first call of actor_train of the step gets on-policy data
        self.ends_step, self.batch, self.made = ends_step, list(batch), made
        # (model, groups) -> the ids of each data rank
        self._parts: dict[tuple[str, frozenset[str]], list[list[str]]] = {}
        self.missing: set[str] = set()  # keys that no worker computes in this step, because a worker group is missing
        self.result = result
        self.tracker = tracker
        self._sent: list[asyncio.Task[None]] = []
        self._num_replied = 0
        self._records = records
        self._placements = placements
        self._caller, self._balance = caller, balance
        self._reads = reads
        self._heads = heads
        self._came_to: dict[int, list[str]] = {}  # worker -> the groups that it received as a head
        self._ids: frozenset[str] = frozenset()  # the groups of the batch
        self._metas: dict[str, TrajectoryMeta] = {}  # of each group

    def begin(self, metas: Sequence[TrajectoryMeta], keys: Collection[str]) -> None:
        """Assign the batch's parts to each model's ranks and move the keys that they lack. A group goes to a data rank that lacks
        the fewest of these keys, as far as the balance of the ranks allows."""
        ids = [meta.ticket_id for meta in metas]
        self._ids = frozenset(ids)
        self._metas = {meta.ticket_id: meta for meta in metas}
        for meta in metas:
            self._came_to.setdefault(self._heads[meta.head % len(self._heads)], []).append(meta.ticket_id)
        steps: list[RedistribStep] = []
        for model, reads in self._reads.items():
            wanted = _those_in(reads, keys)
            self._assign(model, ids, wanted)
            steps += self._plan(self._needed(model), wanted)
        self._send(steps)

    def parts_for(self, mfc: MFCDef, batches: Sequence[Batch], moved_keys: Sequence[str]) -> list[list[str]]:
        """Return the ids of each data rank for a call on these batches, and send those of moved_keys that the ranks lack. For the
        whole batch nothing has to be sent: its keys move as soon as they exist."""
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
        self._send(self._plan(self._workers_of(mfc.model, parts), self.existing(moved_keys)))
        return parts

    def _dispatched(self, mfc: MFCDef, ids: list[str], batches: Sequence[Batch]) -> list[list[str]]:
        data = self._placements[mfc.model].grid.num_replicas
        if mfc.dispatch == "one_to_all":
            return [ids] * data
        return [ids, *[[]] * (data - 1)] if mfc.dispatch == "rank_zero" else [list(batch.ids) for batch in batches]

    def _assign(self, model: str, ids: Sequence[str], keys: Sequence[str]) -> None:
        placement = self._placements[model]
        homes = {group: self._homes(group, placement, keys) for group in ids}
        self._parts[model, frozenset(ids)] = self._balance.deal(
            model,
            [self._metas[group] for group in ids],
            placement.grid.num_replicas,
            homes,
            drawn_for=self.version if self.ends_step and not self.batch else None,
        )

    def existing(self, keys: Iterable[str]) -> list[str]:
        """Those of these keys that are not missing in this step."""
        return [key for key in keys if key not in self.missing]

    def outputs(self, mfc: MFCDef, ids: Collection[str]) -> list[Transfer]:
        """Return the fetches by which the trainer group gets the output keys that other workers made for these groups.

        Each group of responses goes to the workers that read or record it, and in any case to the head that received it. So the
        trainer group has all outputs, and another worker group can fetch them from there.
        """
        needed = {worker: dict.fromkeys(came) for worker, came in self._came_to.items()}
        for model, reads in self._reads.items():
            if _those_in(reads, mfc.output_keys):
                for worker, part in self._needed(model).items():
                    needed.setdefault(worker, {}).update(dict.fromkeys(part))
        wanted = self._only({worker: list(groups) for worker, groups in needed.items()}, frozenset(ids))
        return plan_fetches(wanted, mfc.output_keys, self.tracker.there, self._placements[mfc.model].heads)

    def move(self, keys: Collection[str], ids: Collection[str]) -> asyncio.Task[None]:
        """Send new keys of these groups to the workers that record them, and to all models of the trainer group that read them."""
        groups = frozenset(ids)
        plans = [
            self._plan(self._only(self._needed(model), groups), _those_in(reads, keys))
            for model, reads in self._reads.items()
        ]
        if self._records:
            plans.append(self._plan(self._only(self._came_to, groups), list(keys)))
        return self._send([step for plan in plans for step in plan])

    async def read(self, ids: Sequence[str], key: str) -> list[list[Any]]:
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
        replies = await self._caller.call(f"the values of {key}", list(by_worker), bodies)
        values = {
            group: found
            for groups, reply in zip(by_worker.values(), replies, strict=True)
            for group, found in zip(groups, reply.values, strict=True)
        }
        return [values[group] for group in ids]

    def _homes(self, group: str, placement: ModelPlacement, keys: Sequence[str]) -> list[int]:
        """Return the data ranks whose workers lack the fewest of these keys of a group."""
        ranks = range(placement.grid.num_replicas)
        missing = [self.tracker.num_missing(group, placement.replicas[rank], keys) for rank in ranks]
        return [rank for rank in ranks if missing[rank] == min(missing)]

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

    def _plan(self, needed: Mapping[int, Sequence[str]], keys: Sequence[str]) -> list[RedistribStep]:
        """Plan the moves of these keys to the workers that need them. They count as done, so that the next plan builds on them."""
        steps = plan_redistribution(needed, keys, self.tracker.holders) if keys else []
        self.tracker.apply(steps)
        return steps

    def _send(self, steps: list[RedistribStep]) -> asyncio.Task[None]:
        replies = None
        if steps:
            replies = self._caller.call("data to be moved", members(steps), Redistribute(steps=steps))
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


def _those_in(reads: Iterable[str], keys: Collection[str]) -> list[str]:
    return [key for key in dict.fromkeys(reads) if key in keys]
