"""benchmarks/manager.py, weights.py, end_to_end.py: tiny runs end with the line that is promised; files of runs are read right."""

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def last_line(*command):
    """The result of a benchmark run as a user runs it."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def end_to_end(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("end_to_end_benchmark", BENCHMARKS / "end_to_end.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(240)
def test_manager_measures_capacity_and_latency(tmp_path):
    found = last_line(
        BENCHMARKS / "manager.py",
        *("--rounds", 1, "--clients", 4, "--seconds", 1, "--open-seconds", 3, "--version-mb", 1),
        *("--folder", tmp_path, "--json-only"),
    )
    assert found["name"] == "manager"
    assert found["unit"] == "requests/s"
    assert found["value"] > 0
    assert set(found["ratio"]["bare_aiohttp"]) == {"4"}
    latency = found["latency"]
    for phase in ("idle", "update"):
        assert 0 < latency[f"{phase}_p50_ms"] <= latency[f"{phase}_p99_ms"] <= latency[f"{phase}_max_ms"]
    assert latency["updates"] >= 1
    assert found["peers_missing"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(240)
def test_weights_measures_phases(tmp_path):
    found = last_line(BENCHMARKS / "weights.py", "--rounds", 1, "--sizes", 1, "--folder", tmp_path, "--json-only")
    assert found["name"] == "weights"
    assert found["unit"] == "s/GB"
    assert found["value"] > 0
    assert found["ratio"]["copy_fsync"]["1MB"] > 0
    assert found["ratio"]["raw_gloo"]["1MB"] > 0
    assert found["cases"]["1MB"]["broadcast_s_per_gb"] > 0
    phases = found["phases"]["1MB"]
    assert list(phases) == ["write", "verify", "load", "rest"]
    assert sum(phases.values()) == pytest.approx(found["cases"]["1MB"]["asyncrl_s_per_gb"], rel=0.01)
    assert list(tmp_path.iterdir()) == []


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_end_to_end_reads_a_run(end_to_end, tmp_path):
    rewards = [0.1, 0.6, 0.9, 0.9, 0.9]
    steps = [
        {"step": i + 1, "time": 102.0 + 2 * i, "time/step_s": 2.0, "reward/mean": reward}
        | {"batch/num_generated_tokens": 40.0}
        for i, reward in enumerate(rewards)
    ]
    write_lines(tmp_path / "metrics.jsonl", steps)
    write_lines(
        tmp_path / "journal" / "generation_server_0.jsonl",
        [{"time": 100.0 + i / 10, "tokens": 3, "version": "a0001-v00000000"} for i in range(-20, 25)],
    )
    write_lines(tmp_path / "journal" / "generation_server_1.jsonl", [{"time": 101.0, "tokens": 3, "version": "v"}] * 2)
    summary = {
        "trainer_waits_data_share": 0.25,
        "head_offpolicyness_mean": 1.5,
        "head_offpolicyness_max": 2.0,
        "dropped_groups": 0,
        "rejected": {"too_hard": 2, "too_easy": 1},
        "trained_response_length_mean": 9.0,
        "finished_response_length_mean": 10.0,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = Namespace(run_dir=tmp_path)
    found = end_to_end.measure(run, 0.79)
    assert found["to_target_s"] == 8.0  # (0.6 + 0.9 + 0.9) / 3, at the fourth step, 100 -> 108
    assert found["steps_s"] == 10.0
    assert found["tokens_per_s"] == 20.0
    assert found["servers_idle"] == pytest.approx((0.75 + 0.99) / 2)
    assert found["length_bias"] == 0.9
    assert found["rejected"] == 3
    assert end_to_end.measure(run, 0.95)["to_target_s"] == float("inf")
    assert end_to_end.measure(run, 0.0)["to_target_s"] == 10.0


def test_end_to_end_tells_what_was_not_reached(end_to_end, capsys):
    case = {key: [1.0, 1.0, 1.0] for key in end_to_end.COLUMNS}
    inf = float("inf")
    rounds = end_to_end.Rounds(
        {
            "eta0": case | {"to_target_s": [40.0, 50.0, 60.0]},
            "eta2": case | {"to_target_s": [20.0, 25.0, inf]},
            "eta4": case | {"to_target_s": [20.0, inf, inf]},
        }
    )
    args = Namespace(
        rounds=3,
        json_only=False,
        write_baseline=False,
        config=end_to_end.QUICKSTART,
        etas=[0, 2, 4],
        steps=0,
        target=0.8,
    )
    end_to_end.report(args, rounds)
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert (found["name"], found["value"], found["unit"]) == ("end_to_end", 25.0, "s to reward 0.8")
    assert found["ratio"] == {"eta0": {"eta2": 0.5}}
    assert found["to_target_s"]["eta4"] == [20.0, None, None]
    assert "s to target" in printed.err


@pytest.mark.parametrize("name", ["manager", "weights", "end_to_end"])
def test_help_teaches(name):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--write-baseline" in done.stdout
