"""Training on parts of a batch while it is formed (train.streaming).

    stored groups -> BatchFormer.admissible -> next_part -> BatchFormer.take -> FunctionExecutor.execute_part, one part at a time

Each part runs all MFCs of the step, and its gradients add up on the model workers. The step is taken with the last part, which
the trainer runs (`execute_step`) once the batch is complete. A group that is taken is in the batch: it is neither given up nor
taken again. The books count it as trained only after the step. So an attempt that continues after a fault rolls out its prompt
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.redistribution import assign
from asyncrl.master.balance import BALANCE_TOLERANCE, Balance
from asyncrl.master.batch import BatchFormer
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.master.executor import FunctionExecutor
from asyncrl.protocol.manager import LedgerView
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.clock import Clock


def begins_part(groups: Sequence[TrajectoryMeta], balance: Balance, train: TrainConfig, num_ranks: int) -> bool:
    """Whether these admissible groups are enough for a part, by train.streaming_order. Pure.

    balanced: the groups, dealt whole to the data ranks, leave no rank with more than 1.1 times the mean cost.
    tokens: they have at least train.streaming_tokens tokens.
    The rest of a batch is trained as its last part in any case.
    """
    if not groups or train.streaming_order == "groups":
        return bool(groups)
    if train.streaming_order == "tokens":
        return sum(sum(meta.seqlens) for meta in groups) >= train.streaming_tokens
    costs = balance.costs(ACTOR, groups)
    dealt = assign(list(costs), costs, {}, num_ranks, BALANCE_TOLERANCE)
    fullest = max(sum(costs[ticket] for ticket in rank) for rank in dealt)
    return fullest <= (1 + BALANCE_TOLERANCE) * sum(costs.values()) / num_ranks


def next_part(
    groups: Sequence[TrajectoryMeta], balance: Balance, train: TrainConfig, num_ranks: int, num_parts: int
) -> Sequence[TrajectoryMeta]:
    """Return those of these admissible groups that form the next part now; empty: none. Pure.

    num_parts: of the batch so far. With train.streaming_parts each part has its share of the batch, and the last one is left.
    """
    if train.streaming_parts < 1:
        return groups if begins_part(groups, balance, train, num_ranks) else ()
    share = share_of(num_parts, train)
    return groups[:share] if num_parts < train.streaming_parts - 1 and len(groups) >= share else ()


def share_of(number: int, train: TrainConfig) -> int:
    """The number of groups of a part, from 0, with train.streaming_parts. Shares differ by at most one group."""
    each, more = divmod(train.batch_size, train.streaming_parts)
    return each + (number < more)


class PartRunner:
    """Trains on parts of one batch until the batch is complete.

    consumes: admissible groups.  produces: accumulated gradients in the trainer.
    waits for: enough groups for a part; the calls of a part.  unblocked by: `look`, `stop`; the model workers.
    """

    def __init__(
        self,
        train: TrainConfig,
        former: BatchFormer,
        buffer: AsyncIOSequenceBuffer,
        executor: FunctionExecutor,
        balance: Balance,
        *,
        version: int,
        num_ranks: int,
        clock: Clock,
    ) -> None:
        """num_ranks: data ranks of the actor. version: the weights that the step begins from."""
        self._train, self._former, self._buffer, self._executor = train, former, buffer, executor
        self._balance, self._version, self._num_ranks = balance, version, num_ranks
        self.seconds = 0.0  # in which parts were trained
        self._num_parts = 0
        self._clock = clock
        self._view: LedgerView | None = None
        self._stopped = False
        self._changed = asyncio.Event()

    def look(self, view: LedgerView) -> None:
        """Groups or tickets may have changed. view: the manager's newest ledger."""
        self._view = view
        self._changed.set()

    def stop(self) -> None:
        """Begin no further part."""
        self._stopped = True
        self._changed.set()

    async def run(self) -> None:
        """Run parts until `stop`. Ends after the part that is running then. The caller bounds the wait for groups."""
        while not self._stopped:
            self._changed.clear()
            found = self._admissible()
            if groups := next_part(found, self._balance, self._train, self._num_ranks, self._num_parts):
                self._former.take(groups)
                ordered = sorted(groups, key=lambda meta: (meta.locator, meta.ticket_id))
                await self._execute([meta.ticket_id for meta in ordered])
            else:
                await self._changed.wait()

    async def run_rest(self, batch: Sequence[str]) -> None:
        """With train.streaming_parts, run all parts of a complete batch but the last one. Call after `run` has ended."""
        while self._num_parts < self._train.streaming_parts - 1:
            rest = [ticket for ticket in batch if ticket not in self._buffer.earlier]
            share = share_of(self._num_parts, self._train)
            if len(rest) <= share:  # the last batch of a run may have fewer groups
                return
            await self._execute(rest[:share])

    async def _execute(self, tickets: Sequence[str]) -> None:
        began = self._clock.monotonic()
        await self._executor.execute_part(tickets, self._version)
        self.seconds += self._clock.monotonic() - began
        self._num_parts += 1

    def _admissible(self) -> list[TrajectoryMeta]:
        if self._view is None:
            return []
        return self._former.admissible(
            stored=self._buffer.stored, live=self._view.live, version=self._version, settled=self._view.settled
        )
