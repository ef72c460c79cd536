"""How the groups of a batch are drawn into the minibatches of a train step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.config.schema import CRITIC, TrainConfig
from asyncrl.dataflow.mfc import MFCDef


def minibatches_of(mfc: MFCDef, train: TrainConfig) -> int:
    """The optimizer steps that an MFC which trains takes in one pass over a batch."""
    return train.critic.minibatches if mfc.role == CRITIC and train.critic is not None else train.ppo.minibatches


def split_minibatches(
    batch_ids: Sequence[str], num: int, *, seed: int, version: int, epoch: int = 0
) -> list[list[str]]:
    """Shuffle the whole batch by (seed, version, epoch) and cut it into `num` parts whose sizes differ by at most one.

    epoch: the number of passes over the batch before this one.

    The result is the same on every rank, whichever groups it holds. With fewer groups than `num` there is one part for each group.
    Ids within a part are in canonical order.
    """
    order = np.random.default_rng([seed, version, epoch] if epoch else [seed, version]).permutation(len(batch_ids))
    parts = np.array_split(order, max(1, min(num, len(batch_ids))))
    return [[batch_ids[i] for i in sorted(part.tolist())] for part in parts if len(part)]
