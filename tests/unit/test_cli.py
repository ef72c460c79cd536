"""The command line: help, answers in JSON, the files of a dry run, and the output of `logs`. No process of a run starts."""

import importlib.metadata
import json
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import time

import msgspec
import pytest

import asyncrl
from asyncrl.cli import checks as table
from asyncrl.cli import main as cli
from asyncrl.cli.commands import run as run_command
from asyncrl.cli.commands.common import not_running
from asyncrl.cli.commands.run import JsonView
from asyncrl.cli.commands.status import _view
from asyncrl.cli.doctor import MACHINE_CHECKS
from asyncrl.cli.live_state import Seen, training_of
from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.checklist import Check, Finding
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import load_process_config
from asyncrl.launch.recovery import FINAL_MODEL
from asyncrl.launch.rundir import (
    SUMMARY_FILE,
    LaunchError,
    RunLock,
    RunRecord,
    begin_attempt,
    next_attempt,
    write_record,
)
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesWriter
from tests.support.clock import ManualClock

COMMANDS = ("init", "run", "check", "prepare", "ls", "status", "scale", "logs", "stop", "plot", "inspect", "chaos")
OWN = ("init", "run", "check", "prepare", "ls", "status", "scale", "logs", "stop")

FOLDER_CHECK = next(check for check in table.CHECKS if check.about == "the run's folder")

CONFIG = """\
experiment: small
fileroot: {folder}/runs
allocation: transformers.d2+d1
model_path: {folder}/model
prompts: {{path: "{folder}/prompts.jsonl"}}
rollout: {{num_workers: 1, tasks: {{default: {{env: "{folder}/env.py:Own", env_args: {{api_key: hidden}}}}}}}}
train: {{batch_size: 2}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config whose model and prompts are not examined."""
    file = tmp_path / "small.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.setattr(table, "CHECKS", (Check("the prompts", count_prompts), *MACHINE_CHECKS))
    return file


def count_prompts(case):
    case.num_prompts = 10


@pytest.fixture
def call(capsys):
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def call_command(*words):
        code = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call_command


def answer(out):
    """Return the one JSON object on stdout."""
    (line,) = out.splitlines()
    return json.loads(line)


# ------------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_exit_codes_and_examples(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"asyncrl-launch {command}".strip() in text
    assert "exit code" in text
    if command:
        assert "--json" in text
        examples = re.findall(rf"^  asyncrl-launch {command} .*", text, flags=re.MULTILINE)
        assert len(examples) >= 2 or command == "stop"
    else:
        assert all(f"    {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("command", OWN)
def test_examples_in_the_help_are_command_lines(command, capsys):
    """Every flag in an example exists."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    for example in re.findall(r"^  asyncrl-launch (.*)", text, flags=re.MULTILINE):
        words = re.split(r"\s{2,}| \| ", example)[0].split()
        cli.parse(words)


def test_a_list_of_arguments_may_continue_after_an_option():
    assert cli.parse(["logs", "r", "-f", "master", "etcd"]).words == ["master", "etcd"]
    assert cli.parse(["run", "c", "a=1", "--json", "b=2"]).overrides == ["a=1", "b=2"]
    assert cli.parse(["check"]).config is None


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("words", "kind", "told", "code"),
    [
        (["check", "nowhere.yaml"], "config", "'nowhere.yaml' is not a file", 2),
        (["run", "nowhere.yaml"], "config", "is not a file", 2),
        (["prepare", "nowhere.yaml"], "config", "is not a file", 2),
        (["ls", "nowhere"], "config", "FOLDER='nowhere' is not a folder; name the fileroot", 2),
        (["status", "nowhere"], "config", "neither the folder of a run nor a config", 2),
        (["stop", "nowhere"], "config", "neither the folder", 2),
        (["scale", "nowhere", "generation=2"], "config", "neither the folder", 2),
        (["scale", "."], "config", "give the number of servers once", 2),
        (["scale", ".", "generation=1", "generation=2"], "config", "give the number of servers once", 2),
        (["scale", ".", "generation=0"], "config", "generation=0: use a number from 1 to 256", 2),
        (["scale", ".", "generation=many"], "config", "use a number from 1 to 256", 2),
        (["scale", ".", "..", "generation=2"], "config", "scale one run at a time", 2),
        (["scale", "generation=2"], "config", "RUN is missing, and none is running under", 2),
        (["scale", "generation=2", "trial=b"], "config", "overrides need the config", 2),
        (["logs", "."], "failed", "no run has been started in this folder", 1),
        (["nonsense"], "usage", "unknown command 'nonsense': commands: init, run", 2),
        (["stop", "x", "--nonsense", "y"], "usage", "unrecognized arguments: --nonsense y", 2),
        (["logs", ".", "--tail", "0"], "usage", "0 is not at least 1", 2),
        (["run"], "usage", "CONFIG", 2),
        (["run", "c", "--trial=b"], "usage", "fields of the config are written key=value, without dashes: trial=b", 2),
        (["check", "c", "--lr", "3"], "usage", "written key=value, without dashes: train.optimizer.lr=3", 2),
        (["run", "c", "a=1", "--batch-size", "4", "b=2"], "usage", "without dashes: train.batch_size=4", 2),
        (["run", "c", "--seed", "--lr"], "usage", "without dashes: seed=...", 2),
        (["run", "c", "--verbose"], "usage", "unrecognized arguments: --verbose", 2),
        (["run", "x.yaml", "--output", "d"], "config", "--output works with --dry-run only", 2),
    ],
)
def test_errors_are_reported_as_text_and_as_json(words, kind, told, code, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, out, err = call(*words)
    assert found == code
    assert told in (out + err).replace("\n", " ")
    found, out, _ = call(*words, "--json")
    assert found == code
    error = answer(out)["error"]
    assert error["kind"] == kind
    assert told in error["message"]


def test_secrets_are_not_in_errors(config, call, monkeypatch):
    def refuse(_):
        raise ConfigError("name_resolve.endpoints=['u:hidden@h:1']: HF_TOKEN=hidden")

    monkeypatch.setattr(table, "CHECKS", (Check("etcd", refuse),))
    for words in (["check", config], ["check", config, "--json"]):
        assert "hidden" not in "".join(map(str, call(*words)))


# ------------------------------------------------------------------------------------------------------------------- check


FINE = [Finding("cores", "ok", "2"), Finding("GPUs", "warn", "old", "buy another")]
BROKEN = [*FINE, Finding("disk", "fail", "[full]", "make room")]


def finds(findings, place="machine"):
    return Check("these", lambda _: findings, place=place)


def test_check_without_a_config_examines_the_machine(call, monkeypatch):
    monkeypatch.setattr(table, "CHECKS", (finds(FINE),))
    code, out, _ = call("check")
    assert code == 0
    assert "buy another" in out
    assert "ok: this machine is fit; see the warnings: GPUs" in out
    code, out, _ = call("check", "--json")
    assert code == 0
    found = answer(out)
    assert found["ok"] is True
    assert found["machine"][1] == {"name": "GPUs", "state": "warn", "value": "old", "remedy": "buy another"} | {
        "place": "machine",
        "cost": "short",
    }
    assert found["versions"]["python"]


def test_check_with_a_config_prints_both(config, call, monkeypatch):
    monkeypatch.setattr(table, "CHECKS", (Check("the prompts", count_prompts), finds(BROKEN)))
    code, out, _ = call("check", config)
    assert code == 1
    assert "[full]" in out
    assert "cannot run here until this is fixed: disk" in out
    code, out, err = call("check", config, "--json")
    assert code == 1
    found = answer(out)
    assert [process["name"] for process in found["processes"]][:3] == [
        "generation_server/0",
        "generation_server/1",
        "model_worker/0",
    ]
    assert found["sizes"]["total_steps"] == 5
    assert found["ok"] is False
    assert "hidden" not in out + err


def test_check_tries_the_tasks(config, call, monkeypatch):
    tried = [Finding("rollout.tasks.default.reward", "fail", "raised KeyError: 1 (reward.py:3)", "mend it")]
    checks = (Check("the prompts", count_prompts), finds(tried, "tasks"), finds(FINE))
    monkeypatch.setattr(table, "CHECKS", checks)
    code, out, _ = call("check", config)
    assert code == 1
    assert "raised KeyError: 1 (reward.py:3)" in out
    assert "until this is fixed: rollout.tasks.default.reward" in out.replace("\n", " ")
    code, out, _ = call("check", config, "--json")
    assert code == 1
    assert [task["state"] for task in answer(out)["tasks"]] == ["fail"]


# ------------------------------------------------------------------------------------------------------------ run --dry-run


def test_a_dry_run_writes_every_config_and_starts_nothing(config, call, tmp_path):
    run_dir = tmp_path / "runs" / "small" / "t0"
    begin_attempt(run_dir)
    code, out, _ = call("run", config, "--dry-run", "--json")
    assert code == 0
    found = answer(out)
    folder = run_dir / "dry_run"
    assert found["dry_run"] == str(folder)
    assert {file.name for file in folder.iterdir()} == {
        "config.yaml",
        "generation_server_0.yaml",
        "generation_server_1.yaml",
        "model_worker_0.yaml",
        "master_0.yaml",
        "gserver_manager_0.yaml",
        "rollout_worker_0.yaml",
    }
    assert load_process_config(folder / "master_0.yaml").worker.attempt == 2
    assert load_experiment(folder / "config.yaml").train.batch_size == 2
    assert call("config", config, "--resolved")[1] == (folder / "config.yaml").read_text()
    assert answer(call("config", config, "train.batch_size=5", "--resolved", "--json")[1])["train"]["total_steps"] == 2
    assert call("config", "train.batch_size", "train.batch_size=5")[0] == 2
    assert "hidden" not in "".join(file.read_text() for file in folder.iterdir()) + out
    assert next_attempt(run_dir) == 2
    assert {file.name for file in run_dir.iterdir()} == {"logs", "dry_run"}

    (folder / "notes.txt").write_text("mine")
    assert call("run", config, "allocation=transformers.d1+d1", "--dry-run")[0] == 0
    assert not (folder / "generation_server_1.yaml").exists()
    assert (folder / "notes.txt").exists()


def test_a_resolved_config_is_shown_although_its_run_is_complete(config, call, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "CHECKS", (*table.CHECKS, FOLDER_CHECK))
    run_dir = tmp_path / "runs" / "small" / "t0"
    (run_dir / FINAL_MODEL).mkdir(parents=True)
    (run_dir / SUMMARY_FILE).write_text("{}")
    assert call("run", config, "--dry-run")[0] == 2
    code, out, _ = call("config", config, "--resolved")
    assert (code, "recover: auto" in out) == (0, True)


@pytest.mark.parametrize(
    ("devices", "named", "dtype"),
    [
        (
            "",
            "for a CPU: rollout.new_tokens_per_chunk=1024, generation.dtype=float32, "
            "generation.load_timeout_s=120.0, train.dtype=float32, ",
            "float32",
        ),
        ("0,1,2", "for a GPU: rollout.new_tokens_per_chunk=1024, generation.dtype=bfloat16, ", "bfloat16"),
    ],
)
def test_values_of_auto_are_shown_and_written(config, call, monkeypatch, tmp_path, devices, named, dtype):
    monkeypatch.setattr("asyncrl.runtime.devices.count_gpus", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    shown = {finding["name"]: finding for finding in answer(call("check", config, "--json")[1])["machine"]}
    assert shown["auto"]["state"] == "ok"
    assert shown["auto"]["value"].startswith(named)
    assert call("run", config, "--dry-run", "--output", tmp_path / "there")[0] == 0
    written = load_experiment(tmp_path / "there" / "config.yaml")
    on_gpu = bool(devices)
    assert (written.train.dtype, written.generation.dtype) == (dtype, dtype)
    assert (written.train.tf32, written.train.gradient_checkpointing) == (on_gpu, on_gpu)
    assert written.rollout.new_tokens_per_chunk == 1024


def test_a_dry_run_writes_to_the_output_folder(config, call, tmp_path):
    code, out, _ = call("run", config, "--dry-run", "--output", tmp_path / "there")
    assert code == 0
    assert "model_worker/0" in out
    assert f"6 resolved configs are in {tmp_path / 'there'}; nothing was started" in out
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").write_text("")
    code, out, _ = call("run", config, "--dry-run", "--output", tmp_path / "file")
    assert code == 1
    assert "choose another folder with --output DIR" in out


# --------------------------------------------------------------------------------------------------------------- run --json


def status(worker, state):
    return WorkerStatus(worker=worker, pid=7, attempt=3, state=state, time=0.0, progress=0)


def test_events_of_a_run_as_json(tmp_path, capsys):
    view = JsonView(tmp_path)
    view.emit("start", run_dir="here")
    view.turn([status("master/0", "starting")])
    view.turn([status("master/0", "starting")])
    view.notice("etcd at u:hidden@h:1 runs again")
    with JsonLinesWriter(tmp_path / METRICS_FILE) as writer:
        writer.write({"step": 1, "attempt": 3, "reward/mean": 0.5, "actor/loss": float("nan")})
    view.turn([status("master/0", "running")])
    view.close()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["start", "worker", "notice", "worker", "metrics"]
    assert events[1] == {**events[1], "name": "master/0", "state": "starting", "pid": 7, "attempt": 3}
    assert events[2]["text"] == "etcd at u:***@h:1 runs again"
    assert events[4] == {**events[4], "step": 1, "reward/mean": 0.5, "actor/loss": None}


def test_an_event_of_a_run_has_the_time_when_it_happened(tmp_path, capsys):
    view = JsonView(tmp_path, ManualClock(1000.0))
    with JsonLinesWriter(tmp_path / METRICS_FILE) as writer:
        writer.write({"step": 1, "time": 997.5})
        writer.write({"step": 2})
    view.turn([msgspec.structs.replace(status("master/0", "running"), time=998.25)])
    view.notice("now")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["event"], event["time"]) for event in events] == [
        ("worker", 998.25),
        ("metrics", 997.5),
        ("metrics", 1000.0),
        ("notice", 1000.0),
    ]


class FakeLauncher:
    """A launcher whose run ends at once, as `ending` says."""

    ending: object = 0

    def __init__(self, config, num_prompts, view):
        self.view = view

    def run(self):
        self.view.notice("on its way")
        if isinstance(self.ending, Exception):
            raise self.ending
        return self.ending


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        (0, 0, {"exit_code": 0, "summary": {"steps": 5}}),
        (143, 143, {"exit_code": 143}),
        (
            LaunchError("master/0 failed at http://u:hidden@h"),
            1,
            {"exit_code": 1, "error": {"kind": "failed", "message": "master/0 failed at http://u:***@h"}},
        ),
    ],
)
def test_the_end_of_a_run_as_json(config, call, tmp_path, monkeypatch, ending, code, last):
    run_dir = tmp_path / "runs" / "small" / "t0"
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text('{"steps": 5}')
    monkeypatch.setattr(run_command, "LocalLauncher", FakeLauncher)
    monkeypatch.setattr(FakeLauncher, "ending", ending)
    found, out, _ = call("run", config, "--json")
    assert found == code
    events = [json.loads(line) for line in out.splitlines()]
    assert [event.pop("event") for event in events] == ["start", "notice", "end"]
    assert events[-1].pop("time") > 0
    assert events[-1] == last
    assert events[0]["sizes"]["batch_size"] == 2


# ----------------------------------------------------------------------------------------------------------- status, stop


def test_a_run_that_is_over(call, tmp_path):
    record = RunRecord(pid=4, attempt=2, experiment="e", trial="t", endpoints=["h:1"], started=3.0)
    code, out, _ = call("status", tmp_path, "--json")
    assert code == 3
    assert answer(out) == {"run_dir": str(tmp_path), "running": False, "record": None, "workers": []}
    write_record(tmp_path, record)
    assert answer(call("status", tmp_path, "--json")[1])["record"]["attempt"] == 2
    code, out, _ = call("stop", tmp_path, "--json")
    assert code == 0
    assert answer(out) == {"run_dir": str(tmp_path), "was_running": False, "running": False}


def test_status_of_a_failed_run_shows_the_first_cause(call, tmp_path):
    record = RunRecord(pid=4, attempt=1, experiment="e", trial="t", endpoints=[], started=3.0)
    write_record(tmp_path, record)
    assert "it failed" not in call("status", tmp_path)[1]
    failure = "master/0 failed\n\nZeroDivisionError: [red]\n\nIts log: master_0.log"
    write_record(tmp_path, msgspec.structs.replace(record, failure=failure))
    code, out, _ = call("status", tmp_path)
    assert code == 3
    assert out.endswith(f"\nit failed: {failure}\n")
    assert answer(call("status", tmp_path, "--json")[1])["record"]["failure"] == failure


def test_a_later_attempt_is_shown_with_its_own_start(tmp_path):
    about = {"pid": 4, "experiment": "e", "trial": "t", "endpoints": [], "started": 1000.0}
    first, second = RunRecord(attempt=1, **about), RunRecord(attempt=2, attempt_started=87_400.0, **about)
    assert [not_running(tmp_path, record).split(" begun ")[1] for record in (first, second)] == [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)) for began in (1000.0, 87_400.0)
    ]
    title = _view(tmp_path, second, Seen(training_of(tmp_path, second), [], None, at=87_410.0)).renderables[1].title
    assert title.endswith(", attempt 2, up 10 s")


def test_status_shows_the_newest_step_of_the_attempt(tmp_path):
    record = RunRecord(pid=4, attempt=2, experiment="e", trial="t", endpoints=[], started=3.0, total_steps=60)
    assert training_of(tmp_path, record).step == 0
    step = {"attempt": 2, "reward/mean": 0.25, "time/step_s": 2.0}
    lines = [
        {**step, "step": 50, "attempt": 1},
        {**step, "step": 20},
        {**step, "step": 21, "reward/mean": 0.5},
        {"step": 20, "attempt": 2, "eval/greedy_reward": 1.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text("x" * 300_000 + "\n" + text + '{"step": 22, "att')
    assert training_of(tmp_path, record).text() == "step 21/60, 35 %, 1:18 left, reward 0.500"
    first = msgspec.structs.replace(record, attempt=1, total_steps=0)  # written by an older release
    assert training_of(tmp_path, first).text() == "step 50/?, reward 0.250"
    assert training_of(tmp_path, first).left_s is None


# ----------------------------------------------------------------------------------------------------------------- prepare


def test_prepare(call, tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    make = tmp_path / "make.py"
    make.write_text(
        "import pathlib, sys\nprint('making')\nfolder = pathlib.Path(sys.argv[1])\nfolder.mkdir()\n"
        "(folder / 'config.json').write_text('{}')\n"
    )
    code, out, _ = call("prepare", file, f"prepare=python {make} {tmp_path / 'model'}", "--json")
    assert code == 0
    assert answer(out) == {"model_path": str(tmp_path / "model"), "made": True, "exit_code": 0}
    assert answer(call("prepare", file, "--json")[1])["made"] is False


# -------------------------------------------------------------------------------------------------------------------- logs


LINE = "2025-03-01 12:00:{:02d}.000 {:7} {}: {}\n"


@pytest.fixture
def logged(tmp_path):
    """A folder with the logs of two attempts."""
    for _ in range(2):
        begin_attempt(tmp_path)
    folder = tmp_path / "logs" / "attempt_2"
    (tmp_path / "logs" / "attempt_1" / "master_0.log").write_text(LINE.format(0, "INFO", "master/0", "of the first"))
    (folder / "master_0.log").write_text(
        LINE.format(1, "INFO", "master/0", "running")
        + LINE.format(5, "ERROR", "master/0", "failed because of [another]")
    )
    (folder / "rollout_worker_0.log").write_text(
        LINE.format(2, "WARNING", "rollout_worker/0", "slow")
        + LINE.format(3, "ERROR", "rollout_worker/0", "failed")
        + "Traceback (most recent call last):\n  File x\nValueError: the cause\n"
    )
    (folder / "etcd.log").write_text("")
    return tmp_path


def test_the_first_error_is_marked_and_repeated_at_the_end(logged, call):
    code, out, _ = call("logs", logged)
    assert code == 0
    shown = [re.sub(" +", " ", line).strip("─ ") for line in out.splitlines()]
    assert shown == [
        "2025-03-01",
        "12:00:01.000 INFO master/0: running",
        "12:00:02.000 WARNING rollout_worker/0: slow",
        "first error",
        "12:00:03.000 ERROR rollout_worker/0: failed",
        "Traceback (most recent call last):",
        "File x",
        "ValueError: the cause",
        "12:00:05.000 ERROR master/0: failed because of [another]",
        "the first error again (of 2)",
        "12:00:03.000 ERROR rollout_worker/0: failed",
        "Traceback (most recent call last):",
        "File x",
        "ValueError: the cause",
    ]


def test_logs_are_selected_by_process_level_and_attempt(logged, call):
    def shown(*words):
        code, out, _ = call("logs", logged, *words, "--json")
        assert code == 0
        *lines, end = map(json.loads, out.splitlines())
        assert end["event"] == "end"
        return [(line["worker"], line["text"].split("\n")[0]) for line in lines], end

    assert shown("master")[0] == [("master/0", "running"), ("master/0", "failed because of [another]")]
    assert shown("rollout_worker_0", "--level", "error")[0] == [("rollout_worker/0", "failed")]
    assert shown("--attempt", "1")[0] == [("master/0", "of the first")]
    assert shown("etcd") == (
        [],
        {"event": "end", "attempt": 2, "first_error": None, "counts": shown("etcd")[1]["counts"]},
    )
    last, end = shown("--tail", "1")
    assert last == [("master/0", "failed because of [another]")]
    assert end["first_error"]["text"].endswith("ValueError: the cause")  # although it is not in the tail
    assert end["counts"] == {"DEBUG": 0, "INFO": 1, "WARNING": 1, "ERROR": 2, "CRITICAL": 0}


def test_a_tail_still_shows_the_first_error(logged, call):
    _, out, _ = call("logs", logged, "--tail", 1)
    assert out.index("failed because of") < out.index("the first error again") < out.index("ValueError: the cause")


def test_missing_logs_are_reported(logged, call):
    code, out, _ = call("logs", logged, "rollout_worker/9")
    assert code == 1
    assert "there is no log of 'rollout_worker/9'" in out
    assert "etcd, master/0, rollout_worker/0" in out
    code, out, _ = call("logs", logged, "--attempt", 7)
    assert code == 1
    assert "attempts with logs: 1, 2" in out


def test_following_ends_with_the_run(logged, call, monkeypatch):
    """Between the first and the second read, the run writes its last words and ends."""
    lock = RunLock(logged)
    lock.acquire()

    def pause(seconds):
        with (logged / "logs" / "attempt_2" / "master_0.log").open("a") as file:
            file.write(LINE.format(9, "INFO", "master/0", "last words"))
        lock.release()

    monkeypatch.setattr("asyncrl.cli.commands.logs.time.sleep", pause)
    code, out, _ = call("logs", logged, "-f", "master", "--json")
    assert code == 0
    assert [json.loads(line).get("text") for line in out.splitlines()][:3] == [
        "running",
        "failed because of [another]",
        "last words",
    ]


def test_following_an_earlier_attempt_only_reads_it(logged, call):
    lock = RunLock(logged)
    lock.acquire()
    try:
        assert "of the first" in call("logs", logged, "-f", "--attempt", 1)[1]
    finally:
        lock.release()


def test_configs_of_a_dry_run_are_readable_by_the_group(config, call, tmp_path):
    call("run", config, "--dry-run")
    mode = os.stat(tmp_path / "runs" / "small" / "t0" / "dry_run" / "rollout_worker_0.yaml").st_mode
    assert mode & stat.S_IRGRP or not os.stat(config).st_mode & stat.S_IRGRP


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--every", "soon"], "--every soon: write a range of seconds, such as 5-15"),
        (
            ["--targets", "rolout_worker"],
            "'rolout_worker' is not a target; did you mean 'rollout_worker'? use one of master",
        ),
        (["--kinds", "murder"], "'murder' is unknown; use kill, stop, restart"),
        (["--phases", "noon"], "'noon' is unknown; use idle, generation"),
    ],
)
def test_invalid_chaos_options_are_refused_before_anything_starts(config, call, options, says):
    code, out, _ = call("chaos", config, *options)
    assert code == 2
    assert says in " ".join(out.split())


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_ends_early_gets_no_traceback(logged, options):
    """`asyncrl-launch logs RUN | head`: the other end of the pipe is closed before the first write."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "asyncrl.cli.main", "logs", str(logged), *options]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


# --------------------------------------------------------------------------------------------------------- ls, --version


def test_the_version_does_not_import_torch():
    code = "import sys; from asyncrl.cli.main import main\ntry: main(['--version'])\nfinally: assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    torch = importlib.metadata.version("torch")
    assert out == f"asyncrl {asyncrl.__version__}, Python {platform.python_version()}, torch {torch}\n"


@pytest.fixture
def runs(tmp_path):
    """Four runs of two experiments: complete, running, interrupted, damaged."""
    for at, name in enumerate(("sort/done", "sort/now", "maths/cut", "maths/bad")):
        run_dir = tmp_path / name
        begin_attempt(run_dir)
        experiment, trial = name.split("/")
        record = RunRecord(
            pid=1, attempt=1, experiment=experiment, trial=trial, endpoints=[], started=1e9 + at, total_steps=60
        )
        write_record(run_dir, record)
        with JsonLinesWriter(run_dir / METRICS_FILE) as writer:
            writer.write({"step": 0, "eval/mean": 0.0})
            for step in range(1, 8):
                writer.write({"step": step, "reward/mean": step / 10})
    (tmp_path / "sort" / "done" / "summary.json").write_text("{}")
    with (tmp_path / "maths" / "cut" / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": 8, "rew')
    (tmp_path / "maths" / "bad" / "run.json").write_bytes(b'{"pid"')
    (tmp_path / "no_run").mkdir()
    lock = RunLock(tmp_path / "sort" / "now")
    lock.acquire()
    yield tmp_path
    lock.release()


def test_ls_lists_every_run(runs, call, monkeypatch):
    code, out, _ = call("ls", runs, "--json")
    assert code == 0
    entries = answer(out)["runs"]
    assert [(entry["name"], entry["state"]) for entry in entries] == [
        ("maths/bad", "damaged"),
        ("sort/done", "complete"),
        ("sort/now", "running"),
        ("maths/cut", "interrupted"),
    ]
    assert "run.json cannot be read" in entries[0]["problem"]
    for entry in entries[1:]:
        assert (entry["step"], entry["total_steps"]) == (7, 60)
        assert entry["reward"] == pytest.approx(0.5)  # the mean of steps 3 to 7
        assert entry["run_dir"] == str(runs / entry["name"])
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call("ls", runs)
    assert code == 0
    assert re.search(r"sort/done +. complete +. 7/60 +. 0\.500 +. 2001-09-09", out)
    assert "maths/bad" in out


def test_ls_accepts_an_experiment_or_a_run_and_defaults_to_runs(runs, call, monkeypatch, tmp_path_factory):
    names = [entry["name"] for entry in answer(call("ls", runs / "sort", "--json")[1])["runs"]]
    assert names == ["sort/done", "sort/now"]
    assert len(answer(call("ls", runs / "sort" / "done", "--json")[1])["runs"]) == 1
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert call("ls")[0] == 2
    (elsewhere / "runs").symlink_to(runs)
    assert "sort/done" in call("ls")[1]
    assert "no runs" in call("ls", runs / "no_run")[1]


def test_ls_does_not_contact_other_hosts(runs, call):
    record = RunRecord(pid=1, attempt=1, experiment="sort", trial="now", endpoints=["h:1"], started=1.0, host="far")
    write_record(runs / "sort" / "now", record)
    entries = answer(call("ls", runs / "sort", "--json")[1])["runs"]
    assert [entry["state"] for entry in entries] == ["on far", "complete"]
