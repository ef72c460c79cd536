"""What an MFC does on a model worker: from the groups that this rank holds to new keys, or to a train step.

The model worker calls `run` on its compute thread, on every data-parallel rank, with the same batch_ids and version; a rank that
holds none of the batch gets sample None and still takes part. Interfaces decide (rewards, advantages, minibatches, denominators:
asyncrl/algorithms); the engine computes (forward, backward, optimizer step, sums over ranks: asyncrl/model/engine.py).

Same update in any layout: denominators and means are sums over all ranks, minibatches are drawn from the whole batch's ids, and the
collective calls (`all_reduce_sum`, `train_step`) follow from the config and batch_ids alone, so that all ranks make the same ones.

Shapes: T tokens, packed; S sequences; G groups, all of this rank.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import final_rewards, gae, group_advantages, shape_rewards, to_tokens, trained_mask
from asyncrl.algorithms.kl import kl_estimate, make_kl_controller
from asyncrl.algorithms.normalisation import normalise_batch
from asyncrl.algorithms.ppo import PPOLoss, anchor_key, check_ppo_config, count_per_sequence
from asyncrl.config import PPOConfig, TrainConfig
from asyncrl.data.sequence import KEY_SPECS, SequenceSample
from asyncrl.dataflow import MFCDef

# (logprobs_T, entropy_T, data, cu_seqlens) -> (loss, statistics): what an engine calls on each micro-batch. The loss is a sum
# already divided by the global denominator; statistics named *_max are maxima, all others sums.
LossFn = Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]
Stats = dict[str, float]


class Ranks(Protocol):
    """The data-parallel ranks that compute together."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_size(self) -> int: ...

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        """Sums over data-parallel ranks; collective."""


class Engine(Ranks, Protocol):
    """What interfaces ask of a training engine (asyncrl.model.engine.TrainEngine)."""

    def logprobs(self, sample: SequenceSample, *, temperature: float) -> npt.NDArray[np.float32]:
        """Packed like packed_input_ids; no communication."""

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        """One optimizer step; collective."""


class OneRank:
    """Ranks of those who compute without an engine (`asyncrl-launch inspect`)."""

    dp_rank = 0
    dp_size = 1

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        return np.asarray(values, np.float64)


class Interface(Protocol):
    """One MFC on one rank."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        """New keys for the ids of `sample` (None: no groups here, or nothing to write), and statistics of all ranks.

        `sample` holds the groups of this rank, `batch_ids` the whole batch, both in canonical order; version is the number of train
        steps done before this one.
        """


def make_interface(mfc: MFCDef, train: TrainConfig, seed: int = 1) -> Interface:
    """The interface that an MFC names.

    seed: of the experiment; it draws the minibatches. Groups of any sizes may meet in a batch.
    """
    if mfc.interface == "actor_logprobs":
        return LogprobsInterface("proximal_logprobs", _temperature(train))
    if mfc.interface == "ref_logprobs":
        return LogprobsInterface("packed_ref_logprobs", _temperature(train))
    if mfc.interface == "ppo_actor":
        return PPOActorInterface(mfc, train, seed)
    if ":" in mfc.interface:
        return FunctionInterface(mfc, train)
    raise ValueError(
        f"MFC {mfc.name!r} has the interface {mfc.interface!r}; "
        "use actor_logprobs, ref_logprobs, ppo_actor or package.module:function"
    )


# -------------------------------------------------------------------------------------------------------------- inference


class LogprobsInterface:
    """Logprobs of the batch's tokens under this model: the proximal policy, or the reference."""

    def __init__(self, output_key: str, temperature: float) -> None:
        self.output_key = output_key
        self.temperature = temperature

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        if sample is None or sample.num_ids == 0:
            return None, {}
        return sample.derive({self.output_key: engine.logprobs(sample, temperature=self.temperature)}), {}


class FunctionInterface:
    """An MFC added by config: function(engine, sample, train) -> SequenceSample with the MFC's output keys.

    An `inference` function is called where there are samples, so that it must not make collective calls; a `train_step` function is
    called on every rank, with None on one without samples.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig) -> None:
        self.mfc = mfc
        self.train = train
        self.function = _import_function(mfc)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        if sample is not None and sample.num_ids == 0:
            sample = None
        if sample is None and self.mfc.kind == "inference":
            return None, {}
        result = self.function(engine, sample, self.train)
        if sample is None or not self.mfc.output_keys:
            return None, {}
        missing = [key for key in self.mfc.output_keys if key not in getattr(result, "keys", ())]
        if not isinstance(result, SequenceSample) or missing or set(result.ids) != set(sample.ids):
            raise ValueError(
                f"MFC {self.mfc.name!r}: {self.mfc.interface} must return a SequenceSample of the ids it was given with the keys "
                f"{list(self.mfc.output_keys)}; missing {missing}"
            )
        return result.select_keys(self.mfc.output_keys), {}


def _import_function(mfc: MFCDef) -> Callable[..., Any]:
    module_name, _, attribute = mfc.interface.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"MFC {mfc.name!r}: interface {mfc.interface!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"MFC {mfc.name!r}: interface {mfc.interface!r} is not a function")
    return function  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------------- training


class PPOActorInterface:
    """One train step of PPO: rewards -> advantages -> minibatches, each of them one optimizer step.

    Consumes the groups of this rank with the keys of `actor_train`; produces new weights in the engine and the
    statistics of the step. Waits, in collective calls, for the other data-parallel ranks; a rank that fails is noticed by
    the master, which ends the gang.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig, seed: int) -> None:
        check_ppo_config(train.ppo)
        self.ppo: PPOConfig = train.ppo
        self.temperature = _temperature(train)
        self.seed = seed
        self.kl = make_kl_controller(train.ppo)
        self.keys = ["packed_input_ids", "packed_logprobs", "loss_mask", "prompt_mask", "seq_no_eos_mask", "rewards"]
        self.keys += [anchor_key(train.ppo)] if anchor_key(train.ppo) not in self.keys else []
        self.keys += ["packed_ref_logprobs"] if train.ppo.kl_coef > 0 else []
        self.keys += [key for key in ("values", "dense_rewards") if key in mfc.input_keys]
        missing = [key for key in self.keys if key not in mfc.input_keys]
        if missing:
            raise ValueError(f"MFC {mfc.name!r} needs the input keys {missing} for train.ppo as configured")
        if "values" in self.keys and train.ppo.advantage_norm == "group":
            raise ValueError(
                "train.ppo.advantage_norm is 'group', which uses no values; use batch or none with a critic"
            )

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = sample if sample is not None and sample.num_ids else None
        local = LocalBatch.make(sample, self.keys)
        strangers = sorted(local.position.keys() - set(batch_ids))
        if strangers:
            raise ValueError(f"ids {strangers[:4]} are not in the batch; a rank runs on its part of the batch only")
        advantages_T, mask_T, stats = self.advantages(engine, local)
        minibatches = split_minibatches(batch_ids, self.ppo.minibatches, seed=self.seed, version=version)
        counts = self._count(engine, local, mask_T, minibatches)
        trained = self._sample_to_train(sample, advantages_T, mask_T)

        steps = StepStats()
        for ids, (num_tokens, num_sequences) in zip(minibatches, counts, strict=True):
            if num_tokens == 0:
                steps.empty += 1  # nothing to learn from on any rank (all truncated, with mask_too_long): no step
                continue
            denominator = num_tokens if self.ppo.loss_normalization == "token" else num_sequences
            here = [group_id for group_id in ids if group_id in local.position]
            part = trained.select_ids(here) if trained is not None and here else None
            loss_fn = PPOLoss(self.ppo, denominator)
            steps.add(engine.train_step(part, loss_fn, temperature=self.temperature, lr_step=version), num_tokens)
        if self.ppo.kl_coef > 0:
            self.kl.update(stats["kl/sequence_mean"], int(stats["batch/num_sequences"]))
        return None, stats | steps.result()

    @property
    def advantage_keys(self) -> list[str]:
        """Keys that `advantages` reads."""
        penalty = [anchor_key(self.ppo), "packed_ref_logprobs"] if self.ppo.kl_coef > 0 else []
        extra = [key for key in ("values", "dense_rewards") if key in self.keys]
        return ["packed_input_ids", "loss_mask", "prompt_mask", "seq_no_eos_mask", "rewards", *penalty, *extra]

    def advantages(self, engine: Ranks, local: LocalBatch) -> tuple[Tensor, Tensor, Stats]:
        """(advantages_T, the mask of the tokens to train, statistics of the whole batch)."""
        ppo, data, cu_seqlens = self.ppo, local.data, local.cu_seqlens
        sampled_T, truncated_S = data["loss_mask"], data["seq_no_eos_mask"]
        mask_T = trained_mask(sampled_T, truncated_S, cu_seqlens, mask_too_long=ppo.mask_too_long)
        rewards_S = shape_rewards(
            data["rewards"],
            truncated_S,
            scaling=ppo.reward_scaling,
            bias=ppo.reward_bias,
            clip=ppo.max_reward_clip,
            mask_no_eos_with_zero=ppo.mask_no_eos_with_zero,
        )
        dense_T = data.get("dense_rewards", torch.zeros(len(sampled_T)))
        values_T = data.get("values", torch.zeros(len(sampled_T)))
        kl_T = None
        rewards_T = torch.zeros(len(sampled_T))
        if ppo.kl_coef > 0:
            kl_T = kl_estimate(data[anchor_key(ppo)], data["packed_ref_logprobs"], ppo.kl_estimator)
            kl_T = kl_T.masked_fill(~sampled_T, 0.0)
            rewards_T = -self.kl.coef * kl_T

        # Group: the response is judged as a whole, against its group; the KL penalty is added per token, unnormalised, because a
        # group of equal rewards would blow it up. Otherwise: the reward at the last token, GAE, normalised over the batch or not.
        if ppo.advantage_norm == "group":
            scores_S = rewards_S + _sum_per_sequence(dense_T, cu_seqlens)
            base_T = to_tokens(group_advantages(scores_S, local.group_sizes), cu_seqlens)
        else:
            rewards_T = rewards_T + final_rewards(rewards_S, sampled_T, cu_seqlens) + dense_T
            base_T = torch.zeros(len(sampled_T))
        advantages_T = base_T + gae(
            rewards_T, values_T, sampled_T, truncated_S, cu_seqlens, discount=ppo.discount, gae_lambda=ppo.gae_lambda
        )
        if ppo.advantage_norm == "batch":
            advantages_T = normalise_batch(advantages_T, mask_T, engine.all_reduce_sum)
        advantages_T = advantages_T.masked_fill(~mask_T, 0.0)

        stats = batch_stats(engine, local, rewards_S, advantages_T, mask_T, kl_T)
        if kl_T is not None:
            stats["kl/coef"] = self.kl.coef
        return advantages_T, mask_T, stats

    def _count(
        self, engine: Engine, local: LocalBatch, mask_T: Tensor, minibatches: Sequence[Sequence[str]]
    ) -> Iterator[tuple[float, float]]:
        """For each minibatch, over all ranks: masked tokens, and sequences that have any."""
        tokens_S = count_per_sequence(mask_T, local.cu_seqlens).numpy()
        group_of_S = np.repeat(np.arange(len(local.group_sizes)), np.asarray(local.group_sizes, np.int64))
        tokens_G = np.bincount(group_of_S, tokens_S, len(local.group_sizes))
        sequences_G = np.bincount(group_of_S, tokens_S > 0, len(local.group_sizes))
        counts = np.zeros((len(minibatches), 2))
        for i, ids in enumerate(minibatches):
            here = [local.position[group_id] for group_id in ids if group_id in local.position]
            counts[i] = tokens_G[here].sum(), sequences_G[here].sum()
        total = engine.all_reduce_sum(counts.ravel().tolist()).reshape(-1, 2)
        return ((float(tokens), float(sequences)) for tokens, sequences in total)

    def _sample_to_train(
        self, sample: SequenceSample | None, advantages_T: Tensor, mask_T: Tensor
    ) -> SequenceSample | None:
        """What the engine and the loss need, and nothing else."""
        if sample is None:
            return None
        keys = dict.fromkeys(["packed_input_ids", "packed_logprobs", anchor_key(self.ppo)])
        new = sample.derive({"advantages": advantages_T.numpy(), "loss_mask": mask_T.numpy()})
        return sample.select_keys(keys).update(new)


@dataclass(frozen=True)
class LocalBatch:
    """The groups of this rank as tensors. All of length 0 on a rank that holds none: it computes like the others."""

    position: dict[str, int]  # id -> which group
    group_sizes: list[int]  # sequences of each group
    cu_seqlens: Tensor  # S + 1
    data: dict[str, Tensor]

    @classmethod
    def make(cls, sample: SequenceSample | None, keys: Sequence[str]) -> LocalBatch:
        if sample is None:
            nothing = {key: torch.tensor(np.zeros(0, KEY_SPECS[key].dtype)) for key in keys}
            return cls({}, [], torch.zeros(1, dtype=torch.int64), nothing)
        missing = [key for key in keys if key not in sample.keys]
        if missing:
            raise ValueError(f"the sample lacks the keys {missing}; it has {sorted(sample.keys)}")
        bad = [
            group_id
            for group_id, rewards in zip(sample.ids, sample.slices("rewards"), strict=True)
            if not np.isfinite(rewards).all()
        ]
        if bad:
            raise ValueError(
                f"rewards of the groups {bad[:4]} are not finite; a reward function must return finite numbers"
            )
        return cls(
            {group_id: i for i, group_id in enumerate(sample.ids)},
            [len(lengths) for lengths in sample.seqlens["packed_input_ids"]],
            torch.tensor(sample.cu_seqlens("packed_input_ids")),
            {key: torch.tensor(sample.data[key]) for key in keys},
        )


def split_minibatches(batch_ids: Sequence[str], num: int, *, seed: int, version: int) -> list[list[str]]:
    """The whole batch, shuffled by (seed, version) and cut into `num` parts whose sizes differ by one at most.

    Every rank gets the same, whatever it holds. Fewer groups than parts: a part a group. Canonical order within a part.
    """
    order = np.random.default_rng([seed, version]).permutation(len(batch_ids))
    parts = np.array_split(order, max(1, min(num, len(batch_ids))))
    return [[batch_ids[i] for i in sorted(part.tolist())] for part in parts if len(part)]


# ------------------------------------------------------------------------------------------------------------- statistics


def batch_stats(
    engine: Ranks, local: LocalBatch, rewards_S: Tensor, advantages_T: Tensor, mask_T: Tensor, kl_T: Tensor | None
) -> Stats:
    """Statistics of the whole batch, over all ranks. Two collective calls."""
    raw_S = local.data["rewards"].double()
    response_S = count_per_sequence(local.data["loss_mask"], local.cu_seqlens)
    advantages = advantages_T[mask_T].double()
    groups = np.split(rewards_S.numpy(), np.cumsum(local.group_sizes, dtype=np.int64)[:-1])
    sums = {
        "groups": float(len(local.group_sizes)),
        "sequences": float(len(raw_S)),
        "tokens": float(len(mask_T)),
        "sampled": float(response_S.sum()),
        "trained": float(advantages.numel()),
        "reward": float(raw_S.sum()),
        "reward_squared": float(raw_S.square().sum()),
        "shaped": float(rewards_S.double().sum()),
        "equal_groups": float(sum(bool((rewards == rewards[0]).all()) for rewards in groups if rewards.size)),
        "prompt": float(local.data["prompt_mask"].sum()),
        "truncated": float(local.data["seq_no_eos_mask"].sum()),
        "advantage": float(advantages.sum()),
        "advantage_squared": float(advantages.square().sum()),
        "kl": float(kl_T.double().sum()) if kl_T is not None else 0.0,
    }
    total = dict(zip(sums, engine.all_reduce_sum(list(sums.values())).tolist(), strict=True))
    sequences, trained = max(total["sequences"], 1.0), max(total["trained"], 1.0)
    longest, highest, lowest = _max_over_ranks(
        engine,
        [
            max(response_S.tolist(), default=0.0),
            max(advantages.tolist(), default=-math.inf),
            max((-advantages).tolist(), default=-math.inf),
        ],
    )
    stats = {
        "batch/num_groups": total["groups"],
        "batch/num_sequences": total["sequences"],
        "batch/num_tokens": total["tokens"],
        "batch/num_trained_tokens": total["trained"],
        "reward/mean": total["reward"] / sequences,
        "reward/std": _std(total["reward"], total["reward_squared"], sequences),
        "reward/shaped_mean": total["shaped"] / sequences,
        "reward/equal_group_share": total["equal_groups"] / max(total["groups"], 1.0),
        "length/response_mean": total["sampled"] / sequences,
        "length/response_max": longest,
        "length/prompt_mean": total["prompt"] / sequences,
        "length/truncated_share": total["truncated"] / sequences,
        "advantages/mean": total["advantage"] / trained,
        "advantages/std": _std(total["advantage"], total["advantage_squared"], trained),
        "advantages/max": highest if total["trained"] else 0.0,
        "advantages/min": -lowest if total["trained"] else 0.0,
    }
    if kl_T is not None:
        stats["kl/token_mean"] = total["kl"] / max(total["sampled"], 1.0)
        stats["kl/sequence_mean"] = total["kl"] / sequences
    return stats


class StepStats:
    """Statistics of the minibatches of one train step, put together."""

    MEANS = ("loss", "grad_norm", "lr")  # of the minibatches
    TOKEN_MEANS = (  # the engine gives sums over tokens
        "entropy",
        "approx_kl",
        "importance_weight",
        "clip_share",
        "dual_clip_share",
        "behav_weight",
        "behav_approx_kl",
        "cap_share",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.empty = 0
        self.num_tokens = 0.0
        self.values: Stats = {}

    def add(self, stats: Mapping[str, float], num_tokens: float) -> None:
        """What one `train_step` returned; num_tokens: masked tokens of the minibatch, over all ranks."""
        self.steps += 1
        self.num_tokens += num_tokens
        for name, value in stats.items():
            if name.endswith("_max"):
                self.values[name] = max(self.values.get(name, -math.inf), value)
            else:
                self.values[name] = self.values.get(name, 0.0) + value

    def result(self) -> Stats:
        """actor/...: means over minibatches, means over tokens, maxima; whatever else the engine counted is summed."""
        result = {"actor/optimizer_steps": float(self.steps), "actor/empty_minibatches": float(self.empty)}
        for name, value in self.values.items():
            divisor = self.steps if name in self.MEANS else self.num_tokens if name in self.TOKEN_MEANS else 1.0
            result[f"actor/{name}"] = value / divisor
        return result


def _std(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0))


def _max_over_ranks(engine: Ranks, values: list[float]) -> list[float]:
    """Maxima by a sum: every rank fills its own row."""
    rows = np.zeros((engine.dp_size, len(values)))
    rows[engine.dp_rank] = values
    return engine.all_reduce_sum(rows.ravel().tolist()).reshape(rows.shape).max(axis=0).tolist()  # type: ignore[no-any-return]


def _sum_per_sequence(x_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    before = torch.cat([x_T.new_zeros(1, dtype=torch.float64), x_T.double().cumsum(0)])
    return (before[cu_seqlens[1:]] - before[cu_seqlens[:-1]]).to(x_T.dtype)


def _temperature(train: TrainConfig) -> float:
    temperature: float = train.ppo.temperature
    if temperature <= 0:
        raise ValueError(
            f"train.ppo.temperature is {temperature}; it must be above 0 here "
            "(0 in the experiment's config means rollout.sampling.temperature, filled in when processes are planned)"
        )
    return temperature
