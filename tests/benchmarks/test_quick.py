"""Every benchmark with --quick: it ends with exit code 0, and its last line is the JSON object that readers of figures expect."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 400  # one benchmark with --quick takes a minute; the machine may be busy

pytestmark = pytest.mark.timeout(LIMIT_S)

UNITS = {
    "push_pull": "groups/s",
    "push_pull_curve": "groups/s",
    "request_reply": "us",
    "request_reply_curve": "us",
    "manager": "requests/s",
    "weights": "s/GB",
    "weights_adapter": "s",
    "redistribute": "bytes/token",
    "train_step": "tokens/s",
    "logprobs": "MB",
    "plan_accuracy": "% largest error of a peak",
    "generation": "tokens/s",
    "startup": "s",
    "recovery": "s",
}
RATIOS = {
    "push_pull": {"raw_pyzmq": {"4x4096", "8x512", "1x128"}},
    "request_reply": {"raw_pyzmq_asyncio": {"median", "p99"}},
    "manager": {"bare_aiohttp": {"1", "16", "64", "256"}},
}


def load(name: str) -> ModuleType:
    """The script as a module, with `common` from its own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


every = load("all")


@pytest.mark.parametrize("name", list(every.COMMANDS))
def test_quick(name: str) -> None:
    outcome = every.run(name, quick=True, baselines=False)
    assert outcome.error == ""
    result = outcome.result
    assert result["machine"].keys() >= {"cpu", "cores", "python", "torch", "date", "commit"}
    if name == "chaos_matrix":
        assert result["cells"] > 0
        assert result["failed_cells"] == 0
        return
    assert result["rounds"] == 1
    assert result["unit"] == UNITS.get(name, result["unit"])
    if name not in ("soak", "overlap"):  # shares may be 0 in so short a time
        assert result["value"] > 0
    for ratio in result["ratio"].values():
        assert all(number > 0 for number in (ratio.values() if isinstance(ratio, dict) else [ratio]))
    assert {peer: set(cases) for peer, cases in result["ratio"].items() if peer in RATIOS.get(name, {})} == RATIOS.get(
        name, {}
    )
    if specific := SPECIFIC.get(name):
        specific(result)


def check_redistribute(result: dict[str, Any]) -> None:
    assert 1.0 <= result["ratio"]["minimum"] < 1.1  # headers
    assert result["ratio"]["unpruned"] < 1.0


def check_logprobs(result: dict[str, Any]) -> None:
    for case in result["cases"].values():  # without the gradient, which both return: less than half the memory
        assert (case["memory"] - case["gradient_share"]) / (1 - case["gradient_share"]) < 0.5


def check_manager(result: dict[str, Any]) -> None:
    latency = result["latency"]
    for phase in ("idle", "update"):
        assert 0 < latency[f"{phase}_p50_ms"] <= latency[f"{phase}_p99_ms"] <= latency[f"{phase}_max_ms"]
    assert latency["updates"] >= 1


def check_weights(result: dict[str, Any]) -> None:
    for case, phases in result["phases"].items():
        assert list(phases) == ["write", "verify", "load", "rest"]
        assert sum(phases.values()) == pytest.approx(result["cases"][case]["asyncrl_s_per_gb"], rel=0.01)
        assert result["ratio"]["raw_gloo"][case] > 0
        assert result["cases"][case]["broadcast_s_per_gb"] > 0
    assert result["receivers"].keys() == {"1", "2"}
    assert result["receivers"]["2"]["frozen_s"] < 15.0  # half of the limit
    assert result["receivers"]["2"]["longest_step_s"] < 2.0
    assert 1.9 < result["hosts"]["3"]["source_copies"] < 2.1


def check_weights_adapter(result: dict[str, Any]) -> None:
    (case,) = result["cases"].values()
    assert case["adapter_bytes"] < case["full_bytes"] / 4
    assert case["bytes_per_byte_of_matrices"] < 1.05


def check_train_step(result: dict[str, Any]) -> None:
    assert result["ratio"].keys() == result["memory_ratio"].keys() == {"padded"} | set(result["ratio"])


def check_generation(result: dict[str, Any]) -> None:
    assert result["ratio"]["no_updates"].keys() == {"0.5s", "1s"}
    assert set(result["tokens_per_s"]) == {"transformers", "sglang"}
    assert result["peers_missing"] == []


def check_push_pull(result: dict[str, Any]) -> None:
    assert result["cpu_us_per_group"]["asyncrl"]["receiver"].keys() == {"1x128", "4x4096", "8x512"}


SPECIFIC = {
    "push_pull": check_push_pull,
    "redistribute": check_redistribute,
    "logprobs": check_logprobs,
    "manager": check_manager,
    "weights": check_weights,
    "weights_adapter": check_weights_adapter,
    "train_step": check_train_step,
    "generation": check_generation,
}
