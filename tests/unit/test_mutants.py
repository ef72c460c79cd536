"""The table of mutants matches the code and the tests. `python tests/oracle/mutants.py` checks that each mutant is killed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tests" / "oracle")
    import mutants

    return mutants


@cache
def names_in(file: str) -> set[str]:
    """Return the names `test_x` and `TestY::test_z` of the tests in a file."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_each_mutant_changes_one_place_and_names_tests_that_exist(mutants: ModuleType) -> None:
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    for mutant in mutants.MUTANTS:
        assert mutants.anchor_problem(mutant) == ""
        assert mutant.changed != mutant.original, mutant.name
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert name in names_in(file), (mutant.name, test)


def test_a_mutant_whose_original_text_is_gone_is_reported(mutants: ModuleType) -> None:
    mutant = mutants.Mutant("gone", "asyncrl/weights/lineage.py", "no such text", "", ())
    assert mutants.anchor_problem(mutant).startswith(
        "gone: its original text occurs 0 times in asyncrl/weights/lineage.py; re-anchor"
    )
