"""The quickstart's task without servers and rollout workers: in each step the model worker generates a batch and trains on it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import launch_sorter, trained_events, trained_prompts

from asyncrl.testing.runs import (
    RunHandle,
    assert_nothing_left,
    evaluations,
    launch,
    make_tiny_run,
    metrics,
    train_steps,
)

STEPS, BATCH, GROUP, NUM_EVAL = 24, 64, 8, 512

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def run(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    # So large a decay leaves the average at the initial weights
    overrides = (
        "mode=sync",
        "allocation=d1",
        f"train.max_steps={STEPS}",
        "eval.every_steps=12",
        "train.ema.decay=0.999999999",
    )
    with launch_sorter(sorter, tmp_path_factory.mktemp("sync"), *overrides) as run:
        assert run.wait(800) == 0, run.output()
        assert_nothing_left(run.run_dir)
        yield run


@pytest.mark.release
def test_reward_climbs(run: RunHandle) -> None:
    start, middle, end, _ = evaluations(run.run_dir)
    assert start["eval/sampled_reward"] < 0.25
    rewards = [record["reward/mean"] for record in train_steps(run.run_dir)]
    assert len(rewards) == STEPS
    assert sum(rewards[17:22]) / 5 >= 0.65  # steps 18 to 22
    assert end["eval/greedy_reward"] > middle["eval/greedy_reward"] > start["eval/greedy_reward"]
    for record, step in ((start, 0), (middle, STEPS // 2), (end, STEPS)):
        for mode in ("sampled", "greedy"):
            assert record["step"] == record[f"eval/{mode}_version_min"] == record[f"eval/{mode}_version_max"] == step
            assert (record[f"eval/{mode}_num_prompts"], record[f"eval/{mode}_num_failed"]) == (NUM_EVAL, 0)


@pytest.mark.release
def test_the_average_of_the_actor_is_evaluated(run: RunHandle) -> None:
    start, *_, average = evaluations(run.run_dir)
    for name in ("greedy_reward", "greedy_length"):
        assert average[f"eval/ema_{name}"] == start[f"eval/{name}"]
    assert (average["step"], average["eval/ema_sampled_num_prompts"]) == (STEPS, NUM_EVAL)


@pytest.mark.release
def test_batches_are_the_prompts_in_order_and_never_old(run: RunHandle) -> None:
    prompts = trained_prompts(run.run_dir)
    assert prompts == [(0, position) for position in range(STEPS * BATCH)]
    for event in trained_events(run.run_dir):
        assert {version for group in event["groups"] for pair in group["versions"] for version in pair} == {
            event["step"] - 1
        }
    for record in train_steps(run.run_dir):
        assert record["offpolicy/head_max"] == record["offpolicy/tail_max"] == 0
        assert record["time/actor_gen_s"] > 0
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["mode"], summary["sequences"], summary["rejected"]) == ("sync", STEPS * BATCH * GROUP, {})


@pytest.mark.release
def test_what_was_started_and_is_left(run: RunHandle) -> None:
    logs = {path.stem for path in (run.run_dir / "logs" / "latest").glob("*_*.log")}
    assert not {name for name in logs if name.startswith(("generation_server", "rollout_worker", "gserver"))}
    assert not (run.run_dir / "weights").exists()  # no process serves weights
    assert (run.run_dir / "checkpoints" / "final" / "model.safetensors").is_file()


REWARD = """
def reward(prompt, completion, answer):
    if int(prompt) % 3 == 0:
        raise RuntimeError("not a multiple of three, please")
    return float(len(set(completion)))
"""


@pytest.mark.full
def test_rejected_prompts_are_replaced_in_the_batch(tmp_path: Path) -> None:
    """Two data ranks generate with the weights of an actor that two tensor ranks train. The run has two epochs of seven prompts."""
    config = make_tiny_run(tmp_path, num_prompts=7)
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = ("mode=sync", "allocation=m2+actor_gen:d2", "train.max_steps=0", "train.num_epochs=2")
    with launch(config, *overrides, "prompts.shuffle=false", "train.batch_size=3", "train.save_every_steps=2") as run:
        assert run.wait(200) == 0, run.output()
        assert_nothing_left(run.run_dir)
        events = trained_events(run.run_dir)
        good = [(epoch, position) for epoch in range(2) for position in range(7) if position % 3]
        assert trained_prompts(run.run_dir) == good
        assert [len(event["groups"]) for event in events] == [3, 3, 2]
        assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == {"reward_error": 6}
        last = metrics(run.run_dir)[-1]
        assert last["rejected/reward_error"] == 6
        saved = sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())
        assert saved == ["final", "recover", "step_00000002"]
        steps = train_steps(run.run_dir)
        # The sampling weights are the trained weights: they are copied after each step.
        assert [record["actor/behav_weight"] for record in steps] == pytest.approx([1.0] * 3, abs=1e-5)
        assert min(record["actor/grad_norm"] for record in steps) > 0


@pytest.mark.full
def test_too_many_rejections_end_the_run(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path, num_prompts=100)
    (tmp_path / "reward.py").write_text("def reward(prompt, completion, answer):\n    return float('nan')\n")
    with launch(config, "mode=sync", "allocation=d1") as run:
        assert run.wait(200) == 1, run.output()
        assert "were rejected" in run.output()
        assert "reward_not_finite" in run.output()
        assert "model_worker_*.log" in run.output()
        assert_nothing_left(run.run_dir)


@pytest.mark.release
def test_greedy_weights_are_those_of_eta_0_with_shared_devices(tmp_path: Path) -> None:
    """With sampling the two runs draw other tokens: servers draw in the order in which requests come."""
    config = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text("def reward(prompt, completion, answer):\n    return float(int(prompt) % 5)\n")
    greedy = ("rollout.sampling.greedy=true", "rollout.group_size=1", "train.ppo.advantage_norm=batch")
    training = ("train.batch_size=4", "train.max_steps=4", "train.optimizer={lr: 2.0e-3, warmup_steps: 1, eps: 1.0e-5}")
    shared = ("allocation=transformers.d1@0+d1@0", "manager.max_head_offpolicyness=0")
    found = []
    for trial, overrides in (("workers", ("mode=sync", "allocation=d1")), ("servers", shared)):
        with launch(config, *greedy, *training, *overrides, f"trial={trial}") as run:
            assert run.wait(200) == 0, run.output()
            found.append(load_file(run.run_dir / "checkpoints" / "final" / "model.safetensors"))
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert max(float((tensor - start[name]).abs().max()) for name, tensor in found[0].items()) > 1e-4
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
