"""A run without progress: the launcher reports the waits of each process, and writes the stacks."""

import json
import re
import signal

import pytest

from asyncrl.cli import main as cli
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run

LIMIT_S = 100.0  # for one wait, on a busy machine
WORKERS = {"generation_server/0", "gserver_manager/0", "master/0", "model_worker/0", "rollout_worker/0"}

pytestmark = pytest.mark.timeout(240)


def stacks_of(run, capsys):
    capsys.readouterr()
    assert cli.main(["status", str(run.run_dir), "--stacks", "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["stacks"]}


def test_a_standstill_is_reported_and_all_stacks_are_in_the_logs(tmp_path, capsys):
    config = make_tiny_run(tmp_path / "tiny")
    overrides = ["train.num_epochs=1000", "train.max_steps=0", "runtime.watchdog_after_s=4", "runtime.frozen_after_s=0"]
    with launch(config, f"fileroot={tmp_path}", *overrides) as run:
        step = run.wait_for_step(1, LIMIT_S)["step"]
        working = stacks_of(run, capsys)
        assert working.keys() == {*WORKERS, "launcher"}
        assert {entry["state"] for entry in working.values()} == {"answered"}, working
        assert "watch_over" in working["launcher"]["threads"]
        for name in WORKERS:
            assert f"Task {name}:status" in working[name]["tasks"]
            assert f"Task {name}:run" in working[name]["tasks"]

        server = run.worker("generation_server/0")
        server.suspend()
        run.wait_for_output("is stopped (SIGSTOP, or a debugger)", LIMIT_S)
        run.wait_for_output("Stacks of all processes are in their logs", LIMIT_S)
        told = re.findall(r"no train step for \d+ s\n(?:  .*\n)+Stacks of all processes", run.output())[-1]
        assert {line.split(":")[0] for line in told.splitlines()[1:-1]} == {f"  {name}" for name in WORKERS}
        assert re.search(r"  master/0: waits for .* from .* \(\d+ of \d+ s\)", told)
        assert re.search(
            r"  generation_server/0: has sent no heartbeat for \d+ s, is stopped \(SIGSTOP, or a debugger\)", told
        )
        # a rollout waits for its response or, if the server was frozen during an update, for a server that may serve
        assert re.search(r"waits for (the next piece|a server that may serve) from generation_server/0 \(", told)
        logs = {name: run.run_dir / "logs" / "attempt_1" / f"{name.replace('/', '_')}.log" for name in WORKERS}

        def in_all_logs():
            # a slow machine may have had a report before the server was suspended
            told = all("its stacks, because there is no train step for " in log.read_text() for log in logs.values())
            return told and "and cannot answer" in logs["generation_server/0"].read_text()

        run.wait_until(in_all_logs, "stacks were in all logs", LIMIT_S)
        assert "Thread 0x" in logs["master/0"].read_text()
        assert "it is stopped (SIGSTOP, or a debugger) and cannot answer" in logs["generation_server/0"].read_text()
        found = stacks_of(run, capsys)
        assert found["generation_server/0"]["state"] == "stopped"
        assert found["master/0"]["state"] == "answered"
        assert cli.main(["status", str(run.run_dir), "--stacks"]) == 0
        assert "== generation_server/0, process" in capsys.readouterr().out

        server.resume()
        run.wait_for_step(step + 2, LIMIT_S)
        capsys.readouterr()
        assert cli.main(["logs", str(run.run_dir), "--json"]) == 0
        entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {entry["worker"] for entry in entries if "its stacks, because" in entry.get("text", "")} == WORKERS
        run.signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130, run.output()
    assert_nothing_left(run.run_dir)
