"""benchmarks/startup.py reads its phases from the files that a run leaves behind. The run here is made up."""

import importlib
import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from asyncrl.launch.rundir import RunRecord, logs_dir, write_record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BEGAN = 1_700_000_000.0


@pytest.fixture
def startup(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("startup")


@pytest.fixture
def run_dir(tmp_path):
    """A run that began at 0 s and its attempt at 1 s; etcd was ready at 2 s, and the first step was done at 20 s."""
    (tmp_path / "config.yaml").touch()
    os.utime(tmp_path / "config.yaml", (BEGAN + 1, BEGAN + 1))
    record = RunRecord(pid=1, attempt=1, experiment="e", trial="t", endpoints=[], started=BEGAN + 2)
    write_record(tmp_path, record)
    said = {
        "generation_server_0": [
            (3, "setting up"),
            (7, "loading the model"),
            (9, "serving at http://h:1, without weights yet"),
        ],
        "model_worker_0": [(6, "setting up"), (8, "rank 0 of 2 on cpu")],
        "model_worker_1": [(6.5, "setting up"), (10, "rank 1 of 2 on cpu")],
        "master_0": [(3, "setting up"), (11, "running")],
        "rollout_worker_0": [(4, "setting up")],
        "gserver_manager_0": [
            (3, "setting up"),
            (12, "generation_server/0 serves a0001-v00000000 (0.05 s)"),
            (25, "generation_server/0 serves a0001-v00000001 (0.05 s)"),
        ],
    }
    logs = logs_dir(tmp_path, 1)
    logs.mkdir(parents=True)
    for name, lines in said.items():
        worker = "/".join(name.rsplit("_", 1))
        times = [datetime.fromtimestamp(BEGAN + at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] for at, _ in lines]
        text = [f"{when} INFO    {worker}: {what}" for when, (_, what) in zip(times, lines, strict=True)]
        (logs / f"{name}.log").write_text("\n".join(["a line of another program", *text]) + "\n")
    (tmp_path / "journal").mkdir()
    books = [
        {"event": "trained", "step": 1, "start": BEGAN + 17, "end": BEGAN + 20},
        {"event": "published", "version": 1, "time": BEGAN + 21},
        {"event": "trained", "step": 2, "start": BEGAN + 21, "end": BEGAN + 22},
    ]
    (tmp_path / "journal" / "master.jsonl").write_text("".join(json.dumps(line) + "\n" for line in books))
    return tmp_path


def test_phases_follow_each_other_and_add_up(startup, run_dir):
    found = startup.phases(run_dir, BEGAN)
    assert {phase: found[phase] for phase in startup.PHASES} == pytest.approx(
        {
            "launcher": 1,
            "name_service": 1,
            "imports": 5,  # the last computing process begins at 7 s
            "loading": 3,
            "weights_0": 2,
            "first_batch": 5,
            "first_step": 3,
        },
        abs=1e-3,
    )
    assert found["total"] == pytest.approx(20, abs=1e-3)
    assert found["imports of rollout_worker"] == pytest.approx(2, abs=1e-3)
