"""Load a config: merge YAML and dotted overrides onto the defaults, through OmegaConf."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import omegaconf
from omegaconf import OmegaConf, dictconfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from asyncrl.config.fields import find_field
from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.schema import ConfigError, ExperimentConfig

_REMOVED = {  # fields of earlier releases, with the remedy
    "name_resolve.backend": "names are always in etcd: leave this field out; the launcher starts a private etcd unless "
    "name_resolve.endpoints names your own",
    "name_resolve.path": "names are not kept in files any more: leave this field out; the launcher starts a private etcd",
    "name_resolve.poll_s": "names are not kept in files any more: leave this field out",
}
_MERGES_INTO_FROZEN = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)
_patching = threading.Lock()


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults. Values are not checked yet.

    The presets named by train.algorithm and train.correction are merged after the defaults and before the file.

    Raises ConfigError with the field, its value and the remedy or the nearest valid name.
    """
    if not Path(path).is_file():
        raise ConfigError(f"config {str(path)!r} is not a file; `asyncrl-launch init NAME` writes one")
    try:
        layers = [(str(path), OmegaConf.load(path))]
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not OmegaConf.is_dict(layers[0][1]):
        raise ConfigError(f"{path} has no fields at its top level; write them as `field: value`, a line each")
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
        if (chosen := merged.train[name]) in known  # validate rejects unknown names
    ]
    if presets:
        merged = _merge([*presets, *layers])
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ExperimentConfig)
    return replace(
        config,
        recover=_switch(config.recover),
        network=replace(config.network, authenticate=_switch(config.network.authenticate)),
        plan=replace(config.plan, enforce=_switch(config.plan.enforce)),
    )


def _switch(value: str) -> str:
    """Undo YAML's reading of on and off as true and false."""
    return {"True": "on", "False": "off"}.get(value, value)


def _merge(layers: Sequence[tuple[str, Any]]) -> Any:
    """Merge layers, each with its source, onto the defaults; later ones win."""
    merged: Any = ExperimentConfig
    for source, layer in layers:
        try:
            merged = merge_into(merged, layer)
        except OmegaConfBaseException as error:
            raise ConfigError(f"in {source}: {_explain(error, source.partition('=')[0])}") from error
    return merged


def merge_into(base: Any, layer: Any) -> Any:
    """OmegaConf.merge onto a frozen dataclass, or onto a config that this function made from one.

    OmegaConf before 2.4 makes each node of a frozen dataclass read-only, including nodes that the merge itself adds, and then
    fails to write into them. With those versions this function hides from OmegaConf that the classes are frozen. Hydra 1.3 needs
    such a version.
    """
    if _MERGES_INTO_FROZEN:
        return OmegaConf.merge(base, layer)
    with _patching:
        module: Any = dictconfig
        is_frozen = module.is_structured_config_frozen
        module.is_structured_config_frozen = lambda _: False
        try:
            return OmegaConf.merge(base, layer)
        finally:
            module.is_structured_config_frozen = is_frozen


def _explain(error: OmegaConfBaseException, written: str) -> str:
    """Describe an OmegaConf error with field and remedy. written: the path as the user wrote it in an override; the
    error may name only a part of that path."""
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
