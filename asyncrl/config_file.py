"""A config as it is written: YAML and dotted overrides, merged through OmegaConf onto the defaults and checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from asyncrl.config import ConfigError, ExperimentConfig
from asyncrl.config_checks import validate
from asyncrl.config_fields import find_field
from asyncrl.presets import ALGORITHMS, CORRECTIONS

_REMOVED = {  # fields of earlier releases, and what to use instead
    "name_resolve.backend": "names are always in etcd: leave it out for a private one, or set name_resolve.endpoints to yours",
    "name_resolve.path": "names are not kept in files any more: leave it out for a private etcd",
    "name_resolve.poll_s": "names are not kept in files any more: leave it out",
}


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults, and check the whole once.

    Between the defaults and the file come the presets that train.algorithm and train.correction name.

    Raises ConfigError naming the field, its value and the remedy or nearest valid name.
    """
    if not Path(path).is_file():
        raise ConfigError(f"config {str(path)!r} is not a file; `asyncrl-launch init NAME` writes one")
    try:
        layers = [(str(path), OmegaConf.load(path))]
    except YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value, such as train.batch_size=32")
        try:
            layers.append((override, OmegaConf.from_dotlist([override])))
        except (YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"override {override!r} cannot be read: {error}") from error
    merged = _merge(layers)
    presets = [
        (f"train.{name}={chosen}", OmegaConf.create(known[chosen]))
        for name, known in (("algorithm", ALGORITHMS), ("correction", CORRECTIONS))
        if (chosen := merged.train[name]) in known  # another name is for validate to refuse
    ]
    if presets:
        merged = _merge([*presets, *layers])
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ExperimentConfig)
    config = replace(
        config,
        recover=_switch(config.recover),
        network=replace(config.network, authenticate=_switch(config.network.authenticate)),
    )
    validate(config)
    return config


def _switch(value: str) -> str:
    """YAML reads on and off as true and false."""
    return {"True": "on", "False": "off"}.get(value, value)


def _merge(layers: Sequence[tuple[str, Any]]) -> Any:
    """Layers, each with where it comes from, onto the defaults; later ones win."""
    merged = OmegaConf.structured(ExperimentConfig)
    for source, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise ConfigError(f"in {source}: {_explain(error, source.partition('=')[0])}") from error
    return merged


def _explain(error: OmegaConfBaseException, written: str) -> str:
    """An OmegaConf error as field, value, remedy. written: the path in an override, of which the error may name a part only."""
    field_name = error.full_key or "the config"
    if field_name in _REMOVED:
        return f"removed field {field_name!r}: {_REMOVED[field_name]}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        parent = error.object_type
        owner = parent if parent is not None and is_dataclass(parent) else ExperimentConfig
        known = [entry.name for entry in fields(owner)]
        asked = written if written.startswith(f"{field_name}.") else field_name
        found = find_field(asked)
        hint = f"did you mean {found!r}? " if found is not None and found != asked else ""
        return f"unknown field {field_name!r}: {hint}valid names here: {', '.join(known)}"
    return f"{field_name}: {str(error).splitlines()[0]}"
