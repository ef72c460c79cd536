"""The simulation in benchmarks/scale.py agrees with arithmetic."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SIZES = dict(clients=200, servers=10, groups_a_server=4, batch=20, step_s=5.0, group_s=10.0, seconds=120.0)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("scale")


@pytest.fixture
def run(scale: Any) -> Any:
    return scale.Run(**SIZES)


def test_the_load_of_an_unsaturated_manager_follows_from_its_requests(scale: Any, run: Any) -> None:
    found = scale.simulate(run, service_s=0.001, idle_share=0.0, heartbeats_from=20.0)
    heartbeats = run.clients / run.heartbeat_s
    both = 2 * found["allocations_a_s"]  # a group causes two requests: to allocate it and to finish it
    assert found["utilisation"] == pytest.approx(0.001 * (heartbeats + both), rel=0.2)
    assert found["allocate_p99_ms"] < run.batch + 5.0  # a step frees run.batch tickets at once; each request takes 1 ms
    assert found["slots_idle_for_manager"] < 0.001
    assert found == scale.simulate(run, service_s=0.001, idle_share=0.0, heartbeats_from=20.0)


def test_heartbeats_of_too_many_clients_delay_generation(scale: Any, run: Any) -> None:
    few = scale.simulate(run, service_s=0.005, idle_share=0.1, heartbeats_from=20.0)
    many = scale.simulate(replace(run, clients=600), service_s=0.005, idle_share=0.1, heartbeats_from=20.0)
    assert few["utilisation"] < 1.0 < many["utilisation"]
    assert many["allocate_p50_ms"] > 1000.0 > few["allocate_p99_ms"]
    assert many["slots_idle_for_manager"] > 0.05 > few["slots_idle_for_manager"]


def test_generation_does_not_outrun_training(scale: Any, run: Any) -> None:
    """The number of untrained groups is bounded, so a slow trainer stops generation."""
    found = scale.simulate(
        replace(run, step_s=60.0, seconds=600.0), service_s=0.001, idle_share=0.0, heartbeats_from=0.0
    )
    assert found["steps"] <= 10
    assert found["allocations_a_s"] * 600.0 <= (found["steps"] + 1 + run.eta + 1) * run.batch


@pytest.mark.parametrize("heartbeats_from", [20.0, 60.0, 100.0])
def test_utilisation_counts_the_requests_of_the_measured_time_only(
    scale: Any, run: Any, heartbeats_from: float
) -> None:
    found = scale.simulate(run, service_s=0.001, idle_share=0.0, heartbeats_from=heartbeats_from)
    requests_a_s = run.clients / run.heartbeat_s + 2 * found["allocations_a_s"]
    assert found["utilisation"] == pytest.approx(0.001 * requests_a_s, rel=0.01)
