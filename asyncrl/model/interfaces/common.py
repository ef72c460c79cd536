"""What interfaces and engines ask of each other, and the groups of a rank as tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config.schema import TrainConfig
from asyncrl.data.sequence import KEY_SPECS, SequenceSample
from asyncrl.dataflow.graph import MFCDef

# (outputs, data, cu_seqlens) -> (loss, statistics): what an engine calls on each micro-batch. outputs: `logprobs` and `entropy` of
# a policy, `values` of a critic; data: the keys of the micro-batch; all packed alike. The loss is a sum already divided by the
# global denominator; statistics named *_max are maxima, all others sums over tokens. If it has a method
# `stop_reason(statistics of all ranks) -> str`, a text keeps the engine from stepping.
LossFn = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]
Stats = dict[str, float]

# What is infinite there becomes no number: clipping must not make a reward of it. The step that it gets into is skipped
_REWARDS = ("rewards", "model_rewards", "dense_rewards")


class Ranks(Protocol):
    """The data-parallel ranks that compute together."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_size(self) -> int: ...

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        """Sums over data-parallel ranks; collective."""


class Engine(Ranks, Protocol):
    """What interfaces ask of an engine (asyncrl.model.engine.TrainEngine).

    All methods are collective over the ranks of the model: every rank calls them, with None where it holds no groups. The ranks
    of a replica get the same sample. Results are on the last stage of a replica that has a sample; elsewhere None.
    """

    @property
    def is_head(self) -> bool:
        """Tensor rank 0 of the last stage: what it returns is what is stored."""

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> npt.NDArray[np.float32] | None:
        """Of a language model: packed like packed_input_ids."""

    def values(self, sample: SequenceSample | None) -> npt.NDArray[np.float32] | None:
        """Of a value model: packed like packed_input_ids, the value of the state after each token."""

    def scores(self, sample: SequenceSample | None) -> npt.NDArray[np.float32] | None:
        """Of a reward model: one a sequence."""

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        """One optimizer step. Statistics of all data ranks, on the last stage."""


class OneRank:
    """Ranks of those who compute without an engine (`asyncrl-launch inspect`)."""

    dp_rank = 0
    dp_size = 1

    def all_reduce_sum(self, values: list[float]) -> npt.NDArray[np.float64]:
        return np.asarray(values, np.float64)


class Interface(ABC):
    """One MFC on one rank."""

    @abstractmethod
    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        """New keys for the ids of `sample` (None: no groups here, or nothing to write), and statistics of all ranks.

        `sample` holds the groups of this rank's replica, `batch_ids` the whole batch, both in canonical order; version is the
        number of train steps done before this one. The head of the replica stores the keys.
        """

    def state(self) -> Stats:
        """What it remembers from step to step, the same on all ranks: for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        assert not state


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
        data = {key: torch.tensor(sample.data[key]) for key in keys}
        for key in _REWARDS:
            if key in data:
                data[key].masked_fill_(~data[key].isfinite(), torch.nan)
        return cls(
            {group_id: i for i, group_id in enumerate(sample.ids)},
            [len(lengths) for lengths in sample.seqlens["packed_input_ids"]],
            torch.tensor(sample.cu_seqlens("packed_input_ids")),
            data,
        )


def groups_here(sample: SequenceSample | None, batch_ids: Sequence[str]) -> SequenceSample | None:
    """The sample, None where it has no groups. Groups that are not of the batch are a ValueError."""
    if sample is None or sample.num_ids == 0:
        return None
    strangers = sorted(set(sample.ids) - set(batch_ids))
    if strangers:
        raise ValueError(f"ids {strangers[:4]} are not in the batch; a rank runs on its part of the batch only")
    return sample


def check_input_keys(mfc: MFCDef, keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in mfc.input_keys]
    if missing:
        raise ValueError(f"MFC {mfc.name!r} needs the input keys {missing} for train as configured")


def temperature_of(train: TrainConfig) -> float:
    temperature: float = train.ppo.temperature
    if temperature <= 0:
        raise ValueError(
            f"train.ppo.temperature is {temperature}; it must be above 0 here "
            "(0 in the experiment's config means rollout.sampling.temperature, filled in when processes are planned)"
        )
    return temperature
