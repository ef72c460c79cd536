"""What an MFC does on a model worker: from the groups that this rank holds to new keys, or to a train step.

    inference.py   logprobs, values and scores under a model; functions of a user
    advantages.py  rewards -> advantages and returns, once for actor and critic
    ppo.py         train steps of the policy and of the values, and their minibatches
    common.py      what interfaces and engines ask of each other; this rank's groups as tensors
    statistics.py  what a step says about itself

The model worker calls `run` on its compute thread, on every rank of the MFC's model, with the same batch_ids and version. All ranks
of a data-parallel replica get the same sample; a rank that holds none of the batch gets None and still takes part.
Interfaces decide (rewards, advantages, minibatches, denominators: asyncrl/algorithms); the engine computes (forward, backward,
optimizer step, sums over ranks: asyncrl/model/engine.py).

Same update in any layout: denominators and means are sums over all data ranks, minibatches are drawn from the ids of the whole
batch, and the collective calls (`all_reduce_sum`, and every call that runs the model) follow from the config and batch_ids
alone, so that all ranks make the same ones.

Shapes: T tokens, packed; S sequences; G groups, all of this rank.
"""

from __future__ import annotations

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.graph import MFCDef
from asyncrl.model.interfaces.advantages import AdvantagesInterface
from asyncrl.model.interfaces.common import Engine, Interface, LocalBatch, LossFn, OneRank, Ranks, Stats
from asyncrl.model.interfaces.inference import (
    FunctionInterface,
    LogprobsInterface,
    ScoresInterface,
    ValuesInterface,
)
from asyncrl.model.interfaces.ppo import PPOActorInterface, PPOCriticInterface, split_minibatches

__all__ = [
    "AdvantagesInterface",
    "Engine",
    "FunctionInterface",
    "Interface",
    "LocalBatch",
    "LogprobsInterface",
    "LossFn",
    "OneRank",
    "PPOActorInterface",
    "PPOCriticInterface",
    "Ranks",
    "ScoresInterface",
    "Stats",
    "ValuesInterface",
    "make_interface",
    "split_minibatches",
]


def make_interface(mfc: MFCDef, train: TrainConfig, seed: int = 1) -> Interface:
    """The interface that an MFC names.

    seed: of the experiment; it draws the minibatches. Groups of any sizes may meet in a batch.
    """
    if mfc.interface == "actor_logprobs":
        return LogprobsInterface("proximal_logprobs", train)
    if mfc.interface == "ref_logprobs":
        return LogprobsInterface("packed_ref_logprobs", train)
    if mfc.interface == "critic_values":
        return ValuesInterface()
    if mfc.interface == "reward_scores":
        return ScoresInterface()
    if mfc.interface == "ppo_advantages":
        return AdvantagesInterface(mfc, train)
    if mfc.interface == "ppo_actor":
        return PPOActorInterface(mfc, train, seed)
    if mfc.interface == "ppo_critic":
        return PPOCriticInterface(mfc, train, seed)
    if ":" in mfc.interface:
        return FunctionInterface(mfc, train)
    raise ValueError(
        f"MFC {mfc.name!r} has the interface {mfc.interface!r}; use actor_logprobs, ref_logprobs, critic_values, reward_scores, "
        "ppo_advantages, ppo_actor, ppo_critic or package.module:function"
    )
