"""The master's records of trajectories: metadata only, never a tensor.

    PromptProgress          which prompts are done: the master's part of the exactly-once guarantee
    StorageTracker          which model worker holds which (id, key)
    Grants                  whether a gserver manager of this run has granted a trajectory's ticket
    AsyncIOSequenceBuffer   which trajectories are stored, and the batch of the step

A trajectory enters once (`put`: the first one of its prompt wins). It is selected for a batch, and leaves when its train step is
over.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from asyncrl.dataflow.redistribution import transfers
from asyncrl.dataflow.worker_groups import ONE_GROUP, WorkerGroups
from asyncrl.protocol.calls import RedistribStep
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.tickets import TicketSeal
from asyncrl.protocol.trajectories import Locator, StoreVerdict, TrajectoryMeta


class PromptProgress:
    """Marks each prompt as done once. `is_done` detects a late or duplicate trajectory. Pure.

    Every prompt of every epoch ends either trained once or rejected with a reason. The state is a cursor (all prompts before it
    are done) and the few done prompts after it. A checkpoint holds that pair.
    """

    def __init__(self, num_prompts: int, num_epochs: int) -> None:
        if num_prompts < 1 or num_epochs < 1:
            raise ValueError(f"{num_prompts} prompts and {num_epochs} epochs: use at least 1 of each")
        self.num_prompts = num_prompts
        self.num_epochs = num_epochs
        self.num_trained = 0
        self.rejected: Counter[str] = Counter()
        self._cursor = 0  # flat index: epoch * num_prompts + position
        self._beyond: set[int] = set()

    @property
    def num_done(self) -> int:
        return self._cursor + len(self._beyond)

    @property
    def num_total(self) -> int:
        return self.num_prompts * self.num_epochs

    @property
    def cursor(self) -> Locator:
        """The first prompt that is not done. Every prompt before it is done."""
        return Locator(*divmod(self._cursor, self.num_prompts))

    @property
    def beyond_cursor(self) -> list[Locator]:
        """Done prompts after the cursor."""
        return [Locator(*divmod(flat, self.num_prompts)) for flat in sorted(self._beyond)]

    def epochs_done(self) -> float:
        """Number of done prompts over all epochs, divided by the number of prompts of an epoch (a fraction)."""
        return self.num_done / self.num_prompts

    def left(self) -> Iterator[Locator]:
        """The prompts that are not done, in order."""
        for flat in range(self._cursor, self.num_total):
            if flat not in self._beyond:
                yield Locator(*divmod(flat, self.num_prompts))

    def contains(self, locator: Locator) -> bool:
        """Whether the prompt exists."""
        return 0 <= locator.epoch < self.num_epochs and 0 <= locator.position < self.num_prompts

    def is_done(self, locator: Locator) -> bool:
        flat = self._flat(locator)
        return flat < self._cursor or flat in self._beyond

    def mark_trained(self, locators: Iterable[Locator]) -> None:
        """Raises ValueError for a prompt that is done already, because that would be a second training."""
        for locator in locators:
            self._mark(locator)
            self.num_trained += 1

    def mark_rejected(self, locator: Locator, reason: str) -> None:
        self._mark(locator)
        self.rejected[reason] += 1

    def restore(
        self, cursor: Locator, beyond: Iterable[Locator], num_trained: int, rejected: Mapping[str, int]
    ) -> None:
        """Continue from the state in a checkpoint."""
        self._cursor = cursor.epoch * self.num_prompts + cursor.position
        self._beyond = {self._flat(locator) for locator in beyond}
        self.num_trained = num_trained
        self.rejected = Counter(rejected)

    def _mark(self, locator: Locator) -> None:
        flat = self._flat(locator)
        if flat < self._cursor or flat in self._beyond:
            raise ValueError(f"prompt {locator} is done already")
        self._beyond.add(flat)
        while self._cursor in self._beyond:
            self._beyond.remove(self._cursor)
            self._cursor += 1

    def _flat(self, locator: Locator) -> int:
        if not self.contains(locator):
            raise ValueError(f"{locator} is outside {self.num_epochs} epochs of {self.num_prompts} prompts")
        return locator.epoch * self.num_prompts + locator.position


class StorageTracker:
    """id -> key -> the workers that hold it. Pure.

    The master records here: trajectories that arrived, redistributions that it has sent, keys that MFCs produced, data that was
    fetched, and groups that it has cleared. In the trainer group a redistribution counts as soon as it is sent: workers execute
    calls in the master's order, so every later call finds the data. Workers of other worker groups (dataflow/worker_groups.py)
    are not part of that order. They fetch from workers that have reported that they hold the data.
    """

    def __init__(self, groups: WorkerGroups = ONE_GROUP) -> None:
        self.groups = groups
        # Workers of the trainer group that hold the data, or to which a redistribution is sending it
        self.holders: dict[str, dict[str, set[int]]] = {}
        # Workers of all worker groups that have reported that they hold the data. Copies that a redistribution brought do not
        # count, even after they have arrived, because workers do not report them
        self.there: dict[str, dict[str, set[int]]] = {}

    def __len__(self) -> int:
        """Number of ids with data on any worker."""
        return len(self.holders.keys() | self.there.keys())

    def add(self, worker: int, ids: Iterable[str], keys: Iterable[str]) -> None:
        """A worker has reported that it holds these keys of these ids."""
        ids, keys = list(ids), list(keys)
        _add(self.there, worker, ids, keys)
        if self.groups.is_local(worker):
            _add(self.holders, worker, ids, keys)

    def apply(self, steps: Iterable[RedistribStep]) -> None:
        """Record redistributions that have been sent to all their workers: the targets count as holders."""
        for step in steps:
            for transfer in transfers(step):
                for target in transfer.targets:
                    _add(self.holders, target, transfer.ids, transfer.keys)

    def num_missing(self, group: str, workers: Iterable[int], keys: Sequence[str]) -> int:
        """Number of pairs (worker, key) of an id for which the worker lacks the key."""
        held = self.holders.get(group, {})
        return sum(worker not in held.get(key, ()) for worker in workers for key in keys)

    def forget(self, workers: Collection[int], keys: Collection[str] | None = None) -> None:
        """Data of these workers of another worker group is gone, because they have ended, or is to be computed again.

        keys: only these; None: all.
        """
        for held in self.there.values():
            for key, having in held.items():
                if keys is None or key in keys:
                    having.difference_update(workers)

    def discard(self, ids: Iterable[str], keys: Collection[str]) -> None:
        """These keys have been made again: the copies of all workers are out of date."""
        for group in ids:
            for known in (self.holders, self.there):
                for key in keys:
                    known.get(group, {}).pop(key, None)

    def held_by_any(self, workers: Collection[int], keys: Collection[str]) -> set[str]:
        """Return the ids of which some of these workers have reported that they hold these keys."""
        return {
            group
            for group, held in self.there.items()
            if all(not held.get(key, set()).isdisjoint(workers) for key in keys)
        }

    def drop(self, ids: Iterable[str]) -> list[int]:
        """Forget ids. Returns the workers that hold data of them and must be notified."""
        dropped = [held for group in ids for known in (self.holders, self.there) if (held := known.pop(group, None))]
        return sorted({worker for held in dropped for workers in held.values() for worker in workers})


def _add(known: dict[str, dict[str, set[int]]], worker: int, ids: Iterable[str], keys: Sequence[str]) -> None:
    for group in ids:
        held = known.setdefault(group, {})
        for key in keys:
            held.setdefault(key, set()).add(worker)


_SAY_AGAIN_S = 60.0


class Grants:
    """Checks the ticket of each trajectory and counts those that were not granted. The check is needed because forged trajectories
    may reach a head's socket, and forged metadata may reach the master's."""

    def __init__(self, read_key: Callable[[], bytes | None], logger: logging.Logger) -> None:
        """read_key: returns the run's ticket key, or None until a manager has created it. Until then every trajectory is
        refused."""
        self.num_refused = 0
        self._read_key = read_key
        self._seal: TicketSeal | None = None
        self._logger = logger
        self._said = -math.inf

    def refusal(self, meta: TrajectoryMeta, now: float) -> str:
        """Return why a trajectory is refused; "" if its ticket was granted for this prompt, attempt and head."""
        if self._seal is None and (key := self._read_key()) is not None:
            self._seal = TicketSeal(key)
        name = self._seal.read(meta.ticket_id) if self._seal is not None else None
        if name is not None and (name.attempt, name.locator, name.head) == (meta.attempt, meta.locator, meta.head):
            return ""
        self.num_refused += 1
        if now - self._said >= _SAY_AGAIN_S:
            self._said = now
            self._logger.warning(
                "refused a trajectory, %d so far: the manager has not granted its ticket %.100r (%s, head %d)",
                self.num_refused,
                meta.ticket_id,
                meta.locator,
                meta.head,
            )
        return "not_granted: the gserver manager of this run has not granted this ticket"


class AsyncIOSequenceBuffer:
    """The stored trajectories and the current batch. Holds at most `capacity` trajectories and refuses further ones: their rollout
    workers release the tickets."""

    def __init__(self, progress: PromptProgress, *, capacity: int, attempt: int) -> None:
        self._progress = progress
        self._capacity = capacity
        self._attempts = Fence(attempt)
        self._entries: dict[str, TrajectoryMeta] = {}
        self._by_prompt: dict[Locator, str] = {}
        self._batch: tuple[str, ...] = ()  # or one part of it (train.streaming)
        self.earlier: tuple[str, ...] = ()  # the parts of the batch that are done (train.streaming)
        self._in_step = False
        self.num_changes = 0  # of the set of stored groups that are in no batch
        self._moved = asyncio.Event()  # set at such a change, and then replaced

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def stored(self) -> list[TrajectoryMeta]:
        """Trajectories that are accepted and in no batch yet."""
        batch = {*self.earlier, *self._batch}
        return [meta for ticket, meta in self._entries.items() if ticket not in batch]

    @property
    def stored_tickets(self) -> list[str]:
        """Tickets that are accepted and not consumed, including those of the current batch."""
        return list(self._entries)

    def put(self, meta: TrajectoryMeta) -> StoreVerdict:
        """Accept a trajectory, once per prompt, or return why not. Repeating an accepted one has no effect (idempotent)."""
        if not self._attempts.is_current(meta.attempt):
            over = f"attempt {meta.attempt} is over; the current attempt is {self._attempts.newest}"
            return StoreVerdict(verdict="refused", reason=over)
        if not self._progress.contains(meta.locator):
            return StoreVerdict(verdict="refused", reason=f"{meta.locator} is not a prompt of this run")
        if meta.ticket_id in self._entries:
            return StoreVerdict(verdict="stored")
        if self._progress.is_done(meta.locator) or meta.locator in self._by_prompt:
            return StoreVerdict(verdict="duplicate", reason="another ticket of this prompt came first")
        if len(self._entries) >= self._capacity:
            return StoreVerdict(verdict="refused", reason=f"the buffer holds {self._capacity} trajectories already")
        self._enter(meta)
        self._note_change()
        return StoreVerdict(verdict="stored")

    def _enter(self, meta: TrajectoryMeta) -> None:
        self._entries[meta.ticket_id] = meta
        self._by_prompt[meta.locator] = meta.ticket_id

    async def wait_for_change(self, since: int) -> None:
        """Wait until num_changes differs from `since`."""
        while self.num_changes == since:
            await self._moved.wait()

    def holds(self, locator: Locator) -> bool:
        """Whether a trajectory of this prompt is stored. Those of the current batch count."""
        return locator in self._by_prompt

    def drop(self, ticket_id: str) -> None:
        """Remove a trajectory: its step is over, or it will not be trained."""
        meta = self._entries.pop(ticket_id)
        del self._by_prompt[meta.locator]

    def metas(self, tickets: Iterable[str]) -> list[TrajectoryMeta]:
        return [self._entries[ticket] for ticket in tickets]

    def common_keys(self, tickets: Iterable[str]) -> frozenset[str]:
        """Keys that all of these trajectories came with."""
        keys = [frozenset(self._entries[ticket].keys) for ticket in tickets]
        return frozenset.intersection(*keys) if keys else frozenset()

    def begin_batch(self, tickets: Sequence[str]) -> None:
        """Set the batch of the next step, or its next part, in canonical order. Only a last part may be empty, and only a last part
        may have groups of earlier ones: it is the whole batch then."""
        if self._in_step:
            raise RuntimeError("the previous batch is still in its step")
        missing = [ticket for ticket in tickets if ticket not in self._entries]
        if missing or not (tickets or self.earlier):
            raise ValueError(f"cannot form a batch of {len(tickets)} tickets; not stored: {missing[:5]}")
        self._batch, self._in_step = tuple(tickets), True
        taken = set(tickets)
        self.earlier = tuple(ticket for ticket in self.earlier if ticket not in taken)

    def end_part(self) -> None:
        """All MFCs have run on this part of the batch, and further parts follow."""
        self.earlier += self._batch
        self._batch, self._in_step = (), False

    def end_batch(self) -> None:
        """The step is over: its trajectories leave the buffer."""
        for ticket in (*self.earlier, *self._batch):
            self.drop(ticket)
        self._batch, self.earlier, self._in_step = (), (), False
        self._note_change()

    def _note_change(self) -> None:
        self.num_changes += 1
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
