"""A whole run with adapters and generation.interrupt=finish: responses finish under the version with which they began, while others
run under newer ones. A server is killed at work meanwhile, and the other one in an update."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.in_update import die_in_update, has_struck, largest_logprob_error, moved_tickets
from tests.support.live_runs import freeze_at_work

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 400.0
ETA = 2


def ran_beside_a_newer_version(run_dir: Path) -> bool:
    """Whether a server sampled with a version after it had sampled with a newer one."""
    for journal in (run_dir / "journal").glob("generation_server_*"):
        lines = [
            (float(str(line["time"])), WeightVersion.parse(str(line["version"]))) for line in read_json_lines(journal)
        ]
        versions = [version for _, version in sorted(lines)]
        if versions != sorted(versions):
            return True
    return False


def test_responses_finish_under_the_version_with_which_they_began(tmp_path: Path) -> None:
    """peft computes the logprob of every token again, with the adapter that the token names."""
    with launch(
        make_tiny_run(tmp_path / "tiny"),
        "allocation=transformers.d2+d1",
        "train.lora.rank=4",
        "train.optimizer.lr=0.02",
        "train.batch_size=4",
        "train.max_steps=0",
        f"manager.max_head_offpolicyness={ETA}",
        "manager.lease_s=12",
        "manager.update_timeout_s=8",
        "generation.interrupt=finish",
        "generation.num_blocks=256",
        "rollout.group_size=4",
        "rollout.sampling.max_new_tokens=160",
        "rollout.new_tokens_per_chunk=96",
        "record.trajectories=true",
        "weights.keep=1000",
        env=die_in_update(tmp_path / "fault", server=1, version=4),
    ) as run:
        run.wait_for_step(2, LIMIT_S)
        (victim,), _ = freeze_at_work(run, lambda: [psutil.Process(run.worker("generation_server/0").pid)])
        victim.kill()
        run.wait_until(lambda: moved_tickets(run.run_dir), "responses went on elsewhere", LIMIT_S)
        run.wait_until(lambda: has_struck(tmp_path / "fault"), "an update to version 4 or later had begun", LIMIT_S)
        run.wait_for_step(len(train_steps(run.run_dir)) + ETA + 1, LIMIT_S)
        run.wait_until(lambda: ran_beside_a_newer_version(run.run_dir), "two versions ran side by side", LIMIT_S)
        run.signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130, run.output()
        steps = train_steps(run.run_dir)
        assert max(step["offpolicy/head_max"] for step in steps) > 0
        assert max(step["offpolicy/head_max"] for step in steps) <= ETA
        assert all(step["time/servers_updating_s"] == 0 for step in steps)
        assert largest_logprob_error(run.run_dir) < 1e-4
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)
