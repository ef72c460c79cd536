"""Benchmarks, tiny: the last line of each is the JSON object that others read. What they measure here means nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 300  # of a benchmark, on a busy machine

pytestmark = pytest.mark.timeout(LIMIT_S + 100)


def last_line(name: str, *options: str) -> dict[str, object]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--rounds", "1", "--json-only", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


def check(result: dict[str, object], name: str, unit: str) -> None:
    assert result["name"] == name
    assert result["unit"] == unit
    assert result["value"] > 0
    assert result["machine"].keys() >= {"cpu", "cores", "python", "torch", "date", "commit"}
    for ratio in result["ratio"].values():
        numbers = ratio.values() if isinstance(ratio, dict) else [ratio]
        assert all(number > 0 for number in numbers)


def test_push_pull() -> None:
    options = ["--seconds", "0.1", "--cases", "1x128,4x300", "--peers", "raw_pyzmq", "--no-train-step"]
    result = last_line("push_pull", *options)
    check(result, "push_pull", "groups/s")
    assert result["ratio"].keys() == {"raw_pyzmq"}
    assert result["ratio"]["raw_pyzmq"].keys() == {"1x128", "4x300"}
    assert result["cpu_us_per_group"]["asyncrl"]["receiver"].keys() == {"1x128", "4x300"}
    assert result["peers_missing"] == []


def test_request_reply() -> None:
    result = last_line("request_reply", "--calls", "50", "--peers", "raw_pyzmq_asyncio")
    check(result, "request_reply", "us")
    assert result["ratio"]["raw_pyzmq_asyncio"].keys() == {"median", "p99"}


def test_redistribute() -> None:
    result = last_line("redistribute", "--prompts", "4", "--group-size", "2", "--longest", "400")
    check(result, "redistribute", "bytes/token")
    assert 1.0 <= result["ratio"]["minimum"] < 1.1  # headers
    assert result["ratio"]["unpruned"] < 1.0


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("baselines/*.json")), ids=lambda path: path.stem)
def test_baselines_are_results(path: Path) -> None:
    result = json.loads(path.read_text())
    check(result, path.stem, result["unit"])
    assert result["rounds"] >= 5
