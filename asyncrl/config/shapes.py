"""Compares what a user wrote with the schema (pure): unknown names, one value in the place of a section or the reverse, and values
of other types, which are converted where their meaning is clear.

Each error has its place and the field that was probably meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from asyncrl.config.fields import Wrong, find_field, hints_of
from asyncrl.config.limits import rule_of
from asyncrl.config.schema import TRACKERS, ConfigError, ExperimentConfig

_REMOVED = {  # fields of earlier releases, with the remedy
    "name_resolve.backend": "names are always in etcd: leave this field out; the launcher starts a private etcd unless "
    "name_resolve.endpoints names your own",
    "name_resolve.path": "names are not kept in files any more: leave this field out; the launcher starts a private etcd",
    "name_resolve.poll_s": "names are not kept in files any more: leave this field out",
}
_MEANT: dict[type, dict[str, str]] = {  # by section: the field that one value in its place probably means
    str: {
        "eval": "prompts.path",
        "train.ptx": "texts.path",
        "rollout.tasks": "default.reward",
        **dict.fromkeys(TRACKERS, "project"),
    },
    int: {
        "train": "batch_size",
        "rollout": "group_size",
        "rollout.sampling": "max_new_tokens",
        "manager": "max_head_offpolicyness",
        "generation": "max_running_requests",
        "weights": "keep",
        "checkpoint": "every_steps",
        "eval": "num_prompts",
        "slurm": "nodes",
        "train.ppo": "epochs",
    },
    float: {"train.optimizer": "lr", "rollout.sampling": "temperature", "train.ppo": "eps_clip", "train.ema": "decay"},
}
_SWITCHED = {  # the same for true and false
    "record": ("trajectories=true", "trajectories=false"),
    "checkpoint": ("every_s=600", "every_s=0"),
    "eval": ("prompts.path=FILE", "prompts=null"),
    "wandb": ("mode=online", "mode=disabled"),
    "trackio": ("mode=enabled", "mode=disabled"),
    "mlflow": ("mode=enabled", "mode=disabled"),
}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "one value"}
_INTERPOLATION = "${"  # in a value that OmegaConf looks up
_CONVERTED = {int: (str,), float: (int, str), bool: (int, str), str: (int, float, bool)}
_TEXTS_OF_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _UnfitError(ValueError):
    """The value does not fit its field. The text names field, value and remedy."""


def fitting(layer: Mapping[Any, Any], written: str = "") -> tuple[dict[str, Any], list[Wrong]]:
    """Return the entries of a layer that fit the schema, each converted to the type of its field, and the others with the remedy.
    Values that are looked up elsewhere (`${trial}`) stay as they are.

    written: the path as the user wrote it in an override.
    """
    walk = _Walk(written)
    return walk.section(layer, ExperimentConfig, ""), walk.wrong


def made_of(values: Mapping[Any, Any]) -> ExperimentConfig:
    """Return the config with these values, none of which is looked up any more. Raises ConfigError."""
    walk = _Walk("", makes=True)
    config: ExperimentConfig = walk.section(values, ExperimentConfig, "")
    if walk.wrong:
        raise ConfigError("\n".join(text for _, text in walk.wrong))
    return config


class _Walk:
    """Walks through entries beside the schema."""

    def __init__(self, written: str, *, makes: bool = False) -> None:
        """makes: whether sections become objects of their classes."""
        self.wrong: list[Wrong] = []
        self._written, self._makes = written, makes

    def section(self, entries: Mapping[Any, Any], section: type, path: str) -> Any:
        declared, fits = {entry.name: entry for entry in fields(section)}, {}
        for key, value in entries.items():
            name = f"{path}.{key}" if path else str(key)
            try:
                if name in _REMOVED:
                    raise _UnfitError(f"removed field {name!r}: {_REMOVED[name]}")
                if key not in declared:
                    raise _UnfitError(self._unknown(name, declared))
                if isinstance(value, bool) and not {"on", "off"}.isdisjoint(rule_of(declared[key]).words):
                    value = _switch_word(value)
                fits[key] = self._value(value, hints_of(section)[key], name)
            except _UnfitError as error:
                self.wrong.append(Wrong(name, str(error)))
        return section(**fits) if self._makes else fits

    def _unknown(self, name: str, declared: Iterable[str]) -> str:
        asked = self._written if self._written.startswith(f"{name}.") else name
        found = find_field(asked)
        hint = f"did you mean {found!r}? " if found is not None and found != asked else ""
        return f"unknown field {name!r}: {hint}valid names here: {', '.join(declared)}"

    def _value(self, value: object, hint: Any, path: str) -> Any:
        """Return the value as its field has it. Raises _UnfitError."""
        if hint is Any or (isinstance(value, str) and value.startswith(_INTERPOLATION) and not self._makes):
            return value
        options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = [option for option in options if option is not NoneType]
        if value is None:
            if NoneType in options:
                return None
            remedy = "is a section without fields; give it some, or leave it out" if is_dataclass(hint) else ""
            raise _UnfitError(
                f"{path}=null: {remedy or f'must have a value; leave it out for the default ({_default(path)!r})'}"
            )
        if is_dataclass(kinds[0]):
            assert isinstance(kinds[0], type)
            if not isinstance(value, Mapping):
                raise _UnfitError(_not_a_section(path, value, kinds[0], optional=NoneType in options))
            return self.section(value, kinds[0], path)
        if get_origin(hint) is dict:
            if not isinstance(value, Mapping):
                meant = _hint(_meant(path, value, None))
                raise _UnfitError(
                    f"{path}={_yaml(value)}: must be a section of names and values; {meant}write {{name: value}}"
                )
            return self._keyed(value, get_args(hint)[1], path)
        if get_origin(hint) is list:
            if not isinstance(value, list):
                meant = "" if isinstance(value, Mapping) else f": write {path}=[{_yaml(value)}]"
                raise _UnfitError(f"{path}={value!r}: must be a list{meant}")
            return [self._value(one, get_args(hint)[0], f"{path}[{at}]") for at, one in enumerate(value)]
        if isinstance(value, Mapping | list):
            kind = "a section" if isinstance(value, Mapping) else "a list"
            leaves = list(_leaves(value))
            meant = f"; did you mean {path}={_yaml(leaves[0])}?" if len(leaves) == 1 else ""
            raise _UnfitError(f"{path}={_yaml(value)}: must be {_words(hint)}, not {kind}{meant}")
        if isinstance(value, str) and _INTERPOLATION in value and not self._makes:
            return value
        try:
            return value if type(value) in kinds else _converted(value, *kinds)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise _UnfitError(f"{path}={value!r}: must be {_words(hint)}") from None

    def _keyed(self, entries: Mapping[Any, Any], hint: Any, path: str) -> dict[str, Any]:
        fits = {}
        for key, value in entries.items():
            try:
                fits[str(key)] = self._value(value, hint, f"{path}.{key}")
            except _UnfitError as error:
                self.wrong.append(Wrong(f"{path}.{key}", str(error)))
        return fits


def _converted(value: object, kind: Any, *others: Any) -> Any:
    """Return a value of another type as the field's only type, or an int as a float. Raises ValueError, TypeError, KeyError or
    OverflowError."""
    is_number = kind is float and type(value) is int
    if (others and not is_number) or type(value) not in _CONVERTED[kind]:
        raise TypeError
    return _TEXTS_OF_BOOL[value.lower()] if kind is bool and isinstance(value, str) else kind(value)


def _not_a_section(path: str, value: object, section: type, *, optional: bool) -> str:
    names = ", ".join(entry.name for entry in fields(section))
    kind = "a list" if isinstance(value, list) else "one value"
    switch = f"{path}={{}}" if value else f"{path}=null"
    meant = switch if optional and isinstance(value, bool) else _meant(path, value, section)
    return f"{path}={_yaml(value)}: must be a section of fields, not {kind}; {_hint(meant)}its fields: {names}"


def _hint(meant: str) -> str:
    return f"did you mean {meant}? " if meant else ""


def _meant(path: str, value: object, section: type | None) -> str:
    """The override that was probably meant by one value in the place of a section; "" if there is none."""
    if isinstance(value, list | Mapping):
        return ""
    words = {"on", "off"} & {_switch_word(value)} or {str(value)}
    entries = fields(section) if section is not None else ()
    for entry in entries:
        if words & set(rule_of(entry).words):
            return f"{path}.{entry.name}={words.pop()}"
    names = {entry.name for entry in entries}
    if isinstance(value, bool):
        return f"{path}.{_SWITCHED[path][not value]}" if path in _SWITCHED else ""
    for kind in (type(value), float) if isinstance(value, int) else (type(value),):
        field = _MEANT.get(kind, {}).get(path, "")
        if not field and kind is str:
            field = next((name for name in ("path", "reward", "mode") if name in names), "")
        if field:
            return f"{path}.{field}={_yaml(value)}"
    return ""


def _switch_word(value: object) -> str:
    """YAML reads on and off as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else ""


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(entry)
    else:
        yield value


def _yaml(value: object) -> str:
    """A value as one writes it in an override."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else repr(value)


def _words(hint: Any) -> str:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if str in options and len(options) > 1:  # such as `int | str`: a number or the word auto
        return f"{_WORDS[options[0]]}, or auto"
    words = [_WORDS[option] for option in options if option in _WORDS]
    return " or ".join([*words, *(["null"] if NoneType in options else [])]) or "another value"


def _default(path: str) -> object:
    value: object = ExperimentConfig()
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
