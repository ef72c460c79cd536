"""The oracle accepts this checkout's surface, and reports differences in surface and in weights."""

from __future__ import annotations

import pytest
import torch

from tests.oracle.surface import HERE, Change, read_base, read_changes, read_checkout, unexplained
from tests.oracle.weights import BASE_TOLERANCE, compare

BASE = {"field a": "int = 1", "field b.c": "int = 2", "field b.d": "int = 3", "command replay": ""}


def test_the_surface_is_the_base_and_the_listed_changes() -> None:
    changes = read_changes((HERE / "surface_changes.md").read_text(encoding="utf-8"))
    assert unexplained(read_base(), read_checkout(), changes) == []


def test_an_unlisted_difference_is_reported() -> None:
    checkout = {"field a": "int = 2", "field b.c": "int = 2", "command replay": "", "command host": ""}
    assert unexplained(BASE, checkout, []) == [
        "field b.d was removed",
        "command host was added",
        "field a was 'int = 1' and is 'int = 2'",
    ]


def test_listed_differences_are_accepted() -> None:
    checkout = {"field a": "int = 2", "command host": ""}
    text = """
| old | new | reason |
|---|---|---|
| `field a` | `field a` | another default |
| `field b.*` | - | removed |
| `command replay` | `command host` | renamed |
"""
    assert unexplained(BASE, checkout, read_changes(text)) == []


@pytest.mark.parametrize(
    "change",
    [
        Change("field a", "-"),
        Change("field z.*", "-"),
        Change("-", "command host"),
        Change("field a", "field a"),
        Change("-", "-"),
    ],
)
def test_a_stale_row_is_reported(change: Change) -> None:
    assert unexplained(BASE, BASE, [change]) == [f"surface_changes.md lists {change}, and there is no such difference"]


def test_a_removal_does_not_cover_a_changed_default() -> None:
    checkout = {**BASE, "field a": "int = 2"}
    assert unexplained(BASE, checkout, [Change("field a", "-")]) == ["field a was 'int = 1' and is 'int = 2'"]


@pytest.mark.parametrize("row", ["| `field a` | - | |", "| field a | - | removed |", "| `field a` | removed |"])
def test_a_malformed_row_is_refused(row: str) -> None:
    with pytest.raises(RuntimeError, match="with - for nothing"):
        read_changes(f"| old | new | reason |\n|---|---|---|\n{row}\n")


def test_weights_within_the_tolerance_are_equal() -> None:
    expected = {"w": torch.zeros(3)}
    assert compare(expected, {"w": torch.tensor([0.0, 5e-7, 0.0])}, BASE_TOLERANCE) == (pytest.approx(5e-7), [])


def test_weights_that_differ_are_reported() -> None:
    expected = {"w": torch.zeros(3), "missing": torch.zeros(1), "shape": torch.zeros(2), "nan": torch.zeros(1)}
    found = {
        "w": torch.tensor([0.0, 2e-6, 0.0]),
        "new": torch.zeros(1),
        "shape": torch.zeros(3),
        "nan": torch.tensor([torch.nan]),
    }
    largest, problems = compare(expected, found, BASE_TOLERANCE)
    assert largest == float("inf")
    assert problems == [
        "missing is missing",
        "new is new",
        "nan differs by inf",
        "shape: [2] torch.float32 became [3] torch.float32",
        "w differs by 2e-06",
    ]
