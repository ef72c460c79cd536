"""Generation and training take turns on two hosts, and a third host only generates. Responses go on over the turns."""

import re
import signal

import pytest
from hosts_run import status_of
from safetensors.torch import load_file

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.testing.runs import assert_nothing_left, journal, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.replays import (
    AHEAD,
    LOGPROB_ERROR,
    check_versions_of_tokens,
    final_weights,
    largest_difference,
    recording_of_lineage,
    trained_apart,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]
LIMIT_S = 400
STEPS = 10


def test_each_hosts_devices_are_shared_and_the_updates_equal_those_on_devices_of_their_own(
    hosts, run_on_hosts, tmp_path
):
    config = make_tiny_run(tmp_path / "tiny")
    weights = run_directory(load_experiment(config)) / "weights"
    weights.mkdir(parents=True)
    assert hosts[2].run(["mount", "-t", "tmpfs", "tmpfs", str(weights)]).returncode == 0  # hides the trainer's folder
    run = run_on_hosts(
        config,
        "allocation=transformers.d3@0-2+d2@0-1",
        f"weights.fetch_dir={tmp_path / 'memory'}",
        f"train.max_steps={STEPS}",
        "checkpoint.every_steps=1",
        *AHEAD,
    )
    run.launcher.wait_for_step(3, LIMIT_S)
    where = {name: worker["host"] for name, worker in status_of(run, hosts[0]).items()}
    assert [where[f"generation_server/{index}"] for index in range(3)] == hosts.addresses
    assert [where[f"model_worker/{index}"] for index in range(2)] == hosts.addresses[:2]
    run.launcher.worker("model_worker/1").send_signal(signal.SIGKILL)
    assert run.launcher.wait(LIMIT_S) == 0, run.launcher.output() + run.outputs()

    assert audit(run.run_dir).problems == []
    assert [stretch.attempt for stretch in audit(run.run_dir).lineage] == [1, 2]
    assert train_steps(run.run_dir)[-1]["step"] == STEPS
    assert max(step["offpolicy/head_max"] for step in train_steps(run.run_dir)) == 2
    assert {event["attempt"] for event in journal(run.run_dir) if event["event"] == "trained"} == {1, 2}
    logs = run.run_dir / "logs" / "attempt_1"
    assert re.search(r"weights \S+ fetched from 10\.77\.0\.1", (logs / "generation_server_2.log").read_text())
    recorded = recording_of_lineage(run.run_dir, tmp_path / "recorded")
    metas = [group.header.meta for group in recorded]
    assert sum(min(meta.version_start) < max(meta.version_end) for meta in metas) > 3
    with trained_apart(config, tmp_path / "recorded", *AHEAD) as apart:
        assert apart.wait(LIMIT_S) == 0, apart.output()
        weights = final_weights(run.run_dir)
        assert largest_difference(weights, final_weights(apart.run_dir)) < 1e-5
        assert largest_difference(weights, load_file(config.parent / "model" / "model.safetensors")) > 1e-3
        assert check_versions_of_tokens(recorded, apart.run_dir) > 10 * LOGPROB_ERROR
    assert_nothing_left(run.run_dir)
