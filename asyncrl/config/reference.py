"""The reference of the config (pure): each field with type, default, limits, allowed values and meaning.

`asyncrl-launch config` prints it. docs/configuration.md and configs/schema.json (for editors) are made from it. The meaning of a
field is its comment in schema.py: at the end of its line, or on the lines directly above it.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec

from asyncrl.config import schema
from asyncrl.config.fields import default_of, hints_of, section_in
from asyncrl.config.limits import rule_of
from asyncrl.config.schema import ExperimentConfig

KEY = "<name>"  # in a path: a key that the user chooses
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


@dataclass(frozen=True)
class FieldReference:
    """One field. `allowed` is empty where any value of the type is allowed, and `limits` where no limit is declared."""

    path: str
    type: str
    default: str
    limits: str
    allowed: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class _Declared:
    """A field of a section, as its class declares it."""

    path: str
    entry: Field[Any]
    hint: Any
    default: Any
    meaning: str
    section: type | None  # the class below it, if the field holds sections


def all_fields() -> list[FieldReference]:
    """In the order of the schema."""
    return [
        FieldReference(
            path=declared.path,
            type=str(declared.entry.type),
            default=_shown(declared.default),
            limits=", ".join(rule_of(declared.entry).bounds),
            allowed=rule_of(declared.entry).words,
            meaning=declared.meaning,
        )
        for declared in _declared(ExperimentConfig, ExperimentConfig(), "")
        if declared.section is None
    ]


def sections() -> dict[str, str]:
    """Path and docstring of each section."""
    declared = _declared(ExperimentConfig, ExperimentConfig(), "")
    return {one.path: inspect.getdoc(one.section) or "" for one in declared if one.section is not None}


def select(path: str) -> list[FieldReference]:
    """The field of this path; for the path of a section, all fields in it. A name that the user chooses (KEY) matches any part."""
    parts = path.split(".")

    def matches(field: FieldReference) -> bool:
        own = field.path.split(".")[: len(parts)]
        return len(own) == len(parts) and all(a in (b, KEY) for a, b in zip(own, parts, strict=True))

    return [field for field in all_fields() if matches(field)]


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a config file, for editors. Unknown fields are refused, as asyncrl refuses them."""
    found = _object_schema(ExperimentConfig, ExperimentConfig(), "")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "asyncrl", **found}


def schema_text() -> str:
    """The file configs/schema.json. `asyncrl-launch init` writes it beside a config."""
    return msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode() + "\n"


def markdown() -> str:
    """The page docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "This page lists each field of a config. `asyncrl-launch config --markdown` writes it from",
        "`asyncrl/config/schema.py`. `asyncrl-launch config FIELD` prints one field or section in the terminal, and",
        "`asyncrl-launch config --schema` prints a JSON schema, with which an editor completes and checks YAML. The first line",
        "of each shipped config names `configs/schema.json`, and `asyncrl-launch init` writes one beside its config.",
        "",
        f"`{KEY}` in a path stands for a name that you choose. Times are in seconds where a name ends with `_s`, and sizes",
        "in bytes where it ends with `_bytes`.",
    ]
    described, by_section = sections(), defaultdict(list)
    for field in all_fields():
        by_section[field.path.rpartition(".")[0]].append(field)
    for section, members in by_section.items():
        lines += ["", f"## {section or 'The run'}".replace("<", "&lt;"), ""]
        lines += [described[section].partition("\n\n")[0].replace("\n", " "), ""] if described.get(section) else []
        lines += [_entry(field) for field in members]
    return "\n".join(lines) + "\n"


def _entry(field: FieldReference) -> str:
    allowed = " or ".join(f"`{value}`" if value else '`""`' for value in field.allowed) or field.limits
    kind = ", ".join(part for part in (f"`{field.type}`", f"default `{field.default}`", allowed) if part)
    return f"- `{field.path}` ({kind}): {_escaped(field.meaning)}"


def _escaped(text: str) -> str:
    """A "<" outside of code is text, not HTML."""
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(text.split("`")))


# ------------------------------------------------------------------------------------------------------------- fields


def _declared(section: type, value: Any, prefix: str) -> Iterator[_Declared]:
    """value: the section with its defaults; None: it is absent by default."""
    hints, meanings = hints_of(section), _comments()[section.__name__]
    for entry in fields(section):
        path, hint = f"{prefix}{entry.name}", hints[entry.name]
        default = getattr(value, entry.name) if value is not None else default_of(entry)
        below, is_keyed = section_in(hint)
        if below is not None and is_keyed:
            path = f"{path}.{KEY}"
        yield _Declared(path, entry, hint, default, meanings.get(entry.name, ""), below)
        if below is not None:
            yield from _declared(below, default if is_dataclass(default) else None, f"{path}.")


def _shown(value: Any) -> str:
    """Return a default value as YAML writes it."""
    if value is MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else str(value)


@cache
def _comments() -> Mapping[str, Mapping[str, str]]:
    """The comment of each field of schema.py, by class name and field name."""
    source = inspect.getsource(schema)
    found = {
        token.start[0]: (token.string.lstrip("#").strip(), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.name: {
            entry.target.id: _comment_of(entry, found)
            for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _comment_of(entry: ast.AnnAssign, comments: Mapping[int, tuple[str, bool]]) -> str:
    """Return the comment of a field. comments: line number -> text of the comment, and whether it has a line of its own."""
    above: list[str] = []
    line = entry.lineno - 1
    while line in comments and comments[line][1]:
        above.insert(0, comments[line][0])
        line -= 1
    last = entry.end_lineno or entry.lineno
    return " ".join([*above, *(comments[number][0] for number in range(entry.lineno, last + 1) if number in comments)])


# -------------------------------------------------------------------------------------------------------- JSON schema


def _object_schema(section: type, value: Any, prefix: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for declared in _declared(section, value, prefix):
        name = declared.entry.name
        if declared.path.removesuffix(f".{KEY}") != f"{prefix}{name}":
            continue  # of a section below
        if declared.section is None:
            properties[name] = _value_schema(declared)
            continue
        below = declared.default if is_dataclass(declared.default) else None
        inner = _object_schema(declared.section, below, f"{declared.path}.")
        if declared.path.endswith(KEY):
            inner = {"type": "object", "additionalProperties": inner}
        elif NoneType in get_args(declared.hint):
            inner = {"anyOf": [inner, {"type": "null"}]}
        properties[name] = inner
    described = {"description": inspect.getdoc(section)} if section.__doc__ else {}
    return {"type": "object", "additionalProperties": False, **described, "properties": properties}


def _value_schema(declared: _Declared) -> dict[str, Any]:
    found: dict[str, Any] = {"description": declared.meaning} if declared.meaning else {}
    found |= _type_schema(declared.hint)
    rule = rule_of(declared.entry)
    if rule.words:
        inner = found["items"] if found["type"] == "array" else found
        inner["enum"] = list(rule.words)
    bounds = {
        "minimum": rule.at_least,
        "exclusiveMinimum": rule.above,
        "maximum": rule.at_most,
        "exclusiveMaximum": rule.below,
    }
    found |= {name: bound for name, bound in bounds.items() if bound is not None}
    if declared.default is not MISSING:
        found["default"] = declared.default
    return found


def _type_schema(hint: Any) -> dict[str, Any]:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if get_origin(hint) is list:
        return {"type": "array", "items": _type_schema(get_args(hint)[0])}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _type_schema(get_args(hint)[1])}
    if options := get_args(hint):
        return {"type": [_type_schema(option)["type"] for option in options]}
    return {}
