"""`asyncrl-launch profile` on a run: the profile of its steps on the clock of its timeline, and the ways in which none is made."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import main as cli
from asyncrl.protocol.names import Names
from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, make_tiny_run, train_steps
from tests.support.live_runs import entry

LIMIT_S = 100.0  # for one wait, on a busy machine

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]


def begin(run: RunHandle) -> subprocess.Popen[str]:
    """Begin a profile. Returns when the request is in name resolve."""
    # A test run in the background of a script inherits that SIGINT is ignored
    command = ["env", "--default-signal=INT", sys.executable, "-m", "asyncrl.cli.main", "profile", str(run.run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run.wait_until(lambda: requested(run), "a profile was requested", LIMIT_S)
    return process


def requested(run: RunHandle) -> bool:
    try:
        return bool(entry(run, Names.profile_request))
    except LookupError:
        return False


def test_train_steps_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_tiny_run(tmp_path / "tiny")
    overrides = ["allocation=transformers.d1+d2", "trace=true", "train.num_epochs=1000", "train.max_steps=0"]
    overrides.append("train.peak_flops=1e12")  # a CPU has no peak of its own
    with launch(config, f"fileroot={tmp_path}", "runtime.frozen_after_s=0", *overrides) as run:
        run.wait_for_step(1, LIMIT_S)
        assert cli.main(["profile", str(run.run_dir), "--json", "--out", str(tmp_path / "out")]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["answer"]["failed"], told["file"]) == ([], str(tmp_path / "out" / "profile.json"))
        events = json.loads(Path(told["file"]).read_text())["traceEvents"]
        processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        assert {"master/0", "model_worker/0", "model_worker/1", "generation_server/0"} <= set(processes.values())
        for pid in (pid for pid, name in processes.items() if name.startswith("model_worker/")):
            own = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
            calls = [event for event in own if event["name"] == "actor_train"]  # spans of the timeline
            backward = [event for event in own if "Backward" in event["name"]]  # events of the profiler
            assert calls
            assert backward
            assert any(call["ts"] <= event["ts"] <= call["ts"] + call["dur"] for call in calls for event in backward)

        steps = train_steps(run.run_dir)
        assert all(0 < step["mfu/actor_train"] < 1 for step in steps)
        assert all(step["time/publish_s"] > 0 for step in steps)
        assert min(step[f"memory/model_worker_{index}_bytes"] for step in steps for index in (0, 1)) > 1e7
        for kind, num_devices in (("train", 2), ("generated", 1)):
            rates = [step[f"throughput/{kind}_tokens_per_s"] for step in steps]
            assert sum(rates) > 0
            assert rates == [num_devices * step[f"throughput/{kind}_tokens_per_s_per_device"] for step in steps]

        server = run.worker("generation_server/0")
        server.suspend()  # no step ends any more
        assert cli.main(["profile", str(run.run_dir), "--limit", "1"]) == 1
        assert "within 1 s; --limit allows more" in " ".join(capsys.readouterr().out.split())
        assert not requested(run)
        interrupted = begin(run)
        assert cli.main(["profile", str(run.run_dir)]) == 1  # one at a time
        assert "another profile is being recorded" in " ".join(capsys.readouterr().out.split())
        interrupted.send_signal(signal.SIGINT)
        interrupted.communicate(timeout=LIMIT_S)
        assert interrupted.returncode == 130
        assert not requested(run)
        server.resume()
        run.wait_for_step(train_steps(run.run_dir)[-1]["step"] + 3, LIMIT_S)
        assert [path.name for path in (run.run_dir / "profile").iterdir()] == [
            f"attempt_1_step_{told['answer']['first_step']}"
        ]

        server.suspend()
        left = begin(run)
        run.signal(signal.SIGINT)
        run.wait_for_output("a second signal kills all processes", LIMIT_S)
        run.signal(signal.SIGINT)
        output, _ = left.communicate(timeout=LIMIT_S)
        assert left.returncode == 1
        assert "the run ended before the profile was complete" in " ".join(output.split())
        assert run.wait(LIMIT_S) == 130, run.output()
    assert cli.main(["profile", str(run.run_dir)]) == 3
    assert_nothing_left(run.run_dir)
