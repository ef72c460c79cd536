"""The phases of a run with a hybrid allocation: one allocation until a step, another one after it. Pure.

    allocation="transformers.d2@0-1+d2@0-1 until 20 then transformers.d2+d2"

The launcher runs a phase as an attempt of its own: at the end of its last step the master writes a checkpoint, all processes end,
and the processes of the next phase begin from this checkpoint. So phases may differ in all that a checkpoint does not fix.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig
from asyncrl.config.transports import FILES
from asyncrl.dataflow.topology import Allocation

_THEN = re.compile(r"\s+then\s+")


def phases(config: ExperimentConfig) -> tuple[ExperimentConfig, ...]:
    """Return the run's config for each of its phases: with one allocation, which has `until` in every phase but the last.

    While generation and training share devices, weights travel as files, and no step begins before generation has ended. So in such
    a phase of several, weights.transport is disk, and train.streaming is off. Raises ValueError with the expected form.
    """
    texts = _THEN.split(config.allocation)
    if len(texts) == 1 and " until " not in config.allocation:
        return (config,)
    if not mode_of(config.mode).updates_servers or config.cluster != "local":
        raise ValueError("has several phases, which needs mode=async and cluster=local: give one allocation")
    allocations = [Allocation.parse(text) for text in texts]
    *ends, last = [allocation.until for allocation in allocations]
    if last or 0 in ends or any(step >= following for step, following in itertools.pairwise(ends)):
        raise ValueError(
            f"{config.allocation!r}: every allocation but the last must end at a step, each at a later one: write "
            "<allocation> until <step> then <allocation>"
        )
    return tuple(_with(config, text, allocation) for text, allocation in zip(texts, allocations, strict=True))


def first_allocation(text: str) -> str:
    """The allocation of the first phase."""
    return _THEN.split(text)[0]


def phase_after(config: ExperimentConfig, step: int) -> ExperimentConfig:
    """Return the config of the phase that the step after `step` belongs to."""
    *before, last = phases(config)
    return next((phase for phase in before if step < Allocation.parse(phase.allocation).until), last)


def _with(config: ExperimentConfig, text: str, allocation: Allocation) -> ExperimentConfig:
    config = replace(config, allocation=text)
    if not allocation.shared_workers:
        return config
    return replace(
        config,
        weights=replace(config.weights, transport=FILES),
        train=replace(config.train, streaming=False),
    )
