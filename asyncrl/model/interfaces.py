"""Interfaces: what an MFC computes on a model worker, from this rank's groups to new keys or a train step.

This file has, in order: the protocols between interfaces and engines, and a rank's groups as tensors; statistics of a step;
interfaces for logprobs, values, scores and user functions; rewards -> advantages and returns; train steps of the policy and of the
critic, and their minibatches; `make_interface`, which makes the interface of an MFC.

The model worker calls `run` on its compute thread, on every rank of the MFC's model, with the same batch_ids and version. All ranks
of a data-parallel replica get the same sample; a rank without groups of the batch gets None and still takes part.
Interfaces decide (rewards, advantages, minibatches, denominators: asyncrl/algorithms). The engine computes (forward, backward,
optimizer step, sums over ranks: asyncrl/model/engine.py).

The update is the same in any layout. Denominators and means are sums over all data ranks, and minibatches are drawn from the ids of
the whole batch. The collective calls (`all_reduce_sum` and every call that runs the model) depend only on the config and batch_ids,
so all ranks make the same ones.

Shapes: T tokens, packed; S sequences; G groups, all of this rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import (
    Advantages,
    advantage_keys,
    compute_advantages,
    distillation_advantages,
    distillation_keys,
)
from asyncrl.algorithms.entropy import EntropyController
from asyncrl.algorithms.kl import make_kl_controller
from asyncrl.algorithms.packed import count_per_sequence, sum_per_sequence
from asyncrl.algorithms.ppo import PPOLoss, anchor_key, check_ppo_config, loss_denominator, loss_keys
from asyncrl.algorithms.value import ValueLoss, ValueNorm
from asyncrl.config.import_object import import_object
from asyncrl.config.schema import REWARD, ConfigError, PPOConfig, TrainConfig, judges_by_group, reward_models
from asyncrl.data.sequence import SequenceSample, spec_of
from asyncrl.dataflow.graph import DENSE_REWARDS
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.model.supervised import SupervisedTexts

# (outputs, data, cu_seqlens) -> (loss, statistics): an engine calls it on each micro-batch. outputs: `logprobs` and `entropy` of a
# policy, `values` of a critic; data: the keys of the micro-batch; all packed in the same way. The loss is a sum already divided by
# the global denominator. Statistics named *_max are maxima, all others sums over tokens. An optional method
# `stop_reason(statistics of all ranks) -> str` stops the engine from stepping if it returns a non-empty text.
LossFn = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]
Stats = dict[str, float]

# Infinite values of these keys become NaN, so that clipping does not turn them into rewards. The engine then skips the step
_REWARDS = ("rewards", "model_rewards", "dense_rewards")  # and model_rewards_NAME
# Keys without which a step can train (on_missing)
_REF_KEY, _SCORES, _PROXIMAL = "packed_ref_logprobs", "model_rewards", "proximal_logprobs"


class Ranks(Protocol):
    """The data-parallel ranks that compute together."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_size(self) -> int: ...

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        """Sums over data-parallel ranks; collective."""


class Engine(Ranks, Protocol):
    """The methods of an engine (asyncrl.model.engine.TrainEngine) that interfaces use.

    All methods are collective over the ranks of the model: every rank calls them, with None if it holds no groups. The ranks of a
    replica get the same sample. logprobs, values and scores return their result on the last stage of a replica that has a sample,
    else None.
    """

    @property
    def is_head(self) -> bool:
        """Whether this is tensor rank 0 of the last stage, the rank that stores its results."""

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> npt.NDArray[np.float32] | None:
        """Logprobs under a language model, packed like packed_input_ids."""

    def values(self, sample: SequenceSample | None) -> npt.NDArray[np.float32] | None:
        """Values from a value model, packed like packed_input_ids: the value of the state after each token."""

    def scores(self, sample: SequenceSample | None) -> npt.NDArray[np.float32] | None:
        """Scores from a reward model, one per sequence."""

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        """Take one optimizer step. Returns statistics over all data ranks; those of loss_fn on the last stage only."""

    def accumulate(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, begins: bool
    ) -> dict[str, float]:
        """Add the gradients of a part of a batch. Returns the statistics of loss_fn."""

    def step_accumulated(
        self, stats: Mapping[str, float], loss_fn: LossFn, *, denominator: float, lr_step: int
    ) -> dict[str, float]:
        """Divide the accumulated gradients and take one optimizer step. Returns the same statistics as train_step."""

    def mean_over_ranks(self, value: float | None) -> float:
        """The mean over all ranks of the model that have a value, such as those of the last stage; nan if none has. Collective."""


class OneRank:
    """Ranks for computing without an engine (`asyncrl-launch inspect`)."""

    dp_rank = 0
    dp_size = 1

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        return np.asarray(values, np.float64)


class Interface(ABC):
    """One MFC on one rank."""

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        """seed: of the experiment. tokenizer_path: folder of the actor's tokenizer."""
        self.mfc, self.train, self.seed, self.tokenizer_path = mfc, train, seed, tokenizer_path

    @abstractmethod
    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        """Return new keys for the ids of `sample` (None: no groups here, or nothing to store), and statistics of all ranks.

        `sample` holds the groups of this rank's replica, `batch_ids` the whole batch, both in canonical order. version is the
        number of train steps done before this one. The head of the replica stores the keys.
        """

    def run_part(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int, last: bool
    ) -> tuple[SequenceSample | None, Stats]:
        """Like `run`, on one part of a step's batch (train.streaming). The parts come one after another; `batch_ids` are those of
        the part. Statistics of the whole batch, and the train step, come with the last part."""
        return self.run(engine, sample, batch_ids=batch_ids, version=version)

    def without(self, missing: Collection[str]) -> Interface:
        """Return this interface for a step in which these input keys do not exist. Both have the same state. Raises ValueError if
        the MFC cannot run without them."""
        raise ValueError(f"{type(self).__name__} cannot run without the keys {sorted(missing)}")

    def state(self) -> Stats:
        """State kept from step to step, the same on all ranks; saved in checkpoints."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        assert not state


@dataclass(frozen=True)
class LocalBatch:
    """This rank's groups as tensors. A rank without groups computes like the others, on `data` of length 0."""

    position: dict[str, int]  # id -> index of the group
    group_sizes: list[int]  # sequences of each group
    cu_seqlens: Tensor  # S + 1
    data: dict[str, Tensor]

    @classmethod
    def make(cls, sample: SequenceSample | None, keys: Sequence[str]) -> LocalBatch:
        if sample is None:
            nothing = {key: torch.tensor(np.zeros(0, _dtype_of(key))) for key in keys}
            return cls({}, [], torch.zeros(1, dtype=torch.int64), nothing)
        missing = [key for key in keys if key not in sample.keys]
        if missing:
            raise ValueError(f"the sample lacks the keys {missing}; it has {sorted(sample.keys)}")
        data = {key: torch.tensor(sample.data[key]) for key in keys}
        for key in data:
            if key.startswith(_REWARDS):
                data[key].masked_fill_(~data[key].isfinite(), torch.nan)
        return cls(
            {group_id: i for i, group_id in enumerate(sample.ids)},
            [len(lengths) for lengths in sample.seqlens["packed_input_ids"]],
            torch.tensor(sample.cu_seqlens("packed_input_ids")),
            data,
        )


def joined(parts: Sequence[LocalBatch]) -> LocalBatch:
    """Return the groups of several parts of a batch as one, without their positions."""
    lengths = torch.cat([part.cu_seqlens.diff() for part in parts])
    return LocalBatch(
        {},
        [size for part in parts for size in part.group_sizes],
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        {key: torch.cat([part.data[key] for part in parts]) for key in parts[0].data},
    )


def groups_here(sample: SequenceSample | None, batch_ids: Sequence[str]) -> SequenceSample | None:
    """Return the sample, or None if it has no groups. Raises ValueError for groups outside the batch."""
    if sample is None or sample.num_ids == 0:
        return None
    strangers = sorted(set(sample.ids) - set(batch_ids))
    if strangers:
        raise ValueError(f"ids {strangers[:4]} are not in the batch; a rank runs on its part of the batch only")
    return sample


def check_input_keys(mfc: MFCDef, keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in mfc.input_keys]
    if missing:
        raise ValueError(f"MFC {mfc.name!r} needs the input keys {missing}, because of the settings under train")


def temperature_of(train: TrainConfig) -> float:
    temperature: float = train.ppo.temperature
    if temperature <= 0:
        raise ValueError(
            f"train.ppo.temperature is {temperature}; it must be above 0 here "
            "(0 in the experiment's config means rollout.sampling.temperature, filled in when processes are planned)"
        )
    return temperature


_MIN_STD = 1e-4  # a smaller standard deviation of the returns is taken for rounding error


def batch_stats(engine: Ranks, local: LocalBatch, made: Advantages, *, adds_dense: bool = False) -> Stats:
    """Statistics of the whole batch, over all ranks. Two collective calls.

    adds_dense: the dense rewards are part of the trajectories' rewards (train.dense_rewards).
    """
    rewards_S, mask_T, kl_T = made.rewards_S, made.mask_T, made.kl_T
    raw_S = local.data["rewards"].double()
    dense_S = torch.zeros_like(raw_S)
    if DENSE_REWARDS in local.data:
        dense_S = sum_per_sequence(local.data[DENSE_REWARDS].double(), local.cu_seqlens)
    scores_S = rewards_S + dense_S
    if adds_dense:
        raw_S, rewards_S = raw_S + dense_S, scores_S
    response_S = count_per_sequence(local.data["loss_mask"], local.cu_seqlens)
    advantages = made.advantages_T[mask_T].double()
    groups = np.split(scores_S.numpy(), np.cumsum(local.group_sizes, dtype=np.int64)[:-1])
    model_keys = [key for key in local.data if key.startswith("model_rewards")]
    sums = {
        "groups": float(len(local.group_sizes)),
        "sequences": float(len(raw_S)),
        "tokens": float(len(mask_T)),
        "sampled": float(response_S.sum()),
        "trained": float(advantages.numel()),
        "reward": float(raw_S.sum()),
        "reward_squared": float(raw_S.square().sum()),
        **{key: float(local.data[key].double().sum()) for key in model_keys},
        "dense": float(dense_S.sum()),
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
    for key in model_keys:
        name = key.removeprefix("model_rewards")  # "", or _NAME
        stats[f"reward/model_mean{name}"] = total[key] / sequences
    if DENSE_REWARDS in local.data:
        stats["reward/dense_mean"] = total["dense"] / sequences
    if kl_T is not None:
        stats["kl/token_mean"] = total["kl"] / max(total["sampled"], 1.0)
        stats["kl/sequence_mean"] = total["kl"] / sequences
    return stats


def value_stats(engine: Ranks, values: Tensor, returns: Tensor) -> Stats:
    """How well the values predicted the returns, over the states of the whole batch, in units of rewards. One collective call.

    explained_variance = 1 - Var(returns - values) / Var(returns). 1: perfect; 0: no better than a constant; below 0: worse. It is
    also 0 if all returns are equal.
    """
    values, returns = values.double(), returns.double()
    errors = returns - values
    sums = [values.sum(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
    total = engine.all_reduce_sum([float(values.numel()), *map(float, sums)])
    count, value, returned, squares, error, error_squares = total.tolist()
    count = max(count, 1.0)
    std = _std(returned, squares, count)
    explained = 1 - (_std(error, error_squares, count) / std) ** 2 if std > _MIN_STD else 0.0
    return {
        "critic/values_mean": value / count,
        "critic/returns_mean": returned / count,
        "critic/returns_std": std,
        "critic/explained_variance": explained,
    }


class StepStats:
    """Aggregates the statistics of the minibatches of one train step.

    The result of a statistic depends on its name: *_max is the maximum, *_steps a count, and each of MEANS the mean over the
    minibatches. All others, which the engine reports as sums over tokens, become means over all tokens.
    """

    MEANS = ("loss", "ptx_loss", "grad_norm", "lr")

    def __init__(self) -> None:
        self.steps = 0
        self.empty = 0
        self.num_tokens = 0.0
        self.values: Stats = {}  # sums and maxima over the minibatches

    def add(self, stats: Mapping[str, float], num_tokens: float) -> None:
        """stats: the result of one `train_step` (on a rank before the last stage it lacks the statistics of the loss). num_tokens:
        tokens in the minibatch's `loss_mask`, over all ranks."""
        self.steps += 1
        self.num_tokens += num_tokens
        _add_stats(self.values, stats)

    def result(self, role: str) -> Stats:
        """Return the statistics by `<role>/<name>`: means over minibatches or tokens, maxima, counts."""
        result = {"optimizer_steps": float(self.steps), "empty_minibatches": float(self.empty)}
        for name, value in self.values.items():
            if name == "num_tokens":  # only used by stop_reason
                continue
            counted = name.endswith(("_max", "_steps"))
            divisor = 1.0 if counted else self.steps if name in self.MEANS else self.num_tokens
            result[name] = value / divisor
        return {f"{role}/{name}": value for name, value in result.items()}


def _add_stats(total: Stats, stats: Mapping[str, float]) -> None:
    for name, value in stats.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, -math.inf), value)
        else:
            total[name] = total.get(name, 0.0) + value


def _std(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0))


def _max_over_ranks(engine: Ranks, values: list[float]) -> list[float]:
    """Compute maxima with a sum: every rank fills its own row."""
    rows = np.zeros((engine.dp_size, len(values)))
    rows[engine.dp_rank] = values
    return engine.all_reduce_sum(rows.ravel().tolist()).reshape(rows.shape).max(axis=0).tolist()  # type: ignore[no-any-return]


class LogprobsInterface(Interface):
    """Logprobs of the batch's tokens under this model: the proximal policy, the reference or the teacher."""

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        super().__init__(mfc, train, seed=seed, tokenizer_path=tokenizer_path)
        self.temperature = temperature_of(train)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        logprobs = engine.logprobs(sample, temperature=self.temperature)
        return _made(sample, self.mfc.output_keys[0], logprobs), {}


class ValuesInterface(Interface):
    """Values of the batch's states in the critic's own units (see ValueNorm)."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        return _made(sample, "values", engine.values(sample)), {}


class ScoresInterface(Interface):
    """Scores of each sequence from a reward model."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        return _made(sample, self.mfc.output_keys[0], engine.scores(sample)), {}


def _made(sample: SequenceSample | None, key: str, array: npt.NDArray[np.float32] | None) -> SequenceSample | None:
    """Return a sample with `array` as this key, for the same ids; None if the engine returned nothing (no groups, or not the last
    stage)."""
    if sample is None or array is None:
        return None
    spec = spec_of(key)
    assert spec is not None
    if spec.layout == "token":
        return sample.derive({key: array})
    ones = [[1] * len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
    return SequenceSample(sample.ids, {key: ones}, {key: array})


class FunctionInterface(Interface):
    """A user's function: function(engine, sample, train) -> SequenceSample with the MFC's output keys, or (sample, statistics).

    The function runs on every rank of the MFC's model, so that the engine's collective calls match. `sample` is the same on all
    ranks of a replica; without groups it is a sample with no ids, never None. Only the result of the replica's head is used. If an
    engine call returns None (no groups, or not the last stage of a pipeline), return None. Statistics are of all ranks
    (engine.all_reduce_sum); those of the replica's head count.
    """

    def __init__(self, function: Callable[..., Any], mfc: MFCDef, train: TrainConfig) -> None:
        super().__init__(mfc, train)
        self.function = function

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        here = groups_here(sample, batch_ids)
        result = self.function(engine, here if here is not None else _nothing(self.mfc.input_keys), self.train)
        result, stats = result if isinstance(result, tuple) else (result, {})
        if here is None or not self.mfc.output_keys or not engine.is_head:
            return None, stats
        missing = [key for key in self.mfc.output_keys if key not in getattr(result, "keys", ())]
        if not isinstance(result, SequenceSample) or missing or set(result.ids) != set(here.ids):
            raise ValueError(
                f"MFC {self.mfc.name!r}: {self.mfc.interface} must return a SequenceSample with the ids of its input and the keys "
                f"{list(self.mfc.output_keys)}; missing {missing}"
            )
        return result.select_keys(self.mfc.output_keys), stats


def _nothing(keys: Sequence[str]) -> SequenceSample:
    """Return a sample with no ids. Keys of unknown dtype are float32."""
    return SequenceSample((), {key: [] for key in keys}, {key: np.zeros(0, _dtype_of(key)) for key in keys})


def _dtype_of(key: str) -> np.dtype[Any]:
    """float32 for a key that is not known."""
    spec = spec_of(key)
    return spec.dtype if spec is not None else np.dtype("float32")


class AdvantagesInterface(Interface):
    """Makes the targets of the train steps from values and rewards: those of reward functions and reward models, dense rewards,
    and the KL penalty. A teacher's logprobs are added last (`distillation_advantages`).

    consumes: the groups of this rank.  produces: `advantages` and `trained_mask` for the actor; `returns` and `value_mask` for a
    critic, in the units of its `values`.  waits for: the other data-parallel ranks, in sums.
    Its state is the KL coefficient and, with train.critic.value_norm, the critic's units. It is a separate MFC so that this state
    lives in one place, whatever meshes actor and critic use, and only its results travel to them.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        super().__init__(mfc, train, seed=seed, tokenizer_path=tokenizer_path)
        check_ppo_config(train.ppo)
        self.ppo: PPOConfig = train.ppo
        self.adds_dense = train.dense_rewards
        self.kl = make_kl_controller(train.ppo)
        self.teacher_coef = train.teacher.coef if train.teacher is not None else 0.0
        scales = {role: model.scale for role, model in reward_models(train).items()}
        self.model_scales = {f"model_rewards{role.removeprefix(REWARD)}": scale for role, scale in scales.items()}
        critic = train.critic
        self.value_norm = ValueNorm(critic.value_norm_beta) if critic is not None and critic.value_norm else None
        self.keys = ["packed_input_ids", "prompt_mask", *advantage_keys(train.ppo)]
        self.keys += distillation_keys(train.ppo) if train.teacher is not None else []
        self.keys += self.model_scales
        self.keys += ["values"] if critic is not None or "values" in mfc.input_keys else []
        self.keys += [DENSE_REWARDS] if DENSE_REWARDS in mfc.input_keys else []
        self._parts: list[LocalBatch] = []  # of the step's batch so far, with train.streaming
        check_input_keys(mfc, self.keys)
        if "values" in self.keys and judges_by_group(train.ppo):
            raise ValueError(
                f"train.ppo.advantage_norm={train.ppo.advantage_norm} with baseline={train.ppo.baseline} scores a response within "
                "its group and uses no values; with a critic use advantage_norm batch or none, and baseline none"
            )

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        made, stats = self.compute(engine, LocalBatch.make(sample, self.keys))
        self._update_kl(stats)
        returns_T = made.returns_T
        if self.value_norm is not None:  # the critic learns in the updated units; its old values are left unchanged
            self.value_norm.update(returns_T[made.states_T], engine.all_reduce_sum)
            returns_T = self.value_norm.normalise(returns_T).masked_fill(~made.states_T, 0.0)
        return self._targets(sample, made, returns_T), stats

    def run_part(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int, last: bool
    ) -> tuple[SequenceSample | None, Stats]:
        """The targets of a group depend on its own rewards only: config/validation.py refuses normalisation over the batch. With
        the last part the whole batch is computed once more, for its statistics and the KL coefficient of the next step."""
        sample = groups_here(sample, batch_ids)
        local = LocalBatch.make(sample, self.keys)
        self._parts.append(local)
        made, stats = self.compute(engine, local)
        if last:
            _, stats = self.compute(engine, joined(self._parts))
            self._parts = []
            self._update_kl(stats)
        return self._targets(sample, made, made.returns_T), stats if last else {}

    def _update_kl(self, stats: Stats) -> None:
        if self.ppo.kl_coef > 0:
            self.kl.update(stats["kl/sequence_mean"], int(stats["batch/num_sequences"]))

    def _targets(self, sample: SequenceSample | None, made: Advantages, returns_T: Tensor) -> SequenceSample | None:
        if sample is None:
            return None
        found = {
            "advantages": made.advantages_T,
            "trained_mask": made.mask_T,
            "returns": returns_T,
            "value_mask": made.states_T,
        }
        return sample.derive({key: found[key].numpy() for key in self.mfc.output_keys})

    def without(self, missing: Collection[str]) -> Interface:
        """Without the reference's logprobs there is no KL penalty, and the KL coefficient does not adapt. Without the reward
        model's scores the rewards are those of the reward functions."""
        return _without(self, missing)

    def compute(self, engine: Ranks, local: LocalBatch) -> tuple[Advantages, Stats]:
        """Return the targets, in units of rewards, and the statistics of the whole batch. Collective. Does not change the state.

        local: this rank's groups, with the keys `keys`.
        """
        data = dict(local.data)
        for key, scale in self.model_scales.items():
            data["rewards"] = data["rewards"] + scale * data[key]
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
        distilled = self.teacher_coef > 0
        if distilled:
            policy_T, teacher_T = (data[key] for key in distillation_keys(self.ppo))
            bonus_T = distillation_advantages(policy_T, teacher_T, made.mask_T, self.teacher_coef)
            made = replace(made, advantages_T=made.advantages_T + bonus_T)
        stats = batch_stats(engine, local, made, adds_dense=self.adds_dense)
        if distilled:
            (total,) = engine.all_reduce_sum([float(bonus_T.double().sum()) / -self.teacher_coef])
            stats["distillation/token_mean"] = float(total) / max(stats["batch/num_trained_tokens"], 1.0)
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
        if self.ppo.kl_adaptive:  # otherwise the config sets it
            self.kl.coef = state["kl_coef"]
        if self.value_norm is not None:
            prefix = "value_norm."
            norm = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            self.value_norm.load_state_dict(norm)


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


def split_passes(batch_ids: Sequence[str], num: int, *, epochs: int, seed: int, version: int) -> list[list[str]]:
    """Return the minibatches of all passes over the batch, in order (split_minibatches)."""
    return [
        ids
        for epoch in range(epochs)
        for ids in split_minibatches(batch_ids, num, seed=seed, version=version, epoch=epoch)
    ]


def train_minibatches(
    engine: Engine,
    sample: SequenceSample | None,
    minibatches: Sequence[Sequence[str]],
    loss_of: Callable[[float, float], LossFn],
    *,
    temperature: float,
    lr_step: int,
    texts: SupervisedTexts | None = None,
) -> StepStats:
    """Take one optimizer step per minibatch that has tokens to train on. Collective.

    sample: the groups of this rank with the keys that the engine and the loss read. loss_of: makes a minibatch's loss from two
    counts over all ranks: its tokens in `loss_mask`, and its sequences that have any. texts: those of train.ptx, divided among the
    minibatches.
    """
    steps = StepStats()
    here = set(sample.ids) if sample is not None else set()
    counts = _count(engine, sample, minibatches)
    supervised = texts.parts(lr_step, len(minibatches)) if texts is not None else []
    for number, (ids, (num_tokens, num_sequences)) in enumerate(zip(minibatches, counts, strict=True)):
        if num_tokens == 0:
            steps.empty += 1  # no rank has a token to train on (all truncated, with mask_too_long): no step
            continue
        mine = [group_id for group_id in ids if group_id in here]
        part = sample.select_ids(mine) if sample is not None and mine else None
        loss_fn = loss_of(num_tokens, num_sequences)
        if texts is not None:
            ranks = {"dp_rank": engine.dp_rank, "dp_size": engine.dp_size}
            part, loss_fn = texts.mix(supervised[number], part, loss_fn, **ranks)
        steps.add(engine.train_step(part, loss_fn, temperature=temperature, lr_step=lr_step), num_tokens)
    return steps


def _count(
    engine: Ranks, sample: SequenceSample | None, minibatches: Sequence[Sequence[str]]
) -> list[tuple[float, float]]:
    """For each minibatch, over all ranks: number of tokens in `loss_mask`, and of sequences that have any."""
    counts: dict[str, npt.NDArray[np.float64]] = {}
    if sample is not None:
        for group_id, masks in zip(sample.ids, sample.slices("loss_mask"), strict=True):
            tokens = [int(mask.sum()) for mask in masks]
            counts[group_id] = np.array([sum(tokens), sum(n > 0 for n in tokens)], np.float64)
    nothing = np.zeros(2)
    local = np.array([sum((counts.get(group_id, nothing) for group_id in ids), nothing) for ids in minibatches])
    total = engine.all_reduce_sum(local.ravel().tolist()).reshape(-1, 2)
    return [(float(tokens), float(sequences)) for tokens, sequences in total]


class AccumulatedStep:
    """One optimizer step whose gradients add up over the parts of a batch (train.streaming).

    The gradient is linear in 1 / denominator. So each part adds the gradient of its undivided sum, and the sums are divided once,
    when the whole batch is known. The result is that of `train_minibatches` with one minibatch, up to the order of additions.
    """

    def __init__(self) -> None:
        self.num_tokens = 0.0  # over all ranks, of all parts so far: tokens in loss_mask
        self.num_sequences = 0.0  # ... and sequences that have any
        self._stats: Stats | None = None  # added up; None: no part had a token to train on

    def add(
        self,
        engine: Engine,
        sample: SequenceSample | None,
        ids: Sequence[str],
        loss_fn: LossFn,
        *,
        temperature: float,
    ) -> None:
        """Add the gradients of the part with these ids. loss_fn: with denominator 1. Collective."""
        ((num_tokens, num_sequences),) = _count(engine, sample, [ids])
        self.num_tokens += num_tokens
        self.num_sequences += num_sequences
        if num_tokens == 0:
            return
        begins = self._stats is None
        self._stats = self._stats or {}
        _add_stats(self._stats, engine.accumulate(sample, loss_fn, temperature=temperature, begins=begins))

    def finish(self, engine: Engine, loss_fn: LossFn, denominator: float, *, lr_step: int) -> StepStats:
        """Take the step, unless no part had a token to train on. denominator: of the whole batch. Collective."""
        steps = StepStats()
        if self._stats is None:
            steps.empty = 1
        else:
            stats = engine.step_accumulated(self._stats, loss_fn, denominator=denominator, lr_step=lr_step)
            steps.add(stats, self.num_tokens)
        return steps


class PPOActorInterface(Interface):
    """One train step of PPO: train.ppo.epochs passes over the batch, each with one optimizer step per minibatch, which may include
    supervised texts (train.ptx).

    consumes: the groups of this rank with the keys of `actor_train`.  produces: new weights in the engine, statistics of the step.
    waits for: the other ranks, in collective calls. If a rank fails, the master detects it and ends the trainer group.
    Its state, with train.ppo.entropy_target, is the coefficient of the entropy bonus.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        super().__init__(mfc, train, seed=seed, tokenizer_path=tokenizer_path)
        check_ppo_config(train.ppo)
        self.ppo: PPOConfig = train.ppo
        self.temperature = temperature_of(train)
        target = train.ppo.entropy_target
        self.entropy = (
            EntropyController(train.ppo.entropy_coef, target, train.ppo.entropy_step) if target is not None else None
        )
        self.keys = ["packed_input_ids", "trained_mask"]  # the loss reads it as loss_mask
        self.keys += [key for key in loss_keys(train.ppo) if key != "loss_mask"]
        self._accumulated = AccumulatedStep()
        check_input_keys(mfc, self.keys)
        keys = ["loss_mask" if key == "trained_mask" else key for key in self.keys]
        self.texts = SupervisedTexts(train.ptx, tokenizer_path, seed=seed, keys=keys) if train.ptx is not None else None

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.keys).remap_keys({"trained_mask": "loss_mask"})

        ppo = self._ppo_of_step()

        def loss_of(num_tokens: float, num_sequences: float) -> PPOLoss:
            return PPOLoss(ppo, loss_denominator(ppo, num_tokens, num_sequences))

        minibatches = split_passes(batch_ids, ppo.minibatches, epochs=ppo.epochs, seed=self.seed, version=version)
        steps = train_minibatches(
            engine, sample, minibatches, loss_of, temperature=self.temperature, lr_step=version, texts=self.texts
        )
        return None, self._adapted(engine, steps.result("actor"))

    def _ppo_of_step(self) -> PPOConfig:
        """The settings of this step: train.ppo, with the adapted entropy coefficient."""
        return self.ppo if self.entropy is None else replace(self.ppo, entropy_coef=self.entropy.coef)

    def _adapted(self, engine: Engine, stats: Stats) -> Stats:
        """Adapt the entropy coefficient after a step. Returns the statistics, with the coefficient of the step. Collective."""
        if self.entropy is None:
            return stats
        coef = self.entropy.coef
        self.entropy.update(engine.mean_over_ranks(stats.get("actor/entropy")))
        return stats | {"actor/entropy_coef": coef}

    def state(self) -> Stats:
        return self.entropy.state() if self.entropy is not None else {}

    def restore(self, state: Mapping[str, float]) -> None:
        if self.entropy is not None and state:  # empty if the run has had no entropy_target so far
            self.entropy.restore(state)

    def run_part(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int, last: bool
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.keys).remap_keys({"trained_mask": "loss_mask"})
        loss_fn, step = PPOLoss(self._ppo_of_step(), 1.0), self._accumulated
        step.add(engine, sample, batch_ids, loss_fn, temperature=self.temperature)
        if not last:
            return None, {}
        self._accumulated = AccumulatedStep()
        denominator = loss_denominator(self.ppo, step.num_tokens, step.num_sequences)
        steps = step.finish(engine, loss_fn, denominator, lr_step=version)
        return None, self._adapted(engine, steps.result("actor"))

    def without(self, missing: Collection[str]) -> Interface:
        """Without the reference's logprobs the loss has no KL term."""
        return _without(self, missing)


_AdvantagesOrActor = TypeVar("_AdvantagesOrActor", AdvantagesInterface, PPOActorInterface)


def _without(interface: _AdvantagesOrActor, missing: Collection[str]) -> _AdvantagesOrActor:
    """Return a copy that reads none of the missing keys. It has no KL term if the reference's logprobs are missing. The servers'
    logprobs take the place of missing proximal ones. Raises ValueError if it needs another missing key."""
    if strange := sorted(key for key in missing if key not in (_REF_KEY, _PROXIMAL) and not key.startswith(_SCORES)):
        raise ValueError(f"{type(interface).__name__} cannot run without the keys {strange}")
    other = copy(interface)
    if _REF_KEY in missing:
        other.ppo = replace(other.ppo, kl_coef=0.0)
    keys = interface.keys
    if _PROXIMAL in missing:  # equal proximal and behaviour logprobs make the naive loss
        other.ppo = replace(other.ppo, use_decoupled_loss=False)
        keys = [anchor_key(other.ppo) if key == _PROXIMAL else key for key in keys]
    other.keys = [key for key in dict.fromkeys(keys) if key not in missing]
    if isinstance(other, AdvantagesInterface):
        other.model_scales = {key: scale for key, scale in other.model_scales.items() if key not in missing}
    return other


class PPOCriticInterface(Interface):
    """One train step of the critic: values of the states in which trained tokens were sampled move towards the returns, in
    train.ppo.epochs passes over the batch. Returns and old values stay those of the start of the step.

    consumes: the groups of this rank with the keys of `critic_train`.  produces: new weights in the engine, statistics of the step.
    waits for: the other ranks, in collective calls.
    """

    KEYS = ("packed_input_ids", "values", "returns", "value_mask")  # the loss reads the last one as loss_mask

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        super().__init__(mfc, train, seed=seed, tokenizer_path=tokenizer_path)
        if train.critic is None:
            raise ValueError(f"MFC {mfc.name!r} trains a critic, but train.critic is null")
        self.critic = train.critic
        self.epochs = train.ppo.epochs
        self._accumulated = AccumulatedStep()
        check_input_keys(mfc, self.KEYS)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.KEYS).remap_keys({"value_mask": "loss_mask"})

        def loss_of(num_tokens: float, num_sequences: float) -> ValueLoss:
            return ValueLoss(self.critic.eps_clip, num_tokens)

        num, epochs = self.critic.minibatches, self.epochs
        minibatches = split_passes(batch_ids, num, epochs=epochs, seed=self.seed, version=version)
        steps = train_minibatches(engine, sample, minibatches, loss_of, temperature=1.0, lr_step=version)
        return None, steps.result("critic")

    def run_part(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int, last: bool
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.KEYS).remap_keys({"value_mask": "loss_mask"})
        loss_fn, step = ValueLoss(self.critic.eps_clip, 1.0), self._accumulated
        step.add(engine, sample, batch_ids, loss_fn, temperature=1.0)
        if not last:
            return None, {}
        self._accumulated = AccumulatedStep()
        return None, step.finish(engine, loss_fn, step.num_tokens, lr_step=version).result("critic")


def make_interface(mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> Interface:
    """Return the interface that an MFC names. Raises ConfigError. The groups of a batch may have different sizes.

    seed: of the experiment; it determines the minibatches. tokenizer_path: folder of the actor's tokenizer.
    """
    made = import_object(mfc.interface, f"MFC {mfc.name!r}: interface")
    if isinstance(made, type) and issubclass(made, Interface):
        return made(mfc, train, seed=seed, tokenizer_path=tokenizer_path)
    if not callable(made):
        raise ConfigError(f"MFC {mfc.name!r}: interface {mfc.interface!r} is neither a function nor an Interface")
    return FunctionInterface(made, mfc, train)
