"""A train step of the policy."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.algorithms.ppo import PPOLoss, check_ppo_config, loss_denominator, loss_keys
from asyncrl.config.schema import PPOConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import MFCDef
from asyncrl.model.interfaces.common import Engine, Interface, Stats, check_input_keys, groups_here, temperature_of
from asyncrl.model.interfaces.minibatches import split_minibatches, train_minibatches


class PPOActorInterface(Interface):
    """One train step of PPO: minibatches, each of them one optimizer step.

    Consumes the groups of this rank with the keys of `actor_train`; produces new weights in the engine and the statistics of
    the step. Waits, in collective calls, for the other ranks; a rank that fails is noticed by the master, which ends the gang.
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
