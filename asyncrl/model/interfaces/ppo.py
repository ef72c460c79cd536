"""Train steps of the policy and of the values: minibatches of the whole batch's groups, counted over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from asyncrl.algorithms.ppo import PPOLoss, check_ppo_config, loss_denominator, loss_keys
from asyncrl.algorithms.value import ValueLoss
from asyncrl.config.schema import PPOConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import MFCDef
from asyncrl.model.interfaces.common import (
    Engine,
    Interface,
    LossFn,
    Ranks,
    Stats,
    check_input_keys,
    groups_here,
    temperature_of,
)
from asyncrl.model.interfaces.statistics import StepStats


def split_minibatches(batch_ids: Sequence[str], num: int, *, seed: int, version: int) -> list[list[str]]:
    """The whole batch, shuffled by (seed, version) and cut into `num` parts whose sizes differ by one at most.

    Every rank gets the same, whatever it holds. Fewer groups than parts: a part a group. Canonical order within a part.
    """
    order = np.random.default_rng([seed, version]).permutation(len(batch_ids))
    parts = np.array_split(order, max(1, min(num, len(batch_ids))))
    return [[batch_ids[i] for i in sorted(part.tolist())] for part in parts if len(part)]


def train_minibatches(
    engine: Engine,
    sample: SequenceSample | None,
    minibatches: Sequence[Sequence[str]],
    loss_of: Callable[[float, float], LossFn],
    *,
    temperature: float,
    lr_step: int,
) -> StepStats:
    """An optimizer step a minibatch. Collective.

    sample: the groups of this rank with what the engine and the loss read. loss_of: the loss of a minibatch, given over all ranks
    how many of its tokens are in `loss_mask`, and how many sequences have any.
    """
    steps = StepStats()
    here = set(sample.ids) if sample is not None else set()
    counts = _count(engine, sample, minibatches)
    for ids, (num_tokens, num_sequences) in zip(minibatches, counts, strict=True):
        if num_tokens == 0:
            steps.empty += 1  # nothing to learn from on any rank (all truncated, with mask_too_long): no step
            continue
        mine = [group_id for group_id in ids if group_id in here]
        part = sample.select_ids(mine) if sample is not None and mine else None
        loss_fn = loss_of(num_tokens, num_sequences)
        steps.add(engine.train_step(part, loss_fn, temperature=temperature, lr_step=lr_step), num_tokens)
    return steps


def _count(
    engine: Ranks, sample: SequenceSample | None, minibatches: Sequence[Sequence[str]]
) -> list[tuple[float, float]]:
    """For each minibatch, over all ranks: tokens in `loss_mask`, and sequences that have any."""
    counts: dict[str, npt.NDArray[np.float64]] = {}
    if sample is not None:
        for group_id, masks in zip(sample.ids, sample.slices("loss_mask"), strict=True):
            tokens = [int(mask.sum()) for mask in masks]
            counts[group_id] = np.array([sum(tokens), sum(n > 0 for n in tokens)], np.float64)
    nothing = np.zeros(2)
    local = np.array([sum((counts.get(group_id, nothing) for group_id in ids), nothing) for ids in minibatches])
    total = engine.all_reduce_sum(local.ravel().tolist()).reshape(-1, 2)
    return [(float(tokens), float(sequences)) for tokens, sequences in total]


class PPOActorInterface(Interface):
    """One train step of PPO: minibatches, each of them one optimizer step.

    Consumes the groups of this rank with the keys of `actor_train`; produces new weights in the engine and the statistics of
    the step. Waits, in collective calls, for the other ranks; a rank that fails is noticed by the master, which ends the
    trainer group.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig, seed: int) -> None:
        check_ppo_config(train.ppo)
        self.ppo: PPOConfig = train.ppo
        self.temperature = temperature_of(train)
        self.seed = seed
        self.keys = ["packed_input_ids", "trained_mask"]  # which the loss calls loss_mask
        self.keys += [key for key in loss_keys(train.ppo) if key != "loss_mask"]
        check_input_keys(mfc, self.keys)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.keys).remap_keys({"trained_mask": "loss_mask"})

        def loss_of(num_tokens: float, num_sequences: float) -> PPOLoss:
            return PPOLoss(self.ppo, loss_denominator(self.ppo, num_tokens, num_sequences))

        minibatches = split_minibatches(batch_ids, self.ppo.minibatches, seed=self.seed, version=version)
        steps = train_minibatches(engine, sample, minibatches, loss_of, temperature=self.temperature, lr_step=version)
        return None, steps.result("actor")


class PPOCriticInterface(Interface):
    """One train step of the critic: values of the states in which trained tokens were sampled move towards the returns.

    Consumes the groups of this rank with the keys of `critic_train`; produces new weights in the engine and the statistics of
    the step. Waits, in collective calls, for the other ranks.
    """

    KEYS = ("packed_input_ids", "values", "returns", "value_mask")  # the last is what the loss calls loss_mask

    def __init__(self, mfc: MFCDef, train: TrainConfig, seed: int) -> None:
        if train.critic is None:
            raise ValueError(f"MFC {mfc.name!r} trains a critic, and train.critic is null")
        self.critic = train.critic
        self.seed = seed
        check_input_keys(mfc, self.KEYS)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.KEYS).remap_keys({"value_mask": "loss_mask"})

        def loss_of(num_tokens: float, num_sequences: float) -> ValueLoss:
            return ValueLoss(self.critic.eps_clip, num_tokens)

        minibatches = split_minibatches(batch_ids, self.critic.minibatches, seed=self.seed, version=version)
        steps = train_minibatches(engine, sample, minibatches, loss_of, temperature=1.0, lr_step=version)
        return None, steps.result("critic")
