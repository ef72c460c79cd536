"""benchmarks/recovery.py and soak.py read the files that a run leaves behind. The run here is made up."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def write(run_dir, worker, *records):
    (run_dir / "journal").mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "journal" / f"{worker}.jsonl").write_text(text)


def test_useful_work_begins_after_the_death(module, tmp_path):
    useful = module("recovery").useful
    admitted = [
        {"event": "admitted", "ticket": ticket, "time": at} for ticket, at in (("a", 9.0), ("b", 11.5), ("c", 12.0))
    ]
    write(tmp_path, "gserver_manager", *admitted)
    write(
        tmp_path,
        "rollout_worker_1",
        *({"event": "pushed", "ticket": t, "time": at} for t, at in (("a", 9.5), ("c", 13.0))),
    )
    tokens = [{"time": 10.0, "tokens": 5}, {"time": 10.1, "tokens": 2}, {"time": 12.3, "tokens": 7}]
    write(tmp_path, "generation_server_0", *tokens)
    write(
        tmp_path,
        "master",
        {"event": "trained", "start": 9.0, "end": 10.5},
        {"event": "trained", "start": 14.0, "end": 15.0},
    )
    assert useful(tmp_path, "rollout_worker", "rollout_worker/1", 10.0) == 12.0
    assert useful(tmp_path, "gserver_manager", "gserver_manager/0", 10.0) == 11.5
    # a bucket spans a tenth of a second
    assert useful(tmp_path, "generation_server", "generation_server/0", 10.0) == 12.3
    assert useful(tmp_path, "master", "master/0", 10.0) == 14.0
    assert useful(tmp_path, "model_worker", "model_worker/0", 14.5) is None


def test_recovery_is_measured_on_the_next_incarnation(module, tmp_path):
    recovery = module("recovery")
    folder = tmp_path / "logs" / "attempt_1"
    folder.mkdir(parents=True)
    lines = [(10, "setting up"), (12, "serving at x"), (20, "setting up"), (21, "loading"), (23.5, "serving at x")]
    text = "".join(f"2026-01-01 00:00:{at:06.3f} INFO    generation_server/0: {what}\n" for at, what in lines)
    (folder / "generation_server_0.log").write_text(text)
    struck = recovery.datetime(2026, 1, 1, 0, 0, 15).timestamp()
    assert recovery.between(
        tmp_path, "generation_server", "generation_server/0", struck, "serving at"
    ) == pytest.approx(3.5)


def test_slopes_leave_out_the_warm_up(module):
    samples = [(float(step), {"memory_mb": 500.0 if step < 100 else 1000 + 0.02 * step}) for step in range(0, 500, 10)]
    soak = module("soak")
    assert soak.slopes_of(samples, soak.WARM_UP) == {"memory_mb": 20.0}


def test_a_resource_that_has_filled_up_has_no_late_slope(module):
    samples = [(float(step), {"descriptors": min(step, 200.0)}) for step in range(0, 500, 10)]
    soak = module("soak")
    assert soak.slopes_of(samples, soak.WARM_UP)["descriptors"] > 100
    assert soak.slopes_of(samples, soak.LATE) == {"descriptors": 0.0}


def test_faults_of_a_soak_are_one_schedule_split_into_rounds(module):
    soak = module("soak")
    args = Namespace(minutes=12.0, rounds=4, every="5-15", seed=3, kinds=("kill", "stop"))
    rounds = soak.faults_by_round(args)
    assert len(rounds) == 4
    assert [fault.number for faults in rounds for fault in faults] == list(range(sum(map(len, rounds))))
    for faults in rounds:
        times = [fault.at for fault in faults]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] < 12 * 60 / 4 * 5 / 6
        assert len(faults) >= 8
