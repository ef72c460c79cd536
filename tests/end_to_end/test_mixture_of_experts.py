"""Runs of a mixture of experts on two data ranks with split experts: routers are replayed, the quickstart's task is learned, and a
killed run goes on in one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_resume import TOLERANCE, kill_everything
from whole_runs import (
    DETERMINISTIC,
    LEARNABLE,
    ROOT,
    Gate,
    assert_each_prompt_trained_once,
    launch_sorter,
    resumed,
)

from asyncrl.testing.runs import assert_nothing_left, evaluations, launch, make_tiny_run, train_steps
from asyncrl.weights.checkpoints import list_checkpoints
from tests.support.families import make_family
from tests.support.replays import final_weights

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]

STEPS, BATCH, LIMIT_S = 8, 8, 400.0
SPLIT = "allocation=transformers.d2+d2e2"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = make_tiny_run(tmp_path / "task", num_prompts=STEPS * BATCH)
    torch.manual_seed(0)
    make_family(tmp_path / "task" / "model", "qwen3_moe", hidden_size=32, num_hidden_layers=3, mlp_only_layers=[1])
    return made


def test_the_quickstart_learns_with_a_mixture_of_experts(sorter_of_experts: Path, tmp_path: Path) -> None:
    with launch_sorter(sorter_of_experts, tmp_path, config=ROOT / "configs" / "quickstart_moe.yaml") as run:
        assert run.wait(2 * LIMIT_S) == 0, run.output()
        start, *_, end = evaluations(run.run_dir)
        assert start["eval/greedy_reward"] < 0.6
        assert end["eval/greedy_reward"] >= 0.9
        assert_each_prompt_trained_once(run.run_dir, 60, 64)
        steps = train_steps(run.run_dir)
        assert max(step["offpolicy/head_max"] for step in steps) > 0
        # Updates move some choices of the routers; the sampler's are replayed
        assert 0 < max(step["actor/other_experts_token_share"] for step in steps) < 0.5
        assert_nothing_left(run.run_dir)


@pytest.mark.parametrize(
    "how",
    [
        [SPLIT],
        ["allocation=transformers.d2+d2", "weights.full_every=2", "weights.keep=9"],
        ["allocation=transformers.d2+d2e2", "weights.transport=broadcast"],
        ["allocation=transformers.d2+c2", "train.streaming=true", "train.algorithm=ppo"],
    ],
    ids=["split", "deltas", "broadcast", "context, streaming and a critic"],
)
def test_two_servers_return_the_experts_that_two_ranks_replay(config: Path, tmp_path: Path, how: list[str]) -> None:
    settings = [*how, "train.routes=replay", "manager.max_head_offpolicyness=0", f"train.batch_size={BATCH}"]
    with launch(config, *settings, f"train.max_steps={STEPS // 2}", f"fileroot={tmp_path}") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert_nothing_left(run.run_dir)
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS // 2
    for step in steps:
        assert abs(step["actor/behav_approx_kl"]) < 1e-6
        # Both compute in float32: a choice differs only if two experts are as good
        assert step["actor/other_experts_share"] < 1e-3
        assert step["actor/other_experts_token_share"] < 1e-2
    assert any(step["actor/grad_norm"] > 0 for step in steps)


def test_a_killed_run_of_split_experts_goes_on_in_one_rank(config: Path, tmp_path: Path) -> None:
    gate = Gate(config, BATCH, LEARNABLE)
    exact = [
        *DETERMINISTIC,
        f"train.batch_size={BATCH}",
        f"train.max_steps={STEPS}",
        "train.ppo.advantage_norm=batch",
        "train.routes=replay",
        "checkpoint.every_steps=2",
        Gate.OVERRIDE,
        f"fileroot={tmp_path}",
    ]
    with launch(config, *exact, "allocation=transformers.d1+d1", "trial=whole") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        expected = final_weights(run.run_dir)
    with gate.shut(STEPS - 1), launch(config, *exact, SPLIT, "trial=killed") as run:
        run.wait_until(lambda: len(list_checkpoints(run.run_dir)) >= 2, "the second checkpoint", LIMIT_S)
        kill_everything(run)
        killed = run.run_dir
    assert not (killed / "summary.json").exists()
    with resumed(killed, "allocation=transformers.d1+d1") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert "going on from step" in run.output()
    found = final_weights(killed)
    assert found.keys() == expected.keys()
    assert max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items()) <= TOLERANCE
