"""Load a config: merge YAML and dotted overrides onto the defaults, through OmegaConf."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.reader import ReaderError

from asyncrl.config.fields import Wrong, hints_of, section_in
from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.schema import ConfigError, EvalConfig, EvalSetConfig, ExperimentConfig, PromptSourceConfig
from asyncrl.config.shapes import fitting, made_of


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> tuple[ExperimentConfig, list[Wrong]]:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults. Values are not checked yet.

    The presets named by train.algorithm and train.correction are merged after the defaults and before the file. What does not fit
    the schema is left out of the config, and returned with the remedy or the nearest valid name.

    Raises ConfigError if the file or an override cannot be read.
    """
    if not Path(path).is_file():
        raise ConfigError(f"config {str(path)!r} is not a file; `asyncrl-launch init NAME` writes one")
    file = _load(Path(path))
    if not OmegaConf.is_dict(file):
        raise ConfigError(f"{path} has no fields at its top level; write them as `field: value`, a line each")
    fits, unfit = fitting(_entries(file))
    layers, wrong = [fits], [Wrong(field, f"in {path}: {text}") for field, text in unfit]
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} is not of the form key=value, such as train.batch_size=32")
        try:
            written = _entries(OmegaConf.from_dotlist([override]))
        except (YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"override {override!r} cannot be read: {error}") from error
        fits, unfit = fitting(written, key)
        layers.append(fits)
        wrong += unfit
    try:
        values = _merge(layers)
        config = made_of(values)
        return replace(config, eval=_with_rendering(config, layers)), wrong
    except OmegaConfBaseException as error:
        remedy = "${...} takes the path of another field, such as ${trial}"
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; {remedy}") from error


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


def _entries(read: Any, *, resolve: bool = False) -> dict[Any, Any]:
    return OmegaConf.to_container(read, resolve=resolve, throw_on_missing=resolve)  # type: ignore[return-value]


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """The defaults, presets and layers as one set of values, with each `${...}` looked up. Later ones win."""
    defaults = asdict(ExperimentConfig())
    merged = OmegaConf.merge(defaults, *layers)
    presets = [
        known[chosen]
        for name, known in (("algorithm", ALGORITHMS), ("correction", CORRECTIONS))
        if (chosen := str(merged.train[name])) in known  # validate rejects unknown names
    ]
    if presets:
        merged = OmegaConf.merge(defaults, *presets, *layers)
    _fill_sets(merged)
    return _entries(OmegaConf.create(_complete(_entries(merged), ExperimentConfig)), resolve=True)


def _fill_sets(merged: Any) -> None:
    """Give each set of eval.sets the values of `eval` for the fields that it leaves out, and the sampling of evaluations the values
    of rollout.sampling."""
    own, sampling = merged.eval, merged.rollout.sampling
    if own.sampling is not None:
        own.sampling = OmegaConf.merge(sampling, own.sampling)
    shared = {entry.name: own[entry.name] for entry in fields(EvalSetConfig) if entry.name != "prompts"}
    for name, chosen in own.sets.items():
        own.sets[name] = OmegaConf.merge(shared, chosen)
        if own.sets[name].sampling is not None:
            own.sets[name].sampling = OmegaConf.merge(sampling, own.sets[name].sampling)


def _complete(entries: Any, section: type, *, is_keyed: bool = False) -> Any:
    """Add the defaults to sections that are absent by default, so that `${train.critic.optimizer.lr}` finds a value."""
    if not isinstance(entries, dict):
        return entries
    if is_keyed:
        return {key: _complete(one, section) for key, one in entries.items()}
    found = asdict(section()) | entries
    for name, hint in hints_of(section).items():
        below, keyed = section_in(hint)
        if below is not None:
            found[name] = _complete(found[name], below, is_keyed=keyed)
    return found


def _with_rendering(config: ExperimentConfig, layers: Sequence[Mapping[str, Any]]) -> EvalConfig:
    """`eval`, whose chats are rendered like those of prompts, except for fields that the user has written."""
    written, found = OmegaConf.select(OmegaConf.merge(*layers), "eval", throw_on_resolution_failure=False), config.eval
    sets = {}
    for name, chosen in found.sets.items():
        own = OmegaConf.select(written.sets[name], "prompts", throw_on_resolution_failure=False)
        sets[name] = replace(chosen, prompts=_rendered(chosen.prompts, own or {}, config))
    own = OmegaConf.select(written, "prompts", throw_on_resolution_failure=False) if written is not None else None
    return replace(found, prompts=_rendered(found.prompts, own or {}, config), sets=sets)


def _rendered(
    prompts: PromptSourceConfig | None, written: Mapping[str, Any], config: ExperimentConfig
) -> PromptSourceConfig | None:
    if prompts is None or (not prompts.chat_template and "chat_template" in written):
        return prompts
    rendering = ("chat_template", "chat_template_args", "system_prompt")
    return replace(prompts, **{name: getattr(config.prompts, name) for name in rendering if name not in written})
