"""Trackers: metrics with the real wandb, offline, the calls of trackio and MLflow, and failures, which never affect the run.

The doubles of trackio and MLflow have the signatures of SIGNATURES. A release test installs both packages, compares the signatures
with theirs, and reads the records back."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import ConfigError, ExperimentConfig, MlflowConfig, TrackioConfig, WandbConfig
from asyncrl.launch.experiment import load_experiment, validate
from asyncrl.runtime.metrics import METRICS_FILE, MetricsWriter, read_json_lines
from asyncrl.runtime.trackers import TrackedRun, open_trackers
from asyncrl.runtime.trackers.tracker import MAX_QUEUE
from asyncrl.testing.runs import make_tiny_run
from tests.support.preflight import preflight

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
KEY = "0123456789abcdef" * 2 + "01234567"


def open_writer(run_dir, attempt=1, **config):
    config = WandbConfig(**{"mode": "offline", "init_timeout_s": LIMIT_S, "finish_timeout_s": LIMIT_S, **config})
    return open_one("wandb", config, run_dir, attempt)


def open_one(name, config, run_dir, attempt=1):
    return open_trackers({name: config}, TrackedRun(run_dir, "sorter", "a trial", attempt))[name]


def until(condition):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < LIMIT_S
        time.sleep(0.001)


class FakeRun:
    """The part of a wandb run that WandbSession uses."""

    url = "https://wandb.example/run"

    def __init__(self):
        self.logged = []
        self.metrics = []
        self.finished = False

    def define_metric(self, name, **options):
        self.metrics.append((name, options))

    def log(self, record):
        self.logged.append(record)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    """A module that replaces wandb. Tests may replace its `init`."""
    module = types.ModuleType("wandb")
    module.run = FakeRun()
    module.calls = []
    module.Settings = lambda **settings: settings

    def init(**arguments):
        module.calls.append(arguments)
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_offline_metrics_are_in_the_files_of_the_wandb_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is an optional dependency")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    (tmp_path / "config.yaml").write_text("trial: a trial\ntrain: {batch_size: 4321}\n")
    wandb = open_writer(tmp_path, project="a-project", tags=["fast"])
    writer = MetricsWriter(tmp_path, attempt=1, tensorboard=False, trackers={"wandb": wandb})
    writer.write(2, {"reward/mean": 0.4375, "version": 2})
    writer.write(1, {"eval/greedy_reward": 0.28125})  # this evaluation belongs to an earlier step and ended later
    outcome = wandb.finish()
    writer.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert outcome == f"offline; upload it with `wandb sync {folder}`"
    (file,) = folder.glob("run-*.wandb")
    expected = (b"reward/mean", b"0.4375", b"eval/greedy_reward", b"0.28125", b"a-project", b"fast", b"4321")
    deadline = time.monotonic() + LIMIT_S  # a process of wandb writes the file and may end after finish()
    while missing := [text for text in expected if text not in file.read_bytes()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)
    for written in tmp_path.rglob("*"):
        assert not written.is_file() or KEY.encode() not in written.read_bytes()
    assert [record["step"] for record in read_json_lines(tmp_path / METRICS_FILE)] == [2, 1]


def test_records_and_names_that_wandb_gets(tmp_path, fake):
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    writer = open_writer(tmp_path, attempt=2, mode="online", entity="team")
    writer.write(3, {"reward/mean": 0.5})
    writer.write(0, {"eval/greedy_reward": 0.25})
    assert writer.finish() == FakeRun.url
    assert fake.run.logged == [
        {"train_step": 3, "reward/mean": 0.5},
        {"train_step": 0, "eval/greedy_reward": 0.25},
    ]
    assert fake.run.metrics == [("train_step", {}), ("*", {"step_metric": "train_step"})]
    assert fake.run.finished
    (call,) = fake.calls
    settings = call.pop("settings")
    assert settings["init_timeout"] == settings["finish_timeout"] == LIMIT_S
    run_id = call.pop("id")
    assert run_id.startswith("a-trial-a2-")
    assert call == {
        "project": "sorter",
        "entity": "team",
        "group": None,
        "tags": [],
        "name": "a trial (attempt 2)",
        "resume": "allow",
        "dir": str(tmp_path),
        "mode": "online",
        "config": {"seed": 7},
    }


def test_an_attempt_keeps_its_id(tmp_path, fake):
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    for folder, attempt in zip(folders, (1, 1, 1), strict=True):
        open_writer(folder, attempt).finish()
    open_writer(folders[0], 2).finish()
    first, again, elsewhere, second = [call["id"] for call in fake.calls]
    assert first == again
    assert len({first, elsewhere, second}) == 3


@pytest.mark.parametrize("error", [ValueError("No API key configured"), SystemExit(1), TimeoutError()])
def test_a_failure_logs_one_warning_and_training_continues(tmp_path, fake, caplog, error):
    def init(**arguments):
        raise error

    fake.init = init
    with caplog.at_level(logging.WARNING):
        writer = open_writer(tmp_path, mode="online")
        until(lambda: caplog.records)
        writer.write(1, {"reward/mean": 0.5})
        outcome = writer.finish()
    assert outcome.startswith("some or all records were not sent: ")
    (record,) = caplog.records
    assert str(error) in record.getMessage()
    assert "Training continues without it; log in with `wandb login`" in record.getMessage()


def test_a_wandb_that_hangs_blocks_nothing(tmp_path, fake, caplog):
    entered, release = threading.Event(), threading.Event()

    def init(**arguments):
        entered.set()
        release.wait(LIMIT_S)
        return fake.run

    fake.init = init
    writer = open_writer(tmp_path)
    metrics = MetricsWriter(tmp_path, attempt=1, tensorboard=False, trackers={"wandb": writer})
    assert entered.wait(LIMIT_S)
    for step in range(MAX_QUEUE + 3):
        metrics.write(step, {"reward/mean": 0.5})
    with caplog.at_level(logging.WARNING):
        assert "not all records were processed before the end" in writer.finish(0.01)
        assert "`wandb sync`" in caplog.text
    assert "dropped 4 records" in caplog.text  # 3 records of metrics, and the one that ends the queue
    start = time.monotonic()
    metrics.close()
    assert time.monotonic() - start < LIMIT_S / 2  # the writer does not wait for wandb again
    release.set()


def test_a_failure_during_the_run_logs_one_warning(tmp_path, fake, caplog):
    def log(record):
        raise OSError("the network is gone")

    fake.run.log = log
    with caplog.at_level(logging.WARNING):
        writer = open_writer(tmp_path)
        writer.write(1, {"reward/mean": 0.5})
        assert "OSError: the network is gone" in writer.finish()
    assert len(caplog.records) == 1


def test_wandb_is_off_by_default_and_its_fields_are_checked():
    assert ExperimentConfig().wandb.mode == "disabled"
    with pytest.raises(ConfigError, match=r"wandb\.mode='onlin': did you mean 'online'"):
        validate(ExperimentConfig(wandb=WandbConfig(mode="onlin")))
    with pytest.raises(ConfigError, match=r"wandb\.init_timeout_s=0: must be above 0"):
        validate(ExperimentConfig(wandb=WandbConfig(init_timeout_s=0)))


def test_without_the_package_the_config_is_refused(tmp_path, monkeypatch):
    config, find_spec = load_experiment(make_tiny_run(tmp_path, num_prompts=64)), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    assert preflight(config) == 64
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[wandb\]', or set wandb\.mode=disabled"):
        preflight(replace(config, wandb=WandbConfig(mode="offline")))


# -------------------------------------------------------------------------------------------------- trackio and MLflow

PARAMETERS = {  # of the functions that asyncrl calls, as the packages have them
    "trackio.init": {
        "project",
        "name",
        "group",
        "space_id",
        "config",
        "resume",
        "embed",
        "auto_log_gpu",
        "auto_log_cpu",
    },
    "trackio.Run.log": {"self", "metrics", "step"},
    "trackio.Run.finish": {"self"},
    "mlflow.MlflowClient": {"tracking_uri"},
    "mlflow.MlflowClient.get_experiment_by_name": {"self", "name"},
    "mlflow.MlflowClient.create_experiment": {"self", "name"},
    "mlflow.MlflowClient.create_run": {"self", "experiment_id", "run_name"},
    "mlflow.MlflowClient.log_batch": {"self", "run_id", "metrics", "params"},
    "mlflow.MlflowClient.set_terminated": {"self", "run_id"},
    "mlflow.entities.Metric": {"key", "value", "timestamp", "step"},
    "mlflow.entities.Param": {"key", "value"},
}
METRICS = {"reward/mean": 0.4375, "reward/of a:b": 1, "version": "2"}


@pytest.fixture
def recorded(monkeypatch):
    """Doubles of trackio and mlflow. Yields the calls: (name, arguments). A keyword that the package does not have fails."""
    calls, parameters = [], PARAMETERS

    def double(name, result=None):
        def call(*given, **named):
            assert set(named) <= parameters[name], (name, named)
            assert len(given) + len(named) <= len(parameters[name] - {"self"})
            calls.append((name, given, named))
            return result() if result is not None else None

        return call

    def module(name, **members):
        found = types.ModuleType(name)
        vars(found).update(members)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    def object_of(prefix, *names, **members):
        return types.SimpleNamespace(**members, **{name: double(f"{prefix}.{name}") for name in names})

    def client(uri):
        parts = "mlflow.MlflowClient"
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
        found = object_of(parts, "get_experiment_by_name", "log_batch", "set_terminated")
        found.create_experiment = double(f"{parts}.create_experiment", lambda: "e1")
        found.create_run = double(f"{parts}.create_run", lambda: run)
        calls.append((parts, (uri,), {}))
        return found

    def entity(name):
        def make(*given):
            assert len(given) == len(parameters[name])
            return given

        return make

    module("trackio", init=double("trackio.init", lambda: object_of("trackio.Run", "log", "finish", name="a-name")))
    module("mlflow", MlflowClient=client)
    module("mlflow.entities", Metric=entity("mlflow.entities.Metric"), Param=entity("mlflow.entities.Param"))
    return calls


def test_the_calls_of_trackio(tmp_path, recorded):
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    tracker = open_one("trackio", TrackioConfig(mode="enabled", group="g"), tmp_path)
    tracker.write(3, METRICS)
    tracker.write(1, {"eval/greedy_reward": 0.25})
    assert tracker.finish() == "a-name: `trackio show --project sorter`"
    name = (tmp_path / "trackio" / "attempt_1.id").read_text().strip()
    assert name.startswith("a-trial-a1-")
    first, *others = recorded
    named = {
        "project": "sorter",
        "name": name,
        "group": "g",
        "space_id": None,
        "config": {"seed": 7},
        "resume": "allow",
    }
    assert first == ("trackio.init", (), named | {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False})
    assert others == [
        ("trackio.Run.log", (METRICS,), {"step": 3}),
        ("trackio.Run.log", ({"eval/greedy_reward": 0.25},), {"step": 1}),
        ("trackio.Run.finish", (), {}),
    ]


def test_the_calls_of_mlflow(tmp_path, recorded):
    (tmp_path / "config.yaml").write_text("seed: 7\ntrain: {lr: 0.5, mfcs: [], tags: [a, b]}\n")
    config = MlflowConfig(mode="enabled", uri="http://127.0.0.1:1")
    for _ in range(2):  # the second one is the restarted master of the same attempt
        tracker = open_one("mlflow", config, tmp_path)
        tracker.write(3, METRICS)
        assert tracker.finish() == "experiment sorter, run r1"
    made = [call for call in recorded if call[0] == "mlflow.MlflowClient.create_run"]
    assert made == [("mlflow.MlflowClient.create_run", ("e1",), {"run_name": "a trial"})]
    batches = [call for call in recorded if call[0] == "mlflow.MlflowClient.log_batch"]
    params = [("seed", "7"), ("train.lr", "0.5"), ("train.tags", "['a', 'b']")]
    assert [(given, named.get("params")) for _, given, named in batches] == [
        (("r1",), params),
        (("r1",), None),
        (("r1",), None),
    ]
    assert [entry[:2] + entry[3:] for entry in batches[1][2]["metrics"]] == [
        ("reward/mean", 0.4375, 3),
        ("reward/of a_b", 1.0, 3),
    ]
    assert recorded[-1] == ("mlflow.MlflowClient.set_terminated", ("r1",), {})


_REAL = """
import inspect, json, sys
from pathlib import Path
import mlflow, mlflow.entities, trackio
from asyncrl.config.schema import MlflowConfig, TrackioConfig
from asyncrl.runtime.trackers import TrackedRun, open_trackers
names, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
def parameters(name):
    module, _, path = name.replace("mlflow.entities", "mlflow_entities").partition(".")
    found = {"mlflow": mlflow, "trackio": trackio, "mlflow_entities": mlflow.entities}[module]
    for part in path.split("."):
        found = getattr(found, part)
    return list(inspect.signature(found).parameters)
uri = f"sqlite:///{folder}/mlflow.db"
configs = {"trackio": TrackioConfig(mode="enabled"), "mlflow": MlflowConfig(mode="enabled", uri=uri)}
for _ in range(2):
    trackers = open_trackers(configs, TrackedRun(folder, "sorter", "a trial", 1))
    for tracker in trackers.values():
        tracker.write(3, {"reward/mean": 0.4375, "reward/of a:b": 1, "version": "2"})
        tracker.write(1, {"eval/greedy_reward": 0.25})
    outcomes = {name: tracker.finish(200) for name, tracker in trackers.items()}
client = mlflow.MlflowClient(uri)
(run,) = client.search_runs([client.get_experiment_by_name("sorter").experiment_id])
history = {key: [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics}
(ours,) = trackio.Api().runs("sorter")
from trackio.sqlite_storage import SQLiteStorage
logs = [[one["step"], {key: value for key, value in one.items() if key not in ("step", "timestamp")}]
    for one in SQLiteStorage.get_logs("sorter", ours.name)]
print(json.dumps([{name: parameters(name) for name in names}, outcomes, history, run.data.params, run.info.status, logs]))
"""


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_real_packages_take_the_records(tmp_path):
    """trackio and MLflow move pins of asyncrl[test], so that they are installed into a folder of their own."""
    packages, run_dir = tmp_path / "packages", tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("seed: 7\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        str(packages),
        "trackio==0.43.0",
        "mlflow==3.17.2",
    ]
    subprocess.run(install, check=True, capture_output=True, text=True)
    environment = dict(os.environ, PYTHONPATH=f"{packages}:{ROOT}", TRACKIO_DIR=str(tmp_path / "trackio"))
    command = [sys.executable, "-c", _REAL, json.dumps(list(PARAMETERS)), str(run_dir)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found, outcomes, history, params, status, logs = json.loads(done.stdout.splitlines()[-1])
    for name, known in PARAMETERS.items():
        assert known <= set(found[name]), name
    assert outcomes["trackio"].endswith("`trackio show --project sorter`")
    assert outcomes["mlflow"].startswith("experiment sorter, run ")
    assert history == {
        "reward/mean": [[3, 0.4375]] * 2,
        "reward/of a_b": [[3, 1.0]] * 2,
        "eval/greedy_reward": [[1, 0.25]] * 2,
    }
    assert (params, status) == ({"seed": "7"}, "FINISHED")
    assert sorted(map(json.dumps, logs)) == sorted(
        [json.dumps([3, METRICS]), json.dumps([1, {"eval/greedy_reward": 0.25}])] * 2
    )


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_tracker_without_its_package_or_place_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config, find_spec = load_experiment(make_tiny_run(tmp_path, num_prompts=64)), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else find_spec(asked))
    chosen = {
        "trackio": TrackioConfig(mode="enabled"),
        "mlflow": MlflowConfig(mode="enabled", uri="http://127.0.0.1:1"),
    }
    refused = rf"{name}\.mode='enabled': the package {name} is not installed: pip install 'asyncrl\[{name}\]', or set"
    with pytest.raises(ConfigError, match=refused):
        preflight(replace(config, **{name: chosen[name]}))
    here = types.SimpleNamespace(origin="here")
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: here if asked == name else find_spec(asked))
    assert preflight(replace(config, **{name: chosen[name]})) == 64
    if name == "mlflow":
        with pytest.raises(ConfigError, match=r"mlflow\.uri='' and MLFLOW_TRACKING_URI is not set"):
            preflight(replace(config, mlflow=MlflowConfig(mode="enabled")))
