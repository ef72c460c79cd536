"""The user-visible surface: commands with their options, config fields with type and default, claims of docs/verification.md.

An entry is a name and a value, such as `field train.batch_size` and `int = 64`. `surface.json` holds the entries of the base commit
and never changes. `surface_changes.md` lists every intended difference from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLAIM_WORDS = 8  # a claim's name consists of this many of its first words
NOTHING = "-"

Entries = dict[str, str]


def read_base() -> Entries:
    entries: Entries = json.loads((HERE / "surface.json").read_text(encoding="utf-8"))
    return entries


def read_checkout() -> Entries:
    from asyncrl.cli.main import _parser
    from asyncrl.config.schema import ExperimentConfig

    return (
        _commands(_parser()) | _fields(ExperimentConfig(), "") | _claims(HERE.parents[1] / "docs" / "verification.md")
    )


# ------------------------------------------------------------------------------------------------------------- entries


def _commands(parser: argparse.ArgumentParser) -> Entries:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    entries = {f"option {name}": value for name, value in _options(parser)}
    for command, of_command in commands.choices.items():
        entries[f"command {command}"] = ""
        entries |= {f"option {command} {name}": value for name, value in _options(of_command)}
    return entries


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Name and value of each option and positional argument. Defaults are left out: some depend on the machine."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        name = max(action.option_strings, key=len, default=action.dest)
        others = sorted(set(action.option_strings) - {name})
        takes = "a flag" if action.nargs == 0 else f"takes {action.nargs or 1}"
        choices = f", one of {', '.join(map(str, action.choices))}" if action.choices else ""
        found.append((name, takes + choices + "".join(f", also {other}" for other in others)))
    return found


def _fields(config: Any, prefix: str) -> Entries:
    """Every field of a config, recursively; `<name>` stands for the keys of a dict of configs, `<item>` for items of a list."""
    entries: Entries = {}
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            entries |= _fields(value, f"{name}.")
            continue
        entries[f"field {name}"] = f"{field.type} = {value!r}"
        inner, place = _inner(hints[field.name])
        if inner is not None:
            entries |= _fields(inner(), f"{name}{place}.")
    return entries


def _inner(hint: Any) -> tuple[Any, str]:
    """Return the config class in a hint such as `CriticConfig | None` or `dict[str, TaskConfig]`, and its place in a field's name:
    ".<name>" in a dict, ".<item>" in a list, else "". The class is None if the hint has none."""
    for argument in typing.get_args(hint):
        if dataclasses.is_dataclass(argument):
            return argument, {dict: ".<name>", list: ".<item>"}.get(typing.get_origin(hint), "")
    return None, ""


def _claims(page: Path) -> Entries:
    """Rows of the tables below "What is measured"; a claim is named by its first words."""
    _, found, section = page.read_text(encoding="utf-8").partition("\n## What is measured\n")
    if not found:
        raise RuntimeError(f"{page} has no section 'What is measured'")
    rows = [_cells(line) for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    entries: Entries = {}
    for claim, shown_by in rows:
        if claim == "claim" or set(claim) == {"-"}:  # the head of a table
            continue
        words = _normalised(claim).split()
        name = f"claim: {' '.join(words[:CLAIM_WORDS])}"
        if name in entries:
            raise RuntimeError(f"{page}: two claims begin with {name!r}; give one of them another beginning")
        entries[name] = f"{' '.join(words[CLAIM_WORDS:])} | shown by {_normalised(shown_by)}"
    return entries


def _normalised(text: str) -> str:
    """The text without backticks and with single spaces; of a link only its text remains."""
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").split())


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


# ------------------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True)
class Change:
    """A row of surface_changes.md: an entry's old and new name. A name that ends with `*` covers all entries with this prefix."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"`{self.old}` -> `{self.new}`"


def read_changes(text: str) -> list[Change]:
    rows = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    changes = []
    for row in rows[2:]:
        if len(row) != 3 or not row[2] or not all(re.fullmatch(rf"`[^`]+`|{NOTHING}", name) for name in row[:2]):
            raise RuntimeError(f"surface_changes.md: {row} is not `old` | `new` | reason, with - for nothing")
        changes.append(Change(row[0].strip("`"), row[1].strip("`")))
    return changes


def unexplained(base: Mapping[str, str], checkout: Mapping[str, str], changes: list[Change]) -> list[str]:
    """Differences that no change lists, and changes that match no difference."""
    removed = base.keys() - checkout.keys()
    added = checkout.keys() - base.keys()
    changed = {name for name in base.keys() & checkout.keys() if base[name] != checkout[name]}
    problems = [
        f"{name} was removed" for name in sorted(removed) if not any(_covers(change.old, name) for change in changes)
    ]
    problems += [
        f"{name} was added" for name in sorted(added) if not any(_covers(change.new, name) for change in changes)
    ]
    problems += [
        f"{name} was {base[name]!r} and is {checkout[name]!r}"
        for name in sorted(changed)
        if not any(_covers(change.old, name) and _covers(change.new, name) for change in changes)
    ]
    for change in changes:
        old = change.old == NOTHING or any(_covers(change.old, name) for name in removed | changed)
        new = change.new == NOTHING or any(_covers(change.new, name) for name in added | changed)
        if not (old and new) or change == Change(NOTHING, NOTHING):
            problems.append(f"surface_changes.md lists {change}, and there is no such difference")
    return problems


def _covers(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def check() -> tuple[list[str], str]:
    base, checkout = read_base(), read_checkout()
    changes = read_changes((HERE / "surface_changes.md").read_text(encoding="utf-8"))
    return unexplained(base, checkout, changes), f"{len(checkout)} entries, {len(changes)} rows of intended changes"


if __name__ == "__main__":  # prints the entries of this checkout
    sys.path.insert(0, str(HERE.parents[1]))
    print(json.dumps(read_checkout(), indent=0, ensure_ascii=False))
