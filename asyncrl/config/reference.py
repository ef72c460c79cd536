"""The reference of the config (pure): each field with type, default, limits, allowed values and meaning.

`asyncrl-launch config` prints it. docs/configuration.md and configs/schema.json (for editors) are made from it. The meaning of a
field is its comment in schema.py: at the end of its line, or on the lines directly above it.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from asyncrl.config import schema
from asyncrl.config.fields import sections_of, values_in
from asyncrl.config.limits import rule_of
from asyncrl.config.schema import ExperimentConfig

KEY = "<name>"  # in a path: a key that the user chooses
# The fields that nearly every config sets
FIRST = (
    "experiment",
    "allocation",
    "model_path",
    "prompts.path",
    "rollout.tasks.<name>.reward",
    "rollout.group_size",
    "rollout.sampling.max_new_tokens",
    "manager.max_head_offpolicyness",
    "train.algorithm",
    "train.batch_size",
    "train.max_steps",
    "train.max_tokens_per_mb",
    "train.optimizer.lr",
)


@dataclass(frozen=True)
class FieldReference:
    """One field. `allowed` is empty where any value of the type is allowed, and `limits` where no limit is declared."""

    path: str
    type: str
    default: str
    limits: str
    allowed: tuple[str, ...]
    meaning: str


def all_fields() -> list[FieldReference]:
    """By section, in the order of the schema."""
    return [
        FieldReference(
            path=f"{prefix}{entry.name}",
            type=str(entry.type),
            default=_shown(getattr(section, entry.name)),
            limits=", ".join(rule_of(entry).bounds),
            allowed=rule_of(entry).words,
            meaning=_comment(type(section), entry.name),
        )
        for prefix, section in sections_of(KEY)
        for entry in values_in(section)
    ]


def select(path: str) -> list[FieldReference]:
    """The field of this path; for the path of a section, all fields in it. A name that the user chooses (KEY) matches any part."""
    parts = path.split(".")

    def matches(field: FieldReference) -> bool:
        own = field.path.split(".")[: len(parts)]
        return len(own) == len(parts) and all(a in (b, KEY) for a, b in zip(own, parts, strict=True))

    return [field for field in all_fields() if matches(field)]


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a config file, for editors. Unknown fields are refused, as asyncrl refuses them."""
    found = msgspec.json.schema(ExperimentConfig)
    for _, section in sections_of(KEY):
        declared = found["$defs"][type(section).__name__]
        declared["additionalProperties"] = False
        for entry in values_in(section):
            rule, about = rule_of(entry), declared["properties"][entry.name]
            bounds = {
                "minimum": rule.at_least,
                "exclusiveMinimum": rule.above,
                "maximum": rule.at_most,
                "exclusiveMaximum": rule.below,
            }
            about |= {name: bound for name, bound in bounds.items() if bound is not None}
            about["description"] = _comment(type(section), entry.name)
            about["default"] = getattr(section, entry.name)
            if rule.words:
                about.get("items", about)["enum"] = list(rule.words)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


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
        "",
        "## The fields to begin with",
        "",
        "Nearly every config sets some of these. The others have defaults that suit a first run.",
        "",
        "| field | default | meaning |",
        "|---|---|---|",
        *(
            f"| `{field.path}` | `{field.default}` | {_brief(field.meaning)} |"
            for path in FIRST
            for field in select(path)
        ),
    ]
    about = {prefix.rstrip("."): inspect.getdoc(section) or "" for prefix, section in sections_of(KEY)}
    for section, members in itertools.groupby(all_fields(), lambda field: field.path.rpartition(".")[0]):
        lines += ["", f"## {section or 'The run'}".replace("<", "&lt;"), ""]
        lines += [about[section].partition("\n\n")[0].replace("\n", " "), ""] if section else []
        lines += [_entry(field) for field in members]
    return "\n".join(lines) + "\n"


def _entry(field: FieldReference) -> str:
    allowed = " or ".join(f"`{value}`" if value else '`""`' for value in field.allowed) or field.limits
    kind = ", ".join(part for part in (f"`{field.type}`", f"default `{field.default}`", allowed) if part)
    return f"- `{field.path}` ({kind}): {_escaped(field.meaning)}"


def _brief(meaning: str) -> str:
    """The first sentence of a meaning."""
    return _escaped(re.split(r"[.;] ", meaning)[0].rstrip("."))


def _escaped(text: str) -> str:
    """A "<" outside of code is text, not HTML."""
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(text.split("`")))


# ------------------------------------------------------------------------------------------------------------- fields


def _shown(value: Any) -> str:
    """Return a default value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else str(value)


def _comment(section: type, name: str) -> str:
    """The comment of a field, which the section's class or one of its bases declares."""
    return next((found[name] for base in section.__mro__ if name in (found := _comments().get(base.__name__, {}))), "")


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
    first = entry.lineno
    while first - 1 in comments and comments[first - 1][1]:
        first -= 1
    numbers = range(first, (entry.end_lineno or entry.lineno) + 1)
    return " ".join(comments[number][0] for number in numbers if number in comments)
