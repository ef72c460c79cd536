"""Finds code that decides by the name of a kind, such as an engine or a mode, in place of its traits."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import asyncrl

PACKAGE = Path(asyncrl.__file__).parent


def decisions(names: set[str], tables: Collection[Path]) -> set[str]:
    """The places outside the kind's own files that decide by one of the names: `file:line`, below asyncrl/."""
    return {
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in {*PACKAGE.rglob("*.py")}.difference(tables)
        for line in comparisons(ast.parse(file.read_text()), names)
    }


def comparisons(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Yield the lines that decide by one of the names: ==, !=, in, match, startswith, and dicts with such keys."""

    def named(node: ast.AST | None) -> bool:
        texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant)) if node is not None else ()
        return any(isinstance(text, str) and text.removesuffix(".") in names for text in texts)

    for node in ast.walk(tree):
        if (
            (isinstance(node, ast.Compare) and any(map(named, (node.left, *node.comparators))))
            or (isinstance(node, ast.MatchValue) and named(node))
            or (isinstance(node, ast.Dict) and any(map(named, node.keys)))
            or (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("startswith", "endswith")
                and any(map(named, node.args))
            )
        ):
            yield node.lineno
