"""README.md, CONTRIBUTING.md and the pages of docs/ refer only to files and names that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import PAGES as PATHS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *map(ROOT.joinpath, ("README.md", "DESIGN.md", "CONTRIBUTING.md"))]
HISTORY = {"lab-notebook.md"}  # describes earlier states of the repository
_TEST = re.compile(r"`((?:tests|benchmarks|launcher|examples|configs(?!/attempt_))/[\w/.-]+\.\w+)`")
_FILE = re.compile(r"`(asyncrl/[\w/]+\.py)`((?:,? `[\w.]+`)*)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_files_and_names_exist(page: Path) -> None:
    named = _FILE.findall(page.read_text())
    assert named or page.parent.name != "design"  # every page of the design names files
    assert all((ROOT / file).is_file() for file in _TEST.findall(page.read_text()))
    missing = {
        f"{file}:{name}"
        for file, names in _FILE.findall(page.read_text())
        for name in re.findall(r"`([\w.]+)`", names)
        if "." in name or not re.search(rf"^{name}(?:: [^=]+)? = ", (ROOT / file).read_text(), re.MULTILINE)
        if name not in set(defined_in(ast.parse((ROOT / file).read_text())))
    }
    assert not missing


_FUNCTIONS = re.compile(r"`(asyncrl/[\w/]+\.py)`((?:,? `[\w.]+`)+)")


def defined_in(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all classes and functions, including nested ones."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}."
            yield name.removesuffix(".")
        yield from defined_in(child, name)


@pytest.mark.parametrize("kind", PATHS)
def test_the_functions_of_a_path_exist(kind: str) -> None:
    """After a rename, run `python -m tests.support.paths --write`."""
    rows = _FUNCTIONS.findall(" ".join(PATHS[kind].read_text().split()))
    assert len(rows) > 20
    missing = {
        f"{file}:{name}"
        for file, names in rows
        for name in set(re.findall(r"[\w.]+", names)) - set(defined_in(ast.parse((ROOT / file).read_text())))
    }
    assert not missing
