"""Compares what a user wrote with the schema: unknown names, and one value in the place of a section or the reverse (pure).

OmegaConf reports one such error, without its place. Here each has its place and the field that was probably meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from asyncrl.config.fields import Wrong, find_field
from asyncrl.config.limits import allowed_in
from asyncrl.config.schema import ExperimentConfig

_REMOVED = {  # fields of earlier releases, with the remedy
    "name_resolve.backend": "names are always in etcd: leave this field out; the launcher starts a private etcd unless "
    "name_resolve.endpoints names your own",
    "name_resolve.path": "names are not kept in files any more: leave this field out; the launcher starts a private etcd",
    "name_resolve.poll_s": "names are not kept in files any more: leave this field out",
}
_MEANT: dict[type, dict[str, str]] = {  # by section: the field that one value in its place probably means
    str: {"eval": "prompts.path", "train.ptx": "texts.path", "rollout.tasks": "default.reward", "wandb": "project"},
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
}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "one value"}
_INTERPOLATION = "${"  # the beginning of a value that OmegaConf looks up


def wrong_shapes(layer: Mapping[Any, Any], written: str = "") -> Iterator[Wrong]:
    """Yield the entries of a layer that do not fit the schema. written: the path as the user wrote it in an override."""
    yield from _of_section(layer, ExperimentConfig, "", written)


def wrong_value(path: str, value: object) -> str:
    """The text for a value that cannot be converted to the type of its field."""
    return f"{path}={value!r}: must be {_words(_type_at(path))}"


def _of_section(layer: Mapping[Any, Any], section: type, path: str, written: str) -> Iterator[Wrong]:
    hints = _hints(section)
    for key, value in layer.items():
        name = f"{path}.{key}" if path else str(key)
        if name in _REMOVED:
            yield Wrong(name, f"removed field {name!r}: {_REMOVED[name]}")
        elif key not in hints:
            asked = written if written.startswith(f"{name}.") else name
            found = find_field(asked)
            hint = f"did you mean {found!r}? " if found is not None and found != asked else ""
            yield Wrong(name, f"unknown field {name!r}: {hint}valid names here: {', '.join(hints)}")
        else:
            yield from _of_value(value, hints[key], name, written)


def _of_value(value: object, hint: Any, path: str, written: str) -> Iterator[Wrong]:
    if hint is Any or (isinstance(value, str) and value.startswith(_INTERPOLATION)):
        return
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None:
        if NoneType not in options:
            default = _default(path)
            remedy = "is a section without fields; give it some, or leave it out" if is_dataclass(hint) else ""
            yield Wrong(
                path, f"{path}=null: {remedy or f'must have a value; leave it out for the default ({default!r})'}"
            )
        return
    option = next(option for option in options if option is not NoneType)
    if is_dataclass(option):
        assert isinstance(option, type)
        if isinstance(value, Mapping):
            yield from _of_section(value, option, path, written)
        else:
            yield Wrong(path, _not_a_section(path, value, option, optional=NoneType in options))
    elif get_origin(option) is dict:
        if not isinstance(value, Mapping):
            hint = _hint(_meant(path, value, None))
            yield Wrong(
                path, f"{path}={_yaml(value)}: must be a section of names and values; {hint}write {{name: value}}"
            )
            return
        inner = get_args(option)[1]
        for key, entry in value.items():
            yield from _of_value(entry, inner, f"{path}.{key}", written)
    elif get_origin(option) is list:
        if not isinstance(value, list):
            meant = "" if isinstance(value, Mapping) else f": write {path}=[{_yaml(value)}]"
            yield Wrong(path, f"{path}={value!r}: must be a list{meant}")
    elif isinstance(value, Mapping | list):
        kind = "a section" if isinstance(value, Mapping) else "a list"
        leaves = list(_leaves(value))
        meant = f"; did you mean {path}={_yaml(leaves[0])}?" if len(leaves) == 1 else ""
        yield Wrong(path, f"{path}={_yaml(value)}: must be {_words(hint)}, not {kind}{meant}")


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
        if words & set(allowed_in(entry)):
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


def _type_at(path: str) -> Any:
    hint: Any = ExperimentConfig
    for part in path.split("."):
        option = (
            next((one for one in get_args(hint) if one is not NoneType), hint) if isinstance(hint, UnionType) else hint
        )
        if get_origin(option) is dict:
            hint = get_args(option)[1]
        elif is_dataclass(option) and isinstance(option, type):
            hint = _hints(option).get(part, Any)
        else:
            return Any
    return hint


def _default(path: str) -> object:
    value: object = ExperimentConfig()
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)
