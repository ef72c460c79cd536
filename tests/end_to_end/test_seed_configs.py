"""The configs of the systems that asyncrl follows, on CPU cores: they run, learn and audit clean. Limits count steps, not time."""

from pathlib import Path

import pytest
from whole_runs import ROOT, assert_each_prompt_trained_once, launch_sorter

from asyncrl.testing.runs import RunHandle, assert_nothing_left, evaluations, train_steps
from asyncrl.weights.lineage import audit

STEPS, BATCH = 36, 64

pytestmark = [pytest.mark.timeout(1800), pytest.mark.release]


def run_to_the_end(name: str, sorter: Path, fileroot: Path) -> RunHandle:
    """36 steps of the config. They reach the rewards of the quickstart."""
    config = ROOT / "configs" / f"{name}.yaml"
    with launch_sorter(sorter, fileroot, f"train.max_steps={STEPS}", config=config) as run:
        assert run.wait(1500) == 0, run.output()
    start, *_, end = evaluations(run.run_dir)
    assert start["eval/sampled_reward"] < 0.25
    assert end["eval/sampled_reward"] >= 0.80
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
    assert_nothing_left(run.run_dir)
    return run


def test_fully_asynchronous_on_workers_of_their_own(sorter: Path, tmp_path: Path) -> None:
    """Relax: reference, proximal policy and advantages beside the trainer, eight parts of each batch."""
    run = run_to_the_end("fully_async_cpu", sorter, tmp_path)
    steps = train_steps(run.run_dir)
    assert {step["streaming/parts"] for step in steps} == {8}
    assert {step["actor/optimizer_steps"] for step in steps} == {4}
    assert all(0 <= step["arriving/actor_inf_share"] <= 1 for step in steps)
    assert max(step["arriving/ref_inf_share"] for step in steps) > 0


def test_four_servers_and_two_stages_times_two_replicas(sorter: Path, tmp_path: Path) -> None:
    """AReaL: d4p1m1 generates, d2p2m1 trains."""
    run = run_to_the_end("d4_d2p2_cpu", sorter, tmp_path)
    assert all(step["redistribution/bytes"] > 0 for step in train_steps(run.run_dir))
