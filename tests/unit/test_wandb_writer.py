"""Weights & Biases: metrics with the real wandb, offline, and failures of wandb, which never affect the run."""

import importlib.util
import logging
import sys
import threading
import time
import types
from dataclasses import replace

import pytest

from asyncrl.config.schema import ConfigError, ExperimentConfig, WandbConfig
from asyncrl.launch.experiment import load_experiment, validate
from asyncrl.runtime.metrics import METRICS_FILE, MetricsWriter, read_json_lines
from asyncrl.runtime.wandb_writer import MAX_QUEUE, WandbWriter
from asyncrl.testing.runs import make_tiny_run
from tests.support.preflight import preflight

LIMIT_S = 60.0
KEY = "0123456789abcdef" * 2 + "01234567"


def open_writer(run_dir, attempt=1, **config):
    config = WandbConfig(**{"mode": "offline", "init_timeout_s": LIMIT_S, "finish_timeout_s": LIMIT_S, **config})
    return WandbWriter(config, run_dir, experiment="sorter", trial="a trial", attempt=attempt)


def until(condition):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < LIMIT_S
        time.sleep(0.001)


class FakeRun:
    """The part of a wandb run that WandbWriter uses."""

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
    writer = MetricsWriter(tmp_path, attempt=1, tensorboard=False, wandb=wandb)
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
    metrics = MetricsWriter(tmp_path, attempt=1, tensorboard=False, wandb=writer)
    assert entered.wait(LIMIT_S)
    for step in range(MAX_QUEUE + 3):
        metrics.write(step, {"reward/mean": 0.5})
    with caplog.at_level(logging.WARNING):
        assert "wandb sync" in writer.finish(0.01)
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
