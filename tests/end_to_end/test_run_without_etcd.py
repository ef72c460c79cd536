"""A run survives etcd outages: etcd killed for half a minute, frozen for longer than the lease time, and restarted without data."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from whole_runs import Gate, assert_each_prompt_trained_once

from asyncrl.testing.runs import RunHandle, assert_nothing_left, train_steps
from tests.support.etcd_server import EtcdServer
from tests.support.paced_run import PROMPT_TOKENS, launch_paced, make_paced_run
from tests.support.paced_workers import Pace

STEPS, BATCH, ETA = 60, 4, 2
AHEAD = 14  # steps that the run may make before it waits for the test's next action
DOWN_S, FROZEN_S, LEASE_S = 30.0, 20.0, 10.0
LIMIT_S = 200.0

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


def wait_for_more_steps(run: RunHandle, gate: Gate) -> None:
    """Wait until several versions have been trained, published, loaded and used for generation."""
    newest = train_steps(run.run_dir)[-1]["step"]
    gate.let(newest + AHEAD)
    run.wait_for_step(newest + 2 * ETA + 2, LIMIT_S)


def test_a_run_goes_on_through_all_that_its_etcd_may_do(tmp_path: Path) -> None:
    config = make_paced_run(
        tmp_path / "run", num_prompts=STEPS * BATCH, batch_size=BATCH, group_size=2, servers=2, slots=4
    )
    pace = Pace(tokens_per_s=400.0, step_s=0.3, prompt_tokens=PROMPT_TOKENS)
    gate = Gate(config, BATCH, "float(len(completion))")
    gate.let(AHEAD)
    with (
        EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", extra_args=["--unsafe-no-fsync"]) as etcd,
        launch_paced(
            config,
            pace,
            Gate.OVERRIDE,
            f"rollout.tasks.default.reward={gate.reward}",
            f"manager.max_head_offpolicyness={ETA}",
            f"name_resolve.endpoints=[{etcd.endpoint}]",
            f"runtime.lease_ttl_s={LEASE_S}",
        ) as run,
    ):
        run.wait_for_step(3, LIMIT_S)

        etcd.kill()
        time.sleep(DOWN_S)
        etcd.start(LIMIT_S)
        wait_for_more_steps(run, gate)

        os.kill(etcd.pid, signal.SIGSTOP)
        time.sleep(FROZEN_S)
        os.kill(etcd.pid, signal.SIGCONT)
        wait_for_more_steps(run, gate)

        etcd.kill()
        shutil.rmtree(etcd.data_dir)
        etcd.start(LIMIT_S)
        assert train_steps(run.run_dir)[-1]["step"] < STEPS - 2 * ETA  # the run is not over
        gate.open()
        assert run.wait(LIMIT_S) == 0, run.output()
    # No ticket was handed out a second time: the manager took no worker for dead because etcd was down.
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
    assert max(record["offpolicy/head_max"] for record in train_steps(run.run_dir)) <= ETA
    assert_nothing_left(run.run_dir)
