"""Training on parts of a batch while it is formed (train.streaming).

    stored groups -> BatchFormer.admissible -> begins_part -> BatchFormer.take -> FunctionExecutor.execute_part, one part at a time

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
from asyncrl.master.batch import BatchFormer
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.master.executor import FunctionExecutor
from asyncrl.master.step_part import BALANCE_TOLERANCE
from asyncrl.protocol.manager import LedgerView
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.clock import Clock


def begins_part(groups: Sequence[TrajectoryMeta], train: TrainConfig, num_ranks: int) -> bool:
    """Whether these admissible groups are enough for a part, by train.streaming_order. Pure.

    groups: at least one group.
    balanced: the groups, dealt whole to the data ranks, leave no rank with more than 1.1 times the mean number of tokens.
    tokens: they have at least train.streaming_tokens tokens.
    The rest of a batch is trained as its last part in any case.
    """
    tokens = {meta.ticket_id: sum(meta.seqlens) for meta in groups}
    if not tokens or train.streaming_order == "groups":
        return bool(tokens)
    if train.streaming_order == "tokens":
        return sum(tokens.values()) >= train.streaming_tokens
    dealt = assign(list(tokens), tokens, {}, num_ranks, BALANCE_TOLERANCE)
    fullest = max(sum(tokens[ticket] for ticket in rank) for rank in dealt)
    return fullest <= (1 + BALANCE_TOLERANCE) * sum(tokens.values()) / num_ranks


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
        *,
        version: int,
        num_ranks: int,
        clock: Clock,
    ) -> None:
        """num_ranks: data ranks of the actor. version: the weights that the step begins from."""
        self._train, self._former, self._buffer, self._executor = train, former, buffer, executor
        self._version, self._num_ranks = version, num_ranks
        self.seconds = 0.0  # in which parts were trained
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
            groups = self._admissible()
            if begins_part(groups, self._train, self._num_ranks):
                self._former.take(groups)
                ordered = sorted(groups, key=lambda meta: (meta.locator, meta.ticket_id))
                began = self._clock.monotonic()
                await self._executor.execute_part([meta.ticket_id for meta in ordered], self._version)
                self.seconds += self._clock.monotonic() - began
            else:
                await self._changed.wait()

    def _admissible(self) -> list[TrajectoryMeta]:
        if self._view is None:
            return []
        return self._former.admissible(
            stored=self._buffer.stored, live=self._view.live, version=self._version, settled=self._view.settled
        )
