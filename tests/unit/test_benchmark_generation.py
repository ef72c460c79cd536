"""benchmarks/generation.py computes the cost of weight updates. tests/benchmarks runs the script."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("generation_benchmark", BENCHMARKS / "generation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_report_gives_the_cost_of_updates(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = sys.modules["common"].Rounds
    values = {
        "transformers": {"1": [100.0], "64": [1000.0], "every_5s": [990.0]},
        "sglang": {"1": [200.0], "64": [4000.0], "every_5s": [3800.0]},
    }
    args = Namespace(
        rounds=1, json_only=True, write_baseline=False, loads=[1, 64], intervals=[5.0], interrupt="abort",
        engines=["transformers", "sglang"],
    )  # fmt: skip
    benchmark.report(args, rounds(values), {"transformers": [10.0, 30.0, 20.0], "sglang": []})
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["value"], found["engine"], found["peers_missing"]) == (4000.0, "sglang", [])
    assert found["ratio"] == {"no_updates": {"5s": 0.95}, "transformers": {"1": 2.0, "64": 4.0}}
    assert found["lost"] == {"transformers": {"5s": 0.01}, "sglang": {"5s": 0.05}}
    assert found["update_ms"] == {"transformers": 20.0, "sglang": None}
