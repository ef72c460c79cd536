"""Generation servers are killed and frozen in whole runs: the run goes on, no sample is lost and no token appears twice.

The test kills one server in mid-generation. A fault injected into another server kills it in the middle of an update, as it opens
the new version's tensors. Each trained token is checked against the weights that its label names.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from whole_runs import assert_each_prompt_trained_once, assert_nobody_left_behind, starting, trained_events

from asyncrl.cli import main as cli
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, assert_nothing_left, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.in_update import die_in_update, has_struck, largest_logprob_error, moved_tickets
from tests.support.live_runs import freeze_at_work, serves_newer

LIMIT_S = 400.0
LEASE_S = 12.0  # a rollout worker may be delayed for this long on a busy machine, and keeps its tickets
BATCH, GROUP, ETA, MAX_NEW_TOKENS = 4, 4, 1, 96

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=4000)


@pytest.fixture
def start(config: Path, tmp_path: Path) -> Iterator[Callable[..., RunHandle]]:
    settings = (
        f"fileroot={tmp_path}",
        "train.max_steps=0",
        f"train.batch_size={BATCH}",
        f"rollout.group_size={GROUP}",
        f"rollout.sampling.max_new_tokens={MAX_NEW_TOKENS}",
        "generation.num_blocks=256",
        f"manager.max_head_offpolicyness={ETA}",
        "record.trajectories=true",
        "weights.verify_logprobs=true",
        "weights.keep=1000",
        "runtime.frozen_after_s=0",  # manager and clients must detect the frozen server here, not the launcher
    )
    with starting(config, *settings) as start_run:
        yield start_run


def stop(run: RunHandle) -> int:
    """End the run. Return the number of train steps."""
    run.signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, run.output()
    assert_nothing_left(run.run_dir)
    return len(train_steps(run.run_dir))


def left_for_dead(run: RunHandle) -> set[str]:
    """Tickets whose requests left a server because the manager declared it dead."""
    log = (run.run_dir / "logs" / "attempt_1" / "rollout_worker_0.log").read_text()
    return set(
        re.findall(
            r"ticket (\S+): lost generation_server/0 \(the gserver manager reports that the server is dead\)", log
        )
    )


def server_0(run: RunHandle) -> list[psutil.Process]:
    return [psutil.Process(run.worker("generation_server/0").pid)]


def test_two_servers_one_killed_one_killed_in_an_update_one_frozen(
    start: Callable[..., RunHandle], tmp_path: Path
) -> None:
    run = start(
        "allocation=transformers.d2+d1",
        f"manager.lease_s={LEASE_S}",
        "manager.heartbeat_s=0.5",
        "manager.update_timeout_s=8",
        env=die_in_update(tmp_path / "fault", server=1, version=8),
    )
    run.wait_for_step(3, LIMIT_S)
    (victim,), before = freeze_at_work(run, lambda: server_0(run))
    victim.kill()
    run.wait_for_output("generation_server/0 was killed by signal SIGKILL", LIMIT_S)
    run.wait_until(lambda: has_struck(tmp_path / "fault"), "an update to version 8 or later had begun", LIMIT_S)
    run.wait_for_output("generation_server/1 was killed by signal SIGKILL", LIMIT_S)
    for server in (0, 1):
        serves_newer(run, server, before)
    serves_newer(run, 1, str(WeightVersion(1, 7)))
    killed = run.wait_until(lambda: moved_tickets(run.run_dir), "responses went on elsewhere", LIMIT_S)

    already = left_for_dead(run)  # server 0 was frozen before its kill, so it may have been declared dead already
    (frozen,), before = freeze_at_work(run, lambda: server_0(run))
    run.wait_until(lambda: left_for_dead(run) - already, "clients left the frozen server", LIMIT_S)
    step = len(train_steps(run.run_dir))
    run.wait_for_step(step + 3, LIMIT_S)  # much shorter than rollout.request_timeout_s, which is ten minutes
    frozen.resume()
    serves_newer(run, 0, before)

    step = len(train_steps(run.run_dir))
    run.wait_for_step(step + ETA + 1, LIMIT_S)  # every sample that survived the fault is trained by now
    num_steps = stop(run)
    assert_each_prompt_trained_once(run.run_dir, num_steps, BATCH)
    assert_nobody_left_behind(run.run_dir, ETA)
    assert moved_tickets(run.run_dir) > killed
    assert largest_logprob_error(run.run_dir, moved_tickets(run.run_dir)) < 1e-4
    updates = (run.run_dir / "logs" / "attempt_1" / "generation_server_0.log").read_text()
    assert updates.count("verified: logprobs of the check's text and of 12 decoded tokens differ") >= 3


@pytest.mark.release
def test_the_only_server_is_waited_for_and_too_many_deaths_end_the_run(
    start: Callable[..., RunHandle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(
        "runtime.max_restarts=2",
        "checkpoint.every_s=0",  # the second attempt starts from step 0, however long the first took
        env=die_in_update(tmp_path / "fault", server=0, version=6),
    )
    run.wait_for_step(2, LIMIT_S)
    (victim,), _ = freeze_at_work(run, lambda: server_0(run))
    victim.kill()
    run.wait_for_output("it is started again at once (1 of 2)", LIMIT_S)
    # The server dies in the update to version 6. The delay before its restart depends on whether it had lived for a minute.
    again = r"generation_server/0 .*; it is started again (at once|in 1 s) \(2 of 2\)"
    run.wait_until(lambda: re.search(again, run.output()), "its second restart was told", LIMIT_S)
    assert has_struck(tmp_path / "fault")
    run.wait_for_step(10, LIMIT_S)

    def seen_in_status() -> bool:
        code = cli.main(["status", str(run.run_dir)])  # exit code 1: name resolve did not answer in time
        return code == 0 and "running, restart 2" in " ".join(capsys.readouterr().out.split())

    run.wait_until(seen_in_status, "`status` told of the restarts", LIMIT_S)
    run.worker("generation_server/0").kill()
    run.wait_for_output("everything is started again in 2 s, once", LIMIT_S)
    run.wait_until(lambda: trained_events(run.run_dir, 2), "a step of the second attempt", LIMIT_S)
    run.worker("generation_server/0").kill()
    assert run.wait(LIMIT_S) == 1
    told = " ".join(run.output().split())
    assert "failed: generation_server/0 was killed by signal SIGKILL" in told
    assert "generation_server/0 started again (2 of 2)" in told
    assert "everything started again" in told
    assert_nothing_left(run.run_dir)
    assert_each_prompt_trained_once(run.run_dir, len(trained_events(run.run_dir)), BATCH)
    assert audit(run.run_dir).problems == []
    assert largest_logprob_error(run.run_dir, moved_tickets(run.run_dir)) < 1e-4
