"""benchmarks/end_to_end.py reads the files of a run; every benchmark has a help text. tests/benchmarks runs them."""

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def end_to_end(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("end_to_end_benchmark", BENCHMARKS / "end_to_end.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_end_to_end_reports_targets_that_were_not_reached(end_to_end, capsys):
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
def test_help_lists_the_options(name):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--write-baseline" in done.stdout
