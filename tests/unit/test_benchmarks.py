"""Committed baselines have the format that tables and readers expect. tests/benchmarks runs the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("baselines/*.json")), ids=lambda path: path.stem)
def test_baselines_are_results(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["name"] == path.stem
    assert result["value"] > 0
    assert result["rounds"] >= 5
    assert result["machine"].keys() >= {"cpu", "cores", "python", "torch", "date", "commit"}
    for ratio in result["ratio"].values():
        assert all(number > 0 for number in (ratio.values() if isinstance(ratio, dict) else [ratio]))
