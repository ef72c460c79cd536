"""Deals the groups of a batch to the data ranks of a model by estimated time. Pure.

Data ranks wait for the slowest of them at each layer, and so in each minibatch. The estimate is the number of model FLOPs, in which
a token of a long sequence counts more than one of a short sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.minibatches import minibatches_of, split_minibatches
from asyncrl.dataflow.redistribution import assign
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.trajectories import TrajectoryMeta

BALANCE_TOLERANCE = 0.1  # a data rank with more FLOPs than (1 + this) times the ranks' mean gives groups away


class Balance:
    """Knows what a group costs a model, and how the model's train step draws minibatches."""

    def __init__(self, mfcs: Iterable[MFCDef], train: TrainConfig, seed: int) -> None:
        """seed: of the run."""
        self._minibatches = {mfc.model: minibatches_of(mfc, train) for mfc in mfcs if mfc.kind == "train_step"}
        self._seed = seed
        self.flops: dict[str, ModelFlops] = {}  # by model, from its workers; a model that is not there counts tokens

    def costs(self, model: str, metas: Sequence[TrajectoryMeta]) -> dict[str, int]:
        """The FLOPs of the forward pass over each group."""
        flops = self.flops.get(model, ModelFlops())
        return {meta.ticket_id: flops.of_batch(meta.seqlens) for meta in metas}

    def deal(
        self,
        model: str,
        metas: Sequence[TrajectoryMeta],
        num_ranks: int,
        homes: Mapping[str, Collection[int]],
        *,
        drawn_for: int | None,
    ) -> list[list[str]]:
        """Return the groups of each data rank, in the order of `metas`. Each minibatch of the first pass is balanced by itself.

        homes: as `holders` of `assign`. drawn_for: the version from which the step trains; None: these groups are not the whole
        batch of a step, so they are in one minibatch or in several that follow one another.
        """
        costs, ids = self.costs(model, metas), [meta.ticket_id for meta in metas]
        num = self._minibatches.get(model, 1) if drawn_for is not None else 1
        rank_of: dict[str, int] = {}
        loads = [0] * num_ranks
        for drawn in split_minibatches(ids, num, seed=self._seed, version=drawn_for or 0):
            for rank, part in enumerate(assign(drawn, costs, homes, num_ranks, BALANCE_TOLERANCE, earlier=loads)):
                rank_of.update(dict.fromkeys(part, rank))
                loads[rank] += sum(costs[group] for group in part)
        return [[group for group in ids if rank_of[group] == rank] for rank in range(num_ranks)]
