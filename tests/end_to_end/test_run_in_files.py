"""A run without etcd: its processes find each other in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import Gate, assert_each_prompt_trained_once

from asyncrl.testing.paced_run import PROMPT_TOKENS, launch_paced, make_paced_run
from asyncrl.testing.paced_workers import Pace
from asyncrl.testing.runs import assert_nothing_left, processes_of

STEPS, BATCH = 24, 4
LIMIT_S = 200.0

pytestmark = pytest.mark.timeout(900)


def test_a_run_in_files(tmp_path: Path) -> None:
    """And `status` finds it. Of two servers one is killed: the other one goes on with its groups."""
    config = make_paced_run(
        tmp_path / "run", num_prompts=STEPS * BATCH, batch_size=BATCH, group_size=2, servers=2, slots=4
    )
    pace = Pace(tokens_per_s=400.0, step_s=0.5, prompt_tokens=PROMPT_TOKENS)
    gate = Gate(config, BATCH, "float(len(completion))")
    gate.let(STEPS // 2)  # it must not be over before it was looked at
    overrides = (Gate.OVERRIDE, f"rollout.tasks.default.reward={gate.reward}", "name_resolve.backend=file")
    with launch_paced(config, pace, *overrides) as run:
        run.wait_for_step(2, LIMIT_S)
        assert "etcd" not in {process.name() for process in processes_of(run.run_dir)}
        entries = [path.name for path in (run.run_dir / "names" / "entries").iterdir()]
        assert any("generation_server%2F0" in name for name in entries)
        run.worker("generation_server/1").kill()
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl.launch.cli", "status", str(run.run_dir), "--json"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        workers = {worker["worker"] for worker in json.loads(done.stdout)["workers"]}
        assert {"master/0", "gserver_manager/0", "generation_server/0"} <= workers
        gate.open()
        assert run.wait(LIMIT_S) == 0, run.output()
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
    assert_nothing_left(run.run_dir)
    assert not (run.run_dir / "names").exists()
