"""benchmarks/generation.py: a tiny run ends with the line that is promised; what is lost to updates is computed right."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from asyncrl.testing.tiny import make_tiny_model

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


@pytest.mark.timeout(200)
def test_a_tiny_run(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", hidden_size=32, intermediate_size=64, num_layers=1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "12"}\n{"prompt": "345"}\n')
    done = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "generation.py", "--rounds", "1", "--json-only", "--example", tmp_path),
            *("--seconds", "0.3", "--loads", "1", "2", "--intervals", "0.2", "--sglang-python", "/no/such/python"),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["name"], found["unit"], found["engine"]) == ("generation", "tokens/s", "transformers")
    assert found["value"] > 0
    assert found["ratio"].keys() == {"no_updates"}
    assert found["ratio"]["no_updates"]["0.2s"] > 0
    assert found["tokens_per_s"]["transformers"].keys() == {"1", "2", "every_0.2s"}
    assert found["update_ms"]["transformers"] > 0
    assert found["peers_missing"] == ["sglang"]


def test_what_updates_cost(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
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
