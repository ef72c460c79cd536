"""Interfaces that run a model forward, or a function of the user, and write new keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.config.schema import ConfigError, TrainConfig
from asyncrl.data.sequence import KEY_SPECS, SequenceSample
from asyncrl.dataflow.graph import MFCDef
from asyncrl.model.interfaces.common import Engine, Interface, Stats, groups_here, temperature_of
from asyncrl.rewards.import_object import import_object


class LogprobsInterface(Interface):
    """Logprobs of the batch's tokens under this model: the proximal policy, or the reference."""

    def __init__(self, output_key: str, train: TrainConfig) -> None:
        self.output_key = output_key
        self.temperature = temperature_of(train)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        logprobs = engine.logprobs(sample, temperature=self.temperature)
        return _made(sample, self.output_key, logprobs), {}


class ValuesInterface(Interface):
    """Values of the batch's states, as the critic gives them: in its own units (advantages.py knows them)."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        return _made(sample, "values", engine.values(sample)), {}


class ScoresInterface(Interface):
    """What the reward model thinks of each sequence."""

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        sample = groups_here(sample, batch_ids)
        return _made(sample, "model_rewards", engine.scores(sample)), {}


def _made(sample: SequenceSample | None, key: str, array: npt.NDArray[np.float32] | None) -> SequenceSample | None:
    """The key for the sample's ids; None where the engine gives nothing (no groups, or not the last stage)."""
    if sample is None or array is None:
        return None
    if KEY_SPECS[key].layout == "token":
        return sample.derive({key: array})
    ones = [[1] * len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
    return SequenceSample(sample.ids, {key: ones}, {key: array})


class FunctionInterface(Interface):
    """An MFC added by config: function(engine, sample, train) -> SequenceSample with the MFC's output keys.

    Called on every rank of its model, so that engine calls, which are collective, meet; `sample` is the same on all ranks of a
    replica, and of no ids (never None) where there are no groups. What counts is what the replica's head returns. Where an
    engine call gives None (no groups, or not the last stage of a pipeline), return None.
    """

    def __init__(self, mfc: MFCDef, train: TrainConfig) -> None:
        self.mfc = mfc
        self.train = train
        self.function = _import_function(mfc)

    def run(
        self, engine: Engine, sample: SequenceSample | None, *, batch_ids: Sequence[str], version: int
    ) -> tuple[SequenceSample | None, Stats]:
        here = groups_here(sample, batch_ids)
        result = self.function(engine, here if here is not None else _nothing(self.mfc.input_keys), self.train)
        if here is None or not self.mfc.output_keys or not engine.is_head:
            return None, {}
        missing = [key for key in self.mfc.output_keys if key not in getattr(result, "keys", ())]
        if not isinstance(result, SequenceSample) or missing or set(result.ids) != set(here.ids):
            raise ValueError(
                f"MFC {self.mfc.name!r}: {self.mfc.interface} must return a SequenceSample of the ids it was given with the keys "
                f"{list(self.mfc.output_keys)}; missing {missing}"
            )
        return result.select_keys(self.mfc.output_keys), {}


def _nothing(keys: Sequence[str]) -> SequenceSample:
    """A sample of no ids. Keys whose dtype nobody has written down are float32."""
    dtypes = {key: KEY_SPECS[key].dtype if key in KEY_SPECS else np.dtype("float32") for key in keys}
    return SequenceSample((), {key: [] for key in keys}, {key: np.zeros(0, dtypes[key]) for key in keys})


def _import_function(mfc: MFCDef) -> Callable[..., Any]:
    function = import_object(mfc.interface, f"MFC {mfc.name!r}: interface")
    if not callable(function):
        raise ConfigError(f"MFC {mfc.name!r}: interface {mfc.interface!r} is not a function")
    return function  # type: ignore[no-any-return]
