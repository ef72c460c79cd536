"""From rewards to advantages and returns: once a train step, for the actor and the critic.

An MFC of its own, so that what outlives a step (the KL coefficient, the units of the values) is in one place whatever meshes actor
and critic are on, and so that only its results travel to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.algorithms.advantages import Advantages, advantage_keys, compute_advantages
from asyncrl.algorithms.kl import make_kl_controller
from asyncrl.algorithms.ppo import check_ppo_config
from asyncrl.algorithms.value import ValueNorm
from asyncrl.config.schema import PPOConfig, TrainConfig, judges_by_group
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import MFCDef
from asyncrl.model.interfaces.common import (
    Engine,
    Interface,
    LocalBatch,
    Ranks,
    Stats,
    check_input_keys,
    groups_here,
)
from asyncrl.model.interfaces.statistics import batch_stats, value_stats


class AdvantagesInterface(Interface):
    """Rewards (of functions and of a reward model, dense ones, minus the KL penalty) and values -> what to learn from.

    Consumes the groups of this rank; produces `advantages` and `trained_mask` for the actor, `returns` and `value_mask` for a
    critic, in the units of its `values`. Remembers the KL coefficient and, with train.critic.value_norm, those units. Waits, in
    sums, for the other data-parallel ranks.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig) -> None:
        check_ppo_config(train.ppo)
        self.ppo: PPOConfig = train.ppo
        self.output_keys = mfc.output_keys
        self.kl = make_kl_controller(train.ppo)
        self.model_reward_scale = train.reward_model.scale if train.reward_model is not None else 0.0
        critic = train.critic
        self.value_norm = ValueNorm(critic.value_norm_beta) if critic is not None and critic.value_norm else None
        self.keys = ["packed_input_ids", "prompt_mask", *advantage_keys(train.ppo)]
        self.keys += ["model_rewards"] if train.reward_model is not None else []
        self.keys += ["values"] if critic is not None or "values" in mfc.input_keys else []
        self.keys += ["dense_rewards"] if "dense_rewards" in mfc.input_keys else []
        check_input_keys(mfc, self.keys)
        if "values" in self.keys and judges_by_group(train.ppo):
            raise ValueError(
                f"train.ppo.advantage_norm={train.ppo.advantage_norm} with baseline={train.ppo.baseline} judges a response within "
                "its group and uses no values; with a critic use advantage_norm batch or none, and baseline none"
            )

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        made, stats = self.compute(engine, LocalBatch.make(sample, self.keys))
        if self.ppo.kl_coef > 0:
            self.kl.update(stats["kl/sequence_mean"], int(stats["batch/num_sequences"]))
        returns_T = made.returns_T
        if self.value_norm is not None:  # the critic is to learn in the new units; its values stay as they were given
            self.value_norm.update(returns_T[made.states_T], engine.all_reduce_sum)
            returns_T = self.value_norm.normalise(returns_T).masked_fill(~made.states_T, 0.0)
        if sample is None:
            return None, stats
        found = {
            "advantages": made.advantages_T,
            "trained_mask": made.mask_T,
            "returns": returns_T,
            "value_mask": made.states_T,
        }
        return sample.derive({key: found[key].numpy() for key in self.output_keys}), stats

    def compute(self, engine: Ranks, local: LocalBatch) -> tuple[Advantages, Stats]:
        """From `keys` of this rank's groups, in units of rewards; statistics of the whole batch. Remembers nothing. Collective."""
        data = dict(local.data)
        if "model_rewards" in data:
            data["rewards"] = data["rewards"] + self.model_reward_scale * data["model_rewards"]
        if self.value_norm is not None:
            data["values"] = self.value_norm.denormalise(data["values"])
        made = compute_advantages(
            data,
            local.cu_seqlens,
            local.group_sizes,
            self.ppo,
            kl_coef=self.kl.coef,
            all_reduce_sum=engine.all_reduce_sum,
        )
        stats = batch_stats(engine, local, made)
        if "values" in data:
            stats |= value_stats(engine, data["values"][made.states_T], made.returns_T[made.states_T])
        if made.kl_T is not None:
            stats["kl/coef"] = self.kl.coef
        if self.value_norm is not None:
            stats |= {"critic/norm_mean": self.value_norm.mean, "critic/norm_std": self.value_norm.std}
        return made, stats

    def state(self) -> Stats:
        norm = self.value_norm.state_dict() if self.value_norm is not None else {}
        return {"kl_coef": self.kl.coef} | {f"value_norm.{name}": value for name, value in norm.items()}

    def restore(self, state: Mapping[str, float]) -> None:
        if self.ppo.kl_adaptive:  # else it is what the config says now
            self.kl.coef = state["kl_coef"]
        if self.value_norm is not None:
            prefix = "value_norm."
            norm = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            self.value_norm.load_state_dict(norm)
