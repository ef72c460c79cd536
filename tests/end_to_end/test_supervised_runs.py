"""Processes of a run are killed and frozen one after the other. Each is restarted, and the run ends as if undisturbed. In one run
restarting does not help."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from whole_runs import Gate, starting

from asyncrl.cli import main as cli
from asyncrl.launch.program import load_process_config
from asyncrl.launch.rundir import read_record
from asyncrl.testing.runs import RunHandle, assert_nothing_left, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit

LIMIT_S = 150.0  # limit for one wait, on a busy machine
BATCH, STEPS, CHECKPOINT_EVERY = 2, 120, 5
AHEAD = 18  # steps that the run may make before the next strike; it is granted five times, and 5 * AHEAD < STEPS
WORKERS = [
    "generation_server/0",
    "gserver_manager/0",
    "master/0",
    "model_worker/0",
    "model_worker/1",
    "rollout_worker/0",
]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=1000)


@pytest.fixture
def gate(config: Path) -> Iterator[Gate]:
    gate = Gate(config, BATCH, "float(len(set(completion)))")
    yield gate
    gate.open()


@pytest.fixture
def start(config: Path, tmp_path: Path) -> Iterator[Callable[..., RunHandle]]:
    every = f"checkpoint.every_steps={CHECKPOINT_EVERY}"
    with starting(config, f"fileroot={tmp_path}", f"train.batch_size={BATCH}", every) as start_run:
        yield start_run


def newest_step(run: RunHandle) -> int:
    steps = train_steps(run.run_dir)
    return int(steps[-1]["step"]) if steps else 0


def goes_on(run: RunHandle, gate: Gate | None = None, num_steps: int = CHECKPOINT_EVERY + 1) -> None:
    """Wait until `num_steps` more steps are recorded, repeated ones included. The gate, if given, first allows AHEAD more steps."""
    before = len(train_steps(run.run_dir))
    if gate is not None:
        gate.let(newest_step(run) + AHEAD)
    run.wait_until(lambda: len(train_steps(run.run_dir)) >= before + num_steps, f"{num_steps} more steps", LIMIT_S)


def is_replaced(run: RunHandle, name: str, pid: int) -> psutil.Process:
    """Wait for the process that replaces the one with this pid, and return it. The old one must be gone."""

    def find() -> psutil.Process | None:
        try:
            process = run.worker(name)
        except AssertionError:
            return None
        return process if process.pid != pid else None

    found = run.wait_until(find, f"there was another {name}", LIMIT_S)
    assert not psutil.pid_exists(pid)
    return found


def strike(run: RunHandle, name: str, number: int) -> psutil.Process:
    pid = run.worker(name).pid
    os.kill(pid, number)
    return is_replaced(run, name, pid)


def test_whoever_is_killed_or_frozen_the_run_goes_on(
    start: Callable[..., RunHandle], gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    gate.let(AHEAD)
    run = start(
        Gate.OVERRIDE,
        "allocation=transformers.d1+d2",
        f"train.max_steps={STEPS}",
        "runtime.frozen_after_s=15",  # longer than a busy machine delays a process
        "runtime.max_restarts=5",
        "manager.lease_s=6",
        "manager.heartbeat_s=0.5",
    )
    run.wait_for_step(2, LIMIT_S)
    strike(run, "rollout_worker/0", signal.SIGKILL)
    goes_on(run, gate)
    assert "rollout_worker/0 was killed by signal SIGKILL" in run.output()
    strike(run, "gserver_manager/0", signal.SIGKILL)
    goes_on(run, gate)
    others = {name: run.worker(name).pid for name in WORKERS if name.startswith(("gener", "gserver", "rollout"))}

    trainer_group = {name: run.worker(name).pid for name in ("master/0", "model_worker/0", "model_worker/1")}
    os.kill(trainer_group["model_worker/1"], signal.SIGKILL)
    for name, pid in trainer_group.items():
        is_replaced(run, name, pid)
    goes_on(run, gate)
    assert {name: run.worker(name).pid for name in others} == others
    is_seen_in_its_second_attempt(run, capsys)

    strike(run, "rollout_worker/0", signal.SIGSTOP)
    goes_on(run, gate)
    assert "rollout_worker/0 froze (it had sent no heartbeat for " in " ".join(run.output().split())
    resolved = load_process_config(run.run_dir / "configs" / "attempt_2" / "rollout_worker_0.yaml")
    assert resolved.worker.attempt == 2

    run.worker("gserver_manager/0").terminate()  # a requested end is a clean exit; the run is not over
    strike(run, "master/0", signal.SIGKILL)
    gate.open()
    assert run.wait(LIMIT_S) == 0, run.output()

    told = " ".join(run.output().split())
    assert told.count("the trainer group (model_worker/0, model_worker/1, master/0) is started again") == 2
    assert "the trainer group resumes from step" in told
    second = r"gserver_manager/0 ended before the run was over; it is started again (at once|in 1 s) \(2 of 5\)"
    assert re.search(second, told)  # the expected pause depends on whether it had lived for a minute
    assert newest_step(run) == STEPS
    found = audit(run.run_dir)
    assert found.problems == []
    assert (found.complete, found.steps, found.trained) == (True, STEPS, STEPS * BATCH)
    assert [stretch.attempt for stretch in found.lineage] == [1, 2, 3]
    assert_nothing_left(run.run_dir)


def is_seen_in_its_second_attempt(run: RunHandle, capsys: pytest.CaptureFixture[str]) -> None:
    """`status` and `logs` report all processes, including those started in the first attempt."""
    record = read_record(run.run_dir)
    assert record is not None
    assert (record.attempt, record.pid, record.total_steps) == (2, run.popen.pid, STEPS)

    def seen() -> bool:
        assert cli.main(["status", str(run.run_dir), "--json"]) == 0
        workers = {worker["worker"]: worker for worker in json.loads(capsys.readouterr().out)["workers"]}
        attempts = {name: worker["attempt"] for name, worker in workers.items()}
        expected = {name: 2 if name.startswith(("master", "model_worker")) else 1 for name in WORKERS}
        if attempts != expected:  # the launcher reports them once a second
            return False
        assert workers["gserver_manager/0"]["restarts"] == 1
        return bool(workers["master/0"]["restarts"] == 1)

    run.wait_until(seen, "`status` told of the second attempt", LIMIT_S)
    assert cli.main(["logs", str(run.run_dir), "--json"]) == 0
    *lines, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert end["attempt"] == 2
    assert {line["worker"] for line in lines} >= set(WORKERS)
    log = run.run_dir / "logs" / "latest" / "rollout_worker_0.log"
    assert log.readlink() == Path("../attempt_1/rollout_worker_0.log")
    assert not (run.run_dir / "logs" / "latest" / "master_0.log").is_symlink()


def test_too_often_ends_with_the_first_cause_and_how_to_go_on(start: Callable[..., RunHandle]) -> None:
    run = start("train.max_steps=0", "train.num_epochs=1000", "runtime.max_restarts=1", "manager.lease_s=6")
    run.wait_for_step(CHECKPOINT_EVERY, LIMIT_S)
    run.wait_until(lambda: list((run.run_dir / "checkpoints" / "recover").glob("a*")), "a checkpoint", LIMIT_S)
    strike(run, "rollout_worker/0", signal.SIGKILL)
    goes_on(run)
    before = {name: run.worker(name).pid for name in WORKERS if name != "model_worker/1"}
    os.kill(before["rollout_worker/0"], signal.SIGSEGV)
    for name, pid in before.items():
        is_replaced(run, name, pid)
    goes_on(run)
    os.kill(run.worker("rollout_worker/0").pid, signal.SIGKILL)
    assert run.wait(LIMIT_S) == 1
    told = " ".join(run.output().split())
    assert "everything is started again in 1 s, once" in told
    first, tried, last, remedy = (
        told.index(text)
        for text in (
            "failed: rollout_worker/0 was killed by signal SIGKILL",
            "rollout_worker/0 was killed by signal SIGKILL (by a person or another process, or because memory ran "
            "out: see `dmesg`): rollout_worker/0 started again (1 of 1)",
            "rollout_worker/0 was killed by signal SIGSEGV: everything started again",
            f"To go on from the newest checkpoint: asyncrl-launch resume {run.run_dir}",
        )
    )
    assert first < tried < last < remedy
    assert_nothing_left(run.run_dir)
    assert audit(run.run_dir).problems == []
