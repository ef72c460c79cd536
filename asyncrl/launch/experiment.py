"""Reads a config from its file and checks the whole of it once, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.loading import read_experiment
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.config.validation import problems_of_fields, problems_of_sizes
from asyncrl.dataflow.layout_checks import problems_of_layout


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults, and check the result.

    Raises ConfigError with the field, its value, and the remedy or the nearest valid name.
    """
    config = read_experiment(path, overrides)
    validate(config)
    return config


def validate(config: ExperimentConfig) -> None:
    """Reject a config that cannot work. Raises ConfigError with every problem found, one per line."""
    # The size checks run first. The other checks run only if these find nothing, because they compare values, and comparisons with
    # nan are meaningless
    found = list(problems_of_sizes(config))
    found = found or [*problems_of_fields(config), *problems_of_layout(config)]
    if found:
        raise ConfigError("\n".join(f"{name}={value!r}: {remedy}" for name, value, remedy in found))
