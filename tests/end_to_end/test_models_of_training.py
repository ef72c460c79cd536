"""Runs with further models and data on the training side: supervised texts, a moving average of the actor, several reward
models."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from whole_runs import launch_sorter

from asyncrl.testing.runs import evaluations, train_steps
from asyncrl.weights.versions import tensor_files

STEPS = 20

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


def test_a_run_learns_from_supervised_texts(sorter: Path, tmp_path: Path) -> None:
    """All rewards are scaled to 0, so the texts alone change the model. The evaluation's rewards are not scaled."""
    with launch_sorter(
        sorter,
        tmp_path,
        "train.ppo.reward_scaling=0",
        f"train.ptx.texts.path={sorter / 'data' / 'train.jsonl'}",
        "train.ptx.coef=1",
        "train.ptx.batch_size=256",
        f"train.max_steps={STEPS}",
        f"eval.every_steps={STEPS}",
        "allocation=transformers.d1+d2",
    ) as run:
        assert run.wait(600) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert step["advantages/std"] == 0
        assert step["actor/loss"] == pytest.approx(step["actor/ptx_loss"], rel=1e-5)
    start, *_, end = evaluations(run.run_dir)
    assert steps[-1]["actor/ptx_loss"] < 0.6 * steps[0]["actor/ptx_loss"]
    assert start["eval/sampled_reward"] < 0.25
    assert end["eval/sampled_reward"] >= start["eval/sampled_reward"] + 0.2


DECAY = 0.75


def test_the_average_of_the_actor_is_saved_evaluated_and_resumed(sorter: Path, tmp_path: Path) -> None:
    """The run is interrupted and resumed from its checkpoint. The saved average is that of the weights after each step, in float32,
    beginning with the initial weights."""
    last = 6
    config = (
        f"train.ema.decay={DECAY}",
        f"train.max_steps={last}",
        "train.batch_size=16",
        "eval.num_prompts=64",
        "eval.every_steps=0",
        "weights.keep=100",
        "allocation=transformers.d1+d2",
    )
    with launch_sorter(sorter, tmp_path, *config) as run:
        run.wait_for_step(2, limit_s=300)
        run.signal(signal.SIGINT)
        assert run.wait(120) == 130, run.output()
    with launch_sorter(sorter, tmp_path, *config) as run:
        assert run.wait(600) == 0, run.output()
    assert "attempt_2" in {path.name for path in (run.run_dir / "tensorboard").iterdir()}
    folder = run.run_dir / "weights" / "actor"
    actor = [read(sorted(folder.glob(f"*-v{version:08d}"))[-1]) for version in range(last + 2)]
    average = {name: tensor.float() for name, tensor in actor[0].items()}
    for weights in actor[1 : last + 1]:
        average = {name: DECAY * tensor + (1 - DECAY) * weights[name].float() for name, tensor in average.items()}
    saved = read(run.run_dir / "checkpoints" / "final-ema")
    assert saved.keys() == average.keys()
    for name, tensor in average.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-7)
        assert torch.equal(actor[last + 1][name], saved[name])  # the servers got the average to evaluate it
    assert any((saved[name] - tensor).abs().max() > 1e-4 for name, tensor in actor[last].items())
    *_, of_actor, of_average = evaluations(run.run_dir)
    assert (of_actor["step"], of_average["step"]) == (last, last)
    assert of_actor["eval/greedy_version_min"] == last
    assert of_average["eval/ema_greedy_version_min"] == of_average["eval/ema_sampled_version_max"] == last + 1
    assert of_average["eval/ema_greedy_num_prompts"] == 64
    assert "ema_greedy" in run.output()


SCALES = {"good": 1.0, "bad": -0.5}


def test_a_run_learns_from_the_weighted_scores_of_two_reward_models(sorter: Path, tmp_path: Path) -> None:
    """The scores of two arbitrary models, on workers of their own. The run raises the one and lowers the other."""
    for seed, name in enumerate(SCALES):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(sorter / "model", num_labels=1)
        model.score.weight.data.normal_(std=0.2)
        model.save_pretrained(tmp_path / name)
    with launch_sorter(
        sorter,
        tmp_path,
        *(f"train.reward_models.{name}={{path: {tmp_path / name}, scale: {SCALES[name]}}}" for name in SCALES),
        f"train.max_steps={STEPS}",
        "eval.prompts=null",
        "allocation=transformers.d1+d1+reward_good:d1+reward_bad:d1",
    ) as run:
        assert run.wait(600) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        scores = sum(scale * step[f"reward/model_mean_{name}"] for name, scale in SCALES.items())
        assert step["reward/shaped_mean"] == pytest.approx(step["reward/mean"] + scores, abs=1e-4)
        assert {"time/rew_inf_good_s", "time/rew_inf_bad_s"} <= step.keys()
    first, end = (sum(step["reward/shaped_mean"] for step in part) / 3 for part in (steps[:3], steps[-3:]))
    assert end > first + 0.5


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in tensor_files(folder) for name, tensor in load_file(file).items()}
