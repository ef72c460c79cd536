"""A train step of the values."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.algorithms.value import ValueLoss
from asyncrl.config.schema import TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import MFCDef
from asyncrl.model.interfaces.common import Engine, Interface, Stats, check_input_keys, groups_here
from asyncrl.model.interfaces.minibatches import split_minibatches, train_minibatches


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
