"""When several processes have failed, the launcher finds the first failure and describes it."""

import signal

import pytest

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan
from asyncrl.launch.supervisor.children import Child, first_cause
from asyncrl.protocol.status import WorkerStatus

CONFIG = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""


@pytest.fixture
def specs(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return {spec.name: spec for spec in plan(load_experiment(file), attempt=1, num_prompts=100)}


@pytest.fixture
def child(specs, tmp_path):
    def make(name, *, code=None, ended=0.0, error="", error_time=0.0):
        log = tmp_path / f"{specs[name].file_stem}.log"
        log.write_text("".join(f"line {number} of {name}\n" for number in range(100)))
        made = Child(specs[name], process=None, log=log, pipe=-1, lease=None, returncode=code, ended=ended)
        if error:
            made.status = WorkerStatus(
                worker=name, pid=1, attempt=1, state="error", time=error_time, progress=1, error=error
            )
        return made

    return make


def test_the_earliest_error_is_reported_even_if_another_process_exits_first(child):
    text = first_cause(
        [
            child("master/0", code=1, ended=11.0, error="Traceback\nLostError: gone\n", error_time=10.2),
            child("model_worker/0", code=None, error="Traceback\nZeroDivisionError: why\n", error_time=10.0),
            child("rollout_worker/0"),
            child("gserver_manager/0", code=0, ended=9.0),
        ]
    )
    assert text.startswith("model_worker/0 failed\n\nTraceback\nZeroDivisionError: why\n\nIts log: ")
    assert text.endswith("\nFailed after it: master/0")


def test_an_error_returned_by_a_remote_call_is_attributed_to_the_callee(child):
    passed_on = (
        "Traceback\nasyncrl.RemoteCallError: model_worker/0: OSError: disk full\n\nTraceback at model_worker/0:\n"
    )
    master = child("master/0", code=1, ended=10.1, error=passed_on, error_time=10.0)
    text = first_cause([master, child("model_worker/0", error="Traceback\nOSError: disk full\n", error_time=10.3)])
    assert text.startswith("model_worker/0 failed\n\nTraceback\nOSError: disk full\n\nIts log: ")
    assert text.endswith("Failed after it: master/0")
    assert first_cause([master, child("model_worker/0")]).startswith("master/0 failed")  # no error from the callee


@pytest.mark.parametrize(("ended", "first"), [(10.4, "model_worker/0"), (10.6, "master/0")])
def test_a_kill_counts_as_earlier_if_it_is_noticed_shortly_after_another_error(child, ended, first):
    text = first_cause(
        [
            child("master/0", code=1, ended=10.1, error="ConnectionLost", error_time=10.0),
            child("model_worker/0", code=-signal.SIGKILL, ended=ended),
        ]
    )
    assert text.startswith(first)


def test_an_abort_is_not_assumed_to_be_earlier(child):
    """A communication library aborts its own process after a peer has failed, so the abort is not the first cause."""
    text = first_cause(
        [
            child("master/0", code=1, ended=10.1, error="the cause", error_time=10.0),
            child("model_worker/0", code=-signal.SIGABRT, ended=10.2),
        ]
    )
    assert text.startswith("master/0 failed")


def test_a_process_without_an_error_report_is_described_by_the_end_of_its_log(child):
    text = first_cause([child("rollout_worker/0", code=3, ended=1.0)])
    assert text.startswith(
        "rollout_worker/0 ended with exit code 3; its log ends with\n\nline 75 of rollout_worker/0\n"
    )
    assert "line 99 of rollout_worker/0\n\nIts log: " in text
    killed = first_cause([child("rollout_worker/0", code=-signal.SIGSEGV, ended=1.0)])
    assert killed.startswith("rollout_worker/0 was killed by signal SIGSEGV; its log ends with")
    by_hand = first_cause([child("rollout_worker/0", code=-signal.SIGKILL, ended=1.0)])
    assert "signal SIGKILL (by a person or another process, or because memory ran out: see `dmesg`)" in by_hand


def test_a_missing_log_is_mentioned(child):
    silent = child("rollout_worker/0", code=3, ended=1.0)
    silent.log.unlink()
    assert "(the log cannot be read: " in first_cause([silent])
