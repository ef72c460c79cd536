"""Load a config: merge YAML and dotted overrides onto the defaults, through OmegaConf."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import omegaconf
from omegaconf import OmegaConf, dictconfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.reader import ReaderError

from asyncrl.config.fields import Wrong
from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.schema import ConfigError, ExperimentConfig, PromptSourceConfig
from asyncrl.config.shapes import wrong_shapes, wrong_value

_MERGES_INTO_FROZEN = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)
_patching = threading.Lock()
_NOTHING = object()


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> tuple[ExperimentConfig, list[Wrong]]:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults. Values are not checked yet.

    The presets named by train.algorithm and train.correction are merged after the defaults and before the file. What does not fit
    the schema is left out of the config, and returned with the remedy or the nearest valid name.

    Raises ConfigError if the file or an override cannot be read.
    """
    if not Path(path).is_file():
        raise ConfigError(f"config {str(path)!r} is not a file; `asyncrl-launch init NAME` writes one")
    layers = [(str(path), _load(Path(path)))]
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
    wrong = list[Wrong]()
    layers = [(source, _fitting(source, layer, wrong)) for source, layer in layers]
    merged = _merge(layers, wrong)
    try:
        presets = [
            (f"train.{name}={chosen}", OmegaConf.create(known[chosen]))
            for name, known in (("algorithm", ALGORITHMS), ("correction", CORRECTIONS))
            if (chosen := merged.train[name]) in known  # validate rejects unknown names
        ]
        if presets:
            merged = _merge([*presets, *layers], [])
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        remedy = "${...} takes the path of another field, such as ${trial}"
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; {remedy}") from error
    assert isinstance(config, ExperimentConfig)
    config = replace(
        config,
        eval=replace(config.eval, prompts=_eval_prompts(config, [layer for _, layer in layers])),
        recover=_switch(config.recover),
        network=replace(config.network, authenticate=_switch(config.network.authenticate)),
        plan=replace(config.plan, enforce=_switch(config.plan.enforce)),
        weights=replace(config.weights, fetch=_switch(config.weights.fetch)),
        train=replace(config.train, mismatch=_switch(config.train.mismatch)),
    )
    return config, wrong


def _load(path: Path) -> Any:
    """Read the file; a byte order mark at its start is skipped. Raises ConfigError with the line."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
        return OmegaConf.load(io.StringIO(text))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line} is not YAML: {error}; save the file as UTF-8") from error
    except ReaderError as error:  # a control character
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{path}:{line} is not YAML: the character #x{ord(text[error.position]):04x} is not allowed"
        ) from error
    except YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _eval_prompts(config: ExperimentConfig, layers: Sequence[Any]) -> PromptSourceConfig | None:
    """eval.prompts, whose chats are rendered like those of prompts, except for fields that the user has written."""
    prompts = config.eval.prompts
    written = OmegaConf.select(OmegaConf.merge(*layers), "eval.prompts", throw_on_resolution_failure=False) or {}
    if prompts is None or (not prompts.chat_template and "chat_template" in written):
        return prompts
    rendering = ("chat_template", "chat_template_args", "system_prompt")
    return replace(prompts, **{name: getattr(config.prompts, name) for name in rendering if name not in written})


def _switch(value: str) -> str:
    """Undo YAML's reading of on and off as true and false."""
    return {"True": "on", "False": "off"}.get(value, value)


def _fitting(source: str, layer: Any, wrong: list[Wrong]) -> Any:
    """The layer without the entries that do not fit the schema, which are added to wrong."""
    entries = OmegaConf.to_container(layer, resolve=False)
    assert isinstance(entries, dict)
    for field, text in list(wrong_shapes(entries, source.partition("=")[0])):
        wrong.append(Wrong(field, _placed(source, text)))
        _remove(entries, field)
    return OmegaConf.create(entries)


def _placed(source: str, text: str) -> str:
    """The text, with the source if that is a file. An override is one field, which the text names."""
    return text if "=" in source else f"in {source}: {text}"


def _merge(layers: list[tuple[str, Any]], wrong: list[Wrong]) -> Any:
    """Merge layers, each with its source, onto the defaults; later ones win. Values that cannot be converted are removed from their
    layers, and added to wrong."""
    try:
        return merge_into(_defaults(), *(layer for _, layer in layers))
    except OmegaConfBaseException:
        merged = _defaults()  # find the layer and the field
    for at, (source, layer) in enumerate(layers):
        while True:
            try:
                merged = merge_into(merged, layer)
                break
            except OmegaConfBaseException as error:
                field = error.full_key
                entries = OmegaConf.to_container(layer, resolve=False)
                assert isinstance(entries, dict)
                if not field or (removed := _remove(entries, field)) is _NOTHING:
                    raise ConfigError(f"in {source}: {str(error).splitlines()[0]}") from error
                wrong.append(Wrong(field, _placed(source, wrong_value(field, removed))))
                layer = OmegaConf.create(entries)
                layers[at] = source, layer
    return merged


@functools.cache
def _defaults() -> Any:
    return merge_into(ExperimentConfig)


def _remove(entries: dict[Any, Any], field: str) -> object:
    """Remove the field from nested entries. Returns its value, or _NOTHING if it is not there."""
    *sections, name = field.split(".")
    for section in sections:
        entries = entries.get(section, {})
        if not isinstance(entries, dict):
            return _NOTHING
    return entries.pop(name, _NOTHING)


def merge_into(base: Any, *layers: Any) -> Any:
    """OmegaConf.merge onto a frozen dataclass, or onto a config that this function made from one.

    OmegaConf before 2.4 makes each node of a frozen dataclass read-only, including nodes that the merge itself adds, and then
    fails to write into them. With those versions this function hides from OmegaConf that the classes are frozen. Hydra 1.3 needs
    such a version.
    """
    if _MERGES_INTO_FROZEN:
        return OmegaConf.merge(base, *layers)
    with _patching:
        module: Any = dictconfig
        is_frozen = module.is_structured_config_frozen
        module.is_structured_config_frozen = lambda _: False
        try:
            return OmegaConf.merge(base, *layers)
        finally:
            module.is_structured_config_frozen = is_frozen
