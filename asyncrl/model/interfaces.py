"""Interfaces: what an MFC computes on a model worker, from this rank's groups to new keys or a train step.

This file has, in order: the protocols between interfaces and engines, and a rank's groups as tensors; statistics of a step;
interfaces for logprobs, values, scores and user functions; rewards -> advantages and returns; train steps of the policy and of the
critic, and their minibatches; `make_interface`, which makes the interface of an MFC.

The model worker calls `run` on its compute thread, on every rank of the MFC's model, with the same batch_ids and step. All ranks
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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import (
    Advantages,
    advantage_keys,
    advantages_by_task,
    compute_advantages,
    distillation_advantages,
    distillation_keys,
    groups_of_seats,
)
from asyncrl.algorithms.entropy import EntropyController
from asyncrl.algorithms.kl import make_kl_controller
from asyncrl.algorithms.packed import count_per_sequence, sum_per_sequence
from asyncrl.algorithms.ppo import PPOLoss, anchor_key, check_ppo_config, loss_denominator, loss_keys
from asyncrl.algorithms.value import ValueLoss, ValueNorm
from asyncrl.config.import_object import import_object
from asyncrl.config.schema import (
    REWARD,
    ConfigError,
    PPOConfig,
    TrainConfig,
    judges_by_group,
    ppo_by_task,
    reward_models,
)
from asyncrl.data.routes import ROUTES
from asyncrl.data.sequence import SequenceSample, spec_of
from asyncrl.data.words import words_error
from asyncrl.dataflow.graph import DENSE_REWARDS, SEATS, SESSIONS, TASK_IDS, is_one_update, uses_routes
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.minibatches import split_minibatches
from asyncrl.dataflow.statistics import merge_stats
from asyncrl.model.supervised import SupervisedTexts

# (outputs, data, cu_seqlens) -> (loss, statistics): an engine calls it on each micro-batch. outputs: `logprobs` and `entropy` of a
# policy, `values` of a critic; data: the keys of the micro-batch; all packed in the same way. The loss is a sum already divided by
# the global denominator. Statistics named *_max are maxima, all others sums over tokens. An optional method
# `stop_reason(statistics of all ranks) -> str` stops the engine from stepping if it returns a non-empty text.
LossFn = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]
Stats = dict[str, float]
# Adds supervised texts to a minibatch's groups of this rank, and to its loss
Mix = Callable[[SequenceSample | None, LossFn], tuple[SequenceSample | None, LossFn]]

# Infinite values of these keys become NaN, so that clipping does not turn them into rewards. The engine then skips the step
_REWARDS = ("rewards", "model_rewards", "dense_rewards")  # and model_rewards_NAME
# Keys without which a step can train (on_missing)
_REF_KEY, _SCORES, _PROXIMAL = "packed_ref_logprobs", "model_rewards", "proximal_logprobs"


class Ranks(Protocol):
    """The data-parallel ranks that compute together."""

    @property
    def replica(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

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

    def accumulate(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, begins: bool
    ) -> dict[str, float]:
        """Compute gradients, and add them to those of earlier parts of the batch unless `begins`. Returns statistics over all data
        ranks, on the last stage only."""

    def step(self, stats: Mapping[str, float], loss_fn: LossFn, *, lr_step: int, divisor: float) -> dict[str, float]:
        """Divide the accumulated gradients and take one optimizer step. Returns the statistics of loss_fn and of the step."""

    def mean_over_ranks(self, value: float | None) -> float:
        """The mean over all ranks of the model that have a value, such as those of the last stage; nan if none has. Collective."""


class Interface(ABC):
    """One MFC on one rank."""

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        """seed: of the experiment. tokenizer_path: folder of the actor's tokenizer."""
        self.mfc, self.train, self.seed, self.tokenizer_path = mfc, train, seed, tokenizer_path

    def begin(self, version: int) -> StepTotals:
        """Begin a train step. version: the number of train steps done before it."""
        return StepTotals(version, self.state())

    @abstractmethod
    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
    ) -> tuple[SequenceSample | None, Stats]:
        """Return new keys for the ids of `sample` (None: no groups here, or nothing to store), and statistics of all ranks.

        `sample` holds the groups of this rank's replica. `batch_ids` are those of all ranks: of the whole batch, or of one part of
        it (train.streaming). Both are in canonical order. The parts come one after another. step: from `begin`; the same object
        for all calls of a step. The head of the replica stores the keys.
        """

    def stats_of_step(self, stats: Stats, *, batch_ids: Sequence[str], step: StepTotals) -> Stats:
        """Return the statistics of all calls of the step so far, given those of the call that has just run (`merge_stats`)."""
        step.reported[tuple(batch_ids)] = stats  # a repeated call replaces its first result
        return merge_stats([(found, len(ids)) for ids, found in step.reported.items()])

    def without(self, missing: Collection[str]) -> Interface:
        """Return this interface for a call for which these input keys do not exist. Both have the same state. Raises ValueError if
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

    @property
    def group_of_S(self) -> Tensor:
        """Index of the group of each sequence."""
        return torch.arange(len(self.group_sizes)).repeat_interleave(torch.tensor(self.group_sizes, dtype=torch.int64))

    @property
    def group_of_T(self) -> Tensor:
        """Index of the group of each token."""
        return self.group_of_S.repeat_interleave(self.cu_seqlens.diff())

    def sums(self, values: Tensor, group_of: Tensor) -> Tensor:
        """Sums over the values of each group: float64, G. group_of: index of the group of each value."""
        return torch.zeros(len(self.group_sizes), dtype=torch.float64).index_add_(0, group_of, values.double())

    def maxima(self, values: Tensor, group_of: Tensor) -> Tensor:
        """Maxima over the values of each group; -inf for a group without values."""
        least = torch.full((len(self.group_sizes),), -math.inf, dtype=torch.float64)
        return least.scatter_reduce_(0, group_of, values.double(), "amax")

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
_MAXIMA = ("response_max", "advantage_max", "advantage_min")
Columns = dict[str, Tensor]  # a number for each group, G


def group_columns(local: LocalBatch, made: Advantages, *, adds_dense: bool = False) -> Columns:
    """The numbers of each group of this rank from which `BatchStats` makes the statistics of the batch.

    adds_dense: the dense rewards are part of the trajectories' rewards (train.dense_rewards).
    """
    of_S, of_T = local.group_of_S, local.group_of_T
    sizes_G = local.sums(torch.ones(len(of_S)), of_S)
    raw_S, shaped_S, dense_S = (
        local.data["rewards"].double(),
        made.rewards_S,
        torch.zeros(len(of_S), dtype=torch.float64),
    )
    if DENSE_REWARDS in local.data:
        dense_S = sum_per_sequence(local.data[DENSE_REWARDS].double(), local.cu_seqlens)
    scores_S = shaped_S + dense_S
    if adds_dense:
        raw_S, shaped_S = raw_S + dense_S, scores_S
    response_S = count_per_sequence(local.data["loss_mask"], local.cu_seqlens)
    advantages, of_A = made.advantages_T[made.mask_T].double(), of_T[made.mask_T]
    compared = torch.tensor(groups_of_seats(local.data, local.group_sizes), dtype=torch.int64)
    first_S = scores_S[compared.cumsum(0) - compared].repeat_interleave(compared)
    columns = {
        "groups": torch.ones(len(sizes_G)),
        "sequences": sizes_G,
        "tokens": local.sums(torch.ones(len(of_T)), of_T),
        "sampled": local.sums(response_S, of_S),
        "trained": local.sums(made.mask_T, of_T),
        "reward": local.sums(raw_S, of_S),
        "reward_squared": local.sums(raw_S.square(), of_S),
        "shaped": local.sums(shaped_S, of_S),
        "equal_groups": (sizes_G > 0) & (local.sums(scores_S != first_S, of_S) == 0),
        "prompt": local.sums(local.data["prompt_mask"], of_T),
        "truncated": local.sums(local.data["seq_no_eos_mask"], of_S),
        "advantage": local.sums(advantages, of_A),
        "advantage_squared": local.sums(advantages.square(), of_A),
        "response_max": local.maxima(response_S, of_S),
        "advantage_max": local.maxima(advantages, of_A),
        "advantage_min": local.maxima(-advantages, of_A),  # negated
    }
    for key in (key for key in local.data if key.startswith(_SCORES)):
        columns |= {key: local.sums(local.data[key], of_S), f"{key}/sequences": sizes_G}
    if DENSE_REWARDS in local.data:
        columns["dense"] = local.sums(dense_S, of_S)
    if made.kl_T is not None:
        columns |= {"kl": local.sums(made.kl_T, of_T), "kl/sampled": columns["sampled"], "kl/sequences": sizes_G}
    return columns


def value_columns(values_T: Tensor, made: Advantages, local: LocalBatch) -> Columns:
    """The same for how well the values predicted the returns, over the states of each group, in units of rewards."""
    values, returns = values_T[made.states_T].double(), made.returns_T[made.states_T].double()
    errors = returns - values
    found = {
        "states": torch.ones(len(values)),
        "values": values,
        "returns": returns,
        "returns_squared": returns.square(),
    }
    found |= {"errors": errors, "errors_squared": errors.square()}
    return {name: local.sums(column, local.group_of_T[made.states_T]) for name, column in found.items()}


class BatchStats:
    """Statistics of the groups of a step's batch, over all of its calls. A group that is computed again replaces its former
    numbers."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, float]] = {}  # this rank's; id -> column -> number
        self._names: dict[str, None] = {}  # of the columns of any call; the same on all ranks

    def add(self, batch_ids: Sequence[str], local: LocalBatch, columns: Columns) -> None:
        """Add the groups of a call. batch_ids: those of all ranks. columns: of this rank's groups."""
        for group in batch_ids:
            self._groups.pop(group, None)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        self._groups |= {
            group: dict(zip(columns, row, strict=True)) for group, row in zip(local.position, rows, strict=True)
        }
        if batch_ids or not self._names:  # a part without groups reports nothing
            self._names |= dict.fromkeys(columns)

    def totals(self, engine: Ranks) -> Stats:
        """Sums over all groups of all ranks, and the maxima. Two collective calls."""
        rows = list(self._groups.values())
        names = [name for name in self._names if name not in _MAXIMA]
        sums = engine.all_reduce_sum([math.fsum(row.get(name, 0.0) for row in rows) for name in names])
        maxima = _max_over_ranks(engine, [max((row[name] for row in rows), default=-math.inf) for name in _MAXIMA])
        return dict(zip([*names, *_MAXIMA], [*sums.tolist(), *maxima], strict=True))


# Statistics of the batch: each is the quotient of two totals. Only configs that have the first total have the statistic
QUOTIENTS = {
    "reward/mean": ("reward", "sequences"),
    "reward/shaped_mean": ("shaped", "sequences"),
    "reward/equal_group_share": ("equal_groups", "groups"),
    "length/response_mean": ("sampled", "sequences"),
    "length/prompt_mean": ("prompt", "sequences"),
    "length/truncated_share": ("truncated", "sequences"),
    "advantages/mean": ("advantage", "trained"),
    "reward/dense_mean": ("dense", "sequences"),
    "kl/token_mean": ("kl", "kl/sampled"),
    "kl/sequence_mean": ("kl", "kl/sequences"),
    "distillation/token_mean": ("distilled", "trained"),
    "critic/values_mean": ("values", "states"),
    "critic/returns_mean": ("returns", "states"),
}


def batch_stats(total: Mapping[str, float]) -> Stats:
    """The statistics of the batch, from the totals of its groups (`BatchStats`).

    critic/explained_variance = 1 - Var(returns - values) / Var(returns). 1: perfect; 0: no better than a constant; below 0: worse.
    It is also 0 if all returns are equal.
    """
    sequences, trained = max(total["sequences"], 1.0), max(total["trained"], 1.0)
    stats = {
        "batch/num_groups": total["groups"],
        "batch/num_sequences": total["sequences"],
        "batch/num_tokens": total["tokens"],
        "batch/num_trained_tokens": total["trained"],
        "reward/std": _std(total["reward"], total["reward_squared"], sequences),
        "length/response_max": max(total["response_max"], 0.0),
        "advantages/std": _std(total["advantage"], total["advantage_squared"], trained),
        "advantages/max": total["advantage_max"] if total["trained"] else 0.0,
        "advantages/min": -total["advantage_min"] if total["trained"] else 0.0,
    }
    scores = [key for key in total if key.startswith(_SCORES) and not key.endswith("/sequences")]
    of_models = {f"reward/model_mean{key.removeprefix(_SCORES)}": (key, f"{key}/sequences") for key in scores}
    for name, (part, whole) in (QUOTIENTS | of_models).items():
        if part in total:
            stats[name] = total[part] / max(total[whole], 1.0)
    if "states" in total:
        count = max(total["states"], 1.0)
        std = _std(total["returns"], total["returns_squared"], count)
        error_std = _std(total["errors"], total["errors_squared"], count)
        explained = 1 - (error_std / std) ** 2 if std > _MIN_STD else 0.0
        stats |= {"critic/returns_std": std, "critic/explained_variance": explained}
    return stats


class StepStats:
    """Aggregates the statistics of the minibatches of one train step.

    The result of a statistic depends on its name: *_max is the maximum, *_steps a count, and each of MEANS the mean over the
    minibatches. All others, which the engine reports as sums over tokens, become means over the tokens of the minibatches that
    report them.
    """

    MEANS = ("loss", "ptx_loss", "router_aux_loss", "grad_norm", "lr")

    def __init__(self) -> None:
        self.steps = 0
        self.empty = 0
        self._values: Stats = {}  # sums and maxima over the minibatches
        self._divisors: Stats = {}

    def add(self, stats: Mapping[str, float], num_tokens: float | Mapping[str, float]) -> None:
        """stats: the result of one `train_step` (on a rank before the last stage it lacks the statistics of the loss). num_tokens:
        tokens in the minibatch's `loss_mask`, over all ranks; or those of the parts that report a statistic, by its name."""
        self.steps += 1
        _add_stats(self._values, stats)
        for name in stats:
            tokens = num_tokens if isinstance(num_tokens, float | int) else num_tokens.get(name, 0.0)
            self._divisors[name] = self._divisors.get(name, 0.0) + (1.0 if name in self.MEANS else tokens)

    def result(self, role: str) -> Stats:
        """Return the statistics by `<role>/<name>`: means over minibatches or tokens, maxima, counts."""
        result = {"optimizer_steps": float(self.steps), "empty_minibatches": float(self.empty)}
        for name, value in self._values.items():
            if name == "num_tokens":  # only used by stop_reason
                continue
            result[name] = value if name.endswith(("_max", "_steps")) else value / self._divisors[name]
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
    rows = np.zeros((engine.num_replicas, len(values)))
    rows[engine.replica] = values
    return engine.all_reduce_sum(rows.ravel().tolist()).reshape(rows.shape).max(axis=0).tolist()  # type: ignore[no-any-return]


class LogprobsInterface(Interface):
    """Logprobs of the batch's tokens under this model: the proximal policy, the reference or the teacher."""

    def __init__(self, mfc: MFCDef, train: TrainConfig, *, seed: int = 1, tokenizer_path: str = "") -> None:
        super().__init__(mfc, train, seed=seed, tokenizer_path=tokenizer_path)
        self.temperature = temperature_of(train)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        logprobs = engine.logprobs(sample, temperature=self.temperature)
        return _made(sample, self.mfc.output_keys[0], logprobs), {}


class ValuesInterface(Interface):
    """Values of the batch's states in the critic's own units (see ValueNorm)."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        return _made(sample, "values", engine.values(sample)), {}


class ScoresInterface(Interface):
    """Scores of each sequence from a reward model."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
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
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
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
        result = result.select_keys(self.mfc.output_keys)
        if error := words_error(result, self.train.max_words_bytes):
            raise ValueError(f"MFC {self.mfc.name!r}: {error}")
        return result, stats


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
        self.ppo: PPOConfig = train.ppo
        self.adds_dense = train.dense_rewards
        self.kl = make_kl_controller(train.ppo)
        self.tasks = dict(sorted(train.tasks.items()))  # in the order of task ids; config/resolve.py names all tasks
        self.teacher = train.teacher
        scales = {role: model.scale for role, model in reward_models(train).items()}
        self.model_scales = {f"model_rewards{role.removeprefix(REWARD)}": scale for role, scale in scales.items()}
        critic = train.critic
        self.value_norm = ValueNorm(critic.value_norm_beta) if critic is not None and critic.value_norm else None
        self.keys = ["packed_input_ids", "prompt_mask", *advantage_keys(train.ppo)]
        self.keys += distillation_keys(train.ppo) if train.teacher is not None else []
        self.keys += self.model_scales
        self.keys += ["values"] if critic is not None or "values" in mfc.input_keys else []
        self.keys += [key for key in (DENSE_REWARDS, SESSIONS, SEATS, TASK_IDS) if key in mfc.input_keys]
        check_input_keys(mfc, self.keys)
        for ppo in (train.ppo, *ppo_by_task(train.ppo, self.tasks).values()):
            check_ppo_config(ppo)
            if "values" in self.keys and judges_by_group(ppo):
                raise ValueError(
                    f"train.ppo.advantage_norm={ppo.advantage_norm} with baseline={ppo.baseline} scores a response within "
                    "its group and uses no values; with a critic use advantage_norm batch or none, and baseline none"
                )

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        self.kl.coef = step.began_with["kl_coef"]
        local = LocalBatch.make(sample, self.keys)
        made, columns = self.compute(engine, local)
        step.groups.add(batch_ids, local, columns)
        total = step.groups.totals(engine)
        stats = batch_stats(total)
        if "kl" in total:
            stats["kl/coef"] = self.kl.coef
            self.kl.update(stats["kl/sequence_mean"], int(total["kl/sequences"]))
        returns_T = made.returns_T
        if self.value_norm is not None:  # the critic learns in the updated units; its old values are left unchanged
            stats |= {"critic/norm_mean": self.value_norm.mean, "critic/norm_std": self.value_norm.std}
            self.value_norm.update(returns_T[made.states_T], engine.all_reduce_sum)
            returns_T = self.value_norm.normalise(returns_T).masked_fill(~made.states_T, 0.0)
        return self._targets(sample, made, returns_T), stats

    def stats_of_step(self, stats: Stats, *, batch_ids: Sequence[str], step: StepTotals) -> Stats:
        return stats

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

    def compute(self, engine: Ranks, local: LocalBatch) -> tuple[Advantages, Columns]:
        """Return the targets, in units of rewards, and the numbers of each group for the statistics of the batch. Collective if
        advantages are normalised over the batch. Does not change the state.

        local: this rank's groups, with the keys `keys`.
        """
        data = dict(local.data)
        for key, scale in self.model_scales.items():
            data["rewards"] = data["rewards"] + scale * data[key]
        if self.value_norm is not None:
            data["values"] = self.value_norm.denormalise(data["values"])
        groups, kl_coef = (data, local.cu_seqlens, local.group_sizes), self.kl.coef
        if self.tasks:
            made = advantages_by_task(*groups, [*ppo_by_task(self.ppo, self.tasks).values()], kl_coef=kl_coef)
        else:
            made = compute_advantages(*groups, self.ppo, kl_coef=kl_coef, all_reduce_sum=engine.all_reduce_sum)
        distilled: Columns = {}
        if self.teacher is not None:
            tasks = self.tasks.values()
            own = [self.teacher.coef if task.teacher_coef is None else task.teacher_coef for task in tasks]
            coef = torch.tensor(own)[data[TASK_IDS]][local.group_of_T] if own else self.teacher.coef
            policy_T, teacher_T = (data[key] for key in distillation_keys(self.ppo))
            bonus_T = distillation_advantages(policy_T, teacher_T, made.mask_T, coef)
            made = replace(made, advantages_T=made.advantages_T + bonus_T)
            apart_T = (policy_T - teacher_T).masked_fill(~made.mask_T, 0.0)
            distilled = {"distilled": local.sums(apart_T, local.group_of_T)}
        columns = group_columns(local, made, adds_dense=self.adds_dense) | distilled
        if "values" in data:
            columns |= value_columns(data["values"], made, local)
        return made, columns

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


@dataclass(frozen=True)
class Minibatches:
    """How the groups of a step are drawn into minibatches. All ranks draw the same ones.

    A whole batch is shuffled in each pass (split_minibatches). If it comes in parts, the minibatches of the first pass have the
    same sizes, and take the groups in order of arrival: part by part, in canonical order within a part. Later passes follow the
    last part, and are drawn like those of a whole batch.
    """

    num: int  # of a pass
    epochs: int
    seed: int
    batch_size: int  # groups of a whole batch

    def passes(self, batch_ids: Sequence[str], version: int) -> list[list[str]]:
        """The minibatches of all passes over a whole batch, in order."""
        return [ids for epoch in range(self.epochs) for ids in self._drawn(batch_ids, version, epoch)]

    def later_passes(self, batch_ids: Sequence[str], version: int) -> list[list[str]]:
        """Those after the first pass. batch_ids: of all parts, in canonical order."""
        return [ids for epoch in range(1, self.epochs) for ids in self._drawn(batch_ids, version, epoch)]

    def room(self, number: int) -> int | None:
        """Groups of a minibatch of the first pass, from 0, if the batch comes in parts. None: all that are left, as it is the last
        one. A batch with fewer groups than batch_size fills fewer minibatches."""
        num = min(self.num, self.batch_size)
        return None if number >= num - 1 else self.batch_size // num + (number < self.batch_size % num)

    def _drawn(self, batch_ids: Sequence[str], version: int, epoch: int) -> list[list[str]]:
        return split_minibatches(batch_ids, self.num, seed=self.seed, version=version, epoch=epoch)


class OptimizerStep:
    """One optimizer step, whose gradients add up over the parts of a batch (train.streaming).

    The loss of a whole minibatch is divided before the backward pass. Each of several parts adds the gradient of its undivided sum,
    and the sums are divided once, when the whole minibatch is known. The gradient is linear in 1 / denominator, so the results are
    equal up to rounding.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(2)  # over all ranks, of all parts so far: tokens in loss_mask, sequences that have any
        self._stats: Stats = {}  # added up
        self._tokens: Stats = {}  # by statistic: tokens of the parts that report it
        self._loss_fn: LossFn | None = None  # of the newest part; None: no part had a token to train on
        self._divisor = 1.0  # by which the sums are still to be divided
        self._is_taken = False

    def add(
        self,
        engine: Engine,
        sample: SequenceSample | None,
        counts: Sequence[float],
        loss_of: Callable[[float, float], LossFn],
        mix: Mix | None,
        *,
        temperature: float,
        is_whole: bool,
    ) -> None:
        """Add the gradients of a part. counts, over all ranks: its tokens in `loss_mask`, its sequences that have any. mix: adds
        supervised texts. is_whole: the minibatch has no other part. Collective."""
        if self._is_taken:
            raise RuntimeError("the optimizer step has been taken: gradients of a further part would be lost")
        begins = self._loss_fn is None
        self._counts += counts
        if not self._counts[0]:  # all truncated, with mask_too_long
            return
        self._loss_fn = loss_of(*self._counts.tolist())
        if not is_whole:
            assert isinstance(self._loss_fn, (PPOLoss, ValueLoss))
            self._divisor = self._loss_fn.denominator
            self._loss_fn = replace(self._loss_fn, denominator=1.0)
        if not counts[0]:
            return
        if mix is not None:
            sample, self._loss_fn = mix(sample, self._loss_fn)
        stats = engine.accumulate(sample, self._loss_fn, temperature=temperature, begins=begins)
        _add_stats(self._stats, stats)
        _add_stats(self._tokens, dict.fromkeys(stats, counts[0]))

    def take(self, engine: Engine, totals: StepStats, *, lr_step: int) -> None:
        """Take the step, unless no part had a token to train on, and add its statistics to the totals. Collective."""
        self._is_taken = True
        if self._loss_fn is None:
            totals.empty += 1
            return
        stats = engine.step(self._stats, self._loss_fn, lr_step=lr_step, divisor=self._divisor)
        totals.add(stats, self._tokens)


@dataclass(frozen=True)
class TrainedPart:
    """A batch, or a part of it, with which a function that trains was called. Its groups may wait for their minibatch, and later
    passes use them again."""

    sample: SequenceSample | None  # the groups of this rank
    # By group, over all ranks: number of tokens in `loss_mask`, and of sequences that have any
    counts: dict[str, npt.NDArray[np.float64]]
    loss_of: Callable[[float, float], LossFn]  # it may differ between parts (on_missing)

    @classmethod
    def of(
        cls,
        engine: Ranks,
        sample: SequenceSample | None,
        batch_ids: Sequence[str],
        loss_of: Callable[[float, float], LossFn],
    ) -> TrainedPart:
        """batch_ids: of all ranks. Collective."""
        found: dict[str, tuple[int, int]] = {}
        if sample is not None:
            for group_id, masks in zip(sample.ids, sample.slices("loss_mask"), strict=True):
                tokens = [int(mask.sum()) for mask in masks]
                found[group_id] = sum(tokens), sum(n > 0 for n in tokens)
        local = [float(number) for group_id in batch_ids for number in found.get(group_id, (0, 0))]
        total = engine.all_reduce_sum(local).reshape(-1, 2)
        return cls(sample, dict(zip(batch_ids, total, strict=True)), loss_of)

    def take_step(
        self, engine: Engine, ids: Sequence[str], step: StepTotals, mix: Mix | None = None, *, temperature: float
    ) -> None:
        """Take the optimizer step of a minibatch whose groups are all in this part. Collective."""
        optimizer_step = OptimizerStep()
        self.add_to(optimizer_step, engine, ids, mix, temperature=temperature, is_whole=True)
        optimizer_step.take(engine, step.optimizer_steps, lr_step=step.version)

    def add_to(
        self,
        step: OptimizerStep,
        engine: Engine,
        ids: Sequence[str],
        mix: Mix | None = None,
        *,
        temperature: float,
        is_whole: bool,
    ) -> None:
        """Add the gradients of these groups of the part. Collective."""
        here = set(self.sample.ids) if self.sample is not None else set()
        mine = [group_id for group_id in ids if group_id in here]
        sample = self.sample.select_ids(mine) if self.sample is not None and mine else None
        counts = sum((self.counts[group_id] for group_id in ids), np.zeros(2))
        step.add(engine, sample, counts.tolist(), self.loss_of, mix, temperature=temperature, is_whole=is_whole)


@dataclass
class StepTotals:
    """What the calls of one MFC add up in one train step, on one rank: those on the parts of a batch (train.streaming), and those
    of a user's step function.

    The model worker makes it when the step begins (`Interface.begin`), gives it to each call of the step, and drops it when the
    next step begins. A call that fails ends the worker, and its totals with it.
    """

    version: int  # the number of train steps done before this one
    began_with: Stats  # the interface's state when the step began
    ends: bool = True  # no further part of the batch follows the one of the current call
    batch: Sequence[str] = ()  # with the last of several parts: the ids of all parts, in canonical order
    steps_early: bool = False  # optimizer steps may be taken before the last part (dataflow/graph.py `steps_early`)
    groups: BatchStats = field(default_factory=BatchStats)
    optimizer_steps: StepStats = field(default_factory=StepStats)
    parts: list[TrainedPart] = field(default_factory=list)  # of the batch, in order of arrival
    num_placed: int = 0  # groups of the parts that are in a minibatch of the first pass
    num_taken: int = 0  # minibatches of the first pass, if the batch comes in parts
    num_open: int = 0  # groups in the open one
    open: OptimizerStep | None = None  # the one to which the parts of the batch add
    reported: dict[tuple[str, ...], Stats] = field(default_factory=dict)  # by the ids of the call


def train_on_part(
    engine: Engine,
    sample: SequenceSample | None,
    batch_ids: Sequence[str],
    minibatches: Minibatches,
    loss_of: Callable[[float, float], LossFn],
    step: StepTotals,
    *,
    temperature: float,
    texts: SupervisedTexts | None = None,
) -> None:
    """Train on a batch, or on one part of it: accumulate gradients, and take the optimizer step of each minibatch that is complete.
    Statistics go to `step`. Collective.

    sample: the groups of this rank with the keys that the engine and the loss read. batch_ids: of all ranks. loss_of: makes a
    minibatch's loss from two counts over all ranks: its tokens in `loss_mask`, and its sequences that have any. texts: those of
    train.ptx, divided among the minibatches of a whole batch.
    """
    part = TrainedPart.of(engine, sample, batch_ids, loss_of)
    if step.ends and not step.parts:
        drawn = minibatches.passes(batch_ids, step.version)
        supervised = texts.parts(step.version, len(drawn)) if texts is not None and drawn else []
        for number, ids in enumerate(drawn):
            mix: Mix | None = None
            if texts is not None:
                mix = partial(texts.mix, supervised[number], replica=engine.replica, num_replicas=engine.num_replicas)
            part.take_step(engine, ids, step, mix, temperature=temperature)
        return
    step.parts.append(part)
    _first_pass(engine, minibatches, step, temperature=temperature)
    if step.ends:
        trained = {group_id for part in step.parts for group_id in part.counts}
        batch = [group_id for group_id in step.batch if group_id in trained]
        for ids in minibatches.later_passes(batch, step.version):
            _take(engine, ids, step, temperature=temperature)


def _first_pass(engine: Engine, minibatches: Minibatches, step: StepTotals, *, temperature: float) -> None:
    """Put the groups that have arrived into minibatches, and take the steps of those that are complete. Without steps_early a
    complete minibatch, and the groups after it, wait for the last part."""
    arrived = [group_id for part in step.parts for group_id in part.counts]
    while step.num_placed < len(arrived) or (step.ends and step.open is not None):
        room = minibatches.room(step.num_taken)
        ids = arrived[step.num_placed :]
        ids = ids if room is None else ids[: room - step.num_open]
        step.num_placed += len(ids)
        is_full = room is not None and step.num_open + len(ids) == room
        if (is_full and step.steps_early) or (step.ends and (is_full or step.num_placed == len(arrived))):
            _take(engine, ids, step, temperature=temperature)
            step.open, step.num_open, step.num_taken = None, 0, step.num_taken + 1
            continue
        step.open = step.open or OptimizerStep()
        _add(engine, ids, step, step.open, temperature=temperature, is_last=False)
        step.num_open += len(ids)
        if is_full:
            return


def _take(engine: Engine, ids: Sequence[str], step: StepTotals, *, temperature: float) -> None:
    """Take the optimizer step of a minibatch, after adding these groups to the open one."""
    optimizer_step = step.open or OptimizerStep()
    _add(engine, ids, step, optimizer_step, temperature=temperature, is_last=True)
    optimizer_step.take(engine, step.optimizer_steps, lr_step=step.version)


def _add(
    engine: Engine, ids: Sequence[str], step: StepTotals, to: OptimizerStep, *, temperature: float, is_last: bool
) -> None:
    """Add the gradients of groups of the parts. is_last: the minibatch is complete with them."""
    pieces = [(part, [group_id for group_id in ids if group_id in part.counts]) for part in step.parts]
    pieces = [(part, piece) for part, piece in pieces if piece]
    is_whole = is_last and to is not step.open and len(pieces) == 1
    for part, piece in pieces:
        part.add_to(to, engine, piece, temperature=temperature, is_whole=is_whole)


def train_minibatches(
    engine: Engine,
    sample: SequenceSample | None,
    minibatches: Sequence[Sequence[str]],
    loss_of: Callable[[float, float], LossFn],
    *,
    temperature: float,
    lr_step: int,
) -> StepStats:
    """Take one optimizer step per minibatch that has tokens to train on. Collective.

    sample: the groups of this rank with the keys that the engine and the loss read. loss_of: makes a minibatch's loss from two
    counts over all ranks: its tokens in `loss_mask`, and its sequences that have any.
    """
    step = StepTotals(lr_step, {})
    ids = list(dict.fromkeys(group_id for minibatch in minibatches for group_id in minibatch))
    part = TrainedPart.of(engine, sample, ids, loss_of)
    for minibatch in minibatches:
        part.take_step(engine, minibatch, step, temperature=temperature)
    return step.optimizer_steps


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
        keys = [key for key in loss_keys(train.ppo) if key != "loss_mask"]
        self.anchor_is_current = _PROXIMAL in keys and _PROXIMAL not in mfc.input_keys and is_one_update(train)
        self.keys += [key for key in keys if key != _PROXIMAL or not self.anchor_is_current]
        self.keys += [ROUTES] if uses_routes(train) else []
        check_input_keys(mfc, self.keys)
        keys = ["loss_mask" if key == "trained_mask" else key for key in self.keys]
        self.minibatches = Minibatches(train.ppo.minibatches, train.ppo.epochs, seed, train.batch_size)
        self.texts = SupervisedTexts(train.ptx, tokenizer_path, seed=seed, keys=keys) if train.ptx is not None else None

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.keys).remap_keys({"trained_mask": "loss_mask"})

        self.restore(step.began_with)
        ppo = self.ppo if self.entropy is None else replace(self.ppo, entropy_coef=self.entropy.coef)

        def loss_of(num_tokens: float, num_sequences: float) -> PPOLoss:
            denominator = loss_denominator(ppo, num_tokens, num_sequences)
            return PPOLoss(ppo, denominator, anchor_is_current=self.anchor_is_current)

        train_on_part(
            engine,
            sample,
            batch_ids,
            self.minibatches,
            loss_of,
            step,
            temperature=self.temperature,
            texts=self.texts,
        )
        if not step.ends:
            return None, {}
        stats = step.optimizer_steps.result("actor")
        if self.entropy is not None:
            stats["actor/entropy_coef"] = self.entropy.coef
            self.entropy.update(engine.mean_over_ranks(stats.get("actor/entropy")))
        return None, stats

    def stats_of_step(self, stats: Stats, *, batch_ids: Sequence[str], step: StepTotals) -> Stats:
        return stats

    def state(self) -> Stats:
        return self.entropy.state() if self.entropy is not None else {}

    def restore(self, state: Mapping[str, float]) -> None:
        if self.entropy is not None and state:  # empty if the run has had no entropy_target so far
            self.entropy.restore(state)

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
        self.minibatches = Minibatches(train.critic.minibatches, train.ppo.epochs, seed, train.batch_size)
        check_input_keys(mfc, self.KEYS)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], step: StepTotals
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        if sample is not None:
            sample = sample.select_keys(self.KEYS).remap_keys({"value_mask": "loss_mask"})

        def loss_of(num_tokens: float, num_sequences: float) -> ValueLoss:
            return ValueLoss(self.critic.eps_clip, num_tokens)

        train_on_part(engine, sample, batch_ids, self.minibatches, loss_of, step, temperature=1.0)
        return None, step.optimizer_steps.result("critic") if step.ends else {}

    def stats_of_step(self, stats: Stats, *, batch_ids: Sequence[str], step: StepTotals) -> Stats:
        return stats


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
