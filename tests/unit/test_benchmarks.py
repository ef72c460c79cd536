"""Committed baselines have the format that tables and readers expect. tests/benchmarks runs the benchmarks."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DOCS = BENCHMARKS.parent / "docs"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("baselines/*.json")), ids=lambda path: path.stem)
def test_baselines_are_results(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["name"] == path.stem
    assert result["value"] > 0
    assert result["rounds"] >= 5
    assert result["machine"].keys() >= {"cpu", "cores", "python", "torch", "date", "commit"}
    for ratio in result["ratio"].values():
        assert all(number > 0 for number in (ratio.values() if isinstance(ratio, dict) else [ratio]))


def test_pages_tell_the_cells_of_the_chaos_matrix_that_exist_and_that_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    matrix = importlib.import_module("chaos_matrix")
    num_cells = len(matrix.TARGETS) * len(matrix.KINDS) * len(matrix.PHASES)
    pages = {name: (DOCS / name).read_text() for name in ("verification.md", "design/recovery.md", "faults.md")}
    for name in ("verification.md", "design/recovery.md"):
        assert f"all {num_cells} cells" in pages[name]
    table = (DOCS / "chaos-matrix.md").read_text()
    num_measured = len(re.findall(r"\| ok [\d.]+ s ", table))  # without the column `the run`
    assert f"\n{num_measured} cells in " in table
    for page in pages.values():
        assert re.search(rf"\b{num_measured} (cells|without the nursery)", page)


@pytest.mark.parametrize(
    ("script", "result", "error"),
    [
        # The processes of a benchmark share its stderr, and may write to it after the result
        ("print('progress'); print('{\"value\": 3}', flush=True); print('late', file=sys.stderr)", {"value": 3}, ""),
        ("print('begun'); sys.exit('no model')", {}, "exit code 1\nbegun\nno model"),
        (
            "print('begun', flush=True); time.sleep(60)",
            {},
            "long did not end within its time limit; exit code -15\nbegun",
        ),
    ],
    ids=["result", "failed", "late"],
)
def test_the_result_of_a_benchmark_is_the_last_line_of_its_stdout(
    script: str, result: dict[str, int], error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    every = importlib.import_module("all")
    (tmp_path / "long.py").write_text(f"import sys, time\n{script}\n")
    monkeypatch.setattr(every, "HERE", tmp_path)
    monkeypatch.setattr(every, "_QUICK_LIMIT_S", 5.0)
    monkeypatch.setitem(every.COMMANDS, "long", ("long.py",))
    outcome = every.run("long", quick=True, baselines=False)
    assert (outcome.result, outcome.error) == (result, error)
